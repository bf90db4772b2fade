# SPDX-License-Identifier: MIT
"""Captures as pictures: the curve of a command's memory, and the curve growing over time."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any, Iterator, List, Optional, Sequence, Tuple, Union

from kvsplit.capture import INTERVAL, Capture, Threshold, size_text
from kvsplit.errors import CacheFolderError, ResultError, UsageError, why

FORMATS = (".png", ".svg", ".pdf")
MAX_FRAMES = 60


def check_outputs(chart: Optional[Path], gif: Optional[Path], frames: Optional[Path]) -> None:
    """Refuse before anything runs what couldn't be written in the end.

    Raises:
        UsageError: names the option.
    """
    for option, path, endings in (("--chart", chart, FORMATS), ("--gif", gif, (".gif",))):
        if path is None:
            continue
        if path.suffix.lower() not in endings:
            raise UsageError(f"{option}: {path} must end in {' or '.join(endings)}")
        if path.exists():
            raise UsageError(f"{option}: {path} is there already and stays as it is; give another name")
    if frames is not None and frames.exists() and (not frames.is_dir() or any(frames.iterdir())):
        raise UsageError(f"--frames: {frames} is no empty folder")


class _Picture:
    """One figure of one or several captures, which can be drawn up to any time."""

    def __init__(self, captures: Sequence[Capture], dpi: int = 160) -> None:
        from kvsplit import plots

        self._captures = [c for c in captures if c.samples]
        if not self._captures:
            raise ResultError("there is no sample to draw: the command ended before the first one")
        several = len(self._captures) > 1
        peaks = [c.peak for c in self._captures]
        tops = [p.memory for p in peaks if p] + [s.gpu for c in self._captures for s in c.samples if s.gpu]
        top = max([*tops, 1])
        self.end = max(c.samples[-1].t for c in self._captures)
        self._unit, self._scale = ("GiB", 2**30) if top >= 2**31 else ("MiB", 2**20)
        digits = 1 if self._unit == "MiB" else 2
        per, clock = (60, "min") if self.end >= 300 else (1, "s")
        self._per = per

        self.figure = plots.new_figure(7.6, 4.4)
        self.figure.set_dpi(dpi)
        self._ax = ax = self.figure.add_subplot()
        self._looks = [plots.style(c.label if several or c.header.get("config") else "K8V8") for c in self._captures]
        self._lines: List[Any] = []
        self._bands: List[Any] = []
        self._gpu: List[Any] = []
        self._dots: List[Any] = []
        for c, look, peak in zip(self._captures, self._looks, peaks):
            assert peak is not None
            height = f"{peak.memory / self._scale:.{digits}f} {self._unit}"
            name = f"{c.label}: peak {height}" if several else f"memory ({self._measure(c)})"
            self._lines += ax.plot([], [], color=look.color, ls=look.line if several else "-", lw=1.8, label=name)
            on_gpu = max((s.gpu or 0 for s in c.samples), default=0)
            if on_gpu:
                label = f"{c.label + ', ' if several else ''}GPU: peak {on_gpu / self._scale:.{digits}f} {self._unit}"
                color = look.color if several else plots.style("K8V4").color
                self._gpu += ax.plot([], [], color=color, ls=(0, (1, 1)), lw=1.6, label=label)
            else:
                self._gpu.append(None)
            dot = ax.plot([peak.t / per], [peak.memory / self._scale], marker=look.marker if several else "o",
                          color=look.color, ms=7, markeredgecolor="white", zorder=5, ls="none",
                          clip_on=False)[0]  # fmt: skip
            extra: List[Any] = []
            if not several:
                right = peak.t > 0.6 * self.end
                extra.append(
                    ax.annotate(
                        f"peak {height} at {peak.t / per:.1f} {clock}", (peak.t / per, peak.memory / self._scale),
                        xytext=(6 if right else -4, 8), textcoords="offset points", ha="right" if right else "left",
                        fontsize=9.5, fontweight="bold", color=plots.ink(look.color),
                    )
                )  # fmt: skip
            self._dots.append((peak.t, [dot, *extra]))
        ax.set_xlim(0, max(self.end / per, 1e-3) * 1.02)
        ax.set_ylim(0, self._mark_limits(top) * 1.16 / self._scale)
        ax.set_xlabel(f"time since the start ({clock})")
        ax.set_ylabel(f"memory of the command ({self._unit})")
        plots.plain(ax)
        names = [str(x) for x in dict.fromkeys(Path(str((c.header.get("command") or ["?"])[0])).name
                                               for c in self._captures)]  # fmt: skip
        self.figure.suptitle(f"Memory over time: {', '.join(names)}", fontsize=12, fontweight="bold", x=0.02, ha="left")
        ax.set_title(self._note(), fontsize=8.5, color="#444444", loc="left")
        from matplotlib.patches import Patch
        from matplotlib.text import Text

        handles = [h for h in ax.get_lines() if not h.get_label().startswith("_")]
        if not several and self._captures[0].samples[0].anon is not None:
            color = self._looks[0].color
            handles += [Patch(facecolor=color, alpha=0.45, label="the command's own"),
                        Patch(facecolor=color, alpha=0.16, label="files mapped into it")]  # fmt: skip
        self.figure.legend(handles=handles, loc="outside lower left", ncols=min(4, len(handles)), frameon=False,
                           fontsize=9)  # fmt: skip
        for text in self.figure.findobj(Text):
            text.set_parse_math(False)  # what stands between two dollars of a name is no formula

    @staticmethod
    def _measure(c: Capture) -> str:
        s = c.samples[0]
        return "PSS" if s.pss is not None else "USS" if s.private is not None else "RSS"

    def _note(self) -> str:
        h = self._captures[0].header
        parts = [f"{self._measure(self._captures[0])} of all its processes, every {h.get('interval') or INTERVAL:g} s"]
        if h.get("memory_limit"):
            parts.append(f"{h.get('memory_limit_of') or 'machine'} with {size_text(h['memory_limit'])}")
        ends = []
        for c in self._captures:
            who = f"{c.label} " if len(self._captures) > 1 else ""
            if c.summary is None:
                ends.append(f"{who}cut: the capture itself was ended")
            elif c.summary.get("killed"):
                ends.append(f"{who}stopped by --kill-at {h.get('kill_at')}")
            elif c.summary.get("exit_code"):
                ends.append(f"{who}ended with exit code {c.summary['exit_code']}")
        return "; ".join([*parts, *ends])

    def _mark_limits(self, top: float) -> float:
        """Lines of limits that are near; returns what must be seen."""
        h = self._captures[0].header
        whose = h.get("memory_limit_of") or "machine"
        marks: List[Tuple[Any, str, Any]] = [(h.get("memory_limit"), f"memory of the {whose}", "-")]
        for name in ("warn_at", "kill_at"):
            if h.get(name):
                marks.append(
                    (Threshold.parse(h[name], name).bytes, f"--{name.replace('_', '-')} {h[name]}", (0, (4, 3)))
                )
        seen = top
        for value, text, line in marks:
            if value and top > 0.6 * value:
                self._ax.axhline(value / self._scale, color="#555555", lw=1.0, ls=line, zorder=1)
                self._ax.annotate(
                    text, (0.01, value / self._scale), xycoords=("axes fraction", "data"), xytext=(0, 3),
                    textcoords="offset points", fontsize=8.5, color="#555555",
                )  # fmt: skip
                seen = max(seen, value)
        return float(seen)

    def upto(self, t: float) -> None:
        """Draw what was known at a time."""
        for band in self._bands:
            band.remove()
        self._bands = []
        several = len(self._captures) > 1
        for c, look, line, gpu in zip(self._captures, self._looks, self._lines, self._gpu):
            shown = [s for s in c.samples if s.t <= t]
            xs = [s.t / self._per for s in shown]
            ys = [s.memory / self._scale for s in shown]
            line.set_data(xs, ys)
            if gpu is not None:
                known = [s for s in shown if s.gpu is not None]
                gpu.set_data([s.t / self._per for s in known], [(s.gpu or 0) / self._scale for s in known])
            if several or any(s.anon is None for s in shown):
                self._bands.append(self._ax.fill_between(xs, ys, color=look.color, alpha=0.1, lw=0, zorder=1))
            else:
                own = [(s.anon or 0) / self._scale for s in shown]
                self._bands += [
                    self._ax.fill_between(xs, own, color=look.color, alpha=0.45, lw=0, zorder=1),
                    self._ax.fill_between(xs, own, ys, color=look.color, alpha=0.16, lw=0, zorder=1),
                ]
        for at, artists in self._dots:
            for a in artists:
                a.set_visible(at <= t)

    def encoded(self, form: str) -> bytes:
        """The figure as a file's content."""
        import matplotlib

        from kvsplit import plots

        out = io.BytesIO()
        with matplotlib.rc_context(plots.RC):
            self.figure.savefig(out, format=form, metadata={"Date": None} if form == "svg" else None)
        return out.getvalue()

    def images(self) -> Iterator[Any]:
        """The curve growing, as images that share one palette."""
        from PIL import Image

        n = min(MAX_FRAMES, len({s.t for c in self._captures for s in c.samples}))
        self.upto(self.end)
        self.figure.canvas.draw()
        self.figure.set_layout_engine("none")  # all frames are laid out as the last one
        palette: Any = None
        for i in [n, *range(1, n + 1)]:  # the last one has every colour
            self.upto(self.end * i / n)
            self.figure.canvas.draw()
            image = Image.fromarray(self._pixels()).convert("RGB")
            if palette is None:
                palette = image.quantize(64, dither=Image.Dither.NONE)
            else:
                yield image.quantize(palette=palette, dither=Image.Dither.NONE)

    def _pixels(self) -> Any:
        import numpy as np

        return np.asarray(self.figure.canvas.buffer_rgba())[..., :3].copy()


def _save(path: Path, data: bytes, option: str) -> None:
    from kvsplit import plots

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        plots._write(path, data, replace=False)
    except FileExistsError:
        raise UsageError(f"{option}: {path} is there already and stays as it is; give another name") from None
    except OSError as e:
        raise CacheFolderError(f"{option}: {path} can't be written ({why(e)})") from None


def draw(captures: Sequence[Capture], output: Union[str, "os.PathLike[str]"]) -> Path:
    """Memory over time: one capture with its parts, or several over each other from their starts.

    Args:
        captures: as :func:`read` gives them; those without samples are left out.
        output: file to write, ``.png``, ``.svg`` or ``.pdf``; it must not exist.

    Raises:
        ResultError: no capture has a sample.
        UsageError: the file exists, or its ending is unknown.
        CacheFolderError: it can't be written.
    """
    path = Path(output)
    check_outputs(path, None, None)
    picture = _Picture(captures)
    picture.upto(picture.end)
    _save(path, picture.encoded(path.suffix[1:].lower()), "--chart")
    return path


def save_gif(captures: Sequence[Capture], output: Union[str, "os.PathLike[str]"], seconds: float = 5.0) -> Path:
    """The curve growing, as an animation of at most :data:`MAX_FRAMES` frames that is shown again and again.

    Args:
        captures, output: as for :func:`draw`; ``.gif``.
        seconds: that one pass takes; the last frame stays for two more.
    """
    path = Path(output)
    check_outputs(None, path, None)
    images = list(_Picture(captures, dpi=100).images())
    out = io.BytesIO()
    times = [max(20, int(1000 * seconds / len(images)))] * len(images)
    times[-1] += 2000
    images[0].save(out, "GIF", save_all=True, append_images=images[1:], duration=times, loop=0, optimize=True)
    _save(path, out.getvalue(), "--gif")
    return path


def save_frames(captures: Sequence[Capture], folder: Union[str, "os.PathLike[str]"]) -> List[Path]:
    """The frames of :func:`save_gif` as ``frame-000.png``, ... in a folder that is new or empty."""
    folder = Path(folder)
    check_outputs(None, None, folder)
    paths: List[Path] = []
    for i, image in enumerate(_Picture(captures, dpi=100).images()):
        out = io.BytesIO()
        image.save(out, "PNG", optimize=True)
        paths.append(folder / f"frame-{i:03d}.png")
        _save(paths[-1], out.getvalue(), "--frames")
    return paths
