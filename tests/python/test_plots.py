# SPDX-License-Identifier: MIT
"""The figures that rows become: what is drawn, what is missing, how they look to everybody, and the files."""

from __future__ import annotations

import itertools
import json
import math
import random
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from typing import Any, Dict, List, Sequence, Tuple

import made_up_rows
import numpy as np
import pytest
from made_up_rows import CONFIGS, LENGTHS

from kvsplit import cli, figures, plots, report, results
from kvsplit.errors import CacheFolderError, UsageError
from kvsplit.figures import FIGURES
from kvsplit.plots import Chart
from kvsplit.results import Journal, Row

# ---- rows that nobody measured


def made_up(**kw: Any) -> List[Row]:
    """Rows as a sweep and ``kvsplit inspect`` write them: several samples a round, layers of f16 and at all lengths."""
    kinds = tuple(k for k in made_up_rows.KINDS if k != "bandwidth")
    return made_up_rows.rows(**{"kinds": kinds, "rounds": 3, "samples": 2, "all_layers": True, **kw})


def of_model(name: str) -> Dict[str, str]:
    """What tells a model's rows from another's."""
    return {"model_filename": name, "model_sha256": f"sha of {name}"}


def with_gaps() -> List[Row]:
    """Rows of a sweep in which much is missing."""

    def lost(r: Row) -> bool:
        return (
            (r.config == "K6V3" and r.seq_len == 4096)
            or (r.config == "K4V8" and r.kind != "memory")
            or (r.config == "K4V4" and r.kind in ("memory", "layer"))
            or (r.config == "K8V4" and r.kind == "layer" and r.layer in (5, 6))
        )

    return [r for r in made_up() if not lost(r)]


@pytest.fixture(scope="module")
def full() -> Dict[str, Chart]:
    """All figures of rows in which nothing is missing."""
    return {c.name: c for c in plots.charts(made_up())}


@pytest.fixture(scope="module")
def pages(full: Dict[str, Chart]) -> Dict[str, str]:
    """They as a page holds them."""
    return {name: c.svg() for name, c in full.items()}


@pytest.fixture(scope="module")
def gappy() -> Dict[str, Chart]:
    """All figures of rows in which much is missing."""
    return {c.name: c for c in plots.charts(with_gaps())}


def write(path: Path, rows: Sequence[Row]) -> Path:
    with Journal(path) as journal:
        for r in rows:
            journal.write(r)
    return path


# ---- what is drawn


def test_every_figure_that_has_data_is_drawn(full: Dict[str, Chart]) -> None:
    assert list(full) == list(FIGURES)
    for c in full.values():
        assert c.kind == c.name and c.model == "made-up.gguf" and "made-up" in c.title
        assert c.alt.endswith(".") and re.search(r"\d", c.alt) and "\n" not in c.alt
        assert c.records and all(set(r) == set(c.records[0]) for r in c.records) and c.hover
        json.dumps(c.records, allow_nan=False)


def test_what_is_drawn_is_what_the_rows_say(full: Dict[str, Chart]) -> None:
    rows = made_up()
    memory = {(r.config, r.n_ctx): r for r in rows if r.kind == "memory"}
    for d in full["memory"].records:
        r = memory.pop((d["config"], d["n_ctx"]))
        assert d["kv_mib"] == (r.kv_bytes or 0) / 2**20 and d["saving"] == r.saving
        assert d["compute_mib"] == (r.compute_bytes or 0) / 2**20
    quality = {(r.config, r.seq_len): r for r in rows if r.kind == "quality"}
    for d in full["tradeoff"].records:
        r = quality.pop((d["config"], d["length"]))
        assert (d["kld"], d["kld_se"]) == (r.kld, r.kld_se) and d["n_ctx"] == r.seq_len
    layers = {(r.config, r.layer): r for r in rows if r.kind == "layer" and r.seq_len == 8192}
    for d in full["layers"].records:
        r = layers.pop((d["config"], d["layer"]))
        assert (d["output_nse"], d["k_nse"], d["v_nse"]) == (r.output_nse, r.k_nse, r.v_nse)
    needles = {(r.config, r.seq_len): r for r in rows if r.kind == "retrieval"}
    for d in full["retrieval"].records:
        r = needles[d["config"], d["seq_len"]]
        at = (r.needle_depths or []).index(d["needle_depth"])
        assert d["found"] == (r.needle_found or [])[at] and d["trials"] == 8
    assert not memory and not quality and not layers and len(full["retrieval"].records) == 7 * 3 * 5


def test_speeds_are_medians_and_quartiles_of_all_rounds(full: Dict[str, Chart]) -> None:
    samples: Dict[Tuple[str, str, int], List[float]] = {}
    for r in [r for r in made_up() if r.kind == "speed"]:
        samples.setdefault((r.config, "decode" if r.n_gen else "prefill", r.n_depth or 0), []).extend(
            r.samples_ts or []
        )
    assert len(full["speed"].records) == len(samples) == 7 * 2 * 3
    for d in full["speed"].records:
        s = samples[d["config"], d["what"], d["n_depth"]]
        assert d["samples"] == len(s) == 6
        assert [d["low_ts"], d["median_ts"], d["high_ts"]] == pytest.approx(np.percentile(s, [25, 50, 75]))
        base = samples["F16", d["what"], d["n_depth"]]  # the machine drifts: a ratio is one of the same round
        assert d["ratio_f16"] == pytest.approx(np.median(np.divide(s, base)))


def test_ratios_are_those_of_the_report() -> None:
    rows = made_up(kinds=("memory", "speed"), rounds=6, samples=1)
    # one more run, of more rounds; and rounds that one of the two lacks
    again = made_up(kinds=("speed",), rounds=9, samples=1, seed=2, run_id="another run")
    upstream = [replace(r, config="upstream F16") for r in again if r.config == "F16"]
    rows = upstream + [
        r for r in [*rows, *again]
        if not (r.config == "K6V3" and (r.round or 0) > 1)  # 2 rounds in each of two runs: told
        and not (r.config == "K4V4" and r.kind == "speed" and (r in again or r.round not in (1, 4)))
        and not (r.config == "F16" and r.n_gen and r.round == 3)
    ]  # fmt: skip
    (section,) = report.sections(rows)
    want: Dict[Tuple[str, str, int], Any] = {}
    for place in section.places:
        for line in place.lines:
            for what, ratio in (("decode", line.decode), ("prefill", line.prefill)):
                want[line.s.config, what, int(line.s.n_depth or 0)] = ratio and ratio[0]
    drawn = {c.name: c for c in plots.charts(rows, ["speed", "summary"])}
    seen = set()
    for d in drawn["speed"].records:
        at = (d["config"], d["what"], d["n_depth"])
        if d["config"] != "F16":  # the report has none of f16 to itself
            assert d["ratio_f16"] == want[at], at
        seen.add(at)
    assert seen == set(want)
    # 2 rounds are too few for a ratio
    assert want["K4V4", "decode", 7936] is None and want["K8V4", "decode", 7936] is not None
    for d in drawn["summary"].records:
        ratio = want[d["config"], "decode", 7936]
        said = d["decode"].split("x")[0] if "x" in d["decode"] else None
        assert d["config"] == "F16" or said == (None if ratio is None else f"{ratio:.2f}"), d
    # of medians, the ratio would be another: the machine drifts
    medians = {
        d["config"]: d["median_ts"] for d in drawn["speed"].records if (d["what"], d["n_depth"]) == ("decode", 7936)
    }
    assert abs(medians["K6V3"] / medians["F16"] / want["K6V3", "decode", 7936] - 1) > 0.02


def test_keys_and_values_are_compared_at_equal_bytes(full: Dict[str, Chart]) -> None:
    c = full["sensitivity"]
    assert [(d["config"], d["wider"], d["length"]) for d in c.records] == [
        (name, side, n) for n in LENGTHS for name, side in (("K8V4", "keys"), ("K4V8", "values"))
    ]
    kld = {(r.config, r.seq_len): r.kld for r in made_up() if r.kind == "quality"}
    mean = np.exp(np.mean([np.log(kld["K4V8", n] / kld["K8V4", n]) for n in LENGTHS]))  # type: ignore[operator]
    assert f"geometric mean {mean:.1f}x" in c.note and "Keys need more bits" in c.title
    swapped = [replace(r, kvq_key=r.kvq_val, kvq_val=r.kvq_key, config={"K8V4": "K4V8", "K4V8": "K8V4"}[r.config])
               for r in made_up(configs=("K8V4", "K4V8"), kinds=("quality",))]  # fmt: skip
    (other,) = plots.charts(swapped, ["sensitivity"])
    assert "Keys need" not in other.title and "don't need more" in other.alt


def test_the_largest_length_is_in_the_summary(full: Dict[str, Chart]) -> None:
    rows = {d["config"]: d for d in full["summary"].records}
    assert list(rows) == ["F16", "K8V8", "K8V4", "K4V8", "K6V5", "K6V3", "K4V4"]  # by width, the keys' first
    assert rows["K8V4"]["KV cache"] == "73.1 59.4 % less" and rows["F16"]["KV cache"] == "180.0"
    assert rows["K4V4"]["KV cache, best"] and not rows["F16"]["KV cache, best"]
    assert rows["K8V8"]["KLD, best"] and not rows["K8V4"]["KLD, best"]
    (quality,) = [r for r in made_up() if r.kind == "quality" and r.config == "K8V4" and r.seq_len == 8192]
    assert rows["K8V4"]["PPL change"] == (
        f"{100 * (quality.ppl_change or 0):+.2f} % ± {100 * (quality.ppl_change_se or 0):.2f}"
    )
    assert set(FIGURES) <= set(full) and "★" in "".join(t.get_text() for t in full["summary"].figure.axes[0].texts)


def test_the_best_are_those_that_the_error_does_not_tell_apart() -> None:
    m = figures.Model("m", f16=["F16"])
    cells = {"F16": figures.Cell("", "", 0.0), "A": figures.Cell("", "", 1.0, 0.3), "B": figures.Cell("", "", 1.5, 0.4),
             "C": figures.Cell("", "", 1.51, 0.4), "D": figures.Cell("", "", None)}  # fmt: skip
    assert figures._best(m, cells) == ["A", "B"]  # 0.5 is within the 0.5 of both errors, 0.51 isn't
    assert figures._best(m, {"A": cells["A"], "B": cells["B"]}) == []  # all alike: none is marked


@pytest.mark.parametrize(
    ("kinds", "names"),
    [
        (("memory",), ["summary", "memory"]),
        (("speed",), ["summary", "speed"]),
        (("quality",), ["summary", "pairs", "sensitivity"]),
        (("layer",), ["layers"]),
        (("retrieval",), ["summary", "retrieval"]),
        (("continuation",), ["summary"]),
        ((), []),
    ],
)
def test_rows_of_one_kind_give_the_figures_that_they_can(kinds: Sequence[str], names: List[str]) -> None:
    for configs in (CONFIGS, CONFIGS[:1], CONFIGS[2:3]):
        drawn = [c.name for c in plots.charts(made_up(configs=configs, lengths=(2048,), kinds=kinds))]
        many = [n for n in names if configs == CONFIGS or n not in ("pairs", "sensitivity")]
        assert drawn == many


def test_a_machines_bandwidth_is_no_configuration() -> None:
    (row,) = made_up_rows.rows(kinds=("bandwidth",))
    assert plots.charts([row]) == []
    (c,) = plots.charts([row, *made_up(kinds=("memory",))], ["memory"])
    assert "machine" not in c.note


def test_each_model_has_figures_of_its_own() -> None:
    rows = [
        r for name in ("A b.gguf", "a_b.gguf") for r in made_up(lengths=(2048,), kinds=("memory",), **of_model(name))
    ]
    drawn = plots.charts(rows, ["memory"])
    assert [c.name for c in drawn] == ["memory-a-b", "memory-a-b-2"]
    assert [c.model for c in drawn] == ["A b.gguf", "a_b.gguf"] and len({c.title for c in drawn}) == 2
    assert plots.charts(rows, ["memory"], title="Both")[0].title.endswith(": Both")


def test_rows_measured_anew_and_other_samples() -> None:
    rows = made_up(lengths=(2048,), kinds=("memory", "quality"))
    again = [replace(r, kld=0.5, kld_se=0.0) for r in rows if r.kind == "quality" and r.config == "K8V4"]
    (c,) = plots.charts([*rows, *again], ["tradeoff"])
    assert [d["kld"] for d in c.records if d["config"] == "K8V4"] == [0.5]
    (c,) = plots.charts([*rows, *(replace(r, chunks=99) for r in again)], ["tradeoff"])
    assert 0.5 not in [d["kld"] for d in c.records]  # of another sample, which the others don't have


def test_rows_without_a_length_use_their_kinds_own(repo: Path) -> None:
    rows = results.read_rows(repo / "results" / "smollm2-linux-cpu.jsonl")
    drawn = {c.name: c for c in plots.charts(rows)}
    assert list(drawn) == ["summary", "memory", "tradeoff", "speed", "pairs"]
    (s,) = [x for x in results.summarize(rows) if x.config == "K8V4"]
    (d,) = [x for x in drawn["tradeoff"].records if x["config"] == "K8V4"]
    assert (d["kv_mib"], d["kld"], d["length"], d["n_ctx"]) == (s.kv_mib, s.kld, 2048, 8192)
    assert "quality at 2048 tokens, memory at 8192" in drawn["tradeoff"].note
    (d,) = [x for x in drawn["speed"].records if x["config"] == "K8V4" and x["what"] == "decode"]
    assert d["median_ts"] == s.decode_ts and d["samples"] == len(s.decode_samples) and d["n_depth"] == 256


def test_an_error_that_is_not_zero_is_not_called_zero() -> None:
    assert figures._pm(0.000004, 5) == "± <0.00001" and figures._pm(0.0, 5) == "± 0"
    assert figures._pm(0.000012, 5) == "± 0.00001" and figures._pm(0.0123, 5) == "± 0.0123"
    assert figures._pm(0.00004, 2, 100) == "± <0.01" and figures._pm(0.0, 2, 100) == "± 0.00"


# ---- what is missing


def test_what_is_missing_is_named(gappy: Dict[str, Chart], full: Dict[str, Chart]) -> None:
    assert set(gappy) == set(FIGURES) - {"sensitivity"}
    assert "not measured: K6V3 at 4k" in gappy["memory"].note and "no memory rows: K4V4" in gappy["memory"].note
    assert "K4V8 at 2k, 4k, 8k" in gappy["tradeoff"].note and "K6V3 at 4k" in gappy["tradeoff"].note
    assert "not measured: K6V3 at 3840" in gappy["speed"].note and "no prefill: K4V8" in gappy["speed"].note
    assert "K8V4: 5, 6" in gappy["layers"].note and "no layer rows: K4V8, K4V4" in gappy["layers"].note
    assert (
        "not measured: K6V3 at 4k" in gappy["retrieval"].note and "no retrieval rows: K4V8" in gappy["retrieval"].note
    )
    assert "hatched: not measured" in gappy["summary"].note and "14 of 20 pairs" in gappy["pairs"].note
    for name in ("memory", "speed", "layers", "retrieval", "summary"):
        assert "not measured" not in full[name].note


def test_what_is_missing_is_a_gap_and_a_mark(gappy: Dict[str, Chart], full: Dict[str, Chart]) -> None:
    def lines(c: Chart, color: str) -> List[Any]:
        return [x for x in c.figure.axes[0].lines if x.get_color() == color and len(x.get_xdata()) > 1]

    (line,) = lines(gappy["memory"], plots.style("K6V3").color)
    assert list(line.get_xdata()) == list(LENGTHS) and [math.isnan(y) for y in line.get_ydata()] == [False, True, False]
    for c, n in (
        (gappy["memory"], 1),
        (gappy["speed"], 2),
        (gappy["layers"], 2),
        (gappy["tradeoff"], 1),
        (full["memory"], 0),
    ):
        crosses = [x for ax in c.figure.axes for x in ax.lines if x.get_marker() == "x"]
        assert len(crosses) == n, c.name
    (d,) = [d for d in gappy["memory"].records if d["config"] == "K6V3" and d["n_ctx"] == 4096]
    assert d["kv_mib"] is None

    def hatched(c: Chart) -> int:
        return sum(p.get_hatch() == "////" for ax in c.figure.axes for p in ax.patches)

    assert hatched(gappy["retrieval"]) == 5 and hatched(full["retrieval"]) == 0
    assert hatched(gappy["pairs"]) == 14 and hatched(full["pairs"]) == 13
    # K4V8 has memory alone of six columns; of K4V4 memory is missing
    assert hatched(gappy["summary"]) == len([k for k in gappy["summary"].records[0] if k.endswith(", best")]) - 1 + 1
    assert hatched(full["summary"]) == 0


def test_attention_that_broke_down_is_said() -> None:
    rows = [
        replace(r, finite=False, ppl=None, ppl_se=None, ppl_change=None, kld=None, kld_se=None, top1=None)
        if r.kind == "quality" and r.config == "K4V8" else r
        for r in made_up(lengths=(2048,), kinds=("memory", "quality"))
    ]  # fmt: skip
    drawn = {c.name: c for c in plots.charts(rows)}
    assert "K4V8 at 2k: attention gave NaN" in drawn["tradeoff"].note and "gave NaN" in drawn["pairs"].note
    assert [d["KLD"] for d in drawn["summary"].records if d["config"] == "K4V8"] == ["NaN"]
    assert "sensitivity" not in drawn


def test_little_and_odd_rows_are_drawn() -> None:
    rows = made_up(configs=("F16", "K8V4", "K4V8", "K4V4"), lengths=(2048,), kinds=("memory", "speed", "quality"))
    nothing = [replace(r, kld=0.0, kld_se=0.0) if r.kind == "quality" else r for r in rows]
    assert {c.name for c in plots.charts(nothing)} == set(FIGURES) - {"layers", "retrieval"}
    once = [replace(r, samples_ts=[9.0], round=None, n_depth=0) for r in rows if r.kind == "speed"]
    (c,) = plots.charts(once, ["speed"])
    assert c.note == "one sample, no spread" and {d["samples"] for d in c.records} == {1}
    spec = [replace(r, config="kvq4,:2=q8_0/kvq4", kvq_key="kvq4,:2=q8_0", type_k="q8_0+kvq4") for r in rows]
    assert {c.name for c in plots.charts([*rows, *spec])} == set(FIGURES) - {"layers", "retrieval"}


# ---- how it looks


def _texts(c: Chart) -> List[Tuple[str, Any]]:
    """Texts that are seen, and where; an annotation's arrow doesn't count, ticks beyond the limits aren't drawn."""
    from matplotlib.text import Text

    found = [t for t in (c.figure._suptitle, c.figure._supxlabel) if t is not None]
    for ax in c.figure.axes:
        if not ax.get_visible():
            continue
        found += [ax.title, ax._left_title, ax._right_title, *ax.texts]
        if ax.get_legend() is not None:
            found += ax.get_legend().get_texts()
        if not ax.axison:
            continue
        for axis, (low, high) in ((ax.xaxis, sorted(ax.get_xlim())), (ax.yaxis, sorted(ax.get_ylim()))):
            found.append(axis.label)
            found += [t.label1 for t in axis.get_major_ticks() if low <= t.get_loc() <= high]
    renderer = c.figure.canvas.get_renderer()
    return [
        (t.get_text(), Text.get_window_extent(t, renderer).padded(-1))
        for t in found
        if t.get_visible() and t.get_text().strip()
    ]


def _overlapping(texts: Sequence[Tuple[str, Any]]) -> List[Tuple[str, str]]:
    return [(a, b) for (a, x), (b, y) in itertools.combinations(texts, 2) if x.overlaps(y)]


def test_no_text_covers_another_or_leaves_the_figure(
    full: Dict[str, Chart], gappy: Dict[str, Chart], repo: Path
) -> None:
    many = made_up(lengths=(128, 256, 512, 1024, 2048, 4096, 8192), kinds=("memory", "speed", "quality", "retrieval"))
    drawn = [*full.values(), *gappy.values(), *plots.charts(many)]
    drawn += plots.charts(made_up(lengths=(4096,), kinds=("memory", "speed", "quality")))
    drawn += plots.charts(results.read_rows(repo / "results" / "pairs.jsonl"))
    for c in drawn:
        texts = _texts(c)
        assert len(texts) > 5 and _overlapping(texts) == [], (c.title, c.name)
        for text, box in texts:
            inside = c.figure.bbox.padded(1)
            assert inside.contains(box.x0, box.y0) and inside.contains(box.x1, box.y1), (c.name, text)


#: SPECs by layer are long, and begin alike.
LONG = {
    "K8V4": "kvq4,:2=q8_0,-2:=q8_0,10:20=f16/kvq4",
    "K6V5": "kvq4,:2=q8_0,-2:=q8_0,10:22=f16/kvq4",
    "K4V4": "\"><img src=x onerror=alert(1)><script>alert(2)</script>' & </title></style>",
    "K6V3": "$\\frac{$",
}


def long_labels() -> List[Row]:
    """Rows with labels that have room nowhere, and with as many needles as make a column wide."""
    out = []
    for r in made_up():
        label = LONG.get(r.config, "")
        r = replace(r, config=label or r.config, kvq_key=label.split("/")[0] or r.kvq_key,
                    type_k=f"{r.type_k}+q8_0" + LONG["K8V4"] * (label == LONG["K6V5"]))  # fmt: skip
        if r.kind == "retrieval":
            found = [3000 - k - (r.config != "K8V8") for k in range(5)]
            r = replace(r, needle_found=found, needle_trials=3000)
        out.append(r)
    return out


@pytest.mark.filterwarnings("error::UserWarning")  # of the layout: axes that collapsed
def test_long_labels_are_cut_and_said_in_full() -> None:
    drawn = {c.name: c for c in plots.charts(long_labels())}
    assert list(drawn) == [n for n in FIGURES if n not in ("pairs", "sensitivity")]  # too few presets are left
    for c in drawn.values():
        texts = _texts(c)
        assert _overlapping(texts) == [], c.name
        for text, box in texts:
            inside = c.figure.bbox.padded(1)
            assert inside.contains(box.x0, box.y0) and inside.contains(box.x1, box.y1), (c.name, text)
        assert {r["config"] for r in c.records} & set(LONG.values()), c.name  # the data have whole labels
        assert "kvq4,:2=q8_0,… is kvq4,:2=q8_0,-2:=q8_0,10:2" in c.note, c.name
    assert any(text == "$\\frac{$" for text, _ in _texts(drawn["memory"]))  # no formula
    (one,) = plots.charts([r for r in long_labels() if r.seq_len == 2048], ["memory"], title="$\\frac{")
    assert _overlapping(_texts(one)) == []


def test_names_are_short_and_differ() -> None:
    labels = ["K8V4", *LONG.values(), *(f"kvq4,:2=q8_0,{i}" for i in range(12)), "kvq4,:2=q8_0…2"]
    names = figures.short_names(labels)
    assert list(names.values()).count("K8V4") == 1 and len(set(names.values())) == len(labels) == len(names)
    assert max(map(len, names.values())) <= figures.NAME and names["kvq4,:2=q8_0…2"] == "kvq4,:2=q8_0…2"


def test_stars_stay_in_their_cells(full: Dict[str, Chart]) -> None:
    (wide,) = plots.charts(long_labels(), ["summary"])
    assert wide.records[1]["needles"].startswith("4")  # five digits of each: wider than its head
    for c in (full["summary"], wide):
        (ax,) = c.figure.axes
        renderer = c.figure.canvas.get_renderer()
        boxes = [p.get_window_extent(renderer) for p in ax.patches if p.get_linewidth() == 0.9]
        stars = [t.get_window_extent(renderer) for t in ax.texts if t.get_text().startswith("★")]
        assert len(boxes) == len(stars) > 4
        for star, box in zip(stars, boxes):
            assert box.x0 <= star.x0 and star.x1 <= box.x1 and box.y0 <= star.y0 and star.y1 <= box.y1
        assert not any(a.overlaps(b) for a, b in itertools.combinations([b.padded(-0.5) for b in boxes], 2))


def test_lines_that_lie_on_each_other_are_all_seen(full: Dict[str, Chart]) -> None:
    ax = full["memory"].figure.axes[0]
    lines = {x.get_color(): x for x in ax.lines if len(x.get_xdata()) > 1}
    low, high = (lines[plots.style(c).color] for c in ("K8V4", "K4V8"))  # the same bytes
    assert list(low.get_ydata()) == list(high.get_ydata())
    assert low.get_linewidth() > high.get_linewidth() + 2 and low.get_zorder() < high.get_zorder()
    ends = [t.get_text() for t in ax.texts]
    assert "= K4V8" in ends and "K8V4" in ends and not any(t.startswith("=") for t in ends if "K4V8" not in t)
    # their marks stand side by side
    marks = [x for x in ax.lines if len(x.get_xdata()) == 1 and x.get_marker() in ("D", "^")]
    places = [x.get_transform().transform((x.get_xdata()[0], x.get_ydata()[0])) for x in marks]
    assert len(places) == 6
    gaps = sorted(float(np.hypot(*(a - b))) for a, b in itertools.combinations(places, 2))
    assert gaps[0] == pytest.approx(8 / 72 * full["memory"].figure.dpi, rel=0.01)  # 8 points: wider than a mark


def test_which_lines_lie_on_each_other() -> None:
    nan = math.nan
    got = figures._alike({"a": [1, 2, nan], "b": [1, 2.1, 3], "c": [nan, 2, 3], "d": [nan, nan, 3], "e": [nan] * 3})
    assert got == {"a": (0, 2), "b": (0, 2), "c": (1, 2), "d": (1, 2), "e": (0, 1)}


def test_buffers_are_one_band_only_where_they_are_alike(full: Dict[str, Chart]) -> None:
    def marks(c: Chart) -> int:
        return len([x for x in c.figure.axes[1].lines if len(x.get_xdata()) == 1])

    assert marks(full["memory"]) == 3 and "about the same for all" in [
        t.get_text() for t in full["memory"].figure.axes[1].texts
    ]
    rows = [replace(r, compute_bytes=3 * r.compute_bytes) if r.config == "F16" and r.compute_bytes else r
            for r in made_up(kinds=("memory",))]  # fmt: skip
    (c,) = plots.charts(rows, ["memory"])
    assert marks(c) == 7 * 3 and not c.figure.axes[1].texts
    assert {d["compute_mib"] for d in c.records if d["config"] == "F16"} == {288 + n * 6 / 1024 for n in LENGTHS}


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0.0036, 0.0307, "0.005 0.01 0.02"),
        (0.00016, 0.734, "0.001 0.01 0.1"),
        (0.0021, 0.0048, "0.003 0.004"),  # a decade's 2 and 5 lie outside
        (0.0031, 0.0039, "0.0031 0.0039"),
        (12, 900, "20 50 100 200 500"),
        (2e-7, 3e-5, "5e-7 1e-6 2e-6 5e-6 1e-5 2e-5"),
    ],
)
def test_ticks_of_log_axes_are_plain_numbers(low: float, high: float, ticks: str) -> None:
    assert " ".join(map(plots.tick_text, plots.log_ticks(low, high))).replace("2e-7 5e-7", "5e-7") == ticks


def test_that_test_sees_text_that_covers_another() -> None:
    c = plots.charts(made_up(lengths=(2048, 4096), kinds=("memory",)), ["memory"])[0]
    c.figure.axes[0].text(4096, 40, "one text"), c.figure.axes[0].text(4096, 41, "another text")
    assert ("one text", "another text") in _overlapping(_texts(c))


def test_axes_have_units(full: Dict[str, Chart]) -> None:
    for c in full.values():
        labels = " ".join(
            [ax.get_xlabel() for ax in c.figure.axes] + [ax.get_ylabel() for ax in c.figure.axes] + [c.note]
            + [t.get_text() for ax in c.figure.axes for t in ax.texts]
        )  # fmt: skip
        assert re.search(r"MiB|tokens|nats|dimensionless", labels), c.name


def test_names_of_lines_stay_near_and_apart() -> None:
    chance = random.Random(1)
    for n in range(1, 9):
        for _ in range(20):
            wanted = sorted(chance.uniform(0, 50) for _ in range(n))
            got = plots.spread(wanted, 10)
            assert all(b - a >= 10 - 1e-9 for a, b in zip(got, got[1:]))
            # least squares: each block that touches stays where its mean was
            block: List[int] = []
            for i in range(n):
                block.append(i)
                if i == n - 1 or got[i + 1] - got[i] > 10 + 1e-9:
                    assert sum(got[k] - wanted[k] for k in block) == pytest.approx(0, abs=1e-6)
                    block = []
    assert plots.spread([1.0, 100.0], 10) == [1.0, 100.0] and plots.spread([], 10) == []


# Machado, Oliveira and Fernandes 2009, severity 1.0, for linear RGB.
VISION = {
    "normal": np.eye(3),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "tritanopia": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}


def _lab(color: str, vision: str) -> Any:
    """CIELAB (D65) of a colour as someone with that vision sees it."""
    from matplotlib.colors import to_rgb

    rgb = np.array(to_rgb(color))
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    seen = np.clip(VISION[vision] @ linear, 0, 1)
    srgb = np.array([[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750],
                     [0.0193339, 0.1191920, 0.9503041]])  # fmt: skip
    x, y, z = np.cbrt(np.maximum(srgb @ seen / np.array([0.95047, 1.0, 1.08883]), (6 / 29) ** 3))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def _distance(a: str, b: str, vision: str) -> float:
    return float(np.linalg.norm(_lab(a, vision) - _lab(b, vision)))


# About 2.3 is a just noticeable difference of CIELAB between large areas side by side (Mahy and others 1994). Marks
# are small and apart, so six times that is asked for.
TOLD_APART = 14.0


def test_the_simulation_is_right() -> None:
    for m in VISION.values():
        assert m.sum(axis=1) == pytest.approx([1, 1, 1], abs=1e-5)  # greys stay grey
    assert _lab("#ffffff", "normal") == pytest.approx([100, 0, 0], abs=0.02)
    assert _lab("#ff0000", "normal") == pytest.approx([53.24, 80.09, 67.20], abs=0.02)
    # a red and a green that only those can tell apart who have all cones
    red, green = "#c44e52", "#7d8a3c"
    assert _distance(red, green, "normal") > 60 > 3 * _distance(red, green, "deuteranopia")


@pytest.mark.parametrize("vision", VISION)
def test_usual_configurations_are_told_apart_by_colour_alone(vision: str) -> None:
    for a, b in itertools.combinations(CONFIGS, 2):
        assert _distance(plots.style(a).color, plots.style(b).color, vision) > TOLD_APART, (a, b)


def test_usual_configurations_are_told_apart_without_colour() -> None:
    looks = [plots.style(c) for c in CONFIGS]
    assert len({str(s.marker) for s in looks}) == len(looks)
    lines = [str(s.line) for s in looks]
    assert len(set(lines)) == len(lines) - 1  # F16 and K8V8 are both solid, and black and blue differ in grey
    assert _luminance_gap("F16", "K8V8") > 20


def _luminance_gap(a: str, b: str) -> float:
    return abs(float(_lab(plots.style(a).color, "normal")[0] - _lab(plots.style(b).color, "normal")[0]))


def test_every_preset_has_a_look_of_its_own() -> None:
    bits = (16, 8, 6, 5, 4, 3, 2)
    names = ["F16" if k == v == 16 else f"K{k}V{v}" for k in bits for v in bits]
    looks = [plots.style(n) for n in names]
    assert len({(str(s.marker), str(s.line)) for s in looks}) == len(names) == 49
    # the other labels' looks are those of every run
    assert plots.style("q4_0/q4_0") == plots.Style("#009E73", "<", (0, (4, 1.5, 1, 1.5)))
    assert plots.style("kvq4,:2=q8_0/kvq4") == plots.Style("#009E73", "<", "-")


def _look(s: plots.Style) -> Tuple[str, str, str]:
    return s.color, str(s.marker), str(s.line)


def test_no_two_labels_of_a_figure_look_the_same() -> None:
    by: Dict[Any, List[str]] = {}
    for a, b in itertools.product(("q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl", "bf16", "f32"), repeat=2):
        for spec in ("", ",:2=q8_0", ",-2:=q8_0"):
            by.setdefault(_look(plots.style(f"{a}{spec}/{b}")), []).append(f"{a}{spec}/{b}")
    one, other = next(v for v in by.values() if len(v) > 1)[:2]  # alike, each on its own
    labels = ["K8V4", "K4V4", "upstream F16", *(c for v in by.values() for c in v)]
    got = plots.looks([other, "K8V4", one])
    assert _look(got[one]) != _look(got[other]) and got["K8V4"] == plots.style("K8V4")
    assert got[min(one, other)] == plots.style(one)  # the first keeps its own
    # points have no line, and a print no colour
    assert got[one].color != got[other].color or got[one].marker != got[other].marker
    assert got[one].marker != got[other].marker or got[one].line != got[other].line
    many = plots.looks(labels)
    assert len({_look(s) for s in many.values()}) == len(labels) == 150
    random.Random(2).shuffle(labels)
    assert plots.looks(labels) == many and plots.looks([*labels, *labels]) == many
    assert all(many[c] == plots.style(c) for c in ("K8V4", "K4V4", "upstream F16"))
    assert len(plots.looks(f"x{i}" for i in range(600))) == 600  # more than there are

    rows = [
        replace(r, config={"K8V4": one, "K4V8": other}.get(r.config, r.config)) for r in made_up(lengths=(2048, 4096))
    ]
    for c in plots.charts(rows, ["memory", "tradeoff", "speed", "layers", "summary"]):
        seen = {(str(x.get_color()), str(x.get_marker())) for ax in c.figure.axes for x in ax.lines}
        for label in (one, other):
            look = plots.looks(r.config for r in rows)[label]
            assert (look.color, str(look.marker)) in seen, (c.name, label)


def test_colour_of_a_configuration_does_not_depend_on_the_others() -> None:
    def color(configs: Sequence[str]) -> Any:
        (c,) = plots.charts(made_up(configs=configs, kinds=("memory",)), ["memory"])
        return {tuple(x.get_ydata()): x.get_color() for x in c.figure.axes[0].lines if len(x.get_xdata()) > 1}

    assert color(["K6V3"]).items() <= color(CONFIGS).items()


def test_text_in_colour_is_readable() -> None:
    for c in [*plots._STYLES, *(f"K{k}V{v}" for k in (16, 8, 6, 5, 4, 3, 2) for v in (16, 8, 6, 5, 4, 3, 2))]:
        y = plots._luminance(plots.ink(plots.style(c).color))
        assert 1.05 / (y + 0.05) >= 4.5, c
    assert plots.ink("#000000") == "#000000"


# ---- pages and files

SVG = "{http://www.w3.org/2000/svg}"


def test_a_page_can_hold_all_figures(full: Dict[str, Chart], pages: Dict[str, str]) -> None:
    seen: List[str] = []
    for c in full.values():
        text = pages[c.name]
        root = ET.fromstring(text)
        assert text.startswith("<svg") and root.tag == f"{SVG}svg" and "viewBox" in root.attrib
        assert (root.get("width"), root.get("height")) == ("100%", None)
        assert (root.get("role"), root.get("aria-label")) == ("img", c.alt)
        ids = [e.get("id") for e in root.iter() if e.get("id")]
        assert all(str(i).startswith(f"{c.name}-") for i in ids)
        refs = set(re.findall(r'(?:url\(#|href="#)([^")]+)', text))
        assert refs and refs <= set(ids), c.name
        seen += [str(i) for i in ids]
        words = " ".join("".join(e.itertext()) for e in root.iter(f"{SVG}text"))
        assert "made-up" in words and "metadata" not in text and "DOCTYPE" not in text
        styles = [e.get("style", "") for e in root.iter() if "font" in e.get("style", "")]
        assert styles and all(re.search(r"font[^;]*'DejaVu Sans', Verdana, Arial, sans-serif(;|$)", x)
                              for x in styles if "px " in x or "family" in x)  # fmt: skip
        assert "Bitstream" not in text
    assert not list(ET.fromstring(full["memory"].svg(text=False)).iter(f"{SVG}text"))
    assert len(seen) == len(set(seen))


def test_marks_say_their_values(full: Dict[str, Chart], pages: Dict[str, str]) -> None:
    for c in full.values():
        root = ET.fromstring(pages[c.name])
        marked = {e.get("id"): e for e in root.iter() if "has-data" in (e.get("class") or "")}
        assert set(marked) == {f"{c.name}-{gid}" for gid in c.hover}
        for gid, text in c.hover.items():
            e = marked[f"{c.name}-{gid}"]
            assert e[0].tag == f"{SVG}title" and e[0].text == text and e.get("tabindex") == "0"
            assert len(list(e.iter())) > 2  # there is something to point at
    assert (
        "K8V4: 73.12 MiB at 8192 tokens, 59.4 % less than f16; compute buffers 112.0 MiB"
        in full["memory"].hover.values()
    )


def test_files_are_light_and_the_same_for_the_same_rows(full: Dict[str, Chart], tmp_path: Path) -> None:
    for name in ("layers", "retrieval"):
        assert full[name].save(tmp_path, "s", ("svg",))[0].stat().st_size < 150_000, name
    rows = made_up()
    random.Random(3).shuffle(rows)
    for other in plots.charts(rows, ["summary", "memory", "tradeoff", "speed"]):
        a = full[other.name].save(tmp_path / "a", "s", ("svg",), "the command")
        b = other.save(tmp_path / "b", "s", ("svg",), "the command")
        assert [p.name for p in a] == [f"s-{other.name}.svg", f"s-{other.name}.json"] == [p.name for p in b]
        for x, y in zip(a, b):
            assert x.read_bytes() == y.read_bytes(), x.name
        assert a[0].stat().st_size < 150_000, a[0].name
        assert ET.parse(a[0]).getroot().get("height", "").endswith("pt")


def test_nothing_is_overwritten(full: Dict[str, Chart], tmp_path: Path) -> None:
    c = full["sensitivity"]
    sources = [{"file": "r.jsonl", "sha256": "0"}]
    made = c.save(tmp_path / "new", "", ("png", "svg", "pdf"), "kvsplit plot r.jsonl", sources=sources)
    assert [p.name for p in made] == [f"sensitivity.{e}" for e in ("png", "svg", "pdf", "json")]
    assert made[0].read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and made[2].read_bytes()[:5] == b"%PDF-"
    data = json.loads(made[3].read_text(encoding="utf-8"))
    assert data["data"] == c.records and data["rows"] == sources and data["command"] == "kvsplit plot r.jsonl"
    assert all(map(plots.is_ours, made))
    made[0].unlink()
    with pytest.raises(UsageError, match=r"sensitivity\.svg is there already; .*--force"):
        c.save(tmp_path / "new", "")
    assert not made[0].exists()
    c.save(tmp_path / "new", "", ("svg",), "another command", replace=True)
    assert json.loads(made[3].read_text(encoding="utf-8"))["command"] == "another command" and not made[0].exists()
    with pytest.raises(UsageError, match="gif"):
        c.save(tmp_path, "", ("gif",))
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheFolderError, match="--out"):
        c.save(tmp_path / "file" / "x", "")
    assert not list(tmp_path.rglob("*.part"))


def test_only_our_own_figures_are_replaced(full: Dict[str, Chart], tmp_path: Path) -> None:
    from matplotlib.figure import Figure

    c = full["sensitivity"]
    formats = ("png", "svg", "pdf")
    mine = Figure()
    mine.add_subplot().plot([1, 2])
    for form in (*formats, "json"):
        folder = tmp_path / form
        paths = c.save(folder, "s", formats)
        (path,) = [p for p in paths if p.suffix == f".{form}"]
        if form == "json":
            path.write_text('{"figure": "mine", "command": "", "rows": [], "data": []}', encoding="utf-8")
        else:  # drawn by the same library, and a text that names us
            mine.savefig(path, metadata={"Title": "kvsplit plot"})
        before = {p.name: p.read_bytes() for p in folder.iterdir()}
        with pytest.raises(UsageError, match=rf"s-sensitivity\.{form} is there .* no figure .* so it stays"):
            c.save(folder, "s", formats, "another command", replace=True)
        assert {p.name: p.read_bytes() for p in folder.iterdir()} == before  # not even the others
    for odd in (b"", b"\x89PNG", b"\xff{", b"[]"):
        for form in (*formats, "json"):
            (tmp_path / f"odd.{form}").write_bytes(odd)
            assert not plots.is_ours(tmp_path / f"odd.{form}")
    (tmp_path / "dir" / "s-sensitivity.svg").mkdir(parents=True)
    with pytest.raises(UsageError, match="so it stays"):
        c.save(tmp_path / "dir", "s", ("svg",), replace=True)


def test_a_file_that_comes_while_a_figure_is_drawn_stays(full: Dict[str, Chart], tmp_path: Path,
                                                         monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.setattr(plots, "check_free", lambda paths, replace: None)
    (tmp_path / "s-memory.svg").write_text("mine", encoding="utf-8")
    with pytest.raises(CacheFolderError, match="exists"):
        full["memory"].save(tmp_path, "s", ("svg",))
    assert [p.name for p in tmp_path.iterdir()] == ["s-memory.svg"]
    assert (tmp_path / "s-memory.svg").read_text(encoding="utf-8") == "mine"


# ---- the command


def test_command_draws_files_and_says_which(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = write(tmp_path / "one.jsonl", made_up(lengths=(2048,), kinds=("memory",)))
    two = write(tmp_path / "two.jsonl", made_up(lengths=(4096,), kinds=("memory",)))
    out = tmp_path / "out"
    args = ["plot", str(one), str(two), "--figure", "memory", "--format", "svg", "--title", "My model"]
    assert cli.main([*args, "--out", str(out)]) == 0
    told = capsys.readouterr()
    assert told.out.splitlines() == [str(out / "one-memory.svg"), str(out / "one-memory.json")] and told.err == ""
    data = json.loads((out / "one-memory.json").read_text(encoding="utf-8"))
    assert [s["file"] for s in data["rows"]] == ["one.jsonl", "two.jsonl"] and len(data["rows"][0]["sha256"]) == 64
    assert {d["n_ctx"] for d in data["data"]} == {2048, 4096} and data["title"].endswith(": My model")
    assert str(tmp_path) not in (out / "one-memory.json").read_text(encoding="utf-8")
    assert cli.main([*args, "--out", str(out)]) == 2 and "--force" in capsys.readouterr().err
    assert cli.main([*args, "--out", str(out), "--force", "--json"]) == 0
    (chart,) = json.loads(capsys.readouterr().out)
    assert chart["figure"] == "memory" and len(chart["files"]) == 2 and chart["alt"]
    (out / "one-memory.json").write_text('{"mine": 1}')
    drawn = (out / "one-memory.svg").read_bytes()
    assert cli.main([*args, "--out", str(out), "--force"]) == 2 and "so it stays" in capsys.readouterr().err
    assert (out / "one-memory.json").read_text() == '{"mine": 1}' and (out / "one-memory.svg").read_bytes() == drawn
    both = ["plot", str(one), "--figure", "summary,memory", "--format", "svg", "--out", str(out)]
    assert cli.main(both) == 2 and not list(out.glob("*summary*"))  # all of them or none
    capsys.readouterr()
    assert cli.main(["plot", str(one), "--figure", "memory", "--format", "png"]) == 0  # beside the rows
    assert (tmp_path / "one-memory.png").is_file()
    assert {p.name for p in tmp_path.iterdir()} == {
        "one.jsonl",
        "two.jsonl",
        "out",
        "one-memory.png",
        "one-memory.json",
    }


def test_command_says_what_it_lacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "r.jsonl", made_up(configs=("F16", "K8V4"), lengths=(2048,), kinds=("retrieval",)))
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "text.jsonl").write_text("no row\n")
    for args, code, match in (
        ([str(tmp_path / "none.jsonl")], 2, "none.jsonl is no file"),
        ([str(tmp_path / "empty.jsonl")], 1, "has no row"),
        ([str(tmp_path / "text.jsonl")], 1, "text.jsonl, line 1"),
        ([str(path), "--figure", "moods"], 2, "'moods' is none of summary, memory"),
        ([str(path), "--format", "gif"], 2, "'gif' is none of png, svg"),
        (
            [str(path), "--figure", "retrieval,speed"],
            1,
            "speed needs rows of kind speed; there are rows of kind retrieval",
        ),
    ):
        assert cli.main(["plot", *args, "--out", str(tmp_path / "out")]) == code, args
        told = capsys.readouterr()
        assert match in told.err and told.out == "" and not (tmp_path / "out").exists()
    assert cli.main(["plot", str(path), "--format", "svg", "--out", str(tmp_path / "out")]) == 0
    told = capsys.readouterr()
    assert "not drawn: memory needs" in told.err and "retrieval needs" not in told.err
    assert len(told.out.splitlines()) == 2 * 2  # the summary, too


def test_script_is_the_command(repo: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "r.jsonl", made_up(lengths=(2048,), kinds=("memory",)))
    script = [sys.executable, str(repo / "scripts" / "visualize_results.py")]
    done = subprocess.run([*script, str(path), "--figure", "memory", "--format", "svg"], capture_output=True, text=True,
                          check=False, cwd=tmp_path, env=_env(repo))  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "r-memory.json").read_text(encoding="utf-8"))["command"].startswith(
        "visualize_results.py r.jsonl"
    )


def _env(repo: Path) -> Dict[str, str]:
    import os

    return {**os.environ, "PYTHONPATH": str(repo / "python")}
