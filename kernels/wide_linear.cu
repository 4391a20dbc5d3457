// x [M, K] times weight [N, K] transposed, for up to 192 rows of x: bound by the memory, at the end by arithmetic nearly as much.
//
// Tokens are the A operand of wgmma, 64 for each warpgroup but the first; WIDTH rows of the weights are its columns, so that tiles can be as wide
// as gives nearly every multiprocessor one. Each weight is read once. A thread of the first warpgroup copies blocks of 128 bytes of K to
// shared memory (bulk tensor copies, STAGES under way). With SPLIT two blocks of a cluster share a tile, each with half of K, and each
// adds up half of the columns through distributed shared memory. So the sum for an output is the same whatever M and the timing are.
//
// A multiprocessor has one block. The next kernel's is let in as soon as the last weights are on their way, begins when this one ends, and
// its weights come in while whatever small kernel is in between runs, for which registers and shared memory are left: weights never change.
//
// With CODES x and the weights are e4m3, each row of either with a scale of its own, which its sums are multiplied by.
//
// A stage has room for ROWS of x. Of fewer than 64 the products of the others are of what lies behind them, and go nowhere: what a
// multiprocessor may have on its way are weights, not rows that there are not.
//
// ELEMENT: __nv_bfloat16 or __half; CODES: 0 or 1; TOKENS: 64, 128 or 192; ROWS: most rows of x, TOKENS or, of 64, 8 or 32; WIDTH: a multiple of 16 up
// to 192, 224 or 256; SPLIT: 1 or 2; GATED: weight is gate | up, the output silu(gate) * up, and a tile has as many rows of either; STAGES.
#include "dense.cuh"
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define PIECES (WIDTH > 192 ? 2 : 1)  // of a tile's columns: ptxas refuses an instruction with sums of more
#if WIDTH > 192
#define WGMMA_N (WIDTH / 2)
#else
#define WGMMA_N WIDTH
#endif
#define CLUSTER SPLIT
#include "cluster.cuh"
#include "pipeline.cuh"
#include "small_code.cuh"
#include "wgmma.cuh"

using Element = ELEMENT;
#include "product_output.cuh"
using Operand = std::conditional_t<CODES, E4m3, Element>;

constexpr int STEP = CODES ? 128 : 64;  // elements of K in a stage: a swizzled row of 128 bytes
constexpr int A_BYTES = ROWS * 128, B_BYTES = WIDTH * 128, STAGE_BYTES = A_BYTES + B_BYTES;
constexpr int CONSUMERS = TOKENS * 2, THREADS = CONSUMERS + 128;
constexpr int PARTS = GATED ? 2 : 1;                                            // column blocks of the product for one of the output
constexpr int OUT_WIDTH = WIDTH / PARTS, BLOCKS = OUT_WIDTH / 8, OWN = BLOCKS / SPLIT;  // in blocks of eight columns
constexpr int GROUPS = (OWN + 3) / 4;  // of column blocks that are stored together
// As many registers as leave room for other kernels' blocks, but where a thread has many sums.
constexpr int MOST_THREADS = TOKENS == 192 && WIDTH <= 96 ? 768 : 512, LAUNCH_REGISTERS = 65536 / MOST_THREADS / 8 * 8;
constexpr int PRODUCER_REGISTERS = 32, SPARE_REGISTERS = (LAUNCH_REGISTERS * THREADS - PRODUCER_REGISTERS * 128) / CONSUMERS / 8 * 8;
constexpr int CONSUMER_REGISTERS = SPARE_REGISTERS < 240 ? SPARE_REGISTERS : 240;
// With one warpgroup products of two stages overlap. (ptxas would not let them where half is rounded twice.)
constexpr int PENDING_STAGES = TOKENS == 64 && !(GATED && std::is_same<Element, __half>::value);
// A thread has two of its warp's sixteen rows: where a block has but eight, the second is not made, and only the first warp's sums are exchanged.
constexpr int HALVES = ROWS <= 8 ? 1 : 2, BUSY_THREADS = SPLIT > 1 && ROWS <= 8 ? 32 : CONSUMERS;
constexpr bool IS_EARLY = SPLIT > 1 && GROUPS <= 2;  // the residual is asked for before the products, and has registers meanwhile
constexpr int SCALES = OWN * 4;                      // pairs of a part's columns that a block stores
static_assert(ROWS == TOKENS || TOKENS == 64, "a descriptor's rows lie one after the other");
static_assert(SCALES * PARTS <= CONSUMERS, "a thread has a pair");
static_assert(BLOCKS % SPLIT == 0, "blocks have equal shares of the columns");
static_assert(SPLIT == 1 || OWN * PARTS * CONSUMERS * 16 <= STAGES * STAGE_BYTES, "the parts have no room");

using Sums = float[PIECES][WGMMA_N / 2];
// A thread's four of a block of the product: two neighbouring columns of each of two tokens.
__device__ __forceinline__ float* sum(Sums& sums, int block) { return &sums[block * 8 / WGMMA_N][block * 8 % WGMMA_N / 2]; }

// Grid: a cluster of SPLIT a tile, or without SPLIT blocks that take turns. out [M, N] or [M, N / 2] gated, may be residual; bias [N] may be null; scales
// of codes: of the weights' rows [N], of x's [M]; rows of x to copy, M rounded up to eight; is_ready, not of codes: see wait_for_earlier.
extern "C" __global__ void CLUSTER_DIMS __launch_bounds__(MOST_THREADS, 1)
    wide_linear(const __grid_constant__ CUtensorMap weights, const __grid_constant__ CUtensorMap tokens, Element* out, const Element* bias,
                const Element* residual, const float* scales, const float* token_scales, int M, int N, int K, int num_tiles, int num_rows,
                int is_ready) {
  extern __shared__ unsigned char dynamic_memory[];
  __shared__ __align__(8) uint64_t barriers[2 * STAGES + 1];
  __shared__ float row_scales[CODES ? TOKENS : 1];
  __shared__ float2 column_scales[CODES ? SCALES * PARTS : 1];
  const uint32_t stages = (uint32_t(__cvta_generic_to_shared(dynamic_memory)) + 1023) & ~1023u;
  const uint32_t full = uint32_t(__cvta_generic_to_shared(barriers)), empty = full + 8 * STAGES, parts = empty + 8 * STAGES;
  const int rank = SPLIT > 1 ? blockIdx.x % SPLIT : 0, first_tile = blockIdx.x / SPLIT, tile_step = SPLIT > 1 ? num_tiles : gridDim.x;
  const int num_steps = K / STEP, begin = num_steps * rank / SPLIT, end = num_steps * (rank + 1) / SPLIT;
  if (threadIdx.x == 0) {
    prefetch(&weights), prefetch(&tokens);
    SMALL_CODE
    for (int s = 0; s < STAGES; ++s) init_barrier(full + 8 * s, 1), init_barrier(empty + 8 * s, CONSUMERS / 32);
    if constexpr (SPLIT > 1) {
      init_barrier(parts, 1);
      arrive_expecting(parts, OWN * PARTS * BUSY_THREADS * 16);
    }
    publish_barriers();
  }
  __syncthreads();
  arrive_cluster_relaxed();

  if (threadIdx.x < 128) {
    keep_registers<PRODUCER_REGISTERS>();
    const auto copy_weights = [&](int stage, int tile, int step) {
      const uint32_t place = stages + stage * STAGE_BYTES + A_BYTES, barrier = full + 8 * stage;
      arrive_expecting(barrier, num_rows * 128 + B_BYTES);
      copy_box(place, &weights, barrier, step * STEP, tile * OUT_WIDTH);
      if constexpr (GATED) copy_box(place + OUT_WIDTH * 128, &weights, barrier, step * STEP, N / 2 + tile * OUT_WIDTH);
    };
    const auto copy_tokens = [&](int stage, int step) { copy_box(stages + stage * STAGE_BYTES, &tokens, full + 8 * stage, step * STEP, 0); };
    const int num_early = min(STAGES, end - begin);
    if (threadIdx.x == 0) {
      SMALL_CODE
      for (int s = 0; s < num_early; ++s) copy_weights(s, first_tile, begin + s);
      if (!is_ready) wait_for_earlier();
      SMALL_CODE
      for (int s = 0; s < num_early; ++s) copy_tokens(s, begin + s);
      int stage = num_early % STAGES, parity = num_early == STAGES;  // of `empty`, as it was before
      for (int tile = first_tile; tile < num_tiles; tile += tile_step)
        SMALL_CODE
        for (int step = tile == first_tile ? begin + num_early : begin; step < end; ++step) {
          await(empty + 8 * stage, parity ^ 1);
          copy_weights(stage, tile, step);
          copy_tokens(stage, step);
          if (++stage == STAGES) stage = 0, parity ^= 1;
        }
      launch_dependents();
    }
    __syncwarp();
    await_cluster(), arrive_cluster_relaxed(), await_cluster();
  } else {
    take_registers<CONSUMER_REGISTERS>();
    const int thread = threadIdx.x - 128, group = thread / 128, warp = thread / 32 % 4, lane = thread % 32;
    const int token = group * 64 + warp * 16 + lane / 4;  // and 8 further on
    const bool is_busy = BUSY_THREADS == CONSUMERS || thread < BUSY_THREADS;
    const Output output = {out, bias, residual, scales, M, GATED ? N / 2 : N};
    const auto release = [&](int stage) {
      if (lane == 0) arrive(empty + 8 * stage);
    };
    const auto first_column = [&](int tile) { return tile * OUT_WIDTH + rank * OWN * 8; };
    const auto load_scales = [&](int tile) {
      return thread < SCALES * PARTS ? output.load_scales(first_column(tile) + thread % SCALES * 2, thread / SCALES) : float2();
    };
    const auto keep_scales = [&](float2 pair) {
      if (thread < SCALES * PARTS) column_scales[thread] = pair;
    };
    const auto meet = [] { asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory"); };
    if constexpr (CODES) keep_scales(load_scales(first_tile));
    // Rows that no copy fills (boxes past a tensor's end are slow): products of whatever is there would cost power, which is what the clock depends on.
    const int unfilled = (ROWS - num_rows) * 8;
    SMALL_CODE
    for (int i = thread; i < STAGES * unfilled; i += CONSUMERS) clear_shared(stages + i / unfilled * STAGE_BYTES + num_rows * 128 + i % unfilled * 16);
    publish_to_products();
    meet();
    await_cluster();
    if (!is_ready) wait_for_earlier();
    if constexpr (CODES) {
      if (thread < TOKENS) row_scales[thread] = thread < M ? __ldcg(token_scales + thread) : 0.0f;
      meet();
    }
    int stage = 0, parity = 0;
    for (int tile = first_tile; tile < num_tiles; tile += tile_step) {
      const int column = first_column(tile);
      uint4 added[SPLIT > 1 ? GROUPS : 1][2];
      const auto load_group = [&](uint4(&to)[2], int q) {
        for (int half = 0; half < HALVES; ++half) to[half] = output.load_residual(token + 8 * half, column + (4 * q + lane % 4) * 8);
      };
      const auto load_groups = [&] {
#pragma unroll
        for (int q = 0; q < GROUPS; ++q) load_group(added[SPLIT > 1 ? q : 0], q);
      };
      if constexpr (IS_EARLY) load_groups();
      float2 own_scales;
      if (CODES && tile > first_tile) own_scales = load_scales(tile);
      Sums sums;
      for (int step = begin; step < end; ++step) {
        await(full + 8 * stage, parity);
        const uint32_t place = stages + stage * STAGE_BYTES;
        begin_products();
#pragma unroll
        for (int k = 0; k < 128 / 32; ++k)
#pragma unroll
          for (int piece = 0; piece < PIECES; ++piece)
            multiply<Operand>(sums[piece], describe(place + group * 64 * 128) + 2 * k, describe(place + A_BYTES + piece * WGMMA_N * 128) + 2 * k,
                              step > begin || k > 0);
        end_products();
        await_products<PENDING_STAGES>();
        if (!PENDING_STAGES) release(stage);
        else if (step > begin) release(stage ? stage - 1 : STAGES - 1);
        if (++stage == STAGES) stage = 0, parity ^= 1;
      }
      await_products<0>();
#pragma unroll
      for (int piece = 0; piece < PIECES; ++piece) hold(sums[piece]);
      if (PENDING_STAGES) release(stage ? stage - 1 : STAGES - 1);

      if (CODES && tile > first_tile) {
        meet();
        keep_scales(own_scales);
        meet();
      }
      if constexpr (SPLIT > 1) {
        if constexpr (!IS_EARLY) load_groups();
        arrive_cluster_relaxed(), await_cluster();  // nobody reads stages any more
        const auto cell = [&](int i, int p) { return stages + ((i * PARTS + p) * CONSUMERS + thread) * 16; };
        if (!is_busy) break;  // there is but one tile
#pragma unroll
        for (int i = 0; i < OWN; ++i)
#pragma unroll
          for (int p = 0; p < PARTS; ++p) {
            float *first = sum(sums, i + p * BLOCKS), *second = sum(sums, OWN + i + p * BLOCKS), others[4];
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              others[e] = rank ? first[e] : second[e];
              first[e] = rank ? second[e] : first[e];
            }
            store_remote(cell(i, p), parts, rank ^ 1, others);
          }
        await(parts, 0);
#pragma unroll
        for (int i = 0; i < OWN; ++i)
#pragma unroll
          for (int p = 0; p < PARTS; ++p) {
            const float4 other = load_shared(cell(i, p));
            float* own = sum(sums, i + p * BLOCKS);
            own[0] += other.x, own[1] += other.y, own[2] += other.z, own[3] += other.w;
          }
      }
      // Lanes of four exchange what they have of four column blocks, so that each stores one whole.
#pragma unroll
      for (int q = 0; q < GROUPS; ++q) {
        if constexpr (SPLIT == 1) load_group(added[0], q);
#pragma unroll
        for (int half = 0; half < HALVES; ++half) {
          uint32_t words[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int block = 4 * q + i, n = column + block * 8 + lane % 4 * 2;
            const float *c = sum(sums, block) + 2 * half, *up = sum(sums, block + (PARTS - 1) * BLOCKS) + 2 * half;
            float2 own = {}, up_own = {};
            if constexpr (CODES) {
              const int pair = (block < OWN ? block : 0) * 4 + lane % 4;
              own = column_scales[pair], up_own = column_scales[pair + (PARTS - 1) * SCALES];
            }
            words[i] = block < OWN ? output.round(n, c, up, CODES ? row_scales[token + 8 * half] : 1.0f, own, up_own) : 0;
          }
          transpose(words);
          if (4 * q + lane % 4 < OWN) output.store(token + 8 * half, column + (4 * q + lane % 4) * 8, words, added[SPLIT > 1 ? q : 0][half]);
        }
      }
    }
    if (is_ready) wait_for_earlier();
  }
}
#endif
