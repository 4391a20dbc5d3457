// Lays out what the target and the drafter compute next, from the state that the last step left on the device.
// A step has at most MAX_BATCH requests, a thread for each. Steps that decode take one block; of more, for prompts, each finds where requests
// begin, and lays out its share of the rows.

#include <cstdint>
#include "paths.cuh"

constexpr int THREADS = MAX_BATCH;

// The page that a position lies on; the scratch page for what lies past the request's pages.
__device__ __forceinline__ int64_t page_of(const int* table, const StepSizes& s, int index, int num_pages, int position) {
  const int page = position / s.page_size;
  return page < num_pages && page < s.table_width ? table[(int64_t)index * s.table_width + page] : s.scratch_page;
}

// Where this thread's `count` rows begin, of `most` in all: a bucket with fewer rows than all want leaves the last ones out. starts [batch + 1]
// in shared memory says it of all; count becomes what is left of it.
__device__ int allot(int& count, int most, int* starts) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  __shared__ int totals[THREADS / 32];
  __syncthreads();
  int sum = count;
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(~0u, sum, step);
    if (lane >= step) sum += other;
  }
  if (lane == 31) totals[warp] = sum;
  __syncthreads();
  for (int w = 0; w < warp; w++) sum += totals[w];
  const int begin = min(sum - count, most);
  starts[threadIdx.x + 1] = min(sum, most);
  if (threadIdx.x == 0) starts[0] = 0;
  __syncthreads();
  count = min(sum, most) - begin;
  return begin;
}

__device__ __forceinline__ int owner_of(const int* starts, int batch, int row) {  // the last b with starts[b] <= row
  int low = 0, high = batch;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (starts[middle] <= row) low = middle; else high = middle;
  }
  return low;
}

// packed [4][rows]: token ids, positions, KV slots and tap slots. seen [rows], in steps with trees: the rows of its request that each row sees.
extern "C" __global__ void __launch_bounds__(THREADS)
    prepare_step(int64_t* packed, int* cu_query_lens, int* seq_lens, int* num_verified, int* cu_logit_rows, int64_t* logit_rows,
                 unsigned long long* seen, int most_logit_rows, Requests table, const int* fields, const int* page_table, StepSizes s) {
  __shared__ int starts[THREADS + 1], logit_starts[THREADS + 1], firsts[THREADS], knowns[THREADS];
  const int b = threadIdx.x;
  const bool is_row = b < s.batch;
  const auto field = [&](int name, int row) { return fields[name * s.batch + row]; };
  const int index = is_row ? field(INDEX, b) : s.dummy_index;
  int count = 0, known = 0, first = 0, named = 0, emits = 0;
  if (index != s.dummy_index) {
    known = table.num_tokens[index];
    const int end = field(END, b), limit = min(field(VERIFY_LIMIT, b), end - known - 1), host_first = field(FIRST, b);
    named = field(COUNT, b), emits = field(EMITS, b);
    first = host_first < 0 ? known - 1 : host_first;
    if (known < end) count = named + (host_first < 0 ? max(min(table.num_drafts[index], limit), 0) : 0);
  }
  firsts[b] = first, knowns[b] = known;
  const int begin = allot(count, s.rows, starts);
  const int verified = count > 0 ? max(count - named, 0) : 0;
  int num_logits = emits && count > 0 && count >= named ? 1 + verified : 0;
  const int own_logits = num_logits, logit_begin = allot(num_logits, most_logit_rows, logit_starts);
  if (blockIdx.x == 0) {
    for (int i = 0; i < num_logits; ++i) logit_rows[logit_begin + i] = begin + count - own_logits + i;
    for (int row = logit_starts[THREADS] + threadIdx.x; row < most_logit_rows; row += THREADS) logit_rows[row] = 0;
  }
  if (is_row && blockIdx.x == 0) {
    cu_query_lens[b] = begin;
    cu_logit_rows[b] = logit_begin;
    seq_lens[b] = count ? first + count : 0;
    num_verified[b] = verified;
    if (b == s.batch - 1) cu_query_lens[s.batch] = begin + count, cu_logit_rows[s.batch] = logit_begin + num_logits;
  }
  const int total = starts[THREADS];
  for (int row = blockIdx.x * THREADS + threadIdx.x; row < s.rows; row += gridDim.x * THREADS) {
    int64_t token = 0, position = 0, slot = (int64_t)s.scratch_page * s.page_stride, tap = (int64_t)s.scratch_page * s.tap_stride;
    unsigned long long own_seen = 0;
    if (row < total) {
      const int owner = owner_of(starts, s.batch, row), own = field(INDEX, owner), place = firsts[owner] + row - starts[owner];
      const int ahead = place - knowns[owner];
      token = ahead < 0 ? table.tokens[(int64_t)own * table.max_len + place]
                        : table.drafts[(int64_t)own * table.max_drafts + min(ahead, table.max_drafts - 1)];
      position = place;
      const int64_t page = page_of(page_table, s, own, field(NUM_PAGES, owner), place);
      slot = page * s.page_stride + place % s.page_size;
      tap = page * s.tap_stride + place % s.page_size;
      if (seen && field(FIRST, owner) < 0) {
        own_seen = find_seen(table, own, row - starts[owner]);
        position = firsts[owner] + __popcll(own_seen) - 1;
      }
    }
    packed[row] = token;
    packed[s.rows + row] = position;
    packed[2 * s.rows + row] = slot;
    packed[3 * s.rows + row] = tap;
    if (seen) seen[row] = own_seen;
  }
}

// A step's rows by request, [batch + 1], as two lists of `most` requests: of the first num_prompts, and of those that decode. Each is as long as the
// step may have requests, a request has no rows in the other's list, and those behind the step's have none in either. lasts [most], of last_rows
// [batch], if that is not null: 0 behind the step's.
extern "C" __global__ void __launch_bounds__(THREADS)
    split_rows(int* cu_prompt_rows, int* cu_decoding_rows, int* lens, int* owners, int64_t* lasts, const int* cu_rows, const int* seq_lens,
               const int* indices, const int64_t* last_rows, int batch, int num_prompts, int most) {
  const int border = cu_rows[num_prompts];
  for (int b = threadIdx.x; b <= most; b += THREADS) {
    const int begin = cu_rows[min(b, batch)];
    cu_prompt_rows[b] = min(begin, border);
    cu_decoding_rows[b] = max(begin, border);
    if (b == most) break;
    lens[b] = b < batch ? seq_lens[b] : 0;
    owners[b] = indices[min(b, batch - 1)];
    if (last_rows) lasts[b] = b < batch ? last_rows[b] : 0;
  }
}

// packed [5][rows]: token ids, positions, KV slots of the drafter, tap slots, and tap slots of the tokens before. Rows of rejected drafts go
// on with the newest token, and are written over later. One block notes how far the drafter is then; of several none may, as the others read it.
extern "C" __global__ void __launch_bounds__(THREADS)
    prepare_drafter(int64_t* packed, int* cu_rows, int* seq_lens, int64_t* last_rows, int rows, Requests table, const int* fields,
                    const int* target_lens, const int* page_table, StepSizes s) {
  __shared__ int starts[THREADS + 1], firsts[THREADS], knowns[THREADS];
  const int b = threadIdx.x;
  const bool is_row = b < s.batch;
  const auto field = [&](int name, int row) { return fields[name * s.batch + row]; };
  const int index = is_row ? field(INDEX, b) : s.dummy_index;
  int count = 0, known = 0, first = 0;
  if (index != s.dummy_index) {
    known = table.num_tokens[index], first = table.num_drafter_tokens[index];
    const int asked = field(DRAFTER_COUNT, b), target_len = target_lens[b];
    count = asked >= 0 ? asked : target_len > 0 ? max((s.has_trees ? known : target_len + 1) - first, 0) : 0;
  }
  firsts[b] = first, knowns[b] = known;
  const int begin = allot(count, rows, starts);
  if (is_row && blockIdx.x == 0) {
    cu_rows[b] = begin;
    seq_lens[b] = count ? first + count : 0;
    last_rows[b] = min(begin + min(max(known - 1 - first, 0), max(count - 1, 0)), max(rows - 1, 0));
    if (b == s.batch - 1) cu_rows[s.batch] = begin + count;
    if (count > 0 && gridDim.x == 1) table.num_drafter_tokens[index] = min(first + count, known);
  }
  const int total = starts[THREADS];
  for (int row = blockIdx.x * THREADS + threadIdx.x; row < rows; row += gridDim.x * THREADS) {
    int64_t token = 0, position = 0, slot = (int64_t)s.scratch_page * s.drafter_stride, tap = (int64_t)s.scratch_page * s.tap_stride, before = tap;
    if (row < total) {
      const int owner = owner_of(starts, s.batch, row), own = field(INDEX, owner), num_pages = field(NUM_PAGES, owner);
      const int place = firsts[owner] + row - starts[owner], last = max(place - 1, 0);
      token = table.tokens[(int64_t)own * table.max_len + max(min(place, knowns[owner] - 1), 0)];
      position = place;
      const int64_t page = page_of(page_table, s, own, num_pages, place);
      slot = page * s.drafter_stride + place % s.page_size;
      tap = page * s.tap_stride + place % s.page_size;
      before = page_of(page_table, s, own, num_pages, last) * s.tap_stride + last % s.page_size;
    }
    packed[row] = token;
    packed[rows + row] = position;
    packed[2 * rows + row] = slot;
    packed[3 * rows + row] = tap;
    packed[4 * rows + row] = before;
  }
}

// How far the drafter is after several blocks of prepare_drafter: seq_lens is what they wrote.
extern "C" __global__ void __launch_bounds__(THREADS) note_drafter(Requests table, const int* seq_lens, const int* request_indices, int batch) {
  const int b = threadIdx.x;
  if (b >= batch || seq_lens[b] == 0) return;
  const int index = request_indices[b];
  table.num_drafter_tokens[index] = min(seq_lens[b], table.num_tokens[index]);
}

// Adds the draft that was chosen for each row that wants one more, and lays out the forward that makes the next. Grid: one block.
extern "C" __global__ void __launch_bounds__(THREADS)
    append_draft(int64_t* packed, int* seq_lens, Requests table, const int* fields, const int* chosen, const int* is_skipped,
                 const int* page_table, StepSizes s, int step) {
  const int b = threadIdx.x;
  if (b >= s.batch) return;
  const auto field = [&](int name) { return fields[name * s.batch + b]; };
  const int index = field(INDEX), known = table.num_tokens[index], token = chosen[b];
  const bool is_wanted = index != s.dummy_index && field(DRAFTER_COUNT) != 0 && !(is_skipped && is_skipped[b]) &&
                         step < min(field(MODEL_LIMIT), field(END) - known - 1);
  if (is_wanted) {
    table.drafts[(int64_t)index * table.max_drafts + step] = token;
    table.num_drafts[index] = step + 1;
  }
  // Rows that want no more compute on their scratch page: the batch keeps its shape.
  const int position = is_wanted ? known + step : 0;
  const int64_t page = page_of(page_table, s, index, is_wanted ? field(NUM_PAGES) : 0, position);
  packed[b] = token;
  packed[s.batch + b] = position;
  packed[2 * s.batch + b] = page * s.drafter_stride + position % s.page_size;
  seq_lens[b] = position + 1;
}

// Makes a tree of the tokens that are offered to a request, as many as it wants: those below 0, and what follows them, are none. Grid: requests;
// one warp. parents: parent_stride 0: of all requests.
extern "C" __global__ void __launch_bounds__(32)
    append_tree(Requests table, const int* fields, const int* token_ids, const int* parents, int parent_stride, int count, int batch, int dummy_index) {
  __shared__ int tokens[MAX_NODES], above[MAX_NODES], places[MAX_NODES];
  const int b = blockIdx.x;
  const auto field = [&](int name) { return fields[name * batch + b]; };
  const int index = field(INDEX);
  if (index == dummy_index || field(DRAFTER_COUNT) == 0) return;
  const int limit = min(field(MODEL_LIMIT), field(END) - table.num_tokens[index] - 1);
  if (limit <= 0) return;
  for (int i = threadIdx.x; i < count; i += 32) tokens[i] = token_ids[b * count + i], above[i] = parents[b * parent_stride + i];
  __syncwarp();
  if (threadIdx.x) return;
  int made = 0;
  for (int i = 0; i < count; ++i) {
    const int parent = above[i] < 0 ? -1 : places[above[i]];
    const bool is_draft = tokens[i] >= 0 && made < limit && (above[i] < 0 || parent >= 0);
    places[i] = is_draft ? made : -1;
    if (!is_draft) continue;
    table.drafts[size_t(index) * table.max_drafts + made] = tokens[i];
    table.parents[size_t(index) * table.max_drafts + made++] = parent;
  }
  table.num_drafts[index] = made;
}

// The heads and the tokens of each row, in one piece for one copy to the host. Grid: requests; one warp.
extern "C" __global__ void __launch_bounds__(32)
    pack_results(int* results, const int* emitted, const int* num_emitted, const int* num_accepted, const int* num_verified,
                 const bool* is_broken, const int* cu_logit_rows, int width) {
  const int b = blockIdx.x, lane = threadIdx.x, tokens = width - RESULT_HEAD;
  bool broken = false;
  for (int row = cu_logit_rows[b] + lane; row < cu_logit_rows[b + 1]; row += 32) broken |= is_broken[row];
  broken = __any_sync(~0u, broken);
  int* own = results + (int64_t)b * width;
  if (lane == 0) {
    own[0] = num_emitted[b];
    own[1] = num_accepted[b];
    own[2] = num_verified[b];
    own[3] = broken;
  }
  for (int i = lane; i < tokens; i += 32) own[RESULT_HEAD + i] = emitted[(int64_t)b * tokens + i];
}

__host__ __device__ inline float unit_hash(unsigned x) {  // in [0, 1)
  x = (x ^ 61) ^ (x >> 16);
  x *= 9;
  x ^= x >> 4;
  x *= 0x27d4eb2d;
  x ^= x >> 15;
  return (x >> 8) * 0x1p-24f;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    simulate_acceptance(int* chosen, Requests table, const int* request_indices, const int* cu_logit_rows, int batch, float rate) {
  for (int row = threadIdx.x; row < cu_logit_rows[batch]; row += blockDim.x) {
    const int b = owner_of(cu_logit_rows, batch, row), j = row - cu_logit_rows[b], index = request_indices[b];
    const bool has_draft = row + 1 < cu_logit_rows[b + 1];
    if (has_draft && unit_hash((table.num_tokens[index] + j) * 1024 + index) < rate) chosen[row] = table.drafts[(int64_t)index * table.max_drafts + j];
  }
}

// target[index] = value for every (index, value) of updates [count][2]; each index at most once.
extern "C" __global__ void write_values(int* target, const int* updates, int count) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) target[updates[2 * i]] = updates[2 * i + 1];
}
