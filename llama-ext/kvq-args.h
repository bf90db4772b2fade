// SPDX-License-Identifier: MIT
//
// Command line of the tools: --kvq, --kvq-key, --kvq-val, and who asked for which cache type.

#pragma once

#include "kvq.h"

#include <cstdint>
#include <fstream>
#include <map>
#include <string>
#include <utility>
#include <vector>

struct common_arg;
struct common_params;

// The four cache types of a command line.
enum kvq_side { KVQ_KEY, KVQ_VAL, KVQ_KEY_DRAFT, KVQ_VAL_DRAFT, KVQ_N_SIDES };

// Where each cache type comes from. The nearer source wins, of config files, environment and command line
// (in the order they are read). Within a source --kvq-key and --kvq-val win over --kvq, and a flag of ours
// beside one of upstream's for the same side is an error.
struct kvq_args {
    void next_source() { source++; }

    // whether this choice stands; throws std::invalid_argument if it contradicts one of the same source
    bool take(kvq_side side, const char * flag, int strength);

private:
    struct choice {
        int          source   = -1;
        int          strength = 0; // 0: upstream's flag, 1: --kvq, 2: --kvq-key or --kvq-val
        const char * flag     = "";
    };

    int    source = 0;
    choice choices[KVQ_N_SIDES];
};

// Sets a cache type that upstream's own flag asked for. It is remembered as asked for even if it is the default.
void kvq_arg_type(common_params & params, kvq_side side, const char * flag, ggml_type type);

// Takes away from a preset's options what the options of a nearer one, about to be merged into it, choose too.
void kvq_yield(std::map<common_arg, std::string> & options, const std::map<common_arg, std::string> & nearer);

// The options to add to every tool that takes cache types.
std::vector<common_arg> kvq_arg_list();

// Whether the flag that is parsed is a --flash-attn with no value behind it: that means "on".
bool kvq_bare_flash_attn(const std::string & arg, const char * next);

// Prints what the context's cache is to stderr; who: "" or "draft ".
void kvq_print(const llama_context * ctx, const char * who);

// llama-bench's own command line, which sweeps several types: SPECs apart by ';' or by repeating the flag.
// Rows are the pairs of --kvq, with the keys or values of each replaced by those of --kvq-key and
// --kvq-val, or else every K type with every V type.
struct kvq_bench {
    // takes one of our flags and its value; throws std::invalid_argument
    bool parse(const std::string & arg, int argc, char ** argv, int & i);

    // Fills pairs, and type_k, type_v with the types in them. A side that no flag chose is the environment's.
    // Exits with 1 on a contradiction or a malformed environment variable.
    void finish(std::vector<ggml_type> & type_k, std::vector<ggml_type> & type_v);

    std::vector<std::pair<ggml_type, ggml_type>> pairs;

private:
    void add(const std::string & flag, const std::string & value);

    std::vector<std::pair<ggml_type, ggml_type>> presets;
    std::vector<ggml_type> keys;
    std::vector<ggml_type> vals;
};

// The same type, but known as asked for.
ggml_type kvq_explicit(ggml_type type);

// Files of log-probabilities that llama-perplexity writes, a header, tokens, then 16 bits a word of the vocabulary and
// position. Both log the reason and return false:
// where the file can't be what its header says, with `in` behind n_chunk, which it leaves there,
bool kvq_check_logits_file(std::ifstream & in, const std::string & path, uint32_t n_ctx, int n_vocab, int n_chunk);
// and where some of it couldn't be written. True for a stream that was never opened.
bool kvq_check_written(std::ofstream & out, const std::string & path);
