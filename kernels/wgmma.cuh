// wgmma.m64nNk16, N = TOKENS: 64 rows of A times N rows of B, both with K contiguous in shared memory (128-byte swizzle), added to float32 sums.
// ELEMENT: __nv_bfloat16 or __half. Thread i of a warpgroup has rows i / 32 * 16 + i % 32 / 4 (+ 8), as PTX's figure says.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cstdint>
#include <type_traits>

#define EIGHT(i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3]), "+f"(c[i + 4]), "+f"(c[i + 5]), "+f"(c[i + 6]), "+f"(c[i + 7])
#define R16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define R24 R16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define R32 R24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#if TOKENS == 32
#define SUMS EIGHT(0), EIGHT(8)
#define OPERANDS "n32", R16, "%16", "%17", "%18"
#elif TOKENS == 48
#define SUMS EIGHT(0), EIGHT(8), EIGHT(16)
#define OPERANDS "n48", R24, "%24", "%25", "%26"
#elif TOKENS == 64
#define SUMS EIGHT(0), EIGHT(8), EIGHT(16), EIGHT(24)
#define OPERANDS "n64", R32, "%32", "%33", "%34"
#else
#error "TOKENS must be 32, 48 or 64"
#endif
#define MULTIPLY(TYPE) MULTIPLY_WITH(TYPE, OPERANDS)
#define MULTIPLY_WITH(...) MULTIPLY_AS(__VA_ARGS__)
#define MULTIPLY_AS(TYPE, N, REGISTERS, A, B, IS_ADDED)                                                                                 \
  asm volatile("{ .reg .pred p; setp.ne.b32 p, " IS_ADDED ", 0;\n"                                                                       \
               "wgmma.mma_async.sync.aligned.m64" N "k16.f32." TYPE "." TYPE " {" REGISTERS "}, " A ", " B ", p, 1, 1, 0, 0; }\n"         \
               : SUMS                                                                                                                    \
               : "l"(a), "l"(b), "r"(is_added))

// c is replaced unless is_added.
template <class Element>
__device__ __forceinline__ void multiply(float (&c)[TOKENS / 2], uint64_t a, uint64_t b, int is_added) {
  if constexpr (std::is_same<Element, __half>::value) MULTIPLY("f16");
  else MULTIPLY("bf16");
}

// Of an operand at a 1024-byte aligned address; rows are 128 bytes, swizzled in groups of eight. Sixteen elements on are 2 more.
__device__ __forceinline__ uint64_t describe(uint32_t shared) {
  return uint64_t((shared & 0x3ffff) >> 4) | uint64_t(1) << 16 | uint64_t(1024 >> 4) << 32 | uint64_t(1) << 62;
}

__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void await_products() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }
