// SPDX-License-Identifier: MIT
//
// Command lines of the tools, and llama-bench's own: flags of cache types with any text as their values. Each line of
// an input is one flag, by its first byte, and its value.
//
// What must hold: an error or types that libllama knows, and no exception but the one that says why.

#include "fuzz-common.h"

#include "arg.h"
#include "common.h"
#include "kvq-args.h"
#include "log.h"

#include <stdexcept>

static const char * const FLAGS[] = {
    "--kvq", "--kvq-key", "--kvq-val", "--kvq-draft", "--kvq-key-draft", "--kvq-val-draft", "-ctk", "-ctv", "-ctkd", "-ctvd", "-fa",
};

static const size_t N_FLAGS = sizeof(FLAGS)/sizeof(FLAGS[0]);

static void check_known(ggml_type type) {
    FUZZ_CHECK(strcmp(kvq_type_name(type), "none") != 0, "type %d is unknown", int(type));
}

static void check_tools(const std::vector<std::string> & args) {
    std::vector<std::string> all = { "fuzz", "-m", "model.gguf" };
    all.insert(all.end(), args.begin(), args.end());
    std::vector<char *> argv;
    for (auto & arg : all) {
        argv.push_back(&arg[0]);
    }
    common_params params;
    if (common_params_parse(int(argv.size()), argv.data(), params, LLAMA_EXAMPLE_SERVER)) {
        check_known(params.cache_type_k);
        check_known(params.cache_type_v);
        check_known(params.speculative.draft.cache_type_k);
        check_known(params.speculative.draft.cache_type_v);
    }
}

static void check_bench(const std::vector<std::string> & args) {
    std::vector<char *> argv;
    std::vector<std::string> all = args;
    for (auto & arg : all) {
        argv.push_back(&arg[0]);
    }
    kvq_bench bench;
    try {
        for (int i = 0; i < int(argv.size()); i++) {
            const std::string arg = argv[i];
            if (!bench.parse(arg, int(argv.size()), argv.data(), i)) {
                i++; // another's flag, and its value
            }
        }
    } catch (const std::invalid_argument &) {
        return;
    }
    std::vector<ggml_type> type_k = { GGML_TYPE_F16 };
    std::vector<ggml_type> type_v = { GGML_TYPE_F16 };
    bench.finish(type_k, type_v);
    FUZZ_CHECK(!bench.pairs.empty() && bench.pairs.size() == type_k.size() && bench.pairs.size() == type_v.size(), "%zu pairs", bench.pairs.size());
    for (const auto & pair : bench.pairs) {
        check_known(pair.first);
        check_known(pair.second);
    }
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t * data, size_t size) {
    // pairs grow with the product of the lists: a line of a command can't be longer anyway
    if (size < 1 || size > 512) {
        return -1;
    }
    std::vector<std::string> args;
    std::string line;
    for (size_t i = 0; i <= size; i++) {
        if (i < size && data[i] != '\n') {
            line += char(data[i]);
            continue;
        }
        if (!line.empty()) {
            args.push_back(FLAGS[uint8_t(line[0]) % N_FLAGS]);
            args.push_back(line.substr(1, line.find('\0', 1) - 1)); // argv holds no zero
        }
        line.clear();
    }
    check_bench(args);
    check_tools(args);
    return 0;
}

extern "C" int LLVMFuzzerInitialize(int *, char ***) {
    fuzz_silence();
    common_log_pause(common_log_main());
    if (getenv("KVSPLIT_FUZZ_SEEDS")) {
        const auto flag = [](int i) { return std::string(1, char('B' + i)); }; // 'B' % 11 == 0
        const std::string seeds[] = {
            flag(0) + "8", flag(0) + "k8v4;k6v5\n" + flag(1) + "8;4,:2=8", flag(1) + "4,:2=8,-2:=16\n" + flag(2) + "q4_0",
            flag(3) + "k8v4\n" + flag(4) + "8\n" + flag(5) + "4", flag(6) + "q8_0\n" + flag(2) + "4\n" + flag(10) + "on",
            flag(8) + "q8_0\n" + flag(9) + "f16", flag(10) + "auto\n" + flag(7) + "kvq4",
        };
        int n = 0;
        for (const auto & text : seeds) {
            fuzz_write_seed("args-" + std::to_string(n++), std::vector<uint8_t>(text.begin(), text.end()));
        }
        _exit(0); // what is held to the end is no leak
    }
    // messages of refused command lines go to stderr, hundreds a second; libFuzzer has a copy of the descriptor
    return 0;
}
