// SPDX-License-Identifier: MIT
//
// Kernels of test-metal-emulator.cpp: each does one thing whose result is plain to compute otherwise.

#include <metal_stdlib>

using namespace metal;

constant int32_t FC_test_int   [[function_constant(9900)]];
constant bool    FC_test_bool  [[function_constant(9901)]];
constant int16_t FC_test_short [[function_constant(9902)]];

struct test_args {
    int32_t n;
    int32_t other;
};

//
// binding
//

kernel void test_positions(
        constant test_args & args,
        device uint * dst,
        device uint * constants [[buffer(2)]],
        uint3   tgpig[[threadgroup_position_in_grid]],
        uint3   tpig[[thread_position_in_grid]],
        ushort3 tpitg[[thread_position_in_threadgroup]],
        uint3   ntg[[threads_per_threadgroup]],
        uint3   tgpg[[threadgroups_per_grid]],
        ushort  tiitg[[thread_index_in_threadgroup]],
        ushort  tiisg[[thread_index_in_simdgroup]],
        ushort  sgitg[[simdgroup_index_in_threadgroup]],
        uint    nsg[[simdgroups_per_threadgroup]]) {
    const uint threadgroup_index = tgpig.x + tgpg.x*(tgpig.y + tgpg.y*tgpig.z);
    device uint * p = dst + (threadgroup_index*ntg.x*ntg.y*ntg.z + tiitg)*args.n;
    p[0] = tgpig[0]; p[1] = tgpig[1]; p[2] = tgpig[2];
    p[3] = tpig.x;   p[4] = tpig.y;   p[5] = tpig.z;
    p[6] = tpitg.x;  p[7] = tpitg.y;  p[8] = tpitg.z;
    p[9] = tiitg; p[10] = tiisg; p[11] = sgitg; p[12] = nsg;
    constants[0] = FC_test_int;
    constants[1] = FC_test_bool ? 1 : 0;
    constants[2] = FC_test_short;
    constants[3] = args.other;
}

//
// collectives
//

template<typename T>
kernel void test_collectives(
        device const T * src,
        device       T * dst,
        constant test_args & args,
        ushort tiisg[[thread_index_in_simdgroup]],
        ushort tiitg[[thread_index_in_threadgroup]]) {
    const T v = src[tiitg];
    device T * p = dst + 16*tiitg;
    p[0]  = simd_sum(v);
    p[1]  = simd_max(v);
    p[2]  = simd_min(v);
    p[3]  = simd_prefix_inclusive_sum(v);
    p[4]  = simd_prefix_exclusive_sum(v);
    p[5]  = simd_shuffle(v, (tiisg*5 + 3)%32);
    p[6]  = simd_shuffle_down(v, args.n);
    p[7]  = simd_shuffle_up(v, args.n);
    p[8]  = simd_shuffle_xor(v, args.other);
    p[9]  = simd_broadcast(v, args.n);
    p[10] = simd_broadcast_first(v);
    p[11] = simd_product((T) (tiisg < 5 ? v : (T) 1));
}

typedef decltype(test_collectives<float>) test_collectives_t;

template [[host_name("test_collectives_f32")]] kernel test_collectives_t test_collectives<float>;
template [[host_name("test_collectives_f16")]] kernel test_collectives_t test_collectives<half>;
template [[host_name("test_collectives_i32")]] kernel test_collectives_t test_collectives<int>;

kernel void test_bits(
        device const uint * src,
        device       uint * dst,
        ushort tiisg[[thread_index_in_simdgroup]]) {
    const uint v = src[tiisg];
    device uint * p = dst + 8*tiisg;
    p[0] = simd_and(v);
    p[1] = simd_or(v);
    p[2] = simd_xor(v);
    p[3] = (uint) (simd_vote::vote_t) simd_ballot((v & 1) != 0);
    p[4] = simd_any(v == 0);
    p[5] = simd_all(v != 0);
    p[6] = popcount(v);
    p[7] = clz(v) + 100*ctz(v);
}

//
// matrices
//

template<typename T, typename M>
kernel void test_matrices(
        device const T * src,
        device       T * dst,
        threadgroup  T * shared [[threadgroup(0)]],
        ushort tiisg[[thread_index_in_simdgroup]]) {
    M a, b, c, bt;
    simdgroup_load(a, src, 16);
    simdgroup_load(b, src + 8, 16);
    simdgroup_load(bt, src + 8, 16, 0, true);
    c = make_filled_simdgroup_matrix<T, 8>((T) 0.5f);
    simdgroup_multiply_accumulate(c, a, b, c);
    simdgroup_store(c, dst);
    simdgroup_multiply(c, a, bt);
    simdgroup_store(c, dst + 64);
    simdgroup_store(a, dst + 128, 8, 0, true);

    // what is stored in threadgroup memory is there after a barrier
    simdgroup_store(c, shared, 8);
    simdgroup_barrier(mem_flags::mem_threadgroup);
    for (int i = tiisg; i < 64; i += 32) {
        dst[192 + i] = shared[i];
    }
}

typedef decltype(test_matrices<float, simdgroup_float8x8>) test_matrices_f32_t;
typedef decltype(test_matrices<half,  simdgroup_half8x8>)  test_matrices_f16_t;

template [[host_name("test_matrices_f32")]] kernel test_matrices_f32_t test_matrices<float, simdgroup_float8x8>;
template [[host_name("test_matrices_f16")]] kernel test_matrices_f16_t test_matrices<half,  simdgroup_half8x8>;

//
// types
//

kernel void test_conversions(
        device const float * src,
        device       uint  * dst,
        constant test_args & args,
        uint i[[thread_position_in_grid]]) {
    if (i >= (uint) args.n) {
        return;
    }
    const float x = src[i];
    const half   h = (half) x;
    const bfloat b = (bfloat) x;
    dst[4*i + 0] = as_type<ushort>(h);
    dst[4*i + 1] = as_type<ushort>(b);
    dst[4*i + 2] = as_type<uint>((float) h);
    dst[4*i + 3] = as_type<uint>((float) b);
}

// each operation on halves rounds
kernel void test_half_rounding(device half * dst) {
    half a = 2048.0h;
    half b = 1.0h;
    dst[0] = a + b + b;     // 2048: each sum is rounded back
    dst[1] = a + (b + b);   // 2050
    dst[2] = (half) ((float) a + 1.0f + 1.0f);
    dst[3] = (half) 0.1f*(half) 3.0f;
}

// a literal without suffix is a float: 1 + 2^-30 is 1
kernel void test_literals(device float * dst, device const float * one) {
    dst[0] = (one[0] + 0.000000000931322574615478515625) - one[0];
    dst[1] = sizeof(0.5);
}

kernel void test_vectors(device const float * src, device float * dst) {
    const float4 a(src[0], src[1], src[2], src[3]);
    const float4 b = *(device const float4 *) (src + 4);
    const float4 sum = a + 2.0f*b - a/b;
    const half4  h = (half4) sum;
    const float4 back = float4(h);
    const char4  c = *(device const char4 *) src;
    const packed_char4 pc = *(device const packed_char4 *) ((device const char *) src + 1);
    const int4   i = int4(4)*int4(1, 2, 3, 4) + int4(c);
    for (short k = 0; k < 4; ++k) {
        dst[k]      = sum[k];
        dst[4 + k]  = back[k];
        dst[8 + k]  = i[k];
        dst[12 + k] = max(a, b)[k];
        dst[16 + k] = clamp(a, 0.0f, 1.0f)[k];
        dst[20 + k] = select(a, b, a < b)[k];
        dst[24 + k] = char4(pc)[k];
    }
    dst[28] = dot(a, b);
    float4x4 m;
    for (short k = 0; k < 4; ++k) {
        m[k] = a*(float) (k + 1);
    }
    const half4x4 hm = (half4x4) m;
    dst[29] = hm[2][1];
    dst[30] = a.x + a.y*10 + a.z*100 + a.w*1000;
    dst[31] = any(a < b) + 2*all(a < b);
}

//
// threadgroup memory
//

// A lane reads what its neighbour writes: before a collective the old value, after it the new one.
kernel void test_lockstep(
        device float * dst,
        threadgroup float * shared [[threadgroup(0)]],
        ushort tiisg[[thread_index_in_simdgroup]]) {
    shared[tiisg] = -1.0f;
    simdgroup_barrier(mem_flags::mem_threadgroup);
    shared[tiisg] = tiisg;
    dst[4*tiisg + 0] = shared[tiisg];
    dst[4*tiisg + 1] = shared[(tiisg + 1)%32];
    simdgroup_barrier(mem_flags::mem_none);
    dst[4*tiisg + 2] = shared[(tiisg + 31)%32];
    const float unused = simd_sum(1.0f);
    dst[4*tiisg + 3] = shared[(tiisg + 1)%32]*unused/32.0f;
}

// bytes that two lanes share a word of
kernel void test_bytes(
        device uchar * dst,
        threadgroup uchar * shared [[threadgroup(0)]],
        ushort tiisg[[thread_index_in_simdgroup]]) {
    shared[tiisg] = tiisg + 1;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    dst[tiisg] = shared[31 - tiisg];
}

kernel void test_poison(
        device uint * dst,
        threadgroup uint * shared [[threadgroup(0)]],
        uint   tgpig[[threadgroup_position_in_grid]],
        ushort tiitg[[thread_index_in_threadgroup]]) {
    threadgroup uint own[32];
    dst[2*(32*tgpig + tiitg) + 0] = shared[tiitg];
    dst[2*(32*tgpig + tiitg) + 1] = own[tiitg];
    shared[tiitg] = tiitg;
    own[tiitg]    = tiitg;
}

kernel void test_own_variables(
        device uint * dst,
        uint   tgpig[[threadgroup_position_in_grid]],
        ushort tiitg[[thread_index_in_threadgroup]],
        ushort ntg[[threads_per_threadgroup]]) {
    threadgroup uint a[64];
    threadgroup ushort b[2][32];
    threadgroup uint count;
    a[tiitg] = tiitg*3;
    b[tiitg/32][tiitg%32] = tiitg*5;
    if (tiitg == 0) {
        count = ntg;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const ushort other = 63 - tiitg;
    dst[64*tgpig + tiitg] = a[other] + b[other/32][other%32] + count;
}

kernel void test_atomics(
        device atomic_int * total,
        threadgroup atomic_int * shared [[threadgroup(0)]],
        device int * dst,
        uint   tgpig[[threadgroup_position_in_grid]],
        ushort tiitg[[thread_index_in_threadgroup]]) {
    if (tiitg == 0) {
        atomic_store_explicit(shared, 0, memory_order_relaxed);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    atomic_fetch_add_explicit(shared, (int) tiitg, memory_order_relaxed);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (tiitg == 0) {
        dst[tgpig] = atomic_load_explicit(shared, memory_order_relaxed);
        atomic_fetch_add_explicit(total, dst[tgpig], memory_order_relaxed);
    }
}

// Sums over a threadgroup through a tree in threadgroup memory, with barriers.
kernel void test_tree(
        device const float * src,
        device       float * dst,
        threadgroup  float * shared [[threadgroup(0)]],
        uint   tgpig[[threadgroup_position_in_grid]],
        ushort tiitg[[thread_index_in_threadgroup]],
        ushort ntg[[threads_per_threadgroup]]) {
    shared[tiitg] = src[ntg*tgpig + tiitg];
    for (ushort n = ntg/2; n > 0; n /= 2) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (tiitg < n) {
            shared[tiitg] += shared[tiitg + n];
        }
    }
    if (tiitg == 0) {
        dst[tgpig] = shared[0];
    }
}

kernel void test_zero_division(device int * dst, constant test_args & args) {
    dst[0] = 7 + 0*(dst[1]/args.n);
    dst[2] = 8 + 0*(int) ((uint) dst[3]%(uint) args.n);
}

//
// faults
//

kernel void test_divergent_operation(device float * dst, ushort tiisg[[thread_index_in_simdgroup]]) {
    if (tiisg < 16) {
        dst[tiisg] = simd_sum(1.0f);
    } else {
        dst[tiisg] = simd_max(1.0f);
    }
}

kernel void test_divergent_return(device float * dst, ushort tiisg[[thread_index_in_simdgroup]]) {
    if (tiisg == 7) {
        return;
    }
    dst[tiisg] = simd_sum(1.0f);
}

kernel void test_divergent_barrier(device float * dst, ushort sgitg[[simdgroup_index_in_threadgroup]]) {
    if (sgitg == 0) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    dst[0] = 1.0f;
}

kernel void test_divergent_matrix(
        device float * dst,
        ushort tiisg[[thread_index_in_simdgroup]]) {
    simdgroup_float8x8 a = make_filled_simdgroup_matrix<float, 8>(1.0f);
    if (tiisg != 5) {
        simdgroup_multiply_accumulate(a, a, a, a);
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
    simdgroup_store(a, dst);
}

kernel void test_lane_pointer(device float * dst, ushort tiisg[[thread_index_in_simdgroup]]) {
    simdgroup_float8x8 a;
    simdgroup_load(a, dst + tiisg);
    simdgroup_store(a, dst);
}

kernel void test_overrun_buffer(device float * dst, constant test_args & args) {
    dst[args.n] = 1.0f;
}

kernel void test_overrun_threadgroup(
        device float * dst,
        threadgroup float * shared [[threadgroup(0)]],
        constant test_args & args) {
    shared[args.n] = 1.0f;
    dst[0] = shared[0];
}
