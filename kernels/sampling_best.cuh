// The best token of a row after noise, and the ones behind it.
#pragma once
#include "sampling_measure.cuh"

constexpr float MARGIN = 2;  // tokens whose score is this close to the best are noted; natural logarithm

__device__ __forceinline__ float lower_bound(float score2) { return score2 - 1e-3f - fabsf(score2) * 4e-6f; }

// The best token after noise. ALL: of all. MEASURE: the same, and what `measure` gives. AMONG: of those ordered before (limit, limit_id),
// with tops() filled. AMONG_AND_SUM: the same when they are most, and the sum of those that reach `mark`. All but ALL note the tokens
// that come within MARGIN of the best, and some more.
constexpr int ALL = 0, MEASURE = 1, AMONG = 2, AMONG_AND_SUM = 3;

template <int MODE>
__device__ __forceinline__ Best find_best(const Row& row, float limit, int limit_id, float base, float mark) {
  constexpr bool IS_ALL = MODE == ALL || MODE == MEASURE;
  constexpr float margin = MODE == ALL ? 0 : MARGIN;
  if (threadIdx.x == 0) shared.bound = order(NONE), shared.num_noted = 0;
  Raw raw = row.load(row.first);
  __syncthreads();
  {  // a first bound from a few tokens, with E <= u / (1 - u)
    float x[8];
    row.unpack_values(raw, x);
    const uint4 leading = philox(2 * row.first, row.position, SAMPLE_STREAM, row.seed_low, row.seed_high);
    float reached = NONE;
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const float u = float(half_of(leading, k) + 1) * 0x1p-16f;
      if (row.first < row.num_chunks && x[k] > -INF && (IS_ALL || x[k] > limit))
        reached = fmaxf(reached, x[k] * row.to_base2 + __log2f(__fdividef(1.0001f - u, u)) - 1e-3f - margin * LOG2E);
    }
    const int in_warp = __reduce_max_sync(~0u, order(lower_bound(reached)));
    if (threadIdx.x % 32 == 0) atomicMax(&shared.bound, in_warp);
    __syncthreads();
  }
  Best found = no_best();
  if (!IS_ALL) found.base = base;
  Logit* top = row.tops();
  const auto look = [&](int chunk, const Raw& raw) {
    float x[8];
    row.unpack_values(raw, x);
    float greatest = -INF;
    if (IS_ALL) {
      greatest = chunk_max(raw);
      if (MODE == MEASURE) *top = from_float(greatest), top += THREADS;
      greatest = row.value(greatest);
      found.greatest = max_nan(found.greatest, greatest);
      const float t = greatest * row.to_base2;
      if (t > found.base + 40) found.sum *= exp2_fast(found.base - t), found.base = t;
    } else {
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        if (!(x[k] > limit || (x[k] == limit && chunk * 8 + k < limit_id))) x[k] = -INF;
        greatest = fmaxf(greatest, x[k]);
      }
    }
    const uint4 leading = philox(2 * chunk, row.position, SAMPLE_STREAM, row.seed_low, row.seed_high);
    if (MODE != AMONG)
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        const float weight = exp2_fast(fmaf(x[k], row.to_base2, -found.base));
        if (IS_ALL) found.sum += weight;
        else if (x[k] >= mark) found.top += weight;
      }
    // First the least half against the greatest logit, then each against its own.
    const float bound = unorder(*static_cast<volatile int*>(&shared.bound));
    const auto is_close = [&](unsigned half, float value) {
      return unit_floor(half) <= exp2_fast(fmaf(value, row.to_base2, -bound)) + (1 + 0x1p-22f);
    };
    if (!is_close(least_half(leading), greatest)) return;
    unsigned hits = 0;
#pragma unroll
    for (int k = 0; k < 8; ++k) hits |= unsigned(is_close(half_of(leading, k), x[k])) << k;
    if (!hits) return;
    const uint4 rest = philox(2 * chunk + 1, row.position, SAMPLE_STREAM, row.seed_low, row.seed_high);
    while (hits) {
      const int k = __ffs(hits) - 1;
      hits &= hits - 1;
      float value = x[0];
      unsigned number = token_number(leading, rest, 0);
#pragma unroll
      for (int i = 1; i < 8; ++i)
        if (k == i) value = x[i], number = token_number(leading, rest, i);
      if (value == -INF) continue;
      const float score = __fadd_rn(row.scaled(value), gumbel(number));
      const unsigned long long key = score_key(score, chunk * 8 + k);
      if (MODE != ALL) {
        const int free = atomicAdd(&shared.num_noted, 1);
        if (free < THREADS) shared.noted[free] = {key, value, 0};
      }
      if (key > found.key) {
        found.key = key;
        atomicMax(&shared.bound, order(lower_bound((score - margin) * LOG2E)));
      }
    }
  };
  if (MODE != AMONG) {
    for (int chunk = row.first; chunk < row.num_chunks; chunk += STRIDE) {
      const Raw own = raw;
      raw = row.load(chunk + STRIDE);
      look(chunk, own);
    }
    if (MODE == MEASURE) row.end_tops(top);
  } else {
    row.visit<2, true>(limit, look);
  }
  return found;
}

// The best noted token that is ordered before (limit, limit_id) and scores between `least` and `below`.
__device__ Next find_next(float limit, int limit_id, unsigned long long below, float least) {
  Next next = {0, shared.num_noted > THREADS};
  if (int(threadIdx.x) < min(shared.num_noted, THREADS)) {
    const Noted noted = shared.noted[threadIdx.x];
    const bool is_in = noted.value > limit || (noted.value == limit && key_token(noted.key) < limit_id);
    if (is_in && noted.key < below && noted.key > score_key(least, -1)) next.key = noted.key;
  }
  return next;
}
