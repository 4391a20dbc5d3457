// Penalties, biases and bans.
#pragma once
#include "logits.cuh"
#include "paths.cuh"
#include "request_table.cuh"

// The penalties of a row that `depth` drafts lead to. What depends on the request alone is read at once, and so are the logits that
// it names: each reading takes as long as all of them.
template <class IsOwn>
__device__ __forceinline__ void penalize(Logit* row, const Requests& table, const RequestParams& params, int index, int place, int depth, const IsOwn& is_own) {
  __shared__ int drafts[32], is_seen[32];
  constexpr int AHEAD = 2;  // entries of a thread
  const float repetition = params.repetition, presence = params.presence, frequency = params.frequency;
  const auto change = [&](int token_id, float x, int count, bool is_known) {
    if (is_known || count > 0) x = x > 0 ? __fdiv_rn(x, repetition) : __fmul_rn(x, repetition);
    x = __fsub_rn(x, count > 0 ? presence : 0.0f);
    row[token_id] = from_float(__fsub_rn(x, __fmul_rn(frequency, float(count))));
  };
  const int num_drafts = min(depth, 32), num_seen = table.num_seen[index];
  const int2* seen = table.seen + size_t(index) * table.max_seen;
  int2 entries[AHEAD];
  Logit logits[AHEAD], own_logit = from_float(0);
#pragma unroll
  for (int a = 0; a < AHEAD; ++a) {
    const int i = a * THREADS + int(threadIdx.x);
    entries[a] = i < table.max_seen ? seen[i] : make_int2(0, 0);
  }
  const bool has_draft = int(threadIdx.x) < num_drafts;
  const int own_draft = has_draft ? table.drafts[size_t(index) * table.max_drafts + find_draft(table, index, place, depth - 1 - int(threadIdx.x))] : -1;
  const bool is_draft = unsigned(own_draft) < unsigned(table.vocab_size) && is_own(own_draft);
  for (int start = 0;;) {
#pragma unroll
    for (int a = 0; a < AHEAD; ++a)
      if (start + a * THREADS + int(threadIdx.x) < num_seen) logits[a] = row[entries[a].x];
    if (start == 0 && num_drafts > 0) {
      if (is_draft) own_logit = row[own_draft];  // for a token that is not among the seen: nobody else changes it
      if (has_draft) drafts[threadIdx.x] = own_draft, is_seen[threadIdx.x] = 0;
      __syncthreads();
    }
#pragma unroll
    for (int a = 0; a < AHEAD; ++a) {
      if (start + a * THREADS + int(threadIdx.x) >= num_seen) continue;
      const int token_id = entries[a].x;
      int count = entries[a].y & ~IN_PROMPT;
      for (int d = 0; d < num_drafts; ++d)
        if (drafts[d] == token_id) ++count, is_seen[d] = 1;
      if (is_own(token_id)) change(token_id, to_float(logits[a]), count, entries[a].y & IN_PROMPT);
    }
    start += AHEAD * THREADS;
    if (start >= num_seen) break;
#pragma unroll
    for (int a = 0; a < AHEAD; ++a)
      if (start + a * THREADS + int(threadIdx.x) < num_seen) entries[a] = seen[start + a * THREADS + threadIdx.x];
  }
  __syncthreads();
  if (num_drafts == 0) return;
  if (is_draft && !is_seen[threadIdx.x]) {
    int count = 0, is_first = 1;
    for (int d = 0; d < num_drafts; ++d)
      if (drafts[d] == own_draft) ++count, is_first &= d >= int(threadIdx.x);
    if (is_first) change(own_draft, to_float(own_logit), count, false);
  }
  __syncthreads();
}

// Penalties, biases and bans of a row, in place, each rounded to the logits' type as the reference does. A block changes the chunks
// that it reads in `choose`.
__device__ void process(Logit* row, const Requests& table, const Owner& owner, int block) {
  const int index = owner.index, place = owner.place, depth = count_depth(table, index, place);
  const RequestParams& params = table.params[index];
  const int flags = params.flags;
  const auto is_own = [&](int token_id) { return CLUSTER == 1 || token_id / 8 / THREADS % CLUSTER == block; };
  if (flags & HAS_PENALTIES) penalize(row, table, params, index, place, depth, is_own);
  if (flags & HAS_BIAS) {
    const int count = params.num_biases;
    for (int i = threadIdx.x; i < count; i += THREADS) {
      const int token_id = table.bias_ids[index * MAX_BIASES + i];
      const float bias = table.biases[index * MAX_BIASES + i];
      if (is_own(token_id)) row[token_id] = from_float(__fadd_rn(to_float(row[token_id]), bias));
    }
    __syncthreads();
  }
  if (flags & HAS_BANS && table.num_tokens[index] + depth < params.min_known) {
    const int count = params.num_banned;
    for (int i = threadIdx.x; i < count; i += THREADS) {
      const int token_id = table.banned_ids[index * MAX_BANNED + i];
      if (is_own(token_id)) row[token_id] = from_float(-INF);
    }
    __syncthreads();
  }
}
