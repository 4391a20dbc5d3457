// Attention of a few queries per request over paged keys and values, and the plan that spreads one step's work over the GPU.
//
// Compile-time: DTYPE 0 bfloat16, 1 float16, 2 float32; GROUP query heads per KV head; NUM_KV_HEADS; HEAD_DIM; PAGE_SIZE;
// MAX_ROWS most rows (queries x GROUP) of one work item; CLUSTER CTAs that share an item; STAGES of the KV pipeline; MIN_CTAS per SM;
// CASCADE: requests may share a prefix, which then is read once for all of them.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

constexpr int TILE = 64;  // keys of one pipeline stage; also what the plan counts in
constexpr int THREADS = 128, WARPS = THREADS / 32;
constexpr float LOG2E = 1.4426950408889634f;

// One piece of work: some rows of one request and KV head against a range of its keys. A row is a query head of a query.
struct Item {
    int query_start;    // packed index of the request's first query; of a prefix, where its list of packed indices begins
    int row_start;      // first row of the item among the request's rows (query * GROUP + head)
    int num_rows;       // 0: the end of a worker's list
    int kv_head;
    int token_begin, token_end;
    int first_visible;  // query j sees the keys 0 .. first_visible + j
    int table_row;      // row of the page table
    int segment;        // which rows and head: what the pieces of one split have in common
    int num_pieces;     // 1: not split; 0: merge_attention merges; else the last piece to finish merges them
    int first_slot;     // slot of partial results of the first piece
    int slot;
    int next, end;      // in a Start: the worker's further items
    int is_prefix;      // rows are queries of many requests
    int padding;
};
constexpr int ITEM_WORDS = 16, START_WORDS = 32;
static_assert(sizeof(Item) == 4 * ITEM_WORDS, "items are read as words");

// What a CTA begins with, in one read: its worker's first item and the first pages of its own part of it.
constexpr int START_PAGES = START_WORDS - ITEM_WORDS;
struct Start {
    Item item;
    int page_ids[START_PAGES];
};

constexpr int PAGE_SHIFT = __builtin_ctz(PAGE_SIZE);
constexpr int PAGES_PER_TILE = (PAGE_SIZE - 16 + TILE - 1) / PAGE_SIZE + 1;  // ranges start at multiples of 16

// The part of an item's keys that one CTA of the cluster takes.
__device__ __forceinline__ void split_range(int begin, int end, int rank, int& first, int& last) {
    if (CLUSTER == 1) {
        first = begin, last = end;
        return;
    }
    const int share = (end - begin + CLUSTER * 16 - 1) / (CLUSTER * 16) * 16;
    first = begin + rank * share;
    last = min(end, first + share);
}

// -- the plan -------------------------------------------------------------------------------------------------------------------

constexpr int PLAN_THREADS = 256;

// Exclusive prefix sums of values[0..count], in place; values[count] becomes the total.
__device__ void scan(int* values, int count, int* warp_sums) {
    const int per = (count + PLAN_THREADS - 1) / PLAN_THREADS, begin = min(count, (int)threadIdx.x * per), end = min(count, begin + per);
    int sum = 0;
    for (int i = begin; i < end; ++i) sum += values[i];
    int inclusive = sum;
    for (int d = 1; d < 32; d *= 2) {
        const int other = __shfl_up_sync(~0u, inclusive, d);
        if ((threadIdx.x & 31) >= d) inclusive += other;
    }
    if ((threadIdx.x & 31) == 31) warp_sums[threadIdx.x / 32] = inclusive;
    __syncthreads();
    int before = inclusive - sum, total = 0;
    for (int w = 0; w < PLAN_THREADS / 32; ++w) {
        if (w < threadIdx.x / 32) before += warp_sums[w];
        total += warp_sums[w];
    }
    __syncthreads();
    for (int i = begin; i < end; ++i) {
        const int value = values[i];
        values[i] = before;
        before += value;
    }
    if (threadIdx.x == 0) values[count] = total;
    __syncthreads();
}

// The last place whose value is at most x.
__device__ int find(const int* values, int count, int x) {
    int low = 0, high = count;
    while (low < high) {
        const int middle = (low + high) / 2;
        if (values[middle] <= x) low = middle + 1; else high = middle;
    }
    return low - 1;
}

// A segment: the rows of one block of one request, and a KV head. With CASCADE, the requests are followed by the shared prefixes,
// each of which counts as a request with all its members' queries, and a member begins where its prefix ends.
struct Segment {
    int request, index, tile, num_tiles, start;  // index among all; tile: the one asked for; start: the first tile among all
};

struct PlanSizes {
    int num_requests, page_stride, num_workers, min_tiles, num_items, num_tokens;
};

// The slot of a segment's p-th piece. Without CASCADE only a worker's first (even) and last (odd) item can be a piece.
__device__ __forceinline__ int slot_of(int first_slot, int p) { return CASCADE ? first_slot + p : p == 0 ? first_slot : (first_slot / 2 + p) * 2; }

// Splits all requests' keys into work for `num_workers` workers (a worker is a cluster). Every CTA finds the same bounds and writes
// its share of the lists. For CASCADE, token_places [T]: first segment, index of the query, first segment of the prefix and index
// there; and segment_pieces [segments]: first slot and number of pieces. Shared memory: PLAN_INTS(B) + W + 1 ints.
#define PLAN_INTS(b) (CASCADE ? 10 * (b) + 2 : 3 * (b) + 2)
extern "C" __global__ void __launch_bounds__(PLAN_THREADS)
    plan_attention(Start* starts, Item* items, int4* token_places, int2* segment_pieces, const int* cu_query_lens, const int* seq_lens,
                   const int* page_table, const int* table_rows, const int* prefix_group, const int* prefix_len, PlanSizes sizes) {
    extern __shared__ int shared[];
    __shared__ int warp_sums[PLAN_THREADS / 32], longest_shared;
    const int num_requests = sizes.num_requests, num_workers = sizes.num_workers, num_all = CASCADE ? 2 * num_requests : num_requests;
    int *counts = shared, *tiles = counts + num_all, *segments = tiles + num_all + 1;  // counts: tiles of one segment
    int *members = segments + num_all + 1, *prefix_queries = members + num_requests, *prefix_rows = prefix_queries + num_requests + 1;
    int* bounds = shared + PLAN_INTS(num_requests);
    auto queries_of = [&](int r) {
        return r < num_requests ? cu_query_lens[r + 1] - cu_query_lens[r] : prefix_queries[r - num_requests + 1] - prefix_queries[r - num_requests];
    };
    auto prefix_of = [&](int r) {  // of a request: the prefix that it shares with others, or -1
        if (!CASCADE || cu_query_lens[r + 1] == cu_query_lens[r]) return -1;
        const int group = prefix_group[r];
        return group >= 0 && prefix_len[r] > 0 && members[group] > 1 ? group : -1;
    };

    if (threadIdx.x == 0) longest_shared = 0;
    if (CASCADE) {
        for (int g = threadIdx.x; g < num_requests; g += PLAN_THREADS) members[g] = prefix_queries[g] = prefix_rows[g] = 0;
        __syncthreads();
        for (int b = threadIdx.x; b < num_requests; b += PLAN_THREADS) {
            const int queries = cu_query_lens[b + 1] - cu_query_lens[b], group = prefix_group[b];
            if (queries == 0 || group < 0 || prefix_len[b] == 0) continue;
            atomicAdd(&members[group], 1);
            atomicAdd(&prefix_queries[group], queries);
            atomicMax(&prefix_rows[group], b);  // any of them
        }
        __syncthreads();
        for (int g = threadIdx.x; g < num_requests; g += PLAN_THREADS)
            if (members[g] < 2) prefix_queries[g] = 0;
        __syncthreads();
        scan(prefix_queries, num_requests, warp_sums);
    }
    __syncthreads();
    for (int r = threadIdx.x; r < num_all; r += PLAN_THREADS) {
        const int num_rows = queries_of(r) * GROUP;
        int length = 0;
        if (num_rows > 0) length = r >= num_requests ? prefix_len[prefix_rows[r - num_requests]] : seq_lens[r] - (prefix_of(r) >= 0 ? prefix_len[r] : 0);
        counts[r] = (length + TILE - 1) / TILE;
        segments[r] = counts[r] > 0 ? (num_rows + MAX_ROWS - 1) / MAX_ROWS * NUM_KV_HEADS : 0;
        tiles[r] = counts[r] * segments[r];
        atomicMax(&longest_shared, counts[r]);
    }
    __syncthreads();
    scan(tiles, num_all, warp_sums);
    scan(segments, num_all, warp_sums);
    const int total = tiles[num_all], num_segments = segments[num_all], longest = longest_shared, least = CLUSTER * sizes.min_tiles;

    // Where every segment gets as many workers as every other and that is about as even as can be, no worker crosses segments.
    int pieces = 0;
    if (num_segments > 0 && num_segments <= num_workers) {
        pieces = max(1, min(num_workers / num_segments, longest / least));
        const int even = (longest + pieces - 1) / pieces;
        if (even > total / num_workers + total / num_workers / 8 + least * 3 / 2) pieces = 0;
    }
    // Else workers take equal runs of tiles, whose ends move to the end of a segment that is near.
    const int num_active = max(1, min(num_workers, total / least));
    auto segment_at = [&](int index) {
        Segment s;
        s.request = find(segments, num_all, index);
        s.index = index;
        s.num_tiles = counts[s.request];
        s.start = tiles[s.request] + (index - segments[s.request]) * s.num_tiles;
        s.tile = 0;
        return s;
    };
    auto locate = [&](int tile) {
        const int request = find(tiles, num_all, tile);
        Segment s = segment_at(segments[request] + (tile - tiles[request]) / counts[request]);
        s.tile = tile - s.start;
        return s;
    };
    if (pieces == 0) {
        const int slack = max(1, min(total / num_active / 8, 2 * CLUSTER));
        for (int w = threadIdx.x; w <= num_workers; w += PLAN_THREADS) {
            int bound = w >= num_active ? total : (int)((int64_t)total * w / num_active);
            if (w > 0 && bound < total) {
                const Segment s = locate(bound);
                const int left = s.num_tiles - s.tile;
                if (s.tile <= min(slack, left)) bound -= s.tile; else if (left <= slack) bound += left;
            }
            bounds[w] = bound;
        }
        __syncthreads();
    }

    auto make = [&](int worker, const Segment& s, int tile_begin, int tile_end, int first_worker, int num_pieces, bool is_odd) {
        Item item;
        const bool is_prefix = s.request >= num_requests;
        const int source = is_prefix ? prefix_rows[s.request - num_requests] : s.request;  // whose pages
        const int local = s.index - segments[s.request], queries = queries_of(s.request), prefix = prefix_of(source);
        const int begin = !is_prefix && prefix >= 0 ? prefix_len[source] : 0, length = is_prefix ? prefix_len[source] : seq_lens[source];
        item.query_start = is_prefix ? sizes.num_items * ITEM_WORDS + prefix_queries[s.request - num_requests] : cu_query_lens[s.request];
        item.row_start = local / NUM_KV_HEADS * MAX_ROWS;
        item.num_rows = min(MAX_ROWS, queries * GROUP - item.row_start);
        item.kv_head = local % NUM_KV_HEADS;
        item.token_begin = begin + tile_begin * TILE;
        item.token_end = min(begin + tile_end * TILE, length);
        item.first_visible = is_prefix ? 1 << 30 : length - queries;
        item.table_row = table_rows[source];
        item.segment = s.index;
        item.num_pieces = prefix >= 0 ? 0 : num_pieces;
        item.first_slot = CASCADE ? s.index + first_worker : 2 * first_worker + is_odd;
        item.slot = slot_of(item.first_slot, worker - first_worker);
        item.is_prefix = is_prefix;
        item.next = item.end = item.padding = 0;
        if (CASCADE && worker == first_worker) segment_pieces[s.index] = make_int2(item.first_slot, num_pieces);
        return item;
    };
    // Item i of a worker, of those that its run of tiles crosses.
    auto piece_of = [&](int worker, int i) {
        const int low = bounds[worker], high = bounds[worker + 1];
        const Segment s = segment_at(locate(low).index + i);
        const int first = max(low, s.start), last = min(high, s.start + s.num_tiles);
        const int first_worker = find(bounds, num_workers + 1, s.start), last_worker = find(bounds, num_workers + 1, s.start + s.num_tiles - 1);
        return make(worker, s, first - s.start, last - s.start, first_worker, last_worker - first_worker + 1, bounds[first_worker] < s.start);
    };
    for (int cta = threadIdx.x * gridDim.x + blockIdx.x; cta < num_workers * CLUSTER; cta += PLAN_THREADS * gridDim.x) {
        const int worker = cta / CLUSTER, rank = cta % CLUSTER;
        Start start;
        start.item.num_rows = 0;
        if (pieces > 0) {
            if (worker / pieces < num_segments) {
                const Segment s = segment_at(worker / pieces);
                const int count = min(pieces, s.num_tiles), piece = worker % pieces;
                if (piece < count)
                    start.item = make(worker, s, piece * s.num_tiles / count, (piece + 1) * s.num_tiles / count, worker - piece, count, false);
            }
        } else if (bounds[worker] < bounds[worker + 1]) {
            start.item = piece_of(worker, 0);
            start.item.next = start.item.segment + worker;
            start.item.end = locate(bounds[worker + 1] - 1).index + worker;
        }
        if (start.item.num_rows > 0) {
            int first, last;
            split_range(start.item.token_begin, start.item.token_end, rank, first, last);
            for (int i = 0; i < START_PAGES; ++i) {
                const int page = (first >> PAGE_SHIFT) + i;
                start.page_ids[i] = page << PAGE_SHIFT < last ? page_table[(int64_t)start.item.table_row * sizes.page_stride + page] : 0;
            }
        }
        starts[cta] = start;
    }
    if (pieces == 0) {
        for (int worker = threadIdx.x / 32 * gridDim.x + blockIdx.x; worker < num_workers; worker += PLAN_THREADS / 32 * gridDim.x) {
            if (bounds[worker] >= bounds[worker + 1]) continue;
            const int first = locate(bounds[worker]).index, last = locate(bounds[worker + 1] - 1).index;
            for (int i = 1 + (threadIdx.x & 31); i <= last - first; i += 32) items[first + worker + i - 1] = piece_of(worker, i);
        }
    }
    if (CASCADE && blockIdx.x == 0) {
        for (int t = cu_query_lens[num_requests] + threadIdx.x; t < sizes.num_tokens; t += PLAN_THREADS) token_places[t].x = -1;
        for (int b = threadIdx.x; b < num_requests; b += PLAN_THREADS) {
            const int group = prefix_of(b), queries = queries_of(b);
            int place = 0;
            if (group >= 0)
                for (int other = 0; other < b; ++other)
                    if (prefix_of(other) == group) place += queries_of(other);
            for (int j = 0; j < queries; ++j) {
                const int token = cu_query_lens[b] + j;
                token_places[token] = group < 0 ? make_int4(-1, 0, 0, 0) : make_int4(segments[b], j, segments[num_requests + group], place + j);
                if (group >= 0) ((int*)(items + sizes.num_items))[prefix_queries[group] + place + j] = token;
            }
        }
    }
    __threadfence();  // append_attention may begin as soon as this kernel ends, and reads the lists before it waits for anything
}

// -- attention ------------------------------------------------------------------------------------------------------------------

#if DTYPE == 0
using Number = __nv_bfloat16;
using Pair = __nv_bfloat162;
__device__ __forceinline__ Pair to_pair(float a, float b) { return __floats2bfloat162_rn(a, b); }
#elif DTYPE == 1
using Number = __half;
using Pair = __half2;
__device__ __forceinline__ Pair to_pair(float a, float b) { return __floats2half2_rn(a, b); }
#else
using Number = float;
using Pair = float2;
__device__ __forceinline__ Pair to_pair(float a, float b) { return make_float2(a, b); }
#endif

// Launched programmatically, a kernel begins before the one ahead of it on the stream has ended: what that one writes is there after this.
__device__ __forceinline__ void wait_for_writers() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

constexpr int WIDTH = HEAD_DIM / CLUSTER;  // columns of the output that one CTA of a cluster finishes
static_assert(WIDTH % 8 == 0, "eight columns are merged at a time");

__device__ __forceinline__ int64_t output_offset(const Item& item, int row) {
    const int r = item.row_start + row;
    return ((int64_t)(item.query_start + r / GROUP) * NUM_KV_HEADS + item.kv_head) * (GROUP * HEAD_DIM) + r % GROUP * HEAD_DIM;
}

// Partial results: [slot][row][HEAD_DIM] sums of exp2(score - max) * value, then [slot][rank][row] (max, sum of exp2).
struct Partials {
    float* sums;
    float2* stats;
    __device__ float* sum(int slot, int row) const { return sums + ((int64_t)slot * MAX_ROWS + row) * HEAD_DIM; }
    __device__ float2* stat(int slot, int rank, int row) const { return stats + ((int64_t)slot * CLUSTER + rank) * MAX_ROWS + row; }
};

// Eight columns of a row, merged from partial results.
struct Merged {
    float peak = -INFINITY, total = 0, sums[8] = {};
    // Adds `count` pieces, four at a time so that their loads overlap.
    __device__ __forceinline__ void add(const Partials& partials, int first_slot, int count, int rank, int row, int column) {
        constexpr int BATCH = 4;
        for (int begin = 0; begin < count; begin += BATCH) {
            float2 stats[BATCH];
            float4 low[BATCH], high[BATCH];
#pragma unroll
            for (int i = 0; i < BATCH; ++i) {
                const int slot = slot_of(first_slot, min(begin + i, count - 1));
                stats[i] = __ldcg(partials.stat(slot, rank, row));
                low[i] = __ldcg((const float4*)(partials.sum(slot, row) + column));
                high[i] = __ldcg((const float4*)(partials.sum(slot, row) + column) + 1);
            }
            float larger = peak;
#pragma unroll
            for (int i = 0; i < BATCH; ++i) larger = fmaxf(larger, stats[i].x);
            const float reference = larger == -INFINITY ? 0 : larger, old = exp2f(peak - reference);
            peak = larger;
            total *= old;
#pragma unroll
            for (int c = 0; c < 8; ++c) sums[c] *= old;
#pragma unroll
            for (int i = 0; i < BATCH; ++i) {
                const float weight = begin + i < count ? exp2f(stats[i].x - reference) : 0;
                total += stats[i].y * weight;
                sums[0] += low[i].x * weight, sums[1] += low[i].y * weight, sums[2] += low[i].z * weight, sums[3] += low[i].w * weight;
                sums[4] += high[i].x * weight, sums[5] += high[i].y * weight, sums[6] += high[i].z * weight, sums[7] += high[i].w * weight;
            }
        }
    }
    __device__ __forceinline__ void store(Number* target) const {
        const float inverse = 1 / total;
#pragma unroll
        for (int c = 0; c < 8; c += 2) ((Pair*)target)[c / 2] = to_pair(sums[c] * inverse, sums[c + 1] * inverse);
    }
};

// Called by a CTA that has stored its partial result of a split: the last one to do so merges all of them. flag: in shared memory.
__device__ void merge_last(Number* out, const Item& item, const Partials& partials, int* counters, int rank, int* flag) {
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        int* counter = counters + item.segment * CLUSTER + rank;
        *flag = atomicAdd(counter, 1) == item.num_pieces - 1;
        if (*flag) *counter = 0;  // for the next launch
        __threadfence();
    }
    __syncthreads();
    if (!*flag) return;
    for (int i = threadIdx.x; i < item.num_rows * (WIDTH / 8); i += THREADS) {
        const int row = i / (WIDTH / 8), column = rank * WIDTH + i % (WIDTH / 8) * 8;
        Merged merged;
        merged.add(partials, item.first_slot, item.num_pieces, rank, row, column);
        merged.store(out + output_offset(item, row) + column);
    }
}

#if CASCADE

// Merges what the queries that share a prefix have from the prefix and from their own tokens. One CTA per token and KV head.
extern "C" __global__ void __launch_bounds__(THREADS) merge_attention(Number* out, float* partial_sums, float2* partial_stats, const int4* token_places,
                                                                      const int2* segment_pieces) {
    wait_for_writers();
    const int4 place = token_places[blockIdx.x];
    if (place.x < 0) return;
    const Partials partials{partial_sums, partial_stats};
    for (int i = threadIdx.x; i < GROUP * (HEAD_DIM / 8); i += THREADS) {
        const int head = i / (HEAD_DIM / 8), column = i % (HEAD_DIM / 8) * 8, rank = column / WIDTH;
        Merged merged;
#pragma unroll
        for (int part = 0; part < 2; ++part) {
            const int row = (part ? place.w : place.y) * GROUP + head;
            const int2 pieces = segment_pieces[(part ? place.z : place.x) + row / MAX_ROWS * NUM_KV_HEADS + blockIdx.y];
            merged.add(partials, pieces.x, pieces.y, rank, row % MAX_ROWS, column);
        }
        merged.store(out + (((int64_t)blockIdx.x * NUM_KV_HEADS + blockIdx.y) * GROUP + head) * HEAD_DIM + column);
    }
}

#endif

#if DTYPE == 2

// float32 without tensor cores: exact products; a warp takes a row, a lane a key, then a lane some columns.
extern "C" __global__ void __launch_bounds__(THREADS) append_attention(Number* out, const Number* query, const Number* key_pages,
                                                                       const Number* value_pages, const int* page_table, const Start* starts,
                                                                       const Item* items, float* partial_sums, float2* partial_stats, int* counters,
                                                                       int query_stride, int page_stride) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    const Partials partials{partial_sums, partial_stats};
    __shared__ int flag;
    wait_for_writers();
    Item item = starts[blockIdx.x].item;
    const int next = item.next, end = item.end;
    for (int i = next; item.num_rows > 0; ++i) {
        for (int row = warp; row < item.num_rows; row += WARPS) {
            const int r = item.row_start + row, visible = min(item.token_end, item.first_visible + r / GROUP + 1);
            const float4* q = (const float4*)(query + (int64_t)(item.query_start + r / GROUP) * query_stride + (item.kv_head * GROUP + r % GROUP) * HEAD_DIM);
            float peak = -INFINITY, total = 0, sums[HEAD_DIM / 32] = {};
            for (int token = item.token_begin; token < visible; token += 32) {
                const int key = min(token + lane, visible - 1);
                const int64_t page = page_table[(int64_t)item.table_row * page_stride + (key >> PAGE_SHIFT)];
                const int64_t offset = ((page * PAGE_SIZE + (key & (PAGE_SIZE - 1))) * NUM_KV_HEADS + item.kv_head) * HEAD_DIM;
                float score = 0;
#pragma unroll 4
                for (int d = 0; d < HEAD_DIM / 4; ++d) {
                    const float4 a = q[d], b = ((const float4*)(key_pages + offset))[d];
                    score = fmaf(a.x, b.x, fmaf(a.y, b.y, fmaf(a.z, b.z, fmaf(a.w, b.w, score))));
                }
                score = token + lane < visible ? score * (LOG2E * rsqrtf(HEAD_DIM)) : -INFINITY;
                float larger = fmaxf(peak, score);
                for (int d = 16; d; d /= 2) larger = fmaxf(larger, __shfl_xor_sync(~0u, larger, d));
                const float old = exp2f(peak - larger), weight = exp2f(score - larger);
                total = total * old + weight;
                for (int c = 0; c < HEAD_DIM / 32; ++c) sums[c] *= old;
                for (int k = 0; k < min(32, visible - token); ++k) {
                    const float w = __shfl_sync(~0u, weight, k);
                    const Number* value = value_pages + __shfl_sync(~0u, offset, k);
#pragma unroll
                    for (int c = 0; c < HEAD_DIM / 32; ++c) sums[c] = fmaf(w, value[c * 32 + lane], sums[c]);
                }
                peak = larger;
            }
            for (int d = 16; d; d /= 2) total += __shfl_xor_sync(~0u, total, d);
            const float inverse = item.num_pieces == 1 ? 1 / total : 1;
            Number* target = item.num_pieces == 1 ? out + output_offset(item, row) : partials.sum(item.slot, row);
            for (int c = 0; c < HEAD_DIM / 32; ++c) target[c * 32 + lane] = sums[c] * inverse;
            if (item.num_pieces != 1 && lane == 0) *partials.stat(item.slot, 0, row) = make_float2(peak, total);
        }
        if (item.num_pieces > 1) merge_last(out, item, partials, counters, 0, &flag);
        if (i >= end) break;
        item = items[i];
    }
}

#else

constexpr int M_TILES = (MAX_ROWS + 15) / 16;
constexpr int K_STEPS = HEAD_DIM / 16;
constexpr int COLUMNS = HEAD_DIM / WARPS;  // of the output, per warp
constexpr int PAIRS = COLUMNS / 16;
constexpr int ROW_BYTES = HEAD_DIM * 2, CHUNKS = HEAD_DIM / 8;
constexpr int TOKEN_BYTES = NUM_KV_HEADS * ROW_BYTES;
constexpr int KV_BYTES = TILE * ROW_BYTES;
// Queries stay in registers where there is room; then a slot is free one tile earlier. (Constants by the number of m-tiles in use.)
constexpr bool is_query_held(int m_tiles) { return m_tiles * HEAD_DIM <= 256; }
// Values go to registers before the weights are known, where there is room.
constexpr bool are_values_early(int m_tiles) { return m_tiles <= 2 && HEAD_DIM <= 128; }
// Shared memory; attention.py computes the same sum.
constexpr int QUERY_SLOTS = is_query_held(M_TILES) ? STAGES - 1 : STAGES;
constexpr int QUERY_BYTES = MAX_ROWS * ROW_BYTES;
constexpr int WEIGHT_BYTES = M_TILES * 16 * TILE * 2;
constexpr int WEIGHT_OFFSET = STAGES * 2 * KV_BYTES;
constexpr int QUERY_OFFSET = WEIGHT_OFFSET + WEIGHT_BYTES;
constexpr int PEAK_OFFSET = QUERY_OFFSET + QUERY_SLOTS * QUERY_BYTES;  // [WARPS][rows] floats: maxima, then sums, then merge_last's flag
constexpr int ITEM_OFFSET = PEAK_OFFSET + WARPS * M_TILES * 16 * 4;    // [STAGES] items
constexpr int PEER_OFFSET = ITEM_OFFSET + STAGES * 64;                 // [2][CLUSTER][MAX_ROWS] (max, sum), then [..][WIDTH] floats
constexpr int PEER_BYTES = CLUSTER == 1 ? 0 : 2 * CLUSTER * MAX_ROWS * (8 + WIDTH * 4);

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

__device__ __forceinline__ void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#if DTYPE == 0
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#endif
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

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
__device__ __forceinline__ void arrive_cluster() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void wait_cluster() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
#define CLUSTER_DIMS __cluster_dims__(CLUSTER, 1, 1)
#else
#define CLUSTER_DIMS
#endif

template <int N> struct Count { static constexpr int value = N; };

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

// One warp processes 16 keys of a tile for scores = query x keys, and a quarter of the columns for weights x values: every key and
// value leaves shared memory once, and no warp has sums that another needs.
extern "C" __global__ void __launch_bounds__(THREADS, MIN_CTAS) CLUSTER_DIMS
    append_attention(Number* out, const Number* query, const Number* key_pages, const Number* value_pages, const int* page_table, const Start* starts,
                     const Item* items, float* partial_sums, float2* partial_stats, int* counters, int query_stride, int page_stride) {
    extern __shared__ __align__(1024) uint8_t memory[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x & 31, rank = CLUSTER == 1 ? 0 : blockIdx.x % CLUSTER;
    const uint32_t base = shared_address(memory);
    const float scale = LOG2E * rsqrtf(HEAD_DIM);
    const Partials partials{partial_sums, partial_stats};

    // The plan, page ids and all keys but the step's own were there before the kernel ahead began: only the rest waits for it.
    const int start_word = ((const int*)(starts + blockIdx.x))[lane];
    Loader l;
    take_item(l, lane < ITEM_WORDS ? start_word : 0, rank);
    if (l.num_rows == 0) {  // so has the whole cluster
        wait_for_writers();
        return;
    }
#if CLUSTER > 1
    arrive_cluster();  // waited for before the first store to a peer
#endif
    auto read_pages = [&](int first) {
        const int page = first + lane;
        return l.num_rows > 0 && page << PAGE_SHIFT < l.last ? page_table[(int64_t)l.table_row * page_stride + page] : 0;
    };
    l.pages = __shfl_sync(~0u, start_word, ITEM_WORDS + (lane & (START_PAGES - 1)));
    l.window = l.token >> PAGE_SHIFT;
    l.limit = l.window + START_PAGES;
    l.later_pages = read_pages(l.limit - OVERLAP);
    l.next = __shfl_sync(~0u, start_word, 12);
    l.end = __shfl_sync(~0u, start_word, 13);
    l.next_word = l.next < l.end && lane < ITEM_WORDS ? ((const int*)(items + l.next))[lane] : 0;
    l.num_items = l.num_tiles = 0;

    auto query_source = [&](int i) {  // of the 16 bytes at chunk i of the item's queries
        const int r = l.row_start + i / CHUNKS, index = l.query_start + r / GROUP;
        return query + (int64_t)(l.is_prefix ? ((const int*)items)[index] : index) * query_stride + (l.kv_head * GROUP + r % GROUP) * HEAD_DIM + i % CHUNKS * 8;
    };
    auto load_tile = [&](bool has_waited) {
        if (l.num_rows > 0) {
            constexpr int STEP = THREADS / CHUNKS;
            const int chunk = threadIdx.x % CHUNKS, row = threadIdx.x / CHUNKS;
            const uint32_t target = base + l.num_tiles % STAGES * (2 * KV_BYTES) + swizzle(row, chunk);
            const int column = row * TOKEN_BYTES + l.kv_head * ROW_BYTES + chunk * 16, count = l.last - l.token - row;
            if (!has_waited && (l.num_items > 0 || l.token + TILE > l.first_new)) wait_for_writers();
            if (((l.token + TILE - 1) >> PAGE_SHIFT) >= l.limit) {
                l.pages = l.later_pages;
                l.window = l.limit - OVERLAP;
                l.limit = l.window + 32;
                l.later_pages = read_pages(l.limit - OVERLAP);
            }
#pragma unroll
            for (int g = 0; g < TILE / 16; ++g) {  // 16 tokens lie in one page
                const int token = l.token + g * 16;
                const int64_t page = __shfl_sync(~0u, l.pages, (token >> PAGE_SHIFT) - l.window);
                const int64_t offset = page * (PAGE_SIZE * TOKEN_BYTES) + ((token & (PAGE_SIZE - 1)) * TOKEN_BYTES + column);
                const char *key = (const char*)key_pages + offset, *value = (const char*)value_pages + offset;
#pragma unroll
                for (int i = 0; i < 16 / STEP; ++i) {
                    const uint32_t place = (target ^ ((i * STEP & 7) << 4)) + (g * 16 + i * STEP) * ROW_BYTES;
                    const bool is_wanted = g * 16 + i * STEP < count;
                    copy_async(place, key + i * STEP * TOKEN_BYTES, is_wanted);
                    copy_async(place + KV_BYTES, value + i * STEP * TOKEN_BYTES, is_wanted);
                }
            }
            if (l.is_first && l.num_items > 0) {
                const uint32_t slot = base + QUERY_OFFSET + l.num_items % QUERY_SLOTS * QUERY_BYTES;
                for (int i = threadIdx.x; i < l.num_rows * CHUNKS; i += THREADS) copy_async(slot + swizzle(i / CHUNKS, i % CHUNKS), query_source(i), true);
            }
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
        if (l.is_first && warp == 0 && lane < ITEM_WORDS) ((int*)(memory + ITEM_OFFSET + l.num_items % STAGES * 64))[lane] = l.word;
        l.is_first = false;
        ++l.num_tiles;
        l.token += TILE;
        if (l.num_rows > 0 && l.token >= l.last) {
            ++l.num_items;
            take_item(l, l.next_word, rank);
            ++l.next;
            l.next_word = l.next < l.end && lane < ITEM_WORDS ? ((const int*)(items + l.next))[lane] : 0;
            l.window = l.token >> PAGE_SHIFT;
            l.limit = l.window + 32;
            l.pages = read_pages(l.window);
            l.later_pages = read_pages(l.limit - OVERLAP);
        }
    };
    const Loader first = l;
#pragma unroll 1
    for (int i = 0; i < STAGES - 1; ++i) load_tile(false);
    wait_for_writers();
    {
        const Loader ahead = l;
        l = first;
        for (int i = threadIdx.x; i < l.num_rows * CHUNKS; i += THREADS)
            *(uint4*)(memory + QUERY_OFFSET + swizzle(i / CHUNKS, i % CHUNKS)) = *(const uint4*)query_source(i);
        l = ahead;
    }

    float* peaks = (float*)(memory + PEAK_OFFSET);
    const int half = lane >> 4;  // which of two chunks of 16 bytes this lane addresses
    int tile = 0;
    auto process = [&](auto m_tiles, const Item& item, int item_index) {
        constexpr int M = decltype(m_tiles)::value;
        constexpr bool IS_HELD = is_query_held(M), IS_EARLY = are_values_early(M);
        const uint32_t slot = base + QUERY_OFFSET + item_index % QUERY_SLOTS * QUERY_BYTES;
        int token, last;
        split_range(item.token_begin, item.token_end, rank, token, last);
        auto load_query = [&](uint32_t(&a)[4], int m, int k) { load_matrices(a, slot + swizzle(min(m * 16 + (lane & 15), MAX_ROWS - 1), 2 * k + half)); };
        uint32_t held[IS_HELD ? M : 1][IS_HELD ? K_STEPS : 1][4];
        if (IS_HELD) {
#pragma unroll
            for (int m = 0; m < M; ++m)
#pragma unroll
                for (int k = 0; k < K_STEPS; ++k) load_query(held[IS_HELD ? m : 0][IS_HELD ? k : 0], m, k);
        }
        float sums[M][2 * PAIRS][4] = {}, peak[M][2], total[M][2] = {};
#pragma unroll
        for (int m = 0; m < M; ++m) peak[m][0] = peak[m][1] = -INFINITY;

#pragma unroll 1
        for (bool is_started = false;; is_started = true) {
            if (is_started) {
                asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
                __syncthreads();
            }
            const uint32_t stage = base + tile % STAGES * (2 * KV_BYTES);
            const uint32_t keys = stage + swizzle(warp * 16 + half * 8 + (lane & 7), (lane >> 3) & 1);
            const uint32_t values = stage + KV_BYTES + swizzle(lane & 15, warp * (COLUMNS / 8) + half);
            const uint32_t weights = base + WEIGHT_OFFSET + (lane & 15) * (TILE * 2) + ((half ^ (lane & 7)) << 4);
            constexpr int CHAINS = M == 1 ? 2 : 1;  // of dependent products, per accumulator
            float parts[CHAINS][M][2][4] = {};
            constexpr int BATCH = K_STEPS < 8 ? K_STEPS : 8;  // loads in flight before the products that need them
#pragma unroll
            for (int k0 = 0; k0 < K_STEPS; k0 += BATCH) {
                uint32_t b[BATCH][4];
#pragma unroll
                for (int k = 0; k < BATCH; ++k) load_matrices(b[k], keys ^ ((k0 + k) << 5));
#pragma unroll
                for (int k = 0; k < BATCH; ++k)
#pragma unroll
                    for (int m = 0; m < M; ++m) {
                        uint32_t a[4];
                        if (!IS_HELD) load_query(a, m, k0 + k);
                        multiply(parts[k % CHAINS][m][0], IS_HELD ? held[IS_HELD ? m : 0][IS_HELD ? k0 + k : 0] : a, b[k][0], b[k][1]);
                        multiply(parts[k % CHAINS][m][1], IS_HELD ? held[IS_HELD ? m : 0][IS_HELD ? k0 + k : 0] : a, b[k][2], b[k][3]);
                    }
            }
            uint32_t v[TILE / 16][PAIRS][4];
            auto load_values = [&](int k) {
#pragma unroll
                for (int p = 0; p < PAIRS; ++p) load_transposed(v[k][p], (values ^ (p << 5)) + k * 16 * ROW_BYTES);
            };
            if (IS_EARLY) {
#pragma unroll
                for (int k = 0; k < TILE / 16; ++k) load_values(k);
            }
            float(&scores)[M][2][4] = parts[0];
            if (CHAINS == 2) {
#pragma unroll
                for (int i = 0; i < 8; ++i) scores[0][i / 4][i % 4] += parts[CHAINS - 1][0][i / 4][i % 4];
            }
            if (token + TILE > min(last, item.first_visible + item.row_start / GROUP + 1)) {
#pragma unroll
                for (int m = 0; m < M; ++m)
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        const int row = m * 16 + (lane >> 2) + h * 8;
                        const int seen = min(last, item.first_visible + (item.row_start + row) / GROUP + 1) - (token + warp * 16 + (lane & 3) * 2);
#pragma unroll
                        for (int i = 0; i < 4; ++i)
                            if ((i >> 1) * 8 + (i & 1) >= seen) scores[m][i >> 1][2 * h + (i & 1)] = -INFINITY;
                    }
            }
            auto largest = [&](int m, int h) {
                return fmaxf(fmaxf(scores[m][0][2 * h], scores[m][0][2 * h + 1]), fmaxf(scores[m][1][2 * h], scores[m][1][2 * h + 1])) * scale;
            };
            // exp2(score - reference) to shared memory; returns the sum of this thread's.
            auto store_weights = [&](int m, int h, float reference) {
                const int row = m * 16 + h * 8 + (lane >> 2);
                float sum = 0;
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    const float a = exp2_fast(fmaf(scores[m][j][2 * h], scale, -reference)), b = exp2_fast(fmaf(scores[m][j][2 * h + 1], scale, -reference));
                    sum += a + b;
                    *(Pair*)(memory + WEIGHT_OFFSET + row * (TILE * 2) + (((warp * 2 + j) ^ (row & 7)) << 4) + (lane & 3) * 4) = to_pair(a, b);
                }
                return sum;
            };
            // Any reference will do that is not far below the maximum: the one before serves until a score exceeds it by 2^8.
            bool is_exceeded = true;
            float added[M][2];
            if (is_started) {
                is_exceeded = false;
#pragma unroll
                for (int m = 0; m < M; ++m)
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        is_exceeded |= largest(m, h) > peak[m][h] + 8;
                        added[m][h] = store_weights(m, h, peak[m][h] == -INFINITY ? 0 : peak[m][h]);
                    }
                is_exceeded = __syncthreads_or(is_exceeded);
            }
            if (is_exceeded) {
#pragma unroll
                for (int m = 0; m < M; ++m)
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        float x = largest(m, h);
                        x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
                        x = fmaxf(x, __shfl_xor_sync(~0u, x, 2));
                        if ((lane & 3) == 0) peaks[warp * (M * 16) + m * 16 + h * 8 + (lane >> 2)] = x;
                    }
                __syncthreads();
#pragma unroll
                for (int m = 0; m < M; ++m)
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        float larger = peak[m][h];
#pragma unroll
                        for (int w = 0; w < WARPS; ++w) larger = fmaxf(larger, peaks[w * (M * 16) + m * 16 + h * 8 + (lane >> 2)]);
                        const float reference = larger == -INFINITY ? 0 : larger, old = exp2_fast(peak[m][h] - reference);
                        peak[m][h] = larger;
                        total[m][h] *= old;
#pragma unroll
                        for (int n = 0; n < 2 * PAIRS; ++n) sums[m][n][2 * h] *= old, sums[m][n][2 * h + 1] *= old;
                        added[m][h] = store_weights(m, h, reference);
                    }
                __syncthreads();
            }
            uint32_t a[TILE / 16][M][4];
            auto load_weights = [&](int k) {
#pragma unroll
                for (int m = 0; m < M; ++m) load_matrices(a[k][m], (weights ^ (k << 5)) + m * 16 * TILE * 2);
            };
            if (IS_EARLY) {
#pragma unroll
                for (int k = 0; k < TILE / 16; ++k) load_weights(k);
            }
#pragma unroll
            for (int m = 0; m < M; ++m) total[m][0] += added[m][0], total[m][1] += added[m][1];
#pragma unroll
            for (int k = 0; k < TILE / 16; ++k) {
                if (!IS_EARLY) load_values(k), load_weights(k);
#pragma unroll
                for (int m = 0; m < M; ++m)
#pragma unroll
                    for (int p = 0; p < PAIRS; ++p)
                        multiply(sums[m][2 * p], a[k][m], v[k][p][0], v[k][p][1]), multiply(sums[m][2 * p + 1], a[k][m], v[k][p][2], v[k][p][3]);
            }
            load_tile(true);  // into the stage of the tile before; its instructions are issued while the products are computed
            ++tile;
            token += TILE;
            if (token >= last) break;
        }

#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                total[m][h] += __shfl_xor_sync(~0u, total[m][h], 1);
                total[m][h] += __shfl_xor_sync(~0u, total[m][h], 2);
                if ((lane & 3) == 0) peaks[warp * (M * 16) + m * 16 + h * 8 + (lane >> 2)] = total[m][h];
            }
        __syncthreads();
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                total[m][h] = 0;
#pragma unroll
                for (int w = 0; w < WARPS; ++w) total[m][h] += peaks[w * (M * 16) + m * 16 + h * 8 + (lane >> 2)];
            }

#if CLUSTER == 1
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int row = m * 16 + h * 8 + (lane >> 2), column = warp * COLUMNS + (lane & 3) * 2;
                if (row >= item.num_rows) continue;
                if (item.num_pieces == 1) {
                    Number* target = out + output_offset(item, row) + column;
                    const float inverse = 1 / total[m][h];
#pragma unroll
                    for (int n = 0; n < 2 * PAIRS; ++n) *(Pair*)(target + n * 8) = to_pair(sums[m][n][2 * h] * inverse, sums[m][n][2 * h + 1] * inverse);
                } else {
                    float* target = partials.sum(item.slot, row) + column;
#pragma unroll
                    for (int n = 0; n < 2 * PAIRS; ++n) *(float2*)(target + n * 8) = make_float2(sums[m][n][2 * h], sums[m][n][2 * h + 1]);
                    if (warp == 0 && (lane & 3) == 0) *partials.stat(item.slot, 0, row) = make_float2(peak[m][h], total[m][h]);
                }
            }
#else
        // Each CTA gets some columns of all rows from its peers. Two buffers: a peer may be an item ahead, never two.
        const uint32_t stats = base + PEER_OFFSET + (item_index & 1) * (PEER_BYTES / 2), columns = stats + CLUSTER * MAX_ROWS * 8;
        if (item_index == 0) wait_cluster();
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int row = m * 16 + h * 8 + (lane >> 2), place = rank * MAX_ROWS + row;
                if (row >= item.num_rows) continue;
#pragma unroll
                for (int n = 0; n < 2 * PAIRS; ++n) {
                    const int column = warp * COLUMNS + n * 8 + (lane & 3) * 2;
                    store_peer(peer_address(columns + (place * WIDTH + column % WIDTH) * 4, column / WIDTH), sums[m][n][2 * h], sums[m][n][2 * h + 1]);
                }
                for (int r = warp * 4 + (lane & 3); r < CLUSTER; r += 4 * WARPS) store_peer(peer_address(stats + place * 8, r), peak[m][h], total[m][h]);
            }
        arrive_cluster();
        wait_cluster();
        const float2* peer_stats = (const float2*)(memory + PEER_OFFSET + (item_index & 1) * (PEER_BYTES / 2));
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
                *(float2*)(partials.sum(item.slot, row) + rank * WIDTH + column) = make_float2(a, b);
                if (column == 0) *partials.stat(item.slot, rank, row) = make_float2(larger, all);
            }
        }
#endif
        if (item.num_pieces > 1) merge_last(out, item, partials, counters, rank, (int*)peaks);
    };

#pragma unroll 1
    for (int i = 0;; ++i) {
        asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
        __syncthreads();
        const Item item = *(const Item*)(memory + ITEM_OFFSET + i % STAGES * 64);
        if (item.num_rows == 0) break;
        if (item.num_rows <= 16 || M_TILES == 1) process(Count<1>(), item, i);
        else if (item.num_rows <= 32 || M_TILES == 2) process(Count<M_TILES < 2 ? M_TILES : 2>(), item, i);
        else process(Count<M_TILES>(), item, i);
    }
}

#endif
