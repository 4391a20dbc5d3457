// Attention in float32, without tensor cores: exact products. A warp takes a row, a lane a key, then a lane some columns.
#pragma once
#include "attention_merge.cuh"
#include "e4m3.cuh"

#if E4M3
using Held = uint8_t;  // of a page
__device__ __forceinline__ float read_held(Held code) { return e4m3_to_float(code); }
__device__ __forceinline__ float4 read_four(const Held* held) {
    const uchar4 codes = *(const uchar4*)held;
    return make_float4(read_held(codes.x), read_held(codes.y), read_held(codes.z), read_held(codes.w));
}
#else
using Held = Number;
__device__ __forceinline__ float read_held(Held number) { return number; }
__device__ __forceinline__ float4 read_four(const Held* held) { return *(const float4*)held; }
#endif

extern "C" __global__ void __launch_bounds__(THREADS) append_attention(Number* out, const Number* query, const Held* key_pages,
                                                                       const Held* value_pages, const int* page_table, const Start* starts,
                                                                       const Item* items, float* partial_sums, float2* partial_stats, int* counters,
                                                                       const unsigned long long* seen, int query_stride, int table_stride,
                                                                       int page_bytes, const float* key_scales, const float* value_factors) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    const Partials partials{partial_sums, partial_stats};
    __shared__ int flag;
    wait_for_earlier();
    Item item = starts[blockIdx.x].item;
    const int next = item.next, end = item.end;
    for (int i = next; item.num_rows > 0; ++i) {
        const float key_scale = E4M3 ? key_scales[item.kv_head] : 1, value_factor = E4M3 ? value_factors[item.kv_head] : 1;
        for (int row = warp; row < item.num_rows; row += WARPS) {
            const int r = item.row_start + row, visible = WHOLE ? item.token_end : min(item.token_end, item.first_visible + r / GROUP + 1);
            const float4* q = (const float4*)(query + (int64_t)(item.query_start + r / GROUP) * query_stride + (item.kv_head * GROUP + r % GROUP) * HEAD_DIM);
            float peak = -INFINITY, total = 0, sums[HEAD_DIM / 32] = {};
            const unsigned long long own = TREE ? seen[item.query_start + r / GROUP] | 1 : 1;
            const int newest = item.first_visible + (TREE ? __popcll(own) - 1 : r / GROUP);  // by position
            const int oldest = WINDOW ? max(item.token_begin, newest + 1 - WINDOW) : item.token_begin;
            for (int token = oldest; token < visible; token += 32) {
                const int key = min(token + lane, visible - 1);
                const int64_t page = page_table[(int64_t)item.table_row * table_stride + (key >> PAGE_SHIFT)];
                const int64_t offset = page * (page_bytes / (int)sizeof(Held)) + ((key & (PAGE_SIZE - 1)) * NUM_KV_HEADS + item.kv_head) * HEAD_DIM;
                float score = 0;
#pragma unroll 4
                for (int d = 0; d < HEAD_DIM / 4; ++d) {
                    const float4 a = q[d], b = read_four(key_pages + offset + d * 4);
                    score = fmaf(a.x, b.x, fmaf(a.y, b.y, fmaf(a.z, b.z, fmaf(a.w, b.w, score))));
                }
                const bool is_seen = token + lane < visible && (!TREE || is_on_path(own, token + lane - item.first_visible));
                score = is_seen ? cap_score(score * key_scale, rsqrtf(HEAD_DIM)) * (LOG2E * rsqrtf(HEAD_DIM)) : -INFINITY;
                float larger = fmaxf(peak, score);
                for (int d = 16; d; d /= 2) larger = fmaxf(larger, __shfl_xor_sync(~0u, larger, d));
                const float reference = larger == -INFINITY ? 0 : larger, old = exp2f(peak - reference), weight = exp2f(score - reference);
                total = total * old + weight;
                for (int c = 0; c < HEAD_DIM / 32; ++c) sums[c] *= old;
                for (int k = 0; k < min(32, visible - token); ++k) {
                    const float w = __shfl_sync(~0u, weight, k);
                    const Held* value = value_pages + __shfl_sync(~0u, offset, k);
#pragma unroll
                    for (int c = 0; c < HEAD_DIM / 32; ++c) sums[c] = fmaf(w, read_held(value[c * 32 + lane]), sums[c]);
                }
                peak = larger;
            }
            for (int d = 16; d; d /= 2) total += __shfl_xor_sync(~0u, total, d);
            total *= value_factor;  // so all that is made of it, partial results too, is in the values' unit
            const float inverse = item.num_pieces == 1 ? 1 / total : 1;
            Number* target = item.num_pieces == 1 ? out + output_offset(item, row) : partials.sum(item.piece, row);
            for (int c = 0; c < HEAD_DIM / 32; ++c) target[c * 32 + lane] = sums[c] * inverse;
            if (item.num_pieces != 1 && lane == 0) *partials.stat(item.piece, 0, row) = make_float2(peak, total);
        }
        if (item.num_pieces > 1) merge_last(out, item, partials, counters, 0, &flag);
        if (i >= end) break;
        item = items[i];
    }
}
