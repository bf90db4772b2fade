# SPDX-License-Identifier: MIT
"""``kvsplit plot``: figures from results that are there already."""

from __future__ import annotations

from pathlib import Path
from typing import Dict, List, Optional

import typer

from kvsplit import runs, terminal
from kvsplit.errors import ResultError, UsageError
from kvsplit.figures import FIGURES, check_names
from kvsplit.models import sha256_file
from kvsplit.plots import FORMATS, Chart, charts, check_free
from kvsplit.results import Row, read_rows


def _parts(texts: Optional[List[str]]) -> List[str]:
    """Names, separated by commas or given one by one; each once."""
    return list(dict.fromkeys(part.strip() for text in texts or [] for part in text.split(",") if part.strip()))


def _rows(files: List[Path]) -> List[Row]:
    """The rows of all files.

    Raises:
        UsageError: one is no file.
        ResultError: a line is no row, or there is none.
    """
    out: List[Row] = []
    for path in files:
        if not path.is_file():
            raise UsageError(f"RESULTS: {path} is no file; give a JSONL file that kvsplit bench or compare wrote")
        out += read_rows(path)
    if not out:
        names = ", ".join(f.name for f in files)
        raise ResultError(f"RESULTS: {names} has no row; kvsplit bench writes rows that figures can be drawn from")
    return out


def _needs(names: List[str]) -> str:
    return "; ".join(f"{name} needs {FIGURES[name][1]}" for name in names)


def _draw(rows: List[Row], names: List[str], title: Optional[str]) -> List[Chart]:
    """The figures.

    Raises:
        ResultError: one that was asked for, or all of them, lack rows; says which they need.
    """
    drawn = charts(rows, names or None, title=title)
    lacking = [n for n in names or FIGURES if n not in {c.kind for c in drawn}]
    kinds = ", ".join(dict.fromkeys(r.kind for r in rows))
    if lacking and (names or not drawn):
        asked = "--figure" if names else "no figure can be drawn"
        raise ResultError(f"{asked}: {_needs(lacking)}; there are rows of kind {kinds}")
    if lacking:
        typer.echo(f"not drawn: {_needs(lacking)}", err=True)
    return drawn


def plot(
    results: List[Path] = typer.Argument(
        ..., help="JSONL that bench, compare or inspect wrote; several are put together."
    ),
    out: Optional[Path] = typer.Option(None, "--out", help="Folder for the figures. Default: that of the first file."),
    figure: Optional[List[str]] = typer.Option(
        None, "--figure", help=f"Figures, by ',' or by repeating: {', '.join(FIGURES)}. Default: all that have data."
    ),
    form: List[str] = typer.Option(["png,svg"], "--format", help=f"Formats, by ',': {', '.join(FORMATS)}."),
    title: Optional[str] = typer.Option(None, "--title", help="What titles say instead of the model's file name."),
    replace: bool = typer.Option(False, "--force", help="Replace figures that this command drew before."),
    as_json: bool = typer.Option(False, "--json", help="JSON on stdout: figures, files, what they show."),
) -> None:
    """Draw every figure that results have data for, each with its data and this command beside it.

    What wasn't measured is shown as missing.
    """
    names, formats = _parts(figure), _parts(form)
    check_names(names)
    unknown = [f for f in formats if f not in FORMATS]
    if unknown or not formats:
        raise UsageError(f"--format: {''.join(unknown[:1])!r} is none of {', '.join(FORMATS)}")
    rows = _rows(results)
    drawn = _draw(rows, names, title)

    folder, stem = results[0].parent if out is None else out, results[0].stem
    check_free([p for c in drawn for p in c.paths(folder, stem, formats)], replace=replace)  # all of them or none
    sources: List[Dict[str, str]] = [{"file": f.name, "sha256": sha256_file(f)} for f in results]
    command = " ".join(runs.command_line())
    told = []
    for chart in drawn:
        files = chart.save(folder, stem, formats, command, sources=sources, replace=replace)
        told.append({"figure": chart.kind, "model": chart.model, "title": chart.title, "alt": chart.alt,
                     "note": chart.note, "files": [str(f) for f in files]})  # fmt: skip
        if not as_json:
            for f in files:
                terminal.out(str(f))
    if as_json:
        terminal.out_json(told)
