// SPDX-License-Identifier: MIT
//
// Metal leaves the result of an integer division by zero open, and does not trap. x86 does.

#pragma once

#include <signal.h>

namespace emulator {

// For a handler of SIGFPE: gives the division that trapped a result that nobody should rely on, and steps over it.
// False if the instruction is no division; then nothing is changed.
bool skip_zero_division(void * ucontext);

} // namespace emulator
