// Which experts a token takes: scores of all experts in float32, the choice of some of them, and the weights of what those add.
//
// A block scores eight tokens by eight experts, a warp an expert; the last block of eight tokens to end chooses for them, a warp for each. A
// token's scores do not depend on the tokens beside it. The last block of all sorts what was chosen by expert. Where x is null the scores are
// there already, and nothing is sorted.
//
// ELEMENT: of x.
#include "dense.cuh"
#include "expert_groups.cuh"
#include "generated.cuh"

using Element = ELEMENT;

constexpr int WARPS = 8, THREADS = 32 * WARPS, TOKENS = 8;
constexpr int AHEAD = 12;  // pieces of a weight's row, 16 bytes a thread, that are read before the kernel ahead has ended

struct Best {
    float value;
    int index;
};

// The larger of two; of equal ones the first.
__device__ __forceinline__ Best better(Best a, Best b) { return b.value > a.value || (b.value == a.value && b.index < a.index) ? b : a; }

__device__ __forceinline__ Best best_of_warp(Best own) {
#pragma unroll
    for (int d = 16; d; d /= 2) own = better(own, Best{__shfl_xor_sync(~0u, own.value, d), __shfl_xor_sync(~0u, own.index, d)});
    return own;
}

// Of values[lane], values[lane + 32] ...
__device__ __forceinline__ Best best_of_lane(const float* values, int count, int lane) {
    Best best{-INFINITY, count};
    for (int i = lane; i < count; i += 32) best = better(best, Best{values[i], i});
    return best;
}

__device__ __forceinline__ float max_of_warp(float v) {
#pragma unroll
    for (int d = 16; d; d /= 2) v = fmaxf(v, __shfl_xor_sync(~0u, v, d));
    return v;
}

// One warp chooses for one token. shares, ranking [E]: in shared memory, its own.
__device__ void choose(int64_t* experts, float* weights, const float* scores, const float* correction, float* shares, float* ranking, int lane,
                       const RouteSizes& sizes) {
    const int count = sizes.num_experts;
    if (sizes.is_sigmoid) {
        for (int e = lane; e < count; e += 32) shares[e] = 1.0f / (1.0f + expf(-__ldcg(scores + e)));
    } else {
        float peak = -INFINITY, total = 0;
        for (int e = lane; e < count; e += 32) peak = fmaxf(peak, shares[e] = __ldcg(scores + e));
        peak = max_of_warp(peak);
        for (int e = lane; e < count; e += 32) total += shares[e] = expf(shares[e] - peak);
        total = sum_warp(total);
        for (int e = lane; e < count; e += 32) shares[e] /= total;
    }
    for (int e = lane; e < count; e += 32) ranking[e] = shares[e] + (correction ? correction[e] : 0.0f);
    __syncwarp();
    if (sizes.num_groups > 1) {  // at most one for each lane
        const int size = count / sizes.num_groups;
        float score = -INFINITY;
        if (lane < sizes.num_groups) {
            float first = -INFINITY, second = -INFINITY;
            for (int i = 0; i < size; ++i) {
                const float value = ranking[lane * size + i];
                if (value > first) second = first, first = value; else second = fmaxf(second, value);
            }
            score = sizes.num_group_scores > 1 ? first + second : first;
        }
        bool is_chosen = false;
        for (int n = 0; n < sizes.num_chosen_groups; ++n) {
            const Best best = best_of_warp(Best{is_chosen || lane >= sizes.num_groups ? -INFINITY : score, is_chosen || lane >= sizes.num_groups ? lane + 32 : lane});
            if (best.index == lane) is_chosen = true;
        }
        const unsigned chosen = __ballot_sync(~0u, is_chosen);
        for (int e = lane; e < count; e += 32)
            if (!(chosen >> (e / size) & 1)) ranking[e] = -INFINITY;
        __syncwarp();
    }
    Best own = best_of_lane(ranking, count, lane);
    int expert = 0;
    for (int n = 0; n < sizes.num_chosen; ++n) {
        Best best = best_of_warp(own);
        if (best.index >= count) best.index = n;  // nothing but what is no number: any will do
        if (n == lane) expert = best.index;
        if (best.index % 32 == lane) {
            ranking[best.index] = -INFINITY;
            own = best_of_lane(ranking, count, lane);
            if (own.value == -INFINITY) own.index = count;
        }
    }
    const bool is_used = lane < sizes.num_chosen;
    float weight = is_used ? shares[expert] : 0.0f;
    if (sizes.is_normalized) weight /= fmaxf(sum_warp(weight), sizes.min_sum);
    if (is_used) experts[lane] = expert, weights[lane] = weight * sizes.scale;
}

// scores [T, E]; x [T, hidden] or null; norm_weight [hidden] or null: rows of x are normalised before, and written to normed [T, hidden]; gate
// [E, hidden] float32; correction [E] or null; experts and weights [T, k]; lists: ExpertLists, or null; counters: zeros, one for eight tokens and
// one more. Grid: experts / 8 (1 without x), tokens / 8. Shared memory: eight rows of x, or 2 x 8 x E floats.
extern "C" __global__ void __launch_bounds__(THREADS)
    route(int64_t* experts, float* weights, float* scores, Element* normed, int* lists, const Element* x, const Element* norm_weight, const float* gate,
          const float* correction, int* counters, RouteSizes sizes) {
    extern __shared__ __align__(16) float shared[];
    __shared__ bool is_last;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first = blockIdx.y * TOKENS, count = min(TOKENS, sizes.num_tokens - first);
    // Whether all `size` blocks that count here have come this far.
    auto is_last_of = [&](int* counter, int size) {
        if (size == 1) {
            __syncthreads();
            return true;
        }
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0) {
            is_last = atomicAdd(counter, 1) == size - 1;
            if (is_last) *counter = 0;  // for the next launch
            __threadfence();
        }
        __syncthreads();
        return is_last;
    };
    if (x) {
        using V = Vector<Element>;
        const int expert = blockIdx.x * WARPS + warp, num_pieces = sizes.hidden_size / 4, per_row = sizes.hidden_size / V::SIZE;
        const float4* own = reinterpret_cast<const float4*>(gate + static_cast<size_t>(min(expert, sizes.num_experts - 1)) * sizes.hidden_size);
        float4 ahead[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) ahead[i] = __ldg(own + min(i * 32 + lane, num_pieces - 1));
        wait_for_earlier();
        launch_dependents();
        Element* rows = reinterpret_cast<Element*>(shared);
        for (int i = threadIdx.x; i < count * per_row; i += THREADS)
            store(rows + static_cast<size_t>(i) * V::SIZE, load_fresh(x + static_cast<size_t>(first + i / per_row) * sizes.x_stride + i % per_row * V::SIZE));
        __syncthreads();
        if (norm_weight) {
            if (warp < count) {
                Element* row = rows + static_cast<size_t>(warp) * sizes.hidden_size;
                float sum = 0;
                for (int i = lane; i < per_row; i += 32) sum = add_squares(sum, V(*reinterpret_cast<const uint4*>(row + i * V::SIZE)));
                const float inverse = inverse_rms(sum_warp(sum), sizes.hidden_size, sizes.eps);
                for (int i = lane; i < per_row; i += 32) {
                    V v(*reinterpret_cast<const uint4*>(row + i * V::SIZE));
                    const V w = load_constant(norm_weight + i * V::SIZE);
#pragma unroll
                    for (int e = 0; e < V::SIZE; ++e) v.values[e] = scale(v.values[e], inverse, w.values[e]);
                    store(row + i * V::SIZE, v);
                    if (blockIdx.x == 0) store(normed + static_cast<size_t>(first + warp) * sizes.hidden_size + i * V::SIZE, v);
                }
            }
            __syncthreads();
        }
        float sums[TOKENS] = {};
        auto add = [&](int piece, float4 w) {
            if (piece >= num_pieces) return;
#pragma unroll
            for (int t = 0; t < TOKENS; ++t) {
                if (t >= count) break;
                const Element* v = rows + static_cast<size_t>(t) * sizes.hidden_size + piece * 4;
                Element values[4];
                if constexpr (sizeof(Element) == 4) *reinterpret_cast<uint4*>(values) = *reinterpret_cast<const uint4*>(v);
                else *reinterpret_cast<uint2*>(values) = *reinterpret_cast<const uint2*>(v);
                sums[t] = fmaf(to_float(values[0]), w.x, fmaf(to_float(values[1]), w.y, fmaf(to_float(values[2]), w.z, fmaf(to_float(values[3]), w.w, sums[t]))));
            }
        };
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) add(i * 32 + lane, ahead[i]);
#pragma unroll 4
        for (int piece = AHEAD * 32 + lane; piece < num_pieces; piece += 32) add(piece, __ldg(own + piece));
#pragma unroll
        for (int t = 0; t < TOKENS; ++t) {
            const float sum = sum_warp(sums[t]);
            if (lane == 0 && t < count && expert < sizes.num_experts) scores[static_cast<size_t>(first + t) * sizes.num_experts + expert] = sum;
        }
        if (!is_last_of(counters + blockIdx.y, gridDim.x)) return;
    } else {
        wait_for_earlier();
        launch_dependents();
    }
    if (warp < count) {
        const size_t token = first + warp;
        float* shares = shared + warp * 2 * sizes.num_experts;
        choose(experts + token * sizes.num_chosen, weights + token * sizes.num_chosen, scores + token * sizes.num_experts, correction, shares,
               shares + sizes.num_experts, lane, sizes);
    }
    if (!lists || !is_last_of(counters + gridDim.y, gridDim.y)) return;
    const int num_pairs = sizes.num_tokens * sizes.num_chosen;
    const ExpertLists own(lists, sizes.max_chunks, num_pairs);
    group_pairs<THREADS>(own, experts, num_pairs, sizes.first_own, sizes.num_own, sizes.rows_per_chunk, reinterpret_cast<int*>(shared));
}
