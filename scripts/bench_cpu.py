#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Measure decode and prefill on a CPU over the depth of the cache, beside the unpatched release.

The options are those of ``kvsplit.depth``: ``--help`` tells them. Needs both builds (``make build build-upstream``).
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    """Hand over to the package, that of this source tree if none is installed."""
    try:
        try:
            import kvsplit  # noqa: F401
        except ImportError:
            sys.path.insert(0, str(ROOT / "python"))
        from kvsplit.depth import main as depth
    except ImportError as e:
        print(
            f"bench_cpu.py: {e}; run it with the environment of the project (.venv/bin/python scripts/bench_cpu.py)",
            file=sys.stderr,
        )
        return 1
    return depth(root=ROOT)


if __name__ == "__main__":
    sys.exit(main())
