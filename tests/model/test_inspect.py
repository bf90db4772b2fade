# SPDX-License-Identifier: MIT
"""`kvsplit inspect` on real models; a slow test holds its advice against KL divergence."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

import numpy as np
import pytest

from kvsplit import inspect as ins
from kvsplit import inspect_maths, results
from kvsplit.cache_types import BY_ID
from kvsplit.memory import kv_memory
from kvsplit.policy import KVQuant, Spec

pytestmark = [pytest.mark.native, pytest.mark.model]


def _configs(*texts: str) -> Tuple[KVQuant, ...]:
    return tuple(KVQuant.from_text(t) for t in texts)


def _kinds(res: ins.Inspection) -> Dict[str, List[int]]:
    return {c.kind: c.layers for c in res.cautions}


# ---- real models


@pytest.fixture(scope="module")
def seen(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> ins.Inspection:
    out = tmp_path_factory.mktemp("seen")
    return ins.run(smollm2, ins.Options(_configs("K8V4", "K4V8", "K4V4"), n_ctx=256, queries=16, out=out, maps=True))


def _exact(res: ins.Inspection) -> None:
    """The model's own attention is the one computed here, in every layer."""
    for x in res.layers:
        check = x.damage.check
        assert 0 < check["max"] <= check["bound"], (x.layer, check)
        # roundings of f32 that add up by chance: sqrt(head size) of 2^-24 on logits of some tens, 1e-5 at most
        assert check["relative_rms"] < 2e-5, (x.layer, check)


def test_attention_is_the_models_own(seen: ins.Inspection) -> None:
    _exact(seen)
    assert len(seen.layers) == 30 and seen.n_tokens == 256 and seen.n_queries == 16


def test_keys_need_more_bits_than_values(seen: ins.Inspection) -> None:
    k8v4, k4v8, k4v4 = (np.array(seen.output_nse(q)) for q in seen.configs)
    assert k8v4.mean() < k4v8.mean() / 2 < k4v4.mean()
    assert (k4v4 > k8v4).all()


def test_rows_are_of_the_schema_and_say_what_ran(seen: ins.Inspection) -> None:
    (path,) = (f for f in seen.files if f.suffix == ".jsonl")
    rows = results.read_rows(path)
    assert len(rows) == 3 * 30 and {r.kind for r in rows} == {"layer"}
    for q in seen.configs:
        mine = [r for r in rows if r.config == q.label]
        assert [r.layer for r in mine] == list(range(30))
        assert {(r.type_k, r.type_v) for r in mine} == {(q.key, q.val)}
        assert all(len(r.head_output_nse or []) == len(r.head_logit_rmse or []) == 9 for r in mine)
        assert [r.output_nse for r in mine] == pytest.approx(seen.output_nse(q))
    assert results.summarize(rows) == []  # a layer is no line of a comparison
    assert rows[0].seq_len == 256 and rows[0].text_sha256 == seen.text_sha256 and rows[0].provenance.cpu_info


def test_files_are_whole(seen: ins.Inspection) -> None:
    names = sorted(f.name.split("-", 4)[-1] for f in seen.files)
    assert len(names) == 2 + 2 * (2 + 3) and len(set(seen.files)) == len(seen.files)
    for f in seen.files:
        if f.suffix == ".png":
            assert f.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
        elif f.suffix == ".svg":
            assert ET.parse(f).getroot().tag.endswith("svg")
        elif f.suffix == ".json":
            data = json.loads(f.read_text(encoding="utf-8"))
            assert data["check"]["max"] <= data["check"]["bound"] and len(data["layers"]) == 30
            assert sorted(data["ranking"]["keys"]["kvq4"]) == list(range(30))


def test_advice_parses_costs_what_it_says_and_removes_error(seen: ins.Inspection, smollm2: Path) -> None:
    assert [a.config for a in seen.advice] == ["K8V4", "K4V8", "K4V4"]
    for a, q in zip(seen.advice, seen.configs):
        key, val = Spec.parse(a.key), Spec.parse(a.val)
        assert (key.text(), val.text()) == (a.key, a.val)
        assert [i for i, (x, y) in enumerate(zip(key.types(30), q.key_spec.types(30))) if x != y] == a.layers_k
        assert [i for i, (x, y) in enumerate(zip(val.types(30), q.val_spec.types(30))) if x != y] == a.layers_v
        assert a.bytes_before == kv_memory(smollm2, q, 256).total_bytes < a.bytes_after
        assert a.bytes_after == kv_memory(smollm2, KVQuant(a.key, a.val), 256).total_bytes <= 1.1 * a.bytes_before
        assert a.error_after < a.error_before
    protected = set(seen.advice[1].layers_k)
    assert protected == set(seen.damaged_by_keys("kvq4")[: len(protected)])  # all layers cost the same here


class _Stored:
    """Reads the cache of one layer and its attention's output from a run with a quantized cache."""

    def __init__(self, model: Any, il: int) -> None:
        self.ggml, self.il = model.ggml, il
        self.k: Optional[np.ndarray] = None
        self.v: Optional[np.ndarray] = None
        self.output: Optional[np.ndarray] = None
        self.error: Optional[BaseException] = None

    def __call__(self, pointer: int, ask: bool) -> bool:
        t = self.ggml.at(pointer)
        if t.op != self.ggml.op_attention:
            return not ask
        k = self.ggml.at(t.src[1])
        if self.ggml.at(k.view_src).name != f"cache_k_l{self.il}".encode():
            return not ask
        if not ask:
            try:
                self.k, self.v = self._rows(t.src[1]), self._rows(t.src[2])
                self.output = self.ggml.array(pointer)[0].transpose(1, 0, 2).astype(np.float32)
            except BaseException as e:
                self.error = e
        return True

    def _rows(self, pointer: int) -> np.ndarray:
        """Decoded, shape (KV heads, cells, head size)."""
        t = self.ggml.at(pointer)
        name = BY_ID[t.type].name
        data = self.ggml.bytes(pointer, 0, int(self.ggml.lib.ggml_nbytes(pointer)))
        per_head = int(t.nb[2])
        rows = data.reshape(int(t.ne[1]), int(t.ne[2]), per_head)
        return inspect_maths.Library().decode(name, rows).transpose(1, 0, 2)


def test_what_is_measured_is_what_a_cache_stores_and_attention_makes_of_it(smollm2: Path) -> None:
    """The first layer sees the same input whatever the cache's types, so there the prediction can be held to a run."""
    n = 256
    quant = KVQuant.from_text("K4V4")
    got: List[ins.Attention] = []
    with ins._Model(smollm2, 1) as model:
        tokens = model.tokens("The cache stores what the model has read. " * 60)[:n]
        capture = ins._Capture(model, np.arange(n), n, {0}, lambda a: got.append(a))
        with model.context(KVQuant(), n, capture, full=True) as ctx:
            capture.run(ctx, tokens)
        stored = _Stored(model, 0)
        with model.context(quant, n, stored, full=True) as ctx:
            (rot,) = {(x.rot_k, x.rot_v) for x in model.lib.layers(ctx)}
            model.decode(ctx, tokens)
    assert stored.error is None and stored.k is not None and stored.v is not None and stored.output is not None
    (a,) = got
    library = inspect_maths.Library()

    def store(side: str, name: str, rows: np.ndarray) -> np.ndarray:
        return inspect_maths.store(library, name, rows, rot["kv".index(side)])

    assert rot == (64, 64)
    for side, exact, cached in (("k", a.k, stored.k[:, :n]), ("v", a.v, stored.v[:, :n])):
        mine, real = inspect_maths.Stored(), inspect_maths.Stored()
        for x, y in zip(exact.astype(np.float32), cached):
            mine.add(x, store(side, "kvq4", x))
            real.add(x, inspect_maths.rotate(y, 64))
        # the f16 cache rounds a row before it is measured; some values then go to the other of two levels
        assert mine.nse == pytest.approx(real.nse, rel=0.02)
        assert mine.cosine == pytest.approx(real.cosine, abs=1e-4)
    res = inspect_maths.damage(a, ["kvq4"], ["kvq4"], store)
    # the output is of rotated values
    turned = inspect_maths.rotate(stored.output, 64)
    error = np.square(turned - a.output).sum() / np.square(a.output).sum()
    assert res.output["kvq4", "kvq4"].whole == pytest.approx(error, rel=0.05)


@pytest.mark.slow
def test_recommended_layers_lower_the_divergence_more_than_others(gemma3: Path, tmp_path: Path) -> None:
    from kvsplit import gguf_meta, quality

    q = KVQuant.from_text("K4V4")
    res = ins.run(gemma3, ins.Options((q,), out=tmp_path))
    _exact(res)
    assert _kinds(res)["window"] == [5, 11, 17] and 11 in _kinds(res)["logits"]
    (a,) = res.advice
    assert 11 in a.layers_k and not a.layers_v
    least = res.damaged_by_keys("kvq4")[-len(a.layers_k) :]
    other = inspect_maths.spec_text(["q8_0" if i in least else "kvq4" for i in range(18)], "kvq4")
    quants = [q, KVQuant(a.key, a.val), KVQuant(other, a.val)]
    with quality.text_file(None) as text:
        plain, good, bad = quality.run(gemma3, gguf_meta.check_model(gemma3), quants, text, quality.QualityPlan(512, 2))
    assert good.kld < plain.kld / 2 and good.kld + 3 * (good.kld_se + bad.kld_se) < bad.kld
