// SPDX-License-Identifier: MIT
//
// That a context tells the truth whatever way it is run. Usage: test-kvq-honesty-context MODEL CHECK [--all]
//
//   fa       flash attention `auto` is `on`: the same refusals with the same reason, the same bits; `off` takes a quantized K alone
//   threads  1, 2, 3, 4 and 8 threads give the same bits, for prompts and for single tokens, with the cache split and whole
//   poison   a sequence of NaN stays NaN with every type, and neither its neighbours nor those who get its cells notice
//   batch    what a sequence gets doesn't depend on what its neighbours are, and hardly on how many there are
//
// All but `batch` take embeddings, so any model will do, without a vocabulary too. --all: every pair of types.

#include "kvq.h"
#include "llama.h"

#include "ggml.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

static int  n_failed = 0;
static long n_passed = 0;

static void check(bool ok, const std::string & what) {
    if (ok) {
        n_passed++;
    } else if (++n_failed <= 60) {
        printf("FAIL %s\n", what.c_str());
    }
}

using floats = std::vector<float>;
using pair   = std::pair<std::string, std::string>;

static llama_model * model   = nullptr;
static int           n_vocab = 0;
static int           n_embd  = 0;

static bool is_quantized(const std::string & spec) {
    std::vector<ggml_type> types(kvq_model_n_layer(model));
    if (!kvq_resolve(kvq_type_from_spec(spec.c_str()), types.size(), types.data())) {
        printf("FAIL %s: %s\n", spec.c_str(), kvq_last_error());
        exit(1);
    }
    return std::any_of(types.begin(), types.end(), [](ggml_type t) { return ggml_is_quantized(t); });
}

static std::vector<std::string> type_names() {
    std::vector<std::string> res;
    for (int i = 0; kvq_cache_type(i) != GGML_TYPE_COUNT; i++) {
        res.push_back(ggml_type_name(kvq_cache_type(i)));
    }
    return res;
}

// each type with itself, with f16 and with the recommended partner; or all with all
static std::vector<pair> pairs(bool all) {
    std::vector<pair> res;
    for (const auto & k : type_names()) {
        for (const auto & v : type_names()) {
            if (all || k == v || (k == "q8_0" && v.compare(0, 3, "kvq") == 0) || (k == "f16" && v == "q8_0") || (k == "kvq4" && v == "f16")) {
                res.emplace_back(k, v);
            }
        }
    }
    return res;
}

struct options {
    llama_flash_attn_type fa        = LLAMA_FLASH_ATTN_TYPE_ENABLED;
    int                   n_ctx     = 256;
    int                   n_batch   = 1024; // tokens, and outputs, of a batch
    int                   n_threads = 1;
    int                   n_seq     = 1;
    bool                  unified   = true;
};

struct rows { // tokens of one sequence, as embeddings or as ids, from a position on
    llama_seq_id             seq;
    llama_pos                pos;
    floats                   embd;
    std::vector<llama_token> ids;

    int n() const { return ids.empty() ? int(embd.size())/n_embd : int(ids.size()); }
};

struct context {
    llama_context * ctx;
    std::string     why;

    context(const pair & types, const options & o) {
        llama_context_params p = llama_context_default_params();
        p.n_ctx           = o.n_ctx;
        p.n_batch         = o.n_batch;
        p.n_ubatch        = o.n_batch;
        p.n_seq_max       = o.n_seq;
        p.n_outputs_max   = 64;
        p.n_outputs_max_per_seq = 64;
        p.kv_unified      = o.unified;
        p.n_threads       = o.n_threads;
        p.n_threads_batch = o.n_threads;
        p.no_perf         = true;
        p.flash_attn_type = o.fa;
        p.type_k = kvq_type_from_spec(types.first.c_str());
        p.type_v = kvq_type_from_spec(types.second.c_str());
        ctx = llama_init_from_model(model, p);
        why = ctx ? "" : kvq_last_error();
    }
    context(const context &) = delete;
    ~context() { llama_free(ctx); }

    llama_memory_t mem() const { return llama_get_memory(ctx); }

    // logits of the last n_out tokens of each sequence, one after the other
    std::vector<floats> decode(const std::vector<rows> & in, int n_out = 1) const {
        const bool by_id = !in[0].ids.empty();
        int n = 0;
        for (const auto & r : in) {
            n += r.n();
        }
        llama_batch batch = llama_batch_init(n, by_id ? 0 : n_embd, 1);
        batch.n_tokens = 0;
        std::vector<std::vector<int>> at(in.size());
        for (size_t s = 0; s < in.size(); s++) {
            for (int i = 0; i < in[s].n(); i++) {
                const int t = batch.n_tokens++;
                if (by_id) {
                    batch.token[t] = in[s].ids[i];
                } else {
                    std::copy_n(in[s].embd.begin() + i*n_embd, n_embd, batch.embd + size_t(t)*n_embd);
                }
                batch.pos     [t]    = in[s].pos + i;
                batch.n_seq_id[t]    = 1;
                batch.seq_id  [t][0] = in[s].seq;
                batch.logits  [t]    = i + n_out >= in[s].n();
                if (batch.logits[t]) {
                    at[s].push_back(t);
                }
            }
        }
        if (llama_decode(ctx, batch) != 0) {
            printf("FAIL llama_decode\n");
            exit(1);
        }
        std::vector<floats> res(in.size());
        for (size_t s = 0; s < in.size(); s++) {
            for (const int t : at[s]) {
                const float * l = llama_get_logits_ith(ctx, t);
                res[s].insert(res[s].end(), l, l + n_vocab);
            }
        }
        llama_batch_free(batch);
        return res;
    }
};

static floats random_embd(int n, int seed) {
    std::mt19937 rng(seed);
    std::normal_distribution<float> dist;
    floats res(size_t(n)*n_embd);
    for (float & v : res) {
        v = dist(rng);
    }
    return res;
}

static bool all_finite(const floats & x) {
    return std::all_of(x.begin(), x.end(), [](float v) { return std::isfinite(v); });
}

static bool none_finite(const floats & x) {
    return std::none_of(x.begin(), x.end(), [](float v) { return std::isfinite(v); });
}

static bool same_bits(const floats & a, const floats & b) {
    return a.size() == b.size() && memcmp(a.data(), b.data(), a.size()*sizeof(float)) == 0;
}

// mean over positions of the KL divergence of softmax(b) from softmax(a), in nats
static double kld(const floats & a, const floats & b) {
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
    return std::isfinite(res) ? std::max(res, 0.0)/n : INFINITY;
}

// rms of the difference over the standard deviation of the logits of a position
static double distance(const floats & a, const floats & b) {
    const int n = int(a.size())/n_vocab;
    double err = 0, var = 0;
    for (int p = 0; p < n; p++) {
        double mean = 0;
        for (int i = 0; i < n_vocab; i++) {
            mean += a[size_t(p)*n_vocab + i];
        }
        mean /= n_vocab;
        for (int i = 0; i < n_vocab; i++) {
            const size_t at = size_t(p)*n_vocab + i;
            err += (double(a[at]) - b[at])*(double(a[at]) - b[at]);
            var += (a[at] - mean)*(a[at] - mean);
        }
    }
    const double res = std::sqrt(err/var);
    return std::isfinite(res) ? res : INFINITY;
}

//
// fa
//

static void test_fa(bool all) {
    auto todo = pairs(all);
    for (const char * k : { "16,0=8", "q4_0,1=f16", "4,:1=8" }) {
        for (const char * v : { "16,0=4", "4", "16" }) {
            todo.emplace_back(k, v);
        }
    }
    const int head = [] {
        context c({ "f32", "f32" }, {});
        kvq_layer l;
        if (!c.ctx || !kvq_get_layer(c.ctx, 0, &l)) {
            printf("FAIL no context: %s\n", c.why.c_str());
            exit(1);
        }
        return l.head_k;
    }();
    const bool fits = head % 32 == 0;
    const auto prompt = random_embd(20, 1), next = random_embd(1, 2);
    const auto run = [&](const context & c) {
        auto res = c.decode({ { 0, 0, prompt, {} } }, 4)[0];
        const auto more = c.decode({ { 0, 20, next, {} } })[0];
        res.insert(res.end(), more.begin(), more.end());
        return res;
    };
    long   n_run = 0, n_refused = 0;
    double worst[2] = { 0, 0 };
    for (const auto & types : todo) {
        const std::string name = "K " + types.first + " V " + types.second + ": ";
        const bool qk = is_quantized(types.first), qv = is_quantized(types.second);
        options o[3];
        o[0].fa = LLAMA_FLASH_ATTN_TYPE_AUTO;
        o[1].fa = LLAMA_FLASH_ATTN_TYPE_ENABLED;
        o[2].fa = LLAMA_FLASH_ATTN_TYPE_DISABLED;
        context autom(types, o[0]), on(types, o[1]), off(types, o[2]);
        const bool may = fits || !(qk || qv);

        check(!autom.ctx == !on.ctx, name + "auto and on don't agree: '" + autom.why + "', '" + on.why + "'");
        check(autom.why == on.why, name + "auto says '" + autom.why + "', on says '" + on.why + "'");
        check(bool(on.ctx) == may, name + (may ? "refused: " + on.why : "taken"));
        check(bool(off.ctx) == (may && !qv), name + "with flash attention off: " + (off.ctx ? "taken" : "refused: " + off.why));
        if (!may) {
            check(on.why.find(std::to_string(head)) != std::string::npos, name + "the reason doesn't name the head size: " + on.why);
            if (!qv) { // else it may say that V needs flash attention
                check(off.why == on.why, name + "off says '" + off.why + "', on says '" + on.why + "'");
            }
        } else if (qv) {
            check(off.why.find("flash") != std::string::npos, name + "the reason doesn't name flash attention: " + off.why);
        }
        if (!on.ctx || !autom.ctx) {
            n_refused++;
            continue;
        }
        const auto a = run(autom), b = run(on);
        check(all_finite(b), name + "logits aren't finite");
        check(same_bits(a, b), name + "auto gives other bits than on");
        n_run++;
        if (off.ctx) {
            const auto c = run(off);
            check(all_finite(c), name + "logits aren't finite with flash attention off");
            // Without flash attention queries meet upstream's quantized keys as 8 bits, rounded to 1/254 of the largest of 32, which is
            // 2.2 times the rms: 0.25 % of the rms of a score's terms, so of a score of variance 1. Values are summed as f16 or finer.
            // A few layers and the first rounding that turns a level over: 10 times that.
            const double d = distance(b, c);
            worst[qk] = std::max(worst[qk], d);
            check(d < (qk ? 0.1 : 0.025), name + "with flash attention off, logits differ by " + std::to_string(d));
        }
    }
    printf("fa: head size %d, %ld pairs run, %ld refused; off differs from on by %.1e of the logits' deviation at most, %.1e with quantized keys\n",
        head, n_run, n_refused, worst[0], worst[1]);
}

//
// threads
//

static void test_threads(bool all) {
    const char * floats_too = getenv("GGML_KVQ_FA_FLOAT");
    const bool ours_too = floats_too && *floats_too && strcmp(floats_too, "0") != 0;
    const int n_prompt = 600; // more than 512 positions: split over the cache when single tokens are decoded
    const auto prompt = random_embd(n_prompt, 3);
    const auto next   = random_embd(3, 4);
    long n = 0, n_float = 0;
    double worst = 0;
    for (const auto & types : pairs(all)) {
        const bool ours = ours_too || is_quantized(types.first) || is_quantized(types.second);
        floats one;
        for (const int n_threads : { 1, 2, 3, 4, 8 }) {
            options o;
            o.n_ctx     = 1024;
            o.n_threads = n_threads;
            context c(types, o);
            check(c.ctx, "no context: " + c.why);
            if (!c.ctx) {
                continue;
            }
            floats res;
            const auto take = [&](const floats & x) { res.insert(res.end(), x.begin(), x.end()); };
            take(c.decode({ { 0, 0, floats(prompt.begin(), prompt.begin() + 40*n_embd), {} } }, 8)[0]); // not split
            take(c.decode({ { 0, 40, floats(next.begin(), next.begin() + n_embd), {} } })[0]);
            take(c.decode({ { 0, 41, floats(prompt.begin() + 40*n_embd, prompt.end()), {} } }, 8)[0]);
            for (int i = 1; i < 3; i++) {
                take(c.decode({ { 0, n_prompt + i, floats(next.begin() + i*n_embd, next.begin() + (i + 1)*n_embd), {} } })[0]);
            }
            check(all_finite(res), "logits aren't finite");
            if (n_threads == 1) {
                one = res;
                continue;
            }
            const double d = distance(one, res);
            const std::string name = "K " + types.first + " V " + types.second + ", " + std::to_string(n_threads) + " threads: ";
            if (ours) {
                n++;
                check(same_bits(one, res), name + "other bits, by " + std::to_string(d) + " of the logits' deviation");
            } else {
                // upstream splits the cache by the number of threads: another order of sums. f16 values are summed up in f16, 2^-11 of a
                // partial sum for each of 600 positions, by chance with either sign: sqrt(600)*2^-11 = 1.2 % of the largest partial
                // sum. The logits see that of each of a few layers.
                n_float++;
                worst = std::max(worst, d);
                check(d < 0.03, name + "differ by " + std::to_string(d));
            }
        }
    }
    printf("threads: %ld cases with the same bits, %ld of upstream's attention, that differ by %.1e of the logits' deviation at most\n", n, n_float, worst);
}

//
// poison
//

static void test_poison(bool all) {
    const int n_a = 80, n_b = 70, n_more = 70; // 64 queries and more go through tiles
    const auto a = random_embd(n_a, 5), a_next = random_embd(1, 6), a_more = random_embd(n_more, 7);
    const auto fresh = random_embd(n_b, 8), b_next = random_embd(1, 9);
    const floats not_a(size_t(n_b)*n_embd, NAN);
    long   n = 0;
    double worst = 0;
    // Rows that are NaN take another way to the same sums (docs/cpu.md): weights in f32 instead of 16 bits, an error of 1e-4 of an
    // attention's output (1e-3 where upstream sums in f16). As much of what is stored next is so near to a boundary between
    // levels, which lie a tenth to one deviation apart, that it is rounded the other way: one value of a thousand, and in a trellis its
    // neighbours too. 5 of a thousand values whose errors are drawn anew are a hundredth of the pair's own divergence from f32, on
    // average. A single token may have more; as much as the pair's own would be half of all values. 1e-6: f16's and f32's own.
    const double part = 0.01;
    double sum = 0, sum_own = 0;
    floats exact[2][4];
    auto todo = pairs(all);
    std::stable_partition(todo.begin(), todo.end(), [](const pair & p) { return p == pair("f32", "f32"); });
    for (const auto & types : todo) {
        for (const bool unified : { true, false }) {
            options o;
            o.n_ctx   = unified ? 512 : 1024;
            o.n_seq   = 2;
            o.unified = unified;
            const std::string name = "K " + types.first + " V " + types.second + (unified ? ", one stream: " : ", streams: ");
            floats kept[2][4], lost[3];
            for (const bool bad : { false, true }) {
                context c(types, o);
                check(c.ctx, name + c.why);
                if (!c.ctx) {
                    return;
                }
                auto first = c.decode({ { 0, 0, a, {} }, { 1, 0, bad ? not_a : fresh, {} } }, 8);
                kept[bad][0] = first[0];
                auto second = c.decode({ { 0, n_a, a_next, {} }, { 1, n_b, b_next, {} } });
                kept[bad][1] = second[0];
                const auto third = c.decode({ { 1, n_b + 1, fresh, {} } }, 8);
                if (bad) {
                    lost[0] = first[1];
                    lost[1] = second[1]; // a sound token behind rows of NaN
                    lost[2] = third[0];  // a sound prompt behind them
                }
                // the cells are given up, and stay as they were
                llama_memory_seq_rm(c.mem(), 1, -1, -1);
                kept[bad][2] = c.decode({ { 0, n_a + 1, a_more, {} } }, 8)[0];
                // another sequence gets them
                kept[bad][3] = c.decode({ { 1, 0, floats(fresh.begin(), fresh.begin() + 33*n_embd), {} } }, 8)[0];
            }
            const char * const what[] = { "a prompt beside NaN", "a token beside NaN", "a prompt beside given up cells", "a prompt in given up cells" };
            for (int i = 0; i < 4; i++) {
                n++;
                if (types == todo[0]) {
                    exact[unified][i] = kept[false][i];
                }
                check(all_finite(kept[true][i]), name + what[i] + " isn't finite");
                const double own = kld(exact[unified][i], kept[false][i]);
                const double d   = kld(kept[false][i], kept[true][i]);
                worst = std::max(worst, std::isfinite(d) ? d : 0.0);
                sum     += d;
                sum_own += own + 1e-6;
                check(d <= 1e-6 + own, name + what[i] + " differs by " + std::to_string(d) + " nats, the pair from f32 by " + std::to_string(own));
            }
            const char * const where[] = { "a prompt of NaN", "a token behind NaN", "a prompt behind NaN" };
            for (int i = 0; i < 3; i++) {
                n++;
                check(none_finite(lost[i]), name + where[i] + " comes out as numbers");
            }
        }
    }
    check(sum <= part*sum_own, "sound sequences differ by " + std::to_string(sum/sum_own) + " of the pairs' own divergence");
    printf("poison: %ld cases, sound sequences differ by %.1e nats at most, all by %.1e of the pairs' own divergence\n", n, worst, sum/sum_own);
}

//
// batch
//

// n tokens of plain prose from some word on: on tokens without sense a model amplifies every rounding
static std::vector<llama_token> text(int start, int n) {
    static const char prose[] =
        "A lighthouse stood at the end of the long stone pier. Every evening an old woman climbed its stairs, lit the lamp and wrote "
        "the weather into a book. In winter the waves broke over the pier, and for days nobody could bring her bread or oil. She did "
        "not mind, because she had shelves full of letters to read again. One night in March a ship lost its rudder and drifted "
        "towards the rocks. The captain saw the light turn, counted the seconds between the flashes, and knew from the chart where he "
        "was. He let both anchors go, and they held. In the morning the crew rowed ashore with a barrel of apples as a present. The "
        "woman wrote down the wind, the height of the water and the number of apples. Many years later a student found her books in "
        "the harbour office. She drew a curve of all the storms and saw that they came in groups of three. Her professor laughed at "
        "first, but then he looked at the figures for a long time, and in the end they printed the curve together.";
    std::vector<llama_token> res(sizeof(prose));
    res.resize(std::max(0, llama_tokenize(llama_model_get_vocab(model), prose, sizeof(prose) - 1, res.data(), res.size(), true, false)));
    if (int(res.size()) < start + n) {
        printf("FAIL the prose has %zu tokens\n", res.size());
        exit(1);
    }
    return std::vector<llama_token>(res.begin() + start, res.begin() + start + n);
}

static const int N_SEQ    = 4;
static const int N_OUT    = 4; // tokens of a prompt that are compared
static const int N_SINGLE = 4; // single tokens behind it
static const int LENGTHS[N_SEQ] = { 64, 17, 40, 25 };

static floats & append(floats & a, const floats & b) {
    a.insert(a.end(), b.begin(), b.end());
    return a;
}

// Logits of each sequence, prompts in one batch and then single tokens, one of each sequence in a batch.
static std::vector<floats> together(const context & c, const std::vector<std::vector<llama_token>> & texts) {
    std::vector<rows> in;
    for (int s = 0; s < int(texts.size()); s++) {
        in.push_back({ s, 0, {}, { texts[s].begin(), texts[s].end() - N_SINGLE } });
    }
    auto res = c.decode(in, N_OUT);
    for (int i = 0; i < N_SINGLE; i++) {
        for (int s = 0; s < int(texts.size()); s++) {
            const int n = int(texts[s].size()) - N_SINGLE;
            in[s] = { s, n + i, {}, { texts[s][n + i] } };
        }
        const auto more = c.decode(in);
        for (size_t s = 0; s < texts.size(); s++) {
            append(res[s], more[s]);
        }
    }
    return res;
}

static void test_batch(bool all) {
    std::vector<std::vector<llama_token>> texts, others;
    for (int s = 0; s < N_SEQ; s++) {
        texts .push_back(text(10 + 30*s, LENGTHS[s] + N_SINGLE));
        others.push_back(text(s == 0 ? 10 : 130 - 25*s, LENGTHS[s] + N_SINGLE));
    }
    std::vector<pair> todo = { { "f16", "f16" }, { "q8_0", "kvq4" }, { "kvq3", "kvq3" } };
    if (all) {
        todo.insert(todo.end(), { { "f32", "f32" }, { "q8_0", "q8_0" }, { "kvq6", "kvq5" }, { "kvq4", "kvq4" }, { "kvq2", "kvq2" }, { "q4_0", "q5_1" }, { "f16", "kvq4" } });
    }
    std::vector<floats> f16_alone;
    double f16_diff[2][N_SEQ] = {};
    double turned = 0; // see below
    long n = 0;
    printf("batch: divergence in nats, and distance relative to the logits' deviation; own: of the pair from f16, alone; together: of a batch of %d\n"
           "       from alone; cache: other sequences in the cache only, rows and batch the same\n", N_SEQ);
    for (const auto & types : todo) {
        const std::string name = "K " + types.first + " V " + types.second + ": ";
        std::vector<floats> alone;
        for (int s = 0; s < N_SEQ; s++) {
            options o;
            o.n_batch = 256;
            context c(types, o);
            check(c.ctx, name + c.why);
            if (!c.ctx) {
                return;
            }
            auto res = c.decode({ { 0, 0, {}, { texts[s].begin(), texts[s].end() - N_SINGLE } } }, N_OUT)[0];
            for (int i = 0; i < N_SINGLE; i++) {
                append(res, c.decode({ { 0, LENGTHS[s] + i, {}, { texts[s][LENGTHS[s] + i] } } })[0]);
            }
            alone.push_back(res);
        }
        const bool is_f16 = f16_alone.empty();
        if (is_f16) {
            f16_alone = alone;
        }
        double own = 0, own_by_seq[N_SEQ], most[2] = {}, cache[2] = {};
        for (int s = 0; s < N_SEQ; s++) {
            own_by_seq[s] = kld(f16_alone[s], alone[s]);
            own = std::max(own, own_by_seq[s]);
        }
        // What f16 differs by in a batch is by how much values that are to be stored differ, relative to their deviation. Levels lie a
        // tenth to one deviation apart, so ten times as many values at most are rounded to another one, and in a trellis 5 with each. What
        // is turned over has its error drawn anew, which lies twice its power away; twice that for chance. Then what f16 itself
        // differs by, likewise, and 1e-6 for sums of f32.
        const auto limit = [&](int s) { return 4*turned*own_by_seq[s] + 2*std::max(f16_diff[0][s], f16_diff[1][s]) + 1e-6; };
        for (const bool unified : { true, false }) {
            options o;
            o.n_ctx   = unified ? 256 : 256*N_SEQ;
            o.n_batch = 256;
            o.n_seq   = N_SEQ;
            o.unified = unified;
            const std::string where = name + (unified ? "one stream, " : "streams, ");

            context c(types, o), d(types, o), e(types, o);
            const auto mine = together(c, texts);
            for (int s = 0; s < N_SEQ; s++) {
                const double diff = kld(alone[s], mine[s]);
                most[0] = std::max(most[0], diff);
                most[1] = std::max(most[1], distance(alone[s], mine[s]));
                if (is_f16) {
                    f16_diff[unified][s] = diff;
                    // upstream's matrix products take other kernels for one row and for many; quantized weights make their inputs 8 bits,
                    // 0.3 %, rounded anew in each layer
                    check(diff < 0.05, where + "a batch changes f16 by " + std::to_string(diff));
                    turned = std::min(1.0, std::max(turned, 50*most[1]));
                } else {
                    check(diff < limit(s), where + "sequence " + std::to_string(s) + " differs by " + std::to_string(diff) + ", at most " + std::to_string(limit(s)));
                }
                n++;
            }
            // as many neighbours of the same lengths, with other tokens: nothing of them is in any sum
            const auto theirs = together(d, others);
            check(same_bits(mine[0], theirs[0]), where + "other neighbours change a sequence by " + std::to_string(distance(mine[0], theirs[0])));
            check(!same_bits(mine[1], theirs[1]), where + "neighbours are the same");

            // only attention sees them: the rows are the same, and so is the batch, beside others in the cache (c, whose rows are kept
            // as a state) and with the cache to itself
            llama_memory_seq_rm(c.mem(), 0, LENGTHS[0], -1);
            std::vector<uint8_t> state(llama_state_seq_get_size(c.ctx, 0));
            state.resize(llama_state_seq_get_data(c.ctx, state.data(), state.size(), 0));
            check(llama_state_seq_set_data(e.ctx, state.data(), state.size(), 0) == state.size(), where + "state refused");
            floats res, ref;
            for (int i = 0; i < N_SINGLE; i++) {
                const std::vector<rows> in = { { 0, LENGTHS[0] + i, {}, { texts[0][LENGTHS[0] + i] } } };
                append(res, c.decode(in)[0]);
                append(ref, e.decode(in)[0]);
            }
            cache[0] = std::max(cache[0], kld(ref, res));
            cache[1] = std::max(cache[1], distance(ref, res));
            n++;
        }
        // Attention over the same rows in other tiles is off by a squared error of 5e-8 at most (tests/cpp/test-kvq-types.cpp): less than a
        // batch's products. But where weights are quantized, any change at all turns roundings of their inputs over, so the limit
        // is that of a batch. With f16 the same sums row by row skip what is masked: the same bits.
        check(is_f16 ? cache[0] == 0 : cache[0] < limit(0), name + "neighbours in the cache change it by " + std::to_string(cache[0]) + ", at most " + std::to_string(limit(0)));
        printf("batch: K %-5s V %-5s own %.1e, together %.1e (%.1e), cache %.1e (%.1e)\n", types.first.c_str(), types.second.c_str(), own, most[0], most[1], cache[0], cache[1]);
    }
    printf("batch: %ld cases\n", n);
}

int main(int argc, char ** argv) {
    const bool all = argc == 4 && strcmp(argv[3], "--all") == 0;
    if (argc < 3 || (argc == 4 && !all) || argc > 4) {
        fprintf(stderr, "usage: %s MODEL fa|threads|poison|batch [--all]\n", argv[0]);
        return 2;
    }
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr); // refusals are what is tested
    llama_backend_init();
    model = llama_model_load_from_file(argv[1], llama_model_default_params());
    if (!model) {
        fprintf(stderr, "can't load %s\n", argv[1]);
        return 2;
    }
    n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
    n_embd  = llama_model_n_embd(model);

    const std::string what = argv[2];
    if      (what == "fa")      { test_fa(all); }
    else if (what == "threads") { test_threads(all); }
    else if (what == "poison")  { test_poison(all); }
    else if (what == "batch")   { test_batch(all); }
    else {
        fprintf(stderr, "%s is no check\n", argv[2]);
        return 2;
    }
    llama_model_free(model);
    llama_backend_free();
    printf("%ld checks passed, %d failed\n", n_passed, n_failed);
    return n_failed ? 1 : 0;
}
