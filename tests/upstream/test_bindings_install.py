# SPDX-License-Identifier: MIT
"""llama-cpp-python is installed as pure Python: nothing native of its own, and no compiler runs."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
NATIVE = (".so", ".dylib", ".dll", ".a", ".o", ".metallib")


def native_files(names: list) -> list:
    return [str(n) for n in names if str(n).endswith(NATIVE) or ".so." in str(n)]


def test_installed_bindings_have_no_library_of_their_own() -> None:
    distribution = importlib.metadata.distribution("llama-cpp-python")
    files = distribution.files
    assert files, "its record of files is empty"
    assert any(str(f) == "llama_cpp/llama_cpp.py" for f in files)
    assert native_files(files) == []


def test_no_compiler_runs(tmp_path: Path) -> None:
    """Build its wheel with a compiler that keeps a list of the files it compiles."""
    archive = subprocess.run(
        [sys.executable, str(REPO / "vendor" / "fetch.py"), "--sdist-only"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout.strip()
    log = tmp_path / "compiled"
    log.write_text("")
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, variable in (("cc", "CC"), ("c++", "CXX")):
        real = os.environ.get(variable) or shutil.which(name)
        if not real:
            pytest.skip(f"no {name} here")
        wrapper = folder / name
        wrapper.write_text(f'#!/bin/sh\nfor a; do printf "%s\\n" "$a" >> "{log}"; done\nexec "{real}" "$@"\n')
        wrapper.chmod(0o755)
    env = dict(os.environ)
    env.update(
        CC=str(folder / "cc"),
        CXX=str(folder / "c++"),
        CMAKE_ARGS="-DLLAMA_BUILD=OFF -DLLAVA_BUILD=OFF",
        PATH=str(Path(sys.executable).parent) + os.pathsep + os.environ["PATH"],
    )
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-cache-dir"]
    done = subprocess.run(
        command + ["--wheel-dir", str(tmp_path), archive],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    # CMake tries the compilers on files of its own; nothing of the package may be among them.
    arguments = log.read_text().splitlines()
    assert arguments, "CMake did not use the wrapped compilers: this test shows nothing"
    sources = [a for a in arguments if a.endswith((".c", ".cc", ".cpp", ".m", ".cu"))]
    assert [s for s in sources if "vendor" in s or "llama" in Path(s).name or "ggml" in Path(s).name] == []
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as z:
        assert native_files(z.namelist()) == []
