// Which drafts lead to a row of a request: row 0 is its newest token, row i + 1 its draft i. See kernels/reference/paths.py.
#pragma once
#include "generated.cuh"

// The draft before a draft of a tree; a table that holds nonsense ends the way all the same.
__device__ __forceinline__ int parent_of(const Requests& table, int index, int node) {
  return min(table.parents[size_t(index) * table.max_drafts + node], node - 1);
}

// How many drafts lead to a row, itself among them.
__device__ __forceinline__ int count_depth(const Requests& table, int index, int place) {
  if (!table.parents) return place;
  int depth = 0;
  for (int node = place - 1; node >= 0; node = parent_of(table, index, node)) ++depth;
  return depth;
}

// The draft that lies `up` before the last one on the way to a row.
__device__ __forceinline__ int find_draft(const Requests& table, int index, int place, int up) {
  if (!table.parents) return place - 1 - up;
  int node = place - 1;
  for (int i = 0; i < up && node >= 0; ++i) node = parent_of(table, index, node);
  return node;
}

// The rows of its request that a row sees, itself among them, a bit each.
__device__ __forceinline__ unsigned long long find_seen(const Requests& table, int index, int place) {
  unsigned long long seen = 1;
  for (int node = place - 1; node >= 0; node = parent_of(table, index, node)) seen |= 2ull << node;
  return seen;
}
