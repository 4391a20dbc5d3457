// Where a row is cut: the last token that top_k or top_p keeps, without sorting the row.
#pragma once
#include "distribution_list.cuh"

// What one thread keeps of a search, for all.
struct Search {
  Goal goal;
  ScoreRange field;
  long long below, above;  // places at which the goal is reached, and is not; `below` is a supposition unless is_counted
  float num_below, num_above, mass_above;
  bool is_counted, is_over;
  bool is_short;  // the goal is not reached at `below` either, where mass_above is all that there is

  // Whether the tokens between the places are few; if not, and they are all equal, they are searched by id.
  __device__ void go_on(int vocab_size) {
    is_over = is_short || (is_counted && num_below - num_above <= CAPACITY) || (field.is_by_id && above - below <= 1);  // one token
    if (is_over || above - below > 1) return;
    field = {true, field.image_at(below)};
    below = -(vocab_size - 1), above = 1;
  }
};

__shared__ Search search;

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
__device__ __noinline__ void weigh(ScoreRange field, int every) {
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

// Sets place j of `shared.places`: evenly among the values, or among the integers every other turn, since small values have most of these.
__device__ __forceinline__ void set_place(int j, int turn, bool is_guessed) {
  const ScoreRange field = search.field;
  const long long below = search.below, above = search.above;
  long long place = below + (above - below) * j / 8;
  if (!field.is_by_id && (is_guessed || (j && turn % 2 == 0))) {
    const float value = is_guessed ? shared.places[j] : field.image_at(below) * (1 - j / 8.0f) + field.image_at(above - 1) * (j / 8.0f);
    place = max(below, min(field.place_of(fmaxf(fminf(value, FLT_MAX), -FLT_MAX)), above - 1));
  }
  shared.places[j] = field.image_at(place);
}

// Takes the two neighbours among `shared.places` between which the goal is reached.
__device__ __forceinline__ void narrow() {
  Search& s = search;
  const long long first = s.below;
  for (int j = 0; j < 8; ++j) {
    const long long place = s.field.place_of(shared.places[j]);
    if (shared.sums[s.goal.is_count ? j : 8 + j] >= s.goal.wanted) {
      s.below = place, s.num_below = shared.sums[j], s.is_counted = true;
    } else if (place < s.above) {
      s.above = place, s.num_above = shared.sums[j], s.mass_above = shared.sums[8 + j];
      s.is_short = place <= first;
      break;
    }
  }
  s.go_on(shared.row.vocab_size);
}

// low: tokens below it are surely not kept.
__device__ __noinline__ Cut find_cut(Goal goal, float low) {
  low = fmaxf(low, find_floor(goal));
  if (low > -FLT_MAX && !(goal.is_count && goal.wanted > CAPACITY)) {
    const int count = gather({false, 0}, low, INF);
    if (count >= 1 && count <= CAPACITY) return settle(goal, count, 0, 0);
  }
  const bool has_guess = shared.row.num_chunks / STRIDE >= 4;
  __syncthreads();  // some thread may still read how the row's search before this one has ended
  if (threadIdx.x == 0) {
    ScoreRange field = {false, 0};
    search = {goal, field, field.place_of(low), field.place_of(shared.row.greatest) + 1, 0, 0, 0, false, false, false};
    search.go_on(shared.row.vocab_size);
  }
  __syncthreads();
  if (has_guess && !search.field.is_by_id) guess(goal);
#pragma unroll 1
  for (int turn = 0; !search.is_over; ++turn) {
    if (threadIdx.x < 8) set_place(threadIdx.x, turn, has_guess && turn == 0);
    weigh(search.field, 1);
    if (threadIdx.x == 0) narrow();
    __syncthreads();
  }
  const ScoreRange field = search.field;
  const float start = field.image_at(search.below);
  const Cut all = {field.is_by_id ? field.tied : start, INT_MAX, search.mass_above, false};
  if (search.is_short) return all;
  const int count = gather(field, start, field.image_at(search.above));
  if (count < 1 || count > CAPACITY) return all;  // does not happen
  return settle(search.goal, count, int(search.num_above), search.mass_above);
}
