#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Measure the quality of many pairs of widths of keys and values; an interrupted run goes on where it stopped.

The options are those of ``kvsplit.sweep``: ``--help`` tells them. Needs an environment with the package
(``make package`` makes one).
"""

from __future__ import annotations

import sys


def main() -> int:
    """Hand over to the package."""
    try:
        from kvsplit.sweep import main as sweep
    except ImportError as e:
        print(
            f"sweep_pairs.py: {e}; run it with the environment of the project "
            "(.venv/bin/python scripts/sweep_pairs.py), or install the package",
            file=sys.stderr,
        )
        return 1
    return sweep()


if __name__ == "__main__":
    sys.exit(main())
