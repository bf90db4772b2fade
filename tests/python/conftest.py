# SPDX-License-Identifier: MIT
"""What several modules of these tests want."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def script(repo: Path) -> ModuleType:
    """scripts/readme_table.py as a module."""
    spec = importlib.util.spec_from_file_location("readme_table", repo / "scripts" / "readme_table.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
