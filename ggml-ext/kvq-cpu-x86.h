// SPDX-License-Identifier: MIT
//
// What the paths for AVX2 and AVX-512 share: the encoder, and how a block becomes levels. Registers of 256 bits, also with
// AVX-512: on Zen 4 the search is 6 % faster so than in those of 512 bits, which keep its few shuffle units longer busy.
// There the gain is in 32 registers, VNNI and VBMI. Included by kvq-cpu-avx2.h and kvq-cpu-avx512.h alone.

#pragma once

#include "kvq-formats.h"

#include <immintrin.h>
#include <string.h>

#if defined(_MSC_VER)
#define KVQ_INLINE   static __forceinline // so that the number of bits is a constant
#define KVQ_NOINLINE static __declspec(noinline)
#define KVQ_ALIGN_64 __declspec(align(64))
#else
#define KVQ_INLINE   static inline __attribute__((always_inline))
#define KVQ_NOINLINE static __attribute__((noinline))
#define KVQ_ALIGN_64 _Alignas(64)
#endif

//
// decoding
//

KVQ_INLINE size_t kvq_block_size(const int bits) {
    return sizeof(ggml_fp16_t) + (size_t) (QK_KVQ*bits/8);
}

KVQ_INLINE float kvq_load_scale(const void * block) {
    ggml_fp16_t d;
    memcpy(&d, block, sizeof(d));
    return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(d)));
}

// 32 indices of the codebook, in the order of the row
KVQ_INLINE __m256i kvq_load_indices(const int bits, const void * block) {
    const uint8_t * qs = (const uint8_t *) block + sizeof(ggml_fp16_t);

    // fields of b[t-2] and of b[t-1] are the plane, shifted: e and c1 of a value come together by one xor
    __m256i m;
    if (bits >= 4) {
        const __m256i shift = _mm256_setr_epi64x(0, 0, 4, 4);

        const __m128i x  = _mm_loadu_si128((const __m128i *) qs);
        const __m128i x1 = _mm_slli_si128(x, 1);
        const __m256i p  = _mm256_srlv_epi64(_mm256_broadcastsi128_si256(x),  shift);
        const __m256i b2 = _mm256_srlv_epi64(_mm256_broadcastsi128_si256(x1), shift);
        const __m256i b1 = _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_srli_epi16(x1, 4)), x, 1);

        const __m256i ec = _mm256_xor_si256(p, _mm256_and_si256(b2, _mm256_set1_epi8(1)));
        m = _mm256_or_si256(_mm256_and_si256(_mm256_add_epi8(ec, ec), _mm256_set1_epi8(0x1e)),
                            _mm256_and_si256(b1, _mm256_set1_epi8(1)));
    } else {
        const __m256i shift = _mm256_setr_epi64x(0, 2, 4, 6);

        uint64_t x;
        memcpy(&x, qs, sizeof(x));
        const uint64_t ec = x ^ ((x << 4) & 0x5555555555555555u);
        const __m256i p  = _mm256_srlv_epi64(_mm256_set1_epi64x((int64_t) ec),       shift);
        const __m256i b1 = _mm256_srlv_epi64(_mm256_set1_epi64x((int64_t) (x << 2)), shift);
        m = _mm256_or_si256(_mm256_and_si256(_mm256_add_epi8(p, p), _mm256_set1_epi8(6)),
                            _mm256_and_si256(b1, _mm256_set1_epi8(1)));
    }

    if (bits == 3 || bits == 5) {
        int32_t h;
        memcpy(&h, qs + (bits == 3 ? 8 : 16), sizeof(h));
        const __m256i hv = _mm256_srlv_epi32(_mm256_set1_epi32(h), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
        m = _mm256_or_si256(m, _mm256_slli_epi16(_mm256_and_si256(hv, _mm256_set1_epi8(1)), bits));
    }
    if (bits == 6) {
        int64_t h;
        memcpy(&h, qs + 16, sizeof(h));
        const __m256i hv = _mm256_srlv_epi64(_mm256_set1_epi64x(h), _mm256_setr_epi64x(0, 2, 4, 6));
        m = _mm256_or_si256(m, _mm256_slli_epi16(_mm256_and_si256(hv, _mm256_set1_epi8(3)), 5));
    }
    return m;
}

// 32 levels of 32 indices
KVQ_INLINE __m256i kvq_levels(const struct kvq_format * f, const int bits, __m256i m) {
    const __m128i * levels = (const __m128i *) f->levels;

    if (bits == 2 || bits == 3) {
        return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128(levels)), m);
    }
#if defined(__AVX512VBMI__)
    if (bits == 4) {
        return _mm256_permutexvar_epi8(m, _mm256_loadu_si256((const __m256i *) levels));
    }
    if (bits == 5) {
        return _mm256_permutex2var_epi8(_mm256_loadu_si256((const __m256i *) levels), m, _mm256_loadu_si256((const __m256i *) (levels + 2)));
    }
    return _mm512_castsi512_si256(_mm512_permutex2var_epi8(_mm512_loadu_si512(levels), _mm512_castsi256_si512(m), _mm512_loadu_si512(levels + 4)));
#else
    if (bits == 4) {
        const __m256i lower = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128(levels + 0)), m);
        const __m256i upper = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128(levels + 1)), m);
        return _mm256_blendv_epi8(lower, upper, _mm256_slli_epi16(m, 3));
    }
    // a line with three slopes, see kvq-formats.c: fewer instructions than a lookup in 4 or 8 registers
    const __m256i x = _mm256_sub_epi8(m, _mm256_set1_epi8(bits == 5 ? 32 : 64));
    const __m256i u = _mm256_abs_epi8(x);
    const __m256i v = _mm256_subs_epu8(u, _mm256_set1_epi8(bits == 5 ? 20 : 44));
    const __m256i w = _mm256_subs_epu8(u, _mm256_set1_epi8(bits == 5 ? 28 : 56));
    const __m256i s = _mm256_add_epi8(_mm256_add_epi8(u, v), w);
    const __m256i l = bits == 5 ? _mm256_add_epi8(_mm256_add_epi8(s, s), w) : _mm256_add_epi8(s, w);
    return _mm256_sign_epi8(l, x);
#endif
}

//
// encoding
//
// A block goes through a chain of dependent operations, longer than what a CPU looks ahead. So a batch of blocks goes
// through it stage by stage, and the blocks overlap.
//

#define KVQ_CPU_BATCH 4

// a block in the course of its encoding
struct kvq_search {
    // in groups of eight or four steps
    KVQ_ALIGN_64 int16_t  y     [QK_KVQ/8][KVQ_N_CANDIDATES][8];
    KVQ_ALIGN_64 uint16_t offset[QK_KVQ/8][KVQ_N_CANDIDATES][8]; // of rows of kvq_format::metric, in bytes
    KVQ_ALIGN_64 int32_t  weight[QK_KVQ/4][KVQ_N_CANDIDATES][4]; // what metric is multiplied with: y and a constant

    // Costs of the four states after each group of four steps; a state is the lane 2*b[t] + b[t-1]. Below the cost are the
    // choices of these steps: b[t-5] in bit 0 to b[t-2] in bit 3. Where two paths cost the same, the one of the reference
    // is the one with the smaller choice, so the choices may be compared together with the costs.
    KVQ_ALIGN_64 int32_t cost[QK_KVQ/4][KVQ_N_CANDIDATES][4];

    int32_t sqr[KVQ_N_CANDIDATES]; // sum of y^2
    float   err[KVQ_N_CANDIDATES]; // of the best path
    int     end[KVQ_N_CANDIDATES]; // its last lane
    int     best;                  // candidate
};

#define KVQ_WEIGHT (KVQ_METRIC*KVQ_Y_ONE/2)

// a cost that no path has, so far from overflow that two steps may be added to it
#define KVQ_COST_INF (1 << 30)

// Values of a batch are compared by keys: their bits turned left by one, the sign inverted. The largest key is the
// outlier, and of two of equal magnitude the positive one.
#define KVQ_KEY_MAX 0xfeffffffu // of FLT_MAX

// kvq_first_scale of four blocks, from the largest keys; 0 and above KVQ_KEY_MAX any number
KVQ_INLINE __m128 kvq_first_scales(const struct kvq_format * f, __m128i key) {
    const __m128i sign    = _mm_slli_epi32(_mm_xor_si128(key, _mm_set1_epi32(1)), 31);
    const __m128  outlier = _mm_castsi128_ps(_mm_or_si128(_mm_srli_epi32(key, 1), sign));
    const __m128  d       = _mm_div_ps(outlier, _mm_set1_ps(f->levels[0]));
    const __m128  clamped = _mm_max_ps(_mm_min_ps(d, _mm_set1_ps(65504.0f)), _mm_set1_ps(-65504.0f));
    return _mm_cvtph_ps(_mm_cvtps_ph(clamped, _MM_FROUND_TO_NEAREST_INT));
}

// the largest of four lanes, of four registers
KVQ_INLINE __m128i kvq_max4(__m128i a, __m128i b, __m128i c, __m128i d) {
    const __m128i ab = _mm_max_epu32(_mm_unpacklo_epi32(a, b), _mm_unpackhi_epi32(a, b));
    const __m128i cd = _mm_max_epu32(_mm_unpacklo_epi32(c, d), _mm_unpackhi_epi32(c, d));
    return _mm_max_epu32(_mm_unpacklo_epi64(ab, cd), _mm_unpackhi_epi64(ab, cd));
}

KVQ_INLINE __m128i kvq_sum4(__m128i a, __m128i b, __m128i c, __m128i d) {
    return _mm_hadd_epi32(_mm_hadd_epi32(a, b), _mm_hadd_epi32(c, d));
}

KVQ_INLINE __m128 kvq_load_tries(const struct kvq_format * f) {
    return _mm_mul_ps(_mm_cvtepi32_ps(_mm_cvtepi16_epi32(_mm_loadl_epi64((const __m128i *) f->tries))), _mm_set1_ps(1/256.0f));
}

// x in the order of the path; returns the largest keys
KVQ_INLINE __m128i kvq_load_x(const int bits, const float * x, float * xp) {
    __m256  v[4];
    __m256i key = _mm256_setzero_si256();
    for (int i = 0; i < 4; i++) {
        v[i] = _mm256_loadu_ps(x + 8*i);
        const __m256i vi = _mm256_castps_si256(v[i]);
        key = _mm256_max_epu32(key, _mm256_or_si256(_mm256_add_epi32(vi, vi),
            _mm256_andnot_si256(_mm256_srai_epi32(vi, 31), _mm256_set1_epi32(1))));
    }
    for (int i = 0; i < 2; i++) {
        if (bits >= 4) { // pairs: of v[0] and v[2], then of v[1] and v[3]
            const __m256 lo = _mm256_unpacklo_ps(v[i], v[i + 2]);
            const __m256 hi = _mm256_unpackhi_ps(v[i], v[i + 2]);
            _mm_store_ps(xp + 16*i +  0, _mm256_castps256_ps128(lo));
            _mm_store_ps(xp + 16*i +  4, _mm256_castps256_ps128(hi));
            _mm_store_ps(xp + 16*i +  8, _mm256_extractf128_ps(lo, 1));
            _mm_store_ps(xp + 16*i + 12, _mm256_extractf128_ps(hi, 1));
        } else { // fours: of all
            const __m256d v01 = _mm256_castps_pd(i == 0 ? _mm256_unpacklo_ps(v[0], v[1]) : _mm256_unpackhi_ps(v[0], v[1]));
            const __m256d v23 = _mm256_castps_pd(i == 0 ? _mm256_unpacklo_ps(v[2], v[3]) : _mm256_unpackhi_ps(v[2], v[3]));
            const __m256 lo = _mm256_castpd_ps(_mm256_unpacklo_pd(v01, v23));
            const __m256 hi = _mm256_castpd_ps(_mm256_unpackhi_pd(v01, v23));
            _mm_store_ps(xp + 8*i +  0, _mm256_castps256_ps128(lo));
            _mm_store_ps(xp + 8*i +  4, _mm256_castps256_ps128(hi));
            _mm_store_ps(xp + 8*i + 16, _mm256_extractf128_ps(lo, 1));
            _mm_store_ps(xp + 8*i + 20, _mm256_extractf128_ps(hi, 1));
        }
    }
    return _mm_max_epu32(_mm256_castsi256_si128(key), _mm256_extracti128_si256(key, 1));
}

// values as the candidates measure them; xp: in the order of the path
KVQ_INLINE void kvq_measure(const struct kvq_format * f, const float * xp, float d0, struct kvq_search * s) {
    const __m128 inv   = _mm_div_ps(_mm_set1_ps(KVQ_Y_ONE), _mm_mul_ps(_mm_set1_ps(d0), kvq_load_tries(f)));
    const __m256 y_max = _mm256_set1_ps( KVQ_Y_MAX);
    const __m256 y_min = _mm256_set1_ps(-KVQ_Y_MAX);

    const __m256i weight = _mm256_set1_epi32(KVQ_WEIGHT << 16);

    __m256i sum[2];
    for (int h = 0; h < 2; h++) { // two candidates
        const __m256 inv2 = h == 0 ? _mm256_set_m128(_mm_shuffle_ps(inv, inv, 0x55), _mm_shuffle_ps(inv, inv, 0x00))
                                   : _mm256_set_m128(_mm_shuffle_ps(inv, inv, 0xff), _mm_shuffle_ps(inv, inv, 0xaa));
        sum[h] = _mm256_setzero_si256();
        for (int i = 0; i < QK_KVQ/8; i++) {
            const __m256 x0 = _mm256_broadcast_ps((const __m128 *) (xp + 8*i));
            const __m256 x1 = _mm256_broadcast_ps((const __m128 *) (xp + 8*i + 4));
            // clamped before it is rounded: the same, as the limits are integers
            const __m256i y0 = _mm256_cvtps_epi32(_mm256_max_ps(_mm256_min_ps(_mm256_mul_ps(x0, inv2), y_max), y_min));
            const __m256i y1 = _mm256_cvtps_epi32(_mm256_max_ps(_mm256_min_ps(_mm256_mul_ps(x1, inv2), y_max), y_min));
            const __m256i y  = _mm256_packs_epi32(y0, y1);
            const __m256i t  = _mm256_srai_epi16(_mm256_add_epi16(y, _mm256_set1_epi16(KVQ_Y_ONE/2 + 128*KVQ_Y_ONE)), 6);
            const __m256i u  = _mm256_min_epi16(_mm256_max_epi16(t, _mm256_setzero_si256()), _mm256_set1_epi16(255));
            _mm256_store_si256((__m256i *) s->y     [i]      [2*h], y);
            _mm256_store_si256((__m256i *) s->offset[i]      [2*h], _mm256_slli_epi16(u, 4));
            _mm256_store_si256((__m256i *) s->weight[2*i]    [2*h], _mm256_blend_epi16(y0, weight, 0xaa));
            _mm256_store_si256((__m256i *) s->weight[2*i + 1][2*h], _mm256_blend_epi16(y1, weight, 0xaa));
            sum[h] = _mm256_add_epi32(sum[h], _mm256_madd_epi16(y, y));
        }
    }
    _mm_storeu_si128((__m128i *) s->sqr, kvq_sum4(_mm256_castsi256_si128(sum[0]), _mm256_extracti128_si256(sum[0], 1),
                                                  _mm256_castsi256_si128(sum[1]), _mm256_extracti128_si256(sum[1], 1)));
}

// A block that is stored without a search: of zeros, or NaN where a value is none or infinite. True if it is one.
KVQ_INLINE bool kvq_encode_special(const int bits, void * block, uint32_t key, float d0) {
    if (key > KVQ_KEY_MAX || d0 == 0.0f) {
        const ggml_fp16_t d16 = key > KVQ_KEY_MAX ? 0x7e00 : 0;
        memset(block, 0, kvq_block_size(bits));
        memcpy(block, &d16, sizeof(d16));
        return true;
    }
    return false;
}

// The best candidate. ends: mask of lanes that have the smallest cost of their candidate, four bits each; min: that cost.
KVQ_INLINE void kvq_choose(const struct kvq_format * f, struct kvq_search * s, int ends, __m128i min) {
    // the first state, in the order 0, 2, 1, 3 of the lanes; the first candidate
    static const uint8_t first_lane[16] = { 0, 0, 1, 0, 2, 0, 2, 0, 3, 0, 1, 0, 2, 0, 2, 0 };
    static const uint8_t first_bit [16] = { 0, 0, 1, 0, 2, 0, 1, 0, 3, 0, 1, 0, 2, 0, 1, 0 };

    for (int k = 0; k < KVQ_N_CANDIDATES; k++) {
        s->end[k] = first_lane[(ends >> 4*k) & 15];
    }
    const __m128i c     = _mm_add_epi32(_mm_loadu_si128((const __m128i *) s->sqr), _mm_slli_epi32(min, 7)); // 2*KVQ_Y_ONE is 1 << 7
    const __m128  tries = kvq_load_tries(f);
    const __m128  err   = _mm_mul_ps(_mm_cvtepi32_ps(c), _mm_mul_ps(tries, tries));
    _mm_storeu_ps(s->err, err);

    __m128 low = _mm_min_ps(err, _mm_shuffle_ps(err, err, 0x4e));
    low = _mm_min_ps(low, _mm_shuffle_ps(low, low, 0xb1));
    s->best = first_bit[_mm_movemask_ps(_mm_cmpeq_ps(err, low))];
}

// One step of the trellis for two candidates, as far as lanes go: in lanes 1 and 3 of cost are the upper states that a path
// may come from, and upper states use the levels of lower ones with the other bit. m: rows of kvq_format::metric, w: weights.
KVQ_INLINE __m256i kvq_step(__m256i cost, const char * m0, const char * m1, __m256i w, __m256i choice) {
    const __m256i m     = _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_load_si128((const __m128i *) m0)),
        _mm_load_si128((const __m128i *) m1), 1);
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
    const __m256i dist  = _mm256_dpwssd_epi32(choice, m, w);
#else
    const __m256i dist  = _mm256_add_epi32(_mm256_madd_epi16(m, w), choice);
#endif
    const __m256i lower = _mm256_add_epi32(_mm256_shuffle_epi32(cost, 0x88), dist);
    const __m256i upper = _mm256_add_epi32(_mm256_shuffle_epi32(cost, 0xdd), _mm256_shuffle_epi32(dist, 0x4e));
    return _mm256_min_epi32(lower, upper);
}

// the search over paths and candidates of two blocks, for any number of bits
KVQ_NOINLINE void kvq_search_paths(const struct kvq_format * f, struct kvq_search * s0, struct kvq_search * s1) {
    struct kvq_search * const s[2] = { s0, s1 };
    const char * metric = (const char *) f->metric;

    // b[t-1] of a lane is what the next step chooses: in bit 0 before a group, then one bit higher with each step
    const __m256i choice = _mm256_set1_epi64x((int64_t) 1 << 32);
    const __m256i keep   = _mm256_set1_epi32(-KVQ_METRIC);

    __m256i cost[4]; // two candidates of a block each
    cost[0] = cost[1] = cost[2] = cost[3] = _mm256_setr_epi32(0, KVQ_COST_INF, KVQ_COST_INF, KVQ_COST_INF, 0, KVQ_COST_INF, KVQ_COST_INF, KVQ_COST_INF);

#define KVQ_STEP(k, pair, h, j, choice_j) { \
        const uint16_t * o = &s[k]->offset[i][2*(pair)][4*(h) + (j)];                                                                   \
        const __m256i    w = _mm256_load_si256((const __m256i *) s[k]->weight[2*i + (h)][2*(pair)]);                                    \
        cost[2*(k) + (pair)] = kvq_step(cost[2*(k) + (pair)], metric + o[0], metric + o[8], _mm256_shuffle_epi32(w, 0x55*(j)), choice_j); \
    }
#define KVQ_STEP4(h, j, choice_j) { \
        const __m256i choice_ = choice_j; \
        KVQ_STEP(0, 0, h, j, choice_) KVQ_STEP(0, 1, h, j, choice_) KVQ_STEP(1, 0, h, j, choice_) KVQ_STEP(1, 1, h, j, choice_) \
    }
#define KVQ_STEPS(h) \
        for (int k = 0; k < 4; k++) {                                                           \
            cost[k] = _mm256_or_si256(_mm256_and_si256(cost[k], keep), choice);                 \
        }                                                                                       \
        KVQ_STEP4(h, 0, _mm256_slli_epi32(choice, 1))                                           \
        KVQ_STEP4(h, 1, _mm256_slli_epi32(choice, 2))                                           \
        KVQ_STEP4(h, 2, _mm256_slli_epi32(choice, 3))                                           \
        KVQ_STEP4(h, 3, _mm256_setzero_si256())                                                 \
        for (int k = 0; k < 4; k++) {                                                           \
            _mm256_store_si256((__m256i *) s[k/2]->cost[2*i + (h)][2*(k % 2)], cost[k]);        \
        }
    for (int i = 0; i < QK_KVQ/8; i++) {
        KVQ_STEPS(0)
        KVQ_STEPS(1)
    }
#undef KVQ_STEPS
#undef KVQ_STEP4
#undef KVQ_STEP

    for (int k = 0; k < 2; k++) {
        const __m256i c0 = _mm256_srai_epi32(cost[2*k],     4); // KVQ_METRIC is 1 << 4
        const __m256i c1 = _mm256_srai_epi32(cost[2*k + 1], 4);
        __m256i min0 = _mm256_min_epi32(c0, _mm256_shuffle_epi32(c0, 0x4e));
        __m256i min1 = _mm256_min_epi32(c1, _mm256_shuffle_epi32(c1, 0x4e));
        min0 = _mm256_min_epi32(min0, _mm256_shuffle_epi32(min0, 0xb1));
        min1 = _mm256_min_epi32(min1, _mm256_shuffle_epi32(min1, 0xb1));
        const int ends = _mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpeq_epi32(min0, c0))) |
                         _mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpeq_epi32(min1, c1))) << 8;

        const __m256i min = _mm256_unpacklo_epi64(min0, min1); // candidates 0 0 2 2, 1 1 3 3
        kvq_choose(f, s[k], ends, _mm_blend_epi16(_mm256_castsi256_si128(min), _mm256_extracti128_si256(min, 1), 0xcc));
    }
}

// the path of candidate k: bit t is b[t]
KVQ_INLINE uint32_t kvq_trace(const struct kvq_search * s, int k) {
    uint32_t path = 0;
    uint32_t lane = (uint32_t) s->end[k];
    for (int i = QK_KVQ/4 - 1; i >= 0; i--) {
        const uint32_t choices = (uint32_t) s->cost[i][k][lane] & (KVQ_METRIC - 1);
        path = path << 4 | lane << 2 | choices >> 2;
        lane = choices & 3;
    }
    return path;
}

// bytes of 32 bits: -1 or 0
KVQ_INLINE __m256i kvq_expand_bits(uint32_t b) {
    const __m256i byte = _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1,
                                          2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3);
    const __m256i bit  = _mm256_set1_epi64x((int64_t) 0x8040201008040201u);
    return _mm256_cmpeq_epi8(_mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32((int32_t) b), byte), bit), bit);
}

// kvq_format::split at indices between 4 << depth and (8 << depth) - 1
KVQ_INLINE __m256i kvq_split(const struct kvq_format * f, const int depth, __m256i i) {
    const __m128i * split = (const __m128i *) f->split;
#if defined(__AVX512VBMI__)
    if (depth <= 3) { // of an index the low bits count
        return _mm256_permutexvar_epi8(i, _mm256_loadu_si256((const __m256i *) (depth == 3 ? split + 2 : split)));
    }
    return _mm256_permutex2var_epi8(_mm256_loadu_si256((const __m256i *) (split + 4)), i, _mm256_loadu_si256((const __m256i *) (split + 6)));
#else
#define KVQ_LOOKUP(n) _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_load_si128(split + (n))), i)
    if (depth <= 2) {
        return depth == 2 ? KVQ_LOOKUP(1) : KVQ_LOOKUP(0);
    }
    const __m256i bit4 = _mm256_slli_epi16(i, 3);
    if (depth == 3) {
        return _mm256_blendv_epi8(KVQ_LOOKUP(2), KVQ_LOOKUP(3), bit4);
    }
    return _mm256_blendv_epi8(_mm256_blendv_epi8(KVQ_LOOKUP(4), KVQ_LOOKUP(5), bit4),
                              _mm256_blendv_epi8(KVQ_LOOKUP(6), KVQ_LOOKUP(7), bit4), _mm256_slli_epi16(i, 2));
#undef KVQ_LOOKUP
#endif
}

// 32 indices of the codebook, in the order of the path; t: nearest units
KVQ_INLINE __m256i kvq_path_indices(const struct kvq_format * f, const int bits, __m256i t, uint32_t b) {
    const __m256i c = _mm256_or_si256(_mm256_and_si256(kvq_expand_bits(b ^ (b << 2)), _mm256_set1_epi8(2)),
                                      _mm256_and_si256(kvq_expand_bits(b << 1),       _mm256_set1_epi8(1)));
    __m256i i = _mm256_or_si256(c, _mm256_set1_epi8(4));
    for (int depth = 0; depth < bits - 1; depth++) {
        const __m256i right = _mm256_and_si256(_mm256_cmpgt_epi8(t, kvq_split(f, depth, i)), _mm256_set1_epi8(4));
        i = _mm256_add_epi8(_mm256_add_epi8(i, i), _mm256_sub_epi8(right, c));
    }
    return _mm256_and_si256(i, _mm256_set1_epi8((2 << bits) - 1));
}

// planes of a block; m: indices, b: bits of the path
KVQ_INLINE void kvq_store_planes(const int bits, void * block, __m256i m, uint32_t b) {
    uint8_t * qs = (uint8_t *) block + sizeof(ggml_fp16_t);

    const __m256i b1 = _mm256_and_si256(kvq_expand_bits(b), _mm256_set1_epi8(1));
    const __m256i e  = _mm256_and_si256(_mm256_srli_epi16(m, 1), _mm256_set1_epi8(bits >= 4 ? 0x0e : 0x02));
    const __m256i q  = _mm256_or_si256(e, b1);

    if (bits >= 4) {
        const __m256i w = _mm256_maddubs_epi16(q, _mm256_set1_epi16(0x1001));
        _mm_storeu_si128((__m128i *) qs, _mm_packus_epi16(_mm256_castsi256_si128(w), _mm256_extracti128_si256(w, 1)));
    } else {
        const __m256i w = _mm256_madd_epi16(_mm256_maddubs_epi16(q, _mm256_set1_epi16(0x0401)), _mm256_set1_epi32(0x00100001));
        const __m128i p = _mm_packus_epi32(_mm256_castsi256_si128(w), _mm256_extracti128_si256(w, 1));
        _mm_storel_epi64((__m128i *) qs, _mm_packus_epi16(p, p));
    }

    // steps 0..15 and 16..31
    const __m128i m0 = _mm256_castsi256_si128(m);
    const __m128i m1 = _mm256_extracti128_si256(m, 1);

    if (bits == 3) { // bit of a step: 2*(t % 16) + t/16
        const __m128i h0 = _mm_slli_epi16(_mm_unpacklo_epi8(m0, m1), 4);
        const __m128i h1 = _mm_slli_epi16(_mm_unpackhi_epi8(m0, m1), 4);
        const uint32_t h = (uint32_t) _mm_movemask_epi8(h0) | (uint32_t) _mm_movemask_epi8(h1) << 16;
        memcpy(qs + 8, &h, sizeof(h));
    }
    if (bits == 5) { // bit of a step: 4*(t % 8) + t/8
        const __m128i u  = _mm_unpacklo_epi8(m0, m1);
        const __m128i v  = _mm_unpackhi_epi8(m0, m1);
        const __m128i h0 = _mm_slli_epi16(_mm_unpacklo_epi8(u, v), 2);
        const __m128i h1 = _mm_slli_epi16(_mm_unpackhi_epi8(u, v), 2);
        const uint32_t h = (uint32_t) _mm_movemask_epi8(h0) | (uint32_t) _mm_movemask_epi8(h1) << 16;
        memcpy(qs + 16, &h, sizeof(h));
    }
    if (bits == 6) { // bits of a step: 4*(t % 16) + 2*(t/16)
        const __m128i h0 = _mm_and_si128(_mm_srli_epi16(m0, 5), _mm_set1_epi8(3));
        const __m128i h1 = _mm_and_si128(_mm_srli_epi16(m1, 3), _mm_set1_epi8(12));
        const __m128i w  = _mm_maddubs_epi16(_mm_or_si128(h0, h1), _mm_set1_epi16(0x1001));
        _mm_storel_epi64((__m128i *) (qs + 16), _mm_packus_epi16(w, w));
    }
}

// Planes of a block from the path of candidate k. Sums of y*level and level^2, in four parts each.
KVQ_INLINE void kvq_set_path(const struct kvq_format * f, const int bits, void * block, const struct kvq_search * s, int k,
                             uint32_t path, __m128i * sum_yl, __m128i * sum_ll) {
    const __m256i y0 = _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_load_si128((const __m128i *) s->y[0][k])),
        _mm_load_si128((const __m128i *) s->y[1][k]), 1);
    const __m256i y1 = _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_load_si128((const __m128i *) s->y[2][k])),
        _mm_load_si128((const __m128i *) s->y[3][k]), 1);

    // kvq_nearest_unit: packing clamps
    const __m256i t0 = _mm256_srai_epi16(_mm256_add_epi16(y0, _mm256_set1_epi16(KVQ_Y_ONE/2)), 6);
    const __m256i t1 = _mm256_srai_epi16(_mm256_add_epi16(y1, _mm256_set1_epi16(KVQ_Y_ONE/2)), 6);
    const __m256i t  = _mm256_permute4x64_epi64(_mm256_packs_epi16(t0, t1), 0xd8);
    const __m256i m  = kvq_path_indices(f, bits, t, path);
    kvq_store_planes(bits, block, m, path);

    const __m256i l  = kvq_levels(f, bits, m);
    const __m256i l0 = _mm256_cvtepi8_epi16(_mm256_castsi256_si128(l));
    const __m256i l1 = _mm256_cvtepi8_epi16(_mm256_extracti128_si256(l, 1));
    const __m256i yl = _mm256_add_epi32(_mm256_madd_epi16(y0, l0), _mm256_madd_epi16(y1, l1));
    const __m256i ll = _mm256_add_epi32(_mm256_madd_epi16(l0, l0), _mm256_madd_epi16(l1, l1));
    *sum_yl = _mm_add_epi32(_mm256_castsi256_si128(yl), _mm256_extracti128_si256(yl, 1));
    *sum_ll = _mm_add_epi32(_mm256_castsi256_si128(ll), _mm256_extracti128_si256(ll, 1));
}

// blocks whose search is done, d0: their first scales; the last stages of a batch
KVQ_INLINE void kvq_finish_blocks(const struct kvq_format * f, const int bits, const float * x, char * blocks,
                                  const struct kvq_search * s, const float * d0, const bool * special, int n) {
    const size_t size = kvq_block_size(bits);

    uint32_t path[KVQ_CPU_BATCH];
    for (int i = 0; i < n; i++) {
        path[i] = special[i] ? 0 : kvq_trace(&s[i], s[i].best);
    }

    __m128i yl[KVQ_CPU_BATCH];
    __m128i ll[KVQ_CPU_BATCH];
    for (int i = 0; i < KVQ_CPU_BATCH; i++) {
        yl[i] = ll[i] = _mm_setzero_si128();
        if (i < n && !special[i]) {
            kvq_set_path(f, bits, blocks + i*size, &s[i], s[i].best, path[i], &yl[i], &ll[i]);
        }
    }
    int32_t sum_yl[KVQ_CPU_BATCH];
    int32_t sum_ll[KVQ_CPU_BATCH];
    _mm_storeu_si128((__m128i *) sum_yl, kvq_sum4(yl[0], yl[1], yl[2], yl[3]));
    _mm_storeu_si128((__m128i *) sum_ll, kvq_sum4(ll[0], ll[1], ll[2], ll[3]));

    for (int i = 0; i < n; i++) {
        if (special[i]) {
            continue;
        }
        char * block = blocks + i*size;
        if (!kvq_set_scale(f, block, s[i].best, s[i].err[s[i].best], s[i].err[0], d0[i], sum_yl[i], sum_ll[i])) {
            uint8_t absmax[sizeof(block_kvq6)];
            kvq_set_path(f, bits, absmax, &s[i], 0, kvq_trace(&s[i], 0), &yl[0], &ll[0]);
            const uint16_t d16 = (uint16_t) _mm_extract_epi16(_mm_cvtps_ph(_mm_set_ss(d0[i]), _MM_FROUND_TO_NEAREST_INT), 0);
            memcpy(absmax, &d16, sizeof(d16));
            kvq_keep_bound(f, x + i*QK_KVQ, block, absmax);
        }
    }
}

// n blocks, KVQ_CPU_BATCH at most
KVQ_INLINE void kvq_encode_blocks(const struct kvq_format * f, const int bits, const float * x, void * blocks, int n) {
    struct kvq_search  s [KVQ_CPU_BATCH];
    KVQ_ALIGN_64 float xp[KVQ_CPU_BATCH][QK_KVQ];

    __m128i keys[KVQ_CPU_BATCH];
    for (int i = 0; i < KVQ_CPU_BATCH; i++) {
        keys[i] = i < n ? kvq_load_x(bits, x + i*QK_KVQ, xp[i]) : _mm_setzero_si128();
    }
    uint32_t key[KVQ_CPU_BATCH];
    float    d0 [KVQ_CPU_BATCH];
    const __m128i largest = kvq_max4(keys[0], keys[1], keys[2], keys[3]);
    _mm_storeu_si128((__m128i *) key, largest);
    _mm_storeu_ps(d0, kvq_first_scales(f, largest));

    bool special[KVQ_CPU_BATCH];
    int  todo   [KVQ_CPU_BATCH];
    int  n_todo = 0;
    for (int i = 0; i < n; i++) {
        special[i] = kvq_encode_special(bits, (char *) blocks + i*kvq_block_size(bits), key[i], d0[i]);
        if (!special[i]) {
            kvq_measure(f, xp[i], d0[i], &s[i]);
            todo[n_todo++] = i;
        }
    }
    for (int i = 0; i < n_todo; i += 2) { // a block without another is its own
        kvq_search_paths(f, &s[todo[i]], &s[todo[i + 1 < n_todo ? i + 1 : i]]);
    }
    kvq_finish_blocks(f, bits, x, (char *) blocks, s, d0, special, n);
}
