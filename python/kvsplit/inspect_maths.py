# SPDX-License-Identifier: MIT
"""The arithmetic of :mod:`kvsplit.inspect`: rotation, storage, statistics, attention in float64, protection.

Nothing here knows of models or files: arrays go in, numbers come out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import numpy as np
import numpy.typing as npt

from kvsplit.cache_types import BY_NAME
from kvsplit.formats import Library
from kvsplit.policy import Slice, Spec

Array = npt.NDArray[Any]

#: Types that hold an f16 value exactly. What an f16 cache stores is the exact value everywhere here.
EXACT = ("f16", "f32")

#: A channel is an outlier if its RMS is more than this many times that of the median channel of its head.
OUTLIER = 5.0


# ---- which queries


def sample_positions(n: int, queries: int) -> Array:
    """Positions whose queries are looked at: the last eighth of ``queries`` are the last tokens, the rest is even.

    Args:
        n: tokens.
        queries: positions, fewer if there are fewer tokens.

    Returns:
        int64, ascending, shape (min(n, queries),).
    """
    if n <= queries:
        return np.arange(n)
    last = max(1, queries // 8)
    even = np.floor(np.arange(queries - last) * ((n - last) / max(1, queries - last))).astype(np.int64)
    return np.concatenate([even, np.arange(n - last, n)])


# ---- storage


@lru_cache(maxsize=8)
def hadamard(n: int) -> Array:
    """Sylvester's Hadamard matrix over sqrt(n): symmetric, its own inverse. float32, shape (n, n).

    Raises:
        ValueError: ``n`` is no power of two.
    """
    if n < 1 or n & (n - 1):
        raise ValueError(f"n: {n} is no power of two")
    h = np.ones((1, 1), np.float32)
    while len(h) < n:
        h = np.block([[h, h], [h, -h]])
    return np.asarray(h / np.float32(np.sqrt(n)), np.float32)


def rotate(x: Array, size: int) -> Array:
    """Each run of ``size`` values along the last axis times the Hadamard matrix; a copy as float32 if size is 0.

    As ``llama_mul_mat_hadamard`` does it. The same call turns it back.
    """
    rows: Array = np.asarray(x, np.float32)
    if not size:
        return np.array(rows)
    turned: Array = np.matmul(rows.reshape(-1, size), hadamard(size))
    return turned.reshape(rows.shape)


def _bf16(x: Array) -> Array:
    """Rounded to bf16, to even, as float32."""
    bits: Array = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return np.asarray(bits.astype(np.uint32).view(np.float32))


def store(library: Library, name: str, x: Array, rotation: int) -> Array:
    """What comes back from a cache of type ``name``: rotated, encoded, decoded, rotated back.

    Args:
        library: of the codecs, the built one, so that this is what a cache stores.
        name: of the type.
        x: float32, shape (..., head size).
        rotation: size of the Hadamard matrix, 0: none. Types without blocks are never rotated.

    Returns:
        float32, shape of ``x``.
    """
    if name in EXACT:
        return np.array(x, np.float32)
    if name == "bf16":
        return _bf16(x)
    rows = rotate(x, rotation)
    return rotate(library.decode(name, library.encode(name, rows)), rotation)


def ratio(error: float, exact: float) -> float:
    """``error / exact``, 0 where both are."""
    return 0.0 if error == 0 else error / exact if exact else float("inf")


@dataclass
class Stored:
    """How far stored rows are from the exact ones, summed over heads.

    Attributes:
        error, exact: sums of squares.
        cosines, rows: sum of the cosines of rows with their exact ones, and their number. Rows of zeros are left out.
    """

    error: float = 0.0
    exact: float = 0.0
    cosines: float = 0.0
    rows: int = 0

    def add(self, x: Array, y: Array) -> None:
        """Count rows (n, head size) ``y`` against the exact ``x``."""
        a, b = np.asarray(x, np.float64), np.asarray(y, np.float64)
        self.error += float(np.square(a - b).sum())
        aa, bb = np.square(a).sum(axis=-1), np.square(b).sum(axis=-1)
        self.exact += float(aa.sum())
        there = (aa > 0) & (bb > 0)
        self.cosines += float(((a * b).sum(axis=-1)[there] / np.sqrt(aa[there] * bb[there])).sum())
        self.rows += int((aa > 0).sum())  # a row that became zeros has the cosine 0

    @property
    def nse(self) -> float:
        """Normalized squared error."""
        return ratio(self.error, self.exact)

    @property
    def cosine(self) -> float:
        """Mean cosine."""
        return self.cosines / self.rows if self.rows else 1.0


# ---- statistics


@dataclass(frozen=True)
class Spread:
    """The values of one head's keys or values.

    Attributes:
        min, max, absmax, mean, std: over tokens and channels.
        kurtosis: excess kurtosis of all values, ``E[(x - mean)^4] / std^4 - 3``; 0 for a normal distribution.
        channel_kurtosis: the same after each channel's own mean and deviation were taken out; channels that never
            change are left out.
        peak: absmax over RMS, the larger the worse for a block with one scale.
        outlier_channels: those whose RMS is more than 5 times that of the median channel.
    """

    min: float
    max: float
    absmax: float
    mean: float
    std: float
    kurtosis: float
    channel_kurtosis: float
    peak: float
    outlier_channels: List[int]


def _kurtosis(z: Array) -> float:
    """Of values without mean."""
    m2 = float(np.square(z).mean()) if z.size else 0.0
    return float((np.square(z) ** 2).mean()) / m2**2 - 3.0 if m2 > 0 else 0.0


def spread(x: Array) -> Spread:
    """Statistics of one head, shape (tokens, head size)."""
    x = np.asarray(x, np.float64)
    rms = np.sqrt(np.square(x).mean(axis=0))
    std = x.std(axis=0)
    # a constant channel's deviation is rounding
    moves = std > 1e-6 * np.maximum(rms, 1e-300)
    z = (x[:, moves] - x[:, moves].mean(axis=0)) / std[moves]
    absmax, total = float(np.abs(x).max()), float(np.sqrt(np.square(x).mean()))
    return Spread(
        min=float(x.min()),
        max=float(x.max()),
        absmax=absmax,
        mean=float(x.mean()),
        std=float(x.std()),
        kurtosis=_kurtosis(x - x.mean()),
        channel_kurtosis=_kurtosis(z),
        peak=ratio(absmax, total),
        outlier_channels=[int(i) for i in np.flatnonzero(rms > OUTLIER * np.median(rms))],
    )


def constant_share(x: Array) -> float:
    """Share of a head's energy that is one vector, the same at every position: ``|mean|^2 / mean |x|^2``, 0..1."""
    x = np.asarray(x, np.float64)
    return ratio(float(np.square(x.mean(axis=0)).sum()), float(np.square(x).sum(axis=1).mean()))


# ---- attention


@dataclass
class Attention:
    """One layer's attention for some queries, as ``ggml_flash_attn_ext`` has it.

    Attributes:
        il: layer of the model.
        q: float32, shape (heads, queries, head size).
        k: float16, shape (KV heads, cells, head size).
        v: float16, shape (KV heads, cells, head size of V).
        mask: float16, shape (queries, cells); -inf where a query doesn't attend, a bias elsewhere.
        positions: of the queries, shape (queries,).
        output: what the model computed, float32, shape (heads, queries, head size of V).
        scale, max_bias, softcap: parameters of the operation.
        sinks: logit of each head that takes part in the sum alone, shape (heads,); None without.
        short: the shortest batch in which a query was computed.
    """

    il: int
    q: Array
    k: Array
    v: Array
    mask: Array
    positions: Array
    output: Array
    scale: float
    max_bias: float = 0.0
    softcap: float = 0.0
    sinks: Optional[Array] = None
    short: int = 1 << 30

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return len(self.q) // len(self.k)

    @cached_property
    def attended(self) -> Array:
        """bool, shape (queries, cells)."""
        return np.isfinite(self.mask)

    @cached_property
    def bias(self) -> Array:
        """The mask in float64 with 0 where it is -inf, shape (queries, cells)."""
        return np.where(self.attended, self.mask, np.float16(0)).astype(np.float64)

    def slope(self, head: int) -> float:
        """What the mask is multiplied by (ALiBi: Press et al., 2022, as ggml's flash attention counts heads)."""
        if self.max_bias <= 0:
            return 1.0
        n = 1 << (len(self.q).bit_length() - 1)
        if head < n:
            return float(2.0 ** (-self.max_bias / n * (head + 1)))
        return float(2.0 ** (-self.max_bias / 2 / n * (2 * (head - n) + 1)))

    def logits(self, head: int, k: Array) -> Array:
        """float64, shape (queries, cells), of one query head against keys ``k`` (cells, head size)."""
        s = self.q[head].astype(np.float64) @ np.asarray(k, np.float64).T
        s *= self.scale
        if self.softcap:
            s = self.softcap * np.tanh(s / self.softcap)
        s += self.slope(head) * self.bias
        return np.where(self.attended, s, -np.inf)

    def weights(self, head: int, logits: Array) -> Array:
        """Softmax over cells and the sink; the rows of a head with a sink sum to less than 1. Shape of ``logits``."""
        top = logits.max(axis=1, keepdims=True)
        if self.sinks is not None:
            top = np.maximum(top, float(self.sinks[head]))
        w = np.exp(logits - top)
        total = w.sum(axis=1, keepdims=True)
        if self.sinks is not None:
            total += np.exp(float(self.sinks[head]) - top)
        return np.asarray(w / total)


def logit_error(exact: Array, other: Array, attended: Array) -> Tuple[float, int]:
    """Sum of squares over attended positions, each query's mean difference taken out, and their number.

    Softmax doesn't see what is added to all logits of a query.
    """
    d = np.where(attended, other, 0.0) - np.where(attended, exact, 0.0)
    n = attended.sum(axis=1, keepdims=True)
    d -= d.sum(axis=1, keepdims=True) / np.maximum(n, 1)
    return float(np.square(d[attended]).sum()), int(n.sum())


@dataclass
class Heads:
    """Sums of one quantity, a query head each.

    Attributes:
        error, norm: shape (heads,).
    """

    error: Array
    norm: Array

    @classmethod
    def zeros(cls, n: int) -> Heads:
        """Nothing yet."""
        return cls(np.zeros(n), np.zeros(n))

    @property
    def whole(self) -> float:
        """``error / norm`` over all heads."""
        return ratio(float(self.error.sum()), float(self.norm.sum()))

    @property
    def each(self) -> List[float]:
        """``error / norm`` of each."""
        return [ratio(float(e), float(n)) for e, n in zip(self.error, self.norm)]


@dataclass
class Damage:
    """What storage does to one layer.

    Attributes:
        keys, values: by type, how far stored rows are from the exact ones.
        logits: by type of the keys, mean squared error of the attention logits.
        output: by types of keys and values, normalized squared error of the attention's output.
        first: attention on the first token, mean over the queries that may attend it and more than 15 others; each
            query head. NaN where there is no such query.
        sink: attention on the head's sink, mean over queries; empty without sinks.
        check: distance of the model's own output from the float64 one, largest and RMS, and the bound of the largest.
    """

    keys: Dict[str, Stored]
    values: Dict[str, Stored]
    logits: Dict[str, Heads]
    output: Dict[Tuple[str, str], Heads]
    first: List[float]
    sink: List[float]
    check: Dict[str, float] = field(default_factory=dict)


#: Batches of fewer queries go through a path of ggml's that sums values of an f16 cache in f16.
_TILE = 64


def check_bound(a: Attention, head: int, k: Array, v: Array, n: int) -> float:
    """How far the model's output of one head may be from the float64 one, largest absolute value.

    ggml computes logits, weights and sums in f32 (u = 2^-24). A logit of head size D is off by at most
    ``(D + 4) u scale |q| |k|``, and so is its exponent; a weight is off by twice that, relatively, once in the
    weight and once in the sum. Summing n cells costs ``(n + 8) u`` more. Outputs are means of values, so all this
    times the largest value bounds them. Batches shorter than a tile round queries and sums to f16 (u = 2^-11).
    """
    u = 2.0**-24 if a.short >= _TILE else 2.0**-11
    q_top = float(np.sqrt(np.square(a.q[head].astype(np.float64)).sum(axis=1)).max())
    k_top = float(np.sqrt(np.square(k).sum(axis=1)).max())
    logit = (k.shape[1] + 4) * u * abs(a.scale) * q_top * k_top
    return float((2 * logit + (n + 8) * u) * np.abs(v).max())


def damage(
    a: Attention,
    key_types: Sequence[str],
    value_types: Sequence[str],
    stored: Callable[[str, str, Array], Array],
) -> Damage:
    """Hold attention over stored rows against attention over the exact ones, in float64, one KV head at a time.

    Args:
        a: the layer.
        key_types, value_types: what to store keys and values as; f16 is always among them.
        stored: ``stored(side, type, rows)``, side ``k`` or ``v``: what the cache gives back, shape of ``rows``.

    Memory: 8 bytes x cells x (head size x (2 + key types + value types) + 8 x queries), whatever the heads.
    """
    key_types = ["f16", *(t for t in key_types if t != "f16")]
    value_types = ["f16", *(t for t in value_types if t != "f16")]
    n_head, n_kv = len(a.q), len(a.k)
    count = a.attended.sum(axis=1)
    # with few tokens to choose from, the first has much of the weight anyway
    sees_first = a.attended[:, 0] & (count > 16)
    res = Damage(
        {t: Stored() for t in key_types},
        {t: Stored() for t in value_types},
        {t: Heads.zeros(n_head) for t in key_types},
        {(tk, tv): Heads.zeros(n_head) for tk in key_types for tv in value_types},
        [float("nan")] * n_head,
        [],
    )
    worst, bound, error, norm = 0.0, 0.0, 0.0, 0.0
    width = a.v.shape[2]
    for j in range(n_kv):
        k, v = a.k[j].astype(np.float32), a.v[j].astype(np.float32)
        values = np.empty((len(v), len(value_types) * width))
        for i, t in enumerate(value_types):
            rows = v if t == "f16" else stored("v", t, v)
            res.values[t].add(v, rows)
            values[:, i * width : (i + 1) * width] = rows
        keys: Dict[str, Array] = {}
        for t in key_types:
            keys[t] = (k if t == "f16" else stored("k", t, k)).astype(np.float64)
            res.keys[t].add(k, keys[t])
        for h in range(j * a.group, (j + 1) * a.group):
            exact = a.logits(h, keys["f16"])
            kept = np.empty(0)
            for tk in key_types:
                logits = exact if tk == "f16" else a.logits(h, keys[tk])
                res.logits[tk].error[h], res.logits[tk].norm[h] = logit_error(exact, logits, a.attended)
                w = a.weights(h, logits)
                out = (w @ values).reshape(len(w), len(value_types), width)
                if tk == "f16":
                    kept = out[:, 0].copy()
                    if sees_first.any():
                        res.first[h] = float(w[sees_first, 0].mean())
                    if a.sinks is not None:
                        res.sink.append(float(1.0 - w.sum(axis=1).mean()))
                    d = a.output[h].astype(np.float64) - kept
                    worst = max(worst, float(np.abs(d).max()))
                    bound = max(bound, check_bound(a, h, keys[tk], values[:, :width], int(count.max())))
                    error += float(np.square(d).sum())
                    norm += float(np.square(kept).sum())
                for i, tv in enumerate(value_types):
                    o = res.output[tk, tv]
                    o.error[h] = float(np.square(out[:, i] - kept).sum())
                    o.norm[h] = float(np.square(kept).sum())
    res.check = {"max": worst, "bound": bound, "relative_rms": float(np.sqrt(ratio(error, norm)))}
    return res


# ---- maps


class MapSum:
    """Mean attention over blocks of positions, filled batch by batch; memory doesn't grow with the prompt's square."""

    def __init__(self, n: int, blocks: int) -> None:
        """For ``n`` positions in at most ``blocks`` blocks each way."""
        self.edges = np.linspace(0, n, min(n, blocks) + 1).astype(np.int64)
        size = len(self.edges) - 1
        self.total = np.zeros((size, size))
        self.count = np.zeros((size, size))

    def add(self, positions: Array, weights: Array, attended: Array) -> None:
        """Count rows: of queries at ``positions``, shape (queries, cells); more cells than positions are left out."""
        n = int(self.edges[-1])
        row = np.searchsorted(self.edges, positions, side="right") - 1
        for into, what in ((self.total, weights), (self.count, attended)):
            full = np.zeros((len(positions), n))
            cells = min(n, what.shape[1])
            full[:, :cells] = what[:, :cells]
            np.add.at(into, row, np.add.reduceat(full, self.edges[:-1], axis=1))

    @property
    def mean(self) -> Array:
        """Over the attended cells of each block; NaN where there are none."""
        with np.errstate(invalid="ignore"):
            return np.asarray(np.where(self.count > 0, self.total / self.count, np.nan))


# ---- protection


def spec_text(types: Sequence[str], default: Optional[str] = None) -> str:
    """The canonical SPEC of a list of types, one a layer: the default, then an exception for each run of others.

    Args:
        types: at least one.
        default: the SPEC's default; None, or one that no layer has, takes the most frequent type.
    """
    names = list(types)
    base = default if default in names else max(dict.fromkeys(names), key=names.count)
    exceptions: List[Tuple[Slice, str]] = []
    i, n = 0, len(names)
    while i < n:
        j = i + 1
        while j < n and names[j] == names[i]:
            j += 1
        if names[i] != base:
            one = j == i + 1
            ends = Slice(i, single=True) if one else Slice(i or None, None if j == n else j)
            exceptions.append((ends, names[i]))
        i = j
    text = Spec(base, tuple(exceptions)).text()
    assert Spec.parse(text).types(n) == names
    return text


def wider(name: str) -> Optional[str]:
    """The next step of protection: 8 bits for what has fewer, 16 for 8; None for 16 and more."""
    bits = BY_NAME[name].bits_per_value
    return "q8_0" if bits < 8 else "f16" if bits < 16 else None


def protect(
    pairs: Sequence[Tuple[str, str]],
    error: Callable[[int, str, str], float],
    size: Callable[[int, int, str], int],
    budget: int,
) -> List[Tuple[str, str]]:
    """Widen keys or values of single layers, always the step that takes away most error per byte.

    Args:
        pairs: types of keys and values, one pair a layer.
        error: ``error(layer, type of keys, type of values)``.
        size: ``size(layer, side, type)`` in bytes, side 0 for keys and 1 for values.
        budget: bytes that may be added.

    Returns:
        Types as ``pairs``, none narrower.
    """
    now = [(k, v) for k, v in pairs]
    while True:
        best: Optional[Tuple[float, int, Tuple[str, str], int]] = None
        for layer, pair in enumerate(now):
            before = error(layer, *pair)
            for side in (0, 1):
                name = wider(pair[side])
                if name is None:
                    continue
                cost = size(layer, side, name) - size(layer, side, pair[side])
                new = (name, pair[1]) if side == 0 else (pair[0], name)
                gain = before - error(layer, *new)
                if 0 < cost <= budget and gain > 0 and (best is None or gain / cost > best[0]):
                    best = (gain / cost, layer, new, cost)
        if best is None:
            return now
        _, layer, new, cost = best
        now[layer] = new
        budget -= cost
