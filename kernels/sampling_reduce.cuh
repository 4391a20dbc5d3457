// What the threads of a row find out together. Constants: see sampling.cu.
#pragma once
#include "cluster.cuh"
#include "logits.cuh"
#include "random.cuh"
#include "request_table.cuh"

constexpr int WARPS = THREADS / 32, STRIDE = CLUSTER * THREADS;
constexpr float LOG2E = 1.4426950408889634f;
constexpr float NONE = -1e30f;  // below every logit in base 2, and finite: differences with it are

struct Best {
  unsigned long long key;  // score_key, 0: none
  // Sums of 2^(t - base), t: logits over temperature in base 2; of all, of the greatest of each chunk, and of those that reach a mark.
  float base, sum, top, marked;
  float greatest;  // NaN if one is
};

struct Next {
  unsigned long long key;
  int is_incomplete;  // some of a block's close tokens were not noted
};

struct Standing {  // of one token: the tokens likelier than it, equal ones by id
  int rank;
  float mass;
};

struct Counts {
  int at_least[8];
};

__device__ __forceinline__ Best combine(const Best& a, const Best& b) {
  const float base = fmaxf(a.base, b.base), of_a = exp2_fast(a.base - base), of_b = exp2_fast(b.base - base);
  return {a.key > b.key ? a.key : b.key,     base,
          a.sum * of_a + b.sum * of_b,       a.top * of_a + b.top * of_b,
          a.marked * of_a + b.marked * of_b, max_nan(a.greatest, b.greatest)};
}

__device__ __forceinline__ Next combine(const Next& a, const Next& b) {
  return {a.key > b.key ? a.key : b.key, a.is_incomplete | b.is_incomplete};
}

__device__ __forceinline__ Standing combine(const Standing& a, const Standing& b) { return {a.rank + b.rank, a.mass + b.mass}; }

__device__ __forceinline__ Counts combine(const Counts& a, const Counts& b) {
  Counts c;
#pragma unroll
  for (int j = 0; j < 8; ++j) c.at_least[j] = a.at_least[j] + b.at_least[j];
  return c;
}

struct Noted {
  unsigned long long key;
  float value, weight;  // the weight where the list of all that may be kept is made: see sampling_list.cuh
};

struct Shared {
  uint4 of_warp[2][WARPS][3];
  uint4 of_block[2][CLUSTER][3];
  uint4 bins[2][32];  // see find_floor and guess_mark
  int bound;  // order() of a score, base 2: tokens that do not reach it need not be looked at
  int num_noted, num_chunks, num_listed, num_close;
  Owner owner;
  Noted noted[THREADS];
  int chunks[THREADS];
};

__shared__ Shared shared;

template <class T>
__device__ __forceinline__ T shuffle(const T& value, int lane_mask) {
  static_assert(sizeof(T) % 4 == 0 && sizeof(T) <= 48);
  T other;
  const int* from = reinterpret_cast<const int*>(&value);
  int* to = reinterpret_cast<int*>(&other);
#pragma unroll
  for (int i = 0; i < int(sizeof(T) / 4); ++i) to[i] = __shfl_xor_sync(~0u, from[i], lane_mask);
  return other;
}

__device__ __forceinline__ float warp_max(float x) { return unorder(__reduce_max_sync(~0u, order(x))); }

__device__ __forceinline__ unsigned long long warp_max(unsigned long long key) {
  const unsigned high = unsigned(key >> 32), greatest = __reduce_max_sync(~0u, high);
  return (unsigned long long)greatest << 32 | __reduce_max_sync(~0u, high == greatest ? unsigned(key) : 0);
}

// What every COUNT neighbouring lanes have together, the same bits in each of them: all add up in the same tree.
template <int COUNT, class T>
__device__ __forceinline__ T combine_lanes(T value) {
#pragma unroll
  for (int mask = COUNT / 2; mask; mask /= 2) value = combine(value, shuffle(value, mask));
  return value;
}

// Here the lanes of a warp that are not neighbours have the same values.
template <int COUNT>
__device__ __forceinline__ Best combine_lanes(const Best& value) {
  const float base = warp_max(value.base), scale = exp2_fast(value.base - base);
  float sum = __fmul_rn(value.sum, scale), top = __fmul_rn(value.top, scale), marked = __fmul_rn(value.marked, scale);
#pragma unroll
  for (int mask = COUNT / 2; mask; mask /= 2) sum += shuffle(sum, mask), top += shuffle(top, mask), marked += shuffle(marked, mask);
  return {warp_max(value.key), base, sum, top, marked, warp_max(value.greatest)};  // a NaN of max_nan is above all
}

// The row's value out of every thread's, the same bits in every thread. `turn` alternates between two sets of cells, so that one
// barrier a call is enough.
template <class T>
__device__ T reduce(T value, int& turn) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  value = combine_lanes<32>(value);
  if (lane == 0) *reinterpret_cast<T*>(shared.of_warp[turn][warp]) = value;
  __syncthreads();
  value = combine_lanes<WARPS>(*reinterpret_cast<const T*>(shared.of_warp[turn][lane % WARPS]));
#if CLUSTER > 1
  cg::cluster_group cluster = cg::this_cluster();
  if (threadIdx.x < CLUSTER)
    *reinterpret_cast<T*>(cluster.map_shared_rank(&shared.of_block[turn][cluster.block_rank()][0], threadIdx.x)) = value;
  cluster.sync();
  value = *reinterpret_cast<const T*>(shared.of_block[turn][0]);
#pragma unroll
  for (int i = 1; i < CLUSTER; ++i) value = combine(value, *reinterpret_cast<const T*>(shared.of_block[turn][i]));
#endif
  turn ^= 1;
  return value;
}
