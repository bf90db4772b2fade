# SPDX-License-Identifier: MIT
"""kvsplit: keys and values of the KV cache, each with a width of its own.

``Llama`` and ``KVCache`` load the native library when first used; everything else works without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, List

from kvsplit.errors import KVQuantError, KVSplitError
from kvsplit.memory import KVMemory, ModelShape, kv_memory
from kvsplit.policy import KVQuant

if TYPE_CHECKING:
    from kvsplit.llama import KVCache, Llama

__version__ = "0.1.0"

__all__ = [
    "KVCache",
    "KVMemory",
    "KVQuant",
    "KVQuantError",
    "KVSplitError",
    "Llama",
    "ModelShape",
    "__version__",
    "kv_memory",
]


def __getattr__(name: str) -> Any:
    if name in ("Llama", "KVCache"):
        from kvsplit import llama

        return getattr(llama, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> List[str]:
    return sorted(__all__)
