#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Measure KV cache configurations of a model at several lengths: memory, speed, perplexity, retrieval.

The same as ``kvsplit bench``, with the same options. Needs an environment with the package
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
            f"benchmark_kvsplit.py: {e}; run it with the environment of the project "
            "(.venv/bin/python scripts/benchmark_kvsplit.py), or install the package",
            file=sys.stderr,
        )
        return 1
    return kvsplit_main(["bench", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
