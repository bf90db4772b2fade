// SPDX-License-Identifier: MIT
//
// The self-test tests: it passes on a sound CPU, and finds each fault of a device that computes as the CPU does but for that fault.

#include "kvq.h"

#include "kvq-types.h"

#include "ggml-backend-impl.h"
#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "ggml-cpu.h"
#include "ggml.h"

#include <cmath>
#include <cstdio>
#include <cstring>
#include <set>
#include <string>
#include <utility>
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

//
// a device with a fault
//

static std::string fault; // "" for none

static bool attends(const ggml_tensor * t) { return t->op == GGML_OP_FLASH_ATTN_EXT; }

static const char * faulty_name(ggml_backend_dev_t) { return "FAULTY0"; }
static const char * faulty_description(ggml_backend_dev_t) { return "a CPU with a fault"; }
static void faulty_memory(ggml_backend_dev_t, size_t * free, size_t * total) { *free = *total = 1 << 20; }
static enum ggml_backend_dev_type faulty_type(ggml_backend_dev_t) { return GGML_BACKEND_DEVICE_TYPE_GPU; }
static ggml_backend_buffer_type_t faulty_buft(ggml_backend_dev_t) { return ggml_backend_cpu_buffer_type(); }
static bool faulty_supports_buft(ggml_backend_dev_t, ggml_backend_buffer_type_t buft) { return buft == ggml_backend_cpu_buffer_type(); }
static const char * faulty_backend_name(ggml_backend_t) { return "FAULTY"; }

static bool faulty_supports_op(ggml_backend_dev_t, const ggml_tensor * op) {
    if (fault == "refuses a pair"   && attends(op)) { return op->src[1]->type == op->src[2]->type; }
    if (fault == "refuses a prompt" && attends(op)) { return op->src[0]->ne[1] == 1; }
    if (fault == "refuses a head"   && attends(op)) { return op->src[0]->ne[0] != 128; }
    if (fault == "refuses a store"  && op->op == GGML_OP_SET_ROWS) { return op->type != GGML_TYPE_KVQ3; }
    return true;
}

static enum ggml_status faulty_compute(ggml_backend_t, struct ggml_cgraph * graph) {
    ggml_backend_ptr cpu(ggml_backend_cpu_init());
    ggml_backend_cpu_set_n_threads(cpu.get(), 1);
    for (int i = 0; i < ggml_graph_n_nodes(graph); i++) {
        ggml_tensor * t = ggml_graph_node(graph, i);
        if (!attends(t)) {
            continue;
        }
        if (fault == "heads mixed up") { // keys of the first head for all
            t->src[1]->nb[2] = 0;
        }
        if (fault == "no mask") {
            ggml_tensor * m = t->src[3];
            memset(m->data, 0, ggml_nbytes(m));
        }
    }
    if (fault == "fails") {
        return GGML_STATUS_FAILED;
    }
    const enum ggml_status status = ggml_backend_graph_compute(cpu.get(), graph);
    for (int i = 0; i < ggml_graph_n_nodes(graph); i++) {
        ggml_tensor * t = ggml_graph_node(graph, i);
        char * bytes = (char *) t->data;
        if (attends(t)) {
            float * x = (float *) t->data;
            const int64_t n = ggml_nelements(t);
            if (fault == "a value off")      { x[n/2] += 0.25f; }
            if (fault == "a last row lost")  { memset(x + n - t->ne[0], 0, t->ne[0]*sizeof(float)); }
            if (fault == "NaN")              { x[n - 1] = NAN; }
            if (fault == "a percent off")     { for (int64_t j = 0; j < n; j++) { x[j] *= 1.01f; } }
        }
        if (t->op == GGML_OP_SET_ROWS) {
            if (fault == "a byte of a row")  { bytes[10*t->nb[1] + 3] ^= 0x10; }
            if (fault == "a stray byte")     { bytes[ggml_nbytes(t) - 1] ^= 1; }
            if (fault == "rows in order")    { // indices are not looked at
                std::vector<char> copy(bytes, bytes + ggml_nbytes(t));
                for (int r = 3; r < 27 && ggml_nbytes(t) >= 27*t->nb[1]; r++) {
                    memcpy(bytes + r*t->nb[1], copy.data() + (29 - r)*t->nb[1], t->nb[1]);
                }
            }
        }
    }
    return status;
}

static void faulty_free(ggml_backend_t backend) { delete backend; }

static ggml_backend_t faulty_init(ggml_backend_dev_t dev, const char *) {
    if (fault == "can't be opened") {
        return nullptr;
    }
    static ggml_guid guid = { 0x6b, 0x76, 0x71 };
    ggml_backend * res = new ggml_backend();
    res->guid                = &guid;
    res->device              = dev;
    res->iface.get_name      = faulty_backend_name;
    res->iface.free          = faulty_free;
    res->iface.graph_compute = faulty_compute;
    return res;
}

static ggml_backend_device faulty_device;

static const char * faulty_reg_name(ggml_backend_reg_t) { return "FAULTY"; }
static size_t faulty_count(ggml_backend_reg_t) { return 1; }
static ggml_backend_dev_t faulty_get(ggml_backend_reg_t, size_t) { return &faulty_device; }
static ggml_backend_reg faulty_reg = { GGML_BACKEND_API_VERSION, { faulty_reg_name, faulty_count, faulty_get, nullptr }, nullptr };

static void add_faulty() {
    faulty_device.iface.get_name        = faulty_name;
    faulty_device.iface.get_description = faulty_description;
    faulty_device.iface.get_memory      = faulty_memory;
    faulty_device.iface.get_type        = faulty_type;
    faulty_device.iface.init_backend    = faulty_init;
    faulty_device.iface.get_buffer_type = faulty_buft;
    faulty_device.iface.supports_op     = faulty_supports_op;
    faulty_device.iface.supports_buft   = faulty_supports_buft;
    faulty_device.reg = &faulty_reg;
    ggml_backend_register(&faulty_reg);
}

//
// tests
//

static std::vector<kvq_selftest_item> run_all(int device) {
    std::vector<kvq_selftest_item> res;
    kvq_selftest * test = kvq_selftest_init();
    for (int i = 0; i < kvq_selftest_count(test); i++) {
        kvq_selftest_item item;
        CHECK(kvq_selftest_get(test, i, &item), "%d", i);
        if (item.device == device) {
            CHECK(kvq_selftest_run(test, i, &item), "%d", i);
            res.push_back(item);
        }
    }
    kvq_selftest_free(test);
    return res;
}

static std::string text(const kvq_selftest_item & item) {
    return "kind " + std::to_string(item.kind) + " device " + std::to_string(item.device) + " " + kvq_type_name(item.type_k) + "/"
        + kvq_type_name(item.type_v) + " error " + std::to_string(item.error) + " status " + std::to_string(item.status) + " " + item.reason;
}

static int n_types() {
    int n = 0;
    while (kvq_cache_type(n) != GGML_TYPE_COUNT) {
        n++;
    }
    return n;
}

static void test_sound(int device, int n_codec) {
    std::set<std::pair<int, int>> pairs, stored, codecs;
    for (const auto & item : run_all(device)) {
        CHECK(item.status == KVQ_SELFTEST_PASSED && item.reason[0] == '\0', "%s", text(item).c_str());
        CHECK(item.error >= 0 && item.error <= item.limit, "%s", text(item).c_str());
        auto & seen = item.kind == KVQ_SELFTEST_ATTENTION ? pairs : item.kind == KVQ_SELFTEST_ROWS ? stored : codecs;
        CHECK(seen.insert({ item.type_k, item.type_v }).second, "twice: %s", text(item).c_str());
        // an error of exactly nothing would mean that nothing was compared
        CHECK(item.kind != KVQ_SELFTEST_ATTENTION || item.error > 0, "%s", text(item).c_str());
        CHECK(item.kind != KVQ_SELFTEST_CODEC || (item.want == item.have && item.want != 0), "%s", text(item).c_str());
    }
    const int n = n_types();
    CHECK((int) pairs.size() == (device < 0 ? 0 : n*n), "%d pairs", (int) pairs.size());
    CHECK((int) stored.size() == (device < 0 ? 0 : n), "%d types", (int) stored.size());
    CHECK((int) codecs.size() == n_codec, "%d codecs", (int) codecs.size());
}

struct expected {
    const char * fault;
    bool         attention, rows; // which items it must show in
    int          status;
    const char * reason;
};

static void test_faults(int device) {
    const expected faults[] = {
        { "a value off",      true,  false, KVQ_SELFTEST_FAILED,    "attention isn't that over" },
        { "a last row lost",  true,  false, KVQ_SELFTEST_FAILED,    "attention isn't that over" },
        { "NaN",              true,  false, KVQ_SELFTEST_FAILED,    "attention isn't that over" },
        { "a percent off",   false, false, KVQ_SELFTEST_FAILED,    "attention isn't that over" },
        { "heads mixed up",   true,  false, KVQ_SELFTEST_FAILED,    "attention isn't that over" },
        { "no mask",          true,  false, KVQ_SELFTEST_FAILED,    "attention isn't that over" },
        { "refuses a prompt", true,  false, KVQ_SELFTEST_ELSEWHERE, "32 queries is not supported" },
        { "refuses a head",   true,  false, KVQ_SELFTEST_ELSEWHERE, "head size 128, 1 query is not supported" },
        { "a byte of a row",  false, true,  KVQ_SELFTEST_FAILED,    "SET_ROWS doesn't store" },
        { "a stray byte",     false, true,  KVQ_SELFTEST_FAILED,    "rows that it wasn't given" },
        { "rows in order",    false, true,  KVQ_SELFTEST_FAILED,    "SET_ROWS doesn't store" },
        { "fails",            true,  true,  KVQ_SELFTEST_FAILED,    "can't be computed" },
        { "can't be opened",  true,  true,  KVQ_SELFTEST_FAILED,    "can't be opened" },
    };
    for (const auto & e : faults) {
        fault = e.fault;
        for (const auto & item : run_all(device)) {
            // the limit for quantized keys admits a query of 8 bits, and with it one percent
            const bool expect = std::string(e.fault) == "a percent off"
                ? item.kind == KVQ_SELFTEST_ATTENTION && item.limit < 0.99e-4
                : item.kind == KVQ_SELFTEST_ATTENTION ? e.attention : e.rows;
            if (!expect) {
                CHECK(item.status == KVQ_SELFTEST_PASSED, "%s: %s", e.fault, text(item).c_str());
                continue;
            }
            CHECK(item.status == e.status, "%s: %s", e.fault, text(item).c_str());
            CHECK(strstr(item.reason, e.reason), "%s: %s", e.fault, text(item).c_str());
        }
    }
    fault = "refuses a pair";
    for (const auto & item : run_all(device)) {
        const bool refused = item.kind == KVQ_SELFTEST_ATTENTION && item.type_k != item.type_v;
        CHECK(item.status == (refused ? KVQ_SELFTEST_ELSEWHERE : KVQ_SELFTEST_PASSED), "%s", text(item).c_str());
    }
    fault = "refuses a store";
    for (const auto & item : run_all(device)) {
        const bool refused = item.kind == KVQ_SELFTEST_ROWS && item.type_k == GGML_TYPE_KVQ3;
        CHECK(item.status == (refused ? KVQ_SELFTEST_ELSEWHERE : KVQ_SELFTEST_PASSED), "%s", text(item).c_str());
    }
    fault.clear();
}

static void test_out_of_range() {
    kvq_selftest * test = kvq_selftest_init();
    kvq_selftest_item item;
    CHECK(!kvq_selftest_get(test, -1, &item) && !kvq_selftest_run(test, -1, &item), "-1");
    CHECK(!kvq_selftest_run(test, kvq_selftest_count(test), &item), "%d", kvq_selftest_count(test));
    // in any order, and again, the same
    double first = 0;
    for (const int i : { kvq_selftest_count(test) - 1, 0, kvq_selftest_count(test) - 1 }) {
        CHECK(kvq_selftest_run(test, i, &item) && item.status == KVQ_SELFTEST_PASSED, "%s", text(item).c_str());
        CHECK(i == 0 || first == 0 || first == item.error, "%g, then %g", first, item.error);
        first = i == 0 ? first : item.error;
    }
    kvq_selftest_free(test);
    kvq_selftest_free(nullptr);
}

static void test_files() {
    const char * names[] = { "llama", "ggml-base", "ggml", "ggml-cpu" };
    for (int i = 0; i < 4; i++) {
        const char * file = kvq_library_file(i);
        // a static build has all in one
        CHECK(file && (strstr(file, names[i]) || strstr(file, "test-kvq-selftest")), "%d: %s", i, file ? file : "NULL");
    }
    CHECK(kvq_library_file(-1) == nullptr, "-1");
    CHECK(kvq_library_file(3 + (int) ggml_backend_dev_count()) == nullptr, "past the last");
}

int main() {
    test_files();
    test_out_of_range();
    test_sound(-1, 5);
    int cpu = -1;
    for (int i = 0; i < (int) ggml_backend_dev_count(); i++) {
        if (ggml_backend_dev_type(ggml_backend_dev_get(i)) == GGML_BACKEND_DEVICE_TYPE_CPU) {
            cpu = i;
        }
    }
    test_sound(cpu, 5);

    add_faulty();
    const int faulty = (int) ggml_backend_dev_count() - 1;
    CHECK(std::string(ggml_backend_dev_name(ggml_backend_dev_get(faulty))) == "FAULTY0", "%d", faulty);
    test_sound(faulty, 0);
    test_faults(faulty);

    printf("test-kvq-selftest: %d checks passed, %d failed\n", n_passed, n_failed);
    return n_failed ? 1 : 0;
}
