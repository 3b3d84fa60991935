#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "library/nixl_capi.h"

namespace kv::nixl {

// NIXL's name of a memory type, such as "VRAM".
const char* name_of(capi::MemoryType type);
// The memory type of this name; none for a name that no prepared list can have.
std::optional<capi::MemoryType> memory_type_named(std::string_view name);
// Whether memory of this type belongs to a storage backend (files, objects). Storage has no peer:
// NIXL's remote lists of it carry the agent's own name.
inline bool is_storage(capi::MemoryType type) { return type == capi::MemoryType::file || type == capi::MemoryType::object; }

// The memory types that each backend of an agent registers, as the backend itself reports them.
class MemoryTypes {
 public:
  // Adds a backend.
  void add(std::string backend, std::vector<capi::MemoryType> types) { backends_.emplace_back(std::move(backend), std::move(types)); }
  // Whether a backend registers memory of this type.
  bool supports(capi::MemoryType type) const;
  // The backends that register memory of this type, in the order of their creation.
  std::vector<std::string> supporting(capi::MemoryType type) const;
  // For error messages, such as "UCX: DRAM, VRAM; POSIX: FILE, DRAM".
  std::string to_string() const;

 private:
  std::vector<std::pair<std::string, std::vector<capi::MemoryType>>> backends_;
};

}  // namespace kv::nixl
