// SPDX-License-Identifier: MIT

#include "kvq-cpu.h"

#include <assert.h>
#include <math.h>
#include <string.h>

// Each path defines, for a constant number of bits:
//     kvq_encode_block, kvq_decode_block: one block, as the reference codec has it, bit by bit
//     kvq_dot_blocks: sum over n_blocks of x (blocks) times y (values)
//     KVQ_CPU_NAME: a string literal
// One that encodes several blocks faster defines instead of kvq_encode_block:
//     kvq_encode_blocks: n blocks, up to KVQ_CPU_BATCH
#if defined(KVQ_CPU_GENERIC)
#include "kvq-cpu-generic.h"
#elif defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#include "kvq-cpu-avx512.h"
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "kvq-cpu-avx2.h"
#elif defined(__ARM_NEON) && defined(__aarch64__)
#include "kvq-cpu-neon.h"
#else
#include "kvq-cpu-generic.h"
#endif

#ifndef KVQ_CPU_BATCH
#define KVQ_CPU_BATCH 1
#define kvq_encode_blocks(f, bits, x, block, n) kvq_encode_block(f, bits, x, block)
#endif

#define KVQ_CPU_ROWS(name, NAME, bits, n_qs, n_qh)                                                              \
    void quantize_row_##name(const float * x, void * y, int64_t k) {                                            \
        const struct kvq_format * f = kvq_get_format(GGML_TYPE_##NAME);                                         \
        assert(k % QK_KVQ == 0);                                                                                \
        for (int64_t i = 0; i < k/QK_KVQ; i += KVQ_CPU_BATCH) {                                                 \
            const int n = k/QK_KVQ - i < KVQ_CPU_BATCH ? (int) (k/QK_KVQ - i) : KVQ_CPU_BATCH;                  \
            kvq_encode_blocks(f, bits, x + i*QK_KVQ, (block_##name *) y + i, n);                                \
            GGML_UNUSED(n);                                                                                     \
        }                                                                                                       \
    }                                                                                                           \
    void kvq_dequantize_row_##name(const void * x, float * y, int64_t k) {                                      \
        const struct kvq_format * f = kvq_get_format(GGML_TYPE_##NAME);                                         \
        assert(k % QK_KVQ == 0);                                                                                \
        for (int64_t i = 0; i < k/QK_KVQ; i++) {                                                                \
            kvq_decode_block(f, bits, (const block_##name *) x + i, y + i*QK_KVQ);                              \
        }                                                                                                       \
    }                                                                                                           \
    void ggml_vec_dot_##name##_f32(int n, float * s, size_t bs, const void * vx, size_t bx,                     \
                                   const void * vy, size_t by, int nrc) {                                       \
        assert(n % QK_KVQ == 0 && nrc == 1);                                                                    \
        GGML_UNUSED(bs); GGML_UNUSED(bx); GGML_UNUSED(by); GGML_UNUSED(nrc);                                    \
        *s = kvq_dot_blocks(kvq_get_format(GGML_TYPE_##NAME), bits, vx, (const float *) vy, n/QK_KVQ);          \
    }
KVQ_FORMATS(KVQ_CPU_ROWS)

ggml_to_float_t kvq_to_float(enum ggml_type type) {
    switch (type) {
#define KVQ_CPU_CASE(name, NAME, bits, n_qs, n_qh) \
        case GGML_TYPE_##NAME: return kvq_dequantize_row_##name;
        KVQ_FORMATS(KVQ_CPU_CASE)
        default: return ggml_get_type_traits(type)->to_float;
    }
}

void kvq_copy_block(enum ggml_type type, const void * block, enum ggml_type type_dst, void * dst, int64_t n) {
    if (type_dst == GGML_TYPE_F32) {
        kvq_to_float(type)(block, (float *) dst, n);
        return;
    }
    float x[256]; // the largest block there is
    GGML_ASSERT(type_dst == GGML_TYPE_F16 && n <= 256);
    kvq_to_float(type)(block, x, n);
    for (int64_t i = 0; i < n; i++) {
        ((ggml_fp16_t *) dst)[i] = ggml_fp32_to_fp16(x[i]);
    }
}

// by bits, which vectors do, and which no flag for fast arithmetic takes away
static bool all_finite(const float * x, int64_t n) {
    uint32_t all = 0;
    for (int64_t i = 0; i < n; i++) {
        uint32_t w;
        memcpy(&w, x + i, sizeof(w));
        all |= (w & 0x7f800000) + 0x00800000; // an exponent of all ones carries into the sign
    }
    return all >> 31 == 0;
}

void kvq_mark_nonfinite(enum ggml_type type, const float * x, void * y, int64_t k) {
    switch (type) { // blocks of 32, the scale in front
        case GGML_TYPE_Q8_0:
        case GGML_TYPE_Q4_0:
        case GGML_TYPE_Q4_1:
        case GGML_TYPE_Q5_0:
        case GGML_TYPE_Q5_1:
        case GGML_TYPE_IQ4_NL:
            break;
        default:
            return;
    }
    const ggml_fp16_t nan  = 0x7e00;
    const size_t      size = ggml_row_size(type, 32);
    for (int64_t i = 0; i < k/32; i++) {
        if (!all_finite(x + 32*i, 32)) {
            memcpy((char *) y + i*size, &nan, sizeof(nan));
        }
    }
}

void kvq_add_mask(float * x, const float * mask, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        const float sum = x[i] + mask[i];
        x[i] = mask[i] == -INFINITY ? -INFINITY : sum;
    }
}

bool kvq_product_nonfinite(float * c, const float * a, const float * b, int64_t m, int64_t k, int64_t n) {
    if (all_finite(b, k*n)) {
        return false;
    }
    for (int64_t r = 0; r < m; r++) {
        for (int64_t i = 0; i < k; i++) {
            const float w = a[r*k + i];
            if (w == 0.0f) {
                continue;
            }
            for (int64_t j = 0; j < n; j++) {
                c[r*n + j] += w*b[i*n + j];
            }
        }
    }
    return true;
}

const char * kvq_cpu_name(void) {
    return KVQ_CPU_NAME;
}
