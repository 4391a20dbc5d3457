// After a step with trees: what is kept of accepted drafts moves to where a chain's would lie. See kernels/compact.py.

#include <cstdint>

template <class Word>
__device__ __forceinline__ void move(char* memory, int64_t page_bytes, int64_t token_bytes, const int64_t* slots, const int* path, int accepted, int page_stride) {
  const auto place_of = [&](int row) {
    const int64_t slot = slots[row];
    return memory + slot / page_stride * page_bytes + slot % page_stride * token_bytes;
  };
  // A row is read after all before it were written, whose targets lie before it: so rows may be sources and targets. A thread has the same
  // bytes of all.
  for (int64_t i = threadIdx.x * sizeof(Word); i < token_bytes; i += blockDim.x * sizeof(Word))
    for (int row = 1; row <= accepted; ++row)
      if (path[row] != row) *(Word*)(place_of(row) + i) = *(const Word*)(place_of(path[row]) + i);
}

// Grid: requests, planes.
extern "C" __global__ void __launch_bounds__(128)
    compact_rows(char* memory, const int64_t* planes, const int64_t* slots, const int* cu_query_lens, const int* paths, const int* num_accepted,
                 int width, int page_stride, int64_t page_bytes) {
  const int request = blockIdx.x, accepted = min(num_accepted[request], width - 1);
  const int* path = paths + int64_t(request) * width;
  if (accepted <= 0 || path[accepted] == accepted) return;  // rows only ever go on: where the last one is in its place, so are all
  const int64_t offset = planes[2 * blockIdx.y], token_bytes = planes[2 * blockIdx.y + 1];
  const int64_t* own = slots + cu_query_lens[request];
  if (token_bytes % 16 == 0) move<int4>(memory + offset, page_bytes, token_bytes, own, path, accepted, page_stride);
  else move<char>(memory + offset, page_bytes, token_bytes, own, path, accepted, page_stride);
}
