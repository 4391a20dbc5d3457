// What products of few tokens are made of: copies of fragments to shared memory, many steps ahead, and mma's product of them (mma.cuh). ELEMENT is defined.
#pragma once

#include "dense.cuh"
#include "mma.cuh"

using Element = ELEMENT;
using V = Vector<Element>;

__device__ __forceinline__ void copy_async(uint32_t target, const void* source) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(target), "l"(source) : "memory");
}

__device__ __forceinline__ void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int LATER>  // that may still be on their way
__device__ __forceinline__ void await_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(LATER) : "memory"); }

__device__ __forceinline__ uint4 load_shared(uint32_t source) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(source) : "memory");
    return v;
}
