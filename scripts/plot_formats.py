#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Measure the error of every block type of a cache and draw docs/figures/formats.svg.

Usage: plot_formats.py [--values N] [--outlier X] [--output FILE] [--no-figure] [--json]

Prints Markdown tables, or with --json one object: normalized squared error (sum of squared differences over sum of
squares) by format and source; the same after each part of the encoder; the bias of blocks; the granular gain of the
trellis.
Ours by the numpy mirror, upstream's types by the reference code of the built library (KVSPLIT_NATIVE_DIR, else build/).

Exit codes: 0 done, 1 no library, 2 usage.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Tuple

import numpy as np
import numpy.typing as npt

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "python"))  # this tree's formats, whatever is installed
if (ROOT / "build" / "bin").is_dir():
    os.environ.setdefault("KVSPLIT_NATIVE_DIR", str(ROOT / "build"))

from kvsplit import errors, formats  # noqa: E402

Array = npt.NDArray[Any]

HEAD = 64  # values of a row, as of a head
UPSTREAM = ("q4_0", "iq4_nl", "q4_1", "q5_0", "q5_1", "q8_0")


def _hadamard(n: int) -> Array:
    """Orthonormal Hadamard matrix (n, n), n a power of two."""
    h = np.ones((1, 1))
    while len(h) < n:
        h = np.block([[h, h], [h, -h]])
    return h / math.sqrt(n)


def sources(n: int, outlier: float = 20.0) -> Dict[str, Array]:
    """What is stored, float32 (n / 64, 64), by the name that tables and panels use.

    ``outlier`` is the factor of channel 5, in the sources that have one.
    """
    r = np.random.default_rng(2024)
    normal = r.standard_normal((n // HEAD, HEAD))
    channel = normal * np.where(np.arange(HEAD) == 5, outlier, 1.0)
    made = {
        "N(0,1)": normal,
        "Laplace": r.laplace(size=normal.shape),
        "outlier channel": channel,
        "outlier channel, rotated": channel @ _hadamard(HEAD),
    }
    return {name: x.astype(np.float32) for name, x in made.items()}


def measure(n: int, outlier: float) -> List[Dict[str, Any]]:
    """One row a format: name, bits per value, error by source."""
    library = formats.Library()
    data = sources(n, outlier)
    rows: List[Dict[str, Any]] = []
    for name in (*formats.FORMATS, *UPSTREAM):
        ours = name in formats.FORMATS
        codec: Any = formats if ours else library
        bits = formats.FORMATS[name].bits_per_value if ours else library.bits_per_value(name)
        nse = {s: formats.nse(x, codec.decode(name, codec.encode(name, x))) for s, x in data.items()}
        rows.append({"format": name, "ours": ours, "bits_per_value": bits, "nse": nse})
    return sorted(rows, key=lambda row: row["bits_per_value"])


def _first_scale_only(f: formats.Format, x: Array) -> Array:
    """Values back from the best path at the first scale, with that scale."""
    d0 = formats._first_scale(f, x)
    y, came, end, _ = formats._search(replace(f, tries=f.tries[:1]), x, d0)
    return formats.decode(f, formats._first_blocks(f, d0, y, came, end))


def _least_squares(x: Array, y: Array) -> Array:
    """Decoded blocks (n, 32) with the scales that minimize their squared errors, not rounded; float64."""
    x, y = x.astype(np.float64), y.astype(np.float64)
    return np.asarray(y * ((x * y).sum(axis=1) / (y * y).sum(axis=1))[:, None])


def parts(n: int) -> List[Dict[str, Any]]:
    """Error on N(0,1) after each part of the encoder, and with other scales on the paths of the last."""
    x = sources(n)["N(0,1)"].reshape(-1, formats.BLOCK)
    rows: List[Dict[str, Any]] = []
    for name, f in formats.FORMATS.items():
        row: Dict[str, Any] = {"format": name, "first scale": formats.nse(x, _first_scale_only(f, x))}
        for k in range(1, len(f.tries) + 1):
            g = replace(f, tries=f.tries[:k])
            y = formats.decode(g, formats.encode(g, x))
            row["unbiased" if k == 1 else f"{k} scales"] = formats.nse(x, y)
        row["least squares instead"] = formats.nse(x, _least_squares(x, y))
        rows.append(row)
    return rows


def bias(n: int) -> List[Dict[str, Any]]:
    """How much of a block of N(0,1) comes back: the mean of sum x*decoded / sum x^2, and how often the bound shows."""
    x = sources(n)["N(0,1)"].reshape(-1, formats.BLOCK)
    energy = np.square(x, dtype=np.float64).sum(axis=1)
    rows: List[Dict[str, Any]] = []
    for name, f in formats.FORMATS.items():
        y = formats.decode(f, formats.encode(f, x))
        back = (x.astype(np.float64) * y).sum(axis=1) / energy
        least = (x * _least_squares(x, y)).sum(axis=1) / energy
        # rounding to f16 moves a scale by up to 0.05 %
        short = float((back < 0.999).mean())
        rows.append({"format": name, "least squares": least.mean(), "stored": back.mean(), "blocks below 0.999": short})
    return rows


def granular(steps: int, free_start: bool, n: int) -> float:
    """Gain in dB of the trellis over rounding at the same rate, on uniform values and levels without an end."""
    r = np.random.default_rng(1)
    cost = np.zeros((4, n))
    if not free_start:
        cost[1:] = np.inf
    for _ in range(steps):
        u = r.uniform(0, 4, n)
        # subset c holds the integers c + 4*k; rounding at the same rate has steps of 2
        dist = [np.square((u - c + 2) % 4 - 2) for c in range(4)]
        after = np.empty_like(cost)
        for s in range(4):
            b, b1 = s & 1, s >> 1
            after[s] = np.minimum(cost[b1] + dist[2 * b + b1], cost[2 + b1] + dist[2 * (b ^ 1) + b1])
        cost = after
    return 10 * math.log10(2.0**2 / 12 / float(cost.min(axis=0).mean() / steps))


def draw(rows: List[Dict[str, Any]], output: Path) -> None:
    """The figure: a panel for each source, error over the bound of N(0,1) against bits per value."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    def place(name: str, source: str) -> Tuple[Tuple[float, float], str]:
        """Where a label stands beside its point: points right and up, and which end of it."""
        if source.endswith("rotated"):
            crowded = {
                "q4_1": ((0.0, 7.0), "center"),
                "iq4_nl": ((7.0, -11.0), "left"),
                "q5_1": ((0.0, 7.0), "center"),
                "kvq6": ((0.0, -13.0), "center"),
            }
            if name in crowded:
                return crowded[name]
            if name in formats.FORMATS:
                return (0, 7), "center"
        if name in formats.FORMATS:
            return (0, -13), "center"
        return ((-7, -3), "right") if name in ("q4_0", "iq4_nl") else ((7, -3), "left")

    matplotlib.rcParams.update({"svg.hashsalt": "kvsplit", "svg.fonttype": "none", "font.size": 9})
    matplotlib.rcParams["font.sans-serif"] = ["DejaVu Sans", "Verdana"]  # the file repeats the list for every text
    fig = Figure(figsize=(7.6, 6.2), dpi=140, layout="constrained")
    FigureCanvasAgg(fig)
    axes = fig.subplots(2, 2, sharex=True, sharey=True)
    for ax, source in zip(axes.flat, rows[0]["nse"]):
        ax.axhline(0, color="#555555", lw=1.2, ls=(0, (4, 3)), label="bound of N(0,1): 2^(-2R)")
        for ours, color, marker, line, label in (
            (True, "#0072B2", "o", "-", "kvq2 to kvq6"),
            (False, "#D55E00", "D", "none", "llama.cpp's types"),
        ):
            mine = [r for r in rows if r["ours"] == ours]
            x = [r["bits_per_value"] for r in mine]
            # decades of error along R would hide differences of a few dB
            y = [10 * math.log10(r["nse"][source] / 2.0 ** (-2 * r["bits_per_value"])) for r in mine]
            ax.plot(x, y, color=color, marker=marker, ms=6, lw=1.5, ls=line, label=label)
            for r, px, py in zip(mine, x, y):
                offset, ha = place(r["format"], source)
                ax.annotate(
                    r["format"], (px, py), xytext=offset, textcoords="offset points",
                    fontsize=8, ha=ha, color="#005A8C" if ours else "#A04000",
                )  # fmt: skip
        ax.set_title(source, fontsize=9.5, loc="left", fontweight="bold")
        ax.set_xlim(2.0, 9.4)
        ax.set_xticks(range(3, 10))
        ax.grid(True, color="#e4e4e4", lw=0.7)
        ax.set_axisbelow(True)
        for side in ("top", "right"):
            ax.spines[side].set_visible(False)
    axes[0, 0].legend(loc="upper left", frameon=False, fontsize=8)
    fig.supxlabel("bits per value R, scales included", fontsize=9.5)
    fig.supylabel("squared error over energy, above the bound (dB)", fontsize=9.5)
    with open(output, "wb") as f:
        fig.savefig(f, format=output.suffix.lstrip("."), metadata={"Date": None} if output.suffix == ".svg" else None)


def _table(rows: List[Dict[str, Any]], text: Callable[[Any], str] = lambda v: f"{v:.3g}") -> str:
    head = list(rows[0])
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
    lines += ["| " + " | ".join(v if isinstance(v, str) else text(v) for v in r.values()) + " |" for r in rows]
    return "\n".join(lines) + "\n"


def main(argv: Optional[List[str]] = None) -> int:
    """Measure, draw, print; returns the exit code."""
    parser = argparse.ArgumentParser(
        description="Error of the cache's block types: tables, and docs/figures/formats.svg."
    )
    parser.add_argument(
        "--values", type=int, default=1_000_000, metavar="N", help="values of a source, default 1000000"
    )
    parser.add_argument(
        "--outlier", type=float, default=20.0, metavar="X", help="factor of the outlier channel, default 20"
    )
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "figures" / "formats.svg", metavar="FILE")
    parser.add_argument("--no-figure", action="store_true", help="only measure")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    args = parser.parse_args(argv)
    n = args.values // HEAD * HEAD
    if n <= 0:
        parser.error(f"--values: {args.values} is less than one row of {HEAD}")

    try:
        rows = measure(n, args.outlier)
    except errors.NativeError as e:
        print(e, file=sys.stderr)
        return 1
    steps, backs = parts(n), bias(n)
    gains = [
        {"steps of a path": f"{t}", "start in state 0 (dB)": granular(t, False, max(1, n // t)),
         "start free (dB)": granular(t, True, max(1, n // t))} for t in (8, 16, 32, 64, 128, 1024)
    ]  # fmt: skip
    if not args.no_figure:
        draw(rows, args.output)
    if args.json:
        print(
            json.dumps({"values": n, "nse": rows, "parts": steps, "bias": backs, "granular_gain_db": gains}, indent=1)
        )
        return 0
    flat = [{"format": r["format"], "bits/value": f"{r['bits_per_value']:g}", **r["nse"]} for r in rows]
    print(f"Error of {n} values\n\n{_table(flat)}\nAfter each part, N(0,1)\n\n{_table(steps, lambda v: f'{v:.6f}')}")
    print(f"What comes back, N(0,1)\n\n{_table(backs, lambda v: f'{v:.5f}')}")
    print(f"Granular gain\n\n{_table(gains, lambda v: f'{v:.2f}')}", end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
