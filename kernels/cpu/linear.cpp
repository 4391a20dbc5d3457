// Products of few rows with weights that are read once. A panel is the weights of PANEL outputs, input after input, so that the sums of a tile
// (some rows, one panel or several) stay in registers. Each sum adds its inputs in order, whatever rows are beside it: a row's outputs
// are the same bits in every batch.
#include <algorithm>
#include <vector>

#include "kernels.h"
#include "pool.h"
#include "rows.h"
#include "tiles.h"

constexpr int PANEL = 2 * LANES;
constexpr long SHARED = 1 << 16;  // numbers of what stands around a product that other threads are woken for
constexpr long BLOCK = 2048 / LANES;  // inputs of a panel that many rows take one after the other: the weights of a block stay in the first cache

struct Weight {
  const void* panels;  // [ceil(out / PANEL), in, PANEL]; what is past `out` is 0. In tiles: see tiles.h
  const float* bias;   // [out] or null
  int64_t in, out;
  int64_t is_half;  // bfloat16, two to a word: output j of a panel is the upper half of word j, output j + LANES the lower one
};

enum Mode { WRITE, ADD, GATED };

namespace {

struct Pair {
  Vector first, second;
};

struct Full {  // float32
  static constexpr int WORDS = PANEL, AHEAD = 0;
  static inline Pair at(const uint32_t* p) {
    const float* own = reinterpret_cast<const float*>(p);
    return {load(own), load(own + LANES)};
  }
};

struct Half {
  static constexpr int WORDS = LANES, AHEAD = 32;
  static inline Pair at(const uint32_t* p) {
    const Words both = *reinterpret_cast<const LooseWords*>(p);
    return {(Vector)(both & 0xffff0000u), (Vector)(both << 16)};
  }
};

// sums [ROWS, COUNT * PANEL] of x [count, ROWS] and COUNT panels, `stride` words apart; resumes: on top of what they are.
template <class Type, int ROWS, int COUNT>
void tile(const float* x, const uint32_t* w, long stride, long count, float* sums, long sums_stride, bool resumes) {
  Vector own[ROWS][COUNT][2] = {};
  if (resumes) {
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
      for (int c = 0; c < COUNT; c++)
#pragma GCC unroll 2
        for (int h = 0; h < 2; h++) own[r][c][h] = load(sums + r * sums_stride + c * PANEL + h * LANES);
  }
  for (long k = 0; k < count; k++, w += Type::WORDS, x += ROWS) {
    Pair weights[COUNT];
#pragma GCC unroll 8
    for (int c = 0; c < COUNT; c++) {
      if (Type::AHEAD) __builtin_prefetch(w + c * stride + Type::AHEAD * Type::WORDS);
      weights[c] = Type::at(w + c * stride);
    }
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) {
#pragma GCC unroll 8
      for (int c = 0; c < COUNT; c++) {
        own[r][c][0] += x[r] * weights[c].first;
        own[r][c][1] += x[r] * weights[c].second;
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
    for (int c = 0; c < COUNT; c++)
#pragma GCC unroll 2
      for (int h = 0; h < 2; h++) store(sums + r * sums_stride + c * PANEL + h * LANES, own[r][c][h]);
}

using Tile = void (*)(const float*, const uint32_t*, long, long, float*, long, bool);

template <class Type, int ROWS>
struct Tiles {
  static void put(Tile* all) {
    all[ROWS] = tile<Type, ROWS, 1>;
    Tiles<Type, ROWS - 1>::put(all);
  }
};
template <class Type>
struct Tiles<Type, 0> {
  static void put(Tile*) {}
};
template <class Type>
struct TileTable {
  Tile of[MAX_ROWS + 1] = {};
  TileTable() { Tiles<Type, MAX_ROWS>::put(of); }
};

// Rows by tiles, as even as they can be. Of many, tiles of fewer are the quicker ones where there are 32 registers.
struct Parts {
  long rows, count;
  explicit Parts(long rows) : rows(rows) {
    const long most = rows > 2 * MAX_ROWS && LANES == 16 ? 8 : MAX_ROWS;
    count = (rows + most - 1) / most;
  }
  long first(long part) const { return rows * part / count; }
  long size(long part) const { return first(part + 1) - first(part); }
};

// x [rows, in] with the rows of each tile side by side: [in, rows of the tile], one tile after the other.
void interleave(const float* x, long rows, long x_stride, long in, float* out, int threads) {
  const Parts parts(rows);
  share(parts.count, rows * in > SHARED ? threads : 1, [&](long part) {
    const long first = parts.first(part), own = parts.size(part);
    for (long r = 0; r < own; r++) {
      const float* from = x + (first + r) * x_stride;
      float* to = out + first * in + r;
      for (long k = 0; k < in; k++) to[k * own] = from[k];
    }
  });
}

// Of rows that go in turns through one panel, from input `begin` on.
template <class Type>
void walk_rows(const float* x, long rows, long in, const uint32_t* w, long begin, long count, float* sums) {
  static const TileTable<Type> tiles;
  const Parts parts(rows);
  for (long part = 0; part < parts.count; part++) {
    const long first = parts.first(part), own = parts.size(part);
    tiles.of[own](x + first * in + begin * own, w, 0, count, sums + first * PANEL, PANEL, begin > 0);
  }
}

float* room(std::vector<float>& own, size_t count) {
  if (own.size() < count) own.resize(count);
  return own.data();
}

// What the sums [rows, width] of outputs from `first` on become.
void finish(const Weight& weight, const float* sums, long sums_stride, long rows, long first, long width, float* out, long out_stride, bool adds) {
  const long count = std::min(width, long(weight.out) - first);
  for (long r = 0; r < rows; r++) {
    const float* from = sums + r * sums_stride;
    float* to = out + r * out_stride + first;
    long j = 0;
    for (; j + LANES <= count; j += LANES) {
      Vector y = load(from + j);
      if (weight.bias) y += load(weight.bias + first + j);
      store(to + j, adds ? load(to + j) + y : y);
    }
    for (; j < count; j++) {
      float y = from[j];
      if (weight.bias) y += weight.bias[first + j];
      to[j] = adds ? to[j] + y : y;
    }
  }
}

template <class Type, int ROWS, int COUNT>
void few(const Weight& weight, const float* x, float* out, long out_stride, bool adds, int threads) {
  const uint32_t* panels = static_cast<const uint32_t*>(weight.panels);
  const long stride = weight.in * Type::WORDS, groups = (weight.out + COUNT * PANEL - 1) / (COUNT * PANEL);
  share(groups, threads, [&](long group) {
    alignas(64) float sums[ROWS * COUNT * PANEL];
    const long first = group * COUNT * PANEL, left = (weight.out - first + PANEL - 1) / PANEL;
    const uint32_t* own = panels + group * COUNT * stride;
    if (left >= COUNT) {
      tile<Type, ROWS, COUNT>(x, own, stride, weight.in, sums, COUNT * PANEL, false);
    } else {
      for (long c = 0; c < left; c++) tile<Type, ROWS, 1>(x, own + c * stride, 0, weight.in, sums + c * PANEL, COUNT * PANEL, false);
    }
    finish(weight, sums, COUNT * PANEL, ROWS, first, COUNT * PANEL, out, out_stride, adds);
  });
}

template <class Type>
void many(const Weight& weight, const float* x, long rows, float* out, long out_stride, bool adds, int threads) {
  const uint32_t* all = static_cast<const uint32_t*>(weight.panels);
  const long stride = weight.in * Type::WORDS, panels = (weight.out + PANEL - 1) / PANEL;
  share(panels, threads, [&](long panel) {
    static thread_local std::vector<float> kept, unpacked;
    float* sums = room(kept, rows * PANEL);
    const uint32_t* own = all + panel * stride;
    if (rows <= 2 * MAX_ROWS) {
      walk_rows<Type>(x, rows, weight.in, own, 0, weight.in, sums);
    } else {
      float* block = room(unpacked, BLOCK * PANEL);
      for (long begin = 0; begin < weight.in; begin += BLOCK) {
        const long count = std::min(BLOCK, long(weight.in) - begin);
        for (long k = 0; k < count; k++) {
          const Pair pair = Type::at(own + (begin + k) * Type::WORDS);
          store(block + k * PANEL, pair.first);
          store(block + k * PANEL + LANES, pair.second);
        }
        walk_rows<Full>(x, rows, weight.in, reinterpret_cast<const uint32_t*>(block), begin, count, sums);
      }
    }
    finish(weight, sums, PANEL, rows, panel * PANEL, PANEL, out, out_stride, adds);
  });
}

// x: interleaved
template <class Type>
void product(const Weight& weight, const float* x, long rows, float* out, long out_stride, bool adds, int threads) {
  if (rows == 1) return few<Type, 1, 4>(weight, x, out, out_stride, adds, threads);
  if (rows == 2) return few<Type, 2, 2>(weight, x, out, out_stride, adds, threads);
  if (rows == 3) return few<Type, 3, 2>(weight, x, out, out_stride, adds, threads);
  many<Type>(weight, x, rows, out, out_stride, adds, threads);
}

#if FORETOKEN_TILES
void product_by_tiles(const Weight& weight, const float* x, long rows, long x_stride, float* out, long out_stride, bool adds, int threads) {
  static thread_local std::vector<uint16_t> kept;
  const long size = tiles::parted_size(weight.in);
  uint16_t* parted = tiles::lines(kept, rows * size);
  share((rows + tiles::ROWS - 1) / tiles::ROWS, rows * weight.in > SHARED ? threads : 1, [&](long tile) {
    const long first = tile * tiles::ROWS;
    tiles::part(x + first * x_stride, std::min(tiles::ROWS, rows - first), x_stride, weight.in, parted + first * size);
  });
  const uint32_t* all = static_cast<const uint32_t*>(weight.panels);
  const long panels = (weight.out + tiles::OUTPUTS - 1) / tiles::OUTPUTS, group = std::max(1L, tiles::KEPT / (tiles::ROWS * size)) * tiles::ROWS;
  const auto compute = [&](long item, long& shape) {
    alignas(64) float sums[tiles::ROWS * tiles::OUTPUTS];
    const long begin = item / panels * group, end = std::min(rows, begin + group), panel = item % panels, to = panel * tiles::OUTPUTS;
    const uint32_t* own = all + panel * tiles::panel_words(weight.in);
    for (long first = begin; first < end; first += tiles::ROWS) {
      const long tile = std::min(tiles::ROWS, end - first);
      if (tile != shape) tiles::take_shape(shape = tile);
      tiles::multiply(parted + first * size, tile, own, weight.in, sums);
      finish(weight, sums, tiles::OUTPUTS, tile, to, tiles::OUTPUTS, out + first * out_stride, out_stride, adds);
    }
  };
  const long items = (rows + group - 1) / group * panels;
  if (threads > 1) {
    share(items, threads, [&](long item) {
      long shape = 0;
      compute(item, shape);
      _tile_release();
    });
  } else {
    long shape = 0;
    for (long item = 0; item < items; item++) compute(item, shape);
    _tile_release();
  }
}
#endif

}  // namespace

extern "C" {

// Outputs of a panel; and whether weights of bfloat16 are in tiles.
#if FORETOKEN_TILES
int foretoken_panel(int is_half) { return is_half ? tiles::OUTPUTS : PANEL; }
int foretoken_has_tiles() { return 1; }
#else
int foretoken_panel(int) { return PANEL; }
int foretoken_has_tiles() { return 0; }
#endif

// x [rows, in], normalised first where `norm` [in] is given, times the weight -> out [rows, out], or as `mode` says.
void foretoken_linear(
    const Weight* weight, const float* x, int64_t rows, int64_t x_stride, const float* norm, float eps, float* out, int64_t out_stride, int mode,
    int threads) {
  static thread_local std::vector<float> normed, interleaved, made;
  if (norm) {
    float* own = room(normed, rows * weight->in);
    share(rows, rows * weight->in > SHARED ? threads : 1, [&](long r) { normalize(x + r * x_stride, weight->in, norm, eps, own + r * weight->in); });
    x = own;
    x_stride = weight->in;
  }
  float* to = mode == GATED ? room(made, rows * weight->out) : out;
  const long stride = mode == GATED ? weight->out : out_stride;
#if FORETOKEN_TILES
  const bool is_tiled = weight->is_half;
  for (long first = 0; is_tiled && first < rows; first += tiles::MOST) {
    const long count = std::min(tiles::MOST, long(rows) - first);
    product_by_tiles(*weight, x + first * x_stride, count, x_stride, to + first * stride, stride, mode == ADD, threads);
  }
#else
  constexpr bool is_tiled = false;
#endif
  if (!is_tiled) {
    if (rows > 1) {
      float* own = room(interleaved, rows * weight->in);
      interleave(x, rows, x_stride, weight->in, own, threads);
      x = own;
    }
    (weight->is_half ? product<Half> : product<Full>)(*weight, x, rows, to, stride, mode == ADD, threads);
  }
  if (mode != GATED) return;
  share(rows, rows * weight->out > SHARED ? threads : 1, [&](long r) { gate(to + r * stride, weight->out / 2, out + r * out_stride); });
}
}
