#pragma once

#include <string>
#include <vector>

#include "events/event.h"
#include "library/nixl_library.h"

namespace kv::nixl {

// NIXL's name, such as "VRAM".
const char* name_of(capi::MemoryType type);
// None for a name that no prepared list can have.
std::optional<capi::MemoryType> memory_type_named(std::string_view name);
// Files and objects. Storage has no peer: NIXL's remote lists of it carry the agent's own name.
inline bool is_storage(capi::MemoryType type) { return type == capi::MemoryType::file || type == capi::MemoryType::object; }

struct BackendSpec {
  std::string name;
  std::vector<std::pair<std::string, std::string>> parameters;
};

struct BackendSelection {
  std::vector<BackendSpec> backends;
  // Libraries that plugins need and the loader would not find.
  std::vector<std::string> preload;
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
  explicit Backends(capi::Agent agent) : agent_(agent) {}
  Backends(const Backends&) = delete;
  Backends& operator=(const Backends&) = delete;

  // Takes up to a second. Throws KV_BACKEND_UNAVAILABLE, also for a backend that exists.
  void create(const BackendSpec& spec);
  // Selects the backend for one call. Throws KV_BACKEND_UNAVAILABLE.
  OwnedOptions options_for(const std::string& name) const;
  // The backend that carries a request. Empty where NIXL does not say.
  std::string of_request(capi::Request request) const;

  // In the order of their creation.
  std::vector<std::string> supporting(capi::MemoryType type) const;
  // For error messages, such as "UCX: DRAM, VRAM; POSIX: FILE".
  std::string memory_types() const;
  unsigned post_threads() const { return post_threads_; }

 private:
  struct Backend {
    std::string name;
    OwnedBackend handle;
    // As the backend itself reports them.
    std::vector<std::string> memory_types;
  };

  const Backend& find(const std::string& name) const;
  std::string plugin_names() const;
  OwnedParams plugin_parameters(const std::string& name, OwnedMemList& types) const;

  capi::Agent agent_;
  std::vector<Backend> backends_;
  unsigned post_threads_ = 1;
};

}  // namespace kv::nixl
