# SPDX-License-Identifier: MIT
"""Make a context and tell what its KV cache is made of, as JSON on stdout.

A process of its own: its memory goes when it ends, and a crash takes nothing with it.

usage: python -m kvsplit.probe MODEL N_CTX KEY VAL [DEVICE]
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, Dict, List

from kvsplit import native, tools
from kvsplit.errors import ResultError
from kvsplit.policy import KVQuant


def main(argv: List[str]) -> int:
    """Entry of the process."""
    from kvsplit.errors import KVSplitError

    model, n_ctx, key, val, *rest = argv
    try:
        from kvsplit.llama import Llama

        llm = Llama(
            model, kvq_key=key, kvq_val=val, n_ctx=int(n_ctx), n_batch=2048, flash_attn=True, swa_full=False,
            verbose=False, **device_kwargs(*rest),
        )  # fmt: skip
        res = llm.kv_cache.to_json()
        res["report"] = llm.kv_cache.report
        res["compute_bytes"] = native.load().compute_bytes(llm._ctx.ctx)
        print(json.dumps(res))
        llm.close()
    except KVSplitError as e:
        print(f"{type(e).__name__}: {e}", file=sys.stderr)
        return 1
    return 0


def device_kwargs(device: str = "auto") -> Dict[str, Any]:
    """Arguments of :class:`kvsplit.Llama` that compute where the tools do under :func:`kvsplit.tools.device_args`."""
    if device == "cpu":
        return {"n_gpu_layers": 0}
    if device == "auto":
        return {"n_gpu_layers": -1}
    gpus = [n.partition(" (")[0] for n in native.load().devices() if not n.startswith("CPU")]
    return {"n_gpu_layers": -1, "split_mode": 0, "main_gpu": gpus.index(device)}  # 0: LLAMA_SPLIT_MODE_NONE


def kv_cache(model: Path, n_ctx: int, quant: KVQuant, device: str = "auto") -> Dict[str, Any]:
    """Run the process and return what it told, as :meth:`kvsplit.llama.KVCache.to_json` with ``report``.

    Raises:
        ToolError: no context could be made; the message carries the reason.
    """
    env = dict(os.environ)
    # the package may run from a source tree that isn't installed
    env["PYTHONPATH"] = os.pathsep.join([str(native.PACKAGE.parent), *filter(None, [env.get("PYTHONPATH")])])
    cmd = [sys.executable, "-m", "kvsplit.probe", str(model), str(n_ctx), quant.key, quant.val, device]
    res = tools.run_command(cmd, f"making a context of {n_ctx} tokens under {quant.label}", env=env)
    try:
        data: Dict[str, Any] = json.loads(res.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError):
        raise ResultError(f"the KV cache of {quant.label} could not be read back: {res.stdout[:200]!r}") from None
    data["peak_rss"] = res.peak_rss
    return data


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
