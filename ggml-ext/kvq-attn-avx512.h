// SPDX-License-Identifier: MIT
//
// Attention by levels on AVX-512 with VNNI, VBMI and VBMI2. Included by kvq-attn.cpp alone.
//
// vpdpbusd multiplies unsigned with signed bytes and adds four neighbours to a lane of 32 bits, so levels are kept as unsigned
// bytes, with a bias that is taken off afterwards, and a register holds 16 lanes of four neighbours:
// - K: lanes are 16 positions, the four bytes of a lane are 4 values of the head. A query's 4 values are broadcast, and
//   16 scores come out, without a sum across lanes.
// - V: lanes are 16 values of the head, the four bytes are 4 positions. The weights of 4 positions are broadcast.
// Both layouts are reached before decoding, with packed planes: for 4 bits, half the bytes that levels would be to shuffle.
// Then decoding is elementwise, 64 values at a time.
//
// A tile of K:  [16 positions][block of 32 values][8][64 bytes], scales [block][position].
// A tile of V:  [block][4 positions][2][64 bytes],               scales [block][position].

#pragma once

#include "kvq-attn.h"
#include "kvq-attn-vec.h"
#include "kvq-formats.h"

#define KVQ_LEVELS_POSITIONS 32 // a tile of K is filled in steps of so many

// what the bytes of a tile are above the levels
constexpr int kvq_levels_bias(enum ggml_type type) {
    switch (type) {
        case GGML_TYPE_Q4_0:
        case GGML_TYPE_Q4_1: return 8;  // with a minimum, too, levels are taken from the middle: small weights that are rounded
        case GGML_TYPE_Q5_0:            // away would otherwise be missed with one sign
        case GGML_TYPE_Q5_1: return 16;
        default:             return 128;
    }
}

//
// types
//

// Bytes of a block: scale, then what `plane` and `high` point at.
template <enum ggml_type type> struct kvq_levels_of;

#define KVQ_LEVELS_OF(TYPE, n_size, n_bits, n_plane, at_plane, n_high, at_high, has_min)             \
    template <> struct kvq_levels_of<GGML_TYPE_##TYPE> {                                             \
        static constexpr int  size = n_size, bits = n_bits;                                          \
        static constexpr int  plane_size = n_plane, plane = at_plane;                                \
        static constexpr int  high_size  = n_high,  high  = at_high;                                 \
        static constexpr bool min = has_min;                                                         \
    };
KVQ_LEVELS_OF(Q8_0,   34, 8, 32, 2, 0,  0, false)
KVQ_LEVELS_OF(Q4_0,   18, 4, 16, 2, 0,  0, false)
KVQ_LEVELS_OF(Q4_1,   20, 4, 16, 4, 0,  0, true )
KVQ_LEVELS_OF(IQ4_NL, 18, 4, 16, 2, 0,  0, false)
KVQ_LEVELS_OF(Q5_0,   22, 5, 16, 6, 4,  2, false)
KVQ_LEVELS_OF(Q5_1,   24, 5, 16, 8, 4,  4, true )
#define KVQ_LEVELS_OF_KVQ(name, NAME, bits, n_qs, n_qh) \
    KVQ_LEVELS_OF(NAME, 2 + n_qs + n_qh, bits, n_qs, 2, n_qh, 2 + n_qs, false)
KVQ_FORMATS(KVQ_LEVELS_OF_KVQ)

#define KVQ_LEVELS_TYPES(X) X(Q8_0) X(Q4_0) X(Q4_1) X(Q5_0) X(Q5_1) X(IQ4_NL) X(KVQ2) X(KVQ3) X(KVQ4) X(KVQ5) X(KVQ6)

constexpr bool kvq_is_trellis(enum ggml_type type) {
    return type >= GGML_TYPE_KVQ2 && type <= GGML_TYPE_KVQ6;
}

// levels of a codebook, as bytes above the bias; repeated to fill the tables, so that higher bits of an index don't matter
struct kvq_levels_table { __m512i lo, hi; };

template <enum ggml_type type> static kvq_levels_table kvq_levels_make_table() {
    uint8_t tab[128] = { 0 };
    if constexpr (kvq_is_trellis(type)) {
        const struct kvq_format * f = kvq_get_format(type);
        for (int i = 0; i < 128; i++) {
            tab[i] = (uint8_t) (f->levels[i % f->n_levels] + 128);
        }
    } else if constexpr (type == GGML_TYPE_IQ4_NL) {
        // upstream's levels, by decoding a block that has each of them
        struct { ggml_fp16_t d; uint8_t qs[16]; } block;
        float y[32];
        block.d = ggml_fp32_to_fp16(1.0f);
        for (int i = 0; i < 16; i++) {
            block.qs[i] = (uint8_t) i;
        }
        ggml_get_type_traits(type)->to_float(&block, y, 32);
        for (int i = 0; i < 128; i++) {
            tab[i] = (uint8_t) ((int) y[i % 16] + 128);
        }
    }
    return { _mm512_loadu_si512(tab), _mm512_loadu_si512(tab + 64) };
}

//
// elementwise decoding
//

#define KVQ_SELECT 0xca // ternary logic: a ? b : c, bit by bit
KVQ_INLINE __m512i kvq_select(__m512i mask, __m512i a, __m512i b) { return _mm512_ternarylogic_epi32(mask, a, b, KVQ_SELECT); }
KVQ_INLINE __m512i kvq_bytes(int x) { return _mm512_set1_epi8((char) x); }

// dword shift: left if n > 0
template <int n> KVQ_INLINE __m512i kvq_shift(__m512i x) {
    if constexpr (n > 0) {
        return _mm512_slli_epi32(x, n);
    } else if constexpr (n < 0) {
        return _mm512_srli_epi32(x, -n);
    } else {
        return x;
    }
}

// What a trellis needs of a plane x, see kvq-formats.h: ec, with b[t-2] in place, and b1, the plane of b[t-1].
// x2, x1: the plane, moved by two fields and by one along the path.
template <int field> KVQ_INLINE __m512i kvq_trellis_ec(__m512i x, __m512i x2) {
    return _mm512_ternarylogic_epi32(x, x2, kvq_bytes(field == 4 ? 0x11 : 0x55), 0x78); // x ^ (x2 & mask)
}

// indices of field f, without bits of the second plane; bits above those of an index are not 0
template <int field, int f> KVQ_INLINE __m512i kvq_trellis_index(__m512i ec, __m512i b1) {
    return kvq_select(kvq_bytes(field == 4 ? 0x1e : 0x06), kvq_shift<1 - field*f>(ec), kvq_shift<-field*f>(b1));
}

template <enum ggml_type type> KVQ_INLINE __m512i kvq_lookup(const kvq_levels_table & tab, __m512i index) {
    if constexpr (type == GGML_TYPE_KVQ6) {
        return _mm512_permutex2var_epi8(tab.lo, index, tab.hi);
    } else {
        return _mm512_permutexvar_epi8(index, tab.lo);
    }
}

//
// headers: scales, minima and high bits, copied to where vectors can load them
//

struct kvq_levels_heads {
    uint16_t d   [KVQ_ATTN_N];
    uint16_t m   [KVQ_ATTN_N];
    alignas(64) uint8_t high[KVQ_ATTN_N*8];
};

// Beyond n_valid, the last row again.
template <enum ggml_type type> KVQ_INLINE void kvq_levels_read_heads(const char * rows, size_t stride, int n_valid, int n, kvq_levels_heads & h) {
    using T = kvq_levels_of<type>;
    const char * block = rows;
    for (int i = 0; i < n; i++, block += i < n_valid ? stride : 0) {
        memcpy(&h.d[i], block, 2);
        if constexpr (T::min) {
            memcpy(&h.m[i], block + 2, 2);
        }
        if constexpr (T::high_size != 0) {
            memcpy(h.high + i*T::high_size, block + T::high, T::high_size);
        }
    }
}

template <enum ggml_type type> KVQ_INLINE void kvq_levels_scales(const kvq_levels_heads & h, int n, float * d, float * m) {
    for (int i = 0; i < n; i += 16) {
        const __m512 di = kvq_vf_f16(h.d + i);
        _mm512_storeu_ps(d + i, di);
        if constexpr (kvq_levels_of<type>::min) {
            _mm512_storeu_ps(m + i, _mm512_fmadd_ps(di, _mm512_set1_ps((float) kvq_levels_bias(type)), kvq_vf_f16(h.m + i)));
        }
    }
}

// 16 bytes each to the four lanes; masked broadcasts, which need no shuffle
KVQ_INLINE __m512i kvq_load_4x16(const char * p, size_t step) {
    __m512i x = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *) p));
    x = _mm512_mask_broadcast_i32x4(x, 0x00f0, _mm_loadu_si128((const __m128i *) (p +   step)));
    x = _mm512_mask_broadcast_i32x4(x, 0x0f00, _mm_loadu_si128((const __m128i *) (p + 2*step)));
    return _mm512_mask_broadcast_i32x4(x, 0xf000, _mm_loadu_si128((const __m128i *) (p + 3*step)));
}

// 8 bytes each: those at p and at p + next in the first lane, and so on
KVQ_INLINE __m512i kvq_load_8x8(const char * p, size_t step, size_t next) {
    __m512i x = _mm512_setzero_si512();
    KVQ_UNROLL
    for (int l = 0; l < 4; l++, p += step) {
        int64_t a, b;
        memcpy(&a, p,        sizeof(a));
        memcpy(&b, p + next, sizeof(b));
        x = _mm512_mask_set1_epi64(x, (__mmask8) (1 << 2*l), a);
        x = _mm512_mask_set1_epi64(x, (__mmask8) (2 << 2*l), b);
    }
    return x;
}

//
// K
//

// 16 bytes of 16 rows to dwords: t[g] has dword g of each
KVQ_INLINE void kvq_k_load_16(const char * rows, size_t stride, __m512i t[4]) {
    __m512i r[4];
    KVQ_UNROLL
    for (int j = 0; j < 4; j++) { // row 4 l + j in lane l
        r[j] = kvq_load_4x16(rows + j*stride, 4*stride);
    }
    const __m512i a0 = _mm512_unpacklo_epi32(r[0], r[1]);
    const __m512i a1 = _mm512_unpackhi_epi32(r[0], r[1]);
    const __m512i a2 = _mm512_unpacklo_epi32(r[2], r[3]);
    const __m512i a3 = _mm512_unpackhi_epi32(r[2], r[3]);
    t[0] = _mm512_unpacklo_epi64(a0, a2);
    t[1] = _mm512_unpackhi_epi64(a0, a2);
    t[2] = _mm512_unpacklo_epi64(a1, a3);
    t[3] = _mm512_unpackhi_epi64(a1, a3);
}

// the same of 8 bytes
KVQ_INLINE void kvq_k_load_8(const char * rows, size_t stride, __m512i t[2]) {
    const __m512i r0 = kvq_load_8x8(rows,            4*stride, stride); // rows 4 l and 4 l + 1 in lane l
    const __m512i r1 = kvq_load_8x8(rows + 2*stride, 4*stride, stride);
    t[0] = _mm512_castps_si512(_mm512_shuffle_ps(_mm512_castsi512_ps(r0), _mm512_castsi512_ps(r1), 0x88));
    t[1] = _mm512_castps_si512(_mm512_shuffle_ps(_mm512_castsi512_ps(r0), _mm512_castsi512_ps(r1), 0xdd));
}

// Field f of dword g: values 4 G ... 4 G + 3 of the block.
template <enum ggml_type type, int G> KVQ_INLINE __m512i kvq_k_high(__m512i index, __m512i h0, __m512i h1) {
    if constexpr (type == GGML_TYPE_KVQ3) {
        return kvq_select(kvq_bytes(0x08), kvq_shift<3 - G>(h0), index);
    } else if constexpr (type == GGML_TYPE_KVQ5) {
        return kvq_select(kvq_bytes(0x20), kvq_shift<5 - G>(h0), index);
    } else if constexpr (type == GGML_TYPE_KVQ6) {
        return kvq_select(kvq_bytes(0x60), kvq_shift<5 - 2*(G/2)>(G % 2 ? h1 : h0), index);
    } else {
        (void) h0; (void) h1;
        return index;
    }
}

template <enum ggml_type type, int G> KVQ_INLINE __m512i kvq_k_bit5(__m512i x, __m512i h) { // q5_0, q5_1
    const __m512i byte = _mm512_shuffle_epi8(h, _mm512_set4_epi32(0x0c0c0c0c + 0x01010101*(G/2), 0x08080808 + 0x01010101*(G/2),
                                                                  0x04040404 + 0x01010101*(G/2), 0x01010101*(G/2)));
    const __mmask64 bit = _mm512_test_epi8_mask(byte, _mm512_set1_epi32(G % 2 ? (int) 0x80402010 : 0x08040201));
    return _mm512_mask_add_epi8(x, bit, x, kvq_bytes(16));
}

template <enum ggml_type type, int G, int n_dwords, int field, int f, int g>
KVQ_INLINE void kvq_k_trellis(uint8_t * dst, const kvq_levels_table & tab, __m512i ec, __m512i b1, __m512i h0, __m512i h1) {
    const __m512i index = kvq_k_high<type, G>(kvq_trellis_index<field, f>(ec, b1), h0, h1);
    _mm512_store_si512(dst + 64*G, kvq_lookup<type>(tab, index));
}

template <enum ggml_type type, int g>
KVQ_INLINE void kvq_k_trellis_dword(uint8_t * dst, const kvq_levels_table & tab, const __m512i * t, __m512i h0, __m512i h1) {
    constexpr int n     = kvq_levels_of<type>::plane_size/4; // dwords of a plane
    constexpr int field = n == 4 ? 4 : 2;
    const __m512i before = g == 0 ? _mm512_setzero_si512() : t[g == 0 ? 0 : g - 1];
    const __m512i ec = kvq_trellis_ec<field>(t[g], _mm512_shldi_epi32(t[g], before, 2*field));
    const __m512i b1 = _mm512_shldi_epi32(t[g], before, field);
    kvq_k_trellis<type, g,     n, field, 0, g>(dst, tab, ec, b1, h0, h1);
    kvq_k_trellis<type, n + g, n, field, 1, g>(dst, tab, ec, b1, h0, h1);
    if constexpr (field == 2) {
        kvq_k_trellis<type, 2*n + g, n, field, 2, g>(dst, tab, ec, b1, h0, h1);
        kvq_k_trellis<type, 3*n + g, n, field, 3, g>(dst, tab, ec, b1, h0, h1);
    }
}

// Levels of a block of 16 rows, to 8 x 64 bytes; high: of these rows.
template <enum ggml_type type>
KVQ_INLINE void kvq_k_block(const char * rows, size_t stride, const uint8_t * high, const kvq_levels_table & tab, uint8_t * dst) {
    using T = kvq_levels_of<type>;
    __m512i t[4];

    if constexpr (kvq_is_trellis(type)) {
        __m512i h0 = _mm512_setzero_si512();
        __m512i h1 = h0;
        if constexpr (T::high_size == 4) {
            h0 = _mm512_load_si512(high);
        } else if constexpr (T::high_size == 8) {
            const __m512i a    = _mm512_load_si512(high);
            const __m512i b    = _mm512_load_si512(high + 64);
            const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
            h0 = _mm512_permutex2var_epi32(a, even, b);
            h1 = _mm512_permutex2var_epi32(a, _mm512_add_epi32(even, _mm512_set1_epi32(1)), b);
        }
        if constexpr (T::plane_size == 16) {
            kvq_k_load_16(rows + T::plane, stride, t);
            kvq_k_trellis_dword<type, 0>(dst, tab, t, h0, h1);
            kvq_k_trellis_dword<type, 1>(dst, tab, t, h0, h1);
            kvq_k_trellis_dword<type, 2>(dst, tab, t, h0, h1);
            kvq_k_trellis_dword<type, 3>(dst, tab, t, h0, h1);
        } else {
            kvq_k_load_8(rows + T::plane, stride, t);
            kvq_k_trellis_dword<type, 0>(dst, tab, t, h0, h1);
            kvq_k_trellis_dword<type, 1>(dst, tab, t, h0, h1);
        }
    } else if constexpr (type == GGML_TYPE_Q8_0) {
        for (int half = 0; half < 2; half++) {
            kvq_k_load_16(rows + T::plane + 16*half, stride, t);
            for (int g = 0; g < 4; g++) {
                _mm512_store_si512(dst + 64*(4*half + g), _mm512_xor_si512(t[g], kvq_bytes(0x80)));
            }
        }
    } else {
        kvq_k_load_16(rows + T::plane, stride, t);
        const __m512i h = T::high_size == 4 ? _mm512_load_si512(high) : _mm512_setzero_si512();
        __m512i x[8];
        KVQ_UNROLL
        for (int g = 0; g < 4; g++) {
            if constexpr (type == GGML_TYPE_IQ4_NL) { // the table repeats, but not as often as a byte has values
                x[g]     = _mm512_permutexvar_epi8(t[g], tab.lo);
                x[4 + g] = _mm512_permutexvar_epi8(_mm512_srli_epi32(t[g], 4), tab.lo);
            } else {
                x[g]     = _mm512_and_si512(t[g], kvq_bytes(0x0f));
                x[4 + g] = _mm512_and_si512(_mm512_srli_epi32(t[g], 4), kvq_bytes(0x0f));
            }
        }
        if constexpr (T::high_size == 4) {
            x[0] = kvq_k_bit5<type, 0>(x[0], h); x[1] = kvq_k_bit5<type, 1>(x[1], h);
            x[2] = kvq_k_bit5<type, 2>(x[2], h); x[3] = kvq_k_bit5<type, 3>(x[3], h);
            x[4] = kvq_k_bit5<type, 4>(x[4], h); x[5] = kvq_k_bit5<type, 5>(x[5], h);
            x[6] = kvq_k_bit5<type, 6>(x[6], h); x[7] = kvq_k_bit5<type, 7>(x[7], h);
        }
        KVQ_UNROLL
        for (int g = 0; g < 8; g++) {
            _mm512_store_si512(dst + 64*g, x[g]);
        }
    }
}

// Blocks b of n rows; the tile wants rows up to a multiple of `step`, and gets the last one again.
template <enum ggml_type type, int step, typename F>
KVQ_INLINE void kvq_levels_each_block(const char * rows, size_t stride, int n_valid, int n_blocks, int n, float * d, float * m, F f) {
    using T = kvq_levels_of<type>;
    kvq_levels_heads heads;
    for (int b = 0; b < n_blocks; b++) {
        kvq_levels_read_heads<type>(rows + b*T::size, stride, n_valid, n, heads);
        kvq_levels_scales<type>(heads, n, d + b*KVQ_ATTN_N, m + b*KVQ_ATTN_N);
        int i = 0;
        for (; i + step <= n_valid; i += step) {
            f(b, i, rows + b*T::size + i*stride, stride, heads.high + i*T::high_size);
        }
        for (; i < n; i += step) {
            char copy[step][T::size];
            for (int j = 0; j < step; j++) {
                memcpy(copy[j], rows + b*T::size + (i + j < n_valid ? i + j : n_valid - 1)*stride, T::size);
            }
            f(b, i, copy[0], sizeof(copy[0]), heads.high + i*T::high_size);
        }
    }
}

template <enum ggml_type type>
static void kvq_levels_k_type(const char * rows, size_t stride, int n_valid, int n_blocks, uint8_t * q, float * d, float * m) {
    static const kvq_levels_table tab = kvq_levels_make_table<type>();
    const int n = (n_valid + KVQ_LEVELS_POSITIONS - 1)/KVQ_LEVELS_POSITIONS*KVQ_LEVELS_POSITIONS;
    kvq_levels_each_block<type, 16>(rows, stride, n_valid, n_blocks, n, d, m,
        [&](int b, int i, const char * block, size_t step, const uint8_t * high) {
            kvq_k_block<type>(block, step, high, tab, q + (size_t) (i/16*n_blocks + b)*8*64);
        });
}

//
// V
//

// byte 4 j + r: byte j of 16 of row r
KVQ_INLINE __m512i kvq_v_load_16(const char * rows, size_t stride) {
    const __m512i lane = _mm512_setr_epi32(0x30201000, 0x31211101, 0x32221202, 0x33231303, 0x34241404, 0x35251505, 0x36261606, 0x37271707,
                                           0x38281808, 0x39291909, 0x3a2a1a0a, 0x3b2b1b0b, 0x3c2c1c0c, 0x3d2d1d0d, 0x3e2e1e0e, 0x3f2f1f0f);
    return _mm512_permutexvar_epi8(lane, kvq_load_4x16(rows, stride));
}

// the same of 8 bytes of 8 rows: rows 0 to 3 in the lower half
KVQ_INLINE __m512i kvq_v_load_8(const char * rows, size_t stride) {
    const __m512i lane = _mm512_setr_epi32(0x18100800, 0x19110901, 0x1a120a02, 0x1b130b03, 0x1c140c04, 0x1d150d05, 0x1e160e06, 0x1f170f07,
                                           0x38302820, 0x39312921, 0x3a322a22, 0x3b332b23, 0x3c342c24, 0x3d352d25, 0x3e362e26, 0x3f372f27);
    return _mm512_permutexvar_epi8(lane, kvq_load_8x8(rows, 2*stride, stride));
}

// Levels of a block of 4 rows (of 8 if the plane has 8 bytes), to 2 x 64 bytes for every 4 rows.
template <enum ggml_type type>
KVQ_INLINE void kvq_v_block(const char * rows, size_t stride, const uint8_t * high, const kvq_levels_table & tab, uint8_t * dst) {
    using T = kvq_levels_of<type>;

    if constexpr (kvq_is_trellis(type) && T::plane_size == 16) {
        const __m512i x = kvq_v_load_16(rows + T::plane, stride);
        const __m512i p = _mm512_maskz_alignr_epi32(0xfffe, x, x, 15); // the byte before
        const __m512i ec = kvq_trellis_ec<4>(x, p);
        const __m512i b1 = kvq_select(kvq_bytes(0xf0), _mm512_slli_epi32(x, 4), _mm512_srli_epi32(p, 4));
        __m512i i0 = kvq_trellis_index<4, 0>(ec, b1);
        __m512i i1 = kvq_trellis_index<4, 1>(ec, b1);
        if constexpr (type == GGML_TYPE_KVQ5) {
            const __m512i lane  = _mm512_set4_epi32(0x0f0b0703, 0x0e0a0602, 0x0d090501, 0x0c080400);
            const __m512i shift = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
            const __m512i h = _mm512_srlv_epi32(_mm512_permutexvar_epi8(lane, _mm512_castsi128_si512(_mm_load_si128((const __m128i *) high))), shift);
            i0 = kvq_select(kvq_bytes(0x20), _mm512_slli_epi32(h, 5), i0);
            i1 = kvq_select(kvq_bytes(0x20), _mm512_slli_epi32(h, 1), i1);
        } else if constexpr (type == GGML_TYPE_KVQ6) {
            const __m512i lane  = _mm512_setr_epi32(0x18100800, 0x19110901, 0x1a120a02, 0x1b130b03, 0x1c140c04, 0x1d150d05, 0x1e160e06, 0x1f170f07,
                                                    0x18100800, 0x19110901, 0x1a120a02, 0x1b130b03, 0x1c140c04, 0x1d150d05, 0x1e160e06, 0x1f170f07);
            const __m512i shift = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 2, 2, 2, 2, 2, 2, 2, 2);
            const __m512i h = _mm512_srlv_epi32(_mm512_permutexvar_epi8(lane, _mm512_castsi256_si512(_mm256_load_si256((const __m256i *) high))), shift);
            i0 = kvq_select(kvq_bytes(0x60), _mm512_slli_epi32(h, 5), i0);
            i1 = kvq_select(kvq_bytes(0x60), _mm512_slli_epi32(h, 1), i1);
        }
        _mm512_store_si512(dst,      kvq_lookup<type>(tab, i0));
        _mm512_store_si512(dst + 64, kvq_lookup<type>(tab, i1));
    } else if constexpr (kvq_is_trellis(type)) {
        const __m512i x = kvq_v_load_8(rows + T::plane, stride);
        const __m512i p = _mm512_maskz_alignr_epi32(0xfefe, x, x, 15);
        const __m512i x2 = kvq_select(kvq_bytes(0xf0), _mm512_slli_epi32(x, 4), _mm512_srli_epi32(p, 4));
        const __m512i b1 = kvq_select(kvq_bytes(0xfc), _mm512_slli_epi32(x, 2), _mm512_srli_epi32(p, 6));
        const __m512i ec = kvq_trellis_ec<2>(x, x2);
        __m512i i0 = kvq_trellis_index<2, 0>(ec, b1);
        __m512i i1 = kvq_trellis_index<2, 1>(ec, b1);
        __m512i i2 = kvq_trellis_index<2, 2>(ec, b1);
        __m512i i3 = kvq_trellis_index<2, 3>(ec, b1);
        if constexpr (type == GGML_TYPE_KVQ3) {
            const __m512i lane  = _mm512_setr_epi32(0x0c080400, 0x0d090501, 0x0e0a0602, 0x0f0b0703, 0x0c080400, 0x0d090501, 0x0e0a0602, 0x0f0b0703,
                                                    0x1c181410, 0x1d191511, 0x1e1a1612, 0x1f1b1713, 0x1c181410, 0x1d191511, 0x1e1a1612, 0x1f1b1713);
            const __m512i shift = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1, 1);
            const __m512i h = _mm512_srlv_epi32(_mm512_permutexvar_epi8(lane, _mm512_castsi256_si512(_mm256_load_si256((const __m256i *) high))), shift);
            i0 = kvq_select(kvq_bytes(0x08), _mm512_slli_epi32(h, 3), i0);
            i1 = kvq_select(kvq_bytes(0x08), _mm512_slli_epi32(h, 1), i1);
            i2 = kvq_select(kvq_bytes(0x08), _mm512_srli_epi32(h, 1), i2);
            i3 = kvq_select(kvq_bytes(0x08), _mm512_srli_epi32(h, 3), i3);
        }
        const __m512i y0 = kvq_lookup<type>(tab, i0);
        const __m512i y1 = kvq_lookup<type>(tab, i1);
        const __m512i y2 = kvq_lookup<type>(tab, i2);
        const __m512i y3 = kvq_lookup<type>(tab, i3);
        _mm512_store_si512(dst,       _mm512_shuffle_i64x2(y0, y1, 0x44));
        _mm512_store_si512(dst +  64, _mm512_shuffle_i64x2(y2, y3, 0x44));
        _mm512_store_si512(dst + 128, _mm512_shuffle_i64x2(y0, y1, 0xee));
        _mm512_store_si512(dst + 192, _mm512_shuffle_i64x2(y2, y3, 0xee));
    } else if constexpr (type == GGML_TYPE_Q8_0) {
        _mm512_store_si512(dst,      _mm512_xor_si512(kvq_v_load_16(rows + T::plane, stride),      kvq_bytes(0x80)));
        _mm512_store_si512(dst + 64, _mm512_xor_si512(kvq_v_load_16(rows + T::plane + 16, stride), kvq_bytes(0x80)));
    } else {
        const __m512i x = kvq_v_load_16(rows + T::plane, stride);
        __m512i y0, y1;
        if constexpr (type == GGML_TYPE_IQ4_NL) {
            y0 = _mm512_permutexvar_epi8(x, tab.lo);
            y1 = _mm512_permutexvar_epi8(_mm512_srli_epi32(x, 4), tab.lo);
        } else {
            y0 = _mm512_and_si512(x, kvq_bytes(0x0f));
            y1 = _mm512_and_si512(_mm512_srli_epi32(x, 4), kvq_bytes(0x0f));
        }
        if constexpr (T::high_size == 4) { // bit i of a row's four bytes is that of value i
            const __m512i h    = _mm512_castsi128_si512(_mm_load_si128((const __m128i *) high));
            const __m512i bit  = _mm512_setr_epi32(0x01010101, 0x02020202, 0x04040404, 0x08080808, 0x10101010, 0x20202020, 0x40404040, (int) 0x80808080,
                                                   0x01010101, 0x02020202, 0x04040404, 0x08080808, 0x10101010, 0x20202020, 0x40404040, (int) 0x80808080);
            const __m512i lane = _mm512_setr_epi32(0x0c080400, 0x0c080400, 0x0c080400, 0x0c080400, 0x0c080400, 0x0c080400, 0x0c080400, 0x0c080400,
                                                   0x0d090501, 0x0d090501, 0x0d090501, 0x0d090501, 0x0d090501, 0x0d090501, 0x0d090501, 0x0d090501);
            const __m512i h0 = _mm512_permutexvar_epi8(lane, h);
            const __m512i h1 = _mm512_permutexvar_epi8(_mm512_add_epi8(lane, kvq_bytes(2)), h);
            y0 = _mm512_mask_add_epi8(y0, _mm512_test_epi8_mask(h0, bit), y0, kvq_bytes(16));
            y1 = _mm512_mask_add_epi8(y1, _mm512_test_epi8_mask(h1, bit), y1, kvq_bytes(16));
        }
        _mm512_store_si512(dst,      y0);
        _mm512_store_si512(dst + 64, y1);
    }
}

template <enum ggml_type type>
static void kvq_levels_v_type(const char * rows, size_t stride, int n_valid, int n_blocks, uint8_t * q, float * d, float * m) {
    static const kvq_levels_table tab = kvq_levels_make_table<type>();
    constexpr int step = kvq_levels_of<type>::plane_size == 8 ? 8 : 4;
    const int n = (n_valid + 15)/16*16;
    kvq_levels_each_block<type, step>(rows, stride, n_valid, n_blocks, n, d, m,
        [&](int b, int i, const char * block, size_t next, const uint8_t * high) {
            kvq_v_block<type>(block, next, high, tab, q + (size_t) (b*KVQ_ATTN_N + i)/4*2*64);
        });
}

//
// products
//

// Two halves of 16-bit numbers, a dword of four neighbours for all lanes.
KVQ_INLINE __m512i kvq_broadcast4(const int8_t * p) {
    int32_t x;
    memcpy(&x, p, sizeof(x));
    return _mm512_set1_epi32(x);
}

// A query as 16-bit numbers, in two halves, and the sum of each block of them. Returns their unit: NaN if a value isn't a finite
// number.
KVQ_INLINE float kvq_levels_query(const float * q, int n_blocks, int8_t * hi, int8_t * lo, int32_t * sum) {
    __m512 most = _mm512_setzero_ps();
    __m512 zero = _mm512_setzero_ps();
    for (int i = 0; i < 32*n_blocks; i += 16) {
        const __m512 x = _mm512_loadu_ps(q + i);
        most = _mm512_max_ps(most, _mm512_abs_ps(x));
        zero = _mm512_fmadd_ps(x, _mm512_setzero_ps(), zero);
    }
    const float largest = _mm512_reduce_max_ps(most);
    const float nan     = _mm512_reduce_add_ps(zero);
    const float inv     = KVQ_LEVELS_MAX/largest;
    if (nan != 0.0f || !(inv < INFINITY)) { // the latter: all values are 0 or tiny denormals
        memset(hi,  0, 32*n_blocks);
        memset(lo,  0, 32*n_blocks);
        memset(sum, 0, n_blocks*sizeof(sum[0]));
        return nan;
    }
    for (int b = 0; b < n_blocks; b++) {
        __m512i s = _mm512_setzero_si512();
        KVQ_UNROLL
        for (int i = 32*b; i < 32*b + 32; i += 16) {
            const __m512i x = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(q + i), _mm512_set1_ps(inv)));
            s = _mm512_add_epi32(s, x);
            _mm_storeu_si128((__m128i *) (hi + i), _mm512_cvtepi32_epi8(_mm512_srai_epi32(_mm512_add_epi32(x, _mm512_set1_epi32(128)), 8)));
            _mm_storeu_si128((__m128i *) (lo + i), _mm512_cvtepi32_epi8(x));
        }
        sum[b] = _mm512_reduce_add_epi32(s);
    }
    return largest/KVQ_LEVELS_MAX;
}

// Scores of n_rows queries with 32 positions, in units of the query's scale.
// hi, lo: [rows][32*n_blocks]; base: what the sum starts with, -bias times the sum of a block of the query, [rows][n_blocks];
// q_sum: that sum, for types with a minimum. s: [rows][KVQ_ATTN_N].
template <int n_rows, bool has_min>
KVQ_INLINE void kvq_levels_qk_rows(const uint8_t * k, const float * d, const float * m, int n_blocks,
        const int8_t * hi, const int8_t * lo, const int32_t * base, const float * q_sum, float * s) {
    const size_t next = (size_t) n_blocks*8*64;
    __m512 f[n_rows][2];
    KVQ_UNROLL
    for (int r = 0; r < n_rows; r++) {
        f[r][0] = f[r][1] = _mm512_setzero_ps();
    }
    for (int b = 0; b < n_blocks; b++) {
        __m512i h[n_rows][2], l[n_rows][2];
        KVQ_UNROLL
        for (int r = 0; r < n_rows; r++) {
            h[r][0] = h[r][1] = _mm512_setzero_si512();
            l[r][0] = l[r][1] = _mm512_set1_epi32(base[r*n_blocks + b]);
        }
        const uint8_t * kb = k + (size_t) b*8*64;
        KVQ_UNROLL
        for (int g = 0; g < 8; g++) {
            const __m512i k0 = _mm512_load_si512(kb + 64*g);
            const __m512i k1 = _mm512_load_si512(kb + 64*g + next);
            KVQ_UNROLL
            for (int r = 0; r < n_rows; r++) {
                const __m512i qh = kvq_broadcast4(hi + (size_t) (r*n_blocks + b)*32 + 4*g);
                const __m512i ql = kvq_broadcast4(lo + (size_t) (r*n_blocks + b)*32 + 4*g);
                h[r][0] = _mm512_dpbusd_epi32(h[r][0], k0, qh);
                h[r][1] = _mm512_dpbusd_epi32(h[r][1], k1, qh);
                l[r][0] = _mm512_dpbusd_epi32(l[r][0], k0, ql);
                l[r][1] = _mm512_dpbusd_epi32(l[r][1], k1, ql);
            }
        }
        KVQ_UNROLL
        for (int c = 0; c < 2; c++) {
            const __m512 db = _mm512_loadu_ps(d + b*KVQ_ATTN_N + 16*c);
            KVQ_UNROLL
            for (int r = 0; r < n_rows; r++) {
                const __m512i x = _mm512_add_epi32(_mm512_slli_epi32(h[r][c], 8), l[r][c]);
                f[r][c] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(x), db, f[r][c]);
                if constexpr (has_min) {
                    f[r][c] = _mm512_fmadd_ps(_mm512_loadu_ps(m + b*KVQ_ATTN_N + 16*c), _mm512_set1_ps(q_sum[r*n_blocks + b]), f[r][c]);
                }
            }
        }
    }
    KVQ_UNROLL
    for (int r = 0; r < n_rows; r++) {
        _mm512_storeu_ps(s + r*KVQ_ATTN_N,      f[r][0]);
        _mm512_storeu_ps(s + r*KVQ_ATTN_N + 16, f[r][1]);
    }
}

// Weights of a row for one block of V: p*d, rounded to 16 bits, in two halves; p: in units that keep |p*d| at most 32512.
// In 64 positions, the dword of positions 16 v + 4 l ... is number 4 l + v: as packing leaves them. Returns their sum.
KVQ_INLINE int32_t kvq_levels_weights(const float * p, const float * d, int n, int8_t * hi, int8_t * lo) {
    __m512i sum = _mm512_setzero_si512();
    for (int i = 0; i < n; i += 64) {
        __m512i x[4];
        KVQ_UNROLL
        for (int v = 0; v < 4; v++) {
            x[v] = i + 16*v < n ? _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(p + i + 16*v), _mm512_loadu_ps(d + i + 16*v)))
                                : _mm512_setzero_si512();
            sum = _mm512_add_epi32(sum, x[v]);
        }
        const __m512i a    = _mm512_packs_epi32(x[0], x[1]);
        const __m512i b    = _mm512_packs_epi32(x[2], x[3]);
        const __m512i half = _mm512_set1_epi16(128);
        const __m512i low  = _mm512_set1_epi16(255);
        _mm512_store_si512(hi + i, _mm512_packs_epi16(_mm512_srai_epi16(_mm512_add_epi16(a, half), 8),
                                                      _mm512_srai_epi16(_mm512_add_epi16(b, half), 8)));
        _mm512_store_si512(lo + i, _mm512_packus_epi16(_mm512_and_si512(a, low), _mm512_and_si512(b, low)));
    }
    return _mm512_reduce_add_epi32(sum);
}

// o += weights * V for one block, n positions. hi, lo: [rows][KVQ_ATTN_N]; sum: bias times the sum of the weights;
// unit: what a weight's unit is worth; o: [rows][o_stride].
template <int n_rows>
KVQ_INLINE void kvq_levels_pv_rows(const uint8_t * v, int n, const int8_t * hi, const int8_t * lo, const int32_t * sum, const float * unit,
        float * o, size_t o_stride) {
    __m512i h[n_rows][2], l[n_rows][2];
    KVQ_UNROLL
    for (int r = 0; r < n_rows; r++) {
        h[r][0] = h[r][1] = l[r][0] = l[r][1] = _mm512_setzero_si512();
    }
    for (int i = 0; i < n; i += 16) {
        const int at = i/64*64 + i/16%4*4; // of the dword of the first 4 positions
        KVQ_UNROLL
        for (int q = 0; q < 4; q++) {
            const __m512i v0 = _mm512_load_si512(v + (i/4 + q)*128);
            const __m512i v1 = _mm512_load_si512(v + (i/4 + q)*128 + 64);
            KVQ_UNROLL
            for (int r = 0; r < n_rows; r++) {
                const __m512i wh = kvq_broadcast4(hi + r*KVQ_ATTN_N + at + 16*q);
                const __m512i wl = kvq_broadcast4(lo + r*KVQ_ATTN_N + at + 16*q);
                h[r][0] = _mm512_dpbusd_epi32(h[r][0], v0, wh);
                h[r][1] = _mm512_dpbusd_epi32(h[r][1], v1, wh);
                l[r][0] = _mm512_dpbusd_epi32(l[r][0], v0, wl);
                l[r][1] = _mm512_dpbusd_epi32(l[r][1], v1, wl);
            }
        }
    }
    KVQ_UNROLL
    for (int r = 0; r < n_rows; r++) {
        KVQ_UNROLL
        for (int c = 0; c < 2; c++) {
            const __m512i x = _mm512_sub_epi32(_mm512_add_epi32(_mm512_slli_epi32(h[r][c], 8), l[r][c]), _mm512_set1_epi32(sum[r]));
            float * y = o + r*o_stride + 16*c;
            _mm512_storeu_ps(y, _mm512_fmadd_ps(_mm512_cvtepi32_ps(x), _mm512_set1_ps(unit[r]), _mm512_loadu_ps(y)));
        }
    }
}
