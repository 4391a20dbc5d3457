// The library's functions that a tape (tape.cpp) calls. Python's side: kernels/panels.py, cpu_attention.py, cpu_rows.py,
// cpu_exchange.py.
#pragma once
#include <cstdint>

struct Weight;
struct Cache;
struct Exchange;
struct Requests;
struct Table;

extern "C" {

void foretoken_linear(
    const Weight* weight, const float* x, int64_t rows, int64_t x_stride, const float* norm, float eps, float* out, int64_t out_stride, int mode,
    int threads);
int foretoken_append_kv(
    const float* heads, int64_t tokens, int64_t num_heads, int64_t stride, const float* cos, const float* sin, const int32_t* positions,
    const int64_t* slots, int64_t num_slots, const Cache* cache, float* queries);
void foretoken_attention(
    const float* query, int64_t num_heads, const Requests* requests, const Cache* cache, int64_t window, float scale, float* out, int threads);
int64_t foretoken_all_reduce(Exchange* own, void* x, int64_t count, int is_half);
int64_t foretoken_gather(Exchange* own, const uint8_t* source, int64_t num_bytes, int64_t first, int64_t last, uint8_t* out);
void foretoken_likeliest(const float* logits, int64_t rows, int64_t size, float* chances, int32_t* places);
void foretoken_note_draft(
    float* kept, int64_t width, const int32_t* indices, int64_t batch, int64_t number, const float* chances, const int32_t* ended, const float* trust,
    float* together);
float foretoken_sum(const float* numbers, int64_t count);
void foretoken_append_draft(
    const Table* table, const int32_t* fields, int64_t batch, const int32_t* chosen, const int32_t* skipped, int64_t step, int64_t* packed,
    int32_t* seq_lens);
void foretoken_norm_heads(float* heads, int64_t tokens, int64_t stride, int64_t count, int64_t size, const float* weight, float eps);
void foretoken_rms_norm(const float* x, int64_t rows, int64_t size, const float* weight, float eps, float* out);
}
