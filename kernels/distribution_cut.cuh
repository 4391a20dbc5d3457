// Where a row is cut: the last token that top_k or top_p keeps, without sorting the row.
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
struct Field {
  static constexpr int SHIFT = LOGIT == 0 ? 0 : LOGIT == 1 ? 16 : 13;  // the values' step among the integers of `order`
  bool is_by_id;
  float tied;

  __device__ __forceinline__ float image(float x, int id) const { return !is_by_id ? x : x == tied ? float(-id) : x > tied ? INF : -INF; }
  __device__ __forceinline__ long long place_of(float x) const { return is_by_id ? (long long)(x) : order(x) >> SHIFT; }
  __device__ __forceinline__ float image_at(long long place) const {
    if (is_by_id) return float(place);
    const int bits = int(unsigned(place) << SHIFT);
    return unorder(place < 0 ? bits | ((1 << SHIFT) - 1) : bits);
  }
};

// A value that the greatest of so many chunks reach that they count, or weigh, what is wanted together: the greatest such of a few;
// -FLT_MAX if none is. Tokens below it have at least as many, or as much, before them.
__device__ float find_floor(const Goal& goal) {
  const Row row = shared.row;
  if (goal.wanted > (goal.is_count ? float(row.num_chunks) : shared.all.top)) return -FLT_MAX;
#pragma unroll 1
  for (float window = 4; window < 1000; window *= 4) {  // base 2
    float sums[8] = {};
    const float step = window / 8 / row.to_base2, least = row.greatest - step * 8;
    const Logit* top = row.tops() + threadIdx.x;
    for (int chunk = row.first(); chunk < row.num_chunks; chunk += STRIDE, top += THREADS) {
      const float value = to_float(*top);
      if (!(value >= least)) continue;
      const float weight = goal.is_count ? 1 : row.weight(value);
#pragma unroll
      for (int j = 0; j < 8; ++j)
        if (value >= row.greatest - step * (j + 1)) sums[j] += weight;
    }
    add_up(sums);
    for (int j = 0; j < 8; ++j)
      if (shared.sums[j] >= goal.wanted) return fmaxf(row.greatest - step * (j + 1), -FLT_MAX);
  }
  return -FLT_MAX;
}

// How many tokens reach each of the eight `shared.places`, in ascending order, and their masses behind: `shared.sums`.
__device__ __noinline__ void weigh(Field field, int every) {
  const Row row = shared.row;
  float sums[16] = {}, places[8];
  __syncthreads();
#pragma unroll
  for (int j = 0; j < 8; ++j) places[j] = shared.places[j];
  row.visit<LOGIT == 0 ? 1 : 2, true>(field.is_by_id ? field.tied : places[0], every, [&](int chunk, const Raw& raw) {
    float x[8];
    row.unpack_values(raw, x);
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const float weight = row.weight(x[k]), image = field.image(x[k], 8 * chunk + k);
#pragma unroll
      for (int j = 0; j < 8; ++j)
        if (image >= places[j]) sums[j] += 1, sums[8 + j] += weight;
    }
  });
  add_up(sums);
}

// `shared.places` near the goal, by a part of the row: it is halved thrice a turn, by value, and the places lie around what is left.
__device__ void guess(const Goal& goal) {
  constexpr int EVERY = 8;
  const float* sums = shared.sums + (goal.is_count ? 0 : 8);
  float above = shared.row.greatest, below = above - fminf(60 / shared.row.to_base2, 2 * (above - shared.all.least_top)), wanted = 0;
#pragma unroll 1
  for (int i = 0; i < 4; ++i) {
    const float step = (above - below) / 8;
    if (threadIdx.x < 8) shared.places[threadIdx.x] = i == 0 && threadIdx.x == 0 ? -INF : below + step * threadIdx.x;
    weigh({false, 0}, EVERY);
    if (i == 0) wanted = goal.wanted / (goal.is_count ? float(shared.row.vocab_size) : shared.all.sum) * sums[0];
    int num_reached = 0;
    for (int j = 1; j < 8; ++j) num_reached += sums[j] >= wanted;
    below += step * num_reached, above = below + step;
  }
  if (threadIdx.x < 8) shared.places[threadIdx.x] = below + (above - below) * (5 * threadIdx.x / 7.0f - 2);
  __syncthreads();
}

// Lists the tokens from `low` to below `high` in every block, as keys; their number. More than CAPACITY: none.
__device__ __noinline__ int gather(Field field, float low, float high) {
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

// low: tokens below it are surely not kept.
__device__ __noinline__ Cut find_cut(Goal goal, float low) {
  Field field = {false, 0};
  const float floor = find_floor(goal);
  low = fmaxf(low, floor);
  if (low > -FLT_MAX && !(goal.is_count && goal.wanted > CAPACITY)) {
    const int count = gather(field, low, INF);
    if (count >= 1 && count <= CAPACITY) return settle(goal, count, 0, 0);
  }
  // The goal is reached at place `below` and not at `above`. Without `is_counted` the first is a supposition.
  long long below = field.place_of(low), above = field.place_of(shared.row.greatest) + 1;
  bool is_counted = false;
  float num_below = 0, num_above = 0, mass_above = 0;
  const bool has_guess = shared.row.num_chunks / STRIDE >= 4;
  if (has_guess) guess(goal);
#pragma unroll 1
  for (int i = 0; !(is_counted && num_below - num_above <= CAPACITY); ++i) {
    if (above - below <= 1) {
      if (field.is_by_id) break;  // one token
      field = {true, field.image_at(below)};
      below = -(shared.row.vocab_size - 1), above = 1;
    }
    // Places lie evenly among the values, or among the integers: every other time, since small values have most integers.
    if (threadIdx.x < 8) {
      const int j = threadIdx.x;
      const bool is_guessed = has_guess && i == 0;
      long long place = below + (above - below) * j / 8;
      if (!field.is_by_id && (is_guessed || (j && i % 2 == 0))) {
        const float wanted = is_guessed ? shared.places[j] : field.image_at(below) * (1 - j / 8.0f) + field.image_at(above - 1) * (j / 8.0f);
        place = max(below, min((long long)(field.place_of(fmaxf(fminf(wanted, FLT_MAX), -FLT_MAX))), above - 1));
      }
      shared.places[j] = field.image_at(place);
    }
    weigh(field, 1);
    const long long first = below;
    for (int j = 0; j < 8; ++j) {
      const long long place = field.place_of(shared.places[j]);
      if (shared.sums[goal.is_count ? j : 8 + j] >= goal.wanted) {
        below = place, num_below = shared.sums[j], is_counted = true;
      } else if (place <= first) {  // all tokens from here on are too few
        return {field.is_by_id ? field.tied : shared.places[j], INT_MAX, shared.sums[8 + j], false};
      } else if (place < above) {
        above = place, num_above = shared.sums[j], mass_above = shared.sums[8 + j];
      }
    }
    __syncthreads();  // before the places change
  }
  const float start = field.image_at(below);
  const int count = gather(field, start, field.image_at(above));
  if (count < 1 || count > CAPACITY) return {field.is_by_id ? field.tied : start, INT_MAX, mass_above, false};  // not reached
  return settle(goal, count, int(num_above), mass_above);
}
