// What Python calls of suffix_index.h: see kernels/suffix.py. An index is one thread's at a time. All return -1 where there is no memory left.
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "suffix_index.h"

using namespace foretoken_suffix;

namespace {

// The better draft of two indices, one of which may be null; of two that score alike the first one's. draft: empty
void search(Index* index, Index* beside, Context context, int32_t most, float factor, float min_prob, Draft& draft) {
  if (beside) beside->speculate(context, most, factor, min_prob, draft);  // first: mostly nothing can be better than what others wrote
  if (!index) return;
  const float score = draft.score;
  draft.score = std::max(std::nextafter(score, 0.0f), 0.0f);
  index->speculate(context, most, factor, min_prob, draft);
  draft.score = std::max(draft.score, score);
}

// As in kernels/suffix.py.
struct Turn {
  Index* index;
  int64_t id, shared_id, num_words, most;
};

}  // namespace

extern "C" {

void* foretoken_suffix_new(int64_t depth) try {
  return new Index(int32_t(depth));
} catch (...) {
  return nullptr;
}

void foretoken_suffix_free(void* index) { delete static_cast<Index*>(index); }

int64_t foretoken_suffix_extend(void* index, int64_t id, const int32_t* tokens, int64_t count) try {
  static_cast<Index*>(index)->extend(int32_t(id), tokens, count);
  return 0;
} catch (...) {
  return -1;
}

int64_t foretoken_suffix_remove(void* index, int64_t id) try {
  return static_cast<Index*>(index)->remove(int32_t(id));
} catch (...) {
  return -1;
}

int64_t foretoken_suffix_count(void* index) { return static_cast<Index*>(index)->count(); }

int64_t foretoken_suffix_room(void* index) { return static_cast<Index*>(index)->room(); }

// beside: another index or null, whose draft is taken where it scores higher; tokens, probs: room for `most`; score, match: one number each -> how
// many tokens
int64_t foretoken_suffix_speculate(
    void* index, void* beside, const int32_t* context, int64_t size, int64_t most, float factor, float min_prob, int32_t* tokens, float* probs, float* score,
    int32_t* match) try {
  Draft draft;
  search(static_cast<Index*>(index), static_cast<Index*>(beside), {context, int32_t(size)}, int32_t(most), factor, min_prob, draft);
  std::copy(draft.tokens.begin(), draft.tokens.end(), tokens);
  std::copy(draft.probs.begin(), draft.probs.end(), probs);
  *score = draft.score;
  *match = draft.match;
  return int64_t(draft.tokens.size());
} catch (...) {
  return -1;
}

// shared: an index or null; words: the turns' tokens, in their order; parts: that chances are told apart in; heads [count, 2]: tokens found, and how many
// match; tokens, chances [count, stride], which no turn's `most` is beyond
int64_t foretoken_suffix_take(
    const Turn* turns, int64_t count, void* shared, const int32_t* words, float factor, float min_prob, int64_t parts, int64_t stride, int32_t* heads,
    int32_t* tokens, uint8_t* chances) try {
  Index* all = static_cast<Index*>(shared);
  const int32_t* next = words;
  for (const Turn* own = turns; own < turns + count; next += own->num_words, own++) {
    if (own->index) own->index->extend(int32_t(own->id), next, own->num_words);
    if (own->shared_id >= 0) all->extend(int32_t(own->shared_id), next, own->num_words);
  }
  next = words;
  Draft draft;
  for (const Turn* own = turns; own < turns + count; next += own->num_words, own++, heads += 2, tokens += stride, chances += stride) {
    const Context context = own->index ? own->index->end_of(int32_t(own->id)) : Context{next, int32_t(own->num_words)};
    draft.clear();
    search(own->index, all, context, int32_t(own->most), factor, min_prob, draft);
    heads[0] = int32_t(draft.tokens.size()), heads[1] = draft.match;
    std::copy(draft.tokens.begin(), draft.tokens.end(), tokens);
    double before = 1;
    for (size_t i = 0; i < draft.probs.size(); before = draft.probs[i++])
      chances[i] = uint8_t(std::min(int64_t(double(parts) * (double(draft.probs[i]) / before)), parts));
  }
  return 0;
} catch (...) {
  return -1;
}
}
