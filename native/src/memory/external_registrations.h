// Memory that an agent has registered and that is not the addon's: files, objects, memory of devices. Its bytes are out of JavaScript's reach.
// Deregistered with this.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <string>
#include <unordered_map>
#include <vector>

#include "memory/descriptor_layout.h"
#include "library/handle.h"
#include "memory/memory_types.h"
#include "library/nixl_capi.h"

namespace kv::nixl {

// A file from its beginning on (`device` is its descriptor), an object (`device` is a number of its own), or memory of a device by the
// runtime's pointer and ordinal.
struct ExternalMemory {
  capi::MemoryType type;
  uint64_t address;
  uint64_t length;
  uint64_t device;
  // Whether CUDA's driver is asked if it is what it is said to be.
  bool check;
  // Of an object; empty for all else.
  std::string key;

  uint64_t end() const { return address + length; }
  bool is_of(const ExternalMemory& other) const { return type == other.type && device == other.device; }
  bool overlaps(const ExternalMemory& other) const { return is_of(other) && address < other.end() && other.address < end(); }
  bool same_place(const ExternalMemory& other) const { return is_of(other) && address == other.address && length == other.length; }
  bool holds(const Row& row) const { return row.device == device && row.address >= address && row.end() <= end(); }
};

// One place, however many registrations name it.
struct ExternalRegistration {
  ExternalMemory memory;
  Handle<capi::RegDlist> list;
  uint32_t registrations = 0;
  uint32_t lists = 0;
};

class ExternalRegistrations {
 public:
  // All outlive it.
  ExternalRegistrations(const capi::Functions& nixl, capi::Agent agent, const MemoryTypes& types) : nixl_(nixl), agent_(agent), types_(types) {}
  ~ExternalRegistrations();
  ExternalRegistrations(const ExternalRegistrations&) = delete;
  ExternalRegistrations& operator=(const ExternalRegistrations&) = delete;

  void add(uint64_t id, const ExternalMemory& memory);
  // False for what is not registered here. Throws KV_MEMORY_IN_USE under a prepared list.
  bool remove(uint64_t id);
  // Registrations.
  size_t count() const { return by_id_.size(); }
  size_t count_of(capi::MemoryType type) const;
  // The one that holds all of the row, or null.
  ExternalRegistration* holder_of(capi::MemoryType type, const Row& row);

 private:
  // The registration of that very place, or null. Throws where another one overlaps it.
  ExternalRegistration* known(const ExternalMemory& memory);
  ExternalRegistration* enter(const ExternalMemory& memory);

  const capi::Functions& nixl_;
  capi::Agent agent_;
  const MemoryTypes& types_;
  // Lists point to them.
  std::list<ExternalRegistration> registered_;
  std::unordered_map<uint64_t, ExternalRegistration*> by_id_;
};

}  // namespace kv::nixl
