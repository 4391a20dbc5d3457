// The two halves of a programmatic launch: a kernel begins before the one ahead of it on the stream has ended.
#pragma once

// Lets the next kernel of the stream start: it may do whatever depends on no earlier kernel.
__device__ __forceinline__ void launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Returns once every earlier kernel of the stream has ended and what it wrote can be seen.
//
// A kernel may run beside the one ahead of it (is_ready): where that one waited before it let this one in, all that is older can be seen already. What
// this one writes must not be read or written there, and it waits at its end, so that who waits for it has waited for both.
__device__ __forceinline__ void wait_for_earlier() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
