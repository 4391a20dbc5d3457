// A row of logits as the threads of its blocks read it, and what they find out together. Constants: see sampling.cu.
#pragma once
#include <climits>
#include "logits.cuh"
#include "random.cuh"
#include "slots.cuh"

#if CLUSTER > 1
#include <cooperative_groups.h>
namespace cg = cooperative_groups;
#define CLUSTER_DIMS __cluster_dims__(CLUSTER, 1, 1)
#else
#define CLUSTER_DIMS
#endif

constexpr int WARPS = THREADS / 32, STRIDE = CLUSTER * THREADS;
constexpr int DEPTH = LOGIT == 0 ? 2 : 4;
constexpr float LOG2E = 1.4426950408889634f;
constexpr float NONE = -1e30f;  // below every logit in base 2, and finite: differences with it are

struct Best {
  unsigned long long key;  // score_key, 0: none
  float base, sum, top;    // sum of 2^(t - base), t: logits over temperature in base 2; of all, and of some that the finder names
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
  const float base = fmaxf(a.base, b.base);
  return {a.key > b.key ? a.key : b.key, base, a.sum * exp2_fast(a.base - base) + b.sum * exp2_fast(b.base - base),
          a.top * exp2_fast(a.base - base) + b.top * exp2_fast(b.base - base),
          max_nan(a.greatest, b.greatest)};
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

struct Masses {
  float above[8], all;
};

__device__ __forceinline__ Masses combine(const Masses& a, const Masses& b) {
  Masses c;
#pragma unroll
  for (int j = 0; j < 8; ++j) c.above[j] = a.above[j] + b.above[j];
  c.all = a.all + b.all;
  return c;
}

struct Noted {
  unsigned long long key;
  float value;
};

struct Shared {
  uint4 of_warp[2][WARPS][3];
  uint4 of_block[2][CLUSTER][3];
  int bound;  // order() of a score, base 2: tokens that do not reach it need not be looked at
  int num_noted;
  Owner owner;
  Noted noted[THREADS];
};

template <class T>
__device__ __forceinline__ T shuffle(const T& value, int lane_mask, bool is_broadcast) {
  static_assert(sizeof(T) % 4 == 0 && sizeof(T) <= 48);
  T other;
  const int* from = reinterpret_cast<const int*>(&value);
  int* to = reinterpret_cast<int*>(&other);
#pragma unroll
  for (int i = 0; i < int(sizeof(T) / 4); ++i)
    to[i] = is_broadcast ? __shfl_sync(~0u, from[i], 0) : __shfl_xor_sync(~0u, from[i], lane_mask);
  return other;
}

// What a block writes to its peers' shared memory has to wait until they have begun.
__device__ __forceinline__ void say_begun() {
#if CLUSTER > 1
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void await_peers() {
#if CLUSTER > 1
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
#endif
}

// The row's value out of every thread's, the same bits in every thread. `turn` alternates between two sets of cells, so that one
// barrier a call is enough.
template <class T>
__device__ T reduce(T value, const T& zero, Shared& shared, int& turn) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int mask = 16; mask; mask /= 2) value = combine(value, shuffle(value, mask, false));
  if (lane == 0) *reinterpret_cast<T*>(shared.of_warp[turn][warp]) = value;
  __syncthreads();
  value = lane < WARPS ? *reinterpret_cast<const T*>(shared.of_warp[turn][lane]) : zero;
#pragma unroll
  for (int mask = 16; mask; mask /= 2) value = combine(value, shuffle(value, mask, false));
  value = shuffle(value, 0, true);  // lanes add in different orders: all take lane 0's
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

#if VECTOR
constexpr int RING = 4;
#else
constexpr int RING = 1;
#endif

// Of each thread: chunks on their way from memory, and the greatest logit of each chunk that has come.
extern __shared__ __align__(16) unsigned char dynamic_memory[];

struct Row {
  const Logit* logits;
  int vocab_size, first, num_chunks;  // a thread has chunks first, first + STRIDE, ...
  float temperature, to_base2;       // t = value * to_base2
  unsigned position, seed_low, seed_high;

  // What tokens are ordered by: float32 logits over temperature, where two may become equal; smaller types as they are.
  __device__ __forceinline__ float value(float x) const { return LOGIT == 0 ? __fdiv_rn(x, temperature) : x; }
  __device__ __forceinline__ float scaled(float value) const { return LOGIT == 0 ? value : __fdiv_rn(value, temperature); }
  __device__ __forceinline__ void unpack_values(const Raw& raw, float (&x)[8]) const {
    unpack(raw, x);
    if (LOGIT == 0)
#pragma unroll
      for (int k = 0; k < 8; ++k) x[k] = value(x[k]);
  }
  __device__ __forceinline__ Raw load(int chunk) const { return load_chunk(logits, min(chunk, num_chunks - 1), vocab_size); }
  __device__ __forceinline__ Raw* ring() const { return reinterpret_cast<Raw*>(dynamic_memory) + threadIdx.x; }
  __device__ __forceinline__ Logit* tops() const {
    return reinterpret_cast<Logit*>(dynamic_memory + RING * THREADS * sizeof(Raw)) + threadIdx.x;
  }
  // visit(chunk, raw) for each chunk of the thread; DEPTH loads are under way at a time. With HAS_TOPS only chunks that reach `least`.
  template <int DEPTH, bool HAS_TOPS, class Visit>
  __device__ __forceinline__ void visit(float least, const Visit& visit) const {
    const Logit* top = tops();
    for (int start = first; start < num_chunks; start += DEPTH * STRIDE, top += DEPTH * THREADS) {
      Raw raws[DEPTH];
      bool is_wanted[DEPTH];
#pragma unroll
      for (int d = 0; d < DEPTH; ++d) {
        is_wanted[d] = start + d * STRIDE < num_chunks && (!HAS_TOPS || value(to_float(top[d * THREADS])) >= least);
        if (is_wanted[d]) raws[d] = load(start + d * STRIDE);
      }
#pragma unroll
      for (int d = 0; d < DEPTH; ++d)
        if (is_wanted[d]) visit(start + d * STRIDE, raws[d]);
    }
  }
  // Chunks come in order, RING - 1 of them under way.
  __device__ __forceinline__ void begin_stream() const {
#if VECTOR
#pragma unroll
    for (int d = 0; d < RING - 1; ++d) fetch(first + d * STRIDE, d);
#endif
  }
  __device__ __forceinline__ Raw next(int chunk, int turn) const {
#if VECTOR
    asm volatile("cp.async.wait_group %0;" ::"n"(RING - 2) : "memory");
    const Raw raw = ring()[turn % RING * THREADS];
    fetch(chunk + (RING - 1) * STRIDE, (turn + RING - 1) % RING);
    return raw;
#else
    return load(chunk);
#endif
  }
  __device__ __forceinline__ void fetch(int chunk, int place) const {
    const unsigned to = unsigned(__cvta_generic_to_shared(ring() + place * THREADS));
    const Logit* from = logits + size_t(8) * min(chunk, num_chunks - 1);
#pragma unroll
    for (int i = 0; i < int(sizeof(Raw) / 16); ++i)
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + 16 * i), "l"(from + 16 / sizeof(Logit) * i) : "memory");
    asm volatile("cp.async.commit_group;" ::: "memory");
  }
};

__device__ __forceinline__ Best no_best() { return {0, NONE, 0, 0, -INF}; }
