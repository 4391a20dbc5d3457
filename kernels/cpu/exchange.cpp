// Exchanges between the ranks of one host, by memory that all of them see (kernels/cpu_exchange.py).
//
// Each rank has room for two pieces. It writes one, says its number, waits until all others have said theirs, and reads them. Nobody says a number
// before it has read the pieces of the number before: whoever has seen all say n - 1 may write over piece n - 2.
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstring>

#include "kernels.h"
#include "relax.h"

namespace {

constexpr int64_t NAP = 50'000'000;           // nanoseconds of a sleep, after which it looks whether all is over
constexpr int64_t SECOND = 1'000'000'000;
constexpr long BLOCK = 512;                   // values that are added at a time: they stay in the nearest cache
constexpr long HEAD_BYTES = 64;               // kernels/cpu_exchange.py

// What a rank says. By its owner alone, except `asleep`.
struct alignas(64) Place {
  std::atomic<uint32_t> number;  // of its newest piece
  std::atomic<uint32_t> asleep;  // ranks that sleep until that changes
  uint64_t what[2];              // of its pieces: which exchange, and bytes of the whole
};

static_assert(sizeof(Place) == HEAD_BYTES && std::atomic<uint32_t>::is_always_lock_free, "other processes see them");

}  // namespace

// One rank's end; as in kernels/cpu_exchange.py.
struct Exchange {
  uint8_t* memory;  // all ranks': whether it is over, places, pieces
  int64_t rank, size, piece_bytes;
  int64_t spins;   // looks before it sleeps
  int64_t limit;   // nanoseconds to wait for another rank
  int64_t failed;  // the rank for which an exchange failed
  int64_t outcome;  // of the last one
  uint32_t number;

  std::atomic<uint32_t>& is_over() const { return *reinterpret_cast<std::atomic<uint32_t>*>(memory); }
  Place& place(long r) const { return reinterpret_cast<Place*>(memory + HEAD_BYTES)[r]; }
  uint8_t* piece(long r) const { return memory + HEAD_BYTES * (1 + size) + (2 * r + number % 2) * piece_bytes; }
};

namespace {

enum Outcome : int64_t { DONE, OVER, LATE, DIFFERENT };
enum Kind : uint64_t { SUM, GATHER };

int64_t now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * SECOND + time.tv_nsec;
}

void wake(Place& place) { syscall(SYS_futex, &place.number, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }

void end(const Exchange& own) {
  own.is_over().store(1);
  for (long r = 0; r < own.size; r++) wake(own.place(r));
}

void say(const Exchange& own, uint64_t what) {
  Place& place = own.place(own.rank);
  place.what[own.number % 2] = what;
  place.number.store(own.number);  // before it looks who sleeps, as those look at the number once they are counted: one sees the other
  if (place.asleep.load() > 0) wake(place);
}

bool has_come(const Place& place, uint32_t number) { return int32_t(place.number.load() - number) >= 0; }  // numbers begin again after 2^32

Outcome await(const Exchange& own, Place& place) {
  for (long spins = 0; spins < own.spins; spins++, relax())
    if (has_come(place, own.number)) return DONE;
  const int64_t begin = now();
  for (;;) {
    place.asleep.fetch_add(1);
    const uint32_t seen = place.number.load();
    if (int32_t(seen - own.number) < 0 && !own.is_over().load()) {
      const timespec nap{0, NAP};
      syscall(SYS_futex, &place.number, FUTEX_WAIT, seen, &nap, nullptr, 0);  // unless it is another by now
    }
    place.asleep.fetch_sub(1);
    if (has_come(place, own.number)) return DONE;
    if (own.is_over().load()) return OVER;
    if (now() - begin > own.limit) return LATE;
  }
}

// Every rank's `source` goes to all, piece by piece: read(begin, size) is called while those that begin there lie in place.
template <class Read>
Outcome exchange(Exchange& own, Kind kind, const uint8_t* source, int64_t num_bytes, Read read) {
  const uint64_t what = uint64_t(kind) << 56 | uint64_t(num_bytes);
  Outcome outcome = own.is_over().load() ? OVER : DONE;
  for (int64_t begin = 0; outcome == DONE && begin < num_bytes; begin += own.piece_bytes) {
    const int64_t size = std::min(own.piece_bytes, num_bytes - begin);
    own.number++;
    std::memcpy(own.piece(own.rank), source + begin, size);
    say(own, what);
    for (long r = 0; outcome == DONE && r < own.size; r++) {
      if (r == own.rank) continue;
      outcome = await(own, own.place(r));
      if (outcome == DONE && own.place(r).what[own.number % 2] != what) outcome = DIFFERENT;
      if (outcome != DONE) own.failed = r;
    }
    if (outcome == DONE) read(begin, size);
  }
  if (outcome == LATE || outcome == DIFFERENT) end(own);
  own.outcome = outcome;
  return outcome;
}

float widen(float value) { return value; }

float widen(uint16_t bits) {
  const uint32_t wide = uint32_t(bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}

void narrow(float value, float* out) { *out = value; }

// To the nearest bfloat16, of two to the even one; what is no number stays none.
void narrow(float value, uint16_t* out) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  *out = value == value ? uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16) : uint16_t(0x7fc0);
}

// Of ranks in their order, in float32, rounded once: the same bits on all of them.
template <class Value>
Outcome add_up(Exchange& own, Value* x, int64_t count) {
  const auto read = [&](int64_t begin, int64_t num_bytes) {
    const long first = begin / sizeof(Value), size = num_bytes / sizeof(Value);
    for (long i = 0; i < size; i += BLOCK) {
      float total[BLOCK];
      const long width = std::min(BLOCK, size - i);
      for (long r = 0; r < own.size; r++) {
        const Value* part = reinterpret_cast<const Value*>(own.piece(r)) + i;
        if (r == 0)
          for (long k = 0; k < width; k++) total[k] = widen(part[k]);
        else
          for (long k = 0; k < width; k++) total[k] += widen(part[k]);
      }
      for (long k = 0; k < width; k++) narrow(total[k], x + first + i + k);
    }
  };
  return exchange(own, SUM, reinterpret_cast<const uint8_t*>(x), count * sizeof(Value), read);
}

}  // namespace

extern "C" {

// x [count], in place, of every rank: the sum of all. Float32, or bfloat16.
int64_t foretoken_all_reduce(Exchange* own, void* x, int64_t count, int is_half) {
  return is_half ? add_up(*own, static_cast<uint16_t*>(x), count) : add_up(*own, static_cast<float*>(x), count);
}

// Bytes [first, last) of what each rank has, into out [size, last - first]; source [num_bytes], as much on every rank, which may differ in the rest.
int64_t foretoken_gather(Exchange* own, const uint8_t* source, int64_t num_bytes, int64_t first, int64_t last, uint8_t* out) {
  return exchange(*own, GATHER, source, num_bytes, [&](int64_t begin, int64_t size) {
    const int64_t from = std::max(begin, first), to = std::min(begin + size, last);
    for (long r = 0; from < to && r < own->size; r++) std::memcpy(out + r * (last - first) + from - first, own->piece(r) + from - begin, to - from);
  });
}

// Nobody waits for another rank any more, now or later. From any thread.
void foretoken_end_exchanges(const Exchange* own) { end(*own); }
}
