# SPDX-License-Identifier: MIT
"""The sweep end to end on real models: published figures, paired errors, and what is made of the rows."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, Callable, Dict, List

import pytest
import synth

from kvsplit import bench, cli, results, stats
from kvsplit.results import Row

pytestmark = [pytest.mark.native, pytest.mark.model]

#: KVSplit's published table: the KV cache of TinyLlama at 8192 tokens, in MiB.
PUBLISHED = {"FP16": 176.00, "K8V8": 93.50, "K8V4": 71.50, "K4V8": 71.50, "K4V4": 49.50}


def _bench(model: Path, out: Path, *args: Any) -> List[Row]:
    assert cli.main(["bench", str(model), "--out", str(out), *map(str, args)]) == 0
    return list(results.read(out))


def test_one_command_gives_the_published_memory_table(
    repo: Path, tmp_path: Path, synth_model: Callable[..., Path]
) -> None:
    path = synth_model(**asdict(synth.TINYLLAMA))
    out = tmp_path / "memory.jsonl"
    script = repo / "scripts" / "benchmark_kvsplit.py"
    command = [sys.executable, str(script), "--model", str(path), "--metric", "memory", "--seq-len", "8192"]
    command += ["--config", ",".join(PUBLISHED), "--out", str(out)]
    res = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", timeout=300, check=True)
    shown = {line.split()[0]: line.split()[2] for line in res.stdout.splitlines() if line.split()[:1] and "/" in line}
    assert shown == {("F16" if c == "FP16" else c): f"{mib:.2f}" for c, mib in PUBLISHED.items()}
    for r in results.read(out):
        assert r.kv_bytes == r.kv_bytes_expected and r.compute_bytes and r.compute_bytes > 2**20
        assert (r.type_k, r.type_v) == (r.kvq_key, r.kvq_val)


@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_keys_need_more_bits_than_values(request: pytest.FixtureRequest, tmp_path: Path, eval_text: Path,
                                         name: str) -> None:  # fmt: skip
    model = request.getfixturevalue(name)
    rows = _bench(model, tmp_path / "b.jsonl", "--metric", "perplexity", "--seq-len", 512, "--chunks", 6,
                  "--config", "F16,K8V4,K4V8", "--text", eval_text)  # fmt: skip
    f16, wide_keys, wide_values = rows
    assert [r.config for r in rows] == ["F16", "K8V4", "K4V8"]
    # the same output each time: llama-perplexity's order of operations doesn't depend on the run
    assert f16.kld is not None and abs(f16.kld) < 1e-5 and f16.ppl_change == 0
    assert wide_keys.kv_bytes == wide_values.kv_bytes
    d = stats.difference(wide_keys.kld_chunks, wide_values.kld_chunks)
    assert d is not None and d.mean < 0 and d.beyond
    for r in (wide_keys, wide_values):
        assert r.ppl is not None and r.ppl_se is not None and r.ppl_change_se is not None
        # paired by chunk, the change is known far better than the perplexity
        assert 0 < r.ppl_change_se * r.ppl < r.ppl_se / 3
        # the tool's own ratio against the base, which clamps small probabilities for all alike, agrees within
        # 4 of its standard errors
        assert r.ppl_ratio is not None and r.ppl_ratio_se is not None and f16.ppl_ratio is not None
        assert r.ppl_change == pytest.approx(r.ppl_ratio / f16.ppl_ratio - 1, abs=4 * r.ppl_ratio_se + 1e-6)


def test_a_sweep_of_all_metrics_becomes_figures_and_a_page(
    smollm2: Path, tmp_path: Path, eval_text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "all.jsonl"
    args = ["--seq-len", 256, "--config", "K8V4", "--repeat", 1, "--chunks", 4, "--trials", 1, "--text", eval_text]
    rows = _bench(smollm2, out, *args)
    kinds: Dict[str, int] = {}
    for r in rows:
        kinds[r.kind] = kinds.get(r.kind, 0) + 1
    assert kinds == {"memory": 2, "speed": 4, "quality": 2, "retrieval": 2, "continuation": 2}
    for r in rows:
        asked = {"F16": ("f16", "f16"), "K8V4": ("q8_0", "kvq4")}[r.config]
        assert (r.type_k, r.type_v) == asked and r.layer_types == [[30, *asked]] and r.backend_decode
    s = {x.config: x for x in results.summarize(rows)}
    assert s["F16"].same_tokens == [rows[-1].n_gen] * len(s["F16"].same_tokens), "f16 continues as f16 does"
    assert len({bench.row_key(r) for r in rows}) == len(rows)
    capsys.readouterr()
    assert cli.main(["bench", str(smollm2), "--out", str(out), *map(str, args), "--resume", "--json"]) == 0
    table, told = capsys.readouterr()
    assert "0 rows measured, 12 were there" in told
    assert [c["config"] for c in json.loads(table)["configs"]] == ["F16", "K8V4"]

    assert cli.main(["plot", str(out), "--out", str(tmp_path / "figures")]) == 0
    assert {f.suffix for f in (tmp_path / "figures").iterdir()} == {".png", ".svg", ".json"}
    assert cli.main(["report", str(out), "--out", str(tmp_path / "r.html")]) == 0
    page = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert "K8V4" in page and f"{s['K8V4'].kv_mib:.2f}" in page
