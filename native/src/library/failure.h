#pragma once

#include <exception>
#include <string>
#include <utility>

#include "library/nixl_capi.h"

namespace kv::nixl {

// An error that JavaScript receives: a code from KvError's closed list, a message that names the
// values, and a hint that says what to do. It is thrown within one thread only. Between threads it
// is passed by value.
struct Failure : std::exception {
  std::string code;
  std::string message;
  std::string hint;

  Failure(std::string code, std::string message, std::string hint = {})
      : code(std::move(code)), message(std::move(message)), hint(std::move(hint)) {}

  const char* what() const noexcept override { return message.c_str(); }
};

// A NIXL status in words. The C API merges several causes into one status: -2 is a dead peer as
// well as a refused call.
inline const char* describe(capi::Status status) {
  switch (status) {
    case capi::kSuccess: return "success";
    case capi::kInProgress: return "in progress";
    case capi::kInvalidParam: return "NIXL status -1, invalid parameter";
    case capi::kBackendError: return "NIXL status -2, the backend refused it or the peer is gone";
    case capi::kInvalidState: return "NIXL status -3, invalid state";
    case capi::kException: return "NIXL status -4, exception inside NIXL";
    case capi::kNotFound: return "NIXL status -6, not found";
    default: return "unknown NIXL status";
  }
}

// Throws a Failure with `code` when a NIXL call did not succeed. `what` is the beginning of the
// message.
inline void check(capi::Status status, const char* code, const std::string& what) {
  if (status != capi::kSuccess) throw Failure(code, what + ": " + describe(status));
}

}  // namespace kv::nixl
