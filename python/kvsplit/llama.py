# SPDX-License-Identifier: MIT
"""llama-cpp-python's ``Llama`` with a KV cache whose keys and values have widths of their own.

Importing this module loads the native library.
"""

from __future__ import annotations

import contextlib
import ctypes
import operator
import os
import warnings
from dataclasses import asdict, dataclass
from typing import Any, Callable, Dict, List, Optional, Tuple, Union

import psutil

from kvsplit import models, native
from kvsplit.cache_types import BY_ID, BY_NAME, CACHE_TYPES
from kvsplit.errors import (
    CacheTypeError,
    CacheWarning,
    ContextError,
    ContextMemoryError,
    FlashAttentionError,
    KVQuantError,
    KVSplitError,
    ModelFileError,
    StateError,
    UnsupportedModelError,
    UsageError,
)
from kvsplit.gguf_meta import check_model
from kvsplit.memory import ModelShape, _shape, kv_memory
from kvsplit.policy import KVQuant, Spec, SpecLike

_NATIVE = native.load()  # before llama_cpp, which loads its library on import

import llama_cpp  # noqa: E402

TypeLike = Union[str, int]


@dataclass(frozen=True)
class KVCacheLayer:
    """One layer of a KV cache as it is allocated.

    Attributes:
        il: layer of the model.
        index: the same, as a SPEC's slice counts.
        swa: kept in the cache of sliding-window layers.
        n_cells: tokens that fit, over all streams.
        n_head_kv, head_k, head_v: shape of a token's row.
        type_k, type_v: names of the types; type_v is "" if there is no V tensor.
        bytes_k, bytes_v: sizes of the tensors.
        rot_k, rot_v: size of the Hadamard matrix that rows are rotated by; 0: stored as they are.
        fused: attention is one flash attention operation.
        backend_prefill, backend_decode: where the scheduler runs attention.
        backend_expect: the device that holds the layer.
    """

    il: int
    index: int
    swa: bool
    n_cells: int
    n_head_kv: int
    head_k: int
    head_v: int
    type_k: str
    type_v: str
    bytes_k: int
    bytes_v: int
    rot_k: int
    rot_v: int
    fused: bool
    backend_prefill: str
    backend_decode: str
    backend_expect: str

    @property
    def bytes(self) -> int:
        """Keys and values."""
        return self.bytes_k + self.bytes_v

    @property
    def bytes_f16(self) -> int:
        """What f16 would take for the same values."""
        return _f16_bytes(self.type_k, self.bytes_k) + _f16_bytes(self.type_v, self.bytes_v)


def _f16_bytes(name: str, n: int) -> int:
    if not name:
        return 0
    t = BY_NAME[name]
    return n // t.bytes * t.block * 2


@dataclass(frozen=True)
class KVCache:
    """What a context really allocated, read back from its tensors and graphs.

    Attributes:
        layers: in the order of the model.
        report: the lines that the command-line tools print at start.
    """

    layers: Tuple[KVCacheLayer, ...]
    report: str = ""

    @property
    def total_bytes(self) -> int:
        """Keys and values of all layers."""
        return sum(layer.bytes for layer in self.layers)

    @property
    def bytes_f16(self) -> int:
        """What f16 would take."""
        return sum(layer.bytes_f16 for layer in self.layers)

    @property
    def saving(self) -> float:
        """1 - bytes / bytes_f16; 0 for a model without a KV cache."""
        return 1.0 - self.total_bytes / self.bytes_f16 if self.layers else 0.0

    @property
    def types(self) -> List[Tuple[str, str]]:
        """Types of keys and values, layer by layer."""
        return [(layer.type_k, layer.type_v) for layer in self.layers]

    @property
    def type_k(self) -> str:
        """Types of the keys that occur, in order, joined by ``+``."""
        return "+".join(dict.fromkeys(layer.type_k for layer in self.layers))

    @property
    def type_v(self) -> str:
        """Types of the values that occur, in order, joined by ``+``."""
        return "+".join(dict.fromkeys(layer.type_v for layer in self.layers))

    def to_json(self) -> Dict[str, Any]:
        """For ``json.dumps``."""
        return {
            "bytes": self.total_bytes,
            "bytes_f16": self.bytes_f16,
            "saving": self.saving,
            "layers": [asdict(layer) for layer in self.layers],
        }

    def __repr__(self) -> str:
        if not self.layers:
            return "KVCache(no layer stores keys and values)"
        lines = [
            f"KVCache({self.total_bytes / 2**20:.2f} MiB in {len(self.layers)} layers, "
            f"{100 * self.saving:.1f} % less than f16)"
        ]
        groups: Dict[Tuple[Any, ...], List[KVCacheLayer]] = {}
        for layer in self.layers:
            key = (layer.type_k, layer.type_v, layer.n_cells, layer.swa, layer.rot_k, layer.rot_v)
            groups.setdefault(key, []).append(layer)
        for (k, v, cells, swa, rot_k, rot_v), members in groups.items():
            size = sum(m.bytes for m in members) / 2**20
            rot = f", rotated {rot_k}/{rot_v}" if rot_k or rot_v else ""
            where = sorted({m.backend_decode for m in members if m.backend_decode})
            lines.append(
                f"  K {k:<6} V {v or '-':<6} {len(members):>3} {'sliding ' if swa else ''}layers "
                f"({_ranges([m.index for m in members])}), {cells} cells, {size:.2f} MiB{rot}"
                f"{', on ' + '+'.join(where) if where else ''}"
            )
        return "\n".join(lines)


def _ranges(numbers: List[int]) -> str:
    """``0-3 5 7-9``"""
    parts: List[str] = []
    start = prev = numbers[0]
    for n in [*numbers[1:], -2]:
        if n == prev + 1:
            prev = n
            continue
        parts.append(str(start) if start == prev else f"{start}-{prev}")
        start = prev = n
    return " ".join(parts)


def _type_spec(value: Optional[TypeLike], argument: str) -> Optional[str]:
    """A ``type_k`` or ``type_v`` as SPEC text: a name, or an id of a cache type."""
    if value is None:
        return None
    if isinstance(value, str):
        return Spec.parse(value, argument).text()
    if not isinstance(value, bool) and isinstance(value, int) and value in BY_ID:
        return BY_ID[value].name
    allowed = ", ".join(f"{t.ggml_id} ({t.name})" for t in CACHE_TYPES)
    raise CacheTypeError(
        f"{argument}: {value!r} is no cache type; allowed are {allowed}, or a name",
        argument=argument,
        given=value,
    )


def _side(kvq: Optional[KVQuant], side: str, spec: Optional[SpecLike], plain: Optional[TypeLike]) -> Optional[str]:
    """SPEC of one side from all the ways to say it; None if nothing was said."""
    name, old = f"kvq_{side}", f"type_{side[0]}"
    if plain is not None and (kvq is not None or spec is not None):
        said = name if spec is not None else "kvq"
        raise KVQuantError(
            f"{said} and {old}: both say how the {'keys' if side == 'key' else 'values'} are stored; give one",
            argument=old,
            given=plain,
        )
    if spec is not None:
        return Spec.parse(spec, name).text()
    if plain is not None:
        return _type_spec(plain, old)
    if kvq is not None:
        return kvq.key if side == "key" else kvq.val
    return None


#: The library takes sizes as 32-bit numbers and would wrap larger ones without a word.
_INT_MAX = 2**31 - 1


def _check_arguments(model_path: Any, flash_attn: Any, sizes: Dict[str, Any]) -> None:
    """Refuse what the bindings would take and misunderstand."""
    if not isinstance(model_path, (str, os.PathLike)) or not os.fspath(model_path):
        raise UsageError(
            f"model_path: {model_path!r} names no file; give the path of a GGUF file or one of: "
            f"{', '.join(models.REGISTRY)}"
        )
    for name, least in (("n_ctx", 0), ("n_batch", 1), ("n_ubatch", 1)):
        if name not in sizes:
            continue
        value = sizes[name]
        try:
            number = operator.index(value) if not isinstance(value, bool) else -1
        except TypeError:
            number = -1
        if not least <= number <= _INT_MAX:
            from_model = "; 0 takes what the model is made for" if name == "n_ctx" else ""
            raise UsageError(f"{name}: {value!r} is no whole number from {least} to {_INT_MAX}{from_model}")
    if flash_attn is not None and not isinstance(flash_attn, bool):
        raise UsageError(f"flash_attn: {flash_attn!r} is neither True nor False; leave it out to have it where needed")


_WARNING = "kvq: warning: "  # as a context's description has it


class Llama(llama_cpp.Llama):
    """llama-cpp-python's ``Llama``; only what the KV cache is made of is new.

    Args:
        model_path: GGUF file, or name of a pulled model (``smollm2``).
        kvq: PRESET such as ``"k8v4"`` or ``8``, or a :class:`kvsplit.KVQuant`.
        kvq_key: SPEC of the keys, such as ``8`` or ``"4,:2=8"``; wins over ``kvq``.
        kvq_val: SPEC of the values; wins over ``kvq``.
        type_k: type of the keys by name, or by id as in llama-cpp-python.
        type_v: type of the values.
        flash_attn: None turns it on where quantized values need it, and leaves llama-cpp-python's default
            (off) otherwise.
        **kwargs: as ``llama_cpp.Llama``. Note that ``swa_full`` is on by default there, off in the tools.

    What isn't said comes from the model's own ``kvq.key`` and ``kvq.val`` metadata, else f16.

    Warns:
        CacheWarning: attention for a pair runs on another device than its layer, or the model is known to suffer from
            the keys that were chosen; the message names what to use instead.

    Raises:
        UsageError: model_path, n_ctx, n_batch, n_ubatch or flash_attn has a wrong type or is out of range
            (a ValueError, as all of these).
        KVQuantError: kvq, kvq_key, kvq_val, type_k or type_v can't be understood (a ValueError).
        FlashAttentionError: quantized values with ``flash_attn=False``.
        HeadSizeError: the blocks of a type don't divide the model's head size.
        MLAError: an MLA model with unequal types.
        ModelFileError: the file is missing, truncated or not a GGUF.
        ContextMemoryError: the context doesn't fit into memory.
        ContextError: the native library refused for another reason, which the message carries.
    """

    def __init__(
        self,
        model_path: Union[str, "os.PathLike[str]"],
        *,
        kvq: Union[SpecLike, KVQuant, None] = None,
        kvq_key: Optional[SpecLike] = None,
        kvq_val: Optional[SpecLike] = None,
        type_k: Optional[TypeLike] = None,
        type_v: Optional[TypeLike] = None,
        flash_attn: Optional[bool] = None,
        **kwargs: Any,
    ) -> None:
        self._stack = contextlib.ExitStack()  # what close() needs, also when this is refused
        _check_arguments(model_path, flash_attn, kwargs)
        preset = KVQuant.parse(kvq) if kvq is not None else None
        self._kvq_key = _side(preset, "key", kvq_key, type_k)
        self._kvq_val = _side(preset, "val", kvq_val, type_v)

        path = models.resolve(model_path)
        try:
            str(path).encode("utf-8")
        except UnicodeEncodeError:
            raise ModelFileError(
                f"model_path: the name {str(path)!r} can't be handed on in this locale; "
                "set PYTHONUTF8=1, or rename the file"
            ) from None
        info = check_model(path)
        n_ctx = int(kwargs.get("n_ctx", 512))
        shape: Optional[ModelShape] = None
        kv_bytes: Optional[int] = None
        quant = KVQuant(
            self._kvq_key or info.fields.get("kvq.key") or "f16",
            self._kvq_val or info.fields.get("kvq.val") or "f16",
        )
        try:
            shape = _shape(info)
        except UnsupportedModelError:
            pass  # the native library knows it, and checks the same things
        if quant.quantized_val and flash_attn is not None and not flash_attn:
            raise FlashAttentionError(
                f"flash_attn: False can't serve quantized values ({quant.val}); "
                "leave flash_attn out, or use f16, bf16 or f32 for kvq_val"
            )
        if shape is not None and not kwargs.get("vocab_only"):
            n_batch = min(n_ctx, int(kwargs.get("n_batch", 512))) or int(kwargs.get("n_batch", 512))

            def size(q: KVQuant) -> int:
                return kv_memory(
                    shape,
                    q,
                    n_ctx,
                    swa_full=kwargs.get("swa_full") is not False,
                    n_batch=n_batch,
                    n_ubatch=int(kwargs.get("n_ubatch", 512)),
                    flash_attn=bool(flash_attn) or q.quantized_val,
                ).total_bytes

            kv_bytes = size(quant)
            _check_memory(quant, n_ctx, kv_bytes, size)
        if flash_attn is None:
            flash_attn = quant.quantized_val

        lib = native.load()
        if self._kvq_key is not None:
            kwargs["type_k"] = lib.handle(self._kvq_key, "kvq_key")
        if self._kvq_val is not None:
            kwargs["type_v"] = lib.handle(self._kvq_val, "kvq_val")
        try:
            super().__init__(str(path), flash_attn=flash_attn, **kwargs)
        except ValueError as e:
            why = lib.last_error()
            self.close()
            text = str(e)
            if "llama_context" in text:
                raise _context_error(quant, n_ctx, kv_bytes, why) from e
            if "load model" in text:
                raise ModelFileError(
                    f"model {path} could not be loaded{': ' + why if why else ''}; verbose=True shows the reason"
                ) from e
            raise
        if ctx := getattr(getattr(self, "_ctx", None), "ctx", None):
            for line in lib.describe(ctx).splitlines():
                if line.startswith(_WARNING):
                    warnings.warn(line[len(_WARNING) :], CacheWarning, stacklevel=2)

    @property
    def kv_cache(self) -> KVCache:
        """The KV cache as it is allocated. Read anew at each access.

        Raises:
            KVSplitError: the model was closed.
        """
        ctx = getattr(getattr(self, "_ctx", None), "ctx", None)
        if not ctx:
            raise KVSplitError("kv_cache: the model is closed")
        lib = native.load()
        layers = tuple(_read(lib, layer) for layer in lib.layers(ctx))
        return KVCache(layers, lib.describe(ctx))

    def load_state(self, state: llama_cpp.LlamaState) -> None:
        """Go on from a state that :meth:`save_state` gave.

        Raises:
            StateError: the state is of another context length, of other cache types or another rotation, or damaged;
                the message says which (a RuntimeError, as llama-cpp-python's). Where the state's numbers don't fit,
                nothing was changed; where its rows don't, this object is empty, as after ``reset()``.
        """
        n_tokens, scores = state.n_tokens, state.scores
        if (
            not 0 <= n_tokens <= self.n_ctx()
            or state.input_ids.shape != self.input_ids.shape
            or scores.shape != self.scores[:n_tokens].shape
            or not 0 < len(state.llama_state) == state.llama_state_size
        ):
            raise StateError(
                f"state: {n_tokens} tokens, scores of {scores.shape} and room for {state.input_ids.shape} tokens "
                f"don't fit this object with n_ctx={self.n_ctx()}, logits_all={self._logits_all} and a vocabulary of "
                f"{self.n_vocab()}; make it as the one that the state was saved from"
            )
        requires_eval = self._requires_eval
        try:
            super().load_state(state)
        except RuntimeError as e:
            data = (ctypes.c_uint8 * len(state.llama_state)).from_buffer_copy(state.llama_state)
            n = llama_cpp.llama_state_set_data(self._ctx.ctx, data, len(data))  # once more, for the reason
            why = f"it has {len(data) - n} bytes behind its end" if n else native.load().last_logged()
            this: Any = self
            this.reset()
            this._ctx.kv_cache_clear()
            self._requires_eval = requires_eval
            raise StateError(f"state: {why}") from e

    def __getstate__(self) -> Dict[str, Any]:
        # handles are numbers of this process, so a copy gets the texts
        parent: Any = super()
        state: Dict[str, Any] = parent.__getstate__()
        for old in ("type_k", "type_v"):
            state.pop(old, None)
        return {**state, "kvq_key": self._kvq_key, "kvq_val": self._kvq_val}


def _read(lib: native.Native, layer: native.KvqLayer) -> KVCacheLayer:
    def text(b: Optional[bytes]) -> str:
        return b.decode("utf-8", "replace") if b else ""

    type_v = lib.type_name(layer.type_v)
    return KVCacheLayer(
        il=layer.il,
        index=layer.index,
        swa=bool(layer.swa),
        n_cells=layer.n_cells,
        n_head_kv=layer.n_head_kv,
        head_k=layer.head_k,
        head_v=layer.head_v,
        type_k=lib.type_name(layer.type_k),
        type_v="" if type_v == native.TYPE_COUNT_SENTINEL else type_v,
        bytes_k=layer.bytes_k,
        bytes_v=layer.bytes_v,
        rot_k=layer.rot_k,
        rot_v=layer.rot_v,
        fused=bool(layer.fused),
        backend_prefill=text(layer.backend_prefill),
        backend_decode=text(layer.backend_decode),
        backend_expect=text(layer.backend_expect),
    )


def _check_memory(quant: KVQuant, n_ctx: int, kv_bytes: int, size: Callable[[KVQuant], int]) -> None:
    """Refuse what this machine can't hold, before the library fills its memory with the bookkeeping of cells.

    Only where there is no device but the CPU: the memory of others isn't known here.
    """
    if any(not d.startswith("CPU") for d in native.load().devices()):
        return
    there = psutil.virtual_memory().total + psutil.swap_memory().total
    if kv_bytes <= there:
        return
    smallest = KVQuant.parse("k4v4")
    try:
        least = size(smallest)
    except KVSplitError:  # its blocks don't divide the heads
        least = kv_bytes
    way = "use a smaller n_ctx"
    if least < kv_bytes:
        fits = "" if least <= there else ", which is too much as well"
        way += f" or a smaller width: kvq='k4v4' takes {least / 2**20:.2f} MiB{fits}"
    raise ContextMemoryError(
        f"n_ctx: the KV cache of {n_ctx} tokens under {quant.text} takes {kv_bytes / 2**20:.2f} MiB, "
        f"this machine has {there / 2**20:.2f} MiB; {way}",
        kv_bytes=kv_bytes,
    )


def _context_error(quant: KVQuant, n_ctx: int, kv_bytes: Optional[int], why: str) -> ContextError:
    size = f", KV cache {kv_bytes / 2**20:.2f} MiB" if kv_bytes else ""
    head = f"no context could be made (n_ctx {n_ctx or 'from the model'}, {quant.text}{size})"
    low = why.lower()
    if "memory" in low or "alloc" in low:
        if "narrower" not in low:
            why = f"{why}; a smaller n_ctx or a smaller width such as kvq='k4v4' needs less"
        return ContextMemoryError(f"{head}: {why}", kv_bytes=kv_bytes)
    return ContextError(f"{head}: {why or 'the native library gave no reason; verbose=True shows its log'}")
