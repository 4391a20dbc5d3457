// Vectors of float32 as wide as the processor's, by the compiler's own vector types: AVX-512, AVX2, or 16 bytes (SSE, NEON).
#pragma once
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
constexpr int LANES = 16;
constexpr int MAX_ROWS = 12;  // of a tile: with two vectors of weights each, what the registers hold
#elif defined(__AVX2__)
constexpr int LANES = 8;
constexpr int MAX_ROWS = 6;
#else
constexpr int LANES = 4;
constexpr int MAX_ROWS = 6;
#endif

typedef float Vector __attribute__((vector_size(LANES * 4)));
typedef float Loose __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef uint32_t Words __attribute__((vector_size(LANES * 4)));
typedef uint32_t LooseWords __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t Integers __attribute__((vector_size(LANES * 4)));

static inline Vector load(const float* p) { return *reinterpret_cast<const Loose*>(p); }
static inline void store(float* p, Vector v) { *reinterpret_cast<Loose*>(p) = v; }

// Lanes of a and b by number: b's come after a's.
static inline Vector shuffled(Vector a, Vector b, Integers places) {
#if defined(__clang__)
  Vector out;
  for (int i = 0; i < LANES; i++) out[i] = places[i] < LANES ? a[places[i]] : b[places[i] - LANES];
  return out;
#else
  return __builtin_shuffle(a, b, places);
#endif
}

static inline float sum(Vector v) {
  float total = 0;
  for (int i = 0; i < LANES; i++) total += v[i];
  return total;
}

// e^x to 2 units in the last place, as a power of two times a polynomial (Cody and Waite 1980); 0 below -87.3, inf above 88.7.
static inline Vector exp_of(Vector x) {
  const Vector zero = {};
  const Vector turns = x * 1.44269504088896341f;
  const Vector clipped = turns < -126.f ? zero - 126.f : turns > 128.f ? zero + 128.f : turns;
  const Integers power = __builtin_convertvector(clipped < 0.f ? clipped - 0.5f : clipped + 0.5f, Integers);
  const Vector whole = __builtin_convertvector(power, Vector);
  const Vector rest = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
  Vector y = zero + 1.9875691500e-4f;
  y = y * rest + 1.3981999507e-3f;
  y = y * rest + 8.3334519073e-3f;
  y = y * rest + 4.1665795894e-2f;
  y = y * rest + 1.6666665459e-1f;
  y = y * rest + 5.0000001201e-1f;
  y = y * rest * rest + rest + 1.f;
  // In two steps, as 2^128 is no number.
  const Integers half = power >> 1;
  y = y * (Vector)((half + 127) << 23) * (Vector)((power - half + 127) << 23);
  const Vector infinite = zero + __builtin_inff();
  return x < -87.336544f ? zero : x > 88.722839f ? infinite : y;  // what is no number stays none
}
