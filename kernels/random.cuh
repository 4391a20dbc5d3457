// Counter-based random numbers, by the formulas of kernels/reference/sampling.py: equal inputs give equal ids on every device.
#pragma once
#include <cstdint>
#include "exp2.cuh"
#include "generated.cuh"

// The keys of the rounds of Philox4x32-10 for a seed.
struct RoundKeys {
  unsigned low[10], high[10];
  __device__ __forceinline__ RoundKeys(unsigned seed_low, unsigned seed_high) {
#pragma unroll
    for (int i = 0; i < 10; ++i) low[i] = seed_low + i * 0x9E3779B9u, high[i] = seed_high + i * 0xBB67AE85u;
  }
};

// Numbers 4 * block .. 4 * block + 3 of (seed, position, stream).
__device__ __forceinline__ uint4 philox(unsigned block, unsigned position, unsigned stream, const RoundKeys& keys) {
  unsigned c0 = block, c1 = position, c2 = stream, c3 = 0;
#pragma unroll
  for (int i = 0; i < 10; ++i) {
    const uint64_t a = uint64_t(c0) * 0xD2511F53u, b = uint64_t(c2) * 0xCD9E8D57u;
    c0 = unsigned(b >> 32) ^ c1 ^ keys.low[i], c1 = unsigned(b), c2 = unsigned(a >> 32) ^ c3 ^ keys.high[i], c3 = unsigned(a);
  }
  return make_uint4(c0, c1, c2, c3);
}

// Token 8 * chunk + k has half k of block 2 * chunk's words as its number's leading 16 bits, and half k of block 2 * chunk + 1's behind
// them: one block says of eight tokens whether the rest of their numbers matters.
__device__ __forceinline__ unsigned half_of(const uint4& words, int k) {
  const unsigned word = k < 4 ? (k < 2 ? words.x : words.y) : (k < 6 ? words.z : words.w);
  return k & 1 ? word >> 16 : word & 0xffff;
}

__device__ __forceinline__ unsigned least_half(const uint4& words) {
  const unsigned least = __vminu2(__vminu2(words.x, words.y), __vminu2(words.z, words.w));
  return min(least & 0xffff, least >> 16);
}

__device__ __forceinline__ unsigned token_number(const uint4& leading, const uint4& rest, int k) {
  return half_of(leading, k) << 16 | half_of(rest, k);
}

// log and log1p without fused steps or flags that would change them.
__device__ __forceinline__ float gumbel(unsigned number) {
  float u = __fmul_rn(__fadd_rn(__uint2float_rn(number), 0.5f), 0x1p-32f);
  u = fminf(u, 1 - 0x1p-24f);
  return -logf(-log1pf(-u));
}

// Integers in the order of the floats.
__device__ __forceinline__ int order(float x) {
  const int i = __float_as_int(x);
  return i ^ ((i >> 31) & 0x7fffffff);
}

__device__ __forceinline__ float unorder(int i) { return __int_as_float(i ^ ((i >> 31) & 0x7fffffff)); }

// A score and its token: the greater is the better, of equal scores the lowest id. Zero is below all.
__device__ __forceinline__ unsigned long long score_key(float score, int token_id) {
  return (unsigned long long)(unsigned(order(score)) ^ 0x80000000u) << 32 | unsigned(~token_id);
}

__device__ __forceinline__ int key_token(unsigned long long key) { return ~int(unsigned(key)); }

__device__ __forceinline__ float key_score(unsigned long long key) { return unorder(int(unsigned(key >> 32) ^ 0x80000000u)); }

// A number's leading 16 bits as a float in [1, 2): never above 1 + u.
__device__ __forceinline__ float unit_floor(unsigned half) { return __uint_as_float(half << 7 | 0x3f800000u); }
