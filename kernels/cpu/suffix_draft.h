// A draft of suffix_index.h: what follows places in texts, and how likely.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace foretoken_suffix {

constexpr int KINDS = 3;
constexpr int32_t MOST[KINDS] = {16, 32, 64};  // places that are looked at, of each kind

struct Cursor {
  const int32_t *next, *end;
  int32_t age;  // the newest place has 0
};

struct Context {
  const int32_t* first;
  int32_t size;
};

struct Draft {
  std::vector<int32_t> tokens;
  std::vector<float> probs;
  float score = 0;
  int32_t match = 0;

  void clear() {
    tokens.clear(), probs.clear();
    score = 0, match = 0;
  }
};

struct Found {
  Cursor cursor;
  int32_t match;
};

// How often tokens come.
class Counts {
 public:
  void clear() { stamp++, top = 0; }

  void add(int32_t token, int32_t age) {
    Slot& own = slots[place(token)];
    if (own.stamp != stamp) own = {stamp, token, 0, age};
    own.age = std::min(own.age, age);
    top = std::max(top, ++own.count);
  }

  // Of the most frequent token. Of several the one that was so first: whose newest place is the oldest.
  int32_t likeliest(const std::vector<Cursor>& places) {
    int32_t token = 0, age = -1;
    for (const Cursor& own : places) {
      if (own.next == own.end) continue;
      const Slot& slot = slots[place(*own.next)];
      if (slot.count == top && slot.age > age) age = slot.age, token = slot.token;
    }
    return token;
  }

  int32_t top = 0;  // of the most frequent one

 private:
  static constexpr size_t SIZE = 128;  // twice as many as there are places
  static_assert(SIZE >= 2 * MOST[KINDS - 1]);
  struct Slot {
    uint64_t stamp = 0;
    int32_t token = 0, count = 0, age = 0;
  };
  std::vector<Slot> slots = std::vector<Slot>(SIZE);
  uint64_t stamp = 1;

  size_t place(int32_t token) const {
    size_t i = (uint32_t(token) * 2654435761u) >> 25;
    while (slots[i].stamp == stamp && slots[i].token != token) i = (i + 1) & (SIZE - 1);
    return i;
  }
};

// How many of the numbers from `first` and `second` on are equal, up to the first that are not; step: 1 forwards, -1 backwards.
template <int step>
int32_t count_equal(const int32_t* first, const int32_t* second, int32_t most) {
  constexpr int32_t WIDTH = 8;  // at a time
  int32_t count = 0;
  for (; count + WIDTH <= most; count += WIDTH) {
    uint32_t differ = 0;
    for (int32_t i = 0; i < WIDTH; i++) differ |= uint32_t(first[step * (count + i)] ^ second[step * (count + i)]);
    if (differ) break;
  }
  while (count < most && first[step * count] == second[step * count]) count++;
  return count;
}

// What a search needs room for.
struct Scratch {
  std::vector<Found> found;
  std::vector<Cursor> places;
  Counts nexts, counts;
  Draft draft;

  // Goes on with the draft, up to so many tokens. places: behind it, of those that it was made of from its first token on.
  void follow(int32_t most, float min_prob) {
    float prob = draft.probs.empty() ? 1 : draft.probs.back();
    for (;;) {
      int32_t room = most - int32_t(draft.tokens.size());
      for (const Cursor& own : places) {  // mostly all go on alike, and nothing has to be counted
        room = std::min(room, int32_t(own.end - own.next));
        room = count_equal<1>(places[0].next, own.next, room);
      }
      for (int32_t i = 0; i < room; i++) push(places[0].next[i], prob);
      for (Cursor& own : places) own.next += room;
      if (int32_t(draft.tokens.size()) >= most) return;
      counts.clear();
      for (const Cursor& own : places)
        if (own.next != own.end) counts.add(*own.next, own.age);
      if (!counts.top) return;
      const int32_t token = counts.likeliest(places);
      prob *= float(counts.top) / float(places.size());
      if (prob < min_prob) return;
      push(token, prob);
      size_t kept = 0;
      for (const Cursor& own : places)
        if (own.next != own.end && *own.next == token) places[kept++] = {own.next + 1, own.end, own.age};
      places.resize(kept);
    }
  }

 private:
  void push(int32_t token, float prob) {
    draft.tokens.push_back(token);
    draft.probs.push_back(prob);
    draft.score += prob;
  }
};

// Drafts of a match, of any factor.
inline int32_t most_of(int32_t match, float factor, int32_t most) { return int32_t(std::min(float(match) * factor + 1e-6f, float(most))); }

}  // namespace foretoken_suffix
