# SPDX-License-Identifier: MIT
"""Every tool that takes cache types takes the same spellings, tells what it made of them, refuses the same mistakes."""

from __future__ import annotations

import json
import os
import re
import resource
import shlex
import signal
import socket
import subprocess
import threading
import urllib.request
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional

import psutil
import pytest
import start_line

from kvsplit.cache_types import is_quantized

pytestmark = [pytest.mark.native, pytest.mark.model]

N_LAYER = 6
N_HEAD_KV = 2
HEAD = 64
N_CTX = 256

COMMON_TOOLS = ["llama-cli", "llama-completion", "llama-server", "llama-perplexity"]
TOOLS = [*COMMON_TOOLS, "llama-bench"]

TYPES = (
    "32 (f32), 16 (f16), 8 (q8_0), 6 (kvq6), 5 (kvq5), 4 (kvq4), 3 (kvq3), 2 (kvq2), "
    "and by name bf16, q5_0, q5_1, q4_0, q4_1, iq4_nl"
)


class Run(NamedTuple):
    """How a tool ended, and what it wrote."""

    returncode: int
    stdout: str
    stderr: str


class Server:
    """A running llama-server on a free port of this machine."""

    def __init__(self, command: List[str], env: Dict[str, str]) -> None:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self.port = s.getsockname()[1]
        self.proc = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(self.port)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=env,
        )
        self.text: Dict[str, List[str]] = {"stdout": [], "stderr": []}
        self.up = threading.Event()
        self.threads = [threading.Thread(target=self._read, args=(name,)) for name in self.text]
        for t in self.threads:
            t.start()

    def _read(self, name: str) -> None:
        for line in getattr(self.proc, name):
            self.text[name].append(line)
            if "listening on" in line:
                self.up.set()
        self.up.set()  # it ended

    def wait(self) -> None:
        """Until it answers or has ended."""
        if not self.up.wait(60):
            self.stop()
            pytest.fail("llama-server did not start:\n" + "".join(self.text["stderr"])[-3000:])
        if self.proc.poll() is None and any("listening on" in line for line in self.text["stderr"]):
            # answered by its main loop: a signal that comes before that loop would be forgotten
            self.ask("/slots")

    def ask(self, path: str, data: Optional[Dict[str, Any]] = None) -> Any:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            None if data is None else json.dumps(data).encode(),
            {"Content-Type": "application/json"},
        )
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=60) as reply:
            return json.load(reply)

    def stop(self) -> Run:
        if self.proc.poll() is None:
            self.proc.send_signal(signal.SIGTERM)
        try:
            code = self.proc.wait(30)
        except subprocess.TimeoutExpired:
            self.proc.kill()
            code = self.proc.wait()
        for t in self.threads:
            t.join()
        self.proc.stdout.close()  # type: ignore[union-attr]
        self.proc.stderr.close()  # type: ignore[union-attr]
        return Run(code, "".join(self.text["stdout"]), "".join(self.text["stderr"]))


class Tools:
    """Runs the tools on a model, each in the way that reaches a context and little more."""

    def __init__(self, find: Callable[[str], Path], model: Path, text: Path, config: Path) -> None:
        self.find, self.model, self.text, self.config = find, model, text, config

    def command(self, name: str, args: List[str], model: Optional[Path], n_ctx: Optional[int]) -> List[str]:
        ctx = ["-c", str(N_CTX if n_ctx is None else n_ctx)]
        base = {
            "llama-cli": [*ctx, "-p", "hello", "-n", "2", "-st", "--temp", "0", "--no-warmup"],
            "llama-completion": [*ctx, "-p", "hello", "-n", "2", "-no-cnv", "--temp", "0", "--no-warmup"],
            "llama-server": [*ctx, "-np", "1", "--no-warmup"],
            # a batch of one context, so that its cache has no more cells than the others'
            "llama-perplexity": [*ctx, "-b", str(N_CTX), "-f", str(self.text), "--chunks", "1", "--no-warmup"],
            "llama-bench": ["-p", "0", "-n", "2", "-r", "1", "--no-warmup", "-o", "jsonl"]
            + (["-d", str(n_ctx)] if n_ctx else []),
        }[name]
        return [str(self.find(name)), "-m", str(model or self.model), "-t", "1", *base, *args]

    def env(self, extra: Optional[Dict[str, str]]) -> Dict[str, str]:
        env = {k: v for k, v in os.environ.items() if not k.startswith("LLAMA_")}
        # no config file of whoever runs the tests
        return {**env, "XDG_CONFIG_HOME": str(self.config), **(extra or {})}

    def server(self, args: str, model: Optional[Path] = None, env: Optional[Dict[str, str]] = None) -> Server:
        return Server(self.command("llama-server", shlex.split(args), model, None), self.env(env))

    def run(
        self,
        name: str,
        args: str = "",
        *,
        model: Optional[Path] = None,
        env: Optional[Dict[str, str]] = None,
        n_ctx: Optional[int] = None,
        memory: Optional[int] = None,
    ) -> Run:
        """Run a tool to its end; llama-server until it listens. memory: the most bytes it may have."""
        if name == "llama-server" and memory is None:
            server = self.server(args, model, env)
            server.wait()
            return server.stop()
        command = self.command(name, shlex.split(args), model, n_ctx)
        if name == "llama-server":
            command += ["--host", "127.0.0.1", "--port", "0"]

        def limit() -> None:
            if memory is not None:
                resource.setrlimit(resource.RLIMIT_AS, (memory, memory))

        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=120,
            env=self.env(env),
            preexec_fn=limit,
            check=False,
        )
        return Run(done.returncode, done.stdout, done.stderr)

    def cache(self, name: str, args: str = "", **kw: Any) -> start_line.Cache:
        """What a tool that must end well says of its cache."""
        done = self.run(name, args, **kw)
        assert done.returncode == 0, done.stderr[-3000:]
        return start_line.one(done.stderr)

    def error(self, name: str, args: str = "", **kw: Any) -> str:
        """The words of a tool that must refuse, with nothing that looks like a result."""
        done = self.run(name, args, **kw)
        assert done.returncode > 0, f"exit code {done.returncode}\n{done.stderr[-3000:]}"
        for mark in ('"type_k"', '"avg_ts"', "Generation:", "[1]", "PPL"):
            assert mark not in done.stdout
        if name in ("llama-completion", "llama-server", "llama-perplexity"):
            assert done.stdout == ""
        assert "kvq: K " not in done.stderr
        return done.stderr


@pytest.fixture(scope="module")
def tools(tool: Callable[[str], Path], smollm2: Path, synth_model: Callable[..., Path], tmp_path_factory: Any) -> Tools:
    """The tools on a model of six layers with the real one's tokenizer."""
    for name in TOOLS:
        tool(name)
    folder = tmp_path_factory.mktemp("tools")
    text = folder / "text.txt"
    text.write_text("The river came down from the hills in the early spring. " * 100, encoding="utf-8")
    model = synth_model(tokenizer=smollm2, n_layer=N_LAYER, n_head_kv=N_HEAD_KV, head_k=HEAD)
    return Tools(tool, model, text, folder)


def by_layer(default: str, **exceptions: str) -> List[str]:
    """Types of all layers: by_layer("kvq4", l0="q8_0")."""
    return [exceptions.get(f"l{i}", default) for i in range(N_LAYER)]


ENDS = by_layer("kvq4", l0="q8_0", l1="q8_0", l4="q8_0", l5="q8_0")

# command line, environment, K and V
SPELLINGS: List[Any] = [
    ("", {}, "f16", "f16"),
    ("--kvq 8", {}, "q8_0", "kvq4"),
    ("--kvq 4", {}, "kvq4", "kvq4"),
    ("--kvq 16", {}, "f16", "f16"),
    ("--kvq k5v4", {}, "kvq5", "kvq4"),
    ("--kvq ' K8V4 '", {}, "q8_0", "kvq4"),
    ("--kvq k32v16", {}, "f32", "f16"),
    ("--kvq-key 4 --kvq-val 8", {}, "kvq4", "q8_0"),
    ("--kvq-key 16 --kvq-val 8", {}, "f16", "q8_0"),
    ("--kvq-val 4,:2=8,-2:=8", {}, "f16", ENDS),
    ("--kvq-key ' KVQ4 , 3 = 8, ::5=F32' --kvq-val bf16", {}, by_layer("kvq4", l0="f32", l3="q8_0", l5="f32"), "bf16"),
    ("--kvq-key iq4_nl --kvq-val q5_1", {}, "iq4_nl", "q5_1"),
    ("--kvq-key q4_1 --kvq-val kvq5", {}, "q4_1", "kvq5"),
    ("--kvq-key q5_0 --kvq-val Q4_0", {}, "q5_0", "q4_0"),
    ("--kvq k6v3", {}, "kvq6", "kvq3"),
    ("--kvq k3v2", {}, "kvq3", "kvq2"),
    ("--kvq-key 2,0=6 --kvq-val 3,-1=5", {}, by_layer("kvq2", l0="kvq6"), by_layer("kvq3", l5="kvq5")),
    ("--flash-attn --kvq 8", {}, "q8_0", "kvq4"),
    ("--kvq 8 -fa", {}, "q8_0", "kvq4"),
    ("--kvq k8v4 --kvq-val 5", {}, "q8_0", "kvq5"),
    ("--kvq-val 5 --kvq k8v4", {}, "q8_0", "kvq5"),
    ("-ctk q5_1 --kvq-val 8", {}, "q5_1", "q8_0"),
    ("--kvq-key 8 -ctv q4_1", {}, "q8_0", "q4_1"),
    ("-ctk q8_0 -ctv kvq4", {}, "q8_0", "kvq4"),
    ("", {"LLAMA_ARG_KVQ": "8"}, "q8_0", "kvq4"),
    ("", {"LLAMA_ARG_KVQ_KEY": "8", "LLAMA_ARG_KVQ_VAL": "4,:2=8,-2:=8"}, "q8_0", ENDS),
    ("", {"LLAMA_ARG_KVQ": "8", "LLAMA_ARG_KVQ_VAL": "5"}, "q8_0", "kvq5"),
    # the nearer source wins
    ("--kvq 4", {"LLAMA_ARG_KVQ": "8"}, "kvq4", "kvq4"),
    ("--kvq 4", {"LLAMA_ARG_KVQ_VAL": "8"}, "kvq4", "kvq4"),
    ("--kvq 8", {"LLAMA_ARG_CACHE_TYPE_K": "q5_1"}, "q8_0", "kvq4"),
    ("-ctk f16 -ctv f16", {"LLAMA_ARG_KVQ": "8"}, "f16", "f16"),
    # each side by itself
    ("-ctk f16", {"LLAMA_ARG_KVQ": "8"}, "f16", "kvq4"),
    ("--kvq-val 5", {"LLAMA_ARG_KVQ": "8"}, "q8_0", "kvq5"),
]


@pytest.mark.parametrize("spelling", SPELLINGS, ids=lambda s: " ".join([*map("=".join, s[1].items()), s[0]]) or "none")
@pytest.mark.parametrize("name", TOOLS)
def test_spellings(tools: Tools, name: str, spelling: Any) -> None:
    args, env, k, v = spelling
    k, v = (x if isinstance(x, list) else by_layer(x) for x in (k, v))
    cache = tools.cache(name, args, env=env)
    assert (cache.k, cache.v) == (k, v)
    for layer in cache.layers:
        assert layer.rot_k == (HEAD if is_quantized(layer.k) else 0)
        assert layer.rot_v == (HEAD if is_quantized(layer.v) else 0)
        assert layer.flash and layer.where == "CPU"
    bits = sum(start_line.BITS[t] for t in (*cache.k, *cache.v))
    mib = bits / 8 * N_CTX * N_HEAD_KV * HEAD / 2**20
    # each line is rounded to 0.01 MiB, and there is at most one a layer
    assert cache.mib == pytest.approx(mib, abs=0.005 * N_LAYER)


@pytest.mark.parametrize("name", TOOLS)
def test_help(tools: Tools, name: str) -> None:
    done = tools.run(name, "--help")
    assert done.returncode == 0
    flags = ["--kvq", "--kvq-key", "--kvq-val"]
    if name != "llama-bench":
        flags += ["--kvq-draft", "--kvq-key-draft", "--kvq-val-draft", "LLAMA_ARG_KVQ", "LLAMA_ARG_KVQ_VAL"]
    words = done.stdout.replace(",", " ").replace(")", " ").split()
    assert [f for f in flags if f not in words] == []


@pytest.mark.parametrize("name", COMMON_TOOLS)
def test_draft_flags_leave_the_main_model_alone(tools: Tools, name: str) -> None:
    cache = tools.cache(name, "--kvq-draft k8v8 --kvq-key-draft 4,:1=8 --kvq-val-draft q5_1 --kvq-key 5")
    assert (cache.k, cache.v) == (by_layer("kvq5"), by_layer("f16"))


# command line, environment, what the message must hold
MISTAKES: List[Any] = [
    ("--kvq 6", {}, ["--kvq", "'6' is no preset", "k8v4", "8 (= k8v4), 4 (= k4v4), 16 (= f16)"]),
    ("--kvq k7v5", {}, ["--kvq", "'7' is no cache type", TYPES]),
    ("--kvq k8v1", {}, ["--kvq", "'1' is no cache type", TYPES]),
    ("--kvq q8_0", {}, ["--kvq", "'q8_0' is no preset", "--kvq-key and --kvq-val"]),
    ("--kvq ''", {}, ["--kvq", "is no preset"]),
    ("--kvq-key 9", {}, ["--kvq-key", "'9' is no cache type", TYPES]),
    ("--kvq-key 1", {}, ["--kvq-key", "'1' is no cache type", TYPES]),
    ("--kvq-val kvq7", {}, ["--kvq-val", "'kvq7' is no cache type", TYPES]),
    ("--kvq-val 7", {}, ["--kvq-val", "'7' is no cache type", TYPES]),
    ("--kvq-key q4_k", {}, ["--kvq-key", "'q4_k' is no cache type", TYPES]),
    ("--kvq-val 8,:2=q8_1", {}, ["--kvq-val", "'q8_1' is no cache type", TYPES]),
    ("--kvq-val ''", {}, ["--kvq-val", "'' is no cache type", TYPES]),
    ("--kvq-val 4,8", {}, ["--kvq-val", "'8' is no exception", ":2=8"]),
    ("--kvq-val 4,a:b=8", {}, ["--kvq-val", "'a:b' is no layer slice", "10:20"]),
    ("--kvq-val 4,0:2:0=8", {}, ["--kvq-val", "'0:2:0'", "step", "1 or more"]),
    ("--kvq-val 4,1:2:3:4=8", {}, ["--kvq-val", "'1:2:3:4' is no layer slice"]),
    ("--kvq-val 4,6=8", {}, ["--kvq-val", "'6' is out of range", "layers 0 to 5"]),
    ("--kvq-key 4,-7=8", {}, ["--kvq-key", "'-7' is out of range", "layers 0 to 5"]),
    ("--kvq-key 4,:7=8", {}, ["--kvq-key", "':7' is out of range", "layers 0 to 5"]),
    ("--kvq-val 4,3:3=8", {}, ["--kvq-val", "'3:3' selects no layer", "layers 0 to 5"]),
    ("--kvq 8 -ctk q8_0", {}, ["--kvq", "--cache-type-k", "keys"]),
    ("-ctk f16 --kvq 8", {}, ["--kvq", "--cache-type-k", "keys"]),
    ("--kvq 16 -ctv f16", {}, ["--kvq", "--cache-type-v", "values"]),
    ("--kvq-key 8 -ctk f16", {}, ["--kvq-key", "--cache-type-k", "keys"]),
    ("--kvq-val 8 -ctv kvq4 -ctk kvq4", {}, ["--kvq-val", "--cache-type-v", "values"]),
    ("--kvq 8 -fa off", {}, ["quantized values (kvq4) need flash attention", "-fa on", "--kvq-val 16"]),
    ("--kvq-val 16,-1=5 -fa off", {}, ["quantized values (f16,-1=kvq5) need flash attention", "--kvq-val 16"]),
    ("-ctv q8_0 -fa off", {}, ["quantized values (q8_0) need flash attention"]),
    ("", {"LLAMA_ARG_KVQ": "6"}, ["LLAMA_ARG_KVQ", "'6' is no preset"]),
    ("", {"LLAMA_ARG_KVQ_VAL": "1"}, ["LLAMA_ARG_KVQ_VAL", "'1' is no cache type", TYPES]),
    ("--kvq", {}, ["--kvq"]),
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda m: " ".join([*map("=".join, m[1].items()), m[0]]))
@pytest.mark.parametrize("name", TOOLS)
def test_mistakes(tools: Tools, name: str, mistake: Any) -> None:
    args, env, words = mistake
    message = tools.error(name, args, env=env)
    assert [w for w in words if w not in message] == [], message[-3000:]


@pytest.mark.parametrize("name", COMMON_TOOLS)
def test_mistakes_about_the_draft(tools: Tools, name: str) -> None:
    message = tools.error(name, "--kvq-draft k8v8 -ctkd f16")
    assert "--kvq-draft" in message and "--cache-type-k-draft" in message
    assert TYPES in tools.error(name, "--kvq-key-draft 1")


@pytest.mark.parametrize("name", COMMON_TOOLS)
def test_both_in_the_environment(tools: Tools, name: str) -> None:
    message = tools.error(name, env={"LLAMA_ARG_KVQ": "8", "LLAMA_ARG_CACHE_TYPE_K": "q8_0"})
    assert "--kvq" in message and "--cache-type-k" in message


@pytest.mark.parametrize("flash", ["", "-fa on", "-fa off"])
@pytest.mark.parametrize("head", [40, 80])
@pytest.mark.parametrize("name", TOOLS)
def test_head_size(
    tools: Tools, name: str, head: int, flash: str, smollm2: Path, synth_model: Callable[..., Path]
) -> None:
    model = synth_model(tokenizer=smollm2, head_k=head)
    message = tools.error(name, f"--kvq-key 8 {flash}", model=model)
    assert "keys can't be stored as q8_0" in message and f"head size {head}" in message
    assert "--kvq-key 16" in message
    if flash != "-fa off":
        message = tools.error(name, f"-ctv kvq4 {flash}", model=model)
        assert "values can't be stored as kvq4" in message and f"head size {head}" in message
    cache = tools.cache(name, flash, model=model)
    assert cache.k == cache.v == ["f16", "f16"] and cache.layers[0].flash == (flash != "-fa off")


@pytest.mark.parametrize("kind", ["cut", "header", "text", "missing"])
@pytest.mark.parametrize("name", TOOLS)
def test_bad_model_files(tools: Tools, name: str, kind: str, tmp_path: Path) -> None:
    whole = tools.model.read_bytes()
    path = tmp_path / f"{kind}.gguf"
    data = {"cut": whole[: len(whole) // 2], "header": whole[:80], "text": b"this is not a model at all"}
    if kind in data:
        path.write_bytes(data[kind])
    message = tools.error(name, "--kvq 8", model=path)
    assert path.name in message
    if name != "llama-bench":  # which hides the library's log
        why = {"cut": "corrupted or incomplete", "header": "failed to", "text": "magic", "missing": "No such file"}
        assert why[kind] in message


@pytest.mark.parametrize("name", TOOLS)
def test_context_larger_than_memory(tools: Tools, name: str, smollm2: Path) -> None:
    """It is refused before anything is allocated: under a limit far below, the allocation would fail otherwise."""
    total = psutil.virtual_memory().total
    bytes_per_token = 30 * 3 * 64 * 2 * 2
    n_ctx = 3 * total // bytes_per_token // 256 * 256
    message = tools.error(
        name, "--kvq 16" + ("" if name == "llama-bench" else " -fit off"), model=smollm2, n_ctx=n_ctx, memory=8 << 30
    )
    found = re.search(r"KV cache needs ([\d.]+) MiB", message)
    assert found, message[-3000:]
    mib = float(found[1])
    # llama-bench adds the tokens it makes; cells come in steps of 256 or fewer
    more = N_CTX if name == "llama-bench" else 0
    assert 0 <= mib - n_ctx * bytes_per_token / 2**20 <= more * bytes_per_token / 2**20 + 0.006
    assert "more than there is" in message and "smaller context (-c)" in message
    # narrower types with what they need, of which 4 bits would fit
    narrower = dict(re.findall(r"--kvq (k\dv\d) \(([\d.]+) MiB\)", message))
    assert "k4v4" in narrower
    for preset, size in narrower.items():
        bits = {"k8v8": 8.5, "k8v4": 6.5, "k4v4": 4.5}[preset]
        assert float(size) == pytest.approx(mib * bits / 16, abs=0.006)


@pytest.mark.parametrize("fit", ["-fit off", ""])
def test_context_beyond_all_measure(tools: Tools, fit: str) -> None:
    """The cache's lists of cells alone would fill the memory."""
    message = tools.error("llama-completion", f"--kvq 8 {fit}", n_ctx=2_000_000_000, memory=8 << 30)
    assert "KV cache needs" in message and "more than there is" in message and "smaller context (-c)" in message


@pytest.fixture
def config(tmp_path: Path) -> Iterator[Callable[[str], Dict[str, str]]]:
    """Environment in which llama.cpp's config file has this text."""

    def write(text: str) -> Dict[str, str]:
        folder = tmp_path / "llama.cpp"
        folder.mkdir(exist_ok=True)
        (folder / "config.ini").write_text(text, encoding="utf-8")
        return {"XDG_CONFIG_HOME": str(tmp_path)}

    yield write


def test_config_file_is_the_farthest_source(tools: Tools, config: Callable[[str], Dict[str, str]]) -> None:
    env = config("[*]\nctk = q4_1\nkvq-val = 8,:1=4\n")
    v = by_layer("q8_0", l0="kvq4")
    for args, more, want in [
        ("", {}, (by_layer("q4_1"), v)),
        ("", {"LLAMA_ARG_KVQ_KEY": "5"}, (by_layer("kvq5"), v)),
        ("", {"LLAMA_ARG_KVQ": "4"}, (by_layer("kvq4"), by_layer("kvq4"))),
        ("--kvq-key 8", {"LLAMA_ARG_KVQ": "4"}, (by_layer("q8_0"), by_layer("kvq4"))),
        ("-ctk f16", {"LLAMA_ARG_KVQ_KEY": "5"}, (by_layer("f16"), v)),
        ("--kvq 16", {}, (by_layer("f16"), by_layer("f16"))),
    ]:
        cache = tools.cache("llama-completion", args, env={**env, **more})
        assert (cache.k, cache.v) == want, (args, more)


def test_both_in_a_config_file(tools: Tools, config: Callable[[str], Dict[str, str]]) -> None:
    message = tools.error("llama-completion", env=config("kvq = 8\nctk = f16\n"))
    assert "--kvq" in message and "--cache-type-k" in message


BENCH: List[Any] = [
    ("--kvq k8v4;k4v4", {}, [("q8_0", "kvq4"), ("kvq4", "kvq4")]),
    ("--kvq 8 --kvq 16", {}, [("q8_0", "kvq4"), ("f16", "f16")]),
    ("--kvq-key 8;4 --kvq-val 4", {}, [("q8_0", "kvq4"), ("kvq4", "kvq4")]),
    ("--kvq-key 8 --kvq-key 4 --kvq-val 4;5", {}, [(k, v) for k in ("q8_0", "kvq4") for v in ("kvq4", "kvq5")]),
    ("--kvq 8;4 --kvq-val 5", {}, [("q8_0", "kvq5"), ("kvq4", "kvq5")]),
    ("-ctk f16,q8_0 -ctv f16", {}, [("f16", "f16"), ("q8_0", "f16")]),
    ("-ctk f16,q8_0 --kvq-val 4,:2=8", {}, [("f16", "kvq4,0:2=q8_0"), ("q8_0", "kvq4,0:2=q8_0")]),
    ("--kvq-val 4,:2=8,-2:=8;8", {}, [("f16", "q8_0,2:4=kvq4"), ("f16", "q8_0")]),
    ("", {"LLAMA_ARG_KVQ": "8;4"}, [("q8_0", "kvq4"), ("kvq4", "kvq4")]),
]


@pytest.mark.parametrize("case", BENCH, ids=lambda c: " ".join([*map("=".join, c[1].items()), c[0]]))
def test_bench_sweeps(tools: Tools, case: Any) -> None:
    args, env, want = case
    done = tools.run("llama-bench", " ".join(shlex.quote(a) for a in args.split()), env=env)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(r["type_k"], r["type_v"]) for r in rows] == want
    assert all(r["avg_ts"] > 0 for r in rows)
    # the rows name what ran: the start lines of the same contexts have the same types
    for cache, (k, v) in zip(start_line.parse(done.stderr), want):
        assert set(cache.k) == {p.split("=")[-1] for p in k.split(",")}
        assert set(cache.v) == {p.split("=")[-1] for p in v.split(",")}
    assert len(start_line.parse(done.stderr)) == len(want)


def test_bench_table_names_policies(tools: Tools) -> None:
    done = tools.run("llama-bench", "--kvq-val 4,:2=8 -o md")
    assert done.returncode == 0 and "| kvq4,0:2=q8_0 |" in done.stdout


def test_bench_refuses_the_draft_flags(tools: Tools) -> None:
    assert "--kvq-draft" in tools.error("llama-bench", "--kvq-draft k8v8")


@pytest.mark.parametrize("unified", ["--kv-unified", "--no-kv-unified"])
def test_server_answers(tools: Tools, smollm2: Path, unified: str) -> None:
    server = tools.server(f"--kvq-key 8,:2=16 --kvq-val 4,-2:=8 -np 2 -c 1024 {unified}", smollm2)
    try:
        server.wait()
        prompt = "The capital of France is Paris. The capital of Italy is"
        request = {"prompt": prompt, "n_predict": 4, "temperature": 0, "cache_prompt": False}
        answers: List[str] = []

        def ask() -> None:
            answers.append(server.ask("/completion", request)["content"])

        both = [threading.Thread(target=ask) for _ in range(2)]
        for t in both:
            t.start()
        for t in both:
            t.join()
    finally:
        done = server.stop()
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(answers) == 2 and all("Rome" in a for a in answers), answers
    cache = start_line.one(done.stderr)
    assert cache.k == ["f16"] * 2 + ["q8_0"] * 28 and cache.v == ["kvq4"] * 28 + ["q8_0"] * 2
    # 1024 cells, shared or 512 for each of two
    mib = (2 * 16 + 28 * 8.5 + 28 * 4.5 + 2 * 8.5) / 8 * 1024 * 3 * 64 / 2**20
    assert cache.mib == pytest.approx(mib, abs=0.02)


def test_draft_model_has_types_of_its_own(tools: Tools) -> None:
    args = f"--kvq 8 -md '{tools.model}' --spec-type draft-simple -fit off"
    for more, k, v in [
        ("--kvq-draft k8v8", "q8_0", "q8_0"),
        ("--kvq-draft 16 --kvq-key-draft 5 --kvq-val-draft q4_1", "kvq5", "q4_1"),
        ("-ctkd q8_0 --kvq-val-draft 4", "q8_0", "kvq4"),
        ("", "f16", "f16"),
    ]:
        done = tools.run("llama-server", f"{args} {more}")
        assert done.returncode == 0, done.stderr[-3000:]
        main, draft = start_line.one(done.stderr), start_line.one(done.stderr, draft=True)
        assert (main.k, main.v) == (by_layer("q8_0"), by_layer("kvq4"))
        assert (draft.k, draft.v) == (by_layer(k), by_layer(v)), more


def test_draft_decodes(tools: Tools) -> None:
    server = tools.server(f"--kvq 8 -md '{tools.model}' --spec-type draft-simple --kvq-draft k8v8")
    try:
        server.wait()
        data = server.ask("/completion", {"prompt": "hello there", "n_predict": 8, "temperature": 0})
    finally:
        done = server.stop()
    assert done.returncode == 0, done.stderr[-3000:]
    assert data["tokens_predicted"] == 8
    assert start_line.one(done.stderr, draft=True).k == by_layer("q8_0")


def test_policy_of_the_file(tools: Tools, smollm2: Path, synth_model: Callable[..., Path]) -> None:
    meta = (("kvq.key", "8,:1=16"), ("kvq.val", "5"))
    model = synth_model(tokenizer=smollm2, n_layer=N_LAYER, extra=meta)
    k, v = by_layer("q8_0", l0="f16"), by_layer("kvq5")
    for args, want in [
        ("", (k, v)),
        ("--kvq 4", (by_layer("kvq4"), by_layer("kvq4"))),
        ("--kvq-val 4", (k, by_layer("kvq4"))),
        ("-ctk f16", (by_layer("f16"), v)),
        ("--kvq 16", (by_layer("f16"), by_layer("f16"))),
        ("--override-kv kvq.key=str:4", (by_layer("kvq4"), v)),
    ]:
        cache = tools.cache("llama-completion", args, model=model)
        assert (cache.k, cache.v) == want, args
    done = tools.run("llama-bench", "", model=model)
    assert json.loads(done.stdout)["type_k"] == "q8_0,0=f16"


@pytest.mark.parametrize("name", TOOLS)
def test_policy_of_a_file_that_is_malformed(
    tools: Tools, name: str, smollm2: Path, synth_model: Callable[..., Path]
) -> None:
    for side, spec, why in [("key", "7", "'7' is no cache type"), ("val", "4,9=8", "'9' is out of range")]:
        model = synth_model(tokenizer=smollm2, n_layer=N_LAYER, extra=((f"kvq.{side}", spec),))
        message = tools.error(name, model=model)
        assert f"metadata kvq.{side}" in message and why in message
        # a flag for that side beats it
        assert tools.cache(name, f"--kvq-{side} 16", model=model).k == by_layer("f16")


def test_metadata_from_the_command_line(tools: Tools) -> None:
    cache = tools.cache("llama-completion", "--override-kv kvq.key=str:4,kvq.val=str:8")
    assert (cache.k, cache.v) == (by_layer("kvq4"), by_layer("q8_0"))
    assert tools.cache("llama-completion", "--override-kv kvq.key=str:4 -ctk f16").k == by_layer("f16")
    assert "metadata kvq.key" in tools.error("llama-completion", "--override-kv kvq.key=str:7")


@pytest.mark.parametrize(
    "published, k, v",
    [
        ("--flash-attn --kvq 8", "q8_0", "kvq4"),
        ("--kvq-key 4 --kvq-val 8", "kvq4", "q8_0"),
        ("--kvq 4", "kvq4", "kvq4"),
        ("--kvq-key 16 --kvq-val 8", "f16", "q8_0"),
    ],
)
@pytest.mark.parametrize("name", ["llama-cli", "llama-completion"])
def test_published_command_lines(tools: Tools, smollm2: Path, name: str, published: str, k: str, v: str) -> None:
    prompt = "The capital of France is"
    done = tools.run(name, f"{published} -n 8 -p '{prompt}'", model=smollm2)
    assert done.returncode == 0, done.stderr[-3000:]
    cache = start_line.one(done.stderr)
    assert (cache.k, cache.v) == ([k] * 30, [v] * 30)
    if name == "llama-completion":
        assert "Paris" in done.stdout
    else:  # which talks by the model's chat template: so small a model may say anything
        answer = done.stdout.split(f"> {prompt}")[1].split("[ Prompt:")[0]
        assert len(answer.split()) >= 2, done.stdout
