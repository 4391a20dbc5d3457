// Sums of many rows over ranks, of which each adds a share: copy engines bring it the others' parts of its rows ("reduce-scatter"), and the others
// what it made of them ("all-gather"), while multiprocessors compute something else. A word behind each copy says that it has come; when all blocks
// of a kernel have read what came, its last one sets the word back.
//
// RANKS: how many there are. ELEMENT: of the rows.
#include "dense.cuh"

using Element = ELEMENT;
using V = Vector<Element>;

constexpr int THREADS = 512, TOGETHER = 4;

__device__ __forceinline__ void await_copy(const uint32_t* word) {
    uint32_t value;
    do {
        asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
    } while (!value);
}

// The last block to come here sets `count` words back, and what it counts by.
__device__ __forceinline__ void set_back(uint32_t* words, int count, uint32_t* counter) {
    __syncthreads();
    if (threadIdx.x) return;
    uint32_t before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
    if (before != gridDim.x - 1) return;
    for (int i = 0; i < count; ++i) words[i] = 0;
    *counter = 0;
}

// Adds to x [num_vectors of 16 bytes] the sum of the ranks' parts: this one's own, and from `parts` the others', one behind the other by rank, each in
// the room of part_vectors. arrived [RANKS - 1]: the words behind them. In the ranks' order, and rounded before it is added, as all_reduce.cu does it.
extern "C" __global__ void __launch_bounds__(THREADS)
    add_share(Element* x, const Element* own, const Element* parts, uint32_t* arrived, uint32_t* counter, int num_vectors, int part_vectors, int rank) {
    wait_for_earlier();
    if (threadIdx.x < RANKS - 1) await_copy(arrived + threadIdx.x);
    __syncthreads();
    for (int i = blockIdx.x * THREADS + threadIdx.x; i < num_vectors; i += gridDim.x * THREADS) {
        const size_t place = static_cast<size_t>(i) * V::SIZE;
        V values[RANKS], old = load_fresh(x + place), made;
#pragma unroll
        for (int r = 0; r < RANKS; ++r)
            values[r] = load_fresh(r == rank ? own + place : parts + static_cast<size_t>(r - (r > rank)) * part_vectors * V::SIZE + place);
#pragma unroll
        for (int e = 0; e < V::SIZE; ++e) {
            float sum = to_float(values[0].values[e]);
#pragma unroll
            for (int r = 1; r < RANKS; ++r) sum += to_float(values[r].values[e]);
            made.values[e] = from_float<Element>(to_float(old.values[e]) + to_float(from_float<Element>(sum)));
        }
        store(x + place, made);
    }
    set_back(arrived, RANKS - 1, counter);
}

// x [num_vectors] = what another rank made of its share, once it has come.
extern "C" __global__ void __launch_bounds__(THREADS)
    take_share(Element* x, const Element* made, uint32_t* arrived, uint32_t* counter, int num_vectors) {
    wait_for_earlier();
    if (threadIdx.x == 0) await_copy(arrived);
    __syncthreads();
    for (int begin = blockIdx.x * THREADS * TOGETHER + threadIdx.x; begin < num_vectors; begin += gridDim.x * THREADS * TOGETHER) {
        V values[TOGETHER];
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i)
            if (begin + i * THREADS < num_vectors) values[i] = load_fresh(made + static_cast<size_t>(begin + i * THREADS) * V::SIZE);
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i)
            if (begin + i * THREADS < num_vectors) store(x + static_cast<size_t>(begin + i * THREADS) * V::SIZE, values[i]);
    }
    set_back(arrived, 1, counter);
}
