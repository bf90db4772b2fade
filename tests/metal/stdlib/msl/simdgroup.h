// SPDX-License-Identifier: MIT
//
// Functions of a whole simdgroup. Each lane hands in a value; when all have met, each reads what it needs.
// The line that a call stands on tells one collective from another.

#pragma once

#define MSL_LINE int line = __builtin_LINE()

namespace metal {

enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };

inline mem_flags operator|(mem_flags a, mem_flags b) { return (mem_flags) ((int) a | (int) b); }

} // namespace metal

namespace msl {

using emulator::operation;

template<typename T> using slots = const unsigned char (*)[emulator::simdgroup::slot_size];

template<typename T> inline T value_of(slots<T> all, int lane) {
    T value;
    __builtin_memcpy(&value, all[lane], sizeof(T));
    return value;
}

// A value from a lane that isn't there: nothing that anybody may rely on.
template<typename T> inline T no_value() {
    T value;
    __builtin_memset(&value, 0xff, sizeof(T));
    return value;
}

template<typename T> inline slots<T> exchange(const T & value, operation op, int line) {
    static_assert(sizeof(T) <= emulator::simdgroup::slot_size, "too large to exchange");
    emulator::simdgroup & group = *emulator::current.group;
    auto & all = group.slots[group.epoch & 1];
    __builtin_memcpy(all[emulator::current.lane], &value, sizeof(T));
    emulator::meet(op, line);
    return all;
}

// Pairwise, as a GPU would: the rounding doesn't depend on the order in which lanes run.
template<typename T, typename Combine> inline T reduce(const T & value, operation op, int line, Combine combine) {
    const auto all = exchange(value, op, line);
    emulator::simdgroup & group = *emulator::current.group;
    T result;
    if (group.shared_result_epoch != group.epoch) {
        T values[emulator::lanes_per_simdgroup];
        for (int i = 0; i < group.n_lanes; ++i) {
            values[i] = value_of<T>(all, i);
        }
        for (int width = emulator::lanes_per_simdgroup/2; width > 0; width /= 2) {
            for (int i = 0; i < width && i + width < group.n_lanes; ++i) {
                values[i] = combine(values[i], values[i + width]);
            }
        }
        result = values[0];
        __builtin_memcpy(group.shared_result, &result, sizeof(T));
        group.shared_result_epoch = group.epoch;
    } else {
        __builtin_memcpy(&result, group.shared_result, sizeof(T));
    }
    return result;
}

template<typename T> inline T from_lane(slots<T> all, int lane) {
    return lane < emulator::current.group->n_lanes ? value_of<T>(all, lane) : no_value<T>();
}

} // namespace msl

namespace metal {

using msl::operation;

template<typename T> inline T simd_sum(T v, MSL_LINE) {
    return msl::reduce(v, operation::simd_sum, line, [](T a, T b) { return (T) (a + b); });
}
template<typename T> inline T simd_product(T v, MSL_LINE) {
    return msl::reduce(v, operation::simd_product, line, [](T a, T b) { return (T) (a*b); });
}
template<typename T> inline T simd_max(T v, MSL_LINE) {
    return msl::reduce(v, operation::simd_max, line, [](T a, T b) { return max(a, b); });
}
template<typename T> inline T simd_min(T v, MSL_LINE) {
    return msl::reduce(v, operation::simd_min, line, [](T a, T b) { return min(a, b); });
}
template<typename T> inline T simd_and(T v, MSL_LINE) {
    return msl::reduce(v, operation::simd_and, line, [](T a, T b) { return (T) (a & b); });
}
template<typename T> inline T simd_or(T v, MSL_LINE) {
    return msl::reduce(v, operation::simd_or, line, [](T a, T b) { return (T) (a | b); });
}
template<typename T> inline T simd_xor(T v, MSL_LINE) {
    return msl::reduce(v, operation::simd_xor, line, [](T a, T b) { return (T) (a ^ b); });
}
inline bool simd_any(bool v, MSL_LINE) {
    return msl::reduce(v, operation::simd_or, line, [](bool a, bool b) { return a || b; });
}
inline bool simd_all(bool v, MSL_LINE) {
    return msl::reduce(v, operation::simd_and, line, [](bool a, bool b) { return a && b; });
}

template<typename T> inline T simd_prefix_inclusive_sum(T v, MSL_LINE) {
    const auto all = msl::exchange(v, operation::simd_prefix_inclusive_sum, line);
    T sum = msl::value_of<T>(all, 0);
    for (int i = 1; i <= emulator::current.lane; ++i) {
        sum = (T) (sum + msl::value_of<T>(all, i));
    }
    return sum;
}
template<typename T> inline T simd_prefix_exclusive_sum(T v, MSL_LINE) {
    const auto all = msl::exchange(v, operation::simd_prefix_exclusive_sum, line);
    T sum = (T) 0;
    for (int i = 0; i < emulator::current.lane; ++i) {
        sum = (T) (sum + msl::value_of<T>(all, i));
    }
    return sum;
}

template<typename T> inline T simd_shuffle(T v, ushort lane, MSL_LINE) {
    const auto all = msl::exchange(v, operation::simd_shuffle, line);
    return msl::from_lane<T>(all, lane);
}
template<typename T> inline T simd_shuffle_xor(T v, ushort mask, MSL_LINE) {
    const auto all = msl::exchange(v, operation::simd_shuffle_xor, line);
    return msl::from_lane<T>(all, emulator::current.lane ^ mask);
}
// lanes that would read past the end keep their own value
template<typename T> inline T simd_shuffle_down(T v, ushort delta, MSL_LINE) {
    const auto all = msl::exchange(v, operation::simd_shuffle_down, line);
    const int from = emulator::current.lane + delta;
    return from < emulator::lanes_per_simdgroup ? msl::from_lane<T>(all, from) : v;
}
template<typename T> inline T simd_shuffle_up(T v, ushort delta, MSL_LINE) {
    const auto all = msl::exchange(v, operation::simd_shuffle_up, line);
    const int from = emulator::current.lane - delta;
    return from >= 0 ? msl::from_lane<T>(all, from) : v;
}
template<typename T> inline T simd_shuffle_rotate_down(T v, ushort delta, MSL_LINE) {
    const auto all = msl::exchange(v, operation::simd_shuffle_rotate, line);
    return msl::from_lane<T>(all, (emulator::current.lane + delta)%emulator::lanes_per_simdgroup);
}
template<typename T> inline T simd_shuffle_rotate_up(T v, ushort delta, MSL_LINE) {
    const auto all = msl::exchange(v, operation::simd_shuffle_rotate, line);
    return msl::from_lane<T>(all, (emulator::current.lane - delta)%emulator::lanes_per_simdgroup & 31);
}
template<typename T> inline T simd_broadcast(T v, ushort lane, MSL_LINE) {
    const auto all = msl::exchange(v, operation::simd_broadcast, line);
    return msl::from_lane<T>(all, lane);
}
template<typename T> inline T simd_broadcast_first(T v, MSL_LINE) {
    const auto all = msl::exchange(v, operation::simd_broadcast, line);
    return msl::from_lane<T>(all, 0);
}

struct simd_vote {
    typedef uint64_t vote_t;
    vote_t bits;
    explicit simd_vote(vote_t v = 0) : bits(v) {}
    explicit operator vote_t() const { return bits; }
    bool any() const { return bits != 0; }
    bool all() const { return bits == 0xffffffffu; }
};
inline simd_vote simd_ballot(bool v, MSL_LINE) {
    const uint64_t bit = (uint64_t) v << emulator::current.lane;
    return simd_vote(msl::reduce(bit, operation::simd_ballot, line, [](uint64_t a, uint64_t b) { return a | b; }));
}

// A barrier for execution alone makes no write visible, so lanes needn't meet for it; that all of them come to it is
// checked at the next collective.
inline void simdgroup_barrier(mem_flags flags, MSL_LINE) {
    if (flags == mem_flags::mem_none) {
        bool first;
        emulator::next_step(operation::execution_barrier, line, nullptr, 0, false, first);
    } else {
        emulator::meet(operation::simdgroup_barrier, line);
    }
}
inline void threadgroup_barrier(mem_flags, MSL_LINE) {
    emulator::meet(operation::threadgroup_barrier, line);
}

} // namespace metal
