# SPDX-License-Identifier: MIT
"""The grammar of SPECs and presets."""

from __future__ import annotations

import pickle
from typing import List, Optional

import pytest
from grammar import ENDS, specs
from hypothesis import given
from hypothesis import strategies as st

from kvsplit import KVQuant, KVQuantError, KVSplitError, ModelShape
from kvsplit.cache_types import BITS, BY_NAME, CACHE_TYPES
from kvsplit.errors import CacheTypeError
from kvsplit.policy import Slice, Spec


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("8", "q8_0"),
        (8, "q8_0"),
        (16, "f16"),
        ("32", "f32"),
        ("6", "kvq6"),
        ("5", "kvq5"),
        ("3", "kvq3"),
        ("2", "kvq2"),
        ("Q4_0", "q4_0"),
        ("Q4_1", "q4_1"),
        (" iq4_nl ", "iq4_nl"),
        ("4,:2=8,-2:=16", "kvq4,:2=q8_0,-2:=f16"),
        ("4, : 2 = 8 , 3 = BF16", "kvq4,:2=q8_0,3=bf16"),
        ("8,10:20:1=4", "q8_0,10:20=kvq4"),
        ("8,::2=4", "q8_0,::2=kvq4"),
        ("8,-0=4,007=5", "q8_0,0=kvq4,7=kvq5"),
    ],
)
def test_canonical_text(text: object, canonical: str) -> None:
    assert Spec.parse(text, "kvq_key").text() == canonical  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "bad",
    ["", " ", "1", "7", "9", "q8", "kvq7", "kvq", "q4_k", "i8", "q8_1", "8,", "8,:2", "8,=4", "8,a=4", "8,1:2:3:4=4"]
    + ["8,1.5=4"]
    + ["8,::0=4", "8,::-1=4", "8,:2=", "8,:2=7", "8;4", "8 4", "8,:2=4=5", "08", "+8", "8,1234567890=4", "8,--1=4"],
)
def test_malformed_specs_name_the_argument_and_what_is_allowed(bad: str) -> None:
    with pytest.raises(KVQuantError) as e:
        Spec.parse(bad, "kvq_val")
    assert isinstance(e.value, ValueError)
    assert str(e.value).startswith("kvq_val: ")
    assert repr(bad) in str(e.value)
    assert e.value.given == bad
    if isinstance(e.value, CacheTypeError):
        assert all(t.name in str(e.value) for t in CACHE_TYPES)
        assert all(str(b) in str(e.value) for b in BITS)


@pytest.mark.parametrize("bad", [None, True, 8.0, b"8", ["8"]])
def test_specs_of_another_type(bad: object) -> None:
    with pytest.raises(KVQuantError, match="kvq_key"):
        Spec.parse(bad, "kvq_key")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("preset", "key", "val", "label"),
    [
        ("8", "q8_0", "kvq4", "K8V4"),
        (4, "kvq4", "kvq4", "K4V4"),
        (16, "f16", "f16", "F16"),
        ("K8V4", "q8_0", "kvq4", "K8V4"),
        ("k16v8", "f16", "q8_0", "K16V8"),
        ("k5v4", "kvq5", "kvq4", "K5V4"),
    ],
)
def test_presets(preset: object, key: str, val: str, label: str) -> None:
    q = KVQuant.from_preset(preset)  # type: ignore[arg-type]
    assert (q.key, q.val, q.label) == (key, val, label)


@pytest.mark.parametrize("bad", ["6", "5", "k8", "v4", "k8v", "kv", "k8v4v2", "8/4", "q8_0", "", 6, True, 8.0])
def test_what_is_no_preset(bad: object) -> None:
    with pytest.raises(KVQuantError, match="kvq: "):
        KVQuant.parse(bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("preset", ["k1v4", "k8v9", "k12v2", "k7v7"])
def test_bits_that_do_not_exist(preset: str) -> None:
    with pytest.raises(CacheTypeError, match="32 16 8 6 5 4 3 2"):
        KVQuant.parse(preset)


def test_sides_win_over_the_preset() -> None:
    assert KVQuant.parse("k8v4", val=16) == KVQuant("q8_0", "f16")
    assert KVQuant.parse(KVQuant("4", "4"), key="8") == KVQuant("q8_0", "kvq4")
    assert KVQuant.parse() == KVQuant("f16", "f16")


def test_later_exceptions_win_and_slices_are_pythons() -> None:
    q = KVQuant.parse(key="4,:2=8,-2:=16,1=5")
    assert [k for k, _ in q.types(6)] == ["q8_0", "kvq5", "kvq4", "kvq4", "f16", "f16"]


@pytest.mark.parametrize("spec", ["8,6=4", "8,-7=4", "8,7:=4", "8,:7=4", "8,2:2=4", "8,4:2=4", "8,-7:=4"])
def test_slices_outside_the_layers(spec: str) -> None:
    with pytest.raises(KVQuantError, match="kvq_key: slice .*layers 0 to 5"):
        KVQuant.parse(key=spec).types(6)


def test_bits_per_value() -> None:
    assert KVQuant.parse("8").bits_per_value() == 6.5
    assert KVQuant.parse("16").bits_per_value() == 16
    assert KVQuant.parse(key="8,:1=16", val=8).bits_per_value(2) == (16 + 8.5 + 8.5 + 8.5) / 4
    with pytest.raises(KVQuantError, match="n_layer"):
        KVQuant.parse(key="8,:1=16").bits_per_value()


def test_value_type() -> None:
    a, b = KVQuant.parse("8"), KVQuant("Q8_0", "4")
    assert a == b and hash(a) == hash(b) and a != KVQuant()
    assert eval(repr(a)) == a
    assert pickle.loads(pickle.dumps(a)) == a
    with pytest.raises(AttributeError):
        a.key = "f16"  # type: ignore[misc]
    assert KVQuant.from_text(a.text) == a == KVQuant.from_text("K8V4")
    assert KVQuant.from_text("F16") == KVQuant()
    assert a.quantized_val and not KVQuant.parse(key=8).quantized_val and KVQuant.parse(val="16,0=8").quantized_val
    assert issubclass(KVQuantError, KVSplitError)


def test_bytes_is_the_arithmetic() -> None:
    shape = ModelShape.uniform(22, 4, 64)
    assert KVQuant.parse("8").bytes(shape, 8192) == 22 * 8192 * 4 * 64 // 32 * (34 + 18)


@given(specs())
def test_canonical_text_round_trips(text: str) -> None:
    spec = Spec.parse(text)
    assert Spec.parse(spec.text()) == spec
    assert Spec.parse(spec.text()).text() == spec.text()


@given(st.text(max_size=12))
def test_any_text_parses_or_is_refused(text: str) -> None:
    try:
        spec = Spec.parse(text, "kvq_key")
    except KVQuantError:
        return
    assert spec.default in BY_NAME


@given(ENDS, ENDS, st.integers(1, 4), st.integers(1, 40))
def test_slices_agree_with_python(start: Optional[int], stop: Optional[int], step: int, n: int) -> None:
    want: List[int] = list(range(n))[start:stop:step]
    try:
        got = list(Slice(start, stop, step).layers(n))
    except ValueError:
        outside = any(i is not None and not -n <= i <= n for i in (start, stop))
        assert outside or not want
        return
    assert got == want
