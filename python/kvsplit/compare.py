# SPDX-License-Identifier: MIT
"""The main job: measure configurations of one model side by side; table, JSONL, CSV and chart."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

from kvsplit import bench, native, plots, quality, results, runs, speed
from kvsplit.errors import CacheFolderError, why
from kvsplit.gguf_meta import GGUFInfo, check_model
from kvsplit.models import can_write, sha256_file
from kvsplit.policy import F16, KVQuant
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


def _folder(path: Path) -> Path:
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe_file = path / f".kvsplit-{os.getpid()}"
        probe_file.touch()
        probe_file.unlink()
    except OSError as e:
        raise CacheFolderError(f"--out: {path} can't be written ({why(e)})") from None
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


def run(
    model: Path,
    options: Options,
    *,
    command: Sequence[str] = (),
    step: Callable[[str, float, float], None] = lambda what, i, n: None,
    partial: Callable[[Path], None] = lambda path: None,
) -> Comparison:
    """Measure and write everything.

    Args:
        model: GGUF file.
        options: what and how.
        command: command line for the record.
        step: told what is being done, and how much of the whole is finished.
        partial: told where the rows are that were measured before a failure or an interruption.

    Raises:
        KVSplitError: rows that were measured until then stay in the JSONL; without any, no file is left.
    """
    info = check_model(model)
    lib = native.load()
    if not can_write(options.out):
        raise CacheFolderError(f"--out: {options.out} can't be written; give a folder that can")
    run_id = runs.new_id()
    with quality.text_file(options.text) as text:
        n_ctx, speeds, ppl = _plans(options, info, text)
        step("sha256 of the model", 0, 0)
        sweep = bench.Sweep(
            model, info, sha256_file(model), text, lib, command=command, run_id=run_id, step=step, strict=True
        )
        plan = {
            "n_ctx": n_ctx,
            "n_prompt": speeds.n_prompt,
            "n_gen": speeds.n_gen,
            "n_depth": speeds.n_depth,
            "rounds": speeds.rounds,
            "ppl_ctx": ppl.ppl_ctx,
            "chunks": ppl.chunks,
        }
        res = Comparison(run_id, model.name, text.name, plan)
        sweep.say = res.notes.append
        memory = bench.MemoryPlan(n_ctx)
        todo = [bench.Item("memory", q, memory) for q in options.configs]
        todo += bench.speed_items(options.configs, replace(speeds, rounds=1), speeds.rounds, speeds.seed)
        todo += [bench.Item("quality", q, ppl) for q in sorted(options.configs, key=lambda q: q != F16)]
        for q in options.configs:  # one may be refused, so nothing is written before
            sweep.check([q], n_ctx)
            step(f"context {q.label}", 0, 0)
            sweep.cache(q, n_ctx, memory.device)
        with _kept(options.out, run_id, partial) as writer:
            sweep.journal = writer
            sweep.run(todo)
            res.files.append(writer.path)
            res.rows = sweep.new
            res.summaries = results.summarize(res.rows)
            if F16 not in options.configs:
                res.notes.append(
                    "F16 is not among the configurations, so the noise floor of the KL divergence is not known."
                )
            csv_path = options.out / f"{run_id}-compare.csv"
            results.write_csv(csv_path, res.summaries)
            res.files.append(csv_path)
            note = (
                f"text: {text.name}, {ppl.chunks} chunks of {ppl.ppl_ctx} tokens; bars: standard error\n"
                f"attention on {res.rows[0].backend_decode or 'an unknown backend'}"
            )
            charts = [options.out / f"{run_id}-memory-quality.{ext}" for ext in ("png", "svg")]
            import matplotlib

            with matplotlib.rc_context({"text.parse_math": False}):  # names of files are no formulas
                res.files += plots.memory_quality(res.summaries, charts, model=model.stem, note=note)
    return res
