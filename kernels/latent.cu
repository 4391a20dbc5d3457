// Multi-head latent attention beside the attention itself: append_latent writes latents to their slots, head_linear is a product for each head.
//
// ELEMENT: __nv_bfloat16, __half, or for append_latent float; E4M3: append_latent's pages hold codes of e4m3; SPLIT: warps that share the terms of a
// sum in head_linear, 1 or 4; STEPS: 32 terms each, that one of them has at most.
#include <cuda_fp8.h>
#include "generated.cuh"
#include "skinny.cuh"

constexpr int THREADS = 128, WARPS = THREADS / 32, STEP = 32, TILE = 16, TOKENS = 32;

#ifdef E4M3
using Held = uint8_t;  // of a page: e4m3, beyond the range its end
__device__ __forceinline__ Held keep(Element number, float factor) { return __nv_cvt_float_to_fp8(to_float(number) * factor, __NV_SATFINITE, __NV_E4M3); }
#else
using Held = Element;
__device__ __forceinline__ Held keep(Element number, float) { return number; }
#endif

// What two numbers of a head are turned by.
struct Turn {
    float cos[2], sin[2];
    __device__ __forceinline__ Turn(const Element* own_cos, const Element* own_sin, int i, int half)
        : cos{to_float(own_cos[i]), to_float(own_cos[i + half])}, sin{to_float(own_sin[i]), to_float(own_sin[i + half])} {}
    __device__ __forceinline__ Element low(Element low, Element high) const { return from_float<Element>(fmaf(to_float(high), sin[0], to_float(low) * cos[0])); }
    __device__ __forceinline__ Element high(Element low, Element high) const { return from_float<Element>(fmaf(to_float(low), sin[1], to_float(high) * cos[1])); }
};

constexpr int HELD = 4;  // numbers of a latent, a thread's, that are asked for together

// A block of column 0 normalises a token's latent, turns its key and writes both to their slot, unless that is negative; the others turn the last
// numbers of the queries' heads in place, THREADS pairs each. cos and sin [T, dim]; pages: entries of rank + dim numbers. Factors: of
// codes, what keys and latents are multiplied with: the first prompts may make them. Slots, angles and the norm are older than the kernel ahead, and
// asked for before that has ended.
extern "C" __global__ void __launch_bounds__(THREADS)
    append_latent(Held* pages, Element* query, const Element* latents, const Element* norm_weight, const Element* cos, const Element* sin, const int* slots,
                  const float* key_factor, const float* latent_factor, LatentSizes sizes) {
    __shared__ float sums[WARPS];
    launch_dependents();
    const int token = blockIdx.x, half = sizes.dim / 2, thread = threadIdx.x;
    cos += static_cast<size_t>(token) * sizes.dim, sin += static_cast<size_t>(token) * sizes.dim;
    if (blockIdx.y > 0) {
        const int pair = (blockIdx.y - 1) * THREADS + thread, i = pair % half;
        const Turn turn(cos, sin, i, half);
        Element* head = query + static_cast<size_t>(token) * sizes.query_stride + (pair / half) * sizes.head_size + sizes.head_size - sizes.dim;
        wait_for_earlier();
        if (pair >= sizes.num_heads * half) return;
        const Element low = head[i], high = head[i + half];
        head[i] = turn.low(low, high), head[i + half] = turn.high(low, high);
        return;
    }
    const int64_t slot = slots[static_cast<int64_t>(token) * sizes.slot_words];  // below 2^31 whatever its type: of an int64 the low word is read
    const Element* source = latents + static_cast<size_t>(token) * sizes.latent_stride;
    Held* target = pages + slot * (sizes.rank + sizes.dim);
    const int own = min(thread, half - 1);
    const Turn turn(cos, sin, own, half);
    Element factors[HELD], values[HELD];
#pragma unroll
    for (int j = 0; j < HELD; ++j) factors[j] = norm_weight[min(thread + j * THREADS, sizes.rank - 1)];
    wait_for_earlier();
    if (slot < 0) return;
    const float of_key = key_factor ? *key_factor : 1, of_latent = latent_factor ? *latent_factor : 1;
    const Element low = source[sizes.rank + own], high = source[sizes.rank + own + half];
#pragma unroll
    for (int j = 0; j < HELD; ++j) values[j] = source[min(thread + j * THREADS, sizes.rank - 1)];
    float sum = 0;
    auto add = [&](Element number) { sum = fmaf(to_float(number), to_float(number), sum); };
#pragma unroll
    for (int j = 0; j < HELD; ++j)
        if (thread + j * THREADS < sizes.rank) add(values[j]);
#pragma unroll 1
    for (int i = thread + HELD * THREADS; i < sizes.rank; i += THREADS) add(source[i]);
    sum = sum_warp(sum);
    if (thread % 32 == 0) sums[thread / 32] = sum;
    __syncthreads();
    sum = 0;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) sum += sums[w];
    const float inverse = inverse_rms(sum, sizes.rank, sizes.eps);
#pragma unroll
    for (int j = 0; j < HELD; ++j)
        if (const int i = thread + j * THREADS; i < sizes.rank) target[i] = keep(scale(values[j], inverse, factors[j]), of_latent);
#pragma unroll 1
    for (int i = thread + HELD * THREADS; i < sizes.rank; i += THREADS) target[i] = keep(scale(source[i], inverse, norm_weight[i]), of_latent);
    auto keep_key = [&](int i, const Turn& by, Element low, Element high) {
        target[sizes.rank + i] = keep(by.low(low, high), of_key);
        target[sizes.rank + i + half] = keep(by.high(low, high), of_key);
    };
    if (thread < half) keep_key(thread, turn, low, high);
#pragma unroll 1
    for (int i = thread + THREADS; i < half; i += THREADS) keep_key(i, Turn(cos, sin, i, half), source[sizes.rank + i], source[sizes.rank + i + half]);
}

// out [T, H, N]: of each head x [T, H, K] times weight [H, N, K] transposed. Weights stay in registers while tokens go by, and begin to come
// before the kernel ahead has ended. Grid: tiles of 16 rows of weights (WARPS / SPLIT of them a block), heads, TOKENS tokens each.
extern "C" __global__ void __launch_bounds__(THREADS)
    head_linear(Element* out, const Element* x, const Element* weight, int num_tokens, int N, int K, int x_token, int x_head, int weight_head) {
    __shared__ float sums[WARPS][8][TILE + 4];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, head = blockIdx.y;
    const int tile = SPLIT > 1 ? blockIdx.x : blockIdx.x * WARPS + warp, part = SPLIT > 1 ? warp : 0;
    const bool is_used = tile * TILE < N;
    uint4 a[STEPS][2] = {};
    const Element* rows = weight + static_cast<size_t>(head) * weight_head + static_cast<size_t>(tile * TILE + g) * K + t * 8;
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
        const int k = (part * STEPS + s) * STEP;
        if (is_used && k < K)
            a[s][0] = __ldg(reinterpret_cast<const uint4*>(rows + k)), a[s][1] = __ldg(reinterpret_cast<const uint4*>(rows + static_cast<size_t>(8) * K + k));
    }
    launch_dependents();
    wait_for_earlier();
    const int first = blockIdx.z * TOKENS;
#pragma unroll 1
    for (int begin = first; begin < min(first + TOKENS, num_tokens); begin += 8) {
        const int token = begin + g;
        uint4 b[STEPS];
#pragma unroll
        for (int s = 0; s < STEPS; ++s) {
            const int k = (part * STEPS + s) * STEP;
            b[s] = make_uint4(0, 0, 0, 0);
            if (token < num_tokens && k < K)
                b[s] = __ldcg(reinterpret_cast<const uint4*>(x + static_cast<size_t>(token) * x_token + static_cast<size_t>(head) * x_head + k + t * 8));
        }
        float acc[4] = {};
#pragma unroll
        for (int s = 0; s < STEPS; ++s) {
            multiply(acc, a[s][0].x, a[s][1].x, a[s][0].y, a[s][1].y, b[s].x, b[s].y);
            multiply(acc, a[s][0].z, a[s][1].z, a[s][0].w, a[s][1].w, b[s].z, b[s].w);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[warp][t * 2 + i % 2][g + i / 2 * 8] = acc[i];
        if (SPLIT > 1) __syncthreads(); else __syncwarp();
        const int thread = SPLIT > 1 ? threadIdx.x : lane, count = SPLIT > 1 ? THREADS : 32;
        for (int i = thread; i < 8 * TILE; i += count) {
            const int own = begin + i / TILE, n = tile * TILE + i % TILE;
            float value = 0;
#pragma unroll
            for (int p = 0; p < SPLIT; ++p) value += sums[SPLIT > 1 ? p : warp][i / TILE][i % TILE];
            if (own < num_tokens && n < N) out[(static_cast<size_t>(own) * gridDim.y + head) * N + n] = from_float<Element>(value);
        }
        if (SPLIT > 1) __syncthreads(); else __syncwarp();
    }
}
