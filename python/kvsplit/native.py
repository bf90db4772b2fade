# SPDX-License-Identifier: MIT
"""The native library: find it, load it, call its policy functions.

Looked for in ``KVSPLIT_NATIVE_DIR`` (a folder with ``bin``, ``lib`` or both, or the files themselves), then
inside the package. llama-cpp-python is pointed at the same library.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, List, Optional, Tuple

from kvsplit import _lock
from kvsplit.errors import KVQuantError, NativeMismatchError, NativeMissingError

PACKAGE = Path(__file__).resolve().parent

_LIB_NAMES = {
    "darwin": ("libllama.dylib", "libllama.so"),
    "win32": ("llama.dll", "libllama.dll"),
}.get(sys.platform, ("libllama.so",))

TYPE_COUNT_SENTINEL = "none"


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


def _lib_in(folder: Path) -> Optional[Path]:
    for name in _LIB_NAMES:
        if (folder / name).is_file():
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
        "KVSPLIT_NATIVE_DIR points at a folder without it"
        if os.environ.get("KVSPLIT_NATIVE_DIR")
        else "this package carries none; build the project and set KVSPLIT_NATIVE_DIR to its build folder, "
        "or install the package with pip from the source tree"
    )
    raise NativeMissingError(f"{_LIB_NAMES[0]} was not found: {how} (looked in {', '.join(looked)})")


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


class Native:
    """The loaded library. Get it from :func:`load`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.lib = ctypes.CDLL(str(path))
        except OSError as e:
            raise NativeMissingError(f"{path} can't be loaded: {e}") from e
        try:
            self._bind()
        except AttributeError as e:
            raise NativeMismatchError(
                f"{path} has no kvq functions ({e}): it is a llama.cpp without this project's patches"
            ) from e
        words = self.lib.kvq_build().decode("utf-8", "replace").split()
        self.build = Build(*(words + ["", "", ""])[:3])
        self._check()

    def _bind(self) -> None:
        def fn(name: str, restype: Any, *argtypes: Any) -> None:
            f = getattr(self.lib, name)
            f.restype = restype
            f.argtypes = list(argtypes)

        c_int, c_i32, c_char_p, c_void_p = ctypes.c_int, ctypes.c_int32, ctypes.c_char_p, ctypes.c_void_p
        p_int = ctypes.POINTER(ctypes.c_int)
        fn("kvq_build", c_char_p)
        fn("kvq_last_error", c_char_p)
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
                f"this package goes with {want[0]} (sha256 {want[1]}); build it again from this source tree"
            )
        patches = expected_patches()
        if patches is not None and patches != self.build.patches_sha256:
            raise NativeMismatchError(
                f"{self.path} was built with patches {self.build.patches_sha256}, "
                f"this package goes with {patches}; build or install both from one source tree"
            )

    # ---- policies

    def last_error(self) -> str:
        """Why the last call failed on this thread; "" if it did not."""
        return str(self.lib.kvq_last_error().decode("utf-8", "replace"))

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


_native: Optional[Native] = None


def load() -> Native:
    """Load the native library once, and point llama-cpp-python at it.

    Raises:
        NativeMissingError: library or bindings not found.
        NativeMismatchError: built from another source, or another library was loaded before.
    """
    global _native
    if _native is not None:
        return _native
    override = os.environ.get("LLAMA_CPP_LIB_PATH")
    if override:
        found = _lib_in(Path(override))
        if found is None:
            raise NativeMissingError(f"LLAMA_CPP_LIB_PATH={override} holds no {_LIB_NAMES[0]}; unset it or correct it")
        path = found
    else:
        path = library_path()
    _check_bindings()
    imported = sys.modules.get("llama_cpp.llama_cpp")
    if imported is not None:
        other = Path(str(getattr(imported._lib, "_name", "")))
        if other.resolve() != path.resolve():
            raise NativeMismatchError(
                f"llama_cpp was imported before kvsplit and uses {other}, not {path}; import kvsplit first"
            )
    native = Native(path)
    os.environ.setdefault("LLAMA_CPP_LIB_PATH", str(path.parent))
    _native = native
    return native
