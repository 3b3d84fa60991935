#pragma once

#include <map>

#include "events/event.h"
#include "memory/descriptor_layout.h"

namespace kv::nixl {

// Memory as an agent's metadata states it.
class StatedMemory {
 public:
  // `end` must not be below `first`.
  void add(MemoryType type, uint64_t device, uint64_t first, uint64_t end);
  void add(const StatedMemory& other);
  // Whether it has every descriptor of the row.
  bool holds(MemoryType type, const Row& row) const;

 private:
  // By type and device: each range's end by its beginning. Ranges never touch.
  std::map<std::pair<MemoryType, uint64_t>, std::map<uint64_t, uint64_t>> ranges_;
};

struct AgentMetadata {
  string agent;
  // By backend.
  std::map<string, string> connections;
  StatedMemory memory;
  // Where the sections of memory begin, in bytes.
  size_t sections_at = 0;
};

// This agent's metadata for its peers. Throws KV_AGENT_INVALID.
Bytes local_metadata(Agent agent);

// Copies bytes that NIXL allocated, and frees them.
Bytes take_bytes(void* data, size_t length);
// Joins an agent's metadata: the first part's connections, and all memory. NIXL makes a part per
// memory type.
Bytes join_metadata(const vector<Bytes>& parts);

// Checks metadata's framing from end to end: NIXL's loader trusts the bytes, and a wrong memory
// type ends the process. Cannot check connection data and keys, so authenticate peers too. Throws
// KV_AGENT_METADATA_INVALID with the first invalid byte.
AgentMetadata read_metadata(const Bytes& bytes);

}  // namespace kv::nixl
