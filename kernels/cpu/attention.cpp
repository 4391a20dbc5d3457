// Rotary embedding with the write to the paged cache, and attention of rows that decode, in float32. What a row gets depends on that row and its keys
// alone: the same bits whatever is beside it.
#include <algorithm>
#include <vector>

#include "kernels.h"
#include "pool.h"
#include "vector.h"

constexpr long GROUP = 8;       // rows whose scores are kept at a time
constexpr long BLOCK = 4 * 16;  // keys that all of them meet while they are in the first cache

struct Cache {
  float *keys, *values;  // planes [P, page, heads, size]
  int64_t page_stride;   // numbers from a page to the next
  int64_t page, heads, size;
};

struct Requests {
  const int32_t *cu_query_lens, *seq_lens, *indices;  // [B + 1], [B], [B]
  const int32_t* page_table;                          // page ids, by index
  int64_t table_stride, batch;
  const int64_t* seen;  // [T] or null: of a request whose new tokens are a tree, which of them a row sees, a bit each; 0: those before it
  int64_t max_query_len;  // requests of more rows are left out
};

namespace {

// Of two vectors, in every four lanes the even (ODD 0) or odd ones of both: of a, then of b.
template <int ODD>
static inline Vector lanes_of(Vector a, Vector b) {
  Integers places;
  for (int i = 0; i < LANES; i++) places[i] = i / 4 * 4 + i % 2 * 2 + ODD + (i % 4 < 2 ? 0 : LANES);
  return shuffled(a, b, places);
}

// The same of groups of four lanes: those of a come first.
template <int ODD>
static inline Vector groups_of(Vector a, Vector b) {
  Integers places;
  for (int i = 0; i < LANES; i++) {
    const int group = i / 4 * 2 + ODD;
    places[i] = i % 4 + group % (LANES / 4) * 4 + (group < LANES / 4 ? 0 : LANES);
  }
  return shuffled(a, b, places);
}

// Lane i: the sum of v[i]. v is written over.
static inline Vector sum_each(Vector* v) {
#pragma GCC unroll 2
  for (int level = 0; level < 2; level++) {
#pragma GCC unroll 8
    for (int i = 0; i < LANES >> (level + 1); i++) v[i] = lanes_of<0>(v[2 * i], v[2 * i + 1]) + lanes_of<1>(v[2 * i], v[2 * i + 1]);
  }
#pragma GCC unroll 2
  for (int count = LANES / 4; count > 1; count /= 2) {
#pragma GCC unroll 2
    for (int i = 0; i < count / 2; i++) v[i] = groups_of<0>(v[2 * i], v[2 * i + 1]) + groups_of<1>(v[2 * i], v[2 * i + 1]);
  }
  return v[0];
}

struct Keys {  // of one request and head
  const float* plane;
  const int32_t* pages;
  long page, page_stride, token;
  const float* at(long key) const { return plane + pages[key / page] * page_stride + key % page * token; }
};

// Where keys from `first` on are; what is past the last one, `end` - 1, is that one again.
void list(const Keys& keys, long first, long end, const float* out[BLOCK + LANES]) {
  const float* row = nullptr;
  for (long j = 0, left = 0; j < BLOCK + LANES; j++, left--, row += keys.token) {
    if (first + j >= end) {
      std::fill(out + j, out + BLOCK + LANES, out[j - 1]);
      return;
    }
    if (!left) {
      row = keys.at(first + j);
      left = keys.page - (first + j) % keys.page;
    }
    out[j] = row;
  }
}

// q [size], times `count` keys -> scores, by whole vectors: there is room, and keys that are not wanted. VECTORS: of a head; 0: any.
template <int VECTORS>
void score(const float* q, const float* const* keys, long count, long size, float scale, float* scores) {
  Vector own[VECTORS ? VECTORS : 1];
  for (int d = 0; d < VECTORS; d++) own[d] = load(q + d * LANES);
  for (long first = 0; first < count; first += LANES) {
    Vector parts[LANES];
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) {
      const float* key = keys[first + i];
      Vector part = {};
      if (VECTORS) {
#pragma GCC unroll 16
        for (int d = 0; d < VECTORS; d++) part += own[d] * load(key + d * LANES);
      } else {
        for (long d = 0; d < size; d += LANES) part += load(q + d) * load(key + d);
      }
      parts[i] = part;
    }
    store(scores + first, sum_each(parts) * scale);
  }
}

using Score = void (*)(const float*, const float* const*, long, long, float, float*);

Score score_of(long size) {
  switch (size / LANES) {
    case 2: return score<2>;
    case 4: return score<4>;
    case 8: return score<8>;
    case 16: return score<16>;
  }
  return score<0>;
}

// scores from `begin` to `end` -> e^(score - the largest), and 1 over their sum
float weigh(float* scores, long begin, long end) {
  Vector largest = Vector{} - __builtin_inff();
  long j = begin;
  for (; j + LANES <= end; j += LANES) {
    const Vector own = load(scores + j);
    largest = own > largest ? own : largest;
  }
  float most = scores[begin];
  for (int i = 0; i < LANES; i++) most = std::max(most, largest[i]);
  for (; j < end; j++) most = std::max(most, scores[j]);
  if (most == -__builtin_inff()) most = 0;
  Vector totals = {};
  j = begin;
  for (; j + LANES <= end; j += LANES) {
    const Vector own = exp_of(load(scores + j) - most);
    store(scores + j, own);
    totals += own;
  }
  float total = sum(totals);
  for (; j < end; j++) total += scores[j] = exp_of(Vector{} + (scores[j] - most))[0];
  return 1.f / total;
}

// Sums of the values from the first key of any of the rows to the last one, by their weights, which are 0 for what a row does not see.
template <int ROWS, int VECTORS>
void gather(const float* const* weights, long begin, long end, const float* factors, const Keys& values, long size, float* const* outs) {
  for (long d = 0; d < size; d += VECTORS * LANES) {
    Vector own[ROWS][VECTORS] = {};
    for (long key = begin; key < end;) {
      const long stop = std::min(end, (key / values.page + 1) * values.page);
      const float* row = values.at(key) + d;
      for (; key < stop; key++, row += values.token) {
        Vector value[VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) value[v] = load(row + v * LANES);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
          const float weight = weights[r][key];
#pragma GCC unroll 4
          for (int v = 0; v < VECTORS; v++) own[r][v] += weight * value[v];
        }
      }
    }
    for (int r = 0; r < ROWS; r++)
      for (int v = 0; v < VECTORS; v++) store(outs[r] + d + v * LANES, own[r][v] * factors[r]);
  }
}

template <int VECTORS>
void gather_all(
    const float* const* weights, long rows, long begin, long end, const float* factors, const Keys& values, long size, float* const* outs) {
  constexpr int MOST = LANES == 16 ? 8 : 4;  // what the registers hold the sums of
  long i = 0;
  for (; i + MOST <= rows; i += MOST) gather<MOST, VECTORS>(weights + i, begin, end, factors + i, values, size, outs + i);
  for (; i + 4 <= rows; i += 4) gather<4, VECTORS>(weights + i, begin, end, factors + i, values, size, outs + i);
  for (; i + 2 <= rows; i += 2) gather<2, VECTORS>(weights + i, begin, end, factors + i, values, size, outs + i);
  for (; i < rows; i++) gather<1, VECTORS>(weights + i, begin, end, factors + i, values, size, outs + i);
}

}  // namespace

extern "C" {

int foretoken_lanes() { return LANES; }

// heads [T, H + 2 Hkv, size] -> queries [T, H, size], turned; keys and values to their slots. 0, or 1 where a slot is past the cache's last row.
int foretoken_append_kv(
    const float* heads, int64_t tokens, int64_t num_heads, int64_t stride, const float* cos, const float* sin, const int32_t* positions,
    const int64_t* slots, int64_t num_slots, const Cache* cache, float* queries) {
  const long size = cache->size, half = size / 2, token = cache->heads * size;
  for (long t = 0; t < tokens; t++)
    if (slots[t] >= num_slots) return 1;
  for (long t = 0; t < tokens; t++, heads += stride) {
    const long place = positions ? positions[t] : t;
    const float *c = cos + place * size, *s = sin + place * size;
    auto turn = [&](const float* from, float* to) {
      for (long i = 0; i < half; i++) {
        const float a = from[i], b = from[i + half];
        to[i] = a * c[i] + b * s[i];
        to[i + half] = b * c[i + half] + a * s[i + half];
      }
    };
    for (long h = 0; h < num_heads; h++) turn(heads + h * size, queries + (t * num_heads + h) * size);
    if (slots[t] < 0) continue;
    const float* keys = heads + num_heads * size;
    for (long h = 0; h < cache->heads; h++) turn(keys + h * size, cache->keys + slots[t] * token + h * size);
    std::memcpy(cache->values + slots[t] * token, keys + token, token * sizeof(float));
  }
  return 0;
}

// query and out [T, H, size]. window: tokens that a row sees, itself with them; 0: all before it.
void foretoken_attention(
    const float* query, int64_t num_heads, const Requests* requests, const Cache* cache, int64_t window, float scale, float* out, int threads) {
  const Requests& r = *requests;
  const long size = cache->size, shared = num_heads / cache->heads;
  const Score score_rows = score_of(size);
  share(r.batch * cache->heads, threads, [&](long item) {
    static thread_local std::vector<float> kept;
    const long b = item / cache->heads, head = item % cache->heads;
    const long first = r.cu_query_lens[b], count = r.cu_query_lens[b + 1] - first, length = r.seq_lens[b], before = length - count;
    if (count <= 0 || count > r.max_query_len) return;
    const int32_t* pages = r.page_table + r.indices[b] * r.table_stride;
    const long token = cache->heads * size;
    const Keys keys{cache->keys + head * size, pages, cache->page, cache->page_stride, token};
    const Keys values{cache->values + head * size, pages, cache->page, cache->page_stride, token};
    const long room = (length + 2 * LANES - 1) / LANES * LANES;
    if (kept.size() < size_t(GROUP * room)) kept.resize(GROUP * room);
    for (long row = 0; row < count * shared; row += GROUP) {
      const long own = std::min(GROUP, count * shared - row);
      const float* weights[GROUP];
      float factors[GROUP], *outs[GROUP];
      long begins[GROUP], ends[GROUP];
      const float* queries[GROUP];
      uint64_t seen[GROUP];
      long low = length, high = 0;
      for (long i = 0; i < own; i++) {
        const long place = (row + i) / shared, q = ((first + place) * num_heads + head * shared + (row + i) % shared) * size;
        seen[i] = r.seen ? r.seen[first + place] : 0;
        queries[i] = query + q;
        outs[i] = out + q;
        ends[i] = seen[i] ? length : before + place + 1;
        begins[i] = window ? std::max(0L, ends[i] - long(window)) : 0;
        low = std::min(low, begins[i]);
        high = std::max(high, ends[i]);
      }
      for (long block = low; block < high; block += BLOCK) {
        const float* all[BLOCK + LANES];
        list(keys, block, high, all);
        for (long i = 0; i < own; i++) {
          const long begin = std::max(block, begins[i]), end = std::min(block + BLOCK, ends[i]);
          if (begin < end) score_rows(queries[i], all + (begin - block), end - begin, size, scale, kept.data() + i * room + begin);
        }
      }
      for (long i = 0; i < own; i++) {
        float* scores = kept.data() + i * room;
        for (long j = before; seen[i] && j < length; j++)
          if (j - before > 63 || !(seen[i] >> (j - before) & 1)) scores[j] = -__builtin_inff();
        factors[i] = weigh(scores, begins[i], ends[i]);
        weights[i] = scores;
      }
      // Rows that are gathered together look at each other's keys, too.
      for (long i = 0; i < own; i++) {
        float* scores = kept.data() + i * room;
        std::fill(scores + low, scores + begins[i], 0.f);
        std::fill(scores + ends[i], scores + high, 0.f);
      }
      (size % (2 * LANES) ? gather_all<1> : gather_all<2>)(weights, own, low, high, factors, values, size, outs);
    }
  });
}
}
