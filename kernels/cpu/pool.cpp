#include "pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>
#include <mutex>
#include <system_error>
#include <thread>

#include "relax.h"

namespace {

constexpr int SPINS = 4000;        // looks before a helper sleeps: some 0.1 ms, in which a step's next product comes
constexpr int PATIENT_SPINS = 256;  // before who waits for a helper lets others run

struct Pool {
  std::mutex taken;                 // by the thread whose job it is
  std::atomic<uint32_t> number{0};  // odd: a job is open
  std::atomic<int> inside{0};       // helpers that may look at the job
  std::atomic<int> asleep{0};
  std::atomic<long> next{0};
  Work work = nullptr;
  void* context = nullptr;
  long count = 0;
  int helpers = 0;  // that the job wants
  int started = 0;
};

std::atomic<Pool*> pool{nullptr};

void help(Pool& own, int index) {
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, nullptr);  // they are for threads that Python knows
  for (uint32_t seen = 0;;) {
    uint32_t now = own.number.load();
    for (int spins = 0; now == seen && spins < SPINS; spins++) {
      relax();
      now = own.number.load();
    }
    if (now == seen) {
      own.asleep.fetch_add(1);
      syscall(SYS_futex, reinterpret_cast<uint32_t*>(&own.number), FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);  // unless it is another by now
      own.asleep.fetch_sub(1);
      continue;
    }
    seen = now;
    if (now % 2 == 0) continue;
    // Either it is seen here that the job is over, or whoever ends it sees this helper, and waits for it.
    own.inside.fetch_add(1);
    if (own.number.load() == now && index < own.helpers) {
      for (long item; (item = own.next.fetch_add(1)) < own.count;) own.work(own.context, item);
    }
    own.inside.fetch_sub(1);
  }
}

// Of a process that was forked none of the threads are left.
void forget() { pool.store(nullptr); }

Pool& find() {
  static std::once_flag once;
  std::call_once(once, [] { pthread_atfork(nullptr, nullptr, forget); });
  Pool* own = pool.load();
  if (own == nullptr) {
    Pool* made = new Pool;  // for good: helpers outlast what ends with the process
    if (pool.compare_exchange_strong(own, made)) return *made;
    delete made;
  }
  return *own;
}

}  // namespace

void share_out(long count, int threads, Work work, void* context) {
  Pool& own = find();
  std::unique_lock<std::mutex> lock(own.taken, std::try_to_lock);
  if (!lock.owns_lock()) {  // they help another thread
    for (long item = 0; item < count; item++) work(context, item);
    return;
  }
  try {
    for (; own.started < threads - 1; own.started++) std::thread(help, std::ref(own), own.started).detach();
  } catch (const std::system_error&) {
    own.started = INT_MAX;  // no more of them are to be had
  }
  own.work = work;
  own.context = context;
  own.count = count;
  own.helpers = threads - 1;
  own.next.store(0);
  own.number.fetch_add(1);
  if (own.asleep.load() > 0) syscall(SYS_futex, reinterpret_cast<uint32_t*>(&own.number), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
  for (long item; (item = own.next.fetch_add(1)) < count;) work(context, item);
  own.number.fetch_add(1);
  for (int spins = 0; own.inside.load() > 0; spins++) spins < PATIENT_SPINS ? relax() : void(sched_yield());
}
