# SPDX-License-Identifier: MIT
"""Charts: one look for a configuration everywhere, and figures that go to files, to pages and to their data.

:func:`charts` draws every figure that rows have data for (:mod:`kvsplit.figures` holds them, one function each). A
:class:`Chart` goes to files with :meth:`Chart.save`, its data beside it, and into a page with :meth:`Chart.svg`.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import math
import os
import re
import xml.etree.ElementTree as ET
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Dict, Iterable, List, Mapping, Optional, Sequence, Set, Tuple, Union

from kvsplit.errors import CacheFolderError, UsageError, printable, why
from kvsplit.results import Row, Summary, showable

# ---- looks


@dataclass(frozen=True)
class Style:
    """How a configuration looks; ``marker`` and ``line`` are matplotlib's."""

    color: str
    marker: Any
    line: Any = "-"
    filled: bool = True  # the unpatched release's markers are empty

    def size(self, points: float) -> float:
        """The marker's size that covers about as much as a disc of so many points: stars are thin."""
        return points * (1.45 if self.marker == "*" or isinstance(self.marker, tuple) else 1.0)


# Okabe and Ito's colours, then those that lie farthest from them (CIELAB) in normal, protan, deutan and tritan vision.
_STYLES: Dict[str, Style] = {
    "F16": Style("#000000", "s"),
    "K8V8": Style("#0072B2", "o"),
    "K8V4": Style("#D55E00", "D", "--"),
    "K4V8": Style("#009E73", "^", "-."),
    "K4V4": Style("#CC79A7", "v", ":"),
    "K8V5": Style("#E69F00", "P"),
    "K5V4": Style("#56B4E9", "X"),
    "K5V5": Style("#7F6A00", "h"),
    "K6V5": Style("#6600CC", (5, 1, 0), (0, (6, 1.5, 1, 1.5))),
    "K6V3": Style("#803020", (4, 1, 0), (0, (2, 1))),
    "K6V6": Style("#0000A6", "d", (0, (5, 1))),
    "K3V3": Style("#800055", "8", (0, (1, 2))),
    "F16 fused": Style("#777777", "s"),
}
# The unpatched release beside ours: the colour of the same types, dotted.
_UPSTREAM: Dict[str, Style] = {
    "upstream F16": Style("#000000", "s", ":", False),
    "upstream K8V4": Style("#D55E00", "D", ":", False),
}
# The other presets: the marker says the keys' bits, colour and line say the values'. None of these markers is above.
_KEY_MARKERS: Dict[int, Any] = {
    32: "*", 16: (8, 1, 0), 8: ">", 6: "<", 5: "p", 4: (4, 1, 45), 3: (3, 1, 0), 2: (3, 1, 180),
}  # fmt: skip
_VALUE_LOOKS: Dict[int, Tuple[str, Any]] = {
    32: ("#777777", "-"),
    16: ("#56B4E9", "-"),
    8: ("#0072B2", (0, (7, 2))),
    6: ("#009E73", (0, (1, 1))),
    5: ("#E69F00", (0, (4, 1.5, 1, 1.5))),
    4: ("#D55E00", "--"),
    3: ("#CC79A7", (0, (3, 1, 1, 1, 1, 1))),
    2: ("#7F6A00", ":"),
}
_PRESET = re.compile(r"K(32|16|8|[2-6])V(32|16|8|[2-6])")


def style(config: str) -> Style:
    """The look of a configuration: the same label looks the same in every figure and every run.

    Presets differ from each other in marker or line. Other labels (SPECs by layer, upstream's types) get a look by
    their checksum, so that two of them may share one: :func:`looks` keeps them apart.
    """
    return _fixed(config) or _numbered(zlib.crc32(config.encode()))


def _fixed(config: str) -> Optional[Style]:
    """The look of a label that has one whatever else is drawn."""
    known = _STYLES.get(config) or _UPSTREAM.get(config)
    preset = _PRESET.fullmatch(config)
    if known is not None or preset is None:
        return known
    color, line = _VALUE_LOOKS[int(preset.group(2))]
    return Style(color, _KEY_MARKERS[int(preset.group(1))], line)


def _numbered(n: int) -> Style:
    """One of 512 looks: every colour with every marker and every line of the presets' two tables."""
    values, markers = list(_VALUE_LOOKS.values()), list(_KEY_MARKERS.values())
    return Style(values[n % 8][0], markers[n // 8 % 8], values[n // 64 % 8][1])


def looks(configs: Iterable[str]) -> Dict[str, Style]:
    """Looks for what is drawn together: no two are the same, and they don't depend on the order.

    Presets look as everywhere. Another label whose look is taken gets the next one that is free: one that differs
    from all others even without its line (points have none) and even without its colour, as long as there is one.
    """
    out: Dict[str, Style] = {}
    others: List[str] = []
    for c in sorted(set(configs)):
        fixed = _fixed(c)
        if fixed is None:
            others.append(c)
        else:
            out[c] = fixed
    points = {(s.color, str(s.marker)) for s in out.values()}
    greys = {(str(s.marker), str(s.line)) for s in out.values()}
    both = {(s.color, str(s.marker), str(s.line)) for s in out.values()}
    for c in others:
        n = zlib.crc32(c.encode())
        tries = [_numbered(n + i) for i in range(512)]
        free = [s for s in tries if (s.color, str(s.marker), str(s.line)) not in both]
        apart = [s for s in free if (s.color, str(s.marker)) not in points]
        best = [s for s in apart if (str(s.marker), str(s.line)) not in greys]
        s = out[c] = (best or apart or free or tries)[0]  # beyond 512 labels nothing is left to tell them apart
        points.add((s.color, str(s.marker)))
        greys.add((str(s.marker), str(s.line)))
        both.add((s.color, str(s.marker), str(s.line)))
    return out


def _luminance(color: Any) -> float:
    """Relative luminance, WCAG 2.2."""
    from matplotlib.colors import to_rgb

    lin = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(color)]
    return 0.2126 * lin[0] + 0.7152 * lin[1] + 0.0722 * lin[2]


def ink(color: str) -> str:
    """The colour, darkened until text in it has the contrast on white that small text needs: 4.5 to 1 (WCAG 2.2)."""
    from matplotlib.colors import to_hex, to_rgb

    r, g, b = to_rgb(color)
    while 1.05 / (_luminance((r, g, b)) + 0.05) < 4.5:
        r, g, b = 0.95 * r, 0.95 * g, 0.95 * b
    return str(to_hex((r, g, b)))


# ---- figures and their files

#: ids without chance: the same numbers give the same file.
RC: Any = {"svg.hashsalt": "kvsplit", "hatch.linewidth": 0.7}
FORMATS = ("png", "svg", "pdf")
_SVG, _XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
# Verdana is as wide as the font that figures are laid out with; the others are narrower, so nothing collides.
_FONTS = "'DejaVu Sans', Verdana, Arial, sans-serif"


def new_figure(width: float, height: float) -> Any:
    """An empty figure, inches; nothing of it needs a display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    fig = Figure(figsize=(width, height), dpi=160, layout="constrained")
    fig.get_layout_engine().set(w_pad=0.07, h_pad=0.07)  # type: ignore[union-attr, call-arg]
    FigureCanvasAgg(fig)
    return fig


#: What figures and the data beside them name as what made them: only such a file may be replaced.
GENERATOR = "kvsplit plot"


def is_ours(path: Path) -> bool:
    """True if a file is a figure that :meth:`Chart.save` drew, or the data that it wrote beside one."""
    try:
        data = path.read_bytes()
    except OSError:
        return False
    if path.suffix == ".json":
        try:
            known = json.loads(data)
        except ValueError:
            return False
        return isinstance(known, dict) and known.get("generator") == GENERATOR
    mark = {
        ".svg": f'data-generator="{GENERATOR}"'.encode(),
        ".png": b"tEXtSoftware\0" + GENERATOR.encode(),
        ".pdf": f"/Creator ({GENERATOR})".encode(),
    }.get(path.suffix)
    return mark is not None and mark in data


def check_free(paths: Iterable[Path], *, replace: bool) -> None:
    """Refuse to write where something lies that must stay.

    Args:
        paths: what is to be written.
        replace: figures of ours may be replaced.

    Raises:
        UsageError: names the first file that must stay, and the way out.
    """
    for path in paths:
        if not os.path.lexists(path):
            continue
        if not is_ours(path):
            raise UsageError(
                f"--out: {path} is there already and no figure that {GENERATOR} drew, so it stays; "
                "give another folder, or move it"
            )
        if not replace:
            raise UsageError(f"--out: {path} is there already; give another folder, or --force to replace it")


@dataclass
class Chart:
    """A figure of one model.

    Attributes:
        name: no other chart of one call of :func:`charts` has it; the start of ids in a page.
        title, note: what stands above the figure; the note names texts, sample sizes, and what is missing.
        figure: matplotlib's Figure.
        records: what is drawn, one flat object a mark. Sizes in MiB, KL divergences in nats, times as rows have them.
        alt: a sentence for those who don't see it, with numbers.
        hover: texts by ``gid`` of the mark.
        kind: of which figure it is one, a key of :data:`kvsplit.figures.FIGURES`.
        model: file name of the model.
    """

    name: str
    title: str
    note: str
    figure: Any
    records: List[Dict[str, Any]]
    alt: str
    hover: Dict[str, str] = field(default_factory=dict)
    kind: str = ""
    model: str = ""

    def svg(self, *, text: bool = True) -> str:
        """The figure as an ``<svg>`` element for HTML, as wide as its surroundings.

        Marks with a text in :attr:`hover` have it as ``<title>``, the class ``has-data``, and take the focus.

        Args:
            text: keep text as text, that can be found and read aloud; False draws letters as shapes.
        """
        return self._svg(text=text, page=True)

    def _svg(self, *, text: bool, page: bool) -> str:
        import matplotlib

        out = io.StringIO()
        settings: Any = {**RC, "svg.fonttype": "none" if text else "path"}
        with matplotlib.rc_context(settings):
            self.figure.savefig(out, format="svg", metadata={"Date": None})
        ET.register_namespace("", _SVG)
        ET.register_namespace("xlink", _XLINK)
        root = ET.fromstring(out.getvalue())
        for child in [c for c in root if c.tag.endswith("metadata")]:
            root.remove(child)
        _lighten(root, self.name, set(self.hover))
        for e in list(root.iter()):
            if "font" in e.attrib.get("style", ""):
                # matplotlib writes the shorthand or the family alone, by version
                e.set("style", re.sub(r"(font-family: |font: [^;]*?px )[^;]*", rf"\1{_FONTS}", e.attrib["style"]))
            gid = e.attrib.get("id", "")[len(self.name) + 1 :]
            if gid in self.hover:
                e.set("class", "has-data")
                if page:
                    e.set("tabindex", "0")
                title = ET.Element(f"{{{_SVG}}}title")
                title.text = self.hover[gid]
                e.insert(0, title)
        root.set("role", "img")
        root.set("aria-label", self.alt)
        root.set("data-generator", GENERATOR)
        if page:
            root.set("width", "100%")
            root.attrib.pop("height", None)
        return ET.tostring(root, encoding="unicode") + "\n"

    def data(self, command: str = "", sources: Sequence[Mapping[str, str]] = ()) -> Dict[str, Any]:
        """What lies beside the figure: its data, the files of its rows, and the command that draws it."""
        return {
            "generator": GENERATOR,
            "figure": self.kind or self.name,
            "model": self.model,
            "title": self.title,
            "note": self.note,
            "alt": self.alt,
            "command": command,
            "rows": [dict(s) for s in sources],
            "data": self.records,
        }

    def paths(self, folder: Path, stem: str, formats: Sequence[str] = ("png", "svg")) -> List[Path]:
        """The files that :meth:`save` writes: a figure a format, then the JSON with the data."""
        base = f"{stem}-{self.name}" if stem else self.name
        return [folder / f"{base}.{ext}" for ext in (*formats, "json")]

    def save(
        self,
        folder: Path,
        stem: str,
        formats: Sequence[str] = ("png", "svg"),
        command: str = "",
        *,
        sources: Sequence[Mapping[str, str]] = (),
        replace: bool = False,
    ) -> List[Path]:
        """Write ``STEM-NAME.FORMAT`` for each format, and ``STEM-NAME.json`` with the data.

        Args:
            folder: made if it isn't there.
            stem: how the files' names begin; may be empty.
            formats: of :data:`FORMATS`.
            command: that draws the figure, for the record.
            sources: for each file of rows its ``file`` and ``sha256``, for the record.
            replace: write over figures of ours that are there.

        Returns:
            The files written, the JSON last.

        Raises:
            UsageError: a format is unknown, or a file is there that must stay (:func:`check_free`); nothing is written
                then.
            CacheFolderError: the folder can't be written.
        """
        unknown = [f for f in formats if f not in FORMATS]
        if unknown:
            raise UsageError(f"--format: {unknown[0]!r} is none of {', '.join(FORMATS)}")
        paths = self.paths(folder, stem, formats)
        check_free(paths, replace=replace)
        data = json.dumps(self.data(command, sources), indent=1, ensure_ascii=False, allow_nan=False) + "\n"
        at = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for at in paths[:-1]:
                _write(at, self._drawn(at.suffix[1:]), replace=replace)
            at = paths[-1]
            _write(at, data.encode(errors="backslashreplace"), replace=replace)  # which is JSON's escape, too
        except OSError as e:
            raise CacheFolderError(f"--out: {at} can't be written ({why(e)})") from None
        return paths

    def _drawn(self, form: str) -> bytes:
        import matplotlib

        if form == "svg":
            return b'<?xml version="1.0" encoding="utf-8"?>\n' + self._svg(text=False, page=False).encode()
        out = io.BytesIO()
        with matplotlib.rc_context(RC):
            # said instead of matplotlib's version, too: a new one alone changes no file
            self.figure.savefig(out, format=form, metadata={
                "pdf": {"CreationDate": None, "Creator": GENERATOR}, "png": {"Software": GENERATOR},
            }.get(form))  # fmt: skip
        return out.getvalue()


def _lighten(root: ET.Element, name: str, kept: Set[str]) -> None:
    """Take out of an SVG what is half of it and nobody sees, and begin the ids that stay with ``name-``.

    That is: ids that nothing refers to, long ids, decimals below a hundredth of a point, indentation, and styles of a
    mark that its shape has already.
    """
    used: Dict[str, str] = {}
    for e in root.iter():
        for key, value in e.attrib.items():
            for found in re.findall(r"#([\w.-]+)", value) if key != "id" else ():
                used.setdefault(found, f"{name}-{len(used):x}")
    new = {e.attrib["id"]: used.get(e.attrib["id"], "") for e in root.iter() if "id" in e.attrib}
    new.update({gid: f"{name}-{gid}" for gid in kept})
    styles = {e.attrib["id"]: e.attrib.get("style", "") for e in root.iter() if "id" in e.attrib}

    def rounded(found: "re.Match[str]") -> str:
        return f"{float(found.group()):.2f}"

    for e in root.iter():
        if e.tag == f"{{{_SVG}}}use" and "style" in e.attrib:
            shape = styles.get(e.attrib.get(f"{{{_XLINK}}}href", "#")[1:], "").split("; ")
            rest = [part for part in e.attrib.pop("style").split("; ") if part not in shape]
            if rest:
                e.set("style", "; ".join(rest))
        for key, value in list(e.attrib.items()):
            if key == "id":
                value = new[value]
                if not value:
                    del e.attrib[key]
                    continue
            elif "#" in value:
                value = re.sub(r"#([\w.-]+)", lambda m: f"#{new.get(m.group(1)) or m.group(1)}", value)
            if key in ("d", "x", "y"):
                value = " ".join(re.sub(r"-?\d+\.\d{3,}", rounded, value).split())
            elif key == "transform" and "scale" not in value:
                value = re.sub(r"-?\d+\.\d{3,}", rounded, value)
            e.set(key, value)
        if e.text is not None and not e.text.strip():
            e.text = None
        e.tail = "\n" if e.tail is not None and not e.tail.strip() else e.tail


def charts(rows: Sequence[Row], names: Optional[Sequence[str]] = None, *, title: Optional[str] = None) -> List[Chart]:
    """Every figure that rows have data for, model by model in the order of first appearance.

    Args:
        rows: of any kinds, runs and models; a later row of the same measurement replaces an earlier one.
        names: of :data:`kvsplit.figures.FIGURES`; None draws all.
        title: stands in the figures' titles instead of the model's file name.

    Raises:
        UsageError: a name is unknown.
    """
    from kvsplit import figures

    return figures.draw([showable(r) for r in rows], names, None if title is None else printable(title))


def _write(path: Path, data: bytes, *, replace: bool = True) -> None:
    """Write a file in one step: a reader sees the old one or the whole new one.

    Raises:
        FileExistsError: it is there, perhaps since a moment ago, and ``replace`` is False.
        OSError: it can't be written.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(part, "xb") as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        if not replace:
            try:
                os.link(part, path)  # unlike a rename it never replaces
                return
            except FileExistsError:
                raise
            except OSError:  # no hard links here
                if os.path.lexists(path):
                    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from None
        os.replace(part, path)
    finally:
        with contextlib.suppress(OSError):  # a folder that is gone, a disk that became read-only
            part.unlink()


def _save_figure(fig: Any, output: Union[str, "os.PathLike[str]"]) -> None:
    """Write a figure, replacing the file if it is there; the ending says the format."""
    import matplotlib

    path = Path(output)
    form = path.suffix.lstrip(".") or "png"
    out = io.BytesIO()
    with matplotlib.rc_context(RC):
        fig.savefig(out, format=form, metadata={"Date": None} if form == "svg" else None)
    _write(path, out.getvalue())


# ---- parts of figures


def pareto(points: Sequence[Tuple[float, float]]) -> List[int]:
    """Indices of the points that no other one beats in both coordinates (smaller is better), by x."""
    best: List[int] = []
    for i in sorted(range(len(points)), key=lambda i: points[i]):
        if not best or points[i][1] < points[best[-1]][1]:
            best.append(i)
    return best


def _place_labels(fig: Any, ax: Any, texts: List[Any], points: List[Tuple[float, float]]) -> None:
    """Move labels, in a fixed order of tries, until none covers another, a point, the legend, or the frame.

    Those that find no place are hidden.
    """
    from matplotlib.transforms import Bbox

    renderer = fig.canvas.get_renderer()
    frame = ax.get_window_extent(renderer)
    dots = [ax.transData.transform(p) for p in points]
    taken: List[Any] = [Bbox.from_extents(x - 6, y - 6, x + 6, y + 6) for x, y in dots]
    tries = [(9, 5, "left", "bottom"), (9, -5, "left", "top"), (-9, 5, "right", "bottom"), (-9, -5, "right", "top")]
    tries += [(0, 12, "center", "bottom"), (0, -12, "center", "top"), (9, 22, "left", "bottom")]
    tries += [(-9, 22, "right", "bottom"), (9, -22, "left", "top"), (-9, -22, "right", "top")]
    tries += [(dx, dy, ha, "center") for dy in (0, 36, -36, 50, -50) for dx, ha in ((12, "left"), (-12, "right"))]
    if ax.get_legend() is not None:
        taken.append(ax.get_legend().get_window_extent(renderer))
    # in a crowd a name far from its point could be anybody's; the best trade-offs choose first
    tries = tries[:6] + tries[10:12] if len(texts) > FEW else tries
    best = {points[i] for i in pareto(points)}
    for text in sorted(texts, key=lambda t: (t.xy not in best, t.xy[0], -t.xy[1])):
        for dx, dy, ha, va in tries:
            text.xyann = (dx, dy)
            text.set_ha(ha)
            text.set_va(va)
            box = text.get_window_extent(renderer)
            inside = box.x0 >= frame.x0 and box.x1 <= frame.x1 and box.y0 >= frame.y0 and box.y1 <= frame.y1
            if inside and not any(box.overlaps(t) for t in taken):
                taken.append(box)
                break
        else:
            text.set_visible(False)


#: Points whose labels have room for more than a name.
FEW = 9


@dataclass(frozen=True)
class Point:
    """A configuration in the plane of memory and quality: MiB, nats per token, share saved (0..1)."""

    config: str
    mib: float
    kld: float
    kld_se: float = 0.0
    saving: float = 0.0
    is_f16: bool = False
    gid: Optional[str] = None
    name: str = ""  # what is written beside it, if that isn't the configuration's whole label

    @property
    def text(self) -> str:
        """What is written beside it."""
        return self.name or self.config


def tradeoff_panel(
    ax: Any,
    points: Sequence[Point],
    floor: Optional[float],
    *,
    labels: bool = True,
    size: float = 8,
    scale: Sequence[Point] = (),
    look: Mapping[str, Style] = MappingProxyType({}),
) -> List[Any]:
    """Draw memory against KL divergence and return the labels, for :func:`_place_labels` once the layout is known.

    Args:
        ax: where.
        points: at least one.
        floor: KL divergence of f16 against itself.
        labels: name the points.
        size: of the markers, points.
        scale: what the vertical axis has to have room for; the points where it is empty.
        look: of :func:`looks`; where it lacks a configuration that has its own.
    """
    xy = [(p.mib, p.kld) for p in points]
    front = pareto(xy)
    if len(front) > 1:
        ax.plot([xy[i][0] for i in front], [xy[i][1] for i in front], color="#999999", lw=1.2, zorder=1,
                label="best trade-off")  # fmt: skip
    if floor is not None:
        ax.axhline(floor, color="#000000", lw=0.9, ls=(0, (4, 3)), zorder=1)
    texts = []
    for p in points:
        st = look.get(p.config) or style(p.config)
        if p.kld_se:
            # without caps, so that one smaller than its mark leaves no crumbs around it
            ax.errorbar(p.mib, p.kld, yerr=p.kld_se, fmt="none", ecolor=st.color, elinewidth=1.5, zorder=3)
        ax.plot(
            [p.mib], [p.kld], marker=st.marker, color=st.color, ms=st.size(size), ls="none", zorder=3,
            markeredgecolor="white", markeredgewidth=0.8, clip_on=False, gid=p.gid,
        )  # fmt: skip
        if labels:
            saved = f"  ({100 * p.saving:.0f} % less)" if p.saving and len(points) <= FEW else ""
            texts.append(
                ax.annotate(
                    f"{p.text}{saved}", (p.mib, p.kld), xytext=(9, 5), textcoords="offset points",
                    color=ink(st.color), fontsize=9, fontweight="bold", zorder=4,
                )
            )  # fmt: skip
    scale = scale or points
    top = max(p.kld + p.kld_se for p in scale) or 1e-3
    # f16 stands at its own floor, whatever the scale
    positive = [p.kld for p in scale if p.kld > 0 and not p.is_f16]
    if positive and max(positive) / min(positive) > 50:
        ax.set_yscale("symlog", linthresh=min(positive), linscale=0.5)
        ax.set_ylim(-0.03 * min(positive), top * 2)
        # small panels and many decades have room for few
        ticks = log_ticks(min(positive), top * 2, many=labels)
        ax.set_yticks([0, *ticks], ["0", *map(tick_text, ticks)])
    else:
        ax.set_ylim(-0.03 * top, top * 1.15)
    ax.set_xlim(0, max(p.mib for p in points) * 1.08)
    plain(ax)
    return texts


def log_ticks(low: float, high: float, *, many: bool = True) -> List[float]:
    """Ticks of a log scale: 1, 2 and 5 of each decade, or the decades alone where these are many enough.

    On a scale so short that it has fewer than two of them, every 1 to 9, and at last its ends.
    """
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    short = math.log10(high / low) < (2.5 if many else 1.5)
    found: List[float] = []
    for steps in ((1, 2, 5), range(1, 10)) if short else ((1,), (1, 2, 5)):
        # through text: 3 * 10**-3 is no 0.003
        found = [t for e in decades for s in steps if low <= (t := float(f"{s}e{e}")) <= high]
        if len(found) > 1:
            return found
    return [low, high]


def tick_text(value: float) -> str:
    """A tick in plain digits, in powers of ten below a ten-thousandth: ``200``, ``0.005``, ``2e-5``."""
    return re.sub(r"e-0*", "e-", f"{value:.3g}") if value < 100 else f"{value:.0f}"


def plain(ax: Any, *, grid: str = "both") -> None:
    """No frame at the top and the right, and a light grid behind the data."""
    ax.grid(True, axis=grid, color="#e4e4e4", lw=0.7)
    ax.set_axisbelow(True)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        ax.spines[side].set_color("#888888")
    ax.tick_params(color="#888888", labelsize=8.5)


def spread(wanted: Sequence[float], gap: float) -> List[float]:
    """Places in ascending order that lie ``gap`` apart or more, as near to the wanted ones as can be.

    Least squares under these constraints: isotonic regression of what is left when the gaps are taken off, by pooling
    adjacent violators.
    """
    pools: List[Tuple[float, int]] = []  # mean, how many
    for i, w in enumerate(wanted):
        mean, n = w - i * gap, 1
        while pools and pools[-1][0] >= mean:
            before, m = pools.pop()
            mean, n = (before * m + mean * n) / (m + n), m + n
        pools.append((mean, n))
    flat = [mean for mean, n in pools for _ in range(n)]
    return [f + i * gap for i, f in enumerate(flat)]


def name_ends(
    fig: Any,
    ax: Any,
    ends: Sequence[Tuple[str, float, float]],
    fontsize: float = 9,
    *,
    look: Mapping[str, Style] = MappingProxyType({}),
    names: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Name lines at their right ends, one below the other, so that no legend is needed.

    Args:
        fig, ax: whose layout is done.
        ends: configuration, x and y of each; those of one height are named downwards in this order.
        fontsize: points.
        look: of :func:`looks`; where it lacks a configuration that has its own.
        names: what is written instead of a configuration's label.
    """
    placed = sorted((float(ax.transData.transform((x, y))[1]), -i, c, x, y) for i, (c, x, y) in enumerate(ends))
    pixels = spread([p[0] for p in placed], 1.3 * fontsize * fig.dpi / 72)
    for (_, _, c, x, y), pixel in zip(placed, pixels):
        place = float(ax.transAxes.inverted().transform((0, pixel))[1])
        ax.annotate(
            names.get(c, c), (x, y), xytext=(1.03, place), textcoords=ax.transAxes,
            color=ink((look.get(c) or style(c)).color),
            fontsize=fontsize, fontweight="bold", va="center", annotation_clip=False,
            arrowprops={"arrowstyle": "-", "lw": 0.6, "color": "#bbbbbb", "shrinkA": 0, "shrinkB": 5},
        )  # fmt: skip


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

    Raises:
        FileExistsError: one is there.
        CacheFolderError: one can't be written; nothing of it is left.
    """
    pts = [s for s in summaries if s.kv_bytes is not None and s.kld is not None]
    if not pts:
        return []
    points = [
        Point(
            s.config, float(s.kv_mib or 0), float(s.kld or 0), s.kld_se or 0.0, s.saving or 0.0,
            (s.kvq_key, s.kvq_val) == ("f16", "f16"),
        )
        for s in pts
    ]  # fmt: skip
    floor: Optional[float] = next((s.kld_floor for s in pts if s.kld_floor is not None), None)
    fig = new_figure(7.2, 4.6)
    ax = fig.add_subplot()
    texts = tradeoff_panel(ax, points, floor, look=looks(p.config for p in points))
    n_ctx = next((s.n_ctx for s in pts if s.n_ctx), None)
    ax.set_xlabel(f"KV cache (MiB{f', {n_ctx} tokens' if n_ctx else ''})")
    ax.set_ylabel("mean KL divergence from f16 (nats per token)")
    heading = f"KV cache memory against quality: {printable(model)}"
    fig.suptitle(heading, fontsize=12, fontweight="bold", x=0.02, ha="left")
    if note:
        ax.set_title(note, fontsize=8.5, color="#444444", loc="left")
    if floor is not None:
        name_floor(ax, floor)
    if ax.get_legend_handles_labels()[0]:
        ax.legend(loc="upper right", frameon=False, fontsize=8.5)
    fig.canvas.draw()
    _place_labels(fig, ax, texts, [(p.mib, p.kld) for p in points])

    written: List[Path] = []
    for out in outputs:
        path = Path(out)
        data = io.BytesIO()
        fig.savefig(data, format=path.suffix.lstrip(".") or "png")
        try:
            _write(path, data.getvalue(), replace=False)
        except FileExistsError:
            raise
        except OSError as e:
            raise CacheFolderError(f"{path} can't be written ({why(e)})") from None
        written.append(path)
    return written


def name_floor(ax: Any, floor: float) -> None:
    """Say beside its line what the KL divergence of f16 against itself is."""
    ax.annotate(
        f"f16 against itself: {short_number(floor)}", (0.01, floor), xycoords=("axes fraction", "data"), xytext=(0, 4),
        textcoords="offset points", fontsize=8, color="#000000", va="bottom",
    )  # fmt: skip


def short_number(value: float, decimals: int = 6) -> str:
    """Three digits that count, and no more than so many decimals: ``0.0121``, ``1.23``, ``0.000341``."""
    if abs(value) < 0.5 * 10**-decimals:
        return "0"
    digits = min(decimals, max(0, 2 - math.floor(math.log10(abs(value)))))
    return f"{value:.{digits}f}"


def on(color: Any) -> str:
    """Black or white, whichever is readable on a colour."""
    from matplotlib.colors import to_rgb

    r, g, b = to_rgb(color)
    return "white" if 0.299 * r + 0.587 * g + 0.114 * b < 0.5 else "black"


#: Cells that weren't measured.
MISSING: Dict[str, Any] = {
    "facecolor": "white", "edgecolor": "#bbbbbb", "linewidth": 0.5, "hatch": "////", "zorder": 2,
}  # fmt: skip


def pair_panel(
    fig: Any,
    ax: Any,
    keys: Sequence[int],
    values: Sequence[int],
    cells: Mapping[Tuple[int, int], Optional[float]],
    axis: Mapping[int, Tuple[str, float]],
    gids: Mapping[Tuple[int, int], str],
    fontsize: float = 9.5,
) -> None:
    """Draw KL divergences by bits of keys (downwards) and values (to the right), with the bar of their colours.

    Pairs that are not in ``cells`` are hatched; None stands for NaN.
    """
    import matplotlib
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LogNorm
    from matplotlib.patches import Rectangle

    # f16 against itself is 0 but for rounding: it would stretch the scale over decades that nothing else uses
    shown = [v for k, v in cells.items() if v is not None and v > 0 and k != (16, 16)]
    low, high = (min(shown), max(shown)) if shown else (1e-3, 1.0)
    high = high if high > low else low * 10
    norm = LogNorm(low, high)
    cmap = matplotlib.colormaps["cividis_r"]
    for row, k in enumerate(keys):
        for col, v in enumerate(values):
            box: Dict[str, Any] = {"edgecolor": "white", "linewidth": 1.5, "facecolor": "white"}
            color, text = "#333333", ""
            if (k, v) not in cells:
                box.update(MISSING)
            elif (value := cells[k, v]) is None:
                box.update(edgecolor="#333333", linewidth=0.8, hatch="xx", zorder=2)
                text = "NaN"
            else:
                text = short_number(value, 5)  # more doesn't fit
                if value > 0:
                    box["facecolor"] = cmap(norm(max(value, low)))[:3]
                    color = on(box["facecolor"])
                else:
                    box.update(edgecolor="#bbbbbb", linewidth=0.8, zorder=2)
            ax.add_patch(Rectangle((col, row), 1, 1, gid=gids.get((k, v)), **box))
            if not text:
                continue
            pad = {"facecolor": "white", "edgecolor": "none"}
            ax.text(
                col + 0.5, row + 0.45, text, ha="center", va="center", fontsize=fontsize, color=color,
                fontweight="bold", bbox={**pad, "pad": 1.5} if text == "NaN" else None,
            )  # fmt: skip
            ax.text(
                col + 0.5, row + 0.78, f"{(axis[k][1] + axis[v][1]) / 2:g} bits", ha="center", va="center",
                fontsize=7, color=color, bbox={**pad, "pad": 1.0} if text == "NaN" else None,
            )  # fmt: skip
    ax.set_xlim(0, len(values))
    ax.set_ylim(len(keys), 0)
    ax.set_aspect("equal")
    ax.set_xticks([i + 0.5 for i in range(len(values))], [f"V{b}\n{axis[b][0]}" for b in values])
    ax.set_yticks([i + 0.5 for i in range(len(keys))], [f"K{b}\n{axis[b][0]}" for b in keys])
    ax.tick_params(length=0, labelsize=9)
    ax.set_xlabel("values")
    ax.set_ylabel("keys")
    for side in ax.spines.values():
        side.set_visible(False)
    bar = fig.colorbar(ScalarMappable(norm, cmap), ax=ax, shrink=0.8, pad=0.02)
    bar.set_label("mean KLD from f16 (nats per token)", fontsize=9)
    ticks = log_ticks(low, high)
    bar.set_ticks(ticks, labels=list(map(tick_text, ticks)))
    bar.ax.minorticks_off()
    bar.ax.tick_params(labelsize=8.5)
    bar.outline.set_visible(False)


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
    fig = new_figure(7.6, 6.4)
    ax = fig.add_subplot()
    pair_panel(fig, ax, list(axis), list(axis), cells, axis, {})
    fig.suptitle(f"Quality of every pair of widths: {model}", fontsize=12, fontweight="bold", x=0.02, ha="left")
    if note:
        ax.set_title(note, fontsize=8.5, color="#444444", loc="left")
    _save_figure(fig, output)


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
    from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator

    fig = new_figure(7.6, 4.8)
    ax = fig.add_subplot()
    ends: List[Tuple[str, float, float]] = []
    look = looks(series)
    for name, pts in series.items():
        st = look[name]
        xs, ys = [p[0] for p in pts], [p[1] for p in pts]
        below, above = [p[1] - p[2] for p in pts], [p[3] - p[1] for p in pts]
        ax.errorbar(
            xs, ys, yerr=[below, above], marker=st.marker, color=st.color, ls=st.line, ms=st.size(6.5), lw=1.5,
            capsize=3, elinewidth=1.1, markerfacecolor=st.color if st.filled else "white", markeredgecolor=st.color,
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
    plain(ax)

    fig.canvas.draw()
    name_ends(fig, ax, ends, look=look)
    _save_figure(fig, output)
