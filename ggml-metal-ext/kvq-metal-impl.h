// SPDX-License-Identifier: MIT
//
// What our Metal kernels and their host code share. Macros alone: Metal's compiler and C++ both read this file.
// The kernels take upstream's argument structs (ggml-metal-impl.h).

#ifndef KVQ_METAL_IMPL_H
#define KVQ_METAL_IMPL_H

// Function constants, all int32. A pipeline is compiled for one type or one pair, the code of all others vanishes.
// Upstream's blocks are multiples of 100, from 100 up; this one is far above.
#define FC_KVQ 9000

#define FC_KVQ_TYPE_K (FC_KVQ + 0) // ggml type of K, or of the one quantized side
#define FC_KVQ_TYPE_V (FC_KVQ + 1) // ggml type of V
#define FC_KVQ_N_FWHT (FC_KVQ + 2) // values of a Hadamard transform: 64, 128 or 256

#define FC_KVQ_REDUCE_DV     (FC_KVQ + 3) // head size of V
#define FC_KVQ_REDUCE_KV     (FC_KVQ + 4) // KV heads
#define FC_KVQ_REDUCE_SHARED (FC_KVQ + 5) // query heads of a KV head

// enum ggml_type, as far as a cache can have it; the host asserts that they agree
#define KVQ_METAL_TYPE_F32      0
#define KVQ_METAL_TYPE_F16      1
#define KVQ_METAL_TYPE_Q4_0     2
#define KVQ_METAL_TYPE_Q4_1     3
#define KVQ_METAL_TYPE_Q5_0     6
#define KVQ_METAL_TYPE_Q5_1     7
#define KVQ_METAL_TYPE_Q8_0     8
#define KVQ_METAL_TYPE_IQ4_NL  20
#define KVQ_METAL_TYPE_BF16    30
#define KVQ_METAL_TYPE_KVQ2   450
#define KVQ_METAL_TYPE_KVQ3   451
#define KVQ_METAL_TYPE_KVQ4   452
#define KVQ_METAL_TYPE_KVQ5   453
#define KVQ_METAL_TYPE_KVQ6   454

#define KVQ_METAL_QK         32 // values of a block, of every quantized type here
#define KVQ_METAL_NSG         4 // simdgroups of a threadgroup where one simdgroup encodes one block
#define KVQ_METAL_N_PER_GET  16 // values that a thread decodes in GET_ROWS and in copies
#define KVQ_METAL_N_PER_F16   8 // values that a thread converts in kernel_kvq_kv_f16: divides every head size

#endif
