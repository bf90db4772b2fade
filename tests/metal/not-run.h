// SPDX-License-Identifier: MIT
//
// What the emulator doesn't run although the backend's supports_op says yes: matters of this test device alone, so it is
// kept apart from supports_op. Other backends take these operations.

#pragma once

#include "ggml.h"

#include <stddef.h>

struct not_run_entry {
    enum ggml_op op;
    const char * library; // without its kernels the operation isn't run; nullptr: never
    const char * reason;
};

static constexpr not_run_entry not_run_list[] = {
    { GGML_OP_MUL_MAT,    "mul_mv",  "products of matrices are slow here and not what is tested (FWHT is run)" },
    { GGML_OP_MUL_MAT,    "mul_mm",  "products of matrices are slow here and not what is tested (FWHT is run)" },
    { GGML_OP_MUL_MAT_ID, "mul_mv",  "products of matrices are slow here and not what is tested" },
    { GGML_OP_MUL_MAT_ID, "mul_mm",  "products of matrices are slow here and not what is tested" },
    { GGML_OP_ARGSORT,    "argsort", "not a part of attention" },
    { GGML_OP_TOP_K,      "argsort", "not a part of attention" },
    { GGML_OP_SSM_CONV,   "ssm",     "not a part of attention" },
    { GGML_OP_SSM_SCAN,   "ssm",     "not a part of attention" },
    { GGML_OP_RWKV_WKV6,  "wkv",     "not a part of attention" },
    { GGML_OP_RWKV_WKV7,  "wkv",     "not a part of attention" },
    { GGML_OP_GATED_DELTA_NET,   "gated_delta_net", "not a part of attention" },
    { GGML_OP_SOLVE_TRI,         "solve_tri",       "not a part of attention" },
    { GGML_OP_TRI,               "tri",             "not a part of attention" },
    { GGML_OP_DIAG,              "misc",            "not a part of attention" },
    { GGML_OP_POOL_1D,           "pool",            "not a part of attention" },
    { GGML_OP_POOL_2D,           "pool",            "not a part of attention" },
    { GGML_OP_UPSCALE,           "upscale",         "not a part of attention" },
    { GGML_OP_IM2COL,            "conv",            "not a part of attention" },
    { GGML_OP_CONV_2D,           "conv",            "not a part of attention" },
    { GGML_OP_CONV_2D_DW,        "conv",            "not a part of attention" },
    { GGML_OP_CONV_3D,           "conv",            "not a part of attention" },
    { GGML_OP_CONV_TRANSPOSE_1D, "conv",            "not a part of attention" },
    { GGML_OP_CONV_TRANSPOSE_2D, "conv",            "not a part of attention" },
    { GGML_OP_COL2IM_1D,         "conv",            "not a part of attention" },
};

// What the device is for may never be on the list.
static constexpr bool not_run_list_is_allowed() {
    for (const not_run_entry & entry : not_run_list) {
        for (enum ggml_op op : { GGML_OP_FLASH_ATTN_EXT, GGML_OP_SET_ROWS, GGML_OP_GET_ROWS, GGML_OP_CPY, GGML_OP_DUP, GGML_OP_CONT }) {
            if (entry.op == op) {
                return false;
            }
        }
    }
    return true;
}
static_assert(not_run_list_is_allowed(), "the emulator has to run attention and all that reads or writes the cache");
