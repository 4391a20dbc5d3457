// The plan that spreads the requests of one step over the GPU.
#pragma once
#include "attention_items.cuh"
#include "generated.cuh"

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

// Where the partial results of a segment's p-th piece are. Without CASCADE only a worker's first (even) and last (odd) item can be a piece.
__device__ __forceinline__ int piece_at(int first_piece, int p) { return CASCADE ? first_piece + p : p == 0 ? first_piece : (first_piece / 2 + p) * 2; }

// Splits all requests' keys into work for `num_workers` workers (a worker is a cluster). Every CTA finds the same bounds and writes
// its share of the lists. For CASCADE, token_places [T]: first segment, index of the query, first segment of the prefix and index
// there (for MERGE_APART alone the first two); and segment_pieces [segments]: where the first piece is, and number of pieces. Shared memory: PLAN_INTS(B) + W + 1 ints.
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

    auto window_begin = [&](int r) {  // of a request: the first key that any of its queries sees, about
        return WINDOW ? max(0, seq_lens[r] - queries_of(r) - WINDOW + 1) / 16 * 16 : 0;
    };
    static_assert(!(WINDOW && CASCADE), "a prefix has no window");

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
        if (num_rows > 0) length = r >= num_requests ? prefix_len[prefix_rows[r - num_requests]] : seq_lens[r] - (prefix_of(r) >= 0 ? prefix_len[r] : window_begin(r));
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
        const int begin = is_prefix ? 0 : prefix >= 0 ? prefix_len[source] : window_begin(source), length = is_prefix ? prefix_len[source] : seq_lens[source];
        item.query_start = is_prefix ? sizes.num_items * ITEM_WORDS + prefix_queries[s.request - num_requests] : cu_query_lens[s.request];
        item.row_start = local / NUM_KV_HEADS * MAX_ROWS;
        item.num_rows = min(MAX_ROWS, queries * GROUP - item.row_start);
        item.kv_head = local % NUM_KV_HEADS;
        item.token_begin = begin + tile_begin * TILE;
        item.token_end = min(begin + tile_end * TILE, length);
        item.first_visible = is_prefix ? 1 << 30 : length - queries;
        item.table_row = table_rows[source];
        item.segment = s.index;
        item.num_pieces = prefix >= 0 || (MERGE_APART && num_pieces > 1) ? 0 : num_pieces;
        item.first_piece = CASCADE ? s.index + first_worker : 2 * first_worker + is_odd;
        item.piece = piece_at(item.first_piece, worker - first_worker);
        item.is_prefix = is_prefix;
        item.next = item.end = item.padding = 0;
        if ((CASCADE || MERGE_APART) && worker == first_worker) segment_pieces[s.index] = make_int2(item.first_piece, num_pieces);
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
                start.page_ids[i] = page << PAGE_SHIFT < last ? page_table[(int64_t)start.item.table_row * sizes.table_stride + page] : 0;
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
        // Before the first request's tokens come those of prompts, and behind the last one's nobody's.
        const int num_prompts = cu_query_lens[0], end = cu_query_lens[num_requests];
        for (int t = threadIdx.x; t < num_prompts; t += PLAN_THREADS) token_places[t].x = -1;
        for (int t = end + threadIdx.x; t < sizes.num_tokens; t += PLAN_THREADS) token_places[t].x = -1;
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
    if (MERGE_APART && !CASCADE) {
        const int num_ctas = gridDim.x * PLAN_THREADS, place = blockIdx.x * PLAN_THREADS + threadIdx.x;
        for (int t = place; t < sizes.num_tokens; t += num_ctas) {
            const int b = find(cu_query_lens, num_requests + 1, t);
            token_places[t] = b < 0 || b >= num_requests ? make_int4(-1, 0, 0, 0) : make_int4(segments[b], t - cu_query_lens[b], 0, 0);
        }
    }
    __threadfence();  // append_attention may begin as soon as this kernel ends, and reads the lists before it waits for anything
}
