#include "memory/registrations.h"

#include <inttypes.h>
#include <stdio.h>

#include <algorithm>

#include "memory/cuda_memory.h"

namespace kv::nixl {

string describe(const MemoryRange& range) {
  const string length = to_string(range.length) + " bytes";
  if (range.type == MemoryType::file) return "a file of " + length;
  if (range.type == MemoryType::object) return "the object \"" + range.key + "\" of " + length;
  return length + " at " + to_string(range.address) +
         (range.type == MemoryType::dram ? "" : " of device " + to_string(range.device));
}

OwnedRegList make_registration_list(MemoryType type) {
  return make<OwnedRegList>("KV_MEMORY_INVALID", "NIXL could not create a registration list", capi::create_reg_dlist, type);
}

Status add_range(const OwnedRegList& list, const MemoryRange& range) {
  return capi::reg_dlist_add_desc(list.get(), range.address, range.length, range.device, range.key.empty() ? nullptr : range.key.data(),
                                  range.key.size());
}

namespace {

const char* missing_backend_hint(MemoryType type) {
  if (type == MemoryType::file) return "create the agent with a storage backend for files, such as POSIX";
  if (type == MemoryType::object) return "create the agent with a storage backend for objects, such as OBJ";
  if (type == MemoryType::dram) return "create the agent with a backend for host memory, such as UCX";
  return "create the agent with a backend for device memory: UCX on a machine with a GPU, or LIBFABRIC with a provider for it, such as efa; without one, "
         "blocks are staged through host memory";
}

const char* refusal_hint(MemoryType type) {
  if (type != MemoryType::vram) return "NIXL's own log on stderr says why";
  return "UCX reaches device memory if its CUDA module loads and UCX_TLS does not exclude it (all, or cuda_copy and cuda_ipc among the "
         "others); NIXL's own log on stderr says more";
}

// Throws KV_MEMORY_INVALID unless this process can read and write all of it. NIXL registers any
// address, and UCX fails or ends the process when it copies.
void require_process_memory(uint64_t address, uint64_t length) {
  const unique_ptr<FILE, int (*)(FILE*)> maps(fopen("/proc/self/maps", "re"), fclose);
  if (!maps) throw Failure("KV_MEMORY_INVALID", "the address cannot be checked: /proc/self/maps cannot be read", "mount /proc in this container");
  // Everything up to here can be read and written.
  uint64_t checked = address;
  const uint64_t end = address + length;
  char line[4096];
  while (checked < end && fgets(line, sizeof(line), maps.get()) != nullptr) {
    uint64_t first = 0;
    uint64_t last = 0;
    char rights[5] = {};
    if (sscanf(line, "%" SCNx64 "-%" SCNx64 " %4s", &first, &last, rights) != 3) continue;
    if (first <= checked && checked < last && rights[0] == 'r' && rights[1] == 'w') checked = last;
  }
  if (checked >= end) return;
  throw Failure("KV_MEMORY_INVALID",
                to_string(length) + " bytes at " + to_string(address) + " are not memory of this process from " +
                    to_string(checked) + " on: nothing is mapped there, or it cannot be read and written",
                "pass the address and the length of one allocation that is still alive");
}

}  // namespace

Registrations::~Registrations() { counters_.registrations = 0; }

void Registrations::add(uint64_t id, MemoryToRegister wanted) {
  const MemoryRange& range = wanted.range;
  if (backends_.supporting(range.type).empty()) {
    throw Failure("KV_MEMORY_INVALID",
                  "no backend of this agent registers " + string(name_of(range.type)) + ", which is needed for " + describe(range) + " (" +
                      backends_.memory_types() + ")",
                  missing_backend_hint(range.type));
  }
  if (wanted.ask_cuda) require_device_memory(range.address, range.length, range.device);
  if (range.type == MemoryType::dram && wanted.pin == nullptr) require_process_memory(range.address, range.length);
  RegisteredMemory* memory = find_same(range, wanted.backends);
  if (memory == nullptr) {
    NixlRegistration registration(agent_, range, options_for(range.type, wanted.backends), !wanted.backends.empty(), [&](Status status) {
      return Failure("KV_MEMORY_INVALID",
                     "NIXL could not register " + describe(range) + " as " + name_of(range.type) + ": " + nixl::describe(status) +
                         " (backends: " + backends_.memory_types() + ")",
                     refusal_hint(range.type));
    });
    memory = &memories_.emplace_back(RegisteredMemory{range, wanted.backends, wanted.pin, std::move(registration)});
  } else if (memory->pin == nullptr) {
    // The caller registered the addon's memory as its own.
    memory->pin = wanted.pin;
  }
  by_id_.emplace(id, memory);
  ++memory->registrations;
  counters_.registrations = by_id_.size();
}

vector<OwnedOptions> Registrations::options_for(MemoryType type, const vector<string>& chosen) const {
  vector<OwnedOptions> options;
  for (const string& name : chosen.empty() ? backends_.supporting(type) : chosen) options.push_back(backends_.options_for(name));
  return options;
}

RegisteredMemory* Registrations::find_same(const MemoryRange& range, const vector<string>& backends) {
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
      throw Failure("KV_MEMORY_IN_USE", to_string(memory->lists) + " prepared lists describe " + describe(memory->range),
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

vector<RegisteredMemory*> Registrations::holding(MemoryType type, const vector<Row>& rows) {
  vector<RegisteredMemory*> memories;
  for (size_t index = 0; index < rows.size(); ++index) {
    // There may be a million rows, and neighbours usually share a memory.
    if (!memories.empty() && memories.back()->range.holds(rows[index])) continue;
    memories.push_back(find_holder(type, rows[index]));
    if (memories.back() == nullptr) throw_not_registered(type, rows[index], index);
  }
  std::sort(memories.begin(), memories.end());
  memories.erase(std::unique(memories.begin(), memories.end()), memories.end());
  return memories;
}

RegisteredMemory* Registrations::find_holder(MemoryType type, const Row& row) {
  const auto holds = [&](const RegisteredMemory& memory) { return memory.range.type == type && memory.range.holds(row); };
  const auto found = std::ranges::find_if(memories_, holds);
  return found == memories_.end() ? nullptr : &*found;
}

void Registrations::throw_not_registered(MemoryType type, const Row& row, size_t index) {
  const bool storage = is_storage(type);
  const string kind = type == MemoryType::file ? "file" : "object";
  string hint = storage ? "register the " + kind + " with this agent; a row's device is its deviceId, and the address an offset in it"
                             : "register the memory with this agent, or split the row at the end of the memory";
  for (const auto other : {MemoryType::dram, MemoryType::vram}) {
    if (other == type || storage || find_holder(other, row) == nullptr) continue;
    hint = "this range is registered as " + string(name_of(other)) + ": a list is of one memory type, so prepare a list per type";
  }
  throw Failure("KV_MEMORY_NOT_REGISTERED",
                "row " + to_string(index) + " covers [" + to_string(row.address) + ", " + to_string(row.end()) +
                    (storage ? ") of the " + kind + " with deviceId " : ") on device ") + to_string(row.device) +
                    ", which no single registration of " + name_of(type) + " of this agent holds (it has " +
                    to_string(count_of(type)) + ")",
                hint);
}

size_t Registrations::count_of(MemoryType type) const {
  return static_cast<size_t>(std::ranges::count_if(memories_, [&](const auto& memory) { return memory.range.type == type; }));
}

}  // namespace kv::nixl
