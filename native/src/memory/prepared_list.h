#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "library/nixl_capi.h"
#include "memory/descriptor_layout.h"

namespace kv::nixl {

struct RegisteredMemory;

// Owns one prepared descriptor list of NIXL. Used on the agent's thread only, and reset before the
// agent ends.
class PreparedHandle {
 public:
  PreparedHandle() = default;
  // Takes ownership of `value`; null is allowed.
  PreparedHandle(const capi::Functions& nixl, capi::Agent agent, capi::PreparedDlist value) : nixl_(&nixl), agent_(agent), value_(value) {}
  PreparedHandle(PreparedHandle&& other) noexcept
      : nixl_(other.nixl_), agent_(other.agent_), value_(std::exchange(other.value_, nullptr)) {}
  PreparedHandle& operator=(PreparedHandle&& other) noexcept {
    std::swap(nixl_, other.nixl_);
    std::swap(agent_, other.agent_);
    std::swap(value_, other.value_);
    return *this;
  }
  ~PreparedHandle() { reset(); }

  // Releases the list.
  void reset() {
    if (value_ != nullptr) nixl_->release_xfer_dlist_handle(agent_, std::exchange(value_, nullptr));
  }
  // The handle, still owned by this object; null if there is none.
  capi::PreparedDlist get() const { return value_; }
  // Whether there is a handle.
  explicit operator bool() const { return value_ != nullptr; }

 private:
  const capi::Functions* nixl_ = nullptr;
  capi::Agent agent_ = nullptr;
  capi::PreparedDlist value_ = nullptr;
};

// A prepared list of descriptors. Its layout is read on both threads; the rest belongs to the
// agent's thread.
struct PreparedList {
  // A list that NIXL does not know yet.
  PreparedList(std::optional<std::string> remote, capi::MemoryType type, DescriptorLayout layout)
      : remote(std::move(remote)), type(type), layout(std::move(layout)) {}

  // The name that NIXL needs for a remote list: of the peer, or of the agent itself. None for a
  // local list.
  const std::optional<std::string> remote;
  const capi::MemoryType type;
  const DescriptorLayout layout;
  // Whether a WRITE to it is possible: an object is only written whole. Set before JavaScript
  // learns of the list.
  bool writable = true;
  // Whether it describes the memory of another agent. A list under the agent's own name describes
  // its own memory, or storage.
  bool of_peer = false;

  // From here on for the agent's thread only.

  // Whether neighbours in a row may be merged into one descriptor: each row lies in one
  // registration.
  bool mergeable = true;
  // Keeps a peer's memory known to NIXL for the life of the list: a descriptor per row if
  // mergeable, else one per index.
  PreparedHandle spans;
  // A descriptor per index, for requests by index. Made when the first such request needs it.
  PreparedHandle indexed;
  // The first byte of a peer's memory, for backends that report a WRITE as done before it has
  // landed. See LandingProbe.
  PreparedHandle probe;
  // The registrations that hold its rows, where it describes the agent's own memory or storage.
  std::vector<RegisteredMemory*> memories;
  // Transfers that use it.
  uint32_t transfers = 0;
  // The ticket of a close that waits for those transfers.
  std::optional<uint64_t> close_ticket;
  // NIXL dropped the peer's memory while the list existed: its handles may only be released.
  bool dropped = false;
};

}  // namespace kv::nixl
