// SPDX-License-Identifier: MIT
//
// What kvq-formats.c, kvq-cpu.c and kvq-attn.cpp need of ggml, so that codec and attention are tested without it: on any
// instruction set and by cross-compilers.

#include "kvq-formats.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// to nearest, ties to even, in integers: independent of the rounding instructions of a path
ggml_fp16_t ggml_fp32_to_fp16(float x) {
    uint32_t w;
    memcpy(&w, &x, sizeof(w));
    const uint32_t sign = (w >> 16) & 0x8000;
    const uint32_t mag  = w & 0x7fffffff;

    if (mag > 0x7f800000) {
        return (ggml_fp16_t) (sign | 0x7e00);
    }
    if (mag >= 0x47800000) { // 65536 and above
        return (ggml_fp16_t) (sign | 0x7c00);
    }
    const int e = (int) (mag >> 23) - 127;
    if (e < -25) { // below half of the smallest
        return (ggml_fp16_t) sign;
    }
    // significand of 24 bits, of which f16 keeps 11, less by one for each exponent below its smallest normal one
    const uint32_t m    = (mag & 0x7fffff) | 0x800000;
    const int      drop = e < -14 ? 13 + (-14 - e) : 13;
    const uint32_t half = (uint32_t) 1 << (drop - 1);
    const uint32_t rest = m & (2*half - 1);
    uint32_t       h    = m >> drop;
    h += rest > half || (rest == half && (h & 1));

    // a carry out of the significand is the next exponent; the leading one of a normal number adds 1 to it
    return (ggml_fp16_t) (sign | (e < -14 ? h : h + ((uint32_t) (e + 14) << 10)));
}

float ggml_fp16_to_fp32(ggml_fp16_t x) {
    const uint32_t sign = (uint32_t) (x & 0x8000) << 16;
    const uint32_t e    = (x >> 10) & 31;
    const uint32_t m    = x & 0x3ff;

    uint32_t w;
    if (e == 31) {
        w = sign | 0x7f800000 | m << 13;
    } else if (e != 0) {
        w = sign | (e + 112) << 23 | m << 13;
    } else {
        const float d = (float) m*0x1p-24f;
        memcpy(&w, &d, sizeof(w));
        w |= sign;
    }
    float res;
    memcpy(&res, &w, sizeof(res));
    return res;
}

void ggml_abort(const char * file, int line, const char * fmt, ...) {
    va_list args;
    va_start(args, fmt);
    fprintf(stderr, "%s:%d: ", file, line);
    vfprintf(stderr, fmt, args);
    fprintf(stderr, "\n");
    va_end(args);
    abort();
}

//
// the cache types of upstream: decoders of their own, from the description of the formats
//

static float read_f16(const uint8_t * p) {
    ggml_fp16_t x;
    memcpy(&x, p, sizeof(x));
    return ggml_fp16_to_fp32(x);
}

static void rows_of_f16(const void * x, float * y, int64_t k) {
    for (int64_t i = 0; i < k; i++) {
        y[i] = read_f16((const uint8_t *) x + 2*i);
    }
}

static void rows_of_bf16(const void * x, float * y, int64_t k) {
    for (int64_t i = 0; i < k; i++) {
        const uint8_t * p = (const uint8_t *) x + 2*i;
        const uint32_t  w = (uint32_t) p[0] << 16 | (uint32_t) p[1] << 24;
        memcpy(y + i, &w, sizeof(w));
    }
}

static void rows_of_q8_0(const void * x, float * y, int64_t k) {
    for (int64_t i = 0; i < k; i++) {
        const uint8_t * b = (const uint8_t *) x + i/32*34;
        y[i] = (float) (int8_t) b[2 + i % 32]*read_f16(b);
    }
}

// A scale, a minimum if there is one, 32 fifth bits if there are, then 4 bits of value i in byte i % 16, the lower ones first.
static inline float small_value(const uint8_t * x, int64_t i, bool min, bool fifth, const int8_t * codebook) {
    const size_t    size = 2 + (min ? 2 : 0) + (fifth ? 4 : 0) + 16;
    const uint8_t * b    = x + i/32*size;
    const int       j    = (int) (i % 32);
    int q = b[size - 16 + j % 16] >> (j < 16 ? 0 : 4) & 15;
    if (fifth) {
        const uint8_t * h = b + size - 20;
        q |= (h[j/8] >> j % 8 & 1) << 4;
    }
    if (codebook) {
        return (float) codebook[q]*read_f16(b);
    }
    return min ? (float) q*read_f16(b) + read_f16(b + 2) : (float) (q - (fifth ? 16 : 8))*read_f16(b);
}

// levels of NF4 by 127
static const int8_t levels_nl[16] = { -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113 };

#define ROWS_OF(name, min, fifth, codebook)                                     \
    static void rows_of_##name(const void * x, float * y, int64_t k) {          \
        for (int64_t i = 0; i < k; i++) {                                       \
            y[i] = small_value((const uint8_t *) x, i, min, fifth, codebook);   \
        }                                                                       \
    }
ROWS_OF(q4_0,   false, false, NULL)
ROWS_OF(q4_1,   true,  false, NULL)
ROWS_OF(q5_0,   false, true,  NULL)
ROWS_OF(q5_1,   true,  true,  NULL)
ROWS_OF(iq4_nl, false, false, levels_nl)

// the entries that a cache may have, without encoders
const struct ggml_type_traits * ggml_get_type_traits(enum ggml_type type) {
    static const struct {
        enum ggml_type          type;
        struct ggml_type_traits traits;
    } table[] = {
        { GGML_TYPE_F32,    { .type_name = "f32",    .blck_size = 1,  .type_size = 4 } },
        { GGML_TYPE_F16,    { .type_name = "f16",    .blck_size = 1,  .type_size = 2,  .to_float = rows_of_f16  } },
        { GGML_TYPE_BF16,   { .type_name = "bf16",   .blck_size = 1,  .type_size = 2,  .to_float = rows_of_bf16 } },
        { GGML_TYPE_Q8_0,   { .type_name = "q8_0",   .blck_size = 32, .type_size = 34, .is_quantized = true, .to_float = rows_of_q8_0   } },
        { GGML_TYPE_Q5_0,   { .type_name = "q5_0",   .blck_size = 32, .type_size = 22, .is_quantized = true, .to_float = rows_of_q5_0   } },
        { GGML_TYPE_Q5_1,   { .type_name = "q5_1",   .blck_size = 32, .type_size = 24, .is_quantized = true, .to_float = rows_of_q5_1   } },
        { GGML_TYPE_Q4_0,   { .type_name = "q4_0",   .blck_size = 32, .type_size = 18, .is_quantized = true, .to_float = rows_of_q4_0   } },
        { GGML_TYPE_Q4_1,   { .type_name = "q4_1",   .blck_size = 32, .type_size = 20, .is_quantized = true, .to_float = rows_of_q4_1   } },
        { GGML_TYPE_IQ4_NL, { .type_name = "iq4_nl", .blck_size = 32, .type_size = 18, .is_quantized = true, .to_float = rows_of_iq4_nl } },
#define TRAITS(name, NAME, bits, n_qs, n_qh) \
        { GGML_TYPE_##NAME, { .type_name = #name, .blck_size = QK_KVQ, .type_size = 2 + (n_qs) + (n_qh), .is_quantized = true, .to_float = dequantize_row_##name } },
        KVQ_FORMATS(TRAITS)
#undef TRAITS
    };
    static const struct ggml_type_traits none = { .type_name = "none" };
    for (size_t i = 0; i < sizeof(table)/sizeof(table[0]); i++) {
        if (table[i].type == type) {
            return &table[i].traits;
        }
    }
    return &none;
}

bool ggml_is_quantized(enum ggml_type type) {
    return ggml_get_type_traits(type)->is_quantized;
}

size_t ggml_row_size(enum ggml_type type, int64_t ne) {
    const struct ggml_type_traits * t = ggml_get_type_traits(type);
    return t->type_size*(size_t) (ne/t->blck_size);
}
