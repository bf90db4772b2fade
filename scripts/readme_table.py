#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Write the tables of results in README.md from recorded runs.

Usage: readme_table.py [--check] [FILE...]

FILE is a JSONL of `kvsplit compare` or of `bench_cpu.py` under results/. Without one of a kind, the files that
README.md names already; if it names none, for the comparison every JSONL in results/ but those of bench_cpu.py, and for
the speed over depth results/cpu-attention.jsonl. What stands between a pair of markers in README.md is replaced; the
speed has its own pair, which a README may lack. --check writes nothing.

Exit codes: 0 done, 1 README.md and the results differ (--check), 2 usage, or a file that can't be read.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import List, Optional, Sequence

ROOT = Path(__file__).resolve().parent.parent
BEGIN = "<!-- results:"
END = "<!-- end of results -->"
BLOCK = re.compile(rf"^{re.escape(BEGIN)}(?P<files>[^\n]*?)-->\n(?P<body>.*?)^{re.escape(END)}$", re.M | re.S)
NONE = "No run is recorded in `results/` yet.\n"
SPEED_BEGIN = "<!-- speed:"
SPEED_END = "<!-- end of speed -->"
SPEED_BLOCK = re.compile(
    rf"^{re.escape(SPEED_BEGIN)}(?P<files>[^\n]*?)-->\n(?P<body>.*?)^{re.escape(SPEED_END)}$", re.M | re.S
)
SPEED_BRIEF = ("upstream F16", "upstream K8V4", "K8V4", "K4V4", "F16 fused")
SPEED_FILE = "cpu-attention.jsonl"

try:
    import kvsplit  # noqa: F401
except ImportError:
    sys.path.insert(0, str(ROOT / "python"))


def number(value: Optional[float], digits: int) -> str:
    """A figure, or a dash where nothing was measured."""
    return "-" if value is None else f"{value:.{digits}f}"


def with_error(value: Optional[float], error: Optional[float], digits: int) -> str:
    """A figure and its standard error."""
    return number(value, digits) if error is None else f"{number(value, digits)} ± {error:.{digits}f}"


def table(path: Path) -> str:
    """Caption, table and what follows from it, of one file. Every figure comes from its rows."""
    from kvsplit import results

    rows = list(results.read(path))
    lines = results.summarize(rows)
    first = rows[0].provenance
    speed = next((r for r in rows if r.kind == "speed" and r.n_gen), None)
    fill = next((r for r in rows if r.kind == "speed" and r.n_prompt), None)
    quality = next((r for r in rows if r.kind == "quality"), None)
    memory = next((r for r in rows if r.kind == "memory"), None)

    out = [f"`{first.model_filename}` on {first.cpu_info or 'an unnamed CPU'}"]
    if first.gpu_info:
        out[0] += f" with {first.gpu_info}"
    if speed is not None:
        out[0] += f", {speed.n_threads} threads"
    if memory is not None and memory.backend_decode:
        out[0] += f", attention on {memory.backend_decode}"
    out[0] += ":"
    out += [
        "",
        "| Keys/values | stored as | KV MiB | saved | decode t/s | prefill t/s | PPL ± SE | mean KLD ± SE | same top |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for s in lines:
        same = "-" if s.top1 is None else f"{100 * s.top1:.1f} %"
        saved = "-" if s.saving is None else f"{100 * s.saving:.1f} %"
        cells = [s.config, f"{s.type_k}/{s.type_v}", number(s.kv_mib, 2), saved]
        cells += [number(s.decode_ts, 1), number(s.prefill_ts, 1)]
        cells += [with_error(s.ppl, s.ppl_se, 3), with_error(s.kld, s.kld_se, 5), same]
        out.append(f"| {' | '.join(cells)} |")
    out.append("")
    if memory is not None:
        out.append(f"- KV MiB: allocated for {memory.n_ctx} tokens, read back from the context.")
    if speed is not None and fill is not None:
        rounds = len(speed.samples_ts or [])
        out.append(
            f"- Speed: {speed.n_gen} tokens decoded and {fill.n_prompt} prefilled after {speed.n_depth} in the cache; "
            f"medians of {rounds} rounds in which the configurations took turns."
        )
    if quality is not None:
        floor = "unknown" if quality.kld_floor is None else f"{quality.kld_floor:.5f}"
        out.append(
            f"- Quality: {quality.text}, {quality.chunks} chunks of {quality.ppl_ctx} tokens. "
            f"KLD is against f16 of the same build; its floor, f16 against itself, is {floor}. "
            "Same top: share of tokens whose most likely successor is the same."
        )
    by_name = {s.config: s for s in lines}
    base, split = by_name.get("F16"), by_name.get("K8V4")
    if base and split and base.decode_ts and split.decode_ts and base.prefill_ts and split.prefill_ts:
        decode, prefill = split.decode_ts / base.decode_ts, split.prefill_ts / base.prefill_ts
        out.append(f"- Here K8V4 decodes at {decode:.2f}x and prefills at {prefill:.2f}x of the speed of f16.")
    out.append(f"- Raw samples and provenance: [`{path.name}`](results/{path.name}), by `{first.command}`.")
    return "\n".join(out) + "\n"


def block(paths: Sequence[Path]) -> str:
    """All that stands in README.md from marker to marker."""
    names = " ".join(p.name for p in paths)
    body = "\n".join(table(p) for p in paths) if paths else NONE
    return f"{BEGIN} {names + ' ' if names else ''}-->\n{body}{END}"


def speed_table(path: Path, brief: bool) -> str:
    """Ratios of decoding and prefill over depth, from a run of bench_cpu.py.

    brief: as README.md has it, of the first model and few configurations; else as docs/cpu.md has it, a table a model.
    """
    from kvsplit import depth, results

    rows = list(results.read(path))
    out: List[str] = []
    for a in depth.analyse(rows)[: 1 if brief else None]:
        rounds = sorted({p.rounds for p in a.points})
        spans = "-".join(str(n) for n in dict.fromkeys((rounds[0], rounds[-1])))
        head = f"`{a.model}` on {a.cpu or 'an unnamed CPU'}, {a.n_threads} threads"
        for decode in (True, False):
            points = [p for p in a.points if bool(p.n_gen) == decode and (not brief or p.config in SPEED_BRIEF)]
            if points:
                n = points[0].n_gen or points[0].n_prompt
                work = "decoding" if decode else f"prefill of {n} tokens"
                title = f"{head}, {work} by tokens in the cache, speed over that of {a.base}:"
                out += [title, "", *depth.grid(points, decode, depth.ratio_cell), ""]
        out += ["- Each figure is the median of ratios within one round, in which all configurations took turns; "]
        out[-1] += f"{spans} rounds, in parentheses an interval for that median."
        base = [p for p in a.points if p.config == a.base and p.n_gen]
        if base:
            speeds = ", ".join(f"{p.ts:.1f} at {p.depth}" for p in sorted(base, key=lambda p: p.depth))
            out.append(f"- {a.base} decodes, in tokens per second: {speeds}.")
        fits = ", ".join(
            f"{s.config} {s.bytes_per_s[0] / 1e9:.1f} GB/s ({100 * s.bytes_per_s[0] / a.copy:.0f} % of copying)"
            for s in a.slopes
            if a.copy and (not brief or s.config in SPEED_BRIEF)
        )
        if fits:
            out.append(f"- Packed cache that attention reads, from the slope of decode time over depth: {fits}.")
        if depth.bandwidth_text(a):
            out.append(f"- {depth.bandwidth_text(a)}")
        out.append("")
    first = rows[0].provenance
    folder = "results" if brief else "../results"
    out.append(f"Raw samples and provenance: [`{path.name}`]({folder}/{path.name}), by `{first.command}`.")
    return "\n".join(out) + "\n"


def speed_block(paths: Sequence[Path], brief: bool = True) -> str:
    """All that stands in README.md, or in docs/cpu.md if not brief, from one marker of the speed to the other."""
    names = " ".join(p.name for p in paths)
    body = "\n".join(speed_table(p, brief) for p in paths) if paths else NONE
    return f"{SPEED_BEGIN} {names + ' ' if names else ''}-->\n{body}{SPEED_END}"


def is_speed(path: Path) -> bool:
    """True if a file is one of bench_cpu.py: its rows name the libraries that were measured."""
    from kvsplit import results

    return any(r.provenance.library_sha256 for r in results.read(path))


def choose_speed(root: Path, readme: str, given: Sequence[Path] = ()) -> List[Path]:
    """Files to make the table of the speed over depth of."""
    if given:
        return list(given)
    found = SPEED_BLOCK.search(readme)
    names = found.group("files").split() if found else []
    default = root / "results" / SPEED_FILE
    return [root / "results" / n for n in names] if names else [default] if default.is_file() else []


def named(readme: str) -> List[str]:
    """Files that the marker in README.md names."""
    found = BLOCK.search(readme)
    if not found:
        raise ValueError(f"README.md has no block from '{BEGIN} ... -->' to '{END}'")
    return found.group("files").split()


def choose(root: Path, readme: str, given: Sequence[Path] = ()) -> List[Path]:
    """Files to make the table of."""
    if given:
        return list(given)
    names = named(readme)
    if names:
        return [root / "results" / n for n in names]
    return [p for p in sorted((root / "results").glob("*.jsonl")) if not is_speed(p)]


def main(argv: Optional[Sequence[str]] = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if README.md would change")
    parser.add_argument("--root", type=Path, default=ROOT, help="project folder (default: the one this program is in)")
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="recorded runs in results/")
    args = parser.parse_args(argv)
    path = args.root / "README.md"
    try:
        folder = (args.root / "results").resolve()
        for f in args.files:
            if f.resolve().parent != folder:
                raise ValueError(f"{f} is not in {folder}: what README.md prints is committed there")
        old = path.read_text(encoding="utf-8")
        speed = [f for f in args.files if is_speed(f)]
        files = choose(args.root, old, [f for f in args.files if f not in speed])
        named(old)
        if speed and not SPEED_BLOCK.search(old):
            raise ValueError(f"README.md has no block from '{SPEED_BEGIN} ... -->' to '{SPEED_END}'")
        speed = choose_speed(args.root, old, speed)
        new = BLOCK.sub(lambda _: block(files), old, count=1)
        new = SPEED_BLOCK.sub(lambda _: speed_block(speed), new, count=1)
        page = args.root / "docs" / "cpu.md"
        page_old = page.read_text(encoding="utf-8") if page.is_file() else ""
        page_new = SPEED_BLOCK.sub(lambda _: speed_block(speed, brief=False), page_old, count=1)
    except (OSError, ValueError, IndexError) as e:
        print(f"readme_table.py: error: {e}", file=sys.stderr)
        return 2
    if (new, page_new) == (old, page_old):
        print("README.md, docs/cpu.md and the results agree", file=sys.stderr)
        return 0
    if args.check:
        print("README.md or docs/cpu.md and the results differ: run scripts/readme_table.py", file=sys.stderr)
        return 1
    path.write_text(new, encoding="utf-8")
    if page_new != page_old:
        page.write_text(page_new, encoding="utf-8")
    written = [f.name for f in (*files, *(speed if SPEED_BLOCK.search(old) else ()))]
    print(f"wrote the tables of {', '.join(written) or 'no run'} into README.md", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
