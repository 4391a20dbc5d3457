// x [M, K] times weight [N, K] transposed, for the tokens of prompts: bound by arithmetic.
//
// A tile is 128 tokens, 64 for each of two warpgroups, times WIDTH rows of the weights: as many as give every multiprocessor nearly the same work,
// where cuBLAS's tiles leave up to half of them idle. Blocks take tiles in turn; a thread of a further warpgroup copies blocks of 128 bytes of
// K to shared memory (bulk tensor copies, STAGES under way) while results are stored. A sum's terms are added in the same order in tiles of any
// width: a row of a result does not depend on how many there are.
//
// With CODES x and the weights are e4m3, each row of either with a scale of its own, which its sums are multiplied by.
//
// ELEMENT: __nv_bfloat16 or __half; CODES: 0 or 1; WIDTH: a multiple of 16 up to 256; GATED: weight is gate | up, the output
// silu(gate) * up, and a tile has as many rows of either; STAGES.
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#include "dense.cuh"
#include "pipeline.cuh"
#include "wgmma.cuh"

using Element = ELEMENT;
#include "product_output.cuh"
using Operand = std::conditional_t<CODES, E4m3, Element>;

constexpr int TOKENS = 128, STEP = CODES ? 128 : 64;  // elements of K in a stage: a swizzled row of 128 bytes
constexpr int A_BYTES = TOKENS * 128, B_BYTES = WIDTH * 128, STAGE_BYTES = A_BYTES + B_BYTES;
constexpr int CONSUMERS = TOKENS * 2, THREADS = CONSUMERS + 128;
constexpr int PARTS = GATED ? 2 : 1;  // column blocks of the product for one of the output
constexpr int OUT_WIDTH = WIDTH / PARTS, BLOCKS = OUT_WIDTH / 8;  // of eight columns
static_assert(WIDTH % (8 * PARTS) == 0, "what is copied at once are whole groups of eight rows");

// Which tokens and rows of weights a tile has. Tiles of `group` neighbouring blocks of tokens come after one another for the same rows of
// weights: these are read once while the tokens stay in the L2 cache.
struct Tiles {
  int num_heights, num_widths, group;

  __device__ __forceinline__ int count() const { return num_heights * num_widths; }
  __device__ __forceinline__ void find(int number, int& height, int& width) const {
    const int whole = group * num_widths, first = number / whole * group, own = number % whole, size = min(group, num_heights - first);
    height = first + own % size, width = own / size;
  }
};

// Grid: blocks that take turns. out [M, N] or [M, N / 2] gated, may be residual; bias [N] may be null; scales of codes: of the weights' rows [N],
// of x's [M]; num_heights: of 128 tokens; group: see Tiles; is_fresh: the kernel ahead in the stream writes the weights.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    prompt_linear(const __grid_constant__ CUtensorMap weights, const __grid_constant__ CUtensorMap tokens, Element* out, const Element* bias,
                  const Element* residual, const float* scales, const float* token_scales, int M, int N, int K, int num_heights, int num_widths,
                  int group, int is_fresh) {
  extern __shared__ unsigned char dynamic_memory[];
  __shared__ __align__(8) uint64_t barriers[2 * STAGES];
  const uint32_t stages = (uint32_t(__cvta_generic_to_shared(dynamic_memory)) + 1023) & ~1023u;
  const uint32_t full = uint32_t(__cvta_generic_to_shared(barriers)), empty = full + 8 * STAGES;
  const int num_steps = K / STEP;
  const Tiles tiles = {num_heights, num_widths, group};
  if (threadIdx.x == 0) {
    prefetch(&weights), prefetch(&tokens);
    for (int s = 0; s < STAGES; ++s) init_barrier(full + 8 * s, 1), init_barrier(empty + 8 * s, CONSUMERS / 32);
    publish_barriers();
  }
  __syncthreads();

  if (threadIdx.x < 128) {
    keep_registers<40>();
    if (threadIdx.x == 0) {
      const auto copy_weights = [&](int stage, int width, int step) {
        const uint32_t place = stages + stage * STAGE_BYTES + A_BYTES, barrier = full + 8 * stage;
        const int row = width * OUT_WIDTH, k = step * STEP;
        arrive_expecting(barrier, STAGE_BYTES);
        copy_box(place, &weights, barrier, k, row);
        if constexpr (GATED) copy_box(place + B_BYTES / 2, &weights, barrier, k, N / 2 + row);
      };
      const auto copy_tokens = [&](int stage, int height, int step) {
        copy_box(stages + stage * STAGE_BYTES, &tokens, full + 8 * stage, step * STEP, height * TOKENS);
      };
      int height, width, num_early = 0;
      if (!is_fresh && blockIdx.x < tiles.count()) {
        tiles.find(blockIdx.x, height, width);
        num_early = min(STAGES, num_steps);
        for (int s = 0; s < num_early; ++s) copy_weights(s, width, s);
      }
      wait_for_earlier();
      for (int s = 0; s < num_early; ++s) copy_tokens(s, height, s);
      int stage = num_early % STAGES, parity = num_early == STAGES, begin = num_early;
      for (int number = blockIdx.x; number < tiles.count(); number += gridDim.x, begin = 0) {
        tiles.find(number, height, width);
        for (int step = begin; step < num_steps; ++step) {
          await(empty + 8 * stage, parity ^ 1);
          copy_weights(stage, width, step);
          copy_tokens(stage, height, step);
          if (++stage == STAGES) stage = 0, parity ^= 1;
        }
      }
      launch_dependents();
    }
  } else {
    take_registers<232>();
    const int thread = threadIdx.x - 128, group_of_64 = thread / 128, warp = thread / 32 % 4, lane = thread % 32;
    const int row = group_of_64 * 64 + warp * 16 + lane / 4;  // and 8 further on
    const Output output = {out, bias, residual, scales, M, GATED ? N / 2 : N};
    const auto release = [&](int stage) {
      if (lane == 0) arrive(empty + 8 * stage);
    };
    wait_for_earlier();
    int stage = 0, parity = 0;
    for (int number = blockIdx.x; number < tiles.count(); number += gridDim.x) {
      float sums[WIDTH / 2];
      for (int step = 0; step < num_steps; ++step) {
        await(full + 8 * stage, parity);
        const uint32_t place = stages + stage * STAGE_BYTES;
        begin_products();
#pragma unroll
        for (int k = 0; k < 128 / 32; ++k)
          multiply<Operand>(sums, describe(place + group_of_64 * 64 * 128) + 2 * k, describe(place + A_BYTES) + 2 * k, step > 0 || k > 0);
        end_products();
        await_products<1>();
        if (step > 0) release(stage ? stage - 1 : STAGES - 1);
        if (++stage == STAGES) stage = 0, parity ^= 1;
      }
      await_products<0>();
      hold(sums);
      release(stage ? stage - 1 : STAGES - 1);

      int height, width;
      tiles.find(number, height, width);
      const int token = height * TOKENS + row, column = width * OUT_WIDTH;
      float row_scales[2] = {1.0f, 1.0f};
      if constexpr (CODES)
        for (int half = 0; half < 2; ++half) row_scales[half] = token + 8 * half < M ? __ldcg(token_scales + token + 8 * half) : 0.0f;
#pragma unroll
      for (int q = 0; q < (BLOCKS + 3) / 4; ++q) {
        uint4 added[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) added[half] = output.load_residual(token + 8 * half, column + (4 * q + lane % 4) * 8);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          uint32_t words[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int block = 4 * q + i;
            if (block >= BLOCKS) {
              words[i] = 0;
              continue;
            }
            const float *c = &sums[4 * block + 2 * half], *up = &sums[4 * (block + (PARTS - 1) * BLOCKS) + 2 * half];
            words[i] = output.round(column + block * 8 + lane % 4 * 2, c, up, row_scales[half]);
          }
          transpose(words);
          if (4 * q + lane % 4 < BLOCKS) output.store(token + 8 * half, column + (4 * q + lane % 4) * 8, words, added[half]);
        }
      }
    }
  }
}
#endif
