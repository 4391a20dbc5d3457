// Rows of logits in float32, bf16 or fp16 (LOGIT = 0, 1, 2), eight neighbours at a time. VECTOR: rows are 16-byte aligned.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#if LOGIT == 0
using Logit = float;
struct Raw {
  float4 a, b;
};
#else
#if LOGIT == 1
using Logit = __nv_bfloat16;
#else
using Logit = __half;
#endif
struct Raw {
  uint4 v;
};
#endif

constexpr float INF = __builtin_huge_valf();

__device__ __forceinline__ float to_float(Logit x) {
#if LOGIT == 0
  return x;
#elif LOGIT == 1
  return __bfloat162float(x);
#else
  return __half2float(x);
#endif
}

__device__ __forceinline__ Logit from_float(float x) {
#if LOGIT == 0
  return x;
#elif LOGIT == 1
  return __float2bfloat16_rn(x);
#else
  return __float2half_rn(x);
#endif
}

// Logits 8 * chunk .. 8 * chunk + 7, -inf past the row's end; chunk * 8 < vocab_size.
__device__ __forceinline__ Raw load_chunk(const Logit* row, int chunk, int vocab_size) {
  Raw raw;
#if !VECTOR
  Logit* cells = reinterpret_cast<Logit*>(&raw);
#pragma unroll
  for (int k = 0; k < 8; ++k) cells[k] = chunk * 8 + k < vocab_size ? row[chunk * 8 + k] : from_float(-INF);
#elif LOGIT == 0
  raw.a = reinterpret_cast<const float4*>(row)[2 * chunk];
  raw.b = reinterpret_cast<const float4*>(row)[2 * chunk + 1];
#else
  raw.v = reinterpret_cast<const uint4*>(row)[chunk];
#endif
  return raw;
}

__device__ __forceinline__ float max_nan(float a, float b) {  // NaN wins
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

#if LOGIT == 1
__device__ __forceinline__ unsigned max_pair(unsigned a, unsigned b) {
  unsigned y;
  asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
}
#elif LOGIT == 2
__device__ __forceinline__ unsigned max_pair(unsigned a, unsigned b) {
  unsigned y;
  asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
}
#endif

#if LOGIT != 0
__device__ __forceinline__ float low_half(unsigned pair) {
#if LOGIT == 1
  return __uint_as_float(pair << 16);
#else
  return __half2float(__ushort_as_half(pair & 0xffff));
#endif
}

__device__ __forceinline__ float high_half(unsigned pair) {
#if LOGIT == 1
  return __uint_as_float(pair & 0xffff0000u);
#else
  return __half2float(__ushort_as_half(pair >> 16));
#endif
}
#endif

// The greatest of a chunk, NaN if one is.
__device__ __forceinline__ float chunk_max(const Raw& raw) {
#if LOGIT == 0
  return max_nan(max_nan(max_nan(raw.a.x, raw.a.y), max_nan(raw.a.z, raw.a.w)), max_nan(max_nan(raw.b.x, raw.b.y), max_nan(raw.b.z, raw.b.w)));
#else
  const unsigned pair = max_pair(max_pair(raw.v.x, raw.v.y), max_pair(raw.v.z, raw.v.w));
  return max_nan(low_half(pair), high_half(pair));
#endif
}

__device__ __forceinline__ void unpack(const Raw& raw, float (&x)[8]) {
#if LOGIT == 0
  x[0] = raw.a.x, x[1] = raw.a.y, x[2] = raw.a.z, x[3] = raw.a.w, x[4] = raw.b.x, x[5] = raw.b.y, x[6] = raw.b.z, x[7] = raw.b.w;
#else
  x[0] = low_half(raw.v.x), x[1] = high_half(raw.v.x), x[2] = low_half(raw.v.y), x[3] = high_half(raw.v.y);
  x[4] = low_half(raw.v.z), x[5] = high_half(raw.v.z), x[6] = low_half(raw.v.w), x[7] = high_half(raw.v.w);
#endif
}
