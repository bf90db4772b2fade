// SPDX-License-Identifier: MIT
//
// The grammar of SPEC and PRESET, handles, and what a wrong one says.

#include "kvq.h"

#include <cstdio>
#include <cstring>
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

// "kvq4 kvq4 q8_0", or "error: ..."
static std::string resolved(const char * spec, int n_layer) {
    const ggml_type type = kvq_type_from_spec(spec);
    if (type == GGML_TYPE_COUNT) {
        return std::string("error: ") + kvq_last_error();
    }
    std::vector<ggml_type> types(n_layer, GGML_TYPE_COUNT);
    if (!kvq_resolve(type, n_layer, types.data())) {
        return std::string("error: ") + kvq_last_error();
    }
    std::string res;
    for (const ggml_type t : types) {
        res += (res.empty() ? "" : " ") + std::string(ggml_type_name(t));
    }
    return res;
}

int main() {
    // SPEC, layers, expected types
    const struct { const char * spec; int n; const char * expect; } good[] = {
        { "8",                  2, "q8_0 q8_0" },
        { "32",                 1, "f32" },
        { "16",                 1, "f16" },
        { "6",                  1, "kvq6" },
        { "5",                  1, "kvq5" },
        { "4",                  1, "kvq4" },
        { "3",                  1, "kvq3" },
        { "2",                  1, "kvq2" },
        { "q4_0",               1, "q4_0" },
        { "Q5_0",               1, "q5_0" },
        { "bf16",               1, "bf16" },
        { "iq4_nl",             1, "iq4_nl" },
        { "Q4_1",               1, "q4_1" },
        { "4,:2=8,-2:=16",      6, "q8_0 q8_0 kvq4 kvq4 f16 f16" },
        { " 4 , : 2 = 8 ",      3, "q8_0 q8_0 kvq4" },
        { "8,1=4",              3, "q8_0 kvq4 q8_0" },
        { "8,-1=4",             3, "q8_0 q8_0 kvq4" },
        { "8,::2=4",            5, "kvq4 q8_0 kvq4 q8_0 kvq4" },
        { "8,1:5:3=4",          6, "q8_0 kvq4 q8_0 q8_0 kvq4 q8_0" },
        { "8,:=4",              2, "kvq4 kvq4" },
        { "8,:=4,0=16",         2, "f16 kvq4" }, // the later exception wins
        { "8,::999999999=4",    2, "kvq4 q8_0" },
        { "8,0:3=4",            3, "kvq4 kvq4 kvq4" },
    };
    for (const auto & t : good) {
        const std::string res = resolved(t.spec, t.n);
        CHECK(res == t.expect, "'%s' on %d layers gives '%s', not '%s'", t.spec, t.n, res.c_str(), t.expect);
    }

    // SPEC, layers, what its error must name
    const struct { const char * spec; int n; const char * expect; } bad[] = {
        { "",                   2, "no cache type" },
        { "7",                  2, "32 (f32), 16 (f16), 8 (q8_0), 6 (kvq6), 5 (kvq5), 4 (kvq4), 3 (kvq3), 2 (kvq2), and by name bf16, q5_0" },
        { "1",                  2, "no cache type" },
        { "9",                  2, "no cache type" },
        { "q8_1",               2, "'q8_1'" },
        { "q4_k",               2, "'q4_k'" },
        { "4,",                 2, "SLICE=TYPE" },
        { "4,2",                2, "SLICE=TYPE" },
        { "4,=8",               2, "layer slice" },
        { "4,x=8",              2, "layer slice" },
        { "4,1:2:3:4=8",        2, "layer slice" },
        { "4,1.5=8",            2, "layer slice" },
        { "4,--1=8",            2, "layer slice" },
        { "4,9999999999=8",     2, "layer slice" },
        { "4,::0=8",            2, "step" },
        { "4,::-1=8",           2, "step" },
        { "4,:2=7",             2, "'7'" },
        { "4,2=8",              2, "layers 0 to 1" },
        { "4,-3=8",             2, "out of range" },
        { "4,:3=8",             2, "out of range" },
        { "4,-3:=8",            2, "out of range" },
        { "4,2:=8",             2, "selects no layer" },
        { "4,1:1=8",            2, "selects no layer" },
        { "4,0=8",              0, "no layer stores" },
    };
    for (const auto & t : bad) {
        const std::string res = resolved(t.spec, t.n);
        CHECK(res.rfind("error: ", 0) == 0 && res.find(t.expect) != std::string::npos,
            "'%s' on %d layers gives '%s', without '%s'", t.spec, t.n, res.c_str(), t.expect);
    }

    // a handle is one policy, whatever its spelling
    CHECK(kvq_type_from_spec("8")     == kvq_type_from_spec(" Q8_0 "),      "same policy, other handle");
    CHECK(kvq_type_from_spec("4,:2=8") == kvq_type_from_spec("kvq4,:2=q8_0"), "same policy, other handle");
    CHECK(kvq_type_from_spec("4,:2=8") != kvq_type_from_spec("4,:3=8"),       "other policy, same handle");
    CHECK(!strcmp(kvq_type_name(kvq_type_from_spec("4, :2 = 8, -2: = 16, 5=bf16, ::3=5")),
        "kvq4,:2=q8_0,-2:=f16,5=bf16,::3=kvq5"), "%s", kvq_type_name(kvq_type_from_spec("4, :2 = 8, -2: = 16, 5=bf16, ::3=5")));

    // every integer is a name or "none", a cache type or an error; never a crash
    for (int i = -2; i < 500; i++) {
        ggml_type out = GGML_TYPE_COUNT;
        bool cache_type = false;
        for (int j = 0; kvq_cache_type(j) != GGML_TYPE_COUNT; j++) {
            cache_type = cache_type || kvq_cache_type(j) == i;
        }
        CHECK(kvq_type_name((ggml_type) i) != nullptr, "%d", i);
        CHECK(kvq_resolve((ggml_type) i, 1, &out) == cache_type, "%d", i);
        CHECK(cache_type || strstr(kvq_last_error(), std::to_string(i).c_str()), "%d: %s", i, kvq_last_error());
    }
    {
        ggml_type out;
        CHECK(!kvq_resolve((ggml_type) 0x7fffffff, 1, &out), "an unknown handle resolves");
    }

    // PRESET
    const struct { const char * preset; const char * k; const char * v; } presets[] = {
        { "8",     "q8_0", "kvq4" },
        { "4",     "kvq4", "kvq4" },
        { "16",    "f16",  "f16"  },
        { "K8V4",  "q8_0", "kvq4" },
        { "k5v4",  "kvq5", "kvq4" },
        { "k16v8", "f16",  "q8_0" },
        { "k32v32","f32",  "f32"  },
    };
    for (const auto & t : presets) {
        ggml_type k = GGML_TYPE_COUNT;
        ggml_type v = GGML_TYPE_COUNT;
        CHECK(kvq_types_from_preset(t.preset, &k, &v), "'%s': %s", t.preset, kvq_last_error());
        CHECK(!strcmp(kvq_type_name(k), t.k) && !strcmp(kvq_type_name(v), t.v), "'%s' is %s/%s", t.preset, kvq_type_name(k), kvq_type_name(v));
    }
    for (const char * preset : { "", "k8", "v4", "k8v", "kv", "k8v4x", "8v4", "k7v3", "k3v1", "32", "6", "q8_0", "k8v4,:2=8", "k-8v4" }) {
        ggml_type k = GGML_TYPE_F32;
        ggml_type v = GGML_TYPE_F32;
        CHECK(!kvq_types_from_preset(preset, &k, &v), "'%s' is accepted", preset);
        CHECK(k == GGML_TYPE_F32 && v == GGML_TYPE_F32, "'%s' wrote a type", preset);
        CHECK(strlen(kvq_last_error()) > 20, "'%s': '%s'", preset, kvq_last_error());
    }

    int n_words = 1;
    for (const char * p = kvq_build(); *p; p++) {
        n_words += *p == ' ';
    }
    CHECK(n_words == 3, "kvq_build: %s", kvq_build());

    printf("%d passed, %d failed\n", n_passed, n_failed);
    return n_failed ? 1 : 0;
}
