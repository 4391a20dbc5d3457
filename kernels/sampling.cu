// Logits -> the target's token of every row, in one reading of the logits from memory.
//
// LOGIT: 0 float32, 1 bf16, 2 fp16. VECTOR: rows are 16-byte aligned. CLUSTER: blocks that share a row. THREADS of a block.
//
// The token of a row is the likeliest after Gumbel noise among those that top_k, top_p and min_p keep. Nothing is sorted: what they
// keep is a prefix of the tokens by probability. Without them one reading finds the best token. With them a first reading adds up
// the softmax and notes the greatest logit of every eight; these alone bound where the prefix ends, and a second reading (of the
// chunks that reach that bound) finds the best token. A third, of the chunks that reach it, adds up the tokens likelier than it,
// which says whether it is kept. If not, nothing behind it is, and the next best among the likelier ones is asked.
//
// Noise is -log(E), E = -log1p(-u) >= u. A token of logit t reaches a score s only if u <= E <= exp(t - s): a product and a
// comparison with the leading bits of the token's random number spare all but a few tokens the rest of it and the exact noise.

#include <climits>
#include "logits.cuh"
#include "random.cuh"
#include "slots.cuh"

#if CLUSTER > 1
#include <cooperative_groups.h>
namespace cg = cooperative_groups;
#define CLUSTER_DIMS __cluster_dims__(CLUSTER, 1, 1)
#else
#define CLUSTER_DIMS
#endif

constexpr int WARPS = THREADS / 32, STRIDE = CLUSTER * THREADS;
constexpr int DEPTH = LOGIT == 0 ? 2 : 4;
constexpr float LOG2E = 1.4426950408889634f;
constexpr float NONE = -1e30f;  // below every logit in base 2, and finite: differences with it are

struct Best {
  unsigned long long key;  // score_key, 0: none
  float base, sum, top;    // sum of 2^(t - base), t: logits over temperature in base 2; of all, and of some that the finder names
  float greatest;  // NaN if one is
};

struct Next {
  unsigned long long key;
  int is_incomplete;  // some of a block's close tokens were not noted
};

struct Standing {  // of one token: the tokens likelier than it, equal ones by id
  int rank;
  float mass;
};

struct Counts {
  int at_least[8];
};

__device__ __forceinline__ Best combine(const Best& a, const Best& b) {
  const float base = fmaxf(a.base, b.base);
  return {a.key > b.key ? a.key : b.key, base, a.sum * exp2_fast(a.base - base) + b.sum * exp2_fast(b.base - base),
          a.top * exp2_fast(a.base - base) + b.top * exp2_fast(b.base - base),
          max_nan(a.greatest, b.greatest)};
}

__device__ __forceinline__ Next combine(const Next& a, const Next& b) {
  return {a.key > b.key ? a.key : b.key, a.is_incomplete | b.is_incomplete};
}

__device__ __forceinline__ Standing combine(const Standing& a, const Standing& b) { return {a.rank + b.rank, a.mass + b.mass}; }

__device__ __forceinline__ Counts combine(const Counts& a, const Counts& b) {
  Counts c;
#pragma unroll
  for (int j = 0; j < 8; ++j) c.at_least[j] = a.at_least[j] + b.at_least[j];
  return c;
}

struct Masses {
  float above[8], all;
};

__device__ __forceinline__ Masses combine(const Masses& a, const Masses& b) {
  Masses c;
#pragma unroll
  for (int j = 0; j < 8; ++j) c.above[j] = a.above[j] + b.above[j];
  c.all = a.all + b.all;
  return c;
}

struct Noted {
  unsigned long long key;
  float value;
};

struct Shared {
  uint4 of_warp[2][WARPS][3];
  uint4 of_block[2][CLUSTER][3];
  int bound;  // order() of a score, base 2: tokens that do not reach it need not be looked at
  int num_noted;
  Owner owner;
  Noted noted[THREADS];
};

template <class T>
__device__ __forceinline__ T shuffle(const T& value, int lane_mask, bool is_broadcast) {
  static_assert(sizeof(T) % 4 == 0 && sizeof(T) <= 48);
  T other;
  const int* from = reinterpret_cast<const int*>(&value);
  int* to = reinterpret_cast<int*>(&other);
#pragma unroll
  for (int i = 0; i < int(sizeof(T) / 4); ++i)
    to[i] = is_broadcast ? __shfl_sync(~0u, from[i], 0) : __shfl_xor_sync(~0u, from[i], lane_mask);
  return other;
}

// What a block writes to its peers' shared memory has to wait until they have begun.
__device__ __forceinline__ void say_begun() {
#if CLUSTER > 1
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void await_peers() {
#if CLUSTER > 1
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
#endif
}

// The row's value out of every thread's, the same bits in every thread. `turn` alternates between two sets of cells, so that one
// barrier a call is enough.
template <class T>
__device__ T reduce(T value, const T& zero, Shared& shared, int& turn) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int mask = 16; mask; mask /= 2) value = combine(value, shuffle(value, mask, false));
  if (lane == 0) *reinterpret_cast<T*>(shared.of_warp[turn][warp]) = value;
  __syncthreads();
  value = lane < WARPS ? *reinterpret_cast<const T*>(shared.of_warp[turn][lane]) : zero;
#pragma unroll
  for (int mask = 16; mask; mask /= 2) value = combine(value, shuffle(value, mask, false));
  value = shuffle(value, 0, true);  // lanes add in different orders: all take lane 0's
#if CLUSTER > 1
  cg::cluster_group cluster = cg::this_cluster();
  if (threadIdx.x < CLUSTER)
    *reinterpret_cast<T*>(cluster.map_shared_rank(&shared.of_block[turn][cluster.block_rank()][0], threadIdx.x)) = value;
  cluster.sync();
  value = *reinterpret_cast<const T*>(shared.of_block[turn][0]);
#pragma unroll
  for (int i = 1; i < CLUSTER; ++i) value = combine(value, *reinterpret_cast<const T*>(shared.of_block[turn][i]));
#endif
  turn ^= 1;
  return value;
}

#if VECTOR
constexpr int RING = 4;
#else
constexpr int RING = 1;
#endif

// Of each thread: chunks on their way from memory, and the greatest logit of each chunk that has come.
extern __shared__ __align__(16) unsigned char dynamic_memory[];

struct Row {
  const Logit* logits;
  int vocab_size, first, num_chunks;  // a thread has chunks first, first + STRIDE, ...
  float temperature, to_base2;       // t = value * to_base2
  unsigned position, seed_low, seed_high;

  // What tokens are ordered by: float32 logits over temperature, where two may become equal; smaller types as they are.
  __device__ __forceinline__ float value(float x) const { return LOGIT == 0 ? __fdiv_rn(x, temperature) : x; }
  __device__ __forceinline__ float scaled(float value) const { return LOGIT == 0 ? value : __fdiv_rn(value, temperature); }
  __device__ __forceinline__ void unpack_values(const Raw& raw, float (&x)[8]) const {
    unpack(raw, x);
    if (LOGIT == 0)
#pragma unroll
      for (int k = 0; k < 8; ++k) x[k] = value(x[k]);
  }
  __device__ __forceinline__ Raw load(int chunk) const { return load_chunk(logits, min(chunk, num_chunks - 1), vocab_size); }
  __device__ __forceinline__ Raw* ring() const { return reinterpret_cast<Raw*>(dynamic_memory) + threadIdx.x; }
  __device__ __forceinline__ Logit* tops() const {
    return reinterpret_cast<Logit*>(dynamic_memory + RING * THREADS * sizeof(Raw)) + threadIdx.x;
  }
  // visit(chunk, raw) for each chunk of the thread; DEPTH loads are under way at a time. With HAS_TOPS only chunks that reach `least`.
  template <int DEPTH, bool HAS_TOPS, class Visit>
  __device__ __forceinline__ void visit(float least, const Visit& visit) const {
    const Logit* top = tops();
    for (int start = first; start < num_chunks; start += DEPTH * STRIDE, top += DEPTH * THREADS) {
      Raw raws[DEPTH];
      bool is_wanted[DEPTH];
#pragma unroll
      for (int d = 0; d < DEPTH; ++d) {
        is_wanted[d] = start + d * STRIDE < num_chunks && (!HAS_TOPS || value(to_float(top[d * THREADS])) >= least);
        if (is_wanted[d]) raws[d] = load(start + d * STRIDE);
      }
#pragma unroll
      for (int d = 0; d < DEPTH; ++d)
        if (is_wanted[d]) visit(start + d * STRIDE, raws[d]);
    }
  }
  // Chunks come in order, RING - 1 of them under way.
  __device__ __forceinline__ void begin_stream() const {
#if VECTOR
#pragma unroll
    for (int d = 0; d < RING - 1; ++d) fetch(first + d * STRIDE, d);
#endif
  }
  __device__ __forceinline__ Raw next(int chunk, int turn) const {
#if VECTOR
    asm volatile("cp.async.wait_group %0;" ::"n"(RING - 2) : "memory");
    const Raw raw = ring()[turn % RING * THREADS];
    fetch(chunk + (RING - 1) * STRIDE, (turn + RING - 1) % RING);
    return raw;
#else
    return load(chunk);
#endif
  }
  __device__ __forceinline__ void fetch(int chunk, int place) const {
    const unsigned to = unsigned(__cvta_generic_to_shared(ring() + place * THREADS));
    const Logit* from = logits + size_t(8) * min(chunk, num_chunks - 1);
#pragma unroll
    for (int i = 0; i < int(sizeof(Raw) / 16); ++i)
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + 16 * i), "l"(from + 16 / sizeof(Logit) * i) : "memory");
    asm volatile("cp.async.commit_group;" ::: "memory");
  }
};

__device__ __forceinline__ Best no_best() { return {0, NONE, 0, 0, -INF}; }

// The likeliest token, the lowest id of equals.
__device__ Best find_greatest(const Row& row) {
  Best found = no_best();
  float best = -INF;
  int best_chunk = -1;
  row.visit<DEPTH, false>(0, [&](int chunk, const Raw& raw) {
    const float greatest = chunk_max(raw);
    found.greatest = max_nan(found.greatest, greatest);
    if (greatest > best) best = greatest, best_chunk = chunk;
  });
  if (best_chunk >= 0) {
    float x[8];
    unpack(row.load(best_chunk), x);
    int place = 7;
#pragma unroll
    for (int k = 6; k >= 0; --k)
      if (x[k] == best) place = k;
    found.key = score_key(best, best_chunk * 8 + place);
  }
  return found;
}

constexpr float MARGIN = 2;  // tokens whose score is this close to the best are noted; natural logarithm

__device__ __forceinline__ float lower_bound(float score2) { return score2 - 1e-3f - fabsf(score2) * 4e-6f; }

// The softmax's sum, and the part of it from the greatest of each chunk. Fills tops().
__device__ __forceinline__ Best measure(const Row& row) {
  Best found = no_best();
  Logit* top = row.tops();
  int turn = 0;
  row.begin_stream();
  for (int chunk = row.first; chunk < row.num_chunks; chunk += STRIDE, ++turn, top += THREADS) {
    const Raw raw = row.next(chunk, turn);
    float x[8];
    row.unpack_values(raw, x);
    float greatest = chunk_max(raw);
    *top = from_float(greatest);
    greatest = row.value(greatest);
    found.greatest = max_nan(found.greatest, greatest);
    const float t = greatest * row.to_base2;
    if (t > found.base + 40) {
      const float scale = exp2_fast(found.base - t);
      found.sum *= scale, found.top *= scale, found.base = t;
    }
#pragma unroll
    for (int k = 0; k < 8; ++k) found.sum += exp2_fast(fmaf(x[k], row.to_base2, -found.base));
    found.top += exp2_fast(t - found.base);
  }
  return found;
}

// A value that the greatest of so many chunks reach that they count, or weigh, `wanted` together: the greatest such of a few; -INF if
// none is. Tokens below it have at least as many, or as much, before them.
__device__ float find_floor(const Row& row, const Best& all, float wanted, bool is_count, Shared& shared, int& turn) {
#pragma unroll 1
  for (float window = 4; window < 1000; window *= 4) {  // base 2
    Masses masses = {};
    const float step = window / 8 / row.to_base2, least = all.greatest - step * 8;
    const Logit* top = row.tops();
    for (int chunk = row.first; chunk < row.num_chunks; chunk += STRIDE, top += THREADS) {
      const float value = row.value(to_float(*top));
      if (value < least) continue;
      const float weight = is_count ? 1 : exp2_fast(fmaf(value, row.to_base2, -all.base));
#pragma unroll
      for (int j = 0; j < 8; ++j)
        if (value >= all.greatest - step * (j + 1)) masses.above[j] += weight;
    }
    masses = reduce(masses, Masses{}, shared, turn);
#pragma unroll
    for (int j = 0; j < 8; ++j)
      if (masses.above[j] >= wanted) return all.greatest - step * (j + 1);
  }
  return -INF;
}

// A value at which a little less than top_p is reached, more or less, from a sample of four values a thread.
__device__ float guess_cut(const Row& row, const Best& all, float top_p, Shared& shared, int& turn) {
  constexpr float STEP = 2;  // base 2
  float x[8], start = all.greatest * row.to_base2, cut = INF;
  row.unpack_values(row.load(row.first), x);
#pragma unroll 1
  for (float step = STEP; step > STEP / 64; step /= 8) {
    Masses masses = {};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const float t = x[k] * row.to_base2, weight = row.first < row.num_chunks ? exp2_fast(t - all.base) : 0;
      masses.all += weight;
#pragma unroll
      for (int j = 0; j < 8; ++j)
        if (t >= start - step * (j + 1)) masses.above[j] += weight;
    }
    masses = reduce(masses, Masses{}, shared, turn);
    int place = 0;
#pragma unroll
    for (int j = 0; j < 8; ++j)
      if (masses.above[j] <= (top_p - 0.04f) * masses.all) place = j + 1;
    start -= step * place;
    if (place) cut = start / row.to_base2;
  }
  return cut;
}

// The best token after noise. ALL: of all. MEASURE: the same, and what `measure` gives. AMONG: of those ordered before (limit, limit_id),
// with tops() filled. AMONG_AND_SUM: the same when they are most, and the sum of those that reach `mark`. All but ALL note the tokens
// that come within MARGIN of the best, and some more.
constexpr int ALL = 0, MEASURE = 1, AMONG = 2, AMONG_AND_SUM = 3;

template <int MODE>
__device__ __forceinline__ Best find_best(const Row& row, float limit, int limit_id, float base, float mark, Shared& shared) {
  constexpr bool IS_ALL = MODE == ALL || MODE == MEASURE;
  constexpr float margin = MODE == ALL ? 0 : MARGIN;
  if (threadIdx.x == 0) shared.bound = order(NONE), shared.num_noted = 0;
  Raw raw = row.load(row.first);
  __syncthreads();
  {  // a first bound from a few tokens, with E <= u / (1 - u)
    float x[8];
    row.unpack_values(raw, x);
    const uint4 leading = philox(2 * row.first, row.position, SAMPLE_STREAM, row.seed_low, row.seed_high);
    float reached = NONE;
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const float u = float(half_of(leading, k) + 1) * 0x1p-16f;
      if (row.first < row.num_chunks && x[k] > -INF && (IS_ALL || x[k] > limit))
        reached = fmaxf(reached, x[k] * row.to_base2 + __log2f(__fdividef(1.0001f - u, u)) - 1e-3f - margin * LOG2E);
    }
    const int in_warp = __reduce_max_sync(~0u, order(lower_bound(reached)));
    if (threadIdx.x % 32 == 0) atomicMax(&shared.bound, in_warp);
    __syncthreads();
  }
  Best found = no_best();
  if (!IS_ALL) found.base = base;
  Logit* top = row.tops();
  const auto look = [&](int chunk, const Raw& raw) {
    float x[8];
    row.unpack_values(raw, x);
    float greatest = -INF;
    if (IS_ALL) {
      greatest = chunk_max(raw);
      if (MODE == MEASURE) *top = from_float(greatest), top += THREADS;
      greatest = row.value(greatest);
      found.greatest = max_nan(found.greatest, greatest);
      const float t = greatest * row.to_base2;
      if (t > found.base + 40) found.sum *= exp2_fast(found.base - t), found.base = t;
    } else {
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        if (!(x[k] > limit || (x[k] == limit && chunk * 8 + k < limit_id))) x[k] = -INF;
        greatest = fmaxf(greatest, x[k]);
      }
    }
    const uint4 leading = philox(2 * chunk, row.position, SAMPLE_STREAM, row.seed_low, row.seed_high);
    if (MODE != AMONG)
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        const float weight = exp2_fast(fmaf(x[k], row.to_base2, -found.base));
        if (IS_ALL) found.sum += weight;
        else if (x[k] >= mark) found.top += weight;
      }
    // First the least half against the greatest logit, then each against its own.
    const float bound = unorder(*static_cast<volatile int*>(&shared.bound));
    const auto is_close = [&](unsigned half, float value) {
      return unit_floor(half) <= exp2_fast(fmaf(value, row.to_base2, -bound)) + (1 + 0x1p-22f);
    };
    if (!is_close(least_half(leading), greatest)) return;
    unsigned hits = 0;
#pragma unroll
    for (int k = 0; k < 8; ++k) hits |= unsigned(is_close(half_of(leading, k), x[k])) << k;
    if (!hits) return;
    const uint4 rest = philox(2 * chunk + 1, row.position, SAMPLE_STREAM, row.seed_low, row.seed_high);
    while (hits) {
      const int k = __ffs(hits) - 1;
      hits &= hits - 1;
      float value = x[0];
      unsigned number = token_number(leading, rest, 0);
#pragma unroll
      for (int i = 1; i < 8; ++i)
        if (k == i) value = x[i], number = token_number(leading, rest, i);
      if (value == -INF) continue;
      const float score = __fadd_rn(row.scaled(value), gumbel(number));
      const unsigned long long key = score_key(score, chunk * 8 + k);
      if (MODE != ALL) {
        const int free = atomicAdd(&shared.num_noted, 1);
        if (free < THREADS) shared.noted[free] = {key, value};
      }
      if (key > found.key) {
        found.key = key;
        atomicMax(&shared.bound, order(lower_bound((score - margin) * LOG2E)));
      }
    }
  };
  if (MODE != AMONG) {
    for (int chunk = row.first; chunk < row.num_chunks; chunk += STRIDE) {
      const Raw own = raw;
      raw = row.load(chunk + STRIDE);
      look(chunk, own);
    }
  } else {
    row.visit<2, true>(limit, look);
  }
  return found;
}

// The best noted token that is ordered before (limit, limit_id) and scores between `least` and `below`.
__device__ Next find_next(float limit, int limit_id, unsigned long long below, float least, const Shared& shared) {
  Next next = {0, shared.num_noted > THREADS};
  if (int(threadIdx.x) < min(shared.num_noted, THREADS)) {
    const Noted noted = shared.noted[threadIdx.x];
    const bool is_in = noted.value > limit || (noted.value == limit && key_token(noted.key) < limit_id);
    if (is_in && noted.key < below && noted.key > score_key(least, -1)) next.key = noted.key;
  }
  return next;
}

// How a token stands among all. Without HAS_RANK the rank is 1 for all but the likeliest.
template <bool HAS_RANK>
__device__ __forceinline__ Standing find_standing(const Row& row, float value, int token_id, float base) {
  Standing standing = {0, 0};
  const int own = token_id / 8;
  const float above = nextafterf(value, INF);
  constexpr int DEPTH = LOGIT == 0 ? 4 : 8;  // a row that comes here may be the last on its multiprocessor
  row.visit<DEPTH, true>(value, [&](int chunk, const Raw& raw) {
    float x[8];
    row.unpack_values(raw, x);
    const float least = chunk < own ? value : above;  // equal ones count before the token's own place
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const float weight = exp2_fast(fmaf(x[k], row.to_base2, -base));
      if (x[k] >= least) {
        standing.mass += weight;
        if (HAS_RANK) ++standing.rank;
      }
    }
    if (chunk == own)
#pragma unroll
      for (int k = 0; k < 8; ++k)
        if (k < token_id % 8 && x[k] == value) standing.mass += exp2_fast(fmaf(value, row.to_base2, -base)), ++standing.rank;
  });
  if (!HAS_RANK) standing.rank = standing.mass > 0;
  return standing;
}

constexpr int VALUE_SHIFT = LOGIT == 0 ? 0 : LOGIT == 1 ? 16 : 13;  // the values' step among the integers of `order`

__device__ __forceinline__ float value_at(long long place) {
  const int bits = int(place) * (1 << VALUE_SHIFT);
  return unorder(place < 0 ? bits | ((1 << VALUE_SHIFT) - 1) : bits);
}

// The k-th greatest value, in [low, high], by counting at eight places at a time. count(places, counts) adds up a thread's values.
template <class Count>
__device__ float find_kth(const Count& count, int k, float low, float high, Shared& shared, int& turn) {
  long long below = order(low) >> VALUE_SHIFT, above = (order(high) >> VALUE_SHIFT) + 1;  // at least k reach `below`, fewer `above`
  while (above - below > 1) {
    const long long start = below, width = above - below;
    float places[8];
    Counts counts = {};
#pragma unroll
    for (int j = 0; j < 8; ++j) places[j] = value_at(start + width * (j + 1) / 9);
    count(places, counts);
    counts = reduce(counts, Counts{}, shared, turn);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const long long place = start + width * (j + 1) / 9;
      if (counts.at_least[j] >= k) below = place;
      else if (place < above) above = place;
    }
  }
  return value_at(below);
}

__device__ __forceinline__ void count_value(float x, const float (&places)[8], Counts& counts) {
#pragma unroll
  for (int j = 0; j < 8; ++j) counts.at_least[j] += x >= places[j];
}

// Notes the values that reach `least`; their number.
__device__ int gather(const Row& row, float least, Shared& shared, int& turn) {
  if (threadIdx.x == 0) shared.num_noted = 0;
  __syncthreads();
  row.visit<DEPTH, true>(least, [&](int, const Raw& raw) {
    float x[8];
    row.unpack_values(raw, x);
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      if (!(x[k] >= least)) continue;
      const int place = atomicAdd(&shared.num_noted, 1);
      if (place < THREADS) shared.noted[place].value = x[k];
    }
  });
  __syncthreads();
  const bool is_full = shared.num_noted > THREADS;
  const Standing all = reduce(Standing{threadIdx.x ? 0 : shared.num_noted, float(is_full)}, Standing{0, 0}, shared, turn);
  return all.mass > 0 ? INT_MAX : all.rank;
}

struct Kth {
  float value, sum;  // of the top_k: the least value; their probabilities, as Best::sum
};

// The top_k as a whole.
__device__ Kth find_top_k(const Row& row, int k, const Best& all, Shared& shared, int& turn) {
  const float low = find_floor(row, all, float(k), true, shared, turn);
  if (gather(row, low, shared, turn) < INT_MAX) {
    const float own = int(threadIdx.x) < shared.num_noted ? shared.noted[threadIdx.x].value : -INF;
    const auto count_own = [&](const float (&places)[8], Counts& counts) { count_value(own, places, counts); };
    const float value = find_kth(count_own, k, low, all.greatest, shared, turn);
    const bool is_above = own > value;
    const float weight = exp2_fast(fmaf(own, row.to_base2, -all.base));
    const Standing above = reduce(Standing{is_above, is_above ? weight : 0}, Standing{0, 0}, shared, turn);
    return {value, above.mass + float(k - above.rank) * exp2_fast(fmaf(value, row.to_base2, -all.base))};
  }
  const auto count_all = [&](const float (&places)[8], Counts& counts) {
    row.visit<2, true>(places[0], [&](int, const Raw& raw) {
      float x[8];
      row.unpack_values(raw, x);
#pragma unroll
      for (int e = 0; e < 8; ++e) count_value(x[e], places, counts);
    });
  };
  const float value = find_kth(count_all, k, low, all.greatest, shared, turn);
  const Standing above = reduce(find_standing<true>(row, value, 0, all.base), Standing{0, 0}, shared, turn);
  return {value, above.mass + float(k - above.rank) * exp2_fast(fmaf(value, row.to_base2, -all.base))};
}

// The token of a row under its parameters; -1 when none has a score.
__device__ int draw(const Row& row, const SlotParams& params, int& is_broken, Shared& shared, int& turn) {
  const float top_p = params.top_p, min_p = params.min_p;
  const int top_k = params.top_k < row.vocab_size ? params.top_k : 0;
  if (top_k <= 0 && top_p >= 1 && min_p <= 0) {
    const Best own = find_best<ALL>(row, 0, 0, 0, 0, shared);
    await_peers();
    const Best best = reduce(own, no_best(), shared, turn);
    is_broken = !(best.greatest < INF);
    return best.key ? key_token(best.key) : -1;
  }
  // Where few rows leave the chip idle, the first reading finds a token, too, which is mostly kept.
  const bool is_tried = CLUSTER > 1 && top_k <= 0;
  const Best measured = is_tried ? find_best<MEASURE>(row, 0, 0, 0, 0, shared) : measure(row);
  await_peers();
  const Best all = reduce(measured, no_best(), shared, turn);
  is_broken = !(all.greatest < INF);
  if (is_broken || all.greatest == -INF) return -1;
  // Tokens that are surely not kept are left out: those ordered behind (limit, limit_id).
  float sum = all.sum, limit = -INF, mark = INF;
  int limit_id = INT_MAX;
  if (top_k > 0) {
    const Kth kth = find_top_k(row, top_k, all, shared, turn);
    sum = kth.sum, limit = kth.value;
  }
  if (min_p > 0) {  // close to the least logit that it keeps, and below
    const float kept = row.scaled(all.greatest) + logf(min_p);
    limit = fmaxf(limit, (kept - 1e-4f - 1e-5f * fabsf(kept)) * (LOGIT == 0 ? 1 : row.temperature));
  }
  Best best = all;
  if (!is_tried) {
    if (top_p < 1 && all.top >= top_p * sum) limit = fmaxf(limit, find_floor(row, all, top_p * sum, false, shared, turn));
    if (limit == -INF) {
      if (top_p < 1) mark = guess_cut(row, all, top_p, shared, turn);
      best = find_best<AMONG_AND_SUM>(row, limit, limit_id, all.base, mark, shared);
    } else {
      best = find_best<AMONG>(row, limit, limit_id, 0, 0, shared);
    }
    best = reduce(best, no_best(), shared, turn);
  }
  const bool is_marked = mark < INF && best.top <= top_p * sum;
  unsigned long long key = best.key;
  float least = key_score(key) - MARGIN;
  while (key) {
    const int token_id = key_token(key);
    const float value = row.value(to_float(row.logits[token_id]));
    bool is_kept = !(min_p > 0) || expf(row.scaled(value) - row.scaled(all.greatest)) >= min_p;
    // Where it is marked, the tokens that reach the mark do not reach top_p together.
    if (is_kept && (top_k > 0 || top_p < 1) && !(is_marked && value >= mark)) {
      const Standing own = top_k > 0 ? find_standing<true>(row, value, token_id, all.base) : find_standing<false>(row, value, token_id, all.base);
      const Standing standing = reduce(own, Standing{0, 0}, shared, turn);
      is_kept = (top_k <= 0 || standing.rank < top_k) && (top_p >= 1 || standing.rank == 0 || standing.mass < top_p * sum);
    }
    if (is_kept) return token_id;
    if (value >= limit) limit = value, limit_id = token_id;
    const Next next = reduce(find_next(limit, limit_id, key, least, shared), Next{0, 0}, shared, turn);
    key = next.key;
    if (next.key == 0 || next.is_incomplete) {
      best = reduce(find_best<AMONG>(row, limit, limit_id, 0, 0, shared), no_best(), shared, turn);
      key = best.key, least = key_score(key) - MARGIN;
    }
  }
  return -1;  // not reached: the likeliest token is always kept
}

// Penalties, biases and bans of a row, in place, each rounded to the logits' type as the reference does. A block changes the chunks
// that it reads in `choose`.
__device__ void process(Logit* row, const Slots& slots, const Owner& owner, int block) {
  __shared__ int drafts[32], is_seen[32];
  const int slot = owner.slot, place = owner.place;
  const SlotParams params = slots.params[slot];
  const auto is_own = [&](int token_id) { return CLUSTER == 1 || token_id / 8 / THREADS % CLUSTER == block; };
  const auto change = [&](int token_id, float x) { row[token_id] = from_float(x); };
  if (params.flags & HAS_PENALTIES) {
    const int num_drafts = min(place, 32);
    const int2* seen = slots.seen + size_t(slot) * slots.max_seen;
    const int num_seen = slots.num_seen[slot];
    if (threadIdx.x < num_drafts) drafts[threadIdx.x] = slots.drafts[size_t(slot) * slots.max_drafts + threadIdx.x], is_seen[threadIdx.x] = 0;
    __syncthreads();
    const auto penalize = [&](int token_id, int count, bool is_known) {
      float x = to_float(row[token_id]);
      if (is_known || count > 0) x = x > 0 ? __fdiv_rn(x, params.repetition) : __fmul_rn(x, params.repetition);
      x = __fsub_rn(x, count > 0 ? params.presence : 0.0f);
      change(token_id, __fsub_rn(x, __fmul_rn(params.frequency, float(count))));
    };
    for (int i = threadIdx.x; i < num_seen; i += THREADS) {
      const int2 entry = seen[i];
      int count = entry.y & ~IN_PROMPT;
      for (int d = 0; d < num_drafts; ++d)
        if (drafts[d] == entry.x) ++count, is_seen[d] = 1;
      if (is_own(entry.x)) penalize(entry.x, count, entry.y & IN_PROMPT);
    }
    __syncthreads();
    if (threadIdx.x < num_drafts && !is_seen[threadIdx.x]) {
      const int token_id = drafts[threadIdx.x];
      int count = 0, is_first = 1;
      for (int d = 0; d < num_drafts; ++d)
        if (drafts[d] == token_id) ++count, is_first &= d >= int(threadIdx.x);
      if (is_first && unsigned(token_id) < unsigned(slots.vocab_size) && is_own(token_id)) penalize(token_id, count, false);
    }
    __syncthreads();
  }
  if (params.flags & HAS_BIAS) {
    for (int i = threadIdx.x; i < params.num_biases; i += THREADS) {
      const int token_id = slots.bias_ids[slot * MAX_BIASES + i];
      if (is_own(token_id)) change(token_id, __fadd_rn(to_float(row[token_id]), slots.biases[slot * MAX_BIASES + i]));
    }
    __syncthreads();
  }
  if (params.flags & HAS_BANS && slots.num_tokens[slot] + place < params.min_known) {
    for (int i = threadIdx.x; i < params.num_banned; i += THREADS) {
      const int token_id = slots.banned_ids[slot * MAX_BANNED + i];
      if (is_own(token_id)) change(token_id, -INF);
    }
    __syncthreads();
  }
}

constexpr int RULES = HAS_PENALTIES | HAS_BIAS | HAS_BANS;

// Grid: rows * CLUSTER. Row j of a request follows its known tokens and its first j drafts. Padding rows get token 0.
extern "C" __global__ void CLUSTER_DIMS __launch_bounds__(THREADS, 1024 / THREADS)
    choose(int* token_ids, bool* is_broken, Logit* logits, Slots slots, const int* row_slots, const int* cu_query_lens, int batch, int vocab_size,
           int is_processed) {
  __shared__ Shared shared;
  const int index = blockIdx.x / CLUSTER, block = blockIdx.x % CLUSTER;
  const Owner owner = find_owner(row_slots, cu_query_lens, batch, index, &shared.owner);
  if (owner.request < 0) {
    if (block == 0 && threadIdx.x == 0) token_ids[index] = 0, is_broken[index] = false;
    return;
  }
  say_begun();
  const SlotParams& params = slots.params[owner.slot];
  const int flags = params.flags, num_tokens = slots.num_tokens[owner.slot];
  Row row;
  row.logits = logits + size_t(index) * vocab_size;
  row.vocab_size = vocab_size;
  row.first = block * THREADS + threadIdx.x;
  row.num_chunks = (vocab_size + 7) / 8;
  if (!is_processed && flags & RULES) process(logits + size_t(index) * vocab_size, slots, owner, block);
  int turn = 0, token_id, broken = 0;
  if (flags & GREEDY) {
    const Best own = find_greatest(row);
    await_peers();
    const Best best = reduce(own, no_best(), shared, turn);
    token_id = best.key ? key_token(best.key) : -1;
    broken = !(best.greatest < INF);
  } else {
    row.position = num_tokens + owner.place;
    row.seed_low = params.seed_low, row.seed_high = params.seed_high;
    row.temperature = params.temperature;
    row.to_base2 = LOGIT == 0 ? LOG2E : LOG2E / params.temperature;
    token_id = draw(row, params, broken, shared, turn);
  }
  if (block == 0 && threadIdx.x == 0) token_ids[index] = max(token_id, 0), is_broken[index] = broken;
}

#if CLUSTER == 1
// The rules alone, for those that want the processed logits. Grid: rows.
extern "C" __global__ void __launch_bounds__(THREADS)
    process_logits(Logit* logits, Slots slots, const int* row_slots, const int* cu_query_lens, int batch) {
  __shared__ Owner cell;
  const Owner owner = find_owner(row_slots, cu_query_lens, batch, blockIdx.x, &cell);
  if (owner.request >= 0 && slots.params[owner.slot].flags & RULES) process(logits + size_t(blockIdx.x) * slots.vocab_size, slots, owner, 0);
}
#endif
