// Operations on rows of float32 by themselves.
#include <algorithm>

#include "kernels.h"
#include "rows.h"

namespace {

constexpr int CHUNKS = 16;  // of eight tokens, whose numbers are made side by side

// The words of blocks `first`, first + 2, ... of Philox4x32-10 (Salmon et al. 2011): see kernels/reference/sampling.py.
void philox(uint64_t seed, uint32_t position, uint32_t stream, uint32_t first, uint32_t words[4][CHUNKS]) {
  uint32_t c0[CHUNKS], c1[CHUNKS], c2[CHUNKS], c3[CHUNKS], low = uint32_t(seed), high = uint32_t(seed >> 32);
  for (int i = 0; i < CHUNKS; i++) c0[i] = first + 2 * i, c1[i] = position, c2[i] = stream, c3[i] = 0;
  for (int round = 0; round < 10; round++, low += 0x9E3779B9u, high += 0xBB67AE85u) {
    for (int i = 0; i < CHUNKS; i++) {
      const uint64_t a = uint64_t(c0[i]) * 0xD2511F53u, b = uint64_t(c2[i]) * 0xCD9E8D57u;
      c0[i] = uint32_t(b >> 32) ^ c1[i] ^ low;
      c1[i] = uint32_t(b);
      c2[i] = uint32_t(a >> 32) ^ c3[i] ^ high;
      c3[i] = uint32_t(a);
    }
  }
  std::copy(c0, c0 + CHUNKS, words[0]);
  std::copy(c1, c1 + CHUNKS, words[1]);
  std::copy(c2, c2 + CHUNKS, words[2]);
  std::copy(c3, c3 + CHUNKS, words[3]);
}

}  // namespace

extern "C" {

// A number in (0, 1) for each of `count` tokens of each row, from its seed and position.
void foretoken_uniforms(const int64_t* seeds, const int64_t* positions, int64_t rows, int64_t count, int stream, float* out) {
  for (long r = 0; r < rows; r++, out += count) {
    for (long first = 0; first < count; first += 8 * CHUNKS) {
      uint32_t leading[4][CHUNKS], rest[4][CHUNKS];
      philox(seeds[r], uint32_t(positions[r]), stream, first / 4, leading);
      philox(seeds[r], uint32_t(positions[r]), stream, first / 4 + 1, rest);
      float numbers[8 * CHUNKS];
      for (int k = 0; k < 8; k++) {
        const int shift = k % 2 * 16;
        for (int i = 0; i < CHUNKS; i++) {
          const uint32_t number = (leading[k / 2][i] >> shift & 0xffff) << 16 | (rest[k / 2][i] >> shift & 0xffff);
          numbers[8 * i + k] = std::min((float(number) + 0.5f) * 0x1p-32f, 1 - 0x1p-24f);
        }
      }
      std::copy(numbers, numbers + std::min(long(count) - first, 8L * CHUNKS), out + first);
    }
  }
}

// The first `count` heads of each token, numbers of [count, size] weights each, in place.
void foretoken_norm_heads(float* heads, int64_t tokens, int64_t stride, int64_t count, int64_t size, const float* weight, float eps) {
  for (long t = 0; t < tokens; t++)
    for (long h = 0; h < count; h++) normalize(heads + t * stride + h * size, size, weight + h * size, eps, heads + t * stride + h * size);
}

void foretoken_rms_norm(const float* x, int64_t rows, int64_t size, const float* weight, float eps, float* out) {
  for (long r = 0; r < rows; r++) normalize(x + r * size, size, weight, eps, out + r * size);
}
}
