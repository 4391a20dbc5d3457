// Products of tokens with the experts that they take, whose weights are stored in 8 or 4 bits: quantized_linear.cu's product, for one chunk of
// pairs after the other (expert_groups.cuh). An output is the same as quantized_linear's, whatever other tokens there are, and however they are chunked.
//
// A unit is a chunk's product with TILES tiles of weights; blocks take units in turn, and ask for the first weights of the next one while they
// sum up the last.
//
// ELEMENT, KIND, ZEROS: see quantized.cuh; TOKENS: most rows of a chunk, a multiple of 8; GROUPED: several scales to a row; GATED: weights are
// gate | up, the output silu(gate) * up; GATHER: rows of x are tokens', those of the output lie in order of the experts, else the other way around:
// rows of x lie in that order, the output's rows are the pairs'.
#include "expert_groups.cuh"
#include "quantized.cuh"
#include "skinny.cuh"

constexpr int WARPS = 8, THREADS = 32 * WARPS, TILE = 16, STEP = 64, COLUMNS = TOKENS / 8, TILES = 2, DEPTH = 2;
constexpr int STRIDE = TILE + 4;                        // of a row's sums in shared memory, apart from each other's banks
constexpr int OUTPUT_TILES = GATED ? TILES / 2 : TILES;  // of a unit

// codes [num_own, N, row_bytes]; scales and zeros [groups, num_own, N], a group scale_stride after the other, zeros null where not ZEROS; x and out: see GATHER; num_chosen: pairs of a
// token. The outputs, N or N / 2 gated, are a multiple of TILE, group_size and row_bytes of STEP.
extern "C" __global__ void __launch_bounds__(THREADS, COLUMNS > 2 ? 1 : 2)
    quantized_expert_linear(Element* out, const Element* x, const uint8_t* codes, const float* scales, const float* zeros, int* lists, int max_chunks,
                            int num_pairs, int num_chosen, int N, int row_bytes, int group_size, int scale_stride, int x_stride) {
    __shared__ float sums[WARPS][TOKENS][STRIDE];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const ExpertLists own(lists, max_chunks, num_pairs);
    wait_for_earlier();
    launch_dependents();
    const int num_outputs = GATED ? N / 2 : N, num_steps = row_bytes / STEP, rounds = (num_steps + WARPS * DEPTH - 1) / (WARPS * DEPTH);
    const int units_per = (num_outputs / TILE + OUTPUT_TILES - 1) / OUTPUT_TILES, num_units = __ldcg(own.num_chunks) * units_per;
    if (static_cast<int>(blockIdx.x) >= num_units) return;

    struct Unit {
        int4 chunk;
        int tile;
    };
    auto unit_at = [&](int number) { return Unit{__ldcg(own.chunks + number / units_per), number % units_per * OUTPUT_TILES}; };
    // Of an expert, tile r: gated ones take turns, a tile of gate and the tile of up that it belongs to.
    auto row_of = [&](int tile, int r) { return GATED ? (tile + r / 2) * TILE + r % 2 * num_outputs : (tile + r) * TILE; };
    auto is_there = [&](int tile, int r) { return (tile + (GATED ? r / 2 : r)) * TILE < num_outputs; };

    uint4 ring[DEPTH][TILES][2];
    auto fetch = [&](const Unit& unit, int step, int place) {
        if (step >= num_steps) return;
#pragma unroll
        for (int r = 0; r < TILES; ++r)
            if (is_there(unit.tile, r)) {
                const size_t row = static_cast<size_t>(unit.chunk.x) * N + row_of(unit.tile, r) + g;
                const uint8_t* source = codes + row * row_bytes + step * STEP + t * 16;
                ring[place][r][0] = __ldcs(reinterpret_cast<const uint4*>(source));
                ring[place][r][1] = __ldcs(reinterpret_cast<const uint4*>(source + static_cast<size_t>(8) * row_bytes));
            }
    };
    auto find_rows = [&](const int4& chunk, int (&rows)[COLUMNS]) {
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) {
            const int place = chunk.y + g + 8 * c;
            if (g + 8 * c < chunk.z) rows[c] = GATHER ? __ldcg(own.rows + place) / num_chosen : place;
        }
    };

    int number = blockIdx.x, rows[COLUMNS] = {};
    Unit unit = unit_at(number);
#pragma unroll
    for (int place = 0; place < DEPTH; ++place) fetch(unit, warp + place * WARPS, place);
    find_rows(unit.chunk, rows);
    while (true) {
        number += gridDim.x;
        const bool is_last = number >= num_units;
        const Unit next = is_last ? unit : unit_at(number);
        const size_t first_row = static_cast<size_t>(unit.chunk.x) * N;
        float acc[TILES][COLUMNS][4] = {};
        for (int round = 0; round < rounds; ++round) {
#pragma unroll
            for (int place = 0; place < DEPTH; ++place) {
                const int step = warp + (round * DEPTH + place) * WARPS;
                if (step < num_steps) {
#pragma unroll
                    for (int part = 0; part < PARTS; ++part) {
                        const int column = step * STEP + part * row_bytes, group = GROUPED ? column / group_size : 0;
                        uint32_t a[TILES][2][8];
                        float scale[TILES][2];
#pragma unroll
                        for (int r = 0; r < TILES; ++r) {
                            if (!is_there(unit.tile, r)) continue;
#pragma unroll
                            for (int half = 0; half < 2; ++half) {
                                const size_t place_of_group = static_cast<size_t>(group) * scale_stride + first_row + row_of(unit.tile, r) + g + half * 8;
                                scale[r][half] = GROUPED ? __ldg(scales + place_of_group) : 1.0f;
                                expand(ring[place][r][half], part, ZEROS ? offset_of(__ldg(zeros + place_of_group)) : usual_offset(), a[r][half]);
                            }
                        }
#pragma unroll
                        for (int c = 0; c < COLUMNS; ++c) {
                            uint4 b[2] = {};
                            if (g + 8 * c < unit.chunk.z) {
                                const uint4* source = reinterpret_cast<const uint4*>(x + static_cast<size_t>(rows[c]) * x_stride + column + t * 16);
                                b[0] = __ldcg(source), b[1] = __ldcg(source + 1);
                            }
                            const uint32_t pairs[8] = {b[0].x, b[1].x, b[0].y, b[1].y, b[0].z, b[1].z, b[0].w, b[1].w};
#pragma unroll
                            for (int r = 0; r < TILES; ++r) {
                                if (!is_there(unit.tile, r)) continue;
                                float part_sums[4] = {};
                                float(&target)[4] = GROUPED ? part_sums : acc[r][c];
#pragma unroll
                                for (int i = 0; i < 4; ++i)
                                    multiply(target, a[r][0][2 * i], a[r][1][2 * i], a[r][0][2 * i + 1], a[r][1][2 * i + 1], pairs[2 * i], pairs[2 * i + 1]);
                                if constexpr (GROUPED)
#pragma unroll
                                    for (int i = 0; i < 4; ++i) acc[r][c][i] = __fmaf_rn(part_sums[i], scale[r][i / 2], acc[r][c][i]);
                            }
                        }
                    }
                }
                if (round + 1 < rounds) fetch(unit, step + DEPTH * WARPS, place);
                else if (!is_last) fetch(next, warp + place * WARPS, place);
            }
        }
        if (!is_last) find_rows(next.chunk, rows);

        Element gate[GATED ? (TOKENS * TILE + THREADS - 1) / THREADS : 1];
#pragma unroll
        for (int r = 0; r < TILES; ++r) {
            if (!is_there(unit.tile, r)) break;
            __syncthreads();
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c)
#pragma unroll
                for (int i = 0; i < 4; ++i) sums[warp][c * 8 + t * 2 + i % 2][g + i / 2 * 8] = acc[r][c][i];
            __syncthreads();
#pragma unroll
            for (int turn = 0; turn < (TOKENS * TILE + THREADS - 1) / THREADS; ++turn) {
                const int i = turn * THREADS + threadIdx.x, row = i / TILE, n = row_of(unit.tile, r) + i % TILE;
                if (row >= unit.chunk.z) continue;
                float value = 0;
#pragma unroll
                for (int w = 0; w < WARPS; ++w) value += sums[w][row][i % TILE];
                value *= GROUPED ? FACTOR : FACTOR * __ldg(scales + first_row + n);
                Element rounded = from_float<Element>(value);
                if constexpr (GATED) {
                    if (r % 2 == 0) {
                        gate[turn] = rounded;
                        continue;
                    }
                    rounded = gate_mul(gate[turn], rounded);
                }
                const int place = unit.chunk.y + row, target = GATHER ? place : __ldcg(own.rows + place);
                out[static_cast<size_t>(target) * num_outputs + (GATED ? n - num_outputs : n)] = rounded;
            }
        }
        if (is_last) return;
        unit = next;
    }
}
