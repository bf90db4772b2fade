# SPDX-License-Identifier: MIT
"""One HTML page from results: a verdict by a stated rule, tables, figures, and where every number comes from.

The page needs nothing but itself: no network, no font, no library. A Content-Security-Policy in it forbids the rest.
The same rows and the same command give the same bytes.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import hashlib
import json
import math
import os
import re
import shlex
import statistics
import xml.etree.ElementTree as ET
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, List, Optional, Protocol, Sequence, Tuple

import kvsplit
from kvsplit import stats
from kvsplit.errors import CacheFolderError, KVSplitError, ResultError, UsageError, printable, why
from kvsplit.policy import KVQuant
from kvsplit.results import Row, Summary, showable, speed_ratio, summarize

TEMPLATES = Path(__file__).resolve().parent / "templates"

#: What pages of ours begin with: only such a file may be replaced.
GENERATOR = "kvsplit report"

#: Chunks from which an error of the mean is taken for one at all, and those from which it is taken without a remark.
#: Two standard errors hold the true value in 95 % of cases for many chunks, in 86 % for 4, in 92 % for 8 (Student's t).
MIN_CHUNKS, ENOUGH_CHUNKS = 4, 8
#: Rounds of a speed from which a ratio's interval is sure enough for a verdict: the smallest and the largest of n
#: ratios enclose the median with a certainty of 1 - 2 / 2^n, 94 % for 5.
SURE_ROUNDS = 5
#: Standard errors that a bound lies away from its mean.
N_SE = 2


# ---- the rule


@dataclass(frozen=True)
class Target:
    """What a verdict looks for: the smallest cache that keeps these limits.

    Attributes:
        name: value of ``--target``.
        title: a few words for the page.
        kld: limit of the mean KL divergence plus two standard errors, nats a token.
        ppl: limit of the change of perplexity plus two standard errors, a share.
        decode: limit of the lower end of the decode speed's ratio to f16; None: speed doesn't count.
    """

    name: str
    title: str
    kld: float
    ppl: float
    decode: Optional[float] = None

    @property
    def rule(self) -> str:
        """The rule in a sentence."""
        speed = "" if self.decode is None else f", and whose decode speed is shown to be at least {self.decode}x of f16"
        return (
            f"the smallest cache whose mean KL divergence + {N_SE} SE is at most {self.kld:g} nats a token, "
            f"whose change of perplexity + {N_SE} SE is at most {100 * self.ppl:g} %{speed}"
        )


TARGETS: Dict[str, Target] = {
    t.name: t
    for t in (
        Target("quality", "Lose least", 0.005, 0.005),
        Target("balanced", "Balanced", 0.01, 0.01, 0.95),
        Target("memory", "Save most", 0.05, 0.03),
    )
}


@dataclass
class Line:
    """A configuration at one length.

    Attributes:
        s: what was measured.
        rows: the rows it was measured by.
        ppl_change, ppl_change_se: a share, paired with f16; None if not measured.
        decode, prefill: ratio to f16's in the same round: median, lower and upper end; None if it can't be told.
        rounds: how many the ratio of decoding comes from.
        differs: how what ran differs from what was asked; empty: it doesn't.
    """

    s: Summary
    rows: List[Row]
    ppl_change: Optional[float] = None
    ppl_change_se: Optional[float] = None
    decode: Optional[Tuple[float, float, float]] = None
    prefill: Optional[Tuple[float, float, float]] = None
    rounds: int = 0
    differs: str = ""

    @property
    def is_f16(self) -> bool:
        """True for the configuration that all others are held against."""
        return self.s.config == "F16"

    def last(self, kind: str) -> Optional[Row]:
        """The row of a kind that counts."""
        return next((r for r in reversed(self.rows) if r.kind == kind), None)

    @property
    def sample(self) -> Optional[Tuple[Any, ...]]:
        """What quality was measured on: text, tokens of a chunk, chunks, build."""
        q = self.last("quality")
        return None if q is None else (q.text_sha256, q.ppl_ctx, q.chunks, q.provenance.patches_sha256)


@dataclass
class Place:
    """A length, and the configurations that were measured there."""

    seq_len: Optional[int]
    lines: List[Line]
    n_ctx: Optional[int] = None
    ppl_ctx: Optional[int] = None
    n_depth: Optional[int] = None

    @property
    def length(self) -> int:
        """Tokens by which places are sorted."""
        return self.seq_len or self.n_ctx or self.ppl_ctx or self.n_depth or 0

    @property
    def title(self) -> str:
        """For headings and sentences."""
        if self.seq_len or {self.n_ctx, self.ppl_ctx, self.n_depth} <= {self.length, None}:
            return f"{self.length} tokens"
        parts = [
            f"a cache of {self.n_ctx} tokens" if self.n_ctx else "",
            f"quality in chunks of {self.ppl_ctx}" if self.ppl_ctx else "",
            f"speed after {self.n_depth}" if self.n_depth is not None else "",
        ]
        return ", ".join(p for p in parts if p)

    @property
    def where(self) -> str:
        """For sentences."""
        if {self.seq_len, self.n_ctx, self.ppl_ctx} == {None}:
            return f"after {self.title}"
        first, _, rest = self.title.partition(", ")
        return (f"at {first}" if first[0].isdigit() else f"with {first}") + (f" ({rest})" if rest else "")

    @property
    def f16(self) -> Optional[Line]:
        """The line of f16."""
        return next((x for x in self.lines if x.is_f16), None)

    @property
    def floor(self) -> Optional[float]:
        """KL divergence of f16 from itself."""
        return next((x.s.kld_floor for x in self.lines if x.s.kld_floor is not None), None)

    @property
    def sample(self) -> Optional[Tuple[Any, ...]]:
        """What f16's quality was measured on, or else most lines'."""
        if self.f16 and self.f16.sample:
            return self.f16.sample
        known = Counter(x.sample for x in self.lines if x.sample)
        return known.most_common(1)[0][0] if known else None


@dataclass(frozen=True)
class Check:
    """One condition of the rule for one configuration.

    Attributes:
        name: of the condition.
        ok: None if it can't be told.
        text: why.
        near: it fails only because the measurement is too rough to show that the limit is kept.
    """

    name: str
    ok: Optional[bool]
    text: str
    near: bool = False


@dataclass(frozen=True)
class Missing:
    """What a verdict lacks, and the command that measures it."""

    what: str
    command: str


@dataclass
class Verdict:
    """What the rule says about one place.

    Attributes:
        target: the rule.
        place: the length.
        line: the configuration; None: none keeps the limits, or it can't be told.
        checks: of each configuration but f16.
        missing: what a decision lacks.
        lead: model, length and machine, for the sentence.
        rest: what the sentence says if there is no configuration.
        remarks: what limits it.
    """

    target: Target
    place: Place
    line: Optional[Line]
    checks: List[Tuple[Line, List[Check]]]
    missing: List[Missing]
    lead: str = ""
    rest: str = ""
    remarks: List[str] = field(default_factory=list)

    @property
    def figures(self) -> str:
        """The configuration's figures in words."""
        return _said(self.line) if self.line else ""

    @property
    def said(self) -> str:
        """The configuration and its figures."""
        return f"{self.line.s.config}, {self.figures}" if self.line else ""

    @property
    def sentence(self) -> str:
        """The verdict in words."""
        return f"{self.lead}: {self.said or self.rest}."

    @property
    def decided(self) -> bool:
        """True if the rows answer the question."""
        return self.line is not None or not self.missing

    def to_json(self) -> Dict[str, Any]:
        """For ``json.dumps``."""
        return {
            "target": self.target.name,
            "length": self.place.length,
            "config": self.line.s.config if self.line else None,
            "decided": self.decided,
            "sentence": self.sentence,
            "missing": [dataclasses.asdict(m) for m in self.missing],
            "remarks": self.remarks,
        }


def _bounded(name: str, value: float, se: float, limit: float, show: Callable[[float], str]) -> Check:
    """A value that must lie under a limit, with its error."""
    high = value + N_SE * se
    if high <= limit:
        return Check(name, True, f"{show(high)} at most")
    if value - N_SE * se > limit:
        return Check(name, False, f"{show(value)} is above {show(limit)}")
    return Check(name, False, f"not shown to be under {show(limit)}: up to {show(high)}", near=value <= limit)


def check(line: Line, place: Place, target: Target) -> List[Check]:
    """The rule's conditions for one configuration."""
    s = line.s
    out = [Check("ran as asked", not line.differs, line.differs or "yes")]
    if s.saving is None:
        out.append(Check("cache", None, "not measured"))
    else:
        out.append(Check("cache", s.saving > 0, f"{100 * s.saving:.1f} % saved"))
    q = line.last("quality")
    if s.finite is False:
        out.append(Check("KLD", False, "attention gave NaN or infinity"))
    elif s.kld is None or s.kld_se is None or q is None:
        out += [Check("KLD", None, "not measured"), Check("PPL", None, "not measured")]
    elif (q.chunks or 0) < MIN_CHUNKS:
        few = f"{q.chunks} chunks are too few, {MIN_CHUNKS} are needed"
        out += [Check("KLD", None, few), Check("PPL", None, few)]
    elif line.sample != place.sample:
        other = "measured on another text, length or build than the others"
        out += [Check("KLD", None, other), Check("PPL", None, other)]
    else:
        out.append(_bounded("KLD", s.kld, s.kld_se, target.kld, lambda x: f"{x:.2g}"))
        if line.ppl_change is None or line.ppl_change_se is None:
            out.append(Check("PPL", None, "no change against f16 was measured"))
        else:
            out.append(_bounded("PPL", line.ppl_change, line.ppl_change_se, target.ppl, lambda x: f"{100 * x:+.2g} %"))
    if target.decode is not None:
        if line.decode is None or line.rounds < SURE_ROUNDS:
            out.append(Check("decode", None, _why_no_ratio(line, place)))
        else:
            mid, low, high = line.decode
            span = f"{mid:.2f}x ({low:.2f}-{high:.2f})"
            if low >= target.decode:
                out.append(Check("decode", True, span))
            else:
                said = "is slower than" if high < target.decode else "is not shown to reach"
                out.append(Check("decode", False, f"{span} {said} {target.decode}x", near=mid >= target.decode))
    base = place.f16.s if place.f16 else None
    if s.needles and base and base.needles and s.needles_found is not None and base.needles_found is not None:
        worse = stats.wilson(s.needles_found, s.needles)[1] < stats.wilson(base.needles_found, base.needles)[0]
        out.append(Check("needles", not worse, f"{s.needles_found} of {s.needles}, f16 {base.needles_found}"))
    return out


def _why_no_ratio(line: Line, place: Place) -> str:
    if not line.s.decode_samples:
        return "not measured"
    if place.f16 is None or not place.f16.s.decode_samples:
        return "f16's speed was not measured"
    if line.rounds:
        shared = f"{line.rounds} round{'s'[: line.rounds != 1]} shared with f16 {'is' if line.rounds == 1 else 'are'}"
        return f"{shared} too few, {SURE_ROUNDS} are needed"
    return "not measured in the same rounds as f16"


def decide(section: Section, place: Place, target: Target) -> Verdict:
    """Apply the rule to one length."""
    checks = [(x, check(x, place, target)) for x in place.lines if not x.is_f16 and not _foreign(x)]
    good = [x for x, c in checks if all(one.ok for one in c)]
    best = min(good, key=lambda x: (x.s.kv_bytes or 0, x.s.kld or 0)) if good else None
    open_ = [(x, c) for x, c in checks if all(one.ok is not False for one in c) and any(one.ok is None for one in c)]
    # what can't be told matters only where it could be smaller than the best
    open_ = [(x, c) for x, c in open_ if best is None or x.s.kv_bytes is None or x.s.kv_bytes < (best.s.kv_bytes or 0)]
    v = Verdict(target, place, best, checks, _missing(section, place, target, open_, bool(checks)))
    v.lead = f"For {section.model} {place.where} on {section.machine}"
    if best is not None:
        if open_:
            v.remarks.append(f"Smaller, but not known: {_names(x.s.config for x, _ in open_)}.")
    elif v.missing:
        v.rest = "no verdict, because measurements are missing"
    else:
        v.rest = f"keep f16; none of {len(checks)} measured configurations keeps the limits"
    rough = [
        x.s.config
        for x, c in checks
        if any(one.near for one in c)
        and all(one.ok or one.near for one in c)
        and (best is None or (x.s.kv_bytes or 0) < (best.s.kv_bytes or 0))
    ]
    if rough:
        v.remarks.append(
            f"Smaller and perhaps within the limits, but measured too roughly to show it: {_names(rough)}."
        )
    chunks = place.sample[2] if place.sample else None
    if best is not None and chunks is not None and chunks < ENOUGH_CHUNKS:
        v.remarks.append(
            f"Quality comes from {chunks} chunks: its errors are rough, {ENOUGH_CHUNKS} or more would make them firm."
        )
    if best is not None and place.floor is None:
        v.remarks.append("f16 was not held against itself, so the noise of the KL divergence is not known.")
    return v


def _said(line: Line) -> str:
    """The figures of a verdict."""
    s = line.s
    parts: List[str] = []
    if s.saving is not None and s.saving < 1:
        parts.append(f"{1 / (1 - s.saving):.1f}x smaller than f16")
    if s.kld is not None and s.kld_se is not None:
        parts.append(f"KLD {plus_minus(s.kld, s.kld_se)} nats a token")
    if line.ppl_change is not None and line.ppl_change_se is not None:
        parts.append(f"PPL {plus_minus(100 * line.ppl_change, 100 * line.ppl_change_se, sign=True)} %")
    if line.decode is not None:
        parts.append("decodes at {:.2f}x ({:.2f}-{:.2f})".format(*line.decode))
    else:
        parts.append("decode speed against f16 not known")
    return ", ".join(parts)


def _names(names: Iterable[str]) -> str:
    found = list(dict.fromkeys(names))
    return ", ".join(found[:8]) + (f" and {len(found) - 8} more" if len(found) > 8 else "")


def _command(section: Section, place: Place, configs: Sequence[str], metric: str) -> str:
    """The command that measures what is missing."""
    sep = ";" if any("/" in c for c in configs) else ","
    length = f" --seq-len {place.length}" if place.length >= 128 else ""  # the least that it takes
    asked = next((r.device for r in section.rows if r.device and r.device != "auto"), None)
    device = f" --device {shlex.quote(asked)}" if asked else ""
    on = ""
    if {"perplexity", "all"} & set(metric.split(",")):  # another text or number of chunks couldn't be compared
        told = (x.last("quality") for x in place.lines if x.sample == place.sample)
        q = next((r for r in told if r is not None), None)
        if q is not None and q.text and not q.text.startswith("pydoc_data"):  # the default
            on += f" --text {shlex.quote(q.text)}"
        if q is not None and (q.chunks or 0) >= MIN_CHUNKS:
            on += f" --chunks {q.chunks}"
    return (
        f"kvsplit bench --model {shlex.quote(section.filename)} --config {shlex.quote(sep.join(configs))}"
        f"{length} --metric {metric}{on}{device}"
    )


def _missing(
    section: Section, place: Place, target: Target, open_: Sequence[Tuple[Line, List[Check]]], any_config: bool
) -> List[Missing]:
    out: List[Missing] = []
    if not any_config:
        command = _command(section, place, ["F16", "K8V8", "K8V4", "K6V5", "K4V4"], "all")
        return [Missing("no configuration but f16 was measured here", command)]
    metrics = {"cache": "memory", "KLD": "perplexity", "PPL": "perplexity", "decode": "speed"}
    found: Dict[Tuple[str, str], List[str]] = {}
    for x, checks in open_:
        seen = set()
        for c in checks:
            if c.ok is None and metrics[c.name] not in seen:
                seen.add(metrics[c.name])
                found.setdefault((metrics[c.name], c.text), []).append(x.s.config)
    reasons: Dict[Tuple[str, Tuple[str, ...]], List[str]] = {}  # one command measures all that the same ones lack
    for (metric, text), configs in found.items():
        reasons.setdefault((text, tuple(configs)), []).append(metric)
    words = {"memory": "size of the cache", "perplexity": "quality (KLD, PPL)", "speed": "decode speed"}
    for (text, lacking), together in reasons.items():
        # f16 goes along: speeds can be compared only within a run, and KLD means nothing without its floor
        command = _command(section, place, ["F16", *lacking], ",".join(together))
        if "too few" in text:
            if "perplexity" not in together:
                command += f" --repeat {SURE_ROUNDS}"
            elif "--chunks" not in command:
                command += f" --chunks {ENOUGH_CHUNKS}"
        out.append(Missing(f"{' and '.join(words[m] for m in together)} of {_names(lacking)}: {text}", command))
    return out


# ---- rows in order


@dataclass
class Section:
    """All rows of one model on one machine."""

    model: str
    filename: str
    sha256: str
    machine: str
    rows: List[Row]
    places: List[Place] = field(default_factory=list)


def _machine(r: Row) -> str:
    p = r.provenance
    name = ", ".join(x for x in (p.cpu_info, p.gpu_info) if x) or "a machine that the rows don't name"
    return f"{name} (device: {r.device})" if r.device and r.device != "auto" else name


def sections(rows: Sequence[Row]) -> List[Section]:
    """Rows by model and machine, in the order of first appearance; each with its lengths, shortest first."""
    out: Dict[Tuple[str, str], Section] = {}
    for r in rows:
        p, machine = r.provenance, _machine(r)
        stem = p.model_filename[:-5] if p.model_filename.lower().endswith(".gguf") else p.model_filename
        key = (p.model_sha256, machine)
        out.setdefault(key, Section(stem, p.model_filename, p.model_sha256, machine, [])).rows.append(r)
    for s in out.values():
        s.places = _places(s.rows)
    for key, s in list(out.items()):  # errors by layer are the same on every machine: to where the rest is
        home = next((o for o in out.values() if o.places and o.sha256 == s.sha256), None)
        if not s.places and home is not None:
            home.rows += out.pop(key).rows
    return list(out.values())


_Key = Tuple[Optional[int], Optional[int], Optional[int], Optional[int]]  # seq_len, n_ctx, ppl_ctx, n_depth


def _places(rows: Sequence[Row]) -> List[Place]:
    """Rows by length.

    Rows without one (of ``kvsplit compare``, of sweeps) are put together by run, whose kinds have a length each;
    where a run has speeds at several depths, each depth is a place.
    """
    by_run: Dict[str, List[Row]] = {}
    for r in rows:
        if r.kind not in ("bandwidth", "layer"):
            by_run.setdefault(r.provenance.run_id, []).append(r)
    groups: Dict[_Key, List[Row]] = {}
    for run in by_run.values():
        old = [r for r in run if r.seq_len is None]
        depths = {r.n_depth for r in old if r.kind == "speed"}
        alone = len(depths) > 1 or {r.kind for r in old} == {"speed"}
        n_ctx = max((r.n_ctx for r in old if r.n_ctx), default=None)
        ppl_ctx = max((r.ppl_ctx for r in old if r.ppl_ctx), default=None)
        depth = None if alone else max((d for d in depths if d is not None), default=None)
        for r in run:
            key: _Key = (r.seq_len, None, None, None)
            if r.seq_len is None:
                key = (None, None, None, r.n_depth) if alone and r.kind == "speed" else (None, n_ctx, ppl_ctx, depth)
            groups.setdefault(key, []).append(r)
    out: List[Place] = []
    for (seq_len, n_ctx, ppl_ctx, n_depth), members in groups.items():
        by_label: Dict[str, List[Row]] = {}
        for r in members:
            by_label.setdefault(r.config, []).append(r)
        lines = [_line(x) for x in by_label.values()]
        place = Place(seq_len, lines, n_ctx, ppl_ctx, n_depth)
        for x in lines:
            if place.f16 is not None:
                x.decode, x.rounds = _ratio(x, place.f16, generated=True)
                x.prefill, _ = _ratio(x, place.f16, generated=False)
        lines.sort(key=lambda x: (x.s.kv_bytes is None, -(x.s.kv_bytes or 0), x.s.kld or 0, x.s.config))
        out.append(place)
    return sorted(out, key=lambda p: p.length)


def _line(rows: List[Row]) -> Line:
    s = summarize(rows)[-1]
    line = Line(s, rows, s.ppl_change, s.ppl_change_se)
    q = line.last("quality")
    if line.ppl_change is None and q is not None and q.ppl_ratio is not None:
        # llama-perplexity's own estimate, paired by token
        line.ppl_change, line.ppl_change_se = q.ppl_ratio - 1, q.ppl_ratio_se
    line.differs = next((d for d in map(difference, rows) if d), "")
    return line


def difference(r: Row) -> str:
    """How the types that ran differ from those that were asked for; empty if they don't, or there is no cache."""
    if not r.kvq_key or not r.type_k:
        return ""
    try:
        q = KVQuant(r.kvq_key, r.kvq_val)
        n = sum(int(run[0]) for run in r.layer_types or [])
        if n:
            ran = [(str(k), str(v or "")) for count, k, v in r.layer_types or [] for _ in range(int(count))]
            same = all(k == a and v in (b, "") for (k, v), (a, b) in zip(ran, q.types(n)))
        else:  # exceptions by layer can't be placed without the layers
            asked = [{spec.default, *(t for _, t in spec.exceptions)} for spec in (q.key_spec, q.val_spec)]
            names = [set(re.findall(r"[a-z][a-z0-9_]+", t)) for t in (r.type_k, r.type_v)]
            same = names[0] <= asked[0] and names[1] <= asked[1]
    except (KVSplitError, ValueError, TypeError) as e:
        return f"{r.config}: what was asked, {r.kvq_key}/{r.kvq_val}, can't be understood ({e})"
    return "" if same else f"{r.config}: {r.kvq_key}/{r.kvq_val} was asked, {r.type_k}/{r.type_v} ran"


def _foreign(line: Line) -> bool:
    """True for lines that are there to compare with: another build, or variables that change how it computes."""
    return any(r.provenance.unpatched or r.provenance.environment for r in line.rows)


def _ratio(line: Line, base: Line, *, generated: bool) -> Tuple[Optional[Tuple[float, float, float]], int]:
    """Ratio of speeds to f16's in the same rounds with its interval, and how many rounds there are."""

    def speeds(x: Line) -> List[Row]:
        return [r for r in x.rows if r.kind == "speed" and bool(r.n_gen) == generated]

    if line is base:
        return None, 0
    return speed_ratio(speeds(line), speeds(base))


# ---- numbers


def plus_minus(value: float, se: float, *, sign: bool = False, digits: Optional[int] = None) -> str:
    """Mean and error, the error with one digit, or two where it begins with 1: ``0.00590 ± 0.00013``.

    Args:
        value, se: mean and standard error.
        sign: write the plus of a positive value.
        digits: decimals of both; None: as the error says.
    """
    if value == 0 and se == 0:
        return "0"
    if digits is None and se > 0:
        first = math.floor(math.log10(se))
        digits = min(6, max(0, -first + (se < 2 * 10.0**first)))
    elif digits is None:
        digits = 5
    return f"{_signed(value, digits, sign)} ± {se:.{digits}f}"


def _signed(value: float, digits: int, sign: bool = False) -> str:
    text = f"{value:.{digits}f}"
    zero = float(text) == 0
    return text.lstrip("-") if zero else f"+{text}" if sign and value > 0 else text


def no_break(text: str) -> str:
    """A number, its error and its unit stay on one line."""
    text = re.sub(r"(?<=\d)-(?=\d)", "\u2060–\u2060", re.sub(r" (?=[±%])|(?<=±) ", "\u00a0", text))
    return re.sub(r"(?<= )-(?=\d)", "-\u2060", text)


@dataclass(frozen=True)
class Cell:
    """A cell of a table; ``title`` says more, or why it is empty."""

    text: str
    title: str = ""
    kind: str = "num"


def _cell(value: Optional[float], digits: int, title: str = "", *, suffix: str = "") -> Cell:
    if value is None:
        return Cell("–", "not measured", "none")
    return Cell(f"{_signed(value, digits)}{suffix}", title)


def _pm_cell(
    value: Optional[float], se: Optional[float], *, percent: bool = False, digits: Optional[int] = None
) -> Cell:
    if value is None:
        return Cell("–", "not measured", "none")
    scale = 100 if percent else 1
    if se is None:
        return Cell(_signed(value * scale, 3, percent), "no error was recorded")
    return Cell(plus_minus(value * scale, se * scale, sign=percent, digits=digits))


def _speed_cells(ts: Optional[float], samples: Sequence[float], ratio: Optional[Tuple[float, float, float]],
                 base: bool) -> List[Cell]:  # fmt: skip
    title = f"median of {len(samples)}, {min(samples):.4g} to {max(samples):.4g}" if samples else ""
    speed = _cell(ts, 1, title)
    if ratio is not None:
        return [speed, Cell(f"{ratio[0]:.2f}x", ""), Cell(f"{ratio[1]:.2f}–{ratio[2]:.2f}")]
    if base and ts is not None:
        return [speed, Cell("1", "what the others are held against"), Cell("–", "no ratio to itself", "none")]
    why = "not measured" if ts is None else "no ratio: f16 was not measured in the same rounds, or too few rounds"
    return [speed, Cell("–", why, "none"), Cell("–", why, "none")]


@dataclass(frozen=True)
class Table:
    """A table of a page: ``heads`` are name, unit and explanation of each column."""

    caption: str
    heads: List[Tuple[str, str, str]]
    rows: List[List[Cell]]

    @property
    def is_text(self) -> List[bool]:
        """Of each column, whether it holds words."""
        return [any(row[i].kind in ("text", "config") for row in self.rows) for i in range(len(self.heads))]


def cost_table(place: Place) -> Table:
    """Memory and speed."""
    heads = [
        ("config", "", "keys and values, bits each"),
        ("stored as", "K/V", "types read back from the cache"),
        ("KV cache", "MiB", "allocated for keys and values"),
        ("saved", "%", "1 - bytes / bytes of f16"),
        ("compute buffers", "MiB", "scratch for intermediate results, over all backends"),
        ("peak RSS", "MiB", "largest resident memory of the process"),
        ("prefill", "t/s", "tokens per second of a prompt, median"),
        ("prefill", "to f16", "median of the ratios within rounds"),
        ("prefill", "interval", "encloses the median ratio with at least 90 % certainty from 5 rounds on"),
        ("decode", "t/s", "tokens per second one after the other, median"),
        ("decode", "to f16", "median of the ratios within rounds"),
        ("decode", "interval", "encloses the median ratio with at least 90 % certainty from 5 rounds on"),
    ]
    rows = []
    for x in place.lines:
        s = x.s
        mib = None if s.compute_bytes is None else s.compute_bytes / 2**20
        rss = None if s.peak_rss is None else s.peak_rss / 2**20
        rows.append([
            Cell(s.config, x.differs, "bad" if x.differs else "config"),
            Cell(f"{s.type_k or '–'}/{s.type_v or '–'}", x.differs, "bad" if x.differs else "text"),
            _cell(s.kv_mib, 2, f"{s.kv_bytes} bytes"),
            _cell(None if s.saving is None else 100 * s.saving, 1),
            _cell(mib, 1), _cell(rss, 0),
            *_speed_cells(s.prefill_ts, s.prefill_samples, x.prefill, x.is_f16),
            *_speed_cells(s.decode_ts, s.decode_samples, x.decode, x.is_f16),
        ])  # fmt: skip
    return Table(f"Memory and speed {place.where}", heads, rows)


def quality_table(place: Place) -> Table:
    """Quality and retrieval."""
    heads = [
        ("config", "", "keys and values, bits each"),
        ("PPL", "± SE", "perplexity of the text"),
        ("PPL change", "%, ± SE", "against f16, paired: both saw the same text"),
        ("KLD", "mean ± SE", "KL divergence from f16, nats per token"),
        ("KLD", "median", "nats per token"),
        ("KLD", "99.9 %", "nats; one token in a thousand is worse"),
        ("same top", "%", "tokens at which f16 and this pick the same word"),
        ("needles", "found", "numbers hidden in a long text that came back without a mistake"),
        ("first divergence", "tokens", "median of the tokens that greedy decoding shares with f16"),
    ]
    rows = []
    for x in place.lines:
        s = x.s
        broken = Cell("NaN", "attention gave NaN or infinity", "bad")
        needle = Cell("–", "not measured", "none")
        if s.needles and s.needles_found is not None:
            low, high = stats.wilson(s.needles_found, s.needles)
            needle = Cell(f"{s.needles_found} of {s.needles}", f"95 % interval: {100 * low:.0f} to {100 * high:.0f} %")
        first = Cell("–", "not measured", "none")
        if s.same_tokens:
            mid = statistics.median(s.same_tokens)
            whole = s.n_continued is not None and mid >= s.n_continued
            first = Cell(f"none in {s.n_continued}" if whole else f"{mid:g} of {s.n_continued}",
                         "of each prompt: " + ", ".join(map(str, s.same_tokens)))  # fmt: skip
        rows.append([
            Cell(s.config, x.differs, "bad" if x.differs else "config"),
            broken if s.finite is False else _pm_cell(s.ppl, s.ppl_se, digits=3),
            _pm_cell(x.ppl_change, x.ppl_change_se, percent=True),
            broken if s.finite is False else _pm_cell(s.kld, s.kld_se),
            _cell(s.kld_median, 5), _cell(s.kld_p999, 4),
            _cell(None if s.top1 is None else 100 * s.top1, 1),
            needle, first,
        ])  # fmt: skip
    return Table(f"Quality {place.where}", heads, rows)


def measured(table: Table) -> Tuple[Optional[Table], List[str]]:
    """A table without the columns that nothing was measured for, or None if nothing is left; and their names."""
    empty = [all(row[i].kind == "none" for row in table.rows) for i in range(len(table.heads))]
    names = [name for (name, _, _), e in zip(table.heads, empty) if e]
    kept = [name for (name, _, _), e in zip(table.heads, empty) if not e]
    gone = [n for n in dict.fromkeys(names) if n not in kept]
    if not any(c.kind == "num" for row in table.rows for c in row):
        return None, gone
    rows = [[c for c, e in zip(row, empty) if not e] for row in table.rows]
    return Table(table.caption, [h for h, e in zip(table.heads, empty) if not e], rows), gone


def _tables(place: Place) -> Tuple[Place, List[Table], List[str]]:
    """A place's tables, and what is to be said below them."""
    found = [measured(t) for t in (cost_table(place), quality_table(place))]
    gone = [n for _, names in found for n in names]
    said = how(place) + ([f"Not measured here: {', '.join(gone)}."] if gone else [])
    return place, [t for t, _ in found if t is not None], said


def how(place: Place) -> List[str]:
    """How the numbers of a place were measured, a sentence each."""
    out: List[str] = []
    rows = [r for x in place.lines for r in x.rows]

    def one(kind: str, *names: str) -> Dict[str, str]:
        mine = [r for r in rows if r.kind == kind]
        return {
            n: ", ".join(str(v) for v in sorted({getattr(r, n) for r in mine} - {None}, key=lambda v: (len(str(v)), v)))
            for n in names
        }

    q = one("quality", "text", "chunks", "ppl_ctx")
    if q["text"]:
        out.append(f"Quality: {q['text']}, {q['chunks']} chunks of {q['ppl_ctx']} tokens.")
        floor = place.floor
        out.append(
            "The noise floor is not known: f16 was not held against itself."
            if floor is None
            else f"f16 against itself has a mean KLD of {_signed(floor, 6)}: less than that means nothing."
        )
    sp = one("speed", "n_depth", "n_threads", "n_prompt", "n_gen")
    if sp["n_depth"]:
        counts = sorted({len(s) for x in place.lines for s in (x.s.decode_samples, x.s.prefill_samples) if s})
        words = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        tokens = [n for n in sp["n_prompt"].split(", ") if n != "0"], [n for n in sp["n_gen"].split(", ") if n != "0"]
        what = [f"prompts of {', '.join(tokens[0])} tokens"] if tokens[0] else []
        what += [f"{', '.join(tokens[1])} tokens decoded"] if tokens[1] else []
        out.append(
            f"Speed: medians of {words} samples, {' and '.join(what)} after {sp['n_depth']} tokens, "
            f"{sp['n_threads']} threads. Ratios to f16 are those within a round; from {SURE_ROUNDS} rounds on their "
            "interval encloses the median with at least 90 % certainty."
        )
    if any(r.kind == "retrieval" for r in rows):
        t = one("retrieval", "needle_trials")["needle_trials"]
        depths = max(len(r.needle_depths or []) for r in rows if r.kind == "retrieval")
        out.append(f"Needles: {depths} depths, {t} trials at each.")
    c = one("continuation", "n_gen")["n_gen"]
    if c:
        n = max(len(r.same_tokens or []) for r in rows if r.kind == "continuation")
        out.append(f"Divergence: greedy, {c} tokens after each of {n} prompt{'s'[: n != 1]}.")
    return out


# ---- figures


class Chart(Protocol):
    """What a page needs of a figure: see :class:`kvsplit.plots.Chart`."""

    name: str
    title: str
    note: str
    alt: str
    records: List[Dict[str, Any]]

    def svg(self, *, text: bool = True) -> str:
        """SVG to stand in HTML."""
        ...


_ID = re.compile(r'(\sid="|url\(#|href="#|\saria-labelledby="|\saria-describedby=")')
# a hundredth of a point is finer than any screen; a third of a figure's size is the decimals behind it
_COORDINATES = re.compile(r'\s(?:d|x|y|x1|x2|y1|y2|width|height|points)="[^"]*"')
_DECIMALS = re.compile(r"(\.\d\d)\d+")
_XLINK = "{http://www.w3.org/1999/xlink}href"


def inline_svg(svg: str, prefix: str) -> str:
    """An SVG that may stand in the page: nothing in it that runs or loads, ids with a prefix, no needless characters.

    Raises:
        ResultError: it is no SVG, or holds a script, a handler or a link to elsewhere.
    """
    start = svg.find("<svg")
    text = re.sub(r"<metadata>.*?</metadata>", "", svg[max(start, 0) :], flags=re.S).strip()
    try:
        root = ET.fromstring(text)
    except ET.ParseError as e:
        raise ResultError(f"a figure is no SVG: {e}") from None
    for element in root.iter():
        tag = str(element.tag).rpartition("}")[2].lower()
        if tag in ("script", "foreignobject", "iframe", "a"):
            raise ResultError(f"a figure holds <{tag}>")
        for name, value in element.attrib.items():
            link = name in ("href", _XLINK) and not value.startswith(("#", "data:image/"))
            if name.lower().startswith("on") or link:
                raise ResultError(f"a figure holds {name}={value[:40]!r}")
    used = set(re.findall(r"#([\w.-]+)", text))
    text = re.sub(r'\sid="([\w.-]+)"', lambda m: m[0] if m[1] in used else "", text)
    text = re.sub(r' transform="rotate\(-?0 [^"]*"', "", text)
    text = _COORDINATES.sub(lambda m: _DECIMALS.sub(r"\1", m[0]), text)
    text = re.sub(r"\n\s*", "\n", text)
    return _ID.sub(lambda m: m[1] + prefix, text)


def _value(v: Any) -> str:
    if v is None:
        return "–"
    if isinstance(v, bool):
        return "yes" if v else "no"
    if isinstance(v, float):
        return f"{v + 0.0:.6g}"  # no -0
    return v if isinstance(v, str) else json.dumps(v, ensure_ascii=False)


@dataclass(frozen=True)
class Figure:
    """A figure of a page; ``note`` is empty where the picture holds it already."""

    name: str
    title: str
    alt: str
    note: str
    svg: str
    heads: List[str]
    rows: List[List[str]]


def figures(charts: Iterable[Chart], prefix: str) -> List[Figure]:
    """Charts as they stand in a page, each with its data."""
    out: List[Figure] = []
    for i, c in enumerate(charts):
        heads = list(dict.fromkeys(k for r in c.records for k in r))
        rows = [[_value(r.get(h)) for h in heads] for r in c.records]
        svg = inline_svg(c.svg(), f"{prefix}{i}-")
        words = " ".join("".join(ET.fromstring(svg).itertext()).split())
        drawn = all(word in words for word in c.note.split())
        out.append(Figure(c.name, c.title, c.alt, "" if drawn else c.note, svg, heads, rows))
    return out


# ---- provenance


def provenance(rows: Sequence[Row]) -> List[List[Tuple[str, str]]]:
    """Of each run what its rows say of themselves: names and values."""
    out: List[List[Tuple[str, str]]] = []
    runs: Dict[Tuple[Any, ...], List[Row]] = {}
    for r in rows:
        p = r.provenance
        runs.setdefault((p.run_id, p.patches_sha256, p.library_sha256, p.environment, p.command), []).append(r)
    for members in runs.values():
        p = members[-1].provenance
        times = sorted(r.test_time for r in members if r.test_time)
        size = None if p.model_size is None else f"{p.model_size / 2**20:.1f} MiB"
        params = None if p.model_n_params is None else f"{p.model_n_params / 1e6:.1f} million parameters"
        kinds = Counter(r.kind for r in members)
        found: List[Tuple[str, Optional[str]]] = [
            ("run", p.run_id),
            ("command", p.command),
            ("measured", None if not times else times[0] if times[0] == times[-1] else f"{times[0]} to {times[-1]}"),
            ("rows", ", ".join(f"{n} {kind}" for kind, n in kinds.items())),
            ("model", ", ".join(x for x in (p.model_filename, p.model_type, size, params) if x)),
            ("model sha256", p.model_sha256),
            ("machine", ", ".join(x for x in (p.cpu_info, p.gpu_info, p.platform) if x)),
            ("backends", p.backends),
            ("kvsplit", f"{p.kvsplit_version}, Python {p.python}"),
            ("llama.cpp from", f"{p.lock}, sha256 {p.source_sha256}"),
            ("patches sha256", p.patches_sha256 or ("none: the unpatched release" if p.unpatched else None)),
            ("libraries sha256", p.library_sha256),
            ("set for it", p.environment),
            ("CPU features", p.system_info),
        ]
        out.append([(k, v) for k, v in found if v])
    return out


def asked_and_ran(section: Section) -> Table:
    """What was asked beside what ran, of every configuration."""
    heads = [
        ("config", "", ""), ("asked", "K", "SPEC of the keys"), ("asked", "V", "SPEC of the values"),
        ("ran", "K", "types read back from the cache"), ("ran", "V", "types read back from the cache"),
        ("layers", "", "layers that store keys and values, with their types"),
        ("rotation", "K/V", "size of the Hadamard matrices; 0: none"),
        ("attention", "prefill/decode", "where it runs"), ("as asked", "", ""),
    ]  # fmt: skip
    seen: Dict[Tuple[Any, ...], List[Row]] = {}
    for r in section.rows:
        if r.kvq_key:
            seen.setdefault((r.config, r.kvq_key, r.kvq_val, r.type_k, r.type_v), []).append(r)
    rows: List[List[Cell]] = []
    none = Cell("–", "not recorded", "none")
    for (config, key, val, k, v), members in seen.items():

        def last(name: str, members: List[Row] = members) -> Any:
            return next((x for r in reversed(members) if (x := getattr(r, name)) is not None), None)

        bad = next((d for d in map(difference, members) if d), "")
        layers, rot = last("layer_types"), last("layer_rotation")
        where = last("backend_prefill"), last("backend_decode")
        rows.append([
            Cell(config, "", "config"), Cell(key, "", "text"), Cell(val, "", "text"),
            Cell(k, bad, "bad" if bad else "text"), Cell(v or "–", bad, "bad" if bad else "text"),
            Cell("; ".join(f"{n} {a}/{b or '–'}" for n, a, b in layers), "", "text") if layers else none,
            Cell("; ".join(f"{a}/{b}" for _, a, b in rot), "", "text") if rot else none,
            Cell(f"{where[0] or '–'}/{where[1] or '–'}", "", "text") if any(where) else none,
            Cell("NO" if bad else "yes", bad, "bad" if bad else "text"),
        ])  # fmt: skip
    return Table("What was asked, and what ran", heads, rows)


def warnings(section: Section) -> List[str]:
    """What a reader must know before believing a number."""
    out = list(dict.fromkeys(d for d in map(difference, section.rows) if d))
    for r in section.rows:
        if r.kv_bytes_expected is not None and r.kv_bytes is not None and r.kv_bytes != r.kv_bytes_expected:
            out.append(f"{r.config}: {r.kv_bytes} bytes were allocated, {r.kv_bytes_expected} were computed")
    for place in section.places:
        at = place.where
        samples = {x.sample for x in place.lines if x.sample and not _foreign(x)}
        if len(samples) > 1:
            out.append(f"{at}: quality was measured on more than one text, length or build; they can't be compared")
        for what, name in (("threads", "n_threads"), ("depths", "n_depth")):
            used = {getattr(r, name) for x in place.lines for r in x.rows if r.kind == "speed"}
            if len(used) > 1:
                out.append(f"{at}: speeds were measured with different {what}")
        for x in place.lines:
            if x.s.finite is False:
                out.append(f"{at}: {x.s.config}: attention gave NaN or infinity")
    builds = {r.provenance.patches_sha256 for r in section.rows if not r.provenance.unpatched}
    if len(builds) > 1:
        out.append(f"rows come from {len(builds)} builds with different patches")
    return list(dict.fromkeys(out))


# ---- the page


@dataclass
class Report:
    """A page and what it says.

    Attributes:
        html: the whole file.
        verdicts: of each model and machine: that of the target, then the other two.
    """

    html: str
    verdicts: List[List[Verdict]]


def _choose(section: Section, target: Target, n_ctx: Optional[int]) -> Tuple[Verdict, List[Verdict]]:
    """The verdict at the length asked for, or at the longest that decides; and those at the other lengths."""
    every = [decide(section, p, target) for p in section.places]
    pool = every if n_ctx is None else [v for v in every if v.place.length == n_ctx]

    def worth(v: Verdict) -> Tuple[bool, bool, int, int]:
        # where nothing decides, the place that knows most
        return v.line is not None, v.decided, 0 if v.decided else _known(v.place), v.place.length

    best = max(pool, key=worth)
    return best, [v for v in every if v is not best]


def _known(place: Place) -> int:
    return sum(x.s.kld is not None for x in place.lines) + sum(x.s.decode_ts is not None for x in place.lines)


def make(
    rows: Sequence[Row],
    files: Sequence[Path] = (),
    *,
    title: Optional[str] = None,
    target: str = "balanced",
    n_ctx: Optional[int] = None,
    command: str = "",
    charts: Optional[Callable[[Sequence[Row]], Sequence[Chart]]] = None,
) -> Report:
    """Make a page.

    Args:
        rows: of any kinds, models and lengths.
        files: where they come from; their names and hashes stand in the page.
        title: of the page; None: the models' names.
        target: a name in :data:`TARGETS`.
        n_ctx: length of the verdict in tokens; None: the longest at which the rows decide.
        command: that made the page, to stand in it.
        charts: draws the rows of one model; None: :func:`kvsplit.plots.charts`.

    Raises:
        UsageError: ``target`` or ``n_ctx`` is none of those there are.
        ResultError: there are no rows.
    """
    import jinja2
    from markupsafe import Markup

    if target not in TARGETS:
        raise UsageError(f"--target: {target!r} is none of {', '.join(TARGETS)}")
    rows = [showable(r) for r in rows]
    title = None if title is None else printable(title)
    parts = [s for s in sections(rows) if s.places]
    if not parts:
        names = ", ".join(str(f) for f in files) or "the input"
        raise ResultError(
            f"{names}: no row of kind memory, speed, quality, retrieval or continuation; `kvsplit bench` writes them"
        )
    if charts is None:
        from kvsplit import plots

        charts = plots.charts
    if n_ctx is not None and not any(p.length == n_ctx for s in parts for p in s.places):
        have = ", ".join(str(n) for n in sorted({p.length for s in parts for p in s.places}))
        raise UsageError(f"--ctx: nothing was measured at {n_ctx} tokens; there are {have}")

    order = [TARGETS[target], *(t for t in TARGETS.values() if t.name != target)]
    shown: List[Dict[str, Any]] = []
    verdicts: List[List[Verdict]] = []
    for i, s in enumerate(parts):
        ctx = n_ctx if any(p.length == n_ctx for p in s.places) else None
        main, others = _choose(s, order[0], ctx)
        side = [decide(s, main.place, t) for t in order[1:]]
        verdicts.append([main, *side])
        tables = [_tables(p) for p in [main.place, *(p for p in s.places if p is not main.place)]]
        checks = list(dict.fromkeys(c.name for _, cs in main.checks for c in cs))
        grid = [(x.s.config, [next((c for c in cs if c.name == n), None) for n in checks]) for x, cs in main.checks]
        drawn = figures(charts(s.rows), f"s{i}-")
        shown.append({
            "section": s, "anchor": f"model-{i + 1}", "main": main, "side": side, "others": others,
            "warnings": warnings(s), "tables": tables, "figures": drawn, "checks": checks, "grid": grid,
            "provenance": provenance(s.rows), "asked": asked_and_ran(s),
            "bandwidth": _bandwidth(s.rows),
        })  # fmt: skip

    script, style = (
        (TEMPLATES / name).read_text(encoding="utf-8").strip() + "\n" for name in ("report.js", "report.css")
    )
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    env = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    env.filters["nb"] = no_break
    models = list(dict.fromkeys(s.model for s in parts))
    html = env.get_template("report.html").render(
        title=title or f"KV cache report: {_names(models)}",
        generator=f"{GENERATOR} {kvsplit.__version__}",
        policy=f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; "
        "base-uri 'none'; form-action 'none'",
        script=Markup(script),
        style=Markup(style),
        svg=Markup,
        parts=shown,
        target=order[0],
        targets=order,
        several=len(parts) > 1,
        command=printable(command),
        files=[(printable(f.name), hashlib.sha256(f.read_bytes()).hexdigest()) for f in files],
        n_rows=len(rows),
        limits={"chunks": MIN_CHUNKS, "enough": ENOUGH_CHUNKS, "rounds": SURE_ROUNDS, "se": N_SE},
    )
    return Report(html, verdicts)


def _bandwidth(rows: Sequence[Row]) -> str:
    """Bandwidth of the machine's memory in words; empty if not measured."""
    reads = [x for r in rows for x in r.read_bytes_per_s or []]
    copies = [x for r in rows for x in r.copy_bytes_per_s or []]
    if not reads or not copies:
        return ""
    return (
        f"The machine's memory, median of {len(reads)} tries: {statistics.median(reads) / 1e9:.1f} GB/s read, "
        f"{statistics.median(copies) / 1e9:.1f} GB/s copied."
    )


def is_ours(path: Path) -> bool:
    """True if a file is a page of this module."""
    try:
        with open(path, encoding="utf-8", errors="replace") as f:
            return f'<meta name="generator" content="{GENERATOR} ' in f.read(4096)
    except OSError:
        return False


def write(path: Path, html: str, *, force: bool = False) -> None:
    """Write a page aside, then give it its name.

    Args:
        path: the file; its folder is made.
        html: the page.
        force: replace a page that this module made before.

    Raises:
        UsageError: the file is there, and ``force`` is off or it is no page of ours.
        CacheFolderError: it can't be written.
    """

    def refuse() -> UsageError:
        if is_ours(path):
            return UsageError(f"--out: {path} is there already; choose another name, or replace it by --force")
        return UsageError(f"--out: {path} is there already and is no page of ours; choose another name")

    if os.path.lexists(path) and not (force and is_ours(path)):
        raise refuse()
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(part, "x", encoding="utf-8", errors="backslashreplace", newline="\n") as f:
                f.write(html)
                f.flush()
                os.fsync(f.fileno())
            if force:
                os.replace(part, path)
                return
            try:
                os.link(part, path)  # unlike a rename it never replaces what came meanwhile
            except FileExistsError:
                raise refuse() from None
            except OSError:  # no hard links here
                if os.path.lexists(path):
                    raise refuse() from None
                os.replace(part, path)
        finally:
            with contextlib.suppress(OSError):
                part.unlink()
    except OSError as e:
        raise CacheFolderError(f"--out: {path} can't be written ({why(e)})") from None
