// SPDX-License-Identifier: MIT
//
// AVX2 with FMA and F16C. Included by kvq-cpu.c alone.

#pragma once

#include "kvq-cpu-x86.h"

#define KVQ_CPU_NAME "avx2"

KVQ_INLINE void kvq_decode_block(const struct kvq_format * f, const int bits, const void * block, float * x) {
    const __m256  d  = _mm256_set1_ps(kvq_load_scale(block));
    const __m256i l  = kvq_levels(f, bits, kvq_load_indices(bits, block));
    const __m128i l0 = _mm256_castsi256_si128(l);
    const __m128i l1 = _mm256_extracti128_si256(l, 1);
    _mm256_storeu_ps(x +  0, _mm256_mul_ps(d, _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(l0))));
    _mm256_storeu_ps(x +  8, _mm256_mul_ps(d, _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(l0, 8)))));
    _mm256_storeu_ps(x + 16, _mm256_mul_ps(d, _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(l1))));
    _mm256_storeu_ps(x + 24, _mm256_mul_ps(d, _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(l1, 8)))));
}

// sum over n_blocks of x (blocks) times y (values)
KVQ_INLINE float kvq_dot_blocks(const struct kvq_format * f, const int bits, const void * x, const float * y, int64_t n_blocks) {
    __m256 sum0 = _mm256_setzero_ps();
    __m256 sum1 = _mm256_setzero_ps();
    for (int64_t i = 0; i < n_blocks; i++, y += QK_KVQ) {
        const char *  block = (const char *) x + i*kvq_block_size(bits);
        const __m256  d  = _mm256_set1_ps(kvq_load_scale(block));
        const __m256i l  = kvq_levels(f, bits, kvq_load_indices(bits, block));
        const __m128i l0 = _mm256_castsi256_si128(l);
        const __m128i l1 = _mm256_extracti128_si256(l, 1);
        __m256 p0 = _mm256_mul_ps  (_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(l0)),                    _mm256_loadu_ps(y +  0));
        __m256 p1 = _mm256_mul_ps  (_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(l0, 8))), _mm256_loadu_ps(y +  8));
        p0        = _mm256_fmadd_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(l1)),                    _mm256_loadu_ps(y + 16), p0);
        p1        = _mm256_fmadd_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(l1, 8))), _mm256_loadu_ps(y + 24), p1);
        sum0 = _mm256_fmadd_ps(d, p0, sum0);
        sum1 = _mm256_fmadd_ps(d, p1, sum1);
    }
    const __m256 sum = _mm256_add_ps(sum0, sum1);
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(sum), _mm256_extractf128_ps(sum, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    s = _mm_add_ss(s, _mm_movehdup_ps(s));
    return _mm_cvtss_f32(s);
}
