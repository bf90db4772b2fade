#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""llama-server under a seeded mix of clients: it must answer each, keep its memory, and compute what it computes alone.

Servers run one after another, on the loopback interface. Threads ask for completions and chats that share beginnings,
share ends, outgrow their context or are cut off, save, restore and erase slots, send nonsense and poll. Afterwards a
fresh server answers the same greedy requests one at a time with a cold cache, and the answers are compared.

usage: soak.py [--minutes 2] [--kvq PRESET] [--setting NAME ...] [--seed N] [--server FILE] [--model GGUF]

Without --kvq the cache is f16, as llama-server makes it. Exit status: 0 all as it should be, 1 not.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Set, Tuple, Union

import numpy as np
import psutil

# Tokens of one slot. Small, so that a long prompt outgrows it within seconds.
N_CTX_SLOT = 512
CACHE_REUSE = 16
CACHE_RAM_MIB = 8
N_PROBS = 4

# How far the lead of a token over another one, in nats, may move between a request alone and the same in company.
#
# In company a prompt is cut at other places, and cells of a shared cache lie in another order, beside those of others.
# Then sums of floats have another order, and relative differences of 1e-7 to 1e-3 (half precision) arise in attention.
# What they grow to depends on the roundings that follow. A product with 4-bit weights rounds its input to 8 bits, and
# a quantized cache rounds its rows to 8 and 4. A difference of e flips a rounding of step s with probability e/s, and
# moves the value by the whole step: its variance becomes e*s, where that of the rounding itself is s*s/12. That is
# more than e*e was, so 30 layers with several roundings each drive it up to where it can't grow: two evaluations with
# independent roundings, whose difference is the square root of 2 times the error that the formats make anyway.
# So it doesn't get smaller with a better attention.
#
# Measured with SmolLM2 in 4 bits, over positions of a shared cache. K8V4: rms 0.20 to 0.24, largest 0.83 of 234, 0.80
# of 117 and of 354; words without a meaning: rms 0.24, largest 1.11 of 156 with K8V4, 0.81 of 181 with f16, 0.43 of
# 191 with f16 in the unpatched release. With its weights in f16: rms 0.14, largest 0.66 of 564. Where each slot has
# cells of its own, nothing moved with K8V4 in 714 positions, rms 0.07 with f16; with weights in f16 0.08.
#
# Their tail falls off like an exponential: the largest of n squared is twice the largest of n. Twice 1.11 then covers
# 24000 positions. The rms is much steadier: twice the larger one, over some hundreds of positions.
TOLERANCE = 2.2
TOLERANCE_RMS = 0.48
MIN_POSITIONS = 100

# By how many MiB the resident memory may grow over the second half, by a line fitted to it.
# What is allowed to be kept has a bound that doesn't depend on the time: the prompt cache (CACHE_RAM_MIB, it may still
# be filling, and it counts payload only: one state too many is let in, 512 tokens of 10 to 23 KiB), and each thread's
# heap of the C library. A state that leaked with every restore, or a prompt with every cancelled request, is 1 to
# 11 MiB each time.
RSS_GROWTH_MIB = CACHE_RAM_MIB + 12.0

NAMES = "Anna Bela Carl Dora Emil Frida Georg Hanna Ivan Jana Karl Lena Marko Nora Otto Paula Rosa Simon".split()
PLACES = "river mountain village bridge market harbour garden forest island meadow orchard valley".split()
THINGS = "stone lantern letter wheel candle ribbon anchor barrel feather mirror saddle basket".split()
SENTENCES = [
    "On day {n} {name} walked to the {place} and found a {thing} there.",
    "{name} told the people of the {place} that the {thing} was {n} years old.",
    "The {thing} that {name} had left near the {place} cost {n} coins.",
    "In the evening {name} sat by the {place}, and {n} children came to see the {thing}.",
]

# Each kind of request that is shifted or reused in part begins with a token that no other kind begins with: a cached
# beginning then can't come from rows that were moved.
MOVED = {"suffix": "Suffix", "long": "Long", "endless": "Endless", "early": "Early"}


class Server:
    """llama-server on a free port of the loopback interface.

    Args:
        program: the binary.
        args: its arguments, without host and port.
        log: file that its output goes to.
    """

    def __init__(self, program: Path, args: Sequence[Union[str, Path]], log: Path) -> None:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self.port: int = s.getsockname()[1]
        self.log = log
        env = {k: v for k, v in os.environ.items() if not k.startswith("LLAMA_ARG_")}
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                [str(program), *map(str, args), "--host", "127.0.0.1", "--port", str(self.port)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=env,
            )
        end = time.monotonic() + 120
        while True:
            with contextlib.suppress(OSError, http.client.HTTPException):
                # answered by the main loop, and so ready for a signal too
                if self.ask("GET", "/slots", timeout=5)[0] == 200:
                    return
            if self.process.poll() is not None or time.monotonic() > end:
                self.stop()
                raise RuntimeError(f"llama-server did not start:\n{self.tail()}")
            time.sleep(0.05)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def tail(self) -> str:
        """The end of its log."""
        return self.log.read_text(encoding="utf-8", errors="replace")[-3000:]

    def alive(self) -> bool:
        """Whether the process is there."""
        return self.process.poll() is None

    def ask(self, method: str, path: str, body: Any = None, timeout: float = 120) -> Tuple[int, Any]:
        """One request; bytes are sent as they are, all else as JSON. Returns status and the reply, decoded if JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            connection.request(method, path, encode(body), {"Content-Type": "application/json"})
            reply = connection.getresponse()
            data = reply.read()
        finally:
            connection.close()
        try:
            return reply.status, json.loads(data)
        except ValueError:
            return reply.status, data.decode("utf-8", "replace")

    def events(self, path: str, body: Any, most: Optional[int] = None, timeout: float = 120) -> Iterator[Any]:
        """Events of a streamed reply; the connection is closed after ``most`` of them, or when the caller stops."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            connection.request("POST", path, encode(body), {"Content-Type": "application/json"})
            reply = connection.getresponse()
            if reply.status != 200:
                raise RuntimeError(f"status {reply.status}: {reply.read()[:300]!r}")
            n = 0
            for line in reply:
                if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                    yield json.loads(line[6:])
                    n += 1
                    if n == most:
                        return
        finally:
            connection.close()

    def drop(self, path: str, body: Any, seconds: float) -> None:
        """Send a request and hang up after some time without having read anything."""
        data = encode(body) or b""
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", self.port), timeout=60) as s:
            s.sendall(head.encode() + data)
            time.sleep(seconds)

    def idle(self, seconds: float = 30) -> bool:
        """Wait until no slot is at work."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if not any(s["is_processing"] for s in self.ask("GET", "/slots")[1]):
                return True
            time.sleep(0.05)
        return False

    def stop(self, seconds: float = 60) -> int:
        """End it as a service manager does. Returns its exit status; one that doesn't end is killed: -9."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(seconds)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        return self.process.returncode


def encode(body: Any) -> Optional[bytes]:
    """A request's body as bytes."""
    return body if body is None or isinstance(body, bytes) else json.dumps(body).encode()


@dataclass(frozen=True)
class Setting:
    """One server of a soak."""

    slots: int
    unified: bool
    draft: bool = False

    @property
    def name(self) -> str:
        """Such as split-8-draft."""
        return f"{'unified' if self.unified else 'split'}-{self.slots}{'-draft' if self.draft else ''}"

    def arguments(self, model: Path, folder: Path, kvq: Optional[str], draft_kvq: str = "k4v4") -> List[str]:
        """Arguments of llama-server; ``kvq`` None is f16, of the draft model too."""
        args = ["-m", str(model), "-c", str(N_CTX_SLOT * self.slots), "-np", str(self.slots), "-t", "2"]
        # a prompt of a few hundred tokens takes several batches, which it shares with other slots
        args += ["-b", "256", "-ub", "128"]
        args += ["-kvu", "--kv-unified-per-slot", str(N_CTX_SLOT)] if self.unified else ["-no-kvu"]
        args += ["--context-shift", "--cache-reuse", str(CACHE_REUSE), "--cache-ram", str(CACHE_RAM_MIB)]
        args += ["--slot-save-path", str(folder), "--metrics", "--slots"]
        args += ["--kvq", kvq] if kvq else []
        if self.draft:
            args += ["-md", str(model), "--spec-type", "draft-simple", "--spec-draft-n-max", "4"]
            args += ["--kvq-draft", draft_kvq] if kvq else []
        return args


SETTINGS = [
    Setting(4, True),
    Setting(8, False),
    Setting(4, False, draft=True),
    Setting(8, True, draft=True),
    Setting(4, False),
    Setting(8, True),
    Setting(4, True, draft=True),
    Setting(8, False, draft=True),
]


class Request(NamedTuple):
    """What a client asks for.

    ``key`` names the greedy answer: two requests with one key ask for the same tokens.
    """

    kind: str
    key: str
    path: str
    body: Dict[str, Any]


@dataclass
class Answer:
    """What came back, and what the server says it did for it.

    ``top`` has the most probable tokens of each position, id to log probability, where they were asked for.
    """

    tokens: List[int]
    text: str
    top: List[Dict[int, float]]
    n_cached: int
    n_prompt: int
    truncated: bool
    n_drafted: int = 0
    n_accepted: int = 0


def story(rng: random.Random, n: int) -> str:
    """n sentences that mean something. A model is sure of most of what follows them, so that ties are few."""
    fill = [(rng.choice(NAMES), rng.choice(PLACES), rng.choice(THINGS), rng.randint(2, 99)) for _ in range(n)]
    told = zip((rng.choice(SENTENCES) for _ in range(n)), fill)
    return " ".join(t.format(name=a, place=p, thing=x, n=k) for t, (a, p, x, k) in told)


class Mix:
    """The seeded stream of what clients do. Thread-safe; what is drawn depends on the seed alone, not on answers."""

    WEIGHTS = {
        "plain": 18, "prefix": 14, "chat": 10, "suffix": 10, "long": 3, "endless": 5, "early": 7, "middle": 7,
        "save": 4, "restore": 4, "erase": 2, "malformed": 10, "poll": 8,
    }  # fmt: skip

    def __init__(self, seed: int, pool: int) -> None:
        self.rng = random.Random(seed)
        self.pool = pool
        self.lock = threading.Lock()
        # one of each kind comes first, so that a short soak has all of them
        self.first = list(self.WEIGHTS)
        self.rng.shuffle(self.first)
        fixed = random.Random(12345)
        self.preamble = "Records of the valley, kept by its people: " + story(fixed, 8)
        self.sentences = [story(fixed, 1) for _ in range(10)]

    def draw(self) -> Tuple[str, random.Random]:
        """A kind, and numbers of its own."""
        with self.lock:
            drawn = self.rng.choices(list(self.WEIGHTS), list(self.WEIGHTS.values()))[0]
            kind = self.first.pop() if self.first else drawn
            return kind, random.Random(self.rng.getrandbits(64))

    def request(self, kind: str, rng: random.Random) -> Request:
        """A completion or chat of a kind; greedy, so that its key determines the answer."""
        i = rng.randrange(self.pool)
        n = [3, 12, 24, 40][i % 4]
        own = random.Random(f"{kind}{i}")
        body: Dict[str, Any] = {"temperature": 0, "cache_prompt": True, "return_tokens": True}
        if rng.random() < 0.75:
            body["n_probs"] = N_PROBS
        if kind == "chat":
            question = f"Tell {NAMES[i % len(NAMES)]} what you know about this. {story(own, 1 + i % 3)}"
            messages = [{"role": "system", "content": "You tell short stories."}, {"role": "user", "content": question}]
            # always asked for: a chat's reply has token ids nowhere else
            body.pop("n_probs", None)
            body.update(logprobs=True, top_logprobs=N_PROBS)
            body.update(messages=messages, max_tokens=n, n_cache_reuse=0, stream=rng.random() < 0.4)
            return Request(kind, f"chat {i}", "/v1/chat/completions", body)
        if kind == "suffix":
            # A text that lost sentences after its first one, as a chat does whose history is cut: what follows can be
            # moved. The shared beginning is long enough for the server to choose the slot of another one of them.
            intro = f"{MOVED[kind]} texts end alike, and a server can move what it has computed for one of them. "
            prompt = intro + " ".join(self.sentences[i % len(self.sentences) :]) + f" In short, story {i} is about"
        elif kind == "long":
            # 24 sentences are 401 to 439 tokens of SmolLM2: it outgrows the slot while it is answered
            prompt, n = f"{MOVED[kind]} tales. {story(own, 24)}", 112
            body.update(ignore_eos=True, n_keep=rng.choice([0, 4, 8]))
        elif kind == "prefix":
            prompt = (
                f"{self.preamble} Question {i}: what did {NAMES[i % len(NAMES)]} see near the {own.choice(PLACES)}?"
            )
            body["n_cache_reuse"] = 0
        else:
            prompt = f"{story(own, 1 + i % 4)} The next day {NAMES[i % len(NAMES)]} went to the"
            body["n_cache_reuse"] = 0
        body.update(prompt=prompt, n_predict=n, stream=rng.random() < 0.4)
        return Request(kind, f"{kind} {i}", "/completion", body)


# Requests that can't be served, and the statuses that say so. Upstream answers 500 to JSON that can't be parsed.
MALFORMED: List[Tuple[str, str, Any, Set[int]]] = [
    ("JSON that ends early", "/completion", b'{"prompt": "x",', {400, 500}),
    ("nothing", "/completion", b"", {400, 500}),
    ("bytes that are not UTF-8", "/completion", b'{"prompt": "\xff\xfe"}', {400, 500}),
    ("a list", "/completion", [1, 2], {400}),
    ("null", "/completion", b"null", {400}),
    ("nesting", "/completion", b"[" * 3000, {400, 500}),
    ("no prompt", "/completion", {"n_predict": 2}, {400}),
    ("negative n_predict", "/completion", {"prompt": "x", "n_predict": -5}, {400}),
    ("huge n_predict", "/completion", {"prompt": "x", "n_predict": 10**30}, {400}),
    ("n_predict of a wrong type", "/completion", {"prompt": "x", "n_predict": "many"}, {400}),
    ("temperature of a wrong type", "/completion", {"prompt": "x", "temperature": "hot"}, {400}),
    ("stream of a wrong type", "/completion", {"prompt": "x", "stream": {}}, {400}),
    ("seed of a wrong type", "/completion", {"prompt": "x", "seed": "s"}, {400}),
    ("negative n_cache_reuse", "/completion", {"prompt": "x", "n_cache_reuse": -1}, {400}),
    ("negative n_discard", "/completion", {"prompt": "x", "n_discard": -9}, {400}),
    ("a grammar that is none", "/completion", {"prompt": "x", "grammar": "root ::= ("}, {400}),
    ("a negative token id", "/completion", {"prompt": [-1], "n_predict": 2}, {400}),
    ("a token id out of range", "/completion", {"prompt": [10**6], "n_predict": 2}, {400}),
    ("a token id that is no number", "/completion", {"prompt": [1, "a", None], "n_predict": 2}, {400}),
    ("a prompt of no tokens", "/completion", {"prompt": [], "n_predict": 2}, {400}),
    ("a prompt longer than the context", "/completion", {"prompt": "word " * 3000, "n_predict": 2}, {400}),
    ("too many answers", "/completion", {"prompt": "x", "n": 99}, {400}),
    ("a chat without messages", "/v1/chat/completions", {}, {400}),
    ("messages of a wrong type", "/v1/chat/completions", {"messages": "x"}, {400}),
    ("a role that is a number", "/v1/chat/completions", {"messages": [{"role": 7, "content": None}]}, {400, 500}),
    ("an unknown action", "/slots/0?action=fly", {}, {400}),
    ("a slot that is no number", "/slots/abc?action=erase", {}, {400}),
    ("a save without a name", "/slots/0?action=save", {}, {400, 500}),
    ("a name that is a number", "/slots/0?action=save", {"filename": 7}, {400, 500}),
    ("a name outside the folder", "/slots/0?action=save", {"filename": "../x"}, {400}),
    ("a file that isn't there", "/slots/0?action=restore", {"filename": "nosuch"}, {400}),
    ("an address that isn't there", "/nosuch", {}, {404}),
    # not wrong, and odd
    ("an empty prompt", "/completion", {"prompt": "", "n_predict": 2}, {200}),
    ("unknown fields", "/completion", {"prompt": "x", "n_predict": 2, "foo": {"a": [1]}, "bar": None}, {200}),
    ("no tokens to predict", "/completion", {"prompt": "x", "n_predict": 0}, {200}),
]

POLLS = ["/health", "/metrics", "/props", "/slots"]


def parse(reply: Dict[str, Any], parts: Sequence[Dict[str, Any]] = ()) -> Answer:
    """An answer from the final message and, of a stream, all messages.

    Raises:
        KeyError: the reply lacks what llama-server documents.
    """
    chat = "choices" in reply
    timings = reply["timings"]
    tokens: List[int] = []
    text = ""
    tops: List[Dict[int, float]] = []
    for part in parts or [reply]:
        if chat:
            if not part["choices"]:
                continue
            choice = part["choices"][0]
            text += choice.get("delta", choice.get("message", {})).get("content") or ""
            probs = (choice.get("logprobs") or {}).get("content") or []
            tokens += [p["id"] for p in probs]
        else:
            text += part.get("content", "")
            probs = part.get("completion_probabilities") or []
            # the final message of a stream repeats nothing
            tokens += part.get("tokens") or []
        tops += [{t["id"]: t["logprob"] for t in p["top_logprobs"]} for p in probs]
    n_prompt = timings["cache_n"] + timings["prompt_n"]
    # a chat's reply doesn't say whether it was shifted, but how many tokens it had
    truncated = reply.get("truncated", n_prompt + timings["predicted_n"] >= N_CTX_SLOT - 1)
    return Answer(
        tokens, text, tops, timings["cache_n"], n_prompt, truncated,
        timings.get("draft_n", 0), timings.get("draft_n_accepted", 0),
    )  # fmt: skip


def fetch(server: Server, request: Request) -> Answer:
    """Send a request, read the whole answer.

    Raises:
        RuntimeError: it wasn't served.
    """
    if request.body.get("stream"):
        parts = list(server.events(request.path, request.body))
        if not parts or "error" in parts[-1]:
            raise RuntimeError(f"a stream ended with {parts[-1:]}")
        last = next((p for p in reversed(parts) if "timings" in p), None)
        if last is None:
            raise RuntimeError(f"a stream of {len(parts)} messages ended without timings")
        return parse(last, parts)
    status, reply = server.ask("POST", request.path, request.body)
    if status != 200:
        raise RuntimeError(f"status {status}: {str(reply)[:300]}")
    return parse(reply)


def alone(request: Request) -> Request:
    """The same request as a server that does nothing else gets it, its cache not used, probabilities asked for."""
    body = dict(request.body, cache_prompt=False, stream=False)
    if request.kind == "chat":
        body.update(logprobs=True, top_logprobs=N_PROBS)
    else:
        body["n_probs"] = N_PROBS
    return request._replace(body=body)


class Difference(NamedTuple):
    """The first difference of two greedy answers: position, and how far the lone answer's best token was ahead."""

    at: int
    gap: float


def shifts(lone: Answer, other: Answer) -> List[float]:
    """How far the lead of the best token over the second moved, in nats, where both answers have the same beginning."""
    moved: List[float] = []
    for i, (a, b) in enumerate(zip(lone.top, other.top)):
        if lone.tokens[:i] != other.tokens[:i]:
            break
        if len(a) < 2:
            continue  # a drafted token: llama-server tells no probabilities
        first, second = sorted(a, key=lambda t: -a[t])[:2]
        if first in b and second in b:
            moved.append(abs((a[first] - a[second]) - (b[first] - b[second])))
    return moved


def difference(server: Server, request: Request, lone: Answer, other: Answer) -> Optional[Difference]:
    """Where two answers part, None if nowhere. ``server`` evaluates a position whose probabilities aren't known.

    A token that isn't among the best of the lone answer has an infinite gap.
    """
    if lone.tokens == other.tokens or (not other.tokens and lone.text == other.text):
        return None
    n = min(len(lone.tokens), len(other.tokens))
    at = next((i for i in range(n) if lone.tokens[i] != other.tokens[i]), n)
    if at == n:
        # one is the other's beginning: both would have gone on to the same number of tokens
        return Difference(at, float("inf"))
    top = lone.top[at] if at < len(lone.top) else {}
    if other.tokens[at] not in top:
        if request.kind == "chat":
            prompt = server.ask("POST", "/apply-template", {"messages": request.body["messages"]})[1]["prompt"]
        else:
            prompt = request.body["prompt"]
        ask = {"content": prompt, "add_special": True, "parse_special": True}
        ids = server.ask("POST", "/tokenize", ask)[1]["tokens"]
        if len(ids) != lone.n_prompt:
            raise RuntimeError(f"{request.key}: {len(ids)} tokens of prompt, the server had {lone.n_prompt}")
        body = {
            "prompt": ids + lone.tokens[:at],
            "n_predict": 1,
            "n_probs": 20,
            "temperature": 0,
            "cache_prompt": False,
        }
        body["cache_prompt"] = False
        top = fetch(server, Request("plain", "", "/completion", body)).top[0]
    chosen = top.get(other.tokens[at], -float("inf"))
    return Difference(at, max(0.0, top.get(lone.tokens[at], max(top.values())) - chosen))


@dataclass
class Summary:
    """What one soak came to."""

    setting: str
    kvq: str
    seconds: float = 0.0
    done: "Counter[str]" = field(default_factory=Counter)
    cancelled: int = 0
    refused: int = 0
    owed: int = 0
    equal: int = 0
    ties: List[float] = field(default_factory=list)
    served_only: int = 0
    shifted: int = 0
    reused: int = 0
    warm: int = 0
    drafted: int = 0
    accepted: int = 0
    shifts: List[float] = field(default_factory=list)
    rss: List[Tuple[float, float]] = field(default_factory=list)
    exit_status: Optional[int] = None
    faults: List[str] = field(default_factory=list)

    def rss_growth(self) -> Tuple[float, float]:
        """Growth of the resident memory over the second half, by a fitted line: MiB, and MiB per minute."""
        t, m = np.array(self.rss).T
        half = t >= t[0] + (t[-1] - t[0]) / 2
        slope = float(np.polyfit(t[half], m[half], 1)[0])
        return slope * float(t[half][-1] - t[half][0]), slope * 60

    def rms(self) -> float:
        """Of the moves of the lead, in nats."""
        return float(np.sqrt(np.mean(np.square(self.shifts)))) if self.shifts else 0.0

    def judge(self) -> None:
        """Add the faults that only the whole shows."""
        growth = self.rss_growth()[0]
        if growth > RSS_GROWTH_MIB:
            self.faults.append(f"resident memory grew by {growth:.1f} MiB in the second half, limit {RSS_GROWTH_MIB}")
        if len(self.shifts) >= MIN_POSITIONS and self.rms() > TOLERANCE_RMS:
            self.faults.append(f"leads moved by {self.rms():.4f} (rms), limit {TOLERANCE_RMS}")

    def text(self) -> str:
        """For a person."""
        kinds = ", ".join(f"{k} {n}" for k, n in sorted(self.done.items()))
        growth, slope = self.rss_growth()
        lines = [
            f"{self.setting} {self.kvq}: {sum(self.done.values())} requests in {self.seconds:.0f} s: {kinds}",
            f"  cancelled {self.cancelled}, refused as they should be {self.refused}",
            f"  equality owed {self.owed}: equal {self.equal}, differing at a tie {len(self.ties)}; "
            f"served, nothing owed {self.served_only}",
            f"  context shifts {self.shifted}, chunks reused {self.reused}, owed with a warm cache {self.warm}, "
            f"drafts accepted {self.accepted} of {self.drafted}",
            f"  lead of the best token moved by {self.rms():.4f} (rms), at most {max(self.shifts, default=0):.4f}, "
            f"over {len(self.shifts)} positions",
            f"  RSS {self.rss[0][1]:.1f} MiB first, {self.rss[-1][1]:.1f} last; second half {growth:+.2f} MiB "
            f"({slope:+.3f} MiB/min); exit status {self.exit_status}",
        ]
        if self.ties:
            lines.append("  leads at the ties: " + " ".join(f"{g:.4f}" for g in sorted(self.ties)))
        lines += [f"  FAULT {f}" for f in self.faults]
        return "\n".join(lines)


class Soak:
    """One server and its clients."""

    def __init__(self, program: Path, model: Path, setting: Setting, kvq: Optional[str], folder: Path) -> None:
        self.program, self.model, self.setting, self.kvq, self.folder = program, model, setting, kvq, folder
        self.slots = folder / "slots"
        self.slots.mkdir(parents=True, exist_ok=True)
        self.args = setting.arguments(model, self.slots, kvq)
        self.lock = threading.Lock()
        self.answers: List[Tuple[Request, Answer]] = []
        self.saved: Set[str] = set()
        self.summary = Summary(setting.name, kvq or "f16")

    def act(self, server: Server, mix: Mix, kind: str, rng: random.Random) -> None:
        """One thing that a client does. Raises RuntimeError or OSError when the server doesn't do its part."""
        s = self.summary
        if kind in ("plain", "prefix", "chat", "suffix", "long"):
            request = mix.request(kind, rng)
            if kind == "chat" and self.setting.draft:
                # llama-server leaves the drafted tokens out of what a streamed chat says of tokens
                request.body["stream"] = False
            answer = fetch(server, request)
            with self.lock:
                self.answers.append((request, answer))
        elif kind in ("endless", "middle"):
            request = mix.request("plain", rng)
            n = rng.choice([-1, 2**31 - 1]) if kind == "endless" else 60
            body = dict(request.body, stream=True, n_predict=n, ignore_eos=True)
            if kind == "endless":
                body["prompt"] = f"{MOVED[kind]} {body['prompt']}"
            most = rng.randint(1, 30)
            got = list(server.events("/completion", body, most))
            if len(got) != most:
                raise RuntimeError(f"{len(got)} events of a stream that was to be cut off after {most}: {got[-1:]}")
            with self.lock:
                s.cancelled += 1
        elif kind == "early":
            prompt = f"{MOVED[kind]} {story(rng, rng.choice([1, 20]))}"
            body = {"prompt": prompt, "n_predict": 50, "stream": rng.random() < 0.5}
            server.drop("/completion", body, rng.choice([0, 0, 0.02, 0.1]))
            with self.lock:
                s.cancelled += 1
        elif kind in ("save", "restore", "erase"):
            slot, name = rng.randrange(self.setting.slots), f"slot-{rng.randrange(4)}.bin"
            with self.lock:
                known = name in self.saved
            status, reply = server.ask("POST", f"/slots/{slot}?action={kind}", {"filename": name})
            if status != 200 and (kind != "restore" or known or status != 400):
                raise RuntimeError(f"{kind} of slot {slot}: {status} {reply}")
            with self.lock:
                if kind == "save":
                    self.saved.add(name)
        elif kind == "malformed":
            what, path, body, statuses = rng.choice(MALFORMED)
            status, reply = server.ask("POST", path, body)
            message = reply["error"]["message"] if status != 200 else "served"
            if status not in statuses or not message:
                raise RuntimeError(f"{what}: status {status}, expected {sorted(statuses)}: {reply}")
            with self.lock:
                s.refused += status != 200
        else:
            path = rng.choice(POLLS)
            status, reply = server.ask("GET", path)
            if status != 200 or not reply:
                raise RuntimeError(f"{path}: status {status}: {reply}")

    def client(self, server: Server, mix: Mix, end: float, limit: int) -> None:
        """A thread: does one thing after another until the time is over, a number is reached or the server is gone."""
        s = self.summary
        while time.monotonic() < end and server.alive():
            with self.lock:
                if sum(s.done.values()) >= limit or len(s.faults) >= 20:
                    return
            kind, rng = mix.draw()
            try:
                self.act(server, mix, kind, rng)
            except (RuntimeError, OSError, http.client.HTTPException, LookupError, ValueError, TypeError) as e:
                with self.lock:
                    s.faults.append(f"{kind}: {type(e).__name__}: {e}")
            with self.lock:
                s.done[kind] += 1

    def run(self, seconds: float, limit: int = 10**9, seed: int = 1, pool: int = 12, clients: int = 0) -> Summary:
        """Soak, then ask alone and compare."""
        s = self.summary
        mix = Mix(seed, pool)
        with Server(self.program, self.args, self.folder / "server.log") as server:
            process = psutil.Process(server.process.pid)
            start = time.monotonic()
            threads = [
                threading.Thread(target=self.client, args=(server, mix, start + seconds, limit), daemon=True)
                for _ in range(clients or self.setting.slots + 2)
            ]
            for t in threads:
                t.start()
            while any(t.is_alive() for t in threads) and server.alive():
                with contextlib.suppress(psutil.Error):
                    s.rss.append((time.monotonic() - start, process.memory_info().rss / 2**20))
                time.sleep(0.1)
            s.seconds = time.monotonic() - start
            if server.alive() and not server.idle():
                s.faults.append("a slot is still at work although every client is gone")
            s.exit_status = server.stop()
            if s.exit_status != 0:
                s.faults.append(f"exit status {s.exit_status}:\n{server.tail()}")
        with Server(self.program, self.args, self.folder / "alone.log") as server:
            self.compare(server)
            status = server.stop()
            if status != 0:
                s.faults.append(f"the server that served one at a time: exit status {status}:\n{server.tail()}")
        s.judge()
        return s

    def compare(self, server: Server) -> None:
        """Hold each answer that equality is owed for against the lone one."""
        s = self.summary
        lone: Dict[str, Answer] = {}
        for request, answer in self.answers:
            s.drafted += answer.n_drafted
            s.accepted += answer.n_accepted
            rows_moved = request.kind in MOVED and answer.n_cached > 0
            s.shifted += answer.truncated
            # The first sentence is where it was, and what has more in common with a slot was moved there. One that
            # came before has all but its last token cached.
            s.reused += request.kind == "suffix" and CACHE_REUSE + 20 < answer.n_cached < answer.n_prompt - 1
            if answer.truncated or rows_moved:
                s.served_only += 1
                continue
            s.owed += 1
            s.warm += answer.n_cached > 0
            if request.key not in lone:
                lone[request.key] = fetch(server, alone(request))
                if lone[request.key].n_cached or lone[request.key].truncated:
                    s.faults.append(f"{request.key}: the lone answer isn't cold: {lone[request.key]}")
            mine = lone[request.key]
            moved = shifts(mine, answer)
            s.shifts += moved
            if max(moved, default=0.0) > TOLERANCE:
                s.faults.append(f"{request.key}: a lead moved by {max(moved):.4f}, limit {TOLERANCE}")
            parted = difference(server, request, mine, answer)
            if parted is None:
                s.equal += 1
            elif parted.gap <= TOLERANCE:
                s.ties.append(parted.gap)
            else:
                s.faults.append(f"{request.key}: differs at token {parted.at}, lead {parted.gap:.4f}: {mine} {answer}")


def main() -> int:
    """Command line."""
    p = argparse.ArgumentParser(description="llama-server under a seeded mix of clients")
    p.add_argument("--minutes", type=float, default=2, help="of load, over all settings (2)")
    p.add_argument("--kvq", help="cache types, e.g. k8v4; default: f16")
    p.add_argument("--setting", action="append", choices=[s.name for s in SETTINGS], help="default: all")
    p.add_argument("--requests", type=int, default=10**9, help="at most, of each setting")
    p.add_argument("--pool", type=int, default=12, help="different prompts of each kind (12)")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--server", type=Path, help="llama-server; default: the package's")
    p.add_argument("--model", type=Path, help="GGUF; default: SmolLM2")
    p.add_argument("--logs", type=Path, help="folder for the servers' logs; default: one that is removed")
    a = p.parse_args()
    if a.server is None:
        from kvsplit import tools

        a.server = tools.find("llama-server")
    if a.model is None:
        from kvsplit import models

        a.model = models.ensure("smollm2", quiet=True)
    chosen = [s for s in SETTINGS if not a.setting or s.name in a.setting]
    total: List[Summary] = []
    with tempfile.TemporaryDirectory() as scratch:
        for setting in chosen:
            folder = (a.logs or Path(scratch)) / setting.name
            soak = Soak(a.server, a.model, setting, a.kvq, folder)
            total.append(soak.run(a.minutes * 60 / len(chosen), a.requests, a.seed, a.pool))
            print(total[-1].text(), flush=True)
    n = {k: sum(getattr(s, k) for s in total) for k in ("cancelled", "refused", "owed", "equal", "served_only")}
    print(
        f"all: {sum(sum(s.done.values()) for s in total)} requests, "
        + ", ".join(f"{k} {v}" for k, v in n.items())
        + f", differing at a tie {sum(len(s.ties) for s in total)}, faults {sum(len(s.faults) for s in total)}"
    )
    return 1 if any(s.faults for s in total) else 0


if __name__ == "__main__":
    sys.exit(main())
