// SPDX-License-Identifier: MIT
//
// The one table of types a KV cache may have.

#pragma once

#include "kvq-formats.h"

struct kvq_cache_type_info {
    enum ggml_type type;
    int            bits; // the number that asks for it; 0: by name only
};

static const struct kvq_cache_type_info kvq_cache_types[] = {
    { GGML_TYPE_F32,    32 },
    { GGML_TYPE_F16,    16 },
    { GGML_TYPE_BF16,    0 },
    { GGML_TYPE_Q8_0,    8 },
    { GGML_TYPE_KVQ6,    6 },
    { GGML_TYPE_KVQ5,    5 },
    { GGML_TYPE_KVQ4,    4 },
    { GGML_TYPE_KVQ3,    3 },
    { GGML_TYPE_KVQ2,    2 },
    { GGML_TYPE_Q5_0,    0 },
    { GGML_TYPE_Q5_1,    0 },
    { GGML_TYPE_Q4_0,    0 },
    { GGML_TYPE_Q4_1,    0 },
    { GGML_TYPE_IQ4_NL,  0 },
};
