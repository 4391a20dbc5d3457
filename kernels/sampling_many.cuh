// Rows where many tokens may be kept, and those that blocks share.
#pragma once
#include "sampling_best.cuh"
#include "sampling_kept.cuh"

// Functions of their own, so that their registers and their code are not in each other's way, nor in that of other rows.
__device__ __noinline__ Best find_most(const Row row, float base, float mark) { return find_best<AMONG_AND_SUM>(row, -INF, INT_MAX, base, mark); }
__device__ __noinline__ Best find_among(const Row row, float limit, int limit_id) { return find_best<AMONG>(row, limit, limit_id, 0, 0); }

// The token that `draw` wants. limit: below it are none that may be kept, and at least top_k reach it. is_tried: all.key is the best
// token, and its neighbours are noted.
__device__ __noinline__ int choose_among_many(const Row row, const SlotParams& params, int top_k, float limit, bool is_tried, const Best all, int turn) {
  const float top_p = params.top_p, min_p = params.min_p;
  float sum = all.sum, mark = INF, least = 0;
  int limit_id = INT_MAX;  // tokens ordered behind (limit, limit_id) are left out
  if (top_k > 0) {
    const Kth kth = find_top_k(row, top_k, limit, all.greatest, all.base, turn);
    sum = kth.sum, limit = kth.value;
  }
  unsigned long long key = is_tried ? all.key : 0;
  if (is_tried) least = key_score(key) - MARGIN;
  while (true) {
    if (!key) {
      Best best;
      if (limit == -INF) {
        if (top_p < 1) mark = guess_cut(row, all.greatest, all.base, top_p, turn);
        best = reduce(find_most(row, all.base, mark), turn);
        if (!(best.top <= top_p * sum)) mark = INF;
      } else {
        best = reduce(find_among(row, limit, limit_id), turn);
      }
      key = best.key;
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
