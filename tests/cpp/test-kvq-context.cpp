// SPDX-License-Identifier: MIT
//
// What a context does with a policy: usage: test-kvq-context MODEL [POLICY_K POLICY_V]...
//
//   types    the cache's types, layer by layer, are the policy's
//   copy     a copied sequence goes on as the original would
//   state    a saved sequence goes on in another context of the same policy, and is refused by any other
//   batch    sequences in one batch get what each gets alone, with one stream and with several
//   shift    shifted keys give what f16 keys shifted the same way give, as nearly as unshifted ones do
//
// Reference for closeness is the same computation with an f16 cache; the distance is the mean KL divergence
// of the next-token distributions.

#include "kvq.h"
#include "kvq-policy.h"
#include "llama.h"

#include "ggml.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

static int n_failed = 0;
static int n_passed = 0;

static void check(bool ok, const std::string & what) {
    (ok ? n_passed : n_failed)++;
    if (!ok) {
        printf("FAIL %s\n", what.c_str());
    }
}

// one position's error is noisy: every comparison is over this many
static const int N_OUT = 16;

// Shifting quantizes the moved keys a second time: the power of their error doubles, and with it, to first
// order, the divergence, which is quadratic in the error. Twice that leaves room for one text's chance. Keys turned
// without their rotation undone give 80 to 900 times the error (tried on SmolLM2).
static const double TOL_SHIFT = 4.0;
// Other batch sizes take other matrix kernels, whose float roundings put values on other levels: at most another
// drawing of the same quantization error. Two drawings lie apart by twice the power of one; again twice that for
// chance, and what f16 itself differs by between the two batches. Another sequence's tokens give 8 nats.
static const double TOL_BATCH = 4.0;
// two f16 runs with other kernels differ by this much
static const double FLOOR = 1e-3;

using logits = std::vector<float>;

static int n_vocab = 0;

// mean over positions of the Kullback-Leibler divergence of softmax(b) from softmax(a), in nats
static double kld(const logits & a, const logits & b) {
    const int n = int(a.size())/n_vocab;
    double res = 0;
    for (int p = 0; p < n; p++) {
        const float * x[2] = { a.data() + size_t(p)*n_vocab, b.data() + size_t(p)*n_vocab };
        double log_sum[2];
        for (int k = 0; k < 2; k++) {
            const double max = *std::max_element(x[k], x[k] + n_vocab);
            double sum = 0;
            for (int i = 0; i < n_vocab; i++) {
                sum += std::exp(x[k][i] - max);
            }
            log_sum[k] = max + std::log(sum);
        }
        for (int i = 0; i < n_vocab; i++) {
            const double log_p = x[0][i] - log_sum[0];
            res += std::exp(log_p)*(log_p - (x[1][i] - log_sum[1]));
        }
    }
    return std::isfinite(res) ? res/n : INFINITY;
}

struct context {
    llama_context * ctx;

    context(llama_model * model, const std::string & k, const std::string & v, int n_seq = 1, bool unified = true) {
        llama_context_params params = llama_context_default_params();
        params.n_ctx           = 512*n_seq;
        params.n_batch         = 512;
        params.n_outputs_max   = 512;
        params.n_outputs_max_per_seq = 512;
        params.n_seq_max       = n_seq;
        params.kv_unified      = unified;
        params.n_threads       = 1; // spinning threads starve each other on a busy machine
        params.n_threads_batch = 1;
        params.no_perf         = true;
        params.type_k = kvq_type_from_spec(k.c_str());
        params.type_v = kvq_type_from_spec(v.c_str());
        params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
        ctx = llama_init_from_model(model, params);
        if (!ctx) {
            printf("FAIL no context for K %s V %s: %s\n", k.c_str(), v.c_str(), kvq_last_error());
            exit(1);
        }
    }
    context(const context &) = delete;
    ~context() { llama_free(ctx); }

    llama_memory_t mem() const { return llama_get_memory(ctx); }

    // tokens of sequence seq at positions pos, pos + 1, ...; returns the logits behind each of the last N_OUT
    logits decode(const std::vector<llama_token> & tokens, llama_pos pos, llama_seq_id seq) const {
        return decode(std::vector<std::vector<llama_token>>{ tokens }, pos, { seq })[0];
    }

    std::vector<logits> decode(const std::vector<std::vector<llama_token>> & seqs, llama_pos pos, const std::vector<llama_seq_id> & ids) const {
        llama_batch batch = llama_batch_init(512, 0, 1);
        std::vector<int> last;
        for (size_t s = 0; s < seqs.size(); s++) {
            for (size_t i = 0; i < seqs[s].size(); i++) {
                const int at = batch.n_tokens++;
                batch.token   [at]    = seqs[s][i];
                batch.pos     [at]    = pos + int(i);
                batch.n_seq_id[at]    = 1;
                batch.seq_id  [at][0] = ids[s];
                batch.logits  [at]    = i + N_OUT >= seqs[s].size();
            }
            last.push_back(batch.n_tokens - 1);
        }
        if (llama_decode(ctx, batch) != 0) {
            printf("FAIL llama_decode\n");
            exit(1);
        }
        std::vector<logits> res;
        for (const int at : last) {
            res.emplace_back();
            for (int i = at - N_OUT + 1; i <= at; i++) {
                const float * data = llama_get_logits_ith(ctx, i);
                res.back().insert(res.back().end(), data, data + n_vocab);
            }
        }
        llama_batch_free(batch);
        return res;
    }
};

// n tokens of plain prose, starting at some word: on tokens without sense a model amplifies every rounding
static std::vector<llama_token> text(int n, int start, const llama_vocab * vocab) {
    static const char prose[] =
        "The river came down from the hills in the early spring, when the snow on the upper slopes began to melt, and it "
        "carried with it branches, leaves and small stones. In the village below, people kept watch from the old bridge. "
        "They had seen the water rise before, and they knew which houses would be reached first. A farmer moved his sheep "
        "to the northern field; the baker carried flour to the loft; children counted the planks that floated past. By the "
        "evening the noise was so loud that nobody could speak in the street without shouting. Then, as quickly as it had "
        "come, the flood went down again. The next morning the fields were covered with dark mud, and the sun shone on a "
        "hundred shallow pools. The old people said that the harvest would be good that year, because the river always "
        "gives back what it takes. So they mended the fences, cleaned the wells, and planted beans along the bank. When the "
        "summer came, travellers stopped to ask why the beans grew so tall, and the children told them about the water.";
    std::vector<llama_token> res(sizeof(prose));
    res.resize(llama_tokenize(vocab, prose, sizeof(prose) - 1, res.data(), res.size(), true, false));
    if (int(res.size()) < start + n) {
        printf("FAIL the prose has %zu tokens\n", res.size());
        exit(1);
    }
    return std::vector<llama_token>(res.begin() + start, res.begin() + start + n);
}

static std::vector<uint8_t> save(llama_context * ctx, llama_seq_id seq) {
    std::vector<uint8_t> res(llama_state_seq_get_size(ctx, seq));
    res.resize(llama_state_seq_get_data(ctx, res.data(), res.size(), seq));
    return res;
}

int main(int argc, char ** argv) {
    if (argc < 2 || argc % 2 != 0) {
        fprintf(stderr, "usage: %s MODEL [POLICY_K POLICY_V]...\n", argv[0]);
        return 2;
    }
    llama_log_set([](ggml_log_level level, const char * line, void *) {
        if (level == GGML_LOG_LEVEL_ERROR && !getenv("KVQ_TEST_QUIET")) {
            fputs(line, stderr);
        }
    }, nullptr);
    llama_backend_init();

    llama_model_params mparams = llama_model_default_params();
    llama_model * model = llama_model_load_from_file(argv[1], mparams);
    if (!model) {
        fprintf(stderr, "can't load %s\n", argv[1]);
        return 2;
    }
    const llama_vocab * vocab = llama_model_get_vocab(model);
    n_vocab = llama_vocab_n_tokens(vocab);
    const int n_layer = kvq_model_n_layer(model);

    std::vector<std::pair<std::string, std::string>> policies;
    for (int i = 2; i + 1 < argc; i += 2) {
        policies.emplace_back(argv[i], argv[i + 1]);
    }

    const auto prompt = text(96, 0, vocab);
    const auto next   = text(N_OUT, 96, vocab);

    // positions 32..63 removed, the rest moved down by 32, then N_OUT tokens more
    const auto shifted = [&](const context & c) {
        c.decode(prompt, 0, 0);
        llama_memory_seq_rm (c.mem(), 0, 32, 64);
        llama_memory_seq_add(c.mem(), 0, 64, -1, -32);
        return c.decode(next, 64, 0);
    };
    // the same tokens with nothing removed
    const auto unshifted = [&](const context & c) {
        c.decode(prompt, 0, 0);
        return c.decode(next, 96, 0);
    };

    const std::vector<std::vector<llama_token>> prompts = { text(50, 20, vocab), text(50, 60, vocab), text(50, 100, vocab) };
    const std::vector<std::vector<llama_token>> nexts   = { text(N_OUT, 70, vocab), text(N_OUT, 110, vocab), text(N_OUT, 150, vocab) };
    // what sequence s gets with the cache to itself
    const auto alone = [&](const context & c, int s) {
        c.decode(prompts[s], 0, 0);
        return c.decode(nexts[s], 50, 0);
    };

    logits ref_shifted;
    logits ref_unshifted;
    std::vector<logits> ref_alone;
    {
        context c(model, "f16", "f16");
        check(llama_memory_can_shift(c.mem()), "the model's cache can't shift: nothing would be tested");
        ref_shifted = shifted(c);
    }
    {
        context c(model, "f16", "f16");
        ref_unshifted = unshifted(c);
    }
    for (int s = 0; s < 3; s++) {
        context c(model, "f16", "f16");
        ref_alone.push_back(alone(c, s));
    }
    // how far f16 itself is from alone in a batch, by stream layout and sequence
    const auto in_batch = [&](const context & c) {
        c.decode(text(40, 130, vocab), 0, 3);
        c.decode(prompts, 0, { 0, 1, 2 });
        return c.decode(nexts, 50, { 0, 1, 2 });
    };
    double f16_diff[2][3];
    for (const bool unified : { false, true }) {
        context c(model, "f16", "f16", 4, unified);
        const auto together = in_batch(c);
        for (int s = 0; s < 3; s++) {
            f16_diff[unified][s] = kld(ref_alone[s], together[s]);
            check(f16_diff[unified][s] < 0.2, "f16 in a batch differs by " + std::to_string(f16_diff[unified][s]));
        }
    }
    printf("f16: a third of the prompt removed %g, another prompt %g\n", kld(ref_unshifted, ref_shifted), kld(ref_alone[0], ref_alone[1]));

    // the report reserves graphs of its own: every kind of output must still be possible
    for (const auto pooling : { LLAMA_POOLING_TYPE_NONE, LLAMA_POOLING_TYPE_MEAN, LLAMA_POOLING_TYPE_CLS, LLAMA_POOLING_TYPE_LAST, LLAMA_POOLING_TYPE_RANK }) {
        llama_context_params params = llama_context_default_params();
        params.n_ctx        = 512;
        params.n_seq_max    = 2;
        params.embeddings   = true;
        params.pooling_type = pooling;
        llama_context * ctx = llama_init_from_model(model, params);
        check(ctx && kvq_n_layer(ctx) == n_layer, "embeddings with pooling type " + std::to_string(pooling));
        llama_free(ctx);
    }

    // a draft that uses the target's cells can't have types of its own: no small model does, so by hand
    {
        ggml_context * ctx = ggml_init({ ggml_tensor_overhead(), nullptr, true });
        const ggml_tensor * f16 = ggml_new_tensor_1d(ctx, GGML_TYPE_F16, 32);
        const auto refused = [&](ggml_type type) {
            try {
                kvq_check_shared(*model, type, 0, f16);
                return false;
            } catch (const std::exception &) {
                return true;
            }
        };
        check( refused(kvq_type_from_spec("8")),        "a draft's own type for shared cells is taken");
        check( refused(kvq_type_from_spec("16,0=8")),   "a draft's own type for a shared layer is taken");
        check(!refused(kvq_type_from_spec("16")),       "the target's type, asked for by the draft, is refused");
        check(!refused(GGML_TYPE_F16),                  "a draft that asks for nothing is refused");
        ggml_free(ctx);
    }

    for (size_t i_policy = 0; i_policy < policies.size(); i_policy++) {
        const auto & [k, v] = policies[i_policy];
        const std::string name = "K " + k + " V " + v + ": ";

        // types
        {
            context c(model, k, v);
            std::vector<ggml_type> types[2] = { std::vector<ggml_type>(n_layer), std::vector<ggml_type>(n_layer) };
            check(kvq_resolve(kvq_type_from_spec(k.c_str()), n_layer, types[0].data()), name + kvq_last_error());
            check(kvq_resolve(kvq_type_from_spec(v.c_str()), n_layer, types[1].data()), name + kvq_last_error());
            check(kvq_n_layer(c.ctx) == n_layer, name + "layers in the cache");
            for (int i = 0; i < kvq_n_layer(c.ctx) && i < n_layer; i++) {
                kvq_layer l;
                check(kvq_get_layer(c.ctx, i, &l), name + kvq_last_error());
                check(l.index == i, name + "index");
                const bool mla = l.type_v == GGML_TYPE_COUNT; // V within K's rows, which are stored as they are
                check(l.type_k == types[0][i] && (mla || l.type_v == types[1][i]), name + "layer " + std::to_string(i) + " is " + kvq_type_name(l.type_k) + "/" + kvq_type_name(l.type_v));
                check(l.bytes_k == ggml_row_size(l.type_k, int64_t(l.n_head_kv)*l.head_k)*l.n_cells, name + "bytes of K");
                check(mla || l.bytes_v == ggml_row_size(l.type_v, int64_t(l.n_head_kv)*l.head_v)*l.n_cells, name + "bytes of V");
                // rotation is for quantized rows only
                check(!l.rot_k || ggml_is_quantized(l.type_k), name + "rotated K");
                check(!l.rot_v || mla || ggml_is_quantized(l.type_v), name + "rotated V");
                check((l.rot_k != 0) == (ggml_is_quantized(l.type_k) && l.head_k % 64 == 0 && !mla), name + "rotation of K");
                check(mla || (l.rot_v != 0) == (ggml_is_quantized(l.type_v) && l.head_v % 64 == 0), name + "rotation of V");
                check(l.fused && !strcmp(l.backend_prefill, "CPU") && !strcmp(l.backend_decode, "CPU"), name + "backend");
            }
            kvq_layer l;
            check(!kvq_get_layer(c.ctx, n_layer, &l) && !kvq_get_layer(c.ctx, -1, &l), name + "a layer out of range");
        }

        // shift
        double err;
        {
            context c(model, k, v);
            err = kld(ref_unshifted, unshifted(c));
        }
        {
            context c(model, k, v);
            const double err_shifted = kld(ref_shifted, shifted(c));
            printf("%serror %g, after a shift %g\n", name.c_str(), err, err_shifted);
            check(err_shifted < TOL_SHIFT*err + FLOOR, name + "error after a shift " + std::to_string(err_shifted) + ", without " + std::to_string(err));
        }

        // copy and state
        {
            context c(model, k, v, 2, true);
            c.decode(prompt, 0, 0);
            const auto state = save(c.ctx, 0);
            llama_memory_seq_cp(c.mem(), 0, 1, -1, -1);
            llama_memory_seq_rm(c.mem(), 0, -1, -1);
            const logits copied = c.decode(next, 96, 1);

            context d(model, k, v);
            const logits kept = unshifted(d);
            // the same rows at the same places, next to nothing: the same sums
            check(kld(kept, copied) < 1e-6, name + "a copied sequence differs by " + std::to_string(kld(kept, copied)));

            context e(model, k, v);
            check(llama_state_seq_set_data(e.ctx, state.data(), state.size(), 0) == state.size(), name + "state refused by its own policy");
            const logits restored = e.decode(next, 96, 0);
            check(kld(kept, restored) < 1e-6, name + "a restored sequence differs by " + std::to_string(kld(kept, restored)));

            for (const auto & [k2, v2] : { policies[i_policy], policies[(i_policy + 1) % policies.size()] }) {
                context f(model, k2, v2);
                std::vector<ggml_type> a(2*n_layer);
                std::vector<ggml_type> b(2*n_layer);
                kvq_resolve(kvq_type_from_spec(k.c_str()),  n_layer, a.data());
                kvq_resolve(kvq_type_from_spec(v.c_str()),  n_layer, a.data() + n_layer);
                kvq_resolve(kvq_type_from_spec(k2.c_str()), n_layer, b.data());
                kvq_resolve(kvq_type_from_spec(v2.c_str()), n_layer, b.data() + n_layer);
                const bool taken = llama_state_seq_set_data(f.ctx, state.data(), state.size(), 0) != 0;
                check(taken == (a == b), name + (taken ? "state taken by" : "state refused by") + " K " + k2 + " V " + v2);
            }
        }

        // batch: three sequences in one batch, with a fourth one's tokens in the cache
        std::vector<logits> by_itself;
        for (int s = 0; s < 3; s++) {
            context d(model, k, v);
            by_itself.push_back(alone(d, s));
        }
        for (const bool unified : { true, false }) {
            context c(model, k, v, 4, unified);
            const auto together = in_batch(c);
            for (int s = 0; s < 3; s++) {
                const double err_s = kld(ref_alone[s], by_itself[s]);
                const double diff  = kld(by_itself[s], together[s]);
                check(diff < TOL_BATCH*err_s + 2*f16_diff[unified][s] + FLOOR, name + (unified ? "one stream: " : "streams: ") + "sequence " + std::to_string(s) + " differs by " +
                    std::to_string(diff) + ", the policy's own error is " + std::to_string(err_s));
            }
        }
    }

    llama_model_free(model);
    llama_backend_free();
    printf("%d passed, %d failed\n", n_passed, n_failed);
    return n_failed ? 1 : 0;
}
