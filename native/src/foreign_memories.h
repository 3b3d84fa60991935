// Memory that an agent has registered and that is not the addon's: files, objects, memory of devices. Its bytes are out of JavaScript's reach.
// Deregistered with this.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <string>
#include <unordered_map>
#include <vector>

#include "descriptors.h"
#include "handle.h"
#include "memory_types.h"
#include "nixl_capi.h"

namespace kv::nixl {

// A file from its beginning on (`device` is its descriptor), an object (`device` is a number of its own), or memory of a device by the
// runtime's pointer and ordinal.
struct ForeignMemory {
  capi::MemoryType type;
  uint64_t address;
  uint64_t length;
  uint64_t device;
  // Whether CUDA's driver is asked if it is what it is said to be.
  bool check;
  // Of an object; empty for all else.
  std::string key;

  uint64_t end() const { return address + length; }
  bool is_of(const ForeignMemory& other) const { return type == other.type && device == other.device; }
  bool overlaps(const ForeignMemory& other) const { return is_of(other) && address < other.end() && other.address < end(); }
  bool same_place(const ForeignMemory& other) const { return is_of(other) && address == other.address && length == other.length; }
  bool holds(const Row& row) const { return row.device == device && row.address >= address && row.end() <= end(); }
};

// One place, however many registrations name it.
struct ForeignRegistration {
  ForeignMemory memory;
  Handle<capi::RegDlist> list;
  uint32_t registrations = 0;
  uint32_t lists = 0;
};

class ForeignMemories {
 public:
  // All outlive it.
  ForeignMemories(const capi::Functions& nixl, capi::Agent agent, const MemoryTypes& types) : nixl_(nixl), agent_(agent), types_(types) {}
  ~ForeignMemories();
  ForeignMemories(const ForeignMemories&) = delete;
  ForeignMemories& operator=(const ForeignMemories&) = delete;

  void add(uint64_t id, const ForeignMemory& memory);
  // False for what is not registered here. Throws KV_MEMORY_IN_USE under a prepared list.
  bool remove(uint64_t id);
  // Registrations.
  size_t count() const { return by_id_.size(); }
  size_t count_of(capi::MemoryType type) const;
  // The one that holds all of the row, or null.
  ForeignRegistration* holder_of(capi::MemoryType type, const Row& row);

 private:
  // The registration of that very place, or null. Throws where another one overlaps it.
  ForeignRegistration* known(const ForeignMemory& memory);
  ForeignRegistration* enter(const ForeignMemory& memory);

  const capi::Functions& nixl_;
  capi::Agent agent_;
  const MemoryTypes& types_;
  // Lists point to them.
  std::list<ForeignRegistration> registered_;
  std::unordered_map<uint64_t, ForeignRegistration*> by_id_;
};

}  // namespace kv::nixl
