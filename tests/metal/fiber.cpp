// SPDX-License-Identifier: MIT

#include "fiber.h"

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)

// Only what a call preserves has to be saved: six registers. Nobody changes rounding modes here, so mxcsr stays.
extern "C" void emulator_fiber_switch(void ** from, void * to);
asm(R"(
.text
.globl emulator_fiber_switch
.hidden emulator_fiber_switch
.type emulator_fiber_switch, @function
emulator_fiber_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size emulator_fiber_switch, .-emulator_fiber_switch
)");

void emulator::fiber_prepare(fiber & f, char * stack, size_t size, void (*entry)()) {
    // six registers, the entry as return address, and none for the entry itself; at the entry the stack is aligned as
    // after a call
    void ** top = (void **) (stack + size) - 8;
    memset(top, 0, 8*sizeof(void *));
    top[6] = (void *) entry;
    f.stack_pointer = top;
}

void emulator::fiber_switch(fiber & from, fiber & to) {
    emulator_fiber_switch(&from.stack_pointer, to.stack_pointer);
}

#elif defined(__aarch64__)

// x19 to x28, frame pointer, link register, and the lower halves of v8 to v15.
extern "C" void emulator_fiber_switch(void ** from, void * to);
asm(R"(
.text
.globl emulator_fiber_switch
.hidden emulator_fiber_switch
.type emulator_fiber_switch, @function
emulator_fiber_switch:
    sub sp, sp, #160
    stp x19, x20, [sp, #0]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp, #0]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
.size emulator_fiber_switch, .-emulator_fiber_switch
)");

void emulator::fiber_prepare(fiber & f, char * stack, size_t size, void (*entry)()) {
    void ** top = (void **) (stack + size) - 20;
    memset(top, 0, 20*sizeof(void *));
    top[11] = (void *) entry;
    f.stack_pointer = top;
}

void emulator::fiber_switch(fiber & from, fiber & to) {
    emulator_fiber_switch(&from.stack_pointer, to.stack_pointer);
}

#else

void emulator::fiber_prepare(fiber & f, char * stack, size_t size, void (*entry)()) {
    getcontext(&f.context);
    f.context.uc_stack.ss_sp   = stack;
    f.context.uc_stack.ss_size = size;
    f.context.uc_link          = nullptr;
    makecontext(&f.context, entry, 0);
}

void emulator::fiber_switch(fiber & from, fiber & to) {
    swapcontext(&from.context, &to.context);
}

#endif
