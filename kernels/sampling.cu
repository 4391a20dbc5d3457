// Logits -> the target's token of every row, in one reading of the logits from memory.
//
// LOGIT: 0 float32, 1 bf16, 2 fp16. VECTOR: rows are 16-byte aligned. CLUSTER: blocks that share a row. THREADS of a block.
//
// The token of a row is the likeliest after Gumbel noise among those that top_k, top_p and min_p keep. Nothing is sorted: what they
// keep is a prefix of the tokens by probability. Without them one reading finds the best token. With them a first reading adds up
// the softmax and notes the greatest logit of every eight; these alone bound where the prefix ends, and a second reading (of the
// chunks that reach that bound) finds the best token. A third, of the chunks that reach it, adds up the tokens likelier than it,
// which says whether it is kept. If not, nothing behind it is, and the next best among the likelier ones is asked.
//
// Noise is -log(E), E = -log1p(-u) >= u. A token of logit t reaches a score s only if u <= E <= exp(t - s): a product and a
// comparison with the leading bits of the token's random number spare all but a few tokens the rest of it and the exact noise.

#include "sampling_best.cuh"
#include "sampling_kept.cuh"

// The token of a row under its parameters; -1 when none has a score.
__device__ int draw(const Row& row, const SlotParams& params, int& is_broken, Shared& shared, int& turn) {
  const float top_p = params.top_p, min_p = params.min_p;
  const int top_k = params.top_k < row.vocab_size ? params.top_k : 0;
  if (top_k <= 0 && top_p >= 1 && min_p <= 0) {
    const Best own = find_best<ALL>(row, 0, 0, 0, 0, shared);
    await_peers();
    const Best best = reduce(own, no_best(), shared, turn);
    is_broken = !(best.greatest < INF);
    return best.key ? key_token(best.key) : -1;
  }
  // Where few rows leave the chip idle, the first reading finds a token, too, which is mostly kept.
  const bool is_tried = CLUSTER > 1 && top_k <= 0;
  const Best measured = is_tried ? find_best<MEASURE>(row, 0, 0, 0, 0, shared) : measure(row);
  await_peers();
  const Best all = reduce(measured, no_best(), shared, turn);
  is_broken = !(all.greatest < INF);
  if (is_broken || all.greatest == -INF) return -1;
  // Tokens that are surely not kept are left out: those ordered behind (limit, limit_id).
  float sum = all.sum, limit = -INF, mark = INF;
  int limit_id = INT_MAX;
  if (top_k > 0) {
    const Kth kth = find_top_k(row, top_k, all, shared, turn);
    sum = kth.sum, limit = kth.value;
  }
  if (min_p > 0) {  // close to the least logit that it keeps, and below
    const float kept = row.scaled(all.greatest) + logf(min_p);
    limit = fmaxf(limit, (kept - 1e-4f - 1e-5f * fabsf(kept)) * (LOGIT == 0 ? 1 : row.temperature));
  }
  Best best = all;
  if (!is_tried) {
    if (top_p < 1 && all.top >= top_p * sum) limit = fmaxf(limit, find_floor(row, all, top_p * sum, false, shared, turn));
    if (limit == -INF) {
      if (top_p < 1) mark = guess_cut(row, all, top_p, shared, turn);
      best = find_best<AMONG_AND_SUM>(row, limit, limit_id, all.base, mark, shared);
    } else {
      best = find_best<AMONG>(row, limit, limit_id, 0, 0, shared);
    }
    best = reduce(best, no_best(), shared, turn);
  }
  const bool is_marked = mark < INF && best.top <= top_p * sum;
  unsigned long long key = best.key;
  float least = key_score(key) - MARGIN;
  while (key) {
    const int token_id = key_token(key);
    const float value = row.value(to_float(row.logits[token_id]));
    bool is_kept = !(min_p > 0) || expf(row.scaled(value) - row.scaled(all.greatest)) >= min_p;
    // Where it is marked, the tokens that reach the mark do not reach top_p together.
    if (is_kept && (top_k > 0 || top_p < 1) && !(is_marked && value >= mark)) {
      const Standing own = top_k > 0 ? find_standing<true>(row, value, token_id, all.base) : find_standing<false>(row, value, token_id, all.base);
      const Standing standing = reduce(own, Standing{0, 0}, shared, turn);
      is_kept = (top_k <= 0 || standing.rank < top_k) && (top_p >= 1 || standing.rank == 0 || standing.mass < top_p * sum);
    }
    if (is_kept) return token_id;
    if (value >= limit) limit = value, limit_id = token_id;
    const Next next = reduce(find_next(limit, limit_id, key, least, shared), Next{0, 0}, shared, turn);
    key = next.key;
    if (next.key == 0 || next.is_incomplete) {
      best = reduce(find_best<AMONG>(row, limit, limit_id, 0, 0, shared), no_best(), shared, turn);
      key = best.key, least = key_score(key) - MARGIN;
    }
  }
  return -1;  // not reached: the likeliest token is always kept
}

// Penalties, biases and bans of a row, in place, each rounded to the logits' type as the reference does. A block changes the chunks
// that it reads in `choose`.
__device__ void process(Logit* row, const Slots& slots, const Owner& owner, int block) {
  __shared__ int drafts[32], is_seen[32];
  const int slot = owner.slot, place = owner.place;
  const SlotParams params = slots.params[slot];
  const auto is_own = [&](int token_id) { return CLUSTER == 1 || token_id / 8 / THREADS % CLUSTER == block; };
  const auto change = [&](int token_id, float x) { row[token_id] = from_float(x); };
  if (params.flags & HAS_PENALTIES) {
    const int num_drafts = min(place, 32);
    const int2* seen = slots.seen + size_t(slot) * slots.max_seen;
    const int num_seen = slots.num_seen[slot];
    if (threadIdx.x < num_drafts) drafts[threadIdx.x] = slots.drafts[size_t(slot) * slots.max_drafts + threadIdx.x], is_seen[threadIdx.x] = 0;
    __syncthreads();
    const auto penalize = [&](int token_id, int count, bool is_known) {
      float x = to_float(row[token_id]);
      if (is_known || count > 0) x = x > 0 ? __fdiv_rn(x, params.repetition) : __fmul_rn(x, params.repetition);
      x = __fsub_rn(x, count > 0 ? params.presence : 0.0f);
      change(token_id, __fsub_rn(x, __fmul_rn(params.frequency, float(count))));
    };
    for (int i = threadIdx.x; i < num_seen; i += THREADS) {
      const int2 entry = seen[i];
      int count = entry.y & ~IN_PROMPT;
      for (int d = 0; d < num_drafts; ++d)
        if (drafts[d] == entry.x) ++count, is_seen[d] = 1;
      if (is_own(entry.x)) penalize(entry.x, count, entry.y & IN_PROMPT);
    }
    __syncthreads();
    if (threadIdx.x < num_drafts && !is_seen[threadIdx.x]) {
      const int token_id = drafts[threadIdx.x];
      int count = 0, is_first = 1;
      for (int d = 0; d < num_drafts; ++d)
        if (drafts[d] == token_id) ++count, is_first &= d >= int(threadIdx.x);
      if (is_first && unsigned(token_id) < unsigned(slots.vocab_size) && is_own(token_id)) penalize(token_id, count, false);
    }
    __syncthreads();
  }
  if (params.flags & HAS_BIAS) {
    for (int i = threadIdx.x; i < params.num_biases; i += THREADS) {
      const int token_id = slots.bias_ids[slot * MAX_BIASES + i];
      if (is_own(token_id)) change(token_id, __fadd_rn(to_float(row[token_id]), slots.biases[slot * MAX_BIASES + i]));
    }
    __syncthreads();
  }
  if (params.flags & HAS_BANS && slots.num_tokens[slot] + place < params.min_known) {
    for (int i = threadIdx.x; i < params.num_banned; i += THREADS) {
      const int token_id = slots.banned_ids[slot * MAX_BANNED + i];
      if (is_own(token_id)) change(token_id, -INF);
    }
    __syncthreads();
  }
}

constexpr int RULES = HAS_PENALTIES | HAS_BIAS | HAS_BANS;

// Grid: rows * CLUSTER. Row j of a request follows its known tokens and its first j drafts. Padding rows get token 0.
extern "C" __global__ void CLUSTER_DIMS __launch_bounds__(THREADS, 1024 / THREADS)
    choose(int* token_ids, bool* is_broken, Logit* logits, Slots slots, const int* row_slots, const int* cu_query_lens, int batch, int vocab_size,
           int is_processed) {
  __shared__ Shared shared;
  const int index = blockIdx.x / CLUSTER, block = blockIdx.x % CLUSTER;
  const Owner owner = find_owner(row_slots, cu_query_lens, batch, index, &shared.owner);
  if (owner.request < 0) {
    if (block == 0 && threadIdx.x == 0) token_ids[index] = 0, is_broken[index] = false;
    return;
  }
  say_begun();
  const SlotParams& params = slots.params[owner.slot];
  const int flags = params.flags, num_tokens = slots.num_tokens[owner.slot];
  Row row;
  row.logits = logits + size_t(index) * vocab_size;
  row.vocab_size = vocab_size;
  row.first = block * THREADS + threadIdx.x;
  row.num_chunks = (vocab_size + 7) / 8;
  if (!is_processed && flags & RULES) process(logits + size_t(index) * vocab_size, slots, owner, block);
  int turn = 0, token_id, broken = 0;
  if (flags & GREEDY) {
    const Best own = find_greatest(row);
    await_peers();
    const Best best = reduce(own, no_best(), shared, turn);
    token_id = best.key ? key_token(best.key) : -1;
    broken = !(best.greatest < INF);
  } else {
    row.position = num_tokens + owner.place;
    row.seed_low = params.seed_low, row.seed_high = params.seed_high;
    row.temperature = params.temperature;
    row.to_base2 = LOGIT == 0 ? LOG2E : LOG2E / params.temperature;
    token_id = draw(row, params, broken, shared, turn);
  }
  if (block == 0 && threadIdx.x == 0) token_ids[index] = max(token_id, 0), is_broken[index] = broken;
}

#if CLUSTER == 1
// The rules alone, for those that want the processed logits. Grid: rows.
extern "C" __global__ void __launch_bounds__(THREADS)
    process_logits(Logit* logits, Slots slots, const int* row_slots, const int* cu_query_lens, int batch) {
  __shared__ Owner cell;
  const Owner owner = find_owner(row_slots, cu_query_lens, batch, blockIdx.x, &cell);
  if (owner.request >= 0 && slots.params[owner.slot].flags & RULES) process(logits + size_t(blockIdx.x) * slots.vocab_size, slots, owner, 0);
}
#endif
