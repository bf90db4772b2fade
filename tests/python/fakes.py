# SPDX-License-Identifier: MIT
"""Stand-ins for the native tools and the library: they compute nothing, and are the same at each call."""

from __future__ import annotations

import stat
import sys
from pathlib import Path
from typing import Any, Dict, List

from kvsplit import native
from kvsplit.memory import kv_memory
from kvsplit.policy import KVQuant

# Prints as perplexity.cpp does. How large a KLD is follows from the types; LOG says what ran.
# BREAK is KEY/VAL=nan, =fail or =hang.
PERPLEXITY = """
import math, os, struct, sys, time
arg = lambda name: sys.argv[sys.argv.index(name) + 1]
log = lambda what: open(os.environ["FAKE_LOG"], "a").write(what + "\\n")
types = "K %s (9 bits), V %s (9 bits)" % (arg("--kvq-key"), arg("--kvq-val"))  # alike in all layers
print(f"kvq: {types}; layers 0-1; 1.00 MiB; rotation none", file=sys.stderr)
base = arg("--kl-divergence-base")
if "--kl-divergence" not in sys.argv:
    log("base")
    ctx, chunks = int(arg("-c")), int(os.environ.get("FAKE_CHUNKS", arg("--chunks")))
    with open(base, "wb") as f:
        f.write(b"_logits_" + struct.pack("<3i", ctx, 256, chunks))
        f.truncate(1 << 22)
    sys.exit(0)
chunks = struct.unpack("<3i", open(base, "rb").read(20)[8:])[2]
pair = arg("--kvq-key") + "/" + arg("--kvq-val")
log(pair)
broken = dict(s.split("=") for s in os.environ.get("FAKE_BREAK", "").split(";") if s).get(pair)
if broken == "fail":
    sys.exit("failed to decode")
if broken == "hang":
    open(os.environ["FAKE_LOG"] + ".up", "w").write(base)
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(0.05)
bits = {"f16": 16, "q8_0": 8, "kvq6": 6, "kvq5": 5, "q5_0": 5, "q5_1": 5, "kvq3": 3, "kvq2": 2}
error = lambda t: 0 if t == "f16" else 3.0 ** -bits.get(t, 4) * (0.8 if t.startswith("kvq") else 1)
means = [(error(arg("--kvq-key")) * 2 + error(arg("--kvq-val"))) * (1 + 0.1 * (i % 3)) for i in range(chunks)]
nan = float("nan") if broken == "nan" else 0
ppls = [20 * (1 + (i % 3) / 10) * (1 + m / 2) for i, m in enumerate(means)]  # a mean of logarithms over chunks
upto = lambda n: math.exp(sum(map(math.log, ppls[:n])) / n)
print("chunk             PPL               ln(PPL(Q)/PPL(base))          KL Divergence   ...")
for i in range(chunks):
    kld = sum(means[: i + 1]) / (i + 1) + nan
    print("%4d    %9.4f ± %9.4f    %10.5f ± %10.5f    %10.5f ± %10.5f    %6.3f ± %6.3f %%    %6.3f ± %6.3f %%"
          % (i + 1, upto(i + 1) + nan, 1, 0.01, 0.001, kld, kld / 10, 1, 0.1, 95, 1))
kld = sum(means) / chunks + nan
print(f'''
====== Perplexity statistics ======
Mean PPL(Q)                   : {upto(chunks) + nan:10.6f} ±   1.000000
Mean PPL(base)                :  19.800000 ±   1.000000
Mean PPL(Q)/PPL(base)         :   1.010000 ±   0.001000

====== KL divergence statistics ======
Mean    KLD: {kld:10.6f} ± {kld / 10:10.6f}
Maximum KLD: {9 * kld:10.6f}
99.9%   KLD: {8 * kld:10.6f}
Median  KLD: {kld / 2:10.6f}

====== Token probability statistics ======
Same top p: 95.000 ± 1.000 %
''')
"""

# A record as llama-bench's for the prompt and for what is generated. How fast follows from the types and the depth.
BENCH = """
import json, os, sys, time
arg = lambda name: sys.argv[sys.argv.index(name) + 1]
pair = arg("--kvq-key") + "/" + arg("--kvq-val")
open(os.environ["FAKE_LOG"], "a").write("bench:" + pair + "\\n")
time.sleep(float(os.environ.get("FAKE_SECONDS", 0)))
depth = int(arg("-d"))
for p, n in ((int(arg("-p")), 0), (0, int(arg("-n")))):
    if p or n:
        ts = (100.0 if p else 10.0) * (1.1 if "16" not in pair else 1.0) / (1 + depth / 1000)
        threads = int(arg("-t")) if "-t" in sys.argv else 2
        print(json.dumps({"n_prompt": p, "n_gen": n, "n_depth": depth, "n_threads": threads,
            "samples_ns": [1e9 * (p or n) / ts], "samples_ts": [ts], "model_type": "made up", "cpu_info": "A CPU",
            "type_k": os.environ.get("FAKE_TYPE_K", arg("--kvq-key")), "type_v": arg("--kvq-val"),
            "n_batch": 2048, "n_ubatch": 512, "n_gpu_layers": -1, "flash_attn": 1}))
"""

_TOOLS = {"llama-perplexity": PERPLEXITY, "llama-bench": BENCH}


def install(root: Path, *names: str) -> None:
    """Put tools where ``KVSPLIT_NATIVE_DIR=root`` finds them."""
    (root / "bin").mkdir(parents=True, exist_ok=True)
    for name in names:
        tool = root / "bin" / name
        tool.write_text(f"#!{sys.executable} -S\n{_TOOLS[name]}", encoding="utf-8")
        tool.chmod(tool.stat().st_mode | stat.S_IXUSR)


def kv_cache(model: Path, n_ctx: int, q: KVQuant, device: str = "auto") -> Dict[str, Any]:
    """What the library would tell, from the computed sizes."""
    m = kv_memory(model, q, n_ctx)
    cpu = dict.fromkeys(("backend_prefill", "backend_decode", "backend_expect"), "CPU")
    layers = [{"type_k": x.type_k, "type_v": x.type_v, "rot_k": 0, "rot_v": 0, **cpu} for x in m.layers]
    return {"bytes": m.total_bytes, "bytes_f16": m.bytes_f16, "layers": layers}


class Lib:
    """The library, as far as a sweep asks it."""

    build = native.Build("0", "source", "patches")
    path = Path("libllama.so")
    types = ("f32", "f16", "q8_0", "kvq6", "kvq5", "kvq4", "kvq3", "kvq2", "q5_0", "q5_1", "q4_0", "iq4_nl")

    def cache_types(self) -> List[int]:
        return list(range(len(self.types)))

    def type_name(self, i: int) -> str:
        return self.types[i]

    def devices(self) -> List[str]:
        return ["CUDA0 (A GPU (big))", "CPU (A CPU)"]


class Retrieval:
    """What :mod:`kvsplit.retrieval` would find: f16 all needles, others fewer."""

    @staticmethod
    def needle(model: Path, q: KVQuant, text: Any, plan: Any, *, step: Any) -> Any:
        step("trial 1")
        found = [plan.trials if q == KVQuant() else plan.trials - 1] * len(plan.depths)
        cache = kv_cache(model, plan.seq_len, q)
        return type("Found", (), {"cache": cache, "depths": plan.depths, "found": found, "trials": plan.trials})

    @staticmethod
    def reference(model: Path, text: Any, plan: Any, *, step: Any) -> Any:
        return "reference"

    @staticmethod
    def continuation(model: Path, q: KVQuant, text: Any, plan: Any, reference: Any, *, step: Any) -> Any:
        assert reference == "reference"
        same = [plan.n_gen if q == KVQuant() else 7] * plan.prompts
        gaps = [None if n == plan.n_gen else 0.25 for n in same]
        cache = kv_cache(model, plan.seq_len, q)
        return type("Said", (), {"cache": cache, "n_gen": plan.n_gen, "same_tokens": same, "gaps": gaps})


def stand_in(setattr: Any = setattr) -> None:
    """Put all of it in place; tools come by :func:`install`."""
    from kvsplit import bench, retrieval, tools

    setattr(native, "load", Lib)
    setattr(tools, "check", lambda: None)
    setattr(bench.probe, "kv_cache", kv_cache)
    for name in ("needle", "reference", "continuation"):
        setattr(retrieval, name, getattr(Retrieval, name))
