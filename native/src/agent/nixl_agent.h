#pragma once

#include <set>

#include "agent/backends.h"
#include "agent/notification_poller.h"
#include "peers/peers.h"
#include "transfer/request_factory.h"

namespace kv::nixl {

struct AgentConfig {
  string library_path;
  string name;
  BackendSelection selection;
  // Makes NIXL measure each request.
  bool capture_telemetry = false;
};

// The NIXL objects of one agent, for the thread that has its turn. The agent's thread creates and
// destroys them. NIXL needs this order of release: prepared lists, peers, registrations, backends,
// agent.
class NixlAgent {
 public:
  // Loads NIXL. Throws KV_LIBRARY_INCOMPATIBLE, KV_AGENT_INVALID and KV_BACKEND_UNAVAILABLE.
  NixlAgent(const AgentConfig& config, Counters& counters);
  ~NixlAgent();
  NixlAgent(const NixlAgent&) = delete;
  NixlAgent& operator=(const NixlAgent&) = delete;

  Agent handle() const { return agent_.get(); }
  Counters& counters() { return counters_; }
  NotificationPoller& poller() { return poller_; }
  LibfabricSafeguards& safeguards() { return safeguards_; }
  Registrations& registrations() { return registrations_; }
  Peers& peers() { return peers_; }
  RequestFactory& requests() { return requests_; }

  Backends& backends() { return backends_; }
  bool captures_telemetry() const { return captures_telemetry_; }
  // Whether small calls take microseconds with every backend.
  bool has_brief_calls() const { return has_brief_calls_; }
  // New backends do not know memory that is already registered. Throws KV_BACKEND_UNAVAILABLE.
  void add_backends(const BackendSelection& selection);
  // Covers the memory registered now. Throws KV_AGENT_INVALID.
  Bytes metadata() const { return local_metadata(agent_.get()); }
  // Covers these registrations. Without connections a peer adds them to what it knows. Throws
  // KV_AGENT_INVALID and KV_MEMORY_NOT_REGISTERED.
  Bytes partial_metadata(const vector<uint64_t>& registrations, bool connections) const;
  // Without `remote`, a list of the agent's own memory. `stopping` ends the reading of a large
  // table. Throws KV_LIST_INVALID, KV_MEMORY_NOT_REGISTERED, KV_AGENT_UNKNOWN_REMOTE and
  // KV_AGENT_CLOSED.
  shared_ptr<PreparedList> prepare(optional<string> remote, MemoryType type, const DescriptorTable& table,
                                        const atomic<bool>& stopping);
  // No transfer may use the list.
  void release(const shared_ptr<PreparedList>& list);
  void start_slicing(Slicer& slicer, const Moves& moves);
  // Makes requests for many posts. Throws KV_TRANSFER_FAILED.
  void prepare(const shared_ptr<PreparedTransfer>& transfer);
  // The transfer must not be under way.
  void release(const shared_ptr<PreparedTransfer>& transfer);

  // Whether peers may reach something here.
  bool reachable() const { return registrations_.any_reachable() || peers_.any(); }

 private:
  void prepare_remote(PreparedList& list);

  Counters& counters_;
  const string name_;
  // The order matters: members are destroyed from the last to the first.
  OwnedAgent agent_;
  const bool captures_telemetry_;
  bool has_brief_calls_ = true;
  Backends backends_;
  NotificationPoller poller_;
  LibfabricSafeguards safeguards_;
  Registrations registrations_;
  Peers peers_;
  RequestFactory requests_;
  std::set<shared_ptr<PreparedList>> lists_;
  std::set<shared_ptr<PreparedTransfer>> prepared_transfers_;
};

}  // namespace kv::nixl
