#pragma once

#include <map>
#include <string>

#include "agent/event.h"
#include "library/nixl_capi.h"

namespace kv::nixl {

// The parts of an agent's metadata that the addon reads.
struct AgentMetadata {
  // The agent's name.
  std::string agent;
  // Connection data by backend.
  std::map<std::string, std::string> connections;
};

// The metadata of this agent, as NIXL writes it for its peers. Throws KV_AGENT_INVALID.
Bytes local_metadata(const capi::Functions& nixl, capi::Agent agent);

// Checks a peer's metadata before NIXL loads it: NIXL's loader trusts the bytes, and a wrong memory type, in a section's list or in a key of
// UCX, ends the process. Reads NIXL's framing from end to end. Cannot check a backend's connection data, so authenticate peers as well.
// Throws KV_AGENT_METADATA_INVALID, naming the first invalid byte.
AgentMetadata read_metadata(const Bytes& bytes);

}  // namespace kv::nixl
