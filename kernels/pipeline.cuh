// Barriers in shared memory, and what arrives at them: bulk tensor copies, and stores to other blocks of a cluster. Hopper and later.
#pragma once
#include <cuda.h>
#include <cstdint>

__device__ __forceinline__ void init_barrier(uint32_t barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
__device__ __forceinline__ void publish_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void arrive_expecting(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void await(uint32_t barrier, int parity) {
  asm volatile(
      "{ .reg .pred p;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
      "@!p bra again; }\n" ::"r"(barrier), "r"(parity)
      : "memory");
}

__device__ __forceinline__ void prefetch(const CUtensorMap* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }
// A box of a tensor to this block.
__device__ __forceinline__ void copy_box(uint32_t target, const CUtensorMap* map, uint32_t barrier, int k, int row) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(target), "l"(map),
               "r"(barrier), "r"(k), "r"(row)
               : "memory");
}

// A box of a tensor of three dimensions, all of the innermost.
__device__ __forceinline__ void copy_block(uint32_t target, const CUtensorMap* map, uint32_t barrier, int row, int line) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(target),
               "l"(map), "r"(barrier), "r"(0), "r"(row), "r"(line)
               : "memory");
}
// The same of five dimensions, all of the second and third: rows that a map puts together, of the matrix number `index`.
__device__ __forceinline__ void copy_rows(uint32_t target, const CUtensorMap* map, uint32_t barrier, int k, int group, int index) {
  asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %4, %5, %6}], [%2];" ::"r"(target),
               "l"(map), "r"(barrier), "r"(k), "r"(0), "r"(group), "r"(index)
               : "memory");
}
// Neighbouring bytes to this block: a multiple of 16, as both addresses.
__device__ __forceinline__ void copy_line(uint32_t target, const void* source, int bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(target), "l"(source), "r"(bytes),
               "r"(barrier)
               : "memory");
}

// Sixteen bytes, by this thread.
__device__ __forceinline__ void copy_piece(uint32_t target, const void* source) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target), "l"(source) : "memory");
}
// At the barrier, once the pieces that this thread has asked for are there.
__device__ __forceinline__ void arrive_when_copied(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// To a block of the cluster, whose barrier is told.
__device__ __forceinline__ void store_remote(uint32_t address, uint32_t barrier, int rank, const float* v) {
  asm volatile(
      "{ .reg .b32 target, remote;\n"
      "mapa.shared::cluster.u32 target, %0, %2;\n"
      "mapa.shared::cluster.u32 remote, %1, %2;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [target], {%3, %4, %5, %6}, [remote]; }\n" ::"r"(address),
      "r"(barrier), "r"(rank), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3])
      : "memory");
}
__device__ __forceinline__ float4 load_shared(uint32_t address) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(address));
  return v;
}
__device__ __forceinline__ float load_word(uint32_t address) {
  float v;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(address));
  return v;
}
__device__ __forceinline__ float2 load_pair(uint32_t address) {
  float2 v;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address));
  return v;
}
__device__ __forceinline__ void clear_shared(uint32_t address) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(address), "r"(0) : "memory");
}
// What this thread wrote to shared memory, to wgmma of any thread behind the next barrier.
__device__ __forceinline__ void publish_to_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Registers of each thread of a warpgroup, from those that it gives up or that others gave up.
template <int COUNT>
__device__ __forceinline__ void keep_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT)); }
template <int COUNT>
__device__ __forceinline__ void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT)); }
