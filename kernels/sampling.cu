// Logits -> the target's token of every row, in one reading of the logits from memory.
//
// LOGIT: 0 float32, 1 bf16, 2 fp16. VECTOR: rows are 16-byte aligned. CLUSTER: blocks that share a row. THREADS of a block. RING: chunks of a
// thread that are on their way in shared memory, 4 or 0.
//
// The token of a row is the likeliest after Gumbel noise among those that top_k, top_p and min_p keep. Nothing is sorted: what they
// keep is a prefix of the tokens by probability. Without them one reading finds the best token. With them a first reading adds up
// the softmax and notes the greatest logit of every eight; these alone bound where the prefix ends, and a second reading (of the
// chunks that reach that bound) lists the few tokens that may be kept, among which one warp decides.
//
// Where they are many, the sum of the softmax says which score about eleven tokens reach; their random numbers and the greatest logits say which
// chunks those may be in, and these are read. Is the best of them kept? The first reading has also added up the tokens that reach a mark, which
// a sample puts a little before the end of top_p: where they do not reach top_p together, the token is kept if it reaches the mark. If not, a
// third reading, of the chunks that reach it, adds up the tokens likelier than it. If it is not kept, nothing behind it is, and the next
// best among the likelier ones is asked. Where blocks share a row, the first reading finds the best of all tokens instead.
//
// Noise is -log(E), E = -log1p(-u) >= u. A token of logit t reaches a score s only if u <= E <= exp(t - s): a product and a
// comparison with the leading bits of the token's random number spare all but a few tokens the rest of it and the exact noise.

#include "sampling_list.cuh"
#include "sampling_many.cuh"
#include "sampling_rules.cuh"

// sample: row.load(row.sampled()) where has_mark. The token of a row under its parameters, in the first thread; -1 when none has a score.
__device__ __forceinline__ int draw(const Row& row, bool has_mark, const Raw& sample, const RequestParams& params, int& is_broken) {
  const float top_p = params.top_p, min_p = params.min_p;
  const int top_k = params.top_k < row.vocab_size ? params.top_k : 0;
  int turn = 0;
  row.begin_stream();
  if (top_k <= 0 && top_p >= 1 && min_p <= 0) {
    const Best own = find_best<false>(row);
    await_cluster();
    const Best best = reduce(own, turn);
    is_broken = !(best.greatest < INF);
    return best.key ? key_token(best.key) : -1;
  }
  // Where few rows leave the chip idle, the first reading finds a token, too, which is mostly kept.
  const bool is_tried = CLUSTER > 1 && top_k <= 0;
  if (threadIdx.x == 0) shared.num_chunks = shared.num_listed = 0;
  const float mark = has_mark ? guess_mark(row, sample, top_p, turn) : INF;
  const Best measured = is_tried ? find_best<true>(row) : measure(row, mark);
  await_cluster();
  const Best all = reduce(measured, turn);
  is_broken = !(all.greatest < INF);
  if (is_broken || all.greatest == -INF) return -1;
  float limit = -INF;  // tokens below it are surely not kept
  if (min_p > 0) {     // close to the least logit that it keeps, and below
    const float kept = row.scaled(all.greatest) + logf(min_p);
    limit = (kept - 1e-4f - 1e-5f * fabsf(kept)) * (LOGIT == 0 ? 1 : row.temperature);
  }
  if (top_k > 0 || (!is_tried && top_p < 1 && all.top >= top_p * all.sum)) {
    const float floor = find_floor(row, all, top_k > 0 ? float(top_k) : top_p * all.sum, top_k > 0, turn);
    limit = top_k > 0 ? floor : fmaxf(limit, floor);  // the top_k have to be listed, whatever min_p says of them
  }
  if (CLUSTER == 1 && limit > -INF && list_tokens(row, limit, all))
    return threadIdx.x < 32 ? choose_listed(row, params, top_k, limit, all) : -1;
  return choose_among_many(row, params, top_k, limit, is_tried, all, mark, turn);
}

// Grid: rows * CLUSTER. The first one is number first_row of the step's. Row j of a request follows its known tokens and the j drafts, or fewer of a
// tree, that lead to it; `ahead` of that are the positions that are drawn for. Padding rows get token 0.
extern "C" __global__ void CLUSTER_DIMS __launch_bounds__(THREADS, 1024 / THREADS)
    choose(int* token_ids, bool* is_broken, Logit* logits, Requests table, const int* request_indices, const int* cu_logit_rows, int batch, int vocab_size,
           int is_processed, int ahead, int first_row) {
  const int index = blockIdx.x / CLUSTER, block = blockIdx.x % CLUSTER;
  Row row;
  row.logits = logits + size_t(index) * vocab_size;
  row.vocab_size = vocab_size;
  row.first = block * THREADS + threadIdx.x;
  row.num_chunks = (vocab_size + 7) / 8;
  const Owner owner = find_owner(request_indices, cu_logit_rows, batch, first_row + index, &shared.owner);
  if (owner.request < 0) {
    if (block == 0 && threadIdx.x == 0) token_ids[index] = 0, is_broken[index] = false;
    return;
  }
  arrive_cluster_relaxed();
  const RequestParams& params = table.params[owner.index];
  const int flags = params.flags, num_tokens = table.num_tokens[owner.index];
  // For a guess, to which what rules do to a few logits does not matter: so it is asked for ahead of them.
  const bool has_mark = CLUSTER == 1 && !(flags & GREEDY) && params.top_p < 1 && params.top_k <= 0;
  Raw sample;
  if (has_mark) sample = row.load(row.sampled());
  if (!is_processed && flags & RULES) process(logits + size_t(index) * vocab_size, table, owner, block);
  int token_id, broken = 0;
  if (flags & GREEDY) {
    const Best own = find_greatest(row);
    await_cluster();
    int turn = 0;
    const Best best = reduce(own, turn);
    token_id = best.key ? key_token(best.key) : -1;
    broken = !(best.greatest < INF);
  } else {
    row.position = num_tokens + count_depth(table, owner.index, owner.place) + ahead;
    // From one lane, by which the compiler knows that a warp has one seed.
    row.seed_low = __shfl_sync(~0u, params.seed_low, 0), row.seed_high = __shfl_sync(~0u, params.seed_high, 0);
    row.temperature = params.temperature;
    row.to_base2 = LOGIT == 0 ? LOG2E : LOG2E / params.temperature;
    token_id = draw(row, has_mark, sample, params, broken);
  }
  if (block == 0 && threadIdx.x == 0) token_ids[index] = max(token_id, 0), is_broken[index] = broken;
}

#if CLUSTER == 1
// The rules alone, for those that want the processed logits. Grid: rows.
extern "C" __global__ void __launch_bounds__(THREADS)
    process_logits(Logit* logits, Requests table, const int* request_indices, const int* cu_logit_rows, int batch, int first_row) {
  __shared__ Owner cell;
  const Owner owner = find_owner(request_indices, cu_logit_rows, batch, first_row + blockIdx.x, &cell);
  if (owner.request >= 0 && table.params[owner.index].flags & RULES) process(logits + size_t(blockIdx.x) * table.vocab_size, table, owner, 0);
}
#endif
