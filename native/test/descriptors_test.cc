// Tests accept_or_refuse with errors that this program makes: its own accept4 replaces libc's.
// Prints each failed expectation and exits with their number.
#include "library/descriptors.h"

#include <errno.h>
#include <sys/socket.h>

#include <cstdio>
#include <string>
#include <string_view>

#include "repairs/replaced_calls.h"

namespace {

int failures = 0;
// What the next call answers: an error, or 0 for a connection.
int next_error = 0;
int calls = 0;

void expect(bool holds, const std::string& what) {
  if (holds) return;
  std::fprintf(stderr, "%s\n", what.c_str());
  ++failures;
}

}  // namespace

extern "C" int accept4(int, sockaddr*, socklen_t*, int) {
  ++calls;
  if (next_error == 0) return 7;
  errno = next_error;
  return -1;
}

namespace kv::nixl {
// Its caller, protect_listeners, is not called here.
bool replace_calls(std::string_view, std::string_view, void*) { return true; }
bool is_loaded(std::string_view) { return false; }
}  // namespace kv::nixl

int main() {
  using kv::nixl::accept_or_refuse;
  expect(accept_or_refuse(3, nullptr, nullptr) == 7, "a connection is passed on");

  // Those that accept(2) of Linux names, and a firewall's.
  for (const int error : {EAGAIN, ECONNABORTED, EINTR, EPERM, EPROTO, ENOPROTOOPT, ENETDOWN, ENETUNREACH, EHOSTDOWN, EHOSTUNREACH, ENONET, EOPNOTSUPP, ENOBUFS,
                          ENOMEM, ETIMEDOUT, EMFILE, ENFILE}) {
    next_error = error;
    errno = 0;
    expect(accept_or_refuse(3, nullptr, nullptr) == -1 && errno == EAGAIN, "error " + std::to_string(error) + " leaves the listener");
  }
  for (const int error : {EBADF, EINVAL, ENOTSOCK, EFAULT}) {
    next_error = error;
    calls = 0;
    expect(accept_or_refuse(3, nullptr, nullptr) == -1 && errno == error && calls == 1, "error " + std::to_string(error) + " is told");
  }
  return failures;
}
