# SPDX-License-Identifier: MIT
"""Models with random weights, of any shape, small enough to make within a test.

A tokenizer is copied from another GGUF; without one the model has no vocabulary, which is enough to
load it and to make contexts.

usage: synth.py OUT [--tokenizer GGUF] [--n-layer 2] [--n-head 4] [--n-head-kv 2[,1,...]] [--head-k 64]
                    [--head-v 64] [--n-embd 64] [--arch llama|gemma3|mimo2|deepseek2] [--window 512] [--pattern 6]
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple, Union

import gguf
import numpy as np

N_VOCAB_PLAIN = 256
MLA_NOPE, MLA_V = 32, 32  # values of a deepseek2 head that don't turn, and of its output


@dataclass(frozen=True)
class Shape:
    """Shape of a synthetic model.

    Attributes:
        arch: llama; gemma3 (every pattern-th layer is full, the others slide); mimo2 (as gemma3, and the
            only one whose heads of K and V may differ in size and whose KV heads may differ by layer); deepseek2
            (MLA: a row is head_k - n_rot values, which are V too, then n_rot values that turn; one KV head).
        n_layer: transformer blocks.
        n_embd: width of the residual stream; independent of heads x head size.
        n_head: query heads.
        n_head_kv: KV heads, one number or one a layer.
        head_k, head_v: values per head; head_v None means head_k.
        n_ff: width of the feed-forward layer; None means twice n_embd.
        n_ctx_train: context length in the metadata.
        n_rot: rotated values of a head; None means head_k (llama accepts nothing else).
        window, pattern: sliding window and its period (gemma3, mimo2).
        seed: of the weights.
        extra: further metadata, full key to value.
    """

    arch: str = "llama"
    n_layer: int = 2
    n_embd: int = 64
    n_head: int = 4
    n_head_kv: Union[int, Tuple[int, ...]] = 2
    head_k: int = 64
    head_v: Optional[int] = None
    n_ff: Optional[int] = None
    n_ctx_train: int = 8192
    n_rot: Optional[int] = None
    window: int = 512
    pattern: Optional[int] = None
    seed: int = 0
    extra: Tuple[Tuple[str, Any], ...] = ()

    @property
    def heads_kv(self) -> List[int]:
        """KV heads of every layer."""
        if isinstance(self.n_head_kv, int):
            return [self.n_head_kv] * self.n_layer
        return list(self.n_head_kv)


# The cache of TinyLlama (22 layers, 4 KV heads of 64 values) in a model of a few MB.
TINYLLAMA = Shape(n_layer=22, n_embd=64, n_head=4, n_head_kv=4, head_k=64, n_ctx_train=8192)


def _copy_tokenizer(writer: gguf.GGUFWriter, source: Path) -> int:
    reader = gguf.GGUFReader(source)
    for key, field in reader.fields.items():
        if not key.startswith("tokenizer."):
            continue
        if field.types[0] == gguf.GGUFValueType.ARRAY:
            writer.add_array(key, field.contents())
        else:
            writer.add_key_value(key, field.contents(), field.types[0])
    return len(reader.fields["tokenizer.ggml.tokens"].data)


def _add_extra(writer: gguf.GGUFWriter, extra: Sequence[Tuple[str, Any]]) -> None:
    for key, value in extra:
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, list(value))


def write_model(out: Union[str, Path], shape: Shape = Shape(), tokenizer: Optional[Path] = None) -> Path:
    """Write a loadable GGUF. Weights are normal, scaled so that activations stay near 1."""
    out = Path(out)
    s = shape
    head_v = s.head_k if s.head_v is None else s.head_v
    n_ff = 2 * s.n_embd if s.n_ff is None else s.n_ff
    n_rot = s.head_k if s.n_rot is None else s.n_rot
    heads_kv = s.heads_kv
    if s.arch == "deepseek2":
        head_v = s.head_k - n_rot  # of the row; of the model's own heads: MLA_NOPE and MLA_V
        if heads_kv != [1] * s.n_layer or head_v <= 0:
            raise ValueError("deepseek2 has n_head_kv 1 and n_rot below head_k")
    elif s.arch != "mimo2" and (head_v != s.head_k or len(set(heads_kv)) > 1):
        raise ValueError(f"{s.arch} can't load K and V heads of different sizes or KV heads by layer; use mimo2")
    if len(heads_kv) != s.n_layer:
        raise ValueError(f"n_head_kv has {len(heads_kv)} entries for {s.n_layer} layers")

    w = gguf.GGUFWriter(out, s.arch)
    if tokenizer is None:
        w.add_string("tokenizer.ggml.model", "no_vocab")
        n_vocab = N_VOCAB_PLAIN
    else:
        n_vocab = _copy_tokenizer(w, tokenizer)
    w.add_vocab_size(n_vocab)
    w.add_context_length(s.n_ctx_train)
    w.add_embedding_length(s.n_embd)
    w.add_block_count(s.n_layer)
    w.add_feed_forward_length(n_ff)
    w.add_head_count(s.n_head)
    w.add_head_count_kv(s.n_head_kv if isinstance(s.n_head_kv, int) else heads_kv)
    w.add_key_length(s.head_k)
    w.add_value_length(head_v)
    w.add_rope_dimension_count(n_rot)
    w.add_rope_freq_base(10000.0)
    w.add_layer_norm_rms_eps(1e-5)
    w.add_file_type(1)
    if s.arch == "gemma3":
        w.add_sliding_window(s.window)
        if s.pattern is not None:
            w.add_uint32("gemma3.attention.sliding_window_pattern", s.pattern)
    elif s.arch == "mimo2":
        period = s.pattern or 2
        w.add_sliding_window(s.window)
        w.add_array("mimo2.attention.sliding_window_pattern", [il % period != period - 1 for il in range(s.n_layer)])
        w.add_uint32("mimo2.expert_feed_forward_length", n_ff)
    elif s.arch == "deepseek2":
        for key, value in (
            ("attention.q_lora_rank", 0),
            ("attention.kv_lora_rank", head_v),
            ("attention.key_length_mla", MLA_NOPE + n_rot),
            ("attention.value_length_mla", MLA_V),
            ("leading_dense_block_count", s.n_layer),
            ("expert_feed_forward_length", n_ff),
            ("expert_shared_count", 0),
        ):
            w.add_uint32(f"deepseek2.{key}", value)
    _add_extra(w, s.extra)

    rng = np.random.default_rng(s.seed)

    def rand(rows: int, cols: int) -> np.ndarray:
        return (rng.standard_normal((rows, cols), dtype=np.float32) / np.sqrt(cols)).astype(np.float16)

    def ones(n: int) -> np.ndarray:
        return np.ones(n, np.float32)

    w.add_tensor("token_embd.weight", rand(n_vocab, s.n_embd))
    w.add_tensor("output_norm.weight", ones(s.n_embd))
    if s.arch == "mimo2":
        w.add_tensor("output.weight", rand(n_vocab, s.n_embd))
    for il, n_kv in enumerate(heads_kv):
        t: Dict[str, np.ndarray] = {
            "attn_norm": ones(s.n_embd),
            "attn_q": rand(s.n_head * s.head_k, s.n_embd),
            "attn_k": rand(n_kv * s.head_k, s.n_embd),
            "attn_v": rand(n_kv * head_v, s.n_embd),
            "attn_output": rand(s.n_embd, s.n_head * head_v),
            "ffn_norm": ones(s.n_embd),
            "ffn_gate": rand(n_ff, s.n_embd),
            "ffn_up": rand(n_ff, s.n_embd),
            "ffn_down": rand(s.n_embd, n_ff),
        }
        if s.arch == "gemma3":
            t["post_attention_norm"] = ones(s.n_embd)
            t["attn_q_norm"] = ones(s.head_k)
            t["attn_k_norm"] = ones(s.head_k)
            t["post_ffw_norm"] = ones(s.n_embd)
        if s.arch == "deepseek2":
            del t["attn_k"], t["attn_v"]
            t["attn_q"] = rand(s.n_head * (MLA_NOPE + n_rot), s.n_embd)
            t["attn_kv_a_mqa"] = rand(s.head_k, s.n_embd)
            t["attn_kv_a_norm"] = ones(head_v)
            t["attn_k_b"] = rand(s.n_head * head_v, MLA_NOPE).reshape(s.n_head, head_v, MLA_NOPE)
            t["attn_v_b"] = rand(s.n_head * MLA_V, head_v).reshape(s.n_head, MLA_V, head_v)
            t["attn_output"] = rand(s.n_embd, s.n_head * MLA_V)
        for name, data in t.items():
            w.add_tensor(f"blk.{il}.{name}.weight", data)

    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return out


def write_metadata(out: Union[str, Path], arch: str, metadata: Dict[str, Any]) -> Path:
    """Write a GGUF of metadata only, for tests of the memory calculator. Keys lack the architecture's prefix."""
    out = Path(out)
    w = gguf.GGUFWriter(out, arch)
    _add_extra(w, [(f"{arch}.{k}", v) for k, v in metadata.items()])
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return out


def main() -> None:
    """Command line."""
    p = argparse.ArgumentParser(description="write a random-weight GGUF")
    p.add_argument("out", type=Path)
    p.add_argument("--tokenizer", type=Path)
    p.add_argument("--arch", default="llama", choices=["llama", "gemma3", "mimo2", "deepseek2"])
    p.add_argument("--n-layer", type=int, default=2)
    p.add_argument("--n-embd", type=int, default=64)
    p.add_argument("--n-head", type=int, default=4)
    p.add_argument("--n-head-kv", default="2")
    p.add_argument("--head-k", type=int, default=64)
    p.add_argument("--head-v", type=int)
    p.add_argument("--n-ctx-train", type=int, default=8192)
    p.add_argument("--window", type=int, default=512)
    p.add_argument("--pattern", type=int)
    p.add_argument("--seed", type=int, default=0)
    a = p.parse_args()
    heads = tuple(int(x) for x in a.n_head_kv.split(","))
    shape = Shape(
        arch=a.arch,
        n_layer=a.n_layer,
        n_embd=a.n_embd,
        n_head=a.n_head,
        n_head_kv=heads[0] if len(heads) == 1 else heads,
        head_k=a.head_k,
        head_v=a.head_v,
        n_ctx_train=a.n_ctx_train,
        window=a.window,
        pattern=a.pattern,
        seed=a.seed,
    )
    print(write_model(a.out, shape, a.tokenizer))


if __name__ == "__main__":
    main()
