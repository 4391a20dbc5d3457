// Attention of a few queries per request over paged keys and values, with tensor cores, by the plan of attention_plan.cuh.
//
// Compile-time: DTYPE 0 bfloat16, 1 float16, 2 float32; GROUP query heads per KV head; NUM_KV_HEADS; HEAD_DIM; PAGE_SIZE;
// MAX_ROWS most rows (queries x GROUP) of one work item; CLUSTER CTAs that share an item; TILE keys, 64 or 128, of each of the STAGES of the KV
// pipeline, with a warp for every sixteen; MIN_CTAS per SM; CASCADE: requests may share a prefix, which then is read once for all of them;
// WINDOW, CAP_BITS, TREE, WHOLE, E4M3: see attention_items.cuh; attention_codes.cuh has what codes need.
// Of codes, of each KV head: key_scales, which its scores are multiplied with, and value_factors, one by what its results are.

#include "attention_merge.cuh"
#if DTYPE == 2
#include "attention_float32.cuh"
#else
#include "attention_output.cuh"

// As in small_code.cuh: few items, shared by a cluster, feel it.
#if CLUSTER > 1
#define SMALL_CODE _Pragma("unroll 1")
#else
#define SMALL_CODE
#endif

template <int N> struct Count { static constexpr int value = N; };

// One warp processes 16 keys of a tile for scores = query x keys, and its share of the columns for weights x values: every key and
// value leaves shared memory once, and no warp has sums that another needs.
extern "C" __global__ void __launch_bounds__(THREADS, MIN_CTAS) CLUSTER_DIMS
    append_attention(Number* out, const Number* query, const Number* key_pages, const Number* value_pages, const int* page_table, const Start* starts,
                     const Item* items, float* partial_sums, float2* partial_stats, int* counters, const unsigned long long* seen_rows,
                     int query_stride, int table_stride, int page_bytes, const float* key_scales, const float* value_factors) {
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
        wait_for_earlier();
        return;
    }
    arrive_cluster_relaxed();  // waited for before the first store to a peer
    auto read_pages = [&](int first) {
        const int page = first + lane;
        return l.num_rows > 0 && page << PAGE_SHIFT < l.last ? page_table[(int64_t)l.table_row * table_stride + page] : 0;
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
            if (!has_waited && (l.num_items > 0 || l.token + TILE > l.first_new)) wait_for_earlier();
            if (((l.token + TILE - 1) >> PAGE_SHIFT) >= l.limit) {
                l.pages = l.later_pages;
                l.window = l.limit - OVERLAP;
                l.limit = l.window + 32;
                l.later_pages = read_pages(l.limit - OVERLAP);
            }
            const uint32_t stage = base + l.num_tiles % STAGES * (2 * KV_BYTES);
#if E4M3
            for_codes([&](int row, int chunk) {
                const int token = l.token + row;
                const int64_t page = __shfl_sync(~0u, l.pages, (token >> PAGE_SHIFT) - l.window);
                const int64_t offset = page * page_bytes + ((token & (PAGE_SIZE - 1)) * TOKEN_BYTES + l.kv_head * HELD_BYTES + chunk * 16);
                const uint32_t place = stage + code_place(row, chunk);
                copy_async(place, (const char*)key_pages + offset, token < l.last);
                copy_async(place + KV_BYTES, (const char*)value_pages + offset, token < l.last);
            });
#else
            constexpr int STEP = THREADS / CHUNKS;
            const int chunk = threadIdx.x % CHUNKS, row = threadIdx.x / CHUNKS;
            const uint32_t target = stage + swizzle(row, chunk);
            const int column = row * TOKEN_BYTES + l.kv_head * ROW_BYTES + chunk * 16, count = l.last - l.token - row;
#pragma unroll
            for (int g = 0; g < TILE / 16; ++g) {  // 16 tokens lie in one page
                const int token = l.token + g * 16;
                const int64_t page = __shfl_sync(~0u, l.pages, (token >> PAGE_SHIFT) - l.window);
                const int64_t offset = page * page_bytes + ((token & (PAGE_SIZE - 1)) * TOKEN_BYTES + column);
                const char *key = (const char*)key_pages + offset, *value = (const char*)value_pages + offset;
#pragma unroll
                for (int i = 0; i < 16 / STEP; ++i) {
                    const uint32_t place = (target ^ ((i * STEP & 7) << 4)) + (g * 16 + i * STEP) * ROW_BYTES;
                    const bool is_wanted = g * 16 + i * STEP < count;
                    copy_async(place, key + i * STEP * TOKEN_BYTES, is_wanted);
                    copy_async(place + KV_BYTES, value + i * STEP * TOKEN_BYTES, is_wanted);
                }
            }
#endif
            if (l.is_first && l.num_items > 0) {
                const uint32_t buffer = base + QUERY_OFFSET + l.num_items % QUERY_BUFFERS * QUERY_BYTES;
                SMALL_CODE
                for (int i = threadIdx.x; i < l.num_rows * CHUNKS; i += THREADS) copy_async(buffer + swizzle(i / CHUNKS, i % CHUNKS), query_source(i), true);
            }
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
        if (l.is_first && warp == 0 && lane < ITEM_WORDS) {
            int word = l.word;
            if (E4M3 && l.num_rows > 0 && (lane == 12 || lane == 13)) word = __float_as_int((lane == 12 ? key_scales : value_factors)[l.kv_head]);
            ((int*)(memory + ITEM_OFFSET + l.num_items % STAGES * 64))[lane] = word;
        }
        l.is_first = false;
        ++l.num_tiles;
        l.token += TILE;
        if (l.num_rows > 0 && l.token >= l.last) {
            ++l.num_items;
            take_item(l, l.next_word, rank);
            if (l.num_rows == 0) launch_dependents();  // all is on its way: the next kernel's weights may follow
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
    wait_for_earlier();
    {
        const Loader ahead = l;
        l = first;
#if CLUSTER > 1 && MAX_ROWS * CHUNKS <= THREADS
#pragma unroll 1
#endif
        for (int i = threadIdx.x; i < l.num_rows * CHUNKS; i += THREADS)
            *(uint4*)(memory + QUERY_OFFSET + swizzle(i / CHUNKS, i % CHUNKS)) = *(const uint4*)query_source(i);
        l = ahead;
    }

    float* peaks = (float*)(memory + PEAK_OFFSET);
    const int half = lane >> 4;  // which of two chunks of 16 bytes this lane addresses
    int tile = 0;
    auto await_tile = [&]() {
        asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
        __syncthreads();
    };
    auto process = [&](auto m_tiles, const Item& item, int item_index) {
        constexpr int M = decltype(m_tiles)::value;
        constexpr bool IS_HELD = is_query_held(M), IS_EARLY = are_values_early(M);
        const uint32_t buffer = base + QUERY_OFFSET + item_index % QUERY_BUFFERS * QUERY_BYTES;
        int token, last;
        split_range(item.token_begin, item.token_end, rank, token, last);
        float row_scales[E4M3 ? M : 1][2];
        if (E4M3) {
            float* shared_scales = (float*)(memory + WEIGHT_OFFSET);  // until there are weights
            prepare_queries(buffer, item.num_rows, __int_as_float(item.next) * CODE_UNIT * (CAP_BITS ? 1 : scale), shared_scales);
            __syncthreads();
#pragma unroll
            for (int m = 0; m < M; ++m)
#pragma unroll
                for (int h = 0; h < HALVES; ++h) {
                    const int row = m * 16 + h * 8 + (lane >> 2);
                    row_scales[E4M3 ? m : 0][h] = row < item.num_rows ? shared_scales[row] : 0;
                }
        }
        auto scale_of = [&](int m, int h) { return E4M3 && !CAP_BITS ? row_scales[E4M3 ? m : 0][h] : scale; };
        auto load_query = [&](uint32_t(&a)[4], int m, int k) {
            load_matrices(a, buffer + swizzle(min(m * 16 + (lane & 15), MAX_ROWS - 1), 2 * k + half));
        };
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
            if (is_started) await_tile();
            const uint32_t stage = base + tile % STAGES * (2 * KV_BYTES);
            const uint32_t keys = stage + (E4M3 ? code_place(warp * 16 + (lane & 15), half) : swizzle(warp * 16 + half * 8 + (lane & 7), (lane >> 3) & 1));
            const uint32_t values = stage + KV_BYTES + (E4M3 ? code_place(lane, warp * PAIRS) : swizzle(lane & 15, warp * (COLUMNS / 8) + half));
            const uint32_t weights = base + WEIGHT_OFFSET + (lane & 15) * (TILE * 2) + ((half ^ (lane & 7)) << 4);
            constexpr int CHAINS = M == 1 ? 2 : 1;  // of dependent products, per accumulator
            float parts[CHAINS][M][2][4] = {};
            constexpr int BATCH = K_STEPS < 8 ? K_STEPS : 8;  // loads in flight before the products that need them
#pragma unroll
            for (int k0 = 0; k0 < K_STEPS; k0 += BATCH) {
                uint32_t b[BATCH][4];
#pragma unroll
                for (int k = 0; k < BATCH; k += E4M3 ? 2 : 1) load_matrices(b[k], keys ^ ((k0 + k) << STEP_SHIFT));
#pragma unroll
                for (int k = 0; k < BATCH; ++k) {
                    if (E4M3 && k % 2 == 0) expand_keys(b[k], b[k + 1]);
#pragma unroll
                    for (int m = 0; m < M; ++m) {
                        uint32_t a[4];
                        if (!IS_HELD) load_query(a, m, k0 + k);
                        multiply<IS_FLOAT16>(parts[k % CHAINS][m][0], IS_HELD ? held[IS_HELD ? m : 0][IS_HELD ? k0 + k : 0] : a, b[k][0], b[k][1]);
                        multiply<IS_FLOAT16>(parts[k % CHAINS][m][1], IS_HELD ? held[IS_HELD ? m : 0][IS_HELD ? k0 + k : 0] : a, b[k][2], b[k][3]);
                    }
                }
            }
            uint32_t v[TILE / 16][PAIRS][4];
            auto load_values = [&](int k) {
                if (E4M3 && k % 2) return;  // there already
#pragma unroll
                for (int p = 0; p < PAIRS; ++p) load_transposed(v[k][p], (values ^ (p << STEP_SHIFT)) + k * 16 * HELD_BYTES);
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
            if (CAP_BITS) {
#pragma unroll
                for (int m = 0; m < M; ++m)
#pragma unroll
                    for (int i = 0; i < 8; ++i) {
                        float& score = scores[m][i / 4][i % 4];
                        score = cap_score(E4M3 ? score * row_scales[E4M3 ? m : 0][i % 4 / 2] : score, rsqrtf(HEAD_DIM));
                    }
            }
            const bool is_past_window = WINDOW && token <= item.first_visible + (item.row_start + item.num_rows - 1) / GROUP - WINDOW;
            if (is_past_window || token + TILE > min(last, item.first_visible + (TREE || WHOLE ? 0 : item.row_start / GROUP) + 1)) {
#pragma unroll
                for (int m = 0; m < M; ++m)
#pragma unroll
                    for (int h = 0; h < HALVES; ++h) {
                        const int row = m * 16 + (lane >> 2) + h * 8;
                        const int first_key = token + warp * 16 + (lane & 3) * 2, query = (item.row_start + min(row, item.num_rows - 1)) / GROUP;
                        const unsigned long long own = TREE && !item.is_prefix ? seen_rows[item.query_start + query] | 1 : 1;
                        const int newest = item.first_visible + (TREE ? __popcll(own) - 1 : (item.row_start + row) / GROUP);  // by position
                        const int seen = min(last, TREE || WHOLE ? last : newest + 1) - first_key, unseen = newest + 1 - WINDOW - first_key;
#pragma unroll
                        for (int i = 0; i < 4; ++i) {
                            const int key = (i >> 1) * 8 + (i & 1);
                            const bool is_other = TREE && !is_on_path(own, first_key + key - item.first_visible);
                            if (key >= seen || (WINDOW && key < unseen) || is_other) scores[m][i >> 1][2 * h + (i & 1)] = -INFINITY;
                        }
                    }
            }
            auto largest = [&](int m, int h) {
                return fmaxf(fmaxf(scores[m][0][2 * h], scores[m][0][2 * h + 1]), fmaxf(scores[m][1][2 * h], scores[m][1][2 * h + 1])) * scale_of(m, h);
            };
            // exp2(score - reference) to shared memory; returns the sum of this thread's.
            auto store_weights = [&](int m, int h, float reference) {
                const int row = m * 16 + h * 8 + (lane >> 2);
                const float factor = scale_of(m, h);
                if (E4M3) reference -= WEIGHT_SHIFT;
                float sum = 0;
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    const float a = exp2_fast(fmaf(scores[m][j][2 * h], factor, -reference)), b = exp2_fast(fmaf(scores[m][j][2 * h + 1], factor, -reference));
                    sum += a + b;
                    store_pair(memory + WEIGHT_OFFSET + row * (TILE * 2) + (((warp * 2 + j) ^ (row & 7)) << 4) + (lane & 3) * 4, a, b);
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
                    for (int h = 0; h < HALVES; ++h) {
                        is_exceeded |= largest(m, h) > peak[m][h] + 8;
                        added[m][h] = store_weights(m, h, peak[m][h] == -INFINITY ? 0 : peak[m][h]);
                    }
                is_exceeded = __syncthreads_or(is_exceeded);
            }
            if (is_exceeded) {
#pragma unroll
                for (int m = 0; m < M; ++m)
#pragma unroll
                    for (int h = 0; h < HALVES; ++h) {
                        float x = largest(m, h);
                        x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
                        x = fmaxf(x, __shfl_xor_sync(~0u, x, 2));
                        if ((lane & 3) == 0) peaks[warp * (M * 16) + m * 16 + h * 8 + (lane >> 2)] = x;
                    }
                __syncthreads();
#pragma unroll
                for (int m = 0; m < M; ++m)
#pragma unroll
                    for (int h = 0; h < HALVES; ++h) {
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
            for (int m = 0; m < M; ++m)
#pragma unroll
                for (int h = 0; h < HALVES; ++h) total[m][h] += added[m][h];
#pragma unroll
            for (int k = 0; k < TILE / 16; ++k) {
                if (!IS_EARLY) load_values(k), load_weights(k);
                if (E4M3 && k % 2 == 0) {
#pragma unroll
                    for (int p = 0; p < PAIRS; ++p) expand_values(v[k][p], v[k + 1][p]);
                }
#pragma unroll
                for (int m = 0; m < M; ++m)
#pragma unroll
                    for (int p = 0; p < PAIRS; ++p)
                        multiply<IS_FLOAT16>(sums[m][2 * p], a[k][m], v[k][p][0], v[k][p][1]), multiply<IS_FLOAT16>(sums[m][2 * p + 1], a[k][m], v[k][p][2], v[k][p][3]);
            }
            load_tile(true);  // into the stage of the tile before; its instructions are issued while the products are computed
            ++tile;
            token += TILE;
            if (token >= last) break;
        }

#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int h = 0; h < HALVES; ++h) {
                total[m][h] += __shfl_xor_sync(~0u, total[m][h], 1);
                total[m][h] += __shfl_xor_sync(~0u, total[m][h], 2);
                if ((lane & 3) == 0) peaks[warp * (M * 16) + m * 16 + h * 8 + (lane >> 2)] = total[m][h];
            }
        __syncthreads();
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int h = 0; h < HALVES; ++h) {
                total[m][h] = 0;
#pragma unroll
                for (int w = 0; w < WARPS; ++w) total[m][h] += peaks[w * (M * 16) + m * 16 + h * 8 + (lane >> 2)];
                if (E4M3) total[m][h] *= __int_as_float(item.end) / CODE_UNIT;  // so all that is made of it, partial results too, is in the values' unit
            }

        store_output<M>(out, item, partials, sums, peak, total, memory, rank);
        if (item.num_pieces > 1) merge_last(out, item, partials, counters, rank, (int*)peaks);
    };

#pragma unroll 1
    for (int i = 0;; ++i) {
        await_tile();
        const Item item = *(const Item*)(memory + ITEM_OFFSET + i % STAGES * 64);
        if (item.num_rows == 0) break;
        if (item.num_rows <= 16 || M_TILES == 1) process(Count<1>(), item, i);
        else if (item.num_rows <= 32 || M_TILES == 2) process(Count<M_TILES < 2 ? M_TILES : 2>(), item, i);
        else process(Count<M_TILES>(), item, i);
    }
}

#endif
