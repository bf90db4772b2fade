# SPDX-License-Identifier: MIT
"""Made-up rows of every kind, as `kvsplit bench` records them: no number in them was measured.

Quality follows the squared error of the formats (docs/numerics.md), keys weighing four times as much as values, so
that figures and verdicts look like real ones. The same arguments give the same rows.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from typing import Any, Dict, List, Sequence, Tuple

from kvsplit.policy import KVQuant
from kvsplit.results import Provenance, Row

CONFIGS = ("F16", "K8V8", "K8V4", "K6V5", "K6V3", "K4V8", "K4V4")
LENGTHS = (2048, 4096, 8192)
KINDS = ("memory", "speed", "quality", "retrieval", "continuation", "layer", "bandwidth")

_BITS = {"f16": 16.0, "q8_0": 8.5, "kvq6": 6.5, "kvq5": 5.5, "kvq4": 4.5, "kvq3": 3.5, "kvq2": 2.5}
_NSE = {"f16": 0.0, "q8_0": 3e-5, "kvq6": 4e-4, "kvq5": 1.5e-3, "kvq4": 5.5e-3, "kvq3": 2.35e-2, "kvq2": 9.8e-2}
N_LAYER, N_HEAD, WIDTH = 30, 9, 192  # WIDTH: values of one side of one token in one layer


def provenance(**changes: Any) -> Provenance:
    """Of a machine and a model that don't exist."""
    known: Dict[str, Any] = {
        "run_id": "20260101-000000-0000", "kvsplit_version": "0.1.0", "lock": "llama-cpp-python 0.3.36",
        "source_sha256": "5" * 64, "patches_sha256": "9" * 64,
        "command": "kvsplit bench --model made-up.gguf --seq-len 2048,4096,8192 --metric all",
        "model_filename": "made-up.gguf", "model_sha256": "0" * 64, "python": "3.11.7", "platform": "Linux",
        "cpu_info": "A CPU", "backends": "CPU", "model_type": "llama 0.1B F16", "model_size": 270 * 2**20,
        "model_n_params": 134515008,
    }  # fmt: skip
    return Provenance(**{**known, **changes})


def rows(
    configs: Sequence[str] = CONFIGS,
    lengths: Sequence[int] = LENGTHS,
    kinds: Sequence[str] = KINDS,
    *,
    rounds: int = 6,
    samples: int = 1,
    chunks: int = 12,
    all_layers: bool = False,
    seed: int = 1,
    **changes: Any,
) -> List[Row]:
    """Rows of some configurations at some lengths.

    Args:
        configs, lengths, kinds: which.
        rounds, samples: of a speed, and of each round.
        chunks: of the text that quality is measured on.
        all_layers: rows of layers at every length and of f16, too, whose error is 0; else at the largest alone.
        seed: of what is left to chance.
        changes: in the provenance.
    """
    prov = provenance(**changes)
    rng = random.Random(seed)
    hard = [rng.gauss(2.9, 0.15) for _ in range(chunks)]  # how hard each chunk of the text is, nats
    order = [(0.7 + 0.6 * rng.random()) for _ in range(rounds)]  # how fast the machine is in each round
    out: List[Row] = []
    for config in configs:
        q = KVQuant.from_text(config)
        error = 4 * _NSE[q.key] + _NSE[q.val]
        bits = (_BITS[q.key] + _BITS[q.val]) / 2

        def row(kind: str, q: KVQuant = q, config: str = config, **values: Any) -> Row:
            r = Row(kind, config, q.key, q.val, q.key, q.val, prov, test_time="2026-01-01T00:00:00Z",
                    layer_types=[[N_LAYER, q.key, q.val]], **values)  # fmt: skip
            r.validate()
            return r

        for n in lengths:
            full = 2 * 2 * WIDTH * N_LAYER * n
            size = int(full * bits / 16)
            if "memory" in kinds:
                out.append(row(
                    "memory", seq_len=n, n_ctx=n, kv_bytes=size, kv_bytes_expected=size, kv_bytes_f16=full,
                    saving=1 - size / full, bits_per_value=bits, swa_full=False,
                    layer_rotation=[[N_LAYER, 0 if q.key == "f16" else 64, 0 if q.val == "f16" else 64]],
                    compute_bytes=96 * 2**20 + 2048 * n, backend_prefill="CPU", backend_decode="CPU",
                ))  # fmt: skip
            for generated in (False, True) if "speed" in kinds else ():
                base = (110 if generated else 420) / (1 + n / 6000)
                gain = 1 + (16 - bits) / 60 * n / 8192
                for i in range(rounds):
                    each = [base * gain * order[i] * (1 + rng.gauss(0, 0.01)) for _ in range(samples)]
                    middle, mean = statistics.median(each), statistics.fmean(each)
                    out.append(row(
                        "speed", seq_len=n, round=i, n_prompt=0 if generated else 256, n_gen=32 if generated else 0,
                        n_depth=max(0, n - 256), n_threads=2, flash_attn=1, n_gpu_layers=0, samples_ts=each,
                        samples_ns=[(32 if generated else 256) / ts * 1e9 for ts in each], median_ts=middle,
                        avg_ts=mean, peak_rss=300 * 2**20 + size,
                    ))  # fmt: skip
            if "quality" in kinds:
                out.append(_quality(row, n, error, hard, rng))
            if "retrieval" in kinds:
                depths = [0.0, 0.25, 0.5, 0.75, 1.0]
                share = max(0.0, 1 - 4 * error - n / 200000)
                found = [sum(rng.random() < share for _ in range(8)) for _ in depths]
                out.append(row("retrieval", seq_len=n, text="made-up.txt", text_sha256="7" * 64, needle_depths=depths,
                               needle_found=found, needle_trials=8))  # fmt: skip
            if "continuation" in kinds:
                same = [128 if error == 0 else min(128, int(rng.expovariate(error * 3) + 1)) for _ in range(6)]
                gaps = [None if s == 128 else round(abs(rng.gauss(0, 0.3)), 4) for s in same]
                out.append(row("continuation", seq_len=n, text="made-up.txt", text_sha256="7" * 64, n_gen=128,
                               same_tokens=same, gaps=gaps))  # fmt: skip
        at = lengths if all_layers else [max(lengths)]
        for n, layer in itertools.product(at, range(N_LAYER) if "layer" in kinds and (error or all_layers) else ()):
            swing = 1 + 0.6 * math.sin(layer / 3) + (3 if layer < 2 else 0)
            heads = [error * swing * (0.6 + 0.1 * h) for h in range(N_HEAD)]
            out.append(row(
                "layer", seq_len=n, text="made-up.txt", text_sha256="7" * 64, layer=layer,
                k_nse=_NSE[q.key] * swing, v_nse=_NSE[q.val], k_cos=1 - _NSE[q.key] * swing / 2,
                v_cos=1 - _NSE[q.val] / 2, logit_rmse=math.sqrt(_NSE[q.key] * swing),
                output_nse=sum(heads) / N_HEAD, head_output_nse=heads,
                head_logit_rmse=[math.sqrt(_NSE[q.key] * swing)] * N_HEAD,
            ))  # fmt: skip
    if "bandwidth" in kinds:
        out.append(Row("bandwidth", "machine", "", "", "", "", prov, n_threads=2, read_bytes_per_s=[3e10, 3.1e10],
                       copy_bytes_per_s=[2.4e10, 2.5e10]))  # fmt: skip
    return out


def _quality(row: Any, n: int, error: float, hard: Sequence[float], rng: random.Random) -> Row:
    kld = [1.2 * error * (1 + 0.2 * rng.random()) for _ in hard]
    moved = [0.35 * error * (1 + rng.gauss(0, 0.25)) for _ in hard]
    (mean, se), (change, change_se), (nll, nll_se) = map(_mean, (kld, moved, [h + m for h, m in zip(hard, moved)]))
    return row(
        "quality", seq_len=n, text="made-up.txt", text_sha256="7" * 64, ppl_ctx=n, chunks=len(hard),
        ppl=math.exp(nll), ppl_se=math.exp(nll) * nll_se, ppl_base=math.exp(_mean(hard)[0]),
        ppl_ratio=math.exp(change), ppl_ratio_se=math.exp(change) * change_se, ppl_change=math.expm1(change),
        ppl_change_se=math.exp(change) * change_se, kld=mean, kld_se=se, kld_median=0.6 * mean, kld_p999=30 * mean,
        kld_max=80 * mean, top1=1 - 0.9 * math.sqrt(error), top1_se=0.001, kld_floor=0.0, kld_chunks=kld,
        nll_chunks=[h + m for h, m in zip(hard, moved)], finite=True, seconds=60.0,
    )  # fmt: skip


def _mean(x: Sequence[float]) -> Tuple[float, float]:
    m = sum(x) / len(x)
    var = sum((v - m) ** 2 for v in x) / (len(x) - 1) if len(x) > 1 else 0.0
    return m, math.sqrt(var / len(x))
