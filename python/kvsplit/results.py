# SPDX-License-Identifier: MIT
"""The one schema of measured results, and its append-only file.

A row is one measurement (memory, speed or quality) of one configuration. Fields that llama-bench has keep
its names; the rest says what was asked, what ran, and where it came from.
"""

from __future__ import annotations

import csv
import dataclasses
import itertools
import json
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, Iterable, Iterator, List, Optional, Sequence, Tuple, Union, get_type_hints

from kvsplit.errors import CacheFolderError, ResultError

SCHEMA = 1
KINDS = ("memory", "speed", "quality", "bandwidth")


@dataclass
class Provenance:
    """Where a row comes from; the same for all rows of a run."""

    run_id: str
    kvsplit_version: str
    lock: str  # name and version of the pinned release
    source_sha256: str
    patches_sha256: str
    command: str
    model_filename: str
    model_sha256: str
    python: str
    platform: str
    cpu_info: str = ""
    gpu_info: str = ""
    backends: str = ""
    model_type: str = ""
    model_size: Optional[int] = None
    model_n_params: Optional[int] = None
    unpatched: Optional[bool] = None  # the library is the pinned release without patches
    library_sha256: str = ""  # over the libraries that computed
    environment: str = ""  # variables that were set for this configuration, NAME=VALUE
    system_info: str = ""  # CPU features that the library uses, as llama.cpp prints them


@dataclass
class Row:
    """One measurement. Fields of other kinds stay None, but a quality row may carry the memory of its cache.

    Sizes are in bytes, times in ns, speeds in tokens per second, KL divergences in nats.
    """

    kind: str
    config: str  # label, for example K8V4
    kvq_key: str  # what was asked, canonical
    kvq_val: str
    type_k: str  # what ran, read back; several types joined by +
    type_v: str
    provenance: Provenance
    schema: int = SCHEMA
    test_time: str = ""
    layer_types: Optional[List[List[Any]]] = None  # [layers, K, V] of each run of layers that are alike

    # memory
    n_ctx: Optional[int] = None
    kv_bytes: Optional[int] = None  # allocated
    kv_bytes_expected: Optional[int] = None  # computed from the metadata
    kv_bytes_f16: Optional[int] = None
    saving: Optional[float] = None  # 1 - kv_bytes / kv_bytes_f16
    bits_per_value: Optional[float] = None
    swa_full: Optional[bool] = None
    layer_rotation: Optional[List[List[int]]] = None  # [layers, K, V], sizes of the Hadamard matrices, 0: none
    backend_prefill: Optional[str] = None
    backend_decode: Optional[str] = None

    # speed
    n_prompt: Optional[int] = None
    n_gen: Optional[int] = None
    n_depth: Optional[int] = None
    n_batch: Optional[int] = None
    n_ubatch: Optional[int] = None
    n_threads: Optional[int] = None
    n_gpu_layers: Optional[int] = None
    flash_attn: Optional[int] = None
    avg_ns: Optional[float] = None
    stddev_ns: Optional[float] = None
    avg_ts: Optional[float] = None
    stddev_ts: Optional[float] = None
    median_ts: Optional[float] = None
    samples_ns: Optional[List[float]] = None
    samples_ts: Optional[List[float]] = None
    tokens_ns: Optional[List[List[float]]] = None  # of each sample, time of each decoded token
    busy_elsewhere: Optional[List[float]] = None  # of each sample, share of the machine that other work took
    peak_rss: Optional[int] = None  # of the process, bytes

    # bandwidth of the machine's memory, tries; a copy counts as read and written
    read_bytes_per_s: Optional[List[float]] = None
    copy_bytes_per_s: Optional[List[float]] = None

    # quality, against f16 of the same build
    text: Optional[str] = None
    text_sha256: Optional[str] = None
    ppl_ctx: Optional[int] = None
    chunks: Optional[int] = None
    ppl: Optional[float] = None
    ppl_se: Optional[float] = None
    ppl_base: Optional[float] = None
    ppl_ratio: Optional[float] = None
    ppl_ratio_se: Optional[float] = None
    kld: Optional[float] = None
    kld_se: Optional[float] = None
    kld_median: Optional[float] = None
    kld_p999: Optional[float] = None
    kld_max: Optional[float] = None
    top1: Optional[float] = None  # share of tokens, 0..1
    top1_se: Optional[float] = None
    kld_floor: Optional[float] = None  # f16 against itself
    kld_chunks: Optional[List[float]] = None  # mean of each chunk
    finite: Optional[bool] = None  # False: attention gave NaN or infinity, and nothing else was measured
    seconds: Optional[float] = None  # that the measurement took

    def validate(self) -> None:
        """Check what can be checked.

        Raises:
            ResultError: names the field.
        """
        if self.schema != SCHEMA:
            raise ResultError(f"schema: {self.schema}, this version reads {SCHEMA}")
        if self.kind not in KINDS:
            raise ResultError(f"kind: {self.kind!r} is none of {', '.join(KINDS)}")
        needed: Dict[str, Tuple[str, ...]] = {
            "memory": ("n_ctx", "kv_bytes", "kv_bytes_f16", "saving", "bits_per_value"),
            "speed": ("n_prompt", "n_gen", "n_depth", "n_threads", "samples_ts", "median_ts"),
            "quality": ("text", "text_sha256", "ppl_ctx", "chunks", "ppl", "ppl_se"),
            "bandwidth": ("n_threads", "read_bytes_per_s", "copy_bytes_per_s"),
        }
        unmeasured = ("ppl", "ppl_se") if self.finite is False else ()
        for name in needed[self.kind]:
            if getattr(self, name) is None and name not in unmeasured:
                raise ResultError(f"{name}: a {self.kind} row needs it")
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            for v in value if isinstance(value, list) else [value]:
                if isinstance(v, float) and not math.isfinite(v):
                    raise ResultError(f"{f.name}: {v} is no number that was measured")
        size, full = self.kv_bytes, self.kv_bytes_f16
        computed = 1 - size / full if size is not None and full else None
        if computed is not None and self.saving is not None and abs(self.saving - computed) > 1e-9:
            raise ResultError("saving: is not 1 - kv_bytes / kv_bytes_f16")
        if self.finite is False and (self.ppl is not None or self.kld is not None):
            raise ResultError("finite: is false, and yet PPL or KLD was measured")
        if self.samples_ts is not None and (not self.samples_ts or min(self.samples_ts) <= 0):
            raise ResultError("samples_ts: every sample must be above 0")

    def to_json(self) -> Dict[str, Any]:
        """One flat object, without what doesn't apply."""
        flat = dataclasses.asdict(self)
        flat.update(flat.pop("provenance"))
        return {k: v for k, v in flat.items() if v is not None}

    @classmethod
    def from_json(cls, data: Dict[str, Any]) -> Row:
        """The inverse of :meth:`to_json`.

        Raises:
            ResultError: a field is unknown or missing.
        """
        own = {f.name for f in dataclasses.fields(cls)} - {"provenance"}
        prov = {f.name for f in dataclasses.fields(Provenance)}
        unknown = sorted(set(data) - own - prov)
        if unknown:
            raise ResultError(f"unknown field: {', '.join(unknown)}")
        try:
            row = cls(
                provenance=Provenance(**{k: v for k, v in data.items() if k in prov}),
                **{k: v for k, v in data.items() if k in own},
            )
        except TypeError as e:
            raise ResultError(f"a row lacks a field: {e}") from None
        row.validate()
        return row


def runs(pairs: Iterable[Sequence[Any]]) -> List[List[Any]]:
    """``[n, *pair]`` for each run of equal pairs."""
    return [[len(list(group)), *pair] for pair, group in itertools.groupby(tuple(p) for p in pairs)]


PathLike = Union[str, "os.PathLike[str]"]


class Writer:
    """Appends rows to a JSONL file, each flushed at once: what was measured isn't lost with what follows."""

    def __init__(self, path: PathLike) -> None:
        self.path = Path(path)
        try:
            self._f = open(self.path, "a", encoding="utf-8")  # noqa: SIM115 - closed by close()
        except OSError as e:
            raise CacheFolderError(f"{self.path} can't be written: {e.strerror or e}") from e

    def write(self, row: Row) -> None:
        """Validate and append.

        Raises:
            ResultError: names the configuration, the kind and the field.
        """
        try:
            row.validate()
        except ResultError as e:
            raise ResultError(f"{row.config}, {row.kind}: {e}") from None
        self._f.write(json.dumps(row.to_json(), ensure_ascii=False) + "\n")
        self._f.flush()

    def close(self) -> None:
        """Close the file."""
        self._f.close()

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def read(path: PathLike) -> Iterator[Row]:
    """Rows of a JSONL file.

    Raises:
        ResultError: names the line.
    """
    with open(path, encoding="utf-8") as f:
        for i, line in enumerate(f, 1):
            if not line.strip():
                continue
            try:
                yield Row.from_json(json.loads(line))
            except ValueError as e:
                raise ResultError(f"{path}, line {i}: {e}") from None


@dataclass
class Summary:
    """All that was measured of one configuration: a line of the table, the CSV and the chart."""

    config: str
    kvq_key: str
    kvq_val: str
    type_k: str
    type_v: str
    bits_per_value: Optional[float] = None
    n_ctx: Optional[int] = None
    kv_bytes: Optional[int] = None
    saving: Optional[float] = None
    decode_ts: Optional[float] = None
    decode_samples: List[float] = field(default_factory=list)
    prefill_ts: Optional[float] = None
    prefill_samples: List[float] = field(default_factory=list)
    n_depth: Optional[int] = None
    peak_rss: Optional[int] = None
    ppl: Optional[float] = None
    ppl_se: Optional[float] = None
    kld: Optional[float] = None
    kld_se: Optional[float] = None
    top1: Optional[float] = None
    kld_floor: Optional[float] = None

    @property
    def kv_mib(self) -> Optional[float]:
        """KV cache in MiB."""
        return None if self.kv_bytes is None else self.kv_bytes / 2**20


def summarize(rows: Iterable[Row]) -> List[Summary]:
    """One line per configuration, in the order of first appearance."""
    out: Dict[Tuple[str, str], Summary] = {}
    for r in rows:
        if r.kind == "bandwidth":  # of the machine, not of a configuration
            continue
        key = (r.kvq_key, r.kvq_val)
        s = out.setdefault(key, Summary(r.config, r.kvq_key, r.kvq_val, r.type_k, r.type_v))
        if r.kind == "memory":
            s.bits_per_value, s.n_ctx, s.kv_bytes, s.saving = r.bits_per_value, r.n_ctx, r.kv_bytes, r.saving
        elif r.kind == "speed":
            s.n_depth = r.n_depth
            if r.peak_rss is not None:
                s.peak_rss = max(s.peak_rss or 0, r.peak_rss)
            if r.n_gen:
                s.decode_ts, s.decode_samples = r.median_ts, list(r.samples_ts or [])
            else:
                s.prefill_ts, s.prefill_samples = r.median_ts, list(r.samples_ts or [])
        else:
            if r.kv_bytes is not None:
                s.bits_per_value, s.n_ctx, s.kv_bytes, s.saving = r.bits_per_value, r.n_ctx, r.kv_bytes, r.saving
            s.ppl, s.ppl_se, s.kld, s.kld_se, s.top1, s.kld_floor = (
                r.ppl,
                r.ppl_se,
                r.kld,
                r.kld_se,
                r.top1,
                r.kld_floor,
            )
    return list(out.values())


def write_csv(path: PathLike, summaries: Iterable[Summary]) -> None:
    """The summary as CSV; samples joined by blanks."""
    names = [f.name for f in dataclasses.fields(Summary)]
    with open(path, "x", encoding="utf-8", newline="") as f:
        w = csv.writer(f)
        w.writerow(names)
        for s in summaries:
            row = []
            for n in names:
                v = getattr(s, n)
                row.append(" ".join(map(str, v)) if isinstance(v, list) else "" if v is None else v)
            w.writerow(row)


def field_types() -> Dict[str, Any]:
    """Names and types of all fields of a row, provenance included; for documentation and tests."""
    hints = get_type_hints(Row)
    hints.pop("provenance")
    return {**hints, **get_type_hints(Provenance)}
