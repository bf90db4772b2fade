// SPDX-License-Identifier: MIT

#include "guarded-memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <map>
#include <mutex>

namespace emulator {

static size_t page_size() {
    static const size_t size = sysconf(_SC_PAGESIZE);
    return size;
}

static std::mutex                      guards_mutex;
static std::map<char *, const char *> & guards() {
    // never destroyed: buffers may be freed by other destructors at exit
    static auto * map = new std::map<char *, const char *>;
    return *map;
}

guarded_memory guarded_allocate(size_t size, size_t alignment, const char * what) {
    const size_t page    = page_size();
    const size_t rounded = (size + alignment - 1)/alignment*alignment;
    const size_t pages   = (rounded + page - 1)/page*page;

    guarded_memory memory = {};
    void * mapping = mmap(nullptr, pages + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapping == MAP_FAILED) {
        return memory;
    }
    memory.mapping      = (char *) mapping;
    memory.mapping_size = pages + page;
    memory.data         = memory.mapping + pages - rounded;
    memory.size         = size;
    if (mprotect(memory.mapping + pages, page, PROT_NONE) != 0) {
        munmap(mapping, pages + page);
        return guarded_memory();
    }

    std::lock_guard<std::mutex> lock(guards_mutex);
    guards()[memory.mapping + pages] = what;
    return memory;
}

void guarded_free(guarded_memory & memory) {
    if (!memory.mapping) {
        return;
    }
    {
        std::lock_guard<std::mutex> lock(guards_mutex);
        guards().erase(memory.mapping + memory.mapping_size - page_size());
    }
    munmap(memory.mapping, memory.mapping_size);
    memory = guarded_memory();
}

const char * guard_page_at(const void * address) {
    // asked by a signal handler just before the process ends: a lock held elsewhere must not hang it
    std::unique_lock<std::mutex> lock(guards_mutex, std::try_to_lock);
    auto it = guards().upper_bound((char *) address);
    if (it == guards().begin()) {
        return nullptr;
    }
    --it;
    return (const char *) address < it->first + page_size() ? it->second : nullptr;
}

} // namespace emulator
