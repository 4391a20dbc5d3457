// x [M, K] times weights of 8 or 4 bits [N, K] transposed, for up to 192 rows of x: bound by the memory, from about 100 on by arithmetic.
//
// A tile is 64 rows of the weights: the A operand of wgmma, whose numbers are made of the stored bytes in registers; tokens are its columns. So
// each weight is read once, whatever M. A thread of the first warpgroup copies UNITS times 64 bytes of each row, the tokens' columns that belong to
// them and their scales to shared memory (bulk copies, STAGES under way), in turn of the first half of K and of the second, which belong to the
// other two warpgroups: one makes numbers while the other one's are multiplied. Their sums are added, with SPLIT those of two blocks of a cluster that
// share a tile, each with half of K. What shares a scale is summed first, then scaled in float32. So the sum for an output is the same whatever M and
// the timing are.
//
// Like wide_linear.cu's blocks these let the next kernel's in when the last weights are on their way, and begin before the one ahead has ended.
//
// With ROUNDED x is e4m3, each token with a scale of its own, and nothing is made of the stored bytes: those of e4m3 are what tensor cores take, and so are
// digits of 4 bits, as e4m3's numbers below 16 * 2^-9 are those of its bytes. What zeros take off is zero times a sum of x's codes, which x comes with.
//
// ELEMENT, KIND, ZEROS: see quantized.cuh; ROUNDED: 0, or 1 where scales are of groups and KIND is not 0; SPAN: units that share a scale; GROUPED: scales
// are of group_size columns each, or there are zeros; TOKENS: 16 (ROUNDED, without SPLIT), 32, 64, 128 or 192 (not of 4 bits); ROWS: most rows of x, TOKENS
// or, of up to 32, 8: products of columns that there are not go nowhere, as in wide_linear.cu; SPLIT: 1 or 2; GATED: weights are gate | up, the output
// silu(gate) * up, and a tile has as many rows of either; UNITS: 1, 2 or 4; STAGES.
#include "quantized.cuh"
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define CLUSTER SPLIT
#include "cluster.cuh"
#include "mma.cuh"
#include "pipeline.cuh"
#include "small_code.cuh"
#include "wgmma.cuh"
#include "wide_quantized_layout.cuh"

template <int NUMBER, int COUNT>
__device__ __forceinline__ void meet() { asm volatile("bar.sync %0, %1;" ::"n"(NUMBER), "n"(COUNT) : "memory"); }
__device__ __forceinline__ void meet_group(int group) { asm volatile("bar.sync %0, 128;" ::"r"(2 + group) : "memory"); }

// Grid: a cluster of SPLIT a tile, or without SPLIT blocks that take turns. out [M, N] or [M, N / 2] gated, may be residual; bias [N] may be null; codes:
// rows of row_bytes bytes; scales and zeros [groups, N], a group scale_stride after the other, group_size a multiple of 64 SPAN; of rounded x the tokens'
// scales [M] and the sums of each 64 SPAN codes [K / 64 SPAN, num_rows]; rows of x to copy, M rounded up to eight. N is a multiple of 16, of 32 where gated.
// is_ready, not of rounded x: see wait_for_earlier.
extern "C" __global__ void CLUSTER_DIMS __launch_bounds__(MOST_THREADS, 1)
    wide_quantized(const __grid_constant__ CUtensorMap codes, const __grid_constant__ CUtensorMap tokens, Element* out, const float* scales,
                   const float* zeros, const Element* bias, const Element* residual, const float* token_scales, const float* code_sums, int M,
                   int N, int row_bytes, int group_size, int scale_stride, int num_tiles, int num_rows, int is_ready) {
  extern __shared__ unsigned char dynamic_memory[];
  __shared__ __align__(8) uint64_t barriers[2 * STAGES + 1];
  __shared__ float own_scales[ROUNDED ? TOKENS : 1];
  const uint32_t stages = (uint32_t(__cvta_generic_to_shared(dynamic_memory)) + 1023) & ~1023u;
  const uint32_t exchange = stages + STAGES * STAGE_BYTES, remote = exchange + SUM_BYTES;
  const uint32_t full = uint32_t(__cvta_generic_to_shared(barriers)), empty = full + 8 * STAGES, parts = empty + 8 * STAGES;
  const int rank = SPLIT > 1 ? blockIdx.x % SPLIT : 0, first_tile = blockIdx.x / SPLIT, tile_step = SPLIT > 1 ? num_tiles : gridDim.x;
  const int num_steps = row_bytes / STEP, begin = num_steps * rank / SPLIT, num_own = num_steps * (rank + 1) / SPLIT - begin;
  const int num_outputs = GATED ? N / 2 : N;
  if (threadIdx.x == 0) {
    prefetch(&codes), prefetch(&tokens);
    SMALL_CODE
    for (int s = 0; s < STAGES; ++s) init_barrier(full + 8 * s, GROUPED ? 3 : 2), init_barrier(empty + 8 * s, 4);
    if constexpr (SPLIT > 1) {
      init_barrier(parts, 1);
      arrive_expecting(parts, REMOTE_BYTES);
    }
    publish_barriers();
  }
  __syncthreads();
  arrive_cluster_relaxed();

  if (threadIdx.x < 128) {
    keep_registers<PRODUCER_REGISTERS>();
    // Three warps copy: codes, scales and zeros, and what belongs to tokens, which alone waits for the kernel ahead.
    constexpr int SIDES = GATED ? 2 : 1, SCALE_LINES = GROUPED ? SPANS * SIDES * (ZEROS ? 2 : 1) : 0;
    static_assert(SCALE_LINES <= 32, "a lane copies one of a step's lines");
    const int role = threadIdx.x / 32, lane = threadIdx.x % 32;
    const auto copy_all = [&](auto copy) {
      int stage = 0, parity = 0;
#pragma unroll 1
      for (int tile = first_tile; tile < num_tiles; tile += tile_step)
        SMALL_CODE
        for (int i = 0; i < num_own; ++i) {
          await(empty + 8 * stage, parity ^ 1);  // at first at once
          copy(stages + stage * STAGE_BYTES, full + 8 * stage, tile, begin + i / 2 + (i % 2 ? (num_own + 1) / 2 : 0));
          if (++stage == STAGES) stage = 0, parity ^= 1;
        }
    };
    if (role == 0 && lane == 0) {
      copy_all([&](uint32_t place, uint32_t barrier, int tile, int step) {
        arrive_expecting(barrier, CODE_BYTES);
        copy_block(place + ALL_TOKEN_BYTES, &codes, barrier, tile * OUTPUTS, step * LINES);
        if constexpr (GATED) copy_block(place + ALL_TOKEN_BYTES + CODE_BYTES / 2, &codes, barrier, num_outputs + tile * OUTPUTS, step * LINES);
      });
      launch_dependents();
    } else if (role == 1 && GROUPED) {
      const int span = lane % SPANS, side = lane / SPANS % SIDES, first_column = span / PARTS * SPAN * UNIT + span % PARTS * row_bytes;
      const bool is_zero = lane >= SPANS * SIDES;
      const float* source = (is_zero ? zeros : scales) + side * num_outputs;
      const int target = (is_zero ? ZERO_PLACE : SCALE_PLACE) + span * ROW_BYTES + side * (ROW_BYTES / 2);
      copy_all([&](uint32_t place, uint32_t barrier, int tile, int step) {
        const int row = tile * OUTPUTS, size = min(OUTPUTS, num_outputs - row) * 4;  // bytes of the scales that there are
        if (lane == 0) arrive_expecting(barrier, SCALE_LINES * size);
        // Those of other lanes may come in before: nobody's wait ends before the first lane has said how many there are.
        if (lane < SCALE_LINES)
          copy_line(place + target, source + size_t((first_column + step * STEP) / group_size) * scale_stride + row, size, barrier);
      });
    } else if (role == 2 && lane == 0) {
      if (!is_ready) wait_for_earlier();
      copy_all([&](uint32_t place, uint32_t barrier, int, int step) {
        arrive_expecting(barrier, num_rows * (PARTS * UNITS * TOKEN_BYTES + SUM_LINES * 4));
        for (int p = 0; p < PARTS; ++p) {
          const int unit = step * UNITS + p * (row_bytes / UNIT);
          copy_block(place + p * UNITS * num_rows * TOKEN_BYTES, &tokens, barrier, 0, unit);
          if constexpr (SUM_LINES > 0) {
            constexpr int EACH = UNITS / SPAN;  // lines of a part, one behind the other
            copy_line(place + CODE_SUM_PLACE + p * EACH * LINE_BYTES, code_sums + size_t(unit / SPAN) * num_rows, EACH * num_rows * 4, barrier);
          }
        }
      });
    }
    __syncwarp();
    await_cluster();
    return;
  }

  take_registers<CONSUMER_REGISTERS>();
  const int thread = threadIdx.x - 128, group = thread / 128, own_thread = thread % 128, warp = own_thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4;
  await_cluster();
  if (!is_ready) wait_for_earlier();
  if constexpr (ROUNDED) {
    if (thread < TOKENS) own_scales[thread] = thread < M ? __ldcg(token_scales + thread) : 0.0f;
    meet<1, CONSUMERS>();
  }

  // Of the tile, the rows whose sums a thread has. Of a gated one the first is gate's and the second is up's for the same output.
  const int rows[2] = {GATED ? warp * 8 + g : warp * 16 + g, GATED ? TILE / 2 + warp * 8 + g : warp * 16 + 8 + g};
  // What a lane loads of a unit for ldmatrix: eight rows of 16 bytes, the first rows' and the second's, of two neighbouring pieces.
  const int read_row = (GATED ? warp * 8 : warp * 16 + lane / 8 % 2 * 8) + lane % 8;
  const auto read_place = [&](int unit, int pair) {
    const int piece = unit * 4 % (LINE / 16) + pair * 2 + lane / 16, swizzled = piece ^ (LINE == 128 ? read_row % 8 : read_row / 2 % 4);
    constexpr int COPIED = GATED ? TILE / 2 : TILE;  // rows of a block
    return ALL_TOKEN_BYTES + (GATED ? lane / 8 % 2 * (CODE_BYTES / 2) : 0) + unit * UNIT / LINE * COPIED * LINE + read_row * LINE + swizzled * 16;
  };

  int count = 0;  // of the block's steps so far
  for (int tile = first_tile; tile < num_tiles; tile += tile_step) {
    const int first_row = tile * OUTPUTS;
    float channel[2] = {1.0f, 1.0f};
    if constexpr (!GROUPED)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = GATED ? first_row + warp * 8 + g + i * num_outputs : first_row + rows[i];
        if (GATED ? first_row + warp * 8 + g < num_outputs : row < N) channel[i] = __ldg(scales + row);
      }
    const int first_token = (group * HALF + rank * OWN) * 8;
    constexpr int OUTPUT_LINES = OUTPUTS / 8;
    const auto place_of = [&](int i) { return size_t(first_token + i / OUTPUT_LINES) * num_outputs + first_row + i % OUTPUT_LINES * 8; };
    const auto is_stored = [&](int i) {
      return i < OWN * 8 * OUTPUT_LINES && first_token + i / OUTPUT_LINES < M && first_row + i % OUTPUT_LINES * 8 < num_outputs;
    };
    // What a thread's first outputs are added to, where rows are few: asked for before the products.
    Vector<Element> first_added;
    if (ROWS < TOKENS && residual && is_stored(own_thread)) first_added = load_fresh(residual + place_of(own_thread));
    Sums sums;
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block)
#pragma unroll
      for (int e = 0; e < 4; ++e) sum(sums, block)[e] = 0;
    const int last = count + num_own;
    int number = count + ((count & 1) != group), stage = number % STAGES, parity = number / STAGES & 1;  // a stage's steps are all one warpgroup's
    count = last;
    const auto advance = [&] {
      number += GROUPS, stage += GROUPS;
      if (stage >= STAGES) stage -= STAGES, parity ^= 1;
    };
    const auto release = [&](int stage) {  // -1: there is none yet
      if (lane == 0 && stage >= 0) arrive(empty + 8 * stage);
    };
    // Part of a unit as numbers, as often as given what wgmma takes.
    using Numbers = uint32_t[PRODUCTS_EACH][4];
    const auto load = [&](int unit, uint32_t(&words)[2][4]) {
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) load_fragments(stages + stage * STAGE_BYTES + read_place(unit, pair), words[pair]);
    };
    const auto make_numbers = [&](const uint32_t(&words)[2][4], int unit, int part, Numbers& a) {
      if constexpr (ROUNDED) {
#pragma unroll
        for (int k = 0; k < PRODUCTS_EACH; ++k)
#pragma unroll
          for (int i = 0; i < 4; ++i) a[k][i] = digits_of(words[k][i], part);
        return;
      }
      uint32_t offsets[2] = {usual_offset(), usual_offset()};
      if constexpr (ZEROS)
#pragma unroll
        for (int i = 0; i < 2; ++i)
          offsets[i] = offset_of(load_word(stages + stage * STAGE_BYTES + ZERO_PLACE + (unit * PARTS + part) * ROW_BYTES + rows[i] * 4));
#pragma unroll
      for (int k = 0; k < PRODUCTS_EACH; ++k)
#pragma unroll
        for (int i = 0; i < 2; ++i) expand(digits_of(words[k / 2][k % 2 * 2 + i], part), offsets[i], a[k][i], a[k][2 + i]);
    };
    const auto tokens_of = [&](int unit, int part) {
      return describe<TOKEN_BYTES>(stages + stage * STAGE_BYTES + (part * UNITS + unit) * num_rows * TOKEN_BYTES);
    };
    // Numbers are made while the ones before them are multiplied, in registers that products under way do not read.
    int before = -1;
    if constexpr (ROUNDED) {
      // Numbers take no making, so what is multiplied is finished at once, or where a thread has the registers behind the next span's products.
      constexpr bool GOES_ON = TOKENS <= 64;
      float own[GOES_ON ? 2 : 1][WGMMA_N / 2], scale[2][2], zero[2][2];
      const auto finish = [&](int span, int turn) {
        const float* v = own[GOES_ON ? span % 2 : 0];
        const uint32_t sums_place = stages + stage * STAGE_BYTES + CODE_SUM_PLACE + span % PARTS * (UNITS / SPAN) * LINE_BYTES + span / PARTS * num_rows * 4;
#pragma unroll
        for (int block = 0; block < WGMMA_N / 8; ++block) {
          float2 of_codes;
          if constexpr (SUM_LINES > 0) of_codes = load_pair(sums_place + (turn * WGMMA_N + block * 8 + t * 2) * 4);
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            float term = v[block * 4 + e];
            if constexpr (SUM_LINES > 0) term = __fmaf_rn(zero[span % 2][e / 2], e % 2 ? of_codes.y : of_codes.x, term);
            sums[turn][block * 4 + e] = __fmaf_rn(term, scale[span % 2][e / 2], sums[turn][block * 4 + e]);
          }
        }
      };
      for (; number < last; advance()) {
        await(full + 8 * stage, parity);
        const uint32_t place = stages + stage * STAGE_BYTES;
        uint32_t words[SPAN][2][4];
        Numbers a[GOES_ON ? 2 : 1][SPAN];
#pragma unroll
        for (int span = 0; span < SPANS; ++span) {
          const int first_unit = span / PARTS * SPAN, part = span % PARTS;
          if (part == 0)
#pragma unroll
            for (int u = 0; u < SPAN; ++u) load(first_unit + u, words[u]);
#pragma unroll
          for (int u = 0; u < SPAN; ++u) make_numbers(words[u], first_unit + u, part, a[GOES_ON ? span % 2 : 0][u]);
#pragma unroll
          for (int turn = 0; turn < TURNS; ++turn) {
            begin_products();
#pragma unroll
            for (int u = 0; u < SPAN; ++u) {
              const uint64_t b = tokens_of(first_unit + u, part) + turn * (WGMMA_N * TOKEN_BYTES / 16);
#pragma unroll
              for (int k = 0; k < PRODUCTS_EACH; ++k)
                multiply<Operand>(own[GOES_ON ? span % 2 : 0], a[GOES_ON ? span % 2 : 0][u][k], b + 2 * k, u > 0 || k > 0);
            }
            end_products();
            if (turn == 0)
#pragma unroll
              for (int h = 0; h < 2; ++h) {
                scale[span % 2][h] = load_word(place + SCALE_PLACE + span * ROW_BYTES + rows[h] * 4);
                if constexpr (SUM_LINES > 0) zero[span % 2][h] = -DIGIT * (ZEROS ? load_word(place + ZERO_PLACE + span * ROW_BYTES + rows[h] * 4) : 8.0f);
              }
            if constexpr (GOES_ON) {
              if (span > 0) {
                await_products<1>();
                hold(own[(span - 1) % 2]);
                finish(span - 1, 0);
              }
            } else {
              await_products<0>();
              hold(own[0]);
              finish(span, turn);
            }
          }
        }
        if constexpr (GOES_ON) {
          await_products<0>();
          hold(own[(SPANS - 1) % 2]);
          finish(SPANS - 1, 0);
        }
        release(stage);
      }
    } else if constexpr (GROUPED) {
      Numbers both[2];
      float own[WGMMA_N / 2] = {}, scale[2] = {};  // at first nothing is added
      const auto finish = [&](int turn) {
        await_products<0>();
        hold(own);
#pragma unroll
        for (int i = 0; i < WGMMA_N / 2; ++i) sums[turn][i] = __fmaf_rn(own[i], scale[i / 2 % 2], sums[turn][i]);
      };
      for (; number < last; before = stage, advance()) {
        await(full + 8 * stage, parity);
        uint32_t words[2][4];
#pragma unroll
        for (int i = 0; i < UNITS * PARTS; ++i) {
          const int unit = i / PARTS, part = i % PARTS;
          if (part == 0) load(unit, words);
          Numbers& a = both[i % 2];
          if (UNITS * PARTS > 1) make_numbers(words, unit, part, a);
#pragma unroll
          for (int turn = 0; turn < TURNS; ++turn) {
            finish(turn ? turn - 1 : TURNS - 1);
            if (i == 0 && turn == 0) release(before);
            if (UNITS * PARTS == 1 && turn == 0) make_numbers(words, unit, part, a);
            if (turn == 0)
#pragma unroll
              for (int h = 0; h < 2; ++h) scale[h] = load_word(stages + stage * STAGE_BYTES + SCALE_PLACE + i * ROW_BYTES + rows[h] * 4);
            const uint64_t b = tokens_of(unit, part) + turn * (WGMMA_N * TOKEN_BYTES / 16);
            begin_products();
#pragma unroll
            for (int k = 0; k < PRODUCTS_EACH; ++k) multiply<Element>(own, a[k], b + 2 * k, k > 0);
            end_products();
          }
        }
      }
      finish(TURNS - 1);
      release(before);
    } else {
      // Where stages are small enough to be many, each may be given back later: while the next one's first numbers are made, too, products go on. Bytes
      // are loaded once the products have ended that read the registers which these become.
      constexpr int EACH = UNITS * PARTS;
      constexpr bool GOES_ON = TOKENS <= 32;
      Numbers all[EACH];
      for (; number < last; before = stage, advance()) {
        if constexpr (!GOES_ON) {
          await_products<0>();
          release(before);
        }
        await(full + 8 * stage, parity);
        uint32_t words[UNITS][2][4];
        if constexpr (!GOES_ON)
#pragma unroll
          for (int unit = 0; unit < UNITS; ++unit) load(unit, words[unit]);
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
          if constexpr (GOES_ON) {
            await_products<EACH - 1>();
            if (i == EACH - 1) release(before);
            load(i / PARTS, words[i / PARTS]);
          }
          make_numbers(words[i / PARTS], i / PARTS, i % PARTS, all[i]);
          begin_products();
#pragma unroll
          for (int k = 0; k < PRODUCTS_EACH; ++k) multiply<Element>(sums[0], all[i][k], tokens_of(i / PARTS, i % PARTS) + 2 * k, 1);
          end_products();
        }
      }
      await_products<0>();
      release(before);
      hold(sums[0]);
    }

    // Each warpgroup has half of the tokens in the end, with SPLIT each block half of these.
    const auto cell = [&](int owner, int block) { return exchange + ((owner * HALF + block) * 128 + own_thread) * 16; };
#pragma unroll
    for (int owner = 0; owner < GROUPS; ++owner)
      if (owner != group)
#pragma unroll
        for (int i = 0; i < HALF; ++i) {
          const float* v = sum(sums, owner * HALF + i);
          asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(cell(owner, i)), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]) : "memory");
        }
    meet<1, CONSUMERS>();
    float totals[HALF][4];
#pragma unroll
    for (int i = 0; i < HALF; ++i) {
      const float4 other = load_shared(cell(group, i));
      const float others[4] = {other.x, other.y, other.z, other.w};
#pragma unroll
      for (int e = 0; e < 4; ++e) totals[i][e] = (group ? sum(sums, HALF + i)[e] : sum(sums, i)[e]) + others[e];
    }
    if constexpr (SPLIT > 1) {
      const auto remote_cell = [&](int i) { return remote + ((group * OWN + i) * 128 + own_thread) * 16; };
#pragma unroll
      for (int i = 0; i < OWN; ++i) {
        float others[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) others[e] = rank ? totals[i][e] : totals[OWN + i][e];
        store_remote(remote_cell(i), parts, rank ^ 1, others);
      }
      await(parts, 0);
#pragma unroll
      for (int i = 0; i < OWN; ++i) {
        const float4 other = load_shared(remote_cell(i));
        const float others[4] = {other.x, other.y, other.z, other.w};
#pragma unroll
        for (int e = 0; e < 4; ++e) totals[i][e] = (rank ? totals[OWN + i][e] : totals[i][e]) + others[e];
      }
    }
    meet<1, CONSUMERS>();  // what was exchanged has been read

    // Rounded outputs by token, so that whole lines are stored.
    float added[2] = {0, 0};
    if (bias) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int output = GATED ? first_row + warp * 8 + g : first_row + rows[i];
        if (output < num_outputs) added[i] = to_float(__ldg(bias + output + (GATED ? i * num_outputs : 0)));
      }
    }
    const auto round = [&](float v, int i, int token) {
      const float value = v * OUT_FACTOR * (ROUNDED ? own_scales[token] : channel[i]);
      return from_float<Element>(bias ? value + added[i] : value);
    };
    const auto keep = [&](int token, int output, Element v) {
      asm volatile("st.shared.b16 [%0], %1;" ::"r"(exchange + token * PITCH + output * 2), "h"(*reinterpret_cast<const uint16_t*>(&v)) : "memory");
    };
#pragma unroll
    for (int i = 0; i < OWN; ++i)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int token = first_token + i * 8 + t * 2 + e;
        const Element values[2] = {round(totals[i][e], 0, token), round(totals[i][2 + e], 1, token)};
        if constexpr (GATED) keep(token, rows[0], gate_mul(values[0], values[1]));
        else keep(token, rows[0], values[0]), keep(token, rows[1], values[1]);
      }
    meet_group(group);
    for (int i = own_thread; i < OWN * 8 * OUTPUT_LINES; i += 128) {
      if (!is_stored(i)) continue;
      const float4 line = load_shared(exchange + (first_token + i / OUTPUT_LINES) * PITCH + i % OUTPUT_LINES * 16);
      Vector<Element> v(*reinterpret_cast<const uint4*>(&line));
      if (residual) {
        const Vector<Element> before = ROWS < TOKENS && i == own_thread ? first_added : load_fresh(residual + place_of(i));
#pragma unroll
        for (int e = 0; e < 8; ++e) v.values[e] = from_float<Element>(to_float(before.values[e]) + to_float(v.values[e]));
      }
      store(out + place_of(i), v);
    }
    if constexpr (SPLIT == 1) meet<1, CONSUMERS>();  // outputs have been read where the next tile's sums will lie
  }
  if (is_ready) wait_for_earlier();
}
#endif
