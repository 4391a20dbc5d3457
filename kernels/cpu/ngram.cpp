// Prompt lookup: the earliest place where the longest end of the text stood before, and what followed it there.
#include <algorithm>
#include <cstdint>

struct Texts {  // the request table: kernels/structs.py, Requests
  const int32_t* tokens;  // [S, max_len]
  int64_t max_len;
  const int32_t* num_tokens;
  int32_t* drafts;  // [S, max_drafts]
  int64_t max_drafts;
  int32_t* num_drafts;
  const int32_t* max_total_tokens;  // of the first request
  int64_t stride;                   // to the next one's
};

namespace {

constexpr long BLOCK = 32;

struct Text {
  const int32_t *tokens, *drafts;
  long num_tokens;
  int32_t operator[](long i) const { return i < num_tokens ? tokens[i] : drafts[i - num_tokens]; }
};

struct Match {
  long size = 0, place = 0;  // of its last token
};

Match find(const Text& text, long end, long largest) {
  Match best;
  const int32_t last = text[end - 1];
  auto consider = [&](long place) {
    long size = 1;
    while (size < largest && size <= place && text[place - size] == text[end - 1 - size]) size++;
    if (size > best.size) best = {size, place};
  };
  const long known = std::min(text.num_tokens, end - 1);
  long i = 0;
  for (; i + BLOCK <= known; i += BLOCK) {
    int32_t found = 0;
    for (long j = 0; j < BLOCK; j++) found |= text.tokens[i + j] == last;
    for (long j = 0; found && j < BLOCK; j++)
      if (text.tokens[i + j] == last) consider(i + j);
  }
  for (; i < end - 1; i++)
    if (text[i] == last) consider(i);
  return best;
}

}  // namespace

extern "C" {

// See kernels/ngram.py. num_given, min_scores and scores may be null.
void foretoken_draft_ngram(
    const Texts* table, const int32_t* indices, const int32_t* limits, int64_t batch, int64_t max_size, int64_t min_size, const int32_t* num_given,
    const int32_t* min_scores, int32_t* scores, int64_t score_past) {
  const Texts& own = *table;
  for (long b = 0; b < batch; b++) {
    const long index = indices[b], asked = limits[b];
    if (scores) scores[b] = 0;
    if (asked < 0) continue;
    const long known = own.num_tokens[index], room = own.max_total_tokens[index * own.stride] - known - 1;
    const long limit = std::max(std::min({asked, long(own.max_drafts), room}), 0L), given = std::min(num_given ? long(num_given[b]) : 0, limit);
    int32_t* drafts = own.drafts + index * own.max_drafts;
    const Text text{own.tokens + index * own.max_len, drafts, known};
    const long end = known + given, largest = std::min(long(max_size), end - 1);
    Match match;
    if (given < limit && known > 0 && largest >= min_size) match = find(text, end, largest);
    if (match.size < min_size) match.size = 0;
    if (match.size && (scores || min_scores)) {
      long past = 0, first = match.place - match.size, second = end - 1 - match.size;
      for (; past < score_past && first >= 0 && text[first] == text[second]; first--, second--) past++;
      const long score = match.size + past;
      if (scores) scores[b] = int32_t(score);
      if (min_scores && score < min_scores[b]) match.size = 0;
    }
    const long count = match.size ? std::min(limit - given, end - 1 - match.place) : 0;
    for (long i = 0; i < count; i++) drafts[given + i] = text[match.place + 1 + i];
    own.num_drafts[index] = int32_t(given + count);
  }
}
}
