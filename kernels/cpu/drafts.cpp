// What a model drafter's draft becomes: the likeliest token, how likely it is, and where the forward that makes the next one finds it.
#include <algorithm>
#include <cmath>

#include "kernels.h"
#include "vector.h"

// Rows of a step's `fields` (kernels/structs.py, Field).
enum Field { INDEX = 0, NUM_PAGES = 1, END = 2, DRAFTER_COUNT = 7, MODEL_LIMIT = 8 };

struct Table {  // of requests
  const int32_t* num_tokens;
  int32_t* drafts;
  int64_t drafts_stride;
  int32_t* num_drafts;
  const int32_t* page_table;
  int64_t table_width, page_size, drafter_stride, scratch_page, dummy_index;
};

extern "C" {

// Of each row of logits [rows, size], which is not empty: the place of the greatest, the first of equals, or of the first that is no number; and what softmax gives it: 1
// over the sum of e^(logit - the greatest), which is no number where a logit is none or infinite.
void foretoken_likeliest(const float* logits, int64_t rows, int64_t size, float* chances, int32_t* places) {
  for (long r = 0; r < rows; r++, logits += size) {
    Vector largest = Vector{} - __builtin_inff(), totals = {};
    long k = 0;
    for (; k + LANES <= size; k += LANES) {
      const Vector own = load(logits + k);
      largest = own > largest ? own : largest;
    }
    float most = -__builtin_inff(), total = 0;
    for (int i = 0; i < LANES; i++) most = std::max(most, largest[i]);
    for (; k < size; k++) most = std::max(most, logits[k]);
    for (k = 0; k + LANES <= size; k += LANES) totals += exp_of(load(logits + k) - most);
    total = sum(totals);
    for (; k < size; k++) total += exp_of(Vector{} + (logits[k] - most))[0];
    chances[r] = 1.f / total;
    const float* found = logits + size;
    if (total != total) found = std::find_if(logits, logits + size, [](float own) { return own != own; });
    if (found == logits + size) found = std::find(logits, logits + size, most);
    places[r] = int32_t(found - logits);
  }
}

// How likely draft `number` of each request is to stand, at least 1e-6: in its row of kept [S, width], 0 of one that has `ended`; and, to the power of
// trust, in what all of its drafts have together [batch].
void foretoken_note_draft(
    float* kept, int64_t width, const int32_t* indices, int64_t batch, int64_t number, const float* chances, const int32_t* ended, const float* trust,
    float* together) {
  for (long b = 0; b < batch; b++) {
    const float own = std::fmax(chances[b], 1e-6f);  // of a number and what is none, the number
    float* row = kept + indices[b] * width;
    if (!number) {
      std::fill_n(row, width, 0.f);
      together[b] = 1;
    }
    row[number] = ended && ended[b] ? 0 : own;
    together[b] *= std::pow(own, *trust);
  }
}

float foretoken_sum(const float* numbers, int64_t count) {
  float total = 0;
  for (long i = 0; i < count; i++) total += numbers[i];
  return total;
}

// Draft `step` of the rows of fields [NUM_FIELDS, batch] that want so many: see kernels/step.py, append_draft.
void foretoken_append_draft(
    const Table* table, const int32_t* fields, int64_t batch, const int32_t* chosen, const int32_t* skipped, int64_t step, int64_t* packed,
    int32_t* seq_lens) {
  const Table& own = *table;
  for (long b = 0; b < batch; b++) {
    const auto field = [&](Field name) { return long(fields[name * batch + b]); };
    const long index = field(INDEX), known = own.num_tokens[index];
    const bool is_wanted = index != own.dummy_index && field(DRAFTER_COUNT) && step < std::min(field(MODEL_LIMIT), field(END) - known - 1) &&
                           !(skipped && skipped[b]);
    if (is_wanted) {
      own.drafts[index * own.drafts_stride + step] = chosen[b];
      own.num_drafts[index] = int32_t(step + 1);
    }
    const long position = is_wanted ? known + step : 0, place = position / own.page_size;
    const bool has_page = is_wanted && place < field(NUM_PAGES);
    const long page = has_page ? own.page_table[index * own.table_width + place] : own.scratch_page;
    packed[b] = chosen[b];
    packed[batch + b] = position;
    packed[2 * batch + b] = page * own.drafter_stride + position % own.page_size;
    seq_lens[b] = int32_t(position + 1);
  }
}
}
