# SPDX-License-Identifier: MIT
"""How commands speak: data on stdout, tables that no pipe cuts, numbers with what they are worth."""

from __future__ import annotations

import json
import sys
from typing import Any, List, Optional, Tuple

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from kvsplit import models
from kvsplit.errors import UsageError

KVQ_HELP = "PRESET of both sides: k8v4, k4v8, ..., or 8 (= k8v4), 4 (= k4v4), 16 (= f16)."
KEY_HELP = "SPEC of the keys: bits or a type, then exceptions by layer, e.g. 4,:2=8."
VAL_HELP = "SPEC of the values."

#: What follows ``--`` on the command lines of ``run`` and ``capture``.
passed_on: List[str] = []


def utf8(stream: Any) -> bool:
    """True if a stream takes every character."""
    return (getattr(stream, "encoding", "") or "").lower().replace("-", "") == "utf8"


def pm() -> str:
    """Plus-minus, as stdout can show it."""
    return "±" if utf8(sys.stdout) else "+-"


def console(stderr: bool = False) -> Console:
    """stdout or stderr."""
    stream = sys.stderr if stderr else sys.stdout
    if stream.isatty():
        return Console(stderr=stderr, highlight=False)
    # nothing wraps in a pipe
    return Console(stderr=stderr, highlight=False, width=160)


def table(*columns: Tuple[str, str], gap: int = 1) -> Table:
    """An empty table of columns, each a head and ``left`` or ``right``; ``gap`` blanks between them."""
    style = box.SIMPLE_HEAD if utf8(sys.stdout) else box.ASCII2
    t = Table(box=style, padding=(0, gap, 0, 0), pad_edge=False)
    for name, justify in columns:
        t.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    return t


def show(console: Console, table: Table) -> None:
    """Print a table whole: where a terminal is too narrow it wraps the lines, and no figure is cut."""
    wide = console.options.update(width=1000, max_width=1000)
    console.width = max(console.width, console.measure(table, options=wide).maximum)
    console.print(table)


def out(text: str) -> None:
    """A line on stdout."""
    typer.echo(text)


def out_json(data: Any) -> None:
    """JSON on stdout."""
    out(json.dumps(data, indent=2, ensure_ascii=not utf8(sys.stdout)))


def stored(k: str, v: str) -> str:
    """Types of keys and values, ``q8_0/kvq4``."""
    return f"{k or '-'}/{v or '-'}"


def which_model(argument: Optional[str], option: Optional[str], default: Optional[str] = None) -> str:
    """The model of a command that takes it as an argument or as ``--model``.

    Raises:
        UsageError: it was given twice, or not at all and there is no default.
    """
    if argument is not None and option is not None:
        raise UsageError("--model: the model was given twice, as an argument and as an option")
    name = argument or option or default
    if name is None:
        raise UsageError(f"no model was given: write the path of a GGUF file, or one of {', '.join(models.REGISTRY)}")
    return name


def num(value: Optional[float], digits: int) -> str:
    """A number with so many decimals; a dash for None."""
    return "-" if value is None else f"{value:.{digits}f}"
