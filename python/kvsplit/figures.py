# SPDX-License-Identifier: MIT
"""The figures that :func:`kvsplit.plots.charts` draws from rows, one function each.

What wasn't measured is shown as missing (a gap and a mark, or a hatched cell) and named below the figure; nothing is
interpolated. Figures are narrow, one panel below the other, so that they are readable at the width of a phone.
"""

from __future__ import annotations

import math
import re
import statistics
import textwrap
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from kvsplit import stats
from kvsplit.cache_types import BITS, BY_NAME
from kvsplit.errors import KVSplitError, UsageError
from kvsplit.plots import _STYLES as STYLES
from kvsplit.plots import (
    FEW,
    MISSING,
    Chart,
    Point,
    Style,
    _place_labels,
    ink,
    log_ticks,
    looks,
    name_ends,
    name_floor,
    new_figure,
    on,
    pair_panel,
    pareto,
    plain,
    short_number,
    style,
    tick_text,
    tradeoff_panel,
)
from kvsplit.policy import Spec
from kvsplit.results import Row, speed_ratio

WIDTH = 5.8  # inches
#: Letters that a label has room for.
NAME = 14
#: Configurations that a table or bars show; more would make nobody wiser.
MANY = 16
_GREY = "#555555"
_BARS = "bars: standard error where larger than the mark"
_BITS = {name: bits for bits, name in BITS.items()}

# ---- rows, put in order


def _length(r: Row) -> int:
    """Tokens that a quality row is about."""
    return r.seq_len or r.ppl_ctx or 0


class SpeedPoint(NamedTuple):
    """Tokens per second: median and quartiles of the samples; and the ratio to f16, the median within rounds."""

    median: float
    low: float
    high: float
    samples: int
    ratio: Optional[float] = None


def _speed_point(rows: Sequence[Row], base: Sequence[Row]) -> SpeedPoint:
    last = {r.round: r for r in rows}  # of a round measured twice the later one, as in kvsplit.results.summarize
    samples = [x for r in last.values() for x in r.samples_ts or []]
    ratio, _ = speed_ratio(rows, base)
    return SpeedPoint(
        statistics.median(samples), *stats.quartiles(samples), len(samples), None if ratio is None else ratio[0]
    )


def short_names(configs: Sequence[str]) -> Dict[str, str]:
    """What is written for each label: itself, or its first letters where it has more than :data:`NAME`.

    No two are the same: those that begin alike are numbered.
    """
    out = {c: c for c in configs if len(c) <= NAME}
    for c in configs:
        if c in out:
            continue
        name, n = f"{c[: NAME - 1]}…", 1
        while name in out.values():
            n += 1
            name = f"{c[: NAME - 1 - len(str(n))]}…{n}"
        out[c] = name
    return out


@dataclass
class Model:
    """What was measured of one model. A later row of the same measurement stands for an earlier one.

    Attributes:
        name: file name.
        configs: those of all rows, by bits per value, the keys' first where they are equal.
        widths: of each what they are put in order by: bits per value and of keys, both negative, and the label.
        types: types of keys and values of each.
        f16: the labels of f16; what speeds are divided by first.
        look, names: of each configuration, alike in all figures of the model.
        memory: rows by configuration and tokens of the cache.
        quality: rows by configuration and length; of each length the text and number of chunks that most have.
        speed: by configuration and tokens in the cache; those with the settings that most have. ``True``: decoding.
        settings: for decoding and prefill, tokens that were processed and threads.
        retrieval, continuation: rows by configuration and length.
        layers: rows by configuration and layer, of the largest length.
        layers_length: that length.
        left_out: what of the rows no figure shows, in words.
    """

    name: str
    configs: List[str] = field(default_factory=list)
    widths: Dict[str, Tuple[float, float, str]] = field(default_factory=dict)
    types: Dict[str, Tuple[str, str]] = field(default_factory=dict)
    f16: List[str] = field(default_factory=list)
    look: Dict[str, Style] = field(default_factory=dict)
    names: Dict[str, str] = field(default_factory=dict)
    memory: Dict[Tuple[str, int], Row] = field(default_factory=dict)
    quality: Dict[Tuple[str, int], Row] = field(default_factory=dict)
    speed: Dict[bool, Dict[Tuple[str, int], SpeedPoint]] = field(default_factory=dict)
    settings: Dict[bool, Tuple[int, int]] = field(default_factory=dict)
    retrieval: Dict[Tuple[str, int], Row] = field(default_factory=dict)
    continuation: Dict[Tuple[str, int], Row] = field(default_factory=dict)
    layers: Dict[Tuple[str, int], Row] = field(default_factory=dict)
    layers_length: int = 0
    left_out: Dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Model:
        """Put rows of one model in order."""
        m = cls(rows[0].provenance.model_filename)
        own = [r for r in rows if r.kind != "bandwidth"]  # that is of the machine
        width = m.widths
        for r in own:
            key, val = _bits(r.kvq_key), _bits(r.kvq_val)
            width[r.config] = (-(r.bits_per_value or (key + val) / 2), -key, r.config)
            m.types[r.config] = (r.type_k, r.type_v)
            if (r.kvq_key, r.kvq_val) == ("f16", "f16") and r.config not in m.f16:
                m.f16.append(r.config)
        # f16 first, and what has no label of the usual form (the unpatched release) after the same widths
        m.configs = sorted(width, key=lambda c: width[c])
        m.f16.sort(key=lambda c: c != "F16")
        m.look, m.names = looks(m.configs), short_names(m.configs)
        for r in own:
            if r.n_ctx and r.kv_bytes is not None and r.kind != "memory":
                m.memory[r.config, r.n_ctx] = r
        for r in own:
            if r.kind == "memory":
                m.memory[r.config, int(r.n_ctx or 0)] = r
            elif r.kind == "retrieval":
                m.retrieval[r.config, int(r.seq_len or 0)] = r
            elif r.kind == "continuation":
                m.continuation[r.config, int(r.seq_len or 0)] = r
        m._take_quality([r for r in own if r.kind == "quality"])
        m._take_speed([r for r in own if r.kind == "speed"])
        layers = [r for r in own if r.kind == "layer"]
        m.layers_length = max((int(r.seq_len or 0) for r in layers), default=0)
        m.layers = {(r.config, int(r.layer or 0)): r for r in layers if r.seq_len == m.layers_length}
        if len(m.layers) < len({(r.config, r.layer, r.seq_len) for r in layers}):
            m.left_out["layers"] = "shorter lengths are in the rows"
        return m

    def _take_quality(self, rows: Sequence[Row]) -> None:
        def sample(r: Row) -> Tuple[Any, ...]:
            return (r.text_sha256, r.ppl_ctx, r.chunks)

        for length in sorted({_length(r) for r in rows}):
            here = {(r.config, sample(r)): r for r in rows if _length(r) == length}
            count = Counter(s for _, s in here)
            chosen = max(count, key=lambda s: (count[s], s[2] or 0, str(s[0])))
            self.quality.update({(c, length): r for (c, s), r in here.items() if s == chosen})
            if len(count) > 1:
                self.left_out["quality"] = "rows of other texts or numbers of chunks are left out"

    def _take_speed(self, rows: Sequence[Row]) -> None:
        def setting(r: Row) -> Tuple[int, int, int]:
            return (int(r.n_gen or r.n_prompt or 0), int(r.n_threads or 0), int(r.n_gpu_layers or 0))

        for decode in (True, False):
            mine = [r for r in rows if bool(r.n_gen) == decode]
            if not mine:
                continue
            count = Counter(setting(r) for r in mine)
            chosen = max(count, key=lambda s: (count[s], s))
            if len(count) > 1:
                self.left_out["speed"] = "rows of other threads or numbers of tokens are left out"
            cells: Dict[Tuple[str, int], List[Row]] = {}
            for r in mine:
                if setting(r) == chosen:
                    cells.setdefault((r.config, int(r.n_depth or 0)), []).append(r)
            self.settings[decode] = chosen[:2]
            self.speed[decode] = {(c, n): _speed_point(rs, cells.get(("F16", n), [])) for (c, n), rs in cells.items()}

    def of_kind(self, cells: Mapping[Tuple[str, int], Any]) -> List[str]:
        """The configurations that cells have, in order."""
        return [c for c in self.configs if any(c == config for config, _ in cells)]

    def main(self, configs: Sequence[str]) -> List[str]:
        """At most :data:`MANY` of them: f16, the best trade-offs, and those with a look of their own first."""
        if len(configs) <= MANY:
            return list(configs)
        length = max((n for _, n in self.quality), default=0)
        known = {c: r for (c, n), r in self.quality.items() if n == length and r.kld is not None and c in configs}
        front = pareto([(-float(self.widths[c][0]), float(r.kld or 0)) for c, r in known.items()])
        first = [*self.f16, *(list(known)[i] for i in front), *STYLES, *configs]
        chosen = list(dict.fromkeys(c for c in first if c in configs))[:MANY]
        return [c for c in configs if c in chosen]

    def cache(self, length: int, configs: Sequence[str]) -> Tuple[int, Dict[str, Row]]:
        """Memory of configurations beside their quality at a length: at that length, or at the nearest thing to it.

        Returns:
            Tokens of the caches, and the rows.
        """

        def fit(n_ctx: int) -> Tuple[int, bool, int]:
            found = [self.memory[c, n_ctx] for c in configs if (c, n_ctx) in self.memory]
            return len(found), n_ctx == length or any(r.seq_len == length for r in found), n_ctx

        n_ctx = max({n for _, n in self.memory}, key=fit, default=0)
        return n_ctx, {c: self.memory[c, n_ctx] for c in configs if (c, n_ctx) in self.memory}


def _bits(spec: str) -> float:
    """Bits per value of a SPEC's default; 0 if it can't be read."""
    try:
        return BY_NAME[Spec.parse(spec).default].bits_per_value
    except KVSplitError:
        return 0.0


# ---- what figures are made with


@dataclass
class Made:
    """A figure before it becomes a chart."""

    figure: Any
    title: str
    records: List[Dict[str, Any]]
    alt: str
    notes: List[str]
    hover: Dict[str, str]
    finish: Callable[[], None] = lambda: None  # what needs the places of things


class Hover:
    """Texts of marks, and a gid for each."""

    def __init__(self) -> None:
        self.texts: Dict[str, str] = {}

    def gid(self, text: str) -> str:
        """The gid of a new mark."""
        name = f"d{len(self.texts)}"
        self.texts[name] = text
        return name


def tokens(n: int) -> str:
    """A number of tokens, short: ``8k`` is 8192."""
    return f"{n // 1024}k" if n >= 1024 and n % 1024 == 0 else str(n)


def _mib(size: float) -> float:
    return size / 2**20


def _missing(m: Model, gaps: Sequence[Tuple[str, int]], what: str = "not measured") -> List[str]:
    """One note that names what is missing: configurations, each with its lengths."""
    by: Dict[Tuple[int, ...], List[str]] = {}
    places: Dict[str, List[int]] = {}
    for config, at in gaps:
        places.setdefault(m.names.get(config, config), []).append(at)
    for config, ats in places.items():
        by.setdefault(tuple(sorted(ats)), []).append(config)
    parts = [f"{', '.join(cs)} at {', '.join(map(tokens, ats))}" for ats, cs in by.items()]
    return [f"{what}: {'; '.join(parts)}"] if parts else []


def _never(m: Model, there: Sequence[str], what: str) -> List[str]:
    lacking = [m.names[c] for c in m.configs if c not in there]
    if len(lacking) > 6:
        lacking = [*lacking[:5], f"and {len(lacking) - 5} more"]
    return [f"no {what}: {', '.join(lacking)}"] if lacking else []


def _cut(m: Model, shown: Sequence[str]) -> List[str]:
    """One note that says what the names stand for that had to be cut; the data have all."""
    cut = [c for c in shown if m.names[c] != c]
    parts = [f"{m.names[c]} is {c if len(c) <= 80 else c[:79] + '…'}" for c in cut[:4]]
    parts += [f"{len(cut) - 4} more names are cut"] if len(cut) > 4 else []
    return ["; ".join(parts)] if parts else []


def _more(measured: Sequence[str], shown: Sequence[str]) -> List[str]:
    n = len(measured) - len(shown)
    return [f"{n} more configuration{'s'[: n != 1]} in the rows"] if n else []


def _marker(ax: Any, x: float, y: float, st: Style, gid: str, size: float = 6.5, **more: Any) -> None:
    ax.plot([x], [y], marker=st.marker, ms=st.size(size), color=st.color, ls="none", zorder=4,
            markerfacecolor=st.color if st.filled else "white", markeredgecolor="white" if st.filled else st.color,
            markeredgewidth=0.7, clip_on=False, gid=gid, **more)  # fmt: skip


def _alike(series: Mapping[str, Sequence[float]]) -> Dict[str, Tuple[int, int]]:
    """Of each line, which one it is of those that lie on one another, and how many these are: (0, 1) stands alone.

    Lines lie on one another if they have a place in common and are equal at all that they have in common.
    """
    groups: List[List[str]] = []
    for c, ys in series.items():
        for g in groups:
            both = [(a, b) for a, b in zip(series[g[0]], ys) if not math.isnan(a) and not math.isnan(b)]
            if both and all(math.isclose(a, b, rel_tol=1e-3) for a, b in both):
                g.append(c)
                break
        else:
            groups.append([c])
    return {c: (i, len(g)) for g in groups for i, c in enumerate(g)}


def _beneath(place: Tuple[int, int], width: float) -> Dict[str, Any]:
    """Width and order of a line that lies on others: the lower it lies, the wider, so that all are seen."""
    i, n = place
    return {"lw": width + 2.4 * (n - 1 - i), "zorder": 3 - 0.1 * (n - 1 - i)}


def _aside(ax: Any, place: Tuple[int, int], step: float) -> Any:
    """Data coordinates for marks that stand side by side, ``step`` points from one another."""
    from matplotlib.transforms import ScaledTranslation

    i, n = place
    return ax.transData + ScaledTranslation((i - (n - 1) / 2) * step / 72, 0, ax.figure.dpi_scale_trans)


def _absent(ax: Any, m: Model, places: Mapping[str, Sequence[float]]) -> None:
    """Crosses on the lower axis where a configuration has no data, above each other where several have none."""
    height: Counter[float] = Counter()
    for config, xs in places.items():
        for x in xs:
            ax.plot([x], [0.015 + 0.05 * height[x]], marker="x", ms=5, ls="none", color=m.look[config].color, mew=1.5,
                    transform=ax.get_xaxis_transform(), clip_on=False, zorder=5)  # fmt: skip
            height[x] += 1


def _length_ticks(ax: Any, lengths: Sequence[int]) -> None:
    """Ticks at the lengths that were measured; on a linear axis small ones that would touch go."""
    kept: List[int] = []
    for n in sorted(lengths, reverse=True):
        if not kept or kept[-1] - n > 0.07 * max(lengths):
            kept.append(n)
    ax.set_xticks(kept, [tokens(n) for n in kept])


def _log_ticks(axis: Any, low: float, high: float) -> None:
    """Ticks of a log axis in plain numbers."""
    from matplotlib.ticker import NullFormatter

    ticks = log_ticks(low, high)
    axis.set_ticks(ticks, list(map(tick_text, ticks)))
    axis.set_minor_formatter(NullFormatter())


def _range(values: Sequence[float], unit: str, digits: int = 3) -> str:
    low, high = short_number(min(values), digits), short_number(max(values), digits)
    return f"{low} {unit}" if low == high else f"{low} to {high} {unit}"


# ---- the figures


def memory(m: Model) -> Optional[Made]:
    """KV memory by length, a line a configuration, and the compute buffers below it."""
    if not m.memory:
        return None
    measured = m.of_kind(m.memory)
    configs = m.main(measured)
    lengths = sorted({n for _, n in m.memory})
    compute = any(r.compute_bytes is not None for r in m.memory.values())
    hover = Hover()
    records: List[Dict[str, Any]] = []
    texts: Dict[Tuple[str, int], str] = {}
    for c in configs:
        for n in lengths:
            r = m.memory.get((c, n))
            record: Dict[str, Any] = {"config": c, "n_ctx": n, "kv_mib": None, "saving": None, "compute_mib": None}
            if r is not None:
                record["kv_mib"], record["saving"] = _mib(float(r.kv_bytes or 0)), r.saving
                saved = f", {100 * r.saving:.1f} % less than f16" if r.saving else ""
                texts[c, n] = f"{c}: {_mib(float(r.kv_bytes or 0)):.2f} MiB at {n} tokens{saved}"
                if r.compute_bytes is not None:
                    record["compute_mib"] = _mib(r.compute_bytes)
                    texts[c, n] += f"; compute buffers {record['compute_mib']:.1f} MiB"
            records.append(record)
    gaps = [(c, n) for c in configs for n in lengths if (c, n) not in m.memory]
    notes = _missing(m, gaps, "x  not measured") + _never(m, measured, "memory rows") + _more(measured, configs)
    notes += _cut(m, configs)
    largest = lengths[-1]
    least = min((r for (_, n), r in m.memory.items() if n == largest), key=lambda r: float(r.kv_bytes or 0))
    full = next((float(r.kv_bytes_f16) for r in m.memory.values() if r.n_ctx == largest and r.kv_bytes_f16), None)
    alt = f"KV memory of {len(configs)} configurations at {', '.join(map(str, lengths))} tokens: "
    alt += f"at {largest}, {least.config} takes {_mib(float(least.kv_bytes or 0)):.1f} MiB"
    alt += f" and f16 {_mib(full):.1f} MiB." if full else "."

    if len(lengths) == 1:
        fig = new_figure(WIDTH, 1.5 + 0.36 * len(configs))
        ax = fig.add_subplot()
        top = max(float(r.kv_bytes or 0) + (r.compute_bytes or 0) for r in m.memory.values())
        for i, c in enumerate(configs):
            r = m.memory[c, largest]
            size, extra = _mib(float(r.kv_bytes or 0)), _mib(r.compute_bytes or 0)
            color = m.look[c].color
            ax.barh(i, size, 0.68, color=color, gid=hover.gid(texts[c, largest]))
            if extra:
                ax.barh(i, extra, 0.68, left=size, facecolor="#eeeeee", edgecolor="#bbbbbb", hatch="////", lw=0.6)
            saved = f"  ({100 * r.saving:.0f} % less)" if r.saving else ""
            ax.annotate(f"{size:.1f}{saved}", (size + extra, i), xytext=(5, 0), textcoords="offset points", va="center",
                        fontsize=9, color="#222222")  # fmt: skip
        ax.set_yticks(range(len(configs)), [m.names[c] for c in configs], fontsize=9, fontweight="bold")
        for label, c in zip(ax.get_yticklabels(), configs):
            label.set_color(ink(m.look[c].color))
        ax.set_ylim(len(configs) - 0.5, -0.5)
        ax.set_xlim(0, 1.36 * _mib(top))  # room for the numbers
        ax.set_xlabel(f"MiB at {largest} tokens", fontsize=9)
        plain(ax, grid="x")
        ax.tick_params(axis="y", length=0)
        if compute:
            notes.insert(0, "numbers: the KV cache alone; hatched: compute buffers")
        return Made(fig, f"KV cache at {largest} tokens", records, alt, notes, hover.texts)

    fig = new_figure(WIDTH, 5.2 if compute else 4.0)
    axes = fig.subplots(2 if compute else 1, 1, sharex=True, squeeze=False,
                        gridspec_kw={"height_ratios": [3, 1.4] if compute else [1]})[:, 0]  # fmt: skip
    kv, scratch = (
        {c: [math.nan if d[what] is None else float(d[what]) for d in records if d["config"] == c] for c in configs}
        for what in ("kv_mib", "compute_mib")
    )
    ax, alike = axes[0], _alike(kv)
    for c in configs:
        st, ys = m.look[c], kv[c]
        ax.plot(lengths, ys, color=st.color, ls=st.line, **_beneath(alike[c], 1.5))
        for n, y in zip(lengths, ys):
            if not math.isnan(y):
                _marker(ax, n, y, st, hover.gid(texts[c, n]), 6.5, transform=_aside(ax, alike[c], 8))
    ends = [(c, *[(n, y) for n, y in zip(lengths, kv[c]) if not math.isnan(y)][-1]) for c in configs]
    names = {c: ("= " if alike[c][0] else "") + m.names[c] for c in configs}
    _absent(ax, m, {c: [n for n, y in zip(lengths, kv[c]) if math.isnan(y)] for c in configs})
    ax.set_ylabel("KV cache (MiB)", fontsize=9)
    ax.set_ylim(0, 1.1 * max(y for ys in kv.values() for y in ys if not math.isnan(y)))
    plain(ax)
    if compute:
        _compute_buffers(axes[1], m, lengths, {c: scratch[c] for c in configs}, hover, texts)
    axes[-1].set_xlim(0, 1.03 * largest)
    _length_ticks(axes[-1], lengths)
    axes[-1].set_xlabel("tokens that the cache holds", fontsize=9)
    return Made(fig, "KV cache memory by length", records, alt, notes, hover.texts,
                lambda: name_ends(fig, axes[0], ends, look=m.look, names=names))  # fmt: skip


def _compute_buffers(ax: Any, m: Model, lengths: Sequence[int], series: Mapping[str, Sequence[float]], hover: Hover,
                     texts: Mapping[Tuple[str, int], str]) -> None:  # fmt: skip
    """Compute buffers by length: a line a configuration, or one band for all where they would hide each other."""
    ys = {n: [v for c in series for v in [series[c][i]] if not math.isnan(v)] for i, n in enumerate(lengths)}
    top = 1.1 * max(v for at in ys.values() for v in at)
    ax.set_ylim(0, top)
    ax.set_ylabel("compute\nbuffers (MiB)", fontsize=9)
    plain(ax)
    there = [n for n in lengths if ys[n]]
    if len(series) < 3 or max(max(ys[n]) - min(ys[n]) for n in there) > 0.06 * top:
        alike = _alike(series)
        for c, values in series.items():
            st = m.look[c]
            ax.plot(lengths, values, color=st.color, ls=st.line, **_beneath(alike[c], 1.5))
            for n, y in zip(lengths, values):
                if not math.isnan(y):
                    _marker(ax, n, y, st, hover.gid(texts[c, n]), 5, transform=_aside(ax, alike[c], 5))
        return
    middle = [statistics.median(ys[n]) if ys[n] else math.nan for n in lengths]
    low, high = ([f(ys[n]) if ys[n] else math.nan for n in lengths] for f in (min, max))
    ax.fill_between(lengths, low, high, color="#bbbbbb", lw=0)
    ax.plot(lengths, middle, color=_GREY, lw=1.5)
    for n, y in zip(lengths, middle):
        if not math.isnan(y):
            size = _range(ys[n], "MiB", 1)
            gid = hover.gid(f"compute buffers at {n} tokens: {size}, of {len(ys[n])} configurations")
            ax.plot([n], [y], marker="o", ms=5, color=_GREY, mec="white", mew=0.7, ls="none", zorder=4, gid=gid)
    ax.annotate("about the same for all", (there[-1], middle[lengths.index(there[-1])]), xytext=(0, -9),
                textcoords="offset points", ha="right", va="top", fontsize=8, color=_GREY)  # fmt: skip


def tradeoff(m: Model) -> Optional[Made]:
    """Memory against quality with the Pareto line: the largest length large, the others small below it."""
    lengths = []
    for n in sorted({n for _, n in m.quality}):
        having = [c for c in m.configs if (r := m.quality.get((c, n))) is not None and r.kld is not None]
        if m.cache(n, having)[1]:
            lengths.append(n)
    if not lengths:
        return None
    main, others = lengths[-1], lengths[:-1]
    hover = Hover()
    records: List[Dict[str, Any]] = []
    notes: List[str] = []
    gaps: List[Tuple[str, int]] = []
    panels: Dict[int, Tuple[int, List[Point], List[str], Optional[float]]] = {}
    for n in lengths:
        having = [c for c in m.configs if (r := m.quality.get((c, n))) is not None and r.kld is not None]
        n_ctx, caches = m.cache(n, having)
        points: List[Point] = []
        unseen: List[str] = []
        for c in m.configs:
            q, r = m.quality.get((c, n)), caches.get(c) or m.memory.get((c, n_ctx))
            record: Dict[str, Any] = {
                "config": c, "length": n, "n_ctx": n_ctx, "kv_mib": None, "saving": None, "kld": None, "kld_se": None,
            }  # fmt: skip
            if r is not None:
                record.update(kv_mib=_mib(float(r.kv_bytes or 0)), saving=r.saving)
            if q is not None and q.kld is not None:
                record.update(kld=q.kld, kld_se=q.kld_se)
            records.append(record)
            if q is not None and q.finite is False:
                notes.append(f"{m.names[c]} at {tokens(n)}: attention gave NaN")
                continue
            if record["kv_mib"] is None or record["kld"] is None:
                if (c, n) not in m.quality:
                    gaps.append((c, n))
                    unseen += [c] if record["kv_mib"] is not None else []
                continue
            pm = f" ± {short_number(float(q.kld_se))}" if q is not None and q.kld_se else ""
            text = f"{c}: {record['kv_mib']:.1f} MiB, KLD {short_number(record['kld'])}{pm} at {n} tokens"
            points.append(
                Point(c, record["kv_mib"], record["kld"], record["kld_se"] or 0.0, record["saving"] or 0.0,
                      c in m.f16, hover.gid(text), m.names[c])
            )  # fmt: skip
        floor = next(
            (r.kld_floor for (_, at), r in m.quality.items() if at == n and r.kld_floor is not None),
            next((p.kld for p in points if p.is_f16), None),
        )
        panels[n] = (n_ctx, points, unseen, floor)
    columns = min(3, len(others)) or 1
    below = -(-len(others) // columns)
    fig = new_figure(WIDTH, 4.4 + 1.75 * below)
    spec = fig.add_gridspec(1 + below, columns, height_ratios=[3.6, *[1.35] * below])
    ax = fig.add_subplot(spec[0, :])
    n_ctx, points, unseen, floor = panels[main]
    everything = [p for _, shown, _, _ in panels.values() for p in shown]
    texts = tradeoff_panel(ax, points, floor, scale=everything, look=m.look)
    _absent(ax, m, {c: [_mib(float(m.memory[c, n_ctx].kv_bytes or 0))] for c in unseen})
    if floor is not None:
        name_floor(ax, floor)
    if ax.get_legend_handles_labels()[0]:
        ax.legend(loc="upper right", frameon=False, fontsize=8)
    ax.set_xlabel(f"KV cache (MiB, {n_ctx} tokens)", fontsize=9)
    ax.set_ylabel("mean KL divergence from f16 (nats per token)", fontsize=9)
    if others:
        ax.set_title(f"{main} tokens", fontsize=9, loc="left", fontweight="bold")
    for i, n in enumerate(reversed(others)):
        small = fig.add_subplot(spec[1 + i // columns, i % columns])
        tradeoff_panel(small, panels[n][1], panels[n][3], labels=False, size=5.5, scale=everything, look=m.look)
        small.set_title(f"{n} tokens", fontsize=8, loc="left", fontweight="bold")
        small.tick_params(labelsize=7)
        if i % columns == 0:
            small.set_ylabel("KLD (nats)", fontsize=7.5)
        else:
            small.tick_params(labelleft=False)
        small.set_xlabel("MiB", fontsize=7.5)
    r = m.quality[points[0].config, main]
    sure = any(p.kld_se for p in everything)
    notes[:0] = [_sample(r, main), *([_BARS] if sure else [])]
    notes += ["names without room are left out; the data beside the figure has all"] if len(points) > FEW else []
    if main != n_ctx:
        notes.append(f"quality at {main} tokens, memory at {n_ctx}: their order is the same at every length")
    if any(panels[n][2] for n in lengths) or gaps:
        notes += _missing(m, gaps, "x  quality not measured")
    notes += _cut(m, [p.config for p in points])
    best = [points[i].config for i in pareto([(p.mib, p.kld) for p in points])]
    worst = max(points, key=lambda p: p.kld)
    alt = (
        f"KV memory against KL divergence at {main} tokens: the best trade-offs are {', '.join(best)}; "
        f"the largest divergence is {short_number(worst.kld)} nats per token, of {worst.config}."
    )
    return Made(fig, "KV cache memory against quality", records, alt, notes, hover.texts,
                lambda: _place_labels(fig, ax, texts, [(p.mib, p.kld) for p in points]))  # fmt: skip


def _sample(r: Row, length: int) -> str:
    """The text and its size, for notes."""
    chunks = f"{r.chunks} chunk{'s'[: r.chunks != 1]} of {r.ppl_ctx} tokens"
    at = "" if r.ppl_ctx == length else f" at {length} tokens"
    return f"text: {r.text or 'unknown'}, {chunks}{at}"


def speed(m: Model) -> Optional[Made]:
    """Prefill above decode, by tokens in the cache: medians and quartiles of the raw samples."""
    kinds = [d for d in (False, True) if m.speed.get(d)]
    if not kinds:
        return None
    hover = Hover()
    records: List[Dict[str, Any]] = []
    notes: List[str] = []
    seen = [c for c in m.configs if any(c == k for d in kinds for k, _ in m.speed[d])]
    depths = {d: sorted({n for _, n in m.speed[d]}) for d in kinds}
    names = {False: "prefill", True: "decode"}
    texts: Dict[Tuple[bool, str, int], str] = {}
    gaps: List[Tuple[str, int]] = []
    for d in kinds:
        here = [c for c in seen if any(c == k for k, _ in m.speed[d])]
        notes += _never(m, here, names[d])
        for c in here:
            for n in depths[d]:
                p = m.speed[d].get((c, n))
                record = {"config": c, "what": names[d], "n_depth": n, "median_ts": None, "low_ts": None,
                          "high_ts": None, "samples": 0, "ratio_f16": None}  # fmt: skip
                if p is None:
                    gaps.append((c, n))
                else:
                    record.update(
                        median_ts=p.median, low_ts=p.low, high_ts=p.high, samples=p.samples, ratio_f16=p.ratio
                    )
                    texts[d, c, n] = (
                        f"{c}: {names[d]} {p.median:.1f} tokens/s after {n} tokens"
                        f" (quartiles {p.low:.1f} to {p.high:.1f}, {p.samples} sample{'s'[: p.samples != 1]})"
                        + (f", {p.ratio:.2f}x of f16" if p.ratio is not None and c != "F16" else "")
                    )
                records.append(record)
    most = max(len(v) for v in depths.values())
    height = {d: 0.28 * len(seen) for d in kinds} if most == 1 else {d: 2.3 for d in kinds}
    fig = new_figure(WIDTH, 1.5 + sum(height.values()) + 0.55 * len(kinds))
    axes = fig.subplots(len(kinds), 1, squeeze=False)[:, 0]
    ends: Dict[bool, List[Tuple[str, float, float]]] = {}
    for ax, d in zip(axes, kinds):
        count, threads = m.settings[d]
        head = f"decoding {count} tokens" if d else f"prefill of {count} tokens"
        after = f", after {depths[d][0]} in the cache" if most == 1 else ""
        ax.set_title(f"{head}{after}, {threads} thread{'s'[: threads != 1]}", fontsize=9, loc="left", fontweight="bold")
        if most == 1:
            _speed_dots(ax, m, d, seen, depths[d][0], hover, texts)
        else:
            ends[d] = _speed_lines(ax, m, d, seen, depths[d], hover, texts)
    counts = [p.samples for d in kinds for p in m.speed[d].values()]
    size = f"{min(counts)}" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"
    notes.insert(0, f"median; bars: quartiles of {size} samples" if max(counts) > 1 else "one sample, no spread")
    notes += [m.left_out["speed"]] if "speed" in m.left_out else []
    notes += _missing(m, list(dict.fromkeys(gaps)), "x  not measured")
    notes += _cut(m, seen)
    last = kinds[-1]
    deepest = depths[last][-1]
    there = {c: m.speed[last][c, deepest].median for c in seen if (c, deepest) in m.speed[last]}
    fastest = max(there, key=lambda c: there[c])
    alt = f"Speed of {len(seen)} configurations: {names[last]} after {deepest} tokens is "
    alt += f"{_range(list(there.values()), 'tokens per second', 1)}, {fastest} the fastest."

    def finish() -> None:
        for ax, d in zip(axes, kinds):
            if d in ends:
                name_ends(fig, ax, ends[d], 8, look=m.look, names=m.names)

    return Made(fig, "Speed by depth of the cache", records, alt, notes, hover.texts, finish)


def _speed_dots(ax: Any, m: Model, decode: bool, configs: Sequence[str], depth: int, hover: Hover,
                texts: Mapping[Tuple[bool, str, int], str]) -> None:  # fmt: skip
    top = max(p.high for p in m.speed[decode].values())
    for i, c in enumerate(configs):
        st, p = m.look[c], m.speed[decode].get((c, depth))
        if p is None:
            ax.plot(
                [0.02], [i], marker="x", ms=5, mew=1.3, color=st.color, ls="none", transform=ax.get_yaxis_transform()
            )
            continue
        ax.hlines(i, 0, p.median, color="#dddddd", lw=1, zorder=1)
        if p.samples > 1:
            ax.errorbar(p.median, i, xerr=[[p.median - p.low], [p.high - p.median]], fmt="none", ecolor=st.color,
                        elinewidth=1.8, zorder=3)  # fmt: skip
        _marker(ax, p.median, i, st, hover.gid(texts[decode, c, depth]), 7)
        ax.annotate(
            f"{p.median:.1f}", (p.high, i), xytext=(8, 0), textcoords="offset points", va="center", fontsize=8.5
        )
    ax.set_yticks(range(len(configs)), [m.names[c] for c in configs], fontsize=9, fontweight="bold")
    for label, c in zip(ax.get_yticklabels(), configs):
        label.set_color(ink(m.look[c].color))
    ax.set_ylim(len(configs) - 0.4, -0.6)
    ax.set_xlim(0, 1.16 * top)
    ax.set_xlabel("tokens per second", fontsize=9)
    plain(ax, grid="x")
    ax.tick_params(axis="y", length=0)


def _speed_lines(ax: Any, m: Model, decode: bool, configs: Sequence[str], depths: Sequence[int], hover: Hover,
                 texts: Mapping[Tuple[bool, str, int], str]) -> List[Tuple[str, float, float]]:  # fmt: skip
    cells = m.speed[decode]
    positive = [n for n in depths if n > 0]
    # doublings are equal steps; depth 0 stands one step before the first
    ax.set_xscale("symlog", base=2, linthresh=positive[0] if positive else 1, linscale=1)
    ends: List[Tuple[str, float, float]] = []
    mine = [c for c in configs if any((c, n) in cells for n in depths)]
    absent: Dict[str, Sequence[float]] = {}
    # side by side, so that bars at one depth don't hide each other; of some 300 points a depth has half its share
    step = min(3.8, 150 / len(depths) / len(mine)) if len(depths) > 1 else 8
    for c in configs:
        st = m.look[c]
        aside = _aside(ax, (mine.index(c), len(mine)) if c in mine else (0, 1), step)
        there = [n for n in depths if (c, n) in cells]
        ys = [cells[c, n].median if (c, n) in cells else math.nan for n in depths]
        ax.plot(depths, ys, color=st.color, ls=st.line, lw=1.3, zorder=3, transform=aside)
        wide = [(n, cells[c, n]) for n in there if cells[c, n].samples > 1]
        if wide:
            arms = [[p.median - p.low for _, p in wide], [p.high - p.median for _, p in wide]]
            ax.errorbar([n for n, _ in wide], [p.median for _, p in wide], yerr=arms, fmt="none", ecolor=st.color,
                        elinewidth=1.4, zorder=3, transform=aside)  # fmt: skip
        for n in there:
            p = cells[c, n]
            _marker(ax, n, p.median, st, hover.gid(texts[decode, c, n]), 6, transform=aside)
        if there:
            ends.append((c, there[-1], cells[c, there[-1]].median))
        absent[c] = [n for n in depths if n not in there] if there else []
    _absent(ax, m, absent)
    ax.minorticks_off()
    ax.set_xticks(depths, [tokens(n) for n in depths])
    step = 0.5 if len(depths) > 1 else 1
    low = -step * (positive[0] if positive else 1) if depths[0] == 0 else depths[0] / 2**step
    ax.set_xlim(low, depths[-1] * 2**step if depths[-1] else 1)
    values = [v for p in cells.values() for v in (p.low, p.high)]
    if max(values) > 8 * min(values):
        ax.set_yscale("log")
        ax.set_ylim(min(values) / 1.25, max(values) * 1.2)
        _log_ticks(ax.yaxis, *ax.get_ylim())
    else:
        ax.set_ylim(0, 1.08 * max(values))
    ax.set_ylabel("tokens per second", fontsize=9)
    ax.set_xlabel("tokens in the cache before", fontsize=9)
    plain(ax)
    return ends


def _pairs_of(m: Model, length: int) -> Dict[Tuple[int, int], Row]:
    """Quality rows by bits of keys and values, of configurations whose layers are alike and that have a preset."""
    return {
        (_BITS[r.kvq_key], _BITS[r.kvq_val]): r
        for (c, n), r in m.quality.items()
        if n == length and r.kvq_key in _BITS and r.kvq_val in _BITS and not c.startswith("upstream")
    }


def pairs(m: Model) -> Optional[Made]:
    """KL divergence of the pairs of widths that were measured, keys downwards, values to the right."""
    lengths = sorted({n for _, n in m.quality})
    length = max(lengths, key=lambda n: (len(_pairs_of(m, n)), n), default=0)
    found = {at: r for at, r in _pairs_of(m, length).items() if r.kld is not None or r.finite is False}
    if len(found) < 4:
        return None
    keys = sorted({k for k, _ in found}, reverse=True)
    values = sorted({v for _, v in found}, reverse=True)
    axis = {b: (BITS[b], BY_NAME[BITS[b]].bits_per_value) for b in {*keys, *values}}
    hover = Hover()
    gids: Dict[Tuple[int, int], str] = {}
    records: List[Dict[str, Any]] = []
    for k in keys:
        for v in values:
            r = found.get((k, v))
            bits = (axis[k][1] + axis[v][1]) / 2
            records.append(
                {"key_bits": k, "value_bits": v, "bits_per_value": bits, "kld": None if r is None else r.kld,
                 "kld_se": None if r is None else r.kld_se, "finite": None if r is None else r.finite}
            )  # fmt: skip
            if r is None:
                gids[k, v] = hover.gid(f"K{k}V{v}: not measured")
            elif r.kld is None:
                gids[k, v] = hover.gid(f"K{k}V{v}: attention gave NaN")
            else:
                pm = f" ± {short_number(r.kld_se)}" if r.kld_se else ""
                gids[k, v] = hover.gid(f"K{k}V{v}: KLD {short_number(r.kld)}{pm}, {bits:g} bits per value")
    # beside the cells stand names and the bar, above and below them title, names and notes
    fig = new_figure(WIDTH, 1.3 + min(0.8, (WIDTH - 1.7) / len(values)) * len(keys))
    ax = fig.add_subplot()
    pair_panel(fig, ax, keys, values, {at: r.kld for at, r in found.items()}, axis, gids, 7.5)
    ax.tick_params(labelsize=8)
    r = next(iter(found.values()))
    notes = [_sample(r, length)]
    hatched = len(keys) * len(values) - len(found)
    notes += [f"hatched: not measured ({hatched} of {len(keys) * len(values)} pairs)"] if hatched else []
    notes += ["crossed: attention gave NaN"] if any(r.kld is None for r in found.values()) else []
    finite = {at: float(r.kld) for at, r in found.items() if r.kld is not None and at != (16, 16)}
    alt = f"KL divergence of {len(found)} pairs of widths at {length} tokens"
    if finite:
        low, high = min(finite, key=lambda a: finite[a]), max(finite, key=lambda a: finite[a])
        alt += f", from {short_number(finite[low])} nats per token (K{low[0]}V{low[1]})"
        alt += f" to {short_number(finite[high])} (K{high[0]}V{high[1]})"
    return Made(fig, "Quality of pairs of widths", records, alt + ".", notes, hover.texts)


def sensitivity(m: Model) -> Optional[Made]:
    """Each pair of widths beside its mirror image: bytes are equal, and the wider side is the keys or the values."""
    twins: List[Tuple[int, int, int, Row, Row]] = []  # length, wide, narrow, wide keys, wide values
    alone: List[Tuple[str, int]] = []
    for n in sorted({n for _, n in m.quality}):
        cells = {at: r for at, r in _pairs_of(m, n).items() if r.kld is not None}
        for k, v in sorted(cells, reverse=True):
            if k > v and (v, k) in cells:
                twins.append((n, k, v, cells[k, v], cells[v, k]))
            elif k != v and (v, k) not in cells and 16 not in (k, v):
                alone.append((f"K{v}V{k}", n))
    if not twins:
        return None
    notes: List[str] = []
    if len(twins) > 12:
        most = Counter(t[0] for t in twins)
        length = max(most, key=lambda n: (most[n], n))
        notes += [f"the other lengths are in the rows; here {length} tokens"] if len(most) > 1 else []
        twins, alone = [t for t in twins if t[0] == length], [a for a in alone if a[1] == length]
    several = len({t[0] for t in twins}) > 1
    hover = Hover()
    records: List[Dict[str, Any]] = []
    fig = new_figure(WIDTH, 1.4 + (0.44 if len(twins) < 8 else 0.3) * len(twins))
    ax = fig.add_subplot()
    floor = min((float(r.kld) for t in twins for r in t[3:] if r.kld and r.kld > 0), default=1e-6)
    ratios: List[float] = []
    shown: List[float] = []
    labels: List[str] = []
    for i, (n, k, v, wide_keys, wide_values) in enumerate(twins):
        x = [max(float(r.kld or 0), floor / 3) for r in (wide_keys, wide_values)]
        shown += x
        ratios.append(x[1] / x[0])
        ax.plot(x, [i, i], color="#bbbbbb", lw=2.2, zorder=2, solid_capstyle="round")
        for at, r, what in ((x[0], wide_keys, "keys"), (x[1], wide_values, "values")):
            name = f"K{k}V{v}" if what == "keys" else f"K{v}V{k}"
            st, se = style(name), float(r.kld_se or 0)
            if se:
                ax.errorbar(at, i, xerr=[[min(se, 0.9 * at)], [se]], fmt="none", ecolor=st.color, elinewidth=1.8,
                            zorder=3)  # fmt: skip
            pm = f" ± {short_number(se)}" if se else ""
            text = f"{name}: KLD {short_number(float(r.kld or 0))}{pm} at {n} tokens"
            _marker(ax, at, i, st, hover.gid(text), 8 if len(twins) < 8 else 6.5)
            right = (what == "values") == (x[1] >= x[0])
            ax.annotate(
                name, (at + (se if right else -min(se, 0.9 * at)), i), xytext=(8 if right else -8, 0),
                textcoords="offset points", ha="left" if right else "right", va="center", fontsize=8,
                color=ink(st.color), fontweight="bold",
            )  # fmt: skip
            records.append({"config": name, "wider": what, "length": n, "bits_per_value": r.bits_per_value,
                            "kld": r.kld, "kld_se": r.kld_se})  # fmt: skip
        labels.append(f"{k} and {v} bits" + (f", {tokens(n)}" if several else ""))
        ax.annotate(f"{_times(ratios[-1])}x", (1.01, i), xycoords=ax.get_yaxis_transform(), fontsize=8.5, va="center",
                    fontweight="bold", color="#222222", annotation_clip=False)  # fmt: skip
    ax.set_xscale("log")
    low, high = min(shown), max(shown)
    room = (max(high, low * 3) / low) ** 0.22  # for the names
    ax.set_xlim(low / room, max(high, low * 3) * room)
    _log_ticks(ax.xaxis, *ax.get_xlim())
    ax.set_ylim(len(twins) - 0.4, -0.6)
    ax.set_yticks(range(len(twins)), labels, fontsize=8.5)
    ax.set_xlabel("mean KL divergence from f16 (nats per token)", fontsize=9)
    plain(ax, grid="x")
    ax.tick_params(axis="y", length=0)
    better = sum(x > 1 for x in ratios)
    said = f"{better} of {len(ratios)}" if len(ratios) > 1 else "yes" if better else "no"
    typical = math.exp(statistics.fmean(map(math.log, ratios)))
    rule = "keys need more bits than values" if better * 2 > len(ratios) else "here keys don't need more than values"
    mean = f"; geometric mean {_times(typical)}x" if len(ratios) > 1 else ""
    notes.insert(0, f"at the right: KLD with wider values over KLD with wider keys{mean}")
    r = twins[0][3]
    sample = f"text: {r.text or 'unknown'}, in chunks of the lengths" if several else _sample(r, twins[0][0])
    notes += [f"wider keys are better: {said}; {sample}", _BARS]
    notes += _missing(m, alone, "not compared, because not measured")
    span = " to ".join(dict.fromkeys((_times(min(ratios)), _times(max(ratios)))))
    alt = (
        f"Equal bytes, bits to keys or to values: {rule}; wider keys give the smaller KL divergence in {better} of "
        f"{len(ratios)} comparisons; with wider values it is {span} times as large."
    )
    title = "Keys need more bits than values" if better * 2 > len(ratios) else "Keys against values at equal bytes"
    return Made(fig, title, records, alt, notes, hover.texts)


def _times(x: float) -> str:
    return f"{x:.0f}" if x >= 9.95 else f"{x:.1f}" if x >= 1 else f"{x:.2f}"


#: Marks of the error by layer that have a text of their own; more would make the file heavy.
LAYER_MARKS = 260


def layers(m: Model) -> Optional[Made]:
    """Error of each layer: of the attention's output, of the stored keys, and of the stored values."""
    if not m.layers:
        return None
    configs = m.of_kind(m.layers)
    places = sorted({n for _, n in m.layers})
    places = list(range(places[0], places[-1] + 1))
    hover = Hover()
    names = (("output_nse", "attention output"), ("k_nse", "stored keys"), ("v_nse", "stored values"))
    records = [
        {"config": c, "layer": n, **{f: None if r is None else getattr(r, f) for f, _ in names}}
        for c in configs
        for n in places
        for r in [m.layers.get((c, n))]
    ]
    fig = new_figure(WIDTH, 6.6)
    axes = fig.subplots(3, 1, sharex=True, gridspec_kw={"height_ratios": [1.7, 1, 1]})
    ends: List[Tuple[str, float, float]] = []
    exact = [c for c in configs if not any((r.output_nse or 0) > 0 for (k, _), r in m.layers.items() if k == c)]
    drawn = [c for c in configs if c not in exact]
    marks = len(drawn) * len(places) <= LAYER_MARKS
    stored: List[Tuple[Any, List[Tuple[str, float, float]], Dict[str, str]]] = []
    for ax, (name, label) in zip(axes, names):
        absent: Dict[str, Sequence[float]] = {}
        series = {
            c: [float(getattr(r, name) or math.nan) if (r := m.layers.get((c, n))) else math.nan for n in places]
            for c in drawn
        }
        alike = _alike(series)
        types: List[Tuple[str, float, float]] = []  # what is stored depends on one of the two types alone
        for c in drawn:
            st, ys = m.look[c], series[c]
            there = [(n, y) for n, y in zip(places, ys) if not math.isnan(y)]
            if not there:
                continue
            worst = max(there, key=lambda p: p[1])
            whole = f"{c}: {label}, largest NSE {worst[1]:.2g} in layer {worst[0]}"
            one_by_one = marks and name == "output_nse"
            ax.plot(places, ys, color=st.color, ls=st.line, marker=st.marker if marks and not alike[c][0] else None,
                    ms=0 if one_by_one else st.size(3), mew=0, gid=None if one_by_one else hover.gid(whole),
                    **_beneath(alike[c], 1.2))  # fmt: skip
            for n, y in there if one_by_one else ():
                _marker(ax, n, y, st, hover.gid(f"{c}, layer {n}: {label} NSE {y:.2g}"), 4.2)
            if name == "output_nse":
                ends.append((c, *there[-1]))
                absent[c] = [n for n in places if (c, n) not in m.layers]
            elif not alike[c][0]:
                types.append((c, *there[-1]))
        side = {c: m.types[c][name == "v_nse"] for c, _, _ in types}
        short = short_names(list(dict.fromkeys(side.values())))
        stored.append((ax, types, {c: short[t] for c, t in side.items()}))
        _absent(ax, m, absent)
        ax.set_yscale("log")
        if ax.lines:
            _log_ticks(ax.yaxis, *ax.get_ylim())
        ax.set_title(label, fontsize=9, loc="left", fontweight="bold")
        ax.set_ylabel("NSE", fontsize=9)
        plain(ax)
    span = len(places)
    step = next(s for s in (1, 2, 4, 5, 10, 20, 50, 100, 1000) if span / s <= 10)
    axes[-1].set_xticks([n for n in places if n % step == 0])
    axes[-1].set_xlim(places[0] - 0.5, places[-1] + 0.5)
    axes[-1].set_xlabel("layer, as a SPEC counts", fontsize=9)
    gaps = {c: [n for n in places if (c, n) not in m.layers] for c in drawn}
    missing = [
        f"{m.names[c]}: {', '.join(map(str, v[:6]))}{' ...' if len(v) > 6 else ''}" for c, v in gaps.items() if v
    ]
    notes = [f"NSE: |error|² / |exact|², dimensionless; text of {m.layers_length} tokens"]
    notes += [f"x  layers not measured: {'; '.join(missing)}"] if missing else []
    notes += [f"exact, so not on a log scale: {', '.join(m.names[c] for c in exact)}"] if exact else []
    notes += [m.left_out["layers"]] if "layers" in m.left_out else []
    notes += _never(m, configs, "layer rows") + _cut(m, drawn)
    mean: Dict[int, float] = {}
    for n in places:
        logs = [math.log(float(r.output_nse)) for c in drawn if (r := m.layers.get((c, n))) and r.output_nse]
        if logs:
            mean[n] = statistics.fmean(logs)
    alt = f"Error of each of {len(places)} layers for {len(configs)} configurations at {m.layers_length} tokens"
    if mean:
        first = max(mean, key=lambda n: mean[n])
        alt += f"; over all of them the output of layer {first} has the largest"

    def finish() -> None:
        name_ends(fig, axes[0], ends, 8, look=m.look, names=m.names)
        black = Style("#444444", "")
        for ax, types, written in stored[1:]:
            name_ends(fig, ax, types, 8, look={c: black for c in written}, names=written)

    return Made(fig, "Error by layer", records, alt + ".", notes, hover.texts, finish)


def retrieval(m: Model) -> Optional[Made]:
    """Hidden numbers that came back, by length and by where they stood; a small heat map a configuration."""
    if not m.retrieval:
        return None
    import matplotlib
    from matplotlib.patches import Rectangle

    configs = m.of_kind(m.retrieval)
    lengths = sorted({n for _, n in m.retrieval})
    depths = sorted({d for r in m.retrieval.values() for d in r.needle_depths or []})
    columns = min(2 if any(len(m.names[c]) > 8 for c in configs) else 3, len(configs))
    lines = -(-len(configs) // columns)
    fig = new_figure(WIDTH, 1.35 + lines * (0.62 + 0.25 * len(depths)))
    grid = fig.subplots(lines, columns, squeeze=False, sharex=True, sharey=True)
    names = [tokens(n) if len(lengths) < 6 or (len(lengths) - k) % 2 else "" for k, n in enumerate(lengths)]
    cmap = matplotlib.colormaps["Blues_r"]
    hover = Hover()
    records: List[Dict[str, Any]] = []
    found_all: Dict[str, Tuple[int, int]] = {}
    gaps: List[Tuple[str, int]] = []
    for i, ax in enumerate(grid.flat):
        if i >= len(configs):
            ax.set_visible(False)
            continue
        c = configs[i]
        hits = tries = 0
        for x, n in enumerate(lengths):
            r = m.retrieval.get((c, n))
            at = {} if r is None else dict(zip(r.needle_depths or [], r.needle_found or []))
            if r is None:
                gaps.append((c, n))
            for y, d in enumerate(depths):
                trials, found = (None if r is None or d not in at else r.needle_trials), at.get(d)
                records.append({"config": c, "seq_len": n, "needle_depth": d, "found": found, "trials": trials})
                if found is None or not trials:
                    gid = hover.gid(f"{c}, {n} tokens, depth {100 * d:.0f} %: not measured")
                    ax.add_patch(Rectangle((x, y), 1, 1, gid=gid, **MISSING))
                    continue
                hits, tries = hits + found, tries + trials
                gid = hover.gid(f"{c}, {n} tokens, depth {100 * d:.0f} %: {found} of {trials} found")
                color = cmap(0.9 * found / trials)[:3]
                ax.add_patch(Rectangle((x, y), 1, 1, facecolor=color, edgecolor="white", linewidth=1.2, gid=gid))
                if len(lengths) > 5:  # no room; the colours and the data remain
                    continue
                ax.text(x + 0.5, y + 0.52, f"{found}/{trials}", ha="center", va="center", fontsize=7, color=on(color))
        found_all[c] = (hits, tries)
        ax.set_xlim(0, len(lengths))
        ax.set_ylim(len(depths), 0)
        ax.set_xticks([k + 0.5 for k in range(len(lengths))], names, fontsize=8)
        ax.set_yticks([k + 0.5 for k in range(len(depths))], [f"{100 * d:.0f} %" for d in depths], fontsize=8)
        ax.tick_params(length=0)
        head = f"{m.names[c]}  {hits}/{tries}"
        ax.set_title(head, fontsize=9, loc="left", fontweight="bold", color=ink(m.look[c].color))
        for side in ax.spines.values():
            side.set_visible(False)
        # the last of a column may not stand in the last line
        if i + columns >= len(configs):
            ax.tick_params(labelbottom=True)
            ax.set_xlabel("tokens", fontsize=8)
        if i % columns == 0:
            ax.set_ylabel("place in the text", fontsize=8)
    notes = ["numbers that came back without a mistake / tries; darker: more were lost"]
    hatched = any(d["found"] is None for d in records)
    notes += _missing(m, gaps, "hatched: not measured") or (["hatched: not measured"] if hatched else [])
    notes += _never(m, configs, "retrieval rows") + _cut(m, configs)
    alt = "Hidden numbers found: " + ", ".join(f"{c} {a} of {b}" for c, (a, b) in found_all.items()) + "."
    return Made(fig, "Needles found", records, alt, notes, hover.texts)


# ---- the table that is a picture


class Cell(NamedTuple):
    """What stands in a cell: a value and what belongs to it below; ``rank`` is smallest for the best."""

    value: str
    below: str = ""
    rank: Optional[float] = None
    spread: float = 0.0  # two ranks nearer than their spreads are no different


_Column = Tuple[str, str, float, Dict[str, Cell]]  # head, below it, share of the width, cells by configuration


#: Inches of a column that is one share wide.
SHARE = 0.72


def _shares(text: str, points: float, *, bold: bool = False) -> float:
    """How wide a text is, as a share of the summary's width."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    font = FontProperties(size=points, weight="bold" if bold else "normal")
    width, _, _ = text_to_path.get_text_width_height_descent(text, font, False)
    return float(width) / 72 / (0.97 * SHARE)  # the figure's margins are taken from the shares


def _pm(value: float, decimals: int, scale: float = 1) -> str:
    """A standard error, that isn't called 0 because its digits are too few."""
    text = short_number(scale * value, decimals) if scale == 1 else f"{scale * value:.{decimals}f}"
    return f"± <{10**-decimals:.{decimals}f}" if value > 0 and float(text) == 0 else f"± {text}"


def _columns(m: Model) -> List[_Column]:
    out: List[_Column] = []

    def add(head: str, below: str, share: float, cells: Dict[str, Cell]) -> None:
        if cells:
            # any of them may get the star
            wide = [_shares(f"★ {x.value}", 9, bold=True) for x in cells.values()]
            wide += [_shares(x.below, 7) for x in cells.values()]
            wide += [_shares(head, 8.5, bold=True), _shares(below, 7)]
            out.append((head, below, max(share, 0.22 + max(wide)), cells))

    n_ctx = max((n for _, n in m.memory), default=0)
    add("KV cache", f"MiB at {tokens(n_ctx)}", 1.25, {
        c: Cell(f"{_mib(float(r.kv_bytes or 0)):.1f}", f"{100 * r.saving:.1f} % less" if r.saving else "",
                float(r.kv_bytes or 0))
        for (c, n), r in m.memory.items() if n == n_ctx
    })  # fmt: skip
    # decoding; prefill where nothing else was timed
    for decode, name in [(d, "decode" if d else "prefill") for d in (True, False) if m.speed.get(d)][:1]:
        speeds = m.speed[decode]
        depth = max((n for _, n in speeds), default=0)
        at = {c: p for (c, n), p in speeds.items() if n == depth}
        cells = {}
        for c, p in at.items():
            ts = f"{p.median:.1f}" if p.median < 1000 else f"{p.median:.0f}"
            # half the distance of the quartiles
            value, below = (ts, "t/s") if p.ratio is None else (f"{p.ratio:.2f}x", f"{ts} t/s")
            cells[c] = Cell(value, below, -p.median, (p.high - p.low) / 2)
        add(name, f"after {tokens(depth)}", 1.15, cells)
    length = max((n for _, n in m.quality), default=0)
    rows = {c: r for (c, n), r in m.quality.items() if n == length}
    where = f"at {tokens(length)}"
    change: Dict[str, Cell] = {}
    for c, r in rows.items():
        if r.ppl is None:
            change[c] = Cell("NaN")
        elif r.ppl_change is not None:
            change[c] = Cell(f"{100 * r.ppl_change:+.2f} %", _pm(r.ppl_change_se or 0, 2, 100),
                             abs(r.ppl_change), r.ppl_change_se or 0.0)  # fmt: skip
        elif r.ppl_ratio is not None:
            change[c] = Cell(f"{100 * (r.ppl_ratio - 1):+.2f} %", _pm(r.ppl_ratio_se or 0, 2, 100),
                             abs(r.ppl_ratio - 1), r.ppl_ratio_se or 0.0)  # fmt: skip
        else:
            change[c] = Cell(f"{r.ppl:.3f}", f"± {r.ppl_se or 0:.3f}")
    add("PPL change", where, 1.3, change)
    add("KLD", f"{where}, nats", 1.2, {
        c: Cell("NaN") if r.kld is None else Cell(
            short_number(r.kld, 5), _pm(r.kld_se or 0, 5), r.kld, r.kld_se or 0.0)
        for c, r in rows.items() if r.kld is not None or r.finite is False
    })  # fmt: skip
    add("same top", where, 1.25, {
        c: Cell(f"{100 * r.top1:.1f} %", _pm(r.top1_se or 0, 1, 100), -r.top1, r.top1_se or 0.0)
        for c, r in rows.items() if r.top1 is not None
    })  # fmt: skip
    found: Dict[str, int] = {}
    tries: Dict[str, int] = {}
    for (c, _), r in m.retrieval.items():
        found[c] = found.get(c, 0) + sum(r.needle_found or [])
        tries[c] = tries.get(c, 0) + len(r.needle_found or []) * (r.needle_trials or 0)
    # who was asked less often can't be the best
    most = max(tries.values(), default=0)
    needles = {c: Cell(f"{found[c]}/{tries[c]}", "", -float(found[c]) if tries[c] == most else None) for c in tries}
    add("needles", "found", 0.95, needles)
    last = max((n for _, n in m.continuation), default=0)
    first: Dict[str, Cell] = {}
    for (c, n), r in m.continuation.items():
        if n == last and r.same_tokens:
            middle = statistics.median(r.same_tokens)
            first[c] = Cell(f"{middle:g}", f"of {r.n_gen}", -middle)
    add("same text", "tokens, median", 1.2, first)
    return out


def _best(m: Model, cells: Mapping[str, Cell]) -> List[str]:
    """The best quantized configurations, and those that differ from the best by no more than both spreads."""
    ranked = {c: x for c, x in cells.items() if x.rank is not None and c not in m.f16}
    if len(ranked) < 2:
        return []
    top = min(ranked.values(), key=lambda x: float(x.rank or 0))
    best = [
        c for c, x in ranked.items() if float(x.rank or 0) - float(top.rank or 0) <= math.hypot(x.spread, top.spread)
    ]
    return best if len(best) < len(ranked) else []


def summary(m: Model) -> Optional[Made]:
    """All configurations side by side, at the largest length of each kind."""
    from matplotlib.patches import Rectangle

    columns = _columns(m)
    measured = [c for c in m.configs if any(c in cells for *_, cells in columns)]
    shown = m.main(measured)
    if not columns or not shown:
        return None
    hover = Hover()
    stored = {c: "/".join(m.types[c]) for c in shown}
    stored = {c: t if len(t) <= 19 else f"{t[:18]}…" for c, t in stored.items()}
    longest = max(max(_shares(m.names[c], 9.5, bold=True), _shares(stored[c], 7)) for c in shown)
    first = max(1.45, 0.34 + longest + 0.1)
    wide = first + sum(share for _, _, share, _ in columns)
    width = max(WIDTH, SHARE * wide)
    line = 0.42
    fig = new_figure(width, 1.35 + line * len(shown))
    ax = fig.add_subplot()
    ax.set_xlim(0, wide)
    ax.set_ylim(len(shown), -1.05)
    ax.axis("off")
    ax.plot([0, wide], [0, 0], color="#333333", lw=1)
    records: List[Dict[str, Any]] = []
    for i, c in enumerate(shown):
        if i % 2 == 0:
            ax.add_patch(Rectangle((0, i), wide, 1, facecolor="#f4f4f4", edgecolor="none", zorder=0))
        st = m.look[c]
        _marker(ax, 0.16, i + 0.5, st, hover.gid(f"{c}: stored as {'/'.join(m.types[c])}"), 7)
        ax.text(0.34, i + 0.34, m.names[c], fontsize=9.5, fontweight="bold", color=ink(st.color), va="center")
        ax.text(0.34, i + 0.72, stored[c], fontsize=7, color=_GREY, va="center")
        records.append({"config": c, "type_k": m.types[c][0], "type_v": m.types[c][1]})
    left = first
    lacking = False
    for head, below, share, cells in columns:
        right = left + share - 0.1
        ax.text(right, -0.66, head, fontsize=8.5, fontweight="bold", ha="right", va="center")
        ax.text(right, -0.26, below, fontsize=7, color=_GREY, ha="right", va="center")
        best = _best(m, cells)
        for i, c in enumerate(shown):
            cell = cells.get(c)
            records[i][head] = None if cell is None else f"{cell.value} {cell.below}".strip()
            records[i][f"{head}, best"] = c in best
            if cell is None:
                lacking = True
                gid = hover.gid(f"{c}, {head}: not measured")
                ax.add_patch(Rectangle((right - 0.42, i + 0.26), 0.42, 0.48, gid=gid, **{**MISSING, "zorder": 1}))
                continue
            gid = hover.gid(f"{c}, {head} {below}: {records[i][head]}" + (" (best)" if c in best else ""))
            if c in best:
                ax.add_patch(Rectangle((left + 0.02, i + 0.06), share - 0.04, 0.88, facecolor="#fff3c4",
                                       edgecolor="#b58900", linewidth=0.9, zorder=1))  # fmt: skip
            text, weight = (f"★ {cell.value}", "bold") if c in best else (cell.value, "normal")
            ax.text(right, i + (0.34 if cell.below else 0.5), text, fontsize=9, ha="right", va="center", gid=gid,
                    fontweight=weight)  # fmt: skip
            if cell.below:
                ax.text(right, i + 0.72, cell.below, fontsize=7, color=_GREY, ha="right", va="center")
        left += share
    notes = ["★ best of the quantized, and what its standard error or spread doesn't tell from it"]
    rows = [r for (_, n), r in m.quality.items() if n == max(n for _, n in m.quality)]
    notes += [_sample(rows[0], _length(rows[0]))] if rows else []
    notes += ["hatched: not measured"] if lacking else []
    notes += _more(measured, shown) + _cut(m, shown)
    least = min((r for r in m.memory.values()), key=lambda r: float(r.bits_per_value or 99), default=None)
    alt = f"{len(shown)} configurations side by side: " + ", ".join(shown)
    if least is not None and least.saving:
        alt += f"; {least.config} takes {100 * least.saving:.1f} % less memory than f16"
    return Made(fig, "KV cache configurations side by side", records, alt + ".", notes, hover.texts)


# ---- all of them

#: Figures in the order in which they are drawn: the function, and the rows that it needs, for messages.
FIGURES: Dict[str, Tuple[Callable[[Model], Optional[Made]], str]] = {
    "summary": (summary, "rows of kind memory, speed, quality, retrieval or continuation"),
    "memory": (memory, "rows of kind memory"),
    "tradeoff": (tradeoff, "rows of kind quality with a KL divergence, and the memory of the same configurations"),
    "speed": (speed, "rows of kind speed"),
    "pairs": (pairs, "rows of kind quality of four pairs of bits or more"),
    "sensitivity": (sensitivity, "rows of kind quality of a pair and of its mirror image, such as K8V4 and K4V8"),
    "layers": (layers, "rows of kind layer"),
    "retrieval": (retrieval, "rows of kind retrieval"),
}


def check_names(names: Sequence[str]) -> None:
    """Refuse what is no figure.

    Raises:
        UsageError: names it, and those that there are.
    """
    for name in names:
        if name not in FIGURES:
            raise UsageError(f"--figure: {name!r} is none of {', '.join(FIGURES)}")


def draw(rows: Sequence[Row], names: Optional[Sequence[str]] = None, title: Optional[str] = None) -> List[Chart]:
    """As :func:`kvsplit.plots.charts`."""
    import matplotlib

    check_names(names or ())
    # names of files and labels are no formulas
    with matplotlib.rc_context({"text.parse_math": False}):
        return _draw(rows, names, title)


def _draw(rows: Sequence[Row], names: Optional[Sequence[str]], title: Optional[str]) -> List[Chart]:
    by: Dict[str, List[Row]] = {}
    for r in rows:
        by.setdefault(r.provenance.model_sha256, []).append(r)
    models = [Model.of(mine) for mine in by.values()]
    slugs: Dict[str, int] = {}
    out: List[Chart] = []
    for m in models:
        slug = re.sub(r"[^a-z0-9]+", "-", Path(m.name).stem.lower()).strip("-")[:60] or "model"
        slugs[slug] = slugs.get(slug, 0) + 1
        slug += "" if slugs[slug] == 1 else f"-{slugs[slug]}"
        for kind, (figure, _) in FIGURES.items():
            made = figure(m) if names is None or kind in names else None
            if made is not None:
                out.append(_chart(made, kind if len(models) == 1 else f"{kind}-{slug}", kind, m, title))
    return out


def _chart(made: Made, name: str, kind: str, m: Model, title: Optional[str]) -> Chart:
    fig = made.figure
    whole = f"{made.title}: {title or Path(m.name).stem}"
    letters = int(fig.get_figwidth() * 9.6)  # of the title's font that fit
    head = textwrap.wrap(whole, letters, break_on_hyphens=False)
    fig.suptitle("\n".join(head), fontsize=11, fontweight="bold", x=0.015, ha="left")
    note = "\n".join(made.notes)
    small = int(fig.get_figwidth() * 15.6)
    lines = [part for n in made.notes for part in textwrap.wrap(n, small)]
    # what stands around the panels has room of its own: figures are made for a title and a note of one line
    fig.set_figheight(fig.get_figheight() + (1.2 * 11 * (len(head) - 1) + 1.2 * 7.5 * (len(lines) - 1)) / 72)
    fig.supxlabel("\n".join(lines), fontsize=7.5, color=_GREY, x=0.015, ha="left")
    fig.draw_without_rendering()
    made.finish()
    fig.draw_without_rendering()  # room for what was placed
    fig.set_layout_engine("none")  # from now on it is the same however often and wherever it is drawn
    return Chart(name, whole, note, fig, made.records, made.alt, made.hover, kind, m.name)
