// Pairs of tokens and experts, sorted by expert and cut into chunks of few rows.
#pragma once

#include <cstdint>

struct ExpertLists {
    int4* chunks;     // of the rank's own experts: number among them, first row, rows
    int* rows;        // [num_pairs] pairs in the order of experts
    int* num_chunks;  // [1]
    // In one piece of memory, in this order.
    __device__ ExpertLists(int* lists, int max_chunks, int num_pairs)
        : chunks(reinterpret_cast<int4*>(lists)), rows(lists + 4 * max_chunks), num_chunks(rows + num_pairs) {}
};

// By one block of THREADS. experts [num_pairs], whose numbers from `first` on are the rank's own: others are left out. shared: 2 num_own ints.
template <int THREADS>
__device__ void group_pairs(const ExpertLists& lists, const int64_t* experts, int num_pairs, int first, int num_own, int rows_per_chunk, int* shared) {
    __shared__ int2 warp_sums[THREADS / 32];
    int *counts = shared, *places = shared + num_own;
    for (int e = threadIdx.x; e < num_own; e += THREADS) counts[e] = 0;
    __syncthreads();
    for (int p = threadIdx.x; p < num_pairs; p += THREADS) {
        const int e = static_cast<int>(__ldcg(experts + p)) - first;
        if (e >= 0 && e < num_own) atomicAdd(counts + e, 1);
    }
    __syncthreads();
    const int per = (num_own + THREADS - 1) / THREADS, begin = min(num_own, static_cast<int>(threadIdx.x) * per), end = min(num_own, begin + per);
    int2 sum = {};
    for (int e = begin; e < end; ++e) sum.x += counts[e], sum.y += (counts[e] + rows_per_chunk - 1) / rows_per_chunk;
    int2 before = sum;
    for (int d = 1; d < 32; d *= 2) {
        const int x = __shfl_up_sync(~0u, before.x, d), y = __shfl_up_sync(~0u, before.y, d);
        if (threadIdx.x % 32 >= d) before.x += x, before.y += y;
    }
    if (threadIdx.x % 32 == 31) warp_sums[threadIdx.x / 32] = before;
    __syncthreads();
    before.x -= sum.x, before.y -= sum.y;
    for (int w = 0; w < threadIdx.x / 32; ++w) before.x += warp_sums[w].x, before.y += warp_sums[w].y;
    for (int e = begin; e < end; ++e) {
        places[e] = before.x;
        const int parts = (counts[e] + rows_per_chunk - 1) / rows_per_chunk;
        for (int i = 0; i < parts; ++i) {  // as even as can be
            const int low = counts[e] * i / parts, high = counts[e] * (i + 1) / parts;
            lists.chunks[before.y + i] = make_int4(e, before.x + low, high - low, 0);
        }
        before.x += counts[e], before.y += parts;
    }
    if (threadIdx.x == THREADS - 1) *lists.num_chunks = before.y;
    __syncthreads();
    for (int p = threadIdx.x; p < num_pairs; p += THREADS) {
        const int e = static_cast<int>(__ldcg(experts + p)) - first;
        if (e >= 0 && e < num_own) lists.rows[atomicAdd(places + e, 1)] = p;
    }
}
