# SPDX-License-Identifier: MIT
"""Fixtures of the patch tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from project import Project


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """A made-up project without patches, in a folder with a blank in its name."""
    root = tmp_path / "a project"
    root.mkdir()
    return Project(root)


@pytest.fixture
def patched(project: Project) -> Project:
    """A made-up project with two patches, applied."""
    project.make_series()
    done = project.patchq("apply")
    assert done.returncode == 0, done.stderr
    return project
