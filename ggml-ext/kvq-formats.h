// SPDX-License-Identifier: MIT
//
// The one table of our own formats: types of a KV cache at 2, 3, 4, 5 and 6 bits.
//
// A block stores 32 values as one scale and 32 levels of a small codebook. Two ideas make it better than rounding:
//
// - Trellis-coded quantization (Marcellin and Fischer, 1990; the trellis is Ungerboeck's with 4 states).
//   The codebook has twice as many levels as the stored bits can name. Of the R bits of a value, one steers a path
//   through a trellis, and the path says which levels are within reach. So every value is rounded as if it had
//   almost one bit more, and the encoder (Viterbi) finds the path with the smallest squared error of the block.
//   A decoder needs no state: which levels are within reach follows from the bits of the two values before.
// - A signed scale, searched, then refitted so that the block is unbiased. The codebook is asymmetric: one extreme level
//   is farther out than the other, and the sign of the scale turns it towards the outlier of the block.
//
// Decoding value t, in the order of the trellis, with b[t] the bit of the path and b[-1] = b[-2] = 0:
//
//     level = codebook[4*e[t] + 2*(b[t] ^ b[t-2]) + b[t-1]],   value = scale * level
//
// where e[t] are the other R-1 bits.
//
// Layout. After the scale come planes of 4, 2 or 1 bits per value: 4 = 4, 5 = 4 + 1, 6 = 4 + 2, 2 = 2, 3 = 2 + 1.
// In a plane of B bytes, value i sits in byte i % B, in field i / B, from the low bits up. So a plane is unpacked by one
// load, shifts of whole registers and a mask, in order, on any vector width, and four values at a time in a 32-bit
// register of a GPU. The low bit of a field of the first plane is b; the path runs along the bits of that plane, so b[t-1]
// and b[t-2] are the whole plane shifted by one and two fields: two shifts and an xor serve all 32 values. The other
// bits of e, low bits first, stand above b in the first plane; the highest ones are in the second plane.
// Measured for 4 bits against a plane for b alone and two for e, decoding a block to f32: 3.9 instead of 4.4 ns and 56 instead
// of 67 instructions with AVX2, 3.3 instead of 4.0 ns with AVX-512 (one core of a Zen 4; see docs/numerics.md).
//
// Ids and layouts are permanent: saved sessions store them.

#pragma once

#include "ggml.h"

#ifdef __cplusplus
extern "C" {
#endif

#define QK_KVQ 32 // values of a block

typedef struct { ggml_fp16_t d; uint8_t qs[ 8];                } block_kvq2;
typedef struct { ggml_fp16_t d; uint8_t qs[ 8]; uint8_t qh[4]; } block_kvq3;
typedef struct { ggml_fp16_t d; uint8_t qs[16];                } block_kvq4;
typedef struct { ggml_fp16_t d; uint8_t qs[16]; uint8_t qh[4]; } block_kvq5;
typedef struct { ggml_fp16_t d; uint8_t qs[16]; uint8_t qh[8]; } block_kvq6;

// The table: name, suffix of the enumerator, bits of a value, bytes of qs, bytes of qh.
// The id is 448 + bits; 448..463 are ours, far from upstream's and from the known forks'.
#define KVQ_FORMATS(X)      \
    X(kvq2, KVQ2, 2,  8, 0) \
    X(kvq3, KVQ3, 3,  8, 4) \
    X(kvq4, KVQ4, 4, 16, 0) \
    X(kvq5, KVQ5, 5, 16, 4) \
    X(kvq6, KVQ6, 6, 16, 8)

#define KVQ_ID_FIRST 448
#define KVQ_ID_LAST  463

// upstream's GGML_TYPE_COUNT, which bindings compiled or written for it pass for `not set`
#define KVQ_UPSTREAM_TYPE_COUNT 43

// case labels for upstream's switches over types
#define KVQ_TYPE_CASES   \
    case GGML_TYPE_KVQ2: \
    case GGML_TYPE_KVQ3: \
    case GGML_TYPE_KVQ4: \
    case GGML_TYPE_KVQ5: \
    case GGML_TYPE_KVQ6

#define KVQ_TYPE_LIST GGML_TYPE_KVQ2, GGML_TYPE_KVQ3, GGML_TYPE_KVQ4, GGML_TYPE_KVQ5, GGML_TYPE_KVQ6

#ifdef __cplusplus
#define KVQ_ALIGN_16 alignas(16)
#else
#define KVQ_ALIGN_16 _Alignas(16)
#endif

#define KVQ_MAX_LEVELS   128
#define KVQ_N_CANDIDATES 4
#define KVQ_Y_ONE        64      // an encoder measures values in 1/64 of a level's unit
#define KVQ_METRIC       16
#define KVQ_Y_MAX        12000   // and clamps them here, so that 32 squared errors fit 31 bits

struct kvq_format {
    enum ggml_type type;
    const char *   name;
    int            bits;
    size_t         size;     // bytes of a block
    size_t         n_qs;     // bytes of the first plane, that carries the path
    size_t         n_qh;     // bytes of the second plane
    int            n_levels; // 2 << bits

    // the codebook, ascending; levels[0] is the extreme that the outlier of a block is scaled to
    int8_t levels[KVQ_MAX_LEVELS];

    // scales that the encoder tries, in 1/256 of (outlier / levels[0]); the first is 256
    int16_t tries[KVQ_N_CANDIDATES];

    // nearest[t + 128][c]: index of the level nearest to t among those with index % 4 == c, the lower one if two are.
    uint8_t nearest[256][4];

    // metric[t + 128][c]: { -KVQ_METRIC*l, l*l } of that level l. As pairs of 16 bits times { y, KVQ_METRIC*KVQ_Y_ONE/2 },
    // one multiply-add gives KVQ_METRIC*(KVQ_Y_ONE/2*l*l - y*l): the squared error less y*y, which all paths share, in
    // units of 2*KVQ_Y_ONE/KVQ_METRIC. An encoder may keep the last choices of a path in the bits below KVQ_METRIC.
    KVQ_ALIGN_16 int16_t metric[256][4][2];

    // nearest by bisection instead of a lookup: for t and c, from h = 1, h = 2*h + (t > split[4*h + c]), bits - 1 times; then
    // nearest[t + 128][c] = 4*h + c - n_levels.
    KVQ_ALIGN_16 int8_t split[KVQ_MAX_LEVELS];
};

// NULL if type is none of ours
GGML_API const struct kvq_format * kvq_get_format(enum ggml_type type);

// Reference codec. k values, a multiple of 32.
// - zeros stay zeros: a block of zeros is stored as zero bytes
// - finite values stay finite: the scale is clamped to what f16 holds (+-65504)
// - values too small for an f16 scale (below about 2^-25 * 100) become zero
// - a block with an inf or a NaN becomes NaN in all its values: what was no number never comes back as a plausible one
// - the squared error of a block is never above that of scaling the outlier to the extreme level, without a search
#define KVQ_DECLARE(name, NAME, bits, n_qs, n_qh)                                                 \
    GGML_API void quantize_row_##name##_ref(const float * x, void * y, int64_t k);                \
    GGML_API void dequantize_row_##name(const void * x, float * y, int64_t k);

KVQ_FORMATS(KVQ_DECLARE)
#undef KVQ_DECLARE

// entries of ggml.c's table of types
#define KVQ_TYPE_TRAITS(name, NAME, bits, n_qs, n_qh)               \
    [GGML_TYPE_##NAME] = {                                          \
        .type_name      = #name,                                    \
        .blck_size      = QK_KVQ,                                   \
        .type_size      = sizeof(block_##name),                     \
        .is_quantized   = true,                                     \
        .to_float       = dequantize_row_##name,                    \
        .from_float_ref = quantize_row_##name##_ref,                \
    },

// One block; x in natural order.
GGML_API void kvq_encode_block_ref(const struct kvq_format * f, const float * x, void * block);
GGML_API void kvq_decode_block_ref(const struct kvq_format * f, const void * block, float * x);

// index in the row of the value at step t of the path
static inline int kvq_path_to_row(const struct kvq_format * f, int t) {
    const int per_byte = f->bits >= 4 ? 2 : 4;
    return (t % per_byte)*(int) f->n_qs + t/per_byte;
}

//
// steps of an encoder that all encoders share, so that they give the same bytes
//

// the unit of a level that y is nearest to, as an index of kvq_format::nearest
static inline int kvq_nearest_unit(int32_t y) {
    const int t = (y + KVQ_Y_ONE/2) >> 6; // KVQ_Y_ONE is 1 << 6
    return t > 127 ? 127 : t < -128 ? -128 : t;
}

// Scale that puts the outlier of a block on levels[0], as f16 holds it; from the largest and the smallest value, both
// finite, at least and at most 0. 0: the block is stored as zeros.
GGML_API float kvq_first_scale(const struct kvq_format * f, float largest, float smallest);

// Puts the scale into a block whose path is that of candidate `best`. It is the one that makes the decoded block unbiased,
// sum x*decoded = sum x*x: d*(sum y*y)/(KVQ_Y_ONE*sum y*level), where least squares has d*(sum y*level)/(KVQ_Y_ONE*sum level^2).
// Least squares shrinks a block by its relative error, and what attention averages over many rows keeps the shrinkage,
// while the rest of the error averages out. The price in squared error is a factor 1/(1 - relative error); where that would
// bring it above the error of candidate 0 with the scale d0, the scale stays as near to unbiased as it may.
// err, err0: squared errors of the best candidate and of candidate 0, in units of candidate 0's y.
// True if the block surely has no larger error than candidate 0 with the scale d0: then an encoder is done. Otherwise it
// calls kvq_keep_bound.
GGML_API bool kvq_set_scale(const struct kvq_format * f, void * block, int best, float err, float err0,
                            float d0, int32_t sum_yl, int32_t sum_ll);

// The same by true errors: takes the block's scale back towards that of least squares as far as its error would be above
// that of `absmax`, a block with the path of candidate 0 and the scale d0; or takes absmax itself.
GGML_API void kvq_keep_bound(const struct kvq_format * f, const float * x, void * block, const void * absmax);

// what ggml_quantize_chunk calls; returns the bytes written
GGML_API size_t kvq_quantize(enum ggml_type type, const float * src, void * dst, int64_t nrows, int64_t n_per_row);

// true if every scale is a finite number
GGML_API bool kvq_validate_rows(enum ggml_type type, const void * data, size_t nbytes);

#ifdef __cplusplus
}
#endif
