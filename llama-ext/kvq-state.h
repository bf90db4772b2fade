// SPDX-License-Identifier: MIT
//
// Saved states: what the rows of a cache mean, written beside them; and files that are replaced as a whole.
//
// For each stream of a cache that has cells upstream writes
//
//     u32 v_trans, u32 n_layer, then layer by layer: i32 type, u64 row size, rows
//
// So types are there, and what was done to rows before they were stored is not. Where any layer is quantized,
// n_layer has its highest bit set, and a record follows it:
//
//     u32 version = 1, u32 n_layer, n_layer times { u32 layer of the model,
//                                                   i32 type of K, i32 type of V (-1: no V),
//                                                   u32 rotation of K, u32 rotation of V }
//
// in the byte order of the machine, as all of the file. A rotation is the size of the Hadamard matrix that
// each head was multiplied by in parts, 0 for none.
//
// A reader without this sees a number of layers that no model has, and refuses. A cache of plain float rows
// has nothing to add, and is written as upstream writes it. A quantized state without a record was written
// by upstream: its rows are taken to be rotated as upstream rotates them unless told otherwise.

#pragma once

#include "kvq-policy.h"

#include "llama-io.h"
#include "llama-mmap.h"

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

class llama_kv_cache;

class kvq_state {
public:
    // hparams: of the cache, which may be a changed copy of the model's; layers: what it stores, with members il, k and v
    template <typename T_layer>
    kvq_state(const llama_kv_cache & cache, const llama_model & model, const llama_hparams & hparams, const std::vector<T_layer> & layers) {
        for (const auto & layer : layers) {
            entries.push_back({ layer.il, type_of(layer.k), type_of(layer.v), 0, 0 });
        }
        rotations(cache, model, hparams);
    }

    // what stands in the place of the number of layers
    uint32_t n_layer() const;

    void write(llama_io_write_i & io) const;

    // Takes the mark from n_layer, and reads what it announces. v_trans: whether the values stand in columns,
    // as without flash attention, in the state and here. false, with the reason logged, if the rows that
    // follow mean something else here. Throws what io throws.
    bool read(llama_io_read_i & io, uint32_t & n_layer, bool v_trans_state, bool v_trans) const;

    // Says what was assumed of a state without a record, if there was anything to assume.
    void assumed() const;

    // Logs that a layer's keys or values ("keys", "values") were saved as another type than they have here.
    static void log_types(const char * side, int32_t was, int32_t is, uint32_t il);

private:
    struct entry {
        uint32_t il;
        int32_t  type_k;
        int32_t  type_v;
        uint32_t rot_k;
        uint32_t rot_v;
    };

    static int32_t type_of(const ggml_tensor * t) {
        return t ? int32_t(t->type) : -1;
    }

    void rotations(const llama_kv_cache & cache, const llama_model & model, const llama_hparams & hparams);

    static std::string describe(const entry & e);

    std::vector<entry> entries;
    bool def_k = false; // quantized rows of K are rotated where nobody asked for something else
    bool def_v = false;
};

// Throws std::runtime_error if rows out of a saved state, size bytes in t's type, hold what is no number.
// Recurrent states are left out: an infinity may be meant there.
void kvq_check_rows(const ggml_tensor * t, const void * data, size_t size);

// ---- files ---------------------------------------------------------------------------------------------

// A file that is written beside its place and takes it when it is whole: whatever goes wrong before, the
// file that was there stays as it was. What is no regular file (a pipe, a device) is written to directly,
// and so is a file in a folder that nothing can be added to, or that can't be replaced by the same file for everybody (a
// mount by itself, a file of several names, another's). Symbolic links are followed. A process that is killed leaves a
// .kvq-*.partial file.
// Throws std::runtime_error that names the path.
class kvq_new_file {
public:
    explicit kvq_new_file(const char * path);
    ~kvq_new_file();

    kvq_new_file(const kvq_new_file &) = delete;
    kvq_new_file & operator=(const kvq_new_file &) = delete;

    llama_file & file() { return *out; }

    // Flushes, and puts the file in its place.
    void commit();

private:
    std::string path;
    std::string aside; // "": written in place
    std::unique_ptr<llama_file> out;
};
