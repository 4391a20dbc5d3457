// Products of tokens with the experts that they take, few rows to an expert: bound by how fast the weights of the experts that are hit
// come from memory.
//
// group_rows sorts the (token, expert) pairs by expert and cuts each expert's into chunks of few rows. expert_linear is linear.cu's
// product for one chunk after the other: its blocks share all chunks' tiles evenly, so that none waits for an expert that many tokens take.
// combine_experts adds up what a token's experts made. An output is the same whatever other tokens there are, and however they are chunked.
//
// ELEMENT: __nv_bfloat16 or __half; TOKENS: most rows of a chunk, a multiple of 8; TILES; SHARED: bytes of
// dynamic shared memory; GATED: weights are gate | up, the output silu(gate) * up; GATHER: rows of x are tokens', those of the output lie in
// order of the experts, else the other way around: rows of x lie in that order, the output's rows are the pairs'; SLOTS: most chunks of a block.
#include "expert_groups.cuh"
#include "skinny.cuh"

constexpr int WARPS = 8, THREADS = 32 * WARPS, STEP = 32, TILE = 16, COLUMNS = TOKENS / 8;
constexpr int ROWS = GATED ? TILE / 2 : TILE;  // of the output, per tile: a gated one has as many rows of gate as of up
constexpr int STRIDE = TILE + 4;               // of a row's sums in shared memory, apart from each other's banks
constexpr int TOGETHER = TILES < 2 ? TILES : 2;            // tiles that are summed at once
constexpr int SUMS = WARPS * TOGETHER * TOKENS * STRIDE;   // twice: one is written while the other is read
constexpr int HALF = 32 * 16;                              // bytes of half a tile's step, and of eight rows'
constexpr int STAGE_BYTES = (2 * TILES + COLUMNS) * HALF;  // of one warp: weights, then rows of x
constexpr int STAGES = (SHARED - 2 * SUMS * 4) / (WARPS * STAGE_BYTES);
static_assert(STAGES >= 2, "shared memory has no room for two stages");
constexpr int GROUP_THREADS = 1024, BLOCK_PAIRS = 1024;
constexpr int AT_ONCE = 8;  // parts of a sum

struct Chunk {
    int expert, first, count, padding;  // of the rank's own; where its rows begin in the order of experts
};

// Sorts the pairs, as the router does where it has few tokens: see group_pairs. One block.
extern "C" __global__ void __launch_bounds__(GROUP_THREADS) group_rows(int* lists, const int64_t* experts, int max_chunks, int num_pairs, int first, int num_own, int least, int most) {
    extern __shared__ int counts[];
    wait_for_earlier();
    group_pairs<GROUP_THREADS, 8>(
        ExpertLists(lists, max_chunks, num_pairs), [&](int p) { return static_cast<int>(__ldcg(experts + p)); }, num_pairs, first, num_own, least, most, counts);
}

// For products of many rows: count_pairs adds to counts [num_own + 1] how many pairs an expert has, those of others last; order_pairs gives each pair
// its place in the order of experts, and each place its token; ends [num_own]: behind an expert's last place. taken [num_own + 1]: places that
// blocks have taken. Counts and taken are zeros before. Which of an expert's pairs comes first differs from run to run.
__device__ __forceinline__ int place_among(int64_t expert, int first, int num_own) {
    return expert >= first && expert < first + num_own ? static_cast<int>(expert) - first : num_own;
}

extern "C" __global__ void __launch_bounds__(THREADS) count_pairs(int* counts, const int64_t* experts, int num_pairs, int first, int num_own) {
    extern __shared__ int own[];
    for (int e = threadIdx.x; e <= num_own; e += THREADS) own[e] = 0;
    __syncthreads();
    const int begin = blockIdx.x * BLOCK_PAIRS, end = min(num_pairs, begin + BLOCK_PAIRS);
    for (int p = begin + threadIdx.x; p < end; p += THREADS) atomicAdd(own + place_among(experts[p], first, num_own), 1);
    __syncthreads();
    for (int e = threadIdx.x; e <= num_own; e += THREADS)
        if (own[e]) atomicAdd(counts + e, own[e]);
}

extern "C" __global__ void __launch_bounds__(THREADS) order_pairs(int64_t* tokens, int64_t* places, int* ends, int* taken, const int* counts,
                                                                  const int64_t* experts, int num_pairs, int num_chosen, int first, int num_own) {
    extern __shared__ int own[];
    int* starts = own + num_own + 1;
    for (int e = threadIdx.x; e <= num_own; e += THREADS) own[e] = 0;
    __syncthreads();
    const int begin = blockIdx.x * BLOCK_PAIRS, end = min(num_pairs, begin + BLOCK_PAIRS);
    for (int p = begin + threadIdx.x; p < end; p += THREADS) atomicAdd(own + place_among(experts[p], first, num_own), 1);
    if (threadIdx.x < 32) {
        for (int e = threadIdx.x, before = 0; e - static_cast<int>(threadIdx.x) <= num_own; e += 32) {
            const int count = e <= num_own ? counts[e] : 0;
            int sum = count;
            for (int d = 1; d < 32; d *= 2) {
                const int other = __shfl_up_sync(~0u, sum, d);
                if (threadIdx.x >= d) sum += other;
            }
            if (e <= num_own) starts[e] = before + sum - count;
            if (e < num_own && blockIdx.x == 0) ends[e] = before + sum;
            before += __shfl_sync(~0u, sum, 31);
        }
    }
    __syncthreads();
    for (int e = threadIdx.x; e <= num_own; e += THREADS)
        if (own[e]) starts[e] += atomicAdd(taken + e, own[e]);
    __syncthreads();
    for (int p = begin + threadIdx.x; p < end; p += THREADS) {
        const int place = atomicAdd(starts + place_among(experts[p], first, num_own), 1);
        tokens[place] = p / num_chosen, places[p] = place;
    }
}

// weight [num_own, N, K]; x and out: see GATHER; num_chosen: pairs of a token.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    expert_linear(Element* out, const Element* x, const Element* weight, int* lists, int max_chunks, int num_pairs, int num_chosen, int N, int K,
                  int x_stride) {
    extern __shared__ __align__(16) float both_sums[];
    __shared__ Chunk slots[SLOTS];
    __shared__ int own_rows[SLOTS][TOKENS];  // of x where they are tokens', else of the output
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const ExpertLists own(lists, max_chunks, num_pairs);
    const uint32_t shared = static_cast<uint32_t>(__cvta_generic_to_shared(both_sums));
    const uint32_t ring = shared + 2 * SUMS * 4 + warp * STAGES * STAGE_BYTES + lane * 16;

    // The chunks are older than the kernel ahead where rows of x are what that one makes.
    if (GATHER) wait_for_earlier();
    const int num_outputs = GATED ? N / 2 : N, num_tiles = num_outputs / ROWS, units_per = (num_tiles + TILES - 1) / TILES;
    const int4 early = __ldcg(own.chunks + min(static_cast<int>(threadIdx.x), max_chunks - 1));  // along with their number, lest they come one after the other
    const Share share(__ldcg(own.num_chunks) * units_per);
    const int first = share.first, num_own_units = share.end - first;
    if (num_own_units == 0) {
        launch_dependents();
        if (!GATHER) wait_for_earlier();
        return;
    }
    const int first_chunk = first / units_per, num_slots = min(SLOTS, (first + num_own_units - 1) / units_per - first_chunk + 1);
    if (max_chunks <= THREADS) {
        const int slot = static_cast<int>(threadIdx.x) - first_chunk;
        if (slot >= 0 && slot < num_slots) slots[slot] = Chunk{early.x, early.y, early.z, 0};
    } else {
#pragma unroll 1
        for (int i = threadIdx.x; i < num_slots; i += THREADS) {
            const int4 chunk = __ldcg(own.chunks + first_chunk + i);
            slots[i] = Chunk{chunk.x, chunk.y, chunk.z, 0};
        }
    }
    __syncthreads();

    const int num_k = K / STEP, num_steps = (num_k + WARPS - 1) / WARPS;
    // Tiles begin at different places of K, lest all blocks ask the L2 cache for the same part of x at once; each tile always at the same.
    auto turn_of = [&](int tile) { return tile / TILES % num_steps; };
    auto place_of = [&](int step, int turn) {  // where in K this warp's step is, in steps
        const int turned = step + turn;
        return warp + WARPS * (turned < num_steps ? turned : turned - num_steps);
    };
    const size_t second_half = static_cast<size_t>(GATED ? num_outputs : 8) * K, expert_size = static_cast<size_t>(N) * K;

    struct Place {
        int slot, tile, turn, step, left;  // left: units from this one on
    };
    auto advance = [&](Place& p) {
        if (++p.step < num_steps) return;
        p.step = 0, --p.left, p.tile += TILES;
        if (p.tile >= num_tiles) p.tile = 0, ++p.slot;
        p.turn = turn_of(p.tile);
    };
    auto copy_weights = [&](const Place& p, int stage) {
        const int k = place_of(p.step, p.turn);
        if (p.left <= 0 || k >= num_k) return;
        const Element* source = weight + slots[p.slot].expert * expert_size + static_cast<size_t>(p.tile * ROWS + g) * K + k * STEP + t * 8;
#pragma unroll
        for (int r = 0; r < TILES; ++r)
            if (p.tile + r < num_tiles) {
                copy_async(ring + stage * STAGE_BYTES + 2 * r * HALF, source + static_cast<size_t>(r * ROWS) * K);
                copy_async(ring + stage * STAGE_BYTES + (2 * r + 1) * HALF, source + static_cast<size_t>(r * ROWS) * K + second_half);
            }
    };
    auto copy_rows = [&](const Place& p, int stage) {
        const int k = place_of(p.step, p.turn);
        if (p.left <= 0 || k >= num_k) return;
        const Chunk& chunk = slots[p.slot];
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c)
            if (g + 8 * c < chunk.count) {
                const int row = GATHER ? own_rows[p.slot][g + 8 * c] : chunk.first + g + 8 * c;
                copy_async(ring + stage * STAGE_BYTES + (2 * TILES + c) * HALF, x + static_cast<size_t>(row) * x_stride + k * STEP + t * 8);
            }
    };

    const int first_tile = (first - first_chunk * units_per) * TILES;
    const Place begin{0, first_tile, turn_of(first_tile), 0, num_own_units};
    Place copied = begin;
#pragma unroll 1
    for (int stage = 0; stage < STAGES; ++stage, advance(copied)) {
        copy_weights(copied, stage);
        end_copies();
    }
    launch_dependents();
#pragma unroll 1
    for (int i = threadIdx.x; i < num_slots * TOKENS; i += THREADS) {
        const int slot = i / TOKENS, row = i % TOKENS;
        if (row < slots[slot].count) {
            const int pair = __ldcg(own.rows + slots[slot].first + row);
            own_rows[slot][row] = GATHER ? pair / num_chosen : pair;
        }
    }
    __syncthreads();
    if (!GATHER) wait_for_earlier();
    copied = begin;
#pragma unroll 1
    for (int stage = 0; stage < STAGES; ++stage, advance(copied)) {
        copy_rows(copied, stage);
        end_copies();
    }

    int stage = 0;
    float* sums = both_sums;
    for (Place unit = begin; unit.left > 0;) {
        const Chunk chunk = slots[unit.slot];
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
                if (g + 8 * c < chunk.count) b[c].bits = load_shared(place + (2 * TILES + c) * HALF);
            copy_weights(copied, stage);
            copy_rows(copied, stage);
            end_copies();
            advance(copied);
            stage = stage + 1 == STAGES ? 0 : stage + 1;
            if (place_of(step, unit.turn) >= num_k) continue;
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
            const int first_tile = unit.tile + begin, num_rows = min(TOGETHER, num_tiles - first_tile) * ROWS;
            if (num_rows <= 0) break;
#pragma unroll
            for (int r = 0; r < TOGETHER; ++r)
#pragma unroll
                for (int c = 0; c < COLUMNS; ++c)
#pragma unroll
                    for (int i = 0; i < 4; ++i)
                        sums[((warp * TOGETHER + r) * TOKENS + c * 8 + t * 2 + i % 2) * STRIDE + g + i / 2 * 8] = acc[begin + r][c][i];
            __syncthreads();
            auto total = [&](int r, int row, int n) {
                float value = 0;
#pragma unroll
                for (int w = 0; w < WARPS; ++w) value += sums[((w * TOGETHER + r) * TOKENS + row) * STRIDE + n];
                return from_float<Element>(value);
            };
#pragma unroll 1
            for (int i = threadIdx.x; i < chunk.count * num_rows; i += THREADS) {
                const int row = i / num_rows, n = i % num_rows, r = n / ROWS;
                const int target = GATHER ? chunk.first + row : own_rows[unit.slot][row];
                Element value;
                if constexpr (GATED) value = gate_mul(total(r, row, n % ROWS), total(r, row, n % ROWS + 8));
                else value = total(r, row, n % ROWS);
                out[static_cast<size_t>(target) * num_outputs + first_tile * ROWS + n] = value;
            }
            sums = sums == both_sums ? both_sums + SUMS : both_sums;
        }
        unit.step = num_steps - 1;
        advance(unit);
    }
}

// out [T, size]: the weighted sum of what a token's experts made, rounded; added to `residual`, which may be out, where there is one; and `beside` added to
// that, where there is any. made: rows of the pairs, or with places [T, num_chosen] where those lie. Experts that are not among num_own from `first` on add nothing.
// Grid: a row for each token, and pieces of it.
extern "C" __global__ void combine_experts(Element* out, const Element* residual, const Element* beside, const Element* made, const int64_t* experts,
                                           const float* weights, const int64_t* places, int size, int num_chosen, int first, int num_own) {
    launch_dependents();
    wait_for_earlier();
    const int64_t token = blockIdx.x;
    const int column = (blockIdx.y * blockDim.x + threadIdx.x) * V::SIZE;
    if (column >= size) return;
    float sums[V::SIZE] = {};
    V old, other;
    if (residual) old = load_fresh(residual + token * size + column);
    if (beside) other = load_fresh(beside + token * size + column);
    // Whether an expert is of the rank is known when its part is there, too: all are asked for at once.
#pragma unroll 1
    for (int begin = 0; begin < num_chosen; begin += AT_ONCE) {
        V parts[AT_ONCE];
        float shares[AT_ONCE];
        bool is_own[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int64_t pair = token * num_chosen + min(begin + i, num_chosen - 1), expert = __ldcg(experts + pair) - first;
            is_own[i] = begin + i < num_chosen && expert >= 0 && expert < num_own;
            shares[i] = __ldcg(weights + pair);
            parts[i] = load_fresh(made + (places ? __ldcg(places + pair) : pair) * size + column);
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i)
            if (is_own[i])
#pragma unroll
                for (int e = 0; e < V::SIZE; ++e) sums[e] = fmaf(shares[i], to_float(parts[i].values[e]), sums[e]);
    }
    V result;
#pragma unroll
    for (int e = 0; e < V::SIZE; ++e) {
        result.values[e] = from_float<Element>(sums[e]);
        if (residual) result.values[e] = from_float<Element>(to_float(old.values[e]) + to_float(result.values[e]));
        if (beside) result.values[e] = from_float<Element>(to_float(result.values[e]) + to_float(other.values[e]));
    }
    store(out + token * size + column, result);
}
