# SPDX-License-Identifier: MIT
"""The page: its verdict, its tables, what it escapes and refuses, and how it looks and works in a real browser."""

from __future__ import annotations

import dataclasses
import html.parser
import json
import os
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

import made_up_rows
import pytest

from kvsplit import cli, plots, report, results
from kvsplit.errors import CacheFolderError, ResultError, UsageError
from kvsplit.results import Row

HOSTILE = "\"><img src=x onerror=alert(1)><script>alert(2)</script>' & </title></style>"


@dataclass
class Drawn:
    """A figure that takes no time to draw."""

    name: str = "drawn"
    title: str = "A figure"
    note: str = "a note"
    alt: str = "One mark at 1 MiB."
    records: List[Dict[str, Any]] = field(default_factory=lambda: [{"config": "F16", "mib": 1.5}, {"kld": None}])
    body: str = '<g id="d1" class="has-data" tabindex="0"><title>F16: 1.5 MiB</title><rect width="9" height="9"/></g>'

    def svg(self, *, text: bool = True) -> str:
        return (
            '<?xml version="1.0"?>\n<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
            f'viewBox="0 0 90 50" role="img" aria-label="{self.title}">{self.body}</svg>'
        )


def _none(rows: Sequence[Row]) -> List[Any]:
    return []


def _make(rows: Sequence[Row], *, charts: Any = _none, **kw: Any) -> report.Report:
    return report.make(rows, charts=charts, **kw)


def _verdict(rows: Sequence[Row], **kw: Any) -> report.Verdict:
    return _make(rows, **kw).verdicts[0][0]


def _rows(**kw: Any) -> List[Row]:
    return made_up_rows.rows(**{"lengths": (2048, 4096), "kinds": ("memory", "speed", "quality"), **kw})


def _changed(rows: Sequence[Row], config: str, kind: str, **values: Any) -> List[Row]:
    """The same rows, with other values in those of one configuration and kind."""
    out = [dataclasses.replace(r, **values) if (r.config, r.kind) == (config, kind) else r for r in rows]
    assert out != list(rows)
    return out


class _Reader(html.parser.HTMLParser):
    """Tags and text of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: List[Tuple[str, Dict[str, Optional[str]]]] = []
        self.text = ""
        self.open: List[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: List[Tuple[str, Optional[str]]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self.open and self.open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if not {"script", "style"} & set(self.open):
            self.text += data


# ---- the verdict


def test_verdict_is_the_smallest_cache_within_the_limits() -> None:
    rows = _rows()
    v = _verdict(rows)
    assert v.line is not None and v.place.length == 4096 and v.decided
    # by the rule, written once more and differently: from the rows alone
    sizes = {r.config: r.kv_bytes for r in rows if r.kind == "memory" and r.seq_len == 4096}
    fits = [
        r.config
        for r in rows
        if r.kind == "quality" and r.seq_len == 4096 and r.config != "F16"
        and r.kld + 2 * r.kld_se <= 0.01 and r.ppl_change + 2 * r.ppl_change_se <= 0.01
    ]  # fmt: skip
    assert v.line.s.config == min(fits, key=lambda c: sizes[c]) == "K6V5" and len(fits) > 1
    full = sizes["F16"] / sizes["K6V5"]
    assert v.sentence.startswith(f"For made-up at 4096 tokens on A CPU: K6V5, {full:.1f}x smaller than f16, KLD 0.0")
    low, high = (f"{x:.2f}" for x in v.line.decode[1:])
    assert f"({low}-{high})" in v.sentence


def test_targets_have_limits_of_their_own() -> None:
    made = {t: _verdict(_rows(), target=t).line.s.config for t in report.TARGETS}
    sizes = [_verdict(_rows(), target=t).line.s.kv_bytes for t in ("quality", "balanced", "memory")]
    assert sizes == sorted(sizes, reverse=True) and made["memory"] == "K4V4", made
    with pytest.raises(UsageError, match="--target.*balanced"):
        _make(_rows(), target="best")


@pytest.mark.parametrize(
    ("kind", "values", "why"),
    [
        ("quality", {"kld": 0.011}, "KLD"),
        ("quality", {"kld_se": 0.004}, "KLD"),  # 0.0042 + 2 * 0.004 > 0.01: the mean alone would pass
        ("quality", {"ppl_change": 0.011}, "PPL"),
        ("quality", {"ppl_change_se": 0.005}, "PPL"),
        ("quality", {"finite": False, "ppl": None, "ppl_se": None, "kld": None, "kld_se": None}, "KLD"),
        ("memory", {"type_v": "kvq6", "layer_types": [[30, "kvq6", "kvq6"]]}, "ran as asked"),
    ],
)
def test_a_configuration_beyond_one_limit_is_passed_over(kind: str, values: Any, why: str) -> None:
    v = _verdict(_changed(_rows(lengths=(4096,)), "K6V5", kind, **values))
    assert v.line is not None and v.line.s.config == "K8V4"
    (checks,) = (c for x, c in v.checks if x.s.config == "K6V5")
    assert [c.name for c in checks if c.ok is not True] == [why]


def test_a_slow_configuration_is_passed_over_only_where_speed_counts() -> None:
    rows = _rows(lengths=(4096,))
    slow = [
        dataclasses.replace(r, samples_ts=[0.8 * t for t in r.samples_ts or []])
        if r.config == "K6V5" and r.n_gen
        else r
        for r in rows
    ]
    assert _verdict(slow).line.s.config == "K8V4"
    assert _verdict(slow, target="quality").line.s.config == _verdict(rows, target="quality").line.s.config
    (checks,) = (c for x, c in _verdict(slow).checks if x.s.config == "K6V5")
    assert "is slower than 0.95x" in checks[-1].text and not checks[-1].near


def test_lost_needles_count_only_beyond_chance() -> None:
    rows = _rows(lengths=(4096,), kinds=("memory", "speed", "quality", "retrieval"))
    few = {"needle_found": [8, 8, 8, 8, 7]}  # 39 of 40 beside f16's: the intervals overlap
    base = _changed(rows, "F16", "retrieval", needle_found=[8, 8, 8, 8, 8])
    assert _verdict(_changed(base, "K6V5", "retrieval", **few)).line.s.config == "K6V5"
    assert _verdict(_changed(base, "K6V5", "retrieval", needle_found=[0, 0, 4, 8, 8])).line.s.config == "K8V4"


def test_speeds_are_paired_by_round() -> None:
    # the machine is 0.7 to 1.3 times as fast from round to round, and both feel it alike: only paired ratios are tight
    rows = _rows(lengths=(4096,))
    mixed = sorted(rows, key=lambda r: (r.kind, (r.round or 0) * (-1 if r.config == "K6V5" else 1)))
    one, other = _verdict(rows).line, _verdict(mixed).line
    assert one.decode == other.decode and one.rounds == 6
    assert one.decode[2] / one.decode[1] < 1.1  # noise of 1 % a sample: 6 ratios spread over some 4 %
    gone = [r for r in rows if not (r.config == "F16" and r.kind == "speed" and r.round == 2)]
    assert _verdict(gone).line.rounds == 5
    other = [
        dataclasses.replace(r, provenance=made_up_rows.provenance(run_id="other"))
        if (r.config, r.kind) == ("F16", "speed")
        else r
        for r in rows
    ]  # another run, another hour: nothing to compare with
    assert _verdict(other).line is None and "same rounds" in _verdict(other).missing[0].what


@pytest.mark.parametrize(
    ("drop", "what", "metric"),
    [
        (lambda r: r.kind == "speed", "decode speed .* not measured", "speed"),
        (lambda r: r.kind == "speed" and r.config == "F16", "f16's speed was not measured", "speed"),
        (lambda r: r.kind == "speed" and (r.round or 0) > 2, "3 rounds .* too few", "speed"),
        (lambda r: r.kind == "quality", "quality .* not measured", "perplexity"),
        (lambda r: r.kind == "memory", "size of the cache .* not measured", "memory"),
        (lambda r: r.config != "F16", "no configuration but f16", "all"),
    ],
)
def test_what_is_missing_is_named_with_its_command(drop: Callable[[Row], bool], what: str, metric: str) -> None:
    made = _make([r for r in _rows(lengths=(4096,)) if not drop(r)])
    v = made.verdicts[0][0]
    assert v.line is None and not v.decided and "no verdict" in v.sentence
    (m,) = [m for m in v.missing if re.search(what, m.what)]
    assert m.command.startswith("kvsplit bench --model made-up.gguf --config F16,")
    more = " --repeat 5" if "3 rounds" in what else " --text made-up.txt --chunks 12" if metric == "all" else ""
    assert m.command.endswith(f"--seq-len 4096 --metric {metric}{more}")
    assert "smaller than f16" not in v.sentence and m.command in _Reader(made.html).text


def test_too_few_chunks_decide_nothing_and_few_are_remarked() -> None:
    none = _verdict(_rows(lengths=(4096,), chunks=3))
    assert none.line is None and "3 chunks are too few" in none.missing[0].what
    assert none.missing[0].command.endswith("--metric perplexity --text made-up.txt --chunks 8")
    few = _verdict(_rows(lengths=(4096,), chunks=4))
    assert few.line is not None and "4 chunks" in few.remarks[0]
    assert not _verdict(_rows(lengths=(4096,), chunks=8)).remarks


def test_what_is_missing_is_measured_on_the_same_text_and_chunks() -> None:
    rows = [r for r in _rows(lengths=(4096,), chunks=7) if not (r.kind == "quality" and r.config != "F16")]
    assert _verdict(rows).missing[0].command.endswith("--metric perplexity --text made-up.txt --chunks 7")
    default = [dataclasses.replace(r, text=r.text and "pydoc_data.topics of Python 3.11.7") for r in rows]
    assert _verdict(default).missing[0].command.endswith("--metric perplexity --chunks 7")


def test_a_file_that_is_given_twice_counts_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "r.jsonl"
    path.write_bytes(b"".join(results.json_line(r.to_json()) for r in _rows(lengths=(4096,))))
    pages = []
    for i, files in enumerate(([path], [path, tmp_path / "." / "r.jsonl"])):
        page = tmp_path / f"{i}.html"
        assert cli.main(["report", *map(str, files), "--out", str(page)]) == 0
        pages.append(_Reader(page.read_text(encoding="utf-8")).text.replace("r.jsonl", ""))
    counted = [re.findall(r"[0-9]+ memory, [0-9]+ speed", p) for p in pages]
    assert counted[0] == counted[1] and counted[0]


def test_a_ratio_is_of_one_build() -> None:
    old = [dataclasses.replace(r, samples_ts=[9 * x for x in r.samples_ts or []]) if r.kind == "speed" and
           r.config != "F16" else r for r in _rows(lengths=(4096,))]  # fmt: skip
    new = _rows(lengths=(4096,), run_id="later", patches_sha256="8" * 64)
    (section,) = report.sections([*old, *new])
    (alone,) = report.sections(new)
    for x, y in zip(section.places[0].lines, alone.places[0].lines):
        assert (x.decode, x.prefill, x.rounds) == (y.decode, y.prefill, y.rounds), x.s.config
        assert x.s.decode_ts == y.s.decode_ts


def test_zero_has_no_sign_in_the_data_of_a_figure() -> None:
    assert report._value(-0.0) == "0" and report._value(-1e-9) == "-1e-09"


def test_rough_measurements_are_not_called_losses() -> None:
    v = _verdict(_changed(_rows(lengths=(4096,)), "K6V5", "quality", kld_se=0.004))
    assert any("too roughly" in r and "K6V5" in r for r in v.remarks)
    assert not any("K4V4" in r for r in v.remarks)


def test_what_could_be_smaller_is_said_of_every_target() -> None:
    rows = [r for r in _rows(lengths=(4096,)) if not (r.kind == "quality" and r.config in ("K4V4", "K6V3"))]
    made = _make(rows, target="quality")
    assert [v.line.s.config for v in made.verdicts[0]] == ["K6V5", "K6V5", "K6V5"]
    for v in made.verdicts[0]:
        assert v.remarks == ["Smaller, but not known: K6V3, K4V4."]
    slow = [r for r in rows if not (r.kind == "speed" and r.config == "K6V5")]
    assert _Reader(_make(slow).html).text.count("Smaller, but not known: K6V3, K4V4.") == 2
    assert _Reader(made.html).text.count("Smaller, but not known: K6V3, K4V4.") == 1


def test_unknown_floor_is_said() -> None:
    rows = [dataclasses.replace(r, kld_floor=None) for r in _rows(lengths=(4096,)) if (r.config, r.kind) !=
            ("F16", "quality")]  # fmt: skip
    made = _make(rows)
    assert any("noise" in r for r in made.verdicts[0][0].remarks) and "noise floor is not known" in made.html


def test_nothing_fits_means_keep_f16() -> None:
    made = _make(_rows(configs=("F16", "K4V8", "K4V4"), lengths=(4096,)))
    v = made.verdicts[0][0]
    assert v.decided and v.line is None and "keep f16; none of 2 measured" in v.sentence


def test_other_texts_and_builds_are_not_compared() -> None:
    rows = _changed(_rows(lengths=(4096,)), "K6V5", "quality", text_sha256="8" * 64)
    made = _make(rows)
    assert made.verdicts[0][0].line.s.config == "K8V4"
    assert "more than one text" in made.html
    other = [dataclasses.replace(r, provenance=made_up_rows.provenance(patches_sha256="1" * 64, run_id="other"))
             if r.config == "K8V4" else r for r in _rows(lengths=(4096,))]  # fmt: skip
    assert "2 builds with different patches" in _make(other).html


def test_unpatched_builds_stand_beside_and_are_never_chosen() -> None:
    theirs = [
        dataclasses.replace(r, config=f"upstream {r.config}", provenance=made_up_rows.provenance(unpatched=True))
        for r in _rows(configs=("K6V5",), lengths=(4096,))
    ]
    made = _make([*_rows(configs=("F16", "K8V4"), lengths=(4096,)), *theirs])
    assert made.verdicts[0][0].line.s.config == "K8V4" and "upstream K6V5" in made.html


def test_lengths_are_chosen() -> None:
    rows = _rows(lengths=(2048, 4096, 8192))
    assert _verdict(rows).place.length == 8192
    assert _verdict(rows, n_ctx=2048).place.length == 2048
    # the longest one that decides
    assert _verdict([r for r in rows if not (r.seq_len == 8192 and r.kind == "speed")]).place.length == 4096
    with pytest.raises(UsageError, match=r"--ctx.*1024.*2048, 4096, 8192"):
        _make(rows, n_ctx=1024)
    page = _Reader(_make(rows).html).text
    assert page.count("Memory and speed at") == 3 and "at other lengths" in page


def test_rows_of_a_comparison_have_lengths_of_their_own(repo: Path) -> None:
    rows = results.read_rows(repo / "results" / "smollm2-linux-cpu.jsonl")
    v = _verdict(rows)
    assert v.place.where == "with a cache of 8192 tokens (quality in chunks of 2048, speed after 256)"
    last = {(r.config, r.kind): r for r in rows}
    q, m = last[v.line.s.config, "quality"], last[v.line.s.config, "memory"]
    assert q.kld + 2 * q.kld_se <= 0.01 and q.ppl_ratio - 1 + 2 * q.ppl_ratio_se <= 0.01
    assert f"{m.kv_bytes_f16 / m.kv_bytes:.1f}x smaller" in v.sentence


def test_depths_of_a_sweep_are_places(repo: Path) -> None:
    rows = results.read_rows(repo / "results" / "cpu-attention.jsonl")
    made = _make(rows)
    parts = report.sections(rows)
    assert len(made.verdicts) == len(parts) == len({r.provenance.model_sha256 for r in rows}) == 4
    for s in parts:
        depths = {r.n_depth for r in s.rows if r.kind == "speed"}
        assert [p.length for p in s.places] == sorted(depths)
    assert all(v[0].line is None and v[0].missing for v in made.verdicts)


def test_machines_and_models_are_kept_apart() -> None:
    rows = [*_rows(lengths=(4096,)), *_rows(lengths=(4096,), cpu_info="Another CPU")]
    rows += _rows(lengths=(4096,), model_sha256="1" * 64)
    # of these only errors by layer are known: they are the same on every machine
    rows += made_up_rows.rows(configs=("K8V4",), lengths=(4096,), kinds=("layer",), cpu_info="A third")
    made = _make(rows)
    assert [v[0].sentence.split(":")[0].rpartition(" on ")[2] for v in made.verdicts] == [
        "A CPU",
        "Another CPU",
        "A CPU",
    ]
    assert sum(r.kind == "layer" for r in report.sections(rows)[0].rows) == made_up_rows.N_LAYER


# ---- the page


def test_tables_hold_what_the_rows_say() -> None:
    rows = made_up_rows.rows(lengths=(4096,))
    text = _Reader(_make(rows).html).text
    for r in rows:
        if r.kind == "memory":
            assert f"{r.kv_bytes / 2**20:.2f}" in text and f"{100 * r.saving:.1f}" in text
            assert f"{r.compute_bytes / 2**20:.1f}" in text
        elif r.kind == "quality":
            assert f"{r.ppl:.3f} ± {r.ppl_se:.3f}" in text
            assert report.plus_minus(r.kld, r.kld_se) in text and f"{100 * r.top1:.1f}" in text
            assert report.plus_minus(100 * r.ppl_change, 100 * r.ppl_change_se, sign=True) in text
        elif r.kind == "retrieval":
            assert f"{sum(r.needle_found)} of 40" in text
    for value in ("5" * 64, "9" * 64, "0" * 64, "A CPU", rows[0].provenance.command, "30 kvq6/kvq5", "30.5 GB/s read"):
        assert value in text, value


def test_numbers_are_written_with_what_they_are_worth() -> None:
    assert report.plus_minus(0.005896, 0.000129) == "0.00590 ± 0.00013"
    assert report.plus_minus(0.0057, 0.000072) == "0.00570 ± 0.00007"
    assert report.plus_minus(0.301, 0.2, sign=True) == "+0.3 ± 0.2"
    assert report.plus_minus(-0.0, 0.0) == "0" and report.plus_minus(-0.00001, 0.02) == "0.00 ± 0.02"


def test_what_was_not_measured_is_a_dash_with_a_title() -> None:
    rows = [r for r in _rows(lengths=(4096,)) if r.config == "F16" or r.kind == "memory"]
    page = _make(rows).html
    cells = re.findall(r'<td class="none" title="([^"]*)">–</td>', page)
    assert len(cells) > 20 and all(cells)
    assert '<td class="none">' not in page and ">None<" not in page and "nan" not in _Reader(page).text.lower().split()


def test_columns_without_a_number_are_named_below_the_tables() -> None:
    made = _Reader(_make(_rows(lengths=(4096,), kinds=("speed",))).html)
    assert "Not measured here: KV cache, saved, compute buffers, PPL, PPL change, KLD" in made.text
    assert made.text.count("compute buffers") == 1 and "Quality at" not in made.text
    made = _Reader(_make(made_up_rows.rows(lengths=(4096,))).html)
    assert "Not measured here" not in made.text


def test_types_that_differ_from_what_was_asked_are_shouted() -> None:
    rows = _changed(_rows(lengths=(4096,)), "K8V4", "speed", type_v="q8_0", layer_types=[[30, "q8_0", "q8_0"]])
    page = _make(rows).html
    words = "K8V4: q8_0/kvq4 was asked, q8_0/q8_0 ran"
    assert words in _Reader(page).text and page.index(words) < page.index('class="card verdict')
    clean = _make(_rows(lengths=(4096,))).html
    assert "K8V4: " not in _Reader(clean).text and 'class="warn"' not in clean


@pytest.mark.parametrize(
    ("key", "ran", "layers", "same"),
    [
        ("kvq4,:2=q8_0", "q8_0+kvq4", [[2, "q8_0", "f16"], [28, "kvq4", "f16"]], True),
        ("kvq4,:2=q8_0", "q8_0+kvq4", [[3, "q8_0", "f16"], [27, "kvq4", "f16"]], False),
        ("kvq4,:2=q8_0", "kvq4,0:2=q8_0", None, True),
        ("kvq4", "kvq4+f16", None, False),
        ("kvq4", "kvq4", [[4, "kvq4", ""]], True),  # values within the keys' rows
        ("nonsense", "kvq4", None, False),
    ],
)
def test_asked_and_ran(key: str, ran: str, layers: Any, same: bool) -> None:
    (row,) = made_up_rows.rows(configs=("F16",), lengths=(128,), kinds=("memory",))
    row = dataclasses.replace(row, kvq_key=key, type_k=ran, layer_types=layers)
    assert (report.difference(row) == "") is same


def test_figures_have_data_captions_and_ids_of_their_own() -> None:
    both = Drawn(body='<defs><path id="p"/></defs><use xlink:href="#p" clip-path="url(#p)"/>' + Drawn().body)
    rows = [*_rows(lengths=(4096,)), *_rows(lengths=(4096,), model_sha256="1" * 64)]
    page = _make(rows, charts=lambda r: [both, both]).html
    reader = _Reader(page)
    ids = [a["id"] for _, a in reader.tags if "id" in a]
    assert len(ids) == len(set(ids))
    links = re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', page)
    assert len(links) > 8 and all((a or b) in ids for a, b in links)
    assert reader.text.count("a note") == 4 and reader.text.count("One mark at 1 MiB.") == 4
    assert page.count('<th scope="row">F16</th><td>1.5</td><td>–</td>') == 4


@pytest.mark.parametrize(
    "body",
    [
        "<script>alert(1)</script>",
        '<rect onload="alert(1)"/>',
        '<image xlink:href="http://example.org/a.png"/>',
        '<a xlink:href="#x"/>',
        "<foreignObject/>",
        "<g>",
    ],
)
def test_figures_that_run_or_load_something_are_refused(body: str) -> None:
    with pytest.raises(ResultError, match="figure"):
        _make(_rows(lengths=(4096,)), charts=lambda r: [Drawn(body=body)])


def _hostile() -> List[Row]:
    rows = made_up_rows.rows(configs=("F16", "K8V4", "K6V5"), lengths=(4096,), command=HOSTILE, cpu_info=HOSTILE,
                             model_filename=HOSTILE, platform=HOSTILE)  # fmt: skip
    return [
        dataclasses.replace(r, config=HOSTILE if r.config == "K8V4" else r.config, text=r.text and HOSTILE,
                            type_v=HOSTILE if r.config == "K6V5" else r.type_v, backend_decode=HOSTILE)
        for r in rows
    ]  # fmt: skip


def test_hostile_texts_stay_texts() -> None:
    charts = [Drawn(title=HOSTILE.replace('"', "'").replace("<", "&lt;").replace("&", "&amp;"), note=HOSTILE,
                    alt=HOSTILE, records=[{HOSTILE: HOSTILE}])]  # fmt: skip
    page = _make(_hostile(), charts=lambda r: charts, title=HOSTILE, command=HOSTILE).html
    reader = _Reader(page)
    tags = [t for t, _ in reader.tags]
    assert tags.count("script") == 1 and tags.count("style") == 1 and tags.count("title") == 2 and "img" not in tags
    assert not [n for _, a in reader.tags for n in a if n.startswith("on")]
    assert reader.text.count(HOSTILE) > 20


def test_the_page_forbids_the_network_and_runs_one_script() -> None:
    page = _make(_rows(lengths=(4096,))).html
    metas = {a.get("http-equiv") or a.get("name"): a.get("content") or "" for t, a in _Reader(page).tags if t == "meta"}
    policy = metas["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; ") and "http" not in policy
    assert re.search(r"script-src 'sha256-[A-Za-z0-9+/]{43}='", policy)
    assert "unsafe-inline" not in policy.replace("style-src 'unsafe-inline'", "")
    assert "width=device-width" in metas["viewport"] and '<html lang="en">' in page
    outside = re.findall(r"(?:src|href|url)\s*[=(]\s*[\"']?(?!#|data:|\()[^#\"'\s>]+", page.split("<script>")[0])
    assert not outside, outside


def test_headings_captions_and_scopes_are_there() -> None:
    reader = _Reader(_make(made_up_rows.rows(lengths=(4096,)), charts=lambda r: [Drawn()]).html)
    levels = [int(t[1]) for t, _ in reader.tags if re.fullmatch(r"h[1-6]", t)]
    assert levels[0] == 1 and levels.count(1) == 1 and all(b - a <= 1 for a, b in zip(levels, levels[1:]))
    tags = [t for t, _ in reader.tags]
    assert tags.count("table") == tags.count("caption") >= 4 and tags.count("figure") == tags.count("figcaption") == 1
    assert all("scope" in a for t, a in reader.tags if t == "th")


def test_the_same_rows_give_the_same_bytes() -> None:
    rows = _rows(configs=("F16", "K8V4"), lengths=(2048,))
    assert report.make(rows, command="c").html == report.make(rows, command="c").html


def test_rows_without_anything_to_show(tmp_path: Path) -> None:
    for rows in ([], made_up_rows.rows(kinds=("bandwidth",)), made_up_rows.rows(kinds=("layer",))):
        with pytest.raises(ResultError, match="kvsplit bench"):
            _make(rows)


def test_templates_are_within_the_package(repo: Path) -> None:
    names = {"report.html", "report.css", "report.js"}
    assert {p.name for p in report.TEMPLATES.iterdir()} == names and report.TEMPLATES.parent.name == "kvsplit"
    if not (repo / ".git").exists():
        pytest.skip("no git repository to ask what is ignored")
    # the wheel leaves out what git ignores
    paths = [f"python/kvsplit/templates/{n}" for n in sorted(names)]
    assert all((repo / p).is_file() for p in paths)
    done = subprocess.run(["git", "check-ignore", *paths], cwd=repo, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and not done.stdout


# ---- the file


def test_files_that_are_there_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = _make(_rows(lengths=(4096,))).html
    out = tmp_path / "new" / "page.html"
    report.write(out, page)
    assert out.read_text(encoding="utf-8") == page and [p.name for p in out.parent.iterdir()] == ["page.html"]
    with pytest.raises(UsageError, match="--out.*--force"):
        report.write(out, "other")
    assert out.read_text(encoding="utf-8") == page
    report.write(out, page + "<!-- 2 -->", force=True)
    assert out.read_text(encoding="utf-8").endswith("<!-- 2 -->")
    out.write_text("<html>mine</html>", encoding="utf-8")
    with pytest.raises(UsageError, match="no page of ours; choose another name$"):
        report.write(out, page, force=True)
    assert out.read_text(encoding="utf-8") == "<html>mine</html>"
    # one that comes while the page is written stays as well
    late = tmp_path / "late.html"
    monkeypatch.setattr(report.os.path, "lexists", lambda p: False)
    late.write_text("mine", encoding="utf-8")
    with pytest.raises(UsageError, match="--out"):
        report.write(late, page)
    assert late.read_text(encoding="utf-8") == "mine" and len(list(tmp_path.iterdir())) == 2


def test_a_page_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x", encoding="utf-8")
    with pytest.raises(CacheFolderError, match="--out"):
        report.write(tmp_path / "file" / "page.html", "x")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


# ---- the command


def _journal(path: Path, rows: Sequence[Row]) -> Path:
    path.write_text("".join(json.dumps(r.to_json()) + "\n" for r in rows), encoding="utf-8")
    return path


@pytest.fixture
def quick_charts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots, "charts", lambda rows, names=None: [Drawn()])


@pytest.mark.usefixtures("quick_charts")
def test_command_writes_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    rows = _rows(lengths=(4096,))
    one = _journal(tmp_path / "one.jsonl", [r for r in rows if r.kind != "speed"])
    two = _journal(tmp_path / "two.jsonl", [r for r in rows if r.kind == "speed"])
    monkeypatch.setattr("sys.argv", ["kvsplit", "report", str(one), str(two)])
    assert cli.main(["report", str(one), str(two)]) == 0
    captured = capsys.readouterr()
    page = tmp_path / "one.html"
    assert captured.out == f"{page}\n" and "K6V5" in captured.err
    text = _Reader(page.read_text(encoding="utf-8")).text
    assert "kvsplit report one.jsonl two.jsonl" in text and str(tmp_path) not in text
    assert cli.main(["report", str(one), str(two)]) == 2
    assert "--force" in capsys.readouterr().err
    args = ["report", str(one), str(two), "--force", "--json", "--target", "memory", "--title", "Mine <b>"]
    assert cli.main(args) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["verdicts"][0][0]["config"] == "K4V4" and told["page"] == str(page)
    assert "<title>Mine &lt;b&gt;</title>" in page.read_text(encoding="utf-8")


@pytest.mark.usefixtures("quick_charts")
def test_command_says_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = _journal(tmp_path / "r.jsonl", [r for r in _rows(lengths=(4096,)) if r.kind != "speed"])
    assert cli.main(["report", str(path), "--out", str(tmp_path / "p.html")]) == 0
    assert "missing: decode speed" in (err := capsys.readouterr().err) and "--metric speed" in err


@pytest.mark.parametrize(
    ("content", "code", "match"),
    [("", 1, "no rows.*kvsplit bench"), ("{}\n", 1, "line 1"), (None, 2, "RESULTS: there is no file")],
)
def test_command_refuses_what_is_no_result(tmp_path: Path, capsys: pytest.CaptureFixture[str], content: Any, code: int,
                                           match: str) -> None:  # fmt: skip
    path = tmp_path / "r.jsonl"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    assert cli.main(["report", str(path)]) == code
    captured = capsys.readouterr()
    assert re.search(match, captured.err) and not captured.out and not (tmp_path / "r.html").exists()


# ---- in a browser


def missing(reason: str) -> None:
    """Skip, or fail where nothing may be missing."""
    if os.environ.get("KVSPLIT_REQUIRE", "") not in ("", "0"):
        pytest.fail(f"required by KVSPLIT_REQUIRE: {reason}", pytrace=False)
    pytest.skip(reason)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """The system's Chromium without a window."""
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        missing("no Chromium: apt-get install chromium")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        missing("no playwright: pip install '.[dev]'")
    with sync_playwright() as p:
        # root may not use the sandbox; the page is ours
        b = p.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        yield b
        b.close()


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page of all kinds of rows at three lengths, with every figure."""
    path = tmp_path_factory.mktemp("page") / "page.html"
    files = [_journal(path.parent / "made-up.jsonl", made_up_rows.rows())]
    made = report.make(results.read_rows(files[0]), files, command="kvsplit report made-up.jsonl")
    report.write(path, made.html)
    return path


@pytest.fixture(scope="module")
def screenshots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where pictures go: the folder that KVSPLIT_SCREENSHOTS names, or one that pytest removes."""
    named = os.environ.get("KVSPLIT_SCREENSHOTS")
    folder = Path(named) if named else tmp_path_factory.mktemp("screenshots")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture
def opened(browser: Any) -> Iterator[Callable[..., Any]]:
    """Open a file; at the end nothing may have been logged, failed, or asked of the network."""
    wrong: List[str] = []
    contexts: List[Any] = []

    def open_(path: Path, **kw: Any) -> Any:
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **kw})
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda m: wrong.append(f"console: {m.text}"))
        page.on("pageerror", lambda e: wrong.append(f"error: {e}"))
        page.on("dialog", lambda d: (wrong.append(f"dialog: {d.message}"), d.dismiss()))
        page.on("request", lambda r: None if r.url.startswith(("file:", "data:")) else wrong.append(f"asked: {r.url}"))
        page.goto(path.as_uri())
        return page

    yield open_
    for c in contexts:
        c.close()
    assert not wrong, wrong


def _luminance(color: str) -> float:
    """Relative luminance of ``rgb(r, g, b)``, WCAG 2.2."""
    rgb = [int(float(v)) / 255 for v in re.findall(r"[\d.]+", color)[:3]]
    r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in rgb)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


_COLORS = """(wanted) => wanted.map((css) => {
  let e = document.querySelector(css);
  const ink = getComputedStyle(e).color;
  while (e && getComputedStyle(e).backgroundColor === "rgba(0, 0, 0, 0)") e = e.parentElement;
  return [css, ink, getComputedStyle(e).backgroundColor];
})"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_opens_and_can_be_read(opened: Any, page_file: Path, screenshots: Path, scheme: str) -> None:
    page = opened(page_file, color_scheme=scheme)
    page.screenshot(path=str(screenshots / f"report-{scheme}.png"), full_page=True)
    boxes = [s.bounding_box() for s in page.query_selector_all("figure svg")]
    assert len(boxes) >= 7 and all(b and b["width"] > 300 and b["height"] > 60 for b in boxes), boxes
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert "K6V5" in page.inner_text(".verdict .say")
    wanted = ["body", ".sub", ".kicker", ".say", ".say strong", "td.num", "thead th small", "td.none", "a", "summary",
              "figcaption", "pre", "footer", ".facts dt", "tr.pick td", "td.yes", "td.bad"]  # fmt: skip
    for css, ink, ground in page.evaluate(_COLORS, wanted):
        if "color(" in ink + ground:
            continue  # a mixed colour, of which only the name is told
        a, b = sorted((_luminance(ink), _luminance(ground)))
        assert (b + 0.05) / (a + 0.05) >= 4.5, f"{css}: {ink} on {ground}"  # WCAG 2.2, AA
    # figures keep their white card
    assert page.evaluate("getComputedStyle(document.querySelector('.paper')).backgroundColor") == "rgb(255, 255, 255)"


def test_values_show_on_hover_focus_and_keys(opened: Any, page_file: Path, screenshots: Path) -> None:
    page = opened(page_file)
    tip = page.locator("#tip")
    marks = page.locator("figure").nth(1).locator(".has-data")
    assert marks.count() > 10 and not tip.is_visible()
    marks.nth(3).hover(force=True)
    assert tip.is_visible() and tip.inner_text() == marks.nth(3).get_attribute("aria-label")
    box = tip.bounding_box()
    assert box["x"] >= 0 and box["x"] + box["width"] <= 1280 and box["width"] > 40
    page.screenshot(path=str(screenshots / "report-hover.png"))
    page.mouse.move(2, 2)
    assert not tip.is_visible()
    marks.nth(0).focus()
    first = tip.inner_text()
    page.keyboard.press("ArrowRight")
    assert tip.inner_text() == marks.nth(1).get_attribute("aria-label") != first
    page.keyboard.press("End")
    assert tip.inner_text() == marks.last.get_attribute("aria-label")
    page.keyboard.press("Escape")
    assert not tip.is_visible()
    # one stop of the tab key a figure
    assert page.locator("figure").nth(1).locator('[tabindex="0"].has-data').count() == 1


def test_phone_needs_no_sideways_scrolling(opened: Any, page_file: Path, screenshots: Path) -> None:
    phone = {"viewport": {"width": 360, "height": 740}, "is_mobile": True, "has_touch": True, "device_scale_factor": 2}
    page = opened(page_file, **phone)
    page.screenshot(path=str(screenshots / "report-phone.png"), full_page=True)
    page.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    assert page.evaluate("[document.documentElement.scrollWidth, innerWidth]") == [360, 360]
    table = page.locator(".scroll").first
    assert table.evaluate("(e) => e.scrollWidth > e.clientWidth")  # it scrolls in its box, and the names stay
    table.evaluate("(e) => { e.scrollLeft = 400; }")
    assert 0 <= table.locator("tbody th").nth(1).bounding_box()["x"] < 40
    mark = page.locator("figure").nth(1).locator(".has-data").nth(2)
    mark.scroll_into_view_if_needed()
    mark.tap(force=True)
    assert page.locator("#tip").inner_text() == mark.get_attribute("aria-label")
    assert page.locator("#tip").bounding_box()["x"] >= 0


def test_without_script_everything_is_there(opened: Any, page_file: Path) -> None:
    page = opened(page_file, java_script_enabled=False)
    assert page.locator("figure .has-data > title").count() > 100
    assert page.locator(".verdict .say").is_visible() and page.locator("figure svg").last.is_visible()


def test_paper_cuts_and_hides_nothing(opened: Any, page_file: Path, screenshots: Path) -> None:
    page = opened(page_file)
    file = screenshots / "report.pdf"
    page.pdf(path=str(file), prefer_css_page_size=True, print_background=True)
    data = file.read_bytes()
    count = len(re.findall(rb"/Type\s*/Page\b(?!s)", data))
    assert data[:5] == b"%PDF-" and 4 <= count <= 30, count
    sizes = {tuple(round(float(v)) for v in m.split()) for m in re.findall(rb"/MediaBox\s*\[([\d. ]+)\]", data)}
    assert sizes == {(0, 0, 595, 842)}  # A4 in points
    # what the paper shows, in a window as wide as its text: 210 - 2 * 12 mm
    page.set_viewport_size({"width": round(186 / 25.4 * 96), "height": 1000})
    page.emulate_media(media="print")
    page.screenshot(path=str(screenshots / "report-print.png"), full_page=True)
    assert page.locator("details .facts, details table").first.is_visible()
    assert not page.locator("nav").is_visible() and not page.locator(".screen").first.is_visible()
    wide = page.evaluate("document.documentElement.clientWidth")
    for kind in ("table", "figure svg", "pre"):
        edges = page.evaluate(
            "(css) => Array.from(document.querySelectorAll(css)).map((e) => e.getBoundingClientRect().right)", kind
        )
        assert edges and max(edges) <= wide + 1, (kind, edges)


@pytest.mark.filterwarnings("error::UserWarning")  # of figures whose labels leave no room
def test_hostile_page_runs_nothing(opened: Any, tmp_path: Path) -> None:
    path = tmp_path / "hostile.html"
    report.write(path, report.make(_hostile(), title=HOSTILE, command=HOSTILE).html)
    page = opened(path)  # a dialog or a refused script would be told at the end
    assert page.title() == HOSTILE
    assert page.evaluate("document.scripts.length") == 1 and page.evaluate("document.images.length") == 0
    assert page.locator("figure svg").count() >= 4


def test_page_stays_small(page_file: Path) -> None:
    # what a mail or a repository takes without a thought
    assert page_file.stat().st_size < 600_000
