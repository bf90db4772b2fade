# SPDX-License-Identifier: MIT
"""The native tools: find them, run them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, List, Optional, Sequence, TextIO

from kvsplit import native
from kvsplit.errors import NativeMissingError, ToolError, UsageError

_EXE = ".exe" if sys.platform == "win32" else ""

#: What a complete build holds.
NAMES = ("llama-cli", "llama-completion", "llama-server", "llama-bench", "llama-perplexity", "llama-quantize")


def find(name: str) -> Path:
    """Path of a tool.

    Raises:
        NativeMissingError: it isn't built; the message says where it was looked for.
    """
    dirs = native.bin_dirs()
    for folder in dirs:
        path = folder / (name + _EXE)
        if native._is_file(path) and os.access(path, os.X_OK):
            return path
    raise NativeMissingError(
        f"{name} was not found (looked in {', '.join(map(str, dirs))}); "
        "build the project and set KVSPLIT_NATIVE_DIR to its build folder, or install the package with pip"
    )


def device_args(device: str) -> List[str]:
    """Arguments that make a tool compute on a device.

    Args:
        device: ``auto`` leaves it to the tool, ``cpu`` uses none but the CPU, anything else is a device's name
            as ``kvsplit doctor`` lists it.
    """
    if device == "auto":
        return []
    return ["-ngl", "0", "-dev", "none"] if device == "cpu" else ["-dev", device]


def check_device(device: str, names: Sequence[str]) -> None:
    """Refuse a device that the library doesn't have.

    Args:
        device: as :func:`device_args` takes it.
        names: the library's devices, ``NAME (DESCRIPTION)``.

    Raises:
        UsageError: lists what there is.
    """
    known = ["auto", "cpu", *(n.partition(" (")[0] for n in names if not n.startswith("CPU"))]
    if device not in known:
        raise UsageError(f"--device: {device!r} is none of {', '.join(known)}")


def environment() -> Dict[str, str]:
    """The environment for a tool: ours, without settings that would change what a measurement means."""
    return {k: v for k, v in os.environ.items() if not k.startswith("LLAMA_ARG_")}


def _tail(text: str, lines: int = 6) -> str:
    return "\n".join(text.rstrip().splitlines()[-lines:])


def failure(name: str, returncode: int, stderr: str) -> ToolError:
    """The error for a tool that ended badly: its own words, or the signal."""
    if returncode < 0:
        try:
            why = f"was killed by {signal.Signals(-returncode).name}"
        except ValueError:
            why = f"was killed by signal {-returncode}"
        if returncode == -9:
            why += " (out of memory?)"
    else:
        why = f"ended with exit code {returncode}"
    return ToolError(f"{name} {why}\n{_tail(stderr)}".rstrip(), returncode=returncode, stderr=_tail(stderr, 40))


@dataclass(frozen=True)
class Finished:
    """A tool that ended well.

    Attributes:
        args: the whole command line.
        stdout, stderr: what it wrote.
        peak_rss: its largest resident memory in bytes; None where the system doesn't tell.
    """

    args: List[str]
    stdout: str
    stderr: str
    peak_rss: Optional[int] = None


def _wait(proc: "subprocess.Popen[str]") -> Optional[int]:
    """Wait for the end, set the return code, and tell the peak memory where the system knows it."""
    if not hasattr(os, "wait4"):
        proc.wait()
        return None
    _, status, usage = os.wait4(proc.pid, 0)
    proc.returncode = os.waitstatus_to_exitcode(status)
    return int(usage.ru_maxrss) * (1 if sys.platform == "darwin" else 1024)


def run(
    name: str,
    args: Sequence[str],
    *,
    progress: Optional[TextIO] = None,
    env: Optional[Dict[str, str]] = None,
) -> Finished:
    """Run a tool to its end and return what it wrote.

    Args:
        name: of the tool.
        args: its arguments.
        progress: where its stderr is copied while it runs; None keeps it quiet.
        env: environment; None means :func:`environment`.

    Raises:
        NativeMissingError: it isn't built.
        ToolError: it ended with an error or by a signal.
    """
    return run_command([str(find(name)), *args], name, progress=progress, env=env)


def run_command(
    cmd: List[str],
    name: str,
    *,
    progress: Optional[TextIO] = None,
    env: Optional[Dict[str, str]] = None,
) -> Finished:
    """As :func:`run`, for any command; ``name`` is what messages call it."""
    proc = subprocess.Popen(
        cmd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment() if env is None else env,
        text=True,
        encoding="utf-8",
        errors="replace",
    )
    err: List[str] = []

    def drain() -> None:
        assert proc.stderr is not None
        for line in proc.stderr:
            err.append(line)
            if progress is not None:
                progress.write(line)
                progress.flush()

    thread = threading.Thread(target=drain, daemon=True)
    thread.start()
    try:
        assert proc.stdout is not None
        out = proc.stdout.read()
        peak = _wait(proc)
    except BaseException:
        proc.terminate()
        try:
            proc.wait(5)
        except subprocess.TimeoutExpired:
            proc.kill()
            proc.wait()
        raise
    finally:
        thread.join(timeout=5)
        for pipe in (proc.stdout, proc.stderr):
            if pipe is not None:
                pipe.close()
    stderr = "".join(err)
    if proc.returncode != 0:
        raise failure(name, proc.returncode, stderr or out)
    return Finished(cmd, out, stderr, peak)


def check() -> None:
    """Make sure that the tools belong to this package: they use the library that lies with them.

    Raises:
        NativeMissingError: no library lies there.
        NativeMismatchError: it has no patches, or others.
    """
    path = native.library_path()
    if native.load().path.resolve() != path.resolve():  # LLAMA_CPP_LIB_PATH names another for the bindings
        native.Native(path)


def exec_tool(name: str, args: Sequence[str]) -> int:
    """Run a tool on the user's own terminal and return its exit status. It ends when we are interrupted.

    Raises:
        NativeError: it isn't built, or is not of this package.
    """
    cmd = [str(find(name)), *args]
    check()
    proc = subprocess.Popen(cmd)
    try:
        return proc.wait()
    except BaseException:
        proc.terminate()
        try:
            proc.wait(5)
        except subprocess.TimeoutExpired:
            proc.kill()
            proc.wait()
        raise
