// What one agent has registered with NIXL: memory of the addon's, however many registrations name it, and memory that is not its own.
// Deregistered with it.
#pragma once

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "agent/counters.h"
#include "memory/descriptor_layout.h"
#include "memory/external_registrations.h"
#include "library/handle.h"
#include "memory/prepared_list.h"
#include "memory/mapping.h"
#include "memory/memory_types.h"
#include "library/nixl_capi.h"

namespace kv::nixl {

class Registrations {
 public:
  // All outlive it.
  Registrations(const capi::Functions& nixl, capi::Agent agent, const MemoryTypes& types, Counters& counters)
      : nixl_(nixl), agent_(agent), counters_(counters), foreign_(nixl, agent, types) {}
  ~Registrations();
  Registrations(const Registrations&) = delete;
  Registrations& operator=(const Registrations&) = delete;

  void add_memory(uint64_t id, std::shared_ptr<Pin> pin);
  void add_foreign(uint64_t id, const ExternalMemory& memory);
  void remove(uint64_t id);
  // Whether peers may have something to reach here.
  bool any_memory() const { return !memories_.empty() || foreign_.count_of(capi::MemoryType::vram) > 0; }

  // What the rows lie in, each in one registration of that type. Throws KV_MEMORY_NOT_REGISTERED.
  std::vector<const Mapping*> memories_of(const std::vector<Row>& rows);
  std::vector<ExternalRegistration*> foreign_of(capi::MemoryType type, const std::vector<Row>& rows);
  // What it describes is not deregistered before `let_go`.
  void hold(const PreparedList& list);
  void let_go(const PreparedList& list);

 private:
  struct Memory {
    std::shared_ptr<Pin> pin;
    Handle<capi::RegDlist> list;
    uint32_t registrations = 0;
    uint32_t lists = 0;
  };

  // Null where none holds the row.
  const Mapping* memory_of(const Row& row) const;
  [[noreturn]] void refuse(capi::MemoryType type, const Row& row, size_t index);
  size_t count_of(capi::MemoryType type) const;
  void count() { counters_.registrations = by_id_.size() + foreign_.count(); }

  const capi::Functions& nixl_;
  capi::Agent agent_;
  Counters& counters_;
  std::unordered_map<const Mapping*, Memory> memories_;
  std::unordered_map<uint64_t, const Mapping*> by_id_;
  ExternalRegistrations foreign_;
};

}  // namespace kv::nixl
