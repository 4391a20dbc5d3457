// x [M, K] times weight [N, K] transposed, for few rows of x: bound by how fast the weights come from memory.
//
// A weight is the A operand of mma.m16n8k16 (16 of its rows a tile), tokens are B's 8 columns. A block owns neighbouring tiles and takes
// TILES of them at a time, over all of K: step s of K (64 bytes of a weight's row) belongs to warp s % 8, whose threads copy the very fragments
// that they will multiply to shared memory, many steps ahead and without a barrier. Blocks begin at different places of K, lest all ask the L2 cache
// for the same part of x at once. The eight warps' sums are added in order. So the sum for an output is the same whatever M and the timing are.
//
// mma's order of K within a step is free as long as A and B agree: thread t of a quad has elements 8t..8t+7, one 16-byte load. Of weights that are
// stored in 8 or 4 bits it has 16t..16t+15 (of either half of the columns); they become numbers of x's type in registers. What shares a scale is
// summed first, then scaled in float32.
//
// The first copies begin before the kernel ahead in the stream has ended: weights never change.
//
// ELEMENT: __nv_bfloat16 or __half; TOKENS: most rows of x, a multiple of 8; TILES; SHARED: bytes of dynamic shared memory;
// NORM: 0, or K when rows of x are to be normalised (RMS): x times norm_weight is multiplied, and the sums are divided by the row's root mean
// square, which is known at the end and so delays nothing; GATED: weight is gate | up, the output silu(gate) * up. KEPT: 0, or a warp's steps when a
// block keeps x for all of its tiles instead of copying it anew with each TILES. KIND: -1, weights are ELEMENTs, or as in quantized.cuh, ZEROS with
// it; GROUPED: scales are of group_size columns each, or there are zeros.
#ifndef KEPT
#define KEPT 0
#endif
#ifndef KIND
#define KIND -1
#define ZEROS 0
#define GROUPED 0
#endif
#include "quantized.cuh"
#include "skinny.cuh"

constexpr bool STORED = KIND >= 0;
constexpr int WARPS = 8, THREADS = 32 * WARPS, TILE = 16, COLUMNS = TOKENS / 8;
constexpr int STEP = STORED ? 64 : 32, STEP_BYTES = 64;          // columns of a step, of each half where a byte has two, and bytes of a weight's row
constexpr int VECTORS = STORED ? 2 : 1, PIECES = PARTS * VECTORS;  // 16 bytes of a token that a thread has in a part of a step, and in all of it
constexpr int ROWS = GATED ? TILE / 2 : TILE;  // of the output, per tile: a gated one has as many rows of gate as of up
constexpr int STRIDE = TILE + 4;               // of a token's sums in shared memory, apart from each other's banks
constexpr int TOGETHER = TILES < 2 ? TILES : 2;  // tiles that are summed at once
constexpr int SUMS = WARPS * TOGETHER * TOKENS * STRIDE;  // twice: one is written while the other is read
constexpr int HALF = 32 * 16;                                   // bytes of half a tile's step, and of eight tokens' piece
constexpr int SCALE_BYTES = GROUPED ? PARTS * TILE * 4 : 0;     // of a tile's step
constexpr int TOKEN_BYTES = COLUMNS * PIECES * HALF, KEPT_BYTES = KEPT * TOKEN_BYTES;  // of a warp: a step's tokens, and all that are kept
constexpr int TOKEN_PLACE = 2 * TILES * HALF, SCALE_PLACE = TOKEN_PLACE + (KEPT ? 0 : TOKEN_BYTES), ZERO_PLACE = SCALE_PLACE + TILES * SCALE_BYTES;
constexpr int STAGE_BYTES = ZERO_PLACE + (ZEROS ? TILES * SCALE_BYTES : 0);  // of one warp: weights, tokens, scales, zeros
constexpr int STAGES = (SHARED - 2 * SUMS * 4 - NORM * 2 - WARPS * KEPT_BYTES) / (WARPS * STAGE_BYTES);
static_assert(STAGES >= 2, "shared memory has no room for two stages");

__device__ __forceinline__ void copy_word_async(uint32_t target, const float* source) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(target), "l"(source) : "memory");
}

__device__ __forceinline__ float load_word(uint32_t source) {
    float v;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(source) : "memory");
    return v;
}

// out [M, N], or [M, N / 2] gated, may be residual. weight: rows of row_bytes bytes. bias [N] and residual (as out) may be null; norm_weight [K] is
// read where NORM. scales and zeros, of stored weights: [groups, N], a group scale_stride after the other; group_size is a multiple of 64. is_ready: see
// wait_for_earlier.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    linear(Element* out, const Element* x, const uint8_t* weight, const Element* bias, const Element* residual, const Element* norm_weight,
           const float* scales, const float* zeros, int M, int N, int row_bytes, int group_size, int scale_stride, int x_stride, float eps,
           int is_ready) {
    extern __shared__ __align__(16) float both_sums[];
    __shared__ float squares[WARPS][TOKENS];  // of x, by who read them
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const uint32_t shared = static_cast<uint32_t>(__cvta_generic_to_shared(both_sums));
    const uint32_t factors = shared + 2 * SUMS * 4, kept = factors + NORM * 2 + warp * KEPT_BYTES + lane * 16;
    const uint32_t stages = factors + NORM * 2 + WARPS * KEPT_BYTES + warp * STAGES * STAGE_BYTES, ring = stages + lane * 16;
    auto token_place = [&](int step, int stage) { return KEPT ? kept + step * TOKEN_BYTES : ring + stage * STAGE_BYTES + TOKEN_PLACE; };

    const int num_outputs = GATED ? N / 2 : N, num_tiles = num_outputs / ROWS;
    const int first = static_cast<int>(static_cast<int64_t>(num_tiles) * blockIdx.x / gridDim.x);
    const int end = static_cast<int>(static_cast<int64_t>(num_tiles) * (blockIdx.x + 1) / gridDim.x);
    const int num_k = row_bytes / STEP_BYTES, num_steps = (num_k + WARPS - 1) / WARPS;
    const int turn = blockIdx.x % num_steps;
    auto place_of = [&](int step) {  // where in K this warp's step is, in steps
        const int turned = step + turn;
        return warp + WARPS * (turned < num_steps ? turned : turned - num_steps);
    };
    const size_t second_half = static_cast<size_t>(GATED ? num_outputs : 8) * row_bytes;
    // Of the weights: row `row` of tile `tile`, and the column at which a part of step k begins.
    auto row_of = [&](int tile, int row) { return GATED ? tile * ROWS + row % ROWS + row / ROWS * num_outputs : tile * TILE + row; };
    auto column_of = [&](int k, int part) { return k * STEP + part * row_bytes; };

    auto copy_weights = [&](int tile, int step, int stage) {
        const int k = place_of(step);
        if (tile >= end || k >= num_k) return;
        const uint32_t place = ring + stage * STAGE_BYTES;
        const uint8_t* source = weight + static_cast<size_t>(tile * ROWS + g) * row_bytes + k * STEP_BYTES + t * 16;
#pragma unroll
        for (int r = 0; r < TILES; ++r)
            if (tile + r < end) {
                copy_async(place + 2 * r * HALF, source + static_cast<size_t>(r * ROWS) * row_bytes);
                copy_async(place + (2 * r + 1) * HALF, source + static_cast<size_t>(r * ROWS) * row_bytes + second_half);
            }
        if constexpr (GROUPED)
            if (lane < PARTS * TILE) {
                const size_t group = static_cast<size_t>(column_of(k, lane / TILE) / group_size) * scale_stride;
                const uint32_t word = stages + stage * STAGE_BYTES + lane * 4;
#pragma unroll
                for (int r = 0; r < TILES; ++r)
                    if (tile + r < end) {
                        copy_word_async(word + SCALE_PLACE + r * SCALE_BYTES, scales + group + row_of(tile + r, lane % TILE));
                        if constexpr (ZEROS) copy_word_async(word + ZERO_PLACE + r * SCALE_BYTES, zeros + group + row_of(tile + r, lane % TILE));
                    }
            }
    };
    auto copy_tokens = [&](int tile, int step, int stage) {
        const int k = place_of(step);
        if (tile >= end || k >= num_k || (KEPT && tile != first)) return;
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c)
            if (g + 8 * c < M)
#pragma unroll
                for (int i = 0; i < PIECES; ++i)
                    copy_async(token_place(step, stage) + (c * PIECES + i) * HALF,
                               x + static_cast<size_t>(g + 8 * c) * x_stride + column_of(k, i / VECTORS) + (t * VECTORS + i % VECTORS) * 8);
    };
    auto advance = [&](int& tile, int& step) {
        if (++step == num_steps) step = 0, tile += TILES;
    };

    if constexpr (NORM) {
#pragma unroll 1
        for (int i = threadIdx.x; i < NORM / 8; i += THREADS) copy_async(factors + i * 16, norm_weight + i * 8);
        end_copies();
    }
    int copy_tile = first, copy_step = 0;
#pragma unroll 1
    for (int stage = 0; stage < STAGES; ++stage, advance(copy_tile, copy_step)) {
        copy_weights(copy_tile, copy_step, stage);
        end_copies();
    }
    launch_dependents();
    if (!is_ready) wait_for_earlier();
    copy_tile = first, copy_step = 0;
#pragma unroll 1
    for (int stage = 0; stage < STAGES; ++stage, advance(copy_tile, copy_step)) {
        copy_tokens(copy_tile, copy_step, stage);
        end_copies();
    }

    // What the residual was, asked for now, as it is needed in a hurry at the end.
    Element early{};
    const int num_early = min(TOGETHER, end - first) * ROWS;
    if (residual && threadIdx.x < M * num_early)
        early = __ldcg(residual + static_cast<size_t>(threadIdx.x / num_early) * num_outputs + first * ROWS + threadIdx.x % num_early);

    float own_squares[COLUMNS] = {};
    if constexpr (NORM) {
        await_copies<2 * STAGES>();
        __syncthreads();  // all of norm_weight is here
    }
    int stage = 0;
    float* sums = both_sums;
    for (int tile = first; tile < end; tile += TILES) {
        float acc[TILES][COLUMNS][4] = {}, channel[TILES][2] = {};
        if constexpr (STORED && !GROUPED)
#pragma unroll
            for (int r = 0; r < TILES; ++r)
                if (tile + r < end) channel[r][0] = __ldg(scales + row_of(tile + r, g)), channel[r][1] = __ldg(scales + row_of(tile + r, g + 8));
        for (int step = 0; step < num_steps; ++step) {
            await_copies<STAGES - 1>();
            if constexpr (GROUPED) __syncwarp();  // lanes copy scales for each other
            const uint32_t place = ring + stage * STAGE_BYTES, words = stages + stage * STAGE_BYTES + g * 4;
            uint4 a[TILES][2];
            V b[COLUMNS][PIECES];
            float scale[TILES][PARTS][2], zero[TILES][PARTS][2];
#pragma unroll
            for (int r = 0; r < TILES; ++r) {
                a[r][0] = load_shared(place + 2 * r * HALF), a[r][1] = load_shared(place + (2 * r + 1) * HALF);
                if constexpr (GROUPED)
#pragma unroll
                    for (int i = 0; i < 2 * PARTS; ++i) {
                        const uint32_t word = words + r * SCALE_BYTES + (i / 2 * TILE + i % 2 * 8) * 4;
                        scale[r][i / 2][i % 2] = load_word(word + SCALE_PLACE);
                        if constexpr (ZEROS) zero[r][i / 2][i % 2] = load_word(word + ZERO_PLACE);
                    }
            }
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c)
                if (g + 8 * c < M)
#pragma unroll
                    for (int i = 0; i < PIECES; ++i) b[c][i].bits = load_shared(token_place(step, stage) + (c * PIECES + i) * HALF);
            if constexpr (GROUPED) __syncwarp();
            copy_weights(copy_tile, copy_step, stage);
            copy_tokens(copy_tile, copy_step, stage);
            end_copies();
            advance(copy_tile, copy_step);
            stage = stage + 1 == STAGES ? 0 : stage + 1;
            const int k = place_of(step);
            if (k >= num_k) continue;
            if constexpr (NORM) {
#pragma unroll
                for (int i = 0; i < PIECES; ++i) {
                    const V factor(load_shared(factors + (column_of(k, i / VECTORS) + (t * VECTORS + i % VECTORS) * 8) * 2));
#pragma unroll
                    for (int c = 0; c < COLUMNS; ++c) {
                        if (tile == first) own_squares[c] = add_squares(own_squares[c], b[c][i]);
#pragma unroll
                        for (int e = 0; e < V::SIZE; ++e) b[c][i].values[e] = __hmul(b[c][i].values[e], factor.values[e]);
                    }
                }
            }
#pragma unroll
            for (int r = 0; r < TILES; ++r) {
                if constexpr (!STORED) {
#pragma unroll
                    for (int c = 0; c < COLUMNS; ++c) {
                        multiply(acc[r][c], a[r][0].x, a[r][1].x, a[r][0].y, a[r][1].y, b[c][0].bits.x, b[c][0].bits.y);
                        multiply(acc[r][c], a[r][0].z, a[r][1].z, a[r][0].w, a[r][1].w, b[c][0].bits.z, b[c][0].bits.w);
                    }
                } else {
#pragma unroll
                    for (int part = 0; part < PARTS; ++part) {
                        uint32_t numbers[2][8];
#pragma unroll
                        for (int half = 0; half < 2; ++half)
                            expand(a[r][half], part, ZEROS ? offset_of(zero[r][part][half]) : usual_offset(), numbers[half]);
#pragma unroll
                        for (int c = 0; c < COLUMNS; ++c) {
                            float own[4] = {};
                            float(&target)[4] = GROUPED ? own : acc[r][c];
                            const uint4 low = b[c][part * VECTORS].bits, high = b[c][PIECES > 1 ? part * VECTORS + 1 : 0].bits;
                            multiply(target, numbers[0][0], numbers[1][0], numbers[0][1], numbers[1][1], low.x, high.x);
                            multiply(target, numbers[0][2], numbers[1][2], numbers[0][3], numbers[1][3], low.y, high.y);
                            multiply(target, numbers[0][4], numbers[1][4], numbers[0][5], numbers[1][5], low.z, high.z);
                            multiply(target, numbers[0][6], numbers[1][6], numbers[0][7], numbers[1][7], low.w, high.w);
                            if constexpr (GROUPED)
#pragma unroll
                                for (int i = 0; i < 4; ++i) acc[r][c][i] = __fmaf_rn(own[i], scale[r][part][i / 2], acc[r][c][i]);
                        }
                    }
                }
            }
        }
        if constexpr (STORED)
#pragma unroll
            for (int r = 0; r < TILES; ++r)
#pragma unroll
                for (int c = 0; c < COLUMNS; ++c)
#pragma unroll
                    for (int i = 0; i < 4; ++i) acc[r][c][i] *= GROUPED ? FACTOR : FACTOR * channel[r][i / 2];

#pragma unroll
        for (int begin = 0; begin < TILES; begin += TOGETHER) {
            if (tile + begin >= end) break;
#pragma unroll
            for (int r = 0; r < TOGETHER; ++r)
#pragma unroll
                for (int c = 0; c < COLUMNS; ++c)
#pragma unroll
                    for (int i = 0; i < 4; ++i)
                        if (begin + r < TILES)
                            sums[((warp * TOGETHER + r) * TOKENS + c * 8 + t * 2 + i % 2) * STRIDE + g + i / 2 * 8] = acc[(begin + r) % TILES][c][i];
            if (NORM && tile + begin == first)
#pragma unroll
                for (int c = 0; c < COLUMNS; ++c) {
                    float sum = own_squares[c];
                    sum += __shfl_xor_sync(~0u, sum, 1);
                    sum += __shfl_xor_sync(~0u, sum, 2);
                    if (t == 0) squares[warp][c * 8 + g] = sum;
                }
            __syncthreads();
            auto total = [&](int r, int token, int row, int n) {
                float value = 0;
#pragma unroll
                for (int w = 0; w < WARPS; ++w) value += sums[((w * TOGETHER + r) * TOKENS + token) * STRIDE + row];
                if constexpr (NORM) {
                    float sum = 0;
#pragma unroll
                    for (int w = 0; w < WARPS; ++w) sum += squares[w][token];
                    value *= inverse_rms(sum, NORM, eps);
                }
                return from_float<Element>(bias ? value + to_float(bias[n]) : value);
            };
            const int num_rows = min(TOGETHER, min(TILES - begin, end - tile - begin)) * ROWS;
#pragma unroll 1
            for (int i = threadIdx.x; i < M * num_rows; i += THREADS) {
                const int token = i / num_rows, row = i % num_rows, r = row / ROWS, n = (tile + begin) * ROWS + row;
                Element value;
                if constexpr (GATED) value = gate_mul(total(r, token, row % ROWS, n), total(r, token, row % ROWS + 8, n + num_outputs));
                else value = total(r, token, row % ROWS, n);
                const size_t place = static_cast<size_t>(token) * num_outputs + n;
                if (residual) {
                    const Element old = tile + begin == first && i == threadIdx.x ? early : __ldcg(residual + place);
                    value = from_float<Element>(to_float(old) + to_float(value));
                }
                out[place] = value;
            }
            sums = sums == both_sums ? both_sums + SUMS : both_sums;
        }
    }
    if (is_ready) wait_for_earlier();
}
