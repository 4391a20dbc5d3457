// The tokens around a row's cut, listed and sorted.
#pragma once
#include "distribution_rows.cuh"

// Tokens above `value` are kept, and of those equal to it the ones up to `id`.
struct Cut {
  float value;
  int id;
  float mass;     // of the kept tokens
  bool has_both;  // top_p has been seen to, too
};

struct Goal {
  bool is_count;  // keeps `wanted` tokens; else those with a mass below `wanted` before them, and always one
  float wanted;
  float top_p;    // of a count: which of these tokens top_p keeps is found, too, where that takes no more readings; 1: off
};

// What tokens are searched by: their values, or, of those that equal `tied`, their ids. Either is a float, and places among the floats
// are integers in the same order.
struct ScoreRange {
  static constexpr int SHIFT = LOGIT == 0 ? 0 : LOGIT == 1 ? 16 : 13;  // the values' step among the integers of `order`
  bool is_by_id;
  float tied;

  __device__ __forceinline__ float image(float x, int id) const { return !is_by_id ? x : x == tied ? float(-id) : x > tied ? INF : -INF; }
  __device__ __forceinline__ long long place_of(float x) const { return is_by_id ? (long long)(x) : (long long)(order(x) >> SHIFT); }
  __device__ __forceinline__ float image_at(long long place) const {
    if (is_by_id) return float(place);
    const int bits = int(unsigned(place) << SHIFT);
    return unorder(place < 0 ? bits | ((1 << SHIFT) - 1) : bits);
  }
};

// Lists the tokens from `low` to below `high` in every block, as keys; their number. More than CAPACITY: none.
__device__ __noinline__ int gather(ScoreRange field, float low, float high) {
  const Row row = shared.row;
  if (threadIdx.x == 0) shared.num_own = 0;
  __syncthreads();
  row.visit<LOGIT == 0 ? 2 : 4, true>(field.is_by_id ? field.tied : low, 1, [&](int chunk, const Raw& raw) {
    float x[8];
    row.unpack_values(raw, x);
    unsigned hits = 0;
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const float image = field.image(x[k], 8 * chunk + k);
      hits |= unsigned(image >= low && image < high) << k;
    }
    if (!hits) return;
    int place = atomicAdd(&shared.num_own, __popc(hits));
#pragma unroll
    for (int k = 0; k < 8; ++k)
      if ((hits >> k & 1) && place < CAPACITY) shared.own[place++] = score_key(x[k] + 0.0f, 8 * chunk + k);
  });
  sync_row();
  int total = 0;
#pragma unroll
  for (int block = 0; block < CLUSTER; ++block) {
#if CLUSTER > 1
    const Shared& other = *cg::this_cluster().map_shared_rank(&shared, block);
#else
    const Shared& other = shared;
#endif
    const int count = other.num_own;
    for (int i = threadIdx.x; i < min(count, CAPACITY - total); i += THREADS) shared.keys[total + i] = other.own[i];
    total = min(total + count, CAPACITY + 1);
  }
  for (int i = total + threadIdx.x; i < CAPACITY; i += THREADS) shared.keys[i] = 0;
  sync_row();
  return total;
}

// The first `count` keys or more, greatest first, by bitonic sort.
__device__ void sort(unsigned long long* keys, int count) {
  for (int length = 2; length / 2 < count; length *= 2) {
    for (int stride = length / 2; stride; stride /= 2) {
      // A warp has 64 neighbours, so strides below 32 stay within what it wrote itself.
      if (stride >= 32) __syncthreads();
      else __syncwarp();
      const int i = 2 * threadIdx.x - (threadIdx.x & (stride - 1));
      const unsigned long long a = keys[i], b = keys[i + stride];
      if ((a < b) == !(i & length)) keys[i] = b, keys[i + stride] = a;
    }
  }
  __syncthreads();
}

// The goal's cut in the list of `count` >= 1 tokens, behind num_above others of mass_above.
__device__ __noinline__ Cut settle(Goal goal, int count, int num_above, float mass_above) {
  sort(shared.keys, count);
  const int own = 2 * threadIdx.x, lane = threadIdx.x % 32;  // two neighbours a thread
  const float first = own < count ? shared.row.weight(key_score(shared.keys[own])) : 0;
  const float second = own + 1 < count ? shared.row.weight(key_score(shared.keys[own + 1])) : 0;
  float sum = first + second;
#pragma unroll
  for (int i = 1; i < 32; i *= 2) {
    const float other = __shfl_up_sync(~0u, sum, i);
    if (lane >= i) sum += other;
  }
  float before = __shfl_up_sync(~0u, sum, 1);
  if (lane == 0) before = 0;
  if (lane == 31) shared.totals[threadIdx.x / 32] = sum;
  __syncthreads();
  float prior = mass_above;
  for (int i = 0; i < int(threadIdx.x) / 32; ++i) prior += shared.totals[i];
  before += prior;
  // Of the first `limit` listed: those with less than `wanted` before them.
  const auto keep = [&](float wanted, int limit) {
    if (threadIdx.x == 0) shared.num_kept = limit;
    __syncthreads();
    if (own < limit && own + num_above > 0 && before >= wanted) atomicMin(&shared.num_kept, own);
    else if (own + 1 < limit && before + first >= wanted) atomicMin(&shared.num_kept, own + 1);
    __syncthreads();
    return shared.num_kept;
  };
  const auto mass_of = [&](int kept) {
    if (own == kept - 1) shared.mass = before + first;
    if (own + 1 == kept - 1) shared.mass = before + first + second;
    __syncthreads();
    return shared.mass;
  };
  int kept = goal.is_count ? max(min(int(goal.wanted) - num_above, count), 1) : max(keep(goal.wanted, count), 1);
  float mass = mass_of(kept);
  const bool has_both = goal.is_count && goal.top_p < 1 && num_above == 0;
  if (has_both) {
    kept = keep(goal.top_p * mass, kept);  // its barriers are also between reading `mass` and writing it again
    mass = mass_of(kept);
  }
  const unsigned long long last = shared.keys[kept - 1];
  return {key_score(last), key_token(last), mass, has_both};
}
