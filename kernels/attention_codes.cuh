// Keys and values as codes of e4m3 in shared memory, which become numbers in registers, right before the products that take them.
//
// Loaded by ldmatrix, whose elements are two codes: of keys a thread then has four neighbouring columns of sixteen, where a product has two of either
// half. As queries and keys are summed over the columns, any order will do that both have, so queries are loaded in that of the codes. Of values,
// transposed, a thread has two neighbouring columns of two tokens: one product has the even columns of sixteen, the next one the odd ones.
#pragma once
#include "attention_tensor.cuh"
#include "e4m3.cuh"

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

// Sixteen columns of rows `row` to row + 15 of the queries: four neighbouring ones a thread, the first two where a product has its first half.
__device__ __forceinline__ void load_query_for_codes(uint32_t (&a)[4], uint32_t buffer, int row, int k, int lane) {
    const int chunk = 2 * k + (lane >> 1 & 1), inner = (lane & 1) * 8;
#pragma unroll
    for (int h = 0; h < 2; ++h)
        asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
                     : "=r"(a[h]), "=r"(a[2 + h])
                     : "r"(buffer + swizzle(min(row + h * 8 + (lane >> 2), MAX_ROWS - 1), chunk) + inner)
                     : "memory");
}

__device__ __forceinline__ void expand_code_pairs(uint32_t low, uint32_t high, uint32_t& first, uint32_t& second) {
    first = low, second = high;
    shift_codes<DTYPE == 1>(first, second);
    if (DTYPE == 1) first = times_256(first), second = times_256(second);
}

// Of eight keys and the next eight, in the columns of two products: theirs of the first, then those of the second.
__device__ __forceinline__ void expand_keys(uint32_t (&b)[4], uint32_t (&next)[4]) {
    const uint32_t words[4] = {b[0], b[1], b[2], b[3]};
#pragma unroll
    for (int n = 0; n < 2; ++n) {
        expand_code_pairs(pick_bytes<0x9180>(words[n]), pick_bytes<0xb3a2>(words[n]), b[2 * n], b[2 * n + 1]);
        expand_code_pairs(pick_bytes<0x9180>(words[2 + n]), pick_bytes<0xb3a2>(words[2 + n]), next[2 * n], next[2 * n + 1]);
    }
}

// Of sixteen tokens and the next sixteen: what the product of the even columns takes, then that of the odd ones.
__device__ __forceinline__ void expand_values(uint32_t (&v)[4], uint32_t (&next)[4]) {
    const uint32_t words[4] = {v[0], v[1], v[2], v[3]};
#pragma unroll
    for (int n = 0; n < 2; ++n) {
        expand_code_pairs(pick_bytes<0xa280>(words[n]), pick_bytes<0xb391>(words[n]), v[n], v[2 + n]);
        expand_code_pairs(pick_bytes<0xa280>(words[2 + n]), pick_bytes<0xb391>(words[2 + n]), next[n], next[2 + n]);
    }
}
