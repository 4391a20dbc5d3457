// Weights of 8 or 4 bits [N, K] written out in x's type, for products of many tokens, which read them more than once.
//
// ELEMENT, KIND, ZEROS: see quantized.cuh.
#include "quantized.cuh"

// out [N, K]; codes [N, row_bytes]; scales and zeros [groups, N], a group scale_stride after the other. group_size and row_bytes are multiples of 16. A thread per 16 bytes.
extern "C" __global__ void __launch_bounds__(256)
    quantized_expand(Element* out, const uint8_t* codes, const float* scales, const float* zeros, int N, int row_bytes, int group_size,
                     int scale_stride) {
    const int64_t number = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x, pieces = row_bytes / 16, row = number / pieces;
    if (row >= N) return;
    const int begin = static_cast<int>(number % pieces) * 16;
    const uint4 bytes = __ldcs(reinterpret_cast<const uint4*>(codes + row * row_bytes + begin));
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
        const int column = begin + part * row_bytes;
        const int64_t place = static_cast<int64_t>(column / group_size) * scale_stride + row;
        const float scale = __ldg(scales + place) * FACTOR;
        union {
            uint32_t words[8];
            Element values[16];
        } numbers;
        expand(bytes, part, ZEROS ? offset_of(__ldg(zeros + place)) : usual_offset(), numbers.words);
        Vector<Element> made[2];
#pragma unroll
        for (int i = 0; i < 16; ++i) made[i / 2 % 2].values[i / 4 * 2 + i % 2] = from_float<Element>(__fmul_rn(to_float(numbers.values[i]), scale));
        Element* target = out + row * row_bytes * PARTS + column;
        store(target, made[0]), store(target + 8, made[1]);
    }
}
