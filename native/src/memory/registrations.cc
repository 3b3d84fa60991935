#include "memory/registrations.h"

#include <algorithm>
#include <string>
#include <utility>

#include "library/failure.h"

namespace kv::nixl {

namespace {

bool holds(const Mapping& mapping, const Row& row) {
  return row.device == 0 && row.address >= mapping.address() && row.end() <= mapping.address() + mapping.length();
}

}  // namespace

Registrations::~Registrations() {
  for (const auto& [mapping, memory] : memories_) nixl_.deregister_mem(agent_, memory.list.get(), nullptr);
  counters_.registrations = 0;
}

void Registrations::add_memory(uint64_t id, std::shared_ptr<Pin> pin) {
  const Mapping* mapping = pin->mapping().get();
  if (!memories_.contains(mapping)) {
    mapping->await_touched();
    auto list = Handle<capi::RegDlist>::make("KV_MEMORY_INVALID", "no registration list", nixl_.destroy_reg_dlist,
                                             nixl_.create_reg_dlist, capi::MemoryType::dram);
    check(nixl_.reg_dlist_add_desc(list.get(), mapping->address(), mapping->length(), 0, nullptr, 0), "KV_MEMORY_INVALID",
          "NIXL refused the descriptor of the memory");
    check(nixl_.register_mem(agent_, list.get(), nullptr), "KV_MEMORY_INVALID",
          "NIXL could not register " + std::to_string(mapping->length()) + " bytes");
    memories_.emplace(mapping, Memory{std::move(pin), std::move(list)});
  }
  ++memories_.at(mapping).registrations;
  by_id_.emplace(id, mapping);
  count();
}

void Registrations::add_foreign(uint64_t id, const ExternalMemory& memory) {
  foreign_.add(id, memory);
  count();
}

void Registrations::remove(uint64_t id) {
  if (foreign_.remove(id)) return count();
  const auto found = by_id_.find(id);
  if (found == by_id_.end()) throw Failure("KV_MEMORY_NOT_REGISTERED", "the registration is closed already");
  const auto memory = memories_.find(found->second);
  if (memory->second.registrations == 1) {
    if (memory->second.lists > 0) {
      throw Failure("KV_MEMORY_IN_USE", std::to_string(memory->second.lists) + " prepared lists describe this memory",
                    "close them before the registration");
    }
    check(nixl_.deregister_mem(agent_, memory->second.list.get(), nullptr), "KV_MEMORY_IN_USE", "NIXL kept the memory");
    memories_.erase(memory);
  } else {
    --memory->second.registrations;
  }
  by_id_.erase(found);
  count();
}

std::vector<const Mapping*> Registrations::memories_of(const std::vector<Row>& rows) {
  std::vector<const Mapping*> memories;
  for (size_t index = 0; index < rows.size(); ++index) {
    // Rows of one memory come together, and there may be a million of them.
    if (!memories.empty() && holds(*memories.back(), rows[index])) continue;
    memories.push_back(memory_of(rows[index]));
    if (memories.back() == nullptr) refuse(capi::MemoryType::dram, rows[index], index);
  }
  std::sort(memories.begin(), memories.end());
  memories.erase(std::unique(memories.begin(), memories.end()), memories.end());
  return memories;
}

const Mapping* Registrations::memory_of(const Row& row) const {
  for (const auto& [mapping, memory] : memories_) {
    if (holds(*mapping, row)) return mapping;
  }
  return nullptr;
}

std::vector<ExternalRegistration*> Registrations::foreign_of(capi::MemoryType type, const std::vector<Row>& rows) {
  std::vector<ExternalRegistration*> entries;
  for (size_t index = 0; index < rows.size(); ++index) {
    if (!entries.empty() && entries.back()->memory.holds(rows[index])) continue;
    entries.push_back(foreign_.holder_of(type, rows[index]));
    if (entries.back() == nullptr) refuse(type, rows[index], index);
  }
  std::sort(entries.begin(), entries.end());
  entries.erase(std::unique(entries.begin(), entries.end()), entries.end());
  return entries;
}

void Registrations::refuse(capi::MemoryType type, const Row& row, size_t index) {
  const bool stored = is_stored(type);
  const std::string kind = type == capi::MemoryType::file ? "file" : "object";
  std::string hint = stored ? "register the " + kind + " with this agent; a row's device is its deviceId, its address the place in it"
                            : "register the memory with this agent, or split the row at the edge of the memory";
  for (const auto other : {capi::MemoryType::dram, capi::MemoryType::vram}) {
    const bool held = other == capi::MemoryType::dram ? memory_of(row) != nullptr : foreign_.holder_of(other, row) != nullptr;
    if (other != type && !stored && held) {
      hint = "what it covers is registered as " + std::string(name_of(other)) + ": a list is of one memory type, and each type has its own lists";
    }
  }
  throw Failure("KV_MEMORY_NOT_REGISTERED",
                "row " + std::to_string(index) + " covers [" + std::to_string(row.address) + ", " + std::to_string(row.end()) +
                    (stored ? ") of the " + kind + " with deviceId " : ") on device ") + std::to_string(row.device) +
                    ", which no single registration of " + name_of(type) + " of this agent holds (it has " +
                    std::to_string(count_of(type)) + ")",
                hint);
}

size_t Registrations::count_of(capi::MemoryType type) const {
  return type == capi::MemoryType::dram ? memories_.size() : foreign_.count_of(type);
}

void Registrations::hold(const PreparedList& list) {
  for (const Mapping* mapping : list.memories) ++memories_.at(mapping).lists;
  for (ExternalRegistration* entry : list.foreign) ++entry->lists;
}

void Registrations::let_go(const PreparedList& list) {
  for (const Mapping* mapping : list.memories) --memories_.at(mapping).lists;
  for (ExternalRegistration* entry : list.foreign) --entry->lists;
}

}  // namespace kv::nixl
