# SPDX-License-Identifier: MIT
"""The real memory of a command and everything it starts, sampled while it runs.

:func:`run` passes input, output and exit code of the command through and writes one JSON object a line: a header,
the samples, a summary. :func:`read` reads such a file, also one that a kill has cut;
:mod:`kvsplit.capture_pictures` shows it. Sizes are in bytes, times in seconds.

The command stays in the process group that it was started from, so that it can use the terminal. A signal that the
terminal sends reaches it without us; one that is sent to us alone is passed on to all of its processes.
"""

from __future__ import annotations

import collections
import contextlib
import csv
import ctypes
import math
import mmap
import os
import platform
import re
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import (
    Any,
    Callable,
    Collection,
    Deque,
    Dict,
    Iterator,
    List,
    NamedTuple,
    Optional,
    Sequence,
    Set,
    Tuple,
    Union,
    get_type_hints,
)

import psutil

if sys.platform != "win32":
    import resource

import kvsplit
from kvsplit import runs
from kvsplit.errors import CacheFolderError, CommandError, ResultError, UsageError, printable, why
from kvsplit.policy import KVQuant
from kvsplit.results import fits, json_line, parse_line, short

SCHEMA = 1
#: Seconds from one sample to the next.
INTERVAL = 0.1
#: The shortest interval: below it, reading takes a share of a core that the command would feel.
MIN_INTERVAL = 0.01
#: Seconds from SIGTERM to SIGKILL, and the time in which a second Ctrl-C kills.
GRACE = 5.0

_GPU_INTERVAL = 1.0
# After a sample that took 1 ms of a core we rest for 9: sampling never takes more than a tenth of a core.
_REST = 9
# The end of the command is a signal; where another thread swallows it, it is seen after this time at the latest.
_POLL = 0.25
# Between samples that are far apart, thresholds are looked at so often.
_GUARD = 0.1
# Some programs send a signal to their child and then to its whole group: what follows at once is the same one again.
_ECHO = 0.2
_SIZES = ("rss", "pss", "anon", "private", "swap", "gpu")
_WINDOWS = os.name == "nt"
_RSS_UNIT = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss


# ---- one process


class Reading(NamedTuple):
    """Memory of one process; None is what the system doesn't tell."""

    rss: int
    pss: Optional[int] = None
    anon: Optional[int] = None
    private: Optional[int] = None
    swap: Optional[int] = None
    exact: bool = True  # False: only RSS could be read, and stands for the others


class Host:
    """How a system tells of its processes; through psutil, as macOS does."""

    #: what readings come from.
    kind = "psutil"

    def children(self, roots: Sequence[int], others: Collection[int] = ()) -> List[int]:
        """All processes that descend from some, without themselves, and without others and what descends from those."""
        parents: Dict[int, List[int]] = {}
        for pid, parent in self._parents():
            parents.setdefault(parent, []).append(pid)
        found: List[int] = []
        queue = list(roots)
        while queue:
            for child in parents.get(queue.pop(), []):
                if child not in found and child not in roots and child not in others:
                    found.append(child)
                    queue.append(child)
        return found

    def _parents(self) -> Iterator[Tuple[int, int]]:
        for p in psutil.process_iter(["ppid"]):
            if p.info["ppid"] is not None:
                yield p.pid, p.info["ppid"]

    def started(self, pid: int) -> Optional[float]:
        """When a process started, in any unit: with the pid it says which one it is. None if it has ended."""
        try:
            p = psutil.Process(pid)
            return None if p.status() == psutil.STATUS_ZOMBIE else float(p.create_time())
        except psutil.Error:
            return None

    def memory(self, pid: int) -> Optional[Reading]:
        """Memory of a process; None if it has ended."""
        try:
            p = psutil.Process(pid)
            try:
                full = p.memory_full_info()
                return Reading(int(full.rss), private=int(full.uss))
            except psutil.AccessDenied:
                rss = int(p.memory_info().rss)
                return Reading(rss, private=rss, exact=False)
        except psutil.Error:
            return None

    def quick(self, pid: int) -> int:
        """Resident and swapped memory of a process, which takes no time to read: never less than its PSS and swap."""
        try:
            return int(psutil.Process(pid).memory_info().rss)
        except psutil.Error:
            return 0


class LinuxHost(Host):
    """Linux: PSS and its parts from ``smaps_rollup``; where that can't be read, RSS from ``statm``."""

    kind = "smaps_rollup"

    def __init__(self, proc: Union[str, "os.PathLike[str]"] = "/proc") -> None:
        self._proc = os.fspath(proc)
        # Not every kernel lists children; the others make us read the parent of every process.
        self._listed = os.path.exists(f"{self._proc}/thread-self/children")
        if not os.path.exists(f"{self._proc}/self/smaps_rollup"):
            self.kind = "statm"

    def _read(self, path: str) -> bytes:
        with open(f"{self._proc}/{path}", "rb", buffering=0) as f:
            return f.read()

    def children(self, roots: Sequence[int], others: Collection[int] = ()) -> List[int]:
        if not self._listed:
            return super().children(roots, others)
        found: List[int] = []
        queue = list(roots)
        while queue:
            pid = queue.pop()
            try:
                threads = os.listdir(f"{self._proc}/{pid}/task")
            except OSError:
                continue
            for thread in threads:
                with contextlib.suppress(OSError):
                    for child in map(int, self._read(f"{pid}/task/{thread}/children").split()):
                        if child not in found and child not in roots and child not in others:
                            found.append(child)
                            queue.append(child)
        return found

    def _stat(self, pid: Union[int, str]) -> Optional[List[bytes]]:
        """Fields of ``stat`` from the state on: the name before them may hold blanks and brackets."""
        try:
            return self._read(f"{pid}/stat").rpartition(b")")[2].split()
        except OSError:
            return None

    def _parents(self) -> Iterator[Tuple[int, int]]:
        for name in os.listdir(self._proc):
            if name.isdigit():
                stat = self._stat(name)
                if stat:
                    yield int(name), int(stat[1])

    def started(self, pid: int) -> Optional[float]:
        stat = self._stat(pid)
        return float(stat[19]) if stat and stat[0] not in (b"Z", b"X") else None

    def memory(self, pid: int) -> Optional[Reading]:
        sizes: Dict[bytes, int] = {}
        try:
            for line in self._read(f"{pid}/smaps_rollup").splitlines()[1:]:
                name, _, value = line.partition(b":")
                sizes[name] = int(value.split()[0]) * 1024
        except ProcessLookupError:
            return None
        except OSError:  # not ours to look into, or a kernel without the file; gone, if statm is gone too
            return self._resident(pid)
        if b"Pss" not in sizes:
            return None  # it has ended, and nobody has asked how
        private = sizes.get(b"Private_Clean", 0) + sizes.get(b"Private_Dirty", 0)
        swap = sizes.get(b"SwapPss", sizes.get(b"Swap", 0))
        return Reading(sizes.get(b"Rss", 0), sizes[b"Pss"], sizes.get(b"Pss_Anon"), private, swap)

    def quick(self, pid: int) -> int:
        try:
            lines = self._read(f"{pid}/status").splitlines()
        except OSError:
            return 0
        return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith((b"VmRSS:", b"VmSwap:")))

    def _resident(self, pid: int) -> Optional[Reading]:
        try:
            pages = [int(n) for n in self._read(f"{pid}/statm").split()]
        except OSError:
            return None
        rss, own = pages[1] * mmap.PAGESIZE, (pages[1] - pages[2]) * mmap.PAGESIZE
        return Reading(rss, rss, own, own, 0, exact=False) if rss else None


def this_host() -> Host:
    """What reads the processes of this system."""
    return LinuxHost() if sys.platform.startswith("linux") else Host()


class Tree:
    """A process and everything it started, also what outlives its own parent.

    Args:
        root: the process.
        host: reads the system.
        adopted: a process that orphans get as their parent, see :func:`_adopt`; None if there is none.
    """

    def __init__(self, root: int, host: Host, adopted: Optional[int] = None) -> None:
        self.root = root
        #: Processes that aren't the command's, and a lock to hold while one is started.
        self.others: Set[int] = set()
        self.lock = threading.Lock()
        self._host = host
        self._adopted = adopted
        self._known: Dict[int, float] = {}
        first = host.started(root)
        if first is not None:
            self._known[root] = first

    def pids(self) -> List[int]:
        """Those that live now."""
        with self.lock:
            for pid, started in list(self._known.items()):
                if self._host.started(pid) != started:
                    del self._known[pid]
            roots = list(self._known)
            if self._adopted is not None:
                roots.append(self._adopted)
            for pid in self._host.children(roots, self.others):
                if pid not in self._known:
                    new = self._host.started(pid)
                    if new is not None:
                        self._known[pid] = new
        return list(self._known)

    def send(self, signum: int) -> None:
        """Send a signal to all."""
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signum)

    def reap(self) -> None:
        """Ask for the end of orphans that are ours, so that no zombie stays. The root is left to its own waiter."""
        if self._adopted != os.getpid():
            return
        with self.lock:
            for pid in self._host.children([os.getpid()], [self.root, *self.others]):
                if self._host.started(pid) is None:
                    with contextlib.suppress(OSError):
                        os.waitpid(pid, os.WNOHANG)


@contextlib.contextmanager
def _adopt() -> Iterator[Optional[int]]:
    """Make orphans of the command ours where the system can (Linux), so that none escapes the count.

    Yields our pid, or None where it can't.
    """
    set_subreaper = 36  # PR_SET_CHILD_SUBREAPER, prctl(2)
    done = False
    if sys.platform.startswith("linux"):
        with contextlib.suppress(OSError, AttributeError):
            libc = ctypes.CDLL(None, use_errno=True)
            done = libc.prctl(set_subreaper, 1, 0, 0, 0) == 0
    try:
        yield os.getpid() if done else None
    finally:
        if done:
            libc.prctl(set_subreaper, 0, 0, 0, 0)


# ---- limits


@dataclass(frozen=True)
class Limit:
    """Memory that the command can have at most.

    Attributes:
        name: ``machine`` or ``container``.
        bytes: the limit.
        folder: of the control group; None for the machine.
        version: of the control groups, 1 or 2.
    """

    name: str
    bytes: int
    folder: Optional[Path] = None
    version: int = 2

    def used(self) -> Optional[int]:
        """What is in use; caches of files, which the kernel drops when it must, are not. None if it isn't told."""
        if self.folder is None:
            memory = psutil.virtual_memory()
            return int(memory.total - memory.available)
        name = "memory.current" if self.version == 2 else "memory.usage_in_bytes"
        try:
            used = int((self.folder / name).read_text())
            stat = dict(line.split() for line in (self.folder / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            return None
        for cache in ("inactive_file", "active_file"):
            used -= int(stat.get(f"total_{cache}", stat.get(cache, 0)))
        return max(0, used)


def _groups(root: Path) -> Iterator[Tuple[int, Path]]:
    """Folders of the control groups that we are in, from our own up, with their version."""

    def plain(path: str) -> str:
        return re.sub(r"\\([0-7]{3})", lambda m: chr(int(m.group(1), 8)), path)

    try:
        own = (root / "proc/self/cgroup").read_text("utf-8", "surrogateescape").splitlines()
        mounts = (root / "proc/self/mountinfo").read_text("utf-8", "surrogateescape").splitlines()
    except OSError:
        return
    paths: Dict[int, str] = {}
    for line in own:
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            paths[2] = path
        elif "memory" in controllers.split(","):
            paths[1] = path
    for line in mounts:
        left, _, right = line.partition(" - ")
        kind, _, options = right.split(" ", 2)
        version = {"cgroup2": 2, "cgroup": 1}.get(kind, 0)
        if version not in paths or (version == 1 and "memory" not in re.split("[, ]", options)):
            continue
        shown, at = map(plain, left.split(" ")[3:5])
        mount = root / at.lstrip("/")
        # a container may see its own group as the root, whatever the path says
        below = os.path.relpath(paths[version], shown)
        folder = mount if below.startswith("..") or not (mount / below).is_dir() else mount / below
        for level in (folder, *folder.parents):
            yield version, level
            if level == mount:
                break


def limits(root: Union[str, "os.PathLike[str]"] = "/") -> List[Limit]:
    """The machine's memory and what control groups allow of it, the smallest first.

    Args:
        root: where ``/proc`` and the control groups are looked for.
    """
    total = int(psutil.virtual_memory().total)
    found = [Limit("machine", total)]
    for version, folder in _groups(Path(root)):
        try:
            text = (folder / ("memory.max" if version == 2 else "memory.limit_in_bytes")).read_text().strip()
            allowed = total if text == "max" else int(text)
        except (OSError, ValueError):
            continue
        if allowed < total:  # "no limit" is a number beyond all memory in version 1
            found.append(Limit("container", allowed, folder, version))
    return sorted(found, key=lambda limit: limit.bytes)


_AMOUNT = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*(%|[KMGT]?i?B?)", re.IGNORECASE)


@dataclass(frozen=True)
class Threshold:
    """``85%`` of the machine's or the container's memory in use, or ``2GiB`` taken by the command."""

    text: str
    share: Optional[float] = None
    bytes: Optional[int] = None

    @classmethod
    def parse(cls, text: str, argument: str) -> Threshold:
        """Read one. KB, MB, ... are powers of 1000; KiB, MiB, ... and K, M, ... of 1024.

        Raises:
            UsageError: names the argument.
        """
        m = _AMOUNT.fullmatch(text.strip())
        if m is None:
            raise UsageError(f"{argument}: {text!r} is no amount of memory; write 85%, 2GiB or 800MB")
        number, unit = float(m.group(1)), m.group(2).lower()
        if unit == "%":
            if not 0 < number <= 100:
                raise UsageError(f"{argument}: {text!r} must be above 0% and at most 100%")
            return cls(text, share=number / 100)
        base = 1000 if unit in ("kb", "mb", "gb", "tb") else 1024
        size = int(number * base ** ("kmgt".find(unit[:1]) + 1 if unit[:1] in tuple("kmgt") else 0))
        if size < 1:
            raise UsageError(f"{argument}: {text!r} is no amount above 0")
        return cls(text, bytes=size)

    def passed(self, sample: Sample, tightest: Limit) -> str:
        """What has passed it, in words; empty if nothing has."""
        if self.share is not None and sample.used is not None and sample.used > self.share:
            return f"{100 * sample.used:.0f} % of the {tightest.name}'s memory ({size_text(tightest.bytes)}) is in use"
        if self.bytes is not None and sample.taken > self.bytes:
            return f"the command takes {size_text(sample.taken)} of memory"
        return ""


def size_text(size: float) -> str:
    """``812.3 MiB``, ``2.50 GiB``."""
    return f"{size / 2**20:.1f} MiB" if size < 2**30 else f"{size / 2**30:.2f} GiB"


# ---- the file


@dataclass
class Sample:
    """Memory of a command and all its processes at one time.

    Attributes:
        t: seconds since the command was started.
        n: processes.
        rss: resident memory, summed over processes: shared pages count once for each.
        pss: the same with every shared page divided by the number of processes that share it (Linux).
        anon: the part of pss that no file stands behind (Linux).
        private: what would be free if the command ended (USS).
        swap: swapped out (Linux).
        gpu: memory on GPUs, as nvidia-smi tells it.
        available: memory of the machine that is left.
        used: share of the memory that is in use, of the machine or of a container, whichever is tighter.
    """

    t: float
    n: int
    rss: int
    pss: Optional[int] = None
    anon: Optional[int] = None
    private: Optional[int] = None
    swap: Optional[int] = None
    gpu: Optional[int] = None
    available: Optional[int] = None
    used: Optional[float] = None

    @property
    def memory(self) -> int:
        """The best figure that there is of the command's memory: pss, else private, else rss."""
        return self.pss if self.pss is not None else self.private if self.private is not None else self.rss

    @property
    def taken(self) -> int:
        """Memory and swap: what a limit in bytes is held against."""
        return self.memory + (self.swap or 0)

    def to_json(self) -> Dict[str, Any]:
        """A line of the file."""
        return {"kind": "sample", **{k: v for k, v in vars(self).items() if v is not None}}


@dataclass
class Capture:
    """A captured command.

    Attributes:
        path: the file.
        header: what was captured, and how.
        samples: by time.
        summary: what came out; None if the capture was killed.
    """

    path: Path
    header: Dict[str, Any]
    samples: List[Sample] = field(default_factory=list)
    summary: Optional[Dict[str, Any]] = None

    @property
    def label(self) -> str:
        """The configuration, else the name of the command."""
        command = self.header.get("command") or [self.path.stem]
        return printable(str(self.header.get("config") or Path(str(command[0])).name))

    @property
    def peak(self) -> Optional[Sample]:
        """The sample with the most memory; None if there is none."""
        return max(self.samples, key=lambda s: s.memory, default=None)

    def peaks(self) -> Dict[str, int]:
        """The largest value of each size that was sampled."""
        return {n: max(v) for n in _SIZES if (v := [x for s in self.samples if (x := getattr(s, n)) is not None])}


_SAMPLE = get_type_hints(Sample)
# what readers of a file rely on; the rest is for the record
_HEADER = {
    "command": List[str], "config": Optional[str], "interval": Optional[float], "memory_limit": Optional[int],
    "memory_limit_of": Optional[str], "warn_at": Optional[str], "kill_at": Optional[str],
}  # fmt: skip
_SUMMARY = {"exit_code": int, "seconds": float, "approximate": int, "killed": Optional[str]}


def _check(record: Dict[str, Any], hints: Dict[str, Any]) -> None:
    """Refuse a line whose fields are missing or of another kind.

    Raises:
        ValueError: names the field.
    """
    for name, hint in hints.items():
        value = record.get(name)
        if not fits(value, hint) or (isinstance(value, float) and not math.isfinite(value)):
            raise ValueError(f"{name}: {short(value)}")
        if isinstance(value, (int, float)) and value < 0:
            raise ValueError(f"{name}: {value} is below 0")


def read(path: Union[str, "os.PathLike[str]"]) -> Capture:
    """Read a file, also one that is being written or that a kill has cut.

    Raises:
        UsageError: it can't be read.
        ResultError: it is no capture; names the line.
    """
    path = Path(path)
    try:
        data = path.read_bytes()
    except OSError as e:
        raise UsageError(f"{path} can't be read ({why(e)})") from None
    out: Optional[Capture] = None
    for i, line in enumerate(data.splitlines(keepends=True), 1):
        try:
            record = parse_line(line)
            kind = record.pop("kind")
            if kind == "header" and i == 1:
                if record["schema"] != SCHEMA:
                    raise ValueError(f"schema {short(record['schema'])}, this version reads {SCHEMA}")
                _check(record, _HEADER)
                for name in ("warn_at", "kill_at"):
                    if record.get(name) is not None:
                        Threshold.parse(record[name], name)
                out = Capture(path, record)
            elif out is None or out.summary is not None:
                raise ValueError("no header stands before it" if out is None else "the summary must be the last line")
            elif kind == "sample":
                _check(record, _SAMPLE)
                sample = Sample(**{k: v for k, v in record.items() if k in _SAMPLE})
                if out.samples and sample.t < out.samples[-1].t:
                    raise ValueError(f"t: {sample.t} comes after {out.samples[-1].t}")
                out.samples.append(sample)
            elif kind == "summary":
                _check(record, _SUMMARY)
                out.summary = record
            else:
                raise ValueError(f"{short(kind)} is no kind of line")
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            if not line.endswith(b"\n") and out is not None:
                break  # cut by a kill
            raise ResultError(f"{path}, line {i}: this is no capture ({e})") from None
    if out is None:
        raise ResultError(f"{path} is empty, no capture")
    return out


class _Writer:
    """The file of a capture. A disk that gets full ends the record, not the command."""

    def __init__(self, path: Path, say: Callable[[str], None]) -> None:
        self.path = path
        self._say = say
        self._full = False
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._f = open(path, "xb", buffering=0)  # noqa: SIM115 - closed by close()
        except FileExistsError:
            raise UsageError(f"--out: {path} is there already and stays as it is; give another name") from None
        except OSError as e:
            raise CacheFolderError(f"--out: {path} can't be written ({why(e)})") from None

    def write(self, record: Dict[str, Any]) -> None:
        """One line, at once: a kill loses none that was written."""
        if self._full:
            return
        try:
            rest = memoryview(json_line(record))
            while rest:
                rest = rest[self._f.write(rest) :]
        except OSError as e:
            self._full = True
            self._say(f"{self.path} can't be written any more ({why(e)}); the command goes on")

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.fsync(self._f.fileno())
        self._f.close()


# ---- signals


class _Signals:
    """Signals to us while the command runs, in order; and a sleep that they end.

    Whether the terminal sent one, so that the command has it too, is exact where the system tells who sent a signal
    (Linux). Elsewhere Ctrl-C counts as the terminal's if we are in its foreground.
    """

    PASSED_ON = (signal.SIGINT, signal.SIGTERM) if _WINDOWS else (
        signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT
    )  # fmt: skip

    def __init__(self, exact: bool = hasattr(signal, "sigtimedwait")) -> None:
        self.seen: Deque[Tuple[int, bool]] = collections.deque()
        self._exact = exact
        self._before: Dict[int, Any] = {}
        self._mask: Optional[Set[Any]] = None
        self._pipe: Tuple[int, int] = (-1, -1)
        self._wakeup = -1

    def __enter__(self) -> _Signals:
        for signum in (*self.PASSED_ON, signal.SIGCHLD):
            if signum == signal.SIGCHLD or signal.getsignal(signum) != signal.SIG_IGN:
                self._before[signum] = signal.signal(signum, self._note)
        if not self._exact:
            self._pipe = os.pipe()
            for fd in self._pipe:
                os.set_blocking(fd, False)
            self._wakeup = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        return self

    def block(self) -> None:
        """From now on signals wait for :meth:`sleep`; after the command has started, which must not inherit it."""
        if self._exact:
            self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, list(self._before))

    def _note(self, signum: int, frame: object) -> None:
        if signum != signal.SIGCHLD:
            self.seen.append((signum, signum == signal.SIGINT and self._in_foreground()))

    @staticmethod
    def _in_foreground() -> bool:
        try:
            fd = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
        except OSError:
            return False
        try:
            return os.tcgetpgrp(fd) == os.getpgrp()
        except OSError:
            return False
        finally:
            os.close(fd)

    def sleep(self, seconds: float) -> None:
        """Until a signal comes, also that a child has ended."""
        if self.seen:
            return
        if not self._exact:
            if select.select([self._pipe[0]], [], [], max(0.0, seconds))[0]:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._pipe[0], 512)
            return
        info = signal.sigtimedwait(list(self._before), max(0.0, seconds))
        if info is not None and info.si_signo != signal.SIGCHLD:
            self.seen.append((info.si_signo, info.si_code > 0))  # above 0: from the kernel, no process sent it

    def __exit__(self, *exc: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        if self._mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        if not self._exact:
            signal.set_wakeup_fd(self._wakeup)
            for fd in self._pipe:
                os.close(fd)


# ---- GPUs


class Gpu:
    """Memory that processes have on NVIDIA GPUs, asked from nvidia-smi in a thread of its own; never an error."""

    QUERY = ("--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits")

    def __init__(self, tree: Tree, interval: float = _GPU_INTERVAL) -> None:
        self._program = shutil.which("nvidia-smi")
        self._tree = tree
        self._interval = interval
        self._stop = threading.Event()
        self._known: Optional[Dict[int, int]] = None
        self._running: Optional["subprocess.Popen[str]"] = None
        self._thread = threading.Thread(target=self._ask, daemon=True)
        if self._program is not None:
            self._thread.start()

    @staticmethod
    def there() -> bool:
        """True if there is an nvidia-smi."""
        return shutil.which("nvidia-smi") is not None

    @staticmethod
    def parse(text: str) -> Dict[int, int]:
        """Bytes by pid. A process that uses several GPUs has several lines; what isn't known is left out."""
        found: Dict[int, int] = {}
        for row in csv.reader(text.splitlines()):
            with contextlib.suppress(ValueError, IndexError):
                pid, size = int(row[0]), int(row[1]) << 20
                found[pid] = found.get(pid, 0) + size
        return found

    def _ask(self) -> None:
        failures = 0
        while not self._stop.is_set() and failures < 3:
            began = time.monotonic()
            try:
                with self._tree.lock:  # nobody may take it for the command's
                    self._running = subprocess.Popen(
                        [str(self._program), *self.QUERY], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                        stderr=subprocess.DEVNULL, text=True, errors="replace", start_new_session=True,
                    )  # fmt: skip
                    self._tree.others.add(self._running.pid)
                out, _ = self._running.communicate(timeout=30)
                if self._running.returncode != 0:
                    raise ValueError
                self._known, failures = self.parse(out), 0
                self._tree.others.discard(self._running.pid)
            except (OSError, ValueError, subprocess.SubprocessError):
                self._known, failures = None, failures + 1
                self._end()
            # a slow one is asked less often: it takes a fifth of the time at most
            self._stop.wait(max(self._interval, 4 * (time.monotonic() - began)))

    def _end(self) -> None:
        if self._running is not None and self._running.poll() is None:
            with contextlib.suppress(OSError):
                self._running.kill()
            with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError):
                self._running.communicate(timeout=1)

    def used(self, pids: Sequence[int]) -> Optional[int]:
        """Bytes of some processes; None if it isn't known."""
        known = self._known
        return None if known is None else sum(known.get(pid, 0) for pid in pids)

    def stop(self) -> None:
        """End the thread and what it runs."""
        self._stop.set()
        if self._program is not None:
            self._end()
            self._thread.join(timeout=2)


# ---- a run


@dataclass
class Outcome:
    """How a command ended.

    Attributes:
        exit_code: its own; 128 + N after signal N, and 137 if :attr:`killed`.
        path: the file.
        summary: the last line of it.
        killed: why it was stopped; empty if it wasn't.
        interrupted: the first signal that we got meanwhile; 0 if none.
    """

    exit_code: int
    path: Path
    summary: Dict[str, Any]
    killed: str = ""
    interrupted: int = 0


def _quiet(message: str) -> None:
    pass


def find_program(command: Sequence[str]) -> str:
    """Path of a command's program.

    Raises:
        UsageError: no command is given.
        CommandError: it isn't found (127) or can't be executed (126).
    """
    if not command or not command[0]:
        raise UsageError("no command was given: write it after --, as in: kvsplit capture -- COMMAND ARG...")
    name = command[0]
    found = shutil.which(name)
    if found is not None:
        return found
    if os.sep in name and os.path.exists(name):
        raise CommandError(f"{name} can't be executed: it is no program, or not allowed to be one", 126)
    raise CommandError(f"{name}: command not found", 127)


def check_interval(interval: float) -> float:
    """The interval, if it is one.

    Raises:
        UsageError: it isn't.
    """
    if not MIN_INTERVAL <= interval <= 3600:
        raise UsageError(f"--interval: {interval:g} is not between {MIN_INTERVAL:g} and 3600 seconds")
    return interval


def check_thresholds(warn: Optional[Threshold], kill: Optional[Threshold]) -> None:
    """Refuse a warning that could come only after the end.

    Raises:
        UsageError: both are shares or both bytes, and the warning isn't the smaller one.
    """
    if warn is None or kill is None or (warn.share is None) != (kill.share is None):
        return
    if (warn.share or warn.bytes or 0) >= (kill.share or kill.bytes or 0):
        raise UsageError(f"--warn-at {warn.text} would come too late: --kill-at {kill.text} is not above it")


def run(
    command: Sequence[str],
    out: Union[str, "os.PathLike[str]"],
    *,
    interval: float = INTERVAL,
    warn_at: Optional[Threshold] = None,
    kill_at: Optional[Threshold] = None,
    config: str = "",
    run_id: str = "",
    stdout: Optional[int] = None,
    say: Callable[[str], None] = _quiet,
    host: Optional[Host] = None,
) -> Outcome:
    """Run a command to its end and write its memory to a file while it runs. From the main thread.

    Args:
        command: program and arguments; it gets our stdin, stdout and stderr.
        out: file to write, a line at a time; it must not exist.
        interval: seconds between samples. They keep to multiples of it after the start; one that can't is left out.
        warn_at: ``say`` is told once when it is passed.
        kill_at: when it is passed all processes get SIGTERM, and after :data:`GRACE` SIGKILL.
        config: label for the record.
        run_id: for the record; a new one if empty.
        stdout: file descriptor that the command writes to instead of our stdout.
        say: is told what a user should know meanwhile.
        host: reads the processes; None means those of this system.

    Raises:
        UsageError: an argument is wrong.
        CommandError: the command can't be started; no file is left then.
        CacheFolderError: the file can't be written.
    """
    if _WINDOWS:
        raise UsageError("capture doesn't run on Windows: it needs process groups and signals of Linux or macOS")
    check_interval(interval)
    check_thresholds(warn_at, kill_at)
    program = find_program(command)
    host = host or this_host()
    tight = limits()
    writer = _Writer(Path(out), say)
    try:
        with _adopt() as adopted, _Signals() as signals:
            before = set(host.children([os.getpid()]))
            began = time.monotonic()
            try:
                proc = subprocess.Popen(list(command), executable=program, stdout=stdout)
            except OSError as e:
                writer.path.unlink()
                raise CommandError(f"{command[0]} can't be executed ({why(e)})", 126) from None
            own_rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RSS_UNIT
            signals.block()
            tree = Tree(proc.pid, host, adopted)
            tree.others |= before
            writer.write(
                {
                    "kind": "header",
                    "schema": SCHEMA,
                    "run_id": run_id or runs.new_id(),
                    "time": runs.now(),
                    "kvsplit_version": kvsplit.__version__,
                    "command": [runs.without_folder(a) for a in command],
                    "config": config,
                    "platform": platform.platform(),
                    "cpus": os.cpu_count(),
                    "page_size": mmap.PAGESIZE,
                    "memory_total": max(x.bytes for x in tight),
                    "memory_limit": tight[0].bytes,
                    "memory_limit_of": tight[0].name,
                    "interval": interval,
                    "sampler": host.kind,
                    "gpu_sampler": "nvidia-smi" if Gpu.there() else None,
                    "warn_at": warn_at.text if warn_at else None,
                    "kill_at": kill_at.text if kill_at else None,
                }
            )
            gpu = Gpu(tree)
            follower = _Follower(proc, tree, host, gpu, signals, writer, tight, began, interval, warn_at, kill_at, say)
            try:
                follower.follow()
            except BaseException:  # nothing of ours may leave a command behind that nobody watches
                tree.send(signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    proc.wait(GRACE)
                raise
            finally:
                gpu.stop()
                tree.reap()
            summary = follower.summary(own_rss)
            writer.write(summary)
    finally:
        writer.close()
    return Outcome(follower.exit_code, writer.path, summary, follower.killed, follower.interrupted)


class _Follower:
    """Follows one command from its start to its end."""

    def __init__(
        self,
        proc: "subprocess.Popen[bytes]",
        tree: Tree,
        host: Host,
        gpu: Gpu,
        signals: _Signals,
        writer: _Writer,
        tight: Sequence[Limit],
        began: float,
        interval: float,
        warn: Optional[Threshold],
        kill: Optional[Threshold],
        say: Callable[[str], None],
    ) -> None:
        self.killed = ""
        self.interrupted = 0
        self._proc, self._tree, self._host, self._gpu = proc, tree, host, gpu
        self._signals, self._writer, self._limits, self._began = signals, writer, tight, began
        self._interval, self._warn, self._kill, self._say = interval, warn, kill, say
        self._ended = 0.0
        self._tightest = tight[0]
        self._max_rss = 0
        self._slot = 0
        self._missed = 0
        self._samples = 0
        self._first = self._last = 0.0
        self._approximate = 0
        self._peaks: Dict[str, int] = {}
        self._peak = Sample(0.0, 0, 0)
        self._warned: Optional[float] = None
        self._last_signal = -math.inf
        self._by_second = False
        self._kill_due = math.inf  # when SIGKILL follows
        self._cpu = time.process_time()

    @property
    def exit_code(self) -> int:
        """As a shell gives it."""
        code = self._proc.returncode
        if self.killed:
            return 128 + signal.SIGKILL
        if self._by_second:
            return 128 + self.interrupted
        return code if code >= 0 else 128 - code

    def follow(self) -> None:
        """Until the command has ended; if it is being killed, all its processes."""
        due = self._began
        look = math.inf if self._warn is None and self._kill is None else self._began
        pace = _POLL if look == math.inf else _GUARD
        while True:
            while self._signals.seen:
                self._signal(*self._signals.seen.popleft())
            self._tree.reap()
            if self._poll() and not self._tree.pids():
                return
            now = time.monotonic()
            if now >= self._kill_due:
                self._tree.send(signal.SIGKILL)
                self._kill_due = now + _POLL  # again, for what was started in between
            if self._ended:
                # Others may be about to end as well. What doesn't is told as still running.
                patience = 2 * GRACE if self._kill_due < math.inf else 1.0 if self.interrupted else 0.1
                if now - self._ended > patience:
                    return
                self._signals.sleep(0.02)
                continue
            if now >= due:
                due = self._take(now)
                look = max(look, now + _GUARD)
            elif now >= look:
                look = now + _GUARD
                if self._near():
                    # what only looks near must not cost more than samples do
                    look = self._look(now) + _GUARD
            self._signals.sleep(min(due, self._kill_due, time.monotonic() + pace) - time.monotonic())

    def _poll(self) -> bool:
        if self._ended:
            return True
        pid, status, usage = os.wait4(self._proc.pid, os.WNOHANG)
        if pid == 0:
            return False
        self._ended = time.monotonic()
        self._proc.returncode = os.waitstatus_to_exitcode(status)
        self._max_rss = int(usage.ru_maxrss) * _RSS_UNIT
        return True

    def _take(self, now: float) -> float:
        """Sample, and tell when the next one is due: at a multiple of the interval, so that nothing drifts."""
        rested = self._look(now)
        following = max(self._slot + 1, math.ceil((rested - self._began) / self._interval))
        self._missed += following - self._slot - 1
        self._slot = following
        return self._began + following * self._interval

    def _look(self, now: float) -> float:
        """Sample now, and tell when we have rested from it."""
        cpu = time.thread_time()
        sample = self._sample(now - self._began)
        if sample is not None:
            self._keep(sample)
        return time.monotonic() + _REST * (time.thread_time() - cpu)

    def _near(self) -> bool:
        """True if a threshold may have been passed since the last sample, by figures that cost next to nothing."""
        waiting = [
            x for x, done in ((self._warn, self._warned is not None), (self._kill, bool(self.killed))) if x and not done
        ]
        shares = [x.share for x in waiting if x.share is not None]
        sizes = [x.bytes for x in waiting if x.bytes is not None]
        if shares and any((used := x.used()) is not None and used > min(shares) * x.bytes for x in self._limits):
            return True
        return bool(sizes) and sum(map(self._host.quick, self._tree.pids())) > min(sizes)

    def _sample(self, t: float) -> Optional[Sample]:
        pids = self._tree.pids()
        readings = [r for r in map(self._host.memory, pids) if r is not None]
        if not readings:
            return None
        self._approximate += sum(not r.exact for r in readings)

        def total(name: str) -> Optional[int]:
            values = [getattr(r, name) for r in readings]
            return None if all(v is None for v in values) else sum(v or 0 for v in values)

        shares = [(used / x.bytes, x) for x in self._limits if (used := x.used()) is not None]
        share, self._tightest = max(shares, key=lambda pair: pair[0], default=(None, self._limits[0]))
        return Sample(
            t=round(t, 4), n=len(readings), rss=total("rss") or 0, pss=total("pss"), anon=total("anon"),
            private=total("private"), swap=total("swap"), gpu=self._gpu.used(pids),
            available=int(psutil.virtual_memory().available), used=None if share is None else round(share, 4),
        )  # fmt: skip

    def _keep(self, s: Sample) -> None:
        self._writer.write(s.to_json())
        self._first, self._last = (self._first if self._samples else s.t), s.t
        self._samples += 1
        for name in _SIZES:
            value = getattr(s, name)
            if value is not None:
                self._peaks[name] = max(value, self._peaks.get(name, 0))
        if s.memory > self._peak.memory:
            self._peak = s
        if self._warn is not None and self._warned is None:
            why = self._warn.passed(s, self._tightest)
            if why:
                self._warned = s.t
                self._say(f"warning: {why} after {s.t:.1f} s (--warn-at {self._warn.text})")
        if self._kill is not None and not self.killed:
            why = self._kill.passed(s, self._tightest)
            if why:
                self.killed = f"{why} after {s.t:.1f} s (--kill-at {self._kill.text})"
                self._say(f"the command is being stopped: {self.killed}")
                self._tree.send(signal.SIGTERM)
                self._kill_due = time.monotonic() + GRACE

    def _signal(self, signum: int, terminal: bool) -> None:
        now = time.monotonic()
        since = now - self._last_signal
        if since < _ECHO:
            return
        self._last_signal = now
        self.interrupted = self.interrupted or signum
        if since < GRACE:
            self._by_second = True
            self._kill_due = min(self._kill_due, now)
        elif not terminal:
            self._tree.send(signum)

    def summary(self, own_rss: int) -> Dict[str, Any]:
        """The last line. ``own_rss``: our peak when the command was started."""
        seconds = self._ended - self._began
        code = self._proc.returncode
        left = len(self._tree.pids())
        if left:
            self._say(f"{left} process{'es'[: 2 * (left != 1)]} of the command still run{'s'[: left == 1]}")
        # A new program inherits the peak of the process that started it, so below ours the kernel's says nothing; it
        # counts pages per CPU, and is some of them late.
        peak_rss = self._max_rss if self._max_rss > 1.05 * own_rss + 2**20 else None
        if peak_rss is not None and peak_rss > 1.05 * self._peaks.get("rss", 0) + 2**20:
            self._say(
                f"one process had {size_text(peak_rss)} of memory between two samples, more than any sample has; "
                f"a shorter --interval shows it"
            )
        return {
            "kind": "summary",
            "exit_code": self.exit_code,
            "signal": signal.Signals(-code).name if code < 0 else None,
            "interrupted": signal.Signals(self.interrupted).name if self.interrupted else None,
            "killed": self.killed or None,
            "warned_s": self._warned,
            "seconds": round(seconds, 4),
            "samples": self._samples,
            "missed": self._missed,
            "mean_interval": round((self._last - self._first) / (self._samples - 1), 5) if self._samples > 1 else None,
            "peak": self._peaks,
            "peak_s": self._peak.t if self._samples else None,
            "process_peak_rss": peak_rss,
            "approximate": self._approximate,
            "left_running": left,
            "sampler_cpu_s": round(time.process_time() - self._cpu, 4),
        }


# ---- several configurations


def slug(label: str) -> str:
    """A label as part of a file's name."""
    return re.sub(r"[^A-Za-z0-9.]+", "_", label).strip("_")


def configured(command: Sequence[str], quant: KVQuant) -> List[str]:
    """A command with a configuration: in place of ``{kvq}`` its preset, else its SPECs as two flags at the end.

    Raises:
        UsageError: there is a ``{kvq}``, and no preset says the configuration.
    """
    if not any("{kvq}" in a for a in command):
        return [*command, "--kvq-key", quant.key, "--kvq-val", quant.val]
    preset = "k16v16" if quant == KVQuant() else quant.label.lower()
    if not re.fullmatch(r"k[0-9]+v[0-9]+", preset):
        raise UsageError(f"--compare: {{kvq}} in the command takes a preset such as k8v4, and {quant.text} is none")
    return [a.replace("{kvq}", preset) for a in command]


def compared(captures: Sequence[Capture]) -> List[Dict[str, Any]]:
    """Peaks of captures beside each other, one object each; ``less`` and ``saving`` are against F16's peak."""
    base = next((c.peak.memory for c in captures if c.header.get("config") == "F16" and c.peak), None)
    rows: List[Dict[str, Any]] = []
    for c in captures:
        peak = c.peak
        row: Dict[str, Any] = {"label": c.label, "file": str(c.path), "peak": peak.memory if peak else None}
        row.update({f"peak_{name}": value for name, value in c.peaks().items()})
        if base and peak and c.header.get("config"):
            row.update(less=base - peak.memory, saving=1 - peak.memory / base)
        row["seconds"] = c.summary["seconds"] if c.summary else (c.samples[-1].t if c.samples else None)
        row["exit_code"] = c.summary["exit_code"] if c.summary else None
        rows.append(row)
    return rows


def unlike(captures: Sequence[Capture]) -> bool:
    """True if captures of one program differ in what it maps, as when another program shares its model meanwhile.

    Peaks differ by that too then, and :attr:`Sample.anon` is what compares.
    """
    peaks = [c.peak for c in captures if c.header.get("config")]
    mapped = [p.memory - p.anon for p in peaks if p is not None and p.anon is not None]
    # code and small files come and go by a few MiB
    return len(mapped) > 1 and max(mapped) - min(mapped) > 4 * 2**20 + 0.02 * max(mapped)
