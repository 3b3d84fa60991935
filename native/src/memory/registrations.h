#pragma once

#include <inttypes.h>
#include <stdio.h>

#include <algorithm>
#include <list>

#include "agent/backends.h"
#include "memory/allocated_memory.h"
#include "memory/cuda_memory.h"
#include "memory/prepared_list.h"

namespace kv::nixl {

// For device memory, address and device are the runtime's pointer and ordinal; for DRAM the device
// is 0. For a file, the device is its descriptor and the address an offset. For an object, the
// caller chooses the device.
struct MemoryRange {
  MemoryType type = MemoryType::dram;
  uint64_t address = 0;
  uint64_t length = 0;
  uint64_t device = 0;
  // Only objects have one.
  string key = {};

  // One past the last byte.
  uint64_t end() const { return address + length; }
  bool overlaps(const MemoryRange& other) const {
    return same_device(other) && address < other.end() && other.address < end();
  }
  bool same_range(const MemoryRange& other) const {
    return same_device(other) && address == other.address && length == other.length;
  }
  // Whether the whole row lies in it.
  bool holds(const Row& row) const {
    return row.device == device && row.address >= address && row.end() <= end();
  }

 private:
  bool same_device(const MemoryRange& other) const {
    return type == other.type && device == other.device;
  }
};

// For error messages.
inline string describe(const MemoryRange& range) {
  const string length = to_string(range.length) + " bytes";
  if (range.type == MemoryType::file) return "a file of " + length;
  if (range.type == MemoryType::object) return "the object \"" + range.key + "\" of " + length;
  return length + " at " + to_string(range.address) +
         (range.type == MemoryType::dram ? "" : " of device " + to_string(range.device));
}
// Throws KV_MEMORY_INVALID.
inline OwnedRegList make_registration_list(MemoryType type) {
  return make<OwnedRegList>("KV_MEMORY_INVALID", "NIXL could not create a registration list",
                            capi::create_reg_dlist, type);
}
inline Status add_range(const OwnedRegList& list, const MemoryRange& range) {
  return capi::reg_dlist_add_desc(list.get(), range.address, range.length, range.device,
                                  range.key.empty() ? nullptr : range.key.data(), range.key.size());
}

struct MemoryToRegister {
  MemoryRange range;
  // Ask CUDA's driver whether this is device memory.
  bool ask_cuda = false;
  // Set if the addon allocated the memory.
  shared_ptr<Pin> pin;
  // None for all that support the memory.
  vector<string> backends;
};

// Registers a range with NIXL until it is destroyed.
class NixlRegistration {
 public:
  // Each of `options` selects a backend; without options all that support the range register it.
  // Remembers them, since NIXL would fail to deregister from later backends. `all`: every backend
  // must register it, not only one. Throws `refused(status)`.
  template <typename Refused>
  NixlRegistration(Agent agent, const MemoryRange& range, vector<OwnedOptions> options, bool all,
                   Refused refused)
      : agent_(agent), list_(make_registration_list(range.type)) {
    Status status = add_range(list_, range);
    if (status != kSuccess) throw refused(status);
    if (options.empty()) options.emplace_back();
    registered_.reserve(options.size());
    for (auto& backend : options) {
      const Status registered = capi::register_mem(agent, list_.get(), backend.get());
      if (registered == kSuccess)
        registered_.push_back(std::move(backend));
      else
        status = registered;
    }
    if (!registered_.empty() && (status == kSuccess || !all)) return;
    deregister();
    throw refused(status);
  }
  NixlRegistration(NixlRegistration&& other) noexcept = default;
  NixlRegistration& operator=(NixlRegistration&&) = delete;
  ~NixlRegistration() { deregister(); }

  // Backends that refuse keep it.
  Status deregister() {
    Status refused = kSuccess;
    std::erase_if(registered_, [&](const auto& backend) {
      const Status status = capi::deregister_mem(agent_, list_.get(), backend.get());
      if (status != kSuccess) refused = status;
      return status == kSuccess;
    });
    return refused;
  }

 private:
  Agent agent_;
  OwnedRegList list_;
  // One per backend that has registered it.
  vector<OwnedOptions> registered_;
};

// NIXL registered the range once, however many registrations of JavaScript name it.
struct RegisteredMemory {
  MemoryRange range;
  // The caller's choice; none for all that support the memory.
  vector<string> backends;
  // Keeps memory of the addon until it is deregistered; null for other memory.
  shared_ptr<Pin> pin;
  NixlRegistration registration;
  uint32_t registrations = 0;
  // Prepared lists that describe it, which prevent deregistration.
  uint32_t lists = 0;
};

// What one agent has registered: the addon's memory and external memory (files, objects, devices,
// the caller's). Lives on the agent's thread. Its end deregisters everything.
class Registrations {
 public:
  // The references must outlive it.
  Registrations(Agent agent, const Backends& backends, Counters& counters)
      : agent_(agent), backends_(backends), counters_(counters) {}
  ~Registrations() { counters_.registrations = 0; }
  Registrations(const Registrations&) = delete;
  Registrations& operator=(const Registrations&) = delete;

  // The id must be new. Pages should be touched, or their first transfer is slow. Throws
  // KV_MEMORY_INVALID, also for overlapping ranges, and KV_BACKEND_UNAVAILABLE.
  void add(uint64_t id, MemoryToRegister wanted) {
    const MemoryRange& range = wanted.range;
    if (backends_.supporting(range.type).empty()) {
      throw Failure("KV_MEMORY_INVALID",
                    "no backend of this agent registers " + string(name_of(range.type)) +
                        ", which is needed for " + describe(range) + " (" +
                        backends_.memory_types() + ")",
                    missing_backend_hint(range.type));
    }
    if (wanted.ask_cuda) require_device_memory(range.address, range.length, range.device);
    if (range.type == MemoryType::dram && wanted.pin == nullptr)
      require_process_memory(range.address, range.length);
    RegisteredMemory* memory = find_same(range, wanted.backends);
    if (memory == nullptr) {
      NixlRegistration registration(agent_, range, options_for(range.type, wanted.backends),
                                    !wanted.backends.empty(), [&](Status status) {
                                      return Failure(
                                          "KV_MEMORY_INVALID",
                                          "NIXL could not register " + describe(range) + " as " +
                                              name_of(range.type) + ": " + nixl::describe(status) +
                                              " (backends: " + backends_.memory_types() + ")",
                                          refusal_hint(range.type));
                                    });
      memory = &memories_.emplace_back(
          RegisteredMemory{range, wanted.backends, wanted.pin, std::move(registration)});
    } else if (memory->pin == nullptr) {
      // The caller registered the addon's memory as its own.
      memory->pin = wanted.pin;
    }
    by_id_.emplace(id, memory);
    ++memory->registrations;
    counters_.registrations = by_id_.size();
  }
  // Throws KV_MEMORY_IN_USE while a prepared list describes its memory, and
  // KV_MEMORY_NOT_REGISTERED.
  void remove(uint64_t id) {
    const auto found = by_id_.find(id);
    if (found == by_id_.end())
      throw Failure("KV_MEMORY_NOT_REGISTERED", "the registration is already closed");
    RegisteredMemory* memory = found->second;
    if (memory->registrations == 1) {
      if (memory->lists > 0) {
        throw Failure(
            "KV_MEMORY_IN_USE",
            to_string(memory->lists) + " prepared lists describe " + describe(memory->range),
            "close them before the registration");
      }
      check(memory->registration.deregister(), "KV_MEMORY_IN_USE",
            "NIXL did not deregister " + describe(memory->range));
      memories_.remove_if([&](const RegisteredMemory& other) { return &other == memory; });
    } else {
      --memory->registrations;
    }
    by_id_.erase(found);
    counters_.registrations = by_id_.size();
  }
  // Throws KV_MEMORY_NOT_REGISTERED.
  const MemoryRange& range_of(uint64_t id) const {
    const auto found = by_id_.find(id);
    if (found == by_id_.end())
      throw Failure("KV_MEMORY_NOT_REGISTERED", "the registration is closed");
    return found->second->range;
  }
  bool any_reachable() const {
    return std::ranges::any_of(memories_,
                               [](const auto& memory) { return !is_storage(memory.range.type); });
  }

  // Each memory once. Throws KV_MEMORY_NOT_REGISTERED for a row that lies in none.
  vector<RegisteredMemory*> holding(MemoryType type, const vector<Row>& rows) {
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

 private:
  static const char* missing_backend_hint(MemoryType type) {
    if (type == MemoryType::file)
      return "create the agent with a storage backend for files, such as POSIX";
    if (type == MemoryType::object)
      return "create the agent with a storage backend for objects, such as OBJ";
    if (type == MemoryType::dram)
      return "create the agent with a backend for host memory, such as UCX";
    return "create the agent with a backend for device memory: UCX on a machine with a GPU, or LIBFABRIC with a provider for it, such as efa; without one, "
           "blocks are staged through host memory";
  }

  static const char* refusal_hint(MemoryType type) {
    if (type != MemoryType::vram) return "NIXL's own log on stderr says why";
    return "UCX reaches device memory if its CUDA module loads and UCX_TLS does not exclude it (all, or cuda_copy and cuda_ipc among the "
           "others); NIXL's own log on stderr says more";
  }

  // Throws KV_MEMORY_INVALID unless this process can read and write all of it. NIXL registers any
  // address, and UCX fails or ends the process when it copies.
  static void require_process_memory(uint64_t address, uint64_t length) {
    const unique_ptr<FILE, int (*)(FILE*)> maps(fopen("/proc/self/maps", "re"), fclose);
    if (!maps)
      throw Failure("KV_MEMORY_INVALID",
                    "the address cannot be checked: /proc/self/maps cannot be read",
                    "mount /proc in this container");
    // Everything up to here can be read and written.
    uint64_t checked = address;
    const uint64_t end = address + length;
    char line[4096];
    while (checked < end && fgets(line, sizeof(line), maps.get()) != nullptr) {
      uint64_t first = 0;
      uint64_t last = 0;
      char rights[5] = {};
      if (sscanf(line, "%" SCNx64 "-%" SCNx64 " %4s", &first, &last, rights) != 3) continue;
      if (first <= checked && checked < last && rights[0] == 'r' && rights[1] == 'w')
        checked = last;
    }
    if (checked >= end) return;
    throw Failure("KV_MEMORY_INVALID",
                  to_string(length) + " bytes at " + to_string(address) +
                      " are not memory of this process from " + to_string(checked) +
                      " on: nothing is mapped there, or it cannot be read and written",
                  "pass the address and the length of one allocation that is still alive");
  }

  vector<OwnedOptions> options_for(MemoryType type, const vector<string>& chosen) const {
    vector<OwnedOptions> options;
    for (const string& name : chosen.empty() ? backends_.supporting(type) : chosen)
      options.push_back(backends_.options_for(name));
    return options;
  }
  RegisteredMemory* find_same(const MemoryRange& range, const vector<string>& backends) {
    for (RegisteredMemory& memory : memories_) {
      if (memory.range.same_range(range)) {
        if (memory.backends == backends) return &memory;
        throw Failure("KV_MEMORY_INVALID",
                      describe(range) + " are registered already, with another choice of backends",
                      "close that registration, or choose the same backends in the same order");
      }
      // NIXL could prepare a list by the registration that ends first.
      if (memory.range.overlaps(range)) {
        throw Failure("KV_MEMORY_INVALID",
                      describe(range) + " overlap " + describe(memory.range) +
                          ", which this agent has registered",
                      "register an allocation once, as a whole");
      }
    }
    return nullptr;
  }
  RegisteredMemory* find_holder(MemoryType type, const Row& row) {
    const auto holds = [&](const RegisteredMemory& memory) {
      return memory.range.type == type && memory.range.holds(row);
    };
    const auto found = std::ranges::find_if(memories_, holds);
    return found == memories_.end() ? nullptr : &*found;
  }
  [[noreturn]] void throw_not_registered(MemoryType type, const Row& row, size_t index) {
    const bool storage = is_storage(type);
    const string kind = type == MemoryType::file ? "file" : "object";
    string hint =
        storage
            ? "register the " + kind +
                  " with this agent; a row's device is its deviceId, and the address an offset in it"
            : "register the memory with this agent, or split the row at the end of the memory";
    for (const auto other : {MemoryType::dram, MemoryType::vram}) {
      if (other == type || storage || find_holder(other, row) == nullptr) continue;
      hint = "this range is registered as " + string(name_of(other)) +
             ": a list is of one memory type, so prepare a list per type";
    }
    throw Failure("KV_MEMORY_NOT_REGISTERED",
                  "row " + to_string(index) + " covers [" + to_string(row.address) + ", " +
                      to_string(row.end()) +
                      (storage ? ") of the " + kind + " with deviceId " : ") on device ") +
                      to_string(row.device) + ", which no single registration of " + name_of(type) +
                      " of this agent holds (it has " + to_string(count_of(type)) + ")",
                  hint);
  }
  size_t count_of(MemoryType type) const {
    return static_cast<size_t>(std::ranges::count_if(
        memories_, [&](const auto& memory) { return memory.range.type == type; }));
  }

  Agent agent_;
  const Backends& backends_;
  Counters& counters_;
  // A list, since prepared lists point to its elements.
  std::list<RegisteredMemory> memories_;
  unordered_map<uint64_t, RegisteredMemory*> by_id_;
};

}  // namespace kv::nixl
