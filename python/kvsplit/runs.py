# SPDX-License-Identifier: MIT
"""What every measuring command shares: its identity in results, its progress, and how it ends."""

from __future__ import annotations

import contextlib
import datetime
import math
import os
import platform
import secrets
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any, Callable, Iterator, List, NoReturn, Optional, Sequence, Tuple

import kvsplit
from kvsplit import _lock, native
from kvsplit.errors import KVSplitError, why
from kvsplit.results import Provenance

# ---- identity


def new_id() -> str:
    """A name for a run that no other has: local time and four digits by chance."""
    return f"{datetime.datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def now() -> str:
    """The time in UTC, as rows have it."""
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def without_folder(arg: str) -> str:
    """An argument; of an absolute path the name alone."""
    flag, eq, value = arg.partition("=") if arg.startswith("--") else ("", "", arg)
    return f"{flag}{eq}{Path(value).name}" if os.path.isabs(value) else arg


def command_line() -> List[str]:
    """This process's command line as results record it: of absolute paths the names alone.

    Results are published; where a user keeps files is nobody's business, and hashes say which files they were.
    """

    program = Path(sys.argv[0]).name
    return ["kvsplit" if program == "__main__.py" else program, *map(without_folder, sys.argv[1:])]


def devices(texts: Sequence[str]) -> Tuple[str, str, str]:
    """``cpu_info``, ``gpu_info`` and ``backends`` of a row, from the library's ``NAME (DESCRIPTION)``."""
    cpus: List[str] = []
    gpus: List[str] = []
    names: List[str] = []
    for text in texts:
        name, _, what = text.partition(" (")
        names.append(name)
        (cpus if name.startswith("CPU") else gpus).append(what[:-1])
    return ", ".join(cpus), ", ".join(gpus), ",".join(names)


def provenance(
    lib: native.Native, run_id: str, model: Path, sha256: str, command: Sequence[str], **more: Any
) -> Provenance:
    """Where the rows of a run come from that uses this process's library.

    Args:
        lib: the library.
        run_id: of :func:`new_id`.
        model, sha256: the GGUF file.
        command: as :func:`command_line` gives it.
        **more: further fields of :class:`kvsplit.results.Provenance`.
    """
    cpu, gpu, backends = devices(lib.devices())
    known = {"cpu_info": cpu, "gpu_info": gpu, "backends": backends}
    return Provenance(
        run_id=run_id,
        kvsplit_version=kvsplit.__version__,
        lock=f"{_lock.NAME} {lib.build.version}",
        source_sha256=lib.build.source_sha256,
        patches_sha256=lib.build.patches_sha256,
        command=" ".join(command),
        model_filename=model.name,
        model_sha256=sha256,
        python=platform.python_version(),
        platform=platform.platform(),
        **{**known, **more},
    )


# ---- progress


class Progress:
    """A bar on stderr with the time that is left, if that is a terminal."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._task: Any = None
        self._began: Optional[Tuple[float, float]] = None

    def __enter__(self) -> Progress:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

            self._bar = Progress(
                BarColumn(bar_width=24), TextColumn("{task.fields[count]}"), TimeElapsedColumn(),
                TextColumn("{task.fields[left]}"), TextColumn("{task.description}"),
                console=Console(stderr=True), transient=True,
            )  # fmt: skip
            self._bar.start()
            self._task = self._bar.add_task("", total=None, count="", left="")
        return self

    def step(self, what: str, i: float, n: float) -> None:
        """Show what is being done; ``i`` of ``n`` is finished, in any unit in which equal parts take equal time."""
        if self._bar is None:
            return
        count = f"{i}/{n}" if n and isinstance(i, int) and isinstance(n, int) else f"{100 * i / n:.0f} %" if n else ""
        left = self._left(time.monotonic(), i, n)
        self._bar.update(self._task, description=what, completed=i, total=n or None, count=count, left=left)

    def _left(self, at: float, i: float, n: float) -> str:
        """Time that is left."""
        if n and (self._began is None or i == self._began[1]):
            self._began = (at, i)  # what comes before the first part is not counted
        if self._began is None or i <= self._began[1] or i == n:
            return ""
        began, first = self._began
        minutes = (at - began) / (i - first) * (n - i) / 60
        return f"{minutes / 60:.1f} h left" if minutes >= 90 else f"{math.ceil(minutes)} min left"

    def say(self, message: str) -> None:
        """A line on stderr, above the bar."""
        if self._bar is not None:
            self._bar.console.print(message, markup=False, highlight=False)
        else:
            print(message, file=sys.stderr)

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.stop()


# ---- the end


class Terminated(BaseException):
    """SIGTERM, or SIGHUP of a terminal that closes: tools that run are ended and temporary files removed.

    No KeyboardInterrupt, of which typer makes an exit with 130.
    """


def _on_end(signum: int, frame: object) -> NoReturn:
    raise Terminated


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM and SIGHUP raise :class:`Terminated`, in the main thread; a SIGHUP that ``nohup`` ignores stays so."""
    before = {}
    if threading.current_thread() is threading.main_thread():
        before[signal.SIGTERM] = signal.signal(signal.SIGTERM, _on_end)
        hangup = getattr(signal, "SIGHUP", None)
        if hangup is not None and signal.getsignal(hangup) == signal.SIG_DFL:
            before[hangup] = signal.signal(hangup, _on_end)
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def reader_has_gone() -> int:
    """Whoever read our output has gone: keep Python from complaining when it flushes. Returns the exit code."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 141


def flushed(code: int, fail: Callable[[str, int], int]) -> int:
    """Hand over what is buffered on stdout, while a full disk can still be told. Returns the exit code.

    Args:
        code: the exit code so far; not 0: the reason was said.
        fail: says a message and returns the code that it is given.
    """
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        return reader_has_gone()
    except OSError as e:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more
        return code or fail(f"the output can't be written ({why(e)})", 1)
    return code


def script(name: str, body: Callable[[], int], kept: str) -> int:
    """Run a script's body and return its exit code; errors become one line on stderr.

    Args:
        name: of the script, for messages.
        body: returns the exit code.
        kept: what becomes of the rows when it is interrupted.
    """

    def fail(message: str, code: int) -> int:
        print(f"{name}: error: {message}", file=sys.stderr)
        return code

    def run() -> int:
        try:
            return body()
        except Terminated:
            return fail(f"terminated; {kept}", 143)
        except KeyboardInterrupt:
            return fail(f"interrupted; {kept}", 130)
        except KVSplitError as e:
            return fail(str(e), e.exit_code)
        except BrokenPipeError:
            return reader_has_gone()
        except OSError as e:
            return fail(f"{e.filename or 'the output'} can't be read or written ({why(e)})", 1)

    with terminable():
        return flushed(run(), fail)
