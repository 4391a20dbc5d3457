// RMS norm of a row that one block of 256 threads holds: thread i has the vectors i, i + 256 and so on.
#pragma once

#include "dense.cuh"

constexpr int STRANDS = 256;  // threads of a block

template <typename T, int N>
struct RowNorm {
    using V = Vector<T>;
    static constexpr bool HAS_ROOM = N <= 4;  // for the weights beside the row
    V weights[HAS_ROOM ? N : 1];

    // Weights do not change: before the kernel ahead has ended.
    __device__ __forceinline__ void load(const T* weight, int num_vectors) {
#pragma unroll
        for (int j = 0; j < (HAS_ROOM ? N : 0); ++j) {
            const int i = threadIdx.x + STRANDS * j;
            if (i < num_vectors) weights[j] = load_constant(weight + i * V::SIZE);
        }
    }

    // sums: shared memory for a number of each warp; take: called with each vector's number and what became of it.
    template <typename Take>
    __device__ __forceinline__ void apply(V (&values)[N], const T* weight, int num_vectors, int size, float eps, float* sums, Take take) const {
        float sum = 0;
#pragma unroll
        for (int j = 0; j < N; ++j) sum = add_squares(sum, values[j]);
        sum = sum_warp(sum);
        if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
        __syncthreads();
        float total = 0;
#pragma unroll
        for (int j = 0; j < STRANDS / 32; ++j) total += sums[j];
        const float inverse = inverse_rms(total, size, eps);
#pragma unroll
        for (int j = 0; j < N; ++j) {
            const int i = threadIdx.x + STRANDS * j;
            if (i >= num_vectors) continue;
            V w;
            if constexpr (HAS_ROOM) w = weights[j];
            else w = load_constant(weight + i * V::SIZE);
#pragma unroll
            for (int e = 0; e < V::SIZE; ++e) values[j].values[e] = scale(values[j].values[e], inverse, w.values[e]);
            take(i, values[j]);
        }
    }
};
