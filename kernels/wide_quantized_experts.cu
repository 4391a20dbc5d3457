// Products of tokens with the experts that they take, whose weights are stored in 8 or 4 bits, at the speed of the stored bytes.
//
// A tile is 16 rows of an expert's weights for each of a block's warps but the last, whose mma operands are made of the stored bytes in registers; the rows
// of a chunk (see expert_groups.cuh) are its columns. The last warp copies to shared memory: the weights (bulk tensor copies), their scales and zeros, and
// the chunk's rows, which lie anywhere. As many stages are under way as have room beside the rows of the largest chunk. A warp has all of K for its rows, so
// that warps never wait for each other, and many of them hide what each waits for. Blocks share all chunks' tiles evenly, neighbouring ones to a block.
// What shares a scale is summed first, then scaled in float32, in order of K: an output is the same whatever other tokens there are, and however they
// are chunked.
//
// Like wide_experts.cu's blocks these let the next kernel's in when their last copies are on their way.
//
// ELEMENT, KIND, ZEROS: see quantized.cuh; GROUPED: scales are of group_size columns each, or there are zeros; SPAN: units that share a scale; UNITS: of 64
// bytes of a row (and as many columns of each part) in a stage, 1 or 2; ROWS: most rows of a chunk, 8, 16 or 32; WARPS: of a tile; BLOCKS: to a
// multiprocessor; GATED: weights are gate | up, the output silu(gate) * up, and a tile has as many rows of either; GATHER: rows of x are tokens', those of
// the output lie in order of the experts, else the other way around; SHARED: bytes of dynamic shared memory.
#include "expert_groups.cuh"
#include "quantized.cuh"
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#include "mma.cuh"
#include "pipeline.cuh"

constexpr int UNIT = 64, STEP = UNITS * UNIT, TILE = 16 * WARPS, SIDES = GATED ? 2 : 1, OUTPUTS = TILE / SIDES, THREADS = 32 * WARPS + 32;
constexpr int SPANS = UNITS / SPAN * PARTS, SCALES = GROUPED ? SPANS * (ZEROS ? 2 : 1) : 0;  // of a stage: what has scales of its own; lines of scales and zeros
// Bytes of a stage: codes, lines of LINE bytes swizzled; a line of scales; a row of x, of each part's columns, apart from the other rows' banks.
constexpr int LINE = STEP, CODE_BYTES = TILE * STEP, SCALE_BYTES = TILE * 4, X_COLUMNS = STEP * 2, PITCH = X_COLUMNS + 16;
constexpr int rest_of(int rows) { return SCALES * SCALE_BYTES + PARTS * rows * PITCH; }
constexpr int ROOM = SHARED - 1024, LEAST_ROWS = ROWS < 16 ? ROWS : 16, MAX_STAGES = ROOM / (CODE_BYTES + rest_of(LEAST_ROWS));
constexpr int SLOTS = 8;  // chunks of a block that are looked up at once
static_assert(ROOM / (CODE_BYTES + rest_of(ROWS)) >= 2, "shared memory has no room for two stages");
static_assert(ROWS == 8 || ROWS == 16 || ROWS == 32, "numbers of columns that are known");
static_assert(CODE_BYTES % 1024 == 0 && UNITS % SPAN == 0, "swizzled lines; whole spans");

// Adds to c what part `part` of 64 stored bytes of sixteen rows makes of the columns that belong to it. words: the bytes as load_fragments has them, of
// both halves of 32; offsets: of the thread's two rows, as `expand` takes them; x: the lane's place in the first eight rows of x, which are `pitch` bytes apart:
// row lane % 8, its 16 bytes number lane / 8.
template <int COUNT>
__device__ __forceinline__ void add_unit(float (&c)[COUNT][4], const uint32_t (&words)[2][4], int part, const uint32_t (&offsets)[2], uint32_t x, int pitch) {
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
        uint32_t a[2][4];
#pragma unroll
        for (int k = 0; k < 2; ++k)
#pragma unroll
            for (int i = 0; i < 2; ++i) expand(digits_of(words[pair][k * 2 + i], part), offsets[i], a[k][i], a[k][2 + i]);
#pragma unroll
        for (int block = 0; block < COUNT; ++block) {
            uint32_t b[4];
            load_fragments(x + block * 8 * pitch + pair * 64, b);
            multiply(c[block], a[0][0], a[0][1], a[0][2], a[0][3], b[0], b[1]);
            multiply(c[block], a[1][0], a[1][1], a[1][2], a[1][3], b[2], b[3]);
        }
    }
}

template <int N> struct Count { static constexpr int value = N; };

// Grid: as many blocks as run at a time. codes: of all experts, one below the other, in lines of LINE bytes; scales and zeros [groups, num_own N], a group
// scale_stride after the other, group_size a multiple of 64 SPAN; N is a multiple of 16, of 32 where gated.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    wide_quantized_experts(const __grid_constant__ CUtensorMap codes, Element* out, const Element* x, const float* scales, const float* zeros, int* lists,
                           int max_chunks, int num_pairs, int num_chosen, int N, int row_bytes, int group_size, int scale_stride, int x_stride) {
    extern __shared__ unsigned char dynamic_memory[];
    __shared__ __align__(8) uint64_t barriers[2 * MAX_STAGES];
    __shared__ int4 slots[SLOTS];
    const uint32_t stages = (uint32_t(__cvta_generic_to_shared(dynamic_memory)) + 1023) & ~1023u;
    const uint32_t full = uint32_t(__cvta_generic_to_shared(barriers)), empty = full + 8 * MAX_STAGES;
    const int num_outputs = N / SIDES, num_tiles = (num_outputs + OUTPUTS - 1) / OUTPUTS, num_steps = row_bytes / STEP;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const ExpertLists own(lists, max_chunks, num_pairs);
    if (threadIdx.x == 0) {
        prefetch(&codes);
#pragma unroll 1
        for (int s = 0; s < MAX_STAGES; ++s) init_barrier(full + 8 * s, 1 + 32), init_barrier(empty + 8 * s, WARPS);
        publish_barriers();
    }
    // The chunks are older than the kernel ahead where rows of x are what that one makes.
    if (GATHER) wait_for_earlier();
    const int4 early = __ldcg(own.chunks + min(int(threadIdx.x), max_chunks - 1));  // along with their number, lest they come one after the other
    const Share share(__ldcg(own.num_chunks) * num_tiles);
    const int first = share.first, end = share.end, first_chunk = first / num_tiles;
    const int own_slot = int(threadIdx.x) - first_chunk;
    if (own_slot >= 0 && own_slot < SLOTS && int(threadIdx.x) < max_chunks) slots[own_slot] = early;
    __syncthreads();
    if (first == end) {
        launch_dependents();
        if (!GATHER) wait_for_earlier();
        return;
    }
    const auto chunk_of = [&](int unit) {
        const int number = unit / num_tiles;
        return number < THREADS && number < first_chunk + SLOTS ? slots[number - first_chunk] : __ldcg(own.chunks + number);
    };
    const int most_rows = ROWS <= 16 ? ROWS : chunk_of(first).w;  // the same in all chunks
    const int rest_bytes = rest_of(most_rows), num_stages = most_rows == LEAST_ROWS ? MAX_STAGES : ROOM / (CODE_BYTES + rest_bytes);
    const uint32_t rests = stages + num_stages * CODE_BYTES;  // of a stage scales, zeros, rows of x

    if (warp == WARPS) {
        int4 chunk = chunk_of(first);
        // All but weights in pieces of 16 bytes: a bulk copy for each line of scales, and row of x, would take longer than the weights.
        const auto copy_weights = [&](int stage, int unit, int step) {
            const uint32_t place = stages + stage * CODE_BYTES, barrier = full + 8 * stage;
            const int row = unit % num_tiles * OUTPUTS, first_row = chunk.x * N + row;
            if (lane == 0) {
                arrive_expecting(barrier, CODE_BYTES);
                copy_block(place, &codes, barrier, first_row, step);
                if constexpr (GATED) copy_block(place + CODE_BYTES / 2, &codes, barrier, first_row + num_outputs, step);
            }
            constexpr int EACH = SCALE_BYTES / 16;
#pragma unroll
            for (int i = 0; i < (SCALES * EACH + 31) / 32; ++i) {
                const int piece = lane + 32 * i, line = piece / EACH, span = line % SPANS, own_row = piece % EACH * 4;
                const int side = own_row / OUTPUTS, column = step * STEP + span / PARTS * SPAN * UNIT + span % PARTS * row_bytes;
                if (line >= SCALES || row + own_row % OUTPUTS >= num_outputs) continue;
                const float* source = (line < SPANS ? scales : zeros) + size_t(column / group_size) * scale_stride + first_row + side * num_outputs + own_row % OUTPUTS;
                copy_piece(rests + stage * rest_bytes + piece * 16, source);
            }
        };
        const int num_early = min(num_stages, num_steps);
#pragma unroll 1
        for (int s = 0; s < num_early; ++s) copy_weights(s, first, s);
        if (!GATHER) wait_for_earlier();
        constexpr int PIECES = X_COLUMNS / 16, AT_ONCE = 32 / PIECES;
        const int slot = lane / PIECES, piece = lane % PIECES;
        const Element* sources[ROWS / AT_ONCE];
        int stage = 0, parity = 1, num_copied = 0;  // parity: of `empty`, as it was before
#pragma unroll 1
        for (int unit = first; unit < end; ++unit) {
            if (unit == first || unit % num_tiles == 0) {
                chunk = chunk_of(unit);
#pragma unroll
                for (int i = 0; i < ROWS / AT_ONCE; ++i) {
                    const int place = chunk.y + slot + i * AT_ONCE;
                    sources[i] = slot + i * AT_ONCE < chunk.z ? x + size_t(GATHER ? __ldcg(own.rows + place) / num_chosen : place) * x_stride + piece * 8 : nullptr;
                }
            }
#pragma unroll 1
            for (int step = 0; step < num_steps; ++step) {
                await(empty + 8 * stage, parity);
                if (num_copied++ >= num_early) copy_weights(stage, unit, step);
                const uint32_t place = rests + stage * rest_bytes + SCALES * SCALE_BYTES + slot * PITCH + piece * 16;
#pragma unroll
                for (int i = 0; i < ROWS / AT_ONCE; ++i)
                    if (sources[i])
#pragma unroll
                        for (int part = 0; part < PARTS; ++part)
                            copy_piece(place + (part * most_rows + i * AT_ONCE) * PITCH, sources[i] + part * row_bytes + step * STEP);
                arrive_when_copied(full + 8 * stage);
                if (++stage == num_stages) stage = 0, parity ^= 1;
            }
        }
        launch_dependents();
        return;
    }

    if (!GATHER) wait_for_earlier();
    // Of the tile, the rows whose sums a thread has. Of a gated one the first is gate's and the second is up's for the same output.
    const int g = lane / 4, t = lane % 4, rows[2] = {GATED ? warp * 8 + g : warp * 16 + g, GATED ? OUTPUTS + warp * 8 + g : warp * 16 + 8 + g};
    // What a lane loads of a unit's codes: eight rows of 16 bytes, the first rows' and the second's, of two neighbouring pieces.
    const int read_row = (GATED ? warp * 8 : warp * 16 + lane / 8 % 2 * 8) + lane % 8, read_start = (GATED ? lane / 8 % 2 * (CODE_BYTES / 2) : 0) + read_row * LINE;
    const int read_swizzle = LINE == 128 ? read_row % 8 : read_row / 2 % 4;
    int stage = 0, parity = 0;
    const auto process = [&](auto columns, int tile, int4 chunk) {
        constexpr int BLOCKS_OF_8 = decltype(columns)::value / 8;
        float channel[2] = {1.0f, 1.0f};
        if constexpr (!GROUPED) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int row = tile * OUTPUTS + rows[GATED ? 0 : i];
                if (row < num_outputs) channel[i] = __ldg(scales + size_t(chunk.x) * N + row + (GATED ? i * num_outputs : 0));
            }
        }
        float sums[BLOCKS_OF_8][4] = {};
#pragma unroll 1
        for (int step = 0; step < num_steps; ++step) {
            await(full + 8 * stage, parity);
            const uint32_t place = stages + stage * CODE_BYTES + read_start, rest = rests + stage * rest_bytes;
            const uint32_t x_place = rest + SCALES * SCALE_BYTES + lane % 8 * PITCH + lane / 8 * 16;
            uint32_t words[SPAN][2][4];
#pragma unroll
            for (int span = 0; span < SPANS; ++span) {
                const int first_unit = span / PARTS * SPAN, part = span % PARTS;
                if (part == 0) {
#pragma unroll
                    for (int u = 0; u < SPAN; ++u)
#pragma unroll
                        for (int pair = 0; pair < 2; ++pair)
                            load_fragments(place + ((((first_unit + u) * 4 + pair * 2 + lane / 16) ^ read_swizzle) << 4), words[u][pair]);
                }
                uint32_t offsets[2] = {usual_offset(), usual_offset()};
                if constexpr (ZEROS) {
#pragma unroll
                    for (int i = 0; i < 2; ++i) offsets[i] = offset_of(load_word(rest + (SPANS + span) * SCALE_BYTES + rows[i] * 4));
                }
                float part_sums[BLOCKS_OF_8][4] = {};
#pragma unroll
                for (int u = 0; u < SPAN; ++u) {
                    const uint32_t columns = x_place + part * most_rows * PITCH + (first_unit + u) * UNIT * 2;
                    if constexpr (GROUPED) add_unit(part_sums, words[u], part, offsets, columns, PITCH);
                    else add_unit(sums, words[u], part, offsets, columns, PITCH);
                }
                if constexpr (GROUPED) {
                    const float scale[2] = {load_word(rest + span * SCALE_BYTES + rows[0] * 4), load_word(rest + span * SCALE_BYTES + rows[1] * 4)};
#pragma unroll
                    for (int block = 0; block < BLOCKS_OF_8; ++block)
#pragma unroll
                        for (int i = 0; i < 4; ++i) sums[block][i] = __fmaf_rn(part_sums[block][i], scale[i / 2], sums[block][i]);
                }
            }
            __syncwarp();
            if (lane == 0) arrive(empty + 8 * stage);
            if (++stage == num_stages) stage = 0, parity ^= 1;
        }
        const auto round = [&](float v, int i) { return from_float<Element>(v * FACTOR * channel[i]); };
#pragma unroll
        for (int i = 0; i < BLOCKS_OF_8 * 2; ++i) {
            const int row = i / 2 * 8 + t * 2 + i % 2;
            if (row >= chunk.z) continue;
            Element* target = out + size_t(GATHER ? chunk.y + row : __ldcg(own.rows + chunk.y + row)) * num_outputs;
            const Element low = round(sums[i / 2][i % 2], 0), high = round(sums[i / 2][2 + i % 2], 1);
            const int output = tile * OUTPUTS + rows[0];
            if constexpr (GATED) {
                if (output < num_outputs) target[output] = gate_mul(low, high);
            } else {
                if (output < num_outputs) target[output] = low;
                if (output + 8 < num_outputs) target[output + 8] = high;
            }
        }
    };
#pragma unroll 1
    for (int unit = first; unit < end; ++unit) {
        const int4 chunk = chunk_of(unit);
        const int tile = unit % num_tiles;
        if (ROWS <= 8 || chunk.z <= 8) process(Count<8>(), tile, chunk);
        else if (ROWS <= 16 || chunk.z <= 16) process(Count<(ROWS < 16 ? 8 : 16)>(), tile, chunk);
        else process(Count<ROWS>(), tile, chunk);
    }
}
#endif
