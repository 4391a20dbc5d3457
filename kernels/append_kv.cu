// Rotary embedding of queries and keys, and keys and values written to their slots, in one pass over the projection's output.
//
// Compile-time: DTYPE 0 bfloat16, 1 float16, 2 float32; NUM_HEADS; NUM_KV_HEADS; HEAD_DIM; E4M3 1: pages hold codes of e4m3.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <stdint.h>
#include "programmatic.cuh"

#ifndef E4M3
#define E4M3 0
#endif
#if DTYPE == 0
using Number = __nv_bfloat16;
#elif DTYPE == 1
using Number = __half;
#else
using Number = float;
#endif

constexpr int WIDTH = 16 / sizeof(Number);  // numbers of one access
constexpr int HALF_STEPS = HEAD_DIM / 2 / WIDTH;
constexpr int ALL_HEADS = NUM_HEADS + 2 * NUM_KV_HEADS;

struct alignas(16) Numbers {
    Number x[WIDTH];
};

#if E4M3
using Held = uint8_t;  // of a page
struct alignas(WIDTH) Codes {
    Held x[WIDTH];
};
// Beyond the range to its end.
__device__ __forceinline__ void keep(Held* target, const Numbers& numbers, float factor) {
    Codes codes;
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) codes.x[i] = __nv_cvt_float_to_fp8(float(numbers.x[i]) * factor, __NV_SATFINITE, __NV_E4M3);
    *(Codes*)target = codes;
}
#else
using Held = Number;
__device__ __forceinline__ void keep(Held* target, const Numbers& numbers, float) { *(Numbers*)target = numbers; }
#endif

__device__ __forceinline__ void rotate(Numbers& x, const Numbers& other, const Numbers& cos, const Numbers& sin) {
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) x.x[i] = Number(fmaf(float(other.x[i]), float(sin.x[i]), float(x.x[i]) * float(cos.x[i])));
}

// A thread takes 16 bytes of each half of a head: what rotates together. factors: of codes, what a head's keys and values are multiplied with.
extern "C" __global__ void append_kv(Number* queries, Held* key_pages, Held* value_pages, const Number* qkv, const Number* cos, const Number* sin,
                                     const int* slots, const int* positions, const float* key_factors, const float* value_factors, int num_tokens,
                                     int qkv_stride, int slot_words, int position_words) {
    launch_dependents();
    wait_for_earlier();
    const int thread = blockIdx.x * blockDim.x + threadIdx.x;
    const int step = thread % HALF_STEPS, head = thread / HALF_STEPS % ALL_HEADS, token = thread / (HALF_STEPS * ALL_HEADS);
    if (token >= num_tokens) return;
    // A slot is below 2^31 whatever its type, and so is a position: of an int64 the low word is read.
    const int64_t slot = slots[(int64_t)token * slot_words];
    const Number* source = qkv + (int64_t)token * qkv_stride + head * HEAD_DIM + step * WIDTH;
    Numbers low = *(const Numbers*)source, high = *(const Numbers*)(source + HEAD_DIM / 2);
    const int kv_head = (head - NUM_HEADS) % NUM_KV_HEADS;  // of keys and values
    const bool is_value = head >= NUM_HEADS + NUM_KV_HEADS;
    if (!is_value) {
        const int64_t row = (int64_t)(positions ? positions[(int64_t)token * position_words] : token) * HEAD_DIM + step * WIDTH;
        const Numbers cos_low = *(const Numbers*)(cos + row), cos_high = *(const Numbers*)(cos + row + HEAD_DIM / 2);
        const Numbers sin_low = *(const Numbers*)(sin + row), sin_high = *(const Numbers*)(sin + row + HEAD_DIM / 2);
        const Numbers old = low;
        rotate(low, high, cos_low, sin_low);
        rotate(high, old, cos_high, sin_high);
    }
    if (head < NUM_HEADS) {
        Number* target = queries + ((int64_t)token * NUM_HEADS + head) * HEAD_DIM + step * WIDTH;
        *(Numbers*)target = low;
        *(Numbers*)(target + HEAD_DIM / 2) = high;
    } else if (slot >= 0) {
        Held* target = (is_value ? value_pages : key_pages) + (slot * NUM_KV_HEADS + kv_head) * HEAD_DIM + step * WIDTH;
        const float factor = E4M3 ? (is_value ? value_factors : key_factors)[kv_head] : 1;
        keep(target, low, factor);
        keep(target + HEAD_DIM / 2, high, factor);
    }
}
