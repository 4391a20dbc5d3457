// Rows of x rounded to e4m3, each with a scale of its own, interleaved as stored weights are (quantized.cuh); normalised first where they are to be.
//
// ELEMENT: __nv_bfloat16 or __half; VECTORS: most 16-byte vectors of a row that one of its block's threads holds; NORM: 0 or 1; SUMS: codes that are added up,
// 0, 64 or 128; BACK: 1: out is what the codes stand for, as x lies.
#include <cuda_fp8.h>
#include "block_norm.cuh"

using Element = ELEMENT;
using V = Vector<Element>;
constexpr float LARGEST = 448.0f, SMALLEST = 1e-12f;

// codes [M, K] e4m3; out [M, K]; scales [M]: a row's largest number is 448 steps; sums [K / SUMS, sum_stride]; K is a multiple of 16, and of SUMS; weight [K]:
// the norm's. Grid: rows.
extern "C" __global__ void __launch_bounds__(STRANDS)
    round_rows(uint8_t* codes, Element* out, float* scales, float* sums_of_codes, const Element* x, const Element* weight, int K, int x_stride,
               int sum_stride, float eps) {
    __shared__ float sums[STRANDS / 32], peaks[STRANDS / 32];
    const int num_vectors = K / V::SIZE;
    const Element* row = x + static_cast<size_t>(blockIdx.x) * x_stride;
    RowNorm<Element, VECTORS> norm;
    V values[VECTORS];
    launch_dependents();
    if constexpr (NORM) norm.load(weight, num_vectors);
    wait_for_earlier();
#pragma unroll
    for (int j = 0; j < VECTORS; ++j) {
        const int i = threadIdx.x + STRANDS * j;
        if (i < num_vectors) values[j] = load_fresh(row + i * V::SIZE);
    }
    if constexpr (NORM) norm.apply(values, weight, num_vectors, K, eps, sums, [](int, const V&) {});
    float peak = 0;
#pragma unroll
    for (int j = 0; j < VECTORS; ++j)
#pragma unroll
        for (int e = 0; e < V::SIZE; ++e) peak = fmaxf(peak, fabsf(to_float(values[j].values[e])));
#pragma unroll
    for (int d = 16; d; d /= 2) peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, d));
    if (threadIdx.x % 32 == 0) peaks[threadIdx.x / 32] = peak;
    __syncthreads();
    peak = peaks[0];
#pragma unroll
    for (int w = 1; w < STRANDS / 32; ++w) peak = fmaxf(peak, peaks[w]);
    const float step = fmaxf(peak, SMALLEST) / LARGEST, inverse_step = 1.0f / step;
    if (!BACK && threadIdx.x == 0) scales[blockIdx.x] = step;
    // Two threads have sixteen neighbours: pairs of the first eight lie in a word with those of the others.
    const bool is_second = threadIdx.x % 2;
#pragma unroll
    for (int j = 0; j < VECTORS; ++j) {
        const int i = threadIdx.x + STRANDS * j;
        uint32_t pairs[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const float2 pair = make_float2(to_float(values[j].values[2 * e]) * inverse_step, to_float(values[j].values[2 * e + 1]) * inverse_step);
            pairs[e] = __nv_cvt_float2_to_fp8x2(pair, __NV_SATFINITE, __NV_E4M3);
        }
        if constexpr (BACK || SUMS > 0) {
            float sum = 0;
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const float2 pair = __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(pairs[e], __NV_E4M3)));
                sum += pair.x + pair.y;
                values[j].values[2 * e] = from_float<Element>(pair.x * step), values[j].values[2 * e + 1] = from_float<Element>(pair.y * step);
            }
            if constexpr (BACK) {
                if (i < num_vectors) store(out + static_cast<size_t>(blockIdx.x) * K + i * V::SIZE, values[j]);
                continue;
            }
#pragma unroll
            for (int d = 1; d < SUMS / 8; d *= 2) sum += __shfl_xor_sync(~0u, sum, d);
            if (SUMS > 0 && i < num_vectors && threadIdx.x % (SUMS / 8 > 0 ? SUMS / 8 : 1) == 0)
                sums_of_codes[static_cast<size_t>(i * 8 / (SUMS > 0 ? SUMS : 1)) * sum_stride + blockIdx.x] = sum;
        }
        const uint32_t other = __shfl_xor_sync(~0u, is_second ? pairs[0] | pairs[1] << 16 : pairs[2] | pairs[3] << 16, 1);
        uint2 words;
        words.x = is_second ? (other & 0xffff) | pairs[2] << 16 : pairs[0] | other << 16;
        words.y = is_second ? other >> 16 | pairs[3] << 16 : pairs[1] | (other & 0xffff0000);
        if (i < num_vectors) *reinterpret_cast<uint2*>(codes + static_cast<size_t>(blockIdx.x) * K + i * 8) = words;
    }
}
