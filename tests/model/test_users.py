# SPDX-License-Identifier: MIT
"""Faults that users of quantized caches met, each at the level where they meet it: a command line.

docs/reliability.md lists them, with what the pinned release does. Faults over HTTP are in test_server.py, faults in
Python in tests/python/test_types_from_python.py. What needs an unpatched build is marked slow.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import struct
import subprocess
import sys
import warnings as python_warnings
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Tuple

import gguf
import numpy as np
import pytest
import start_line
from needs import missing

import kvsplit
from kvsplit.cache_types import CACHE_TYPES, is_quantized
from kvsplit.errors import CacheWarning

pytestmark = [pytest.mark.native, pytest.mark.model]

Run = Callable[..., "subprocess.CompletedProcess[str]"]
Make = Callable[..., Path]

NO_ROTATION = {"LLAMA_ATTN_ROT_DISABLE": "1"}


def refused(done: "subprocess.CompletedProcess[str]", *words: str) -> None:
    """It ended with an error, not by a signal, said why, and gave no text."""
    assert done.returncode > 0, f"exit code {done.returncode}\n{done.stdout[-500:]}{done.stderr[-3000:]}"
    assert [w for w in words if w.lower() not in done.stderr.lower()] == [], done.stderr[-3000:]
    assert done.stdout.strip() == ""


@pytest.fixture(scope="module")
def unpatched() -> Run:
    """Run a tool of the pinned release without patches, whichever way it ends."""
    folder = os.environ.get("KVSPLIT_UPSTREAM_DIR", "")
    if not folder:
        missing("KVSPLIT_UPSTREAM_DIR is not set: `make build-upstream` makes an unpatched build")

    def run(name: str, *args: Any, env: Optional[Dict[str, str]] = None) -> "subprocess.CompletedProcess[str]":
        path = Path(folder) / "bin" / name
        if not path.is_file():
            missing(f"there is no {name} in {folder}")
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("LLAMA_", "LD_LIBRARY_PATH"))}
        return subprocess.run(
            [str(path.resolve()), *map(str, args)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            env={**clean, "GGML_NO_BACKTRACE": "1", **(env or {})},
            timeout=300,
            check=False,
        )

    return run


# ---- shifting keys

SHIFT = "-n 300 -c 256 --context-shift --keep 4 --ignore-eos -no-cnv -t 1 --temp 0 --no-warmup".split()


def shift(run_tool: Run, model: Path, *types: str, env: Optional[Dict[str, str]] = None) -> start_line.Cache:
    """300 tokens in a context of 256, so that keys are moved; returns what the tool says of its cache."""
    done = run_tool("llama-completion", "-m", model, "-p", "a b c d e f g h", *SHIFT, *types, env=env)
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stderr[-3000:]}"
    # the last of 300 tokens is not evaluated any more
    assert re.search(r"\beval time = .*/ +299 runs", done.stderr), done.stderr[-1500:]
    # NaN logits would give one token over and over; eight words are the prompt's
    assert len(set(done.stdout.split())) > 10, done.stdout
    return start_line.one(done.stderr)


HEADS = (64, 96, 128, 160)


@pytest.mark.parametrize("i, name", list(enumerate(t.name for t in CACHE_TYPES)), ids=[t.name for t in CACHE_TYPES])
def test_keys_of_any_type_are_shifted_with_and_without_rotation(
    run_tool: Run, smollm2: Path, synth_model: Make, i: int, name: str
) -> None:
    """Heads of 96 and 160 values are stored without a rotation: no power of two above 32 divides them."""
    runs: List[Tuple[int, Dict[str, str]]] = [(HEADS[i % 4], {})]
    if is_quantized(name):
        # with 64 and 96, 128 and 160 by turns: each type has a run with a rotation and one without
        runs += [(HEADS[(i + 1) % 4], {}) if i % 2 else (HEADS[i % 4], NO_ROTATION)]
    for head, env in runs:
        model = synth_model(tokenizer=smollm2, n_layer=2, head_k=head)
        cache = shift(run_tool, model, "-ctk", name, "-ctv", name, env=env)
        rotated = is_quantized(name) and not env and head % 64 == 0
        assert cache.k == [name] * 2 and [bool(x.rot_k) for x in cache.layers] == [rotated] * 2


@pytest.mark.parametrize("head", [40, 80])
def test_keys_of_heads_that_no_block_divides_are_shifted(
    run_tool: Run, smollm2: Path, synth_model: Make, head: int
) -> None:
    model = synth_model(tokenizer=smollm2, n_layer=2, head_k=head)
    assert shift(run_tool, model, "-ctk", "bf16").k == ["bf16"] * 2


@pytest.mark.parametrize("env", [{}, NO_ROTATION], ids=["rotation", "no-rotation"])
@pytest.mark.parametrize("types", [("-ctk", "q8_0"), ("--kvq-key", "16,1=4,2=3", "--kvq-val", "4,0=16")], ids=" ".join)
def test_keys_are_shifted_where_rope_covers_a_part_of_the_head(
    run_tool: Run, smollm2: Path, synth_model: Make, types: Tuple[str, ...], env: Dict[str, str]
) -> None:
    model = synth_model(tokenizer=smollm2, arch="mimo2", n_layer=4, n_rot=32)
    cache = shift(run_tool, model, *types, env=env)
    assert [bool(x.rot_k) for x in cache.layers] == [is_quantized(k) and not env for k in cache.k]


# ---- flash attention off


@pytest.mark.parametrize("key", ["8", "6", "4", "q5_1", "8,::2=16", "16,:2=4"])
def test_quantized_keys_answer_without_flash_attention(run_tool: Run, smollm2: Path, key: str) -> None:
    args = "-c 256 -n 6 -no-cnv -t 1 --temp 0 --no-display-prompt -fa off --kvq-key".split()
    done = run_tool("llama-completion", "-m", smollm2, "-p", "The capital of France is", *args, key)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Paris" in done.stdout
    cache = start_line.one(done.stderr)
    assert not any(x.flash for x in cache.layers) and set(cache.v) == {"f16"} and set(cache.k) != {"f16"}


# ---- many layers and sequences

# Tensors of a cache, views of it for each stream and its rotations are counted when it is made: a context that counts
# too few ends in an assertion ("not enough space in the context's memory pool"), by the number of layers or sequences.
# Layers differ, so that none can stand for another.
MANY = ["--kvq-key", "8,::2=16,::3=4", "--kvq-val", "4,::5=8"]


@pytest.mark.parametrize("shape", [(30, "llama"), (64, "llama"), (128, "llama"), (64, "gemma3")], ids=str)
def test_caches_of_many_layers_and_sequences_have_room_for_their_tensors(
    synth_model: Make, shape: Tuple[int, str]
) -> None:
    n_layer, arch = shape
    model = synth_model(n_layer=n_layer, arch=arch, window=128)
    done = subprocess.run(
        [sys.executable, "-c", CONTEXTS, str(model), arch], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    made = [json.loads(line) for line in done.stdout.splitlines()]
    # one sequence, eight unified and not; sliding layers whole and not
    assert len(made) == (5 if arch == "gemma3" else 3) and all(m == n_layer for m in made), made


CONTEXTS = """
import sys, llama_cpp, numpy as np
from kvsplit import native
lib = native.load()
quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
llama_cpp.llama_log_set(quiet, None)
model = llama_cpp.llama_model_load_from_file(sys.argv[1].encode(), llama_cpp.llama_model_default_params())
for n_seq in (1, 8):
    for unified in ((False, True) if n_seq > 1 else (True,)):
        for swa_full in ((False, True) if n_seq > 1 and sys.argv[2] == "gemma3" else (False,)):
            p = llama_cpp.llama_context_default_params()
            p.n_ctx, p.n_seq_max, p.kv_unified, p.swa_full = 256 * n_seq, n_seq, unified, swa_full
            p.n_threads = p.n_threads_batch = 1
            p.flash_attn_type = 1
            p.type_k = lib.handle("8,::2=16,::3=4", "kvq_key")
            p.type_v = lib.handle("4,::5=8", "kvq_val")
            ctx = llama_cpp.llama_init_from_model(model, p)
            assert ctx, lib.last_error()
            batch = llama_cpp.llama_batch_init(2 * n_seq, 0, 1)
            batch.n_tokens = 2 * n_seq
            for i in range(2 * n_seq):
                batch.token[i], batch.pos[i], batch.n_seq_id[i] = 5 + i, i // n_seq, 1
                batch.seq_id[i][0], batch.logits[i] = i % n_seq, i >= n_seq
            assert llama_cpp.llama_decode(ctx, batch) == 0
            mem = llama_cpp.llama_get_memory(ctx)
            llama_cpp.llama_memory_seq_rm(mem, 0, 0, 1)
            llama_cpp.llama_memory_seq_add(mem, 0, 1, -1, -1)
            batch.n_tokens, batch.pos[0], batch.logits[0] = 1, 1, 1
            assert llama_cpp.llama_decode(ctx, batch) == 0
            logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(ctx, 0), (256,))
            assert np.isfinite(logits).all()
            assert llama_cpp.llama_state_get_size(ctx) > 0
            print(len(lib.layers(ctx)))
            llama_cpp.llama_batch_free(batch)
            llama_cpp.llama_free(ctx)
"""


def test_eight_sequences_of_128_layers_on_the_command_line(
    run_tool: Run, smollm2: Path, synth_model: Make, tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The river came down from the hills in the early spring. " * 200, encoding="utf-8")
    model = synth_model(tokenizer=smollm2, n_layer=128)
    # eight contexts of 64 fit into a batch of 512
    args = ["-f", text, "-c", 64, "-b", 512, "--chunks", 8, "-t", 1, "--no-warmup"]
    done = run_tool("llama-perplexity", "-m", model, *args, *MANY)
    assert done.returncode == 0 and "n_seq=8" in done.stderr, done.stderr[-3000:]
    assert np.isfinite([float(x) for x in re.findall(r"\[\d+\]([\d.]+|-?nan|inf),", done.stdout)]).all()
    assert len(start_line.one(done.stderr).layers) == 128


# ---- saved sessions

PROMPT = "Once upon a time there was a small village by the river, and"
COMPLETE = "-c 512 --temp 0 -s 1 -no-cnv -t 1 -n 10 --no-display-prompt --no-warmup".split()


def complete(
    run_tool: Run, model: Path, *args: Any, env: Optional[Dict[str, str]] = None
) -> "subprocess.CompletedProcess[str]":
    return run_tool("llama-completion", "-m", model, "-p", PROMPT, *COMPLETE, *args, env=env)


def saved(run_tool: Run, model: Path, path: Path, *args: Any, env: Optional[Dict[str, str]] = None) -> str:
    """The text that goes on from a session saved to path."""
    done = complete(run_tool, model, *args, "--prompt-cache", path, env=env)
    assert done.returncode == 0 and path.is_file(), done.stderr[-3000:]
    return done.stdout


ON: Dict[str, str] = {}

# saved with, loaded with, words that the reason has
MISMATCHES: Dict[str, Any] = {
    "rotation-off": (["--kvq", "k8v4"], ON, ["--kvq", "k8v4"], NO_ROTATION, ["rotated by 64", "not rotated"]),
    "rotation-on": (["--kvq", "k8v4"], NO_ROTATION, ["--kvq", "k8v4"], ON, ["rotated by 64", "not rotated"]),
    "keys-alone-rotated": (["--kvq-key", "8"], ON, ["--kvq-key", "8"], NO_ROTATION, ["q8_0 rotated by 64"]),
    "sides-swapped": (["--kvq", "k8v4"], ON, ["--kvq", "k4v8"], ON, ["q8_0", "kvq4"]),
    "one-layer-wider": (["--kvq", "k8v4"], ON, ["--kvq-key", "8,7=16", "--kvq-val", "4"], ON, ["layer 7", "f16"]),
    "one-layer-narrower": (["--kvq-key", "8,7=16"], ON, ["--kvq-key", "8"], ON, ["layer 7", "f16", "q8_0"]),
    # 18 bytes hold 32 values in each: only the name of the type tells them apart
    "same-size": (["-ctk", "q4_0", "-ctv", "q4_0"], ON, ["-ctk", "iq4_nl", "-ctv", "kvq4"], ON, ["q4_0", "iq4_nl"]),
    "quantized-into-f16": (["--kvq", "k8v4"], ON, [], ON, ["q8_0", "f16"]),
    "f16-into-quantized": ([], ON, ["--kvq", "k8v4"], ON, ["type"]),
}


@pytest.mark.parametrize("case", MISMATCHES)
def test_a_session_that_means_something_else_is_refused_with_the_reason(
    run_tool: Run, smollm2: Path, tmp_path: Path, case: str
) -> None:
    args, env, other, other_env, words = MISMATCHES[case]
    path = tmp_path / "session.bin"
    text = saved(run_tool, smollm2, path, *args, env=env)
    before = path.read_bytes()
    refused(complete(run_tool, smollm2, *other, "--prompt-cache", path, env=other_env), "session.bin", *words)
    assert path.read_bytes() == before
    if env == other_env:
        return
    # as it was saved, it goes on
    again = complete(run_tool, smollm2, *args, "--prompt-cache", path, env=env)
    assert again.returncode == 0 and "exact match" in again.stderr and again.stdout == text


@pytest.mark.parametrize("saved_with, loaded_with", [("on", "off"), ("off", "on")])
def test_a_session_of_the_other_flash_attention_is_refused_by_name(
    run_tool: Run, smollm2: Path, tmp_path: Path, saved_with: str, loaded_with: str
) -> None:
    """Without flash attention values are stored transposed."""
    path = tmp_path / "session.bin"
    for key in ([], ["--kvq-key", "8"]):
        saved(run_tool, smollm2, path, "-fa", saved_with, *key)
        done = complete(run_tool, smollm2, "-fa", loaded_with, *key, "--prompt-cache", path)
        refused(done, "session.bin", "flash attention", "-fa")
        path.unlink()


@pytest.mark.parametrize("kind", ["empty", "half", "no-session", "longer"])
def test_a_session_file_that_is_broken_is_refused_and_kept(
    run_tool: Run, smollm2: Path, tmp_path: Path, kind: str
) -> None:
    path = tmp_path / "session.bin"
    saved(run_tool, smollm2, path, "--kvq", "k8v4")
    whole = path.read_bytes()
    data = {"empty": b"", "half": whole[: len(whole) // 2], "no-session": b"not a session\n" * 20, "longer": whole * 2}
    path.write_bytes(data[kind])
    done = complete(run_tool, smollm2, "--kvq", "k8v4", "--prompt-cache", path)
    if kind == "empty":  # taken for a new one, as upstream does: `touch` is a way to ask for a file
        assert done.returncode == 0 and path.stat().st_size == len(whole)
    else:
        refused(done, "session.bin")
        assert path.read_bytes() == data[kind]


def test_a_session_is_reused_as_far_as_with_f16(
    run_tool: Run, smollm2: Path, synth_model: Make, tmp_path: Path
) -> None:
    """A prompt that goes another way after some words takes as many tokens from it, sliding layers included."""
    # three of its four layers slide
    model = synth_model(tokenizer=smollm2, arch="gemma3", n_layer=4, window=64, pattern=4)
    said = {}
    other = PROMPT.replace("river, and", "sea. In winter")
    for preset in ("16", "k8v4"):
        path = tmp_path / f"{preset}.bin"
        saved(run_tool, model, path, "--kvq", preset)
        args = [*COMPLETE, "--kvq", preset, "--prompt-cache", path, "--prompt-cache-ro"]
        done = run_tool("llama-completion", "-m", model, "-p", other, *args)
        assert done.returncode == 0, done.stderr[-3000:]
        found = re.search(r"session file matches (\d+) / (\d+) tokens", done.stderr)
        assert found and 0 < int(found[1]) < int(found[2]), done.stderr[-3000:]
        said[preset] = found[0]
    assert said["16"] == said["k8v4"], said


UPSTREAM_TYPES = [["-ctk", "q8_0", "-ctv", "q8_0"], ["-ctk", "q4_0"], ["-ctk", "q8_0", "-ctv", "q4_0"], []]


@pytest.mark.slow
@pytest.mark.parametrize("types", UPSTREAM_TYPES, ids=" ".join)
def test_a_session_of_the_unpatched_release_loads_and_its_rotation_is_said_to_be_assumed(
    unpatched: Run, run_tool: Run, smollm2: Path, tmp_path: Path, types: List[str]
) -> None:
    path = tmp_path / "session.bin"
    theirs = saved(unpatched, smollm2, path, *types)
    done = complete(run_tool, smollm2, *types, "--prompt-cache", path, "--prompt-cache-ro")
    assert done.returncode == 0 and "exact match" in done.stderr, done.stderr[-3000:]
    assert ("default is assumed" in done.stderr) == bool(types), done.stderr[-3000:]
    # Other attention kernels go on from the same rows: the first words are alike where the rows are read aright.
    # Rows that are read with another rotation don't give one of them.
    assert theirs.split()[0] == done.stdout.split()[0], (theirs, done.stdout)
    if types:  # what contradicts the assumption
        refused(complete(run_tool, smollm2, *types, "--prompt-cache", path, env=NO_ROTATION), "rotated")


@pytest.mark.slow
@pytest.mark.parametrize("types", UPSTREAM_TYPES, ids=" ".join)
def test_the_unpatched_release_refuses_a_session_it_would_misread(
    unpatched: Run, run_tool: Run, smollm2: Path, tmp_path: Path, types: List[str]
) -> None:
    path = tmp_path / "session.bin"
    ours = saved(run_tool, smollm2, path, *types)
    done = complete(unpatched, smollm2, *types, "--prompt-cache", path, "--prompt-cache-ro")
    if types:
        refused(done, "mismatched layer count")
    else:  # f16 has one meaning: it is written as upstream writes it
        assert done.returncode == 0 and done.stdout == ours, done.stderr[-3000:]


# ---- models that are known to suffer


def with_key_biases(source: Path, target: Path, norms: List[float]) -> Path:
    """A qwen2 model out of a llama one: biases of these norms for each KV head of the keys, on two channels."""
    reader = gguf.GGUFReader(source)
    w = gguf.GGUFWriter(target, "qwen2")
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        kind = field.types[0]
        item = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        w.add_key_value(field.name.replace("llama.", "qwen2.", 1), field.contents(), kind, item)
    shapes = {}
    for t in reader.tensors:
        w.add_tensor(t.name, t.data, raw_dtype=t.tensor_type)
        shapes[t.name] = t.data.shape
    head = int(reader.fields["llama.attention.key_length"].contents())
    for i, norm in enumerate(norms):
        for side in ("q", "k", "v"):
            bias = np.zeros(shapes[f"blk.{i}.attn_{side}.weight"][0], np.float32)
            if side == "k":
                bias[3::head], bias[head // 2 + 3 :: head] = 0.8 * norm, -0.6 * norm
            w.add_tensor(f"blk.{i}.attn_{side}.bias", bias)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return target


@pytest.fixture(scope="module")
def biased(synth_model: Make, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A model of six layers with the given norms of key biases."""
    folder = tmp_path_factory.mktemp("biases")
    # qwen2 has heads of width / number alone
    base = synth_model(n_layer=6, n_embd=256)

    def make(*norms: float) -> Path:
        path = folder / ("-".join(map(str, norms)) + ".gguf")
        return path if path.exists() else with_key_biases(base, path, list(norms))

    return make


def start(run_tool: Run, model: Path, *args: str) -> str:
    """What a tool says at start."""
    done = run_tool("llama-bench", "-m", model, "-t", 1, "-p", 0, "-n", 1, "-r", 1, "--no-warmup", *args)
    assert done.returncode == 0, done.stderr[-3000:]
    assert start_line.one(done.stderr)
    return str(done.stderr)


def warnings(stderr: str) -> List[str]:
    return [line for line in stderr.splitlines() if "kvq: warning:" in line]


def test_large_key_biases_under_narrow_keys_are_warned_of_with_a_way_out(run_tool: Run, biased: Make) -> None:
    """As in Qwen2.5: norms of hundreds in the first and the last layer, little elsewhere."""
    model = biased(400, 2, 2, 2, 2, 400)
    for args in (["--kvq", "4"], ["--kvq", "k3v2"], ["--kvq-key", "4"]):
        said = warnings(start(run_tool, model, *args))
        assert len(said) == 1 and re.search(r"layers? 0,5 ", said[0]) and "--kvq-key" in said[0], (args, said)
    # a layer that is stored wider is not spoken of
    said = warnings(start(run_tool, model, "--kvq-key", "4,0=16"))
    assert len(said) == 1 and re.search(r"layers? 5 ", said[0]), said


def test_key_biases_that_do_no_harm_are_not_warned_of(run_tool: Run, biased: Make) -> None:
    model = biased(400, 2, 2, 2, 2, 400)
    for args in ([], ["--kvq-val", "4"], ["--kvq-key", "4,0=16,-1=16"], ["--kvq", "16"]):
        assert warnings(start(run_tool, model, *args)) == [], args
    assert warnings(start(run_tool, biased(2, 2, 2, 2, 2, 2), "--kvq", "4")) == []


def test_python_warns_of_the_same(biased: Make) -> None:
    model = biased(400, 2, 2, 2, 2, 400)
    with pytest.warns(CacheWarning, match=r"layers 0,5 add a bias of norm up to 400 .* use --kvq-key"):
        kvsplit.Llama(model, kvq="k4v4", n_ctx=256, verbose=False)
    with python_warnings.catch_warnings():
        python_warnings.simplefilter("error")
        kvsplit.Llama(model, kvq="k8v4", kvq_key="4,0=16,-1=16", n_ctx=256, verbose=False)


def test_gemma_beyond_its_window_is_warned_of(run_tool: Run, synth_model: Make, smollm2: Path) -> None:
    model = synth_model(tokenizer=smollm2, arch="gemma3", n_layer=6, window=64)
    said = warnings(start(run_tool, model, "--kvq", "k4v4"))
    assert len(said) == 1 and "window of 64 tokens" in said[0] and "--kvq-key 8" in said[0], said
    for args in (["--kvq", "k8v4"], ["--kvq-key", "4,5=8"]):  # the last of six layers is the full one
        assert warnings(start(run_tool, model, *args)) == [], args


# ---- what was asked is what runs


@pytest.fixture
def rewriting(tool: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    """A folder of tools in which one stores other keys than it is asked to, and says nothing."""

    def make(name: str) -> Path:
        real = tool(name)
        folder = tmp_path / name
        (folder / "bin").mkdir(parents=True)
        for f in real.parent.iterdir():
            if f.name != name:
                (folder / "bin" / f.name).symlink_to(f)
        script = folder / "bin" / name
        script.write_text(f'#!/usr/bin/env bash\nexec "{real}" "${{@/#q8_0/q5_1}}"\n', encoding="utf-8")
        script.chmod(0o755)
        return folder

    return make


@pytest.mark.parametrize("name, metric", [("llama-bench", "speed"), ("llama-perplexity", "perplexity")])
def test_a_type_that_a_tool_rewrites_is_no_result(
    rewriting: Callable[[str], Path], smollm2: Path, synth_model: Make, tmp_path: Path, name: str, metric: str
) -> None:
    if shutil.which("bash") is None:
        missing("no bash for a tool that rewrites its arguments")
    model = synth_model(tokenizer=smollm2, n_layer=2)
    text = tmp_path / "text.txt"
    text.write_text("The river came down from the hills in the early spring. " * 200, encoding="utf-8")
    out = tmp_path / "out.jsonl"
    args = ["--config", "F16,K8V4", "--seq-len", "128", "--metric", metric, "--repeat", "1", "--chunks", "4"]
    command = [sys.executable, "-m", "kvsplit", "bench", str(model), *args, "--text", str(text), "--out", str(out)]
    env = {**os.environ, "KVSPLIT_NATIVE_DIR": str(rewriting(name))}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1, f"exit code {done.returncode}\n{done.stderr[-3000:]}"
    assert "q8_0" in done.stderr and "q5_1" in done.stderr, done.stderr[-3000:]
    rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()] if out.exists() else []
    # f16 is measured by the same tool, which leaves it alone
    kinds = ("speed", "quality")
    assert {r["config"] for r in rows if r["kind"] in kinds} == {"F16"}, done.stderr[-3000:]


def test_compute_buffers_are_reported_beside_the_cache(smollm2: Path, synth_model: Make, tmp_path: Path) -> None:
    """Memory as a whole can rise although the cache shrinks: what it takes to compute is a column of its own."""
    model = synth_model(tokenizer=smollm2, n_layer=2)
    out = tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "kvsplit", "bench", str(model), "--config", "F16,K8V4", "--seq-len", "1024"]
    done = subprocess.run(
        [*command, "--metric", "memory", "--out", str(out), "--json"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    rows = {r["config"]: r for r in map(json.loads, out.read_text(encoding="utf-8").splitlines())}
    assert rows["K8V4"]["kv_bytes"] < rows["F16"]["kv_bytes"]
    for r in rows.values():
        # logits of one batch alone take more; all of it is in the process's peak
        assert r["compute_bytes"] > 49152 * 4 and r["peak_rss"] > r["kv_bytes"] + 49152 * 4
    text = done.stdout + done.stderr
    assert "compute" in text


# ---- KLD files


@pytest.fixture(scope="module")
def base(
    run_tool: Run, smollm2: Path, synth_model: Make, tmp_path_factory: pytest.TempPathFactory
) -> Tuple[Path, Path]:
    """A model of two layers, and log-probabilities of two chunks of 64 tokens that llama-perplexity saved."""
    folder = tmp_path_factory.mktemp("kld")
    text = folder / "text.txt"
    text.write_text("The river came down from the hills in the early spring. " * 20, encoding="utf-8")
    model = synth_model(tokenizer=smollm2, n_layer=2)
    path = folder / "base.kld"
    args = ["-f", text, "-c", 64, "-b", 64, "--chunks", 2, "-t", 1, "--no-warmup", "--kl-divergence-base", path]
    done = run_tool("llama-perplexity", "-m", model, *args)
    assert done.returncode == 0, done.stderr[-3000:]
    # magic, context, vocabulary, chunks, tokens; for each of 31 positions a scale, a smallest value, 16 bits a token
    assert path.stat().st_size == 20 + 2 * 64 * 4 + 2 * 31 * (49152 + 4) * 2
    return model, path


def read_kld(run_tool: Run, model: Path, path: Path) -> "subprocess.CompletedProcess[str]":
    args = ["-c", 64, "-b", 64, "-t", 1, "--no-warmup", "--kl-divergence", "--kl-divergence-base", path]

    def limit() -> None:  # sizes out of a file must not be allocated unseen
        resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))

    return run_tool("llama-perplexity", "-m", model, *args, "--kvq", "k8v4", preexec_fn=limit)


def test_a_kld_file_is_read_back(run_tool: Run, base: Tuple[Path, Path]) -> None:
    done = read_kld(run_tool, *base)
    assert done.returncode == 0, done.stderr[-3000:]
    # a line a chunk; the summary takes 100 positions
    assert re.findall(r"^ +(\d) +[\d.]+ ±", done.stdout, re.M) == ["1", "2"], done.stdout


# offset and value of a field; what the message names
KLD_FIELDS = {
    "no-context": (8, 0), "tiny-context": (8, 1), "more-context": (8, 1024), "huge-context": (8, 2**31),
    "other-vocabulary": (12, 32000),
    "negative-vocabulary": (12, -5), "no-chunk": (16, 0), "negative-chunks": (16, -1), "many-chunks": (16, 2 * 10**9),
    "token-too-large": (20, 70_000_000), "negative-token": (24, -7), "more-chunks-than-there-are": (16, 3),
}  # fmt: skip


@pytest.mark.parametrize("case", KLD_FIELDS)
def test_a_kld_file_that_does_not_fit_is_refused(
    run_tool: Run, base: Tuple[Path, Path], tmp_path: Path, case: str
) -> None:
    model, path = base
    data = bytearray(path.read_bytes())
    offset, value = KLD_FIELDS[case]
    data[offset : offset + 4] = struct.pack("<q", value)[:4]
    (tmp_path / "bad.kld").write_bytes(data)
    done = read_kld(run_tool, model, tmp_path / "bad.kld")
    assert done.returncode == 1, f"exit code {done.returncode}\n{done.stderr[-2000:]}"
    assert "bad.kld" in done.stderr or "inconsistent vocabulary" in done.stderr, done.stderr[-2000:]
    assert "KL Divergence" not in done.stdout


def test_a_kld_file_that_ends_early_or_is_none_is_refused(
    run_tool: Run, base: Tuple[Path, Path], tmp_path: Path
) -> None:
    model, path = base
    whole = path.read_bytes()
    for name, data in (("cut.kld", whole[: len(whole) // 3]), ("head.kld", whole[:14]), ("text.kld", b"no such file")):
        (tmp_path / name).write_bytes(data)
        done = read_kld(run_tool, model, tmp_path / name)
        assert done.returncode == 1 and name in done.stderr, f"{done.returncode}\n{done.stderr[-2000:]}"
    done = read_kld(run_tool, model, tmp_path / "missing.kld")
    assert done.returncode == 1 and "missing.kld" in done.stderr


def test_a_perplexity_that_could_not_be_computed_or_saved_fails(
    run_tool: Run, base: Tuple[Path, Path], tmp_path: Path
) -> None:
    model, _ = base
    common = ["-c", 64, "-b", 64, "--chunks", 2, "-t", 1, "--no-warmup"]
    done = run_tool("llama-perplexity", "-m", model, "-p", "too short", *common)
    assert done.returncode == 1 and "at least" in done.stderr, f"{done.returncode}\n{done.stderr[-2000:]}"
    if Path("/dev/full").exists():
        text = "The river came down from the hills in the early spring. " * 20
        args = ["-p", text, *common, "--kl-divergence-base", "/dev/full"]
        done = run_tool("llama-perplexity", "-m", model, *args)
        assert done.returncode == 1 and "/dev/full" in done.stderr, f"{done.returncode}\n{done.stderr[-2000:]}"


def test_no_size_of_log_probabilities_is_a_product_of_32_bits(repo: Path) -> None:
    """Context x vocabulary passes 2^31 at 8192 x 262144, which takes more memory than a test may: so it is read.

    What stands before the vocabulary (or nv, its padded size) must be 64 bits wide: a cast, or one of three sizes that
    are declared so.
    """
    source = repo / "vendor" / "src" / "vendor" / "llama.cpp" / "tools" / "perplexity" / "perplexity.cpp"
    if not source.is_file():
        missing("the source is not unpacked: `make source`")
    text = source.read_text(encoding="utf-8")
    products = re.findall(r"([\w.\[\]]+|\([^()]*(?:\([^()]*\))?[^()]*\)) ?\* ?(?:n_vocab|nv)\b", text)
    casts = re.findall(r"size_t(\([^()]*(?:\([^()]*\))?[^()]*\)) ?\* ?(?:n_vocab|nv)\b", text)
    assert len(casts) > 10
    wide = {"eval_pairs[i].first": "std::pair<size_t,", "hs_cur.i_logits": "size_t i_logits;", "cur_task.i_logits": ""}
    assert all(declared in text for declared in wide.values())
    assert [p for p in products if p not in wide and p not in casts] == []
    assert not re.search(r"\b(?:n_vocab|nv) ?\* ?(?!sizeof)\w", text)
