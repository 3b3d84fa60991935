#include "library/descriptors.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>

#include "library/failure.h"
#include "repairs/repair.h"
#include "repairs/replaced_calls.h"

namespace kv::nixl {

namespace {

// Ascending.
vector<int> open_descriptors() {
  vector<int> open;
  DIR* const folder = opendir("/proc/self/fd");
  if (folder == nullptr) return open;
  while (const dirent* entry = readdir(folder)) {
    if (entry->d_name[0] == '.') continue;
    const int descriptor = atoi(entry->d_name);
    if (descriptor != dirfd(folder)) open.push_back(descriptor);
  }
  closedir(folder);
  std::ranges::sort(open);
  return open;
}

// What children may inherit. Never freed, since forks read it without a lock.
const vector<int>* inherited = nullptr;

void close_on_exec(unsigned first, unsigned last) {
  if (first > last) return;
#ifndef SYS_close_range
#define SYS_close_range 436
#endif
  constexpr unsigned kCloseOnExec = 4;
  if (syscall(SYS_close_range, first, last, kCloseOnExec) == 0) return;
  // Before Linux 5.11.
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  const auto end = static_cast<unsigned>(std::min<rlim_t>(limit.rlim_cur, 65'536));
  for (unsigned descriptor = first; descriptor <= last && descriptor < end; ++descriptor) {
    const int flags = fcntl(static_cast<int>(descriptor), F_GETFD);
    if (flags >= 0) fcntl(static_cast<int>(descriptor), F_SETFD, flags | FD_CLOEXEC);
  }
}

// Makes only system calls, since it also runs in a fork's child.
void close_all_on_exec() {
  unsigned first = STDERR_FILENO + 1;
  for (const int descriptor : *inherited) {
    close_on_exec(first, static_cast<unsigned>(descriptor) - 1);
    first = static_cast<unsigned>(descriptor) + 1;
  }
  close_on_exec(first, ~0U);
}

// Never destroyed: UCX's threads may use it while the process exits.
std::mutex& reserve_mutex() {
  static auto* const mutex = new std::mutex;
  return *mutex;
}
int reserve = -1;
atomic<uint64_t> refused = 0;

int open_socket(int domain, int type, int protocol) {
  return socket(domain, type | SOCK_CLOEXEC, protocol);
}
int accept_connection(int socket, sockaddr* address, socklen_t* length) {
  return accept4(socket, address, length, SOCK_CLOEXEC);
}

int open_reserve() { return open("/dev/null", O_RDONLY | O_CLOEXEC); }

bool lacks_descriptors(int error) { return error == EMFILE || error == ENFILE; }

// The socket no longer listens. Linux's accept(2) has other errors for one connection or one
// moment: pending network errors, a firewall's, or lacking memory.
bool ends_listener(int error) {
  return error == EBADF || error == EINVAL || error == ENOTSOCK || error == EFAULT;
}

void pause() {
  const timespec pause{.tv_sec = 0, .tv_nsec = 10'000'000};
  nanosleep(&pause, nullptr);
}

}  // namespace

void keep_descriptors_from_children() {
  static std::once_flag once;
  std::call_once(once, [] {
    auto* const kept = new vector<int>;
    for (const int descriptor : open_descriptors()) {
      const int flags = fcntl(descriptor, F_GETFD);
      if (descriptor > STDERR_FILENO && flags >= 0 && (flags & FD_CLOEXEC) == 0)
        kept->push_back(descriptor);
    }
    inherited = kept;
    pthread_atfork(nullptr, nullptr, close_all_on_exec);
  });
}

void close_descriptors_on_exec() {
  if (inherited != nullptr) close_all_on_exec();
}

void require_descriptors(unsigned needed, const char* what) {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return;
  const vector<int> open = open_descriptors();
  // Without /proc, or a descriptor to read it, the next descriptor shows whether the limit is
  // reached.
  const int probe = open_reserve();
  if (probe >= 0) close(probe);
  const bool none = probe < 0 && lacks_descriptors(errno);
  const auto free = none || open.size() >= limit.rlim_cur ? 0 : limit.rlim_cur - open.size();
  if (free >= needed) return;
  throw Failure(
      "KV_TRANSPORT_UNAVAILABLE",
      string(what) + " needs " + to_string(needed) + " file descriptors, and " + to_string(free) +
          " of this process's " + to_string(limit.rlim_cur) + " are free",
      "raise the limit (ulimit -n, LimitNOFILE= of a systemd unit, --ulimit nofile= of a container), or close files, sockets or agents");
}

int accept_or_refuse(int socket, sockaddr* address, socklen_t* length) {
  const int accepted = accept_connection(socket, address, length);
  if (accepted >= 0 || errno == EAGAIN || ends_listener(errno)) return accepted;
  if (lacks_descriptors(errno)) {
    const lock_guard lock(reserve_mutex());
    if (reserve >= 0) close(reserve);
    const int taken = accept4(socket, nullptr, nullptr, SOCK_CLOEXEC);
    if (taken >= 0) {
      close(taken);
      ++refused;
    }
    reserve = open_reserve();
    if (taken < 0 && lacks_descriptors(errno)) pause();
  } else if (errno == ENOMEM || errno == ENOBUFS) {
    pause();
  }
  errno = EAGAIN;
  return -1;
}

void protect_listeners() {
  for (const char* const library : {"libucs", "libuct", "libfabric"})
    replace_calls(library, "socket", reinterpret_cast<void*>(open_socket));
  replace_calls("libfabric", "accept", reinterpret_cast<void*>(accept_connection));
  if (!is_loaded("libucs") || !ucx_listener.wanted()) return;
  const lock_guard lock(reserve_mutex());
  if (reserve < 0) reserve = open_reserve();
  if (replace_calls("libucs", "accept", reinterpret_cast<void*>(accept_or_refuse)))
    ucx_listener.held();
  else
    ucx_listener.failed(
        "UCX's call of accept() is not there, or the system does not let it be replaced");
}

uint64_t take_refused_connections() {
  return refused.load(std::memory_order_relaxed) == 0 ? 0 : refused.exchange(0);
}

}  // namespace kv::nixl
