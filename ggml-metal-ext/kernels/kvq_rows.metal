// SPDX-License-Identifier: MIT
//
// Rows of a cache: stored, read back, copied to and from other types, and converted to f16 for attention.
// The types are function constants. FC_kvq_type_k is that of the one quantized side.

#include "common.h"
#include "kvq-metal-codecs.h"

//
// encoding
//
// kvq_encode_block: one simdgroup encodes one block, with one value in each lane. In the search, lane 8*k + 2*s + u stands for
// candidate k, state s, and the step into s from the lower (u = 0) or the upper (u = 1) of the two states that lead there.
// Every lane carries its path along as 32 bits, so nothing is traced back. Its integers are those of the reference, so paths and
// codes are too. The scale is set in float32, where the reference has float64: it is the same in nearly all blocks, and else one
// step of f16 away (5 of 100000 normal blocks). The bound of the reference, no more error than the first candidate with the first
// scale, is kept as float32 sees it: differences of errors are sums of 32 products, with an error of about 2^-19 of both.
//
// What must not depend on what a compiler does in fast-math mode is done on bits or integers, or by fma. The pragma asks for
// the safe mode, which older compilers don't know.

// scales that the encoder tries, in 1/256 of the first one: kvq2 to kvq6
static constant short kvq_tries[5][4] = {
    { 256, -241, 192,  222 },
    { 256, -300, 234,  317 },
    { 256,  245, -290, 300 },
    { 256, -275, 271,  278 },
    { 256, -278, 290, -267 },
};

// a/b, rounded to nearest even if a/b is off by a last bit
static inline float kvq_divide(const float a, const float b) {
    const float q = a/b;
    return fma(fma(-q, b, a), 1.0f/b, q);
}

static inline int kvq_y(const float x, const float inv) {
    return (int) clamp(rint(x*inv), -12000.0f, 12000.0f); // KVQ_Y_MAX
}

// Level of index m.
static inline float kvq_level(const int type, const short m) {
    if (kvq_is_line(type)) {
        return kvq_line(type, m - kvq_middle(type));
    }
    return kvq_table(type)[m];
}

// Index of the level of subset c (index % 4 == c) that is nearest to y, the lower one if two are.
static inline short kvq_nearest(const int type, const int y, const short c) {
    const short n = 1 << (kvq_bits(type) - 1); // levels of a subset
    const short t = clamp((y + 32) >> 6, -128, 127);

    short j = 0;
    if (kvq_is_line(type)) {
        // The line goes up ever steeper from the middle, so its inverse is the smallest of the inverses of its three parts.
        // Rounding can't matter: where t is a level it is the nearest one, from either side.
        const float a = fabs((float) t);
        const float u = type == KVQ_METAL_TYPE_KVQ5 ?
            min(min(0.5f*a, 0.25f*a + 10.0f), a/7.0f + 124.0f/7.0f) :
            min(min(     a, 0.5f*a  + 22.0f), 0.25f*a + 39.0f);
        j = clamp((short) floor((2*n + (t < 0 ? -u : u) - c)*0.25f), (short) 0, (short) (n - 2));
        j += 2.0f*t > kvq_level(type, 4*j + c) + kvq_level(type, 4*j + 4 + c) ? 1 : 0;
    } else {
        for (short h = n/2; h > 0; h /= 2) {
            j += 2.0f*t > kvq_level(type, 4*(j + h - 1) + c) + kvq_level(type, 4*(j + h) + c) ? h : 0;
        }
    }
    return 4*j + c;
}

// Step of the path at value i of the block, and value at step t.
static inline short kvq_step_of(const short width, const short i) {
    return (i % (4*width))*(8/width) + i/(4*width);
}

static inline short kvq_value_of(const short width, const short t) {
    return (t % (8/width))*(4*width) + t/(8/width);
}

// Index of the level of value `lane`, on a path.
static inline short kvq_index_on_path(const int type, const uint path, const int y, const ushort lane) {
    const short t = kvq_step_of(kvq_width(type), lane);

    const uint c = ((((path ^ (path << 2)) >> t) & 1) << 1) | (((path << 1) >> t) & 1);

    return kvq_nearest(type, y, c);
}

// Collects the fields of the lanes; lane i has byte i of the plane, and so have those 4*width lanes further.
static inline uint kvq_collect(uint field, const short width, const ushort lane) {
    field <<= width*(lane/(4*width));
    for (short d = 4*width; d < 32; d *= 2) {
        field |= simd_shuffle_xor(field, (ushort) d);
    }
    return field;
}

static inline void kvq_store_block(
        const int type, const half d, const uint path, const short m, const ushort lane, device uchar * block) {
    const short width = kvq_width(type);
    const short high  = kvq_width_high(type);

    const uint e = m >> 2;
    const uint b = (path >> kvq_step_of(width, lane)) & 1;

    const uint byte = kvq_collect(((e << 1) & ((1u << width) - 1u)) | b, width, lane);
    if (lane < 4*width) {
        block[2 + lane] = byte;
    }
    if (high > 0) {
        const uint byte_high = kvq_collect(e >> (width - 1), high, lane);
        if (lane < 4*high) {
            block[2 + 4*width + lane] = byte_high;
        }
    }
    if (lane == 0) {
        *(device half *) block = d;
    }
}

// All values d*0.
static inline void kvq_store_constant(const int type, const ushort d, const ushort lane, device uchar * block) {
    if (lane < kvq_block_size(type)/2) {
        ((device ushort *) block)[lane] = lane == 0 ? d : 0;
    }
}

static inline half kvq_clamp_scale(const float d) {
    return (half) clamp(d, -65504.0f, 65504.0f);
}

// Squared error with the values p, less that with the values q, of a block x: without the part that both share.
static inline float kvq_error_difference(const float x, const float p, const float q) {
    return simd_sum((q - p)*((x - p) + (x - q)));
}

// Like kvq_keep_bound. d: the scale of the block with level l; d0 and l0 are those of the first candidate.
// True if that one is to be stored instead.
static inline bool kvq_keep_bound(const float x, const uint largest, const float l, const float l0, const float d0,
                                  const float sum_ll, thread half & d) {
#pragma METAL fp math_mode(safe)
    // In units of a power of two near the largest value, so that squares neither overflow nor vanish.
    const uint  exponent = min(largest >> 23, 253u);
    const float down     = as_type<float>((254u - exponent) << 23);
    const float up       = as_type<float>(exponent << 23);

    const float xs = x*down;
    const float p0 = d0*down*l0;

    if (kvq_error_difference(xs, (float) d*down*l, p0) <= 0.0f) {
        return false;
    }
    const float d_ls   = simd_sum(xs*l)/sum_ll;
    const float room   = -kvq_error_difference(xs, d_ls*l, p0);
    const float radius = room > 0.0f ? sqrt(room/sum_ll) : 0.0f;
    for (short k = 2; k >= 0; --k) {
        d = kvq_clamp_scale((d_ls + (d_ls < 0.0f ? -0.5f : 0.5f)*k*radius)*up);
        if (kvq_error_difference(xs, (float) d*down*l, p0) <= 0.0f) {
            return false;
        }
    }
    return true;
}

// Like kvq_set_scale; error, error0: of the best and of the first candidate, cost: the former in units of its own y.
// True if the block surely keeps the bound.
static inline bool kvq_set_scale(const float d0, const float r, const int cost, const float error, const float error0,
                                 const bool first, const int sum_yl, const int sum_ll, thread half & d_out) {
#pragma METAL fp math_mode(safe)
    const float ll     = sum_ll;
    const float d_try  = d0*r;
    const float d_ls   = d_try*((float) sum_yl/(64.0f*ll));
    const float sum_yy = cost + 128*(int64_t) sum_yl - 4096*(int64_t) sum_ll; // exact: may need 33 bits
    const float d      = sum_yl > 0 ? d_try*(sum_yy/(64.0f*sum_yl)) : d_ls;

    if (!(fabs(d_ls) >= 1.0f/8192.0f && fabs(d) < 65504.0f && fabs(d0) < 65504.0f)) {
        d_out = kvq_clamp_scale(d);
        return false;
    }
    const float margin = fabs(d0)*(1.25f*0.5f/64.0f)*sqrt(32.0f/ll);

    float reach = fabs(d0 - d_ls) - margin;
    if (!first) {
        const float from  = max(fabs(d_try - d_ls) - margin, 0.0f);
        const float steep = ll*4096.0f/(d0*d0);
        const float gap   = (error0 - error) - (sqrt(32.0f*error0) + 1.25f*sqrt(32.0f*error) + 20.5f) + steep*from*from;
        reach = gap > 0.0f ? sqrt(gap/steep) : 0.0f;
    }
    reach -= margin;

    const float room = reach - fabs(d)/2048.0f;
    const float step = min(fabs(d - d_ls), max(room, 0.0f));
    d_out = kvq_clamp_scale(d_ls + (d_ls < 0.0f ? -step : step));

    return fabs((float) d_out - d_ls) < reach;
}

// Encodes the block whose value `lane` is x. All 32 lanes of a simdgroup must be here, with the same block.
static inline void kvq_encode_block(const int type, const float x, const ushort lane, device uchar * block) {
#pragma METAL fp math_mode(safe)
    const uint largest = simd_max(as_type<uint>(x) & 0x7fffffffu);
    if (largest >= 0x7f800000u) {
        kvq_store_constant(type, 0x7e00, lane, block); // NaN
        return;
    }
    const float magnitude = as_type<float>(largest);
    const float outlier   = simd_max(x) >= magnitude ? magnitude : -magnitude;
    const float d0        = kvq_clamp_scale(kvq_divide(outlier, kvq_level(type, 0)));
    if (d0 == 0.0f) {
        kvq_store_constant(type, 0, lane, block);
        return;
    }

    const short k = lane/8;
    const short s = (lane/2)%4;
    const short u = lane%2;
    const short b = s%2;
    const short c = 2*(b ^ u) + s/2; // subset of the step from state 2*u + s/2

    const ushort origin = 8*k + 2*(2*u + s/2);

    const short width = kvq_width(type);
    const int   n_try = kvq_tries[kvq_bits(type) - 2][k];
    const float inv   = kvq_divide(64.0f, d0*(n_try/256.0f));

    // x: squared error of the best path into the state, y: the path, step t in bit t
    int2 best = int2(s == 0 ? 0 : 1 << 30, 0);

    for (short t = 0; t < 32; ++t) {
        const int y    = kvq_y(simd_shuffle(x, (ushort) kvq_value_of(width, t)), inv);
        const int diff = y - 64*(int) kvq_level(type, kvq_nearest(type, y, c));

        int2 mine = simd_shuffle(best, origin);
        mine[0] += diff*diff;

        const int2 other = simd_shuffle_xor(mine, (ushort) 1);

        // the upper one must be better
        const bool take = u == 0 ? other[0] < mine[0] : other[0] <= mine[0];
        best = take ? other : mine;
        best[1] |= (int) ((uint) b << t);
    }

    // the best of the 4 states, of equals the lowest; the state is in the last two steps
    for (ushort d = 2; d < 8; d *= 2) {
        const int2 other = simd_shuffle_xor(best, d);

        const uint state       = (((uint) best [1] >> 30) & 1)*2 + ((uint) best [1] >> 31);
        const uint state_other = (((uint) other[1] >> 30) & 1)*2 + ((uint) other[1] >> 31);

        const bool take = other[0] < best[0] || (other[0] == best[0] && state_other < state);
        best = take ? other : best;
    }

    // The best of the 4 candidates, of equals the first. The square of a try is exact and a power of two rounds nothing, so the
    // error is rounded as the reference rounds it.
    const float error  = (float) best[0]*(float) (n_try*n_try)/65536.0f;
    const float error0 = simd_shuffle(error, (ushort) 0);

    ushort k_best     = 0;
    float  error_best = error0;
    for (ushort i = 1; i < 4; ++i) {
        const float e = simd_shuffle(error, (ushort) (8*i));
        if (e < error_best) {
            error_best = e;
            k_best     = i;
        }
    }
    const int2  chosen = simd_shuffle(best, (ushort) (8*k_best));
    const uint  path   = chosen[1];
    const uint  path0  = simd_shuffle(best[1], (ushort) 0);
    const float inv0   = simd_shuffle(inv, (ushort) 0);

    const int   y = kvq_y(x, simd_shuffle(inv, (ushort) (8*k_best)));
    const short m = kvq_index_on_path(type, path, y, lane);
    const float l = kvq_level(type, m);

    const int sum_yl = simd_sum(y*(int) l);
    const int sum_ll = simd_sum((int) l*(int) l);

    const float r = kvq_tries[kvq_bits(type) - 2][k_best]/256.0f;

    half d;
    if (!kvq_set_scale(d0, r, chosen[0], error_best, error0, k_best == 0, sum_yl, sum_ll, d)) {
        const short m0 = kvq_index_on_path(type, path0, kvq_y(x, inv0), lane);
        if (kvq_keep_bound(x, largest, l, kvq_level(type, m0), d0, sum_ll, d)) {
            kvq_store_block(type, (half) d0, path0, m0, lane, block);
            return;
        }
    }
    kvq_store_block(type, d, path, m, lane, block);
}

//
// One simdgroup encodes one block. A threadgroup has as many as the host likes; all lanes of one return together.
//

// number of this simdgroup among all of its plane of the grid
static inline int kvq_unit(const uint3 tgpig, const ushort sgitg, const ushort3 ntg) {
    return tgpig.x*ntg.y + sgitg;
}

template <typename TI>
static inline device char * kvq_set_rows_dst(
        constant ggml_metal_kargs_set_rows & args, device const char * src1, device char * dst,
        const int i01, const int i02, const int i03) {
    const TI i1 = *(device const TI *) (src1 + i01*args.nb10 + (i02%args.ne11)*args.nb11 + (i03%args.ne12)*args.nb12);

    return dst + i1*args.nb1 + i02*args.nb2 + i03*args.nb3;
}

template <typename TI>
kernel void kernel_kvq_set_rows(
        constant ggml_metal_kargs_set_rows & args,
        device const char * src0,
        device const char * src1,
        device       char * dst,
        uint3   tgpig[[threadgroup_position_in_grid]],
        ushort  tiisg[[thread_index_in_simdgroup]],
        ushort  sgitg[[simdgroup_index_in_threadgroup]],
        ushort3   ntg[[threads_per_threadgroup]]) {
    const int unit = kvq_unit(tgpig, sgitg, ntg);
    const int i01  = unit/args.nk0;
    const int ib   = unit%args.nk0;
    const int i02  = tgpig.y;
    const int i03  = tgpig.z;

    if (i01 >= args.ne01) {
        return;
    }

    device const float * x = (device const float *) (src0 + i01*args.nb01 + i02*args.nb02 + i03*args.nb03) + ib*KVQ_METAL_QK;
    device       char  * y = kvq_set_rows_dst<TI>(args, src1, dst, i01, i02, i03) + ib*kvq_block_size(FC_kvq_type_k);

    kvq_encode_block(FC_kvq_type_k, x[tiisg], tiisg, (device uchar *) y);
}

typedef decltype(kernel_kvq_set_rows<int32_t>) kvq_set_rows_t;

template [[host_name("kernel_kvq_set_rows_f32_i32")]] kernel kvq_set_rows_t kernel_kvq_set_rows<int32_t>;
template [[host_name("kernel_kvq_set_rows_f32_i64")]] kernel kvq_set_rows_t kernel_kvq_set_rows<int64_t>;

constant int32_t FC_kvq_n_fwht [[function_constant(FC_KVQ_N_FWHT)]];

// The same of rows that are first rotated: each n values of a row by the normalized Hadamard matrix of size n.
// One simdgroup has n values, value i in lane i % 32, so that each block of 32 is one value a lane. Every sum is rounded as
// upstream's kernel_fwht rounds it, that the store be the same as one of rows rotated before.
template <typename TI>
kernel void kernel_kvq_set_rows_fwht(
        constant ggml_metal_kargs_set_rows & args,
        device const char * src0,
        device const char * src1,
        device       char * dst,
        uint3   tgpig[[threadgroup_position_in_grid]],
        ushort  tiisg[[thread_index_in_simdgroup]],
        ushort  sgitg[[simdgroup_index_in_threadgroup]],
        ushort3   ntg[[threads_per_threadgroup]]) {
    constexpr short NMAX = 256/KVQ_METAL_QK;

    const short n      = FC_kvq_n_fwht/KVQ_METAL_QK; // blocks of this simdgroup
    const int   n_row  = args.nk0/n;
    const int   unit   = kvq_unit(tgpig, sgitg, ntg);
    const int   i01    = unit/n_row;
    const int   ib     = n*(unit%n_row);
    const int   i02    = tgpig.y;
    const int   i03    = tgpig.z;

    if (i01 >= args.ne01) {
        return;
    }

    device const float * x = (device const float *) (src0 + i01*args.nb01 + i02*args.nb02 + i03*args.nb03) + ib*KVQ_METAL_QK;

    const float scale = 1.0f/sqrt((float) FC_kvq_n_fwht);

    float reg[NMAX];
    FOR_UNROLL (short j = 0; j < NMAX; ++j) {
        reg[j] = j < n ? x[j*KVQ_METAL_QK + tiisg]*scale : 0.0f;
    }

    // lanes whose numbers differ in one bit: sum in the lower one, difference in the upper one
    for (ushort d = 1; d < 32; d *= 2) {
        const float twice = tiisg & d ? 0.0f : 2.0f;
        FOR_UNROLL (short j = 0; j < NMAX; ++j) {
            reg[j] = simd_shuffle_xor(reg[j], d) - reg[j] + twice*reg[j];
        }
    }

    FOR_UNROLL (short d = 1; d < NMAX; d *= 2) {
        if (d < n) {
            FOR_UNROLL (short j = 0; j < NMAX; ++j) {
                if ((j & d) == 0) {
                    const float a = reg[j];
                    const float b = reg[j + d];
                    reg[j]     = a + b;
                    reg[j + d] = a - b;
                }
            }
        }
    }

    device char * y = kvq_set_rows_dst<TI>(args, src1, dst, i01, i02, i03) + ib*kvq_block_size(FC_kvq_type_k);

    // one copy of the encoder: a register can't be chosen by a variable, so all are looked at
    for (short i = 0; i < n; ++i) {
        float v = reg[0];
        FOR_UNROLL (short j = 1; j < NMAX; ++j) {
            v = i == j ? reg[j] : v;
        }
        kvq_encode_block(FC_kvq_type_k, v, tiisg, (device uchar *) y + i*kvq_block_size(FC_kvq_type_k));
    }
}

typedef decltype(kernel_kvq_set_rows_fwht<int32_t>) kvq_set_rows_fwht_t;

template [[host_name("kernel_kvq_set_rows_fwht_i32")]] kernel kvq_set_rows_fwht_t kernel_kvq_set_rows_fwht<int32_t>;
template [[host_name("kernel_kvq_set_rows_fwht_i64")]] kernel kvq_set_rows_fwht_t kernel_kvq_set_rows_fwht<int64_t>;

//
// Copies. Element by element in the order of the source, whose shape may be another one.
//

// offset in bytes of element i of dst; nb0 is that of a block of n values
static inline uint64_t kvq_cpy_dst(constant ggml_metal_kargs_cpy & args, int64_t i, const short n) {
    const int64_t i0 = i%args.ne0;
    i /= args.ne0;
    const int64_t i1 = i%args.ne1;
    i /= args.ne1;
    const int64_t i2 = i%args.ne2;
    const int64_t i3 = i/args.ne2;

    return i0/n*args.nb0 + i1*args.nb1 + i2*args.nb2 + i3*args.nb3;
}

// one simdgroup encodes one block
template <typename T>
kernel void kernel_kvq_cpy_f_q(
        constant ggml_metal_kargs_cpy & args,
        device const char * src0,
        device       char * dst,
        uint3   tgpig[[threadgroup_position_in_grid]],
        ushort  tiisg[[thread_index_in_simdgroup]],
        ushort  sgitg[[simdgroup_index_in_threadgroup]],
        ushort3   ntg[[threads_per_threadgroup]]) {
    const int unit = kvq_unit(tgpig, sgitg, ntg);
    const int i01  = unit/args.nk0;
    const int ib   = unit%args.nk0;
    const int i02  = tgpig.y;
    const int i03  = tgpig.z;

    if (i01 >= args.ne01) {
        return;
    }

    const int64_t n = ((i03*args.ne02 + i02)*args.ne01 + i01)*args.ne00 + ib*KVQ_METAL_QK;

    device const char * row = src0 + i01*args.nb01 + i02*args.nb02 + i03*args.nb03;

    const float x = *(device const T *) (row + (ib*KVQ_METAL_QK + tiisg)*args.nb00);

    kvq_encode_block(FC_kvq_type_k, x, tiisg, (device uchar *) dst + kvq_cpy_dst(args, n, KVQ_METAL_QK));
}

typedef decltype(kernel_kvq_cpy_f_q<float>) kvq_cpy_f_q_t;

template [[host_name("kernel_kvq_cpy_f32_q")]] kernel kvq_cpy_f_q_t kernel_kvq_cpy_f_q<float>;
template [[host_name("kernel_kvq_cpy_f16_q")]] kernel kvq_cpy_f_q_t kernel_kvq_cpy_f_q<half>;

// one thread decodes 16 values
template <typename T>
kernel void kernel_kvq_cpy_q_f(
        constant ggml_metal_kargs_cpy & args,
        device const char * src0,
        device       char * dst,
        uint3   tgpig[[threadgroup_position_in_grid]],
        ushort3 tpitg[[thread_position_in_threadgroup]],
        ushort3   ntg[[threads_per_threadgroup]]) {
    const int i01 = tgpig.x%args.ne01;
    const int i02 = tgpig.y;
    const int i03 = tgpig.z;
    const int i   = tgpig.x/args.ne01*ntg.x + tpitg.x;

    if (i >= args.nk0) {
        return;
    }

    const int64_t n = ((i03*args.ne02 + i02)*args.ne01 + i01)*args.ne00 + i*KVQ_METAL_N_PER_GET;

    const float4x4 x = kvq_decode16(FC_kvq_type_k, src0 + i01*args.nb01 + i02*args.nb02 + i03*args.nb03, i);

    for (short j = 0; j < KVQ_METAL_N_PER_GET; ++j) {
        *(device T *) (dst + kvq_cpy_dst(args, n + j, 1)) = (T) x[j/4][j%4];
    }
}

typedef decltype(kernel_kvq_cpy_q_f<float>) kvq_cpy_q_f_t;

template [[host_name("kernel_kvq_cpy_q_f32")]] kernel kvq_cpy_q_f_t kernel_kvq_cpy_q_f<float>;
template [[host_name("kernel_kvq_cpy_q_f16")]] kernel kvq_cpy_q_f_t kernel_kvq_cpy_q_f<half>;

//
// Rows read back.
//

// one thread decodes 16 values
kernel void kernel_kvq_get_rows_f32(
        constant ggml_metal_kargs_get_rows & args,
        device const char * src0,
        device const char * src1,
        device       char * dst,
        uint3   tgpig[[threadgroup_position_in_grid]],
        ushort  tiitg[[thread_index_in_threadgroup]],
        ushort3   ntg[[threads_per_threadgroup]]) {
    const int i10 = tgpig.x%args.ne10;
    const int i11 = tgpig.y;
    const int i12 = tgpig.z;
    const int i   = tgpig.x/args.ne10*ntg.x + tiitg;

    if (i >= args.ne00t) {
        return;
    }

    const int r = *(device const int32_t *) (src1 + i10*args.nb10 + i11*args.nb11 + i12*args.nb12);

    const float4x4 x = kvq_decode16(FC_kvq_type_k, src0 + r*args.nb01 + i11*args.nb02 + i12*args.nb03, i);

    device float4 * y = (device float4 *) (dst + i10*args.nb1 + i11*args.nb2 + i12*args.nb3) + 4*i;
    for (short j = 0; j < 4; ++j) {
        y[j] = x[j];
    }
}

// K or V, of any type and in strided rows, to half, contiguous. One thread converts 8 values; nblocks counts these.
// A value beyond 65504 becomes an infinity, as in upstream's conversions.
kernel void kernel_kvq_kv_f16(
        constant ggml_metal_kargs_flash_attn_ext_kv_f16 & args,
        device const char * src,
        device       half * dst,
        uint gid[[thread_position_in_grid]]) {
    if (gid >= (uint) args.nblocks) {
        return;
    }

    const uint n  = args.ne0/KVQ_METAL_N_PER_F16;
    const uint i0 = gid%n;
    const uint i1 = gid/n%args.ne1;
    const uint i2 = gid/n/args.ne1%args.ne2;
    const uint i3 = gid/n/args.ne1/args.ne2;

    device const char  * row = src + i1*args.nb1 + i2*args.nb2 + i3*args.nb3;
    device       half4 * y   = (device half4 *) dst + 2*(uint64_t) gid;

    y[0] = (half4) kvq_decode4(FC_kvq_type_k, row, 2*i0);
    y[1] = (half4) kvq_decode4(FC_kvq_type_k, row, 2*i0 + 1);
}
