#pragma once

#include <errno.h>
#include <pthread.h>
#include <time.h>

#include "library/std_names.h"

namespace kv::nixl {

// Timed waits follow the monotonic clock. Before glibc 2.30 std::condition_variable follows the
// wall clock: if that is set back by an hour, a sleep lasts an hour longer. The published addon
// supports glibc 2.28.
class MonotonicCondition {
 public:
  MonotonicCondition() {
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&condition_, &attributes);
    pthread_condattr_destroy(&attributes);
  }
  ~MonotonicCondition() { pthread_cond_destroy(&condition_); }
  MonotonicCondition(const MonotonicCondition&) = delete;
  MonotonicCondition& operator=(const MonotonicCondition&) = delete;

  void notify_one() { pthread_cond_signal(&condition_); }
  void notify_all() { pthread_cond_broadcast(&condition_); }

  // Waits with the lock released. Returns `holds()`.
  template <typename Holds>
  bool wait_for(std::unique_lock<std::mutex>& lock, microseconds longest, Holds holds) {
    timespec until{};
    clock_gettime(CLOCK_MONOTONIC, &until);
    const auto fraction = nanoseconds(longest % seconds(1)).count() + until.tv_nsec;
    until.tv_sec += std::chrono::duration_cast<seconds>(longest).count() + fraction / 1'000'000'000;
    until.tv_nsec = fraction % 1'000'000'000;
    while (!holds()) {
      if (pthread_cond_timedwait(&condition_, lock.mutex()->native_handle(), &until) == ETIMEDOUT)
        return holds();
    }
    return true;
  }

 private:
  pthread_cond_t condition_;
};

}  // namespace kv::nixl
