# SPDX-License-Identifier: MIT
"""The summary counts what pytest and ctest write."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

REPO = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def run_tests() -> ModuleType:
    spec = importlib.util.spec_from_file_location("run_tests", REPO / "scripts" / "run_tests.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["run_tests"] = module
    spec.loader.exec_module(module)
    return module


def test_pytest_file(run_tests: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "test_x.py").write_text(
        "import pytest\n"
        "def test_good(): pass\n"
        "def test_bad(): assert False, 'no'\n"
        "def test_skip(): pytest.skip('no tool')\n"
        "@pytest.fixture\n"
        "def broken(): raise OSError('x')\n"
        "def test_error(broken): pass\n"
    )
    out = tmp_path / "out.xml"
    command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={out}", "-p", "no:cacheprovider", "--rootdir=."]
    subprocess.run(command + ["-c", "/dev/null", "test_x.py"], cwd=tmp_path, stdout=subprocess.DEVNULL)
    cases = run_tests.parse("python", out)
    assert Counter(c.outcome for c in cases) == {"passed": 1, "failed": 2, "skipped": 1}
    assert [c.reason for c in cases if c.outcome == "skipped"] == ["no tool"]


def test_ctest_file(run_tests: ModuleType, tmp_path: Path) -> None:
    out = tmp_path / "out.xml"
    out.write_text(
        '<testsuite><testcase name="a" status="run"/>'
        '<testcase name="b" status="fail"><failure message=""/></testcase>'
        '<testcase name="c" status="notrun"><skipped message="SKIP_RETURN_CODE=77"/>'
        "<system-out>x\nskipped: no model\n</system-out></testcase>"
        '<testcase name="d" status="notrun"><skipped message="Unable to find executable"/></testcase>'
        '<testcase name="e" status="disabled"><skipped message="Disabled"/></testcase></testsuite>'
    )
    cases = {c.name: c for c in run_tests.parse("cpp", out)}
    assert cases["a"].outcome == "passed" and cases["b"].outcome == "failed"
    assert cases["c"].outcome == "skipped" and cases["c"].reason == "no model"
    assert cases["d"].outcome == "failed", "a test that was not built is no skip"
    assert cases["e"].outcome == "skipped"


def test_missing_file_is_a_failure(run_tests: ModuleType, tmp_path: Path) -> None:
    (case,) = run_tests.parse("cpp", tmp_path / "none.xml")
    assert case.outcome == "failed"


def test_unknown_tier() -> None:
    done = subprocess.run([sys.executable, str(REPO / "scripts" / "run_tests.py"), "all"], stderr=subprocess.DEVNULL)
    assert done.returncode == 2
