// What attention with tensor cores is made of: copies to shared memory and loads from it, products, stores to peers, and where the copies stand.
#pragma once
#include "attention_items.cuh"
#include "cluster.cuh"
#include "exp2.cuh"

__device__ __forceinline__ uint32_t shared_address(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void copy_async(uint32_t target, const void* source, bool is_wanted) {
    const int bytes = is_wanted ? 16 : 0;  // the rest is filled with zeros
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(target), "l"(source), "r"(bytes) : "memory");
}

__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}

__device__ __forceinline__ void load_transposed(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}

// Of numbers of float16, or of bfloat16.
template <bool IS_FLOAT16 = DTYPE == 1>
__device__ __forceinline__ void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    if constexpr (IS_FLOAT16)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    else
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

constexpr int ROW_BYTES = HEAD_DIM * 2, CHUNKS = HEAD_DIM / 8;  // of a query; of a key and a value of which numbers are kept
constexpr int HELD_BYTES = E4M3 ? HEAD_DIM : ROW_BYTES;         // of a key, a value

// Rows of ROW_BYTES; 16-byte chunks are swapped about by row, so that eight rows of one column lie in different banks. As chunk and
// row are combined by exclusive or, the address of chunk + 2 i is that of an even chunk xor 32 i.
__device__ __forceinline__ uint32_t swizzle(int row, int chunk) { return row * ROW_BYTES + ((chunk ^ (row & 7)) << 4); }

#if CLUSTER > 1
__device__ __forceinline__ uint32_t peer_address(uint32_t address, int rank) {
    uint32_t result;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(result) : "r"(address), "r"(rank));
    return result;
}
__device__ __forceinline__ void store_peer(uint32_t address, float a, float b) {
    asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(a), "f"(b) : "memory");
}
#endif

// The side of the pipeline that runs ahead: which tile to load next. The same in all threads of a warp but for the words and pages.
struct Loader {
    int query_start, row_start, num_rows, kv_head, first_new, table_row, is_prefix;
    int token, last, next, end;
    int word, next_word;       // of the current item and the one after it, in lane i word i
    int pages, window, limit;  // lane i: the id of page window + i of those before `limit`
    int later_pages;           // the window after that; windows overlap, so that a tile lies in one
    int num_items, num_tiles;
    bool is_first;
};
constexpr int OVERLAP = PAGES_PER_TILE - 1;

__device__ __forceinline__ void take_item(Loader& l, int word, int rank) {
    l.word = word;
    l.query_start = __shfl_sync(~0u, word, 0);
    l.row_start = __shfl_sync(~0u, word, 1);
    l.num_rows = __shfl_sync(~0u, word, 2);
    l.kv_head = __shfl_sync(~0u, word, 3);
    const int begin = __shfl_sync(~0u, word, 4), end = __shfl_sync(~0u, word, 5);
    l.first_new = __shfl_sync(~0u, word, 6);
    l.table_row = __shfl_sync(~0u, word, 7);
    l.is_prefix = CASCADE ? __shfl_sync(~0u, word, 14) : 0;
    split_range(begin, end, rank, l.token, l.last);
    l.is_first = true;
}
