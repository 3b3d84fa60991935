// Faults of the fake NIXL. Tests set them as environment variables, which are read at each call:
//   FAKE_NIXL_POLLS=n             a post only starts the copy, and the n-th status query finds it done; 0, the default: the post copies
//   FAKE_NIXL_HOLD=1              a post only starts the copy, which waits until this is 0
//   FAKE_NIXL_FAIL_POST=n         the n-th post from now fails
//   FAKE_NIXL_FAIL_STATUS=n       the n-th copy from now fails when it completes
//   FAKE_NIXL_REFUSE_RELEASE=n    the next n releases are refused
//   FAKE_NIXL_FAIL_NOTIFICATION=1 notifications cannot be sent
//   FAKE_NIXL_LATE_WRITES=1       a WRITE is reported as done before its bytes land; they land when something is read from that peer
//   FAKE_NIXL_STRAY_ERRORS=n      the next n posts and status queries get an error that belongs to another peer: their copies continue, and land
//                                 before the next READ from their peer; loading metadata gets such an error as well, and drops its peer
//   FAKE_NIXL_NO_CUDA=1           UCX names VRAM among its memory types, but has no CUDA and refuses to register it
//   FAKE_NIXL_STALL_METADATA=ms   making local metadata takes this long
//   FAKE_NIXL_STALL_BACKEND=ms    creating a backend takes this long
//   FAKE_NIXL_STALL_CALLS=ms      posting a request and sending a notification take this long
//   FAKE_NIXL_ENDPOINT=port       local metadata is that of LIBFABRIC at this port of 127.0.0.1
// The fake itself sets FAKE_NIXL_PARAMETERS to the parameters of the last backend that was created
// with any, and FAKE_NIXL_VISITS to the number of calls that other threads than an agent's own have
// made for it.
#pragma once

#include <chrono>
#include <cstdlib>
#include <string>
#include <thread>

namespace kv::nixl::capi {

// The value of a fault; 0 if it is not set.
inline int fault(const char* name) {
  const char* value = getenv(name);
  return value == nullptr ? 0 : atoi(value);
}

// For faults of the n-th call: counts down, and returns whether this call is the one.
inline bool fault_due_now(const char* name) {
  const int left = fault(name);
  if (left <= 0) return false;
  setenv(name, std::to_string(left - 1).c_str(), 1);
  return left == 1;
}

// For faults of the next n calls: counts down, and returns whether this call is one of them.
inline bool fault_active(const char* name) {
  const int left = fault(name);
  if (left > 0) setenv(name, std::to_string(left - 1).c_str(), 1);
  return left > 0;
}

// Sleeps for as many milliseconds as the fault says.
inline void stall(const char* name) { std::this_thread::sleep_for(std::chrono::milliseconds(fault(name))); }

}  // namespace kv::nixl::capi
