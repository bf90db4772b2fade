// SPDX-License-Identifier: MIT
//
// What a cache does with values that aren't ordinary ones. Usage: test-kvq-honesty [--all] [--upstream]
//
//   rows       rows of zeros, denormals, f16's largest values, outliers, constants, stored and read back through every operation
//   finite     attention over such rows: every pair of types
//   masked     what lies behind a mask, be it garbage, changes nothing
//   poison     a NaN or an infinity reaches what attends to it
//
// --upstream: attention by upstream's path row by row, for every pair. With GGML_KVQ_FA_FLOAT=1 in the environment ours takes floats, too.
//
// The rules, with f16 as the measure. They were measured first; docs/numerics.md has the formats' part.
//
// 1. Finite values within f16's range (65504) come back finite from every type, and within the error that the type's levels
//    allow: it follows from the largest value of the block.
// 2. Beyond that range f16 becomes an infinity. bf16 and f32 keep the value. Upstream's quantized types do so as long as
//    their scale fits f16 (8e6 for q8_0, 524032 for q4_0), and then become infinities or NaN. Ours saturate: a value is the nearest
//    to it that the largest scale reaches, at least 3.6e6 in magnitude and with its sign, so none that f16 could have held.
//    No type turns such a value into a number within f16's range.
// 3. Attention over finite rows within f16's range is finite, and within the range of the values it averages.
//    Two exceptions, upstream's, on its path row by row. f16 values are summed up in f16 before they are divided by the sum of the
//    weights, so they overflow where the sum of what they weigh does. And beside keys of q4_1 or q5_1 the sum of 32 values of a
//    query has to fit f16. A pair with a quantized side is ours, which has neither.
// 4. What isn't a number when stored isn't one when read: an output that is NaN or infinite with an f16 cache is so with
//    every other type. In a block format a whole block is lost, so it may be more outputs, but of the same queries and heads.
// 5. A position that is masked for a query doesn't change its output, whatever is stored there.

#include "kvq-types.h"

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "ggml-cpu.h"
#include "ggml.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <map>
#include <random>
#include <string>
#include <vector>

static int  n_failed = 0;
static long n_passed = 0;

#define CHECK(cond, ...) do { \
        if (cond) { n_passed++; break; } \
        if (++n_failed > 200) { break; } \
        printf("FAIL %s:%d: %s: ", __FILE__, __LINE__, #cond); \
        printf(__VA_ARGS__); \
        printf("\n"); \
    } while (0)

static const float HALF_MAX = 65504.0f;
static const float INF      = std::numeric_limits<float>::infinity();
static const float NOT_A    = std::numeric_limits<float>::quiet_NaN();

static const int64_t D = 64; // values of a head: two blocks

using floats = std::vector<float>;
using bytes  = std::vector<uint8_t>;

static ggml_backend_t backend = nullptr;
static long           n_graphs = 0;
static bool           reference = false; // --upstream
static bool           ours_all  = false; // GGML_KVQ_FA_FLOAT

// One graph on the backend that is tested.
struct graph {
    ggml_context_ptr ctx;
    std::vector<std::pair<ggml_tensor *, bytes>> leaves;

    graph() {
        ctx.reset(ggml_init({ 16*ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true }));
    }

    ggml_tensor * leaf(ggml_type type, std::vector<int64_t> ne, const void * data) {
        ggml_tensor * t = ggml_new_tensor(ctx.get(), type, ne.size(), ne.data());
        leaves.emplace_back(t, bytes((const uint8_t *) data, (const uint8_t *) data + ggml_nbytes(t)));
        return t;
    }

    bool can(const ggml_tensor * res) const { return ggml_backend_supports_op(backend, res); }

    bytes compute(ggml_tensor * res) {
        ggml_cgraph * gf = ggml_new_graph(ctx.get());
        ggml_build_forward_expand(gf, res);
        ggml_backend_buffer_ptr buf(ggml_backend_alloc_ctx_tensors(ctx.get(), backend));
        for (const auto & [t, data] : leaves) {
            ggml_backend_tensor_set(t, data.data(), 0, data.size());
        }
        CHECK(ggml_backend_graph_compute(backend, gf) == GGML_STATUS_SUCCESS, "%s failed", ggml_op_desc(res));
        bytes out(ggml_nbytes(res));
        ggml_backend_tensor_get(res, out.data(), 0, out.size());
        n_graphs++;
        return out;
    }
};

static floats as_floats(const bytes & b) {
    floats res(b.size()/sizeof(float));
    memcpy(res.data(), b.data(), b.size());
    return res;
}

static floats to_float(ggml_type type, const bytes & data, size_t n) {
    if (type == GGML_TYPE_F32) {
        return as_floats(data);
    }
    floats res(n);
    ggml_get_type_traits(type)->to_float(data.data(), res.data(), n);
    return res;
}

//
// rows
//

enum store_way { SET_ROWS_F32, CPY_F32, SET_ROWS_F16, CPY_F16, N_STORE_WAYS };
static const char * const store_names[] = { "SET_ROWS", "CPY", "SET_ROWS from f16", "CPY from f16" };

// rows of D values as a cache of that type has them; empty if the backend has no such operation
static bytes store(ggml_type type, const floats & x, store_way way = SET_ROWS_F32) {
    const int64_t n_rows = x.size()/D;
    std::vector<int64_t> idx(n_rows);
    for (int64_t i = 0; i < n_rows; i++) {
        idx[i] = i;
    }
    std::vector<ggml_fp16_t> x16(x.size());
    ggml_fp32_to_fp16_row(x.data(), x16.data(), x.size());

    graph g;
    const bytes before(ggml_row_size(type, D)*n_rows, 0x5a); // what no way may leave
    const bool half = way == SET_ROWS_F16 || way == CPY_F16;
    ggml_tensor * dst = g.leaf(type, { D, n_rows }, before.data());
    ggml_tensor * src = half ? g.leaf(GGML_TYPE_F16, { D, n_rows }, x16.data()) : g.leaf(GGML_TYPE_F32, { D, n_rows }, x.data());
    ggml_tensor * res = way == CPY_F32 || way == CPY_F16 ? ggml_cpy(g.ctx.get(), src, dst) :
        ggml_set_rows(g.ctx.get(), dst, src, g.leaf(GGML_TYPE_I64, { n_rows }, idx.data()));
    return g.can(res) ? g.compute(res) : bytes();
}

struct row_kind {
    std::string name;
    floats      x;        // D values
    bool        in_range; // all within f16's
};

static std::vector<row_kind> row_kinds() {
    std::mt19937 rng(7);
    std::normal_distribution<float> gauss;
    std::uniform_real_distribution<float> uniform(-1.0f, 1.0f);
    std::vector<row_kind> res;
    const auto add = [&](const char * name, auto value) {
        row_kind k = { name, floats(D), true };
        for (int64_t i = 0; i < D; i++) {
            k.x[i] = value(i);
            k.in_range = k.in_range && std::fabs(k.x[i]) <= HALF_MAX;
        }
        res.push_back(k);
    };
    add("zeros",                     [&](int64_t)   { return 0.0f; });
    add("minus zeros",               [&](int64_t i) { return i % 2 ? -0.0f : 0.0f; });
    add("f32 denormals",             [&](int64_t)   { return 1e-40f*uniform(rng); });
    add("smallest denormal",         [&](int64_t)   { return FLT_TRUE_MIN; });
    add("smallest normal",           [&](int64_t i) { return i % 3 ? FLT_MIN : -FLT_MIN; });
    add("f16 denormals",             [&](int64_t)   { return 6e-5f*uniform(rng); });
    add("a denormal among zeros",    [&](int64_t i) { return i == 40 ? 1e-7f : 0.0f; });
    add("normal",                    [&](int64_t)   { return gauss(rng); });
    add("constant",                  [&](int64_t)   { return 0.7f; });
    add("negative constant",         [&](int64_t)   { return -31.0f; });
    add("alternating",               [&](int64_t i) { return i % 2 ? -1.0f : 1.0f; });
    add("one among zeros",           [&](int64_t i) { return i == 5 ? -3.0f : 0.0f; });
    add("largest",                   [&](int64_t)   { return HALF_MAX; });
    add("most negative",             [&](int64_t)   { return -HALF_MAX; });
    add("largest, alternating",      [&](int64_t i) { return i % 2 ? -HALF_MAX : HALF_MAX; });
    add("largest and normal",        [&](int64_t i) { return i == 17 ? HALF_MAX : gauss(rng); });
    add("most negative among tiny",  [&](int64_t i) { return i == 63 ? -HALF_MAX : 1e-6f*gauss(rng); });
    add("all magnitudes",            [&](int64_t)   { return std::copysign(std::pow(10.0f, 6.4f*uniform(rng) - 1.6f), uniform(rng)); });
    add("a block of zeros",          [&](int64_t i) { return i < 32 ? 0.0f : 100.0f*gauss(rng); });
    // beyond f16
    add("beyond f16",                [&](int64_t i) { return i % 2 ? -7e4f : 7e4f; });
    add("beyond f16 among normal",   [&](int64_t i) { return i == 9 ? 1e5f : gauss(rng); });
    add("1e6",                       [&](int64_t i) { return i == 33 ? -1e6f : 1e6f*uniform(rng); });
    add("scales of f16 end",         [&](int64_t i) { return (i % 2 ? -1.0f : 1.0f)*(8.2e6f + 1e4f*i); });
    add("1e30",                      [&](int64_t)   { return 1e30f; });
    add("1e30 among normal",         [&](int64_t i) { return i == 40 ? -1e30f : gauss(rng); });
    add("1e30 and 1e6",              [&](int64_t i) { return i % 4 ? 1e6f : -1e30f; });
    add("FLT_MAX",                   [&](int64_t i) { return i % 2 ? -FLT_MAX : FLT_MAX; });
    add("FLT_MAX among zeros",       [&](int64_t i) { return i == 0 ? FLT_MAX : 0.0f; });
    return res;
}

// The largest error of a value, relative to the largest value of its block, that rounding to the type's levels may leave; for
// our formats, the root of the mean squared error of a block.
static double step_of(ggml_type type) {
    // a scale is rounded to f16, half of 2^-10 of it
    const double scale = 0x1p-11;
    switch (type) {
        case GGML_TYPE_F32:  return 0.0;
        case GGML_TYPE_F16:  return 0x1p-11;
        case GGML_TYPE_BF16: return 0x1p-8; // a negligible part more than 2^-9; upstream may truncate
        case GGML_TYPE_Q8_0: return 0.5/127 + scale + 1e-6;
        // -8 ... 7 with the largest value at -8: its opposite is off by a whole step
        case GGML_TYPE_Q4_0: return 1.0/8 + scale + 1e-6;
        case GGML_TYPE_Q5_0: return 1.0/16 + scale + 1e-6;
        // from the smallest to the largest value, at most twice the magnitude apart; step and minimum are rounded
        case GGML_TYPE_Q4_1: return 0.5*2/15 + 3*scale + 1e-6;
        case GGML_TYPE_Q5_1: return 0.5*2/31 + 3*scale + 1e-6;
        // -127 ... 113, the largest value at -127; gaps of at most 24. The scale is refitted by least squares, weighted by the
        // squares of values, which brings the largest one nearer and moves others by no more than it was off
        case GGML_TYPE_IQ4_NL: return 2*14.0/127 + scale;
        default: break;
    }
    // Ours: the squared error of a block isn't above that of scaling the largest value to levels[0] (kvq-formats.h). From each
    // state every second level is within reach, l[m], l[m + 2] ...: a path that always takes the nearest has errors of
    // at most half such a gap, or of what the extreme level falls short on the other side.
    const kvq_format * f = kvq_get_format(type);
    double worst = 0;
    for (int m = 0; m + 2 < f->n_levels; m++) {
        worst = std::max(worst, 0.5*(f->levels[m + 2] - f->levels[m]));
    }
    worst = std::max(worst, double(f->levels[1]) - f->levels[0]); // an extreme that this state can't reach
    worst = std::max(worst, -double(f->levels[0]) - f->levels[f->n_levels - 2]);
    return worst/-f->levels[0] + scale;
}

// y against x, block by block; `saturate`: the largest value that the type has, 0: it has inf.
static void check_rows(ggml_type type, const row_kind & kind, const floats & x, const floats & y, const char * way) {
    const double step = step_of(type);
    const kvq_format * f = kvq_get_format(type);
    for (int64_t b = 0; b < D; b += 32) {
        double largest = 0, err = 0, worst = 0;
        int    n_lost  = 0;
        bool   in_range = true;
        for (int64_t i = b; i < b + 32; i++) {
            largest  = std::max(largest, std::fabs(double(x[i])));
            in_range = in_range && std::fabs(x[i]) <= HALF_MAX;
        }
        // the extreme level of the other sign is the lower bound of what a saturated block can reach
        const double sat = f ? double(HALF_MAX)*f->levels[f->n_levels - 2] : HUGE_VAL;
        bool sign = true;
        for (int64_t i = b; i < b + 32; i++) {
            if (!std::isfinite(y[i])) {
                n_lost++;
                continue;
            }
            double e = std::fabs(double(y[i]) - x[i]);
            if (f && std::fabs(x[i]) > sat) { // saturated
                sign = sign && y[i]*x[i] > 0 && std::fabs(y[i]) > HALF_MAX;
                e = std::max(0.0, sat - std::fabs(double(y[i])));
            }
            err  += e*e;
            worst = std::max(worst, e);
        }
        if (in_range || f || type == GGML_TYPE_F32) {
            CHECK(n_lost == 0, "%s of %s, %s: %d values of block %d aren't finite", way, kind.name.c_str(), ggml_type_name(type), n_lost, int(b/32));
        }
        // the error of a scale or of a value that is a denormal of f16, times the largest level, 127
        const double limit = step*std::min(largest, f ? HALF_MAX*-double(f->levels[0]) : HUGE_VAL) + (type == GGML_TYPE_F32 ? 0.0 : 0x1p-25*127);
        const double seen  = f ? std::sqrt(err/32) : worst;
        CHECK(seen <= limit, "%s of %s, %s: block %d is off by %g, at most %g", way, kind.name.c_str(), ggml_type_name(type), int(b/32), seen, limit);
        CHECK(sign, "%s of %s, %s: a value beyond the largest level lost its sign, or is within f16's range", way, kind.name.c_str(), ggml_type_name(type));
    }
}

static void test_rows() {
    const auto kinds = row_kinds();
    floats all;
    for (const auto & k : kinds) {
        all.insert(all.end(), k.x.begin(), k.x.end());
    }
    const int64_t n_rows = kinds.size();
    long n = 0;

    for (const auto & info : kvq_cache_types) {
        for (int way = 0; way < N_STORE_WAYS; way++) {
            const bool half = way == SET_ROWS_F16 || way == CPY_F16;
            floats x = all;
            if (half) {
                std::vector<ggml_fp16_t> h(x.size());
                for (float & v : x) {
                    v = std::max(-HALF_MAX, std::min(HALF_MAX, v));
                }
                ggml_fp32_to_fp16_row(x.data(), h.data(), x.size());
                ggml_fp16_to_fp32_row(h.data(), x.data(), x.size());
            }
            const bytes data = store(info.type, x, (store_way) way);
            if (data.empty()) {
                continue;
            }
            // out by GET_ROWS, by CPY, and by what everybody calls
            std::vector<std::pair<std::string, floats>> outs = { { "to_float", to_float(info.type, data, x.size()) } };
            {
                graph g;
                std::vector<int32_t> idx(n_rows);
                for (int i = 0; i < n_rows; i++) {
                    idx[i] = i;
                }
                ggml_tensor * res = ggml_get_rows(g.ctx.get(), g.leaf(info.type, { D, n_rows }, data.data()), g.leaf(GGML_TYPE_I32, { n_rows }, idx.data()));
                if (g.can(res)) {
                    outs.emplace_back("GET_ROWS", as_floats(g.compute(res)));
                }
            }
            {
                graph g;
                ggml_tensor * res = ggml_cast(g.ctx.get(), g.leaf(info.type, { D, n_rows }, data.data()), GGML_TYPE_F32);
                if (g.can(res)) {
                    outs.emplace_back("CPY", as_floats(g.compute(res)));
                }
            }
            for (const auto & [out, y] : outs) {
                const std::string through = std::string(store_names[way]) + ", " + out;
                for (int64_t r = 0; r < n_rows; r++) {
                    check_rows(info.type, kinds[r], floats(x.begin() + r*D, x.begin() + (r + 1)*D), floats(y.begin() + r*D, y.begin() + (r + 1)*D), through.c_str());
                    n++;
                }
            }
        }
    }
    printf("rows: %ld rows of %d kinds, stored and read\n", n, int(n_rows));
}

// A value that is none, at every place of a block: it is none when it comes back, and no other block is touched.
static void test_lost_rows() {
    long n = 0;
    std::mt19937 rng(11);
    std::normal_distribution<float> dist;
    for (const auto & info : kvq_cache_types) {
        for (int way = 0; way < N_STORE_WAYS; way++) {
            for (const float bad : { NOT_A, -NOT_A, INF, -INF }) {
                floats x(D*D);
                for (float & v : x) {
                    v = dist(rng);
                }
                floats clean = to_float(info.type, store(info.type, x, (store_way) way), x.size());
                for (int64_t i = 0; i < D; i++) {
                    x[i*D + i] = bad;
                }
                const bytes data = store(info.type, x, (store_way) way);
                if (data.empty()) {
                    continue;
                }
                const floats y = to_float(info.type, data, x.size());
                int n_kept = 0, n_other = 0;
                for (int64_t r = 0; r < D; r++) {
                    n_kept += std::isfinite(y[r*D + r]);
                    for (int64_t i = 0; i < D; i++) {
                        const bool apart = ggml_is_quantized(info.type) ? i/32 != r/32 : i != r;
                        n_other += apart && memcmp(&y[r*D + i], &clean[r*D + i], sizeof(float)) != 0;
                    }
                }
                n += D;
                CHECK(n_kept == 0, "%s of %g, %s: comes back as a number in %d of %d rows", store_names[way], bad, ggml_type_name(info.type), n_kept, int(D));
                CHECK(n_other == 0, "%s of %g, %s: %d values of other blocks are changed", store_names[way], bad, ggml_type_name(info.type), n_other);
            }
        }
    }
    printf("lost rows: %ld\n", n);
}

//
// attention
//

static const int64_t N_HEAD    = 4; // query heads
static const int64_t N_HEAD_KV = 2;

struct shape {
    int64_t n_q, n_kv;
    bool    masked, softcap, sinks, alibi;
};

static std::string text(const shape & s) {
    return std::to_string(s.n_q) + " queries, " + std::to_string(s.n_kv) + " rows" + (s.masked ? ", mask" : "") + (s.softcap ? ", softcap" : "") +
        (s.sinks ? ", sinks" : "") + (s.alibi ? ", ALiBi" : "");
}

// k, v: as stored, [N_HEAD_KV][n_kv][D]; q: [N_HEAD][n_q][D]; mask: [n_q][n_kv]. Result: [n_q][N_HEAD][D]; empty: no such operation.
static floats attend(ggml_type type_k, const bytes & k, ggml_type type_v, const bytes & v, const floats & q, const std::vector<ggml_fp16_t> & mask, const shape & s) {
    graph g;
    static const float sinks[N_HEAD] = { 0.5f, -2.0f, 3.0f, 0.0f };
    ggml_tensor * res = ggml_flash_attn_ext(g.ctx.get(), g.leaf(GGML_TYPE_F32, { D, s.n_q, N_HEAD }, q.data()),
        g.leaf(type_k, { D, s.n_kv, N_HEAD_KV }, k.data()), g.leaf(type_v, { D, s.n_kv, N_HEAD_KV }, v.data()),
        s.masked ? g.leaf(GGML_TYPE_F16, { s.n_kv, s.n_q }, mask.data()) : nullptr, 0.125f, s.alibi ? 8.0f : 0.0f, s.softcap ? 30.0f : 0.0f);
    if (s.sinks) {
        ggml_flash_attn_ext_add_sinks(res, g.leaf(GGML_TYPE_F32, { N_HEAD }, sinks));
    }
    return g.can(res) ? as_floats(g.compute(res)) : floats();
}

// Whether values are summed up in f16: by upstream's path row by row. 64 queries of f16 alone go through tiles of f32, and ours
// takes what has a quantized side.
static bool sums_in_f16(ggml_type type_k, ggml_type type_v, const shape & s) {
    if (type_v != GGML_TYPE_F16) {
        return false;
    }
    return reference || (!ours_all && !ggml_is_quantized(type_k) && !(type_k == GGML_TYPE_F16 && s.n_q >= 64));
}

// Whether a query's sum over a block has to fit f16: with keys that have a minimum, upstream's path makes the query q8_1.
static bool sums_query_in_f16(ggml_type type_k) {
    return reference && (type_k == GGML_TYPE_Q4_1 || type_k == GGML_TYPE_Q5_1);
}

static floats gauss(std::mt19937 & rng, size_t n, float scale = 1.0f) {
    std::normal_distribution<float> dist(0.0f, scale);
    floats res(n);
    for (float & v : res) {
        v = dist(rng);
    }
    return res;
}

static const ggml_fp16_t ZERO16 = 0x0000;
static const ggml_fp16_t MINF16 = 0xfc00;

static void test_finite(bool all) {
    std::vector<row_kind> kinds;
    for (const auto & k : row_kinds()) {
        if (k.in_range) {
            kinds.push_back(k);
        }
    }
    // extremes among extremes: a few positions get all weight. Keys of zeros: all positions weigh the same, so every extreme
    // value counts. Queries of extremes: scores up to 64*65504^2.
    enum { EXTREME_KV, EVEN_WEIGHTS, EXTREME_QUERIES, N_SCENARIOS };
    const std::vector<shape> shapes = {
        {  1,  40, false, false, false, false }, {  1, 600, true,  false, true,  false }, { 70, 150, true,  false, false, true  },
        {  5,  40, true,  true,  false, true  }, {  1,  40, true,  true,  true,  true  }, { 70, 150, false, true,  true,  false },
    };
    long n = 0, n_overflow = 0;
    for (int scenario = 0; scenario < N_SCENARIOS; scenario++) {
        std::map<int64_t, std::map<ggml_type, bytes>> stored[2];
        std::map<int64_t, std::map<ggml_type, floats>> decoded;
        for (size_t i_shape = 0; i_shape < shapes.size(); i_shape++) {
            const shape & s = shapes[i_shape];
            std::mt19937 rng(31*scenario + i_shape);
            const int64_t n_rows = s.n_kv*N_HEAD_KV;
            floats k, v;
            for (int64_t r = 0; r < n_rows; r++) {
                const auto & a = kinds[r % kinds.size()].x;
                const auto & b = kinds[(5*r + 3) % kinds.size()].x;
                k.insert(k.end(), a.begin(), a.end());
                v.insert(v.end(), b.begin(), b.end());
            }
            if (scenario == EVEN_WEIGHTS) {
                std::fill(k.begin(), k.end(), 0.0f);
            }
            floats q = gauss(rng, s.n_q*N_HEAD*D);
            if (scenario == EXTREME_QUERIES) {
                for (size_t r = 0; r < q.size()/D; r++) {
                    const auto & a = kinds[r % kinds.size()].x;
                    std::copy(a.begin(), a.end(), q.begin() + r*D);
                }
            }
            std::vector<ggml_fp16_t> mask(s.n_q*s.n_kv, ZERO16);
            for (int64_t i = 0; i < s.n_q; i++) {
                for (int64_t j = 0; j < s.n_kv; j++) {
                    if (j % 7 == i % 7 || (i == 3 && s.n_q > 3)) { // a query that attends to nothing
                        mask[i*s.n_kv + j] = MINF16;
                    } else if (s.alibi) {
                        mask[i*s.n_kv + j] = ggml_fp32_to_fp16(-float(s.n_kv - j));
                    }
                }
            }
            std::map<ggml_type, bytes> ks, vs;
            std::map<ggml_type, floats> vf;
            for (const auto & info : kvq_cache_types) {
                ks[info.type] = store(info.type, k);
                vs[info.type] = store(info.type, v);
                vf[info.type] = to_float(info.type, vs[info.type], v.size());
            }
            size_t i_pair = 0;
            for (const auto & tk : kvq_cache_types) {
                for (const auto & tv : kvq_cache_types) {
                    // each pair meets three shapes of six in a scenario, and all of them in all; upstream's slow path one
                    if (!all && (i_pair++ + i_shape + scenario) % (reference ? 6 : 2) != 0) {
                        continue;
                    }
                    const floats out = attend(tk.type, ks[tk.type], tv.type, vs[tv.type], q, mask, s);
                    if (out.empty()) {
                        continue;
                    }
                    n++;
                    // An average of values lies among them. How far off it may be, relative to the largest value of the column:
                    // - weights times scales are rounded to steps of 1/32512 of the largest of a tile of 128 positions, by 8 bits of
                    //   level: 128*0.5/32512 of that; the sum of the weights is the largest one at least
                    // - upstream sums up f16 values in f16: half of 2^-10 of the sum for each of n_kv
                    // - bf16 and f32 sums are f32's: n_kv*2^-24
                    double rel = std::max(128*0.5/32512, s.n_kv*0x1p-23);
                    if (sums_in_f16(tk.type, tv.type, s)) {
                        rel = s.n_kv*0x1p-11;
                    }
                    const std::string name = std::string("K ") + ggml_type_name(tk.type) + ", V " + ggml_type_name(tv.type) + ", " + text(s) + ", scenario " + std::to_string(scenario);
                    int    n_lost = 0, n_outside = 0;
                    bool   overflow = false;
                    double worst = 0;
                    for (int64_t h = 0; h < N_HEAD; h++) {
                        const float * base = vf[tv.type].data() + (h/2)*s.n_kv*D;
                        float most = 0; // of all values of a head: levels share a step over blocks
                        for (int64_t i = 0; i < s.n_kv*D; i++) {
                            most = std::max(most, std::fabs(base[i]));
                        }
                        for (int64_t d = 0; d < D; d++) {
                            float lo = s.sinks ? 0.0f : INF, hi = s.sinks ? 0.0f : -INF, sum = 0.0f;
                            for (int64_t j = 0; j < s.n_kv; j++) {
                                lo = std::min(lo, base[j*D + d]);
                                hi = std::max(hi, base[j*D + d]);
                                sum += std::fabs(base[j*D + d]);
                            }
                            for (int64_t i = 0; i < s.n_q; i++) {
                                const float y = out[(i*N_HEAD + h)*D + d];
                                if (!std::isfinite(y)) {
                                    if ((sums_in_f16(tk.type, tv.type, s) && sum > HALF_MAX) || (sums_query_in_f16(tk.type) && scenario == EXTREME_QUERIES)) {
                                        overflow = true;
                                    } else {
                                        n_lost++;
                                    }
                                    continue;
                                }
                                if (s.masked && s.n_q > 3 && i == 3) { // attends to nothing
                                    n_outside += y != 0.0f;
                                    continue;
                                }
                                const double e = std::max(double(lo) - y, double(y) - hi);
                                worst = std::max(worst, e/std::max(most, FLT_MIN));
                                n_outside += !(e <= rel*most);
                            }
                        }
                    }
                    n_overflow += overflow;
                    CHECK(n_lost == 0, "%s: %d outputs aren't finite", name.c_str(), n_lost);
                    CHECK(n_outside == 0, "%s: %d outputs are outside of the values' range, by %g of the largest", name.c_str(), n_outside, worst);
                }
            }
        }
    }
    printf("finite: %ld cases of attention over extreme rows; upstream's sums in f16 overflow in %ld\n", n, n_overflow);
}

struct base {
    shape  s;
    floats k, v, q;
    std::vector<ggml_fp16_t> mask;
    std::vector<bool>        hole; // positions that no query attends to
};

static const int64_t AT = 20; // the position that is poisoned: some queries attend to it

static base make_base(int64_t n_q, int64_t n_kv) {
    base b;
    b.s = { n_q, n_kv, true, false, false, false };
    std::mt19937 rng(n_q*1000 + n_kv);
    b.k = gauss(rng, n_kv*N_HEAD_KV*D);
    b.v = gauss(rng, n_kv*N_HEAD_KV*D);
    b.q = gauss(rng, n_q*N_HEAD*D, 0.5f);
    b.hole.resize(n_kv);
    b.mask.assign(n_q*n_kv, ZERO16);
    for (int64_t j = 0; j < n_kv; j++) {
        b.hole[j] = j == 3 || j == 37 || (j > 60 && j < 70) || j > n_kv - 6; // alone, in a row, at the end
        for (int64_t i = 0; i < n_q; i++) {
            if (b.hole[j] || (j == AT && i % 3 == 1)) {
                b.mask[i*n_kv + j] = MINF16;
            }
        }
    }
    return b;
}

static bool attends(const base & b, int64_t i, int64_t j) { return b.mask[i*b.s.n_kv + j] == ZERO16; }

// alone, a few, and more than a tile; upstream's slow path takes each row by itself
static std::vector<int64_t> n_queries() { return reference ? std::vector<int64_t>{ 1, 6 } : std::vector<int64_t>{ 1, 6, 70 }; }

static floats attend(ggml_type type_k, ggml_type type_v, const base & b, const floats & k, const floats & v) {
    return attend(type_k, store(type_k, k), type_v, store(type_v, v), b.q, b.mask, b.s);
}

// rel*max(|v|): two results of the same rows on two paths of ours, each within 128*0.5/32512 of the exact one (see
// test_finite)
static const double REL = 2*128*0.5/32512;

static double largest(const floats & x) {
    double res = 0;
    for (const float v : x) {
        res = std::max(res, std::fabs(double(v)));
    }
    return res;
}

static void test_masked() {
    long n = 0, n_exact = 0;
    for (const int64_t n_q : n_queries()) {
        const base b = make_base(n_q, n_q == 1 ? 600 : 150);
        for (const auto & tk : kvq_cache_types) {
            for (const auto & tv : kvq_cache_types) {
                const floats clean = attend(tk.type, tv.type, b, b.k, b.v);
                if (clean.empty()) {
                    continue;
                }
                const std::string name = std::string("K ") + ggml_type_name(tk.type) + ", V " + ggml_type_name(tv.type) + ", " + text(b.s);
                for (const float bad : { 0.0f, -HALF_MAX, 1e30f, INF, NOT_A }) {
                    auto k = b.k, v = b.v;
                    for (int64_t r = 0; r < b.s.n_kv*N_HEAD_KV; r++) {
                        if (b.hole[r % b.s.n_kv]) {
                            std::fill_n(k.begin() + r*D, D, bad);
                            std::fill_n(v.begin() + r*D, D, bad);
                        }
                    }
                    const floats out = attend(tk.type, tv.type, b, k, v);
                    n++;
                    double worst = 0;
                    for (size_t i = 0; i < out.size(); i++) {
                        worst = std::max(worst, std::isfinite(out[i]) ? std::fabs(double(out[i]) - clean[i]) : HUGE_VAL);
                    }
                    n_exact += worst == 0;
                    // finite garbage has weight 0 in the same sums: the same bits. An infinity in V takes another path.
                    const bool finite = std::fabs(bad) <= HALF_MAX;
                    CHECK(worst <= (finite ? 0.0 : REL*largest(b.v)), "%s: %g behind the mask changes outputs by %g", name.c_str(), bad, worst);
                }
            }
        }
    }
    printf("masked: %ld cases, %ld with the same bits\n", n, n_exact);
}

static void test_poison(bool all) {
    long n = 0, n_lost = 0, n_more = 0;
    enum { IN_K, IN_V, N_SIDES };
    for (const int64_t n_q : n_queries()) {
        const base b = make_base(n_q, n_q == 1 ? 600 : 150);
        for (int side = 0; side < N_SIDES; side++) {
            for (const float bad : { NOT_A, INF, -INF }) {
                auto k = b.k, v = b.v;
                (side == IN_K ? k : v)[(0*b.s.n_kv + AT)*D + 13] = bad; // KV head 0: query heads 0 and 1

                // f16's answer, one query at a time: upstream's path that skips what is masked
                std::vector<bool> f16_lost;
                for (int64_t i = 0; i < n_q; i++) {
                    base one = b;
                    one.s.n_q = 1;
                    one.q.clear();
                    for (int64_t h = 0; h < N_HEAD; h++) {
                        one.q.insert(one.q.end(), b.q.begin() + (h*n_q + i)*D, b.q.begin() + (h*n_q + i + 1)*D);
                    }
                    one.mask.assign(b.mask.begin() + i*b.s.n_kv, b.mask.begin() + (i + 1)*b.s.n_kv);
                    for (const float y : attend(GGML_TYPE_F16, GGML_TYPE_F16, one, k, v)) {
                        f16_lost.push_back(!std::isfinite(y));
                    }
                }
                const long n_f16 = std::count(f16_lost.begin(), f16_lost.end(), true);
                CHECK(n_f16 > 0 || (side == IN_K && std::isinf(bad)), "%g has no effect with f16", bad); // an infinite score: a weight of 0 or 1

                for (const auto & tk : kvq_cache_types) {
                    for (const auto & tv : kvq_cache_types) {
                        // what the other side is matters little: f16, the same, and one of ours
                        const ggml_type other = side == IN_K ? tv.type : tk.type;
                        if (!all && tk.type != tv.type && other != GGML_TYPE_F16 && other != GGML_TYPE_KVQ4) {
                            continue;
                        }
                        const floats clean = attend(tk.type, tv.type, b, b.k, b.v);
                        const floats out   = attend(tk.type, tv.type, b, k, v);
                        if (out.empty()) {
                            continue;
                        }
                        n++;
                        // One infinite score alone is a weight of 1 or 0. Floats keep that, and f16 does where it doesn't split
                        // the cache; combining the parts takes inf - inf. Types of blocks have no infinity to keep.
                        const bool one_infinity = side == IN_K && std::isinf(bad) && !ggml_is_quantized(tk.type);
                        const std::string name = std::string("K ") + ggml_type_name(tk.type) + ", V " + ggml_type_name(tv.type) + ", " + text(b.s);
                        int    kept = 0, spread = 0;
                        double worst = 0;
                        for (int64_t i = 0; i < n_q; i++) {
                            for (int64_t h = 0; h < N_HEAD; h++) {
                                const bool touched = h < 2 && attends(b, i, AT);
                                for (int64_t d = 0; d < D; d++) {
                                    const int64_t at = (i*N_HEAD + h)*D + d;
                                    const bool lost = !std::isfinite(out[at]);
                                    kept += f16_lost[at] && !lost && !one_infinity;
                                    n_more += lost && !f16_lost[at];
                                    // a block of V, or all values of a query where a score is lost
                                    const bool may = touched && (side == IN_K || d == 13 || (ggml_is_quantized(tv.type) && d < 32));
                                    spread += lost && !may;
                                    if (!lost && !touched) {
                                        worst = std::max(worst, std::fabs(double(out[at]) - clean[at]));
                                    }
                                }
                            }
                        }
                        n_lost += kept;
                        CHECK(kept == 0, "%s: %g in %s: %d of %ld outputs that f16 loses come out as numbers", name.c_str(), bad, side == IN_K ? "K" : "V", kept, n_f16);
                        CHECK(spread == 0, "%s: %g in %s: %d outputs are lost that don't attend to it", name.c_str(), bad, side == IN_K ? "K" : "V", spread);
                        CHECK(worst <= REL*largest(b.v), "%s: %g in %s changes outputs that don't attend to it by %g", name.c_str(), bad, side == IN_K ? "K" : "V", worst);
                    }
                }
            }
        }
    }
    printf("poison: %ld cases, %ld outputs that f16 loses come out as numbers, %ld more than with f16 are lost\n", n, n_lost, n_more);
}

int main(int argc, char ** argv) {
    bool all = false;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--all") == 0) {
            all = true;
        } else if (strcmp(argv[i], "--upstream") == 0) {
            reference = true;
        } else {
            fprintf(stderr, "usage: %s [--all] [--upstream]\n", argv[0]);
            return 2;
        }
    }
    const char * floats_too = getenv("GGML_KVQ_FA_FLOAT");
    ours_all = !reference && floats_too && *floats_too && strcmp(floats_too, "0") != 0;
    ggml_backend_ptr owner(ggml_backend_cpu_init());
    backend = owner.get();
    ggml_backend_cpu_set_use_ref(backend, reference);
    ggml_backend_cpu_set_n_threads(backend, 1); // graphs so small that threads would wait for each other

    test_rows();
    test_lost_rows();
    test_finite(all);
    test_masked();
    test_poison(all);

    printf("%ld graphs, %ld checks passed, %d failed\n", n_graphs, n_passed, n_failed);
    return n_failed ? 1 : 0;
}
