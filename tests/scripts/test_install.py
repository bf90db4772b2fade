# SPDX-License-Identifier: MIT
"""The installer's options and checks, on a copy of it: nothing is built here."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Dict, List

import pytest

REPO = Path(__file__).resolve().parents[2]
BASICS = "bash env pwd uname cat tail sed awk df ls mkdir date nproc head sh cut tr getconf".split()


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """What the installer needs of a clone, in a folder with a blank in its name."""
    root = tmp_path / "my clone"
    for folder in ("scripts", "vendor", "patches"):
        (root / folder).mkdir(parents=True)
    for name in ("scripts/install_kvsplit.sh", "scripts/patchq", "vendor/fetch.py"):
        shutil.copy2(REPO / name, root / name)
    return root


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A PATH of its own, with nothing on it but the plainest tools."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in BASICS:
        path = shutil.which(name)
        if path:
            (folder / name).symlink_to(path)
    return folder


def script(folder: Path, name: str, text: str) -> None:
    path = folder / name
    if path.exists() or path.is_symlink():
        path.unlink()
    path.write_text("#!/bin/sh\n" + text + "\n")
    path.chmod(0o755)


# A compiler that works: it writes the file that its last argument names.
COMPILER = 'for last; do :; done; echo x > "$last"'


def install(clone: Path, tools: Path, *args: str, **env: str) -> "subprocess.CompletedProcess[str]":
    full: Dict[str, str] = {"PATH": str(tools), "HOME": str(clone.parent), **env}
    return subprocess.run(
        [str(clone / "scripts" / "install_kvsplit.sh"), *args],
        cwd="/",
        env=full,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_syntax() -> None:
    for path in (REPO / "scripts" / "install_kvsplit.sh", REPO / ".ci" / "run"):
        done = subprocess.run(["bash", "-n", str(path)], stderr=subprocess.PIPE, text=True)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "args, word",
    [
        (["--bogus"], "--bogus"),
        (["--python", "conda"], "conda"),
        (["--python"], "--python"),
        (["--jobs", "0"], "--jobs"),
        (["--jobs=many"], "many"),
        (["--build-type", "Fast"], "Fast"),
        (["--demo", "--no-model"], "--no-model"),
        (["--demo", "--python=none"], "--python none"),
    ],
)
def test_usage(clone: Path, tools: Path, args: List[str], word: str) -> None:
    done = install(clone, tools, *args)
    assert done.returncode == 2
    assert word in done.stderr
    assert not (clone / "build").exists(), "nothing is made before the options are understood"


def test_help(clone: Path, tools: Path) -> None:
    done = install(clone, tools, "--help")
    assert done.returncode == 0
    for option in ("--python", "--build-type", "--jobs", "--with-cuda", "--no-model", "--demo"):
        assert option in done.stdout


def test_everything_missing_is_named_at_once(clone: Path, tools: Path) -> None:
    done = install(clone, tools, "--with-cuda")
    assert done.returncode == 3
    for word in ("C++ compiler", "git", "nvcc", "Python"):
        assert f"missing: {word}" in done.stdout or f"missing: a {word}" in done.stdout, done.stdout
    assert "sudo apt install" in done.stdout, "how to get it is said"
    assert sorted(p.name for p in clone.iterdir()) == ["build", "patches", "scripts", "vendor"]


def test_old_python(clone: Path, tools: Path) -> None:
    script(tools, "python3", 'case "$2" in *version_info*) exit 1 ;; *) echo 3.7.3 ;; esac')
    done = install(clone, tools)
    assert done.returncode == 3
    assert "Python 3.9 or newer (python3 is 3.7.3)" in done.stdout


@pytest.mark.parametrize("text", ["exit 1", "exit 0", "echo hello"])
def test_python_that_is_none(clone: Path, tools: Path, text: str) -> None:
    script(tools, "fake", text)
    done = install(clone, tools, PYTHON=str(tools / "fake"))
    assert done.returncode == 3
    assert f"missing: a Python that works: {tools / 'fake'} " in done.stdout
    assert "3.9 or newer" not in done.stdout, "its version is not what is wrong"
    assert "PYTHON" in done.stdout


@pytest.mark.parametrize("variable, name, what", [("CXX", "c++", "a C++ compiler"), ("CC", "cc", "a C compiler")])
@pytest.mark.parametrize("text", ["echo 'try.x: no such header' >&2; exit 1", "exit 0"])
def test_compiler_that_does_not_work(clone: Path, tools: Path, variable: str, name: str, what: str, text: str) -> None:
    for good in ("cc", "c++"):
        script(tools, good, COMPILER)
    assert f"missing: {what}" not in install(clone, tools).stdout
    script(tools, name, text)
    done = install(clone, tools)
    assert done.returncode == 3
    assert f"missing: {what} that works: {name} can't compile" in done.stdout
    assert "sudo apt install" in done.stdout
    if "header" in text:
        assert "it said: try.x: no such header" in done.stdout
    script(tools, "other", COMPILER)
    done = install(clone, tools, **{variable: "other -O2"})
    assert f"missing: {what}" not in done.stdout, "the named compiler counts, options and all"
    done = install(clone, tools, **{variable: "gone -O2"})
    assert done.returncode == 3
    assert f"missing: {what} that {variable} names (gone -O2)" in done.stdout


def test_the_real_compilers_pass(clone: Path) -> None:
    if not shutil.which("c++") or not shutil.which("cc"):
        pytest.skip("no c++ and cc on the PATH")
    done = install(clone, Path(os.environ["PATH"]), PYTHON="no-such-python")
    assert done.returncode == 3
    assert "missing: Python" in done.stdout and "compiler" not in done.stdout


@pytest.mark.parametrize("folder", ["/", "scripts"])
def test_empty_path(clone: Path, folder: str) -> None:
    bash = shutil.which("bash")
    assert bash
    path = clone / "scripts" / "install_kvsplit.sh"
    where = "/" if folder == "/" else str(path.parent)
    for args, code in (([], 3), (["--help"], 0)):
        done = subprocess.run(
            [bash, str(path) if folder == "/" else path.name, *args],
            cwd=where,
            env={"PATH": "/nonexistent"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert done.returncode == code, done.stderr
        assert "command not found" not in done.stderr
    done = subprocess.run([bash, str(path)], env={"PATH": "/nonexistent"}, stderr=subprocess.PIPE, text=True)
    assert "not found on the PATH: env uname" in done.stderr and "/nonexistent" in done.stderr
    assert not (clone / "build").exists()


def test_disk_space(clone: Path, tools: Path) -> None:
    script(tools, "df", 'echo "Filesystem 1024-blocks Used Available"; echo "x 9 9 102400 9 /"')
    done = install(clone, tools)
    assert done.returncode == 3
    assert "100 MiB are free" in done.stdout


def mac(tools: Path) -> None:
    script(tools, "uname", 'case "$1" in -s) echo Darwin ;; *) echo arm64 ;; esac')
    script(tools, "sysctl", 'case "$2" in hw.optional.arm64) echo 1 ;; *) echo 8 ;; esac')
    script(tools, "git", "exit 0")
    for name in ("cc", "c++"):
        script(tools, name, COMPILER)


def test_mac_without_command_line_tools(clone: Path, tools: Path) -> None:
    mac(tools)
    script(tools, "xcode-select", "exit 2")
    done = install(clone, tools)
    assert done.returncode == 3
    assert "Command Line Tools" in done.stdout and "xcode-select --install" in done.stdout


def test_mac_with_an_intel_python(clone: Path, tools: Path) -> None:
    mac(tools)
    script(tools, "xcode-select", "exit 0")
    script(tools, "python3", 'case "$2" in *platform.machine*) echo x86_64 ;; *python_version*) echo 3.11.7 ;; esac')
    done = install(clone, tools)
    assert done.returncode == 3
    assert "Python for arm64" in done.stdout and "Rosetta" in done.stdout
    assert "missing: Command Line Tools" not in done.stdout


def test_mac_notes_homebrew_clang(clone: Path, tools: Path) -> None:
    mac(tools)
    script(tools, "xcode-select", "exit 2")
    folder = tools.parent / "homebrew" / "bin"
    folder.mkdir(parents=True)
    script(folder, "clang", "exit 0")
    done = install(clone, tools, PATH=f"{folder}:{tools}")
    assert "note: clang is Homebrew's" in done.stdout


def test_failure_names_step_and_log(clone: Path, tools: Path) -> None:
    for name in ("git", "cmake", "ninja"):
        script(tools, name, 'echo "cmake version 3.30.0"')
    for name in ("cc", "c++"):
        script(tools, name, COMPILER)
    (clone / "vendor" / "llama_cpp.lock").write_text("broken\n")
    script(tools, "python3", f'exec "{os.path.realpath(sys.executable)}" "$@"')
    for _ in range(2):  # and it can be run again
        done = install(clone, tools, "--python", "none")
        assert done.returncode == 1
        assert "FAILED in step 2 of 4: Source" in done.stderr
        assert str(clone / "build" / "install.log") in done.stderr
        assert "llama_cpp.lock" in done.stderr, "the last lines of the log are shown"


def test_foreign_build_folder_is_left_alone(clone: Path, tools: Path) -> None:
    (clone / "build").mkdir()
    (clone / "build" / "mine.txt").write_text("mine")
    done = install(clone, tools)
    assert done.returncode == 3
    assert "move it away" in done.stderr
    assert [p.name for p in (clone / "build").iterdir()] == ["mine.txt"]


@pytest.mark.parametrize("generator, anew", [("Makefile", True), ("build.ninja", False)])
def test_after_a_build_that_was_killed_make_compiles_anew(
    clone: Path, tools: Path, tmp_path: Path, generator: str, anew: bool
) -> None:
    calls, up = tmp_path / "calls", tmp_path / "up"
    work = f'case "$1" in --build) echo "$*" >> "{calls}"; [ -f "{tmp_path}/hang" ] || exit 0; : > "{up}"; sleep 60 ;; '
    script(tools, "cmake", work + '--version) echo "cmake version 3.30.0" ;; esac')
    for name in ("git", "ninja"):
        script(tools, name, "exit 0")
    for name in ("cc", "c++"):
        script(tools, name, COMPILER)
    for name in ("sleep", "df"):
        path = shutil.which(name)
        if path and not (tools / name).exists():
            (tools / name).symlink_to(path)
    python = os.path.realpath(sys.executable)
    script(tools, "python3", f'case "$1" in *patchq) exit 0 ;; esac; exec "{python}" "$@"')
    (tmp_path / "hang").touch()
    command = [str(clone / "scripts" / "install_kvsplit.sh"), "--python", "none"]
    env = {"PATH": str(tools), "HOME": str(tmp_path)}
    with subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, start_new_session=True) as proc:
        end = time.monotonic() + 60
        while not up.exists():
            assert proc.poll() is None and time.monotonic() < end
            time.sleep(0.02)
        os.killpg(proc.pid, signal.SIGKILL)
    (clone / "build" / generator).touch()
    (tmp_path / "hang").unlink()
    for again in (anew, False):  # a build that ended well needs no other
        done = install(clone, tools, "--python", "none")
        assert done.returncode == 0, done.stderr
        assert ("--clean-first" in calls.read_text().splitlines()[-1]) == again
        assert ("the last build was killed" in done.stdout) == again


def test_nothing_is_deleted_by_the_script() -> None:
    text = (REPO / "scripts" / "install_kvsplit.sh").read_text()
    code = "\n".join(line.split("#")[0] for line in text.splitlines())
    for word in ("rm ", "rm\t", "git reset", "git clean", "git checkout", "read -p", "sudo -"):
        assert word not in code
