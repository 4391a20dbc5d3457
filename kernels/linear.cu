// x [M, K] times weight [N, K] transposed, for few rows of x: bound by how fast the weights come from memory.
//
// A weight is the A operand of mma.m16n8k16 (16 of its rows a tile), tokens are B's 8 columns. A block owns neighbouring tiles and takes
// TILES of them at a time, over all of K: step s of K (32 elements) belongs to warp s % 8, whose threads copy the very fragments that they
// will multiply to shared memory, many steps ahead and without a barrier. Blocks begin at different places of K, lest all ask the L2 cache
// for the same part of x at once. The eight warps' sums are added in order. So the sum for an output is the same whatever M and the timing are.
//
// mma's order of K within a step is free as long as A and B agree: thread t of a quad has elements 8t..8t+7, one 16-byte load.
//
// The first copies begin before the kernel ahead in the stream has ended: weights never change.
//
// ELEMENT: __nv_bfloat16 or __half; TOKENS: most rows of x, a multiple of 8; TILES; SHARED: bytes of dynamic shared memory;
// NORM: 0, or K when rows of x are to be normalised (RMS): x times norm_weight is multiplied, and the sums are divided by the row's root mean
// square, which is known at the end and so delays nothing; GATED: weight is gate | up, the output silu(gate) * up.
#include "skinny.cuh"

constexpr int WARPS = 8, THREADS = 32 * WARPS, STEP = 32, TILE = 16, COLUMNS = TOKENS / 8;
constexpr int ROWS = GATED ? TILE / 2 : TILE;  // of the output, per tile: a gated one has as many rows of gate as of up
constexpr int STRIDE = TILE + 4;               // of a token's sums in shared memory, apart from each other's banks
constexpr int TOGETHER = TILES < 2 ? TILES : 2;  // tiles that are summed at once
constexpr int SUMS = WARPS * TOGETHER * TOKENS * STRIDE;  // twice: one is written while the other is read
constexpr int HALF = 32 * 16;                                   // bytes of half a tile's step, and of eight tokens'
constexpr int STAGE_BYTES = (2 * TILES + COLUMNS) * HALF;       // of one warp: weights, then tokens
constexpr int STAGES = (SHARED - 2 * SUMS * 4 - NORM * 2) / (WARPS * STAGE_BYTES);
static_assert(STAGES >= 2, "shared memory has no room for two stages");

// out [M, N], or [M, N / 2] gated, may be residual. bias [N] and residual (as out) may be null; norm_weight [K] is read where NORM.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    linear(Element* out, const Element* x, const Element* weight, const Element* bias, const Element* residual, const Element* norm_weight,
           int M, int N, int K, int x_stride, float eps) {
    extern __shared__ __align__(16) float both_sums[];
    __shared__ float squares[WARPS][TOKENS];  // of x, by who read them
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const uint32_t shared = static_cast<uint32_t>(__cvta_generic_to_shared(both_sums));
    const uint32_t scales = shared + 2 * SUMS * 4, ring = scales + NORM * 2 + warp * STAGES * STAGE_BYTES + lane * 16;

    const int num_outputs = GATED ? N / 2 : N, num_tiles = num_outputs / ROWS;
    const int first = static_cast<int>(static_cast<int64_t>(num_tiles) * blockIdx.x / gridDim.x);
    const int end = static_cast<int>(static_cast<int64_t>(num_tiles) * (blockIdx.x + 1) / gridDim.x);
    const int num_k = K / STEP, num_steps = (num_k + WARPS - 1) / WARPS;
    const int turn = blockIdx.x % num_steps;
    auto place_of = [&](int step) {  // where in K this warp's step is, in steps
        const int turned = step + turn;
        return warp + WARPS * (turned < num_steps ? turned : turned - num_steps);
    };
    const size_t second_half = static_cast<size_t>(GATED ? num_outputs : 8) * K;

    auto copy_weights = [&](int tile, int step, int stage) {
        const int k = place_of(step);
        if (tile >= end || k >= num_k) return;
        const Element* source = weight + static_cast<size_t>(tile * ROWS + g) * K + k * STEP + t * 8;
#pragma unroll
        for (int r = 0; r < TILES; ++r)
            if (tile + r < end) {
                copy_async(ring + stage * STAGE_BYTES + 2 * r * HALF, source + static_cast<size_t>(r * ROWS) * K);
                copy_async(ring + stage * STAGE_BYTES + (2 * r + 1) * HALF, source + static_cast<size_t>(r * ROWS) * K + second_half);
            }
    };
    auto copy_tokens = [&](int tile, int step, int stage) {
        const int k = place_of(step);
        if (tile >= end || k >= num_k) return;
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c)
            if (g + 8 * c < M)
                copy_async(ring + stage * STAGE_BYTES + (2 * TILES + c) * HALF, x + static_cast<size_t>(g + 8 * c) * x_stride + k * STEP + t * 8);
    };
    auto advance = [&](int& tile, int& step) {
        if (++step == num_steps) step = 0, tile += TILES;
    };

    if constexpr (NORM) {
        for (int i = threadIdx.x; i < NORM / 8; i += THREADS) copy_async(scales + i * 16, norm_weight + i * 8);
        end_copies();
    }
    int copy_tile = first, copy_step = 0;
    for (int stage = 0; stage < STAGES; ++stage, advance(copy_tile, copy_step)) {
        copy_weights(copy_tile, copy_step, stage);
        end_copies();
    }
    launch_dependents();
    wait_for_earlier();
    copy_tile = first, copy_step = 0;
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
        float acc[TILES][COLUMNS][4] = {};
        for (int step = 0; step < num_steps; ++step) {
            await_copies<STAGES - 1>();
            const uint32_t place = ring + stage * STAGE_BYTES;
            uint4 a[TILES][2];
            V b[COLUMNS];
#pragma unroll
            for (int r = 0; r < TILES; ++r) a[r][0] = load_shared(place + 2 * r * HALF), a[r][1] = load_shared(place + (2 * r + 1) * HALF);
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c)
                if (g + 8 * c < M) b[c].bits = load_shared(place + (2 * TILES + c) * HALF);
            copy_weights(copy_tile, copy_step, stage);
            copy_tokens(copy_tile, copy_step, stage);
            end_copies();
            advance(copy_tile, copy_step);
            stage = stage + 1 == STAGES ? 0 : stage + 1;
            const int k = place_of(step);
            if (k >= num_k) continue;
            if constexpr (NORM) {
                const V factor(load_shared(scales + (k * STEP + t * 8) * 2));
#pragma unroll
                for (int c = 0; c < COLUMNS; ++c) {
                    if (tile == first) own_squares[c] = add_squares(own_squares[c], b[c]);
#pragma unroll
                    for (int e = 0; e < V::SIZE; ++e) b[c].values[e] = __hmul(b[c].values[e], factor.values[e]);
                }
            }
#pragma unroll
            for (int r = 0; r < TILES; ++r)
#pragma unroll
                for (int c = 0; c < COLUMNS; ++c) {
                    multiply(acc[r][c], a[r][0].x, a[r][1].x, a[r][0].y, a[r][1].y, b[c].bits.x, b[c].bits.y);
                    multiply(acc[r][c], a[r][0].z, a[r][1].z, a[r][0].w, a[r][1].w, b[c].bits.z, b[c].bits.w);
                }
        }

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
}
