# SPDX-License-Identifier: MIT
"""The native library: find it, load it, call its policy functions.

Looked for in ``KVSPLIT_NATIVE_DIR`` (a folder with ``bin``, ``lib`` or both, or the files themselves), then
inside the package. llama-cpp-python is pointed at the same library.

Whatever is found is checked before it is used: the files, by whom they were built, and that no part of another build
was loaded in place of one of its own.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import os
import stat
import struct
import sys
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Dict, Iterator, List, Optional, Tuple, Type

from kvsplit import _lock
from kvsplit.cache_types import CACHE_TYPES
from kvsplit.errors import KVQuantError, NativeMismatchError, NativeMissingError

PACKAGE = Path(__file__).resolve().parent

_LIB_NAMES = {
    "darwin": ("libllama.dylib", "libllama.so"),
    "win32": ("llama.dll", "libllama.dll"),
}.get(sys.platform, ("libllama.so",))

TYPE_COUNT_SENTINEL = "none"

#: Holds LLAMA_CPP_LIB_PATH where this package set it, not its user: a child process may belong to another install.
_OURS = "KVSPLIT_SET_LIB_PATH"


class KvqLayer(ctypes.Structure):
    """Mirror of ``struct kvq_layer``."""

    _fields_ = [
        ("il", ctypes.c_int32),
        ("index", ctypes.c_int32),
        ("swa", ctypes.c_int32),
        ("n_cells", ctypes.c_int32),
        ("n_head_kv", ctypes.c_int32),
        ("head_k", ctypes.c_int32),
        ("head_v", ctypes.c_int32),
        ("type_k", ctypes.c_int),
        ("type_v", ctypes.c_int),
        ("rot_k", ctypes.c_int32),
        ("rot_v", ctypes.c_int32),
        ("fused", ctypes.c_int32),
        ("bytes_k", ctypes.c_uint64),
        ("bytes_v", ctypes.c_uint64),
        ("backend_prefill", ctypes.c_char_p),
        ("backend_decode", ctypes.c_char_p),
        ("backend_expect", ctypes.c_char_p),
    ]


class KvqSelftestItem(ctypes.Structure):
    """Mirror of ``struct kvq_selftest_item``."""

    _fields_ = [
        ("kind", ctypes.c_int32),
        ("status", ctypes.c_int32),
        ("device", ctypes.c_int32),
        ("type_k", ctypes.c_int),
        ("type_v", ctypes.c_int),
        ("error", ctypes.c_double),
        ("limit", ctypes.c_double),
        ("want", ctypes.c_uint64),
        ("have", ctypes.c_uint64),
        ("reason", ctypes.c_char * 192),
    ]


@dataclass(frozen=True)
class Build:
    """What a native library was built from.

    Attributes:
        version: of llama-cpp-python.
        source_sha256: of its source distribution.
        patches_sha256: over the patch series.
    """

    version: str
    source_sha256: str
    patches_sha256: str


def _roots() -> List[Path]:
    env = os.environ.get("KVSPLIT_NATIVE_DIR")
    if env:
        return [Path(env).expanduser()]
    return [PACKAGE]


def _is_file(path: Path) -> bool:
    """True if a file is there.

    Raises:
        NativeMissingError: that can't be seen, because a folder on the way can't be entered.
    """
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False
    except OSError as e:
        raise NativeMissingError(
            f"{path.parent} can't be looked into: {e.strerror}; make it readable, or name another folder"
        ) from None


def _lib_in(folder: Path) -> Optional[Path]:
    for name in _LIB_NAMES:
        if _is_file(folder / name):
            return folder / name
    return None


def library_path() -> Path:
    """Path of libllama.

    Raises:
        NativeMissingError: there is none; the message says where it was looked for.
    """
    looked: List[str] = []
    for root in _roots():
        for folder in (root / "lib", root / "lib64", root / "bin", root):
            found = _lib_in(folder)
            if found is not None:
                return found
            looked.append(str(folder))
    how = (
        "KVSPLIT_NATIVE_DIR points at a folder without it; build the project there, or unset it"
        if os.environ.get("KVSPLIT_NATIVE_DIR")
        else "this package carries none; build the project and set KVSPLIT_NATIVE_DIR to its build folder, "
        "or install the package with pip from the source tree"
    )
    raise NativeMissingError(f"{_LIB_NAMES[0]} was not found: {how} (looked in {', '.join(looked)})")


def locate() -> Tuple[Path, str]:
    """The libllama to load, and what names it: ``LLAMA_CPP_LIB_PATH``, ``KVSPLIT_NATIVE_DIR`` or ``the package``.

    Raises:
        NativeMissingError: there is none, or it can't be seen.
    """
    override = os.environ.get("LLAMA_CPP_LIB_PATH")
    if override and override != os.environ.get(_OURS):
        found = _lib_in(Path(override))
        if found is None:
            raise NativeMissingError(f"LLAMA_CPP_LIB_PATH={override} holds no {_LIB_NAMES[0]}; unset it or correct it")
        return found, "LLAMA_CPP_LIB_PATH"
    return library_path(), "KVSPLIT_NATIVE_DIR" if os.environ.get("KVSPLIT_NATIVE_DIR") else "the package"


_WAYS_OUT = {
    "LLAMA_CPP_LIB_PATH": "unset LLAMA_CPP_LIB_PATH, or let it name the folder of this package's own",
    "KVSPLIT_NATIVE_DIR": "build it again from this source tree, or unset KVSPLIT_NATIVE_DIR",
    "the package": "install the package again",
    "": "build it again from this source tree",
}


def bin_dirs() -> List[Path]:
    """Folders where tools may lie."""
    return [folder for root in _roots() for folder in (root / "bin", root)]


def expected_patches() -> Optional[str]:
    """Hash of the patches that this package was built with; None in a source tree."""
    try:
        data = json.loads((PACKAGE / "_build.json").read_text(encoding="utf-8"))
        return str(data["patches_sha256"])
    except (OSError, ValueError, KeyError):
        return None


def _check_bindings() -> None:
    try:
        have = importlib.metadata.version(_lock.NAME)
    except importlib.metadata.PackageNotFoundError:
        raise NativeMissingError(
            f"{_lock.NAME} is not installed; install {_lock.NAME}=={_lock.VERSION} without its own library: "
            f'CMAKE_ARGS="-DLLAMA_BUILD=OFF -DLLAVA_BUILD=OFF" pip install {_lock.NAME}=={_lock.VERSION}'
        ) from None
    if have != _lock.VERSION:
        raise NativeMismatchError(
            f"{_lock.NAME} {have} is installed, this package goes with {_lock.VERSION}; their structures may differ. "
            f"Install {_lock.NAME}=={_lock.VERSION}"
        )


# ---- files


_MACHINES = {3: "x86", 8: "MIPS", 21: "PowerPC 64", 22: "S390", 40: "ARM", 62: "x86-64", 183: "AArch64", 243: "RISC-V"}


def _elf(path: Path) -> Optional[Tuple[int, str, int, int, int]]:
    """Of an ELF file: bits, byte order, machine, the size that its headers tell, its size; None if it is none.

    Raises:
        OSError: it can't be read.
    """
    with open(path, "rb") as f:
        size = os.fstat(f.fileno()).st_size
        head = f.read(64)
        if len(head) < 52 or head[:4] != b"\x7fELF" or head[4] not in (1, 2) or head[5] not in (1, 2):
            return None
        bits, order = 32 * head[4], "<" if head[5] == 1 else ">"
        # e_machine; e_phoff and e_shoff; e_phentsize, e_phnum, e_shentsize, e_shnum
        machine = struct.unpack_from(order + "H", head, 18)[0]
        if len(head) < 64:
            return bits, order, machine, 64, size
        phoff, shoff = struct.unpack_from(order + ("II" if bits == 32 else "QQ"), head, 28 if bits == 32 else 32)
        phsize, phnum, shsize, shnum = struct.unpack_from(order + "4H", head, 42 if bits == 32 else 54)
        end = max(phoff + phsize * phnum, shoff + shsize * shnum)
        f.seek(min(phoff, size))
        headers = f.read(phsize * phnum)
        for i in range(len(headers) // phsize if phsize >= (32 if bits == 32 else 56) else 0):
            at = i * phsize
            if bits == 32:
                offset, filesz = (struct.unpack_from(order + "I", headers, at + k)[0] for k in (4, 16))
            else:
                offset, filesz = (struct.unpack_from(order + "Q", headers, at + k)[0] for k in (8, 32))
            end = max(end, offset + filesz)
        return bits, order, machine, end, size


def _parts(path: Path) -> List[Path]:
    """libllama and ggml's libraries beside it."""
    try:
        names = sorted(p.name for p in path.parent.iterdir())
    except OSError:
        names = []
    ggml = [n for n in names if n.startswith(("libggml", "ggml")) and (".so" in n or n.endswith((".dylib", ".dll")))]
    return [path, *(path.parent / n for n in ggml)]


def check_files(path: Path, way_out: str = "") -> None:
    """Refuse files that the loader refuses without a reason, or is killed by.

    Args:
        path: libllama; ggml's libraries beside it are checked too.
        way_out: what the message advises.

    Raises:
        NativeMissingError: one can't be read, or is truncated, no library, or for another kind of machine.
    """
    if not sys.platform.startswith("linux"):
        return  # dyld and Windows check sizes and say what is wrong
    try:
        own = _elf(Path("/proc/self/exe"))
    except OSError:
        own = None
    for part in _parts(path):
        why = ""
        try:
            elf = _elf(part)
        except OSError as e:
            raise NativeMissingError(f"{part} can't be read: {e.strerror}; make it readable") from None
        if elf is None:
            why = "is empty" if part.stat().st_size == 0 else "is no shared library"
        elif own is not None and elf[:3] != own[:3]:
            have, want = (f"{_MACHINES.get(x[2], f'machine {x[2]}')} with {x[0]} bits" for x in (elf, own))
            why = f"is built for {have}, this Python for {want}"
        elif elf[3] > elf[4]:
            why = f"is truncated: it has {elf[4]} of {elf[3]} bytes"
        if why:
            raise NativeMissingError(f"{part} {why}; {way_out or _WAYS_OUT['']}")


def _mapped() -> List[Path]:
    """Files that this process has mapped; empty where the system doesn't tell."""
    try:
        with open("/proc/self/maps", "rb") as f:
            lines = f.read().split(b"\n")
    except OSError:
        return []
    names = dict.fromkeys(line.split(None, 5)[5] for line in lines if line.count(b"/"))
    return [Path(os.fsdecode(n)) for n in names]


def _same(a: Path, b: Path) -> bool:
    try:
        return os.path.samefile(a, b)
    except OSError:
        return False


def _in_place_of(path: Path) -> List[Path]:
    """Libraries that were loaded in place of the ones beside ``path``: same names, other files."""
    mapped = _mapped()
    out: List[Path] = []
    for part in _parts(path)[1:]:
        same_name = [m for m in mapped if m.name == part.name]
        if same_name and not any(_same(m, part) for m in same_name):
            out += same_name
    return out


def _on_search_path(path: Path) -> List[Path]:
    """Libraries with the names of those beside ``path`` that the loader's search path has before them."""
    out: List[Path] = []
    for variable in ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH"):
        for folder in filter(None, os.environ.get(variable, "").split(os.pathsep)):
            out += [
                Path(folder) / p.name
                for p in _parts(path)[1:]
                if os.path.isfile(os.path.join(folder, p.name)) and not _same(Path(folder) / p.name, p)
            ]
    return out


def _foreign(path: Path, others: List[Path]) -> NativeMismatchError:
    """The error for libraries of another build in place of the ones beside ``path``."""
    out = f"unset {_search_variable()}" if set(others) & set(_on_search_path(path)) else (
        "import kvsplit before what loads them, or run it in a process of its own"
    )  # fmt: skip
    names = ", ".join(map(str, dict.fromkeys(others)))
    return NativeMismatchError(f"{path} goes with the libraries beside it, but {names} would be used instead; {out}")


def _search_variable() -> str:
    return "DYLD_LIBRARY_PATH" if sys.platform == "darwin" else "LD_LIBRARY_PATH"


@dataclass(frozen=True)
class Device:
    """What ggml can compute on.

    Attributes:
        index: ggml's number of it.
        name, description: for example ``CPU`` and the processor's name.
        kind: ``cpu``, ``gpu``, ``igpu``, ``accel``, or ``other``.
        backend: name of the backend.
        memory_free, memory_total: bytes; 0 if it doesn't tell.
        file: the library that holds the backend, "" if not known.
    """

    index: int
    name: str
    description: str
    kind: str
    backend: str
    memory_free: int
    memory_total: int
    file: str


@dataclass(frozen=True)
class SelfTestItem:
    """One item of the library's self-test.

    Attributes:
        index: of the item.
        kind: ``codec``, ``rows`` or ``attention``.
        device: name of the device, or ``reference`` for the reference codec.
        type_k, type_v: names; type_v is "" where there is but one type.
        status: ``passed``, ``failed``, ``elsewhere`` (the device says that it doesn't compute this), or ``not run``.
        error: measured, see ``kvq.h``; ``limit`` is what it may be at most.
        want, have: recorded and computed hash of bytes, in hex, or "".
        reason: why, unless it passed.
    """

    index: int
    kind: str
    device: str
    type_k: str
    type_v: str
    status: str = "not run"
    error: float = 0.0
    limit: float = 0.0
    want: str = ""
    have: str = ""
    reason: str = ""

    @property
    def what(self) -> str:
        """What is tested, in words."""
        if self.kind == "attention":
            return f"attention over {self.type_k}/{self.type_v}"
        return f"{'blocks' if self.kind == 'codec' else 'rows'} of {self.type_k}"


class Native:
    """The loaded library. Get it from :func:`load`.

    Args:
        path: of libllama.
        origin: what named it, as :func:`locate` says: messages advise accordingly.

    Raises:
        NativeMissingError: a file is missing, truncated or for another machine.
        NativeMismatchError: it was built from something else, or uses parts of another build.
    """

    def __init__(self, path: Path, origin: str = "") -> None:
        self.path = path
        self._way_out = _WAYS_OUT.get(origin, _WAYS_OUT[""])
        real = path.resolve()  # a link has its libraries beside what it points to
        check_files(real, self._way_out)
        try:
            self.lib = ctypes.CDLL(str(real))
        except OSError as e:
            raise self._not_loaded(str(e)) from e
        try:
            words = self._text("kvq_build").split()
        except AttributeError as e:
            raise NativeMismatchError(
                f"{path} has no kvq functions ({e}): it is a llama.cpp without this project's patches, and the package "
                f"{PACKAGE} goes with {_lock.NAME} {_lock.VERSION} with them; {self._way_out}"
            ) from e
        self.build = Build(*(words + ["", "", ""])[:3])
        self._check()
        try:
            self._bind()
        except AttributeError as e:
            raise NativeMismatchError(
                f"{path} is of another version of this project than the package {PACKAGE} ({e}); {self._way_out}"
            ) from e
        self._check_parts()

    def _not_loaded(self, why: str) -> Exception:
        real = self.path.resolve()
        others = [*_in_place_of(real), *_on_search_path(real)]
        if others:
            error = _foreign(real, others)
            return NativeMismatchError(f"{error} (it can't be loaded so: {why})")
        if "undefined symbol" in why or "ymbol not found" in why:
            return NativeMismatchError(
                f"{self.path} can't be loaded: {why}; its folder holds libraries of different builds; {self._way_out}"
            )
        return NativeMissingError(f"{self.path} can't be loaded: {why}; {self._way_out}")

    def _text(self, name: str) -> str:
        """What a function without arguments says; AttributeError if there is no such function."""
        f = getattr(self.lib, name)
        f.restype = ctypes.c_char_p
        return str((f() or b"").decode("utf-8", "replace"))

    def _bind(self) -> None:
        def fn(name: str, restype: Any, *argtypes: Any) -> None:
            f = getattr(self.lib, name)
            f.restype = restype
            f.argtypes = list(argtypes)

        c_int, c_i32, c_char_p, c_void_p = ctypes.c_int, ctypes.c_int32, ctypes.c_char_p, ctypes.c_void_p
        p_int = ctypes.POINTER(ctypes.c_int)
        fn("kvq_build", c_char_p)
        fn("kvq_last_error", c_char_p)
        fn("kvq_last_logged", c_char_p)
        fn("kvq_type_from_spec", c_int, c_char_p)
        fn("kvq_types_from_preset", ctypes.c_bool, c_char_p, p_int, p_int)
        fn("kvq_type_name", c_char_p, c_int)
        fn("kvq_cache_type", c_int, c_i32)
        fn("kvq_resolve", ctypes.c_bool, c_int, c_i32, p_int)
        fn("kvq_model_set_policy", ctypes.c_bool, c_void_p, c_char_p, c_char_p)
        fn("kvq_model_n_layer", c_i32, c_void_p)
        fn("kvq_n_layer", c_i32, c_void_p)
        fn("kvq_get_layer", ctypes.c_bool, c_void_p, c_i32, ctypes.POINTER(KvqLayer))
        fn("kvq_compute_bytes", ctypes.c_uint64, c_void_p)
        fn("kvq_describe", c_i32, c_void_p, c_char_p, ctypes.c_size_t)

    def _check(self) -> None:
        want = (_lock.VERSION, _lock.SHA256)
        have = (self.build.version, self.build.source_sha256)
        if have != want:
            raise NativeMismatchError(
                f"{self.path} was built from {_lock.NAME} {have[0]} (sha256 {have[1]}), "
                f"the package {PACKAGE} goes with {want[0]} (sha256 {want[1]}); {self._way_out}"
            )
        patches = expected_patches()
        if patches is not None and patches != self.build.patches_sha256:
            raise NativeMismatchError(
                f"{self.path} was built with patches {self.build.patches_sha256}, "
                f"the package {PACKAGE} goes with {patches}; build or install both from one source tree, "
                f"or {self._way_out}"
            )

    def _check_parts(self) -> None:
        """Nothing of another build in place of a part, and ggml's table is the package's."""
        real = self.path.resolve()
        others = _in_place_of(real)
        for file in self.files()[1:]:
            here = real.parent / file.name
            if not _same(file, real) and (not _same(file, here) if here.exists() else bool(file.parent.name)):
                others.append(file)
        if others:
            raise _foreign(real, others)
        have = [(t, self.type_name(t)) for t in self.cache_types()]
        want = [(t.ggml_id, t.name) for t in CACHE_TYPES]
        if have != want:
            raise NativeMismatchError(
                f"the cache types of {self.path} aren't those of the package {PACKAGE}: "
                f"{sorted(set(have) ^ set(want))} differ; {self._way_out}"
            )
        size, block = self.lib.ggml_type_size, self.lib.ggml_blck_size
        size.restype, size.argtypes = ctypes.c_size_t, [ctypes.c_int]
        block.restype, block.argtypes = ctypes.c_int64, [ctypes.c_int]
        for t in CACHE_TYPES:
            if (int(size(t.ggml_id)), int(block(t.ggml_id))) != (t.bytes, t.block):
                raise NativeMismatchError(
                    f"{self.path} has {t.name} in blocks of {int(block(t.ggml_id))} values and {int(size(t.ggml_id))} "
                    f"bytes, the package {PACKAGE} in blocks of {t.block} and {t.bytes}; {self._way_out}"
                )

    def files(self) -> List[Path]:
        """Files of libllama, ggml's base and its list of backends, as libllama reaches them, where they are known."""
        return [Path(f) for f in (self._file(i) for i in range(3)) if f] or [self.path]

    def _file(self, i: int) -> str:
        """Part ``i`` of ``kvq_library_file``, "" if not known; decoded as Python decodes paths in any locale."""
        if not hasattr(self.lib, "kvq_library_file"):
            return ""
        f = self.lib.kvq_library_file
        f.restype, f.argtypes = ctypes.c_char_p, [ctypes.c_int32]
        return os.fsdecode(f(i) or b"")

    # ---- policies

    def last_error(self) -> str:
        """Why the last call failed on this thread; "" if it did not."""
        return str(self.lib.kvq_last_error().decode("utf-8", "replace"))

    def last_logged(self) -> str:
        """The last error that llama.cpp logged on this thread, "" if there was none."""
        return str(self.lib.kvq_last_logged().decode("utf-8", "replace"))

    def handle(self, spec: str, argument: str = "") -> int:
        """Handle of a SPEC, to stand as ``type_k`` or ``type_v``.

        Raises:
            KVQuantError: the library's reason.
        """
        # GGML_TYPE_COUNT is the one answer that isn't a handle, and lies far below them
        res = int(self.lib.kvq_type_from_spec(spec.encode("utf-8")))
        why = self.last_error()
        if why:
            raise KVQuantError(f"{argument}: {why}" if argument else why, argument=argument, given=spec)
        return res

    def preset(self, preset: str) -> Tuple[int, int]:
        """Handles of both sides of a PRESET.

        Raises:
            KVQuantError: the library's reason.
        """
        k, v = ctypes.c_int(), ctypes.c_int()
        if not self.lib.kvq_types_from_preset(preset.encode("utf-8"), ctypes.byref(k), ctypes.byref(v)):
            raise KVQuantError(f"kvq: {self.last_error()}", argument="kvq", given=preset)
        return k.value, v.value

    def type_name(self, type_id: int) -> str:
        """Canonical text of a handle or name of a plain type."""
        return str(self.lib.kvq_type_name(type_id).decode("utf-8", "replace"))

    def cache_types(self) -> List[int]:
        """Ids of all cache types, in the order of the library's table."""
        res: List[int] = []
        while True:
            t = int(self.lib.kvq_cache_type(len(res)))
            if self.type_name(t) == TYPE_COUNT_SENTINEL:
                return res
            res.append(t)

    def resolve(self, type_id: int, n_layer: int) -> List[str]:
        """Names of the types of ``n_layer`` layers under a handle or plain type.

        Raises:
            KVQuantError: the library's reason.
        """
        types = (ctypes.c_int * max(1, n_layer))()
        if not self.lib.kvq_resolve(type_id, n_layer, types):
            raise KVQuantError(self.last_error(), given=self.type_name(type_id))
        return [self.type_name(types[i]) for i in range(n_layer)]

    def model_n_layer(self, model: Any) -> int:
        """Layers of a loaded model that a slice counts."""
        return int(self.lib.kvq_model_n_layer(model))

    # ---- machine

    def system_info(self) -> str:
        """CPU features that the library uses, as llama.cpp prints them."""
        f = self.lib.llama_print_system_info
        f.restype = ctypes.c_char_p
        return str(f().decode("utf-8", "replace")).strip().rstrip("|").strip()

    def devices(self) -> List[str]:
        """Names and descriptions of the devices that the library can compute on."""
        count, get = self.lib.ggml_backend_dev_count, self.lib.ggml_backend_dev_get
        count.restype = ctypes.c_size_t
        get.restype, get.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
        texts: List[str] = []
        for i in range(int(count())):
            dev = get(i)
            parts: List[str] = []
            for fn in (self.lib.ggml_backend_dev_name, self.lib.ggml_backend_dev_description):
                fn.restype, fn.argtypes = ctypes.c_char_p, [ctypes.c_void_p]
                parts.append(fn(dev).decode("utf-8", "replace"))
            texts.append(f"{parts[0]} ({parts[1]})")
        return texts

    def device_list(self) -> List[Device]:
        """The devices, with memory and file of each."""
        lib = self.lib
        lib.ggml_backend_dev_count.restype = ctypes.c_size_t
        for name, restype, argtypes in (
            ("ggml_backend_dev_get", ctypes.c_void_p, [ctypes.c_size_t]),
            ("ggml_backend_dev_name", ctypes.c_char_p, [ctypes.c_void_p]),
            ("ggml_backend_dev_description", ctypes.c_char_p, [ctypes.c_void_p]),
            ("ggml_backend_dev_type", ctypes.c_int, [ctypes.c_void_p]),
            ("ggml_backend_dev_backend_reg", ctypes.c_void_p, [ctypes.c_void_p]),
            ("ggml_backend_reg_name", ctypes.c_char_p, [ctypes.c_void_p]),
            ("ggml_backend_dev_memory", None, [ctypes.c_void_p] + 2 * [ctypes.POINTER(ctypes.c_size_t)]),
        ):
            f = getattr(lib, name)
            f.restype, f.argtypes = restype, argtypes

        def text(value: bytes) -> str:
            return value.decode("utf-8", "replace")

        out: List[Device] = []
        for i in range(int(lib.ggml_backend_dev_count())):
            dev = lib.ggml_backend_dev_get(i)
            free, total = ctypes.c_size_t(), ctypes.c_size_t()
            lib.ggml_backend_dev_memory(dev, ctypes.byref(free), ctypes.byref(total))
            kind = int(lib.ggml_backend_dev_type(dev))
            kinds = ("cpu", "gpu", "igpu", "accel")
            reg = lib.ggml_backend_dev_backend_reg(dev)
            out.append(
                Device(
                    index=i,
                    name=text(lib.ggml_backend_dev_name(dev)),
                    description=text(lib.ggml_backend_dev_description(dev)),
                    kind=kinds[kind] if kind < len(kinds) else "other",
                    backend=text(lib.ggml_backend_reg_name(reg)) if reg else "",
                    memory_free=int(free.value),
                    memory_total=int(total.value),
                    file=self._file(3 + i),
                )
            )
        return out

    def self_test(self) -> SelfTest:
        """The library's self-test, to be used in a ``with`` statement.

        Raises:
            NativeMismatchError: an older library has none.
        """
        return SelfTest(self)

    # ---- contexts

    def layers(self, ctx: Any) -> List[KvqLayer]:
        """The layers of a context's KV cache, read back."""
        res: List[KvqLayer] = []
        for i in range(int(self.lib.kvq_n_layer(ctx))):
            layer = KvqLayer()
            if not self.lib.kvq_get_layer(ctx, i, ctypes.byref(layer)):
                raise NativeMismatchError(f"layer {i} of the KV cache can't be read: {self.last_error()}")
            res.append(layer)
        return res

    def compute_bytes(self, ctx: Any) -> int:
        """Bytes of a context's compute buffers, over all backends."""
        return int(self.lib.kvq_compute_bytes(ctx))

    def describe(self, ctx: Any) -> str:
        """What the tools print at start about a context's KV cache."""
        n = int(self.lib.kvq_describe(ctx, None, 0))
        buf = ctypes.create_string_buffer(n + 1)
        self.lib.kvq_describe(ctx, buf, n + 1)
        return buf.value.decode("utf-8", "replace")


class SelfTest:
    """The self-test of a library: items that run one by one, the most used pairs of types first.

    ``for item in test.run(): ...`` runs them all. Not thread-safe.

    Attributes:
        items: all of them, not run.
    """

    _KINDS = ("codec", "rows", "attention")
    _STATUS = ("passed", "failed", "elsewhere")
    #: Pairs that come first: where time is short, these are tested.
    _FIRST = ("q8_0/kvq4", "f16/f16", "q8_0/q8_0", "kvq4/kvq4", "kvq6/kvq5", "kvq6/kvq4", "kvq3/kvq3", "q8_0/q4_0")

    def __init__(self, native: Native) -> None:
        lib = native.lib
        try:
            fns = [getattr(lib, f"kvq_selftest_{n}") for n in ("init", "count", "get", "run", "free")]
        except AttributeError:
            raise NativeMismatchError(
                f"{native.path} is older than the package {PACKAGE} and has no self-test; {native._way_out}"
            ) from None
        init, count, get, run, free = fns
        void_p, item_p = ctypes.c_void_p, ctypes.POINTER(KvqSelftestItem)
        init.restype, init.argtypes = void_p, []
        count.restype, count.argtypes = ctypes.c_int32, [void_p]
        for f in (get, run):
            f.restype, f.argtypes = ctypes.c_bool, [void_p, ctypes.c_int32, item_p]
        free.restype, free.argtypes = None, [void_p]
        self._native, self._run, self._free = native, run, free
        self._test: Optional[int] = init()
        self._names: Dict[int, str] = {d.index: d.name for d in native.device_list()}
        self.items: List[SelfTestItem] = []
        for i in range(int(count(self._test))):
            raw = KvqSelftestItem()
            get(self._test, i, ctypes.byref(raw))
            self.items.append(self._item(i, raw, "not run"))
        self.items.sort(key=self._rank)

    def _rank(self, item: SelfTestItem) -> Tuple[int, int, int]:
        pair = f"{item.type_k}/{item.type_v}"
        first = self._FIRST.index(pair) if pair in self._FIRST else len(self._FIRST)
        return self._KINDS.index(item.kind), first, item.index

    def _item(self, i: int, raw: KvqSelftestItem, status: str) -> SelfTestItem:
        names = self._native.type_name
        kind = self._KINDS[raw.kind]
        return SelfTestItem(
            index=i,
            kind=kind,
            device=self._names[raw.device] if raw.device >= 0 else "reference",
            type_k=names(raw.type_k),
            type_v=names(raw.type_v) if kind == "attention" else "",
            status=status,
            error=float(raw.error),
            limit=float(raw.limit),
            want=f"{raw.want:016x}" if raw.want else "",
            have=f"{raw.have:016x}" if raw.have else "",
            reason=raw.reason.decode("utf-8", "replace"),
        )

    def run_one(self, item: SelfTestItem) -> SelfTestItem:
        """Run an item of ``items``."""
        raw = KvqSelftestItem()
        if self._test is None or not self._run(self._test, item.index, ctypes.byref(raw)):
            raise IndexError(f"no item {item.index}")
        return self._item(item.index, raw, self._STATUS[raw.status])

    def run(self) -> Iterator[SelfTestItem]:
        """Run all items, one after another."""
        for item in self.items:
            yield self.run_one(item)

    def close(self) -> None:
        """Give its memory and devices back; a second call does nothing."""
        test, self._test = self._test, None
        if test is not None:
            self._free(test)

    def __enter__(self) -> SelfTest:
        return self

    def __exit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        self.close()


_native: Optional[Native] = None


def _check_imported(path: Path) -> None:
    """llama_cpp, if it was imported, has to use the same library."""
    imported = sys.modules.get("llama_cpp.llama_cpp")
    if imported is None:
        return
    other = Path(str(getattr(getattr(imported, "_lib", None), "_name", "")))
    if other.resolve() != path.resolve():
        raise NativeMismatchError(
            f"llama_cpp was imported before kvsplit and uses {other}, not {path}; import kvsplit first, "
            "and unset LLAMA_CPP_LIB_PATH if it names another folder"
        )


def load() -> Native:
    """Load the native library once, and point llama-cpp-python at it.

    Raises:
        NativeMissingError: library or bindings not found.
        NativeMismatchError: built from another source, parts of another build, or another library was loaded before.
    """
    global _native
    if _native is not None:
        _check_imported(_native.path)
        return _native
    path, origin = locate()
    _check_bindings()
    _check_imported(path)
    native = Native(path, origin)
    if origin != "LLAMA_CPP_LIB_PATH":
        os.environ["LLAMA_CPP_LIB_PATH"] = os.environ[_OURS] = str(path.parent)
    _native = native
    return native
