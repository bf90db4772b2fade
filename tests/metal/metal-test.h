// SPDX-License-Identifier: MIT
//
// What the tests of the Metal backend share. They run on the first Metal device there is: the real one on a Mac, elsewhere the
// emulated one that GGML_BACKEND_PATH names.

#pragma once

#include "kvq-types.h"

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "ggml.h"

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

static int n_failed = 0;
static int n_passed = 0;

#define CHECK(cond, ...) do {                               \
        if (cond) { n_passed++; break; }                    \
        n_failed++;                                         \
        printf("FAIL %s:%d: %s: ", __FILE__, __LINE__, #cond); \
        printf(__VA_ARGS__);                                \
        printf("\n");                                       \
        fflush(stdout);                                     \
    } while (0)

// exit code by which ctest counts a skip
static const int EXIT_SKIPPED = 77;

// the first device whose backend is Metal
static ggml_backend_dev_t metal_device() {
    ggml_backend_load_all();
    for (size_t i = 0; i < ggml_backend_dev_count(); i++) {
        ggml_backend_dev_t dev = ggml_backend_dev_get(i);
        if (strncmp(ggml_backend_dev_name(dev), "MTL", 3) == 0) {
            return dev;
        }
    }
    printf("no Metal device: GGML_BACKEND_PATH should name the emulated one\n");
    exit(EXIT_SKIPPED);
}

static inline bool is_ours(ggml_type type) {
    return kvq_get_format(type) != nullptr;
}

static inline std::vector<float> gauss(std::mt19937 & rng, size_t n, float scale = 1.0f) {
    std::normal_distribution<float> dist(0.0f, scale);
    std::vector<float> res(n);
    for (auto & v : res) {
        v = dist(rng);
    }
    return res;
}

static inline std::vector<uint8_t> quantize(ggml_type type, const std::vector<float> & x, int64_t n_per_row) {
    std::vector<uint8_t> res(ggml_row_size(type, x.size()));
    if (type == GGML_TYPE_F32) {
        memcpy(res.data(), x.data(), res.size());
    } else {
        ggml_quantize_chunk(type, x.data(), res.data(), 0, x.size()/n_per_row, n_per_row, nullptr);
    }
    return res;
}

static inline std::vector<float> to_float(ggml_type type, const void * data, size_t n) {
    std::vector<float> res(n);
    if (type == GGML_TYPE_F32) {
        memcpy(res.data(), data, n*sizeof(float));
    } else {
        ggml_get_type_traits(type)->to_float(data, res.data(), n);
    }
    return res;
}

// tensors of a graph and their buffer on a device
struct graph_on {
    graph_on(ggml_backend_dev_t dev, size_t n_tensors = 32) : dev(dev), backend(ggml_backend_dev_init(dev, nullptr)) {
        ggml_init_params params = { n_tensors*ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true };
        ctx.reset(ggml_init(params));
        graph = ggml_new_graph(ctx.get());
    }

    // tensors with data come before, `out` is what is computed
    bool alloc(ggml_tensor * out) {
        ggml_build_forward_expand(graph, out);
        buf.reset(ggml_backend_alloc_ctx_tensors(ctx.get(), backend.get()));
        return buf != nullptr;
    }

    bool compute() {
        return ggml_backend_graph_compute(backend.get(), graph) == GGML_STATUS_SUCCESS;
    }

    ggml_backend_dev_t      dev;
    ggml_backend_ptr        backend;
    ggml_context_ptr        ctx;
    ggml_cgraph *           graph;
    ggml_backend_buffer_ptr buf;
};

static int summary(const char * name) {
    printf("%s: %d checks passed, %d failed\n", name, n_passed, n_failed);
    return n_failed ? 1 : 0;
}
