// A prepared list: its shape for everybody, its handle and its users for the agent's thread alone.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "descriptors.h"
#include "mapping.h"

namespace kv::nixl {

struct List {
  List(std::optional<std::string> remote, Shape shape) : remote(std::move(remote)), shape(std::move(shape)) {}

  // Whose memory it describes; none for the agent's own.
  const std::optional<std::string> remote;
  const Shape shape;

  // The agent's thread only.
  capi::PreparedDlist handle = nullptr;
  // One byte of the peer's memory, to be read after a WRITE where the backend does not say that its bytes have landed.
  capi::PreparedDlist probe = nullptr;
  std::vector<const Mapping*> memories;
  uint32_t transfers = 0;
  std::optional<uint64_t> close_ticket;
  // NIXL has dropped the peer's memory under the list; nothing may use its handle any more.
  bool lost = false;
};

}  // namespace kv::nixl
