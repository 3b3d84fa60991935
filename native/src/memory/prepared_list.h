#pragma once

#include "memory/descriptor_layout.h"

namespace kv::nixl {

struct RegisteredMemory;

// What JavaScript may close while transfers use it.
struct Closable {
  uint32_t users = 0;
  // The close that waits for those transfers.
  optional<uint64_t> close_ticket;
};

// Both threads read the layout; the rest is the agent's thread's.
struct PreparedList : Closable {
  PreparedList(optional<string> remote, MemoryType type, DescriptorLayout layout)
      : remote(std::move(remote)), type(type), layout(std::move(layout)) {}

  // A peer's name, or the agent's own. None for a local list.
  const optional<string> remote;
  const MemoryType type;
  const DescriptorLayout layout;
  // False for parts of objects, which are only written whole. Set before JavaScript learns of the
  // list.
  bool writable = true;
  // False for lists under the agent's own name.
  bool of_peer = false;

  // From here on for the agent's thread only.

  // Whether each row lies in one registration, so that its descriptors may merge.
  bool mergeable = true;
  // Keeps a peer's memory known to NIXL: one descriptor per row if mergeable, else per index.
  PreparedHandle spans;
  // A descriptor per index, made for the first request by index.
  PreparedHandle indexed;
  // The first byte of a peer's memory, for LandingProbe.
  PreparedHandle probe;
  // The registrations of its rows, unless they are a peer's.
  vector<RegisteredMemory*> memories;
  // The peer's memory is gone, or NIXL dropped it: only a release is allowed.
  bool dropped = false;
};

}  // namespace kv::nixl
