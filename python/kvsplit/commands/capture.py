# SPDX-License-Identifier: MIT
"""``kvsplit capture``: the memory of any command while it runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

import typer

from kvsplit import runs, terminal
from kvsplit.errors import KVSplitError, UsageError


def capture(
    files: Optional[List[Path]] = typer.Argument(None, help="With --show: files of earlier captures."),
    interval: float = typer.Option(0.1, "--interval", help="Seconds between samples."),
    out: Optional[Path] = typer.Option(
        None, "--out", help="File of the samples. Default: kvsplit-results/capture-ID.jsonl; nothing is overwritten."
    ),
    warn_at: Optional[str] = typer.Option(
        None,
        "--warn-at",
        help="Warn once above this: 85% (of the machine's or container's memory) or 2GiB (the command's).",
    ),
    kill_at: Optional[str] = typer.Option(
        None, "--kill-at", help="Stop the command above this, given like --warn-at; exit code 137."
    ),
    chart: Optional[Path] = typer.Option(
        None, "--chart", help="File of the curve: .png, .svg or .pdf. Default: beside the samples, PNG."
    ),
    no_chart: bool = typer.Option(False, "--no-chart", help="Draw no curve."),
    gif: Optional[Path] = typer.Option(None, "--gif", help="File for the curve growing, an animated GIF."),
    frames: Optional[Path] = typer.Option(None, "--frames", help="Folder for that animation as single PNGs."),
    compare: Optional[List[str]] = typer.Option(
        None, "--compare", help="Run the command once per configuration (k8v4,f16) and lay the curves over each other."
    ),
    show: bool = typer.Option(False, "--show", help="Print and draw FILES again; nothing is run."),
    as_json: bool = typer.Option(False, "--json", help="JSON on stdout; what the command prints goes to stderr."),
) -> None:
    """Sample the real memory of a command and all its children while it runs, and draw the curve.

    The command follows --, as in: kvsplit capture -- kvsplit run smollm2 --kvq 8 Hello

    Its input, output and exit code are passed through.
    """
    from kvsplit import capture as cap
    from kvsplit import capture_pictures as pictures
    from kvsplit.bench import parse_configs

    command = list(terminal.passed_on)
    if chart is not None and no_chart:
        raise UsageError("--chart and --no-chart contradict each other")
    if show:
        if command or compare or out or warn_at or kill_at:
            raise UsageError("--show runs nothing: give it files, --chart, --gif, --frames or --json")
        if not files:
            raise UsageError("--show: no file was given")
        pictures.check_outputs(chart, gif, frames)
        captures = [cap.read(f) for f in files]
        _pictures(captures, chart, gif, frames)
        _tell(captures, as_json, table=True)
        return
    if files:
        raise UsageError(f"{files[0]} would be a file to --show; write the command after --")
    cap.check_interval(interval)
    warn = None if warn_at is None else cap.Threshold.parse(warn_at, "--warn-at")
    kill = None if kill_at is None else cap.Threshold.parse(kill_at, "--kill-at")
    cap.check_thresholds(warn, kill)
    cap.find_program(command)

    run_id = runs.new_id()
    base = out or Path("kvsplit-results") / f"capture-{run_id}.jsonl"
    jobs = [("", command, base)]
    if compare:
        jobs = []
        names: Dict[str, int] = {}
        for q in parse_configs(compare, "--compare"):
            slug = cap.slug(q.label)  # SPECs can differ in what no file's name has
            names[slug] = names.get(slug, 0) + 1
            name = f"{base.stem}-{slug}" + ("" if names[slug] == 1 else f"-{names[slug]}")
            jobs.append((q.label, cap.configured(command, q), base.with_name(f"{name}.jsonl")))
    elif any("{kvq}" in a for a in command):
        raise UsageError("{kvq} in the command stands for a configuration; name some with --compare")
    if chart is None and not no_chart:
        chart = base.with_suffix(".png")
    pictures.check_outputs(chart, gif, frames)
    for _, _, path in jobs:
        if path.exists():
            raise UsageError(f"--out: {path} is there already and stays as it is; give another name")

    # with a table or JSON of ours on stdout, the command's goes where it disturbs nobody who reads that
    stdout = sys.stderr.fileno() if compare or as_json else None
    sys.stdout.flush()
    captures = []
    code = 0
    for label, cmd, path in jobs:
        if label:
            _say(f"{label}:")
        done = cap.run(
            cmd, path, interval=interval, warn_at=warn, kill_at=kill, config=label, run_id=run_id, stdout=stdout,
            say=_say,
        )  # fmt: skip
        code = code or done.exit_code
        try:
            captures.append(cap.read(path))
        except KVSplitError as e:  # the disk was full: the command's exit code matters more
            _say(str(e))
        if done.interrupted:
            code = code or 128 + done.interrupted if compare else code
            break
    try:
        if any(c.samples for c in captures):
            _pictures(captures, chart, gif, frames)
        else:
            _say("the command ended before it could be looked at; there is nothing to draw")
    except KVSplitError as e:
        _say(str(e))
    _tell(captures, as_json, table=bool(compare))
    if code:
        raise typer.Exit(code)


def _say(message: str) -> None:
    typer.echo(f"kvsplit capture: {message}", err=True)


def _pictures(captures: Sequence[Any], chart: Optional[Path], gif: Optional[Path], frames: Optional[Path]) -> None:
    from kvsplit import capture_pictures as pictures

    if chart is not None:
        _say(f"wrote {pictures.draw(captures, chart)}")
    if gif is not None:
        _say(f"wrote {pictures.save_gif(captures, gif)}")
    if frames is not None:
        _say(f"wrote {len(pictures.save_frames(captures, frames))} frames to {frames}")


def _tell(captures: Sequence[Any], as_json: bool, *, table: bool) -> None:
    """The outcome: JSON or a table on stdout, or, where the command's own output is there, a line on stderr."""
    from kvsplit import capture as cap

    rows = cap.compared(captures)
    if as_json:
        data = [{**row, "header": c.header, "summary": c.summary} for row, c in zip(rows, captures)]
        terminal.out_json(data if table else data[0] if data else None)
        return
    if table:
        _table(rows)
        if cap.unlike(captures):
            _say("the peaks differ in mapped files too: other programs shared them at times; compare what is its own")
    for c in captures:
        if not table and c.peak is not None:
            _say(f"peak {cap.size_text(c.peak.memory)} after {c.peak.t:.1f} s, {len(c.samples)} samples in {c.path}")
        elif not table:
            _say(f"no sample in {c.path}")
        if c.summary and c.summary["approximate"]:
            _say(
                f"{c.label}: only RSS could be read {c.summary['approximate']} times; shared pages count more than once"
            )


def _table(rows: Sequence[Dict[str, Any]]) -> None:
    def mib(row: Dict[str, Any], name: str) -> str:
        return terminal.num(None if row.get(name) is None else row[name] / 2**20, 1)

    gpu = any(r.get("peak_gpu") for r in rows)
    t = terminal.table(
        ("", "left"), ("peak\nMiB", "right"), ("its own\nMiB", "right"), ("RSS\nMiB", "right"),
        *([("GPU\nMiB", "right")] if gpu else []),
        ("less than F16\nMiB", "right"), ("saved\n", "right"), ("time\ns", "right"), ("exit\ncode", "right"),
    )  # fmt: skip
    for r in rows:
        saved = r.get("saving")
        t.add_row(
            r["label"], mib(r, "peak"), mib(r, "peak_anon"), mib(r, "peak_rss"),
            *([mib(r, "peak_gpu")] if gpu else []),
            mib(r, "less"), "-" if saved is None else f"{100 * saved:.1f} %", terminal.num(r["seconds"], 1),
            "-" if r["exit_code"] is None else str(r["exit_code"]),
        )  # fmt: skip
    terminal.show(terminal.console(), t)
