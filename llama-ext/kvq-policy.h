// SPDX-License-Identifier: MIT
//
// kvq inside libllama: what the hooks of patches/ call.

#pragma once

#include "kvq.h"

#include <cstddef>
#include <string>
#include <unordered_map>
#include <vector>

struct llama_hparams;
struct llama_model_loader;
struct ggml_backend_buffer_type;

// ---- command line and Python -----------------------------------------------------------------------

// Throws std::invalid_argument with the reason where the C API returns an error.
ggml_type   kvq_parse_spec  (const std::string & spec);
void        kvq_parse_preset(const std::string & preset, ggml_type & type_k, ggml_type & type_v);

// "32 16 8 6 5 4 3 2, or by name f32 ...": what a TYPE may be.
std::string kvq_allowed();

void kvq_set_error(const std::string & why);

// Keeps what is logged as an error for kvq_last_logged().
void kvq_note_log(ggml_log_level level, const char * text);

// ---- context creation ------------------------------------------------------------------------------

// Adds the overrides of kvq.key and kvq.val to the metadata of a model that is being loaded.
void kvq_model_load(const llama_model_loader & ml, std::unordered_map<std::string, std::string> & gguf_kv);

// Settles type_k and type_v of a context to be made, and checks every layer's types against the model.
// Turns flash attention on if V is quantized and the choice is open.
// false, logged and kept for kvq_last_error(), if the context can't be made.
bool kvq_context_params(const llama_model & model, llama_context_params & params);

// Type of layer il under what kvq_context_params() left in type_k or type_v.
ggml_type kvq_layer_type(const llama_model & model, ggml_type type, uint32_t il);

// Layer il as a SLICE counts it; -1 if no SLICE does.
int32_t kvq_layer_index(const llama_model & model, uint32_t il);

// Whether some layer of the model is quantized under it.
bool kvq_is_quantized(const llama_model & model, ggml_type type);

// Throws if a layer whose cells are another context's was asked to have a type of its own.
void kvq_check_shared(const llama_model & model, ggml_type type, uint32_t il, const ggml_tensor * shared);

// Throws, naming the size and narrower choices, if the tensors of a cache can't be held in the memory of
// buft; with failed = true, because their allocation failed.
void kvq_check_alloc(ggml_context * ctx, ggml_backend_buffer_type * buft, bool failed);

// ---- quantization of weights -----------------------------------------------------------------------

// The parameters, with a count of types that a caller was compiled with (`not set`) turned into ours.
// Throws if they ask for a type of KV caches, or for an id that is no type.
llama_model_quantize_params kvq_quantize_params(llama_model_quantize_params params);

// ---- cache and graphs ------------------------------------------------------------------------------

// Whether any layer's tensor (K or V, by member pointer) is quantized.
template <typename T_layer>
bool kvq_any_quantized(const std::vector<T_layer> & layers, ggml_tensor * T_layer::* side) {
    for (const auto & layer : layers) {
        if (layer.*side && ggml_is_quantized((layer.*side)->type)) {
            return true;
        }
    }
    return false;
}

// The cache's rotation where the rows of this tensor are stored rotated, else nullptr.
inline ggml_tensor * kvq_rot(ggml_tensor * rot, const ggml_tensor * cache) {
    return cache && ggml_is_quantized(cache->type) ? rot : nullptr;
}
