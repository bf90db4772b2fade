// SPDX-License-Identifier: MIT
//
// What the Metal backend says it computes, for every type of ggml and every operation a KV cache meets, is what it computes.
//
// Each operation that is accepted runs in a process of its own, since a kernel that isn't there ends the process.
// usage: test-metal-supports [--one N]

#include "metal-test.h"

#include <functional>

enum kind { GET_ROWS, SET_ROWS_I32, SET_ROWS_I64, CPY_FROM_F32, CPY_FROM_F16, CPY_TO_F32, CPY_TO_F16, CPY_SAME, DUP, CONT,
            MUL_MAT, MUL_MAT_ID, REPEAT, CONCAT, ADD, ATTENTION, N_KINDS };

static const char * kind_names[N_KINDS] = {
    "GET_ROWS", "SET_ROWS i32", "SET_ROWS i64", "CPY from f32", "CPY from f16", "CPY to f32", "CPY to f16", "CPY same", "DUP", "CONT",
    "MUL_MAT", "MUL_MAT_ID", "REPEAT", "CONCAT", "ADD", "FLASH_ATTN_EXT",
};

struct op_case { kind k; ggml_type a, b; int d, dv; };

static std::string text(const op_case & c) {
    std::string res = std::string(kind_names[c.k]) + " " + ggml_type_name(c.a);
    if (c.k == ATTENTION) {
        res += std::string("/") + ggml_type_name(c.b) + " of " + std::to_string(c.d) + "/" + std::to_string(c.dv);
    }
    return res;
}

static std::vector<op_case> cases() {
    std::vector<op_case> res;
    for (int t = 0; t < GGML_TYPE_COUNT; t++) {
        const ggml_type type = (ggml_type) t;
        const auto * traits = ggml_get_type_traits(type);
        if (!traits->type_name || traits->blck_size == 0 || traits->type_size == 0) {
            continue; // a gap, or a type that was removed
        }
        for (int k = 0; k < ATTENTION; k++) {
            res.push_back({ (kind) k, type, type, 256, 256 });
        }
        // as keys beside f16 values: types that no cache has must be refused
        res.push_back({ ATTENTION, type, GGML_TYPE_F16, 64, 64 });
    }
    for (const auto & k : kvq_cache_types) {
        for (const auto & v : kvq_cache_types) {
            // 72: upstream's one head with odd rules; 88 and 128/64: none has kernels for it
            for (auto d : { std::pair<int, int>(64, 64), { 72, 72 }, { 96, 64 }, { 88, 88 }, { 128, 64 } }) {
                res.push_back({ ATTENTION, k.type, v.type, d.first, d.second });
            }
        }
    }
    return res;
}

// Without ggml's constructors: they refuse what a backend should.
static ggml_tensor * make(ggml_context * ctx, const op_case & c) {
    const int64_t d = c.d;
    auto node = [&](ggml_type type, ggml_op op, std::vector<int64_t> ne, std::vector<ggml_tensor *> src) {
        ggml_tensor * t = ggml_new_tensor(ctx, type, (int) ne.size(), ne.data());
        t->op = op;
        for (size_t i = 0; i < src.size(); i++) {
            t->src[i] = src[i];
        }
        return t;
    };
    auto leaf = [&](ggml_type type, std::vector<int64_t> ne) { return ggml_new_tensor(ctx, type, (int) ne.size(), ne.data()); };

    switch (c.k) {
        case GET_ROWS:     return node(GGML_TYPE_F32, GGML_OP_GET_ROWS, { d, 3 }, { leaf(c.a, { d, 8 }), leaf(GGML_TYPE_I32, { 3 }) });
        case SET_ROWS_I32:
        case SET_ROWS_I64:
            {
                ggml_tensor * dst = leaf(c.a, { d, 8 });
                ggml_tensor * res = ggml_view_tensor(ctx, dst);
                res->op = GGML_OP_SET_ROWS;
                res->src[0] = leaf(GGML_TYPE_F32, { d, 3 });
                res->src[1] = leaf(c.k == SET_ROWS_I32 ? GGML_TYPE_I32 : GGML_TYPE_I64, { 3 });
                res->src[2] = dst;
                return res;
            }
        case CPY_FROM_F32: return node(c.a, GGML_OP_CPY, { d, 3 }, { leaf(GGML_TYPE_F32, { d, 3 }), nullptr });
        case CPY_FROM_F16: return node(c.a, GGML_OP_CPY, { d, 3 }, { leaf(GGML_TYPE_F16, { d, 3 }), nullptr });
        case CPY_TO_F32:   return node(GGML_TYPE_F32, GGML_OP_CPY, { d, 3 }, { leaf(c.a, { d, 3 }), nullptr });
        case CPY_TO_F16:   return node(GGML_TYPE_F16, GGML_OP_CPY, { d, 3 }, { leaf(c.a, { d, 3 }), nullptr });
        case CPY_SAME:     return node(c.a, GGML_OP_CPY,  { d, 3 }, { leaf(c.a, { d, 3 }), nullptr });
        case DUP:          return node(c.a, GGML_OP_DUP,  { d, 3 }, { leaf(c.a, { d, 3 }) });
        case CONT:         return node(c.a, GGML_OP_CONT, { d, 3 }, { leaf(c.a, { d, 3 }) });
        case MUL_MAT:      return node(GGML_TYPE_F32, GGML_OP_MUL_MAT, { 4, 3 }, { leaf(c.a, { d, 4 }), leaf(GGML_TYPE_F32, { d, 3 }) });
        case MUL_MAT_ID:   return node(GGML_TYPE_F32, GGML_OP_MUL_MAT_ID, { 4, 2, 3 },
                               { leaf(c.a, { d, 4, 2 }), leaf(GGML_TYPE_F32, { d, 2, 3 }), leaf(GGML_TYPE_I32, { 2, 3 }) });
        case REPEAT:       return node(c.a, GGML_OP_REPEAT, { d, 6 }, { leaf(c.a, { d, 3 }) });
        case CONCAT:
            {
                ggml_tensor * res = node(c.a, GGML_OP_CONCAT, { d, 6 }, { leaf(c.a, { d, 3 }), leaf(c.a, { d, 3 }) });
                res->op_params[0] = 1;
                return res;
            }
        case ADD:          return node(c.a, GGML_OP_ADD, { d, 3 }, { leaf(c.a, { d, 3 }), leaf(c.a, { d, 3 }) });
        case ATTENTION:
            {
                if (d % ggml_blck_size(c.a) || c.dv % ggml_blck_size(c.b)) {
                    return nullptr;
                }
                ggml_tensor * res = node(GGML_TYPE_F32, GGML_OP_FLASH_ATTN_EXT, { c.dv, 2, 5, 1 },
                    { leaf(GGML_TYPE_F32, { d, 5, 2, 1 }), leaf(c.a, { d, 64, 1, 1 }), leaf(c.b, { c.dv, 64, 1, 1 }) });
                const float scale = 0.125f;
                memcpy(res->op_params, &scale, sizeof(scale));
                return res;
            }
        default: return nullptr;
    }
}

static int run_one(ggml_backend_dev_t dev, const op_case & c) {
    graph_on g(dev);
    ggml_tensor * out = make(g.ctx.get(), c);
    if (!g.alloc(out)) {
        return 1;
    }
    ggml_backend_buffer_clear(g.buf.get(), 0);
    return g.compute() ? 0 : 1;
}

int main(int argc, char ** argv) {
    ggml_backend_dev_t dev = metal_device();
    const auto all = cases();

    if (argc == 3 && std::string(argv[1]) == "--one") {
        return run_one(dev, all.at(atoi(argv[2])));
    }

    int n_accepted = 0, n_refused = 0;
    for (size_t i = 0; i < all.size(); i++) {
        const op_case & c = all[i];
        graph_on g(dev);
        ggml_tensor * out = make(g.ctx.get(), c);
        if (!out) {
            continue;
        }
        const bool yes = ggml_backend_dev_supports_op(dev, out);

        bool is_pair = false; // of cache types
        for (const auto & k : kvq_cache_types) {
            for (const auto & v : kvq_cache_types) {
                is_pair = is_pair || (k.type == c.a && v.type == c.b);
            }
        }
        if (c.k == ATTENTION) {
            CHECK(yes == (is_pair && c.d != 88 && c.d != 128), "%s is %s", text(c).c_str(), yes ? "accepted" : "refused");
        } else if (is_ours(c.a)) {
            const bool want = c.k <= CPY_TO_F16;
            CHECK(yes == want, "%s is %s", text(c).c_str(), yes ? "accepted" : "refused");
        }
        (yes ? n_accepted : n_refused)++;
        if (yes) {
            const std::string command = "\"" + std::string(argv[0]) + "\" --one " + std::to_string(i) + " > /dev/null 2>&1";
            const int code = system(command.c_str());
            CHECK(code == 0, "%s is accepted, and fails with code %d", text(c).c_str(), code);
        }
    }
    printf("%d operations accepted and run, %d refused\n", n_accepted, n_refused);
    return summary("metal-supports");
}
