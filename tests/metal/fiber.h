// SPDX-License-Identifier: MIT
//
// Switching between contexts of execution on one thread.

#pragma once

#include <stddef.h>

#if !defined(__x86_64__) && !defined(__aarch64__)
#include <ucontext.h>
#endif

namespace emulator {

struct fiber {
#if defined(__x86_64__) || defined(__aarch64__)
    void * stack_pointer;
#else
    ucontext_t context;
#endif
};

// Prepares a fiber that calls `entry`, which must not return, on a stack [stack, stack + size); size a multiple of 64.
void fiber_prepare(fiber & f, char * stack, size_t size, void (*entry)());

// Saves where this thread is in `from` and goes on where `to` was left.
void fiber_switch(fiber & from, fiber & to);

} // namespace emulator
