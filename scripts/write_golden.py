#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Write tests/data/kvq-golden.txt: blocks of values and what kvq2 to kvq6 store of them, from the numpy mirror.

Usage: write_golden.py [--check] [--output FILE]

Every encoder has to give these bytes, now and later: saved sessions store them. --check writes nothing.

Exit codes: 0 done, 1 the file differs or is missing (--check), 2 usage.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, Iterator, List, Optional, Tuple

import numpy as np
import numpy.typing as npt

ROOT = Path(__file__).resolve().parent.parent

sys.path.insert(0, str(ROOT / "python"))  # this tree's mirror, whatever is installed

from kvsplit import formats  # noqa: E402
from kvsplit.formats import BLOCK, Format  # noqa: E402

Array = npt.NDArray[Any]

HEAD = """\
# Golden blocks of the formats kvq2 to kvq6, written by scripts/write_golden.py.
# A line: format, 32 values as little-endian float32 in hex, the stored block in hex.
# Layouts and encoder are permanent: a line may be added, none may change.
"""

MAX = float(np.finfo(np.float32).max)


def _grid(x: Array, bits: int = 16) -> Array:
    """Values rounded to 2^-bits: the last digit of a machine's log or sqrt can't show."""
    return np.asarray(np.round(x * 2.0**bits) / 2.0**bits)


def cases(f: Format) -> Iterator[Tuple[str, Array]]:
    """Groups of blocks: what they are, and values (n, 32) in float64 that float32 holds or rounds."""
    r = np.random.RandomState(f.ggml_id)  # its streams are frozen, those of a Generator are not
    i = np.arange(BLOCK)
    top = float(-f.levels[0])
    one = np.eye(BLOCK)
    normal = _grid(r.standard_normal((14, BLOCK)))
    uniform = (r.randint(0, 2**20, (8, BLOCK)) + 0.5) / 2**20
    laplace = _grid(np.where(uniform < 0.5, np.log(2 * uniform), -np.log(2 - 2 * uniform)))

    yield "normal", normal[:6]
    yield "Laplace", laplace[:4]
    yield (
        "one outlier, at the first, a middle and the last value",
        normal[6:9] + 40 * one[[0, 13, 31]] * [[1], [-1], [1]],
    )
    yield "one value that is not zero", np.array([3.0 * one[0], -0.7 * one[17], 1e-3 * one[31]])
    yield "zeros, of both signs", np.array([0.0 * i, -0.0 * i, np.where(i % 2, -0.0, 0.0)])
    yield "denormals of float32", np.array([2.0**-149 * (i - 15), 2.0**-127 * normal[9]])
    yield (
        "outlier where the f16 scale is the smallest, rounds to it, rounds to zero, or becomes denormal",
        np.array(
            [
                x * (i - 15) / 16
                for x in top * np.array([2.0**-24, -1.01 * 2.0**-25, 2.0**-25, 1.49 * 2.0**-24, 2.0**-14])
            ]
        ),
    )
    yield "normal, times 2^-20 and 2^-13: scales are denormal in f16", normal[10:12] * [[2.0**-20], [2.0**-13]]
    yield (
        "outlier below and above the largest f16 scale",
        np.array([x * 65504 * top * (i - 16) / 16 for x in (0.999, 1.0, -1.001, 4.0)]),
    )
    yield "huge", np.array([1e30 * (i - 15), np.where(i % 3, MAX, -MAX), MAX * one[4] + 1.0, -MAX + 0.0 * i])
    yield (
        "inf and NaN, one value or all",
        np.array(
            [
                np.where(i == 0, np.inf, normal[12]),
                np.where(i == 31, -np.inf, normal[12]),
                np.where(i == 5, np.nan, normal[12]),
                np.where(i == 9, np.nan, 0.0),
                np.inf + 0.0 * i,
            ]
        ),
    )
    yield "constants", np.array([[1.0], [-1.0], [0.1]]) + 0.0 * i
    yield "ramps", np.array([i / 32, -i / 32, (i - 15.5) / 4])
    # random bits below a plain scale are values that a block holds exactly
    data = r.randint(0, 256, (4, f.bytes)).astype(np.uint8)
    data[:, :2] = np.array([0.5, -0.25, 1.0, -2.0], "<f2").view(np.uint8).reshape(-1, 2)
    yield "values that a block holds exactly", formats.decode(f, data).astype(np.float64)
    # an outlier of top/16 makes the scale 1/16, so that 1/64 of a level's unit is 1/1024
    yield (
        "ties: both signs of the outlier, halves of 1/64 of a unit, midpoints between units and between levels",
        np.array(
            [
                np.where(i % 2, 1.0, -1.0),
                np.where(i == 0, -top / 16, (i - 16 + 0.5) / 1024),
                np.where(i == 7, top / 16, (i - 16 + 0.5) / 16),
                np.where(i == 31, -top / 16, _midpoints(f)),
            ]
        ),
    )
    # so coarse are scales near the smallest of f16 that the unbiased one may be a bad one
    yield (
        "normal, with scales of 4 to 11 steps of f16",
        _grid(r.standard_normal((8, BLOCK))) * top * 2.0**-25 * np.arange(4, 12)[:, None],
    )
    yield "alternating, and a scale of 1000", np.array([np.where(i % 2, 0.5, -1.0), 1000 * normal[13]])


def _midpoints(f: Format) -> Array:
    """Midpoints between levels of one subset, 32 of them spread over the codebook, times 1/16."""
    mid = (f.levels[4:].astype(float) + f.levels[:-4]) / 2 / 16
    return mid[np.arange(BLOCK) * len(mid) // BLOCK]


def text() -> str:
    """The whole file."""
    out: List[str] = [HEAD]
    for f in formats.FORMATS.values():
        for what, values in cases(f):
            with np.errstate(over="ignore"):
                x = values.astype("<f4")
            out.append(f"# {f.name}: {what}\n")
            for row, block in zip(x, formats.encode(f, x)):
                out.append(f"{f.name} {row.tobytes().hex()} {block.tobytes().hex()}\n")
    return "".join(out)


def main(argv: Optional[List[str]] = None) -> int:
    """Write or check; returns the exit code."""
    parser = argparse.ArgumentParser(description="Write tests/data/kvq-golden.txt from the numpy mirror.")
    parser.add_argument("--check", action="store_true", help="compare with the file, write nothing")
    parser.add_argument("--output", type=Path, default=ROOT / "tests" / "data" / "kvq-golden.txt", metavar="FILE")
    args = parser.parse_args(argv)

    new = text()
    if not args.check:
        args.output.write_text(new, encoding="ascii")
        return 0
    try:
        old = args.output.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError) as e:
        print(f"{args.output} can't be read: {e}", file=sys.stderr)
        return 1
    for n, (a, b) in enumerate(zip(old.splitlines(), new.splitlines()), 1):
        if a != b:
            print(f"{args.output}:{n}: differs from what the mirror gives", file=sys.stderr)
            return 1
    if old != new:
        print(f"{args.output}: has {len(old)} characters, the mirror gives {len(new)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
