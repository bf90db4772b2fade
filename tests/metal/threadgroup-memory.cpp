// SPDX-License-Identifier: MIT

#include "threadgroup-memory.h"

#include <stdlib.h>
#include <string.h>

#include <utility>

namespace emulator {

// Half, float and bfloat: all NaN. Integers: -1.
static constexpr int poison = 0xff;

// Kernels of upstream that are known to write past the end of their threadgroup memory, in the pinned release.
// The decode kernel clears its rows of results lane by lane, so up to 31 float4 beyond the last one ("zero out so").
// On Apple's GPUs such writes are harmless as far as is known. Counted, and reported with the statistics.
static const struct {
    const char * prefix;
    size_t       bytes;
} known_overruns[] = {
    { "kernel_flash_attn_ext_vec_",     512 },
    { "kernel_kvq_flash_attn_ext_vec_", 512 },
};

// The comparison below takes half of the time of attention: as wide as vectors are, without branches inside.
static bool differ(const char * a, const char * b, size_t size) {
    typedef uint64_t words __attribute__((vector_size(32), aligned(32)));
    const words * x = (const words *) a;
    const words * y = (const words *) b;
    words bits = {};
    for (size_t i = 0; i < size/sizeof(words); ++i) {
        bits |= x[i] ^ y[i];
    }
    return (bits[0] | bits[1] | bits[2] | bits[3]) != 0;
}

static size_t round_up(size_t n, size_t multiple) {
    return (n + multiple - 1)/multiple*multiple;
}

threadgroup_memory::threadgroup_memory() {
    for (region & r : regions) {
        r = {};
        r.memory  = guarded_allocate(capacity, block_size, "the end of threadgroup memory");
        r.base    = (char *) aligned_alloc(block_size, capacity);
        r.pending = (char *) aligned_alloc(block_size, capacity);
        if (!r.memory.data || !r.base || !r.pending) {
            fail("no memory for threadgroup memory");
        }
    }
}

threadgroup_memory::~threadgroup_memory() {
    for (region & r : regions) {
        guarded_free(r.memory);
        free(r.base);
        free(r.pending);
    }
}

void threadgroup_memory::begin_dispatch(const dispatch & d, kernel_arguments & arguments) {
    size_t slack = 0;
    for (const auto & known : known_overruns) {
        if (strncmp(d.function->name, known.prefix, strlen(known.prefix)) == 0) {
            slack = known.bytes;
        }
    }

    variables.clear();
    n_used = 0;
    size_t total = 0;
    for (int i = 0; i < n_regions; ++i) {
        const size_t size = i < max_threadgroup_arguments ? d.threadgroup_memory[i] : 0;
        total += size;
        regions[i].slack = size > 0 ? slack : 0;
        regions[i].used  = round_up(size + regions[i].slack, block_size);
        if (size > 0) {
            n_used = i + 1;
            arguments.threadgroup_memory[i] = regions[i].memory.data + capacity - regions[i].slack - size;
        } else if (i < max_threadgroup_arguments) {
            arguments.threadgroup_memory[i] = nullptr;
        }
    }
    if (total > current_settings().max_threadgroup_memory) {
        fail("%s: %zu bytes of threadgroup memory, the device has %zu", d.function->name, total,
                current_settings().max_threadgroup_memory);
    }
}

void threadgroup_memory::begin_threadgroup() {
    for (int i = 0; i < n_used; ++i) {
        const size_t at = capacity - regions[i].used;
        memset(regions[i].memory.data + at, poison, regions[i].used);
        memset(regions[i].base        + at, poison, regions[i].used);
        memset(regions[i].pending     + at, poison, regions[i].used);
    }
}

void threadgroup_memory::end_threadgroup() {
    for (int i = 0; i < n_used; ++i) {
        const region & r = regions[i];
        for (size_t at = capacity - r.slack; at < capacity; ++at) {
            if (r.memory.data[at] != (char) poison) {
                ++overruns;
                break;
            }
        }
    }
}

void threadgroup_memory::grow(region & r, size_t used) {
    const size_t more = used - r.used;
    const size_t at   = capacity - used;
    memset(r.memory.data + at, poison, more);
    memset(r.base        + at, poison, more);
    memset(r.pending     + at, poison, more);
    r.used = used;
}

void * threadgroup_memory::variable(const void * key, size_t size) {
    for (const kernel_variable & v : variables) {
        if (v.key == key) {
            return v.address;
        }
    }

    region & r = regions[max_threadgroup_arguments];
    const size_t used = r.used + round_up(size, block_size);
    size_t total = used;
    for (int i = 0; i < max_threadgroup_arguments; ++i) {
        total += regions[i].used - regions[i].slack;
    }
    if (total > current_settings().max_threadgroup_memory) {
        fail("%zu bytes of threadgroup memory, the device has %zu", total, current_settings().max_threadgroup_memory);
    }

    // the first variable ends at the guard page if its size allows
    const size_t top = capacity - r.used;
    grow(r, used);
    n_used = n_regions;
    variables.push_back({ key, r.memory.data + top - round_up(size, 16) });
    return variables.back().address;
}

void threadgroup_memory::publish(void * address, size_t size) {
    for (int i = 0; i < n_used; ++i) {
        region & r = regions[i];
        const ptrdiff_t at = (char *) address - r.memory.data;
        if (at >= 0 && at + size <= capacity) {
            memcpy(r.base    + at, address, size);
            memcpy(r.pending + at, address, size);
        }
    }
}

// Byte by byte, since two lanes may write neighbouring bytes.
void threadgroup_memory::put_chunk_aside(int i, size_t at) {
    region & r = regions[i];
    char * seen    = r.memory.data + at;
    char * base    = r.base        + at;
    char * pending = r.pending     + at;
    if (!differ(pending, base, chunk_size)) {
        // listed twice, if a lane after another wrote what was there: harmless
        dirty.push_back({ i, at });
    }
    typedef uint8_t bytes __attribute__((vector_size(32), aligned(32)));
    for (size_t j = 0; j < chunk_size; j += sizeof(bytes)) {
        const bytes now   = *(bytes *) (seen    + j);
        const bytes old   = *(bytes *) (base    + j);
        const bytes other = *(bytes *) (pending + j);
        const auto written  = now != old; // -1 in each byte where it is so
        const auto conflict = written & (other != old) & (other != now);
        *(bytes *) (pending + j) = ((bytes) written & now) | (~(bytes) written & other);
        *(bytes *) (seen    + j) = old;
        const bytes none = {};
        if (differ((const char *) &conflict, (const char *) &none, sizeof(none))) {
            for (size_t k = 0; k < sizeof(bytes); ++k) {
                write_conflicts -= conflict[k];
            }
        }
    }
}

void threadgroup_memory::put_writes_aside() {
    for (int i = 0; i < n_used; ++i) {
        const region & r = regions[i];
        for (size_t at = capacity - r.used; at < capacity; at += block_size) {
            if (!differ(r.memory.data + at, r.base + at, block_size)) {
                continue;
            }
            for (size_t chunk = at; chunk < at + block_size; chunk += chunk_size) {
                if (differ(r.memory.data + chunk, r.base + chunk, chunk_size)) {
                    put_chunk_aside(i, chunk);
                }
            }
        }
    }
}

void threadgroup_memory::commit_writes() {
    for (const auto & chunk : dirty) {
        const region & r = regions[chunk.first];
        memcpy(r.memory.data + chunk.second, r.pending + chunk.second, chunk_size);
        memcpy(r.base        + chunk.second, r.pending + chunk.second, chunk_size);
    }
    dirty.clear();
}

} // namespace emulator
