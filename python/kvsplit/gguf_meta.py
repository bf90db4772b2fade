# SPDX-License-Identifier: MIT
"""The metadata of a GGUF file, read without touching tensor data.

The package ``gguf`` builds an object for every token of the vocabulary, ten seconds for a large one; here
long arrays are stepped over. Its tables of types are used.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Dict, Optional, Tuple, Union

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from kvsplit.errors import ModelFileError, shown, why

_MAGIC = b"GGUF"
_SCALARS: Dict[int, str] = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}
# Layers are at most 512; anything longer is a vocabulary.
_MAX_ARRAY = 4096
# What a file may claim. The format allows keys of 65535 bytes and ggml 4 dimensions; the rest is a hundred times what
# any model has, so that a file of nothing but counts ends in an error and not in hours or gigabytes.
_MAX_KEY, _MAX_DIMS = 65535, 4
_MAX_KEYS, _MAX_TENSORS, _MAX_STRINGS = 1 << 16, 1 << 20, 1 << 24
_MAX_DEPTH = 4  # of arrays in arrays
_MAX_KEPT = 64 << 20  # bytes of text that are kept, over all values; what comes after is stepped over


@dataclass(frozen=True)
class GGUFInfo:
    """Metadata of a GGUF.

    Attributes:
        path: of the file.
        size: bytes of the file.
        version: of the format.
        n_tensors: tensors in this file.
        fields: key to value; an array too long to be about layers is None, and so is a text of many MB.
        array_lengths: key to length, for every array.
        truncated: why the file can't be whole; "" if it is.
    """

    path: Path
    size: int
    version: int
    n_tensors: int
    fields: Dict[str, Any] = field(repr=False)
    array_lengths: Dict[str, int] = field(repr=False)
    truncated: str = ""

    @property
    def arch(self) -> str:
        """Architecture; "" if the file names none."""
        name = self.fields.get("general.architecture")
        return name if isinstance(name, str) else ""

    def get(self, key: str, default: Any = None) -> Any:
        """Value of a key of the architecture, named without its prefix."""
        return self.fields.get(f"{self.arch}.{key}", default)


class _Truncated(Exception):
    pass


class _Damaged(Exception):
    """The message says what is wrong."""


class _Reader:
    def __init__(self, f: BinaryIO, size: int) -> None:
        self.f = f
        self.size = size
        self.endian = "<"
        self.room = _MAX_KEPT

    def bytes(self, n: int) -> bytes:
        if n > 4096 and n > self.size - self.f.tell():  # before memory is asked for
            raise _Truncated
        b = self.f.read(n)
        if len(b) != n:
            raise _Truncated
        return b

    def num(self, code: str) -> Any:
        return struct.unpack(self.endian + code, self.bytes(struct.calcsize("<" + code)))[0]

    def string(self, what: str) -> str:
        """A name; ``what`` says of what."""
        n = self.num("Q")
        if n > _MAX_KEY:
            raise _Damaged(f"the name of a {what} has {n} bytes")
        return self.bytes(n).decode("utf-8", "replace")

    def text(self) -> Optional[str]:
        """A text; None if so much isn't kept."""
        n = self.num("Q")
        if n > self.room:
            self.skip(n)
            return None
        self.room -= n
        return self.bytes(n).decode("utf-8", "replace")

    def count(self, most: int, what: str) -> int:
        n = int(self.num("Q"))
        if n > most:
            raise _Damaged(f"it claims {n} {what}")
        return n

    def skip(self, n: int) -> None:
        if n > self.size - self.f.tell():
            raise _Truncated
        self.f.seek(n, os.SEEK_CUR)

    def value(self, kind: int, depth: int = 0) -> Tuple[Any, Optional[int]]:
        """A value, and its length if it is an array."""
        if kind == GGUFValueType.STRING:
            return self.text(), None
        if kind != GGUFValueType.ARRAY:
            return self.num(_code(kind)), None
        item = self.num("I")
        if item == GGUFValueType.STRING:
            n = self.count(_MAX_STRINGS, "texts in an array")
            if n > _MAX_ARRAY:
                for _ in range(n):
                    self.skip(self.num("Q"))
                return None, n
            keep = [self.text() for _ in range(n)]
            return (None if None in keep else keep), n
        if item == GGUFValueType.ARRAY:
            if depth == _MAX_DEPTH:
                raise _Damaged(f"arrays lie in arrays more than {_MAX_DEPTH} deep")
            n = self.count(_MAX_STRINGS, "arrays in an array")
            for _ in range(n):
                self.value(item, depth + 1)
            return None, n
        code, n = _code(item), self.num("Q")
        size = struct.calcsize("<" + code)
        if n > _MAX_ARRAY:
            self.skip(n * size)
            return None, n
        return list(struct.unpack(f"{self.endian}{n}{code}", self.bytes(n * size))), n


def _code(kind: int) -> str:
    """How a scalar is unpacked."""
    if kind not in _SCALARS:
        raise _Damaged(f"a value has the type {kind}, which isn't known")
    return _SCALARS[kind]


def read_gguf(path: Union[str, "os.PathLike[str]"]) -> GGUFInfo:
    """Read the metadata of a GGUF and check that the file holds all its tensors.

    Raises:
        ModelFileError: no such file, not a GGUF, cut off, or damaged. The message names the path and what is wrong.
    """
    p = Path(path)
    try:
        size = p.stat().st_size
        if not p.is_file() and not p.is_dir():
            raise ModelFileError(f"model {p} is no file")
        with open(p, "rb") as f:
            return _read(p, f, size)
    except FileNotFoundError:
        raise ModelFileError(f"model {p} does not exist") from None
    except IsADirectoryError:
        raise ModelFileError(f"model {p} is a folder, not a GGUF file") from None
    except _Truncated:
        raise ModelFileError(f"model {p} is truncated: it ends within its header; fetch it again") from None
    except _Damaged as e:
        raise ModelFileError(f"model {p} is damaged: {e}; fetch it again") from None
    except OSError as e:
        raise ModelFileError(f"model {p} can't be read: {why(e)}") from e
    except ValueError as e:
        if isinstance(e, ModelFileError):
            raise
        raise ModelFileError(f"model {shown(str(p))} can't be read: {e}") from None  # a name with a NUL


def _read(p: Path, f: BinaryIO, size: int) -> GGUFInfo:
    r = _Reader(f, size)
    magic = f.read(4)
    if magic != _MAGIC:
        if size == 0:
            raise ModelFileError(f"model {p} is empty")
        raise ModelFileError(f"model {p} is not a GGUF file: it starts with {magic!r}, not {_MAGIC!r}")
    version = r.num("I")
    if version > 0xFFFF:  # written on a machine of the other byte order
        r.endian = ">"
        version = int.from_bytes(version.to_bytes(4, "little"), "big")
    if version not in (2, 3):
        raise ModelFileError(f"model {p} has GGUF version {version}; versions 2 and 3 are known")
    n_tensors, n_kv = r.count(_MAX_TENSORS, "tensors"), r.count(_MAX_KEYS, "keys")
    fields: Dict[str, Any] = {}
    lengths: Dict[str, int] = {}
    for _ in range(n_kv):
        key = r.string("key")
        if key in fields:
            raise _Damaged(f"the key {shown(key)} is there twice")
        value, n = r.value(r.num("I"))
        fields[key] = value
        if n is not None:
            lengths[key] = n
    end = 0
    for _ in range(n_tensors):
        r.string("tensor")
        n_dims = r.num("I")
        if n_dims > _MAX_DIMS:
            raise _Damaged(f"a tensor has {n_dims} dimensions")
        dims = [r.num("Q") for _ in range(n_dims)]
        kind, offset = r.num("I"), r.num("Q")
        n_values = 1
        for d in dims:
            n_values *= d
        try:
            block, n_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        except (ValueError, KeyError):  # a type this table doesn't know: at least its start must be there
            block, n_bytes = 1, 0
        end = max(end, offset + n_values // block * n_bytes)
    align = fields.get("general.alignment", 32)
    if not isinstance(align, int) or isinstance(align, bool) or not 0 < align <= 1 << 20 or align & (align - 1):
        raise _Damaged(f"general.alignment is {shown(align)}")
    start = (f.tell() + align - 1) // align * align
    truncated = ""
    if end and start + end > size:
        truncated = f"it has {size} bytes, its tensors need {start + end}"
    return GGUFInfo(p, size, version, n_tensors, fields, lengths, truncated)


def check_model(path: Union[str, "os.PathLike[str]"]) -> GGUFInfo:
    """As :func:`read_gguf`, and a file that lacks tensor data is refused too.

    Raises:
        ModelFileError: no such file, not a GGUF, cut off, or no architecture named.
    """
    info = read_gguf(path)
    if info.truncated:
        raise ModelFileError(f"model {info.path} is truncated: {info.truncated}; fetch it again")
    if not info.arch:
        raise ModelFileError(f"model {info.path} names no architecture: it is no language model")
    return info
