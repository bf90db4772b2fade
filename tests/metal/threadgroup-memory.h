// SPDX-License-Identifier: MIT
//
// The memory of one threadgroup: sized by the host or declared in the kernel, poisoned for each threadgroup, ending at
// a guard page, and seen by each lane as it was at the last collective plus the lane's own writes.

#pragma once

#include "emulator.h"
#include "guarded-memory.h"

namespace emulator {

class threadgroup_memory {
public:
    threadgroup_memory();
    ~threadgroup_memory();

    // Lays out the memory of a dispatch and fills `arguments.threadgroup_memory`.
    void begin_dispatch(const dispatch & d, kernel_arguments & arguments);

    void begin_threadgroup(); // poisons
    void end_threadgroup();   // looks for writes into the slack

    void * variable(const void * key, size_t size);

    void publish(void * address, size_t size); // a write that the other lanes see at once

    // A lane has come to its collective: its writes are put aside, and the memory is as before for the next one.
    void end_lane(bool lockstep) {
        if (lockstep && n_used > 0) {
            put_writes_aside();
        }
    }

    // All lanes have: their writes become visible.
    void end_epoch(bool lockstep) {
        if (lockstep && !dirty.empty()) {
            commit_writes();
        }
    }

    uint64_t write_conflicts = 0;
    uint64_t overruns        = 0;

private:
    static constexpr size_t capacity   = 128*1024;
    static constexpr size_t block_size = 256; // compared at once
    static constexpr size_t chunk_size = 64;  // copied at once
    static constexpr int    n_regions  = max_threadgroup_arguments + 1; // the last one: variables of the kernel

    // All three run from the end of `capacity` bytes backwards.
    struct region {
        guarded_memory memory;  // what kernels see
        char *         base;    // as of the last collective
        char *         pending; // base plus the writes of lanes that are done with this epoch
        size_t         used;    // bytes in use, a multiple of the block size
        size_t         slack;   // of these at the end, not the kernel's
    };

    struct kernel_variable {
        const void * key;
        void *       address;
    };

    void put_writes_aside();
    void put_chunk_aside(int region, size_t at);
    void commit_writes();
    void grow(region & r, size_t used);

    region regions[n_regions];
    int    n_used  = 0; // regions in use

    std::vector<kernel_variable>         variables;
    std::vector<std::pair<int, size_t>>  dirty; // region and offset from its beginning of each chunk that was written
};

} // namespace emulator
