// Which experts a token takes: scores of all experts in float32, the choice of some of them, and the weights of what those add.
//
// A block scores TOKENS tokens. An expert's weights are cut in as many parts as it takes warps to have all of them on their way at once; where tokens
// are few, each has its own warp. A token's scores are the same whatever tokens there are. The last block of the same tokens to end chooses for them, a
// warp for each, and the last block of all sorts what was chosen by expert. Where x is null the scores are there already, and nothing is sorted.
//
// The step waits for this kernel while hardly anything is to be read: what is no other kernel's is loaded before the one ahead has ended, and
// what remains is as few trips to the memory as can be. Instructions are such trips, too, as the kernels of a layer do not fit in a multiprocessor's
// cache together: so loops that turn but a few times are not unrolled, and few tokens have code of their own.
//
// ELEMENT: of x; TOKENS: up to WARPS, 1 for one token alone; MANY: 1 where there are more than TOKENS.
#include "dense.cuh"
#include "expert_groups.cuh"
#include "generated.cuh"

using Element = ELEMENT;

constexpr int WARPS = 8, THREADS = 32 * WARPS;
constexpr int AHEAD = 8;  // pieces of 16 bytes, a thread's, of an expert's weights, that are read before the kernel ahead has ended
// Warps that read a row, at most and here; of the parts in which its squares are added up, a warp's; and a thread's pieces that are on their way at once.
constexpr int ROW_WARPS = 4, PER_ROW = WARPS / TOKENS < ROW_WARPS ? WARPS / TOKENS : ROW_WARPS, GROUPS = ROW_WARPS / PER_ROW, HELD = 16 / PER_ROW;
// Short code for few tokens: see above. Many blocks of tokens are bound by what they compute.
constexpr int PIECES_AT_ONCE = MANY ? 4 : 1;

struct Best {
    float value;
    int index;
};

// In the order of floats, but for what is no number.
__device__ __forceinline__ unsigned order_of(float v) {
    const unsigned bits = __float_as_uint(v);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// The largest of the lanes' values; of equal ones the first.
__device__ __forceinline__ int best_of_warp(Best own) {
    const unsigned order = order_of(own.value + 0.0f);  // of zeros there is one
    return __reduce_min_sync(~0u, order == __reduce_max_sync(~0u, order) ? own.index : 0x7fffffff);
}

// Of values[lane], values[lane + 32] ...
__device__ __forceinline__ Best best_of_lane(const float* values, int count, int lane) {
    Best best{-INFINITY, count};
#pragma unroll 1
    for (int i = lane; i < count; i += 32)
        if (values[i] > best.value) best = Best{values[i], i};
    return best;
}

__device__ __forceinline__ float max_of_warp(float v) {
#pragma unroll
    for (int d = 16; d; d /= 2) v = fmaxf(v, __shfl_xor_sync(~0u, v, d));
    return v;
}

// One warp chooses for one token: lane n its n-th expert, which it returns. shares, ranking [E]: in shared memory, its own.
__device__ int choose(int64_t* experts, float* weights, const float* scores, const float* correction, float* shares, float* ranking, int lane,
                      const RouteSizes& sizes) {
    const int count = sizes.num_experts;
    float peak = -INFINITY, total = 0;
#pragma unroll 1
    for (int e = lane; e < count; e += 32) {
        const float score = __ldcg(scores + e), added = correction ? __ldg(correction + e) : 0.0f;
        shares[e] = score, ranking[e] = added;
        peak = fmaxf(peak, score);
    }
    if (sizes.is_sigmoid) {
        total = 1;
#pragma unroll 1
        for (int e = lane; e < count; e += 32) shares[e] = 1.0f / (1.0f + expf(-shares[e]));
    } else {
        peak = max_of_warp(peak);
#pragma unroll 1
        for (int e = lane; e < count; e += 32) total += shares[e] = expf(shares[e] - peak);
        total = sum_warp(total);
    }
#pragma unroll 1
    for (int e = lane; e < count; e += 32) {
        const float share = shares[e] / total;
        shares[e] = share, ranking[e] += share;
    }
    __syncwarp();
    if (sizes.num_groups > 1) {  // at most one for each lane
        const int size = count / sizes.num_groups;
        float score = -INFINITY;
        if (lane < sizes.num_groups) {
            float first = -INFINITY, second = -INFINITY;
#pragma unroll 1
            for (int i = 0; i < size; ++i) {
                const float value = ranking[lane * size + i];
                if (value > first) second = first, first = value; else second = fmaxf(second, value);
            }
            score = sizes.num_group_scores > 1 ? first + second : first;
        }
        bool is_chosen = false;
#pragma unroll 1
        for (int n = 0; n < sizes.num_chosen_groups; ++n) {
            const bool is_out = is_chosen || lane >= sizes.num_groups;
            if (best_of_warp(Best{is_out ? -INFINITY : score, is_out ? lane + 32 : lane}) == lane) is_chosen = true;
        }
        const unsigned chosen = __ballot_sync(~0u, is_chosen);
#pragma unroll 1
        for (int e = lane; e < count; e += 32)
            if (!(chosen >> (e / size) & 1)) ranking[e] = -INFINITY;
        __syncwarp();
    }
    Best own = best_of_lane(ranking, count, lane);
    int expert = 0;
#pragma unroll 1
    for (int n = 0; n < sizes.num_chosen; ++n) {
        int best = best_of_warp(own);
        if (best >= count) best = n;  // nothing but what is no number: any will do
        if (n == lane) expert = best;
        if (best % 32 == lane) {
            ranking[best] = -INFINITY;
            own = best_of_lane(ranking, count, lane);
            if (own.value == -INFINITY) own.index = count;
        }
    }
    const bool is_used = lane < sizes.num_chosen;
    float weight = is_used ? shares[expert] : 0.0f;
    if (sizes.is_normalized) weight /= fmaxf(sum_warp(weight), sizes.min_sum);
    if (is_used) experts[lane] = expert, weights[lane] = weight * sizes.scale;
    return expert;
}

__device__ __forceinline__ void add_products(float4& sums, const Element* values, const float4& w) {
    Element v[4];
    if constexpr (sizeof(Element) == 4) *reinterpret_cast<uint4*>(v) = *reinterpret_cast<const uint4*>(values);
    else *reinterpret_cast<uint2*>(v) = *reinterpret_cast<const uint2*>(values);
    sums.x = fmaf(to_float(v[0]), w.x, sums.x), sums.y = fmaf(to_float(v[1]), w.y, sums.y);
    sums.z = fmaf(to_float(v[2]), w.z, sums.z), sums.w = fmaf(to_float(v[3]), w.w, sums.w);
}

// A warp's sums for N tokens, each as sum_warp adds it: that of token lane / (32 / N). Lanes give each other what the other goes on with.
template <int N>
__device__ __forceinline__ float sum_tokens(const float4 (&sums)[N], int lane) {
    float values[N];
#pragma unroll
    for (int t = 0; t < N; ++t) values[t] = (sums[t].x + sums[t].y) + (sums[t].z + sums[t].w);
    int offset = 16;
#pragma unroll
    for (int half = N / 2; half; half /= 2, offset /= 2) {
        const bool is_upper = lane & offset;
#pragma unroll
        for (int t = 0; t < half; ++t) {
            const float given = is_upper ? values[t] : values[t + half];
            values[t] = (is_upper ? values[t + half] : values[t]) + __shfl_xor_sync(~0u, given, offset);
        }
    }
#pragma unroll
    for (; offset; offset /= 2) values[0] += __shfl_xor_sync(~0u, values[0], offset);
    return values[0];
}

// scores [T, E]; x [T, hidden] or null; norm_weight [hidden] or null: rows of x are normalised before, and written to normed [T, hidden]; gate
// [E, hidden] float32; correction [E] or null; experts and weights [T, k]; lists: ExpertLists, or null; counters: zeros, one for each block's
// tokens and one more. Grid: warps / 8 (1 without x), tokens / TOKENS. Shared memory: TOKENS rows of x and the
// norm's weights, or 2 x 8 x E floats, or 2 num_own ints.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    route(int64_t* experts, float* weights, float* scores, Element* normed, int* lists, const Element* x, const Element* norm_weight, const float* gate,
          const float* correction, int* counters, RouteSizes sizes) {
    extern __shared__ __align__(16) float shared[];
    __shared__ float partial[WARPS][TOKENS];
    __shared__ float squares[TOKENS][ROW_WARPS];
    __shared__ bool is_last;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first = blockIdx.y * TOKENS, count = min(TOKENS, sizes.num_tokens - first);
    // Whether all `size` blocks that count here have come this far. What they wrote before can be seen then.
    auto is_last_of = [&](int* counter, int size) {
        __syncthreads();
        if (size == 1) return true;
        if (threadIdx.x == 0) {
            int before;
            asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
            is_last = before == size - 1;
            if (is_last) *counter = 0;  // for the next launch
        }
        __syncthreads();
        return is_last;
    };
    if (x) {
        using V = Vector<Element>;
        const int num_parts = sizes.num_parts, split = sizes.warps_per_expert, own_experts = WARPS / split, expert = blockIdx.x * own_experts + warp / split;
        const int part = warp % split * (num_parts / split);  // the first of the warp's
        const int num_pieces = sizes.hidden_size / 4, per_row = sizes.hidden_size / V::SIZE;
        const float4* own = reinterpret_cast<const float4*>(gate + static_cast<size_t>(min(expert, sizes.num_experts - 1)) * sizes.hidden_size);
        float4 ahead[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) ahead[i] = __ldg(own + min((i * num_parts + part) * 32 + lane, num_pieces - 1));
        Element *rows = reinterpret_cast<Element*>(shared), *factors = rows + static_cast<size_t>(count) * sizes.hidden_size;
        if (norm_weight)
#pragma unroll 2
            for (int i = threadIdx.x; i < per_row; i += THREADS) store(factors + i * V::SIZE, load_constant(norm_weight + i * V::SIZE));
        auto prefetch = [&](const void* start, int bytes) {
#pragma unroll 1
            for (int i = threadIdx.x * 128; i < bytes; i += THREADS * 128) asm volatile("prefetch.global.L2 [%0];" ::"l"(static_cast<const char*>(start) + i));
        };
        if (correction) prefetch(correction, sizes.num_experts * 4);
        wait_for_earlier();
        launch_dependents();
        // A row is read by as many warps as there are, up to ROW_WARPS; the squares are added up in the order of that many always.
        const int token = warp / PER_ROW, begin = warp % PER_ROW * 32 + lane;
        const bool has_row = token < count;
        Element* row = rows + static_cast<size_t>(token) * sizes.hidden_size;
        const Element* source = x + static_cast<size_t>(first + token) * sizes.x_stride;
        V held[HELD];
        if (has_row) {
#pragma unroll
            for (int i = 0; i < HELD; ++i) held[i] = load_fresh(source + min(i * PER_ROW * 32 + begin, per_row - 1) * V::SIZE);
            float sums[GROUPS] = {};
#pragma unroll
            for (int i = 0; i < HELD; ++i)
                if (const int piece = i * PER_ROW * 32 + begin; piece < per_row) {
                    store(row + piece * V::SIZE, held[i]);
                    sums[i % GROUPS] = add_squares(sums[i % GROUPS], held[i]);
                }
#pragma unroll 1
            for (int i = HELD * PER_ROW * 32 + begin; i < per_row; i += ROW_WARPS * 32)
#pragma unroll
                for (int g = 0; g < GROUPS; ++g)
                    if (const int piece = i + g * PER_ROW * 32; piece < per_row) {
                        const V v = load_fresh(source + piece * V::SIZE);
                        store(row + piece * V::SIZE, v);
                        sums[g] = add_squares(sums[g], v);
                    }
#pragma unroll
            for (int g = 0; g < GROUPS; ++g) {
                const float sum = sum_warp(sums[g]);
                if (lane == 0) squares[token][g * PER_ROW + warp % PER_ROW] = sum;
            }
        }
        __syncthreads();
        if (has_row) {
            float sum = 0;
#pragma unroll
            for (int i = 0; i < ROW_WARPS; ++i) sum += squares[token][i];
            const float inverse = norm_weight ? inverse_rms(sum, sizes.hidden_size, sizes.eps) : 0.0f;
#pragma unroll PIECES_AT_ONCE
            for (int piece = begin; norm_weight && piece < per_row; piece += PER_ROW * 32) {
                V v(*reinterpret_cast<const uint4*>(row + piece * V::SIZE));
                const V w(*reinterpret_cast<const uint4*>(factors + piece * V::SIZE));
#pragma unroll
                for (int e = 0; e < V::SIZE; ++e) v.values[e] = scale(v.values[e], inverse, w.values[e]);
                store(row + piece * V::SIZE, v);
                if (blockIdx.x == 0) store(normed + static_cast<size_t>(first + token) * sizes.hidden_size + piece * V::SIZE, v);
            }
        }
        __syncthreads();
        // A weight is for all tokens while it is there; the next part's take the places of those that were used. Rows that are not there add to nobody's sums.
        const int end = part + num_parts / split;
        float total = 0;
#pragma unroll 1
        for (int p = part; p < end; ++p) {
            float4 sums[TOKENS] = {};
            auto add = [&](int piece, const float4& w) {
                if (piece >= num_pieces) return;
#pragma unroll
                for (int t = 0; t < TOKENS; ++t) add_products(sums[t], rows + static_cast<size_t>(t) * sizes.hidden_size + piece * 4, w);
            };
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) {
                const float4 w = ahead[i];
                if (p + 1 < end) ahead[i] = __ldg(own + min((i * num_parts + p + 1) * 32 + lane, num_pieces - 1));
                add((i * num_parts + p) * 32 + lane, w);
            }
#pragma unroll 1
            for (int piece = (AHEAD * num_parts + p) * 32 + lane; piece < num_pieces; piece += 32 * num_parts) add(piece, __ldg(own + piece));
            total += sum_tokens(sums, lane);
        }
        if (lane % (32 / TOKENS) == 0) partial[warp][lane / (32 / TOKENS)] = total;
        __syncthreads();
        if (threadIdx.x < own_experts * TOKENS) {
            const int e = threadIdx.x / TOKENS, t = threadIdx.x % TOKENS, number = blockIdx.x * own_experts + e;
            float sum = 0;
#pragma unroll 1
            for (int p = 0; p < split; ++p) sum += partial[e * split + p][t];
            if (t < count && number < sizes.num_experts) scores[static_cast<size_t>(first + t) * sizes.num_experts + number] = sum;
        }
        if (!is_last_of(counters + blockIdx.y, gridDim.x)) return;
    } else {
        wait_for_earlier();
        launch_dependents();
    }
    __shared__ int chosen[TOKENS * 32];
    const int num_pairs = sizes.num_tokens * sizes.num_chosen;
    const ExpertLists own(lists, sizes.max_chunks, num_pairs);
    if (warp < count) {
        const size_t token = first + warp;
        float* shares = shared + warp * 2 * sizes.num_experts;
        const int expert = choose(experts + token * sizes.num_chosen, weights + token * sizes.num_chosen, scores + token * sizes.num_experts, correction,
                                  shares, shares + sizes.num_experts, lane, sizes);
        if (TOKENS == 1 && lists) group_one(own, expert, sizes.num_chosen, sizes.first_own, sizes.num_own, sizes.least_rows, lane);
        else if (lane < sizes.num_chosen) chosen[warp * sizes.num_chosen + lane] = expert;
    }
    if (TOKENS == 1 || !lists || !is_last_of(counters + gridDim.y, gridDim.y)) return;
    const bool is_alone = gridDim.y == 1;  // it has all of the choice itself
    group_pairs<THREADS, (TOKENS < WARPS ? 1 : 8)>(
        own, [&](int p) { return is_alone ? chosen[p] : static_cast<int>(__ldcg(experts + p)); }, num_pairs, sizes.first_own, sizes.num_own,
        sizes.least_rows, sizes.rows_per_chunk, reinterpret_cast<int*>(shared));
}
