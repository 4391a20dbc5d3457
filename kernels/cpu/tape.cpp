// Calls that were noted (kernels/tape.py), made one after the other.
#include <algorithm>
#include <chrono>
#include <cstring>

#include "kernels.h"

namespace {

enum Kind { LINEAR, APPEND_KV, ATTENTION, RMS_NORM, NORM_HEADS, COPY, GATHER, SCATTER, EQUALS, FILL, LIKELIEST, NOTE_DRAFT, APPEND_DRAFT, CLOCK, STOP, ALL_REDUCE, GATHER_PARTS };

struct Call {
  int64_t kind;
  int64_t own[11];  // the function's arguments in order, without `threads`: addresses, integers, floats by their bits
};

float as_float(int64_t bits) {
  const int32_t low = int32_t(bits);
  float value;
  std::memcpy(&value, &low, sizeof value);
  return value;
}

template <class Type>
Type* at(int64_t address) {
  return reinterpret_cast<Type*>(address);
}

// Rows of `width` floats from one place to another; places of rows, where there are any, must be below `limit`. false: one is not.
bool move(
    float* to, long to_stride, const int64_t* to_places, const float* from, long from_stride, const int64_t* from_places, long rows, long width,
    long limit) {
  for (long r = 0; r < rows; r++) {
    const long there = to_places ? to_places[r] : r, here = from_places ? from_places[r] : r;
    if ((to_places || from_places) && uint64_t(to_places ? there : here) >= uint64_t(limit)) return false;
    std::memcpy(to + there * to_stride, from + here * from_stride, width * sizeof(float));
  }
  return true;
}

enum Outcome { FAILED, DONE, ENOUGH };

Outcome play(const Call& call, int threads) {
  const int64_t* a = call.own;
  switch (call.kind) {
    case LINEAR:
      foretoken_linear(
          at<Weight>(a[0]), at<float>(a[1]), a[2], a[3], at<float>(a[4]), as_float(a[5]), at<float>(a[6]), a[7], int(a[8]), threads);
      return DONE;
    case APPEND_KV:
      return foretoken_append_kv(
          at<float>(a[0]), a[1], a[2], a[3], at<float>(a[4]), at<float>(a[5]), at<int32_t>(a[6]), at<int64_t>(a[7]), a[8], at<Cache>(a[9]),
          at<float>(a[10]))
                 ? FAILED
                 : DONE;
    case ATTENTION:
      foretoken_attention(at<float>(a[0]), a[1], at<Requests>(a[2]), at<Cache>(a[3]), a[4], as_float(a[5]), at<float>(a[6]), threads);
      return DONE;
    case RMS_NORM:
      foretoken_rms_norm(at<float>(a[0]), a[1], a[2], at<float>(a[3]), as_float(a[4]), at<float>(a[5]));
      return DONE;
    case NORM_HEADS:
      foretoken_norm_heads(at<float>(a[0]), a[1], a[2], a[3], a[4], at<float>(a[5]), as_float(a[6]));
      return DONE;
    case COPY:  // to, its stride, from, its stride, rows, width
      return move(at<float>(a[0]), a[1], nullptr, at<float>(a[2]), a[3], nullptr, a[4], a[5], 0) ? DONE : FAILED;
    case GATHER:  // to, its stride, from, its stride, places, rows, width, limit
      return move(at<float>(a[0]), a[1], nullptr, at<float>(a[2]), a[3], at<int64_t>(a[4]), a[5], a[6], a[7]) ? DONE : FAILED;
    case SCATTER:
      return move(at<float>(a[0]), a[1], at<int64_t>(a[4]), at<float>(a[2]), a[3], nullptr, a[5], a[6], a[7]) ? DONE : FAILED;
    case EQUALS:  // which integers, how many, the value, where
      for (long i = 0; i < a[1]; i++) at<bool>(a[3])[i] = at<int64_t>(a[0])[i] == a[2];
      return DONE;
    case FILL:  // to, its stride, which rows, how many there are, width, the value
      for (long r = 0; r < a[3]; r++)
        if (at<bool>(a[2])[r]) std::fill_n(at<float>(a[0]) + r * a[1], a[4], as_float(a[5]));
      return DONE;
    case LIKELIEST:
      foretoken_likeliest(at<float>(a[0]), a[1], a[2], at<float>(a[3]), at<int32_t>(a[4]));
      return DONE;
    case NOTE_DRAFT:
      foretoken_note_draft(
          at<float>(a[0]), a[1], at<int32_t>(a[2]), a[3], a[4], at<float>(a[5]), at<int32_t>(a[6]), at<float>(a[7]), at<float>(a[8]));
      return DONE;
    case APPEND_DRAFT:
      foretoken_append_draft(
          at<Table>(a[0]), at<int32_t>(a[1]), a[2], at<int32_t>(a[3]), at<int32_t>(a[4]), a[5], at<int64_t>(a[6]), at<int32_t>(a[7]));
      return DONE;
    case CLOCK: {  // nanoseconds, where, behind how many there are
      const auto now = std::chrono::steady_clock::now().time_since_epoch();
      at<int64_t>(a[0])[0] = a[1];
      at<int64_t>(a[0])[a[1]] = std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
      return DONE;
    }
    case STOP:  // numbers, how many, and what their sum is less than where it is enough
      return foretoken_sum(at<float>(a[0]), a[1]) < *at<float>(a[2]) ? ENOUGH : DONE;
    case ALL_REDUCE:
      return foretoken_all_reduce(at<Exchange>(a[0]), at<void>(a[1]), a[2], int(a[3])) ? FAILED : DONE;
    case GATHER_PARTS:
      return foretoken_gather(at<Exchange>(a[0]), at<uint8_t>(a[1]), a[2], a[3], a[4], at<uint8_t>(a[5])) ? FAILED : DONE;
  }
  return FAILED;
}

}  // namespace

extern "C" {

// 0, or the number of the call, from 1 on, that was given a place which is none, or whose exchange failed.
int64_t foretoken_play(const Call* calls, int64_t count, int threads) {
  for (long i = 0; i < count; i++) {
    const Outcome outcome = play(calls[i], threads);
    if (outcome == FAILED) return i + 1;
    if (outcome == ENOUGH) break;
  }
  return 0;
}
}
