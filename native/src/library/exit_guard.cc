#include "library/exit_guard.h"

#include <link.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <algorithm>

#include "library/monotonic_condition.h"

namespace kv::nixl {

namespace {

// For all agents together. Posting a slice and destroying an agent take 150 ms.
constexpr auto kExitTimeout = milliseconds(2000);

struct RunningThreads {
  std::mutex mutex;
  MonotonicCondition changed;
  vector<shared_ptr<StoppableThread>> threads;
};

// Never destroyed, since it is used after static destructors have begun.
RunningThreads& running() {
  static auto* instance = new RunningThreads;
  return *instance;
}

int count_route_library(struct dl_phdr_info* info, size_t, void* count) {
  if (info->dlpi_name != nullptr && strstr(info->dlpi_name, "libnl-route-3") != nullptr)
    ++*static_cast<int*>(count);
  return 0;
}

bool destructors_would_crash() {
  int count = 0;
  dl_iterate_phdr(count_route_library, &count);
  return count > 1;
}

[[maybe_unused]] void on_process_exit(int status, void*) {
  const bool stopped = stop_all_threads();
  if (stopped && !destructors_would_crash()) return;
  fflush(nullptr);
  _exit(status);
}

}  // namespace

bool stop_all_threads() {
  RunningThreads& all = running();
  std::unique_lock lock(all.mutex);
  const auto threads = all.threads;
  lock.unlock();
  for (const auto& thread : threads) thread->stop();
  lock.lock();
  return all.changed.wait_for(lock, kExitTimeout, [&] { return all.threads.empty(); });
}

void await_thread_end(const StoppableThread* thread) {
  RunningThreads& all = running();
  std::unique_lock lock(all.mutex);
  const bool ended = all.changed.wait_for(lock, kExitTimeout, [&] {
    return std::none_of(all.threads.begin(), all.threads.end(),
                        [&](const auto& entry) { return entry.get() == thread; });
  });
  lock.unlock();
  // Otherwise newly loaded libraries' destructors would precede the handler, while the thread uses
  // them.
  if (!ended) install_exit_handler();
}

void install_exit_handler() {
#ifdef __GLIBC__
  // Passes the status, unlike atexit. Handlers run in reverse order, so this one precedes the
  // destructors of libraries loaded before.
  on_exit(on_process_exit, nullptr);
#endif
}

void add_running_thread(shared_ptr<StoppableThread> thread) {
  RunningThreads& all = running();
  const lock_guard lock(all.mutex);
  all.threads.push_back(std::move(thread));
}

void remove_running_thread(const StoppableThread* thread) {
  RunningThreads& all = running();
  const lock_guard lock(all.mutex);
  std::erase_if(all.threads, [&](const auto& entry) { return entry.get() == thread; });
  all.changed.notify_all();
}

}  // namespace kv::nixl
