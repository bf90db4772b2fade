#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Fit the codebook and the tries of a format to blocks of N(0,1), by coordinate descent with the real encoder.

Usage: fit_codebooks.py --bits B [--blocks N] [--passes N] [--seed N]

Starts from levels spread as a fine quantizer of N(0,1) would spread them, and moves one level or one try at a time
while the error falls. 5 and 6 bits keep to a line with three slopes: there the slopes and bends are moved.
Prints levels, tries and the normalized squared error on these blocks and on as many fresh ones. The committed
codebooks are permanent: this shows how they were found, and what another would bring.

Exit codes: 0 done, 2 usage.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist
from typing import Optional, Sequence

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "python"))  # this tree's mirror, whatever is installed

from kvsplit import formats  # noqa: E402
from kvsplit.formats import FORMATS, Array, Format  # noqa: E402

STEPS_LEVEL = (1, -1, 2, -2)
STEPS_TRY = (4, -4, 16, -16, 1, -1)


class Fit:
    """The numbers that are moved: ``shape`` (levels, or slopes and bends) and ``tries``."""

    def __init__(self, base: Format) -> None:
        self.base = base
        self.line = base.bits >= 5
        self.tries = [256, -256, 224, 288]
        n = 2 << base.bits
        if self.line:
            unit = 128 // n
            self.shape = [unit, unit, unit, n * 5 // 16, n * 7 // 16]
            return
        # density of levels proportional to the cube root of the density of values: N(0, 3) (Panter and Dite, 1951)
        spread = [NormalDist(0, 3**0.5).inv_cdf((i + 0.5) / n) for i in range(n)]
        self.shape = [round(127 * v / -spread[0]) for v in spread]
        self.shape[-1] = round(0.85 * self.shape[-1])  # the far side needs no second level for the outlier

    def format(self) -> Optional[Format]:
        """The format of these numbers; None if they make no codebook."""
        if self.line:
            a, b, c, bend_b, bend_c = self.shape
            if min(a, b, c) < 0 or a == 0 or not 0 < bend_b <= bend_c < 1 << self.base.bits:
                return None
            levels = formats._three_slopes(2 << self.base.bits, (a, b, c), (bend_b, bend_c))
        else:
            levels = np.array(self.shape)
        if levels[0] < -127 or np.abs(levels).max() > -levels[0] or (np.diff(levels) <= 0).any() or 0 in self.tries:
            return None
        return replace(self.base, levels=levels, tries=tuple(self.tries))


def error(f: Optional[Format], x: Array) -> float:
    """NSE of a format; inf where there is none."""
    return np.inf if f is None else formats.nse(x, formats.decode(f, formats.encode(f, x)))


def descend(fit: Fit, x: Array, passes: int) -> None:
    """Move one number at a time while the error falls, at most ``passes`` times through all of them."""
    best = error(fit.format(), x)
    for n in range(passes):
        before = best
        for numbers, steps in ((fit.shape, STEPS_LEVEL), (fit.tries, STEPS_TRY)):
            for i in range(1 if numbers is fit.tries else 0, len(numbers)):
                for step in steps:
                    numbers[i] += step
                    now = error(fit.format(), x)
                    if now < best:
                        best = now
                    else:
                        numbers[i] -= step
                if sys.stderr.isatty():
                    print(f"\rpass {n + 1}  {best:.6f} ", end="", file=sys.stderr, flush=True)
        if best == before:
            break
    if sys.stderr.isatty():
        print(file=sys.stderr)


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Fit and print; returns the exit code."""
    parser = argparse.ArgumentParser(description="Fit the codebook of a format to N(0,1).")
    parser.add_argument("--bits", type=int, required=True, choices=[f.bits for f in FORMATS.values()])
    parser.add_argument("--blocks", type=int, default=2000, help="blocks of 32 values, default 2000")
    parser.add_argument("--passes", type=int, default=40, help="at most so many passes, default 40")
    parser.add_argument("--seed", type=int, default=1, help="of the random values, default 1")
    args = parser.parse_args(argv)
    if args.blocks < 1 or min(args.passes, args.seed) < 0:
        parser.error("--blocks must be 1 or more, --passes and --seed 0 or more")

    x, fresh = np.random.RandomState(args.seed).standard_normal((2, args.blocks, formats.BLOCK)).astype(np.float32)
    base = FORMATS[f"kvq{args.bits}"]
    fit = Fit(base)
    descend(fit, x, args.passes)
    f = fit.format()
    assert f is not None, "a descent only keeps codebooks"
    print(f"levels {', '.join(str(v) for v in f.levels.tolist())}")
    if fit.line:
        print("slopes {}, {}, {}  bends {}, {}".format(*fit.shape))
    print(f"tries  {', '.join(str(t) for t in f.tries)}")
    print(f"NSE    {error(f, x):.6f}, on fresh blocks {error(f, fresh):.6f}; committed: {error(base, fresh):.6f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
