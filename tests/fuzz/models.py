# SPDX-License-Identifier: MIT
"""The smallest models that have each kind of memory, for the fuzz targets: a few hundred kB of random weights each.

llama (keys and values), gemma3 (a sliding window beside full layers), mamba (a recurrent state alone) and lfm2
(a recurrent state beside keys and values).

usage: models.py FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Dict, List

import gguf
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "python"))

import synth

N_VOCAB = 32
N_EMBD = 32  # one head, one block of a quantized type
N_LAYER = 2


def _recurrent(out: Path, arch: str) -> None:
    """Write a mamba or an lfm2 model, which `synth` can't."""
    w = gguf.GGUFWriter(out, arch)
    w.add_string("tokenizer.ggml.model", "no_vocab")
    w.add_vocab_size(N_VOCAB)
    w.add_context_length(8192)
    w.add_embedding_length(N_EMBD)
    w.add_block_count(N_LAYER)
    w.add_feed_forward_length(2 * N_EMBD if arch == "lfm2" else 0)
    w.add_layer_norm_rms_eps(1e-5)
    w.add_file_type(0)
    rng = np.random.default_rng(1)

    def rand(rows: int, cols: int) -> np.ndarray:
        return rng.standard_normal((rows, cols), dtype=np.float32) / np.sqrt(cols).astype(np.float32)

    def ones(n: int) -> np.ndarray:
        return np.ones(n, np.float32)

    w.add_tensor("token_embd.weight", rand(N_VOCAB, N_EMBD))
    layers: List[Dict[str, np.ndarray]] = []
    if arch == "mamba":
        conv, inner, state, rank = 4, 2 * N_EMBD, 4, 4
        w.add_head_count(0)
        w.add_ssm_conv_kernel(conv)
        w.add_ssm_inner_size(inner)
        w.add_ssm_state_size(state)
        w.add_ssm_time_step_rank(rank)
        w.add_tensor("output_norm.weight", ones(N_EMBD))
        for _ in range(N_LAYER):
            layers.append(
                {
                    "attn_norm.weight": ones(N_EMBD),
                    "ssm_in.weight": rand(2 * inner, N_EMBD),
                    "ssm_conv1d.weight": rand(inner, conv),
                    "ssm_conv1d.bias": ones(inner),
                    "ssm_x.weight": rand(rank + 2 * state, inner),
                    "ssm_dt.weight": rand(inner, rank),
                    "ssm_dt.bias": ones(inner),
                    "ssm_a": -np.abs(rand(inner, state)),  # a decaying state
                    "ssm_d": ones(inner),
                    "ssm_out.weight": rand(N_EMBD, inner),
                }
            )
    else:
        cache = 3
        w.add_head_count(1)
        w.add_head_count_kv([0, 1])  # a convolution, then attention
        w.add_rope_freq_base(10000.0)
        w.add_shortconv_l_cache(cache)
        w.add_tensor("token_embd_norm.weight", ones(N_EMBD))
        for il in range(N_LAYER):
            layer = {
                "attn_norm.weight": ones(N_EMBD),
                "ffn_norm.weight": ones(N_EMBD),
                "ffn_gate.weight": rand(2 * N_EMBD, N_EMBD),
                "ffn_up.weight": rand(2 * N_EMBD, N_EMBD),
                "ffn_down.weight": rand(N_EMBD, 2 * N_EMBD),
            }
            if il == 0:
                layer["shortconv.conv.weight"] = rand(N_EMBD, cache)
                layer["shortconv.in_proj.weight"] = rand(3 * N_EMBD, N_EMBD)
                layer["shortconv.out_proj.weight"] = rand(N_EMBD, N_EMBD)
            else:
                for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
                    layer[f"{name}.weight"] = rand(N_EMBD, N_EMBD)
                layer["attn_q_norm.weight"] = ones(N_EMBD)
                layer["attn_k_norm.weight"] = ones(N_EMBD)
            layers.append(layer)
    for il, layer in enumerate(layers):
        for name, data in layer.items():
            w.add_tensor(f"blk.{il}.{name}", np.ascontiguousarray(data, np.float32))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def write_models(folder: Path) -> Path:
    """Write all models as ARCH.gguf, and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    size = {"n_embd": N_EMBD, "n_head": 1, "n_head_kv": 1, "head_k": N_EMBD}
    synth.write_model(folder / "llama.gguf", synth.Shape(n_layer=N_LAYER, **size))
    synth.write_model(folder / "gemma3.gguf", synth.Shape(arch="gemma3", n_layer=2, window=4, pattern=2, **size))
    _recurrent(folder / "mamba.gguf", "mamba")
    _recurrent(folder / "lfm2.gguf", "lfm2")
    return folder


if __name__ == "__main__":
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        sys.exit(2)
    print(write_models(Path(sys.argv[1])))
