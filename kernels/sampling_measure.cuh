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

// The softmax's sum, the part of it from the greatest of each chunk, and that from tokens that reach `mark`. Fills tops(); the row's
// stream has begun.
__device__ __noinline__ Best measure(const Row row, float mark) {
  Best found = no_best();
  Logit* top = row.tops();
  Stream stream(row);
#pragma unroll 2
  for (int chunk = row.first; chunk < row.num_chunks; chunk += STRIDE, top += THREADS) {
    const Raw raw = stream.next(chunk);
    float x[8];
    row.unpack_values(raw, x);
    float greatest = chunk_max(raw);
    *top = from_float(greatest);
    greatest = row.value(greatest);
    found.greatest = max_nan(found.greatest, greatest);
    const float t = greatest * row.to_base2;
    if (t > found.base + 40) {
      const float scale = exp2_fast(found.base - t);
      found.sum *= scale, found.top *= scale, found.marked *= scale, found.base = t;
    }
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const float weight = exp2_fast(fmaf(x[k], row.to_base2, -found.base));
      found.sum += weight;
      if (x[k] >= mark) found.marked += weight;
    }
    found.top += exp2_fast(t - found.base);
  }
  row.end_tops(top);
  return found;
}

// 32 bins of four cells each, so that lanes meet less often. Weights are integers: added up in any order they give the same.
__device__ __forceinline__ void clear_bins(uint4* bins) {
  if (threadIdx.x < 32) bins[threadIdx.x] = make_uint4(0, 0, 0, 0);
}
__device__ __forceinline__ unsigned* cell_of(uint4* bins, int place) { return reinterpret_cast<unsigned*>(bins + place) + threadIdx.x % 4; }
__device__ __forceinline__ float weigh_bin(uint4 bin) { return float(bin.x + bin.y + bin.z + bin.w); }

// Of the lanes before this one.
__device__ __forceinline__ float sum_before(float own) {
  float sum = own;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const float before = __shfl_up_sync(~0u, sum, distance);
    if (int(threadIdx.x % 32) >= distance) sum += before;
  }
  return sum - own;
}

// A value that the greatest of so many chunks reach that they count, or weigh, `wanted` together, and of counted ones not many more, where
// that can be; -INF if none is found. Tokens below it have at least as many, or as much, before them.
// Weights are rounded down.
__device__ float find_floor(const Row& row, const Best& all, float wanted, bool is_count, int& turn) {
  constexpr float ONE = 65536;  // the weight of the greatest; what weighs less than 1 / ONE of it is left out
  constexpr float MANY = THREADS / 2;
  const float highest = all.greatest * row.to_base2;
  if (!is_count) wanted *= exp2_fast(all.base - highest) * ONE;
  float start = 0, window = 16;  // of the distances from the greatest that have bins, base 2; what is nearer is in the first
#pragma unroll 1
  while (start + window < 5000) {
    uint4* bins = shared.bins[turn];
    turn ^= 1;
    clear_bins(bins);
    __syncthreads();
    const float scale = 32 / window;
    row.visit_tops(fmaxf(all.greatest - (start + window) / row.to_base2, -FLT_MAX), [&](int, float value) {
      const float place = ((all.greatest - value) * row.to_base2 - start) * scale;
      if (!(place < 32)) return;
      const unsigned weight = is_count ? 1 : unsigned(exp2_fast(fmaf(value, row.to_base2, -highest)) * ONE);
      atomicAdd(cell_of(bins, max(int(place), 0)), weight);
    });
    float mass = 0;
#if CLUSTER > 1
    cg::cluster_group cluster = cg::this_cluster();
    cluster.sync();
#pragma unroll
    for (int i = 0; i < CLUSTER; ++i) mass += weigh_bin(*cluster.map_shared_rank(bins + threadIdx.x % 32, i));
#else
    __syncthreads();
    mass = weigh_bin(bins[threadIdx.x % 32]);
#endif
    mass += sum_before(mass);
    const unsigned reached = __ballot_sync(~0u, mass >= wanted);
    if (reached) {
      const int place = __ffs(reached) - 1;
      if (!is_count || wanted > MANY || __shfl_sync(~0u, mass, place) <= MANY || window < 1e-2f)
        // A little below the bin's end, whatever was rounded.
        return all.greatest - (start + float(place + 1) / scale) * 1.0001f / row.to_base2 - fabsf(all.greatest) * 1e-6f;
      start += float(place) / scale, window /= 32;
    } else if (is_count) {
      start += window, window *= 16;
    } else {
      break;  // what a wider window adds weighs nothing here
    }
  }
  return -INF;
}

// About where a little less than top_p is reached: a guess from a sample of the row, row.load(row.sampled()) of each thread. INF: none.
__device__ __noinline__ float guess_mark(const Row row, const Raw sample, float top_p, int& turn) {
  constexpr float ONE = 65536, SCALE = 2;  // the weight of the greatest; bins for a factor of 2
  constexpr float SLACK = 0.04f;           // about twice the error that a sample of 4,096 tokens has in flat rows
  uint4* bins = shared.bins[turn];
  turn ^= 1;
  clear_bins(bins);
  float x[8];
  row.unpack_values(sample, x);
  float greatest = x[0];
#pragma unroll
  for (int k = 1; k < 8; ++k) greatest = fmaxf(greatest, x[k]);
  greatest = warp_max(greatest);
  float* of_warps = reinterpret_cast<float*>(shared.of_warp[turn]);
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = greatest;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < WARPS; ++i) greatest = fmaxf(greatest, of_warps[i]);
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    const float below = (greatest - x[k]) * row.to_base2;
    if (below < 32 / SCALE) atomicAdd(cell_of(bins, int(below * SCALE)), unsigned(exp2_fast(-below) * ONE));
  }
  __syncthreads();
  const float own = weigh_bin(bins[threadIdx.x % 32]), before = sum_before(own);
  const float wanted = (top_p - SLACK) * __shfl_sync(~0u, before + own, 31);
  const unsigned reached = __ballot_sync(~0u, before + own >= wanted);
  if (!reached || !(wanted > 0)) return INF;
  const float part = __shfl_sync(~0u, (wanted - before) / own, __ffs(reached) - 1);
  return greatest - (float(__ffs(reached) - 1) + part) / (SCALE * row.to_base2);
}
