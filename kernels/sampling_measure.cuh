// First readings of a row: its greatest logit, its softmax, and about where top_p ends.
#pragma once
#include <cfloat>
#include "sampling_rows.cuh"

// The likeliest token, the lowest id of equals.
__device__ Best find_greatest(const Row& row) {
  Best found = no_best();
  float best = -INF;
  int best_chunk = -1;
  row.visit<DEPTH, false>(0, [&](int chunk, const Raw& raw) {
    const float greatest = chunk_max(raw);
    found.greatest = max_nan(found.greatest, greatest);
    if (greatest > best) best = greatest, best_chunk = chunk;
  });
  if (best_chunk >= 0) {
    float x[8];
    unpack(row.load(best_chunk), x);
    int place = 7;
#pragma unroll
    for (int k = 6; k >= 0; --k)
      if (x[k] == best) place = k;
    found.key = score_key(best, best_chunk * 8 + place);
  }
  return found;
}

// The softmax's sum, and the part of it from the greatest of each chunk. Fills tops().
__device__ __forceinline__ Best measure(const Row& row) {
  Best found = no_best();
  Logit* top = row.tops();
  int turn = 0;
  row.begin_stream();
  for (int chunk = row.first; chunk < row.num_chunks; chunk += STRIDE, ++turn, top += THREADS) {
    const Raw raw = row.next(chunk, turn);
    float x[8];
    row.unpack_values(raw, x);
    float greatest = chunk_max(raw);
    *top = from_float(greatest);
    greatest = row.value(greatest);
    found.greatest = max_nan(found.greatest, greatest);
    const float t = greatest * row.to_base2;
    if (t > found.base + 40) {
      const float scale = exp2_fast(found.base - t);
      found.sum *= scale, found.top *= scale, found.base = t;
    }
#pragma unroll
    for (int k = 0; k < 8; ++k) found.sum += exp2_fast(fmaf(x[k], row.to_base2, -found.base));
    found.top += exp2_fast(t - found.base);
  }
  row.end_tops(top);
  return found;
}

// A value that the greatest of so many chunks reach that they count, or weigh, `wanted` together: the greatest such of a few; -INF if
// none is found. Tokens below it have at least as many, or as much, before them.
//
// Weights are added up as integers, rounded down: in any order they give the same. A bin has four cells, so that lanes meet less often.
__device__ float find_floor(const Row& row, const Best& all, float wanted, bool is_count, int& turn) {
  constexpr float ONE = 65536;  // the weight of the greatest; what weighs less than 1 / ONE of it is left out
  const float highest = all.greatest * row.to_base2;
  if (!is_count) wanted *= exp2_fast(all.base - highest) * ONE;
#pragma unroll 1
  for (float window = 16; window < 5000; window *= 16) {  // base 2
    uint4* bins = shared.bins[turn];
    turn ^= 1;
    if (threadIdx.x < 32) bins[threadIdx.x] = make_uint4(0, 0, 0, 0);
    __syncthreads();
    const float scale = 32 / window * row.to_base2;
    row.visit_tops(fmaxf(all.greatest - 32 / scale, -FLT_MAX), [&](int, float value) {
      const float place = (all.greatest - value) * scale;
      if (!(place < 32)) return;
      const unsigned weight = is_count ? 1 : unsigned(exp2_fast(fmaf(value, row.to_base2, -highest)) * ONE);
      atomicAdd(reinterpret_cast<unsigned*>(bins + int(place)) + threadIdx.x % 4, weight);
    });
    float mass = 0;
#if CLUSTER > 1
    cg::cluster_group cluster = cg::this_cluster();
    cluster.sync();
#pragma unroll
    for (int i = 0; i < CLUSTER; ++i) {
      const uint4 bin = *cluster.map_shared_rank(bins + threadIdx.x % 32, i);
      mass += float(bin.x + bin.y + bin.z + bin.w);
    }
#else
    __syncthreads();
    const uint4 bin = bins[threadIdx.x % 32];
    mass = float(bin.x + bin.y + bin.z + bin.w);
#endif
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const float before = __shfl_up_sync(~0u, mass, distance);
      if (int(threadIdx.x % 32) >= distance) mass += before;
    }
    const unsigned reached = __ballot_sync(~0u, mass >= wanted);
    // A little below the bin's end, whatever was rounded.
    if (reached) return all.greatest - float(__ffs(reached)) * 1.0001f / scale - fabsf(all.greatest) * 1e-6f;
    if (!is_count) break;  // what a wider window adds weighs nothing here
  }
  return -INF;
}

// A value at which a little less than top_p is reached, more or less, from a sample of four values a thread.
__device__ __noinline__ float guess_cut(const Row row, float greatest, float base, float top_p, int& turn) {
  constexpr float STEP = 2;  // base 2
  float x[8], start = greatest * row.to_base2, cut = INF;
  row.unpack_values(row.load(row.first), x);
#pragma unroll 1
  for (float step = STEP; step > STEP / 64; step /= 8) {
    Masses masses = {};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const float t = x[k] * row.to_base2, weight = row.first < row.num_chunks ? exp2_fast(t - base) : 0;
      masses.all += weight;
#pragma unroll
      for (int j = 0; j < 8; ++j)
        if (t >= start - step * (j + 1)) masses.above[j] += weight;
    }
    masses = reduce(masses, turn);
    int place = 0;
#pragma unroll
    for (int j = 0; j < 8; ++j)
      if (masses.above[j] <= (top_p - 0.04f) * masses.all) place = j + 1;
    start -= step * place;
    if (place) cut = start / row.to_base2;
  }
  return cut;
}
