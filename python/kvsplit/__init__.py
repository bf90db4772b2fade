# SPDX-License-Identifier: MIT
"""kvsplit: keys and values of the KV cache, each with a width of its own."""

from __future__ import annotations
