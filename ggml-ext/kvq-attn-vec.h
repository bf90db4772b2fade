// SPDX-License-Identifier: MIT
//
// Vectors of floats for kvq-attn.cpp, one set of names for every instruction set:
//     kvq_vf, KVQ_VF (its lanes, which divide 16), load, store, set1, add, mul, fma, max, and what is named below

#pragma once

#include "ggml.h"

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(_MSC_VER)
#define KVQ_INLINE static __forceinline
#define KVQ_UNROLL
#else
#define KVQ_INLINE static inline __attribute__((always_inline))
#if defined(__clang__)
#define KVQ_UNROLL _Pragma("unroll")
#else
#define KVQ_UNROLL _Pragma("GCC unroll 16")
#endif
#endif

// the largest 16-bit number in use, 127*256: its halves fit 8 bits with a sign
#define KVQ_LEVELS_MAX 32512.0f

// exp(x) = 2^n exp(r), r in [-ln(2)/2, ln(2)/2]; exp(r) = 1 + r + r^2 p(r). p interpolates at Chebyshev's points, its relative
// error is 1.1e-8; the rest are roundings. ln(2) in two parts: n times the upper one is exact.
#define KVQ_EXP_LOG2E  1.44269504f
#define KVQ_EXP_LN2_HI 0.693359375f
#define KVQ_EXP_LN2_LO (-2.12194440e-4f)
#define KVQ_EXP_P0     0.5f
#define KVQ_EXP_P1     0.16666576f
#define KVQ_EXP_P2     0.041666556f
#define KVQ_EXP_P3     0.0083631789f
#define KVQ_EXP_P4     0.0013926184f
#define KVQ_EXP_MIN    (-87.0f) // below, the result is 0
#define KVQ_EXP_MAX    88.0f

#if !defined(KVQ_CPU_GENERIC) && defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)

#include <immintrin.h>

#if defined(__AVX512VNNI__) && defined(__AVX512VBMI__) && defined(__AVX512VBMI2__)
#define KVQ_ATTN_LEVELS_AVX512
#define KVQ_ATTN_NAME "avx512-vnni"
#else
#define KVQ_ATTN_NAME "avx512"
#endif

#define KVQ_VF    16
#define KVQ_VF_NC 4 // vectors of a row in a register tile

typedef __m512 kvq_vf;

KVQ_INLINE kvq_vf kvq_vf_load (const float * p)                { return _mm512_loadu_ps(p); }
KVQ_INLINE void   kvq_vf_store(float * p, kvq_vf x)            { _mm512_storeu_ps(p, x); }
KVQ_INLINE kvq_vf kvq_vf_set1 (float x)                        { return _mm512_set1_ps(x); }
KVQ_INLINE kvq_vf kvq_vf_add  (kvq_vf a, kvq_vf b)             { return _mm512_add_ps(a, b); }
KVQ_INLINE kvq_vf kvq_vf_mul  (kvq_vf a, kvq_vf b)             { return _mm512_mul_ps(a, b); }
KVQ_INLINE kvq_vf kvq_vf_fma  (kvq_vf a, kvq_vf b, kvq_vf c)   { return _mm512_fmadd_ps(a, b, c); }
KVQ_INLINE kvq_vf kvq_vf_max  (kvq_vf a, kvq_vf b)             { return _mm512_max_ps(a, b); }
KVQ_INLINE kvq_vf kvq_vf_div  (kvq_vf a, kvq_vf b)             { return _mm512_div_ps(a, b); }
KVQ_INLINE kvq_vf kvq_vf_abs  (kvq_vf a)                       { return _mm512_abs_ps(a); }
KVQ_INLINE kvq_vf kvq_vf_f16  (const ggml_fp16_t * p)          { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *) p)); }
KVQ_INLINE float  kvq_vf_sum  (kvq_vf a)                       { return _mm512_reduce_add_ps(a); }
KVQ_INLINE float  kvq_vf_top  (kvq_vf a)                       { return _mm512_reduce_max_ps(a); }
// a where m is -inf, else b
KVQ_INLINE kvq_vf kvq_vf_masked(kvq_vf m, kvq_vf a, kvq_vf b) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(m, _mm512_set1_ps(-INFINITY), _CMP_EQ_OQ), b, a);
}
// sign of s on the magnitude a >= 0
KVQ_INLINE kvq_vf kvq_vf_sign(kvq_vf a, kvq_vf s) {
    return _mm512_or_ps(a, _mm512_and_ps(s, _mm512_set1_ps(-0.0f)));
}

KVQ_INLINE kvq_vf kvq_vf_exp(kvq_vf x) {
    const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(KVQ_EXP_LOG2E)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(KVQ_EXP_LN2_HI), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(KVQ_EXP_LN2_LO), r);
    __m512 p = _mm512_fmadd_ps(_mm512_set1_ps(KVQ_EXP_P4), r, _mm512_set1_ps(KVQ_EXP_P3));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(KVQ_EXP_P2));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(KVQ_EXP_P1));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(KVQ_EXP_P0));
    p = _mm512_fmadd_ps(p, _mm512_mul_ps(r, r), r);
    p = _mm512_add_ps(p, _mm512_set1_ps(1.0f));
    p = _mm512_scalef_ps(p, n);
    // not less than the smallest, or NaN
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(KVQ_EXP_MIN), _CMP_NLT_UQ), p);
}

// 16 rows of 16 floats, src[j] to column j of dst
KVQ_INLINE void kvq_vf_transpose_16x16(const float * const src[16], float * dst, int64_t dst_stride) {
    __m512 a[16], b[16];
    KVQ_UNROLL
    for (int i = 0; i < 16; i++) {
        a[i] = _mm512_loadu_ps(src[i]);
    }
    KVQ_UNROLL
    for (int i = 0; i < 16; i += 4) {
        const __m512 t0 = _mm512_unpacklo_ps(a[i],     a[i + 1]);
        const __m512 t1 = _mm512_unpackhi_ps(a[i],     a[i + 1]);
        const __m512 t2 = _mm512_unpacklo_ps(a[i + 2], a[i + 3]);
        const __m512 t3 = _mm512_unpackhi_ps(a[i + 2], a[i + 3]);
        b[i]     = _mm512_shuffle_ps(t0, t2, 0x44);
        b[i + 1] = _mm512_shuffle_ps(t0, t2, 0xee);
        b[i + 2] = _mm512_shuffle_ps(t1, t3, 0x44);
        b[i + 3] = _mm512_shuffle_ps(t1, t3, 0xee);
    }
    KVQ_UNROLL
    for (int i = 0; i < 4; i++) { // lane l of b[i + 4 g]: rows 4 g .. 4 g + 3 of column 4 l + i
        const __m512 t0 = _mm512_shuffle_f32x4(b[i],     b[i + 4],  0x44);
        const __m512 t1 = _mm512_shuffle_f32x4(b[i],     b[i + 4],  0xee);
        const __m512 t2 = _mm512_shuffle_f32x4(b[i + 8], b[i + 12], 0x44);
        const __m512 t3 = _mm512_shuffle_f32x4(b[i + 8], b[i + 12], 0xee);
        _mm512_storeu_ps(dst + (i     )*dst_stride, _mm512_shuffle_f32x4(t0, t2, 0x88));
        _mm512_storeu_ps(dst + (i +  4)*dst_stride, _mm512_shuffle_f32x4(t0, t2, 0xdd));
        _mm512_storeu_ps(dst + (i +  8)*dst_stride, _mm512_shuffle_f32x4(t1, t3, 0x88));
        _mm512_storeu_ps(dst + (i + 12)*dst_stride, _mm512_shuffle_f32x4(t1, t3, 0xdd));
    }
}

#elif !defined(KVQ_CPU_GENERIC) && defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

#include <immintrin.h>

#define KVQ_ATTN_NAME "avx2"

#define KVQ_VF    8
#define KVQ_VF_NC 2

typedef __m256 kvq_vf;

KVQ_INLINE kvq_vf kvq_vf_load (const float * p)                { return _mm256_loadu_ps(p); }
KVQ_INLINE void   kvq_vf_store(float * p, kvq_vf x)            { _mm256_storeu_ps(p, x); }
KVQ_INLINE kvq_vf kvq_vf_set1 (float x)                        { return _mm256_set1_ps(x); }
KVQ_INLINE kvq_vf kvq_vf_add  (kvq_vf a, kvq_vf b)             { return _mm256_add_ps(a, b); }
KVQ_INLINE kvq_vf kvq_vf_mul  (kvq_vf a, kvq_vf b)             { return _mm256_mul_ps(a, b); }
KVQ_INLINE kvq_vf kvq_vf_fma  (kvq_vf a, kvq_vf b, kvq_vf c)   { return _mm256_fmadd_ps(a, b, c); }
KVQ_INLINE kvq_vf kvq_vf_max  (kvq_vf a, kvq_vf b)             { return _mm256_max_ps(a, b); }
KVQ_INLINE kvq_vf kvq_vf_div  (kvq_vf a, kvq_vf b)             { return _mm256_div_ps(a, b); }
KVQ_INLINE kvq_vf kvq_vf_abs  (kvq_vf a)                       { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
KVQ_INLINE kvq_vf kvq_vf_f16  (const ggml_fp16_t * p)          { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *) p)); }
KVQ_INLINE float  kvq_vf_sum  (kvq_vf a) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
KVQ_INLINE float  kvq_vf_top  (kvq_vf a) {
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}
KVQ_INLINE kvq_vf kvq_vf_masked(kvq_vf m, kvq_vf a, kvq_vf b) {
    return _mm256_blendv_ps(b, a, _mm256_cmp_ps(m, _mm256_set1_ps(-INFINITY), _CMP_EQ_OQ));
}
KVQ_INLINE kvq_vf kvq_vf_sign(kvq_vf a, kvq_vf s) {
    return _mm256_or_ps(a, _mm256_and_ps(s, _mm256_set1_ps(-0.0f)));
}

KVQ_INLINE kvq_vf kvq_vf_exp(kvq_vf x) {
    const __m256 c = _mm256_min_ps(_mm256_set1_ps(KVQ_EXP_MAX), _mm256_max_ps(_mm256_set1_ps(KVQ_EXP_MIN), x)); // keeps a NaN
    const __m256 n = _mm256_round_ps(_mm256_mul_ps(c, _mm256_set1_ps(KVQ_EXP_LOG2E)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(KVQ_EXP_LN2_HI), c);
    r = _mm256_fnmadd_ps(n, _mm256_set1_ps(KVQ_EXP_LN2_LO), r);
    __m256 p = _mm256_fmadd_ps(_mm256_set1_ps(KVQ_EXP_P4), r, _mm256_set1_ps(KVQ_EXP_P3));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(KVQ_EXP_P2));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(KVQ_EXP_P1));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(KVQ_EXP_P0));
    p = _mm256_fmadd_ps(p, _mm256_mul_ps(r, r), r);
    p = _mm256_add_ps(p, _mm256_set1_ps(1.0f));
    const __m256i e = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    p = _mm256_mul_ps(p, _mm256_castsi256_ps(e));
    p = _mm256_and_ps(p, _mm256_cmp_ps(x, _mm256_set1_ps(KVQ_EXP_MIN), _CMP_NLT_UQ));
    return _mm256_add_ps(p, _mm256_and_ps(x, _mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
}

KVQ_INLINE void kvq_vf_transpose_8x8(const float * const src[8], int64_t at, float * dst, int64_t dst_stride) {
    __m256 a[8], b[8];
    KVQ_UNROLL
    for (int i = 0; i < 8; i++) {
        a[i] = _mm256_loadu_ps(src[i] + at);
    }
    KVQ_UNROLL
    for (int i = 0; i < 8; i += 4) {
        const __m256 t0 = _mm256_unpacklo_ps(a[i],     a[i + 1]);
        const __m256 t1 = _mm256_unpackhi_ps(a[i],     a[i + 1]);
        const __m256 t2 = _mm256_unpacklo_ps(a[i + 2], a[i + 3]);
        const __m256 t3 = _mm256_unpackhi_ps(a[i + 2], a[i + 3]);
        b[i]     = _mm256_shuffle_ps(t0, t2, 0x44);
        b[i + 1] = _mm256_shuffle_ps(t0, t2, 0xee);
        b[i + 2] = _mm256_shuffle_ps(t1, t3, 0x44);
        b[i + 3] = _mm256_shuffle_ps(t1, t3, 0xee);
    }
    KVQ_UNROLL
    for (int i = 0; i < 4; i++) {
        _mm256_storeu_ps(dst + (i    )*dst_stride, _mm256_permute2f128_ps(b[i], b[i + 4], 0x20));
        _mm256_storeu_ps(dst + (i + 4)*dst_stride, _mm256_permute2f128_ps(b[i], b[i + 4], 0x31));
    }
}

KVQ_INLINE void kvq_vf_transpose_16x16(const float * const src[16], float * dst, int64_t dst_stride) {
    for (int i = 0; i < 16; i += 8) {
        kvq_vf_transpose_8x8(src,     i, dst + i*dst_stride,     dst_stride);
        kvq_vf_transpose_8x8(src + 8, i, dst + i*dst_stride + 8, dst_stride);
    }
}

#elif !defined(KVQ_CPU_GENERIC) && defined(__ARM_NEON) && defined(__aarch64__)

#include <arm_neon.h>

#if defined(__ARM_FEATURE_DOTPROD)
#define KVQ_ATTN_LEVELS_NEON
#if defined(__ARM_FEATURE_MATMUL_INT8)
#define KVQ_ATTN_NAME "neon-i8mm"
#else
#define KVQ_ATTN_NAME "neon-dotprod"
#endif
#else
#define KVQ_ATTN_NAME "neon"
#endif

#define KVQ_VF    4
#define KVQ_VF_NC 4

typedef float32x4_t kvq_vf;

KVQ_INLINE kvq_vf kvq_vf_load (const float * p)                { return vld1q_f32(p); }
KVQ_INLINE void   kvq_vf_store(float * p, kvq_vf x)            { vst1q_f32(p, x); }
KVQ_INLINE kvq_vf kvq_vf_set1 (float x)                        { return vdupq_n_f32(x); }
KVQ_INLINE kvq_vf kvq_vf_add  (kvq_vf a, kvq_vf b)             { return vaddq_f32(a, b); }
KVQ_INLINE kvq_vf kvq_vf_mul  (kvq_vf a, kvq_vf b)             { return vmulq_f32(a, b); }
KVQ_INLINE kvq_vf kvq_vf_fma  (kvq_vf a, kvq_vf b, kvq_vf c)   { return vfmaq_f32(c, a, b); }
KVQ_INLINE kvq_vf kvq_vf_max  (kvq_vf a, kvq_vf b)             { return vmaxnmq_f32(a, b); }
KVQ_INLINE kvq_vf kvq_vf_div  (kvq_vf a, kvq_vf b)             { return vdivq_f32(a, b); }
KVQ_INLINE kvq_vf kvq_vf_abs  (kvq_vf a)                       { return vabsq_f32(a); }
KVQ_INLINE kvq_vf kvq_vf_f16  (const ggml_fp16_t * p)          { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
KVQ_INLINE float  kvq_vf_sum  (kvq_vf a)                       { return vaddvq_f32(a); }
KVQ_INLINE float  kvq_vf_top  (kvq_vf a)                       { return vmaxnmvq_f32(a); }
KVQ_INLINE kvq_vf kvq_vf_masked(kvq_vf m, kvq_vf a, kvq_vf b)  { return vbslq_f32(vceqq_f32(m, vdupq_n_f32(-INFINITY)), a, b); }
KVQ_INLINE kvq_vf kvq_vf_sign (kvq_vf a, kvq_vf s) {
    return vbslq_f32(vdupq_n_u32(0x80000000u), s, a);
}

KVQ_INLINE kvq_vf kvq_vf_exp(kvq_vf x) {
    const float32x4_t c = vminq_f32(vdupq_n_f32(KVQ_EXP_MAX), vmaxq_f32(vdupq_n_f32(KVQ_EXP_MIN), x)); // keeps a NaN
    const float32x4_t n = vrndnq_f32(vmulq_f32(c, vdupq_n_f32(KVQ_EXP_LOG2E)));
    float32x4_t r = vfmsq_f32(c, n, vdupq_n_f32(KVQ_EXP_LN2_HI));
    r = vfmsq_f32(r, n, vdupq_n_f32(KVQ_EXP_LN2_LO));
    float32x4_t p = vfmaq_f32(vdupq_n_f32(KVQ_EXP_P3), vdupq_n_f32(KVQ_EXP_P4), r);
    p = vfmaq_f32(vdupq_n_f32(KVQ_EXP_P2), p, r);
    p = vfmaq_f32(vdupq_n_f32(KVQ_EXP_P1), p, r);
    p = vfmaq_f32(vdupq_n_f32(KVQ_EXP_P0), p, r);
    p = vfmaq_f32(r, p, vmulq_f32(r, r));
    p = vaddq_f32(p, vdupq_n_f32(1.0f));
    const int32x4_t e = vshlq_n_s32(vaddq_s32(vcvtnq_s32_f32(n), vdupq_n_s32(127)), 23);
    p = vmulq_f32(p, vreinterpretq_f32_s32(e));
    return vbslq_f32(vcltq_f32(x, vdupq_n_f32(KVQ_EXP_MIN)), vdupq_n_f32(0.0f), p);
}

KVQ_INLINE void kvq_vf_transpose_16x16(const float * const src[16], float * dst, int64_t dst_stride) {
    for (int j = 0; j < 16; j += 4) {
        for (int i = 0; i < 16; i += 4) {
            const float32x4x2_t t0 = vtrnq_f32(vld1q_f32(src[j]     + i), vld1q_f32(src[j + 1] + i));
            const float32x4x2_t t1 = vtrnq_f32(vld1q_f32(src[j + 2] + i), vld1q_f32(src[j + 3] + i));
            vst1q_f32(dst + (i    )*dst_stride + j, vcombine_f32(vget_low_f32 (t0.val[0]), vget_low_f32 (t1.val[0])));
            vst1q_f32(dst + (i + 1)*dst_stride + j, vcombine_f32(vget_low_f32 (t0.val[1]), vget_low_f32 (t1.val[1])));
            vst1q_f32(dst + (i + 2)*dst_stride + j, vcombine_f32(vget_high_f32(t0.val[0]), vget_high_f32(t1.val[0])));
            vst1q_f32(dst + (i + 3)*dst_stride + j, vcombine_f32(vget_high_f32(t0.val[1]), vget_high_f32(t1.val[1])));
        }
    }
}

#else

#define KVQ_ATTN_NAME "generic"

#define KVQ_VF    4 // what a compiler makes vectors of, on most CPUs
#define KVQ_VF_NC 2

struct kvq_vf { float v[KVQ_VF]; };

#define KVQ_VF_EACH(expr) kvq_vf y; for (int i = 0; i < KVQ_VF; i++) { y.v[i] = (expr); } return y

KVQ_INLINE kvq_vf kvq_vf_load (const float * p)                { kvq_vf y; memcpy(&y, p, sizeof(y)); return y; }
KVQ_INLINE void   kvq_vf_store(float * p, kvq_vf x)            { memcpy(p, &x, sizeof(x)); }
KVQ_INLINE kvq_vf kvq_vf_set1 (float x)                        { KVQ_VF_EACH(x); }
KVQ_INLINE kvq_vf kvq_vf_add  (kvq_vf a, kvq_vf b)             { KVQ_VF_EACH(a.v[i] + b.v[i]); }
KVQ_INLINE kvq_vf kvq_vf_mul  (kvq_vf a, kvq_vf b)             { KVQ_VF_EACH(a.v[i]*b.v[i]); }
KVQ_INLINE kvq_vf kvq_vf_fma  (kvq_vf a, kvq_vf b, kvq_vf c)   { KVQ_VF_EACH(a.v[i]*b.v[i] + c.v[i]); }
KVQ_INLINE kvq_vf kvq_vf_max  (kvq_vf a, kvq_vf b)             { KVQ_VF_EACH(a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
KVQ_INLINE kvq_vf kvq_vf_div  (kvq_vf a, kvq_vf b)             { KVQ_VF_EACH(a.v[i]/b.v[i]); }
KVQ_INLINE kvq_vf kvq_vf_abs  (kvq_vf a)                       { KVQ_VF_EACH(fabsf(a.v[i])); }
KVQ_INLINE kvq_vf kvq_vf_f16  (const ggml_fp16_t * p)          { KVQ_VF_EACH(ggml_fp16_to_fp32(p[i])); }
KVQ_INLINE kvq_vf kvq_vf_masked(kvq_vf m, kvq_vf a, kvq_vf b)  { KVQ_VF_EACH(m.v[i] == -INFINITY ? a.v[i] : b.v[i]); }
KVQ_INLINE kvq_vf kvq_vf_sign (kvq_vf a, kvq_vf s)             { KVQ_VF_EACH(copysignf(a.v[i], s.v[i])); }
KVQ_INLINE float  kvq_vf_sum  (kvq_vf a)                       { return (a.v[0] + a.v[1]) + (a.v[2] + a.v[3]); }
KVQ_INLINE float  kvq_vf_top  (kvq_vf a) {
    float m = a.v[0];
    for (int i = 1; i < KVQ_VF; i++) {
        m = a.v[i] > m ? a.v[i] : m;
    }
    return m;
}

KVQ_INLINE kvq_vf kvq_vf_exp(kvq_vf x) {
    kvq_vf y;
    for (int i = 0; i < KVQ_VF; i++) {
        const float c = x.v[i] < KVQ_EXP_MIN ? KVQ_EXP_MIN : x.v[i] > KVQ_EXP_MAX ? KVQ_EXP_MAX : x.v[i];
        // adding and subtracting 1.5 * 2^23 rounds to a whole number; its low bits are the number
        const float   big = c*KVQ_EXP_LOG2E + 12582912.0f;
        const float   n   = big - 12582912.0f;
        int32_t bits;
        memcpy(&bits, &big, sizeof(bits));
        const float r = (c - n*KVQ_EXP_LN2_HI) - n*KVQ_EXP_LN2_LO;
        const float p = (((KVQ_EXP_P4*r + KVQ_EXP_P3)*r + KVQ_EXP_P2)*r + KVQ_EXP_P1)*r + KVQ_EXP_P0;
        const uint32_t e = ((uint32_t) bits + 127u) << 23;
        float two_n;
        memcpy(&two_n, &e, sizeof(two_n));
        const float v = (1.0f + (r + p*(r*r)))*two_n;
        y.v[i] = x.v[i] < KVQ_EXP_MIN ? 0.0f : x.v[i] != x.v[i] ? x.v[i] : v;
    }
    return y;
}

KVQ_INLINE void kvq_vf_transpose_16x16(const float * const src[16], float * dst, int64_t dst_stride) {
    for (int j = 0; j < 16; j++) {
        for (int i = 0; i < 16; i++) {
            dst[i*dst_stride + j] = src[j][i];
        }
    }
}

#endif
