// Pairs of tokens and experts, sorted by expert and cut into chunks of few rows.
#pragma once

#include <cstdint>

struct ExpertLists {
    int4* chunks;     // of the rank's own experts: number among them, first row, rows, most rows of any chunk as they were cut
    int* rows;        // [num_pairs] pairs in the order of experts
    int* num_chunks;  // [1]
    // In one piece of memory, in this order.
    __device__ ExpertLists(int* lists, int max_chunks, int num_pairs)
        : chunks(reinterpret_cast<int4*>(lists)), rows(lists + 4 * max_chunks), num_chunks(rows + num_pairs) {}
};

// A block's units of `count`, which blocks share evenly. In 32 bits: who waits for this has nothing to do meanwhile, and longer divisions take long.
struct Share {
    int first, end;
    __device__ __forceinline__ explicit Share(unsigned count) {
        const unsigned each = count / gridDim.x, rest = count - each * gridDim.x;
        auto begin_of = [&](unsigned block) { return static_cast<int>(block * each + block * rest / gridDim.x); };
        first = begin_of(blockIdx.x), end = begin_of(blockIdx.x + 1);
    }
};

// By one block of THREADS. chosen(pair): its expert; numbers from `first` on are the rank's own: others are left out. A chunk has up to `least` rows,
// or twice, four times as many up to `most` where an expert's would not fit else, lest its weights are read again. KEPT: of a thread's pairs, lest all
// are asked for twice; shared: 2 num_own ints.
template <int THREADS, int KEPT, typename Chosen>
__device__ void group_pairs(const ExpertLists& lists, Chosen&& chosen, int num_pairs, int first, int num_own, int least, int most, int* shared) {
    __shared__ int2 warp_sums[THREADS / 32];
    __shared__ int warp_peaks[THREADS / 32];
    int *counts = shared, *places = shared + num_own, kept[KEPT];
    auto expert_of = [&](int p) {
        const int e = p < num_pairs ? chosen(p) - first : -1;
        return e < num_own ? e : -1;
    };
#pragma unroll
    for (int i = 0; i < KEPT; ++i) kept[i] = expert_of(i * THREADS + threadIdx.x);
#pragma unroll 1
    for (int e = threadIdx.x; e < num_own; e += THREADS) counts[e] = 0;
    __syncthreads();
    auto each = [&](auto&& visit) {
#pragma unroll
        for (int i = 0; i < KEPT; ++i)
            if (kept[i] >= 0) visit(i * THREADS + threadIdx.x, kept[i]);
#pragma unroll 1
        for (int p = KEPT * THREADS + threadIdx.x; p < num_pairs; p += THREADS)
            if (const int e = expert_of(p); e >= 0) visit(p, e);
    };
    each([&](int, int e) { atomicAdd(counts + e, 1); });
    __syncthreads();
    const int per = (num_own + THREADS - 1) / THREADS, begin = min(num_own, static_cast<int>(threadIdx.x) * per), end = min(num_own, begin + per);
    int rows_per_chunk = least;
    if (least < most) {
        int peak = 0;
#pragma unroll 1
        for (int e = begin; e < end; ++e) peak = max(peak, counts[e]);
        peak = __reduce_max_sync(~0u, peak);
        if (threadIdx.x % 32 == 0) warp_peaks[threadIdx.x / 32] = peak;
        __syncthreads();
#pragma unroll 1
        for (int w = 0; w < THREADS / 32; ++w) peak = max(peak, warp_peaks[w]);
#pragma unroll 1
        while (rows_per_chunk < peak && rows_per_chunk < most) rows_per_chunk *= 2;
    }
    int2 sum = {};
#pragma unroll 1
    for (int e = begin; e < end; ++e) sum.x += counts[e], sum.y += (counts[e] + rows_per_chunk - 1) / rows_per_chunk;
    int2 before = sum;
#pragma unroll 1
    for (int d = 1; d < 32; d *= 2) {
        const int x = __shfl_up_sync(~0u, before.x, d), y = __shfl_up_sync(~0u, before.y, d);
        if (threadIdx.x % 32 >= d) before.x += x, before.y += y;
    }
    if (threadIdx.x % 32 == 31) warp_sums[threadIdx.x / 32] = before;
    __syncthreads();
    before.x -= sum.x, before.y -= sum.y;
#pragma unroll 1
    for (int w = 0; w < threadIdx.x / 32; ++w) before.x += warp_sums[w].x, before.y += warp_sums[w].y;
#pragma unroll 1
    for (int e = begin; e < end; ++e) {
        places[e] = before.x;
        const int parts = (counts[e] + rows_per_chunk - 1) / rows_per_chunk;
#pragma unroll 1
        for (int i = 0; i < parts; ++i) {  // as even as can be
            const int low = counts[e] * i / parts, high = counts[e] * (i + 1) / parts;
            lists.chunks[before.y + i] = make_int4(e, before.x + low, high - low, rows_per_chunk);
        }
        before.x += counts[e], before.y += parts;
    }
    if (threadIdx.x == THREADS - 1) *lists.num_chunks = before.y;
    __syncthreads();
    each([&](int p, int e) { lists.rows[atomicAdd(places + e, 1)] = p; });
}

// The same of one token, by one warp: lanes below num_pairs have its experts, all of them different.
__device__ __forceinline__ void group_one(const ExpertLists& lists, int expert, int num_pairs, int first, int num_own, int least, int lane) {
    const bool is_own = lane < num_pairs && expert >= first && expert < first + num_own;
    const unsigned own = __ballot_sync(~0u, is_own);
    const int place = __popc(own & ((1u << lane) - 1));
    if (is_own) lists.chunks[place] = make_int4(expert - first, place, 1, least), lists.rows[place] = lane;
    if (lane == 0) *lists.num_chunks = __popc(own);
}
