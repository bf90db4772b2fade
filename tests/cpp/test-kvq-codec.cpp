// SPDX-License-Identifier: MIT
//
// The codec of kvq2 to kvq6: the path of an instruction set against the reference, both against the definition.
//
// Linked with kvq-cpu.c, kvq-formats.c and kvq-standalone.c, so it runs wherever these three compile.
//
// Usage: test-kvq-codec [--golden FILE] [--expect PATH] [--bench]

#include "kvq-cpu.h"

#include <algorithm>
#include <cctype>
#include <cfloat>
#include <chrono>
#include <climits>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

static int n_failed = 0;
static int n_passed = 0;

#define CHECK(cond, ...) do { \
        if (cond) { n_passed++; break; } \
        if (n_failed++ < 50) { \
            printf("FAIL %s:%d: %s: ", __FILE__, __LINE__, #cond); \
            printf(__VA_ARGS__); \
            printf("\n"); \
        } \
    } while (0)

//
// formats
//

struct codec {
    const char * name;
    ggml_type    type;
    void (*encode_ref)(const float * x, void * y, int64_t k);
    void (*decode_ref)(const void * x, float * y, int64_t k);
    void (*encode)    (const float * x, void * y, int64_t k);
    void (*decode)    (const void * x, float * y, int64_t k);
    void (*dot)       (int n, float * s, size_t bs, const void * vx, size_t bx, const void * vy, size_t by, int nrc);
    double nse_limit; // of values of N(0,1): squared error by sum of squares
    const kvq_format * f;

    float dot_row(const void * x, const float * y, int n) const {
        float s = NAN;
        dot(n, &s, 0, x, 0, y, 0, 1);
        return s;
    }
};

static std::vector<codec> codecs() {
    const double limits[] = { 0.098, 0.0235, 0.0055, 0.0015, 0.00040 };
    std::vector<codec> res;
#define ADD(name, NAME, bits, n_qs, n_qh) \
    res.push_back({ #name, GGML_TYPE_##NAME, quantize_row_##name##_ref, dequantize_row_##name, quantize_row_##name, \
        kvq_dequantize_row_##name, ggml_vec_dot_##name##_f32, limits[(bits) - 2], kvq_get_format(GGML_TYPE_##NAME) });
    KVQ_FORMATS(ADD)
#undef ADD
    return res;
}

//
// values
//

// xorshift64*, so that the values are the same with every library
struct random_source {
    uint64_t s;

    explicit random_source(uint64_t seed) : s(seed*0x9e3779b97f4a7c15u + 1) {}

    uint64_t bits() {
        s ^= s >> 12;
        s ^= s << 25;
        s ^= s >> 27;
        return s*0x2545f4914f6cdd1du;
    }
    int    below(int n) { return (int) ((bits() >> 32)*(uint64_t) n >> 32); }
    double uniform()    { return ((double) (bits() >> 11) + 0.5)*0x1p-53; }
    double normal()     { return std::sqrt(-2.0*std::log(uniform()))*std::cos(6.283185307179586*uniform()); }
    double laplace()    { return (below(2) ? 1.0 : -1.0)*std::log(uniform()); }
    float  sign()       { return below(2) ? 1.0f : -1.0f; }
};

static float float_of_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof(x));
    return x;
}

static uint32_t bits_of_float(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof(bits));
    return bits;
}

static bool same_value(float a, float b) { // the same bits, or both NaN
    return bits_of_float(a) == bits_of_float(b) || (std::isnan(a) && std::isnan(b));
}

enum kind {
    KIND_NORMAL,
    KIND_LAPLACE,
    KIND_UNIFORM,
    KIND_OUTLIER,    // one value far above the others
    KIND_SINGLE,     // one value that isn't zero
    KIND_CONSTANT,
    KIND_TWO_VALUES,
    KIND_ONE_SIDE,   // one outlier, the others just below it, of the other sign: the farthest from the codebook
    KIND_EXACT,      // values that a block of the format holds
    KIND_TIES,       // halfway between levels of the first candidate, where f16 holds its scale exactly
    KIND_GRID,       // multiples of half a unit
    KIND_ZEROS,      // of both signs
    KIND_DENORMAL,   // of f32
    KIND_TINY,       // scales where f16 is denormal or zero
    KIND_HUGE,       // scales above f16, up to FLT_MAX
    KIND_MAGNITUDES, // 2^-149..2^127 in one block
    KIND_NOT_FINITE, // an inf or a NaN among others
    KIND_BITS,       // any 32 bits
    KIND_COUNT,
};

static const char * kind_names[KIND_COUNT] = {
    "normal", "Laplace", "uniform", "outlier", "single", "constant", "two values", "one side", "exact", "ties", "grid",
    "zeros", "denormal", "tiny", "huge", "magnitudes", "not finite", "bits",
};

// kinds whose squared error is a number that double holds well
static bool is_plain(int kind) {
    return kind <= KIND_GRID;
}

static void make_block(int kind, random_source & r, const kvq_format * f, float * x) {
    // 5e-4 .. 2000: f16 rounds a scale by less than 1 %, so that no y of plain values is clamped
    const float scale = (float) std::exp(std::min(std::max(3.0*r.normal(), -7.6), 7.6));
    switch (kind) {
        case KIND_NORMAL:   for (int i = 0; i < QK_KVQ; i++) { x[i] = scale*(float) r.normal();  } break;
        case KIND_LAPLACE:  for (int i = 0; i < QK_KVQ; i++) { x[i] = scale*(float) r.laplace(); } break;
        case KIND_UNIFORM:  for (int i = 0; i < QK_KVQ; i++) { x[i] = scale*(float) (2.0*r.uniform() - 1.0); } break;
        case KIND_OUTLIER: {
            for (int i = 0; i < QK_KVQ; i++) {
                x[i] = scale*(float) r.normal();
            }
            x[r.below(QK_KVQ)] *= (float) std::exp(5.0*r.uniform());
        } break;
        case KIND_SINGLE: {
            for (int i = 0; i < QK_KVQ; i++) {
                x[i] = 0.0f;
            }
            x[r.below(QK_KVQ)] = scale*r.sign();
        } break;
        case KIND_CONSTANT: {
            const float v = scale*r.sign();
            for (int i = 0; i < QK_KVQ; i++) {
                x[i] = v;
            }
        } break;
        case KIND_TWO_VALUES: {
            const float v[2] = { scale*r.sign(), scale*(float) r.normal() };
            for (int i = 0; i < QK_KVQ; i++) {
                x[i] = v[r.below(2)];
            }
        } break;
        case KIND_ONE_SIDE: {
            const float v = scale*r.sign();
            for (int i = 0; i < QK_KVQ; i++) {
                x[i] = -v*(float) (1.0 - 0.001*r.uniform());
            }
            x[r.below(QK_KVQ)] = v;
        } break;
        case KIND_EXACT: {
            uint8_t block[sizeof(block_kvq6)];
            for (uint8_t & b : block) {
                b = (uint8_t) r.below(256);
            }
            const ggml_fp16_t d = ggml_fp32_to_fp16(scale*r.sign());
            memcpy(block, &d, sizeof(d));
            kvq_decode_block_ref(f, block, x);
        } break;
        case KIND_TIES: {
            const float d = std::ldexp(r.sign(), r.below(20) - 10);
            for (int i = 0; i < QK_KVQ; i++) {
                const int m = r.below(f->n_levels - 2);
                x[i] = d*0.5f*(float) (f->levels[m] + f->levels[m + 1 + r.below(2)]);
            }
            x[r.below(QK_KVQ)] = d*(float) f->levels[0];
        } break;
        case KIND_GRID: {
            const float d = std::ldexp(r.sign(), r.below(20) - 10);
            for (int i = 0; i < QK_KVQ; i++) {
                x[i] = d*0.5f*(float) (r.below(-4*f->levels[0] + 1) + 2*f->levels[0]);
            }
            x[r.below(QK_KVQ)] = d*(float) f->levels[0];
        } break;
        case KIND_ZEROS: for (int i = 0; i < QK_KVQ; i++) { x[i] = 0.0f*r.sign(); } break;
        case KIND_DENORMAL: {
            for (int i = 0; i < QK_KVQ; i++) {
                x[i] = float_of_bits((uint32_t) r.bits() & 0x807fffff);
            }
        } break;
        case KIND_TINY: {
            const float d = std::ldexp((float) (1.0 + r.uniform()), -27 + r.below(14));
            for (int i = 0; i < QK_KVQ; i++) {
                x[i] = d*127.0f*(float) (2.0*r.uniform() - 1.0);
            }
            if (r.below(2)) { // far from the codebook: the scale is rounded by up to a half, so y is clamped
                for (int i = 0; i < QK_KVQ; i++) {
                    x[i] = x[i] < 0 ? -d*126.0f : d*127.0f;
                }
            }
        } break;
        case KIND_HUGE: {
            const float d = std::ldexp((float) (0.5 + 0.5*r.uniform()), 128 - (r.below(4) ? 106 - r.below(8) : r.below(106)));
            for (int i = 0; i < QK_KVQ; i++) {
                x[i] = d*(float) (2.0*r.uniform() - 1.0);
            }
            if (r.below(4) == 0) {
                x[r.below(QK_KVQ)] = FLT_MAX*r.sign();
            }
        } break;
        case KIND_MAGNITUDES: {
            const int low   = -149 + r.below(277);
            const int range = 1 + r.below(128 - low);
            for (int i = 0; i < QK_KVQ; i++) {
                x[i] = std::ldexp(r.sign(), low + r.below(range));
            }
        } break;
        case KIND_NOT_FINITE: {
            for (int i = 0; i < QK_KVQ; i++) {
                x[i] = scale*(float) r.normal();
            }
            const uint32_t bad[] = { 0x7f800000, 0xff800000, 0x7fc00000, 0xffc00000, 0x7f800001, 0xffbfffff, 0x7fffffff };
            const int n = 1 + r.below(3);
            for (int i = 0; i < n; i++) {
                x[r.below(QK_KVQ)] = float_of_bits(bad[r.below(7)]);
            }
        } break;
        default: {
            // three quarters with an exponent that isn't that of inf and NaN
            const uint32_t mask = r.below(4) ? 0xbfffffff : 0xffffffff;
            for (int i = 0; i < QK_KVQ; i++) {
                x[i] = float_of_bits((uint32_t) (r.bits() >> 32) & mask);
            }
        } break;
    }
}

// n bytes at an address that is a multiple of align and of no more, with guards around that are compared. With an address
// sanitizer the memory ends with them instead, and it sees every byte beyond.
class exact_buffer {
public:
    exact_buffer(size_t n, size_t align) : offset(GUARD + align), n(n), size(offset + n + AFTER), mem(new uint8_t[size]) {
        memset(mem.get(), FILL, size);
    }

    uint8_t * data()   { return mem.get() + offset; }
    float   * floats() { return (float *) (void *) data(); }

    bool guards_intact() const {
        for (size_t i = 0; i < size; i++) {
            if ((i < offset || i >= offset + n) && mem[i] != FILL) {
                return false;
            }
        }
        return true;
    }

private:
    static constexpr size_t  GUARD = 64; // a multiple of what new aligns to
    static constexpr uint8_t FILL  = 0xa5;
#if defined(__SANITIZE_ADDRESS__)
    static constexpr size_t  AFTER = 0;
#else
    static constexpr size_t  AFTER = GUARD;
#endif
    size_t offset;
    size_t n;
    size_t size;
    std::unique_ptr<uint8_t[]> mem;
};

static std::string hex(const void * data, size_t n) {
    std::string res;
    char buf[4];
    for (size_t i = 0; i < n; i++) {
        snprintf(buf, sizeof(buf), "%02x", ((const uint8_t *) data)[i]);
        res += buf;
    }
    return res;
}

//
// the definition, in double
//

static double squared_error(const float * x, const float * z) {
    double sum = 0.0;
    for (int i = 0; i < QK_KVQ; i++) {
        const double diff = (double) x[i] - (double) z[i];
        sum += diff*diff;
    }
    return sum;
}

struct absmax_errors {
    double best; // of any path and any levels
    double unit; // of any path, with levels that are nearest to a whole unit: what an encoder looks at
    double d;    // the scale
};

// Smallest squared errors of a block whose outlier is scaled to the extreme level. Written from the definition in
// kvq-formats.h, by the two bits before and not by the encoder's states and tables.
static absmax_errors absmax_error(const kvq_format * f, const float * x) {
    float outlier = 0.0f;
    for (int i = 0; i < QK_KVQ; i++) {
        outlier = std::fabs(x[i]) > std::fabs(outlier) || (x[i] > 0 && x[i] == -outlier) ? x[i] : outlier;
    }
    const float d = ggml_fp16_to_fp32(ggml_fp32_to_fp16(outlier/f->levels[0]));

    absmax_errors res = { 0.0, 0.0, d };
    for (double * sum : { &res.best, &res.unit }) {
        double cost[2][2] = { { 0.0, INFINITY }, { INFINITY, INFINITY } }; // by b[t-1] and b[t-2]
        for (int t = 0; t < QK_KVQ; t++) {
            const float v    = x[kvq_path_to_row(f, t)];
            const int   unit = (int) std::floor(std::nearbyint(v*(KVQ_Y_ONE/d))/KVQ_Y_ONE + 0.5);
            double next[2][2] = { { INFINITY, INFINITY }, { INFINITY, INFINITY } };
            for (int b = 0; b < 2; b++) {
                for (int b1 = 0; b1 < 2; b1++) {
                    for (int b2 = 0; b2 < 2; b2++) {
                        double least = INFINITY; // of these levels
                        int    dist  = INT_MAX;  // from the unit
                        for (int e = 0; e < f->n_levels/4; e++) {
                            const int    l    = f->levels[4*e + 2*(b ^ b2) + b1];
                            const double diff = (double) v - (double) d*l;
                            if (sum == &res.best ? diff*diff < least : std::abs(unit - l) < dist) {
                                least = diff*diff;
                                dist  = std::abs(unit - l);
                            }
                        }
                        next[b][b1] = std::min(next[b][b1], cost[b1][b2] + least);
                    }
                }
            }
            memcpy(cost, next, sizeof(cost));
        }
        *sum = std::min(std::min(cost[0][0], cost[0][1]), std::min(cost[1][0], cost[1][1]));
    }
    return res;
}

// Limit of an encoder's error, in units of y. It sees values rounded to y: by r <= 1/2, and 12000*2^-23 from two float
// operations. That changes the error c of a path by |sum 2*r*(y - level) + r^2| <= sqrt(32*c) + 8, times 1.01. The path it
// finds is the best of the rounded values: so twice that, once for its path and once for the best one.
static double absmax_limit(double unit_error) {
    for (int i = 0; i < 2; i++) {
        unit_error += 1.01*(std::sqrt(QK_KVQ*unit_error) + 8.0);
    }
    return unit_error;
}

//
// tests
//

static void test_f16() {
    // the standalone conversions: every f16, and every float halfway between two and next to it
    for (uint32_t h = 0; h < 0x7c00; h++) {
        const float x = ggml_fp16_to_fp32((ggml_fp16_t) h);
        const float y = h == 0x7bff ? 65536.0f : ggml_fp16_to_fp32((ggml_fp16_t) (h + 1));
        const float m = x + 0.5f*(y - x);
        CHECK(ggml_fp32_to_fp16(x) == h && ggml_fp32_to_fp16(-x) == (h | 0x8000), "%u", h);
        CHECK(ggml_fp32_to_fp16(m) == h + (h & 1), "tie after %u", h);
        CHECK(ggml_fp32_to_fp16(std::nextafter(m, 0.0f)) == h && ggml_fp32_to_fp16(std::nextafter(m, y)) == h + 1, "near the tie after %u", h);
    }
    CHECK(ggml_fp16_to_fp32(0x3c00) == 1.0f && ggml_fp16_to_fp32(0x0001) == 0x1p-24f && ggml_fp16_to_fp32(0x7bff) == 65504.0f, "values");
    CHECK(ggml_fp32_to_fp16(NAN) == 0x7e00 && ggml_fp32_to_fp16(FLT_MAX) == 0x7c00, "NaN or overflow");
}

static void test_tables(const codec & c) {
    for (int t = -128; t < 128; t++) {
        for (int s = 0; s < 4; s++) {
            int m = s; // the lower one of two that are as near
            for (int i = s; i < c.f->n_levels; i += 4) {
                m = std::abs(t - c.f->levels[i]) < std::abs(t - c.f->levels[m]) ? i : m;
            }
            int h = 1;
            for (int i = 0; i < c.f->bits - 1; i++) {
                h = 2*h + (t > c.f->split[4*h + s]);
            }
            const int l = c.f->levels[m];
            const int16_t * metric = c.f->metric[t + 128][s];
            CHECK(c.f->nearest[t + 128][s] == m && 4*h + s - c.f->n_levels == m, "%s: unit %d, subset %d", c.name, t, s);
            CHECK(metric[0] == -KVQ_METRIC*l && metric[1] == l*l, "%s: unit %d, subset %d", c.name, t, s);
        }
    }
    CHECK(kvq_to_float(c.type) == c.decode, "%s", c.name);
}

// rows of 1 to 9 blocks, at addresses of the least alignment
static void test_encode(const codec & c, int n_rows) {
    for (int kind = 0; kind < KIND_COUNT + 1; kind++) {
        double sum_err  = 0.0; // relative to the values
        double sum_best = 0.0;

        for (int row = 0; row < n_rows; row++) {
            random_source r(1000003u*(uint64_t) kind + (uint64_t) row);

            const int    n       = (1 + r.below(9))*QK_KVQ;
            const size_t n_bytes = n/QK_KVQ*c.f->size;
            exact_buffer x(n*sizeof(float), sizeof(float));
            exact_buffer z(n*sizeof(float), sizeof(float));
            exact_buffer q(n_bytes, sizeof(ggml_fp16_t));
            std::vector<uint8_t> ref(n_bytes, 0xcc);
            std::vector<float>   ref_z(n, 7.0f);

            std::vector<int> kinds(n/QK_KVQ);
            for (int i = 0; i < n/QK_KVQ; i++) {
                kinds[i] = kind < KIND_COUNT ? kind : r.below(KIND_COUNT); // at last: mixed in one row
                make_block(kinds[i], r, c.f, x.floats() + i*QK_KVQ);
            }
            c.encode_ref(x.floats(), ref.data(), n);
            c.encode    (x.floats(), q.data(),   n);
            c.decode_ref(ref.data(), ref_z.data(), n);
            c.decode    (q.data(),   z.floats(),   n);
            CHECK(x.guards_intact() && q.guards_intact() && z.guards_intact(), "%s: %s: memory around a row", c.name, kind_names[kinds[0]]);

            for (int i = 0; i < n/QK_KVQ; i++) {
                const char *    name = kind_names[kinds[i]];
                const float *   xb   = x.floats() + i*QK_KVQ;
                const float *   zb   = z.floats() + i*QK_KVQ;
                const uint8_t * qb   = q.data()   + i*c.f->size;
                const uint8_t * rb   = ref.data() + i*c.f->size;
                CHECK(!memcmp(qb, rb, c.f->size), "%s: %s: row %d block %d is %s, reference %s", c.name, name, row, i,
                    hex(qb, c.f->size).c_str(), hex(rb, c.f->size).c_str());

                bool   same   = true;
                bool   finite = true;
                int    n_nan  = 0;
                double power  = 0.0;
                for (int j = 0; j < QK_KVQ; j++) {
                    same   = same   && same_value(zb[j], ref_z[i*QK_KVQ + j]);
                    finite = finite && std::isfinite(xb[j]);
                    n_nan += std::isnan(zb[j]);
                    power += (double) xb[j]*(double) xb[j];
                }
                CHECK(same, "%s: %s: row %d block %d decodes differently", c.name, name, row, i);
                CHECK(n_nan == (finite ? 0 : QK_KVQ), "%s: %s: row %d block %d: %d are NaN", c.name, name, row, i, n_nan);

                if (is_plain(kinds[i])) {
                    const double        err  = squared_error(xb, zb);
                    const absmax_errors abs  = absmax_error(c.f, xb);
                    const double        unit = abs.d*abs.d/((double) KVQ_Y_ONE*KVQ_Y_ONE); // y^2 in values^2
                    CHECK(err <= unit*absmax_limit(abs.unit/unit), "%s: %s: row %d block %d: error %g, of the outlier's scale %g",
                        c.name, name, row, i, err, abs.unit);
                    sum_err  += err/power;
                    sum_best += abs.best/power;
                }
            }
        }
        if (kind <= KIND_OUTLIER) {
            // of one block the best of all levels may be better, as an encoder looks at whole units; of many it is not
            CHECK(sum_err < sum_best, "%s: %s: mean error is %g of the best with the outlier's scale", c.name, kind_names[kind], sum_err/sum_best);
        }
    }
}

// any bytes are a block
static void test_decode(const codec & c, int n_rows) {
    for (int row = 0; row < n_rows; row++) {
        random_source r(77u + (uint64_t) row);

        const int n = (1 + r.below(9))*QK_KVQ;
        exact_buffer q(n/QK_KVQ*c.f->size, sizeof(ggml_fp16_t));
        exact_buffer z(n*sizeof(float), sizeof(float));
        std::vector<float> ref(n, 7.0f);
        for (size_t i = 0; i < n/QK_KVQ*c.f->size; i++) {
            q.data()[i] = (uint8_t) r.below(256);
        }
        const ggml_fp16_t scales[] = { 0x0000, 0x8000, 0x0001, 0x8001, 0x03ff, 0x7bff, 0xfbff, 0x7c00, 0xfc00, 0x7e00, 0xfe01 };
        if (row % 4 == 0) {
            memcpy(q.data(), &scales[r.below(sizeof(scales)/sizeof(scales[0]))], sizeof(ggml_fp16_t));
        }
        c.decode_ref(q.data(), ref.data(),  n);
        c.decode    (q.data(), z.floats(), n);
        CHECK(q.guards_intact() && z.guards_intact(), "%s: memory around a row", c.name);
        for (int i = 0; i < n; i++) {
            CHECK(same_value(z.floats()[i], ref[i]), "%s: row %d value %d is %a, reference %a", c.name, row, i, z.floats()[i], ref[i]);
        }
    }
}

static void test_dot(const codec & c, int n_rows) {
    for (int row = 0; row < n_rows; row++) {
        random_source r(99u + (uint64_t) row);

        const int n = r.below(20)*QK_KVQ; // none, too
        exact_buffer q(n/QK_KVQ*c.f->size, sizeof(ggml_fp16_t));
        exact_buffer y(n*sizeof(float), sizeof(float));
        std::vector<float> x(n);
        std::vector<float> z(n);
        for (int i = 0; i < n/QK_KVQ; i++) {
            make_block(r.below(KIND_ZEROS + 1), r, c.f, x.data() + i*QK_KVQ);
        }
        for (int i = 0; i < n; i++) {
            y.floats()[i] = r.below(8) ? (float) r.normal() : 0.0f;
        }
        c.encode_ref(x.data(), q.data(), n);
        c.decode_ref(q.data(), z.data(), n);

        double sum = 0.0;
        double abs = 0.0;
        for (int i = 0; i < n; i++) {
            sum += (double) z[i]*(double) y.floats()[i];
            abs += std::fabs((double) z[i]*(double) y.floats()[i]);
        }
        // Whatever the order: a term is rounded in its two products and in at most 31 + n/32 sums of its block, of blocks
        // and of accumulators (16 at most). k roundings are off by k*u/(1 - k*u), u = 2^-24. z was rounded once here.
        const double k     = 2 + 31 + n/QK_KVQ + 16 + 1;
        const double limit = abs*(k*0x1p-24/(1.0 - k*0x1p-24));
        const float  s     = c.dot_row(q.data(), y.floats(), n);
        CHECK(std::fabs(s - sum) <= limit, "%s: row %d: %.9g, not %.9g +- %.3g", c.name, row, s, sum, limit);
        CHECK(q.guards_intact() && y.guards_intact(), "%s: memory around a row", c.name);

        if (n > 0) { // one bad block or value is seen, wherever it is
            const ggml_fp16_t d = 0x7e00;
            const int i = r.below(n);
            const float v = y.floats()[i];
            y.floats()[i] = NAN;
            CHECK(std::isnan(c.dot_row(q.data(), y.floats(), n)), "%s: row %d: a NaN in y at %d is lost", c.name, row, i);
            y.floats()[i] = v;
            memcpy(q.data() + i/QK_KVQ*c.f->size, &d, sizeof(d));
            CHECK(std::isnan(c.dot_row(q.data(), y.floats(), n)), "%s: row %d: a NaN block at %d is lost", c.name, row, i);
        }
    }
}

static void test_nse(const codec & c) {
    const int n = 1 << 17;
    std::vector<float>   x(n);
    std::vector<float>   z(n);
    std::vector<uint8_t> q(n/QK_KVQ*c.f->size);
    random_source r(4242);
    double power = 0.0;
    for (float & v : x) {
        v = (float) r.normal();
        power += (double) v*v;
    }
    c.encode(x.data(), q.data(), n);
    c.decode(q.data(), z.data(), n);
    double err = 0.0;
    for (int i = 0; i < n; i++) {
        err += ((double) x[i] - z[i])*((double) x[i] - z[i]);
    }
    printf("%s: squared error %.6f of N(0,1)\n", c.name, err/power);
    CHECK(err/power <= c.nse_limit, "%s: squared error %.6f of N(0,1), not %.6f", c.name, err/power, c.nse_limit);
}

// bytes of a hex string; empty if it isn't one
static std::vector<uint8_t> unhex(const std::string & s) {
    std::vector<uint8_t> res;
    for (size_t i = 0; i + 1 < s.size(); i += 2) {
        char * end = nullptr;
        const std::string two = s.substr(i, 2);
        res.push_back((uint8_t) strtoul(two.c_str(), &end, 16));
        if (*end || !isxdigit((unsigned char) two[0])) {
            return {};
        }
    }
    return s.size() % 2 ? std::vector<uint8_t>() : res;
}

// lines: name, 32 values as little-endian f32 in hex, block in hex; '#' starts a comment
static void test_golden(const std::vector<codec> & cs, const char * path) {
    std::ifstream file(path);
    CHECK(file.good(), "%s can't be read", path);

    std::vector<int> n_lines(cs.size());
    std::string line;
    for (int no = 1; std::getline(file, line); no++) {
        std::istringstream words(line.substr(0, line.find('#')));
        std::string name, values, block, more;
        if (!(words >> name)) {
            continue;
        }
        words >> values >> block;
        const bool complete = !words.fail() && !(words >> more);
        const std::vector<uint8_t> xb = unhex(values);
        const std::vector<uint8_t> qb = unhex(block);

        size_t k = 0;
        while (k < cs.size() && name != cs[k].name) {
            k++;
        }
        CHECK(complete && k < cs.size() && xb.size() == QK_KVQ*sizeof(float) && qb.size() == cs[k].f->size, "%s:%d: not a line of it", path, no);
        if (!complete || k == cs.size() || xb.size() != QK_KVQ*sizeof(float) || qb.size() != cs[k].f->size) {
            continue;
        }
        n_lines[k]++;

        float x[QK_KVQ];
        for (int i = 0; i < QK_KVQ; i++) {
            x[i] = float_of_bits(xb[4*i] | (uint32_t) xb[4*i + 1] << 8 | (uint32_t) xb[4*i + 2] << 16 | (uint32_t) xb[4*i + 3] << 24);
        }
        std::vector<uint8_t> q(qb.size());
        std::vector<uint8_t> ref(qb.size());
        cs[k].encode    (x, q.data(),   QK_KVQ);
        cs[k].encode_ref(x, ref.data(), QK_KVQ);
        CHECK(q   == qb, "%s:%d: encoded to %s",                  path, no, hex(q.data(),   q.size()).c_str());
        CHECK(ref == qb, "%s:%d: encoded by the reference to %s", path, no, hex(ref.data(), ref.size()).c_str());

        float z[QK_KVQ];
        float ref_z[QK_KVQ];
        cs[k].decode    (qb.data(), z,     QK_KVQ);
        cs[k].decode_ref(qb.data(), ref_z, QK_KVQ);
        for (int i = 0; i < QK_KVQ; i++) {
            CHECK(same_value(z[i], ref_z[i]), "%s:%d: value %d is %a, reference %a", path, no, i, z[i], ref_z[i]);
        }
    }
    for (size_t k = 0; k < cs.size(); k++) {
        CHECK(n_lines[k] > 0, "%s has no line of %s", path, cs[k].name);
    }
}

//
// speed
//

// ns per block: median of 21 runs of at least a millisecond
template <typename F> static double median_ns(int n_blocks, F run) {
    std::vector<double> ns;
    int n_calls = 1;
    while (ns.size() < 21) {
        const auto start = std::chrono::steady_clock::now();
        for (int i = 0; i < n_calls; i++) {
            run();
        }
        const double t = std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - start).count();
        if (t < 1e6) {
            n_calls *= 2;
            continue;
        }
        ns.push_back(t/n_calls/n_blocks);
    }
    std::nth_element(ns.begin(), ns.begin() + ns.size()/2, ns.end());
    return ns[ns.size()/2];
}

static void bench(const codec & c) {
    const int n = 4096; // a row of a cache, and all of it in the first level's cache
    std::vector<float>   x(n);
    std::vector<float>   z(n);
    std::vector<uint8_t> q(n/QK_KVQ*c.f->size);
    random_source r(1);
    for (float & v : x) {
        v = (float) r.normal();
    }
    volatile float sink = 0.0f;
    const double encode_ref = median_ns(n/QK_KVQ, [&] { c.encode_ref(x.data(), q.data(), n); });
    const double encode     = median_ns(n/QK_KVQ, [&] { c.encode    (x.data(), q.data(), n); });
    const double decode     = median_ns(n/QK_KVQ, [&] { c.decode    (q.data(), z.data(), n); });
    const double dot        = median_ns(n/QK_KVQ, [&] { sink = c.dot_row(q.data(), x.data(), n); });
    GGML_UNUSED(sink);
    printf("%s: ns per block: encode %.1f (reference %.1f), decode %.2f, dot %.2f\n", c.name, encode, encode_ref, decode, dot);
}

int main(int argc, char ** argv) {
    const char * golden = nullptr;
    const char * expect = nullptr;
    bool         speed  = false;
    for (int i = 1; i < argc; i++) {
        const std::string arg = argv[i];
        if (arg == "--golden" && i + 1 < argc) {
            golden = argv[++i];
        } else if (arg == "--expect" && i + 1 < argc) {
            expect = argv[++i];
        } else if (arg == "--bench") {
            speed = true;
        } else {
            fprintf(stderr, "usage: %s [--golden FILE] [--expect PATH] [--bench]\n", argv[0]);
            return 2;
        }
    }

    printf("path: %s\n", kvq_cpu_name());
    CHECK(!expect || !strcmp(expect, kvq_cpu_name()), "%s is compiled in, not %s", kvq_cpu_name(), expect);

    const std::vector<codec> cs = codecs();
    test_f16();
    for (const codec & c : cs) {
        test_tables(c);
        test_encode(c, 200);
        test_decode(c, 1000);
        test_dot(c, 1000);
        test_nse(c);
    }
    if (golden) {
        test_golden(cs, golden);
    }
    if (speed) {
        for (const codec & c : cs) {
            bench(c);
        }
    }
    printf("%d passed, %d failed\n", n_passed, n_failed);
    return n_failed ? 1 : 0;
}
