# SPDX-License-Identifier: MIT
"""The measurement of speed over depth: states that are grown, workers, rounds, and what follows from rows."""

from __future__ import annotations

import base64
import json
import os
import struct
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, Callable, Dict, List, Sequence, Tuple

import numpy as np
import pytest

from kvsplit import depth, plots, results, stats
from kvsplit.depth import CONFIGS, Client, Config, Options
from kvsplit.errors import ContextMemoryError, NativeMissingError, ResultError, ToolError, UsageError
from kvsplit.policy import KVQuant
from kvsplit.results import Provenance, Row

# ---- states


def _packed(parts: Sequence[Tuple[Sequence[int], int, Tuple[int, int]]], **change: int) -> "np.ndarray[Any, Any]":
    """A state by hand: of each part positions, layers, and bytes of a row of K and of V.

    The bytes of a row tell its cell, layer and side.
    """
    out = struct.pack("<Ii", 0x1234, 0)
    for positions, n_layer, widths in parts:
        out += struct.pack("<II", change.get("streams", 1), len(positions))
        for p in positions:
            out += struct.pack("<iIi", p, change.get("sequences", 1), 0)
        if change.get("record"):  # version, layers, and for each its number, two types and two rotations
            out += struct.pack("<IIII", 0, n_layer | 1 << 31, 1, n_layer)
            out += b"".join(struct.pack("<5I", il, 8, 452, 64, 64) for il in range(n_layer))
        else:
            out += struct.pack("<II", change.get("transposed", 0), n_layer)
        for side, width in enumerate(widths):
            for il in range(n_layer):
                out += struct.pack("<iQ", 8, width)
                out += b"".join(bytes([(p + 50 * il + 100 * side) % 256] * width) for p in positions)
    return np.frombuffer(out, np.uint8)


@pytest.mark.parametrize("record", [0, 1])
def test_a_state_is_taken_apart(record: int) -> None:
    full, window = depth.parse_state(_packed([(range(8), 2, (3, 5)), (range(5, 8), 1, (7, 7))], record=record))
    assert len(full.record) == 48 * record and len(window.record) == 28 * record
    assert full.positions.tolist() == list(range(8)) and window.positions.tolist() == [5, 6, 7]
    assert [k.data.shape for k in full.keys] == [(8, 3)] * 2 and [v.data.shape for v in full.values] == [(8, 5)] * 2
    assert full.keys[1].type_id == 8 and full.keys[1].data[3].tolist() == [53] * 3
    assert window.values[0].data[1].tolist() == [106] * 7


@pytest.mark.parametrize("record", [0, 1])
def test_a_state_of_the_same_depth_has_the_same_bytes(record: int) -> None:
    state = _packed([(range(8), 2, (3, 5)), (range(5, 8), 1, (7, 7))], record=record)
    assert (depth.grow_state(state, 8) == state).all()


def test_a_state_grows_by_its_second_half() -> None:
    state = _packed([(range(8), 2, (3, 5)), (range(5, 8), 1, (7, 7))])
    full, window = depth.parse_state(depth.grow_state(state, 21))
    assert full.positions.tolist() == list(range(21))
    rows = [*range(8), 4, 5, 6, 7, 4, 5, 6, 7, 4, 5, 6, 7, 4]
    assert full.keys[0].data[:, 0].tolist() == rows
    assert full.values[1].data[:, 4].tolist() == [r + 150 for r in rows]
    # what slides keeps its rows and ends where the sequence ends
    assert window.positions.tolist() == [18, 19, 20] and window.keys[0].data[:, 0].tolist() == [5, 6, 7]


@pytest.mark.parametrize(
    ("change", "why"), [({"streams": 2}, "streams"), ({"sequences": 2}, "one sequence"), ({"transposed": 1}, "flash")]
)
def test_a_state_of_another_form_is_refused(change: Dict[str, int], why: str) -> None:
    with pytest.raises(ResultError, match=why):
        depth.parse_state(_packed([(range(8), 2, (3, 5))], **change))


def test_a_state_that_ends_early_is_refused() -> None:
    for record in (0, 1):
        state = _packed([(range(8), 2, (3, 5))], record=record)
        for n in range(8, len(state)):
            with pytest.raises(ResultError):
                depth.parse_state(state[:n])
    with pytest.raises(ResultError, match="can't become"):
        depth.grow_state(state, 7)
    with pytest.raises(ResultError, match="can't become"):
        depth.grow_state(_packed([(range(1, 9), 2, (3, 5))]), 20)


# ---- the worker


@pytest.fixture
def libraries() -> Path:
    """The folder of the library that the tests run on."""
    from kvsplit import native

    return native.load().path.parent


def _logits(client: Client, name: str) -> Tuple["np.ndarray[Any, Any]", str]:
    answer = client.ask("logits", name=name)
    return np.frombuffer(base64.b64decode(answer["logits"]), np.float32), answer["state_sha256"]


PAIRS = [("f16", "f16"), ("q8_0", "kvq4")]


@pytest.mark.native
@pytest.mark.parametrize(("key", "val"), PAIRS)
@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_a_loaded_state_is_the_computed_one(
    libraries: Path, synth_model: Callable[..., Path], arch: str, key: str, val: str
) -> None:
    model = synth_model(arch=arch, n_layer=3, window=128, pattern=3)
    k, v = Config("x", "x", KVQuant(key, val)).types
    with Client(libraries) as client:
        info = client.ask("load", model=str(model), n_threads=2)
        assert info["n_swa"] == (128 if arch == "gemma3" else 0) and info["n_base"] == 512
        assert client.ask("open", name="x", type_k=k, type_v=v, n_ctx=4096)["n_layer"] == 3
        assert client.ask("depth", name="x", n=512, compute=True)["pos_max"] == 511
        computed = _logits(client, "x")
        client.ask("depth", name="x", n=512)
        loaded = _logits(client, "x")
        # the same bytes in the cache, and one token after them by the same arithmetic
        assert (computed[0] == loaded[0]).all() and computed[1] == loaded[1]

        assert client.ask("depth", name="x", n=3000)["pos_max"] == 2999
        before = _logits(client, "x")
        decoded = client.ask("decode", name="x", n=3, warmup=2)["ns"]
        assert len(decoded) == 3 and min(decoded) > 0
        assert len(client.ask("prefill", name="x", n=700, warmup=1)["ns"]) == 1
        after = _logits(client, "x")
        # measuring leaves the cache as it was
        assert (before[0] == after[0]).all() and before[1] == after[1]
        assert not (before[0] == loaded[0]).all()


@pytest.mark.native
@pytest.mark.parametrize(("key", "val"), PAIRS)
def test_attention_reads_every_repeated_row(
    libraries: Path, synth_model: Callable[..., Path], key: str, val: str
) -> None:
    """A model of one layer whose angles are all 0: its rows depend on the token alone.

    So computing the tokens of the repeated rows gives the grown state itself; and another token in any place gives
    other logits.
    """
    extra = (("llama.rope.scaling.type", "linear"), ("llama.rope.scaling.factor", 1e30))
    model = synth_model(n_layer=1, extra=extra)
    rng = np.random.default_rng(1)
    head, half = rng.integers(256, size=(2, 256)).tolist()
    tokens = head + 7 * half  # 2048 of them
    k, v = Config("x", "x", KVQuant(key, val)).types

    def computed(ids: List[int]) -> "np.ndarray[Any, Any]":
        with Client(libraries) as client:
            client.ask("load", model=str(model), n_threads=2, tokens=ids)
            client.ask("open", name="x", type_k=k, type_v=v, n_ctx=4096)
            client.ask("depth", name="x", n=2048, compute=True)
            return _logits(client, "x")[0]

    with Client(libraries) as client:
        client.ask("load", model=str(model), n_threads=2, tokens=tokens)
        client.ask("open", name="x", type_k=k, type_v=v, n_ctx=4096)
        client.ask("depth", name="x", n=2048)
        grown = _logits(client, "x")[0]
    # the same rows, computed in other places of a batch: nothing but the order of float sums may differ, 2^-24 of
    # the values for each of the 64 terms of a product, where a row as f16 or in levels may then round the other way.
    # One row of 2048 has a weight of about 1/2048; a level of 4 bits is about 1/8 of a value.
    same = np.abs(computed(tokens) - grown).max()
    changed = list(tokens)
    for place in (700, 1300, 2000):
        changed[place] = (changed[place] + 128) % 256
    other = np.abs(computed(changed) - grown).max()
    tolerance = np.abs(grown).max() / 2048 / 8
    assert same <= tolerance
    assert other > 10 * tolerance


@pytest.mark.native
def test_a_worker_says_what_it_cannot_do(libraries: Path, synth_model: Callable[..., Path], tmp_path: Path) -> None:
    model = synth_model()
    with Client(libraries) as client:
        with pytest.raises(ToolError, match="first request"):
            client.ask("info")
        with pytest.raises(ToolError, match="none.gguf"):
            client.ask("load", model=str(tmp_path / "none.gguf"), n_threads=1)
        client.ask("load", model=str(model), n_threads=1)
        client.ask("open", name="x", type_k=1, type_v=1, n_ctx=512)
        with pytest.raises(ToolError, match="more than the 512"):
            client.ask("depth", name="x", n=600)
        client.ask("depth", name="x", n=500)
        with pytest.raises(ToolError, match="depth 500 need more"):
            client.ask("decode", name="x", n=13)
    client = Client(libraries)
    client._process.kill()
    client._process.wait()
    with pytest.raises(ToolError, match="killed by SIGKILL"):
        client.ask("info")
    client.close()


# ---- plans


def test_configurations_are_read() -> None:
    got = depth.parse_configs("upstream-f16, old=build-2:q8_0/kvq4@A=1@B=x=y,/tmp/b:8/4")
    assert got[0] is CONFIGS["upstream-f16"]
    assert got[1] == Config("old", "build-2", KVQuant("q8_0", "kvq4"), (("A", "1"), ("B", "x=y")))
    assert (got[2].name, got[2].build, got[2].types) == ("b:8/4", "/tmp/b", (8, 452))


@pytest.mark.parametrize("text", ["", "k9v9", "build:q8_0", "a=build:f16/f16@A", "k8v4,k8v4", "b:4,:2=8/4"])
def test_configurations_that_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        depth.parse_configs(text)


def test_plan_keeps_to_the_limits() -> None:
    o = Options(configs=tuple(CONFIGS.values()))
    deep = {(g.n_gen > 0, g.depth): [c.name for c in g.configs] for g in depth.plan(o, "tinyllama")}
    assert list(deep) == [(True, 1024 << i) for i in range(7)] + [(False, d) for d in (0, 2048, 8192)]
    assert "upstream K8V4" in deep[True, 8192] and "upstream K8V4" not in deep[True, 16384]
    assert deep[True, 65536] == ["upstream F16", "K8V4", "F16", "F16 fused"]
    assert deep[False, 8192] == ["upstream F16", "K8V4", "F16 fused"]
    assert max(g.depth for g in depth.plan(o, "smollm2")) == 8192
    # what is asked for is measured
    asked = depth.plan(replace(o, depths=(16384,), prefill_depths=()), "smollm2")
    assert [(g.depth, len(g.configs)) for g in asked] == [(16384, len(CONFIGS))]


def test_a_build_that_is_not_there_is_named(tmp_path: Path) -> None:
    o = Options(upstream=tmp_path)
    with pytest.raises(NativeMissingError, match="make build-upstream"):
        o.folder(CONFIGS["upstream-f16"])


# ---- rows


def _row(config: str, d: int, samples: Sequence[float], run_id: str = "r", n_gen: int = 8, **change: Any) -> Row:
    """A speed row; samples in tokens per second."""
    prov = Provenance(run_id, "0", "l", "s", "p", "c", "m.gguf", "m", "3", "Linux", "A CPU", library_sha256="lib")
    n = n_gen or 512
    return Row(
        "speed", config, "q8_0", "kvq4", "q8_0", "kvq4", prov, n_prompt=0 if n_gen else n, n_gen=n_gen, n_depth=d,
        n_threads=2, samples_ts=list(samples), samples_ns=[1e9 * n / s for s in samples], median_ts=samples[0],
        kv_bytes_expected=100 * d, **change,
    )  # fmt: skip


def _bandwidth(like: Row) -> Row:
    return Row(
        "bandwidth", "machine", "", "", "", "", like.provenance, n_threads=2, read_bytes_per_s=[2e10, 3e10, 4e10],
        copy_bytes_per_s=[1e10, 2e10, 3e10],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("n", "k", "certainty"),
    [(1, 1, 0.0), (4, 1, 0.875), (5, 1, 0.9375), (7, 1, 0.984375), (8, 2, 0.9296875), (15, 4, 0.96484375)],
)
def test_interval_of_a_median(n: int, k: int, certainty: float) -> None:
    # the tables of the sign test
    low, high, sure = stats.median_interval(list(range(n, 0, -1)))
    assert (low, high, sure) == (k, n + 1 - k, certainty)


def test_ratios_are_of_the_same_rounds() -> None:
    # the machine halves its speed in every round, and ours stays twice as fast
    base = [16.0, 8.0, 4.0, 2.0, 1.0]
    rows = [_row("upstream F16", 1024, base), _row("K8V4", 1024, [2 * b for b in base])]
    rows += [_row("K8V4", 2048, [5.0] * 5)]
    rows += [_row("upstream F16", 2048, [1.0] * 5, run_id="another")]
    by = {(p.config, p.depth): p for p in depth.points(rows)}
    p = by["K8V4", 1024]
    assert (p.ratio, p.interval, p.ts, p.quartiles) == (2.0, (2.0, 2.0), 8.0, (4.0, 16.0))
    assert by["K8V4", 2048].ratio is None, "of another run, so of other rounds"
    assert next(p for p in depth.points(rows, "K8V4") if p.config == "upstream F16").ratio == 0.5
    with pytest.raises(UsageError, match="--base"):
        depth.points(rows, "none")


def test_the_last_run_of_a_group_counts() -> None:
    rows = [_row(c, 1024, [v], run_id=r) for r, v in (("a", 1.0), ("b", 3.0)) for c in ("upstream F16", "K8V4")]
    rows[3] = _row("K8V4", 1024, [6.0], run_id="b")
    assert {p.config: (p.ts, p.ratio) for p in depth.points(rows)} == {"upstream F16": (3.0, 1.0), "K8V4": (6.0, 2.0)}


def test_slope_of_a_line() -> None:
    def at(d: int, error: float = 0.0) -> float:
        return 1 / (0.02 + 1e-6 * d + error)

    depths = (1024, 2048, 4096)
    s = depth.slope("a", [_row("a", d, [at(d), at(d)]) for d in depths])
    assert s is not None
    # 100 bytes a cell in 1 us: floats of a fit lose some digits, nothing else
    assert s.bytes_per_s[0] == pytest.approx(1e8, rel=1e-9) and s.seconds[0] == pytest.approx(0.02, rel=1e-9)
    assert s.bytes_per_s[1] < 1 and s.linear < 1e-9 and s.bytes_per_cell == 100

    # errors of +e and -e at each of three depths: the slope stays, its error is sqrt(6 e^2 / (6 - 2) / sxx)
    e = 1e-4
    s = depth.slope("a", [_row("a", d, [at(d, e), at(d, -e)]) for d in depths])
    assert s is not None
    sxx = 2 * sum((d - sum(depths) / 3) ** 2 for d in depths)
    assert s.seconds_per_cell == pytest.approx((1e-6, e * (6 / 4 / sxx) ** 0.5), rel=1e-6)
    assert depth.slope("a", [_row("a", d, [1.0]) for d in depths[:2]]) is None


def test_report_tells_ratios_slopes_and_doubt() -> None:
    rows = []
    for d in (1024, 2048, 4096):
        rows += [_row("upstream F16", d, [10.0] * 5, busy_elsewhere=[0.0, 0.0, 0.2, 0.0, 0.0])]
        rows += [_row("K8V4", d, [1 / (0.02 + 1e-8 * d)] * 5)]
    rows += [_row(c, 0, [9.0] * 5, n_gen=0) for c in ("upstream F16", "K8V4")] + [_bandwidth(rows[0])]
    (a,) = depth.analyse(rows)
    text = depth.report([a])
    assert "| K8V4 | 5.00 (5.00-5.00) | 4.99 (4.99-4.99) | 4.99 (4.99-4.99) |" in text
    assert "Prefill of 512 tokens" in text and "94 % interval" in text
    # 100 bytes in 10 ns are 10 GB/s: half of what a copy moves, a third of what is read
    assert "| 10.00 ± 0.00 | 50 % | 33 % | 0 % |" in text
    assert "reads 30.0 GB/s (20.0 to 40.0)" in text and "copies 20.0 GB/s" in text
    assert "In 3 of 15 samples" in text
    data = json.loads(json.dumps(depth.to_json([a])))
    assert data[0]["points"][1]["ratio"] == pytest.approx(5, rel=0.01)


def test_rows_go_through_the_file(tmp_path: Path) -> None:
    row = _row("K8V4", 1024, [5.0], tokens_ns=[[1.0, 2.0]], busy_elsewhere=[0.01])
    row.provenance.unpatched = False
    rows = [row, _bandwidth(row)]
    with results.Journal(tmp_path / "r.jsonl") as w:
        for r in rows:
            w.write(r)
    assert list(results.read(tmp_path / "r.jsonl")) == rows
    assert [s.config for s in results.summarize(rows)] == ["K8V4"], "a machine is no configuration"
    with pytest.raises(ResultError, match="copy_bytes_per_s"):
        replace(rows[1], copy_bytes_per_s=None).validate()


def test_figure_is_drawn(tmp_path: Path) -> None:
    series = {
        name: [(1024 << i, v / (1 + i), 0.9 * v / (1 + i), 1.1 * v / (1 + i)) for i in range(n)]
        for name, v, n in (("upstream F16", 20.0, 7), ("upstream K8V4", 10.0, 4), ("K8V4", 40.0, 7), ("mine", 40.0, 7))
    }
    for name in ("a.svg", "b.svg"):
        plots.decode_depth(series, tmp_path / name, model="m", note="n")
    text = (tmp_path / "a.svg").read_text(encoding="utf-8")
    assert text == (tmp_path / "b.svg").read_text(encoding="utf-8")
    looks = [plots.style(n) for n in ("upstream F16", "upstream K8V4", "K8V4", "F16 fused")]
    assert len({(s.color, s.filled) for s in looks}) == 4
    plots.decode_depth(series, tmp_path / "a.png", model="m")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG") and len(list(tmp_path.iterdir())) == 3


# ---- README.md


def test_readme_has_the_speed_that_was_recorded(repo: Path, script: ModuleType) -> None:
    readme = (repo / "README.md").read_text(encoding="utf-8")
    found = script.SPEED_BLOCK.search(readme)
    files = script.choose_speed(repo, readme)
    assert found and found.group(0) == script.speed_block(files), "run scripts/readme_table.py"
    assert files or not (repo / "results" / script.SPEED_FILE).exists()
    found = script.SPEED_BLOCK.search((repo / "docs" / "cpu.md").read_text(encoding="utf-8"))
    assert found and found.group(0) == script.speed_block(files, brief=False), "run scripts/readme_table.py"


def test_readme_follows_the_rows(repo: Path, script: ModuleType, tmp_path: Path) -> None:
    program = [sys.executable, str(repo / "scripts" / "readme_table.py"), "--root", str(tmp_path)]
    (tmp_path / "results").mkdir()
    run = tmp_path / "results" / script.SPEED_FILE
    readme = tmp_path / "README.md"
    text = "a\n<!-- results: -->\nold\n<!-- end of results -->\nb\n<!-- speed: -->\nold\n<!-- end of speed -->\nc\n"
    readme.write_text(text, encoding="utf-8")

    def code(*args: str) -> int:
        return subprocess.run([*program, *args], capture_output=True, check=False).returncode

    def record(ours: float) -> None:
        rows = [_row(c, d, [v] * 5) for d in (1024, 4096, 8192) for c, v in (("upstream F16", 4.0), ("K8V4", ours))]
        rows += [_row(c, 0, [9.0] * 5, n_gen=0) for c in ("upstream F16", "K8V4")] + [_bandwidth(rows[0])]
        run.write_text("".join(json.dumps(r.to_json()) + "\n" for r in rows), encoding="utf-8")

    assert code() == 0 and readme.read_text(encoding="utf-8").count("No run is recorded") == 2
    record(8.0)
    assert code("--check") == 1 and code() == 0 and code("--check") == 0
    text = readme.read_text(encoding="utf-8")
    assert text.startswith("a\n<!-- results: -->\nNo run is recorded"), "a run of speed is no comparison"
    assert "<!-- speed: cpu-attention.jsonl -->" in text and text.endswith("<!-- end of speed -->\nc\n")
    assert "| K8V4 | 2.00 (2.00-2.00) | 2.00 (2.00-2.00) | 2.00 (2.00-2.00) |" in text
    assert "prefill of 512 tokens" in text and "| K8V4 | 1.00 (1.00-1.00) |" in text
    assert "4.0 at 1024, 4.0 at 4096, 4.0 at 8192" in text and "reads 30.0 GB/s" in text
    record(12.0)
    assert code("--check") == 1 and code(str(run)) == 0
    assert "| K8V4 | 3.00 (3.00-3.00) |" in readme.read_text(encoding="utf-8")
    readme.write_text("<!-- results: -->\n<!-- end of results -->\n", encoding="utf-8")
    assert code("--check") == 1 and code() == 0, "a README may lack the speed"
    assert code(str(run)) == 2, "but not where it is asked for"


# ---- the machine


def test_other_work_is_seen() -> None:
    class Idle:
        def cpu_seconds(self) -> float:
            return 0.0

    spin = "import time; e = time.monotonic() + 0.6\nwhile time.monotonic() < e: pass"
    with depth.Elsewhere(Idle()) as elsewhere:  # type: ignore[arg-type]
        start = time.monotonic()
        child = subprocess.run([sys.executable, "-c", spin], check=True)
        wall = time.monotonic() - start
    assert child.returncode == 0
    # even where four others share its core it gets a fifth of 0.6 s
    assert elsewhere.share * (os.cpu_count() or 1) * wall > 0.6 / 5


def test_bandwidth_is_that_of_memory() -> None:
    read, copy = depth.Bandwidth(2).measure(2)
    # no memory of a computer that builds this is slower than 100 MB/s or faster than 10 TB/s
    assert len(read) == len(copy) == 2 and all(1e8 < v < 1e13 for v in read + copy)


# ---- the whole


@pytest.mark.native
def test_a_run_and_its_continuation(
    libraries: Path,
    synth_model: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model, out = synth_model(), tmp_path / "rows.jsonl"
    args = ["--model", str(model), "--prefill-depths", "0", "--rounds", "2", "--tokens", "2", "--prompt", "16"]
    args += ["--configs", f"a={libraries}:f16/f16,b={libraries}:q8_0/kvq4,c={libraries}:f16/f16@KVSPLIT_TEST_X=1"]
    args += ["--out", str(out), "--resume"]
    assert depth.main([*args, "--depths", "300,600"]) == 0
    assert "| b | " in capsys.readouterr().out
    rows = list(results.read(out))
    assert [r.kind for r in rows] == 3 * ["speed", "speed", "speed", "bandwidth"]
    a, b, c = rows[4:7]
    assert (a.n_depth, a.n_gen, a.n_prompt, len(a.samples_ts or ()), np.shape(a.tokens_ns)) == (600, 2, 0, 2, (2, 2))
    assert (b.type_k, b.type_v, b.provenance.unpatched) == ("q8_0", "kvq4", False)
    assert c.provenance.environment == "KVSPLIT_TEST_X=1" and a.provenance.environment == ""
    assert a.samples_ns == pytest.approx([sum(t) for t in a.tokens_ns or ()])
    assert a.samples_ts == pytest.approx([2e9 / ns for ns in a.samples_ns or ()])
    assert {r.provenance.run_id for r in rows} == {a.provenance.run_id}

    assert depth.main([*args, "--depths", "300,600"]) == 0
    assert list(results.read(out)) == rows, "nothing was measured again"
    assert depth.main([*args, "--depths", "300,600,900", "--json"]) == 0
    more = list(results.read(out))
    assert more[: len(rows)] == rows and {r.n_depth for r in more[len(rows) :] if r.kind == "speed"} == {900}
    capsys.readouterr()
    assert depth.main(["--out", str(out), "--report", "--base", "b", "--json"]) == 0
    (data,) = json.loads(capsys.readouterr().out)
    assert {p["ratio"] for p in data["points"] if p["config"] == "b"} == {1.0} and len(data["slopes"]) == 3
    assert str(tmp_path) not in out.read_text(encoding="utf-8") and str(libraries) not in out.read_text(
        encoding="utf-8"
    )
    # more rounds than there are, or another library: it is measured
    assert depth.main([*args, "--depths", "300", "--no-prefill", "--rounds", "3"]) == 0
    assert len(list(results.read(out))) == len(more) + 4
    assert depth.main([*args, "--depths", "300", "--dry-run"]) == 0
    assert "decode 2 at 300: 2 rounds of a, b, c" in capsys.readouterr().out


@pytest.mark.native
def test_what_does_not_fit_is_refused(
    libraries: Path, synth_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Config("a", str(libraries), KVQuant("f16", "f16"))
    o = Options(models=(str(synth_model()),), configs=(config,), rounds=1, depths=(32768,), prefill_depths=())
    # 2 layers of 2 heads of 64, K and V: 1 KiB a token, 32 MiB, and as much again while it is loaded
    free = type("M", (), {"available": 60 << 20})()
    monkeypatch.setattr(depth.psutil, "virtual_memory", lambda: free)
    with pytest.raises(ContextMemoryError, match="--depths"):
        depth.run(o)
    free.available = 80 << 20
    assert depth.run(o)[0].n_depth == 32768


@pytest.mark.native
def test_errors_are_one_line(
    libraries: Path, synth_model: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(synth_model(head_k=80))
    assert depth.main(["--resume"]) == 2
    assert depth.main(["--model", model, "--configs", "nothing"]) == 2
    assert depth.main(["--model", model, "--configs", f"a={tmp_path}:f16/f16"]) == 1
    # 80 values are no whole number of blocks
    assert depth.main(["--model", model, "--depths", "8", "--configs", f"a={libraries}:q8_0/q8_0"]) in (1, 2)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("bench_cpu.py: error: ")]
    assert len(lines) == 4


@pytest.mark.native
@pytest.mark.slow
def test_the_unpatched_release_is_known(synth_model: Callable[..., Path]) -> None:
    folder = os.environ.get("KVSPLIT_UPSTREAM_DIR") or str(Path(__file__).parents[2] / "build-upstream")
    if not (Path(folder) / "bin").is_dir():
        fail = os.environ.get("KVSPLIT_REQUIRE", "") not in ("", "0")
        (pytest.fail if fail else pytest.skip)("no unpatched build: `make build-upstream` makes one")
    o = Options(upstream=Path(folder), models=(str(synth_model()),), rounds=1, n_gen=1, depths=(8,), prefill_depths=())
    rows = depth.run(replace(o, configs=(CONFIGS["upstream-f16"], CONFIGS["upstream-k8v4"])))
    assert [(r.config, r.provenance.unpatched) for r in rows[:2]] == [("upstream F16", True), ("upstream K8V4", True)]
    with pytest.raises(UsageError, match="without our types"):
        depth.run(replace(o, configs=(Config("x", folder, KVQuant("kvq4", "kvq4")),)))
