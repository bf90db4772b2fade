// SPDX-License-Identifier: MIT
//
// Memory whose end lies at a page that can't be touched.

#pragma once

#include <stddef.h>

namespace emulator {

struct guarded_memory {
    char * data;    // aligned, ends at the guard page but for what alignment needs
    size_t size;
    char * mapping;
    size_t mapping_size;
};

// `what` names the memory in the message about an overrun; a literal. data is nullptr if there is no memory.
guarded_memory guarded_allocate(size_t size, size_t alignment, const char * what);
void           guarded_free(guarded_memory & memory);

// The name of the guard page that holds an address, or nullptr.
const char * guard_page_at(const void * address);

} // namespace emulator
