// x [M, K] times weights of 8 or 4 bits [N, K] transposed, for few rows of x: bound by how fast the weights come from memory.
//
// As in linear.cu a weight is the A operand of mma.m16n8k16 (16 of its rows a tile), tokens are B's 8 columns, a block owns neighbouring tiles and
// takes TILES of them at a time, over all of K, and step s of K (64 bytes of each row) belongs to warp s % 8, whose threads copy what they will
// multiply to shared memory, many steps ahead and without a barrier. Bytes become numbers of x's type in registers. What shares a scale is
// summed first, then scaled in float32. The eight warps' sums are added in order: the sum for an output is the same whatever M and the timing are.
//
// mma's order of K within a step is free as long as A and B agree: thread t of a quad has bytes 16t..16t+15.
//
// ELEMENT, KIND, ZEROS: see quantized.cuh; TOKENS: most rows of x, a multiple of 8; SHARED: bytes of dynamic shared memory; GROUPED: several scales
// to a row; GATED: weight is gate | up, the output silu(gate) * up.
#include "quantized.cuh"

constexpr int WARPS = 8, THREADS = 32 * WARPS, TILE = 16, STEP = 64, TILES = 2, COLUMNS = TOKENS / 8;
constexpr int ROWS = GATED ? TILE / 2 : TILE;             // of the output, per tile: a gated one has as many rows of gate as of up
constexpr int STRIDE = TILE + 4;                          // of a token's sums in shared memory, apart from each other's banks
constexpr int TOGETHER = TOKENS > 8 ? 1 : 2;              // tiles that are summed at once
constexpr int SUMS = WARPS * TOGETHER * TOKENS * STRIDE;  // twice: one is written while the other is read
constexpr int PIECE = 32 * 16;                            // bytes of half a tile's step, and of half of eight tokens'
constexpr int SCALES = GROUPED ? 2 * TILES * PARTS * (1 + ZEROS) : 0;  // of a thread: scale, and zero, of each half tile and part
constexpr int STAGE_BYTES = (2 * TILES + 2 * COLUMNS * PARTS) * PIECE + SCALES * 32 * 4;  // of one warp: weights, tokens, scales
constexpr int STAGES = (SHARED - 2 * SUMS * 4) / (WARPS * STAGE_BYTES);
static_assert(STAGES >= 2, "shared memory has no room for two stages");

__device__ __forceinline__ void copy_async(uint32_t target, const void* source) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(target), "l"(source) : "memory");
}

__device__ __forceinline__ void copy_word(uint32_t target, const float* source) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(target), "l"(source) : "memory");
}

__device__ __forceinline__ void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int LATER>  // that may still be on their way
__device__ __forceinline__ void await_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(LATER) : "memory"); }

__device__ __forceinline__ uint4 load_shared(uint32_t source) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(source) : "memory");
    return v;
}

__device__ __forceinline__ float load_word(uint32_t source) {
    float v;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(source) : "memory");
    return v;
}

__device__ __forceinline__ void multiply(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
    if constexpr (IS_HALF)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    else
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// out [M, N], or [M, N / 2] gated, may be residual. codes [N, row_bytes]; scales and zeros [N, num_groups]. bias [N] and residual (as out)
// may be null, zeros where not ZEROS. group_size is a multiple of 64, row_bytes too.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    quantized_linear(Element* out, const Element* x, const uint8_t* codes, const float* scales, const float* zeros, const Element* bias,
                     const Element* residual, int M, int N, int row_bytes, int num_groups, int group_size, int x_stride) {
    extern __shared__ __align__(16) float both_sums[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const uint32_t shared = static_cast<uint32_t>(__cvta_generic_to_shared(both_sums));
    const uint32_t ring = shared + 2 * SUMS * 4 + warp * STAGES * STAGE_BYTES;
    constexpr int TOKENS_AT = 2 * TILES * PIECE, SCALES_AT = TOKENS_AT + 2 * COLUMNS * PARTS * PIECE;

    const int num_outputs = GATED ? N / 2 : N, num_tiles = num_outputs / ROWS;
    const int first = static_cast<int>(static_cast<int64_t>(num_tiles) * blockIdx.x / gridDim.x);
    const int end = static_cast<int>(static_cast<int64_t>(num_tiles) * (blockIdx.x + 1) / gridDim.x);
    const int num_k = row_bytes / STEP, num_steps = (num_k + WARPS - 1) / WARPS;
    const int turn = blockIdx.x % num_steps;
    auto place_of = [&](int step) {  // where in K this warp's step is, in steps
        const int turned = step + turn;
        return warp + WARPS * (turned < num_steps ? turned : turned - num_steps);
    };
    const int second_half = GATED ? num_outputs : 8;  // how far its rows are from the first half's

    auto copy_weights = [&](int tile, int step, int stage) {
        const int k = place_of(step);
        if (tile >= end || k >= num_k) return;
        const uint32_t target = ring + stage * STAGE_BYTES;
#pragma unroll
        for (int r = 0; r < TILES; ++r)
            if (tile + r < end)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const size_t row = static_cast<size_t>((tile + r) * ROWS + g + half * second_half);
                    copy_async(target + (2 * r + half) * PIECE + lane * 16, codes + row * row_bytes + k * STEP + t * 16);
                    if constexpr (GROUPED)
#pragma unroll
                        for (int part = 0; part < PARTS; ++part) {
                            const size_t place = row * num_groups + (k * STEP + part * row_bytes) / group_size;
                            const uint32_t own = target + SCALES_AT + ((2 * r + half) * PARTS + part) * (1 + ZEROS) * 128 + lane * 4;
                            copy_word(own, scales + place);
                            if constexpr (ZEROS) copy_word(own + 128, zeros + place);
                        }
                }
    };
    auto copy_tokens = [&](int tile, int step, int stage) {
        const int k = place_of(step);
        if (tile >= end || k >= num_k) return;
        const uint32_t target = ring + stage * STAGE_BYTES + TOKENS_AT + lane * 16;
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c)
            if (g + 8 * c < M)
#pragma unroll
                for (int part = 0; part < PARTS; ++part) {
                    const Element* source = x + static_cast<size_t>(g + 8 * c) * x_stride + k * STEP + part * row_bytes + t * 16;
                    copy_async(target + (2 * (c * PARTS + part)) * PIECE, source);
                    copy_async(target + (2 * (c * PARTS + part) + 1) * PIECE, source + 8);
                }
    };
    auto advance = [&](int& tile, int& step) {
        if (++step == num_steps) step = 0, tile += TILES;
    };

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

    int stage = 0;
    float* sums = both_sums;
    for (int tile = first; tile < end; tile += TILES) {
        float acc[TILES][COLUMNS][4] = {};
        for (int step = 0; step < num_steps; ++step) {
            await_copies<STAGES - 1>();
            const uint32_t place = ring + stage * STAGE_BYTES;
            const int k = place_of(step);
            if (k < num_k) {
                uint4 bytes[TILES][2];
#pragma unroll
                for (int r = 0; r < TILES; ++r)
#pragma unroll
                    for (int half = 0; half < 2; ++half) bytes[r][half] = load_shared(place + (2 * r + half) * PIECE + lane * 16);
#pragma unroll
                for (int part = 0; part < PARTS; ++part) {
                    uint32_t a[TILES][2][8];
                    float scale[TILES][2];
#pragma unroll
                    for (int r = 0; r < TILES; ++r)
#pragma unroll
                        for (int half = 0; half < 2; ++half) {
                            float zero = KIND == 2 ? 8.0f : 0.0f;
                            if constexpr (GROUPED) {
                                const uint32_t own = place + SCALES_AT + ((2 * r + half) * PARTS + part) * (1 + ZEROS) * 128 + lane * 4;
                                scale[r][half] = load_word(own);
                                if constexpr (ZEROS) zero = load_word(own + 128);
                            } else if constexpr (ZEROS) {
                                if (tile + r < end) zero = __ldg(zeros + (tile + r) * ROWS + g + half * second_half);
                            }
                            expand(bytes[r][half], part, offset_of(zero), a[r][half]);
                        }
#pragma unroll
                    for (int c = 0; c < COLUMNS; ++c) {
                        uint4 b[2] = {};
                        if (g + 8 * c < M) {
                            b[0] = load_shared(place + TOKENS_AT + (2 * (c * PARTS + part)) * PIECE + lane * 16);
                            b[1] = load_shared(place + TOKENS_AT + (2 * (c * PARTS + part) + 1) * PIECE + lane * 16);
                        }
                        const uint32_t pairs[8] = {b[0].x, b[0].y, b[0].z, b[0].w, b[1].x, b[1].y, b[1].z, b[1].w};
#pragma unroll
                        for (int r = 0; r < TILES; ++r) {
                            float own[4] = {};
                            float(&target)[4] = GROUPED ? own : acc[r][c];
#pragma unroll
                            for (int i = 0; i < 4; ++i)
                                multiply(target, a[r][0][2 * i], a[r][1][2 * i], a[r][0][2 * i + 1], a[r][1][2 * i + 1], pairs[2 * i],
                                         pairs[2 * i + 1]);
                            if constexpr (GROUPED)
#pragma unroll
                                for (int i = 0; i < 4; ++i) acc[r][c][i] = __fmaf_rn(own[i], scale[r][i / 2], acc[r][c][i]);
                        }
                    }
                }
            }
            copy_weights(copy_tile, copy_step, stage);
            copy_tokens(copy_tile, copy_step, stage);
            end_copies();
            advance(copy_tile, copy_step);
            stage = stage + 1 == STAGES ? 0 : stage + 1;
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
                        sums[((warp * TOGETHER + r) * TOKENS + c * 8 + t * 2 + i % 2) * STRIDE + g + i / 2 * 8] = acc[begin + r][c][i];
            __syncthreads();
            auto total = [&](int r, int token, int row, int n) {
                float value = 0;
#pragma unroll
                for (int w = 0; w < WARPS; ++w) value += sums[((w * TOGETHER + r) * TOKENS + token) * STRIDE + row];
                value *= GROUPED ? FACTOR : FACTOR * __ldg(scales + n);
                return from_float<Element>(bias ? value + to_float(bias[n]) : value);
            };
            const int num_rows = min(TOGETHER, end - tile - begin) * ROWS;
            for (int i = threadIdx.x; i < M * num_rows; i += THREADS) {
                const int token = i / num_rows, row = i % num_rows, r = row / ROWS, n = (tile + begin) * ROWS + row;
                Element value;
                if constexpr (GATED) value = gate_mul(total(r, token, row % ROWS, n), total(r, token, row % ROWS + 8, n + num_outputs));
                else value = total(r, token, row % ROWS, n);
                const size_t place = static_cast<size_t>(token) * num_outputs + n;
                if (residual) value = from_float<Element>(to_float(__ldcg(residual + place)) + to_float(value));
                out[place] = value;
            }
            sums = sums == both_sums ? both_sums + SUMS : both_sums;
        }
    }
}
