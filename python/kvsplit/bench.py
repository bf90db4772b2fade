# SPDX-License-Identifier: MIT
"""The sweep: memory, speed, quality and retrieval of configurations at several lengths, one row a measurement.

What is measured comes from the real tools: an allocated context for memory, llama-bench for speed,
llama-perplexity for quality, and generation through the bindings for retrieval. Each measurement is on the disk
before the next one starts, and a run that continues a file measures only what the file lacks.

One configuration follows the other in an order that is shuffled anew in each round of a speed, so that a drift of
the machine meets all alike. Everything at a length stays within that many tokens: a speed is that of the last ones
of it, a perplexity that of chunks of it, a needle is hidden in a text of it.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence, Set, Tuple, Union

from kvsplit import native, probe, quality, results, retrieval, runs, speed, stats
from kvsplit.errors import (
    CacheFolderError,
    ContextError,
    KVQuantError,
    KVSplitError,
    NotFiniteError,
    ResultError,
    ToolError,
    UnsupportedModelError,
    UsageError,
)
from kvsplit.gguf_meta import GGUFInfo
from kvsplit.memory import ModelShape, _shape, kv_memory
from kvsplit.policy import F16, KVQuant, Spec
from kvsplit.results import Journal, Row

#: What ``--metric`` takes, besides ``all``.
METRICS = ("memory", "speed", "perplexity", "retrieval")

#: Configurations and lengths of a sweep that names none.
CONFIGS = ("F16", "K8V8", "K8V4", "K6V5", "K6V3", "K4V8", "K4V4")
LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192)


# ---- what to measure


@dataclass(frozen=True)
class MemoryPlan:
    """An allocated context.

    Attributes:
        n_ctx: its tokens.
        device: see :func:`kvsplit.tools.device_args`.
    """

    n_ctx: int
    device: str = "auto"


Plan = Union[MemoryPlan, speed.SpeedPlan, quality.QualityPlan, retrieval.RetrievalPlan]


@dataclass(frozen=True)
class Item:
    """One measurement: a row, or two where prefill and decode are measured together.

    Attributes:
        kind: of its rows.
        quant: the configuration.
        plan: how.
        seq_len: the length it belongs to; None where kinds have lengths of their own.
        round: of a speed.
    """

    kind: str
    quant: KVQuant
    plan: Plan
    seq_len: Optional[int] = None
    round: Optional[int] = None

    @property
    def n_ctx(self) -> int:
        """Tokens of the context that it needs."""
        p = self.plan
        if isinstance(p, MemoryPlan):
            return p.n_ctx
        if isinstance(p, speed.SpeedPlan):
            return p.n_depth + max(p.n_prompt, p.n_gen)
        return p.ppl_ctx if isinstance(p, quality.QualityPlan) else p.seq_len


@dataclass(frozen=True)
class Options:
    """A sweep over lengths.

    Attributes:
        configs: policies. f16 is measured whether it is among them or not: the others are held against it.
        lengths: in tokens; None means :data:`LENGTHS`, up to what the model was trained for.
        metrics: of :data:`METRICS`.
        text: UTF-8 file; None means the one that every Python carries.
        repeat: rounds of a speed.
        chunks: of a perplexity; None means so many that 16384 tokens are read, from 4 to 32.
        trials: of a needle at each depth.
        n_threads: threads; None lets the tools choose.
        device: see :func:`kvsplit.tools.device_args`.
        seed: of the order of configurations, and of needles.
    """

    configs: Tuple[KVQuant, ...]
    lengths: Optional[Tuple[int, ...]] = None
    metrics: Tuple[str, ...] = METRICS
    text: Optional[Path] = None
    repeat: int = 5
    chunks: Optional[int] = None
    trials: int = 3
    n_threads: Optional[int] = None
    device: str = "auto"
    seed: int = 1


def parse_configs(texts: Sequence[str], argument: str = "--config") -> Tuple[KVQuant, ...]:
    """Configurations from the command line.

    One text holds several: labels and presets by ``,`` (``F16,K8V4``), and pairs of SPECs ``KEY/VAL`` by
    ``;``, because a comma belongs to the SPEC. Repeats are dropped.

    Raises:
        KVQuantError: one can't be understood.
    """
    out: List[KVQuant] = []
    for text in texts:
        for part in text.split(";"):
            for one in [part] if "/" in part else part.split(","):
                if one.strip():
                    try:
                        q = KVQuant.from_text(one.strip(), argument)
                    except KVQuantError as e:
                        if "/" not in part or "," not in part:
                            raise
                        why = f"{e}; other configurations than a pair of SPECs are separated by ';'"
                        raise type(e)(why, argument=argument, given=part) from None
                    if q not in out:
                        out.append(q)
    if not out:
        raise UsageError(f"{argument}: names no configuration; write for example F16,K8V4")
    return tuple(out)


def check_config(shape: ModelShape, quant: KVQuant, n_ctx: int) -> None:
    """Refuse a configuration that a model can't store.

    Raises:
        UsageError: names the configuration and the reason.
    """
    try:
        kv_memory(shape, quant, n_ctx)
    except UsageError as e:
        raise type(e)(f"--config: {quant.text}: {e}") from None


def parse_lengths(texts: Sequence[str]) -> Tuple[int, ...]:
    """Lengths from the command line, several by ``,``, sorted, each once.

    Raises:
        UsageError: one is no whole number from 128 to 2^31 - 1.
    """
    out: Set[int] = set()
    for one in (part.strip() for text in texts for part in text.split(",")):
        try:
            n = int(one)
        except ValueError:
            n = -1
        if not 128 <= n < 2**31:
            raise UsageError(f"--seq-len: {one!r} is no whole number from 128 on; write for example 2048,8192")
        out.add(n)
    return tuple(sorted(out))


def parse_metrics(texts: Sequence[str]) -> Tuple[str, ...]:
    """Metrics from the command line, several by ``,``; ``all`` means all.

    Raises:
        UsageError: one is unknown.
    """
    asked = {part.strip().lower() for text in texts for part in text.split(",")}
    for one in sorted(asked - {*METRICS, "all"}):
        raise UsageError(f"--metric: {one!r} is none of {', '.join(METRICS)}, all")
    return METRICS if "all" in asked else tuple(m for m in METRICS if m in asked)


def _chunks(o: Options, length: int, text: quality.Text) -> int:
    """Chunks of a perplexity."""
    if o.chunks is not None:
        return o.chunks
    n = max(4, min(32, 16384 // length))
    # English takes about four bytes a token; leave room for every chunk
    while n > 2 and text.path.stat().st_size < 5 * length * n:
        n -= 1
    return n


def items(o: Options, info: GGUFInfo, text: quality.Text) -> List[Item]:
    """The sweep, in the order in which it is measured: memory, then all of a length before the next one.

    Raises:
        UsageError: a length is more than the model was trained for, or the text is too short for one.
    """
    trained = int(info.get("context_length", 0))
    lengths = o.lengths or tuple(n for n in LENGTHS if not trained or n <= trained)
    if not lengths:
        raise UsageError(
            f"--seq-len: {info.path.name} was trained on {trained} tokens, and {LENGTHS[0]} are the least that is "
            "measured; only --metric memory with a --seq-len takes more"
        )
    if trained and set(o.metrics) - {"memory"} and max(lengths) > trained:
        raise UsageError(
            f"--seq-len: {info.path.name} was trained on {trained} tokens, {max(lengths)} are more; "
            "only --metric memory takes them"
        )
    quants = o.configs if F16 in o.configs else (F16, *o.configs)
    out: List[Item] = []
    if "memory" in o.metrics:
        out += [Item("memory", q, MemoryPlan(n, o.device), n) for n in lengths for q in quants]
    for n in lengths:
        if "speed" in o.metrics:
            n_prompt, n_gen = min(512, n // 4), min(32, n // 4)
            plan = speed.SpeedPlan(n_prompt, n_gen, n - n_prompt, 1, o.n_threads, o.device)
            out += speed_items(quants, plan, o.repeat, o.seed, n)
        if "perplexity" in o.metrics:
            ppl = quality.QualityPlan(n, _chunks(o, n, text), o.n_threads, o.device)
            quality.check(ppl, text)
            out += [Item("quality", q, ppl, n) for q in sorted(quants, key=lambda q: q != F16)]
        if "retrieval" in o.metrics:
            needles = retrieval.RetrievalPlan(n, trials=o.trials, seed=o.seed, n_threads=o.n_threads, device=o.device)
            for kind in ("retrieval", "continuation"):
                out += [Item(kind, q, needles, n) for q in quants]
    return out


def speed_items(
    quants: Sequence[KVQuant], plan: speed.SpeedPlan, rounds: int, seed: int, seq_len: Optional[int] = None
) -> List[Item]:
    """Rounds in which all configurations take turns, each in an order of its own."""
    out: List[Item] = []
    for i in range(rounds):
        order = list(quants)
        random.Random(f"{seed}, {plan.n_depth}, {i}").shuffle(order)
        out += [Item("speed", q, plan, seq_len, i) for q in order]
    return out


# ---- what is there already

Key = Tuple[Any, ...]

#: What leaves one measurement out, and not all that follow: the tool failed, or text or memory don't suffice for it.
_SKIPPED = (ToolError, ResultError, NotFiniteError, UsageError, ContextError)


def row_key(row: Row) -> Key:
    """What makes two rows the same measurement: model, patches, device, length, kind, types, and what belongs to it.

    A row of another command, which knows no length, is none of a sweep over lengths.

    For a speed also the machine. Threads are compared by :meth:`Sweep.done`, as far as they were asked for.
    """
    p = row.provenance
    kinds: Dict[str, Callable[[], Key]] = {
        "memory": lambda: (row.n_ctx,),
        "speed": lambda: (p.cpu_info, p.gpu_info, row.n_prompt, row.n_gen, row.n_depth, row.round),
        "quality": lambda: (row.text_sha256, row.ppl_ctx, row.chunks),
        "retrieval": lambda: (row.text_sha256, row.seq_len, tuple(row.needle_depths or ()), row.needle_trials),
        "continuation": lambda: (row.text_sha256, row.seq_len, row.n_gen, len(row.same_tokens or ())),
    }
    own = kinds[row.kind]() if row.kind in kinds else (id(row),)
    head = (p.model_sha256, p.patches_sha256, row.device or "auto", row.seq_len)
    return (*head, row.kind, row.kvq_key, row.kvq_val, *own)


@dataclass
class Sweep:
    """Measurements of one model into one journal.

    Attributes:
        model, info, sha256: the file.
        text: to evaluate on.
        lib: the library.
        journal: where rows go; what it holds already is not measured again.
        command: command line for the record.
        step: told what is being done, and how much of the whole is finished, in a unit that goes with time.
        say: told what a user should know.
        strict: the first failure ends the run; else a configuration that fails has no row, so the next run tries
            it again, and the others go on.
        folder: for temporary files; None means the system's.
    """

    model: Path
    info: GGUFInfo
    sha256: str
    text: quality.Text
    lib: native.Native
    journal: Optional[Journal] = None
    command: Sequence[str] = ()
    run_id: str = field(default_factory=runs.new_id)
    step: Callable[[str, float, float], None] = lambda what, i, n: None
    say: Callable[[str], None] = lambda message: None
    strict: bool = False
    folder: Optional[Path] = None
    failures: List[str] = field(default_factory=list)
    new: List[Row] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.shape: Optional[ModelShape] = None
        try:
            self.shape = _shape(self.info)
        except UnsupportedModelError:
            pass
        self.provenance = runs.provenance(self.lib, self.run_id, self.model, self.sha256, self.command)
        self._caches: Dict[Tuple[KVQuant, int, str], Dict[str, Any]] = {}
        self._rows: Dict[Key, Row] = {}
        self.know(self.journal.rows if self.journal else [])
        self._reference: Dict[retrieval.RetrievalPlan, retrieval.Reference] = {}
        self._at, self._total, self._what = 0.0, 0.0, ""
        self.full = False  # nothing can be written any more

    def check(self, quants: Iterable[KVQuant], n_ctx: int) -> None:
        """Refuse policies that the model or the library can't store.

        Raises:
            KVQuantError, KVSplitError: names the policy and the reason.
        """
        stored = {self.lib.type_name(t) for t in self.lib.cache_types()}
        for q in quants:
            specs = (q.key_spec, q.val_spec)
            lacking = {t for s in specs for t in (s.default, *dict(s.exceptions).values())} - stored
            if lacking:
                raise KVSplitError(
                    f"the library {self.lib.path} can't store {', '.join(sorted(lacking))}; build it and the tools anew"
                )
            if self.shape is not None:
                check_config(self.shape, q, n_ctx)

    # ---- what is there

    def know(self, rows: Iterable[Row]) -> None:
        """Rows that were measured before."""
        self._rows.update((row_key(r), r) for r in rows)

    @property
    def known(self) -> List[Row]:
        """Rows of this model that are there."""
        return [r for r in self._rows.values() if r.provenance.model_sha256 == self.sha256]

    def keys(self, item: Item) -> List[Key]:
        """Keys of the rows that an item gives."""
        p, q = item.plan, item.quant
        head = (self.sha256, self.provenance.patches_sha256, p.device, item.seq_len, item.kind, q.key, q.val)
        if isinstance(p, MemoryPlan):
            return [(*head, p.n_ctx)]
        if isinstance(p, speed.SpeedPlan):
            machine = (self.provenance.cpu_info, self.provenance.gpu_info)
            parts = [(p.n_prompt, 0), (0, p.n_gen)]
            return [(*head, *machine, n, g, p.n_depth, item.round) for n, g in parts if n or g]
        text = self.text.sha256
        if isinstance(p, quality.QualityPlan):
            return [(*head, text, p.ppl_ctx, p.chunks)]
        if item.kind == "retrieval":
            return [(*head, text, p.seq_len, tuple(p.depths), p.trials)]
        return [(*head, text, p.seq_len, p.n_gen, p.prompts)]

    def rows(self, item: Item) -> List[Optional[Row]]:
        """An item's rows as far as they are there; a speed with other threads than asked for doesn't count."""
        asked = item.plan.n_threads if isinstance(item.plan, speed.SpeedPlan) else None
        found = [self._rows.get(k) for k in self.keys(item)]
        return [r if r is None or asked is None or r.n_threads == asked else None for r in found]

    def done(self, item: Item) -> bool:
        """True if all of an item's rows are there."""
        return None not in self.rows(item)

    def here(self, row: Row) -> bool:
        """True if a row was measured on this machine."""
        p, own = row.provenance, self.provenance
        return (p.cpu_info, p.gpu_info) == (own.cpu_info, own.gpu_info)

    # ---- what it costs

    def _per_layer(self, key: str) -> float:
        """A number of the metadata; the largest where layers differ, 0 where there is none."""
        value = self.info.get(key) or 0
        return float(max(value) if isinstance(value, list) else value)

    def cost(self, item: Item) -> float:
        """How long an item takes, in tokens of prefill at an empty cache.

        A token costs the weights' products and, in attention, products with every token before it. Decoding one
        costs as much as two of a batch, which is about what CPUs do. Loading counts as 64 tokens.
        """
        heads = self._per_layer("attention.head_count")
        layers = self._per_layer("block_count")
        width = self._per_layer("attention.key_length") or self._per_layer("embedding_length") / max(1.0, heads)
        # products of one token with one before it, as a share of those with the weights (1.8 a byte)
        slope = 2 * layers * heads * width / max(1.0, 1.8 * self.info.size)

        def tokens(n: int, depth: int = 0) -> float:
            return n * (1 + slope * (depth + n / 2))

        p = item.plan
        if isinstance(p, MemoryPlan):
            return 64.0
        if isinstance(p, speed.SpeedPlan):
            return 64 + tokens(p.n_depth) + tokens(p.n_prompt, p.n_depth) + 2 * tokens(p.n_gen, p.n_depth)
        if isinstance(p, quality.QualityPlan):
            return 64 + p.chunks * tokens(p.ppl_ctx)
        if item.kind == "retrieval":
            return 64 + p.trials * tokens(p.seq_len)
        return 64 + p.prompts * (tokens(p.seq_len) + p.n_gen)

    # ---- measuring

    def cache(self, q: KVQuant, n_ctx: int, device: str) -> Dict[str, Any]:
        """What a context allocates, read back; see :func:`kvsplit.probe.kv_cache`.

        Raises:
            ToolError: no context could be made.
            ResultError: another type is stored than was asked for.
        """
        key = (q, n_ctx, device)
        if key not in self._caches:
            found = probe.kv_cache(self.model, n_ctx, q, device)
            layers = found["layers"]
            if not layers:
                raise KVSplitError(f"{self.model.name} has no KV cache, there is nothing to compare")
            _same_types(q, [(layer["type_k"], layer["type_v"]) for layer in layers])
            self._caches[key] = found
        return self._caches[key]

    def _row(self, item: Item, cache: Dict[str, Any], **values: Any) -> Row:
        layers = cache["layers"]
        return Row(
            kind=item.kind,
            config=item.quant.label,
            kvq_key=item.quant.key,
            kvq_val=item.quant.val,
            type_k=_uniq(layer["type_k"] for layer in layers),
            type_v=_uniq(layer["type_v"] for layer in layers),
            provenance=self.provenance,
            test_time=runs.now(),
            device=item.plan.device,
            seq_len=item.seq_len,
            layer_types=results.runs((layer["type_k"], layer["type_v"]) for layer in layers),
            backend_prefill=_uniq(layer["backend_prefill"] for layer in layers),
            backend_decode=_uniq(layer["backend_decode"] for layer in layers),
            **values,
        )

    def _memory_fields(self, item: Item, cache: Dict[str, Any]) -> Dict[str, Any]:
        expected = None if self.shape is None else kv_memory(self.shape, item.quant, item.n_ctx).total_bytes
        if expected is not None and expected != cache["bytes"]:
            self.say(f"{item.quant.label}: {cache['bytes']} bytes were allocated, {expected} were computed")
        return {
            "n_ctx": item.n_ctx,
            "kv_bytes": cache["bytes"],
            "kv_bytes_expected": expected,
            "kv_bytes_f16": cache["bytes_f16"],
            "saving": 1 - cache["bytes"] / cache["bytes_f16"],
            "bits_per_value": 16 * cache["bytes"] / cache["bytes_f16"],
            "swa_full": False,
            "layer_rotation": results.runs((layer["rot_k"], layer["rot_v"]) for layer in cache["layers"]),
        }

    def _memory(self, item: Item) -> List[Row]:
        cache = self.cache(item.quant, item.n_ctx, item.plan.device)
        away = sorted(
            {
                f"{where} instead of {layer['backend_expect']}"
                for layer in cache["layers"]
                for where in (layer["backend_prefill"], layer["backend_decode"])
                if where and layer["backend_expect"] and where != layer["backend_expect"]
            }
        )
        if away:
            self.say(f"{item.quant.label}: attention runs on {', '.join(away)}.")
        more = {"compute_bytes": cache.get("compute_bytes"), "peak_rss": cache.get("peak_rss")}
        return [self._row(item, cache, **self._memory_fields(item, cache), **more)]

    def _speed(self, item: Item) -> List[Row]:
        assert isinstance(item.plan, speed.SpeedPlan)
        cache = self.cache(item.quant, item.n_ctx, item.plan.device)
        out: List[Row] = []
        for s in speed.run(self.model, [item.quant], item.plan):
            info = s.info
            n_layer = len(cache["layers"])
            said = KVQuant(Spec.parse(info["type_k"]).text(), Spec.parse(info["type_v"]).text())
            _same_types(item.quant, said.types(n_layer))
            row = self._row(
                item,
                cache,
                round=item.round,
                n_prompt=s.n_prompt,
                n_gen=s.n_gen,
                n_depth=info["n_depth"],
                n_batch=info.get("n_batch"),
                n_ubatch=info.get("n_ubatch"),
                n_threads=info["n_threads"],
                n_gpu_layers=info.get("n_gpu_layers"),
                flash_attn=info.get("flash_attn"),
                avg_ns=statistics.fmean(s.samples_ns),
                stddev_ns=statistics.stdev(s.samples_ns) if len(s.samples_ns) > 1 else 0.0,
                avg_ts=statistics.fmean(s.samples_ts),
                stddev_ts=statistics.stdev(s.samples_ts) if len(s.samples_ts) > 1 else 0.0,
                median_ts=s.median_ts,
                samples_ns=s.samples_ns,
                samples_ts=s.samples_ts,
                peak_rss=s.peak_rss,
            )
            row.provenance = replace(
                self.provenance,
                model_type=str(info["model_type"]),
                model_size=info.get("model_size"),
                model_n_params=info.get("model_n_params"),
            )
            out.append(row)
        return out

    def _quality(self, item: Item, base: Path) -> List[Row]:
        plan = item.plan
        assert isinstance(plan, quality.QualityPlan)
        cache = self.cache(item.quant, item.n_ctx, plan.device)
        row = self._row(
            item, cache, **self._memory_fields(item, cache), text=self.text.name, text_sha256=self.text.sha256,
            ppl_ctx=plan.ppl_ctx, chunks=plan.chunks, n_threads=plan.n_threads,
        )  # fmt: skip
        began = time.monotonic()
        output = quality.output(self.model, item.quant, base, plan)
        row.seconds = round(time.monotonic() - began, 2)
        try:
            x = quality.parse(output)
        except NotFiniteError:
            row.finite = False
            self.say(f"{self.model.name}, {item.quant.text}: attention gave NaN")
            return [row]
        if not math.isfinite(x.ppl_base):
            raise ResultError(f"{self.model.name}: f16 itself gives no finite numbers")
        row.finite = True
        for name in (
            "ppl", "ppl_se", "ppl_base", "ppl_ratio", "ppl_ratio_se", "kld", "kld_se", "kld_median", "kld_p999",
            "kld_max", "top1", "top1_se",
        ):  # fmt: skip
            setattr(row, name, getattr(x, name))
        row.kld_chunks, row.nll_chunks = quality.chunk_klds(output, x.kld), quality.chunk_nlls(output, x.ppl)
        if len(row.kld_chunks) != plan.chunks:
            raise ResultError(f"{len(row.kld_chunks)} chunks were measured, {plan.chunks} were asked for")
        f16 = row if item.quant == F16 else self.rows(replace(item, quant=F16))[0]
        if f16 is not None:
            row.kld_floor = f16.kld
            change = stats.ppl_change(row.nll_chunks, f16.nll_chunks)
            if change is not None:
                row.ppl_change, row.ppl_change_se = change
        return [row]

    def _retrieval(self, item: Item) -> List[Row]:
        plan = item.plan
        assert isinstance(plan, retrieval.RetrievalPlan)
        common = {"text": self.text.name, "text_sha256": self.text.sha256, "n_threads": plan.n_threads}
        began = time.monotonic()
        if item.kind == "retrieval":
            found = retrieval.needle(self.model, item.quant, self.text, plan, step=self._within)
            _same_types(item.quant, [(x["type_k"], x["type_v"]) for x in found.cache["layers"]])
            row = self._row(
                item, found.cache, **common, needle_depths=list(found.depths), needle_found=list(found.found),
                needle_trials=found.trials,
            )  # fmt: skip
        else:
            if plan not in self._reference:
                self._reference[plan] = retrieval.reference(self.model, self.text, plan, step=self._within)
            said = retrieval.continuation(
                self.model, item.quant, self.text, plan, self._reference[plan], step=self._within
            )
            _same_types(item.quant, [(x["type_k"], x["type_v"]) for x in said.cache["layers"]])
            row = self._row(
                item, said.cache, **common, n_gen=said.n_gen, same_tokens=list(said.same_tokens),
                gaps=list(said.gaps),
            )  # fmt: skip
        row.seconds = round(time.monotonic() - began, 2)
        return [row]

    def _within(self, what: str) -> None:
        self.step(f"{self._what}: {what}", self._at, self._total)

    def _keep(self, item: Item, rows: Sequence[Row]) -> None:
        """Append what isn't there: a kill between two rows of an item leaves the first."""
        have = self.rows(item)
        keys = self.keys(item)
        new = [r for r in rows if row_key(r) in keys and have[keys.index(row_key(r))] is None]
        if len(rows) != len(keys) or {row_key(r) for r in rows} != set(keys):
            raise ResultError(f"other rows of {item.kind} came than were asked for")
        if self.journal is not None:
            try:
                self.journal.write(*new)
            except CacheFolderError:
                self.full = True
                raise
        self._rows.update((row_key(r), r) for r in rows if r in new)
        self.new += new

    def _failed(self, item: Item, why: object) -> None:
        """Remember what has no row."""
        where = "" if item.seq_len is None else f", {item.seq_len} tokens"
        self.failures.append(f"{self.model.name}, {item.quant.text}, {item.kind}{where}: {why}")
        self.say(self.failures[-1])

    def _try(self, item: Item, measure: Callable[[], List[Row]]) -> bool:
        where = "" if item.seq_len is None else f", {item.seq_len} tokens"
        turn = "" if item.round is None else f", round {item.round + 1}"
        self._what = f"{item.kind} {item.quant.label}{where}{turn}"
        self.step(self._what, self._at, self._total)
        try:
            self._keep(item, measure())
        except _SKIPPED as e:
            if self.strict:
                if not isinstance(e, UsageError):
                    e.args = (f"{item.quant.label}: {e}",)
                raise
            self._failed(item, e)
            return False
        finally:
            self._at += self.cost(item)
        return True

    def _qualities(self, group: Sequence[Item], plan: quality.QualityPlan, base_cost: float) -> None:
        """Perplexities that share a base."""
        self.step(f"f16 base, {plan.ppl_ctx} tokens", self._at, self._total)
        with quality.base_file(self.model, self.info, self.text, plan, self.folder) as base:
            n = quality.base_chunks(base)
            if n != plan.chunks:
                raise UsageError(
                    f"--chunks: {self.text.name} has {n} chunks of {plan.ppl_ctx} tokens for {self.model.name}, "
                    f"{plan.chunks} were asked for; use fewer, or a longer --text"
                )
            self._at += base_cost
            unpaired = False
            for one in group:
                if unpaired:  # a row that is there is not measured again, so it must be whole
                    self._failed(one, "not measured, because f16 failed, which it is held against")
                    continue
                done = self._try(one, lambda: self._quality(one, base))  # noqa: B023 - called at once
                unpaired = one.quant == F16 and not done

    def run(self, todo: Sequence[Item]) -> None:
        """Measure what isn't there yet, in order; perplexities of one plan share an f16 base.

        Raises:
            KVSplitError: nothing can be measured; rows that were written stay.
        """
        todo = [item for item in todo if not self.done(item)]
        bases = {item.plan for item in todo if item.kind == "quality"}
        base_cost = {p: self.cost(Item("quality", F16, p)) for p in bases}
        self._at, self._total = 0.0, sum(map(self.cost, todo)) + sum(base_cost.values())
        i = 0
        while i < len(todo):
            item = todo[i]
            if item.kind != "quality":
                measure = {"memory": self._memory, "speed": self._speed}.get(item.kind, self._retrieval)
                self._try(item, lambda: measure(item))  # noqa: B023 - called at once
                i += 1
                continue
            plan = item.plan
            assert isinstance(plan, quality.QualityPlan)
            group = [other for other in todo[i:] if other.kind == "quality" and other.plan == plan]
            at = self._at
            try:
                self._qualities(group, plan, base_cost[plan])
            except (*_SKIPPED, CacheFolderError) as e:  # there is no base
                if self.strict or self.full or len(group) == len(todo):
                    raise
                for one in group:
                    self._failed(one, e)
            self._at = at + base_cost[plan] + sum(map(self.cost, group))
            i += len(group)
        self.step("", self._total, self._total)


def _uniq(values: Iterable[str]) -> str:
    return "+".join(dict.fromkeys(v for v in values if v))


def _same_types(q: KVQuant, stored: Sequence[Tuple[str, str]]) -> None:
    """Types of each layer as they were asked for; MLA stores no values.

    Raises:
        ResultError: names the first layer that differs.
    """
    for i, (have, asked) in enumerate(zip(stored, q.types(len(stored)))):
        if (have[0], have[1] or asked[1]) != asked:
            raise ResultError(f"layer {i} was asked to store {'/'.join(asked)}, it stores {'/'.join(have)}")


# ---- the command's parts


def seconds_a_token(model: Path, rows: Iterable[Row], device: str, n_threads: Optional[int]) -> float:
    """Of a prefill at an empty cache: from rows with the device and threads asked for, else by a short run.

    Args:
        model: GGUF file.
        rows: of this model, measured on this machine.
        device, n_threads: as the plan has them.

    Raises:
        ToolError: llama-bench failed.
    """
    for r in rows:
        alike = (r.device or "auto") == device and n_threads in (None, r.n_threads)
        if alike and r.kind == "speed" and r.n_prompt and r.median_ts and (r.n_depth or 0) <= 2048:
            return 1 / r.median_ts
    plan = speed.SpeedPlan(128, 0, 0, 1, n_threads, device)
    return 1 / speed.run(model, [F16], plan)[0].median_ts
