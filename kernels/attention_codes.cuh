// Keys and values as codes of e4m3 in shared memory, which become numbers of float16 in registers, right before the products that take them.
//
// float16 holds every code, and one instruction makes two of them numbers; so all products are of float16, whatever the queries are: a row of queries
// is brought into its range by a power of two, and weights by another one, so that neither loses bits that it had in its own type.
//
// Loaded by ldmatrix, whose elements are two codes: of keys a thread then has four neighbouring columns of sixteen, where a product has two of either
// half. As queries and keys are summed over the columns, any order will do that both have, so queries are put into that of the codes. Of values,
// transposed, a thread has two neighbouring columns of two tokens: one product has the even columns of sixteen, the next one the odd ones.
#pragma once
#include "attention_tensor.cuh"
#include "e4m3.cuh"

constexpr bool IS_FLOAT16 = E4M3 || DTYPE == 1;  // what products are of
constexpr float WEIGHT_SHIFT = 7;  // weights of codes are 2^7 times as large, 2^15 at most: float16 then has what is 2^-21 of the largest whole

// What a number that is made of a code is multiplied with to be the code's.
#if __CUDA_ARCH__ >= 890
constexpr float CODE_UNIT = 1;
#else
constexpr float CODE_UNIT = 256;
#endif

// Chunks of sixteen codes, swapped about by row as in `swizzle`.
__device__ __forceinline__ uint32_t code_place(int row, int chunk) {
    return row * HELD_BYTES + ((chunk ^ (HELD_BYTES >= 128 ? row & 7 : row >> 1 & 3)) << 4);
}

constexpr int STEP_SHIFT = E4M3 ? 4 : 5;  // the address of n times sixteen columns on is that of even chunks xor n << STEP_SHIFT

// What a thread copies of a tile: sixteen codes of a row.
template <typename Action>
__device__ __forceinline__ void for_codes(Action action) {
    constexpr int PARTS = HELD_BYTES / 16, STEP = THREADS / PARTS;
#pragma unroll
    for (int i = 0; i < TILE / STEP; ++i) action(threadIdx.x / PARTS + i * STEP, threadIdx.x % PARTS);
}

// Of an item's queries in shared memory, in place: rows of float16, of which each sixteen columns are in the order that codes are loaded in: of four
// neighbouring ones the first two in the first half, the others in the second. scales: what the products of each row are multiplied with.
__device__ __forceinline__ void prepare_queries(uint32_t buffer, int num_rows, float scale, float* scales) {
    constexpr int PARTS = HEAD_DIM / 16;
    for (int i = threadIdx.x; i < (num_rows * PARTS + 31) / 32 * 32; i += THREADS) {
        const int row = i / PARTS, part = i % PARTS;
        const uint32_t first = buffer + swizzle(row, 2 * part), second = first ^ 16;
        const bool is_own = row < num_rows;
        uint32_t words[8] = {};
        if (is_own) {
            asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3]) : "r"(first) : "memory");
            asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(words[4]), "=r"(words[5]), "=r"(words[6]), "=r"(words[7]) : "r"(second) : "memory");
        }
        float inverse = 1;
#if DTYPE == 0
        uint32_t largest = 0;  // two of its kind: sizes of numbers are ordered as their bits are
#pragma unroll
        for (int j = 0; j < 8; ++j) largest = __vmaxu2(largest, words[j] & 0x7fff7fff);
#pragma unroll
        for (int d = PARTS / 2; d; d /= 2) largest = __vmaxu2(largest, __shfl_xor_sync(~0u, largest, d));
        const int exponent = max(41, (int)(max(largest & 0xffff, largest >> 16) >> 7));  // as bfloat16 has it
        const float factor = __int_as_float((127 + 141 - exponent) << 23);                // the largest becomes 2^14 or more, below 2^15
        inverse = __int_as_float((127 - 141 + exponent) << 23);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const __half2 pair = __floats2half2_rn(__uint_as_float(words[j] << 16) * factor, __uint_as_float(words[j] & 0xffff0000) * factor);
            words[j] = *reinterpret_cast<const uint32_t*>(&pair);
        }
#endif
        if (is_own) {
            asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(first), "r"(words[0]), "r"(words[2]), "r"(words[4]), "r"(words[6]) : "memory");
            asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(second), "r"(words[1]), "r"(words[3]), "r"(words[5]), "r"(words[7]) : "memory");
            if (part == 0) scales[row] = scale * inverse;
        }
    }
}

// Four codes -> the numbers of the first two and of the others.
__device__ __forceinline__ void expand_codes(uint32_t word, uint32_t& low, uint32_t& high) {
#if __CUDA_ARCH__ >= 890
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.rn.f16x2.e4m3x2 %0, l; cvt.rn.f16x2.e4m3x2 %1, h;}" : "=r"(low), "=r"(high) : "r"(word));
#else
    expand_e4m3<true>(word, low, high);
#endif
}

// Of eight keys and the next eight, in the columns of two products: theirs of the first, then those of the second.
__device__ __forceinline__ void expand_keys(uint32_t (&b)[4], uint32_t (&next)[4]) {
    const uint32_t words[4] = {b[0], b[1], b[2], b[3]};
#pragma unroll
    for (int n = 0; n < 2; ++n) {
        expand_codes(words[n], b[2 * n], b[2 * n + 1]);
        expand_codes(words[2 + n], next[2 * n], next[2 * n + 1]);
    }
}

// Of sixteen tokens and the next sixteen: what the product of the even columns takes, then that of the odd ones.
__device__ __forceinline__ void expand_values(uint32_t (&v)[4], uint32_t (&next)[4]) {
    const uint32_t words[4] = {v[0], v[1], v[2], v[3]};
#pragma unroll
    for (int n = 0; n < 2; ++n) {
        expand_codes(pick_bytes<0x3120>(words[n]), v[n], v[2 + n]);
        expand_codes(pick_bytes<0x3120>(words[2 + n]), next[n], next[2 + n]);
    }
}

// Weights of two neighbouring keys, as products take them.
__device__ __forceinline__ void store_pair(void* target, float a, float b) {
    if constexpr (IS_FLOAT16) *(__half2*)target = __floats2half2_rn(a, b);
    else *(__nv_bfloat162*)target = __floats2bfloat162_rn(a, b);
}
