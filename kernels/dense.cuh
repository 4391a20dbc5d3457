// What the kernels of the dense part share: 16-byte vectors of elements, the order in which squares are summed, and SiLU.
#pragma once

#include <cstdint>
#include <type_traits>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include "programmatic.cuh"

template <typename T>
struct Vector {
    static constexpr int SIZE = 16 / sizeof(T);
    union {
        uint4 bits;
        T values[SIZE];
    };
    __device__ Vector() : bits{0, 0, 0, 0} {}
    __device__ explicit Vector(uint4 bits) : bits(bits) {}
};

__device__ __forceinline__ float to_float(float v) { return v; }
__device__ __forceinline__ float to_float(__half v) { return __half2float(v); }
__device__ __forceinline__ float to_float(__nv_bfloat16 v) { return __bfloat162float(v); }

template <typename T>
__device__ __forceinline__ T from_float(float v);
template <>
__device__ __forceinline__ float from_float(float v) { return v; }
template <>
__device__ __forceinline__ __half from_float(float v) { return __float2half_rn(v); }
template <>
__device__ __forceinline__ __nv_bfloat16 from_float(float v) { return __float2bfloat16_rn(v); }

// What earlier kernels wrote is read past L1: this kernel may have started before they ended.
template <typename T>
__device__ __forceinline__ Vector<T> load_fresh(const T* source) {
    return Vector<T>(__ldcg(reinterpret_cast<const uint4*>(source)));
}

template <typename T>
__device__ __forceinline__ Vector<T> load_constant(const T* source) {
    return Vector<T>(__ldg(reinterpret_cast<const uint4*>(source)));
}

template <typename T>
__device__ __forceinline__ void store(T* target, const Vector<T>& v) {
    *reinterpret_cast<uint4*>(target) = v.bits;
}

__device__ __forceinline__ float sum_warp(float v) {
#pragma unroll
    for (int offset = 16; offset; offset >>= 1) v += __shfl_xor_sync(~0u, v, offset);
    return v;
}

template <typename T>
__device__ __forceinline__ float add_squares(float sum, const Vector<T>& v) {
#pragma unroll
    for (int i = 0; i < Vector<T>::SIZE; ++i) sum = __fmaf_rn(to_float(v.values[i]), to_float(v.values[i]), sum);
    return sum;
}

__device__ __forceinline__ float inverse_rms(float sum_of_squares, int size, float eps) {
    return rsqrtf(__fadd_rn(__fdiv_rn(sum_of_squares, static_cast<float>(size)), eps));
}

template <typename T>
__device__ __forceinline__ T scale(T value, float inverse, T weight) {
    return from_float<T>(__fmul_rn(__fmul_rn(to_float(value), inverse), to_float(weight)));
}

__device__ __forceinline__ float silu(float v) { return __fdividef(v, 1.0f + __expf(-v)); }

template <typename T>
__device__ __forceinline__ T gate_mul(T gate, T up) {
    const float g = to_float(gate);
    if constexpr (sizeof(T) == 4) return g / (1.0f + expf(-g)) * up;
    return from_float<T>(silu(g) * to_float(up));
}
