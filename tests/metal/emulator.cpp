// SPDX-License-Identifier: MIT

#include "emulator.h"
#include "fiber.h"
#include "threadgroup-memory.h"
#include "zero-division.h"

#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>

namespace emulator {

thread_local running_lane current = { nullptr, 0 };

//
// registration
//

// functions, since other files register before this file's variables are set up
static std::vector<kernel_entry> & kernels() {
    static auto * list = new std::vector<kernel_entry>;
    return *list;
}

static std::vector<function_constant> & constants() {
    static auto * list = new std::vector<function_constant>;
    return *list;
}

kernel_registration::kernel_registration(const kernel_entry & value) {
    kernels().push_back(value);
}

function_constant_registration::function_constant_registration(const function_constant & value) {
    constants().push_back(value);
}

const std::vector<kernel_entry> & registered_kernels() {
    return kernels();
}

const std::vector<function_constant> & registered_constants() {
    return constants();
}

const kernel_entry * find_kernel(const char * name) {
    for (const kernel_entry & k : kernels()) {
        if (strcmp(k.name, name) == 0) {
            return &k;
        }
    }
    return nullptr;
}

const char * operation_name(operation op) {
    switch (op) {
        case operation::none:                      return "none";
        case operation::simd_sum:                  return "simd_sum";
        case operation::simd_product:              return "simd_product";
        case operation::simd_max:                  return "simd_max";
        case operation::simd_min:                  return "simd_min";
        case operation::simd_and:                  return "simd_and";
        case operation::simd_or:                   return "simd_or";
        case operation::simd_xor:                  return "simd_xor";
        case operation::simd_prefix_inclusive_sum: return "simd_prefix_inclusive_sum";
        case operation::simd_prefix_exclusive_sum: return "simd_prefix_exclusive_sum";
        case operation::simd_shuffle:              return "simd_shuffle";
        case operation::simd_shuffle_up:           return "simd_shuffle_up";
        case operation::simd_shuffle_down:         return "simd_shuffle_down";
        case operation::simd_shuffle_xor:          return "simd_shuffle_xor";
        case operation::simd_shuffle_rotate:       return "simd_shuffle_rotate";
        case operation::simd_broadcast:            return "simd_broadcast";
        case operation::simd_ballot:               return "simd_ballot";
        case operation::simdgroup_barrier:         return "simdgroup_barrier";
        case operation::threadgroup_barrier:       return "threadgroup_barrier";
        case operation::matrix_load:               return "simdgroup_load";
        case operation::matrix_store:              return "simdgroup_store";
        case operation::matrix_multiply:           return "simdgroup_multiply_accumulate";
        case operation::execution_barrier:         return "simdgroup_barrier(mem_none)";
        case operation::returned:                  return "return";
    }
    return "unknown";
}

//
// settings
//

settings settings_from_environment() {
    settings s = {};
    s.order                  = schedule::ascending;
    s.seed                   = 1;
    s.n_threads              = std::max(1u, std::thread::hardware_concurrency());
    s.lockstep               = true;
    s.max_threadgroup_memory = 32768;

    if (const char * value = getenv("GGML_METAL_EMULATED_SCHED")) {
        if (strcmp(value, "ascending") == 0) {
            s.order = schedule::ascending;
        } else if (strcmp(value, "descending") == 0) {
            s.order = schedule::descending;
        } else if (strncmp(value, "random", 6) == 0 && (value[6] == 0 || value[6] == ':')) {
            s.order = schedule::random;
            if (value[6]) {
                s.seed = strtoull(value + 7, nullptr, 10);
            }
        } else {
            fail("GGML_METAL_EMULATED_SCHED=%s: ascending, descending, random or random:<seed>", value);
        }
    }
    if (const char * value = getenv("GGML_METAL_EMULATED_THREADS")) {
        s.n_threads = std::max(1, atoi(value));
    }
    if (const char * value = getenv("GGML_METAL_EMULATED_LOCKSTEP")) {
        s.lockstep = atoi(value) != 0;
    }
    if (const char * value = getenv("GGML_METAL_EMULATED_THREADGROUP_MEMORY")) {
        s.max_threadgroup_memory = strtoull(value, nullptr, 10);
    }
    return s;
}

settings & current_settings() {
    static settings s = settings_from_environment();
    return s;
}

namespace {

// xorshift: quality hardly matters here, reproducibility does
struct random_numbers {
    uint64_t state;

    explicit random_numbers(uint64_t seed) : state(seed*0x9e3779b97f4a7c15u | 1) {
        for (int i = 0; i < 4; ++i) {
            below(2);
        }
    }

    uint32_t below(uint32_t n) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        return (uint32_t) ((state >> 33)*n >> 31);
    }
};

template<typename T>
void shuffle(T * items, uint32_t n, random_numbers & random) {
    for (uint32_t i = n; i > 1; --i) {
        std::swap(items[i - 1], items[random.below(i)]);
    }
}

} // namespace

std::vector<uint32_t> order_of(uint32_t n, uint64_t salt) {
    const settings & s = current_settings();
    std::vector<uint32_t> order(n);
    for (uint32_t i = 0; i < n; ++i) {
        order[i] = s.order == schedule::descending ? n - 1 - i : i;
    }
    if (s.order == schedule::random) {
        random_numbers random(s.seed + salt);
        shuffle(order.data(), n, random);
    }
    return order;
}

//
// one thread that runs threadgroups
//

namespace {

class worker {
public:
    worker();
    ~worker();

    void begin(const dispatch & d);
    void run_threadgroup(uint32_t index);

    counters total = {};

    void describe(FILE * out) const; // where it is

    // called by lanes
    void   meet(operation op, int line);
    void * variable(const void * key, size_t size) { return memory.variable(key, size); }
    void   publish(void * address, size_t size)    { memory.publish(address, size); }

private:
    static constexpr size_t stack_size = 128*1024;
    static constexpr int    n_stacks   = lanes_per_simdgroup*max_simdgroups;

    enum class state { runnable, at_barrier, finished };

    struct group_state {
        simdgroup group;
        state     at;
        int       place;                       // in the order of lanes
        uint8_t   order[lanes_per_simdgroup];
        bool      started[lanes_per_simdgroup];
        fiber     fibers[lanes_per_simdgroup]; // of lanes that have met a collective
    };

    static void lane_entry();

    void   run_lanes();
    bool   next_lane();
    void   advance(group_state & g);
    void   check_meeting(group_state & g);
    void   order_lanes(group_state & g);
    char * stack(int i) const { return stacks + stack_size*i; }

    const dispatch *   work = nullptr;
    kernel_arguments   arguments;
    lane_position      position; // of the threadgroup
    threadgroup_memory memory;
    char *             stacks;
    int                n_stacks_used = 0;
    int                n_groups      = 0;
    group_state *      active        = nullptr;
    fiber              scheduler;
    random_numbers     random { 1 };

    std::vector<std::unique_ptr<group_state>> groups;
};

thread_local worker * this_worker = nullptr;

worker::worker() {
    // the lowest page of each stack is unmapped; memory comes with use
    stacks = (char *) mmap(nullptr, stack_size*n_stacks, PROT_READ | PROT_WRITE,
            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (stacks == MAP_FAILED) {
        fail("no memory for stacks");
    }
    for (int i = 0; i < n_stacks; ++i) {
        mprotect(stack(i), 4096, PROT_NONE);
    }
    for (int i = 0; i < max_simdgroups; ++i) {
        groups.emplace_back(new group_state());
        groups.back()->group.index = i;
    }
}

worker::~worker() {
    munmap(stacks, stack_size*n_stacks);
}

void worker::begin(const dispatch & d) {
    work      = &d;
    arguments = d.arguments;
    total     = {};
    memory.write_conflicts = 0;
    memory.overruns        = 0;
    memory.begin_dispatch(d, arguments);
}

void worker::order_lanes(group_state & g) {
    if (current_settings().order == schedule::random) {
        shuffle(g.order, g.group.n_lanes, random);
    }
}

void worker::run_threadgroup(uint32_t index) {
    const settings & s = current_settings();

    const uint32_t * grid    = work->threadgroups;
    const uint32_t * threads = work->threads;
    for (int i = 0; i < 3; ++i) {
        position.threads_per_threadgroup[i] = threads[i];
        position.threadgroups_per_grid[i]   = grid[i];
    }
    position.threadgroup_position_in_grid[0] = index%grid[0];
    position.threadgroup_position_in_grid[1] = index/grid[0]%grid[1];
    position.threadgroup_position_in_grid[2] = index/grid[0]/grid[1];

    const int n_threads = threads[0]*threads[1]*threads[2];
    n_groups      = (n_threads + lanes_per_simdgroup - 1)/lanes_per_simdgroup;
    n_stacks_used = 0;
    random        = random_numbers(s.seed + index);
    position.simdgroups_per_threadgroup = n_groups;

    uint8_t order[max_simdgroups];
    for (int i = 0; i < n_groups; ++i) {
        order[i] = s.order == schedule::descending ? n_groups - 1 - i : i;

        group_state & g = *groups[i];
        g.at                        = state::runnable;
        g.group.n_lanes             = std::min(lanes_per_simdgroup, n_threads - i*lanes_per_simdgroup);
        g.group.epoch               = 1;
        g.group.shared_result_epoch = 0;
        for (int lane = 0; lane < g.group.n_lanes; ++lane) {
            g.order[lane]   = s.order == schedule::descending ? g.group.n_lanes - 1 - lane : lane;
            g.started[lane] = false;
            g.group.op[lane] = operation::none;
        }
        order_lanes(g);
    }

    memory.begin_threadgroup();
    ++total.threadgroups;

    for (int n_finished = 0; n_finished < n_groups; ) {
        if (s.order == schedule::random) {
            shuffle(order, n_groups, random);
        }
        int n_waiting = 0;
        for (int i = 0; i < n_groups; ++i) {
            group_state & g = *groups[order[i]];
            if (g.at == state::runnable) {
                advance(g);
                n_finished += g.at == state::finished;
            }
            n_waiting += g.at == state::at_barrier;
        }
        if (n_waiting == 0) {
            continue;
        }
        // all simdgroups stand at a barrier, or some have returned
        const group_state & first = *groups[order[0]];
        for (int i = 0; i < n_groups; ++i) {
            group_state & g = *groups[order[i]];
            if (g.group.op[0] != first.group.op[0] || g.group.line[0] != first.group.line[0]) {
                fail("divergent threadgroup barrier: simdgroup %d at %s, line %d; simdgroup %d at %s, line %d",
                        first.group.index, operation_name(first.group.op[0]), first.group.line[0],
                        g.group.index, operation_name(g.group.op[0]), g.group.line[0]);
            }
            g.at = state::runnable;
        }
    }

    memory.end_threadgroup();
    total.write_conflicts = memory.write_conflicts;
    total.overruns        = memory.overruns;
}

// Runs a simdgroup from collective to collective, up to a threadgroup barrier or its end.
void worker::advance(group_state & g) {
    active        = &g;
    current.group = &g.group;
    for (;;) {
        g.place         = -1;
        g.group.n_steps = 0;
        memset(g.group.steps_of_lane, 0, sizeof(g.group.steps_of_lane));
        while (next_lane()) {
            run_lanes();
        }
        memory.end_epoch(current_settings().lockstep);
        check_meeting(g);
        ++g.group.epoch;
        ++total.collectives;
        order_lanes(g);
        if (g.group.op[0] == operation::returned) {
            g.at = state::finished;
            return;
        }
        if (g.group.op[0] == operation::threadgroup_barrier) {
            g.at = state::at_barrier;
            return;
        }
    }
}

// Makes the next lane in the order the current one, and closes the one before.
bool worker::next_lane() {
    group_state & g = *active;
    if (g.place >= 0) {
        memory.end_lane(current_settings().lockstep);
    }
    if (++g.place >= g.group.n_lanes) {
        return false;
    }
    current.lane = g.order[g.place];
    return true;
}

// Goes on with the current lane where it stood. Comes back when a lane meets a collective, or when nothing is left.
void worker::run_lanes() {
    group_state & g    = *active;
    const int     lane = current.lane;
    if (!g.started[lane]) {
        // tops of stacks are spread over the cache's sets, which would else be the same for all
        const size_t spread = n_stacks_used*832%4096;
        fiber_prepare(g.fibers[lane], stack(n_stacks_used), stack_size - spread, lane_entry);
        ++n_stacks_used;
    }
    fiber & to = g.fibers[lane];
    fiber_switch(scheduler, to);
}

// A fiber that has come to the end of its lane takes on lanes that have not begun: without collectives, one fiber
// runs all lanes of a simdgroup.
void worker::lane_entry() {
    worker & w = *this_worker;
    for (;;) {
        group_state & g    = *w.active;
        const int     lane = current.lane;
        g.started[lane] = true;

        lane_position p = w.position;
        const uint32_t thread = g.group.index*lanes_per_simdgroup + lane;
        p.thread_index_in_threadgroup       = thread;
        p.thread_index_in_simdgroup         = lane;
        p.simdgroup_index_in_threadgroup    = g.group.index;
        p.thread_position_in_threadgroup[0] = thread%p.threads_per_threadgroup[0];
        p.thread_position_in_threadgroup[1] = thread/p.threads_per_threadgroup[0]%p.threads_per_threadgroup[1];
        p.thread_position_in_threadgroup[2] = thread/p.threads_per_threadgroup[0]/p.threads_per_threadgroup[1];
        w.work->function->function(w.arguments, p);

        // by now other lanes may have run on other fibers
        group_state & now  = *w.active;
        const int     last = current.lane;
        now.group.op[last]   = operation::returned;
        now.group.line[last] = 0;
        const int next = now.place + 1 < now.group.n_lanes ? now.order[now.place + 1] : -1;
        if (next >= 0 && !now.started[next]) {
            w.next_lane();
        } else {
            fiber ended;
            fiber_switch(ended, w.scheduler);
        }
    }
}

void worker::meet(operation op, int line) {
    simdgroup & group = *current.group;
    const int   lane  = current.lane;
    group.op[lane]   = op;
    group.line[lane] = line;
    fiber_switch(active->fibers[lane], scheduler);
}

void worker::check_meeting(group_state & g) {
    const simdgroup & group = g.group;
    for (int lane = 1; lane < group.n_lanes; ++lane) {
        if (group.op[lane] != group.op[0] || group.line[lane] != group.line[0]) {
            fail("divergent collective: lane 0 at %s, line %d; lane %d at %s, line %d",
                    operation_name(group.op[0]), group.line[0], lane, operation_name(group.op[lane]), group.line[lane]);
        }
        if (group.steps_of_lane[lane] != group.steps_of_lane[0]) {
            const int less = group.steps_of_lane[lane] < group.steps_of_lane[0] ? lane : 0;
            const uniform_step & step = group.steps[group.steps_of_lane[less]];
            fail("divergent collective: lane %d at %s, line %d; lane %d at %s, line %d",
                    lane - less, operation_name(step.op), step.line,
                    less, operation_name(group.op[less]), group.line[less]);
        }
    }
}

void worker::describe(FILE * out) const {
    if (!work) {
        return;
    }
    fprintf(out, "in %s, threadgroup (%u, %u, %u) of (%u, %u, %u)", work->function->name,
            position.threadgroup_position_in_grid[0], position.threadgroup_position_in_grid[1],
            position.threadgroup_position_in_grid[2], work->threadgroups[0], work->threadgroups[1],
            work->threadgroups[2]);
    if (active) {
        fprintf(out, ", simdgroup %d of %d, lane %d", active->group.index, n_groups, current.lane);
    }
    fprintf(out, "\n");
}

} // namespace

void meet(operation op, int line) {
    this_worker->meet(op, line);
}

uniform_step & next_step(operation op, int line, const void * address, uint64_t stride, bool transposed, bool & first) {
    simdgroup & group = *current.group;
    const uint32_t i = group.steps_of_lane[current.lane]++;
    first = i == group.n_steps;
    if (first) {
        if (group.steps.size() <= i) {
            group.steps.resize(std::max<size_t>(64, 2*group.steps.size()));
        }
        ++group.n_steps;
        uniform_step & step = group.steps[i];
        step.op         = op;
        step.line       = line;
        step.address    = address;
        step.stride     = stride;
        step.transposed = transposed;
        return step;
    }
    uniform_step & step = group.steps[i];
    if (step.op != op || step.line != line) {
        fail("divergent collective: lane %d at %s, line %d; others at %s, line %d", current.lane,
                operation_name(op), line, operation_name(step.op), step.line);
    }
    if (step.address != address || step.stride != stride || step.transposed != transposed) {
        fail("%s, line %d: lane %d has other arguments than the lanes before it", operation_name(op), line, current.lane);
    }
    return step;
}

void * threadgroup_variable(const void * key, size_t size) {
    return this_worker->variable(key, size);
}

void publish(void * address, size_t size) {
    this_worker->publish(address, size);
}

void fail(const char * format, ...) {
    fflush(stdout);
    fprintf(stderr, "emulated Metal device: ");
    va_list args;
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    fprintf(stderr, "\n");
    if (this_worker) {
        this_worker->describe(stderr);
    }
    fflush(stderr);
    abort();
}

//
// threads and dispatches
//

namespace {

struct sigaction fault_action_before;
struct sigaction division_action_before;

thread_local uint64_t n_zero_divisions = 0;

void on_division(int number, siginfo_t * info, void * context) {
    (void) info;
    if (this_worker && skip_zero_division(context)) {
        ++n_zero_divisions;
    } else {
        sigaction(number, &division_action_before, nullptr);
    }
}

// Says which kernel ran into a guard page, then lets the fault take its course.
void on_fault(int number, siginfo_t * info, void * context) {
    (void) context;
    if (const char * what = guard_page_at(info->si_addr)) {
        fprintf(stderr, "emulated Metal device: access past %s\n", what);
    } else if (this_worker) {
        fprintf(stderr, "emulated Metal device: access to %p, which is no memory of the device\n", info->si_addr);
    }
    if (this_worker) {
        this_worker->describe(stderr);
    }
    sigaction(number, &fault_action_before, nullptr);
}

// The handler runs on a stack of its own: the fault may be the overflow of a lane's.
void use_fault_stack() {
    static thread_local std::unique_ptr<char[]> memory;
    if (memory) {
        return;
    }
    constexpr size_t size = 64*1024;
    memory.reset(new char[size]);
    stack_t stack = {};
    stack.ss_sp   = memory.get();
    stack.ss_size = size;
    sigaltstack(&stack, nullptr);
}

void catch_faults() {
    static std::once_flag once;
    std::call_once(once, [] {
        struct sigaction action = {};
        action.sa_sigaction = on_fault;
        action.sa_flags     = SA_SIGINFO | SA_ONSTACK;
        sigaction(SIGSEGV, &action, &fault_action_before);
        action.sa_sigaction = on_division;
        sigaction(SIGFPE, &action, &division_action_before);
    });
    use_fault_stack();
}

// Threads that wait for dispatches; the thread that dispatches works along.
class pool {
public:
    explicit pool(int n_threads) {
        for (int i = 1; i < n_threads; ++i) {
            threads.emplace_back([this] { serve(); });
        }
    }

    ~pool() {
        {
            std::lock_guard<std::mutex> lock(mutex);
            stop = true;
        }
        begin_condition.notify_all();
        for (std::thread & thread : threads) {
            thread.join();
        }
    }

    counters run(const dispatch & d) {
        sum   = {};
        work  = &d;
        count = d.threadgroups[0]*d.threadgroups[1]*d.threadgroups[2];
        order = current_settings().order == schedule::ascending ? std::vector<uint32_t>() : order_of(count, 0);
        next.store(0);

        const bool shared = count > 1 && !threads.empty();
        if (shared) {
            std::lock_guard<std::mutex> lock(mutex);
            ++generation;
            n_busy = threads.size();
        }
        if (shared) {
            begin_condition.notify_all();
        }
        work_along();
        if (shared) {
            std::unique_lock<std::mutex> lock(mutex);
            end_condition.wait(lock, [this] { return n_busy == 0; });
        }
        return sum;
    }

private:
    void work_along() {
        static thread_local std::unique_ptr<worker> own;
        if (!own) {
            own.reset(new worker());
        }
        use_fault_stack();
        this_worker = own.get();
        own->begin(*work);
        n_zero_divisions = 0;
        for (uint32_t i = next.fetch_add(1); i < count; i = next.fetch_add(1)) {
            own->run_threadgroup(order.empty() ? i : order[i]);
        }
        this_worker = nullptr;

        std::lock_guard<std::mutex> lock(mutex);
        sum.threadgroups    += own->total.threadgroups;
        sum.collectives     += own->total.collectives;
        sum.write_conflicts += own->total.write_conflicts;
        sum.overruns        += own->total.overruns;
        sum.zero_divisions  += n_zero_divisions;
    }

    void serve() {
        uint64_t seen = 0;
        for (;;) {
            {
                std::unique_lock<std::mutex> lock(mutex);
                begin_condition.wait(lock, [&] { return stop || generation != seen; });
                if (stop) {
                    return;
                }
                seen = generation;
            }
            work_along();
            std::lock_guard<std::mutex> lock(mutex);
            if (--n_busy == 0) {
                end_condition.notify_one();
            }
        }
    }

    std::vector<std::thread> threads;
    std::mutex               mutex;
    std::condition_variable  begin_condition;
    std::condition_variable  end_condition;
    uint64_t                 generation = 0;
    size_t                   n_busy     = 0;
    bool                     stop       = false;

    const dispatch *      work  = nullptr;
    uint32_t              count = 0;
    std::vector<uint32_t> order;
    std::atomic<uint32_t> next { 0 };
    counters              sum = {};
};

} // namespace

// Metal refuses a pipeline that uses a constant without a value. Which ones a kernel uses isn't known here, so those
// without one get a value that no host would set.
static void set_constants(const dispatch & d) {
    for (const function_constant & c : constants()) {
        if (strcmp(c.library, d.function->library) != 0) {
            continue;
        }
        int32_t value = c.kind == constant_kind::boolean ? 1 : c.kind == constant_kind::int16 ? 0x5a5a : 0x5a5a5a5a;
        if (d.constants) {
            for (const constant_value & v : *d.constants) {
                if (v.id == c.id) {
                    value = v.value;
                }
            }
        }
        switch (c.kind) {
            case constant_kind::boolean: *(bool *)    c.address = value != 0; break;
            case constant_kind::int16:   *(int16_t *) c.address = value;      break;
            case constant_kind::int32:   *(int32_t *) c.address = value;      break;
        }
    }
}

counters run(const dispatch & d) {
    // function constants are variables of the kernel's file, so dispatches run one after another
    static std::mutex mutex;
    std::lock_guard<std::mutex> lock(mutex);

    for (int i = 0; i < 3; ++i) {
        if (d.threads[i] == 0) {
            fail("%s: a dispatch without threads", d.function->name);
        }
        if (d.threadgroups[i] == 0) {
            return {}; // the host does so for tensors without rows, and Metal has nothing to do
        }
    }
    const uint64_t n_threads = (uint64_t) d.threads[0]*d.threads[1]*d.threads[2];
    if (n_threads > lanes_per_simdgroup*max_simdgroups) {
        fail("%s: %llu threads in a threadgroup", d.function->name, (unsigned long long) n_threads);
    }
    if ((uint64_t) d.threadgroups[0]*d.threadgroups[1]*d.threadgroups[2] >= UINT32_MAX) {
        fail("%s: too many threadgroups", d.function->name);
    }
    for (int i = 0; i < max_threadgroup_arguments; ++i) {
        if ((d.function->threadgroup_arguments >> i & 1) && d.threadgroup_memory[i] == 0) {
            fail("%s: the host set no size for threadgroup memory %d", d.function->name, i);
        }
    }
    set_constants(d);
    catch_faults();

    static pool workers(current_settings().n_threads);
    return workers.run(d);
}

} // namespace emulator
