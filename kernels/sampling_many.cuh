// Rows where many tokens may be kept, and those that blocks share.
#pragma once
#include "sampling_best.cuh"
#include "sampling_kept.cuh"

// The token that `draw` wants. limit: below it are none that may be kept, and at least top_k reach it. is_tried: all.key is the best
// token, and its neighbours are noted. mark: that of all.marked.
__device__ __noinline__ int choose_among_many(const Row row, const RequestParams& params, int top_k, float limit, bool is_tried, const Best all, float mark,
                                              int turn) {
  const float top_p = params.top_p, min_p = params.min_p;
  float sum = all.sum, least;  // noted are the tokens whose scores are above `least`
  if (!(all.marked <= top_p * sum)) mark = INF;
  int limit_id = INT_MAX;  // tokens ordered behind (limit, limit_id) are left out
  if (top_k > 0) {
    const Kth kth = find_top_k(row, top_k, limit, all.greatest, all.base, turn);
    sum = kth.sum, limit = kth.value;
  }
  unsigned long long key = all.key;
  if (is_tried) {
    least = key_score(key) - MARGIN;
  } else {
    // The number of scores above this is a Poisson variable of mean 11: there is none in one row of 80,000.
    const float bound = all.base + __log2f(sum) - 3.5f;
    note_best(row, limit, lower_bound(bound));
    least = bound / LOG2E;
    const Next best = reduce(find_next(limit, limit_id, ~0ull, least), turn);
    key = best.is_incomplete ? 0 : best.key;
  }
  while (true) {
    if (!key) {
      key = reduce(Next{find_among(row, limit, limit_id), 0}, turn).key;
      if (!key) return -1;  // not reached: the likeliest token is always kept
      least = key_score(key) - MARGIN;
    }
    const int token_id = key_token(key);
    const float value = row.value(to_float(row.logits[token_id]));
    bool is_kept = !(min_p > 0) || expf(row.scaled(value) - row.scaled(all.greatest)) >= min_p;
    // Where there is a mark, the tokens that reach it do not reach top_p together.
    if (is_kept && (top_k > 0 || top_p < 1) && !(value >= mark)) {
      const Standing standing = reduce(find_standing(row, value, token_id, all.base), turn);
      is_kept = (top_k <= 0 || standing.rank < top_k) && (top_p >= 1 || standing.rank == 0 || standing.mass < top_p * sum);
    }
    if (is_kept) return token_id;
    if (value >= limit) limit = value, limit_id = token_id;
    const Next next = reduce(find_next(limit, limit_id, key, least), turn);
    key = next.is_incomplete ? 0 : next.key;
  }
}
