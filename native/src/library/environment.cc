#include "library/environment.h"

#include <dirent.h>
#include <stdlib.h>

#include <algorithm>
#include <mutex>

namespace kv::nixl {

namespace {

bool has_infiniband() {
  DIR* directory = opendir("/sys/class/infiniband");
  if (directory == nullptr) return false;
  bool found = false;
  while (const dirent* entry = readdir(directory)) found = found || entry->d_name[0] != '.';
  closedir(directory);
  return found;
}

// Never destroyed: agents' threads may still use it while the process exits.
std::shared_mutex& environment_mutex() {
  static auto* mutex = new std::shared_mutex;
  return *mutex;
}

// NIXL's defaults.
Variables defaults() {
  // Bounds UCX's registration cache, which grows without limit otherwise. vLLM sets the same value before it imports NIXL.
  Variables variables{{"UCX_RCACHE_MAX_UNRELEASED", "1024"}};
  // UCX tests its hooks of memory events by growing and shrinking the heap with sbrk. If another thread's malloc calls sbrk in between, UCX
  // cuts off a page that is in use, and V8 crashes. The events only serve caches that memory registered by hand does not need.
  variables.emplace_back("UCX_MEM_EVENTS", "n");
  // UCX copies one piece per turn of its progress by default, so that many processes can be served in between. A slice takes 1 to 3 ms whatever this is,
  // and with 64 pieces per turn blocks of 4 KiB are copied 1.15 times as fast, of 16 KiB 1.08 times.
  variables.emplace_back("UCX_CMA_TX_QUOTA", "64");
  // UCX logs to stdout by default, which would mix with the program's own output.
  variables.emplace_back("UCX_LOG_FILE", "stderr");
  // Without an InfiniBand device UCX's module for it is useless, and the libraries that it loads crash at exit.
  if (!has_infiniband()) variables.emplace_back("UCX_MODULES", "^ib");
  return variables;
}

}  // namespace

std::shared_lock<std::shared_mutex> reading_environment() { return std::shared_lock(environment_mutex()); }

std::optional<Variables> prepare_environment(const Variables& wanted) {
  Variables to_set;
  for (const auto& variable : wanted) {
    const char* now = getenv(variable.first.c_str());
    if (now == nullptr || variable.second != now) to_set.push_back(variable);
  }
  Variables unset;
  for (const auto& variable : defaults()) {
    const auto named = [&](const auto& other) { return other.first == variable.first; };
    if (getenv(variable.first.c_str()) == nullptr && std::ranges::none_of(to_set, named)) unset.push_back(variable);
  }
  if (to_set.empty() && unset.empty()) return Variables();
  const std::unique_lock lock(environment_mutex(), std::try_to_lock);
  if (!lock.owns_lock()) return std::nullopt;
  for (const auto& [name, value] : to_set) setenv(name.c_str(), value.c_str(), 1);
  std::erase_if(unset, [](const auto& variable) { return setenv(variable.first.c_str(), variable.second.c_str(), 0) != 0; });
  return unset;
}

}  // namespace kv::nixl
