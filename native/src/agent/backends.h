#pragma once

#include "events/event.h"
#include "library/nixl_library.h"

namespace kv::nixl {

// NIXL's name, such as "VRAM".
const char* name_of(MemoryType type);
// None for a name that no prepared list can have.
optional<MemoryType> memory_type_named(string_view name);
// Files and objects. Storage has no peer: NIXL's remote lists of it carry the agent's own name.
inline bool is_storage(MemoryType type) { return type == MemoryType::file || type == MemoryType::object; }

struct BackendSpec {
  string name;
  vector<std::pair<string, string>> parameters;
};

struct BackendSelection {
  vector<BackendSpec> backends;
  // Libraries that plugins need and the loader would not find.
  vector<string> preload;
  // A backend does not report a peer's death.
  bool watch_peers = false;
  // A backend reports a WRITE as done before its bytes have landed.
  bool probe_writes = false;
  // A backend carries notifications, unlike storage.
  bool notifies = true;
  // Small calls take microseconds, and never wait for a peer.
  bool brief_calls = false;
};

// The backends of one agent, on the agent's thread. NIXL ends them with its agent.
class Backends {
 public:
  explicit Backends(Agent agent) : agent_(agent) {}
  Backends(const Backends&) = delete;
  Backends& operator=(const Backends&) = delete;

  // Takes up to a second. Throws KV_BACKEND_UNAVAILABLE, also for a backend that exists.
  void create(const BackendSpec& spec);
  // Selects the backend for one call. Throws KV_BACKEND_UNAVAILABLE.
  OwnedOptions options_for(const string& name) const;
  // The backend that carries a request. Empty where NIXL does not say.
  string of_request(Request request) const;

  // In the order of their creation.
  vector<string> supporting(MemoryType type) const;
  // For error messages, such as "UCX: DRAM, VRAM; POSIX: FILE".
  string memory_types() const;
  unsigned post_threads() const { return post_threads_; }

 private:
  struct Backend {
    string name;
    OwnedBackend handle;
    // As the backend itself reports them.
    vector<string> memory_types;
  };

  const Backend& find(const string& name) const;
  string plugin_names() const;
  OwnedParams plugin_parameters(const string& name, OwnedMemList& types) const;

  Agent agent_;
  vector<Backend> backends_;
  unsigned post_threads_ = 1;
};

}  // namespace kv::nixl
