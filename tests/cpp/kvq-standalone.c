// SPDX-License-Identifier: MIT
//
// What kvq-formats.c and kvq-cpu.c need of ggml, so that the codec is tested without it: on any instruction set and by
// cross-compilers.

#include "ggml.h"

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

// none of upstream's types is decoded here
const struct ggml_type_traits * ggml_get_type_traits(enum ggml_type type) {
    static const struct ggml_type_traits none = { .type_name = "none" };
    GGML_UNUSED(type);
    return &none;
}
