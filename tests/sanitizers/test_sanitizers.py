# SPDX-License-Identifier: MIT
"""Our code under sanitizers and valgrind, and what reads files from strangers under a fuzzer."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Dict, List, Set

import pytest
from needs import missing

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent

pytestmark = pytest.mark.slow


def run(*command: str, timeout: float) -> "subprocess.CompletedProcess[str]":
    """Run one of the scripts, output captured."""
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout
    )


def check(kind: str, timeout: float) -> Dict[str, str]:
    """Run all cases of a kind, and return the outcome of each by its name."""
    if kind != "valgrind" and shutil.which("clang++-19") is None:
        missing("no clang++-19 (Debian: clang-19 libclang-rt-19-dev)")
    if kind == "valgrind" and shutil.which("valgrind") is None:
        missing("no valgrind")
    done = run(str(HERE / "run.py"), kind, timeout=timeout)
    lines = [line.split(None, 5) for line in done.stdout.splitlines() if line.startswith(f"{kind} ")]
    outcomes = {line[4] if len(line) == 5 else f"{line[4]} {line[5]}": line[1] for line in lines}
    assert done.returncode == 0 and outcomes, done.stdout + done.stderr[-20000:]
    return outcomes


@pytest.mark.sanitizers
def test_tests_operations_and_text_are_clean_under_address_and_undefined_behavior_sanitizers() -> None:
    outcomes = check("asan", timeout=3600)
    assert {"policy", "args", "types", "attention", "operations rows", "operations pairs"} <= set(outcomes)
    assert sum(name.startswith(("text", "session")) for name in outcomes) >= 9
    # an instruction set may be missing on this machine, nothing else
    assert all(o == "passed" or name.startswith(("codec", "attention")) for name, o in outcomes.items())


@pytest.mark.sanitizers
def test_attention_and_the_server_have_no_data_race() -> None:
    outcomes = check("tsan", timeout=3600)
    assert set(outcomes.values()) == {"passed"}


def test_the_codec_is_clean_under_valgrind() -> None:
    outcomes = check("valgrind", timeout=1800)
    assert outcomes["codec generic"] == "passed"
    assert all(o in ("passed", "skipped") for o in outcomes.values())


@pytest.mark.sanitizers
def test_no_target_of_the_fuzzer_finds_a_fault() -> None:
    if shutil.which("clang++-19") is None:
        missing("no clang++-19 (Debian: clang-19 libclang-rt-19-dev)")
    built = run(str(HERE / "run.py"), "fuzz", timeout=3600)
    assert built.returncode == 0, built.stderr[-20000:]
    seconds = [] if os.environ.get("FUZZ_SECONDS") else ["--seconds", "10"]
    done = run(str(ROOT / "tests" / "fuzz" / "run.py"), "--json", *seconds, timeout=3600)
    rows: List[Dict[str, object]] = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, done.stderr
    names: Set[object] = {row["target"] for row in rows}
    assert names == {"policy", "args", "metadata", "session", "slot", "state", "sequence"}
    assert all(row["inputs"] for row in rows)


@pytest.mark.sanitizers
@pytest.mark.parametrize(
    ("kind", "source", "report"),
    [
        (
            "asan",
            "int main(int n, char **) { int a[4] = {}; int * p = new int[4]; return p[n + 3] + a[0]; }",
            "heap-buffer-overflow",
        ),
        (
            "asan",
            "int main(int n, char **) { int a = 0x7fffffff; return (a + n) != 0 ? 0 : 1; }",
            "signed integer overflow",
        ),
        (
            "tsan",
            "#include <thread>\nint x; int main() { std::thread t([] { x = 1; }); x = 2; t.join(); return 0; }",
            "data race",
        ),
    ],
)
def test_a_planted_fault_is_reported_by_the_compiler_and_options_that_are_used(
    kind: str, source: str, report: str, tmp_path: Path
) -> None:
    if shutil.which("clang++-19") is None:
        missing("no clang++-19 (Debian: clang-19 libclang-rt-19-dev)")
    sys.path.insert(0, str(HERE))
    import run as sanitizers

    presets = json.loads((ROOT / "CMakePresets.json").read_text(encoding="utf-8"))["configurePresets"]
    flags = next(p for p in presets if p["name"] == kind)["cacheVariables"]["CMAKE_CXX_FLAGS"].split()
    program = tmp_path / "planted"
    (tmp_path / "planted.cpp").write_text(source + "\n", encoding="utf-8")
    subprocess.run(["clang++-19", "-g", *flags, "planted.cpp", "-o", str(program)], cwd=tmp_path, check=True)
    res = sanitizers.run_case(kind, sanitizers.Case("planted", [str(program)]), tmp_path)
    assert res.outcome == "failed"
    assert report in res.text
