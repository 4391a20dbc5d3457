// Logits -> the probabilities of the tokens that top_k, top_p and min_p keep, without sorting.
//
// LOGIT: 0 float32, 1 bf16, 2 fp16. VECTOR: rows are 16-byte aligned. CLUSTER: blocks that share a row.
//
// What is kept is a prefix of the tokens by probability. A first reading of the row adds up the softmax and notes the greatest logit of
// every eight tokens. In a peaked row these alone bound where the prefix ends, and the few tokens that reach that bound are listed and
// sorted. Elsewhere the tokens that reach eight places are counted and weighed, and so on between two of them until those left are few:
// about once, at places that a part of the row has told. The last reading leaves out the chunks that nothing is kept of.

#include "distribution_cut.cuh"

constexpr int QUADS_DEPTH = 4;

#if LOGIT == 0
using RawQuad = float4;
#else
using RawQuad = uint2;
#endif

__device__ __forceinline__ RawQuad load_quad(const Logit* row, int quad, int vocab_size) {
  RawQuad raw;
#if VECTOR
  raw = reinterpret_cast<const RawQuad*>(row)[quad];
#else
  Logit* cells = reinterpret_cast<Logit*>(&raw);
#pragma unroll
  for (int k = 0; k < 4; ++k) cells[k] = quad * 4 + k < vocab_size ? row[quad * 4 + k] : from_float(-INF);
#endif
  return raw;
}

__device__ __forceinline__ void unpack_quad(const RawQuad& raw, float (&x)[4]) {
#if LOGIT == 0
  x[0] = raw.x, x[1] = raw.y, x[2] = raw.z, x[3] = raw.w;
#else
  x[0] = low_half(raw.x), x[1] = high_half(raw.x), x[2] = low_half(raw.y), x[3] = high_half(raw.y);
#endif
}

struct Filter {
  Cut cut;
  float min_p, least;  // tokens below `least` are surely not kept

  __device__ __forceinline__ bool is_dropped(float value, int id, float weight) const {
    return value < cut.value || (value == cut.value && id > cut.id) || weight < min_p;
  }
};

// Neighbouring threads write neighbouring 16 bytes, so a thread takes half a chunk.
__device__ __forceinline__ void write(float* probs, const Filter& filter, float scale) {
  const Row row = shared.row;
  const int block_first = row.first() - int(threadIdx.x);
  for (int place = threadIdx.x; block_first * 2 + place / (2 * THREADS) * (2 * STRIDE) < row.num_chunks * 2; place += QUADS_DEPTH * THREADS) {
    RawQuad raws[QUADS_DEPTH];
    int quads[QUADS_DEPTH];
    bool is_wanted[QUADS_DEPTH];
#pragma unroll
    for (int d = 0; d < QUADS_DEPTH; ++d) {
      const int own = place + d * THREADS;
      quads[d] = block_first * 2 + own / (2 * THREADS) * (2 * STRIDE) + own % (2 * THREADS);
      is_wanted[d] = quads[d] < row.num_chunks * 2 && !(to_float(row.tops()[own / 2]) < filter.least);
      if (is_wanted[d]) raws[d] = load_quad(row.logits, quads[d], row.vocab_size);
    }
#pragma unroll
    for (int d = 0; d < QUADS_DEPTH; ++d) {
      float x[4] = {};
      if (is_wanted[d]) {
        unpack_quad(raws[d], x);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const float value = row.value(x[k]), weight = row.weight(value);
          x[k] = filter.is_dropped(value, quads[d] * 4 + k, weight) ? 0 : weight * scale;
        }
      }
#if VECTOR
      if (quads[d] < row.num_chunks * 2) reinterpret_cast<float4*>(probs)[quads[d]] = make_float4(x[0], x[1], x[2], x[3]);
#else
#pragma unroll
      for (int k = 0; k < 4; ++k)
        if (quads[d] * 4 + k < row.vocab_size) probs[quads[d] * 4 + k] = x[k];
#endif
    }
  }
}

// What is kept, and its sum.
__device__ __forceinline__ Filter find_kept(int top_k, float top_p, float min_p, float& sum) {
  const bool has_top_k = top_k > 0 && top_k < shared.row.vocab_size;
  Filter filter = {{-INF, INT_MAX, sum, false}, min_p, -FLT_MAX};
  if (min_p > 0) filter.least = fmaxf(shared.row.greatest + (log2f(min_p) - 1e-3f) / shared.row.to_base2, -FLT_MAX);  // with room for its rounding
  // Where top_p is on, too, the mass of all the top_k is needed, min_p or not.
  if (has_top_k) filter.cut = find_cut({true, float(top_k), top_p}, top_p < 1 ? -FLT_MAX : filter.least);
  if (top_p < 1 && !filter.cut.has_both) {
    const Cut own = find_cut({false, top_p * filter.cut.mass, 1}, fmaxf(filter.cut.value, filter.least));
    if (own.value > filter.cut.value || (own.value == filter.cut.value && own.id < filter.cut.id)) filter.cut = own;
  }
  filter.least = fmaxf(filter.least, filter.cut.value);
  sum = filter.cut.mass;
  if (min_p > 0) {
    const Row row = shared.row;
    float kept[1] = {};
    row.visit<LOGIT == 0 ? 2 : 4, true>(filter.least, 1, [&](int chunk, const Raw& raw) {
      float x[8];
      row.unpack_values(raw, x);
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        const float weight = row.weight(x[k]);
        if (!filter.is_dropped(x[k], 8 * chunk + k, weight)) kept[0] += weight;
      }
    });
    add_up(kept);
    sum = shared.sums[0];
  }
  return filter;
}

// probs [R, V]. Grid: rows * CLUSTER. A row with NaN or +inf, or of -inf alone, gives NaN.
extern "C" __global__ void CLUSTER_DIMS __launch_bounds__(THREADS, 1024 / THREADS)
    probabilities(float* probs, const Logit* logits, const float* temperature, const int* top_k, const float* top_p, const float* min_p, int vocab_size,
                  int is_filtered) {
  arrive_cluster_relaxed();
  const int index = blockIdx.x / CLUSTER;
  Row row;
  row.logits = logits + size_t(index) * vocab_size;
  row.vocab_size = vocab_size;
  row.num_chunks = (vocab_size + 7) / 8;
  row.temperature = temperature[index];
  row.to_base2 = LOGIT == 0 ? LOG2E : LOG2E / row.temperature;
  const Measured own = measure(row);
  await_cluster();
  measure_all(row, own);
  Filter filter = {{-INF, INT_MAX, 0, false}, 0, -INF};
  float sum = shared.all.sum;
  if (!(shared.all.greatest < INF) || shared.all.greatest == -INF) sum = __int_as_float(0x7fffffff);
  else if (is_filtered) filter = find_kept(top_k[index], top_p[index], min_p[index], sum);
  write(probs + size_t(index) * vocab_size, filter, 1 / sum);
}
