# SPDX-License-Identifier: MIT
"""``kvsplit bench``: the sweep over configurations and lengths."""

from __future__ import annotations

import math
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import typer

from kvsplit import models, terminal
from kvsplit.errors import UsageError
from kvsplit.results import Row, Summary


def bench(
    model: Optional[str] = typer.Argument(None, help="GGUF file or name of a pulled model."),
    model_opt: Optional[str] = typer.Option(None, "--model", "-m", help="The same as an option."),
    config: Optional[List[str]] = typer.Option(
        None,
        "--config",
        help="What to compare: F16,K8V4 (keys at 8 bits, values at 4) or, by ';', pairs of SPECs such "
        "as q8_0/kvq4,:2=q8_0. Default: F16,K8V8,K8V4,K6V5,K6V3,K4V8,K4V4. f16 is always measured.",
    ),
    seq_len: Optional[List[str]] = typer.Option(
        None,
        "--seq-len",
        help="Lengths in tokens: 2048,8192. Default: 128 to 8192 by doubling, up to what the model was trained for.",
    ),
    metric: Optional[List[str]] = typer.Option(
        None, "--metric", help="memory, speed, perplexity (with KL divergence), retrieval, or all. Default: all."
    ),
    text: Optional[Path] = typer.Option(
        None, "--text", help="UTF-8 text to measure quality on. Default: the help texts that Python carries."
    ),
    repeat: int = typer.Option(5, "--repeat", min=1, help="Rounds of speed; all configurations take turns in each."),
    chunks: Optional[int] = typer.Option(
        None,
        "--chunks",
        min=2,
        help="Chunks of text, each as long as --seq-len, for perplexity. Default: 16384 tokens in all, "
        "but 4 to 32 chunks.",
    ),
    trials: int = typer.Option(
        3, "--trials", min=1, help="Needles (numbers to be found again) at each of five depths."
    ),
    threads: Optional[int] = typer.Option(None, "--threads", "-t", min=1, help="Threads. Default: the tools choose."),
    device: str = typer.Option("auto", "--device", help="auto, cpu, or a device that `kvsplit doctor` lists."),
    out: Optional[Path] = typer.Option(
        None,
        "--out",
        help="JSONL that rows are appended to; a CSV lies beside it. Default: kvsplit-results/bench-MODEL.jsonl, "
        "MODEL being the file's name.",
    ),
    resume: bool = typer.Option(
        False, "--resume", help="Go on with a file of rows that is there, and measure what it lacks."
    ),
    dry_run: bool = typer.Option(False, "--dry-run", help="Print the plan and about how long it takes, and end."),
    as_json: bool = typer.Option(False, "--json", help="JSON on stdout instead of tables."),
) -> None:
    """Measure configurations at several lengths: memory, speed, perplexity and KL divergence, retrieval."""
    from kvsplit import bench as engine
    from kvsplit import native, quality, results, runs, tools
    from kvsplit.gguf_meta import check_model
    from kvsplit.models import sha256_file
    from kvsplit.policy import F16

    path = models.resolve(terminal.which_model(model, model_opt))
    lib = native.load()
    tools.check()
    tools.check_device(device, lib.devices())
    o = engine.Options(
        engine.parse_configs(config or [",".join(engine.CONFIGS)]),
        engine.parse_lengths(seq_len) if seq_len else None,
        engine.parse_metrics(metric or ["all"]),
        text, repeat, chunks, trials, threads, device,
    )  # fmt: skip
    file = out or Path("kvsplit-results") / f"bench-{slug(path)}.jsonl"
    if file.suffix != ".jsonl":
        raise UsageError(f"--out: {file} must end with .jsonl")
    if file.is_dir():
        raise UsageError(f"--out: {file} is a folder; name a file in it")
    there = file.exists() and file.stat().st_size > 0
    if there and not (resume or dry_run):
        raise UsageError(f"--out: {file} is there; --resume goes on with it, or choose another file")

    csv = file.with_suffix(".csv")
    if not dry_run:
        results.check_csv(csv)

    with quality.text_file(text) as words, runs.Progress() as progress:
        info = check_model(path)
        todo = engine.items(o, info, words)
        progress.step("sha256 of the model", 0, 0)
        sha256 = sha256_file(path)
        made: Dict[str, Any] = {"command": runs.command_line(), "step": progress.step, "say": progress.say}
        if dry_run:
            sweep = engine.Sweep(path, info, sha256, words, lib, **made)
            sweep.check(o.configs, max(item.n_ctx for item in todo))
            sweep.know(results.read_rows(file) if there else [])
            progress.step("a short prefill, to tell how long the plan takes", 0, 0)
            plan = _plan(engine, sweep, todo, o)
        else:
            with results.Journal(file) as journal:
                if journal.cut:
                    progress.say(f"{file}: removed {journal.cut} bytes of a row that was not written to its end")
                sweep = engine.Sweep(path, info, sha256, words, lib, journal, **made)
                sweep.check(o.configs, max(item.n_ctx for item in todo))
                try:
                    sweep.run(todo)
                except BaseException:
                    if journal.rows:
                        progress.say(f"{file} has {len(sweep.new)} new rows; with --resume the same command goes on")
                    raise
                whole = results.summarize(journal.rows)  # of all that the file has, also from other runs
                if whole:
                    results.write_csv(csv, whole, replace=True)
            rows = [r for item in todo for r in sweep.rows(item) if r is not None]
            # rounds are shuffled; a table is not
            place = {(q.key, q.val): i for i, q in enumerate((F16, *o.configs))}
            summaries = sorted(
                results.summarize(rows), key=lambda s: (s.seq_len or 0, place.get((s.kvq_key, s.kvq_val), 0))
            )
    if dry_run:
        if as_json:
            terminal.out_json(plan)
        else:
            _show_plan(plan)
        return
    if as_json:
        terminal.out_json({"model": path.name, "out": str(file), "failures": sweep.failures,
                           "configs": [asdict(s) for s in summaries]})  # fmt: skip
    else:
        show(summaries, rows)
    typer.echo(f"{len(sweep.new)} rows measured, {len(rows) - len(sweep.new)} were there", err=True)
    typer.echo(f"wrote {file}" + (f" and {csv}" if whole else ""), err=True)
    if sweep.failures:
        raise typer.Exit(1)


def slug(path: Path) -> str:
    """A model's name, fit for a file's name."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", path.stem).strip("-.").lower() or "model"


# ---- the plan


def _plan(engine: Any, sweep: Any, todo: Sequence[Any], o: Any) -> Dict[str, Any]:
    """What is done and to be done, by length and kind, and how long it takes."""
    lacking = [item for item in todo if not sweep.done(item)]
    seconds = 0.0
    if lacking:
        here = [r for r in sweep.known if sweep.here(r)]
        seconds = engine.seconds_a_token(sweep.model, here, o.device, o.n_threads)
    parts: Dict[Tuple[int, str], Dict[str, Any]] = {}
    for item in todo:
        part = parts.setdefault(
            (item.seq_len, item.kind),
            {"seq_len": item.seq_len, "kind": item.kind, "configs": [], "done": 0, "to_do": 0, "seconds": 0.0},
        )
        if item.quant.text not in part["configs"]:
            part["configs"].append(item.quant.text)
        if sweep.done(item):
            part["done"] += 1
        else:
            part["to_do"] += 1
            part["seconds"] += seconds * sweep.cost(item)
    for part in parts.values():
        if part["kind"] in ("quality", "continuation") and part["to_do"]:  # the f16 base or reference
            part["seconds"] *= 1 + 1 / part["to_do"]
    return {
        "model": sweep.model.name,
        "text": sweep.text.name,
        "parts": list(parts.values()),
        "seconds": sum(p["seconds"] for p in parts.values()),
    }


def _duration(seconds: float) -> str:
    if seconds >= 5400:
        return f"{seconds / 3600:.1f} h"
    return f"{math.ceil(seconds / 60)} min" if seconds > 90 else f"{math.ceil(seconds)} s"


def _show_plan(plan: Dict[str, Any]) -> None:
    console = terminal.console()
    t = terminal.table(
        ("tokens", "right"), ("what", "left"), ("configs", "right"), ("done", "right"), ("to do", "right"),
        ("about", "right"),
    )  # fmt: skip
    for p in plan["parts"]:
        about = _duration(p["seconds"]) if p["to_do"] else "-"
        t.add_row(str(p["seq_len"]), p["kind"], str(len(p["configs"])), str(p["done"]), str(p["to_do"]), about)
    console.print(f"{plan['model']}, text: {plan['text']}", soft_wrap=True)
    terminal.show(console, t)
    console.print(f"about {_duration(plan['seconds'])} in all")


# ---- the tables


def show(summaries: Sequence[Summary], rows: Sequence[Row]) -> None:
    """A table a length, with the columns that have values."""
    pm = terminal.pm()

    def with_se(x: Optional[float], se: Optional[float], digits: int, factor: float = 1.0, sign: str = "") -> str:
        if x is None:
            return ""
        error = "" if se is None else f"{pm}{factor * se:.{digits}f}"
        return f"{factor * x + 0.0:{sign}.{digits}f}{error}"

    def mib(n: Optional[int]) -> str:
        return "" if n is None else f"{n / 2**20:.2f}"

    def kld(s: Summary) -> str:
        return "NaN" if s.finite is False else with_se(s.kld, s.kld_se, 5)

    columns: List[Tuple[str, str, Callable[[Summary], str]]] = [
        ("config\n", "left", lambda s: s.config),
        ("stored as\n", "left", lambda s: terminal.stored(s.type_k, s.type_v)),
        ("KV\nMiB", "right", lambda s: mib(s.kv_bytes)),
        ("saved\n", "right", lambda s: "" if s.saving is None else f"{100 * s.saving:.1f} %"),
        ("compute\nMiB", "right", lambda s: mib(s.compute_bytes)),
        ("peak RSS\nMiB", "right", lambda s: "" if s.peak_rss is None else f"{s.peak_rss / 2**20:.0f}"),
        ("decode\nt/s", "right", lambda s: "" if s.decode_ts is None else f"{s.decode_ts:.1f}"),
        ("prefill\nt/s", "right", lambda s: "" if s.prefill_ts is None else f"{s.prefill_ts:.1f}"),
        (f"PPL\n{pm} SE", "right", lambda s: with_se(s.ppl, s.ppl_se, 3)),
        (f"PPL change\n% {pm} SE", "right", lambda s: with_se(s.ppl_change, s.ppl_change_se, 2, 100, "+")),
        (f"mean KLD\n{pm} SE", "right", kld),
        ("KLD\n99.9 %", "right", lambda s: "" if s.kld_p999 is None else f"{s.kld_p999:.3f}"),
        ("same\ntop", "right", lambda s: "" if s.top1 is None else f"{100 * s.top1:.1f} %"),
        ("needles\n", "right", lambda s: "" if not s.needles else f"{s.needles_found}/{s.needles}"),
        ("tokens as\nf16's", "right", lambda s: " ".join(map(str, s.same_tokens))),
    ]
    console = terminal.console()
    for n in sorted({s.seq_len or 0 for s in summaries}):
        part = [s for s in summaries if (s.seq_len or 0) == n]
        shown = [c for c in columns if any(c[2](s) for s in part)]
        t = terminal.table(*((head, justify) for head, justify, _ in shown), gap=0)
        for s in part:
            t.add_row(*(cell(s) or "-" for _, _, cell in shown))
        console.print(f"{part[0].model}, {n} tokens", soft_wrap=True)
        terminal.show(console, t)
    notes(rows)


def notes(rows: Sequence[Row]) -> None:
    """On stderr: what a reader of the tables should know."""
    for r in rows:
        if r.kind == "quality":
            typer.echo(
                f"text: {r.text}; KLD and PPL change are against f16 of the same build, paired by chunk", err=True
            )
            break
    floors = [r.kld_floor for r in rows if r.kld_floor is not None]
    if floors:
        typer.echo(f"f16 against itself has a mean KLD of {max(floors):.5f}: less than that means nothing", err=True)
    n = len({r.round for r in rows if r.kind == "speed"})
    if n:
        rounds = f"medians of {n} rounds in which the configurations took turns" if n > 1 else "of one round"
        typer.echo(f"speeds are {rounds}", err=True)
    for r in rows:
        if r.kind == "continuation":
            typer.echo(f"tokens as f16's: of {r.n_gen} generated greedily after each prompt", err=True)
            break
