// SPDX-License-Identifier: MIT
//
// What clang calls to round a float to bfloat: libraries of older compilers don't have it.

#include <stdint.h>

extern "C" __attribute__((weak)) __bf16 __truncsfbf2(float x) {
    uint32_t bits = __builtin_bit_cast(uint32_t, x);
    if ((bits & 0x7fffffff) > 0x7f800000) {
        bits |= 0x400000; // NaN stays NaN, whatever is cut off
    } else {
        bits += 0x7fff + (bits >> 16 & 1); // to nearest, ties to even
    }
    return __builtin_bit_cast(__bf16, (uint16_t) (bits >> 16));
}
