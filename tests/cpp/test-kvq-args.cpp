// SPDX-License-Identifier: MIT
//
// Which source's cache type wins: config files and presets, environment, command line.

#include "arg.h"
#include "common.h"
#include "preset.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
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

// "K V" of a command line, or "error"
static std::string parse(std::vector<std::string> args) {
    args.insert(args.begin(), { "test", "-m", "model.gguf" });
    std::vector<char *> argv;
    for (auto & arg : args) {
        argv.push_back(&arg[0]);
    }
    common_params params;
    if (!common_params_parse(int(argv.size()), argv.data(), params, LLAMA_EXAMPLE_COMPLETION)) {
        return "error";
    }
    return std::string(kvq_type_name(params.cache_type_k)) + " " + kvq_type_name(params.cache_type_v) +
        (params.flash_attn_type == LLAMA_FLASH_ATTN_TYPE_ENABLED ? " fa" : "");
}

static void expect(const std::vector<std::string> & args, const std::string & res) {
    std::string line;
    for (const auto & arg : args) {
        line += arg + " ";
    }
    const std::string got = parse(args);
    check(got == res, line + "gives '" + got + "', not '" + res + "'");
}

using map = std::map<std::string, std::string>;

// the options of one preset merged into another, as "name=value name=value" in the order of the flags
static std::string merged(const map & far, const map & near) {
    common_preset_context ctx(LLAMA_EXAMPLE_SERVER);
    const auto make = [&](const map & options) {
        common_preset preset;
        for (const auto & [env, value] : options) {
            preset.set_option(ctx, env, value);
        }
        return preset;
    };
    common_preset res = make(far);
    res.merge(make(near));
    std::string text;
    for (const auto & [opt, value] : res.options) {
        text += (text.empty() ? "" : " ") + std::string(opt.env) + "=" + value;
    }
    return text;
}

int main() {
    expect({}, "f16 f16");
    expect({ "--kvq", "8" }, "q8_0 kvq4");
    expect({ "--kvq-key", "4,:2=8" }, "kvq4,:2=q8_0 f16");
    expect({ "--kvq", "k8v8", "--kvq-val", "4" }, "q8_0 kvq4");
    expect({ "--kvq-val", "4", "--kvq", "k8v8" }, "q8_0 kvq4");
    expect({ "-ctk", "q8_0", "--kvq-val", "4" }, "q8_0 kvq4");
    expect({ "--flash-attn", "--kvq", "8" }, "q8_0 kvq4 fa");
    expect({ "--kvq", "8", "-fa" }, "q8_0 kvq4 fa");
    expect({ "-fa", "off", "--kvq", "16" }, "f16 f16");

    expect({ "--kvq", "8", "-ctk", "f16" }, "error");
    expect({ "-ctk", "f16", "--kvq", "8" }, "error");
    expect({ "--kvq-val", "4", "-ctv", "kvq4" }, "error");
    expect({ "--kvq", "6" }, "error");
    expect({ "--kvq" }, "error");

    setenv("LLAMA_ARG_KVQ", "k5v4", 1);
    expect({}, "kvq5 kvq4");
    expect({ "--kvq-key", "8" }, "q8_0 kvq4");
    expect({ "-ctk", "f16" }, "f16 kvq4");
    expect({ "--kvq", "16" }, "f16 f16");
    setenv("LLAMA_ARG_KVQ_KEY", "16", 1);
    expect({}, "f16 kvq4");
    expect({ "--kvq", "8" }, "q8_0 kvq4"); // the command line is nearer than the more specific variable
    unsetenv("LLAMA_ARG_KVQ_KEY");
    setenv("LLAMA_ARG_CACHE_TYPE_V", "q8_0", 1);
    expect({}, "error");
    unsetenv("LLAMA_ARG_KVQ");
    expect({ "--kvq", "8" }, "q8_0 kvq4");
    unsetenv("LLAMA_ARG_CACHE_TYPE_V");

    const std::string kvq = "LLAMA_ARG_KVQ", key = "LLAMA_ARG_KVQ_KEY", val = "LLAMA_ARG_KVQ_VAL", ctk = "LLAMA_ARG_CACHE_TYPE_K";
    const struct { map far; map near; std::string res; } merges[] = {
        { { { kvq, "8" } }, { { ctk, "f16" } },               val + "=kvq4 " + ctk + "=f16" },
        { { { ctk, "f16" } }, { { kvq, "8" } },               kvq + "=8" },
        { { { key, "16" } }, { { kvq, "8" } },                kvq + "=8" },
        { { { kvq, "8" }, { val, "5" } }, { { key, "16" } },  key + "=16 " + val + "=5" },
        { { { kvq, "8" } }, { { kvq, "4" } },                 kvq + "=4" },
        { { { kvq, "8" } }, {},                               kvq + "=8" },
    };
    for (const auto & t : merges) {
        const std::string res = merged(t.far, t.near);
        check(res == t.res, "merged '" + res + "', not '" + t.res + "'");
    }

    printf("%d passed, %d failed\n", n_passed, n_failed);
    return n_failed ? 1 : 0;
}
