// What a step of attention is cut into: the plan writes items, the workers read them. Constants: see attention.cu.
#pragma once
#include <stdint.h>

// TILE: keys of one pipeline stage; also what the plan counts in.
#ifdef NUM_WARPS
constexpr int WARPS = NUM_WARPS, THREADS = WARPS * 32;
#else
constexpr int WARPS = TILE / 16, THREADS = WARPS * 32;
#endif
#ifndef WINDOW
#define WINDOW 0  // tokens that a query sees, itself with them; 0: all. Not with CASCADE
#endif
#ifndef CAP_BITS
#define CAP_BITS 0  // of a float: scores become cap tanh(score / cap); 0: they stay
#endif
#ifndef TREE
#define TREE 0  // 1: a query sees, of its request's new tokens, those that its word says
#endif
#ifndef WHOLE
#define WHOLE 0  // 1: a query sees all of its request's new tokens; a window begins where it would if it saw those up to its own. Not with TREE
#endif
#ifndef E4M3
#define E4M3 0  // 1: pages hold codes of e4m3; those of a KV head have one scale for keys and one for values
#endif
#ifndef MERGE_APART
#define MERGE_APART 0  // 1: pieces of a split are merged by a kernel of its own, also without CASCADE
#endif
constexpr float LOG2E = 1.4426950408889634f;

// A query times a key, before both heads' size is divided by.
__device__ __forceinline__ float cap_score(float score, float inverse_root) {
    if (!CAP_BITS) return score;
    const float cap = __int_as_float(CAP_BITS);
    return cap / inverse_root * tanhf(score * (inverse_root / cap));
}

// Whether a query sees a key that lies so far after its request's newest known token. seen: a bit for each of the request's new tokens.
__device__ __forceinline__ bool is_on_path(unsigned long long seen, int ahead) { return ahead <= 0 || (ahead < 64 && (seen >> ahead & 1)); }

// One piece of work: some rows of one request and KV head against a range of its keys. A row is a query head of a query.
struct Item {
    int query_start;    // packed index of the request's first query; of a prefix, where its list of packed indices begins
    int row_start;      // first row of the item among the request's rows (query * GROUP + head)
    int num_rows;       // 0: the end of a worker's list
    int kv_head;
    int token_begin, token_end;
    int first_visible;  // query j sees the keys 0 .. first_visible + j
    int table_row;      // row of the page table
    int segment;        // which rows and head: what the pieces of one split have in common
    int num_pieces;     // 1: not split; 0: merge_attention merges; else the last piece to finish merges them
    int first_piece;    // where the partial results of the first piece are
    int piece;          // and of this one
    int next, end;      // in a Start: the worker's further items. In shared memory, of codes: bits of key_scale and value_factor
    int is_prefix;      // rows are queries of many requests
    int padding;
};
constexpr int ITEM_WORDS = 16, START_WORDS = 32;
static_assert(sizeof(Item) == 4 * ITEM_WORDS, "items are read as words");

// What a CTA begins with, in one read: its worker's first item and the first pages of its own part of it.
constexpr int START_PAGES = START_WORDS - ITEM_WORDS;
struct Start {
    Item item;
    int page_ids[START_PAGES];
};

constexpr int PAGE_SHIFT = __builtin_ctz(PAGE_SIZE);
constexpr int PAGES_PER_TILE = (PAGE_SIZE - 16 + TILE - 1) / PAGE_SIZE + 1;  // ranges start at multiples of 16

// The part of an item's keys that one CTA of the cluster takes.
__device__ __forceinline__ void split_range(int begin, int end, int rank, int& first, int& last) {
    if (CLUSTER == 1) {
        first = begin, last = end;
        return;
    }
    const int share = (end - begin + CLUSTER * 16 - 1) / (CLUSTER * 16) * 16;
    first = begin + rank * share;
    last = min(end, first + share);
}
