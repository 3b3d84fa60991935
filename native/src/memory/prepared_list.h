// A prepared list: its shape for everybody, its handle and its users for the agent's thread alone.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "memory/descriptor_layout.h"
#include "memory/mapping.h"

namespace kv::nixl {

struct ExternalRegistration;

struct PreparedList {
  PreparedList(std::optional<std::string> remote, capi::MemoryType type, DescriptorLayout shape)
      : remote(std::move(remote)), type(type), shape(std::move(shape)) {}

  // Whose memory it describes; none for the agent's own.
  const std::optional<std::string> remote;
  const capi::MemoryType type;
  const DescriptorLayout shape;
  // Objects are written whole or not at all. Set before the list is known to others.
  bool takes_writes = true;

  // The agent's thread only, once the list is known to others.
  // Each row lies in one registration, so that neighbours in it may be one descriptor.
  bool mergeable = true;
  // NIXL's word for a peer's memory, held for as long as the list: a descriptor for each row where it is mergeable.
  capi::PreparedDlist handle = nullptr;
  // Each descriptor, for requests by index; made at their first use.
  capi::PreparedDlist indexed = nullptr;
  // One byte of the peer's memory, to be read after a WRITE where the backend does not say that its bytes have landed.
  capi::PreparedDlist probe = nullptr;
  std::vector<const Mapping*> memories;
  // The same of memory that is not the addon's.
  std::vector<ExternalRegistration*> foreign;
  uint32_t transfers = 0;
  std::optional<uint64_t> close_ticket;
  // NIXL has dropped the peer's memory under the list; nothing may use its handle any more.
  bool lost = false;
};

}  // namespace kv::nixl
