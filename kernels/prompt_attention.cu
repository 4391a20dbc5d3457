// Attention of prompts over their pages of keys and values, or over what was gathered of them: causal, with a window, several queries' heads to one
// of the keys' (FlashAttention-3, Shah et al. 2024).
//
// A block takes 128 queries of one head at a time: a thread of its first warpgroup copies them and 128 keys and values after another to shared
// memory (bulk tensor copies), each of two further warpgroups has 64 queries. While the values' product with one block's probabilities runs,
// the next block's scores are made. Keys are walked from the last block on, so that what is masked comes first.
//
// ELEMENT: __nv_bfloat16 or __half; HEAD: 64, 128, 192 or 256, of queries and keys; VALUE: 64, 128 or 256, of values; PAGE: tokens of a page, which
// divide KEYS or are a multiple of it; 0: keys and values are gathered.
#include "dense.cuh"
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define CLUSTER 1
#include "cluster.cuh"
#include "pipeline.cuh"
#include "transpose.cuh"
#include "wgmma.cuh"

using Element = ELEMENT;

constexpr int QUERIES = 128, KEYS = HEAD > 192 ? 64 : 128, GROUPS = 2, CONSUMERS = GROUPS * 128, THREADS = CONSUMERS + 128, STAGES = 2;
constexpr int QUERY_PART = QUERIES * 128, PART_BYTES = KEYS * 128;  // 64 columns of a block's rows
constexpr int QUERY_BYTES = HEAD / 64 * QUERY_PART, KEY_BYTES = HEAD / 64 * PART_BYTES, VALUE_BYTES = VALUE / 64 * PART_BYTES;
constexpr int PIECE = VALUE > 128 ? 128 : VALUE, PIECES = VALUE / PIECE;  // of values' columns, in a product
constexpr int MAX_PROMPTS = 1024;
constexpr float LOG2_E = 1.4426950408889634f;

// c += a b, b [16, PIECE] with its columns contiguous: `b` describes rows of 128 bytes, and where the next 64 columns begin.
#define TRANSPOSED(TYPE, N, REGISTERS, P0, P1, P2, P3, P4)                                                                     \
  "wgmma.mma_async.sync.aligned.m64" N "k16.f32." TYPE "." TYPE " {" REGISTERS "}, {" P0 ", " P1 ", " P2 ", " P3 "}, " P4 ", 1, 1, 1, 1;\n"
#define ADD_TRANSPOSED(COUNT, N, REGISTERS, SUMS, P0, P1, P2, P3, P4)                                                          \
  __device__ __forceinline__ void add_product(float (&c)[COUNT], const uint32_t (&a)[4], uint64_t b) {                        \
    if constexpr (std::is_same<Element, __half>::value)                                                                       \
      asm volatile(TRANSPOSED("f16", N, REGISTERS, P0, P1, P2, P3, P4) : SUMS : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)); \
    else                                                                                                                      \
      asm volatile(TRANSPOSED("bf16", N, REGISTERS, P0, P1, P2, P3, P4) : SUMS : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)); \
  }
#if VALUE == 64
ADD_TRANSPOSED(32, "n64", R32, S32, "%32", "%33", "%34", "%35", "%36")
#else
ADD_TRANSPOSED(64, "n128", R64, S64, "%64", "%65", "%66", "%67", "%68")
#endif

// Of values at `shared`, whose rows are the product's inner dimension: eight rows further are 1,024 bytes, 64 columns a part.
__device__ __forceinline__ uint64_t describe_columns(uint32_t shared) {
  return uint64_t((shared & 0x3ffff) >> 4) | uint64_t(PART_BYTES >> 4) << 16 | uint64_t(1024 >> 4) << 32 | uint64_t(1) << 62;
}

#if PAGE
constexpr int BOX = PAGE < KEYS ? PAGE : KEYS, BOXES = KEYS / BOX, MOST_PARTS = (HEAD > VALUE ? HEAD : VALUE) / 64;
static_assert(BOX * BOXES == KEYS && (PAGE % KEYS == 0 || BOX == PAGE) && BOX % 8 == 0, "pages are whole parts of a block, or the other way around");
static_assert(BOXES * MOST_PARTS <= 32, "a lane for each copy");

// 64 columns of a head of some neighbouring tokens of a page.
__device__ __forceinline__ void copy_tokens(uint32_t target, const CUtensorMap* map, uint32_t barrier, int column, int head, int token, int page) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(target),
               "l"(map), "r"(barrier), "r"(column), "r"(head), "r"(token), "r"(page)
               : "memory");
}
#endif

// 64 columns of 128 rows of a head.
__device__ __forceinline__ void copy_part(uint32_t target, const CUtensorMap* map, uint32_t barrier, int column, int head, int row) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(target),
               "l"(map), "r"(barrier), "r"(column), "r"(head), "r"(row)
               : "memory");
}

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ uint32_t pack(float first, float second) {
  if constexpr (std::is_same<Element, __half>::value) {
    const __half2 pair = __floats2half2_rn(first, second);
    return *reinterpret_cast<const uint32_t*>(&pair);
  } else {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
}

// One block's work: queries `first` to `first` + 127 of a prompt, of one head.
struct Tile {
  int head, query_row, num_queries, newest, begin, end;
  // query_row: of the first of these queries; num_queries: of the prompt, from it on; newest: the key that the first of these queries sees last;
  // begin, end: blocks of keys
  int keys;  // row of the prompt's first key; with pages: where the page table has the prompt's
};

struct Walk {
  const int *cu_queries, *cu_keys, *requests, *cu_tiles;
  int num_prompts, num_heads, window, num_tiles, table_width;

  // A prompt's last queries, which see most, come first; its heads beside each other, as those that share keys read them once from the memory.
  __device__ __forceinline__ bool find(int number, Tile& tile) const {
    if (number >= num_tiles) return false;
    int low = 0, high = num_prompts;  // the prompt whose tiles `number` is among
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (cu_tiles[middle] <= number) low = middle;
      else high = middle;
    }
    const int own = number - cu_tiles[low], count = (cu_tiles[low + 1] - cu_tiles[low]) / num_heads;
    const int block = count - 1 - own / num_heads, first = block * QUERIES;
    const int query_begin = __ldg(cu_queries + low), length = __ldg(cu_queries + low + 1) - query_begin;
    if constexpr (PAGE) tile.keys = __ldg(requests + low) * table_width;
    else tile.keys = __ldg(cu_keys + low);
    const int num_keys = PAGE ? __ldg(cu_keys + low) : __ldg(cu_keys + low + 1) - tile.keys;
    tile.head = own % num_heads;
    tile.query_row = query_begin + first, tile.num_queries = length - first;
    tile.newest = num_keys - length + first;
    const int last = min(num_keys, tile.newest + QUERIES);
    tile.begin = window > 0 ? max(0, tile.newest - window + 1) / KEYS : 0;
    tile.end = max(tile.begin + 1, (last + KEYS - 1) / KEYS);  // one at least, as both sides wait for each other there
    return true;
  }
};

// Grid: blocks that take turns. queries [T, num_heads, HEAD], out [T, num_heads, VALUE]; keys [S, num_kv, HEAD], values [S, num_kv, VALUE], or pages of
// them; cu_queries [num_prompts + 1]; cu_keys: the same, or with pages how many keys each prompt has [num_prompts], and requests [num_prompts]: their
// rows of page_table; window: how many keys a query sees at most, its own with them, 0: all.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    prompt_attention(const __grid_constant__ CUtensorMap queries, const __grid_constant__ CUtensorMap keys, const __grid_constant__ CUtensorMap values,
                     Element* out, const int* cu_queries, const int* cu_keys, const int* requests, const int* page_table, int table_width,
                     int num_prompts, int num_heads, int num_kv, int window, float scale) {
  extern __shared__ unsigned char dynamic_memory[];
  __shared__ __align__(8) uint64_t barriers[2 + 4 * STAGES];
  __shared__ int cu_tiles[MAX_PROMPTS + 1];
  const uint32_t base = (uint32_t(__cvta_generic_to_shared(dynamic_memory)) + 1023) & ~1023u;
  const uint32_t query_place = base, key_places = base + QUERY_BYTES, value_places = key_places + STAGES * KEY_BYTES;
  const uint32_t query_full = uint32_t(__cvta_generic_to_shared(barriers)), query_empty = query_full + 8;
  const uint32_t key_full = query_empty + 8, key_empty = key_full + 8 * STAGES;
  const uint32_t value_full = key_empty + 8 * STAGES, value_empty = value_full + 8 * STAGES;
  launch_dependents();
  if (threadIdx.x == 0) {
    prefetch(&queries), prefetch(&keys), prefetch(&values);
    init_barrier(query_full, 1), init_barrier(query_empty, CONSUMERS / 32);
    for (int s = 0; s < STAGES; ++s) {
      init_barrier(key_full + 8 * s, 1), init_barrier(key_empty + 8 * s, CONSUMERS / 32);
      init_barrier(value_full + 8 * s, 1), init_barrier(value_empty + 8 * s, CONSUMERS / 32);
    }
    publish_barriers();
  }
  wait_for_earlier();
  if (threadIdx.x < 32) {  // sums of what prompts before have
    int before = 0;
    for (int begin = 0; begin < num_prompts; begin += 32) {
      const int prompt = begin + threadIdx.x;
      int own = 0;
      if (prompt < num_prompts) own = (__ldcg(cu_queries + prompt + 1) - __ldcg(cu_queries + prompt) + QUERIES - 1) / QUERIES * num_heads;
      for (int offset = 1; offset < 32; offset *= 2) {
        const int other = __shfl_up_sync(~0u, own, offset);
        if (threadIdx.x >= offset) own += other;
      }
      if (prompt < num_prompts) cu_tiles[prompt + 1] = before + own;
      before += __shfl_sync(~0u, own, 31);
    }
    if (threadIdx.x == 0) cu_tiles[0] = 0;
  }
  __syncthreads();
  const Walk walk = {cu_queries, cu_keys, requests, cu_tiles, num_prompts, num_heads, window, cu_tiles[num_prompts], table_width};
  const int heads_of_key = num_heads / num_kv;
  Tile tile;

  if (threadIdx.x < 128) {
    keep_registers<24>();
    if (threadIdx.x < 32) {
      const bool is_first = threadIdx.x == 0;
      int stage = 0, parity = 0, query_parity = 0;
      const auto copy = [&](uint32_t place, const CUtensorMap* map, uint32_t barrier, int size, int part_bytes, int head, int row) {  // by one thread
        arrive_expecting(barrier, size / 64 * part_bytes);
        for (int part = 0; part < size / 64; ++part) copy_part(place + part * part_bytes, map, barrier, part * 64, head, row);
      };
      const auto copy_keys = [&](uint32_t place, const CUtensorMap* map, uint32_t full, uint32_t empty, int size, int head, int block) {
        await(empty, parity ^ 1);
#if PAGE
        if (is_first) arrive_expecting(full, size / 64 * PART_BYTES);
        __syncwarp();
        const int box = threadIdx.x % BOXES, part = threadIdx.x / BOXES, token = block * KEYS + box * BOX;
        if (part < size / 64) {
          const int page = __ldg(page_table + tile.keys + min(token / PAGE, table_width - 1));
          copy_tokens(place + part * PART_BYTES + box * BOX * 128, map, full, part * 64, head, token % PAGE, page);
        }
#else
        if (is_first) copy(place, map, full, size, PART_BYTES, head, tile.keys + block * KEYS);
#endif
      };
      for (int number = blockIdx.x; walk.find(number, tile); number += gridDim.x, query_parity ^= 1) {
        await(query_empty, query_parity ^ 1);
        if (is_first) copy(query_place, &queries, query_full, HEAD, QUERY_PART, tile.head, tile.query_row);
        for (int block = tile.end - 1; block >= tile.begin; --block) {
          const int head = tile.head / heads_of_key;
          copy_keys(key_places + stage * KEY_BYTES, &keys, key_full + 8 * stage, key_empty + 8 * stage, HEAD, head, block);
          copy_keys(value_places + stage * VALUE_BYTES, &values, value_full + 8 * stage, value_empty + 8 * stage, VALUE, head, block);
          if (++stage == STAGES) stage = 0, parity ^= 1;
        }
      }
    }
    return;
  }
  take_registers<240>();
  const int thread = threadIdx.x - 128, group = thread / 128, warp = thread / 32 % 4, lane = thread % 32;
  const int row = group * 64 + warp * 16 + lane / 4;  // of the tile's queries, and 8 further on
  const float scale_log2 = scale * LOG2_E;
  int stage = 0, parity = 0, query_parity = 0;
  const auto release = [&](uint32_t barrier) {
    if (lane == 0) arrive(barrier);
  };
  for (int number = blockIdx.x; walk.find(number, tile); number += gridDim.x, query_parity ^= 1) {
    float sums[PIECES][PIECE / 2], scores[KEYS / 2], most[2] = {-INFINITY, -INFINITY}, totals[2] = {0, 0};
    uint32_t chances[KEYS / 16][4];
#pragma unroll
    for (int i = 0; i < VALUE / 2; ++i) sums[i * 2 / PIECE][i % (PIECE / 2)] = 0;

    const auto ask = [&](int from) {  // scores of the keys in this stage; not awaited
      await(key_full + 8 * from, parity);
      begin_products();
#pragma unroll
      for (int k = 0; k < HEAD / 16; ++k)
        multiply<Element>(scores, describe(query_place + group * 64 * 128 + k / 4 * QUERY_PART) + 2 * (k % 4),
                          describe(key_places + from * KEY_BYTES + k / 4 * PART_BYTES) + 2 * (k % 4), k > 0);
      end_products();
    };
    const auto mask = [&](int block) {
      const int newest = tile.newest + row, oldest = window > 0 ? newest - window + 1 : -QUERIES, key = block * KEYS + lane % 4 * 2;
      const int first = tile.newest + group * 64, last = first + 63;  // that the group's first and last query see
      if (block * KEYS + KEYS - 1 <= first && (window <= 0 || block * KEYS > last - window)) return;  // all of the block's keys are seen by all
#pragma unroll
      for (int i = 0; i < KEYS / 2; ++i) {
        const int own = key + i / 4 * 8 + i % 2, further = i % 4 / 2 * 8;
        if (own > newest + further || own < oldest + further) scores[i] = -INFINITY;
      }
    };
    float factors[2];
    const auto weigh = [&] {  // scores -> what is summed up so far has to be multiplied by, and chances in the scores' place
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float top = most[half];
#pragma unroll
        for (int i = 0; i < KEYS / 8; ++i) top = fmaxf(top, fmaxf(scores[4 * i + 2 * half], scores[4 * i + 2 * half + 1]));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
        const float shift = top == -INFINITY ? 0.0f : top * scale_log2;
        factors[half] = exp2_fast(most[half] * scale_log2 - shift);
        most[half] = top;
        float total = 0;
#pragma unroll
        for (int i = 0; i < KEYS / 8; ++i)
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            float& own = scores[4 * i + 2 * half + j];
            own = exp2_fast(fmaf(own, scale_log2, -shift));
            total += own;
          }
        totals[half] = totals[half] * factors[half] + total;
      }
    };
    const auto pack_chances = [&] {
#pragma unroll
      for (int i = 0; i < KEYS / 16; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) chances[i][j] = pack(scores[8 * i + 2 * j], scores[8 * i + 2 * j + 1]);
    };
    const auto rescale = [&] {
#pragma unroll
      for (int i = 0; i < VALUE / 2; ++i) sums[i * 2 / PIECE][i % (PIECE / 2)] *= factors[i % 4 / 2];
    };
    const auto add_values = [&](int from) {  // not awaited
      begin_products();
#pragma unroll
      for (int i = 0; i < KEYS / 16; ++i)
#pragma unroll
        for (int piece = 0; piece < PIECES; ++piece)
          add_product(sums[piece], chances[i], describe_columns(value_places + from * VALUE_BYTES + piece * 2 * PART_BYTES + i * 16 * 128));
      end_products();
    };
    // Values of nobody, behind a prompt's last key, may be anything: zero times that is to be nothing.
    const auto clear_tail = [&](int from, int block) {
      const int left = tile.newest + min(tile.num_queries, QUERIES) - block * KEYS;  // keys that any of these queries sees
      if (left >= KEYS) return;
      for (int i = thread; i < (KEYS - left) * 8 * (VALUE / 64); i += CONSUMERS) {
        const int part = i / ((KEYS - left) * 8), own = i % ((KEYS - left) * 8);
        clear_shared(value_places + from * VALUE_BYTES + part * PART_BYTES + left * 128 + own * 16);
      }
      publish_to_products();
      asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory");
    };

    await(query_full, query_parity);
    int block = tile.end - 1;
    ask(stage);
    await_products<0>();
    hold(scores);
    release(key_empty + 8 * stage);
    if (block == tile.begin) release(query_empty);
    mask(block);
    weigh();
    pack_chances();
    await(value_full + 8 * stage, parity);
    clear_tail(stage, block);
    for (--block; block >= tile.begin; --block) {
      const int before = stage;
      if (++stage == STAGES) stage = 0, parity ^= 1;
      ask(stage);
      add_values(before);
      await_products<1>();
      hold(scores);
      release(key_empty + 8 * stage);
      if (block == tile.begin) release(query_empty);
      mask(block);
      weigh();
      await_products<0>();
#pragma unroll
      for (int piece = 0; piece < PIECES; ++piece) hold(sums[piece]);
      release(value_empty + 8 * before);
      rescale();
      pack_chances();
      await(value_full + 8 * stage, parity);
    }
    add_values(stage);
    await_products<0>();
#pragma unroll
    for (int piece = 0; piece < PIECES; ++piece) hold(sums[piece]);
    release(value_empty + 8 * stage);
    if (++stage == STAGES) stage = 0, parity ^= 1;

#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float total = totals[half];
      total += __shfl_xor_sync(~0u, total, 1);
      total += __shfl_xor_sync(~0u, total, 2);
      const float inverse = total > 0 ? 1.0f / total : 0.0f;
      const int own = row + 8 * half;
      const bool is_there = own < tile.num_queries;
      Element* target = out + (static_cast<size_t>(tile.query_row + own) * num_heads + tile.head) * VALUE;
      // Lanes of four exchange what they have of four column blocks, so that each stores sixteen bytes.
#pragma unroll
      for (int q = 0; q < VALUE / 32; ++q) {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float* pair = &sums[(4 * q + i) * 8 / PIECE][(4 * q + i) * 8 % PIECE / 2 + 2 * half];
          words[i] = pack(pair[0] * inverse, pair[1] * inverse);
        }
        transpose(words);
        if (is_there) *reinterpret_cast<uint4*>(target + (4 * q + lane % 4) * 8) = make_uint4(words[0], words[1], words[2], words[3]);
      }
    }
  }
}
#endif
