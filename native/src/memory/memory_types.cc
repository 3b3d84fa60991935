#include "memory/memory_types.h"

#include <algorithm>

namespace kv::nixl {

const char* name_of(capi::MemoryType type) {
  switch (type) {
    case capi::MemoryType::dram: return "DRAM";
    case capi::MemoryType::vram: return "VRAM";
    case capi::MemoryType::block: return "BLOCK";
    case capi::MemoryType::object: return "OBJ";
    case capi::MemoryType::file: return "FILE";
  }
  return "memory of unknown type";
}

std::optional<capi::MemoryType> memory_type_named(std::string_view name) {
  for (const auto type : {capi::MemoryType::dram, capi::MemoryType::vram, capi::MemoryType::file, capi::MemoryType::object}) {
    if (name == name_of(type)) return type;
  }
  return std::nullopt;
}

bool MemoryTypes::supports(capi::MemoryType type) const {
  return std::ranges::any_of(backends_, [&](const auto& backend) { return std::ranges::count(backend.second, type) > 0; });
}

std::vector<std::string> MemoryTypes::supporting(capi::MemoryType type) const {
  std::vector<std::string> names;
  for (const auto& [name, types] : backends_) {
    if (std::ranges::count(types, type) > 0) names.push_back(name);
  }
  return names;
}

std::string MemoryTypes::to_string() const {
  std::string text;
  for (const auto& [backend, types] : backends_) {
    text += (text.empty() ? "" : "; ") + backend + ": ";
    for (size_t index = 0; index < types.size(); ++index) text += (index == 0 ? "" : ", ") + std::string(name_of(types[index]));
    if (types.empty()) text += "none";
  }
  return text;
}

}  // namespace kv::nixl
