// Prompt lookup on the device: the earliest place where the longest end of the text stood before, and what followed it there.

#include "request_table.cuh"

struct Text {
  const int* tokens;
  const int* drafts;
  int num_tokens;
  __device__ __forceinline__ int operator[](int i) const { return i < num_tokens ? tokens[i] : drafts[i - num_tokens]; }
};

// Proposes for each request; one reading of the text finds every size at once. A place is the token that would be the pattern's last;
// the longest match wins, the earliest of equals. num_given, min_scores and scores may be null. Grid: requests. THREADS a block.
extern "C" __global__ void __launch_bounds__(THREADS) draft_ngram(Requests table, const int* request_indices, const int* draft_limits, const int* num_given,
                                                                  const int* min_scores, int* scores, int max_size, int min_size) {
  __shared__ unsigned long long of_warp[THREADS / 32];
  const int request = blockIdx.x, index = request_indices[request], asked = draft_limits[request];
  if (asked < 0) {
    if (scores && threadIdx.x == 0) scores[request] = 0;
    return;
  }
  const int num_tokens = table.num_tokens[index];
  const int room = table.params[index].max_total_tokens - num_tokens - 1;
  const int limit = max(min(min(asked, table.max_drafts), room), 0);
  const int given = min(num_given ? num_given[request] : 0, limit);
  int* drafts = table.drafts + size_t(index) * table.max_drafts;
  const Text text = {table.tokens + size_t(index) * table.max_len, drafts, num_tokens};
  const int end = num_tokens + given, largest = min(max_size, end - 1);
  unsigned long long best = 0;
  if (given < limit && largest >= min_size && num_tokens > 0) {
    const int last = text[end - 1];
    const auto consider = [&](int place) {
      int size = 1;
      while (size < largest && size <= place && text[place - size] == text[end - 1 - size]) ++size;
      const unsigned long long key = (unsigned long long)(size) << 32 | unsigned(~place);
      if (size >= min_size && key > best) best = key;
    };
    // Places 0 .. end - 2; those among the given drafts by the first threads.
    const int in_tokens = min(num_tokens, end - 1);
    const int4* vectors = reinterpret_cast<const int4*>(text.tokens);
    for (int start = threadIdx.x; 4 * start < in_tokens; start += 4 * THREADS) {
      int4 found[4];
#pragma unroll
      for (int u = 0; u < 4; ++u)
        if (4 * (start + u * THREADS) < in_tokens) found[u] = vectors[start + u * THREADS];
#pragma unroll
      for (int u = 0; u < 4; ++u) {
        const int place = 4 * (start + u * THREADS);
        if (place < in_tokens && found[u].x == last) consider(place);
        if (place + 1 < in_tokens && found[u].y == last) consider(place + 1);
        if (place + 2 < in_tokens && found[u].z == last) consider(place + 2);
        if (place + 3 < in_tokens && found[u].w == last) consider(place + 3);
      }
    }
    for (int place = in_tokens + threadIdx.x; place < end - 1; place += THREADS)
      if (text[place] == last) consider(place);
  }
#pragma unroll
  for (int mask = 16; mask; mask /= 2) {
    const unsigned long long other = __shfl_xor_sync(~0u, best, mask);
    if (other > best) best = other;
  }
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = best;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  best = threadIdx.x < THREADS / 32 ? of_warp[threadIdx.x] : 0;
#pragma unroll
  for (int mask = 16; mask; mask /= 2) {
    const unsigned long long other = __shfl_xor_sync(~0u, best, mask);
    if (other > best) best = other;
  }
  if (scores || min_scores) {
    // Tokens that agree on before the match, a lane each, and before the end of the text.
    const int size = int(best >> 32), place = ~int(unsigned(best)), lane = threadIdx.x;
    const int first = place - size - lane, second = end - 1 - size - lane;
    const bool is_equal = best && lane < MAX_SCORE_PAST && first >= 0 && text[first] == text[second];
    const int score = size + __ffs(__ballot_sync(~0u, !is_equal)) - 1;
    if (scores && lane == 0) scores[request] = score;
    if (min_scores && score < min_scores[request]) best = 0;
  }
  const int follow = best ? ~int(unsigned(best)) + 1 : end;
  const int count = min(limit - given, end - follow);
  for (int i = threadIdx.x; i < count; i += 32) drafts[given + i] = text[follow + i];
  if (threadIdx.x == 0) table.num_drafts[index] = given + max(count, 0);
}
