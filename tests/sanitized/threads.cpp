// Threads that share out work, and ranks that exchange, to be compiled with a sanitizer for races (tests/test_sanitized.py).
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "../../kernels/cpu/exchange.cpp"
#include "../../kernels/cpu/pool.h"

namespace {

void check(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "%s\n", what);
  std::exit(1);
}

// What each item writes is read by whoever has shared it out, without a lock of its own.
void share_many(long jobs) {
  for (long job = 0; job < jobs; job++) {
    const long count = 1 + job * 7 % 50;
    std::vector<long> made(count);
    share(count, 1 + int(job % 5), [&](long item) { made[item] += job + item; });
    for (long item = 0; item < count; item++) check(made[item] == job + item, "an item was not computed once");
    if (job % 64 == 0) usleep(1000);  // helpers fall asleep
  }
}

constexpr long RANKS = 3, PIECE = 256;
alignas(64) uint8_t memory[HEAD_BYTES * (1 + RANKS) + 2 * RANKS * PIECE];

void exchange_many(long rank, long jobs) {
  Exchange own{memory, rank, RANKS, PIECE, rank * 50, 600 * SECOND, -1, 0, 0};
  for (long job = 0; job < jobs; job++) {
    std::vector<float> x(1 + job * 37 % 300, float(rank + job));
    check(foretoken_all_reduce(&own, x.data(), long(x.size()), 0) == 0, "a sum that failed");
    for (const float value : x) check(value == float(3 * job + 3), "another sum");
    std::vector<uint8_t> source(2 + job * 101 % 900, uint8_t(rank)), out(RANKS * (source.size() - 1));
    check(foretoken_gather(&own, source.data(), long(source.size()), 1, long(source.size()), out.data()) == 0, "a gathering that failed");
    for (size_t i = 0; i < out.size(); i++) check(out[i] == i / (source.size() - 1), "another rank's bytes");
  }
}

}  // namespace

int main() {
  std::vector<std::thread> all;
  for (int number = 0; number < 2; number++) all.emplace_back(share_many, 1500);
  for (long rank = 0; rank < RANKS; rank++) all.emplace_back(exchange_many, rank, 200);
  for (std::thread& own : all) own.join();
  std::puts("done");
}
