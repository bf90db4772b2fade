// SPDX-License-Identifier: MIT
//
// Plain C for a CPU without a path of its own. Included by kvq-cpu.c alone.

#pragma once

#include "kvq-formats.h"

#define KVQ_CPU_NAME "generic"

static inline void kvq_encode_block(const struct kvq_format * f, const int bits, const float * x, void * block) {
    GGML_UNUSED(bits);
    kvq_encode_block_ref(f, x, block);
}

static inline void kvq_decode_block(const struct kvq_format * f, const int bits, const void * block, float * x) {
    GGML_UNUSED(bits);
    kvq_decode_block_ref(f, block, x);
}

// sum over n_blocks of x (blocks) times y (values)
static inline float kvq_dot_blocks(const struct kvq_format * f, const int bits, const void * x, const float * y, int64_t n_blocks) {
    float sum = 0.0f;
    for (int64_t i = 0; i < n_blocks; i++) {
        float z[QK_KVQ];
        kvq_decode_block(f, bits, (const char *) x + i*f->size, z);
        float part = 0.0f;
        for (int j = 0; j < QK_KVQ; j++) {
            part += z[j]*y[i*QK_KVQ + j];
        }
        sum += part;
    }
    return sum;
}
