// SPDX-License-Identifier: MIT
//
// SPECs and PRESETs. The first byte of an input is the number of layers, the rest is the text, as SPEC and as PRESET.
//
// What must hold: a SPEC that is accepted has a canonical text that means the same and is its own canonical text; its
// layers have cache types; one that is refused says why, and writes nothing.

#include "fuzz-common.h"

#include "kvq.h"

#include <algorithm>

static const ggml_type untouched = ggml_type(GGML_TYPE_COUNT + 1); // which no call writes

static std::vector<ggml_type> resolve(ggml_type type, int32_t n_layer, bool & ok) {
    std::vector<ggml_type> res(n_layer, untouched);
    ok = kvq_resolve(type, n_layer, res.data());
    FUZZ_CHECK(ok == !*kvq_last_error(), "the reason '%s' does not go with %d", kvq_last_error(), ok);
    for (const ggml_type t : res) {
        bool known = !ok && t == untouched;
        for (int32_t i = 0; ok && !known && kvq_cache_type(i) != GGML_TYPE_COUNT; i++) {
            known = t == kvq_cache_type(i);
        }
        FUZZ_CHECK(known, "%d is no cache type", int(t));
    }
    return res;
}

static void check_handle(ggml_type type, int32_t n_layer) {
    const std::string text = kvq_type_name(type);
    const ggml_type   same = kvq_type_from_spec(text.c_str());
    FUZZ_CHECK(same == type, "'%s' names %d, not %d", text.c_str(), int(same), int(type));
    FUZZ_CHECK(text == kvq_type_name(same), "'%s' is not canonical", text.c_str());
    bool ok;
    resolve(type, n_layer, ok);
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t * data, size_t size) {
    if (size < 1) {
        return -1;
    }
    const int32_t     n_layer = data[0];
    const std::string text((const char *) data + 1, size - 1);

    const ggml_type type = kvq_type_from_spec(text.c_str());
    if (type == GGML_TYPE_COUNT) {
        FUZZ_CHECK(*kvq_last_error(), "no reason why '%s' is refused", text.c_str());
    } else {
        FUZZ_CHECK(!*kvq_last_error(), "'%s' is accepted with a reason", text.c_str());
        check_handle(type, n_layer);
    }

    ggml_type types[2] = { untouched, untouched };
    if (kvq_types_from_preset(text.c_str(), &types[0], &types[1])) {
        for (const ggml_type t : types) {
            check_handle(t, n_layer);
            bool ok;
            resolve(t, n_layer, ok);
            FUZZ_CHECK(ok, "the preset '%s' does not fit %d layers: %s", text.c_str(), n_layer, kvq_last_error());
        }
    } else {
        FUZZ_CHECK(types[0] == untouched && types[1] == untouched, "the refused preset '%s' wrote", text.c_str());
        FUZZ_CHECK(*kvq_last_error(), "no reason why '%s' is refused", text.c_str());
    }

    // any name, and any number that the enumeration has room for, as a type
    kvq_format_type(text.c_str());
    int32_t number = 0;
    memcpy(&number, text.data(), std::min(text.size(), sizeof(number)));
    kvq_cache_type(number);
    number &= GGML_TYPE_KVQ_POLICY | (GGML_TYPE_KVQ_POLICY - 1);
    bool ok;
    kvq_type_name(ggml_type(number));
    resolve(ggml_type(number), n_layer, ok);
    return 0;
}

extern "C" int LLVMFuzzerInitialize(int *, char ***) {
    fuzz_silence();
    if (getenv("KVSPLIT_FUZZ_SEEDS")) {
        int n = 0;
        for (const char * text : { "8", "k8v4", "kvq4,:2=8,-2:=16", "6,10:20=4", " 4 , : 2 = 8 ", "8,::2=4,1:5:3=q4_0", "8,-1=bf16" }) {
            std::vector<uint8_t> seed(text, text + strlen(text));
            seed.insert(seed.begin(), uint8_t(22));
            fuzz_write_seed("spec-" + std::to_string(n++), seed);
        }
        _exit(0); // what is held to the end is no leak
    }
    return 0;
}
