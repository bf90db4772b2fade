// SPDX-License-Identifier: MIT
//
// The host side of our Metal kernels: which nodes they compute, and how they are dispatched.
// Upstream's backend calls these functions at its own decisions (patches of groups 03 and 04); the rest of a dispatch stays its own.
//
// Two kinds of nodes are ours:
// - attention over a K/V pair that upstream's kernels lack: unequal types, iq4_nl, kvq2 to kvq6;
// - SET_ROWS, GET_ROWS and copies of kvq2 to kvq6, and copies from iq4_nl.
// Everything else about these types is refused.

#pragma once

#include "ggml-metal-device.h"

// Our kernel files, in the form of upstream's GGML_METAL_LIBS; kernels.cmake has the same list.
#define KVQ_METAL_LIBS         \
    X(KVQ_FA_VEC, kvq_fa_vec)  \
    X(KVQ_ROWS,   kvq_rows)

#ifdef __cplusplus
extern "C" {
#endif

// op is one of our nodes, whether or not a kernel can compute it
bool kvq_metal_is_ours(const struct ggml_tensor * op);

// a kernel of ours computes op; only for our nodes
bool kvq_metal_supports_op(const struct ggml_tensor * op, bool has_simdgroup_mm);

// there are kernels for these head sizes of K and V (upstream's and ours are the same)
bool kvq_metal_fa_head_sizes(int64_t dk, int64_t dv);

#ifdef __cplusplus
}

#include "ggml-metal-fusion.h"
#include "ggml-metal-impl.h"
#include "ggml-metal-tuning.h"

// op is attention over a pair that is ours
bool kvq_metal_fa(const struct ggml_tensor * op);

// Few queries, and any number if K or V may hold more than f16 does: decode kernels read the cache as it is, and compute in float.
// Else K and V are converted to f16 first, each by its own type, and upstream's f16 kernels do the rest.
bool kvq_metal_fa_use_kv_f16(const struct ggml_tensor * op);

// bytes of the f16 copy of K (i = 1) or V (i = 2); 0 if none is ever made
size_t kvq_metal_fa_kv_f16_size(const struct ggml_tensor * op, int i);

// the most bytes from one row to the next in what attention reads as K (i = 1) or V (i = 2), converted or not
uint64_t kvq_metal_fa_pad_stride(const struct ggml_tensor * op, int i);

// Encodes the conversions to bid_kv_f16, K first. Sets the buffer and the strides in bytes of what was converted.
void kvq_metal_fa_to_f16(
        ggml_metal_library_t lib, ggml_metal_encoder_t enc, const struct ggml_tensor * op, struct ggml_metal_buffer_id bid_kv_f16,
        struct ggml_metal_buffer_id & bid_k, struct ggml_metal_buffer_id & bid_v,
        uint64_t & nb10, uint64_t & nb11, uint64_t & nb12, uint64_t & nb13,
        uint64_t & nb20, uint64_t & nb21, uint64_t & nb22, uint64_t & nb23);

// queries of a threadgroup, and rows of the cache that a simdgroup reads side by side
ggml_metal_tuning::fa_vec_cfg_t kvq_metal_fa_vec_cfg(const struct ggml_tensor * op);

// One query, whose heads share rows of the cache: turns these heads into queries of one head, in the arguments of upstream's kernel.
// Each row is then decoded once for all queries of a threadgroup. False: op can't be turned, and nothing is changed.
bool kvq_metal_fa_share_rows(const struct ggml_tensor * op, ggml_metal_kargs_flash_attn_ext_vec & args);

// Encodes the reduction of the results of nwg threadgroups after kvq_metal_fa_share_rows, with the heads back in their order.
void kvq_metal_fa_reduce(
        ggml_metal_library_t lib, ggml_metal_encoder_t enc, const struct ggml_tensor * op,
        struct ggml_metal_buffer_id bid_tmp, struct ggml_metal_buffer_id bid_dst, int nwg);

// Turns the names of upstream's decode kernel and pipeline into ours, if op is ours.
#define KVQ_METAL_NAME_SIZE 256
void kvq_metal_fa_names(const struct ggml_tensor * op, int q, int ne, char * base, char * name);

// the function constants that choose the types
void kvq_metal_fa_constants(const struct ggml_tensor * op, ggml_metal_cv_t cv);

// For upstream's table of fusions: nodes[0], a product with a Hadamard matrix, is used by nothing but nodes[1], which stores it as
// one of our types.
bool kvq_metal_check_store(
        const struct ggml_metal_fusion * fusion, const struct ggml_tensor * const * nodes, const struct ggml_cgraph * gf,
        const int * node_idxs, int idx, ggml_metal_fusion_mode mode);

// Encodes such a pair.
void kvq_metal_store_rotated(
        ggml_metal_library_t lib, ggml_metal_encoder_t enc, const struct ggml_tensor * rotated, const struct ggml_tensor * stored);

// Encodes op if it is SET_ROWS, GET_ROWS or a copy of ours. False: it is upstream's.
bool kvq_metal_rows(ggml_metal_library_t lib, ggml_metal_encoder_t enc, const struct ggml_tensor * op);

#endif
