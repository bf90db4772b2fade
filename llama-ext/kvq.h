// SPDX-License-Identifier: MIT
//
// kvq: which layer's keys and values are stored as what.
//
// A policy is one SPEC for the keys or for the values of a KV cache:
//
//     SPEC   = TYPE { "," SLICE "=" TYPE }         8    kvq-name    4,:2=8,-2:=16    6,10:20=4
//     TYPE   = bits (32 16 8 6 5 4 3 2) | the name of a ggml cache type
//     SLICE  = INDEX | [INDEX] ":" [INDEX] [ ":" STEP ]     as Python writes it; STEP >= 1
//     PRESET = "k" bits "v" bits | "8" (= k8v4) | "4" (= k4v4) | "16" (= k16v16)
//
// A slice selects among the layers of the model that store keys and values, counted from 0
// (recurrent layers and layers that reuse another layer's cache are not counted). Later exceptions
// win. Letter case and blanks around a token don't matter.
//
// A parsed SPEC is interned and named by a handle: a value of enum ggml_type at or above
// GGML_TYPE_KVQ_POLICY that can stand wherever a cache type is asked for
// (llama_context_params.type_k and .type_v). So a policy travels from a flag to the tensors on the way
// that upstream's cache types go, and no struct changes.
//
// What counts for one side of a context, the nearest first:
//     1. a handle in type_k / type_v
//     2. any plain type other than the default (f16) in type_k / type_v
//     3. the model's metadata kvq.key / kvq.val: from the GGUF, --override-kv or kvq_model_set_policy()
//     4. f16
//
// Every function that can fail says why through kvq_last_error(). Thread-safe, except that a model's
// policy must not be set while another thread makes a context of the same model.

#pragma once

#include "llama.h"

#ifdef __cplusplus
extern "C" {
#endif

// Handle of a SPEC, the same one for the same policy. GGML_TYPE_COUNT if the SPEC is malformed.
LLAMA_API enum ggml_type kvq_type_from_spec(const char * spec);

// Handles of both sides of a PRESET. false, and neither is written, if there is no such preset.
LLAMA_API bool kvq_types_from_preset(const char * preset, enum ggml_type * type_k, enum ggml_type * type_v);

// Canonical text of a handle ("kvq4,:2=q8_0"), or ggml's name of a plain type. "none" for anything else.
// The pointer stays valid as long as the process.
LLAMA_API const char * kvq_type_name(enum ggml_type type);

// The i-th type that a cache may have, in the order of the table; GGML_TYPE_COUNT past its end.
LLAMA_API enum ggml_type kvq_cache_type(int32_t i);

// Our own type of that name ("kvq4", any case); GGML_TYPE_COUNT if there is none.
LLAMA_API enum ggml_type kvq_format_type(const char * name);

// For messages: " (a type of KV caches, not of weights)" if that is what the name is (any case), else "".
LLAMA_API const char * kvq_not_for_weights(const char * name);

// Types of all n_layer layers under a handle or a plain cache type, written to types[n_layer].
// false if the type is no cache type or a slice lies outside the layers.
LLAMA_API bool kvq_resolve(enum ggml_type type, int32_t n_layer, enum ggml_type * types);

// Set the policy that the next contexts of a model are made with, in place of its metadata kvq.key and
// kvq.val. NULL leaves a side as it is, "" takes its policy away.
// false, and nothing is changed, if a SPEC is malformed or lies outside the model's layers.
LLAMA_API bool kvq_model_set_policy(struct llama_model * model, const char * key, const char * val);

// Layers of the model that store keys and values: what a SLICE counts.
LLAMA_API int32_t kvq_model_n_layer(const struct llama_model * model);

// One layer of a context's KV cache, read back from its tensors and from the graphs reserved for it.
struct kvq_layer {
    int32_t il;                   // layer of the model
    int32_t index;                // the same, as a SLICE counts
    int32_t swa;                  // 1: sliding-window layer, kept in a cache of its own
    int32_t n_cells;              // tokens that fit, over all streams
    int32_t n_head_kv;
    int32_t head_k;               // values per head
    int32_t head_v;
    enum ggml_type type_k;
    enum ggml_type type_v;        // GGML_TYPE_COUNT: no V tensor (MLA)
    int32_t rot_k;                // size of the Hadamard matrix the rows are rotated by; 0: stored as they are
    int32_t rot_v;
    int32_t fused;                // 1: attention is one flash attention node
    uint64_t bytes_k;             // size of the whole tensor
    uint64_t bytes_v;
    const char * backend_prefill; // name of the backend that the scheduler chose for attention
    const char * backend_decode;
    const char * backend_expect;  // name of the device that holds the layer
};

// Number of layers in a context's KV cache; 0 for a model without one.
LLAMA_API int32_t kvq_n_layer(const struct llama_context * ctx);

// The i-th of them, in the order of the model. false if i is out of range.
LLAMA_API bool kvq_get_layer(const struct llama_context * ctx, int32_t i, struct kvq_layer * layer);

// Bytes of a context's compute buffers, which hold intermediate results, over all backends. What a CPU's
// threads need for themselves comes on top when a graph runs.
LLAMA_API uint64_t kvq_compute_bytes(const struct llama_context * ctx);

// Handle of the types that one side is stored as; kvq_type_name() gives "q8_0" or "kvq4,0:2=q8_0". Where
// V lies within K's rows, V is as K. GGML_TYPE_COUNT if there is no cache.
LLAMA_API enum ggml_type kvq_effective(const struct llama_context * ctx, bool values);

// What the tools print at start: a line for each distinct pair, then warnings, '\n' after each.
// Returns the length without the terminating zero, and writes at most size bytes, as snprintf does.
LLAMA_API int32_t kvq_describe(const struct llama_context * ctx, char * buf, size_t size);

// Why the last kvq_ call, or the last llama_init_from_model(), failed on this thread; "" if it did not.
LLAMA_API const char * kvq_last_error(void);

// The last error that llama.cpp logged on this thread, on one line and without the name of a function; "" if
// there was none. After a llama_state_ call that failed it is the reason.
LLAMA_API const char * kvq_last_logged(void);

// "LOCK-VERSION SOURCE-SHA256 PATCHES-SHA256": what this library was built from.
LLAMA_API const char * kvq_build(void);

// Which file a part of the loaded library lies in, as this library's own calls reach it: 0 is this library, 1 ggml's base with
// the types and the codec, 2 its list of backends, 3 and above the backends of the devices, by their index.
// "" if the system doesn't tell, NULL past the last. Valid as long as the library is loaded, on Windows until the next call.
LLAMA_API const char * kvq_library_file(int32_t i);

// The self-test: items that run one by one, in seconds as a whole. It holds what is loaded to recorded bytes, to the reference
// codec and to attention in double over the decoded rows; so it finds a library of another build, a compiler's fault, a driver's.
// Not thread-safe.
struct kvq_selftest;

enum kvq_selftest_kind {
    KVQ_SELFTEST_CODEC     = 0, // fixed blocks of type_k are stored and read as recorded; error: 0 or 1
    KVQ_SELFTEST_ROWS      = 1, // SET_ROWS to type_k is the reference codec; error: share of blocks that differ for types of ours,
                                // else by how much a block's squared error is larger, relative to the reference's
    KVQ_SELFTEST_ATTENTION = 2, // a prompt and one token, heads of 64 and 128; error: sum (out - ref)^2 / sum ref^2, the largest
};

enum kvq_selftest_status {
    KVQ_SELFTEST_PASSED    = 0,
    KVQ_SELFTEST_FAILED    = 1,
    KVQ_SELFTEST_ELSEWHERE = 2, // the device says that it doesn't compute this: a CPU does
};

struct kvq_selftest_item {
    int32_t kind;
    int32_t status;
    int32_t device;        // index of the device; -1: the reference codec
    enum ggml_type type_k; // or that of the rows
    enum ggml_type type_v; // GGML_TYPE_COUNT where there is but one type
    double error;
    double limit;          // of the error
    uint64_t want;         // hashes of recorded and computed bytes, else 0
    uint64_t have;
    char reason[192];      // why, unless it passed
};

// Loads the backend that GGML_BACKEND_PATH names, if it does.
LLAMA_API struct kvq_selftest * kvq_selftest_init(void);

// Number of items.
LLAMA_API int32_t kvq_selftest_count(const struct kvq_selftest * test);

// What the i-th item tests: kind, device and types. false if there is none.
LLAMA_API bool kvq_selftest_get(const struct kvq_selftest * test, int32_t i, struct kvq_selftest_item * item);

// Runs the i-th item; any order will do. false if there is none.
LLAMA_API bool kvq_selftest_run(struct kvq_selftest * test, int32_t i, struct kvq_selftest_item * item);

LLAMA_API void kvq_selftest_free(struct kvq_selftest * test);

#ifdef __cplusplus
}
#endif
