#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "agent/backends.h"
#include "agent/counters.h"
#include "agent/notification_poller.h"
#include "events/event.h"
#include "libfabric/safeguards.h"
#include "library/handle.h"
#include "library/nixl_library.h"
#include "memory/memory_types.h"
#include "memory/prepared_list.h"
#include "memory/registrations.h"
#include "peers/peers.h"
#include "request/prepared_transfer.h"
#include "request/request_factory.h"

namespace kv::nixl {

// Backends to create, and what has to be done for them.
struct BackendSelection {
  std::vector<BackendSpec> backends;
  // Paths of libraries that plugins need and that the loader would not find.
  std::vector<std::string> preload;
  // A backend does not report a peer's death.
  bool watch_peers = false;
  // A backend reports a WRITE as done when its bytes have left, not when they have landed.
  bool probe_writes = false;
  // A backend carries notifications. Storage does not.
  bool notifies = true;
  // Small calls for memory of peers take microseconds, and never wait for a peer.
  bool brief_calls = false;
};

// What an agent is created from.
struct AgentConfig {
  std::string library_path;
  std::string name;
  BackendSelection selection;
  // NIXL measures each request.
  bool capture_telemetry = false;
};

// The NIXL objects of one agent. Created and destroyed on the agent's thread, and used by the
// thread that has the agent's turn. They are released in the order that NIXL needs: prepared lists,
// peers, registrations, backends, agent.
class NixlAgent {
 public:
  // Loads NIXL and creates the agent and its backends. Throws KV_LIBRARY_INCOMPATIBLE,
  // KV_AGENT_INVALID and KV_BACKEND_UNAVAILABLE.
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

  // The agent's backends.
  Backends& backends() { return backends_; }
  // Whether NIXL measures each request.
  bool captures_telemetry() const { return captures_telemetry_; }
  // Whether small calls for memory of peers take microseconds, with every backend.
  bool has_brief_calls() const { return has_brief_calls_; }
  // Creates more backends. Memory that is registered now stays unknown to them. Throws
  // KV_BACKEND_UNAVAILABLE.
  void add_backends(const BackendSelection& selection);
  // The agent's metadata, which describes the memory that is registered now. Throws
  // KV_AGENT_INVALID.
  Bytes metadata() const { return local_metadata(nixl_, agent_.get()); }
  // The agent's metadata with the memory of these registrations only. Throws KV_AGENT_INVALID and
  // KV_MEMORY_NOT_REGISTERED.
  Bytes partial_metadata(const std::vector<uint64_t>& registrations) const;
  // Prepares a list of the agent's own memory, or of the memory of the peer `remote`. `stopping`
  // ends the reading of a large table. Throws KV_LIST_INVALID, KV_MEMORY_NOT_REGISTERED,
  // KV_AGENT_UNKNOWN_REMOTE and KV_AGENT_CLOSED.
  std::shared_ptr<PreparedList> prepare(std::optional<std::string> remote, capi::MemoryType type, const DescriptorTable& table,
                                        const std::atomic<bool>& stopping);
  // Releases a list that no transfer uses.
  void release(const std::shared_ptr<PreparedList>& list);
  // Prepares a slicer for a transfer between two lists.
  void start_slicing(Slicer& slicer, PreparedList& local, PreparedList& remote);
  // Makes the NIXL requests of a transfer that is posted many times. Throws KV_TRANSFER_FAILED.
  void prepare(const std::shared_ptr<PreparedTransfer>& transfer);
  // Releases the requests of a transfer that is not under way.
  void release(const std::shared_ptr<PreparedTransfer>& transfer);

  // Whether peers may have something to reach here.
  bool reachable() const { return registrations_.any_reachable() || peers_.any(); }

 private:
  void prepare_remote(PreparedList& list);

  const NixlLibrary& library_;
  const capi::Functions& nixl_;
  Counters& counters_;
  const std::string name_;
  // From here on the order matters: members are destroyed from the last to the first.
  Handle<capi::Agent> agent_;
  const bool captures_telemetry_;
  bool has_brief_calls_ = true;
  Backends backends_;
  NotificationPoller poller_;
  LibfabricSafeguards safeguards_;
  Registrations registrations_;
  Peers peers_;
  RequestFactory requests_;
  std::set<std::shared_ptr<PreparedList>> lists_;
  std::set<std::shared_ptr<PreparedTransfer>> prepared_transfers_;
};

}  // namespace kv::nixl
