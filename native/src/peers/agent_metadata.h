#pragma once

#include <map>
#include <string>
#include <vector>

#include "events/event.h"
#include "library/nixl_capi.h"

namespace kv::nixl {

// The parts of an agent's metadata that the addon reads.
struct AgentMetadata {
  // The agent's name.
  std::string agent;
  // Connection data by backend.
  std::map<std::string, std::string> connections;
  // Where the sections of memory begin, in bytes.
  size_t sections_at = 0;
};

// The metadata of this agent, as NIXL writes it for its peers. Throws KV_AGENT_INVALID.
Bytes local_metadata(const capi::Functions& nixl, capi::Agent agent);

// The bytes that NIXL has allocated, copied and freed.
Bytes take_bytes(void* data, size_t length);
// Joins metadata of one agent: the connections of the first part, and the sections of memory of
// all. NIXL makes each part for one memory type.
Bytes join_metadata(const std::vector<Bytes>& parts);

// Checks a peer's metadata before NIXL loads it: NIXL's loader trusts the bytes, and a wrong memory
// type of a section ends the process. Reads NIXL's framing from end to end. Cannot check what only
// a backend reads, connection data and keys, so authenticate peers as well. Throws
// KV_AGENT_METADATA_INVALID, naming the first invalid byte.
AgentMetadata read_metadata(const Bytes& bytes);

}  // namespace kv::nixl
