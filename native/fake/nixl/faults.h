// Faults of the stand-in for NIXL, read from the environment at each call:
//   FAKE_NIXL_POLLS=n             a post starts the copy, and the n-th look at it finds it done; 0, the default: done at once
//   FAKE_NIXL_HOLD=1              a post only starts the copy, which waits until this is 0
//   FAKE_NIXL_FAIL_POST=n         the n-th post from now fails; FAKE_NIXL_FAIL_STATUS=n likewise at its completion
//   FAKE_NIXL_REFUSE_RELEASE=n    the next n releases are refused
//   FAKE_NIXL_FAIL_NOTIFICATION=1 notifications cannot be sent
//   FAKE_NIXL_LATE_WRITES=1       a WRITE is done before its bytes land; they do when something is read from that peer
//   FAKE_NIXL_STRAY_ERRORS=n      the next n posts and looks, at whatever, are given an error that is another peer's: what they are
//                                 about goes on unseen, and lands before what is read later from that peer; metadata is refused likewise,
//                                 and what was known of its agent dropped
//   FAKE_NIXL_NO_CUDA=1           UCX, which names VRAM among its types, has no CUDA and refuses it
//   FAKE_NIXL_STALL_METADATA=ms   local metadata takes that long
//   FAKE_NIXL_ENDPOINT=port       local metadata is of LIBFABRIC, and names that port of 127.0.0.1
#pragma once

#include <cstdlib>
#include <string>

namespace kv::nixl::capi {

inline int setting(const char* name) {
  const char* value = getenv(name);
  return value == nullptr ? 0 : atoi(value);
}

// Counts the setting down; true when it reaches its end.
inline bool nth(const char* name) {
  const int left = setting(name);
  if (left <= 0) return false;
  setenv(name, std::to_string(left - 1).c_str(), 1);
  return left == 1;
}

// The same for each until the end.
inline bool one_of(const char* name) {
  const int left = setting(name);
  if (left > 0) setenv(name, std::to_string(left - 1).c_str(), 1);
  return left > 0;
}

}  // namespace kv::nixl::capi
