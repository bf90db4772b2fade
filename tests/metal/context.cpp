// SPDX-License-Identifier: MIT
//
// Metal's side of ggml-metal-context.h: graphs are encoded and run at once, in one piece or, as on a Mac, in several.

#include "ggml-metal-context.h"

#include "ggml-backend-impl.h"
#include "ggml-impl.h"
#include "ggml-metal-common.h"
#include "ggml-metal-fusion.h"
#include "ggml-metal-ops.h"

#include <stdlib.h>

#include <algorithm>

struct ggml_metal {
    ggml_metal_device_t             dev;
    ggml_metal_event_t              ev_cpy;
    struct ggml_metal_fusion_info * finfo;
    bool                            use_concurrency;
    bool                            use_graph_optimize;
    int                             debug_graph;
    int                             n_cb;
};

ggml_metal_t ggml_metal_init(ggml_metal_device_t dev) {
    ggml_metal_t ctx = new ggml_metal();
    ctx->dev                = dev;
    ctx->ev_cpy             = ggml_metal_device_event_init(dev);
    ctx->finfo              = ggml_metal_device_get_fusion_info(dev);
    ctx->use_concurrency    = !getenv("GGML_METAL_CONCURRENCY_DISABLE");
    ctx->use_graph_optimize = !getenv("GGML_METAL_GRAPH_OPTIMIZE_DISABLE");
    ctx->debug_graph        = getenv("GGML_METAL_GRAPH_DEBUG") ? atoi(getenv("GGML_METAL_GRAPH_DEBUG")) : 0;
    if (ggml_metal_fusion_info_stats(ctx->finfo)) {
        ggml_metal_fusion_info_labels_init(ctx->finfo);
    }
    return ctx;
}

void ggml_metal_free(ggml_metal_t ctx) {
    ggml_metal_device_event_free(ctx->dev, ctx->ev_cpy);
    delete ctx;
}

const char * ggml_metal_get_name(ggml_metal_t ctx) {
    return ggml_metal_device_get_props(ctx->dev)->name;
}

void ggml_metal_synchronize(ggml_metal_t ctx) {
    GGML_UNUSED(ctx);
}

static ggml_metal_buffer_t buffer_of(const struct ggml_tensor * t) {
    ggml_backend_buffer_t buffer = t->view_src ? t->view_src->buffer : t->buffer;
    return (ggml_metal_buffer_t) buffer->context;
}

void ggml_metal_set_tensor_async(ggml_metal_t ctx, struct ggml_tensor * tensor, const void * data, size_t offset, size_t size) {
    GGML_UNUSED(ctx);
    ggml_metal_buffer_set_tensor(buffer_of(tensor), tensor, data, offset, size);
}

void ggml_metal_get_tensor_async(ggml_metal_t ctx, const struct ggml_tensor * tensor, void * data, size_t offset, size_t size) {
    GGML_UNUSED(ctx);
    ggml_metal_buffer_get_tensor(buffer_of(tensor), tensor, data, offset, size);
}

bool ggml_metal_cpy_tensor_async(ggml_metal_t ctx_src, ggml_metal_t ctx_dst, const struct ggml_tensor * src, struct ggml_tensor * dst) {
    GGML_UNUSED(ctx_src);
    GGML_UNUSED(ctx_dst);
    return ggml_metal_buffer_cpy_tensor(buffer_of(dst), src, dst);
}

static void encode(ggml_metal_t ctx, struct ggml_cgraph * gf, int begin, int end) {
    ggml_metal_op_t op = ggml_metal_op_init(ctx->dev, nullptr, gf, ctx->finfo, begin, end, ctx->use_concurrency, false, ctx->debug_graph);
    for (int i = 0; i < ggml_metal_op_n_nodes(op); ++i) {
        const int n = ggml_metal_op_encode(op, i);
        if (n == 0) {
            break;
        }
        i += n - 1;
    }
    ggml_metal_op_free(op); // ends the encoding
}

enum ggml_status ggml_metal_graph_compute(ggml_metal_t ctx, struct ggml_cgraph * gf) {
    // A Mac encodes the first nodes on the calling thread, the rest in n_cb parts on others; the parts run in order.
    const int n_main = ctx->n_cb == 0 ? gf->n_nodes : std::min(gf->n_nodes, std::max(64, gf->n_nodes/10));
    const int n_rest = gf->n_nodes - n_main;
    encode(ctx, gf, 0, n_main);
    if (n_rest > 0) {
        const int n_part = (n_rest + ctx->n_cb - 1)/ctx->n_cb;
        for (int begin = n_main; begin < gf->n_nodes; begin += n_part) {
            encode(ctx, gf, begin, std::min(gf->n_nodes, begin + n_part));
        }
    }
    return GGML_STATUS_SUCCESS;
}

void ggml_metal_graph_optimize(ggml_metal_t ctx, struct ggml_cgraph * gf) {
    if (ctx->use_graph_optimize) {
        ggml_graph_optimize(gf);
    }
}

void ggml_metal_event_record(ggml_metal_t ctx, ggml_metal_event_t ev) {
    GGML_UNUSED(ctx);
    GGML_UNUSED(ev);
}

void ggml_metal_event_wait(ggml_metal_t ctx, ggml_metal_event_t ev) {
    GGML_UNUSED(ctx);
    GGML_UNUSED(ev);
}

ggml_metal_event_t ggml_metal_get_ev_cpy(ggml_metal_t ctx) {
    return ctx->ev_cpy;
}

void ggml_metal_set_n_cb(ggml_metal_t ctx, int n_cb) {
    ctx->n_cb = ggml_metal_fusion_info_stats(ctx->finfo) ? 0 : std::min(n_cb, 8);
}

void ggml_metal_set_abort_callback(ggml_metal_t ctx, ggml_abort_callback abort_callback, void * user_data) {
    GGML_UNUSED(ctx);
    GGML_UNUSED(abort_callback);
    GGML_UNUSED(user_data);
}

bool ggml_metal_supports_family(ggml_metal_t ctx, int family) {
    return family <= ggml_metal_device_get_props(ctx->dev)->gpu_family;
}

void ggml_metal_capture_next_compute(ggml_metal_t ctx) {
    GGML_UNUSED(ctx);
}
