// SPDX-License-Identifier: MIT

#include "kvq-cpu.h"

#include <assert.h>

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

const char * kvq_cpu_name(void) {
    return KVQ_CPU_NAME;
}
