#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Run tiers of tests one after another, and count what passed, failed and was skipped.

Usage: run_tests.py TIER...

Tiers: patches (lock and patch series), cpp (ctest), metal (the Metal backend, on a Mac's device or an emulated one),
python, model (a real model), bindings (llama-cpp-python's own tests on our libraries), slow (what takes minutes), hours
(all cases of upstream's test of attention, every pair with every head size, on the Metal device).

Each tier leaves a JUnit file in build/test-results. Every skip is listed with its reason, and the last line is
  kvsplit: N passed, N failed, N skipped

Environment:
  KVSPLIT_REQUIRE=1  a missing tool or model is a failure, not a skip
  PYTEST_ARGS        more arguments for pytest

Exit codes: 0 all passed or skipped, 1 a failure, 2 usage.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path
from typing import Dict, List, NamedTuple, Optional

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build"
RESULTS = BUILD / "test-results"
TIERS = ("patches", "cpp", "metal", "python", "model", "bindings", "slow", "hours")


class Case(NamedTuple):
    """One test: where it ran, its name, what came of it, and why."""

    tier: str
    name: str
    outcome: str  # passed, failed or skipped
    reason: str


def parse(tier: str, path: Path) -> List[Case]:
    """Cases of a JUnit file as pytest or ctest write it; a missing or damaged file counts as a failure."""
    try:
        root = ElementTree.parse(path).getroot()
    except (OSError, ElementTree.ParseError) as e:
        return [Case(tier, path.name, "failed", f"no result file: {e}")]
    cases = []
    for node in root.iter("testcase"):
        name = ".".join(s for s in (node.get("classname"), node.get("name")) if s)
        skipped, failed = node.find("skipped"), node.find("failure")
        if failed is None:
            failed = node.find("error")
        message = "" if skipped is None else skipped.get("message") or ""
        if "SKIP" not in message and node.get("status") == "notrun":  # ctest: not built, or a fixture failed
            cases.append(Case(tier, name, "failed", message or "did not run"))
        elif failed is not None or node.get("status") == "fail":
            message = "" if failed is None else failed.get("message") or ""
            cases.append(Case(tier, name, "failed", message.split("\n")[0]))
        elif skipped is not None or node.get("status") in ("disabled", "skipped"):
            reason = "" if skipped is None else skipped.get("message") or skipped.text or ""
            out = node.find("system-out")
            if tier == "cpp" and out is not None and out.text:  # ctest knows only the exit code
                said = [line for line in out.text.splitlines() if line.startswith("skipped: ")]
                reason = said[-1][len("skipped: ") :] if said else reason
            cases.append(Case(tier, name, "skipped", reason.strip().split("\n")[0]))
        else:
            cases.append(Case(tier, name, "passed", ""))
    return cases


def real_model() -> Optional[str]:
    """Path of the small real model, got if need be; None where it can't be had."""
    if os.environ.get("KVSPLIT_TEST_MODEL"):
        return os.environ["KVSPLIT_TEST_MODEL"]
    kvsplit = [str(Path(sys.executable).parent / "kvsplit")]
    if not Path(kvsplit[0]).exists():
        return None
    if subprocess.run(kvsplit + ["models", "pull", "smollm2"], stdin=subprocess.DEVNULL).returncode != 0:
        return None
    done = subprocess.run(kvsplit + ["models", "path", "smollm2"], stdout=subprocess.PIPE, text=True)
    return done.stdout.strip() if done.returncode == 0 else None


def pytest(tier: str, args: List[str], env: Dict[str, str], cwd: Path = ROOT) -> List[Case]:
    out = RESULTS / f"{tier}.xml"
    # The program and not `python -m`: that would put the folder it runs in on the import path.
    command = [str(Path(sys.executable).parent / "pytest"), f"--junitxml={out}", "-o", "junit_family=xunit1"]
    command += args + shlex.split(os.environ.get("PYTEST_ARGS", ""))
    code = subprocess.run(command, cwd=cwd, env=env, stdin=subprocess.DEVNULL).returncode
    cases = parse(tier, out)
    if code not in (0, 1, 5) or (code == 5 and not cases):
        cases.append(Case(tier, "pytest", "failed", f"exit code {code}: nothing ran, or it broke off"))
    return cases


def ctest(env: Dict[str, str]) -> List[Case]:
    out = RESULTS / "cpp.xml"
    program = shutil.which("ctest", path=env["PATH"])
    if program is None:
        return [Case("cpp", "ctest", "failed", "ctest was not found")]
    command = [program, "--test-dir", str(BUILD), "--output-on-failure", "--output-junit", str(out)]
    subprocess.run(command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL)
    return parse("cpp", out)


def bindings(env: Dict[str, str]) -> List[Case]:
    """llama-cpp-python's own tests, from its source archive, with our libraries."""
    env = dict(env, LLAMA_CPP_LIB_PATH=str(BUILD / "bin"))
    env["PYTHONPATH"] = str(ROOT / "tests" / "upstream")
    args = ["tests", "-p", "hub_models", "-p", "no:cacheprovider", "--import-mode=importlib", "-ra"]
    return pytest("bindings", args, env, ROOT / "vendor" / "src")


def run(tier: str, env: Dict[str, str]) -> List[Case]:
    """Run one tier and return its cases."""
    if tier == "patches":
        return pytest(tier, ["tests/patches", "tests/scripts"], env)
    if tier == "cpp":
        return ctest(env)
    if tier == "metal":
        return pytest(tier, ["tests/metal", "-m", "not slow"], env)
    if tier == "python":
        return pytest(tier, ["tests/python", "-m", "not slow"], env)
    if tier == "model":
        return pytest(tier, ["tests/model", "tests/upstream", "-m", "not slow"], env)
    if tier == "bindings":
        return bindings(env)
    if tier == "hours":
        return pytest(tier, ["tests", "-m", "hours"], env)
    return pytest(tier, ["tests", "-m", "slow and not hours"], env)


def main() -> int:
    tiers = sys.argv[1:]
    if not tiers or any(t not in TIERS for t in tiers):
        print(__doc__, file=sys.stderr)
        return 0 if tiers in (["-h"], ["--help"]) else 2
    RESULTS.mkdir(parents=True, exist_ok=True)
    env = dict(os.environ)
    env["PATH"] = str(Path(sys.executable).parent) + os.pathsep + env.get("PATH", "")
    env.setdefault("KVSPLIT_NATIVE_DIR", str(BUILD))
    env.setdefault("PYTHONDONTWRITEBYTECODE", "1")
    env.setdefault("MPLBACKEND", "Agg")
    os.environ.update(env)
    if any(t in tiers for t in ("cpp", "metal", "model", "bindings", "slow", "hours")):
        model = real_model()
        if model:
            env["KVSPLIT_TEST_MODEL"] = model
    if (ROOT / "build-upstream" / "bin").is_dir():
        env.setdefault("KVSPLIT_UPSTREAM_DIR", str(ROOT / "build-upstream"))
    cases: List[Case] = []
    lines = []
    for tier in tiers:
        print(f"\n== {tier}", flush=True)
        (RESULTS / f"{tier}.xml").unlink(missing_ok=True)
        start = time.monotonic()
        found = run(tier, env)
        n = Counter(c.outcome for c in found)
        lines.append(
            f"  {tier:<8} {n['passed']:>5} passed {n['failed']:>4} failed {n['skipped']:>4} skipped"
            f"  {time.monotonic() - start:7.1f} s"
        )
        cases += found
    print("\n== summary")
    print("\n".join(lines))
    for outcome in ("skipped", "failed"):
        reasons = Counter(
            (c.tier, c.reason if outcome == "skipped" else f"{c.name}: {c.reason}")
            for c in cases
            if c.outcome == outcome
        )
        for (tier, reason), count in sorted(reasons.items()):
            print(f"  {outcome} {tier}: {reason or 'no reason given'}" + (f" ({count} tests)" if count > 1 else ""))
    n = Counter(c.outcome for c in cases)
    print(f"kvsplit: {n['passed']} passed, {n['failed']} failed, {n['skipped']} skipped", flush=True)
    return 1 if n["failed"] or not n["passed"] else 0


if __name__ == "__main__":
    sys.exit(main())
