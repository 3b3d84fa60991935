#pragma once

#include <algorithm>
#include <list>

#include "agent/backends.h"
#include "memory/allocated_memory.h"
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
  bool overlaps(const MemoryRange& other) const { return same_device(other) && address < other.end() && other.address < end(); }
  bool same_range(const MemoryRange& other) const { return same_device(other) && address == other.address && length == other.length; }
  // Whether the whole row lies in it.
  bool holds(const Row& row) const { return row.device == device && row.address >= address && row.end() <= end(); }

 private:
  bool same_device(const MemoryRange& other) const { return type == other.type && device == other.device; }
};

// For error messages.
string describe(const MemoryRange& range);
// Throws KV_MEMORY_INVALID.
OwnedRegList make_registration_list(MemoryType type);
Status add_range(const OwnedRegList& list, const MemoryRange& range);

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
  NixlRegistration(Agent agent, const MemoryRange& range, vector<OwnedOptions> options, bool all, Refused refused)
      : agent_(agent), list_(make_registration_list(range.type)) {
    Status status = add_range(list_, range);
    if (status != kSuccess) throw refused(status);
    if (options.empty()) options.emplace_back();
    registered_.reserve(options.size());
    for (auto& backend : options) {
      const Status registered = capi::register_mem(agent, list_.get(), backend.get());
      if (registered == kSuccess) registered_.push_back(std::move(backend));
      else status = registered;
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
  Registrations(Agent agent, const Backends& backends, Counters& counters) : agent_(agent), backends_(backends), counters_(counters) {}
  ~Registrations();
  Registrations(const Registrations&) = delete;
  Registrations& operator=(const Registrations&) = delete;

  // The id must be new. Pages should be touched, or their first transfer is slow. Throws
  // KV_MEMORY_INVALID, also for overlapping ranges, and KV_BACKEND_UNAVAILABLE.
  void add(uint64_t id, MemoryToRegister memory);
  // Throws KV_MEMORY_IN_USE while a prepared list describes its memory, and
  // KV_MEMORY_NOT_REGISTERED.
  void remove(uint64_t id);
  // Throws KV_MEMORY_NOT_REGISTERED.
  const MemoryRange& range_of(uint64_t id) const;
  bool any_reachable() const {
    return std::ranges::any_of(memories_, [](const auto& memory) { return !is_storage(memory.range.type); });
  }

  // Each memory once. Throws KV_MEMORY_NOT_REGISTERED for a row that lies in none.
  vector<RegisteredMemory*> holding(MemoryType type, const vector<Row>& rows);

 private:
  vector<OwnedOptions> options_for(MemoryType type, const vector<string>& chosen) const;
  RegisteredMemory* find_same(const MemoryRange& range, const vector<string>& backends);
  RegisteredMemory* find_holder(MemoryType type, const Row& row);
  [[noreturn]] void throw_not_registered(MemoryType type, const Row& row, size_t index);
  size_t count_of(MemoryType type) const;

  Agent agent_;
  const Backends& backends_;
  Counters& counters_;
  // A list, since prepared lists point to its elements.
  std::list<RegisteredMemory> memories_;
  unordered_map<uint64_t, RegisteredMemory*> by_id_;
};

}  // namespace kv::nixl
