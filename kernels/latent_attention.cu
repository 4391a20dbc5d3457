// Attention of a few queries per request over paged latents, for which all heads share one key of RANK + ROPE numbers, whose first RANK are the
// value too (multi-head latent attention, absorbed). By the plan of attention_plan.cuh; split items are merged by merge_latents,
// or by project_latents on the way.
//
// Compile-time: DTYPE 0 bfloat16, 1 float16; GROUP query heads; HEAD_DIM: RANK, a multiple of 16 NUM_WARPS; ROPE, with which it is a multiple of 64;
// PAGE_SIZE; MAX_ROWS most rows (queries x heads) of an item; TILE keys of each of two stages, eight for each of NUM_WARPS warps; NUM_KV_HEADS,
// CLUSTER 1, CASCADE 0, MERGE_APART 1; E4M3: see attention_items.cuh. Codes are copied to where their numbers will be, and expanded by who copied them.
// Of codes, one each: key_scale, of the key's last ROPE numbers, and value_factor, one by the scale of the others.

#include "attention_merge.cuh"
#include "attention_tensor.cuh"
#include "e4m3.cuh"

constexpr int SIZE = HEAD_DIM + ROPE, KEY_BYTES = SIZE * 2, KEY_CHUNKS = SIZE / 8, STAGES = 2;
constexpr int ENTRY_BYTES = E4M3 ? SIZE : KEY_BYTES, PARTS = ENTRY_BYTES / 16;  // of an entry in a page, and copies of 16 bytes
constexpr int M_TILES = (MAX_ROWS + 15) / 16, K_STEPS = SIZE / 16, COLUMNS = HEAD_DIM / WARPS, PAIRS = COLUMNS / 16;
static_assert(TILE == 8 * WARPS && SIZE % 64 == 0 && COLUMNS % 16 == 0, "see above");
// Shared memory; latent_attention.py computes the same sum.
constexpr int STAGE_BYTES = TILE * KEY_BYTES, QUERY_OFFSET = STAGES * STAGE_BYTES, WEIGHT_OFFSET = QUERY_OFFSET + M_TILES * 16 * KEY_BYTES;
constexpr int PEAK_OFFSET = WEIGHT_OFFSET + M_TILES * 16 * TILE * 2;  // [WARPS][rows] floats

template <int N> struct Count { static constexpr int value = N; };

// Rows of KEY_BYTES, whose 16-byte chunks are swapped about within eight of them, so that eight rows of one column lie in different banks.
__device__ __forceinline__ uint32_t place_of(int row, int chunk) { return row * KEY_BYTES + ((chunk ^ (row & 7)) << 4); }

// A warp makes the scores of eight keys of a tile, and weights x values of its share of the columns.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    latent_attention(Number* out, const Number* absorbed, const Number* turned, const Number* pages, const int* page_table, const Start* starts,
                     const Item* items, float* partial_sums, float2* partial_stats, LatentStrides strides, const float* key_scale, const float* value_factor) {
    extern __shared__ __align__(1024) uint8_t memory[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x & 31, half = lane >> 4;
    const uint32_t base = shared_address(memory);
    const Partials partials{partial_sums, partial_stats};
    float* peaks = (float*)(memory + PEAK_OFFSET);
    launch_dependents();
    // The plan, page ids and all keys but the step's own were there before the kernel ahead began: only the rest waits for it.
    Item item = starts[blockIdx.x].item;
    if (item.num_rows <= 0) {
        wait_for_earlier();
        return;
    }
    const int next = item.next, end = item.end;
    item.query_start -= strides.first_token;

    auto process = [&](auto m_tiles) {
        constexpr int M = decltype(m_tiles)::value;
        const int* table = page_table + (int64_t)item.table_row * strides.table;
        auto page_at = [&](int token) { return token + warp * 8 < item.token_end ? table[(token + warp * 8) >> PAGE_SHIFT] : 0; };
        // Of a tile's keys from `token` on a warp copies eight, which lie in one page: those from `low` to below `high`.
        auto copy_keys = [&](int token, int page, int stage, auto unrolled, int low, int high) {
            const int count = item.token_end - token - warp * 8;
            if (token >= item.token_end) return;
            const char* source = (const char*)pages + (int64_t)page * strides.page_bytes + ((token + warp * 8) & (PAGE_SIZE - 1)) * ENTRY_BYTES;
            const uint32_t target = base + stage * STAGE_BYTES + warp * 8 * KEY_BYTES;
#pragma unroll decltype(unrolled)::value
            for (int j = 0; j < PARTS / 4; ++j) {
                const int i = j * 32 + lane, row = i / PARTS;
                if (row >= low && row < high) copy_async(target + place_of(row, i % PARTS * (KEY_CHUNKS / PARTS)), source + i * 16, row < count);
            }
        };
        int loaded = item.token_begin;  // where the next tile to load begins
        const int pages_ahead[STAGES] = {page_at(loaded), page_at(loaded + TILE)};
        auto copy_ahead = [&](int stage, bool is_new) {
            const int token = loaded + stage * TILE, num_old = item.first_visible - token - warp * 8;
            copy_keys(token, stage ? pages_ahead[1] : pages_ahead[0], stage, Count<3>(), is_new ? num_old : 0, is_new ? 8 : num_old);
        };
#pragma unroll 1
        for (int stage = 0; stage < STAGES; ++stage) copy_ahead(stage, false);
        wait_for_earlier();
#pragma unroll 1
        for (int i = threadIdx.x; i < M * 16 * KEY_CHUNKS; i += THREADS) {
            const int row = i / KEY_CHUNKS, chunk = i % KEY_CHUNKS, r = item.row_start + min(row, item.num_rows - 1);
            const int64_t token = item.query_start + r / GROUP;
            const Number* source = chunk < HEAD_DIM / 8 ? absorbed + token * strides.absorbed_token + r % GROUP * strides.absorbed_head + chunk * 8
                                                        : turned + token * strides.turned_token + r % GROUP * strides.turned_head + (chunk - HEAD_DIM / 8) * 8;
            copy_async(base + QUERY_OFFSET + place_of(row, chunk), source, row < item.num_rows);
        }
#pragma unroll 1
        for (int stage = 0; stage < STAGES; ++stage) {
            copy_ahead(stage, true);
            asm volatile("cp.async.commit_group;" ::: "memory");
        }
        loaded += STAGES * TILE;
        int page = page_at(loaded);
        auto load_tile = [&](int stage) {
            copy_keys(loaded, page, stage, Count<PARTS / 4>(), 0, 8);
            asm volatile("cp.async.commit_group;" ::: "memory");
            loaded += TILE;
            page = page_at(loaded);
        };
        // Of codes: the first prompts may make their scales.
        const float key_unit = E4M3 ? __ldcg(key_scale) : 1, inverse_unit = E4M3 ? __ldcg(value_factor) : 1, scale = LOG2E * strides.scale * key_unit;

        float sums[M][2 * PAIRS][4] = {}, peak[M][2], total[M][2] = {};
#pragma unroll
        for (int m = 0; m < M; ++m) peak[m][0] = peak[m][1] = -INFINITY;
        int stage = 0;
#pragma unroll 1
        for (int token = item.token_begin; token < item.token_end; token += TILE, stage ^= 1) {
            asm volatile("cp.async.wait_group 1;" ::: "memory");
            if constexpr (E4M3) {
#pragma unroll
                for (int j = 0; j < PARTS / 4; ++j) {
                    const int i = j * 32 + lane;
                    expand_shared<DTYPE == 1>(base + stage * STAGE_BYTES + warp * 8 * KEY_BYTES + place_of(i / PARTS, i % PARTS * 2));
                }
            }
            __syncthreads();
            const uint32_t keys = base + stage * STAGE_BYTES, own = keys + (warp * 8 + (lane & 7)) * KEY_BYTES;
            const uint32_t queries = base + QUERY_OFFSET + (lane & 15) * KEY_BYTES;
            constexpr int CHAINS = M == 1 ? 4 : M == 2 ? 2 : 1;  // of dependent products
            float parts[CHAINS][M][4] = {};
#pragma unroll
            for (int k = 0; k < K_STEPS; k += 2) {
                if (E4M3 && k == HEAD_DIM / 16) {  // from here on with the key's scale
#pragma unroll
                    for (int c = 0; c < CHAINS; ++c)
#pragma unroll
                        for (int m = 0; m < M; ++m)
#pragma unroll
                            for (int i = 0; i < 4; ++i) parts[c][m][i] *= 1 / (key_unit * inverse_unit);
                }
                uint32_t b[4];
                load_matrices(b, own + (((k * 2 + (lane >> 3)) ^ (lane & 7)) << 4));
#pragma unroll
                for (int i = 0; i < 2; ++i)
#pragma unroll
                    for (int m = 0; m < M; ++m) {
                        uint32_t a[4];
                        load_matrices(a, queries + m * 16 * KEY_BYTES + ((((k + i) * 2 + half) ^ (lane & 7)) << 4));
                        multiply(parts[(k + i) % CHAINS][m], a, b[2 * i], b[2 * i + 1]);
                    }
            }
            float(&scores)[M][4] = parts[0];
#pragma unroll
            for (int c = 1; c < CHAINS; ++c)
#pragma unroll
                for (int m = 0; m < M; ++m)
#pragma unroll
                    for (int i = 0; i < 4; ++i) scores[m][i] += parts[c][m][i];
            const int first_key = token + warp * 8 + (lane & 3) * 2;
#pragma unroll
            for (int m = 0; m < M; ++m)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const int row = m * 16 + (lane >> 2) + h * 8, seen = min(item.token_end, item.first_visible + (item.row_start + row) / GROUP + 1) - first_key;
#pragma unroll
                    for (int i = 0; i < 2; ++i) scores[m][2 * h + i] = i < seen ? scores[m][2 * h + i] * scale : -INFINITY;
                    float largest = fmaxf(scores[m][2 * h], scores[m][2 * h + 1]);
                    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
                    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
                    if ((lane & 3) == 0) peaks[warp * (M * 16) + row] = largest;
                }
            __syncthreads();
#pragma unroll
            for (int m = 0; m < M; ++m)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const int row = m * 16 + (lane >> 2) + h * 8;
                    float larger = peak[m][h];
#pragma unroll
                    for (int w = 0; w < WARPS; ++w) larger = fmaxf(larger, peaks[w * (M * 16) + row]);
                    const float reference = larger == -INFINITY ? 0 : larger, old = exp2_fast(peak[m][h] - reference);
                    peak[m][h] = larger;
#pragma unroll
                    for (int n = 0; n < 2 * PAIRS; ++n) sums[m][n][2 * h] *= old, sums[m][n][2 * h + 1] *= old;
                    const float a = exp2_fast(scores[m][2 * h] - reference), b = exp2_fast(scores[m][2 * h + 1] - reference);
                    total[m][h] = total[m][h] * old + a + b;
                    *(Pair*)(memory + WEIGHT_OFFSET + row * (TILE * 2) + ((warp ^ (row & (WARPS - 1))) << 4) + (lane & 3) * 4) = to_pair(a, b);
                }
            __syncthreads();
#pragma unroll
            for (int k = 0; k < TILE / 16; ++k) {
                uint32_t v[PAIRS][4];
#pragma unroll
                for (int p = 0; p < PAIRS; ++p) load_transposed(v[p], keys + place_of(k * 16 + (lane & 15), warp * (COLUMNS / 8) + 2 * p + half));
#pragma unroll
                for (int m = 0; m < M; ++m) {
                    uint32_t a[4];
                    const int row = m * 16 + (lane & 15);
                    load_matrices(a, base + WEIGHT_OFFSET + row * (TILE * 2) + (((2 * k + half) ^ (row & (WARPS - 1))) << 4));
#pragma unroll
                    for (int p = 0; p < PAIRS; ++p) multiply(sums[m][2 * p], a, v[p][0], v[p][1]), multiply(sums[m][2 * p + 1], a, v[p][2], v[p][3]);
                }
            }
            __syncthreads();  // the stage is free
            load_tile(stage);
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
                const int row = m * 16 + h * 8 + (lane >> 2), column = warp * COLUMNS + (lane & 3) * 2;
                if (row >= item.num_rows) continue;
                float all = 0;
#pragma unroll
                for (int w = 0; w < WARPS; ++w) all += peaks[w * (M * 16) + row];
                if (E4M3) all *= inverse_unit;  // so all that is made of it, partial results too, is in the latents' unit
                if (item.num_pieces == 1) {
                    Number* target = out + output_offset(item, row) + column;
                    const float inverse = 1 / all;
#pragma unroll
                    for (int n = 0; n < 2 * PAIRS; ++n) *(Pair*)(target + n * 8) = to_pair(sums[m][n][2 * h] * inverse, sums[m][n][2 * h + 1] * inverse);
                } else {
                    float* target = partials.sum(item.piece, row) + column;
#pragma unroll
                    for (int n = 0; n < 2 * PAIRS; ++n) *(float2*)(target + n * 8) = make_float2(sums[m][n][2 * h], sums[m][n][2 * h + 1]);
                    if (warp == 0 && (lane & 3) == 0) *partials.stat(item.piece, 0, row) = make_float2(peak[m][h], all);
                }
            }
        asm volatile("cp.async.wait_group 0;" ::: "memory");
        __syncthreads();  // before the next item's queries and keys
    };

#pragma unroll 1
    for (int i = next;; ++i) {
        if (item.num_rows <= 16 || M_TILES == 1) process(Count<1>());
        else if (item.num_rows <= 32 || M_TILES == 2) process(Count<M_TILES < 2 ? M_TILES : 2>());
        else process(Count<M_TILES>());
        if (i >= end) break;
        item = items[i];
        item.query_start -= strides.first_token;
    }
}

constexpr int PER_HEAD = HEAD_DIM / 8;  // threads, of eight columns each
static_assert(sizeof(Merged) == 40, "latent_attention.py has the same");

// What several workers have of a row, by `num_parts` threads of a block, `apart` from each other, who share the pieces: the first of them gets it all.
// Every thread of the block calls this; those with another part have nothing to do. rest: shared memory.
__device__ __forceinline__ Merged merge_shared(const Partials& partials, int2 pieces, int row, int column, int part, int num_parts, int apart, Merged* rest) {
    Merged merged;
    if (part < num_parts) merged.add<true>(partials, pieces.x, pieces.y, 0, row % MAX_ROWS, column, part, num_parts);
    if (num_parts == 1) return merged;
    if (part > 0 && part < num_parts) rest[threadIdx.x - apart] = merged;
    __syncthreads();
    if (part == 0)
#pragma unroll 1
        for (int p = 1; p < min(num_parts, pieces.y); ++p) merged.add(rest[threadIdx.x + (p - 1) * apart]);
    return merged;
}

// Merges what several workers have of a token's head. Grid: tokens from first_token on, heads; threads: PER_HEAD for each part of the pieces.
extern "C" __global__ void merge_latents(Number* out, float* partial_sums, float2* partial_stats, const int4* token_places, const int2* segment_pieces,
                                         int first_token) {
    extern __shared__ __align__(16) uint8_t memory[];
    launch_dependents();
    const int part = threadIdx.x / PER_HEAD, column = threadIdx.x % PER_HEAD * 8, head = blockIdx.y;
    // The plan is older than the kernel ahead.
    const int4 place = token_places[blockIdx.x + first_token];
    const int row = place.y * GROUP + head;
    const int2 pieces = place.x >= 0 ? segment_pieces[place.x + row / MAX_ROWS] : make_int2(0, 0);
    wait_for_earlier();
    if (pieces.y < 2) return;
    const Merged merged = merge_shared(Partials{partial_sums, partial_stats}, pieces, row, column, part, blockDim.x / PER_HEAD, PER_HEAD,
                                       reinterpret_cast<Merged*>(memory));
    if (part == 0) merged.store(out + ((int64_t)blockIdx.x * GROUP + head) * HEAD_DIM + column);
}

#if HEAD_DIM % 128 == 0 && HEAD_DIM <= 512

constexpr int UP_THREADS = 512, UP_WARPS = 4, UP_TILE = 16, UP_STEPS = HEAD_DIM / (32 * UP_WARPS), UP_TILES = UP_THREADS / (32 * UP_WARPS);
constexpr int UP_TOKENS = 2, UP_PARTS = UP_THREADS / PER_HEAD;
static_assert(UP_TILES * UP_TILE == 64 && UP_TOKENS == 2, "latent_attention.py has the same");

// made [T, GROUP, N]: merged heads of up to UP_TOKENS tokens, rounded, times weight [GROUP, N, HEAD_DIM] transposed as head_linear (latent.cu) adds it: one
// kernel less where kernels wait for each other most. latents [T, GROUP, HEAD_DIM]: of items that are not split. Blocks of a head merge it each for
// itself. Grid: UP_TILES tiles of 16 rows of weights, heads.
extern "C" __global__ void __launch_bounds__(UP_THREADS)
    project_latents(Number* made, const Number* latents, float* partial_sums, float2* partial_stats, const int4* token_places, const int2* segment_pieces,
                    const Number* weight, int first_token, int num_tokens, int N, int weight_head) {
    __shared__ __align__(16) Number rows[UP_TOKENS][HEAD_DIM];
    __shared__ __align__(16) uint8_t rest[(UP_THREADS - PER_HEAD) * sizeof(Merged)];
    __shared__ float sums[UP_TILES][UP_WARPS][UP_TOKENS][UP_TILE];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, head = blockIdx.y;
    const int tile = blockIdx.x * UP_TILES + warp / UP_WARPS, own_part = warp % UP_WARPS;
    const bool is_used = tile * UP_TILE < N;
    uint4 a[UP_STEPS][2] = {};
    const Number* own = weight + (size_t)head * weight_head + (size_t)(tile * UP_TILE + g) * HEAD_DIM + own_part * UP_STEPS * 32 + t * 8;
#pragma unroll
    for (int s = 0; s < UP_STEPS; ++s)
        if (is_used) a[s][0] = __ldg((const uint4*)(own + s * 32)), a[s][1] = __ldg((const uint4*)(own + 8 * HEAD_DIM + s * 32));
    launch_dependents();
    // Tokens are merged beside each other. The plan is older than the kernel ahead.
    const int column = threadIdx.x % PER_HEAD * 8, token = threadIdx.x / PER_HEAD % num_tokens, part = threadIdx.x / (PER_HEAD * num_tokens);
    const int4 place = token_places[first_token + token];
    const int row = place.y * GROUP + head;
    const int2 pieces = place.x >= 0 ? segment_pieces[place.x + row / MAX_ROWS] : make_int2(0, 0);
    wait_for_earlier();
    const Merged merged = merge_shared(Partials{partial_sums, partial_stats}, pieces.y < 2 ? make_int2(0, 0) : pieces, row, column, part,
                                       UP_PARTS / num_tokens, PER_HEAD * num_tokens, reinterpret_cast<Merged*>(rest));
    if (part == 0) {
        if (pieces.y < 2) *(uint4*)(rows[token] + column) = __ldcg((const uint4*)(latents + ((int64_t)token * GROUP + head) * HEAD_DIM + column));
        else merged.store(rows[token] + column);
    }
    __syncthreads();
    float acc[4] = {};
#pragma unroll
    for (int s = 0; s < UP_STEPS; ++s) {
        const uint4 b = g < num_tokens ? *(const uint4*)(rows[g] + (own_part * UP_STEPS + s) * 32 + t * 8) : make_uint4(0, 0, 0, 0);
        multiply(acc, {a[s][0].x, a[s][1].x, a[s][0].y, a[s][1].y}, b.x, b.y);
        multiply(acc, {a[s][0].z, a[s][1].z, a[s][0].w, a[s][1].w}, b.z, b.w);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
        if (const int of = t * 2 + i % 2; of < UP_TOKENS) sums[warp / UP_WARPS][own_part][of][g + i / 2 * 8] = acc[i];
    __syncthreads();
    constexpr int COLUMNS_HERE = UP_TILES * UP_TILE;
    if (const int i = threadIdx.x * 2; i < num_tokens * COLUMNS_HERE) {
        const int of = i / COLUMNS_HERE, n = i % COLUMNS_HERE, first = blockIdx.x * COLUMNS_HERE + n;
        float values[2] = {};
#pragma unroll
        for (int p = 0; p < UP_WARPS; ++p)
#pragma unroll
            for (int j = 0; j < 2; ++j) values[j] += sums[n / UP_TILE][p][of][n % UP_TILE + j];
        if (first < N) *(Pair*)(made + ((int64_t)of * GROUP + head) * N + first) = to_pair(values[0], values[1]);
    }
}

#endif
