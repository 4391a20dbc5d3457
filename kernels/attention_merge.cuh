// Partial results of items that are split, and how they become one.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include "attention_plan.cuh"
#include "programmatic.cuh"

#if DTYPE == 0
using Number = __nv_bfloat16;
using Pair = __nv_bfloat162;
__device__ __forceinline__ Pair to_pair(float a, float b) { return __floats2bfloat162_rn(a, b); }
#elif DTYPE == 1
using Number = __half;
using Pair = __half2;
__device__ __forceinline__ Pair to_pair(float a, float b) { return __floats2half2_rn(a, b); }
#else
using Number = float;
using Pair = float2;
__device__ __forceinline__ Pair to_pair(float a, float b) { return make_float2(a, b); }
#endif

constexpr int WIDTH = HEAD_DIM / CLUSTER;  // columns of the output that one CTA of a cluster finishes
static_assert(WIDTH % 8 == 0, "eight columns are merged at a time");

__device__ __forceinline__ int64_t output_offset(const Item& item, int row) {
    const int r = item.row_start + row;
    return ((int64_t)(item.query_start + r / GROUP) * NUM_KV_HEADS + item.kv_head) * (GROUP * HEAD_DIM) + r % GROUP * HEAD_DIM;
}

// Partial results: [piece][row][HEAD_DIM] sums of exp2(score - max) * value, then [piece][rank][row] (max, sum of exp2).
struct Partials {
    float* sums;
    float2* stats;
    __device__ float* sum(int piece, int row) const { return sums + ((int64_t)piece * MAX_ROWS + row) * HEAD_DIM; }
    __device__ float2* stat(int piece, int rank, int row) const { return stats + ((int64_t)piece * CLUSTER + rank) * MAX_ROWS + row; }
};

// Eight columns of a row, merged from partial results.
struct Merged {
    float peak = -INFINITY, total = 0, sums[8] = {};
    // Adds those of `count` pieces that are `first`, first + step and so on, four at a time so that their loads overlap. GUARDED: where few are there,
    // others are not asked for.
    template <bool GUARDED = false>
    __device__ __forceinline__ void add(const Partials& partials, int first_piece, int count, int rank, int row, int column, int first = 0, int step = 1) {
        constexpr int BATCH = 4;
        for (int begin = first; begin < count; begin += BATCH * step) {
            float2 stats[BATCH];
            float4 low[BATCH], high[BATCH];
#pragma unroll
            for (int i = 0; i < BATCH; ++i) {
                if (GUARDED && begin + i * step >= count) {
                    stats[i] = make_float2(-INFINITY, 0), low[i] = high[i] = make_float4(0, 0, 0, 0);
                    continue;
                }
                const int piece = piece_at(first_piece, min(begin + i * step, count - 1));
                stats[i] = __ldcg(partials.stat(piece, rank, row));
                low[i] = __ldcg((const float4*)(partials.sum(piece, row) + column));
                high[i] = __ldcg((const float4*)(partials.sum(piece, row) + column) + 1);
            }
            float larger = peak;
#pragma unroll
            for (int i = 0; i < BATCH; ++i) larger = fmaxf(larger, stats[i].x);
            const float reference = larger == -INFINITY ? 0 : larger, old = exp2f(peak - reference);
            peak = larger;
            total *= old;
#pragma unroll
            for (int c = 0; c < 8; ++c) sums[c] *= old;
#pragma unroll
            for (int i = 0; i < BATCH; ++i) {
                const float weight = begin + i * step < count ? exp2f(stats[i].x - reference) : 0;
                total += stats[i].y * weight;
                sums[0] += low[i].x * weight, sums[1] += low[i].y * weight, sums[2] += low[i].z * weight, sums[3] += low[i].w * weight;
                sums[4] += high[i].x * weight, sums[5] += high[i].y * weight, sums[6] += high[i].z * weight, sums[7] += high[i].w * weight;
            }
        }
    }
    // Adds what another thread has merged.
    __device__ __forceinline__ void add(const Merged& other) {
        const float larger = fmaxf(peak, other.peak), reference = larger == -INFINITY ? 0 : larger;
        const float own = exp2f(peak - reference), others = exp2f(other.peak - reference);
        peak = larger, total = total * own + other.total * others;
#pragma unroll
        for (int c = 0; c < 8; ++c) sums[c] = sums[c] * own + other.sums[c] * others;
    }
    __device__ __forceinline__ void store(Number* target) const {
        const float inverse = 1 / total;
#pragma unroll
        for (int c = 0; c < 8; c += 2) ((Pair*)target)[c / 2] = to_pair(sums[c] * inverse, sums[c + 1] * inverse);
    }
};

// Called by a CTA that has stored its partial result of a split: the last one to do so merges all of them. flag: in shared memory.
__device__ void merge_last(Number* out, const Item& item, const Partials& partials, int* counters, int rank, int* flag) {
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        int* counter = counters + item.segment * CLUSTER + rank;
        *flag = atomicAdd(counter, 1) == item.num_pieces - 1;
        if (*flag) *counter = 0;  // for the next launch
        __threadfence();
    }
    __syncthreads();
    if (!*flag) return;
    for (int i = threadIdx.x; i < item.num_rows * (WIDTH / 8); i += THREADS) {
        const int row = i / (WIDTH / 8), column = rank * WIDTH + i % (WIDTH / 8) * 8;
        Merged merged;
        merged.add(partials, item.first_piece, item.num_pieces, rank, row, column);
        merged.store(out + output_offset(item, row) + column);
    }
}

#if CASCADE

// Merges what the queries that share a prefix have from the prefix and from their own tokens. One CTA per token and KV head.
extern "C" __global__ void __launch_bounds__(THREADS) merge_attention(Number* out, float* partial_sums, float2* partial_stats, const int4* token_places,
                                                                      const int2* segment_pieces) {
    wait_for_earlier();
    const int4 place = token_places[blockIdx.x];
    if (place.x < 0) return;
    const Partials partials{partial_sums, partial_stats};
    for (int i = threadIdx.x; i < GROUP * (HEAD_DIM / 8); i += THREADS) {
        const int head = i / (HEAD_DIM / 8), column = i % (HEAD_DIM / 8) * 8, rank = column / WIDTH;
        Merged merged;
#pragma unroll
        for (int part = 0; part < 2; ++part) {
            const int row = (part ? place.w : place.y) * GROUP + head;
            const int2 pieces = segment_pieces[(part ? place.z : place.x) + row / MAX_ROWS * NUM_KV_HEADS + blockIdx.y];
            merged.add(partials, pieces.x, pieces.y, rank, row % MAX_ROWS, column);
        }
        merged.store(out + (((int64_t)blockIdx.x * NUM_KV_HEADS + blockIdx.y) * GROUP + head) * HEAD_DIM + column);
    }
}

#endif
