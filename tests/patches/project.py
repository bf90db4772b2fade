# SPDX-License-Identifier: MIT
"""A small made-up project: a source archive, its lock, a patch series, and the programs run on it."""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Dict, List, Optional

REPO = Path(__file__).resolve().parents[2]
FETCH = REPO / "vendor" / "fetch.py"
PATCHQ = REPO / "scripts" / "patchq"
TREE = "vendor/llama.cpp"
TOP = "made_up-1.0"

FILES = {
    f"{TREE}/src/a.cpp": "".join(f"line {i}\n" for i in range(40)),
    f"{TREE}/src/b.cpp": "int b;\n",
    f"{TREE}/.gitignore": "*.bin\n",
    f"{TREE}/tool.sh": "#!/bin/sh\n",
    "README.md": "made up\n",
}

HEADER = """{subject}

Why: because
Why-not-a-file: it is
  a call site
Hook: a.cpp
Drop-when: never
Test: tests/test_hook.py
Patch-Name: {name}
"""


def make_sdist(
    path: Path, files: Optional[Dict[str, str]] = None, top: str = TOP, extra: Optional[List[tarfile.TarInfo]] = None
) -> str:
    """Write a source archive and return its sha256."""
    with tarfile.open(path, "w:gz") as archive:
        for name, text in (FILES if files is None else files).items():
            data = text.encode()
            member = tarfile.TarInfo(f"{top}/{name}")
            member.size = len(data)
            member.mode = 0o755 if name.endswith(".sh") else 0o644
            archive.addfile(member, io.BytesIO(data))
        for member in extra or []:
            archive.addfile(member, io.BytesIO(b"x" * member.size))
    return hashlib.sha256(path.read_bytes()).hexdigest()


def run(*command: object, **env: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [str(c) for c in command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **env},
    )


class Project:
    """A project folder that fetch.py and patchq work on by --root."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.sdist = root / "made_up-1.0.tar.gz"
        self.cache = root / "cache"
        self.src = root / "vendor" / "src"
        self.tree = self.src / TREE
        self.patches = root / "patches"
        for folder in ("vendor", "patches", "tests"):
            (root / folder).mkdir()
        (root / "tests" / "test_hook.py").write_text("")
        (self.patches / "series").write_text("")
        (self.patches / "README.md").write_text(
            "# Patches\n<!-- index: written by scripts/patchq export -->\n<!-- end of index -->\nafter\n"
        )
        self.lock(make_sdist(self.sdist))

    def lock(self, sha256: str, version: str = "1.0") -> None:
        (self.root / "vendor" / "llama_cpp.lock").write_text(
            f"# pinned\nname = made-up\nversion = {version}\nfile = made_up-{version}.tar.gz\nsha256 = {sha256}\n"
        )

    def env(self, local: bool = True) -> Dict[str, str]:
        env = {"KVSPLIT_CACHE_DIR": str(self.cache), "KVSPLIT_LLAMA_CPP_SDIST": str(self.sdist) if local else ""}
        # No package index: whatever pip is asked for, it can't be had.
        env.update(PIP_NO_INDEX="1", PIP_FIND_LINKS="", PIP_CONFIG_FILE=os.devnull)
        return env

    def fetch(self, *args: object, local: bool = True) -> "subprocess.CompletedProcess[str]":
        return run(sys.executable, FETCH, "--root", self.root, *args, **self.env(local))

    def patchq(self, command: str, *args: object, **env: str) -> "subprocess.CompletedProcess[str]":
        return run(sys.executable, PATCHQ, command, "--root", self.root, *args, **{**self.env(), **env})

    def git(self, folder: Path, *args: object) -> str:
        done = run("git", "-C", folder, "-c", "user.name=someone", "-c", "user.email=s@localhost", *args)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def commit(self, folder: Path, name: str, subject: str = "kvcache: a hook") -> None:
        """Commit everything in a scratch repository under a patch's name."""
        self.git(folder, "add", "--all")
        self.git(folder, "commit", "--quiet", "-m", HEADER.format(subject=subject, name=name))

    def make_series(self) -> None:
        """Two patches: one that touches two files, one that touches the first file again and adds a new one."""
        folder = self.root / "vendor" / "edit"
        assert self.patchq("edit").returncode == 0
        a, b = folder / "src" / "a.cpp", folder / "src" / "b.cpp"
        a.write_text(a.read_text().replace("line 20\n", "line 20\nhook();\n"))
        b.write_text(b.read_text() + "hook();\n")
        self.commit(folder, "0601-kvcache-hook.patch")
        a.write_text(a.read_text().replace("hook();\n", "hook();\nmore();\n"))
        (folder / "src" / "new.cpp").write_text("int n;\n")
        self.commit(folder, "0702-arg-more.patch", "arg: more")
        done = self.patchq("export")
        assert done.returncode == 0, done.stderr


def snapshot(folder: Path) -> Dict[str, bytes]:
    """Every file under a folder with its bytes."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
