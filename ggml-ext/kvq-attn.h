// SPDX-License-Identifier: MIT
//
// Attention on a CPU over a cache of any pair of types: what FLASH_ATTN_EXT calls.
//
// The work is cut into items: a stream, the query heads that share a KV head, a tile of queries, a chunk of the cache.
// The cut depends on the shapes alone, an item's result on nothing but its inputs, and chunks are combined in the order of
// the cache: so the result has the same bits for any number of threads.
//
// Within an item the cache is read in tiles of KVQ_ATTN_N positions. A row of K or V is decoded once and then serves all
// queries of the tile and all heads that share it. Two ways to compute with it:
// - levels: bytes, multiplied with a query (or with weights) of 16 bits as two halves of 8 bits, by integer dot products.
//   On AVX-512 with VNNI and VBMI, and on NEON with dotprod (with i8mm by small matrix products).
// - floats: rows in f32. Everywhere else, and for types that have no levels.
// K and V choose apart from each other.

#pragma once

#include "ggml.h"

#ifdef __cplusplus
extern "C" {
#endif

#define KVQ_ATTN_N 128 // positions of a tile; a sum of as many products of 16 by 8 bits fits 32 bits

struct ggml_compute_params;

// Whether FLASH_ATTN_EXT with these sources is ours: K or V is quantized, or GGML_KVQ_FA_FLOAT is set to something else
// than 0 in the environment; and the query is f32. Types without a decoder aren't ours.
bool kvq_attn_takes(const struct ggml_tensor * dst);

// bytes of scratch that n_threads need together
size_t kvq_attn_work_size(const struct ggml_tensor * dst, int n_threads);

// dst by one of the threads of params. All of them call it.
void kvq_attn_forward(const struct ggml_compute_params * params, struct ggml_tensor * dst);

// The same in parts, without a thread pool. Every item once, by any thread ith < nth and in any order; when all are done,
// kvq_attn_finish once for every ith. work: aligned to 64 bytes, shared.
int  kvq_attn_n_items(const struct ggml_tensor * dst);
void kvq_attn_item   (const struct ggml_tensor * dst, int item, void * work, int ith, int nth);
void kvq_attn_finish (const struct ggml_tensor * dst, void * work, int ith, int nth);

// y = exp(x) as the softmax computes it. Relative error below 2^-22 where the result is normal; 0 or at most the smallest
// normal number below that; exp(-inf) = 0, NaN stays NaN. n: values.
void kvq_attn_exp(const float * x, float * y, int64_t n);

// the path that was compiled in: "generic", "avx2", "avx512", "avx512-vnni", "neon", "neon-dotprod" or
// "neon-i8mm"
const char * kvq_attn_name(void);

#ifdef __cplusplus
}
#endif
