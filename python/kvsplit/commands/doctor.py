# SPDX-License-Identifier: MIT
"""``kvsplit doctor``: what is installed, which library is loaded and why, and whether it computes what it should.

Whatever the library does happens in a child process: one that crashes is a finding, not the end of this command.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import math
import os
import platform
import queue
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Tuple

import typer

import kvsplit
from kvsplit import _lock, models, native, runs, terminal, tools
from kvsplit.errors import CacheFolderError, KVSplitError, NativeError

#: Seconds without a word from the child after which it is given up.
SILENCE = 120.0

#: Seconds that the self-test takes at most, if nothing else is asked for.
SECONDS = 10.0


# ---- the child


def child(seconds: float, test: bool) -> None:
    """Load the library, describe it, test it; a line of JSON on stdout for each step.

    Args:
        seconds: items that would begin later are left out; 0: none is.
        test: run the self-test.
    """
    lines = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)  # whatever libraries print

    def say(**what: Any) -> None:
        lines.write(json.dumps(what) + "\n")
        lines.flush()

    try:
        path, origin = native.locate()
        say(step=f"loading {path}", library=str(path), library_from=origin)
        lib = native.load()
        say(
            build=asdict(lib.build),
            files=[str(f) for f in lib.files()],
            cache_types=[lib.type_name(t) for t in lib.cache_types()],
            system_info=lib.system_info(),
            LLAMA_CPP_LIB_PATH=os.environ.get("LLAMA_CPP_LIB_PATH", ""),
        )
        say(step="opening the devices")
        if not test:
            say(devices=[asdict(d) for d in lib.device_list()])
            return
        with lib.self_test() as self_test:  # loads what GGML_BACKEND_PATH names
            say(devices=[asdict(d) for d in lib.device_list()], total=len(self_test.items))
            began = time.monotonic()
            for item in self_test.items:
                if seconds and time.monotonic() - began > seconds:
                    say(item=_plain(item))
                    continue
                say(step=f"testing {item.what} on {item.device}")
                say(item=_plain(self_test.run_one(item)))
            say(seconds=round(time.monotonic() - began, 3))
        say(step="closing the devices")
    except KVSplitError as e:
        say(problem=str(e))


def _plain(item: native.SelfTestItem) -> Dict[str, Any]:
    """An item as JSON has it: an error that is no number is null."""
    return {**asdict(item), "error": item.error if math.isfinite(item.error) else None}


_CHILD = (
    # without the folder that the user stands in: a json.py there isn't ours
    "import sys; sys.path[:] = [sys.argv[1], *filter(None, sys.path)]; from kvsplit.commands import doctor; "
    "doctor.child(float(sys.argv[2]), sys.argv[3] == 'test')"
)


def _lines(proc: "subprocess.Popen[bytes]") -> Iterator[Dict[str, Any]]:
    """What the child says, as it comes.

    Raises:
        TimeoutError: it says nothing for too long.
    """
    lines: "queue.Queue[Optional[bytes]]" = queue.Queue()

    def read() -> None:
        assert proc.stdout is not None
        for line in proc.stdout:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    while True:
        try:
            line = lines.get(timeout=SILENCE)
        except queue.Empty:
            raise TimeoutError from None
        if line is None:
            return
        try:
            what = json.loads(line)
        except ValueError:  # cut off by a crash
            continue
        if isinstance(what, dict):
            yield what


def _ended(returncode: int, stderr: str) -> str:
    """How a child ended that shouldn't have."""
    tail = stderr.rstrip().splitlines()[-1:] or [""]
    if returncode < 0:
        try:
            name = signal.Signals(-returncode).name
        except ValueError:
            name = f"signal {-returncode}"
        return f"the process was killed by {name}" + (f" ({tail[0]})" if tail[0] else "")
    return f"the process ended with exit code {returncode}" + (f" ({tail[0]})" if tail[0] else "")


def _examine(info: Dict[str, Any], problems: List[str], *, seconds: float, test: bool) -> None:
    """Let a child load and test the library; what it finds goes into ``info`` and ``problems``."""
    items: List[Dict[str, Any]] = []
    step, began, took = "starting Python", time.monotonic(), None
    args = [sys.executable, "-c", _CHILD, str(native.PACKAGE.parent), str(seconds), "test" if test else "look"]
    proc = subprocess.Popen(args, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    err: List[bytes] = []

    def drain() -> None:
        assert proc.stderr is not None
        err.extend(proc.stderr)

    thread = threading.Thread(target=drain, daemon=True)
    thread.start()
    ended = ""
    try:
        with runs.Progress() as progress:
            total = 0
            for what in _lines(proc):
                step = what.pop("step", step)
                total = what.pop("total", total)
                if "problem" in what:
                    problems.append(what.pop("problem"))
                if "item" in what:
                    items.append(what.pop("item"))
                if "seconds" in what:
                    took = what.pop("seconds")
                info.update(what)
                progress.step(step, len(items), total)
        proc.wait(SILENCE)
    except (TimeoutError, subprocess.TimeoutExpired):
        ended = f"the process said nothing for {SILENCE:.0f} seconds and was ended"
    finally:
        if proc.poll() is None:
            proc.kill()
            proc.wait()
        thread.join(timeout=5)
        for pipe in (proc.stdout, proc.stderr):
            if pipe is not None and not thread.is_alive():
                with contextlib.suppress(OSError):
                    pipe.close()
    if not ended and proc.returncode != 0:
        ended = _ended(proc.returncode, b"".join(err).decode("utf-8", "replace"))
    if ended:
        where = info.get("library", "")
        named = f"{where}: " if where and where not in step else ""
        problems.append(f"{named}{step}: {ended}")
    if test and (items or ended) and "build" in info:
        counts = {s: sum(i["status"] == s for i in items) for s in ("passed", "failed", "elsewhere", "not run")}
        info["self_test"] = {
            **{s.replace(" ", "_"): n for s, n in counts.items()},
            "complete": not ended,
            "seconds": round(time.monotonic() - began, 3) if took is None else took,
            "items": items,
        }
        problems += _grouped(items, "failed")


def _grouped(items: List[Dict[str, Any]], status: str) -> List[str]:
    """Items with a status in a few lines: what they have in common once, each pair or type by name."""
    groups: Dict[Tuple[str, str, str], List[Dict[str, Any]]] = {}
    for item in items:
        if item["status"] == status:
            groups.setdefault((item["device"], item["kind"], item["reason"]), []).append(item)
    out: List[str] = []
    for (device, kind, reason), group in groups.items():
        what = {"codec": "blocks", "rows": "rows", "attention": "attention"}[kind]
        names = ", ".join(i["type_k"] + (f"/{i['type_v']}" if i["type_v"] else "") for i in group)
        over = "over" if kind == "attention" else "of"
        if status == "elsewhere":
            out.append(f"not on {device}: {what} {over} {names}: {reason}; that runs on the CPU")
        elif status == "not run":
            out.append(f"not tested on {device} in the time there was: {what} {over} {names}")
        else:
            worst = max(math.inf if i["error"] is None else i["error"] for i in group)
            size = "" if kind == "codec" else f" (error {worst:.2g}, limit {group[0]['limit']:.2g})"
            out.append(f"self-test on {device}: {what} {over} {names}: {reason}{size}")
    return out


# ---- the rest


def _other_packages() -> List[str]:
    """Other copies of this package on Python's path."""
    out: List[str] = []
    for entry in sys.path:
        folder = Path(entry or ".") / "kvsplit"
        if (folder / "__init__.py").is_file() and folder.resolve() != native.PACKAGE and str(folder) not in out:
            out.append(str(folder))
    return out


def _tree_patches() -> str:
    """Hash of the patches of the source tree that the package lies in; "" if it lies in none."""
    script = native.PACKAGE.parent.parent / "scripts" / "patchq"
    if not script.is_file():
        return ""
    res = subprocess.run(
        [sys.executable, str(script), "status", "--build"], capture_output=True, stdin=subprocess.DEVNULL, check=False
    )
    words = res.stdout.decode("ascii", "replace").split()
    return words[2] if res.returncode == 0 and len(words) == 3 else ""


def _check_tool(path: Path, problems: List[str]) -> None:
    """A tool has to start, and to use the libraries that lie with it."""
    env = tools.environment()
    try:
        res = subprocess.run(
            [str(path), "--version"], capture_output=True, stdin=subprocess.DEVNULL, env=env, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as e:
        problems.append(f"{path} can't be run: {e}")
        return
    if res.returncode != 0:
        problems.append(f"{path} can't be run: {_ended(res.returncode, res.stderr.decode('utf-8', 'replace'))}")
        return
    if not sys.platform.startswith("linux"):
        return
    # glibc's loader lists what it would load and runs nothing
    env["LD_TRACE_LOADED_OBJECTS"] = "1"
    res = subprocess.run(
        [str(path), "--version"], capture_output=True, stdin=subprocess.DEVNULL, env=env, timeout=60, check=False
    )
    for line in os.fsdecode(res.stdout).splitlines():
        name, arrow, file = line.strip().partition(" => ")
        if not arrow or not name.startswith(("libggml", "libllama")):
            continue
        file = file.rpartition(" (")[0]
        beside = [p for p in (path.parent / name, path.parent.parent / "lib" / name) if p.is_file()]
        if beside and not any(os.path.samefile(file, p) for p in beside if os.path.exists(file)):
            problems.append(f"{path} uses {file} in place of {beside[0]}; unset LD_LIBRARY_PATH")


def _tools(problems: List[str]) -> Dict[str, Optional[str]]:
    found: Dict[str, Optional[str]] = {}
    for name in tools.NAMES:
        try:
            found[name] = str(tools.find(name))
        except (NativeError, OSError):
            found[name] = None
    lacking = [n for n, p in found.items() if p is None]
    if lacking:
        problems.append(f"tools are missing: {', '.join(lacking)}")
    path = found["llama-completion"]
    if path is not None:
        _check_tool(Path(path), problems)
    return found


def _is_apple_silicon() -> bool:
    res = subprocess.run(["sysctl", "-n", "hw.optional.arm64"], capture_output=True, text=True, check=False)
    return res.stdout.strip() == "1"


def _bindings() -> str:
    try:
        return importlib.metadata.version(_lock.NAME)
    except importlib.metadata.PackageNotFoundError:
        return ""


def diagnose(*, test: bool = True, seconds: float = SECONDS) -> Tuple[Dict[str, Any], List[str]]:
    """Everything that ``doctor`` tells, and what is wrong.

    Args:
        test: run the self-test.
        seconds: its limit; 0: none.
    """
    problems: List[str] = []
    notes: List[str] = []
    info: Dict[str, Any] = {
        "kvsplit": kvsplit.__version__,
        "package": str(native.PACKAGE),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "lock": f"{_lock.NAME} {_lock.VERSION}",
        "source_sha256": _lock.SHA256,
        "patches_sha256": native.expected_patches() or _tree_patches(),
        "bindings": _bindings(),
        "LLAMA_CPP_LIB_PATH": os.environ.get("LLAMA_CPP_LIB_PATH", ""),
    }
    _examine(info, problems, seconds=seconds, test=test)
    if info["patches_sha256"] and info.get("build", {}).get("patches_sha256", "") not in ("", info["patches_sha256"]):
        notes.append(
            f"the library was built with patches {info['build']['patches_sha256']}, "
            f"the source tree has {info['patches_sha256']}: build it again"
        )
    info["tools"] = _tools(problems)
    info.update(cache_dir="", models_dir="", models={})
    try:
        info["cache_dir"] = str(models.cache_dir())
        info["models_dir"] = str(models.models_dir())
        folders = {
            models.cache_dir(): "KVSPLIT_CACHE_DIR",
            models.models_dir(): "KVSPLIT_MODELS_DIR or KVSPLIT_CACHE_DIR",
        }
        for folder, variable in folders.items():
            if not models.can_write(folder):
                problems.append(f"the folder {folder} can't be made or written; set {variable} to one that can")
        info["models"] = {str(m["name"]): m["path"] for m in models.status()}
    except CacheFolderError as e:  # a user without a home
        problems.append(str(e))
    if platform.system() == "Darwin" and platform.machine() == "x86_64" and _is_apple_silicon():
        problems.append("this Python is built for x86_64 and runs translated; use an arm64 Python")
    notes += [f"another kvsplit lies in {p}; {native.PACKAGE} comes first on Python's path" for p in _other_packages()]
    items = info.get("self_test", {}).get("items", [])
    notes += [*_grouped(items, "elsewhere"), *_grouped(items, "not run")]
    info["notes"] = notes
    info["problems"] = problems
    return info, problems


def _device(d: Dict[str, Any]) -> str:
    free, total = (d[k] / 2**30 for k in ("memory_free", "memory_total"))
    memory = f", {free:.1f} of {total:.1f} GiB free" if total else ""
    backend = f", backend {d['backend']}" if d["backend"] and d["backend"] != d["name"] else ""
    return f"{d['name']} ({d['description']}{backend}{memory})"


def _rows(info: Dict[str, Any]) -> List[Tuple[str, str]]:
    """The lines of the report: a name and a text each."""
    origin = f", from {info['library_from']}" if "library" in info else ""
    rows: List[Tuple[str, str]] = [
        ("kvsplit", f"{info['kvsplit']}, {info['package']}"),
        ("python", f"{info['python']}, {info['platform']}"),
        ("lock", f"{info['lock']}, sha256 {info['source_sha256'][:16]}..."),
        ("bindings", f"{_lock.NAME} {info['bindings'] or 'missing'}"),
        ("library", f"{info.get('library', 'missing')}{origin}"),
    ]
    if "build" in info:
        rows += [
            ("built from", f"{_lock.NAME} {info['build']['version']}, sha256 {info['build']['source_sha256'][:16]}..."),
            ("patches", f"sha256 {info['build']['patches_sha256'][:16]}..."),
            ("cache types", " ".join(info["cache_types"])),
            ("system", str(info["system_info"])),
        ]
    rows += [("device" if i else "devices", _device(d)) for i, d in enumerate(info.get("devices", []))]
    have = [n for n, p in info["tools"].items() if p]
    rows += [
        ("tools", " ".join(have) or "missing"),
        ("cache", str(info["cache_dir"])),
        ("models", f"{info['models_dir']}: " + (", ".join(n for n, p in info["models"].items() if p) or "none")),
        ("LLAMA_CPP_LIB_PATH", str(info["LLAMA_CPP_LIB_PATH"] or "not set")),
    ]
    test = info.get("self_test")
    if test is not None:
        parts = [f"{test[s]} {words}" for s, words in (
            ("passed", "passed"), ("failed", "failed"), ("elsewhere", "not on a device"), ("not_run", "not tested"),
        ) if test[s]]  # fmt: skip
        rows.append(("self-test", f"{', '.join(parts) or 'nothing done'}, in {test['seconds']:.1f} s"))
    return rows


def doctor(
    no_test: bool = typer.Option(False, "--no-test", help="Leave the self-test out."),
    seconds: float = typer.Option(SECONDS, "--seconds", min=0, help="Limit of the self-test; 0: none."),
    as_json: bool = typer.Option(False, "--json", help="JSON on stdout."),
) -> None:
    """Check the installation: versions, libraries, tools, devices, cache folder, models. Exit code 1 if broken.

    The self-test stores blocks and rows and computes attention over every pair of cache types on every device.
    """
    info, problems = diagnose(test=not no_test, seconds=seconds)
    if as_json:
        terminal.out_json(info)
    else:
        for name, text in _rows(info):
            terminal.out(f"{name:<20}{text}")
        for note in info["notes"]:
            typer.echo(f"note: {note}", err=True)
        for p in problems:
            typer.echo(f"problem: {p}", err=True)
        terminal.out(
            "everything is in place" if not problems else f"{len(problems)} problem{'s'[: len(problems) != 1]} found"
        )
    if problems:
        raise typer.Exit(1)
