#pragma once

#include <string>
#include <utility>

#include "library/failure.h"
#include "library/nixl_capi.h"

namespace kv::nixl {

// Owns one C handle of NIXL that is released by a function of the handle alone. See PreparedHandle
// and NixlRegistration for those whose release needs the agent as well.
template <typename T>
class Handle {
 public:
  using Release = capi::Status (*)(T);

  Handle() = default;
  // Takes ownership of `value`; null is allowed.
  Handle(T value, Release release) : value_(value), release_(release) {}
  Handle(Handle&& other) noexcept : value_(std::exchange(other.value_, nullptr)), release_(other.release_) {}
  Handle& operator=(Handle&& other) noexcept {
    std::swap(value_, other.value_);
    std::swap(release_, other.release_);
    return *this;
  }
  ~Handle() {
    if (value_ != nullptr) release_(value_);
  }

  // The handle, still owned by this object; null if there is none.
  T get() const { return value_; }
  // Whether there is a handle.
  explicit operator bool() const { return value_ != nullptr; }

  // Calls `create(arguments…, &handle)` and owns the result. Throws a Failure with `code`; `what`
  // is the beginning of its message.
  template <typename Create, typename... Arguments>
  static Handle make(const char* code, const char* what, Release release, Create create, Arguments... arguments) {
    T value = nullptr;
    const capi::Status status = create(arguments..., &value);
    if (status != capi::kSuccess || value == nullptr) throw Failure(code, std::string(what) + ": " + describe(status));
    return Handle(value, release);
  }

 private:
  T value_ = nullptr;
  Release release_ = nullptr;
};

}  // namespace kv::nixl
