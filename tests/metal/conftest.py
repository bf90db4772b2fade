# SPDX-License-Identifier: MIT
"""Figures that the tests of the Metal backend count, shown at the end of the run."""

from __future__ import annotations

from typing import Any, Callable, List

import pytest

LINES: List[str] = []


@pytest.fixture
def say() -> Callable[[str], None]:
    """Add a line to the end of the run."""
    return LINES.append


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if LINES:
        terminalreporter.section("counted on the Metal device")
        for line in LINES:
            terminalreporter.write_line(line)
