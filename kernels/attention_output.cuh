// What lies where in the shared memory of attention with tensor cores, and how an item's sums leave their threads.
#pragma once
#include "attention_codes.cuh"
#include "attention_merge.cuh"

constexpr int M_TILES = (MAX_ROWS + 15) / 16;
constexpr int HALVES = E4M3 && MAX_ROWS <= 8 ? 1 : 2;  // of an m-tile's sixteen rows, that may be an item's
constexpr int K_STEPS = HEAD_DIM / 16;
constexpr int COLUMNS = HEAD_DIM / WARPS;  // of the output, per warp
constexpr int PAIRS = COLUMNS / 16;
constexpr int TOKEN_BYTES = NUM_KV_HEADS * HELD_BYTES;  // in a page
constexpr int KV_BYTES = TILE * HELD_BYTES;
// Queries stay in registers where there is room; then a buffer is free one tile earlier. (Constants by the number of m-tiles in use.)
constexpr bool is_query_held(int m_tiles) { return m_tiles * HEAD_DIM <= (E4M3 ? 128 : 256); }
// Values go to registers before the weights are known, where there is room.
constexpr bool are_values_early(int m_tiles) { return m_tiles <= 2 && HEAD_DIM <= 128; }
// Shared memory; attention.py computes the same sum.
constexpr int QUERY_BUFFERS = is_query_held(M_TILES) ? STAGES - 1 : STAGES;
constexpr int QUERY_BYTES = MAX_ROWS * ROW_BYTES;
constexpr int WEIGHT_BYTES = M_TILES * 16 * TILE * 2;
constexpr int WEIGHT_OFFSET = STAGES * 2 * KV_BYTES;
constexpr int QUERY_OFFSET = WEIGHT_OFFSET + WEIGHT_BYTES;
constexpr int PEAK_OFFSET = QUERY_OFFSET + QUERY_BUFFERS * QUERY_BYTES;  // [WARPS][rows] floats: maxima, then sums, then merge_last's flag
constexpr int ITEM_OFFSET = PEAK_OFFSET + WARPS * M_TILES * 16 * 4;    // [STAGES] items
#if CLUSTER > 1
constexpr int PEER_OFFSET = ITEM_OFFSET + STAGES * 64;  // [CLUSTER][MAX_ROWS] (max, sum), then [..][WIDTH] floats
#endif

// A block's sums of an item, their largest scores and what weights add up to, by m-tile and row of a thread: divided to the output, or as a partial
// result. Blocks of a cluster merge theirs first.
template <int M>
__device__ __forceinline__ void store_output(Number* out, const Item& item, const Partials& partials, float (&sums)[M][2 * PAIRS][4], const float (&peak)[M][2],
                                             const float (&total)[M][2], uint8_t* memory, int rank) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    // Two neighbouring columns of the output, and their sums in row h.
    auto column_of = [&](int n) { return warp * COLUMNS + (E4M3 ? n / 2 * 16 + (lane & 3) * 4 + n % 2 * 2 : n * 8 + (lane & 3) * 2); };
    auto pair = [&](float(&own)[2 * PAIRS][4], int h, int n) {
        return E4M3 ? make_float2(own[n / 2 * 2][2 * h + n % 2], own[n / 2 * 2 + 1][2 * h + n % 2]) : make_float2(own[n][2 * h], own[n][2 * h + 1]);
    };
#if CLUSTER == 1
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
        for (int h = 0; h < HALVES; ++h) {
            const int row = m * 16 + h * 8 + (lane >> 2);
            if (row >= item.num_rows) continue;
            if (item.num_pieces == 1) {
                Number* target = out + output_offset(item, row);
                const float inverse = 1 / total[m][h];
#pragma unroll
                for (int n = 0; n < 2 * PAIRS; ++n) {
                    const float2 own = pair(sums[m], h, n);
                    *(Pair*)(target + column_of(n)) = to_pair(own.x * inverse, own.y * inverse);
                }
            } else {
                float* target = partials.sum(item.piece, row);
#pragma unroll
                for (int n = 0; n < 2 * PAIRS; ++n) *(float2*)(target + column_of(n)) = pair(sums[m], h, n);
                if (warp == 0 && (lane & 3) == 0) *partials.stat(item.piece, 0, row) = make_float2(peak[m][h], total[m][h]);
            }
        }
#else
    // Each CTA gets some columns of all rows from its peers.
    const uint32_t stats = shared_address(memory) + PEER_OFFSET, columns = stats + CLUSTER * MAX_ROWS * 8;
    await_cluster();  // all have begun, and read what they had of the item before
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
        for (int h = 0; h < HALVES; ++h) {
            const int row = m * 16 + h * 8 + (lane >> 2), place = rank * MAX_ROWS + row;
            if (row >= item.num_rows) continue;
#pragma unroll
            for (int n = 0; n < 2 * PAIRS; ++n) {
                const int column = column_of(n);
                const float2 own = pair(sums[m], h, n);
                store_peer(peer_address(columns + (place * WIDTH + column % WIDTH) * 4, column / WIDTH), own.x, own.y);
            }
            for (int r = warp * 4 + (lane & 3); r < CLUSTER; r += 4 * WARPS) store_peer(peer_address(stats + place * 8, r), peak[m][h], total[m][h]);
        }
    arrive_cluster();
    await_cluster();
    const float2* peer_stats = (const float2*)(memory + PEER_OFFSET);
    const float* peer_sums = (const float*)(peer_stats + CLUSTER * MAX_ROWS);
    for (int i = threadIdx.x; i < item.num_rows * (WIDTH / 2); i += THREADS) {
        const int row = i / (WIDTH / 2), column = i % (WIDTH / 2) * 2;
        float larger = -INFINITY, all = 0, a = 0, b = 0;
#pragma unroll
        for (int r = 0; r < CLUSTER; ++r) larger = fmaxf(larger, peer_stats[r * MAX_ROWS + row].x);
        const float reference = larger == -INFINITY ? 0 : larger;
#pragma unroll
        for (int r = 0; r < CLUSTER; ++r) {
            const float2 stat = peer_stats[r * MAX_ROWS + row], sum = *(const float2*)(peer_sums + (r * MAX_ROWS + row) * WIDTH + column);
            const float weight = exp2_fast(stat.x - reference);
            all += stat.y * weight, a += sum.x * weight, b += sum.y * weight;
        }
        if (item.num_pieces == 1) {
            *(Pair*)(out + output_offset(item, row) + rank * WIDTH + column) = to_pair(a / all, b / all);
        } else {
            *(float2*)(partials.sum(item.piece, row) + rank * WIDTH + column) = make_float2(a, b);
            if (column == 0) *partials.stat(item.piece, rank, row) = make_float2(larger, all);
        }
    }
    __syncwarp();
    arrive_cluster_relaxed();
#endif
}
