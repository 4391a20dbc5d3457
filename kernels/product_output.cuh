// What threads do with their sums of a product of tokens by weights: a lane has two neighbouring columns of a token, and stores eight.
//
// Before it: ELEMENT's alias Element; CODES: whether both were e4m3, with scales of tokens and columns; GATED: whether columns come in pairs of gate and up.
#pragma once
#include "dense.cuh"
#include "transpose.cuh"

struct Output {
  Element* out;
  const Element *bias, *residual;
  const float* column_scales;
  int num_tokens, width;

  __device__ __forceinline__ bool has(int token, int n) const { return token < num_tokens && n < width; }
  // Eight columns of a token. Ahead of the stores, which a later load of the same memory would wait for.
  __device__ __forceinline__ uint4 load_residual(int token, int n) const {
    return !GATED && residual && has(token, n) ? __ldcg(reinterpret_cast<const uint4*>(residual + size_t(token) * width + n)) : uint4();
  }
  // Of two columns, of gate's part or of up's. Whoever asks for them when the products are made waits for the memory.
  __device__ __forceinline__ float2 load_scales(int n, int part) const {
    return CODES && n < width ? __ldg(reinterpret_cast<const float2*>(column_scales + part * width + n)) : float2();
  }
  // Two columns' sums of a token, and the scales of its row and of the columns.
  __device__ __forceinline__ uint32_t round(int n, const float* sums, const float* up_sums, float row_scale, float2 own, float2 up_own) const {
    float c[2] = {sums[0], sums[1]}, up[2] = {up_sums[0], up_sums[1]};
    if constexpr (CODES) {
      c[0] *= own.x * row_scale, c[1] *= own.y * row_scale;
      up[0] *= up_own.x * row_scale, up[1] *= up_own.y * row_scale;
    }
    Element pair[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if constexpr (GATED) pair[i] = gate_mul(from_float<Element>(c[i]), from_float<Element>(up[i]));
      else pair[i] = from_float<Element>(bias && n < width ? c[i] + to_float(__ldg(bias + n + i)) : c[i]);
    }
    return *reinterpret_cast<const uint32_t*>(pair);
  }
  __device__ __forceinline__ void store(int token, int n, const uint32_t (&words)[4], uint4 added) const {
    if (!has(token, n)) return;
    Vector<Element> v(make_uint4(words[0], words[1], words[2], words[3]));
    if (!GATED && residual) {
      const Vector<Element> before(added);
#pragma unroll
      for (int i = 0; i < 8; ++i) v.values[i] = from_float<Element>(to_float(before.values[i]) + to_float(v.values[i]));
    }
    ::store(out + size_t(token) * width + n, v);
  }
};
