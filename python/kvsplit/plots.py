# SPDX-License-Identifier: MIT
"""Charts. One look for a configuration everywhere: colour, marker and line style (Okabe-Ito colours)."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple, Union

from kvsplit.results import Summary


@dataclass(frozen=True)
class Style:
    """How a configuration looks."""

    color: str
    marker: str
    line: str = "-"
    filled: bool = True  # the unpatched release's markers are empty


_STYLES: Dict[str, Style] = {
    "F16": Style("#000000", "s"),
    "K8V8": Style("#0072B2", "o"),
    "K8V4": Style("#D55E00", "D", "--"),
    "K4V8": Style("#009E73", "^", "-."),
    "K4V4": Style("#CC79A7", "v", ":"),
    "K8V5": Style("#E69F00", "P"),
    "K5V4": Style("#56B4E9", "X"),
    "K5V5": Style("#7F6A00", "h"),
    "F16 fused": Style("#777777", "s"),
}
# The unpatched release beside ours: the colour of the same types, dotted.
_UPSTREAM: Dict[str, Style] = {
    "upstream F16": Style("#000000", "s", ":", False),
    "upstream K8V4": Style("#D55E00", "D", ":", False),
}
_SPARE = [
    Style(c, m)
    for m, c in zip(
        ["p", "*", "<", ">", "d", "H", "8"],
        ["#56B4E9", "#E69F00", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#7F6A00"],
    )
]


def style(config: str, position: int = 0) -> Style:
    """The look of a configuration; ``position`` picks one for a label that has none of its own."""
    return _STYLES.get(config) or _UPSTREAM.get(config) or _SPARE[position % len(_SPARE)]


def pareto(points: Sequence[Tuple[float, float]]) -> List[int]:
    """Indices of the points that no other one beats in both coordinates (smaller is better), by x."""
    best: List[int] = []
    for i in sorted(range(len(points)), key=lambda i: points[i]):
        if not best or points[i][1] < points[best[-1]][1]:
            best.append(i)
    return best


def _place_labels(fig: Any, ax: Any, texts: List[Any], points: List[Tuple[float, float]]) -> None:
    """Move labels, in a fixed order of tries, until none covers another, a point, or the frame."""
    from matplotlib.transforms import Bbox

    renderer = fig.canvas.get_renderer()
    frame = ax.get_window_extent(renderer)
    dots = [ax.transData.transform(p) for p in points]
    taken: List[Any] = [Bbox.from_extents(x - 6, y - 6, x + 6, y + 6) for x, y in dots]
    tries = [(9, 5, "left", "bottom"), (9, -5, "left", "top"), (-9, 5, "right", "bottom"), (-9, -5, "right", "top")]
    tries += [(0, 12, "center", "bottom"), (0, -12, "center", "top"), (9, 22, "left", "bottom")]
    tries += [(-9, 22, "right", "bottom"), (9, -22, "left", "top"), (-9, -22, "right", "top")]
    for text in texts:
        for dx, dy, ha, va in tries:
            text.xyann = (dx, dy)
            text.set_ha(ha)
            text.set_va(va)
            box = text.get_window_extent(renderer)
            inside = box.x0 >= frame.x0 and box.x1 <= frame.x1 and box.y0 >= frame.y0 and box.y1 <= frame.y1
            if inside and not any(box.overlaps(t) for t in taken):
                break
        taken.append(text.get_window_extent(renderer))


def memory_quality(
    summaries: Sequence[Summary],
    outputs: Sequence[Union[str, "os.PathLike[str]"]],
    *,
    model: str,
    note: str = "",
) -> List[Path]:
    """KV memory against KL divergence, one point a configuration.

    Args:
        summaries: those without memory or KLD are left out.
        outputs: files to write; the ending says the format. None may exist.
        model: name for the title.
        note: one line below the title, for example text and sample size.

    Returns:
        The files written; none if there is nothing to draw.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    pts = [s for s in summaries if s.kv_bytes is not None and s.kld is not None]
    if not pts:
        return []
    xy = [(float(s.kv_mib or 0), float(s.kld or 0)) for s in pts]
    floor: Optional[float] = next((s.kld_floor for s in pts if s.kld_floor is not None), None)

    fig = Figure(figsize=(7.2, 4.6), dpi=160, layout="constrained")
    canvas: Any = FigureCanvasAgg(fig)
    ax = fig.add_subplot()
    front = pareto(xy)
    if len(front) > 1:
        ax.plot(
            [xy[i][0] for i in front],
            [xy[i][1] for i in front],
            color="#999999",
            lw=1.2,
            zorder=1,
            label="best trade-off",
        )
    if floor is not None:
        ax.axhline(floor, color="#000000", lw=0.9, ls=(0, (4, 3)), zorder=1)
    texts = []
    for i, (s, (x, y)) in enumerate(zip(pts, xy)):
        st = style(s.config, i)
        ax.errorbar(
            x, y, yerr=s.kld_se or None, fmt=st.marker, color=st.color, ms=8, capsize=3, elinewidth=1.2, zorder=3,
            markeredgecolor="white", markeredgewidth=0.8,
            clip_on=False,
        )  # fmt: skip
        saved = "" if not s.saving else f"  ({100 * s.saving:.0f} % less)"
        texts.append(
            ax.annotate(
                f"{s.config}{saved}", (x, y), xytext=(9, 5), textcoords="offset points", color=st.color, fontsize=9.5,
                fontweight="bold", zorder=4,
            )
        )  # fmt: skip

    top = max(y + (s.kld_se or 0) for s, (_, y) in zip(pts, xy))
    # f16 stands at its own floor, whatever the scale
    positive = [y for s, (_, y) in zip(pts, xy) if y > 0 and (s.kvq_key, s.kvq_val) != ("f16", "f16")]
    if positive and max(positive) / min(positive) > 50:
        ax.set_yscale("symlog", linthresh=min(positive), linscale=0.5)
        ax.set_ylim(-0.03 * min(positive), top * 1.6)
    else:
        ax.set_ylim(-0.03 * (top or 1e-3), (top or 1e-3) * 1.15)
    ax.set_xlim(0, max(x for x, _ in xy) * 1.08)
    n_ctx = next((s.n_ctx for s in pts if s.n_ctx), None)
    ax.set_xlabel(f"KV cache (MiB{f', {n_ctx} tokens' if n_ctx else ''})")
    ax.set_ylabel("mean KL divergence from f16 (nats per token)")
    fig.suptitle(f"KV cache memory against quality: {model}", fontsize=12, fontweight="bold", x=0.02, ha="left")
    if note:
        ax.set_title(note, fontsize=8.5, color="#444444", loc="left")
    ax.grid(True, color="#e4e4e4", lw=0.7)
    ax.set_axisbelow(True)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    if floor is not None:
        ax.annotate(
            f"f16 against itself: {floor:.6f}", (0.01, floor), xycoords=("axes fraction", "data"), xytext=(0, 4),
            textcoords="offset points", fontsize=8.5, color="#000000", va="bottom",
        )  # fmt: skip
    if len(front) > 1:
        ax.legend(loc="upper right", frameon=False, fontsize=8.5)
    canvas.draw()
    _place_labels(fig, ax, texts, xy)

    written: List[Path] = []
    for out in outputs:
        path = Path(out)
        with open(path, "xb") as f:
            fig.savefig(f, format=path.suffix.lstrip(".") or "png")
        written.append(path)
    return written


def short_number(value: float, decimals: int = 6) -> str:
    """Three digits that count, and no more than so many decimals: ``0.0121``, ``1.23``, ``0.000341``."""
    if abs(value) < 0.5 * 10**-decimals:
        return "0"
    digits = min(decimals, max(0, 2 - math.floor(math.log10(abs(value)))))
    return f"{value:.{digits}f}"


def pair_heat_map(
    cells: Dict[Tuple[int, int], Optional[float]],
    axis: Dict[int, Tuple[str, float]],
    output: Union[str, "os.PathLike[str]"],
    *,
    model: str,
    note: str = "",
) -> None:
    """KL divergence of every pair of widths: keys downwards, values to the right, colour on a log scale.

    The colours run from light to dark, so that the figure is readable in grey and without telling red from green.

    Args:
        cells: mean KLD in nats by bits of keys and values; None where attention gave NaN. Pairs that are not in it
            are hatched.
        axis: bits, in the order of the axes; for each the type's name and its bits per value.
        output: file to write, replaced if it is there; the ending says the format.
        model: name for the title.
        note: one line below the title.
    """
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    bits = list(axis)
    n = len(bits)
    # f16 against itself is 0 but for rounding: it would stretch the scale over decades that nothing else uses
    shown = [v for k, v in cells.items() if v is not None and v > 0 and k != (16, 16)]
    low, high = (min(shown), max(shown)) if shown else (1e-3, 1.0)
    norm = LogNorm(low, high if high > low else low * 10)
    cmap = matplotlib.colormaps["cividis_r"]

    # ids without chance and no date: the same numbers give the same file
    with matplotlib.rc_context({"svg.hashsalt": "kvsplit", "hatch.linewidth": 0.7}):
        fig = Figure(figsize=(7.6, 6.4), dpi=160, layout="constrained")
        FigureCanvasAgg(fig)
        ax = fig.add_subplot()
        for row, k in enumerate(bits):
            for col, v in enumerate(bits):
                box: Dict[str, Any] = {"edgecolor": "white", "linewidth": 1.5, "facecolor": "white"}
                ink, text = "#333333", ""
                if (k, v) not in cells:
                    box.update(edgecolor="#bbbbbb", linewidth=0.5, hatch="////", zorder=2)
                elif (value := cells[k, v]) is None:
                    box.update(edgecolor="#333333", linewidth=0.8, hatch="xx", zorder=2)
                    text = "NaN"
                else:
                    text = short_number(value, 5)  # more doesn't fit
                    if value > 0:
                        r, g, b, _ = box["facecolor"] = cmap(norm(max(value, low)))
                        ink = "white" if 0.299 * r + 0.587 * g + 0.114 * b < 0.5 else "black"
                    else:
                        box.update(edgecolor="#bbbbbb", linewidth=0.8, zorder=2)
                ax.add_patch(Rectangle((col, row), 1, 1, **box))
                if not text:
                    continue
                ax.text(
                    col + 0.5, row + 0.45, text, ha="center", va="center", fontsize=9.5, color=ink, fontweight="bold",
                    bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5} if text == "NaN" else None,
                )  # fmt: skip
                ax.text(
                    col + 0.5, row + 0.78, f"{(axis[k][1] + axis[v][1]) / 2:g} bits", ha="center", va="center",
                    fontsize=7, color=ink,
                    bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0} if text == "NaN" else None,
                )  # fmt: skip
        ax.set_xlim(0, n)
        ax.set_ylim(n, 0)
        ax.set_aspect("equal")
        middle = [i + 0.5 for i in range(n)]
        ax.set_xticks(middle, [f"V{b}\n{axis[b][0]}" for b in bits])
        ax.set_yticks(middle, [f"K{b}\n{axis[b][0]}" for b in bits])
        ax.tick_params(length=0, labelsize=9)
        ax.set_xlabel("values")
        ax.set_ylabel("keys")
        for side in ax.spines.values():
            side.set_visible(False)
        bar = fig.colorbar(ScalarMappable(norm, cmap), ax=ax, shrink=0.8, pad=0.02)
        bar.set_label("mean KL divergence from f16 (nats per token)")
        bar.outline.set_visible(False)
        fig.suptitle(f"Quality of every pair of widths: {model}", fontsize=12, fontweight="bold", x=0.02, ha="left")
        if note:
            ax.set_title(note, fontsize=8.5, color="#444444", loc="left")
        path = Path(output)
        part = path.with_name(f".{path.name}.part")
        form = path.suffix.lstrip(".") or "png"
        try:
            with open(part, "wb") as f:
                fig.savefig(f, format=form, metadata={"Date": None} if form == "svg" else None)
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)


def decode_depth(
    series: Mapping[str, Sequence[Tuple[int, float, float, float]]],
    output: Union[str, "os.PathLike[str]"],
    *,
    model: str,
    note: str = "",
) -> None:
    """Decode speed over the depth of the cache, one line a configuration; both axes are logarithmic.

    Lines are named at their right ends, in their colours, so that the figure needs no legend.

    Args:
        series: by configuration (depth in tokens, tokens per second, lower and upper end of its bar), by depth.
        output: file to write, replaced if it is there; the ending says the format.
        model: name for the title.
        note: one line below the title.
    """
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator

    # ids without chance and no date: the same numbers give the same file
    with matplotlib.rc_context({"svg.hashsalt": "kvsplit"}):
        fig = Figure(figsize=(7.6, 4.8), dpi=160, layout="constrained")
        canvas: Any = FigureCanvasAgg(fig)
        ax = fig.add_subplot()
        ends: List[Tuple[str, float, float]] = []
        for i, (name, pts) in enumerate(series.items()):
            st = style(name, i)
            xs, ys = [p[0] for p in pts], [p[1] for p in pts]
            below, above = [p[1] - p[2] for p in pts], [p[3] - p[1] for p in pts]
            ax.errorbar(
                xs, ys, yerr=[below, above], marker=st.marker, color=st.color, ls=st.line, ms=6.5, lw=1.5, capsize=3,
                elinewidth=1.1, markerfacecolor=st.color if st.filled else "white", markeredgecolor=st.color,
                zorder=3, label=name,
            )  # fmt: skip
            ends.append((name, xs[-1], ys[-1]))
        depths = sorted({p[0] for pts in series.values() for p in pts})
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.xaxis.set_minor_locator(NullLocator())
        ax.set_xticks(depths, [f"{d // 1024}k" if d and d % 1024 == 0 else str(d) for d in depths])
        speeds = [v for pts in series.values() for p in pts for v in p[1:]]
        low, high = min(speeds) / 1.15, max(speeds) * 1.15
        ticks = [m * 10**e for e in range(-3, 6) for m in (1, 2, 3, 5, 7) if low <= m * 10**e <= high]
        ax.set_ylim(low, high)
        ax.set_yticks(ticks)
        ax.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
        ax.yaxis.set_minor_formatter(NullFormatter())
        ax.set_xlim(depths[0] / 1.1, depths[-1] * 1.1)
        ax.set_xlabel("tokens in the cache")
        ax.set_ylabel("decoding (tokens per second)")
        fig.suptitle(f"Decode speed over depth: {model}", fontsize=12, fontweight="bold", x=0.02, ha="left")
        if note:
            ax.set_title(note, fontsize=8.5, color="#444444", loc="left")
        ax.grid(True, color="#e4e4e4", lw=0.7)
        ax.set_axisbelow(True)
        for side in ("top", "right"):
            ax.spines[side].set_visible(False)

        canvas.draw()
        # names one below the other, each as near to the end of its line as the others let it
        to_pixel, line = ax.transData, 12 * fig.dpi / 72
        taken = -math.inf
        for pixel, name, x, y in sorted((float(to_pixel.transform((x, y))[1]), name, x, y) for name, x, y in ends):
            taken = max(pixel, taken + line)
            place = float(to_pixel.inverted().transform((0, taken))[1])
            ax.annotate(
                name, (x, y), xytext=(1.02, place), textcoords=ax.get_yaxis_transform(),
                color=style(name, list(series).index(name)).color, fontsize=9, fontweight="bold", va="center",
                annotation_clip=False,
                arrowprops={"arrowstyle": "-", "lw": 0.6, "color": "#bbbbbb", "shrinkA": 0, "shrinkB": 5},
            )  # fmt: skip
        path = Path(output)
        part = path.with_name(f".{path.name}.part")
        form = path.suffix.lstrip(".") or "png"
        try:
            with open(part, "wb") as f:
                fig.savefig(f, format=form, metadata={"Date": None} if form == "svg" else None)
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)
