// Products of tokens with the experts that they take, for more rows than experts.cu is fast for: bound by the memory until an expert has some
// hundred rows.
//
// A tile is 128 rows of an expert's weights, the A operand of wgmma, 64 for each of two warpgroups; the rows of a chunk (see experts.cu) are its
// columns, up to 32, 64 or 128. One thread of the first warpgroup copies weights to shared memory (bulk tensor copies of 64 elements of K), all of its
// threads the chunk's rows, which lie anywhere. As many stages are under way as have room beside the rows of the largest chunk. Blocks share all chunks'
// tiles evenly, neighbouring ones to a block. Terms are added in order of K, so an output is the same whatever other tokens there are, and however
// they are chunked.
//
// The next kernel's blocks are let in when the last copies are on their way; weights that are known to be needed come in while the kernel ahead runs.
//
// ELEMENT: __nv_bfloat16 or __half; GATED: weights are gate | up, the output silu(gate) * up; GATHER: rows of x are tokens', those of the output lie in
// order of the experts, else the other way around; SHARED: bytes of dynamic shared memory.
#include "dense.cuh"
#include "expert_groups.cuh"
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#include "pipeline.cuh"
#include "wgmma.cuh"

using Element = ELEMENT;

constexpr int STEP = 64;  // elements of K in a stage: a swizzled row of 128 bytes
constexpr int TILE = 128, GROUPS = 2, PRODUCERS = 128, CONSUMERS = GROUPS * 128, THREADS = PRODUCERS + CONSUMERS, MOST_ROWS = 128;
constexpr int OUTPUTS = GATED ? TILE / 2 : TILE, OWN = OUTPUTS / GROUPS;  // of a tile, of a warpgroup
// Outputs are stored by 32 rows: bytes of one in shared memory; 16-byte pieces of one; a thread's of 32.
constexpr int PITCH = OWN * 2 + 16, LINES = OWN / 8, ITEMS = 32 * LINES / 128;
constexpr int A_BYTES = TILE * 128, KEPT_BYTES = 32 * PITCH, ROOM = SHARED - 1024 - GROUPS * KEPT_BYTES;
constexpr int MAX_STAGES = ROOM / (A_BYTES + 32 * 128);
constexpr int LAG = 3;  // steps by which rows of x are told later than they are asked for
static_assert(LAG + 2 <= ROOM / (A_BYTES + MOST_ROWS * 128), "a stage is given back one step after its products have begun, and would be waited for before");
// Registers are left for other kernels' blocks.
constexpr int MOST_THREADS = 512, LAUNCH_REGISTERS = 65536 / MOST_THREADS, PRODUCER_REGISTERS = 64;
constexpr int CONSUMER_REGISTERS = (LAUNCH_REGISTERS * THREADS - PRODUCER_REGISTERS * PRODUCERS) / CONSUMERS / 8 * 8;

template <int N> struct Count { static constexpr int value = N; };

__device__ __forceinline__ void copy_row(uint32_t target, const void* source) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(target), "l"(source) : "memory");
}
template <int LATER>
__device__ __forceinline__ void await_rows() { asm volatile("cp.async.wait_group %0;" ::"n"(LATER) : "memory"); }
__device__ __forceinline__ void meet_group(int group) { asm volatile("bar.sync %0, 128;" ::"r"(1 + group) : "memory"); }

// Grid: as many blocks as run at a time. weights: [E, N, K] as wide_experts.py describes them; num_chosen: pairs of a token; num_tiles: of an expert;
// num_outputs: of a row of the output.
extern "C" __global__ void __launch_bounds__(MOST_THREADS, 1)
    wide_experts(const __grid_constant__ CUtensorMap weights, Element* out, const Element* x, int* lists, int max_chunks, int num_pairs, int num_chosen,
                 int num_tiles, int num_outputs, int K, int x_stride) {
    extern __shared__ unsigned char dynamic_memory[];
    __shared__ __align__(8) uint64_t barriers[2 * MAX_STAGES];
    const uint32_t stages = (uint32_t(__cvta_generic_to_shared(dynamic_memory)) + 1023) & ~1023u, outputs = stages + ROOM;
    const uint32_t full = uint32_t(__cvta_generic_to_shared(barriers)), empty = full + 8 * MAX_STAGES;
    const ExpertLists own(lists, max_chunks, num_pairs);
    if (threadIdx.x == 0) {
        prefetch(&weights);
        for (int s = 0; s < MAX_STAGES; ++s) init_barrier(full + 8 * s, 1 + PRODUCERS / 32), init_barrier(empty + 8 * s, CONSUMERS / 32);
        publish_barriers();
    }
    // The chunks are older than the kernel ahead where rows of x are what that one makes.
    if (GATHER) wait_for_earlier();
    const Share share(__ldcg(own.num_chunks) * num_tiles);
    const int first = share.first, end = share.end, num_steps = K / STEP;
    const auto chunk_of = [&](int unit) { return __ldcg(own.chunks + unit / num_tiles); };
    const int most_rows = first < end ? chunk_of(first).w : 0, stage_bytes = A_BYTES + most_rows * 128;  // the same in all chunks
    const int num_stages = most_rows == 32 ? MAX_STAGES : ROOM / stage_bytes;
    // What stale rows of x are multiplied with is not used, but costs power, and so time.
    for (int i = threadIdx.x; i < num_stages * most_rows * 8; i += THREADS)
        clear_shared(stages + i / (most_rows * 8) * stage_bytes + A_BYTES + i % (most_rows * 8) * 16);
    publish_to_products();
    __syncthreads();
    if (first == end) {
        launch_dependents();
        if (!GATHER) wait_for_earlier();
        return;
    }

    if (threadIdx.x < PRODUCERS) {
        keep_registers<PRODUCER_REGISTERS>();
        constexpr int ROWS = MOST_ROWS / 16;  // of a chunk that a thread copies a piece of
        const int thread = threadIdx.x, row = thread / 8, piece = thread % 8;
        const uint32_t place = A_BYTES + row * 128 + ((piece ^ (row & 7)) << 4);
        int4 chunk = chunk_of(first);
        const auto copy_weights = [&](int stage, int unit, int step) {
            arrive_expecting(full + 8 * stage, A_BYTES);
            copy_rows(stages + stage * stage_bytes, &weights, full + 8 * stage, step * STEP, unit % num_tiles * (TILE / 16), chunk.x);
        };
        const int num_early = min(num_stages, num_steps);
        if (thread == 0)
            for (int s = 0; s < num_early; ++s) copy_weights(s, first, s);
        if (!GATHER) wait_for_earlier();
        const Element* sources[ROWS];
        int stage = 0, parity = 1, told = 0, num_copied = 0;  // parity: of `empty`, as it was before; told: the next stage whose rows are to be told
        const auto tell = [&] {
            publish_to_products();
            __syncwarp();
            if (thread % 32 == 0) arrive(full + 8 * told);
            if (++told == num_stages) told = 0;
        };
        for (int unit = first; unit < end; ++unit) {
            if (unit == first || unit % num_tiles == 0) {
                chunk = chunk_of(unit);
#pragma unroll
                for (int i = 0; i < ROWS; ++i) {
                    sources[i] = nullptr;
                    const int r = row + 16 * i;
                    if (r < chunk.z) sources[i] = x + size_t(GATHER ? __ldcg(own.rows + chunk.y + r) / num_chosen : chunk.y + r) * x_stride + piece * 8;
                }
            }
            for (int step = 0; step < num_steps; ++step) {
                await(empty + 8 * stage, parity);
                if (thread == 0 && num_copied >= num_early) copy_weights(stage, unit, step);
#pragma unroll
                for (int i = 0; i < ROWS; ++i)
                    if (sources[i]) copy_row(stages + stage * stage_bytes + place + i * 2048, sources[i] + step * STEP);
                asm volatile("cp.async.commit_group;" ::: "memory");
                if (num_copied >= LAG) {
                    await_rows<LAG>();
                    tell();
                }
                ++num_copied;
                if (++stage == num_stages) stage = 0, parity ^= 1;
            }
        }
        if (thread == 0) launch_dependents();
        await_rows<0>();
        for (int i = min(LAG, num_copied); i > 0; --i) tell();
        return;
    }

    take_registers<CONSUMER_REGISTERS>();
    const int thread = threadIdx.x - PRODUCERS, group = thread / 128, own_thread = thread % 128, warp = own_thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4;
    const uint32_t kept = outputs + group * KEPT_BYTES;
    if (!GATHER) wait_for_earlier();
    int stage = 0, parity = 0;
    const auto process = [&](auto rows, int tile, int4 chunk) {
        constexpr int N = decltype(rows)::value;
        int targets[N / 32][ITEMS];  // rows of the output that the thread's pieces belong to
#pragma unroll
        for (int i = 0; i < N / 32 * ITEMS; ++i) {
            const int r = (own_thread + 128 * i) / LINES;
            targets[i / ITEMS][i % ITEMS] = r >= chunk.z ? -1 : GATHER ? chunk.y + r : __ldcg(own.rows + chunk.y + r);
        }
        float sums[N / 2];
        int before = 0;
        const auto release = [&](int stage) {
            if (lane == 0) arrive(empty + 8 * stage);
        };
        for (int step = 0; step < num_steps; ++step) {
            await(full + 8 * stage, parity);
            const uint32_t place = stages + stage * stage_bytes;
            begin_products();
#pragma unroll
            for (int k = 0; k < STEP / 16; ++k)
                multiply<Element>(sums, describe(place + group * 64 * 128) + 2 * k, describe(place + A_BYTES) + 2 * k, step > 0 || k > 0);
            end_products();
            await_products<1>();
            if (step > 0) release(before);
            before = stage;
            if (++stage == num_stages) stage = 0, parity ^= 1;
        }
        await_products<0>();
        hold(sums);
        release(before);

        // Rounded outputs by row, so that whole lines are stored. Of 16 rows of weights a thread has one of the first eight and one of the others.
        const auto keep = [&](int row, int output, Element v) {
            asm volatile("st.shared.b16 [%0], %1;" ::"r"(kept + row * PITCH + output * 2), "h"(*reinterpret_cast<const uint16_t*>(&v)) : "memory");
        };
#pragma unroll
        for (int part = 0; part < N / 32; ++part) {
            if (part * 32 >= chunk.z) break;
            meet_group(group);  // what lay here has been read
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const int row = i / 2 * 8 + t * 2 + i % 2;
                const float* own_sums = sums + (part * 4 + i / 2) * 4 + i % 2;
                const Element low = from_float<Element>(own_sums[0]), high = from_float<Element>(own_sums[2]);
                if constexpr (GATED) keep(row, warp * 8 + g, gate_mul(low, high));
                else keep(row, warp * 16 + g, low), keep(row, warp * 16 + 8 + g, high);
            }
            meet_group(group);
#pragma unroll
            for (int i = 0; i < ITEMS; ++i) {
                const int item = own_thread + 128 * i, column = tile * OUTPUTS + group * OWN + item % LINES * 8, target = targets[part][i];
                if (target < 0 || column >= num_outputs) continue;
                const float4 line = load_shared(kept + item / LINES * PITCH + item % LINES * 16);
                store(out + size_t(target) * num_outputs + column, Vector<Element>(*reinterpret_cast<const uint4*>(&line)));
            }
        }
    };
    for (int unit = first; unit < end; ++unit) {
        const int4 chunk = chunk_of(unit);
        if (chunk.z <= 32) process(Count<32>(), unit % num_tiles, chunk);
        else if (chunk.z <= 64) process(Count<64>(), unit % num_tiles, chunk);
        else process(Count<MOST_ROWS>(), unit % num_tiles, chunk);
    }
}
#endif
