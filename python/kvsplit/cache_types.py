# SPDX-License-Identifier: MIT
"""The types that a KV cache may have: one table, read by everything else in the package.

Sizes follow from the layout of a block: a row of ``n`` values takes ``n / block * bytes`` bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Dict, Tuple

# A policy handle of the native library is a type id at or above this one.
POLICY_BASE = 0x4B510000


@dataclass(frozen=True)
class CacheType:
    """One storage type.

    Attributes:
        name: the name that flags, metadata and messages use.
        ggml_id: value of ``enum ggml_type``.
        block: values per block; a row must be a whole number of blocks.
        bytes: bytes per block.
    """

    name: str
    ggml_id: int
    block: int
    bytes: int

    @property
    def bits_per_value(self) -> float:
        """Storage of one value, scales included, in bits."""
        return 8.0 * self.bytes / self.block

    def row_bytes(self, n: int) -> int:
        """Bytes of a row of ``n`` values. ``n`` must be a multiple of the block.

        Raises:
            ValueError: if ``n`` is not a whole number of blocks.
        """
        if n % self.block:
            raise ValueError(f"{self.name} stores blocks of {self.block} values, which don't divide a row of {n}")
        return n // self.block * self.bytes


# fmt: off
CACHE_TYPES: Tuple[CacheType, ...] = (
    #         name      id  block bytes
    CacheType("f32",     0,  1,  4),
    CacheType("f16",     1,  1,  2),
    CacheType("bf16",   30,  1,  2),
    CacheType("q8_0",    8, 32, 34),
    CacheType("kvq6",  454, 32, 26),
    CacheType("kvq5",  453, 32, 22),
    CacheType("kvq4",  452, 32, 18),
    CacheType("kvq3",  451, 32, 14),
    CacheType("kvq2",  450, 32, 10),
    CacheType("q5_0",    6, 32, 22),
    CacheType("q5_1",    7, 32, 24),
    CacheType("q4_0",    2, 32, 18),
    CacheType("q4_1",    3, 32, 20),
    CacheType("iq4_nl", 20, 32, 18),
)

# Bits that a SPEC may name, and the type that stores them.
BITS: Dict[int, str] = {
    32: "f32", 16: "f16", 8: "q8_0", 6: "kvq6", 5: "kvq5", 4: "kvq4", 3: "kvq3", 2: "kvq2",
}
# fmt: on

BY_NAME: Dict[str, CacheType] = {t.name: t for t in CACHE_TYPES}
BY_ID: Dict[int, CacheType] = {t.ggml_id: t for t in CACHE_TYPES}

F16 = BY_NAME["f16"]


def allowed_text() -> str:
    """What a SPEC may name, for messages."""
    bits = " ".join(str(b) for b in BITS)
    names = " ".join(t.name for t in CACHE_TYPES)
    return f"bits {bits}, or a type: {names}"


def is_quantized(name: str) -> bool:
    """True if the type stores blocks with a scale, so that flash attention is needed for V."""
    return BY_NAME[name].block > 1
