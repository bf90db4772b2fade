// SPDX-License-Identifier: MIT
//
// The policy that a model file carries: kvq.key and kvq.val as any text, number, list or other type of metadata,
// written into a small model, as an override and through kvq_model_set_policy().
//
//     first byte   low half: type of kvq.key, high half: type of kvq.val (see `add`)
//     second byte  bit 0: override kvq.key too, bit 1: kvq_model_set_policy() too
//     rest         both values, apart at the first line feed
//
// What must hold: the model loads; a context is made with cache types that the policy means, or refused with a reason
// that names the key, and then an explicit type still makes one.

#include "fuzz-common.h"

#include "ggml-cpp.h"
#include "gguf.h"
#include "kvq.h"

#include <algorithm>

// one key with a value of the type that `kind` chooses
static void add(gguf_context * meta, const char * key, int kind, const std::string & value) {
    int64_t number = 0;
    memcpy(&number, value.data(), std::min(value.size(), sizeof(number)));
    float real = 0;
    memcpy(&real, value.data(), std::min(value.size(), sizeof(real)));
    const char * c_str = value.c_str();
    switch (kind) {
        case 0:  break; // none
        case 1:  gguf_set_val_u8  (meta, key, uint8_t(number));         break;
        case 2:  gguf_set_val_i8  (meta, key, int8_t(number));          break;
        case 3:  gguf_set_val_i32 (meta, key, int32_t(number));         break;
        case 4:  gguf_set_val_u64 (meta, key, uint64_t(number));        break;
        case 5:  gguf_set_val_i64 (meta, key, number);                  break;
        case 6:  gguf_set_val_f32 (meta, key, real);                    break;
        case 7:  gguf_set_val_bool(meta, key, number & 1);              break;
        case 8:  gguf_set_arr_str (meta, key, &c_str, 1);               break;
        case 9:  gguf_set_arr_data(meta, key, GGUF_TYPE_UINT8, value.data(), value.size()); break;
        default: gguf_set_val_str (meta, key, c_str);                   break;
    }
}

static std::vector<uint8_t> tensors; // data of the model, behind its metadata

static gguf_context_ptr read_meta() {
    gguf_init_params params = { /*.no_alloc =*/ true, /*.ctx =*/ nullptr };
    return gguf_context_ptr(gguf_init_from_file(fuzz_model_path("llama").c_str(), params));
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t * data, size_t size) {
    if (size < 2) {
        return -1;
    }
    const std::string text((const char *) data + 2, size - 2);
    const size_t      end = text.find('\n');
    const std::string key = text.substr(0, end);
    const std::string val = end == std::string::npos ? "" : text.substr(end + 1);

    static gguf_context_ptr base = read_meta();
    static fuzz_file file;
    {
        gguf_context_ptr meta(gguf_init_empty());
        gguf_set_kv(meta.get(), base.get());
        add(meta.get(), "kvq.key", data[0] % 16, key);
        add(meta.get(), "kvq.val", data[0] / 16, val);
        ggml_context * ctx_raw = nullptr;
        gguf_init_params params = { /*.no_alloc =*/ true, /*.ctx =*/ &ctx_raw };
        gguf_context_ptr whole(gguf_init_from_file(fuzz_model_path("llama").c_str(), params));
        ggml_context_ptr ctx(ctx_raw);
        for (ggml_tensor * t = ggml_get_first_tensor(ctx.get()); t; t = ggml_get_next_tensor(ctx.get(), t)) {
            gguf_add_tensor(meta.get(), t);
        }
        std::vector<uint8_t> bytes(gguf_get_meta_size(meta.get()));
        gguf_get_meta_data(meta.get(), bytes.data());
        bytes.insert(bytes.end(), tensors.begin(), tensors.end());
        file.write(bytes.data(), bytes.size());
    }

    llama_model_params mp = llama_model_default_params();
    mp.load_mode = LLAMA_LOAD_MODE_NONE;
    llama_model_kv_override overrides[2] = {};
    if (data[1] & 1) {
        snprintf(overrides[0].key, sizeof(overrides[0].key), "kvq.key");
        overrides[0].tag = LLAMA_KV_OVERRIDE_TYPE_STR;
        snprintf(overrides[0].val_str, sizeof(overrides[0].val_str), "%s", key.c_str());
        mp.kv_overrides = overrides;
    }
    llama_model * model = llama_model_load_from_file(file.path(), mp);
    FUZZ_CHECK(model, "the model does not load");
    if (data[1] & 2) {
        const bool ok = kvq_model_set_policy(model, key.c_str(), val.c_str());
        FUZZ_CHECK(ok == !*kvq_last_error(), "the reason '%s' does not go with %d", kvq_last_error(), ok);
    }

    llama_context_params cp = llama_context_default_params();
    cp.n_ctx           = 64;
    cp.n_batch         = 32;
    cp.n_ubatch        = 32;
    cp.n_threads       = 1;
    cp.n_threads_batch = 1;
    llama_context * ctx = llama_init_from_model(model, cp);
    if (!ctx) {
        FUZZ_CHECK(strstr(kvq_last_error(), "kvq.key") || strstr(kvq_last_error(), "kvq.val"), "refused without naming the key: '%s'",
            kvq_last_error());
        cp.type_k = kvq_type_from_spec("8");
        cp.type_v = kvq_type_from_spec("4");
        ctx = llama_init_from_model(model, cp);
        FUZZ_CHECK(ctx, "an explicit type is refused: %s", kvq_last_error());
    }
    for (int32_t i = 0; i < kvq_n_layer(ctx); i++) {
        kvq_layer layer;
        FUZZ_CHECK(kvq_get_layer(ctx, i, &layer), "no layer %d", i);
    }
    llama_token token = 1;
    FUZZ_CHECK(llama_decode(ctx, llama_batch_get_one(&token, 1)) == 0, "the context does not decode");
    llama_free(ctx);
    llama_model_free(model);
    return 0;
}

extern "C" int LLVMFuzzerInitialize(int *, char ***) {
    fuzz_silence();
    llama_backend_init();
    if (getenv("KVSPLIT_FUZZ_SEEDS")) {
        int n = 0;
        for (const char * text : { "8\n4", "kvq4,:1=8\n16", "6,-1=8\nq4_0", "9\n", "8,5=4\n8" }) {
            for (const uint8_t kinds : { 0xff, 0x3f, 0xf8 }) {
                std::vector<uint8_t> seed(text, text + strlen(text));
                seed.insert(seed.begin(), { kinds, uint8_t(n % 4) });
                fuzz_write_seed("metadata-" + std::to_string(n++), seed);
            }
        }
        _exit(0); // what is held to the end is no leak
    }

    gguf_context_ptr meta = read_meta();
    FUZZ_CHECK(meta, "no model");
    tensors = fuzz_read(fuzz_model_path("llama"));
    tensors.erase(tensors.begin(), tensors.begin() + gguf_get_data_offset(meta.get()));
    return 0;
}
