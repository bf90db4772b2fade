# SPDX-License-Identifier: MIT
"""The main job: measure configurations of one model side by side; table, JSONL, CSV and chart."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

from kvsplit import native, plots, probe, quality, results, runs, speed
from kvsplit.errors import CacheFolderError, KVSplitError, ResultError, UnsupportedModelError, UsageError
from kvsplit.gguf_meta import GGUFInfo, check_model
from kvsplit.memory import ModelShape, _shape, kv_memory
from kvsplit.models import can_write, sha256_file
from kvsplit.policy import KVQuant
from kvsplit.results import Row, Summary

DEFAULT_CONFIGS = ("F16", "K8V8", "K8V4", "K4V8", "K4V4")


@dataclass(frozen=True)
class Options:
    """What to compare and how.

    Attributes:
        configs: policies; f16 is what the others are held against.
        n_ctx: tokens for the memory figure; None means 8192, or what the model was trained for if less.
        text: evaluation text; None means the one that every Python carries.
        ppl_ctx: tokens of a chunk; None means 2048, or less if model or text need it.
        chunks: chunks; None means 8, or 3 when quick.
        rounds: samples of a speed; None means 5, or 3 when quick.
        n_threads: threads; None lets the tools choose.
        quick: a small run of a few minutes.
        out: folder for the files.
    """

    configs: Tuple[KVQuant, ...] = tuple(KVQuant.from_text(c) for c in DEFAULT_CONFIGS)
    n_ctx: Optional[int] = None
    text: Optional[Path] = None
    ppl_ctx: Optional[int] = None
    chunks: Optional[int] = None
    rounds: Optional[int] = None
    n_threads: Optional[int] = None
    quick: bool = False
    out: Path = Path("kvsplit-results")


@dataclass
class Comparison:
    """What came out.

    Attributes:
        run_id: name of the run, the start of its files' names.
        model: file name.
        text: name of the evaluation text.
        rows: all measurements.
        summaries: one line per configuration.
        files: what was written.
        notes: what a reader of the table should know.
    """

    run_id: str
    model: str
    text: str
    plan: Dict[str, Any]
    rows: List[Row] = field(default_factory=list)
    summaries: List[Summary] = field(default_factory=list)
    files: List[Path] = field(default_factory=list)
    notes: List[str] = field(default_factory=list)

    def to_json(self) -> Dict[str, Any]:
        """For ``json.dumps``."""
        from dataclasses import asdict

        return {
            "run_id": self.run_id,
            "model": self.model,
            "text": self.text,
            "plan": self.plan,
            "notes": self.notes,
            "files": [str(f) for f in self.files],
            "configs": [asdict(s) for s in self.summaries],
        }


def parse_configs(texts: Sequence[str]) -> Tuple[KVQuant, ...]:
    """Configurations from the command line.

    One text holds several: labels and presets by ``,`` (``F16,K8V4``), and pairs of SPECs ``KEY/VAL`` by
    ``;``, because a comma belongs to the SPEC. Repeats are dropped.

    Raises:
        KVQuantError: one can't be understood.
    """
    out: List[KVQuant] = []
    for text in texts:
        for part in text.split(";"):
            for one in [part] if "/" in part else part.split(","):
                if one.strip():
                    q = KVQuant.from_text(one.strip(), "--config")
                    if q not in out:
                        out.append(q)
    if not out:
        raise UsageError("--config: names no configuration; write for example F16,K8V4")
    return tuple(out)


def _folder(path: Path) -> Path:
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe_file = path / f".kvsplit-{os.getpid()}"
        probe_file.touch()
        probe_file.unlink()
    except OSError as e:
        raise CacheFolderError(f"--out: {path} can't be written ({e.strerror or e})") from None
    return path


@contextlib.contextmanager
def _kept(out: Path, run_id: str, partial: Callable[[Path], None]) -> Iterator[results.Journal]:
    """The JSONL of a run. When the run fails, rows stay and ``partial`` is told where; nothing empty stays."""
    made = [p for p in (out, *out.parents) if not p.exists()]
    _folder(out)
    path = out / f"{run_id}-compare.jsonl"
    try:
        with results.Journal(path) as writer:
            yield writer
    except BaseException:
        if path.is_file() and path.stat().st_size:
            partial(path)
        else:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
                for folder in made:
                    folder.rmdir()  # fails, and stays, if something else lies in it
        raise


def _plans(o: Options, info: GGUFInfo, text: quality.Text) -> Tuple[int, speed.SpeedPlan, quality.QualityPlan]:
    trained = int(info.get("context_length", 0)) or 8192
    n_ctx = o.n_ctx or min(8192, trained)
    n_prompt, n_gen, depth = (128, 16, 256) if o.quick else (512, 64, 2048)
    depth = max(0, min(depth, trained - n_prompt - n_gen))
    speeds = speed.SpeedPlan(n_prompt, n_gen, depth, o.rounds or (3 if o.quick else 5), o.n_threads)

    ppl_ctx, chunks = o.ppl_ctx, o.chunks or (3 if o.quick else 8)
    if ppl_ctx is None:
        ppl_ctx = min(512 if o.quick else 2048, trained)
        # English takes about four bytes a token; leave room for every chunk
        while ppl_ctx > 128 and text.path.stat().st_size < 5 * ppl_ctx * max(2, chunks):
            ppl_ctx //= 2
    plan = quality.QualityPlan(ppl_ctx, chunks, o.n_threads)
    quality.check(plan, text)
    return n_ctx, speeds, plan


def _expected(shape: Optional[ModelShape], quant: KVQuant, n_ctx: int) -> Optional[int]:
    return None if shape is None else kv_memory(shape, quant, n_ctx).total_bytes


def _uniq(values: Sequence[str]) -> str:
    return "+".join(dict.fromkeys(v for v in values if v))


def run(
    model: Path,
    options: Options,
    *,
    command: Sequence[str] = (),
    step: Callable[[str, int, int], None] = lambda what, i, n: None,
    partial: Callable[[Path], None] = lambda path: None,
) -> Comparison:
    """Measure and write everything.

    Args:
        model: GGUF file.
        options: what and how.
        command: command line for the record.
        step: told what is being done, its number, and how many there are.
        partial: told where the rows are that were measured before a failure or an interruption.

    Raises:
        KVSplitError: rows that were measured until then stay in the JSONL; without any, no file is left.
    """
    info = check_model(model)
    lib = native.load()
    shape: Optional[ModelShape] = None
    try:
        shape = _shape(info)
    except UnsupportedModelError:
        pass
    for q in options.configs:  # refuse a bad policy before anything runs
        if shape is not None:
            kv_memory(shape, q, options.n_ctx or 256)
    out = options.out
    if not can_write(out):
        raise CacheFolderError(f"--out: {out} can't be written; give a folder that can")
    run_id = runs.new_id()

    with quality.text_file(options.text) as text:
        n_ctx, speed_plan, ppl_plan = _plans(options, info, text)
        n_conf = len(options.configs)
        total = 1 + n_conf + n_conf * speed_plan.rounds + 1 + n_conf
        at = 0

        def tell(what: str) -> None:
            nonlocal at
            at += 1
            step(what, at, total)

        tell("sha256 of the model")
        prov = runs.provenance(lib, run_id, model, sha256_file(model), command)
        res = Comparison(
            run_id,
            model.name,
            text.name,
            {
                "n_ctx": n_ctx,
                "n_prompt": speed_plan.n_prompt,
                "n_gen": speed_plan.n_gen,
                "n_depth": speed_plan.n_depth,
                "rounds": speed_plan.rounds,
                "ppl_ctx": ppl_plan.ppl_ctx,
                "chunks": ppl_plan.chunks,
            },
        )
        caches: Dict[KVQuant, Dict[str, Any]] = {}
        for q in options.configs:  # the library may refuse one, so nothing is written before
            tell(f"memory {q.label}")
            caches[q] = probe.kv_cache(model, n_ctx, q)
            if not caches[q]["layers"]:
                raise KVSplitError(f"{model.name} has no KV cache, there is nothing to compare")

        with _kept(out, run_id, partial) as writer:
            res.files.append(writer.path)

            def keep(row: Row) -> None:
                row.test_time = runs.now()
                writer.write(row)
                res.rows.append(row)

            def row(q: KVQuant, kind: str, **values: Any) -> Row:
                layers = caches[q]["layers"]
                return Row(
                    kind=kind,
                    config=q.label,
                    kvq_key=q.key,
                    kvq_val=q.val,
                    type_k=_uniq([layer["type_k"] for layer in layers]),
                    type_v=_uniq([layer["type_v"] for layer in layers]),
                    provenance=prov,
                    layer_types=results.runs((layer["type_k"], layer["type_v"]) for layer in layers),
                    **values,
                )

            memory_rows = [_memory_row(row, q, caches[q], n_ctx, _expected(shape, q, n_ctx)) for q in options.configs]
            res.notes += _memory_notes(memory_rows, caches, options.configs)

            speeds = speed.run(model, options.configs, speed_plan, step=tell)
            if speeds:
                first = speeds[0].info
                prov.cpu_info, prov.gpu_info = str(first["cpu_info"]), str(first.get("gpu_info", ""))
                prov.backends, prov.model_type = str(first.get("backends", "")), str(first["model_type"])
                prov.model_size, prov.model_n_params = first.get("model_size"), first.get("model_n_params")
            for r in memory_rows:
                keep(r)
            for s in speeds:
                keep(_speed_row(row, s))

            qualities: List[quality.Quality] = []
            tell("quality, f16 base")
            with quality.base_file(model, info, text, ppl_plan) as base:
                for q in options.configs:
                    tell(f"quality {q.label}")
                    try:
                        qualities.append(quality.measure(model, q, base, ppl_plan))
                    except ResultError as e:
                        raise ResultError(f"{q.label}: {e}") from None
            floor = next((x.kld for q, x in zip(options.configs, qualities) if q == KVQuant()), None)
            for q, x in zip(options.configs, qualities):
                keep(_quality_row(row, q, x, text, ppl_plan, floor))

            res.summaries = results.summarize(res.rows)
            if floor is None:
                res.notes.append(
                    "F16 is not among the configurations, so the noise floor of the KL divergence is not known."
                )
            csv_path = out / f"{run_id}-compare.csv"
            results.write_csv(csv_path, res.summaries)
            res.files.append(csv_path)
            note = (
                f"text: {text.name}, {ppl_plan.chunks} chunks of {ppl_plan.ppl_ctx} tokens; bars: standard error\n"
                f"attention on {memory_rows[0].backend_decode or 'an unknown backend'}"
            )
            charts = [out / f"{run_id}-memory-quality.{ext}" for ext in ("png", "svg")]
            res.files += plots.memory_quality(res.summaries, charts, model=model.stem, note=note)
    return res


def _memory_row(row: Callable[..., Row], q: KVQuant, cache: Dict[str, Any], n_ctx: int, expected: Optional[int]) -> Row:
    layers = cache["layers"]
    values = cache["bytes_f16"] // 2
    return row(
        q,
        "memory",
        n_ctx=n_ctx,
        kv_bytes=cache["bytes"],
        kv_bytes_expected=expected,
        kv_bytes_f16=cache["bytes_f16"],
        saving=1 - cache["bytes"] / cache["bytes_f16"],
        bits_per_value=8 * cache["bytes"] / values,
        swa_full=False,
        layer_rotation=results.runs((layer["rot_k"], layer["rot_v"]) for layer in layers),
        backend_prefill=_uniq([layer["backend_prefill"] for layer in layers]),
        backend_decode=_uniq([layer["backend_decode"] for layer in layers]),
        peak_rss=cache.get("peak_rss"),
    )


def _memory_notes(rows: Sequence[Row], caches: Dict[KVQuant, Dict[str, Any]], configs: Sequence[KVQuant]) -> List[str]:
    notes: List[str] = []
    for r, q in zip(rows, configs):
        if r.kv_bytes_expected is not None and r.kv_bytes_expected != r.kv_bytes:
            notes.append(f"{r.config}: {r.kv_bytes} bytes were allocated, {r.kv_bytes_expected} were computed.")
        away = sorted(
            {
                f"{where} instead of {layer['backend_expect']}"
                for layer in caches[q]["layers"]
                for where in (layer["backend_prefill"], layer["backend_decode"])
                if where and layer["backend_expect"] and where != layer["backend_expect"]
            }
        )
        if away:
            notes.append(f"{r.config}: attention runs on {', '.join(away)}.")
    return notes


def _speed_row(row: Callable[..., Row], s: speed.Speed) -> Row:
    import statistics

    info = s.info
    return row(
        s.quant,
        "speed",
        n_prompt=s.n_prompt,
        n_gen=s.n_gen,
        n_depth=info["n_depth"],
        n_batch=info.get("n_batch"),
        n_ubatch=info.get("n_ubatch"),
        n_threads=info["n_threads"],
        n_gpu_layers=info.get("n_gpu_layers"),
        flash_attn=info.get("flash_attn"),
        avg_ns=statistics.fmean(s.samples_ns),
        stddev_ns=statistics.stdev(s.samples_ns) if len(s.samples_ns) > 1 else 0.0,
        avg_ts=statistics.fmean(s.samples_ts),
        stddev_ts=statistics.stdev(s.samples_ts) if len(s.samples_ts) > 1 else 0.0,
        median_ts=s.median_ts,
        samples_ns=s.samples_ns,
        samples_ts=s.samples_ts,
        peak_rss=s.peak_rss,
    )


def _quality_row(
    row: Callable[..., Row],
    q: KVQuant,
    x: quality.Quality,
    text: quality.Text,
    plan: quality.QualityPlan,
    floor: Optional[float],
) -> Row:
    return row(
        q,
        "quality",
        text=text.name,
        text_sha256=text.sha256,
        ppl_ctx=plan.ppl_ctx,
        chunks=plan.chunks,
        ppl=x.ppl,
        ppl_se=x.ppl_se,
        ppl_base=x.ppl_base,
        ppl_ratio=x.ppl_ratio,
        ppl_ratio_se=x.ppl_ratio_se,
        kld=x.kld,
        kld_se=x.kld_se,
        kld_median=x.kld_median,
        kld_p999=x.kld_p999,
        kld_max=x.kld_max,
        top1=x.top1,
        top1_se=x.top1_se,
        kld_floor=floor,
    )
