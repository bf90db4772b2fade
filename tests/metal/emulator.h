// SPDX-License-Identifier: MIT
//
// The runtime under the emulated Metal device: what kernels (compiled from .metal files against stdlib/metal_stdlib)
// and the host side (device.cpp) share. Plain C++17, no Metal types.
//
// A lane is a fiber. The lanes of a simdgroup run one after another, each up to its next collective, where all of them
// have to meet with the same operation at the same line; so a whole simdgroup advances in lockstep from collective to
// collective. Between two of them a lane sees threadgroup memory as of the last one plus what it wrote itself.
// Simdgroups run one after another from threadgroup barrier to threadgroup barrier. Threadgroups share nothing but
// device memory and run on all cores.

#pragma once

#include <stddef.h>
#include <stdint.h>

#include <vector>

namespace emulator {

constexpr int lanes_per_simdgroup       = 32;
constexpr int max_simdgroups            = 32; // 1024 threads, as on every Apple GPU
constexpr int max_buffers               = 31;
constexpr int max_threadgroup_arguments = 4;

//
// kernels and function constants, registered by the files they are in
//

struct kernel_arguments {
    void * buffers[max_buffers];
    void * threadgroup_memory[max_threadgroup_arguments];
};

struct lane_position {
    uint32_t threadgroup_position_in_grid[3];
    uint32_t thread_position_in_threadgroup[3];
    uint32_t threads_per_threadgroup[3];
    uint32_t threadgroups_per_grid[3];
    uint32_t thread_index_in_threadgroup;
    uint32_t thread_index_in_simdgroup;
    uint32_t simdgroup_index_in_threadgroup;
    uint32_t simdgroups_per_threadgroup;
};

using kernel_function = void (*)(const kernel_arguments & arguments, const lane_position & position);

struct kernel_entry {
    const char *    name;
    const char *    library; // base name of the .metal file
    kernel_function function;
    int             n_buffers;             // that it takes
    uint32_t        threadgroup_arguments; // bit n: it takes [[threadgroup(n)]]
};

enum class constant_kind { boolean, int16, int32 };

// one for each library that declares it
struct function_constant {
    const char *  name;
    const char *  library;
    int           id;
    constant_kind kind;
    void *        address;
};

struct kernel_registration {
    explicit kernel_registration(const kernel_entry & value);
};

struct function_constant_registration {
    explicit function_constant_registration(const function_constant & value);
};

const std::vector<kernel_entry> &            registered_kernels();
const std::vector<function_constant> & registered_constants();
const kernel_entry *                         find_kernel(const char * name); // nullptr if there is none

//
// what a running lane calls
//

enum class operation {
    none,
    simd_sum,
    simd_product,
    simd_max,
    simd_min,
    simd_and,
    simd_or,
    simd_xor,
    simd_prefix_inclusive_sum,
    simd_prefix_exclusive_sum,
    simd_shuffle,
    simd_shuffle_up,
    simd_shuffle_down,
    simd_shuffle_xor,
    simd_shuffle_rotate,
    simd_broadcast,
    simd_ballot,
    simdgroup_barrier,
    threadgroup_barrier,
    matrix_load,
    matrix_store,
    matrix_multiply,
    execution_barrier, // a simdgroup_barrier that orders no memory
    returned,          // the kernel is at its end
};

const char * operation_name(operation op);

// An operation of a simdgroup that needs no meeting, as its operands are the same in every lane. The first lane that
// reaches it computes the result, the others check that they do the same and take it.
struct uniform_step {
    operation    op;
    int          line;
    const void * address;
    uint64_t     stride;
    bool         transposed;
    float        values[64];
};

struct simdgroup {
    static constexpr size_t slot_size = 64;

    // one value for each lane; two sets, since a lane may reach its next collective before others have read the last
    alignas(64) unsigned char slots[2][lanes_per_simdgroup][slot_size];

    // a value that all lanes compute alike is computed by the first one
    alignas(64) unsigned char shared_result[lanes_per_simdgroup*slot_size];
    uint64_t                  shared_result_epoch;

    uint64_t epoch; // collectives so far, from 1
    int      index;
    int      n_lanes;

    std::vector<uniform_step> steps; // since the last collective
    uint32_t                  n_steps;
    uint32_t                  steps_of_lane[lanes_per_simdgroup];

    // where each lane stands
    operation op[lanes_per_simdgroup];
    int       line[lanes_per_simdgroup];
};

struct running_lane {
    simdgroup * group;
    int         lane;
};

extern thread_local running_lane current;

// Ends this lane's part of an epoch; returns when all lanes of the simdgroup (for a threadgroup barrier: of the
// threadgroup) have come to the same operation and line. Aborts if they haven't.
void meet(operation op, int line);

// The next step of this lane. `first` says that its values are to be computed.
uniform_step & next_step(operation op, int line, const void * address, uint64_t stride, bool transposed, bool & first);

// Storage of a variable in threadgroup memory that a kernel declares itself: the same for all lanes of a threadgroup.
void * threadgroup_variable(const void * key, size_t size);

// Makes a write in threadgroup memory visible to all lanes at once; nothing to do for other memory.
void publish(void * address, size_t size);

//
// what the host side calls
//

// a value of a function constant, as a pipeline was made with it
struct constant_value {
    int           id;
    constant_kind kind;
    int32_t       value;
};

struct dispatch {
    const kernel_entry * function;
    const std::vector<constant_value> * constants;
    kernel_arguments arguments;
    size_t   threadgroup_memory[max_threadgroup_arguments]; // bytes, as the host set them
    uint32_t threadgroups[3];
    uint32_t threads[3];                                    // of one threadgroup
};

enum class schedule { ascending, descending, random };

struct settings {
    schedule order;                  // of lanes, simdgroups and threadgroups
    uint64_t seed;                   // of the random order
    int      n_threads;              // workers
    bool     lockstep;               // false: a lane sees the writes of lanes that ran before it
    size_t   max_threadgroup_memory; // bytes
};

// from the environment: GGML_METAL_EMULATED_SCHED, _THREADS, _LOCKSTEP, _THREADGROUP_MEMORY
settings settings_from_environment();

settings & current_settings();

struct counters {
    uint64_t threadgroups;
    uint64_t collectives;
    uint64_t write_conflicts; // bytes that two lanes set to different values between two collectives
    uint64_t overruns;        // threadgroups with known writes past the end of their memory, see threadgroup-memory.cpp
    uint64_t zero_divisions;  // integer divisions by zero: no fault in Metal, but an open result
};

// Runs a dispatch to its end. One at a time: others wait.
counters run(const dispatch & d);

// The host orders what may be done in any order: a permutation of [0, n) by the schedule.
std::vector<uint32_t> order_of(uint32_t n, uint64_t salt);

[[noreturn]] void fail(const char * format, ...) __attribute__((format(printf, 1, 2)));

} // namespace emulator
