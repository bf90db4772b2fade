// SPDX-License-Identifier: MIT
//
// Saved states: usage: test-kvq-state MODEL FOLDER [POLICY_K POLICY_V]...
//
//   equal     a state goes on as the original: bytes of rows are copied, so the same logits bit for bit
//   identity  a state of other types or another rotation is refused with the reason; a state as upstream
//             writes it is taken where the default rotation is in use, and refused where it isn't
//   nothing   after a refusal nothing of the state is left, other sequences are as they were
//   hostile   truncated, oversized, negative, repeated and made-up contents are refused
//   files     a file that can't be written whole leaves the old one as it was
//   device    a state kept in buffers of the device is the whole state
//
// The layout that is picked apart here is written down in llama-ext/kvq-state.h and is read by code of its own.

#include "kvq.h"
#include "llama.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#ifndef _WIN32
#include <csignal>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>
#endif

namespace fs = std::filesystem;

using bytes  = std::vector<uint8_t>;
using logits = std::vector<float>;

static int n_failed  = 0;
static int n_passed  = 0;
static int n_refused = 0; // hostile states
static int n_vocab   = 0;

static const int N_PROMPT = 24;

static void check(bool ok, const std::string & what) {
    (ok ? n_passed : n_failed)++;
    if (!ok) {
        printf("FAIL %s\n", what.c_str());
    }
}

static bool says(const std::string & part) {
    const std::string why = kvq_last_logged();
    if (why.find(part) == std::string::npos) {
        printf("  no \"%s\" in \"%s\"\n", part.c_str(), why.c_str());
        return false;
    }
    return true;
}

static void rotation(bool on) {
#ifdef _WIN32
    _putenv_s("LLAMA_ATTN_ROT_DISABLE", on ? "" : "1");
#else
    on ? unsetenv("LLAMA_ATTN_ROT_DISABLE") : setenv("LLAMA_ATTN_ROT_DISABLE", "1", 1);
#endif
}

struct context {
    llama_context * ctx;

    context(llama_model * model, const std::string & k, const std::string & v, bool unified = true, bool fa = true) {
        llama_context_params params = llama_context_default_params();
        params.n_ctx           = 256;
        params.n_batch         = 64;
        params.n_seq_max       = 2;
        params.kv_unified      = unified;
        params.n_threads       = 1;
        params.n_threads_batch = 1;
        params.no_perf         = true;
        params.type_k = kvq_type_from_spec(k.c_str());
        params.type_v = kvq_type_from_spec(v.c_str());
        params.flash_attn_type = fa ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
        ctx = llama_init_from_model(model, params);
        if (!ctx) {
            printf("FAIL no context for K %s V %s: %s\n", k.c_str(), v.c_str(), kvq_last_error());
            exit(1);
        }
    }
    context(const context &) = delete;
    ~context() { llama_free(ctx); }

    llama_pos last(llama_seq_id seq) const { return llama_memory_seq_pos_max(llama_get_memory(ctx), seq); }

    // logits behind the last of n tokens at positions pos, pos + 1, ...; tokens depend on first
    logits decode(int n, llama_pos pos, llama_seq_id seq, int first) const {
        llama_batch batch = llama_batch_init(n, 0, 1);
        for (int i = 0; i < n; i++) {
            batch.token   [i]    = (first + 7*i) % n_vocab;
            batch.pos     [i]    = pos + i;
            batch.n_seq_id[i]    = 1;
            batch.seq_id  [i][0] = seq;
            batch.logits  [i]    = i == n - 1;
        }
        batch.n_tokens = n;
        const int rc = llama_decode(ctx, batch);
        llama_batch_free(batch);
        if (rc != 0) {
            return {};
        }
        const float * data = llama_get_logits_ith(ctx, -1);
        return logits(data, data + n_vocab);
    }

    // a token on an empty sequence: the context still works
    bool works(llama_seq_id seq) const {
        const bool ok = last(seq) == -1 && !decode(1, 0, seq, 3).empty();
        llama_memory_seq_rm(llama_get_memory(ctx), seq, -1, -1);
        return ok;
    }
};

static bytes whole(llama_context * ctx) {
    bytes res(llama_state_get_size(ctx));
    res.resize(llama_state_get_data(ctx, res.data(), res.size()));
    return res;
}

static bytes one(llama_context * ctx, llama_seq_id seq, llama_state_seq_flags flags = 0) {
    bytes res(llama_state_seq_get_size_ext(ctx, seq, flags));
    res.resize(llama_state_seq_get_data_ext(ctx, res.data(), res.size(), seq, flags));
    return res;
}

static bool set(llama_context * ctx, const bytes & state) {
    return llama_state_set_data(ctx, state.data(), state.size()) == state.size();
}

static bool set(llama_context * ctx, const bytes & state, llama_seq_id seq, llama_state_seq_flags flags = 0) {
    return llama_state_seq_set_data_ext(ctx, state.data(), state.size(), seq, flags) == state.size();
}

static bytes slurp(const fs::path & path) {
    std::ifstream f(path, std::ios::binary);
    return bytes(std::istreambuf_iterator<char>(f), {});
}

static uint32_t u32(const bytes & b, size_t at) {
    uint32_t res;
    memcpy(&res, b.data() + at, sizeof(res));
    return res;
}

static bytes with(bytes b, size_t at, uint32_t value) {
    memcpy(b.data() + at, &value, sizeof(value));
    return b;
}

// offsets in a whole state of the first stream with cells
struct layout {
    size_t n_stream;
    size_t n_cell;
    size_t cell;    // position of the first cell, then how many sequences, then which
    size_t n_layer;
    size_t record;  // behind n_layer
};

static layout pick_apart(const bytes & state) {
    layout res;
    res.n_stream = 4 + u32(state, 0); // behind the name of the architecture
    res.n_cell   = res.n_stream + 4;
    res.cell     = res.n_cell + 4;
    res.n_layer  = res.cell + 12*size_t(u32(state, res.n_cell)) + 4; // each cell is one sequence's; then v_trans
    res.record   = res.n_layer + 4;
    return res;
}

static const uint32_t MARK = 1u << 31;

// The state as a llama.cpp without kvq writes it: records taken out, wherever they stand.
static bytes as_upstream(const bytes & state) {
    bytes res;
    for (size_t at = 0; at < state.size(); ) {
        // a mark is followed by version 1 and the same number of layers
        if (at + 12 <= state.size() && (u32(state, at) & MARK) && u32(state, at + 4) == 1 && u32(state, at + 8) == (u32(state, at) & ~MARK) &&
                u32(state, at + 8) < 64) {
            const uint32_t n = u32(state, at + 8);
            const bytes plain = with(bytes(4), 0, n);
            res.insert(res.end(), plain.begin(), plain.end());
            at += 12 + 20*size_t(n);
        } else {
            res.push_back(state[at++]);
        }
    }
    return res;
}

int main(int argc, char ** argv) {
    if (argc < 3 || argc % 2 != 1) {
        fprintf(stderr, "usage: %s MODEL FOLDER [POLICY_K POLICY_V]...\n", argv[0]);
        return 2;
    }
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    llama_backend_init();
    rotation(true);

    llama_model * model = llama_model_load_from_file(argv[1], llama_model_default_params());
    if (!model) {
        fprintf(stderr, "can't load %s\n", argv[1]);
        return 2;
    }
    n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
    const fs::path folder = argv[2];

    std::vector<std::pair<std::string, std::string>> policies;
    for (int i = 3; i + 1 < argc; i += 2) {
        policies.emplace_back(argv[i], argv[i + 1]);
    }

    // ---- a state goes on as the original, and only in a context that means the same by it

    for (const auto & [k, v] : policies) {
        const std::string name = "K " + k + " V " + v + ": ";

        context a(model, k, v);
        a.decode(N_PROMPT, 0, 0, 1);
        a.decode(N_PROMPT, 0, 1, 11);

        const bytes  state = whole(a.ctx);
        const bytes  seq   = one(a.ctx, 0);
        const auto   path  = (folder / "state.bin").u8string();
        const auto   slot  = (folder / "slot.bin").u8string();
        const llama_token tokens[3] = { 1, 2, 3 };
        check(llama_state_save_file(a.ctx, path.c_str(), tokens, 3), name + "file saved");
        check(llama_state_seq_save_file(a.ctx, slot.c_str(), 0, tokens, 3) == fs::file_size(slot), name + "slot saved");

        kvq_layer layer;
        kvq_get_layer(a.ctx, 0, &layer);
        bool quantized = false;
        bool rotated   = false;
        for (int i = 0; kvq_get_layer(a.ctx, i, &layer); i++) {
            quantized = quantized || ggml_is_quantized(layer.type_k) || ggml_is_quantized(layer.type_v);
            rotated   = rotated   || layer.rot_k || layer.rot_v;
        }
        const layout at = pick_apart(state);
        // a sequence of its own in an empty cache: cells are where a restored sequence has them
        context alone(model, k, v);
        alone.decode(N_PROMPT, 0, 0, 1);
        const logits want_seq = alone.decode(1, N_PROMPT, 0, 5);
        const auto clear = [](const context & c) { llama_memory_clear(llama_get_memory(c.ctx), true); };

        check((u32(state, at.n_layer) & MARK) == (quantized ? MARK : 0), name + "a mark where, and only where, something is quantized");

        const logits want = a.decode(1, N_PROMPT, 0, 5);
        llama_token  read[8];
        size_t       n_read = 0;

        context b(model, k, v);
        check(set(b.ctx, state)  && b.decode(1, N_PROMPT, 0, 5) == want, name + "state goes on as the original");
        clear(b);
        check(set(b.ctx, seq, 1) && b.decode(1, N_PROMPT, 1, 5) == want_seq, name + "sequence goes on as the original");
        check(llama_state_load_file(b.ctx, path.c_str(), read, 8, &n_read) && n_read == 3 && read[2] == 3 &&
            b.decode(1, N_PROMPT, 0, 5) == want, name + "file goes on as the original");
        clear(b);
        check(llama_state_seq_load_file(b.ctx, slot.c_str(), 1, read, 8, &n_read) == fs::file_size(slot) && n_read == 3 &&
            b.decode(1, N_PROMPT, 1, 5) == want_seq, name + "slot goes on as the original");

        // as upstream writes it
        const bytes old = as_upstream(state);
        check(quantized == (old.size() < state.size()), name + "the record was found");
        check(set(b.ctx, old) && b.decode(1, N_PROMPT, 0, 5) == want, name + "a state of upstream's goes on as the original");

        // rotation off, then on again
        rotation(false);
        {
            context c(model, k, v);
            check(set(c.ctx, state) == !rotated, name + "rotated rows in a context without rotation");
            check(!rotated || (says("rotated by") && says("not rotated") && says("LLAMA_ATTN_ROT_DISABLE")), name + "reason: rotation");
            check(!rotated || (c.works(0) && c.works(1)), name + "nothing is left of it");
            check(set(c.ctx, old) == !rotated, name + "upstream's rows in a context without rotation");
            check(!rotated || says("doesn't say whether its rows are rotated"), name + "reason: not recorded");

            clear(c);
            c.decode(N_PROMPT, 0, 0, 1);
            c.decode(N_PROMPT, 0, 1, 11);
            const bytes off = whole(c.ctx);
            rotation(true);
            context d(model, k, v);
            check(set(d.ctx, off) == !rotated, name + "rows that are not rotated in a context with rotation");
            check(!rotated || says("LLAMA_ATTN_ROT_DISABLE"), name + "reason: rotation, the other way");
            context e(model, k, v);
            check(set(e.ctx, state) && e.decode(1, N_PROMPT, 0, 5) == want, name + "and on again");
        }

        // other types: every other policy here
        for (const auto & [k2, v2] : policies) {
            if (k2 == k && v2 == v) {
                continue;
            }
            context c(model, k2, v2);
            c.decode(N_PROMPT, 0, 1, 11);
            const logits other = c.decode(1, N_PROMPT, 1, 9);
            llama_memory_seq_rm(llama_get_memory(c.ctx), 1, N_PROMPT, -1);

            const std::string to = name + "into K " + k2 + " V " + v2 + ": ";
            check(!set(c.ctx, seq, 0), to + "sequence refused");
            check(says("was saved with "), to + "reason");
            check(c.last(0) == -1 && c.decode(1, N_PROMPT, 1, 9) == other, to + "the other sequence is as it was");
            check(llama_state_seq_load_file(c.ctx, slot.c_str(), 0, read, 8, &n_read) == 0 && c.last(0) == -1, to + "slot refused");
            check(!llama_state_load_file(c.ctx, path.c_str(), read, 8, &n_read) && c.works(0) && c.works(1), to + "file refused");
            check(says("failed to restore kv cache: "), to + "reason of the file");
        }

        // values in columns: without flash attention
        if (v == "f16") {
            context c(model, k, v, true, false);
            check(!set(c.ctx, state) && says("-fa on") && c.works(0), name + "refused without flash attention, with the reason");
        }

        // streams of their own
        {
            context c(model, k, v, false);
            check(!set(c.ctx, state) && says("streams") && c.works(0), name + "refused by a cache of several streams");
        }

        // ---- contents that no context writes

        context c(model, k, v);
        const auto refused = [&](const bytes & bad, const std::string & what) {
            const bool ok = !set(c.ctx, bad) && *kvq_last_logged() && c.works(0) && c.works(1);
            n_refused += ok;
            check(ok, name + "refused: " + what);
        };
        refused(with(state, 0, 0xffffffffu),             "a name of 4 GiB");
        refused(with(state, at.n_stream, 7),             "another number of streams");
        refused(with(state, at.n_cell, 0x7fffffffu),     "more cells than there are");
        refused(with(state, at.cell, uint32_t(-2)),      "a negative position");
        refused(with(state, at.cell, 0x7fffffffu),       "the largest position");
        refused(with(state, at.cell + 4, 0),             "a cell of no sequence");
        refused(with(state, at.cell + 4, 0xffffffffu),   "a cell of 2^32 sequences");
        refused(with(state, at.cell + 8, 2),             "a sequence that there isn't");
        refused(with(state, at.cell + 8, uint32_t(-1)),  "a negative sequence");
        refused(with(state, at.n_layer - 4, 1),          "values in columns");
        refused(with(state, at.n_layer, 3000),           "another number of layers");
        if (quantized) {
            refused(with(state, at.record,      2),            "a record of a later version");
            refused(with(state, at.record + 4,  0xffffffffu),  "2^32 layers in the record");
            refused(with(state, at.record + 8,  99),           "another layer");
            refused(with(state, at.record + 12, 0x7fffffffu),  "a type that there isn't");
            refused(with(state, at.record + 12, uint32_t(-5)), "a negative type");
            refused(with(state, at.record + 20, 77),           "another rotation");
        } else {
            refused(with(state, at.record, 450), "another type");
        }
        // a scale, or a value, that is no number: of a row of the first layer's keys
        const size_t row = at.record + (quantized ? 8 + 20*size_t(u32(state, at.n_layer) & ~MARK) : 0) + 12;
        refused(with(state, row, 0x7e007e00u), "a NaN among the keys");
        refused(with(state, row, 0xfc00fc00u), "an infinity among the keys");
        // everything before the rows byte by byte, then some
        for (size_t n = 1; n < state.size(); n += n < at.record + 64 ? 1 : 1 + state.size()/97) {
            refused(bytes(state.begin(), state.begin() + n), "the first " + std::to_string(n) + " bytes");
        }
        check(set(c.ctx, state) && c.decode(1, N_PROMPT, 0, 5) == want, name + "and the whole state after all that");

        // files that were cut
        const bytes session = slurp(path);
        const bytes saved   = slurp(slot);
        const auto write = [&](const bytes & data, size_t n) {
            const auto cut = (folder / "cut.bin").u8string();
            std::ofstream(cut, std::ios::binary).write((const char *) data.data(), n);
            return cut;
        };
        clear(c); // what can't be opened or isn't begun changes nothing
        for (size_t n = 0; n < session.size(); n += n < 64 ? 7 : 1 + session.size()/23) {
            const auto cut = write(session, n);
            check(!llama_state_load_file(c.ctx, cut.c_str(), read, 8, &n_read) && c.works(0) && c.works(1), name + "a file of " + std::to_string(n) + " bytes");
            n_refused++;
        }
        check(!llama_state_load_file(c.ctx, write(session, session.size() - 1).c_str(), read, 8, &n_read) && c.works(0), name + "a file but for its last byte");
        for (size_t n = 0; n < saved.size(); n += n < 64 ? 7 : 1 + saved.size()/23) {
            const auto cut = write(saved, n);
            check(llama_state_seq_load_file(c.ctx, cut.c_str(), 0, read, 8, &n_read) == 0 && c.works(0) && c.works(1), name + "a slot of " + std::to_string(n) + " bytes");
            n_refused++;
        }
        check(llama_state_seq_load_file(c.ctx, write(saved, saved.size() - 1).c_str(), 0, read, 8, &n_read) == 0 && c.works(0), name + "a slot but for its last byte");
        bytes more = saved;
        more.push_back(0);
        check(llama_state_seq_load_file(c.ctx, write(more, more.size()).c_str(), 0, read, 8, &n_read) == 0 && c.works(0), name + "a slot with something behind it");

        bytes longer = session;
        longer.push_back(0);
        std::ofstream(folder / "longer.bin", std::ios::binary).write((const char *) longer.data(), longer.size());
        check(!llama_state_load_file(c.ctx, (folder / "longer.bin").u8string().c_str(), read, 8, &n_read) && c.works(0) && c.works(1),
            name + "a file with something behind its state is refused");

        // ---- a part, which a server puts aside by itself, may be what it is: refusing it would end the server

        c.decode(N_PROMPT, 0, 0, 1);
        const auto with_nan = [&](const bytes & of) { // among the first layer's keys
            const size_t   layer = 8 + 8 + 12*size_t(u32(of, 12)) + 4; // magic and sequence; streams and cells; v_trans
            const uint32_t n     = u32(of, layer);
            return with(of, layer + 4 + (n & MARK ? 8 + 20*size_t(n & ~MARK) : 0) + 12, 0x7e007e00u);
        };
        const bytes all  = with_nan(one(c.ctx, 0));
        const bytes part = with_nan(one(c.ctx, 0, LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY));
        check(!set(c.ctx, all, 0) && says("no number"), name + "a NaN in a sequence is refused");
        check(set(c.ctx, part, 0, LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY), name + "a NaN in a part is put back");
        clear(c);

        // ---- kept on the device

        context d(model, k, v);
        d.decode(N_PROMPT, 0, 0, 1);
        const bytes kept = one(d.ctx, 0, LLAMA_STATE_SEQ_FLAGS_ON_DEVICE);
        clear(d);
        check(set(d.ctx, kept, 1, LLAMA_STATE_SEQ_FLAGS_ON_DEVICE) && d.decode(1, N_PROMPT, 1, 5) == want_seq,
            name + "a sequence kept on the device goes on as the original");
    }

    // ---- files

    {
        context a(model, "q8_0", "q4_0");
        a.decode(N_PROMPT, 0, 0, 1);
        const auto path = folder / "kept.bin";
        const std::string old = "what was there";
        std::ofstream(path) << old;
        const auto intact = [&] {
            size_t n = 0;
            for (const auto & e : fs::directory_iterator(folder)) {
                n += e.path().filename().u8string().find(".kvq-") == 0;
            }
            const bytes is = slurp(path);
            return n == 0 && std::string(is.begin(), is.end()) == old;
        };
        const llama_token token = 1;
#ifndef _WIN32
        // a limit on a file's size fails in write() as a full disk does, part way
        signal(SIGXFSZ, SIG_IGN);
        struct rlimit was;
        getrlimit(RLIMIT_FSIZE, &was);
        for (const rlim_t limit : { rlim_t(0), rlim_t(10), rlim_t(4096), rlim_t(one(a.ctx, 0).size() - 1) }) {
            struct rlimit small = was;
            small.rlim_cur = limit;
            setrlimit(RLIMIT_FSIZE, &small);
            const bool saved = llama_state_save_file(a.ctx, path.u8string().c_str(), &token, 1);
            const bool slot  = llama_state_seq_save_file(a.ctx, path.u8string().c_str(), 0, &token, 1) != 0;
            setrlimit(RLIMIT_FSIZE, &was);
            check(!saved && !slot && intact(), "no room behind " + std::to_string(limit) + " bytes: the old file is as it was");
            check(std::string(kvq_last_logged()).find("File too large") != std::string::npos, "and the reason is said");
        }
        if (fs::exists("/dev/full")) {
            check(!llama_state_save_file(a.ctx, "/dev/full", &token, 1) && says("No space left"), "a device is written to directly, and its error seen");
            check(fs::is_character_file("/dev/full"), "and stays a device");
        }
        check(!llama_state_save_file(a.ctx, (folder / "no" / "such").u8string().c_str(), &token, 1) && says("No such file"), "a folder that isn't there");
        check(!llama_state_save_file(a.ctx, folder.u8string().c_str(), &token, 1), "a folder is no file");
        fs::create_directory(folder / "closed");
        std::ofstream(folder / "closed" / "open.bin") << old;
        chmod((folder / "closed").c_str(), 0555);
        if (access((folder / "closed").c_str(), W_OK) != 0) { // root may write anywhere
            check(llama_state_save_file(a.ctx, (folder / "closed" / "open.bin").u8string().c_str(), &token, 1), "a file in a folder that can't be added to");
            chmod(path.c_str(), 0444);
            check(!llama_state_save_file(a.ctx, path.u8string().c_str(), &token, 1) && says("Permission denied") && intact(), "a protected file");
            printf("modes were tried\n");
        }
        chmod((folder / "closed").c_str(), 0755);
        chmod(path.c_str(), 0600);
        fs::create_symlink(path.filename(), folder / "link.bin");
        check(llama_state_save_file(a.ctx, (folder / "link.bin").u8string().c_str(), &token, 1), "through a link");
        check(fs::is_symlink(folder / "link.bin") && fs::file_size(path) > 1000, "the link stays, what it names is new");
        fs::create_hard_link(path, folder / "second.bin");
        std::ofstream(path) << old;
        check(llama_state_save_file(a.ctx, path.u8string().c_str(), &token, 1) && fs::file_size(folder / "second.bin") > 1000,
            "all names of a file have the new one");
        fs::remove(folder / "second.bin");
        if (geteuid() == 0 && chown(path.c_str(), 4321, 4321) == 0) {
            struct stat is;
            check(llama_state_save_file(a.ctx, path.u8string().c_str(), &token, 1) && stat(path.c_str(), &is) == 0 && is.st_uid == 4321 && is.st_gid == 4321,
                "an owner stays");
        }
        fs::create_symlink("made.bin", folder / "dangling.bin");
        check(llama_state_save_file(a.ctx, (folder / "dangling.bin").u8string().c_str(), &token, 1), "through a link to nothing");
        check(fs::is_symlink(folder / "dangling.bin") && fs::file_size(folder / "made.bin") > 1000, "makes what it names");
        check(fs::status(path).permissions() == (fs::perms::owner_read | fs::perms::owner_write), "permissions stay");
#else
        check(llama_state_save_file(a.ctx, path.u8string().c_str(), &token, 1) && !intact(), "saved over an old file");
#endif
        const auto wide = folder / fs::u8path("z\xc3\xbcge \xe2\x82\xac.bin");
        llama_token t;
        size_t n;
        check(llama_state_save_file(a.ctx, wide.u8string().c_str(), &token, 1) && llama_state_load_file(a.ctx, wide.u8string().c_str(), &t, 1, &n),
            "a name that isn't ASCII");
    }

    llama_model_free(model);
    printf("test-kvq-state: %d passed, %d failed; %d hostile states refused\n", n_passed, n_failed, n_refused);
    return n_failed != 0;
}
