// SPDX-License-Identifier: MIT
//
// Attention on the CPU over every pair of cache types, against attention in double over the decoded rows.
//
// Built in two ways:
// - with ggml: FLASH_ATTN_EXT through its public API on the CPU backend, compared with upstream's path too
// - with KVQ_ATTN_STANDALONE: kvq-attn.cpp alone, item by item, for whatever instruction set it is compiled for
//
// Usage: test-kvq-attn [--all] [--few] [--faults] [--default] [--expect PATH] [--seed N] [--cases N] [--pair K V]
//   --all     many more cases, and larger ones
//   --few     for an emulator: each type of K with four types of V and each type of V with four of K, and smaller cases
//   --faults  checks the checks: each planted fault must be found
//   --default which pairs are ours without GGML_KVQ_FA_FLOAT
//   --expect  the path that must be compiled in

#include "kvq-types.h"

#include "ggml.h"

#ifdef KVQ_ATTN_STANDALONE
#include "kvq-attn.h"
#include "kvq-cpu.h"
#else
#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "ggml-cpu.h"
#endif

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#if defined(__unix__) || defined(__APPLE__)
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>
#define HAVE_GUARD_PAGES
#endif

static int  n_failed = 0;
static int  n_passed = 0;
static bool quiet    = false; // while a planted fault is looked for

static std::map<std::string, int> failed_checks; // by the name of the check

#define CHECK(name, cond, ...) do { \
        if (cond) { n_passed++; break; } \
        failed_checks[name]++; \
        if (n_failed++ < 40 && !quiet) { \
            printf("FAIL %s:%d: %s: ", __FILE__, __LINE__, name); \
            printf(__VA_ARGS__); \
            printf("\n"); \
        } \
    } while (0)

//
// random values
//

// splitmix64, so that the cases are the same with every library
struct random_source {
    uint64_t state;

    explicit random_source(uint64_t seed) : state(seed) {}

    uint64_t bits() {
        uint64_t z = (state += 0x9e3779b97f4a7c15u);
        z = (z ^ (z >> 30))*0xbf58476d1ce4e5b9u;
        z = (z ^ (z >> 27))*0x94d049bb133111ebu;
        return z ^ (z >> 31);
    }
    int64_t below(int64_t n) { return (int64_t) (bits() % (uint64_t) n); }
    double  uniform()        { return (double) (bits() >> 11)*0x1p-53; }
    bool    chance(double p) { return uniform() < p; }

    // mean 0, variance 1, within +-3.46: the sum of four uniform values, which is fast and near enough to a normal one
    float normal() {
        const uint64_t b = bits();
        const int sum = (int) (b & 0xffff) + (int) (b >> 16 & 0xffff) + (int) (b >> 32 & 0xffff) + (int) (b >> 48);
        return (float) (sum - 131070)*(1.7320508f/65536.0f);
    }
};

// Values drawn in random order, each as often as the others: so a few cases cover all of them.
template <typename T>
struct deck {
    std::vector<T> values;
    std::vector<T> left;

    deck(std::initializer_list<T> v) : values(v) {}

    // the next value that fits; all fit if none does
    T draw(random_source & rng, const std::function<bool(const T &)> & fits = nullptr) {
        for (int round = 0; round < 2; round++) {
            if (left.empty() || round == 1) {
                std::vector<T> fresh = values;
                for (size_t i = fresh.size(); i > 1; i--) {
                    std::swap(fresh[i - 1], fresh[rng.below(i)]);
                }
                left.insert(left.begin(), fresh.begin(), fresh.end());
            }
            for (size_t i = left.size(); i-- > 0; ) {
                if (!fits || fits(left[i])) {
                    const T res = left[i];
                    left.erase(left.begin() + i);
                    return res;
                }
            }
        }
        fprintf(stderr, "no value fits\n");
        abort();
    }
};

//
// memory
//

// Bytes that end where a page begins that nobody may touch: a read beyond the last row ends the program.
struct memory {
    char * base  = nullptr;
    size_t total = 0;
    char * data  = nullptr;
    size_t size  = 0;

    memory() = default;
    memory(const memory &) = delete;
    memory & operator=(const memory &) = delete;
    ~memory() { release(); }

    void release() {
#ifdef HAVE_GUARD_PAGES
        if (base) { munmap(base, total); }
#else
        free(base);
#endif
        base = nullptr;
    }

    void alloc(size_t n, int fill, size_t align = 1) {
        release();
        size = n;
        const size_t tail = (align - n % align) % align; // what the alignment of the first byte takes away
#ifdef HAVE_GUARD_PAGES
        const size_t page = (size_t) sysconf(_SC_PAGESIZE);
        const size_t body = (n + tail + page - 1)/page*page;
        total = body + page;
        void * p = mmap(nullptr, total, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (p == MAP_FAILED) { perror("mmap"); abort(); }
        base = (char *) p;
        mprotect(base + body, page, PROT_NONE);
        data = base + body - tail - n;
#else
        total = n + align;
        base  = (char *) malloc(total);
        data  = base + (align - (uintptr_t) base % align) % align;
        GGML_UNUSED(tail);
#endif
        memset(data, fill, n);
    }
};

//
// types
//

static const ggml_type_traits * traits(ggml_type type) { return ggml_get_type_traits(type); }

static bool   is_quantized(ggml_type type) { return traits(type)->is_quantized; }
static size_t row_bytes(ggml_type type, int64_t n) { return traits(type)->type_size*(n/traits(type)->blck_size); }
// blocks start with a scale, then a minimum
static bool   has_min(ggml_type type) { return type == GGML_TYPE_Q4_1 || type == GGML_TYPE_Q5_1; }

// largest magnitude of a level
static double max_level(ggml_type type) {
    if (const kvq_format * f = kvq_get_format(type)) {
        return std::abs((double) f->levels[0]);
    }
    switch (type) {
        case GGML_TYPE_Q8_0:   return 128;
        case GGML_TYPE_Q5_0:   return 16;
        case GGML_TYPE_Q5_1:   return 31;
        case GGML_TYPE_Q4_0:   return 8;
        case GGML_TYPE_Q4_1:   return 15;
        case GGML_TYPE_IQ4_NL: return 127;
        default:               return 0;
    }
}

static float f16_at(const void * p) {
    ggml_fp16_t h;
    memcpy(&h, p, sizeof(h));
    return ggml_fp16_to_fp32(h);
}

static void to_float(ggml_type type, const void * row, float * y, int64_t n) {
    if (type == GGML_TYPE_F32) {
        memcpy(y, row, n*sizeof(float));
        return;
    }
    traits(type)->to_float(row, y, n);
}

static const char * name_of(ggml_type type) { return traits(type)->type_name; }

//
// cases
//

enum mask_kind {
    MASK_NONE,
    MASK_CAUSAL,  // the queries are the last positions
    MASK_WINDOW,  // causal, and nothing before the last positions
    MASK_RANDOM,  // positions at random
    MASK_VALUES,  // finite values, among them the lowest one of f16, and some -inf
    MASK_ROWS,    // some queries see nothing
    MASK_TILES,   // long stretches are masked for all queries
    MASK_ALL,     // nothing is seen
    N_MASKS,
};

enum layout_kind {
    LAYOUT_PLAIN,    // contiguous
    LAYOUT_CACHE,    // as llama.cpp has it: a position holds the rows of all heads, a stream has more positions than are read
    LAYOUT_ODD,      // views into something larger, with odd strides
    LAYOUT_ODD_HEAD, // the same, the heads of a position together
    LAYOUT_MLA,      // V is a part of K's rows
    N_LAYOUTS,
};

enum data_kind {
    DATA_NORMAL,
    DATA_CHANNELS, // a few channels of K and Q are far larger than the others
    DATA_PEAKED,   // scores so far apart that few positions count
    DATA_FLAT,     // queries near or at zero
    DATA_BLOCKS,   // random bytes as blocks, scales of very different size and of both signs
    DATA_SMALL,    // values whose scales are subnormal in f16
    N_DATA,
};

static const char * const mask_names[]   = { "none", "causal", "window", "random", "values", "rows", "tiles", "all" };
static const char * const layout_names[] = { "plain", "cache", "odd", "odd-head", "mla" };
static const char * const data_names[]   = { "normal", "channels", "peaked", "flat", "blocks", "small" };

struct config {
    ggml_type   type_k = GGML_TYPE_F32, type_v = GGML_TYPE_F32;
    int64_t     dk = 64, dv = 64, n_head_kv = 2, gqa = 2, n_head_v = 2, n_kv = 96, n_q = 3, n_stream = 1;
    mask_kind   mask   = MASK_NONE;
    layout_kind layout = LAYOUT_PLAIN;
    data_kind   data   = DATA_NORMAL;
    int64_t     mask_ne2 = 1, mask_ne3 = 1, mask_pad = 0; // pad: rows of the mask that no query has
    bool        q_permuted = false; // as llama.cpp has it: heads of a token together
    float       scale = 0.125f, max_bias = 0, softcap = 0;
    bool        sinks = false;
    uint64_t    seed = 0;

    int64_t n_head() const { return n_head_kv*gqa; }
    int64_t head_v(int64_t h) const { return h/(n_head()/n_head_v); } // of a head of the query

    std::string text() const {
        char buf[512];
        snprintf(buf, sizeof(buf), "K %s V %s d %d/%d heads %d/%d/%d kv %d q %d streams %d mask %s(%d,%d) scale %g bias %g cap %g%s %s %s%s seed %llu",
            name_of(type_k), name_of(type_v), (int) dk, (int) dv, (int) n_head(), (int) n_head_kv, (int) n_head_v, (int) n_kv, (int) n_q, (int) n_stream,
            mask_names[mask], (int) mask_ne2, (int) mask_ne3, scale, max_bias, softcap, sinks ? " sinks" : "",
            layout_names[layout], data_names[data], q_permuted ? " q-permuted" : "", (unsigned long long) seed);
        return buf;
    }
};

static std::string current_case = "none";

// where a tensor lies in its memory
struct view {
    ggml_type type;
    int64_t   ne[4];
    size_t    nb[4];
    size_t    offset;
    memory *  mem;

    char * at(int64_t i1, int64_t i2, int64_t i3) const { return mem->data + offset + i1*nb[1] + i2*nb[2] + i3*nb[3]; }
};

struct problem {
    config c;
    view   q, k, v;
    memory q_mem, k_mem, v_mem, mask_mem, sinks_mem;
    std::vector<float> kf, vf; // decoded: [stream][head][position][d]

    ggml_fp16_t * mask_at(int64_t i1, int64_t h, int64_t s) const {
        return (ggml_fp16_t *) mask_mem.data + (((s % c.mask_ne3)*c.mask_ne2 + h % c.mask_ne2)*(c.n_q + c.mask_pad) + i1)*c.n_kv;
    }
    const float * k_row(int64_t s, int64_t h, int64_t j) const { return kf.data() + ((s*c.n_head_kv + h)*c.n_kv + j)*c.dk; }
    const float * v_row(int64_t s, int64_t h, int64_t j) const { return vf.data() + ((s*c.n_head_v + h)*c.n_kv + j)*c.dv; }
    const char  * v_raw(int64_t s, int64_t h, int64_t j) const { return v.at(j, h, s); }
};

// Rows of n values. Blocks as bytes where the values are to have any level.
static void make_rows(const config & c, bool is_k, ggml_type type, char * row, int64_t n, random_source & rng) {
    float size = 1.0f;
    if (c.data == DATA_PEAKED && is_k) { size = 4.0f; }
    if (c.data == DATA_SMALL)          { size = 1e-3f; }

    bool blocks = c.data == DATA_BLOCKS && is_quantized(type);
#ifdef KVQ_ATTN_STANDALONE
    blocks = blocks || (is_quantized(type) && !kvq_get_format(type)); // no encoder of upstream's types here
#endif
    if (blocks) {
        const size_t bytes = traits(type)->type_size;
        for (int64_t b = 0; b < n/traits(type)->blck_size; b++) {
            uint8_t * x = (uint8_t *) row + b*bytes;
            for (size_t i = 0; i < bytes; i++) {
                x[i] = (uint8_t) (rng.bits() >> 32);
            }
            // 1.6/max: about 1 for the standard deviation of a level
            float d = size*1.6f/(float) max_level(type)*(has_min(type) ? 2.0f : 1.0f);
            d *= (float) std::exp(0.2*rng.normal()); // equal scales and saturated scores would be equal weights, all rounded alike
            if (c.data == DATA_BLOCKS) {
                d *= (float) std::exp(0.7*rng.normal())*(rng.chance(0.5) ? -1.0f : 1.0f);
                if (rng.chance(0.05)) { d = 0.0f; }
                if (rng.chance(0.05)) { d *= 1e-3f; }
            }
            const ggml_fp16_t d16 = ggml_fp32_to_fp16(d);
            memcpy(x, &d16, sizeof(d16));
            if (has_min(type)) {
                const ggml_fp16_t m16 = ggml_fp32_to_fp16(-d*(float) max_level(type)*(0.5f + 0.1f*rng.normal()));
                memcpy(x + sizeof(d16), &m16, sizeof(m16));
            }
        }
        return;
    }
    std::vector<float> x(n);
    for (int64_t i = 0; i < n; i++) {
        x[i] = size*rng.normal();
    }
    if (c.data == DATA_CHANNELS && is_k) {
        for (int64_t i = 5; i < n; i += 29) {
            x[i] = 8.0f + x[i];
        }
    }
    switch (type) {
        case GGML_TYPE_F32: memcpy(row, x.data(), n*sizeof(float)); return;
        case GGML_TYPE_F16:
            for (int64_t i = 0; i < n; i++) {
                ((ggml_fp16_t *) row)[i] = ggml_fp32_to_fp16(x[i]);
            }
            return;
        case GGML_TYPE_BF16: // the upper half, towards zero
            for (int64_t i = 0; i < n; i++) {
                memcpy(row + 2*i, (const char *) &x[i] + 2, 2);
            }
            return;
        default: break;
    }
#ifdef KVQ_ATTN_STANDALONE
    switch (type) {
#define ENCODE(name, NAME, bits, n_qs, n_qh) case GGML_TYPE_##NAME: quantize_row_##name(x.data(), row, n); break;
        KVQ_FORMATS(ENCODE)
#undef ENCODE
        default: abort();
    }
#else
    ggml_get_type_traits_cpu(type)->from_float(x.data(), row, n);
#endif
}

// Lays a tensor out and takes its memory, filled with bytes that are NaN as f16, bf16 and f32.
static void lay_out(view & t, memory & mem, layout_kind layout, ggml_type type, int64_t d, int64_t n, int64_t heads, int64_t streams, random_source & rng) {
    const size_t unit = traits(type)->type_size;
    const size_t row  = row_bytes(type, d);
    t.type = type;
    t.mem  = &mem;
    const int64_t ne[4] = { d, n, heads, streams };
    memcpy(t.ne, ne, sizeof(ne));
    t.nb[0]  = unit;
    t.offset = 0;
    switch (layout) {
        case LAYOUT_PLAIN:
            t.nb[1] = row;
            t.nb[2] = t.nb[1]*n;
            t.nb[3] = t.nb[2]*heads;
            break;
        case LAYOUT_CACHE:
            t.nb[2] = row;
            t.nb[1] = t.nb[2]*heads;
            t.nb[3] = t.nb[1]*(n + rng.below(40));
            break;
        case LAYOUT_ODD:
            t.offset = unit*rng.below(6);
            t.nb[1] = row + unit*rng.below(4);
            t.nb[2] = t.nb[1]*n + unit*rng.below(4);
            t.nb[3] = t.nb[2]*heads + unit*rng.below(4);
            break;
        default:
            t.offset = unit*rng.below(6);
            t.nb[2] = row + unit*rng.below(4);
            t.nb[1] = t.nb[2]*heads + unit*rng.below(4);
            t.nb[3] = t.nb[1]*(n + rng.below(3)) + unit*rng.below(4);
            break;
    }
    mem.alloc(t.offset + (n - 1)*t.nb[1] + (heads - 1)*t.nb[2] + (streams - 1)*t.nb[3] + row, 0xff, type == GGML_TYPE_F32 ? 4 : 2);
}

static void decode(const view & t, std::vector<float> & res) {
    const int64_t d = t.ne[0];
    res.resize(d*t.ne[1]*t.ne[2]*t.ne[3]);
    float * y = res.data();
    for (int64_t s = 0; s < t.ne[3]; s++) {
        for (int64_t h = 0; h < t.ne[2]; h++) {
            for (int64_t j = 0; j < t.ne[1]; j++, y += d) {
                to_float(t.type, t.at(j, h, s), y, d);
            }
        }
    }
}

static void make_mask(problem & p, random_source & rng) {
    const config & c = p.c;
    if (c.mask == MASK_NONE) {
        return;
    }
    const ggml_fp16_t zero = 0, masked = 0xfc00;
    p.mask_mem.alloc(c.mask_ne2*c.mask_ne3*(c.n_q + c.mask_pad)*c.n_kv*sizeof(ggml_fp16_t), 0xff, 2);
    for (int64_t s = 0; s < c.mask_ne3; s++) {
        for (int64_t h = 0; h < c.mask_ne2; h++) {
            const int64_t window = 1 + rng.below(c.n_kv);
            std::vector<bool> hidden(c.n_kv, false);
            for (int64_t j = 0; j < c.n_kv; ) {
                const int64_t len = 1 + rng.below(400);
                const bool    hide = rng.chance(0.5);
                for (int64_t i = j; i < std::min(j + len, c.n_kv); i++) {
                    hidden[i] = hide;
                }
                j += len;
            }
            if (c.n_q > 0) {
                hidden[rng.below(c.n_kv)] = false;
            }
            for (int64_t i = 0; i < c.n_q + c.mask_pad; i++) {
                ggml_fp16_t * row = p.mask_at(i, h, s);
                const int64_t pos = std::max<int64_t>(c.n_kv - c.n_q, 0) + i; // of the query
                const bool    blind = c.mask == MASK_ALL || (c.mask == MASK_ROWS && rng.chance(0.3));
                const int64_t sure  = rng.below(c.n_kv);
                for (int64_t j = 0; j < c.n_kv; j++) {
                    ggml_fp16_t m = zero;
                    switch (c.mask) {
                        case MASK_CAUSAL: m = j > pos ? masked : zero; break;
                        case MASK_WINDOW: m = j > pos || j <= pos - window ? masked : zero; break;
                        case MASK_RANDOM: m = j != sure && rng.chance(0.4) ? masked : zero; break;
                        case MASK_TILES:  m = hidden[j] ? masked : zero; break;
                        case MASK_VALUES:
                            m = j == sure ? zero : rng.chance(0.1) ? masked : rng.chance(0.05) ? (ggml_fp16_t) 0xfbff : ggml_fp32_to_fp16(1.5f*rng.normal());
                            break;
                        default: break;
                    }
                    if (c.max_bias > 0 && m == zero) { // distances, as llama.cpp has them for ALiBi
                        m = ggml_fp32_to_fp16((float) -std::abs(pos - j));
                    }
                    row[j] = blind ? masked : m;
                }
            }
        }
    }
}

static void make_problem(problem & p, const config & c) {
    p.c = c;
    random_source rng(c.seed);

    // queries
    const int64_t n_head = c.n_head();
    p.q.type = GGML_TYPE_F32;
    p.q.mem  = &p.q_mem;
    const int64_t ne[4] = { c.dk, c.n_q, n_head, c.n_stream };
    memcpy(p.q.ne, ne, sizeof(ne));
    p.q.offset = 0;
    p.q.nb[0]  = sizeof(float);
    const size_t row = (c.dk + (rng.chance(0.3) ? rng.below(6) : 0))*sizeof(float);
    p.q.nb[1] = c.q_permuted ? row*n_head : row;
    p.q.nb[2] = c.q_permuted ? row : row*c.n_q;
    p.q.nb[3] = row*n_head*c.n_q;
    p.q_mem.alloc(p.q.nb[3]*c.n_stream, 0xff, sizeof(float));
    for (int64_t s = 0; s < c.n_stream; s++) {
        for (int64_t h = 0; h < n_head; h++) {
            for (int64_t i = 0; i < c.n_q; i++) {
                float * x = (float *) p.q.at(i, h, s);
                float size = (float) std::exp(0.5*rng.normal())*(c.data == DATA_SMALL ? 3e2f : 1.0f);
                if (c.data == DATA_FLAT) {
                    size = rng.chance(0.3) ? 0.0f : 1e-3f;
                }
                for (int64_t d = 0; d < c.dk; d++) {
                    x[d] = size*rng.normal();
                    if (c.data == DATA_CHANNELS && d % 17 == 3) { x[d] *= 20.0f; }
                }
            }
        }
    }

    // the cache
    const layout_kind layout = c.layout == LAYOUT_MLA ? LAYOUT_CACHE : c.layout;
    lay_out(p.k, p.k_mem, layout, c.type_k, c.dk, c.n_kv, c.n_head_kv, c.n_stream, rng);
    for (int64_t s = 0; s < c.n_stream; s++) {
        for (int64_t h = 0; h < c.n_head_kv; h++) {
            for (int64_t j = 0; j < c.n_kv; j++) {
                make_rows(c, true, c.type_k, p.k.at(j, h, s), c.dk, rng);
            }
        }
    }
    if (c.layout == LAYOUT_MLA) {
        p.v       = p.k;
        p.v.ne[0] = c.dv;
        if (c.seed & 1) { // the first values of a row or the last ones
            p.v.offset += row_bytes(c.type_k, c.dk) - row_bytes(c.type_k, c.dv);
        }
    } else {
        lay_out(p.v, p.v_mem, layout, c.type_v, c.dv, c.n_kv, c.n_head_v, c.n_stream, rng);
        for (int64_t s = 0; s < c.n_stream; s++) {
            for (int64_t h = 0; h < c.n_head_v; h++) {
                for (int64_t j = 0; j < c.n_kv; j++) {
                    make_rows(c, false, c.type_v, p.v.at(j, h, s), c.dv, rng);
                }
            }
        }
    }
    decode(p.k, p.kf);
    decode(p.v, p.vf);

    make_mask(p, rng);
    if (c.sinks) {
        p.sinks_mem.alloc(n_head*sizeof(float), 0, sizeof(float));
        for (int64_t h = 0; h < n_head; h++) {
            ((float *) p.sinks_mem.data)[h] = 2.0f*rng.normal();
        }
    }
}

//
// the reference, in double, and what a correct kernel may differ from it by
//

// What the kernel rounds to 16 bits. On paths that compute in float, nothing.
struct rounding {
    bool query   = true; // quantized keys: a query in steps of its largest value by 32512, the most that two halves of 8 bits hold
    bool weights = true; // quantized values: weights times scales, in steps of the largest one of a tile by 32512
};
static const double STEPS = 32512;
// steps that a rounded number may be off, itself the result of three roundings of a float
static const double HALF = 0.5 + 3*0x1p-24*STEPS;

static rounding rounding_of_path() {
    rounding r;
#ifdef KVQ_ATTN_STANDALONE
    const std::string name = kvq_attn_name();
    r.query = r.weights = name == "avx512-vnni" || name == "neon-dotprod" || name == "neon-i8mm";
#endif
    return r;
}

static const double TINY    = 1e-29; // weights that add less may be left out
static const double U       = 0x1p-24; // rounding of a float
static const double EXP_ERR = 0x1p-22; // of kvq_attn_exp

struct result {
    std::vector<double> out;   // as dst has it: [stream][query][head][d]
    std::vector<double> bound; // of the error of each value, by the same index
    std::vector<double> mse;   // expected squared error of a row, summed over its values: [stream][query][head]
    std::vector<bool>   blind; // rows that attend to nothing
    double ref2 = 0;           // sum of squares of out
    double mse_weights = 0;    // the part of mse that rounded weights have, of all rows
};

static double alibi_slope(const config & c, int64_t h) {
    if (c.max_bias <= 0.0f) {
        return 1.0;
    }
    int64_t n = 1;
    while (2*n <= c.n_head()) {
        n *= 2;
    }
    // ggml's definition has the two bases in float; a power of up to n would make their rounding n times as large
    const float m0 = std::pow(2.0f, -c.max_bias/n);
    const float m1 = std::pow(2.0f, -c.max_bias/2.0f/n);
    return h < n ? std::pow((double) m0, h + 1) : std::pow((double) m1, 2*(h - n) + 1);
}

// The reference and its tolerances.
//
// A score s_j = scale q.k_j is off by e_j, a weight p_j by the factor 1 + e_j, the output o = sum p_j v_j by
//     sum p_j (v_j - o) e_j,   at most sqrt(sum p_j e_j^2) sqrt(sum p_j (v_j - o)^2),
// the inequality of Cauchy and Schwarz with weights p: true of the largest errors and of their root mean squares alike.
//
// What makes up e_j, at most | root mean square, where one rounding of a float is U | U/sqrt(6) of the number (errors are spread
// over half a unit, the unit over a factor of 2 of numbers):
// - the query in steps of t = max|q|/32512:   scale t/2 sum|k_j|, see HALF  | scale t/sqrt(12) |k_j|
// - dk products summed up in float:           2 dk U scale |q||k_j|         | sqrt(dk/6) U sqrt(s_j^2 + scale^2 sum (q k_j)^2)
//   (|q||k_j| is above every partial sum; 2 for a product that is rounded too | a partial sum is a share of s_j and a random walk)
// - rounding of the score, of scale, slope, mask and distance to the maximum: each U of the number, at most | all of them
//   together about one U, as sqrt(4/6) is
// - softcap c: c tanh(x), where tanh is (1 - e)/(1 + e) of an exp: 2^-21 c, and errors of x never grow | 2^-23 c
// - exp itself: EXP_ERR | EXP_ERR/4
// Of a block with a minimum, the level's part and the minimum are rounded apart: |k| stands for their magnitudes' sum.
//
// The weighted sum of values adds, to each output:
// - n sums in float: 2 n U sum p|v|, n the positions attended to | sqrt(n/6) U sum p|v|
// - weights in steps of w = max(p_j d_j)/32512, with d the scales, or a minimum by 32 if that is larger; the largest over the
//   cache is above that of each tile; L is the largest level, and levels are spread over [-L, L]:
//   n w/2 L, see HALF | w/sqrt(12) sqrt(n) L/sqrt(3)
//   Weights below two steps are rounded, many of them in the same direction, by at most half a step or all of the weight: their
//   errors add up, times the mean level, L/2 with a minimum. Else it is 0 but for channels that are large at all positions.
static void attend(const problem & p, const rounding & r, result & res) {
    const config & c = p.c;
    const int64_t n_rows = c.n_stream*c.n_q*c.n_head();
    res.out.assign(n_rows*c.dv, 0.0);
    res.bound.assign(n_rows*c.dv, 0.0);
    res.mse.assign(n_rows, 0.0);
    res.blind.assign(n_rows, false);
    res.ref2 = 0;
    res.mse_weights = 0;

    const double cap   = c.softcap;
    const double level = max_level(c.type_v);

    std::vector<double> norm_k(c.n_kv), sum_k(c.n_kv), scale_v(c.n_kv, 0.0);
    std::vector<double> z(c.n_kv), e_max(c.n_kv), e_rms(c.n_kv), q(c.dk), sq(c.dv);
    for (int64_t s = 0; s < c.n_stream; s++) {
        for (int64_t hk = 0; hk < c.n_head_kv; hk++) {
            for (int64_t j = 0; j < c.n_kv; j++) {
                const float * k = p.k_row(s, hk, j);
                double s1 = 0, s2 = 0;
                for (int64_t d = 0; d < c.dk; d++) {
                    double mag = std::fabs(k[d]);
                    if (has_min(c.type_k)) {
                        const double m = f16_at(p.k.at(j, hk, s) + row_bytes(c.type_k, d/32*32) + 2);
                        mag = std::fabs(k[d] - m) + std::fabs(m);
                    }
                    s1 += mag;
                    s2 += mag*mag;
                }
                sum_k[j]  = s1;
                norm_k[j] = std::sqrt(s2);
            }
            for (int64_t g = 0; g < c.gqa; g++) {
                const int64_t h     = hk*c.gqa + g;
                const int64_t hv    = c.head_v(h);
                const double  slope = alibi_slope(c, h);
                double max_min = 0; // largest minimum of a block of V
                for (int64_t j = 0; is_quantized(c.type_v) && j < c.n_kv; j++) {
                    double top = 0;
                    for (int64_t d = 0; d < c.dv; d += 32) {
                        const char * block = p.v_raw(s, hv, j) + row_bytes(c.type_v, d);
                        top = std::max(top, (double) std::fabs(f16_at(block)));
                        if (has_min(c.type_v)) {
                            const double m = std::fabs(f16_at(block + 2));
                            max_min = std::max(max_min, m);
                            top     = std::max(top, m/32); // the kernel's too
                        }
                    }
                    scale_v[j] = top;
                }
                for (int64_t i = 0; i < c.n_q; i++) {
                    const int64_t row = (s*c.n_q + i)*c.n_head() + h;
                    const float * qf  = (const float *) p.q.at(i, h, s);
                    double q_max = 0, q_norm = 0;
                    for (int64_t d = 0; d < c.dk; d++) {
                        q[d]   = qf[d];
                        q_max  = std::max(q_max, std::fabs(q[d]));
                        q_norm += q[d]*q[d];
                    }
                    q_norm = std::sqrt(q_norm);
                    const double step = r.query && is_quantized(c.type_k) ? q_max/STEPS : 0.0;

                    const ggml_fp16_t * mask = c.mask == MASK_NONE ? nullptr : p.mask_at(i, h, s);
                    double  top = -INFINITY;
                    int64_t n   = 0;
                    for (int64_t j = 0; j < c.n_kv; j++) {
                        const double m = mask ? slope*ggml_fp16_to_fp32(mask[j]) : 0.0;
                        if (m == -INFINITY) {
                            z[j] = -INFINITY;
                            continue;
                        }
                        const float * k = p.k_row(s, hk, j);
                        double a[4] = {}, b[4] = {};
                        for (int64_t d = 0; d < c.dk; d += 4) {
                            for (int l = 0; l < 4; l++) {
                                const double qk = q[d + l]*k[d + l];
                                a[l] += qk;
                                b[l] += qk*qk;
                            }
                        }
                        const double x  = c.scale*(a[0] + a[1] + a[2] + a[3]);
                        const double x2 = c.scale*c.scale*(b[0] + b[1] + b[2] + b[3]);
                        const double y  = cap != 0 ? cap*std::tanh(x/cap) : x;
                        const double qk = c.scale*q_norm*norm_k[j];
                        z[j] = y + m;
                        n++;
                        top = std::max(top, z[j]);
                        const double t = c.scale*step;
                        const double small = U*(std::fabs(x) + std::fabs(m)) + (cap != 0 ? 0x1p-23*cap : 0.0) + EXP_ERR/4;
                        e_max[j] = HALF*t*sum_k[j] + 2*c.dk*U*qk + U*(4*std::fabs(x) + 3*std::fabs(m) + std::fabs(z[j])) + (cap != 0 ? 0x1p-21*cap : 0.0) + EXP_ERR;
                        e_rms[j] = t*t/12*norm_k[j]*norm_k[j] + U*U/6*c.dk*(x*x + x2) + small*small; // squared
                    }
                    if (n == 0) {
                        res.blind[row] = true;
                        continue;
                    }
                    double total = 0;
                    if (c.sinks) {
                        const double sink = ((const float *) p.sinks_mem.data)[h];
                        top   = std::max(top, sink);
                        total = std::exp(sink - top);
                    }
                    for (int64_t j = 0; j < c.n_kv; j++) {
                        if (z[j] != -INFINITY) {
                            const double near = U*std::fabs(z[j] - top);
                            e_max[j] += near;
                            e_rms[j] += near*near;
                            z[j] = std::exp(z[j] - top);
                            total += z[j];
                        }
                    }
                    double * out = res.out.data() + row*c.dv;
                    double e2_max = 0, e2_rms = 0, e_top = 0, w_top = 0, p_sum = 0;
                    std::fill(sq.begin(), sq.end(), 0.0);
                    for (int64_t j = 0; j < c.n_kv; j++) {
                        if (z[j] == -INFINITY) {
                            continue;
                        }
                        const double pj = z[j]/total;
                        const float * v = p.v_row(s, hv, j);
                        for (int64_t d = 0; d < c.dv; d++) {
                            const double pv = pj*v[d];
                            out[d] += pv;
                            sq[d]  += pv*v[d];
                        }
                        p_sum  += pj;
                        e2_max += pj*e_max[j]*e_max[j];
                        e2_rms += pj*e_rms[j];
                        if (pj > U) {
                            e_top = std::max(e_top, e_max[j]);
                        }
                        w_top = std::max(w_top, pj*scale_v[j]);
                    }
                    const double w    = r.weights && is_quantized(c.type_v) ? w_top/STEPS : 0.0;
                    const double grow = 1 + 2*e_top; // terms of second order: exp(e) - 1 against e
                    double lost = 0;
                    for (int64_t j = 0; w > 0 && j < c.n_kv; j++) {
                        const double wj = z[j] == -INFINITY ? 0 : z[j]/total*scale_v[j];
                        lost += wj < 2*w ? std::min(wj, HALF*w) : 0;
                    }
                    lost *= level*(has_min(c.type_v) ? 0.5 : c.layout == LAYOUT_MLA && c.data == DATA_CHANNELS ? std::sqrt(1.0/29) : 0.0);
                    double * bound = res.bound.data() + row*c.dv;
                    double   mse   = 0;
                    for (int64_t d = 0; d < c.dv; d++) {
                        const double var = std::max(sq[d] - 2*out[d]*out[d] + out[d]*out[d]*p_sum, 0.0);
                        const double mag = std::sqrt(p_sum*sq[d]) + 2*max_min*p_sum; // at least sum p|v|
                        bound[d] = grow*std::sqrt(e2_max*var) + (2*n + 32)*U*mag + n*HALF*w*level + TINY;
                        mse += grow*grow*e2_rms*var + (n + 16)*U*U/6*mag*mag + w*w/12*n*level*level/3 + lost*lost;
                        res.ref2 += out[d]*out[d];
                    }
                    res.mse[row] = mse;
                    res.mse_weights += c.dv*(w*w/12*n*level*level/3 + lost*lost);
                }
            }
        }
    }
}

//
// engines
//

struct run_options {
    int  n_threads = 2;
    bool upstream  = false; // its own path
};

static std::string fault; // planted, see test_faults

#define FAULT(name) (!fault.empty() && fault == (name))

// what the operation is told, with a planted fault if there is one
struct operation {
    float scale, max_bias, softcap;
    bool  mask, sinks;
    int64_t mask_ne2;
    view  q, k, v;

    explicit operation(const problem & p) : scale(p.c.scale), max_bias(p.c.max_bias), softcap(p.c.softcap),
        mask(p.c.mask != MASK_NONE), sinks(p.c.sinks), mask_ne2(p.c.mask_ne2), q(p.q), k(p.k), v(p.v) {
        if (FAULT("scale"))   { scale *= 1.001f; }
        if (FAULT("bias"))    { max_bias *= 1.01f; }
        if (FAULT("softcap")) { softcap *= 1.01f; }
        if (FAULT("mask"))    { mask = mask && max_bias > 0; }
        if (FAULT("sinks"))   { sinks = false; }
        if (FAULT("mask-heads"))         { mask_ne2 = 1; }
        if (FAULT("position") && k.ne[1] > 1) { k.ne[1]--; v.ne[1]--; }
        if (FAULT("head"))    { k.nb[2] = 0; }
        if (FAULT("stream"))  { v.nb[3] = 0; }
        if (FAULT("stride"))  { v.nb[1] = row_bytes(v.type, v.ne[0]); }
    }
};

static void perturb(const problem & p, const run_options & opt, std::vector<float> & out) {
    const int64_t dv = p.c.dv, n = out.size()/dv;
    if (FAULT("value")) { // of one block, off by a hundredth
        for (int64_t d = 0; d < std::min<int64_t>(dv, 32); d++) {
            out[n/2*dv + d] *= 1.01f;
        }
    }
    if (FAULT("factor")) {
        for (auto & x : out) { x *= 1.001f; }
    }
    if (FAULT("single") && p.c.n_q == 1) {
        for (auto & x : out) { x *= 1.001f; }
    }
    if (FAULT("swap") && n > 1) {
        std::swap_ranges(out.begin(), out.begin() + dv, out.begin() + dv);
    }
    if (FAULT("unwritten")) {
        for (int64_t d = 0; d < dv; d++) { out[(n - 1)*dv + d] = std::numeric_limits<float>::quiet_NaN(); }
    }
    if (FAULT("blind")) {
        for (auto & x : out) { if (x == 0.0f) { x = 1e-6f; } }
    }
    if (FAULT("threads") && opt.n_threads > 1) {
        for (auto & x : out) { x = std::nextafter(x, 10.0f); }
    }
    if (FAULT("half")) { // outputs as f16
        for (auto & x : out) { x = ggml_fp16_to_fp32(ggml_fp32_to_fp16(x)); }
    }
    if (FAULT("finite")) {
        for (auto & x : out) { if (!std::isfinite(x)) { x = 0.0f; } }
    }
    if (FAULT("spread")) { // a NaN spoils its neighbours
        for (size_t i = 0; i + 1 < out.size(); i++) { if (!std::isfinite(out[i + 1])) { out[i] = out[i + 1]; } }
    }
}

#ifndef KVQ_ATTN_STANDALONE

static const char * engine_name() { return "graph"; }

static std::vector<float> run(const problem & p, const run_options & opt) {
    static std::map<int, ggml_backend_ptr> backends;
    auto & backend = backends[opt.n_threads];
    if (!backend) {
        backend.reset(ggml_backend_cpu_init());
        ggml_backend_cpu_set_n_threads(backend.get(), opt.n_threads);
    }
    ggml_backend_cpu_set_use_ref(backend.get(), opt.upstream);

    if (FAULT("8-bit-query")) {
        ggml_backend_cpu_set_use_ref(backend.get(), true);
    }
    const config & c = p.c;
    const operation op(p);
    ggml_init_params params = { 32*ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true };
    ggml_context_ptr ctx(ggml_init(params));

    // a view into a tensor that is all of the memory
    const auto tensor = [&](const view & t) {
        const int64_t unit = traits(t.type)->blck_size;
        ggml_tensor * base = ggml_new_tensor_1d(ctx.get(), t.type, t.mem->size/traits(t.type)->type_size*unit);
        base->data = t.mem->data;
        return ggml_view_4d(ctx.get(), base, t.ne[0], t.ne[1], t.ne[2], t.ne[3], t.nb[1], t.nb[2], t.nb[3], t.offset);
    };
    ggml_tensor * mask = nullptr;
    if (op.mask) {
        mask = ggml_new_tensor_4d(ctx.get(), GGML_TYPE_F16, c.n_kv, c.n_q + c.mask_pad, op.mask_ne2, c.mask_ne3);
        mask->data = p.mask_mem.data;
    }
    ggml_tensor * dst = ggml_flash_attn_ext(ctx.get(), tensor(op.q), tensor(op.k), tensor(op.v), mask, op.scale, op.max_bias, op.softcap);
    if (op.sinks) {
        ggml_tensor * sinks = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_F32, c.n_head());
        sinks->data = p.sinks_mem.data;
        ggml_flash_attn_ext_add_sinks(dst, sinks);
    }
    memory out;
    out.alloc(ggml_nbytes(dst), 0xff, sizeof(float)); // NaN where nothing is written
    dst->data = out.data;

    ggml_cgraph * gf = ggml_new_graph(ctx.get());
    ggml_build_forward_expand(gf, dst);
    CHECK("supported", ggml_backend_supports_op(backend.get(), dst), "%s", c.text().c_str());
    CHECK("computed", ggml_backend_graph_compute(backend.get(), gf) == GGML_STATUS_SUCCESS, "%s", c.text().c_str());

    std::vector<float> res(out.size/sizeof(float));
    memcpy(res.data(), out.data, out.size);
    if (!opt.upstream) {
        perturb(p, opt, res);
    }
    return res;
}

#endif

#ifdef KVQ_ATTN_STANDALONE

static const char * engine_name() { return kvq_attn_name(); }

static ggml_tensor by_hand(const view & t) {
    ggml_tensor res = {};
    res.type = t.type;
    memcpy(res.ne, t.ne, sizeof(res.ne));
    memcpy(res.nb, t.nb, sizeof(res.nb));
    res.data = t.mem->data + t.offset;
    return res;
}

static ggml_tensor by_hand(ggml_type type, int64_t ne0, int64_t ne1, int64_t ne2, int64_t ne3, void * data) {
    ggml_tensor res = {};
    const int64_t ne[4] = { ne0, ne1, ne2, ne3 };
    res.type  = type;
    res.data  = data;
    res.nb[0] = traits(type)->type_size;
    for (int i = 0; i < 4; i++) {
        res.ne[i] = ne[i];
        if (i > 0) {
            res.nb[i] = res.nb[i - 1]*ne[i - 1];
        }
    }
    return res;
}

// The items in an order of their own, each by any of the threads: all orders must give the same bits.
static std::vector<float> run(const problem & p, const run_options & opt) {
    const config & c = p.c;
    const operation op(p);
    ggml_tensor q = by_hand(op.q), k = by_hand(op.k), v = by_hand(op.v), mask = {}, sinks = {};
    ggml_tensor dst = by_hand(GGML_TYPE_F32, c.dv, c.n_head(), c.n_q, c.n_stream, nullptr);
    dst.op = GGML_OP_FLASH_ATTN_EXT;
    const float op_params[3] = { op.scale, op.max_bias, op.softcap };
    memcpy(dst.op_params, op_params, sizeof(op_params));
    dst.src[0] = &q;
    dst.src[1] = &k;
    dst.src[2] = &v;
    if (op.mask) {
        mask = by_hand(GGML_TYPE_F16, c.n_kv, c.n_q + c.mask_pad, op.mask_ne2, c.mask_ne3, p.mask_mem.data);
        dst.src[3] = &mask;
    }
    if (op.sinks) {
        sinks = by_hand(GGML_TYPE_F32, c.n_head(), 1, 1, 1, p.sinks_mem.data);
        dst.src[4] = &sinks;
    }
    memory out;
    out.alloc(c.dv*c.n_head()*c.n_q*c.n_stream*sizeof(float), 0xff, sizeof(float)); // NaN where nothing is written
    dst.data = out.data;

    CHECK("taken", kvq_attn_takes(&dst), "%s", c.text().c_str());

    // exactly what was asked for; a write beyond it ends the program, one before it is seen below
    memory work;
    const size_t front = 4096;
    const size_t size  = kvq_attn_work_size(&dst, opt.n_threads);
    work.alloc(front + size, 0xff, 64);
    char * scratch = work.data + front;

    const int n_items = kvq_attn_n_items(&dst);
    std::vector<int> order(n_items);
    random_source rng(c.seed + 77*opt.n_threads);
    for (int i = 0; i < n_items; i++) {
        order[i] = i;
        std::swap(order[i], order[rng.below(i + 1)]);
    }
    for (const int i : order) {
        kvq_attn_item(&dst, i, scratch, (int) rng.below(opt.n_threads), opt.n_threads);
    }
    for (int i = opt.n_threads; i-- > 0; ) {
        kvq_attn_finish(&dst, scratch, i, opt.n_threads);
    }
    bool clean = true;
    for (size_t i = 0; i < front; i++) {
        clean = clean && (uint8_t) work.data[i] == 0xff;
    }
    CHECK("scratch", clean, "%s: a write before the scratch", c.text().c_str());

    std::vector<float> res(out.size/sizeof(float));
    memcpy(res.data(), out.data, out.size);
    perturb(p, opt, res);
    return res;
}

#endif

//
// drawing cases
//

struct sizes {
    int64_t cells;  // rows of queries x positions x values of both rows: what the reference costs
    int64_t values; // in the cache: what making it costs
};

static sizes limits = { 5000000, 1200000 };

struct head_size { int64_t k, v; };

struct case_source {
    random_source rng;
    deck<int>         heads    = { 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17 };
    deck<int64_t>     gqa      = { 1, 1, 2, 2, 3, 4, 4, 7, 8, 8, 16, 71, 130 };
    deck<int64_t>     heads_kv = { 1, 1, 2, 3 };
    deck<int64_t>     n_kv     = { 1, 31, 63, 64, 65, 127, 128, 129, 255, 257, 511, 513, 1000, 2500, 4097 };
    deck<int64_t>     n_q      = { 1, 1, 1, 2, 3, 4, 5, 8, 9, 16, 17, 31, 33, 64, 65, 70 };
    deck<int64_t>     streams  = { 1, 1, 1, 2, 3 };
    deck<mask_kind>   mask     = { MASK_NONE, MASK_CAUSAL, MASK_CAUSAL, MASK_WINDOW, MASK_RANDOM, MASK_VALUES, MASK_ROWS, MASK_TILES, MASK_TILES };
    deck<layout_kind> layout   = { LAYOUT_PLAIN, LAYOUT_CACHE, LAYOUT_CACHE, LAYOUT_ODD, LAYOUT_ODD_HEAD };
    deck<data_kind>   data     = { DATA_NORMAL, DATA_NORMAL, DATA_CHANNELS, DATA_PEAKED, DATA_FLAT, DATA_BLOCKS, DATA_SMALL };
    deck<float>       softcap  = { 0.0f, 0.0f, 0.0f, 5.0f, 50.0f };
    deck<float>       bias     = { 0.0f, 0.0f, 0.0f, 8.0f };
    deck<int>         options  = { 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15 };
    int n_drawn = 0;

    explicit case_source(uint64_t seed) : rng(seed) {}

    config draw(ggml_type type_k, ggml_type type_v) {
        static const head_size head_sizes[] = {
            { 64, 64 }, { 128, 128 }, { 64, 64 }, { 128, 128 }, { 32, 32 }, { 96, 96 }, { 160, 160 }, { 192, 192 }, { 256, 256 },
            { 512, 512 }, { 192, 128 }, { 576, 512 }, { 64, 96 }, { 96, 64 }, { 32, 128 }, { 40, 40 }, { 80, 80 }, { 72, 56 },
        };
        config c;
        c.type_k = type_k;
        c.type_v = type_v;
        c.seed   = rng.bits();

        const head_size hs = head_sizes[heads.draw(rng, [&](const int & i) {
            return head_sizes[i].k % traits(type_k)->blck_size == 0 && head_sizes[i].v % traits(type_v)->blck_size == 0;
        })];
        c.dk = hs.k;
        c.dv = hs.v;
        c.layout = layout.draw(rng);
        if (type_k == type_v && c.dv < c.dk && rng.chance(0.7)) {
            c.layout = LAYOUT_MLA;
        }
        // what is too large for the limits is left for later draws
        const int64_t per_pos = c.dk + c.dv;
        c.n_kv      = n_kv.draw(rng, [&](const int64_t & n) { return n*per_pos <= limits.values && n*per_pos <= limits.cells; });
        c.n_head_kv = heads_kv.draw(rng, [&](const int64_t & n) { return n*c.n_kv*per_pos <= std::min(limits.values, limits.cells); });
        c.n_stream  = streams.draw(rng, [&](const int64_t & n) { return n*c.n_head_kv*c.n_kv*per_pos <= std::min(limits.values, limits.cells); });
        c.gqa       = gqa.draw(rng, [&](const int64_t & n) { return n*c.n_stream*c.n_head_kv*c.n_kv*per_pos <= limits.cells; });
        c.n_q       = n_q.draw(rng, [&](const int64_t & n) { return n*c.gqa*c.n_stream*c.n_head_kv*c.n_kv*per_pos <= limits.cells; });

        c.n_head_v  = c.n_head_kv;
        if (c.layout != LAYOUT_MLA && rng.chance(0.1)) { // K and V with heads of their own
            const int64_t other = 1 + rng.below(4);
            if (c.n_head() % other == 0) {
                c.n_head_v = other;
            }
        }
        c.mask     = n_drawn++ % 97 == 96 ? MASK_ALL : mask.draw(rng);
        c.data     = data.draw(rng);
        c.softcap  = softcap.draw(rng);
        c.max_bias = bias.draw(rng, [&](const float & b) { return b == 0.0f || c.mask != MASK_NONE; });
        const int o = options.draw(rng);
        c.sinks      = o & 1;
        c.q_permuted = o & 2;
        c.mask_ne2   = o & 4 ? c.n_head() : 1;
        if ((o & 4) && c.n_head() % 2 == 0 && rng.chance(0.3)) {
            c.mask_ne2 = c.n_head()/2;
        }
        c.mask_ne3 = o & 8 ? c.n_stream : 1;
        c.mask_pad = rng.chance(0.3) ? rng.below(7) : 0;
        if (c.mask == MASK_NONE) {
            c.mask_ne2 = c.mask_ne3 = 1;
        }
        c.scale = (rng.chance(0.3) ? 0.5f + (float) rng.uniform() : 1.0f)/std::sqrt((float) c.dk);
        return c;
    }
};

// Which values of each property, and of each two of them, were tested: so that a change of the drawing can't leave one out.
struct coverage {
    std::map<std::string, std::set<std::string>> seen;

    void add(const config & c) {
        const std::vector<std::pair<std::string, std::string>> props = {
            { "d",       std::to_string(c.dk) + "/" + std::to_string(c.dv) },
            { "gqa",     std::to_string(c.gqa) },
            { "kv",      std::to_string(c.n_kv) },
            { "q",       std::to_string(c.n_q) },
            { "streams", std::to_string(c.n_stream) },
            { "mask",    mask_names[c.mask] },
            { "layout",  layout_names[c.layout] },
            { "data",    data_names[c.data] },
            { "options", std::string(c.softcap != 0 ? "cap" : "") + (c.max_bias != 0 ? " bias" : "") + (c.sinks ? " sinks" : "") },
        };
        for (size_t i = 0; i < props.size(); i++) {
            seen[props[i].first].insert(props[i].second);
            for (size_t j = 0; j < i; j++) {
                seen["pairs"].insert(props[i].first + props[i].second + " " + props[j].first + props[j].second);
            }
        }
    }

    // all values that the decks have
    void check(const case_source & source) const {
        const auto n = [](const auto & deck) {
            return (int) std::set<typename std::decay<decltype(deck.values[0])>::type>(deck.values.begin(), deck.values.end()).size();
        };
        const std::map<std::string, int> all = {
            { "d", 16 }, { "gqa", n(source.gqa) }, { "kv", n(source.n_kv) }, { "q", n(source.n_q) }, { "streams", n(source.streams) },
            { "mask", N_MASKS }, { "layout", N_LAYOUTS }, { "data", N_DATA }, { "options", 8 },
        };
        printf("covered:");
        for (const auto & [name, values] : seen) {
            printf(" %s %d", name.c_str(), (int) values.size());
            CHECK("covered", name == "pairs" || (int) values.size() == all.at(name), "%s: %d values of %d", name.c_str(), (int) values.size(), all.at(name));
        }
        printf("\n");
    }
};

//
// checks
//

static double largest_of_bound = 0, largest_of_mse = 0; // of all cases: how near a correct kernel comes to what is allowed

struct outcome {
    double err2 = 0, ref2 = 0, mse = 0, nmse = 0;
};

// An output against the reference. strict: within the bounds of a correct kernel; else only measured.
static outcome compare(const problem & p, const result & ref, const std::vector<float> & out, bool strict) {
    const int64_t dv = p.c.dv;
    outcome res;
    int64_t worst = -1;
    double  worst_ratio = 0;
    bool    blind_ok = true;
    for (int64_t row = 0; row < (int64_t) ref.mse.size(); row++) {
        for (int64_t i = row*dv; i < (row + 1)*dv; i++) {
            const double err = std::fabs(out[i] - ref.out[i]);
            if (ref.blind[row]) {
                blind_ok = blind_ok && out[i] == 0.0f;
                continue;
            }
            const double ratio = std::isnan(err) ? INFINITY : err/ref.bound[i];
            if (ratio > worst_ratio) {
                worst_ratio = ratio;
                worst = i;
            }
            res.err2 += err*err;
        }
        res.mse += ref.mse[row];
    }
    res.ref2 = ref.ref2;
    res.nmse = res.ref2 > 0 ? res.err2/res.ref2 : 0;
    if (strict) {
        largest_of_bound = std::max(largest_of_bound, worst_ratio);
        largest_of_mse   = std::max(largest_of_mse, res.mse > 0 ? res.err2/res.mse : 0);
        const std::string text = p.c.text();
        CHECK("blind", blind_ok, "%s: a row that attends to nothing isn't 0", text.c_str());
        CHECK("bound", worst_ratio <= 1, "%s: value %lld of row %lld is %.9g, not %.9g: off by %g of what it may be", text.c_str(),
            (long long) (worst % dv), (long long) (worst/dv), (double) out[worst], ref.out[worst], worst_ratio);
        // The expectation is above the true one (Cauchy and Schwarz), but the errors of one row hang together through the
        // roundings of one query: with a single row their sum of squares may behave like that of one normal variable, of which
        // one in 10^5 is above 4.4 standard deviations, 20 times the expectation.
        // Without that rounding they don't: a factor of 4.
        const double factor = is_quantized(p.c.type_k) && rounding_of_path().query ? 20 : 4;
        CHECK("error", res.err2 <= factor*res.mse, "%s: squared error %g (%.3g of the output), expected %g", text.c_str(), res.err2, res.nmse, res.mse);
    }
    return res;
}

static bool same_bits(const std::vector<float> & a, const std::vector<float> & b) {
    return memcmp(a.data(), b.data(), a.size()*sizeof(float)) == 0;
}

// one query of a batch alone: the others are no neighbours any more
static void test_alone(const problem & p, const result & ref, random_source & rng) {
    const config & c = p.c;
    if (c.n_q == 1 || c.mask_ne2*c.mask_ne3 > 1) {
        return; // such a mask's rows of one query aren't contiguous
    }
    problem one;
    one.c    = c;
    one.c.n_q = 1;
    one.c.mask_pad = 0;
    const int64_t i = rng.below(c.n_q);
    one.q       = p.q;
    one.q.ne[1] = 1;
    one.q.offset += i*p.q.nb[1];
    one.k = p.k;
    one.v = p.v;
    if (c.mask != MASK_NONE) {
        one.mask_mem.alloc(c.n_kv*sizeof(ggml_fp16_t), 0, 2);
        memcpy(one.mask_mem.data, p.mask_at(i, 0, 0), c.n_kv*sizeof(ggml_fp16_t));
    }
    if (c.sinks) {
        one.sinks_mem.alloc(p.sinks_mem.size, 0, sizeof(float));
        memcpy(one.sinks_mem.data, p.sinks_mem.data, p.sinks_mem.size);
    }
    const auto out = run(one, {});
    double worst = 0;
    for (int64_t s = 0; s < c.n_stream; s++) {
        for (int64_t h = 0; h < c.n_head(); h++) {
            for (int64_t d = 0; d < c.dv; d++) {
                const int64_t in_batch = ((s*c.n_q + i)*c.n_head() + h)*c.dv + d;
                const double  err = std::fabs(out[(s*c.n_head() + h)*c.dv + d] - ref.out[in_batch]);
                if (!(err <= ref.bound[in_batch])) {
                    worst = std::max(worst, std::isnan(err) || ref.bound[in_batch] == 0 ? INFINITY : err/ref.bound[in_batch]);
                }
            }
        }
    }
    CHECK("alone", worst <= 1, "%s: query %d alone is off by %g of what it may be", c.text().c_str(), (int) i, worst);
}

//
// numbers that aren't finite
//

enum { BAD_QUERY, BAD_K, BAD_V, N_BAD };

// the value as the first of a block's scale or, of types without one, as the first value; both make it `bad` or NaN
static void spoil(const view & t, char * row, int64_t block, float bad) {
    char * x = row + block*row_bytes(t.type, 32);
    switch (t.type) {
        case GGML_TYPE_F32:  memcpy(x, &bad, sizeof(bad)); break;
        case GGML_TYPE_BF16: memcpy(x, (const char *) &bad + 2, 2); break;
        default: {
            const ggml_fp16_t b = ggml_fp32_to_fp16(bad);
            memcpy(x, &b, sizeof(b));
        }
    }
}

// A NaN or an infinity at one place: what attends to it isn't finite, in the values that attention in double has so; all
// else is as it was. A position that is masked for a query isn't attended to, whatever its row holds.
//
// Upstream's path row by row skips a masked position before it reads it; its tiled path has to be patched to. Here the rule holds
// everywhere.
static void test_nonfinite(ggml_type type_k, ggml_type type_v, uint64_t seed) {
    random_source rng(seed);
    run_options one_thread;
    one_thread.n_threads = 1;
    for (int what = 0; what < N_BAD; what++) {
        for (const float bad : { std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity() }) {
            config c;
            c.type_k = type_k;
            c.type_v = type_v;
            c.dk     = c.dv = rng.chance(0.5) ? 64 : 96;
            c.gqa    = 1 + rng.below(4);
            c.n_q    = rng.chance(0.5) ? 2 : 1 + rng.below(9);
            c.n_kv   = rng.chance(0.3) ? 300 : 40;
            c.mask   = MASK_RANDOM;
            c.data   = DATA_FLAT; // so that every position has weight
            c.seed   = rng.bits();
            c.scale  = 1.0f;
            c.n_head_v = c.n_head_kv;
            problem p;
            make_problem(p, c);
            current_case = c.text() + " not finite";
            result ref;
            attend(p, {}, ref);

            const int64_t h = rng.below(c.n_head()), hk = rng.below(c.n_head_kv), j = rng.below(c.n_kv), i = rng.below(c.n_q);
            const int64_t block = rng.below(c.dk/32);
            switch (what) {
                case BAD_QUERY: ((float *) p.q.at(i, h, 0))[rng.below(c.dk)] = bad; break;
                case BAD_K:     spoil(p.k, p.k.at(j, hk, 0), block, bad); break;
                default:        spoil(p.v, p.v.at(j, hk, 0), block, bad); break;
            }
            std::vector<float> kf, vf;
            decode(p.k, kf);
            decode(p.v, vf);
            const auto after = run(p, one_thread);

            // whether the softmax of a row is surely no number: a score is none, or two are +inf
            const auto lost = [&](int64_t ri, int64_t rh) {
                int n_inf = 0;
                for (int64_t jj = 0; jj < c.n_kv; jj++) {
                    double s = 0;
                    for (int64_t d = 0; d < c.dk; d++) {
                        s += (double) ((const float *) p.q.at(ri, rh, 0))[d]*kf[((rh/c.gqa)*c.n_kv + jj)*c.dk + d];
                    }
                    if (p.mask_at(ri, rh, 0)[jj] == 0) {
                        n_inf += std::isnan(s) ? 2 : s == INFINITY;
                    }
                }
                return n_inf >= 2;
            };
            // the scale of a block leaves the sum of its levels times an infinity: upstream's products too
            const bool one_inf = what == BAD_K && std::isinf(bad) && is_quantized(type_k);

            int n_kept = 0, n_spoilt = 0;
            for (int64_t row = 0; row < c.n_q*c.n_head(); row++) {
                const int64_t ri = row/c.n_head(), rh = row % c.n_head();
                const bool attends = p.mask_at(ri, rh, 0)[j] == 0 && rh/c.gqa == hk;
                const bool touched = what == BAD_QUERY ? ri == i && rh == h : attends;
                const bool is_lost = touched && what != BAD_V && !one_inf && lost(ri, rh);
                for (int64_t d = 0; d < c.dv; d++) {
                    const int64_t at = row*c.dv + d;
                    if (!touched || (what == BAD_V && std::isfinite(vf[(hk*c.n_kv + j)*c.dv + d]))) {
                        const double err = std::fabs(after[at] - ref.out[at]);
                        n_kept += !(err <= ref.bound[at]);
                    } else if (what == BAD_V || is_lost) { // one infinite score alone may leave numbers: weights of 0 or 1
                        n_spoilt += std::isfinite(after[at]);
                    }
                }
            }
            const char * const names[] = { "a query", "K", "V" };
            CHECK("spoilt", n_spoilt == 0, "%s: %g in %s: %d values are finite that attend to it", c.text().c_str(), bad, names[what], n_spoilt);
            CHECK("kept", n_kept == 0, "%s: %g in %s: %d values are changed that don't attend to it", c.text().c_str(), bad, names[what], n_kept);
        }
    }
}

//
// the softmax's exp
//

#ifdef KVQ_ATTN_STANDALONE
static void test_exp(bool all) {
    // every float of [-87, 0] is 1.1e9 numbers; a stride prime to powers of two meets all exponents and low bits
    const uint32_t stride = all ? 13 : 1009;
    const float    ends[] = { 0.0f, -0.0f, -87.0f, -86.99999f, -1e-45f, -FLT_MIN, -0.34657359f, -0.34657362f, -0.5f, -1.0f };
    std::vector<float> x(ends, ends + sizeof(ends)/sizeof(ends[0]));
    double worst = 0;
    float  at    = 0;
    const auto flush = [&] {
        std::vector<float> y(x.size() + 1, 7.0f);
        kvq_attn_exp(x.data(), y.data(), x.size());
        CHECK("exp", y[x.size()] == 7.0f, "more than n values are written");
        for (size_t i = 0; i < x.size(); i++) {
            const double e   = std::exp((double) x[i]);
            const double err = std::fabs(y[i] - e)/e;
            if (!(err <= worst)) {
                worst = std::isnan(err) ? INFINITY : err;
                at    = x[i];
            }
        }
        x.clear();
    };
    for (uint32_t bits = 0x80000001u; bits <= 0xc2ae0000u; bits += stride) { // to -87
        float v;
        memcpy(&v, &bits, sizeof(v));
        x.push_back(v);
        if (x.size() >= 4099) { // not a multiple of any vector
            flush();
        }
    }
    flush();
    printf("exp: largest relative error %.3g (2^%.2f) at %.9g\n", worst, std::log2(worst), at);
    CHECK("exp", worst < 0x1p-22, "relative error %g at %.9g", worst, at);

    const float below[] = { -87.00001f, -87.3f, -88.0f, -100.0f, -103.9f, -1e4f, -1e30f, -FLT_MAX, -INFINITY };
    for (int n = 1; n <= 40; n++) { // places in vectors and behind them
        for (const float v : below) {
            std::vector<float> a(n, -1.0f), y(n);
            a[n - 1] = v;
            a[0]     = n > 1 ? NAN : v;
            kvq_attn_exp(a.data(), y.data(), n);
            CHECK("exp", y[n - 1] >= 0 && y[n - 1] <= FLT_MIN && (v != -INFINITY || y[n - 1] == 0), "exp(%g) is %g", v, y[n - 1]);
            CHECK("exp", n == 1 || std::isnan(y[0]), "exp(NaN) is %g", y[0]);
            for (int i = 1; i + 1 < n; i++) {
                CHECK("exp", std::fabs(y[i] - std::exp(-1.0)) < 1e-6, "exp(-1) is %g", y[i]);
            }
        }
    }
}
#endif

//
// all together
//

struct totals {
    double ours = 0, upstream = 0, expected = 0, weights = 0;
    int    n = 0;
    bool   differ = false; // from upstream's path
};

// everything about one case
static void test_case(const config & c, totals & t, random_source & rng) {
    problem p;
    make_problem(p, c);
    current_case = c.text();
    result ref;
    attend(p, rounding_of_path(), ref);

    static deck<int> threads = { 1, 2, 3, 8 };
    run_options opt;
    opt.n_threads = threads.draw(rng);
    const auto out = run(p, opt);
    const outcome ours = compare(p, ref, out, true);

    run_options other = opt;
    while (other.n_threads == opt.n_threads && !rng.chance(0.1)) { // seldom the same once more
        other.n_threads = threads.draw(rng);
    }
    CHECK("bits", same_bits(out, run(p, other)), "%s: %d and %d threads give other bits", c.text().c_str(), opt.n_threads, other.n_threads);
    test_alone(p, ref, rng);

    if (ours.ref2 > 0) {
        t.ours     += ours.nmse;
        t.expected += ours.mse/ours.ref2;
        t.weights  += ref.mse_weights/ours.ref2;
        t.n++;
#ifndef KVQ_ATTN_STANDALONE
        run_options up;
        up.upstream = true;
        const auto theirs = run(p, up);
        t.upstream += compare(p, ref, theirs, false).nmse;
        t.differ = t.differ || !same_bits(out, theirs);
#endif
    }
}

static void test_pair(ggml_type type_k, ggml_type type_v, int n_cases, case_source & source, coverage * cover) {
    totals t;
    for (int i = 0; i < n_cases; i++) {
        const config c = source.draw(type_k, type_v);
        if (cover) {
            cover->add(c);
        }
        test_case(c, t, source.rng);
    }
    test_nonfinite(type_k, type_v, source.rng.bits());
    if (t.n == 0 || quiet) {
        return;
    }
    const double ours = t.ours/t.n, expected = t.expected/t.n;
#ifdef KVQ_ATTN_STANDALONE
    printf("%-7s %-7s %10.2e %10.2e\n", name_of(type_k), name_of(type_v), ours, expected);
#else
    const double upstream = t.upstream/t.n;
    CHECK("taken", t.differ, "K %s, V %s: upstream's path gives the same bits: it was run", name_of(type_k), name_of(type_v));
    printf("%-7s %-7s %10.2e %10.2e %10.2e\n", name_of(type_k), name_of(type_v), ours, upstream, expected);
    // Upstream rounds the query to 8 bits for its own quantized types, to 11 and 8 for f16 and bf16, and sums up f16 values in
    // f16: all of these are coarser than our 16 bits. Weights it doesn't round; with few positions, or equal ones, only theirs is
    // left of the errors. Where all it does is in float, our expectation is the limit. Twice: a mean of a few cases.
    const bool upstream_exact = (type_k == GGML_TYPE_F32 || kvq_get_format(type_k)) && type_v != GGML_TYPE_F16;
    const double limit = upstream_exact ? upstream + 2*expected : upstream + 2*t.weights/t.n;
    CHECK("upstream", ours <= limit, "K %s, V %s: error %g, upstream's %g, limit %g", name_of(type_k), name_of(type_v), ours, upstream, limit);
#endif
}

// Each planted fault must be found, by the check that is there for it; without one nothing may be found.
static void test_faults(uint64_t seed) {
    const struct { const char * name; const char * check; } faults[] = {
        { "none",       nullptr  }, { "scale",     "error"  }, { "bias",    "error" }, { "softcap",  "error" }, { "mask",     "blind" },
        { "mask",       "bound"  }, { "mask-heads", "error" }, { "sinks",   "bound" }, { "position", "error" }, { "head",     "error" },
        { "stream",     "error"  }, { "stride",    "error"  }, { "value",   "bound" }, { "factor",   "error" }, { "half",     "error" },
        { "swap",       "bound"  }, { "unwritten", "bound"  }, { "blind",   "blind" }, { "threads",  "bits"  }, { "single",   "alone" },
        { "finite",     "spoilt" }, { "spread",    "kept"   },
#ifndef KVQ_ATTN_STANDALONE
        { "8-bit-query", "error" },
#endif
    };
    const int n_types = sizeof(kvq_cache_types)/sizeof(kvq_cache_types[0]);
    int n_wrong = 0;
    quiet = true;
    for (const auto & f : faults) {
        fault = f.name;
        failed_checks.clear();
        case_source source(seed);
        int n = 0;
        while (n < (f.check ? 100 : 40) && (!f.check || failed_checks.count(f.check) == 0)) {
            const ggml_type tk = kvq_cache_types[source.rng.below(n_types)].type;
            const ggml_type tv = kvq_cache_types[source.rng.below(n_types)].type;
            test_pair(FAULT("8-bit-query") ? GGML_TYPE_Q8_0 : tk, tv, 1, source, nullptr);
            n++;
        }
        std::string by;
        for (const auto & [name, count] : failed_checks) {
            by += " " + name + "(" + std::to_string(count) + ")";
        }
        const bool right = f.check ? failed_checks.count(f.check) > 0 : failed_checks.empty();
        printf("%s fault %-11s looked for by %-6s in %2d cases:%s\n", right ? "ok  " : "FAIL", f.name, f.check ? f.check : "all", n, by.empty() ? " nothing found" : by.c_str());
        n_wrong += !right;
    }
    fault.clear();
    quiet    = false;
    n_failed = n_wrong;
}

// Without GGML_KVQ_FA_FLOAT: what has a quantized side is ours, float pairs are upstream's, bit by bit.
static void test_default() {
    for (const auto & tk : kvq_cache_types) {
        for (const auto & tv : kvq_cache_types) {
            const bool floats = !is_quantized(tk.type) && !is_quantized(tv.type);
            config c;
            c.type_k = tk.type;
            c.type_v = tv.type;
            c.n_q    = 9;
            c.n_kv   = 300; // small enough for upstream to have one path only
            c.mask   = MASK_CAUSAL;
            c.seed   = 1;
            problem p;
            make_problem(p, c);
#ifdef KVQ_ATTN_STANDALONE
            ggml_tensor q = by_hand(p.q), k = by_hand(p.k), v = by_hand(p.v);
            ggml_tensor dst = by_hand(GGML_TYPE_F32, c.dv, c.n_head(), c.n_q, 1, nullptr);
            dst.op = GGML_OP_FLASH_ATTN_EXT;
            dst.src[0] = &q;
            dst.src[1] = &k;
            dst.src[2] = &v;
            CHECK("taken", kvq_attn_takes(&dst) == !floats, "%s", c.text().c_str());
            q.type = GGML_TYPE_F16;
            CHECK("taken", !kvq_attn_takes(&dst), "%s with queries in f16", c.text().c_str());
#else
            run_options up;
            up.upstream = true;
            CHECK("taken", same_bits(run(p, {}), run(p, up)) == floats, "%s", c.text().c_str());
#endif
        }
    }
}

#ifdef HAVE_GUARD_PAGES
static void on_fault(int sig) {
    const char head[] = "\nFAIL: memory outside of the tensors is touched, or a crash, in: ";
    GGML_UNUSED(!write(1, head, sizeof(head) - 1));
    GGML_UNUSED(!write(1, current_case.data(), current_case.size()));
    GGML_UNUSED(!write(1, "\n", 1));
    signal(sig, SIG_DFL);
    raise(sig);
}
#endif

int main(int argc, char ** argv) {
    bool     all = false, few = false, faults = false, by_default = false;
    uint64_t seed = 20;
    int      n_cases = 0;
    std::string expect, only_k, only_v;
    for (int i = 1; i < argc; i++) {
        const std::string arg = argv[i];
        if      (arg == "--all")    { all = true; }
        else if (arg == "--few")    { few = true; }
        else if (arg == "--faults") { faults = true; }
        else if (arg == "--default") { by_default = true; }
        else if (arg == "--expect" && i + 1 < argc) { expect  = argv[++i]; }
        else if (arg == "--seed"   && i + 1 < argc) { seed    = strtoull(argv[++i], nullptr, 10); }
        else if (arg == "--cases"  && i + 1 < argc) { n_cases = atoi(argv[++i]); }
        else if (arg == "--pair"   && i + 2 < argc) { only_k = argv[++i]; only_v = argv[++i]; }
        else {
            fprintf(stderr, "usage: %s [--all] [--few] [--faults] [--default] [--expect PATH] [--seed N] [--cases N] [--pair K V]\n", argv[0]);
            return 2;
        }
    }
#ifdef HAVE_GUARD_PAGES
    signal(SIGSEGV, on_fault);
    signal(SIGBUS,  on_fault);
#endif
    setvbuf(stdout, nullptr, _IOLBF, BUFSIZ);
    // pairs of float types too; before anything reads it
    const char * floats = by_default ? "0" : "1";
#ifdef _WIN32
    _putenv_s("GGML_KVQ_FA_FLOAT", floats);
#else
    setenv("GGML_KVQ_FA_FLOAT", floats, 1);
#endif

    printf("path %s, seed %llu\n", engine_name(), (unsigned long long) seed);
    CHECK("path", expect.empty() || expect == engine_name(), "the path is %s, not %s", engine_name(), expect.c_str());
    if (all) {
        limits = { 40000000, 6000000 };
    }
    if (by_default) {
        test_default();
        printf("%d passed, %d failed\n", n_passed, n_failed);
        return n_failed ? 1 : 0;
    }
    if (few) {
        limits = { 1000000, 300000 };
    }
    if (faults) {
        test_faults(seed);
        printf("%d failed\n", n_failed);
        return n_failed ? 1 : 0;
    }
#ifdef KVQ_ATTN_STANDALONE
    test_exp(all);
    printf("%-7s %-7s %10s %10s\n", "K", "V", "error", "expected");
#else
    printf("squared error relative to the output\n%-7s %-7s %10s %10s %10s\n", "K", "V", "ours", "upstream", "expected");
#endif
    case_source source(seed);
    coverage    cover;
    if (all) {
        source.n_kv.values.insert(source.n_kv.values.end(), { 12345, 40000, 70001 });
    }
#ifdef KVQ_ATTN_STANDALONE
    const int n_default = 4;
#else
    const int n_default = 3; // upstream's path is slow
#endif
    const int n_types = sizeof(kvq_cache_types)/sizeof(kvq_cache_types[0]);
    for (int ik = 0; ik < n_types; ik++) {
        for (int iv = 0; iv < n_types; iv++) {
            const ggml_type tk = kvq_cache_types[ik].type, tv = kvq_cache_types[iv].type;
            const int apart = (iv - ik + n_types) % n_types;
            if (few && apart != 0 && apart != 1 && apart != 5 && apart != 9) {
                continue;
            }
            if ((only_k.empty() || only_k == name_of(tk)) && (only_v.empty() || only_v == name_of(tv))) {
                test_pair(tk, tv, n_cases ? n_cases : all ? 40 : few ? 2 : n_default, source, &cover);
            }
        }
    }
    if (only_k.empty() && only_v.empty() && n_cases == 0 && !few) {
        cover.check(source);
    }
    printf("largest error by its bound %.3g (limit 1), largest squared error by its expectation %.3g (limit 20 or 4)\n", largest_of_bound, largest_of_mse);
    for (const auto & [name, count] : failed_checks) {
        printf("check %s failed %d times\n", name.c_str(), count);
    }
    printf("%d passed, %d failed\n", n_passed, n_failed);
    return n_failed ? 1 : 0;
}
