// SPDX-License-Identifier: MIT
//
// What the fuzz targets share: files in memory, models, seeds.
//
// Environment:
//     KVSPLIT_FUZZ_MODELS   folder with the models of models.py
//     KVSPLIT_FUZZ_SEEDS    write seeds into this folder and end, in place of fuzzing

#pragma once

#include "llama.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

// what must hold whatever is read; libFuzzer keeps the input that ends here
#define FUZZ_CHECK(cond, ...) do { \
        if (!(cond)) { \
            fprintf(stderr, "%s:%d: %s: ", __FILE__, __LINE__, #cond); \
            fprintf(stderr, __VA_ARGS__); \
            fprintf(stderr, "\n"); \
            abort(); \
        } \
    } while (0)

extern "C" size_t LLVMFuzzerMutate(uint8_t * data, size_t size, size_t max_size);

// a file that has a path but lies in memory
class fuzz_file {
public:
    fuzz_file() : fd(memfd_create("kvsplit-fuzz", MFD_CLOEXEC)), name("/proc/self/fd/" + std::to_string(fd)) {
        FUZZ_CHECK(fd >= 0, "no file in memory");
    }

    ~fuzz_file() { close(fd); }

    const char * path() const { return name.c_str(); }

    void write(const void * data, size_t size) {
        FUZZ_CHECK(ftruncate(fd, 0) == 0, "the file can't be emptied");
        FUZZ_CHECK(pwrite(fd, data, size, 0) == ssize_t(size), "the file can't be written");
    }

private:
    int         fd;
    std::string name;
};

inline std::vector<uint8_t> fuzz_read(const std::string & path) {
    FILE * file = fopen(path.c_str(), "rb");
    FUZZ_CHECK(file && fseek(file, 0, SEEK_END) == 0, "%s can't be read", path.c_str());
    std::vector<uint8_t> res(ftell(file));
    rewind(file);
    FUZZ_CHECK(fread(res.data(), 1, res.size(), file) == res.size(), "%s can't be read", path.c_str());
    fclose(file);
    return res;
}

inline std::string fuzz_model_path(const char * name) {
    const char * folder = getenv("KVSPLIT_FUZZ_MODELS");
    FUZZ_CHECK(folder, "set KVSPLIT_FUZZ_MODELS to a folder that models.py has written");
    return std::string(folder) + "/" + name + ".gguf";
}

inline llama_model * fuzz_model(const char * path) {
    llama_model_params params = llama_model_default_params();
    params.load_mode = LLAMA_LOAD_MODE_NONE; // a file in memory may be written again
    return llama_model_load_from_file(path, params);
}

inline void fuzz_silence() {
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
}

inline void fuzz_write_seed(const std::string & name, const std::vector<uint8_t> & data) {
    const std::string path = std::string(getenv("KVSPLIT_FUZZ_SEEDS")) + "/" + name;
    FILE * file = fopen(path.c_str(), "wb");
    FUZZ_CHECK(file && fwrite(data.data(), 1, data.size(), file) == data.size() && fclose(file) == 0, "no seed %s", path.c_str());
}
