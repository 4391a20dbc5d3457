// A row of logits as the threads of its blocks read it, and sums over all of them. Constants: see distribution.cu.
#pragma once
#include <cfloat>
#include <climits>
#include "cluster.cuh"
#include "logits.cuh"
#include "random.cuh"

constexpr int THREADS = 512, WARPS = THREADS / 32, STRIDE = CLUSTER * THREADS;
constexpr int CAPACITY = 2 * THREADS;  // tokens that are listed and sorted
constexpr float LOG2E = 1.4426950408889634f;

struct Measured {
  float greatest;        // NaN if one is
  float base, sum, top;  // sums of 2^((value - base) * to_base2): of all, and of the greatest of each chunk
  float least_top;       // of these, the least that is not -inf
};

// The greatest value of each chunk that this block reads.
extern __shared__ __align__(16) unsigned char dynamic_memory[];

struct Row {
  const Logit* logits;
  int vocab_size, num_chunks;
  float temperature, to_base2, greatest;

  // A thread has chunks first(), first() + STRIDE, ...
  __device__ __forceinline__ int first() const { return int(blockIdx.x) % CLUSTER * THREADS + threadIdx.x; }
  // What tokens are ordered by: float32 logits over temperature, where two may become equal; smaller types as they are.
  __device__ __forceinline__ float value(float x) const { return LOGIT == 0 ? __fdiv_rn(x, temperature) : x; }
  // Relative to the likeliest, whose weight is exactly 1.
  __device__ __forceinline__ float weight(float value) const { return exp2_fast((value - greatest) * to_base2); }
  __device__ __forceinline__ void unpack_values(const Raw& raw, float (&x)[8]) const {
    unpack(raw, x);
    if (LOGIT == 0)
#pragma unroll
      for (int k = 0; k < 8; ++k) x[k] = value(x[k]);
  }
  __device__ __forceinline__ Logit* tops() const { return reinterpret_cast<Logit*>(dynamic_memory); }
  // visit(chunk, raw) for each chunk of the thread, or those of one round in `every`; DEPTH loads are under way at a time. With HAS_TOPS
  // only chunks that reach `least`.
  template <int DEPTH, bool HAS_TOPS, class Visit>
  __device__ __forceinline__ void visit(float least, int every, const Visit& visit) const {
    const Logit* top = tops() + threadIdx.x;
    const int step = every * STRIDE, top_step = every * THREADS;
    for (int start = first(); start < num_chunks; start += DEPTH * step, top += DEPTH * top_step) {
      Raw raws[DEPTH];
      bool is_wanted[DEPTH];
#pragma unroll
      for (int d = 0; d < DEPTH; ++d) {
        is_wanted[d] = start + d * step < num_chunks && (!HAS_TOPS || to_float(top[d * top_step]) >= least);
        raws[d] = Raw();
        if (is_wanted[d]) raws[d] = load_chunk(logits, start + d * step, vocab_size);
      }
#pragma unroll
      for (int d = 0; d < DEPTH; ++d)
        if (is_wanted[d]) visit(start + d * step, raws[d]);
    }
  }
};

struct Shared {
  uint4 of_warp[2][WARPS][4];
  uint4 of_block[2][CLUSTER][4];
  Row row;
  Measured all;
  float sums[16], places[8];
  unsigned long long own[CAPACITY];   // what this block lists
  unsigned long long keys[CAPACITY];  // what all of the row's blocks list
  float totals[WARPS];
  float mass;
  int num_own, num_kept;
  int turn;  // alternates between two sets of cells
};

__shared__ Shared shared;

__device__ __forceinline__ void sync_row() {
#if CLUSTER > 1
  cg::this_cluster().sync();
#else
  __syncthreads();
#endif
}

// Each lane takes over the half of COUNT numbers that another lane gives up, until it has the warp's sum of one.
template <int COUNT, int MASK, int N>
__device__ __forceinline__ void add_in_warp(float (&own)[N]) {
  constexpr int REST = COUNT / 2;
  if constexpr (REST == 0) own[0] += __shfl_xor_sync(~0u, own[0], MASK);
  const bool is_upper = threadIdx.x & MASK;
#pragma unroll
  for (int j = 0; j < REST; ++j) {
    const float given = __shfl_xor_sync(~0u, is_upper ? own[j] : own[j + REST], MASK);
    own[j] = (is_upper ? own[j + REST] : own[j]) + given;
  }
  if constexpr (MASK > 1) add_in_warp<REST, MASK / 2>(own);
}

// Adds up N numbers of every thread of the row into `shared.sums`; N is a power of two up to 16.
template <int N>
__device__ __forceinline__ void add_up(float (&own)[N]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, turn = shared.turn;
  add_in_warp<N, 16>(own);
  if (lane % (32 / N) == 0) reinterpret_cast<float*>(shared.of_warp[turn][warp])[lane / (32 / N)] = own[0];
  __syncthreads();
  float sum = 0;
  if (threadIdx.x < N)
#pragma unroll
    for (int i = 0; i < WARPS; ++i) sum += reinterpret_cast<const float*>(shared.of_warp[turn][i])[threadIdx.x];
#if CLUSTER > 1
  cg::cluster_group cluster = cg::this_cluster();
  if (threadIdx.x < N)
#pragma unroll
    for (int i = 0; i < CLUSTER; ++i)
      reinterpret_cast<float*>(cluster.map_shared_rank(&shared.of_block[turn][cluster.block_rank()][0], i))[threadIdx.x] = sum;
  cluster.sync();
  sum = 0;
  if (threadIdx.x < N)
#pragma unroll
    for (int i = 0; i < CLUSTER; ++i) sum += reinterpret_cast<const float*>(shared.of_block[turn][i])[threadIdx.x];
#endif
  if (threadIdx.x < N) shared.sums[threadIdx.x] = sum;
  if (threadIdx.x == 0) shared.turn = turn ^ 1;
  __syncthreads();
}

// The softmax's sum, in one reading of the row. Fills tops().
__device__ __forceinline__ Measured measure(const Row& row) {
  Measured found = {-INF, -FLT_MAX, 0, 0, INF};
  row.visit<LOGIT == 0 ? 2 : 4, false>(0, 1, [&](int chunk, const Raw& raw) {
    float x[8];
    row.unpack_values(raw, x);
    const float top = row.value(chunk_max(raw));
    row.tops()[(chunk - row.first()) / CLUSTER + threadIdx.x] = from_float(top);
    found.greatest = max_nan(found.greatest, top);
    if (top > -INF) found.least_top = fminf(found.least_top, top);
    if ((top - found.base) * row.to_base2 > 40) {
      const float scale = exp2_fast((found.base - top) * row.to_base2);
      found.sum *= scale, found.top *= scale, found.base = top;
    }
    found.top += exp2_fast((top - found.base) * row.to_base2);
#pragma unroll
    for (int k = 0; k < 8; ++k) found.sum += exp2_fast((x[k] - found.base) * row.to_base2);
  });
  return found;
}

__device__ __forceinline__ Measured exchange(const Measured& own, int mask) {
  const auto other = [&](float x) { return __shfl_xor_sync(~0u, x, mask); };
  return {other(own.greatest), other(own.base), other(own.sum), other(own.top), other(own.least_top)};
}

// The same of a whole row, with sums of weights: the same bits in every thread. Fills all of `shared` that searches need.
__device__ __forceinline__ void measure_all(const Row& row, Measured own) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const auto combine = [&](const Measured& a, const Measured& b) {
    const float base = fmaxf(a.base, b.base);
    const float of_a = exp2_fast((a.base - base) * row.to_base2), of_b = exp2_fast((b.base - base) * row.to_base2);
    // No fused steps: they would round a's share and b's differently.
    const auto add = [&](float x, float y) { return __fadd_rn(__fmul_rn(x, of_a), __fmul_rn(y, of_b)); };
    return Measured{max_nan(a.greatest, b.greatest), base, add(a.sum, b.sum), add(a.top, b.top), fminf(a.least_top, b.least_top)};
  };
#pragma unroll
  for (int mask = 16; mask; mask /= 2) own = combine(own, exchange(own, mask));
  if (lane == 0) *reinterpret_cast<Measured*>(shared.of_warp[0][warp]) = own;
  __syncthreads();
  own = *reinterpret_cast<const Measured*>(shared.of_warp[0][lane % WARPS]);
#pragma unroll
  for (int mask = WARPS / 2; mask; mask /= 2) own = combine(own, exchange(own, mask));
#if CLUSTER > 1
  cg::cluster_group cluster = cg::this_cluster();
  if (threadIdx.x < CLUSTER)
    *reinterpret_cast<Measured*>(cluster.map_shared_rank(&shared.of_block[0][cluster.block_rank()][0], threadIdx.x)) = own;
  cluster.sync();
  own = *reinterpret_cast<const Measured*>(shared.of_block[0][0]);
#pragma unroll
  for (int i = 1; i < CLUSTER; ++i) own = combine(own, *reinterpret_cast<const Measured*>(shared.of_block[0][i]));
#endif
  const float scale = exp2_fast((own.base - own.greatest) * row.to_base2);
  own.sum *= scale, own.top *= scale, own.greatest += 0.0f;  // no -0, which has another place among the integers than 0
  if (threadIdx.x == 0) {
    shared.row = row;
    shared.row.greatest = own.greatest;
    shared.all = own;
    shared.turn = 1;
  }
  __syncthreads();
}
