# SPDX-License-Identifier: MIT
"""Attention, stores and copies on the Metal backend: on a Mac the real device, elsewhere an emulated one.

Every program of the build takes the emulated device as a backend by GGML_BACKEND_PATH; nothing else differs.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Optional

import pytest
import start_line

Say = Callable[[str], None]

NATIVE = Path(os.environ.get("KVSPLIT_NATIVE_DIR", "build"))
TESTS = Path(__file__).resolve().parent


class Metal(NamedTuple):
    """How programs reach a Metal device.

    Attributes:
        env: environment to run them in.
        emulated: it is the emulated one.
        device: its name in ggml.
    """

    env: Dict[str, str]
    emulated: bool
    device: str

    def run(self, *args: object, timeout: float = 1200, **env: str) -> "subprocess.CompletedProcess[str]":
        command = [str(a) for a in args]
        return subprocess.run(
            command,
            env=dict(self.env, **env),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
        )


def need(reason: str) -> None:
    """Skip, or fail where nothing may be missing."""
    if os.environ.get("KVSPLIT_REQUIRE", "") not in ("", "0"):
        pytest.fail(f"required by KVSPLIT_REQUIRE: {reason}", pytrace=False)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def metal() -> Metal:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("GGML_METAL", "GGML_BACKEND"))}
    if sys.platform == "darwin":
        return Metal(env, False, "MTL0")
    library = NATIVE / "metal" / "libggml-metal-emulated.so"
    if not library.exists():
        need("the emulated Metal device isn't built; it needs clang++ 19 (Debian: clang-19)")
    return Metal(dict(env, GGML_BACKEND_PATH=str(library.resolve())), True, "MTL0")


def program(name: str) -> Path:
    path = NATIVE / "bin" / name
    if not path.exists():
        need(f"{name} isn't built")
    return path


def checks(done: "subprocess.CompletedProcess[str]") -> int:
    """Number of passed checks of one of our programs; fails the test if one failed."""
    out = done.stdout + done.stderr[-3000:]
    assert done.returncode == 0, out[-6000:]
    found = re.search(r"(\d+) checks passed, 0 failed", done.stdout)
    assert found, out[-6000:]
    return int(found[1])


def tell(done: "subprocess.CompletedProcess[str]", say: Say) -> None:
    for line in done.stdout.splitlines():
        if line.startswith(("attention", "largest")):
            say(line)


def test_rows(metal: Metal, say: Say) -> None:
    done = metal.run(program("test-metal-rows"))
    assert checks(done) > 2000
    blocks = [
        (int(a), int(b), int(c))
        for a, b, c in re.findall(r"(\d+) blocks, (\d+) with another scale, (\d+) with other codes", done.stdout)
    ]
    total = [sum(column) for column in zip(*blocks)]
    say(f"stores: {total[0]} blocks, {total[1]} with the next scale, {total[2]} with other codes")
    assert total[0] > 5000
    if metal.emulated:  # a GPU's division and exponent may differ
        assert total[2] == 0 and total[1] <= total[0] / 1000


def test_supports_op_is_true_exactly_for_what_runs(metal: Metal, say: Say) -> None:
    done = metal.run(program("test-metal-supports"))
    assert checks(done) > 1000
    say("supports_op: " + done.stdout.splitlines()[-2])


def test_attention_of_every_pair(metal: Metal, say: Say) -> None:
    done = metal.run(program("test-metal-attention"))
    assert checks(done) > 14 * 14 * 4
    tell(done, say)
    for kind in ("one query", "2 to 19", "20 to 31", "32 and more"):
        assert re.search(rf"queries {kind}: \d+ cases", done.stdout), kind


@pytest.mark.hours
@pytest.mark.slow
def test_attention_of_every_pair_and_head_size(metal: Metal, say: Say) -> None:
    done = metal.run(program("test-metal-attention"), "--all", "--seed", "7", timeout=7200)
    assert checks(done) > 14 * 14 * 4 * 8
    tell(done, say)


@pytest.mark.parametrize("case", ["kvq4/kvq3 dk=64", "q8_0/kvq4 dk=128", "kvq6/kvq2 dk=96"])
def test_order_of_lanes_changes_no_bit(metal: Metal, case: str) -> None:
    if not metal.emulated:
        pytest.skip("the order of lanes is the device's own")
    digests = set()
    for schedule in ("ascending", "descending", "random:1", "random:2"):
        for seed in ("1", "2", "3"):
            done = metal.run(
                program("test-metal-attention"), "--one-head", case, "--seed", seed, GGML_METAL_EMULATED_SCHED=schedule
            )
            checks(done)
            digests.add((seed, re.search(r"outputs ([0-9a-f]{16})", done.stdout)[1]))  # type: ignore[index]
    assert len(digests) == 3, digests


# ---- planted faults that need no other build: a pipeline is made with the type of another codec

WRONG_TYPES = {  # a type and the one that is nearest to it
    "kvq2": 451, "kvq3": 450, "kvq4": 453, "kvq5": 454, "kvq6": 453,
    "q8_0": 454, "q5_0": 7, "q5_1": 6, "q4_0": 20, "q4_1": 2, "iq4_nl": 2, "f16": 30, "bf16": 1,
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(WRONG_TYPES))
@pytest.mark.parametrize("side", ["K", "V"])
def test_a_neighbours_codec_is_caught(metal: Metal, name: str, side: str) -> None:
    if not metal.emulated:
        pytest.skip("function constants can be planted on the emulated device alone")
    other = "kvq4" if name != "kvq4" else "kvq3"
    case = f"{name}/{other}" if side == "K" else f"{other}/{name}"
    constant = 9000 if side == "K" else 9001
    args = [program("test-metal-attention"), "--one-head", f"{case} dk=64"]
    checks(metal.run(*args))
    wrong = metal.run(*args, GGML_METAL_EMULATED_CONSTANTS=f"{constant}={WRONG_TYPES[name]}")
    assert wrong.returncode != 0, "attention with the wrong codec passes"


def test_swapped_types_are_caught(metal: Metal) -> None:
    if not metal.emulated:
        pytest.skip("function constants can be planted on the emulated device alone")
    args = [program("test-metal-attention"), "--one-head", "q8_0/kvq4 dk=64"]
    checks(metal.run(*args))
    assert metal.run(*args, GGML_METAL_EMULATED_CONSTANTS="9000=452,9001=452").returncode != 0
    assert metal.run(*args, GGML_METAL_EMULATED_CONSTANTS="9000=8,9001=8").returncode != 0


# ---- upstream's own test

# Every pair of types; every type with each kind of batch; masks, sinks, ALiBi and broadcast; every head size.
ATTENTION = (
    ("hsk=64,hsv=64,nh=4,nr23=.2,1.,kv=113,nb=3", 196),
    ("hsk=64,hsv=64,nh=4,nr23=.4,1.,kv=512,nb=(1|32),mask=1,sinks=.,max_bias=(0|8)", 168),
    ("hsk=64,hsv=64,nh=4,nr23=.1,3.,kv=113,nb=(3|75),mask=.,sinks=1", 84),
    ("hsk=(40|72|80|96|128|192|256|320|512|576),.*kv=113,nb=(1|75),mask=1,sinks=1,max_bias=0", 62),
)


class Counts(NamedTuple):
    passed: int
    failed: int
    unsupported: int


def backend_ops(metal: Metal, ops: str, pattern: Optional[str] = None, timeout: float = 1200) -> Dict[str, Counts]:
    """Cases of test-backend-ops by operation."""
    args: List[object] = [program("test-backend-ops"), "test", "-b", metal.device, "-o", ops]
    if pattern:
        args += ["-p", pattern]
    done = metal.run(*args, timeout=timeout, LLAMA_TEST_FA_VEC_DISABLE="1")
    found: Dict[str, List[int]] = {}
    for op, result in re.findall(r"^\s*([A-Z0-9_]+)\(.*\): (OK|FAIL|not supported.*)$", _plain(done.stdout), re.M):
        counts = found.setdefault(op, [0, 0, 0])
        counts[0 if result == "OK" else 1 if result == "FAIL" else 2] += 1
    bad = [line for line in _plain(done.stdout).splitlines() if "FAIL" in line][:20]
    assert done.returncode == 0 and not bad, "\n".join(bad) or (done.stdout + done.stderr)[-3000:]
    return {op: Counts(*counts) for op, counts in found.items()}


def tell_counts(counts: Dict[str, Counts], say: Say) -> None:
    for op, n in sorted(counts.items()):
        say(f"test-backend-ops {op}: {n.passed} passed, {n.failed} failed, {n.unsupported} unsupported")


def _plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def test_upstreams_cases_of_rows_and_copies(metal: Metal, say: Say) -> None:
    counts = backend_ops(metal, "SET_ROWS,GET_ROWS,CPY,DUP,CONT")
    tell_counts(counts, say)
    assert all(
        counts[op].passed >= n
        for op, n in (("SET_ROWS", 200), ("GET_ROWS", 200), ("CPY", 200), ("CONT", 50), ("DUP", 7))
    ), counts


@pytest.mark.parametrize(("pattern", "n"), ATTENTION)
def test_upstreams_cases_of_attention(metal: Metal, say: Say, pattern: str, n: int) -> None:
    counts = backend_ops(metal, "FLASH_ATTN_EXT", pattern)
    tell_counts(counts, say)
    assert counts["FLASH_ATTN_EXT"] == Counts(n, 0, 0), counts


@pytest.mark.hours
@pytest.mark.slow
def test_all_of_upstreams_cases_of_attention(metal: Metal, say: Say) -> None:
    counts = backend_ops(metal, "FLASH_ATTN_EXT", timeout=6 * 3600)
    tell_counts(counts, say)
    assert counts["FLASH_ATTN_EXT"].passed > 4000, counts


# ---- a model

PROMPT = "The key-value cache of a language model keeps"


def generate(run: Any, model: Path, kvq: str, n: int, *more: str) -> "subprocess.CompletedProcess[str]":
    done = run(
        program("llama-completion"), "-m", model, "--kvq", kvq, "-p", PROMPT, "-n", n, "-c", 256, "--temp", 0,
        "-no-cnv", "--ignore-eos", "--no-warmup", *more,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done


@pytest.fixture(scope="session")
def smollm2_f32(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2 with its weights written as f32: products with quantized ones round activations to 8 bits."""
    path = tmp_path_factory.mktemp("f32") / "SmolLM2-135M-Instruct.F32.gguf"
    command = [str(program("llama-quantize")), "--allow-requantize", str(smollm2), str(path), "F32"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return path


@pytest.mark.model
@pytest.mark.parametrize(("kvq", "n"), [("k8v4", 4), ("k6v3", 4)])
def test_a_model_with_its_cache_on_metal(
    metal: Metal, say: Say, smollm2: Path, tmp_path: Path, kvq: str, n: int
) -> None:
    same_tokens(metal, say, smollm2, tmp_path, kvq, n)


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("kvq", ["k8v4", "k6v3"])
def test_a_model_on_metal_for_longer(metal: Metal, say: Say, smollm2: Path, tmp_path: Path, kvq: str) -> None:
    """A few dozen tokens. The first 4 are the CPU's; later ones needn't be, see the next test."""
    same_tokens(metal, say, smollm2, tmp_path, kvq, 32, 4)


@pytest.mark.slow
@pytest.mark.model
def test_quality_on_metal_is_that_of_the_cpu(
    metal: Metal, say: Say, smollm2_f32: Path, eval_text: Path, tmp_path: Path
) -> None:
    """KL divergence from an f16 cache on the CPU.

    With f16 the two devices agree. With a quantized cache a last bit decides a rounding here and there, each by a whole
    step of the type; the next layer sees that, and so on: after 30 layers the error of quantization is drawn anew. So
    its size is compared, not its values. A mean over 2 chunks has a standard error of a sixth; the two errors share
    the text and so vary together, and a wrong kernel is off by a factor: half as much and twice as much are allowed.
    """
    base = tmp_path / "f16.kld"
    on_cpu = metal._replace(env={k: v for k, v in metal.env.items() if k != "GGML_BACKEND_PATH"})

    def kld(where: Metal, kvq: str, *more: str) -> float:
        placed = ("-ngl", "0", "-dev", "none") if where is on_cpu else ("-ngl", "99", "-ot", ".*=CPU")
        done = where.run(
            program("llama-perplexity"), "-m", smollm2_f32, "-f", eval_text, "-c", 128, "--chunks", 2, "--kvq", kvq,
            "-fa", "on", "--kl-divergence-base", base, *placed, *more,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        if not more:
            return 0.0
        if where is metal:
            assert {layer.where for layer in start_line.one(done.stderr).layers} == {metal.device}
        found = re.search(r"Mean\s+KLD:\s+(-?[\d.]+)", done.stdout)
        assert found, done.stdout[-2000:]
        return float(found[1])

    kld(on_cpu, "16")
    compare = "--kl-divergence"
    # f16: what is left is half precision of queries; f16 rows differ in last bits, 2^-11 of a value
    assert abs(kld(metal, "16", compare)) < 1e-4
    for kvq in ("k8v4", "k6v3"):
        there, here = kld(on_cpu, kvq, compare), kld(metal, kvq, compare)
        say(f"{kvq}: KL divergence from f16 {here:.5f} on {metal.device}, {there:.5f} on the CPU")
        assert there / 2 < here < there * 2, (kvq, here, there)


def same_tokens(
    metal: Metal, say: Say, smollm2: Path, tmp_path: Path, kvq: str, n: int, n_same: Optional[int] = None
) -> None:
    """All layers: the cache and attention on Metal, products with weights on the CPU. Greedy tokens are the CPU's."""

    def on_cpu(*args: object) -> "subprocess.CompletedProcess[str]":
        env = {k: v for k, v in metal.env.items() if k != "GGML_BACKEND_PATH"}
        return metal._replace(env=env).run(*args)

    stats = tmp_path / "dispatches.json"

    def on_metal(*args: object) -> "subprocess.CompletedProcess[str]":
        return metal.run(*args, GGML_METAL_EMULATED_STATS=str(stats))

    want = generate(on_cpu, smollm2, kvq, n, "-ngl", "0", "-dev", "none")
    got = generate(on_metal, smollm2, kvq, n, "-ngl", "99", "-ot", ".*=CPU")
    if n_same is None:
        assert got.stdout == want.stdout
    else:
        first = generate(on_cpu, smollm2, kvq, n_same, "-ngl", "0", "-dev", "none").stdout.rstrip()
        assert got.stdout.startswith(first) and want.stdout.startswith(first)

    here, there = start_line.one(got.stderr), start_line.one(want.stderr)
    assert all(layer.where == metal.device and layer.flash for layer in here.layers)
    assert all(layer.where == "CPU" and layer.flash for layer in there.layers)
    assert [replace(layer, where="") for layer in here.layers] == [replace(layer, where="") for layer in there.layers]

    if not metal.emulated:
        return
    recorded: Dict[str, Dict[str, int]] = json.loads(stats.read_text())
    dispatches = {name: record["dispatches"] for name, record in recorded.items()}
    say(f"{kvq}, {n} tokens, dispatches:")
    for name, count in sorted(dispatches.items()):
        say(f"{count:6d} {name}")
    n_layer = len(here.layers)
    stores = sum(c for name, c in dispatches.items() if "set_rows" in name)
    attention = sum(
        c for name, c in dispatches.items() if re.search(r"flash_attn_ext(_vec)?_(q8_0|kvq|f16)\w*_dk", name)
    )
    # one prompt and n - 1 tokens after it, each with two stores and one attention a layer
    assert stores == 2 * n_layer * n, dispatches
    assert attention == n_layer * n, dispatches


def test_a_head_size_without_a_kernel_is_named(metal: Metal, synth_model: Any, smollm2: Path) -> None:
    """No kernel, upstream's or ours, takes heads of 160: attention runs elsewhere, and one line says so."""
    model = synth_model(head_k=160, tokenizer=smollm2)
    done = generate(metal.run, model, "k8v4", 2, "-ngl", "99", "-ot", ".*=CPU")
    cache = start_line.one(done.stderr)
    assert {layer.where for layer in cache.layers} == {"CPU"}
    warnings = re.findall(r"kvq: warning: (.*)", done.stderr)
    assert len(warnings) == 1, warnings
    assert all(word in warnings[0] for word in ("MTL0", "q8_0", "kvq4", "head size 160", "CPU", "slow")), warnings


def test_shift_runs_on_metal(metal: Metal, synth_model: Any, smollm2: Path, tmp_path: Path) -> None:
    """More tokens than the context holds: keys are read, turned and stored again by the device's copies."""
    model = synth_model(n_layer=1, n_head=2, n_head_kv=1, tokenizer=smollm2)
    stats = tmp_path / "dispatches.json"

    def on_metal(*args: object) -> "subprocess.CompletedProcess[str]":
        return metal.run(*args, GGML_METAL_EMULATED_STATS=str(stats))

    done = generate(on_metal, model, "k6v3", 258, "-ngl", "99", "-ot", ".*=CPU", "--context-shift")
    assert {layer.where for layer in start_line.one(done.stderr).layers} == {metal.device}
    if metal.emulated:
        names = " ".join(json.loads(stats.read_text()))
        assert "kernel_kvq_cpy_q_f32_kvq=kvq6" in names and "kernel_kvq_cpy_f32_q_kvq=kvq6" in names, names
