# SPDX-License-Identifier: MIT
"""What a test does where the machine lacks something."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest


def missing(reason: str) -> NoReturn:
    """Skip, which the summary counts with its reason; or fail where nothing may be missing (KVSPLIT_REQUIRE=1)."""
    if os.environ.get("KVSPLIT_REQUIRE", "") not in ("", "0"):
        pytest.fail(f"required by KVSPLIT_REQUIRE: {reason}", pytrace=False)
    pytest.skip(reason)
