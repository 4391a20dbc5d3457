// Rows where few tokens may be kept, as in most that trained models give: all are listed with their scores, and one warp decides.
#pragma once
#include "sampling_kept.cuh"

constexpr float LIST_ONE = 0x1p40f;  // the greatest's weight among integers: added up in any order, they give the same

// Lists the tokens that reach `least`, with their scores and weights; whether there was room. The counts are zero before. Where true,
// warps that have nothing in it do not wait for it.
__device__ __forceinline__ bool list_tokens(const Row& row, float least, const Best& all) {
  row.visit_tops(least, [&](int chunk, float) {
    const int free = atomicAdd(&shared.num_chunks, 1);
    if (free < THREADS) shared.chunks[free] = chunk;
  });
  __syncthreads();
  const int num_chunks = shared.num_chunks;
  if (num_chunks > THREADS) return false;
  if (int(threadIdx.x) < num_chunks) {
    const int chunk = shared.chunks[threadIdx.x];
    const Raw raw = row.load(chunk);  // on its way while random numbers are made
    const RoundKeys keys(row.seed_low, row.seed_high);
    const uint4 leading = philox(2 * chunk, row.position, SAMPLE_STREAM, keys);
    const uint4 rest = philox(2 * chunk + 1, row.position, SAMPLE_STREAM, keys);
    float x[8];
    row.unpack_values(raw, x);
    unsigned hits = 0;
#pragma unroll
    for (int k = 0; k < 8; ++k) hits |= unsigned(x[k] >= least) << k;
    for (; hits; hits &= hits - 1) {
      const int k = __ffs(hits) - 1;
      float value = x[0];
      unsigned number = token_number(leading, rest, 0);
#pragma unroll
      for (int i = 1; i < 8; ++i)
        if (k == i) value = x[i], number = token_number(leading, rest, i);
      const float weight = exp2_fast(fmaf(value, row.to_base2, -all.base)) * exp2_fast(all.base - all.greatest * row.to_base2);
      const int free = atomicAdd(&shared.num_listed, 1);
      if (free < THREADS) shared.noted[free] = {score_key(__fadd_rn(row.scaled(value), gumbel(number)), chunk * 8 + k), value, weight};
    }
  }
  static_assert(THREADS >= 8 * 32);
  if (num_chunks <= 32) {  // all is the first warp's, and there is room
    __syncwarp();
    return true;
  }
  __syncthreads();
  return shared.num_listed <= THREADS;
}

__device__ __forceinline__ bool is_before(float value, int token_id, float other, int other_id) {
  return value > other || (value == other && token_id < other_id);
}

struct Mass {  // of tokens in the list
  int rank;
  unsigned long long mass;
};

// Counts and weighs the listed tokens that `is_in`(value, token id) names.
template <class IsIn>
__device__ __forceinline__ Mass weigh_listed(int count, const IsIn& is_in) {
  Mass own = {0, 0};
#pragma unroll 1
  for (int i = threadIdx.x % 32; i < count; i += 32) {
    const Noted noted = shared.noted[i];
    if (is_in(noted.value, key_token(noted.key))) ++own.rank, own.mass += __float2ull_rn(noted.weight * LIST_ONE);
  }
  // A lane's mass is below 2^46: two parts, of 32 lanes each below 2^31.
  const unsigned low = __reduce_add_sync(~0u, unsigned(own.mass) & 0xffffff), high = __reduce_add_sync(~0u, unsigned(own.mass >> 24));
  return {__reduce_add_sync(~0u, own.rank), ((unsigned long long)high << 24) + low};
}

// The token that `draw` wants, of the list alone, by one warp. Every token that may be kept is in it, the top_k where there is one.
__device__ __forceinline__ int choose_listed(const Row& row, const RequestParams& params, int top_k, float least, const Best& all) {
  const float top_p = params.top_p, min_p = params.min_p;
  const int count = shared.num_listed;
  float wanted = top_p * (all.sum * exp2_fast(all.base - all.greatest * row.to_base2)) * LIST_ONE;
  if (top_k > 0 && top_p < 1) {  // of the top_k: those above the k-th greatest value, and as many of its equals as are missing
    long long below = order(least) >> VALUE_SHIFT, above = (order(all.greatest) >> VALUE_SHIFT) + 1;  // at least k reach `below`, fewer `above`
    while (above - below > 1) {
      const long long middle = below + (above - below) / 2;
      const float value = value_at(middle);
      int reaching = 0;
#pragma unroll 1
      for (int i = threadIdx.x % 32; i < count; i += 32) reaching += shared.noted[i].value >= value;
      (int(__reduce_add_sync(~0u, reaching)) >= top_k ? below : above) = middle;
    }
    const float value = value_at(below);
    const Mass before = weigh_listed(count, [&](float x, int) { return x > value; });
    const Mass equal = weigh_listed(count, [&](float x, int) { return x == value; });
    wanted = top_p * (float(before.mass) + float(equal.mass) / float(max(equal.rank, 1)) * float(top_k - before.rank));
  }
  float last = -INF;  // only tokens before (last, last_id) may be kept
  int last_id = INT_MAX;
  while (true) {
    Noted best = {0, 0, 0};
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < count; i += 32) {
      const Noted noted = shared.noted[i];
      if (noted.key > best.key && is_before(noted.value, key_token(noted.key), last, last_id)) best = noted;
    }
    const unsigned long long key = warp_max(best.key);
    if (!key) return -1;  // not reached: the likeliest token is always kept
    const int token_id = key_token(key);
    const float value = __shfl_sync(~0u, best.value, __ffs(__ballot_sync(~0u, best.key == key)) - 1);
    bool is_kept = !(min_p > 0) || expf(row.scaled(value) - row.scaled(all.greatest)) >= min_p;
    if (is_kept && (top_k > 0 || top_p < 1)) {
      const Mass before = weigh_listed(count, [&](float x, int id) { return is_before(x, id, value, token_id); });
      is_kept = (top_k <= 0 || before.rank < top_k) && (top_p >= 1 || before.rank == 0 || float(before.mass) < wanted);
    }
    if (is_kept) return token_id;
    last = value, last_id = token_id;
  }
}
