# SPDX-License-Identifier: MIT
"""The one schema of measured results, and its append-only file.

A row is one measurement of one configuration, of the kind that :data:`KINDS` names. Fields that llama-bench has
keep its names; the rest says what was asked, what ran, and where it came from.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import itertools
import json
import math
import os
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import (
    Any,
    Dict,
    Iterable,
    Iterator,
    List,
    Optional,
    Sequence,
    Set,
    Tuple,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from kvsplit import stats
from kvsplit.errors import CacheFolderError, KVSplitError, ResultError, UsageError, printable, shown, why

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

SCHEMA = 1

#: Kinds of rows, each with the fields that it can't do without.
KINDS: Dict[str, Tuple[str, ...]] = {
    "memory": ("n_ctx", "kv_bytes", "kv_bytes_f16", "saving", "bits_per_value"),
    "speed": ("n_prompt", "n_gen", "n_depth", "n_threads", "samples_ts", "median_ts"),
    "quality": ("text", "text_sha256", "ppl_ctx", "chunks", "ppl", "ppl_se"),
    "retrieval": ("seq_len", "text_sha256", "needle_depths", "needle_found", "needle_trials"),
    "continuation": ("seq_len", "text_sha256", "n_gen", "same_tokens"),
    "layer": ("seq_len", "text_sha256", "layer", "k_nse", "v_nse", "logit_rmse", "output_nse"),
    "bandwidth": ("n_threads", "read_bytes_per_s", "copy_bytes_per_s"),
}


#: Fields that count or measure something: nothing of it can be below 0.
_COUNTS = frozenset({
    "seq_len", "n_ctx", "kv_bytes", "kv_bytes_expected", "kv_bytes_f16", "bits_per_value", "compute_bytes", "round",
    "n_prompt", "n_gen", "n_depth", "n_batch", "n_ubatch", "n_threads", "peak_rss", "ppl_ctx", "chunks", "ppl_se",
    "ppl_ratio_se", "kld_se", "ppl_change_se", "top1", "top1_se", "seconds", "needle_depths", "needle_found",
    "needle_trials", "same_tokens", "layer", "samples_ns", "avg_ts", "stddev_ts", "k_nse", "v_nse", "logit_rmse",
    "output_nse", "head_logit_rmse", "head_output_nse", "read_bytes_per_s", "copy_bytes_per_s",
})  # fmt: skip


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
    device: Optional[str] = None  # that was asked for: auto, cpu, or a name
    seq_len: Optional[int] = None  # tokens that the whole measurement stays within, as it was asked
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
    compute_bytes: Optional[int] = None  # buffers for intermediate results, over all backends
    backend_prefill: Optional[str] = None
    backend_decode: Optional[str] = None

    # speed
    round: Optional[int] = None  # of the rounds in which configurations take turns, from 0; None: all are in this row
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
    nll_chunks: Optional[List[float]] = None  # mean negative log-likelihood of each chunk, nats
    ppl_change: Optional[float] = None  # PPL / PPL of f16 - 1, paired by chunk
    ppl_change_se: Optional[float] = None
    finite: Optional[bool] = None  # False: attention gave NaN or infinity, and nothing else was measured
    seconds: Optional[float] = None  # that the measurement took

    # retrieval: a sentence with a number is hidden in a text of seq_len tokens, and the number asked for at its end
    needle_depths: Optional[List[float]] = None  # where, 0: at the start, 1: at the end
    needle_found: Optional[List[int]] = None  # of each depth, how many numbers came back without a mistake
    needle_trials: Optional[int] = None  # of each depth

    # continuation: greedy decoding beside that of f16; n_gen tokens after each prompt
    same_tokens: Optional[List[int]] = None  # of each prompt, tokens before the first that differs
    gaps: Optional[List[Optional[float]]] = None  # there, by how much f16's logit of its token beats the other's

    # layer: one layer's attention on what the cache stores, against f16; NSE is |error|^2 / |exact|^2
    layer: Optional[int] = None  # as a slice of a SPEC counts
    k_nse: Optional[float] = None  # of the stored keys
    v_nse: Optional[float] = None
    k_cos: Optional[float] = None  # mean cosine of a head's row with its exact one
    v_cos: Optional[float] = None
    logit_rmse: Optional[float] = None  # of the attention logits, relative to a constant shift of each query's
    output_nse: Optional[float] = None  # of the attention's output
    head_logit_rmse: Optional[List[float]] = None  # of each query head
    head_output_nse: Optional[List[float]] = None

    def validate(self) -> None:
        """Check what can be checked.

        Raises:
            ResultError: names the field.
        """
        if self.schema != SCHEMA:
            raise ResultError(f"schema: {short(self.schema)}, this version reads {SCHEMA}")
        if not isinstance(self.kind, str) or self.kind not in KINDS:
            raise ResultError(f"kind: {short(self.kind)} is none of {', '.join(KINDS)}")
        for part, hints in zip((self, self.provenance), _HINTS):
            for name, hint in hints.items():
                if not fits(getattr(part, name), hint):
                    raise ResultError(f"{name}: {short(getattr(part, name))} is no {_type_text(hint)}")
        for name in ("layer_types", "layer_rotation"):
            kind = str if name == "layer_types" else int
            for run in getattr(self, name) or []:
                if len(run) != 3 or not fits(run[0], int) or run[0] < 1 or not all(fits(x, kind) for x in run[1:]):
                    raise ResultError(f"{name}: must be a list of [layers, K, V]")
        unmeasured = ("ppl", "ppl_se") if self.finite is False else ()
        for name in KINDS[self.kind]:
            if getattr(self, name) is None and name not in unmeasured:
                raise ResultError(f"{name}: a {self.kind} row needs it")
        for f in dataclasses.fields(self):
            for v in _leaves(getattr(self, f.name)):
                if isinstance(v, float) and not math.isfinite(v):
                    raise ResultError(f"{f.name}: {v} is no number that was measured")
                if f.name in _COUNTS and v is not None and v < 0:
                    raise ResultError(f"{f.name}: {short(v)} is below 0")
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
            more = f" and {len(unknown) - 5} more" if len(unknown) > 5 else ""
            raise ResultError(f"unknown field: {', '.join(map(short, unknown[:5]))}{more}")
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


def _leaves(value: Any) -> Iterator[Any]:
    """What lists hold, however deep."""
    if isinstance(value, list):
        for v in value:
            yield from _leaves(v)
    else:
        yield value


#: Types of a row's fields, and of its provenance's.
_HINTS = [{k: v for k, v in get_type_hints(cls).items() if k != "provenance"} for cls in (Row, Provenance)]


#: Those that hold texts.
_TEXTS = [[k for k, v in hints.items() if "str" in str(v) or k == "layer_types"] for hints in _HINTS]


def fits(value: Any, hint: Any) -> bool:
    """True if a value is of a type. What stands for a number must be one that C's 64 bits can hold."""
    if hint is Any:
        return True
    if get_origin(hint) is Union:
        return any(fits(value, h) for h in get_args(hint))
    if get_origin(hint) is list:
        return isinstance(value, list) and all(fits(v, get_args(hint)[0]) for v in value)
    if isinstance(value, bool) or hint is bool:
        return isinstance(value, bool) and hint is bool
    if isinstance(value, int) and hint in (int, float):
        return -(2**63) <= value < 2**63
    return isinstance(value, hint)


def _type_text(hint: Any) -> str:
    """A type in words."""
    kinds = [h for h in get_args(hint) if h is not type(None)] if get_origin(hint) is Union else [hint]
    if get_origin(kinds[0]) is list:
        return "list of the right form"
    return {int: "whole number", float: "number", str: "text", bool: "true or false"}.get(kinds[0], str(kinds[0]))


def short(value: Any) -> str:
    """A value as messages show it."""
    text = shown(value, 1000)
    return text if len(text) <= 40 else text[:37] + "..."


def showable(row: Row) -> Row:
    """A row whose texts can be shown: see :func:`kvsplit.errors.printable`. The row itself keeps what it says."""

    def plain(value: Any) -> Any:
        if isinstance(value, list):
            return [plain(v) for v in value]
        return printable(value) if isinstance(value, str) else value

    def texts(part: Any, names: Iterable[str]) -> Dict[str, Any]:
        values = {n: getattr(part, n) for n in names}
        return {n: new for n, old in values.items() if (new := plain(old)) != old}

    row_changes, prov_changes = texts(row, _TEXTS[0]), texts(row.provenance, _TEXTS[1])
    if prov_changes:
        row_changes["provenance"] = dataclasses.replace(row.provenance, **prov_changes)
    return dataclasses.replace(row, **row_changes) if row_changes else row


def _once(pairs: List[Tuple[str, Any]]) -> Dict[str, Any]:
    """An object of JSON whose names differ: of two values nobody knows which one is meant."""
    out = dict(pairs)
    if len(out) != len(pairs):
        seen: Set[str] = set()
        name = next(n for n, _ in pairs if n in seen or seen.add(n))  # type: ignore[func-returns-value]
        raise ResultError(f"{short(name)} is there twice")
    return out


def parse_line(line: bytes) -> Dict[str, Any]:
    """The JSON object of a line that somebody may have made up.

    Raises:
        ResultError: it is no object, holds a name twice, or lists in lists without end.
        ValueError: it is no JSON at all; it may be cut.
    """
    try:
        data = json.loads(line.decode("utf-8"), object_pairs_hook=_once)
    except RecursionError:
        raise ResultError("lists lie in lists too deep") from None
    except UnicodeDecodeError as e:
        raise ValueError(f"byte {e.start} is no UTF-8") from None
    if not isinstance(data, dict):
        raise ResultError(f"{short(data)} is no object")
    return data


PathLike = Union[str, "os.PathLike[str]"]


_BEGIN = b'{"kind": "'  # of every row that is written


def _lines(data: bytes, path: Path) -> Tuple[List[Row], int]:
    """Rows, and how many bytes hold whole ones: a kill can only leave a last line without its end.

    Raises:
        ResultError: a line that has an end is no row; names it.
    """
    rows: List[Row] = []
    whole = 0
    for i, line in enumerate(data.splitlines(keepends=True), 1):
        complete = line.endswith(b"\n")
        try:
            if line.strip():
                rows.append(Row.from_json(parse_line(line)))
        except (ValueError, TypeError) as e:
            # half a row of ours; anything else is somebody's, and stays
            cut = not complete and not isinstance(e, ResultError) and line[: len(_BEGIN)] == _BEGIN[: len(line)]
            if cut:
                break
            raise ResultError(f"{path}, line {i}: {e}") from None
        whole += len(line)
    return rows, whole


def read_rows(path: Path) -> List[Row]:
    """Rows of a file that a run may still be writing.

    Raises:
        UsageError: it can't be read.
        ResultError: a line is no row.
    """
    try:
        data = path.read_bytes()
    except OSError as e:
        raise UsageError(f"{path} can't be read ({why(e)})") from None
    return _lines(data, path)[0]


def json_line(data: Any) -> bytes:
    """A line of a JSONL file, UTF-8. Bytes of a file's name that are no text become escapes, as Python reads them."""
    try:
        return (json.dumps(data, ensure_ascii=False) + "\n").encode()
    except UnicodeEncodeError:
        return (json.dumps(data) + "\n").encode()


class Journal:
    """The JSONL of a run: one writer, every row on the disk when :meth:`write` returns.

    Attributes:
        path: the file.
        rows: what it holds.
        cut: bytes of a half-written row that were removed when it was opened.
    """

    def __init__(self, path: Path) -> None:
        """Open, lock, and remove what a killed writer left of its last row.

        Raises:
            CacheFolderError: it can't be written.
            KVSplitError: another process writes to it.
            ResultError: a line is no row; nothing is changed then.
        """
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise CacheFolderError(f"--out: {path} can't be written ({why(e)})") from None
        self._open()
        try:
            self._f.seek(0)
            data = self._f.read()
            self.rows, whole = _lines(data, path)
            self.cut = len(data) - whole
            if self.cut:
                self._f.truncate(whole)
            if whole and not data[:whole].endswith(b"\n"):
                self._append(b"\n")
        except BaseException:
            self._f.close()
            raise

    def _open(self) -> None:
        """Open and lock the file that has the name: one that a run ends without a row goes, also while we open it."""
        while True:
            try:
                self._f = open(self.path, "a+b", buffering=0)  # noqa: SIM115 - closed by close()
            except OSError as e:
                raise CacheFolderError(f"--out: {self.path} can't be written ({why(e)})") from None
            try:
                self._lock()
                with contextlib.suppress(FileNotFoundError):
                    if sys.platform == "win32" or os.path.samestat(os.stat(self.path), os.fstat(self._f.fileno())):
                        return
            except BaseException:
                self._f.close()
                raise
            self._f.close()

    def _lock(self) -> None:
        try:
            if sys.platform == "win32":
                self._f.seek(1 << 40)  # far behind the data: a locked byte can't be read
                msvcrt.locking(self._f.fileno(), msvcrt.LK_NBLCK, 1)
            else:
                fcntl.flock(self._f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise KVSplitError(
                f"--out: another run writes to {self.path}; wait for it, or choose another file"
            ) from None

    def _append(self, data: bytes) -> None:
        before = self._f.seek(0, os.SEEK_END)
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[self._f.write(rest) :]
            os.fsync(self._f.fileno())
        except OSError as e:
            with contextlib.suppress(OSError):  # a row is there or not: no part of one is left on a full disk
                self._f.truncate(before)
            raise CacheFolderError(f"{self.path} can't be written: {why(e)}") from None

    def write(self, *rows: Row) -> None:
        """Validate and append, all in one piece.

        Raises:
            ResultError: names the configuration and the field.
            CacheFolderError: the disk is full, or the file can't be written.
        """
        for row in rows:
            try:
                row.validate()
            except ResultError as e:
                raise ResultError(f"{row.config}, {row.kind}: {e}") from None
        self._append(b"".join(json_line(row.to_json()) for row in rows))
        self.rows += rows

    def close(self) -> None:
        """Close and unlock; a file without a row goes."""
        empty = os.fstat(self._f.fileno()).st_size == 0
        if empty and sys.platform != "win32":  # Windows removes no open file
            self.path.unlink(missing_ok=True)
        self._f.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def read(path: PathLike) -> Iterator[Row]:
    """Rows of a JSONL file.

    Raises:
        ResultError: names the line.
    """
    with open(path, "rb") as f:
        for i, line in enumerate(f, 1):
            if not line.strip():
                continue
            try:
                yield Row.from_json(parse_line(line))
            except (ValueError, TypeError) as e:
                raise ResultError(f"{path}, line {i}: {e}") from None


@dataclass
class Summary:
    """All that was measured of one configuration of one model at one length: a line of a table, the CSV and charts.

    ``seq_len`` is None for rows of :mod:`kvsplit.compare`, whose kinds have lengths of their own.
    """

    config: str
    kvq_key: str
    kvq_val: str
    type_k: str
    type_v: str
    model: str = ""
    seq_len: Optional[int] = None
    bits_per_value: Optional[float] = None
    n_ctx: Optional[int] = None
    kv_bytes: Optional[int] = None
    saving: Optional[float] = None
    compute_bytes: Optional[int] = None
    peak_rss: Optional[int] = None
    decode_ts: Optional[float] = None
    decode_samples: List[float] = field(default_factory=list)
    prefill_ts: Optional[float] = None
    prefill_samples: List[float] = field(default_factory=list)
    n_depth: Optional[int] = None
    ppl: Optional[float] = None
    ppl_se: Optional[float] = None
    ppl_change: Optional[float] = None
    ppl_change_se: Optional[float] = None
    kld: Optional[float] = None
    kld_se: Optional[float] = None
    kld_median: Optional[float] = None
    kld_p999: Optional[float] = None
    top1: Optional[float] = None
    kld_floor: Optional[float] = None
    finite: Optional[bool] = None
    needles_found: Optional[int] = None
    needles: Optional[int] = None
    same_tokens: List[int] = field(default_factory=list)
    n_continued: Optional[int] = None
    device: Optional[str] = None

    @property
    def kv_mib(self) -> Optional[float]:
        """KV cache in MiB."""
        return None if self.kv_bytes is None else self.kv_bytes / 2**20


_MEMORY = ("bits_per_value", "n_ctx", "kv_bytes", "saving")
_QUALITY = (
    "ppl", "ppl_se", "ppl_change", "ppl_change_se", "kld", "kld_se", "kld_median", "kld_p999", "top1", "kld_floor",
    "finite",
)  # fmt: skip


def summarize(rows: Iterable[Row]) -> List[Summary]:
    """One line per model, device, length and configuration, in the order of first appearance.

    A later row of the same measurement replaces an earlier one; rounds of a speed are put together, as far as they
    are of the same build, machine and number of threads: those of the last row count.
    """
    out: Dict[Tuple[Any, ...], Summary] = {}
    speeds: Dict[Tuple[int, bool], Tuple[Tuple[Any, ...], Dict[Optional[int], Row]]] = {}
    for r in rows:
        if r.kind in ("bandwidth", "layer"):  # of the machine; of a layer
            continue
        p = r.provenance
        s = out.setdefault(
            (p.model_sha256, r.device or "auto", r.seq_len, r.config, r.kvq_key, r.kvq_val),
            Summary(r.config, r.kvq_key, r.kvq_val, r.type_k, r.type_v, p.model_filename, r.seq_len, device=r.device),
        )
        if r.kv_bytes is not None and (r.kind == "memory" or s.kv_bytes is None):
            for name in _MEMORY:
                setattr(s, name, getattr(r, name))
        if r.kind == "memory":
            s.compute_bytes = r.compute_bytes
        elif r.kind == "speed":
            key, what = (id(s), bool(r.n_gen)), speed_of(r)
            if speeds.get(key, (what, {}))[0] != what:  # a median over two builds or numbers of threads is of neither
                del speeds[key]
            speeds.setdefault(key, (what, {}))[1][r.round] = r
            together = [x for one in speeds[key][1].values() for x in one.samples_ts or []]
            if r.n_gen:
                s.n_depth, s.decode_samples, s.decode_ts = r.n_depth, together, statistics.median(together)
            else:
                s.prefill_samples, s.prefill_ts = together, statistics.median(together)
                s.n_depth = r.n_depth if s.n_depth is None else s.n_depth
            both = [x for g in (False, True) for x in speeds.get((id(s), g), ((), {}))[1].values()]
            s.peak_rss = max((x.peak_rss for x in both if x.peak_rss is not None), default=None)
        elif r.kind == "quality":
            for name in _QUALITY:
                setattr(s, name, getattr(r, name))
        elif r.kind == "retrieval":
            found = r.needle_found or []
            s.needles_found, s.needles = sum(found), len(found) * (r.needle_trials or 0)
        elif r.kind == "continuation":
            s.same_tokens, s.n_continued = list(r.same_tokens or []), r.n_gen
    return list(out.values())


def speed_of(r: Row) -> Tuple[Any, ...]:
    """What a speed row is a round of: build, machine, and what was done."""
    p = r.provenance
    return (
        p.patches_sha256, p.unpatched, p.environment, p.cpu_info, p.gpu_info, r.n_threads, r.n_depth, r.n_prompt,
        r.n_gen, r.n_gpu_layers,
    )  # fmt: skip


def same_rounds(rows: Iterable[Row], base: Iterable[Row]) -> Tuple[List[float], List[float]]:
    """Samples of two configurations' speeds from the same rounds of the same run, in one order; in tokens per second.

    The machine drifts from round to round, so only these may be divided by one another. What was done is compared
    too: other threads, depths or numbers of tokens give nothing in common.

    Args:
        rows, base: speed rows, of prefill or of decoding.
    """

    def rounds(own: Iterable[Row]) -> Dict[Tuple[Any, ...], List[float]]:
        return {
            (r.provenance.run_id, r.round, r.n_threads, r.n_depth, r.n_prompt, r.n_gen, r.n_gpu_layers): r.samples_ts
            or []
            for r in own
        }

    mine, theirs = rounds(rows), rounds(base)
    both = [k for k in mine if k in theirs and len(mine[k]) == len(theirs[k])]
    return [t for k in both for t in mine[k]], [t for k in both for t in theirs[k]]


#: Samples of a speed from which a ratio is told: the smallest and the largest of n ratios enclose the median with a
#: certainty of 1 - 2 / 2^n, 75 % for 3.
MIN_ROUNDS = 3


def speed_ratio(rows: Iterable[Row], base: Iterable[Row]) -> Tuple[Optional[Tuple[float, float, float]], int]:
    """Ratio of two configurations' speeds, the one that tables, figures and pages tell.

    Args:
        rows, base: speed rows, of prefill or of decoding; see :func:`same_rounds`.

    Returns:
        Median of the ratios within rounds with the ends of its interval (:func:`kvsplit.stats.ratio`), None where
        there are fewer than :data:`MIN_ROUNDS`; and how many there are.
    """
    mine = list(rows)
    # as in a summary: of two builds or machines the last row's counts
    own, other = same_rounds([r for r in mine if speed_of(r) == speed_of(mine[-1])], base)
    return (stats.ratio(own, other) if len(own) >= MIN_ROUNDS else None), len(own)


def write_csv(path: PathLike, summaries: Iterable[Summary], replace: bool = False) -> None:
    """The summary as CSV; samples joined by blanks. Written aside, then renamed.

    Raises:
        FileExistsError: it is there, and ``replace`` is False.
        UsageError: it is there, and is no summary.
        CacheFolderError: it can't be written.
    """
    path = Path(path)
    if not replace and path.exists():
        raise FileExistsError(path)
    check_csv(path)
    names = [f.name for f in dataclasses.fields(Summary)]
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(part, "w", encoding="utf-8", errors="backslashreplace", newline="") as f:
            _write_csv(csv.writer(f), names, summaries)
            f.flush()
            os.fsync(f.fileno())
        os.replace(part, path)
    except OSError as e:
        raise CacheFolderError(f"{path} can't be written: {why(e)}") from None
    finally:
        with contextlib.suppress(OSError):
            part.unlink()


def check_csv(path: Path) -> None:
    """Refuse to replace what is no summary of ours.

    Raises:
        UsageError: the file is there, and doesn't begin as :func:`write_csv` begins.
    """
    begin = ",".join(f.name for f in dataclasses.fields(Summary)[:3])
    try:
        with open(path, encoding="utf-8-sig", errors="replace") as f:
            if f.readline(200).startswith(begin):
                return
    except FileNotFoundError:
        return
    except OSError as e:
        raise UsageError(f"--out: {path} can't be read ({why(e)}); choose another name") from None
    raise UsageError(f"--out: {path} would be replaced, and is no summary of results; choose another name")


def _write_csv(w: Any, names: Sequence[str], summaries: Iterable[Summary]) -> None:
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
