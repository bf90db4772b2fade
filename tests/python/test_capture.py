# SPDX-License-Identifier: MIT
"""Capturing the memory of a command: what is counted, how it ends, what is written and drawn.

Commands are small Pythons and shells that take known amounts of memory or answer signals in known ways.
"""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import signal
import stat
import statistics
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree as ET
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence

import psutil
import pytest

from kvsplit import capture, capture_pictures, cli
from kvsplit.capture import Limit, Reading, Sample, Threshold
from kvsplit.errors import ResultError, UsageError

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads what only Linux tells")

MIB = 2**20
# Two runs of one interpreter differ by what its allocator rounds up to: an arena of 1 MiB. Memory of our own comes
# from mmap, to the page, and page tables are not counted.
ARENA = MIB

TAKE = """
import mmap, os, sys, time
kept = []
def take(mib, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS):
    if mib:
        m = mmap.mmap(-1, mib << 20, flags=flags)
        for i in range(0, mib << 20, mmap.PAGESIZE):
            m[i] = 1
        kept.append(m)
"""


def _python(body: str, *args: object) -> List[str]:
    return [sys.executable, "-S", "-c", TAKE + body, *map(str, args)]


def _run(tmp_path: Path, command: Sequence[str], **options: Any) -> capture.Capture:
    """Run it here and read its file."""
    path = tmp_path / f"{len(list(tmp_path.glob('*.jsonl')))}.jsonl"
    capture.run(command, path, **{"interval": 0.02, **options})
    return capture.read(path)


def _summary(c: capture.Capture) -> Dict[str, Any]:
    assert c.summary is not None
    return c.summary


def _wait_for(condition: Callable[[], Any], seconds: float = 20) -> Any:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        value = condition()
        if value:
            return value
        time.sleep(0.02)
    raise AssertionError("it didn't happen in time")


def _gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


# ---- what is counted


@linux
def test_memory_that_is_taken_in_steps_is_seen(tmp_path: Path) -> None:
    body = "take(int(sys.argv[1])); time.sleep(0.3); take(int(sys.argv[2])); time.sleep(0.3)"
    base = _run(tmp_path, _python(body, 0, 0))
    c = _run(tmp_path, _python(body, 24, 40))
    assert c.peak is not None and base.peak is not None
    assert abs(c.peak.memory - base.peak.memory - 64 * MIB) < ARENA
    assert abs(c.peaks()["anon"] - base.peaks()["anon"] - 64 * MIB) < ARENA
    assert abs(c.peaks()["private"] - base.peaks()["private"] - 64 * MIB) < ARENA
    first_step = base.peaks()["anon"] + 24 * MIB
    assert any(abs((s.anon or 0) - first_step) < ARENA for s in c.samples)
    assert _summary(c)["peak"] == c.peaks()
    assert all(s.n == 1 and s.rss >= (s.pss or 0) >= (s.anon or 0) > 0 and s.swap == 0 for s in c.samples[1:])


@linux
def test_pages_that_processes_share_are_counted_once(tmp_path: Path) -> None:
    shared = """
take(int(sys.argv[1]), mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)
for _ in range(2):
    if os.fork() == 0:
        for m in kept:
            for i in range(0, len(m), mmap.PAGESIZE):
                m[i] = 2
        time.sleep(0.8)
        os._exit(0)
for _ in range(2):
    os.wait()
"""
    base, c = _run(tmp_path, _python(shared, 0)), _run(tmp_path, _python(shared, 48))

    def settled(x: capture.Capture, name: str) -> float:
        # one process is read after the other, so while they touch pages that they share the sum is off
        return statistics.median(getattr(s, name) for s in x.samples if s.n == 3)

    assert max(s.n for s in c.samples) == 3
    assert abs(settled(c, "pss") - settled(base, "pss") - 48 * MIB) < 3 * ARENA  # three processes
    assert settled(c, "rss") - settled(base, "rss") > 3 * 48 * MIB - 3 * ARENA


def test_a_process_that_outlives_its_parent_is_counted(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    orphan = f"echo $$ >'{pid}'; exec sleep 30"
    said: List[str] = []
    c = _run(tmp_path, ["sh", "-c", f"(sh -c '{orphan.replace(chr(39), chr(34))}' &); exec sleep 0.5"], say=said.append)
    left = int(pid.read_text())
    try:
        if sys.platform.startswith("linux"):
            # after the short-lived shells have gone: the command itself, and the orphan
            assert c.samples[-1].n == 2
            assert _summary(c)["left_running"] == 1 and said == ["1 process of the command still runs"]
        assert not _gone(left), "what a command leaves running is not ours to end"
    finally:
        os.kill(left, signal.SIGKILL)
        if psutil.pid_exists(left) and psutil.Process(left).ppid() == os.getpid():
            os.waitpid(left, 0)


def test_processes_that_come_and_go_disturb_nothing(tmp_path: Path) -> None:
    # children, and orphans: a process whose parent has gone
    loop = "i=0; while [ $i -lt 100 ]; do (true; true) & (sleep 0.01 &); i=$((i+1)); done; wait; sleep 0.2"
    c = _run(tmp_path, ["sh", "-c", loop], interval=0.01)
    assert _summary(c)["exit_code"] == 0 and c.samples
    zombies = [p for p in psutil.Process().children() if p.status() == psutil.STATUS_ZOMBIE]
    assert not zombies


class _Host(capture.Host):
    """A system that is made up: pid -> (parent, start, memory)."""

    kind = "made up"

    def __init__(self, table: Dict[int, Any]) -> None:
        self.table = table

    def _parents(self) -> Any:
        return [(pid, row[0]) for pid, row in self.table.items()]

    def started(self, pid: int) -> Optional[float]:
        return self.table[pid][1] if pid in self.table else None

    def memory(self, pid: int) -> Optional[Reading]:
        return self.table[pid][2] if pid in self.table else None


def test_a_tree_keeps_its_processes_and_no_others() -> None:
    table: Dict[int, Any] = {10: (1, 1.0, None), 11: (10, 2.0, None), 12: (11, 3.0, None), 13: (1, 4.0, None)}
    tree = capture.Tree(10, _Host(table))
    assert sorted(tree.pids()) == [10, 11, 12]
    del table[11]
    table[12] = (1, 3.0, None)  # its parent has ended, init has it now
    assert sorted(tree.pids()) == [10, 12]
    table[14] = (12, 5.0, None)  # and goes on as before
    assert sorted(tree.pids()) == [10, 12, 14]
    del table[14]
    table[12] = (1, 9.0, None)  # another process with the same number
    assert tree.pids() == [10]


def test_a_process_of_ours_is_not_the_commands() -> None:
    me = os.getpid()
    table: Dict[int, Any] = {10: (me, 1.0, None), 20: (me, 2.0, None), 30: (me, 3.0, None), me: (1, 0.0, None)}
    tree = capture.Tree(10, _Host(table), adopted=me)
    tree.others.add(20)
    assert sorted(tree.pids()) == [10, 30]


def test_a_process_that_vanishes_before_it_is_read_is_left_out(tmp_path: Path) -> None:
    real = capture.this_host()

    class Vanishing(type(real)):  # type: ignore[misc]
        def children(self, roots: Sequence[int], others: Any = ()) -> List[int]:
            return [*super().children(roots, others), 999_999_999]

        def started(self, pid: int) -> Optional[float]:
            return 1.0 if pid == 999_999_999 else super().started(pid)

    c = _run(tmp_path, ["sleep", "0.2"], host=Vanishing())
    assert _summary(c)["exit_code"] == 0 and all(s.n == 1 for s in c.samples)


# ---- how systems tell


def _proc(
    root: Path, pid: int, parent: int, *, name: str = "x", state: str = "S", children: Any = (), **files: str
) -> None:
    folder = root / str(pid)
    (folder / "task" / str(pid)).mkdir(parents=True)
    (folder / "task" / str(pid) / "children").write_text(" ".join(map(str, children)))
    after = [state, parent, *[0] * 17, 100 + pid, *[0] * 20]
    (folder / "stat").write_text(f"{pid} ({name}) " + " ".join(map(str, after)))
    for file, text in files.items():
        (folder / file).write_text(text)


ROLLUP = """55d0-7ffc ---p 00000000 00:00 0  [rollup]
Rss:    400 kB
Pss:    300 kB
Pss_Anon:   200 kB
Private_Clean:   10 kB
Private_Dirty:   90 kB
Swap:   64 kB
SwapPss:   32 kB
"""


@linux
def test_linux_is_read_from_its_files(tmp_path: Path) -> None:
    (tmp_path / "thread-self").mkdir()
    (tmp_path / "thread-self" / "children").touch()
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "smaps_rollup").touch()
    _proc(tmp_path, 5, 1, name="a) (b c", children=[6], smaps_rollup=ROLLUP, status="VmRSS:\t400 kB\nVmSwap:\t64 kB\n")
    _proc(tmp_path, 6, 5, children=[7], statm="900 100 40 1 0 60 0")
    _proc(tmp_path, 7, 6, state="Z", smaps_rollup="")
    host = capture.LinuxHost(tmp_path)
    assert host.kind == "smaps_rollup"
    assert host.memory(5) == Reading(400 << 10, 300 << 10, 200 << 10, 100 << 10, 32 << 10)
    assert host.quick(5) == 464 << 10
    page = os.sysconf("SC_PAGE_SIZE")
    assert host.memory(6) == Reading(100 * page, 100 * page, 60 * page, 60 * page, 0, exact=False)
    assert host.memory(7) is None and host.memory(8) is None and host.quick(8) == 0
    assert host.started(5) == 105 and host.started(7) is None and host.started(8) is None
    assert host.children([5]) == [6, 7]
    (tmp_path / "thread-self" / "children").unlink()  # a kernel that doesn't list them
    shutil.rmtree(tmp_path / "self")
    bare = capture.LinuxHost(tmp_path)
    assert bare.kind == "statm" and sorted(bare.children([5])) == [6, 7]


@linux
def test_both_ways_to_find_children_agree() -> None:
    proc = subprocess.Popen(["sh", "-c", "sleep 20 & sleep 20 & wait"])
    try:
        host, scanning = capture.LinuxHost(), capture.LinuxHost()
        scanning._listed = False
        _wait_for(lambda: len(scanning.children([proc.pid])) == 2)
        assert sorted(host.children([proc.pid])) == sorted(scanning.children([proc.pid]))
        assert sorted(capture.Host().children([proc.pid])) == sorted(scanning.children([proc.pid]))
    finally:
        for pid in [*capture.Host().children([proc.pid]), proc.pid]:
            os.kill(pid, signal.SIGKILL)
        proc.wait()


def test_readings_that_are_only_rss_are_told(tmp_path: Path) -> None:
    class Closed(capture.Host):
        kind = "closed"

        def memory(self, pid: int) -> Optional[Reading]:
            return Reading(5 * MIB, 5 * MIB, 5 * MIB, 5 * MIB, 0, exact=False)

    c = _run(tmp_path, ["sleep", "0.2"], host=Closed())
    assert _summary(c)["approximate"] == len(c.samples) > 0 and c.header["sampler"] == "closed"


def test_macos_through_psutil(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The way that macOS takes, on a psutil that is made up as macOS fills it."""

    class Error(Exception):
        pass

    class AccessDenied(Error):
        pass

    class Process:
        def __init__(self, pid: int) -> None:
            if pid not in (1, 2, 3):
                raise Error
            self.pid, self.info = pid, {"ppid": {1: 0, 2: 1, 3: 2}[pid]}

        def memory_full_info(self) -> Any:
            if self.pid == 3:
                raise AccessDenied
            return SimpleNamespace(rss=50 * MIB, vms=1, pfaults=1, pageins=1, uss=30 * MIB)

        def memory_info(self) -> Any:
            return SimpleNamespace(rss=70 * MIB, vms=1)

        def status(self) -> str:
            return "zombie" if self.pid == 3 else "running"

        def create_time(self) -> float:
            return 100.0 + self.pid

    fake = SimpleNamespace(
        Error=Error, AccessDenied=AccessDenied, Process=Process, STATUS_ZOMBIE="zombie",
        process_iter=lambda attrs: [Process(p) for p in (1, 2, 3)],
    )  # fmt: skip
    monkeypatch.setattr(capture, "psutil", fake)
    host = capture.Host()
    assert host.children([1]) == [2, 3]
    assert host.memory(2) == Reading(50 * MIB, private=30 * MIB)
    assert host.memory(3) == Reading(70 * MIB, private=70 * MIB, exact=False)
    assert host.memory(4) is None and host.quick(4) == 0 and host.quick(2) == 70 * MIB
    assert host.started(2) == 102 and host.started(3) is None and host.started(4) is None
    s = Sample(0.0, 1, rss=50 * MIB, private=30 * MIB)
    assert s.memory == s.taken == 30 * MIB


# ---- limits


def _files(root: Path, files: Dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


V2_MOUNT = "30 20 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"


def test_limits_of_version_2_hold_up_the_tree(tmp_path: Path) -> None:
    top = "sys/fs/cgroup"
    _files(tmp_path, {
        "proc/self/cgroup": "0::/user/app\n", "proc/self/mountinfo": V2_MOUNT,
        f"{top}/user/app/memory.max": "max\n",
        f"{top}/user/memory.max": f"{300 * MIB}\n",
        f"{top}/user/memory.current": f"{100 * MIB}\n",
        f"{top}/user/memory.stat": f"anon 1\ninactive_file {20 * MIB}\nactive_file {30 * MIB}\n",
    })  # fmt: skip
    found = capture.limits(tmp_path)
    assert [(x.name, x.bytes) for x in found][0] == ("container", 300 * MIB) and found[-1].name == "machine"
    assert len(found) == 2 and found[0].used() == 50 * MIB
    machine = found[-1].used()
    assert machine is not None and 0 < machine < found[-1].bytes


def test_limits_inside_a_container(tmp_path: Path) -> None:
    # its own group looks like the root
    _files(tmp_path, {"proc/self/cgroup": "0::/\n", "proc/self/mountinfo": V2_MOUNT,
                      "sys/fs/cgroup/memory.max": f"{64 * MIB}\n"})  # fmt: skip
    assert capture.limits(tmp_path)[0].bytes == 64 * MIB
    assert capture.limits(tmp_path)[0].used() is None
    # or its path is the host's, which isn't mounted here
    (tmp_path / "proc/self/cgroup").write_text("0::/../../docker/abc\n")
    assert capture.limits(tmp_path)[0].bytes == 64 * MIB


def test_mount_points_need_not_be_text(tmp_path: Path) -> None:
    _files(tmp_path, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": f"{64 * MIB}\n"})
    other = b"29 20 0:9 / /mnt/\xff rw - ext4 /dev/x rw\n"
    (tmp_path / "proc/self/mountinfo").write_bytes(other + V2_MOUNT.encode())
    assert capture.limits(tmp_path)[0].bytes == 64 * MIB


def test_limits_of_version_1(tmp_path: Path) -> None:
    mounts = (
        "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n"
        "32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
        "35 31 0:32 /docker/abc /sys/fs/cgroup/mem\\040ory rw - cgroup cgroup rw,memory\n"
    )
    folder = "sys/fs/cgroup/mem ory"
    _files(tmp_path, {
        "proc/self/cgroup": "4:memory:/docker/abc/job\n2:cpu:/docker/abc\n0::/\n", "proc/self/mountinfo": mounts,
        f"{folder}/memory.limit_in_bytes": "9223372036854771712\n",
        f"{folder}/job/memory.limit_in_bytes": f"{128 * MIB}\n",
        f"{folder}/job/memory.usage_in_bytes": f"{90 * MIB}\n",
        f"{folder}/job/memory.stat": f"inactive_file 1\ntotal_inactive_file {10 * MIB}\ntotal_active_file 0\n",
        "sys/fs/cgroup/cpu/memory.limit_in_bytes": "1\n",  # not a group of memory
    })  # fmt: skip
    found = capture.limits(tmp_path)
    assert [x.bytes for x in found][:1] == [128 * MIB] and len(found) == 2 and found[0].version == 1
    assert found[0].used() == 80 * MIB


def test_no_control_groups_leave_the_machine(tmp_path: Path) -> None:
    assert [x.name for x in capture.limits(tmp_path)] == ["machine"]
    assert capture.limits()[-1].bytes <= psutil.virtual_memory().total


@pytest.mark.parametrize(
    ("text", "share", "size"),
    [
        ("85%", 0.85, None), ("100 %", 1.0, None), ("2GiB", None, 2 * 2**30), ("800MB", None, 800_000_000),
        ("1.5g", None, 3 * 2**29), ("64 KiB", None, 65536), ("10kb", None, 10_000), ("123", None, 123),
        ("1B", None, 1), ("2T", None, 2 * 2**40),
    ],
)  # fmt: skip
def test_amounts_of_memory(text: str, share: Optional[float], size: Optional[int]) -> None:
    t = Threshold.parse(text, "--warn-at")
    assert (t.share, t.bytes) == (share, size)


@pytest.mark.parametrize("text", ["200%", "0%", "-5%", "", "much", "5 GBs", "0", "0.2B", "1e9", "nan%", "inf"])
def test_amounts_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match="--kill-at"):
        Threshold.parse(text, "--kill-at")


# ---- schedule


def _follower(tmp_path: Path, host: capture.Host, **options: Any) -> Any:
    tree = capture.Tree(10, host)
    writer = capture._Writer(tmp_path / "f.jsonl", print)
    gpu: Any = SimpleNamespace(used=lambda pids: None)
    return capture._Follower(SimpleNamespace(pid=10, returncode=0), tree, host, gpu, capture._Signals(), writer,
                             [Limit("machine", 2**40)], 1000.0, 0.1, options.get("warn"), options.get("kill"),
                             options.get("say", print))  # type: ignore[arg-type]  # fmt: skip


def test_samples_keep_to_the_schedule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=1000.0, cpu=0.0)
    monkeypatch.setattr(capture.time, "monotonic", lambda: clock.now)
    monkeypatch.setattr(capture.time, "thread_time", lambda: clock.cpu)

    class Costs(_Host):
        cost = 0.001

        def memory(self, pid: int) -> Optional[Reading]:
            clock.now += self.cost
            clock.cpu += self.cost
            return super().memory(pid)

    host = Costs({10: (1, 1.0, Reading(MIB, MIB, MIB, MIB, 0))})
    f = _follower(tmp_path, host)
    due = 1000.0
    for i in range(50):  # each one is late by a third of the interval, and yet none moves the next
        clock.now = due + 0.033
        due = f._take(clock.now)
        assert due == pytest.approx(1000.0 + 0.1 * (i + 1), abs=1e-9)
    assert f._missed == 0
    host.cost = 0.04  # reading takes long: ten times as long passes before the next, on the schedule again
    clock.now = due
    assert f._take(clock.now) == pytest.approx(due + 0.4, abs=1e-9) and f._missed == 3
    clock.now = due + 7.05  # we were stopped for a while
    host.cost = 0.001
    assert f._take(clock.now) == pytest.approx(due + 7.1, abs=1e-9) and f._missed == 3 + 66


def test_the_interval_is_kept_for_real(tmp_path: Path) -> None:
    c = _run(tmp_path, ["sleep", "1"], interval=0.05)
    s = _summary(c)
    slots = [x.t / 0.05 for x in c.samples]
    # a sample is never early, and none shares a slot
    assert len({int(x + 1e-6) for x in slots}) == len(slots)
    assert s["samples"] == len(c.samples) >= 10  # of 20, on a machine that may be busy
    assert s["samples"] + s["missed"] in range(int(slots[-1]), int(slots[-1]) + 30)
    assert 0.05 * 0.9 < s["mean_interval"] < 0.1


# ---- exit codes, input, output


@pytest.mark.parametrize(
    ("script", "code", "signame"),
    [("exit 0", 0, None), ("exit 3", 3, None), ("kill -TERM $$", 143, "SIGTERM"), ("kill -KILL $$", 137, "SIGKILL"),
     ("kill -ABRT $$", 134, "SIGABRT")],
)  # fmt: skip
def test_exit_codes_are_passed_through(tmp_path: Path, script: str, code: int, signame: Optional[str]) -> None:
    done = capture.run(["sh", "-c", script], tmp_path / "c.jsonl")
    assert done.exit_code == code
    assert (done.summary["exit_code"], done.summary["signal"]) == (code, signame)


@pytest.fixture(autouse=True)
def heed_ctrl_c() -> Iterator[None]:
    """What a shell starts in the background ignores SIGINT and hands that on; here children have to hear it."""
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def _kvsplit(*args: object) -> List[str]:
    return [sys.executable, "-m", "kvsplit", "capture", *map(str, args)]


def _cli(*args: object, **options: Any) -> "subprocess.CompletedProcess[bytes]":
    return subprocess.run(_kvsplit(*args), capture_output=True, timeout=60, check=False, **options)


def test_input_and_output_are_untouched(tmp_path: Path) -> None:
    data = bytes(range(256)) * 300
    done = _cli("--no-chart", "--", "sh", "-c", "cat; echo to stderr >&2; exit 5", input=data, cwd=tmp_path)
    assert done.stdout == data and done.returncode == 5
    assert done.stderr.startswith(b"to stderr\n")
    (path,) = (tmp_path / "kvsplit-results").iterdir()
    assert path.name.startswith("capture-") and str(path.name) in done.stderr.decode()


def test_a_command_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "a" / "c.jsonl"
    assert cli.main(["capture", "--out", str(out), "--", "no-such-command-here"]) == 127
    assert capsys.readouterr().err == "kvsplit: error: no-such-command-here: command not found\n"
    plain = tmp_path / "plain"
    plain.write_text("no program")
    assert cli.main(["capture", "--out", str(out), "--", str(plain)]) == 126
    plain.write_text("#!/no/such/interpreter\n")
    plain.chmod(0o755)
    assert cli.main(["capture", "--out", str(out), "--", str(plain)]) == 126
    assert "can't be executed" in capsys.readouterr().err and not out.exists()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (["--interval", "0"], "--interval: 0 is not between"), (["--interval", "nan"], "--interval"),
        (["--warn-at", "200%"], "--warn-at: '200%'"), (["--kill-at", "lots"], "--kill-at: 'lots'"),
        (["--warn-at", "90%", "--kill-at", "85%"], "--warn-at 90% would come too late"),
        (["--chart", "c.bmp"], "--chart: c.bmp must end in .png"), (["--gif", "c.png"], "--gif"),
        (["--chart", "c.png", "--no-chart"], "contradict"), (["--compare", "k7v5"], "--compare"),
        (["--compare", ","], "--compare"), (["file.jsonl"], "write the command after --"),
        (["--show", "x.jsonl"], "--show runs nothing"), (["--frames", "."], "--frames: . is no empty folder"),
    ],
)  # fmt: skip
def test_wrong_options_run_nothing(
    options: List[str], match: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").touch()
    assert cli.main(["capture", *options, "--", "touch", "ran"]) == 2
    err = capsys.readouterr().err
    assert match in err and err.count("\n") == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["there"]


def test_no_command_at_all(capsys: pytest.CaptureFixture[str]) -> None:
    for args in (["capture"], ["capture", "--"]):
        assert cli.main(args) == 2
        assert "no command was given: write it after --" in capsys.readouterr().err
    assert cli.main(["capture", "--show"]) == 2


def test_nothing_is_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, options in {
        "c.jsonl": ["--out", "c.jsonl"], "c.png": ["--out", "d.jsonl", "--chart", "c.png"],
        "e.png": ["--out", "e.jsonl"], "g.gif": ["--out", "d.jsonl", "--gif", "g.gif"],
        "h-K8V4.jsonl": ["--out", "h.jsonl", "--compare", "f16,k8v4"],
    }.items():  # fmt: skip
        (tmp_path / name).write_text("mine")
        assert cli.main(["capture", *options, "--", "touch", "ran"]) == 2
        assert (tmp_path / name).read_text() == "mine"
    assert not (tmp_path / "ran").exists() and not (tmp_path / "d.jsonl").exists()
    with pytest.raises(UsageError, match="is there already"):
        capture.run(["touch", "ran"], tmp_path / "c.jsonl")
    assert (tmp_path / "c.jsonl").read_text() == "mine" and not (tmp_path / "ran").exists()


def test_windows_is_refused_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "_WINDOWS", True)
    with pytest.raises(UsageError, match="doesn't run on Windows"):
        capture.run(["true"], tmp_path / "c.jsonl")


# ---- signals


class _Running:
    """``kvsplit capture`` of a Python in a session of its own; the Python writes its pid when it is ready."""

    def __init__(
        self, tmp_path: Path, body: str, *options: object, command: Optional[List[str]] = None, **kw: Any
    ) -> None:
        self.out = tmp_path / "c.jsonl"
        self.ready = tmp_path / "ready"
        head = f"import os, signal, sys, time\nready = lambda: open({str(self.ready)!r}, 'w').write(str(os.getpid()))\n"
        command = command or [sys.executable, "-S", "-c", head + body]
        kw = {"start_new_session": True, **kw}
        self.proc = subprocess.Popen(
            _kvsplit("--out", self.out, "--no-chart", "--interval", "0.05", *options, "--", *command),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, **kw,
        )  # fmt: skip
        self.pid = int(_wait_for(lambda: self.ready.exists() and self.ready.read_text()))

    def end(self) -> int:
        self.stdout, self.stderr = (b.decode() for b in self.proc.communicate(timeout=30))
        return self.proc.returncode

    def summary(self) -> Dict[str, Any]:
        return _summary(capture.read(self.out))


def test_an_interrupt_is_passed_on_once_and_waited_for(tmp_path: Path) -> None:
    body = """
n = 0
def count(*a):
    global n
    n += 1
signal.signal(signal.SIGINT, count)
ready()
while not n: time.sleep(0.02)
time.sleep(0.5)
print("cleaned up", flush=True)
sys.exit(40 + n)
"""
    r = _Running(tmp_path, body)
    r.proc.send_signal(signal.SIGINT)
    assert r.end() == 41 and r.stdout == "cleaned up\n"
    assert r.summary()["interrupted"] == "SIGINT" and r.summary()["signal"] is None


@pytest.mark.parametrize("how", ["typed", "sent"])
def test_on_a_terminal_an_interrupt_reaches_the_command_once(tmp_path: Path, how: str) -> None:
    """Ctrl-C goes to the whole group, and one that we sent as well would be the second; `kill` reaches us alone."""
    import fcntl
    import termios

    body = """
come, go = os.pipe()
os.set_blocking(go, False)
signal.signal(signal.SIGINT, lambda *a: None)
signal.set_wakeup_fd(go)  # a byte for each, also where two are handled as one
ready()
n = len(os.read(come, 9))
os.set_blocking(come, False)
time.sleep(0.6)
try: n += len(os.read(come, 9))
except BlockingIOError: pass
sys.exit(40 + n)
"""
    ours, theirs = os.openpty()

    def own_terminal() -> None:
        fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)

    r = _Running(tmp_path, body, stdin=theirs, preexec_fn=own_terminal)
    try:
        if how == "typed":
            os.write(ours, b"\x03")
        else:
            r.proc.send_signal(signal.SIGINT)
        assert r.end() == 41
        assert r.summary()["interrupted"] == "SIGINT"
    finally:
        os.close(ours)
        os.close(theirs)


def test_only_what_was_sent_to_us_alone_is_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(capture.time, "monotonic", lambda: clock.now)
    f = _follower(tmp_path, _Host({}))
    sent: List[int] = []
    f._tree.send = sent.append
    f._signal(signal.SIGINT, True)
    assert not sent and f._kill_due == float("inf")
    clock.now += 60  # long after: a program may take Ctrl-C as a key of its own
    f._signal(signal.SIGINT, True)
    assert not sent and f._kill_due == float("inf")
    clock.now += 60
    f._signal(signal.SIGTERM, False)
    assert sent == [signal.SIGTERM] and f.interrupted == signal.SIGINT
    clock.now += 1
    f._signal(signal.SIGTERM, False)
    assert f._kill_due == clock.now


def test_a_second_interrupt_kills(tmp_path: Path) -> None:
    r = _Running(tmp_path, "signal.signal(signal.SIGINT, signal.SIG_IGN)\nready()\ntime.sleep(60)")
    r.proc.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert r.proc.poll() is None
    r.proc.send_signal(signal.SIGINT)
    assert r.end() == 130 and _gone(r.pid)
    assert (r.summary()["signal"], r.summary()["interrupted"]) == ("SIGKILL", "SIGINT")


def test_sigterm_ends_all_processes_of_the_command(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    shell = f"sleep 60 & echo $! > '{ready}'; wait; exit 9"
    r = _Running(tmp_path, "", command=["sh", "-c", shell])
    r.proc.send_signal(signal.SIGTERM)
    assert r.end() == 143 and _gone(r.pid)
    assert r.summary()["exit_code"] == 143 and r.summary()["left_running"] == 0


def test_a_signal_that_is_sent_twice_at_once_counts_once(tmp_path: Path) -> None:
    # as timeout(1) does: first to its child, then to its group
    body = "signal.signal(signal.SIGTERM, lambda *a: (time.sleep(0.5), sys.exit(7)))\nready()\ntime.sleep(60)"
    r = _Running(tmp_path, body)
    r.proc.send_signal(signal.SIGTERM)
    time.sleep(0.05)
    r.proc.send_signal(signal.SIGTERM)
    assert r.end() == 7


def test_the_command_goes_on_when_the_capture_is_killed(tmp_path: Path) -> None:
    r = _Running(tmp_path, "ready()\nprint('before', flush=True)\ntime.sleep(60)")
    try:
        lines = _wait_for(lambda: x if len(x := r.out.read_bytes().splitlines(keepends=True)) > 4 else None)
        assert len(lines) < 20 and all(line.endswith(b"\n") for line in lines)  # each came by itself
        r.proc.kill()
        r.proc.wait()
        c = capture.read(r.out)
        assert c.summary is None and len(c.samples) >= 2 and c.peak is not None
        assert c.header["command"][0] == Path(sys.executable).name
        time.sleep(0.1)
        assert not _gone(r.pid)
    finally:
        os.kill(r.pid, signal.SIGKILL)
        r.end()


def test_signals_where_the_system_does_not_tell_who_sent_them() -> None:
    before = [signal.getsignal(s) for s in capture._Signals.PASSED_ON]
    with capture._Signals(exact=False) as signals:
        signals.block()
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        began = time.monotonic()
        signals.sleep(10)
        assert time.monotonic() - began < 5 and signals.seen[0][0] == signal.SIGINT
        signals.seen.clear()
        child = subprocess.Popen(["sleep", "0.1"])
        signals.sleep(10)
        assert time.monotonic() - began < 8 and not signals.seen
        child.wait()
    assert [signal.getsignal(s) for s in capture._Signals.PASSED_ON] == before


def test_a_run_without_the_exact_way_passes_signals_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture._Signals.__init__, "__defaults__", (False,))
    threading.Timer(0.4, os.kill, (os.getpid(), signal.SIGTERM)).start()
    done = capture.run(["sleep", "30"], tmp_path / "c.jsonl")
    assert done.exit_code == 143 and done.interrupted == signal.SIGTERM


# ---- thresholds

RUNAWAY = "for _ in range(60):\n    take(4)\n    time.sleep(0.02)\n"


def test_a_runaway_is_stopped_before_it_hurts(tmp_path: Path) -> None:
    said: List[str] = []
    limit = Threshold.parse("64MiB", "--kill-at")
    done = capture.run(_python(RUNAWAY), tmp_path / "c.jsonl", interval=0.02, kill_at=limit, say=said.append)
    c = capture.read(done.path)
    assert done.exit_code == 137 and _summary(c)["signal"] == "SIGTERM"
    assert c.peak is not None and 64 * MIB < c.peak.memory < 160 * MIB  # it would have become 240
    assert len(said) == 1 and "--kill-at 64MiB" in said[0] and "the command takes" in said[0]
    assert _summary(c)["killed"] in said[0]


def test_samples_that_are_far_apart_do_not_blind_the_guard(tmp_path: Path) -> None:
    limit = Threshold.parse("64MiB", "--kill-at")
    done = capture.run(_python(RUNAWAY), tmp_path / "c.jsonl", interval=3600, kill_at=limit)
    assert done.exit_code == 137 and done.summary["seconds"] < 20
    # the first, those that were near, and the one that was above
    assert 2 <= done.summary["samples"] <= 8


def test_what_ignores_sigterm_is_killed_with_its_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "GRACE", 0.3)
    body = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = os.fork()
if child: open(sys.argv[1], "w").write(str(child))
take(40)
time.sleep(30)
"""
    pid = tmp_path / "pid"
    limit = Threshold.parse("32MiB", "--kill-at")
    done = capture.run(_python(body, pid), tmp_path / "c.jsonl", interval=0.02, kill_at=limit)
    assert done.exit_code == 137 and done.summary["signal"] == "SIGKILL" and done.summary["seconds"] < 10
    assert _gone(int(pid.read_text())) and done.summary["left_running"] == 0


def test_a_warning_comes_once(tmp_path: Path) -> None:
    said: List[str] = []
    limit = Threshold.parse("20MiB", "--warn-at")
    body = "take(30)\ntime.sleep(0.2)\nkept.clear()\ntime.sleep(0.1)\ntake(40)\ntime.sleep(0.2)\n"
    done = capture.run(_python(body), tmp_path / "c.jsonl", interval=0.02, warn_at=limit, say=said.append)
    assert done.exit_code == 0 and len(said) == 1 and said[0].startswith("warning: the command takes")
    assert done.summary["warned_s"] is not None and done.summary["killed"] is None


def test_a_share_is_of_the_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = Limit("container", 100 * MIB, tmp_path)
    _files(tmp_path, {"memory.current": str(60 * MIB), "memory.stat": "inactive_file 0\n"})
    machine = capture.limits()[-1]
    monkeypatch.setattr(capture, "limits", lambda: [group, machine])
    said: List[str] = []
    options: Any = {"interval": 0.02, "say": said.append, "warn_at": Threshold.parse("50%", "--warn-at")}
    quiet = capture.run(["sleep", "0.2"], tmp_path / "a.jsonl", **{**options, "kill_at": Threshold.parse("95%", "")})
    assert quiet.exit_code == 0
    assert said == [s for s in said if "60 % of the container's memory (100.0 MiB) is in use" in s] and len(said) == 1
    done = capture.run(["sleep", "30"], tmp_path / "b.jsonl", interval=0.02, kill_at=Threshold.parse("55%", ""))
    assert done.exit_code == 137 and "container" in done.killed
    assert capture.read(done.path).samples[0].used == 0.6


# ---- GPU


def _fake_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def test_gpu_memory_of_the_commands_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pid = tmp_path / "pid"
    asked = tmp_path / "asked"
    _fake_smi(tmp_path, monkeypatch, f"""
echo "$@" >> '{asked}'
while [ ! -s '{pid}' ]; do sleep 0.02; done
echo "$(cat '{pid}'), 100"; echo "$(cat '{pid}'), 28"; echo "1, 5000"; echo "77, [N/A]"
""")  # fmt: skip
    c = _run(tmp_path, ["sh", "-c", f"echo $$ > '{pid}'; exec sleep 0.8"])
    assert c.header["gpu_sampler"] == "nvidia-smi" and c.peaks()["gpu"] == 128 * MIB
    assert asked.read_text().split("\n")[0] == "--query-compute-apps=pid,used_memory --format=csv,noheader,nounits"
    assert all(s.n == 1 for s in c.samples), "nvidia-smi is no process of the command"


@pytest.mark.parametrize(
    "script", ["exit 9", "echo NVIDIA-SMI has failed; exit 0", "echo 1,2,3; echo", "exec sleep 60"]
)
def test_a_gpu_that_does_not_answer_disturbs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    pid = tmp_path / "smi"
    _fake_smi(tmp_path, monkeypatch, f"echo $$ > '{pid}'\n{script}")
    c = _run(tmp_path, ["sh", "-c", "sleep 0.4; exit 4"])
    assert _summary(c)["exit_code"] == 4 and _summary(c)["seconds"] < 10
    assert not any(s.gpu for s in c.samples) and _summary(c)["left_running"] == 0
    assert _gone(int(pid.read_text()))


# ---- the file


def test_a_file_tells_all(tmp_path: Path) -> None:
    c = _run(tmp_path, [shutil.which("sh") or "sh", "-c", "sleep 0.2", "--model=/home/me/m.gguf"], config="K8V4")
    h = c.header
    assert h["command"] == ["sh", "-c", "sleep 0.2", "--model=m.gguf"] and h["config"] == c.label == "K8V4"
    assert h["interval"] == 0.02 and h["memory_limit"] <= h["memory_total"] and h["page_size"] > 0
    assert h["run_id"] and h["platform"] and h["sampler"]
    lines = [json.loads(line) for line in c.path.read_text().splitlines()]
    assert [x["kind"] for x in lines] == ["header", *["sample"] * len(c.samples), "summary"]
    assert [x["t"] for x in lines[1:-1]] == sorted(x["t"] for x in lines[1:-1])


def test_a_cut_file_is_readable_at_every_byte(tmp_path: Path) -> None:
    whole = _run(tmp_path, ["sleep", "0.1"])
    data = whole.path.read_bytes()
    first = data[: data.rindex(b"\n", 0, data.rindex(b"\n", 0, -1))].rindex(b"\n")  # the last two samples
    cut = tmp_path / "cut"
    for n in range(first, len(data) + 1):
        cut.write_bytes(data[:n])
        c = capture.read(cut)
        assert c.samples == whole.samples[: len(c.samples)]
        assert len(c.samples) >= data[:n].count(b"\n") - 2
    assert c.summary == whole.summary
    cut.write_bytes(data[: data.index(b"\n") + 1])
    assert capture.read(cut).samples == [] and capture.read(cut).peak is None


def test_other_files_are_no_captures(tmp_path: Path) -> None:
    header = {"kind": "header", "schema": 1, "command": ["x"]}
    sample = {"kind": "sample", "t": 0, "n": 1, "rss": 1}
    summary = {"kind": "summary", "exit_code": 0, "seconds": 1.5, "approximate": 0}
    f = tmp_path / "f"
    for lines, match in (
        ([], "empty"), ([sample], "line 1"), ([{"schema": 1}], "line 1"), ([{**header, "schema": 9}], "schema 9"),
        ([header, {"kind": "mood"}], "line 2"), ([header, {"kind": "sample"}], "line 2"),
        ([header, summary, sample], "line 3"), ([header, header], "line 2"), ([header, []], "line 2"),
        ([header, {**sample, "t": "x"}], "line 2: .*t: 'x'"), ([header, {**sample, "rss": -5}], "rss: -5 is below 0"),
        ([header, {**sample, "t": math.nan}], "t: nan"), ([header, {**sample, "pss": 10**25}], "pss: 1000"),
        ([header, {**sample, "t": 2.0}, sample], "line 3: .*t: 0 comes after 2.0"),
        ([{**header, "kill_at": "x"}], "kill_at: 'x'"), ([{**header, "interval": "x"}], "interval: 'x'"),
        ([{**header, "command": "x"}], "command: 'x'"),
        *(([header, {k: v for k, v in summary.items() if k != n}], f"{n}: None") for n in summary if n != "kind"),
    ):  # fmt: skip
        f.write_text("".join(json.dumps(x) + "\n" for x in lines))
        with pytest.raises(ResultError, match=match):
            capture.read(f)
    f.write_bytes(b"\x89PNG\r\n")
    with pytest.raises(ResultError, match="line 1"):
        capture.read(f)
    with pytest.raises(UsageError, match="can't be read"):
        capture.read(tmp_path / "none")


def test_a_full_disk_ends_the_record_and_not_the_command(tmp_path: Path) -> None:
    said: List[str] = []
    writer = capture._Writer(tmp_path / "w.jsonl", said.append)
    writer.write({"kind": "header"})
    real = writer._f

    class Full:
        def write(self, data: Any) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

    writer._f = Full()  # type: ignore[assignment]
    writer.write({"kind": "sample"})
    writer.write({"kind": "sample"})
    writer.close()
    assert len(said) == 1 and "No space left" in said[0] and "the command goes on" in said[0]
    assert (tmp_path / "w.jsonl").read_text() == '{"kind": "header"}\n'


# ---- several configurations


def test_configurations_go_into_the_command() -> None:
    from kvsplit.policy import KVQuant

    k8v4, f16 = KVQuant.from_text("k8v4"), KVQuant()
    assert capture.configured(["x", "-c", "1"], k8v4) == ["x", "-c", "1", "--kvq-key", "q8_0", "--kvq-val", "kvq4"]
    assert capture.configured(["x", "--kvq={kvq}"], k8v4) == ["x", "--kvq=k8v4"]
    assert capture.configured(["x", "{kvq}"], f16) == ["x", "k16v16"]
    assert KVQuant.parse("k16v16") == f16
    with pytest.raises(UsageError, match="takes a preset"):
        capture.configured(["x", "{kvq}"], KVQuant.from_text("4,:2=8/4"))


def test_configurations_are_compared(tmp_path: Path) -> None:
    body = "take({'q8_0': 20, 'f16': 50}[sys.argv[2]]); print(sys.argv[1:]); time.sleep(0.3)"
    out = tmp_path / "c.jsonl"
    done = _cli("--compare", "k8v4,f16", "--out", out, "--interval", "0.02", "--", *_python(body), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    table, err = done.stdout.decode(), done.stderr.decode()
    assert err.index("['--kvq-key', 'q8_0', '--kvq-val', 'kvq4']") < err.index("['--kvq-key', 'f16'")
    k8v4, f16 = (capture.read(tmp_path / f"c-{n}.jsonl") for n in ("K8V4", "F16"))
    rows = {line.split()[0]: line for line in table.splitlines() if line.split()[:1] in (["K8V4"], ["F16"])}
    assert list(rows) == ["K8V4", "F16"] and " 0.0 %" in rows["F16"]
    assert k8v4.peak is not None and f16.peak is not None
    less = f16.peak.memory - k8v4.peak.memory
    assert abs(less - 30 * MIB) < ARENA and f"{less / MIB:.1f}" in rows["K8V4"]
    assert f"{100 * (1 - k8v4.peak.memory / f16.peak.memory):.1f} %" in rows["K8V4"]
    assert k8v4.header["run_id"] == f16.header["run_id"]
    assert (tmp_path / "c.png").read_bytes()[:4] == b"\x89PNG"


def test_json_has_stdout_to_itself(tmp_path: Path) -> None:
    done = _cli("--json", "--no-chart", "--out", tmp_path / "c.jsonl", "--", "sh", "-c", "echo hello; exit 3")
    assert done.returncode == 3 and b"hello" in done.stderr
    data = json.loads(done.stdout)
    assert data["summary"]["exit_code"] == data["exit_code"] == 3 and data["header"]["command"][0] == "sh"


@linux
def test_arguments_that_are_no_text_are_recorded(tmp_path: Path) -> None:
    done = _cli("--no-chart", "--out", tmp_path / "c.jsonl", "--", "sh", "-c", "sleep 0.05; echo $1", "sh", "\udcff")
    assert done.returncode == 0 and done.stdout == b"\xff\n", done.stderr
    assert capture.read(tmp_path / "c.jsonl").header["command"][-1] == "\udcff"


def test_specs_that_look_alike_have_files_of_their_own(tmp_path: Path) -> None:
    specs = "q8_0/kvq4,:2=q8_0;q8_0/kvq4,2=q8_0"
    done = _cli("--compare", specs, "--no-chart", "--out", tmp_path / "c.jsonl", "--", "sh", "-c", "sleep 0.05")
    assert done.returncode == 0, done.stderr
    files = sorted(tmp_path.glob("*.jsonl"))
    assert {capture.read(f).header["config"] for f in files} == set(specs.split(";")) and len(files) == 2


def test_a_placeholder_needs_configurations(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["capture", "--", "echo", "{kvq}"]) == 2
    assert "--compare" in capsys.readouterr().err


def test_earlier_captures_are_shown_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], made: List[capture.Capture]
) -> None:
    files = [str(c.path) for c in made]
    chart = tmp_path / "again.svg"
    assert cli.main(["capture", "--show", *files, "--chart", str(chart)]) == 0
    out = capsys.readouterr().out
    assert "150.0" in out and "100.0" in out and "50.0" in out and "33.3 %" in out
    assert ET.parse(chart).getroot().tag.endswith("svg")
    assert cli.main(["capture", "--show", "--json", *files]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [r["label"] for r in rows] == ["F16", "K8V4"] and rows[1]["saving"] == pytest.approx(1 / 3)
    assert rows[1]["summary"] is None and rows[0]["summary"]["exit_code"] == 0


def test_files_that_others_share_are_noticed(made: List[capture.Capture], capsys: pytest.CaptureFixture[str]) -> None:
    def mapped(c: capture.Capture, mib: int) -> None:
        c.samples = [Sample(0.0, 1, 0, pss=(100 + mib) * MIB, anon=100 * MIB)]

    for second, expected in ((50, False), (52, False), (25, True)):
        mapped(made[0], 50)
        mapped(made[1], second)
        assert capture.unlike(made) is expected
    assert not capture.unlike(made[:1])
    made[1].header["config"] = ""  # another command: nothing to compare
    assert not capture.unlike(made)
    # made up with a third of it mapped: 50 MiB of 150, 33 of 100
    assert cli.main(["capture", "--show", *(str(c.path) for c in made)]) == 0
    assert "compare what is its own" in capsys.readouterr().err


# ---- pictures


def test_a_name_with_dollars_is_no_formula(tmp_path: Path, made: List[capture.Capture]) -> None:
    name = r"x$\frac{.$_sl"
    for c in made:
        c.header.update(command=[name], config="")
    for captures, file in ((made[:1], "one.svg"), (made, "two.svg")):
        path = capture_pictures.draw(captures, tmp_path / file)
        assert path.stat().st_size > 1000
    assert name in {t.get_text().partition(": ")[2] for t in _texts(capture_pictures._Picture(made[:1]).figure)}


def _texts(figure: Any) -> List[Any]:
    from matplotlib.text import Text

    return list(figure.findobj(Text))


@pytest.fixture
def made(tmp_path: Path) -> List[capture.Capture]:
    """Two captures that are made up; the second was cut."""
    files = []
    for config, top in (("F16", 150), ("K8V4", 100)):
        path = tmp_path / f"made-{config}.jsonl"
        lines: List[Dict[str, Any]] = [
            {"kind": "header", "schema": 1, "command": ["llama-completion"], "config": config, "interval": 0.1,
             "memory_limit": 160 * MIB, "memory_limit_of": "container", "warn_at": "120MiB", "kill_at": None}
        ]  # fmt: skip
        for i in range(100):
            size = min(top, 5 + 3 * i) * MIB
            lines.append({"kind": "sample", "t": i / 10, "n": 1, "rss": size, "pss": size, "anon": size * 2 // 3})
        if config == "F16":
            lines.append({"kind": "summary", "exit_code": 0, "seconds": 10.0, "approximate": 0, "killed": None})
        path.write_text("".join(json.dumps(x) + "\n" for x in lines))
        files.append(capture.read(path))
    return files


def test_charts(tmp_path: Path, made: List[capture.Capture]) -> None:
    import matplotlib

    for n, captures in enumerate((made[:1], made)):
        png, svg = tmp_path / f"{n}.png", tmp_path / f"{n}.svg"
        assert capture_pictures.draw(captures, png) == png
        with matplotlib.rc_context({"svg.fonttype": "none"}):
            capture_pictures.draw(captures, svg)
        assert png.read_bytes()[:4] == b"\x89PNG"
        text = " ".join(ET.parse(svg).getroot().itertext())
        assert "memory of the container" in text and "--warn-at 120MiB" in text and "150.0 MiB" in text
        assert ("K8V4 cut: the capture itself was ended" in text) == (n == 1)
        with pytest.raises(UsageError, match="is there already"):
            capture_pictures.draw(captures, png)


def test_charts_of_what_is_hardly_there(tmp_path: Path, made: List[capture.Capture]) -> None:
    c = made[0]
    one = capture.Capture(c.path, c.header, c.samples[:1])
    assert capture_pictures.draw([one], tmp_path / "one.png").stat().st_size > 1000
    mac = capture.Capture(
        c.path, {"command": ["x"]}, [Sample(i / 10, 1, i * MIB, private=i * MIB, gpu=MIB * 900) for i in range(5)]
    )
    assert capture_pictures.draw([mac, one], tmp_path / "mac.png").stat().st_size > 1000
    with pytest.raises(ResultError, match="no sample"):
        capture_pictures.draw([capture.Capture(c.path, c.header)], tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()


def test_animations_are_small(tmp_path: Path, made: List[capture.Capture], monkeypatch: pytest.MonkeyPatch) -> None:
    from PIL import Image

    monkeypatch.setattr(capture_pictures, "MAX_FRAMES", 12)
    gif = capture_pictures.save_gif(made, tmp_path / "c.gif")
    assert gif.stat().st_size < MIB
    with Image.open(gif) as image:
        assert 6 < image.n_frames <= 12 and image.info["loop"] == 0
    frames = capture_pictures.save_frames(made[:1], tmp_path / "frames")
    assert len(frames) == 12 and [f.name for f in frames][:2] == ["frame-000.png", "frame-001.png"]
    with Image.open(frames[0]) as first, Image.open(frames[-1]) as last:
        assert first.size == last.size
        ink = [sum(i.convert("L").histogram()[:128]) for i in (first, last)]
    assert ink[1] > ink[0] and len({f.read_bytes() for f in frames}) > 6


# ---- the script


def test_the_script_runs_from_any_folder(tmp_path: Path, repo: Path) -> None:
    clone = tmp_path / "a clone"
    (clone / "scripts").mkdir(parents=True)
    shutil.copy(repo / "scripts" / "capture_memory.sh", clone / "scripts")
    (clone / "python").symlink_to(repo / "python")
    linked = tmp_path / "link to it"
    linked.symlink_to(clone / "scripts" / "capture_memory.sh")
    here = tmp_path / "some where"
    here.mkdir()
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    env["PYTHON"] = sys.executable
    for i, script in enumerate((clone / "scripts" / "capture_memory.sh", linked)):
        done = subprocess.run(
            [str(script), "--no-chart", "--out", f"my {i}.jsonl", "--", "sh", "-c",
             'pwd; echo "$1:$PYTHONPATH"; exit 6', "x", "two words"],
            cwd=here, env=env, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 6, done.stderr
        assert done.stdout == f"{here}\ntwo words:\n"
        assert _summary(capture.read(here / f"my {i}.jsonl"))["exit_code"] == 6
    venv = clone / ".venv" / "bin"
    venv.mkdir(parents=True)
    (venv / "kvsplit").write_text('#!/bin/sh\necho "$@"\n')
    (venv / "kvsplit").chmod(0o755)
    done = subprocess.run([str(linked), "--", "a b"], capture_output=True, text=True, check=False)
    assert done.stdout == "capture -- a b\n"


def test_the_script_says_what_it_lacks(tmp_path: Path, repo: Path) -> None:
    clone = tmp_path / "clone"
    (clone / "scripts").mkdir(parents=True)
    script = shutil.copy(repo / "scripts" / "capture_memory.sh", clone / "scripts")
    done = subprocess.run([script], env={"PATH": os.environ["PATH"], "PYTHON": "no-such-python"}, capture_output=True,
                          text=True, check=False)  # fmt: skip
    assert done.returncode == 1 and "set PYTHON" in done.stderr
