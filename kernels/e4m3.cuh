// e4m3 as numbers of wider types, which hold all of it: sign, 4 bits of exponent with bias 7, 3 of fraction. Its two codes that are no numbers
// become 480 and -480.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

// Bytes of a word by the digits of `selector`, the lowest first; digits from 8 on: eight times the sign of one.
template <uint32_t SELECTOR>
__device__ __forceinline__ uint32_t pick_bytes(uint32_t word) {
    uint32_t picked;
    asm("prmt.b32 %0, %1, 0, %2;" : "=r"(picked) : "r"(word), "n"(SELECTOR));
    return picked;
}

// Codes, each the lower byte of 16 bits whose upper one is its sign eight times -> numbers of __half, 256 times too small, or of __nv_bfloat16.
template <bool IS_HALF>
__device__ __forceinline__ void shift_codes(uint32_t& first, uint32_t& second) {
    constexpr uint32_t SHIFTED = IS_HALF ? 1u << 7 : 1u << 4, MASK = IS_HALF ? 0xbf80bf80u : 0x87f087f0u;
    first = first * SHIFTED & MASK;
    second = second * SHIFTED & MASK;
    if constexpr (!IS_HALF) {
        const uint32_t bits = 0x7b807b80u;  // 2^120: the difference of the exponents' biases
        const __nv_bfloat162 factor = *reinterpret_cast<const __nv_bfloat162*>(&bits);
        __nv_bfloat162 a = __hmul2(*reinterpret_cast<__nv_bfloat162*>(&first), factor);
        __nv_bfloat162 b = __hmul2(*reinterpret_cast<__nv_bfloat162*>(&second), factor);
        first = *reinterpret_cast<uint32_t*>(&a), second = *reinterpret_cast<uint32_t*>(&b);
    }
}

// Four codes -> four numbers, as `shift_codes` makes them.
template <bool IS_HALF>
__device__ __forceinline__ void expand_e4m3(uint32_t word, uint32_t& first, uint32_t& second) {
    first = pick_bytes<0x9180>(word), second = pick_bytes<0xb3a2>(word);
    shift_codes<IS_HALF>(first, second);
}

__device__ __forceinline__ uint32_t times_256(uint32_t pair) {
    const __half2 r = __hmul2(*reinterpret_cast<__half2*>(&pair), __float2half2_rn(256.0f));
    return *reinterpret_cast<const uint32_t*>(&r);
}

__device__ __forceinline__ float e4m3_to_float(uint8_t code) {
    return __uint_as_float((code & 0x80u) << 24 | (code & 0x7fu) << 20) * 0x1p120f;  // 2^120: as above
}

// Sixteen codes at a place of shared memory become sixteen numbers, eight there and eight at place ^ 16.
template <bool IS_HALF>
__device__ __forceinline__ void expand_shared(uint32_t place) {
    uint32_t words[4], numbers[8];
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3]) : "r"(place) : "memory");
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        expand_e4m3<IS_HALF>(words[i], numbers[2 * i], numbers[2 * i + 1]);
        if (IS_HALF) numbers[2 * i] = times_256(numbers[2 * i]), numbers[2 * i + 1] = times_256(numbers[2 * i + 1]);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i)
        asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(place ^ (i << 4)), "r"(numbers[4 * i]), "r"(numbers[4 * i + 1]),
                     "r"(numbers[4 * i + 2]), "r"(numbers[4 * i + 3])
                     : "memory");
}
