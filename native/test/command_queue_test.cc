// Tests the sleeps of CommandQueue with a simulated clock, which replaces libc's. Prints each
// failed expectation and exits with their number.
#include "agent/command_queue.h"
#include "expect.h"

#include <errno.h>
#include <time.h>

#include <new>

#include "library/failure.h"

using kv::nixl::CommandQueue;
using std::chrono::microseconds;
using std::chrono::seconds;

namespace {

timespec now{.tv_sec = 5000, .tv_nsec = 0};

// Sleeps, and returns for how long.
microseconds slept(CommandQueue& queue, microseconds longest) {
  const timespec before = now;
  queue.sleep(longest);
  return seconds(now.tv_sec - before.tv_sec) + microseconds((now.tv_nsec - before.tv_nsec) / 1000);
}

}  // namespace

extern "C" {
int clock_gettime(clockid_t, timespec* time) noexcept {
  *time = now;
  return 0;
}
int pthread_cond_timedwait(pthread_cond_t*, pthread_mutex_t*, const timespec* until) {
  now = *until;
  return ETIMEDOUT;
}
}

int main() {
  CommandQueue queue;
  expect(slept(queue, microseconds(500)) == microseconds(500), "a sleep does not last as long as it may");
  queue.wake(microseconds(200));
  expect(slept(queue, seconds(1)) == microseconds(200), "a wake-up does not end a long sleep after its time");
  expect(slept(queue, microseconds(500)) == microseconds(500), "a wake-up ends two sleeps");
  queue.wake(microseconds(200));
  expect(slept(queue, microseconds(20)) == microseconds(200), "a short sleep ends before the wake-up");
  queue.wake(microseconds(200));
  queue.wake();
  expect(slept(queue, seconds(1)) == microseconds(0), "a wake-up at once waits for one that comes later");
  expect(slept(queue, {}) == microseconds(0), "a sleep of no time lasts although nothing is to be waited for");
  queue.wake(microseconds(200));
  expect(slept(queue, {}) == microseconds(200), "a sleep of no time ends before the wake-up");
  queue.wake(microseconds(200));
  queue.push([] {});
  expect(slept(queue, seconds(1)) == microseconds(0), "a command waits for a wake-up");
  queue.run_all();
  int ran = 0;
  queue.push([] { throw std::bad_alloc(); });
  queue.push([&] { ++ran; });
  try {
    queue.run_all();
    expect(false, "what a command throws is kept");
  } catch (const std::bad_alloc&) {
  }
  queue.run_all();
  expect(ran == 1, "a command that throws takes those after it along");
  for (size_t index = 0; index < CommandQueue::kMaxWaiting; ++index) queue.push([&] { ++ran; });
  try {
    queue.push([] {});
    expect(false, "there is no limit of commands");
  } catch (const kv::nixl::Failure& failure) {
    expect(failure.code == "KV_TRANSPORT_UNAVAILABLE", "a command too many has another code");
  }
  queue.push([&] { ++ran; }, true);
  queue.run_all();
  expect(ran == 2 + static_cast<int>(CommandQueue::kMaxWaiting), "not every command is run");
  queue.stop();
  expect(slept(queue, seconds(1)) == microseconds(0), "an end waits for a wake-up");
  return failures;
}
