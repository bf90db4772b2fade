# SPDX-License-Identifier: MIT
"""``kvsplit doctor``: the self-test, and every broken installation as a finding on the screen."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List

import made_up_library as made_up
import numpy as np
import pytest
from needs import missing

from kvsplit import _lock, formats, native
from kvsplit.cache_types import BY_NAME, CACHE_TYPES
from kvsplit.commands import doctor
from kvsplit.errors import NativeMismatchError

Run = Callable[..., "subprocess.CompletedProcess[str]"]

OURS = [t.name for t in CACHE_TYPES if t.name.startswith("kvq")]
PAIRS = {(k.name, v.name) for k in CACHE_TYPES for v in CACHE_TYPES}


@pytest.fixture
def cli(tmp_path: Path) -> Run:
    """Run ``kvsplit`` in a folder, without settings of ours but those given."""

    def run(*args: Any, cwd: Path = tmp_path, **env: Any) -> "subprocess.CompletedProcess[str]":
        keep = {k: v for k, v in os.environ.items() if k not in ("LLAMA_CPP_LIB_PATH", "LD_LIBRARY_PATH")}
        path = str(native.PACKAGE.parent)
        return subprocess.run(
            [sys.executable, "-m", "kvsplit", *map(str, args)],
            capture_output=True,
            text=True,
            encoding="utf-8",
            errors="replace",
            cwd=cwd,
            env={**keep, "PYTHONPATH": path, **{k: str(v) for k, v in env.items()}},
            stdin=subprocess.DEVNULL,
            timeout=300,
            check=False,
        )

    return run


def _problems(res: "subprocess.CompletedProcess[str]") -> List[str]:
    assert "Traceback" not in res.stderr, res.stderr
    return [line[len("problem: ") :] for line in res.stderr.splitlines() if line.startswith("problem: ")]


def _broken(cli: Run, folder: Path, *args: str) -> str:
    """The first problem that doctor finds with the libraries of a folder."""
    res = cli("doctor", *args, KVSPLIT_NATIVE_DIR=folder)
    found = _problems(res)
    assert res.returncode == 1 and found and res.stdout.splitlines()[-1].endswith("found"), res
    return found[0]


# ---- the self-test on this machine


@pytest.mark.native
def test_everything_is_tested_and_passes(cli: Run) -> None:
    res = cli("doctor", "--json", "--seconds", 0)
    data = json.loads(res.stdout)
    assert res.returncode == (1 if data["problems"] else 0) and not [p for p in data["problems"] if "self-test" in p]
    test = data["self_test"]
    items = test["items"]
    assert test["complete"] and test["failed"] == test["not_run"] == 0
    assert test["passed"] + test["elsewhere"] == len(items)
    devices = {d["name"] for d in data["devices"] if d["kind"] in ("cpu", "gpu", "igpu")}
    assert "CPU" in devices
    for device in devices:
        mine = [i for i in items if i["device"] == device]
        assert {(i["type_k"], i["type_v"]) for i in mine if i["kind"] == "attention"} == PAIRS
        assert {i["type_k"] for i in mine if i["kind"] == "rows"} == {t.name for t in CACHE_TYPES}
    for device in ("reference", "CPU"):
        assert sorted(i["type_k"] for i in items if i["kind"] == "codec" and i["device"] == device) == sorted(OURS)
    for i in items:
        assert i["status"] in ("passed", "elsewhere") and (i["status"] == "elsewhere" or i["error"] <= i["limit"])


@pytest.mark.native
def test_it_says_what_is_installed_and_why(cli: Run) -> None:
    res = cli("doctor", "--json", "--no-test")
    data = json.loads(res.stdout)
    assert data["package"] == str(native.PACKAGE) and data["bindings"] == _lock.VERSION
    assert (data["build"]["version"], data["build"]["source_sha256"]) == (_lock.VERSION, _lock.SHA256)
    assert data["library_from"] == ("KVSPLIT_NATIVE_DIR" if os.environ.get("KVSPLIT_NATIVE_DIR") else "the package")
    assert Path(data["library"]).is_file() and "self_test" not in data
    assert {Path(f).parent for f in data["files"]} == {Path(data["library"]).resolve().parent}
    cpu = next(d for d in data["devices"] if d["name"] == "CPU")
    assert cpu["memory_total"] >= cpu["memory_free"] > 0 and Path(cpu["file"]).is_file()
    assert data["system_info"] and data["cache_types"] == [t.name for t in CACHE_TYPES]
    text = cli("doctor", "--no-test").stdout
    for word in (
        _lock.VERSION,
        _lock.SHA256[:16],
        data["library"],
        data["library_from"],
        "GiB free",
        data["cache_dir"],
    ):
        assert word in text
    assert "self-test" not in text
    assert "problem" not in text or data["problems"]


@pytest.mark.native
def test_what_there_is_no_time_for_is_named(cli: Run) -> None:
    res = cli("doctor", "--seconds", "1e-9")
    assert not [p for p in _problems(res) if "self-test" in p]
    notes = [line for line in res.stderr.splitlines() if line.startswith("note: not tested on CPU")]
    # the first item may begin before the clock ticks
    told = next(n for n in notes if "attention over" in n)
    assert "q8_0/kvq4" in told and told.count("/") == len(PAIRS)
    assert "not tested" in next(line for line in res.stdout.splitlines() if line.startswith("self-test"))


@pytest.mark.native
def test_pairs_that_are_used_most_come_first() -> None:
    with native.load().self_test() as test:
        kinds = [i.kind for i in test.items]
        assert kinds == sorted(kinds, key=["codec", "rows", "attention"].index)
        attention = [i for i in test.items if i.kind == "attention"]
        assert (attention[0].type_k, attention[0].type_v) == ("q8_0", "kvq4")
        assert all(i.status == "not run" and not i.reason for i in test.items)
        with pytest.raises(IndexError, match="no item 100000"):
            test.run_one(native.SelfTestItem(100000, "rows", "CPU", "f16", ""))
    with pytest.raises(IndexError):
        test.run_one(test.items[0])
    test.close()


# ---- recorded bytes: the library's constants against the numpy mirror, with a generator of its own


_MASK = (1 << 64) - 1


def _splitmix64(state: int) -> Iterator[int]:
    while True:
        state = (state + 0x9E3779B97F4A7C15) & _MASK
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        yield z ^ (z >> 31)


def _values(name: str) -> Any:
    """The 64 blocks that the self-test stores, (64, 32) in float32."""
    words = _splitmix64(BY_NAME[name].ggml_id)
    unit = np.float32(1.7320508) / np.float32(65536)
    x = np.zeros((64, 32), np.float32)
    for b in range(64):
        size = np.float32(2.0 ** (b % 9 - 4))
        for i in range(32):
            word = next(words)
            total = sum(word >> k & 0xFFFF for k in (0, 16, 32, 48))
            x[b, i] = np.float32(total - 131070) * unit * size
        if b % 16 == 3:
            x[b] = 0
        if b % 16 == 7:
            x[b] = size
        if b % 16 == 11:
            x[b, b % 32] = size * (30 if b % 32 == 11 else -30)
    return x


def _fnv1a(data: bytes) -> str:
    h = 0xCBF29CE484222325
    for c in data:
        h = ((h ^ c) * 0x100000001B3) & _MASK
    return f"{h:016x}"


@pytest.mark.native
@pytest.mark.parametrize("name", OURS)
def test_recorded_bytes_are_those_of_the_numpy_mirror(name: str) -> None:
    x = _values(name)
    blocks = formats.encode(name, x)
    want = _fnv1a(blocks.tobytes() + formats.decode(name, blocks).astype("<f4").tobytes())
    with native.load().self_test() as test:
        items = [i for i in test.items if i.kind == "codec" and i.type_k == name]
        done = [test.run_one(i) for i in items]
    assert {i.device for i in done} >= {"reference", "CPU"}
    assert {(i.want, i.have, i.status) for i in done} == {(want, want, "passed")}


# ---- the emulated Metal device, as a second backend


@pytest.mark.native
def test_a_second_device_is_tested_by_the_same_code(cli: Run, repo: Path) -> None:
    plugin = repo / "build" / "metal" / "libggml-metal-emulated.so"
    if not plugin.is_file() or native.library_path().resolve().parent != (repo / "build" / "bin").resolve():
        missing("no emulated Metal device in the build that is tested")
    # so slow that only the pairs that are used most come to be tested
    data = json.loads(cli("doctor", "--json", "--seconds", 4, GGML_BACKEND_PATH=plugin).stdout)
    metal = next(d for d in data["devices"] if d["name"].startswith("MTL"))
    assert metal["kind"] == "gpu" and metal["file"] == str(plugin)
    mine = [i for i in data["self_test"]["items"] if i["device"] == metal["name"]]
    assert {i["status"] for i in mine if i["kind"] == "rows"} == {"passed"}
    attention = {(i["type_k"], i["type_v"]): i["status"] for i in mine if i["kind"] == "attention"}
    assert set(attention) == PAIRS and attention["q8_0", "kvq4"] == "passed"
    assert "failed" not in attention.values()


# ---- findings of the self-test


_RUN = """
{ 0, 0, -1, 452, 464, 0, 0, 7, 7, "" },
{ 1, 0,  0, 452, 464, 0, 0.01, 0, 0, "" },
{ 2, 0,  0,   8, 452, 1e-9, 1e-8, 0, 0, "" },
{ 2, 1,  0,   8,   8, 0.25, 1e-8, 0, 0, "it is wrong" },
{ 2, 1,  0,   8,   1, 1.0/0.0, 1e-8, 0, 0, "it is wrong" },
{ 2, 2,  0,   1,   8, 0, 0, 0, 0, "a head is not supported" },
"""


def test_an_item_that_fails_is_a_problem_and_one_elsewhere_a_note(cli: Run, tmp_path: Path) -> None:
    made_up.whole(tmp_path, items=_RUN)
    env = {"KVSPLIT_NATIVE_DIR": tmp_path}
    res = cli("doctor", **env)
    assert res.returncode == 1
    assert "self-test on DEV0: attention over q8_0/q8_0, q8_0/f16: it is wrong (error inf, limit 1e-08)" in _problems(
        res
    )
    assert "note: not on DEV0: attention over f16/q8_0: a head is not supported; that runs on the CPU" in res.stderr
    assert "3 passed, 2 failed, 1 not on a device" in res.stdout
    assert "DEV0 (a device, backend MADEUP, 1.0 of 3.0 GiB free)" in res.stdout
    assert "MADE_UP = 1" in res.stdout
    data = json.loads(cli("doctor", "--json", **env).stdout)
    items = {(i["kind"], i["type_k"], i["type_v"]): i for i in data["self_test"]["items"]}
    assert items["attention", "q8_0", "f16"]["error"] is None  # JSON has no infinity
    assert items["codec", "kvq4", ""]["want"] == f"{7:016x}" and items["codec", "kvq4", ""]["device"] == "reference"
    # without the test, nothing of it is a problem
    assert "self-test" not in "".join(_problems(cli("doctor", "--no-test", **env)))


@pytest.mark.parametrize(
    ("code", "what"),
    [
        ("if (i == 2) abort();", "SIGABRT"),
        ("if (i == 2) raise(SIGSEGV);", "SIGSEGV"),
        ("if (i == 2) _exit(3);", "exit code 3"),
    ],
)
def test_a_crash_in_the_self_test_names_the_item(cli: Run, tmp_path: Path, code: str, what: str) -> None:
    made_up.whole(tmp_path, items=_RUN, run=code)
    found = _broken(cli, tmp_path)
    assert "testing attention over q8_0/kvq4 on DEV0: the process" in found and what in found
    data = json.loads(cli("doctor", "--json", KVSPLIT_NATIVE_DIR=tmp_path).stdout)
    assert data["self_test"]["passed"] == 2 and not data["self_test"]["complete"]


@pytest.mark.parametrize(("code", "what"), [("abort();", "SIGABRT"), ("raise(SIGSEGV);", "SIGSEGV")])
def test_a_library_that_kills_the_process_is_a_finding(cli: Run, tmp_path: Path, code: str, what: str) -> None:
    path = made_up.whole(tmp_path, load=code)
    found = _broken(cli, tmp_path)
    assert f"loading {path}: the process was killed by {what}" in found


def test_a_library_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made_up.whole(tmp_path, load="sleep(600);")
    monkeypatch.setenv("KVSPLIT_NATIVE_DIR", str(tmp_path))
    monkeypatch.delenv("LLAMA_CPP_LIB_PATH", raising=False)
    monkeypatch.setattr(doctor, "SILENCE", 5.0)
    _, problems = doctor.diagnose()
    assert any("loading" in p and "said nothing for 5 seconds and was ended" in p for p in problems), problems


def test_chatter_of_a_library_does_not_spoil_the_report(cli: Run, tmp_path: Path) -> None:
    noise = 'write(1, "{\\"problem\\": 1}\\n", 15); write(2, "noise\\n", 6);'
    made_up.whole(tmp_path, items=_RUN, load=noise, run=noise)
    data = json.loads(cli("doctor", "--json", KVSPLIT_NATIVE_DIR=tmp_path).stdout)
    assert 1 not in data["problems"] and len(data["self_test"]["items"]) == 6


# ---- broken installations


def test_a_library_of_another_release_is_a_finding(cli: Run, tmp_path: Path) -> None:
    path = made_up.whole(tmp_path, build=f"0.1.2 {'a' * 64} {'b' * 64}")
    found = _broken(cli, tmp_path)
    for part in (str(path), "0.1.2", "a" * 64, str(native.PACKAGE), _lock.SHA256, "unset KVSPLIT_NATIVE_DIR"):
        assert part in found


def test_an_older_library_without_a_self_test_is_a_finding(cli: Run, tmp_path: Path) -> None:
    path = made_up.whole(tmp_path, self_test=False)
    assert f"{path} is older than the package" in _broken(cli, tmp_path)
    assert not any("older" in p for p in _problems(cli("doctor", "--no-test", KVSPLIT_NATIVE_DIR=tmp_path)))
    with pytest.raises(NativeMismatchError, match="has no self-test; build it again"):
        native.Native(path).self_test()


def test_a_library_without_patches_is_a_finding(cli: Run, tmp_path: Path) -> None:
    made_up.compile_c("int x;", tmp_path / made_up.NAME)
    res = cli("doctor", LLAMA_CPP_LIB_PATH=tmp_path)
    assert res.returncode == 1 and "from LLAMA_CPP_LIB_PATH" in res.stdout
    assert "without this project's patches" in _problems(res)[0] and "unset LLAMA_CPP_LIB_PATH" in _problems(res)[0]


def test_a_folder_without_a_library_is_a_finding(cli: Run, tmp_path: Path) -> None:
    assert str(tmp_path / "none") in _broken(cli, tmp_path / "none")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other loaders say it themselves")
@pytest.mark.parametrize(("cut", "why"), [(0, "is empty"), (2000, "is truncated"), (-1, "is truncated")])
def test_a_library_that_is_cut_off_is_a_finding(cli: Run, tmp_path: Path, cut: int, why: str) -> None:
    path = made_up.whole(tmp_path)
    os.truncate(path, cut if cut >= 0 else path.stat().st_size + cut)
    assert f"{path} {why}" in _broken(cli, tmp_path)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a script stands for the tool")
@pytest.mark.parametrize(
    ("code", "what"), [("echo oh no >&2; exit 127", "exit code 127 (oh no)"), ("kill -9 $$", "SIGKILL")]
)
def test_a_tool_that_cannot_start_is_a_finding(cli: Run, tmp_path: Path, code: str, what: str) -> None:
    made_up.whole(tmp_path)
    tool = tmp_path / "llama-completion"
    tool.write_text(f"#!/bin/sh\n{code}\n")
    tool.chmod(0o755)
    found = _problems(cli("doctor", "--no-test", KVSPLIT_NATIVE_DIR=tmp_path))
    assert any(str(tool) in p and what in p for p in found), found


def test_another_copy_of_the_package_is_noted(cli: Run, tmp_path: Path) -> None:
    other = tmp_path / "elsewhere" / "kvsplit"
    other.mkdir(parents=True)
    (other / "__init__.py").write_text("")
    path = os.pathsep.join([str(native.PACKAGE.parent), str(other.parent)])
    res = cli("doctor", "--no-test", PYTHONPATH=path)
    assert f"note: another kvsplit lies in {other}; {native.PACKAGE} comes first" in res.stderr


@pytest.mark.native
def test_a_child_that_python_cannot_start_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_CHILD", "raise SystemExit('no such thing')")
    info: Dict[str, Any] = {}
    problems: List[str] = []
    doctor._examine(info, problems, seconds=1, test=True)
    assert problems == ["starting Python: the process ended with exit code 1 (no such thing)"]


# ---- locales and folders


LOCALES = {
    "C": {"LC_ALL": "C"},
    "POSIX": {"LC_ALL": "POSIX"},
    "ASCII": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    "ASCII output": {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"},
    "output": {"LC_ALL": "C.UTF-8", "PYTHONIOENCODING": "ascii"},
}


@pytest.fixture(scope="module")
def odd_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose name has blanks and letters of several scripts, with libraries, tools and the package in it."""
    folder = tmp_path_factory.mktemp("odd") / "ü ñ 目  'x'"
    source = native.library_path().resolve().parent
    shutil.copytree(
        native.PACKAGE, folder / "pak é" / "kvsplit", ignore=shutil.ignore_patterns("__pycache__", "lib", "bin")
    )
    bins = folder / "libs ö" / "bin"
    bins.mkdir(parents=True)
    for file in source.iterdir():
        if file.name.startswith("lib") and (".so" in file.name or file.suffix == ".dylib"):
            shutil.copy(file, bins / file.name)
    for folder_of_tools in native.bin_dirs():
        if (folder_of_tools / "llama-completion").is_file():
            shutil.copy(folder_of_tools / "llama-completion", bins / "llama-completion")
            break
    return folder


@pytest.mark.native
@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n == "ASCII" else [pytest.mark.slow]) for n in LOCALES])
def test_commands_work_in_any_locale_and_folder(
    cli: Run, odd_folder: Path, name: str, smollm2: Path, tmp_path: Path
) -> None:
    model = odd_folder / "modèle 1.gguf"
    if not model.exists():
        model.symlink_to(smollm2)
    env = {
        **LOCALES[name],
        "PYTHONPATH": odd_folder / "pak é",
        "KVSPLIT_NATIVE_DIR": odd_folder / "libs ö",
        "KVSPLIT_CACHE_DIR": odd_folder / "cäche",
    }
    # each command once in such a folder
    assert cli("--version", cwd=odd_folder, **env).stdout.startswith("kvsplit ")
    res = cli("doctor", "--seconds", "1", cwd=odd_folder, **env)
    found = [p for p in _problems(res) if "tools are missing" not in p]
    assert not found and "self-test" in res.stdout, res.stderr
    data = json.loads(cli("doctor", "--json", "--no-test", cwd=odd_folder, **env).stdout)
    # a locale of ASCII has the bytes of a name as lone surrogates
    name_of = os.fsencode(data["library"]) if name in ("ASCII", "ASCII output") else data["library"].encode()
    assert name_of.decode().startswith(str(odd_folder / "libs ö"))
    res = cli("memory", model.name, "--kvq", "8", cwd=odd_folder, **env)
    assert res.returncode == 0 and "q8_0/kvq4" in res.stdout, res.stderr
    res = cli("run", model.name, "Zür", "-n", "2", "--ctx", "64", "--kvq", "8", cwd=odd_folder, **env)
    assert res.returncode == 0 and res.stdout.strip(), res.stderr
    assert "kvq: K q8_0" in res.stderr
