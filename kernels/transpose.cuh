// What four neighbouring lanes have, turned, so that each stores sixteen neighbouring bytes.
#pragma once
#include <cstdint>

// Word i of lane t of four -> word t of lane i.
__device__ __forceinline__ void transpose(uint32_t (&words)[4]) {
  const int lane = threadIdx.x % 4;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const uint32_t other = __shfl_xor_sync(~0u, lane & 1 ? words[i] : words[i + 1], 1);
    if (lane & 1) words[i] = other;
    else words[i + 1] = other;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t other = __shfl_xor_sync(~0u, lane & 2 ? words[i] : words[i + 2], 2);
    if (lane & 2) words[i] = other;
    else words[i + 2] = other;
  }
}
