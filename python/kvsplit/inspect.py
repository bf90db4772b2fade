# SPDX-License-Identifier: MIT
"""Inside the KV cache of one prompt: what quantization does to each layer's attention, and which layers to protect.

A prompt is computed once with an f16 cache, on the CPU. At each layer's flash attention operation the evaluation
callback (``ggml_backend_sched_eval_callback``) reads the operation's own sources: queries, the cache's keys and values
after RoPE, mask, sinks, scale, softcap, ALiBi. So nothing depends on the architecture. From then on it is arithmetic
in float64: rows are rotated, encoded and decoded by the library's codecs as a cache does it, and attention over them
is held against attention over the exact ones. That the exact one is the model's own is checked against what the model
computed.

Errors are those of one layer alone: its input is what the f16 model computes. How errors add up over layers is for
perplexity and KL divergence to say.

Memory beside model and cache: ``4 x queries x heads x (head size of K + of V)`` bytes for each layer, whatever the
prompt's length; ``2 x queries x cells`` for the masks of all layers; and one layer at a time what
:func:`kvsplit.inspect_maths.damage` takes, which grows with the cells, not with their square, and not with the layers.

Limits: a layer that reads another layer's cache isn't looked at; models whose keys and values share one tensor (MLA)
are refused.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import io
import json
import math
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Set, Tuple

import numpy as np
import psutil

from kvsplit import bench, models, native, plots, quality, runs
from kvsplit import inspect_maths as maths
from kvsplit.cache_types import BY_NAME
from kvsplit.errors import (
    CacheFolderError,
    ContextError,
    KVQuantError,
    KVSplitError,
    ModelFileError,
    NativeMismatchError,
    NotFiniteError,
    ResultError,
    UnsupportedModelError,
    UsageError,
    why,
)
from kvsplit.formats import Library
from kvsplit.gguf_meta import GGUFInfo, check_model
from kvsplit.inspect_maths import Array, Attention, Damage, Spread
from kvsplit.memory import LayerShape, ModelShape, _shape, kv_memory
from kvsplit.policy import KVQuant, Slice, _parse_slice
from kvsplit.results import Journal, Row

DEFAULT_CONFIGS = ("K8V8", "K8V4", "K6V5", "K6V3", "K4V8", "K4V4")
DEFAULT_CTX = 1024

#: Tokens of a batch; each is one graph, so that every layer is seen once a batch.
BATCH = 512

#: A figure of attention has at most so many blocks of positions each way.
MAP_BLOCKS = 256


@dataclass(frozen=True)
class Options:
    """What to look at.

    Attributes:
        configs: policies.
        prompt: text of the prompt.
        text: file to take it from; with neither, the text that every Python carries.
        n_ctx: tokens of the prompt at most; None means 1024, or what the model was trained for if less.
        queries: positions whose attention is held against the exact one.
        budget: how much larger a recommended cache may be than the policy that it improves, in percent.
        maps: draw attention.
        layers, heads: slices of layers (as a SPEC counts) and query heads to draw; None means the layers that keys
            alone damage most, at the median, and least, and the most damaged head of each.
        n_threads: threads of the model; None means the machine's cores.
        out: folder for the files; nothing in it is overwritten.
    """

    configs: Tuple[KVQuant, ...] = tuple(KVQuant.from_text(c) for c in DEFAULT_CONFIGS)
    prompt: Optional[str] = None
    text: Optional[Path] = None
    n_ctx: Optional[int] = None
    queries: int = 64
    budget: float = 10.0
    maps: bool = False
    layers: Optional[str] = None
    heads: Optional[str] = None
    n_threads: Optional[int] = None
    out: Path = Path("kvsplit-results")


# ---- ggml's tensors


class _Tensor(ctypes.Structure):
    """Mirror of ``struct ggml_tensor`` (ggml.h); :class:`_Ggml` checks it against the library."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * 4),
        ("nb", ctypes.c_size_t * 4),
        ("op", ctypes.c_int),
        ("op_params", ctypes.c_int32 * 16),
        ("flags", ctypes.c_int32),
        ("src", ctypes.c_void_p * 10),
        ("view_src", ctypes.c_void_p),
        ("view_offs", ctypes.c_size_t),
        ("data", ctypes.c_void_p),
        ("name", ctypes.c_char * 64),
        ("extra", ctypes.c_void_p),
        ("padding", ctypes.c_char * 8),
    ]


class _InitParams(ctypes.Structure):
    """Mirror of ``struct ggml_init_params``."""

    _fields_ = [("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool)]


_DTYPES: Dict[int, "np.dtype[Any]"] = {0: np.dtype(np.float32), 1: np.dtype(np.float16)}


class _Ggml:
    """ggml's functions on tensors, through the library that computes."""

    def __init__(self, lib: ctypes.CDLL) -> None:
        """Bind and check.

        Raises:
            NativeMismatchError: a tensor of this library has another layout than is mirrored here.
        """
        self.lib = lib
        c_int, c_i64, c_size, c_void_p = ctypes.c_int, ctypes.c_int64, ctypes.c_size_t, ctypes.c_void_p
        c_float, c_char_p = ctypes.c_float, ctypes.c_char_p
        for name, restype, argtypes in (
            ("ggml_nelements", c_i64, [c_void_p]),
            ("ggml_nbytes", c_size, [c_void_p]),
            ("ggml_element_size", c_size, [c_void_p]),
            ("ggml_get_name", c_char_p, [c_void_p]),
            ("ggml_set_name", c_void_p, [c_void_p, c_char_p]),
            ("ggml_op_name", c_char_p, [c_int]),
            ("ggml_op_desc", c_char_p, [c_void_p]),
            ("ggml_init", c_void_p, [_InitParams]),
            ("ggml_free", None, [c_void_p]),
            ("ggml_tensor_overhead", c_size, []),
            ("ggml_new_tensor_3d", c_void_p, [c_void_p, c_int, c_i64, c_i64, c_i64]),
            ("ggml_new_tensor_1d", c_void_p, [c_void_p, c_int, c_i64]),
            ("ggml_permute", c_void_p, [c_void_p, c_void_p, c_int, c_int, c_int, c_int]),
            ("ggml_add", c_void_p, [c_void_p, c_void_p, c_void_p]),
            ("ggml_flash_attn_ext", c_void_p, [c_void_p] * 5 + [c_float] * 3),
            ("ggml_flash_attn_ext_add_sinks", None, [c_void_p, c_void_p]),
            ("ggml_backend_tensor_get", None, [c_void_p, c_void_p, c_size, c_size]),
        ):
            f = getattr(lib, name)
            f.restype, f.argtypes = restype, argtypes
        self._check()

    def _check(self) -> None:
        lib = self.lib
        size = int(lib.ggml_tensor_overhead()) * 16
        ctx = lib.ggml_init(_InitParams(size, None, True))
        try:
            k = lib.ggml_permute(ctx, lib.ggml_new_tensor_3d(ctx, 1, 64, 2, 96), 0, 2, 1, 3)
            v = lib.ggml_permute(ctx, lib.ggml_new_tensor_3d(ctx, 1, 32, 2, 96), 0, 2, 1, 3)
            q = lib.ggml_permute(ctx, lib.ggml_new_tensor_3d(ctx, 0, 64, 4, 7), 0, 2, 1, 3)
            mask, sinks = lib.ggml_new_tensor_3d(ctx, 1, 96, 7, 1), lib.ggml_new_tensor_1d(ctx, 0, 4)
            node = lib.ggml_flash_attn_ext(ctx, q, k, v, mask, 0.125, 0.0, 30.0)
            lib.ggml_flash_attn_ext_add_sinks(node, sinks)
            lib.ggml_set_name(node, b"attention")
            added = lib.ggml_add(ctx, sinks, sinks)
            t = self.at(node)
            self.op_attention, self.op_add = int(t.op), int(self.at(added).op)
            kt = self.at(k)
            good = (
                list(t.src[:6]) == [q, k, v, mask, sinks, None]
                and self.params(t) == (0.125, 0.0, 30.0)
                and t.name == lib.ggml_get_name(node) == b"attention"
                and lib.ggml_op_name(t.op) == b"FLASH_ATTN_EXT"
                and lib.ggml_op_name(self.op_add) == b"ADD"
                and list(t.ne) == [32, 4, 7, 1]
                and list(kt.ne) == [64, 96, 2, 1]
                and list(kt.nb[:3]) == [2, 2 * 64 * 2, 2 * 64]
                and kt.type == 1
                and kt.view_src is not None
                and lib.ggml_nelements(k) == 64 * 96 * 2
                and lib.ggml_nbytes(k) == self.span(kt) == 2 * 64 * 96 * 2
                and lib.ggml_element_size(q) == _DTYPES[self.at(q).type].itemsize == 4
                and int(lib.ggml_tensor_overhead()) - ctypes.sizeof(_Tensor) in (32, 24, 16)  # struct ggml_object
            )
        finally:
            lib.ggml_free(ctx)
        if not good:
            raise NativeMismatchError(
                "the library lays out tensors in another way than this package reads them; "
                "build both from one source tree"
            )

    @staticmethod
    def at(pointer: int) -> _Tensor:
        """The tensor at an address."""
        return _Tensor.from_address(pointer)

    @staticmethod
    def params(t: _Tensor) -> Tuple[float, float, float]:
        """Scale, ALiBi's largest bias and softcap of an attention operation."""
        a = np.frombuffer(bytes(t.op_params)[:12], np.float32)
        return float(a[0]), float(a[1]), float(a[2])

    @staticmethod
    def span(t: _Tensor) -> int:
        """Bytes from a tensor's first to its last, of types without blocks."""
        return int(_DTYPES[t.type].itemsize + sum((t.ne[i] - 1) * t.nb[i] for i in range(4)))

    def bytes(self, pointer: int, offset: int, size: int) -> Array:
        """Raw bytes of a tensor, from whichever device they lie on."""
        out = np.empty(size, np.uint8)
        self.lib.ggml_backend_tensor_get(pointer, out.ctypes.data, offset, size)
        return out

    def array(self, pointer: int) -> Array:
        """A tensor with its axes in numpy's order, shape (ne3, ne2, ne1, ne0); a view of bytes that were copied.

        Raises:
            ResultError: its type isn't f32 or f16.
        """
        t = self.at(pointer)
        if t.type not in _DTYPES:
            raise ResultError(
                f"a tensor of type {t.type} can't be read as numbers: {t.name.decode('utf-8', 'replace')}"
            )
        data = self.bytes(pointer, 0, int(self.lib.ggml_nbytes(pointer)))
        return np.lib.stride_tricks.as_strided(
            data.view(_DTYPES[t.type]), tuple(int(n) for n in reversed(t.ne)), tuple(int(n) for n in reversed(t.nb))
        )

    def rows(self, pointer: int, which: Sequence[int]) -> Array:
        """Some rows of a matrix, shape (len(which), ne0)."""
        t = self.at(pointer)
        dtype = _DTYPES[t.type]
        out = np.empty((len(which), int(t.ne[0])), dtype)
        for i, row in enumerate(which):
            out[i] = self.bytes(pointer, row * int(t.nb[1]), out.shape[1] * dtype.itemsize).view(dtype)
        return out


# ---- the model


_EvalFn = Callable[[int, bool], bool]


class _Model:
    """A loaded model on the CPU, and contexts of it."""

    def __init__(self, path: Path, n_threads: Optional[int]) -> None:
        self.lib = native.load()
        from llama_cpp import _logger, llama_cpp

        self.api: Any = llama_cpp
        self.ggml = _Ggml(self.lib.lib)
        self.log: List[str] = []

        def log(level: int, message: bytes, _: Any) -> None:
            if level in (3, 4):  # warnings and errors
                self.log.append(message.decode("utf-8", "replace").strip())

        self._log = llama_cpp.llama_log_callback(log)
        self._log_before = _logger.llama_log_callback
        llama_cpp.llama_log_set(self._log, ctypes.c_void_p(0))
        self.n_threads = n_threads or psutil.cpu_count(logical=False) or 1
        self.handle: Any = None
        try:
            llama_cpp.llama_backend_init()
            params = llama_cpp.llama_model_default_params()
            params.n_gpu_layers = 0
            self.handle = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
            if not self.handle:
                raise ModelFileError(f"model {path} could not be loaded: {self.why()}")
        except BaseException:
            self.close()
            raise

    def why(self) -> str:
        """What the library said last."""
        return self.lib.last_error() or "; ".join(self.log[-2:]) or "the native library gave no reason"

    def tokens(self, text: str) -> List[int]:
        """Tokens of a text, with those that the model wants at its start."""
        vocab = self.api.llama_model_get_vocab(self.handle)
        if self.api.llama_vocab_type(vocab) == 0:  # LLAMA_VOCAB_TYPE_NONE
            raise UnsupportedModelError("the model carries no tokenizer, so a prompt can't be made")
        data = text.encode("utf-8")
        room = len(data) + 16
        while True:  # a byte may become several tokens; a negative answer says how many there are
            buf = (ctypes.c_int32 * room)()
            n = int(self.api.llama_tokenize(vocab, data, len(data), buf, room, True, False))
            if n >= 0:
                return list(buf[:n])
            room = -n

    @contextlib.contextmanager
    def context(
        self, quant: KVQuant, n_ctx: int, callback: Optional[_EvalFn] = None, full: bool = False
    ) -> Iterator[Any]:
        """A context with flash attention, ``full``: sliding-window layers keep everything.

        Raises:
            ContextError: the library refused.
        """
        p = self.api.llama_context_default_params()
        p.n_ctx, p.n_batch, p.n_ubatch, p.n_seq_max = n_ctx, BATCH, BATCH, 1
        p.n_threads = p.n_threads_batch = self.n_threads
        # handles of a policy beat what the file carries, plain types don't
        p.type_k, p.type_v = self.lib.handle(quant.key, "kvq_key"), self.lib.handle(quant.val, "kvq_val")
        p.flash_attn_type = 1
        p.offload_kqv = p.op_offload = False
        p.swa_full = full
        p.no_perf = True
        if callback is not None:
            kept = self.api.ggml_backend_sched_eval_callback(lambda t, ask, _: callback(t, ask))
            p.cb_eval = kept
        ctx = self.api.llama_init_from_model(self.handle, p)
        if not ctx:
            raise ContextError(f"no context of {n_ctx} tokens could be made ({quant.text}): {self.why()}")
        try:
            yield ctx
        finally:
            self.api.llama_free(ctx)

    def decode(self, ctx: Any, tokens: Sequence[int]) -> None:
        """Compute tokens behind those that the context has.

        Raises:
            KVSplitError: the library failed.
        """
        buf = (ctypes.c_int32 * len(tokens))(*tokens)
        code = self.api.llama_decode(ctx, self.api.llama_batch_get_one(buf, len(tokens)))
        if code != 0:
            raise KVSplitError(f"llama_decode of {len(tokens)} tokens gave {code}: {self.why()}")
        self.api.llama_synchronize(ctx)

    def close(self) -> None:
        """Free the model."""
        if self.handle:
            self.api.llama_model_free(self.handle)
            self.handle = None
        self.api.llama_log_set(self._log_before, ctypes.c_void_p(0))

    def __enter__(self) -> _Model:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _cut(n: int) -> List[Tuple[int, int]]:
    """Batches of ``n`` tokens, as even as can be: the last isn't short, which ggml computes less exactly."""
    parts = -(-n // BATCH)
    ends = [n * i // parts for i in range(parts + 1)]
    return list(zip(ends, ends[1:]))


# ---- what attention sees


@dataclass
class _Seen:
    """Of one layer, until its last batch."""

    q: List[Array] = field(default_factory=list)
    output: List[Array] = field(default_factory=list)
    masks: List[Array] = field(default_factory=list)
    positions: List[int] = field(default_factory=list)
    short: int = 1 << 30


_CACHE_K = re.compile(rb"cache_k_l(\d+)")
_BIAS = re.compile(rb"blk\.(\d+)\.attn_(k|qkv)\.bias")


class _Capture:
    """Evaluation callback: gathers sampled queries, and hands a layer over when its keys and values are whole.

    Args:
        model: whose tensors they are.
        positions: of the queries, ascending.
        n_tokens: of the prompt.
        layers: layers of the model to look at; None means all.
        take: gets each layer; its arrays are dropped when it returns.
        every: hand over at every batch what that batch has, instead of all at the last.
    """

    def __init__(
        self,
        model: _Model,
        positions: Array,
        n_tokens: int,
        layers: Optional[Set[int]],
        take: Callable[[Attention], None],
        every: bool = False,
    ) -> None:
        self.ggml = model.ggml
        self.model = model
        self.positions = positions
        self.n_tokens = n_tokens
        self.layers = layers
        self.take = take
        self.every = every
        self.error: Optional[BaseException] = None
        self.bias: Dict[int, Array] = {}
        self.seen: Dict[int, _Seen] = {}
        self._start = self._end = 0
        self._done: Set[int] = set()
        self._masks: Dict[int, Array] = {}

    def run(self, ctx: Any, tokens: Sequence[int], step: Callable[[], None] = lambda: None) -> None:
        """Compute the prompt."""
        for start, end in _cut(len(tokens)):
            self._start, self._end, self._done, self._masks = start, end, set(), {}
            step()
            self.model.decode(ctx, tokens[start:end])
            if self.error is not None:
                raise self.error

    def __call__(self, pointer: int, ask: bool) -> bool:
        """ggml's callback. An exception can't pass through C, so it is kept, and raised when the batch is over."""
        if self.error is not None:
            return not ask
        try:
            return self._call(pointer, ask)
        except BaseException as e:  # KeyboardInterrupt too
            self.error = e
            return not ask

    def _call(self, pointer: int, ask: bool) -> bool:
        t = self.ggml.at(pointer)
        if t.op != self.ggml.op_attention:
            if ask and t.op == self.ggml.op_add and self._start == 0 and t.src[1]:
                self._add(t.src[1])
            return not ask
        k = self.ggml.at(t.src[1])
        m = _CACHE_K.match(self.ggml.at(k.view_src).name) if k.view_src else None
        if m is None:
            raise UnsupportedModelError(
                "attention of this model reads no keys from the cache, so there is nothing to see"
            )
        il = int(m.group(1))
        # a layer that reads another's cache comes after the one that owns it
        if il in self._done or (self.layers is not None and il not in self.layers):
            return not ask
        last = self._end == self.n_tokens
        at = np.searchsorted(self.positions, (self._start, self._end))
        rows = [int(p) - self._start for p in self.positions[at[0] : at[1]]]
        if ask:
            return bool(rows) or last
        self._done.add(il)
        self._gather(il, t, rows)
        if last or (self.every and rows):
            self._hand_over(il, t)
        return True

    def _add(self, pointer: int) -> None:
        m = _BIAS.fullmatch(self.ggml.at(pointer).name)
        if m is not None and self.ggml.at(pointer).type in _DTYPES:
            self.bias[int(m.group(1))] = self.ggml.array(pointer)[0, 0, 0].astype(np.float32)

    def _gather(self, il: int, t: _Tensor, rows: List[int]) -> None:
        if not rows:
            return
        seen = self.seen.setdefault(il, _Seen())
        q = self.ggml.array(t.src[0])
        out = self.ggml.array(ctypes.addressof(t))
        if q.shape[0] != 1 or q.shape[2] != self._end - self._start or out.shape[1] != q.shape[2] or not t.src[3]:
            raise UnsupportedModelError(
                f"attention of layer {il} computes {q.shape[2]} of {self._end - self._start} tokens in {q.shape[0]} "
                "streams: this form isn't known here"
            )
        seen.q.append(q[0][:, rows].astype(np.float32))
        seen.output.append(out[0][rows].transpose(1, 0, 2).astype(np.float32))
        mask = self._masks.get(t.src[3])  # layers share them
        if mask is None:
            mask = self._masks[t.src[3]] = self.ggml.rows(t.src[3], rows)
        seen.masks.append(mask)
        seen.positions += [self._start + r for r in rows]
        seen.short = min(seen.short, self._end - self._start)

    def _hand_over(self, il: int, t: _Tensor) -> None:
        seen = self.seen.pop(il)
        k, v = self.ggml.at(t.src[1]), self.ggml.at(t.src[2])
        if k.view_src == v.view_src:
            raise UnsupportedModelError(_MLA)
        if (k.type, v.type) != (1, 1):
            raise ResultError(f"layer {il} caches types {k.type} and {v.type}, f16 was asked for")
        n = self._end
        # the cache is padded behind the last token, and earlier batches saw less of it
        mask = np.full((len(seen.positions), n), -np.inf, np.float16)
        at = 0
        for part in seen.masks:
            if np.isfinite(part[:, n:]).any():
                raise ResultError(f"layer {il} attends cells behind the last of {n} tokens")
            mask[at : at + len(part), : min(n, part.shape[1])] = part[:, :n]
            at += len(part)
        scale, max_bias, softcap = self.ggml.params(t)
        a = Attention(
            il=il,
            q=np.concatenate(seen.q, axis=1),
            k=self.ggml.array(t.src[1])[0, :, :n],
            v=self.ggml.array(t.src[2])[0, :, :n],
            mask=mask,
            positions=np.array(seen.positions),
            output=np.concatenate(seen.output, axis=1),
            scale=scale,
            max_bias=max_bias,
            softcap=softcap,
            sinks=self.ggml.array(t.src[4])[0, 0, 0].astype(np.float32) if t.src[4] else None,
            short=seen.short,
        )
        for what, x in (("queries", a.q), ("keys", a.k), ("values", a.v)):
            if not np.isfinite(x).all():
                raise NotFiniteError(f"the {what} of layer {il} hold NaN or infinity, with an f16 cache already")
        self.take(a)


_MLA = (
    "keys and values of this model share one tensor (MLA): they can't have types of their own, and inspect doesn't "
    "look at them; compare measures such a model with equal types, for example --config K8V8"
)


# ---- what comes out


@dataclass
class Layer:
    """One layer, as a SPEC counts it.

    Attributes:
        layer, il, swa, n_head, n_head_kv, head_k, head_v: shape; ``layer`` as a slice counts, ``il`` of the model.
        rot_k, rot_v: size of the Hadamard matrix that quantized rows are rotated by, 0: none.
        damage: by types.
        keys, values: statistics of each KV head.
        rotated_keys, rotated_values: the same after the rotation; empty without one.
        constant_keys: of each KV head, the share of its energy that is the same at every position.
        first_key_norm: of each KV head, norm of the first token's key over the median.
        key_bias: absmax of the model's bias tensor; None without.
        key_bias_rms: the same over the RMS of the keys' median channel.
    """

    layer: int
    il: int
    swa: bool
    n_head: int
    n_head_kv: int
    head_k: int
    head_v: int
    rot_k: int
    rot_v: int
    damage: Damage
    keys: List[Spread]
    values: List[Spread]
    rotated_keys: List[Spread]
    rotated_values: List[Spread]
    constant_keys: List[float]
    first_key_norm: List[float]
    key_bias: Optional[float] = None
    key_bias_rms: Optional[float] = None

    @property
    def first(self) -> Optional[float]:
        """Attention on the first token, mean over heads; None where no query may attend it."""
        there = [x for x in self.damage.first if not math.isnan(x)]
        return float(np.mean(there)) if there else None

    def output_nse(self, type_k: str, type_v: str) -> float:
        """Normalized squared error of the attention's output under a pair of types."""
        return self.damage.output[_plain(type_k), _plain(type_v)].whole

    def logit_rmse(self, type_k: str) -> float:
        """RMSE of the attention logits, in nats."""
        return math.sqrt(self.damage.logits[_plain(type_k)].whole)

    def to_json(self) -> Dict[str, Any]:
        """For ``json.dumps``."""
        d = self.damage
        flat = {k: v for k, v in vars(self).items() if isinstance(v, (int, float)) or v is None}
        spreads = ("keys", "values", "rotated_keys", "rotated_values")
        pairs = [(pair, h) for pair, h in d.output.items() if pair != ("f16", "f16")]
        return {
            **flat,
            "constant_keys": self.constant_keys,
            "first_key_norm": self.first_key_norm,
            "first_token_attention": [None if math.isnan(x) else x for x in d.first],
            "sink_attention": d.sink,
            "check": d.check,
            **{name: [asdict(s) for s in getattr(self, name)] for name in spreads},
            "stored_keys": {t: {"nse": s.nse, "cosine": s.cosine} for t, s in d.keys.items() if t != "f16"},
            "stored_values": {t: {"nse": s.nse, "cosine": s.cosine} for t, s in d.values.items() if t != "f16"},
            "logit_rmse": {t: math.sqrt(h.whole) for t, h in d.logits.items() if t != "f16"},
            "head_logit_rmse": {t: [math.sqrt(e) for e in h.each] for t, h in d.logits.items() if t != "f16"},
            "output_nse": {f"{k}/{v}": h.whole for (k, v), h in pairs},
            "head_output_nse": {f"{k}/{v}": h.each for (k, v), h in pairs},
        }


def _plain(name: str) -> str:
    """The name under which errors of a type are kept: exact ones are f16."""
    return "f16" if name in maths.EXACT else name


@dataclass(frozen=True)
class Caution:
    """Something about a model that costs quality.

    Attributes:
        kind: key_bias, constant_keys, logits, first_token, sinks, window, rotation or hybrid.
        text: in words, with what to do.
        layers: where.
    """

    kind: str
    text: str
    layers: List[int] = field(default_factory=list)


@dataclass(frozen=True)
class Advice:
    """A policy with some layers kept wider.

    Attributes:
        config: label of the policy that it improves.
        key, val: SPECs.
        layers_k, layers_v: layers that are wider.
        bytes_before, bytes_after: of the cache, as the tools allocate it, at ``n_ctx`` tokens.
        error_before, error_after: normalized squared error of the attention's output, mean over layers.
        n_ctx: tokens.
    """

    config: str
    key: str
    val: str
    layers_k: List[int]
    layers_v: List[int]
    bytes_before: int
    bytes_after: int
    error_before: float
    error_after: float
    n_ctx: int


@dataclass
class Inspection:
    """What came out.

    Attributes:
        run_id: name of the run, part of its files' names.
        model, arch: file name and architecture.
        text, text_sha256: of the prompt.
        n_tokens, n_queries: of the prompt, and those whose attention was looked at.
        layers: in the order of the model.
        types: by label of a configuration, types of keys and values of each layer, read back from a context.
        configs: policies.
        advice: one entry for each policy that can be improved within the budget.
        cautions: in words.
        check: how far the model's own attention is from the one computed here, worst layer.
        rows: of kind ``layer``.
        files: what was written.
    """

    run_id: str
    model: str
    arch: str
    text: str
    text_sha256: str
    n_tokens: int
    n_queries: int
    layers: List[Layer]
    types: Dict[str, List[Tuple[str, str]]]
    configs: Tuple[KVQuant, ...]
    command: str = ""
    advice: List[Advice] = field(default_factory=list)
    cautions: List[Caution] = field(default_factory=list)
    check: Dict[str, float] = field(default_factory=dict)
    rows: List[Row] = field(default_factory=list)
    files: List[Path] = field(default_factory=list)

    def key_types(self) -> List[str]:
        """Lossy types of keys that were looked at, fewest bits first."""
        return _ordered(t for x in self.layers for t in x.damage.keys)

    def value_types(self) -> List[str]:
        """The same of values."""
        return _ordered(t for x in self.layers for t in x.damage.values)

    def damaged_by_keys(self, name: str) -> List[int]:
        """Layers by the output error that keys of a type make alone, the most sensitive first."""
        return _ranked([x.output_nse(name, "f16") for x in self.layers])

    def damaged_by_values(self, name: str) -> List[int]:
        """The same of values."""
        return _ranked([x.output_nse("f16", name) for x in self.layers])

    def output_nse(self, quant: KVQuant) -> List[float]:
        """Output error of each layer under one of the configurations."""
        return [x.output_nse(*t) for x, t in zip(self.layers, self.types[quant.text])]

    def to_json(self) -> Dict[str, Any]:
        """For ``json.dumps``."""
        return {
            "run_id": self.run_id,
            "command": self.command,
            "model": self.model,
            "arch": self.arch,
            "text": self.text,
            "text_sha256": self.text_sha256,
            "seq_len": self.n_tokens,
            "queries": self.n_queries,
            "check": self.check,
            "cautions": [asdict(w) for w in self.cautions],
            "configs": [
                {
                    "config": q.label,
                    "kvq_key": q.key,
                    "kvq_val": q.val,
                    "output_nse": float(np.mean(self.output_nse(q))),
                    "worst_layer": int(np.argmax(self.output_nse(q))),
                }
                for q in self.configs
            ],
            "ranking": {
                "keys": {t: self.damaged_by_keys(t) for t in self.key_types()},
                "values": {t: self.damaged_by_values(t) for t in self.value_types()},
            },
            "advice": [asdict(a) for a in self.advice],
            "layers": [x.to_json() for x in self.layers],
            "files": [str(f) for f in self.files],
        }


def _ordered(names: Iterator[str]) -> List[str]:
    there = {n for n in names if _plain(n) != "f16"}
    return sorted(there, key=lambda n: (BY_NAME[n].bits_per_value, n))


def _ranked(values: Sequence[float]) -> List[int]:
    return sorted(range(len(values)), key=lambda i: (-values[i], i))


# ---- the work


@dataclass
class _Plan:
    """What is known before the prompt is computed."""

    shape: ModelShape
    types: Dict[str, List[Tuple[str, str]]]
    rotation: Dict[Tuple[str, int, str], int]  # by side, layer and type
    key_types: List[str]
    value_types: List[str]


def _shape_of(info: GGUFInfo, model: _Model) -> ModelShape:
    """Shape of the cache, from the metadata or, where their rules aren't known, from a context.

    Raises:
        UnsupportedModelError: there is none, or keys and values share a tensor.
    """
    unknown: Optional[UnsupportedModelError] = None
    shape: Optional[ModelShape] = None
    try:
        shape = _shape(info)
    except UnsupportedModelError as e:
        unknown = e
    if shape is None:
        with model.context(KVQuant(), 256) as ctx:
            there = model.lib.layers(ctx)
        if not there:
            raise unknown or UnsupportedModelError(f"{info.path.name} has no KV cache, there is nothing to inspect")
        layers = tuple(LayerShape(x.il, x.index, x.n_head_kv, x.head_k, x.head_v, bool(x.swa)) for x in there)
        n_swa = int(model.api.llama_model_n_swa(model.handle))
        n_layer = int(model.api.llama_model_n_layer(model.handle))
        shape = ModelShape(info.arch, n_layer, layers, n_ctx_train=int(info.get("context_length", 0)), n_swa=n_swa)
    if shape.mla:
        raise UnsupportedModelError(_MLA)
    return shape


def _plan(model: _Model, shape: ModelShape, configs: Sequence[KVQuant]) -> _Plan:
    """Make a small context of each configuration, and of each type that layers may be widened to; read types back."""
    n = len(shape.layers)
    sides: Tuple[List[str], List[str]] = ([], [])
    for q in configs:
        for pair in q.types(n):
            for side, name in zip(sides, pair):
                while name is not None and _plain(name) != "f16":
                    if name not in side:
                        side.append(name)
                    name = maths.wider(name) or "f16"
    types: Dict[str, List[Tuple[str, str]]] = {}
    rotation: Dict[Tuple[str, int, str], int] = {}
    uniform = [KVQuant(t, t) for t in dict.fromkeys((*sides[0], *sides[1]))]
    for q in dict.fromkeys((*configs, *uniform)):
        with model.context(q, 256) as ctx:
            layers = model.lib.layers(ctx)
        types[q.text] = [(model.lib.type_name(x.type_k), model.lib.type_name(x.type_v)) for x in layers]
        if types[q.text] != q.types(n):
            raise ResultError(f"{q.text} was asked for, the cache has {types[q.text]}")
        for i, (x, (tk, tv)) in enumerate(zip(layers, types[q.text])):
            rotation["k", i, tk], rotation["v", i, tv] = int(x.rot_k), int(x.rot_v)
    return _Plan(shape, types, rotation, sides[0], sides[1])


def _look(a: Attention, index: int, plan: _Plan, library: Library, bias: Optional[Array]) -> Layer:
    """All that is computed of a layer."""
    shape = plan.shape.layers[index]

    def stored(side: str, name: str, rows: Array) -> Array:
        return maths.store(library, name, rows, plan.rotation.get((side, index, name), 0))

    def turned(side: str) -> int:
        return max([r for (s, i, _), r in plan.rotation.items() if (s, i) == (side, index)], default=0)

    rot_k, rot_v = turned("k"), turned("v")
    damage = maths.damage(a, plan.key_types, plan.value_types, stored)
    worst = damage.check
    if not worst["max"] <= worst["bound"] * 2.0**13:  # f16 arithmetic instead of f32, on some CPUs
        raise ResultError(
            f"attention of layer {a.il} as the model computed it differs by {worst['max']:.3g} from the one computed "
            f"here, {worst['bound']:.3g} is what rounding explains: the operation isn't understood"
        )
    norms = np.sqrt(np.square(a.k.astype(np.float32)).sum(axis=2))
    channel = np.sqrt(np.square(a.k.astype(np.float32)).mean(axis=1))
    n_bias: Optional[float] = None
    relative: Optional[float] = None
    if bias is not None:
        wide = shape.n_head_kv * shape.head_k
        if len(bias) > wide:  # queries, keys and values in one
            end = len(bias) - shape.n_head_kv * shape.head_v
            bias = bias[end - wide : end]
        n_bias = float(np.abs(bias).max())
        relative = maths.ratio(n_bias, float(np.median(channel)))
    return Layer(
        layer=index,
        il=a.il,
        swa=shape.swa,
        n_head=len(a.q),
        n_head_kv=len(a.k),
        head_k=a.k.shape[2],
        head_v=a.v.shape[2],
        rot_k=rot_k,
        rot_v=rot_v,
        damage=damage,
        keys=[maths.spread(x) for x in a.k],
        values=[maths.spread(x) for x in a.v],
        rotated_keys=[maths.spread(maths.rotate(x, rot_k)) for x in a.k] if rot_k else [],
        rotated_values=[maths.spread(maths.rotate(x, rot_v)) for x in a.v] if rot_v else [],
        constant_keys=[maths.constant_share(x) for x in a.k],
        first_key_norm=[maths.ratio(float(x[0]), float(np.median(x))) for x in norms],
        key_bias=n_bias,
        key_bias_rms=relative,
    )


@contextlib.contextmanager
def _prompt(o: Options) -> Iterator[Tuple[str, str, str]]:
    """Text, its name and its hash."""
    if o.prompt is not None:
        if o.text is not None:
            raise UsageError("--text: the prompt was given twice, by --prompt and by --text")
        if not o.prompt:
            raise UsageError("--prompt: it is empty")
        try:
            data = o.prompt.encode("utf-8")
        except UnicodeEncodeError:
            raise UsageError("--prompt: it is not UTF-8 text; give it as a file, by --text") from None
        yield o.prompt, "prompt", hashlib.sha256(data).hexdigest()
        return
    with quality.text_file(o.text) as text:
        yield text.path.read_bytes().decode("utf-8"), text.name, text.sha256  # line ends as they are


def _tokens(model: _Model, text: str, n: int) -> List[int]:
    """The first ``n`` tokens of a text, or all; a long text isn't tokenized to its end."""
    size = 16 * n
    while True:
        tokens = model.tokens(text[:size])
        # what was cut may have torn the last token
        if size >= len(text) or len(tokens) > n:
            return tokens[:n]
        size *= 4


def _slice(text: Optional[str], argument: str, n: int, what: str) -> Optional[List[int]]:
    """Indices of a slice as a SPEC writes it; several by a comma.

    Raises:
        UsageError: it isn't one, or lies outside.
    """
    if text is None:
        return None
    out: List[int] = []
    for part in text.split(","):
        try:
            s: Slice = _parse_slice(part.strip(), argument, text)
            out += [i for i in s.layers(n) if i not in out]
        except KVQuantError as e:
            raise UsageError(str(e)) from None
        except ValueError:
            raise UsageError(f"{argument}: {part.strip()!r} selects none of {what} 0 to {n - 1}") from None
    return out


def _check_options(o: Options) -> None:
    if not o.configs:
        raise UsageError("--config: names no configuration; write for example K8V4,K4V4")
    for name, value, least in (("--queries", o.queries, 1), ("--ctx", o.n_ctx or 2, 2)):
        if value < least:
            raise UsageError(f"{name}: {value} is too small, at least {least}")
    if not (math.isfinite(o.budget) and o.budget >= 0):
        raise UsageError(f"--budget: {o.budget} is no percentage of 0 or more")


def run(
    path: Path,
    options: Options = Options(),
    *,
    command: Sequence[str] = ("kvsplit", "inspect"),
    step: Callable[[str, float, float], None] = lambda what, i, n: None,
) -> Inspection:
    """Look inside the cache of one prompt, and write what was seen.

    Args:
        path: GGUF file.
        options: what to look at.
        command: for the record.
        step: told what is being done, and how many of how many layers are finished.

    Raises:
        UsageError: an option is wrong; KVQuantError, HeadSizeError: a policy doesn't fit the model.
        UnsupportedModelError: the model has no KV cache, or one that keys and values share.
        ModelFileError, ContextError, NativeError: model, context or library can't be used.
        ResultError: the model's attention isn't the one that is computed here.
        CacheFolderError: the folder can't be written.
    """
    _check_options(options)
    info = check_model(path)
    if not models.can_write(options.out):
        raise CacheFolderError(f"--out: the folder {options.out} can't be made or written")
    run_id = runs.new_id()
    step("loading the model", 0, 0)
    with _prompt(options) as (text, text_name, text_sha), _Model(path, options.n_threads) as model:
        shape = _shape_of(info, model)
        trained = shape.n_ctx_train or DEFAULT_CTX
        tokens = _tokens(model, text, min(options.n_ctx or DEFAULT_CTX, trained))
        if len(tokens) < 2:
            given = "--prompt" if options.prompt is not None else "--text"
            count = f"{len(tokens)} token{'s'[: len(tokens) != 1]}"
            raise UsageError(f"{given}: {text_name} has {count}, at least 2 are needed; give a longer one")
        for q in options.configs:  # refused here with the reason, in words of our own
            bench.check_config(shape, q, len(tokens))
        _slice(options.layers, "--layers", len(shape.layers), "the layers")
        step("making contexts", 0, 0)
        plan = _plan(model, shape, options.configs)
        if _drawn(options) and not plan.key_types:
            raise UsageError(
                "--maps: no configuration quantizes keys, so all maps are alike; add one, for example K4V8"
            )
        library = Library()
        by_il = {x.il: x.index for x in shape.layers}
        found: Dict[int, Layer] = {}
        n = len(shape.layers)

        def take(a: Attention) -> None:
            index = by_il[a.il]
            step(f"layer {index}", len(found), n)
            found[index] = _look(a, index, plan, library, capture.bias.get(a.il))

        positions = maths.sample_positions(len(tokens), options.queries)
        capture = _Capture(model, positions, len(tokens), set(by_il), take)
        with model.context(KVQuant(), len(tokens), capture, full=True) as ctx:
            capture.run(ctx, tokens, lambda: step("computing the prompt", 0, n))
        missing = [i for i in range(n) if i not in found]
        if missing:
            raise UnsupportedModelError(
                f"layers {missing} of {info.path.name} compute no flash attention on their cache, so they can't be seen"
            )
        res = Inspection(
            run_id=run_id,
            model=path.name,
            arch=shape.arch,
            text=text_name,
            text_sha256=text_sha,
            n_tokens=len(tokens),
            n_queries=len(positions),
            layers=[found[i] for i in range(n)],
            types={q.text: plan.types[q.text] for q in options.configs},
            configs=options.configs,
            command=" ".join(command),
        )
        worst = max(res.layers, key=lambda x: x.damage.check["max"] / (x.damage.check["bound"] or 1))
        res.check = {**worst.damage.check, "layer": worst.layer}
        res.cautions = cautions(res, shape)
        res.advice = [a for q in options.configs for a in advise(res, shape, q, options.budget)]
        maps = _maps(res, options, model, tokens, plan, library, step)
        prov = runs.provenance(model.lib, run_id, path, models.sha256_file(path), command,
                               system_info=model.lib.system_info())  # fmt: skip
    res.rows = _rows(res, prov)
    _write(res, options.out, maps)
    return res


def _rows(res: Inspection, prov: Any) -> List[Row]:
    rows: List[Row] = []
    for q in res.configs:
        for x, (tk, tv) in zip(res.layers, res.types[q.text]):
            d, k, v = x.damage, _plain(tk), _plain(tv)
            rows.append(
                Row(
                    kind="layer",
                    config=q.label,
                    kvq_key=q.key,
                    kvq_val=q.val,
                    type_k=tk,
                    type_v=tv,
                    provenance=prov,
                    test_time=runs.now(),
                    seq_len=res.n_tokens,
                    text=res.text,
                    text_sha256=res.text_sha256,
                    layer=x.layer,
                    k_nse=d.keys[k].nse,
                    v_nse=d.values[v].nse,
                    k_cos=d.keys[k].cosine,
                    v_cos=d.values[v].cosine,
                    logit_rmse=x.logit_rmse(tk),
                    output_nse=x.output_nse(tk, tv),
                    head_logit_rmse=[math.sqrt(e) for e in d.logits[k].each],
                    head_output_nse=d.output[k, v].each,
                )
            )
    return rows


# ---- advice


def advise(res: Inspection, shape: ModelShape, quant: KVQuant, budget: float) -> List[Advice]:
    """The layers of a policy to keep wider within a budget, if any: empty, or one entry.

    Sizes are of a cache as the tools allocate it. Errors count alike in every layer.

    Args:
        res: with every pair of types that may be needed.
        shape: of the model.
        quant: policy to improve.
        budget: percent of its bytes.
    """
    before = kv_memory(shape, quant, res.n_tokens)
    pairs = res.types[quant.text]

    def error(i: int, tk: str, tv: str) -> float:
        return res.layers[i].output_nse(tk, tv)

    def size(i: int, side: int, name: str) -> int:
        layer = before.layers[i]
        width = layer.n_head_kv * (layer.head_v if side else layer.head_k)
        return layer.n_cells * BY_NAME[name].row_bytes(width)

    allowed = int(before.total_bytes * budget / 100)
    after = maths.protect(pairs, error, size, allowed)
    if after == list(pairs):
        return []
    key = maths.spec_text([k for k, _ in after], quant.key_spec.default)
    val = maths.spec_text([v for _, v in after], quant.val_spec.default)
    wider = KVQuant(key, val)
    n = len(pairs)
    return [
        Advice(
            config=quant.label,
            key=key,
            val=val,
            layers_k=[i for i in range(n) if after[i][0] != pairs[i][0]],
            layers_v=[i for i in range(n) if after[i][1] != pairs[i][1]],
            bytes_before=before.total_bytes,
            bytes_after=kv_memory(shape, wider, res.n_tokens).total_bytes,
            error_before=float(np.mean([error(i, *p) for i, p in enumerate(pairs)])),
            error_after=float(np.mean([error(i, *p) for i, p in enumerate(after)])),
            n_ctx=before.n_ctx,
        )
    ]


# ---- cautions

#: A bias B on one channel makes the step of a block with 16 even levels B/8: at 8 times the RMS of the other channels
#: the step is as large as what they hold.
BIAS_RMS = 8.0

#: Nine tenths of a head's key energy are the same at every position: relative to what tells positions apart the error
#: is ten times as large, as if 1.7 bits were missing.
CONSTANT = 0.9

#: A logit that is off by 0.5 nats makes its weight 1.65 times too large or too small.
LOGIT_RMSE = 0.5

#: The first token has more weight than all others together.
FIRST_TOKEN = 0.5


def _names(layers: Sequence[int]) -> str:
    """``layer 3``, ``layers 0-2 and 7``."""
    parts: List[str] = []
    for i in layers:
        if parts and int(parts[-1].split("-")[-1]) == i - 1:
            parts[-1] = f"{parts[-1].split('-')[0]}-{i}"
        else:
            parts.append(str(i))
    text = parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
    return f"layer{'' if len(layers) == 1 else 's'} {text}"


def cautions(res: Inspection, shape: ModelShape) -> List[Caution]:
    """What a user should know before choosing widths, in words."""
    out: List[Caution] = []
    layers = res.layers
    biased = [x.layer for x in layers if (x.key_bias_rms or 0) > BIAS_RMS]
    if biased:
        top = max(layers, key=lambda x: x.key_bias_rms or 0)
        kept = ["q8_0" if x.layer in biased else "kvq4" for x in layers]
        out.append(
            Caution(
                "key_bias",
                f"the model adds a bias to its keys, up to {top.key_bias:.3g} in layer {top.layer}, "
                f"{top.key_bias_rms:.0f} times what an ordinary channel holds ({_names(biased)}): keys of 4 bits or "
                "fewer may lose everything else; keep keys at 8 bits, at least there: "
                f"--kvq-key 8 or {maths.spec_text(kept, 'kvq4')}",
                biased,
            )
        )
    constant = [x.layer for x in layers if max(x.constant_keys) > CONSTANT and x.layer not in biased]
    if constant:
        top = max(layers, key=lambda x: max(x.constant_keys))
        out.append(
            Caution(
                "constant_keys",
                f"more than nine tenths of a head's key energy is one vector, the same at every position, in "
                f"{_names(constant)} (up to {100 * max(top.constant_keys):.1f} % in layer {top.layer}): it takes up "
                "range and tells no positions apart, so keys need about two bits more there",
                constant,
            )
        )
    for name in res.key_types():
        lost = [x.layer for x in layers if x.logit_rmse(name) > LOGIT_RMSE]
        if lost:
            top = max(layers, key=lambda x: x.logit_rmse(name))
            out.append(
                Caution(
                    "logits",
                    f"keys as {name} move attention logits by {top.logit_rmse(name):.2f} nats in layer {top.layer}: "
                    f"weights are off by a factor of {math.exp(top.logit_rmse(name)):.1f} there; keep more bits in "
                    f"{_names(lost)}",
                    lost,
                )
            )
            break  # wider types lose fewer layers, and each of these would say the same again
    with_sinks = [x.layer for x in layers if x.damage.sink]
    if with_sinks:
        mass = max(float(np.mean(x.damage.sink)) for x in layers if x.damage.sink)
        out.append(
            Caution(
                "sinks",
                f"the model has attention sinks in {_names(with_sinks)}, which take up to {100 * mass:.0f} % of the "
                "attention: a constant error of the logits, harmless elsewhere, changes the share that tokens get. "
                "Such models have been hurt by 8-bit keys: compare K16V8 and K8V8 before choosing",
                with_sinks,
            )
        )
    first = [x.layer for x in layers if (x.first or 0) > FIRST_TOKEN]
    if first:
        top = max(layers, key=lambda x: x.first or 0)
        out.append(
            Caution(
                "first_token",
                f"the first token gets more attention than all others together in {_names(first)} "
                f"({100 * (top.first or 0):.0f} % in layer {top.layer}): an attention sink. It must stay in the cache "
                "when the context is shifted (--keep), and an error of its key moves every other weight",
                first,
            )
        )
    full = [x.layer for x in layers if not x.swa]
    if len(full) < len(layers):
        out.append(
            Caution(
                "window",
                f"only {len(full)} of {len(layers)} layers hold the whole context"
                f"{f' ({_names(full)})' if full else ''}, the others a window of {shape.n_swa} tokens: past it all "
                "that the model remembers is in those, so protect them first",
                full,
            )
        )
    for side, rot, size in (("keys", "rot_k", "head_k"), ("values", "rot_v", "head_v")):
        plain = [x.layer for x in layers if not getattr(x, rot) and (res.key_types() or res.value_types())]
        if plain and (res.key_types() if side == "keys" else res.value_types()):
            heads = sorted({getattr(layers[i], size) for i in plain})
            out.append(
                Caution(
                    "rotation",
                    f"{side} of {_names(plain)} are stored without rotation (head size {', '.join(map(str, heads))}; "
                    "multiples of 64 are rotated): outlier channels take the range of their blocks; use more bits",
                    plain,
                )
            )
        small = [x.layer for x in layers if 0 < getattr(x, rot) < getattr(x, size)]
        if small:
            x = layers[small[0]]
            out.append(
                Caution(
                    "rotation",
                    f"{side} of {_names(small)} are rotated in parts of {getattr(x, rot)} of the {getattr(x, size)} "
                    "values of a head: an outlier is spread over fewer values",
                    small,
                )
            )
    if len(layers) < shape.n_layer:
        out.append(
            Caution(
                "hybrid",
                f"{shape.n_layer - len(layers)} of {shape.n_layer} layers store no keys and values of their own "
                "(recurrent, or sharing another layer's): a SPEC counts the others only, and their memory doesn't "
                "shrink",
            )
        )
    return out


# ---- maps


@dataclass
class _Map:
    layer: int
    head: int
    type_k: str
    exact: maths.MapSum
    stored: maths.MapSum


def _drawn(o: Options) -> bool:
    """True if attention is to be drawn: choosing what to draw says so too."""
    return o.maps or o.layers is not None or o.heads is not None


def _maps(
    res: Inspection,
    o: Options,
    model: _Model,
    tokens: Sequence[int],
    plan: _Plan,
    library: Library,
    step: Callable[[str, float, float], None],
) -> List[_Map]:
    """Mean attention over blocks of positions, exact and with the keys of the fewest bits; a second run of the prompt.

    Every query is needed here; each batch is computed against the cells that it has, and dropped.
    """
    if not _drawn(o):
        return []
    name = res.key_types()[0]
    chosen = _slice(o.layers, "--layers", len(res.layers), "the layers")
    if chosen is None:
        order = res.damaged_by_keys(name)
        chosen = list(dict.fromkeys((order[0], order[len(order) // 2], order[-1])))
    which: Dict[int, List[_Map]] = {}
    n = len(tokens)
    for i in chosen:
        x = res.layers[i]
        heads = _slice(o.heads, "--heads", x.n_head, "the query heads")
        if heads is None:
            heads = [int(np.argmax(x.damage.output[name, "f16"].each))]
        which[x.il] = [_Map(i, h, name, maths.MapSum(n, MAP_BLOCKS), maths.MapSum(n, MAP_BLOCKS)) for h in heads]

    def take(a: Attention) -> None:
        attended = np.isfinite(a.mask)
        step("drawing attention", int(a.positions[0]), n)
        for m in which[a.il]:
            k = a.k[m.head // a.group].astype(np.float32)
            rows = maths.store(library, name, k, plan.rotation.get(("k", m.layer, name), 0))
            for into, keys in ((m.exact, k), (m.stored, rows)):
                for start in range(0, len(attended), 64):
                    part = slice(start, start + 64)
                    b = Attention(
                        a.il, a.q[:, part], a.k, a.v, a.mask[part], a.positions[part], a.output, a.scale, a.max_bias,
                        a.softcap, a.sinks,
                    )  # fmt: skip
                    into.add(b.positions, b.weights(m.head, b.logits(m.head, keys)), attended[part])

    capture = _Capture(model, np.arange(n), n, set(which), take, every=True)
    with model.context(KVQuant(), n, capture, full=True) as ctx:
        capture.run(ctx, tokens)
    return [m for ms in which.values() for m in ms]


# ---- files


def _write(res: Inspection, out: Path, maps: Sequence[_Map]) -> None:
    """JSONL, figures, JSON; nothing that is there is touched.

    Raises:
        CacheFolderError: the folder can't be written.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        _write_all(res, out, maps)
    except OSError as e:
        raise CacheFolderError(f"--out: {out} can't be written ({why(e)})") from None


def _write_all(res: Inspection, out: Path, maps: Sequence[_Map]) -> None:
    stem = f"inspect-{res.run_id}"
    with Journal(out / f"{stem}.jsonl") as journal:
        for row in res.rows:
            journal.write(row)
        res.files.append(journal.path)
    drawn = [("layers", draw_layers(res)), ("statistics", draw_statistics(res))]
    drawn += [(f"map-layer{m.layer}-head{m.head}", _draw_map(res, m)) for m in maps]
    for name, fig in drawn:
        for ext in ("png", "svg"):
            path = out / f"{stem}-{name}.{ext}"
            _save(fig, path)
            res.files.append(path)
    path = out / f"{stem}.json"
    res.files.append(path)
    plots._write(path, (json.dumps(res.to_json(), indent=1) + "\n").encode(), replace=False)


def _save(fig: Any, path: Path) -> None:
    import matplotlib

    # ids without chance and no date: the same numbers give the same file
    form = path.suffix.lstrip(".")
    out = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "kvsplit"}):
        fig.savefig(out, format=form, metadata={"Date": None} if form == "svg" else None)
    plots._write(path, out.getvalue(), replace=False)


def _figure(width: float, height: float) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    fig = Figure(figsize=(width, height), dpi=160, layout="constrained")
    FigureCanvasAgg(fig)
    return fig


def _clean(ax: Any) -> None:
    ax.grid(True, color="#e4e4e4", lw=0.7)
    ax.set_axisbelow(True)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)


def _layer_axis(ax: Any, res: Inspection) -> None:
    """Layers along x; those that hold the whole context are shaded where others don't."""
    from matplotlib.ticker import MaxNLocator

    n = len(res.layers)
    ax.set_xlim(-0.5, n - 0.5)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    if any(x.swa for x in res.layers):
        for x in res.layers:
            if not x.swa:
                ax.axvspan(x.layer - 0.5, x.layer + 0.5, color="#eeeeee", lw=0, zorder=0)


def _note(res: Inspection) -> str:
    shaded = "; shaded: layers that hold the whole context" if any(x.swa for x in res.layers) else ""
    return f"{res.text}, {res.n_tokens} tokens, {res.n_queries} queries{shaded}"


def draw_layers(res: Inspection) -> Any:
    """Output error of each layer, one line a configuration. Returns matplotlib's figure."""
    fig = _figure(8.6, 4.8)
    ax = fig.add_subplot()
    for q in res.configs:
        if q == KVQuant():
            continue  # no error, and no place on a logarithmic axis
        st = plots.style(q.label)
        ys = [y if y > 0 else math.nan for y in res.output_nse(q)]
        ax.plot(
            range(len(ys)), ys, marker=st.marker, color=st.color, ls=st.line, lw=1.4, ms=5, label=q.label,
            markeredgecolor="white", markeredgewidth=0.5,
        )  # fmt: skip
    ax.set_yscale("log")
    _layer_axis(ax, res)
    _clean(ax)
    ax.set_xlabel("layer, as a SPEC counts")
    ax.set_ylabel("error of the attention's output\n(squared, relative to f16)")
    fig.suptitle(f"Attention error by layer: {Path(res.model).stem}", fontsize=12, fontweight="bold", x=0.02, ha="left")
    ax.set_title(_note(res), fontsize=8.5, color="#444444", loc="left")
    handles, labels = ax.get_legend_handles_labels()
    # the order in which the lines lie, from the top
    means = {q.label: float(np.mean(res.output_nse(q))) for q in res.configs}
    order = sorted(range(len(labels)), key=lambda i: -means[labels[i]])
    if labels:
        ax.legend(
            [handles[i] for i in order], [labels[i] for i in order], loc="center left", bbox_to_anchor=(1.0, 0.5),
            frameon=False, fontsize=9,
        )  # fmt: skip
    return fig


def draw_statistics(res: Inspection) -> Any:
    """Range, tails and sinks of each layer, keys and values, before and after the rotation."""
    from matplotlib.ticker import FuncFormatter, NullLocator

    fig = _figure(8.6, 7.6)
    axes = fig.subplots(3, 1, sharex=True)
    keys, values = "#0072B2", "#D55E00"
    xs = range(len(res.layers))
    series = (
        ("keys", "keys", keys, "o", "-", True),
        ("rotated_keys", "keys, rotated", keys, "o", "--", False),
        ("values", "values", values, "D", "-", True),
        ("rotated_values", "values, rotated", values, "D", "--", False),
    )
    for ax, what, label in (
        (axes[0], "peak", "largest value over RMS\n(worst head)"),
        (axes[1], "kurtosis", "excess kurtosis\n(worst head)"),
    ):
        for name, text, color, marker, line, filled in series:
            ys = [max((getattr(s, what) for s in getattr(x, name)), default=math.nan) for x in res.layers]
            if not all(map(math.isnan, ys)):
                ax.plot(
                    xs, ys, marker=marker, color=color, ls=line, lw=1.3, ms=4.5, label=text,
                    markerfacecolor=color if filled else "white",
                )  # fmt: skip
        ax.set_ylabel(label)
    peaks = [y for line in axes[0].lines for y in line.get_ydata() if y > 0]
    ticks = [m * 10**e for e in range(-1, 4) for m in (1, 2, 3, 5, 7)]
    axes[0].set_yscale("log")
    axes[0].set_yticks([t for t in ticks if min(peaks) / 1.3 <= t <= max(peaks) * 1.3])
    axes[0].yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
    axes[0].yaxis.set_minor_locator(NullLocator())
    axes[1].set_yscale("symlog", linthresh=1)
    axes[1].yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
    axes[1].axhline(0, color="#777777", lw=0.8, ls=(0, (4, 3)))
    axes[1].annotate("normal\ndistribution", (1.01, 0), xycoords=("axes fraction", "data"), va="center", fontsize=8,
                     color="#555555", annotation_clip=False)  # fmt: skip
    axes[0].legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8.5)
    shares = (
        ("attention on the first token", [100 * x.first if x.first is not None else math.nan for x in res.layers],
         "#009E73", "s", "-"),
        ("keys that never change\n(share of energy, worst head)", [100 * max(x.constant_keys) for x in res.layers],
         "#CC79A7", "^", "-."),
    )  # fmt: skip
    for label, ys, color, marker, line in shares:
        axes[2].plot(xs, ys, marker=marker, color=color, ls=line, lw=1.3, ms=4.5, label=label)
    axes[2].set_ylim(0, 100)
    axes[2].set_ylabel("share (%)")
    axes[2].set_xlabel("layer, as a SPEC counts")
    axes[2].legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8.5)
    for ax in axes:
        _layer_axis(ax, res)
        _clean(ax)
    fig.align_ylabels(axes)
    fig.suptitle(f"What the cache holds: {Path(res.model).stem}", fontsize=12, fontweight="bold", x=0.02, ha="left")
    axes[0].set_title(_note(res), fontsize=8.5, color="#444444", loc="left")
    return fig


def _draw_map(res: Inspection, m: _Map) -> Any:
    """Attention of one head: exact, with quantized keys, and the difference."""
    import matplotlib
    from matplotlib.colors import LogNorm, SymLogNorm

    fig = _figure(11.4, 5.1)
    axes = fig.subplots(1, 3, sharex=True, sharey=True)
    exact, stored = m.exact.mean, m.stored.mean
    seen = np.concatenate([exact[exact > 0], stored[stored > 0]])
    top = float(seen.max())
    # four decades; what is below has no say in the output
    low = max(float(seen.min()), top / 1e4)
    n = int(m.exact.edges[-1])
    extent = (0, n, n, 0)
    weights = matplotlib.colormaps["cividis"].with_extremes(bad="#ffffff", under=matplotlib.colormaps["cividis"](0.0))
    norm = LogNorm(low, top if top > low else 10 * low)
    for ax, data, title in ((axes[0], exact, "f16"), (axes[1], stored, f"keys as {m.type_k}")):
        image = ax.imshow(data, cmap=weights, norm=norm, extent=extent, aspect="equal", interpolation="nearest")
        ax.set_title(title, fontsize=10, loc="left")
    bar = fig.colorbar(image, ax=list(axes[:2]), location="bottom", shrink=0.6, pad=0.03, extend="min")
    bar.set_label("attention weight, mean of a block")
    bar.outline.set_visible(False)
    d = stored - exact
    reach = float(np.nanmax(np.abs(d))) or low
    signed = matplotlib.colormaps["PuOr_r"].with_extremes(bad="#ffffff")
    image = axes[2].imshow(
        d, cmap=signed, norm=SymLogNorm(max(reach / 100, 1e-12), vmin=-reach, vmax=reach), extent=extent,
        aspect="equal", interpolation="nearest",
    )  # fmt: skip
    axes[2].set_title("difference", fontsize=10, loc="left")
    bar = fig.colorbar(image, ax=axes[2], location="bottom", pad=0.03)
    bar.set_label("weight too large (+) or too small (-)")
    bar.outline.set_visible(False)
    for ax in axes:
        ax.set_xlabel("attended position")
        for side in ax.spines.values():
            side.set_visible(False)
    axes[0].set_ylabel("query position")
    x = res.layers[m.layer]
    error = x.damage.output[m.type_k, "f16"].each[m.head]
    fig.suptitle(
        f"Attention of layer {m.layer}, head {m.head}: {Path(res.model).stem}  "
        f"(logits off by {math.sqrt(x.damage.logits[m.type_k].each[m.head]):.2f} nats, output error {error:.2g})",
        fontsize=11, fontweight="bold", x=0.02, ha="left",
    )  # fmt: skip
    return fig
