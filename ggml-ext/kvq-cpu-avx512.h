// SPDX-License-Identifier: MIT
//
// AVX-512 with F, BW, DQ and VL; VNNI and VBMI where they are there. Included by kvq-cpu.c alone.

#pragma once

#include "kvq-cpu-x86.h"

#define KVQ_CPU_NAME "avx512"

KVQ_INLINE void kvq_decode_block(const struct kvq_format * f, const int bits, const void * block, float * x) {
    const __m512  d = _mm512_set1_ps(kvq_load_scale(block));
    const __m256i l = kvq_levels(f, bits, kvq_load_indices(bits, block));
    _mm512_storeu_ps(x,      _mm512_mul_ps(d, _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(l)))));
    _mm512_storeu_ps(x + 16, _mm512_mul_ps(d, _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(l, 1)))));
}

// sum over n_blocks of x (blocks) times y (values)
KVQ_INLINE float kvq_dot_blocks(const struct kvq_format * f, const int bits, const void * x, const float * y, int64_t n_blocks) {
    __m512 sum = _mm512_setzero_ps();
    for (int64_t i = 0; i < n_blocks; i++, y += QK_KVQ) {
        const char *  block = (const char *) x + i*kvq_block_size(bits);
        const __m512  d = _mm512_set1_ps(kvq_load_scale(block));
        const __m256i l = kvq_levels(f, bits, kvq_load_indices(bits, block));
        __m512 p = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(l))), _mm512_loadu_ps(y));
        p   = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(l, 1))), _mm512_loadu_ps(y + 16), p);
        sum = _mm512_fmadd_ps(d, p, sum);
    }
    return _mm512_reduce_add_ps(sum);
}
