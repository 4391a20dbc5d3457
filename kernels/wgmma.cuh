// wgmma.m64n32k16: 64 rows of A times 32 rows of B, both with K contiguous in shared memory (128-byte swizzle), added to float32 sums.
// ELEMENT: __nv_bfloat16 or __half. Thread i of a warpgroup has rows i / 32 * 16 + i % 32 / 4 (+ 8), as PTX's figure says.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cstdint>
#include <type_traits>

#define SUMS                                                                                                                                \
  "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]), "+f"(c[8]), "+f"(c[9]), "+f"(c[10]),     \
      "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15])
#define REGISTERS "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define MULTIPLY(TYPE)                                                                                                              \
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %18, 0;\n"                                                                  \
               "wgmma.mma_async.sync.aligned.m64n32k16.f32." TYPE "." TYPE " {" REGISTERS "}, %16, %17, p, 1, 1, 0, 0; }\n" \
               : SUMS                                                                                                            \
               : "l"(a), "l"(b), "r"(is_added))

// c is replaced unless is_added.
template <class Element>
__device__ __forceinline__ void multiply(float (&c)[16], uint64_t a, uint64_t b, int is_added) {
  if constexpr (std::is_same<Element, __half>::value) MULTIPLY("f16");
  else MULTIPLY("bf16");
}

// Of an operand at a 1024-byte aligned address; rows are 128 bytes, swizzled in groups of eight. Sixteen elements on are 2 more.
__device__ __forceinline__ uint64_t describe(uint32_t shared) {
  return uint64_t((shared & 0x3ffff) >> 4) | uint64_t(1) << 16 | uint64_t(1024 >> 4) << 32 | uint64_t(1) << 62;
}

__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int LATER>  // that may still be under way
__device__ __forceinline__ void await_products() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LATER) : "memory"); }
