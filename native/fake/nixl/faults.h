// Faults of the fake NIXL. Each call reads these environment variables:
// - FAKE_NIXL_POLLS=n: the n-th status query performs the copy; by default (0) the post does
// - FAKE_NIXL_HOLD=1: copies wait until this is 0
// - FAKE_NIXL_FAIL_POST=n: the n-th post from now fails
// - FAKE_NIXL_FAIL_STATUS=n: the n-th copy from now fails when it completes
// - FAKE_NIXL_REFUSE_RELEASE=n: the next n releases are refused
// - FAKE_NIXL_FAIL_NOTIFICATION=1: notifications cannot be sent
// - FAKE_NIXL_LATE_WRITES=1: a WRITE counts as done, but lands at the next READ from its peer
// - FAKE_NIXL_STRAY_ERRORS=n: the next n posts, status queries and loads of metadata get another
//   peer's error. Copies land before the next READ from their peer; a load drops its peer
// - FAKE_NIXL_NO_CUDA=1: UCX names VRAM among its memory types, but refuses it
// - FAKE_NIXL_STALL_METADATA=ms: making local metadata takes this long
// - FAKE_NIXL_STALL_BACKEND=ms: creating a backend takes this long
// - FAKE_NIXL_STALL_CALLS=ms: posts and notifications take this long
// - FAKE_NIXL_ENDPOINT=port: local metadata is LIBFABRIC's at this port of 127.0.0.1
// The fake sets FAKE_NIXL_PARAMETERS to the parameters of the last backend that had any. It sets
// FAKE_NIXL_VISITS to the number of calls from other threads than an agent's own.
#pragma once

#include <cstdlib>
#include <thread>

#include "library/std_names.h"

namespace kv::nixl::capi {

// 0 if the fault is not set.
inline int fault(const char* name) {
  const char* value = getenv(name);
  return value == nullptr ? 0 : atoi(value);
}

// Counts down. True for the n-th call only.
inline bool fault_due_now(const char* name) {
  const int left = fault(name);
  if (left <= 0) return false;
  setenv(name, to_string(left - 1).c_str(), 1);
  return left == 1;
}

// Counts down. True for the next n calls.
inline bool fault_active(const char* name) {
  const int left = fault(name);
  if (left > 0) setenv(name, to_string(left - 1).c_str(), 1);
  return left > 0;
}

inline void stall(const char* name) { std::this_thread::sleep_for(milliseconds(fault(name))); }

}  // namespace kv::nixl::capi
