# SPDX-License-Identifier: MIT
"""Numbers and names that are no cache types, through every way that Python has to a context: refused, never a crash.

The pinned release reads past its table of types: of the 523 numbers from -2 to 520, 328 end the interpreter by a signal
when a context is made, and nine more are taken though none is a cache type. A crash would take pytest with it, so each
sweep is a process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Callable, Dict, List

import pytest

import kvsplit
from kvsplit.cache_types import BITS, BY_ID, CACHE_TYPES, POLICY_BASE
from kvsplit.errors import KVQuantError

pytestmark = pytest.mark.native
Make = Callable[..., Path]

FIRST, LAST = -2, 520
# past a byte, a short and an int; handles that nobody asked for
FAR = [4096, 65535, 65536 + 8, 2**31 - 1, -(2**31), POLICY_BASE - 1, POLICY_BASE + 12345]
NUMBERS = [*range(FIRST, LAST + 1), *FAR]


def sweep(code: str, model: Path) -> List[Dict[str, Any]]:
    """Run code, which has M (model) and NUMBERS, and return the JSON lines that it prints."""
    head = f"import json, sys\nM, NUMBERS = sys.argv[1], {NUMBERS!r}\n"
    env = {**os.environ, "PYTHONPATH": str(Path(kvsplit.__file__).parent.parent), "GGML_NO_BACKTRACE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", head + code, str(model)],
        capture_output=True,
        text=True,
        errors="replace",
        env=env,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, f"exit code {done.returncode} after {done.stdout[-200:]}\n{done.stderr[-2000:]}"
    return [json.loads(line) for line in done.stdout.splitlines()]


LLAMA = """
import kvsplit
from kvsplit.cache_types import BY_ID
for side in ("type_k", "type_v"):
    for t in NUMBERS:
        if t in BY_ID:
            continue
        try:
            kvsplit.Llama(M, n_ctx=256, verbose=False, **{side: t}).close()
            print(json.dumps([side, t, None, None]))
        except ValueError as e:
            print(json.dumps([side, t, type(e).__name__, str(e)]))
"""


def test_no_number_but_a_cache_type_passes_type_k_or_type_v(synth_model: Make) -> None:
    said = sweep(LLAMA, synth_model())
    assert len(said) == 2 * (len(NUMBERS) - len(CACHE_TYPES))
    for side, t, error, text in said:
        assert error == "CacheTypeError" and text.startswith(f"{side}: {t} is no cache type"), (side, t, error, text)
        assert [x.name for x in CACHE_TYPES if f"{x.ggml_id} ({x.name})" not in text] == []


CONTEXT = """
import llama_cpp
from kvsplit import native
lib = native.load()
quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
llama_cpp.llama_log_set(quiet, None)
model = llama_cpp.llama_model_load_from_file(M.encode(), llama_cpp.llama_model_default_params())
for side in ("type_k", "type_v"):
    for t in NUMBERS:
        p = llama_cpp.llama_context_default_params()
        p.n_ctx, p.n_threads, p.n_threads_batch, p.flash_attn_type = 256, 1, 1, 1
        setattr(p, side, t)
        ctx = llama_cpp.llama_init_from_model(model, p)
        ok = bool(ctx)
        if ok:
            batch = llama_cpp.llama_batch_get_one((llama_cpp.llama_token * 3)(1, 2, 3), 3)
            assert llama_cpp.llama_decode(ctx, batch) == 0
            llama_cpp.llama_free(ctx)
        print(json.dumps([side, t, ok, "" if ok else lib.last_error()]))
"""


def test_no_number_but_a_cache_type_passes_the_context_of_the_c_library(synth_model: Make) -> None:
    """By ctypes, as llama-cpp-python and other bindings fill the struct in."""
    said = sweep(CONTEXT, synth_model())
    assert [(side, t) for side, t, ok, _ in said if ok] == [
        (side, t) for side in ("type_k", "type_v") for t in NUMBERS if t in BY_ID
    ]
    for side, t, ok, text in said:
        if not ok:
            word = "keys" if side == "type_k" else "values"
            assert word in text and "q8_0" in text and "iq4_nl" in text and "kvq4" in text, (side, t, text)


PLAIN = """
import kvsplit, llama_cpp  # kvsplit first: both use one library
for t in (9, 24, 99, 36, -1, 200):
    for side in ("type_k", "type_v"):
        try:
            llama_cpp.Llama(M, n_ctx=256, verbose=False, flash_attn=True, **{side: t})
            print(json.dumps("taken"))
        except ValueError as e:
            print(json.dumps(str(e)))
"""


def test_the_plain_class_of_llama_cpp_python_raises_too(synth_model: Make) -> None:
    said = sweep(PLAIN, synth_model())
    assert len(said) == 12 and all("llama_context" in str(s) for s in said), said


@pytest.mark.parametrize("argument", ["kvq_key", "kvq_val"])
def test_no_number_but_bits_passes_a_spec(synth_model: Make, argument: str) -> None:
    """Numbers of a SPEC are bits, and those of ggml's types have no meaning there."""
    model = synth_model()
    for t in NUMBERS:
        if t in BITS:
            continue
        with pytest.raises(KVQuantError) as e:
            kvsplit.Llama(model, n_ctx=256, verbose=False, **{argument: t})
        text = str(e.value)
        assert isinstance(e.value, ValueError) and argument in text and str(t) in text, text
        assert "q8_0" in text and "kvq4" in text, text


@pytest.mark.parametrize(
    "bad", ["q8_1", "i8", "q4_K", "Q6_K", "mxfp4", "tq1_0", "8 ", "f8", "kvq7", "\0", "8\x00", "８"]
)
@pytest.mark.parametrize("argument", ["type_k", "type_v", "kvq_key", "kvq_val"])
def test_no_name_but_a_cache_type_passes(synth_model: Make, argument: str, bad: str) -> None:
    if bad == "8 ":  # blanks don't matter
        llm = kvsplit.Llama(synth_model(), n_ctx=256, verbose=False, **{argument: bad})  # type: ignore[arg-type]
        assert "q8_0" in (llm.kv_cache.type_k, llm.kv_cache.type_v)
        llm.close()
        return
    with pytest.raises(KVQuantError) as e:
        kvsplit.Llama(synth_model(), n_ctx=256, verbose=False, **{argument: bad})  # type: ignore[arg-type]
    assert argument in str(e.value) and "q8_0" in str(e.value)


def test_quantized_values_without_flash_attention_are_one_error_in_every_spelling(synth_model: Make) -> None:
    from kvsplit.errors import FlashAttentionError

    spellings: List[Dict[str, Any]] = [
        {"kvq": 8}, {"kvq_val": 4}, {"kvq_val": "16,-1=5"}, {"type_v": "q4_0"}, {"type_v": 2}, {"type_v": 452},
    ]  # fmt: skip
    for kw in spellings:
        with pytest.raises(FlashAttentionError) as e:
            kvsplit.Llama(synth_model(), n_ctx=256, verbose=False, flash_attn=False, **kw)
        assert str(e.value).startswith("flash_attn: False") and "leave flash_attn out" in str(e.value)
