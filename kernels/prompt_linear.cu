// x [M, K] times weight [N, K] transposed, for the tokens of prompts: bound by arithmetic.
//
// A tile is 128 tokens, 64 for each of two warpgroups, times WIDTH rows of the weights: as many as give every multiprocessor nearly the same work,
// where cuBLAS's tiles leave up to half of them idle. Blocks take tiles in turn; a thread of a further warpgroup copies blocks of 128 bytes of
// K to shared memory (bulk tensor copies, STAGES under way) while results are stored. A sum's terms are added in the same order in tiles of any
// width: a row of a result does not depend on how many there are.
//
// With CODES x and the weights are e4m3, each row of either with a scale of its own, which its sums are multiplied by.
//
// With GROUPED x is rows of several experts, one expert's after the other's, and the weights are as many matrices: a tile has rows of one expert. A tile
// of up to 64 rows takes one warpgroup, and half the time.
//
// ELEMENT: __nv_bfloat16 or __half; CODES: 0 or 1; WIDTH: a multiple of 16 up to 256; GATED: weight is gate | up, the output
// silu(gate) * up, and a tile has as many rows of either; GROUPED: 0 or 1; STAGES.
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
constexpr int HALF_BYTES = A_BYTES / 2, MAX_GROUPS = GROUPED ? 512 : 1;
constexpr int PARTS = GATED ? 2 : 1;  // column blocks of the product for one of the output
constexpr int OUT_WIDTH = WIDTH / PARTS, BLOCKS = OUT_WIDTH / 8;  // of eight columns
static_assert(WIDTH % (8 * PARTS) == 0, "what is copied at once are whole groups of eight rows");

// Rows of x from `row` to `end` that a tile has, rows of weights from `weights`, columns of the output from `column`.
struct Tile {
  int row, end, weights, column;
};

// Tiles of `group` neighbouring blocks of tokens come after one another for the same rows of weights: these are read once while the tokens stay in
// the L2 cache. Of experts, all blocks of one do, and experts' tiles come one expert after the other.
struct Tiles {
  int num_tokens, num_rows, num_widths, group;
  const int* ends;         // of experts' rows
  const int* num_heights;  // blocks of rows of all experts up to one
  int num_groups;

  __device__ __forceinline__ int count() const {
    return (GROUPED ? num_heights[num_groups - 1] : (num_tokens + TOKENS - 1) / TOKENS) * num_widths;
  }
  __device__ __forceinline__ Tile find(int number) const {
    if constexpr (GROUPED) {
      int low = 0, high = num_groups - 1;  // the first expert whose tiles go beyond the number
      while (low < high) {
        const int middle = (low + high) / 2;
        if (num_heights[middle] * num_widths > number) high = middle;
        else low = middle + 1;
      }
      const int before = low ? num_heights[low - 1] : 0, begin = low ? __ldcg(ends + low - 1) : 0, own = number - before * num_widths;
      const int size = num_heights[low] - before, width = own / size;
      return {begin + own % size * TOKENS, __ldcg(ends + low), low * num_rows + width * OUT_WIDTH, width * OUT_WIDTH};
    }
    const int total = (num_tokens + TOKENS - 1) / TOKENS, whole = group * num_widths, first = number / whole * group, own = number % whole;
    const int size = min(group, total - first), width = own / size;
    return {(first + own % size) * TOKENS, num_tokens, width * OUT_WIDTH, width * OUT_WIDTH};
  }
};

// By one warp: of each expert how many blocks of rows it and those before it have.
__device__ __forceinline__ void count_heights(int* num_heights, const int* ends, int num_groups) {
  int before = 0;
  for (int first = 0; first < num_groups; first += 32) {
    const int lane = threadIdx.x % 32, e = first + lane;
    const int rows = e < num_groups ? __ldcg(ends + e) - (e ? __ldcg(ends + e - 1) : 0) : 0;
    int sum = (rows + TOKENS - 1) / TOKENS;
    for (int d = 1; d < 32; d *= 2) {
      const int less = __shfl_up_sync(~0u, sum, d);
      if (lane >= d) sum += less;
    }
    sum += before;
    if (e < num_groups) num_heights[e] = sum;
    before = __shfl_sync(~0u, sum, 31);
  }
}

// Grid: blocks that take turns. out [M, N] or [M, N / 2] gated, may be residual; bias [N] may be null; scales of codes: of the weights' rows [N],
// of x's [M]; ends [num_groups] of experts' rows, whose weights are [num_groups N, K]; group: see Tiles; is_fresh: the kernel ahead in the stream
// writes the weights.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    prompt_linear(const __grid_constant__ CUtensorMap weights, const __grid_constant__ CUtensorMap tokens, Element* out, const Element* bias,
                  const Element* residual, const float* scales, const float* token_scales, const int* ends, int num_groups, int M, int N, int K,
                  int num_widths, int group, int is_fresh) {
  extern __shared__ unsigned char dynamic_memory[];
  __shared__ __align__(8) uint64_t barriers[2 * STAGES];
  __shared__ int num_heights[MAX_GROUPS];
  const uint32_t stages = (uint32_t(__cvta_generic_to_shared(dynamic_memory)) + 1023) & ~1023u;
  const uint32_t full = uint32_t(__cvta_generic_to_shared(barriers)), empty = full + 8 * STAGES;
  const int num_steps = K / STEP;
  const Tiles tiles = {M, N, num_widths, group, ends, num_heights, num_groups};
  if (threadIdx.x == 0) {
    prefetch(&weights), prefetch(&tokens);
    for (int s = 0; s < STAGES; ++s) init_barrier(full + 8 * s, 1), init_barrier(empty + 8 * s, CONSUMERS / 32);
    publish_barriers();
  }
  if constexpr (GROUPED) {
    wait_for_earlier();
    if (threadIdx.x < 32) count_heights(num_heights, ends, num_groups);
  }
  __syncthreads();

  if (threadIdx.x < 128) {
    keep_registers<40>();
    if (threadIdx.x == 0) {
      const auto copy_weights = [&](int stage, const Tile& tile, int step) {
        const uint32_t place = stages + stage * STAGE_BYTES + A_BYTES, barrier = full + 8 * stage;
        const int k = step * STEP;
        arrive_expecting(barrier, B_BYTES + (tile.end - tile.row > TOKENS / 2 ? A_BYTES : HALF_BYTES));
        copy_box(place, &weights, barrier, k, tile.weights);
        if constexpr (GATED) copy_box(place + B_BYTES / 2, &weights, barrier, k, N / 2 + tile.weights);
      };
      const auto copy_tokens = [&](int stage, const Tile& tile, int step) {
        const uint32_t place = stages + stage * STAGE_BYTES;
        for (int half = 0; half < (tile.end - tile.row > TOKENS / 2 ? 2 : 1); ++half)
          copy_box(place + half * HALF_BYTES, &tokens, full + 8 * stage, step * STEP, tile.row + half * TOKENS / 2);
      };
      Tile tile;
      int num_early = 0;
      if (!GROUPED && !is_fresh && blockIdx.x < tiles.count()) {
        tile = tiles.find(blockIdx.x);
        num_early = min(STAGES, num_steps);
        for (int s = 0; s < num_early; ++s) copy_weights(s, tile, s);
      }
      if constexpr (!GROUPED) wait_for_earlier();
      for (int s = 0; s < num_early; ++s) copy_tokens(s, tile, s);
      int stage = num_early % STAGES, parity = num_early == STAGES, begin = num_early;
      for (int number = blockIdx.x; number < tiles.count(); number += gridDim.x, begin = 0) {
        tile = tiles.find(number);
        for (int step = begin; step < num_steps; ++step) {
          await(empty + 8 * stage, parity ^ 1);
          copy_weights(stage, tile, step);
          copy_tokens(stage, tile, step);
          if (++stage == STAGES) stage = 0, parity ^= 1;
        }
      }
      launch_dependents();
    }
  } else {
    take_registers<232>();
    const int thread = threadIdx.x - 128, group_of_64 = thread / 128, warp = thread / 32 % 4, lane = thread % 32;
    const int row = group_of_64 * 64 + warp * 16 + lane / 4;  // and 8 further on
    const auto release = [&](int stage) {
      if (lane == 0) arrive(empty + 8 * stage);
    };
    if constexpr (!GROUPED) wait_for_earlier();
    int stage = 0, parity = 0;
    for (int number = blockIdx.x; number < tiles.count(); number += gridDim.x) {
      const Tile tile = tiles.find(number);
      if (tile.row + group_of_64 * 64 >= tile.end) {  // the other warpgroup has all rows
        for (int step = 0; step < num_steps; ++step) {
          await(full + 8 * stage, parity);
          __syncwarp();  // no lane waits for what comes twice later
          release(stage);
          if (++stage == STAGES) stage = 0, parity ^= 1;
        }
        continue;
      }
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

      const Output output = {out, bias, residual, CODES ? scales + (tile.weights - tile.column) : scales, tile.end, GATED ? N / 2 : N};
      const int token = tile.row + row, column = tile.column;
      float row_scales[2] = {1.0f, 1.0f};
      if constexpr (CODES)
        for (int half = 0; half < 2; ++half) row_scales[half] = token + 8 * half < tile.end ? __ldcg(token_scales + token + 8 * half) : 0.0f;
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
            const int n = column + block * 8 + lane % 4 * 2;
            words[i] = output.round(n, c, up, row_scales[half], output.load_scales(n, 0), output.load_scales(n, PARTS - 1));
          }
          transpose(words);
          if (4 * q + lane % 4 < BLOCKS) output.store(token + 8 * half, column + (4 * q + lane % 4) * 8, words, added[half]);
        }
      }
    }
  }
}
#endif
