// What one agent has registered with NIXL: memory, however many registrations name it, and files. Deregistered with it.
#pragma once

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "counters.h"
#include "descriptors.h"
#include "handle.h"
#include "list.h"
#include "mapping.h"
#include "nixl_capi.h"

namespace kv::nixl {

class Registrations {
 public:
  // All outlive it.
  Registrations(const capi::Functions& nixl, capi::Agent agent, Counters& counters)
      : nixl_(nixl), agent_(agent), counters_(counters) {}
  ~Registrations();
  Registrations(const Registrations&) = delete;
  Registrations& operator=(const Registrations&) = delete;

  void add_memory(uint64_t id, std::shared_ptr<Pin> pin);
  // A file that is open, as far as `length`. Its lists are the agent's own, and stand on the remote side of a transfer.
  void add_file(uint64_t id, uint64_t descriptor, uint64_t length);
  void remove(uint64_t id);
  // Whether peers may have something to reach here.
  bool any_memory() const { return !memories_.empty(); }

  // What the rows lie in, each in one memory or one file. Throws KV_MEMORY_NOT_REGISTERED.
  std::vector<const Mapping*> memories_of(const std::vector<Row>& rows) const;
  std::vector<uint64_t> files_of(const std::vector<Row>& rows) const;
  // Its memories and files are not deregistered before `let_go`.
  void hold(const List& list);
  void let_go(const List& list);

 private:
  struct Memory {
    std::shared_ptr<Pin> pin;
    Handle<capi::RegDlist> list;
    uint32_t registrations = 0;
    uint32_t lists = 0;
  };

  struct File {
    uint64_t descriptor;
    uint64_t length;
    Handle<capi::RegDlist> list;
    uint32_t lists = 0;
  };

  const Mapping* memory_of(const Row& row, size_t index) const;
  uint64_t file_of(const Row& row, size_t index) const;
  void remove_file(std::unordered_map<uint64_t, File>::iterator file);
  void count() { counters_.registrations = by_id_.size() + files_.size(); }

  const capi::Functions& nixl_;
  capi::Agent agent_;
  Counters& counters_;
  std::unordered_map<const Mapping*, Memory> memories_;
  std::unordered_map<uint64_t, const Mapping*> by_id_;
  std::unordered_map<uint64_t, File> files_;
};

}  // namespace kv::nixl
