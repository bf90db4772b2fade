// SPDX-License-Identifier: MIT
//
// Atomics, which Metal has in relaxed order only. In device memory other threads may meet them; in threadgroup memory
// they are seen by all lanes at once, unlike a lane's other writes.

#pragma once

namespace metal {

enum memory_order { memory_order_relaxed };

template<typename T> struct atomic { T value; };

typedef atomic<int>  atomic_int;
typedef atomic<uint> atomic_uint;

// no templates, so that a kernel's argument in threadgroup memory converts
#define MSL_ATOMIC_UPDATE(T, name, builtin) \
    inline T atomic_##name##_explicit(volatile atomic<T> * a, T v, memory_order) { \
        const T before = builtin(&a->value, v, __ATOMIC_RELAXED); \
        emulator::publish((void *) a, sizeof(*a)); \
        return before; \
    }

#define MSL_ATOMICS(T) \
    inline T atomic_load_explicit(const volatile atomic<T> * a, memory_order) { \
        return __atomic_load_n(&a->value, __ATOMIC_RELAXED); \
    } \
    inline void atomic_store_explicit(volatile atomic<T> * a, T v, memory_order) { \
        __atomic_store_n(&a->value, v, __ATOMIC_RELAXED); \
        emulator::publish((void *) a, sizeof(*a)); \
    } \
    MSL_ATOMIC_UPDATE(T, exchange,  __atomic_exchange_n) \
    MSL_ATOMIC_UPDATE(T, fetch_add, __atomic_fetch_add) \
    MSL_ATOMIC_UPDATE(T, fetch_sub, __atomic_fetch_sub) \
    MSL_ATOMIC_UPDATE(T, fetch_and, __atomic_fetch_and) \
    MSL_ATOMIC_UPDATE(T, fetch_or,  __atomic_fetch_or) \
    MSL_ATOMIC_UPDATE(T, fetch_xor, __atomic_fetch_xor) \
    MSL_ATOMIC_UPDATE(T, fetch_max, __atomic_fetch_max) \
    MSL_ATOMIC_UPDATE(T, fetch_min, __atomic_fetch_min)

MSL_ATOMICS(int)
MSL_ATOMICS(uint)

#undef MSL_ATOMICS
#undef MSL_ATOMIC_UPDATE

} // namespace metal
