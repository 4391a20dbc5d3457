// Prompt lookup on the device: the earliest place where the longest end of the text stood before, and what followed it there.

#include "slots.cuh"

struct Text {
  const int* tokens;
  const int* drafts;
  int num_tokens;
  __device__ __forceinline__ int operator[](int i) const { return i < num_tokens ? tokens[i] : drafts[i - num_tokens]; }
};

// Proposes for each request; one reading of the text finds every size at once. A place is the token that would be the pattern's last;
// the longest match wins, the earliest of equals. Grid: requests. THREADS a block.
extern "C" __global__ void __launch_bounds__(THREADS) draft_ngram(Slots slots, const int* row_slots, const int* draft_limits, const int* num_given,
                                                                  int max_size, int min_size) {
  __shared__ unsigned long long of_warp[THREADS / 32];
  const int request = blockIdx.x, slot = row_slots[request], asked = draft_limits[request];
  if (asked < 0) return;
  const int num_tokens = slots.num_tokens[slot];
  const int room = slots.params[slot].max_total_tokens - num_tokens - 1;
  const int limit = max(min(min(asked, slots.max_drafts), room), 0);
  const int given = min(num_given ? num_given[request] : 0, limit);
  int* drafts = slots.drafts + size_t(slot) * slots.max_drafts;
  const Text text = {slots.tokens + size_t(slot) * slots.max_len, drafts, num_tokens};
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
  const int follow = best ? ~int(unsigned(best)) + 1 : end;
  const int count = min(limit - given, end - follow);
  for (int i = threadIdx.x; i < count; i += 32) drafts[given + i] = text[follow + i];
  if (threadIdx.x == 0) slots.num_drafts[slot] = given + max(count, 0);
}
