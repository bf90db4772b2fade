#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Make or update the virtual environment of a clone: requirements, build tools, llama-cpp-python.

Usage: python3 scripts/setup_venv.py [--venv DIR] [--dev] [--system]

llama-cpp-python is installed from the pinned source archive as pure Python: our build gives the libraries.
cmake and ninja come from the package index if the system's are missing or too old.
A second run with nothing changed does nothing. --system uses the running Python instead of a new environment.

Exit codes: 0 done, 1 usage, 2 something could not be installed.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import List, Optional, Tuple

ROOT = Path(__file__).resolve().parent.parent
MIN_CMAKE = (3, 21)
BINDINGS = "llama-cpp-python"

sys.dont_write_bytecode = True
sys.path.insert(0, str(ROOT / "vendor"))

import fetch  # noqa: E402


def requirements(key: str) -> List[str]:
    """A list of requirements in pyproject.toml, by its key."""
    # No TOML reader before Python 3.11; the file is ours and its lists have one string a line.
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    found = re.search(rf"^{key} = \[\n(.*?)^\]", text, re.M | re.S)
    if not found:
        raise fetch.SourceError(f"pyproject.toml: no list {key}")
    return re.findall(r'^\s+"([^"]+)"', found.group(1), re.M)


def version_of(program: str) -> Optional[Tuple[int, ...]]:
    """Version of a program on the PATH; None if it isn't there or doesn't run."""
    path = shutil.which(program)
    if not path:
        return None
    try:
        text = subprocess.run([path, "--version"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True).stdout
    except OSError:
        return None
    found = re.search(r"(\d+)\.(\d+)", text)
    return (int(found.group(1)), int(found.group(2))) if found else None


def run(command: List[str], **env: str) -> None:
    print("+ " + " ".join(command), file=sys.stderr, flush=True)
    done = subprocess.run(command, env={**os.environ, **env}, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        raise fetch.SourceError(f"failed: {' '.join(command)}")


def bindings_version(python: str) -> str:
    code = f"import importlib.metadata as m; print(m.version('{BINDINGS}'))"
    done = subprocess.run([python, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return done.stdout.strip()


def install(python: str, dev: bool) -> None:
    """Install everything that the clone needs into an environment."""
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    wanted = [r for r in requirements("dependencies") if not r.startswith(BINDINGS)]
    if dev:
        wanted += requirements("dev")
    wanted.append("scikit-build-core>=0.10")
    cmake = version_of("cmake")
    if cmake is None or cmake < MIN_CMAKE:
        wanted.append("cmake>=" + ".".join(map(str, MIN_CMAKE)))
    if version_of("ninja") is None:
        wanted.append("ninja")
    # what llama-cpp-python itself needs
    wanted += ["typing-extensions>=4.5", "diskcache>=5.6", "jinja2>=2.11"]
    run(pip + wanted)
    lock = fetch.load_lock(ROOT)
    if bindings_version(python) != lock.version:
        archive = fetch.ensure_sdist(lock)
        folder = str(Path(python).parent)
        run(
            pip + ["--no-deps", "--no-build-isolation", str(archive)],
            CMAKE_ARGS="-DLLAMA_BUILD=OFF -DLLAVA_BUILD=OFF",
            PATH=folder + os.pathsep + os.environ.get("PATH", ""),
        )


def main(argv: Optional[List[str]] = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="its folder (default: .venv)")
    parser.add_argument("--dev", action="store_true", help="also what the tests and checks need")
    parser.add_argument("--system", action="store_true", help="install into the running Python")
    try:
        args = parser.parse_args(argv)
    except SystemExit as e:
        return 1 if e.code else 0
    try:
        if args.system:
            install(sys.executable, args.dev)
            return 0
        venv = args.venv.resolve()
        python = venv / "bin" / "python"
        stamp = venv / ".kvsplit-stamp"
        h = hashlib.sha256(f"{sys.version} {args.dev}".encode())
        for path in ("pyproject.toml", "vendor/llama_cpp.lock", "scripts/setup_venv.py"):
            h.update((ROOT / path).read_bytes())
        if python.exists() and stamp.is_file() and stamp.read_text() == h.hexdigest():
            return 0
        if not python.exists():
            if venv.exists() and any(venv.iterdir()):
                raise fetch.SourceError(f"{venv} exists and is no virtual environment: move it away, or use --venv")
            run([sys.executable, "-m", "venv", str(venv)])
        install(str(python), args.dev)
        stamp.write_text(h.hexdigest())
    except (fetch.SourceError, OSError) as e:
        fetch.note(f"error: {e}")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
