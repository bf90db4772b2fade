# SPDX-License-Identifier: MIT
"""The sweep: quality of many pairs of types of keys and values, one row each, in a file that a later run continues.

Usage: sweep_pairs.py --model FILE [--model FILE] --text FILE --set pairs|formats --out results/NAME.jsonl

One f16 base is made per model; every configuration is held against it by llama-perplexity, and its row is on
the disk before the next one starts. What the file has already is not measured again: a row counts for the
same model, text, tokens and number of chunks, patches and types. After the run, or with --report alone,
tables go to stdout in Markdown, and a heat map of the pairs lies beside the file.

Differences between two configurations. All configurations see the same tokens, so the difference of two mean
KL divergences is far better known than their standard errors say: it is taken chunk by chunk, and its standard
error is the one of the mean of these differences (the paired t statistic is their ratio). llama-perplexity
prints the mean of the chunks 1 to n with 5 decimals, so the mean of chunk n comes from two printed values:

    chunk[n] = n*mean[n] - (n - 1)*mean[n - 1]

Rounding to 1e-5 has a standard deviation of 1e-5/sqrt(12), so chunk[n] has one of about 4e-6 * n. In the mean
of N chunks all this cancels, up to the rounding of the last mean, which is printed with 6 decimals. What stays is a
standard error that is on average too large: a part of 3.3e-6 * sqrt(N) (1.3e-5 for 16 chunks) is added in squares.
So a difference below about twice that can't be shown. With few chunks, 2 standard errors are less than 95 % of
certainty (8 chunks: 91 %, 16 chunks: 94 %, from Student's distribution).

Exit codes: 0 done, 1 failed (a configuration, or all), 2 wrong usage, 130 interrupted, 143 terminated.
"""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence, Tuple

from kvsplit import bench, models, native, plots, quality, runs, stats, tools
from kvsplit.cache_types import BITS, BY_NAME
from kvsplit.errors import (
    UnsupportedModelError,
    UsageError,
)
from kvsplit.gguf_meta import GGUFInfo, check_model
from kvsplit.memory import ModelShape, _shape
from kvsplit.models import sha256_file
from kvsplit.policy import F16, KVQuant
from kvsplit.results import Journal, Row, read_rows

#: Bits of the axes of the pairs.
AXIS = (16, 8, 6, 5, 4, 3, 2)

#: What shows our formats against upstream's, the most telling first.
FORMATS = (
    "f16/f16",
    "q4_0/q4_0",
    "kvq4/kvq4",
    "q8_0/q4_0",
    "q8_0/kvq4",
    "iq4_nl/iq4_nl",
    "q8_0/iq4_nl",
    "q8_0/q8_0",
    "kvq5/kvq5",
    "q5_0/q5_0",
    "q5_1/q5_1",
    "kvq6/kvq6",
    "kvq3/kvq3",
    "q8_0/kvq3",
    "q8_0/q5_0",
    "kvq2/kvq2",
)

SETS = ("pairs", "formats")


# ---- what to measure


def pair_set() -> Tuple[KVQuant, ...]:
    """Every pair of the widths in :data:`AXIS`, 49: equal widths first, then wide keys, then wide values."""

    def rank(pair: Tuple[int, int]) -> Tuple[int, int, int]:
        k, v = pair
        return (0 if k == v else 1 if k == 8 and v < 8 else 2 if k > v else 3, -k, -v)

    pairs = sorted(((k, v) for k in AXIS for v in AXIS), key=rank)
    return tuple(KVQuant.from_text(f"{k}/{v}", "--set") for k, v in pairs)


def config_set(name: str) -> Tuple[KVQuant, ...]:
    """Configurations of a set.

    Raises:
        UsageError: there is no such set.
        CacheTypeError: one of its types isn't known.
    """
    if name == "pairs":
        return pair_set()
    if name == "formats":
        return tuple(KVQuant.from_text(text, "--set") for text in FORMATS)
    raise UsageError(f"--set: {name!r} is none of {', '.join(SETS)}")


Key = Tuple[str, str, int, int, str, str, str]


def row_key(row: Row) -> Key:
    """What makes two rows the same measurement."""
    p = row.provenance
    return (
        p.model_sha256,
        row.text_sha256 or "",
        row.ppl_ctx or 0,
        row.chunks or 0,
        p.patches_sha256,
        row.kvq_key,
        row.kvq_val,
    )


# ---- chunk by chunk


def difference(a: Row, b: Row) -> Optional[stats.Difference]:
    """``a`` minus ``b`` in mean KL divergence, paired by chunk; see :func:`kvsplit.stats.difference`."""
    return stats.difference(a.kld_chunks, b.kld_chunks)


# ---- the run


@dataclass(frozen=True)
class Options:
    """What to measure and where it goes.

    Attributes:
        models: GGUF files.
        text: UTF-8 file; None means the one that every Python carries.
        plan: tokens of a chunk, chunks, threads.
        configs: in the order in which they are measured.
        out: JSONL file.
    """

    models: Tuple[Path, ...]
    text: Optional[Path]
    plan: quality.QualityPlan
    configs: Tuple[KVQuant, ...]
    out: Path


@dataclass
class Job:
    """One model's part.

    Attributes:
        model, info, sha256: the file.
        shape: None if its memory can't be computed.
        done: rows that are there already.
        todo: what is to be measured.
        floor: KLD of f16 against itself, if that was measured.
    """

    model: Path
    info: GGUFInfo
    sha256: str
    shape: Optional[ModelShape]
    done: List[Row] = field(default_factory=list)
    todo: List[KVQuant] = field(default_factory=list)
    floor: Optional[float] = None


def jobs(options: Options, rows: Iterable[Row], text: quality.Text, patches_sha256: str) -> List[Job]:
    """What is to be measured of each model.

    Raises:
        UsageError: a configuration or the plan doesn't fit a model.
        ModelFileError: a file is no model.
    """
    have = {row_key(r): r for r in rows if r.kind == "quality"}
    out: List[Job] = []
    for model in options.models:
        info = check_model(model)
        shape: Optional[ModelShape] = None
        try:
            shape = _shape(info)
        except UnsupportedModelError:
            pass
        trained = int(info.get("context_length", 0))
        if trained and options.plan.ppl_ctx > trained:
            raise UsageError(
                f"--ppl-ctx: {model.name} was trained on {trained} tokens, {options.plan.ppl_ctx} are more"
            )
        quality.check(options.plan, text)
        job = Job(model, info, sha256_file(model), shape)
        if any(job.sha256 == other.sha256 for other in out):
            continue

        def find(q: KVQuant, sha256: str = job.sha256) -> Optional[Row]:
            return have.get(
                (sha256, text.sha256, options.plan.ppl_ctx, options.plan.chunks, patches_sha256, q.key, q.val)
            )

        for q in options.configs:
            if shape is not None:
                bench.check_config(shape, q, options.plan.ppl_ctx)
            row = find(q)
            if row is not None:
                job.done.append(row)
            else:
                job.todo.append(q)
        f16 = find(F16)
        job.floor = None if f16 is None else f16.kld
        out.append(job)
    return out


@dataclass
class Outcome:
    """What a run did.

    Attributes:
        rows: all that was asked for and is there, old and new.
        new: how many of them this run measured.
        failures: a message for each configuration that could not be measured.
    """

    rows: List[Row] = field(default_factory=list)
    new: int = 0
    failures: List[str] = field(default_factory=list)


def run(
    options: Options,
    *,
    command: Sequence[str] = (),
    step: Callable[[str, float, float], None] = lambda what, i, n: None,
    say: Callable[[str], None] = lambda message: None,
) -> Outcome:
    """Measure what isn't there yet.

    A configuration that fails doesn't end the run: it has no row, so the next run tries it again. One whose
    attention gives NaN has a row that says so.

    Args:
        options: what and where.
        command: command line for the record.
        step: told what is being done, and how much of a model is finished.
        say: told what a user should know.

    Raises:
        KVSplitError: nothing can be measured; rows that were written stay.
    """
    lib = native.load()
    tools.check()
    res = Outcome()
    with quality.text_file(options.text) as text, Journal(options.out) as journal:
        if journal.cut:
            say(f"{options.out}: removed {journal.cut} bytes of a row that was not written to its end")
        step("sha256 of the models", 0, 0)
        run_id = runs.new_id()
        for job in jobs(options, journal.rows, text, lib.build.patches_sha256):

            def within(what: str, i: float, n: float, name: str = job.model.name) -> None:
                step(f"{name}: {what}", i, n)

            res.rows += job.done
            sweep = bench.Sweep(
                job.model, job.info, job.sha256, text, lib, journal, command, run_id, step=within, say=say
            )
            sweep.check(job.todo, options.plan.ppl_ctx)
            if job.todo:
                sweep.run([bench.Item("quality", q, options.plan) for q in job.todo])
            res.rows += sweep.new
            res.new += len(sweep.new)
            res.failures += sweep.failures
    return res


def dry_run(options: Options) -> str:
    """The plan as text; nothing is measured or written."""
    lib = native.load()
    out: List[str] = []
    with quality.text_file(options.text) as text:
        rows = read_rows(options.out) if options.out.exists() else []
        for job in jobs(options, rows, text, lib.build.patches_sha256):
            plan = options.plan
            base = quality.base_bytes(plan, quality.n_vocab(job.info)) / 2**20
            out.append(
                f"{job.model.name} (sha256 {job.sha256[:16]}...): {text.name}, {plan.chunks} chunks of {plan.ppl_ctx} "
                f"tokens, f16 base of {base:.0f} MiB, {len(job.done)} done, {len(job.todo)} to do"
            )
            for q in options.configs:
                bits = "" if q.per_layer else f"  {q.bits_per_value():.2f} bits"
                out.append(f"  {'to do' if q in job.todo else 'done':<6} {q.text:<16}{bits}")
    return "\n".join(out) + "\n"


# ---- the report


def _number(value: Optional[float], digits: int = 5, sign: bool = False) -> str:
    # + 0.0: no -0.00000
    return "-" if value is None else f"{round(value, digits) + 0.0:{'+' if sign else ''}.{digits}f}"


def _with_se(value: Optional[float], se: Optional[float], digits: int = 5) -> str:
    return _number(value, digits) if value is None or se is None else f"{_number(value, digits)} ± {se:.{digits}f}"


def _kld(row: Row) -> str:
    return "NaN" if row.finite is False else _with_se(row.kld, row.kld_se)


def _table(head: str, align: str, rows: Iterable[Sequence[str]]) -> List[str]:
    marks = {"l": "---", "r": "---:", "c": ":---:"}
    return [f"| {head} |", f"|{'|'.join(marks[a] for a in align)}|", *(f"| {' | '.join(r)} |" for r in rows)]


def _name(row: Row) -> str:
    return f"{row.kvq_key}/{row.kvq_val}"


def _ours(row: Row) -> bool:
    return "kvq" in _name(row)


def references(row: Row, rows: Sequence[Row]) -> List[Row]:
    """What a configuration with one of our formats is held against: pairs of upstream's types alone.

    Those whose cache has the same size to the byte; and those of the next larger size. f16 is none: all others
    are measured against it already.
    """
    theirs = [r for r in rows if not _ours(r) and _name(r) != F16.text and r.kv_bytes and r.kld is not None]
    size = row.kv_bytes or 0
    larger = min((r.kv_bytes or 0 for r in theirs if (r.kv_bytes or 0) > size), default=None)
    return [r for r in theirs if r.kv_bytes == size] + [r for r in theirs if r.kv_bytes == larger]


def _verdict(d: Optional[stats.Difference], better: str = "better", worse: str = "worse") -> str:
    if d is None:
        return "-"
    return "no" if not d.beyond else f"yes, {better if d.mean < 0 else worse}"


def _versus(a: Row, b: Row, *words: str) -> List[str]:
    """Ratio, paired difference, and whether it is beyond 2 standard errors."""
    ratio = a.kld / b.kld if a.kld is not None and b.kld is not None and b.kld > 0 else None
    d = difference(a, b)
    diff = "-" if d is None else f"{_number(d.mean, 5, True)} ± {d.se:.5f}"
    return [_number(ratio, 3), diff, _verdict(d, *words)]


# perplexity.cpp stores no logit more than 16 below the largest
_CLAMPED = (
    "PPL ratio: against the base, in which llama-perplexity clamps what is less than 1e-7 times as likely as the "
    "likeliest token; f16's own ratio shows what that does, and all configurations share it."
)


def formats_report(rows: Sequence[Row]) -> List[str]:
    """All configurations of one model, then ours against those of the same and of the next larger size."""
    rows = sorted(rows, key=lambda r: (-(r.kv_bytes or 0), _ours(r), _name(r)))
    lines = _table(
        "K/V | bits per value | KLD ± SE | median | 99.9 % | max | PPL ratio ± SE | same top",
        "lrrrrrrr",
        (
            [
                _name(r), _number(r.bits_per_value, 2), _kld(r), _number(r.kld_median), _number(r.kld_p999, 3),
                _number(r.kld_max, 3), _with_se(r.ppl_ratio, r.ppl_ratio_se),
                "-" if r.top1 is None else f"{100 * r.top1:.2f} %",
            ]
            for r in rows
        ),
    )  # fmt: skip
    pairs = [(a, b) for a in rows if _ours(a) for b in references(a, rows)]
    if pairs:
        lines.append("")
        lines += _table(
            "K/V | bits | KLD ± SE | against | bits | its KLD ± SE | ratio | paired difference ± SE | beyond 2 SE",
            "lrrlrrrrl",
            (
                [_name(a), _number(a.bits_per_value, 2), _kld(a), _name(b), _number(b.bits_per_value, 2), _kld(b),
                 *_versus(a, b)]
                for a, b in pairs
            ),
        )  # fmt: skip
    return lines


def grid(rows: Iterable[Row]) -> Dict[Tuple[int, int], Row]:
    """The rows that are pairs of widths, by bits of keys and values."""
    bits = {BITS[b]: b for b in AXIS if b in BITS}
    return {(bits[r.kvq_key], bits[r.kvq_val]): r for r in rows if r.kvq_key in bits and r.kvq_val in bits}


def _short(row: Optional[Row]) -> str:
    """KLD with three digits that count; where nothing was measured a dash."""
    if row is None:
        return "-"
    return "NaN" if row.kld is None else plots.short_number(row.kld)


def pairs_report(rows: Sequence[Row]) -> List[str]:
    """The table of all pairs of widths; what no other pair beats; wide keys against wide values."""
    cells = grid(rows)
    lines = _table(
        "keys \\ values | " + " | ".join(f"V{v}" for v in AXIS),
        "l" + "r" * len(AXIS),
        ([f"K{k}", *(_short(cells.get((k, v))) for v in AXIS)] for k in AXIS),
    )
    measured = [r for r in cells.values() if r.kld is not None and r.kv_bytes is not None]
    front = plots.pareto([(float(r.kv_bytes or 0), float(r.kld or 0)) for r in measured])
    names = [
        f"{measured[i].config} ({_number(measured[i].bits_per_value, 2)} bits, {_short(measured[i])})" for i in front
    ]
    lines += ["", "No other pair is both smaller and better than these: " + ", ".join(names) + "."]
    both = [(a, b) for a in AXIS for b in AXIS if a > b and (a, b) in cells and (b, a) in cells]
    if both:
        lines.append("")
        lines += _table(
            "wide keys | KLD ± SE | wide values | KLD ± SE | ratio | paired difference ± SE | beyond 2 SE",
            "lrlrrrl",
            (
                [x.config, _kld(x), y.config, _kld(y), *_versus(x, y, "wide keys are better", "wide values are better")]
                for x, y in ((cells[a, b], cells[b, a]) for a, b in both)
            ),
        )
    return lines


def _groups(rows: Iterable[Row]) -> List[List[Row]]:
    """Rows that may be compared: of one model, text, plan and build. A later row of the same types replaces one."""
    out: Dict[Tuple[Any, ...], Dict[Tuple[str, str], Row]] = {}
    for r in rows:
        if r.kind == "quality":
            key = row_key(r)
            out.setdefault(key[:5], {})[key[5:]] = r
    return [list(g.values()) for g in out.values()]


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "-", Path(name).stem).strip("-").lower()


def report(rows: Iterable[Row], which: Sequence[str], figures: Optional[Path] = None) -> Tuple[str, List[Path]]:
    """Tables in Markdown, and a heat map for each model.

    Args:
        rows: those of other kinds are left out.
        which: of :data:`SETS`; pairs are left out where fewer than four were measured.
        figures: start of the figures' names, for example ``results/sweep``; None draws none.

    Returns:
        The text, and the figures that were written.
    """
    lines: List[str] = []
    written: List[Path] = []
    names: Dict[str, int] = {}
    for group in _groups(rows):
        first = group[0]
        where = first.backend_prefill or "an unknown backend"
        caption = f"{first.text}, {first.chunks} chunk{'s'[: first.chunks != 1]} of {first.ppl_ctx} tokens"
        floor = next((r.kld for r in group if (r.kvq_key, r.kvq_val) == (F16.key, F16.val)), None)
        lines += [f"### {first.provenance.model_filename}", ""]
        lines.append(
            f"{caption}; attention on {where}. KLD: mean KL divergence from f16 of the same build, in nats per token"
            + ("." if floor is None else f"; f16 against itself has {_number(floor, 6)}.")
        )
        lines.append("")
        if "formats" in which:
            lines += [*formats_report(group), ""]
            if floor is not None:
                lines += [_CLAMPED, ""]
        cells = grid(group)
        if "pairs" in which and len(cells) >= 4:
            lines += [*pairs_report(group), ""]
            if figures is not None:
                slug = _slug(first.provenance.model_filename)
                names[slug] = names.get(slug, 0) + 1
                number = "" if names[slug] == 1 else f"-{names[slug]}"
                path = figures.with_name(f"{figures.name}-{slug}{number}-pairs.svg")
                import matplotlib

                with matplotlib.rc_context({"text.parse_math": False}):  # names of files are no formulas
                    plots.pair_heat_map(
                        {k: r.kld for k, r in cells.items()},
                        {b: (BITS[b], BY_NAME[BITS[b]].bits_per_value) for b in AXIS if b in BITS},
                        path,
                        model=Path(first.provenance.model_filename).stem,
                        note=f"text: {caption}; attention on {where}",
                    )
                written.append(path)
    if not lines:
        return "No row was measured yet.\n", written
    return "\n".join(lines).rstrip() + "\n", written


# ---- the command


def _parser() -> argparse.ArgumentParser:
    def positive(text: str) -> int:
        n = int(text)
        if n < 1:
            raise ValueError(text)
        return n

    doc = __doc__ or ""
    p = argparse.ArgumentParser(
        prog="sweep_pairs.py", description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    p.add_argument(
        "--model", "-m", action="append", metavar="FILE", help="GGUF file or name of a pulled model; repeatable"
    )
    p.add_argument("--text", type=Path, metavar="FILE", help="UTF-8 text (default: one that every Python carries)")
    p.add_argument("--ppl-ctx", type=positive, default=2048, metavar="N", help="tokens of a chunk (2048)")
    p.add_argument("--chunks", type=positive, default=16, metavar="N", help="chunks (16)")
    p.add_argument(
        "--set", choices=SETS, help="pairs: all 49 pairs of 16 8 6 5 4 3 2 bits; formats: ours and upstream's"
    )
    p.add_argument(
        "--config", action="append", metavar="LIST", help="configurations instead of a set: F16,K8V4 or K/V;K/V"
    )
    p.add_argument("--out", type=Path, required=True, metavar="FILE", help="JSONL; a run appends what it lacks")
    p.add_argument("--threads", "-t", type=positive, metavar="N", help="threads")
    p.add_argument("--dry-run", action="store_true", help="print the plan and end")
    p.add_argument(
        "--report", action="store_true", help="print the tables of --out and draw its figure, measure nothing"
    )
    return p


def _show(rows: Sequence[Row], which: Sequence[str], out: Path) -> None:
    text, files = report(rows, which, out.with_suffix(""))
    sys.stdout.write(text)
    sys.stdout.flush()
    for f in files:
        print(f"wrote {f}", file=sys.stderr)


def _main(args: argparse.Namespace) -> int:
    if args.set and args.config:
        raise UsageError("--config: give it or --set, not both")
    which = (args.set,) if args.set else SETS
    if args.report:
        if args.model or args.config or args.dry_run:
            raise UsageError("--report: takes only --out and --set; without it the same options measure")
        rows = read_rows(args.out)
        if args.set:
            wanted = {(q.key, q.val) for q in config_set(args.set)}
            rows = [r for r in rows if (r.kvq_key, r.kvq_val) in wanted]
        _show(rows, which, args.out)
        return 0
    if not args.model:
        raise UsageError("--model: a sweep needs a model")
    if not (args.set or args.config):
        raise UsageError("--set: give a set or --config")
    configs = config_set(args.set) if args.set else bench.parse_configs(args.config)
    plan = quality.QualityPlan(args.ppl_ctx, args.chunks, args.threads)
    o = Options(tuple(models.resolve(m) for m in args.model), args.text, plan, configs, args.out)
    if args.dry_run:
        sys.stdout.write(dry_run(o))
        return 0
    with runs.Progress() as progress:
        res = run(o, command=runs.command_line(), step=progress.step, say=progress.say)
    print(f"{res.new} measured, {len(res.rows) - res.new} were there, {len(res.failures)} failed", file=sys.stderr)
    _show(res.rows, which, args.out)
    return 1 if res.failures else 0


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command line and return its exit code; errors become one line on stderr."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    args = _parser().parse_args(argv)
    return runs.script("sweep_pairs.py", lambda: _main(args), f"what was measured is in {args.out}")


if __name__ == "__main__":
    sys.exit(main())
