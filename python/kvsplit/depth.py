# SPDX-License-Identifier: MIT
"""Speed of attention on a CPU over the depth of the cache, ours beside the unpatched release.

Usage: bench_cpu.py [--model NAME]... [--depths N,...] [--rounds N] [--configs NAME,...] [--out FILE]

How a configuration is measured. A worker process loads one libllama and holds one context for each of its
configurations, all on the CPU with flash attention. Filling a deep cache by computing takes hours, so the first
tokens are computed, the state of the sequence is read, its rows are repeated with new positions, and the result
is loaded as the state of a deeper sequence. How long a step takes depends on how many rows attention reads, hardly
on what is in them. What a step adds to the cache is removed after it, so every sample has the same depth.

How configurations are compared. The speed of a machine drifts by more than what is to be shown, so they take turns:
a round measures each of them once, in shuffled order, and only samples of one round are divided by one another.
The table has the median of these ratios over the rounds, and an interval for that median.

Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted, 143 terminated.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import ctypes
import gc
import hashlib
import json
import math
import os
import platform
import random
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Dict, Iterable, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import psutil

import kvsplit
from kvsplit import _lock, models, native, plots, quality, runs, stats, tools
from kvsplit.cache_types import BY_NAME, CACHE_TYPES
from kvsplit.errors import (
    CacheFolderError,
    ContextMemoryError,
    KVSplitError,
    NativeMissingError,
    ResultError,
    ToolError,
    UsageError,
    why,
)
from kvsplit.memory import ModelShape, kv_memory
from kvsplit.models import sha256_file
from kvsplit.policy import KVQuant
from kvsplit.results import Journal, Provenance, Row, read_rows

if TYPE_CHECKING:
    import numpy as np

PACKAGE = Path(__file__).resolve().parent

#: llama-bench's own sizes of a batch, so that a prefill is cut as there.
N_BATCH, N_UBATCH = 2048, 512

#: Cells that attention reads are a multiple of this (the pinned release pads them so).
PAD = 256


# ---- the state of a sequence, as the pinned release writes it (llama-kv-cache.cpp, state_write_*), and with the record
# that ours adds where a layer is quantized (llama-ext/kvq-state.h)


class Rows(NamedTuple):
    """Rows of one layer's keys or values: type id, and bytes, shape (cells, bytes of a row)."""

    type_id: int
    data: "np.ndarray[Any, Any]"


@dataclass
class Part:
    """One cache of a state. A model with a sliding window has two: all its full layers, then the sliding ones.

    Attributes:
        positions: of the cells, shape (cells,).
        keys, values: one entry a layer.
        record: what the rows mean, bytes; empty for a cache of floats, and in the pinned release.
    """

    positions: "np.ndarray[Any, Any]"
    keys: List[Rows] = field(default_factory=list)
    values: List[Rows] = field(default_factory=list)
    record: bytes = b""

    @property
    def n_bytes(self) -> int:
        """Of the keys and values."""
        return sum(r.data.nbytes for r in (*self.keys, *self.values))


_HEAD = 8  # a mark and the sequence's number, 32 bits each
_MARK = 1 << 31  # in the number of layers: a record follows, version and number of layers, then 5 words a layer


def parse_state(state: "np.ndarray[Any, Any]") -> List[Part]:
    """Take a state apart, without copying rows.

    Args:
        state: bytes, shape (n,).

    Raises:
        ResultError: it has another form than that of a cache of attention with one stream and values in rows.
    """
    import numpy as np

    at = _HEAD

    def take(fmt: str) -> Any:
        nonlocal at
        size = struct.calcsize(fmt)
        if at + size > len(state):
            raise ResultError("the state of the sequence ends within a field")
        (value,) = struct.unpack(fmt, state[at : at + size].tobytes())
        at += size
        return value

    def rows(n_cells: int) -> Rows:
        nonlocal at
        type_id, size = take("<i"), take("<Q")
        end = at + size * n_cells
        if not size or end > len(state):
            raise ResultError("the state of the sequence ends within its rows")
        data = state[at:end].reshape(n_cells, size)
        at = end
        return Rows(type_id, data)

    parts: List[Part] = []
    while at < len(state):
        n_stream, n_cells = take("<I"), take("<I")
        if n_stream != 1 or not n_cells or at + 12 * n_cells > len(state):
            raise ResultError(f"the state of the sequence has {n_stream} streams and {n_cells} cells in the first")
        cells = state[at : at + 12 * n_cells].view(np.int32).reshape(n_cells, 3) if at % 4 == 0 else None
        if cells is None:
            cells = np.frombuffer(state[at : at + 12 * n_cells].tobytes(), np.int32).reshape(n_cells, 3)
        at += 12 * n_cells
        if (cells[:, 1] != 1).any():
            raise ResultError("a cell of the state belongs to more or less than one sequence")
        transposed, n_layer = take("<I"), take("<I")
        if transposed:
            raise ResultError("the values of the state are transposed: flash attention is off")
        part = Part(cells[:, 0].copy())
        if n_layer & _MARK:
            n_layer &= ~_MARK
            size = 8 + 20 * n_layer
            if at + size > len(state):
                raise ResultError("the state of the sequence ends within its record")
            part.record = state[at : at + size].tobytes()
            at += size
        part.keys = [rows(n_cells) for _ in range(n_layer)]
        part.values = [rows(n_cells) for _ in range(n_layer)]
        parts.append(part)
    if not parts:
        raise ResultError("the state of the sequence holds no cache")
    return parts


def source_rows(n_have: int, n: int) -> "np.ndarray[Any, Any]":
    """Which of ``n_have`` rows stands in each of ``n`` cells: all of them, then the second half again and again.

    The first half isn't repeated: real models pay much attention to the first tokens, and a context has them once.
    """
    import numpy as np

    half = n_have // 2
    index = np.arange(n, dtype=np.int64)
    index[n_have:] = half + (index[n_have:] - n_have) % (n_have - half)
    return index


def grow_state(state: "np.ndarray[Any, Any]", n: int) -> "np.ndarray[Any, Any]":
    """The state of a sequence of ``n`` tokens, from that of a shorter one.

    Args:
        state: of a sequence at positions 0, 1, ... that is longer than the model's window.
        n: tokens, no fewer than it has.

    Returns:
        Bytes, shape (size,).

    Raises:
        ResultError: the state has another form.
    """
    import numpy as np

    parts = parse_state(state)
    first = parts[0]
    n_have = len(first.positions)
    if n < n_have or (first.positions != np.arange(n_have)).any():
        raise ResultError(f"a state of {n_have} cells can't become one of {n}")
    index = source_rows(n_have, n)
    size = _HEAD
    for i, p in enumerate(parts):
        cells = n if i == 0 else len(p.positions)
        size += 16 + len(p.record) + 12 * cells + sum(12 + cells * r.data.shape[1] for r in (*p.keys, *p.values))
    out = np.empty(size, np.uint8)
    out[:_HEAD] = state[:_HEAD]
    at = _HEAD

    def put(data: bytes) -> None:
        nonlocal at
        out[at : at + len(data)] = np.frombuffer(data, np.uint8)
        at += len(data)

    for i, p in enumerate(parts):
        # what slides stays within its window and moves with the end
        positions = np.arange(n) if i == 0 else p.positions + (n - n_have)
        cells = len(positions)
        put(struct.pack("<II", 1, cells))
        meta = np.zeros((cells, 3), np.int32)
        meta[:, 0], meta[:, 1] = positions, 1
        put(meta.tobytes())
        put(struct.pack("<II", 0, len(p.keys) | (_MARK if p.record else 0)))
        if p.record:
            put(p.record)
        for r in (*p.keys, *p.values):
            width = r.data.shape[1]
            put(struct.pack("<iQ", r.type_id, width))
            target = out[at : at + cells * width].reshape(cells, width)
            if i == 0:
                np.take(r.data, index, axis=0, out=target, mode="clip")
            else:
                target[:] = r.data
            at += cells * width
    return out


# ---- the worker


class _Context:
    """One context of the worker: its handles, and the state that deeper ones are grown from."""

    def __init__(self, handle: Any, memory: Any, n_ctx: int) -> None:
        self.handle = handle
        self.memory = memory
        self.n_ctx = n_ctx
        self.depth = 0
        self.base: Optional["np.ndarray[Any, Any]"] = None


class Worker:
    """Holds a model and its contexts; every method that a request may name is an ``op_``."""

    def __init__(
        self,
        model: str,
        n_threads: int,
        text: str = "",
        n_base: int = 512,
        seed: int = 1,
        tokens: Sequence[int] = (),
    ) -> None:
        """Load a model.

        Args:
            model: file.
            n_threads: threads of every context.
            text: what its tokens are taken from.
            n_base: tokens that are computed before rows are repeated; at least two windows are.
            seed: of the tokens of a model without vocabulary.
            tokens: ids to use instead.

        Raises:
            ToolError: it can't be loaded.
        """
        # the bindings choose their library when they are imported; LLAMA_CPP_LIB_PATH says which
        from llama_cpp import llama_cpp

        self.api = llama_cpp
        self.errors: List[str] = []

        def log(level: int, message: bytes, _: Any) -> None:
            if level in (3, 4):  # warnings and errors
                sys.stderr.write(message.decode("utf-8", "replace"))

        self._log = llama_cpp.llama_log_callback(log)  # the library keeps a pointer to it
        llama_cpp.llama_log_set(self._log, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = 0
        self.model = llama_cpp.llama_model_load_from_file(model.encode(), params)
        if not self.model:
            raise ToolError(f"{model} can't be loaded")
        self.n_threads = n_threads
        self.n_base = max(n_base, 2 * int(llama_cpp.llama_model_n_swa(self.model)))
        self.contexts: Dict[str, _Context] = {}
        self.tokens = list(tokens) or self._tokens(text, seed)

    def _tokens(self, text: str, seed: int) -> List[int]:
        """Tokens to compute with: of the text, or any where the model has no vocabulary."""
        vocab = self.api.llama_model_get_vocab(self.model)
        n_vocab = int(self.api.llama_vocab_n_tokens(vocab))
        if text and self.api.llama_vocab_type(vocab) != 0:
            data = text.encode()
            buf = (ctypes.c_int32 * (len(data) + 8))()
            n = int(self.api.llama_tokenize(vocab, data, len(data), buf, len(buf), True, False))
            if n > 0:
                return list(buf[:n])
        rng = random.Random(seed)
        return [rng.randrange(n_vocab) for _ in range(8192)]

    # ---- steps

    def _compute(self, c: _Context, n: int, at: int) -> int:
        """Decode ``n`` tokens after ``at`` in one batch, logits for the last; returns ns."""
        tokens = [self.tokens[(at + i) % len(self.tokens)] for i in range(n)]
        buf = (ctypes.c_int32 * n)(*tokens)
        batch = self.api.llama_batch_get_one(buf, n)
        start = time.perf_counter_ns()
        code = self.api.llama_decode(c.handle, batch)
        self.api.llama_synchronize(c.handle)
        took = time.perf_counter_ns() - start
        if code != 0:
            raise ToolError(f"llama_decode of {n} tokens at depth {at} gave {code}")
        return took

    def _fill(self, c: _Context, n: int) -> None:
        at = 0
        while at < n:
            step = min(N_UBATCH, n - at)
            self._compute(c, step, at)
            at += step

    def _state(self, c: _Context) -> "np.ndarray[Any, Any]":
        import numpy as np

        size = int(self.api.llama_state_seq_get_size(c.handle, 0))
        out = np.empty(size, np.uint8)
        pointer = out.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        got = int(self.api.llama_state_seq_get_data(c.handle, pointer, size, 0))
        if got != size:
            raise ToolError(f"the state of the sequence has {size} bytes, {got} were read")
        return out

    def _load(self, c: _Context, state: "np.ndarray[Any, Any]") -> None:
        self.api.llama_memory_clear(c.memory, False)
        pointer = state.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        got = int(self.api.llama_state_seq_set_data(c.handle, pointer, len(state), 0))
        if got != len(state):
            raise ToolError(f"the state of the sequence has {len(state)} bytes, {got} were taken")

    def _ends(self, c: _Context) -> Tuple[int, int]:
        return (
            int(self.api.llama_memory_seq_pos_min(c.memory, 0)),
            int(self.api.llama_memory_seq_pos_max(c.memory, 0)),
        )

    def _set_depth(self, c: _Context, n: int, compute: bool) -> None:
        if n and (compute or n < self.n_base):
            self.api.llama_memory_clear(c.memory, False)
            self._fill(c, n)
        elif n:
            if c.base is None:
                self.api.llama_memory_clear(c.memory, False)
                self._fill(c, self.n_base)
                c.base = self._state(c)
            self._load(c, grow_state(c.base, n))
        else:
            self.api.llama_memory_clear(c.memory, False)
        c.depth = n
        self._check(c)

    def _check(self, c: _Context) -> None:
        top = self._ends(c)[1]
        if top != c.depth - 1:
            raise ToolError(f"the last token in the cache is {top}, it should be {c.depth - 1}")

    @staticmethod
    def _room(c: _Context, n: int) -> None:
        if c.depth + n > c.n_ctx:
            raise ToolError(f"{n} tokens at depth {c.depth} need more than the {c.n_ctx} tokens of this context")

    def _back(self, c: _Context, ends: Tuple[int, int]) -> None:
        """Remove what a step added; a window that lost its oldest cells to it is loaded again."""
        if c.depth == 0:
            self.api.llama_memory_clear(c.memory, False)
        else:
            self.api.llama_memory_seq_rm(c.memory, 0, c.depth, -1)
            if self._ends(c) != ends:
                self._set_depth(c, c.depth, False)
        self._check(c)

    # ---- requests

    def op_open(self, name: str, type_k: int, type_v: int, n_ctx: int) -> Dict[str, Any]:
        """Make a context; the answer says what it stores, read back from a computed state."""
        p = self.api.llama_context_default_params()
        p.n_ctx = -(-n_ctx // PAD) * PAD
        p.n_batch, p.n_ubatch, p.n_seq_max = N_BATCH, N_UBATCH, 1
        p.n_threads = p.n_threads_batch = self.n_threads
        p.type_k, p.type_v = type_k, type_v
        p.flash_attn_type = 1
        p.offload_kqv = p.op_offload = False
        p.swa_full = False
        handle = self.api.llama_init_from_model(self.model, p)
        if not handle:
            raise ToolError(f"no context of {n_ctx} tokens with types {type_k} and {type_v} could be made")
        c = _Context(handle, self.api.llama_get_memory(handle), int(self.api.llama_n_ctx(handle)))
        self._fill(c, 2)
        parts = parse_state(self._state(c))
        types = [(k.type_id, v.type_id) for p in parts for k, v in zip(p.keys, p.values)]
        if set(types) != {(type_k, type_v)}:
            raise ToolError(f"types {type_k} and {type_v} were asked for, the cache has {sorted(set(types))}")
        self.contexts[name] = c
        self._set_depth(c, 0, False)
        return {"n_ctx": c.n_ctx, "n_layer": len(types)}

    def op_close(self, name: str) -> Dict[str, Any]:
        """Free a context."""
        self.api.llama_free(self.contexts.pop(name).handle)
        return {}

    def op_depth(self, name: str, n: int, compute: bool = False) -> Dict[str, Any]:
        """Fill the cache with ``n`` tokens; ``compute`` computes them all."""
        c = self.contexts[name]
        self._room(c, n - c.depth)
        start = time.perf_counter()
        self._set_depth(c, n, compute)
        return {"pos_max": self._ends(c)[1], "seconds": time.perf_counter() - start}

    def op_decode(self, name: str, n: int, warmup: int = 0) -> Dict[str, Any]:
        """Decode ``n`` tokens one after another; ns of each. Warm-up tokens are decoded before, and removed."""
        c = self.contexts[name]
        self._room(c, max(n, warmup))
        ends = self._ends(c)
        for count in (warmup, n):
            ns = [self._compute(c, 1, c.depth + i) for i in range(count)]
            if count:
                self._back(c, ends)
        return {"ns": ns}

    def op_prefill(self, name: str, n: int, warmup: int = 0) -> Dict[str, Any]:
        """Compute ``n`` tokens as batches of the size that llama-bench takes; ns of all."""
        c = self.contexts[name]
        self._room(c, max(n, warmup))
        ends = self._ends(c)
        for i in range(warmup):
            self._compute(c, 1, c.depth + i)
        if warmup:
            self._back(c, ends)
        ns = sum(self._compute(c, min(N_BATCH, n - i), c.depth + i) for i in range(0, n, N_BATCH))
        self._back(c, ends)
        return {"ns": [ns]}

    def op_logits(self, name: str) -> Dict[str, Any]:
        """Logits of the next token, float32 as base64, and a digest of the cache."""
        c = self.contexts[name]
        self._room(c, 1)
        ends = self._ends(c)
        self._compute(c, 1, c.depth)
        n = int(self.api.llama_vocab_n_tokens(self.api.llama_model_get_vocab(self.model)))
        data = ctypes.string_at(self.api.llama_get_logits_ith(c.handle, -1), 4 * n)
        self._back(c, ends)
        digest = hashlib.sha256(self._state(c).tobytes()).hexdigest() if c.depth else ""
        return {"logits": base64.b64encode(data).decode(), "state_sha256": digest}

    def op_info(self) -> Dict[str, Any]:
        """What the library says of the machine and the model."""
        desc = ctypes.create_string_buffer(256)
        self.api.llama_model_desc(self.model, desc, 256)
        try:
            fn = self.api._lib.kvq_build
            fn.restype = ctypes.c_char_p
            build = fn().decode("utf-8", "replace")
        except AttributeError:
            build = ""
        return {
            "kvq_build": build,  # release, hash of the source, hash of the patches; "" without patches
            "system_info": self.api.llama_print_system_info().decode("utf-8", "replace").strip(),
            "model_type": desc.value.decode("utf-8", "replace"),
            "model_size": int(self.api.llama_model_size(self.model)),
            "model_n_params": int(self.api.llama_model_n_params(self.model)),
            "n_swa": int(self.api.llama_model_n_swa(self.model)),
            "n_base": self.n_base,
            "n_tokens": len(self.tokens),
        }


def worker() -> int:
    """A request a line on stdin, an answer a line on stdout, until stdin ends. The first request makes the worker."""
    # whatever the library prints must not stand between the answers
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    gc.disable()  # not within a sample
    w: Optional[Worker] = None
    for line in sys.stdin:
        request = json.loads(line)
        op = request.pop("op")
        try:
            if op == "load":
                w = Worker(**request)
                answer = w.op_info()
            elif w is None:
                raise ToolError("the first request must be load")
            else:
                answer = getattr(w, f"op_{op}")(**request)
        except (KVSplitError, MemoryError) as e:
            answer = {"error": str(e) or type(e).__name__}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    return 0


class Client:
    """The other end of a worker process."""

    def __init__(self, library: Path, env: Optional[Dict[str, str]] = None) -> None:
        """Start one.

        Args:
            library: folder that holds libllama.
            env: variables to set for it.
        """
        self.name = str(library)
        full = {k: v for k, v in os.environ.items() if not k.startswith(("LLAMA_ARG_", "GGML_KVQ_"))}
        full["GGML_NO_BACKTRACE"] = "1"
        full["LLAMA_CPP_LIB_PATH"] = str(library)
        # the package may run from a source tree that isn't installed
        full["PYTHONPATH"] = os.pathsep.join([str(PACKAGE.parent), *filter(None, [full.get("PYTHONPATH")])])
        full.update(env or {})
        self._stderr = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 - closed below
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kvsplit.depth", "worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=full,
            encoding="utf-8",
        )

    def ask(self, op: str, **arguments: Any) -> Dict[str, Any]:
        """Send a request and wait for the answer.

        Raises:
            ToolError: the worker can't do it, or died.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        line = ""
        try:
            self._process.stdin.write(json.dumps({"op": op, **arguments}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            pass
        if not line:
            code = self._process.wait()
            self._stderr.seek(0)
            raise tools.failure(f"the worker of {self.name}", code, self._stderr.read())
        answer: Dict[str, Any] = json.loads(line)
        if "error" in answer:
            self._stderr.seek(0)
            tail = "\n".join(self._stderr.read().rstrip().splitlines()[-6:])
            raise ToolError(f"{self.name}: {answer['error']}\n{tail}".rstrip())
        return answer

    def cpu_seconds(self) -> float:
        """CPU time that the process has taken."""
        t = psutil.Process(self._process.pid).cpu_times()
        return float(t.user + t.system)

    def close(self) -> None:
        """End the process; one that is in the middle of a step is killed."""
        if self._process.poll() is None:
            assert self._process.stdin is not None
            try:
                self._process.stdin.close()
                self._process.wait(timeout=5)
            except (BrokenPipeError, subprocess.TimeoutExpired):
                self._process.kill()
                self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._stderr):
            if stream is not None:
                try:
                    stream.close()
                except BrokenPipeError:
                    pass

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


# ---- configurations


@dataclass(frozen=True)
class Config:
    """What is measured: a build, types of keys and values, and variables of the environment.

    Attributes:
        name: what tables and rows call it.
        build: folder with ``bin/libllama``; ``build`` and ``build-upstream`` stand for what ``--build`` and
            ``--upstream`` say.
        quant: types, the same in all layers.
        env: variables as (name, value).
        max_decode, max_prefill: deepest depths unless depths are asked for; -1 leaves it out.
    """

    name: str
    build: str
    quant: KVQuant
    env: Tuple[Tuple[str, str], ...] = ()
    max_decode: int = 65536
    max_prefill: int = 8192

    @property
    def types(self) -> Tuple[int, int]:
        """Ids of the types of keys and values."""
        return BY_NAME[self.quant.key].ggml_id, BY_NAME[self.quant.val].ggml_id


UPSTREAM_F16 = "upstream F16"
UPSTREAM_K8V4 = "upstream K8V4"
FUSED_F16 = "F16 fused"

#: By the name that ``--configs`` takes. Upstream's K8V4 takes seconds a token where it is deep.
CONFIGS: Dict[str, Config] = {
    "upstream-f16": Config(UPSTREAM_F16, "build-upstream", KVQuant("f16", "f16")),
    "upstream-k8v4": Config(UPSTREAM_K8V4, "build-upstream", KVQuant("q8_0", "q4_0"), (), 8192, 2048),
    "k8v4": Config("K8V4", "build", KVQuant("q8_0", "kvq4")),
    "k8v8": Config("K8V8", "build", KVQuant("q8_0", "q8_0"), (), 32768, -1),
    "k4v4": Config("K4V4", "build", KVQuant("kvq4", "kvq4"), (), 32768, -1),
    "k3v3": Config("K3V3", "build", KVQuant("kvq3", "kvq3"), (), 32768, -1),
    "k6v5": Config("K6V5", "build", KVQuant("kvq6", "kvq5"), (), 32768, -1),
    "f16": Config("F16", "build", KVQuant("f16", "f16"), (), 65536, -1),
    "f16-fused": Config(FUSED_F16, "build", KVQuant("f16", "f16"), (("GGML_KVQ_FA_FLOAT", "1"),)),
}


def parse_configs(text: str) -> List[Config]:
    """Configurations of a list: names of :data:`CONFIGS`, or ``[NAME=]FOLDER:KEY/VAL[@VARIABLE=VALUE]...``.

    Raises:
        UsageError: one can't be understood, or two have the same name.
    """
    out: List[Config] = []
    for one in filter(None, (t.strip() for t in text.split(","))):
        if one.lower() in CONFIGS:
            out.append(CONFIGS[one.lower()])
            continue
        head, *variables = one.split("@")
        name, eq, rest = head.partition("=")
        folder, colon, pair = (rest if eq else head).rpartition(":")
        if not colon or "/" not in pair or any("=" not in v for v in variables):
            raise UsageError(f"--configs: {one!r} is none of {', '.join(CONFIGS)}, nor NAME=FOLDER:KEY/VAL")
        quant = KVQuant.from_text(pair, "--configs")
        if quant.per_layer:
            raise UsageError(f"--configs: {pair!r} has exceptions by layer, only plain types can be measured here")
        env = tuple((k, v) for k, _, v in (v.partition("=") for v in variables))
        # tables and rows are published; where a user keeps builds is nobody's business
        out.append(Config(name if eq else f"{Path(folder).name}:{pair}", folder, quant, env))
    names = [c.name for c in out]
    if not out or len(set(names)) < len(names):
        raise UsageError("--configs: give at least one configuration, and each a name of its own")
    return out


# ---- models


@dataclass(frozen=True)
class Subject:
    """A model to measure on.

    Attributes:
        registry: its name in the registry of models; "" for one that is made with random weights.
        shape: options of ``tests/python/synth.py``.
        max_depth: deepest depth unless depths are asked for: what the model was trained for.
        n_base: tokens that are computed, before their rows are repeated.
    """

    registry: str = ""
    shape: Tuple[Tuple[str, int], ...] = ()
    max_depth: int = 65536
    n_base: int = 512

    @property
    def filename(self) -> str:
        """Of a made model: its shape, and the format of its weights."""
        v = dict(self.shape)
        heads = f"{v['n-head']}-{v['n-head-kv']}x{v['head-k']}"
        return f"random-{v['n-layer']}l-{heads}h-{v['n-embd']}e.Q4_0.gguf"


def _made(n_layer: int, n_head: int, n_head_kv: int, head: int, n_embd: int) -> Subject:
    names = ("n-layer", "n-head", "n-head-kv", "head-k", "n-embd")
    return Subject(shape=(*zip(names, (n_layer, n_head, n_head_kv, head, n_embd)), ("n-ctx-train", 131072)))


SUBJECTS: Dict[str, Subject] = {
    "tinyllama": _made(22, 32, 4, 64, 2048),
    "8b": _made(8, 32, 8, 128, 4096),
    "smollm2": Subject("smollm2", max_depth=8192, n_base=1024),
    "gemma": Subject("gemma3-270m", max_depth=32768, n_base=1024),
}

#: What is measured of each model; the first is what the others are divided by.
DEFAULT_DEPTHS = (1024, 2048, 4096, 8192, 16384, 32768, 65536)
DEFAULT_PREFILL_DEPTHS = (0, 2048, 8192)


def model_file(name: str, root: Path, build: Path, say: Callable[[str], None]) -> Path:
    """The file of a model; one with random weights is made if it isn't there.

    Args:
        name: of :data:`SUBJECTS`, or a file.
        root: of the source tree.
        build: folder of the build whose llama-quantize is used.
        say: told what takes long.

    Raises:
        ModelFileError: a model of the registry was not pulled, or there is no such file.
        ToolError: it can't be made.
    """
    subject = SUBJECTS.get(name)
    if subject is None:
        return models.resolve(name)
    if subject.registry:
        return models.resolve(subject.registry)
    path = models.cache_dir() / "bench" / subject.filename
    if path.is_file():
        return path
    say(f"making {path.name}: random weights, some minutes")
    tokenizer = models.resolve("smollm2")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".part-", dir=path.parent) as tmp:
            full, part = Path(tmp) / "f16.gguf", Path(tmp) / "part.gguf"
            synth = [sys.executable, str(root / "tests" / "python" / "synth.py"), str(full)]
            synth += ["--tokenizer", str(tokenizer)]
            synth += [s for k, v in subject.shape for s in (f"--{k}", str(v))]
            tools.run_command(synth, "synth.py")
            quantize = [str(build / "bin" / "llama-quantize"), str(full), str(part), "Q4_0"]
            tools.run_command(quantize, "llama-quantize")
            os.replace(part, path)
    except OSError as e:
        raise CacheFolderError(f"{path.parent} can't be written: {why(e)}") from None
    return path


# ---- the machine

#: Other work that takes more than this share of the machine makes a sample doubtful: at two threads on two
#: cores a thread that waits for the other at every operation is slowed by far more than the share says.
BUSY = 0.05


class Elsewhere:
    """How much of the machine something else than a worker took, while a ``with`` block ran.

    Attributes:
        share: of the CPU time of all cores, 0 to 1; what a hypervisor took away counts too.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self.share = 0.0

    def _now(self) -> Tuple[float, float, float]:
        t = psutil.cpu_times()
        names = ("user", "nice", "system", "irq", "softirq", "steal")
        busy = sum(float(getattr(t, n, 0.0)) for n in names)
        own = psutil.Process().cpu_times()
        return time.monotonic(), busy, self._client.cpu_seconds() + own.user + own.system

    def __enter__(self) -> Elsewhere:
        self._before = self._now()
        return self

    def __exit__(self, *exc: object) -> None:
        wall, busy, mine = (b - a for a, b in zip(self._before, self._now()))
        n = psutil.cpu_count() or 1
        # the system counts in ticks of 10 ms, so that a short block may even come out below 0
        self.share = min(1.0, max(0.0, (busy - mine) / (n * wall))) if wall > 0 else 0.0


class Bandwidth:
    """Memory bandwidth of the machine, by as many threads as the measurements use.

    Reading is ``numpy.max`` over 256 MiB of 64-bit integers, copying is ``numpy.copyto`` of 256 MiB, whose traffic
    counts twice, read and written. Both lie far beyond the caches, and numpy lets go of the interpreter in them.
    """

    SIZE = 256 << 20

    def __init__(self, n_threads: int) -> None:
        import numpy as np

        n = self.SIZE // 8 // n_threads
        # written once, so that every page is there
        self._pairs = [(np.full(n, 1, np.uint64), np.full(n, 2, np.uint64)) for _ in range(n_threads)]
        self.read: List[float] = []
        self.copy: List[float] = []

    def _time(self, work: Callable[[Any, Any], Any]) -> float:
        threads = [threading.Thread(target=work, args=pair) for pair in self._pairs]
        start = time.perf_counter()
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        return time.perf_counter() - start

    def measure(self, times: int = 3) -> Tuple[List[float], List[float]]:
        """Bytes per second, reading and copying, of so many tries."""
        import numpy as np

        read = [self.SIZE / self._time(lambda a, b: a.max()) for _ in range(times)]
        copy = [2 * self.SIZE / self._time(lambda a, b: np.copyto(b, a)) for _ in range(times)]
        self.read += read
        self.copy += copy
        return read, copy


# ---- the run


@dataclass(frozen=True)
class Options:
    """What to measure and where it goes.

    Attributes:
        models: names of :data:`SUBJECTS`, or files.
        configs: the first that was named ``upstream F16``, else the first, is what ratios divide by.
        depths: of decoding; None means the defaults, up to each configuration's own limit.
        prefill_depths: the same for prefill; empty leaves it out.
        rounds: samples of each.
        n_gen, n_prompt: tokens of a sample.
        warmup: tokens decoded before each sample and not counted.
        n_threads: threads.
        seed: of the order within the rounds.
        wait: seconds to wait at most, before a round, until other work takes less than :data:`BUSY`.
        build, upstream: folders of the builds.
        root: of the source tree.
        out: JSONL; None keeps no rows.
        resume: leave out what the file has.
    """

    models: Tuple[str, ...] = ("tinyllama",)
    configs: Tuple[Config, ...] = tuple(CONFIGS.values())
    depths: Optional[Tuple[int, ...]] = None
    prefill_depths: Optional[Tuple[int, ...]] = None
    rounds: int = 7
    n_gen: int = 8
    n_prompt: int = 512
    warmup: int = 2
    n_threads: int = 2
    seed: int = 1
    wait: float = 0.0
    build: Path = Path("build")
    upstream: Path = Path("build-upstream")
    root: Path = Path(".")
    out: Optional[Path] = None
    resume: bool = False

    def folder(self, config: Config) -> Path:
        """Where a configuration's libraries lie."""
        named = {"build": self.build, "build-upstream": self.upstream}.get(config.build, Path(config.build))
        for folder in (named / "bin", named / "lib", named):
            if native._lib_in(folder) is not None:
                return folder.resolve()
        how = "make build-upstream" if config.build == "build-upstream" else "make build"
        raise NativeMissingError(f"{config.name}: {named} holds no libllama; `{how}` makes one")


@dataclass(frozen=True)
class Group:
    """What takes turns: one kind of work at one depth. One of the two numbers of tokens is 0."""

    n_prompt: int
    n_gen: int
    depth: int
    configs: Tuple[Config, ...]

    @property
    def what(self) -> str:
        """For messages."""
        work = f"decode {self.n_gen}" if self.n_gen else f"prefill {self.n_prompt}"
        return f"{work} at {self.depth}"


def plan(options: Options, model: str) -> List[Group]:
    """The groups of a model, shallow ones first, decoding before prefill."""
    subject = SUBJECTS.get(model, Subject(max_depth=8192))
    groups: List[Group] = []
    for decode in (True, False):
        asked = options.depths if decode else options.prefill_depths
        for depth in asked if asked is not None else DEFAULT_DEPTHS if decode else DEFAULT_PREFILL_DEPTHS:
            limit = subject.max_depth if asked is None else depth
            chosen = tuple(
                c
                for c in options.configs
                if asked is not None or depth <= min(limit, c.max_decode if decode else c.max_prefill)
            )
            # what was trained for 8192 tokens is measured up to a full context
            if chosen and depth <= limit:
                tokens = (0, options.n_gen) if decode else (options.n_prompt, 0)
                groups.append(Group(*tokens, depth, chosen))
    return groups


def estimate(options: Options, model: Path, groups: Sequence[Group]) -> float:
    """Seconds that the groups will take, roughly.

    From what the pinned release does on 2 cores with AVX-512: weights at 25 GB/s for decoding and 85 G
    multiplications a second for prefill, attention at 4.5 GB/s of f16 cache and 0.5 GB/s of a quantized one; ours
    at 15 GB/s.
    """
    shape = ModelShape.from_gguf(model)
    size = model.stat().st_size
    total = 0.0
    for g in groups:
        for c in g.configs:
            cache = kv_memory(shape, c.quant, max(g.depth, PAD)).total_bytes
            slow = c.build == "build-upstream" or (c.quant.key == "f16" and not c.env)
            rate = (4.5e9 if c.quant.key == "f16" else 0.5e9) if slow else 15e9
            token = size / 25e9 + cache / rate
            fill = size * 1.8 * g.n_prompt / 85e9 + g.n_prompt * cache / rate / 4
            total += options.rounds * (token * (options.warmup + g.n_gen) + fill) + 2 * cache / 2e9
    return total


class _Run:
    """One model's part of a run: workers, contexts, and rows."""

    def __init__(self, options: Options, model: str, path: Path, sha256: str, text: str, run_id: str) -> None:
        self.options = options
        self.path = path
        self.sha256 = sha256
        self.text = text
        self.run_id = run_id
        self.shape = ModelShape.from_gguf(path)
        self.subject = SUBJECTS.get(model, Subject())
        self.clients: Dict[Tuple[Path, Tuple[Tuple[str, str], ...]], Client] = {}
        self.infos: Dict[int, Dict[str, Any]] = {}
        self.hashes: Dict[Path, str] = {}
        self.depths: Dict[str, int] = {}

    def __enter__(self) -> _Run:
        return self

    def __exit__(self, *exc: object) -> None:
        for client in self.clients.values():
            client.close()

    def client(self, c: Config) -> Client:
        """The worker of a configuration; those of one build and environment share it, and its weights."""
        key = (self.options.folder(c), c.env)
        if key not in self.clients:
            client = self.clients[key] = Client(key[0], dict(c.env))
            self.infos[id(client)] = client.ask(
                "load",
                model=str(self.path),
                n_threads=self.options.n_threads,
                text=self.text,
                n_base=self.subject.n_base,
                seed=self.options.seed,
            )
        return self.clients[key]

    def open(self, groups: Sequence[Group], step: Callable[[str], None]) -> None:
        """Make every context, as large as its deepest group needs."""
        need: Dict[str, Tuple[Config, int]] = {}
        for g in groups:
            for c in g.configs:
                n = g.depth + max(g.n_prompt, g.n_gen, self.options.warmup)
                need[c.name] = (c, max(n, need.get(c.name, (c, 0))[1]))
        self.check_memory([(c, n) for c, n in need.values()])
        for c, n in need.values():
            step(f"{self.path.name}: loading {c.name}")
            client = self.client(c)
            if not self.infos[id(client)]["kvq_build"] and any(t in _OURS for t in c.types):
                raise UsageError(f"{c.name}: {self.options.folder(c)} is a build without our types")
            n = max(n, int(self.infos[id(client)]["n_base"]) + PAD)
            client.ask("open", name=c.name, type_k=c.types[0], type_v=c.types[1], n_ctx=n)

    def check_memory(self, contexts: Sequence[Tuple[Config, int]]) -> None:
        """Refuse what can't fit: a run that swaps measures the disk, and one that is killed measures nothing.

        Raises:
            ContextMemoryError: all caches, the largest of them once more while its state is loaded, and in each
                worker the weights, as they are in the file and as the library repacks them, need more than there is.
        """
        caches = [kv_memory(self.shape, c.quant, n).total_bytes for c, n in contexts]
        workers = len({(self.options.folder(c), c.env) for c, _ in contexts})
        size = self.path.stat().st_size
        need = sum(caches) + max(caches) + (workers + 1) * size
        have = int(psutil.virtual_memory().available)
        if need > have:
            raise ContextMemoryError(
                f"{self.path.name}: {need / 2**30:.1f} GiB of memory are needed, {have / 2**30:.1f} are free; "
                "take fewer of --configs at once, or smaller --depths",
                kv_bytes=sum(caches),
            )

    def measure(self, g: Group, step: Callable[[str], None]) -> Iterator[Row]:
        """One group: all configurations to its depth, then the rounds."""
        o = self.options
        for c in g.configs:
            if self.depths.get(c.name) != g.depth:
                step(f"{self.path.name}: {c.name} to depth {g.depth}")
                self.client(c).ask("depth", name=c.name, n=g.depth)
                self.depths[c.name] = g.depth
        rng = random.Random(f"{o.seed} {g.what}")
        samples: Dict[str, List[List[int]]] = {c.name: [] for c in g.configs}
        busy: Dict[str, List[float]] = {c.name: [] for c in g.configs}
        for i in range(o.rounds):
            self.settle(step)
            order = list(g.configs)
            rng.shuffle(order)
            for c in order:
                step(f"{self.path.name}: {g.what}, round {i + 1} of {o.rounds}")
                op, n = ("decode", g.n_gen) if g.n_gen else ("prefill", g.n_prompt)
                client = self.client(c)
                with Elsewhere(client) as elsewhere:
                    samples[c.name].append(client.ask(op, name=c.name, n=n, warmup=o.warmup)["ns"])
                busy[c.name].append(round(elsewhere.share, 4))
        for c in g.configs:
            row = self.row(g, c, samples[c.name])
            row.busy_elsewhere = busy[c.name]
            yield row

    def settle(self, step: Callable[[str], None]) -> None:
        """Wait until the machine is idle, or until it takes too long."""
        end = time.monotonic() + self.options.wait
        client = next(iter(self.clients.values()))
        while time.monotonic() < end:
            with Elsewhere(client) as elsewhere:
                time.sleep(0.5)
            if elsewhere.share <= BUSY:
                return
            step(f"{self.path.name}: waiting for other work, which takes {100 * elsewhere.share:.0f} % of the machine")

    def library_hash(self, folder: Path) -> str:
        """sha256 over the libraries that compute, so that rows of two builds can be told apart."""
        if folder not in self.hashes:
            h = hashlib.sha256()
            for path in sorted(p for p in folder.iterdir() if p.stem.split(".")[0] in _LIBRARIES and p.is_file()):
                h.update(f"{path.name} {sha256_file(path)}\n".encode())
            self.hashes[folder] = h.hexdigest()
        return self.hashes[folder]

    def command(self) -> str:
        """The command line for the record, without folders of this machine."""
        text = " ".join(runs.command_line())
        for c in self.options.configs:
            if os.path.isabs(c.build):
                text = text.replace(c.build, Path(c.build).name)
        return text

    def provenance(self, c: Config) -> Provenance:
        """Where the rows of a configuration come from."""
        info = self.infos[id(self.client(c))]
        folder = self.options.folder(c)
        version, source, patches = ([*str(info["kvq_build"]).split(), "", "", ""])[:3]
        if not version and _is_unpatched(folder.parent):
            version, source = _lock.VERSION, _lock.SHA256
        return Provenance(
            run_id=self.run_id,
            kvsplit_version=kvsplit.__version__,
            lock=f"{_lock.NAME} {version}".strip(),
            source_sha256=source,
            patches_sha256=patches,
            command=self.command(),
            model_filename=self.path.name,
            model_sha256=self.sha256,
            python=platform.python_version(),
            platform=platform.platform(),
            cpu_info=_cpu_name(),
            backends="CPU",
            model_type=str(info["model_type"]),
            model_size=int(info["model_size"]),
            model_n_params=int(info["model_n_params"]),
            unpatched=not info["kvq_build"],
            library_sha256=self.library_hash(folder),
            environment=" ".join(f"{k}={v}" for k, v in c.env),
            system_info=str(info["system_info"]),
        )

    def row(self, g: Group, c: Config, ns: List[List[int]]) -> Row:
        """What was measured of one configuration in one group."""
        n = g.n_gen or g.n_prompt
        samples_ns = [float(sum(s)) for s in ns]
        samples_ts = [1e9 * n / s for s in samples_ns]
        memory = kv_memory(self.shape, c.quant, max(g.depth, PAD))
        return Row(
            kind="speed",
            config=c.name,
            kvq_key=c.quant.key,
            kvq_val=c.quant.val,
            type_k=c.quant.key,  # the worker refuses a context that stores anything else
            type_v=c.quant.val,
            provenance=self.provenance(c),
            test_time=runs.now(),
            kv_bytes_expected=memory.total_bytes,
            bits_per_value=memory.bits_per_value,
            n_prompt=g.n_prompt,
            n_gen=g.n_gen,
            n_depth=g.depth,
            n_batch=N_BATCH,
            n_ubatch=N_UBATCH,
            n_threads=self.options.n_threads,
            n_gpu_layers=0,
            flash_attn=1,
            avg_ns=statistics.fmean(samples_ns),
            stddev_ns=statistics.stdev(samples_ns) if len(ns) > 1 else 0.0,
            avg_ts=statistics.fmean(samples_ts),
            stddev_ts=statistics.stdev(samples_ts) if len(ns) > 1 else 0.0,
            median_ts=statistics.median(samples_ts),
            samples_ns=samples_ns,
            samples_ts=samples_ts,
            tokens_ns=[[float(t) for t in s] for s in ns] if g.n_gen else None,
        )

    def bandwidth_row(self, machine: Bandwidth, like: Row) -> Row:
        """The machine's bandwidth, measured beside a group."""
        read, copy = machine.measure()
        return Row(
            kind="bandwidth",
            config="machine",
            kvq_key="",
            kvq_val="",
            type_k="",
            type_v="",
            provenance=like.provenance,
            test_time=runs.now(),
            n_threads=self.options.n_threads,
            read_bytes_per_s=read,
            copy_bytes_per_s=copy,
        )


#: A release without our patches ends the process when it is asked for these.
_OURS = frozenset(t.ggml_id for t in CACHE_TYPES if t.name.startswith("kvq"))

_LIBRARIES = ("libllama", "libggml", "libggml-base", "libggml-cpu")


def _is_unpatched(build: Path) -> bool:
    """True if the build's own settings say that it was made from the pinned release as it is."""
    try:
        cache = (build / "CMakeCache.txt").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return any(line.startswith("KVSPLIT_UPSTREAM:") and line.endswith("=ON") for line in cache.splitlines())


def _cpu_name() -> str:
    """As llama.cpp's CPU backend calls it on Linux; elsewhere what Python knows."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _key(row: Row) -> Tuple[Any, ...]:
    """What makes two rows the same measurement."""
    p = row.provenance
    return (
        p.model_sha256, row.config, row.kvq_key, row.kvq_val, p.library_sha256, p.environment,
        row.n_prompt, row.n_gen, row.n_depth, row.n_threads,
    )  # fmt: skip


def is_done(run: _Run, g: Group, rows: Iterable[Row]) -> bool:
    """True if one run has measured all configurations of a group together, with enough rounds.

    Rows of two runs are no substitute: ratios need samples of the same rounds.
    """
    o = run.options
    found: Dict[str, set[Tuple[Any, ...]]] = {}
    for r in rows:
        if r.kind == "speed" and len(r.samples_ts or ()) >= o.rounds:
            found.setdefault(r.provenance.run_id, set()).add(_key(r))
    wanted = {
        (
            run.sha256, c.name, c.quant.key, c.quant.val, run.library_hash(o.folder(c)),
            " ".join(f"{k}={v}" for k, v in c.env), g.n_prompt, g.n_gen, g.depth, o.n_threads,
        )
        for c in g.configs
    }  # fmt: skip
    return any(wanted <= have for have in found.values())


def run(
    options: Options,
    *,
    step: Callable[[str, int, int], None] = lambda what, i, n: None,
    say: Callable[[str], None] = lambda message: None,
) -> List[Row]:
    """Measure; every group's rows are on the disk before the next group starts.

    Args:
        options: what and where.
        step: told what is being done, how many groups are finished, and how many there are.
        say: told what a user should know.

    Returns:
        The rows of this run; with ``resume`` those of the file that it didn't repeat, too.

    Raises:
        KVSplitError: rows that were written stay.
    """
    out: List[Row] = []
    for c in options.configs:
        options.folder(c)
    run_id = runs.new_id()
    machine = Bandwidth(options.n_threads)
    with contextlib.ExitStack() as stack:
        journal = stack.enter_context(Journal(options.out)) if options.out is not None else None
        text = stack.enter_context(quality.text_file(None)).path.read_text(encoding="utf-8")[:100_000]
        jobs: List[Tuple[str, Path, List[Group]]] = []
        for name in options.models:
            jobs.append((name, model_file(name, options.root, options.build, say), plan(options, name)))
        total, at = sum(len(groups) for _, _, groups in jobs), 0

        def tell(what: str) -> None:
            step(what, at, total)

        for name, path, groups in jobs:
            with _Run(options, name, path, sha256_file(path), text, run_id) as part:
                todo = groups
                if options.resume and journal is not None:
                    todo = [g for g in groups if not is_done(part, g, journal.rows)]
                    at += len(groups) - len(todo)
                    out += [r for r in journal.rows if r.provenance.model_sha256 == part.sha256]
                if not todo:
                    continue
                part.open(todo, tell)
                for g in todo:
                    rows = list(part.measure(g, tell))
                    rows.append(part.bandwidth_row(machine, rows[0]))
                    for row in rows:
                        row.validate()
                        if journal is not None:
                            journal.write(row)
                    out += rows
                    at += 1
        step("", total, total)
    return out


# ---- what follows from the rows


@dataclass(frozen=True)
class Point:
    """One configuration in one group.

    Attributes:
        config: its name.
        n_prompt, n_gen, depth: the group.
        ts: median of the samples, tokens per second.
        quartiles: of the samples, tokens per second.
        ratio: median over the rounds of this speed by the base's; None without the base.
        interval: for that median.
        rounds: samples.
        row: where it comes from.
    """

    config: str
    n_prompt: int
    n_gen: int
    depth: int
    ts: float
    quartiles: Tuple[float, float]
    ratio: Optional[float]
    interval: Optional[Tuple[float, float]]
    rounds: int
    row: Row


def base_name(rows: Iterable[Row], base: Optional[str] = None) -> str:
    """What ratios divide by: as told, else the unpatched f16, else the first configuration."""
    names = list(dict.fromkeys(r.config for r in rows if r.kind == "speed"))
    if base is not None and base not in names:
        raise UsageError(f"--base: {base!r} is none of {', '.join(names)}")
    return base or (UPSTREAM_F16 if UPSTREAM_F16 in names or not names else names[0])


def points(rows: Iterable[Row], base: Optional[str] = None) -> List[Point]:
    """All groups of one model. Where a group was measured by several runs, the last one counts.

    Raises:
        UsageError: no row is the base.
    """
    rows = [r for r in rows if r.kind == "speed"]
    name = base_name(rows, base)
    last: Dict[Tuple[str, int, int, int], Row] = {}
    for r in rows:
        last[r.config, r.n_prompt or 0, r.n_gen or 0, r.n_depth or 0] = r
    out: List[Point] = []
    for (config, n_prompt, n_gen, depth), r in last.items():
        # of the same rounds: the same run
        other = [
            b
            for b in rows
            if (b.config, b.n_prompt, b.n_gen, b.n_depth, b.provenance.run_id)
            == (name, r.n_prompt, r.n_gen, r.n_depth, r.provenance.run_id)
        ]
        samples = r.samples_ts or []
        ratio: Optional[float] = None
        interval: Optional[Tuple[float, float]] = None
        if other and len(other[-1].samples_ts or []) == len(samples):
            ratios = [a / b for a, b in zip(samples, other[-1].samples_ts or [])]
            ratio = statistics.median(ratios)
            interval = stats.median_interval(ratios)[:2]
        ts = statistics.median(samples)
        out.append(
            Point(config, n_prompt, n_gen, depth, ts, stats.quartiles(samples), ratio, interval, len(samples), r)
        )
    return out


@dataclass(frozen=True)
class Slope:
    """How the time of a decoded token grows with the depth: a line by least squares.

    Attributes:
        config: its name.
        depths: smallest and largest.
        seconds_per_cell: slope, and its standard error.
        seconds: at depth 0, and its standard error.
        bytes_per_cell: packed keys and values of all layers that keep every token.
        bytes_per_s: of packed cache, and its standard error; 0 if the time doesn't grow.
        linear: largest distance of a depth's median from the line, as a share of that median.
    """

    config: str
    depths: Tuple[int, int]
    seconds_per_cell: Tuple[float, float]
    seconds: Tuple[float, float]
    bytes_per_cell: float
    bytes_per_s: Tuple[float, float]
    linear: float


def slope(config: str, rows: Sequence[Row]) -> Optional[Slope]:
    """Fit one configuration; None with fewer than three depths.

    Every round's mean time of a token is a point. All have the same weight, so the deep ones decide.
    The standard error is that of the residuals; samples of one depth were taken within seconds of each other and
    drift together, so with few depths it is too small.
    """
    xy = [
        (float(r.n_depth or 0), ns / (r.n_gen or 1) / 1e9)
        for r in rows
        if r.config == config and r.n_gen
        for ns in r.samples_ns or ()
    ]
    depths = sorted({x for x, _ in xy})
    if len(depths) < 3 or len(xy) < 4:
        return None
    n = len(xy)
    mx, my = statistics.fmean(x for x, _ in xy), statistics.fmean(y for _, y in xy)
    sxx = sum((x - mx) ** 2 for x, _ in xy)
    b = sum((x - mx) * (y - my) for x, y in xy) / sxx
    a = my - b * mx
    s2 = sum((y - a - b * x) ** 2 for x, y in xy) / (n - 2)
    se_b, se_a = math.sqrt(s2 / sxx), math.sqrt(s2 * (1 / n + mx * mx / sxx))
    # what slides has the same size at both depths, if both are beyond the window
    low, high = int(depths[0]), int(depths[-1])
    size = {r.n_depth: r.kv_bytes_expected or 0 for r in rows if r.config == config and r.n_gen}
    per_cell = (size[high] - size[low]) / (high - low)
    medians = {d: statistics.median(y for x, y in xy if x == d) for d in depths}
    off = max(abs(a + b * d - m) / m for d, m in medians.items())
    rate: float = per_cell / b if b > 0 else 0.0
    return Slope(config, (low, high), (b, se_b), (a, se_a), per_cell, (rate, rate * se_b / b if b > 0 else 0.0), off)


@dataclass(frozen=True)
class Analysis:
    """All that follows from the rows of one model.

    Attributes:
        model: its file.
        base: what ratios divide by.
        points: every configuration in every group.
        slopes: of those with three depths or more.
        read, copy: medians of the machine's bandwidth, bytes per second; None if it wasn't measured.
        read_range, copy_range: smallest and largest.
        n_threads: threads.
        cpu: name.
    """

    model: str
    base: str
    points: List[Point]
    slopes: List[Slope]
    read: Optional[float]
    copy: Optional[float]
    read_range: Tuple[float, float]
    copy_range: Tuple[float, float]
    n_threads: int
    cpu: str


def analyse(rows: Iterable[Row], base: Optional[str] = None) -> List[Analysis]:
    """One analysis a model, in the order of the rows."""
    by_model: Dict[str, List[Row]] = {}
    for r in rows:
        by_model.setdefault(r.provenance.model_sha256, []).append(r)
    out: List[Analysis] = []
    for mine in by_model.values():
        pts = points(mine, base)
        if not pts:
            continue
        read = [v for r in mine for v in r.read_bytes_per_s or ()]
        copy = [v for r in mine for v in r.copy_bytes_per_s or ()]
        used = [p.row for p in pts]
        names = list(dict.fromkeys(p.config for p in pts))
        slopes = [s for s in (slope(n, used) for n in names) if s is not None]
        out.append(
            Analysis(
                mine[0].provenance.model_filename,
                base_name(mine, base),
                pts,
                slopes,
                statistics.median(read) if read else None,
                statistics.median(copy) if copy else None,
                (min(read), max(read)) if read else (0.0, 0.0),
                (min(copy), max(copy)) if copy else (0.0, 0.0),
                used[0].n_threads or 0,
                used[0].provenance.cpu_info,
            )
        )
    return out


# ---- what a person reads


def ratio_cell(p: Optional[Point]) -> str:
    """Ratio and interval, for a table."""
    if p is None or p.ratio is None or p.interval is None:
        return "-"
    return f"{p.ratio:.2f} ({p.interval[0]:.2f}-{p.interval[1]:.2f})"


def speed_cell(p: Optional[Point]) -> str:
    """Tokens per second and quartiles, for a table."""
    return "-" if p is None else f"{p.ts:.1f} ({p.quartiles[0]:.1f}-{p.quartiles[1]:.1f})"


def grid(pts: Sequence[Point], decode: bool, cell: Callable[[Optional[Point]], str]) -> List[str]:
    """A table in Markdown: configurations downwards, depths to the right."""
    pts = [p for p in pts if bool(p.n_gen) == decode]
    depths = sorted({p.depth for p in pts})
    by_place = {(p.config, p.depth): p for p in pts}
    lines = [f"| {' | '.join(['depth', *map(str, depths)])} |", f"|---|{'---:|' * len(depths)}"]
    for name in dict.fromkeys(p.config for p in pts):
        lines.append(f"| {' | '.join([name, *(cell(by_place.get((name, d))) for d in depths)])} |")
    return lines


def bandwidth_text(a: Analysis) -> str:
    """The machine's bandwidth, as a sentence; "" if it wasn't measured."""
    if not a.read or not a.copy:
        return ""
    return (
        f"The machine reads {a.read / 1e9:.1f} GB/s ({a.read_range[0] / 1e9:.1f} to {a.read_range[1] / 1e9:.1f}) and "
        f"copies {a.copy / 1e9:.1f} GB/s, read and written counted ({a.copy_range[0] / 1e9:.1f} to "
        f"{a.copy_range[1] / 1e9:.1f}), with {a.n_threads} threads."
    )


def slope_table(a: Analysis) -> List[str]:
    """How decoding grows with the depth, in Markdown; empty if too few depths were measured."""
    if not a.slopes:
        return []
    lines = [
        "| configuration | depths | ms per 1024 tokens | ms at depth 0 | GB/s of packed cache | of copying "
        "| of reading | off the line |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for s in a.slopes:
        k = 1024 * 1e3
        lines.append(
            f"| {s.config} | {s.depths[0]}-{s.depths[1]} | {k * s.seconds_per_cell[0]:.3f} ± "
            f"{k * s.seconds_per_cell[1]:.3f} | {1e3 * s.seconds[0]:.1f} ± {1e3 * s.seconds[1]:.1f} | "
            + (f"{s.bytes_per_s[0] / 1e9:.2f} ± {s.bytes_per_s[1] / 1e9:.2f} | " if s.bytes_per_s[0] else "- | ")
            + (f"{100 * s.bytes_per_s[0] / a.copy:.0f} % | " if a.copy and s.bytes_per_s[0] else "- | ")
            + (f"{100 * s.bytes_per_s[0] / a.read:.0f} % | " if a.read and s.bytes_per_s[0] else "- | ")
            + f"{100 * s.linear:.0f} % |"
        )
    return lines


def report(analyses: Sequence[Analysis]) -> str:
    """Tables of all models, in Markdown."""
    out: List[str] = []
    for a in analyses:
        rounds = sorted({p.rounds for p in a.points})
        certainty = stats.median_interval([0.0] * rounds[0])[2]
        out.append(f"## {a.model}, {a.n_threads} threads, {a.cpu}\n")
        for decode in (True, False):
            pts = [p for p in a.points if bool(p.n_gen) == decode]
            if not pts:
                continue
            n = pts[0].n_gen or pts[0].n_prompt
            what = f"Decoding {n} tokens" if decode else f"Prefill of {n} tokens"
            out.append(f"{what}: speed over that of {a.base} in the same round, median of {rounds[0]} rounds")
            out[-1] += f" ({100 * certainty:.0f} % interval of the median):\n"
            out += [*grid(pts, decode, ratio_cell), "", "Tokens per second, median (quartiles):\n"]
            out += [*grid(pts, decode, speed_cell), ""]
        lines = slope_table(a)
        if lines:
            out += ["Time of a decoded token over the depth, by least squares:\n", *lines, ""]
        if bandwidth_text(a):
            out += [bandwidth_text(a), ""]
        busy = [b for p in a.points for b in p.row.busy_elsewhere or ()]
        doubtful = sum(b > BUSY for b in busy)
        if doubtful:
            out += [
                f"In {doubtful} of {len(busy)} samples other work took more than {100 * BUSY:.0f} % of the machine: "
                "measure again when it is idle.",
                "",
            ]
    return "\n".join(out).rstrip() + "\n"


def to_json(analyses: Sequence[Analysis]) -> List[Dict[str, Any]]:
    """For ``json.dumps``; raw samples stay in the rows."""
    out = []
    for a in analyses:
        data = asdict(a)
        for p in data["points"]:
            del p["row"]
        out.append(data)
    return out


#: What the figure shows of the configurations that have names of their own; the others lie on these lines.
FIGURE = (UPSTREAM_F16, UPSTREAM_K8V4, FUSED_F16, "K8V8", "K8V4", "K4V4")


def draw(analyses: Sequence[Analysis], stem: Path) -> List[Path]:
    """A figure a model, of those that decoded at two depths or more; files are replaced."""
    hidden = {c.name for c in CONFIGS.values()} - set(FIGURE)
    out: List[Path] = []
    for a in analyses:
        series: Dict[str, List[Tuple[int, float, float, float]]] = {}
        for p in sorted((p for p in a.points if p.n_gen and p.config not in hidden), key=lambda p: p.depth):
            series.setdefault(p.config, []).append((p.depth, p.ts, *p.quartiles))
        if max(map(len, series.values()), default=0) < 2:
            continue
        note = f"{a.n_threads} threads, {a.cpu}; medians, bars: quartiles of the rounds"
        name = Path(a.model).stem
        for ext in ("png", "svg"):
            path = stem.with_name(f"{stem.name}-{name}.{ext}")
            plots.decode_depth(series, path, model=name, note=note)
            out.append(path)
    return out


# ---- the command


def _numbers(text: str) -> Tuple[int, ...]:
    out = tuple(int(t) for t in text.split(",") if t.strip())
    if not out or min(out) < 0:
        raise ValueError(text)
    return tuple(dict.fromkeys(out))


def _parser(root: Path) -> argparse.ArgumentParser:
    def positive(text: str) -> int:
        n = int(text)
        if n < 1:
            raise ValueError(text)
        return n

    p = argparse.ArgumentParser(
        prog="bench_cpu.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    p.add_argument(
        "--model", "-m", action="append", metavar="NAME", help=f"{', '.join(SUBJECTS)}, or a file; repeatable (all)"
    )
    p.add_argument("--depths", type=_numbers, metavar="N,...", help="of decoding (1024 to 65536, by configuration)")
    p.add_argument("--decode", action=argparse.BooleanOptionalAction, default=True, help="measure decoding")
    p.add_argument("--prefill", action=argparse.BooleanOptionalAction, default=True, help="measure prefill")
    p.add_argument("--prefill-depths", type=_numbers, metavar="N,...", help="of prefill (0, 2048, 8192)")
    p.add_argument("--rounds", "-r", type=positive, default=7, metavar="N", help="samples of each (7)")
    p.add_argument("--tokens", type=positive, default=8, metavar="N", help="decoded in a sample (8)")
    p.add_argument("--prompt", type=positive, default=512, metavar="N", help="tokens of a prefill (512)")
    p.add_argument("--threads", "-t", type=positive, default=2, metavar="N", help="threads (2)")
    p.add_argument("--seed", type=int, default=1, metavar="N", help="of the order within rounds (1)")
    p.add_argument(
        "--wait", type=positive, default=0, metavar="S", help="seconds to wait before a round for an idle machine (0)"
    )
    p.add_argument(
        "--configs", metavar="LIST", help=f"{', '.join(CONFIGS)}, or NAME=FOLDER:KEY/VAL[@VARIABLE=VALUE] (all named)"
    )
    p.add_argument("--base", metavar="NAME", help=f"configuration that ratios divide by ({UPSTREAM_F16}, or the first)")
    p.add_argument("--build", type=Path, default=root / "build", metavar="DIR", help="our build")
    p.add_argument("--upstream", type=Path, default=root / "build-upstream", metavar="DIR", help="the unpatched one")
    p.add_argument("--out", type=Path, metavar="FILE", help="JSONL that rows are appended to (default: none is kept)")
    p.add_argument("--resume", action="store_true", help="leave out what --out has of these libraries")
    p.add_argument("--report", action="store_true", help="tables and figures of all that --out has; measure nothing")
    p.add_argument("--json", action="store_true", help="JSON on stdout instead of tables")
    p.add_argument("--dry-run", action="store_true", help="print what would be measured, and about how long it takes")
    return p


def dry_run(o: Options) -> str:
    """The plan as text; nothing is measured, made or written."""
    out: List[str] = []
    total = 0.0
    for name in o.models:
        out.append(f"{name}:")
        subject = SUBJECTS.get(name)
        path = None
        if subject is not None and not subject.registry:
            path = models.cache_dir() / "bench" / subject.filename
            if not path.is_file():
                out.append(f"  {path.name} will be made first, some minutes")
                path = None
        else:
            path = models.resolve(subject.registry if subject is not None else name)
        for g in plan(o, name):
            names = ", ".join(c.name for c in g.configs)
            seconds = estimate(o, path, [g]) if path is not None else None
            total += seconds or 0
            about = "" if seconds is None else f", about {seconds:.0f} s"
            out.append(f"  {g.what}: {o.rounds} rounds of {names}{about}")
    out.append(f"about {math.ceil(total / 60)} min, and a minute a model for loading")
    return "\n".join(out) + "\n"


def _main(args: argparse.Namespace, root: Path) -> int:
    if (args.resume or args.report) and args.out is None:
        raise UsageError("--out: --resume and --report need the file")
    if args.report:
        rows = read_rows(args.out)
    else:
        prefill = args.prefill_depths if args.prefill else ()
        o = Options(
            models=tuple(args.model or SUBJECTS),
            configs=tuple(parse_configs(args.configs) if args.configs else CONFIGS.values()),
            depths=args.depths if args.decode else (),
            prefill_depths=prefill,
            rounds=args.rounds,
            n_gen=args.tokens,
            n_prompt=args.prompt,
            n_threads=args.threads,
            seed=args.seed,
            wait=args.wait,
            build=args.build,
            upstream=args.upstream,
            root=root,
            out=args.out,
            resume=args.resume,
        )
        if args.dry_run:
            sys.stdout.write(dry_run(o))
            return 0
        with runs.Progress() as progress:
            rows = run(o, step=progress.step, say=progress.say)
    analyses = analyse(rows, args.base)
    if args.out is not None:
        for path in draw(analyses, args.out.with_suffix("")):
            print(f"wrote {path}", file=sys.stderr)
    if args.json:
        sys.stdout.write(json.dumps(to_json(analyses), indent=2) + "\n")
    else:
        sys.stdout.write(report(analyses))
    sys.stdout.flush()
    return 0


def main(argv: Optional[Sequence[str]] = None, root: Optional[Path] = None) -> int:
    """Run the command line and return its exit code; errors become one line on stderr.

    Args:
        argv: arguments; None means this process's.
        root: of the source tree; None means the current folder.
    """
    root = root or Path.cwd()
    args = _parser(root).parse_args(argv)
    kept = "nothing was kept" if args.out is None else f"what was measured is in {args.out}"
    return runs.script("bench_cpu.py", lambda: _main(args, root), kept)


if __name__ == "__main__":
    sys.exit(worker() if sys.argv[1:] == ["worker"] else main())
