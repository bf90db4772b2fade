# SPDX-License-Identifier: MIT
"""The Python package on real models: memory to the byte, generation, the comparison end to end."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Callable, Dict, List

import pytest

import kvsplit
from kvsplit import KVQuant, kv_memory, probe, quality, results
from kvsplit.gguf_meta import check_model

pytestmark = [pytest.mark.native, pytest.mark.model]

CASES = [
    (KVQuant(), 512, {}),
    (KVQuant.parse("8"), 3000, {}),
    (KVQuant.parse(key="4,:2=16", val="16,2:=4"), 1000, {"n_batch": 200, "n_ubatch": 100}),
    (KVQuant.parse(key="8,-1=q5_1", val="iq4_nl"), 2048, {"swa_full": False}),
    (KVQuant.parse(key="16", val="q4_1"), 4096, {"swa_full": False, "n_ubatch": 256}),
]


@pytest.mark.parametrize("case", range(len(CASES)))
@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_memory_equals_the_allocator_to_the_byte(request: pytest.FixtureRequest, name: str, case: int) -> None:
    path: Path = request.getfixturevalue(name)
    quant, n_ctx, kw = CASES[case]
    llm = kvsplit.Llama(path, kvq=quant, n_ctx=n_ctx, verbose=False, **kw)
    cache = llm.kv_cache
    llm.close()
    m = kv_memory(path, quant, n_ctx, **{"n_batch": 512, "swa_full": True, **kw})
    got = [(x.il, x.swa, x.n_cells, x.n_head_kv, x.type_k, x.type_v, x.bytes_k, x.bytes_v) for x in cache.layers]
    assert got == [(x.il, x.swa, x.n_cells, x.n_head_kv, x.type_k, x.type_v, x.bytes_k, x.bytes_v) for x in m.layers]
    assert cache.total_bytes == m.total_bytes and cache.saving == pytest.approx(m.saving)


@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_attention_runs_where_the_layers_are(request: pytest.FixtureRequest, name: str) -> None:
    path: Path = request.getfixturevalue(name)
    cache = probe.kv_cache(path, 512, KVQuant.parse("8"))
    for layer in cache["layers"]:
        assert layer["backend_prefill"] == layer["backend_decode"] == layer["backend_expect"] != ""
        assert layer["fused"]


def _tokens(path: Path, n: int, **kw: Any) -> List[int]:
    llm = kvsplit.Llama(path, n_ctx=512, verbose=False, n_threads=2, **kw)
    try:
        prompt = llm.tokenize(b"The capital of France is Paris. The capital of Italy is")
        out: List[int] = []
        for token in llm.generate(prompt, temp=0.0):
            out.append(token)
            if len(out) == n:
                break
        return out
    finally:
        llm.close()


@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_f16_said_is_f16_left_out(request: pytest.FixtureRequest, name: str) -> None:
    path: Path = request.getfixturevalue(name)
    assert _tokens(path, 24) == _tokens(path, 24, kvq=16) == _tokens(path, 24, kvq_key="f16", type_v=1)


@pytest.mark.parametrize("kw", [{"kvq": 8}, {"kvq_key": "8,:2=16", "kvq_val": "4,-2:=8"}], ids=["k8v4", "by-layer"])
def test_a_split_cache_knows_the_capital(smollm2: Path, kw: Dict[str, Any]) -> None:
    llm = kvsplit.Llama(smollm2, n_ctx=512, verbose=False, **kw)
    res = llm("The capital of France is Paris. The capital of Italy is", max_tokens=4, temperature=0.0)
    llm.close()
    assert "Rome" in res["choices"][0]["text"]


@pytest.mark.slow
def test_ladder_of_quality(smollm2: Path, eval_text: Path, tmp_path: Path) -> None:
    """Keys are more sensitive than values: the order of the measured ladder, with f16 its own floor."""
    plan = quality.QualityPlan(ppl_ctx=512, chunks=2)
    names = ("F16", "K8V8", "K8V4", "K4V8", "K4V4")
    quants = [KVQuant.from_text(n) for n in names]
    with quality.text_file(eval_text) as text:
        got = dict(zip(names, quality.run(smollm2, check_model(smollm2), quants, text, plan)))
    kld = {n: q.kld for n, q in got.items()}
    # The base stores log-probabilities in 16 bits over a range of at most 16 nats: steps of 2.5e-4 nats, so
    # the divergence of f16 from itself stays below that, and anything measured stands well above it.
    assert abs(kld["F16"]) < 2.5e-4
    assert kld["F16"] < kld["K8V8"] < kld["K8V4"] < kld["K4V8"]
    # K4V8 and K4V4 lie within 1.2x of each other; against K8V4 both are 4x or more, of which half is asked
    assert min(kld["K4V8"], kld["K4V4"]) > 2 * kld["K8V4"]
    assert got["F16"].top1 > 0.99 > got["K4V4"].top1 > 0.7
    assert all(q.ppl_base == got["F16"].ppl_base for q in got.values())


@pytest.mark.slow
def test_compare_end_to_end(smollm2: Path, synth_model: Callable[..., Path], tool: Any, tmp_path: Path) -> None:
    """Everything at once, on a small model with the real one's tokenizer, so that it takes seconds."""
    tool("llama-bench"), tool("llama-perplexity")
    path = synth_model(tokenizer=smollm2, n_layer=3, n_ctx_train=2048)
    text = tmp_path / "my text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog, again and again. " * 400, encoding="utf-8")
    out = tmp_path / "out put"
    configs = "F16;K8V4;4,:1=8/q4_1"
    cmd = [sys.executable, "-m", "kvsplit", "compare", str(path), "--quick", "--ppl-ctx", "256", "--chunks", "2"]
    cmd += ["--config", configs, "--repeat", "2", "--text", str(text), "--out", str(out), "--ctx", "1000"]
    env = {**os.environ, "PYTHONPATH": str(Path(kvsplit.__file__).parent.parent)}
    res = subprocess.run(cmd, capture_output=True, text=True, encoding="utf-8", env=env, check=False)
    assert res.returncode == 0, res.stderr

    files = {p.suffix: p for p in out.iterdir()}
    assert sorted(files) == [".csv", ".jsonl", ".png", ".svg"]
    rows = list(results.read(files[".jsonl"]))
    labels = ["F16", "K8V4", "kvq4,:1=q8_0/q4_1"]
    assert sorted((r.kind, r.config) for r in rows) == sorted(
        # two rounds, of each a row of prefill and one of decoding
        (kind, label)
        for label in labels
        for kind in ("memory", *["speed"] * 4, "quality")
    )
    assert {r.round for r in rows if r.kind == "speed"} == {0, 1}
    for r in rows:
        assert r.layer_types is not None and sum(n for n, _, _ in r.layer_types) == 3
        assert len(r.provenance.model_sha256) == len(r.provenance.patches_sha256) == 64
        assert r.provenance.cpu_info and r.provenance.backends and "compare" in r.provenance.command
        if r.kind == "memory":
            assert r.kv_bytes == r.kv_bytes_expected == kv_memory(path, KVQuant(r.kvq_key, r.kvq_val), 1000).total_bytes
        elif r.kind == "speed":
            assert r.samples_ts is not None and len(r.samples_ts) == 1 and r.peak_rss
        else:
            assert r.text == "my text.txt" and r.kld_floor is not None
    mixed = next(r for r in rows if r.config == labels[2])
    assert mixed.layer_types == [[1, "q8_0", "q4_1"], [2, "kvq4", "q4_1"]]
    assert (mixed.type_k, mixed.type_v) == ("q8_0+kvq4", "q4_1")
    with open(files[".csv"], encoding="utf-8", newline="") as f:
        assert [r["config"] for r in csv.DictReader(f)] == labels
    for label in labels:
        assert label in res.stdout
    assert "my text.txt" in res.stderr and str(files[".png"]) in res.stderr

    again = subprocess.run([*cmd, "--json"], capture_output=True, text=True, encoding="utf-8", env=env, check=False)
    data = json.loads(again.stdout)
    assert [c["config"] for c in data["configs"]] == labels and len(list(out.iterdir())) == 8


@pytest.mark.slow
def test_text_that_is_too_short_is_told(
    smollm2: Path, synth_model: Callable[..., Path], tool: Any, tmp_path: Path
) -> None:
    tool("llama-perplexity")
    path = synth_model(tokenizer=smollm2, n_layer=1, n_ctx_train=2048)
    text = tmp_path / "t.txt"
    text.write_text("word " * 250, encoding="utf-8")
    plan = quality.QualityPlan(512, 2)
    with quality.text_file(text) as t, pytest.raises(kvsplit.KVSplitError, match="tokenizes to only|too short"):
        quality.run(path, check_model(path), [KVQuant()], t, plan)
