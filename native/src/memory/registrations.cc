#include "memory/registrations.h"

#include <algorithm>
#include <utility>

#include "memory/cuda_driver.h"
#include "memory/process_memory.h"

namespace kv::nixl {

std::string describe(const MemoryRange& range) {
  const std::string length = std::to_string(range.length) + " bytes";
  if (range.type == capi::MemoryType::file) return "a file of " + length;
  if (range.type == capi::MemoryType::object) return "the object \"" + range.key + "\" of " + length;
  return length + " at " + std::to_string(range.address) +
         (range.type == capi::MemoryType::dram ? "" : " of device " + std::to_string(range.device));
}

Handle<capi::RegDlist> make_registration_list(const capi::Functions& nixl, capi::MemoryType type) {
  return Handle<capi::RegDlist>::make("KV_MEMORY_INVALID", "NIXL could not create a registration list", nixl.destroy_reg_dlist,
                                      nixl.create_reg_dlist, type);
}

capi::Status add_range(const capi::Functions& nixl, capi::RegDlist list, const MemoryRange& range) {
  return nixl.reg_dlist_add_desc(list, range.address, range.length, range.device, range.key.empty() ? nullptr : range.key.data(),
                                 range.key.size());
}

namespace {

// The hint when no backend registers this type of memory.
const char* missing_backend_hint(capi::MemoryType type) {
  if (type == capi::MemoryType::file) return "create the agent with a storage backend for files, such as POSIX";
  if (type == capi::MemoryType::object) return "create the agent with a storage backend for objects, such as OBJ";
  if (type == capi::MemoryType::dram) return "create the agent with a backend for host memory, such as UCX";
  return "create the agent with a backend for device memory: UCX on a machine with a GPU, or LIBFABRIC with a provider for it, such as efa; without one, "
         "blocks are staged through host memory";
}

// The hint when a backend registers this type of memory, but refused.
const char* refusal_hint(capi::MemoryType type) {
  if (type != capi::MemoryType::vram) return "NIXL's own log on stderr says why";
  return "UCX reaches device memory if its CUDA module loads and UCX_TLS does not exclude it (all, or cuda_copy and cuda_ipc among the "
         "others); NIXL's own log on stderr says more";
}

}  // namespace

Registrations::~Registrations() { counters_.registrations = 0; }

void Registrations::add_allocated(uint64_t id, std::shared_ptr<Pin> pin, const std::vector<std::string>& backends) {
  const Mapping& mapping = *pin->mapping();
  const MemoryRange range{.type = capi::MemoryType::dram, .address = mapping.address(), .length = mapping.length(), .device = 0};
  add(id, range, std::move(pin), backends);
}

void Registrations::add_external(uint64_t id, const MemoryRange& range, bool ask_cuda, std::shared_ptr<const void> kept,
                                 const std::vector<std::string>& backends) {
  if (!backends_.memory_types().supports(range.type)) {
    throw Failure("KV_MEMORY_INVALID",
                  "no backend of this agent registers " + std::string(name_of(range.type)) + ", which is needed for " + describe(range) + " (" +
                      backends_.memory_types().to_string() + ")",
                  missing_backend_hint(range.type));
  }
  if (ask_cuda) require_device_memory(range.address, range.length, range.device);
  if (range.type == capi::MemoryType::dram) require_process_memory(range.address, range.length);
  add(id, range, std::move(kept), backends);
}

void Registrations::add(uint64_t id, const MemoryRange& range, std::shared_ptr<const void> kept, const std::vector<std::string>& backends) {
  RegisteredMemory* memory = find_same(range, backends);
  if (memory == nullptr) {
    NixlRegistration registration(nixl_, agent_, range, options_for(range.type, backends), !backends.empty(), [&](capi::Status status) {
      return Failure("KV_MEMORY_INVALID",
                     "NIXL could not register " + describe(range) + " as " + name_of(range.type) + ": " + describe(status) +
                         " (backends: " + backends_.memory_types().to_string() + ")",
                     refusal_hint(range.type));
    });
    memory = &memories_.emplace_back(RegisteredMemory{range, backends, std::move(kept), std::move(registration)});
  } else if (memory->kept == nullptr) {
    // The same bytes were registered as memory of the caller, and are the addon's own.
    memory->kept = std::move(kept);
  }
  ++memory->registrations;
  by_id_.emplace(id, memory);
  counters_.registrations = by_id_.size();
}

std::vector<Handle<capi::OptArgs>> Registrations::options_for(capi::MemoryType type, const std::vector<std::string>& chosen) const {
  std::vector<Handle<capi::OptArgs>> options;
  for (const std::string& name : chosen.empty() ? backends_.memory_types().supporting(type) : chosen) options.push_back(backends_.options_for({name}));
  // Without any backend NIXL says why not.
  if (options.empty()) options.emplace_back();
  return options;
}

RegisteredMemory* Registrations::find_same(const MemoryRange& range, const std::vector<std::string>& backends) {
  for (RegisteredMemory& memory : memories_) {
    if (memory.range.same_range(range)) {
      if (memory.backends == backends) return &memory;
      throw Failure("KV_MEMORY_INVALID", describe(range) + " are registered already, with another choice of backends",
                    "close that registration, or choose the same backends in the same order");
    }
    // NIXL could prepare a list by the registration that ends first.
    if (memory.range.overlaps(range)) {
      throw Failure("KV_MEMORY_INVALID", describe(range) + " overlap " + describe(memory.range) + ", which this agent has registered",
                    "register an allocation once, as a whole");
    }
  }
  return nullptr;
}

const MemoryRange& Registrations::range_of(uint64_t id) const {
  const auto found = by_id_.find(id);
  if (found == by_id_.end()) throw Failure("KV_MEMORY_NOT_REGISTERED", "the registration is closed");
  return found->second->range;
}

void Registrations::remove(uint64_t id) {
  const auto found = by_id_.find(id);
  if (found == by_id_.end()) throw Failure("KV_MEMORY_NOT_REGISTERED", "the registration is already closed");
  RegisteredMemory* memory = found->second;
  if (memory->registrations == 1) {
    if (memory->lists > 0) {
      throw Failure("KV_MEMORY_IN_USE", std::to_string(memory->lists) + " prepared lists describe " + describe(memory->range),
                    "close them before the registration");
    }
    check(memory->registration.deregister(), "KV_MEMORY_IN_USE", "NIXL did not deregister " + describe(memory->range));
    memories_.remove_if([&](const RegisteredMemory& other) { return &other == memory; });
  } else {
    --memory->registrations;
  }
  by_id_.erase(found);
  counters_.registrations = by_id_.size();
}

std::vector<RegisteredMemory*> Registrations::holding(capi::MemoryType type, const std::vector<Row>& rows) {
  std::vector<RegisteredMemory*> memories;
  for (size_t index = 0; index < rows.size(); ++index) {
    // There may be a million rows, and those in the same memory usually follow one another.
    if (!memories.empty() && memories.back()->range.holds(rows[index])) continue;
    memories.push_back(find_holder(type, rows[index]));
    if (memories.back() == nullptr) throw_not_registered(type, rows[index], index);
  }
  std::sort(memories.begin(), memories.end());
  memories.erase(std::unique(memories.begin(), memories.end()), memories.end());
  return memories;
}

RegisteredMemory* Registrations::find_holder(capi::MemoryType type, const Row& row) {
  const auto holds = [&](const RegisteredMemory& memory) { return memory.range.type == type && memory.range.holds(row); };
  const auto found = std::ranges::find_if(memories_, holds);
  return found == memories_.end() ? nullptr : &*found;
}

void Registrations::throw_not_registered(capi::MemoryType type, const Row& row, size_t index) {
  const bool storage = is_storage(type);
  const std::string kind = type == capi::MemoryType::file ? "file" : "object";
  std::string hint = storage ? "register the " + kind + " with this agent; a row's device is its deviceId, and the address an offset in it"
                             : "register the memory with this agent, or split the row at the end of the memory";
  for (const auto other : {capi::MemoryType::dram, capi::MemoryType::vram}) {
    if (other == type || storage || find_holder(other, row) == nullptr) continue;
    hint = "this range is registered as " + std::string(name_of(other)) + ": a list is of one memory type, so prepare a list per type";
  }
  throw Failure("KV_MEMORY_NOT_REGISTERED",
                "row " + std::to_string(index) + " covers [" + std::to_string(row.address) + ", " + std::to_string(row.end()) +
                    (storage ? ") of the " + kind + " with deviceId " : ") on device ") + std::to_string(row.device) +
                    ", which no single registration of " + name_of(type) + " of this agent holds (it has " +
                    std::to_string(count_of(type)) + ")",
                hint);
}

size_t Registrations::count_of(capi::MemoryType type) const {
  return static_cast<size_t>(std::ranges::count_if(memories_, [&](const auto& memory) { return memory.range.type == type; }));
}

}  // namespace kv::nixl
