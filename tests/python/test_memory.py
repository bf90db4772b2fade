# SPDX-License-Identifier: MIT
"""The memory calculator against arithmetic, against upstream's rules, and against the allocator."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable, Dict, List

import pytest
import synth
from hypothesis import given
from hypothesis import strategies as st

from kvsplit import KVQuant, ModelShape, kv_memory
from kvsplit.cache_types import BY_NAME, CACHE_TYPES
from kvsplit.errors import HeadSizeError, KVQuantError, MLAError, ModelFileError, UnsupportedModelError, UsageError

Make = Callable[..., Path]


@pytest.mark.parametrize(
    ("preset", "mib"), [("k16v16", 176.00), ("k8v8", 93.50), ("k8v4", 71.50), ("k4v8", 71.50), ("k4v4", 49.50)]
)
def test_the_published_table(preset: str, mib: float) -> None:
    m = kv_memory(ModelShape.uniform(22, 4, 64), preset, 8192)
    assert m.total_bytes == mib * 2**20
    assert m.saving == 1 - mib / 176


_names = st.sampled_from([t.name for t in CACHE_TYPES])


@given(
    n_layer=st.integers(1, 128),
    n_head_kv=st.integers(1, 17),
    head_k=st.integers(1, 8).map(lambda n: 32 * n),
    head_v=st.integers(1, 8).map(lambda n: 32 * n),
    k=_names,
    v=_names,
    n_ctx=st.integers(1, 200_000),
    n_seq=st.integers(1, 64),
    unified=st.booleans(),
)
def test_uniform_models_are_a_product(
    n_layer: int, n_head_kv: int, head_k: int, head_v: int, k: str, v: str, n_ctx: int, n_seq: int, unified: bool
) -> None:
    shape = ModelShape.uniform(n_layer, n_head_kv, head_k, head_v)
    m = kv_memory(shape, KVQuant(k, v), n_ctx, n_seq_max=n_seq, unified=unified)
    cells = m.n_ctx
    assert cells >= n_ctx - n_seq and cells % 256 == 0
    tk, tv = BY_NAME[k], BY_NAME[v]
    assert m.bytes_k == n_layer * cells * n_head_kv * head_k * tk.bytes // tk.block
    assert m.bytes_v == n_layer * cells * n_head_kv * head_v * tv.bytes // tv.block
    assert m.bytes_f16 == n_layer * cells * n_head_kv * (head_k + head_v) * 2


@pytest.mark.parametrize(
    ("n_ctx", "n_seq", "unified", "padded", "per_seq"),
    [
        (1, 1, False, 256, 256),
        (1000, 1, False, 1024, 1024),
        (4096, 3, False, 4608, 1536),  # 1365 a sequence, padded
        (4096, 3, True, 4096, 4096),
        (4096, 8, False, 4096, 512),
        (256, 8, False, 2048, 256),  # 32 a sequence, padded
    ],
)
def test_padding(n_ctx: int, n_seq: int, unified: bool, padded: int, per_seq: int) -> None:
    m = kv_memory(ModelShape.uniform(1, 1, 32), None, n_ctx, n_seq_max=n_seq, unified=unified)
    assert (m.n_ctx, m.n_ctx_seq) == (padded, per_seq)


def _meta(tmp_path: Path, arch: str, **metadata: Any) -> ModelShape:
    base: Dict[str, Any] = {
        "block_count": 12,
        "embedding_length": 1024,
        "attention.head_count": 8,
        "attention.head_count_kv": 2,
        "context_length": 32768,
    }
    base.update({k.replace("__", "."): v for k, v in metadata.items()})
    return ModelShape.from_gguf(synth.write_metadata(tmp_path / f"{arch}.gguf", arch, base))


def _sliding(shape: ModelShape) -> List[int]:
    return [layer.il for layer in shape.layers if layer.swa]


def test_head_sizes_are_derived_only_when_not_given(tmp_path: Path) -> None:
    assert _meta(tmp_path, "llama").layers[0].head_k == 128
    s = _meta(tmp_path, "qwen3", attention__key_length=96, attention__value_length=64)
    assert (s.layers[0].head_k, s.layers[0].head_v, s.layers[0].n_head_kv) == (96, 64, 2)


@pytest.mark.parametrize(
    ("arch", "metadata", "window", "sliding"),
    [
        # which layers slide, worked out by hand from each architecture's loader
        ("gemma3", {"attention.sliding_window": 512}, 512, [0, 1, 2, 3, 4, 6, 7, 8, 9, 10]),
        ("gemma3", {}, 0, []),
        ("gemma3", {"attention.sliding_window": 512, "attention.sliding_window_pattern": 4}, 512,
         [0, 1, 2, 4, 5, 6, 8, 9, 10]),
        ("gemma2", {}, 4096, [0, 2, 4, 6, 8, 10]),
        ("cohere2", {"attention.sliding_window": 4096}, 4096, [0, 1, 2, 4, 5, 6, 8, 9, 10]),
        ("cohere2moe", {"attention.sliding_window": 4096}, 4096, [1, 2, 3, 5, 6, 7, 9, 10, 11]),
        ("gpt-oss", {"attention.sliding_window": 128}, 128, [0, 2, 4, 6, 8, 10]),
        ("llama4", {}, 8192, [0, 1, 2, 4, 5, 6, 8, 9, 10]),
        ("llama4", {"attention.sliding_window": 0}, 0, []),
        ("smallthinker", {"attention.sliding_window": 77}, 4096, [1, 2, 3, 5, 6, 7, 9, 10, 11]),
        ("phi3", {"attention.sliding_window": 2047}, 0, []),
        ("exaone4", {}, 0, []),
        ("mimo2", {"attention.sliding_window": 128, "attention.sliding_window_pattern": [True, False] * 6}, 128,
         [0, 2, 4, 6, 8, 10]),
    ],
)  # fmt: skip
def test_which_layers_slide(
    tmp_path: Path, arch: str, metadata: Dict[str, Any], window: int, sliding: List[int]
) -> None:
    s = _meta(tmp_path, arch, **metadata)
    assert (s.n_swa if sliding else 0, _sliding(s)) == (window, sliding)


def test_exaone4_slides_with_64_layers(tmp_path: Path) -> None:
    s = _meta(tmp_path, "exaone4", block_count=64)
    assert s.n_swa == 4096 and len(_sliding(s)) == 48


def test_cells_of_sliding_layers(tmp_path: Path) -> None:
    s = _meta(tmp_path, "gemma3", **{"attention.sliding_window": 512})

    def cells(**kw: Any) -> List[int]:
        return sorted({layer.n_cells for layer in kv_memory(s, None, 8192, **kw).layers if layer.swa})

    assert cells() == [1024]  # 512 + one physical batch of 512
    assert cells(n_ubatch=100) == [768]  # 612, padded
    assert cells(n_seq_max=4) == [4096]  # the same for each of four sequences of 2048
    assert cells(n_seq_max=4, unified=True) == [2560]  # 4 windows + one batch, shared
    assert cells(swa_full=True) == [8192]
    # without room for a window and a batch, the context itself
    assert [x.n_cells for x in kv_memory(s, None, 300).layers if x.swa][:1] == [512]


def test_shared_layers_have_no_cache(tmp_path: Path) -> None:
    s = _meta(tmp_path, "gemma3n", block_count=30, **{"attention.sliding_window": 512})
    assert [layer.il for layer in s.layers] == list(range(20))
    pattern = [True, True, False] * 4
    s = _meta(
        tmp_path,
        "gemma4",
        **{
            "attention.sliding_window": 512,
            "attention.sliding_window_pattern": pattern,
            "attention.shared_kv_layers": 4,
            "attention.key_length_swa": 64,
            "attention.value_length_swa": 64,
        },
    )
    assert [layer.il for layer in s.layers] == list(range(8))
    assert [layer.head_k for layer in s.layers][:3] == [64, 64, 128]


def test_hybrid_models_count_attention_layers_only(tmp_path: Path) -> None:
    s = _meta(tmp_path, "jamba", **{"attention.head_count_kv": [0, 0, 2, 0] * 3})
    assert [(layer.il, layer.index) for layer in s.layers] == [(2, 0), (6, 1), (10, 2)]
    s = _meta(tmp_path, "qwen3next")
    assert [layer.il for layer in s.layers] == [3, 7, 11]
    s = _meta(tmp_path, "qwen35", full_attention_interval=6, nextn_predict_layers=1)
    assert [layer.il for layer in s.layers] == [5]
    s = _meta(tmp_path, "nemotron_h", **{
        "attention.head_count_kv": [0, 2, 0] * 4, "feed_forward_length": [0, 0, 512] * 4,
    })  # fmt: skip
    assert [layer.il for layer in s.layers] == [1, 4, 7, 10]
    assert len(_meta(tmp_path, "falcon-h1").layers) == 12


def test_prediction_layers_are_not_in_the_trunk(tmp_path: Path) -> None:
    assert len(_meta(tmp_path, "glm4moe", nextn_predict_layers=1).layers) == 11


def test_kv_heads_by_layer(tmp_path: Path) -> None:
    heads = [1, 2, 3, 4] * 3
    s = _meta(tmp_path, "openelm", **{"attention.head_count_kv": heads})
    assert [layer.n_head_kv for layer in s.layers] == heads
    # without flash attention every row of values is as wide as the widest
    m = kv_memory(s, None, 256, flash_attn=False)
    assert m.bytes_v == 12 * 256 * 4 * 128 * 2 and m.bytes_k == 256 * sum(heads) * 128 * 2


def test_mla_stores_keys_only(tmp_path: Path) -> None:
    s = _meta(tmp_path, "deepseek2", **{
        "attention.head_count_kv": 1, "attention.key_length": 576, "attention.value_length": 512,
        "attention.key_length_mla": 192, "attention.value_length_mla": 128,
    })  # fmt: skip
    m = kv_memory(s, "k8v8", 1024)
    assert s.mla and m.bytes_v == 0 and m.bytes_k == 12 * 1024 * 576 // 32 * 34
    with pytest.raises(MLAError, match="same type"):
        kv_memory(s, "k8v4", 1024)


def test_policy_in_the_file_counts_unless_another_is_given(tmp_path: Path) -> None:
    path = synth.write_model(tmp_path / "m.gguf", synth.Shape(extra=(("kvq.key", "8"), ("kvq.val", "4,0=8"))))
    m = kv_memory(path, None, 256)
    assert [(x.type_k, x.type_v) for x in m.layers] == [("q8_0", "q8_0"), ("q8_0", "kvq4")]
    assert kv_memory(path, "16", 256).saving == 0


def test_per_layer_policy(tmp_path: Path) -> None:
    m = kv_memory(ModelShape.uniform(4, 2, 64), KVQuant.parse(key="4,:2=8", val="16,-1=q4_1"), 256)
    row = 256 * 2 * 64
    assert [x.bytes_k for x in m.layers] == [row // 32 * 34] * 2 + [row // 32 * 18] * 2
    assert [x.bytes_v for x in m.layers] == [row * 2] * 3 + [row // 32 * 20]
    assert m.bits_per_value == 8 * m.total_bytes / (8 * row)
    with pytest.raises(KVQuantError, match="kvq_key: slice '4'"):
        kv_memory(ModelShape.uniform(4, 2, 64), KVQuant.parse(key="8,4=4"), 256)


@pytest.mark.parametrize("head", [40, 80, 100])
def test_head_size_that_blocks_do_not_divide(head: int) -> None:
    # the row of all heads may divide where the head doesn't: 4 heads of 80 are 10 blocks
    with pytest.raises(HeadSizeError, match=rf"K type q8_0 .* head size {head}"):
        kv_memory(ModelShape.uniform(2, 4, head), "8", 256)
    with pytest.raises(HeadSizeError, match="V type kvq4"):
        kv_memory(ModelShape.uniform(2, 4, head), KVQuant("bf16", "kvq4"), 256)


@pytest.mark.parametrize("kw", [{"n_seq_max": 0}, {"n_ctx": -1}, {"n_batch": 0}, {"n_seq_max": 1000}])
def test_numbers_out_of_range(kw: Dict[str, int]) -> None:
    args = {"n_ctx": 256, **kw}
    with pytest.raises(UsageError, match=next(iter(kw))):
        kv_memory(ModelShape.uniform(2, 4, 64), "8", **args)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arch", "reason"),
    [
        ("bert", "keeps none"),
        ("mamba", "recurrent"),
        ("deepseek4", "rules of its own"),
        ("no-such", "rules of its own"),
    ],
)
def test_what_is_not_known_is_refused(tmp_path: Path, arch: str, reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        _meta(tmp_path, arch)


def test_files_that_are_no_models(tmp_path: Path, synth_model: Make) -> None:
    good = synth_model().read_bytes()
    for name, data, match in [
        ("empty", b"", "is empty"),
        ("text", b"hello, world", "not a GGUF"),
        ("header", good[:100], "truncated"),
        ("version", good[:4] + b"\x01\0\0\0" + good[8:], "version 1"),
        ("garbage", good[:24] + b"\xff" * 200, "truncated|damaged"),
    ]:
        path = tmp_path / name
        path.write_bytes(data)
        with pytest.raises(ModelFileError, match=match):
            kv_memory(path, None, 256)
    with pytest.raises(ModelFileError, match="does not exist"):
        kv_memory(tmp_path / "missing", None, 256)
    with pytest.raises(ModelFileError, match="folder"):
        kv_memory(tmp_path, None, 256)


@given(st.data())
def test_any_damage_is_an_error_of_ours(data: st.DataObject) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as tmp:
        good = synth.write_metadata(Path(tmp) / "m.gguf", "llama", {"block_count": 2, "attention.head_count": [1, 2]})
        raw = bytearray(good.read_bytes())
        for _ in range(data.draw(st.integers(1, 4))):
            raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
        good.write_bytes(bytes(raw[: data.draw(st.integers(0, len(raw)))]))
        try:
            ModelShape.from_gguf(good)
        except (ModelFileError, UnsupportedModelError):
            pass


def test_only_the_header_is_read(tmp_path: Path, synth_model: Make) -> None:
    """A model of a terabyte costs as little as a small one."""
    path = tmp_path / "huge.gguf"
    path.write_bytes(synth_model(n_layer=3).read_bytes())
    with open(path, "r+b") as f:
        f.truncate(1 << 40)  # sparse
    assert len(ModelShape.from_gguf(path).layers) == 3


# ---- against the allocator

SHAPES: List[Dict[str, Any]] = [
    {},
    {"n_layer": 30, "n_head": 9, "n_head_kv": 3},
    {"n_layer": 64, "n_head": 8, "n_head_kv": 1, "head_k": 96},
    {"n_layer": 3, "n_head": 5, "n_head_kv": 5, "head_k": 128},
    {"n_layer": 13, "arch": "gemma3", "window": 300},
    {"n_layer": 12, "arch": "gemma3", "window": 512, "pattern": 2, "n_head_kv": 1, "head_k": 256},
    {"n_layer": 5, "arch": "mimo2", "n_head_kv": (2, 1, 4, 1, 2), "head_k": 96, "head_v": 32, "window": 300},
    {"n_layer": 6, "arch": "mimo2", "n_head_kv": 2, "head_k": 64, "head_v": 128, "pattern": 3, "window": 128},
]


@pytest.mark.native
@pytest.mark.parametrize("swa_full", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "-".join(f"{k}{v}" for k, v in s.items()) or "default")
def test_equals_the_allocator_to_the_byte(synth_model: Make, shape: Dict[str, Any], swa_full: bool) -> None:
    from kvsplit import Llama

    path = synth_model(**shape)
    for quant, n_ctx, kw in [
        (KVQuant.parse("8"), 2000, {}),
        (KVQuant.parse(key="4,:2=16", val="q5_1,-1=8"), 700, {"n_batch": 100, "n_ubatch": 64}),
        (KVQuant(), 1024, {"flash_attn": False}),
    ]:
        llm = Llama(path, kvq=quant, n_ctx=n_ctx, swa_full=swa_full, verbose=False, **kw)
        got = [(x.il, x.index, x.swa, x.n_cells, x.type_k, x.type_v, x.bytes_k, x.bytes_v) for x in llm.kv_cache.layers]
        saving = llm.kv_cache.saving
        llm.close()
        m = kv_memory(path, quant, n_ctx, swa_full=swa_full, **{"n_batch": 512, **kw})
        want = [(x.il, x.index, x.swa, x.n_cells, x.type_k, x.type_v, x.bytes_k, x.bytes_v) for x in m.layers]
        assert got == want
        assert saving == pytest.approx(m.saving)


@pytest.mark.native
@pytest.mark.parametrize("unified", [True, False])
@pytest.mark.parametrize("n_seq", [1, 3, 8])
def test_equals_the_allocator_with_sequences(synth_model: Make, n_seq: int, unified: bool) -> None:
    """Straight through the C API: llama-cpp-python's class makes one sequence only."""
    from kvsplit import native

    lib = native.load()
    import llama_cpp

    path = synth_model(n_layer=7, arch="gemma3", window=300)
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
    assert model
    p = llama_cpp.llama_context_default_params()
    p.n_ctx, p.n_seq_max, p.kv_unified, p.swa_full = 3000, n_seq, unified, False
    p.n_batch, p.n_ubatch = 2048, 512
    p.type_k, p.type_v = lib.handle("8,0=4"), lib.handle("4")
    p.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
    ctx = llama_cpp.llama_init_from_model(model, p)
    assert ctx, lib.last_error()
    got = [(x.il, x.n_cells, x.bytes_k, x.bytes_v) for x in lib.layers(ctx)]
    llama_cpp.llama_free(ctx)
    llama_cpp.llama_model_free(model)
    m = kv_memory(path, KVQuant.parse(key="8,0=4", val=4), 3000, n_seq_max=n_seq, unified=unified)
    assert got == [(x.il, x.n_cells, x.bytes_k, x.bytes_v) for x in m.layers]


@pytest.mark.native
def test_the_published_table_comes_out_of_the_allocator(synth_model: Make) -> None:
    from dataclasses import asdict

    from kvsplit import Llama

    path = synth_model(**asdict(synth.TINYLLAMA))
    for preset, mib in [("k16v16", 176.00), ("k8v8", 93.50), ("k8v4", 71.50), ("k4v8", 71.50), ("k4v4", 49.50)]:
        llm = Llama(path, kvq=preset, n_ctx=8192, verbose=False)
        assert llm.kv_cache.total_bytes == mib * 2**20
        llm.close()
