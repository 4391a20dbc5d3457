// SMALL_CODE before a loop that turns but a few times: with up to eight rows it is not unrolled. A layer's kernels do not fit in a multiprocessor's
// instruction cache together, so what is unrolled is fetched anew with each layer, which products of few rows feel.
//
// Before it: ROWS, most rows of a block.
#pragma once

#if ROWS <= 8
#define SMALL_CODE _Pragma("unroll 1")
#else
#define SMALL_CODE
#endif
