// SPDX-License-Identifier: MIT

#include "kvq-report.h"

#include "kvq-policy.h"

#include "llama-context.h"
#include "llama-graph.h"
#include "llama-impl.h"
#include "llama-model.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <map>
#include <tuple>



namespace {

// the tensor whose memory t looks into
const ggml_tensor * root(const ggml_tensor * t) {
    while (t && t->view_src) {
        t = t->view_src;
    }
    return t;
}

// layer number at the end of "cache_k_l12", with any tag after "cache_"; -1 if the name is none of side's
int layer_of(const char * name, char side) {
    if (strncmp(name, "cache_", 6) != 0) {
        return -1;
    }
    const char mark[] = { side, '_', 'l', '\0' };
    const char * at = strstr(name + 6, mark);
    int il = -1;
    return at && sscanf(at + 3, "%d", &il) == 1 ? il : -1;
}

// The node whose result the scheduler copies to another backend as `copy`, by its name: BACKEND#NAME#NUMBER. NULL: it is no copy.
const ggml_tensor * copied_from(ggml_cgraph * gf, const ggml_tensor * copy) {
    const char * begin = strchr(copy->name, '#');
    const char * end   = strrchr(copy->name, '#');
    if (copy->op != GGML_OP_NONE || !begin || begin == end) {
        return nullptr;
    }
    const std::string name(begin + 1, end);
    for (int i = 0; i < ggml_graph_n_nodes(gf); i++) {
        const ggml_tensor * node = ggml_graph_node(gf, i);
        if (name == node->name) {
            return node;
        }
    }
    return nullptr;
}

// size of the rotation that rows went through on their way to SET_ROWS; 0: none
int32_t rotation(ggml_cgraph * gf, const ggml_tensor * rows) {
    for (const ggml_tensor * t = rows; t; t = t->src[0]) {
        if (const ggml_tensor * original = copied_from(gf, t)) {
            t = original;
        }
        switch (t->op) {
            case GGML_OP_VIEW:
            case GGML_OP_RESHAPE:
            case GGML_OP_PERMUTE:
            case GGML_OP_TRANSPOSE:
            case GGML_OP_CONT:
            case GGML_OP_PAD:
                continue;
            case GGML_OP_MUL_MAT:
                // a copy's name has the original's in it
                return strstr(t->src[0]->name, "_rot") ? int32_t(t->src[0]->ne[0]) : 0;
            default:
                return 0;
        }
    }
    return 0;
}

const char * backend_name(ggml_backend_sched_t sched, ggml_tensor * node) {
    ggml_backend_t     backend = ggml_backend_sched_get_tensor_backend(sched, node);
    ggml_backend_dev_t dev     = backend ? ggml_backend_get_device(backend) : nullptr;
    return dev ? ggml_backend_dev_name(dev) : "none";
}

void read_graph(kvq_report & report, const llama_context & ctx, ggml_backend_sched_t sched, bool prefill) {
    const auto & model   = ctx.get_model();
    const auto & hparams = model.hparams;
    const auto & cparams = ctx.get_cparams();
    const auto & res     = *ctx.get_gf_res_reserve();

    ggml_cgraph * gf = res.get_gf();
    auto & layers = report.layers;
    auto & k      = report.k;

    for (int i = 0; i < ggml_graph_n_nodes(gf); i++) {
        ggml_tensor * node = ggml_graph_node(gf, i);
        if (node->op != GGML_OP_SET_ROWS) {
            continue;
        }
        const ggml_tensor * cache = root(node);

        const int il_k = layer_of(cache->name, 'k');
        if (il_k >= 0 && std::find(k.begin(), k.end(), cache) == k.end()) {
            // a cache of an indexer has one head of its own size
            const bool main = int64_t(hparams.n_embd_k_gqa(il_k)) == cache->ne[0];

            kvq_layer layer = {};
            layer.il             = il_k;
            layer.index          = kvq_layer_index(model, il_k);
            layer.swa            = hparams.is_swa(il_k);
            layer.n_cells        = int32_t(cache->ne[1]*cache->ne[2]);
            layer.n_head_kv      = main ? hparams.n_head_kv(il_k) : 1;
            layer.head_k         = main ? hparams.n_embd_head_k(il_k) : int32_t(cache->ne[0]);
            layer.type_k         = cache->type;
            layer.type_v         = GGML_TYPE_COUNT;
            layer.rot_k          = rotation(gf, node->src[0]);
            layer.bytes_k        = ggml_nbytes(cache);
            layer.backend_prefill = "none";
            layer.backend_decode  = "none";
            layer.backend_expect  = cparams.offload_kqv ? ggml_backend_dev_name(model.dev_layer(il_k)) : "CPU";

            // a layer's own cache stands before its indexer's
            const auto less = [](const kvq_layer & a, const kvq_layer & b) { return a.il < b.il; };
            const auto at   = main ? std::lower_bound(layers.begin(), layers.end(), layer, less) :
                                     std::upper_bound(layers.begin(), layers.end(), layer, less);
            k.insert(k.begin() + (at - layers.begin()), cache);
            layers.insert(at, layer);
        }
    }
    for (int i = 0; i < ggml_graph_n_nodes(gf); i++) {
        ggml_tensor * node = ggml_graph_node(gf, i);
        if (node->op != GGML_OP_SET_ROWS) {
            continue;
        }
        const ggml_tensor * cache = root(node);

        const int il_v = layer_of(cache->name, 'v');
        for (auto & layer : layers) {
            if (layer.il == il_v && il_v >= 0) {
                layer.head_v  = hparams.n_embd_head_v(il_v);
                layer.type_v  = cache->type;
                layer.rot_v   = rotation(gf, node->src[0]);
                layer.bytes_v = ggml_nbytes(cache);
                break;
            }
        }
    }

    // where a layer's attention runs: the fused node, else the product of keys and queries. The scheduler
    // may have put a copy in the place of the cache, so a node is known by the name of its source.
    std::map<int, std::pair<bool, const char *>> where;
    for (int i = 0; i < ggml_graph_n_nodes(gf); i++) {
        ggml_tensor * node = ggml_graph_node(gf, i);
        const bool fused = node->op == GGML_OP_FLASH_ATTN_EXT;
        if (!fused && node->op != GGML_OP_MUL_MAT) {
            continue;
        }
        const char * at = strstr(node->src[fused ? 1 : 0]->name, "cache_");
        const int    il = at ? layer_of(at, 'k') : -1;
        if (il >= 0) {
            where[il] = { fused, backend_name(sched, node) };
        }
    }
    for (const auto & node : res.get_fused_nodes()) {
        if (node.op == LLM_FUSED_OP_FLASH_ATTN) {
            where[node.il] = { true, backend_name(sched, node.tensor) };
        }
    }
    for (auto & layer : layers) {
        const auto it = where.find(layer.il);
        if (it != where.end()) {
            layer.fused = it->second.first;
            (prefill ? layer.backend_prefill : layer.backend_decode) = it->second.second;
        }
    }
}

} // namespace

void kvq_report::read(llama_context & ctx, ggml_backend_sched_t sched, const llama_memory_context_i * mctx,
        uint32_t n_tokens, uint32_t n_seqs, uint32_t n_outputs) {
    layers.clear();
    k.clear();
    for (const bool prefill : { true, false }) {
        if (mctx && ctx.graph_reserve(prefill ? n_tokens : n_seqs, n_seqs, prefill ? n_outputs : n_seqs, mctx, true)) {
            read_graph(*this, ctx, sched, prefill);
        }
    }
}

//
// C API
//

int32_t kvq_n_layer(const llama_context * ctx) {
    return int32_t(ctx->kvq.layers.size());
}

bool kvq_get_layer(const llama_context * ctx, int32_t i, kvq_layer * layer) {
    if (i < 0 || i >= kvq_n_layer(ctx)) {
        kvq_set_error(format("layer %d is out of range: the cache has %d", i, kvq_n_layer(ctx)));
        return false;
    }
    *layer = ctx->kvq.layers[i];
    return true;
}

uint64_t kvq_compute_bytes(const llama_context * ctx) {
    ggml_backend_sched_t sched = ctx->get_sched();
    uint64_t res = 0;
    for (int i = 0; i < ggml_backend_sched_get_n_backends(sched); i++) {
        res += ggml_backend_sched_get_buffer_size(sched, ggml_backend_sched_get_backend(sched, i));
    }
    return res;
}

// "0-3,7"
static std::string ranges(const std::vector<int32_t> & sorted) {
    std::string res;
    for (size_t i = 0; i < sorted.size();) {
        size_t j = i;
        while (j + 1 < sorted.size() && sorted[j + 1] == sorted[j] + 1) {
            j++;
        }
        res += (res.empty() ? "" : ",") + std::to_string(sorted[i]) + (j > i ? "-" + std::to_string(sorted[j]) : "");
        i = j + 1;
    }
    return res;
}

static double bits(ggml_type type) {
    return 8.0*ggml_type_size(type)/ggml_blck_size(type);
}

static std::string rotated(const char * name, int32_t n) {
    return n ? format("%s by %d", name, n) : format("%s none", name);
}

// Norm of what a layer's bias adds to the keys of a head, the largest over its KV heads; 0 if it has none.
static double bias_norm(const llama_context * ctx, const kvq_layer & layer) {
    const auto & l = ctx->get_model().layers[layer.il];

    const int64_t n = int64_t(layer.head_k)*layer.n_head_kv;
    const ggml_tensor * b     = l.wk_b ? l.wk_b : l.wqkv_b;
    const int64_t       start = l.wk_b ? 0 : ctx->get_model().hparams.n_head(layer.il)*layer.head_k; // behind the queries'
    if (!b || ggml_nrows(b) != 1 || b->type != GGML_TYPE_F32 || !b->buffer || !b->data || ggml_nelements(b) < start + n) {
        return 0; // MLA has a matrix of that name; and the automatic memory fit loads no weights
    }
    std::vector<float> data(n);
    ggml_backend_tensor_get(b, data.data(), start*sizeof(float), n*sizeof(float));

    double res = 0;
    for (int32_t h = 0; h < layer.n_head_kv; h++) {
        double sum = 0;
        for (int32_t i = 0; i < layer.head_k; i++) {
            sum += double(data[h*layer.head_k + i])*data[h*layer.head_k + i];
        }
        res = std::max(res, sqrt(sum));
    }
    return res;
}

// How large a bias may be. A key of norm |k| stored with a relative squared error e gives a score q.k/sqrt(d) an error of about
// |q| |k| sqrt(e)/d. The bias is in every key, and what it adds to that error tells nothing apart: it is too large where it brings
// more than a nat. With |q| of 10 sqrt(d) that is 0.1 sqrt(d/e). e is 3/4^bits, within a third for every block type.
static double bias_limit(ggml_type type, int32_t head) {
    return 0.1*sqrt(head/(3.0*pow(4.0, -bits(type))));
}

// What is known of models that suffer from narrow keys, as far as this model shows it.
static std::string known_to_suffer(const llama_context * ctx) {
    const auto & layers = ctx->kvq.layers;
    const auto & model  = ctx->get_model();

    std::string res;
    std::vector<int32_t> biased;
    double  norm  = 0;
    int32_t head  = 0;
    ggml_type type = GGML_TYPE_COUNT;
    const kvq_layer * sinks  = nullptr;
    const kvq_layer * beyond = nullptr;
    for (const auto & l : layers) {
        if (!ggml_is_quantized(l.type_k)) {
            continue;
        }
        const double n = bias_norm(ctx, l);
        if (n > bias_limit(l.type_k, l.head_k)) {
            biased.push_back(l.index);
            if (n > norm) {
                norm = n;
                head = l.head_k;
                type = l.type_k;
            }
        }
        if (!sinks && model.layers[l.il].attn_sinks) {
            sinks = &l;
        }
        const bool gemma = model.arch == LLM_ARCH_GEMMA2 || model.arch == LLM_ARCH_GEMMA3 || model.arch == LLM_ARCH_GEMMA3N;
        if (!beyond && gemma && !l.swa && bits(l.type_k) < 8 && l.n_cells > int32_t(model.hparams.n_swa)) {
            beyond = &l;
        }
    }
    if (!biased.empty()) {
        const char * wide = norm <= bias_limit(GGML_TYPE_Q8_0, head) ? "8" : "16";
        res += format("kvq: warning: layer%s %s add%s a bias of norm up to %.0f to the keys of a head: stored as %s it drowns what differs "
            "between tokens (Qwen2 and Qwen2.5 are known for it); use --kvq-key %s", biased.size() > 1 ? "s" : "", ranges(biased).c_str(),
            biased.size() > 1 ? "" : "s", norm, ggml_type_name(type), wide);
        if (4*biased.size() <= layers.size() || biased.size() <= 2) {
            res += format(", or --kvq-key %s", kvq_type_name(kvq_effective(ctx, false)));
            for (const int32_t i : biased) {
                res += format(",%d=%s", i, wide);
            }
        }
        res += "\n";
    }
    if (sinks) {
        res += format("kvq: warning: this model's attention has sinks, and such models (gpt-oss) were seen to suffer even from q8_0 keys: "
            "compare %s with f16 (kvsplit bench), or use --kvq-key 16\n", ggml_type_name(sinks->type_k));
    }
    if (beyond) {
        res += format("kvq: warning: Gemma models are known to suffer from narrow keys beyond their window of %u tokens: compare %s with "
            "f16 (kvsplit bench), or use --kvq-key 8\n", model.hparams.n_swa, ggml_type_name(beyond->type_k));
    }
    return res;
}

static std::string describe(const llama_context * ctx) {
    const auto & layers = ctx->kvq.layers;
    if (layers.empty()) {
        return "kvq: this model stores no keys and values (recurrent state or none): there is nothing to quantize\n";
    }

    // one line per distinct kind, in the order of its first layer
    struct kind {
        kvq_layer            first;
        bool                 indexer; // a second cache of a layer: the keys of a sparse attention's indexer
        std::vector<int32_t> index;
        uint64_t             bytes;
    };
    const auto same = [](const kvq_layer & a, const kvq_layer & b) {
        const auto key = [](const kvq_layer & l) {
            return std::make_tuple(l.type_k, l.type_v, l.rot_k, l.rot_v, l.head_k, l.head_v, l.fused, std::string(l.backend_prefill),
                std::string(l.backend_decode), std::string(l.backend_expect));
        };
        return key(a) == key(b);
    };
    std::vector<kind> kinds;
    uint64_t bytes     = 0;
    double   bytes_f16 = 0;
    for (size_t i = 0; i < layers.size(); i++) {
        const kvq_layer & layer   = layers[i];
        const bool        indexer = i > 0 && layers[i - 1].il == layer.il;
        auto it = std::find_if(kinds.begin(), kinds.end(), [&](const kind & k) { return k.indexer == indexer && same(k.first, layer); });
        if (it == kinds.end()) {
            it = kinds.insert(kinds.end(), { layer, indexer, {}, 0 });
        }
        it->index.push_back(layer.index);
        it->bytes += layer.bytes_k + layer.bytes_v;
        bytes     += layer.bytes_k + layer.bytes_v;
        bytes_f16 += 16.0*layer.bytes_k/bits(layer.type_k) + (layer.bytes_v ? 16.0*layer.bytes_v/bits(layer.type_v) : 0.0);
    }

    const double mib = 1024.0*1024.0;
    std::string lines;
    std::string warnings;
    for (const auto & k : kinds) {
        const kvq_layer & l = k.first;

        lines += format("kvq: K %s (%.4g bits)", ggml_type_name(l.type_k), bits(l.type_k));
        lines += k.indexer ? std::string(" of the indexer") : l.type_v == GGML_TYPE_COUNT ? std::string(", V within K's rows") : format(", V %s (%.4g bits)", ggml_type_name(l.type_v), bits(l.type_v));
        lines += format("; layer%s %s; %.2f MiB", k.index.size() > 1 ? "s" : "", ranges(k.index).c_str(), k.bytes/mib);
        lines += l.rot_k || l.rot_v ? "; rotation " + rotated("K", l.rot_k) + ", " + rotated("V", l.rot_v) : std::string("; rotation none");

        const bool one = strcmp(l.backend_prefill, l.backend_decode) == 0 || strcmp(l.backend_decode, "none") == 0;
        // an architecture with attention of its own, or an indexer, has no node that is known to be it
        if (strcmp(l.backend_prefill, "none") != 0) {
            lines += format("; %s on %s", l.fused ? "flash attention" : "attention", l.backend_prefill);
            lines += one ? "" : format(" for prompts, on %s for decoding", l.backend_decode);
        }
        lines += "\n";

        for (const char * backend : { l.backend_prefill, one ? l.backend_prefill : l.backend_decode }) {
            if (strcmp(backend, l.backend_expect) != 0 && strcmp(backend, "none") != 0) {
                const std::string v = l.type_v == GGML_TYPE_COUNT ? "" : format(" / V %s", ggml_type_name(l.type_v));
                const std::string w = format("kvq: warning: %s has no attention for K %s%s with head size %d: it runs on %s instead, which is slow\n",
                    l.backend_expect, ggml_type_name(l.type_k), v.c_str(), l.head_k, backend);
                if (warnings.find(w) == std::string::npos) {
                    warnings += w;
                }
            }
        }
    }
    if (kinds.size() > 1 || bytes < bytes_f16) {
        lines += format("kvq: KV cache %.2f MiB, %.1f %% of f16 (%.2f MiB)\n", bytes/mib, 100.0*bytes/bytes_f16, bytes_f16/mib);
    }
    const auto & hparams = ctx->get_model().hparams;
    int n_recr = 0;
    for (uint32_t il = 0; il < hparams.n_layer(); il++) {
        n_recr += hparams.is_recr(il);
    }
    if (n_recr > 0) {
        lines += format("kvq: %d recurrent layers keep a state of fixed size in f32: it has no keys and values to quantize\n", n_recr);
    }
    return lines + warnings + known_to_suffer(ctx);
}

int32_t kvq_describe(const llama_context * ctx, char * buf, size_t size) {
    return snprintf(buf, size, "%s", describe(ctx).c_str());
}

ggml_type kvq_effective(const llama_context * ctx, bool values) {
    const auto & layers = ctx->kvq.layers;

    std::map<ggml_type, int> count;
    std::vector<ggml_type>   types;
    int32_t il = -1;
    for (const auto & layer : layers) {
        if (layer.il == il) {
            continue; // the cache of the layer's indexer
        }
        il = layer.il;
        types.push_back(values && layer.type_v != GGML_TYPE_COUNT ? layer.type_v : layer.type_k);
        count[types.back()]++;
    }
    if (types.empty()) {
        return GGML_TYPE_COUNT;
    }
    const auto most = std::max_element(count.begin(), count.end(),
        [](const auto & a, const auto & b) { return a.second < b.second; })->first;

    std::string res = ggml_type_name(most);
    for (size_t i = 0; i < types.size();) {
        size_t j = i + 1;
        while (j < types.size() && types[j] == types[i]) {
            j++;
        }
        if (types[i] != most) {
            res += format(j - i > 1 ? ",%zu:%zu=" : ",%zu=", i, j) + std::string(ggml_type_name(types[i]));
        }
        i = j;
    }
    return kvq_parse_spec(res);
}
