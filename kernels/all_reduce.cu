// Exchanges through memory that all ranks can write, by one kernel each: no rank's copy engine or host takes part. RANKS: how many there are.
// A rank writes what it has into the other ranks' memory, and waits for theirs in its own: one way through the link, with no signal beside
// the values ("LL" of NCCL, FlashInfer's and TensorRT-LLM's Lamport kernels: a word that is not there yet is one that no value is). Each block
// exchanges with the block of the same index on every other rank and with no other, so that only those wait for each other.
#include "dense.cuh"

using Element = ELEMENT;
using V = Vector<Element>;

constexpr int THREADS = 256, VECTORS = 4;
constexpr int TOGETHER = RANKS == 2 ? 4 : RANKS <= 4 ? 2 : 1;  // vectors from each rank that a thread looks for at once
constexpr uint32_t NOTHING = 0x80000000u;  // float32's -0, or a pair of +0 and -0: these are sent as +0

__device__ __forceinline__ uint4 sendable(uint4 v) {
    return {v.x == NOTHING ? 0u : v.x, v.y == NOTHING ? 0u : v.y, v.z == NOTHING ? 0u : v.z, v.w == NOTHING ? 0u : v.w};
}

__device__ __forceinline__ bool has_come(uint4 v) { return v.x != NOTHING && v.y != NOTHING && v.z != NOTHING && v.w != NOTHING; }

__device__ __forceinline__ void put(uint4* place, uint4 v) {
    asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(place), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

__device__ __forceinline__ uint4 look(const uint4* place) {
    uint4 v;
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(place) : "memory");
    return v;
}

// This block's slots for what the others write. Each rank's memory has two sets of them, used in turn; a set has num_regions regions of
// `region` bytes from every rank, all NOTHING until they are written. Whoever has read a slot empties it: it is written again two exchanges
// later, by a rank that has by then what this one sent in the exchange between, which began when the emptying had ended (kernels wait for
// each other, and every exchange is one kernel).
struct Slots {
    unsigned char *memories[RANKS], *mine;
    size_t stride, region, own;
    int rank;

    __device__ __forceinline__ Slots(unsigned char* const* addresses, int num_regions, int region_bytes, int own_rank)
        : mine(addresses[own_rank]),
          stride(static_cast<size_t>(num_regions) * region_bytes),
          region(static_cast<size_t>(blockIdx.x) * region_bytes),
          own(0),
          rank(own_rank) {
#pragma unroll
        for (int r = 0; r < RANKS; ++r) memories[r] = addresses[r];
    }

    // turns: how many exchanges each block has made.
    __device__ __forceinline__ uint32_t begin(const uint32_t* turns) {
        const uint32_t turn = __ldcg(turns + blockIdx.x);
        own = turn % 2 * RANKS * stride + region + threadIdx.x * 16;
        return turn;
    }

    __device__ __forceinline__ void end(uint32_t* turns, uint32_t turn) {
        __syncthreads();  // every thread has read it
        if (threadIdx.x == 0) turns[blockIdx.x] = turn + 1;
    }

    // Of this thread's values that `source` sends, number i, in a rank's memory.
    __device__ __forceinline__ uint4* at(unsigned char* memory, int source, int i) const {
        return reinterpret_cast<uint4*>(memory + own + source * stride + static_cast<size_t>(i) * THREADS * 16);
    }

    __device__ __forceinline__ void send(int i, uint4 v) const {
#pragma unroll
        for (int r = 0; r < RANKS; ++r)
            if (r != rank) put(at(memories[r], rank, i), v);
    }

    // What the others sent as number i, in `values` at their places; this rank's own is not touched.
    __device__ __forceinline__ void look_for(int i, uint4 (&values)[RANKS]) const {
#pragma unroll
        for (int r = 0; r < RANKS; ++r)
            if (r != rank) values[r] = look(at(mine, r, i));
    }

    // One of them, waited for where it had not come yet; its place is empty again.
    __device__ __forceinline__ void take_one(int source, int i, uint4& value) const {
        uint4* place = at(mine, source, i);
        while (!has_come(value)) value = look(place);
        put(place, {NOTHING, NOTHING, NOTHING, NOTHING});
    }

    __device__ __forceinline__ void take(int i, uint4 (&values)[RANKS]) const {
#pragma unroll
        for (int r = 0; r < RANKS; ++r)
            if (r != rank) take_one(r, i, values[r]);
    }
};

// In the ranks' order: every rank gets the same bits.
__device__ __forceinline__ V add_parts(const V& own, const uint4 (&others)[RANKS], int rank) {
    V sum;
#pragma unroll
    for (int e = 0; e < V::SIZE; ++e) {
        float value = 0;
#pragma unroll
        for (int r = 0; r < RANKS; ++r) {
            const float one = to_float((r == rank ? own : V(others[r])).values[e]);
            value = r ? value + one : one;
        }
        sum.values[e] = from_float<Element>(value);
    }
    return sum;
}

__device__ __forceinline__ V add(const V& old, const V& sum) {
    V made;
#pragma unroll
    for (int e = 0; e < V::SIZE; ++e) made.values[e] = from_float<Element>(to_float(old.values[e]) + to_float(sum.values[e]));
    return made;
}

// out = the sum of the ranks' parts, added to residual where that is not null; num_vectors: of 16 bytes each, per_thread of them, at most VECTORS,
// by each thread. "One-shot": each rank sends all that it has to every other, and adds it all.
extern "C" __global__ void __launch_bounds__(THREADS)
    all_reduce(Element* out, const Element* part, const Element* residual, unsigned char* const* memories, uint32_t* turns, int num_vectors, int per_thread,
               int num_regions, int region, int rank) {
    const int begin = blockIdx.x * THREADS * per_thread + threadIdx.x;
    launch_dependents();
    Slots slots(memories, num_regions, region, rank);
    wait_for_earlier();
    const uint32_t turn = slots.begin(turns);
    V own[VECTORS], old[VECTORS];
    uint4 others[TOGETHER][RANKS];
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        const int place = begin + i * THREADS;
        if (i >= per_thread || place >= num_vectors) continue;
        own[i].bits = sendable(load_fresh(part + static_cast<size_t>(place) * V::SIZE).bits);
        slots.send(i, own[i].bits);
        if (residual) old[i] = load_fresh(residual + static_cast<size_t>(place) * V::SIZE);
    }
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        if (i % TOGETHER == 0)
#pragma unroll
            for (int j = 0; j < TOGETHER; ++j)
                if (i + j < per_thread && begin + (i + j) * THREADS < num_vectors) slots.look_for(i + j, others[j]);
        const int place = begin + i * THREADS;
        if (i >= per_thread || place >= num_vectors) continue;
        uint4(&values)[RANKS] = others[i % TOGETHER];
        slots.take(i, values);
        const V sum = add_parts(own[i], values, rank);
        store(out + static_cast<size_t>(place) * V::SIZE, residual ? add(old[i], sum) : sum);
    }
    slots.end(turns, turn);
}

// The same sums, to the bit but for zeros' signs, "two-shot": each rank adds a share of them, of which the others send it their parts, and sends the
// others what it made. A value goes 2 (RANKS - 1) / RANKS times through a link in place of RANKS - 1 times, and one way later. A block has RANKS shares
// one after the other, per_thread vectors of each by each thread.
extern "C" __global__ void __launch_bounds__(THREADS)
    all_reduce_two_shot(Element* out, const Element* part, const Element* residual, unsigned char* const* memories, uint32_t* turns, int num_vectors,
                        int per_thread, int num_regions, int region, int rank) {
    const int begin = blockIdx.x * THREADS * per_thread * RANKS + threadIdx.x;
    launch_dependents();
    Slots slots(memories, num_regions, region, rank);
    wait_for_earlier();
    const uint32_t turn = slots.begin(turns);
    const auto place_of = [&](int share, int i) { return begin + (share * per_thread + i) * THREADS; };
    const auto load_at = [&](const Element* values, int place) {
        return place < num_vectors ? load_fresh(values + static_cast<size_t>(place) * V::SIZE) : V(uint4{0, 0, 0, 0});
    };
    for (int i = 0; i < per_thread; ++i) {
        V parts[RANKS];
#pragma unroll
        for (int r = 0; r < RANKS; ++r)
            if (r != rank) parts[r] = load_at(part, place_of(r, i));
#pragma unroll
        for (int r = 0; r < RANKS; ++r)
            if (r != rank && place_of(r, i) < num_vectors) put(slots.at(slots.memories[r], rank, i), sendable(parts[r].bits));
    }
    for (int i = 0; i < per_thread; ++i) {
        const int place = place_of(rank, i);
        if (place >= num_vectors) break;
        uint4 others[RANKS];
        slots.look_for(i, others);
        const V own(sendable(load_at(part, place).bits));
        const V old = residual ? load_at(residual, place) : V(uint4{0, 0, 0, 0});
        slots.take(i, others);
        const V sum(sendable(add_parts(own, others, rank).bits));
        slots.send(per_thread + i, sum.bits);
        store(out + static_cast<size_t>(place) * V::SIZE, residual ? add(old, sum) : sum);
    }
    for (int i = 0; i < per_thread; ++i) {
        uint4 sums[RANKS];
        V old[RANKS];
#pragma unroll
        for (int r = 0; r < RANKS; ++r) {
            if (r == rank || place_of(r, i) >= num_vectors) continue;
            sums[r] = look(slots.at(slots.mine, r, per_thread + i));
            if (residual) old[r] = load_at(residual, place_of(r, i));
        }
#pragma unroll
        for (int r = 0; r < RANKS; ++r) {
            const int place = place_of(r, i);
            if (r == rank || place >= num_vectors) continue;
            slots.take_one(r, per_thread + i, sums[r]);
            store(out + static_cast<size_t>(place) * V::SIZE, residual ? add(old[r], V(sums[r])) : V(sums[r]));
        }
    }
    slots.end(turns, turn);
}

// What each rank has of rows of RANKS * row_vectors, put beside each other in out, in vectors of 16 bytes.
struct Rows {
    Element* out;
    int row_vectors, rank;

    // Vector number `place` of what `source` has of them.
    __device__ __forceinline__ Element* target(int place, int source) const {
        const int row = place / row_vectors;
        return out + (static_cast<size_t>(row * RANKS + source) * row_vectors + place - row * row_vectors) * V::SIZE;
    }

    // All that the others sent: per_thread vectors of each to each thread, from number `begin` on, where there are so many.
    __device__ __forceinline__ void take(const Slots& slots, int begin, int num_vectors, int per_thread) const {
        for (int first = 0; first < per_thread; first += TOGETHER) {
            uint4 others[TOGETHER][RANKS];
#pragma unroll
            for (int i = 0; i < TOGETHER; ++i)
                if (first + i < per_thread && begin + (first + i) * THREADS < num_vectors) slots.look_for(first + i, others[i]);
#pragma unroll
            for (int i = 0; i < TOGETHER; ++i) {
                const int place = begin + (first + i) * THREADS;
                if (first + i >= per_thread || place >= num_vectors) continue;
                slots.take(first + i, others[i]);
#pragma unroll
                for (int r = 0; r < RANKS; ++r)
                    if (r != rank) store(target(place, r), V(others[i][r]));
            }
        }
    }
};

// part [rows, row_vectors] of each rank -> out [rows, RANKS * row_vectors].
extern "C" __global__ void __launch_bounds__(THREADS)
    all_gather(Element* out, const Element* part, unsigned char* const* memories, uint32_t* turns, int num_vectors, int row_vectors, int per_thread,
               int num_regions, int region, int rank) {
    const int begin = blockIdx.x * THREADS * per_thread + threadIdx.x;
    launch_dependents();
    Slots slots(memories, num_regions, region, rank);
    wait_for_earlier();
    const uint32_t turn = slots.begin(turns);
    const Rows made{out, row_vectors, rank};
    for (int first = 0; first < per_thread; first += VECTORS) {
        V own[VECTORS];
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            const int place = begin + (first + i) * THREADS;
            if (first + i < per_thread && place < num_vectors) own[i].bits = sendable(load_fresh(part + static_cast<size_t>(place) * V::SIZE).bits);
        }
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            const int place = begin + (first + i) * THREADS;
            if (first + i >= per_thread || place >= num_vectors) continue;
            slots.send(first + i, own[i].bits);
            store(made.target(place, rank), own[i]);
        }
    }
    made.take(slots, begin, num_vectors, per_thread);
    slots.end(turns, turn);
}

// part [rows, row_vectors] of each rank -> out [count, RANKS * row_vectors]: of the rows that are this rank's, from rank * share on, what each rank has.
// Where there are fewer rows the last one is sent in their place, so that every block gets something from every rank: by that it knows them to have
// gone on.
extern "C" __global__ void __launch_bounds__(THREADS)
    share_rows(Element* out, const Element* part, unsigned char* const* memories, uint32_t* turns, int rows, int share, int count, int row_vectors,
               int per_thread, int num_regions, int region, int rank) {
    const int begin = blockIdx.x * THREADS * per_thread + threadIdx.x, num_vectors = count * row_vectors;
    launch_dependents();
    Slots slots(memories, num_regions, region, rank);
    wait_for_earlier();
    const uint32_t turn = slots.begin(turns);
    const Rows made{out, row_vectors, rank};
    for (int i = 0; i < per_thread; ++i) {
        const int place = begin + i * THREADS;
        if (place >= num_vectors) break;
        const int row = place / row_vectors, column = place - row * row_vectors;
        V own[RANKS];
#pragma unroll
        for (int r = 0; r < RANKS; ++r)
            own[r].bits = sendable(load_fresh(part + (static_cast<size_t>(min(r * share + row, rows - 1)) * row_vectors + column) * V::SIZE).bits);
#pragma unroll
        for (int r = 0; r < RANKS; ++r)
            if (r == rank) store(made.target(place, r), own[r]);
            else put(slots.at(slots.memories[r], rank, i), own[r].bits);
    }
    made.take(slots, begin, num_vectors, per_thread);
    slots.end(turns, turn);
}
