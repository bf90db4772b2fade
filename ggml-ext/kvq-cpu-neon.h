// SPDX-License-Identifier: MIT
//
// The formats by NEON, as every AArch64 CPU has it. Included by kvq-cpu.c alone.
//
// Neither the dot product nor the half-precision extension is used. The query of a dot product is f32, and from 8 bits
// to f32 it takes a table lookup and a conversion; a detour over f16 takes as many instructions. In the encoder only the
// sum of squared levels would get shorter, by a few of 1700 instructions.
//
// Intrinsics do not keep a compiler from contracting a product and a sum to a fused multiply-add, which would change bits.
// So the encoder and the decoder nowhere add to a product of floats.

#pragma once

#include "kvq-formats.h"

#include <arm_neon.h>
#include <float.h>
#include <math.h>
#include <stdatomic.h>
#include <string.h>

#define KVQ_CPU_NAME "neon"

// The number of bits has to be a constant after inlining, and the encoder is too long for the compiler's own choice.
#define KVQ_NEON_INLINE   static inline __attribute__((always_inline))
#define KVQ_NEON_NOINLINE static __attribute__((noinline))

// bytes of the first plane, see KVQ_FORMATS; a constant, unlike the member of struct kvq_format
#define KVQ_NEON_N_QS(bits) ((bits) >= 4 ? 16 : 8)

//
// decoder
//

// indices of the codebook from a block: m[0] of rows 0..15, m[1] of rows 16..31
KVQ_NEON_INLINE void kvq_neon_indices(const int bits, const void * block, uint8x16_t m[2]) {
    const uint8_t * qs = (const uint8_t *) block + sizeof(ggml_fp16_t);
    const uint8_t * qh = qs + KVQ_NEON_N_QS(bits);

    if (bits >= 4) {
        // The path runs along the nibbles from the low end, so two steps back is the byte before, and one step back is
        // bit 4 of the byte before for low nibbles, bit 0 of the same byte for high ones.
        const uint8x16_t x    = vld1q_u8(qs);
        const uint8x16_t prev = vextq_u8(vdupq_n_u8(0), x, 15);
        const uint8x16_t y    = veorq_u8(x, vandq_u8(prev, vdupq_n_u8(0x11))); // nibbles: the bits of e, b[t]^b[t-2]
        m[0] = vsliq_n_u8(vshrq_n_u8(prev, 4), vandq_u8(y, vdupq_n_u8(0x0f)), 1);
        m[1] = vsliq_n_u8(x,                   vshrq_n_u8(y, 4),              1);
    } else {
        // Fields of 2 bits and the bit before them do not fit side by side: even fields in one half, odd in the other.
        uint64_t w;
        memcpy(&w, qs, sizeof(w));
        const int64x2_t shift_y = { 1, -1 };
        const int64x2_t shift_x = { 2,  0 };

        const uint64x2_t x = vdupq_n_u64(w);
        const uint64x2_t y = veorq_u64(x, vandq_u64(vshlq_n_u64(x, 4), vdupq_n_u64(0x5555555555555555)));
        const uint8x16_t z = vbslq_u8(vdupq_n_u8(0x11), vreinterpretq_u8_u64(vshlq_u64(x, shift_x)),
                                                        vreinterpretq_u8_u64(vshlq_u64(y, shift_y)));
        m[0] = vandq_u8(z,                vdupq_n_u8(7));
        m[1] = vandq_u8(vshrq_n_u8(z, 4), vdupq_n_u8(7));
    }

    if (bits == 3 || bits == 5) {
        const int8x16_t s0 = { 0, 0, 0, 0, -1, -1, -1, -1, -2, -2, -2, -2, -3, -3, -3, -3 };
        const int8x16_t s1 = vaddq_s8(s0, vdupq_n_s8(-4));

        uint32_t w;
        memcpy(&w, qh, sizeof(w));
        const uint8x16_t x   = vreinterpretq_u8_u32(vdupq_n_u32(w));
        const int8x16_t  up  = vdupq_n_s8(bits == 3 ? 3 : 5);
        const uint8x16_t bit = vdupq_n_u8(bits == 3 ? 1 << 3 : 1 << 5);
        m[0] = vbslq_u8(bit, vshlq_u8(x, vaddq_s8(s0, up)), m[0]);
        m[1] = vbslq_u8(bit, vshlq_u8(x, vaddq_s8(s1, up)), m[1]);
    } else if (bits == 6) {
        const int8x16_t s0 = { 5, 5, 5, 5, 5, 5, 5, 5,  3,  3,  3,  3,  3,  3,  3,  3 };
        const int8x16_t s1 = { 1, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1, -1, -1, -1 };

        const uint8x8_t  w = vld1_u8(qh);
        const uint8x16_t x = vcombine_u8(w, w);
        m[0] = vbslq_u8(vdupq_n_u8(0x60), vshlq_u8(x, s0), m[0]);
        m[1] = vbslq_u8(vdupq_n_u8(0x60), vshlq_u8(x, s1), m[1]);
    }
}

// The codebook of kvq6 is index - 64 in the middle. What is added beyond: at j = (index + 19) % 128, so that the upper
// end (index 109..127, j 0..18) and the lower end (index 0..19, j 19..38) are neighbours, and a lookup beyond the table
// adds 0. One lookup in 3 registers instead of two in 4.
static const int8_t kvq_neon_kvq6_ends[48] = {
      1,   2,   3,   4,   5,   6,   7,   8,   9,  10,  11,  12,  15,  18,  21,  24,  27,  30,  33,
    -36, -33, -30, -27, -24, -21, -18, -15, -12, -11, -10,  -9,  -8,  -7,  -6,  -5,  -4,  -3,  -2,  -1,
};

KVQ_NEON_INLINE int8x16_t kvq_neon_levels(const struct kvq_format * f, const int bits, uint8x16_t m) {
    if (bits <= 3) {
        return vqtbl1q_s8(vld1q_s8(f->levels), m);
    }
    if (bits == 4) {
        return vqtbl2q_s8(vld1q_s8_x2(f->levels), m);
    }
    if (bits == 5) {
        return vqtbl4q_s8(vld1q_s8_x4(f->levels), m);
    }
    const uint8x16_t j = vandq_u8(vaddq_u8(m, vdupq_n_u8(19)), vdupq_n_u8(127));
    return vaddq_s8(vsubq_s8(vreinterpretq_s8_u8(m), vdupq_n_s8(64)), vqtbl3q_s8(vld1q_s8_x3(kvq_neon_kvq6_ends), j));
}

// 16 levels as floats. A lookup puts a level into the high byte of a lane and zeros below it; the conversion divides by
// 2^24. So a lookup stands for one and a half widenings.
KVQ_NEON_INLINE void kvq_neon_to_float(int8x16_t l, float32x4_t v[4]) {
    const uint8x16_t i0 = { 255, 255, 255,  0, 255, 255, 255,  1, 255, 255, 255,  2, 255, 255, 255,  3 };
    const uint8x16_t i1 = { 255, 255, 255,  4, 255, 255, 255,  5, 255, 255, 255,  6, 255, 255, 255,  7 };
    const uint8x16_t i2 = { 255, 255, 255,  8, 255, 255, 255,  9, 255, 255, 255, 10, 255, 255, 255, 11 };
    const uint8x16_t i3 = { 255, 255, 255, 12, 255, 255, 255, 13, 255, 255, 255, 14, 255, 255, 255, 15 };
    v[0] = vcvtq_n_f32_s32(vreinterpretq_s32_s8(vqtbl1q_s8(l, i0)), 24);
    v[1] = vcvtq_n_f32_s32(vreinterpretq_s32_s8(vqtbl1q_s8(l, i1)), 24);
    v[2] = vcvtq_n_f32_s32(vreinterpretq_s32_s8(vqtbl1q_s8(l, i2)), 24);
    v[3] = vcvtq_n_f32_s32(vreinterpretq_s32_s8(vqtbl1q_s8(l, i3)), 24);
}

KVQ_NEON_INLINE float kvq_neon_scale(const void * block) {
    uint16_t d;
    memcpy(&d, block, sizeof(d));
    return vgetq_lane_f32(vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(d))), 0);
}

// d: as f16 holds it or to be rounded, finite
KVQ_NEON_INLINE float kvq_neon_set_scale(void * block, float d) {
    const float16x4_t d16  = vcvt_f16_f32(vdupq_n_f32(d));
    const uint16_t    word = vget_lane_u16(vreinterpret_u16_f16(d16), 0);
    memcpy(block, &word, sizeof(word));
    return vgetq_lane_f32(vcvt_f32_f16(d16), 0);
}

// Halves of a block are calls, not turns of a loop: not every compiler unrolls one of two turns.
KVQ_NEON_INLINE void kvq_neon_store_scaled(int8x16_t l, float d, float * x) {
    float32x4_t v[4];
    kvq_neon_to_float(l, v);
    for (int i = 0; i < 4; i++) {
        vst1q_f32(x + 4*i, vmulq_n_f32(v[i], d));
    }
}

KVQ_NEON_INLINE float32x4_t kvq_neon_dot_levels(int8x16_t l, const float * y) {
    float32x4_t v[4];
    kvq_neon_to_float(l, v);
    float32x4_t sum = vmulq_f32(v[0], vld1q_f32(y));
    for (int i = 1; i < 4; i++) {
        sum = vfmaq_f32(sum, v[i], vld1q_f32(y + 4*i));
    }
    return sum;
}

KVQ_NEON_INLINE void kvq_decode_block(const struct kvq_format * f, const int bits, const void * block, float * x) {
    const float d = kvq_neon_scale(block);

    uint8x16_t m[2];
    kvq_neon_indices(bits, block, m);

    // both before the first store, after which the compiler would load the codebook again
    const int8x16_t l[2] = { kvq_neon_levels(f, bits, m[0]), kvq_neon_levels(f, bits, m[1]) };

    kvq_neon_store_scaled(l[0], d, x);
    kvq_neon_store_scaled(l[1], d, x + 16);
}

// sum over n_blocks of x (blocks) times y (values)
KVQ_NEON_INLINE float kvq_dot_blocks(const struct kvq_format * f, const int bits, const void * x, const float * y,
                                     int64_t n_blocks) {
    float32x4_t sum = vdupq_n_f32(0.0f);

    for (int64_t b = 0; b < n_blocks; b++) {
        const void *  block = (const char *) x + b*f->size;
        const float * yb    = y + b*QK_KVQ;

        uint8x16_t m[2];
        kvq_neon_indices(bits, block, m);

        const float32x4_t part0 = kvq_neon_dot_levels(kvq_neon_levels(f, bits, m[0]), yb);
        const float32x4_t part1 = kvq_neon_dot_levels(kvq_neon_levels(f, bits, m[1]), yb + 16);
        sum = vfmaq_n_f32(sum, vaddq_f32(part0, part1), kvq_neon_scale(block));
    }
    return vaddvq_f32(sum);
}

//
// encoder
//

// For a unit t (see kvq_nearest_unit) and a subset c of the codebook (index % 4), the index of the nearest level in the
// subset is
//
//     e = nearest[t + 128][c] >> 2 = (t + offset[c][cell]) >> shift, in 8 bits without a sign,
//
// where a cell is a run of 8 or 16 units, short enough that e steps up once in it, at any unit; or, in the middle of
// kvq6, every 4 units. So two lookups of 16 or 32 bytes replace one of 256.
struct kvq_neon_tables {
    uint8_t offset[128];   // [c][cell]
    int8_t  level[4][32];  // [c][e]
    int8_t  shift[32];     // [cell], negative: to the right; kvq6 alone looks it up
};

#define KVQ_NEON_KVQ6_TOP 119 // above all levels; cells of kvq6 are cut there, so that the last one is not too long

// t, and its cell
KVQ_NEON_INLINE uint8x16_t kvq_neon_cells(const int bits, int8x16_t * t) {
    if (bits <= 4) {
        return vshrq_n_u8(vreinterpretq_u8_s8(*t), 4);
    }
    if (bits == 5) {
        return vshrq_n_u8(vreinterpretq_u8_s8(*t), 3);
    }
    // Two units are left out below 0: so the cells meet both ends of the middle of kvq6, where steps are 4 units apart.
    *t = vminq_s8(*t, vdupq_n_s8(KVQ_NEON_KVQ6_TOP));
    const int8x16_t gap = vsraq_n_s8(vsraq_n_s8(*t, *t, 7), *t, 7);
    return vshrq_n_u8(vaddq_u8(vreinterpretq_u8_s8(gap), vdupq_n_u8(128 + 3)), 3);
}

KVQ_NEON_NOINLINE void kvq_neon_fill(const struct kvq_format * f, const int bits, struct kvq_neon_tables * tab) {
    uint8_t cell[256];
    int8_t  unit[256];
    for (int i = 0; i < 256; i += 16) {
        for (int j = 0; j < 16; j++) {
            unit[i + j] = (int8_t) (i + j - 128);
        }
        int8x16_t t = vld1q_s8(unit + i);
        vst1q_u8(cell + i, kvq_neon_cells(bits, &t));
        vst1q_s8(unit + i, t);
    }

    // A cell is a run of units. Every unit of it is tried, so an offset that is found is right.
    const int n_cells = bits <= 4 ? 16 : 32;
    for (int first = 0, end; first < 256; first = end) {
        const int j = cell[first];
        for (end = first + 1; end < 256 && cell[end] == j; end++) { }

        int n_found = 0;
        for (int shift = bits <= 4 ? 4 : 3; shift >= (bits <= 4 ? 4 : bits == 5 ? 3 : 2) && n_found < 4; shift--) {
            n_found = 0;
            for (int c = 0; c < 4; c++) {
                for (int offset = 0; offset < 256; offset++) {
                    int i = first;
                    while (i < end && (uint8_t) (unit[i] + offset) >> shift == f->nearest[i][c] >> 2) {
                        i++;
                    }
                    if (i == end) {
                        tab->offset[c*n_cells + j] = (uint8_t) offset;
                        n_found++;
                        break;
                    }
                }
            }
            tab->shift[j] = (int8_t) -shift;
        }
        GGML_ASSERT(n_found == 4 && "the levels of a codebook are too close for the cells");
    }

    for (int m = 0; m < f->n_levels; m++) {
        tab->level[m % 4][m / 4] = f->levels[m];
    }
}

static struct kvq_neon_tables kvq_neon_tables[5]; // of 2 to 6 bits
static atomic_int             kvq_neon_states[5]; // 0: nothing, 1: being filled, 2: filled

KVQ_NEON_NOINLINE void kvq_neon_fill_once(const struct kvq_format * f, const int bits) {
    atomic_int * state = &kvq_neon_states[bits - 2];
    int expected = 0;
    if (atomic_compare_exchange_strong(state, &expected, 1)) {
        kvq_neon_fill(f, bits, &kvq_neon_tables[bits - 2]);
        atomic_store_explicit(state, 2, memory_order_release);
    } else {
        while (atomic_load_explicit(state, memory_order_acquire) != 2) { } // some 10 microseconds, once
    }
}

KVQ_NEON_INLINE const struct kvq_neon_tables * kvq_neon_get_tables(const struct kvq_format * f, const int bits) {
    if (atomic_load_explicit(&kvq_neon_states[bits - 2], memory_order_acquire) != 2) {
        kvq_neon_fill_once(f, bits);
    }
    return &kvq_neon_tables[bits - 2];
}

// e of 16 units by the offset of each
KVQ_NEON_INLINE uint8x16_t kvq_neon_nearest(const int bits, int8x16_t t, uint8x16_t cell, uint8x16_t offset,
                                            int8x16x2_t shift) {
    const uint8x16_t sum = vaddq_u8(vreinterpretq_u8_s8(t), offset);
    if (bits <= 4) {
        return vshrq_n_u8(sum, 4);
    }
    if (bits == 5) {
        return vshrq_n_u8(sum, 3);
    }
    return vshlq_u8(sum, vqtbl2q_s8(shift, cell));
}

// masks of the 32 bits of a word
KVQ_NEON_INLINE void kvq_neon_spread(uint32_t word, uint8x16_t mask[2]) {
    const uint8x16_t byte = { 0, 0, 0, 0, 0, 0, 0, 0, 1, 1,  1,  1,  1,  1,  1,   1 };
    const uint8x16_t bit  = { 1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128 };

    const uint8x16_t w = vreinterpretq_u8_u32(vdupq_n_u32(word));
    mask[0] = vtstq_u8(vqtbl1q_u8(w, byte),                          bit);
    mask[1] = vtstq_u8(vqtbl1q_u8(w, vaddq_u8(byte, vdupq_n_u8(2))), bit);
}

// Planes from 32 bytes in the order of rows, of which the low bits count: sli drops what is above a field.
KVQ_NEON_INLINE void kvq_neon_store_4_bits(uint8_t * plane, const uint8x16_t r[2]) {
    vst1q_u8(plane, vsliq_n_u8(r[0], r[1], 4));
}

KVQ_NEON_INLINE void kvq_neon_store_2_bits(uint8_t * plane, const uint8x16_t r[2]) {
    const uint8x8_t a = vsli_n_u8(vget_low_u8(r[0]), vget_high_u8(r[0]), 2);
    const uint8x8_t b = vsli_n_u8(vget_low_u8(r[1]), vget_high_u8(r[1]), 2);
    vst1_u8(plane, vsli_n_u8(a, b, 4));
}

KVQ_NEON_INLINE void kvq_neon_store_1_bit(uint8_t * plane, const uint8x16_t r[2]) {
    const uint32x4_t r0 = vreinterpretq_u32_u8(r[0]);
    const uint32x4_t r1 = vreinterpretq_u32_u8(r[1]);

    const uint8x16_t a = vsliq_n_u8(vreinterpretq_u8_u32(vuzp1q_u32(r0, r1)), vreinterpretq_u8_u32(vuzp2q_u32(r0, r1)), 1);
    const uint32x2_t lo = vget_low_u32 (vreinterpretq_u32_u8(a));
    const uint32x2_t hi = vget_high_u32(vreinterpretq_u32_u8(a));

    const uint8x8_t  b = vsli_n_u8(vreinterpret_u8_u32(vuzp1_u32(lo, hi)), vreinterpret_u8_u32(vuzp2_u32(lo, hi)), 2);
    const uint8x8_t  c = vsli_n_u8(b, vreinterpret_u8_u32(vdup_lane_u32(vreinterpret_u32_u8(b), 1)), 4);
    const uint32_t   w = vget_lane_u32(vreinterpret_u32_u8(c), 0);
    memcpy(plane, &w, sizeof(w));
}

// A block from a path, without its scale. Sums of y*level and level^2 over the path.
KVQ_NEON_INLINE void kvq_neon_set_path(const struct kvq_format * f, const struct kvq_neon_tables * tab, const int bits,
                                       void * block, uint32_t path, const int16_t * y, int k,
                                       int32_t * sum_yl, int32_t * sum_ll) {
    // the values of candidate k: every fourth of y
    const uint8x16_t  pick_0 = { 0, 1, 8, 9, 16, 17, 24, 25, 32, 33, 40, 41, 48, 49, 56, 57 };
    const uint8x16_t  pick   = vaddq_u8(pick_0, vdupq_n_u8((uint8_t) (2*k)));
    int16x8_t yk[4];
    for (int i = 0; i < 4; i++) {
        yk[i] = vreinterpretq_s16_u8(vqtbl4q_u8(vld1q_u8_x4((const uint8_t *) (y + 32*i)), pick));
    }

    uint8x16_t mask[2], mask1[2], mask0[2];
    kvq_neon_spread(path,               mask);
    kvq_neon_spread(path ^ (path << 2), mask1);
    kvq_neon_spread(path << 1,          mask0);

    int32x4_t  yl = vdupq_n_s32(0);
    int32x4_t  ll = vdupq_n_s32(0);
    uint8x16_t v[2]; // e and the bit of the path, in the order of the path
    for (int h = 0; h < 2; h++) {
        const uint8x16_t c = vsubq_u8(vandq_u8(mask1[h], vdupq_n_u8(2)), mask0[h]); // a mask is -1

        int8x16_t t = vqrshrn_high_n_s16(vqrshrn_n_s16(yk[2*h], 6), yk[2*h + 1], 6); // see kvq_nearest_unit
        const uint8x16_t cell = kvq_neon_cells(bits, &t);

        uint8x16_t offset;
        if (bits <= 4) {
            offset = vqtbl4q_u8(vld1q_u8_x4(tab->offset), vsliq_n_u8(cell, c, 4));
        } else {
            const uint8x16_t i = vsliq_n_u8(cell, c, 5);
            offset = vqtbl4q_u8(vld1q_u8_x4(tab->offset), i);
            offset = vqtbx4q_u8(offset, vld1q_u8_x4(tab->offset + 64), vsubq_u8(i, vdupq_n_u8(64)));
        }
        const uint8x16_t e = kvq_neon_nearest(bits, t, cell, offset, vld1q_s8_x2(tab->shift));
        const int8x16_t  l = kvq_neon_levels(f, bits, vsliq_n_u8(c, e, 2));
        v[h] = vsliq_n_u8(mask[h], e, 1);

        const int16x8_t l0 = vmovl_s8(vget_low_s8(l));
        const int16x8_t l1 = vmovl_high_s8(l);
        yl = vmlal_s16     (yl, vget_low_s16(yk[2*h]), vget_low_s16(l0));
        yl = vmlal_high_s16(yl, yk[2*h],               l0);
        yl = vmlal_s16     (yl, vget_low_s16(yk[2*h + 1]), vget_low_s16(l1));
        yl = vmlal_high_s16(yl, yk[2*h + 1],               l1);
        ll = vmlal_s16     (ll, vget_low_s16(l0), vget_low_s16(l0));
        ll = vmlal_high_s16(ll, l0, l0);
        ll = vmlal_s16     (ll, vget_low_s16(l1), vget_low_s16(l1));
        ll = vmlal_high_s16(ll, l1, l1);
    }
    *sum_yl = vaddvq_s32(yl);
    *sum_ll = vaddvq_s32(ll);

    // from the order of the path to that of rows
    uint8x16_t r[2] = { vuzp1q_u8(v[0], v[1]), vuzp2q_u8(v[0], v[1]) };

    uint8_t * qs = (uint8_t *) block + sizeof(ggml_fp16_t);
    uint8_t * qh = qs + KVQ_NEON_N_QS(bits);
    if (bits >= 4) {
        kvq_neon_store_4_bits(qs, r);
        const uint8x16_t rh[2] = { vshrq_n_u8(r[0], 4), vshrq_n_u8(r[1], 4) };
        if (bits == 5) {
            kvq_neon_store_1_bit(qh, rh);
        } else if (bits == 6) {
            kvq_neon_store_2_bits(qh, rh);
        }
    } else {
        const uint8x16_t even = r[0];
        const uint8x16_t odd  = r[1];
        r[0] = vuzp1q_u8(even, odd);
        r[1] = vuzp2q_u8(even, odd);
        kvq_neon_store_2_bits(qs, r);
        if (bits == 3) {
            const uint8x16_t rh[2] = { vshrq_n_u8(r[0], 2), vshrq_n_u8(r[1], 2) };
            kvq_neon_store_1_bit(qh, rh);
        }
    }
}

// The four candidates are the lanes of all that follows, so the search needs no permutation.
KVQ_NEON_INLINE void kvq_encode_block(const struct kvq_format * f, const int bits, const float * x, void * block) {
    float32x4_t hi = vld1q_f32(x);
    float32x4_t lo = hi;
    for (int i = 4; i < QK_KVQ; i += 4) {
        const float32x4_t v = vld1q_f32(x + i);
        hi = vmaxq_f32(hi, v); // a NaN stays
        lo = vminq_f32(lo, v);
    }
    const float largest  = vmaxvq_f32(hi);
    const float smallest = vminvq_f32(lo);
    if (!(largest <= FLT_MAX && smallest >= -FLT_MAX)) {
        const ggml_fp16_t d = ggml_fp32_to_fp16(NAN);
        memset(block, 0, f->size);
        memcpy(block, &d, sizeof(d));
        return;
    }

    const float d0 = kvq_first_scale(f, largest > 0.0f ? largest : 0.0f, smallest < 0.0f ? smallest : 0.0f);
    if (d0 == 0.0f) {
        memset(block, 0, f->size);
        return;
    }

    const struct kvq_neon_tables * tab = kvq_neon_get_tables(f, bits);

    const float32x4_t tries = vmulq_n_f32(vcvtq_f32_s32(vmovl_s16(vld1_s16(f->tries))), 1.0f/256.0f);
    const float32x4_t inv   = vdivq_f32(vdupq_n_f32(KVQ_Y_ONE), vmulq_n_f32(tries, d0));

    // the tables in registers, of one or two each
    uint8x16_t   offset1[4];
    uint8x16x2_t offset2[4];
    int8x16_t    level1 [4];
    int8x16x2_t  level2 [4];
    for (int c = 0; c < 4; c++) {
        offset1[c] = vld1q_u8   (tab->offset + 16*c);
        offset2[c] = vld1q_u8_x2(tab->offset + 32*c);
        level1 [c] = vld1q_s8   (tab->level[c]);
        level2 [c] = vld1q_s8_x2(tab->level[c]);
    }
    const int8x16x2_t shift = vld1q_s8_x2(tab->shift);

    // Steps of the path by four: y, and the level of each subset that is nearest to it.
    int16_t y[4*QK_KVQ];    // [step][candidate]
    int8_t  l[4][4*QK_KVQ]; // [subset][step][candidate]
    for (int i = 0; i < QK_KVQ; i += 4) {
        int16x8_t y2[2];
        for (int j = 0; j < 2; j++) {
            // kvq_path_to_row of steps i + 2*j and i + 2*j + 1, without the divisions
            const float x0 = bits >= 4 ? x[i/2 + j]      : x[i/4 + 16*j];
            const float x1 = bits >= 4 ? x[i/2 + j + 16] : x[i/4 + 16*j + 8];
            const int16x4_t y0 = vqmovn_s32(vcvtnq_s32_f32(vmulq_n_f32(inv, x0)));
            y2[j] = vqmovn_high_s32(y0, vcvtnq_s32_f32(vmulq_n_f32(inv, x1)));
            y2[j] = vmaxq_s16(vminq_s16(y2[j], vdupq_n_s16(KVQ_Y_MAX)), vdupq_n_s16(-KVQ_Y_MAX));
            vst1q_s16(y + 4*i + 8*j, y2[j]);
        }

        int8x16_t t = vqrshrn_high_n_s16(vqrshrn_n_s16(y2[0], 6), y2[1], 6); // see kvq_nearest_unit
        const uint8x16_t cell = kvq_neon_cells(bits, &t);

        for (int c = 0; c < 4; c++) {
            const uint8x16_t o = bits <= 4 ? vqtbl1q_u8(offset1[c], cell) : vqtbl2q_u8(offset2[c], cell);
            const uint8x16_t e = kvq_neon_nearest(bits, t, cell, o, shift);
            vst1q_s8(l[c] + 4*i, bits <= 5 ? vqtbl1q_s8(level1[c], e) : vqtbl2q_s8(level2[c], e));
        }
    }

    // The search. States are 2*b[t-2] + b[t-1]; the path starts in state 0. Each state carries the bits of its path
    // along: cheaper than to remember the choices and trace them back, one step after the other.
    int32x4_t  cost[4] = { vdupq_n_s32(0), vdupq_n_s32(1 << 30), vdupq_n_s32(1 << 30), vdupq_n_s32(1 << 30) };
    uint32x4_t path[4] = { vdupq_n_u32(0), vdupq_n_u32(0), vdupq_n_u32(0), vdupq_n_u32(0) };
    uint32x4_t bit     = vdupq_n_u32(1);

    for (int i = 0; i < QK_KVQ; i += 4) {
        const int16x8_t y2[2] = { vld1q_s16(y + 4*i), vld1q_s16(y + 4*i + 8) };

        int16x8_t diff[2][4];
        for (int c = 0; c < 4; c++) {
            const int8x16_t lc = vld1q_s8(l[c] + 4*i);
            diff[0][c] = vsubq_s16(y2[0], vshll_n_s8(vget_low_s8(lc), 6)); // KVQ_Y_ONE is 1 << 6
            diff[1][c] = vsubq_s16(y2[1], vshll_high_n_s8(lc, 6));
        }

        for (int j = 0; j < 4; j++) {
            int32x4_t dist[4];
            for (int c = 0; c < 4; c++) {
                const int16x8_t d2 = diff[j/2][c];
                dist[c] = j % 2 ? vmull_high_s16(d2, d2) : vmull_s16(vget_low_s16(d2), vget_low_s16(d2));
            }

            int32x4_t  next_cost[4];
            uint32x4_t next_path[4];
            for (int s = 0; s < 4; s++) {
                const int        b     = s & 1;
                const int        b1    = s >> 1;
                const int32x4_t  lower = vaddq_s32(cost[b1],     dist[2*b       + b1]);
                const int32x4_t  upper = vaddq_s32(cost[2 + b1], dist[2*(b ^ 1) + b1]);
                const uint32x4_t taken = vbslq_u32(vcltq_s32(upper, lower), path[2 + b1], path[b1]);
                next_cost[s] = vminq_s32(lower, upper);
                next_path[s] = b ? vorrq_u32(taken, bit) : taken;
            }
            for (int s = 0; s < 4; s++) {
                cost[s] = next_cost[s];
                path[s] = next_path[s];
            }
            bit = vshlq_n_u32(bit, 1);
        }
    }

    for (int s = 1; s < 4; s++) {
        path[0] = vbslq_u32(vcltq_s32(cost[s], cost[0]), path[s], path[0]);
        cost[0] = vminq_s32(cost[0], cost[s]);
    }

    float    err  [KVQ_N_CANDIDATES];
    uint32_t paths[KVQ_N_CANDIDATES];
    vst1q_f32(err, vmulq_f32(vcvtq_f32_s32(cost[0]), vmulq_f32(tries, tries)));
    vst1q_u32(paths, path[0]);

    int best = 0;
    for (int k = 1; k < KVQ_N_CANDIDATES; k++) {
        if (err[k] < err[best]) {
            best = k;
        }
    }

    int32_t sum_yl, sum_ll;
    kvq_neon_set_path(f, tab, bits, block, paths[best], y, best, &sum_yl, &sum_ll);
    if (!kvq_set_scale(f, block, best, err[best], err[0], d0, sum_yl, sum_ll)) {
        uint8_t absmax[sizeof(block_kvq6)];
        kvq_neon_set_path(f, tab, bits, absmax, paths[0], y, 0, &sum_yl, &sum_ll);
        kvq_neon_set_scale(absmax, d0);
        kvq_keep_bound(f, x, block, absmax);
    }
}
