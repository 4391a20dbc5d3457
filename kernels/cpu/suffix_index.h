// Which tokens followed the end of a context in texts, and how often: the drafts of suffix decoding (Oliaro et al. 2024).
//
// The paper keeps a suffix tree, whose nodes count; here each token of a text is an entry in three lists, of the places where its last 1, 2 and 4 tokens
// stood, newest first. Counts are of the places that a list leads to, of frequent tokens of the newest ones alone. A place is found by a hash
// and compared, goes in in a third of a microsecond and out in half of that, and takes some 80 bytes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <memory>
#include <unordered_map>
#include <vector>

#include "suffix_draft.h"

namespace foretoken_suffix {

constexpr int32_t GRAMS[KINDS] = {1, 2, 4};
constexpr int32_t FEW = 16;  // of the last kind, those after which no more are looked at where all of them say the same
constexpr int32_t NONE = -1;
constexpr int32_t AHEAD = 16;  // tokens that are entered at a time
constexpr float ROUNDING = 1.00001f;

struct Entry {
  int32_t text, place;
  int32_t older[KINDS], newer[KINDS];
};

struct Text {
  std::vector<int32_t> tokens, entries;
};

// So that `count` numbers fit, without moving them each time that it grows.
inline void make_room(std::vector<int32_t>& own, size_t count) {
  if (own.capacity() < count) own.reserve(std::max(count, 2 * own.capacity()));
}

inline uint64_t hash(const int32_t* last, int32_t count) {
  uint64_t key = 0x9e3779b97f4a7c15ull * uint64_t(count);
  for (int32_t i = 0; i < count; i++) {
    key = (key ^ uint32_t(last[-i])) * 0xff51afd7ed558ccdull;
    key ^= key >> 32;
  }
  return key;
}

// From hashes to the newest entry of each. In shards, so that one that grows is small: it is moved at once.
class Heads {
 public:
  void prefetch(uint64_t key) const {
    const Shard& own = shards[key >> 58];
    if (!own.slots.empty()) __builtin_prefetch(&own.slots[key & own.mask()], 1);
  }

  int32_t* find(uint64_t key) {
    Shard& own = shards[key >> 58];
    if (own.slots.empty()) return nullptr;
    for (size_t i = key & own.mask();; i = (i + 1) & own.mask()) {
      if (own.slots[i].head == NONE) return nullptr;
      if (own.slots[i].key == key) return &own.slots[i].head;
    }
  }

  void make_room(uint64_t key) {
    Shard& own = shards[key >> 58];
    if (2 * (own.count + 1) > own.slots.size()) own.grow();
  }

  int32_t& make(uint64_t key) {  // NONE where it is new, and to be set at once; there is room for it
    Shard& own = shards[key >> 58];
    size_t i = key & own.mask();
    while (own.slots[i].head != NONE && own.slots[i].key != key) i = (i + 1) & own.mask();
    if (own.slots[i].head == NONE) {
      own.slots[i].key = key;
      own.count++;
    }
    return own.slots[i].head;
  }

  void erase(uint64_t key) {  // what comes behind it moves up
    Shard& own = shards[key >> 58];
    size_t hole = key & own.mask();
    while (own.slots[hole].key != key) hole = (hole + 1) & own.mask();
    for (size_t i = (hole + 1) & own.mask(); own.slots[i].head != NONE; i = (i + 1) & own.mask()) {
      const size_t home = own.slots[i].key & own.mask();
      if (((i - home) & own.mask()) >= ((i - hole) & own.mask())) {
        own.slots[hole] = own.slots[i];
        hole = i;
      }
    }
    own.slots[hole].head = NONE;
    own.count--;
  }

 private:
  struct Slot {
    uint64_t key = 0;
    int32_t head = NONE;
  };
  struct Shard {
    std::vector<Slot> slots;
    size_t count = 0;
    size_t mask() const { return slots.size() - 1; }
    void grow() {
      std::vector<Slot> before(slots.empty() ? 8 : 2 * slots.size());
      before.swap(slots);
      for (const Slot& slot : before) {
        if (slot.head == NONE) continue;
        size_t i = slot.key & mask();
        while (slots[i].head != NONE) i = (i + 1) & mask();
        slots[i] = slot;
      }
    }
  };
  Shard shards[64];
};

// In pieces, none of which ever moves.
class Entries {
 public:
  Entry& operator[](int32_t number) { return pieces[size_t(number) / PIECE][size_t(number) % PIECE]; }

  int32_t take() {
    if (const int32_t number = free; number != NONE) {
      free = (*this)[number].older[0];
      return number;
    }
    if (count == pieces.size() * PIECE) pieces.push_back(std::unique_ptr<Entry[]>(new Entry[PIECE]));
    return int32_t(count++);
  }

  void give_back(int32_t number) {
    (*this)[number].older[0] = free;
    free = number;
  }

  size_t size() const { return count; }

 private:
  int32_t free = NONE;  // the one that was given back last, which leads to the one before
  static constexpr size_t PIECE = 256;
  std::vector<std::unique_ptr<Entry[]>> pieces;
  size_t count = 0;
};

class Index {
 public:
  explicit Index(int32_t depth) : depth(depth) {}

  // Where memory ends amid it, none of the tokens are there.
  void extend(int32_t id, const int32_t* tokens, int64_t count) {
    const int32_t number = number_of(id);
    Text& own = texts[number];
    const int32_t first = int32_t(own.tokens.size());
    make_room(own.tokens, first + count);
    make_room(own.entries, first + count);
    own.tokens.insert(own.tokens.end(), tokens, tokens + count);
    try {
      for (int32_t begin = first; begin < int32_t(own.tokens.size()); begin += AHEAD) {
        const int32_t end = std::min(begin + AHEAD, int32_t(own.tokens.size()));
        prefetch(own, begin, end);
        for (int32_t place = begin; place < end; place++) own.entries.push_back(enter(number, place));
      }
    } catch (...) {
      for (; int32_t(own.entries.size()) > first; own.entries.pop_back()) leave(own, own.entries.back());
      own.tokens.resize(first);
      throw;
    }
  }

  bool remove(int32_t id) {
    const auto found = ids.find(id);
    if (found == ids.end()) return false;
    Text& own = texts[found->second];
    for (const int32_t number : own.entries) leave(own, number);
    own = Text();
    free_texts.push_back(found->second);
    ids.erase(found);
    return true;
  }

  // As much of a text as a context can have.
  Context end_of(int32_t id) const {
    const std::vector<int32_t>& own = texts[ids.at(id)].tokens;
    const size_t size = std::min(own.size(), size_t(depth));
    return {own.data() + own.size() - size, int32_t(size)};
  }

  int64_t count() const { return int64_t(ids.size()); }

  int64_t room() const { return int64_t(entries.size()); }

  // best: to be beaten by score, and what comes of it
  void speculate(Context context, int32_t most, float factor, float min_prob, Draft& best) {
    static thread_local Scratch scratch;
    const int32_t limit = std::min(context.size - 1, depth);
    auto& [found, places, nexts, counts, draft] = scratch;
    for (int kind = KINDS - 1; kind >= 0; kind--) {
      const int32_t low = GRAMS[kind], high = std::min(limit, kind + 1 < KINDS ? GRAMS[kind + 1] - 1 : limit);
      if (high < low || float(most_of(high, factor, most)) <= best.score) continue;
      collect(kind, context.first + context.size - 1, limit, {factor, most}, found);
      nexts.clear();
      size_t number = 0, num_before = 0, num_followed = 0;  // of the places that match so far
      int32_t most_before = 0;
      for (int32_t match = found.empty() ? 0 : std::min(found[0].match, high); match >= low; match--) {
        for (; number < found.size() && found[number].match >= match; number++) {
          const Cursor& own = found[number].cursor;
          if (own.next != own.end) nexts.add(*own.next, own.age);
        }
        const int32_t bound = bound_of(match, {factor, most});
        if (number < 2 * num_before && bound <= most_before) continue;  // nearly the same places
        num_before = number, most_before = bound;
        // No token is likelier than the first.
        if (float(bound) * (float(nexts.top) / float(number)) * ROUNDING <= best.score) continue;
        if (number != num_followed) {  // else a shorter match has no more places, and its draft may be longer
          places.clear();
          for (size_t i = 0; i < number; i++) places.push_back(found[i].cursor);
          draft.clear();
          num_followed = number;
        }
        scratch.follow(bound, min_prob);
        if (draft.score > best.score) {
          best = draft;
          best.match = match;
        }
      }
    }
  }

 private:
  struct Wanted {
    float factor;
    int32_t most;
  };

  int32_t depth;
  Entries entries;
  std::vector<int32_t> free_texts;  // with room for all there are: what goes needs no memory
  std::deque<Text> texts;
  std::unordered_map<int32_t, int32_t> ids;
  Heads heads[KINDS];

  // Drafts of a match.
  int32_t bound_of(int32_t match, Wanted wanted) const {
    return std::max(std::min(most_of(match, wanted.factor, wanted.most), depth - match), 0);
  }

  int32_t number_of(int32_t id) {
    const auto found = ids.find(id);
    if (found != ids.end()) return found->second;
    if (free_texts.empty()) {
      make_room(free_texts, texts.size() + 1);
      texts.emplace_back();
      free_texts.push_back(int32_t(texts.size()) - 1);
    }
    const int32_t number = free_texts.back();
    ids.emplace(id, number);
    free_texts.pop_back();
    return number;
  }

  // Brings what `enter` changes from memory, of all places together: first where the hashes are, then what they lead to.
  void prefetch(const Text& text, int32_t begin, int32_t end) {
    uint64_t keys[AHEAD][KINDS];
    for (int32_t place = begin; place < end; place++)
      for (int kind = 0; kind < KINDS && place + 1 >= GRAMS[kind]; kind++)
        heads[kind].prefetch(keys[place - begin][kind] = hash(&text.tokens[place], GRAMS[kind]));
    for (int32_t place = begin; place < end; place++)
      for (int kind = 0; kind < KINDS && place + 1 >= GRAMS[kind]; kind++)
        if (const int32_t* head = heads[kind].find(keys[place - begin][kind])) __builtin_prefetch(&entries[*head], 1);
  }

  // All or nothing: first what takes memory.
  int32_t enter(int32_t text, int32_t place) {
    const int32_t* last = &texts[text].tokens[place];
    uint64_t keys[KINDS];
    for (int kind = 0; kind < KINDS && place + 1 >= GRAMS[kind]; kind++) heads[kind].make_room(keys[kind] = hash(last, GRAMS[kind]));
    const int32_t number = entries.take();
    Entry& own = entries[number];
    own.text = text, own.place = place;
    for (int kind = 0; kind < KINDS; kind++) {
      own.older[kind] = own.newer[kind] = NONE;
      if (place + 1 < GRAMS[kind]) continue;
      int32_t& head = heads[kind].make(keys[kind]);
      own.older[kind] = head;
      if (head != NONE) entries[head].newer[kind] = number;
      head = number;
    }
    return number;
  }

  void leave(const Text& text, int32_t number) {
    const Entry& own = entries[number];
    const int32_t* last = &text.tokens[own.place];
    for (int kind = 0; kind < KINDS && own.place + 1 >= GRAMS[kind]; kind++) {
      const int32_t older = own.older[kind], newer = own.newer[kind];
      if (older != NONE) entries[older].newer[kind] = newer;
      if (newer != NONE) {
        entries[newer].older[kind] = older;
      } else {
        const uint64_t key = hash(last, GRAMS[kind]);
        if (older != NONE)
          *heads[kind].find(key) = older;
        else
          heads[kind].erase(key);
      }
    }
    entries.give_back(number);
  }

  // The places where the context's last tokens stood, longest matches first. limit: of a match, at most; last: the context's last token
  void collect(int kind, const int32_t* last, int32_t limit, Wanted wanted, std::vector<Found>& found) {
    found.clear();
    const int32_t* head = heads[kind].find(hash(last, GRAMS[kind]));
    int32_t number = head ? *head : NONE;
    for (int32_t age = 0, end = kind == KINDS - 1 ? FEW : MOST[kind]; number != NONE && age < MOST[kind]; end = MOST[kind]) {
      size_t kept = found.size();
      for (; age < end && number != NONE; age++, number = entries[number].older[kind]) {
        const Entry& own = entries[number];
        const std::vector<int32_t>& tokens = texts[own.text].tokens;
        const int32_t* next = tokens.data() + own.place + 1;
        __builtin_prefetch(next);  // so that all texts come from memory together
        __builtin_prefetch(next - 16);
        found.push_back({{next, tokens.data() + tokens.size(), age}, std::min(limit, own.place + 1)});
      }
      for (size_t i = kept; i < found.size(); i++) {
        const Cursor cursor = found[i].cursor;
        const int32_t match = count_equal<-1>(cursor.next - 1, last, found[i].match);
        if (match >= GRAMS[kind]) found[kept++] = {cursor, match};  // else another text with the same hash
      }
      found.resize(kept);
      if (end < MOST[kind] && say_the_same(found, wanted)) break;
    }
    std::sort(found.begin(), found.end(), [](const Found& a, const Found& b) { return a.match > b.match; });
  }

  // Whether all places that go on do so alike, and one matches so long that the draft has all that is wanted.
  bool say_the_same(const std::vector<Found>& found, Wanted wanted) const {
    const Found* first = nullptr;
    bool is_long = false;
    for (const Found& own : found) {
      if (own.cursor.next == own.cursor.end) continue;
      if (!first) first = &own;
      if (*own.cursor.next != *first->cursor.next) return false;
      is_long |= bound_of(own.match, wanted) >= wanted.most;
    }
    return is_long;
  }
};

}  // namespace foretoken_suffix
