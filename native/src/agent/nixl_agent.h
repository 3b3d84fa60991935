#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "agent/counters.h"
#include "agent/event.h"
#include "agent/notification_poller.h"
#include "libfabric/safeguards.h"
#include "library/handle.h"
#include "library/nixl_library.h"
#include "memory/memory_types.h"
#include "memory/prepared_list.h"
#include "memory/registrations.h"
#include "peers/peers.h"
#include "transfer/request_factory.h"

namespace kv::nixl {

// A backend of an agent, with parameters of its plugin.
struct BackendSpec {
  std::string name;
  std::vector<std::pair<std::string, std::string>> parameters;
};

// What an agent is created from.
struct AgentConfig {
  std::string library_path;
  std::string name;
  std::vector<BackendSpec> backends;
  // Paths of libraries that plugins need and that the loader would not find.
  std::vector<std::string> preload;
  // A backend does not report a peer's death.
  bool watch_peers = false;
  // A backend reports a WRITE as done when its bytes have left, not when they have landed.
  bool probe_writes = false;
  // A backend carries notifications. Storage does not.
  bool notifies = true;
};

// The NIXL objects of one agent. Created, used and destroyed on the agent's thread. They are released in the order that NIXL needs: prepared
// lists, peers, registrations, backends, agent.
class NixlAgent {
 public:
  // Loads NIXL and creates the agent and its backends. Throws KV_LIBRARY_INCOMPATIBLE, KV_AGENT_INVALID and KV_BACKEND_UNAVAILABLE.
  NixlAgent(const AgentConfig& config, Counters& counters);
  ~NixlAgent();
  NixlAgent(const NixlAgent&) = delete;
  NixlAgent& operator=(const NixlAgent&) = delete;

  // The functions of NIXL's C API.
  const capi::Functions& nixl() const { return nixl_; }
  // NIXL's agent, for calls of those functions.
  capi::Agent handle() const { return agent_.get(); }
  // What the agent has done so far.
  Counters& counters() { return counters_; }
  // Takes the notifications that peers have sent.
  NotificationPoller& poller() { return poller_; }
  // Adds the guarantees that LIBFABRIC over TCP lacks.
  LibfabricSafeguards& safeguards() { return safeguards_; }
  // The memory that the agent has registered.
  Registrations& registrations() { return registrations_; }
  // The peers that the agent knows.
  Peers& peers() { return peers_; }
  // Makes transfer requests.
  RequestFactory& requests() { return requests_; }

  // How many threads of NIXL copy the bytes of one post.
  unsigned post_threads() const { return post_threads_; }
  // The agent's metadata, which describes the memory that is registered now. Throws KV_AGENT_INVALID.
  Bytes metadata() const { return local_metadata(nixl_, agent_.get()); }
  // Prepares a list of the agent's own memory, or of the memory of the peer `remote`. `stopping` ends the reading of a large table. Throws
  // KV_LIST_INVALID, KV_MEMORY_NOT_REGISTERED, KV_AGENT_UNKNOWN_REMOTE and KV_AGENT_CLOSED.
  std::shared_ptr<PreparedList> prepare(std::optional<std::string> remote, capi::MemoryType type, const DescriptorTable& table,
                                        const std::atomic<bool>& stopping);
  // Releases a list that no transfer uses.
  void release(const std::shared_ptr<PreparedList>& list);

  // Whether peers may have something to reach here.
  bool reachable() const { return registrations_.any_reachable() || peers_.any(); }

 private:
  std::vector<Handle<capi::Backend>> create_backends(const std::vector<BackendSpec>& specs);
  capi::Backend create_backend(const BackendSpec& spec);
  void read_memory_types(const std::string& backend, capi::Backend handle);
  std::string plugin_names() const;
  void prepare_remote(PreparedList& list);

  const NixlLibrary& library_;
  const capi::Functions& nixl_;
  Counters& counters_;
  const std::string name_;
  // From here on the order matters: members are destroyed from the last to the first.
  Handle<capi::Agent> agent_;
  MemoryTypes memory_types_;
  unsigned post_threads_ = 1;
  std::vector<Handle<capi::Backend>> backends_;
  NotificationPoller poller_;
  LibfabricSafeguards safeguards_;
  Registrations registrations_;
  Peers peers_;
  RequestFactory requests_;
  std::set<std::shared_ptr<PreparedList>> lists_;
};

}  // namespace kv::nixl
