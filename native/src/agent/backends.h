#pragma once

#include <list>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "events/event.h"
#include "library/handle.h"
#include "library/nixl_library.h"
#include "memory/memory_types.h"

namespace kv::nixl {

// A backend of an agent, with parameters of its plugin.
struct BackendSpec {
  std::string name;
  Parameters parameters;
};

// The backends of one agent. Lives on the agent's thread. NIXL ends them with its agent.
class Backends {
 public:
  // Both references outlive it.
  Backends(const NixlLibrary& library, capi::Agent agent) : library_(library), nixl_(library.functions()), agent_(agent) {}
  Backends(const Backends&) = delete;
  Backends& operator=(const Backends&) = delete;

  // Creates a backend. Takes up to a second. Throws KV_BACKEND_UNAVAILABLE, also for a backend that
  // the agent has.
  void create(const BackendSpec& spec);
  // The memory types and parameters that a plugin states before a backend of it is created. Throws
  // KV_BACKEND_UNAVAILABLE.
  ParameterSet describe_plugin(const std::string& name) const;
  // The memory types that a backend of the agent registers, and the parameters that it was created
  // with. Throws KV_BACKEND_UNAVAILABLE.
  ParameterSet describe(const std::string& name) const;
  // Options that select the named backends for one call; null for no names. Throws
  // KV_BACKEND_UNAVAILABLE for a name that the agent has not.
  Handle<capi::OptArgs> options_for(const std::vector<std::string>& names) const;
  // What is known of keys at a storage backend: parameters for each key, in order, and none for a
  // key that does not exist. Blocks while the backend asks its store. Throws KV_BACKEND_UNAVAILABLE
  // and KV_MEMORY_INVALID.
  QueryAnswers query(const std::string& backend, capi::MemoryType type, const std::vector<std::string>& keys) const;

  // The memory types of each backend.
  const MemoryTypes& memory_types() const { return memory_types_; }
  // How many threads of NIXL copy the bytes of one post.
  unsigned post_threads() const { return post_threads_; }

 private:
  struct Backend {
    std::string name;
    Handle<capi::Backend> handle;
  };

  const Backend& find(const std::string& name) const;
  std::string plugin_names() const;
  Handle<capi::Params> plugin_parameters(const std::string& name, capi::MemList* types) const;

  const NixlLibrary& library_;
  const capi::Functions& nixl_;
  capi::Agent agent_;
  std::list<Backend> backends_;
  MemoryTypes memory_types_;
  unsigned post_threads_ = 1;
};

}  // namespace kv::nixl
