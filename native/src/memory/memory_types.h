// Kinds of memory by NIXL's names, and which of them an agent's backends register, as each says itself once it is made.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "library/nixl_capi.h"

namespace kv::nixl {

const char* name_of(capi::MemoryType type);
// Of those that a list can be of; none for another name.
std::optional<capi::MemoryType> memory_type_named(std::string_view name);
// What a storage backend keeps: it has no peer, and its lists are remote ones of the agent's own name.
inline bool is_stored(capi::MemoryType type) { return type == capi::MemoryType::file || type == capi::MemoryType::object; }

class MemoryTypes {
 public:
  void add(std::string backend, std::vector<capi::MemoryType> types) { backends_.emplace_back(std::move(backend), std::move(types)); }
  // Whether a backend registers memory of this type.
  bool any(capi::MemoryType type) const;
  // Such as "UCX: DRAM, VRAM; POSIX: FILE, DRAM".
  std::string text() const;

 private:
  std::vector<std::pair<std::string, std::vector<capi::MemoryType>>> backends_;
};

}  // namespace kv::nixl
