// Products by the matrix unit that some processors have (AMX): sixteen rows by sixteen outputs and 32 inputs an instruction, in bfloat16 with
// float32 sums. The weights are numbers of bfloat16. A row's float32 inputs are three each, whose sum they are exactly, so that nothing is
// rounded that float32 does not round. A row's sums are made in the same order whatever rows are beside it.
#pragma once
#if defined(__AMX_TILE__) && defined(__AMX_BF16__)
#define FORETOKEN_TILES 1
#include <immintrin.h>

#include <algorithm>
#include <vector>

#include "vector.h"

namespace tiles {

constexpr long ROWS = 16, INPUTS = 32, OUTPUTS = 64;  // of a tile; OUTPUTS: four tiles of weights, a panel
constexpr long PARTS = 3;
constexpr long WORDS = INPUTS / 2 * OUTPUTS;  // of a panel's weights for INPUTS inputs: [4, INPUTS / 2, 16], two inputs to a word
constexpr long MOST = 1024;                   // rows whose parts there is memory for
constexpr long KEPT = 1 << 19;                // parts of rows (1 MiB) that all panels take one after the other: they stay in the second

static inline long blocks(long in) { return (in + INPUTS - 1) / INPUTS; }
static inline long panel_words(long in) { return blocks(in) * WORDS; }
static inline long parted_size(long in) { return blocks(in) * PARTS * INPUTS; }  // of a row

// Room for so many numbers, from the beginning of a cache line on: a row of a tile is one.
template <class Number>
Number* lines(std::vector<Number>& own, size_t count) {
  if (own.size() < count + 64 / sizeof(Number)) own.resize(count + 64 / sizeof(Number));
  return reinterpret_cast<Number*>((reinterpret_cast<uintptr_t>(own.data()) + 63) / 64 * 64);
}

struct __attribute__((packed)) Shape {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};
};

// The tiles: 0 to 3 sums, 4 to 6 a row's parts, 7 weights.
static inline void take_shape(long rows) {
  Shape shape;
  for (int tile = 0; tile < 8; tile++) shape.bytes[tile] = 64, shape.rows[tile] = tile < 7 ? rows : INPUTS / 2;
  _tile_loadconfig(&shape);
}

// x [rows, in] of one tile -> [blocks, PARTS, rows, INPUTS]; what is past `in` is 0. A part is the upper halves of what is left of x without those
// before it; of what is no number nothing is left.
static inline void part(const float* x, long rows, long x_stride, long in, uint16_t* out) {
  alignas(64) static const uint16_t places[32] = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
                                                  33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
  const __m512i upper = _mm512_load_si512(places), kept = _mm512_set1_epi32(int(0xffff0000u));
  const __m512 infinite = _mm512_set1_ps(__builtin_inff());
  for (long block = 0; block < blocks(in); block++, out += PARTS * rows * INPUTS) {
    const long left = in - block * INPUTS;
    const __mmask32 mask = left >= INPUTS ? ~0u : (1u << left) - 1;
    for (long r = 0; r < rows; r++) {
      const float* from = x + r * x_stride + block * INPUTS;
      __m512 both[2] = {_mm512_maskz_loadu_ps(__mmask16(mask), from), _mm512_maskz_loadu_ps(__mmask16(mask >> 16), from + 16)};
      __mmask16 finite[2];
      for (int h = 0; h < 2; h++) finite[h] = _mm512_cmp_ps_mask(_mm512_abs_ps(both[h]), infinite, _CMP_LT_OQ);
      for (long p = 0; p < PARTS; p++) {
        const __m512i first = _mm512_castps_si512(both[0]), second = _mm512_castps_si512(both[1]);
        _mm512_store_si512(out + (p * rows + r) * INPUTS, _mm512_permutex2var_epi16(first, upper, second));
        for (int h = 0; h < 2; h++) {
          const __m512 own = _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(both[h]), kept));
          both[h] = _mm512_maskz_sub_ps(finite[h], both[h], own);
        }
      }
    }
  }
}

// sums [rows, OUTPUTS] of a tile's parted rows and a panel. The shape is these rows'.
static inline void multiply(const uint16_t* x, long rows, const uint32_t* panel, long in, float* sums) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  const long size = rows * INPUTS;
  for (long block = 0; block < blocks(in); block++, x += PARTS * size, panel += WORDS) {
    _tile_loadd(4, x, 64);
    _tile_loadd(5, x + size, 64);
    _tile_loadd(6, x + 2 * size, 64);
#define FORETOKEN_COLUMN(COLUMN)                    \
  _tile_loadd(7, panel + COLUMN * (WORDS / 4), 64); \
  _tile_dpbf16ps(COLUMN, 4, 7);                     \
  _tile_dpbf16ps(COLUMN, 5, 7);                     \
  _tile_dpbf16ps(COLUMN, 6, 7);
    FORETOKEN_COLUMN(0)
    FORETOKEN_COLUMN(1)
    FORETOKEN_COLUMN(2)
    FORETOKEN_COLUMN(3)
#undef FORETOKEN_COLUMN
  }
  // The next panel's first inputs: a processor fetches ahead within 4 KiB alone.
  for (long line = 0; line < WORDS / 2; line += 16) __builtin_prefetch(panel + line);
  _tile_stored(0, sums, OUTPUTS * 4);
  _tile_stored(1, sums + 16, OUTPUTS * 4);
  _tile_stored(2, sums + 32, OUTPUTS * 4);
  _tile_stored(3, sums + 48, OUTPUTS * 4);
}

}  // namespace tiles
#endif
