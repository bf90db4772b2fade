# SPDX-License-Identifier: MIT
"""Needles and continuations on real models."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path
from typing import Any, Dict, Iterator, List

import pytest

from kvsplit import quality, retrieval
from kvsplit.errors import NotFiniteError, UsageError
from kvsplit.policy import F16, KVQuant
from kvsplit.retrieval import ANSWER, RetrievalPlan, Worker

pytestmark = [pytest.mark.native, pytest.mark.model]

#: Two bits on both sides; SmolLM2 doesn't survive them.
DAMAGED = KVQuant.parse("k2v2")
PLAN = RetrievalPlan(256, depths=(0.1, 0.5, 0.9), trials=2, n_threads=2, n_gen=8)
#: Gemma's window is 512 tokens and its layers have 1024 cells, which a haystack of this length fills twice.
LONG = RetrievalPlan(1600, depths=(0.0, 0.6), trials=1, n_threads=2, n_gen=8)


@pytest.fixture(scope="module")
def text(eval_text: Path) -> Iterator[quality.Text]:
    with quality.text_file(eval_text) as t:
        yield t


def _worker(model: Path, plan: RetrievalPlan, text: quality.Text) -> Worker:
    return Worker(model, F16, plan, text.path, text.name)


@pytest.fixture(scope="module")
def smol(smollm2: Path, text: quality.Text) -> Iterator[Worker]:
    w = _worker(smollm2, PLAN, text)
    yield w
    w.close()


@pytest.fixture(scope="module")
def gemma(gemma3: Path, text: quality.Text) -> Iterator[Worker]:
    w = _worker(gemma3, LONG, text)
    yield w
    w.close()


@pytest.fixture(scope="module")
def f16(smollm2: Path, text: quality.Text) -> retrieval.NeedleResult:
    return retrieval.needle(smollm2, F16, text, PLAN)


@pytest.fixture(scope="module")
def reference(smollm2: Path, text: quality.Text) -> retrieval.Reference:
    return retrieval.reference(smollm2, text, PLAN)


@pytest.mark.parametrize("name", ["smol", "gemma"])
def test_a_real_haystack_has_the_tokens_asked_for(request: pytest.FixtureRequest, name: str) -> None:
    w: Worker = request.getfixturevalue(name)
    for trial in range(w.plan.trials):
        for tokens, asked in w.haystacks(trial):
            assert len(tokens) + max(len(q) for _, _, q in asked) + ANSWER == w.plan.seq_len
            assert tokens[: len(w.bos)] == w.bos
            said = w.llm.detokenize(tokens).decode("utf-8", "replace")
            for _, needle, _ in asked:
                sentence = retrieval.NEEDLE.format(name=needle.name, number=needle.number)
                assert said.count(sentence) == 1
                # Texts have as many characters a token here as there, to within what is asked of this estimate.
                assert abs(said.index(sentence) / len(said) - needle.depth) < 0.25


@pytest.mark.parametrize("name", ["smol", "gemma"])
def test_a_question_after_rolling_back_has_the_answer_of_a_fresh_context(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    w: Worker = request.getfixturevalue(name)

    def answers() -> Dict[str, Any]:
        w.prefills = 0
        seen: List[bytes] = []
        real = w.logits

        def logits() -> Any:
            out = real()
            seen.append(out.tobytes())
            return out

        with monkeypatch.context() as m:
            m.setattr(w, "logits", logits)
            return {**w.op_needle(lambda what: None), "logits": seen}

    n_haystacks = sum(len(w.haystacks(t)) for t in range(w.plan.trials))
    n_questions = w.plan.trials * len(w.plan.depths)
    rolled = answers()
    assert rolled["prefills"] == n_haystacks < n_questions
    monkeypatch.setattr(w, "back", lambda n: False)
    fresh = answers()
    assert fresh["prefills"] == n_questions
    assert fresh["answers"] == rolled["answers"]
    # the same arithmetic on the same cells
    assert fresh["logits"] == rolled["logits"]


def test_a_window_that_has_moved_on_can_not_be_rolled_back(gemma: Worker) -> None:
    assert gemma.window == 512
    gemma.start(gemma.text[:1590])
    assert gemma.back(1580) and gemma.back(1500)
    assert not gemma.back(600)  # its cells are of tokens from 566 on, and it needs those from 89 on


def test_without_a_window_every_place_can_be_rolled_back_to(smol: Worker) -> None:
    assert smol.window == 0
    smol.start(smol.text[:100])
    assert smol.back(99) and smol.back(1)


def test_nan_is_refused(smol: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    smol.start(smol.text[:4])
    for bad in (float("nan"), float("inf")):
        values = (ctypes.c_float * smol.n_vocab)(1.0, bad)
        with monkeypatch.context() as m:
            m.setattr(
                smol.api,
                "llama_get_logits_ith",
                lambda ctx, i: ctypes.cast(values, ctypes.POINTER(ctypes.c_float)),  # noqa: B023 - called at once
            )
            with pytest.raises(NotFiniteError, match="NaN"):
                smol.op_needle(lambda what: None)
    assert smol.logits().any()


def test_f16_finds_most_and_a_damaged_cache_less(
    smollm2: Path, text: quality.Text, f16: retrieval.NeedleResult
) -> None:
    damaged = retrieval.needle(smollm2, DAMAGED, text, PLAN)
    assert f16.depths == damaged.depths == PLAN.depths and f16.trials == damaged.trials == 2
    assert len(f16.answers) == len(damaged.answers) == 6
    # the same questions for both
    assert [(a.name, a.number) for a in f16.answers] == [(a.name, a.number) for a in damaged.answers]
    assert {(x["type_k"], x["type_v"]) for x in f16.cache["layers"]} == {("f16", "f16")}
    assert {(x["type_k"], x["type_v"]) for x in damaged.cache["layers"]} == {("kvq2", "kvq2")}
    # all of six, and none, when measured; half of the distance is asked
    assert sum(f16.found) >= sum(damaged.found) + 3


@pytest.mark.slow
def test_a_repeated_run_gives_the_same_answers(smollm2: Path, text: quality.Text, f16: retrieval.NeedleResult) -> None:
    steps: List[str] = []
    again = retrieval.needle(smollm2, F16, text, PLAN, step=steps.append)
    assert again.answers == f16.answers and again.found == f16.found
    assert steps == ["trial 1 of 2", "trial 2 of 2"]


def test_f16_does_not_part_from_itself(smollm2: Path, text: quality.Text, reference: retrieval.Reference) -> None:
    assert [len(t) for t in reference.tokens] == [PLAN.n_gen] * PLAN.prompts
    assert all(at[t] == 0 == min(at.values()) for i in (0, 1) for t, at in zip(reference.tokens[i], reference.gaps[i]))
    got = retrieval.continuation(smollm2, F16, text, PLAN, reference)
    assert got.same_tokens == (PLAN.n_gen,) * PLAN.prompts and got.gaps == (None, None)


def test_a_damaged_cache_parts_early(smollm2: Path, text: quality.Text, reference: retrieval.Reference) -> None:
    got = retrieval.continuation(smollm2, DAMAGED, text, PLAN, reference)
    assert max(got.same_tokens) < PLAN.n_gen and got.n_gen == PLAN.n_gen
    assert all(gap is not None and gap > 0 for gap in got.gaps)
    # a gap that wasn't kept is computed, by the same arithmetic
    forgotten = replace(reference, gaps=(tuple({} for _ in reference.gaps[0]), reference.gaps[1]))
    again = retrieval.continuation(smollm2, DAMAGED, text, PLAN, forgotten)
    assert again.gaps == got.gaps and again.same_tokens == got.same_tokens


def test_a_text_that_is_too_short_is_refused(smollm2: Path, tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_text("One two three. " * 20)  # four tokens each, and a blank at the end
    with quality.text_file(path) as short:
        with pytest.raises(UsageError, match=r"--text: short.txt has 8\d tokens .* needs 1\d\d"):
            retrieval.needle(smollm2, F16, short, PLAN)
        with pytest.raises(UsageError, match=r"--text: short.txt has 8\d tokens .* needs 248"):
            retrieval.reference(smollm2, short, PLAN)


def test_a_length_that_is_too_small_is_refused(smollm2: Path, text: quality.Text) -> None:
    with pytest.raises(UsageError, match="^seq_len: 40 tokens are too few"):
        retrieval.needle(smollm2, F16, text, replace(PLAN, seq_len=40))
