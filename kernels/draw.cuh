// Draws a token of a row by its weights, by one block.
#pragma once
#include "random.cuh"

constexpr int DRAW_THREADS = 1024;

struct Noise {
  unsigned position, stream, seed_low, seed_high;
};

struct Drawing {
  unsigned long long cells[32];
  int bound;  // order() of a score: tokens that do not reach it need not be looked at
};

__device__ __forceinline__ unsigned long long block_max(unsigned long long key, unsigned long long* cells) {
#pragma unroll
  for (int mask = 16; mask; mask /= 2) {
    const unsigned long long other = __shfl_xor_sync(~0u, key, mask);
    if (other > key) key = other;
  }
  __syncthreads();
  if (threadIdx.x % 32 == 0) cells[threadIdx.x / 32] = key;
  __syncthreads();
  key = threadIdx.x % 32 < blockDim.x / 32 ? cells[threadIdx.x % 32] : 0;
#pragma unroll
  for (int mask = 16; mask; mask /= 2) {
    const unsigned long long other = __shfl_xor_sync(~0u, key, mask);
    if (other > key) key = other;
  }
  return key;
}

// Numbers 8 * chunk .. 8 * chunk + 7 of a row, 0 past its end. `row` is 16-byte aligned where vocab_size is a multiple of 8.
__device__ __forceinline__ void load_weights(const float* row, int chunk, int vocab_size, float (&weights)[8]) {
  if (vocab_size % 8 == 0) {
    const float4 a = reinterpret_cast<const float4*>(row)[2 * chunk], b = reinterpret_cast<const float4*>(row)[2 * chunk + 1];
    weights[0] = a.x, weights[1] = a.y, weights[2] = a.z, weights[3] = a.w, weights[4] = b.x, weights[5] = b.y, weights[6] = b.z, weights[7] = b.w;
  } else {
#pragma unroll
    for (int k = 0; k < 8; ++k) weights[k] = 8 * chunk + k < vocab_size ? row[8 * chunk + k] : 0;
  }
}

// The greatest log(weight) + Gumbel noise of the tokens with weights above 0, as `score_key`; 0: there is none. fill(chunk, weights) gives
// those of eight tokens. Blocks of DRAW_THREADS.
template <class Fill>
__device__ __forceinline__ unsigned long long draw_block(const Noise& noise, int vocab_size, Drawing& shared, const Fill& fill) {
  if (threadIdx.x == 0) shared.bound = order(-1e30f);
  __syncthreads();
  const RoundKeys keys(noise.seed_low, noise.seed_high);
  unsigned long long best = 0;
  for (int chunk = threadIdx.x; chunk < (vocab_size + 7) / 8; chunk += DRAW_THREADS) {
    float weights[8], greatest = 0;
    fill(chunk, weights);
#pragma unroll
    for (int k = 0; k < 8; ++k) greatest = fmaxf(greatest, weights[k]);
    if (greatest <= 0) continue;
    const uint4 leading = philox(2 * chunk, noise.position, noise.stream, keys);
    // A token of weight w beats a score s only if u < w / exp(s).
    const float factor = fminf(exp2_fast(-1.442695f * unorder(*static_cast<volatile int*>(&shared.bound)) + 1e-3f), 1e38f);
    if (unit_floor(least_half(leading)) > fmaf(greatest, factor, 1 + 0x1p-22f)) continue;
    const uint4 rest = philox(2 * chunk + 1, noise.position, noise.stream, keys);
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      if (weights[k] > 0 && unit_floor(half_of(leading, k)) <= fmaf(weights[k], factor, 1 + 0x1p-22f)) {
        const float score = __fadd_rn(logf(weights[k]), gumbel(token_number(leading, rest, k)));
        const unsigned long long key = score_key(score, 8 * chunk + k);
        if (key > best) best = key, atomicMax(&shared.bound, order(score - 1e-3f - fabsf(score) * 1e-5f));
      }
    }
  }
  return block_max(best, shared.cells);
}
