# SPDX-License-Identifier: MIT
"""Parsers of tools' output, the schema of results, the chart."""

from __future__ import annotations

import contextlib
import json
import math
import re
import struct
import xml.etree.ElementTree as ET
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, List

import pytest

from kvsplit import bench, cli, compare, native, plots, quality, results, runs, speed
from kvsplit.errors import CacheFolderError, KVQuantError, NotFiniteError, ResultError, ToolError, UsageError
from kvsplit.policy import KVQuant
from kvsplit.results import Provenance, Row, Summary

DATA = Path(__file__).parent / "data"


# ---- llama-perplexity


def test_statistics_are_read() -> None:
    q = quality.parse((DATA / "kl_divergence.txt").read_text(encoding="utf-8"))
    assert (q.ppl, q.ppl_se) == (12.829268, 1.478712)
    assert (q.ppl_base, q.ppl_base_se) == (12.636428, 1.454469)
    assert (q.ppl_ratio, q.ppl_ratio_se) == (1.015261, 0.006091)
    assert (q.kld, q.kld_se, q.kld_max, q.kld_median) == (0.008694, 0.000352, 0.055183, 0.006773)
    assert q.kld_p999 == 0.054790
    assert q.top1 == pytest.approx(0.96078) and q.top1_se == pytest.approx(0.00860)


def test_statistics_survive_a_lost_encoding() -> None:
    text = (DATA / "kl_divergence.txt").read_text(encoding="utf-8")
    assert quality.parse(text.replace("±", "\ufffd\ufffd")) == quality.parse(text)
    assert quality.parse("junk\n" + text + "\nmore junk") == quality.parse(text)


@pytest.mark.parametrize("label", ["Mean PPL(Q)    ", "Mean    KLD", "Median  KLD", "99.9%   KLD", "Same top p"])
def test_missing_statistics_are_an_error(label: str) -> None:
    text = (DATA / "kl_divergence.txt").read_text(encoding="utf-8")
    assert label in text
    with pytest.raises(ResultError, match="gave no result"):
        quality.parse(text.replace(label, "Something else"))


def test_a_tool_that_gave_up_with_status_0_is_an_error() -> None:
    with pytest.raises(ResultError, match="tokenizes to only"):
        quality.parse((DATA / "too_short.txt").read_text(encoding="utf-8"))
    with pytest.raises(ResultError):
        quality.parse((DATA / "perplexity.txt").read_text(encoding="utf-8"))
    with pytest.raises(ResultError):
        quality.parse("")


def test_equal_runs_have_no_spread() -> None:
    text = (DATA / "kl_divergence.txt").read_text(encoding="utf-8").replace("0.006091", "-nan")
    assert quality.parse(text).ppl_ratio_se == 0


def test_nan_is_an_error() -> None:
    text = (DATA / "kl_divergence.txt").read_text(encoding="utf-8").replace("12.829268", "nan")
    with pytest.raises(ResultError, match="NaN"):
        quality.parse(text)


def test_size_of_the_base_is_that_of_a_real_one() -> None:
    # a run of SmolLM2 (49152 tokens) with -c 512 --chunks 2 wrote 50143236 bytes
    plan = quality.QualityPlan(512, 2)
    assert quality.base_bytes(plan, 49152) == 50143236
    # more than 32 bits hold: a vocabulary of 262144, 16 chunks of 2048
    assert quality.base_bytes(quality.QualityPlan(2048, 16), 262144) > 2**32


def test_disk_that_is_too_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, synth_model: Any) -> None:
    from kvsplit.gguf_meta import check_model

    monkeypatch.setattr(quality.shutil, "disk_usage", lambda p: type("U", (), {"free": 1000})())
    text = tmp_path / "t.txt"
    text.write_text("word " * 5000)
    path = synth_model()
    with (
        quality.text_file(text) as t,
        pytest.raises(CacheFolderError, match="--chunks"),
        quality.base_file(path, check_model(path), t, quality.QualityPlan(256, 2), tmp_path),
    ):
        pass
    assert [p.name for p in tmp_path.iterdir()] == ["t.txt"]


def test_texts(tmp_path: Path) -> None:
    with quality.text_file(None) as t:
        assert "pydoc_data.topics" in t.name and t.path.stat().st_size > 200_000
        path = t.path
    assert not path.exists()
    with pytest.raises(UsageError, match="--text.*can't be read"), quality.text_file(tmp_path / "none"):
        pass
    (tmp_path / "bin").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="UTF-8"), quality.text_file(tmp_path / "bin"):
        pass
    (tmp_path / "short").write_text("a few words")
    with quality.text_file(tmp_path / "short") as t, pytest.raises(UsageError, match="too few"):
        quality.check(quality.QualityPlan(512, 2), t)
    with quality.text_file(None) as t, pytest.raises(UsageError, match="at least 100"):
        quality.check(quality.QualityPlan(64, 1), t)


# ---- llama-bench


def test_bench_lines_are_read() -> None:
    rows = speed.parse((DATA / "llama_bench.jsonl").read_text(encoding="utf-8"))
    assert [(r["n_prompt"], r["n_gen"], r["n_depth"]) for r in rows] == [(64, 0, 32), (0, 8, 32)]
    assert rows[1]["samples_ts"] == [16.2857, 16.2507]


@pytest.mark.parametrize("bad", ["", "| model | size |", '{"n_prompt": 1}', "[1]"])
def test_other_bench_output_is_an_error(bad: str) -> None:
    with pytest.raises(ResultError):
        speed.parse(bad)


def test_configurations_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = (DATA / "llama_bench.jsonl").read_text(encoding="utf-8")
    asked: List[str] = []

    def fake(name: str, args: List[str]) -> Any:
        asked.append(args[args.index("--kvq-key") + 1])
        return type("R", (), {"stdout": lines, "peak_rss": len(asked)})()

    monkeypatch.setattr(speed.tools, "run", fake)
    quants = [KVQuant.from_text(c) for c in ("F16", "K8V8", "K4V4")]
    speeds = speed.run(Path("m.gguf"), quants, speed.SpeedPlan(64, 8, 32, rounds=4))
    rounds = [asked[i : i + 3] for i in range(0, 12, 3)]
    assert all(sorted(r) == ["f16", "kvq4", "q8_0"] for r in rounds)
    assert len({tuple(r) for r in rounds}) > 1
    assert len(speeds) == 6 and all(len(s.samples_ts) == 8 for s in speeds)
    assert max(s.peak_rss or 0 for s in speeds) == 12


def test_bench_command_says_both_sides() -> None:
    cmd = speed.command(Path("m"), KVQuant.parse(key="4,:2=8"), speed.SpeedPlan(1, 2, 3, n_threads=7))
    assert " ".join(cmd) == "-m m -o jsonl -r 1 -fa on --kvq-key kvq4,:2=q8_0 --kvq-val f16 -p 1 -n 2 -d 3 -t 7"


# ---- schema


def _prov(**kw: Any) -> Provenance:
    base = {f.name: "x" for f in fields(Provenance) if f.name not in ("model_size", "model_n_params", "unpatched")}
    return Provenance(**{**base, **kw})


def _memory(**kw: Any) -> Row:
    base = dict(
        kind="memory", config="K8V4", kvq_key="q8_0", kvq_val="kvq4", type_k="q8_0", type_v="kvq4", provenance=_prov(),
        n_ctx=256, kv_bytes=65, kv_bytes_f16=160, saving=1 - 65 / 160, bits_per_value=6.5,
    )  # fmt: skip
    return Row(**{**base, **kw})


def test_rows_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    rows = [_memory(), _memory(config="K8V4 ±", layer_types=[[30, "q8_0", "kvq4"]])]
    for row in rows:  # each append opens the file anew and keeps what is there
        with results.Journal(path) as w:
            w.write(row)
    assert list(results.read(path)) == rows
    line = json.loads(path.read_text(encoding="utf-8").splitlines()[0])
    assert line["model_sha256"] == "x" and "samples_ts" not in line


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"kind": "mood"}, "kind"),
        ({"kv_bytes": None}, "kv_bytes"),
        ({"saving": 0.5}, "saving"),
        ({"bits_per_value": float("nan")}, "bits_per_value"),
        ({"samples_ts": [1.0, 0.0]}, "samples_ts"),
        ({"schema": 99}, "schema"),
    ],
)
def test_rows_that_are_not_valid(tmp_path: Path, change: Any, match: str) -> None:
    with results.Journal(tmp_path / "r.jsonl") as w, pytest.raises(ResultError, match=f"^K8V4, .*: {match}"):
        w.write(_memory(**change))
    assert not (tmp_path / "r.jsonl").exists()


def test_lines_that_are_not_rows_are_named(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    good = json.dumps(_memory().to_json())
    for bad in ('{"kind": "memory"}', "{", good[:-1] + ', "surprise": 1}'):
        path.write_text(good + "\n" + bad + "\n", encoding="utf-8")
        with pytest.raises(ResultError, match="line 2"):
            list(results.read(path))


def test_llama_benchs_names_are_kept() -> None:
    theirs = set(json.loads((DATA / "llama_bench.jsonl").read_text(encoding="utf-8").splitlines()[0]))
    ours = set(results.field_types())
    assert {
        "n_prompt",
        "n_gen",
        "n_depth",
        "samples_ns",
        "samples_ts",
        "avg_ts",
        "type_k",
        "n_threads",
    } <= ours & theirs


def test_summary_and_csv(tmp_path: Path) -> None:
    speed = replace(_memory(), kind="speed", n_prompt=0, n_gen=8, n_depth=1, n_threads=2, samples_ts=[1.0, 3.0, 2.0],
                    median_ts=2.0, kv_bytes=None)  # fmt: skip
    (s,) = results.summarize([_memory(), speed])
    assert (s.kv_bytes, s.decode_ts, s.decode_samples, s.prefill_ts) == (65, 2.0, [1.0, 3.0, 2.0], None)
    results.write_csv(tmp_path / "s.csv", [s])
    import pandas as pd

    frame = pd.read_csv(tmp_path / "s.csv")
    assert frame.loc[0, "decode_samples"] == "1.0 3.0 2.0" and frame.loc[0, "kv_bytes"] == 65
    with pytest.raises(FileExistsError):
        results.write_csv(tmp_path / "s.csv", [s])


# ---- configurations


def test_configurations_are_parsed() -> None:
    def labels(*texts: str) -> List[str]:
        return [q.label for q in bench.parse_configs(texts)]

    assert labels("F16,K8V4") == ["F16", "K8V4"]
    assert labels("8", "k8v4", "4") == ["K8V4", "K4V4"]
    assert labels("F16; 4,:2=8/4 ;8/q5_1") == ["F16", "kvq4,:2=q8_0/kvq4", "q8_0/q5_1"]
    with pytest.raises(UsageError):
        labels(" , ;")
    with pytest.raises(KVQuantError, match="--config"):
        labels("K7V5")


# ---- chart


def _points() -> List[Summary]:
    def point(config: str, mib: float, kld: float, se: float) -> Summary:
        return Summary(config, "", "", "", "", n_ctx=8192, kv_bytes=int(mib * 2**20), kld=kld, kld_se=se,
                       saving=1 - mib / 180, kld_floor=0.0)  # fmt: skip

    return [
        point("F16", 180, 0, 0),
        point("K8V8", 95.6, 0.004, 0.0002),
        point("K8V4", 73.1, 0.009, 0.0003),
        point("K4V8", 73.1, 0.041, 0.001),
        point("kvq4,:2=q8_0/kvq4", 52, 0.046, 0.001),
    ]


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({"n_ctx": "256"}, "n_ctx: '256' is no whole number"), ({"n_ctx": 256.0}, "n_ctx: 256.0 is no whole number"),
        ({"n_ctx": True}, "n_ctx: True is no whole number"), ({"kv_bytes": -1}, "kv_bytes: -1 is below 0"),
        ({"n_ctx": 10**30}, "n_ctx: 1000.* is no whole number"), ({"config": 4}, "config: 4 is no text"),
        ({"swa_full": 1}, "swa_full: 1 is no true or false"), ({"layer_types": [[30]]}, "layer_types: must be a list"),
        ({"layer_types": "x"}, "layer_types: 'x' is no list"), ({"samples_ts": ["x"]}, "samples_ts: .* is no list"),
        ({"cpu_info": 1}, "cpu_info: 1 is no text"), ({"model_size": "x"}, "model_size: 'x' is no whole number"),
        ({"tokens_ns": [[1.0, math.nan]]}, "tokens_ns: nan"), ({"kld_se": -0.1}, "kld_se: -0.1 is below 0"),
    ],
)  # fmt: skip
def test_a_value_of_another_kind_is_no_row(tmp_path: Path, values: Any, match: str) -> None:
    path = tmp_path / "r.jsonl"
    path.write_bytes(results.json_line({**_memory().to_json(), **values}))
    with pytest.raises(ResultError, match=f"line 1: {match}"):
        results.read_rows(path)
    path.write_bytes(results.json_line({**_memory().to_json(), "seconds": 3, "kld_se": 0}))
    assert results.read_rows(path)[0].seconds == 3, "JSON writes 3.0 and 3 alike in some languages"


@pytest.mark.parametrize(
    ("left", "ours"),
    [('{"mine": 1}', False), ("notes", False), ('{"kind": "memory"}', False), ('{"ki', True), ('{"kind": "mem', True),
     ('{"kind": "memory", "config": "K8V4 \u00b1'[:-1], True), ("", True), ("\n", True)],
)  # fmt: skip
def test_only_half_a_row_of_ours_is_removed(tmp_path: Path, left: str, ours: bool) -> None:
    path = tmp_path / "r.jsonl"
    whole = results.json_line(_memory().to_json()).decode()
    for before in ("", whole):
        path.write_text(before + left, encoding="utf-8")
        if ours:
            with results.Journal(path) as w:
                assert w.cut == (len(left) if left.strip() else 0)
                w.write(_memory())
            assert len(results.read_rows(path)) == 1 + bool(before)
        else:
            with pytest.raises(ResultError, match=f"line {1 + bool(before)}: "):
                results.Journal(path)
            assert path.read_text(encoding="utf-8") == before + left


def test_names_that_are_no_text_come_back(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    rows = [_memory(provenance=replace(_prov(), model_filename="m\udcff.gguf")), _memory(config="K8V4 ±")]
    with results.Journal(path) as w:
        w.write(*rows)
    assert results.read_rows(path) == rows and "±" in path.read_text(encoding="utf-8")
    results.write_csv(tmp_path / "s.csv", results.summarize(rows))
    assert "m\\udcff.gguf" in (tmp_path / "s.csv").read_text(encoding="utf-8")


def test_a_file_that_goes_while_it_is_opened_takes_no_rows_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "r.jsonl"
    lock, other = results.Journal._lock, [results.Journal(path)]

    def ends(self: results.Journal) -> None:
        if other:
            other.pop().close()  # the other run ends without a row, and its file goes
        lock(self)

    monkeypatch.setattr(results.Journal, "_lock", ends)
    with results.Journal(path) as w:
        w.write(_memory())
    assert len(results.read_rows(path)) == 1


def _speed(ts: float, i: int, machine: str = "A CPU", **values: Any) -> Row:
    base: Any = {"kind": "speed", "n_prompt": 0, "n_gen": 8, "n_depth": 0, "n_threads": 2, "peak_rss": 100}
    prov = replace(_prov(), cpu_info=machine)
    return _memory(**{**base, "round": i, "samples_ts": [ts], "median_ts": ts, "provenance": prov, **values})


def test_a_median_is_of_one_build_machine_and_number_of_threads() -> None:
    old = [_speed(10.0, i, peak_rss=900) for i in range(5)]
    again = [_speed(30.0, 0), _speed(32.0, 1)]
    for change in ({"n_threads": 1}, {"machine": "Another"}, {"n_depth": 64}, {"n_gpu_layers": 0}):
        new = [replace(r, **{k: v for k, v in change.items() if k != "machine"}) for r in again]
        for r in new:
            r.provenance = replace(r.provenance, cpu_info=str(change.get("machine", "A CPU")))
        (s,) = results.summarize([*old, *new])
        assert s.decode_samples == [30.0, 32.0] and s.decode_ts == 31.0 and s.peak_rss == 100, change
    build = [replace(r, provenance=replace(r.provenance, patches_sha256="other")) for r in again]
    assert results.summarize([*old, *build])[0].decode_ts == 31.0
    (s,) = results.summarize([*old, *again])
    assert s.decode_samples == [30.0, 32.0, 10.0, 10.0, 10.0], "the same: a later round replaces that round"


def test_only_a_summary_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s.csv"
    path.write_text("config,mine\n")
    with pytest.raises(UsageError, match="no summary of results"):
        results.write_csv(path, results.summarize([_memory()]), replace=True)
    assert path.read_text() == "config,mine\n"
    path.write_text("\ufeffconfig,kvq_key,kvq_val,an_older_one\r\n", encoding="utf-8")  # as spreadsheets save it
    results.write_csv(path, results.summarize([_memory()]), replace=True)
    assert "K8V4" in path.read_text(encoding="utf-8")


def test_devices_have_lines_of_their_own(tmp_path: Path) -> None:
    rows = [_memory(device="cpu"), _speed(10.0, 0, device="cpu"), _speed(50.0, 0, device="auto"), _speed(40.0, 1)]
    got = {s.device: s.decode_ts for s in results.summarize(rows)}
    assert got == {"cpu": 10.0, "auto": 45.0}, "an older row without a device counts as auto"
    results.write_csv(tmp_path / "s.csv", results.summarize(rows))
    head, *lines = (tmp_path / "s.csv").read_text(encoding="utf-8").splitlines()
    assert head.split(",")[-1] == "device" and [x.split(",")[-1] for x in lines] == ["cpu", "auto"]


def test_pareto() -> None:
    assert plots.pareto([(3, 0), (2, 1), (2, 5), (1, 6), (1.5, 7)]) == [3, 1, 0]
    assert plots.pareto([]) == []


def test_chart(tmp_path: Path) -> None:
    out = [tmp_path / "c.png", tmp_path / "c.svg"]
    assert plots.memory_quality(_points(), out, model="M", note="a text") == out
    assert out[0].read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    root = ET.parse(out[1]).getroot()
    assert root.tag.endswith("svg") and len(list(root.iter())) > 100
    with pytest.raises(FileExistsError):
        plots.memory_quality(_points(), out, model="M")
    assert plots.memory_quality([Summary("F16", "", "", "", "")], [tmp_path / "none.png"], model="M") == []


def test_labels_cover_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: List[Any] = []
    real = plots._place_labels

    def spy(fig: Any, ax: Any, texts: List[Any], points: Any) -> None:
        real(fig, ax, texts, points)
        seen.extend(t.get_window_extent(fig.canvas.get_renderer()) for t in texts)

    monkeypatch.setattr(plots, "_place_labels", spy)
    plots.memory_quality(_points(), [tmp_path / "c.png"], model="M")
    assert len(seen) == 5
    assert not any(a.overlaps(b) for i, a in enumerate(seen) for b in seen[:i])


def test_styles_tell_configurations_apart() -> None:
    looks = [(s.color, s.marker) for s in plots._STYLES.values()]
    assert len(set(looks)) == len(looks)
    assert len({c for c, _ in looks}) == len(looks)


def test_the_recorded_command_has_no_folders_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    argv = [
        "/opt/x/bin/kvsplit",
        "compare",
        "/home/me/m.gguf",
        "--text=/home/me/t.txt",
        "--out",
        "here/out",
        "-c",
        "4096",
    ]
    monkeypatch.setattr("sys.argv", argv)
    expected = ["kvsplit", "compare", "m.gguf", "--text=t.txt", "--out", "here/out", "-c", "4096"]
    assert runs.command_line() == expected


# ---- a comparison that doesn't come to its end


@pytest.fixture
def staged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, synth_model: Any) -> Any:
    """A comparison whose measurements are made up; each test breaks one of them."""
    lib = type("Lib", (), {
        "build": native.Build("0.3.36", "0", "0"), "devices": lambda self: ["CPU (made up)"],
        "cache_types": lambda self: [0, 1, 2], "type_name": lambda self, i: ("f16", "q8_0", "kvq4")[i],
    })()  # fmt: skip
    monkeypatch.setattr(compare.native, "load", lambda: lib)

    def kv_cache(model: Path, n_ctx: int, q: KVQuant, device: str) -> Any:
        layer = {"type_k": q.key, "type_v": q.val, "rot_k": 0, "rot_v": 0, "backend_prefill": "CPU",
                 "backend_decode": "CPU", "backend_expect": "CPU"}  # fmt: skip
        return {"bytes": 160, "bytes_f16": 160, "layers": [layer]}

    monkeypatch.setattr(bench.probe, "kv_cache", kv_cache)
    record = json.loads((DATA / "llama_bench.jsonl").read_text(encoding="utf-8").splitlines()[0])

    drift = iter(range(7, 1000))

    def speeds(model: Path, quants: Any, plan: Any) -> Any:
        info = {**record, "type_k": quants[0].key, "type_v": quants[0].val, "n_depth": plan.n_depth}
        sizes = ((plan.n_prompt, 0), (0, plan.n_gen))
        ts = [round(next(drift) / (1 + (p > 0)), 3) for p, g in sizes]
        return [speed.Speed(quants[0], p, g, [t], [1e9 / t], None, info) for (p, g), t in zip(sizes, ts)]

    monkeypatch.setattr(bench.speed, "run", speeds)

    @contextlib.contextmanager
    def base_file(*a: Any) -> Any:
        (tmp_path / "base").write_bytes(b"_logits_" + struct.pack("<3i", 256, 9, 2))
        yield tmp_path / "base"

    monkeypatch.setattr(bench.quality, "base_file", base_file)
    good = (DATA / "kl_divergence.txt").read_text(encoding="utf-8")
    monkeypatch.setattr(bench.quality, "output", lambda *a: good)
    told: List[Path] = []
    path = synth_model()

    def run(**options: Any) -> Any:
        given = {"n_ctx": 256, "rounds": 1, "chunks": 2, **options}
        o = compare.Options(bench.parse_configs(["F16,K8V4"]), out=tmp_path / "a" / "b", **given)
        return compare.run(path, o, partial=told.append)

    return run, told, tmp_path / "a", good


def _breaks(error: BaseException) -> Any:
    def f(*a: Any, **k: Any) -> Any:
        raise error

    return f


def test_comparison_that_ends(staged: Any) -> None:
    run, told, out, _ = staged
    res = run()
    assert not told and all(f.is_file() for f in res.files) and len(res.rows) == 8 and out.is_dir()


def test_a_model_whose_name_looks_like_a_formula(staged: Any, synth_model: Any, tmp_path: Path) -> None:
    path = tmp_path / "a$\\frac{$.gguf"
    path.write_bytes(synth_model().read_bytes())
    o = compare.Options(bench.parse_configs(["F16,K8V4"]), n_ctx=256, rounds=1, chunks=2, out=tmp_path / "named")
    res = compare.run(path, o)
    assert [f.suffix for f in res.files] == [".jsonl", ".csv", ".png", ".svg"] and all(f.is_file() for f in res.files)


@pytest.mark.parametrize("error", [ToolError("llama-bench ended", returncode=3), NotFiniteError("NaN")])
def test_what_fails_says_which_configuration(staged: Any, monkeypatch: pytest.MonkeyPatch, error: Any) -> None:
    run, _, _, _ = staged
    monkeypatch.setattr(bench.Sweep, "_speed", _breaks(error))
    with pytest.raises(type(error), match=f"^(F16|K8V4): {error}"):
        run()


def test_every_number_of_a_comparison_is_in_a_row(staged: Any) -> None:
    run, _, _, _ = staged
    res = run(rounds=3)
    (path,) = [f for f in res.files if f.suffix == ".jsonl"]
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    names = {"decode_ts": "median_ts", "prefill_ts": "median_ts"}
    checked = 0
    for s in res.to_json()["configs"]:
        mine = [r for r in rows if (r["kvq_key"], r["kvq_val"]) == (s["kvq_key"], s["kvq_val"])]
        for name, value in s.items():
            if isinstance(value, (int, float)):  # of three rounds the median is one
                assert value in [r.get(names.get(name, name)) for r in mine], name
                checked += 1
        for name, value in (("decode_samples", s["decode_samples"]), ("prefill_samples", s["prefill_samples"])):
            assert sorted(value) == sorted(x for r in mine for x in r.get("samples_ts", ())
                                           if bool(r["n_gen"]) == (name == "decode_samples"))  # fmt: skip
    assert checked >= 2 * 12


def test_what_is_refused_leaves_no_folder(staged: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run, told, out, _ = staged
    for options in ({"text": tmp_path / "none"}, {"ppl_ctx": 64, "chunks": 1}):
        with pytest.raises(UsageError):
            run(**options)
        assert not out.exists()
    monkeypatch.setattr(bench.probe, "kv_cache", _breaks(ToolError("the heads don't fit")))
    with pytest.raises(ToolError):
        run()
    assert not out.exists() and not told


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ToolError("llama-bench ended")])
def test_failure_without_rows_leaves_nothing(staged: Any, monkeypatch: pytest.MonkeyPatch, error: Any) -> None:
    run, told, out, _ = staged
    monkeypatch.setattr(bench.Sweep, "_memory", _breaks(error))
    with pytest.raises(type(error)):
        run()
    assert not out.exists() and not told
    out.mkdir()  # what was there before stays
    with pytest.raises(type(error)):
        run()
    assert out.is_dir() and not list(out.iterdir())


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ResultError("gave NaN")])
def test_failure_with_rows_tells_where_they_are(staged: Any, monkeypatch: pytest.MonkeyPatch, error: Any) -> None:
    run, told, out, _ = staged
    monkeypatch.setattr(bench.quality, "output", _breaks(error))
    with pytest.raises(type(error), match="F16: gave NaN" if isinstance(error, ResultError) else None):
        run()
    assert told == list(out.rglob("*.*")) and [r.kind for r in results.read(told[0])] == ["memory"] * 2 + ["speed"] * 4


def test_row_that_fails_names_its_configuration(staged: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run, told, _, good = staged
    bad = re.sub(r"(Mean +KLD: .*±).*", r"\1 nan", good)
    monkeypatch.setattr(bench.quality, "output", lambda m, q, *a: good if q == KVQuant() else bad)
    with pytest.raises(ResultError, match="K8V4, quality: kld_se: nan is no number"):
        run()
    assert len(list(results.read(told[0]))) == 7


def test_command_line_tells_where_the_rows_are(tmp_path: Path, capsys: pytest.CaptureFixture[str], staged: Any,
                                               monkeypatch: pytest.MonkeyPatch, synth_model: Any) -> None:  # fmt: skip
    monkeypatch.setattr(bench.quality, "output", _breaks(KeyboardInterrupt()))
    out = tmp_path / "cli"
    assert (
        cli.main(
            ["compare", str(synth_model()), "--config", "F16,K8V4", "--ctx", "256", "--chunks", "2", "--out", str(out)]
        )
        == 130
    )
    captured = capsys.readouterr()
    (path,) = out.iterdir()
    assert captured.out == "" and str(path) in captured.err
