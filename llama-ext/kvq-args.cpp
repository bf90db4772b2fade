// SPDX-License-Identifier: MIT

#include "kvq-args.h"

#include "arg.h"
#include "common.h"
#include "log.h"

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>

#ifdef _WIN32
#include <io.h>
#define isatty _isatty
#define fileno _fileno
#else
#include <unistd.h>
#endif

// the C API is all that libllama exports
static ggml_type parse_spec(const std::string & spec) {
    const ggml_type res = kvq_type_from_spec(spec.c_str());
    if (res == GGML_TYPE_COUNT) {
        throw std::invalid_argument(kvq_last_error());
    }
    return res;
}

static std::pair<ggml_type, ggml_type> parse_preset(const std::string & preset) {
    std::pair<ggml_type, ggml_type> res;
    if (!kvq_types_from_preset(preset.c_str(), &res.first, &res.second)) {
        throw std::invalid_argument(kvq_last_error());
    }
    return res;
}

ggml_type kvq_explicit(ggml_type type) {
    return parse_spec(kvq_type_name(type));
}

bool kvq_args::take(kvq_side side, const char * flag, int strength) {
    choice & old = choices[side];
    if (old.source == source) {
        if ((old.strength == 0) != (strength == 0)) {
            throw std::invalid_argument(std::string(old.flag) + " and " + flag + " both choose the cache type of the " +
                (side == KVQ_KEY || side == KVQ_KEY_DRAFT ? "keys" : "values") + ": give one of them");
        }
        if (strength < old.strength) {
            return false;
        }
    }
    old = { source, strength, flag };
    return true;
}

static void set(common_params & params, kvq_side side, const char * flag, int strength, ggml_type type) {
    auto & draft = params.speculative.draft;
    ggml_type * const dst[KVQ_N_SIDES] = { &params.cache_type_k, &params.cache_type_v, &draft.cache_type_k, &draft.cache_type_v };
    if (params.kvq.take(side, flag, strength)) {
        *dst[side] = type;
    }
}

void kvq_arg_type(common_params & params, kvq_side side, const char * flag, ggml_type type) {
    set(params, side, flag, 0, kvq_explicit(type));
}

static std::string allowed() {
    std::string res;
    for (int i = 0; kvq_cache_type(i) != GGML_TYPE_COUNT; i++) {
        res += std::string(i ? ", " : "") + kvq_type_name(kvq_cache_type(i));
    }
    return res;
}

std::vector<common_arg> kvq_arg_list() {
    std::vector<common_arg> res;

    const std::string preset_help =
        "cache types of keys and values: k<bits>v<bits> such as k8v4, k6v5, k3v3,\n"
        "or 8 (= k8v4), 4 (= k4v4), 16 (= f16)";
    const std::string spec_help =
        ": bits (32, 16, 8, 6, 5, 4, 3, 2) or a type by name,\n"
        "then exceptions by layer slice, e.g. 8 or 4,:2=8,-2:=16\n"
        "types: " + allowed();

    res.push_back(common_arg({"--kvq"}, "PRESET", preset_help,
        [](common_params & params, const std::string & value) {
            const auto types = parse_preset(value);
            set(params, KVQ_KEY, "--kvq", 1, types.first);
            set(params, KVQ_VAL, "--kvq", 1, types.second);
        }).set_env("LLAMA_ARG_KVQ"));
    res.push_back(common_arg({"--kvq-key"}, "SPEC", "cache type of the keys" + spec_help,
        [](common_params & params, const std::string & value) {
            set(params, KVQ_KEY, "--kvq-key", 2, parse_spec(value));
        }).set_env("LLAMA_ARG_KVQ_KEY"));
    res.push_back(common_arg({"--kvq-val"}, "SPEC", "cache type of the values" + spec_help,
        [](common_params & params, const std::string & value) {
            set(params, KVQ_VAL, "--kvq-val", 2, parse_spec(value));
        }).set_env("LLAMA_ARG_KVQ_VAL"));

    res.push_back(common_arg({"--kvq-draft"}, "PRESET", "the same as --kvq for the draft model",
        [](common_params & params, const std::string & value) {
            const auto types = parse_preset(value);
            set(params, KVQ_KEY_DRAFT, "--kvq-draft", 1, types.first);
            set(params, KVQ_VAL_DRAFT, "--kvq-draft", 1, types.second);
        }).set_env("LLAMA_ARG_KVQ_DRAFT"));
    res.push_back(common_arg({"--kvq-key-draft"}, "SPEC", "the same as --kvq-key for the draft model",
        [](common_params & params, const std::string & value) {
            set(params, KVQ_KEY_DRAFT, "--kvq-key-draft", 2, parse_spec(value));
        }).set_env("LLAMA_ARG_KVQ_KEY_DRAFT"));
    res.push_back(common_arg({"--kvq-val-draft"}, "SPEC", "the same as --kvq-val for the draft model",
        [](common_params & params, const std::string & value) {
            set(params, KVQ_VAL_DRAFT, "--kvq-val-draft", 2, parse_spec(value));
        }).set_env("LLAMA_ARG_KVQ_VAL_DRAFT"));

    return res;
}

void kvq_yield(std::map<common_arg, std::string> & options, const std::map<common_arg, std::string> & nearer) {
    static const struct { const char * preset; const char * spec[2]; const char * type[2]; } names[] = {
        { "--kvq",       { "--kvq-key",       "--kvq-val"       }, { "--cache-type-k",       "--cache-type-v"       } },
        { "--kvq-draft", { "--kvq-key-draft", "--kvq-val-draft" }, { "--cache-type-k-draft", "--cache-type-v-draft" } },
    };
    const auto find = [](const auto & opts, const char * name) {
        return std::find_if(opts.begin(), opts.end(), [&](const auto & opt) {
            return std::any_of(opt.first.args.begin(), opt.first.args.end(), [&](const char * arg) { return !strcmp(arg, name); });
        });
    };
    const auto has   = [&](const auto & opts, const char * name) { return find(opts, name) != opts.end(); };
    const auto erase = [&](const char * name) {
        if (has(options, name)) {
            options.erase(find(options, name));
        }
    };
    for (const auto & n : names) {
        bool chosen[2];
        for (int side = 0; side < 2; side++) {
            chosen[side] = has(nearer, n.preset) || has(nearer, n.spec[side]) || has(nearer, n.type[side]);
            if (chosen[side]) {
                erase(n.spec[side]);
                erase(n.type[side]);
            }
        }
        const auto preset = find(options, n.preset);
        if (preset == options.end() || (!chosen[0] && !chosen[1])) {
            continue;
        }
        // the side that stays open keeps the preset's type
        const auto types = parse_preset(preset->second);
        const ggml_type type[2] = { types.first, types.second };
        for (int side = 0; side < 2; side++) {
            if (!chosen[side] && !has(options, n.spec[side])) {
                for (const auto & arg : kvq_arg_list()) {
                    if (!strcmp(arg.args[0], n.spec[side])) {
                        options[arg] = kvq_type_name(type[side]);
                    }
                }
            }
        }
        erase(n.preset);
    }
}

bool kvq_bare_flash_attn(const std::string & arg, const char * next) {
    return (arg == "-fa" || arg == "--flash-attn") && (!next || next[0] == '-');
}

void kvq_print(const llama_context * ctx, const char * who) {
    std::string text(kvq_describe(ctx, nullptr, 0), '\0');
    kvq_describe(ctx, &text[0], text.size() + 1);

    // the lines start with "kvq:"
    for (size_t at = 0; at < text.size(); at = text.find('\n', at) + 1) {
        text.insert(at + strlen("kvq"), *who ? std::string(" ") + who : "");
    }
    if (isatty(fileno(stderr))) {
        fputs("\r\033[K", stderr); // a spinner may stand there
    }
    fputs(text.c_str(), stderr);
    fflush(stderr);
}

//
// llama-bench
//

void kvq_bench::add(const std::string & flag, const std::string & value) {
    for (size_t at = 0; at <= value.size();) {
        const size_t      end  = std::min(value.find(';', at), value.size());
        const std::string item = value.substr(at, end - at);
        if (flag == "--kvq") {
            presets.push_back(parse_preset(item));
        } else {
            (flag == "--kvq-key" ? keys : vals).push_back(parse_spec(item));
        }
        at = end + 1;
    }
}

bool kvq_bench::parse(const std::string & arg, int argc, char ** argv, int & i) {
    if (arg != "--kvq" && arg != "--kvq-key" && arg != "--kvq-val") {
        return false;
    }
    if (i + 1 >= argc) {
        throw std::invalid_argument("expected value for argument");
    }
    add(arg, argv[++i]);
    return true;
}

void kvq_bench::finish(std::vector<ggml_type> & type_k, std::vector<ggml_type> & type_v) {
    const auto asked = [](const std::vector<ggml_type> & types) {
        return std::any_of(types.begin(), types.end(), [](ggml_type t) { return t >= GGML_TYPE_KVQ_POLICY; });
    };
    try {
        if ((!presets.empty() || !keys.empty()) && asked(type_k)) {
            throw std::invalid_argument(std::string(keys.empty() ? "--kvq" : "--kvq-key") +
                " and --cache-type-k both choose the cache type of the keys: give one of them");
        }
        if ((!presets.empty() || !vals.empty()) && asked(type_v)) {
            throw std::invalid_argument(std::string(vals.empty() ? "--kvq" : "--kvq-val") +
                " and --cache-type-v both choose the cache type of the values: give one of them");
        }

        // the environment has what the command line leaves open, each side for itself
        kvq_bench env;
        for (const char * flag : { "--kvq", "--kvq-key", "--kvq-val" }) {
            std::string name = std::string("LLAMA_ARG_") + (flag + 2);
            std::transform(name.begin(), name.end(), name.begin(), [](char c) { return c == '-' ? '_' : char(toupper(c)); });
            if (const char * value = getenv(name.c_str())) {
                try {
                    env.add(flag, value);
                } catch (const std::exception & e) {
                    throw std::invalid_argument(name + ": " + e.what());
                }
            }
        }
        const bool open_k = presets.empty() && keys.empty() && !asked(type_k);
        const bool open_v = presets.empty() && vals.empty() && !asked(type_v);
        if (open_k && open_v) {
            presets = env.presets; // the pairs of a preset stay together
        }
        if (open_k) {
            keys = env.keys;
            for (size_t i = 0; i < env.presets.size() && !open_v && env.keys.empty(); i++) {
                keys.push_back(env.presets[i].first);
            }
        }
        if (open_v) {
            vals = env.vals;
            for (size_t i = 0; i < env.presets.size() && !open_k && env.vals.empty(); i++) {
                vals.push_back(env.presets[i].second);
            }
        }
    } catch (const std::exception & e) {
        fprintf(stderr, "error: %s\n", e.what());
        exit(1);
    }

    if (presets.empty()) {
        for (const ggml_type k : keys.empty() ? type_k : keys) {
            for (const ggml_type v : vals.empty() ? type_v : vals) {
                pairs.emplace_back(k, v);
            }
        }
    }
    for (const auto & preset : presets) {
        for (const ggml_type k : keys.empty() ? std::vector<ggml_type>{ preset.first } : keys) {
            for (const ggml_type v : vals.empty() ? std::vector<ggml_type>{ preset.second } : vals) {
                pairs.emplace_back(k, v);
            }
        }
    }

    // what a table shows as columns
    type_k.clear();
    type_v.clear();
    for (const auto & pair : pairs) {
        type_k.push_back(pair.first);
        type_v.push_back(pair.second);
    }
}

//
// files of log-probabilities
//

bool kvq_check_logits_file(std::ifstream & in, const std::string & path, uint32_t n_ctx, int n_vocab, int n_chunk) {
    const auto refuse = [&](const std::string & why) {
        LOG_ERR("%s: %s: it was cut, damaged, or isn't what llama-perplexity wrote; make it anew with --kl-divergence-base and without --kl-divergence\n",
            path.c_str(), why.c_str());
        return false;
    };
    if (n_ctx < 4 || n_ctx > INT32_MAX || n_chunk < 1 || n_vocab < 1) {
        return refuse("no file has " + std::to_string(n_chunk) + " chunks of " + std::to_string(n_ctx) + " tokens");
    }
    const auto at = in.tellg();
    if (at == std::ifstream::pos_type(-1)) { // a pipe: what is missing shows when it is read
        in.clear();
        return double(n_chunk)*n_ctx < (1 << 28) || refuse("so many tokens through a pipe");
    }
    in.seekg(0, std::ios::end);
    const double size = double(in.tellg() - at);
    in.seekg(at);

    // in double: the products of a file's numbers may be larger than any integer
    const double n_scored = n_ctx - 1 - n_ctx/2;
    const double want     = double(n_chunk)*(n_ctx*double(sizeof(llama_token)) + n_scored*2.0*(2*((n_vocab + 1)/2) + 4));
    if (!in || size != want) {
        return refuse("it has " + std::to_string(int64_t(size)) + " bytes of tokens and log-probabilities, and " + std::to_string(n_chunk) +
            " chunks of " + std::to_string(n_ctx) + " tokens take " + (want < 1e18 ? std::to_string(int64_t(want)) : std::string("more than there can be")));
    }
    std::vector<llama_token> tokens(n_ctx);
    for (int i = 0; i < n_chunk; i++) {
        in.read((char *) tokens.data(), tokens.size()*sizeof(tokens[0]));
        for (const llama_token token : tokens) {
            if (!in || token < 0 || token >= n_vocab) {
                return refuse("chunk " + std::to_string(i) + " has token " + std::to_string(token) + ", the vocabulary has " + std::to_string(n_vocab));
            }
        }
    }
    in.seekg(at);
    return true;
}

bool kvq_check_written(std::ofstream & out, const std::string & path) {
    out.flush();
    if (out.is_open() && !out) {
        LOG_ERR("%s can't be written whole (disk full?): delete it\n", path.c_str());
        return false;
    }
    return true;
}
