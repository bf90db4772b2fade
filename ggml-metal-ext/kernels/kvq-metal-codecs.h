// SPDX-License-Identifier: MIT
//
// Decoders of every type that a cache can have, for kernels that learn the type from a function constant. kvq_decode4 gives
// values 4*i to 4*i + 3 of a row. (The encoder is in kvq_rows.metal.)
//
// ggml-ext/kvq-formats.h tells the formats; kvq-formats.c is the reference that this file must agree with.
//
// Nearly all types keep value i of a plane of B bytes in byte i % B, in field i / B. So 4 values that stand side by side in a
// row are the same field of 4 bytes that stand side by side, and one 32-bit word has them all: shift, mask, done. What differs
// is where a plane begins, what the codes are combined with, and how a code becomes a level. One body for all types,
// with numbers that depend on the type, is a fraction of the code of a body for each: before a pipeline is specialized all
// types are in a kernel, times the copies of its unrolled loops.

#pragma once

#include "common.h"
#include "kvq-metal-impl.h"

constant int32_t FC_kvq_type_k [[function_constant(FC_KVQ_TYPE_K)]];
constant int32_t FC_kvq_type_v [[function_constant(FC_KVQ_TYPE_V)]];

// The codebooks of kvq-formats.c. Those of kvq5 and kvq6 follow a line with three slopes: see kvq_line.
static constant char kvq2_levels[8]  = { -125, -70, -43, -16, 4, 30, 56, 99 };
static constant char kvq3_levels[16] = { -127, -94, -72, -56, -43, -30, -20, -9, 0, 11, 20, 32, 43, 58, 76, 103 };
static constant char kvq4_levels[32] = {
    -125, -105, -90, -77, -68, -60, -53, -46, -40, -34, -29, -24, -19, -14, -10, -5,
       0,    5,   9,  14,  19,  24,  29,  35,  40,  47,  53,  61,  70,  80,  93, 109
};

// upstream's iq4_nl, as bytes
static constant char kvq_iq4_nl_levels[16] = { -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113 };

// as unsigned shorts: blocks are aligned to 2 bytes alone
typedef ushort kvq_word;

// What upstream's attention template takes for the type of K or V in memory: a pointer to it is the begin of a row.
typedef struct { char first; } kvq_row;

static inline bool kvq_is_kvq(const int type) {
    return type >= KVQ_METAL_TYPE_KVQ2;
}

// levels follow a line instead of a table
static inline bool kvq_is_line(const int type) {
    return type >= KVQ_METAL_TYPE_KVQ5;
}

static inline short kvq_bits(const int type) {
    return type - KVQ_METAL_TYPE_KVQ2 + 2;
}

// bits of a field of the first plane, that is, words of 32 bits in this plane
static inline short kvq_width(const int type) {
    return type == KVQ_METAL_TYPE_KVQ2 || type == KVQ_METAL_TYPE_KVQ3 ? 2 : 4;
}

// the same of the second plane of our own types
static inline short kvq_width_high(const int type) {
    return kvq_bits(type) - kvq_width(type);
}

static inline short kvq_block_size(const int type) {
    switch (type) {
        case KVQ_METAL_TYPE_Q4_0:   return 18;
        case KVQ_METAL_TYPE_Q4_1:   return 20;
        case KVQ_METAL_TYPE_Q5_0:   return 22;
        case KVQ_METAL_TYPE_Q5_1:   return 24;
        case KVQ_METAL_TYPE_Q8_0:   return 34;
        case KVQ_METAL_TYPE_IQ4_NL: return 18;
        default:                    return 2 + 4*kvq_bits(type);
    }
}

static inline uint kvq_load_word(device const kvq_word * p) {
    return p[0] | ((uint) p[1] << 16);
}

// Where group g of 4 codes is in a plane with fields of `width` bits, 1, 2 or 4: the word, and how far up in its bytes.
static inline short kvq_word_of(const short width, const short g) {
    return g & (width - 1);
}

static inline short kvq_shift_of(const short width, const short g) {
    return width*(g >> (width/2)); // width*(g/width), without a division
}

// one in each byte
static inline uint kvq_load_codes(device const kvq_word * plane, const short width, const short g) {
    return (kvq_load_word(plane + 2*kvq_word_of(width, g)) >> kvq_shift_of(width, g)) & (0x01010101u*((1u << width) - 1u));
}

// Group g of 4 codes 4*e + subset, without the bits of e that are in the second plane.
// The bits of the path one and two steps back are those of the fields before, and those before the lowest field are the highest
// ones of the byte before. No byte is before the first one: the path begins with zeros.
static inline uint kvq_load_path_codes(device const kvq_word * plane, const short width, const short g) {
    const short j = kvq_word_of(width, g);
    const short s = kvq_shift_of(width, g);

    const uint now    = kvq_load_word(plane + 2*j);
    const uint before = (now << 8) | (j > 0 ? plane[2*j - 1] >> 8 : 0);

    const uint q  = (now >> s) & (0x01010101u*((1u << width) - 1u));
    const uint b1 = ((s >= 1*width ? now : before) >> ((s - 1*width) & 7)) & 0x01010101u;
    const uint b2 = ((s >= 2*width ? now : before) >> ((s - 2*width) & 7)) & 0x01010101u;

    return ((q ^ b2) << 1) | b1;
}

// Levels of kvq5 and kvq6 at a distance x from the middle of the codebook. |x| - max(|x| - B, 0) is a clamp to +-B, and so is
// every bend of the line. Integers below 2^24: exact in whatever order.
template <typename T>
static inline T kvq_line(const int type, const T x) {
    const bool is_5 = type == KVQ_METAL_TYPE_KVQ5;

    const T first  = is_5 ? 20.0f : 44.0f;
    const T second = is_5 ? 28.0f : 56.0f;

    return x*(is_5 ? 7.0f : 4.0f) - clamp(x, -first, first)*(is_5 ? 2.0f : 1.0f) - clamp(x, -second, second)*(is_5 ? 3.0f : 2.0f);
}

// index of the level 0 of kvq5, kvq6 and the types with equal steps
static inline float kvq_middle(const int type) {
    return type == KVQ_METAL_TYPE_KVQ6 ? 64.0f : type == KVQ_METAL_TYPE_KVQ5 ? 32.0f :
           type == KVQ_METAL_TYPE_Q5_0 ? 16.0f : type == KVQ_METAL_TYPE_Q4_0 ? 8.0f : 0.0f;
}

static inline constant char * kvq_table(const int type) {
    return type == KVQ_METAL_TYPE_KVQ2 ? kvq2_levels : type == KVQ_METAL_TYPE_KVQ3 ? kvq3_levels :
           type == KVQ_METAL_TYPE_KVQ4 ? kvq4_levels : kvq_iq4_nl_levels;
}

// the 4 bits as the lowest of 4 bytes: bit i goes to bit 8*i of the product, and no two to the same bit
static inline uint kvq_spread4(const uint bits) {
    return (bits*0x00204081u) & 0x01010101u;
}

// Values 4*i to 4*i + 3 of a row. Exact, but for one rounding of the sum in q4_1 and q5_1.
static inline float4 kvq_decode4(const int type, device const char * row, const int i) {
    if (type == KVQ_METAL_TYPE_F32) {
        return ((device const float4 *) row)[i];
    }
    if (type == KVQ_METAL_TYPE_F16) {
        return float4(((device const half4 *) row)[i]);
    }
    if (type == KVQ_METAL_TYPE_BF16) {
        // by its bits, which are the upper ones of a float: needs no device that knows the type
        return as_type<float4>(uint4(((device const ushort4 *) row)[i])*0x10000u);
    }

    const short g = i % 8;

    device const kvq_word * block = (device const kvq_word *) (row + (i/8)*kvq_block_size(type));

    const float d = *(device const half *) block;

    if (type == KVQ_METAL_TYPE_Q8_0) {
        return d*float4(as_type<char4>(kvq_load_word(block + 1 + 2*g)));
    }

    uint   m; // 4 indices
    float4 level;
    float  offset = 0.0f;

    const bool has_min = type == KVQ_METAL_TYPE_Q4_1 || type == KVQ_METAL_TYPE_Q5_1;

    if (kvq_is_kvq(type)) {
        const short width = kvq_width(type);
        const short high  = kvq_width_high(type);

        m = kvq_load_path_codes(block + 1, width, g);
        if (high > 0) {
            m |= kvq_load_codes(block + 1 + 2*width, high, g) << (width + 1);
        }
    } else {
        const bool has_high = type == KVQ_METAL_TYPE_Q5_0 || type == KVQ_METAL_TYPE_Q5_1;

        device const kvq_word * p = block + (has_min ? 2 : 1);

        m = kvq_load_codes(p + (has_high ? 2 : 0), 4, g);
        if (has_high) {
            m |= kvq_spread4((kvq_load_word(p) >> (4*g)) & 15) << 4;
        }
        if (has_min) {
            offset = ((device const half *) block)[1];
        }
    }

    if (type == KVQ_METAL_TYPE_IQ4_NL || (kvq_is_kvq(type) && !kvq_is_line(type))) {
        constant char * table = kvq_table(type);
        level = float4(table[m & 255], table[(m >> 8) & 255], table[(m >> 16) & 255], table[m >> 24]);
    } else {
        level = float4(as_type<uchar4>(m)) - kvq_middle(type);
        if (kvq_is_line(type)) {
            level = kvq_line(type, level);
        }
    }

    return has_min ? d*level + offset : d*level;
}

// Values 16*i to 16*i + 15 of a row.
static inline float4x4 kvq_decode16(const int type, device const char * row, const int i) {
    float4x4 reg;
    FOR_UNROLL (short k = 0; k < 4; ++k) {
        reg[k] = kvq_decode4(type, row, 4*i + k);
    }
    return reg;
}

// In the form that upstream's attention template takes.

template <typename type4>
void kvq_decode_k_t4(device const kvq_row * row, short i, thread type4 & reg) {
    reg = (type4) kvq_decode4(FC_kvq_type_k, (device const char *) row, i);
}

template <typename type4>
void kvq_decode_v_t4(device const kvq_row * row, short i, thread type4 & reg) {
    reg = (type4) kvq_decode4(FC_kvq_type_v, (device const char *) row, i);
}

// these have one row and all its groups
#define KVQ_ROW_K_T4 kvq_row, 32767, kvq_decode_k_t4
#define KVQ_ROW_V_T4 kvq_row, 32767, kvq_decode_v_t4
