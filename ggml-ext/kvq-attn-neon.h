// SPDX-License-Identifier: MIT
//
// Attention by levels on NEON with dot products. Included by kvq-attn.cpp alone.
//
// sdot multiplies bytes with signs and adds four neighbours to a lane of 32 bits, with one operand's four taken from any lane
// of a register. So levels are kept as they are, without a bias, and a register holds 4 lanes of four neighbours:
// - K: lanes are 4 positions, the four bytes of a lane are 4 values of the head.
// - V: lanes are 4 values of the head, the four bytes are 4 positions.
// Query and weights come by lane: 16 of them in a register, without a broadcast.
//
// smmla (i8mm) multiplies two rows of 8 bytes with two others, 32 products at once where sdot has 16. The two others are the
// halves of 8 numbers of a query or of weights, which sit beside each other then. A register of K holds 8 values of
// 2 positions, one of V 8 positions of 2 values.
//
// Rows are decoded one by one: a block's bytes are the 16 or 32 lanes then, and its other planes are spread by a lookup or
// two shifts. Transposing 4 rows is a single store, st4, for every 16 values; with i8mm, zips come before it.
//
// A tile of K: [16 positions][block of 32 values][4][8][4 positions][4 values]; with i8mm [..][..][8][4][2 positions][8 values].
// A tile of V: [block][32][32 values][4 positions], with i8mm [block][16][32 values][8 positions].
// Scales of both are [block][position].
//
// Instructions, counted by an emulator (GCC 12, a head of 128 values, a full tile), with floats / sdot / smmla:
// - scores with 32 values of a position, for each row of queries: 13.2 / 6.0 / 5.1 if 4 rows are done at once, 22.3 / 8.0 / 7.6
//   if there is but one
// - weighted sums likewise, with what makes bytes of the weights: 13.1 / 7.2 / 5.5 and 22.3 / 9.8 / 6.3
// - decoding 32 values of K: q8_0 115 / 7 / 10, kvq4 120 / 19 / 20, kvq6 138 / 34 / 34; of V: 57 / 6 / 10, 65 / 19 / 19 and
//   83 / 33 / 38. st4 counts as one here, but occupies a CPU for longer.

#pragma once

#include "kvq-attn.h"
#include "kvq-attn-vec.h"
#include "kvq-formats.h"

#define KVQ_LEVELS_POSITIONS 16 // a tile of K is filled in steps of so many

#if defined(__ARM_FEATURE_MATMUL_INT8)
#define KVQ_LEVELS_I8MM
#endif

// what the bytes of a tile are above the levels
KVQ_INLINE int kvq_levels_bias(enum ggml_type) { return 0; }

//
// types
//

// Bytes of a block: a scale, a minimum if there is one, then what `plane` and `high` point at.
template <enum ggml_type type> struct kvq_levels_of;

#define KVQ_LEVELS_OF(TYPE, n_size, at_plane, at_high, has_min)                                      \
    template <> struct kvq_levels_of<GGML_TYPE_##TYPE> {                                             \
        static constexpr int  size = n_size, bits = 0, plane = at_plane, high = at_high;             \
        static constexpr bool min = has_min;                                                         \
    };
KVQ_LEVELS_OF(Q8_0,   34, 2, 0, false)
KVQ_LEVELS_OF(Q4_0,   18, 2, 0, false)
KVQ_LEVELS_OF(Q4_1,   20, 4, 0, true )
KVQ_LEVELS_OF(IQ4_NL, 18, 2, 0, false)
KVQ_LEVELS_OF(Q5_0,   22, 6, 2, false)
KVQ_LEVELS_OF(Q5_1,   24, 8, 4, true )

// bits: of a value of a trellis, 0 for other types
#define KVQ_LEVELS_OF_KVQ(name, NAME, n_bits, n_qs, n_qh)                                            \
    template <> struct kvq_levels_of<GGML_TYPE_##NAME> {                                             \
        static constexpr int  size = 2 + n_qs + n_qh, bits = n_bits, plane = 2, high = 2 + n_qs;     \
        static constexpr bool min = false;                                                           \
    };
KVQ_FORMATS(KVQ_LEVELS_OF_KVQ)

#define KVQ_LEVELS_TYPES(X) X(Q8_0) X(Q4_0) X(Q4_1) X(Q5_0) X(Q5_1) X(IQ4_NL) X(KVQ2) X(KVQ3) X(KVQ4) X(KVQ5) X(KVQ6)

// Levels of a codebook. Those of kvq6 are index - 64 except near the ends, and what they are beyond that is at
// (index + KVQ6_ENDS_ABOVE) % 128: so the ends are neighbours, in three registers instead of eight.
struct kvq_levels_table { int8_t level[64]; };

#define KVQ6_ENDS_ABOVE 19 // levels of the upper end
#define KVQ6_ENDS       48 // room for both

template <enum ggml_type type> static kvq_levels_table kvq_levels_make_table() {
    kvq_levels_table tab = {};
    if constexpr (type == GGML_TYPE_KVQ6) {
        const struct kvq_format * f = kvq_get_format(type);
        for (int i = 0; i < 128; i++) {
            const int beyond = f->levels[i] - (i - 64);
            const int j      = (i + KVQ6_ENDS_ABOVE) % 128;
            GGML_ASSERT(j < KVQ6_ENDS || beyond == 0);
            if (j < KVQ6_ENDS) {
                tab.level[j] = (int8_t) beyond;
            }
        }
    } else if constexpr (kvq_levels_of<type>::bits != 0) {
        const struct kvq_format * f = kvq_get_format(type);
        memcpy(tab.level, f->levels, f->n_levels);
    } else if constexpr (type == GGML_TYPE_IQ4_NL) {
        // upstream's levels, by decoding a block that has each of them
        uint8_t block[kvq_levels_of<type>::size];
        const ggml_fp16_t one = ggml_fp32_to_fp16(1.0f);
        memcpy(block, &one, sizeof(one));
        for (int i = 0; i < 16; i++) {
            block[kvq_levels_of<type>::plane + i] = (uint8_t) i;
        }
        float y[32];
        ggml_get_type_traits(type)->to_float(block, y, 32);
        for (int i = 0; i < 16; i++) {
            tab.level[i] = (int8_t) y[i];
        }
    }
    return tab;
}

//
// decoding
//

// indices of a codebook with 2 or 3 bits in the first plane, see kvq-formats.h
KVQ_INLINE void kvq_trellis_2(const uint8_t * plane, uint8x16_t m[2]) {
    // A field and the bit before it take 3 bits. So there are 4 for each: even fields in the lower half of a register, odd
    // ones in the upper half.
    const int64x2_t  to_bit_1 = { 1, -1 };
    const int64x2_t  to_bit_0 = { 2,  0 };
    const uint64x2_t x  = vreinterpretq_u64_u8(vcombine_u8(vld1_u8(plane), vld1_u8(plane)));
    const uint64x2_t ec = veorq_u64(x, vandq_u64(vshlq_n_u64(x, 4), vdupq_n_u64(0x5555555555555555u))); // b[t] ^ b[t-2]
    const uint8x16_t i  = vbslq_u8(vdupq_n_u8(0x11), vreinterpretq_u8_u64(vshlq_u64(x,  to_bit_0)),     // b[t-1]
                                                     vreinterpretq_u8_u64(vshlq_u64(ec, to_bit_1)));
    m[0] = vandq_u8(i,                vdupq_n_u8(7));
    m[1] = vandq_u8(vshrq_n_u8(i, 4), vdupq_n_u8(7));
}

// the same with 4 bits
KVQ_INLINE void kvq_trellis_4(const uint8_t * plane, uint8x16_t m[2]) {
    const uint8x16_t x    = vld1q_u8(plane);
    const uint8x16_t prev = vextq_u8(vdupq_n_u8(0), x, 15);
    const uint8x16_t ec   = veorq_u8(x, vandq_u8(prev, vdupq_n_u8(0x11)));
    m[0] = vsliq_n_u8(vshrq_n_u8(prev, 4), vandq_u8(ec, vdupq_n_u8(0x0f)), 1);
    m[1] = vsliq_n_u8(x,                   vshrq_n_u8(ec, 4),              1);
}

// a second plane of 1 bit, put at bit `at` of the indices
template <int at> KVQ_INLINE void kvq_trellis_high_1(const uint8_t * plane, uint8x16_t m[2]) {
    const int8x16_t shift = { at,     at,     at,     at,     at - 1, at - 1, at - 1, at - 1,
                              at - 2, at - 2, at - 2, at - 2, at - 3, at - 3, at - 3, at - 3 };
    uint32_t w;
    memcpy(&w, plane, sizeof(w));
    const uint8x16_t x = vreinterpretq_u8_u32(vdupq_n_u32(w));
    m[0] = vbslq_u8(vdupq_n_u8(1 << at), vshlq_u8(x, shift),                            m[0]);
    m[1] = vbslq_u8(vdupq_n_u8(1 << at), vshlq_u8(x, vsubq_s8(shift, vdupq_n_s8(4))), m[1]);
}

// the same of 2 bits
template <int at> KVQ_INLINE void kvq_trellis_high_2(const uint8_t * plane, uint8x16_t m[2]) {
    const int8x16_t  shift = { at,     at,     at,     at,     at,     at,     at,     at,
                               at - 2, at - 2, at - 2, at - 2, at - 2, at - 2, at - 2, at - 2 };
    const uint8x16_t x = vcombine_u8(vld1_u8(plane), vld1_u8(plane));
    m[0] = vbslq_u8(vdupq_n_u8(3 << at), vshlq_u8(x, shift),                            m[0]);
    m[1] = vbslq_u8(vdupq_n_u8(3 << at), vshlq_u8(x, vsubq_s8(shift, vdupq_n_s8(4))), m[1]);
}

// masks of 32 bits
KVQ_INLINE void kvq_bits_to_bytes(const uint8_t * bits, uint8x16_t mask[2]) {
    const uint8x16_t byte = { 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1 };
    const uint8x16_t bit  = vreinterpretq_u8_u64(vdupq_n_u64(0x8040201008040201u));
    uint32_t w;
    memcpy(&w, bits, sizeof(w));
    const uint8x16_t x = vreinterpretq_u8_u32(vdupq_n_u32(w));
    mask[0] = vtstq_u8(vqtbl1q_u8(x, byte),                           bit);
    mask[1] = vtstq_u8(vqtbl1q_u8(x, vaddq_u8(byte, vdupq_n_u8(2))), bit);
}

// A table in as many registers as it fills: tuples, because a lookup wants them one after the other.
template <enum ggml_type type> KVQ_INLINE auto kvq_load_table(const kvq_levels_table & tab) {
    if constexpr (type == GGML_TYPE_KVQ4) {
        return vld1q_s8_x2(tab.level);
    } else if constexpr (type == GGML_TYPE_KVQ5) {
        return vld1q_s8_x4(tab.level);
    } else if constexpr (type == GGML_TYPE_KVQ6) {
        return vld1q_s8_x3(tab.level);
    } else {
        return vld1q_s8(tab.level);
    }
}

KVQ_INLINE int8x16_t kvq_lookup(int8x16_t   tab, uint8x16_t i) { return vqtbl1q_s8(tab, i); }
KVQ_INLINE int8x16_t kvq_lookup(int8x16x4_t tab, uint8x16_t i) { return vqtbl4q_s8(tab, i); }
KVQ_INLINE int8x16_t kvq_lookup(int8x16x2_t tab, uint8x16_t i) {
    int8x16_t y = vqtbl2q_s8(tab, i);
#if defined(__clang__) && defined(KVQ_LEVELS_I8MM)
    __asm__("" : "+w"(y)); // Clang 19 crashes where it merges such lookups with a zip: LLVM issue 135950
#endif
    return y;
}
KVQ_INLINE int8x16_t kvq_lookup(int8x16x3_t tab, uint8x16_t i) { // kvq6
    const uint8x16_t j = vandq_u8(vaddq_u8(i, vdupq_n_u8(KVQ6_ENDS_ABOVE)), vdupq_n_u8(127));
    return vaddq_s8(vsubq_s8(vreinterpretq_s8_u8(i), vdupq_n_s8(64)), vqtbl3q_s8(tab, j)); // 0 beyond the table
}

// levels of a block: values 0 ... 15 and 16 ... 31
template <enum ggml_type type, typename table>
KVQ_INLINE void kvq_decode(const char * data, const table & tab, int8x16_t y[2]) {
    using T = kvq_levels_of<type>;
    const uint8_t * block = (const uint8_t *) data;

    if constexpr (type == GGML_TYPE_Q8_0) {
        y[0] = vld1q_s8((const int8_t *) block + T::plane);
        y[1] = vld1q_s8((const int8_t *) block + T::plane + 16);
    } else if constexpr (T::bits != 0) {
        uint8x16_t m[2];
        if constexpr (T::bits >= 4) {
            kvq_trellis_4(block + T::plane, m);
        } else {
            kvq_trellis_2(block + T::plane, m);
        }
        if constexpr (T::bits == 3 || T::bits == 5) {
            kvq_trellis_high_1<T::bits>(block + T::high, m);
        } else if constexpr (T::bits == 6) {
            kvq_trellis_high_2<5>(block + T::high, m);
        }
        y[0] = kvq_lookup(tab, m[0]);
        y[1] = kvq_lookup(tab, m[1]);
    } else {
        const uint8x16_t x  = vld1q_u8(block + T::plane);
        const uint8x16_t x0 = vandq_u8(x, vdupq_n_u8(0x0f));
        const uint8x16_t x1 = vshrq_n_u8(x, 4);
        if constexpr (type == GGML_TYPE_IQ4_NL) {
            y[0] = kvq_lookup(tab, x0);
            y[1] = kvq_lookup(tab, x1);
        } else if constexpr (type == GGML_TYPE_Q4_0 || type == GGML_TYPE_Q4_1) {
            y[0] = vsubq_s8(vreinterpretq_s8_u8(x0), vdupq_n_s8(8));
            y[1] = vsubq_s8(vreinterpretq_s8_u8(x1), vdupq_n_s8(8));
        } else { // 16 less without the fifth bit: all upper bits
            uint8x16_t mask[2];
            kvq_bits_to_bytes(block + T::high, mask);
            y[0] = vreinterpretq_s8_u8(vorrq_u8(x0, vbicq_u8(vdupq_n_u8(0xf0), mask[0])));
            y[1] = vreinterpretq_s8_u8(vorrq_u8(x1, vbicq_u8(vdupq_n_u8(0xf0), mask[1])));
        }
    }
}

// With a minimum, too, levels are taken from the middle, and the minimum is that much higher: small weights that are rounded
// away would otherwise be missed with one sign.
template <enum ggml_type type> KVQ_INLINE float32x4_t kvq_min_of_middle(float32x4_t m, float32x4_t d) {
    return vfmaq_n_f32(m, d, type == GGML_TYPE_Q4_1 ? 8.0f : 16.0f);
}

// A number of f16 at the start of 4 blocks.
KVQ_INLINE float32x4_t kvq_load_4_f16(const char * const row[4], size_t at) {
    uint16x4_t x = vdup_n_u16(0);
    x = vld1_lane_u16((const uint16_t *) (row[0] + at), x, 0);
    x = vld1_lane_u16((const uint16_t *) (row[1] + at), x, 1);
    x = vld1_lane_u16((const uint16_t *) (row[2] + at), x, 2);
    x = vld1_lane_u16((const uint16_t *) (row[3] + at), x, 3);
    return vcvt_f32_f16(vreinterpret_f16_u16(x));
}

//
// tiles
//

// Levels of a block of 4 rows, to 128 bytes.
KVQ_INLINE void kvq_store_k(const int8x16_t y[4][2], int8_t * dst) {
#if defined(KVQ_LEVELS_I8MM)
    KVQ_UNROLL
    for (int j = 0; j < 4; j += 2) {
        KVQ_UNROLL
        for (int half = 0; half < 2; half++) {
            const int64x2_t a = vreinterpretq_s64_s8(y[j][half]);
            const int64x2_t b = vreinterpretq_s64_s8(y[j + 1][half]);
            vst1q_s8(dst + 32*(j + half),      vreinterpretq_s8_s64(vzip1q_s64(a, b)));
            vst1q_s8(dst + 32*(j + half) + 16, vreinterpretq_s8_s64(vzip2q_s64(a, b)));
        }
    }
#else
    KVQ_UNROLL
    for (int half = 0; half < 2; half++) {
        const int32x4x4_t x = { { vreinterpretq_s32_s8(y[0][half]), vreinterpretq_s32_s8(y[1][half]),
                                  vreinterpretq_s32_s8(y[2][half]), vreinterpretq_s32_s8(y[3][half]) } };
        vst4q_s32((int32_t *) (dst + 64*half), x);
    }
#endif
}

#if defined(KVQ_LEVELS_I8MM)
#define KVQ_LEVELS_V_ROWS 8 // whose bytes are neighbours in a tile of V
#else
#define KVQ_LEVELS_V_ROWS 4
#endif

// Levels of a block of so many rows, to 32 bytes for each.
KVQ_INLINE void kvq_store_v(const int8x16_t y[KVQ_LEVELS_V_ROWS][2], int8_t * dst) {
    KVQ_UNROLL
    for (int half = 0; half < 2; half++) {
#if defined(KVQ_LEVELS_I8MM)
        int16x8x4_t lo, hi;
        KVQ_UNROLL
        for (int j = 0; j < 4; j++) {
            lo.val[j] = vreinterpretq_s16_s8(vzip1q_s8(y[2*j][half], y[2*j + 1][half]));
            hi.val[j] = vreinterpretq_s16_s8(vzip2q_s8(y[2*j][half], y[2*j + 1][half]));
        }
        vst4q_s16((int16_t *) (dst + 128*half),      lo);
        vst4q_s16((int16_t *) (dst + 128*half + 64), hi);
#else
        const int8x16x4_t x = { { y[0][half], y[1][half], y[2][half], y[3][half] } };
        vst4q_s8(dst + 64*half, x);
#endif
    }
}

template <enum ggml_type type>
static void kvq_levels_k_type(const char * rows, size_t stride, int n_valid, int n_blocks, uint8_t * q, float * d, float * m) {
    using T = kvq_levels_of<type>;
    static const kvq_levels_table table = kvq_levels_make_table<type>();
    const auto tab = kvq_load_table<type>(table);
    const int n = (n_valid + KVQ_LEVELS_POSITIONS - 1)/KVQ_LEVELS_POSITIONS*KVQ_LEVELS_POSITIONS;

    for (int i = 0; i < n; i += 4) {
        const char * row[4];
        KVQ_UNROLL
        for (int j = 0; j < 4; j++) { // beyond n_valid, the last row again
            row[j] = rows + (i + j < n_valid ? i + j : n_valid - 1)*stride;
        }
        for (int b = 0; b < n_blocks; b++) {
            int8x16_t y[4][2];
            KVQ_UNROLL
            for (int j = 0; j < 4; j++) {
                kvq_decode<type>(row[j] + b*T::size, tab, y[j]);
            }
            kvq_store_k(y, (int8_t *) q + (i/16*n_blocks + b)*512 + i%16*32);
            const float32x4_t scale = kvq_load_4_f16(row, b*T::size);
            vst1q_f32(d + b*KVQ_ATTN_N + i, scale);
            if constexpr (T::min) {
                vst1q_f32(m + b*KVQ_ATTN_N + i, kvq_min_of_middle<type>(kvq_load_4_f16(row, b*T::size + 2), scale));
            }
        }
    }
}

template <enum ggml_type type>
static void kvq_levels_v_type(const char * rows, size_t stride, int n_valid, int n_blocks, uint8_t * q, float * d, float * m) {
    using T = kvq_levels_of<type>;
    constexpr int step = KVQ_LEVELS_V_ROWS;
    static const kvq_levels_table table = kvq_levels_make_table<type>();
    const auto tab = kvq_load_table<type>(table);
    const int n = (n_valid + 15)/16*16;

    for (int i = 0; i < n; i += step) {
        const char * row[step];
        KVQ_UNROLL
        for (int j = 0; j < step; j++) {
            row[j] = rows + (i + j < n_valid ? i + j : n_valid - 1)*stride;
        }
        for (int b = 0; b < n_blocks; b++) {
            int8x16_t y[step][2];
            KVQ_UNROLL
            for (int j = 0; j < step; j++) {
                kvq_decode<type>(row[j] + b*T::size, tab, y[j]);
            }
            kvq_store_v(y, (int8_t *) q + (b*KVQ_ATTN_N + i)*32);
            KVQ_UNROLL
            for (int j = 0; j < step; j += 4) {
                const float32x4_t scale = kvq_load_4_f16(row + j, b*T::size);
                vst1q_f32(d + b*KVQ_ATTN_N + i + j, scale);
                if constexpr (T::min) {
                    vst1q_f32(m + b*KVQ_ATTN_N + i + j, kvq_min_of_middle<type>(kvq_load_4_f16(row + j, b*T::size + 2), scale));
                }
            }
        }
    }
}

//
// products
//

// 16 numbers of 16 bits in two halves, upper = (x + 128) >> 8 and lower = x - 256*upper, both with a sign. With i8mm, the halves
// of 8 numbers beside each other: the first 8 to hi, the others to lo.
KVQ_INLINE void kvq_store_halves(const int32x4_t x[4], int8_t * hi, int8_t * lo) {
    const int16x8_t a = vuzp1q_s16(vreinterpretq_s16_s32(x[0]), vreinterpretq_s16_s32(x[1]));
    const int16x8_t b = vuzp1q_s16(vreinterpretq_s16_s32(x[2]), vreinterpretq_s16_s32(x[3]));
#if defined(KVQ_LEVELS_I8MM)
    vst1q_s8(hi, vmovn_high_s16(vrshrn_n_s16(a, 8), a));
    vst1q_s8(lo, vmovn_high_s16(vrshrn_n_s16(b, 8), b));
#else
    vst1q_s8(hi, vrshrn_high_n_s16(vrshrn_n_s16(a, 8), b, 8));
    vst1q_s8(lo, vuzp1q_s8(vreinterpretq_s8_s16(a), vreinterpretq_s8_s16(b)));
#endif
}

// A query as 16-bit numbers, in two halves, and the sum of each block of them. Returns their unit: NaN if a value isn't a finite
// number.
KVQ_INLINE float kvq_levels_query(const float * q, int n_blocks, int8_t * hi, int8_t * lo, int32_t * sum) {
    float32x4_t most = vdupq_n_f32(0.0f);
    float32x4_t zero = vdupq_n_f32(0.0f);
    for (int i = 0; i < 32*n_blocks; i += 4) {
        const float32x4_t x = vld1q_f32(q + i);
        most = vmaxnmq_f32(most, vabsq_f32(x));
        zero = vfmaq_f32(zero, x, vdupq_n_f32(0.0f));
    }
    const float largest = vmaxnmvq_f32(most);
    const float nan     = vaddvq_f32(zero);
    float inv = KVQ_LEVELS_MAX/largest;
    if (nan != 0.0f || !(inv < INFINITY)) { // the latter: all values are 0 or tiny denormals
        inv = 0.0f;
    }
    for (int b = 0; b < n_blocks; b++) {
        int32x4_t s = vdupq_n_s32(0);
        KVQ_UNROLL
        for (int i = 32*b; i < 32*b + 32; i += 16) {
            int32x4_t x[4];
            KVQ_UNROLL
            for (int j = 0; j < 4; j++) { // a NaN becomes 0
                x[j] = vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(q + i + 4*j), inv));
                s = vaddq_s32(s, x[j]);
            }
            kvq_store_halves(x, hi + i, lo + i);
        }
        sum[b] = vaddvq_s32(s);
    }
    return largest/KVQ_LEVELS_MAX + nan;
}

#if defined(KVQ_LEVELS_I8MM)

// 256*upper + lower of 4 numbers, from sums of products with both
KVQ_INLINE int32x4_t kvq_join_halves(int32x4_t a, int32x4_t b) {
    const int32x4_t shift = { 8, 0, 8, 0 };
    return vpaddq_s32(vshlq_s32(a, shift), vshlq_s32(b, shift));
}

#else

// a += 4 x 16 bytes by the 16 bytes of w, four for each register
KVQ_INLINE int32x4_t kvq_dot(int32x4_t a, const int8x16_t x[4], int8x16_t w) {
    a = vdotq_laneq_s32(a, x[0], w, 0);
    a = vdotq_laneq_s32(a, x[1], w, 1);
    a = vdotq_laneq_s32(a, x[2], w, 2);
    return vdotq_laneq_s32(a, x[3], w, 3);
}

#endif

// A row is done before the next one begins: compilers would interleave rows, which then don't fit the registers.
#define KVQ_DONE(x, y) __asm__ volatile("" : "+w"(x), "+w"(y) : : "memory")

// Scores of n_rows queries with 16 positions, in units of the query's scale.
// hi, lo: [rows][32*n_blocks]; base: not used, without a bias; q_sum: the sum of a block of the query, for types with a minimum,
// [rows][n_blocks]. s: [rows][KVQ_ATTN_N].
//
// 8 positions at once: a block of K stays in 16 registers for all rows. Without i8mm, the sum of products with upper halves is
// shifted in place before the lower ones are added: half of the accumulators, and no instruction to join them.
template <int n_rows, bool has_min>
KVQ_INLINE void kvq_levels_qk_rows(const uint8_t * k, const float * d, const float * m, int n_blocks,
        const int8_t * hi, const int8_t * lo, const int32_t * base, const float * q_sum, float * s) {
    for (int i = 0; i < 16; i += 8) {
        float32x4_t f[n_rows][2];
        KVQ_UNROLL
        for (int r = 0; r < n_rows; r++) {
            f[r][0] = f[r][1] = vdupq_n_f32(0.0f);
        }
        for (int b = 0; b < n_blocks; b++) {
            int8x16_t x[16];
            KVQ_UNROLL
            for (int j = 0; j < 16; j++) {
                x[j] = vld1q_s8((const int8_t *) k + b*512 + i*32 + j*16);
            }
            const float32x4_t d0 = vld1q_f32(d + b*KVQ_ATTN_N + i);
            const float32x4_t d1 = vld1q_f32(d + b*KVQ_ATTN_N + i + 4);
            KVQ_UNROLL
            for (int r = 0; r < n_rows; r++) {
                const int8_t * qh = hi + (r*n_blocks + b)*32;
                const int8_t * ql = lo + (r*n_blocks + b)*32;
#if defined(KVQ_LEVELS_I8MM)
                const int8x16_t q[4] = { vld1q_s8(qh), vld1q_s8(ql), vld1q_s8(qh + 16), vld1q_s8(ql + 16) };
                int32x4_t a[4];
                KVQ_UNROLL
                for (int j = 0; j < 4; j++) {
                    a[j] = vdupq_n_s32(0);
                    KVQ_UNROLL
                    for (int g = 0; g < 4; g++) {
                        a[j] = vmmlaq_s32(a[j], x[4*j + g], q[g]);
                    }
                }
                const int32x4_t a0 = kvq_join_halves(a[0], a[1]);
                const int32x4_t a1 = kvq_join_halves(a[2], a[3]);
#else
                int32x4_t a0 = vdupq_n_s32(0);
                int32x4_t a1 = vdupq_n_s32(0);
                KVQ_UNROLL
                for (int g = 0; g < 8; g += 4) {
                    const int8x16_t q = vld1q_s8(qh + 4*g);
                    a0 = kvq_dot(a0, x + g,     q);
                    a1 = kvq_dot(a1, x + g + 8, q);
                }
                a0 = vshlq_n_s32(a0, 8);
                a1 = vshlq_n_s32(a1, 8);
                KVQ_UNROLL
                for (int g = 0; g < 8; g += 4) {
                    const int8x16_t q = vld1q_s8(ql + 4*g);
                    a0 = kvq_dot(a0, x + g,     q);
                    a1 = kvq_dot(a1, x + g + 8, q);
                }
#endif
                f[r][0] = vfmaq_f32(f[r][0], vcvtq_f32_s32(a0), d0);
                f[r][1] = vfmaq_f32(f[r][1], vcvtq_f32_s32(a1), d1);
                if constexpr (has_min) {
                    f[r][0] = vfmaq_n_f32(f[r][0], vld1q_f32(m + b*KVQ_ATTN_N + i),     q_sum[r*n_blocks + b]);
                    f[r][1] = vfmaq_n_f32(f[r][1], vld1q_f32(m + b*KVQ_ATTN_N + i + 4), q_sum[r*n_blocks + b]);
                }
                KVQ_DONE(f[r][0], f[r][1]);
            }
        }
        KVQ_UNROLL
        for (int r = 0; r < n_rows; r++) {
            vst1q_f32(s + r*KVQ_ATTN_N + i,     f[r][0]);
            vst1q_f32(s + r*KVQ_ATTN_N + i + 4, f[r][1]);
        }
    }
    (void) base;
}

// Weights of a row for one block of V: p*d, rounded to 16 bits, in two halves; p: in units that keep |p*d| at most 32512.
// Returns what a bias has to be multiplied with: 0, as there is none.
KVQ_INLINE int32_t kvq_levels_weights(const float * p, const float * d, int n, int8_t * hi, int8_t * lo) {
    for (int i = 0; i < n; i += 16) {
        int32x4_t x[4];
        KVQ_UNROLL
        for (int j = 0; j < 4; j++) {
            x[j] = vcvtnq_s32_f32(vmulq_f32(vld1q_f32(p + i + 4*j), vld1q_f32(d + i + 4*j)));
        }
        kvq_store_halves(x, hi + i, lo + i);
    }
    return 0;
}

// o += weights * V for one block, n positions, a multiple of 16. hi, lo: [rows][KVQ_ATTN_N]; sum: not used, without a bias;
// unit: what a weight's unit is worth; o: [rows][o_stride].
template <int n_rows>
KVQ_INLINE void kvq_levels_pv_rows(const uint8_t * v, int n, const int8_t * hi, const int8_t * lo, const int32_t * sum,
        const float * unit, float * o, size_t o_stride) {
    for (int c = 0; c < 32; c += 8) { // 8 values at once: 4 accumulators for a row
        int32x4_t a[n_rows][4];
        KVQ_UNROLL
        for (int r = 0; r < n_rows; r++) {
            a[r][0] = a[r][1] = a[r][2] = a[r][3] = vdupq_n_s32(0);
        }
        for (int i = 0; i < n; i += 16) {
            int8x16_t x[2][4];
            KVQ_UNROLL
            for (int j = 0; j < 4; j++) {
#if defined(KVQ_LEVELS_I8MM)
                x[0][j] = vld1q_s8((const int8_t *) v + i*32 + c*8 + j*16);
                x[1][j] = vld1q_s8((const int8_t *) v + i*32 + c*8 + j*16 + 256);
#else
                x[0][j] = vld1q_s8((const int8_t *) v + i*32 + c*4 + j*128);
                x[1][j] = vld1q_s8((const int8_t *) v + i*32 + c*4 + j*128 + 16);
#endif
            }
            KVQ_UNROLL
            for (int r = 0; r < n_rows; r++) {
                const int8x16_t wh = vld1q_s8(hi + r*KVQ_ATTN_N + i);
                const int8x16_t wl = vld1q_s8(lo + r*KVQ_ATTN_N + i);
#if defined(KVQ_LEVELS_I8MM)
                KVQ_UNROLL
                for (int j = 0; j < 4; j++) {
                    a[r][j] = vmmlaq_s32(a[r][j], x[0][j], wh); // of positions i ... i + 7
                    a[r][j] = vmmlaq_s32(a[r][j], x[1][j], wl);
                }
#else
                a[r][0] = kvq_dot(a[r][0], x[0], wh);
                a[r][1] = kvq_dot(a[r][1], x[1], wh);
                a[r][2] = kvq_dot(a[r][2], x[0], wl);
                a[r][3] = kvq_dot(a[r][3], x[1], wl);
#endif
                KVQ_DONE(a[r][2], a[r][3]);
            }
        }
        KVQ_UNROLL
        for (int r = 0; r < n_rows; r++) {
#if defined(KVQ_LEVELS_I8MM)
            const int32x4_t y0 = kvq_join_halves(a[r][0], a[r][1]);
            const int32x4_t y1 = kvq_join_halves(a[r][2], a[r][3]);
#else
            const int32x4_t y0 = vaddq_s32(vshlq_n_s32(a[r][0], 8), a[r][2]);
            const int32x4_t y1 = vaddq_s32(vshlq_n_s32(a[r][1], 8), a[r][3]);
#endif
            float * y = o + r*o_stride + c;
            vst1q_f32(y,     vfmaq_n_f32(vld1q_f32(y),     vcvtq_f32_s32(y0), unit[r]));
            vst1q_f32(y + 4, vfmaq_n_f32(vld1q_f32(y + 4), vcvtq_f32_s32(y1), unit[r]));
        }
    }
    (void) sum;
}
