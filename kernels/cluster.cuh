// CLUSTER blocks that share a row, and how they begin together.
#pragma once

#if CLUSTER > 1
#include <cooperative_groups.h>
namespace cg = cooperative_groups;
#define CLUSTER_DIMS __cluster_dims__(CLUSTER, 1, 1)
#else
#define CLUSTER_DIMS
#endif

// What a block writes to its peers' shared memory has to wait until they have begun.
__device__ __forceinline__ void say_begun() {
#if CLUSTER > 1
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void await_peers() {
#if CLUSTER > 1
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
#endif
}
