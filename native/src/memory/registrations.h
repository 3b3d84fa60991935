#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "agent/backends.h"
#include "agent/counters.h"
#include "library/failure.h"
#include "library/handle.h"
#include "library/nixl_capi.h"
#include "memory/descriptor_layout.h"
#include "memory/mapping.h"
#include "memory/prepared_list.h"

namespace kv::nixl {

// A range of memory as NIXL registers it. For DRAM the device is 0. For device memory, address and
// device are the runtime's pointer and ordinal. For a file, the device is its descriptor and the
// address an offset; for an object, the device is a number chosen by the caller.
struct MemoryRange {
  capi::MemoryType type;
  uint64_t address;
  uint64_t length;
  uint64_t device;
  // An object's key; empty for all else.
  std::string key = {};

  // The address one past the last byte.
  uint64_t end() const { return address + length; }
  // Whether both are of one type and device and have bytes in common.
  bool overlaps(const MemoryRange& other) const { return same_device(other) && address < other.end() && other.address < end(); }
  // Whether both are the same bytes.
  bool same_range(const MemoryRange& other) const { return same_device(other) && address == other.address && length == other.length; }
  // Whether all of the row lies in it.
  bool holds(const Row& row) const { return row.device == device && row.address >= address && row.end() <= end(); }

 private:
  bool same_device(const MemoryRange& other) const { return type == other.type && device == other.device; }
};

// Names the range in error messages.
std::string describe(const MemoryRange& range);
// An empty list of NIXL for memory of one type. Throws KV_MEMORY_INVALID.
Handle<capi::RegDlist> make_registration_list(const capi::Functions& nixl, capi::MemoryType type);
// Adds a range to such a list.
capi::Status add_range(const capi::Functions& nixl, capi::RegDlist list, const MemoryRange& range);

// Registers a range with NIXL and deregisters it when destroyed.
class NixlRegistration {
 public:
  // Registers the range once for each of `options`, which select a backend each; null for all that
  // support the memory. The backends are remembered: NIXL would deregister memory from backends
  // that were created since, and fail. With `all` every backend must register it, otherwise one.
  // Throws `refused(status)`.
  template <typename Refused>
  NixlRegistration(const capi::Functions& nixl, capi::Agent agent, const MemoryRange& range, std::vector<Handle<capi::OptArgs>> options, bool all,
                   Refused refused)
      : nixl_(&nixl), agent_(agent), list_(make_registration_list(nixl, range.type)) {
    capi::Status status = add_range(nixl, list_.get(), range);
    if (status != capi::kSuccess) throw refused(status);
    for (auto& backend : options) {
      const capi::Status registered = nixl.register_mem(agent, list_.get(), backend.get());
      if (registered == capi::kSuccess) registered_.push_back(std::move(backend));
      else status = registered;
    }
    if (!registered_.empty() && (status == capi::kSuccess || !all)) return;
    deregister();
    throw refused(status);
  }
  NixlRegistration(NixlRegistration&& other) noexcept = default;
  NixlRegistration& operator=(NixlRegistration&&) = delete;
  ~NixlRegistration() { deregister(); }

  // Deregisters it now. Backends that refuse keep it.
  capi::Status deregister() {
    capi::Status refused = capi::kSuccess;
    std::erase_if(registered_, [&](const auto& backend) {
      const capi::Status status = nixl_->deregister_mem(agent_, list_.get(), backend.get());
      if (status != capi::kSuccess) refused = status;
      return status == capi::kSuccess;
    });
    return refused;
  }

 private:
  const capi::Functions* nixl_;
  capi::Agent agent_;
  Handle<capi::RegDlist> list_;
  // The options of each backend that has registered it.
  std::vector<Handle<capi::OptArgs>> registered_;
};

// A range that an agent registered once with NIXL, however many registrations of JavaScript name
// it.
struct RegisteredMemory {
  MemoryRange range;
  // The backends that the caller chose; none for all that support the memory.
  std::vector<std::string> backends;
  // Keeps memory that the addon allocated until it is deregistered; null for all else.
  std::shared_ptr<const void> kept;
  NixlRegistration registration;
  uint32_t registrations = 0;
  // Prepared lists that describe it. It is not deregistered while there are any.
  uint32_t lists = 0;
};

// The memory that one agent has registered: memory that the addon allocated, and external memory
// (files, objects, memory of a device or of the caller). Lives on the agent's thread. Everything is
// deregistered when it is destroyed.
class Registrations {
 public:
  // All arguments outlive it.
  Registrations(const capi::Functions& nixl, capi::Agent agent, const Backends& backends, Counters& counters)
      : nixl_(nixl), agent_(agent), backends_(backends), counters_(counters) {}
  ~Registrations();
  Registrations(const Registrations&) = delete;
  Registrations& operator=(const Registrations&) = delete;

  // Registers memory that the addon allocated, under an id that was not used before. Its pages
  // should be touched: the first transfer to each is slow otherwise. `backends`: the chosen ones;
  // none for all that support the memory. Throws KV_MEMORY_INVALID and KV_BACKEND_UNAVAILABLE.
  void add_allocated(uint64_t id, std::shared_ptr<Pin> pin, const std::vector<std::string>& backends);
  // Registers memory by its address. `ask_cuda`: ask CUDA's driver whether the range is device
  // memory. `kept`: the memory, where the addon allocated it. Throws KV_MEMORY_INVALID, also where
  // the range overlaps another one, and KV_BACKEND_UNAVAILABLE.
  void add_external(uint64_t id, const MemoryRange& range, bool ask_cuda, std::shared_ptr<const void> kept, const std::vector<std::string>& backends);
  // Ends a registration. Throws KV_MEMORY_IN_USE while a prepared list describes its memory, and
  // KV_MEMORY_NOT_REGISTERED.
  void remove(uint64_t id);
  // The range of a registration. Throws KV_MEMORY_NOT_REGISTERED.
  const MemoryRange& range_of(uint64_t id) const;
  // Whether peers can reach memory of this agent.
  bool any_reachable() const {
    return std::ranges::any_of(memories_, [](const auto& memory) { return !is_storage(memory.range.type); });
  }

  // The registrations that hold the rows, each once. Throws KV_MEMORY_NOT_REGISTERED for a row that
  // no single registration holds.
  std::vector<RegisteredMemory*> holding(capi::MemoryType type, const std::vector<Row>& rows);

 private:
  void add(uint64_t id, const MemoryRange& range, std::shared_ptr<const void> kept, const std::vector<std::string>& backends);
  std::vector<Handle<capi::OptArgs>> options_for(capi::MemoryType type, const std::vector<std::string>& chosen) const;
  RegisteredMemory* find_same(const MemoryRange& range, const std::vector<std::string>& backends);
  RegisteredMemory* find_holder(capi::MemoryType type, const Row& row);
  [[noreturn]] void throw_not_registered(capi::MemoryType type, const Row& row, size_t index);
  size_t count_of(capi::MemoryType type) const;

  const capi::Functions& nixl_;
  capi::Agent agent_;
  const Backends& backends_;
  Counters& counters_;
  // A list, since prepared lists point to its elements.
  std::list<RegisteredMemory> memories_;
  std::unordered_map<uint64_t, RegisteredMemory*> by_id_;
};

}  // namespace kv::nixl
