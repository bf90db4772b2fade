# SPDX-License-Identifier: MIT
"""States saved and loaded from Python: taken where they mean the same, else refused with nothing half set."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, Callable, Dict, List, Tuple

import numpy as np
import pytest

import kvsplit
from kvsplit.errors import KVSplitError, StateError

Make = Callable[..., Path]
PROMPT = [1, 7, 30, 4, 99, 12, 8]
# contexts are made of 256 tokens
ARGS: Dict[str, Any] = {"n_ctx": 256, "n_batch": 32, "logits_all": True, "n_threads": 1, "verbose": False}


@pytest.fixture(scope="module")
def model(synth_model: Make) -> Path:
    return synth_model(n_layer=3, head_k=64, n_head_kv=2)


def fed(path: Path, **kwargs: Any) -> kvsplit.Llama:
    llm = kvsplit.Llama(path, **{**ARGS, **kwargs})
    llm.eval(PROMPT)
    return llm


def logits(llm: kvsplit.Llama, tokens: List[int]) -> np.ndarray:
    llm.eval(tokens)
    return np.array(llm.scores[llm.n_tokens - 1])


def test_a_state_goes_on_in_another_object_of_the_same_cache(model: Path) -> None:
    for kwargs in ({"kvq": "k8v4"}, {"kvq_key": "4,:1=8", "kvq_val": "f16"}, {}):
        a = fed(model, **kwargs)
        state = a.save_state()
        want = logits(a, [5])
        b = kvsplit.Llama(model, **ARGS, **kwargs)
        b.load_state(state)
        assert b.n_tokens == len(PROMPT)
        assert np.array_equal(logits(b, [5]), want), kwargs


REFUSED: List[Tuple[Dict[str, Any], Dict[str, Any], str]] = [
    ({"kvq": "k8v4"}, {"kvq": "k4v8"}, "was saved with keys q8_0"),
    ({"kvq": "k8v4"}, {"kvq_key": "8,1=4", "kvq_val": 4}, "layer 1 was saved with keys q8_0"),
    ({"kvq": "k8v8"}, {}, "mismatched|was saved with keys q8_0|flash attention"),
    ({}, {"kvq": "k8v8"}, "flash attention"),
    ({"flash_attn": True}, {"kvq": "k8v8"}, "layer 0 was saved with keys f16, and has q8_0 here: .*--kvq-key"),
]


@pytest.mark.parametrize("saved, here, why", REFUSED)
def test_a_state_of_another_cache_is_refused_and_leaves_the_object_empty(
    model: Path, saved: Dict[str, Any], here: Dict[str, Any], why: str
) -> None:
    state = fed(model, **saved).save_state()
    b = fed(model, **here)
    with pytest.raises(StateError, match=why) as e:
        b.load_state(state)
    assert isinstance(e.value, (KVSplitError, RuntimeError))
    assert b.n_tokens == 0
    fresh = kvsplit.Llama(model, **ARGS, **here)
    assert np.array_equal(logits(b, PROMPT), logits(fresh, PROMPT))


def test_a_state_with_another_rotation_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = fed(model, kvq="k8v4").save_state()
    monkeypatch.setenv("LLAMA_ATTN_ROT_DISABLE", "1")
    b = fed(model, kvq="k8v4")
    with pytest.raises(StateError, match="rotated by 64.*not rotated.*LLAMA_ATTN_ROT_DISABLE"):
        b.load_state(state)
    off = fed(model, kvq="k8v4").save_state()
    monkeypatch.delenv("LLAMA_ATTN_ROT_DISABLE")
    with pytest.raises(StateError, match="LLAMA_ATTN_ROT_DISABLE"):
        fed(model, kvq="k8v4").load_state(off)


@pytest.mark.parametrize("damage", ["tokens", "negative", "scores", "room", "size", "nothing"])
def test_numbers_that_do_not_fit_change_nothing(model: Path, damage: str) -> None:
    a = fed(model, kvq="k8v4")
    state = copy.copy(a.save_state())
    if damage == "tokens":
        state.n_tokens = 1000
    elif damage == "negative":
        state.n_tokens = -3
    elif damage == "scores":
        state.scores = state.scores[:, :5]
    elif damage == "room":
        state.input_ids = state.input_ids[:3]
    elif damage == "size":
        state.llama_state_size += 1
    else:
        state.llama_state, state.llama_state_size = b"", 0
    b = fed(model, kvq="k8v4")
    before = (b.n_tokens, b.input_ids.copy(), b._scores.copy())
    with pytest.raises(StateError, match="n_ctx=256"):
        b.load_state(state)
    assert b.n_tokens == before[0]
    assert np.array_equal(b.input_ids, before[1]) and np.array_equal(b._scores, before[2])
    want = logits(fed(model, kvq="k8v4"), [5])
    assert np.array_equal(logits(b, [5]), want)


def test_a_cut_state_is_refused_and_leaves_the_object_empty(model: Path) -> None:
    state = fed(model, kvq="k8v4").save_state()
    n = len(state.llama_state)
    for size in (1, 4, 20, 100, n // 2, n - 1):
        cut = copy.copy(state)
        cut.llama_state, cut.llama_state_size = state.llama_state[:size], size
        b = fed(model, kvq="k8v4")
        with pytest.raises(StateError):
            b.load_state(cut)
        assert b.n_tokens == 0
        logits(b, PROMPT)


def test_bytes_behind_a_state_are_refused(model: Path) -> None:
    state = copy.copy(fed(model, kvq="k8v4").save_state())
    state.llama_state += b"12345"
    state.llama_state_size += 5
    b = fed(model, kvq="k8v4")
    with pytest.raises(StateError, match="5 bytes behind its end"):
        b.load_state(state)
    assert b.n_tokens == 0
    logits(b, PROMPT)
