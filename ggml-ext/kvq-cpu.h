// SPDX-License-Identifier: MIT
//
// The formats on a CPU: rows of blocks, by the instruction set that this file's user is compiled for.

#pragma once

#include "kvq-formats.h"

#ifdef __cplusplus
extern "C" {
#endif

// n, k: values, multiples of 32. The bytes of quantize_row_* and the values of kvq_dequantize_row_* are those of the
// reference codec, bit by bit.
//
// vec_dot multiplies with the query in f32, not rounded to 8 bits as upstream's types have it: that adds an error of its
// own, and levels go from 8 bits to float in two instructions.
#define KVQ_CPU_DECLARE(name, NAME, bits, n_qs, n_qh)                                                  \
    void quantize_row_##name(const float * x, void * y, int64_t k);                                    \
    void kvq_dequantize_row_##name(const void * x, float * y, int64_t k);                              \
    void ggml_vec_dot_##name##_f32(int n, float * s, size_t bs, const void * vx, size_t bx,            \
                                   const void * vy, size_t by, int nrc);

KVQ_FORMATS(KVQ_CPU_DECLARE)
#undef KVQ_CPU_DECLARE

// entries of ggml-cpu.c's table of types
#define KVQ_CPU_TRAITS(name, NAME, bits, n_qs, n_qh)      \
    [GGML_TYPE_##NAME] = {                                \
        .from_float   = quantize_row_##name,              \
        .vec_dot      = ggml_vec_dot_##name##_f32,        \
        .vec_dot_type = GGML_TYPE_F32,                    \
        .nrows        = 1,                                \
    },

// The decoder of a type: ours by the instruction set, upstream's as they are. Upstream decodes through a table of the
// base library, which is compiled for any CPU.
ggml_to_float_t kvq_to_float(enum ggml_type type);

// A block of n values of a quantized type to f32 or f16.
void kvq_copy_block(enum ggml_type type, const void * block, enum ggml_type type_dst, void * dst, int64_t n);

//
// what isn't a number, in upstream's code
//

// A block of one of upstream's cache types has to be NaN if one of its values isn't finite, as ours are: their encoders look for
// the largest value by comparisons, which pass over a NaN, and give it some level; an infinity may lose its sign.
// x: the k values that y was encoded from. Writes NaN as the scale of such blocks; other types are left alone.
void kvq_mark_nonfinite(enum ggml_type type, const float * x, void * y, int64_t k);

// x += mask, except that -inf in the mask gives -inf whatever x is: a NaN behind a mask is not attended to.
void kvq_add_mask(float * x, const float * mask, int64_t n);

// c += a*b for b with values that aren't finite; a: [m][k], b: [k][n], c: [m][n]. A weight of 0 adds nothing: 0 times NaN would be
// NaN. false, and nothing is done, if all of b is finite.
bool kvq_product_nonfinite(float * c, const float * a, const float * b, int64_t m, int64_t k, int64_t n);

// the path that was compiled in: "generic", "avx2", "avx512" or "neon"
const char * kvq_cpu_name(void);

#ifdef __cplusplus
}
#endif
