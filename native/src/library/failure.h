#pragma once

#include <exception>

#include "library/std_names.h"
#include "library/nixl_capi.h"

namespace kv::nixl {

// An error for JavaScript, with a code of KvError's closed list. Thrown within one thread, and
// passed between threads by value.
struct Failure : std::exception {
  string code;
  string message;
  string hint;

  Failure(string code, string message, string hint = {})
      : code(std::move(code)), message(std::move(message)), hint(std::move(hint)) {}

  const char* what() const noexcept override { return message.c_str(); }
};

// Runs the work, and returns what it throws. Allocates nothing for std::bad_alloc.
template <typename Work>
optional<Failure> failure_of(Work work) {
  try {
    work();
    return nullopt;
  } catch (const Failure& failure) {
    return failure;
  } catch (const std::exception& error) {
    return Failure("KV_INTERNAL", error.what());
  }
}

// The C API merges causes: -2 is a dead peer as well as a refused call.
inline const char* describe(Status status) {
  switch (status) {
    case kSuccess: return "success";
    case kInProgress: return "in progress";
    case capi::kInvalidParam: return "NIXL status -1, invalid parameter";
    case capi::kBackendError: return "NIXL status -2, the backend refused it or the peer is gone";
    case capi::kInvalidState: return "NIXL status -3, invalid state";
    case capi::kException: return "NIXL status -4, exception inside NIXL";
    case capi::kNotFound: return "NIXL status -6, not found";
    default: return "unknown NIXL status";
  }
}

// The message begins with `what`.
inline void check(Status status, const char* code, const string& what) {
  if (status != kSuccess) throw Failure(code, what + ": " + describe(status));
}
// Without a string for each of a million calls.
inline void check(Status status, const char* code, const char* what) {
  if (status != kSuccess) check(status, code, string(what));
}

}  // namespace kv::nixl
