// Lookups in texts by random calls, to be compiled with sanitizers (tests/test_sanitized.py): every row of the request table and every list ends where
// its memory does, and allocations of the suffix index fail now and then. What such a call leaves must be what was there before it.
#include <cstdio>
#include <cstdlib>
#include <new>
#include <random>
#include <vector>

static long left = -1;  // allocations before one fails; below 0: none does

void* operator new(std::size_t size) {
  void* made = left >= 0 && left-- == 0 ? nullptr : std::malloc(size ? size : 1);
  if (!made) throw std::bad_alloc();
  return made;
}
void operator delete(void* own) noexcept { std::free(own); }
void operator delete(void* own, std::size_t) noexcept { std::free(own); }

#include "../../kernels/cpu/ngram.cpp"
#include "../../kernels/cpu/suffix.cpp"

namespace {

using Numbers = std::vector<int32_t>;
std::mt19937 engine;

long below(long count) { return long(engine() % uint64_t(count)); }

Numbers draw(long count, long values) {
  Numbers made(count);
  for (int32_t& own : made) own = int32_t(below(values));
  return made;
}

void check(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "%s\n", what);
  std::exit(1);
}

struct Found {
  Numbers tokens;
  int32_t match;
  bool operator==(const Found& other) const { return tokens == other.tokens && match == other.match; }
};

Found search(void* index, void* beside, const Numbers& context, long most, float factor, float min_prob) {
  Numbers tokens(most);
  std::vector<float> probs(most);
  Found found{{}, 0};
  float score;
  const int64_t count = foretoken_suffix_speculate(
      index, beside, context.data(), int64_t(context.size()), most, factor, min_prob, tokens.data(), probs.data(), &score, &found.match);
  check(count >= 0 && count <= most, "a draft that is none, or too long");
  found.tokens.assign(tokens.begin(), tokens.begin() + count);
  return found;
}

// Two indices that are told the same, one of which sometimes has no memory: calls that fail are not made of the other.
long fail_and_go_on(long depth) {
  void *index = foretoken_suffix_new(depth), *other = foretoken_suffix_new(depth);
  long num_failed = 0;
  const long values = 1 + below(40);
  for (int step = 0; step < 100; step++) {
    const int32_t id = int32_t(below(5)) - 2;
    const Numbers tokens = draw(below(70), values);
    left = below(3) ? below(12) : -1;
    const bool removes = below(4) == 0;
    const int64_t made = removes ? foretoken_suffix_remove(index, id) : foretoken_suffix_extend(index, id, tokens.data(), int64_t(tokens.size()));
    left = -1;
    check(made >= 0 || !removes, "what is removed takes memory");
    num_failed += made < 0;
    if (removes)
      foretoken_suffix_remove(other, id);
    else if (made == 0)
      foretoken_suffix_extend(other, id, tokens.data(), int64_t(tokens.size()));
    for (int time = 0; time < 3; time++) {
      const Numbers context = draw(1 + below(20), values);
      const long most = 1 + below(20);
      const float factor = float(below(5)), min_prob = float(below(4)) / 4;
      check(search(index, nullptr, context, most, factor, min_prob) == search(other, nullptr, context, most, factor, min_prob), "another draft");
    }
  }
  foretoken_suffix_free(index);
  foretoken_suffix_free(other);
  return num_failed;
}

long take_turns() {
  const long depth = 1 + below(70), count = 1 + below(9), values = 1 + below(9), parts = 1 + below(255);
  Index* shared = static_cast<Index*>(foretoken_suffix_new(depth));
  std::vector<Index*> own;
  for (long i = 0; i < count; i++) own.push_back(static_cast<Index*>(foretoken_suffix_new(depth)));
  long num_drafted = 0;
  for (int step = 0; step < 12; step++) {
    std::vector<Turn> turns;
    Numbers words;
    long stride = 1;
    for (long i = 0; i < count; i++) {
      const Numbers tokens = draw(step ? below(20) : 20, values);
      const bool is_own = !step || below(4);
      turns.push_back({is_own ? own[i] : nullptr, 7, is_own && below(2) ? i : -1, int64_t(tokens.size()), 1 + below(30)});
      words.insert(words.end(), tokens.begin(), tokens.end());
      stride = std::max(stride, long(turns.back().most));
    }
    words.shrink_to_fit();
    Numbers heads(2 * count), tokens(count * stride);
    std::vector<uint8_t> chances(count * stride);
    const int64_t status = foretoken_suffix_take(
        turns.data(), count, shared, words.data(), float(below(4)), 0.1f, parts, stride, heads.data(), tokens.data(), chances.data());
    check(status == 0, "turns that fail");
    for (long i = 0; i < count; i++) {
      check(heads[2 * i] <= turns[i].most, "a draft that is too long");
      num_drafted += heads[2 * i];
    }
    if (below(3) == 0) foretoken_suffix_remove(shared, below(count));
  }
  for (Index* index : own) foretoken_suffix_free(index);
  foretoken_suffix_free(shared);
  return num_drafted;
}

// Tables of rows that are as long as their texts may become.
long look_up() {
  const long rows = 1 + below(4), max_len = 1 + below(100), max_drafts = 1 + below(8), batch = 1 + below(rows), values = 1 + below(4);
  const Numbers tokens = draw(rows * max_len, values), totals(rows, int32_t(max_len));
  Numbers known(rows), drafts = draw(rows * max_drafts, values), num_drafts(rows), indices(batch), limits(batch), given(batch), least(batch), scores(batch);
  for (int32_t& own : known) own = int32_t(below(max_len + 1));
  for (long b = 0; b < batch; b++) {
    indices[b] = int32_t(b), limits[b] = int32_t(below(12)) - 1, least[b] = int32_t(below(6));
    given[b] = int32_t(below(std::max(1L, std::min(max_drafts, max_len - known[b]))));
  }
  const Texts table{tokens.data(), max_len, known.data(), drafts.data(), max_drafts, num_drafts.data(), totals.data(), 1};
  const long largest = 1 + below(6);
  foretoken_draft_ngram(
      &table, indices.data(), limits.data(), batch, largest, 1 + below(largest), below(2) ? given.data() : nullptr, below(2) ? least.data() : nullptr,
      below(2) ? scores.data() : nullptr, below(40));
  long num_drafted = 0;
  for (long b = 0; b < batch; b++) {
    check(num_drafts[b] <= max_drafts && known[b] + num_drafts[b] <= max_len, "drafts past the end");
    num_drafted += num_drafts[b];
  }
  return num_drafted;
}

}  // namespace

int main(int, char** arguments) {
  engine.seed(unsigned(std::atol(arguments[1])));
  long num_failed = 0, num_taken = 0, num_found = 0;
  for (int round = 0; round < 60; round++) num_failed += fail_and_go_on(1 + below(70));
  for (int round = 0; round < 200; round++) num_taken += take_turns();
  for (int round = 0; round < 5000; round++) num_found += look_up();
  std::printf("%ld %ld %ld\n", num_failed, num_taken, num_found);
}
