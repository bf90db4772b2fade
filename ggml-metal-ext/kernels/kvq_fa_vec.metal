// SPDX-License-Identifier: MIT
//
// Attention for few queries, over keys and values of any type: upstream's kernel with our decoders.
// The types of K and V are function constants, so each head size is here once and not once for each of 14 x 14 pairs.
//
// K and V are decoded to float: they stay in registers, and a bf16 or f32 cache keeps its range.
//
// Q is the number of queries of a threadgroup, NE that of rows that a simdgroup reads at once. With one query there is upstream's
// first choice of NE, for short caches, and 4, which its table of measurements takes for quantized types nearly everywhere else.

#include "common.h"
#include "kvq-metal-codecs.h"
#include "fa_vec_common.metal"

#define KVQ_FA_VEC half4, float4, float4, float, float, float4, float4, KVQ_ROW_K_T4, KVQ_ROW_V_T4

typedef decltype(kernel_flash_attn_ext_vec<KVQ_FA_VEC, 128, 128, 4, 1>) kvq_flash_attn_ext_vec_t;

template [[host_name("kernel_kvq_flash_attn_ext_vec_dk32_dv32_q1_ne4")]] kernel kvq_flash_attn_ext_vec_t kernel_flash_attn_ext_vec<KVQ_FA_VEC, 32, 32, 4, 1>;
template [[host_name("kernel_kvq_flash_attn_ext_vec_dk32_dv32_q2_ne4")]] kernel kvq_flash_attn_ext_vec_t kernel_flash_attn_ext_vec<KVQ_FA_VEC, 32, 32, 4, 2>;
template [[host_name("kernel_kvq_flash_attn_ext_vec_dk32_dv32_q4_ne4")]] kernel kvq_flash_attn_ext_vec_t kernel_flash_attn_ext_vec<KVQ_FA_VEC, 32, 32, 4, 4>;

template [[host_name("kernel_kvq_flash_attn_ext_vec_dk64_dv64_q1_ne2")]] kernel kvq_flash_attn_ext_vec_t kernel_flash_attn_ext_vec<KVQ_FA_VEC, 64, 64, 2, 1>;
template [[host_name("kernel_kvq_flash_attn_ext_vec_dk64_dv64_q1_ne4")]] kernel kvq_flash_attn_ext_vec_t kernel_flash_attn_ext_vec<KVQ_FA_VEC, 64, 64, 4, 1>;
template [[host_name("kernel_kvq_flash_attn_ext_vec_dk64_dv64_q2_ne4")]] kernel kvq_flash_attn_ext_vec_t kernel_flash_attn_ext_vec<KVQ_FA_VEC, 64, 64, 4, 2>;
template [[host_name("kernel_kvq_flash_attn_ext_vec_dk64_dv64_q4_ne4")]] kernel kvq_flash_attn_ext_vec_t kernel_flash_attn_ext_vec<KVQ_FA_VEC, 64, 64, 4, 4>;

template [[host_name("kernel_kvq_flash_attn_ext_vec_dk96_dv96_q1_ne4")]] kernel kvq_flash_attn_ext_vec_t kernel_flash_attn_ext_vec<KVQ_FA_VEC, 96, 96, 4, 1>;
template [[host_name("kernel_kvq_flash_attn_ext_vec_dk96_dv96_q2_ne4")]] kernel kvq_flash_attn_ext_vec_t kernel_flash_attn_ext_vec<KVQ_FA_VEC, 96, 96, 4, 2>;
template [[host_name("kernel_kvq_flash_attn_ext_vec_dk96_dv96_q4_ne4")]] kernel kvq_flash_attn_ext_vec_t kernel_flash_attn_ext_vec<KVQ_FA_VEC, 96, 96, 4, 4>;

template [[host_name("kernel_kvq_flash_attn_ext_vec_dk96_dv64_q1_ne4")]] kernel kvq_flash_attn_ext_vec_t kernel_flash_attn_ext_vec<KVQ_FA_VEC, 96, 64, 4, 1>;
template [[host_name("kernel_kvq_flash_attn_ext_vec_dk96_dv64_q2_ne4")]] kernel kvq_flash_attn_ext_vec_t kernel_flash_attn_ext_vec<KVQ_FA_VEC, 96, 64, 4, 2>;
template [[host_name("kernel_kvq_flash_attn_ext_vec_dk96_dv64_q4_ne4")]] kernel kvq_flash_attn_ext_vec_t kernel_flash_attn_ext_vec<KVQ_FA_VEC, 96, 64, 4, 4>;

template [[host_name("kernel_kvq_flash_attn_ext_vec_dk128_dv128_q1_ne1")]] kernel kvq_flash_attn_ext_vec_t kernel_flash_attn_ext_vec<KVQ_FA_VEC, 128, 128, 1, 1>;
template [[host_name("kernel_kvq_flash_attn_ext_vec_dk128_dv128_q1_ne4")]] kernel kvq_flash_attn_ext_vec_t kernel_flash_attn_ext_vec<KVQ_FA_VEC, 128, 128, 4, 1>;
template [[host_name("kernel_kvq_flash_attn_ext_vec_dk128_dv128_q2_ne4")]] kernel kvq_flash_attn_ext_vec_t kernel_flash_attn_ext_vec<KVQ_FA_VEC, 128, 128, 4, 2>;
template [[host_name("kernel_kvq_flash_attn_ext_vec_dk128_dv128_q4_ne4")]] kernel kvq_flash_attn_ext_vec_t kernel_flash_attn_ext_vec<KVQ_FA_VEC, 128, 128, 4, 4>;

template [[host_name("kernel_kvq_flash_attn_ext_vec_dk192_dv192_q1_ne2")]] kernel kvq_flash_attn_ext_vec_t kernel_flash_attn_ext_vec<KVQ_FA_VEC, 192, 192, 2, 1>;
template [[host_name("kernel_kvq_flash_attn_ext_vec_dk192_dv192_q1_ne4")]] kernel kvq_flash_attn_ext_vec_t kernel_flash_attn_ext_vec<KVQ_FA_VEC, 192, 192, 4, 1>;
template [[host_name("kernel_kvq_flash_attn_ext_vec_dk192_dv192_q2_ne4")]] kernel kvq_flash_attn_ext_vec_t kernel_flash_attn_ext_vec<KVQ_FA_VEC, 192, 192, 4, 2>;
template [[host_name("kernel_kvq_flash_attn_ext_vec_dk192_dv192_q4_ne2")]] kernel kvq_flash_attn_ext_vec_t kernel_flash_attn_ext_vec<KVQ_FA_VEC, 192, 192, 2, 4>;

template [[host_name("kernel_kvq_flash_attn_ext_vec_dk192_dv128_q1_ne2")]] kernel kvq_flash_attn_ext_vec_t kernel_flash_attn_ext_vec<KVQ_FA_VEC, 192, 128, 2, 1>;
template [[host_name("kernel_kvq_flash_attn_ext_vec_dk192_dv128_q1_ne4")]] kernel kvq_flash_attn_ext_vec_t kernel_flash_attn_ext_vec<KVQ_FA_VEC, 192, 128, 4, 1>;
template [[host_name("kernel_kvq_flash_attn_ext_vec_dk192_dv128_q2_ne4")]] kernel kvq_flash_attn_ext_vec_t kernel_flash_attn_ext_vec<KVQ_FA_VEC, 192, 128, 4, 2>;
template [[host_name("kernel_kvq_flash_attn_ext_vec_dk192_dv128_q4_ne2")]] kernel kvq_flash_attn_ext_vec_t kernel_flash_attn_ext_vec<KVQ_FA_VEC, 192, 128, 2, 4>;

template [[host_name("kernel_kvq_flash_attn_ext_vec_dk256_dv256_q1_ne1")]] kernel kvq_flash_attn_ext_vec_t kernel_flash_attn_ext_vec<KVQ_FA_VEC, 256, 256, 1, 1>;
template [[host_name("kernel_kvq_flash_attn_ext_vec_dk256_dv256_q1_ne4")]] kernel kvq_flash_attn_ext_vec_t kernel_flash_attn_ext_vec<KVQ_FA_VEC, 256, 256, 4, 1>;
template [[host_name("kernel_kvq_flash_attn_ext_vec_dk256_dv256_q2_ne4")]] kernel kvq_flash_attn_ext_vec_t kernel_flash_attn_ext_vec<KVQ_FA_VEC, 256, 256, 4, 2>;
template [[host_name("kernel_kvq_flash_attn_ext_vec_dk256_dv256_q4_ne2")]] kernel kvq_flash_attn_ext_vec_t kernel_flash_attn_ext_vec<KVQ_FA_VEC, 256, 256, 2, 4>;

template [[host_name("kernel_kvq_flash_attn_ext_vec_dk320_dv256_q1_ne2")]] kernel kvq_flash_attn_ext_vec_t kernel_flash_attn_ext_vec<KVQ_FA_VEC, 320, 256, 2, 1>;
template [[host_name("kernel_kvq_flash_attn_ext_vec_dk320_dv256_q1_ne4")]] kernel kvq_flash_attn_ext_vec_t kernel_flash_attn_ext_vec<KVQ_FA_VEC, 320, 256, 4, 1>;
template [[host_name("kernel_kvq_flash_attn_ext_vec_dk320_dv256_q2_ne4")]] kernel kvq_flash_attn_ext_vec_t kernel_flash_attn_ext_vec<KVQ_FA_VEC, 320, 256, 4, 2>;
template [[host_name("kernel_kvq_flash_attn_ext_vec_dk320_dv256_q4_ne2")]] kernel kvq_flash_attn_ext_vec_t kernel_flash_attn_ext_vec<KVQ_FA_VEC, 320, 256, 2, 4>;

template [[host_name("kernel_kvq_flash_attn_ext_vec_dk512_dv512_q1_ne1")]] kernel kvq_flash_attn_ext_vec_t kernel_flash_attn_ext_vec<KVQ_FA_VEC, 512, 512, 1, 1>;
template [[host_name("kernel_kvq_flash_attn_ext_vec_dk512_dv512_q1_ne4")]] kernel kvq_flash_attn_ext_vec_t kernel_flash_attn_ext_vec<KVQ_FA_VEC, 512, 512, 4, 1>;
template [[host_name("kernel_kvq_flash_attn_ext_vec_dk512_dv512_q2_ne4")]] kernel kvq_flash_attn_ext_vec_t kernel_flash_attn_ext_vec<KVQ_FA_VEC, 512, 512, 4, 2>;
template [[host_name("kernel_kvq_flash_attn_ext_vec_dk512_dv512_q4_ne2")]] kernel kvq_flash_attn_ext_vec_t kernel_flash_attn_ext_vec<KVQ_FA_VEC, 512, 512, 2, 4>;

template [[host_name("kernel_kvq_flash_attn_ext_vec_dk576_dv512_q1_ne2")]] kernel kvq_flash_attn_ext_vec_t kernel_flash_attn_ext_vec<KVQ_FA_VEC, 576, 512, 2, 1>;
template [[host_name("kernel_kvq_flash_attn_ext_vec_dk576_dv512_q1_ne4")]] kernel kvq_flash_attn_ext_vec_t kernel_flash_attn_ext_vec<KVQ_FA_VEC, 576, 512, 4, 1>;
template [[host_name("kernel_kvq_flash_attn_ext_vec_dk576_dv512_q2_ne4")]] kernel kvq_flash_attn_ext_vec_t kernel_flash_attn_ext_vec<KVQ_FA_VEC, 576, 512, 4, 2>;
template [[host_name("kernel_kvq_flash_attn_ext_vec_dk576_dv512_q4_ne2")]] kernel kvq_flash_attn_ext_vec_t kernel_flash_attn_ext_vec<KVQ_FA_VEC, 576, 512, 2, 4>;

//
// The results of 32 threadgroups for each row become one, where query heads that share a KV head were computed as its queries:
// row j*n_kv + i of the temporary results, of query j of KV head i, is row i*n_shared + j of the output.
// Each has its sum of probabilities S and their largest score M behind the rows. One lane for one threadgroup's.
//

constant int32_t FC_kvq_reduce_dv     [[function_constant(FC_KVQ_REDUCE_DV)]];
constant int32_t FC_kvq_reduce_kv     [[function_constant(FC_KVQ_REDUCE_KV)]];
constant int32_t FC_kvq_reduce_shared [[function_constant(FC_KVQ_REDUCE_SHARED)]];

kernel void kernel_kvq_flash_attn_ext_vec_reduce(
        constant ggml_metal_kargs_flash_attn_ext_vec_reduce & args,
        device const char * tmp,
        device       char * dst,
        uint3  tgpig[[threadgroup_position_in_grid]],
        ushort tiisg[[thread_index_in_simdgroup]],
        ushort sgitg[[simdgroup_index_in_threadgroup]],
        ushort3  ntg[[threads_per_threadgroup]]) {
    const int n4     = FC_kvq_reduce_dv/4;
    const int n_head = FC_kvq_reduce_kv*FC_kvq_reduce_shared;

    const int row = tgpig[0];
    const int seq = row/n_head;
    const int i   = row % n_head % FC_kvq_reduce_kv;
    const int j   = row % n_head / FC_kvq_reduce_kv;

    device const float2 * sm = (device const float2 *) (tmp + (uint64_t) args.nrows*n4*32*sizeof(float4)) + row*32;

    const float2 s_m = sm[tiisg];

    const float max   = simd_max(s_m[1]);
    const float scale = exp(s_m[1] - max);
    const float sum   = simd_sum(s_m[0]*scale);
    const float inv   = sum == 0.0f ? 0.0f : 1.0f/sum;

    device const float4 * src = (device const float4 *) tmp + (uint64_t) row*n4*32;
    device       float4 * out = (device       float4 *) dst + (uint64_t) (seq*n_head + i*FC_kvq_reduce_shared + j)*n4;

    for (int k = sgitg; k < n4; k += ntg[1]) {
        const float4 v = simd_sum(src[k*32 + tiisg]*scale);

        if (tiisg == 0) {
            out[k] = v*inv;
        }
    }
}
