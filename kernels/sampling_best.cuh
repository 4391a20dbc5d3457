// The best token of a row after noise, and the ones behind it.
#pragma once
#include "sampling_measure.cuh"

constexpr float MARGIN = 2;  // tokens whose score is this close to the best are noted; natural logarithm

__device__ __forceinline__ float lower_bound(float score2) { return score2 - 1e-3f - fabsf(score2) * 4e-6f; }

// A race for the best score: all threads know what there is to beat, and look at exact scores only where a number's leading bits say
// that it may be beaten.
template <bool IS_NOTED>  // tokens that come within `margin` of the best, and some more, are noted
struct Race {
  const float margin;
  const Row& row;
  const RoundKeys keys;  // in registers that a warp shares, where the compiler sees that they are one warp's

  __device__ __forceinline__ Race(const Row& row, float margin) : margin(margin), row(row), keys(row.seed_low, row.seed_high) {}
  __device__ __forceinline__ static float bound() { return unorder(*static_cast<volatile int*>(&shared.bound)); }
  __device__ __forceinline__ bool is_close(float bound, unsigned half, float value) const {
    return unit_floor(half) <= exp2_fast(fmaf(value, row.to_base2, -bound)) + (1 + 0x1p-22f);
  }
  __device__ __forceinline__ uint4 leading_of(int chunk) const {
    return philox(2 * chunk, row.position, SAMPLE_STREAM, keys);
  }
  // bound: of scores in base 2. Before the first barrier.
  __device__ __forceinline__ static void prepare(float bound) {
    if (threadIdx.x == 0) shared.bound = order(bound), shared.num_noted = 0;
  }
  // A first bound from a thread's first tokens, with E <= u / (1 - u); -INF: not in the race. With a barrier.
  __device__ __forceinline__ void begin(const float (&x)[8]) const {
    const uint4 leading = leading_of(row.first);
    float reached = NONE;
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const float u = float(half_of(leading, k) + 1) * 0x1p-16f;
      if (row.first < row.num_chunks && x[k] > -INF)
        reached = fmaxf(reached, x[k] * row.to_base2 + __log2f(__fdividef(1.0001f - u, u)) - 1e-3f - margin * LOG2E);
    }
    const int in_warp = __reduce_max_sync(~0u, order(lower_bound(reached)));
    if (threadIdx.x % 32 == 0) atomicMax(&shared.bound, in_warp);
    __syncthreads();
  }
  // Tokens of a chunk, -INF: not in the race.
  __device__ __forceinline__ void look(int chunk, const float (&x)[8], const uint4& leading, unsigned long long& best) const {
    const float to_beat = bound();
    unsigned hits = 0;
#pragma unroll
    for (int k = 0; k < 8; ++k) hits |= unsigned(is_close(to_beat, half_of(leading, k), x[k])) << k;
    if (!hits) return;
    const uint4 rest = philox(2 * chunk + 1, row.position, SAMPLE_STREAM, keys);
    for (; hits; hits &= hits - 1) {
      const int k = __ffs(hits) - 1;
      float value = x[0];
      unsigned number = token_number(leading, rest, 0);
#pragma unroll
      for (int i = 1; i < 8; ++i)
        if (k == i) value = x[i], number = token_number(leading, rest, i);
      if (value == -INF) continue;
      const float score = __fadd_rn(row.scaled(value), gumbel(number));
      const unsigned long long key = score_key(score, chunk * 8 + k);
      if (IS_NOTED) {
        const int free = atomicAdd(&shared.num_noted, 1);
        if (free < THREADS) shared.noted[free] = {key, value, 0};
      }
      if (key > best) {
        best = key;
        atomicMax(&shared.bound, order(lower_bound((score - margin) * LOG2E)));
      }
    }
  }
};

// The best token after noise, of all; the row's stream has begun. IS_MEASURED: what `measure` gives, too, and close tokens are noted.
template <bool IS_MEASURED>
__device__ __forceinline__ Best find_best(const Row& row) {
  const Race<IS_MEASURED> race(row, IS_MEASURED ? MARGIN : 0);
  race.prepare(NONE);
  Stream stream(row);
  __syncthreads();
  float x[8];
  row.unpack_values(stream.peek(), x);
  race.begin(x);
  Best found = no_best();
  Logit* top = row.tops();
  for (int chunk = row.first; chunk < row.num_chunks; chunk += STRIDE) {
    const Raw raw = stream.next(chunk);
    float greatest = chunk_max(raw);
    if (IS_MEASURED) *top = from_float(greatest), top += THREADS;
    greatest = row.value(greatest);
    found.greatest = max_nan(found.greatest, greatest);
    if (IS_MEASURED) {
      const float t = greatest * row.to_base2;
      if (t > found.base + 40) found.sum *= exp2_fast(found.base - t), found.base = t;
      row.unpack_values(raw, x);
#pragma unroll
      for (int k = 0; k < 8; ++k) found.sum += exp2_fast(fmaf(x[k], row.to_base2, -found.base));
    }
    const uint4 leading = race.leading_of(chunk);
    if (!race.is_close(race.bound(), least_half(leading), greatest)) continue;
    if (!IS_MEASURED) row.unpack_values(raw, x);
    race.look(chunk, x, leading, found.key);
  }
  if (IS_MEASURED) row.end_tops(top);
  return found;
}

// The tokens ordered before (limit, limit_id).
struct Limited {
  const Row& row;
  float limit;
  int limit_id;
  __device__ __forceinline__ void load(int chunk, float (&x)[8]) const {
    row.unpack_values(row.load(chunk), x);
#pragma unroll
    for (int k = 0; k < 8; ++k)
      if (!(x[k] > limit || (x[k] == limit && chunk * 8 + k < limit_id))) x[k] = -INF;
  }
};

// The best of the tokens ordered before (limit, limit_id), once tops() are filled: a chunk is read where its greatest may win. Notes those
// within MARGIN of it, and some more.
__device__ __noinline__ unsigned long long find_among(const Row row, float limit, int limit_id) {
  const Race<true> race(row, MARGIN);
  const Limited tokens = {row, limit, limit_id};
  race.prepare(NONE);
  float x[8];
  tokens.load(row.first, x);
  __syncthreads();
  race.begin(x);
  unsigned long long best = 0;
  const Logit* top = row.tops();
  for (int chunk = row.first; chunk < row.num_chunks; chunk += STRIDE, top += THREADS) {
    const float greatest = row.value(to_float(*top));
    if (!(greatest >= limit)) continue;
    const uint4 leading = race.leading_of(chunk);
    if (!race.is_close(race.bound(), least_half(leading), greatest)) continue;
    tokens.load(chunk, x);
    race.look(chunk, x, leading, best);
  }
  return best;
}

// Notes tokens that reach `limit` and whose scores reach `bound` (base 2), and a few more; more than there is room for if any is left out.
__device__ __noinline__ void note_best(const Row row, float limit, float bound) {
  const Race<true> race(row, INF);
  race.prepare(bound);
  if (threadIdx.x == 0) shared.num_close = 0;
  __syncthreads();
  const Logit* top = row.tops();
  for (int chunk = row.first; chunk < row.num_chunks; chunk += STRIDE, top += THREADS) {
    const float greatest = row.value(to_float(*top));
    if (!(greatest >= limit) || !race.is_close(bound, least_half(race.leading_of(chunk)), greatest)) continue;
    const int free = atomicAdd(&shared.num_close, 1);
    if (free < THREADS) shared.chunks[free] = chunk;
  }
  __syncthreads();
  const int num_close = shared.num_close;
  if (num_close > THREADS && threadIdx.x == 0) shared.num_noted = INT_MAX;
  if (num_close <= THREADS && int(threadIdx.x) < num_close) {
    const int chunk = shared.chunks[threadIdx.x];
    float x[8];
    Limited{row, limit, INT_MAX}.load(chunk, x);
    unsigned long long best = 0;
    race.look(chunk, x, race.leading_of(chunk), best);
  }
  __syncthreads();
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
