# SPDX-License-Identifier: MIT
"""What the tools say at start about their KV cache, read back layer by layer."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Dict, List

BITS = {
    "f32": 32,
    "f16": 16,
    "bf16": 16,
    "q8_0": 8.5,
    "kvq6": 6.5,
    "kvq5": 5.5,
    "kvq4": 4.5,
    "kvq3": 3.5,
    "kvq2": 2.5,
    "q5_0": 5.5,
    "q5_1": 6,
    "q4_0": 4.5,
    "q4_1": 5,
    "iq4_nl": 4.5,
}

# Not tied to the start of a line: the tools' log is written by a thread of its own, whose prefix may stand there.
LINE = re.compile(
    r"kvq(?P<draft> draft)?: K (?P<k>\S+) \((?P<bits_k>[\d.]+) bits\), V (?P<v>\S+) \((?P<bits_v>[\d.]+) bits\); "
    r"layers? (?P<layers>[\d,-]+); (?P<mib>\d+\.\d\d) MiB; "
    r"rotation (?:none|K (?P<rot_k>none|by \d+), V (?P<rot_v>none|by \d+)); "
    r"(?P<attention>flash attention|attention) on (?P<where>\S+(?: for prompts, on \S+ for decoding)?)$",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Layer:
    """A layer as the start line has it; rot_k and rot_v are 0 for rows stored as they are."""

    k: str
    v: str
    rot_k: int
    rot_v: int
    flash: bool
    where: str


@dataclass(frozen=True)
class Cache:
    """Layers from 0 on, and the sum of the lines' MiB."""

    layers: List[Layer]
    mib: float

    @property
    def k(self) -> List[str]:
        return [x.k for x in self.layers]

    @property
    def v(self) -> List[str]:
        return [x.v for x in self.layers]


def _numbers(ranges: str) -> List[int]:
    res: List[int] = []
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        res.extend(range(int(first), int(last or first) + 1))
    return res


def _size(rotation: str) -> int:
    return int(rotation[len("by ") :]) if rotation.startswith("by ") else 0


def parse(stderr: str, draft: bool = False) -> List[Cache]:
    """Caches told of in stderr, in order: llama-bench tells of one for each row.

    Raises:
        AssertionError: the bits aren't those of the type, or a layer is told of twice or not at all.
    """
    res: List[Cache] = []
    layers: Dict[int, Layer] = {}
    mib = 0.0
    for m in LINE.finditer(stderr):
        if bool(m["draft"]) != draft:
            continue
        assert float(m["bits_k"]) == BITS[m["k"]] and float(m["bits_v"]) == BITS[m["v"]], m[0]
        layer = Layer(
            m["k"],
            m["v"],
            _size(m["rot_k"] or "none"),
            _size(m["rot_v"] or "none"),
            m["attention"] == "flash attention",
            m["where"],
        )
        numbers = _numbers(m["layers"])
        if 0 in numbers and layers:
            res.append(_whole(layers, mib))
            layers, mib = {}, 0.0
        for i in numbers:
            assert i not in layers, f"layer {i} is told of twice: {m[0]}"
            layers[i] = layer
        mib += float(m["mib"])
    if layers:
        res.append(_whole(layers, mib))
    return res


def _whole(layers: Dict[int, Layer], mib: float) -> Cache:
    assert sorted(layers) == list(range(len(layers))), f"layers {sorted(layers)}"
    return Cache([layers[i] for i in range(len(layers))], mib)


def one(stderr: str, draft: bool = False) -> Cache:
    """The one cache told of in stderr."""
    caches = parse(stderr, draft)
    assert len(caches) == 1, f"{len(caches)} caches are told of:\n{stderr[-3000:]}"
    return caches[0]
