# SPDX-License-Identifier: MIT
"""Every prefix of the series stands by itself: it applies strictly, and what it touches compiles.

A full build of each prefix would take more than an hour. Compiling the touched sources, without making code, finds what
goes wrong in practice: a patch that uses what only a later one declares.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Dict, List

import pytest
from project import PATCHQ, REPO, run

pytestmark = pytest.mark.slow

SERIES = (REPO / "patches" / "series").read_text(encoding="utf-8").split()
TREE = REPO / "vendor" / "src" / "vendor" / "llama.cpp"
DATABASE = REPO / "build" / "compile_commands.json"


def missing(reason: str) -> None:
    """Skip, or fail where nothing may be missing."""
    if os.environ.get("KVSPLIT_REQUIRE", "") not in ("", "0"):
        pytest.fail(f"required by KVSPLIT_REQUIRE: {reason}", pytrace=False)
    pytest.skip(reason)


def touched(name: str) -> List[str]:
    """Files that a patch changes."""
    text = (REPO / "patches" / name).read_text(encoding="utf-8")
    return re.findall(r"^\+\+\+ b/(\S+)$", text, re.MULTILINE)


@pytest.fixture(scope="module")
def commands() -> Dict[str, List[str]]:
    """Compiler and flags of every source of the tree, as the build has them."""
    if not DATABASE.is_file():
        missing("there is no build/compile_commands.json: `make build` writes it")
    res: Dict[str, List[str]] = {}
    for entry in json.loads(DATABASE.read_text(encoding="utf-8")):
        words = shlex.split(entry["command"])
        if str(TREE) not in entry["command"]:
            continue
        start = max(i for i, w in enumerate(words) if re.search(r"(^|/)(cc|c\+\+|gcc|g\+\+|clang|clang\+\+)[^/]*$", w))
        words = [w for w in words[start : words.index("-o")] if not re.match(r"-O\d|-W", w)]
        path = Path(entry["file"])
        try:
            res[str(path.relative_to(TREE))] = words
        except ValueError:
            # a batch of joined sources: their flags are those of the library's other sources
            if path.name.startswith("unity_"):
                res.setdefault("src/models/", words)
    return res


def sources(name: str) -> List[str]:
    """Sources to compile for a patch: those it changes, and those beside the headers it changes."""
    res = []
    for path in touched(name):
        if path.endswith((".h", ".hpp")):
            path = {"ggml/include/ggml.h": "ggml/src/ggml.c"}.get(path, re.sub(r"\.h(pp)?$", ".cpp", path))
        # lists for CMake, and Objective-C that needs a Mac: tests/metal reads and builds from both
        if path not in res and not path.endswith(("CMakeLists.txt", ".m")):
            res.append(path)
    return res


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source as upstream made it; the tests below apply one patch after another to it."""
    folder = tmp_path_factory.mktemp("prefixes") / "tree"
    done = run(sys.executable, PATCHQ, "pristine", "--dir", folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_prefixes(tree: Path, commands: Dict[str, List[str]]) -> None:
    env = {"GIT_CEILING_DIRECTORIES": str(tree.parent), "GIT_CONFIG_NOSYSTEM": "1"}
    compiled = 0
    for n, name in enumerate(SERIES, 1):
        # from a folder that is no repository, git apply takes no fuzz and no offset it isn't told of
        done = subprocess.run(
            ["git", "apply", "-p1", "--verbose", str(REPO / "patches" / name)],
            cwd=tree,
            env={**os.environ, **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"prefix {n}, {name}:\n{done.stdout}"
        assert "offset" not in done.stdout, f"prefix {n}, {name}:\n{done.stdout}"
        for source in sources(name):
            assert (tree / source).is_file(), f"{name}: no source for {source}"
            flags = commands.get(source) or commands.get(str(Path(source).parent) + "/")
            if not flags and "/ggml-metal/" in source and os.environ.get("KVSPLIT_REQUIRE", "") in ("", "0"):
                continue  # no clang for the emulated device, so nothing compiles Metal's host code here
            assert flags, f"{name}: the build has no command for {source}"
            command = [w.replace(str(TREE), str(tree)) for w in flags]
            done = subprocess.run(
                [*command, "-w", "-fsyntax-only", str(tree / source)],
                cwd=DATABASE.parent,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
            )
            assert done.returncode == 0, f"prefix {n}, {name}: {source} does not compile:\n{done.stdout[:4000]}"
            compiled += 1
    assert compiled >= len(SERIES)
