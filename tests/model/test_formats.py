# SPDX-License-Identifier: MIT
"""The formats where a user meets them: types of caches, never of weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Callable, List

import pytest

from kvsplit import native
from kvsplit.cache_types import BITS, BY_NAME, CACHE_TYPES

pytestmark = [pytest.mark.native]

OURS = [t.name for t in CACHE_TYPES if t.name.startswith("kvq")]
WIDTHS = [16, 8, 6, 5, 4, 3, 2]


def test_bits_name_the_formats() -> None:
    assert [BITS[b] for b in (6, 5, 4, 3, 2)] == ["kvq6", "kvq5", "kvq4", "kvq3", "kvq2"]
    assert [BY_NAME[BITS[b]].bits_per_value for b in (6, 5, 4, 3, 2)] == [6.5, 5.5, 4.5, 3.5, 2.5]


@pytest.mark.parametrize("name", OURS)
def test_quantize_refuses_them(run_tool: Any, synth_model: Callable[..., Path], tmp_path: Path, name: str) -> None:
    model, out = synth_model(), tmp_path / "out.gguf"
    done = run_tool("llama-quantize", model, out, name)
    assert done.returncode == 1
    assert f"invalid ftype '{name}' (a type of KV caches, not of weights)" in done.stderr
    for flag in ("--output-tensor-type", "--token-embedding-type"):
        done = run_tool("llama-quantize", "--allow-requantize", flag, name, model, out, "q8_0")
        assert done.returncode == 1, done.stderr[-2000:]
        assert f"{name} (a type of KV caches, not of weights); give it to --kvq" in done.stderr + done.stdout
    done = run_tool("llama-quantize", "--tensor-type", f"attn_v={name}", model, out, "q8_0")
    assert done.returncode == 1, done.stderr[-2000:]
    assert f"{name} (a type of KV caches, not of weights)" in done.stderr + done.stdout
    assert not out.exists()


# The bindings' own count of types is the value that means `not set`; it lies in a gap of ours.
QUANTIZE = """
import ctypes, json, sys
import llama_cpp as L

quiet = L.llama_log_callback(lambda level, text, data: None)
L.llama_log_set(quiet, ctypes.c_void_p())
for field, t in json.loads(sys.argv[3]):
    p = L.llama_model_quantize_default_params()
    p.nthread, p.ftype, p.allow_requantize = 1, L.LLAMA_FTYPE_MOSTLY_Q8_0, True
    setattr(p, field, t)
    print(L.llama_model_quantize(sys.argv[1].encode(), sys.argv[2].encode(), ctypes.byref(p)), flush=True)
print("alive", L.GGML_TYPE_COUNT)
"""


def test_quantize_through_the_bindings(synth_model: Callable[..., Path], tmp_path: Path) -> None:
    ids = [43, 44, 100, 447, 449, *(BY_NAME[n].ggml_id for n in OURS), 455, 463, 464, 500, 8]
    cases = [[field, t] for field in ("output_tensor_type", "token_embedding_type") for t in ids]
    done = subprocess.run(
        [sys.executable, "-c", QUANTIZE, str(synth_model()), str(tmp_path / "out.gguf"), json.dumps(cases)],
        capture_output=True,
        text=True,
        env={**os.environ, "LLAMA_CPP_LIB_PATH": str(native.load().path.parent)},
        timeout=300,
        check=False,
    )
    lines: List[str] = done.stdout.split("\n")
    assert done.returncode == 0 and "alive 43" in lines, f"{done.returncode}\n{done.stdout[-500:]}{done.stderr[-2000:]}"
    for (field, t), code in zip(cases, lines):
        # not set: what the bindings call the count, and what the library does; and one that is a type of weights
        assert (int(code) == 0) == (t in (43, 464, 8)), f"{field} {t}: {code}"


@pytest.mark.model
def test_every_pair_of_widths_runs(run_tool: Any, smollm2: Path, tmp_path: Path) -> None:
    """One line of llama-bench for each of the 49 pairs, with the types that were really stored."""
    pairs = [(k, v) for k in WIDTHS for v in WIDTHS]
    done = run_tool(
        "llama-bench", "-m", smollm2, "-p", "16", "-n", "2", "-r", "1", "-t", "2", "-fa", "1", "-o", "jsonl",
        "--kvq", ";".join(f"k{k}v{v}" for k, v in pairs), timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    seen = [(r["type_k"], r["type_v"]) for r in rows if r["n_gen"]]
    assert seen == [(BITS[k], BITS[v]) for k, v in pairs]


@pytest.mark.model
@pytest.mark.parametrize("preset", ["k6v3", "k4v2", "k3v3", "k6v5"])
def test_text_and_saved_session(run_tool: Any, smollm2: Path, tmp_path: Path, preset: str) -> None:
    """A prompt cache of one format goes on with the same text; a context of another format refuses it."""
    session = tmp_path / "session.bin"
    args = ["-m", smollm2, "-p", "The capital of France is", "-n", 8, "-c", 512, "--temp", 0, "-no-cnv", "-t", 1]
    first = run_tool("llama-completion", *args, "--kvq", preset, "--prompt-cache", session)
    again = run_tool("llama-completion", *args, "--kvq", preset, "--prompt-cache", session)
    assert first.returncode == again.returncode == 0, again.stderr[-3000:]
    assert first.stdout == again.stdout
    if preset != "k4v2":  # 2 bits of values are too few for this model to hold a fact
        assert "Paris" in first.stdout
    other = run_tool("llama-completion", *args, "--kvq", "k5v6", "--prompt-cache", session)
    assert other.returncode == 1 and "was saved with keys " in other.stderr
