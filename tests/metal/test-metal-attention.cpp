// SPDX-License-Identifier: MIT
//
// Attention on the Metal backend over every pair of cache types, against attention in float64 over the dequantized cache.
//
// usage: test-metal-attention [--all | --long] [--one-head "K/V dk=N"] [--seed N] [--case TEXT] [--verbose]
//   default:    every pair of types with each kind of batch; the other properties of a case are drawn
//   --all:      every pair with every head size and kind of batch
//   --long:     some pairs over caches so long that a threadgroup has several simdgroups
//   --one-head: one pair with one head size, each kind of batch four times
//   --case:     only cases whose text has TEXT in it

#include "metal-test.h"

#include <algorithm>
#include <array>
#include <map>
#include <set>

struct head_sizes { int dk, dv; };

// all that upstream's kernels take
static const head_sizes heads[] = {
    { 64, 64 }, { 128, 128 }, { 32, 32 }, { 96, 96 }, { 192, 192 }, { 256, 256 }, { 192, 128 }, { 96, 64 }, { 320, 256 },
    { 512, 512 }, { 576, 512 }, { 40, 40 }, { 48, 48 }, { 72, 72 }, { 80, 80 }, { 112, 112 },
};

struct fa_case {
    ggml_type type_k, type_v;
    int  dk, dv;
    int  n_q;      // queries
    int  n_kv;     // cells that are attended to
    int  n_head_kv;
    int  gqa;      // query heads of a KV head
    int  n_seq;    // ne[3]
    int  mask;     // 0: none, 1: causal, 2: causal with whole blocks masked out, 3: causal, one mask for each head
    bool alibi, softcap, sinks;
    int  view;     // 0: K and V are whole tensors, 1: views of a larger cache with rows of all heads, 2: the same, from the middle
    int  sparse;   // bound of unmasked cells a query, as the graph knows it for sparse attention; 0: unknown

    std::string text() const {
        char buf[256];
        snprintf(buf, sizeof(buf), "%s/%s dk=%d dv=%d n_q=%d n_kv=%d n_head_kv=%d gqa=%d n_seq=%d mask=%d alibi=%d softcap=%d sinks=%d view=%d sparse=%d",
            ggml_type_name(type_k), ggml_type_name(type_v), dk, dv, n_q, n_kv, n_head_kv, gqa, n_seq, mask, alibi, softcap, sinks, view, sparse);
        return buf;
    }
};

struct cache_side {
    ggml_tensor *      tensor; // the whole
    ggml_tensor *      rows;   // what attention sees: [d, n_kv, n_head_kv, n_seq]
    std::vector<float> values; // dequantized, in the order of rows
};

// shape: [d, cells, n_head_kv, n_seq], stored as a cache stores it: the heads of a cell are neighbours
static cache_side make_side(ggml_context * ctx, const fa_case & c, ggml_type type, int d) {
    const int n_cells = c.view == 0 ? c.n_kv : c.n_kv + 37;
    const int first   = c.view == 2 ? 19 : 0;

    cache_side s;
    s.tensor = ggml_new_tensor_3d(ctx, type, int64_t(d)*c.n_head_kv, n_cells, c.n_seq);
    const size_t nb1 = ggml_row_size(type, d);
    s.rows = ggml_view_4d(ctx, s.tensor, d, c.n_kv, c.n_head_kv, c.n_seq,
        s.tensor->nb[1], nb1, s.tensor->nb[2], first*s.tensor->nb[1]);
    return s;
}

static void fill_side(cache_side & s, std::mt19937 & rng, float scale) {
    // NaN where attention must not look: cells outside of the view
    const ggml_type type = s.tensor->type;
    const size_t    n    = ggml_nelements(s.tensor);
    std::vector<uint8_t> data(ggml_nbytes(s.tensor), 0xff);

    const int64_t d = s.rows->ne[0];
    s.values.resize(ggml_nelements(s.rows));
    std::vector<float> row = gauss(rng, d*s.rows->ne[2], scale);
    for (int64_t i3 = 0; i3 < s.rows->ne[3]; i3++) {
        for (int64_t i1 = 0; i1 < s.rows->ne[1]; i1++) {
            row = gauss(rng, row.size(), scale);
            const auto bytes = quantize(type, row, row.size());
            uint8_t * dst = data.data() + s.rows->view_offs + i1*s.rows->nb[1] + i3*s.rows->nb[3];
            memcpy(dst, bytes.data(), bytes.size());
            const auto back = to_float(type, bytes.data(), row.size());
            for (int64_t i2 = 0; i2 < s.rows->ne[2]; i2++) {
                std::copy_n(back.begin() + i2*d, d, s.values.begin() + ((i3*s.rows->ne[2] + i2)*s.rows->ne[1] + i1)*d);
            }
        }
    }
    ggml_backend_tensor_set(s.tensor, data.data(), 0, data.size());
    GGML_UNUSED(n);
}

// softmax(scale*q*k + mask) * v in double, with the definitions of ggml_flash_attn_ext
static std::vector<double> reference(
        const fa_case & c, const std::vector<float> & q, const std::vector<float> & k, const std::vector<float> & v,
        const std::vector<ggml_fp16_t> & mask, const std::vector<float> & sinks,
        float scale, float max_bias, float softcap) {
    const int n_head = c.n_head_kv*c.gqa;
    const int n_log2 = 1 << (int) floor(log2(n_head));
    const int n_mask = c.mask == 3 ? n_head : 1;

    std::vector<double> out(size_t(c.dv)*n_head*c.n_q*c.n_seq);
    std::vector<double> p(c.n_kv);

    for (int i3 = 0; i3 < c.n_seq; i3++) {
        for (int h = 0; h < n_head; h++) {
            const double base  = pow(2.0, -(h < n_log2 ? max_bias : max_bias/2)/n_log2);
            const double slope = max_bias > 0 ? pow(base, h < n_log2 ? h + 1 : 2*(h - n_log2) + 1) : 1.0;
            for (int i1 = 0; i1 < c.n_q; i1++) {
                const float * pq = &q[((size_t(i3)*n_head + h)*c.n_q + i1)*c.dk];
                double max = -INFINITY;
                for (int j = 0; j < c.n_kv; j++) {
                    const float * pk = &k[((size_t(i3)*c.n_head_kv + h/c.gqa)*c.n_kv + j)*c.dk];
                    double s = 0;
                    for (int i = 0; i < c.dk; i++) {
                        s += double(pq[i])*pk[i];
                    }
                    s *= scale;
                    if (softcap > 0) {
                        s = softcap*tanh(s/softcap);
                    }
                    if (c.mask) {
                        s += slope*ggml_fp16_to_fp32(mask[((size_t(i3)*n_mask + h % n_mask)*c.n_q + i1)*c.n_kv + j]);
                    }
                    p[j] = s;
                    max  = std::max(max, s);
                }
                double sum = 0;
                if (c.sinks) {
                    max  = std::max(max, double(sinks[h]));
                    sum += exp(sinks[h] - max);
                }
                for (auto & s : p) {
                    s    = exp(s - max);
                    sum += s;
                }
                double * po = &out[((size_t(i3)*c.n_q + i1)*n_head + h)*c.dv];
                for (int j = 0; j < c.n_kv; j++) {
                    const float * pv = &v[((size_t(i3)*c.n_head_kv + h/c.gqa)*c.n_kv + j)*c.dv];
                    for (int i = 0; i < c.dv; i++) {
                        po[i] += p[j]/sum*pv[i];
                    }
                }
            }
        }
    }
    return out;
}

static bool     verbose = false;
static uint64_t digest  = 0xcbf29ce484222325ull; // of all outputs

static double worst_nmse = 0;
static std::map<std::string, int> n_cases; // by kind of batch
static int n_refused = 0;

// Limit of sum (out - ref)^2 / sum ref^2. Kernels hold queries, and for many queries keys, values and probabilities too, in half:
// each rounding has a relative error uniform in +-2^-12 .. 2^-11, of variance below 2^-22/3 = 8e-8 relative to the square of what is
// rounded. A rounded query moves a score s by sqrt(8e-8)*|s|/sqrt(d), and that factor is the relative error of a probability: with
// |s| < 8 far below the others. Queries, probabilities, values, and the converted cache: 4 * 8e-8 = 3.2e-7, doubled for what a sum of few
// cells may deviate from its mean. The codec of a neighbouring format has an error of 1e-4 at least.
static const double NMSE_LIMIT = 7e-7;

// Upstream's kernel for many queries over a bf16 cache holds all this in bfloat, with 3 bits less: 4^3 times as much.
static const double NMSE_LIMIT_BF16 = 64*NMSE_LIMIT;

static void run(ggml_backend_dev_t dev, const fa_case & c, unsigned seed, float scale_v = 1.0f) {
    if (verbose) {
        fprintf(stderr, "%s\n", c.text().c_str());
    }

    std::mt19937 rng(seed);

    const int    n_head  = c.n_head_kv*c.gqa;
    const int    n_mask  = c.mask == 3 ? n_head : 1;
    const float  scale   = 1.0f/sqrtf(c.dk);
    const float  max_bias = c.alibi ? 8.0f : 0.0f;
    const float  softcap  = c.softcap ? 10.0f : 0.0f;

    graph_on g(dev);
    ggml_context * ctx = g.ctx.get();

    ggml_tensor * q = ggml_new_tensor_4d(ctx, GGML_TYPE_F32, c.dk, c.n_q, n_head, c.n_seq);
    cache_side k = make_side(ctx, c, c.type_k, c.dk);
    cache_side v = make_side(ctx, c, c.type_v, c.dv);
    ggml_tensor * mask  = c.mask  ? ggml_new_tensor_4d(ctx, GGML_TYPE_F16, c.n_kv, c.n_q, n_mask, c.n_seq) : nullptr;
    ggml_tensor * sinks = c.sinks ? ggml_new_tensor_1d(ctx, GGML_TYPE_F32, n_head) : nullptr;

    ggml_tensor * out = ggml_flash_attn_ext(ctx, q, k.rows, v.rows, mask, scale, max_bias, softcap);
    ggml_flash_attn_ext_add_sinks(out, sinks);
    if (c.sparse) {
        ggml_flash_attn_ext_set_n_kv_max(out, c.sparse);
    }

    if (!ggml_backend_dev_supports_op(dev, out)) {
        n_refused++;
        CHECK(false, "refused: %s", c.text().c_str());
        return;
    }
    if (!g.alloc(out)) {
        CHECK(false, "no memory: %s", c.text().c_str());
        return;
    }

    // scores of a few units: a softmax that is neither flat nor one cell alone
    const auto q_data = gauss(rng, ggml_nelements(q), 2.0f);
    ggml_backend_tensor_set(q, q_data.data(), 0, ggml_nbytes(q));
    fill_side(k, rng, 1.0f);
    fill_side(v, rng, scale_v);

    std::vector<ggml_fp16_t> m_data;
    if (mask) {
        const ggml_fp16_t zero = ggml_fp32_to_fp16(0.0f);
        const ggml_fp16_t minf = ggml_fp32_to_fp16(-INFINITY);
        m_data.resize(ggml_nelements(mask), zero);
        for (size_t r = 0; r < m_data.size()/c.n_kv; r++) {
            const int i1   = r % c.n_q;
            const int last = std::max(0, c.n_kv - c.n_q + i1);
            for (int j = 0; j < c.n_kv; j++) {
                auto & m = m_data[r*c.n_kv + j];
                if (j > last || (c.mask == 2 && j/64 % 2 == 1 && j != last) || (c.sparse && j % (1 + c.n_kv/40) != 0 && j != last)) {
                    m = minf;
                } else if (c.alibi) {
                    m = ggml_fp32_to_fp16(-float(last - j)/8);
                }
            }
        }
        ggml_backend_tensor_set(mask, m_data.data(), 0, ggml_nbytes(mask));
    }
    std::vector<float> s_data;
    if (sinks) {
        s_data = gauss(rng, n_head);
        ggml_backend_tensor_set(sinks, s_data.data(), 0, ggml_nbytes(sinks));
    }

    if (!g.compute()) {
        CHECK(false, "not computed: %s", c.text().c_str());
        return;
    }

    std::vector<float> got(ggml_nelements(out));
    ggml_backend_tensor_get(out, got.data(), 0, ggml_nbytes(out));
    const auto want = reference(c, q_data, k.values, v.values, m_data, s_data, scale, max_bias, softcap);

    for (size_t i = 0; i < got.size()*sizeof(float); i++) {
        digest = (digest ^ ((const uint8_t *) got.data())[i])*0x100000001b3ull; // FNV-1a
    }

    double err = 0, sum = 0;
    for (size_t i = 0; i < want.size(); i++) {
        err += (got[i] - want[i])*(got[i] - want[i]);
        sum += want[i]*want[i];
    }
    const double nmse = err/sum;
    const bool   bf16  = c.type_k == GGML_TYPE_BF16 && c.type_v == GGML_TYPE_BF16 && (c.n_q >= 20 || c.dk % 32);
    const double limit = bf16 ? NMSE_LIMIT_BF16 : NMSE_LIMIT;
    if (!bf16) {
        worst_nmse = std::max(worst_nmse, std::isfinite(nmse) ? nmse : INFINITY);
    }
    n_cases[c.n_q == 1 ? "one query" : c.n_q < 20 ? "2 to 19" : c.n_q < 32 ? "20 to 31" : "32 and more"]++;
    CHECK(nmse <= limit, "NMSE %.3g: %s", nmse, c.text().c_str());
}

// one side's codec in place of another's must be beyond the limit, or the limit shows nothing
static void test_limit(std::mt19937 & rng) {
    for (const auto & a : kvq_cache_types) {
        for (const auto & b : kvq_cache_types) {
            if (a.type == b.type) {
                continue;
            }
            const auto x = gauss(rng, 32*256);
            const auto ya = to_float(a.type, quantize(a.type, x, 32).data(), x.size());
            const auto yb = to_float(b.type, quantize(b.type, x, 32).data(), x.size());
            double err = 0, sum = 0;
            for (size_t i = 0; i < x.size(); i++) {
                err += (double(ya[i]) - yb[i])*(double(ya[i]) - yb[i]);
                sum += double(ya[i])*ya[i];
            }
            const bool both_wide = !ggml_is_quantized(a.type) && !ggml_is_quantized(b.type);
            CHECK(both_wide || err/sum > 20*NMSE_LIMIT, "%s and %s differ by %.3g only", ggml_type_name(a.type), ggml_type_name(b.type), err/sum);
        }
    }
}

// values beyond what half holds, where the types hold them: through every way
static void test_range(ggml_backend_dev_t dev, unsigned seed) {
    for (ggml_type wide : { GGML_TYPE_F32, GGML_TYPE_BF16 }) {
        for (ggml_type other : { GGML_TYPE_Q8_0, GGML_TYPE_KVQ4 }) {
            for (int n_q : { 1, 3, 24, 40 }) {
                fa_case c = {};
                c.type_k = other;
                c.type_v = wide;
                c.dk     = c.dv = 64;
                c.n_q    = n_q;
                c.n_kv   = 96;
                c.gqa    = 2;
                c.mask   = 1;
                c.n_head_kv = c.n_seq = 1;
                run(dev, c, seed + n_q, 1e6f);
            }
        }
    }
}

// The more simdgroups share the cache, the longer it is: 1, 2 and 4 of them, with and without shared heads.
static void test_long(ggml_backend_dev_t dev, unsigned seed) {
    for (int n_kv : { 1024, 2304, 4128 }) {
        for (int gqa : { 1, 3 }) {
            for (int n_q : { 1, 2 }) {
                fa_case c = {};
                c.type_k = GGML_TYPE_Q8_0;
                c.type_v = GGML_TYPE_KVQ4;
                c.dk     = c.dv = 64;
                c.n_q    = n_q;
                c.n_kv   = n_kv;
                c.gqa    = gqa;
                c.mask   = 1;
                c.n_seq  = 1;
                c.n_head_kv = 2; // with one KV head the order of heads is the same however they are counted
                run(dev, c, seed + n_kv);
            }
        }
    }
}

int main(int argc, char ** argv) {
    bool        all  = false;
    bool        only_long = false;
    unsigned    seed = 1;
    std::string only;
    std::string one;
    for (int i = 1; i < argc; i++) {
        const std::string arg = argv[i];
        if (arg == "--long") {
            only_long = true;
        } else if (arg == "--all") {
            all = true;
        } else if (arg == "--seed" && i + 1 < argc) {
            seed = atoi(argv[++i]);
        } else if (arg == "--one-head" && i + 1 < argc) {
            one = argv[++i];
        } else if (arg == "--verbose") {
            verbose = true;
        } else if (arg == "--case" && i + 1 < argc) {
            only = argv[++i];
        } else {
            fprintf(stderr, "usage: %s [--all | --long] [--one-head \"K/V dk=N\"] [--seed N] [--case TEXT] [--verbose]\n", argv[0]);
            return 2;
        }
    }

    ggml_backend_dev_t dev = metal_device();
    std::mt19937 rng(seed);
    if (only_long) {
        test_long(dev, seed);
        return summary("metal-attention");
    }
    test_limit(rng);

    const int n_heads = sizeof(heads)/sizeof(heads[0]);
    unsigned  id      = 0;

    for (const auto & tk : kvq_cache_types) {
        for (const auto & tv : kvq_cache_types) {
            // kinds of batch, each its own way through the host code: decode, small batches, direct and converted prefill
            for (int kind = 0; kind < (one.empty() ? 4 : 16); kind++) { // one head: four draws of each
                for (int ih = 0; ih < (all || !one.empty() ? n_heads : 1); ih++) {
                    id++;
                    fa_case c = {};
                    c.type_k = tk.type;
                    c.type_v = tv.type;

                    // small cases are many, large heads few: the emulated device is slow
                    const int pick = all || !one.empty() ? ih : std::min<int>(rng() % n_heads, rng() % n_heads);
                    c.dk = heads[pick].dk;
                    c.dv = heads[pick].dv;
                    if (!one.empty() && c.text().compare(0, one.size(), one) != 0) {
                        continue;
                    }
                    const bool quantized = ggml_is_quantized(tk.type) || ggml_is_quantized(tv.type);
                    if (quantized && (c.dk % 32 || c.dv % 32)) {
                        if (all || !one.empty()) {
                            continue; // rows of such heads are no whole blocks
                        }
                        c.dk = c.dv = 64;
                    }
                    const bool large = c.dk > 128;
                    const int n_q[4][3] = { { 1, 1, 1 }, { 2, 3, 7 }, { 20, 25, 31 }, { 32, 37, 64 } };
                    c.n_q       = n_q[kind % 4][rng() % 3];
                    c.n_kv      = kind % 4 == 0 ? 64 + rng() % 200 : 40 + rng() % (large ? 40 : 100);
                    if (rng() % 3 == 0) {
                        c.n_kv = (c.n_kv + 63)/64*64;
                    }
                    c.n_head_kv = 1 + rng() % 2;
                    c.gqa       = large ? 1 + rng() % 2 : 1 + rng() % 4;
                    c.n_seq     = rng() % 4 == 0 ? 2 : 1;
                    c.mask      = rng() % 4;
                    c.alibi     = c.mask && rng() % 4 == 0;
                    c.softcap   = rng() % 4 == 0;
                    c.sinks     = rng() % 4 == 0;
                    c.view      = rng() % 3;
                    c.sparse    = c.mask && c.dk % 32 == 0 && rng() % 6 == 0 ? 48 : 0;
                    if (only.empty() || c.text().find(only) != std::string::npos) {
                        run(dev, c, seed*100003 + id);
                    }
                }
            }
        }
    }

    if (one.empty() && only.empty()) {
        test_range(dev, seed);
        test_long(dev, seed);
    }

    for (const auto & n : n_cases) {
        printf("attention, queries %s: %d cases\n", n.first.c_str(), n.second);
    }
    printf("outputs %016llx\n", (unsigned long long) digest);
    printf("largest NMSE %.2e, limit %.0e\n", worst_nmse, NMSE_LIMIT);
    return summary("metal-attention");
}
