#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Compare KV cache configurations of a model in a few minutes: memory, speed, perplexity, KL divergence.

The same as ``kvsplit compare --quick``, with the same options; ``--full`` measures as long as ``kvsplit
compare`` does. Needs an environment with the package (``scripts/install_kvsplit.sh`` makes one).
"""

from __future__ import annotations

import sys


def main() -> int:
    """Hand over to the package."""
    try:
        from kvsplit.cli import main as kvsplit_main
    except ImportError as e:
        print(
            f"quick_compare.py: {e}; run it with the environment of the project "
            "(.venv/bin/python scripts/quick_compare.py), or install the package",
            file=sys.stderr,
        )
        return 1
    args = sys.argv[1:]
    quick = [] if "--full" in args else ["--quick"]
    return kvsplit_main(["compare", *quick, *[a for a in args if a not in ("--full", "--quick")]])


if __name__ == "__main__":
    sys.exit(main())
