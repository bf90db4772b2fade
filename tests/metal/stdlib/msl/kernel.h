// SPDX-License-Identifier: MIT
//
// How a kernel's parameters are bound, and how kernels, function constants and variables in threadgroup memory are
// made known. The macros are what prepare.py writes.

#pragma once

#ifndef MSL_LIBRARY
#error "MSL_LIBRARY: name of the .metal file"
#endif

namespace msl {

//
// parameters that Metal fills in
//

enum attribute {
    attribute_simdgroup_index_in_threadgroup,
    attribute_simdgroups_per_threadgroup,
    attribute_thread_index_in_simdgroup,
    attribute_thread_index_in_threadgroup,
    attribute_thread_position_in_grid,
    attribute_thread_position_in_threadgroup,
    attribute_threadgroup_position_in_grid,
    attribute_threadgroups_per_grid,
    attribute_threads_per_grid,
    attribute_threads_per_simdgroup,
    attribute_threads_per_threadgroup,
};

// coordinate `axis` of a value; those of one dimension have only the first
inline uint coordinate(const emulator::lane_position & p, attribute a, int axis) {
    switch (a) {
        case attribute_simdgroup_index_in_threadgroup: return axis == 0 ? p.simdgroup_index_in_threadgroup : 0;
        case attribute_simdgroups_per_threadgroup:     return axis == 0 ? p.simdgroups_per_threadgroup : 1;
        case attribute_thread_index_in_simdgroup:      return axis == 0 ? p.thread_index_in_simdgroup : 0;
        case attribute_thread_index_in_threadgroup:    return axis == 0 ? p.thread_index_in_threadgroup : 0;
        case attribute_thread_position_in_grid:
            return p.threadgroup_position_in_grid[axis]*p.threads_per_threadgroup[axis] + p.thread_position_in_threadgroup[axis];
        case attribute_thread_position_in_threadgroup: return p.thread_position_in_threadgroup[axis];
        case attribute_threadgroup_position_in_grid:   return p.threadgroup_position_in_grid[axis];
        case attribute_threadgroups_per_grid:          return p.threadgroups_per_grid[axis];
        case attribute_threads_per_grid:               return p.threadgroups_per_grid[axis]*p.threads_per_threadgroup[axis];
        case attribute_threads_per_simdgroup:          return axis == 0 ? emulator::lanes_per_simdgroup : 1;
        case attribute_threads_per_threadgroup:        return p.threads_per_threadgroup[axis];
    }
    return 0;
}

template<typename T, attribute A> struct built_in {
    T value;
    explicit built_in(const emulator::lane_position & p) : value((T) coordinate(p, A, 0)) {}
    operator T() const { return value; }
};

template<typename T, int N, attribute A> struct built_in<metal::vec<T, N>, A> : metal::vec<T, N> {
    explicit built_in(const emulator::lane_position & p) {
        for (int i = 0; i < N; ++i) {
            this->e[i] = (T) coordinate(p, A, i);
        }
    }
};

template<typename T, int Index> struct threadgroup_argument {
    T * pointer;
    explicit threadgroup_argument(const emulator::kernel_arguments & a) : pointer((T *) a.threadgroup_memory[Index]) {}
    operator T *() const { return pointer; }
    template<typename U> explicit operator U *() const { return (U *) pointer; }
};

//
// binding: references and pointers take the buffers in order
//

template<typename P> struct parameter {
    static_assert(sizeof(P) == 0, "a parameter of a kernel that isn't known here");
};

template<typename T> struct parameter<T &> {
    static constexpr bool     is_buffer    = true;
    static constexpr uint32_t threadgroups = 0;
    static T & get(const emulator::kernel_arguments & a, const emulator::lane_position &, int index) { return *(T *) a.buffers[index]; }
};
template<typename T> struct parameter<T *> {
    static constexpr bool     is_buffer    = true;
    static constexpr uint32_t threadgroups = 0;
    static T * get(const emulator::kernel_arguments & a, const emulator::lane_position &, int index) { return (T *) a.buffers[index]; }
};
template<typename T, attribute A> struct parameter<built_in<T, A>> {
    static constexpr bool     is_buffer    = false;
    static constexpr uint32_t threadgroups = 0;
    static built_in<T, A> get(const emulator::kernel_arguments &, const emulator::lane_position & p, int) { return built_in<T, A>(p); }
};
template<typename T, int Index> struct parameter<threadgroup_argument<T, Index>> {
    static_assert(Index < emulator::max_threadgroup_arguments, "too many arguments in threadgroup memory");
    static constexpr bool     is_buffer    = false;
    static constexpr uint32_t threadgroups = 1u << Index;
    static threadgroup_argument<T, Index> get(const emulator::kernel_arguments & a, const emulator::lane_position &, int) {
        return threadgroup_argument<T, Index>(a);
    }
};

template<typename I, I... Is> struct indices {};

template<typename F> struct signature;

template<typename... P> struct signature<void (*)(P...)> {
    static constexpr int      n_buffers    = (0 + ... + (int) parameter<P>::is_buffer);
    static constexpr uint32_t threadgroups = (0u | ... | parameter<P>::threadgroups);

    static constexpr int buffers_before(int n) {
        constexpr bool is_buffer[] = { parameter<P>::is_buffer... };
        int count = 0;
        for (int i = 0; i < n; ++i) {
            count += is_buffer[i];
        }
        return count;
    }

    template<void (*F)(P...), int... Is>
    static void call(const emulator::kernel_arguments & a, const emulator::lane_position & p, indices<int, Is...>) {
        F(parameter<P>::get(a, p, buffers_before(Is))...);
    }

    template<void (*F)(P...)>
    static void run(const emulator::kernel_arguments & a, const emulator::lane_position & p) {
        call<F>(a, p, __make_integer_seq<indices, int, sizeof...(P)>());
    }
};

template<auto F> emulator::kernel_entry make_kernel(const char * name) {
    typedef signature<decltype(F)> s;
    return { name, MSL_LIBRARY, &s::template run<F>, s::n_buffers, s::threadgroups };
}

//
// function constants
//

template<typename T> struct constant_type;
template<> struct constant_type<bool>    { static constexpr emulator::constant_kind kind = emulator::constant_kind::boolean; };
template<> struct constant_type<int16_t> { static constexpr emulator::constant_kind kind = emulator::constant_kind::int16;   };
template<> struct constant_type<int32_t> { static constexpr emulator::constant_kind kind = emulator::constant_kind::int32;   };

} // namespace msl

#define MSL_PASTE_(a, b) a##b
#define MSL_PASTE(a, b)  MSL_PASTE_(a, b)

#define MSL_REGISTER_KERNEL(name, ...) \
    static const emulator::kernel_registration MSL_PASTE(msl_kernel_, __COUNTER__)(msl::make_kernel<(__VA_ARGS__)>(name))

#define MSL_FUNCTION_CONSTANT(type, name, id) \
    static type name; \
    static const emulator::function_constant_registration MSL_PASTE(msl_constant_, name)( \
            emulator::function_constant { #name, MSL_LIBRARY, id, msl::constant_type<type>::kind, &name })

#define MSL_THREADGROUP_VARIABLE(type, name, dimensions) \
    static const char MSL_PASTE(name, _key) = 0; \
    typedef type MSL_PASTE(name, _type) dimensions; \
    MSL_PASTE(name, _type) & name = *(MSL_PASTE(name, _type) *) \
            emulator::threadgroup_variable(&MSL_PASTE(name, _key), sizeof(MSL_PASTE(name, _type)))
