# SPDX-License-Identifier: MIT
"""The formats kvq2 to kvq6 in numpy: the same bytes as the C reference (ggml-ext/kvq-formats.c), readable and slow.

A format stores blocks of 32 values as one f16 scale and 32 levels of a small codebook, at ``bits`` bits a level::

    bytes 0..1     d: the scale, f16, little-endian; its sign turns the codebook towards the outlier of the block
    then qs        first plane:  4 bits a value (kvq4, kvq5, kvq6) or 2 bits (kvq2, kvq3)
    then qh        second plane: none (kvq2, kvq4), 1 bit (kvq3, kvq5) or 2 bits (kvq6)

In a plane of B bytes, value i lies in byte ``i % B``, in field ``i // B`` counted from the low bits.

The codebook has ``2 * 2**bits`` ascending levels. Which half of it a value may use is said by a trellis with 4 states
(trellis-coded quantization: Marcellin and Fischer, 1990; trellis and set partition: Ungerboeck, 1982).
Step t takes the value in byte ``t // F``, field ``t % F`` of the first plane, which has F fields a byte.
With b[t] the low bit of that field, e[t] the other bits (those of the second plane on top), b[-1] = b[-2] = 0::

    value = d * levels[4*e[t] + 2*(b[t] ^ b[t-2]) + b[t-1]]

The encoder scales the outlier (the value of largest magnitude; of two, the positive one) to ``levels[0]``, tries four
scales relative to that one, and finds the path with the smallest squared error for each (Viterbi). The best path gets
the scale that makes the decoded block unbiased, ``sum x*decoded = sum x*x``, or as near to it as the error allows: that
is never above what scaling the outlier gives without a search.

At the edges:

- A block of zeros, of either sign, is stored as zero bytes and comes back as zeros (as -0.0: levels[0] is negative).
- The scale is f16. Values of a block whose outlier is below about ``2**-25 * -levels[0]`` (3.8e-6) become zero.
- Scales are clamped to +-65504, so finite values stay finite; beyond about ``65504 * -levels[0]`` (8e6) they saturate.
- A block that holds an inf or a NaN comes back as NaN in all 32 values.

Error (sum of squared differences over sum of squares) on 10**6 values of N(0,1), blocks of 32, scales counted as bits::

    format  bits/value     NSE      bound 2**(-2R)
    kvq2        2.5     0.0805         0.03125
    kvq3        3.5     0.0184         0.00781
    kvq4        4.5     0.00432        0.00195
    kvq5        5.5     0.00108        0.000488
    kvq6        6.5     0.000266       0.000122

docs/numerics.md derives all this.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Dict, Optional, Tuple, Union

import numpy as np
import numpy.typing as npt

from kvsplit import native
from kvsplit.cache_types import BY_NAME
from kvsplit.errors import NativeMismatchError, NativeMissingError

Array = npt.NDArray[Any]

#: Values of a block.
BLOCK = 32

_Y_ONE = 64  # the search measures values in 1/64 of a level's unit
_Y_MAX = 12000  # and clamps them here, so that the sums of the C code fit 31 bits
_MAX_SCALE = np.float32(65504.0)  # of f16
_CHUNK = 2048  # blocks at a time: the working set stays in the cache of a core

_f32 = np.float32


def _three_slopes(n_levels: int, slopes: Tuple[int, int, int], bends: Tuple[int, int]) -> Array:
    """Codebook on a line with three slopes, odd around index ``n_levels / 2``.

    ``|level| = a*u + b*max(u - B, 0) + c*max(u - C, 0)`` with ``u = |index - n_levels/2|``.
    """
    i = np.arange(n_levels) - n_levels // 2
    u = np.abs(i)
    (a, b, c), (bend_b, bend_c) = slopes, bends
    size: Array = a * u + b * np.maximum(u - bend_b, 0) + c * np.maximum(u - bend_c, 0)
    return np.sign(i) * size


@dataclass(frozen=True, eq=False)
class Format:
    """One format.

    Attributes:
        name: as flags, metadata and messages write it.
        ggml_id: value of ``enum ggml_type``.
        bits: stored bits of a level, without the scale.
        block: values per block.
        bytes: bytes per block, scale included.
        levels: codebook, int8, shape (2 * 2**bits,), ascending; ``levels[0]`` is what an outlier is scaled to.
        tries: scales that the encoder tries, in 1/256 of outlier / levels[0]; the first is 256.
    """

    name: str
    ggml_id: int
    bits: int
    levels: Array
    tries: Tuple[int, ...]
    block: int = BLOCK
    bytes: int = field(init=False)

    def __post_init__(self) -> None:
        levels = np.array(self.levels, dtype=np.int8)
        levels.setflags(write=False)
        object.__setattr__(self, "levels", levels)
        object.__setattr__(self, "bytes", 2 + BLOCK * self.bits // 8)

    @property
    def bits_per_value(self) -> float:
        """Storage of one value, the scale included, in bits."""
        return 8.0 * self.bytes / self.block

    @property
    def field_bits(self) -> int:
        """Bits of a value in the first plane."""
        return 4 if self.bits >= 4 else 2

    @property
    def n_qs(self) -> int:
        """Bytes of the first plane, which carries the path."""
        return BLOCK * self.field_bits // 8

    @property
    def n_qh(self) -> int:
        """Bytes of the second plane; 0 if there is none."""
        return self.bytes - 2 - self.n_qs

    def path_to_row(self) -> Array:
        """Index in the block of the value at each step of the path; shape (32,)."""
        t = np.arange(BLOCK)
        per_byte = 8 // self.field_bits
        return (t % per_byte) * self.n_qs + t // per_byte

    def nearest(self) -> Array:
        """``nearest()[c, t + 128]``: index of the level nearest to t among those with index % 4 == c, the lower of two.

        Shape (4, 256), t from -128 to 127.
        """
        t = np.arange(-128, 128)[:, None]
        return np.stack([4 * np.argmin(np.abs(t - self.levels[c::4].astype(int)), axis=1) + c for c in range(4)])


# fmt: off
FORMATS: Dict[str, Format] = {f.name: f for f in (
    Format("kvq2", 450, 2, np.array([-125, -70, -43, -16, 4, 30, 56, 99]), (256, -241, 192, 222)),
    Format("kvq3", 451, 3, np.array([-127, -94, -72, -56, -43, -30, -20, -9, 0, 11, 20, 32, 43, 58, 76, 103]),
           (256, -300, 234, 317)),
    Format("kvq4", 452, 4, np.array([-125, -105, -90, -77, -68, -60, -53, -46, -40, -34, -29, -24, -19, -14, -10, -5,
                                        0,    5,   9,  14,  19,  24,  29,  35,  40,  47,  53,  61,  70,  80,  93, 109]),
           (256, 245, -290, 300)),
    Format("kvq5", 453, 5, _three_slopes( 64, (2, 2, 3), (20, 28)), (256, -275, 271, 278)),
    Format("kvq6", 454, 6, _three_slopes(128, (1, 1, 2), (44, 56)), (256, -278, 290, -267)),
)}
# fmt: on


def get(name: Union[str, Format]) -> Format:
    """The format of a name; a :class:`Format` is handed back as it is.

    Raises:
        ValueError: no format has this name.
    """
    if isinstance(name, Format):
        return name
    try:
        return FORMATS[name]
    except KeyError:
        raise ValueError(f"name: no format {name!r}; there are {', '.join(FORMATS)}") from None


# ---- planes of bits


def _unpack(plane: Array) -> Array:
    """Values of a plane in natural order: (n, n_bytes) -> (n, 32)."""
    width = 8 * plane.shape[1] // BLOCK
    fields = [(plane >> (width * k)) & ((1 << width) - 1) for k in range(8 // width)]
    return np.concatenate(fields, axis=1)


def _pack(values: Array, n_bytes: int) -> Array:
    """Plane of values in natural order: (n, 32) -> (n, n_bytes)."""
    width = 8 * n_bytes // BLOCK
    plane = np.zeros((len(values), n_bytes), np.uint8)
    for k in range(8 // width):
        plane |= (values[:, k * n_bytes : (k + 1) * n_bytes] << (width * k)).astype(np.uint8)
    return plane


# ---- decoding


def _scales(blocks: Array) -> Array:
    """Scales of blocks (n, bytes), float64, shape (n,)."""
    return np.ascontiguousarray(blocks[:, :2]).view("<f2")[:, 0].astype(np.float64)


def _levels(f: Format, blocks: Array) -> Array:
    """Levels of blocks (n, bytes) in natural order, int8, shape (n, 32)."""
    order = f.path_to_row()
    q = _unpack(blocks[:, 2 : 2 + f.n_qs])[:, order]
    b = (q & 1).astype(np.intp)
    e = (q >> 1).astype(np.intp)
    if f.n_qh:
        e |= _unpack(blocks[:, 2 + f.n_qs :])[:, order].astype(np.intp) << (f.field_bits - 1)
    before = np.pad(b, ((0, 0), (2, 0)))
    levels = np.empty((len(blocks), BLOCK), np.int8)
    levels[:, order] = f.levels[4 * e + 2 * (b ^ before[:, :-2]) + before[:, 1:-1]]
    return levels


def _decode_blocks(f: Format, blocks: Array) -> Array:
    """(n, bytes) uint8 -> (n, 32) float32."""
    with np.errstate(invalid="ignore"):
        return np.asarray(_scales(blocks).astype(_f32)[:, None] * _levels(f, blocks).astype(_f32))


def decode(name: Union[str, Format], data: Array) -> Array:
    """Values of stored blocks, as ``kvq_decode_block_ref`` gives them.

    Args:
        name: of the format.
        data: uint8, shape (..., k * bytes) with k blocks in a row.

    Returns:
        float32, shape (..., k * 32), in the units of what was encoded.

    Raises:
        ValueError: no such format, or ``data`` isn't rows of whole blocks of uint8.
    """
    f = get(name)
    data = np.asarray(data)
    if data.dtype != np.uint8:
        raise ValueError(f"data: dtype is {data.dtype}, not uint8")
    if data.ndim == 0 or data.shape[-1] % f.bytes:
        raise ValueError(f"data: the last axis of shape {data.shape} is no multiple of {f.bytes}, a block of {f.name}")
    blocks = data.reshape(-1, f.bytes)
    x = np.empty((len(blocks), BLOCK), _f32)
    for i in range(0, len(blocks), _CHUNK):
        x[i : i + _CHUNK] = _decode_blocks(f, blocks[i : i + _CHUNK])
    return x.reshape(*data.shape[:-1], data.shape[-1] // f.bytes * BLOCK)


# ---- encoding


@lru_cache(maxsize=64)
def _tables(f: Format) -> Tuple[Array, Array]:
    """Level indices of :meth:`Format.nearest`, and 64 times their levels as int32."""
    near = f.nearest()
    return near, _Y_ONE * f.levels[near].astype(np.int32)


def _first_scale(f: Format, x: Array) -> Array:
    """Scales (n,) that put the outliers of finite blocks (n, 32) on ``levels[0]``, as f16 holds them."""
    largest = np.maximum(x.max(axis=1), _f32(0))
    smallest = np.minimum(x.min(axis=1), _f32(0))
    outlier = np.where(largest >= -smallest, largest, smallest)
    d: Array = np.clip(outlier / _f32(f.levels[0]), -_MAX_SCALE, _MAX_SCALE)
    return d.astype(np.float16).astype(_f32)


def _unit(y: Array) -> Array:
    """Index into the tables of the unit that y is nearest to."""
    unit: Array = np.clip((y + _Y_ONE // 2) >> 6, -128, 127)
    return unit + 128


def _viterbi(f: Format, y: Array) -> Tuple[Array, Array, Array]:
    """The best path of each column.

    Args:
        y: int32, shape (32, ...), values by step in 1/64 of a level's unit.

    Returns:
        came: bool, shape (32, 4, ...): True where the path into a state comes from the upper of its two states.
        end: shape (...), state at the end of the best path.
        cost: int64, shape (...), its squared error in units of y.
    """
    _, level = _tables(f)
    unit = _unit(y)
    # states are 2*b[t-2] + b[t-1]; the path starts in state 0
    cost = np.full((4, *y.shape[1:]), 1 << 30, np.int64)
    cost[0] = 0
    came = np.empty((BLOCK, 4, *y.shape[1:]), bool)
    for t in range(BLOCK):
        dist = [np.square(y[t] - level[c][unit[t]], dtype=np.int64) for c in range(4)]
        after = np.empty_like(cost)
        for s in range(4):
            b, b1 = s & 1, s >> 1
            lower = cost[b1] + dist[2 * b + b1]
            upper = cost[2 + b1] + dist[2 * (b ^ 1) + b1]
            came[t, s] = upper < lower
            after[s] = np.minimum(lower, upper)
        cost = after
    end = np.argmin(cost, axis=0)
    return came, end, cost.min(axis=0)


def _trace(came: Array, end: Array) -> Array:
    """Bits (32, n) of the paths that end in states ``end`` (n,)."""
    b = np.empty((BLOCK, len(end)), np.intp)
    s = end.astype(np.intp)
    for t in range(BLOCK - 1, -1, -1):
        b[t] = s & 1
        s = (s >> 1) | (np.take_along_axis(came[t], s[None], axis=0)[0].astype(np.intp) << 1)
    return b


def _path_blocks(f: Format, b: Array, y: Array) -> Tuple[Array, Array, Array]:
    """Blocks (n, bytes) of paths b (32, n) without a scale, and their sums of y*level and level^2."""
    near, _ = _tables(f)
    before = np.pad(b, ((2, 0), (0, 0)))
    m = near[2 * (b ^ before[:-2]) + before[1:-1], _unit(y)]
    level = f.levels[m].astype(np.int64)
    e = m >> 2
    order = f.path_to_row()
    blocks = np.zeros((b.shape[1], f.bytes), np.uint8)
    q = np.empty((b.shape[1], BLOCK), np.intp)
    q[:, order] = (((e << 1) & ((1 << f.field_bits) - 1)) | b).T
    blocks[:, 2 : 2 + f.n_qs] = _pack(q, f.n_qs)
    if f.n_qh:
        q[:, order] = (e >> (f.field_bits - 1)).T
        blocks[:, 2 + f.n_qs :] = _pack(q, f.n_qh)
    return blocks, (y * level).sum(axis=0), (level * level).sum(axis=0)


def _set_scale(blocks: Array, d: Array) -> None:
    blocks[:, :2] = d.astype("<f2")[:, None].view(np.uint8)


def _choose_scale(
    f: Format, blocks: Array, best: Array, err: Array, err0: Array, d0: Array, sum_yl: Array, sum_ll: Array
) -> Array:
    """``kvq_set_scale``: puts a scale into each block; True where the error is surely at most that of candidate 0.

    Args:
        blocks: uint8, shape (n, bytes), with the path of candidate ``best``; the scale is written.
        best: index of the candidate, shape (n,), as all that follows.
        err, err0: float32, squared errors of ``best`` and of candidate 0, in units of candidate 0's y.
        d0: float32, the first scale.
        sum_yl, sum_ll: int64, sums of y*level and level^2 over the path.
    """
    one = float(_Y_ONE)
    err, err0, d0 = err.astype(np.float64), err0.astype(np.float64), d0.astype(np.float64)
    tries = np.array(f.tries)[best] / 256.0
    sum_yy = err / (tries * tries) + 2 * one * sum_yl - one * one * sum_ll
    d_try = d0 * tries
    d_ls = d_try * sum_yl / (one * sum_ll)
    with np.errstate(divide="ignore", invalid="ignore"):
        d = np.where(sum_yl > 0, d_try * sum_yy / (one * sum_yl), d_ls)

    top = float(_MAX_SCALE)
    plain = (np.abs(d_ls) >= 2.0**-13) & (np.abs(d) < top) & (np.abs(d0) < top)

    # how far from the scale of least squares the error is surely below that of candidate 0
    margin = np.abs(d0) * (1.25 * 0.5 / _Y_ONE) * np.sqrt(BLOCK / sum_ll)
    near = np.maximum(np.abs(d_try - d_ls) - margin, 0.0)
    steep = sum_ll * (one * one) / (d0 * d0)
    upper = err + 1.25 * np.sqrt(BLOCK * err) + 12.5 - steep * near * near
    lower = err0 - np.sqrt(BLOCK * err0) - 8.0
    other = np.sqrt(np.maximum(lower - upper, 0.0) / steep)
    reach = np.where(best == 0, np.abs(d0 - d_ls) - margin, other) - margin

    # 2^-11: what rounding to f16 moves
    room = np.maximum(reach - 2.0**-11 * np.abs(d), 0.0)
    step = np.minimum(np.abs(d - d_ls), room)
    _set_scale(blocks, _clamp(np.where(plain, d_ls + np.where(d_ls < 0, -step, step), d)))
    return np.asarray(plain & (np.abs(_scales(blocks) - d_ls) < reach))


def _clamp(d: Array) -> Array:
    """Scales in float64 to float32, as far as f16 reaches."""
    return np.asarray(np.clip(d, -float(_MAX_SCALE), float(_MAX_SCALE)).astype(_f32))


def _sum(terms: Array) -> Array:
    """Sums (n,) of (n, 32) in float64, in the order of the C code."""
    total = np.zeros(len(terms))
    for i in range(BLOCK):
        total += terms[:, i]
    return total


def _keep_bound(f: Format, x: Array, blocks: Array, absmax: Array) -> None:
    """``kvq_keep_bound``: takes scales of ``blocks`` back as far as the error would be above that of ``absmax``.

    Args:
        x: float32, shape (n, 32).
        blocks: uint8, shape (n, bytes); changed in place.
        absmax: uint8, shape (n, bytes), the path of candidate 0 with the first scale.
    """
    v = x.astype(np.float64)

    def error(levels: Array, d: Array) -> Array:
        return _sum(np.square(v - d[:, None] * levels))

    bound = error(_levels(f, absmax).astype(np.float64), _scales(absmax))
    levels = _levels(f, blocks).astype(np.float64)
    above = error(levels, _scales(blocks)) > bound
    if not above.any():
        return
    v, levels, bound = v[above], levels[above], bound[above]
    sum_ll = _sum(levels * levels)
    d_ls = _sum(v * levels) / sum_ll
    radius = np.sqrt(np.maximum(bound - error(levels, d_ls), 0.0) / sum_ll)
    new = absmax[above]
    left = np.ones(len(new), bool)
    # least squares, the distance from it at which the bound is met, and half of it: f16 may be too coarse
    for k in (2, 1, 0):
        taken = blocks[above]
        _set_scale(taken, _clamp(d_ls + np.where(d_ls < 0, -0.5, 0.5) * k * radius))
        good = left & (error(levels, _scales(taken)) <= bound)
        new[good] = taken[good]
        left &= ~good
    blocks[above] = new


def _search(f: Format, x: Array, d0: Array) -> Tuple[Array, Array, Array, Array]:
    """The best path for each of the scales that the encoder tries.

    Args:
        x: float32, finite, shape (n, 32).
        d0: float32, shape (n,), the first scales; not 0.

    Returns:
        y: int32, shape (32, tries, n), values by step in 1/64 of a level's unit.
        came, end: as :func:`_viterbi` gives them for y.
        err: float32, shape (tries, n), squared errors in units of the first try's y.
    """
    tries = np.array(f.tries, _f32)[:, None] / _f32(256.0)
    inv = _f32(_Y_ONE) / (d0 * tries)
    v = np.rint(x.T[f.path_to_row()][:, None, :] * inv)
    y = np.clip(v, _f32(-_Y_MAX), _f32(_Y_MAX)).astype(np.int32)
    came, end, cost = _viterbi(f, y)
    return y, came, end, cost.astype(_f32) * (tries * tries)


def _first_blocks(f: Format, d0: Array, y: Array, came: Array, end: Array) -> Array:
    """Blocks (n, bytes) with the path of candidate 0 and the first scale; arguments as :func:`_search` has them."""
    blocks, _, _ = _path_blocks(f, _trace(came[:, :, 0], end[0]), y[:, 0])
    _set_scale(blocks, d0)
    return blocks


def _encode_blocks(f: Format, x: Array, shortcut: bool = True) -> Array:
    """(n, 32) float32 -> (n, bytes). Without ``shortcut`` every block's error is compared: same bytes."""
    out = np.zeros((len(x), f.bytes), np.uint8)
    finite = np.isfinite(x).all(axis=1)
    _set_scale(out, np.where(finite, _f32(0), _f32(np.nan)))

    d0 = np.zeros(len(x), _f32)
    d0[finite] = _first_scale(f, x[finite])
    live = d0 != 0
    x, d0 = x[live], d0[live]
    n = len(x)
    if n == 0:
        return out

    y, came, end, err = _search(f, x, d0)
    best = np.argmin(err, axis=0)
    i = np.arange(n)

    blocks, sum_yl, sum_ll = _path_blocks(f, _trace(came[:, :, best, i], end[best, i]), y[:, best, i])
    sure = _choose_scale(f, blocks, best, err[best, i], err[0], d0, sum_yl, sum_ll)
    unsure = ~sure if shortcut else np.ones(n, bool)
    if unsure.any():
        absmax = _first_blocks(f, d0[unsure], y[:, :, unsure], came[..., unsure], end[:, unsure])
        kept = blocks[unsure]
        _keep_bound(f, x[unsure], kept, absmax)
        blocks[unsure] = kept
    out[live] = blocks
    return out


def _rows(x: Array) -> Array:
    x = np.asarray(x)
    if not np.issubdtype(x.dtype, np.floating):
        raise ValueError(f"x: dtype is {x.dtype}, not a floating-point type")
    if x.ndim == 0 or x.shape[-1] % BLOCK:
        raise ValueError(f"x: the last axis of shape {x.shape} is no multiple of {BLOCK}, the values of a block")
    with np.errstate(over="ignore"):
        return np.asarray(x, _f32)


def encode(name: Union[str, Format], x: Array) -> Array:
    """Stored blocks of values, byte for byte those of ``kvq_encode_block_ref``.

    Args:
        name: of the format.
        x: any floating-point type, shape (..., n) with n a multiple of 32. Rounded to float32 first.

    Returns:
        uint8, shape (..., n / 32 * bytes).

    Raises:
        ValueError: no such format, or ``x`` isn't rows of whole blocks of floating-point values.
    """
    f = get(name)
    x = _rows(x)
    blocks = x.reshape(-1, BLOCK)
    out = np.empty((len(blocks), f.bytes), np.uint8)
    # a block of huge values overflows to inf on its way to a clamp
    with np.errstate(over="ignore", under="ignore"):
        for i in range(0, len(blocks), _CHUNK):
            out[i : i + _CHUNK] = _encode_blocks(f, blocks[i : i + _CHUNK])
    return out.reshape(*x.shape[:-1], x.shape[-1] // BLOCK * f.bytes)


def nse(x: Array, y: Array) -> float:
    """Normalized squared error ``sum (x - y)^2 / sum x^2``, summed in float64; a ratio without unit.

    Raises:
        ValueError: the shapes differ, or ``x`` is all zeros.
    """
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    if x.shape != y.shape:
        raise ValueError(f"y: shape {y.shape} differs from that of x, {x.shape}")
    total = float(np.square(x).sum())
    if total == 0:
        raise ValueError("x: all values are zero, so no error relative to them is defined")
    return float(np.square(x - y).sum()) / total


# ---- the C code, of these formats and of upstream's block types

_RowFn = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)


class _TypeTraits(ctypes.Structure):
    """Mirror of ``struct ggml_type_traits``."""

    _fields_ = [
        ("type_name", ctypes.c_char_p),
        ("blck_size", ctypes.c_int64),
        ("blck_size_interleave", ctypes.c_int64),
        ("type_size", ctypes.c_size_t),
        ("is_quantized", ctypes.c_bool),
        ("to_float", _RowFn),
        ("from_float_ref", _RowFn),
    ]


class Library:
    """Reference encoders and decoders of the built libggml-base, for any block type that a cache may have.

    The encoder is ``from_float_ref``, the plain C that a CPU cache falls back to, not the slower search that
    ``ggml_quantize_chunk`` does for some of upstream's types when it writes model files.

    Args:
        path: of libggml-base; without it, the one beside libllama.

    Raises:
        NativeMissingError: there is none.
    """

    def __init__(self, path: Optional[Path] = None) -> None:
        if path is None:
            llama = native.library_path()
            path = llama.with_name(llama.name.replace("llama", "ggml-base"))
        try:
            self._lib = ctypes.CDLL(str(path))
        except OSError as e:
            raise NativeMissingError(f"{path} can't be loaded: {e}") from e
        self.path = path
        self._lib.ggml_get_type_traits.restype = ctypes.POINTER(_TypeTraits)
        self._lib.ggml_get_type_traits.argtypes = [ctypes.c_int]
        self._lib.ggml_quantize_chunk.restype = ctypes.c_size_t
        self._lib.ggml_quantize_chunk.argtypes = [
            ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p,
            ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p,
        ]  # fmt: skip

    def _traits(self, name: str) -> Tuple[int, _TypeTraits]:
        # an id beyond the library's table would be read behind its end, so ours need a sign that they are there
        if name in FORMATS:
            if not hasattr(self._lib, "kvq_get_format"):
                raise NativeMismatchError(f"{self.path} was built without {name}; build it again from this source tree")
            ggml_id = FORMATS[name].ggml_id
        elif name in BY_NAME and BY_NAME[name].block == BLOCK:
            ggml_id = BY_NAME[name].ggml_id
        else:
            raise ValueError(f"name: no block type of a cache is called {name!r}")
        traits = self._lib.ggml_get_type_traits(ggml_id).contents
        if traits.type_name != name.encode():
            raise NativeMismatchError(f"{self.path} calls type {ggml_id} {traits.type_name!r}, not {name}")
        return ggml_id, traits

    def bits_per_value(self, name: str) -> float:
        """Storage of one value, scales included, in bits."""
        _, traits = self._traits(name)
        return 8.0 * int(traits.type_size) / int(traits.blck_size)

    def encode(self, name: str, x: Array) -> Array:
        """As :func:`encode`, by the type's ``from_float_ref``."""
        _, traits = self._traits(name)
        x = np.ascontiguousarray(_rows(x))
        out = np.zeros((*x.shape[:-1], x.shape[-1] // BLOCK * int(traits.type_size)), np.uint8)
        if x.size:
            traits.from_float_ref(x.ctypes.data, out.ctypes.data, x.size)
        return out

    def quantize(self, name: str, x: Array) -> Array:
        """As :func:`encode`, by ``ggml_quantize_chunk`` without an importance matrix."""
        ggml_id, traits = self._traits(name)
        x = np.ascontiguousarray(_rows(x))
        out = np.zeros((*x.shape[:-1], x.shape[-1] // BLOCK * int(traits.type_size)), np.uint8)
        if x.size:
            n_rows = x.size // x.shape[-1]
            self._lib.ggml_quantize_chunk(ggml_id, x.ctypes.data, out.ctypes.data, 0, n_rows, x.shape[-1], None)
        return out

    def decode(self, name: str, data: Array) -> Array:
        """As :func:`decode`, by the type's ``to_float``."""
        _, traits = self._traits(name)
        size = int(traits.type_size)
        data = np.ascontiguousarray(data, np.uint8)
        if data.ndim == 0 or data.shape[-1] % size:
            raise ValueError(f"data: the last axis of shape {data.shape} is no multiple of {size}, a block of {name}")
        x = np.empty((*data.shape[:-1], data.shape[-1] // size * BLOCK), _f32)
        if x.size:
            traits.to_float(data.ctypes.data, x.ctypes.data, x.size)
        return x
