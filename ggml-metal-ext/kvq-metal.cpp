// SPDX-License-Identifier: MIT

#include "kvq-metal.h"

#include "kvq-metal-impl.h"
#include "kvq-types.h"

#include "ggml-impl.h"
#include "ggml-backend-impl.h"
#include "ggml-metal-impl.h"

#include <algorithm>
#include <cstdio>
#include <cstring>

static_assert(KVQ_METAL_QK == QK_KVQ, "values of a block");

// the kernels name types by numbers
#define KVQ_METAL_SAME(name) static_assert(KVQ_METAL_TYPE_##name == GGML_TYPE_##name, "type of " #name)
KVQ_METAL_SAME(F32);
KVQ_METAL_SAME(F16);
KVQ_METAL_SAME(BF16);
KVQ_METAL_SAME(Q8_0);
KVQ_METAL_SAME(Q5_0);
KVQ_METAL_SAME(Q5_1);
KVQ_METAL_SAME(Q4_0);
KVQ_METAL_SAME(Q4_1);
KVQ_METAL_SAME(IQ4_NL);
KVQ_METAL_SAME(KVQ2);
KVQ_METAL_SAME(KVQ3);
KVQ_METAL_SAME(KVQ4);
KVQ_METAL_SAME(KVQ5);
KVQ_METAL_SAME(KVQ6);

static bool is_kvq(enum ggml_type type) {
    return kvq_get_format(type) != nullptr;
}

static bool is_cache_type(enum ggml_type type) {
    for (const auto & info : kvq_cache_types) {
        if (info.type == type) {
            return true;
        }
    }
    return false;
}

// holds values that f16 doesn't
static bool is_wide(enum ggml_type type) {
    return type == GGML_TYPE_F32 || type == GGML_TYPE_BF16;
}

//
// which nodes
//

bool kvq_metal_fa(const struct ggml_tensor * op) {
    const enum ggml_type type_k = op->src[1]->type;
    const enum ggml_type type_v = op->src[2]->type;

    return type_k != type_v || is_kvq(type_k) || type_k == GGML_TYPE_IQ4_NL;
}

static bool is_copy(const struct ggml_tensor * op) {
    return op->op == GGML_OP_CPY || op->op == GGML_OP_DUP || op->op == GGML_OP_CONT;
}

bool kvq_metal_is_ours(const struct ggml_tensor * op) {
    if (op->op == GGML_OP_FLASH_ATTN_EXT) {
        return kvq_metal_fa(op);
    }
    for (int i = 0; i < GGML_MAX_SRC; i++) {
        if (op->src[i] && is_kvq(op->src[i]->type)) {
            return true;
        }
    }
    return is_kvq(op->type) || (is_copy(op) && op->src[0]->type == GGML_TYPE_IQ4_NL);
}

bool kvq_metal_fa_head_sizes(int64_t dk, int64_t dv) {
    static const int sizes[][2] = {
        {  32,  32 }, {  40,  40 }, {  48,  48 }, {  64,  64 }, {  72,  72 }, {  80,  80 }, {  96,  96 }, {  96,  64 },
        { 112, 112 }, { 128, 128 }, { 192, 192 }, { 192, 128 }, { 256, 256 }, { 320, 256 }, { 512, 512 }, { 576, 512 },
    };
    for (const auto & size : sizes) {
        if (size[0] == dk && size[1] == dv) {
            return true;
        }
    }
    return false;
}

bool kvq_metal_supports_op(const struct ggml_tensor * op, bool has_simdgroup_mm) {
    const struct ggml_tensor * src0 = op->src[0];

    switch (op->op) {
        case GGML_OP_NONE:
        case GGML_OP_RESHAPE:
        case GGML_OP_VIEW:
        case GGML_OP_TRANSPOSE:
        case GGML_OP_PERMUTE:
            return true;
        case GGML_OP_FLASH_ATTN_EXT:
            {
                for (int i = 1; i <= 2; i++) {
                    const struct ggml_tensor * kv = op->src[i];
                    // a row of a head is whole blocks, and lies in one piece
                    if (!is_cache_type(kv->type) || kv->ne[0] % ggml_blck_size(kv->type) != 0 || kv->nb[0] != ggml_type_size(kv->type)) {
                        return false;
                    }
                }
                return has_simdgroup_mm && kvq_metal_fa_head_sizes(op->src[1]->ne[0], op->src[2]->ne[0]);
            }
        case GGML_OP_SET_ROWS:
            return is_kvq(op->type) && src0->type == GGML_TYPE_F32 && src0->nb[0] == sizeof(float) &&
                (op->src[1]->type == GGML_TYPE_I64 || op->src[1]->type == GGML_TYPE_I32);
        case GGML_OP_GET_ROWS:
            return is_kvq(src0->type) && op->type == GGML_TYPE_F32 && op->src[1]->type == GGML_TYPE_I32;
        case GGML_OP_CPY:
        case GGML_OP_DUP:
        case GGML_OP_CONT:
            {
                if (is_kvq(op->type)) {
                    return (src0->type == GGML_TYPE_F32 || src0->type == GGML_TYPE_F16) && op->ne[0] % QK_KVQ == 0 &&
                        op->nb[0] == ggml_type_size(op->type);
                }
                // iq4_nl: upstream copies to it, and not from it
                return (is_kvq(src0->type) || src0->type == GGML_TYPE_IQ4_NL) &&
                    (op->type == GGML_TYPE_F32 || op->type == GGML_TYPE_F16) && src0->nb[0] == ggml_type_size(src0->type);
            }
        default:
            return false;
    }
}

//
// pipelines
//

static struct ggml_metal_pipeline_with_params get_pipeline(ggml_metal_library_t lib, const char * base, enum ggml_type type) {
    char name[128];
    snprintf(name, sizeof(name), "%s_kvq=%s", base, ggml_type_name(type));

    struct ggml_metal_pipeline_with_params res = ggml_metal_library_get_pipeline(lib, name);
    if (!res.pipeline) {
        ggml_metal_cv_t cv = ggml_metal_cv_init();
        ggml_metal_cv_set_int32(cv, type, FC_KVQ_TYPE_K);
        res = ggml_metal_library_compile_pipeline(lib, base, name, cv);
        ggml_metal_cv_free(cv);
    }
    return res;
}

static struct ggml_metal_buffer_id buffer_id(const struct ggml_tensor * t) {
    ggml_backend_buffer_t buffer = t->view_src ? t->view_src->buffer : t->buffer;
    return ggml_metal_buffer_get_id((ggml_metal_buffer_t) buffer->context, t);
}

//
// attention
//

// K or V may hold more than f16 does, and there are decode kernels for the head size
static bool is_never_f16(const struct ggml_tensor * op) {
    return (is_wide(op->src[1]->type) || is_wide(op->src[2]->type)) && op->src[1]->ne[0] % 32 == 0;
}

bool kvq_metal_fa_use_kv_f16(const struct ggml_tensor * op) {
    // Below 32 queries upstream finds a copy of the cache dearer than reading the packed one; and the results of so many fit its
    // temporary buffer.
    const bool few = op->src[0]->ne[1] < 32 && op->src[1]->ne[0] % 32 == 0;

    return !few && !is_never_f16(op);
}

static bool v_is_view_of_k(const struct ggml_tensor * op) {
    const struct ggml_tensor * k = op->src[1];
    const struct ggml_tensor * v = op->src[2];

    return k->type == v->type && v->view_src && (v->view_src == k || (v->view_src == k->view_src && v->view_offs == k->view_offs));
}

size_t kvq_metal_fa_kv_f16_size(const struct ggml_tensor * op, int i) {
    const struct ggml_tensor * kv = op->src[i];

    // decided without the number of queries: the same for every graph of a context, so that none is allocated again
    if (kv->type == GGML_TYPE_F16 || is_never_f16(op) || (i == 2 && v_is_view_of_k(op))) {
        return 0;
    }
    // upstream's kernel reads rows of V in units of 64 values, past the end of the last one, and drops what it gets
    return GGML_PAD(sizeof(ggml_fp16_t)*((size_t) ggml_nelements(kv) + 64), 16);
}

uint64_t kvq_metal_fa_pad_stride(const struct ggml_tensor * op, int i) {
    const struct ggml_tensor * kv = op->src[i];

    const int64_t ne0 = v_is_view_of_k(op) ? op->src[1]->ne[0] : kv->ne[0];
    return std::max<uint64_t>(kv->nb[1], sizeof(ggml_fp16_t)*ne0);
}

void kvq_metal_fa_to_f16(
        ggml_metal_library_t lib, ggml_metal_encoder_t enc, const struct ggml_tensor * op, struct ggml_metal_buffer_id bid_kv_f16,
        struct ggml_metal_buffer_id & bid_k, struct ggml_metal_buffer_id & bid_v,
        uint64_t & nb10, uint64_t & nb11, uint64_t & nb12, uint64_t & nb13,
        uint64_t & nb20, uint64_t & nb21, uint64_t & nb22, uint64_t & nb23) {
    struct ggml_metal_buffer_id * bid[] = { nullptr, &bid_k, &bid_v };
    uint64_t *                    nb[]  = { nullptr, nullptr, nullptr, nullptr, &nb10, &nb11, &nb12, &nb13, &nb20, &nb21, &nb22, &nb23 };

    for (int i = 1; i <= 2; i++) {
        const struct ggml_tensor * kv = op->src[i];

        const size_t size = kvq_metal_fa_kv_f16_size(op, i);
        if (size == 0) {
            continue;
        }

        const int64_t n_units = kv->ne[0]/KVQ_METAL_N_PER_F16*ggml_nrows(kv);
        GGML_ASSERT(n_units <= INT32_MAX);

        ggml_metal_kargs_flash_attn_ext_kv_f16 args = {
            /*.ne0     =*/ (int32_t) kv->ne[0],
            /*.ne1     =*/ (int32_t) kv->ne[1],
            /*.ne2     =*/ (int32_t) kv->ne[2],
            /*.ne3     =*/ (int32_t) kv->ne[3],
            /*.nb0     =*/ kv->nb[0],
            /*.nb1     =*/ kv->nb[1],
            /*.nb2     =*/ kv->nb[2],
            /*.nb3     =*/ kv->nb[3],
            /*.nblocks =*/ (int32_t) n_units,
        };

        auto pipeline = get_pipeline(lib, "kernel_kvq_kv_f16", kv->type);
        const int nth = std::min(ggml_metal_pipeline_max_theads_per_threadgroup(pipeline), 256);

        ggml_metal_encoder_set_pipeline(enc, pipeline);
        ggml_metal_encoder_set_bytes   (enc, &args, sizeof(args), 0);
        ggml_metal_encoder_set_buffer  (enc, buffer_id(kv), 1);
        ggml_metal_encoder_set_buffer  (enc, bid_kv_f16,    2);
        ggml_metal_encoder_dispatch_threadgroups(enc, (int) ((n_units + nth - 1)/nth), 1, 1, nth, 1, 1);

        *bid[i]      = bid_kv_f16;
        *nb[4*i + 0] = sizeof(ggml_fp16_t);
        for (int j = 1; j < 4; j++) {
            *nb[4*i + j] = *nb[4*i + j - 1]*kv->ne[j - 1];
        }
        bid_kv_f16.offs += size;
    }

    if (v_is_view_of_k(op)) {
        bid_v = bid_k;
        for (int j = 0; j < 4; j++) {
            *nb[8 + j] = *nb[4 + j];
        }
    }
}

// Query heads of a KV head that may become queries of one head. They can't where the kernel asks which head it computes: for ALiBi,
// sinks and masks of a head; nor where it reads a mask for each query from the padding.
static int n_shared_heads(const struct ggml_tensor * op) {
    const struct ggml_tensor * q    = op->src[0];
    const struct ggml_tensor * k    = op->src[1];
    const struct ggml_tensor * mask = op->src[3];

    float max_bias;
    memcpy(&max_bias, op->op_params + 1, sizeof(max_bias));

    int32_t n_kv_max; // of sparse attention
    memcpy(&n_kv_max, op->op_params + 4, sizeof(n_kv_max));

    if (!kvq_metal_fa(op) || q->ne[1] != 1 || max_bias != 0.0f || op->src[4] || (mask && mask->ne[2] != 1) ||
        n_kv_max > 0 || k->ne[1] % OP_FLASH_ATTN_EXT_VEC_NCPSG != 0) {
        return 1;
    }
    return (int) (q->ne[2]/k->ne[2]);
}

ggml_metal_tuning::fa_vec_cfg_t kvq_metal_fa_vec_cfg(const struct ggml_tensor * op) {
    const int64_t n_q = op->src[0]->ne[1]*n_shared_heads(op);
    const int     dk  = (int) op->src[1]->ne[0];
    const int     dv  = (int) op->src[2]->ne[0];

    // A row that is decoded once serves all queries of a threadgroup. Long caches: upstream's tuning takes 4 almost everywhere.
    if (n_q >= 3) {
        return { 4, (int8_t) (dk > 128 ? 2 : 4) };
    }
    if (n_q == 2) {
        return { 2, 4 };
    }
    if (op->src[1]->ne[1] < ggml_metal_tuning::FA_VEC_NE11_BUCKETS[0]) {
        return ggml_metal_tuning::fa_vec_baseline_cfg(dk, dv);
    }
    return { 1, 4 };
}

bool kvq_metal_fa_share_rows(const struct ggml_tensor * op, ggml_metal_kargs_flash_attn_ext_vec & args) {
    const int n = n_shared_heads(op);
    if (n == 1) {
        return false;
    }
    args.ne01 = n;
    args.ne02 /= n;
    args.nb01 = args.nb02;
    args.nb02 *= n;
    args.nb31 = 0; // one mask row for all
    // where the result of a query goes: to row (KV head) + (query)*(KV heads), see kvq_metal_fa_reduce
    args.ne1 = args.ne02;
    args.ne2 = n;
    return true;
}

void kvq_metal_fa_reduce(
        ggml_metal_library_t lib, ggml_metal_encoder_t enc, const struct ggml_tensor * op,
        struct ggml_metal_buffer_id bid_tmp, struct ggml_metal_buffer_id bid_dst, int nwg) {
    const int n_head_kv = (int) op->src[1]->ne[2];
    const int n_shared  = n_shared_heads(op);
    const int dv        = (int) op->src[2]->ne[0];

    GGML_ASSERT(nwg == 32); // a lane of the kernel reads the result of one threadgroup

    const char * base = "kernel_kvq_flash_attn_ext_vec_reduce";
    char name[128];
    snprintf(name, sizeof(name), "%s_dv=%d_kv=%d_shared=%d", base, dv, n_head_kv, n_shared);

    struct ggml_metal_pipeline_with_params pipeline = ggml_metal_library_get_pipeline(lib, name);
    if (!pipeline.pipeline) {
        ggml_metal_cv_t cv = ggml_metal_cv_init();
        ggml_metal_cv_set_int32(cv, dv,        FC_KVQ_REDUCE_DV);
        ggml_metal_cv_set_int32(cv, n_head_kv, FC_KVQ_REDUCE_KV);
        ggml_metal_cv_set_int32(cv, n_shared,  FC_KVQ_REDUCE_SHARED);
        pipeline = ggml_metal_library_compile_pipeline(lib, base, name, cv);
        ggml_metal_cv_free(cv);
    }

    const int32_t n_rows = (int32_t) ggml_nrows(op);

    ggml_metal_kargs_flash_attn_ext_vec_reduce args = { n_rows };

    ggml_metal_encoder_set_pipeline(enc, pipeline);
    ggml_metal_encoder_set_bytes   (enc, &args, sizeof(args), 0);
    ggml_metal_encoder_set_buffer  (enc, bid_tmp, 1);
    ggml_metal_encoder_set_buffer  (enc, bid_dst, 2);
    ggml_metal_encoder_dispatch_threadgroups(enc, n_rows, 1, 1, 32, KVQ_METAL_NSG, 1);
}

void kvq_metal_fa_names(const struct ggml_tensor * op, int q, int ne, char * base, char * name) {
    if (!kvq_metal_fa(op)) {
        return;
    }

    const enum ggml_type type_k = op->src[1]->type;
    const enum ggml_type type_v = op->src[2]->type;
    const int dk = (int) op->src[1]->ne[0];
    const int dv = (int) op->src[2]->ne[0];

    snprintf(base, KVQ_METAL_NAME_SIZE, "kernel_kvq_flash_attn_ext_vec_dk%d_dv%d_q%d_ne%d", dk, dv, q, ne);

    const size_t n = strlen(name);
    const int n_added = snprintf(name + n, KVQ_METAL_NAME_SIZE - n, "_k=%s_v=%s_q=%d_ne=%d", ggml_type_name(type_k), ggml_type_name(type_v), q, ne);
    GGML_ASSERT(n + n_added < KVQ_METAL_NAME_SIZE); // a name that is cut would be another pipeline's
}

void kvq_metal_fa_constants(const struct ggml_tensor * op, ggml_metal_cv_t cv) {
    ggml_metal_cv_set_int32(cv, op->src[1]->type, FC_KVQ_TYPE_K);
    ggml_metal_cv_set_int32(cv, op->src[2]->type, FC_KVQ_TYPE_V);
}

//
// rows
//

static ggml_metal_kargs_set_rows set_rows_args(const struct ggml_tensor * op) {
    const struct ggml_tensor * src = op->src[0];
    const struct ggml_tensor * idx = op->src[1];

    return {
        /*.nk0  =*/ (int32_t) (src->ne[0]/QK_KVQ),
        /*.ne01 =*/ (int32_t) src->ne[1],
        /*.nb01 =*/ src->nb[1],
        /*.nb02 =*/ src->nb[2],
        /*.nb03 =*/ src->nb[3],
        /*.ne11 =*/ (int32_t) idx->ne[1],
        /*.ne12 =*/ (int32_t) idx->ne[2],
        /*.nb10 =*/ idx->nb[0],
        /*.nb11 =*/ idx->nb[1],
        /*.nb12 =*/ idx->nb[2],
        /*.nb1  =*/ op->nb[1],
        /*.nb2  =*/ op->nb[2],
        /*.nb3  =*/ op->nb[3],
    };
}

// values: what is stored, laid out as op->src[0]; each simdgroup takes n_blocks blocks
static void encode_set_rows(
        ggml_metal_encoder_t enc, struct ggml_metal_pipeline_with_params pipeline, const struct ggml_tensor * op,
        const struct ggml_tensor * values, int n_blocks) {
    const struct ggml_tensor * src = op->src[0];

    ggml_metal_kargs_set_rows args = set_rows_args(op);

    ggml_metal_encoder_set_pipeline(enc, pipeline);
    ggml_metal_encoder_set_bytes   (enc, &args, sizeof(args), 0);
    ggml_metal_encoder_set_buffer  (enc, buffer_id(values),     1);
    ggml_metal_encoder_set_buffer  (enc, buffer_id(op->src[1]), 2);
    ggml_metal_encoder_set_buffer  (enc, buffer_id(op),         3);

    const int n_units = args.nk0/n_blocks*args.ne01;
    ggml_metal_encoder_dispatch_threadgroups(enc, (n_units + KVQ_METAL_NSG - 1)/KVQ_METAL_NSG, (int) src->ne[2], (int) src->ne[3], 32, KVQ_METAL_NSG, 1);
}

static void set_rows(ggml_metal_library_t lib, ggml_metal_encoder_t enc, const struct ggml_tensor * op) {
    const bool is_i64 = op->src[1]->type == GGML_TYPE_I64;

    auto pipeline = get_pipeline(lib, is_i64 ? "kernel_kvq_set_rows_f32_i64" : "kernel_kvq_set_rows_f32_i32", op->type);

    encode_set_rows(enc, pipeline, op, op->src[0], 1);
}

bool kvq_metal_check_store(
        const struct ggml_metal_fusion * fusion, const struct ggml_tensor * const * nodes, const struct ggml_cgraph * gf,
        const int * node_idxs, int idx, ggml_metal_fusion_mode mode) {
    GGML_UNUSED(fusion);
    GGML_UNUSED(mode);

    const struct ggml_tensor * rotated = nodes[0];
    const struct ggml_tensor * stored  = nodes[1];
    const struct ggml_tensor * rows    = stored->src[0];
    const struct ggml_tensor * values  = rotated->src[1];

    if (stored->op != GGML_OP_SET_ROWS || !is_kvq(stored->type) ||
        rotated->op != GGML_OP_MUL_MAT || ggml_get_op_params_i32(rotated, 1) != GGML_HINT_SRC0_IS_HADAMARD) {
        return false;
    }
    const int64_t n = values->ne[0];
    if ((n != 64 && n != 128 && n != 256) || rows->ne[0] % n != 0) {
        return false;
    }
    // the rows are the product, in the same order
    if (rows->view_src != rotated || rows->view_offs != 0 || ggml_nelements(rows) != ggml_nelements(rotated) ||
        !ggml_is_contiguous(rows) || !ggml_is_contiguous(values) || !ggml_are_same_shape(values, rotated) ||
        values->type != GGML_TYPE_F32 || rotated->type != GGML_TYPE_F32) {
        return false;
    }
    // nothing else reads it
    const int first = node_idxs[idx];
    const int last  = node_idxs[idx + 1];
    for (int i = first; i < last; i++) {
        if (ggml_node_get_use_count(gf, i) != 1 || (gf->nodes[i]->flags & GGML_TENSOR_FLAG_OUTPUT)) {
            return false;
        }
    }
    return last - first == 3;
}

void kvq_metal_store_rotated(
        ggml_metal_library_t lib, ggml_metal_encoder_t enc, const struct ggml_tensor * rotated, const struct ggml_tensor * stored) {
    const int n = (int) rotated->src[1]->ne[0];

    const char * base = stored->src[1]->type == GGML_TYPE_I64 ? "kernel_kvq_set_rows_fwht_i64" : "kernel_kvq_set_rows_fwht_i32";
    char name[128];
    snprintf(name, sizeof(name), "%s_kvq=%s_n=%d", base, ggml_type_name(stored->type), n);

    struct ggml_metal_pipeline_with_params pipeline = ggml_metal_library_get_pipeline(lib, name);
    if (!pipeline.pipeline) {
        ggml_metal_cv_t cv = ggml_metal_cv_init();
        ggml_metal_cv_set_int32(cv, stored->type, FC_KVQ_TYPE_K);
        ggml_metal_cv_set_int32(cv, n,            FC_KVQ_N_FWHT);
        pipeline = ggml_metal_library_compile_pipeline(lib, base, name, cv);
        ggml_metal_cv_free(cv);
    }

    encode_set_rows(enc, pipeline, stored, rotated->src[1], n/QK_KVQ);
}

static void get_rows(ggml_metal_library_t lib, ggml_metal_encoder_t enc, const struct ggml_tensor * op) {
    const struct ggml_tensor * src = op->src[0];
    const struct ggml_tensor * idx = op->src[1];

    auto pipeline = get_pipeline(lib, "kernel_kvq_get_rows_f32", src->type);

    ggml_metal_kargs_get_rows args = {
        /*.ne00t =*/ (int32_t) (src->ne[0]/KVQ_METAL_N_PER_GET),
        /*.ne00  =*/ (int32_t) src->ne[0],
        /*.nb01  =*/ src->nb[1],
        /*.nb02  =*/ src->nb[2],
        /*.nb03  =*/ src->nb[3],
        /*.ne10  =*/ (int32_t) idx->ne[0],
        /*.nb10  =*/ idx->nb[0],
        /*.nb11  =*/ idx->nb[1],
        /*.nb12  =*/ idx->nb[2],
        /*.nb1   =*/ op->nb[1],
        /*.nb2   =*/ op->nb[2],
        /*.nb3   =*/ op->nb[3],
    };

    const int nth = std::min(args.ne00t, ggml_metal_pipeline_max_theads_per_threadgroup(pipeline));
    const int nw0 = (args.ne00t + nth - 1)/nth;

    ggml_metal_encoder_set_pipeline(enc, pipeline);
    ggml_metal_encoder_set_bytes   (enc, &args, sizeof(args), 0);
    ggml_metal_encoder_set_buffer  (enc, buffer_id(src), 1);
    ggml_metal_encoder_set_buffer  (enc, buffer_id(idx), 2);
    ggml_metal_encoder_set_buffer  (enc, buffer_id(op),  3);
    ggml_metal_encoder_dispatch_threadgroups(enc, nw0*args.ne10, (int) idx->ne[1], (int) idx->ne[2], nth, 1, 1);
}

static void copy(ggml_metal_library_t lib, ggml_metal_encoder_t enc, const struct ggml_tensor * op) {
    const struct ggml_tensor * src = op->src[0];

    const bool encode = is_kvq(op->type);
    const enum ggml_type plain = encode ? src->type : op->type;

    const char * base =
        encode ? (plain == GGML_TYPE_F16 ? "kernel_kvq_cpy_f16_q" : "kernel_kvq_cpy_f32_q") :
                 (plain == GGML_TYPE_F16 ? "kernel_kvq_cpy_q_f16" : "kernel_kvq_cpy_q_f32");

    auto pipeline = get_pipeline(lib, base, encode ? op->type : src->type);

    ggml_metal_kargs_cpy args = {
        /*.nk0  =*/ src->ne[0]/(encode ? QK_KVQ : KVQ_METAL_N_PER_GET),
        /*.ne00 =*/ src->ne[0],
        /*.ne01 =*/ src->ne[1],
        /*.ne02 =*/ src->ne[2],
        /*.ne03 =*/ src->ne[3],
        /*.nb00 =*/ src->nb[0],
        /*.nb01 =*/ src->nb[1],
        /*.nb02 =*/ src->nb[2],
        /*.nb03 =*/ src->nb[3],
        /*.ne0  =*/ op->ne[0],
        /*.ne1  =*/ op->ne[1],
        /*.ne2  =*/ op->ne[2],
        /*.ne3  =*/ op->ne[3],
        /*.nb0  =*/ op->nb[0],
        /*.nb1  =*/ op->nb[1],
        /*.nb2  =*/ op->nb[2],
        /*.nb3  =*/ op->nb[3],
    };

    ggml_metal_encoder_set_pipeline(enc, pipeline);
    ggml_metal_encoder_set_bytes   (enc, &args, sizeof(args), 0);
    ggml_metal_encoder_set_buffer  (enc, buffer_id(src), 1);
    ggml_metal_encoder_set_buffer  (enc, buffer_id(op),  2);

    if (encode) {
        const int n_blocks = (int) (args.nk0*args.ne01);
        ggml_metal_encoder_dispatch_threadgroups(enc, (n_blocks + KVQ_METAL_NSG - 1)/KVQ_METAL_NSG, (int) args.ne02, (int) args.ne03, 32, KVQ_METAL_NSG, 1);
    } else {
        const int nth = (int) std::min<int64_t>(args.nk0, 256);
        const int nw0 = (int) ((args.nk0 + nth - 1)/nth);
        ggml_metal_encoder_dispatch_threadgroups(enc, nw0*(int) args.ne01, (int) args.ne02, (int) args.ne03, nth, 1, 1);
    }
}

bool kvq_metal_rows(ggml_metal_library_t lib, ggml_metal_encoder_t enc, const struct ggml_tensor * op) {
    if (!kvq_metal_is_ours(op)) {
        return false;
    }
    switch (op->op) {
        case GGML_OP_SET_ROWS: set_rows(lib, enc, op); return true;
        case GGML_OP_GET_ROWS: get_rows(lib, enc, op); return true;
        default:               copy    (lib, enc, op); return true;
    }
}
