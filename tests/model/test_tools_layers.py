# SPDX-License-Identifier: MIT
"""Types that differ by layer within one cache: rotation, shift, copies, state and batches, on models of many shapes."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any, Callable, List

import pytest
import start_line

from kvsplit.cache_types import is_quantized

pytestmark = [pytest.mark.native, pytest.mark.model]

# Quantized layers after plain ones and before; both sides quantized, alike and not.
POLICIES = ["16,2:=4", "4,:2=16", "16,:2=4", "4,2:=16", "8", "4", "4", "4"]

# Our formats at every width, with each other and with upstream's.
FORMATS = ["6", "3", "6", "5", "4", "2", "3", "3", "3,:2=6", "2,2:=5", "q4_0,1=5", "4,:2=iq4_nl"]

SHAPES = {
    "head-64": {"n_layer": 6},
    "head-96": {"n_layer": 4, "head_k": 96},  # no multiple of 64: stored without a rotation
    "head-128": {"n_layer": 4, "head_k": 128},
    # keys and values of different sizes, full and sliding-window layers in turn
    "head-128-64": {"arch": "mimo2", "n_layer": 4, "head_k": 128, "head_v": 64},
    "window-64": {"arch": "mimo2", "n_layer": 4, "head_k": 128, "head_v": 64, "window": 64},
    # RoPE over a part of the head
    "rope-32-of-64": {"arch": "mimo2", "n_layer": 4, "n_rot": 32},
    "rope-16-of-64": {"arch": "mimo2", "n_layer": 4, "n_rot": 16},
    "rope-32-of-128": {"arch": "mimo2", "n_layer": 4, "head_k": 128, "head_v": 64, "n_rot": 32},
}


def run_contexts(tool: Callable[[str], Path], model: Path, policies: List[str]) -> None:
    """Run the C++ test on a model; its own output is the reason of a failure."""
    done = subprocess.run(
        [str(tool("test-kvq-context")), str(model), *policies],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    last = re.search(r"^(\d+) passed, (\d+) failed$", done.stdout, re.MULTILINE)
    assert last and done.returncode == 0 and last[2] == "0", done.stdout[-4000:]
    # every policy checks each of its layers and more
    assert int(last[1]) > 20 * len(policies) // 2


@pytest.mark.parametrize("shape", SHAPES)
def test_contexts_of_synthetic_models(
    tool: Callable[[str], Path], smollm2: Path, synth_model: Callable[..., Path], shape: str
) -> None:
    run_contexts(tool, synth_model(tokenizer=smollm2, **SHAPES[shape]), POLICIES + FORMATS)


# Keys and values are one row, which isn't rotated, and the part that turns is at its end.
@pytest.mark.parametrize(("head", "n_rot"), [(128, 64), (128, 32), (576, 64)])
def test_contexts_of_mla_models(
    tool: Callable[[str], Path], smollm2: Path, synth_model: Callable[..., Path], head: int, n_rot: int
) -> None:
    model = synth_model(tokenizer=smollm2, arch="deepseek2", n_layer=4, n_head_kv=1, head_k=head, n_rot=n_rot)
    run_contexts(tool, model, [p for p in ("16", "8", "4", "6,1=8", "q5_0,:2=16") for _ in "kv"])


@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_contexts_of_real_models(request: pytest.FixtureRequest, tool: Callable[[str], Path], name: str) -> None:
    run_contexts(tool, request.getfixturevalue(name), ["16,2:=4", "4,:2=16", "16,:2=4", "4,2:=16", "8", "4", *FORMATS])


def test_a_head_that_blocks_do_not_divide(tool: Callable[[str], Path], smollm2: Path, synth_model: Any) -> None:
    model = synth_model(tokenizer=smollm2, n_layer=4, head_k=80)
    with pytest.raises(AssertionError, match="head size 80"):
        run_contexts(tool, model, ["16,2:=4", "16"])
    run_contexts(tool, model, ["16,2:=32", "32,:1=bf16"])


SHIFT = "-n 300 -c 256 --context-shift --keep 4 --ignore-eos -no-cnv -t 1 --temp 0".split()


@pytest.mark.parametrize(
    "head, rotate, types",
    [
        (96, True, ["-ctk", "q8_0", "-ctv", "kvq4"]),
        (96, True, ["--kvq-key", "8,:1=16", "--kvq-val", "4,1:=16"]),
        (64, False, ["-ctk", "q8_0", "-ctv", "kvq4"]),
        (64, False, ["--kvq-key", "16,:1=4", "--kvq-val", "4"]),
        (64, True, ["--kvq-key", "16,:1=4", "--kvq-val", "4"]),
        (64, True, ["--kvq", "k6v3"]),
        (96, True, ["--kvq", "k3v2"]),
        (64, True, ["-ctk", "q8_0", "-ctv", "q4_0"]),
    ],
    ids=[
        "head-96",
        "head-96-by-layer",
        "no-rotation",
        "no-rotation-by-layer",
        "rotation-by-layer",
        "k6v3",
        "head-96-k3v2",
        "upstream-types",
    ],
)
def test_context_shift_on_the_command_line(
    run_tool: Any, smollm2: Path, synth_model: Callable[..., Path], head: int, rotate: bool, types: List[str]
) -> None:
    model = synth_model(tokenizer=smollm2, n_layer=2, head_k=head)
    env = {} if rotate else {"LLAMA_ATTN_ROT_DISABLE": "1"}
    # 9 tokens of prompt and 300 more don't fit 256: the cache shifts
    done = run_tool("llama-completion", "-m", model, "-p", "a b c d e f g h", *SHIFT, *types, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    size = 64 if rotate and head % 64 == 0 else 0
    for layer in start_line.one(done.stderr).layers:
        assert layer.rot_k == (size if is_quantized(layer.k) else 0)
        assert layer.rot_v == (size if is_quantized(layer.v) else 0)
    assert len(done.stdout) > 600  # 300 tokens of random weights: how many of them begin a word is chance


# Few tokens: a restored prompt evaluates its last token alone, by another path of the same attention, and in the long
# run two tokens are so nearly alike that rounding decides.
def completion(run_tool: Any, model: Path, *args: Any) -> Any:
    common = "-c 512 --temp 0 -s 1 -no-cnv -t 1 -n 10 --no-display-prompt".split()
    prompt = "Once upon a time there was a small village by the river, and"
    return run_tool("llama-completion", "-m", model, "-p", prompt, *common, *args)


@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_prompt_cache_goes_on_alike(request: pytest.FixtureRequest, run_tool: Any, tmp_path: Path, name: str) -> None:
    model: Path = request.getfixturevalue(name)
    policy = ["--kvq-key", "8,:2=16", "--kvq-val", "4,-2:=8"]
    session = ["--prompt-cache", tmp_path / "session.bin"]
    first = completion(run_tool, model, *policy, *session)
    size = (tmp_path / "session.bin").stat().st_size
    again = completion(run_tool, model, *policy, *session)
    assert first.returncode == again.returncode == 0, again.stderr[-3000:]
    assert "session file has exact match for prompt" in again.stderr
    assert again.stdout == first.stdout == completion(run_tool, model, *policy).stdout
    assert len(first.stdout.split()) > 5
    # of another policy it is refused, with the reason, and not overwritten
    other = completion(run_tool, model, "--kvq", "4", *session)
    assert other.returncode == 1 and "was saved with keys " in other.stderr and other.stdout == ""
    assert (tmp_path / "session.bin").stat().st_size == size


def test_layers_of_both_caches_are_counted_once(run_tool: Any, gemma3: Path) -> None:
    done = completion(run_tool, gemma3, "--kvq-key", "8,:2=16,5=4", "--kvq-val", "4,-1=8")
    assert done.returncode == 0, done.stderr[-3000:]
    cache = start_line.one(done.stderr)
    k, v = ["q8_0"] * 18, ["kvq4"] * 18
    k[0] = k[1] = "f16"
    k[5] = "kvq4"
    v[17] = "q8_0"
    assert (cache.k, cache.v) == (k, v)
    assert {x.rot_v for x in cache.layers} == {64} and {x.where for x in cache.layers} == {"CPU"}
