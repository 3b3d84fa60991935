#include "memory/external_registrations.h"

#include <algorithm>
#include <string>
#include <utility>

#include "memory/cuda_driver.h"
#include "library/failure.h"

namespace kv::nixl {

namespace {

std::string described(const ExternalMemory& memory) {
  const std::string length = std::to_string(memory.length) + " bytes";
  if (memory.type == capi::MemoryType::file) return "a file of " + length;
  if (memory.type == capi::MemoryType::object) return "the object \"" + memory.key + "\" of " + length;
  return length + " at " + std::to_string(memory.address) + " of device " + std::to_string(memory.device);
}

// What helps where no backend takes such memory.
const char* remedy(capi::MemoryType type) {
  if (type == capi::MemoryType::file) return "an agent needs a storage backend for files, such as POSIX";
  if (type == capi::MemoryType::object) return "an agent needs a storage backend for objects, such as OBJ";
  return "an agent needs a backend for device memory: UCX, or LIBFABRIC on a machine with a GPU; without one, blocks are staged through host "
         "memory";
}

// What helps where one of them should have taken it.
const char* advice(capi::MemoryType type) {
  if (is_stored(type)) return "NIXL's own log on stderr says why";
  return "UCX reaches device memory where its CUDA module loads and UCX_TLS does not leave it out (all, or cuda_copy and cuda_ipc among the "
         "others); NIXL's own log on stderr says more";
}

}  // namespace

ExternalRegistrations::~ExternalRegistrations() {
  for (const ExternalRegistration& entry : registered_) nixl_.deregister_mem(agent_, entry.list.get(), nullptr);
}

void ExternalRegistrations::add(uint64_t id, const ExternalMemory& memory) {
  if (!types_.any(memory.type)) {
    throw Failure("KV_MEMORY_INVALID",
                  "no backend of this agent registers " + std::string(name_of(memory.type)) + ", and this is " + described(memory) + " (" +
                      types_.text() + ")",
                  remedy(memory.type));
  }
  if (memory.check) require_device_memory(memory.address, memory.length, memory.device);
  ExternalRegistration* entry = known(memory);
  if (entry == nullptr) entry = enter(memory);
  ++entry->registrations;
  by_id_.emplace(id, entry);
}

ExternalRegistration* ExternalRegistrations::known(const ExternalMemory& memory) {
  for (ExternalRegistration& entry : registered_) {
    if (entry.memory.same_place(memory)) return &entry;
    // NIXL might prepare a list by the one that is let go of first.
    if (entry.memory.overlaps(memory)) {
      throw Failure("KV_MEMORY_INVALID",
                    described(memory) + " overlap " + described(entry.memory) + ", which this agent has registered",
                    "register an allocation once, as a whole");
    }
  }
  return nullptr;
}

ExternalRegistration* ExternalRegistrations::enter(const ExternalMemory& memory) {
  auto list = Handle<capi::RegDlist>::make("KV_MEMORY_INVALID", "no registration list", nixl_.destroy_reg_dlist,
                                           nixl_.create_reg_dlist, memory.type);
  check(nixl_.reg_dlist_add_desc(list.get(), memory.address, memory.length, memory.device, memory.key.empty() ? nullptr : memory.key.data(),
                                 memory.key.size()),
        "KV_MEMORY_INVALID",
        "NIXL refused the descriptor of " + described(memory));
  const capi::Status status = nixl_.register_mem(agent_, list.get(), nullptr);
  if (status != capi::kSuccess) {
    throw Failure("KV_MEMORY_INVALID",
                  "NIXL could not register " + described(memory) + " as " + name_of(memory.type) + ": " + describe(status) +
                      " (backends: " + types_.text() + ")",
                  advice(memory.type));
  }
  return &registered_.emplace_back(ExternalRegistration{memory, std::move(list)});
}

bool ExternalRegistrations::remove(uint64_t id) {
  const auto found = by_id_.find(id);
  if (found == by_id_.end()) return false;
  ExternalRegistration* entry = found->second;
  if (entry->registrations == 1) {
    if (entry->lists > 0) {
      throw Failure("KV_MEMORY_IN_USE", std::to_string(entry->lists) + " prepared lists describe " + described(entry->memory),
                    "close them before the registration");
    }
    check(nixl_.deregister_mem(agent_, entry->list.get(), nullptr), "KV_MEMORY_IN_USE", "NIXL kept " + described(entry->memory));
    by_id_.erase(found);
    registered_.remove_if([&](const ExternalRegistration& other) { return &other == entry; });
  } else {
    --entry->registrations;
    by_id_.erase(found);
  }
  return true;
}

size_t ExternalRegistrations::count_of(capi::MemoryType type) const {
  return static_cast<size_t>(std::ranges::count_if(registered_, [&](const auto& entry) { return entry.memory.type == type; }));
}

ExternalRegistration* ExternalRegistrations::holder_of(capi::MemoryType type, const Row& row) {
  const auto holds = [&](const ExternalRegistration& entry) { return entry.memory.type == type && entry.memory.holds(row); };
  const auto found = std::ranges::find_if(registered_, holds);
  return found == registered_.end() ? nullptr : &*found;
}

}  // namespace kv::nixl
