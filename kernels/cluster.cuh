// CLUSTER blocks that work on one thing, and the barrier of their threads: nothing where a block is alone.
#pragma once

#if CLUSTER > 1
#include <cooperative_groups.h>
namespace cg = cooperative_groups;
#define CLUSTER_DIMS __cluster_dims__(CLUSTER, 1, 1)
#else
#define CLUSTER_DIMS
#endif

// What was written before can be seen by those that have waited. That waits for all of the thread's memory operations.
__device__ __forceinline__ void arrive_cluster() {
#if CLUSTER > 1
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
// Says only that this thread has come so far: that its block has begun, which whoever writes to its shared memory has to wait for, or
// that it has read what others may write over.
__device__ __forceinline__ void arrive_cluster_relaxed() {
#if CLUSTER > 1
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void await_cluster() {
#if CLUSTER > 1
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
