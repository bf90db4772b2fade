# SPDX-License-Identifier: MIT
"""Decode and prefill speed, from llama-bench's JSON lines.

Configurations alternate in shuffled rounds, so that a drift of the machine (heat, other work) meets all
of them alike. Raw samples are kept; the median is what is quoted.
"""

from __future__ import annotations

import json
import random
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

from kvsplit import tools
from kvsplit.errors import ResultError
from kvsplit.policy import KVQuant

#: Fields of llama-bench that a result needs.
_NEEDED = ("n_prompt", "n_gen", "n_depth", "n_threads", "samples_ns", "samples_ts", "model_type", "cpu_info")


@dataclass(frozen=True)
class SpeedPlan:
    """What to measure.

    Attributes:
        n_prompt: tokens of a prefill; 0 leaves it out.
        n_gen: tokens decoded; 0 leaves it out.
        n_depth: tokens in the cache before either.
        rounds: samples of each.
        n_threads: threads; None lets llama-bench choose.
        device: see :func:`kvsplit.tools.device_args`.
        seed: of the order of configurations.
    """

    n_prompt: int = 512
    n_gen: int = 64
    n_depth: int = 2048
    rounds: int = 5
    n_threads: Optional[int] = None
    device: str = "auto"
    seed: int = 1


@dataclass
class Speed:
    """Samples of one configuration and one kind of work; ``info`` is llama-bench's own record."""

    quant: KVQuant
    n_prompt: int
    n_gen: int
    samples_ts: List[float] = field(default_factory=list)
    samples_ns: List[float] = field(default_factory=list)
    peak_rss: Optional[int] = None
    info: Dict[str, Any] = field(default_factory=dict)

    @property
    def median_ts(self) -> float:
        """Median of the samples, tokens per second."""
        return statistics.median(self.samples_ts)


def kvq_args(quant: KVQuant) -> List[str]:
    """Arguments that give a tool this policy; both sides are said, so nothing of the model's own is left."""
    return ["--kvq-key", quant.key, "--kvq-val", quant.val]


def parse(stdout: str) -> List[Dict[str, Any]]:
    """llama-bench's JSON lines.

    Raises:
        ResultError: no line, or one that isn't a record with the fields that are needed.
    """
    rows: List[Dict[str, Any]] = []
    for line in stdout.splitlines():
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError:
            raise ResultError(f"llama-bench printed a line that is no JSON: {line[:80]!r}") from None
        lacking = [n for n in _NEEDED if n not in row]
        if lacking:
            raise ResultError(f"llama-bench's record lacks {', '.join(lacking)}")
        rows.append(row)
    if not rows:
        raise ResultError("llama-bench printed no record")
    return rows


def command(model: Path, quant: KVQuant, plan: SpeedPlan, repetitions: int = 1) -> List[str]:
    """Arguments of one llama-bench run."""
    args = ["-m", str(model), "-o", "jsonl", "-r", str(repetitions), "-fa", "on", *kvq_args(quant)]
    args += tools.device_args(plan.device)
    args += ["-p", str(plan.n_prompt), "-n", str(plan.n_gen), "-d", str(plan.n_depth)]
    if plan.n_threads is not None:
        args += ["-t", str(plan.n_threads)]
    return args


def run(
    model: Path,
    quants: Sequence[KVQuant],
    plan: SpeedPlan,
    *,
    step: Callable[[str], None] = lambda what: None,
) -> List[Speed]:
    """Measure all configurations; ``step`` is told before each run.

    Raises:
        ToolError: llama-bench failed.
        ResultError: its output doesn't have the expected form.
    """
    rng = random.Random(plan.seed)
    done: Dict[Tuple[KVQuant, int, int], Speed] = {}
    for i in range(plan.rounds):
        order = list(quants)
        rng.shuffle(order)
        for quant in order:
            step(f"speed {quant.label}, round {i + 1} of {plan.rounds}")
            res = tools.run("llama-bench", command(model, quant, plan))
            for row in parse(res.stdout):
                key = (quant, int(row["n_prompt"]), int(row["n_gen"]))
                s = done.setdefault(key, Speed(quant, key[1], key[2], info=row))
                s.samples_ts += [float(v) for v in row["samples_ts"]]
                s.samples_ns += [float(v) for v in row["samples_ns"]]
                if res.peak_rss:
                    s.peak_rss = max(s.peak_rss or 0, res.peak_rss)
    return list(done.values())
