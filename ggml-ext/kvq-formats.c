// SPDX-License-Identifier: MIT

// Compiled without contraction of a*b + c to fused multiply-adds (-ffp-contract=off): all machines give the same bytes.

#include "kvq-formats.h"

#include <assert.h>
#include <float.h>
#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

//
// codebooks
//
// Fitted on blocks of 32 values of N(0,1), with the search that is below: coordinate descent over the levels and the tries.
// 5 and 6 bits follow a line with three slopes, so that a decoder may compute a level instead of looking it up:
// |level| = a*u + b*max(u - B, 0) + c*max(u - C, 0), u = |index - n_levels/2|.
//

#define KVQ5_LEVEL(u) (2*(u) + 2*((u) > 20 ? (u) - 20 : 0) + 3*((u) > 28 ? (u) - 28 : 0))
#define KVQ6_LEVEL(u) (1*(u) + 1*((u) > 44 ? (u) - 44 : 0) + 2*((u) > 56 ? (u) - 56 : 0))

static struct kvq_format kvq_formats[] = {
    {
        .bits   = 2,
        .tries  = { 256, -241, 192, 222 },
        .levels = { -125, -70, -43, -16, 4, 30, 56, 99 },
    }, {
        .bits   = 3,
        .tries  = { 256, -300, 234, 317 },
        .levels = { -127, -94, -72, -56, -43, -30, -20, -9, 0, 11, 20, 32, 43, 58, 76, 103 },
    }, {
        .bits   = 4,
        .tries  = { 256, 245, -290, 300 },
        .levels = { -125, -105, -90, -77, -68, -60, -53, -46, -40, -34, -29, -24, -19, -14, -10, -5,
                       0,    5,   9,  14,  19,  24,  29,  35,  40,  47,  53,  61,  70,  80,  93, 109 },
    }, {
        .bits   = 5,
        .tries  = { 256, -275, 271, 278 },
    }, {
        .bits   = 6,
        .tries  = { 256, -278, 290, -267 },
    },
};

#define KVQ_MAX_SCALE 65504.0f // of f16

#define KVQ_N_FORMATS ((int) (sizeof(kvq_formats)/sizeof(kvq_formats[0])))

#define KVQ_CHECK(name, NAME, n_bits, n_qs, n_qh)                                                             \
    static_assert(GGML_TYPE_##NAME == KVQ_ID_FIRST + (n_bits), "id of " #name);                               \
    static_assert(sizeof(block_##name) == sizeof(ggml_fp16_t) + (n_qs) + (n_qh), "layout of block_" #name);   \
    static_assert(8*((n_qs) + (n_qh)) == QK_KVQ*(n_bits), "bits of " #name);
KVQ_FORMATS(KVQ_CHECK)

// the derived members, once in a process; a second thread may not see a half-filled table
static atomic_int kvq_state; // 0: nothing, 1: being filled, 2: filled

static void kvq_fill(void) {
    struct kvq_format * f = kvq_formats;

#define KVQ_SET(NAME_, NAME, n_bits, qs_, qh_)                                      \
    f->type = GGML_TYPE_##NAME;                                                     \
    f->name = #NAME_;                                                               \
    f->size = sizeof(block_##NAME_);                                                \
    f->n_qs = (qs_);                                                                \
    f->n_qh = (qh_);                                                                \
    f++;
    KVQ_FORMATS(KVQ_SET)
#undef KVQ_SET

    for (f = kvq_formats; f < kvq_formats + KVQ_N_FORMATS; f++) {
        f->n_levels = 2 << f->bits;
        if (f->bits >= 5) {
            for (int m = 0; m < f->n_levels; m++) {
                const int x = m - f->n_levels/2;
                const int u = abs(x);
                const int l = f->bits == 5 ? KVQ5_LEVEL(u) : KVQ6_LEVEL(u);
                f->levels[m] = (int8_t) (x < 0 ? -l : l);
            }
        }
        for (int t = -128; t < 128; t++) {
            for (int c = 0; c < 4; c++) {
                int best = c;
                for (int m = c + 4; m < f->n_levels; m += 4) {
                    if (abs(t - f->levels[m]) < abs(t - f->levels[best])) {
                        best = m;
                    }
                }
                f->nearest[t + 128][c] = (uint8_t) best;

                const int l = f->levels[best];
                f->metric[t + 128][c][0] = (int16_t) (-KVQ_METRIC*l);
                f->metric[t + 128][c][1] = (int16_t) (l*l);
            }
        }
        // a node h of depth j stands for n_levels/4 >> j levels of a subset: the last t whose nearest is in its lower half
        for (int h = 1, j = 0; h < f->n_levels/4; h++) {
            j += h == 2 << j;
            const int n      = f->n_levels/4 >> j;
            const int middle = (h - (1 << j))*n + n/2;
            for (int c = 0; c < 4; c++) {
                int t = -128;
                while (t < 127 && f->nearest[t + 129][c] >> 2 < middle) {
                    t++;
                }
                f->split[4*h + c] = (int8_t) t;
            }
        }
    }
}

const struct kvq_format * kvq_get_format(enum ggml_type type) {
    const int i = (int) type - GGML_TYPE_KVQ2;
    if (i < 0 || i >= KVQ_N_FORMATS) {
        return NULL;
    }
    if (atomic_load_explicit(&kvq_state, memory_order_acquire) != 2) {
        int expected = 0;
        if (atomic_compare_exchange_strong(&kvq_state, &expected, 1)) {
            kvq_fill();
            atomic_store_explicit(&kvq_state, 2, memory_order_release);
        } else {
            while (atomic_load_explicit(&kvq_state, memory_order_acquire) != 2) { } // a few microseconds, once
        }
    }
    return &kvq_formats[i];
}

//
// blocks: d, qs, qh, see kvq-formats.h
//

static inline int field_bits(const struct kvq_format * f) { // of the first plane
    return f->bits >= 4 ? 4 : 2;
}

static inline uint8_t plane_get(const uint8_t * plane, int n_bytes, int i) {
    const int width = 8*n_bytes/QK_KVQ;
    return (plane[i % n_bytes] >> (width*(i/n_bytes))) & ((1 << width) - 1);
}

static inline void plane_or(uint8_t * plane, int n_bytes, int i, int v) {
    const int width = 8*n_bytes/QK_KVQ;
    plane[i % n_bytes] |= (uint8_t) (v << (width*(i/n_bytes)));
}

static inline float block_scale(const void * block) {
    ggml_fp16_t d;
    memcpy(&d, block, sizeof(d));
    return ggml_fp16_to_fp32(d);
}

static inline void block_set_scale(void * block, float d) {
    const ggml_fp16_t d16 = ggml_fp32_to_fp16(d);
    memcpy(block, &d16, sizeof(d16));
}

// in natural order
static void block_levels(const struct kvq_format * f, const void * block, float * levels) {
    const uint8_t * qs = (const uint8_t *) block + sizeof(ggml_fp16_t);
    const uint8_t * qh = qs + f->n_qs;

    int b1 = 0; // b[t-1]
    int b2 = 0; // b[t-2]

    for (int t = 0; t < QK_KVQ; t++) {
        const int i = kvq_path_to_row(f, t);
        const int q = plane_get(qs, (int) f->n_qs, i);
        const int b = q & 1;

        int e = q >> 1;
        if (f->n_qh) {
            e |= plane_get(qh, (int) f->n_qh, i) << (field_bits(f) - 1);
        }
        levels[i] = f->levels[4*e + 2*(b ^ b2) + b1];
        b2 = b1;
        b1 = b;
    }
}

void kvq_decode_block_ref(const struct kvq_format * f, const void * block, float * x) {
    const float d = block_scale(block);
    block_levels(f, block, x);
    for (int i = 0; i < QK_KVQ; i++) {
        x[i] *= d;
    }
}

// A block from a path: bit t of b is the path's bit at step t; y as the candidate measured it.
// Sums of y*level and level^2 over the path.
static void block_set_path(const struct kvq_format * f, void * block, uint32_t b, const int32_t * y,
                           int32_t * sum_yl, int32_t * sum_ll) {
    uint8_t * qs = (uint8_t *) block + sizeof(ggml_fp16_t);
    uint8_t * qh = qs + f->n_qs;
    memset(qs, 0, f->n_qs + f->n_qh);

    const uint32_t c1 = b ^ (b << 2);
    const uint32_t c0 = b << 1;

    *sum_yl = 0;
    *sum_ll = 0;
    for (int t = 0; t < QK_KVQ; t++) {
        const int i = kvq_path_to_row(f, t);
        const int c = 2*((c1 >> t) & 1) + ((c0 >> t) & 1);
        const int m = f->nearest[kvq_nearest_unit(y[t]) + 128][c];
        const int e = m >> 2;
        const int l = f->levels[m];

        plane_or(qs, (int) f->n_qs, i, ((e << 1) & ((1 << field_bits(f)) - 1)) | ((b >> t) & 1));
        if (f->n_qh) {
            plane_or(qh, (int) f->n_qh, i, e >> (field_bits(f) - 1));
        }
        *sum_yl += y[t]*l;
        *sum_ll += l*l;
    }
}

float kvq_first_scale(const struct kvq_format * f, float largest, float smallest) {
    const float outlier = largest >= -smallest ? largest : smallest;
    const float d       = outlier/f->levels[0];
    return ggml_fp16_to_fp32(ggml_fp32_to_fp16(d > KVQ_MAX_SCALE ? KVQ_MAX_SCALE : d < -KVQ_MAX_SCALE ? -KVQ_MAX_SCALE : d));
}

static float clamp_scale(double d) {
    const double max = (double) KVQ_MAX_SCALE;
    return (float) (d > max ? max : d < -max ? -max : d);
}

bool kvq_set_scale(const struct kvq_format * f, void * block, int best, float err, float err0,
                   float d0, int32_t sum_yl, int32_t sum_ll) {
    // in units of this candidate's y: err = sum (y - KVQ_Y_ONE*level)^2
    const double try    = f->tries[best]/256.0;
    const double sum_yy = (double) err/(try*try) + 2.0*KVQ_Y_ONE*sum_yl - (double) KVQ_Y_ONE*KVQ_Y_ONE*sum_ll;
    const double d_try  = (double) d0*try;
    const double d_ls   = d_try*sum_yl/((double) KVQ_Y_ONE*sum_ll);
    const double d      = sum_yl > 0 ? d_try*sum_yy/((double) KVQ_Y_ONE*sum_yl) : d_ls;

    // Where f16 has fewer bits, or y was clamped, nothing is sure.
    if (!(fabs(d_ls) >= 0x1p-13 && fabs(d) < (double) KVQ_MAX_SCALE && fabs((double) d0) < (double) KVQ_MAX_SCALE)) {
        block_set_scale(block, clamp_scale(d));
        return false;
    }

    // The error is a parabola in the scale with its minimum at d_ls, which is known to within `margin`: y is rounded by at
    // most 1/2, so sum y*level by sum |level|/2 <= sqrt(32*sum level^2)/2. Tries are at most 1.25.
    // reach: as far from d_ls the error is surely below that of candidate 0 with the scale d0.
    const double margin = fabs((double) d0)*(1.25*0.5/KVQ_Y_ONE)*sqrt(QK_KVQ/(double) sum_ll);
    double reach = fabs((double) d0 - d_ls) - margin;
    if (best != 0) {
        // A squared error c is known to within sum |y - l| + 32/4 <= sqrt(32*c) + 8, in units of its own y.
        const double from  = fabs(d_try - d_ls) > margin ? fabs(d_try - d_ls) - margin : 0.0;
        const double steep = sum_ll*((double) KVQ_Y_ONE*KVQ_Y_ONE)/((double) d0*(double) d0);
        const double upper = (double) err  + 1.25*sqrt(QK_KVQ*(double) err) + 12.5 - steep*from*from;
        const double lower = (double) err0 - sqrt(QK_KVQ*(double) err0) - 8.0;
        reach = lower > upper ? sqrt((lower - upper)/steep) : 0.0;
    }
    reach -= margin;

    // unbiased, or as near to it as f16 can be within reach
    const double room = reach - 0x1p-11*fabs(d);
    const double step = fabs(d - d_ls) < room ? fabs(d - d_ls) : room > 0.0 ? room : 0.0;
    block_set_scale(block, (float) (d_ls + (d_ls < 0.0 ? -step : step)));

    return fabs((double) block_scale(block) - d_ls) < reach;
}

static double block_error(const float * x, const float * levels, double d) {
    double sum = 0.0;
    for (int i = 0; i < QK_KVQ; i++) {
        const double diff = (double) x[i] - d*(double) levels[i];
        sum += diff*diff;
    }
    return sum;
}

void kvq_keep_bound(const struct kvq_format * f, const float * x, void * block, const void * absmax) {
    float levels[QK_KVQ];
    block_levels(f, absmax, levels);
    const double bound = block_error(x, levels, (double) block_scale(absmax));

    block_levels(f, block, levels);
    if (block_error(x, levels, (double) block_scale(block)) <= bound) {
        return;
    }
    double sum_xl = 0.0;
    double sum_ll = 0.0;
    for (int i = 0; i < QK_KVQ; i++) {
        sum_xl += (double) x[i]*(double) levels[i];
        sum_ll += (double) levels[i]*(double) levels[i];
    }
    // least squares, the distance from it at which the bound is met, and half of it: rounding to f16 may be in the way
    const double d_ls   = sum_xl/sum_ll;
    const double room   = bound - block_error(x, levels, d_ls);
    const double radius = room > 0.0 ? sqrt(room/sum_ll) : 0.0;
    for (int k = 2; k >= 0; k--) {
        block_set_scale(block, clamp_scale(d_ls + (d_ls < 0 ? -0.5 : 0.5)*k*radius));
        if (block_error(x, levels, (double) block_scale(block)) <= bound) {
            return;
        }
    }
    memcpy(block, absmax, f->size);
}

void kvq_encode_block_ref(const struct kvq_format * f, const float * x, void * block) {
    float largest  = 0.0f;
    float smallest = 0.0f;
    for (int i = 0; i < QK_KVQ; i++) {
        if (!(fabsf(x[i]) <= FLT_MAX)) {
            memset(block, 0, f->size);
            block_set_scale(block, NAN);
            return;
        }
        largest  = x[i] > largest  ? x[i] : largest;
        smallest = x[i] < smallest ? x[i] : smallest;
    }

    const float d0 = kvq_first_scale(f, largest, smallest);
    if (d0 == 0.0f) {
        memset(block, 0, f->size);
        return;
    }

    int32_t  y   [KVQ_N_CANDIDATES][QK_KVQ];
    uint8_t  from[KVQ_N_CANDIDATES][QK_KVQ]; // bit s: the path into state s comes from the upper of its two states
    int32_t  end [KVQ_N_CANDIDATES];         // state at the end of the best path
    float    err [KVQ_N_CANDIDATES];         // its squared error, in units of candidate 0's y
    int      best = 0;

    for (int k = 0; k < KVQ_N_CANDIDATES; k++) {
        const float try = f->tries[k]/256.0f;
        const float inv = KVQ_Y_ONE/(d0*try);

        // states are 2*b[t-2] + b[t-1]; the path starts in state 0
        int32_t cost[4] = { 0, 1 << 30, 1 << 30, 1 << 30 };

        for (int t = 0; t < QK_KVQ; t++) {
            const float v = nearbyintf(x[kvq_path_to_row(f, t)]*inv);
            y[k][t] = v > KVQ_Y_MAX ? KVQ_Y_MAX : v < -KVQ_Y_MAX ? -KVQ_Y_MAX : (int32_t) v;

            int32_t dist[4]; // squared distance to the nearest level of each subset
            for (int c = 0; c < 4; c++) {
                const int32_t diff = y[k][t] - KVQ_Y_ONE*f->levels[f->nearest[kvq_nearest_unit(y[k][t]) + 128][c]];
                dist[c] = diff*diff;
            }

            int32_t next[4];
            from[k][t] = 0;
            for (int s = 0; s < 4; s++) {
                // into state s: by bit s & 1, from state s >> 1 or from 2 + (s >> 1)
                const int     b     = s & 1;
                const int     b1    = s >> 1;
                const int32_t lower = cost[b1]     + dist[2*b       + b1];
                const int32_t upper = cost[2 + b1] + dist[2*(b ^ 1) + b1];
                next[s] = upper < lower ? upper : lower;
                from[k][t] |= (uint8_t) ((upper < lower) << s);
            }
            memcpy(cost, next, sizeof(cost));
        }

        end[k] = 0;
        for (int s = 1; s < 4; s++) {
            if (cost[s] < cost[end[k]]) {
                end[k] = s;
            }
        }
        err[k] = (float) cost[end[k]]*(try*try);
        if (err[k] < err[best]) {
            best = k;
        }
    }

    uint32_t path[KVQ_N_CANDIDATES];
    for (int k = 0; k < KVQ_N_CANDIDATES; k++) {
        if (k != best && k != 0) {
            continue;
        }
        path[k] = 0;
        int s = end[k];
        for (int t = QK_KVQ - 1; t >= 0; t--) {
            path[k] |= (uint32_t) (s & 1) << t;
            s = (s >> 1) | (((from[k][t] >> s) & 1) << 1);
        }
    }

    int32_t sum_yl, sum_ll;
    block_set_path(f, block, path[best], y[best], &sum_yl, &sum_ll);
    if (!kvq_set_scale(f, block, best, err[best], err[0], d0, sum_yl, sum_ll)) {
        uint8_t absmax[sizeof(block_kvq6)];
        block_set_path(f, absmax, path[0], y[0], &sum_yl, &sum_ll);
        block_set_scale(absmax, d0);
        kvq_keep_bound(f, x, block, absmax);
    }
}

//
// rows
//

#define KVQ_ROWS(name, NAME, bits, n_qs, n_qh)                                          \
    void quantize_row_##name##_ref(const float * x, void * y, int64_t k) {              \
        const struct kvq_format * f = kvq_get_format(GGML_TYPE_##NAME);                 \
        assert(k % QK_KVQ == 0);                                                        \
        for (int64_t i = 0; i < k/QK_KVQ; i++) {                                        \
            kvq_encode_block_ref(f, x + i*QK_KVQ, (block_##name *) y + i);              \
        }                                                                               \
    }                                                                                   \
    void dequantize_row_##name(const void * x, float * y, int64_t k) {                  \
        const struct kvq_format * f = kvq_get_format(GGML_TYPE_##NAME);                 \
        assert(k % QK_KVQ == 0);                                                        \
        for (int64_t i = 0; i < k/QK_KVQ; i++) {                                        \
            kvq_decode_block_ref(f, (const block_##name *) x + i, y + i*QK_KVQ);        \
        }                                                                               \
    }
KVQ_FORMATS(KVQ_ROWS)

size_t kvq_quantize(enum ggml_type type, const float * src, void * dst, int64_t nrows, int64_t n_per_row) {
    const struct kvq_format * f = kvq_get_format(type);
    GGML_ASSERT(f && n_per_row % QK_KVQ == 0);

    const int64_t n_blocks = nrows*n_per_row/QK_KVQ;
    for (int64_t i = 0; i < n_blocks; i++) {
        kvq_encode_block_ref(f, src + i*QK_KVQ, (char *) dst + i*f->size);
    }
    return n_blocks*f->size;
}

bool kvq_validate_rows(enum ggml_type type, const void * data, size_t nbytes) {
    const struct kvq_format * f = kvq_get_format(type);
    GGML_ASSERT(f && nbytes % f->size == 0);

    for (size_t i = 0; i < nbytes/f->size; i++) {
        if (!(fabsf(block_scale((const char *) data + i*f->size)) <= KVQ_MAX_SCALE)) {
            return false;
        }
    }
    return true;
}
