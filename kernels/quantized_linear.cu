// x [M, K] times weights of 8 or 4 bits [N, K] transposed, for few rows of x: bound by how fast the weights come from memory.
//
// A weight is the A operand of mma.m16n8k16 (16 of its rows a tile), tokens are B's 8 columns. A block takes TILES tiles over all of K: step s
// (64 bytes of each row) belongs to warp s % 8, whose threads hold the bytes of DEPTH steps in registers while they come. Bytes become numbers
// of x's type in registers. What shares a scale is summed first, then scaled in float32.
// The eight warps' sums are added in order, so the sum for an output is the same whatever M and TILES are.
//
// mma's order of K within a step is free as long as A and B agree: thread t of a quad has bytes 16t..16t+15.
//
// ELEMENT, KIND, ZEROS: see quantized.cuh; TOKENS: most rows of x, a multiple of 8; TILES; DEPTH; GROUPED: several scales to a row; GATED: weight is
// gate | up, the output silu(gate) * up.
#include "quantized.cuh"
#include "skinny.cuh"

constexpr int WARPS = 8, THREADS = 32 * WARPS, TILE = 16, STEP = 64, COLUMNS = TOKENS / 8;
constexpr int STRIDE = TILE + 4;  // of a token's sums in shared memory, apart from each other's banks

// out [M, N], or [M, N / 2] gated, may be residual. codes [N, row_bytes]; scales and zeros [N, num_groups]. bias [N] and residual (as out)
// may be null, zeros where not ZEROS. group_size is a multiple of 64, row_bytes too.
extern "C" __global__ void __launch_bounds__(THREADS, COLUMNS > 2 ? 1 : 2)
    quantized_linear(Element* out, const Element* x, const uint8_t* codes, const float* scales, const float* zeros, const Element* bias,
                     const Element* residual, int M, int N, int row_bytes, int num_groups, int group_size, int x_stride) {
    __shared__ float sums[WARPS][TOKENS][STRIDE];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int num_outputs = GATED ? N / 2 : N, num_steps = row_bytes / STEP;
    // Of tile r: gated ones take turns, a tile of gate and the tile of up that it belongs to.
    auto row_of = [&](int r) {
        return GATED ? (static_cast<int>(blockIdx.x) * (TILES / 2) + r / 2) * TILE + r % 2 * num_outputs
                     : (static_cast<int>(blockIdx.x) * TILES + r) * TILE;
    };
    auto is_there = [&](int r) { return row_of(GATED ? r & ~1 : r) < num_outputs; };

    uint4 ring[DEPTH][TILES][2];
    auto fetch = [&](int step, int place) {
        if (step >= num_steps) return;
#pragma unroll
        for (int r = 0; r < TILES; ++r)
            if (is_there(r)) {
                const uint8_t* source = codes + static_cast<size_t>(row_of(r) + g) * row_bytes + step * STEP + t * 16;
                ring[place][r][0] = __ldcs(reinterpret_cast<const uint4*>(source));
                ring[place][r][1] = __ldcs(reinterpret_cast<const uint4*>(source + static_cast<size_t>(8) * row_bytes));
            }
    };

    float acc[TILES][COLUMNS][4] = {};
#pragma unroll
    for (int place = 0; place < DEPTH; ++place) fetch(warp + place * WARPS, place);
    for (int first = warp; first < num_steps; first += DEPTH * WARPS) {
#pragma unroll
        for (int place = 0; place < DEPTH; ++place) {
            const int step = first + place * WARPS;
            if (step >= num_steps) break;
#pragma unroll
            for (int part = 0; part < PARTS; ++part) {
                const int column = step * STEP + part * row_bytes, group = GROUPED ? column / group_size : 0;
                uint32_t a[TILES][2][8];
                float scale[TILES][2];
#pragma unroll
                for (int r = 0; r < TILES; ++r) {
                    if (!is_there(r)) continue;
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        const size_t place_of_group = static_cast<size_t>(row_of(r) + g + half * 8) * num_groups + group;
                        scale[r][half] = GROUPED ? __ldg(scales + place_of_group) : 1.0f;
                        expand(ring[place][r][half], part, zero_of(zeros, place_of_group), a[r][half]);
                    }
                }
#pragma unroll
                for (int c = 0; c < COLUMNS; ++c) {
                    uint4 b[2] = {};
                    if (g + 8 * c < M) {
                        const uint4* source = reinterpret_cast<const uint4*>(x + static_cast<size_t>(g + 8 * c) * x_stride + column + t * 16);
                        b[0] = __ldg(source), b[1] = __ldg(source + 1);
                    }
                    const uint32_t pairs[8] = {b[0].x, b[0].y, b[0].z, b[0].w, b[1].x, b[1].y, b[1].z, b[1].w};
#pragma unroll
                    for (int r = 0; r < TILES; ++r) {
                        if (!is_there(r)) continue;
                        float own[4] = {};
                        float(&target)[4] = GROUPED ? own : acc[r][c];
#pragma unroll
                        for (int i = 0; i < 4; ++i)
                            multiply(target, a[r][0][2 * i], a[r][1][2 * i], a[r][0][2 * i + 1], a[r][1][2 * i + 1], pairs[2 * i], pairs[2 * i + 1]);
                        if constexpr (GROUPED)
#pragma unroll
                            for (int i = 0; i < 4; ++i) acc[r][c][i] = __fmaf_rn(own[i], scale[r][i / 2], acc[r][c][i]);
                    }
                }
            }
            fetch(step + DEPTH * WARPS, place);
        }
    }

    Element gate[GATED ? (TOKENS * TILE + THREADS - 1) / THREADS : 1];
#pragma unroll
    for (int r = 0; r < TILES; ++r) {
        if (!is_there(r)) break;
        __syncthreads();
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c)
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[warp][c * 8 + t * 2 + i % 2][g + i / 2 * 8] = acc[r][c][i];
        __syncthreads();
#pragma unroll
        for (int turn = 0; turn < (TOKENS * TILE + THREADS - 1) / THREADS; ++turn) {
            const int i = turn * THREADS + threadIdx.x, token = i / TILE, row = i % TILE, n = row_of(r) + row;
            if (token >= M) continue;
            float value = 0;
#pragma unroll
            for (int w = 0; w < WARPS; ++w) value += sums[w][token][row];
            value *= GROUPED ? FACTOR : FACTOR * __ldg(scales + n);
            Element rounded = from_float<Element>(bias ? value + to_float(bias[n]) : value);
            if constexpr (GATED) {
                if (r % 2 == 0) {
                    gate[turn] = rounded;
                    continue;
                }
                rounded = gate_mul(gate[turn], rounded);
            }
            const size_t place = static_cast<size_t>(token) * num_outputs + (GATED ? n - num_outputs : n);
            if (residual) rounded = from_float<Element>(to_float(residual[place]) + to_float(rounded));
            out[place] = rounded;
        }
    }
}
