// Sum over the ranks' parts through memory that all of them can read, by one kernel: no rank's copy engine or host takes part. RANKS: how many
// there are. Each block gives its part of the values to the block of the same index on every other rank, and to no other, so that
// only those wait for each other. Parts are added in the ranks' order: every rank gets the same bits.
#include "dense.cuh"

using Element = ELEMENT;
using V = Vector<Element>;

constexpr int THREADS = 256, VECTORS = 4, REGION = THREADS * VECTORS * 16;

__device__ __forceinline__ void signal(uint32_t* place, uint32_t turn) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(place), "r"(turn) : "memory");
}

__device__ __forceinline__ uint32_t look(const uint32_t* place) {
    uint32_t turn;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(turn) : "l"(place) : "memory");
    return turn;
}

// What another GPU wrote is read past every cache of this one.
__device__ __forceinline__ V load_remote(const unsigned char* source) {
    V v;
    asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.bits.x), "=r"(v.bits.y), "=r"(v.bits.z), "=r"(v.bits.w)
                 : "l"(source)
                 : "memory");
    return v;
}

// out = the sum, added to residual where that is not null; num_vectors: 16 bytes each. memories [RANKS]: each rank's, of two regions of REGION
// bytes for every block, and then RANKS signals of 4 bytes for every block. turns: how often each block of this rank has exchanged.
// A region is written again two exchanges later: by then every other rank has begun the exchange between, so it has read this one.
extern "C" __global__ void __launch_bounds__(THREADS)
    all_reduce(Element* out, const Element* part, const Element* residual, unsigned char* const* memories, uint32_t* turns, int num_vectors, int per_thread,
               int num_regions, int rank) {
    const int block = blockIdx.x, chunk = THREADS * per_thread;
    const size_t signals = static_cast<size_t>(num_regions) * 2 * REGION + static_cast<size_t>(block) * RANKS * 4;
    launch_dependents();
    wait_for_earlier();
    uint32_t turn = __ldcg(turns + block);
    for (int begin = block * chunk; begin < num_vectors; begin += gridDim.x * chunk) {
        ++turn;
        const size_t region = (static_cast<size_t>(block) * 2 + turn % 2) * REGION;
        V own[VECTORS], old[VECTORS];
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            const int place = begin + i * THREADS + threadIdx.x;
            if (i >= per_thread || place >= num_vectors) continue;
            own[i] = load_fresh(part + static_cast<size_t>(place) * V::SIZE);
            store(reinterpret_cast<Element*>(memories[rank] + region + (i * THREADS + threadIdx.x) * 16), own[i]);
            if (residual) old[i] = load_fresh(residual + static_cast<size_t>(place) * V::SIZE);
        }
        __threadfence_system();
        __syncthreads();
        if (threadIdx.x < RANKS && threadIdx.x != rank) {
            signal(reinterpret_cast<uint32_t*>(memories[threadIdx.x] + signals) + rank, turn);
            const uint32_t* seen = reinterpret_cast<const uint32_t*>(memories[rank] + signals) + threadIdx.x;
            while (static_cast<int32_t>(look(seen) - turn) < 0) {}
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            const int place = begin + i * THREADS + threadIdx.x;
            if (i >= per_thread || place >= num_vectors) continue;
            V others[RANKS];
#pragma unroll
            for (int r = 0; r < RANKS; ++r)
                others[r] = r == rank ? own[i] : load_remote(memories[r] + region + (i * THREADS + threadIdx.x) * 16);
            V sum;
#pragma unroll
            for (int e = 0; e < V::SIZE; ++e) {
                float value = to_float(others[0].values[e]);
#pragma unroll
                for (int r = 1; r < RANKS; ++r) value += to_float(others[r].values[e]);
                sum.values[e] = from_float<Element>(value);
                if (residual) sum.values[e] = from_float<Element>(to_float(old[i].values[e]) + to_float(sum.values[e]));
            }
            store(out + static_cast<size_t>(place) * V::SIZE, sum);
        }
    }
    if (threadIdx.x == 0) turns[block] = turn;
}
