# SPDX-License-Identifier: MIT
"""Numerical honesty of a context: flash attention `auto` and `on`, threads, NaN, and neighbours in a batch.

tests/cpp/test-kvq-honesty-context.cpp makes the contexts and derives the limits; here are the models.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any, Callable, Dict, List, Tuple

import pytest

from kvsplit.cache_types import CACHE_TYPES

pytestmark = [pytest.mark.native]

N_PAIRS = len(CACHE_TYPES) ** 2


@pytest.fixture
def honesty(tool: Callable[[str], Path]) -> Callable[..., str]:
    """Run one check on a model; returns what it said, its failures are the test's."""

    def run(model: Path, *args: str, **env: str) -> str:
        base: Dict[str, str] = {k: v for k, v in os.environ.items() if k != "GGML_KVQ_FA_FLOAT"}
        done = subprocess.run(
            [str(tool("test-kvq-honesty-context")), str(model), *args],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=600,
            # waiting threads that spin starve each other where there are more of them than cores
            env={**base, "OMP_WAIT_POLICY": "passive", **env},
            check=False,
        )
        assert done.returncode == 0, done.stdout[-4000:]
        assert re.search(r"^[1-9]\d* checks passed, 0 failed$", done.stdout, re.MULTILINE), done.stdout[-4000:]
        return done.stdout

    return run


def numbers(pattern: str, text: str) -> Tuple[int, ...]:
    """The integers of a summary line."""
    found = re.search(pattern, text)
    assert found, text[-2000:]
    return tuple(int(x) for x in found.groups())


def test_auto_is_on_for_every_pair(honesty: Callable[..., str], synth_model: Callable[..., Path]) -> None:
    out = honesty(synth_model(), "fa", "--all")
    assert numbers(r"head size 64, (\d+) pairs run, (\d+) refused", out) == (N_PAIRS + 9, 0)


@pytest.mark.parametrize("head", [80, 40])
def test_a_head_that_no_block_fits_is_refused_alike(
    honesty: Callable[..., str], synth_model: Callable[..., Path], head: int
) -> None:
    out = honesty(synth_model(head_k=head), "fa", "--all")
    # f32, f16 and bf16 among themselves
    assert numbers(rf"head size {head}, (\d+) pairs run, (\d+) refused", out) == (9, N_PAIRS)


@pytest.mark.parametrize("head, sides", [(80, ("q8_0", "f16")), (80, ("f16", "kvq4")), (40, ("q8_0", "f16"))])
def test_completion_refuses_such_a_head_in_all_modes(
    run_tool: Any, smollm2: Path, synth_model: Callable[..., Path], head: int, sides: Tuple[str, str]
) -> None:
    model = synth_model(tokenizer=smollm2, head_k=head)
    reasons: List[str] = []
    for mode in ("auto", "on", "off"):
        args = ["-m", model, "-p", "a b c", "-n", "2", "-no-cnv", "-c", "256", "-fa", mode]
        done = run_tool("llama-completion", *args, "-ctk", sides[0], "-ctv", sides[1])
        assert done.returncode == 1, (mode, done.returncode, done.stderr[-2000:])
        found = re.search(r"[^\n]*head size[^\n]*|[^\n]*flash attention[^\n]*off[^\n]*", done.stderr, re.IGNORECASE)
        assert found, (mode, done.stderr[-2000:])
        reasons.append(re.sub(r"^[\d.]+ \w ", "", found[0]))
    assert reasons[0] == reasons[1]
    if sides[1] == "f16":  # otherwise V's need for flash attention may be named first
        assert reasons[2] == reasons[0]


def test_a_quantized_v_needs_flash_attention(run_tool: Any, smollm2: Path, synth_model: Callable[..., Path]) -> None:
    model = synth_model(tokenizer=smollm2)
    args = ["-m", model, "-p", "a b c", "-n", "2", "-no-cnv", "-c", "256", "-fa", "off"]
    assert run_tool("llama-completion", *args, "-ctk", "q8_0", "-ctv", "f16").returncode == 0
    done = run_tool("llama-completion", *args, "-ctk", "f16", "-ctv", "kvq4")
    assert done.returncode == 1
    assert "flash attention" in done.stderr.lower() or "flash-attn" in done.stderr.lower()


@pytest.mark.parametrize("floats", ["0", "1"])
def test_any_number_of_threads_gives_the_same_bits(
    honesty: Callable[..., str], synth_model: Callable[..., Path], floats: str
) -> None:
    out = honesty(synth_model(), "threads", GGML_KVQ_FA_FLOAT=floats)
    same, upstream = numbers(r"threads: (\d+) cases with the same bits, (\d+) of upstream's", out)
    # 3 pairs of floats, with 2, 3, 4 and 8 threads
    assert same > 60 and upstream == (0 if floats == "1" else 12)


def test_nan_stays_where_it_is(honesty: Callable[..., str], synth_model: Callable[..., Path]) -> None:
    out = honesty(synth_model(), "poison")
    assert numbers(r"poison: (\d+) cases", out)[0] > 250


def test_neighbours_do_not_matter(honesty: Callable[..., str], smollm2: Path, synth_model: Callable[..., Path]) -> None:
    # weights in f16: what remains is what the cache does
    out = honesty(synth_model(tokenizer=smollm2, n_layer=6), "batch", "--all")
    assert numbers(r"batch: (\d+) cases", out) == (100,)


@pytest.mark.slow
@pytest.mark.model
def test_neighbours_do_not_matter_to_a_real_model(honesty: Callable[..., str], smollm2: Path) -> None:
    out = honesty(smollm2, "batch")
    assert numbers(r"batch: (\d+) cases", out) == (30,)


@pytest.mark.slow
def test_nan_stays_where_it_is_in_every_pair(honesty: Callable[..., str], synth_model: Callable[..., Path]) -> None:
    out = honesty(synth_model(), "poison", "--all")
    assert numbers(r"poison: (\d+) cases", out) == (N_PAIRS * 2 * 7,)
