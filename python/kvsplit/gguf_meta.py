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
from typing import Any, BinaryIO, Dict, List, Optional, Tuple, Union

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from kvsplit.errors import ModelFileError

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


@dataclass(frozen=True)
class GGUFInfo:
    """Metadata of a GGUF.

    Attributes:
        path: of the file.
        size: bytes of the file.
        version: of the format.
        n_tensors: tensors in this file.
        fields: key to value; an array too long to be about layers is None.
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
        return str(self.fields.get("general.architecture", ""))

    def get(self, key: str, default: Any = None) -> Any:
        """Value of a key of the architecture, named without its prefix."""
        return self.fields.get(f"{self.arch}.{key}", default)


class _Truncated(Exception):
    pass


class _Reader:
    def __init__(self, f: BinaryIO, size: int) -> None:
        self.f = f
        self.size = size
        self.endian = "<"

    def bytes(self, n: int) -> bytes:
        if n > self.size:
            raise _Truncated
        b = self.f.read(n)
        if len(b) != n:
            raise _Truncated
        return b

    def num(self, code: str) -> Any:
        return struct.unpack(self.endian + code, self.bytes(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        return self.bytes(self.num("Q")).decode("utf-8", "replace")

    def skip(self, n: int) -> None:
        if n > self.size - self.f.tell():
            raise _Truncated
        self.f.seek(n, os.SEEK_CUR)

    def value(self, kind: int) -> Tuple[Any, Optional[int]]:
        """A value, and its length if it is an array."""
        if kind == GGUFValueType.STRING:
            return self.string(), None
        if kind != GGUFValueType.ARRAY:
            return self.num(_SCALARS[kind]), None
        item, n = self.num("I"), self.num("Q")
        if item == GGUFValueType.STRING:
            keep: List[str] = []
            for _ in range(n):
                length = self.num("Q")
                if n <= _MAX_ARRAY:
                    keep.append(self.bytes(length).decode("utf-8", "replace"))
                else:
                    self.skip(length)
            return (keep if n <= _MAX_ARRAY else None), n
        if item == GGUFValueType.ARRAY:
            for _ in range(n):
                self.value(item)
            return None, n
        code = _SCALARS[item]
        size = struct.calcsize("<" + code)
        if n > _MAX_ARRAY:
            self.skip(n * size)
            return None, n
        return list(struct.unpack(f"{self.endian}{n}{code}", self.bytes(n * size))), n


def read_gguf(path: Union[str, "os.PathLike[str]"]) -> GGUFInfo:
    """Read the metadata of a GGUF and check that the file holds all its tensors.

    Raises:
        ModelFileError: no such file, not a GGUF, or cut off. The message names the path and what is wrong.
    """
    p = Path(path)
    try:
        size = p.stat().st_size
        with open(p, "rb") as f:
            return _read(p, f, size)
    except FileNotFoundError:
        raise ModelFileError(f"model {p} does not exist") from None
    except IsADirectoryError:
        raise ModelFileError(f"model {p} is a folder, not a GGUF file") from None
    except _Truncated:
        raise ModelFileError(f"model {p} is truncated: it ends within its header; fetch it again") from None
    except (KeyError, struct.error, MemoryError, OverflowError):
        raise ModelFileError(f"model {p} is damaged: its metadata can't be read; fetch it again") from None
    except OSError as e:
        raise ModelFileError(f"model {p} can't be read: {e.strerror or e}") from e


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
    n_tensors, n_kv = r.num("Q"), r.num("Q")
    fields: Dict[str, Any] = {}
    lengths: Dict[str, int] = {}
    for _ in range(n_kv):
        key = r.string()
        value, n = r.value(r.num("I"))
        fields[key] = value
        if n is not None:
            lengths[key] = n
    end = 0
    for _ in range(n_tensors):
        r.string()
        dims = [r.num("Q") for _ in range(r.num("I"))]
        kind, offset = r.num("I"), r.num("Q")
        n_values = 1
        for d in dims:
            n_values *= d
        try:
            block, n_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        except (ValueError, KeyError):  # a type this table doesn't know: at least its start must be there
            block, n_bytes = 1, 0
        end = max(end, offset + n_values // block * n_bytes)
    align = int(fields.get("general.alignment", 32)) or 32
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
