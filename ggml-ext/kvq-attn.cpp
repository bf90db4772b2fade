// SPDX-License-Identifier: MIT

#include "kvq-attn.h"

#include "kvq-attn-vec.h"
#include "kvq-cpu.h"

#if defined(KVQ_ATTN_LEVELS_AVX512)
#include "kvq-attn-avx512.h"
#elif defined(KVQ_ATTN_LEVELS_NEON)
#include "kvq-attn-neon.h"
#endif

#if defined(KVQ_LEVELS_TYPES)
#define KVQ_ATTN_LEVELS
#endif

#ifndef KVQ_ATTN_STANDALONE
#include "ggml-cpu-impl.h"
#endif

#include <algorithm>
#include <cstdlib>
#include <type_traits>

// Each instruction set's header for levels defines, for the types of KVQ_LEVELS_TYPES:
//     kvq_levels_of<type>::min, kvq_levels_bias, kvq_levels_k_type, kvq_levels_v_type: tiles of K and V
//     kvq_levels_qk_rows, kvq_levels_pv_rows, kvq_levels_weights: products, for up to KVQ_ROWS rows of queries
//     kvq_levels_query: a query as 16-bit numbers in two halves
//     KVQ_LEVELS_POSITIONS: what kvq_levels_qk_rows does at once
// A tile has room for 32 bytes and one scale and minimum for each block and position.

#define KVQ_ROWS 4 // rows of queries in a register tile

namespace {

constexpr int     N            = KVQ_ATTN_N;
constexpr int     ROWS_MAX     = 64;  // rows of queries that an item aims at: then decoding a row costs little beside using it
constexpr int64_t GROUP_MAX    = 128; // heads that share a KV head; more are taken in parts
constexpr int64_t ITEMS        = 64;  // as many items as are made by splitting the cache, if there are fewer
constexpr int64_t CHUNK_MIN    = 2*N; // positions of a chunk at least
constexpr int64_t ROWS_ALONE   = 2;   // up to so many rows of queries, K in floats isn't worth transposing

int64_t div_up  (int64_t a, int64_t b) { return (a + b - 1)/b; }
int64_t round_up(int64_t a, int64_t b) { return div_up(a, b)*b; }

const char * row_of(const struct ggml_tensor * t, int64_t i1, int64_t i2, int64_t i3) {
    return (const char *) t->data + i1*t->nb[1] + i2*t->nb[2] + i3*t->nb[3];
}

//
// types
//

// what a tile needs of its type; levels: nullptr if there are only floats
struct levels_type {
    void (*k)(const char * rows, size_t stride, int n_valid, int n_blocks, uint8_t * q, float * d, float * m);
    void (*v)(const char * rows, size_t stride, int n_valid, int n_blocks, uint8_t * q, float * d, float * m);
    int  bias;
    bool min;
};

const levels_type * get_levels(enum ggml_type type) {
#if defined(KVQ_ATTN_LEVELS)
    switch (type) {
#define KVQ_CASE(TYPE)                                                                                      \
        case GGML_TYPE_##TYPE: {                                                                            \
            static const levels_type l = { kvq_levels_k_type<GGML_TYPE_##TYPE>, kvq_levels_v_type<GGML_TYPE_##TYPE>, \
                kvq_levels_bias(GGML_TYPE_##TYPE), kvq_levels_of<GGML_TYPE_##TYPE>::min };                  \
            return &l;                                                                                      \
        }
        KVQ_LEVELS_TYPES(KVQ_CASE)
#undef KVQ_CASE
        default: break;
    }
#else
    GGML_UNUSED(type);
#endif
    return nullptr;
}

// n values of a row, as the type's to_float has them, bit by bit
void row_to_float(enum ggml_type type, const char * row, float * y, int64_t n) {
    switch (type) {
        case GGML_TYPE_F32:
            memcpy(y, row, n*sizeof(float));
            return;
        case GGML_TYPE_F16: {
            const ggml_fp16_t * x = (const ggml_fp16_t *) row;
            int64_t i = 0;
            for (; i + KVQ_VF <= n; i += KVQ_VF) {
                kvq_vf_store(y + i, kvq_vf_f16(x + i));
            }
            for (; i < n; i++) {
                y[i] = ggml_fp16_to_fp32(x[i]);
            }
            return;
        }
        case GGML_TYPE_BF16:
            for (int64_t i = 0; i < n; i++) {
                uint16_t h;
                memcpy(&h, row + 2*i, sizeof(h));
                const uint32_t x = (uint32_t) h << 16;
                memcpy(y + i, &x, sizeof(x));
            }
            return;
        // Upstream's decoders of these are in its base library, which is compiled for any CPU.
        case GGML_TYPE_Q8_0:
            for (int64_t b = 0; b < n/32; b++, row += 34, y += 32) {
                ggml_fp16_t d;
                int8_t      q[32];
                memcpy(&d, row, sizeof(d));
                memcpy(q, row + 2, sizeof(q));
                const float f = ggml_fp16_to_fp32(d);
                for (int i = 0; i < 32; i++) {
                    y[i] = q[i]*f;
                }
            }
            return;
        case GGML_TYPE_Q4_0:
            for (int64_t b = 0; b < n/32; b++, row += 18, y += 32) {
                ggml_fp16_t d;
                uint8_t     q[16];
                memcpy(&d, row, sizeof(d));
                memcpy(q, row + 2, sizeof(q));
                const float f = ggml_fp16_to_fp32(d);
                for (int i = 0; i < 16; i++) {
                    y[i]      = ((q[i] & 15) - 8)*f;
                    y[i + 16] = ((q[i] >> 4) - 8)*f;
                }
            }
            return;
        default:
            kvq_to_float(type)(row, y, n);
    }
}

//
// the plan of a node
//

struct plan {
    const ggml_tensor * dst, * q, * k, * v, * mask, * sinks;

    float scale, max_bias, softcap;

    int64_t dk, dv;          // values of a row of K and V
    int64_t dkp, dvp;        // the same with room for whole vectors
    int64_t n_kv, n_q, n_head, n_stream;
    int64_t group;           // heads of an item: they share a KV head
    int64_t tile_q;          // queries of an item
    int64_t rows;            // = group*tile_q
    int64_t n_groups, n_tiles, n_chunks, chunk;
    int64_t n_items;

    const levels_type * kl, * vl;
    int64_t kb, vb;          // blocks of a row
    size_t  k_bytes, v_bytes;

    // scratch of a thread, in bytes from its start
    size_t q_hi, q_lo, q_base, q_sum, q_f32, factor, slope, masks, s, w_hi, w_lo, unit, o, max, sum, k_tile, k_d, k_m, v_tile, v_d, v_m, v_abs, buf;
    size_t thread_size;
    size_t partial;          // bytes of one row of a chunk: max, sum, padding, o
};

plan make_plan(const struct ggml_tensor * dst) {
    plan p = {};
    p.dst   = dst;
    p.q     = dst->src[0];
    p.k     = dst->src[1];
    p.v     = dst->src[2];
    p.mask  = dst->src[3];
    p.sinks = dst->src[4];

    memcpy(&p.scale,    (const float *) dst->op_params + 0, sizeof(float));
    memcpy(&p.max_bias, (const float *) dst->op_params + 1, sizeof(float));
    memcpy(&p.softcap,  (const float *) dst->op_params + 2, sizeof(float));

    p.dk       = p.k->ne[0];
    p.dv       = p.v->ne[0];
    p.dkp      = round_up(p.dk, 32);
    p.dvp      = round_up(p.dv, 32);
    p.n_kv     = p.k->ne[1];
    p.n_q      = p.q->ne[1];
    p.n_head   = p.q->ne[2];
    p.n_stream = p.q->ne[3];

    // heads h ... h + group - 1, with h a multiple of group, have one head of K and one of V
    const int64_t rk = p.n_head/p.k->ne[2];
    const int64_t rv = p.n_head/p.v->ne[2];
    int64_t a = rk, b = rv;
    while (b != 0) {
        const int64_t c = a % b;
        a = b;
        b = c;
    }
    p.group = a;
    if (p.group > GROUP_MAX) {
        int64_t g = GROUP_MAX;
        while (a % g != 0) {
            g--;
        }
        p.group = g;
    }
    p.n_groups = p.n_head/p.group;
    p.tile_q   = std::min<int64_t>(p.n_q, std::max<int64_t>(1, ROWS_MAX/p.group));
    p.rows     = p.group*p.tile_q;
    p.n_tiles  = div_up(p.n_q, p.tile_q);

    const int64_t n = p.n_stream*p.n_groups*p.n_tiles;
    const int64_t n_chunks = std::max<int64_t>(1, std::min(div_up(ITEMS, std::max<int64_t>(n, 1)), p.n_kv/CHUNK_MIN));
    p.chunk    = round_up(div_up(std::max<int64_t>(p.n_kv, 1), n_chunks), N);
    p.n_chunks = div_up(std::max<int64_t>(p.n_kv, 1), p.chunk);
    p.n_items  = n*p.n_chunks;

    p.kl = get_levels(p.k->type);
    p.vl = get_levels(p.v->type);
    p.kb = p.dk/32;
    p.vb = p.dv/32;
    p.k_bytes = ggml_row_size(p.k->type, p.dk);
    p.v_bytes = ggml_row_size(p.v->type, p.dv);

    size_t at = 0;
    auto room = [&](size_t bytes) {
        const size_t here = at;
        at += (bytes + 63)/64*64;
        return here;
    };
    if (p.kl) {
        p.q_hi   = room(p.rows*p.dk);
        p.q_lo   = room(p.rows*p.dk);
        p.q_base = room(p.rows*p.kb*sizeof(int32_t));
        p.q_sum  = room(p.rows*p.kb*sizeof(float));
        p.k_tile = room(N*p.dk);
        p.k_d    = room(p.kb*N*sizeof(float));
        p.k_m    = room(p.kb*N*sizeof(float));
    } else {
        p.q_f32  = room(p.rows*p.dkp*sizeof(float));
        p.k_tile = room(N*p.dkp*sizeof(float));
    }
    if (p.vl) {
        p.w_hi   = room(KVQ_ROWS*N);
        p.w_lo   = room(KVQ_ROWS*N);
        p.v_tile = room(N*p.dv);
        p.v_d    = room(p.vb*N*sizeof(float));
        p.v_m    = room(p.vb*N*sizeof(float));
        p.v_abs  = room(N*sizeof(float));
    } else {
        p.v_tile = room(N*p.dvp*sizeof(float));
    }
    p.factor = room(p.rows*sizeof(float));
    p.slope  = room(p.group*sizeof(float));
    p.masks  = room(p.tile_q*sizeof(int));
    p.s      = room(p.rows*N*sizeof(float));
    p.unit   = room(p.rows*sizeof(float));
    p.o      = room(p.rows*p.dvp*sizeof(float));
    p.max    = room(p.rows*sizeof(float));
    p.sum    = room(p.rows*sizeof(float));
    p.buf    = room(16*round_up(std::max(p.dk, p.dv), 16)*sizeof(float));
    p.thread_size = at;

    p.partial = round_up((2 + p.dv)*sizeof(float), 64);
    return p;
}

// chunks of a head's query lie beside each other
float * partial_of(const plan & p, void * work, int nth, int64_t i3, int64_t i1, int64_t head, int64_t chunk) {
    const int64_t row = (i3*p.n_q + i1)*p.n_head + head;
    return (float *) ((char *) work + nth*p.thread_size + (row*p.n_chunks + chunk)*p.partial);
}

float slope_of(const plan & p, int64_t head) { // ALiBi: Press et al., 2022; as ggml has it for heads that aren't a power of 2
    if (p.max_bias <= 0.0f) {
        return 1.0f;
    }
    const uint32_t n_log2 = 1u << (uint32_t) floor(log2((double) p.n_head));
    const float m0 = powf(2.0f, -(p.max_bias       )/n_log2);
    const float m1 = powf(2.0f, -(p.max_bias/2.0f)/n_log2);
    return head < n_log2 ? powf(m0, head + 1) : powf(m1, 2*(head - n_log2) + 1);
}

const ggml_fp16_t * mask_of(const plan & p, int64_t i1, int64_t head, int64_t i3) {
    return p.mask ? (const ggml_fp16_t *) row_of(p.mask, i1, head % p.mask->ne[2], i3 % p.mask->ne[3]) : nullptr;
}

//
// floats
//

// 16 rows at most, from position i on, to columns of k: [dk][N]
void k_to_float(const plan & p, const char * rows, int n_valid, float * k, float * buf) {
    const int64_t stride = round_up(p.dk, 16);
    for (int i = 0; i < n_valid; i += 16) {
        const float * src[16];
        for (int j = 0; j < 16; j++) {
            src[j] = buf + j*stride;
            if (i + j < n_valid) {
                row_to_float(p.k->type, rows + (i + j)*p.k->nb[1], buf + j*stride, p.dk);
            } else {
                memset(buf + j*stride, 0, stride*sizeof(float));
            }
        }
        int64_t d = 0;
        for (; d + 16 <= p.dk; d += 16) {
            kvq_vf_transpose_16x16(src, k + d*N + i, N);
            for (int j = 0; j < 16; j++) {
                src[j] += 16;
            }
        }
        for (int e = 0; d < p.dk; d++, e++) {
            for (int j = 0; j < 16; j++) {
                k[d*N + i + j] = src[j][e];
            }
        }
    }
}

// Sums of products of n_rows rows with n_cols vectors of columns: c += a*b. a: [rows][a_stride], b: [n][b_stride].
template <int n_rows, int n_cols>
KVQ_INLINE void product(int64_t n, const float * a, int64_t a_stride, const float * b, int64_t b_stride, float * c, int64_t c_stride, bool add) {
    kvq_vf x[n_rows][n_cols];
    KVQ_UNROLL
    for (int r = 0; r < n_rows; r++) {
        KVQ_UNROLL
        for (int j = 0; j < n_cols; j++) {
            x[r][j] = add ? kvq_vf_load(c + r*c_stride + j*KVQ_VF) : kvq_vf_set1(0.0f);
        }
    }
    for (int64_t i = 0; i < n; i++) {
        kvq_vf y[n_cols];
        KVQ_UNROLL
        for (int j = 0; j < n_cols; j++) {
            y[j] = kvq_vf_load(b + i*b_stride + j*KVQ_VF);
        }
        KVQ_UNROLL
        for (int r = 0; r < n_rows; r++) {
            const kvq_vf w = kvq_vf_set1(a[r*a_stride + i]);
            KVQ_UNROLL
            for (int j = 0; j < n_cols; j++) {
                x[r][j] = kvq_vf_fma(w, y[j], x[r][j]);
            }
        }
    }
    KVQ_UNROLL
    for (int r = 0; r < n_rows; r++) {
        KVQ_UNROLL
        for (int j = 0; j < n_cols; j++) {
            kvq_vf_store(c + r*c_stride + j*KVQ_VF, x[r][j]);
        }
    }
}

template <int n_rows>
void product_rows(int64_t n, const float * a, int64_t a_stride, const float * b, int64_t b_stride, float * c, int64_t c_stride, int64_t cols, bool add) {
    int64_t j = 0;
    for (; j + KVQ_VF_NC*KVQ_VF <= cols; j += KVQ_VF_NC*KVQ_VF) {
        product<n_rows, KVQ_VF_NC>(n, a, a_stride, b + j, b_stride, c + j, c_stride, add);
    }
    for (; j < cols; j += KVQ_VF) {
        product<n_rows, 1>(n, a, a_stride, b + j, b_stride, c + j, c_stride, add);
    }
}

// n: a multiple of 32
KVQ_INLINE float dot(int64_t n, const float * a, const float * b) {
    kvq_vf x = kvq_vf_set1(0.0f);
    kvq_vf y = kvq_vf_set1(0.0f);
    for (int64_t i = 0; i < n; i += 2*KVQ_VF) {
        x = kvq_vf_fma(kvq_vf_load(a + i),          kvq_vf_load(b + i),          x);
        y = kvq_vf_fma(kvq_vf_load(a + i + KVQ_VF), kvq_vf_load(b + i + KVQ_VF), y);
    }
    return kvq_vf_sum(kvq_vf_add(x, y));
}

// f for rows r0 ... r1 - 1, as many at once as a register tile holds
template <typename F> void each_rows(int64_t r0, int64_t r1, F f) {
    int64_t r = r0;
    for (; r + KVQ_ROWS <= r1; r += KVQ_ROWS) {
        f(r, std::integral_constant<int, KVQ_ROWS>());
    }
    switch (r1 - r) {
        case 3: f(r, std::integral_constant<int, 3>()); break;
        case 2: f(r, std::integral_constant<int, 2>()); break;
        case 1: f(r, std::integral_constant<int, 1>()); break;
        default: break;
    }
}

//
// an item
//

struct item {
    const plan & p;
    char *       base; // scratch

    int64_t i3, h0, i1, n_q;  // stream, first head, first query, queries
    int64_t ic0, ic1;         // positions
    const item * next;        // the one that this thread will probably have next, or nullptr

    template <typename T> T * at(size_t offset) const { return (T *) (base + offset); }

    int64_t n_rows() const { return n_q*p.group; }
};

// Queries in the form that K's tiles want, and what a score has to be multiplied with.
void load_queries(const item & t) {
    const plan & p = t.p;

    float scale = p.scale;
    if (p.softcap != 0.0f) {
        scale /= p.softcap;
    }
    float * factor = t.at<float>(p.factor);

    for (int64_t r = 0; r < t.n_rows(); r++) {
        const float * q = (const float *) row_of(p.q, t.i1 + r/p.group, t.h0 + r % p.group, t.i3);
        if (!p.kl) {
            float * x = t.at<float>(p.q_f32) + r*p.dkp;
            memcpy(x, q, p.dk*sizeof(float));
            std::fill(x + p.dk, x + p.dkp, 0.0f);
            factor[r] = scale;
            continue;
        }
#if defined(KVQ_ATTN_LEVELS)
        // 16 bits relative to the largest value: an error of at most 2^-16 of it, where upstream's f16 has 2^-11 of each value
        // and its 8 bits 2^-8 of the largest of 32
        int32_t * base = t.at<int32_t>(p.q_base) + r*p.kb;
        float   * sums = t.at<float>(p.q_sum) + r*p.kb;
        factor[r] = scale*kvq_levels_query(q, (int) p.kb, t.at<int8_t>(p.q_hi) + r*p.dk, t.at<int8_t>(p.q_lo) + r*p.dk, base);
        for (int64_t b = 0; b < p.kb; b++) {
            sums[b]  = (float) base[b];
            base[b] *= -p.kl->bias;
        }
#endif
    }
}

// What the mask says of a query and n positions from ic on.
enum mask_kind { MASK_ALL, MASK_SOME, MASK_NONE }; // all are masked; some are, or have a bias; nothing to add

mask_kind get_mask_kind(const item & t, int64_t iq, int64_t ic, int n) {
    const plan & p = t.p;
    if (!p.mask) {
        return MASK_NONE;
    }
    const int64_t n_masks = p.mask->ne[2] == 1 ? 1 : p.group;
    uint16_t any  = 0; // bits that -inf doesn't have, or lacks
    uint16_t bits = 0;
    for (int64_t h = 0; h < n_masks; h++) {
        const ggml_fp16_t * m = mask_of(p, t.i1 + iq, t.h0 + h, t.i3) + ic;
        for (int i = 0; i < n; i++) {
            any  |= (uint16_t) (m[i] ^ 0xfc00);
            bits |= m[i];
        }
    }
    return any == 0 ? MASK_ALL : bits == 0 ? MASK_NONE : MASK_SOME;
}

const char * k_rows(const item & t, int64_t ic) {
    const plan & p = t.p;
    return row_of(p.k, ic, t.h0/(p.n_head/p.k->ne[2]), t.i3/(p.q->ne[3]/p.k->ne[3]));
}

const char * v_rows(const item & t, int64_t ic) {
    const plan & p = t.p;
    return row_of(p.v, ic, t.h0/(p.n_head/p.v->ne[2]), t.i3/(p.q->ne[3]/p.v->ne[3]));
}

void load_k(const item & t, int64_t ic, int n) {
    const plan & p = t.p;
    const char * rows = k_rows(t, ic);
    if (p.kl) {
        p.kl->k(rows, p.k->nb[1], n, (int) p.kb, t.at<uint8_t>(p.k_tile), t.at<float>(p.k_d), t.at<float>(p.k_m));
    } else if (p.rows <= ROWS_ALONE) {
        float * k = t.at<float>(p.k_tile);
        for (int i = 0; i < n; i++) {
            row_to_float(p.k->type, rows + i*p.k->nb[1], k + i*p.dkp, p.dk);
            std::fill(k + i*p.dkp + p.dk, k + (i + 1)*p.dkp, 0.0f);
        }
    } else {
        k_to_float(p, rows, n, t.at<float>(p.k_tile), t.at<float>(p.buf));
    }
}

// false if a value isn't a finite number
bool load_v(const item & t, int64_t ic, int n) {
    const plan & p = t.p;
    const char * rows = v_rows(t, ic);
    if (p.vl) {
        float * d = t.at<float>(p.v_d);
        float * m = t.at<float>(p.v_m);
        p.vl->v(rows, p.v->nb[1], n, (int) p.vb, t.at<uint8_t>(p.v_tile), d, m);

        // the largest scale of a position, for kvq_levels_weights
        float * largest = t.at<float>(p.v_abs);
        kvq_vf zero = kvq_vf_set1(0.0f);
        for (int i = 0; i < n; i += KVQ_VF) {
            kvq_vf a = kvq_vf_set1(0.0f);
            for (int64_t b = 0; b < p.vb; b++) {
                const kvq_vf x = kvq_vf_load(d + b*N + i);
                a    = kvq_vf_max(a, kvq_vf_abs(x));
                zero = kvq_vf_fma(x, kvq_vf_set1(0.0f), zero);
                if (p.vl->min) { // a block may have a minimum alone
                    const kvq_vf y = kvq_vf_load(m + b*N + i);
                    a    = kvq_vf_max(a, kvq_vf_mul(kvq_vf_abs(y), kvq_vf_set1(1.0f/32)));
                    zero = kvq_vf_fma(y, kvq_vf_set1(0.0f), zero);
                }
            }
            kvq_vf_store(largest + i, a);
        }
        std::fill(largest + n, largest + N, 0.0f);
        return kvq_vf_sum(zero) == 0.0f;
    }
    float * v = t.at<float>(p.v_tile);
    kvq_vf zero = kvq_vf_set1(0.0f);
    for (int i = 0; i < n; i++) {
        row_to_float(p.v->type, rows + i*p.v->nb[1], v + i*p.dvp, p.dv);
        std::fill(v + i*p.dvp + p.dv, v + (i + 1)*p.dvp, 0.0f);
        for (int64_t j = 0; j < p.dvp; j += KVQ_VF) {
            zero = kvq_vf_fma(kvq_vf_load(v + i*p.dvp + j), kvq_vf_set1(0.0f), zero);
        }
    }
    return kvq_vf_sum(zero) == 0.0f;
}

// Fetches rows i0 ... i1 - 1 of the next tile: rows of a head lie apart, which hardware foresees badly. Called a few rows at a
// time, between products, because a burst would wait for memory.
// Inlined, because GCC takes a function that only prefetches for one without effect, and drops its calls.
KVQ_INLINE void prefetch(const char * rows, size_t stride, size_t n_bytes, int64_t i0, int64_t i1) {
#if defined(__GNUC__)
    for (int64_t i = i0; i < i1; i++) {
        const char * row = rows + i*stride;
        for (const char * line = (const char *) ((uintptr_t) row & ~(uintptr_t) 63); line < row + n_bytes; line += 64) {
            __builtin_prefetch(line, 0, 2); // not to the first level, which the tiles fill
        }
    }
#else
    GGML_UNUSED(rows); GGML_UNUSED(stride); GGML_UNUSED(n_bytes); GGML_UNUSED(i0); GGML_UNUSED(i1);
#endif
}

// The first rows of the tile after that at ic, in this item or in the next one.
struct rows_ahead {
    const char * k, * v;
    int64_t      n;
};

rows_ahead get_rows_ahead(const item & t, int64_t ic) {
    const item * it = &t;
    ic += N;
    if (ic >= t.ic1) {
        if (!t.next) {
            return {};
        }
        it = t.next;
        ic = it->ic0;
    }
    return { k_rows(*it, ic), v_rows(*it, ic), std::min<int64_t>(it->ic1 - ic, N) };
}

// rows r0 ... r1 - 1 of s
void scores(const item & t, int64_t r0, int64_t r1, int n, const rows_ahead & ahead) {
    const plan & p = t.p;
    float * s = t.at<float>(p.s);
#if defined(KVQ_ATTN_LEVELS)
    if (p.kl) {
        const int       nb   = (int) p.kb;
        const uint8_t * k    = t.at<uint8_t>(p.k_tile);
        const float   * d    = t.at<float>(p.k_d);
        const float   * m    = t.at<float>(p.k_m);
        for (int i = 0; i < n; i += KVQ_LEVELS_POSITIONS) {
            each_rows(r0, r1, [&](int64_t r, auto n_rows) {
                const int64_t done = i*(r1 - r0) + KVQ_LEVELS_POSITIONS*(r - r0);
                const int64_t all  = N*(r1 - r0);
                prefetch(ahead.k, p.k->nb[1], p.k_bytes, ahead.n*done/all, ahead.n*(done + KVQ_LEVELS_POSITIONS*n_rows.value)/all);
                const int8_t  * hi   = t.at<int8_t>(p.q_hi) + r*p.dk;
                const int8_t  * lo   = t.at<int8_t>(p.q_lo) + r*p.dk;
                const int32_t * base = t.at<int32_t>(p.q_base) + r*p.kb;
                const float   * sums = t.at<float>(p.q_sum) + r*p.kb;
                if (p.kl->min) {
                    kvq_levels_qk_rows<n_rows.value, true >(k + (size_t) i/16*nb*512, d + i, m + i, nb, hi, lo, base, sums, s + r*N + i);
                } else {
                    kvq_levels_qk_rows<n_rows.value, false>(k + (size_t) i/16*nb*512, d + i, m + i, nb, hi, lo, base, sums, s + r*N + i);
                }
            });
        }
        return;
    }
#endif
    each_rows(r0, r1, [&](int64_t r, auto n_rows) {
        prefetch(ahead.k, p.k->nb[1], p.k_bytes, ahead.n*(r - r0)/(r1 - r0), ahead.n*(r - r0 + n_rows.value)/(r1 - r0));
        const float * q = t.at<float>(p.q_f32) + r*p.dkp;
        const float * k = t.at<float>(p.k_tile);
        if (p.rows <= ROWS_ALONE) {
            for (int i = 0; i < n; i++) {
                for (int j = 0; j < n_rows.value; j++) {
                    s[(r + j)*N + i] = dot(p.dkp, q + j*p.dkp, k + i*p.dkp);
                }
            }
            return;
        }
        product_rows<n_rows.value>(p.dk, q, p.dkp, k, N, s + r*N, N, round_up(n, 16), false);
    });
}

kvq_vf tanh_of(kvq_vf x) { // (1 - e)/(1 + e), e = exp(-2 |x|)
    const kvq_vf e = kvq_vf_exp(kvq_vf_mul(kvq_vf_abs(x), kvq_vf_set1(-2.0f)));
    const kvq_vf y = kvq_vf_div(kvq_vf_add(kvq_vf_set1(1.0f), kvq_vf_mul(e, kvq_vf_set1(-1.0f))), kvq_vf_add(kvq_vf_set1(1.0f), e));
    return kvq_vf_sign(y, x);
}

// Scores of a row to weights exp(score - max), and the row's max, sum and accumulator along with them; plain: without a mask.
// levels: weights come in units that kvq_levels_weights wants. False if no weight counts.
bool softmax(const item & t, int64_t r, int64_t ic, int n, bool plain, bool levels) {
    constexpr int n_vec = N/KVQ_VF;
    const plan & p = t.p;
    float * s = t.at<float>(p.s) + r*N;
    const kvq_vf factor = kvq_vf_set1(t.at<float>(p.factor)[r]);
    const kvq_vf none   = kvq_vf_set1(-INFINITY);

    kvq_vf x[n_vec];
    KVQ_UNROLL
    for (int i = 0; i < n_vec; i++) {
        x[i] = kvq_vf_mul(kvq_vf_load(s + i*KVQ_VF), factor);
    }
    if (p.softcap != 0.0f) {
        for (int i = 0; i < n_vec; i++) {
            x[i] = kvq_vf_mul(tanh_of(x[i]), kvq_vf_set1(p.softcap));
        }
    }
    if (!plain) {
        const int64_t head = t.h0 + r % p.group;
        const ggml_fp16_t * mask = mask_of(p, t.i1 + r/p.group, head, t.i3) + ic;
        const kvq_vf slope = kvq_vf_set1(t.at<float>(p.slope)[r % p.group]);
        ggml_fp16_t buf[N];
        if (n < N) {
            memset(buf, 0, sizeof(buf));
            memcpy(buf, mask, n*sizeof(buf[0]));
            mask = buf;
        }
        KVQ_UNROLL
        for (int i = 0; i < n_vec; i++) {
            const kvq_vf m = kvq_vf_f16(mask + i*KVQ_VF);
            x[i] = kvq_vf_masked(m, none, kvq_vf_fma(m, slope, x[i])); // whatever is in the cache there
        }
    }
    if (n < N) {
        for (int i = 0; i < n_vec; i++) {
            kvq_vf_store(s + i*KVQ_VF, x[i]);
        }
        std::fill(s + n, s + N, -INFINITY);
        for (int i = 0; i < n_vec; i++) {
            x[i] = kvq_vf_load(s + i*KVQ_VF);
        }
    }
    kvq_vf top[4] = { none, none, none, none };
    KVQ_UNROLL
    for (int i = 0; i < n_vec; i++) {
        top[i % 4] = kvq_vf_max(top[i % 4], x[i]);
    }

    float * max = t.at<float>(p.max) + r;
    float * sum = t.at<float>(p.sum) + r;
    float   m   = kvq_vf_top(kvq_vf_max(kvq_vf_max(top[0], top[1]), kvq_vf_max(top[2], top[3])));
    if (m > *max) {
        if (*sum != 0.0f) {
            const float old = expf(*max - m);
            float * o = t.at<float>(p.o) + r*p.dvp;
            for (int64_t j = 0; j < p.dvp; j += KVQ_VF) {
                kvq_vf_store(o + j, kvq_vf_mul(kvq_vf_load(o + j), kvq_vf_set1(old)));
            }
            *sum *= old;
        }
        *max = m;
    }
    m = *max;
    if (m == -INFINITY) {
        m = 0.0f; // all masked, as far as they are numbers
    }

    const kvq_vf shift = kvq_vf_set1(-m);
    kvq_vf total[4] = { kvq_vf_set1(0.0f), kvq_vf_set1(0.0f), kvq_vf_set1(0.0f), kvq_vf_set1(0.0f) };
    KVQ_UNROLL
    for (int i = 0; i < n_vec; i++) {
        x[i] = kvq_vf_exp(kvq_vf_add(x[i], shift));
        total[i % 4] = kvq_vf_add(total[i % 4], x[i]);
    }
    *sum += kvq_vf_sum(kvq_vf_add(kvq_vf_add(total[0], total[1]), kvq_vf_add(total[2], total[3])));

    kvq_vf unit = kvq_vf_set1(1.0f);
    if (levels) {
        const float * largest = t.at<float>(p.v_abs);
        kvq_vf most[2] = { kvq_vf_set1(0.0f), kvq_vf_set1(0.0f) };
        KVQ_UNROLL
        for (int i = 0; i < n_vec; i++) {
            most[i % 2] = kvq_vf_max(most[i % 2], kvq_vf_mul(x[i], kvq_vf_load(largest + i*KVQ_VF)));
        }
        const float w   = kvq_vf_top(kvq_vf_max(most[0], most[1]));
        const float inv = KVQ_LEVELS_MAX/w;
        if (!(inv < 1e37f) || *sum != *sum) { // weights that add less than 1e-30 to anything, or none; or the sum decides alone
            t.at<float>(p.unit)[r] = 0.0f;
            std::fill(s, s + N, 0.0f);
            return false;
        }
        t.at<float>(p.unit)[r] = w/KVQ_LEVELS_MAX;
        unit = kvq_vf_set1(inv);
    }
    KVQ_UNROLL
    for (int i = 0; i < n_vec; i++) {
        kvq_vf_store(s + i*KVQ_VF, levels ? kvq_vf_mul(x[i], unit) : x[i]);
    }
    return true;
}

void accumulate(const item & t, int64_t r0, int64_t r1, int n) {
    const plan & p = t.p;
    const float * s = t.at<float>(p.s);
    float * o = t.at<float>(p.o);
    const int n_pad = (int) round_up(n, 16);
#if defined(KVQ_ATTN_LEVELS)
    if (p.vl) {
        for (int64_t b = 0; b < p.vb; b++) {
            const uint8_t * v = t.at<uint8_t>(p.v_tile) + b*(N/4)*128;
            const float   * d = t.at<float>(p.v_d) + b*N;
            const float   * m = t.at<float>(p.v_m) + b*N;
            each_rows(r0, r1, [&](int64_t r, auto n_rows) {
                int8_t * hi = t.at<int8_t>(p.w_hi);
                int8_t * lo = t.at<int8_t>(p.w_lo);
                int32_t  sum[KVQ_ROWS];
                const float * unit = t.at<float>(p.unit) + r;
                const auto run = [&](int n_pos) {
                    for (int j = 0; j < n_rows.value; j++) {
                        sum[j] = p.vl->bias*kvq_levels_weights(s + (r + j)*N, d, n_pos, hi + j*N, lo + j*N);
                    }
                    kvq_levels_pv_rows<n_rows.value>(v, n_pos, hi, lo, sum, unit, o + r*p.dvp + 32*b, p.dvp);
                };
                if (n_pad == N) { // known to the compiler
                    run(N);
                } else {
                    run(n_pad);
                }
                if (p.vl->min) {
                    for (int j = 0; j < n_rows.value; j++) {
                        kvq_vf x = kvq_vf_set1(0.0f);
                        for (int i = 0; i < n_pad; i += KVQ_VF) {
                            x = kvq_vf_fma(kvq_vf_load(s + (r + j)*N + i), kvq_vf_load(m + i), x);
                        }
                        const kvq_vf add = kvq_vf_set1(kvq_vf_sum(x)*t.at<float>(p.unit)[r + j]);
                        float * y = o + (r + j)*p.dvp + 32*b;
                        for (int i = 0; i < 32; i += KVQ_VF) {
                            kvq_vf_store(y + i, kvq_vf_add(kvq_vf_load(y + i), add));
                        }
                    }
                }
            });
        }
        return;
    }
#endif
    each_rows(r0, r1, [&](int64_t r, auto n_rows) {
        product_rows<n_rows.value>(n, s + r*N, N, t.at<float>(p.v_tile), p.dvp, o + r*p.dvp, p.dvp, p.dvp, true);
    });
    GGML_UNUSED(n_pad);
}

// The same, one position after the other, where V has values that are no finite numbers: they reach what attends to them, and
// nothing else.
void accumulate_slowly(const item & t, int64_t r0, int64_t r1, int64_t ic, int n) {
    const plan & p = t.p;
    float * buf = t.at<float>(p.buf);
    for (int i = 0; i < n; i++) {
        row_to_float(p.v->type, v_rows(t, ic + i), buf, p.dv);
        for (int64_t r = r0; r < r1; r++) {
            const float w = t.at<float>(p.s)[r*N + i];
            if (w == 0.0f) {
                continue;
            }
            float * o = t.at<float>(p.o) + r*p.dvp;
            for (int64_t j = 0; j < p.dv; j++) {
                o[j] += w*buf[j];
            }
        }
    }
}

// Everything of one tile for the rows of some queries.
void rows_of_tile(const item & t, int64_t iq0, int64_t iq1, int64_t ic, int n, const mask_kind * masks, bool finite) {
    const int64_t r0 = iq0*t.p.group;
    const int64_t r1 = iq1*t.p.group;
    const rows_ahead ahead = get_rows_ahead(t, ic);
    scores(t, r0, r1, n, ahead);
    bool any = false;
    for (int64_t iq = iq0; iq < iq1; iq++) {
        for (int64_t r = iq*t.p.group; r < (iq + 1)*t.p.group; r++) {
            prefetch(ahead.v, t.p.v->nb[1], t.p.v_bytes, ahead.n*(r - r0)/(r1 - r0), ahead.n*(r - r0 + 1)/(r1 - r0));
            any = softmax(t, r, ic, n, masks[iq] == MASK_NONE, t.p.vl && finite) || any;
        }
    }
    if (!finite) {
        accumulate_slowly(t, r0, r1, ic, n);
    } else if (any) {
        accumulate(t, r0, r1, n);
    }
}

void write_row(const plan & p, const float * o, float max, float sum, int64_t i1, int64_t head, int64_t i3) {
    float scale = 1.0f;
    if (p.sinks) { // one more weight, without a value
        const float s = ((const float *) p.sinks->data)[head];
        if (s > max) {
            scale = expf(max - s);
            sum   = sum*scale + 1.0f;
        } else {
            sum  += expf(s - max);
        }
    }
    scale = sum == 0.0f ? 0.0f : scale/sum;
    float * y = (float *) ((char *) p.dst->data + (head + (i1 + i3*p.n_q)*p.n_head)*p.dst->nb[1]);
    for (int64_t j = 0; j < p.dv; j++) {
        y[j] = o[j]*scale;
    }
}

item get_item(const plan & p, int64_t i, char * scratch) {
    // heads run fastest: they share what is in the last-level cache
    const int64_t i_group = i % p.n_groups; i /= p.n_groups;
    const int64_t i_chunk = i % p.n_chunks; i /= p.n_chunks;
    const int64_t i_tile  = i % p.n_tiles;  i /= p.n_tiles;

    item t = { p, scratch, i, i_group*p.group, i_tile*p.tile_q, 0, i_chunk*p.chunk, 0, nullptr };
    t.n_q = std::min(p.tile_q, p.n_q - t.i1);
    t.ic1 = std::min(t.ic0 + p.chunk, p.n_kv);
    return t;
}

void run_item(const plan & p, int64_t i, void * work, int ith, int nth) {
    item t = get_item(p, i, (char *) work + ith*p.thread_size);
    const item next = get_item(p, std::min(i + nth, p.n_items - 1), t.base);
    if (i + nth < p.n_items) {
        t.next = &next;
    }

    load_queries(t);
    for (int64_t h = 0; h < p.group; h++) {
        t.at<float>(p.slope)[h] = slope_of(p, t.h0 + h);
    }
    std::fill_n(t.at<float>(p.max), t.n_rows(), -INFINITY);
    std::fill_n(t.at<float>(p.sum), t.n_rows(), 0.0f);
    std::fill_n(t.at<float>(p.o), t.n_rows()*p.dvp, 0.0f);

    for (int64_t ic = t.ic0; ic < t.ic1; ic += N) {
        const int n = (int) std::min<int64_t>(N, t.ic1 - ic);
        mask_kind * masks = t.at<mask_kind>(p.masks);
        bool any = false;
        for (int64_t iq = 0; iq < t.n_q; iq++) {
            masks[iq] = get_mask_kind(t, iq, ic, n);
            any = any || masks[iq] != MASK_ALL;
        }
        if (!any) {
            continue;
        }
        load_k(t, ic, n);
        const bool finite = load_v(t, ic, n);
        for (int64_t iq = 0; iq < t.n_q;) { // runs of queries that attend to something in the tile
            int64_t end = iq;
            while (end < t.n_q && masks[end] != MASK_ALL) {
                end++;
            }
            if (end > iq) {
                rows_of_tile(t, iq, end, ic, n, masks, finite);
            }
            iq = end + 1;
        }
    }

    for (int64_t r = 0; r < t.n_rows(); r++) {
        const int64_t i1   = t.i1 + r/p.group;
        const int64_t head = t.h0 + r % p.group;
        const float * o    = t.at<float>(p.o) + r*p.dvp;
        if (p.n_chunks == 1) {
            write_row(p, o, t.at<float>(p.max)[r], t.at<float>(p.sum)[r], i1, head, t.i3);
        } else {
            float * partial = partial_of(p, work, nth, t.i3, i1, head, t.ic0/p.chunk);
            partial[0] = t.at<float>(p.max)[r];
            partial[1] = t.at<float>(p.sum)[r];
            memcpy(partial + 2, o, p.dv*sizeof(float));
        }
    }
}

// rows of the output from chunks, in the order of the cache
void finish(const plan & p, void * work, int ith, int nth) {
    if (p.n_chunks == 1) {
        return;
    }
    const int64_t n = p.n_stream*p.n_q*p.n_head;
    float * o = (float *) ((char *) work + ith*p.thread_size + p.o);
    for (int64_t row = n*ith/nth; row < n*(ith + 1)/nth; row++) {
        const int64_t head = row % p.n_head;
        const int64_t i1   = row/p.n_head % p.n_q;
        const int64_t i3   = row/p.n_head/p.n_q;

        float max = -INFINITY;
        for (int64_t c = 0; c < p.n_chunks; c++) {
            max = std::max(max, partial_of(p, work, nth, i3, i1, head, c)[0]);
        }
        float sum = 0.0f;
        std::fill_n(o, p.dv, 0.0f);
        for (int64_t c = 0; c < p.n_chunks; c++) {
            const float * x = partial_of(p, work, nth, i3, i1, head, c);
            if (x[1] == 0.0f) {
                continue;
            }
            const float w = x[0] == -INFINITY ? 1.0f : expf(x[0] - max); // without a max, the sum isn't a number
            sum += w*x[1];
            for (int64_t j = 0; j < p.dv; j++) {
                o[j] += w*x[2 + j];
            }
        }
        write_row(p, o, max, sum, i1, head, i3);
    }
}

} // namespace

//
// interface
//

bool kvq_attn_takes(const struct ggml_tensor * dst) {
    static const bool floats = [] {
        const char * s = getenv("GGML_KVQ_FA_FLOAT");
        return s && *s && strcmp(s, "0") != 0;
    }();
    const enum ggml_type k = dst->src[1]->type;
    const enum ggml_type v = dst->src[2]->type;
    const auto known = [](enum ggml_type type) {
        return type == GGML_TYPE_F32 || ggml_get_type_traits(type)->to_float != nullptr;
    };
    return dst->src[0]->type == GGML_TYPE_F32 && known(k) && known(v) && (floats || ggml_is_quantized(k) || ggml_is_quantized(v));
}

size_t kvq_attn_work_size(const struct ggml_tensor * dst, int n_threads) {
    const plan p = make_plan(dst);
    const size_t partials = p.n_chunks == 1 ? 0 : (size_t) (p.n_stream*p.n_q*p.n_head*p.n_chunks)*p.partial;
    return n_threads*p.thread_size + partials;
}

int kvq_attn_n_items(const struct ggml_tensor * dst) {
    return (int) make_plan(dst).n_items;
}

void kvq_attn_item(const struct ggml_tensor * dst, int item, void * work, int ith, int nth) {
    run_item(make_plan(dst), item, work, ith, nth);
}

void kvq_attn_finish(const struct ggml_tensor * dst, void * work, int ith, int nth) {
    finish(make_plan(dst), work, ith, nth);
}

#ifndef KVQ_ATTN_STANDALONE
void kvq_attn_forward(const struct ggml_compute_params * params, struct ggml_tensor * dst) {
    const plan p = make_plan(dst);
    void * work = (void *) (((uintptr_t) params->wdata + 63)/64*64);

    if (params->ith == 0) {
        ggml_threadpool_chunk_set(params->threadpool, params->nth);
    }
    ggml_barrier(params->threadpool);

    for (int64_t i = params->ith; i < p.n_items; i = ggml_threadpool_chunk_add(params->threadpool, 1)) {
        run_item(p, i, work, params->ith, params->nth);
    }
    if (p.n_chunks > 1) {
        ggml_barrier(params->threadpool);
        finish(p, work, params->ith, params->nth);
    }
}
#endif

void kvq_attn_exp(const float * x, float * y, int64_t n) {
    for (int64_t i = 0; i < n; i += KVQ_VF) {
        float buf[KVQ_VF] = { 0 };
        const int64_t m = std::min<int64_t>(KVQ_VF, n - i);
        memcpy(buf, x + i, m*sizeof(float));
        kvq_vf_store(buf, kvq_vf_exp(kvq_vf_load(buf)));
        memcpy(y + i, buf, m*sizeof(float));
    }
}

const char * kvq_attn_name(void) {
    return KVQ_ATTN_NAME;
}
