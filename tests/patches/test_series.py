# SPDX-License-Identifier: MIT
"""The real lock, source and patch series."""

from __future__ import annotations

import hashlib
import re
import sys
from pathlib import Path
from typing import Dict

import pytest
from project import FETCH, PATCHQ, REPO, run, snapshot


@pytest.fixture(scope="module")
def source() -> Path:
    done = run(sys.executable, FETCH)
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())


def lock() -> Dict[str, str]:
    text = (REPO / "vendor" / "llama_cpp.lock").read_text()
    return dict(re.findall(r"^(\w+) = (\S+)$", text, re.M))


def test_lock_hash(source: Path) -> None:
    done = run(sys.executable, FETCH, "--sdist-only")
    assert done.returncode == 0, done.stderr
    assert hashlib.sha256(Path(done.stdout.strip()).read_bytes()).hexdigest() == lock()["sha256"]


def test_python_bindings_are_pinned_to_the_same_release() -> None:
    pyproject = REPO / "pyproject.toml"
    assert f"llama-cpp-python=={lock()['version']}" in pyproject.read_text()


def test_series_is_whole_and_small(source: Path) -> None:
    # Names, headers, tests named, index, strict application, round trip, number of added lines.
    done = run(sys.executable, PATCHQ, "verify")
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    added = re.search(r"added +(\d+) lines of at most (\d+)", done.stdout)
    assert added and int(added.group(1)) <= int(added.group(2)) <= 500


def test_ids_of_types_are_apart_from_upstreams(tmp_path: Path, source: Path) -> None:
    """A release that enters our block of ids, which saved sessions store, must not be moved to."""
    done = run(sys.executable, PATCHQ, "pristine", "--dir", tmp_path / "pristine")
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "pristine" / "ggml" / "include" / "ggml.h").read_text()
    enum = text[text.index("enum ggml_type {") :].split("};")[0]
    ids = {k: int(v) for k, v in re.findall(r"(GGML_TYPE_\w+)\s*=\s*(\d+)", enum)}
    formats = (REPO / "ggml-ext" / "kvq-formats.h").read_text()
    first, count = (
        int(re.search(rf"#define {name} +(\d+)", formats)[1])  # type: ignore[index]
        for name in ("KVQ_ID_FIRST", "KVQ_UPSTREAM_TYPE_COUNT")
    )
    assert ids["GGML_TYPE_COUNT"] == count and max(ids.values()) < first


def test_index_has_every_patch() -> None:
    series = (REPO / "patches" / "series").read_text().split()
    files = sorted(p.name for p in (REPO / "patches").glob("*.patch"))
    index = (REPO / "patches" / "README.md").read_text()
    rows = re.findall(r"^\|[^|]*\| `(\S+\.patch)` \|", index, re.M)
    assert sorted(series) == files
    assert rows == series


def test_exit_codes_are_documented_alike() -> None:
    in_help = re.findall(r"^  (\d)  ", run(sys.executable, PATCHQ, "--help").stdout, re.M)
    table = (REPO / "patches" / "README.md").read_text().split("| Exit code |")[1].split("\n\n")[0]
    assert re.findall(r"^\| (\d) \|", table, re.M) == in_help


def test_round_trip_through_a_whole_tree(source: Path, tmp_path: Path) -> None:
    # On a copy of the project's small parts, so that nothing of the real one is written.
    root = tmp_path / "copy"
    (root / "vendor").mkdir(parents=True)
    for name in ("patches", "tests"):
        (root / name).mkdir()
    for path in (REPO / "patches").iterdir():
        (root / "patches" / path.name).write_bytes(path.read_bytes())
    (root / "vendor" / "llama_cpp.lock").write_bytes((REPO / "vendor" / "llama_cpp.lock").read_bytes())
    before = snapshot(root / "patches")
    for command in ("apply", "edit", "export"):
        done = run(sys.executable, PATCHQ, command, "--root", root)
        assert done.returncode == 0, done.stderr
    assert snapshot(root / "patches") == before


def test_source_is_not_committed() -> None:
    done = run("git", "-C", REPO, "ls-files", "vendor")
    if done.returncode != 0:
        pytest.skip("not a git checkout")
    assert set(done.stdout.split()) == {"vendor/fetch.py", "vendor/llama_cpp.lock"}
