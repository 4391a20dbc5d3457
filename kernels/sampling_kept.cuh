// Whether top_k and top_p keep a token: how it stands among all, and the top_k as a whole.
#pragma once
#include "sampling_rows.cuh"

// How a token stands among all.
__device__ __noinline__ Standing find_standing(const Row row, float value, int token_id, float base) {
  Standing standing = {0, 0};
  const int own = token_id / 8;
  const float above = nextafterf(value, INF);
  const auto add = [&](float x) { standing.mass += exp2_fast(fmaf(x, row.to_base2, -base)), ++standing.rank; };
  if (own % STRIDE == row.first) {  // equal ones count before the token's own place
    float x[8];
    row.unpack_values(row.load(own), x);
#pragma unroll
    for (int k = 0; k < 8; ++k)
      if (x[k] == value && k < token_id % 8) add(x[k]);
  }
  constexpr int DEPTH = LOGIT == 0 ? 2 : 3;  // a row that comes here may be the last on its multiprocessor
  row.visit<DEPTH, true>(value, [&](int chunk, const Raw& raw) {
    float x[8];
    row.unpack_values(raw, x);
    const float least = chunk < own ? value : above;
#pragma unroll
    for (int k = 0; k < 8; ++k)
      if (x[k] >= least) add(x[k]);
  });
  return standing;
}

constexpr int VALUE_SHIFT = LOGIT == 0 ? 0 : LOGIT == 1 ? 16 : 13;  // the values' step among the integers of `order`

__device__ __forceinline__ float value_at(long long place) {
  const int bits = int(place) * (1 << VALUE_SHIFT);
  return unorder(place < 0 ? bits | ((1 << VALUE_SHIFT) - 1) : bits);
}

// The k-th greatest value, in [low, high], by counting at eight places at a time. count(places, counts) adds up a thread's values.
template <class Count>
__device__ float find_kth(const Count& count, int k, float low, float high, int& turn) {
  long long below = order(low) >> VALUE_SHIFT, above = (order(high) >> VALUE_SHIFT) + 1;  // at least k reach `below`, fewer `above`
  while (above - below > 1) {
    const long long start = below, width = above - below;
    float places[8];
    Counts counts = {};
#pragma unroll
    for (int j = 0; j < 8; ++j) places[j] = value_at(start + width * (j + 1) / 9);
    count(places, counts);
    counts = reduce(counts, turn);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const long long place = start + width * (j + 1) / 9;
      if (counts.at_least[j] >= k) below = place;
      else if (place < above) above = place;
    }
  }
  return value_at(below);
}

__device__ __forceinline__ void count_value(float x, const float (&places)[8], Counts& counts) {
#pragma unroll
  for (int j = 0; j < 8; ++j) counts.at_least[j] += x >= places[j];
}

// Notes the values that reach `least`; their number.
__device__ int gather(const Row& row, float least, int& turn) {
  if (threadIdx.x == 0) shared.num_noted = 0;
  __syncthreads();
  row.visit<DEPTH, true>(least, [&](int, const Raw& raw) {
    float x[8];
    row.unpack_values(raw, x);
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      if (!(x[k] >= least)) continue;
      const int place = atomicAdd(&shared.num_noted, 1);
      if (place < THREADS) shared.noted[place].value = x[k];
    }
  });
  __syncthreads();
  const bool is_full = shared.num_noted > THREADS;
  const Standing all = reduce(Standing{threadIdx.x ? 0 : shared.num_noted, float(is_full)}, turn);
  return all.mass > 0 ? INT_MAX : all.rank;
}

struct Kth {
  float value, sum;  // of the top_k: the least value; their probabilities, as Best::sum
};

// The top_k as a whole; they reach `low`. Where a block has the row, those that are so few that they can be gathered do not come here.
__device__ __noinline__ Kth find_top_k(const Row row, int k, float low, float greatest, float base, int& turn) {
  if (CLUSTER > 1 && gather(row, low, turn) < INT_MAX) {
    const float own = int(threadIdx.x) < shared.num_noted ? shared.noted[threadIdx.x].value : -INF;
    const auto count_own = [&](const float (&places)[8], Counts& counts) { count_value(own, places, counts); };
    const float value = find_kth(count_own, k, low, greatest, turn);
    const bool is_above = own > value;
    const float weight = exp2_fast(fmaf(own, row.to_base2, -base));
    const Standing above = reduce(Standing{is_above, is_above ? weight : 0}, turn);
    return {value, above.mass + float(k - above.rank) * exp2_fast(fmaf(value, row.to_base2, -base))};
  }
  const auto count_all = [&](const float (&places)[8], Counts& counts) {
    row.visit<1, true>(places[0], [&](int, const Raw& raw) {
      float x[8];
      row.unpack_values(raw, x);
#pragma unroll
      for (int e = 0; e < 8; ++e) count_value(x[e], places, counts);
    });
  };
  const float value = find_kth(count_all, k, low, greatest, turn);
  const Standing above = reduce(find_standing(row, value, 0, base), turn);
  return {value, above.mass + float(k - above.rank) * exp2_fast(fmaf(value, row.to_base2, -base))};
}
