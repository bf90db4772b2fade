// SPDX-License-Identifier: MIT
//
// Saved states: four ways in, seven caches. The first byte of an input chooses the cache, the second what is done
// after the load, the rest is what is loaded.
//
//     KVSPLIT_FUZZ_ENTRY  0 fuzz-session   llama_state_load_file
//                         1 fuzz-slot      llama_state_seq_load_file
//                         2 fuzz-state     llama_state_set_data
//                         3 fuzz-sequence  llama_state_seq_set_data_ext
//
// What must hold, besides no fault of memory: a refused load leaves the other sequences as they were or the context
// empty; whatever was loaded, the context still decodes, saves and shifts; and once it is emptied, it computes the
// logits of a fresh context, bit for bit.

#include "fuzz-common.h"

#include "kvq.h"

#include <algorithm>
#include <climits>
#include <cmath>

static const size_t N_HEAD = 2; // bytes of an input before what is loaded

static const llama_seq_id LOADED = 0; // sequence that slots and sequences are loaded into
static const llama_seq_id OTHER  = 1; // one that they must not touch

struct cache_desc {
    const char * name;
    const char * model;
    const char * key;
    const char * val;
    bool         fa;
    uint32_t     n_seq_max;
    bool         unified;
};

static const cache_desc CACHES[] = {
    { "plain",      "llama",  "8",      "4",       true,  1, true  },
    { "unified",    "llama",  "6",      "3",       true,  3, true  },
    { "streams",    "llama",  "8",      "4",       true,  2, false },
    { "layers",     "llama",  "8,1=6",  "4,0=16",  true,  2, true  },
    { "transposed", "llama",  "16",     "16",      false, 2, true  },
    { "window",     "gemma3", "8",      "4",       true,  2, true  },
    { "recurrent",  "mamba",  "16",     "16",      true,  2, true  },
    { "hybrid",     "lfm2",   "8",      "4",       true,  2, true  },
};

static const size_t N_CACHES = sizeof(CACHES)/sizeof(CACHES[0]);

static const std::vector<llama_token> PROMPT = { 3, 14, 15, 9, 2 };

class fuzz_cache {
public:
    explicit fuzz_cache(const cache_desc & desc) : desc(desc) {
        model = fuzz_model(fuzz_model_path(desc.model).c_str());
        FUZZ_CHECK(model, "no model %s", desc.model);
        llama_context_params params = llama_context_default_params();
        params.n_ctx           = 64*desc.n_seq_max;
        params.n_batch         = 32;
        params.n_ubatch        = 32;
        params.n_seq_max       = desc.n_seq_max;
        params.n_threads       = 1;
        params.n_threads_batch = 1;
        params.kv_unified      = desc.unified;
        params.flash_attn_type = desc.fa ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
        params.type_k          = kvq_type_from_spec(desc.key);
        params.type_v          = kvq_type_from_spec(desc.val);
        if (std::string(desc.model) == "mamba") {
            params.type_k = GGML_TYPE_F16;
            params.type_v = GGML_TYPE_F16;
        }
        ctx = llama_init_from_model(model, params);
        FUZZ_CHECK(ctx, "no context for %s: %s", desc.name, kvq_last_error());
        mem = llama_get_memory(ctx);
        expect = fresh();
    }

    // The same positions of each sequence that has tokens. false if the context says that it can't.
    bool decode(const std::vector<std::vector<llama_token>> & tokens, llama_pos pos) {
        llama_batch batch = llama_batch_init(32, 0, 1);
        for (size_t seq = 0; seq < tokens.size(); seq++) {
            for (size_t i = 0; i < tokens[seq].size(); i++) {
                const int32_t at = batch.n_tokens++;
                batch.token   [at]    = tokens[seq][i];
                batch.pos     [at]    = pos + llama_pos(i);
                batch.n_seq_id[at]    = 1;
                batch.seq_id  [at][0] = llama_seq_id(seq);
                batch.logits  [at]    = i + 1 == tokens[seq].size();
            }
        }
        const bool res = llama_decode(ctx, batch) == 0;
        llama_batch_free(batch);
        return res;
    }

    std::vector<float> logits() const {
        const float * res = llama_get_logits_ith(ctx, -1);
        return std::vector<float>(res, res + llama_vocab_n_tokens(llama_model_get_vocab(model)));
    }

    // what an emptied context makes of the prompt
    std::vector<float> fresh() {
        llama_memory_clear(mem, true);
        FUZZ_CHECK(decode({ PROMPT }, 0), "%s: the emptied context does not decode", desc.name);
        return logits();
    }

    const cache_desc & desc;
    llama_model *      model;
    llama_context *    ctx;
    llama_memory_t     mem;
    std::vector<float> expect;
};

static fuzz_cache & cache(size_t i) {
    static fuzz_cache * all[N_CACHES]; // until the process ends
    if (!all[i]) {
        all[i] = new fuzz_cache(CACHES[i]);
    }
    return *all[i];
}

// two sequences, the second one of which no slot or sequence may touch
static void fill(fuzz_cache & c) {
    llama_memory_clear(c.mem, true);
    std::vector<std::vector<llama_token>> tokens = { { 1, 2, 3 }, { 4, 5, 6 } };
    tokens.resize(std::min<size_t>(c.desc.n_seq_max, 2));
    FUZZ_CHECK(c.decode(tokens, 0), "%s does not decode", c.desc.name);
}

static const bool WHOLE = KVSPLIT_FUZZ_ENTRY == 0 || KVSPLIT_FUZZ_ENTRY == 2;

// what the entry's counterpart writes
static std::vector<uint8_t> save(fuzz_cache & c) {
    const std::vector<llama_token> tokens = { 1, 2, 3 };
    const char * path = "saved.bin"; // a saved file needs a name in a folder
    std::vector<uint8_t> res;
    (void) path;
#if KVSPLIT_FUZZ_ENTRY == 0
    FUZZ_CHECK(llama_state_save_file(c.ctx, path, tokens.data(), tokens.size()), "%s is not saved", c.desc.name);
    res = fuzz_read(path);
#elif KVSPLIT_FUZZ_ENTRY == 1
    FUZZ_CHECK(llama_state_seq_save_file(c.ctx, path, LOADED, tokens.data(), tokens.size()), "%s is not saved", c.desc.name);
    res = fuzz_read(path);
#elif KVSPLIT_FUZZ_ENTRY == 2
    res.resize(llama_state_get_size(c.ctx));
    FUZZ_CHECK(llama_state_get_data(c.ctx, res.data(), res.size()) == res.size(), "%s is not saved", c.desc.name);
#else
    res.resize(llama_state_seq_get_size(c.ctx, LOADED));
    FUZZ_CHECK(llama_state_seq_get_data(c.ctx, res.data(), res.size(), LOADED) == res.size(), "%s is not saved", c.desc.name);
#endif
    return res;
}

static bool load(fuzz_cache & c, const uint8_t * data, size_t size, int mode) {
    std::vector<llama_token> tokens(8);
    size_t n_tokens = 0;
    (void) mode;
    static fuzz_file file;
#if KVSPLIT_FUZZ_ENTRY == 0
    file.write(data, size);
    const bool res = llama_state_load_file(c.ctx, file.path(), tokens.data(), tokens.size(), &n_tokens);
#elif KVSPLIT_FUZZ_ENTRY == 1
    file.write(data, size);
    const bool res = llama_state_seq_load_file(c.ctx, file.path(), LOADED, tokens.data(), tokens.size(), &n_tokens) > 0;
#elif KVSPLIT_FUZZ_ENTRY == 2
    const bool res = llama_state_set_data(c.ctx, data, size) > 0;
#else
    // a part of a state is what a sliding window or a recurrent layer needs beside the rest, which must be there
    const llama_state_seq_flags flags = mode & 0x80 ? LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY : LLAMA_STATE_SEQ_FLAGS_NONE;
    const bool res = llama_state_seq_set_data_ext(c.ctx, data, size, LOADED, flags) > 0;
#endif
    FUZZ_CHECK(!res || n_tokens <= tokens.size(), "%zu tokens in room for %zu", n_tokens, tokens.size());
    return res;
}

static std::vector<llama_pos> last_positions(fuzz_cache & c) {
    std::vector<llama_pos> res;
    for (llama_seq_id seq = 0; seq < llama_seq_id(c.desc.n_seq_max); seq++) {
        res.push_back(llama_memory_seq_pos_max(c.mem, seq));
    }
    return res;
}

// far from where a position plus one can't be said
static bool can_follow(llama_pos pos) {
    return pos >= -1 && pos < INT_MAX/2;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t * data, size_t size) {
    if (size < N_HEAD) {
        return -1;
    }
    fuzz_cache & c    = cache(data[0] % N_CACHES);
    const int    mode = data[1];

    fill(c);
    const std::vector<llama_pos> before = last_positions(c);
    const bool ok = load(c, data + N_HEAD, size - N_HEAD, mode);
    const std::vector<llama_pos> after = last_positions(c);

    for (size_t seq = 0; seq < after.size(); seq++) {
        if (!WHOLE && seq != LOADED) {
            FUZZ_CHECK(after[seq] == before[seq], "%s: sequence %zu ended at %d, now at %d", c.desc.name, seq, before[seq], after[seq]);
        } else if (!ok) {
            FUZZ_CHECK(after[seq] == before[seq] || after[seq] == -1, "%s: a refused load left sequence %zu at %d",
                c.desc.name, seq, after[seq]);
        }
        FUZZ_CHECK(after[seq] >= -1, "%s: sequence %zu ends at %d", c.desc.name, seq, after[seq]);
    }

    // what is saved again is accepted again
    if (ok && (mode & 8)) {
        const std::vector<uint8_t> again = save(c);
        if (!(mode & 0x80)) {
            FUZZ_CHECK(load(c, again.data(), again.size(), 0), "%s: what was loaded and saved is refused", c.desc.name);
        }
    }
    switch (mode % 4) {
        case 0:
            break;
        case 1:
            if (c.desc.n_seq_max > 1) {
                llama_memory_seq_cp(c.mem, LOADED, OTHER, -1, -1);
            }
            break;
        case 2:
            if (llama_memory_can_shift(c.mem) && can_follow(after[LOADED])) {
                llama_memory_seq_rm (c.mem, LOADED, 0, 1);
                llama_memory_seq_add(c.mem, LOADED, 1, -1, -1);
            }
            break;
        case 3:
            llama_memory_seq_rm(c.mem, LOADED, -1, -1);
            break;
    }

    // goes on where each sequence stands; the values may be anything
    const std::vector<llama_pos> now = last_positions(c);
    for (size_t seq = 0; seq < now.size(); seq++) {
        if (can_follow(now[seq]) && (mode & 16 || (!WHOLE && seq != LOADED))) {
            std::vector<std::vector<llama_token>> tokens(seq + 1);
            tokens[seq] = { 7 };
            const bool decoded = c.decode(tokens, now[seq] + 1);
            if (!WHOLE && seq != LOADED && mode % 4 != 1) {
                FUZZ_CHECK(decoded, "%s: sequence %zu can't go on beside a loaded one", c.desc.name, seq);
                for (const float x : c.logits()) {
                    FUZZ_CHECK(std::isfinite(x), "%s: sequence %zu is not finite beside a loaded one", c.desc.name, seq);
                }
            }
        }
    }

    FUZZ_CHECK(c.fresh() == c.expect, "%s: once emptied, the context computes something else", c.desc.name);
    return 0;
}

// Half of the changes go to fields: four bytes that are a count, a position, an id or a size.
extern "C" size_t LLVMFuzzerCustomMutator(uint8_t * data, size_t size, size_t max_size, unsigned seed) {
    const uint32_t fields[] = { 0, 1, 2, 3, 4, 5, 8, 16, 31, 32, 63, 64, 65, 127, 128, 192, 255, 256, 1u << 16, 1u << 28, 0x7fff7fff,
        0x7c007c00, 0x7e007e00, 0x7f800000, 0x7fc00000, 0x7ffffffe, 0x7fffffff, 0x80000000, 0xfffffffe, 0xffffffff };
    const auto next = [&]() { return seed = seed*1664525u + 1013904223u, seed >> 8; };
    if (size < N_HEAD + 8 || next() % 2) {
        return LLVMFuzzerMutate(data, size, max_size);
    }
    for (unsigned n = 1 + next() % 3; n > 0; n--) {
        // rows of the cache end a state: its fields are mostly in front, and between the layers
        const size_t n_fields = (size - N_HEAD)/4;
        const size_t n_front  = std::min<size_t>(n_fields, 32);
        const size_t at       = N_HEAD + 4*(next() % (next() % 4 ? n_front : n_fields)) + (next() % 8 ? 0 : 2);
        uint32_t value;
        if (at + sizeof(value) > size) {
            continue;
        }
        memcpy(&value, data + at, sizeof(value));
        switch (next() % 4) {
            case 0:  value = value + 1; break;
            case 1:  value = value - 1; break;
            default: value = fields[next() % (sizeof(fields)/sizeof(fields[0]))]; break;
        }
        memcpy(data + at, &value, sizeof(value));
    }
    if (next() % 8 == 0) {
        data[1] = uint8_t(next());
    }
    return size;
}

extern "C" int LLVMFuzzerInitialize(int *, char ***) {
    fuzz_silence();
    llama_backend_init();
    if (getenv("KVSPLIT_FUZZ_SEEDS")) {
        for (size_t i = 0; i < N_CACHES; i++) {
            fuzz_cache & c = cache(i);
            fill(c);
            const std::vector<uint8_t> state = save(c);
            for (const int mode : { 0, 1 + 8, 2 + 16, 3 + 8 + 16 }) {
                std::vector<uint8_t> seed = { uint8_t(i), uint8_t(mode) };
                seed.insert(seed.end(), state.begin(), state.end());
                fuzz_write_seed(std::string(CACHES[i].name) + "-" + std::to_string(mode), seed);
            }
        }
        _exit(0); // what is held to the end is no leak
    }
    return 0;
}
