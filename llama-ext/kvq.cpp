// SPDX-License-Identifier: MIT

#include "kvq-policy.h"

#include "kvq-types.h"

#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "llama-impl.h"
#include "llama-model.h"
#include "llama-model-loader.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <stdexcept>

#ifndef KVQ_LOCK_VERSION
#error "KVQ_LOCK_VERSION, KVQ_LOCK_SHA256 and KVQ_PATCHES_SHA256 come from the build"
#endif

// one line of the reasons kept for a caller; never the log
static thread_local std::string kvq_error;

void kvq_set_error(const std::string & why) {
    kvq_error = why;
}

const char * kvq_last_error(void) {
    return kvq_error.c_str();
}

static thread_local std::string kvq_logged;

void kvq_note_log(ggml_log_level level, const char * text) {
    if (level != GGML_LOG_LEVEL_ERROR) {
        return;
    }
    // "function: what happened\n": a name has no blanks
    const char * colon = strstr(text, ": ");
    const bool   named = colon && size_t(colon - text) == strcspn(text, " :");
    kvq_logged = named ? colon + 2 : text;
    while (!kvq_logged.empty() && kvq_logged.back() == '\n') {
        kvq_logged.pop_back();
    }
    std::replace(kvq_logged.begin(), kvq_logged.end(), '\n', ' ');
}

const char * kvq_last_logged(void) {
    return kvq_logged.c_str();
}

const char * kvq_build(void) {
    return KVQ_LOCK_VERSION " " KVQ_LOCK_SHA256 " " KVQ_PATCHES_SHA256;
}

//
// SPEC
//

namespace {

// exception of a SPEC; start and stop may be negative, as in Python
struct kvq_slice {
    int32_t   start = 0;
    int32_t   stop  = 0;
    int32_t   step  = 1;
    bool      has_start = false;
    bool      has_stop  = false;
    bool      single    = false; // one layer: start
    ggml_type type      = GGML_TYPE_COUNT;

    std::string text() const {
        std::string res;
        if (has_start || single) {
            res += std::to_string(start);
        }
        if (!single) {
            res += ":";
            if (has_stop) {
                res += std::to_string(stop);
            }
            if (step != 1) {
                res += ":" + std::to_string(step);
            }
        }
        return res;
    }
};

struct kvq_spec {
    ggml_type              type = GGML_TYPE_COUNT;
    std::vector<kvq_slice> slices;
    std::string            text; // canonical
};

std::string lower_trimmed(const std::string & s) {
    const char * blank = " \t\r\n";
    const size_t first = s.find_first_not_of(blank);
    if (first == std::string::npos) {
        return "";
    }
    std::string res = s.substr(first, s.find_last_not_of(blank) - first + 1);
    for (char & c : res) {
        c = c >= 'A' && c <= 'Z' ? char(c - 'A' + 'a') : c;
    }
    return res;
}

std::vector<std::string> split(const std::string & s, char delim) {
    std::vector<std::string> res(1);
    for (const char c : s) {
        if (c == delim) {
            res.emplace_back();
        } else {
            res.back() += c;
        }
    }
    return res;
}

ggml_type parse_type(const std::string & s) {
    for (const auto & t : kvq_cache_types) {
        if (s == ggml_type_name(t.type) || (t.bits && s == std::to_string(t.bits))) {
            return t.type;
        }
    }
    throw std::invalid_argument("'" + s + "' is no cache type; there are " + kvq_allowed());
}

// nine digits hold every layer there can be and can't overflow
int32_t parse_index(const std::string & s, const std::string & slice) {
    const size_t n_sign = !s.empty() && s[0] == '-' ? 1 : 0;
    const size_t n      = s.size() - n_sign;
    if (n == 0 || n > 9 || s.find_first_not_of("0123456789", n_sign) != std::string::npos) {
        throw std::invalid_argument("'" + slice + "' is no layer slice; write 3, :2, -2:, 10:20 or ::2");
    }
    return std::stoi(s);
}

kvq_slice parse_slice(const std::string & s) {
    kvq_slice res;

    std::vector<std::string> parts = split(s, ':');
    for (auto & part : parts) {
        part = lower_trimmed(part);
    }
    if (parts.size() > 3) {
        throw std::invalid_argument("'" + s + "' is no layer slice; write 3, :2, -2:, 10:20 or ::2");
    }
    if (parts.size() == 1) {
        res.single = true;
        res.start  = parse_index(parts[0], s);
        return res;
    }
    if (!parts[0].empty()) {
        res.has_start = true;
        res.start     = parse_index(parts[0], s);
    }
    if (!parts[1].empty()) {
        res.has_stop = true;
        res.stop     = parse_index(parts[1], s);
    }
    if (parts.size() == 3 && !parts[2].empty()) {
        res.step = parse_index(parts[2], s);
        if (res.step < 1) {
            throw std::invalid_argument("the step of slice '" + s + "' must be 1 or more");
        }
    }
    return res;
}

kvq_spec parse_spec(const std::string & spec) {
    kvq_spec res;

    const std::vector<std::string> parts = split(lower_trimmed(spec), ',');

    res.type = parse_type(lower_trimmed(parts[0]));
    res.text = ggml_type_name(res.type);

    for (size_t i = 1; i < parts.size(); i++) {
        const std::string part = lower_trimmed(parts[i]);
        const size_t      eq   = part.find('=');
        if (eq == std::string::npos) {
            throw std::invalid_argument("'" + part + "' is no exception; write SLICE=TYPE, e.g. :2=8");
        }
        kvq_slice slice = parse_slice(lower_trimmed(part.substr(0, eq)));
        slice.type      = parse_type(lower_trimmed(part.substr(eq + 1)));

        res.text += "," + slice.text() + "=" + ggml_type_name(slice.type);
        res.slices.push_back(slice);
    }
    return res;
}

std::vector<ggml_type> resolve(const kvq_spec & spec, int32_t n_layer) {
    std::vector<ggml_type> res(n_layer, spec.type);

    for (const auto & slice : spec.slices) {
        const auto outside = [&](const char * why) {
            return std::invalid_argument("slice '" + slice.text() + "' " + why + ": " + (n_layer == 0 ? "no layer stores" :
                "layers 0 to " + std::to_string(n_layer - 1) + " store") + " keys and values");
        };
        if (slice.single) {
            const int32_t il = slice.start < 0 ? slice.start + n_layer : slice.start;
            if (il < 0 || il >= n_layer) {
                throw outside("is out of range");
            }
            res[il] = slice.type;
            continue;
        }
        const int32_t start = !slice.has_start ? 0       : slice.start < 0 ? slice.start + n_layer : slice.start;
        const int32_t stop  = !slice.has_stop  ? n_layer : slice.stop  < 0 ? slice.stop  + n_layer : slice.stop;
        if (start < 0 || start > n_layer || stop < 0 || stop > n_layer) {
            throw outside("is out of range");
        }
        if (start >= stop) {
            throw outside("selects no layer");
        }
        for (int32_t il = start; il < stop; il += std::min(slice.step, stop - il)) {
            res[il] = slice.type;
        }
    }
    return res;
}

//
// handles
//

struct kvq_registry {
    std::mutex                   mutex;
    std::deque<kvq_spec>         specs; // a deque: text.c_str() stays where it is
    std::map<std::string, int>   index; // by canonical text
};

kvq_registry & registry() {
    static kvq_registry res;
    return res;
}

ggml_type intern(kvq_spec && spec) {
    auto & reg = registry();
    std::lock_guard<std::mutex> lock(reg.mutex);

    const auto it = reg.index.find(spec.text);
    if (it != reg.index.end()) {
        return ggml_type(GGML_TYPE_KVQ_POLICY + it->second);
    }
    const int id = int(reg.specs.size());
    reg.index[spec.text] = id;
    reg.specs.push_back(std::move(spec));
    return ggml_type(GGML_TYPE_KVQ_POLICY + id);
}

// nullptr if it is no handle
const kvq_spec * find(ggml_type type) {
    auto & reg = registry();
    std::lock_guard<std::mutex> lock(reg.mutex);

    const int64_t id = int64_t(type) - GGML_TYPE_KVQ_POLICY;
    return id >= 0 && id < int64_t(reg.specs.size()) ? &reg.specs[id] : nullptr;
}

// a handle's SPEC, or that of a plain cache type
kvq_spec spec_of(ggml_type type) {
    if (const kvq_spec * spec = find(type)) {
        return *spec;
    }
    for (const auto & t : kvq_cache_types) {
        if (t.type == type) {
            kvq_spec res;
            res.type = type;
            res.text = ggml_type_name(type);
            return res;
        }
    }
    const char * name = kvq_type_name(type);
    throw std::invalid_argument("type " + std::to_string(int(type)) + " (" + name +
        ") is no cache type; there are " + kvq_allowed());
}

template <typename T_res, typename T_fn>
T_res guarded(T_res on_error, T_fn && fn) {
    kvq_error.clear();
    try {
        return fn();
    } catch (const std::exception & e) {
        kvq_set_error(e.what());
        return on_error;
    }
}

} // namespace

std::string kvq_allowed() {
    std::string by_bits;
    std::string by_name;
    for (const auto & t : kvq_cache_types) {
        const std::string name = ggml_type_name(t.type);
        if (t.bits) {
            by_bits += (by_bits.empty() ? "" : ", ") + std::to_string(t.bits) + " (" + name + ")";
        } else {
            by_name += (by_name.empty() ? "" : ", ") + name;
        }
    }
    return by_bits + ", and by name " + by_name;
}

//
// weights
//

ggml_type kvq_format_type(const char * name) {
    for (const auto & t : kvq_cache_types) {
        if (kvq_get_format(t.type) && lower_trimmed(name) == ggml_type_name(t.type)) {
            return t.type;
        }
    }
    return GGML_TYPE_COUNT;
}

const char * kvq_not_for_weights(const char * name) {
    return kvq_format_type(name) != GGML_TYPE_COUNT ? " (a type of KV caches, not of weights)" : "";
}

static void check_weight_type(const char * what, ggml_type & type) {
    if (type == KVQ_UPSTREAM_TYPE_COUNT) {
        type = GGML_TYPE_COUNT;
    }
    if (type == GGML_TYPE_COUNT) {
        return;
    }
    const bool known = type >= 0 && type < GGML_TYPE_COUNT && ggml_blck_size(type) > 0;
    if (!known) {
        throw std::invalid_argument(std::string(what) + " " + std::to_string(type) + " is no type");
    }
    if (kvq_get_format(type)) {
        throw std::invalid_argument(std::string(what) + " " + ggml_type_name(type) + kvq_not_for_weights(ggml_type_name(type)) +
            "; give it to --kvq, --kvq-key or --kvq-val");
    }
}

llama_model_quantize_params kvq_quantize_params(llama_model_quantize_params params) {
    check_weight_type("output_tensor_type",   params.output_tensor_type);
    check_weight_type("token_embedding_type", params.token_embedding_type);
    for (const auto * t = params.tt_overrides; t && t->pattern; t++) {
        ggml_type type = t->type;
        check_weight_type("tensor type", type);
    }
    return params;
}

ggml_type kvq_parse_spec(const std::string & spec) {
    return intern(parse_spec(spec));
}

void kvq_parse_preset(const std::string & preset, ggml_type & type_k, ggml_type & type_v) {
    // the short forms are KVSplit's own
    static const std::map<std::string, std::string> shorts = {
        { "8", "k8v4" }, { "4", "k4v4" }, { "16", "k16v16" },
    };

    std::string text = lower_trimmed(preset);
    const auto it = shorts.find(text);
    if (it != shorts.end()) {
        text = it->second;
    }

    const size_t      v    = text.find('v');
    const std::string bits = "0123456789";
    const auto all_digits  = [&](const std::string & s) {
        return !s.empty() && s.find_first_not_of(bits) == std::string::npos;
    };
    if (v == std::string::npos || text[0] != 'k' || !all_digits(text.substr(1, v - 1)) || !all_digits(text.substr(v + 1))) {
        throw std::invalid_argument("'" + preset + "' is no preset; write k<bits>v<bits> such as k8v4, k6v5 or k3v3, "
            "or 8 (= k8v4), 4 (= k4v4), 16 (= f16); types by name or by layer go to --kvq-key and --kvq-val");
    }
    const ggml_type k = kvq_parse_spec(text.substr(1, v - 1));
    type_v = kvq_parse_spec(text.substr(v + 1));
    type_k = k;
}

ggml_type kvq_type_from_spec(const char * spec) {
    return guarded(GGML_TYPE_COUNT, [&] { return kvq_parse_spec(spec ? spec : ""); });
}

bool kvq_types_from_preset(const char * preset, ggml_type * type_k, ggml_type * type_v) {
    return guarded(false, [&] {
        ggml_type k;
        ggml_type v;
        kvq_parse_preset(preset ? preset : "", k, v);
        *type_k = k;
        *type_v = v;
        return true;
    });
}

const char * kvq_type_name(ggml_type type) {
    if (const kvq_spec * spec = find(type)) {
        return spec->text.c_str();
    }
    const char * name = type >= 0 && type < GGML_TYPE_COUNT ? ggml_type_name(type) : nullptr;
    return name ? name : "none";
}

ggml_type kvq_cache_type(int32_t i) {
    const int32_t n = sizeof(kvq_cache_types)/sizeof(kvq_cache_types[0]);
    return i >= 0 && i < n ? kvq_cache_types[i].type : GGML_TYPE_COUNT;
}

bool kvq_resolve(ggml_type type, int32_t n_layer, ggml_type * types) {
    return guarded(false, [&] {
        const auto res = resolve(spec_of(type), std::max(0, n_layer));
        std::copy(res.begin(), res.end(), types);
        return true;
    });
}

//
// a model's layers
//

// whether layer il stores keys and values in some context
static bool stores_kv(const llama_model & model, uint32_t il) {
    const auto & hparams = model.hparams;
    // every Falcon-H1 layer has both an attention cache and a recurrent state
    const bool recr = hparams.is_recr(il) && model.arch != LLM_ARCH_FALCON_H1;
    // nor has a feed-forward layer of Nemotron-H a cache, though its metadata may list KV heads for it
    const bool ffn  = (model.arch == LLM_ARCH_NEMOTRON_H || model.arch == LLM_ARCH_NEMOTRON_H_MOE) && hparams.n_ff(il) > 0;
    return hparams.has_kv(il) && !recr && !ffn && hparams.n_embd_k_gqa(il) > 0;
}

// Layers that a SLICE counts. No context holds both the trunk and the MTP layers, so each counts from 0,
// but for models whose trunk attends their extra layers, or that have nothing else.
static std::vector<uint32_t> kv_layers(const llama_model & model, bool mtp) {
    const auto & hparams = model.hparams;
    const bool   all     = hparams.router_layer >= 0 || hparams.n_layer() == 0;

    std::vector<uint32_t> res;
    if (llm_arch_is_recurrent(model.arch)) {
        return res;
    }
    for (uint32_t il = 0; il < hparams.n_layer_all; ++il) {
        if ((all || (il >= hparams.n_layer()) == mtp) && stores_kv(model, il)) {
            res.push_back(il);
        }
    }
    return res;
}

int32_t kvq_model_n_layer(const llama_model * model) {
    return int32_t(kv_layers(*model, false).size());
}

int32_t kvq_layer_index(const llama_model & model, uint32_t il) {
    const auto layers = kv_layers(model, il >= model.hparams.n_layer());
    const auto it     = std::find(layers.begin(), layers.end(), il);
    return it == layers.end() ? -1 : int32_t(it - layers.begin());
}

ggml_type kvq_layer_type(const llama_model & model, ggml_type type, uint32_t il) {
    const kvq_spec * spec = find(type);
    if (!spec) {
        return type;
    }
    const int32_t index = kvq_layer_index(model, il);
    return index < 0 ? spec->type : resolve(*spec, int32_t(kv_layers(model, il >= model.hparams.n_layer()).size()))[index];
}

bool kvq_is_quantized(const llama_model & model, ggml_type type) {
    for (const bool mtp : { false, true }) {
        for (const uint32_t il : kv_layers(model, mtp)) {
            if (ggml_is_quantized(kvq_layer_type(model, type, il))) {
                return true;
            }
        }
    }
    return false;
}

//
// model metadata
//

static const char * const KVQ_META[2] = { "kvq.key", "kvq.val" };

void kvq_model_load(const llama_model_loader & ml, std::unordered_map<std::string, std::string> & gguf_kv) {
    for (const char * key : KVQ_META) {
        const int64_t id = ml.metadata ? gguf_find_key(ml.metadata, key) : -1;
        if (id >= 0 && gguf_get_kv_type(ml.metadata, id) == GGUF_TYPE_ARRAY) {
            gguf_kv[key] = "neither text nor whole number"; // arrays are left out there; refused later
        }
        const auto it = ml.kv_overrides.find(key);
        if (it == ml.kv_overrides.end()) {
            continue;
        }
        switch (it->second.tag) {
            case LLAMA_KV_OVERRIDE_TYPE_STR: gguf_kv[key] = it->second.val_str;                 break;
            case LLAMA_KV_OVERRIDE_TYPE_INT: gguf_kv[key] = std::to_string(it->second.val_i64); break;
            default:                         gguf_kv[key] = "neither text nor whole number";    break; // refused later
        }
    }
}

bool kvq_model_set_policy(llama_model * model, const char * key, const char * val) {
    return guarded(false, [&] {
        const char * specs[2] = { key, val };
        const int    n_layer  = kvq_model_n_layer(model);
        for (const char * spec : specs) {
            if (spec && *spec) {
                resolve(parse_spec(spec), n_layer);
            }
        }
        for (int side = 0; side < 2; side++) {
            if (specs[side] && *specs[side]) {
                model->gguf_kv[KVQ_META[side]] = parse_spec(specs[side]).text;
            } else if (specs[side]) {
                model->gguf_kv.erase(KVQ_META[side]);
            }
        }
        return true;
    });
}

//
// context creation
//

namespace {

const char * const SIDE_NAME[2] = { "keys",      "values"    };
const char * const SIDE_FLAG[2] = { "--kvq-key", "--kvq-val" };

// every message ends with a way out
std::string check_head(const char * side, ggml_type type, uint32_t n_head, uint32_t il, const char * flag) {
    return std::string("the ") + side + " can't be stored as " + ggml_type_name(type) + ": its blocks of " +
        std::to_string(ggml_blck_size(type)) + " values do not divide the head size " + std::to_string(n_head) +
        " of layer " + std::to_string(il) + "; use " + flag + " 16";
}

// Whether a device can write rows of a type: it would be asked to, and a backend without the kernel ends the process.
bool can_store(ggml_backend_dev_t dev, ggml_type type, int64_t n) {
    ggml_init_params ip = { 4*ggml_tensor_overhead(), nullptr, true };
    ggml_context_ptr ctx(ggml_init(ip));
    ggml_tensor * cache = ggml_new_tensor_2d(ctx.get(), type, n, 1);
    ggml_tensor * row   = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, n, 1);
    ggml_tensor * index = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_I64, 1);
    return ggml_backend_dev_supports_op(dev, ggml_set_rows(ctx.get(), cache, row, index));
}

void check_device(const llama_model & model, const llama_context_params & params, int side, ggml_type type, uint32_t il, int64_t n) {
    ggml_backend_dev_t dev = params.offload_kqv ? model.dev_layer(int(il)) : nullptr;
    if (!dev || n == 0 || !kvq_get_format(type) || can_store(dev, type, n)) {
        return;
    }
    throw std::invalid_argument(std::string("the ") + SIDE_NAME[side] + " can't be stored as " + ggml_type_name(type) + " on " +
        ggml_backend_dev_name(dev) + ", which has no kernel for it yet: use a type of upstream's (" + SIDE_FLAG[side] +
        " q8_0, q5_0, q4_0), or keep the cache in host memory (--no-kv-offload)");
}

double memory_of(ggml_backend_dev_t dev) {
    size_t free  = 0;
    size_t total = 0;
    if (dev) {
        ggml_backend_dev_memory(dev, &free, &total);
    }
    return double(total);
}

// total: what there is; 0: an allocation failed
std::string too_large(double n_bytes, double n_values, const char * where, double total) {
    const double mib = 1024.0*1024.0;
    std::string narrower;
    for (const char * preset : { "k8v8", "k8v4", "k4v4" }) {
        ggml_type type_k;
        ggml_type type_v;
        kvq_parse_preset(preset, type_k, type_v);
        const auto bytes_per_value = [](ggml_type handle) {
            const ggml_type type = spec_of(handle).type;
            return double(ggml_type_size(type))/ggml_blck_size(type);
        };
        const double n = n_values*(bytes_per_value(type_k) + bytes_per_value(type_v))/2.0;
        if (n < 0.95*n_bytes && (total == 0 || n <= total)) {
            narrower += format("%s--kvq %s (%.2f MiB)", narrower.empty() ? "" : ", ", preset, n/mib);
        }
    }
    return format("the KV cache needs %.2f MiB of %s memory, ", n_bytes/mib, where) +
        (total > 0 ? format("more than there is (%.2f MiB)", total/mib) : std::string("and the allocation failed")) +
        ": use a smaller context (-c)" + (narrower.empty() ? "" : " or narrower types: ") + narrower;
}

// Refuses a context that no memory can hold before anything is made for it: the kernel may promise host
// memory that it does not have, and kill the process that touches it.
void check_size(const llama_model & model, const llama_context_params & params, const std::vector<uint32_t> & layers,
        const std::vector<ggml_type> & types_k, const std::vector<ggml_type> & types_v) {
    const auto & hparams = model.hparams;
    const double n_cells = params.n_ctx ? params.n_ctx : hparams.n_ctx_train;

    double n_bytes  = 0;
    double n_values = 0;
    for (size_t i = 0; i < layers.size(); i++) {
        const uint32_t il = layers[i];
        if (hparams.is_swa(il)) {
            continue; // has fewer cells
        }
        const int64_t n_k = hparams.n_embd_k_gqa(il);
        const int64_t n_v = hparams.is_mla() ? 0 : hparams.n_embd_v_gqa(il);
        n_bytes  += n_cells*(ggml_row_size(types_k[i], n_k) + ggml_row_size(types_v[i], n_v));
        n_values += n_cells*(n_k + n_v);
    }

    double total = memory_of(ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU));
    for (const auto & dev : model.devices) {
        total += memory_of(dev.dev);
    }
    // a measuring context allocates no tensors, but the book-keeping of its cells, about 64 bytes each
    const double needed = hparams.no_alloc ? 64*n_cells : n_bytes;
    if (total > 0 && needed > total) {
        throw std::runtime_error(too_large(n_bytes, n_values, "the machine's", total));
    }
}

void settle(const llama_model & model, llama_context_params & params) {
    const auto & hparams = model.hparams;
    const bool   mtp     = params.ctx_type == LLAMA_CONTEXT_TYPE_MTP;
    const auto   layers  = kv_layers(model, mtp);

    ggml_type * types[2] = { &params.type_k, &params.type_v };
    std::vector<ggml_type> resolved[2];

    for (int side = 0; side < 2; side++) {
        const auto meta = model.gguf_kv.find(KVQ_META[side]);
        std::string from = SIDE_FLAG[side];
        try {
            // an MTP context has types of its own, the model's policy is for its trunk
            if (*types[side] == GGML_TYPE_F16 && meta != model.gguf_kv.end() && !mtp) {
                from = "metadata " + meta->first;
                *types[side] = kvq_parse_spec(meta->second);
            }
            resolved[side] = resolve(spec_of(*types[side]), int32_t(layers.size()));
        } catch (const std::invalid_argument & e) {
            throw std::invalid_argument(from + " (cache type of the " + SIDE_NAME[side] + "): " + e.what());
        }
    }

    const bool one_row = hparams.is_mla() || model.arch == LLM_ARCH_DEEPSEEK4;

    bool quantized_v = false;
    for (size_t i = 0; i < layers.size(); i++) {
        const uint32_t  il = layers[i];
        const ggml_type k  = resolved[0][i];
        const ggml_type v  = resolved[1][i];

        if (one_row && k != v) {
            throw std::invalid_argument(std::string("this model stores keys and values as one row (MLA), which can't be ") +
                ggml_type_name(k) + " and " + ggml_type_name(v) + " at once: give --kvq-key and --kvq-val the same types, "
                "e.g. --kvq k8v8");
        }
        if (hparams.n_embd_head_k(il) % ggml_blck_size(k) != 0) {
            throw std::invalid_argument(check_head(SIDE_NAME[0], k, hparams.n_embd_head_k(il), il, SIDE_FLAG[0]));
        }
        if (hparams.n_embd_head_v(il) % ggml_blck_size(v) != 0) {
            throw std::invalid_argument(check_head(SIDE_NAME[1], v, hparams.n_embd_head_v(il), il, SIDE_FLAG[1]));
        }
        check_device(model, params, 0, k, il, hparams.n_embd_k_gqa(il));
        check_device(model, params, 1, v, il, hparams.n_embd_v_gqa(il));
        quantized_v = quantized_v || ggml_is_quantized(v);
    }

    if (quantized_v && params.flash_attn_type == LLAMA_FLASH_ATTN_TYPE_DISABLED) {
        throw std::invalid_argument(std::string("quantized values (") + kvq_type_name(params.type_v) + ") need flash attention, "
            "and it is off: use -fa on, or --kvq-val 16");
    }
    if (quantized_v && params.flash_attn_type == LLAMA_FLASH_ATTN_TYPE_AUTO) {
        LLAMA_LOG_INFO("%s: flash attention turned on: quantized values need it\n", __func__);
        params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
    }
    check_size(model, params, layers, resolved[0], resolved[1]);
}

} // namespace

bool kvq_context_params(const llama_model & model, llama_context_params & params) {
    return guarded(false, [&] {
        try {
            settle(model, params);
        } catch (const std::exception & e) {
            LLAMA_LOG_ERROR("kvq: %s\n", e.what());
            throw;
        }
        return true;
    });
}

void kvq_check_shared(const llama_model & model, ggml_type type, uint32_t il, const ggml_tensor * shared) {
    if (!shared || !find(type) || kvq_layer_type(model, type, il) == shared->type) {
        return;
    }
    throw std::invalid_argument("layer " + std::to_string(il) + " uses the cells of the target model's cache, stored as " +
        ggml_type_name(shared->type) + ": the draft's cache types can't be chosen apart; drop --kvq-draft, --kvq-key-draft, "
        "--kvq-val-draft and -ctkd, -ctvd");
}

void kvq_check_alloc(ggml_context * ctx, ggml_backend_buffer_type_t buft, bool failed) {
    double n_bytes  = 0;
    double n_values = 0;
    for (ggml_tensor * t = ggml_get_first_tensor(ctx); t != nullptr; t = ggml_get_next_tensor(ctx, t)) {
        if (!t->view_src) {
            n_bytes  += ggml_nbytes(t);
            n_values += ggml_nelements(t);
        }
    }
    ggml_backend_dev_t dev = ggml_backend_buft_get_device(buft);
    if (!dev && ggml_backend_buft_is_host(buft)) {
        dev = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    }
    const double total = memory_of(dev);
    if (failed || (total > 0 && n_bytes > total)) {
        throw std::runtime_error(too_large(n_bytes, n_values, ggml_backend_buft_name(buft), failed ? 0 : total));
    }
}
