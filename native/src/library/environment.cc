#include "library/environment.h"

#include <dirent.h>
#include <stdlib.h>

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

}  // namespace

Variables prepare_environment(const Variables& wanted) {
  for (const auto& [name, value] : wanted) {
    // A needless write would only endanger threads that read the environment.
    const char* now = getenv(name.c_str());
    if (now == nullptr || value != now) setenv(name.c_str(), value.c_str(), 1);
  }
  // Bounds UCX's registration cache, which grows without limit otherwise. vLLM sets the same value before it imports NIXL.
  Variables defaults{{"UCX_RCACHE_MAX_UNRELEASED", "1024"}};
  // UCX tests its hooks of memory events by growing and shrinking the heap with sbrk. If another thread's malloc calls sbrk in between, UCX
  // cuts off a page that is in use, and V8 crashes. The events only serve caches that memory registered by hand does not need.
  defaults.emplace_back("UCX_MEM_EVENTS", "n");
  // UCX logs to stdout by default, which would mix with the program's own output.
  defaults.emplace_back("UCX_LOG_FILE", "stderr");
  // Without an InfiniBand device UCX's module for it is useless, and the libraries that it loads crash at exit.
  if (!has_infiniband()) defaults.emplace_back("UCX_MODULES", "^ib");
  Variables set;
  for (const auto& [name, value] : defaults) {
    if (getenv(name.c_str()) == nullptr && setenv(name.c_str(), value.c_str(), 0) == 0) set.emplace_back(name, value);
  }
  return set;
}

}  // namespace kv::nixl
