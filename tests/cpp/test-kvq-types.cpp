// SPDX-License-Identifier: MIT
//
// The formats as types of ggml, through its public API on the CPU backend: every way into a tensor and out of it,
// attention over every pair of cache types, and ids that are no types.

#include "kvq-types.h"

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "ggml-cpu.h"
#include "ggml.h"
#include "gguf.h"

#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

static int n_failed = 0;
static int n_passed = 0;

#define CHECK(cond, ...) do { \
        if (cond) { n_passed++; break; } \
        n_failed++; \
        printf("FAIL %s:%d: %s: ", __FILE__, __LINE__, #cond); \
        printf(__VA_ARGS__); \
        printf("\n"); \
    } while (0)

struct format {
    ggml_type    type;
    const char * name;
    size_t       size;
    double       max_nse; // squared error over squared values, on N(0,1)
};

static const format formats[] = {
    { GGML_TYPE_KVQ2, "kvq2", 10, 0.098   },
    { GGML_TYPE_KVQ3, "kvq3", 14, 0.0235  },
    { GGML_TYPE_KVQ4, "kvq4", 18, 0.0055  },
    { GGML_TYPE_KVQ5, "kvq5", 22, 0.0015  },
    { GGML_TYPE_KVQ6, "kvq6", 26, 0.00040 },
};

static std::mt19937 rng(1234);

static std::vector<float> gauss(size_t n, float scale = 1.0f) {
    std::normal_distribution<float> dist(0.0f, scale);
    std::vector<float> res(n);
    for (auto & v : res) {
        v = dist(rng);
    }
    return res;
}

static double nse(const std::vector<float> & x, const std::vector<float> & y) {
    double err = 0, sum = 0;
    for (size_t i = 0; i < x.size(); i++) {
        err += (double(x[i]) - y[i])*(double(x[i]) - y[i]);
        sum += double(x[i])*x[i];
    }
    return err/sum;
}

static std::vector<float> to_float(ggml_type type, const void * data, size_t n) {
    std::vector<float> res(n);
    if (type == GGML_TYPE_F32) {
        memcpy(res.data(), data, n*sizeof(float));
    } else {
        ggml_get_type_traits(type)->to_float(data, res.data(), n);
    }
    return res;
}

static std::vector<uint8_t> quantize(ggml_type type, const std::vector<float> & x) {
    std::vector<uint8_t> res(ggml_row_size(type, x.size()));
    ggml_quantize_chunk(type, x.data(), res.data(), 0, 1, x.size(), nullptr);
    return res;
}

// One graph on the CPU backend: leaves are filled by name, the bytes of the result come back.
struct graph {
    ggml_context_ptr ctx;
    std::vector<std::pair<ggml_tensor *, std::vector<uint8_t>>> leaves;

    graph() {
        ggml_init_params params = { 64*ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true };
        ctx.reset(ggml_init(params));
    }

    ggml_tensor * leaf(ggml_type type, std::vector<int64_t> ne, const void * data) {
        ggml_tensor * t = ggml_new_tensor(ctx.get(), type, ne.size(), ne.data());
        const uint8_t * bytes = (const uint8_t *) data;
        leaves.emplace_back(t, std::vector<uint8_t>(bytes, bytes + ggml_nbytes(t)));
        return t;
    }

    std::vector<uint8_t> compute(ggml_tensor * res, int n_threads = 2) {
        ggml_backend_ptr backend(ggml_backend_cpu_init());
        ggml_backend_cpu_set_n_threads(backend.get(), n_threads);
        ggml_cgraph * gf = ggml_new_graph(ctx.get());
        ggml_build_forward_expand(gf, res);
        for (int i = 0; i < ggml_graph_n_nodes(gf); i++) {
            CHECK(ggml_backend_supports_op(backend.get(), ggml_graph_node(gf, i)), "%s is not supported", ggml_op_desc(ggml_graph_node(gf, i)));
        }
        ggml_backend_buffer_ptr buf(ggml_backend_alloc_ctx_tensors(ctx.get(), backend.get()));
        for (const auto & [t, bytes] : leaves) {
            ggml_backend_tensor_set(t, bytes.data(), 0, bytes.size());
        }
        CHECK(ggml_backend_graph_compute(backend.get(), gf) == GGML_STATUS_SUCCESS, "compute failed");
        std::vector<uint8_t> out(ggml_nbytes(res));
        ggml_backend_tensor_get(res, out.data(), 0, out.size());
        return out;
    }
};

static void test_table() {
    for (const auto & f : formats) {
        CHECK(std::string(ggml_type_name(f.type)) == f.name, "%s", ggml_type_name(f.type));
        CHECK(ggml_type_size(f.type) == f.size && ggml_blck_size(f.type) == 32, "%s", f.name);
        CHECK(ggml_is_quantized(f.type), "%s", f.name);
        CHECK(ggml_row_size(f.type, 4096) == 128*f.size, "%s", f.name);
        CHECK(!ggml_quantize_requires_imatrix(f.type), "%s", f.name);

        const kvq_format * k = kvq_get_format(f.type);
        CHECK(k && k->type == f.type && k->size == f.size && std::string(k->name) == f.name, "%s", f.name);
        int extreme = 0;
        for (int m = 0; m < k->n_levels; m++) {
            CHECK(m == 0 || k->levels[m] > k->levels[m - 1], "%s: level %d is not above the one before", f.name, m);
            extreme = std::max(extreme, std::abs(k->levels[m]));
        }
        // or the outlier of a block could not be turned towards it
        CHECK(-k->levels[0] == extreme, "%s: level 0 is not the extreme one", f.name);
        // kvq_first_scale and kvq_surely_better count on it
        for (const int t : k->tries) {
            CHECK(std::abs(t) <= 1.25*256 && std::abs(t) >= 0.72*256, "%s: %d", f.name, t);
        }
        CHECK(k->tries[0] == 256, "%s", f.name);
    }
    for (int id = 0; id < GGML_TYPE_COUNT; id++) {
        const bool ours = id >= KVQ_ID_FIRST + 2 && id <= KVQ_ID_FIRST + 6;
        CHECK((kvq_get_format((ggml_type) id) != nullptr) == ours, "%d", id);
    }
    CHECK(GGML_TYPE_COUNT == KVQ_ID_LAST + 1, "%d", GGML_TYPE_COUNT);
}

static void test_quantize_chunk() {
    const size_t n = 1 << 20;
    const auto x = gauss(n);
    for (const auto & f : formats) {
        std::vector<uint8_t> q(ggml_row_size(f.type, n));
        // in pieces, as a caller with threads does it
        size_t size = 0;
        for (size_t start = 0; start < n; start += n/4) {
            size += ggml_quantize_chunk(f.type, x.data(), q.data(), start, n/4/256, 256, nullptr);
        }
        CHECK(size == q.size(), "%s: %zu bytes", f.name, size);
        CHECK(ggml_validate_row_data(f.type, q.data(), q.size()), "%s", f.name);

        const double err = nse(x, to_float(f.type, q.data(), n));
        printf("%s: squared error on N(0,1): %.6f (limit %g)\n", f.name, err, f.max_nse);
        CHECK(err <= f.max_nse, "%s: %g", f.name, err);

        const ggml_fp16_t bad[] = { 0x7e00, 0x7c00, 0xfc00 }; // NaN, inf, -inf as a scale
        for (const ggml_fp16_t d : bad) {
            memcpy(q.data() + 5*f.size, &d, sizeof(d));
            CHECK(!ggml_validate_row_data(f.type, q.data(), q.size()), "%s: scale %04x", f.name, d);
        }
    }
}

// f32, f16 -> type by SET_ROWS and CPY; type -> f32 by GET_ROWS and CPY
static void test_ways_in_and_out() {
    const int64_t n = 192, n_rows = 40;
    const auto x = gauss(n*n_rows);
    std::vector<ggml_fp16_t> x16(x.size());
    ggml_fp32_to_fp16_row(x.data(), x16.data(), x.size());
    std::vector<float> x16f(x.size());
    ggml_fp16_to_fp32_row(x16.data(), x16f.data(), x.size());

    std::vector<int64_t> order(n_rows);
    for (int64_t i = 0; i < n_rows; i++) {
        order[i] = (i*7 + 3) % n_rows;
    }
    const std::vector<int32_t> order32(order.begin(), order.end());

    for (const auto & f : formats) {
        const size_t row = ggml_row_size(f.type, n);
        const auto   q   = quantize(f.type, x);
        const auto   q16 = quantize(f.type, x16f);
        const auto   y   = to_float(f.type, q.data(), x.size());

        for (const bool half : { false, true }) {
            for (const bool wide : { false, true }) {
                graph g;
                const std::vector<uint8_t> zeros(q.size());
                ggml_tensor * dst = g.leaf(f.type, { n, n_rows }, zeros.data());
                ggml_tensor * src = half ? g.leaf(GGML_TYPE_F16, { n, n_rows }, x16.data()) : g.leaf(GGML_TYPE_F32, { n, n_rows }, x.data());
                ggml_tensor * idx = wide ? g.leaf(GGML_TYPE_I64, { n_rows }, order.data()) : g.leaf(GGML_TYPE_I32, { n_rows }, order32.data());
                const auto out = g.compute(ggml_set_rows(g.ctx.get(), dst, src, idx));
                const auto & expect = half ? q16 : q;
                bool same = true;
                for (int64_t i = 0; i < n_rows; i++) {
                    same = same && memcmp(out.data() + order[i]*row, expect.data() + i*row, row) == 0;
                }
                CHECK(same, "%s: SET_ROWS from %s stores other bytes than ggml_quantize_chunk", f.name, half ? "f16" : "f32");
            }

            graph g;
            const std::vector<uint8_t> zeros(q.size());
            ggml_tensor * dst = g.leaf(f.type, { n, n_rows }, zeros.data());
            ggml_tensor * src = half ? g.leaf(GGML_TYPE_F16, { n, n_rows }, x16.data()) : g.leaf(GGML_TYPE_F32, { n, n_rows }, x.data());
            CHECK(g.compute(ggml_cpy(g.ctx.get(), src, dst)) == (half ? q16 : q), "%s: CPY from %s", f.name, half ? "f16" : "f32");
        }
        {
            graph g;
            ggml_tensor * src = g.leaf(f.type, { n, n_rows }, q.data());
            CHECK(to_float(GGML_TYPE_F32, g.compute(ggml_cast(g.ctx.get(), src, GGML_TYPE_F32)).data(), x.size()) == y, "%s: CPY to f32", f.name);
        }
        {
            graph g;
            ggml_tensor * src = g.leaf(f.type, { n, n_rows }, q.data());
            std::vector<ggml_fp16_t> y16(y.size());
            ggml_fp32_to_fp16_row(y.data(), y16.data(), y.size());
            const auto out = g.compute(ggml_cast(g.ctx.get(), src, GGML_TYPE_F16));
            CHECK(memcmp(out.data(), y16.data(), out.size()) == 0, "%s: CPY to f16", f.name);
        }
        {
            graph g;
            const std::vector<uint8_t> zeros(q.size());
            ggml_tensor * src = g.leaf(f.type, { n, n_rows }, q.data());
            ggml_tensor * dst = g.leaf(f.type, { n, n_rows }, zeros.data());
            CHECK(g.compute(ggml_cpy(g.ctx.get(), src, dst)) == q, "%s: CPY to its own type", f.name);
        }
        {
            graph g;
            ggml_tensor * src = g.leaf(f.type, { n, n_rows }, q.data());
            ggml_tensor * idx = g.leaf(GGML_TYPE_I32, { n_rows }, order32.data());
            const auto out = to_float(GGML_TYPE_F32, g.compute(ggml_get_rows(g.ctx.get(), src, idx)).data(), x.size());
            bool same = true;
            for (int64_t i = 0; i < n_rows; i++) {
                same = same && memcmp(out.data() + i*n, y.data() + order[i]*n, n*sizeof(float)) == 0;
            }
            CHECK(same, "%s: GET_ROWS gives other values than to_float", f.name);
        }
        {
            // quantized keys with flash attention off
            const int64_t n_col = 5;
            const auto b = gauss(n*n_col);
            graph g;
            ggml_tensor * k = g.leaf(f.type, { n, n_rows }, q.data());
            ggml_tensor * v = g.leaf(GGML_TYPE_F32, { n, n_col }, b.data());
            const auto out = to_float(GGML_TYPE_F32, g.compute(ggml_mul_mat(g.ctx.get(), k, v)).data(), n_rows*n_col);
            for (int64_t c = 0; c < n_col; c++) {
                for (int64_t r = 0; r < n_rows; r++) {
                    double sum = 0, mag = 0;
                    for (int64_t i = 0; i < n; i++) {
                        sum += double(y[r*n + i])*b[c*n + i];
                        mag += std::fabs(double(y[r*n + i])*b[c*n + i]);
                    }
                    // n roundings of partial sums that are at most mag, each 2^-24 of it; a factor 2 for products
                    CHECK(std::fabs(out[c*n_rows + r] - sum) <= 2*n*mag*0x1p-24, "%s: MUL_MAT gives %g, not %g", f.name, out[c*n_rows + r], sum);
                }
            }
        }
    }
}

// What a block does with values that are not ordinary ones, through the traits that everybody uses.
static void test_edges() {
    const float inf = std::numeric_limits<float>::infinity();
    const float nan = std::numeric_limits<float>::quiet_NaN();
    const float max = std::numeric_limits<float>::max();

    for (const auto & f : formats) {
        const auto round_trip = [&](std::vector<float> x) {
            std::vector<uint8_t> a(ggml_row_size(f.type, x.size())), b(a.size());
            ggml_get_type_traits(f.type)->from_float_ref(x.data(), a.data(), x.size());
            ggml_get_type_traits_cpu(f.type)->from_float(x.data(), b.data(), x.size());
            CHECK(a == b, "%s: the CPU's encoder stores other bytes than the reference", f.name);
            return to_float(f.type, a.data(), x.size());
        };

        for (const float v : round_trip(std::vector<float>(64, 0.0f))) {
            CHECK(v == 0.0f, "%s: zeros become %g", f.name, v);
        }
        for (const float v : round_trip(std::vector<float>(32, 1e-40f))) {
            CHECK(v == 0.0f, "%s: a denormal becomes %g", f.name, v);
        }
        for (const float big : { 1e6f, 1e30f, max, -max }) {
            auto x = gauss(32);
            x[13] = big;
            for (const float v : round_trip(x)) {
                CHECK(std::isfinite(v), "%s: with %g, a value becomes %g", f.name, big, v);
            }
            CHECK(round_trip(x)[13]*big > 0, "%s: %g loses its sign", f.name, big);
        }
        for (const float bad : { inf, -inf, nan }) {
            auto x = gauss(96);
            x[40] = bad;
            const auto y = round_trip(x);
            for (int i = 0; i < 96; i++) {
                CHECK(std::isnan(y[i]) == (i/32 == 1), "%s: with %g in block 1, value %d becomes %g", f.name, bad, i, y[i]);
            }
        }
    }
}

// Attention over rows that were stored with SET_ROWS, against double over the decoded rows: every pair of types.
// A few queries, a tile of them and an incomplete one (64 + 6), and one over a cache that is split among threads (from 512).
// tests/cpp/test-kvq-attn.cpp has all else about attention.
static void test_attention(int64_t n_q, int64_t n_kv) {
    const int64_t d = 64, n_head = 4, n_head_kv = 2;
    const auto k = gauss(d*n_kv*n_head_kv);
    const auto v = gauss(d*n_kv*n_head_kv);
    const auto q = gauss(d*n_q*n_head, 2.0f);
    const float scale = 1.0f/std::sqrt(float(d));
    double worst[4][2] = {};

    const auto stored = [](ggml_type type, const std::vector<float> & x) {
        graph g;
        std::vector<int64_t> idx(x.size()/64);
        for (size_t i = 0; i < idx.size(); i++) {
            idx[i] = i;
        }
        const int64_t n_rows = idx.size();
        const std::vector<uint8_t> zeros(ggml_row_size(type, 64)*n_rows);
        ggml_tensor * dst = g.leaf(type, { 64, n_rows }, zeros.data());
        return g.compute(ggml_set_rows(g.ctx.get(), dst, g.leaf(GGML_TYPE_F32, { 64, n_rows }, x.data()), g.leaf(GGML_TYPE_I64, { n_rows }, idx.data())));
    };

    for (const auto & tk : kvq_cache_types) {
        const auto kq = stored(tk.type, k);
        const auto kf = to_float(tk.type, kq.data(), k.size());
        for (const auto & tv : kvq_cache_types) {
            const auto vq = stored(tv.type, v);
            const auto vf = to_float(tv.type, vq.data(), v.size());

            graph g;
            ggml_tensor * tq = g.leaf(GGML_TYPE_F32, { d, n_q, n_head }, q.data());
            ggml_tensor * out = ggml_flash_attn_ext(g.ctx.get(), tq, g.leaf(tk.type, { d, n_kv, n_head_kv }, kq.data()),
                g.leaf(tv.type, { d, n_kv, n_head_kv }, vq.data()), nullptr, scale, 0.0f, 0.0f);
            const auto res = to_float(GGML_TYPE_F32, g.compute(out).data(), d*n_head*n_q);

            double err = 0, sum = 0;
            for (int64_t h = 0; h < n_head; h++) {
                for (int64_t iq = 0; iq < n_q; iq++) {
                    std::vector<double> p(n_kv);
                    double total = 0;
                    for (int64_t j = 0; j < n_kv; j++) {
                        double s = 0;
                        for (int64_t i = 0; i < d; i++) {
                            s += double(q[(h*n_q + iq)*d + i])*kf[((h/2)*n_kv + j)*d + i];
                        }
                        p[j] = std::exp(s*scale);
                        total += p[j];
                    }
                    for (int64_t i = 0; i < d; i++) {
                        double o = 0;
                        for (int64_t j = 0; j < n_kv; j++) {
                            o += p[j]/total*vf[((h/2)*n_kv + j)*d + i];
                        }
                        const double diff = res[(iq*n_head + h)*d + i] - o;
                        err += diff*diff;
                        sum += o*o;
                    }
                }
            }
            // Squared error relative to the output. A change of a score by e changes its weight by a factor 1 + e; attention
            // averages such errors as it averages values, so they come out as about e*e of the output's square.
            // - With a quantized side it is our attention. A query of 16 bits is off by 1/sqrt(12) of a step of max/32512, and
            //   max is about 3.5 times the rms: by 3.1e-5 relative to it, scores of variance 4 by 6e-5, 4e-9 as a square.
            //   Weights are rounded in steps of 1/32512 of the largest of a tile, which is some ten times the rms of all:
            //   (10/32512)^2/12, 8e-9. A factor of 4 for luck.
            // - Floats take upstream's path. f16 and bf16 keys meet a query of their own width: 2^-22/3 and 2^-16/3 of the
            //   scores' square; f16 values are summed up in f16 outside of tiles: 2^-22/3 of a partial sum's square for each
            //   row; else all is f32. The output's square is a few tens of times smaller than a value's.
            const bool ours   = ggml_is_quantized(tk.type) || ggml_is_quantized(tv.type);
            const int  kind_k = ours ? 0 : tk.type == GGML_TYPE_BF16 ? 1 : tk.type == GGML_TYPE_F16 ? 2 : 3;
            const int  kind_v = !ours && tv.type == GGML_TYPE_F16;
            const double from_k[] = { 5e-8, 2e-5, 1e-6, 1e-11 };
            const double from_v[] = { 0.0, 1e-7*n_kv };
            const double limit = from_k[kind_k] + from_v[kind_v];
            worst[kind_k][kind_v] = std::max(worst[kind_k][kind_v], err/sum);
            CHECK(err/sum <= limit, "K %s, V %s: error %g", ggml_type_name(tk.type), ggml_type_name(tv.type), err/sum);
        }
    }
    printf("attention, %d queries, %d rows, worst squared error: with a quantized side %.1e; floats, keys bf16 %.1e (values f16 %.1e), f16 %.1e (%.1e), f32 %.1e (%.1e)\n",
        int(n_q), int(n_kv), worst[0][0], worst[1][0], worst[1][1], worst[2][0], worst[2][1], worst[3][0], worst[3][1]);
}

// Ids between upstream's types and ours, and outside of all.
static void test_gaps() {
    for (int id = KVQ_UPSTREAM_TYPE_COUNT; id < GGML_TYPE_COUNT; id++) {
        if (kvq_get_format((ggml_type) id)) {
            continue;
        }
        CHECK(ggml_type_name((ggml_type) id) == nullptr, "%d", id);
        CHECK(ggml_blck_size((ggml_type) id) == 0 && ggml_type_size((ggml_type) id) == 0, "%d", id);
        CHECK(ggml_row_size((ggml_type) id, 64) == 0, "%d", id);
    }

    // a file with one tensor, whose type is then overwritten
    const auto x = gauss(64);
    const auto q = quantize(GGML_TYPE_KVQ4, x);
    graph g;
    ggml_init_params params = { 2*ggml_tensor_overhead() + 4096, nullptr, false };
    ggml_context_ptr ctx(ggml_init(params));
    ggml_tensor * t = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_KVQ4, 64);
    ggml_set_name(t, "t");
    memcpy(t->data, q.data(), q.size());

    gguf_context_ptr out(gguf_init_empty());
    gguf_add_tensor(out.get(), t);
    FILE * tmp = tmpfile();
    CHECK(tmp && gguf_write_to_file_ptr(out.get(), tmp, false), "no file");

    fseek(tmp, 0, SEEK_END);
    std::vector<uint8_t> bytes(ftell(tmp));
    rewind(tmp);
    CHECK(fread(bytes.data(), 1, bytes.size(), tmp) == bytes.size(), "short read");

    const auto read_back = [&](int32_t id) {
        auto changed = bytes;
        int n_places = 0;
        const int32_t old = GGML_TYPE_KVQ4;
        for (size_t i = 0; i + sizeof(old) <= changed.size(); i++) {
            if (memcmp(changed.data() + i, &old, sizeof(old)) == 0) {
                memcpy(changed.data() + i, &id, sizeof(id));
                n_places++;
                break;
            }
        }
        CHECK(n_places == 1, "the type is not in the file");
        FILE * f = tmpfile();
        fwrite(changed.data(), 1, changed.size(), f);
        rewind(f);
        ggml_context * data = nullptr;
        gguf_init_params p = { false, &data };
        gguf_context_ptr in(gguf_init_from_file_ptr(f, p));
        fclose(f);
        ggml_context_ptr keep(data);
        return in && data && memcmp(ggml_get_tensor(data, "t")->data, q.data(), q.size()) == 0;
    };

    CHECK(read_back(GGML_TYPE_KVQ4), "a tensor of kvq4 doesn't come back from a file");
    for (int id = KVQ_UPSTREAM_TYPE_COUNT; id < 600; id++) {
        if (id >= GGML_TYPE_COUNT || !kvq_get_format((ggml_type) id)) {
            CHECK(!read_back(id), "a file with type %d is read", id);
        }
    }
    fclose(tmp);
}

int main() {
    ggml_log_set([](ggml_log_level, const char *, void *) {}, nullptr); // refused files are what is tested

    test_table();
    test_quantize_chunk();
    test_ways_in_and_out();
    test_edges();
    test_attention(3, 96);
    test_attention(70, 96);
    test_attention(1, 601);
    test_gaps();

    printf("%d passed, %d failed\n", n_passed, n_failed);
    return n_failed ? 1 : 0;
}
