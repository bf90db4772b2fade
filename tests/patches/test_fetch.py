# SPDX-License-Identifier: MIT
"""The fetch step on made-up archives: hash, cache, offline, unsafe archives."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from types import ModuleType

import pytest
from project import FETCH, FILES, TREE, Project, make_sdist, run, snapshot


def load_fetch() -> ModuleType:
    spec = importlib.util.spec_from_file_location("kvsplit_fetch", FETCH)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["kvsplit_fetch"] = module
    spec.loader.exec_module(module)
    return module


def test_local_archive_is_unpacked(project: Project) -> None:
    done = project.fetch()
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(project.src)
    assert (project.tree / "src" / "b.cpp").read_text() == "int b;\n"
    assert os.access(project.tree / "tool.sh", os.X_OK)
    assert not project.cache.exists(), "a local archive needs no cache"


def test_second_run_changes_nothing(project: Project) -> None:
    project.fetch()
    before = {p: p.stat().st_mtime_ns for p in project.src.rglob("*")}
    project.sdist.unlink()  # not even read
    assert project.fetch().returncode == 0
    assert {p: p.stat().st_mtime_ns for p in project.src.rglob("*")} == before


def test_wrong_hash_unpacks_nothing(project: Project) -> None:
    project.lock("0" * 64)
    done = project.fetch()
    assert done.returncode == 2
    assert "wrong sha256" in done.stderr and "0" * 64 in done.stderr
    assert not project.src.exists()
    assert [p.name for p in (project.root / "vendor").iterdir()] == ["llama_cpp.lock"]


def test_wrong_hash_leaves_an_older_tree_alone(project: Project) -> None:
    project.fetch()
    before = snapshot(project.src)
    project.lock("0" * 64)
    assert project.fetch().returncode == 2
    assert snapshot(project.src) == before


@pytest.mark.parametrize(
    "text",
    [
        "name = a\n",
        "name = a\nversion = 1\nfile = ../a\nsha256 = " + "0" * 64,
        "name = a\nversion = 1\nfile = a\nsha256 = XYZ",
        "name = a\nname = b\n",
        "hello\n",
    ],
)
def test_malformed_lock(project: Project, text: str) -> None:
    (project.root / "vendor" / "llama_cpp.lock").write_text(text)
    done = project.fetch()
    assert done.returncode == 2
    assert "llama_cpp.lock" in done.stderr and "Traceback" not in done.stderr


def test_missing_local_archive(project: Project) -> None:
    project.sdist.unlink()
    done = project.fetch()
    assert done.returncode == 2
    assert "KVSPLIT_LLAMA_CPP_SDIST" in done.stderr and "no such file" in done.stderr


def test_offline_and_not_cached(project: Project) -> None:
    done = project.fetch(local=False)
    assert done.returncode == 2
    assert "offline and not cached" in done.stderr
    assert "KVSPLIT_LLAMA_CPP_SDIST" in done.stderr, "the way out is named"
    assert not project.src.exists()
    left = [p.name for p in (project.cache / "sdist").iterdir() if p.name != ".lock"]
    assert left == [], "an interrupted download leaves nothing half"


def test_offline_once_cached(project: Project) -> None:
    folder = project.cache / "sdist"
    folder.mkdir(parents=True)
    project.sdist.rename(folder / project.sdist.name)
    done = project.fetch(local=False)
    assert done.returncode == 0, done.stderr
    assert project.tree.is_dir()


def test_damaged_cache_is_not_used(project: Project) -> None:
    folder = project.cache / "sdist"
    folder.mkdir(parents=True)
    (folder / project.sdist.name).write_bytes(project.sdist.read_bytes()[:-1])
    done = project.fetch(local=False)
    assert done.returncode == 2
    assert "damaged" in done.stderr
    assert not project.src.exists()


def test_unwritable_cache(project: Project) -> None:
    project.cache.write_text("a file where the folder should be")
    done = project.fetch(local=False)
    assert done.returncode == 2
    assert "KVSPLIT_CACHE_DIR" in done.stderr and "Traceback" not in done.stderr


def test_read_only_cache(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    # The owner may be root, whom no mode stops: the error is made where the system would make it.
    fetch = load_fetch()

    def refuse(*_args: object, **_kw: object) -> str:
        raise PermissionError(30, "Read-only file system")

    monkeypatch.setattr(fetch.tempfile, "mkdtemp", refuse)
    monkeypatch.setenv("KVSPLIT_CACHE_DIR", str(project.cache))
    monkeypatch.delenv("KVSPLIT_LLAMA_CPP_SDIST", raising=False)
    with pytest.raises(fetch.SourceError, match="Read-only file system(.|\n)*KVSPLIT_CACHE_DIR"):
        fetch.ensure_sdist(fetch.load_lock(project.root))


def test_pip_gets_it_by_name_version_and_hash(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    fetch = load_fetch()
    log = project.root / "asked"
    pip = project.root / "pip"
    pip.write_text(
        f"#!{sys.executable}\n"
        "import shutil, sys\n"
        "a = sys.argv\n"
        f"open({str(log)!r}, 'w').write(' '.join(a[1:]) + '|' + open(a[a.index('-r') + 1]).read())\n"
        f"shutil.copy({str(project.sdist)!r}, a[a.index('--dest') + 1])\n"
    )
    pip.chmod(0o755)
    monkeypatch.setattr(fetch, "pip_command", lambda: [str(pip)])
    monkeypatch.setattr(sys, "stderr", sys.__stderr__)  # its file number is what pip writes to
    monkeypatch.setenv("KVSPLIT_CACHE_DIR", str(project.cache))
    monkeypatch.delenv("KVSPLIT_LLAMA_CPP_SDIST", raising=False)
    lock = fetch.load_lock(project.root)
    path = fetch.ensure_sdist(lock)
    assert path == project.cache / "sdist" / lock.file
    command, _, requirements = log.read_text().partition("|")
    assert requirements == f"made-up==1.0 --hash=sha256:{lock.sha256}\n"
    for option in ("--require-hashes", "--no-deps", "--no-binary made-up"):
        assert option in command
    assert sorted(p.name for p in path.parent.iterdir()) == [".lock", lock.file]


def test_other_version_replaces_a_clean_tree(project: Project) -> None:
    project.fetch()
    new = make_sdist(project.sdist, {f"{TREE}/src/b.cpp": "int c;\n"}, "made_up-1.1")
    project.lock(new, "1.1")
    assert project.fetch().returncode == 0
    assert [p for p in snapshot(project.src) if not p.startswith(".kvsplit")] == [f"{TREE}/src/b.cpp"]


@pytest.mark.parametrize("name", ["src/a.cpp", "src/mine.cpp"])
def test_other_version_does_not_replace_hand_edits(project: Project, name: str) -> None:
    project.fetch()
    (project.tree / name).write_text("mine\n")
    project.lock(make_sdist(project.sdist, {f"{TREE}/src/b.cpp": "int c;\n"}, "made_up-1.1"), "1.1")
    before = snapshot(project.src)
    done = project.fetch()
    assert done.returncode == 4
    assert f"{TREE}/{name}" in done.stderr
    assert snapshot(project.src) == before


@pytest.mark.parametrize("name", ["made_up-1.0/../../evil", "/evil", "made_up-1.0/../evil", "other/evil"])
def test_path_that_escapes(project: Project, name: str) -> None:
    member = tarfile.TarInfo(name)
    member.size = 1
    project.lock(make_sdist(project.sdist, extra=[member]))
    done = project.fetch()
    assert done.returncode == 2
    assert "in the archive" in done.stderr
    assert not project.src.exists()
    assert not list(project.root.rglob("evil")) and not Path("/evil").exists()


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE])
def test_link_in_the_archive(project: Project, kind: bytes) -> None:
    member = tarfile.TarInfo("made_up-1.0/link")
    member.type = kind
    member.linkname = "/etc/passwd"
    project.lock(make_sdist(project.sdist, extra=[member]))
    assert project.fetch().returncode == 2
    assert not project.src.exists()


def test_truncated_archive(project: Project) -> None:
    data = project.sdist.read_bytes()[: project.sdist.stat().st_size // 2]
    project.sdist.write_bytes(data)
    project.lock(hashlib.sha256(data).hexdigest())
    done = project.fetch()
    assert done.returncode == 2
    assert "not a usable source archive" in done.stderr
    assert not project.src.exists()


def test_two_at_once(project: Project) -> None:
    env = {**os.environ, **project.env()}
    command = [sys.executable, str(FETCH), "--root", str(project.root)]
    runs = [subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(4)]
    for r in runs:
        _, err = r.communicate(timeout=60)
        assert r.returncode == 0, err
    assert (project.tree / "src" / "a.cpp").is_file()
    assert not list((project.root / "vendor").glob(".unpack-*"))


def test_leftovers_of_a_killed_run_are_removed(project: Project) -> None:
    stale, mine = project.root / "vendor" / ".unpack-abcd_123", project.root / "vendor" / ".unpack-mine"
    for unpacked in (False, True):
        for folder in (stale, mine):
            (folder / "src").mkdir(parents=True, exist_ok=True)
        assert project.src.exists() == unpacked
        assert project.fetch().returncode == 0
        assert not stale.exists() and (mine / "src").is_dir()


def test_manifest_covers_every_file(project: Project) -> None:
    project.fetch()
    files = json.loads((project.src / ".kvsplit-files").read_text())["files"]
    assert sorted(files) == sorted(FILES)
    for name, (size, mtime, digest) in files.items():
        path = project.src / name
        assert [path.stat().st_size, path.stat().st_mtime_ns] == [size, mtime]
        assert hashlib.sha256(path.read_bytes()).hexdigest() == digest


def test_usage_exit_code() -> None:
    assert run(sys.executable, FETCH, "--no-such-option").returncode == 1
    assert run(sys.executable, FETCH, "--help").returncode == 0
