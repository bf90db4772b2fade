// SPDX-License-Identifier: MIT

#include "zero-division.h"

#include <stdint.h>
#include <ucontext.h>

#if defined(__x86_64__)

// Length of a DIV or IDIV with 16, 32 or 64 bits, or 0: prefixes, opcode F7 with 6 or 7 in the middle of ModRM, and
// what ModRM says follows.
static int division_length(const uint8_t * code) {
    int n = 0;
    while (code[n] == 0x66 || (code[n] & 0xf0) == 0x40) {
        ++n;
    }
    if (code[n] != 0xf7) {
        return 0;
    }
    const int mod    = code[n + 1] >> 6;
    const int digit  = code[n + 1] >> 3 & 7;
    const int memory = code[n + 1] & 7;
    if (digit < 6) {
        return 0;
    }
    n += 2;
    if (mod == 3) {
        return n; // the divisor is a register
    }
    bool has_base = true;
    if (memory == 4) {
        has_base = (code[n] & 7) != 5;
        ++n;
    } else if (memory == 5 && mod == 0) {
        return n + 4; // relative to the instruction
    }
    return n + (mod == 1 ? 1 : mod == 2 || !has_base ? 4 : 0);
}

bool emulator::skip_zero_division(void * ucontext) {
    greg_t * registers = ((ucontext_t *) ucontext)->uc_mcontext.gregs;
    const int length = division_length((const uint8_t *) registers[REG_RIP]);
    if (length == 0) {
        return false;
    }
    registers[REG_RAX] = -1;
    registers[REG_RDX] = -1;
    registers[REG_RIP] += length;
    return true;
}

#else

bool emulator::skip_zero_division(void * ucontext) {
    (void) ucontext;
    return false;
}

#endif
