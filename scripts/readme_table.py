#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Write the table of results in README.md from recorded runs.

Usage: readme_table.py [--check] [FILE...]

FILE is a JSONL of `kvsplit compare` under results/. Without one, the files that README.md names already; if it names
none, every JSONL in results/. What stands between the two markers in README.md is replaced. --check writes nothing.

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
    return [root / "results" / n for n in names] if names else sorted((root / "results").glob("*.jsonl"))


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
        files = choose(args.root, old, args.files)
        named(old)
        new = BLOCK.sub(lambda _: block(files), old, count=1)
    except (OSError, ValueError, IndexError) as e:
        print(f"readme_table.py: error: {e}", file=sys.stderr)
        return 2
    if new == old:
        print("README.md and the results agree", file=sys.stderr)
        return 0
    if args.check:
        print("README.md and the results differ: run scripts/readme_table.py", file=sys.stderr)
        return 1
    path.write_text(new, encoding="utf-8")
    print(f"wrote the table of {', '.join(f.name for f in files) or 'no run'} into README.md", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
