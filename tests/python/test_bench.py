# SPDX-License-Identifier: MIT
"""The sweep over configurations, lengths and metrics, on made-up tools: what is measured, kept and continued."""

from __future__ import annotations

import contextlib
import csv
import hashlib
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Tuple

import fakes
import pytest

import kvsplit
from kvsplit import bench, cli, quality, results, speed, stats
from kvsplit.errors import CacheFolderError, KVQuantError, UsageError
from kvsplit.gguf_meta import check_model
from kvsplit.policy import F16, KVQuant
from kvsplit.results import Row

CONFIGS = "K8V4,K4V8"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("word " * 40000, encoding="utf-8")
    return path


@pytest.fixture
def model(synth_model: Callable[..., Path]) -> Path:
    return synth_model()


@pytest.fixture
def staged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Path, text: Path) -> Any:
    """``kvsplit bench`` on made-up tools: returns a function, one that tells what ran, and the file of rows."""
    fakes.install(tmp_path / "native", "llama-perplexity", "llama-bench")
    log = tmp_path / "log"
    log.touch()
    monkeypatch.setenv("KVSPLIT_NATIVE_DIR", str(tmp_path / "native"))
    monkeypatch.setenv("FAKE_LOG", str(log))
    monkeypatch.setenv("PYTHONUTF8", "1")
    fakes.stand_in(monkeypatch.setattr)
    out = tmp_path / "res" / "b.jsonl"

    def run(*args: Any, lengths: str = "128,256") -> int:
        given = [str(model), "--text", str(text), "--config", CONFIGS, "--seq-len", lengths, "--repeat", "2"]
        return cli.main(["bench", *given, "--chunks", "3", "--out", str(out), *map(str, args)])

    def ran() -> List[str]:
        lines = log.read_text().split()
        log.write_text("")
        return lines

    return run, ran, out


def _rows(path: Path, kind: str = "") -> List[Row]:
    return [r for r in results.read(path) if not kind or r.kind == kind]


# ---- the plan


def test_lengths_and_metrics_are_parsed() -> None:
    assert bench.parse_lengths(["2048,512", "512"]) == (512, 2048)
    assert bench.parse_metrics(["speed,memory"]) == ("memory", "speed")
    assert bench.parse_metrics(["all"]) == bench.METRICS == bench.parse_metrics(["ALL", "memory"])
    for bad in ("", "12", "1e3", "-5", "4096,", str(2**31)):
        with pytest.raises(UsageError, match="--seq-len"):
            bench.parse_lengths([bad])
    with pytest.raises(UsageError, match="--metric: 'mood' is none of memory, speed, perplexity, retrieval, all"):
        bench.parse_metrics(["memory,mood"])


def test_published_names_of_f16_are_known() -> None:
    assert bench.parse_configs(["FP16,F16,fp16"]) == (F16,)


def _items(model: Path, text: Path, **options: Any) -> List[bench.Item]:
    given: Dict[str, Any] = {"configs": bench.parse_configs([CONFIGS]), "lengths": (128, 256), **options}
    with quality.text_file(text) as t:
        return bench.items(bench.Options(**given), check_model(model), t)


def test_lengths_end_where_the_model_does(model: Path, text: Path) -> None:
    trained = int(check_model(model).get("context_length"))
    got = {item.seq_len for item in _items(model, text, lengths=None, metrics=("memory",))}
    assert got == {n for n in bench.LENGTHS if n <= trained} and got
    assert _items(model, text, lengths=(2 * trained,), metrics=("memory",)), "memory needs no training"
    with pytest.raises(UsageError, match=f"--seq-len: .* was trained on {trained} tokens, {2 * trained} are more"):
        _items(model, text, lengths=(128, 2 * trained))


def test_all_of_a_measurement_stays_within_its_length(model: Path, text: Path) -> None:
    got = _items(model, text, lengths=(128, 200, 256))
    assert {item.kind for item in got} == {"memory", "speed", "quality", "retrieval", "continuation"}
    assert all(item.seq_len is not None and item.n_ctx <= item.seq_len for item in got)
    # what is asked at 256 is measured at 256, not at a length of the tool's own
    assert {item.plan.ppl_ctx for item in got if item.kind == "quality"} == {128, 200, 256}


def test_f16_is_measured_even_if_it_was_not_asked_for(model: Path, text: Path) -> None:
    got = _items(model, text)
    for kind in ("memory", "speed", "quality", "retrieval", "continuation"):
        assert F16 in {item.quant for item in got if item.kind == kind}
    first = [item.quant for item in got if item.kind == "quality"]
    assert first[0] == F16, "the others are paired with it"


def test_configurations_take_turns_in_orders_of_their_own(model: Path, text: Path) -> None:
    configs = bench.parse_configs([",".join(bench.CONFIGS)])
    got = _items(model, text, configs=configs, repeat=6, metrics=("speed",), lengths=(256,))
    orders = [[i.quant for i in got if i.round == n] for n in range(6)]
    assert all(sorted(o, key=str) == sorted(configs, key=str) for o in orders)
    assert len({tuple(o) for o in orders}) == 6
    assert got == _items(model, text, configs=configs, repeat=6, metrics=("speed",), lengths=(256,))
    assert got != _items(model, text, configs=configs, repeat=6, metrics=("speed",), lengths=(256,), seed=2)


def test_a_text_that_is_too_short_is_refused(model: Path, tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("a few words")
    with pytest.raises(UsageError, match="--text: short.txt has 11 bytes"):
        _items(model, short, metrics=("perplexity",))


def test_a_text_that_can_not_have_so_many_chunks_is_refused_before_anything_runs(model: Path, text: Path) -> None:
    size = text.stat().st_size
    assert _items(model, text, metrics=("perplexity",), lengths=(128,), chunks=size // 128)
    with pytest.raises(UsageError, match=f"--chunks: text.txt has {size} bytes, too few for {size // 128 + 1} chunks"):
        _items(model, text, metrics=("perplexity",), lengths=(128,), chunks=size // 128 + 1)


def test_a_model_that_was_trained_on_less_than_the_least_length(synth_model: Any, text: Path) -> None:
    short = synth_model(n_ctx_train=64)
    with pytest.raises(UsageError, match="--seq-len: .* was trained on 64 tokens, and 128 are the least"):
        _items(short, text, lengths=None)
    assert _items(short, text, lengths=(128,), metrics=("memory",))


def test_configurations_that_are_separated_wrongly() -> None:
    with pytest.raises(KVQuantError, match="--config: .* are separated by ';'"):
        bench.parse_configs(["F16,q8_0/kvq4"])
    with pytest.raises(KVQuantError, match="^--config: 'k9' is no cache type[^;]*;[^;]*$"):
        bench.parse_configs(["k9/kvq4"])


# ---- rows


def test_a_sweep(staged: Any, capsys: pytest.CaptureFixture[str]) -> None:
    run, ran, out = staged
    assert run() == 0
    rows = _rows(out)
    configs = ("F16", "K8V4", "K4V8")
    # 2 lengths; a speed has 2 rounds of prefill and decode
    counts = {"memory": 6, "speed": 24, "quality": 6, "retrieval": 6, "continuation": 6}
    assert {k: sum(r.kind == k for r in rows) for k in counts} == counts and len(rows) == 48
    assert len({bench.row_key(r) for r in rows}) == 48
    assert {r.config for r in rows} == set(configs) and {r.seq_len for r in rows} == {128, 256}
    for r in rows:
        q = KVQuant(r.kvq_key, r.kvq_val)
        assert (r.type_k, r.type_v) == (q.key, q.val) and r.layer_types and r.device == "auto"
        assert r.provenance.command.startswith("kvsplit bench") or r.provenance.command
    for r in _rows(out, "quality"):
        assert r.ppl_ctx == r.seq_len and r.kld_floor == 0 and len(r.nll_chunks or []) == 3
        f16 = next(x for x in rows if x.kind == "quality" and x.config == "F16" and x.seq_len == r.seq_len)
        d = [a - b for a, b in zip(r.nll_chunks or [], f16.nll_chunks or [])]
        assert r.ppl_change == pytest.approx(math.expm1(sum(d) / 3), abs=1e-12)
        if r.config != "F16":
            assert r.ppl_change is not None and r.ppl_change_se is not None
            assert 0 < r.ppl_change_se * (r.ppl or 0) < (r.ppl_se or 0) / 4
    # both sides of a ratio are of the same rounds
    s = {x.config: x for x in results.summarize(rows) if x.seq_len == 256}
    got = stats.ratio(s["K8V4"].decode_samples, s["F16"].decode_samples)
    assert got is not None and got[0] == pytest.approx(1.1)
    assert s["F16"].needles_found == s["F16"].needles == 15 and s["K8V4"].needles_found == 10
    assert s["K8V4"].same_tokens and set(s["K8V4"].same_tokens) == {7}
    table, told = capsys.readouterr()
    assert table.count("K8V4") == 2 and "128 tokens" in table and "15/15" in table and "48 rows measured" in told
    with open(out.with_suffix(".csv"), encoding="utf-8", newline="") as f:
        lines = list(csv.DictReader(f))
    assert [(x["config"], x["seq_len"]) for x in lines] == [(c, n) for n in ("128", "256") for c in configs]
    assert float(lines[1]["kld"]) == s["K8V4"].kld


def test_json(staged: Any, capsys: pytest.CaptureFixture[str]) -> None:
    run, _, out = staged
    assert run("--json", "--metric", "memory") == 0
    data = json.loads(capsys.readouterr().out)
    assert [c["config"] for c in data["configs"]] == ["F16", "K8V4", "K4V8"] * 2
    assert data["configs"][1]["kv_bytes"] == _rows(out)[1].kv_bytes


def test_nan_is_a_row_and_shown(
    staged: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _, out = staged
    monkeypatch.setenv("FAKE_BREAK", "q8_0/kvq4=nan")
    assert run("--metric", "perplexity", lengths="128") == 0
    rows = {r.config: r for r in _rows(out)}
    assert rows["K8V4"].finite is False and rows["K8V4"].ppl_change is None and rows["K4V8"].finite
    assert "NaN" in capsys.readouterr().out


# ---- going on


def test_what_is_there_is_not_measured_again(staged: Any, capsys: pytest.CaptureFixture[str]) -> None:
    run, ran, out = staged
    assert run("--metric", "memory,speed") == 0
    before = out.read_text()
    ran()
    assert run("--metric", "memory,speed") == 2
    assert "--resume goes on with it" in capsys.readouterr().err and out.read_text() == before
    assert run("--metric", "memory,speed", "--resume") == 0
    assert ran() == [] and out.read_text() == before and "0 rows measured, 30 were there" in capsys.readouterr().err
    assert run("--resume", "--metric", "speed", "--repeat", "3") == 0
    assert len(ran()) == 6 and out.read_text().startswith(before), "one more round"
    with open(out.with_suffix(".csv"), encoding="utf-8", newline="") as f:
        lines = list(csv.DictReader(f))
    assert all(x["kv_bytes"] and x["decode_ts"] for x in lines) and len(lines) == 6, "all that the file has"
    assert run("--resume", "--metric", "speed", "--threads", "1") == 0
    assert len(ran()) == 12, "other threads are another speed"


def test_devices_are_kept_apart(staged: Any, capsys: pytest.CaptureFixture[str]) -> None:
    run, ran, out = staged
    assert run("--metric", "memory", "--device", "cpu") == 0
    assert run("--metric", "memory", "--resume") == 0
    assert [r.device for r in _rows(out)] == ["cpu"] * 6 + ["auto"] * 6
    assert run("--metric", "memory", "--resume", "--device", "CUDA0") == 0 and len(_rows(out)) == 18
    assert run("--metric", "memory", "--resume", "--device", "Vulkan0") == 2
    assert "--device: 'Vulkan0' is none of auto, cpu, CUDA0" in capsys.readouterr().err


@pytest.mark.parametrize("cut", ["row", "part"])
def test_a_speed_that_was_cut_between_its_rows(staged: Any, cut: str) -> None:
    run, ran, out = staged
    assert run("--metric", "speed", "--repeat", "1", lengths="128") == 0
    lines = out.read_bytes().splitlines(keepends=True)
    out.write_bytes(b"".join(lines[:-1]) + (lines[-1][:50] if cut == "part" else b""))
    ran()
    assert run("--metric", "speed", "--repeat", "1", "--resume", lengths="128") == 0
    again = out.read_bytes().splitlines(keepends=True)
    assert len(ran()) == 1 and again[:-1] == lines[:-1] and len(again) == len(lines)
    assert bench.row_key(_rows(out)[-1]) == bench.row_key(Row.from_json(json.loads(lines[-1])))


def test_a_configuration_that_fails_does_not_end_the_sweep(
    staged: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, ran, out = staged
    monkeypatch.setenv("FAKE_BREAK", "q8_0/kvq4=fail")
    assert run("--metric", "perplexity") == 1
    assert "K8V4" not in {r.config for r in _rows(out)} and len(_rows(out)) == 4
    assert "q8_0/kvq4, quality, 128 tokens: llama-perplexity ended with exit code 1" in capsys.readouterr().err
    monkeypatch.delenv("FAKE_BREAK")
    ran()
    assert run("--metric", "perplexity", "--resume") == 0 and ran() == ["base", "q8_0/kvq4"] * 2
    late = [r for r in _rows(out) if r.config == "K8V4"]
    assert all(r.ppl_change is not None and r.kld_floor == 0 for r in late), "paired with f16 of the earlier run"


def test_what_ran_must_be_what_was_asked(staged: Any, capsys: pytest.CaptureFixture[str],
                                         monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    run, _, out = staged
    monkeypatch.setenv("FAKE_TYPE_K", "q8_0")
    assert run("--metric", "speed", "--repeat", "1", lengths="128") == 1
    assert {r.config for r in _rows(out)} == {"K8V4"}
    assert "layer 0 was asked to store kvq4/q8_0, it stores q8_0/q8_0" in capsys.readouterr().err


def test_two_writers_are_refused(staged: Any, capsys: pytest.CaptureFixture[str]) -> None:
    run, _, out = staged
    assert run("--metric", "memory") == 0
    with results.Journal(out):
        assert run("--metric", "memory", "--resume") == 1
    assert "another run writes to" in capsys.readouterr().err


def test_a_file_of_another_kind_is_left_alone(staged: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, _, out = staged
    other = tmp_path / "notes.txt"
    other.write_text("mine")
    assert run("--out", other, "--resume") == 2 and "must end with .jsonl" in capsys.readouterr().err
    other = tmp_path / "notes.jsonl"
    other.write_text('{"mine": 1}\n')
    assert run("--out", other, "--resume") == 1 and "line 1" in capsys.readouterr().err
    assert other.read_text() == '{"mine": 1}\n'


def test_dry_run_measures_and_writes_nothing(staged: Any, capsys: pytest.CaptureFixture[str]) -> None:
    run, ran, out = staged
    assert run("--dry-run") == 0
    plan = capsys.readouterr().out
    assert not out.exists() and ran() == ["bench:f16/f16"], "a short prefill tells the time"
    assert plan.count("quality") == 2 and "in all" in plan
    assert run("--metric", "memory") == 0
    parts = {(p["seq_len"], p["kind"]): p for p in _plan(capsys, run)["parts"]}
    assert parts[128, "memory"]["done"] == 3 and parts[128, "memory"]["to_do"] == 0
    assert parts[256, "speed"]["to_do"] == 6 and parts[256, "speed"]["seconds"] > parts[128, "speed"]["seconds"]


def _plan(capsys: pytest.CaptureFixture[str], run: Callable[..., int]) -> Any:
    capsys.readouterr()
    assert run("--dry-run", "--json") == 0
    return json.loads(capsys.readouterr().out)


def test_rows_of_a_comparison_belong_to_no_length(staged: Any, capsys: pytest.CaptureFixture[str]) -> None:
    run, ran, out = staged
    assert run("--metric", "memory,perplexity", lengths="128") == 0
    text = out.read_text()
    rows = [replace(r, seq_len=None) for r in _rows(out)]  # the same, but as kvsplit compare writes them
    out.write_bytes(b"".join(results.json_line(r.to_json()) for r in rows))
    ran(), capsys.readouterr()
    assert run("--metric", "memory,perplexity", "--resume", lengths="128") == 0
    told = capsys.readouterr()
    assert "6 rows measured, 0 were there" in told.err and " 0 tokens" not in told.out and len(ran()) == 4
    assert len(out.read_text().splitlines()) == 2 * len(text.splitlines())


def test_a_layer_that_is_not_there_is_refused_by_name(staged: Any, capsys: pytest.CaptureFixture[str]) -> None:
    run, ran, out = staged
    assert run("--config", "q8_0/kvq4,40=q8_0", "--metric", "memory") == 2 and ran() == [] and not out.exists()
    assert "--config: q8_0/kvq4,40=q8_0: kvq_val: slice '40' is out of range" in capsys.readouterr().err


def test_a_file_that_is_no_summary_is_not_replaced(staged: Any, capsys: pytest.CaptureFixture[str]) -> None:
    run, ran, out = staged
    csv_file = out.with_suffix(".csv")
    out.parent.mkdir()
    csv_file.write_text("mine\n")
    assert run("--metric", "speed") == 2 and ran() == [] and not out.exists(), "hours must not be lost"
    assert f"--out: {csv_file} would be replaced" in capsys.readouterr().err and csv_file.read_text() == "mine\n"
    csv_file.unlink()
    assert run("--metric", "memory") == 0 and run("--metric", "memory", "--resume") == 0, "ours is"
    out.unlink()
    out.mkdir()
    assert run("--metric", "memory", "--resume") == 2 and "is a folder" in capsys.readouterr().err


def test_a_length_that_can_not_be_measured_does_not_end_the_sweep(
    staged: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _, out = staged

    def too_short(*args: Any, **more: Any) -> Any:
        raise UsageError("--text: text.txt has 9 tokens")

    monkeypatch.setattr(bench.retrieval, "needle", too_short)
    monkeypatch.setenv("FAKE_CHUNKS", "2")  # of the 3 that are asked for
    assert run() == 1
    err = capsys.readouterr().err
    assert "quality, 128 tokens: --chunks: text.txt has 2 chunks" in err
    assert "q8_0/kvq4, retrieval, 256 tokens: --text: text.txt has 9 tokens" in err
    kinds = {(r.kind, r.seq_len) for r in _rows(out)}
    assert kinds == {(k, n) for k in ("memory", "speed", "continuation") for n in (128, 256)}
    assert out.with_suffix(".csv").exists()


def test_without_f16_nothing_is_held_against_it(
    staged: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, ran, out = staged
    monkeypatch.setenv("FAKE_BREAK", "f16/f16=fail")
    assert run("--metric", "perplexity", lengths="128") == 1 and not out.exists() and ran() == ["base", "f16/f16"]
    assert "q8_0/kvq4, quality, 128 tokens: not measured, because f16 failed" in capsys.readouterr().err
    monkeypatch.delenv("FAKE_BREAK")
    assert run("--metric", "perplexity", "--resume", lengths="128") == 0
    assert len(_rows(out)) == 3 and all(r.ppl_change is not None for r in _rows(out)), "rows stay, so they are whole"


def test_a_full_disk_ends_the_sweep(staged: Any, capsys: pytest.CaptureFixture[str],
                                    monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    run, ran, _ = staged

    def full(self: Any, *rows: Row) -> None:
        raise CacheFolderError("b.jsonl can't be written: No space left on device")

    monkeypatch.setattr(results.Journal, "write", full)
    assert run("--metric", "perplexity") == 1 and ran() == ["base", "f16/f16"]
    assert "No space left" in capsys.readouterr().err


def test_the_time_is_told_from_speeds_of_this_machine_and_device(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = replace(_some_row(), kind="speed", device="cpu", n_prompt=32, n_gen=0, n_depth=0, n_threads=2, median_ts=50.0)
    short_run = speed.Speed(F16, 128, 0, [10.0])
    monkeypatch.setattr(speed, "run", lambda *a, **k: [short_run])
    told = [bench.seconds_a_token(model, [row], *asked) for asked in (("cpu", None), ("cpu", 2), ("cpu", 1))]
    assert told == [1 / 50, 1 / 50, 1 / 10]
    assert bench.seconds_a_token(model, [row], "auto", None) == 1 / 10


def test_text_from_a_pipe(staged: Any, tmp_path: Path, text: Path) -> None:
    run, _, out = staged
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with subprocess.Popen(["sh", "-c", 'exec cat "$1" > "$2"', "sh", str(text), str(pipe)]):
        assert run("--text", pipe, "--metric", "perplexity", lengths="128") == 0
    assert {r.text_sha256 for r in _rows(out)} == {hashlib.sha256(text.read_bytes()).hexdigest()}


# ---- killed


@pytest.mark.parametrize(
    ("signum", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (getattr(signal, "SIGHUP", signal.SIGTERM), 143)],
)
def test_a_sweep_that_is_ended_leaves_rows_and_nothing_else(
    staged: Any, tmp_path: Path, model: Path, text: Path, monkeypatch: pytest.MonkeyPatch, signum: int, code: int
) -> None:
    monkeypatch.setenv("FAKE_BREAK", "q8_0/kvq4=hang")
    with _started(tmp_path, model, text, signum) as (proc, out):
        up = tmp_path / "log.up"
        end = time.monotonic() + 60
        while not up.exists() or not up.read_text():
            time.sleep(0.01)
            assert proc.poll() is None and time.monotonic() < end
        proc.send_signal(signum)
        _, told = proc.communicate(timeout=30)
        assert proc.returncode == code, told
        assert len(_rows(out)) == 1 and f"{out} has 1 new rows; with --resume" in told
        assert not Path(up.read_text()).parent.exists() and not list((tmp_path / "tmp").iterdir())


def test_a_base_that_a_kill_left_is_removed_by_the_next_run(
    staged: Any, tmp_path: Path, model: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _, out = staged
    monkeypatch.setenv("FAKE_BREAK", "q8_0/kvq4=hang")
    with _started(tmp_path, model, text, signal.SIGINT) as (proc, _):
        up = tmp_path / "log.up"
        end = time.monotonic() + 60
        while not up.exists() or not up.read_text():
            time.sleep(0.01)
            assert proc.poll() is None and time.monotonic() < end
        base = Path(up.read_text()).parent
        past = time.time() - 60
        os.utime(base / "lock", (past, past))
        quality._remove_orphans(base.parent)
        assert base.exists(), "its run lives"
        proc.kill()
        proc.communicate()
    (base / "mine").touch()
    quality._remove_orphans(base.parent)
    assert (base / "mine").exists() and (base / "lock").exists(), "somebody uses the folder"
    (base / "mine").unlink()
    monkeypatch.delenv("FAKE_BREAK")
    monkeypatch.setattr(tempfile, "tempdir", str(base.parent))
    assert run("--metric", "perplexity", lengths="128") == 0 and not base.exists()


@contextlib.contextmanager
def _started(tmp_path: Path, model: Path, text: Path, signum: int) -> Iterator[Tuple["subprocess.Popen[str]", Path]]:
    """A sweep of perplexities, in a process that hears a signal also where the tests run in the background."""
    (tmp_path / "tmp").mkdir()
    out = tmp_path / "ended" / "b.jsonl"
    code = f"""if True:
        import signal, sys
        sys.path[:0] = {[str(Path(kvsplit.__file__).parent.parent), str(Path(__file__).parent)]!r}
        signal.signal({int(signum)}, signal.default_int_handler if {signum == signal.SIGINT} else signal.SIG_DFL)
        import fakes
        fakes.stand_in()
        from kvsplit import cli
        sys.exit(cli.main(sys.argv[1:]))
    """
    args = ["bench", str(model), "--text", str(text), "--config", CONFIGS, "--seq-len", "128", "--chunks", "3"]
    args += ["--metric", "perplexity", "--out", str(out)]
    env = {**os.environ, "TMPDIR": str(tmp_path / "tmp")}
    with subprocess.Popen([sys.executable, "-c", code, *args], env=env, text=True, encoding="utf-8",
                          stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as proc:  # fmt: skip
        try:
            yield proc, out
        finally:
            proc.kill()


def test_a_sweep_that_is_killed_again_and_again_gives_the_same_rows(
    staged: Any, tmp_path: Path, model: Path, text: Path
) -> None:
    run, _, whole = staged
    assert run() == 0
    out = tmp_path / "killed" / "b.jsonl"
    code = f"""if True:
        import sys
        sys.path[:0] = {[str(Path(kvsplit.__file__).parent.parent), str(Path(__file__).parent)]!r}
        import fakes
        fakes.stand_in()
        from kvsplit import cli
        sys.exit(cli.main(sys.argv[1:]))
    """
    args = ["bench", str(model), "--text", str(text), "--config", CONFIGS, "--seq-len", "128,256", "--repeat", "2"]
    args += ["--chunks", "3", "--out", str(out), "--resume"]
    env = {**os.environ, "TMPDIR": str(tmp_path), "FAKE_SECONDS": "0.05"}
    rng = random.Random()
    # anywhere in the file, also within a row; what it grows by before the kill is chance
    sizes = sorted(rng.randrange(whole.stat().st_size * 9 // 10) for _ in range(5))
    end = time.monotonic() + 120
    kills, told = 0, b""
    for size in [*sizes, 10**9]:
        with subprocess.Popen(
            [sys.executable, "-c", code, *args], env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        ) as proc:
            while proc.poll() is None and (out.stat().st_size if out.exists() else 0) <= size:
                time.sleep(0.002)
                assert time.monotonic() < end
            if proc.poll() is None:
                time.sleep(rng.uniform(0, 0.05))
                proc.kill()
                kills += 1
            _, told = proc.communicate()
    assert proc.returncode == 0, told.decode()
    assert kills >= 3, f"killed {kills} times at {sizes}"

    def measured(path: Path) -> Dict[bench.Key, Any]:
        rows = _rows(path)
        keyed = {bench.row_key(r): r for r in rows}
        assert len(keyed) == len(rows), "a row was measured twice"
        volatile = {"run_id", "test_time", "seconds", "command", "peak_rss"}
        return {k: {n: v for n, v in r.to_json().items() if n not in volatile} for k, r in keyed.items()}

    assert measured(out) == measured(whole)


def test_rows_of_another_model_do_not_count(staged: Any, synth_model: Callable[..., Path], text: Path) -> None:
    run, ran, out = staged
    assert run("--metric", "speed", "--repeat", "1", lengths="128") == 0
    ran()
    other = synth_model(n_layer=3)
    args = ["--text", str(text), "--config", CONFIGS, "--seq-len", "128", "--repeat", "1", "--metric", "speed"]
    assert cli.main(["bench", str(other), *args, "--out", str(out), "--resume"]) == 0
    assert len(ran()) == 3 and len({r.provenance.model_sha256 for r in _rows(out)}) == 2
    assert len(results.summarize(_rows(out))) == 6


def test_an_older_row_without_a_device_counts_as_auto() -> None:
    row = replace(_some_row(), device=None)
    assert bench.row_key(row) == bench.row_key(replace(row, device="auto"))
    assert bench.row_key(row) != bench.row_key(replace(row, device="cpu"))


def _some_row() -> Row:
    p = results.Provenance("r", "0", "l", "s", "p", "c", "m", "h", "3", "linux")
    return Row("memory", "F16", "f16", "f16", "f16", "f16", p, n_ctx=1, kv_bytes=1, kv_bytes_f16=1, saving=0.0,
               bits_per_value=16.0)  # fmt: skip
