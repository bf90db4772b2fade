#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Build with a sanitizer and run what reaches our code; or run the codec under valgrind.

  asan      AddressSanitizer and UndefinedBehaviorSanitizer: our C++ tests, upstream's test of backend operations for
            our types, text with a context shift and a session saved and loaded (build-asan)
  tsan      ThreadSanitizer: attention on several threads, and llama-server under a mix of clients (build-tsan)
  valgrind  the codec, from the build in build/
  fuzz      only builds the fuzz targets of tests/fuzz (build-asan); tests/fuzz/run.py runs them

Environment:
  CMAKE_ARGS    more arguments for cmake
  SOAK_MINUTES  of load on the server under ThreadSanitizer

Exit codes: 0 nothing was found, 1 something was found or is missing, 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Dict, List, NamedTuple, Sequence

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
GOLDEN = ROOT / "tests" / "data" / "kvq-golden.txt"

for _folder in ("python", "tests/python"):
    sys.path.insert(0, str(ROOT / _folder))
sys.path.insert(0, str(ROOT / "tests" / "cpp"))

SKIPPED = 77

FUZZ_TARGETS = ["kvsplit-fuzz"]
ASAN_TARGETS = [
    "test-kvq-policy",
    "test-kvq-args",
    "test-kvq-types",
    "test-kvq-rpc",
    "test-kvq-context",
    "test-kvq-state",
    "test-kvq-attn",
    "test-backend-ops",
    "llama-completion",
]
TSAN_TARGETS = ["test-kvq-attn", "llama-server"]

# name, path that the program says it took, CPU flags that it needs
CODECS = [
    ("generic", "generic", ""),
    ("avx2", "avx2", "avx2,fma,f16c"),
    ("avx512", "avx512", "avx512f,avx512bw,avx512dq,avx512vl,avx512cd"),
    ("avx512-vbmi", "avx512", "avx512f,avx512bw,avx512dq,avx512vl,avx512cd,avx512vbmi,avx512_vnni"),
]
ATTENTION = [
    ("generic", ""),
    ("avx2", "avx2,fma,f16c"),
    ("avx512-vnni", "avx512f,avx512bw,avx512dq,avx512vl,avx512cd,avx512vbmi,avx512_vbmi2,avx512_vnni"),
]


class Case(NamedTuple):
    """One program to run.

    Attributes:
        name: what it is called in the results.
        command: program and arguments.
        needs: CPU flags, apart by commas.
        timeout: in seconds.
        proof: regular expression of what it prints when it did what it is run for; a filter that chooses nothing
            succeeds too.
        forgiven: regular expression of faults that a soak may name and that don't count here.
    """

    name: str
    command: List[str]
    needs: str = ""
    timeout: float = 600
    proof: str = ""
    forgiven: str = ""


class Outcome(NamedTuple):
    """What came of a case: passed, skipped or failed, its last messages, and its time in seconds."""

    outcome: str
    text: str
    seconds: float


def x86() -> bool:
    """Whether this machine has the instruction sets of CODECS and ATTENTION."""
    return os.uname().machine in ("x86_64", "amd64")


def lacking(needs: str) -> List[str]:
    """CPU flags of a list that this machine lacks."""
    from run_codec import cpu_flags

    return sorted(set(needs.split(",")) - {""} - cpu_flags())


def environment(kind: str) -> Dict[str, str]:
    """The environment that an instrumented program runs in: it ends at the first report."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("LLAMA_ARG_", "LLAMA_CPP_"))}
    common = ""
    symbolizer = shutil.which("llvm-symbolizer-19") or shutil.which("llvm-symbolizer")
    if symbolizer:  # as a name in PATH the run-time libraries don't take it everywhere
        common = f":external_symbolizer_path={os.path.realpath(symbolizer)}"
    env.update(
        GGML_NO_BACKTRACE="1",
        ASAN_OPTIONS="detect_leaks=1:halt_on_error=1:detect_stack_use_after_return=1:strict_string_checks=1" + common,
        UBSAN_OPTIONS=f"print_stacktrace=1:halt_on_error=1:suppressions={HERE / 'ubsan.supp'}" + common,
        TSAN_OPTIONS=f"halt_on_error=0:second_deadlock_stack=1:suppressions={HERE / 'tsan.supp'}" + common,
    )
    return env


def configure_and_build(preset: str, targets: Sequence[str]) -> Path:
    """Configure a preset if that was not done, build targets, and return the folder; CalledProcessError on failure."""
    folder = ROOT / f"build-{preset}"
    if shutil.which("clang++-19") is None and not (folder / "CMakeCache.txt").is_file():
        raise FileNotFoundError("no clang++-19 (Debian: clang-19 libclang-rt-19-dev)")
    extra = shlex.split(os.environ.get("CMAKE_ARGS", ""))
    if extra or not (folder / "CMakeCache.txt").is_file():
        command = ["cmake", "--preset", preset, f"-DPython3_EXECUTABLE={sys.executable}", *extra]
        subprocess.run(command, cwd=ROOT, check=True, stdout=sys.stderr)
    jobs = os.environ.get("JOBS") or str(os.cpu_count() or 2)
    command = ["cmake", "--build", str(folder), "--parallel", jobs, "--target", *targets]
    subprocess.run(command, cwd=ROOT, check=True, stdout=sys.stderr)
    return folder


def build(kind: str) -> Path:
    """Build what a kind of check needs, and return the folder of its programs."""
    if kind == "valgrind":
        if shutil.which("valgrind") is None:
            raise FileNotFoundError("no valgrind (Debian: valgrind)")
        folder = ROOT / "build"
        if not (folder / "bin" / "test-kvq-codec-generic").is_file():
            raise FileNotFoundError("build/ has no test-kvq-codec-generic: run `make build`")
        return folder / "bin"
    if kind == "fuzz":
        return configure_and_build("asan", FUZZ_TARGETS) / "bin"
    if kind == "tsan":
        return configure_and_build("tsan", TSAN_TARGETS) / "bin"
    targets = list(ASAN_TARGETS)
    for name, *_ in CODECS if x86() else CODECS[:1]:
        targets.append(f"test-kvq-codec-{name}")
    for name, *_ in ATTENTION if x86() else ATTENTION[:1]:
        targets.append(f"test-kvq-attn-{name}")
    return configure_and_build("asan", targets) / "bin"


def codec_command(bin_dir: Path, name: str, path: str) -> List[str]:
    """Command of the codec's test."""
    return [str(bin_dir / f"test-kvq-codec-{name}"), "--expect", path, "--golden", str(GOLDEN)]


def models(folder: Path) -> Dict[str, Path]:
    """Small models with SmolLM2's tokenizer: full attention, and a sliding window beside it."""
    import synth

    from kvsplit import models as known

    real = os.environ.get("KVSPLIT_TEST_MODEL")
    tokenizer = Path(real) if real else known.ensure("smollm2", quiet=True)
    return {
        "full": synth.write_model(folder / "full.gguf", synth.Shape(n_layer=4), tokenizer),
        "window": synth.write_model(
            folder / "window.gguf", synth.Shape(arch="gemma3", n_layer=4, window=32, pattern=2), tokenizer
        ),
        "real": tokenizer,
    }


def asan_cases(bin_dir: Path, folder: Path) -> List[Case]:
    """Cases under AddressSanitizer; folder is for models and sessions."""
    cases = [Case(name, [str(bin_dir / f"test-kvq-{name}")]) for name in ("policy", "args", "types", "rpc")]
    for name, path, needs in CODECS if x86() else CODECS[:1]:
        cases.append(Case(f"codec {name}", codec_command(bin_dir, name, path), needs))
    cases.append(Case("attention", [str(bin_dir / "test-kvq-attn"), "--few"]))
    for name, needs in ATTENTION if x86() else ATTENTION[:1]:
        cases.append(
            Case(f"attention {name}", [str(bin_dir / f"test-kvq-attn-{name}"), "--few", "--expect", name], needs)
        )

    # what tests/upstream runs, as far as it is about our types
    ops = [str(bin_dir / "test-backend-ops"), "test", "-b", "CPU", "-j", "2", "-o"]
    for name, op, chosen in (
        ("rows", "SET_ROWS,GET_ROWS,CPY", "kvq"),
        ("products", "MUL_MAT", "type_a=kvq"),
        ("pairs", "FLASH_ATTN_EXT", "hsk=64,hsv=64,nh=4,nr23=.2,1.,kv=113,nb=3.*kvq"),
    ):
        some_passed = r"\b([1-9]\d*)/\1 tests passed"
        cases.append(Case(f"operations {name}", [*ops, op, "-p", chosen], proof=some_passed))

    made = models(folder)
    for name in ("full", "window"):
        cases.append(Case(f"context {name}", [str(bin_dir / "test-kvq-context"), str(made[name])]))
    for name in ("full", "window"):
        states = folder / f"states-{name}"
        states.mkdir(exist_ok=True)
        command = [str(bin_dir / "test-kvq-state"), str(made[name]), str(states), "8", "4", "4,:1=8", "3,-1=16"]
        cases.append(Case(f"states {name}", command, proof=r"[1-9]\d* hostile states refused"))
    # one thread: without OpenMP threads wait in a loop, and on a busy machine they wait long
    text = [str(bin_dir / "llama-completion"), "-no-cnv", "--no-warmup", "--ignore-eos", "--temp", "0", "-t", "1"]
    prompt = ["-p", "The key-value cache of a language model grows with every token, and so does its memory."]
    shift = ["-c", "256", "-n", "250", "--context-shift", "--keep", "4"]  # more than fit
    for name, kvq in (
        ("full", ["--kvq", "k8v4"]),
        ("window", ["--kvq", "k6v3"]),
        ("full", ["--kvq-key", "4,:1=16,-1=8", "--kvq-val", "4,1=q5_1"]),
    ):
        cases.append(Case(f"text {name} {' '.join(kvq)}", [*text, "-m", str(made[name]), *kvq, *prompt, *shift]))
        session = ["--prompt-cache", str(folder / f"{len(cases)}.session"), "--prompt-cache-all"]
        for step, proof in (("saved", "saved final session"), ("loaded", "loaded a session with prompt size")):
            command = [*text, "-m", str(made[name]), *kvq, *prompt, *session, "-c", "256", "-n", "8"]
            cases.append(Case(f"session {step} {name} {' '.join(kvq)}", command, proof=proof))
    cases.append(
        Case("text SmolLM2", [*text, "-m", str(made["real"]), "--kvq", "k8v4", *prompt, "-c", "256", "-n", "8"])
    )
    return cases


def tsan_cases(bin_dir: Path, folder: Path) -> List[Case]:
    """Cases under ThreadSanitizer."""
    minutes = os.environ.get("SOAK_MINUTES") or "0.5"
    made = models(folder)
    soak = [sys.executable, str(ROOT / "tests" / "model" / "soak.py"), "--server", str(bin_dir / "llama-server")]
    soak += ["--kvq", "k8v4", "--minutes", minutes, "--pool", "2", "--model", str(made["full"])]
    timeout = 600 + 120 * float(minutes)
    served = r"\b[1-9]\d* requests in"
    grew = "resident memory grew"  # with each page that is touched, ThreadSanitizer's record of it
    return [
        Case(
            "attention", [str(bin_dir / "test-kvq-attn"), "--few"], timeout=1200, proof=r"\b[1-9]\d* passed, 0 failed"
        ),
        Case("server unified", [*soak, "--setting", "unified-4"], timeout=timeout, proof=served, forgiven=grew),
        Case("server streams", [*soak, "--setting", "split-4"], timeout=timeout, proof=served, forgiven=grew),
    ]


def valgrind_cases(bin_dir: Path) -> List[Case]:
    """Cases under valgrind, which knows no AVX-512."""
    tool = [
        "valgrind",
        "--quiet",
        "--error-exitcode=9",
        "--leak-check=full",
        "--show-leak-kinds=all",
        "--errors-for-leak-kinds=all",
    ]
    return [
        Case(f"codec {n}", tool + codec_command(bin_dir, n, p), needs) for n, p, needs in CODECS[: 2 if x86() else 1]
    ]


def cases_of(kind: str, bin_dir: Path, folder: Path) -> List[Case]:
    """All cases of a kind."""
    if kind == "asan":
        return asan_cases(bin_dir, folder)
    return tsan_cases(bin_dir, folder) if kind == "tsan" else valgrind_cases(bin_dir)


def run_case(kind: str, case: Case, folder: Path) -> Outcome:
    """Run one case."""
    missing = lacking(case.needs)
    if missing:
        return Outcome("skipped", f"this CPU lacks {', '.join(missing)}", 0)
    start = time.monotonic()
    reports = Path(tempfile.mkdtemp(dir=folder))
    env = environment(kind)
    if kind == "tsan":  # a server's own messages go elsewhere
        env["TSAN_OPTIONS"] += f":log_path={reports / 'report'}"
    try:
        done = subprocess.run(
            case.command,
            cwd=folder,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=case.timeout,
        )
        code, text = done.returncode, done.stdout
    except subprocess.TimeoutExpired as e:
        code, text = 124, f"still running after {case.timeout:.0f} s\n" + str(e.stdout or "")
    found = [p.read_text(errors="replace") for p in sorted(reports.glob("report*"))]
    seconds = time.monotonic() - start
    if code == SKIPPED and not found:
        return Outcome("skipped", text[-400:], seconds)
    faults = re.findall(r"^ +FAULT (.*)", text, re.MULTILINE)
    if code == 1 and case.forgiven and faults and all(re.match(case.forgiven, fault) for fault in faults):
        code = 0
    if code == 0 and case.proof and not re.search(case.proof, text):
        code, text = 1, f"{text}\nnothing says {case.proof!r}"
    if code != 0 or found:
        return Outcome(
            "failed",
            shlex.join(case.command) + f"\nexit code {code}\n" + text[-6000:] + "\n".join(found)[:20000],
            seconds,
        )
    return Outcome("passed", text[-400:], seconds)


def main() -> int:
    """Command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("kind", choices=["asan", "tsan", "valgrind", "fuzz"])
    p.add_argument("--only", default="", help="cases whose name begins with this")
    p.add_argument("--no-build", action="store_true", help="take what is built")
    a = p.parse_args()
    try:
        folder = {"valgrind": ROOT / "build", "tsan": ROOT / "build-tsan"}.get(a.kind, ROOT / "build-asan")
        bin_dir = folder / "bin" if a.no_build else build(a.kind)
    except (FileNotFoundError, subprocess.CalledProcessError) as e:
        print(f"{a.kind}: {e}", file=sys.stderr)
        return 1
    if a.kind == "fuzz":
        return 0
    failed = 0
    with tempfile.TemporaryDirectory(prefix="kvsplit-sanitizers-") as temporary:
        cases = [c for c in cases_of(a.kind, bin_dir, Path(temporary)) if c.name.startswith(a.only)]
        if not cases:
            p.error(f"--only: no case begins with {a.only!r}")
        for case in cases:
            res = run_case(a.kind, case, Path(temporary))
            failed += res.outcome == "failed"
            print(f"{a.kind} {res.outcome:<7} {res.seconds:7.1f} s  {case.name}", flush=True)
            if res.outcome != "passed":
                print(res.text, file=sys.stderr, flush=True)
    print(f"{a.kind}: {len(cases)} cases, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
