# SPDX-License-Identifier: MIT
"""Libraries that are stale, foreign, broken or out of reach: an error says which, why, and the way out."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Callable, Iterator, List

import made_up_library as made_up
import pytest

from kvsplit import _lock, native
from kvsplit.cache_types import CACHE_TYPES
from kvsplit.errors import NativeError, NativeMismatchError, NativeMissingError

elf = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other loaders say it themselves")

Copy = Callable[[str], Path]


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    """Copy the real libraries into a folder below tmp_path, and give the path of libllama there."""

    def make(name: str) -> Path:
        folder = tmp_path / name
        folder.mkdir(parents=True)
        source = native.library_path().resolve()
        for part in [source, *source.parent.glob("libggml*")]:
            shutil.copy(part, folder / part.name)
        return folder / source.name

    return make


@pytest.fixture
def as_nobody() -> Iterator[None]:
    """Without root's rights, for which no folder is closed."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def python(code: str, *args: Any, path: Path = native.PACKAGE.parent, **env: Any) -> str:
    """What a Python process prints, with only these settings of ours; it ends well."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("KVSPLIT_", "LLAMA_CPP_", "LD_LIBRARY"))}
    res = subprocess.run(
        [sys.executable, "-c", code, *map(str, args)],
        capture_output=True,
        text=True,
        env={**clean, "PYTHONPATH": str(path), **{k: str(v) for k, v in env.items()}},
        timeout=120,
        check=False,
    )
    assert res.returncode == 0, f"{res.returncode}\n{res.stdout}\n{res.stderr}"
    return res.stdout


#: Prints the files that are used, or the error's kind and text.
LOAD = """
import sys
from kvsplit import errors, native
try:
    print(*native.load().files(), sep="\\n")
except errors.NativeError as e:
    print(type(e).__name__, e)
"""


# ---- files


@elf
@pytest.mark.native
def test_a_truncated_library_is_refused_before_it_kills_the_process(copy: Copy) -> None:
    path = copy("cut")
    size = path.stat().st_size
    os.truncate(path, size - 1)
    with pytest.raises(NativeMissingError, match=rf"{re.escape(str(path))} is truncated: it has {size - 1} of {size}"):
        native.Native(path)


@elf
@pytest.mark.native
def test_a_truncated_library_of_ggml_is_refused(copy: Copy) -> None:
    path = copy("cut")
    part = path.parent / "libggml-base.so"
    os.truncate(part, part.stat().st_size // 2)
    with pytest.raises(NativeMissingError, match=rf"{re.escape(str(part))} is truncated.*build it again"):
        native.Native(path)


@elf
@pytest.mark.native
def test_the_real_libraries_pass(copy: Copy) -> None:
    native.check_files(copy("whole"))
    native.check_files(native.library_path())


@elf
@pytest.mark.parametrize(("content", "why"), [(b"", "is empty"), (b"#!/bin/sh\n" * 99, "is no shared library"),
                                              (b"\x7fELF", "is no shared library")])  # fmt: skip
def test_a_file_that_is_no_library_is_refused(tmp_path: Path, content: bytes, why: str) -> None:
    (tmp_path / "libllama.so").write_bytes(content)
    with pytest.raises(NativeMissingError, match=f"libllama.so {why}"):
        native.Native(tmp_path / "libllama.so")


@elf
@pytest.mark.parametrize(("at", "value", "why"), [(18, 183 if os.uname().machine != "aarch64" else 62, "is built for"),
                                                  (4, 1, "with 32 bits, this Python")])  # fmt: skip
def test_a_library_for_another_machine_is_refused(tmp_path: Path, at: int, value: int, why: str) -> None:
    path = made_up.only_build(tmp_path)
    data = bytearray(path.read_bytes())
    data[at] = value
    path.write_bytes(data)
    with pytest.raises(NativeMissingError, match=why):
        native.Native(path)


@elf
def test_a_library_of_a_cross_compiler_is_refused(tmp_path: Path) -> None:
    cc = shutil.which("aarch64-linux-gnu-gcc")
    if cc is None or os.uname().machine == "aarch64":
        pytest.skip("no compiler for another machine")
    path = tmp_path / "libllama.so"
    subprocess.run([cc, "-shared", "-nostdlib", "-x", "c", "-", "-o", str(path)], input=b"int x;", check=True)
    with pytest.raises(NativeMissingError, match="is built for AArch64 with 64 bits, this Python for"):
        native.Native(path)


@elf
def test_headers_that_lie_are_no_crash(tmp_path: Path) -> None:
    good = made_up.only_build(tmp_path / "good").read_bytes()
    path = tmp_path / "libllama.so"
    for at in range(64):
        data = bytearray(good)
        data[at] ^= 0xFF
        path.write_bytes(data)
        native._elf(path)  # whatever it says
    for size in range(0, 4096, 7):
        path.write_bytes(good[:size])
        found = native._elf(path)
        assert found is None or found[3] > found[4] == size


@elf
def test_a_closed_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: Any) -> None:
    folder = tmp_path / "closed"
    made_up.only_build(folder)
    folder.chmod(0)
    monkeypatch.setenv("KVSPLIT_NATIVE_DIR", str(folder))
    monkeypatch.delenv("LLAMA_CPP_LIB_PATH", raising=False)
    request.getfixturevalue("as_nobody")
    with pytest.raises(NativeMissingError, match=r"closed.* can't be looked into: Permission denied; make it readable"):
        native.locate()


@elf
def test_a_closed_file_is_named(tmp_path: Path, request: Any) -> None:
    path = made_up.only_build(tmp_path)
    path.chmod(0)
    request.getfixturevalue("as_nobody")
    with pytest.raises(NativeMissingError, match=f"{re.escape(str(path))} can't be read: Permission denied"):
        native.check_files(path)


# ---- whose library


def test_a_library_without_patches_is_refused_with_the_way_out(tmp_path: Path) -> None:
    made_up.compile_c("int llama_x;", tmp_path / made_up.NAME)
    for variable in ("LLAMA_CPP_LIB_PATH", "KVSPLIT_NATIVE_DIR"):
        said = python(LOAD, **{variable: tmp_path})
        assert said.startswith("NativeMismatchError") and "without this project's patches" in said
        assert str(tmp_path) in said and str(native.PACKAGE) in said and f"unset {variable}" in said


def test_a_library_of_another_release_is_refused_by_both_names(tmp_path: Path) -> None:
    path = made_up.only_build(tmp_path, f"0.1.2 {'a' * 64} {'b' * 64}")
    with pytest.raises(NativeMismatchError) as e:
        native.Native(path)
    for part in (str(path), "0.1.2", "a" * 64, str(native.PACKAGE), _lock.VERSION, _lock.SHA256):
        assert part in str(e.value)


def test_a_library_of_the_same_release_with_another_archive_is_refused(tmp_path: Path) -> None:
    path = made_up.only_build(tmp_path, f"{_lock.VERSION} {'a' * 64} {'b' * 64}")
    with pytest.raises(NativeMismatchError, match="a" * 64):
        native.Native(path)


def test_a_library_of_other_patches_is_refused_by_both_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = made_up.whole(tmp_path)
    monkeypatch.setattr(native, "expected_patches", lambda: "7" * 64)
    with pytest.raises(
        NativeMismatchError,
        match=rf"{re.escape(str(path))}.*{made_up.PATCHES}.*{re.escape(str(native.PACKAGE))}.*7{{64}}",
    ):
        native.Native(path)


def test_a_library_that_lacks_functions_is_refused(tmp_path: Path) -> None:
    path = made_up.only_build(tmp_path)
    with pytest.raises(NativeMismatchError, match=r"another version of this project.*kvq_\w+"):
        native.Native(path)
    for build in ("", "x"):
        with pytest.raises(NativeMismatchError, match="was built from"):
            native.Native(made_up.only_build(tmp_path / f"b{build}", build))


def test_a_made_up_library_with_everything_is_taken(tmp_path: Path) -> None:
    lib = native.Native(made_up.whole(tmp_path))
    assert [t.ggml_id for t in CACHE_TYPES] == lib.cache_types() and lib.system_info() == "MADE_UP = 1"


@pytest.mark.parametrize("what", ["name", "id", "bytes", "block", "missing"])
def test_a_library_with_another_table_of_types_is_refused(tmp_path: Path, what: str) -> None:
    types: List[Any] = [[t.ggml_id, t.name, t.block, t.bytes] for t in CACHE_TYPES]
    at = [t.name for t in CACHE_TYPES].index("kvq4")
    if what == "missing":
        del types[at]
    else:
        i = ["id", "name", "block", "bytes"].index(what)
        types[at][i] = "kvq4x" if what == "name" else types[at][i] + 1
    path = made_up.whole(tmp_path, types=types)
    with pytest.raises(NativeMismatchError, match="kvq4") as e:
        native.Native(path)
    assert str(path) in str(e.value) and str(native.PACKAGE) in str(e.value)


# ---- parts of another build


@pytest.mark.native
def test_ggml_of_another_folder_that_is_loaded_already_is_refused(copy: Copy) -> None:
    mine, other = copy("mine"), copy("other").parent / "libggml-base.so"
    if not other.is_file():
        pytest.skip("other loaders go by path, not by name")
    said = python(f"import ctypes; ctypes.CDLL({str(other)!r})\n{LOAD}", KVSPLIT_NATIVE_DIR=mine.parent)
    assert said.startswith("NativeMismatchError"), said
    assert str(mine) in said and str(other) in said and "import kvsplit before" in said


@elf
@pytest.mark.native
def test_ggml_of_another_build_on_the_search_path_is_never_used(copy: Copy, tmp_path: Path) -> None:
    """Either the loader looks beside libllama first, or it is said."""
    mine, other = copy("mine"), copy("other").parent
    stub = made_up.compile_c("int x;", tmp_path / "stub" / "libggml-base.so", "-Wl,-soname,libggml-base.so").parent
    for folder in (other, stub):
        said = python(LOAD, KVSPLIT_NATIVE_DIR=mine.parent, LD_LIBRARY_PATH=folder)
        if said.startswith("NativeMismatchError"):
            assert str(folder / "libggml-base.so") in said and "unset LD_LIBRARY_PATH" in said
        else:
            assert {str(Path(f).parent) for f in said.split("\n") if f} == {str(mine.parent)}, said


@elf
@pytest.mark.native
def test_a_folder_with_libraries_of_two_builds_is_refused(copy: Copy) -> None:
    path = copy("mixed")
    made_up.compile_c("int x;", path.parent / "libggml-base.so", "-Wl,-soname,libggml-base.so")
    said = python(LOAD, KVSPLIT_NATIVE_DIR=path.parent)
    assert said.startswith("NativeMismatchError") and str(path) in said, said
    assert "libraries of different builds" in said and "build it again" in said


@pytest.mark.native
def test_llama_cpp_that_was_imported_with_other_libraries_is_refused(copy: Copy) -> None:
    mine, other = copy("mine"), copy("other")
    code = f"""
import os
os.environ["LLAMA_CPP_LIB_PATH"] = {str(other.parent)!r}
import llama_cpp
del os.environ["LLAMA_CPP_LIB_PATH"]
{LOAD}"""
    said = python(code, KVSPLIT_NATIVE_DIR=mine.parent)
    assert said.startswith("NativeMismatchError") and "import kvsplit first" in said
    assert str(mine) in said and str(other) in said


@pytest.mark.native
def test_llama_cpp_that_is_imported_with_other_libraries_later_is_refused(copy: Copy) -> None:
    mine, other = copy("mine"), copy("other")
    code = f"""
import os
from kvsplit import native
native.load()
os.environ["LLAMA_CPP_LIB_PATH"] = {str(other.parent)!r}
import llama_cpp
{LOAD}"""
    said = python(code, KVSPLIT_NATIVE_DIR=mine.parent)
    assert said.startswith("NativeMismatchError") and str(mine) in said and str(other) in said


@pytest.mark.native
def test_llama_cpp_uses_the_library_that_was_loaded(copy: Copy) -> None:
    mine = copy("mine")
    code = (
        "from kvsplit import native; native.load(); import llama_cpp.llama_cpp as l; print(l._lib._name); native.load()"
    )
    assert python(code, KVSPLIT_NATIVE_DIR=mine.parent).strip() == str(mine)


@pytest.mark.native
def test_a_link_has_its_libraries_beside_what_it_points_to(tmp_path: Path) -> None:
    real = native.library_path().resolve()
    (tmp_path / real.name).symlink_to(real)
    said = python(LOAD, KVSPLIT_NATIVE_DIR=tmp_path)
    assert {str(Path(f).resolve().parent) for f in said.split()} == {str(real.parent)}, said


# ---- two installs


@pytest.mark.native
def test_two_installs_side_by_side_load_their_own(copy: Copy, tmp_path: Path) -> None:
    ignore = shutil.ignore_patterns("__pycache__", "lib", "bin")
    folders = []
    for name in ("one", "two"):
        copy(f"{name}/kvsplit/lib")
        shutil.copytree(native.PACKAGE, tmp_path / name / "kvsplit", ignore=ignore, dirs_exist_ok=True)
        folders.append(tmp_path / name)
    show = "from kvsplit import native; print(native.__file__); print(*native.load().files(), sep='\\n')"
    for folder in folders:
        lines = python(show, path=folder).splitlines()
        assert len(lines) >= 2 and all(line.startswith(str(folder / "kvsplit")) for line in lines), lines
    # one started by the other, with its environment
    nested = """
import os, subprocess, sys
from kvsplit import native
native.load()
env = {**os.environ, "PYTHONPATH": sys.argv[1]}
print(subprocess.run([sys.executable, "-c", sys.argv[2]], env=env, capture_output=True, text=True, check=True).stdout)
"""
    lines = python(nested, folders[1], show, path=folders[0]).split()
    assert len(lines) >= 2 and all(line.startswith(str(folders[1] / "kvsplit")) for line in lines), lines


@pytest.mark.native
def test_what_the_user_names_is_nearer_than_all_else(copy: Copy) -> None:
    mine, other = copy("mine"), copy("other")
    said = python(LOAD, KVSPLIT_NATIVE_DIR=mine.parent, LLAMA_CPP_LIB_PATH=other.parent)
    assert said.splitlines()[0] == str(other)
    code = "from kvsplit import native; native.load(); from kvsplit import native; print(native.locate())"
    assert "'KVSPLIT_NATIVE_DIR'" in python(code, KVSPLIT_NATIVE_DIR=mine.parent)
    assert "'LLAMA_CPP_LIB_PATH'" in python(code, LLAMA_CPP_LIB_PATH=other.parent)


def test_a_folder_that_is_not_there_is_named_with_the_way_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("LLAMA_CPP_LIB_PATH", raising=False)
    monkeypatch.setenv("KVSPLIT_NATIVE_DIR", str(tmp_path / "none"))
    with pytest.raises(NativeMissingError, match=rf"{re.escape(str(tmp_path / 'none'))}"):
        native.locate()
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", str(tmp_path / "gone"))
    with pytest.raises(NativeError, match=r"LLAMA_CPP_LIB_PATH=.*gone holds no .*; unset it or correct it"):
        native.locate()


def test_the_struct_of_an_item_is_as_large_as_the_librarys() -> None:
    # 5 int32, padding, 2 doubles, 2 uint64, 192 characters
    assert ctypes.sizeof(native.KvqSelftestItem) == 24 + 32 + 192
