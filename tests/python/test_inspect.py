# SPDX-License-Identifier: MIT
"""The arithmetic of `kvsplit inspect` against slow and independent forms of it, and what the command refuses."""

from __future__ import annotations

import ctypes
import itertools
import json
import math
import random
import tracemalloc
from pathlib import Path
from typing import Any, Callable, Dict, List, Sequence, Tuple

import gguf
import numpy as np
import pytest
import scipy.stats

from kvsplit import cli, inspect_maths
from kvsplit import inspect as ins
from kvsplit.cache_types import BY_NAME
from kvsplit.errors import NativeMismatchError, UsageError
from kvsplit.inspect_maths import Attention
from kvsplit.policy import KVQuant, Spec

# ---- storage


def test_hadamard_turns_back_and_keeps_lengths() -> None:
    x = np.random.default_rng(1).standard_normal((7, 2, 192)).astype(np.float32)
    y = inspect_maths.rotate(x, 64)
    # 64 products of values near 1 in f32: an error of 64 * 2^-24 at most on values up to 5
    assert np.allclose(inspect_maths.rotate(y, 64), x, atol=5 * 64 * 2.0**-24)
    assert np.allclose(np.square(y).sum(-1), np.square(x).sum(-1), rtol=1e-5)
    assert not np.allclose(y, x, atol=0.1)
    across = x.transpose(1, 0, 2)  # not in the order of memory
    assert np.array_equal(inspect_maths.rotate(across, 64), y.transpose(1, 0, 2))
    spike = np.zeros((1, 64), np.float32)
    spike[0, 5] = 8.0
    assert np.allclose(np.abs(inspect_maths.rotate(spike, 64)), 1.0)
    with pytest.raises(ValueError, match="48 is no power of two"):
        inspect_maths.hadamard(48)


def test_bf16_rounds_to_even() -> None:
    # 1 + 2^-8 lies half way between 1 and 1 + 2^-7, 1 + 3 * 2^-8 between 1 + 2^-7 and 1 + 2^-6
    x = np.array([1.0, 1 + 2.0**-8, 1 + 3 * 2.0**-8, -1 - 2.0**-8 - 2.0**-20], np.float32)
    y = inspect_maths.store(None, "bf16", x, 64)  # type: ignore[arg-type]
    assert y.tolist() == [1.0, 1.0, 1 + 2.0**-6, -1 - 2.0**-7]


@pytest.mark.native
def test_what_is_stored_has_the_error_of_its_format() -> None:
    library = inspect_maths.Library()
    x = np.random.default_rng(2).standard_normal((512, 128)).astype(np.float32)
    # docs/numerics.md, on N(0,1); 65536 values put the estimate within a few percent
    for name, nse in (("kvq4", 0.00432), ("kvq3", 0.0184), ("kvq2", 0.0805), ("kvq6", 0.000266)):
        for rotation in (0, 64, 128):
            s = inspect_maths.Stored()
            s.add(x, inspect_maths.store(library, name, x, rotation))
            assert s.nse == pytest.approx(nse, rel=0.05)
            # orthogonal errors of that size tilt a row by this cosine
            assert s.cosine == pytest.approx(1 - nse / 2, abs=0.2 * nse)
    # a channel of outliers takes the range of its block, and rotation spreads it
    x[:, 7] *= 40
    errors = []
    for rotation in (0, 128):
        y = inspect_maths.store(library, "q4_0", x, rotation)
        errors.append(float(np.square(np.delete(x - y, 7, axis=1)).mean()))
    assert errors[1] < errors[0] / 2
    assert np.array_equal(inspect_maths.store(library, "f16", x, 64), x)


def test_rows_of_zeros_have_no_cosine_and_rows_that_vanish_have_zero() -> None:
    s = inspect_maths.Stored()
    s.add(np.array([[0.0, 0.0], [3.0, 4.0], [1.0, 0.0]]), np.array([[0.0, 0.0], [6.0, 8.0], [0.0, 0.0]]))
    assert s.cosine == pytest.approx(0.5) and s.nse == pytest.approx(26 / 26)


# ---- statistics


def test_statistics_are_those_of_scipy() -> None:
    rng = np.random.default_rng(3)
    x = rng.standard_t(6, (400, 32)) * np.linspace(0.5, 2, 32) + np.arange(32)
    s = inspect_maths.spread(x)
    assert s.kurtosis == pytest.approx(scipy.stats.kurtosis(x, axis=None))
    assert s.channel_kurtosis == pytest.approx(scipy.stats.kurtosis(scipy.stats.zscore(x, axis=0), axis=None))
    assert (s.min, s.max, s.mean, s.std) == pytest.approx((x.min(), x.max(), x.mean(), x.std()))
    assert s.absmax == max(-x.min(), x.max()) and s.peak == pytest.approx(s.absmax / np.sqrt(np.square(x).mean()))


def test_outlier_channels_are_found_and_constant_ones_do_no_harm() -> None:
    rng = np.random.default_rng(4)
    x = rng.standard_normal((300, 64))
    assert inspect_maths.spread(x).outlier_channels == []
    x[:, 9] *= 7
    x[:, 40] = -30.0
    s = inspect_maths.spread(x)
    assert s.outlier_channels == [9, 40] and math.isfinite(s.channel_kurtosis) and abs(s.channel_kurtosis) < 0.5
    # mean energy of the constant channel beside 62 channels of 1 and one of 49
    assert inspect_maths.constant_share(x) == pytest.approx(900 / (900 + 62 + 49), abs=0.02)
    assert inspect_maths.spread(np.zeros((5, 4))).kurtosis == 0


# ---- attention


def _attention(seed: int, n: int = 96, heads: int = 6, kv: int = 2, d: int = 32, dv: int = 48, **kw: Any) -> Attention:
    """A layer with made-up queries; the mask is causal with a window of 70, its output that of :func:`_slow`."""
    rng = np.random.default_rng(seed)
    positions = np.array([0, 5, 40, n - 2, n - 1])
    at = np.arange(n)[None] - positions[:, None]
    mask = np.where((at <= 0) & (at > -70), at if kw.get("max_bias") else 0, -np.inf).astype(np.float16)
    a = Attention(
        il=0,
        q=(2 * rng.standard_normal((heads, len(positions), d))).astype(np.float32),
        k=rng.standard_normal((kv, n, d)).astype(np.float16),
        v=rng.standard_normal((kv, n, dv)).astype(np.float16),
        mask=mask,
        positions=positions,
        output=np.zeros((heads, len(positions), dv), np.float32),
        scale=d**-0.5,
        **kw,
    )
    a.output[:] = _slow(a, a.k.astype(float), a.v.astype(float))[0]
    return a


def _slow(a: Attention, k: Any, v: Any) -> Tuple[Any, Dict[Tuple[int, int, int], float]]:
    """Output and logits, number by number, as the C code of ggml's operation counts."""
    out = np.zeros(a.output.shape)
    logits: Dict[Tuple[int, int, int], float] = {}
    n_head = len(a.q)
    base = 2 ** math.floor(math.log2(n_head))
    m0, m1 = 2.0 ** (-a.max_bias / base), 2.0 ** (-(a.max_bias / 2) / base)
    for h, i in itertools.product(range(n_head), range(a.q.shape[1])):
        j = h * len(a.k) // n_head
        slope = 1.0
        if a.max_bias > 0:
            slope = m0 ** (h + 1) if h < base else m1 ** (2 * (h - base) + 1)
        terms: List[Tuple[float, Any]] = []
        for c in range(a.k.shape[1]):
            bias = float(a.mask[i, c])
            if bias == -math.inf:
                continue
            s = sum(float(x) * float(y) for x, y in zip(a.q[h, i], k[j, c])) * a.scale
            if a.softcap:
                s = a.softcap * math.tanh(s / a.softcap)
            logits[h, i, c] = s + slope * bias
            terms.append((math.exp(s + slope * bias), v[j, c]))
        total = sum(w for w, _ in terms) + (math.exp(a.sinks[h]) if a.sinks is not None else 0.0)
        out[h, i] = sum(w * row for w, row in terms) / total
    return out, logits


VARIANTS: Dict[str, Dict[str, Any]] = {
    "plain": {},
    "softcap": {"softcap": 3.0},
    "alibi": {"max_bias": 8.0},
    "sinks": {"sinks": np.array([-1.0, 3.0, 0.0, 0.5, 2.0, 8.0], np.float32)},
    "all": {"softcap": 5.0, "max_bias": 4.0, "sinks": np.linspace(-2, 2, 6).astype(np.float32)},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_damage_is_that_of_attention_number_by_number(name: str) -> None:
    a = _attention(5, **VARIANTS[name])
    rng = np.random.default_rng(6)
    noise = {("k", "q4_0"): 0.1, ("k", "q8_0"): 0.01, ("v", "q8_0"): 0.02}
    changed = {(s, t): rng.standard_normal(x.shape) * e
               for (s, t), e in noise.items() for x in [a.k if s == "k" else a.v]}  # fmt: skip

    def stored(side: str, kind: str, rows: Any) -> Any:
        whole = a.k if side == "k" else a.v
        (j,) = (j for j in range(len(whole)) if np.array_equal(whole[j].astype(np.float32), rows))
        return rows + changed[side, kind][j].astype(np.float32)

    res = inspect_maths.damage(a, ["q4_0", "q8_0"], ["q8_0"], stored)
    exact, logits = _slow(a, a.k.astype(float), a.v.astype(float))
    for tk, tv in itertools.product(("f16", "q4_0", "q8_0"), ("f16", "q8_0")):
        zero_k, zero_v = np.zeros(a.k.shape), np.zeros(a.v.shape)
        k = a.k.astype(float) + changed.get(("k", tk), zero_k).astype(np.float32)
        v = a.v.astype(float) + changed.get(("v", tv), zero_v).astype(np.float32)
        out, other = _slow(a, k, v)
        error, norm = np.square(out - exact).sum(axis=(1, 2)), np.square(exact).sum(axis=(1, 2))
        got = res.output[tk, tv]
        # rows are rounded to f32 once more than in the slow form: relative 2^-24 of values, against errors of 1 %
        assert got.each == pytest.approx(list(error / norm), rel=1e-4, abs=1e-12)
        assert got.whole == pytest.approx(error.sum() / norm.sum(), rel=1e-4, abs=1e-12)
        total, count = 0.0, 0
        for h, i in itertools.product(range(6), range(5)):
            d = [other[c] - logits[c] for c in logits if c[:2] == (h, i)]
            total += sum((x - sum(d) / len(d)) ** 2 for x in d)
            count += len(d)
        assert res.logits[tk].whole == pytest.approx(total / count, rel=1e-4, abs=1e-12)
    assert res.output["f16", "f16"].whole == 0 and res.output["q4_0", "f16"].whole > 1e-4
    assert res.check["relative_rms"] < 1e-6 and 0 < res.check["max"] <= res.check["bound"]
    first = [h for h in range(6) if not math.isnan(res.first[h])]
    assert first == list(range(6))  # of the query at 40, which alone sees the first token and more than 15 others
    w = a.weights(0, a.logits(0, a.k[0]))
    assert res.first[0] == pytest.approx(w[2, 0])
    assert bool(res.sink) == (a.sinks is not None) and all(0 < s < 1 for s in res.sink)


def test_a_constant_shift_of_the_logits_is_no_error() -> None:
    rng = np.random.default_rng(7)
    logits = rng.standard_normal((4, 30))
    attended = rng.random((4, 30)) < 0.7
    shifted = logits + np.array([[5.0], [-3.0], [0.0], [100.0]])
    total, n = inspect_maths.logit_error(logits, shifted, attended)
    assert total < 1e-20 and n == attended.sum()
    shifted[0, np.flatnonzero(attended[0])[0]] += 1.0
    m = attended[0].sum()
    assert inspect_maths.logit_error(logits, shifted, attended)[0] == pytest.approx(1 - 1 / m)


class _Graph:
    """ggml's own attention on a CPU, through its C functions."""

    def __init__(self) -> None:
        from kvsplit import native

        lib = native.load()
        self.ggml = ins._Ggml(lib.lib)
        path = lib.path.with_name(lib.path.name.replace("llama", "ggml-cpu"))
        if not path.is_file():
            pytest.skip("this build has no libggml-cpu of its own to call")
        self.cpu = ctypes.CDLL(str(path))
        self.cpu.ggml_graph_compute_with_ctx.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int]
        lib = self.ggml.lib
        lib.ggml_new_graph.restype, lib.ggml_new_graph.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
        lib.ggml_build_forward_expand.argtypes = [ctypes.c_void_p, ctypes.c_void_p]

    def attention(self, a: Attention) -> Any:
        lib = self.ggml.lib
        ctx = lib.ggml_init(ins._InitParams(64 << 20, None, False))
        try:

            def tensor(x: Any) -> int:
                kind = {np.dtype(np.float32): 0, np.dtype(np.float16): 1}[x.dtype]
                shape = (1,) * (3 - x.ndim) + x.shape
                t = lib.ggml_new_tensor_3d(ctx, kind, *reversed(shape))
                ctypes.memmove(self.ggml.at(t).data, np.ascontiguousarray(x).ctypes.data, x.nbytes)
                return int(t)

            node = lib.ggml_flash_attn_ext(
                ctx, tensor(a.q), tensor(a.k), tensor(a.v), tensor(a.mask), a.scale, a.max_bias, a.softcap
            )
            if a.sinks is not None:
                sinks = lib.ggml_new_tensor_1d(ctx, 0, len(a.sinks))
                ctypes.memmove(self.ggml.at(sinks).data, a.sinks.ctypes.data, a.sinks.nbytes)
                lib.ggml_flash_attn_ext_add_sinks(node, sinks)
            graph = lib.ggml_new_graph(ctx)
            lib.ggml_build_forward_expand(graph, node)
            assert self.cpu.ggml_graph_compute_with_ctx(ctx, graph, 1) == 0
            t = self.ggml.at(node)
            data = np.ctypeslib.as_array((ctypes.c_float * int(np.prod(list(t.ne)))).from_address(t.data))
            return data.reshape(int(t.ne[2]), int(t.ne[1]), int(t.ne[0])).transpose(1, 0, 2).copy()
        finally:
            lib.ggml_free(ctx)


@pytest.mark.native
@pytest.mark.parametrize("name", VARIANTS)
def test_attention_is_that_of_ggml(name: str) -> None:
    small = _attention(8, **VARIANTS[name])
    rng = np.random.default_rng(9)
    n = 96
    at = np.arange(n)[None] - np.arange(n)[:, None]
    mask = np.where(at <= 0, at if small.max_bias else 0, -np.inf).astype(np.float16)
    q = (2 * rng.standard_normal((6, n, 32))).astype(np.float32)
    a = Attention(0, q, small.k, small.v, mask, np.arange(n), np.zeros((6, n, 48), np.float32), small.scale,
                  small.max_bias, small.softcap, small.sinks, short=n)  # fmt: skip
    a.output = _Graph().attention(a)
    check = inspect_maths.damage(a, [], [], lambda *_: None).check
    assert check["max"] <= check["bound"]
    # roundings add up by chance, not all one way: sqrt(32) of 2^-24 on logits of up to 10, and exp in f32
    assert check["relative_rms"] < 1e-5


# ---- maps


def test_maps_are_means_over_attended_cells() -> None:
    rng = np.random.default_rng(10)
    n = 50
    attended = np.tril(np.ones((n, n), bool)) & ~np.tril(np.ones((n, n), bool), -30)
    w = np.where(attended, rng.random((n, n)), 0.0)
    m = inspect_maths.MapSum(n, 7)
    for start in range(0, n, 16):  # batches that see no more cells than there are
        rows = np.arange(start, min(n, start + 16))
        m.add(rows, w[rows, : rows[-1] + 1], attended[rows, : rows[-1] + 1])
    for i, j in itertools.product(range(7), range(7)):
        r, c = slice(m.edges[i], m.edges[i + 1]), slice(m.edges[j], m.edges[j + 1])
        if attended[r, c].any():
            assert m.mean[i, j] == pytest.approx(w[r, c][attended[r, c]].mean())
        else:
            assert math.isnan(m.mean[i, j])
    assert inspect_maths.MapSum(3, 256).mean.shape == (3, 3)


# ---- queries


@pytest.mark.parametrize(("n", "queries"), [(1, 64), (64, 64), (65, 64), (1000, 64), (8192, 1), (500, 499), (40, 2)])
def test_sampled_positions_are_spread_and_end_with_the_last(n: int, queries: int) -> None:
    p = inspect_maths.sample_positions(n, queries)
    assert len(p) == len(set(p.tolist())) == min(n, queries) and p.tolist() == sorted(p.tolist())
    assert p[-1] == n - 1 and p[0] >= 0
    if queries >= 16 and n > queries:
        assert p[0] == 0 and np.diff(p).max() <= math.ceil(n / (queries - queries // 8)) + 1


# ---- protection


def test_specs_of_types_are_canonical_and_come_back() -> None:
    rng = random.Random(1)
    assert inspect_maths.spec_text(["kvq4"] * 5) == "kvq4"
    assert inspect_maths.spec_text(["q8_0", *["kvq4"] * 16, "q8_0", "q8_0", "kvq4"]) == "kvq4,0=q8_0,17:19=q8_0"
    assert inspect_maths.spec_text(["f16", "f16", "kvq4", "kvq4", "kvq4", "q8_0", "q8_0"]) == "kvq4,:2=f16,5:=q8_0"
    assert inspect_maths.spec_text(["q8_0", "q8_0"], "kvq4") == "q8_0"
    for _ in range(300):
        types = [rng.choice(("kvq4", "q8_0", "f16")) for _ in range(rng.randint(1, 40))]
        text = inspect_maths.spec_text(types, rng.choice((None, "kvq4", "kvq3")))
        spec = Spec.parse(text)
        assert spec.types(len(types)) == types and spec.text() == text


def _size(layer: int, side: int, name: str) -> int:
    return BY_NAME[name].row_bytes(64) * (3 if layer == 0 else 1)


def test_protection_takes_the_layers_that_lose_most() -> None:
    harm = {"kvq4": 1.0, "q8_0": 0.01, "f16": 0.0}
    weight = [(1.0, 0.1), (5.0, 0.1), (0.2, 9.0), (0.1, 0.1)]

    def error(layer: int, tk: str, tv: str) -> float:
        return weight[layer][0] * harm[tk] + weight[layer][1] * harm[tv]

    pairs = [("kvq4", "kvq4")] * 4
    step = BY_NAME["q8_0"].row_bytes(64) - BY_NAME["kvq4"].row_bytes(64)
    assert inspect_maths.protect(pairs, error, _size, step - 1) == pairs
    assert inspect_maths.protect(pairs, error, _size, step)[2] == ("kvq4", "q8_0")
    two = inspect_maths.protect(pairs, error, _size, 2 * step)
    assert two == [("kvq4", "kvq4"), ("q8_0", "kvq4"), ("kvq4", "q8_0"), ("kvq4", "kvq4")]
    # layer 0 would lose more than layer 2's keys, and costs three times as much
    six = inspect_maths.protect(pairs, error, _size, 6 * step)
    assert six[0] == ("q8_0", "kvq4")
    for budget in range(0, 12 * step, step):
        after = inspect_maths.protect(pairs, error, _size, budget)
        added = sum(_size(i, s, t[s]) - _size(i, s, "kvq4") for i, t in enumerate(after) for s in (0, 1))
        assert added <= budget
    assert inspect_maths.protect([("q8_0", "f16")], lambda *_: 0.0, _size, 10**9) == [("q8_0", "f16")]
    wide = inspect_maths.protect([("q8_0", "f16")], lambda i, k, v: harm[k], _size, 10**9)
    assert wide == [("f16", "f16")]


def test_protection_is_as_good_as_any_when_all_steps_cost_the_same() -> None:
    rng = random.Random(2)
    step = BY_NAME["q8_0"].row_bytes(64) - BY_NAME["kvq4"].row_bytes(64)
    for _ in range(20):
        loss = [(rng.random(), rng.random()) for _ in range(4)]

        def error(i: int, tk: str, tv: str, loss: Sequence[Tuple[float, float]] = loss) -> float:
            return loss[i][0] * (tk == "kvq4") + loss[i][1] * (tv == "kvq4")

        after = inspect_maths.protect([("kvq4", "kvq4")] * 4, error, lambda i, s, t: BY_NAME[t].row_bytes(64), 3 * step)
        kept = sorted((x for pair in loss for x in pair), reverse=True)[3:]
        assert sum(error(i, *t) for i, t in enumerate(after)) == pytest.approx(sum(kept))


def test_numbers_of_layers_are_named_as_ranges() -> None:
    assert ins._names([3]) == "layer 3"
    assert ins._names([0, 1, 2, 7]) == "layers 0-2 and 7"
    assert ins._names([0, 2, 3, 5, 9, 10]) == "layers 0, 2-3, 5 and 9-10"


def test_batches_are_even() -> None:
    for n in (2, 511, 512, 513, 1025, 8192, 8193):
        parts = ins._cut(n)
        sizes = [b - a for a, b in parts]
        assert parts[0][0] == 0 and parts[-1][1] == n and all(a[1] == b[0] for a, b in zip(parts, parts[1:]))
        assert max(sizes) <= ins.BATCH and max(sizes) - min(sizes) <= 1


# ---- the library, and what is refused


@pytest.mark.native
@pytest.mark.parametrize("fault", ["params", "span"])
def test_a_library_of_another_layout_is_refused(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvsplit import native

    lib = native.load().lib
    ins._Ggml(lib)
    wrong: Dict[str, Any] = {"params": lambda t: (0.125, 30.0, 0.0), "span": lambda t: 7}
    monkeypatch.setattr(ins._Ggml, fault, staticmethod(wrong[fault]))
    with pytest.raises(NativeMismatchError, match="lays out tensors in another way"):
        ins._Ggml(lib)


@pytest.mark.native
def test_a_mirror_with_a_field_too_many_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvsplit import native

    class Other(ctypes.Structure):
        _fields_ = [*ins._Tensor._fields_[:6], ("new", ctypes.c_int64), *ins._Tensor._fields_[6:]]

    monkeypatch.setattr(ins, "_Tensor", Other)
    with pytest.raises(NativeMismatchError):
        ins._Ggml(native.load().lib)


def _refused(capsys: pytest.CaptureFixture[str], *args: Any) -> Tuple[int, str]:
    code = cli.main(["inspect", *map(str, args)])
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1, captured.err
    return code, captured.err


@pytest.mark.native
def test_wrong_usage_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, synth_model: Callable[..., Path]
) -> None:
    model, out = synth_model(), tmp_path / "out"
    for args, words in (
        (("--prompt", "a", "--text", "b"), "--text: the prompt was given twice"),
        (("--prompt", ""), "--prompt: it is empty"),
        (("--prompt", "\udcff"), "--prompt: it is not UTF-8 text"),
        (("--text", tmp_path / "none"), "--text: "),
        (("--budget", "inf"), "--budget: inf"),
        (("--budget", "-1"), "'--budget'"),
        (("--config", "K9V4"), "'9' is no cache type"),
        (("--config", ","), "--config: names no configuration"),
    ):
        code, err = _refused(capsys, model, *args, "--out", out)
        assert code == 2 and words in err, err
    assert not out.exists()
    for options in (ins.Options(configs=()), ins.Options(queries=0), ins.Options(n_ctx=1), ins.Options(budget=-1)):
        with pytest.raises(UsageError):
            ins.run(model, options)


@pytest.mark.native
def test_models_that_cannot_be_seen_are_refused_with_the_reason(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, synth_model: Callable[..., Path]
) -> None:
    code, err = _refused(capsys, synth_model(), "--out", tmp_path)
    assert code == 1 and "carries no tokenizer" in err
    code, err = _refused(capsys, tmp_path / "none.gguf", "--out", tmp_path)
    assert code in (1, 2) and "none.gguf" in err
    blocked = tmp_path / "file"
    blocked.write_text("mine", encoding="utf-8")
    code, err = _refused(capsys, synth_model(), "--out", blocked / "folder")
    assert code == 1 and "--out" in err and blocked.read_text(encoding="utf-8") == "mine"


def test_slices_select_as_a_spec_does() -> None:
    assert ins._slice(None, "--layers", 8, "the layers") is None
    assert ins._slice("0,-2:,::4", "--layers", 8, "the layers") == [0, 6, 7, 4]
    for text in ("8", "x", "3:2", ""):
        with pytest.raises(UsageError, match="^--heads"):
            ins._slice(text, "--heads", 8, "the query heads")


def test_callbacks_keep_errors_and_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception in a callback would be printed and lost; here it is kept, and nothing more is looked at."""

    class Model:
        ggml = None

    capture = ins._Capture(Model(), np.arange(3), 3, None, lambda a: None)  # type: ignore[arg-type]
    seen: List[bool] = []

    def call(pointer: int, ask: bool) -> bool:
        seen.append(ask)
        raise KeyboardInterrupt

    monkeypatch.setattr(capture, "_call", call)
    assert capture(1, True) is False and isinstance(capture.error, KeyboardInterrupt)
    assert capture(2, True) is False and capture(2, False) is True and seen == [True]


def test_json_says_what_is_not_known() -> None:
    damage = inspect_maths.damage(_attention(11), [], [], lambda *_: None)
    damage.first[0] = float("nan")
    spread = inspect_maths.spread(np.ones((3, 2)))
    layer = ins.Layer(0, 0, False, 6, 2, 32, 48, 0, 0, damage, [spread], [spread], [], [], [0.5], [1.0])
    data = json.loads(json.dumps(layer.to_json(), allow_nan=False))
    assert data["first_token_attention"][0] is None and data["key_bias"] is None and data["output_nse"] == {}


# ---- made models


@pytest.fixture(scope="module")
def byte_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF with nothing but a tokenizer that takes text byte by byte."""
    path = tmp_path_factory.mktemp("tokenizer") / "bytes.gguf"
    w = gguf.GGUFWriter(path, "llama")
    w.add_tokenizer_model("llama")
    w.add_token_list([b"<unk>", b"<s>", b"</s>", *(f"<0x{i:02X}>".encode() for i in range(256))])
    w.add_token_scores([0.0] * 259)
    kinds = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL]
    w.add_token_types([*kinds, *[gguf.TokenType.BYTE] * 256])
    w.add_bos_token_id(1)
    w.add_eos_token_id(2)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path


def _configs(*texts: str) -> Tuple[KVQuant, ...]:
    return tuple(KVQuant.from_text(t) for t in texts)


def _kinds(res: ins.Inspection) -> Dict[str, List[int]]:
    return {c.kind: c.layers for c in res.cautions}


def _planted(source: Path, out: Path, tensors: Dict[str, np.ndarray]) -> Path:
    """A copy of a GGUF with further tensors."""
    reader = gguf.GGUFReader(source)
    arch = reader.fields["general.architecture"].contents()
    w = gguf.GGUFWriter(out, arch)
    for key, f in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        if f.types[0] == gguf.GGUFValueType.ARRAY:
            w.add_array(key, f.contents())
        else:
            w.add_key_value(key, f.contents(), f.types[0])
    for t in reader.tensors:
        w.add_tensor(t.name, t.data, raw_dtype=t.tensor_type)
    for name, data in tensors.items():
        w.add_tensor(name, data)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return out


def _exact(res: ins.Inspection) -> None:
    """The model's own attention is the one computed here, in every layer."""
    for x in res.layers:
        check = x.damage.check
        assert 0 < check["max"] <= check["bound"], (x.layer, check)
        # roundings of f32 that add up by chance: sqrt(head size) of 2^-24 on logits of some tens, 1e-5 at most
        assert check["relative_rms"] < 2e-5, (x.layer, check)


PROMPT = "One two three four five six seven eight nine ten. " * 40


@pytest.mark.native
def test_a_planted_key_bias_is_named_and_protected(
    tmp_path: Path, byte_tokenizer: Path, synth_model: Callable[..., Path]
) -> None:
    plain = synth_model(tokenizer=byte_tokenizer, n_layer=4)
    bias = np.zeros(128, np.float32)
    bias[[17, 100]] = 60.0, -45.0
    model = _planted(plain, tmp_path / "biased.gguf", {"blk.2.attn_k.bias": bias})
    options = ins.Options(_configs("kvq4/f16"), prompt=PROMPT, n_ctx=256, queries=16, out=tmp_path / "out")
    before, after = ins.run(plain, options), ins.run(model, options)
    _exact(before)
    _exact(after)
    assert "key_bias" not in _kinds(before) and _kinds(after)["key_bias"] == [2]
    x = after.layers[2]
    assert x.key_bias == 60.0 and (x.key_bias_rms or 0) > 8 and all(y.key_bias is None for y in after.layers[:2])
    assert {c for s in x.keys for c in s.outlier_channels}
    assert after.damaged_by_keys("kvq4")[0] == 2 and 2 in after.advice[0].layers_k
    (text,) = (c.text for c in after.cautions if c.kind == "key_bias")
    assert "60" in text and "layer 2" in text and "kvq4,2=q8_0" in text


@pytest.mark.native
def test_sinks_windows_and_heads_of_two_sizes(
    tmp_path: Path, byte_tokenizer: Path, synth_model: Callable[..., Path]
) -> None:
    plain = synth_model(
        tokenizer=byte_tokenizer, arch="mimo2", n_layer=4, n_head=4, n_head_kv=(2, 4, 1, 2), head_k=96, head_v=64,
        window=100,
    )  # fmt: skip
    sinks = {"blk.1.attn_sinks.weight": np.array([3.0, -1.0, 0.5, 6.0], np.float32)}
    model = _planted(plain, tmp_path / "sinks.gguf", sinks)
    options = ins.Options(
        _configs("K8V4", "q5_1,2:=f16/q4_0"), prompt=PROMPT, n_ctx=700, queries=32, out=tmp_path / "out"
    )
    res = ins.run(model, options)
    _exact(res)
    kinds = _kinds(res)
    assert kinds["sinks"] == [1] and len(res.layers[1].damage.sink) == 4 and not res.layers[0].damage.sink
    assert res.layers[1].damage.sink[3] > res.layers[1].damage.sink[1]
    assert kinds["window"] == [1, 3] and [x.swa for x in res.layers] == [True, False, True, False]
    assert [x.n_head_kv for x in res.layers] == [2, 4, 1, 2] and res.layers[0].head_v == 64
    rotation = [c for c in res.cautions if c.kind == "rotation"]
    assert len(rotation) == 1 and "keys of layers 0-3 are stored without rotation (head size 96" in rotation[0].text
    assert [x.rot_k for x in res.layers] == [0] * 4 and [x.rot_v for x in res.layers] == [64] * 4
    # an exact side makes no error of its own
    row = next(r for r in res.rows if r.layer == 3 and r.kvq_key.startswith("q5_1"))
    assert row.type_k == "f16" and row.k_nse == 0 and row.logit_rmse == 0 and (row.output_nse or 0) > 0


@pytest.mark.native
def test_maps_of_a_prompt_in_batches_are_those_of_the_whole(
    tmp_path: Path, byte_tokenizer: Path, synth_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, n = synth_model(tokenizer=byte_tokenizer, n_layer=2), 700
    drawn: List[ins._Map] = []
    monkeypatch.setattr(ins, "_write", lambda res, out, maps: drawn.extend(maps))
    options = ins.Options(_configs("K3V8"), prompt=PROMPT, n_ctx=n, queries=4, out=tmp_path, layers="1", heads="3")
    res = ins.run(model, options)
    whole: List[Attention] = []
    with ins._Model(model, 1) as m:
        capture = ins._Capture(m, np.arange(n), n, {1}, whole.append)
        with m.context(KVQuant(), n, capture, full=True) as ctx:
            capture.run(ctx, m.tokens(PROMPT)[:n])
    (a,), (got,) = whole, drawn
    assert (got.layer, got.head, got.type_k, res.layers[1].rot_k) == (1, 3, "kvq3", 64)
    k = a.k[3 // a.group].astype(np.float32)
    for into, keys in ((got.exact, k), (got.stored, inspect_maths.store(inspect_maths.Library(), "kvq3", k, 64))):
        expected = inspect_maths.MapSum(n, ins.MAP_BLOCKS)
        expected.add(a.positions, a.weights(3, a.logits(3, keys)), a.attended)
        assert np.allclose(into.mean, expected.mean, equal_nan=True, rtol=1e-9, atol=1e-15)
        # weights of a query sum to 1
        assert into.total.sum() == pytest.approx(n)
    assert not np.allclose(got.exact.mean, got.stored.mean, equal_nan=True, rtol=1e-3)


@pytest.mark.native
def test_a_short_prompt_and_an_exact_configuration(
    tmp_path: Path, byte_tokenizer: Path, synth_model: Callable[..., Path]
) -> None:
    res = ins.run(
        synth_model(tokenizer=byte_tokenizer), ins.Options(_configs("F16", "K8V8"), prompt="Hello", out=tmp_path)
    )
    assert res.n_tokens < 10 and res.output_nse(KVQuant()) == [0.0, 0.0]
    assert all(x.damage.check["max"] <= x.damage.check["bound"] for x in res.layers)
    assert all(x.first is None for x in res.layers)


def _peak(model: Path, n_ctx: int, out: Path, **more: Any) -> int:
    options = ins.Options(_configs("K8V4"), prompt=PROMPT * 6, n_ctx=n_ctx, queries=16, out=out, **more)
    tracemalloc.start()
    try:
        ins.run(model, options)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.native
def test_memory_follows_the_prompt_and_not_the_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, byte_tokenizer: Path, synth_model: Callable[..., Path]
) -> None:
    monkeypatch.setattr(ins, "_write", lambda *a: None)  # figures take what they take
    shape: Dict[str, Any] = {"tokenizer": byte_tokenizer, "n_embd": 64, "n_head": 4, "n_head_kv": 2, "head_k": 64}
    few, many = synth_model(n_layer=2, **shape), synth_model(n_layer=10, **shape)
    _peak(few, 512, tmp_path)  # imports, tables
    short, deep = _peak(few, 512, tmp_path), _peak(many, 512, tmp_path)
    # queries and outputs of 16 positions, 4 heads, 64 + 64 values in f32, and what is kept of a layer: lists of numbers
    assert deep - short < 8 * (16 * 4 * 128 * 4 + 100_000)
    at = [_peak(few, n, tmp_path) for n in (1024, 2048)]
    assert at[0] - short > 100_000, "what grows with the prompt must be seen"
    # twice the cells, at most twice the growth, and the list of tokens; a square would give four times
    assert at[1] - at[0] < 2.6 * (at[0] - short)
    maps = [_peak(few, n, tmp_path, maps=True) for n in (1024, 2048)]
    # batches of 512 against all cells
    assert maps[1] - maps[0] < 12 * 512 * 1024 * 8


@pytest.mark.native
def test_command_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, byte_tokenizer: Path, synth_model: Callable[..., Path]
) -> None:
    model = synth_model(tokenizer=byte_tokenizer, n_layer=3)
    common = ["inspect", str(model), "--prompt", PROMPT, "--ctx", "128", "--queries", "8", "--out", str(tmp_path)]
    args = [*common, "--config", "K4V8,K8V4", "--budget", "20"]
    assert cli.main([*args, "--heads", "1", "--layers", "0,2"]) == 0
    captured = capsys.readouterr()
    told = captured.out.splitlines()
    assert "3 layers, 8 queries" in told[0] and any(s.strip().startswith("mean") for s in told)
    assert "protect with --kvq-key kvq4," in captured.out
    files = sorted(f.name for f in tmp_path.iterdir())
    assert sum("map-layer" in f for f in files) == 4 and any("map-layer2-head1.png" in f for f in files)
    assert all(f"{tmp_path / f}" in captured.err for f in files)
    before = {f: f.read_bytes() for f in tmp_path.iterdir()}
    assert cli.main([*args, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["seq_len"] == 128 and [c["config"] for c in data["configs"]] == ["K4V8", "K8V4"]
    assert all(f.read_bytes() == b for f, b in before.items())  # nothing is overwritten
    assert cli.main([*args, "--layers", "3"]) == 2
    assert "--layers" in capsys.readouterr().err
    assert cli.main([*common, "--config", "f16/kvq4", "--maps"]) == 2
    assert "no configuration quantizes keys" in capsys.readouterr().err
