// Which drafts stand, by each strategy, without the host.

#include "draw.cuh"
#include "request_table.cuh"

__device__ __forceinline__ int count_leading(bool is_accepted) {  // lanes before the first that is not
  const unsigned rejected = __ballot_sync(~0u, !is_accepted);
  return rejected ? __ffs(rejected) - 1 : 32;
}

// Accepts drafts while they are what the target chose, for greedy and target_match. Grid: requests; one warp. width: K + 1 <= 32.
extern "C" __global__ void __launch_bounds__(32)
    verify_drafts(int* emitted, int* num_emitted, int* num_accepted, const int* chosen, Requests table, const int* request_indices, const int* cu_logit_rows,
                  int width, int policy) {
  const int request = blockIdx.x, lane = threadIdx.x, start = cu_logit_rows[request];
  const int num_rows = cu_logit_rows[request + 1] - start, num_drafts = min(num_rows, width) - 1;
  const int own = lane <= num_drafts ? chosen[start + lane] : -1;
  const int draft = lane < num_drafts ? table.drafts[size_t(request_indices[request]) * table.max_drafts + lane] : -1;
  const bool is_match = policy == NORMAL ? own == draft : policy == ACCEPT_ALL;
  const int accepted = count_leading(lane < num_drafts && is_match);
  if (lane < width) emitted[request * width + lane] = num_rows <= 0 ? -1 : lane < accepted ? draft : lane == accepted ? own : -1;
  if (lane == 0) num_accepted[request] = num_rows <= 0 ? 0 : accepted, num_emitted[request] = num_rows <= 0 ? 0 : accepted + 1;
}

// Accepts children while one is what the target chose at their parent, and says which rows chose. Grid: requests; one warp, of which each lane has
// two drafts. width: K + 1 <= 64.
extern "C" __global__ void __launch_bounds__(32)
    verify_tree(int* emitted, int* num_emitted, int* num_accepted, int* path, const int* chosen, Requests table, const int* request_indices,
                const int* cu_logit_rows, int width, int policy) {
  const int request = blockIdx.x, lane = threadIdx.x, start = cu_logit_rows[request];
  const int num_rows = min(cu_logit_rows[request + 1] - start, width), num_drafts = num_rows - 1;
  const size_t own = size_t(request_indices[request]) * table.max_drafts;
  int drafts[2], parents[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int node = lane + 32 * h;
    drafts[h] = node < num_drafts ? table.drafts[own + node] : -1;
    parents[h] = node < num_drafts ? table.parents[own + node] : -2;
  }
  for (int i = lane; i < width; i += 32) emitted[request * width + i] = path[request * width + i] = -1;
  __syncwarp();
  int row = 0, depth = 0;
  while (num_rows > 0) {
    const int token = chosen[start + row];
    int found = -1;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const bool is_child = parents[h] == row - 1 && lane + 32 * h >= row;
      const bool is_good = policy == ACCEPT_ALL || (policy == NORMAL && drafts[h] == token);
      const unsigned ballot = __ballot_sync(~0u, is_child && is_good);
      if (found < 0 && ballot) found = 32 * h + __ffs(ballot) - 1;
    }
    const int low = __shfl_sync(~0u, drafts[0], found & 31), high = __shfl_sync(~0u, drafts[1], found & 31);
    if (lane == 0) emitted[request * width + depth] = found < 0 ? token : found < 32 ? low : high, path[request * width + depth] = row;
    if (found < 0) break;
    row = found + 1;
    ++depth;
  }
  if (lane == 0) num_accepted[request] = depth, num_emitted[request] = num_rows > 0 ? depth + 1 : 0;
}

// The same from dense ids. target_ids [B, width].
extern "C" __global__ void __launch_bounds__(32)
    verify(int* emitted, int* num_accepted, const int* draft_ids, const int* num_drafts, const int* target_ids, int width) {
  const int request = blockIdx.x, lane = threadIdx.x;
  const int target = lane < width ? target_ids[request * width + lane] : -1;
  const int accepted = count_leading(lane < width - 1 && lane < num_drafts[request] && draft_ids[request * (width - 1) + lane] == target);
  if (lane < width) emitted[request * width + lane] = lane <= accepted ? target : -1;
  if (lane == 0) num_accepted[request] = accepted;
}

// Speculative sampling: accepts draft x with probability min(1, p(x) / q(x)), and draws the last token from max(p - q, 0), or from p
// after the last draft. draft_probs 0: certain drafts. Grid: requests.
extern "C" __global__ void __launch_bounds__(DRAW_THREADS)
    verify_rejection(int* emitted, int* num_accepted, const float* probs, const float* draft_probs, const int* draft_ids, const int* num_drafts,
                     const long long* seeds, const int* positions, int width, int vocab_size) {
  __shared__ Drawing shared;
  __shared__ int accepted_cell;
  const int request = blockIdx.x, num_columns = width - 1, count = min(num_drafts[request], num_columns), position = positions[request];
  const unsigned seed_low = unsigned(seeds[request]), seed_high = unsigned((unsigned long long)(seeds[request]) >> 32);
  const float* p = probs + size_t(request) * width * vocab_size;
  const float* q = draft_probs ? draft_probs + size_t(request) * num_columns * vocab_size : nullptr;
  const int* drafts = draft_ids + request * num_columns;
  if (threadIdx.x < 32) {
    const int lane = threadIdx.x;
    bool is_accepted = false;
    if (lane < count) {
      const unsigned number = philox(0, position + lane, ACCEPT_STREAM, RoundKeys(seed_low, seed_high)).x;
      const size_t cell = size_t(lane) * vocab_size + drafts[lane];
      is_accepted = (double(number) + 0.5) * 0x1p-32 * double(q ? q[cell] : 1.0f) < double(p[cell]);
    }
    const int accepted = count_leading(is_accepted);
    if (lane == 0) accepted_cell = accepted;
  }
  __syncthreads();
  const int accepted = accepted_cell;
  p += size_t(accepted) * vocab_size;
  const int rejected_id = accepted < count ? drafts[accepted] : -1;
  const Noise noise = {unsigned(position + accepted), RECOVER_STREAM, seed_low, seed_high};
  unsigned long long best = 0;
  if (accepted < count) {
    const float* less = q ? q + size_t(accepted) * vocab_size : nullptr;
    best = draw_block(noise, vocab_size, shared, [&](int chunk, float (&weights)[8]) {
      float others[8] = {};
      load_weights(p, chunk, vocab_size, weights);
      if (less) load_weights(less, chunk, vocab_size, others);
#pragma unroll
      for (int k = 0; k < 8; ++k) weights[k] = fmaxf(weights[k] - (less ? others[k] : 8 * chunk + k == rejected_id ? 1.0f : 0.0f), 0.0f);
    });
  }
  // Where p <= q everywhere up to rounding, nothing is left: then p is as good as q.
  if (!best) best = draw_block(noise, vocab_size, shared, [&](int chunk, float (&weights)[8]) { load_weights(p, chunk, vocab_size, weights); });
  if (threadIdx.x < width) {
    const int lane = threadIdx.x, last = best ? key_token(best) : 0;
    emitted[request * width + lane] = lane < accepted ? drafts[lane] : lane == accepted ? last : -1;
  }
  if (threadIdx.x == 0) num_accepted[request] = accepted;
}

// A token of each row by its probabilities [R, V]. Grid: rows.
extern "C" __global__ void __launch_bounds__(DRAW_THREADS)
    draw_tokens(int* token_ids, const float* probs, const long long* seeds, const int* positions, int stream, int vocab_size) {
  __shared__ Drawing shared;
  const float* row = probs + size_t(blockIdx.x) * vocab_size;
  const unsigned long long seed = seeds[blockIdx.x];
  const Noise noise = {unsigned(positions[blockIdx.x]), unsigned(stream), unsigned(seed), unsigned(seed >> 32)};
  const unsigned long long best =
      draw_block(noise, vocab_size, shared, [&](int chunk, float (&weights)[8]) { load_weights(row, chunk, vocab_size, weights); });
  if (threadIdx.x == 0) token_ids[blockIdx.x] = best ? key_token(best) : 0;
}

// The `most` likeliest tokens of each row, likeliest first, equal ones by id, and how many of them reach top_p. Grid: rows.
extern "C" __global__ void __launch_bounds__(1024) top_p_candidates(int* token_ids, float* values, int* num_candidates, const float* probs,
                                                                     const float* top_p, int most, int vocab_size) {
  __shared__ unsigned long long cells[32];
  const float* row = probs + size_t(blockIdx.x) * vocab_size;
  const int lane = threadIdx.x % 32, warp_start = threadIdx.x - lane;
  // A thread's best among those ordered after the last one taken; the warp whose token was taken looks again.
  const auto find = [&](int thread, int step, int first, unsigned long long below) {
    unsigned long long best = 0;
    for (int id = thread + first * 1024; id < vocab_size; id += step * 1024) {
      const unsigned long long key = score_key(row[id], id);
      if (key < below && key > best) best = key;
    }
    return best;
  };
  unsigned long long own = find(threadIdx.x, 1, 0, ~0ull);
  double before = 0;
  int count = 0;
  for (int i = 0; i < most; ++i) {
    const unsigned long long taken = block_max(own, cells);
    const int id = key_token(taken);
    const float value = unorder(int(unsigned(taken >> 32) ^ 0x80000000u));
    if (threadIdx.x == 0) token_ids[blockIdx.x * most + i] = id, values[blockIdx.x * most + i] = value;
    if (i == 0 || (before < top_p[blockIdx.x] && value > 0)) ++count;
    before += value;
    const int owner = id % 1024;
    if (owner >= warp_start && owner < warp_start + 32) {
      unsigned long long next = find(owner, 32, lane, taken);
#pragma unroll
      for (int mask = 16; mask; mask /= 2) {
        const unsigned long long other = __shfl_xor_sync(~0u, next, mask);
        if (other > next) next = other;
      }
      if (lane == owner % 32) own = next;
    }
  }
  if (threadIdx.x == 0) num_candidates[blockIdx.x] = count;
}

// One of each row's first num_candidates candidates, drawn by their probabilities. Grid: rows; one warp.
extern "C" __global__ void __launch_bounds__(32) sample_candidates(int* token_ids, const int* candidate_ids, const float* probs, const int* num_candidates,
                                                                   const long long* seeds, const int* positions, int most) {
  const int row = blockIdx.x;
  const unsigned seed_low = unsigned(seeds[row]), seed_high = unsigned((unsigned long long)(seeds[row]) >> 32);
  unsigned long long best = 0;
  for (int i = threadIdx.x; i < num_candidates[row]; i += 32) {
    const int id = candidate_ids[row * most + i];
    const RoundKeys keys(seed_low, seed_high);
    const uint4 leading = philox(id / 8 * 2, positions[row], SAMPLE_STREAM, keys);
    const uint4 rest = philox(id / 8 * 2 + 1, positions[row], SAMPLE_STREAM, keys);
    const unsigned number = token_number(leading, rest, id % 8);
    const unsigned long long key = score_key(__fadd_rn(logf(probs[row * most + i]), gumbel(number)), i);  // of equals, the likeliest
    if (key > best) best = key;
  }
#pragma unroll
  for (int mask = 16; mask; mask /= 2) {
    const unsigned long long other = __shfl_xor_sync(~0u, best, mask);
    if (other > best) best = other;
  }
  if (threadIdx.x == 0) token_ids[row] = candidate_ids[row * most + (best ? key_token(best) : 0)];
}

// FastDeploy's rule: see reference.verify_top_p. Grid: requests; one warp. width: K + 1 <= 32.
extern "C" __global__ void __launch_bounds__(32)
    verify_top_p(int* emitted, int* num_accepted, const int* draft_ids, const int* num_drafts, const int* candidate_ids, const int* num_candidates,
                 const int* correction_ids, int width, int most, int window) {
  const int request = blockIdx.x, lane = threadIdx.x, count = min(num_drafts[request], width - 1);
  const int draft = lane < count ? draft_ids[request * (width - 1) + lane] : -1;
  bool is_candidate = false, is_best = false, is_second = false;
  if (lane < count) {
    const int* candidates = candidate_ids + (request * width + lane) * most;
    for (int i = 0; i < num_candidates[request * width + lane]; ++i) is_candidate |= candidates[i] == draft;
    is_best = candidates[0] == draft;
    is_second = most > 1 && candidates[1] == draft;
  }
  const unsigned candidate = __ballot_sync(~0u, is_candidate), best = __ballot_sync(~0u, is_best), second = __ballot_sync(~0u, is_second);
  const unsigned ahead = window < 32 ? (1u << window) - 1 : ~0u;
  int place = 0;
  while (place < count) {
    if (candidate >> place & 1) {
      ++place;
      continue;
    }
    if (!(second >> place & 1) || place + 1 + window > count || (best >> (place + 1) & ahead) != ahead) break;
    place += 1 + window;
  }
  if (lane < width) emitted[request * width + lane] = lane < place ? draft : lane == place ? correction_ids[request * width + place] : -1;
  if (lane == 0) num_accepted[request] = place;
}
