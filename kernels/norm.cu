// RMS norm, alone or after the addition of a projection's output to the residual stream.
// ELEMENT: the element type; VECTORS: most 16-byte vectors of a row that one of its block's threads holds.
#include "block_norm.cuh"

using Element = ELEMENT;
using V = Vector<Element>;
constexpr int N = VECTORS;

// One block of STRANDS threads per row, which it keeps in registers. residual may be null; else it becomes residual + x, and that is normalised.
extern "C" __global__ void __launch_bounds__(STRANDS)
    rms_norm(Element* out, Element* residual, const Element* x, const Element* weight, int size, float eps) {
    __shared__ float sums[STRANDS / 32];
    const int num_vectors = size / V::SIZE;
    const size_t row = static_cast<size_t>(blockIdx.x) * size;
    RowNorm<Element, N> norm;
    V values[N];
    launch_dependents();
    norm.load(weight, num_vectors);
    wait_for_earlier();
#pragma unroll
    for (int j = 0; j < N; ++j) {
        const int i = threadIdx.x + STRANDS * j;
        if (i < num_vectors) values[j] = load_fresh(x + row + i * V::SIZE);
    }
    if (residual) {
#pragma unroll
        for (int j = 0; j < N; ++j) {
            const int i = threadIdx.x + STRANDS * j;
            if (i >= num_vectors) continue;
            const V old = load_fresh(residual + row + i * V::SIZE);
#pragma unroll
            for (int e = 0; e < V::SIZE; ++e) values[j].values[e] = from_float<Element>(to_float(old.values[e]) + to_float(values[j].values[e]));
        }
#pragma unroll
        for (int j = 0; j < N; ++j) {
            const int i = threadIdx.x + STRANDS * j;
            if (i < num_vectors) store(residual + row + i * V::SIZE, values[j]);
        }
    }
    norm.apply(values, weight, num_vectors, size, eps, sums, [&](int i, const V& v) { store(out + row + i * V::SIZE, v); });
}

// Rows of few elements (heads): a warp per row.
extern "C" __global__ void __launch_bounds__(STRANDS)
    rms_norm_narrow(Element* out, Element* residual, const Element* x, const Element* weight, int num_rows, int size, float eps) {
    constexpr int PER_LANE = 2;
    const int lane = threadIdx.x % 32, num_vectors = size / V::SIZE;
    const int index = blockIdx.x * (STRANDS / 32) + threadIdx.x / 32;
    launch_dependents();
    wait_for_earlier();
    if (index >= num_rows) return;
    const size_t row = static_cast<size_t>(index) * size;
    V values[PER_LANE];
    float total = 0;
#pragma unroll
    for (int j = 0; j < PER_LANE; ++j) {
        const int i = lane + 32 * j;
        if (i < num_vectors) {
            values[j] = load_fresh(x + row + i * V::SIZE);
            if (residual) {
                const V old = load_fresh(residual + row + i * V::SIZE);
#pragma unroll
                for (int e = 0; e < V::SIZE; ++e) values[j].values[e] = from_float<Element>(to_float(old.values[e]) + to_float(values[j].values[e]));
                store(residual + row + i * V::SIZE, values[j]);
            }
        }
        total += sum_warp(add_squares(0.0f, values[j]));
    }
    const float inverse = inverse_rms(total, size, eps);
#pragma unroll
    for (int j = 0; j < PER_LANE; ++j) {
        const int i = lane + 32 * j;
        if (i < num_vectors) {
            const V w = load_constant(weight + i * V::SIZE);
#pragma unroll
            for (int e = 0; e < V::SIZE; ++e) values[j].values[e] = scale(values[j].values[e], inverse, w.values[e]);
            store(out + row + i * V::SIZE, values[j]);
        }
    }
}
