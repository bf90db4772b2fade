# SPDX-License-Identifier: MIT
"""Every error that the package raises on purpose.

All derive from :class:`KVSplitError`, say what was given and name the way out.
``exit_code`` is what the command line returns: 2 for a wrong argument, 1 for everything else.
"""

from __future__ import annotations

import errno
import unicodedata
from typing import Optional


def why(e: OSError) -> str:
    """The system's reason for an error, as messages give it; a disk or a quota that is used up is called so."""
    if e.errno in (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)):
        return f"disk full: {e.strerror}"
    return str(e.strerror or e)


def shown(value: object, limit: int = 80) -> str:
    """A value that somebody else wrote, as messages show it: in quotes, escaped, and not too long."""
    if isinstance(value, int) and value.bit_length() > 4 * limit:  # Python writes no number of thousands of digits
        return f"a number of {value.bit_length()} bits"
    if isinstance(value, (str, bytes)) and len(value) > limit:
        value, more = value[:limit], f"... ({len(value)} long)"
    else:
        more = ""
    text = repr(value)
    return (text if len(text) <= 10 * limit else text[: 10 * limit] + "...") + more


def printable(text: str) -> str:
    """A text that somebody else wrote, for a terminal, a figure or a page.

    Controls (of a terminal, of the direction of writing), ends of lines, halves of characters and code points that are
    none become escapes: ``\\x1b``.
    """
    if text.isprintable():
        return text
    hidden = ("Cc", "Cf", "Cs", "Cn", "Zl", "Zp")
    return "".join(c.encode("unicode_escape").decode("ascii") if unicodedata.category(c) in hidden else c for c in text)


class KVSplitError(Exception):
    """Base of all errors of this package."""

    exit_code = 1


class UsageError(KVSplitError, ValueError):
    """An argument is wrong."""

    exit_code = 2


class KVQuantError(UsageError):
    """A SPEC, PRESET or cache type can't be understood.

    Attributes:
        argument: name of the argument, for example ``kvq_key``.
        given: what was passed.
    """

    def __init__(self, message: str, *, argument: str = "", given: object = None) -> None:
        super().__init__(message)
        self.argument = argument
        self.given = given


class CacheTypeError(KVQuantError):
    """The named or numbered type can't be stored in a KV cache."""


class FlashAttentionError(UsageError):
    """Quantized values need flash attention, and it is off."""


class HeadSizeError(UsageError):
    """The blocks of a cache type don't divide the model's head size."""


class MLAError(UsageError):
    """Keys and values of an MLA model share one tensor and can't have types of their own."""


class ModelFileError(KVSplitError, ValueError):
    """The model file is missing, truncated or not a GGUF."""


class UnsupportedModelError(KVSplitError, ValueError):
    """The memory of this architecture can't be computed exactly from its metadata."""


class ContextError(KVSplitError, ValueError):
    """The native library refused to make a context; the message carries its reason."""


class ContextMemoryError(ContextError, MemoryError):
    """The context doesn't fit into memory.

    Attributes:
        kv_bytes: bytes of the KV cache that was asked for; None if not known.
    """

    def __init__(self, message: str, *, kv_bytes: Optional[int] = None) -> None:
        super().__init__(message)
        self.kv_bytes = kv_bytes


class DownloadError(KVSplitError):
    """A model couldn't be downloaded."""


class OfflineError(DownloadError):
    """The package index can't be reached, or doesn't carry the package."""


class DownloadInterruptedError(DownloadError):
    """A download was interrupted; finished parts are kept."""

    exit_code = 130


class HashMismatchError(DownloadError):
    """A downloaded file isn't the one that was pinned; nothing of it is kept."""


class CacheFolderError(KVSplitError):
    """The cache folder can't be written, or its disk is full."""


class NativeError(KVSplitError, RuntimeError):
    """The native libraries or tools can't be used."""


class NativeMissingError(NativeError):
    """No native library or tool was found."""


class NativeMismatchError(NativeError):
    """The native library was built from another source or other patches than this package expects."""


class ToolError(KVSplitError):
    """A native tool failed.

    Attributes:
        returncode: its exit status; negative for a signal.
        stderr: the end of what it wrote there.
    """

    def __init__(self, message: str, *, returncode: int = 1, stderr: str = "") -> None:
        super().__init__(message)
        self.returncode = returncode
        self.stderr = stderr


class ResultError(KVSplitError, ValueError):
    """A tool's output or a results file doesn't have the form that is expected."""


class NotFiniteError(ResultError):
    """A measurement gave NaN or infinity: attention broke down."""


class CommandError(KVSplitError):
    """The command can't be started; ``exit_code`` is 127 if it wasn't found and 126 if it can't be executed."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class StateError(KVSplitError, RuntimeError):
    """A saved state doesn't belong to this model and its cache, or is damaged."""


class CacheWarning(UserWarning):
    """What was asked for works, and is known or seen to be worse than it could be."""
