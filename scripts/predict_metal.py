#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Predict the time of a decoded token on Apple chips, from bytes alone. A prediction: nothing of it was measured.

Usage: predict_metal.py [--layers 32] [--kv-heads 8] [--head 128] [--weights-gb 4.9] [--ctx 8192,32768,131072]
                        [--config F16,K8V8,K8V4,K6V4,K4V4] [--json]

A decoded token reads all weights and the whole cache once:

    ms = 1000*(weights + cache)/bandwidth,   cache = ctx * layers * KV heads * head size * (bits of K + bits of V)/8

Bandwidth is what Apple states for the chip (1e9 bytes a second). It is a bound: a kernel that computes longer than it
reads is slower, and none reads at the full rate. So ratios between configurations are worth more than times.
Prints a Markdown table, or with --json a list of objects.

Exit codes: 0 done, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, Dict, List

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "python"))

from kvsplit.cache_types import BITS, BY_NAME
from kvsplit.errors import KVSplitError
from kvsplit.policy import KVQuant

#: Memory bandwidth in GB/s, as Apple states it for the largest variant of each chip.
CHIPS = {
    "M1": 68.25, "M1 Pro": 200, "M1 Max": 400, "M2": 100, "M2 Max": 400, "M3": 100, "M3 Pro": 150, "M3 Max": 400,
    "M3 Ultra": 819, "M4": 120, "M4 Pro": 273, "M4 Max": 546, "M5": 153.6,
}  # fmt: skip


def bits(spec: str) -> float:
    """Bits per value of a type by name or by its plain number of bits."""
    return BY_NAME[BITS[int(spec)] if spec.isdigit() else spec].bits_per_value


def predict(args: argparse.Namespace) -> List[Dict[str, Any]]:
    """One object for each chip, context and configuration: kv_gb (1e9 bytes), ms (milliseconds a token, at least)."""
    rows = []
    for chip, bandwidth in CHIPS.items():
        for ctx in args.ctx:
            for text in args.config:
                quant = KVQuant.from_text(text, "--config")
                both = bits(quant.key) + bits(quant.val)
                kv_gb = ctx * args.layers * args.kv_heads * args.head * both / 8 / 1e9
                ms = 1000 * (args.weights_gb + kv_gb) / bandwidth
                rows.append({"chip": chip, "gb_per_s": bandwidth, "ctx": ctx, "config": text, "kv_gb": kv_gb, "ms": ms})
    return rows


def main() -> int:
    assert __doc__
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head", type=int, default=128)
    parser.add_argument("--weights-gb", type=float, default=4.9)
    parser.add_argument("--ctx", type=lambda s: [int(x) for x in s.split(",")], default=[8192, 32768, 131072])
    parser.add_argument("--config", type=lambda s: s.split(","), default=["F16", "K8V8", "K8V4", "K4V4"])
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    try:
        rows = predict(args)
    except (KVSplitError, KeyError) as e:
        parser.error(str(e))
    if args.json:
        print(json.dumps(rows, indent=1))
        return 0
    heads = [f"{c} at {n // 1024}k" for n in args.ctx for c in args.config]
    print("| Chip | GB/s | " + " | ".join(heads) + " |\n|---|---:|" + "---:|" * len(heads))
    for chip, bandwidth in CHIPS.items():
        cells = [f"{r['ms']:.1f}" if r["ms"] < 100 else f"{r['ms']:.0f}" for r in rows if r["chip"] == chip]
        print(f"| {chip} | {bandwidth:g} | " + " | ".join(cells) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
