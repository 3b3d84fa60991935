#include "registrations.h"

#include <algorithm>
#include <string>
#include <utility>

#include "failure.h"

namespace kv::nixl {

namespace {

bool holds(const Mapping& mapping, const Row& row) {
  return row.device == 0 && row.address >= mapping.address() && row.end() <= mapping.address() + mapping.length();
}

}  // namespace

Registrations::~Registrations() {
  for (const auto& [mapping, memory] : memories_) nixl_.deregister_mem(agent_, memory.list.get(), nullptr);
  for (const auto& [id, file] : files_) nixl_.deregister_mem(agent_, file.list.get(), nullptr);
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

void Registrations::add_file(uint64_t id, uint64_t descriptor, uint64_t length) {
  auto list = Handle<capi::RegDlist>::make("KV_MEMORY_INVALID", "no registration list", nixl_.destroy_reg_dlist,
                                           nixl_.create_reg_dlist, capi::MemoryType::file);
  check(nixl_.reg_dlist_add_desc(list.get(), 0, length, descriptor, nullptr, 0), "KV_MEMORY_INVALID",
        "NIXL refused the descriptor of the file");
  const capi::Status status = nixl_.register_mem(agent_, list.get(), nullptr);
  if (status != capi::kSuccess) {
    throw Failure("KV_MEMORY_INVALID", "NIXL could not register a file of " + std::to_string(length) + " bytes: " + describe(status),
                  "an agent needs a storage backend for files, such as POSIX");
  }
  files_.emplace(id, File{descriptor, length, std::move(list)});
  count();
}

void Registrations::remove(uint64_t id) {
  if (const auto file = files_.find(id); file != files_.end()) return remove_file(file);
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

void Registrations::remove_file(std::unordered_map<uint64_t, File>::iterator file) {
  if (file->second.lists > 0) {
    throw Failure("KV_MEMORY_IN_USE", std::to_string(file->second.lists) + " prepared lists describe this file",
                  "close them before the registration");
  }
  check(nixl_.deregister_mem(agent_, file->second.list.get(), nullptr), "KV_MEMORY_IN_USE", "NIXL kept the file");
  files_.erase(file);
  count();
}

std::vector<const Mapping*> Registrations::memories_of(const std::vector<Row>& rows) const {
  std::vector<const Mapping*> memories;
  for (size_t index = 0; index < rows.size(); ++index) {
    // Rows of one memory come together, and there may be a million of them.
    if (!memories.empty() && holds(*memories.back(), rows[index])) continue;
    memories.push_back(memory_of(rows[index], index));
  }
  std::sort(memories.begin(), memories.end());
  memories.erase(std::unique(memories.begin(), memories.end()), memories.end());
  return memories;
}

const Mapping* Registrations::memory_of(const Row& row, size_t index) const {
  for (const auto& [mapping, memory] : memories_) {
    if (holds(*mapping, row)) return mapping;
  }
  throw Failure("KV_MEMORY_NOT_REGISTERED",
                "row " + std::to_string(index) + " covers [" + std::to_string(row.address) + ", " + std::to_string(row.end()) +
                    ") on device " + std::to_string(row.device) + ", which no single registration of this agent holds (" +
                    std::to_string(memories_.size()) + " memories registered)",
                "register the memory with this agent, or split the row at the edge of the memory");
}

std::vector<uint64_t> Registrations::files_of(const std::vector<Row>& rows) const {
  std::vector<uint64_t> files;
  for (size_t index = 0; index < rows.size(); ++index) files.push_back(file_of(rows[index], index));
  return files;
}

uint64_t Registrations::file_of(const Row& row, size_t index) const {
  for (const auto& [id, file] : files_) {
    if (row.device == file.descriptor && row.end() <= file.length) return id;
  }
  throw Failure("KV_MEMORY_NOT_REGISTERED",
                "row " + std::to_string(index) + " covers [" + std::to_string(row.address) + ", " + std::to_string(row.end()) +
                    ") of the file with descriptor " + std::to_string(row.device) + ", which no registration of this agent holds (" +
                    std::to_string(files_.size()) + " files registered)",
                "register the file with this agent; a row's device is the file's deviceId, its address the place in the file");
}

void Registrations::hold(const List& list) {
  for (const Mapping* mapping : list.memories) ++memories_.at(mapping).lists;
  for (const uint64_t file : list.files) ++files_.at(file).lists;
}

void Registrations::let_go(const List& list) {
  for (const Mapping* mapping : list.memories) --memories_.at(mapping).lists;
  for (const uint64_t file : list.files) --files_.at(file).lists;
}

}  // namespace kv::nixl
