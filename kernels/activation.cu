// SiLU of the gate times up. ELEMENT: the element type.
#include "dense.cuh"

using Element = ELEMENT;
using V = Vector<Element>;

// gate_up [T, 2N] -> out [T, N]; blockIdx.x is the row.
extern "C" __global__ void __launch_bounds__(256) silu_mul(Element* out, const Element* gate_up, int size) {
    const int i = (blockIdx.y * 256 + threadIdx.x) * V::SIZE;
    launch_dependents();
    wait_for_earlier();
    if (i >= size) return;
    const Element* row = gate_up + static_cast<size_t>(blockIdx.x) * 2 * size;
    V gate = load_fresh(row + i);
    const V up = load_fresh(row + size + i);
#pragma unroll
    for (int e = 0; e < V::SIZE; ++e) gate.values[e] = gate_mul(gate.values[e], up.values[e]);
    store(out + static_cast<size_t>(blockIdx.x) * size + i, gate);
}
