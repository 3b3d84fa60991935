// A look at a peer's metadata before NIXL loads it. NIXL's loader trusts the bytes: a wrong memory type takes the process
// down, in a section's list or in a key of UCX. What lies inside a backend's connection data cannot be seen from here; that is what
// authentication is for.
#pragma once

#include <map>
#include <string>

#include "agent/event.h"
#include "library/nixl_capi.h"

namespace kv::nixl {

struct AgentMetadata {
  std::string agent;
  std::map<std::string, std::string> connections;  // by backend
};

// What an agent tells its peers of itself, as NIXL writes it.
Bytes local_metadata(const capi::Functions& nixl, capi::Agent agent);

// Reads NIXL's framing from end to end. Throws Failure KV_AGENT_METADATA_INVALID saying where it stops making sense.
AgentMetadata read_metadata(const Bytes& bytes);

}  // namespace kv::nixl
