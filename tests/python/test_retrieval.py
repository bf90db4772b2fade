# SPDX-License-Identifier: MIT
"""Needles and continuations without a model: plans, haystacks, scores, and the process that measures."""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Sequence

import pytest

from kvsplit import quality, retrieval
from kvsplit.errors import KVSplitError, ModelFileError, NotFiniteError, ResultError, ToolError, UsageError
from kvsplit.policy import KVQuant
from kvsplit.retrieval import ANSWER, Pieces, Reference, RetrievalPlan

# ---- plans


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("seq_len", 0),
        ("seq_len", -5),
        ("seq_len", 512.0),
        ("seq_len", True),
        ("seq_len", 2**31),
        ("depths", ()),
        ("depths", (0.5, 1.01)),
        ("depths", (-0.1,)),
        ("depths", (float("nan"),)),
        ("depths", ("0.5",)),
        ("depths", (0.5, 0.5)),
        ("depths", tuple(i / 100 for i in range(len(retrieval.NAMES) + 1))),
        ("trials", 0),
        ("trials", 1.5),
        ("n_gen", 0),
        ("n_gen", 512),
        ("prompts", 0),
        ("n_threads", 0),
        ("n_threads", "2"),
    ],
)
def test_a_plan_that_makes_no_sense_names_the_argument(name: str, value: Any) -> None:
    with pytest.raises(UsageError, match=f"^{name}: "):
        RetrievalPlan(**{"seq_len": 512, **{name: value}})


def test_a_plan_can_be_a_key() -> None:
    assert RetrievalPlan(512) == RetrievalPlan(512) and hash(RetrievalPlan(512)) == hash(RetrievalPlan(512))
    assert RetrievalPlan(512, seed=2) != RetrievalPlan(512)


# ---- needles


def test_needles_of_a_trial_are_always_the_same() -> None:
    plan = RetrievalPlan(2048)
    assert retrieval.needles(plan, 0) == retrieval.needles(RetrievalPlan(2048, n_gen=5), 0)
    others = [retrieval.needles(plan, 1), retrieval.needles(RetrievalPlan(2048, seed=2), 0)]
    assert retrieval.needles(plan, 0) not in others


def test_needles_can_be_told_apart() -> None:
    plan = RetrievalPlan(2048, depths=tuple(i / 31 for i in range(32)))
    for trial in range(20):
        got = retrieval.needles(plan, trial)
        assert [x.depth for x in got] == list(plan.depths)
        assert len({x.name for x in got}) == len({x.number for x in got}) == 32
        assert all(x.number.isdigit() and len(x.number) == retrieval.DIGITS and x.number[0] != "0" for x in got)


def test_places_are_spread_over_the_text_and_stay_within_it() -> None:
    for n_text, n, count in itertools.product((100, 1000), (1, 60, 100), (1, 4, 9)):
        got = retrieval.places(n_text, n, count, "x")
        assert len(got) == count and got == sorted(got) and got == retrieval.places(n_text, n, count, "x")
        assert got[0] >= 0 and got[-1] + n <= n_text
    # one in each quarter of the first tokens that are possible
    assert [4 * p // 901 for p in retrieval.places(1000, 100, 4, "y")] == [0, 1, 2, 3]
    assert retrieval.places(1000, 100, 4, "y") != retrieval.places(1000, 100, 4, "z")


# ---- haystacks

#: Tokens of the text count up from 1000, those of needles are negative, so that each tells where it is from.
TEXT = list(range(1000, 9000))


def _pieces(n: int, question: int = 7) -> List[Pieces]:
    return [Pieces([-100 * (i + 1) - j for j in range(20 + i)], [-9000 - i] * (question + i % 2)) for i in range(n)]


@pytest.mark.parametrize("bos", [[], [1]])
@pytest.mark.parametrize("seq_len", [128, 256, 512, 4096])
@pytest.mark.parametrize("depths", [(0.5,), (0.0, 0.25, 0.5, 0.75, 1.0), (1.0, 0.1, 0.0)])
def test_a_haystack_has_exactly_the_tokens_asked_for(seq_len: int, depths: Any, bos: List[int]) -> None:
    plan = RetrievalPlan(seq_len, depths, n_gen=8)
    pieces = _pieces(len(depths))
    found: List[int] = []
    for group in retrieval.groups(plan, pieces, len(bos)):
        tokens = retrieval.haystack(plan, TEXT, 17, pieces, group, bos)
        longest = max(len(pieces[i].question) for i in group)
        assert len(tokens) + longest + ANSWER == seq_len
        assert tokens[: len(bos)] == bos
        text = [t for t in tokens[len(bos) :] if t > 0]
        assert text == TEXT[17 : 17 + len(text)]  # nothing lost, nothing twice
        assert 2 * len(text) >= seq_len
        for i in group:
            sentence = pieces[i].sentence
            at = tokens.index(sentence[0])
            assert tokens[at : at + len(sentence)] == sentence
            before = sum(t > 1 for t in tokens[:at])
            assert abs(before - depths[i] * len(text)) <= 0.5  # the nearest token
            found.append(i)
    assert sorted(found) == list(range(len(depths)))


def test_needles_share_haystacks_as_far_as_these_have_room() -> None:
    plan, pieces = RetrievalPlan(4096, n_gen=8), _pieces(5)
    assert retrieval.groups(plan, pieces, 1) == [[0, 1, 2, 3, 4]]
    # 1 for the start, 20 to 24 tokens for each needle, 8 for a question and for an answer each; half must be text
    assert retrieval.groups(RetrievalPlan(2 * 126, n_gen=8), pieces, 1) == [[0, 2, 4], [1, 3]]
    assert retrieval.groups(RetrievalPlan(2 * 127, n_gen=8), pieces, 1) == [[0, 1, 2, 3, 4]]
    assert retrieval.groups(RetrievalPlan(2 * 40, n_gen=8), pieces, 1) == [[0], [1], [2], [3], [4]]


def test_a_length_that_holds_no_needle_is_refused() -> None:
    # the longest needle of all: 1 + 24 + 7 + 8 tokens, and as many of text
    with pytest.raises(UsageError, match="^seq_len: 79 tokens are too few.*80 at least"):
        retrieval.groups(RetrievalPlan(79, n_gen=8), _pieces(5), 1)


def test_a_text_that_ends_early_is_refused() -> None:
    plan, pieces = RetrievalPlan(512), _pieces(5)
    n = retrieval.n_text(plan, pieces, range(5), 0)
    assert len(retrieval.haystack(plan, TEXT[:n], 0, pieces, range(5), [])) == 512 - 8 - ANSWER
    with pytest.raises(UsageError, match=f"--text: has {n - 1} tokens.*{n}"):
        retrieval.haystack(plan, TEXT[: n - 1], 0, pieces, range(5), [])


# ---- scores


@pytest.mark.parametrize("text", ["12345", " 12345", "  12345.", " 12345. Remember 9", "12345\n", "12345a", "12345,6"])
def test_the_number_is_found(text: str) -> None:
    assert retrieval.is_answer(text, "12345")


@pytest.mark.parametrize(
    "text",
    ["", " ", "1234", " 123456", "12345٣", "012345", "1 2345", "12,345", "12346", "is 12345", "\n12345", ".12345",
     "-12345", "**12345**"],
)  # fmt: skip
def test_anything_else_is_not_the_number(text: str) -> None:
    assert not retrieval.is_answer(text, "12345")


def test_decoding_may_end_when_no_token_can_change_the_score() -> None:
    texts = [
        "".join(p) for n in range(4) for p in itertools.product(" 12x", repeat=n)
    ]  # all that can be said about the number 12, and how it may go on
    for text, more in itertools.product(texts, [*texts, "12.", "2.", "."]):
        if retrieval._decided(text, "12"):
            assert retrieval.is_answer(text + more, "12") == retrieval.is_answer(text, "12")
    assert not retrieval._decided(" 12", "12") and retrieval._decided(" 12.", "12") and retrieval._decided("x", "12")


# ---- the process


@pytest.fixture
def text(tmp_path: Path) -> quality.Text:
    path = tmp_path / "t.txt"
    path.write_text("word " * 5000)
    return quality.Text(path, "t.txt", "0")


F16 = KVQuant("f16", "f16")
CALLS: Dict[str, Callable[..., Any]] = {
    "needle": retrieval.needle,
    "continuation": retrieval.continuation,
    "reference": lambda model, quant, text, plan, **kw: retrieval.reference(model, text, plan, **kw),
}


@pytest.mark.native
@pytest.mark.parametrize("call", CALLS)
def test_a_model_without_vocabulary_is_refused(synth_model: Any, text: quality.Text, call: str) -> None:
    with pytest.raises(UsageError, match="no vocabulary"):
        CALLS[call](synth_model(), F16, text, RetrievalPlan(256, n_threads=1))


@pytest.mark.native
def test_an_error_keeps_its_class_and_message(tmp_path: Path, text: quality.Text) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelFileError, match="m.gguf"):
        retrieval.needle(tmp_path / "m.gguf", F16, text, RetrievalPlan(256))


def _stands_in(monkeypatch: pytest.MonkeyPatch, folder: Path, body: str) -> Path:
    """A program of a few lines in the place of Python."""
    path = folder / "program"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    monkeypatch.setattr(retrieval.sys, "executable", str(path))
    return path


posix = pytest.mark.skipif(sys.platform == "win32", reason="the stand-in is a shell script")


@posix
def test_a_process_that_dies_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: quality.Text) -> None:
    for body, match in (
        ("kill -9 $$", "needle under K8V4 was killed by SIGKILL"),
        ("cat > /dev/null; echo it broke >&2; exit 3", "exit code 3\nit broke"),
        # it doesn't even read the request
        ('exec <&-; echo \'{"step": "a"}\'; kill -11 $$', "SIGSEGV"),
    ):
        _stands_in(monkeypatch, tmp_path, body)
        with pytest.raises(ToolError, match=match):
            retrieval.needle(tmp_path / "m", KVQuant.parse("8"), text, RetrievalPlan(256))


@posix
def test_a_process_without_an_answer_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: quality.Text
) -> None:
    _stands_in(monkeypatch, tmp_path, 'cat > /dev/null; echo \'{"step": "trial 1"}\'')
    steps: List[str] = []
    with pytest.raises(ResultError, match="without an answer"):
        retrieval.needle(tmp_path / "m", F16, text, RetrievalPlan(256), step=steps.append)
    assert steps == ["trial 1"]


@posix
def test_nan_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: quality.Text) -> None:
    line = json.dumps({"error": "attention gave NaN", "class": "NotFiniteError"})
    _stands_in(monkeypatch, tmp_path, f"cat > /dev/null; echo '{line}'")
    with pytest.raises(NotFiniteError, match="NaN"):
        retrieval.continuation(tmp_path / "m", F16, text, RetrievalPlan(256))


@posix
def test_an_interruption_ends_the_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: quality.Text) -> None:
    pid = tmp_path / "pid"
    _stands_in(monkeypatch, tmp_path, f'echo $$ > {pid}; echo \'{{"step": "a"}}\'; exec sleep 60')

    def stop(what: str) -> None:
        raise KeyboardInterrupt

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        retrieval.needle(tmp_path / "m", F16, text, RetrievalPlan(256), step=stop)
    assert time.monotonic() - began < 30
    with pytest.raises(ProcessLookupError):  # it was waited for as well
        os.kill(int(pid.read_text()), 0)


# ---- what comes of an answer


def _answers(monkeypatch: pytest.MonkeyPatch, answer: Callable[[str, Any], Dict[str, Any]]) -> List[str]:
    asked: List[str] = []

    def ask(op: str, model: Any, quant: Any, text: Any, plan: Any, step: Any, **arguments: Any) -> Dict[str, Any]:
        asked.append(f"{op} {quant.label}")
        return {"cache": {"layers": []}, **answer(op, arguments)}

    monkeypatch.setattr(retrieval, "_ask", ask)
    return asked


def test_finds_are_counted_by_depth(monkeypatch: pytest.MonkeyPatch, text: quality.Text) -> None:
    plan = RetrievalPlan(256, depths=(1.0, 0.0), trials=3)

    def said(trial: int, depth: float, said: str) -> Dict[str, Any]:
        return {"trial": trial, "depth": depth, "name": "Oslo", "number": "12345", "text": said}

    texts: Sequence[Any] = [(0, 1.0, " 12345."), (0, 0.0, " 12346"), (1, 1.0, " 12345"), (1, 0.0, " 123456"),
                            (2, 1.0, " 1"), (2, 0.0, " 12345")]  # fmt: skip
    _answers(monkeypatch, lambda op, a: {"answers": [said(*x) for x in texts], "prefills": 3})
    got = retrieval.needle(Path("m"), F16, text, plan)
    assert (got.depths, got.found, got.trials, got.prefills) == ((1.0, 0.0), (2, 1), 3, 3)
    assert [a.found for a in got.answers] == [True, False, True, False, False, True]


def _reference(plan: RetrievalPlan) -> Reference:
    gaps = ({5: 0.0, 7: 1.5}, {6: 0.0, 8: 0.25})
    return Reference(plan, Path("m"), "0", ((5, 6), (5, 6)), (gaps, gaps))


def test_a_gap_is_read_where_the_tokens_part(monkeypatch: pytest.MonkeyPatch, text: quality.Text) -> None:
    plan = RetrievalPlan(256, n_gen=2, prompts=2)
    asked = _answers(monkeypatch, lambda op, a: {"same": [1, 2], "other": [8, None]})
    got = retrieval.continuation(Path("m"), KVQuant.parse("8"), text, plan, _reference(plan))
    assert (got.n_gen, got.same_tokens, got.gaps) == (2, (1, 2), (0.25, None))
    assert asked == ["continuation K8V4"]


def test_a_gap_that_was_not_kept_is_computed(monkeypatch: pytest.MonkeyPatch, text: quality.Text) -> None:
    plan = RetrievalPlan(256, n_gen=2, prompts=2)

    def answer(op: str, arguments: Any) -> Dict[str, Any]:
        if op == "continuation":
            assert arguments == {"tokens": ((5, 6), (5, 6))}
            return {"same": [0, 1], "other": [7, 99]}
        assert op == "gap" and arguments == {"prompt": 1, "tokens": (5,), "other": 99}
        return {"gap": 12.5}

    asked = _answers(monkeypatch, answer)
    got = retrieval.continuation(Path("m"), KVQuant.parse("8"), text, plan, _reference(plan))
    assert (got.same_tokens, got.gaps) == ((0, 1), (1.5, 12.5))
    assert asked == ["continuation K8V4", "gap F16"]


def test_a_reference_that_is_not_there_is_computed(monkeypatch: pytest.MonkeyPatch, text: quality.Text) -> None:
    plan = RetrievalPlan(256, n_gen=1, prompts=1)
    answers = {
        "reference": {"tokens": [[5]], "gaps": [[{"5": 0.0, "7": 1.5}]]},
        "continuation": {"same": [0], "other": [7]},
    }
    asked = _answers(monkeypatch, lambda op, a: answers[op])
    assert retrieval.continuation(Path("m"), KVQuant.parse("4"), text, plan).gaps == (1.5,)
    assert asked == ["reference F16", "continuation K4V4"]


@pytest.mark.parametrize("what", ["plan", "model", "text"])
def test_a_reference_of_something_else_is_refused(
    monkeypatch: pytest.MonkeyPatch, text: quality.Text, what: str
) -> None:
    plan = RetrievalPlan(256, n_gen=2, prompts=2)
    given = {
        "plan": RetrievalPlan(256, n_gen=2, prompts=2, seed=9) if what == "plan" else plan,
        "model": Path("other") if what == "model" else Path("m"),
        "text": quality.Text(text.path, text.name, "1") if what == "text" else text,
    }
    asked = _answers(monkeypatch, lambda op, a: {"same": [2, 2], "other": [None, None]})
    with pytest.raises(KVSplitError, match="^reference: "):
        retrieval.continuation(given["model"], F16, given["text"], given["plan"], _reference(plan))
    assert not asked
