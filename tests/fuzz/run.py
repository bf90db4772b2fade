#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Run the fuzz targets of a build with `cmake --preset asan`, one after another.

Each target first reads the committed inputs of tests/fuzz/corpus, once; then it is fuzzed, from seeds that it makes
itself and from what earlier runs kept in the build folder. What it finds stays there too, with a command that repeats
it.

Environment:
  FUZZ_SECONDS  seconds of fuzzing for each target

Exit codes: 0 nothing was found, 1 something was found, 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, List, Optional

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
TARGETS = ("policy", "args", "metadata", "session", "slot", "state", "sequence")

# A text of a page, or a state of a few tokens. Longer ones only make the fuzzer slower.
MAX_LEN = {"policy": 512, "args": 256, "metadata": 256, "session": 4096, "slot": 4096, "state": 4096, "sequence": 4096}

LIMITS = [
    "-rss_limit_mb=2048",
    "-malloc_limit_mb=64",  # no input is longer than 4 kB, and no model larger than 100 kB
    "-timeout=20",
]


def environment(models: Path) -> Dict[str, str]:
    """The environment that a target runs in."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("LLAMA_ARG_")}
    env.update(
        KVSPLIT_FUZZ_MODELS=str(models),
        GGML_NO_BACKTRACE="1",  # a debugger for each failed assertion takes seconds
        UBSAN_OPTIONS=f"print_stacktrace=1:halt_on_error=1:suppressions={ROOT / 'tests/sanitizers/ubsan.supp'}",
        ASAN_OPTIONS="detect_leaks=1:allocator_may_return_null=0",
    )
    env.pop("KVSPLIT_FUZZ_SEEDS", None)
    return env


def first_line_of_fault(log: str) -> str:
    """What a sanitizer, an assertion or a check of ours said, from a run's messages."""
    for line in log.splitlines():
        if re.search(r"ERROR: |runtime error: |GGML_ASSERT|GGML_ABORT|fuzz-[a-z]+\.(cpp|h):\d+: ", line):
            return re.sub(r"^==\d+== ?", "", line.strip())
    return log.strip().splitlines()[-1] if log.strip() else "no message"


class Target:
    """One fuzz target and its folder.

    Args:
        name: of the target, without fuzz-.
        build: folder of the build.
        models: folder that models.py has written.
    """

    def __init__(self, name: str, build: Path, models: Path) -> None:
        self.name = name
        self.program = build / "bin" / f"fuzz-{name}"
        self.folder = build / "fuzz" / name
        self.env = environment(models)
        self.models = models
        for part in ("corpus", "seeds", "found"):
            (self.folder / part).mkdir(parents=True, exist_ok=True)

    def committed(self) -> List[Path]:
        """Inputs that the repository keeps: each once made the target fail."""
        return sorted(p for p in (HERE / "corpus" / self.name).glob("*") if p.is_file())

    def run(self, args: List[str], timeout: float, **env: str) -> "subprocess.CompletedProcess[str]":
        """Run the program with its messages in stderr."""
        return subprocess.run(
            [str(self.program), *args],
            cwd=self.folder,
            env={**self.env, **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            timeout=timeout,
        )

    def repeat(self, path: Path) -> str:
        """A command line that repeats an input."""
        return (
            f"KVSPLIT_FUZZ_MODELS={shlex.quote(str(self.models))} {self.program} {LIMITS[1]} {shlex.quote(str(path))}"
        )

    def fuzz(self, seconds: int) -> Dict[str, Any]:
        """Read the committed inputs, then fuzz; a row with counts and what was found."""
        row: Dict[str, Any] = {"target": self.name, "committed": 0, "seconds": seconds, "inputs": 0, "found": []}
        for path in self.committed():
            done = self.run([*LIMITS, str(path)], timeout=60)
            row["committed"] += 1
            if done.returncode != 0:
                row["found"].append({"what": first_line_of_fault(done.stderr), "repeat": self.repeat(path)})
        if row["found"] or seconds == 0:
            return row

        seeds = self.run([], timeout=120, KVSPLIT_FUZZ_SEEDS=str(self.folder / "seeds"))
        if seeds.returncode != 0 or not any((self.folder / "seeds").iterdir()):
            row["found"].append(
                {"what": "makes no seeds: " + first_line_of_fault(seeds.stderr), "repeat": str(self.program)}
            )
            return row

        args = [*LIMITS, f"-max_total_time={seconds}", f"-max_len={MAX_LEN[self.name]}", "-print_final_stats=1"]
        args += [f"-artifact_prefix={self.folder}/found/", "-reload=0"]
        if self.name == "args":
            args.append("-close_fd_mask=2")  # every refused command line prints its usage
        dictionary = HERE / "spec.dict"
        if self.name in ("policy", "args", "metadata"):
            args.append(f"-dict={dictionary}")
        folders = [str(self.folder / "corpus"), str(self.folder / "seeds")]
        if self.committed():
            folders.append(str(HERE / "corpus" / self.name))
        done = self.run(args + folders, timeout=seconds + 300)
        counts = dict(re.findall(r"stat::(\w+): +(\d+)", done.stderr))
        row["inputs"] = int(counts.get("number_of_executed_units", 0))
        covered = re.findall(r"cov: (\d+)", done.stderr)
        row["edges"] = int(covered[-1]) if covered else 0
        if done.returncode != 0:
            written = re.findall(r"Test unit written to (\S+)", done.stderr)
            path = Path(written[-1]) if written else None
            row["found"].append(self.describe(path, done.stderr))
        elif row["inputs"] == 0:
            row["found"].append({"what": "read no input", "repeat": shlex.join([str(self.program), *args, *folders])})
        return row

    def describe(self, path: Optional[Path], log: str) -> Dict[str, str]:
        """A finding; the input is read again where the messages were closed."""
        what = first_line_of_fault(log)
        if path is not None and "-close_fd_mask" in log:
            what = first_line_of_fault(self.run([*LIMITS, str(path)], timeout=60).stderr)
        (self.folder / "found" / "log.txt").write_text(log)
        return {"what": what, "repeat": self.repeat(path) if path else f"see {self.folder}/found/log.txt"}


def main() -> int:
    """Command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("target", nargs="*", help=f"which: {', '.join(TARGETS)}; default: all")
    p.add_argument("--build", type=Path, default=ROOT / "build-asan", help="folder of the build (default: build-asan)")
    p.add_argument("--seconds", type=int, help="of fuzzing for each target; 0: only the committed inputs (default: 20)")
    p.add_argument("--json", action="store_true", help="print a row of JSON for each target")
    a = p.parse_args()
    for name in a.target:
        if name not in TARGETS:
            p.error(f"target: there is no {name!r}; there are {', '.join(TARGETS)}")
    seconds = a.seconds
    if seconds is None:
        text = os.environ.get("FUZZ_SECONDS") or "20"
        if not text.isdigit():
            p.error(f"FUZZ_SECONDS: {text!r} is no whole number of seconds")
        seconds = int(text)
    if seconds < 0:
        p.error(f"--seconds: {seconds} is negative")
    build = a.build.resolve()
    names = [n for n in TARGETS if n in (a.target or TARGETS)]
    for name in names:
        if not (build / "bin" / f"fuzz-{name}").is_file():
            print(f"{build} has no fuzz-{name}: build it with `make test-fuzz`", file=sys.stderr)
            return 1

    import models

    folder = models.write_models(build / "fuzz" / "models")
    found = 0
    for name in names:
        row = Target(name, build, folder).fuzz(seconds)
        found += len(row["found"])
        if a.json:
            print(json.dumps(row), flush=True)
        else:
            print(
                f"{name:<9} {row['committed']:>3} committed inputs, {row['inputs']:>8} more in {seconds} s,"
                f" {len(row['found'])} found",
                flush=True,
            )
        for fault in row["found"]:
            print(f"{name}: {fault['what']}\n  {fault['repeat']}", file=sys.stderr, flush=True)
    return 1 if found else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
