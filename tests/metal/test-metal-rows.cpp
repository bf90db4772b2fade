// SPDX-License-Identifier: MIT
//
// Rows of our types on the Metal backend: SET_ROWS, GET_ROWS and copies, against the reference codec.

#include "metal-test.h"

#include <algorithm>

static std::mt19937 rng(4321);

// blocks of every kind that an encoder treats apart
static std::vector<float> blocks(int n_blocks) {
    std::vector<float> x(size_t(n_blocks)*QK_KVQ);
    std::normal_distribution<float> normal;
    for (int b = 0; b < n_blocks; b++) {
        const int   kind = b % 16;
        const float mag  = expf(2.0f*normal(rng));
        for (int i = 0; i < QK_KVQ; i++) {
            float v = normal(rng)*mag;
            switch (kind) {
                case  0: v = 0.0f;                                          break;
                case  1: v = mag;                                           break; // a constant
                case  2: v = i == 7 ? 50.0f*mag : v;                        break; // an outlier
                case  3: v = i == 7 ? -50.0f*mag : v;                       break;
                case  4: v = v < 0 ? -mag*logf(1 + v*v) : mag*logf(1 + v*v); break;
                case  5: v = (i % 2 ? 3.0f : -3.0f)*mag + 0.1f*v;           break; // two heaps
                case  6: v = floorf(v/mag*4)*mag;                           break; // many equal values
                case  7: v *= 1e-6f/mag;                                    break; // scales that are denormal in f16
                case  8: v *= 1e6f/mag;                                     break; // scales that are clamped
                case  9: v *= 1e-9f;                                        break; // too small for a scale
                default:                                                    break;
            }
            x[size_t(b)*QK_KVQ + i] = v;
        }
    }
    return x;
}

static double block_error(const kvq_format * f, const float * x, const uint8_t * block) {
    float y[QK_KVQ];
    kvq_decode_block_ref(f, block, y);
    double err = 0;
    for (int i = 0; i < QK_KVQ; i++) {
        err += (double(x[i]) - y[i])*(double(x[i]) - y[i]);
    }
    return err;
}

// What a store must be: the codes are the reference's. The scale, which the reference computes in double and a GPU in float, may be
// the next f16 in rare blocks.
struct tally {
    int n = 0, codes = 0, scales = 0, far = 0;
};

static void compare(const kvq_format * f, const std::vector<float> & x, const std::vector<uint8_t> & got, tally & t) {
    uint8_t want[sizeof(block_kvq6)];
    for (size_t b = 0; b < x.size()/QK_KVQ; b++) {
        kvq_encode_block_ref(f, &x[b*QK_KVQ], want);
        const uint8_t * g = &got[b*f->size];
        uint16_t dw, dg;
        memcpy(&dw, want, 2);
        memcpy(&dg, g, 2);
        t.n++;
        if (memcmp(want, g, f->size) == 0) {
            continue;
        }
        if (memcmp(want + 2, g + 2, f->size - 2) != 0) {
            t.codes++;
            // a tie that fell the other way costs nothing; anything else does
            if (block_error(f, &x[b*QK_KVQ], g) > 1.001*block_error(f, &x[b*QK_KVQ], want)) {
                t.far++;
            }
        } else {
            t.scales++;
            t.far += abs(int(dw) - int(dg)) > 1;
        }
    }
}

static void check(const tally & t, const char * what, ggml_type type) {
    printf("%s %s: %d blocks, %d with another scale, %d with other codes\n", what, ggml_type_name(type), t.n, t.scales, t.codes);
    CHECK(t.far == 0, "%s %s: %d blocks are worse than the reference's", what, ggml_type_name(type), t.far);
    // one in a hundred, of blocks made to be hard
    CHECK(t.scales + t.codes <= t.n/100, "%s %s: %d of %d blocks differ", what, ggml_type_name(type), t.scales + t.codes, t.n);
}

static std::vector<uint8_t> bytes_of(ggml_tensor * t) {
    std::vector<uint8_t> res(ggml_nbytes(t));
    ggml_backend_tensor_get(t, res.data(), 0, res.size());
    return res;
}

static bool run(graph_on & g, ggml_tensor * out, const char * what) {
    if (!ggml_backend_dev_supports_op(g.dev, out)) {
        CHECK(false, "%s: refused", what);
        return false;
    }
    CHECK(g.alloc(out), "%s: no memory", what);
    return g.buf != nullptr;
}

static void test_set_rows(ggml_backend_dev_t dev, const kvq_format * f, ggml_type index, int n_embd, int n_rows, int n_heads) {
    graph_on g(dev);
    ggml_context * ctx = g.ctx.get();
    const int n_cells = n_rows + 5;

    // rows come from the middle of wider ones, as they do for keys that are views
    ggml_tensor * wide  = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, n_embd + 64, n_rows, n_heads);
    ggml_tensor * src   = ggml_view_3d(ctx, wide, n_embd, n_rows, n_heads, wide->nb[1], wide->nb[2], 32*sizeof(float));
    ggml_tensor * cache = ggml_new_tensor_3d(ctx, f->type, n_embd, n_cells, n_heads);
    ggml_tensor * ids   = ggml_new_tensor_3d(ctx, index, n_rows, n_heads, 1);
    ggml_tensor * out   = ggml_set_rows(ctx, cache, src, ids);
    if (!run(g, out, "SET_ROWS")) {
        return;
    }

    const auto x = blocks(ggml_nelements(wide)/QK_KVQ);
    ggml_backend_tensor_set(wide, x.data(), 0, ggml_nbytes(wide));
    std::vector<uint8_t> before(ggml_nbytes(cache), 0xa5);
    ggml_backend_tensor_set(cache, before.data(), 0, before.size());
    std::vector<int64_t> ids64(ggml_nelements(ids));
    for (int h = 0; h < n_heads; h++) {
        std::vector<int64_t> perm(n_cells);
        for (int i = 0; i < n_cells; i++) {
            perm[i] = i;
        }
        std::shuffle(perm.begin(), perm.end(), rng);
        std::copy_n(perm.begin(), n_rows, ids64.begin() + h*n_rows);
    }
    std::vector<int32_t> ids32(ids64.begin(), ids64.end());
    ggml_backend_tensor_set(ids, index == GGML_TYPE_I64 ? (const void *) ids64.data() : ids32.data(), 0, ggml_nbytes(ids));
    CHECK(g.compute(), "SET_ROWS %s", f->name);

    const auto got = bytes_of(cache);
    const size_t row_size = ggml_row_size(f->type, n_embd);
    std::vector<bool> written(n_cells*n_heads);
    tally t;
    for (int h = 0; h < n_heads; h++) {
        for (int r = 0; r < n_rows; r++) {
            const int cell = int(ids64[h*n_rows + r]);
            written[h*n_cells + cell] = true;
            const float * px = &x[(size_t(h)*n_rows + r)*(n_embd + 64) + 32];
            const uint8_t * pg = &got[(size_t(h)*n_cells + cell)*row_size];
            compare(f, std::vector<float>(px, px + n_embd), std::vector<uint8_t>(pg, pg + row_size), t);
        }
    }
    check(t, index == GGML_TYPE_I64 ? "SET_ROWS i64" : "SET_ROWS i32", f->type);
    for (int c = 0; c < n_cells*n_heads; c++) {
        if (!written[c]) {
            CHECK(std::all_of(&got[c*row_size], &got[(c + 1)*row_size], [](uint8_t b) { return b == 0xa5; }), "cell %d was touched", c);
        }
    }
}

static void test_not_finite(ggml_backend_dev_t dev, const kvq_format * f) {
    graph_on g(dev);
    ggml_context * ctx = g.ctx.get();
    ggml_tensor * src   = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, 3*QK_KVQ, 3);
    ggml_tensor * cache = ggml_new_tensor_2d(ctx, f->type, 3*QK_KVQ, 3);
    ggml_tensor * ids   = ggml_new_tensor_1d(ctx, GGML_TYPE_I64, 3);
    ggml_tensor * out   = ggml_set_rows(ctx, cache, src, ids);
    if (!run(g, out, "SET_ROWS")) {
        return;
    }
    auto x = gauss(rng, ggml_nelements(src));
    const float bad[3] = { INFINITY, -INFINITY, NAN };
    for (int r = 0; r < 3; r++) {
        x[(r*3 + 1)*QK_KVQ + 5 + r] = bad[r];
    }
    const int64_t id[3] = { 0, 1, 2 };
    ggml_backend_tensor_set(src, x.data(), 0, ggml_nbytes(src));
    ggml_backend_tensor_set(ids, id, 0, sizeof(id));
    CHECK(g.compute(), "SET_ROWS %s", f->name);
    const auto y = to_float(f->type, bytes_of(cache).data(), x.size());
    for (size_t i = 0; i < y.size(); i++) {
        CHECK(std::isnan(y[i]) == (i/QK_KVQ % 3 == 1), "%s: value %zu is %g", f->name, i, y[i]);
    }
}

// reading is exact: a level times the scale in f32, then perhaps rounded to f16
static void test_get_rows(ggml_backend_dev_t dev, ggml_type type) {
    graph_on g(dev);
    ggml_context * ctx = g.ctx.get();
    ggml_tensor * cache = ggml_new_tensor_3d(ctx, type, 256, 13, 2);
    ggml_tensor * ids   = ggml_new_tensor_2d(ctx, GGML_TYPE_I32, 7, 2);
    ggml_tensor * out   = ggml_get_rows(ctx, cache, ids);
    if (!run(g, out, "GET_ROWS")) {
        return;
    }
    const auto data = quantize(type, blocks(ggml_nelements(cache)/QK_KVQ), 256);
    ggml_backend_tensor_set(cache, data.data(), 0, data.size());
    std::vector<int32_t> id(14);
    for (auto & i : id) {
        i = rng() % 13;
    }
    ggml_backend_tensor_set(ids, id.data(), 0, ggml_nbytes(ids));
    CHECK(g.compute(), "GET_ROWS %s", ggml_type_name(type));

    std::vector<float> got(ggml_nelements(out));
    ggml_backend_tensor_get(out, got.data(), 0, ggml_nbytes(out));
    const auto all = to_float(type, data.data(), ggml_nelements(cache));
    int n_bad = 0;
    for (int r = 0; r < 14; r++) {
        n_bad += memcmp(&got[r*256], &all[(size_t(r/7)*13 + id[r])*256], 256*sizeof(float)) != 0;
    }
    CHECK(n_bad == 0, "GET_ROWS %s: %d rows differ", ggml_type_name(type), n_bad);
}

static void test_copy_from(ggml_backend_dev_t dev, ggml_type type, ggml_type to, bool permuted) {
    graph_on g(dev);
    ggml_context * ctx = g.ctx.get();
    ggml_tensor * cache = ggml_new_tensor_4d(ctx, type, 64, 3, 5, 2);
    ggml_tensor * src   = permuted ? ggml_permute(ctx, cache, 0, 2, 1, 3) : cache;
    ggml_tensor * dst   = ggml_new_tensor_4d(ctx, to, src->ne[0], src->ne[1], src->ne[2], src->ne[3]);
    ggml_tensor * out   = ggml_cpy(ctx, src, dst);
    if (!run(g, out, "CPY")) {
        return;
    }
    const auto data = quantize(type, blocks(ggml_nelements(cache)/QK_KVQ), 64);
    ggml_backend_tensor_set(cache, data.data(), 0, data.size());
    CHECK(g.compute(), "CPY %s", ggml_type_name(type));

    const auto all = to_float(type, data.data(), ggml_nelements(cache));
    const auto got = bytes_of(dst);
    int n_bad = 0;
    for (int64_t r = 0; r < ggml_nrows(dst); r++) {
        const int64_t i1 = r % dst->ne[1], i2 = r/dst->ne[1] % dst->ne[2], i3 = r/(dst->ne[1]*dst->ne[2]);
        const float * want = &all[permuted ? ((i3*5 + i1)*3 + i2)*64 : ((i3*5 + i2)*3 + i1)*64];
        for (int i = 0; i < 64; i++) {
            if (to == GGML_TYPE_F32) {
                n_bad += memcmp(&got[(r*64 + i)*4], &want[i], 4) != 0;
            } else {
                ggml_fp16_t h = ggml_fp32_to_fp16(want[i]), o;
                memcpy(&o, &got[(r*64 + i)*2], 2);
                n_bad += h != o;
            }
        }
    }
    CHECK(n_bad == 0, "CPY %s to %s: %d values differ", ggml_type_name(type), ggml_type_name(to), n_bad);
}

static void test_copy_to(ggml_backend_dev_t dev, const kvq_format * f, ggml_type from, bool permuted) {
    graph_on g(dev);
    ggml_context * ctx = g.ctx.get();
    ggml_tensor * whole = ggml_new_tensor_4d(ctx, from, 96, 3, 7, 2);
    ggml_tensor * src   = permuted ? ggml_permute(ctx, whole, 0, 2, 1, 3) : whole;
    ggml_tensor * dst   = ggml_new_tensor_4d(ctx, f->type, src->ne[0], src->ne[1], src->ne[2], src->ne[3]);
    ggml_tensor * out   = ggml_cpy(ctx, src, dst);
    if (!run(g, out, "CPY")) {
        return;
    }
    auto x = blocks(ggml_nelements(whole)/QK_KVQ);
    if (from == GGML_TYPE_F16) {
        std::vector<ggml_fp16_t> h(x.size());
        for (size_t i = 0; i < x.size(); i++) {
            x[i] = std::min(60000.0f, std::max(-60000.0f, x[i]));
            h[i] = ggml_fp32_to_fp16(x[i]);
            x[i] = ggml_fp16_to_fp32(h[i]);
        }
        ggml_backend_tensor_set(whole, h.data(), 0, ggml_nbytes(whole));
    } else {
        ggml_backend_tensor_set(whole, x.data(), 0, ggml_nbytes(whole));
    }
    CHECK(g.compute(), "CPY to %s", f->name);

    std::vector<float> in_order(x.size());
    for (int64_t r = 0; r < ggml_nrows(dst); r++) {
        const int64_t i1 = r % dst->ne[1], i2 = r/dst->ne[1] % dst->ne[2], i3 = r/(dst->ne[1]*dst->ne[2]);
        std::copy_n(&x[permuted ? ((i3*7 + i1)*3 + i2)*96 : ((i3*7 + i2)*3 + i1)*96], 96, &in_order[r*96]);
    }
    tally t;
    compare(f, in_order, bytes_of(dst), t);
    check(t, from == GGML_TYPE_F16 ? "CPY from f16" : "CPY from f32", f->type);
}

//
// keys that are rotated and stored by one kernel
//

struct fusion_api {
    void * (*get)(ggml_backend_dev_t);
    void   (*set_enabled)(void *, bool);
    void   (*stats_init)(void *);
    void   (*stats_reset)(void *);
    int    (*stats_get)(void *, const char **, uint64_t *, int);
};

template <typename T> static void find(ggml_backend_dev_t dev, const char * name, T & f) {
    f = (T) ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(dev), name);
    CHECK(f != nullptr, "%s", name);
}

// bytes of a cache into which rows are stored after a rotation; n_fused: how often one kernel did both
static std::vector<uint8_t> store_rotated(
        ggml_backend_dev_t dev, const kvq_format * f, ggml_type index, int n, int n_head, const std::vector<float> & x, bool used_twice,
        const fusion_api & api, bool enabled, uint64_t & n_fused) {
    const int n_tokens = (int) x.size()/(n*n_head);

    graph_on g(dev);
    ggml_context * ctx = g.ctx.get();
    ggml_tensor * rot   = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, n, n);
    ggml_tensor * rows  = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, n, n_head, n_tokens);
    ggml_tensor * cache = ggml_new_tensor_2d(ctx, f->type, n*n_head, n_tokens + 3);
    ggml_tensor * ids   = ggml_new_tensor_1d(ctx, index, n_tokens);
    // as the graph of a model does it
    ggml_tensor * cur = ggml_mul_mat(ctx, rot, ggml_reshape_2d(ctx, rows, n, n_head*n_tokens));
    ggml_mul_mat_set_hint(cur, GGML_HINT_SRC0_IS_HADAMARD);
    ggml_tensor * product = cur;
    cur = ggml_reshape_3d(ctx, cur, n, n_head, n_tokens);
    cur = ggml_view_2d(ctx, cur, n*n_head, n_tokens, cur->nb[2], 0);
    ggml_tensor * out = ggml_set_rows(ctx, cache, cur, ids);
    ggml_build_forward_expand(g.graph, out);
    if (used_twice) {
        out = ggml_scale(ctx, product, 2.0f);
    }
    CHECK(g.alloc(out), "no memory");

    std::vector<float> h(size_t(n)*n); // H[i][j] = (-1)^(number of common bits), normalized
    for (int i = 0; i < n*n; i++) {
        h[i] = (__builtin_popcount((i/n) & (i % n)) & 1 ? -1.0f : 1.0f)/sqrtf(n);
    }
    ggml_backend_tensor_set(rot, h.data(), 0, ggml_nbytes(rot));
    ggml_backend_tensor_set(rows, x.data(), 0, ggml_nbytes(rows));
    std::vector<int64_t> ids64(n_tokens);
    for (int i = 0; i < n_tokens; i++) {
        ids64[i] = n_tokens + 2 - i;
    }
    std::vector<int32_t> ids32(ids64.begin(), ids64.end());
    ggml_backend_tensor_set(ids, index == GGML_TYPE_I64 ? (const void *) ids64.data() : ids32.data(), 0, ggml_nbytes(ids));
    std::vector<uint8_t> before(ggml_nbytes(cache), 0x5a);
    ggml_backend_tensor_set(cache, before.data(), 0, before.size());

    void * info = api.get(dev);
    api.set_enabled(info, enabled);
    api.stats_init(info);
    api.stats_reset(info);
    CHECK(g.compute(), "rotation and SET_ROWS");
    const char * labels[64];
    uint64_t     counts[64];
    n_fused = 0;
    for (int i = api.stats_get(info, labels, counts, 64) - 1; i >= 0; i--) {
        if (strstr(labels[i], "SET_ROWS")) {
            n_fused += counts[i];
        }
    }
    api.set_enabled(info, true);
    return bytes_of(cache);
}

static void test_store_rotated(ggml_backend_dev_t dev, const kvq_format * f) {
    fusion_api api;
    find(dev, "ggml_backend_fusion_get",         api.get);
    find(dev, "ggml_backend_fusion_set_enabled", api.set_enabled);
    find(dev, "ggml_backend_fusion_stats_init",  api.stats_init);
    find(dev, "ggml_backend_fusion_stats_reset", api.stats_reset);
    find(dev, "ggml_backend_fusion_stats_get",   api.stats_get);

    for (ggml_type index : { GGML_TYPE_I32, GGML_TYPE_I64 }) {
        for (int n : { 64, 128, 256, 512 }) { // 512 has no such kernel
            const auto x = gauss(rng, size_t(n)*3*5);
            uint64_t n_fused, n_apart, n_twice;
            const auto fused = store_rotated(dev, f, index, n, 3, x, false, api, true,  n_fused);
            const auto apart = store_rotated(dev, f, index, n, 3, x, false, api, false, n_apart);
            const auto twice = store_rotated(dev, f, index, n, 3, x, true,  api, true,  n_twice);
            const uint64_t want = n == 64 || n == 128 || n == 256;
            CHECK(n_fused == want, "%s, head of %d: fused %d times", f->name, n, (int) n_fused);
            CHECK(n_apart == 0, "%s, head of %d: fused %d times though disabled", f->name, n, (int) n_apart);
            CHECK(n_twice == 0, "%s, head of %d: fused %d times though the product is used elsewhere", f->name, n, (int) n_twice);
            // the fused kernel adds in the order of upstream's, so its rows are the same floats
            CHECK(fused == apart, "%s, head of %d: other bytes", f->name, n);
            CHECK(twice == apart, "%s, head of %d: other bytes", f->name, n);
        }
    }
}

int main() {
    ggml_backend_dev_t dev = metal_device();

    for (const auto & info : kvq_cache_types) {
        const kvq_format * f = kvq_get_format(info.type);
        if (f) {
            for (ggml_type index : { GGML_TYPE_I32, GGML_TYPE_I64 }) {
                test_set_rows(dev, f, index, 192,  29, 1);
                test_set_rows(dev, f, index, 1024,  5, 3);
            }
            test_not_finite(dev, f);
            test_store_rotated(dev, f);
            test_get_rows(dev, f->type);
            for (bool permuted : { false, true }) {
                test_copy_to(dev, f, GGML_TYPE_F32, permuted);
                test_copy_to(dev, f, GGML_TYPE_F16, permuted);
            }
        }
        if (f || info.type == GGML_TYPE_IQ4_NL) {
            for (bool permuted : { false, true }) {
                test_copy_from(dev, info.type, GGML_TYPE_F32, permuted);
                test_copy_from(dev, info.type, GGML_TYPE_F16, permuted);
            }
        }
    }
    return summary("metal-rows");
}
