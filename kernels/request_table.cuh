// Which request a packed row belongs to. The table itself: kernels/structs.py, which `generated.cuh` is made of.
#pragma once
#include "generated.cuh"

struct Owner {
  int request, index, place;  // of a row: its batch row and place in the request table, and its own place among the owner's rows
};

// The owner of row `row`, to every thread of the block; request is -1 for a padding row. Holds two barriers.
__device__ __forceinline__ Owner find_owner(const int* request_indices, const int* starts, int batch, int row, Owner* shared) {
  if (threadIdx.x == 0) shared->request = -1;
  __syncthreads();
  for (int b = threadIdx.x; b < batch; b += blockDim.x) {
    // volatile: on its way together with the others, not once they say that it is needed
    const int start = starts[b], end = starts[b + 1], index = static_cast<const volatile int*>(request_indices)[b];
    if (start <= row && row < end) *shared = {b, index, row - start};
  }
  __syncthreads();
  return *shared;
}
