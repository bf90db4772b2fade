# SPDX-License-Identifier: MIT
"""``kvsplit report``: one page from results."""

from __future__ import annotations

from pathlib import Path
from typing import List, Optional

import typer

from kvsplit import results, runs, terminal
from kvsplit.errors import ResultError, UsageError


def report(
    files: List[Path] = typer.Argument(
        ..., metavar="RESULTS.jsonl...", help="JSONL that bench, compare or inspect wrote; put together."
    ),
    out: Optional[Path] = typer.Option(None, "--out", help="The page. Default: beside the first file, as .html."),
    title: Optional[str] = typer.Option(None, "--title", help="Title of the page. Default: the model."),
    target: str = typer.Option(
        "balanced",
        "--target",
        help="How much quality the verdict may give up for memory: quality (least), balanced or memory (most).",
    ),
    ctx: Optional[int] = typer.Option(
        None,
        "--ctx",
        "-c",
        min=1,
        help="Length of the verdict in tokens. Default: the longest for which enough was measured.",
    ),
    force: bool = typer.Option(False, "--force", help="Replace a page that this command made before."),
    as_json: bool = typer.Option(False, "--json", help="The verdicts as JSON on stdout."),
) -> None:
    """Make one self-contained HTML page: a verdict, tables, figures, and where every number comes from.

    The page's path goes to stdout, the verdict to stderr.
    """
    from kvsplit import report as page

    for f in files:
        if not f.is_file():
            raise UsageError(f"RESULTS: there is no file {f}")
    files = [f for i, f in enumerate(files) if not any(f.samefile(g) for g in files[:i])]
    rows = [r for f in files for r in results.read_rows(f)]
    if not rows:
        raise ResultError(f"{', '.join(map(str, files))}: no rows; `kvsplit bench` writes them")
    path = files[0].with_suffix(".html") if out is None else out
    command = " ".join(runs.command_line())
    made = page.make(rows, files, title=title, target=target, n_ctx=ctx, command=command)
    page.write(path, made.html, force=force)
    if as_json:
        terminal.out_json({"page": str(path), "verdicts": [[v.to_json() for v in vs] for vs in made.verdicts]})
        return
    for verdicts in made.verdicts:
        typer.echo(verdicts[0].sentence, err=True)
        if verdicts[0].line is None:
            for m in verdicts[0].missing:
                typer.echo(f"missing: {m.what}: {m.command}", err=True)
    terminal.out(str(path))
