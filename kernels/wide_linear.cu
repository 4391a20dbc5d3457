// x [M, K] times weight [N, K] transposed, for up to 64 rows of x: still bound by the memory.
//
// Weights are the A operand of wgmma (64 of their rows at a time), tokens its columns, so that every token is in one tile and each weight is
// read once. A thread of the first warpgroup copies blocks of 64 elements of K to shared memory (bulk tensor copies, STAGES under way); each of
// the other two multiplies 64 rows. With SPLIT the blocks of a cluster share a tile, each with a part of K, and each adds up the parts of
// some of the tokens through distributed shared memory, in order. So the sum for an output is the same whatever M and the timing are.
//
// Two blocks run on a multiprocessor: the weights of one, which may be the next kernel's, come in while the other one makes its last sums. They
// begin before the kernel ahead in the stream has ended, since weights never change; but not before all of that one's own are on their way,
// which they would only delay.
//
// ELEMENT: __nv_bfloat16 or __half; TOKENS: 32, 48 or 64, most rows of x; SPLIT: 1, 2 or 4; GATED: weight is gate | up, the output
// silu(gate) * up, and the map of the weights puts eight rows of up behind every eight of gate; STAGES.
#include "dense.cuh"
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#include <cuda.h>
#include "wgmma.cuh"

using Element = ELEMENT;

constexpr int STEP = 64;                // elements of K in a stage: a swizzled row of 128 bytes
constexpr int ROWS = 128;               // of weights in a tile
constexpr int COLUMNS = TOKENS / 8;
constexpr int A_BYTES = ROWS * 128, B_BYTES = TOKENS * 128, STAGE_BYTES = A_BYTES + B_BYTES;
constexpr int THREADS = 384, CONSUMERS = 256;
constexpr int BATCH = 2;  // column blocks whose residual is loaded at a time
constexpr int OWN_COLUMNS = (COLUMNS + SPLIT - 1) / SPLIT;
static_assert(SPLIT == 1 || SPLIT * OWN_COLUMNS * CONSUMERS * 16 <= STAGES * STAGE_BYTES, "the parts have no room");

#if SPLIT > 1
#define CLUSTER_DIMS __cluster_dims__(SPLIT, 1, 1)
#else
#define CLUSTER_DIMS
#endif

__device__ __forceinline__ void init_barrier(uint32_t barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
__device__ __forceinline__ void arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void arrive_expecting(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void await(uint32_t barrier, int parity) {
  asm volatile(
      "{ .reg .pred p;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
      "@!p bra again; }\n" ::"r"(barrier), "r"(parity)
      : "memory");
}
__device__ __forceinline__ void copy_tile(uint32_t target, const CUtensorMap* map, uint32_t barrier, int k, int row) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(target), "l"(map),
               "r"(barrier), "r"(k), "r"(row)
               : "memory");
}
__device__ __forceinline__ void copy_gated_tile(uint32_t target, const CUtensorMap* map, uint32_t barrier, int k, int group) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %4, %5}], [%2];" ::"r"(target), "l"(map),
               "r"(barrier), "r"(k), "r"(0), "r"(group)
               : "memory");
}
// Nothing that is written needs to be seen behind it: a release would wait for all of the block's memory operations.
__device__ __forceinline__ void arrive_cluster() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ __forceinline__ void await_cluster() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }
// To a block of the cluster, whose barrier is told.
__device__ __forceinline__ void store_remote(uint32_t address, uint32_t barrier, int rank, const float* v) {
  asm volatile(
      "{ .reg .b32 target, remote;\n"
      "mapa.shared::cluster.u32 target, %0, %2;\n"
      "mapa.shared::cluster.u32 remote, %1, %2;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [target], {%3, %4, %5, %6}, [remote]; }\n" ::"r"(address),
      "r"(barrier), "r"(rank), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3])
      : "memory");
}

// Two values of neighbouring columns -> two of neighbouring rows: an 8 x 8 matrix of a warp, transposed.
__device__ __forceinline__ uint32_t transpose(Element a, Element b) {
  const Element both[2] = {a, b};
  uint32_t out;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(*reinterpret_cast<const uint32_t*>(both)));
  return out;
}

struct Output {
  Element* out;
  const Element *bias, *residual;
  int num_tokens, width;

  // What is added to column block j of rows `row` .. + 15 of weights: two neighbours of two tokens. Ahead of the sums, since a load that
  // follows a store to the same memory waits for it.
  __device__ __forceinline__ void load_residual(unsigned (&words)[2], int j, int row) const {
    if constexpr (GATED) return;
    const int lane = threadIdx.x % 32, token = j * 8 + lane / 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int n = row + half * 8 + lane % 4 * 2;
      words[half] = residual && token < num_tokens && n < width ? __ldcg(reinterpret_cast<const unsigned*>(residual + size_t(token) * width + n)) : 0;
    }
  }
  // Of column block j: rows `row` .. + 15 of weights (gated: 8 of the output), 8 tokens.
  __device__ __forceinline__ void put(int j, int row, const unsigned (&words)[2], float c0, float c1, float c2, float c3) const {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, token = j * 8 + g;
    if constexpr (GATED) {
      const uint32_t pair = transpose(gate_mul(from_float<Element>(c0), from_float<Element>(c2)), gate_mul(from_float<Element>(c1), from_float<Element>(c3)));
      write(token, row / 2 + 2 * t, pair);
    } else {
      if (bias) {
        const float low = row + g < width ? to_float(__ldg(bias + row + g)) : 0, high = row + g + 8 < width ? to_float(__ldg(bias + row + g + 8)) : 0;
        c0 += low, c1 += low, c2 += high, c3 += high;
      }
      const uint32_t low = transpose(from_float<Element>(c0), from_float<Element>(c1)), high = transpose(from_float<Element>(c2), from_float<Element>(c3));
      write(token, row + 2 * t, residual ? add(words[0], low) : low);
      write(token, row + 8 + 2 * t, residual ? add(words[1], high) : high);
    }
  }
  static __device__ __forceinline__ uint32_t add(uint32_t x, uint32_t y) {
    const Element *a = reinterpret_cast<const Element*>(&x), *b = reinterpret_cast<const Element*>(&y);
    const Element sum[2] = {from_float<Element>(to_float(a[0]) + to_float(b[0])), from_float<Element>(to_float(a[1]) + to_float(b[1]))};
    return *reinterpret_cast<const uint32_t*>(sum);
  }
  __device__ __forceinline__ void write(int token, int n, uint32_t pair) const {
    if (token < num_tokens && n < width) *reinterpret_cast<uint32_t*>(out + size_t(token) * width + n) = pair;
  }
};

// Grid: SPLIT blocks a tile, or fewer blocks than tiles without SPLIT. out [M, N] or [M, N / 2] gated, may be residual; bias [N] may be null.
extern "C" __global__ void CLUSTER_DIMS __launch_bounds__(THREADS, 2)
    wide_linear(const __grid_constant__ CUtensorMap weights, const __grid_constant__ CUtensorMap tokens, Element* out, const Element* bias,
                const Element* residual, int M, int N, int K, int num_tiles) {
  extern __shared__ unsigned char dynamic_memory[];
  __shared__ __align__(8) uint64_t barriers[2 * STAGES + 1];
  const uint32_t stages = (uint32_t(__cvta_generic_to_shared(dynamic_memory)) + 1023) & ~1023u;
  const uint32_t full = uint32_t(__cvta_generic_to_shared(barriers)), empty = full + 8 * STAGES, parts = empty + 8 * STAGES;
  const int rank = SPLIT > 1 ? blockIdx.x % SPLIT : 0, first_tile = blockIdx.x / SPLIT, tile_step = SPLIT > 1 ? num_tiles : gridDim.x;
  const int num_steps = (K + STEP - 1) / STEP, begin = num_steps * rank / SPLIT, end = num_steps * (rank + 1) / SPLIT;
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; ++s) init_barrier(full + 8 * s, 1), init_barrier(empty + 8 * s, CONSUMERS / 32);
    if constexpr (SPLIT > 1) {
      init_barrier(parts, 1);
      arrive_expecting(parts, (SPLIT - 1) * ((COLUMNS + SPLIT - 1 - rank) / SPLIT) * CONSUMERS * 16);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if constexpr (SPLIT > 1) arrive_cluster();

  if (threadIdx.x < 128) {
    const auto copy_weights = [&](int stage, int tile, int step) {
      arrive_expecting(full + 8 * stage, STAGE_BYTES);
      if constexpr (GATED) copy_gated_tile(stages + stage * STAGE_BYTES, &weights, full + 8 * stage, step * STEP, tile * (ROWS / 16));
      else copy_tile(stages + stage * STAGE_BYTES, &weights, full + 8 * stage, step * STEP, tile * ROWS);
    };
    const auto copy_tokens = [&](int stage, int step) {
      copy_tile(stages + stage * STAGE_BYTES + A_BYTES, &tokens, full + 8 * stage, step * STEP, 0);
    };
    const int num_early = min(STAGES, end - begin);
    if (threadIdx.x == 0) {
      for (int s = 0; s < num_early; ++s) copy_weights(s, first_tile, begin + s);
      wait_for_earlier();
      for (int s = 0; s < num_early; ++s) copy_tokens(s, begin + s);
      int stage = num_early % STAGES, parity = num_early == STAGES;  // of `empty`, as it was before
      for (int tile = first_tile; tile < num_tiles; tile += tile_step)
        for (int step = tile == first_tile ? begin + num_early : begin; step < end; ++step) {
          await(empty + 8 * stage, parity ^ 1);
          copy_weights(stage, tile, step);
          copy_tokens(stage, step);
          if (++stage == STAGES) stage = 0, parity ^= 1;
        }
      launch_dependents();
    }
    __syncwarp();
    if constexpr (SPLIT > 1) await_cluster(), arrive_cluster(), await_cluster();
  } else {
    const int thread = threadIdx.x - 128, group = thread / 128, warp = thread / 32 % 4, lane = thread % 32;
    const Output output = {out, bias, residual, M, GATED ? N / 2 : N};
    if constexpr (SPLIT > 1) await_cluster();
    wait_for_earlier();
    int stage = 0, parity = 0;
    for (int tile = first_tile; tile < num_tiles; tile += tile_step) {
      float sums[TOKENS / 2];
      for (int step = begin; step < end; ++step) {
        await(full + 8 * stage, parity);
        const uint32_t place = stages + stage * STAGE_BYTES;
        begin_products();
#pragma unroll
        for (int k = 0; k < STEP / 16; ++k)
          multiply<Element>(sums, describe(place + group * 64 * 128) + 2 * k, describe(place + A_BYTES) + 2 * k, step > begin || k > 0);
        end_products();
        await_products();  // the memory is slower by far: better a stage that is free early than products that overlap
        if (lane == 0) arrive(empty + 8 * stage);
        if (++stage == STAGES) stage = 0, parity ^= 1;
      }
      const int row = tile * ROWS + group * 64 + warp * 16;
      if constexpr (SPLIT == 1) {
#pragma unroll
        for (int j0 = 0; j0 < COLUMNS; j0 += BATCH) {
          unsigned words[BATCH][2];
#pragma unroll
          for (int j = j0; j < min(j0 + BATCH, COLUMNS); ++j) output.load_residual(words[j - j0], j, row);
#pragma unroll
          for (int j = j0; j < min(j0 + BATCH, COLUMNS); ++j)
            output.put(j, row, words[j - j0], sums[4 * j], sums[4 * j + 1], sums[4 * j + 2], sums[4 * j + 3]);
        }
      } else {
        // Column block j is added up by the block of rank j % SPLIT.
        const auto cell = [&](int source, int j) { return stages + ((source * OWN_COLUMNS + j / SPLIT) * CONSUMERS + thread) * 16; };
        unsigned words[OWN_COLUMNS][2];
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j)
          if (j % SPLIT == rank) output.load_residual(words[j / SPLIT], j, row);
        arrive_cluster(), await_cluster();  // nobody reads stages any more
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j)
          if (j % SPLIT != rank) store_remote(cell(rank, j), parts, j % SPLIT, sums + 4 * j);
        await(parts, 0);
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j) {
          if (j % SPLIT != rank) continue;
          float4 total = make_float4(0, 0, 0, 0);
#pragma unroll
          for (int source = 0; source < SPLIT; ++source) {
            float4 part = make_float4(sums[4 * j], sums[4 * j + 1], sums[4 * j + 2], sums[4 * j + 3]);
            if (source != rank)
              asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(part.x), "=f"(part.y), "=f"(part.z), "=f"(part.w) : "r"(cell(source, j)));
            total.x += part.x, total.y += part.y, total.z += part.z, total.w += part.w;
          }
          output.put(j, row, words[j / SPLIT], total.x, total.y, total.z, total.w);
        }
      }
    }
  }
}
#endif
