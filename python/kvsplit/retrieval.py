# SPDX-License-Identifier: MIT
"""What a cache still knows of a long text: needles that are hidden in it, and a continuation beside that of f16.

A needle is a name with a number (Mohtashami and Jaggi, 2023, arXiv:2305.16300, call it a pass key). It stands at a
known depth of a haystack of real text, and the number is asked for at the end. One haystack carries the needles of
several depths, each with a name of its own, and is computed once: after each question the cache goes back to the
end of the haystack. Needles that compete make it harder than one alone. Where a model finds few under f16, what it
finds under another configuration says little about the cache.

A continuation is decoded greedily after a prompt of real text. It is held against the one of f16 up to the first
token that differs; there, f16's own logits tell how close the choice was.

One configuration runs in a process of its own: its memory goes when it ends, and a crash takes nothing with it.

usage: python -m kvsplit.retrieval worker < REQUEST
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import psutil

from kvsplit import errors, native, probe, quality, tools
from kvsplit.errors import KVSplitError, NotFiniteError, ResultError, ToolError, UsageError
from kvsplit.policy import F16, KVQuant

if TYPE_CHECKING:
    import numpy as np

#: Said in a haystack and asked for at its end. A completion, not a chat: base models and small ones can do it.
#: Measured under f16 with five needles in 4096 tokens: of ``The pass key of Oslo is 12345``, where one word differs,
#: SmolLM2-135M found 2 of 10 and Gemma-3-270M 5 of 15, and gave another needle's number instead; where three words
#: differ, right before the number, 4 of 5 and 10 of 10.
NEEDLE = "\n\n{name} {number}. Remember it: {name} {number}.\n\n"
QUESTION = "\n\n{name}"

#: Digits of a number.
DIGITS = 5

#: Names of needles. No word is in two of them.
NAMES = (
    "Lisbon copper violin", "Oslo silver rabbit", "Cairo purple bottle", "Lima golden window", "Tokyo yellow kitchen",
    "Delhi orange bicycle", "Geneva wooden ladder", "Paris velvet curtain", "Berlin frozen lemon",
    "Madrid crystal garden", "Dublin plastic spoon", "Vienna marble horse", "Prague cotton shirt",
    "Athens broken mirror", "Boston hidden tunnel", "Havana striped blanket", "London rusty anchor",
    "Milan bitter coffee", "Rome ancient coin", "Moscow heavy hammer", "Munich leather jacket",
    "Seattle empty basket", "Seoul tiny camera", "Sydney green parrot", "Warsaw painted fence",
    "Chicago steel bridge", "Hamburg white piano", "Istanbul sweet melon", "Singapore paper dragon",
    "Amsterdam round table", "Budapest quiet river", "Melbourne black umbrella",
)  # fmt: skip

#: Tokens that an answer may take: a blank, the digits one by one, what follows them, and one to spare.
ANSWER = DIGITS + 3

#: Tokens of a batch; the same for every configuration.
N_BATCH = 512

#: Of each step, f16's logits of so many tokens are kept. A configuration that takes another one is rare, and costs
#: computing that prompt anew.
KEPT = 256

#: Bytes of the text that places are chosen from; a larger one takes long to tokenize.
_MOST_TEXT = 8 << 20


# ---- what to measure


@dataclass(frozen=True)
class RetrievalPlan:
    """What to measure.

    Attributes:
        seq_len: tokens of everything together: haystack, needles, question and answer; or prompt and continuation.
        depths: of the needles, as the share of the haystack that stands before it, 0 to 1.
        trials: of each depth, with other numbers, names and places of the text.
        seed: of numbers, names and places.
        n_threads: threads; None means the machine's cores.
        n_gen: tokens of a continuation.
        prompts: continuations, each after another place of the text.
        device: see :func:`kvsplit.tools.device_args`.

    Raises:
        UsageError: a field is out of range; the message starts with its name.
    """

    seq_len: int
    depths: Tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    trials: int = 3
    seed: int = 1
    n_threads: Optional[int] = None
    n_gen: int = 64
    prompts: int = 2
    device: str = "auto"

    def __post_init__(self) -> None:
        for name in ("seq_len", "trials", "n_gen", "prompts", "n_threads"):
            value = getattr(self, name)
            if value is None and name == "n_threads":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31:
                raise UsageError(f"{name}: {value!r} is no whole number from 1 on")
        if not self.depths or len(self.depths) > len(NAMES):
            raise UsageError(f"depths: {len(self.depths)} were given, 1 to {len(NAMES)} can be told apart")
        for depth in self.depths:
            if isinstance(depth, bool) or not isinstance(depth, (int, float)) or not 0 <= depth <= 1:
                raise UsageError(f"depths: {depth!r} is none; 0 stands for the start of the haystack, 1 for its end")
        if len(set(self.depths)) < len(self.depths):
            raise UsageError(f"depths: {', '.join(map(str, self.depths))} has one twice")
        if self.n_gen >= self.seq_len:
            raise UsageError(f"n_gen: {self.n_gen} of seq_len {self.seq_len} tokens leave none for a prompt")


class Needle(NamedTuple):
    """What is hidden: a name and its number, and how deep."""

    depth: float
    name: str
    number: str


@dataclass(frozen=True)
class Pieces:
    """The tokens that a needle takes."""

    sentence: List[int]
    question: List[int]


def needles(plan: RetrievalPlan, trial: int) -> List[Needle]:
    """The needles of a trial, one for each depth; the same for every configuration."""
    rng = random.Random(f"needles, {plan.seed}, {plan.seq_len}, {trial}")
    names = rng.sample(NAMES, len(plan.depths))
    numbers = rng.sample(range(10 ** (DIGITS - 1), 10**DIGITS), len(plan.depths))
    return [Needle(d, name, str(number)) for d, name, number in zip(plan.depths, names, numbers)]


def places(n_text: int, n: int, count: int, seed: str) -> List[int]:
    """First tokens of ``count`` pieces of ``n`` tokens, by chance and yet spread over a text of ``n_text``."""
    rng = random.Random(seed)
    return [int((i + rng.random()) / count * (n_text - n + 1)) for i in range(count)]


def groups(plan: RetrievalPlan, pieces: Sequence[Pieces], n_bos: int) -> List[List[int]]:
    """Which needles share a haystack: as few haystacks as leave half of their tokens to the text.

    Args:
        plan: the plan.
        pieces: of each depth.
        n_bos: tokens that stand before everything.

    Returns:
        Indices of depths for each haystack.

    Raises:
        UsageError: seq_len is too small for one needle.
    """

    def taken(group: Sequence[int]) -> int:
        sentences = sum(len(pieces[i].sentence) for i in group)
        return n_bos + sentences + max(len(pieces[i].question) for i in group) + ANSWER

    n = len(pieces)
    for count in range(1, n + 1):
        out = [list(range(first, n, count)) for first in range(count)]
        if all(2 * taken(group) <= plan.seq_len for group in out):
            return out
    least = 2 * max(taken([i]) for i in range(n))
    raise UsageError(
        f"seq_len: {plan.seq_len} tokens are too few to hide a number in; for this model it takes {least} at least"
    )


def haystack(
    plan: RetrievalPlan, text: Sequence[int], start: int, pieces: Sequence[Pieces], group: Sequence[int], bos: List[int]
) -> List[int]:
    """Everything before a question.

    With the longest of the questions and :data:`ANSWER` it makes ``plan.seq_len`` tokens.

    Args:
        plan: the plan.
        text: tokens of the evaluation text.
        start: where in it the haystack begins.
        pieces: of each depth.
        group: indices of the needles to hide.
        bos: tokens that stand before everything.

    Raises:
        UsageError: the text ends before the haystack does.
    """
    n = n_text(plan, pieces, group, len(bos))
    hay = text[start : start + n]
    if len(hay) < n:
        raise UsageError(f"--text: has {len(text)} tokens, a haystack needs {n}")
    out, at = list(bos), 0
    for i in sorted(group, key=lambda i: plan.depths[i]):
        cut = round(plan.depths[i] * n)
        out += [*hay[at:cut], *pieces[i].sentence]
        at = cut
    return out + list(hay[at:])


def n_text(plan: RetrievalPlan, pieces: Sequence[Pieces], group: Sequence[int], n_bos: int) -> int:
    """Tokens of text in a haystack."""
    sentences = sum(len(pieces[i].sentence) for i in group)
    return plan.seq_len - n_bos - sentences - max(len(pieces[i].question) for i in group) - ANSWER


def is_answer(text: str, number: str) -> bool:
    """True if a text gives exactly the number: nothing but blanks before it, and no digit after it."""
    return re.match(rf" *{number}(?!\d)", text) is not None


def _decided(text: str, number: str) -> bool:
    """True if no further token can change :func:`is_answer`."""
    said = text.lstrip(" ")
    return len(said) > len(number) or not number.startswith(said)


# ---- the process of one configuration


class Worker:
    """One model and one context; what ``op_`` methods return goes to the caller as JSON."""

    def __init__(self, model: Path, quant: KVQuant, plan: RetrievalPlan, text: Path, text_name: str) -> None:
        """Load the model and make the context.

        Args:
            model: GGUF file.
            quant: the configuration.
            plan: what to measure.
            text, text_name: file of the evaluation text, and what messages call it.

        Raises:
            KVSplitError: the model or the context can't be made.
            UsageError: the model has no vocabulary.
        """
        from kvsplit.llama import Llama

        n_threads = plan.n_threads or psutil.cpu_count(logical=False) or os.cpu_count() or 1
        self.plan, self.text_name, self.model_name, self.quant = plan, text_name, model.name, quant
        self.llm = Llama(
            model, kvq_key=quant.key, kvq_val=quant.val, n_ctx=plan.seq_len, n_batch=N_BATCH, n_ubatch=N_BATCH,
            n_threads=n_threads, n_threads_batch=n_threads, flash_attn=True, swa_full=False, verbose=False,
            **probe.device_kwargs(plan.device),
        )  # fmt: skip
        from llama_cpp import llama_cpp

        self.api = llama_cpp
        self.ctx = self.llm._ctx.ctx
        self.memory = self.api.llama_get_memory(self.ctx)
        self.vocab = self.api.llama_model_get_vocab(self.llm._model.model)
        self.n_vocab = int(self.api.llama_vocab_n_tokens(self.vocab))
        if self.api.llama_vocab_type(self.vocab) == 0:  # LLAMA_VOCAB_TYPE_NONE
            raise UsageError(f"{model.name} has no vocabulary, it can't read a text")
        add_bos = self.api.llama_vocab_get_add_bos(self.vocab)
        self.bos = [int(self.api.llama_vocab_bos(self.vocab))] if add_bos else []
        self.window = int(self.api.llama_model_n_swa(self.llm._model.model))
        with open(text, "rb") as f:
            # a character that is cut at the end is dropped
            self.text = self._tokens(f.read(_MOST_TEXT).decode("utf-8", "ignore"))
        self.prefills = 0

    def close(self) -> None:
        """Free everything."""
        self.llm.close()

    def _tokens(self, text: str) -> List[int]:
        return list(self.llm.tokenize(text.encode(), add_bos=False, special=False))

    def _piece(self, token: int) -> bytes:
        size = 64
        while True:
            buf = ctypes.create_string_buffer(size)
            n = int(self.api.llama_token_to_piece(self.vocab, token, buf, size, 0, False))
            if n >= 0:
                return buf.raw[:n]
            size = -n

    # ---- steps

    def decode(self, tokens: Sequence[int]) -> None:
        """Put tokens into the cache, after those that are there; logits for the last.

        Raises:
            ToolError: the library can't.
        """
        for i in range(0, len(tokens), N_BATCH):
            part = tokens[i : i + N_BATCH]
            buf = (ctypes.c_int32 * len(part))(*part)
            code = self.api.llama_decode(self.ctx, self.api.llama_batch_get_one(buf, len(part)))
            if code != 0:
                raise ToolError(f"llama_decode of {len(part)} tokens gave {code}", returncode=code)

    def start(self, tokens: Sequence[int]) -> None:
        """Empty the cache and put tokens into it."""
        self.api.llama_memory_clear(self.memory, False)
        self.decode(tokens)
        self.prefills += 1

    def back(self, n: int) -> bool:
        """Remove everything after the first ``n`` tokens.

        Returns:
            False if the cache can't: state of a recurrent layer can't go back, and a sliding window may have lost
            tokens that it needs again. It must be filled anew then.
        """
        if not self.api.llama_memory_seq_rm(self.memory, 0, n, -1):
            return False
        first = int(self.api.llama_memory_seq_pos_min(self.memory, 0))
        last = int(self.api.llama_memory_seq_pos_max(self.memory, 0))
        # The next token attends to the last `window` ones, itself among them. The library takes the cells of tokens
        # that have left the window in a ring, the oldest first, so what is there has no holes.
        needed = max(0, n + 1 - self.window) if self.window else 0
        return last == n - 1 and 0 <= first <= needed

    def logits(self) -> "np.ndarray[Any, Any]":
        """Of the next token, float32, shape (n_vocab,); valid until the next step.

        Raises:
            NotFiniteError: attention broke down.
        """
        import numpy as np

        pointer = self.api.llama_get_logits_ith(self.ctx, -1)
        if not pointer:
            raise ToolError("the library gave no logits")
        out = np.ctypeslib.as_array(pointer, (self.n_vocab,))
        # a model may forbid a token by -inf, so not every one must be finite
        if np.isnan(out).any() or not math.isfinite(float(out.max())):
            raise NotFiniteError(
                f"{self.model_name}, {self.quant.text}: attention gave NaN or infinity at {self.plan.seq_len} tokens"
            )
        return out

    def answer(self, question: Sequence[int], number: str) -> str:
        """Ask, and decode greedily until it is clear whether the number comes."""
        self.decode(question)
        said = b""
        for i in range(ANSWER):
            token = int(self.logits().argmax())
            if self.api.llama_vocab_is_eog(self.vocab, token):
                break
            said += self._piece(token)
            if _decided(said.decode("utf-8", "replace"), number) or i + 1 == ANSWER:
                break
            self.decode([token])
        return said.decode("utf-8", "replace")

    # ---- requests

    def _enough(self, n: int, what: str) -> None:
        if len(self.text) < n:
            raise UsageError(
                f"--text: {self.text_name} has {len(self.text)} tokens for {self.model_name}, "
                f"{what} of {self.plan.seq_len} tokens needs {n}"
            )

    def haystacks(self, trial: int) -> List[Tuple[List[int], List[Tuple[int, Needle, List[int]]]]]:
        """The haystacks of a trial: tokens, and what is asked (index of the depth, needle, tokens of the question).

        Raises:
            UsageError: seq_len or the text is too short.
        """
        plan = self.plan
        hidden = needles(plan, trial)
        pieces = [
            Pieces(
                self._tokens(NEEDLE.format(name=x.name, number=x.number)), self._tokens(QUESTION.format(name=x.name))
            )
            for x in hidden
        ]
        out: List[Tuple[List[int], List[Tuple[int, Needle, List[int]]]]] = []
        for group in groups(plan, pieces, len(self.bos)):
            n = n_text(plan, pieces, group, len(self.bos))
            self._enough(n, "a haystack")
            start = places(len(self.text), n, plan.trials, f"haystacks, {plan.seed}, {plan.seq_len}")[trial]
            tokens = haystack(plan, self.text, start, pieces, group, self.bos)
            out.append((tokens, [(i, hidden[i], pieces[i].question) for i in group]))
        return out

    def op_needle(self, step: Callable[[str], None]) -> Dict[str, Any]:
        """Hide and ask, trial by trial."""
        answers: List[Dict[str, Any]] = []
        for trial in range(self.plan.trials):
            step(f"trial {trial + 1} of {self.plan.trials}")
            said: Dict[int, Dict[str, Any]] = {}
            for tokens, asked in self.haystacks(trial):
                for i, needle, question in asked:
                    if needle is asked[0][1] or not self.back(len(tokens)):
                        self.start(tokens)
                    text = self.answer(question, needle.number)
                    said[i] = {**needle._asdict(), "trial": trial, "text": text}
            answers += [said[i] for i in sorted(said)]
        return {"answers": answers, "prefills": self.prefills}

    def prompts(self) -> List[List[int]]:
        """What is continued.

        Raises:
            UsageError: the text is too short.
        """
        plan = self.plan
        n = plan.seq_len - plan.n_gen - len(self.bos)
        if n < 1:
            raise UsageError(f"seq_len: {plan.seq_len} tokens, {plan.n_gen} of them decoded, leave none for a prompt")
        self._enough(n, "a prompt")
        starts = places(len(self.text), n, plan.prompts, f"prompts, {plan.seed}, {plan.seq_len}")
        return [self.bos + self.text[s : s + n] for s in starts]

    def op_reference(self, step: Callable[[str], None]) -> Dict[str, Any]:
        """Continue each prompt; of each step the token, and by how much its logit beats the next :data:`KEPT`."""
        import numpy as np

        tokens: List[List[int]] = []
        gaps: List[List[Dict[int, float]]] = []
        for i, prompt in enumerate(self.prompts()):
            step(f"f16, prompt {i + 1} of {self.plan.prompts}")
            self.start(prompt)
            tokens.append([])
            gaps.append([])
            for at in range(self.plan.n_gen):
                logits = self.logits()
                best = int(logits.argmax())
                kept = np.argpartition(logits, max(0, self.n_vocab - KEPT))[-KEPT:]
                tokens[-1].append(best)
                gaps[-1].append({int(t): float(logits[best]) - float(logits[t]) for t in kept})
                if at + 1 < self.plan.n_gen:  # an end of text is a token like others
                    self.decode([best])
        return {"tokens": tokens, "gaps": gaps}

    def op_continuation(self, step: Callable[[str], None], tokens: Sequence[Sequence[int]]) -> Dict[str, Any]:
        """Continue each prompt as long as the tokens are the given ones; how many are, and the first that isn't."""
        same: List[int] = []
        other: List[Optional[int]] = []
        for i, (prompt, theirs) in enumerate(zip(self.prompts(), tokens)):
            step(f"prompt {i + 1} of {self.plan.prompts}")
            self.start(prompt)
            same.append(0)
            other.append(None)
            for at, token in enumerate(theirs):
                best = int(self.logits().argmax())
                if best != token:
                    other[-1] = best
                    break
                same[-1] += 1
                if at + 1 < len(theirs):
                    self.decode([token])
        return {"same": same, "other": other}

    def op_gap(self, step: Callable[[str], None], prompt: int, tokens: Sequence[int], other: int) -> Dict[str, Any]:
        """After a prompt and tokens decoded one by one: by how much the best token's logit beats another's."""
        step(f"f16, prompt {prompt + 1} again")
        self.start(self.prompts()[prompt])
        for token in tokens:
            self.decode([token])
        logits = self.logits()
        return {"gap": float(logits.max()) - float(logits[other])}


def worker() -> int:
    """A request on stdin; lines on stdout, each a step that begins, and then the answer or an error."""
    # whatever the library prints must not stand between the lines
    lines = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def tell(message: Dict[str, Any]) -> None:
        lines.write(json.dumps(message) + "\n")
        lines.flush()

    def step(what: str) -> None:
        tell({"step": what})

    request = json.load(sys.stdin)
    try:
        plan = RetrievalPlan(**{**request["plan"], "depths": tuple(request["plan"]["depths"])})
        quant = KVQuant(request["key"], request["val"])
        w = Worker(Path(request["model"]), quant, plan, Path(request["text"]), request["text_name"])
        answer = getattr(w, f"op_{request['op']}")(step, **request["arguments"])
        answer["cache"] = w.llm.kv_cache.to_json()
        w.close()
    except KVSplitError as e:
        tell({"error": str(e), "class": type(e).__name__})
        return 0
    tell({"answer": answer})
    return 0


def _ask(
    op: str,
    model: Path,
    quant: KVQuant,
    text: quality.Text,
    plan: RetrievalPlan,
    step: Callable[[str], None],
    **arguments: Any,
) -> Dict[str, Any]:
    """Run a worker for one request.

    Raises:
        KVSplitError: of the class that the worker raised.
        ToolError: it died.
        ResultError: it ended without an answer.
    """
    what = f"{op} under {quant.label}"
    request = {
        "op": op, "model": str(model), "key": quant.key, "val": quant.val, "plan": asdict(plan),
        "text": str(text.path), "text_name": text.name, "arguments": arguments,
    }  # fmt: skip
    env = tools.environment()
    # the package may run from a source tree that isn't installed
    env["PYTHONPATH"] = os.pathsep.join([str(native.PACKAGE.parent), *filter(None, [env.get("PYTHONPATH")])])
    env["PYTHONIOENCODING"] = "utf-8"
    message: Dict[str, Any] = {}
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as err:
        proc = subprocess.Popen(
            [sys.executable, "-m", "kvsplit.retrieval", "worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=err,
            env=env,
            encoding="utf-8",
        )
        assert proc.stdin is not None and proc.stdout is not None
        try:
            with contextlib.suppress(BrokenPipeError):  # it died; why is told below
                proc.stdin.write(json.dumps(request))
                proc.stdin.close()
            for line in proc.stdout:
                message = json.loads(line)
                if "step" in message:
                    step(message["step"])
            proc.wait()
        except BaseException:
            proc.kill()  # in the middle of a step it wouldn't listen
            proc.wait()
            raise
        finally:
            for pipe in (proc.stdin, proc.stdout):
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        err.seek(0)
        stderr = err.read()
    if proc.returncode != 0:
        raise tools.failure(what, proc.returncode, stderr)
    if "error" in message:
        kind = getattr(errors, message["class"], KVSplitError)
        raise kind(message["error"])
    if "answer" not in message:
        raise ResultError(f"{what} ended without an answer\n{stderr[-400:]}".rstrip())
    answer: Dict[str, Any] = message["answer"]
    return answer


# ---- needles


@dataclass(frozen=True)
class Answer:
    """One question.

    Attributes:
        trial: from 0.
        depth: of the needle.
        name, number: what was asked for, and what is right.
        text: what was said, up to where it was clear.
        found: exactly the number was said.
    """

    trial: int
    depth: float
    name: str
    number: str
    text: str
    found: bool


@dataclass(frozen=True)
class NeedleResult:
    """What one configuration found.

    Attributes:
        depths: where needles were hidden.
        found: of each depth, how many numbers came back.
        trials: of each depth.
        answers: every question, by trial and depth.
        prefills: how often a haystack was computed.
        cache: what was allocated, as :meth:`kvsplit.llama.KVCache.to_json`.
        seconds: that it took, loading included.
    """

    depths: Tuple[float, ...]
    found: Tuple[int, ...]
    trials: int
    answers: Tuple[Answer, ...]
    prefills: int
    cache: Dict[str, Any]
    seconds: float


def needle(
    model: Path,
    quant: KVQuant,
    text: quality.Text,
    plan: RetrievalPlan,
    *,
    step: Callable[[str], None] = lambda what: None,
) -> NeedleResult:
    """Hide needles and ask for them, under one configuration.

    Args:
        model: GGUF file.
        quant: the configuration.
        text: the haystack.
        plan: what to measure.
        step: told what begins.

    Raises:
        UsageError: the text or seq_len is too short.
        NotFiniteError: attention broke down.
        ToolError: the process died.
        KVSplitError: no context can be made.
    """
    began = time.monotonic()
    got = _ask("needle", model, quant, text, plan, step)
    answers = tuple(Answer(**x, found=is_answer(x["text"], x["number"])) for x in got["answers"])
    found = tuple(sum(a.found for a in answers if a.depth == d) for d in plan.depths)
    seconds = time.monotonic() - began
    return NeedleResult(plan.depths, found, plan.trials, answers, got["prefills"], got["cache"], seconds)


# ---- continuations


@dataclass(frozen=True)
class Reference:
    """Continuations under f16, which those of configurations are held against.

    Attributes:
        plan: that it was made for.
        model: GGUF file.
        text_sha256: of the text.
        tokens: of each prompt, plan.n_gen ids.
        gaps: of each prompt and step, by how much the logit of its token beats that of others, by id; the others
            are the :data:`KEPT` likeliest.
    """

    plan: RetrievalPlan
    model: Path
    text_sha256: str
    tokens: Tuple[Tuple[int, ...], ...]
    gaps: Tuple[Tuple[Dict[int, float], ...], ...]


@dataclass(frozen=True)
class ContinuationResult:
    """How far one configuration went with f16.

    Attributes:
        n_gen: tokens that were compared after each prompt.
        same_tokens: of each prompt, tokens before the first that differs; n_gen if none does.
        gaps: of each prompt, by how much f16's logit of its own token beats that of the one that was taken, in
            f16's logits; None if all are the same.
        cache: what was allocated, as :meth:`kvsplit.llama.KVCache.to_json`.
        seconds: that it took, loading included, the reference not.
    """

    n_gen: int
    same_tokens: Tuple[int, ...]
    gaps: Tuple[Optional[float], ...]
    cache: Dict[str, Any]
    seconds: float


def reference(
    model: Path, text: quality.Text, plan: RetrievalPlan, *, step: Callable[[str], None] = lambda what: None
) -> Reference:
    """Continue all prompts under f16.

    Raises:
        As :func:`needle`.
    """
    got = _ask("reference", model, F16, text, plan, step)
    gaps = tuple(tuple({int(t): float(gap) for t, gap in at.items()} for at in prompt) for prompt in got["gaps"])
    return Reference(plan, model, text.sha256, tuple(tuple(t) for t in got["tokens"]), gaps)


_reference = reference  # an argument below has its name


def continuation(
    model: Path,
    quant: KVQuant,
    text: quality.Text,
    plan: RetrievalPlan,
    reference: Optional[Reference] = None,
    *,
    step: Callable[[str], None] = lambda what: None,
) -> ContinuationResult:
    """Continue all prompts under one configuration, each up to the first token that f16 didn't take.

    Args:
        model: GGUF file.
        quant: the configuration; f16 itself shows how well a run repeats.
        text: where the prompts are from.
        plan: what to measure.
        reference: of the same model, text and plan; None computes it.
        step: told what begins.

    Raises:
        UsageError: the reference is another's.
        As :func:`needle`.
    """
    if reference is None:
        reference = _reference(model, text, plan, step=step)
    if (reference.plan, reference.model, reference.text_sha256) != (plan, model, text.sha256):
        raise UsageError("reference: was made with another model, text or plan; leave it out to have it computed")
    began = time.monotonic()
    got = _ask("continuation", model, quant, text, plan, step, tokens=reference.tokens)
    gaps: List[Optional[float]] = []
    for i, (same, other) in enumerate(zip(got["same"], got["other"])):
        gap = None if other is None else reference.gaps[i][same].get(other)
        if other is not None and gap is None:
            tokens = reference.tokens[i][:same]
            gap = float(_ask("gap", model, F16, text, plan, step, prompt=i, tokens=tokens, other=other)["gap"])
        gaps.append(gap)
    seconds = time.monotonic() - began
    return ContinuationResult(plan.n_gen, tuple(got["same"]), tuple(gaps), got["cache"], seconds)


if __name__ == "__main__":
    if sys.argv[1:] != ["worker"]:
        sys.exit(f"usage: python -m kvsplit.retrieval worker < REQUEST (given: {' '.join(sys.argv[1:])})")
    sys.exit(worker())
