# SPDX-License-Identifier: MIT
"""The memory calculator against the allocator for every architecture that upstream can make a toy model of.

Upstream's test-llama-archs writes the models. Each is either computed to the byte or refused; what is refused
is listed here, so that an architecture can't slip from one to the other unseen.
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
from kvsplit import KVQuant, ModelShape, kv_memory
from kvsplit.errors import UnsupportedModelError
from kvsplit.gguf_meta import read_gguf

pytestmark = [pytest.mark.native, pytest.mark.slow]

# Own allocation rules (indexers, compressed or looped caches, encoders with a decoder), or no cache at all.
REFUSED = frozenset(
    """
    arwkv7 bailingmoe3 bert deepseek32 deepseek4 dots3note dream eagle3 eurobert gemma-embedding glm-dsa glm5-next
    graniteswitch hrm_text hy_v4 jina-bert-v2 jina-bert-v3 kimi-k3 llada llada-moe mamba mamba2 minimax-m3
    modern-bert nanbeige neo-bert nomic-bert nomic-bert-moe pockettts qwen3tts qwen4exp rnd1 rwkv6 rwkv6qwen2 rwkv7
    t5 t5encoder wavtokenizer-dec dflash gemma4-assistant
    """.split()
)

# Settings of a context: tokens, sequences, one buffer, whole windows, batch, K and V. No blocks: toy heads are odd.
CONTEXTS: List[Dict[str, Any]] = [
    {"n_ctx": 1000, "n_seq_max": 1, "unified": False, "swa_full": False, "n_batch": 2048, "n_ubatch": 512},
    {"n_ctx": 5000, "n_seq_max": 3, "unified": False, "swa_full": False, "n_batch": 120, "n_ubatch": 60},
    {"n_ctx": 5000, "n_seq_max": 3, "unified": True, "swa_full": False, "n_batch": 256, "n_ubatch": 128},
    {"n_ctx": 2000, "n_seq_max": 2, "unified": False, "swa_full": True, "n_batch": 512, "n_ubatch": 512},
]

_READ_BACK = """
import json, sys
from kvsplit import native
lib = native.load()
import llama_cpp as L
quiet = L.llama_log_callback(lambda level, text, data: None)
L.llama_log_set(quiet, None)
for line in sys.stdin:
    job = json.loads(line)
    print(json.dumps({"at": job["path"]}), flush=True)
    model = L.llama_model_load_from_file(job["path"].encode(), L.llama_model_default_params())
    out = []
    for c in job["contexts"] if model else []:
        p = L.llama_context_default_params()
        p.n_ctx, p.n_seq_max, p.kv_unified, p.swa_full = c["n_ctx"], c["n_seq_max"], c["unified"], c["swa_full"]
        p.n_batch, p.n_ubatch = c["n_batch"], c["n_ubatch"]
        p.type_k, p.type_v = lib.handle(job["key"]), lib.handle(job["val"])
        p.flash_attn_type = L.LLAMA_FLASH_ATTN_TYPE_ENABLED
        ctx = L.llama_init_from_model(model, p)
        why = lib.last_error()
        out.append([[x.il, x.index, x.n_cells, x.bytes_k, x.bytes_v] for x in lib.layers(ctx)] if ctx else why)
        if ctx:
            L.llama_free(ctx)
    if model:
        L.llama_model_free(model)
    print(json.dumps({"path": job["path"], "contexts": out}), flush=True)
"""


def test_every_architecture(tool: Callable[[str], Path], tmp_path: Path) -> None:
    made = subprocess.run(
        [str(tool("test-llama-archs")), "-o", str(tmp_path)],
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    files = sorted(tmp_path.glob("*.gguf"))
    assert len(files) > 100, made.stderr[-2000:]

    computed: List[Path] = []
    refused = set()
    for path in files:
        try:
            ModelShape.from_gguf(path)
            computed.append(path)
        except UnsupportedModelError:
            refused.add(read_gguf(path).arch)
    assert refused <= REFUSED, refused - REFUSED
    assert len(computed) > 80

    def quant(path: Path) -> KVQuant:
        return KVQuant("bf16", "bf16") if ModelShape.from_gguf(path).mla else KVQuant.parse(key="16,0=32", val="bf16")

    jobs = []
    for path in computed:
        q = quant(path)
        jobs.append(json.dumps({"path": str(path), "key": q.key, "val": q.val, "contexts": CONTEXTS}))
    env = {**os.environ, "PYTHONPATH": str(Path(kvsplit.__file__).parent.parent)}
    res = subprocess.run(
        [sys.executable, "-c", _READ_BACK],
        input="\n".join(jobs),
        capture_output=True,
        text=True,
        errors="replace",
        env=env,
        check=False,
    )
    lines = [json.loads(s) for s in res.stdout.splitlines() if s.startswith("{")]
    assert res.returncode == 0, f"ended by {res.returncode} at {lines[-1]}: {res.stderr[-1000:]}"
    got = {x["path"]: x["contexts"] for x in lines if "contexts" in x}

    wrong: List[str] = []
    for path in computed:
        assert got[str(path)], f"{path.name} could not be loaded"
        for settings, layers in zip(CONTEXTS, got[str(path)]):
            m = kv_memory(path, quant(path), **settings)
            want = [[x.il, x.index, x.n_cells, x.bytes_k, x.bytes_v] for x in m.layers]
            if layers != want:
                wrong.append(f"{path.name} {settings}\n  computed  {want}\n  allocated {layers}")
    assert not wrong, f"{len(wrong)} differ:\n" + "\n".join(wrong[:10])
