// The two halves of a programmatic launch: a kernel begins before the one ahead of it on the stream has ended.
#pragma once

// Lets the next kernel of the stream start: it may do whatever depends on no earlier kernel.
__device__ __forceinline__ void launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Returns once every earlier kernel of the stream has ended and what it wrote can be seen.
__device__ __forceinline__ void wait_for_earlier() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
