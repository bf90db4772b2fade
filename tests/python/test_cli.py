# SPDX-License-Identifier: MIT
"""The command line, as a user runs it: in a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Callable, Iterator, List

import psutil
import pytest

import kvsplit
from kvsplit import native, tools

Make = Callable[..., Path]
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def cli(tmp_path: Path) -> Run:
    """Run ``kvsplit`` in an empty folder, output captured."""

    def run(*args: Any, env: Any = None, script: Any = None) -> "subprocess.CompletedProcess[str]":
        e = {**os.environ, "PYTHONPATH": str(Path(kvsplit.__file__).parent.parent), **(env or {})}
        program = [str(script)] if script else ["-m", "kvsplit"]
        return subprocess.run(
            [sys.executable, *program, *map(str, args)],
            capture_output=True,
            text=True,
            encoding="utf-8",
            errors="replace",
            cwd=tmp_path,
            env=e,
            stdin=subprocess.DEVNULL,
            check=False,
        )

    return run


def _one_line(res: "subprocess.CompletedProcess[str]") -> str:
    assert res.stdout == ""
    lines = res.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("kvsplit: error: "), res.stderr
    return lines[0]


def test_help_and_version(cli: Run) -> None:
    res = cli("--help")
    assert res.returncode == 0
    for command in ("run", "compare", "memory", "doctor", "models"):
        assert command in res.stdout
        assert cli(command, "--help").returncode == 0
    assert cli("--version").stdout.startswith(f"kvsplit {kvsplit.__version__}")
    assert cli().returncode == 2


@pytest.mark.parametrize(
    ("args", "match"),
    [
        (["frob"], "frob"),
        (["memory"], "model"),
        (["memory", "M", "--ctx", "many"], "--ctx"),
        (["memory", "M", "--frob"], "--frob"),
        (["compare", "M", "--ctx", "4294967552"], "--ctx"),
        (["memory", "M", "--kvq", "6"], "'6'"),
        (["memory", "M", "--kvq-key", "8,99=4"], "kvq_key"),
        (["memory", "M", "--kvq-val", "q9"], "kvq_val"),
        (["compare", "M", "--config", "K7V5"], "--config"),
        (["models", "pull", "gpt5"], "smollm2"),
    ],
)
def test_wrong_usage_is_one_line_and_2(cli: Run, synth_model: Make, args: Any, match: str) -> None:
    path = synth_model()
    res = cli(*[path if a == "M" else a for a in args])
    assert match in _one_line(res)
    assert res.returncode == 2


def test_failures_are_one_line_and_1(cli: Run, tmp_path: Path) -> None:
    (tmp_path / "text.gguf").write_text("no model")
    for args, match in [(["none.gguf"], "none.gguf"), (["text.gguf"], "not a GGUF")]:
        for command in ("memory", "run", "compare"):
            res = cli(command, *args)
            assert match in _one_line(res)
            assert res.returncode == 1
    assert "Traceback" in cli("memory", "text.gguf", env={"KVSPLIT_DEBUG": "1"}).stderr


def test_memory_needs_no_native_library(cli: Run, synth_model: Make, tmp_path: Path) -> None:
    res = cli("memory", synth_model(), env={"KVSPLIT_NATIVE_DIR": str(tmp_path)})
    assert res.returncode == 0 and "K8V4" in res.stdout and res.stderr == ""


def test_memory_table_and_json_agree(cli: Run, synth_model: Make) -> None:
    path = synth_model(n_layer=22, n_head_kv=4)
    text = cli("memory", path, "--ctx", 8192).stdout
    data = json.loads(cli("memory", path, "--ctx", 8192, "--json").stdout)
    assert [c["bytes"] / 2**20 for c in data["configs"]] == [176.0, 93.5, 71.5, 71.5, 49.5]
    for c in data["configs"]:
        line = next(s for s in text.splitlines() if s.strip().startswith(c["config"]))
        assert f"{c['bytes'] / 2**20:.2f}" in line and f"{100 * c['saving']:.1f} %" in line


def test_memory_by_layer(cli: Run, synth_model: Make) -> None:
    path = synth_model(n_layer=5)
    res = cli("memory", path, "--kvq-val", "4,:2=8,-2:=8", "--ctx", 256)
    rows = [s.split() for s in res.stdout.splitlines() if "2x64" in s]
    assert [r[5] for r in rows] == ["q8_0", "q8_0", "kvq4", "q8_0", "q8_0"]
    data = json.loads(cli("memory", path, "--kvq", "8", "--np", 4, "--ctx", 1000, "--json").stdout)
    (config,) = data["configs"]
    assert config["n_ctx"] == 1024 and len(config["layers"]) == 5
    assert cli("memory", path, "--per-layer").stdout.count("2x64") == 25


def test_memory_tells_the_files_own_policy(cli: Run, synth_model: Make) -> None:
    path = synth_model(extra=(("kvq.key", "8"),))
    out = cli("memory", path, "--ctx", 256).stdout
    assert "file" in out and "q8_0/f16" in out


@pytest.mark.parametrize(
    "env",
    [{"NO_COLOR": "1"}, {"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONUTF8": "0"}, {"COLUMNS": "40"}],
    ids=lambda e: next(iter(e)),
)
def test_in_a_pipe(cli: Run, synth_model: Make, env: Any) -> None:
    res = cli("memory", synth_model(), env=env)
    assert res.returncode == 0 and "\x1b" not in res.stdout
    assert any("K8V4" in s and "q8_0/kvq4" in s and "%" in s for s in res.stdout.splitlines())
    if "PYTHONIOENCODING" in env:
        assert res.stdout.isascii()


def test_reader_that_goes_away(synth_model: Make) -> None:
    env = {**os.environ, "PYTHONPATH": str(Path(kvsplit.__file__).parent.parent)}
    cmd = [sys.executable, "-m", "kvsplit", "memory", str(synth_model(n_layer=64)), "--per-layer"]
    p = subprocess.Popen(cmd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env)
    assert p.stdout is not None and p.stderr is not None
    p.stdout.read(1)
    p.stdout.close()
    err = p.stderr.read()
    p.stderr.close()
    p.wait()
    assert b"Traceback" not in err and b"BrokenPipe" not in err


def test_streams_that_are_closed(tmp_path: Path, synth_model: Make) -> None:
    env = {**os.environ, "PYTHONPATH": str(Path(kvsplit.__file__).parent.parent)}
    cmd = [sys.executable, "-m", "kvsplit", "memory", str(synth_model())]
    for closed in (">&-", "<&- >&-"):
        res = subprocess.run(
            ["sh", "-c", f'exec "$@" {closed}', "sh", *cmd], stderr=subprocess.PIPE, env=env, check=False
        )
        assert (res.returncode, res.stderr) == (0, b""), closed
    # what a library prints must not go into the next file that is opened
    told = tmp_path / "fd"
    code = f"from kvsplit import cli; cli.main(['--version']); f = open({str(told)!r}, 'w'); print(f.fileno(), file=f)"
    subprocess.run(["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", code], env=env, check=True)
    assert int(told.read_text()) > 2


def test_models(cli: Run, tmp_path: Path) -> None:
    env = {"KVSPLIT_MODELS_DIR": str(tmp_path / "m")}
    data = json.loads(cli("models", "list", "--json", env=env).stdout)
    assert [m["name"] for m in data] == ["smollm2", "gemma3-270m"] and not any(m["pulled"] for m in data)
    assert "not pulled" in cli("models", "list", env=env).stdout
    res = cli("models", "path", "smollm2", env=env)
    assert res.returncode == 1 and "kvsplit models pull smollm2" in _one_line(res)
    (tmp_path / "own.gguf").write_text("x")
    assert cli("models", "path", "own.gguf").stdout.strip() == "own.gguf"
    # pip without an index is what a machine without a network looks like
    res = cli("models", "pull", "smollm2", "-q", env={**env, "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull})
    assert res.returncode == 1 and "offline" in _one_line(res)


def test_doctor_without_natives(cli: Run, tmp_path: Path) -> None:
    env = {"KVSPLIT_NATIVE_DIR": str(tmp_path), "LLAMA_CPP_LIB_PATH": ""}
    res = cli("doctor", "--no-test", env=env)
    assert res.returncode == 1 and "problem: " in res.stderr and str(tmp_path) in res.stderr
    data = json.loads(cli("doctor", "--json", "--no-test", env=env).stdout)
    assert data["problems"] and data["lock"] == "llama-cpp-python 0.3.36"


@pytest.mark.native
def test_doctor(cli: Run) -> None:
    data = json.loads(cli("doctor", "--json", "--no-test").stdout)
    assert data["LLAMA_CPP_LIB_PATH"] == str(native.load().path.parent)
    assert data["build"]["version"] == "0.3.36" and "q8_0" in data["cache_types"] and data["devices"]
    complete = all(data["tools"][n] for n in tools.NAMES)
    res = cli("doctor", "--no-test")
    assert (res.returncode == 0) == (complete and not data["problems"])


def test_quick_compare_is_the_command(cli: Run, repo: Path) -> None:
    script = repo / "scripts" / "quick_compare.py"
    res = cli("--help", script=script)
    assert res.returncode == 0 and "--ppl-ctx" in res.stdout
    res = cli("none.gguf", script=script)
    assert res.returncode == 1 and "none.gguf" in _one_line(res)


def test_compare_refuses_before_it_begins(cli: Run, synth_model: Make, tmp_path: Path) -> None:
    path = synth_model()
    for args, match in [
        (["--text", "none.txt"], "--text"),
        (["--config", "8,9=4/8"], "slice '9'"),
        (["--model", path], "twice"),
    ]:
        res = cli("compare", path, *args)
        if res.returncode == 1 and "was not found" in res.stderr:
            pytest.skip("no native libraries")
        assert res.returncode == 2 and match in _one_line(res)
        assert not list(tmp_path.rglob("*.jsonl"))


def _fake(tmp_path: Path, code: str) -> Path:
    """A folder with a llama-completion that is a script, beside the real library."""
    fake = tmp_path / "fake" / "bin"
    fake.mkdir(parents=True)
    script = fake / "llama-completion"
    script.write_text(f"#!{sys.executable}\n{code}\n")
    script.chmod(0o755)
    library = native.library_path()
    (fake / library.name).symlink_to(library)
    return fake


@pytest.mark.native
def test_run_passes_everything_on(cli: Run, synth_model: Make, tool: Callable[[str], Path], tmp_path: Path) -> None:
    """With a tool in its place that prints its arguments."""
    tool("llama-completion")
    fake = _fake(
        tmp_path,
        "import json, os, sys\nprint(json.dumps(sys.argv[1:]))\n"
        "print(os.environ['LLAMA_ARG_LOG_VERBOSITY'], file=sys.stderr)\nsys.exit(7)",
    )
    path = synth_model()
    res = cli("run", path, "a b", "--kvq", 8, "-n", 5, "--ctx", 300, "--", "--temp", "0", "--", "x",
              env={"KVSPLIT_NATIVE_DIR": str(fake.parent)})  # fmt: skip
    assert res.returncode == 7
    assert json.loads(res.stdout) == ["-m", str(path), "--kvq", "8", "-c", "300", "-p", "a b", "-n", "5", "-no-cnv",
                                      "--temp", "0", "--", "x"]  # fmt: skip
    assert res.stderr == "2\n"  # no log around the text, unless the user wants one
    res = cli("run", path, "a b", env={"KVSPLIT_NATIVE_DIR": str(fake.parent), "LLAMA_ARG_LOG_VERBOSITY": "4"})
    assert res.stderr == "4\n"
    for args in (["--model", path, "-p", "a b"], ["-m", path, "a b"], [path, "--prompt", "a b"]):
        res = cli("run", *args, env={"KVSPLIT_NATIVE_DIR": str(fake.parent)})
        assert json.loads(res.stdout)[:4] == ["-m", str(path), "-p", "a b"]
    res = cli("run", path, "hi", "--kvq", "k7v4")
    assert res.returncode == 2 and "32 16 8 6 5 4 3 2" in _one_line(res)


def _heed_ctrl_c() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextlib.contextmanager
def _started(cmd: List[str], **kw: Any) -> Iterator["subprocess.Popen[str]"]:
    """A process that can be interrupted even where a shell made the tests ignore that, and that ends with the test."""
    with subprocess.Popen(cmd, text=True, preexec_fn=_heed_ctrl_c, **kw) as proc:
        try:
            yield proc
        finally:
            proc.kill()


def test_sigterm_ends_like_ctrl_c(repo: Path) -> None:
    """Nothing temporary is left, and no tool runs on."""
    code = """if True:
        import subprocess, sys, tempfile
        from kvsplit import cli, tools

        def app(**kw):
            with tempfile.TemporaryDirectory() as d:
                print(d, flush=True)
                tools.run_command(["sleep", "600"], "sleep")

        cli.app = app
        sys.exit(cli.main(["anything"]))
    """
    env = {**os.environ, "PYTHONPATH": str(repo / "python")}
    with _started([sys.executable, "-c", code], stdout=subprocess.PIPE, env=env) as proc:
        assert proc.stdout is not None
        folder = Path(proc.stdout.readline().strip())
        assert folder.is_dir()
        time.sleep(0.5)
        children = psutil.Process(proc.pid).children()
        assert children
        proc.terminate()
        assert proc.wait(30) == 143
        assert not folder.exists()
        assert not psutil.wait_procs(children, timeout=10)[1]


@pytest.mark.native
def test_sigterm_ends_a_tool_on_the_terminal(synth_model: Make, repo: Path, tmp_path: Path) -> None:
    fake = _fake(tmp_path, "import time\nprint('up', flush=True)\ntime.sleep(600)")
    env = {**os.environ, "PYTHONPATH": str(repo / "python"), "KVSPLIT_NATIVE_DIR": str(fake)}
    cmd = [sys.executable, "-m", "kvsplit", "run", str(synth_model()), "hi"]
    with _started(cmd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env) as proc:
        assert proc.stdout is not None and proc.stderr is not None
        assert proc.stdout.readline() == "up\n"
        children = psutil.Process(proc.pid).children()
        assert len(children) == 1
        proc.terminate()
        assert proc.wait(30) == 143
        assert proc.stderr.read() == "kvsplit: error: terminated\n"
        assert not psutil.wait_procs(children, timeout=10)[1]


@pytest.mark.native
def test_tools_of_an_unpatched_build_are_refused(cli: Run, synth_model: Make, tmp_path: Path) -> None:
    fake = _fake(tmp_path, "print('ran')")
    name = native.library_path().name
    (fake / name).unlink()
    cc = shutil.which("cc") or shutil.which("gcc")
    if cc is None:
        pytest.skip("no C compiler for a library without the patches")
    subprocess.run([cc, "-shared", "-x", "c", os.devnull, "-o", str(fake / name)], check=True)
    path = synth_model()
    for more in ({}, {"LLAMA_CPP_LIB_PATH": str(native.library_path().parent)}):
        res = cli("run", path, "hi", env={"KVSPLIT_NATIVE_DIR": str(fake), **more})
        assert res.returncode == 1 and "without this project's patches" in _one_line(res)
    (fake / name).unlink()
    res = cli("run", path, "hi", env={"KVSPLIT_NATIVE_DIR": str(fake)})
    assert res.returncode == 1 and "was not found" in _one_line(res)


@pytest.mark.native
@pytest.mark.parametrize("variable", ["KVSPLIT_CACHE_DIR", "KVSPLIT_MODELS_DIR"])
@pytest.mark.parametrize("place", ["file", "below a file", "proc"])
def test_doctor_names_a_folder_that_cannot_be_written(cli: Run, tmp_path: Path, variable: str, place: str) -> None:
    (tmp_path / "f").write_text("")
    if place == "proc" and not sys.platform.startswith("linux"):
        pytest.skip("only Linux has a folder that even root can't write")
    folder = {"file": tmp_path / "f", "below a file": tmp_path / "f" / "x" / "y", "proc": Path("/proc/none/x")}[place]
    env = {"KVSPLIT_CACHE_DIR": str(tmp_path / "new" / "c"), "KVSPLIT_MODELS_DIR": str(tmp_path / "new" / "m")}
    res = cli("doctor", "--no-test", env={**env, variable: str(folder)})
    assert res.returncode == 1
    assert f"problem: the folder {folder} can't be made or written; set {variable}" in res.stderr
    assert not (tmp_path / "new").exists()
    assert "can't be made" not in cli("doctor", "--no-test", env=env).stderr and [
        p.name for p in tmp_path.iterdir()
    ] == ["f"]


def test_doctor_runs_nothing_from_the_folder_where_the_user_stands(tmp_path: Path) -> None:
    for name in ("json", "queue", "ctypes", "llama_cpp"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('taken')\n", encoding="utf-8")
    program = tmp_path / "bin" / "run"  # as the installed command: its own folder is on the path, not this one
    program.parent.mkdir()
    program.write_text("import sys\nfrom kvsplit.cli import main\nsys.exit(main())\n", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(program), "doctor"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert "taken" not in done.stdout + done.stderr and " passed" in done.stdout


def test_doctor_goes_on_without_a_home(cli: Run) -> None:
    res = cli("doctor", "--no-test", env={"KVSPLIT_MODELS_DIR": "~nobody-here/models"})
    assert res.returncode == 1 and "problem: this user has no home folder" in res.stderr
    assert "tools " in res.stdout and "devices" in res.stdout


@pytest.mark.parametrize(
    ("name", "code", "message"), [("SIGTERM", 143, "terminated"), ("SIGINT", 130, "parts are kept")]
)
def test_an_interrupted_download_leaves_nothing_temporary(
    repo: Path, tmp_path: Path, name: str, code: int, message: str
) -> None:
    """With a pip in its place that makes a temporary folder and waits."""
    fake = tmp_path / "fake" / "pip"
    fake.mkdir(parents=True)
    (fake / "__init__.py").write_text("")
    (fake / "__main__.py").write_text(
        "import pathlib, tempfile, time\n"
        "d = tempfile.mkdtemp(prefix='pip-')\n"
        f"pathlib.Path({str(tmp_path / 'up')!r}).write_text(d)\n"
        "time.sleep(600)\n"
    )
    temp = tmp_path / "tmp"
    temp.mkdir()
    path = os.pathsep.join([str(tmp_path / "fake"), str(repo / "python")])
    env = {**os.environ, "PYTHONPATH": path, "KVSPLIT_MODELS_DIR": str(tmp_path / "m"), "TMPDIR": str(temp)}
    cmd = [sys.executable, "-m", "kvsplit", "models", "pull", "smollm2", "-q"]
    with _started(cmd, stderr=subprocess.PIPE, env=env) as proc:
        assert proc.stderr is not None
        end = time.monotonic() + 30
        while not ((tmp_path / "up").exists() and (tmp_path / "up").read_text()) and time.monotonic() < end:
            time.sleep(0.05)
        assert list((tmp_path / "m").glob(".*.parts/kvsplit-req-*/pip-*"))
        children = psutil.Process(proc.pid).children()
        proc.send_signal(getattr(signal, name))
        assert proc.wait(30) == code
        assert message in proc.stderr.read()
        assert not psutil.wait_procs(children, timeout=10)[1]
    assert list(temp.iterdir()) == [] and not list((tmp_path / "m").rglob("kvsplit-req-*"))
