# SPDX-License-Identifier: MIT
"""The C API under bindings that check nothing: any number as a cache type gives a context or a reason, no crash."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Callable, Dict, List

import pytest

from kvsplit import native
from kvsplit.cache_types import CACHE_TYPES

pytestmark = pytest.mark.native

# In a process of its own: a crash would take the tests with it. It prints each case before it is tried.
CODE = """
import ctypes, json, sys
import llama_cpp as L
from llama_cpp.llama_cpp import _lib

_lib.kvq_last_error.restype = ctypes.c_char_p
quiet = L.llama_log_callback(lambda level, text, data: None)  # must outlive the calls
L.llama_log_set(quiet, ctypes.c_void_p())
L.llama_backend_init()
model = L.llama_model_load_from_file(sys.argv[1].encode(), L.llama_model_default_params())
assert model
for side, flash, t in json.loads(sys.stdin.read()):
    print(json.dumps([side, flash, t]), end=" ", flush=True)
    p = L.llama_context_default_params()
    p.n_ctx, p.n_batch, p.n_threads, p.n_threads_batch = 256, 32, 1, 1
    p.flash_attn_type = flash
    for name in ("type_k", "type_v") if side == "both" else (side,):
        setattr(p, name, t)
    ctx = L.llama_init_from_model(model, p)
    print(json.dumps([bool(ctx), _lib.kvq_last_error().decode()]), flush=True)
    if ctx:
        L.llama_free(ctx)
print("alive")
"""

OFF, AUTO, ON = 0, -1, 1


def contexts(model: Path, cases: List[Any]) -> Dict[Any, Any]:
    """(made, reason) by (side, flash, type)."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("LLAMA_")}
    env["LLAMA_CPP_LIB_PATH"] = str(native.load().path.parent)
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(model)],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        env=env,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, f"{done.returncode}, at {done.stdout[-200:]}\n{done.stderr[-2000:]}"
    lines = done.stdout.splitlines()
    assert lines.pop() == "alive"
    decode = json.JSONDecoder().raw_decode
    res = {}
    for line in lines:
        case, end = decode(line)
        res[tuple(case)] = tuple(json.loads(line[end:]))
    assert len(res) == len(cases)
    return res


def test_every_number_as_a_cache_type(synth_model: Callable[..., Path]) -> None:
    numbers = [*range(501), -1, 1 << 20, (1 << 31) - 1]
    allowed = {t.ggml_id for t in CACHE_TYPES}
    sides = ("type_k", "type_v", "both")
    got = contexts(synth_model(n_layer=1), [[s, AUTO, t] for s in sides for t in numbers])
    for (side, _, t), (made, reason) in got.items():
        assert made == (t in allowed), f"{side} {t}: {reason}"
        if made:
            assert reason == ""
        else:
            assert f"type {t} " in reason and "is no cache type" in reason and "q8_0" in reason, f"{side} {t}: {reason}"
            assert ("values" if side == "type_v" else "keys") in reason


def test_quantized_values_need_flash_attention(synth_model: Callable[..., Path]) -> None:
    cases = [[s, f, t.ggml_id] for s in ("type_k", "type_v") for f in (OFF, AUTO, ON) for t in CACHE_TYPES]
    quantized = {t.ggml_id for t in CACHE_TYPES if t.block > 1}
    for (side, flash, t), (made, reason) in contexts(synth_model(n_layer=1), cases).items():
        refused = side == "type_v" and flash == OFF and t in quantized
        assert made != refused, f"{side} {flash} {t}: {reason}"
        assert ("need flash attention" in reason) == refused


@pytest.mark.parametrize("head", [40, 80])
def test_heads_that_blocks_do_not_divide(synth_model: Callable[..., Path], head: int) -> None:
    cases = [[s, f, t.ggml_id] for s in ("type_k", "type_v") for f in (OFF, AUTO, ON) for t in CACHE_TYPES]
    blocks = {t.ggml_id: t.block for t in CACHE_TYPES}
    for (side, flash, t), (made, reason) in contexts(synth_model(n_layer=1, head_k=head), cases).items():
        assert made == (head % blocks[t] == 0), f"{side} {flash} {t}: {reason}"
        assert made or f"head size {head}" in reason
