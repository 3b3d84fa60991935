#include "library/exit_guard.h"

#include <link.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <vector>

namespace kv::nixl {

namespace {

// How long an exit waits for the agents' threads: a slice and the destruction of an agent take 150 ms.
constexpr auto kExitPatience = std::chrono::milliseconds(2000);

struct Running {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<std::shared_ptr<Stoppable>> threads;
};

// Leaked on purpose: used after static destructors have begun.
Running& running() {
  static auto* instance = new Running;
  return *instance;
}

int count_route_library(struct dl_phdr_info* info, size_t, void* count) {
  if (info->dlpi_name != nullptr && strstr(info->dlpi_name, "libnl-route-3") != nullptr) ++*static_cast<int*>(count);
  return 0;
}

bool destructors_would_crash() {
  int count = 0;
  dl_iterate_phdr(count_route_library, &count);
  return count > 1;
}

void leave([[maybe_unused]] int status, void*) {
  const bool stopped = stop_all();
  if (stopped && !destructors_would_crash()) return;
  fflush(nullptr);
  _exit(status);
}

}  // namespace

bool stop_all() {
  Running& all = running();
  std::unique_lock lock(all.mutex);
  const auto threads = all.threads;
  lock.unlock();
  for (const auto& thread : threads) thread->stop();
  lock.lock();
  return all.changed.wait_for(lock, kExitPatience, [&] { return all.threads.empty(); });
}

void await_end(const Stoppable* thread) {
  Running& all = running();
  std::unique_lock lock(all.mutex);
  const bool ended = all.changed.wait_for(lock, kExitPatience, [&] {
    return std::none_of(all.threads.begin(), all.threads.end(), [&](const auto& entry) { return entry.get() == thread; });
  });
  lock.unlock();
  // What such a thread has loaded since the guard was set has destructors that would run before it, under the thread's feet: set it again.
  if (!ended) guard_exit();
}

void guard_exit() {
#ifdef __GLIBC__
  // on_exit, unlike atexit, is told the status. Handlers run last in, first out, so this one precedes the destructors
  // of whatever was loaded before this call.
  on_exit(leave, nullptr);
#endif
}

void enter_running(std::shared_ptr<Stoppable> thread) {
  Running& all = running();
  const std::lock_guard lock(all.mutex);
  all.threads.push_back(std::move(thread));
}

void leave_running(const Stoppable* thread) {
  Running& all = running();
  const std::lock_guard lock(all.mutex);
  std::erase_if(all.threads, [&](const auto& entry) { return entry.get() == thread; });
  all.changed.notify_all();
}

}  // namespace kv::nixl
