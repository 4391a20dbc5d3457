// Token masks on logits. See kernels/token_mask.py.
//
// LOGIT: 0 float32, 1 bf16, 2 fp16.

#define VECTOR 0
#include "logits.cuh"
#include "request_table.cuh"

// Grid: rows, blocks that share a row. A warp has 32 neighbours, and one word of the mask.
extern "C" __global__ void __launch_bounds__(256)
    mask_logits(Logit* logits, const int* masks, const int* mask_starts, const int* cu_logit_rows, int batch, int vocab_size, int num_words) {
  __shared__ Owner shared;
  const Owner owner = find_owner(mask_starts, cu_logit_rows, batch, blockIdx.x, &shared);
  if (owner.request < 0 || owner.index < 0) return;  // a padding row, or one that may choose any token
  const unsigned* mask = reinterpret_cast<const unsigned*>(masks) + size_t(owner.index + owner.place) * num_words;
  Logit* row = logits + size_t(blockIdx.x) * vocab_size;
  for (int token_id = blockIdx.y * blockDim.x + threadIdx.x; token_id < vocab_size; token_id += gridDim.y * blockDim.x)
    if (!(mask[token_id / 32] >> (token_id % 32) & 1)) row[token_id] = from_float(-INF);
}
