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
    // Writing what is there already would only endanger threads that are reading.
    const char* now = getenv(name.c_str());
    if (now == nullptr || value != now) setenv(name.c_str(), value.c_str(), 1);
  }
  // vLLM sets the same before it imports NIXL: without a bound UCX's registration cache grows for ever.
  Variables defaults{{"UCX_RCACHE_MAX_UNRELEASED", "1024"}};
  // To test its hooks of memory events, UCX grows and shrinks the heap by sbrk, and when another thread's malloc does the same
  // in between, it cuts off a page that is in use: V8 crashes. The events serve a cache of registrations and one of memory
  // types, and neither is needed for memory that is registered by hand.
  defaults.emplace_back("UCX_MEM_EVENTS", "n");
  // UCX writes its log to stdout by default, where it would mix with what a program prints for others to read.
  defaults.emplace_back("UCX_LOG_FILE", "stderr");
  // Where there is no InfiniBand device, UCX's module for it is of no use, and what it loads crashes at exit.
  if (!has_infiniband()) defaults.emplace_back("UCX_MODULES", "^ib");
  Variables set;
  for (const auto& [name, value] : defaults) {
    if (getenv(name.c_str()) == nullptr && setenv(name.c_str(), value.c_str(), 0) == 0) set.emplace_back(name, value);
  }
  return set;
}

}  // namespace kv::nixl
