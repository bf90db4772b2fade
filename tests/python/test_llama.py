# SPDX-License-Identifier: MIT
"""``kvsplit.Llama``: what it accepts, what it refuses, what it tells. On synthetic models."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Callable, Dict

import pytest

import kvsplit
from kvsplit import KVQuant
from kvsplit.errors import (
    CacheTypeError,
    ContextMemoryError,
    FlashAttentionError,
    HeadSizeError,
    KVQuantError,
    KVSplitError,
    ModelFileError,
    UsageError,
)

pytestmark = pytest.mark.native
Make = Callable[..., Path]


def _types(path: Path, **kw: Any) -> Any:
    llm = kvsplit.Llama(path, n_ctx=256, verbose=False, **kw)
    try:
        return llm.kv_cache.types
    finally:
        llm.close()


@pytest.mark.parametrize(
    ("kw", "types"),
    [
        ({}, ("f16", "f16")),
        ({"kvq": 8}, ("q8_0", "kvq4")),
        ({"kvq": "K4V8"}, ("kvq4", "q8_0")),
        ({"kvq": KVQuant("q5_1", "iq4_nl")}, ("q5_1", "iq4_nl")),
        ({"kvq_key": 8}, ("q8_0", "f16")),
        ({"kvq_val": "bf16"}, ("f16", "bf16")),
        ({"kvq": "k8v4", "kvq_val": 8}, ("q8_0", "q8_0")),
        ({"type_k": "q8_0", "type_v": "Q4_0"}, ("q8_0", "q4_0")),
        ({"type_k": 8, "type_v": 2}, ("q8_0", "q4_0")),  # llama-cpp-python's integers
        ({"type_k": 1, "kvq_val": 4}, ("f16", "kvq4")),
    ],
)
def test_spellings(synth_model: Make, kw: Dict[str, Any], types: Any) -> None:
    assert _types(synth_model(), **kw) == [types] * 2


def test_by_layer(synth_model: Make) -> None:
    assert _types(synth_model(n_layer=4), kvq_key="16,:2=4", kvq_val="4,-1=q4_1") == [
        ("kvq4", "kvq4"),
        ("kvq4", "kvq4"),
        ("f16", "kvq4"),
        ("f16", "q4_1"),
    ]


def test_policy_of_the_file(synth_model: Make) -> None:
    path = synth_model(extra=(("kvq.key", "8"), ("kvq.val", "8,0=4")))
    assert _types(path) == [("q8_0", "kvq4"), ("q8_0", "q8_0")]
    # said, though it equals the default: it counts
    assert _types(path, type_k="f16") == [("f16", "kvq4"), ("f16", "q8_0")]
    assert _types(path, kvq=16) == [("f16", "f16")] * 2


@pytest.mark.parametrize("bad", [9, 24, 99, 3000, -1, 14, 36, True, "q8_1", "i8", "q4_k", ""])
@pytest.mark.parametrize("argument", ["type_k", "type_v"])
def test_what_is_no_cache_type(synth_model: Make, argument: str, bad: Any) -> None:
    with pytest.raises(CacheTypeError) as e:
        kvsplit.Llama(synth_model(), verbose=False, **{argument: bad})
    assert isinstance(e.value, ValueError)
    assert str(e.value).startswith(f"{argument}: ") and repr(bad) in str(e.value)
    assert "q8_0" in str(e.value) and "iq4_nl" in str(e.value)


def test_bad_numbers_never_reach_the_library(synth_model: Make) -> None:
    """A crash would take this whole process; so once more in one of its own, and no signal ends it."""
    code = (
        "import sys, kvsplit\n"
        "for t in range(-2, 64):\n"
        "    try: kvsplit.Llama(sys.argv[1], type_k=t, type_v=t, n_ctx=256, verbose=False).close()\n"
        "    except ValueError: pass\n"
        "print('alive')\n"
    )
    import os

    env = {**os.environ, "PYTHONPATH": str(Path(kvsplit.__file__).parent.parent)}
    res = subprocess.run(
        [sys.executable, "-c", code, str(synth_model())], capture_output=True, text=True, env=env, check=False
    )
    assert res.returncode == 0 and "alive" in res.stdout, res.stderr[-2000:]


@pytest.mark.parametrize(
    "kw",
    [
        {"kvq": 8, "type_k": 8},
        {"kvq_key": 8, "type_k": 1},
        {"kvq_val": 8, "type_v": "f16"},
        {"kvq": "k16v16", "type_v": 1},
    ],
)
def test_two_ways_for_one_side(synth_model: Make, kw: Dict[str, Any]) -> None:
    with pytest.raises(KVQuantError) as e:
        kvsplit.Llama(synth_model(), verbose=False, **kw)
    assert all(name in str(e.value) for name in kw)


@pytest.mark.parametrize("kw", [{"kvq": "6"}, {"kvq": "k7v2"}, {"kvq_key": "8,9=4"}, {"kvq_val": "8,1:1=4"}])
def test_bad_policies(synth_model: Make, kw: Dict[str, Any]) -> None:
    with pytest.raises(KVQuantError, match=next(iter(kw))):
        kvsplit.Llama(synth_model(), verbose=False, **kw)


def test_flash_attention(synth_model: Make) -> None:
    path = synth_model()
    with pytest.raises(FlashAttentionError, match="flash_attn.*kvq4"):
        kvsplit.Llama(path, kvq=8, flash_attn=False, verbose=False)
    with pytest.raises(FlashAttentionError, match="kvq4"):
        kvsplit.Llama(synth_model(extra=(("kvq.val", "4"),)), flash_attn=False, verbose=False)
    # quantized keys alone work without it
    assert _types(path, kvq_key=8, flash_attn=False) == [("q8_0", "f16")] * 2


@pytest.mark.parametrize("head", [40, 80])
@pytest.mark.parametrize("flash", [True, False, None])
def test_head_size(synth_model: Make, head: int, flash: Any) -> None:
    with pytest.raises(HeadSizeError, match=f"q8_0.*{head}"):
        kvsplit.Llama(synth_model(head_k=head), kvq_key=8, flash_attn=flash, verbose=False)


def test_memory(synth_model: Make) -> None:
    path = synth_model()
    with pytest.raises(ContextMemoryError) as e:
        kvsplit.Llama(path, kvq="k8v8", n_ctx=2_000_000_000, n_batch=64, verbose=False)
    assert isinstance(e.value, MemoryError) and isinstance(e.value, ValueError)
    assert e.value.kv_bytes is not None and f"{e.value.kv_bytes / 2**20:.2f} MiB" in str(e.value)
    assert "k4v4" in str(e.value)


def test_files(tmp_path: Path, synth_model: Make) -> None:
    whole = synth_model().read_bytes()
    for name, data, match in [
        ("cut", whole[: len(whole) // 2], "truncated"),
        ("header", whole[:80], "truncated"),
        ("text", b"not a model at all", "not a GGUF"),
    ]:
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ModelFileError, match=match):
            kvsplit.Llama(tmp_path / name, verbose=False)
    with pytest.raises(ModelFileError, match="does not exist"):
        kvsplit.Llama(tmp_path / "none.gguf", verbose=False)


def test_kv_cache_tells(synth_model: Make) -> None:
    llm = kvsplit.Llama(synth_model(n_layer=4), kvq_key="8,1:3=4", kvq_val=4, n_ctx=512, verbose=False)
    cache = llm.kv_cache
    row = 512 * 2 * 64
    assert cache.total_bytes == row // 32 * (2 * 34 + 2 * 18 + 4 * 18)
    assert cache.bytes_f16 == row * 2 * 8
    assert cache.saving == 1 - cache.total_bytes / cache.bytes_f16
    data = json.loads(json.dumps(cache.to_json()))
    assert data["bytes"] == cache.total_bytes and [x["type_k"] for x in data["layers"]][1] == "kvq4"
    assert {(x.rot_k, x.rot_v) for x in cache.layers} == {(64, 64)}
    text = repr(cache)
    assert "q8_0" in text and "2 layers (0 3)" in text and "2 layers (1-2)" in text
    assert "kvq:" in cache.report
    llm.close()
    with pytest.raises(KVSplitError, match="closed"):
        _ = llm.kv_cache


def test_state_of_a_copy_has_no_handles(synth_model: Make) -> None:
    llm = kvsplit.Llama(synth_model(), kvq="k8v4", n_ctx=256, verbose=False)
    state = llm.__getstate__()
    llm.close()
    assert (state["kvq_key"], state["kvq_val"]) == ("q8_0", "kvq4") and "type_k" not in state
    again = kvsplit.Llama.__new__(kvsplit.Llama)
    again.__setstate__(state)
    assert again.kv_cache.types == [("q8_0", "kvq4")] * 2
    again.close()


def test_decodes(synth_model: Make) -> None:
    llm = kvsplit.Llama(synth_model(), kvq=8, n_ctx=256, verbose=False, logits_all=True)
    llm.eval(list(range(1, 40)))
    assert llm.n_tokens == 39
    import numpy as np

    assert np.isfinite(llm.scores[38]).all()
    llm.close()


@pytest.mark.parametrize("bad", [-1, 2**31, 2**32 + 256, 10**30, True, "256", None, 256.0])
def test_n_ctx_that_is_no_size(synth_model: Make, bad: Any) -> None:
    with pytest.raises(UsageError) as e:
        kvsplit.Llama(synth_model(), verbose=False, n_ctx=bad)
    assert isinstance(e.value, ValueError)
    assert str(e.value).startswith("n_ctx: ") and repr(bad) in str(e.value)


@pytest.mark.parametrize("argument", ["n_batch", "n_ubatch"])
@pytest.mark.parametrize("bad", [0, -1, 2**31, 2**32 + 256, True, "32", None, 32.5])
def test_batch_that_is_no_size(synth_model: Make, argument: str, bad: Any) -> None:
    with pytest.raises(UsageError) as e:
        kvsplit.Llama(synth_model(), verbose=False, n_ctx=256, **{argument: bad})
    assert isinstance(e.value, ValueError)
    assert str(e.value).startswith(f"{argument}: ") and repr(bad) in str(e.value)


@pytest.mark.parametrize("bad", ["off", "on", "", 0, 1])
def test_flash_attn_is_true_or_false(synth_model: Make, bad: Any) -> None:
    with pytest.raises(UsageError, match="^flash_attn: .*True nor False") as e:
        kvsplit.Llama(synth_model(), verbose=False, n_ctx=256, flash_attn=bad)
    assert isinstance(e.value, ValueError) and repr(bad) in str(e.value)


@pytest.mark.parametrize("bad", ["", None, 7])
def test_model_path_that_names_nothing(bad: Any) -> None:
    with pytest.raises(UsageError, match="^model_path: ") as e:
        kvsplit.Llama(bad, verbose=False)
    assert isinstance(e.value, ValueError)


def test_smallest_sizes_are_taken(synth_model: Make) -> None:
    kvsplit.Llama(synth_model(), verbose=False, n_ctx=256, n_batch=1, n_ubatch=1, flash_attn=False).close()
    kvsplit.Llama(synth_model(), verbose=False, n_ctx=0, flash_attn=True).close()
