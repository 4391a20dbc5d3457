// Rows of x rounded to e4m3, each with a scale of its own, interleaved as stored weights are (quantized.cuh).
//
// ELEMENT: __nv_bfloat16 or __half.
#include <cuda_fp8.h>
#include "dense.cuh"

using Element = ELEMENT;
constexpr int THREADS = 256;
constexpr float LARGEST = 448.0f, SMALLEST = 1e-12f;

// codes [M, K] e4m3; scales [M]; K is a multiple of 16. Grid: rows.
extern "C" __global__ void __launch_bounds__(THREADS) round_rows(uint8_t* codes, float* scales, const Element* x, int K, int x_stride) {
    __shared__ float peaks[THREADS / 32];
    using V = Vector<Element>;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const Element* row = x + static_cast<size_t>(blockIdx.x) * x_stride;
    wait_for_earlier();
    launch_dependents();
    float peak = 0;
    for (int k = threadIdx.x * V::SIZE; k < K; k += THREADS * V::SIZE) {
        const V v = load_fresh(row + k);
#pragma unroll
        for (int e = 0; e < V::SIZE; ++e) peak = fmaxf(peak, fabsf(to_float(v.values[e])));
    }
#pragma unroll
    for (int d = 16; d; d /= 2) peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, d));
    if (lane == 0) peaks[warp] = peak;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < THREADS / 32; ++w) peak = fmaxf(peak, peaks[w]);
    const float scale = fmaxf(peak, SMALLEST) / LARGEST, inverse = 1.0f / scale;
    if (threadIdx.x == 0) scales[blockIdx.x] = scale;
    for (int k = threadIdx.x * 16; k < K; k += THREADS * 16) {
        const V halves[2] = {load_fresh(row + k), load_fresh(row + k + V::SIZE)};
        union {
            uint4 bits;
            uint8_t bytes[16];
        } made;
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            const float value = to_float(halves[i % 4 / 2].values[i / 4 * 2 + i % 2]) * inverse;
            made.bytes[i] = __nv_cvt_float_to_fp8(value, __NV_SATFINITE, __NV_E4M3);
        }
        *reinterpret_cast<uint4*>(codes + static_cast<size_t>(blockIdx.x) * K + k) = made.bits;
    }
}
