#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Draw figures from results: memory, quality, speed, pairs of widths, layers, needles, and a summary.

The same as ``kvsplit plot``, with the same options. Needs an environment with the package
(``scripts/install_kvsplit.sh`` makes one).
"""

from __future__ import annotations

import sys


def main() -> int:
    """Hand over to the package."""
    try:
        from kvsplit.cli import main as kvsplit_main
    except ImportError as e:
        print(
            f"visualize_results.py: {e}; run it with the environment of the project "
            "(.venv/bin/python scripts/visualize_results.py), or install the package",
            file=sys.stderr,
        )
        return 1
    return kvsplit_main(["plot", *(sys.argv[1:] or ["--help"])])


if __name__ == "__main__":
    sys.exit(main())
