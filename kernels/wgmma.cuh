// wgmma.m64nNk16, N a multiple of 16 from 16 to 256: 64 rows of A times N rows of B, both with K contiguous in shared memory (128-byte swizzle), added to float32 sums.
// ELEMENT: __nv_bfloat16, __half, or E4m3 (k32). Thread i of a warpgroup has rows i / 32 * 16 + i % 32 / 4 (+ 8), as PTX's figure says.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cstdint>
#include <type_traits>

struct E4m3 {};  // operands of eight bits: twice as many in the same bytes

#define EIGHT(i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3]), "+f"(c[i + 4]), "+f"(c[i + 5]), "+f"(c[i + 6]), "+f"(c[i + 7])
#define R8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define S8 EIGHT(0)
#define R16 R8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define S16 S8, EIGHT(8)
#define R24 R16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define S24 S16, EIGHT(16)
#define R32 R24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define S32 S24, EIGHT(24)
#define R40 R32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define S40 S32, EIGHT(32)
#define R48 R40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define S48 S40, EIGHT(40)
#define R56 R48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define S56 S48, EIGHT(48)
#define R64 R56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define S64 S56, EIGHT(56)
#define R72 R64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define S72 S64, EIGHT(64)
#define R80 R72 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define S80 S72, EIGHT(72)
#define R88 R80 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define S88 S80, EIGHT(80)
#define R96 R88 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define S96 S88, EIGHT(88)
#define R104 R96 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define S104 S96, EIGHT(96)
#define R112 R104 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define S112 S104, EIGHT(104)
#define R120 R112 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define S120 S112, EIGHT(112)
#define R128 R120 ", %120, %121, %122, %123, %124, %125, %126, %127"
#define S128 S120, EIGHT(120)
// By the number of a thread's sums: c is replaced unless is_added. A lies in shared memory, or is what the warpgroup's threads hold: elements 2t, 2t+1 of
// rows g and g+8, then 2t+8 and 2t+9 of both; of E4m3 4t to 4t+3 of both, then 4t+16 to 4t+19.
#define PRODUCT(TYPE, N, REGISTERS, A, B, IS_ADDED, LAST)                                                                                  \
  "{ .reg .pred p; setp.ne.b32 p, " IS_ADDED ", 0;\n"                                                                                      \
  "wgmma.mma_async.sync.aligned.m64" N "k16.f32." TYPE "." TYPE " {" REGISTERS "}, " A ", " B ", p, 1, 1, 0" LAST "; }\n"
#define SMALL_PRODUCT(N, REGISTERS, A, B, IS_ADDED)                                                                                        \
  "{ .reg .pred p; setp.ne.b32 p, " IS_ADDED ", 0;\n"                                                                                      \
  "wgmma.mma_async.sync.aligned.m64" N "k32.f32.e4m3.e4m3 {" REGISTERS "}, " A ", " B ", p, 1, 1; }\n"
#define PRODUCTS(COUNT, N, REGISTERS, SUMS, P0, P1, P2, P3, P4, P5)                                                                        \
  template <class Element>                                                                                                                \
  __device__ __forceinline__ void multiply(float (&c)[COUNT], uint64_t a, uint64_t b, int is_added) {                                     \
    if constexpr (std::is_same<Element, E4m3>::value)                                                                                     \
      asm volatile(SMALL_PRODUCT(N, REGISTERS, P0, P1, P2) : SUMS : "l"(a), "l"(b), "r"(is_added));                                       \
    else if constexpr (std::is_same<Element, __half>::value)                                                                              \
      asm volatile(PRODUCT("f16", N, REGISTERS, P0, P1, P2, ", 0") : SUMS : "l"(a), "l"(b), "r"(is_added));                               \
    else                                                                                                                                  \
      asm volatile(PRODUCT("bf16", N, REGISTERS, P0, P1, P2, ", 0") : SUMS : "l"(a), "l"(b), "r"(is_added));                              \
  }                                                                                                                                       \
  template <class Element>                                                                                                                \
  __device__ __forceinline__ void multiply(float (&c)[COUNT], const uint32_t (&a)[4], uint64_t b, int is_added) {                         \
    if constexpr (std::is_same<Element, E4m3>::value)                                                                                     \
      asm volatile(SMALL_PRODUCT(N, REGISTERS, "{" P0 ", " P1 ", " P2 ", " P3 "}", P4, P5)                                                \
                   : SUMS : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(is_added));                                           \
    else if constexpr (std::is_same<Element, __half>::value)                                                                              \
      asm volatile(PRODUCT("f16", N, REGISTERS, "{" P0 ", " P1 ", " P2 ", " P3 "}", P4, P5, "")                                           \
                   : SUMS : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(is_added));                                           \
    else                                                                                                                                  \
      asm volatile(PRODUCT("bf16", N, REGISTERS, "{" P0 ", " P1 ", " P2 ", " P3 "}", P4, P5, "")                                          \
                   : SUMS : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(is_added));                                           \
  }
PRODUCTS(8, "n16", R8, S8, "%8", "%9", "%10", "%11", "%12", "%13")
PRODUCTS(16, "n32", R16, S16, "%16", "%17", "%18", "%19", "%20", "%21")
PRODUCTS(24, "n48", R24, S24, "%24", "%25", "%26", "%27", "%28", "%29")
PRODUCTS(32, "n64", R32, S32, "%32", "%33", "%34", "%35", "%36", "%37")
PRODUCTS(40, "n80", R40, S40, "%40", "%41", "%42", "%43", "%44", "%45")
PRODUCTS(48, "n96", R48, S48, "%48", "%49", "%50", "%51", "%52", "%53")
PRODUCTS(56, "n112", R56, S56, "%56", "%57", "%58", "%59", "%60", "%61")
PRODUCTS(64, "n128", R64, S64, "%64", "%65", "%66", "%67", "%68", "%69")
PRODUCTS(72, "n144", R72, S72, "%72", "%73", "%74", "%75", "%76", "%77")
PRODUCTS(80, "n160", R80, S80, "%80", "%81", "%82", "%83", "%84", "%85")
PRODUCTS(88, "n176", R88, S88, "%88", "%89", "%90", "%91", "%92", "%93")
PRODUCTS(96, "n192", R96, S96, "%96", "%97", "%98", "%99", "%100", "%101")
PRODUCTS(104, "n208", R104, S104, "%104", "%105", "%106", "%107", "%108", "%109")
PRODUCTS(112, "n224", R112, S112, "%112", "%113", "%114", "%115", "%116", "%117")
PRODUCTS(120, "n240", R120, S120, "%120", "%121", "%122", "%123", "%124", "%125")
PRODUCTS(128, "n256", R128, S128, "%128", "%129", "%130", "%131", "%132", "%133")

// Of an operand whose rows are 128 (or 64) bytes, swizzled in groups of eight (four), at an address aligned to eight rows. Thirty-two bytes on are 2 more.
template <int ROW_BYTES = 128>
__device__ __forceinline__ uint64_t describe(uint32_t shared) {
  static_assert(ROW_BYTES == 128 || ROW_BYTES == 64, "swizzles of these");
  return uint64_t((shared & 0x3ffff) >> 4) | uint64_t(1) << 16 | uint64_t(ROW_BYTES * 8 >> 4) << 32 | uint64_t(ROW_BYTES == 128 ? 1 : 2) << 62;
}

__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Until no more than PENDING of the thread's last groups of products are under way.
template <int PENDING>
__device__ __forceinline__ void await_products() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory"); }
// What was awaited may be read behind this: a barrier for the compiler, which does not see that products write their sums late.
template <int SIZE>
__device__ __forceinline__ void hold(float (&c)[SIZE]) {
#pragma unroll
  for (int i = 0; i < SIZE; ++i) asm volatile("" : "+f"(c[i])::"memory");
}
