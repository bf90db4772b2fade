# SPDX-License-Identifier: MIT
"""The sweep of pairs: plan, file, chunks, report, exit codes. llama-perplexity is a made-up program here."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional

import fakes
import pytest

import kvsplit
from kvsplit import bench, plots, quality, results, runs, stats, sweep
from kvsplit.errors import CacheTypeError, KVSplitError, ResultError, UsageError
from kvsplit.memory import kv_memory
from kvsplit.policy import KVQuant
from kvsplit.results import Row


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A text whose name takes more bytes than characters."""
    path = tmp_path / "téxt.txt"
    path.write_text("word " * 4000, encoding="utf-8")
    return path


@pytest.fixture
def staged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, synth_model: Callable[..., Path], text: Path) -> Any:
    """``sweep.main`` on a made-up llama-perplexity: returns a function, and the file that logs what ran."""
    fakes.install(tmp_path / "native", "llama-perplexity")
    log = tmp_path / "log"
    log.touch()
    monkeypatch.setenv("KVSPLIT_NATIVE_DIR", str(tmp_path / "native"))
    monkeypatch.setenv("FAKE_LOG", str(log))
    monkeypatch.setenv("PYTHONUTF8", "1")
    monkeypatch.setattr(sweep.native, "load", fakes.Lib)
    monkeypatch.setattr(sweep.tools, "check", lambda: None)
    monkeypatch.setattr(bench.probe, "kv_cache", fakes.kv_cache)
    out = tmp_path / "res" / "s.jsonl"

    def run(*args: Any, config: Optional[str] = "F16;q4_0/q4_0;8/4", model: Any = None) -> int:
        given = ["--model", str(model or synth_model()), "--text", str(text), "--ppl-ctx", "256", "--chunks", "4"]
        given += ["--config", config] if config else []
        return sweep.main([*given, "--out", str(out), *map(str, args)])

    def ran() -> List[str]:
        lines = log.read_text().split()
        log.write_text("")
        return lines

    return run, ran, out


# ---- plan


def test_sets() -> None:
    pairs = sweep.config_set("pairs")
    assert len(pairs) == len(set(pairs)) == 49
    assert [q.label for q in pairs[:8]] == ["F16", "K8V8", "K6V6", "K5V5", "K4V4", "K3V3", "K2V2", "K8V6"]
    assert {q.key for q in pairs} == {q.val for q in pairs} == {"f16", "q8_0", "kvq6", "kvq5", "kvq4", "kvq3", "kvq2"}
    formats = sweep.config_set("formats")
    assert [q.text for q in formats] == list(sweep.FORMATS) and formats[0] == KVQuant()
    with pytest.raises(UsageError, match="--set"):
        sweep.config_set("others")


def test_a_set_of_types_that_are_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "FORMATS", ("kvq7/kvq7",))
    with pytest.raises(CacheTypeError, match="--set.*kvq7"):
        sweep.config_set("formats")


def test_dry_run_measures_and_writes_nothing(staged: Any, capsys: pytest.CaptureFixture[str]) -> None:
    run, ran, out = staged
    assert run("--set", "formats", "--dry-run", config=None) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "16 to do" in lines[0] and "téxt.txt, 4 chunks of 256 tokens" in lines[0] and len(lines) == 17
    assert lines[1].split() == ["to", "do", "f16/f16", "16.00", "bits"]
    assert ran() == [] and not out.parent.exists()
    assert run() == 0
    ran()
    before = out.read_bytes()
    assert run("--dry-run", config="F16;5/5") == 0
    assert [s.split()[0] for s in capsys.readouterr().out.splitlines()[-2:]] == ["done", "to"]
    assert ran() == [] and out.read_bytes() == before


# ---- the run


def test_rows(staged: Any, synth_model: Callable[..., Path]) -> None:
    run, ran, out = staged
    assert run() == 0
    assert ran() == ["base", "f16/f16", "q4_0/q4_0", "q8_0/kvq4"]
    f16, q4, split = results.read(out)
    assert [r.config for r in (f16, q4, split)] == ["F16", "q4_0/q4_0", "K8V4"]
    for r in (f16, q4, split):
        size = kv_memory(synth_model(), KVQuant(r.kvq_key, r.kvq_val), 256).total_bytes
        assert r.kv_bytes == r.kv_bytes_expected == size and r.finite is True and r.n_ctx == r.ppl_ctx == 256
        assert r.kld_chunks and len(r.kld_chunks) == r.chunks == 4 and (r.seconds or 0) > 0
        assert statistics.fmean(r.kld_chunks) == pytest.approx(r.kld, abs=1e-9)
        assert r.kld_floor == f16.kld == 0
    assert (q4.bits_per_value, split.bits_per_value) == (4.5, 6.5)
    assert (split.type_k, split.type_v, split.layer_types) == ("q8_0", "kvq4", [[2, "q8_0", "kvq4"]])
    p = split.provenance
    assert (p.patches_sha256, p.cpu_info, p.gpu_info, p.backends) == ("patches", "A CPU", "A GPU (big)", "CUDA0,CPU")
    # one schema: what reads the results of a comparison reads these
    assert [s.bits_per_value for s in results.summarize([f16, q4, split])] == [16, 4.5, 6.5]


def test_what_is_there_is_not_measured_again(staged: Any, capsys: pytest.CaptureFixture[str],
                                             synth_model: Callable[..., Path], text: Path) -> None:  # fmt: skip
    run, ran, out = staged
    assert run() == 0
    ran()
    before = out.read_bytes()
    assert run() == 0
    assert ran() == [] and out.read_bytes() == before
    assert "0 measured, 3 were there" in capsys.readouterr().err
    assert run(config="8/4;4/8") == 0
    assert ran() == ["base", "kvq4/q8_0"] and out.read_bytes().startswith(before)
    # the floor is known from the earlier run
    assert list(results.read(out))[-1].kld_floor == 0
    assert run("--chunks", 3) == 0 and ran()[:2] == ["base", "f16/f16"]
    assert run(model=synth_model(seed=1)) == 0 and ran()[:2] == ["base", "f16/f16"]
    text.write_text("another " * 4000, encoding="utf-8")
    assert run() == 0 and ran()[:2] == ["base", "f16/f16"]


def test_other_patches_are_another_measurement(staged: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run, ran, out = staged
    assert run() == 0
    ran()
    monkeypatch.setattr(fakes.Lib, "build", replace(fakes.Lib.build, patches_sha256="others"))
    assert run() == 0 and len(ran()) == 4 and len(list(results.read(out))) == 6


def test_two_models_have_a_base_each(staged: Any, synth_model: Callable[..., Path]) -> None:
    run, ran, out = staged
    other = synth_model(seed=2)
    assert run("--model", other, "--model", other, config="F16") == 0  # given twice, measured once
    assert ran() == ["base", "f16/f16"] * 2
    assert len({r.provenance.model_sha256 for r in results.read(out)}) == 2


@pytest.mark.parametrize("at", [1, 200, "é", -2, -1])
def test_a_row_that_a_kill_cut_is_measured_again(staged: Any, capsys: pytest.CaptureFixture[str], at: Any) -> None:
    run, ran, out = staged
    assert run() == 0
    ran()
    data = out.read_bytes()
    last = data.rstrip(b"\n").rfind(b"\n") + 1
    # "é": within a character of two bytes; -2: the brace is missing; -1: only the end of the line is
    stop = data.rfind("é".encode()) + 1 if at == "é" else last + at if at > 0 else len(data) + at
    assert stop > last
    out.write_bytes(data[:stop])
    assert len(results.read_rows(out)) == (3 if at == -1 else 2)  # a report doesn't mind
    assert out.read_bytes() == data[:stop]
    capsys.readouterr()
    assert run() == 0
    told = capsys.readouterr().err
    if at == -1:
        assert ran() == [] and out.read_bytes() == data and "removed" not in told
    else:
        assert ran() == ["base", "q8_0/kvq4"] and f"removed {stop - last} bytes" in told
    rows = list(results.read(out))
    assert [r.config for r in rows] == ["F16", "q4_0/q4_0", "K8V4"]


def test_a_damaged_line_within_is_an_error_and_stays(staged: Any, capsys: pytest.CaptureFixture[str]) -> None:
    run, ran, out = staged
    assert run() == 0
    ran()
    for bad in (b"{\n", b"[]\n", b"3\n", b'{"kind": "quality"}\n'):
        lines = out.read_bytes().splitlines(keepends=True)
        damaged = b"".join([lines[0], bad, *lines[1:]])
        out.with_name("d.jsonl").write_bytes(damaged)
        assert run("--out", out.with_name("d.jsonl")) == 1
        assert "line 2" in capsys.readouterr().err and ran() == []
        assert out.with_name("d.jsonl").read_bytes() == damaged


def test_two_writers_are_refused(staged: Any, capsys: pytest.CaptureFixture[str]) -> None:
    run, ran, out = staged
    with results.Journal(out):
        assert run() == 1
        assert "another run writes" in capsys.readouterr().err and ran() == []
        assert run("--dry-run") == 0  # reading is no matter
    assert not out.exists()  # nothing empty stays
    assert run() == 0


def test_nan_is_a_row(staged: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run, ran, out = staged
    monkeypatch.setenv("FAKE_BREAK", "q4_0/q4_0=nan")
    assert run() == 0
    told = capsys.readouterr()
    assert "q4_0/q4_0: attention gave NaN" in told.err and "| q4_0/q4_0 | 4.50 | NaN |" in told.out
    _, row, last = results.read(out)
    assert (row.finite, row.ppl, row.kld, row.kld_chunks) == (False, None, None, None) and row.kv_bytes
    assert last.config == "K8V4" and last.finite
    ran()
    assert run() == 0 and ran() == []
    with pytest.raises(ResultError, match="finite"):
        replace(row, kld=1.0).validate()
    with pytest.raises(ResultError, match="ppl"):
        replace(row, finite=True).validate()


def test_a_configuration_that_fails_does_not_end_the_run(staged: Any, monkeypatch: pytest.MonkeyPatch,
                                                         capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    run, ran, out = staged
    monkeypatch.setenv("FAKE_BREAK", "q4_0/q4_0=fail")
    assert run() == 1
    told = capsys.readouterr().err
    assert (
        "q4_0/q4_0, quality: llama-perplexity ended with exit code 1" in told
        and "2 measured, 0 were there, 1 failed" in told
    )
    assert [r.config for r in results.read(out)] == ["F16", "K8V4"]
    monkeypatch.delenv("FAKE_BREAK")
    ran()
    assert run() == 0 and ran() == ["base", "q4_0/q4_0"]


def test_types_that_were_not_stored_are_an_error(staged: Any, monkeypatch: pytest.MonkeyPatch,
                                                 capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    run, ran, out = staged
    monkeypatch.setattr(bench.probe, "kv_cache", lambda m, n, q, d: fakes.kv_cache(m, n, KVQuant()))
    assert run(config="F16;8/4") == 1
    assert "layer 0 was asked to store q8_0/kvq4, it stores f16/f16" in capsys.readouterr().err
    assert ran() == ["base", "f16/f16"] and len(list(results.read(out))) == 1


def test_library_that_lacks_a_type(staged: Any, monkeypatch: pytest.MonkeyPatch,
                                   capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    run, ran, out = staged
    monkeypatch.setattr(fakes.Lib, "types", ("f16", "q8_0", "q4_0"))
    assert run(config="F16;8,:1=4/8") == 1
    assert "can't store kvq4" in capsys.readouterr().err and ran() == [] and not out.exists()


def test_text_that_is_too_short(staged: Any, monkeypatch: pytest.MonkeyPatch,
                                capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    run, ran, out = staged
    monkeypatch.setenv("FAKE_CHUNKS", "3")
    assert run() == 2
    assert "--chunks: téxt.txt has 3 chunks" in capsys.readouterr().err and ran() == ["base"] and not out.exists()


@pytest.mark.parametrize(
    ("args", "config", "match"),
    [
        ([], None, "--set"),
        (["--set", "pairs"], "F16", "--config"),
        (["--report"], None, "--report"),
        ([], "K7V7", "--config"),
        (["--ppl-ctx", "8193"], "F16", "--ppl-ctx"),
        (["--chunks", "1", "--ppl-ctx", "64"], "F16", "at least 100"),
        (["--model", "none.gguf"], "F16", "none.gguf"),
    ],
)
def test_wrong_usage(staged: Any, capsys: pytest.CaptureFixture[str], args: Any, config: Any, match: str) -> None:
    run, ran, out = staged
    code = run(*args, config=config)
    told = capsys.readouterr()
    assert code == (1 if match == "none.gguf" else 2)
    assert match in told.err and told.err.count("\n") == 1 and told.out == "" and ran() == [] and not out.exists()


@pytest.mark.parametrize("args", [["--set", "others"], ["--chunks", "0"], ["--chunks", "x"], ["--frob"]])
def test_wrong_options(staged: Any, capsys: pytest.CaptureFixture[str], args: Any) -> None:
    with pytest.raises(SystemExit) as e:
        staged[0](*args)
    assert e.value.code == 2 and args[0] in capsys.readouterr().err


def test_disk_that_fills_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "s.jsonl"

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    with results.Journal(path) as j:
        monkeypatch.setattr(results.os, "fsync", full)
        with pytest.raises(KVSplitError, match="No space left"):
            j.write(_row("f16", "f16", [0.0]))
        assert j.rows == []


def _heed_ctrl_c() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextlib.contextmanager
def _sweeping(args: List[str], **kw: Any) -> Iterator["subprocess.Popen[str]"]:
    """A sweep in a process of its own, with the same stand-ins."""
    code = f"""if True:
        import sys
        sys.path[:0] = {[str(Path(kvsplit.__file__).parent.parent), str(Path(__file__).parent)]!r}
        import fakes
        from kvsplit import bench, sweep
        sweep.native.load = fakes.Lib
        sweep.tools.check = lambda: None
        bench.probe.kv_cache = fakes.kv_cache
        sys.exit(sweep.main(sys.argv[1:]))
    """
    command = [sys.executable, "-c", code, *args]
    with subprocess.Popen(command, text=True, preexec_fn=_heed_ctrl_c, stderr=subprocess.PIPE, **kw) as proc:
        try:
            yield proc
        finally:
            proc.kill()


@pytest.mark.skipif(sys.platform == "win32", reason="no signals there")
@pytest.mark.parametrize(
    ("sig", "code", "message"),
    [("SIGINT", 130, "interrupted"), ("SIGTERM", 143, "terminated"), ("SIGKILL", -9, "")],
)
def test_an_interrupted_run_leaves_a_file_that_the_next_continues(
    staged: Any, tmp_path: Path, synth_model: Callable[..., Path], text: Path, sig: str, code: int, message: str
) -> None:
    run, ran, out = staged
    (tmp_path / "tmp").mkdir()
    env = {**os.environ, "FAKE_BREAK": "q4_0/q4_0=hang", "TMPDIR": str(tmp_path / "tmp")}
    args = ["--model", str(synth_model()), "--text", str(text), "--ppl-ctx", "256", "--chunks", "4"]
    args += ["--config", "F16;q4_0/q4_0;8/4", "--out", str(out)]
    up = tmp_path / "log.up"
    with _sweeping(args, env=env) as proc:
        end = time.monotonic() + 60
        while not up.exists() or not up.read_text():
            assert proc.poll() is None and time.monotonic() < end
            time.sleep(0.02)
        assert run() == 1  # it is being written
        proc.send_signal(getattr(signal, sig))
        _, told = proc.communicate(timeout=30)
    assert proc.returncode == code and message in told
    if sig != "SIGKILL":
        assert list((tmp_path / "tmp").iterdir()) == [] and "Traceback" not in told and str(out) in told
    assert [r.config for r in results.read(out)] == ["F16"]
    ran()
    # a killed process leaves its tool; the lock is gone with the process all the same
    assert run() == 0 and ran() == ["base", "q4_0/q4_0", "q8_0/kvq4"]


# ---- chunk by chunk

PRINTED = """
chunk             PPL               ln(PPL(Q)/PPL(base))          KL Divergence              Δp RMS            Same top p
   1      10.0000 ±    3.0000       0.01000 ±    0.00900       0.01000 ±    0.00050     2.200 ±  0.200 %    96.000 ±  1.200 %
   2      11.0000 ±    1.4000      -0.01500 ±    0.00600       0.01500 ±    0.00035     2.300 ±  0.100 %    96.000 ±  0.800 %
   3   12345.0000 ±  111.4000      -0.01500 ±       -nan       0.01334 ±    0.00035     2.300 ±    nan %    96.000 ±  0.800 %
"""  # noqa: E501


def test_chunks_are_read() -> None:
    assert quality.chunk_klds(PRINTED) == pytest.approx([0.01, 0.02, 0.01002])
    # the mean of all chunks is known with one digit more
    assert quality.chunk_klds(PRINTED, 0.013336) == pytest.approx([0.01, 0.02, 0.010008])
    assert quality.chunk_klds(PRINTED.replace("±", "\ufffd\ufffd")) == quality.chunk_klds(PRINTED)
    real = (Path(__file__).parent / "data" / "kl_divergence.txt").read_text(encoding="utf-8")
    assert quality.chunk_klds(real, quality.parse(real).kld) == pytest.approx([0.00942, 0.007968])


@pytest.mark.parametrize(
    ("text", "mean", "match"),
    [
        ("", None, "no chunk"),
        (PRINTED.replace("   2   ", "   4   "), None, "chunk 4 after chunk 1"),
        (PRINTED, 0.014, "last chunk"),
    ],
)
def test_chunks_that_are_not_there(text: str, mean: Optional[float], match: str) -> None:
    with pytest.raises(ResultError, match=match):
        quality.chunk_klds(text, mean)


def test_rounding_of_the_chunks_is_as_small_as_said() -> None:
    """Against exact chunks: the mean holds, and the standard error grows by what the module says."""
    import random

    rng = random.Random(3)
    n, extra, worst = 64, [], 0.0
    for _ in range(200):
        exact = [rng.uniform(0.01, 0.02) for _ in range(n)]
        lines = []
        for i in range(n):
            mean = statistics.fmean(exact[: i + 1])
            lines.append(f"{i + 1:4d} 10.0 ± 1.0  0.01 ± 0.01  {mean:10.5f} ± 0.00100  1.0 ± 0.1 %  95.0 ± 1.0 %")
        kld = round(statistics.fmean(exact), 6)
        got = quality.chunk_klds("\n".join(lines), kld)
        assert statistics.fmean(got) == pytest.approx(kld, abs=1e-8)
        noise = [a - b for a, b in zip(got, exact)]
        worst = max(worst, *(abs(x) / (i + 1) for i, x in enumerate(noise)))
        extra.append(statistics.pvariance(noise) / n)
    assert worst <= 1e-5  # two roundings of at most 0.5e-5, times n and n - 1
    # the part of a difference has twice the variance of one configuration's
    said = 3.3e-6 * math.sqrt(n)
    # the mean of 200 sums of 64 squares: known to about 1 %
    assert math.sqrt(2 * statistics.fmean(extra)) == pytest.approx(said, rel=0.05)


def _row(key: str, val: str, chunks: Optional[List[float]], model: str = "m.gguf", **kw: Any) -> Row:
    from kvsplit.results import Provenance

    q = KVQuant(key, val)
    prov = Provenance("r", "0", "l", "s", "p", "c", model, model, "3", "x")
    kld = None if chunks is None else statistics.fmean(chunks)
    base: Dict[str, Any] = dict(
        kind="quality", config=q.label, kvq_key=q.key, kvq_val=q.val, type_k=key, type_v=val, provenance=prov,
        text="t.txt", text_sha256="t", ppl_ctx=256, chunks=4, kv_bytes=int(1000 * q.bits_per_value()),
        kv_bytes_f16=16000, saving=1 - int(1000 * q.bits_per_value()) / 16000, bits_per_value=q.bits_per_value(),
        finite=kld is not None, kld=kld, kld_se=None if kld is None else kld / 10, kld_chunks=chunks,
        ppl=None if kld is None else 20.0, ppl_se=None if kld is None else 1.0,
    )  # fmt: skip
    return Row(**{**base, **kw})


def test_differences_are_paired() -> None:
    a = _row("kvq4", "kvq4", [0.010, 0.030, 0.020, 0.050])
    b = _row("q4_0", "q4_0", [0.012, 0.031, 0.022, 0.053])
    d = sweep.difference(a, b)
    assert d is not None and d.mean == pytest.approx(-0.002) and d.n == 4
    assert d.se == pytest.approx(statistics.stdev([0.002, 0.001, 0.002, 0.003]) / 2) and d.beyond
    # far below the standard errors of both
    assert abs(d.mean) < (a.kld_se or 0)
    assert not stats.Difference(0.002, 0.001, 4).beyond and stats.Difference(-0.0021, 0.001, 4).beyond
    for other in (None, [0.1], [0.1, 0.2]):
        assert sweep.difference(a, replace(b, kld_chunks=other)) is None
    assert sweep.difference(replace(a, kld_chunks=[0.1]), replace(b, kld_chunks=[0.2])) is None


# ---- report


def _klds(rows: int, k: float, v: float) -> List[float]:
    return [k + v + 0.001 * i for i in range(rows)]


def _some() -> List[Row]:
    return [
        _row("f16", "f16", [0.0, 0.0, 0.0, 0.0]),
        _row("q8_0", "kvq4", [0.01, 0.02, 0.01, 0.02]),
        _row("kvq4", "q8_0", [0.04, 0.05, 0.04, 0.06]),
        _row("kvq4", "kvq4", [0.05, 0.06, 0.05, 0.07]),
        _row("q4_0", "q4_0", [0.07, 0.08, 0.07, 0.09]),
        _row("q8_0", "q4_0", [0.01, 0.03, 0.01, 0.01]),
        _row("q5_0", "q5_0", [0.02, 0.03, 0.02, 0.04]),
        _row("kvq2", "kvq2", None),
    ]


def test_formats_report() -> None:
    lines = sweep.formats_report(_some())
    table, versus = "\n".join(lines).split("\n\n")
    assert "| kvq2/kvq2 | 2.50 | NaN | - |" in table and table.count("\n") == 9
    rows = {tuple(s.split(" | ")[i] for i in (0, 3)): s for s in versus.splitlines()[2:]}
    # of the same size, then of the next larger one; f16 and our own are no reference
    assert set(rows) == {
        ("| q8_0/kvq4", "q8_0/q4_0"), ("| kvq4/q8_0", "q8_0/q4_0"), ("| kvq4/kvq4", "q4_0/q4_0"),
        ("| kvq4/kvq4", "q5_0/q5_0"), ("| kvq2/kvq2", "q4_0/q4_0"),
    }  # fmt: skip
    assert rows["| kvq4/kvq4", "q4_0/q4_0"].endswith("| 0.742 | -0.02000 ± 0.00000 | yes, better |")
    assert rows["| kvq4/kvq4", "q5_0/q5_0"].endswith("| 2.091 | +0.03000 ± 0.00000 | yes, worse |")
    assert rows["| q8_0/kvq4", "q8_0/q4_0"].endswith("| 1.000 | +0.00000 ± 0.00408 | no |")
    assert rows["| kvq2/kvq2", "q4_0/q4_0"].endswith("| - | - | - |")
    zero = _row("q4_0", "q4_0", [0.0, 0.0, 0.0, 0.0])
    assert "| - | +0.05750 ±" in sweep.formats_report([_some()[3], zero])[-1]  # no ratio to zero


def test_pairs_report() -> None:
    lines = sweep.pairs_report(_some())
    assert lines[0] == "| keys \\ values | V16 | V8 | V6 | V5 | V4 | V3 | V2 |"
    assert "| K16 | 0 | - | - | - | - | - | - |" in lines
    assert "| K8 | - | - | - | - | 0.0150 | - | - |" in lines
    assert "| K2 | - | - | - | - | - | - | NaN |" in lines
    front = next(s for s in lines if s.startswith("No other pair"))
    assert "F16 (16.00 bits, 0), " not in front and front.endswith("F16 (16.00 bits, 0).")
    assert "K8V4 (6.50 bits, 0.0150)" in front and "K4V8" not in front and "K2V2" not in front
    (both,) = (s for s in lines if s.startswith("| K8V4 |"))
    assert both.endswith("| yes, wide keys are better |") and "| K4V8 |" in both
    assert len(lines) == 9 + 2 + 1 + 3


def test_report_keeps_apart_what_can_not_be_compared(tmp_path: Path) -> None:
    rows = _some() + [replace(r, provenance=replace(r.provenance, model_filename="B_x.gguf", model_sha256="b"))
                      for r in _some()[:5]] + [replace(r, chunks=8) for r in _some()]  # fmt: skip
    text, files = sweep.report(rows, sweep.SETS, tmp_path / "s")
    assert text.count("### m.gguf") == 2 and text.count("### B_x.gguf") == 1 and "8 chunks of 256" in text
    assert [f.name for f in files] == ["s-m-pairs.svg", "s-b-x-pairs.svg", "s-m-2-pairs.svg"]
    only, none = sweep.report(rows, ["formats"], tmp_path / "other")
    assert "keys \\ values" not in only and none == [] and "| bits per value |" in only
    assert sweep.report([], sweep.SETS)[0] == "No row was measured yet.\n"
    # too few pairs for a table of 49
    assert "keys \\ values" not in sweep.report(_some()[:3], sweep.SETS)[0]


def test_a_row_measured_anew_replaces_the_older() -> None:
    text, _ = sweep.report([*_some(), _row("q4_0", "q4_0", [0.5, 0.5, 0.5, 0.5])], ["formats"])
    assert "| q4_0/q4_0 | 4.50 | 0.50000 ±" in text and text.count("\n| q4_0/q4_0 |") == 1


def test_report_alone(staged: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, ran, out = staged
    assert run(config="F16;8/8;8/4;4/8;4/4;q4_0/q4_0") == 0
    first = capsys.readouterr()
    assert "keys \\ values" in first.out and "paired difference" in first.out
    (figure,) = out.parent.glob("*.svg")
    drawn = figure.read_bytes()
    ran()
    with out.open("ab") as f:
        f.write(b'{"kind": "qua')  # another run is at it
    assert sweep.main(["--report", "--out", str(out)]) == 0
    assert capsys.readouterr().out == first.out and ran() == []
    assert figure.read_bytes() == drawn  # the same figures give the same file
    assert sweep.main(["--report", "--set", "formats", "--out", str(out)]) == 0
    told = capsys.readouterr().out
    assert "| q8_0/kvq4 |" in told and "| kvq4/q8_0 |" not in told and "keys \\ values" not in told
    assert sweep.main(["--report", "--out", str(tmp_path / "none.jsonl")]) == 2
    assert "can't be read" in capsys.readouterr().err


# ---- figure


def test_heat_map(tmp_path: Path) -> None:
    axis = {16: ("f16", 16.0), 4: ("kvq4", 4.5), 2: ("kvq2", 2.5)}
    cells = {(16, 16): -0.0, (16, 4): 0.01, (4, 16): 0.2, (4, 4): 3.0, (2, 2): None}
    for name in ("h.svg", "h.png"):
        for _ in range(2):  # replaced if it is there
            plots.pair_heat_map(cells, axis, tmp_path / name, model="M", note="a text")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["h.png", "h.svg"]
    root = ET.parse(tmp_path / "h.svg").getroot()
    assert root.tag.endswith("svg") and not [e for e in root.iter() if e.tag.endswith("image") and e.get("id") is None]
    hatched = [e for e in root.iter() if "url(#" in (e.get("style") or "") and "fill" in (e.get("style") or "")]
    assert len(hatched) == 5  # the four pairs that are missing, and NaN
    assert (tmp_path / "h.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize("cells", [{}, {(16, 16): 0.0}, {(16, 16): None}, {(4, 4): 0.5}])
def test_heat_map_of_little(tmp_path: Path, cells: Any) -> None:
    plots.pair_heat_map(cells, {16: ("f16", 16.0), 4: ("kvq4", 4.5)}, tmp_path / "h.svg", model="M")
    assert (tmp_path / "h.svg").stat().st_size > 1000


def test_heat_map_is_readable_in_grey(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Larger is darker, step by step, and every number has the contrast of large text on its cell (3 to 1)."""
    from matplotlib.axes import Axes
    from matplotlib.colors import to_rgb

    def luminance(color: Any) -> float:
        lin = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(color)]
        return 0.2126 * lin[0] + 0.7152 * lin[1] + 0.0722 * lin[2]

    seen: List[Any] = []
    patch, write = Axes.add_patch, Axes.text

    def add_patch(self: Any, p: Any) -> Any:
        seen.append([luminance(p.get_facecolor()[:3])])
        return patch(self, p)

    def text(self: Any, *a: Any, **kw: Any) -> Any:
        seen[-1].append(luminance(kw["color"]))
        return write(self, *a, **kw)

    monkeypatch.setattr(Axes, "add_patch", add_patch)
    monkeypatch.setattr(Axes, "text", text)
    axis = {b: (str(b), float(b)) for b in range(10, 0, -1)}
    cells = {(k, v): 10 ** ((100 - 10 * k - v) / 25) for k in axis for v in axis}
    plots.pair_heat_map({k: float(v) for k, v in cells.items()}, axis, tmp_path / "h.svg", model="M")
    backs = [s[0] for s in seen]
    assert len(seen) == 100 and backs == sorted(backs, reverse=True) and backs[0] > 0.6 and backs[-1] < 0.03
    for back, ink, small in seen:
        ratio = (max(back, ink) + 0.05) / (min(back, ink) + 0.05)
        assert ink == small and ratio > 3, (back, ink)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (-0.0, "0"), (-1e-6, "-0.000001"), (0.000341, "0.000341"), (0.0121, "0.0121"), (0.5, "0.500"),
     (1.234, "1.23"), (12.345, "12.3"), (123.4, "123")],
)  # fmt: skip
def test_short_numbers(value: float, text: str) -> None:
    assert plots.short_number(value) == text
    assert plots.short_number(0.000341, 5) == "0.00034"


# ---- progress


def test_time_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    p = runs.Progress()
    assert p._left(0.0, 0, 10) == "" and p._left(50.0, 0, 10) == ""
    assert p._left(170.0, 2, 10) == "8 min left"
    assert p._left(7250.0, 2, 10) == "8.0 h left"
    assert p._left(7250.0, 10, 10) == ""


def test_pipe_is_quiet(staged: Any, capsys: pytest.CaptureFixture[str]) -> None:
    run, _, out = staged
    assert run(config="F16;8/8;4/4;8/4") == 0
    told = capsys.readouterr()
    name = json.loads(out.read_text(encoding="utf-8").splitlines()[0])["model_filename"]
    figure = out.with_name(f"s-{name[: -len('.gguf')]}-pairs.svg")
    assert told.err.splitlines() == ["4 measured, 0 were there, 0 failed", f"wrote {figure}"]
    assert "\x1b" not in told.out + told.err
