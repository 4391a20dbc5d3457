// What is computed of a row by itself.
#pragma once
#include "vector.h"

// x [size] over its root mean square, times the weight
static inline void normalize(const float* x, long size, const float* weight, float eps, float* out) {
  Vector squares = {};
  long k = 0;
  for (; k + LANES <= size; k += LANES) squares += load(x + k) * load(x + k);
  float total = sum(squares);
  for (; k < size; k++) total += x[k] * x[k];
  const float scale = 1.f / __builtin_sqrtf(total / size + eps);
  for (k = 0; k < size; k++) out[k] = x[k] * scale * weight[k];
}

// gate_up [2 size] -> silu(gate) * up
static inline void gate(const float* gate_up, long size, float* out) {
  long k = 0;
  for (; k + LANES <= size; k += LANES) {
    const Vector g = load(gate_up + k);
    store(out + k, g / (exp_of(-g) + 1.f) * load(gate_up + size + k));
  }
  for (; k < size; k++) out[k] = gate_up[k] / (exp_of(Vector{} - gate_up[k])[0] + 1.f) * gate_up[size + k];
}
