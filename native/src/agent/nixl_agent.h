// The NIXL objects of one agent, owned and used by its thread alone. Let go in NIXL's order: lists, peers, registrations,
// backends, agent. Every call throws Failure.
#pragma once

#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "agent/counters.h"
#include "agent/event.h"
#include "library/handle.h"
#include "agent/notification_poller.h"
#include "library/nixl_library.h"
#include "memory/prepared_list.h"
#include "memory/memory_types.h"
#include "peers/peers.h"
#include "libfabric/landing_probe.h"
#include "memory/registrations.h"
#include "transfer/request_factory.h"

namespace kv::nixl {

struct BackendSpec {
  std::string name;
  std::vector<std::pair<std::string, std::string>> parameters;
};

struct AgentConfig {
  std::string library_path;
  std::string name;
  std::vector<BackendSpec> backends;
  // Libraries that plugins need and the loader does not find, by path.
  std::vector<std::string> preload;
  // A backend among them does not tell of a peer's death.
  bool watch_peers = false;
  // A backend among them calls a WRITE done when its bytes have left, not when they have landed.
  bool probe_writes = false;
  // One of them at least carries notifications; storage does not.
  bool notifies = true;
};

class NixlAgent {
 public:
  NixlAgent(const AgentConfig& config, Counters& counters);
  ~NixlAgent();
  NixlAgent(const NixlAgent&) = delete;
  NixlAgent& operator=(const NixlAgent&) = delete;

  const capi::Functions& nixl() const { return nixl_; }
  capi::Agent agent() const { return agent_.get(); }
  NotificationPoller& inbox() { return inbox_; }
  // Null unless a WRITE is over only when a byte could be read after it.
  const LandingProbe* probes() const { return probes_ ? &*probes_ : nullptr; }
  Registrations& registrations() { return registrations_; }
  Peers& peers() { return peers_; }
  RequestFactory& requests() { return requests_; }

  Bytes local_metadata() const;
  std::shared_ptr<PreparedList> prepare(std::optional<std::string> remote, capi::MemoryType type, const RowNumbers& numbers,
                                const std::atomic<bool>& stopping);
  // Releases a list that no transfer uses.
  void release(const std::shared_ptr<PreparedList>& list);

  // Whether peers may have something to reach here.
  bool reachable() const { return registrations_.any_memory() || peers_.any(); }

  void count_done(uint64_t bytes) {
    ++counters_.transfers_done;
    counters_.bytes_transferred += bytes;
  }
  void count_failed() { ++counters_.transfers_failed; }
  void count_rider() { ++counters_.notifications_sent; }
  void count_released() { --counters_.transfers_in_flight; }

 private:
  void create_backend(const BackendSpec& spec);
  void learn_memory_types(const std::string& backend, capi::Backend handle);
  std::string plugins() const;

  const NixlLibrary& library_;
  const capi::Functions& nixl_;
  Counters& counters_;
  const std::string name_;
  // From here on in the order of NIXL: each is let go of before those above it.
  Handle<capi::Agent> agent_;
  std::vector<Handle<capi::Backend>> backends_;
  MemoryTypes memory_types_;
  NotificationPoller inbox_;
  std::optional<LandingProbe> probes_;
  Registrations registrations_;
  Peers peers_;
  RequestFactory requests_;
  std::set<std::shared_ptr<PreparedList>> lists_;
};

}  // namespace kv::nixl
