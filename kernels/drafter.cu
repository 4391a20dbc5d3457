// What a model drafter's layers take in, and its few tokens' scores as scores of all.
// ELEMENT: the element type; VECTORS: most 16-byte vectors of a part of a pair that one of its block's threads holds.
#include "block_norm.cuh"

using Element = ELEMENT;
using V = Vector<Element>;
constexpr int N = VECTORS;
constexpr int HIDDEN_FIRST = 1, MASKS_PAIR = 2, KEEPS_NORMED = 4;  // flags

// The embedding of a row's token and the state before it, each normed, side by side: two blocks of STRANDS threads for a row, which keep it in registers.
// table: embeddings by token, or with token_ids null by row; *_norm may be null, kept too: it becomes the state, normed or not; masked: the position
// where the embedding, or the whole pair, is 0; scale: of embeddings.
extern "C" __global__ void __launch_bounds__(STRANDS)
    pair_rows(Element* pairs, Element* kept, const Element* table, const int64_t* token_ids, const Element* states, const int64_t* positions,
              const Element* embedding_norm, const Element* hidden_norm, int embedding_size, int hidden_size, int masked, int flags, float eps, float factor) {
    __shared__ float sums[STRANDS / 32];
    const bool is_hidden = blockIdx.y == 1;
    const int size = is_hidden ? hidden_size : embedding_size, num_vectors = size / V::SIZE;
    const size_t row = blockIdx.x;
    const Element* weight = is_hidden ? hidden_norm : embedding_norm;
    Element* out = pairs + row * (embedding_size + hidden_size);
    if (is_hidden != ((flags & HIDDEN_FIRST) != 0)) out += is_hidden ? embedding_size : hidden_size;
    Element* keep = is_hidden && kept ? kept + row * hidden_size : nullptr;
    RowNorm<Element, N> norm;
    V values[N];
    launch_dependents();
    if (weight) norm.load(weight, num_vectors);
    wait_for_earlier();
    const bool is_masked = __ldcg(positions + row) == masked;
    const size_t number = is_hidden || !token_ids ? row : static_cast<size_t>(__ldcg(token_ids + row));
    const Element* x = (is_hidden ? states : table) + number * size;
#pragma unroll
    for (int j = 0; j < N; ++j) {
        const int i = threadIdx.x + STRANDS * j;
        if (i >= num_vectors || (is_masked && !is_hidden)) continue;
        values[j] = load_fresh(x + i * V::SIZE);
        if (factor != 1.0f && !is_hidden) {
#pragma unroll
            for (int e = 0; e < V::SIZE; ++e) values[j].values[e] = from_float<Element>(to_float(values[j].values[e]) * factor);
        }
        if (keep && !(flags & KEEPS_NORMED)) store(keep + i * V::SIZE, values[j]);
    }
    const auto put = [&](int i, const V& v) {
        store(out + i * V::SIZE, is_masked && (flags & MASKS_PAIR) ? V() : v);
        if (keep && (flags & KEEPS_NORMED)) store(keep + i * V::SIZE, v);
    };
    if (weight) {
        norm.apply(values, weight, num_vectors, size, eps, sums, put);
        return;
    }
#pragma unroll
    for (int j = 0; j < N; ++j) {
        const int i = threadIdx.x + STRANDS * j;
        if (i < num_vectors) put(i, values[j]);
    }
}

// scores [R, N] of tokens as scores [R, size] of all: places [size] says where a token's is, -1: it has none, and gets -inf. A row to each blockIdx.x.
extern "C" __global__ void __launch_bounds__(STRANDS)
    spread_scores(Element* out, const Element* scores, const int* places, int num_scores, int size) {
    launch_dependents();
    const int first = (blockIdx.y * STRANDS + threadIdx.x) * V::SIZE;
    int own[V::SIZE];
#pragma unroll
    for (int e = 0; e < V::SIZE; ++e) own[e] = first + e < size ? __ldg(places + first + e) : -1;
    wait_for_earlier();
    const Element* row = scores + static_cast<size_t>(blockIdx.x) * num_scores;
    Element* target = out + static_cast<size_t>(blockIdx.x) * size + first;
    const unsigned short* bits = reinterpret_cast<const unsigned short*>(row);
    V values;
#pragma unroll
    for (int e = 0; e < V::SIZE; ++e) {
        if (own[e] < 0) {
            values.values[e] = from_float<Element>(-INFINITY);
        } else if constexpr (sizeof(Element) == 2) {
            const unsigned short found = __ldcg(bits + own[e]);
            values.values[e] = *reinterpret_cast<const Element*>(&found);
        } else {
            const float found = __ldcg(reinterpret_cast<const float*>(row) + own[e]);
            values.values[e] = *reinterpret_cast<const Element*>(&found);
        }
    }
    if (size % V::SIZE == 0) {
        if (first < size) store(target, values);
        return;
    }
#pragma unroll
    for (int e = 0; e < V::SIZE; ++e)
        if (first + e < size) target[e] = values.values[e];
}
