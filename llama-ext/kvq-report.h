// SPDX-License-Identifier: MIT
//
// What a context's KV cache really is, read back from its tensors and from the graphs reserved for it.

#pragma once

#include "kvq.h"

#include <vector>

struct llama_memory_context_i;

struct kvq_report {
    // Splits the worst-case graphs of a prompt and of one token per sequence as the scheduler will. Their
    // SET_ROWS nodes name the tensors that layers are stored in, and what the rows went through before;
    // their attention nodes tell which backend runs them.
    void read(llama_context & ctx, ggml_backend_sched_t sched, const llama_memory_context_i * mctx,
            uint32_t n_tokens, uint32_t n_seqs, uint32_t n_outputs);

    std::vector<kvq_layer>           layers; // in the order of the model
    std::vector<const ggml_tensor *> k;      // K tensor of each, to know it again
};
