// Lays out what the target and the drafter compute next, from the state that the last step left on the device.
// One block each: a step has at most 256 requests, and these kernels stand between two others.

#include <cstdint>

struct Sizes {
    int batch, rows, max_tokens, max_drafts, table_width, page_size, scratch_page, dummy_slot;
};

// What the host says of each batch row; [fields][batch] int32.
enum Field { SLOT, NUM_PAGES, END, VERIFY_LIMIT, MODEL_LIMIT };  // and what drafters read

__device__ int64_t kv_slot(const int* table, const Sizes& s, int slot, int num_pages, int position) {
    const int page = position / s.page_size, place = position % s.page_size;
    const int id = page < num_pages ? table[(int64_t)slot * s.table_width + page] : s.scratch_page;
    return (int64_t)id * s.page_size + place;
}

// Exclusive sums of `count` over the block's 256 threads; all of them are in shared memory afterwards.
__device__ int scan(int count, int* sums) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    __shared__ int totals[8];
    int sum = count;
    for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(~0u, sum, step);
        if (lane >= step) sum += other;
    }
    if (lane == 31) totals[warp] = sum;
    __syncthreads();
    for (int w = 0; w < warp; w++) sum += totals[w];
    sums[threadIdx.x + 1] = sum;
    if (threadIdx.x == 0) sums[0] = 0;
    __syncthreads();
    return sum - count;
}

__device__ int owner_of(const int* starts, int batch, int row) {  // the last b with starts[b] <= row
    int low = 0, high = batch;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (starts[middle] <= row) low = middle; else high = middle;
    }
    return low;
}

extern "C" __global__ void __launch_bounds__(256) prepare_step(
    int64_t* packed, int* cu_query_lens, int* seq_lens, int* num_verified,
    const int* fields, const int* tokens, const int* num_tokens, const int* drafts, const int* num_drafts, const int* page_table,
    const Sizes* sizes) {
    const Sizes s = *sizes;
    __shared__ int starts[257];
    const int b = threadIdx.x;
    const bool is_row = b < s.batch;
    const int slot = is_row ? fields[SLOT * s.batch + b] : s.dummy_slot;
    int count = 0, known = 0;
    if (slot != s.dummy_slot) {
        known = num_tokens[slot];
        const int end = fields[END * s.batch + b], limit = min(fields[VERIFY_LIMIT * s.batch + b], end - known - 1);
        if (known < end) count = 1 + min(num_drafts[slot], max(limit, 0));
    }
    const int begin = min(scan(count, starts), s.rows);
    count = min(count, s.rows - begin);  // a bucket with fewer rows than all drafts need leaves the last ones out
    __syncthreads();
    if (is_row) {
        starts[b] = begin;
        cu_query_lens[b] = begin;
        seq_lens[b] = count ? known - 1 + count : 0;
        num_verified[b] = max(count - 1, 0);
        if (b == s.batch - 1) cu_query_lens[s.batch] = starts[s.batch] = begin + count;
    }
    __syncthreads();
    const int total = starts[s.batch];
    for (int row = threadIdx.x; row < s.rows; row += blockDim.x) {
        int64_t token = 0, position = 0, place = (int64_t)s.scratch_page * s.page_size;
        if (row < total) {
            const int owner = owner_of(starts, s.batch, row), own_slot = fields[SLOT * s.batch + owner], j = row - starts[owner];
            const int last = num_tokens[own_slot] - 1;
            token = j == 0 ? tokens[(int64_t)own_slot * s.max_tokens + last] : drafts[(int64_t)own_slot * s.max_drafts + j - 1];
            position = last + j;
            place = kv_slot(page_table, s, own_slot, fields[NUM_PAGES * s.batch + owner], last + j);
        }
        packed[row] = token;
        packed[s.rows + row] = position;
        packed[2 * s.rows + row] = place;
    }
}

// The drafter sees the tokens that were just emitted; rows of rejected drafts go on with the last one, and are overwritten later.
extern "C" __global__ void __launch_bounds__(256) prepare_drafter(
    int64_t* packed, int* seq_lens, int64_t* last_rows,
    const int* fields, const int* cu_query_lens, const int* emitted, const int* num_emitted, const int* num_tokens, const int* page_table,
    const Sizes* sizes) {
    const Sizes s = *sizes;
    const int width = s.max_drafts + 1, total = cu_query_lens[s.batch];
    for (int b = threadIdx.x; b < s.batch; b += blockDim.x) {
        const int slot = fields[SLOT * s.batch + b], begin = cu_query_lens[b], count = cu_query_lens[b + 1] - begin, out = num_emitted[b];
        seq_lens[b] = count ? num_tokens[slot] - out + count : 0;
        last_rows[b] = min(begin + max(out - 1, 0), s.rows - 1);
    }
    for (int row = threadIdx.x; row < s.rows; row += blockDim.x) {
        int64_t token = 0, position = 0, place = (int64_t)s.scratch_page * s.page_size, before = place;
        if (row < total) {
            const int b = owner_of(cu_query_lens, s.batch, row), j = row - cu_query_lens[b], out = num_emitted[b];
            const int slot = fields[SLOT * s.batch + b], num_pages = fields[NUM_PAGES * s.batch + b];
            const int first = num_tokens[slot] - out;
            token = out ? emitted[b * width + min(j, out - 1)] : 0;
            position = first + j;
            place = kv_slot(page_table, s, slot, num_pages, first + j);
            before = kv_slot(page_table, s, slot, num_pages, first + j - 1);
        }
        packed[row] = token;
        packed[s.rows + row] = position;
        packed[2 * s.rows + row] = place;
        packed[3 * s.rows + row] = before;
    }
}

// Adds the draft that was chosen for each row that wants one more, and lays out the forward that makes the next.
extern "C" __global__ void __launch_bounds__(256) append_draft(
    int* drafts, int* num_drafts, int64_t* packed, int* seq_lens,
    const int* fields, const int* chosen, const int* num_tokens, const int* page_table, const Sizes* sizes, int step) {
    const Sizes s = *sizes;
    for (int b = threadIdx.x; b < s.batch; b += blockDim.x) {
        const int slot = fields[SLOT * s.batch + b], known = num_tokens[slot];
        const bool is_wanted = slot != s.dummy_slot && step < min(fields[MODEL_LIMIT * s.batch + b], fields[END * s.batch + b] - known - 1);
        const int token = chosen[b];
        if (is_wanted) {
            drafts[(int64_t)slot * s.max_drafts + step] = token;
            num_drafts[slot] = step + 1;
        }
        // Rows that want no more compute on their scratch page: the batch keeps its shape.
        const int position = is_wanted ? known + step : 0;
        packed[b] = token;
        packed[s.batch + b] = position;
        packed[2 * s.batch + b] = kv_slot(page_table, s, slot, is_wanted ? fields[NUM_PAGES * s.batch + b] : 0, position);
        seq_lens[b] = is_wanted ? position + 1 : 1;
    }
}

// Four heads and the tokens of each row, in one piece for one copy to the host.
extern "C" __global__ void pack_results(
    int* results, const int* emitted, const int* num_emitted, const int* num_accepted, const int* num_verified, const bool* is_broken,
    const int* cu_query_lens, int width) {
    const int b = blockIdx.x, lane = threadIdx.x;
    bool broken = false;
    for (int row = cu_query_lens[b] + lane; row < cu_query_lens[b + 1]; row += 32) broken |= is_broken[row];
    broken = __any_sync(~0u, broken);
    int* own = results + (int64_t)b * width;
    if (lane == 0) {
        own[0] = num_emitted[b];
        own[1] = num_accepted[b];
        own[2] = num_verified[b];
        own[3] = broken;
    }
    for (int i = lane; i < width - 4; i += 32) own[4 + i] = emitted[(int64_t)b * (width - 4) + i];
}

__host__ __device__ inline float unit_hash(unsigned x) {  // in [0, 1)
    x = (x ^ 61) ^ (x >> 16);
    x *= 9;
    x ^= x >> 4;
    x *= 0x27d4eb2d;
    x ^= x >> 15;
    return (x >> 8) * 0x1p-24f;
}

extern "C" __global__ void __launch_bounds__(256) simulate_acceptance(
    int* chosen, const int* fields, const int* cu_query_lens, const int* drafts, const int* num_tokens, const Sizes* sizes, float rate) {
    const Sizes s = *sizes;
    for (int row = threadIdx.x; row < cu_query_lens[s.batch]; row += blockDim.x) {
        const int b = owner_of(cu_query_lens, s.batch, row), j = row - cu_query_lens[b], slot = fields[SLOT * s.batch + b];
        const bool has_draft = row + 1 < cu_query_lens[b + 1];
        if (has_draft && unit_hash((num_tokens[slot] + j) * 1024 + slot) < rate) chosen[row] = drafts[(int64_t)slot * s.max_drafts + j];
    }
}

// target[index] = value for every (index, value) of updates [count][2]; each index at most once.
extern "C" __global__ void write_values(int* target, const int* updates, int count) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) target[updates[2 * i]] = updates[2 * i + 1];
}
