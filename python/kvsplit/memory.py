# SPDX-License-Identifier: MIT
"""How many bytes a KV cache takes, from a model's metadata alone.

bytes = sum over layers of cells x KV heads x head size x block bytes / block size, keys and values apart,
each layer with its own cells. The rules are those of the pinned llama.cpp, so the sum equals what it
allocates. They are taken from: ``llama_model_base::load_hparams`` and each architecture's
``load_arch_hparams`` (shapes, which layers slide), ``llama_model::create_memory`` (which layers are
cached), ``llama_kv_cache_iswa`` (cells of sliding layers), ``llama_context`` (padding). An architecture
whose rules aren't here is refused with the reason.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import Any, Dict, List, Optional, Tuple, Union

from kvsplit.cache_types import BY_NAME
from kvsplit.errors import (
    HeadSizeError,
    KVQuantError,
    MLAError,
    ModelFileError,
    UnsupportedModelError,
    UsageError,
    printable,
    shown,
)
from kvsplit.gguf_meta import GGUFInfo, read_gguf
from kvsplit.policy import KVQuant, Spec

MAX_LAYERS = 512  # LLAMA_MAX_LAYERS: no file with more is loaded
PAD = 256  # the context, and the cache of sliding layers, are padded to this many cells

# Architectures whose loader sets nothing that the cache depends on beyond the common keys.
_PLAIN = frozenset(
    """
    llama llama-embed mistral3 deci falcon grok gpt2 gptj gptneox mpt baichuan starcoder starcoder2 refact
    bloom stablelm qwen qwen2 qwen2moe qwen2vl qwen3 qwen3moe qwen3vl qwen3vlmoe phi2 phi3 phimoe plamo
    codeshell orion internlm2 minicpm minicpm3 gemma xverse command-r dbrx olmo olmoe openelm arctic deepseek
    deepseek2-ocr chatglm glm4 glm4moe bitnet jais jais2 nemotron exaone granite granitemoe chameleon plm
    bailingmoe bailingmoe2 dots1 arcee ernie4_5 ernie4_5-moe paddleocr hunyuan-moe hunyuan-dense hunyuan_vl
    hy_v3 smollm3 seed_oss grovemoe apertus minimax-m2 cogvlm pangu-embedded maincoder talkie
    """.split()
)

# No cache at all: encoders and diffusion models.
_NO_CACHE = frozenset(
    """
    bert jina-bert-v2 jina-bert-v3 nomic-bert nomic-bert-moe neo-bert eurobert wavtokenizer-dec modern-bert
    gemma-embedding dream llada llada-moe rnd1
    """.split()
)
_RECURRENT = frozenset("mamba mamba2 rwkv6 rwkv6qwen2 rwkv7 arwkv7".split())


@dataclass(frozen=True)
class _Sliding:
    """Which layers of an architecture slide.

    Attributes:
        pattern: period of the default pattern; None: the file must list the layers.
        dense_first: the first layer of a period is the full one, not the last.
        default: window if the file names none; None: the file must name one.
        optional: no window in the file means that no layer slides.
        fixed: window whatever the file says.
    """

    pattern: Optional[int]
    dense_first: bool = False
    default: Optional[int] = None
    optional: bool = False
    fixed: Optional[int] = None


_SLIDING: Dict[str, _Sliding] = {
    "afmoe": _Sliding(4, optional=True),
    "cohere2": _Sliding(4),
    "cohere2moe": _Sliding(4, dense_first=True),
    "exaone-moe": _Sliding(4),
    "exaone4": _Sliding(4, default=4096),  # only with 64 layers, see _windows
    "gemma2": _Sliding(2, default=4096),
    "gemma3": _Sliding(6, optional=True),
    "gemma3n": _Sliding(5),
    "gemma4": _Sliding(None),
    "granite_swa": _Sliding(None),
    "laguna": _Sliding(4, dense_first=True, optional=True),
    "llama4": _Sliding(4, fixed=8192),  # a window of 0 in the file turns it off
    "maple": _Sliding(None),
    "mellum": _Sliding(4, optional=True),
    "mimo2": _Sliding(None),
    "muse-glimmer": _Sliding(4),
    "olmo2": _Sliding(4, optional=True),
    "gpt-oss": _Sliding(2),
    "plamo3": _Sliding(8, optional=True),
    "smallthinker": _Sliding(4, dense_first=True, optional=True, fixed=4096),
    "spark2_5": _Sliding(None),
    "step35": _Sliding(None),
}

# Attention layers beside recurrent ones: recurrent where a layer has no KV heads.
_HYBRID_BY_HEADS = frozenset("jamba plamo2 granitehybrid lfm2 lfm2moe kimi-linear".split())
# The same, where the file lists them or every n-th layer is an attention layer.
_HYBRID_BY_INTERVAL: Dict[str, int] = {"qwen3next": 4, "qwen35": 4, "qwen35moe": 4, "minimax-01": 8}
_NEMOTRON_H = frozenset(("nemotron_h", "nemotron_h_moe"))
_MLA = frozenset(("deepseek2", "mistral4", "kimi-linear"))


@dataclass(frozen=True)
class LayerShape:
    """One layer that stores keys and values.

    Attributes:
        il: layer of the model.
        index: the same as a SPEC's slice counts.
        n_head_kv: KV heads.
        head_k: values per head of a key.
        head_v: values per head of a value; 0 if none are stored (MLA).
        swa: True if the layer attends a sliding window.
    """

    il: int
    index: int
    n_head_kv: int
    head_k: int
    head_v: int
    swa: bool = False


@dataclass(frozen=True)
class ModelShape:
    """What the size of a model's KV cache depends on.

    Attributes:
        arch: architecture.
        name: of the model; "" if unknown.
        n_ctx_train: tokens it was trained for; 0 if unknown.
        n_layer: layers of the model, cached or not.
        layers: those that store keys and values.
        n_swa: window of the sliding layers, in tokens.
        causal: attention is causal, which bounds the batch by the context.
        v_width_max: widest row of values; without flash attention every layer's is padded to it.
        kvq_key, kvq_val: the policy that the file carries; None if it carries none.
    """

    arch: str
    n_layer: int
    layers: Tuple[LayerShape, ...]
    name: str = ""
    n_ctx_train: int = 0
    n_swa: int = 0
    causal: bool = True
    v_width_max: int = 0
    kvq_key: Optional[str] = None
    kvq_val: Optional[str] = None

    @property
    def mla(self) -> bool:
        """True if values are read from the keys' tensor."""
        return any(layer.head_v == 0 for layer in self.layers)

    @property
    def policy(self) -> KVQuant:
        """The file's own policy, f16 where it carries none.

        Raises:
            KVQuantError: it is malformed; names the key.
        """
        specs = {}
        for name, spec in (("kvq.key", self.kvq_key), ("kvq.val", self.kvq_val)):
            specs[name] = Spec.parse("f16" if spec is None else spec, f"metadata {name}").text()
        return KVQuant(specs["kvq.key"], specs["kvq.val"])

    @classmethod
    def uniform(
        cls, n_layer: int, n_head_kv: int, head_k: int, head_v: Optional[int] = None, *, name: str = ""
    ) -> ModelShape:
        """A model whose layers are all alike and attend everything."""
        v = head_k if head_v is None else head_v
        layers = tuple(LayerShape(i, i, n_head_kv, head_k, v) for i in range(n_layer))
        return cls("llama", n_layer, layers, name=name, v_width_max=n_head_kv * v)

    @classmethod
    def from_gguf(cls, path: Union[str, "os.PathLike[str]"]) -> ModelShape:
        """Read it from a GGUF's metadata; no tensor data is read.

        Raises:
            ModelFileError: no such file, not a GGUF, or cut off within its header.
            UnsupportedModelError: the rules for this architecture aren't known here.
            KVQuantError: the policy that the file carries is malformed; names the key.
        """
        return _shape(read_gguf(path))


def _refuse(info: GGUFInfo, why: str) -> UnsupportedModelError:
    arch = printable(info.arch[:80]) or "no architecture"
    return UnsupportedModelError(f"the KV cache of {info.path.name} ({arch}) {why}")


def _whole(info: GGUFInfo, key: str, value: Any, most: int = 2**31 - 1) -> int:
    """A value that must be a whole number from 0, as all sizes of a model are.

    Raises:
        ModelFileError: it is something else; names the key.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        raise ModelFileError(
            f"model {info.path} is damaged: {info.arch}.{key} is {shown(value)}, not a whole number from 0 to {most}"
        )
    return value


def _int(info: GGUFInfo, key: str, default: Optional[int] = None, most: int = 2**31 - 1) -> int:
    """A key that is a whole number; without a default it must be there."""
    value = info.get(key)
    if value is None and f"{info.arch}.{key}" not in info.array_lengths:
        if default is None:
            raise _refuse(info, f"can't be computed: the file lacks {info.arch}.{key}")
        return default
    return _whole(info, key, value, most)


def _policy(info: GGUFInfo, key: str) -> Optional[str]:
    """The policy of one side that the file carries, as text; None if it carries none."""
    value = info.fields.get(key)
    if key not in info.fields:
        return None
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)  # a number of bits, as the library takes it
    if isinstance(value, str):
        return value
    what = "an array" if key in info.array_lengths else "a text of many MB" if value is None else shown(value)
    raise KVQuantError(f"metadata {key}: {what} is neither text nor whole number", argument=key, given=value)


def _per_layer(info: GGUFInfo, key: str, n: int, default: Optional[List[int]] = None) -> List[int]:
    """A key that is one number or one number a layer."""
    value = info.get(key)
    length = info.array_lengths.get(f"{info.arch}.{key}")
    if length is not None and length != n:
        raise _refuse(info, f"can't be computed: {key} has {length} entries for {n} layers")
    if value is None:
        if default is None:
            raise _refuse(info, f"can't be computed: the file lacks {info.arch}.{key}")
        return default
    if isinstance(value, list):
        return [int(v) if isinstance(v, bool) else _whole(info, key, v) for v in value]
    return [_whole(info, key, value)] * n


def _periodic(n_layer: int, n_all: int, period: int, dense_first: bool) -> List[bool]:
    def slides(i: int) -> bool:
        if period == 0:
            return True
        return i % period != 0 if dense_first else i % period < period - 1

    return [i < n_layer and slides(i) for i in range(n_all)]


def _windows(info: GGUFInfo, n_layer: int, n_all: int) -> Tuple[int, List[bool]]:
    """The window, and which layers slide; (0, none) if none do."""
    none = (0, [False] * n_all)
    arch = info.arch
    told = _int(info, "attention.sliding_window", -1)
    window = None if told < 0 else told
    if arch == "lfm2":
        if not window:
            return none
        heads = _per_layer(info, "attention.head_count_kv", n_all)
        return int(window), [i < n_layer and heads[i] != 0 for i in range(n_all)]
    rule = _SLIDING.get(arch)
    if rule is None:
        return none
    if arch == "exaone4" and n_layer != 64:
        return none
    if arch == "llama4" and window == 0:
        return none
    if rule.optional and not window:
        return none
    if rule.fixed is not None:
        window = rule.fixed
    elif window is None:
        if rule.default is None:
            raise _refuse(info, f"can't be computed: the file lacks {arch}.attention.sliding_window")
        window = rule.default

    pattern = info.get("attention.sliding_window_pattern")
    if isinstance(pattern, list):
        return int(window), [i < len(pattern) and bool(pattern[i]) for i in range(n_all)]
    if rule.pattern is None:
        raise _refuse(info, f"can't be computed: the file doesn't list {arch}.attention.sliding_window_pattern")
    period = rule.pattern if pattern is None else _whole(info, "attention.sliding_window_pattern", pattern)
    return int(window), _periodic(n_layer, n_all, period, rule.dense_first)


def _cached_layers(info: GGUFInfo, n_layer: int, n_all: int, n_nextn: int, heads_kv: List[int]) -> List[int]:
    """Layers of the model that the attention cache of a plain context holds."""
    arch = info.arch
    if arch == "falcon-h1":
        return list(range(n_all))
    if arch in _NEMOTRON_H:
        n_ff = _per_layer(info, "feed_forward_length", n_all, [0] * n_all)
        recurrent = [i < n_layer and heads_kv[i] == 0 and n_ff[i] == 0 for i in range(n_all)]
        return [i for i in range(n_all) if not recurrent[i] and n_ff[i] == 0]
    if arch in _HYBRID_BY_INTERVAL:
        listed = info.get("attention.recurrent_layers")
        if listed is not None:
            recurrent = [bool(v) for v in _per_layer(info, "attention.recurrent_layers", n_all)]
        else:
            every = _int(info, "full_attention_interval", _HYBRID_BY_INTERVAL[arch])
            if every == 0:
                raise ModelFileError(f"model {info.path} is damaged: {arch}.full_attention_interval is 0")
            recurrent = [(i + 1) % every != 0 for i in range(n_all)]
        return [i for i in range(n_layer) if not recurrent[i]]
    if arch in _HYBRID_BY_HEADS:
        return [i for i in range(n_all) if i >= n_layer or heads_kv[i] != 0]

    n_kv = n_all
    if arch == "gemma3n":
        n_kv = 20
    elif arch == "gemma4":
        n_kv = n_all - _int(info, "attention.shared_kv_layers", 0)
    trunk = n_layer if n_nextn > 0 and n_layer > 0 else n_all
    return [i for i in range(n_all) if i < n_kv and i < trunk]


def _shape(info: GGUFInfo) -> ModelShape:
    arch = info.arch
    if not arch:
        raise _refuse(info, "can't be computed: the file names no architecture")
    if arch in _NO_CACHE:
        raise _refuse(info, "does not exist: this architecture keeps none")
    if arch in _RECURRENT:
        raise _refuse(info, "does not exist: every layer is recurrent, its state has a fixed size in f32")
    hybrid = arch in _HYBRID_BY_HEADS or arch in _HYBRID_BY_INTERVAL or arch in _NEMOTRON_H or arch == "falcon-h1"
    if not (arch in _PLAIN or arch in _SLIDING or arch in _MLA or hybrid):
        raise _refuse(
            info,
            "can't be computed from its metadata: this architecture has allocation rules of its own; "
            "load it and read the sizes back (kvsplit.Llama(...).kv_cache)",
        )

    n_all = _int(info, "block_count", most=MAX_LAYERS)
    n_nextn = _int(info, "nextn_predict_layers", 0, n_all)
    n_layer = n_all - n_nextn
    n_embd = _int(info, "embedding_length")
    if n_all == 0:
        raise _refuse(info, "does not exist: the file has no layer")
    heads = _per_layer(info, "attention.head_count", n_all, [0] * n_all)
    heads_kv = _per_layer(info, "attention.head_count_kv", n_all, heads)

    if heads[0] > 0:
        default = n_embd // heads[0]
        head_k = _int(info, "attention.key_length", default)
        head_v = _int(info, "attention.value_length", default)
    else:
        head_k = head_v = 0
    head_k_swa = _int(info, "attention.key_length_swa", head_k)
    head_v_swa = _int(info, "attention.value_length_swa", head_v)

    n_swa, slides = _windows(info, n_layer, n_all)
    mla = arch in _MLA and bool(info.get("attention.key_length_mla")) and bool(info.get("attention.value_length_mla"))

    layers: List[LayerShape] = []
    for il in _cached_layers(info, n_layer, n_all, n_nextn, heads_kv):
        k = head_k_swa if slides[il] else head_k
        v = head_v_swa if slides[il] else head_v
        if heads_kv[il] * k == 0:
            continue  # a layer without attention: an empty tensor, and no slice counts it
        layers.append(LayerShape(il, len(layers), heads_kv[il], k, 0 if mla else v, slides[il]))
    if not layers:
        raise _refuse(info, "does not exist: no layer stores keys and values")
    widths = [h * (head_v_swa if s else head_v) for h, s in zip(heads_kv, slides)]
    return ModelShape(
        arch=arch,
        name=printable(str(info.fields.get("general.name") or "")),
        n_ctx_train=_int(info, "context_length", 0),
        n_layer=n_layer,
        layers=tuple(layers),
        n_swa=n_swa,
        causal=bool(info.get("attention.causal", True)),
        v_width_max=max(widths),
        kvq_key=_policy(info, "kvq.key"),
        kvq_val=_policy(info, "kvq.val"),
    )


@dataclass(frozen=True)
class LayerMemory:
    """One layer's part of a KV cache.

    Attributes:
        il, index, swa, n_head_kv, head_k, head_v: as :class:`LayerShape`.
        n_cells: tokens that fit, over all streams.
        type_k, type_v: names of the types; type_v is "" if no values are stored.
        bytes_k, bytes_v: sizes of the tensors.
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

    @property
    def bytes(self) -> int:
        """Keys and values."""
        return self.bytes_k + self.bytes_v


@dataclass(frozen=True)
class KVMemory:
    """A whole KV cache.

    Attributes:
        quant: the policy.
        n_ctx: tokens over all sequences, as padded.
        n_ctx_seq: tokens of one sequence.
        n_seq_max: sequences.
        unified: sequences share one buffer.
        swa_full: sliding layers keep the whole context.
        layers: in the order of the model.
        bytes_f16: what f16 keys and values would take.
    """

    quant: KVQuant
    n_ctx: int
    n_ctx_seq: int
    n_seq_max: int
    unified: bool
    swa_full: bool
    layers: Tuple[LayerMemory, ...]
    bytes_f16: int

    @property
    def bytes_k(self) -> int:
        """All keys."""
        return sum(layer.bytes_k for layer in self.layers)

    @property
    def bytes_v(self) -> int:
        """All values."""
        return sum(layer.bytes_v for layer in self.layers)

    @property
    def total_bytes(self) -> int:
        """Keys and values."""
        return self.bytes_k + self.bytes_v

    @property
    def mib(self) -> float:
        """Keys and values in MiB."""
        return self.total_bytes / 2**20

    @property
    def saving(self) -> float:
        """1 - bytes / bytes_f16."""
        return 1.0 - self.total_bytes / self.bytes_f16

    @property
    def bits_per_value(self) -> float:
        """Bits stored per value, over the whole cache."""
        n = sum(layer.n_cells * layer.n_head_kv * (layer.head_k + layer.head_v) for layer in self.layers)
        return 8.0 * self.total_bytes / n

    def to_json(self) -> Dict[str, Any]:
        """For ``json.dumps``."""
        return {
            "label": self.quant.label,
            "kvq_key": self.quant.key,
            "kvq_val": self.quant.val,
            "n_ctx": self.n_ctx,
            "n_ctx_seq": self.n_ctx_seq,
            "n_seq_max": self.n_seq_max,
            "kv_unified": self.unified,
            "swa_full": self.swa_full,
            "bytes_k": self.bytes_k,
            "bytes_v": self.bytes_v,
            "bytes": self.total_bytes,
            "bytes_f16": self.bytes_f16,
            "saving": self.saving,
            "bits_per_value": self.bits_per_value,
            "layers": [asdict(layer) for layer in self.layers],
        }


def _pad(n: int, to: int) -> int:
    return (n + to - 1) // to * to


def kv_memory(
    model: Union[ModelShape, str, "os.PathLike[str]"],
    quant: Union[KVQuant, str, int, None] = None,
    n_ctx: int = 0,
    *,
    n_seq_max: int = 1,
    unified: bool = False,
    swa_full: bool = False,
    n_batch: int = 2048,
    n_ubatch: int = 512,
    flash_attn: bool = True,
) -> KVMemory:
    """Bytes of a KV cache, layer by layer, as the pinned llama.cpp allocates them.

    The defaults are those of the command-line tools; a context made through the Python API has
    ``swa_full=True`` and ``n_batch=512`` unless told otherwise.

    Args:
        model: shape, or path of a GGUF.
        quant: policy; None means the one that the file carries, else f16.
        n_ctx: tokens over all sequences; 0 means what the model was trained for.
        n_seq_max: sequences (``-np``).
        unified: sequences share one buffer (``--kv-unified``).
        swa_full: sliding layers keep the whole context (``--swa-full``).
        n_batch, n_ubatch: logical and physical batch; sliding layers keep room for one physical batch.
        flash_attn: without it values are stored transposed, every layer's row as wide as the widest.

    Raises:
        KVQuantError: the policy is malformed or names layers that aren't there.
        HeadSizeError: a type's blocks don't divide the head size.
        MLAError: an MLA model with unequal types.
        UsageError: a number is out of range.
        ModelFileError, UnsupportedModelError: see :meth:`ModelShape.from_gguf`.
    """
    shape = model if isinstance(model, ModelShape) else ModelShape.from_gguf(model)
    q = shape.policy if quant is None else KVQuant.parse(quant)
    for what, value, least in (("n_ctx", n_ctx, 0), ("n_seq_max", n_seq_max, 1), ("n_batch", n_batch, 1)):
        if value < least:
            raise UsageError(f"{what}: {value} is too small, at least {least}")
    if n_seq_max > 256:
        raise UsageError(f"n_seq_max: {n_seq_max} is too large, at most 256")
    if n_ctx == 0:
        n_ctx = shape.n_ctx_train
        if n_ctx == 0:
            raise UsageError("n_ctx: the model doesn't say what it was trained for, so a context is needed")

    n_batch = min(n_ctx, n_batch) if shape.causal else n_batch
    n_ubatch = min(n_batch, n_ubatch or n_batch)
    n_ctx = _pad(n_ctx, PAD)
    if unified:
        n_ctx_seq = n_ctx
    else:
        n_ctx_seq = _pad(n_ctx // n_seq_max, PAD)
        n_ctx = n_ctx_seq * n_seq_max
    size_swa = _pad(min(n_ctx_seq, shape.n_swa * (n_seq_max if unified else 1) + n_ubatch), PAD)
    if swa_full:
        size_swa = n_ctx_seq
    n_stream = 1 if unified else n_seq_max

    types = q.types(len(shape.layers))
    layers: List[LayerMemory] = []
    bytes_f16 = 0
    for layer, (name_k, name_v) in zip(shape.layers, types):
        if layer.head_v == 0 and name_k != name_v:
            raise MLAError(
                f"{shape.arch} stores keys and values in one tensor (MLA), so both need the same type; "
                f"layer {layer.index} was given {name_k} and {name_v}"
            )
        for side, name, head in (("K", name_k, layer.head_k), ("V", name_v, layer.head_v)):
            block = BY_NAME[name].block
            if head % block:
                raise HeadSizeError(
                    f"{side} type {name} stores blocks of {block} values, which don't divide the head size {head} "
                    f"of layer {layer.il}; use f16, bf16 or f32 for {side}"
                )
        cells = (size_swa if layer.swa else n_ctx_seq) * n_stream
        width_k = layer.n_head_kv * layer.head_k
        width_v = layer.n_head_kv * layer.head_v
        if not flash_attn and width_v:
            width_v = shape.v_width_max
        layers.append(
            LayerMemory(
                il=layer.il,
                index=layer.index,
                swa=layer.swa,
                n_cells=cells,
                n_head_kv=layer.n_head_kv,
                head_k=layer.head_k,
                head_v=layer.head_v,
                type_k=name_k,
                type_v=name_v if layer.head_v else "",
                bytes_k=cells * BY_NAME[name_k].row_bytes(width_k),
                bytes_v=cells * BY_NAME[name_v].row_bytes(width_v) if width_v else 0,
            )
        )
        bytes_f16 += cells * 2 * (width_k + width_v)
    return KVMemory(q, n_ctx, n_ctx_seq, n_seq_max, unified, swa_full, tuple(layers), bytes_f16)
