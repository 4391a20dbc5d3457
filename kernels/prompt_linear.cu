// x [M, K] times weight [N, K] transposed, for the tokens of prompts: bound by arithmetic.
//
// A tile is 128 tokens, 64 for each of two warpgroups, times WIDTH rows of the weights: as many as give every multiprocessor nearly the same work,
// where cuBLAS's tiles leave up to half of them idle. Blocks take tiles in turn; a thread of a further warpgroup copies blocks of 128 bytes of
// K to shared memory (bulk tensor copies, STAGES under way) while results are stored. With PAIR two blocks of a cluster have neighbouring
// tokens and the same weights, of which each copies half to both. With SPLIT, where there are fewer tiles than multiprocessors, two blocks of a
// cluster share one, each with half of K, and each adds up half of the columns through distributed shared memory.
//
// With CODES x and the weights are e4m3, each row of either with a scale of its own, which its sums are multiplied by.
//
// ELEMENT: __nv_bfloat16 or __half; CODES: 0 or 1; WIDTH: a multiple of 16 up to 256; PAIR and SPLIT: 1 or 2, not both;
// GATED: weight is gate | up, the output silu(gate) * up, and a tile has as many rows of either, without SPLIT; STAGES.
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define CLUSTER (PAIR * SPLIT)
#include "dense.cuh"
#include "cluster.cuh"
#include "pipeline.cuh"
#include "wgmma.cuh"

using Element = ELEMENT;
#include "product_output.cuh"
using Operand = std::conditional_t<CODES, E4m3, Element>;

constexpr int TOKENS = 128, STEP = CODES ? 128 : 64;  // elements of K in a stage: a swizzled row of 128 bytes
constexpr int A_BYTES = TOKENS * 128, B_BYTES = WIDTH * 128, STAGE_BYTES = A_BYTES + B_BYTES;
constexpr int CONSUMERS = TOKENS * 2, THREADS = CONSUMERS + 128;
constexpr int PARTS = GATED ? 2 : 1;  // column blocks of the product for one of the output
constexpr int OUT_WIDTH = WIDTH / PARTS, BLOCKS = OUT_WIDTH / 8, OWN = BLOCKS / SPLIT;  // in blocks of eight columns
static_assert(WIDTH % (8 * (GATED || PAIR == 2 ? 2 : 1)) == 0, "what is copied at once are whole groups of eight rows");
static_assert(SPLIT == 1 || (PAIR == 1 && !GATED && BLOCKS % SPLIT == 0), "blocks have equal shares of the columns");

// Which tokens and rows of weights a tile has. Tiles of `group` neighbouring pairs of blocks of tokens come after one another for the same rows of
// weights: these are read once while the tokens stay in the L2 cache.
struct Tiles {
  int num_pairs, num_widths, group;

  __device__ __forceinline__ int count() const { return num_pairs * num_widths; }
  __device__ __forceinline__ void find(int number, int& pair, int& width) const {
    const int whole = group * num_widths, first = number / whole * group, own = number % whole, size = min(group, num_pairs - first);
    pair = first + own % size, width = own / size;
  }
};

// Grid: clusters of PAIR or SPLIT blocks that take turns, or with SPLIT have a tile each. out [M, N] or [M, N / 2] gated, may be residual; bias [N] may be null; scales of codes: of the
// weights' rows [N], of x's [M]; num_pairs: of PAIR times 128 tokens; group: see Tiles; is_fresh: the kernel ahead in the stream writes the weights.
extern "C" __global__ void CLUSTER_DIMS __launch_bounds__(THREADS, 1)
    prompt_linear(const __grid_constant__ CUtensorMap weights, const __grid_constant__ CUtensorMap tokens, Element* out, const Element* bias,
                  const Element* residual, const float* scales, const float* token_scales, int M, int N, int K, int num_pairs, int num_widths,
                  int group, int is_fresh) {
  extern __shared__ unsigned char dynamic_memory[];
  __shared__ __align__(8) uint64_t barriers[2 * STAGES + 1];
  const uint32_t stages = (uint32_t(__cvta_generic_to_shared(dynamic_memory)) + 1023) & ~1023u;
  const uint32_t full = uint32_t(__cvta_generic_to_shared(barriers)), empty = full + 8 * STAGES, parts = empty + 8 * STAGES;
  const int rank = blockIdx.x % CLUSTER, first = blockIdx.x / CLUSTER, turn = gridDim.x / CLUSTER;
  const int num_steps = K / STEP, begin = SPLIT > 1 ? num_steps * rank / SPLIT : 0, end = SPLIT > 1 ? num_steps * (rank + 1) / SPLIT : num_steps;
  const int own_tokens = PAIR > 1 ? rank : 0;  // of a pair's blocks of tokens
  const Tiles tiles = {num_pairs, num_widths, group};
  if (threadIdx.x == 0) {
    prefetch(&weights), prefetch(&tokens);
    for (int s = 0; s < STAGES; ++s) init_barrier(full + 8 * s, 1), init_barrier(empty + 8 * s, PAIR * CONSUMERS / 32);
    if constexpr (SPLIT > 1) {
      init_barrier(parts, 1);
      arrive_expecting(parts, OWN * CONSUMERS * 16);
    }
    publish_barriers();
  }
  __syncthreads();
  arrive_cluster_relaxed(), await_cluster();  // the other block's barriers are there

  if (threadIdx.x < 128) {
    keep_registers<40>();
    if (threadIdx.x == 0) {
      const auto copy_weights = [&](int stage, int width, int step) {
        const uint32_t place = stages + stage * STAGE_BYTES + A_BYTES, barrier = full + 8 * stage;
        const int row = width * OUT_WIDTH, k = step * STEP;
        arrive_expecting(barrier, STAGE_BYTES);
        if constexpr (PAIR == 2) {
          const int second = GATED ? N / 2 + row : row + WIDTH / 2;
          copy_box_to(3, place + rank * (B_BYTES / 2), &weights, barrier, k, rank ? second : row);
        } else {
          copy_box(place, &weights, barrier, k, row);
          if constexpr (GATED) copy_box(place + B_BYTES / 2, &weights, barrier, k, N / 2 + row);
        }
      };
      const auto copy_tokens = [&](int stage, int pair, int step) {
        copy_box(stages + stage * STAGE_BYTES, &tokens, full + 8 * stage, step * STEP, (pair * PAIR + own_tokens) * TOKENS);
      };
      int pair, width, stage = 0, parity = 0, num_early = 0;
      if (!is_fresh && first < tiles.count()) {
        tiles.find(first, pair, width);
        num_early = min(STAGES, end - begin);
        for (int s = 0; s < num_early; ++s) copy_weights(s, width, begin + s);
      }
      wait_for_earlier();
      for (int s = 0; s < num_early; ++s) copy_tokens(s, pair, begin + s);
      stage = num_early % STAGES, parity = num_early == STAGES;
      for (int number = first; number < tiles.count(); number += turn) {
        tiles.find(number, pair, width);
        for (int step = begin + (number == first ? num_early : 0); step < end; ++step) {
          await(empty + 8 * stage, parity ^ 1);
          copy_weights(stage, width, step);
          copy_tokens(stage, pair, step);
          if (++stage == STAGES) stage = 0, parity ^= 1;
        }
      }
      launch_dependents();
    }
    __syncwarp();
    if constexpr (SPLIT > 1) arrive_cluster_relaxed(), await_cluster();
  } else {
    take_registers<232>();
    const int thread = threadIdx.x - 128, group_of_64 = thread / 128, warp = thread / 32 % 4, lane = thread % 32;
    const int row = group_of_64 * 64 + warp * 16 + lane / 4;  // and 8 further on
    const Output output = {out, bias, residual, scales, M, GATED ? N / 2 : N};
    const auto release = [&](int stage) {
      if constexpr (PAIR == 1) {
        if (lane == 0) arrive(empty + 8 * stage);
      } else if (lane < PAIR) {
        arrive_at(empty + 8 * stage, lane);
      }
    };
    wait_for_earlier();
    int stage = 0, parity = 0;
    for (int number = first; number < tiles.count(); number += turn) {
      float sums[WIDTH / 2];
      for (int step = begin; step < end; ++step) {
        await(full + 8 * stage, parity);
        const uint32_t place = stages + stage * STAGE_BYTES;
        begin_products();
#pragma unroll
        for (int k = 0; k < 128 / 32; ++k)
          multiply<Operand>(sums, describe(place + group_of_64 * 64 * 128) + 2 * k, describe(place + A_BYTES) + 2 * k, step > begin || k > 0);
        end_products();
        await_products<1>();
        if (step > begin) release(stage ? stage - 1 : STAGES - 1);
        if (++stage == STAGES) stage = 0, parity ^= 1;
      }
      await_products<0>();
      hold(sums);
      release(stage ? stage - 1 : STAGES - 1);

      int pair, width;
      tiles.find(number, pair, width);
      const int token = (pair * PAIR + own_tokens) * TOKENS + row, column = width * OUT_WIDTH + (SPLIT > 1 ? rank * OWN * 8 : 0);
      if constexpr (SPLIT > 1) {  // of the one tile
        arrive_cluster_relaxed(), await_cluster();  // nobody reads stages any more
        const auto cell = [&](int i) { return stages + (i * CONSUMERS + thread) * 16; };
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
          float *low = &sums[4 * i], *high = &sums[4 * (OWN + i)], others[4];
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            others[e] = rank ? low[e] : high[e];
            low[e] = rank ? high[e] : low[e];
          }
          store_remote(cell(i), parts, rank ^ 1, others);
        }
        await(parts, 0);
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
          const float4 other = load_shared(cell(i));
          sums[4 * i] += other.x, sums[4 * i + 1] += other.y, sums[4 * i + 2] += other.z, sums[4 * i + 3] += other.w;
        }
      }
      float row_scales[2] = {1.0f, 1.0f};
      if constexpr (CODES)
        for (int half = 0; half < 2; ++half) row_scales[half] = token + 8 * half < M ? __ldcg(token_scales + token + 8 * half) : 0.0f;
#pragma unroll
      for (int q = 0; q < (OWN + 3) / 4; ++q) {
        uint4 added[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) added[half] = output.load_residual(token + 8 * half, column + (4 * q + lane % 4) * 8);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          uint32_t words[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int block = 4 * q + i;
            if (block >= OWN) {
              words[i] = 0;
              continue;
            }
            const float *c = &sums[4 * block + 2 * half], *up = &sums[4 * (block + (PARTS - 1) * BLOCKS) + 2 * half];
            words[i] = output.round(column + block * 8 + lane % 4 * 2, c, up, row_scales[half]);
          }
          transpose(words);
          if (4 * q + lane % 4 < OWN) output.store(token + 8 * half, column + (4 * q + lane % 4) * 8, words, added[half]);
        }
      }
    }
  }
  arrive_cluster(), await_cluster();  // nobody ends while the other block copies to it, or tells its barriers
}
#endif
