#include "library/environment.h"

#include <dirent.h>
#include <stdlib.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <initializer_list>
#include <sstream>

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

// UCX warns of variables of transports that it does not use. `transports` is UCX_TLS: allowed
// names, or forbidden ones after a ^.
bool allows(const string& transports, std::initializer_list<string_view> own) {
  const bool excludes = transports.starts_with('^');
  std::istringstream names(excludes ? transports.substr(1) : transports);
  bool named = false;
  for (string name; std::getline(names, name, ',');) {
    named = named || std::ranges::find(own, name) != own.end() || (name == "all" && !excludes);
  }
  return transports.empty() || named != excludes;
}

// CMA uses this system call.
bool reads_processes() {
  char from = 1;
  char to = 0;
  const iovec local{&to, 1};
  const iovec remote{&from, 1};
  return process_vm_readv(getpid(), &local, 1, &remote, 1, 0) == 1;
}

// Never destroyed: agents' threads may use it while the process exits.
std::shared_mutex& environment_mutex() {
  static auto* mutex = new std::shared_mutex;
  return *mutex;
}

// NIXL's defaults. `transports` is UCX_TLS.
Variables defaults(const string& transports) {
  // Bounds UCX's registration cache, as vLLM does before it imports NIXL.
  Variables variables{{"UCX_RCACHE_MAX_UNRELEASED", "1024"}};
  // UCX tests its memory hooks with sbrk. If another thread's malloc calls sbrk meanwhile, UCX
  // frees a used page, and V8 crashes. Explicit registrations need no such events.
  variables.emplace_back("UCX_MEM_EVENTS", "n");
  // By default UCX copies one piece per turn, to serve many processes. A slice takes 1 to 3 ms
  // anyway. 64 pieces copy blocks of 4 KiB 1.15 times as fast, of 16 KiB 1.08 times.
  if (reads_processes() && allows(transports, {"cma", "sm", "shm"}))
    variables.emplace_back("UCX_CMA_TX_QUOTA", "64");
  // Without NVLink UCX reads another process's GPU memory through host memory and TCP, at a
  // thousandth of the speed, and aborts that process if the reader dies meanwhile (UCX 1.23). CUDA
  // IPC avoids this.
  if (access("/dev/nvidia0", F_OK) == 0 && allows(transports, {"cuda", "cuda_ipc"}))
    variables.emplace_back("UCX_CUDA_IPC_ENABLE_GET_ZCOPY", "on");
  // UCX would take SIGHUP, which is the host program's.
  variables.emplace_back("UCX_DEBUG_SIGNO", "0");
  // UCX's default is stdout, the program's own.
  variables.emplace_back("UCX_LOG_FILE", "stderr");
  // Without an InfiniBand device UCX's module is useless, and its libraries crash at exit.
  if (!has_infiniband()) variables.emplace_back("UCX_MODULES", "^ib");
  return variables;
}

}  // namespace

std::shared_lock<std::shared_mutex> reading_environment() {
  return std::shared_lock(environment_mutex());
}

optional<Variables> prepare_environment(const Variables& wanted) {
  const char* const set_transports = getenv("UCX_TLS");
  string transports = set_transports == nullptr ? "" : set_transports;
  Variables to_set;
  for (const auto& variable : wanted) {
    const char* now = getenv(variable.first.c_str());
    if (now == nullptr || variable.second != now) to_set.push_back(variable);
    if (variable.first == "UCX_TLS") transports = variable.second;
  }
  Variables unset;
  for (const auto& variable : defaults(transports)) {
    const auto named = [&](const auto& other) { return other.first == variable.first; };
    if (getenv(variable.first.c_str()) == nullptr && std::ranges::none_of(to_set, named))
      unset.push_back(variable);
  }
  if (to_set.empty() && unset.empty()) return Variables();
  const std::unique_lock lock(environment_mutex(), std::try_to_lock);
  if (!lock.owns_lock()) return nullopt;
  for (const auto& [name, value] : to_set) setenv(name.c_str(), value.c_str(), 1);
  std::erase_if(unset, [](const auto& variable) {
    return setenv(variable.first.c_str(), variable.second.c_str(), 0) != 0;
  });
  return unset;
}

}  // namespace kv::nixl
