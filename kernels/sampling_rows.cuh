// A row of logits as the threads of its blocks read it. Constants: see sampling.cu.
#pragma once
#include <climits>
#include "sampling_reduce.cuh"

constexpr int DEPTH = LOGIT == 0 ? 1 : 2;

static_assert(RING == 0 || (RING == 4 && VECTOR && CLUSTER == 1), "chunks are copied whole");

// Of each thread: chunks on their way from memory where blocks do not share rows, and the greatest logit of each chunk that has come.
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
  // A chunk of a sample that is spread over the row: neighbours are alike.
  __device__ __forceinline__ int sampled() const { return int(threadIdx.x) * num_chunks / THREADS; }
  __device__ __forceinline__ Raw* ring() const { return reinterpret_cast<Raw*>(dynamic_memory) + threadIdx.x; }
  __device__ __forceinline__ Logit* tops() const {
    return reinterpret_cast<Logit*>(dynamic_memory + RING * THREADS * sizeof(Raw)) + threadIdx.x;
  }
  // visit(chunk, raw) for each chunk of the thread; DEPTH loads or more are under way at a time. With HAS_TOPS only chunks that reach `least`.
  template <int DEPTH, bool HAS_TOPS, class Visit>
  __device__ __forceinline__ void visit(float least, const Visit& visit) const {
    const Logit* top = tops();
    Raw raws[2][DEPTH];
    bool is_wanted[2][DEPTH];
    const auto load_some = [&](int start, Raw (&raws)[DEPTH], bool (&is_wanted)[DEPTH]) {
#pragma unroll
      for (int d = 0; d < DEPTH; ++d) {
        is_wanted[d] = start + d * STRIDE < num_chunks && (!HAS_TOPS || value(to_float(top[d * THREADS])) >= least);
        if (is_wanted[d]) raws[d] = load_chunk(logits, start + d * STRIDE, vocab_size);
      }
      top += DEPTH * THREADS;
    };
    load_some(first, raws[0], is_wanted[0]);
    for (int start = first; start < num_chunks; start += 2 * DEPTH * STRIDE) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int own = start + half * DEPTH * STRIDE;
        load_some(own + DEPTH * STRIDE, raws[half ^ 1], is_wanted[half ^ 1]);
#pragma unroll
        for (int d = 0; d < DEPTH; ++d)
          if (is_wanted[half][d]) visit(own + d * STRIDE, raws[half][d]);
      }
    }
  }
  // The greatest of each chunk of the block, eight at a time; -INF follows them. After a barrier any thread may read them.
  __device__ __forceinline__ const Raw* all_tops() const { return reinterpret_cast<const Raw*>(tops() - threadIdx.x); }
  // Fills up a thread's tops from the first that it has no chunk for.
  __device__ __forceinline__ void end_tops(Logit* top) const {
    if (top - tops() < (num_chunks + STRIDE - 1) / STRIDE * THREADS) *top = from_float(-INF);
  }
  // visit(chunk, value) for those that reach `least`, which is above -INF.
  template <class Visit>
  __device__ __forceinline__ void visit_tops(float least, const Visit& visit) const {
    const int count = (num_chunks + STRIDE - 1) / STRIDE * (THREADS / 8);
#pragma unroll 1
    for (int i = threadIdx.x; i < count; i += THREADS) {
      const Raw raw = all_tops()[i];
      if (!(value(chunk_max(raw)) >= least)) continue;
      float x[8];
      unpack_values(raw, x);
      unsigned hits = 0;
#pragma unroll
      for (int k = 0; k < 8; ++k) hits |= unsigned(x[k] >= least) << k;
      for (; hits; hits &= hits - 1) {
        const int place = 8 * i + __ffs(hits) - 1;
        visit(place / THREADS * STRIDE + first - int(threadIdx.x) + place % THREADS, value(to_float(tops()[place - int(threadIdx.x)])));
      }
    }
  }
  // Chunks on their way to the ring, before anything else of the row is asked for.
  __device__ __forceinline__ void begin_stream() const {
#pragma unroll
    for (int d = 0; d < RING - 1; ++d) fetch(first + d * STRIDE, d);
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

// A thread's chunks in order, once, after begin_stream: from the ring with RING - 1 under way, without one from registers with one under way.
struct Stream {
  const Row& row;
  Raw ahead;
  int turn = 0;

  __device__ __forceinline__ explicit Stream(const Row& row) : row(row) {
    if (RING == 0) ahead = row.load(row.first);
  }
  __device__ __forceinline__ Raw peek() const {  // at the next one
    if (RING == 0) return ahead;
    asm volatile("cp.async.wait_group %0;" ::"n"(RING ? RING - 2 : 0) : "memory");
    return row.ring()[turn % (RING ? RING : 1) * THREADS];
  }
  __device__ __forceinline__ Raw next(int chunk) {
    const Raw raw = peek();
    if (RING == 0) ahead = row.load(chunk + STRIDE);
    else row.fetch(chunk + (RING - 1) * STRIDE, (turn++ + RING - 1) % (RING ? RING : 1));
    return raw;
  }
};

__device__ __forceinline__ Best no_best() { return {0, NONE, 0, 0, 0, -INF}; }
