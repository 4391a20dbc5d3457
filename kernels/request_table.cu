// Admission of requests to the table, and what a step emitted put into it. See kernels/request_table.py.

#include "request_table.cuh"

constexpr int PARAM_WORDS = sizeof(RequestParams) / 4;
constexpr int HEADER = 2 + PARAM_WORDS;  // of a record: index, number of tokens, RequestParams; then the tokens, bias ids, biases, banned ids

// Fills the place of one staged request. Grid: requests.
extern "C" __global__ void __launch_bounds__(1024) admit(Requests table, const int* staged) {
  __shared__ int num_seen;
  const int* record = staged + staged[blockIdx.x];
  const int index = record[0], num_tokens = record[1];
  RequestParams params;
  for (int i = 0; i < PARAM_WORDS; ++i) reinterpret_cast<int*>(&params)[i] = record[2 + i];
  if (threadIdx.x < PARAM_WORDS) reinterpret_cast<int*>(table.params + index)[threadIdx.x] = record[2 + threadIdx.x];
  const int* tokens = record + HEADER;
  int* own = table.tokens + size_t(index) * table.max_len;
  for (int i = threadIdx.x; i < num_tokens; i += blockDim.x) own[i] = tokens[i];
  const int* lists = tokens + num_tokens;
  for (int i = threadIdx.x; i < params.num_biases; i += blockDim.x) {
    table.bias_ids[index * MAX_BIASES + i] = lists[i];
    table.biases[index * MAX_BIASES + i] = __int_as_float(lists[params.num_biases + i]);
  }
  lists += 2 * params.num_biases;
  for (int i = threadIdx.x; i < params.num_banned; i += blockDim.x) table.banned_ids[index * MAX_BANNED + i] = lists[i];

  int2* seen = table.seen + size_t(index) * table.max_seen;
  int* place = table.seen_place + size_t(index) * table.vocab_size;
  const int num_stale = table.num_seen[index];  // of the place's last request
  for (int i = threadIdx.x; i < num_stale; i += blockDim.x) place[seen[i].x] = 0;
  if (threadIdx.x == 0) num_seen = 0;
  __syncthreads();
  if (params.flags & HAS_PENALTIES) {
    for (int i = threadIdx.x; i < num_tokens; i += blockDim.x) {
      const int token_id = tokens[i];
      if (unsigned(token_id) < unsigned(table.vocab_size) && atomicCAS(place + token_id, 0, -1) == 0) {
        const int free = atomicAdd(&num_seen, 1);
        seen[free] = make_int2(token_id, 0);
        place[token_id] = free + 1;
      }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < num_tokens; i += blockDim.x) {
      const int token_id = tokens[i];
      if (unsigned(token_id) >= unsigned(table.vocab_size)) continue;
      int* count = &seen[__ldcg(place + token_id) - 1].y;
      if (i < params.num_prompt_tokens) atomicOr(count, IN_PROMPT);
      else atomicAdd(count, 1);
    }
  }
  // Its drafts are a chain until somebody says otherwise.
  for (int i = threadIdx.x; table.parents && i < table.max_drafts; i += blockDim.x) table.parents[size_t(index) * table.max_drafts + i] = i - 1;
  if (threadIdx.x == 0) {
    table.num_seen[index] = num_seen;
    table.num_tokens[index] = num_tokens;
    table.num_drafts[index] = 0;
    table.num_drafter_tokens[index] = params.num_drafter_tokens;
  }
}

// Appends each request's emitted tokens, cut at its last place, to its tokens and counts. Its drafts are used up. Grid: requests; one warp.
extern "C" __global__ void __launch_bounds__(32) commit(int* emitted, int* num_emitted, Requests table, const int* request_indices, int width) {
  const int request = blockIdx.x, lane = threadIdx.x, index = request_indices[request];
  const int num_tokens = table.num_tokens[index], offered = num_emitted[request];
  if (offered <= 0) return;
  const RequestParams* params = table.params + index;
  const int count = max(min(offered, params->max_total_tokens - num_tokens), 0);
  int* row = emitted + request * width;
  int* tokens = table.tokens + size_t(index) * table.max_len + num_tokens;
  const bool is_counted = params->flags & HAS_PENALTIES;
  int2* seen = table.seen + size_t(index) * table.max_seen;
  int* places = table.seen_place + size_t(index) * table.vocab_size;
  int num_seen = table.num_seen[index];
  for (int start = 0; start < offered; start += 32) {
    const int i = start + lane;
    const int token_id = i < count ? row[i] : -1;
    if (i < count) tokens[i] = token_id;
    else if (i < offered) row[i] = -1;
    if (!is_counted) continue;
    const unsigned equal = __match_any_sync(~0u, token_id);
    const bool is_first = unsigned(token_id) < unsigned(table.vocab_size) && __ffs(equal) - 1 == lane;
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
    if (is_counted) table.num_seen[index] = num_seen;
    table.num_tokens[index] = num_tokens + count;
    table.num_drafts[index] = 0;
    num_emitted[request] = count;
  }
}
