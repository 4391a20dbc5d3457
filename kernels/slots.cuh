// What the device keeps of each request, by slot: see kernels/state.py, which allocates it.
#pragma once

constexpr int GREEDY = 1, HAS_PENALTIES = 2, HAS_BIAS = 4, HAS_BANS = 8;
constexpr int IN_PROMPT = 1 << 30;  // beside the count in Slots::seen

struct SlotParams {  // 16 words; kernels/state.py writes them
  float temperature, top_p, min_p;
  int top_k;
  float repetition, presence, frequency;
  int flags;
  unsigned seed_low, seed_high;
  int min_known, num_biases, num_banned, max_total_tokens, num_prompt_tokens, reserved;
};

struct Slots {
  int* tokens;         // [S, max_len] prompt and output
  int* num_tokens;     // [S]
  int* drafts;         // [S, max_drafts]
  int* num_drafts;     // [S]
  SlotParams* params;  // [S]
  int2* seen;          // [S, max_seen] token, times emitted | IN_PROMPT; each token once, in no order
  int* seen_place;     // [S, vocab_size] place in `seen` + 1, 0: none
  int* num_seen;       // [S]
  int* bias_ids;       // [S, MAX_BIASES]
  float* biases;
  int* banned_ids;     // [S, MAX_BANNED]
  int max_len, max_drafts, max_seen, vocab_size;
};

constexpr int MAX_BIASES = 1024, MAX_BANNED = 512;

struct Owner {
  int request, slot, place;  // of a packed row: who owns it, and its place among the owner's rows
};

// The owner of packed row `row`, to every thread of the block; request is -1 for a padding row. Holds two barriers.
__device__ __forceinline__ Owner find_owner(const int* row_slots, const int* cu_query_lens, int batch, int row, Owner* shared) {
  if (threadIdx.x == 0) shared->request = -1;
  __syncthreads();
  for (int b = threadIdx.x; b < batch; b += blockDim.x) {
    // volatile: on its way together with the others, not once they say that it is needed
    const int start = cu_query_lens[b], end = cu_query_lens[b + 1], slot = static_cast<const volatile int*>(row_slots)[b];
    if (start <= row && row < end) *shared = {b, slot, row - start};
  }
  __syncthreads();
  return *shared;
}
