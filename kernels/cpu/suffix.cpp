// Which tokens followed the end of a context in texts, and how often: the drafts of suffix decoding (Oliaro et al. 2024).
//
// The paper keeps a suffix tree, whose nodes count; here each token of a text is an entry in three lists, of the places where its last 1, 2 and 4 tokens
// stood, newest first. Counts are of the places that a list leads to, of frequent tokens of the newest ones alone. A place is found by a hash
// and compared, goes in in a third of a microsecond and out in half of that, and takes some 80 bytes.
#include <algorithm>
#include <cstdint>
#include <deque>
#include <unordered_map>
#include <vector>

namespace {

constexpr int KINDS = 3;
constexpr int32_t GRAMS[KINDS] = {1, 2, 4};
constexpr int32_t MOST[KINDS] = {16, 32, 64};  // places that are looked at, of each kind
constexpr int32_t NONE = -1;
constexpr float ROUNDING = 1.00001f;

struct Entry {
  int32_t text, place;
  int32_t older[KINDS], newer[KINDS];
};

struct Text {
  std::vector<int32_t> tokens, entries;
};

uint64_t hash(const int32_t* last, int32_t count) {
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
  int32_t* find(uint64_t key) {
    Shard& own = shards[key >> 58];
    if (own.slots.empty()) return nullptr;
    for (size_t i = key & own.mask();; i = (i + 1) & own.mask()) {
      if (own.slots[i].head == NONE) return nullptr;
      if (own.slots[i].key == key) return &own.slots[i].head;
    }
  }

  int32_t& make(uint64_t key) {  // NONE where it is new, and to be set at once
    Shard& own = shards[key >> 58];
    if (2 * (own.count + 1) > own.slots.size()) own.grow();
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

struct Cursor {
  const int32_t *next, *end;
  int32_t age;  // the newest place has 0
};

struct Draft {
  std::vector<int32_t> tokens;
  std::vector<float> probs;
  float score = 0;
  int32_t match = 0;
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

// What follows all of the places, where that is the same token; else null. Mostly it is, and nothing has to be counted.
const int32_t* followed_alike(const std::vector<Cursor>& places) {
  const int32_t* first = places[0].next;
  for (const Cursor& place : places)
    if (place.next == place.end || *place.next != *first) return nullptr;
  return first;
}

// Goes on with a draft, up to so many tokens. places: behind it, of those that it was made of from its first token on.
void follow(std::vector<Cursor>& places, int32_t most, float min_prob, Draft& draft) {
  static thread_local Counts counts;
  float prob = draft.probs.empty() ? 1 : draft.probs.back();
  while (int32_t(draft.tokens.size()) < most) {
    int32_t token = 0, count = 0;
    if (const int32_t* all = followed_alike(places)) {
      token = *all, count = int32_t(places.size());
    } else {
      counts.clear();
      for (const Cursor& place : places)
        if (place.next != place.end) counts.add(*place.next, place.age);
      count = counts.top;
      if (count) token = counts.likeliest(places);
    }
    if (!count) return;
    prob *= float(count) / float(places.size());
    if (prob < min_prob) return;
    draft.tokens.push_back(token);
    draft.probs.push_back(prob);
    draft.score += prob;
    size_t kept = 0;
    if (count == int32_t(places.size())) {
      for (Cursor& place : places) place.next++;
      continue;
    }
    for (const Cursor& place : places)
      if (place.next != place.end && *place.next == token) places[kept++] = {place.next + 1, place.end, place.age};
    places.resize(kept);
  }
}

// Drafts of a match, of any factor.
int32_t most_of(int32_t match, float factor, int32_t most) { return int32_t(std::min(float(match) * factor + 1e-6f, float(most))); }

class Index {
 public:
  explicit Index(int32_t depth) : depth(depth) {}

  void extend(int32_t id, const int32_t* tokens, int64_t count) {
    const int32_t number = number_of(id);
    Text& own = texts[number];
    for (int64_t i = 0; i < count; i++) {
      const int32_t place = int32_t(own.tokens.size());
      own.tokens.push_back(tokens[i]);
      own.entries.push_back(enter(number, place));
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

  int64_t count() const { return int64_t(ids.size()); }

  int64_t room() const { return int64_t(entries.size()); }

  // best_score: that a draft has to beat
  Draft speculate(const int32_t* context, int32_t size, int32_t most, float factor, float min_prob, float best_score = 0) {
    Draft best;
    best.score = best_score;
    const int32_t limit = std::min(size - 1, depth);
    static thread_local std::vector<Found> found;
    static thread_local std::vector<Cursor> places;
    static thread_local Counts nexts;
    for (int kind = KINDS - 1; kind >= 0; kind--) {
      const int32_t low = GRAMS[kind], high = std::min(limit, kind + 1 < KINDS ? GRAMS[kind + 1] - 1 : limit);
      if (high < low || float(most_of(high, factor, most)) <= best.score) continue;
      collect(kind, context + size - 1, limit, found);
      nexts.clear();
      size_t number = 0, num_before = 0, num_followed = 0;  // of the places that match so far
      int32_t most_before = 0;
      Draft draft;
      for (int32_t match = found.empty() ? 0 : std::min(found[0].match, high); match >= low; match--) {
        for (; number < found.size() && found[number].match >= match; number++) {
          const Cursor& own = found[number].cursor;
          if (own.next != own.end) nexts.add(*own.next, own.age);
        }
        const int32_t bound = std::max(std::min(most_of(match, factor, most), depth - match), 0);
        if (number < 2 * num_before && bound <= most_before) continue;  // nearly the same places
        num_before = number, most_before = bound;
        // No token is likelier than the first.
        if (float(bound) * (float(nexts.top) / float(number)) * ROUNDING <= best.score) continue;
        if (number != num_followed) {  // else a shorter match has no more places, and its draft may be longer
          places.clear();
          for (size_t i = 0; i < number; i++) places.push_back(found[i].cursor);
          draft = Draft();
          num_followed = number;
        }
        follow(places, bound, min_prob, draft);
        if (draft.score > best.score) {
          best = draft;
          best.match = match;
        }
      }
    }
    return best;
  }

 private:
  int32_t depth;
  std::deque<Entry> entries;
  std::vector<int32_t> free_entries, free_texts;
  std::deque<Text> texts;
  std::unordered_map<int32_t, int32_t> ids;
  Heads heads[KINDS];

  int32_t number_of(int32_t id) {
    const auto found = ids.find(id);
    if (found != ids.end()) return found->second;
    int32_t number = int32_t(texts.size());
    if (free_texts.empty()) {
      texts.emplace_back();
    } else {
      number = free_texts.back();
      free_texts.pop_back();
    }
    return ids[id] = number;
  }

  int32_t enter(int32_t text, int32_t place) {
    int32_t number;
    if (free_entries.empty()) {
      number = int32_t(entries.size());
      entries.emplace_back();
    } else {
      number = free_entries.back();
      free_entries.pop_back();
    }
    Entry& own = entries[number];
    own.text = text, own.place = place;
    const int32_t* last = &texts[text].tokens[place];
    for (int kind = 0; kind < KINDS; kind++) {
      own.older[kind] = own.newer[kind] = NONE;
      if (place + 1 < GRAMS[kind]) continue;
      int32_t& head = heads[kind].make(hash(last, GRAMS[kind]));
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
    free_entries.push_back(number);
  }

  // The places where the context's last tokens stood, longest matches first. limit: of a match, at most; last: the context's last token
  void collect(int kind, const int32_t* last, int32_t limit, std::vector<Found>& found) {
    found.clear();
    const int32_t* head = heads[kind].find(hash(last, GRAMS[kind]));
    int32_t number = head ? *head : NONE;
    for (int32_t i = 0; i < MOST[kind] && number != NONE; i++, number = entries[number].older[kind]) {
      const Entry& own = entries[number];
      const std::vector<int32_t>& tokens = texts[own.text].tokens;
      const int32_t* at = tokens.data() + own.place;
      const int32_t room = std::min(limit, own.place + 1);
      int32_t match = 0;
      while (match < room && at[-match] == last[-match]) match++;
      if (match < GRAMS[kind]) continue;  // another text with the same hash
      found.push_back({{at + 1, tokens.data() + tokens.size(), i}, match});
    }
    std::sort(found.begin(), found.end(), [](const Found& a, const Found& b) { return a.match > b.match; });
  }
};

}  // namespace

extern "C" {

// See kernels/suffix.py. An index is one thread's at a time. All return -1 where there is no memory left.
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
  Draft draft = static_cast<Index*>(index)->speculate(context, int32_t(size), int32_t(most), factor, min_prob);
  if (beside) {
    Draft other = static_cast<Index*>(beside)->speculate(context, int32_t(size), int32_t(most), factor, min_prob, draft.score);
    if (other.score > draft.score) draft = std::move(other);
  }
  std::copy(draft.tokens.begin(), draft.tokens.end(), tokens);
  std::copy(draft.probs.begin(), draft.probs.end(), probs);
  *score = draft.score;
  *match = draft.match;
  return int64_t(draft.tokens.size());
} catch (...) {
  return -1;
}
}
