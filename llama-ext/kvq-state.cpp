// SPDX-License-Identifier: MIT

#include "kvq-state.h"

#include "llama-hparams.h"
#include "llama-impl.h"
#include "llama-kv-cache.h"
#include "llama-model.h"

#include "ggml-cpp.h"

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <random>
#include <stdexcept>
#include <system_error>

#ifndef _WIN32
    #include <sys/stat.h>
    #include <unistd.h>
#endif

namespace fs = std::filesystem;

static constexpr uint32_t MARK    = 1u << 31; // no model has so many layers
static constexpr uint32_t VERSION = 1;

// ---- identity ------------------------------------------------------------------------------------------

static bool quantized(int32_t type) {
    return type >= 0 && ggml_is_quantized(ggml_type(type));
}

void kvq_state::rotations(const llama_kv_cache & cache, const llama_model & model, const llama_hparams & hparams) {
    // the tensors that graphs multiply by: a context without memory, sizes only
    const ggml_init_params params = { 2*ggml_tensor_overhead(), nullptr, true };
    ggml_context_ptr ctx { ggml_init(params) };

    const ggml_tensor * k = cache.build_input_k_rot(ctx.get());
    const ggml_tensor * v = cache.build_input_v_rot(ctx.get());

    // upstream's rule for a cache: heads of one size, a multiple of 64; the rows of an MLA model are stored as they are
    def_k = hparams.n_embd_head_k() % 64 == 0 && !model.hparams.is_mla();
    def_v = hparams.n_embd_head_v() % 64 == 0;

    for (auto & e : entries) {
        e.rot_k = k && quantized(e.type_k) ? uint32_t(k->ne[0]) : 0;
        e.rot_v = v && quantized(e.type_v) ? uint32_t(v->ne[0]) : 0;
        def_k = def_k && hparams.n_embd_head_k(e.il) == hparams.n_embd_head_k(entries[0].il);
        def_v = def_v && hparams.n_embd_head_v(e.il) == hparams.n_embd_head_v(entries[0].il);
    }
}

uint32_t kvq_state::n_layer() const {
    for (const auto & e : entries) {
        if (quantized(e.type_k) || quantized(e.type_v)) {
            return uint32_t(entries.size()) | MARK;
        }
    }
    return uint32_t(entries.size());
}

void kvq_state::write(llama_io_write_i & io) const {
    if (!(n_layer() & MARK)) {
        return;
    }
    const uint32_t n = uint32_t(entries.size());
    io.write(&VERSION, sizeof(VERSION));
    io.write(&n, sizeof(n));
    for (const auto & e : entries) {
        io.write(&e.il,     sizeof(e.il));
        io.write(&e.type_k, sizeof(e.type_k));
        io.write(&e.type_v, sizeof(e.type_v));
        io.write(&e.rot_k,  sizeof(e.rot_k));
        io.write(&e.rot_v,  sizeof(e.rot_v));
    }
}

// an id out of a file: it may be anything
static std::string type_name(int32_t id) {
    for (int32_t i = 0; kvq_cache_type(i) != GGML_TYPE_COUNT; i++) {
        if (int32_t(kvq_cache_type(i)) == id) {
            return ggml_type_name(ggml_type(id));
        }
    }
    return "type " + std::to_string(id);
}

std::string kvq_state::describe(const entry & e) {
    const auto side = [](const char * name, int32_t type, uint32_t rot) {
        return name + type_name(type) + (rot ? " rotated by " + std::to_string(rot) : " not rotated");
    };
    return side("keys ", e.type_k, e.rot_k) + (e.type_v < 0 ? ", no values" : side(", values ", e.type_v, e.rot_v));
}

bool kvq_state::read(llama_io_read_i & io, uint32_t & n_layer, bool v_trans_state, bool v_trans) const {
    if (v_trans_state != v_trans) {
        LLAMA_LOG_ERROR("%s: the saved state was made with flash attention %s, and here it is %s: use -fa %s, or make the state anew\n",
            __func__, v_trans_state ? "off" : "on", v_trans ? "off" : "on", v_trans_state ? "off" : "on");
        return false;
    }
    if (!(n_layer & MARK)) {
        for (const auto & e : entries) {
            if ((quantized(e.type_k) && def_k && !e.rot_k) || (quantized(e.type_v) && def_v && !e.rot_v)) {
                LLAMA_LOG_ERROR("%s: the saved state doesn't say whether its rows are rotated, as a llama.cpp without kvq writes it, so "
                    "they are taken to be; in this context layer %u has %s: start without LLAMA_ATTN_ROT_DISABLE, or make the state anew\n",
                    __func__, e.il, describe(e).c_str());
                return false;
            }
        }
        return true;
    }
    n_layer &= ~MARK;

    uint32_t version;
    uint32_t n;
    io.read(&version, sizeof(version));
    if (version != VERSION) {
        LLAMA_LOG_ERROR("%s: the saved state has a record of version %u, this build reads version %u\n", __func__, version, VERSION);
        return false;
    }
    io.read(&n, sizeof(n));
    if (n != entries.size() || n != n_layer) {
        LLAMA_LOG_ERROR("%s: the saved state is of %u layers, this cache has %zu\n", __func__, n, entries.size());
        return false;
    }

    size_t n_differ = 0;
    bool   types    = false;
    std::string first;
    for (const auto & e : entries) {
        entry was = {};
        io.read(&was.il,     sizeof(was.il));
        io.read(&was.type_k, sizeof(was.type_k));
        io.read(&was.type_v, sizeof(was.type_v));
        io.read(&was.rot_k,  sizeof(was.rot_k));
        io.read(&was.rot_v,  sizeof(was.rot_v));
        if (was.il != e.il) {
            LLAMA_LOG_ERROR("%s: the saved state has layer %u where this cache has layer %u\n", __func__, was.il, e.il);
            return false;
        }
        const bool same_types = was.type_k == e.type_k && was.type_v == e.type_v;
        if (same_types && was.rot_k == e.rot_k && was.rot_v == e.rot_v) {
            continue;
        }
        types = types || !same_types;
        if (n_differ++ == 0) {
            first = "layer " + std::to_string(e.il) + " was saved with " + describe(was) + ", and has " + describe(e) + " here";
        }
    }
    if (n_differ > 0) {
        LLAMA_LOG_ERROR("%s: the saved state means something else in this context: %s (%zu of %zu layers differ); use %s as when it was "
            "saved, or make the state anew\n", __func__, first.c_str(), n_differ, entries.size(),
            types ? "the cache types (--kvq, --kvq-key, --kvq-val)" : "LLAMA_ATTN_ROT_DISABLE");
    }
    return n_differ == 0;
}

void kvq_state::assumed() const {
    if (n_layer() & MARK) {
        LLAMA_LOG_WARN("%s: the saved state doesn't say whether its rows are rotated, as a llama.cpp without kvq writes it: the default "
            "is assumed, layer %u with %s\n", __func__, entries[0].il, describe(entries[0]).c_str());
    }
}

void kvq_state::log_types(const char * side, int32_t was, int32_t is, uint32_t il) {
    LLAMA_LOG_ERROR("%s: layer %u was saved with %s %s, and has %s here: use the cache types (--kvq, --kvq-key, --kvq-val) as when it was "
        "saved, or make the state anew\n", __func__, il, side, type_name(was).c_str(), type_name(is).c_str());
}

// whether all of n words of 16 bits, stride bytes apart, have an exponent that isn't all ones
static bool finite16(const uint8_t * data, size_t n, size_t stride, uint16_t exponent) {
    bool bad = false;
    for (size_t i = 0; i < n; i++) {
        uint16_t w;
        memcpy(&w, data + i*stride, sizeof(w));
        bad |= (w & exponent) == exponent;
    }
    return !bad;
}

void kvq_check_rows(const ggml_tensor * t, const void * data_, size_t size) {
    const uint8_t * data = (const uint8_t *) data_;
    const char    * name = t->view_src ? t->view_src->name : t->name;
    if (strncmp(name, "cache_r_", 8) == 0 || strncmp(name, "cache_s_", 8) == 0) {
        return;
    }
    static constexpr uint16_t half = 0x7c00;
    static constexpr uint16_t bf16 = 0x7f80; // and the upper half of a float

    const size_t block = ggml_type_size(t->type);
    const size_t n     = size/block;
    bool ok = true;
    switch (t->type) {
        case GGML_TYPE_F32:  ok = finite16(data + 2, n, 4, bf16); break;
        case GGML_TYPE_F16:  ok = finite16(data, n, 2, half);     break;
        case GGML_TYPE_BF16: ok = finite16(data, n, 2, bf16);     break;
        case GGML_TYPE_Q4_1:
        case GGML_TYPE_Q5_1: ok = finite16(data, n, block, half) && finite16(data + 2, n, block, half); break;
        default:             ok = finite16(data, n, block, half); break; // the scale is in front of every other block
    }
    if (!ok) {
        throw std::runtime_error(format("the saved state holds what is no number (%s)", name));
    }
}

// ---- files ---------------------------------------------------------------------------------------------

kvq_new_file::kvq_new_file(const char * path_) : path(path_) {
    std::error_code ec;
    fs::path target = fs::u8path(path);
    for (int i = 0; i < 40 && fs::is_symlink(fs::symlink_status(target, ec)); i++) { // also of what isn't there yet
        target = target.parent_path() / fs::read_symlink(target, ec);
    }
    const fs::file_status status = fs::status(target, ec);
    if (fs::exists(status) && !fs::is_regular_file(status)) {
        out = std::make_unique<llama_file>(path.c_str(), "wb");
        return;
    }
    path = target.u8string();
    if (fs::exists(status)) {
        llama_file(path.c_str(), "r+b"); // throws if it is protected, which a rename wouldn't notice
    }

    if (fs::exists(status) && fs::hard_link_count(target, ec) > 1 && !ec) {
        out = std::make_unique<llama_file>(path.c_str(), "wb"); // its other names would keep the old rows
        return;
    }

    std::random_device random;
    const std::string name = format(".kvq-%08x%08x.partial", random(), random());
    aside = (target.parent_path() / fs::u8path(name)).u8string();
    errno = 0;
    try {
        out = std::make_unique<llama_file>(aside.c_str(), "wbx"); // never into what is there
    } catch (const std::runtime_error &) {
        const int why = errno;
        aside.clear();
        if (fs::exists(status) && (why == EACCES || why == EPERM || why == EROFS)) {
            out = std::make_unique<llama_file>(path.c_str(), "wb");
            return;
        }
        throw std::runtime_error(format("failed to write %s: %s", path.c_str(), strerror(why)));
    }
    if (fs::exists(status)) {
#ifndef _WIN32
        struct stat old;
        if (stat(path.c_str(), &old) == 0 && (old.st_uid != geteuid() || old.st_gid != getegid()) &&
                fchown(out->file_id(), old.st_uid, old.st_gid) != 0) {
            fs::remove(fs::u8path(aside), ec); // another's, and it has to stay so
            aside.clear();
            out = std::make_unique<llama_file>(path.c_str(), "wb");
            return;
        }
#endif
        fs::permissions(fs::u8path(aside), status.permissions(), ec);
    }
}

kvq_new_file::~kvq_new_file() {
    if (!aside.empty()) {
        out.reset();
        std::error_code ec;
        fs::remove(fs::u8path(aside), ec);
    }
}

void kvq_new_file::commit() {
    try {
        out->seek(0, SEEK_END); // hands over what is buffered, and fails if there is no room for it
    } catch (const std::runtime_error &) {
        throw std::runtime_error(format("failed to write %s: %s", path.c_str(), strerror(errno)));
    }
#ifndef _WIN32
    if (fsync(out->file_id()) != 0 && errno != EINVAL && errno != EROFS && errno != ENOTSUP) { // pipes and devices have nothing to sync
        throw std::runtime_error(format("failed to write %s: %s", path.c_str(), strerror(errno)));
    }
#endif
    out.reset();
    if (aside.empty()) {
        return;
    }
    std::error_code ec;
    fs::rename(fs::u8path(aside), fs::u8path(path), ec);
    if (ec == std::errc::operation_not_permitted || ec == std::errc::permission_denied || ec == std::errc::device_or_resource_busy) {
        // another's file in a folder like /tmp, or a file that is a mount by itself: it may be written, not replaced
        fs::copy_file(fs::u8path(aside), fs::u8path(path), fs::copy_options::overwrite_existing, ec);
        fs::remove(fs::u8path(aside));
    }
    if (ec) {
        throw std::runtime_error(format("failed to write %s: %s", path.c_str(), ec.message().c_str()));
    }
    aside.clear();
}
