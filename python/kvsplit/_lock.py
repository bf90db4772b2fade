# SPDX-License-Identifier: MIT
"""The upstream release that this package goes with; a test holds it to ``vendor/llama_cpp.lock``."""

from __future__ import annotations

NAME = "llama-cpp-python"
VERSION = "0.3.36"
SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
