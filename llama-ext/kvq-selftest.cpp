// SPDX-License-Identifier: MIT
//
// The self-test: does what is loaded store and attend as it should, on this machine's devices?
//
// It goes through ggml's public API alone, so a device of any backend is tested by the same code, and a library of another
// build that was loaded in place of ours shows.

#include "kvq.h"

#include "kvq-types.h"

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "ggml.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#ifdef _WIN32
#define WIN32_LEAN_AND_MEAN
#ifndef NOMINMAX
#define NOMINMAX
#endif
#include <windows.h>
#else
#include <dlfcn.h>
#endif

//
// files
//

// File of the library that holds an address, "" if the system doesn't tell.
static const char * file_of(const void * address) {
#ifdef _WIN32
    static thread_local char path[4*MAX_PATH];
    HMODULE module = nullptr;
    const DWORD flags = GET_MODULE_HANDLE_EX_FLAG_FROM_ADDRESS | GET_MODULE_HANDLE_EX_FLAG_UNCHANGED_REFCOUNT;
    if (!GetModuleHandleExA(flags, (LPCSTR) address, &module)) {
        return "";
    }
    const DWORD n = GetModuleFileNameA(module, path, sizeof(path));
    return n > 0 && n < sizeof(path) ? path : "";
#else
    Dl_info info;
    return dladdr(address, &info) && info.dli_fname ? info.dli_fname : "";
#endif
}

const char * kvq_library_file(int32_t i) {
    if (i < 0) {
        return nullptr;
    }
    switch (i) {
        // addresses as this library's own calls have them
        case 0: return file_of((const void *) (uintptr_t) &kvq_build);
        case 1: return file_of((const void *) (uintptr_t) &ggml_type_name);
        case 2: return file_of((const void *) (uintptr_t) &ggml_backend_dev_count);
        default: break;
    }
    const size_t n = (size_t) i - 3;
    if (n >= ggml_backend_dev_count()) {
        return nullptr;
    }
    // A backend's registration is a static object of its library. One on the heap is in no file.
    return file_of(ggml_backend_dev_backend_reg(ggml_backend_dev_get(n)));
}

//
// data
//

namespace {

// splitmix64 (Steele, Lea and Flood, 2014): the same values with every library
struct random_source {
    uint64_t state;

    uint64_t bits() {
        uint64_t z = (state += 0x9e3779b97f4a7c15u);
        z = (z ^ (z >> 30))*0xbf58476d1ce4e5b9u;
        z = (z ^ (z >> 27))*0x94d049bb133111ebu;
        return z ^ (z >> 31);
    }

    // mean 0, variance 1, within +-3.46: four uniform numbers of 16 bits, added up. Exact but for one product in f32.
    float normal() {
        const uint64_t b = bits();
        const int sum = (int) (b & 0xffff) + (int) (b >> 16 & 0xffff) + (int) (b >> 32 & 0xffff) + (int) (b >> 48);
        return (float) (sum - 131070)*(1.7320508f/65536.0f);
    }
};

// Blocks of 32 values, of the kinds that an encoder treats apart: sizes from 1/16 to 16, a zero block, an outlier, equal values.
std::vector<float> make_blocks(uint64_t seed, int n_blocks) {
    random_source rng = { seed };
    std::vector<float> x((size_t) n_blocks*QK_KVQ);
    for (int b = 0; b < n_blocks; b++) {
        const float size = (float) (1 << b % 9)/16.0f;
        for (int i = 0; i < QK_KVQ; i++) {
            float v = rng.normal()*size;
            if (b % 16 == 3) { v = 0.0f; }
            if (b % 16 == 7) { v = size; }
            if (b % 16 == 11 && i == b % QK_KVQ) { v = b % 32 == 11 ? 30.0f*size : -30.0f*size; }
            x[(size_t) b*QK_KVQ + i] = v;
        }
    }
    return x;
}

std::vector<float> make_normal(uint64_t seed, size_t n) {
    random_source rng = { seed };
    std::vector<float> x(n);
    for (auto & v : x) {
        v = rng.normal();
    }
    return x;
}

uint64_t fnv1a(const void * data, size_t size, uint64_t hash = 0xcbf29ce484222325u) {
    for (size_t i = 0; i < size; i++) {
        hash = (hash ^ ((const uint8_t *) data)[i])*0x100000001b3u;
    }
    return hash;
}

std::vector<uint8_t> encode(ggml_type type, const float * x, int64_t n) {
    std::vector<uint8_t> res(ggml_row_size(type, n));
    if (type == GGML_TYPE_F32) {
        memcpy(res.data(), x, res.size());
    } else {
        ggml_get_type_traits(type)->from_float_ref(x, res.data(), n);
    }
    return res;
}

std::vector<float> decode(ggml_type type, const void * data, int64_t n) {
    std::vector<float> res(n);
    if (type == GGML_TYPE_F32) {
        memcpy(res.data(), data, n*sizeof(float));
    } else {
        ggml_get_type_traits(type)->to_float(data, res.data(), n);
    }
    return res;
}

// Bytes that the blocks below are stored as, then the values that come back as f32, as one hash a format (FNV-1a, 64 bits).
// tests/python/test_doctor.py computes them from the numpy mirror.
const int N_GOLDEN = 64; // blocks

struct golden { ggml_type type; uint64_t hash; };
const golden goldens[] = {
    { GGML_TYPE_KVQ2, 0x6a1f2deb297b3a31u },
    { GGML_TYPE_KVQ3, 0x601bc4387116a0bcu },
    { GGML_TYPE_KVQ4, 0xd46cf45c4aa102a5u },
    { GGML_TYPE_KVQ5, 0xf9e1584962cb2b91u },
    { GGML_TYPE_KVQ6, 0xbbb878e3a527a39au },
};

std::vector<float> golden_values(ggml_type type) {
    return make_blocks((uint64_t) type, N_GOLDEN);
}

// the shape of attention: what llama.cpp asks for, but small
const int N_KV      = 256; // it pads to that
const int N_HEAD_KV = 2;
const int GQA       = 2;
const int N_HEAD    = N_HEAD_KV*GQA;
const int HEADS[]   = { 64, 128 };
const int QUERIES[] = { 1, 32 };

// positions that query i of n_q sees: the cells before and its own; the last cells are empty, as in a cache that is padded
int n_seen(int i, int n_q) {
    return N_KV - 8 - n_q + i + 1;
}

// Limits of sum (out - ref)^2 / sum ref^2.
//
// Rounding to f16 has an error uniform in +-2^-12 .. 2^-11 of the number: its variance is below 2^-22/3 = 8e-8 of the square.
// Scores have variance 1, so a relative error of the query or the keys becomes one of the same size of a score, and so of a
// weight; of values likewise. The output is a sum of as many terms as its error is, so their ratio stays.
const double HALF = 8e-8;

double attention_limit(bool is_cpu, ggml_type k, ggml_type v) {
    if (is_cpu && (ggml_is_quantized(k) || ggml_is_quantized(v))) {
        // Ours (kvq-attn.cpp). The query in steps of its largest value, 3.5 at most, by 32512: (3.5/32512)^2/12 = 1e-9. Weights
        // times scales in steps of the largest by 32512: the largest of 256 is exp(2.8), the mean square of all exp(2), so
        // (exp(2.8)/32512)^2/12/exp(2) = 3e-9, twice that for scales that differ. Together 7e-9, doubled for chance.
        return 1.5e-8;
    }
    // Query, keys, values and weights in f16; and an output that is summed up in f16: the sum of i terms has the square i, its
    // roundings together HALF*n^2/2, the last one n.
    double limit = (4 + N_KV/2)*HALF;
    if (k == GGML_TYPE_BF16 || v == GGML_TYPE_BF16) {
        limit += 4*64*HALF; // all four in bf16, with 3 bits less
    }
    if (!is_cpu && ggml_is_quantized(k)) {
        // a query in steps of 8 bits, of its largest value in 32: (3.5/127)^2/12
        limit += 6.4e-5;
    }
    return 2*limit; // for chance. A codec of another width is off by 4e-4 (kvq6) or more, a wrong row by 1.
}

// tensors of a graph in a device's memory
struct graph_on {
    ggml_backend_t          backend;
    ggml_context_ptr        ctx;
    ggml_cgraph *           graph;
    ggml_backend_buffer_ptr buf;

    explicit graph_on(ggml_backend_t backend) : backend(backend) {
        ggml_init_params params = { 32*ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true };
        ctx.reset(ggml_init(params));
        graph = ggml_new_graph(ctx.get());
    }

    // "" or what failed
    std::string alloc(ggml_tensor * out) {
        ggml_build_forward_expand(graph, out);
        buf.reset(ggml_backend_alloc_ctx_tensors(ctx.get(), backend));
        return buf ? "" : "its memory can't be allocated";
    }

    std::string compute() {
        const ggml_status status = ggml_backend_graph_compute(backend, graph);
        return status == GGML_STATUS_SUCCESS ? "" : std::string("it can't be computed: ") + ggml_status_to_string(status);
    }
};

struct cache_rows {
    std::vector<uint8_t> bytes;
    std::vector<float>   values; // [cell][head of KV][d]
};

} // namespace

struct kvq_selftest {
    std::vector<ggml_type>          types;
    std::vector<kvq_selftest_item>  items;
    std::map<int, ggml_backend_ptr> backends; // by device

    // rows of the cache and attention's weights, computed once and then used for all devices and pairs
    std::map<std::pair<int, int>, cache_rows> keys, values; // by type and head size
    std::map<int, std::vector<float>> queries;              // by head size and number
    std::map<std::pair<int, int>, std::vector<double>> weights; // of the K type in weights_of, by head size and number
    int weights_of = -1;

    ggml_backend_t backend(int device);
    const cache_rows & rows(bool v, ggml_type type, int d);
    const std::vector<float> & query(int d, int n_q);
    const std::vector<double> & weight(ggml_type type, int d, int n_q);

    void codec_reference(kvq_selftest_item & item);
    void codec_device(kvq_selftest_item & item);
    void rows_device(kvq_selftest_item & item);
    void attention(kvq_selftest_item & item);
    bool attention_case(kvq_selftest_item & item, int d, int n_q);
};

static bool fail(kvq_selftest_item & item, const std::string & why) {
    item.status = KVQ_SELFTEST_FAILED;
    snprintf(item.reason, sizeof(item.reason), "%s", why.c_str());
    return false;
}

static bool is_cpu(int device) {
    return device >= 0 && ggml_backend_dev_type(ggml_backend_dev_get(device)) == GGML_BACKEND_DEVICE_TYPE_CPU;
}

// false, and said, if the device doesn't do it. The CPU has to: nothing stands behind it.
static bool supported(kvq_selftest_item & item, const ggml_tensor * op, const std::string & what) {
    if (ggml_backend_dev_supports_op(ggml_backend_dev_get(item.device), op)) {
        return true;
    }
    fail(item, what + " is not supported");
    if (!is_cpu(item.device)) {
        item.status = KVQ_SELFTEST_ELSEWHERE;
    }
    return false;
}

ggml_backend_t kvq_selftest::backend(int device) {
    auto & res = backends[device];
    if (!res) {
        ggml_backend_dev_t dev = ggml_backend_dev_get(device);
        res.reset(ggml_backend_dev_init(dev, nullptr));
        // two threads where there are two: so that work is divided; more would wait for each other
        const auto set = (ggml_backend_set_n_threads_t) ggml_backend_reg_get_proc_address(
            ggml_backend_dev_backend_reg(dev), "ggml_backend_set_n_threads");
        if (res && set) {
            set(res.get(), std::thread::hardware_concurrency() > 1 ? 2 : 1);
        }
    }
    return res.get();
}

//
// codec and rows
//

static void check_hash(kvq_selftest_item & item, const std::vector<uint8_t> & bytes, const std::vector<float> & y) {
    item.have = fnv1a(y.data(), y.size()*sizeof(float), fnv1a(bytes.data(), bytes.size()));
    for (const auto & g : goldens) {
        if (g.type == item.type_k) {
            item.want = g.hash;
        }
    }
    if (item.have != item.want) {
        fail(item, "blocks aren't stored or read as the format has it");
    }
    item.error = item.have != item.want;
}

void kvq_selftest::codec_reference(kvq_selftest_item & item) {
    const auto x     = golden_values(item.type_k);
    const auto bytes = encode(item.type_k, x.data(), x.size());
    check_hash(item, bytes, decode(item.type_k, bytes.data(), x.size()));
}

// Values stored by SET_ROWS, the last row first, into cells from `first` on; then read by GET_ROWS if y is asked for.
// "" or what failed.
static std::string store(ggml_backend_t backend, kvq_selftest_item & item, const std::vector<float> & x, int64_t n_embd,
                         int64_t first, int64_t n_cells, std::vector<uint8_t> & bytes, std::vector<float> * y) {
    graph_on g(backend);
    ggml_context * ctx = g.ctx.get();
    const int64_t n_rows = (int64_t) x.size()/n_embd;
    ggml_tensor * src   = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, n_embd, n_rows);
    ggml_tensor * cache = ggml_new_tensor_2d(ctx, item.type_k, n_embd, n_cells);
    ggml_tensor * ids   = ggml_new_tensor_1d(ctx, GGML_TYPE_I64, n_rows);
    ggml_tensor * out   = ggml_set_rows(ctx, cache, src, ids);
    if (!supported(item, out, "SET_ROWS")) {
        return "";
    }
    std::string why = g.alloc(out);
    if (!why.empty()) {
        return why;
    }
    std::vector<int64_t> id(n_rows);
    for (int64_t i = 0; i < n_rows; i++) {
        id[i] = first + n_rows - 1 - i;
    }
    bytes.assign(ggml_nbytes(cache), 0xa5);
    ggml_backend_tensor_set(src,   x.data(),     0, ggml_nbytes(src));
    ggml_backend_tensor_set(ids,   id.data(),    0, ggml_nbytes(ids));
    ggml_backend_tensor_set(cache, bytes.data(), 0, bytes.size());
    why = g.compute();
    if (!why.empty()) {
        return why;
    }
    ggml_backend_tensor_get(cache, bytes.data(), 0, bytes.size());

    if (y) {
        graph_on r(backend);
        ctx   = r.ctx.get();
        cache = ggml_new_tensor_2d(ctx, item.type_k, n_embd, n_cells);
        ids   = ggml_new_tensor_1d(ctx, GGML_TYPE_I32, n_rows);
        out   = ggml_get_rows(ctx, cache, ids);
        if (!supported(item, out, "GET_ROWS")) {
            return "";
        }
        why = r.alloc(out);
        if (!why.empty()) {
            return why;
        }
        const std::vector<int32_t> id32(id.begin(), id.end());
        ggml_backend_tensor_set(cache, bytes.data(), 0, bytes.size());
        ggml_backend_tensor_set(ids,   id32.data(),  0, ggml_nbytes(ids));
        why = r.compute();
        if (!why.empty()) {
            return why;
        }
        y->resize(x.size());
        ggml_backend_tensor_get(out, y->data(), 0, ggml_nbytes(out));
    }
    return "";
}

// the rows of a cache in the order in which they were given to store()
static std::vector<uint8_t> in_order(const std::vector<uint8_t> & cache, size_t row, int64_t first, int64_t n_rows) {
    std::vector<uint8_t> res;
    for (int64_t i = n_rows - 1; i >= 0; i--) {
        res.insert(res.end(), cache.begin() + (first + i)*row, cache.begin() + (first + i + 1)*row);
    }
    return res;
}

void kvq_selftest::codec_device(kvq_selftest_item & item) {
    const auto x = golden_values(item.type_k);
    const int64_t n_embd = 256, n_rows = (int64_t) x.size()/n_embd;
    std::vector<uint8_t> cache;
    std::vector<float>   y;
    const std::string why = store(backend(item.device), item, x, n_embd, 0, n_rows, cache, &y);
    if (!why.empty()) {
        fail(item, why);
    } else if (item.status == KVQ_SELFTEST_PASSED) {
        check_hash(item, in_order(cache, ggml_row_size(item.type_k, n_embd), 0, n_rows), y);
    }
}

// Ours: the share of blocks whose bytes aren't the reference's. A CPU has none. A GPU computes scales in f32 where the reference
// has f64: a scale may be the next f16 in one of a hundred blocks, which adds 2^-20 of the values' squares to the error, 0.3 % of
// it for kvq6.
// Upstream's types: by how much the squared error of a block is larger than that of the reference, at most. Its encoders round
// halves in different ways, which doesn't change the error.
void kvq_selftest::rows_device(kvq_selftest_item & item) {
    const ggml_type type = item.type_k;
    const int64_t n_embd = 256, n_rows = 24, first = 3, n_cells = 32;
    const size_t  row    = ggml_row_size(type, n_embd);
    const bool    ours   = kvq_get_format(type) != nullptr;

    const auto x    = make_blocks(1000 + (uint64_t) type, (int) (n_rows*n_embd/QK_KVQ));
    const auto want = encode(type, x.data(), x.size());
    item.limit = ours && is_cpu(item.device) ? 0.0 : 0.01;

    std::vector<uint8_t> cache;
    const std::string why = store(backend(item.device), item, x, n_embd, first, n_cells, cache, nullptr);
    if (!why.empty()) {
        fail(item, why);
        return;
    }
    if (item.status != KVQ_SELFTEST_PASSED) {
        return;
    }
    for (size_t i = 0; i < cache.size(); i++) {
        if ((i < first*row || i >= (first + n_rows)*row) && cache[i] != 0xa5) {
            fail(item, "SET_ROWS writes to rows that it wasn't given");
            return;
        }
    }
    const auto have = in_order(cache, row, first, n_rows);
    const auto yw = decode(type, want.data(), x.size());
    const auto yh = decode(type, have.data(), x.size());

    const size_t size = ggml_row_size(type, QK_KVQ); // upstream's blocks are as long, and floats have none
    int64_t differ = 0;
    double  worst  = 0.0;
    for (int64_t b = 0; b < (int64_t) x.size()/QK_KVQ; b++) {
        const bool same = memcmp(want.data() + b*size, have.data() + b*size, size) == 0;
        differ += !same;
        double ew = 0, eh = 0, sum = 0;
        for (int64_t i = b*QK_KVQ; i < (b + 1)*QK_KVQ; i++) {
            ew  += ((double) x[i] - yw[i])*((double) x[i] - yw[i]);
            eh  += ((double) x[i] - yh[i])*((double) x[i] - yh[i]);
            sum += (double) x[i]*x[i];
        }
        const double more = (eh - ew)/(ew + 1e-7*sum); // a block that is stored exactly has no error to compare with
        if (!same && !(eh <= ew)) { // zeros may have any codes
            worst = std::max(worst, std::isfinite(more) && type != GGML_TYPE_F32 ? more : INFINITY);
        }
    }
    item.error = ours ? (double) differ*QK_KVQ/x.size() : worst;
    if (!(item.error <= item.limit) || !(worst <= 0.01)) {
        fail(item, "SET_ROWS doesn't store what the reference codec does");
    }
}

//
// attention
//

const cache_rows & kvq_selftest::rows(bool v, ggml_type type, int d) {
    cache_rows & res = (v ? values : keys)[{ (int) type, d }];
    if (res.bytes.empty()) {
        const int64_t n = (int64_t) d*N_HEAD_KV*N_KV;
        const auto x = make_normal((v ? 2000 : 3000) + d, n);
        res.bytes  = encode(type, x.data(), n);
        res.values = decode(type, res.bytes.data(), n);
    }
    return res;
}

// [head][query][d]
const std::vector<float> & kvq_selftest::query(int d, int n_q) {
    auto & res = queries[d*1000 + n_q];
    if (res.empty()) {
        res = make_normal(4000 + d + n_q, (size_t) d*n_q*N_HEAD);
    }
    return res;
}

// softmax in double, [head][query][cell]; a cell that isn't seen has 0
const std::vector<double> & kvq_selftest::weight(ggml_type type, int d, int n_q) {
    if (weights_of != (int) type) {
        weights.clear();
        weights_of = (int) type;
    }
    auto & res = weights[{ d, n_q }];
    if (!res.empty()) {
        return res;
    }
    const auto & k = rows(false, type, d).values;
    const auto & q = query(d, n_q);
    res.assign((size_t) N_HEAD*n_q*N_KV, 0.0);
    for (int h = 0; h < N_HEAD; h++) {
        for (int i = 0; i < n_q; i++) {
            const float * qi = q.data() + ((size_t) h*n_q + i)*d;
            double * p = res.data() + ((size_t) h*n_q + i)*N_KV;
            double max = -INFINITY, sum = 0;
            for (int j = 0; j < n_seen(i, n_q); j++) {
                const float * kj = k.data() + ((size_t) j*N_HEAD_KV + h/GQA)*d;
                double s = 0;
                for (int l = 0; l < d; l++) {
                    s += (double) qi[l]*kj[l];
                }
                p[j] = s/std::sqrt((double) d);
                max  = std::max(max, p[j]);
            }
            for (int j = 0; j < n_seen(i, n_q); j++) {
                p[j] = std::exp(p[j] - max);
                sum += p[j];
            }
            for (int j = 0; j < n_seen(i, n_q); j++) {
                p[j] /= sum;
            }
        }
    }
    return res;
}

bool kvq_selftest::attention_case(kvq_selftest_item & item, int d, int n_q) {
    const std::string what = "head size " + std::to_string(d) + (n_q == 1 ? ", 1 query" : ", " + std::to_string(n_q) + " queries");

    graph_on g(backend(item.device));
    ggml_context * ctx = g.ctx.get();
    // stored as a cache stores them: the heads of a cell are neighbours
    const auto side = [&](ggml_type type) {
        ggml_tensor * t = ggml_new_tensor_2d(ctx, type, (int64_t) d*N_HEAD_KV, N_KV);
        return ggml_view_3d(ctx, t, d, N_KV, N_HEAD_KV, t->nb[1], ggml_row_size(type, d), 0);
    };
    ggml_tensor * q    = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, d, n_q, N_HEAD);
    ggml_tensor * k    = side(item.type_k);
    ggml_tensor * v    = side(item.type_v);
    ggml_tensor * mask = ggml_new_tensor_2d(ctx, GGML_TYPE_F16, N_KV, n_q);
    ggml_tensor * out  = ggml_flash_attn_ext(ctx, q, k, v, mask, 1.0f/std::sqrt((float) d), 0.0f, 0.0f);
    if (!supported(item, out, "attention with " + what)) {
        return false;
    }
    std::string why = g.alloc(out);
    if (!why.empty()) {
        return fail(item, what + ": " + why);
    }
    const auto & kr = rows(false, item.type_k, d);
    const auto & vr = rows(true,  item.type_v, d);
    std::vector<ggml_fp16_t> m((size_t) N_KV*n_q, ggml_fp32_to_fp16(-INFINITY));
    for (int i = 0; i < n_q; i++) {
        std::fill_n(m.begin() + (size_t) i*N_KV, n_seen(i, n_q), ggml_fp32_to_fp16(0.0f));
    }
    ggml_backend_tensor_set(q,           query(d, n_q).data(), 0, ggml_nbytes(q));
    ggml_backend_tensor_set(k->view_src, kr.bytes.data(),      0, kr.bytes.size());
    ggml_backend_tensor_set(v->view_src, vr.bytes.data(),      0, vr.bytes.size());
    ggml_backend_tensor_set(mask,        m.data(),             0, ggml_nbytes(mask));
    why = g.compute();
    if (!why.empty()) {
        return fail(item, what + ": " + why);
    }
    std::vector<float> have(ggml_nelements(out)); // [query][head][d]
    ggml_backend_tensor_get(out, have.data(), 0, ggml_nbytes(out));

    const auto & p = weight(item.type_k, d, n_q);
    double err = 0, sum = 0;
    std::vector<double> o(d);
    for (int h = 0; h < N_HEAD; h++) {
        for (int i = 0; i < n_q; i++) {
            std::fill(o.begin(), o.end(), 0.0);
            for (int j = 0; j < n_seen(i, n_q); j++) {
                const double  w  = p[((size_t) h*n_q + i)*N_KV + j];
                const float * vj = vr.values.data() + ((size_t) j*N_HEAD_KV + h/GQA)*d;
                for (int l = 0; l < d; l++) {
                    o[l] += w*vj[l];
                }
            }
            const float * oh = have.data() + ((size_t) i*N_HEAD + h)*d;
            for (int l = 0; l < d; l++) {
                err += (oh[l] - o[l])*(oh[l] - o[l]);
                sum += o[l]*o[l];
            }
        }
    }
    const double nmse = std::isfinite(err) ? err/sum : INFINITY;
    item.error = std::max(item.error, nmse);
    if (!(nmse <= item.limit)) {
        return fail(item, what + ": attention isn't that over the stored keys and values");
    }
    return true;
}

void kvq_selftest::attention(kvq_selftest_item & item) {
    item.limit = attention_limit(is_cpu(item.device), item.type_k, item.type_v);
    for (const int d : HEADS) {
        for (const int n_q : QUERIES) {
            if (!attention_case(item, d, n_q)) {
                return;
            }
        }
    }
}

//
// API
//

struct kvq_selftest * kvq_selftest_init(void) {
    // as llama.cpp's own calls do, and where a file of a backend is named
    if (ggml_backend_dev_count() == 0 || getenv("GGML_BACKEND_PATH")) {
        ggml_backend_load_all();
    }
    std::unique_ptr<kvq_selftest> t(new kvq_selftest);
    for (const auto & info : kvq_cache_types) {
        t->types.push_back(info.type);
    }
    const auto add = [&](int kind, int device, ggml_type k, ggml_type v) {
        kvq_selftest_item item = {};
        item.kind   = kind;
        item.device = device;
        item.type_k = k;
        item.type_v = v;
        t->items.push_back(item);
    };
    std::vector<int> devices;
    for (int i = 0; i < (int) ggml_backend_dev_count(); i++) {
        switch (ggml_backend_dev_type(ggml_backend_dev_get(i))) {
            case GGML_BACKEND_DEVICE_TYPE_CPU:
            case GGML_BACKEND_DEVICE_TYPE_GPU:
            case GGML_BACKEND_DEVICE_TYPE_IGPU:
                devices.push_back(i);
                break;
            default: // helpers of the CPU, which hold no cache
                break;
        }
    }
    for (const auto & g : goldens) {
        add(KVQ_SELFTEST_CODEC, -1, g.type, GGML_TYPE_COUNT);
    }
    for (const int i : devices) {
        for (const auto & g : goldens) {
            if (is_cpu(i)) { // another device may be off by a step of a scale
                add(KVQ_SELFTEST_CODEC, i, g.type, GGML_TYPE_COUNT);
            }
        }
    }
    for (const int i : devices) {
        for (const ggml_type type : t->types) {
            add(KVQ_SELFTEST_ROWS, i, type, GGML_TYPE_COUNT);
        }
    }
    // a type of K after another, so that its weights are computed once
    for (const ggml_type k : t->types) {
        for (const ggml_type v : t->types) {
            for (const int i : devices) {
                add(KVQ_SELFTEST_ATTENTION, i, k, v);
            }
        }
    }
    return t.release();
}

int32_t kvq_selftest_count(const struct kvq_selftest * test) {
    return (int32_t) test->items.size();
}

bool kvq_selftest_get(const struct kvq_selftest * test, int32_t i, struct kvq_selftest_item * item) {
    if (i < 0 || i >= kvq_selftest_count(test)) {
        return false;
    }
    *item = test->items[i];
    return true;
}

bool kvq_selftest_run(struct kvq_selftest * test, int32_t i, struct kvq_selftest_item * item) {
    if (!kvq_selftest_get(test, i, item)) {
        return false;
    }
    try {
        if (item->device >= 0 && !test->backend(item->device)) {
            fail(*item, "the device can't be opened");
            return true;
        }
        switch (item->kind) {
            case KVQ_SELFTEST_CODEC: item->device < 0 ? test->codec_reference(*item) : test->codec_device(*item); break;
            case KVQ_SELFTEST_ROWS:  test->rows_device(*item); break;
            default:                 test->attention(*item);   break;
        }
    } catch (const std::exception & e) {
        fail(*item, e.what());
    }
    return true;
}

void kvq_selftest_free(struct kvq_selftest * test) {
    delete test;
}
