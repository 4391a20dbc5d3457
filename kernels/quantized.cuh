// Stored bytes of quantized weights as numbers of x's type: integers up to 256 and e4m3's values are exact in it.
//
// Of sixteen neighbouring columns bytes 4t..4t+3 are columns 2t, 2t+1, 2t+8 and 2t+9: what a thread of tensor cores' A operand holds.
//
// ELEMENT: __nv_bfloat16 or __half; KIND: 0 int8, 1 e4m3, 2 digits of 4 bits, those of the first half of the columns low; ZEROS: zeros are subtracted.
#pragma once

#include "dense.cuh"
#include "e4m3.cuh"

using Element = ELEMENT;
constexpr bool IS_HALF = std::is_same<Element, __half>::value;
constexpr int PARTS = KIND == 2 ? 2 : 1;  // of a byte: digits of columns apart from each other
constexpr float FACTOR = KIND == 1 && IS_HALF ? 256.0f : 1.0f;  // what e4m3's numbers are too small by

__device__ __forceinline__ uint32_t permute(uint32_t low, uint32_t high, uint32_t selector) { return __byte_perm(low, high, selector); }

__device__ __forceinline__ uint32_t subtract(uint32_t a, uint32_t b) {
    uint32_t d;
    if constexpr (IS_HALF) {
        const __half2 r = __hsub2(*reinterpret_cast<__half2*>(&a), *reinterpret_cast<__half2*>(&b));
        d = *reinterpret_cast<const uint32_t*>(&r);
    } else {
        const __nv_bfloat162 r = __hsub2(*reinterpret_cast<__nv_bfloat162*>(&a), *reinterpret_cast<__nv_bfloat162*>(&b));
        d = *reinterpret_cast<const uint32_t*>(&r);
    }
    return d;
}

__device__ __forceinline__ uint32_t twice(float v) {
    const Element e = from_float<Element>(v);
    const uint32_t bits = *reinterpret_cast<const uint16_t*>(&e);
    return bits | bits << 16;
}

// Four stored bytes -> four numbers. zero: what is subtracted, two times; of 4 bits with what the digits' own exponent adds.
__device__ __forceinline__ void expand(uint32_t word, uint32_t zero, uint32_t& first, uint32_t& second) {
    if constexpr (KIND == 1) {
        expand_e4m3<IS_HALF>(word, first, second);
    } else if constexpr (IS_HALF) {  // 0x64uu is 1024 + uu
        if constexpr (KIND == 0) word ^= 0x80808080u;
        first = subtract(permute(word, 0x64646464u, 0x4140), zero), second = subtract(permute(word, 0x64646464u, 0x4342), zero);
    } else {  // 0x43uu is 128 + uu where uu < 128, and 256 where uu is 128
        first = permute(word, 0x43434343u, 0x4140), second = permute(word, 0x43434343u, 0x4342);
        if constexpr (KIND == 0) {
            first = subtract(first & 0x437f437fu, first & 0x43804380u), second = subtract(second & 0x437f437fu, second & 0x43804380u);
            if constexpr (ZEROS) first = subtract(first, zero), second = subtract(second, zero);
        } else {
            first = subtract(first, zero), second = subtract(second, zero);
        }
    }
}

// What `expand` subtracts for a zero.
__device__ __forceinline__ uint32_t offset_of(float zero) {
    if constexpr (KIND == 1) return 0;
    if constexpr (IS_HALF) return twice(zero + (KIND == 0 ? 1152.0f : 1024.0f));
    return twice(zero + (KIND == 0 ? 0.0f : 128.0f));
}

// Of a byte's digits those of part `part`, a byte each.
__device__ __forceinline__ uint32_t digits_of(uint32_t word, int part) { return KIND == 2 ? (part ? word >> 4 : word) & 0x0f0f0f0fu : word; }

// Part `part` of sixteen stored bytes -> sixteen numbers: columns 2i and 2i+1 at 2i, columns 2i+8 and 2i+9 at 2i+1.
__device__ __forceinline__ void expand(uint4 bytes, int part, uint32_t zero, uint32_t (&numbers)[8]) {
    const uint32_t words[4] = {bytes.x, bytes.y, bytes.z, bytes.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) expand(digits_of(words[i], part), zero, numbers[2 * i], numbers[2 * i + 1]);
}

// What `expand` subtracts where a row's groups have no zeros of their own.
__device__ __forceinline__ uint32_t usual_offset() { return offset_of(KIND == 2 ? 8.0f : 0.0f); }
