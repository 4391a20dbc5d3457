// Admission of requests to their slots, and what a step emitted put into them. See kernels/state.py.

#include "slots.cuh"

constexpr int HEADER = 18;  // of a record: slot, number of tokens, SlotParams; then the tokens, bias ids, biases, banned ids

// Fills the slot of one staged request. Grid: requests.
extern "C" __global__ void __launch_bounds__(1024) admit(Slots slots, const int* staged) {
  __shared__ int num_seen;
  const int* record = staged + staged[blockIdx.x];
  const int slot = record[0], num_tokens = record[1];
  SlotParams params;
  for (int i = 0; i < 16; ++i) reinterpret_cast<int*>(&params)[i] = record[2 + i];
  if (threadIdx.x < 16) reinterpret_cast<int*>(slots.params + slot)[threadIdx.x] = record[2 + threadIdx.x];
  const int* tokens = record + HEADER;
  int* own = slots.tokens + size_t(slot) * slots.max_len;
  for (int i = threadIdx.x; i < num_tokens; i += blockDim.x) own[i] = tokens[i];
  const int* lists = tokens + num_tokens;
  for (int i = threadIdx.x; i < params.num_biases; i += blockDim.x) {
    slots.bias_ids[slot * MAX_BIASES + i] = lists[i];
    slots.biases[slot * MAX_BIASES + i] = __int_as_float(lists[params.num_biases + i]);
  }
  lists += 2 * params.num_biases;
  for (int i = threadIdx.x; i < params.num_banned; i += blockDim.x) slots.banned_ids[slot * MAX_BANNED + i] = lists[i];

  int2* seen = slots.seen + size_t(slot) * slots.max_seen;
  int* place = slots.seen_place + size_t(slot) * slots.vocab_size;
  const int num_stale = slots.num_seen[slot];  // of the slot's last request
  for (int i = threadIdx.x; i < num_stale; i += blockDim.x) place[seen[i].x] = 0;
  if (threadIdx.x == 0) num_seen = 0;
  __syncthreads();
  if (params.flags & HAS_PENALTIES) {
    for (int i = threadIdx.x; i < num_tokens; i += blockDim.x) {
      const int token_id = tokens[i];
      if (unsigned(token_id) < unsigned(slots.vocab_size) && atomicCAS(place + token_id, 0, -1) == 0) {
        const int free = atomicAdd(&num_seen, 1);
        seen[free] = make_int2(token_id, 0);
        place[token_id] = free + 1;
      }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < num_tokens; i += blockDim.x) {
      const int token_id = tokens[i];
      if (unsigned(token_id) >= unsigned(slots.vocab_size)) continue;
      int* count = &seen[__ldcg(place + token_id) - 1].y;
      if (i < params.num_prompt_tokens) atomicOr(count, IN_PROMPT);
      else atomicAdd(count, 1);
    }
  }
  if (threadIdx.x == 0) {
    slots.num_seen[slot] = num_seen;
    slots.num_tokens[slot] = num_tokens;
    slots.num_drafts[slot] = 0;
  }
}

// Appends each request's emitted tokens, cut at its last place, to its tokens and counts. Its drafts are used up. Grid: requests; one warp.
extern "C" __global__ void __launch_bounds__(32) commit(int* emitted, int* num_emitted, Slots slots, const int* row_slots, int width) {
  const int request = blockIdx.x, lane = threadIdx.x, slot = row_slots[request];
  const int num_tokens = slots.num_tokens[slot], offered = num_emitted[request];
  if (offered <= 0) return;
  const SlotParams* params = slots.params + slot;
  const int count = max(min(offered, params->max_total_tokens - num_tokens), 0);
  int* row = emitted + request * width;
  int* tokens = slots.tokens + size_t(slot) * slots.max_len + num_tokens;
  const bool is_counted = params->flags & HAS_PENALTIES;
  int2* seen = slots.seen + size_t(slot) * slots.max_seen;
  int* places = slots.seen_place + size_t(slot) * slots.vocab_size;
  int num_seen = slots.num_seen[slot];
  for (int start = 0; start < offered; start += 32) {
    const int i = start + lane;
    const int token_id = i < count ? row[i] : -1;
    if (i < count) tokens[i] = token_id;
    else if (i < offered) row[i] = -1;
    if (!is_counted) continue;
    const unsigned equal = __match_any_sync(~0u, token_id);
    const bool is_first = unsigned(token_id) < unsigned(slots.vocab_size) && __ffs(equal) - 1 == lane;
    const int place = is_first ? places[token_id] : 0;
    const unsigned fresh = __ballot_sync(~0u, is_first && place == 0);
    if (is_first && place) seen[place - 1].y += __popc(equal);
    if (is_first && !place) {
      const int free = num_seen + __popc(fresh & ((1u << lane) - 1));
      seen[free] = make_int2(token_id, __popc(equal));
      places[token_id] = free + 1;
    }
    num_seen += __popc(fresh);
    __syncwarp();
  }
  if (lane == 0) {
    if (is_counted) slots.num_seen[slot] = num_seen;
    slots.num_tokens[slot] = num_tokens + count;
    slots.num_drafts[slot] = 0;
    num_emitted[request] = count;
  }
}
