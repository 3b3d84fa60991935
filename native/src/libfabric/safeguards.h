#pragma once

#include <map>

#include "agent/notification_poller.h"
#include "libfabric/peer_liveness.h"
#include "memory/mapping.h"
#include "memory/registrations.h"

namespace kv::nixl {

// READs of one byte, for a backend that reports WRITEs as done before they land. When one is done,
// all earlier WRITEs to its peer have landed.
class LandingProbe {
 public:
  // Registers a page as the target of the READs. Throws KV_INTERNAL.
  explicit LandingProbe(Agent agent);

  // Lets probes read the first byte of a peer's list. Throws KV_LIST_INVALID.
  void prepare(PreparedList& remote) const;
  // A NIXL request that reads this byte; the caller owns it. Null when NIXL refuses.
  Request make(const PreparedList& remote) const;

 private:
  uint64_t target_address() const;

  Agent agent_;
  shared_ptr<Mapping> pages_;
  NixlRegistration registration_;
  PreparedHandle target_;
};

// An agent's connection data, by backend.
using Connections = std::map<string, string>;

// Adds the guarantees that UCX gives and LIBFABRIC over TCP lacks:
// - PeerLiveness notices deaths. Requests to a dead peer end after a quarantine.
// - BoundedCalls end calls for a peer that ends meanwhile.
// - LandingProbe confirms WRITEs, which are reported as done too early.
// - AmbiguousFailure handles other peers' errors, as does `drain_errors` before calls that cannot
//   be repeated.
// - Metadata of unreachable or too many peers, which harms NIXL, is refused.
// Without such a backend every method returns at once. Lives on the agent's thread.
class LibfabricSafeguards {
 public:
  // The poller must outlive it.
  LibfabricSafeguards(Agent agent, NotificationPoller& poller) : agent_(agent), poller_(poller) {}

  // Watches peers that are added from now on, since a backend does not report deaths.
  void watch_peers() { watch_peers_ = true; }
  // For a backend that reports WRITEs too early. Throws KV_INTERNAL.
  void probe_writes() { probe_.emplace(agent_); }

  // Whether posts may be repeated after another peer's error, which would send their notifications
  // twice.
  bool may_repeat_posts() const { return probe_.has_value(); }
  // Prepares a list for the confirmation of WRITEs. Throws KV_LIST_INVALID.
  void prepare_probe(PreparedList& remote) const {
    if (probe_) probe_->prepare(remote);
  }
  // A NIXL request that ends once every earlier WRITE has landed; the caller owns it. Null when
  // NIXL refuses, or the list has no `probe`.
  Request make_probe(const PreparedList& remote) const { return probe_ ? probe_->make(remote) : nullptr; }

  // Throws KV_AGENT_METADATA_INVALID if LIBFABRIC's TCP address is missing. NIXL would keep the
  // peer, and crash at its next metadata.
  void require_tcp_address(const string& peer, const Connections& connections);
  // Null where the backend reports deaths, or the same process is watched and alive.
  // `same_process`: a peer with this name and connection data is known.
  unique_ptr<PeerLiveness> start_watch(const string& peer, const Connections& connections, bool same_process);
  // Whether the peer has answered; true without a watch. Throws KV_AGENT_METADATA_INVALID when
  // nothing answers: NIXL would try to connect for ever.
  static bool answered(const string& peer, PeerLiveness* liveness);
  // Null keeps the present watch.
  void keep_watch(const string& peer, unique_ptr<PeerLiveness> liveness);
  void end_watch(const string& peer);

  // Whether a peer's recent death explains `attempts` refusals of metadata.
  bool may_retry_load(int attempts);
  void count_loaded_peer() { ++loaded_peers_; }
  // Why NIXL refused a peer, if its LIBFABRIC plugin has no number left.
  optional<Failure> peer_limit_reached(const string& peer) const;

  // Checks the peer's process. Cheap, but may block up to 250 ms when its connection has just
  // ended.
  bool is_dead(const string& peer);
  // For BoundedCalls. Null for a peer that is not watched.
  PeerLiveness* watch_of(const string& peer) const;
  // Whether it was dead at the last check.
  bool known_dead(const string& peer) const;
  // Whether none of a dead peer's data can still arrive.
  bool quarantine_over(const string& peer) const;
  // Checks every peer without blocking. Returns whether a death was noticed since the last call.
  bool check_peers();
  // Checks every peer for a death after that time.
  bool any_death_after(Clock::time_point time);

  // Otherwise the next call would get errors of earlier operations.
  void drain_errors() {
    if (watch_peers_) poller_.drain_errors();
  }
  // Whether an error may be another peer's: this one is watched and alive. Drains further errors.
  bool error_may_be_anothers(const string& peer);

 private:
  Clock::duration dead_for(const string& peer) const;
  void note_deaths();
  void note_death(const PeerLiveness& liveness);

  Agent agent_;
  NotificationPoller& poller_;
  bool watch_peers_ = false;
  optional<LandingProbe> probe_;
  unordered_map<string, unique_ptr<PeerLiveness>> watched_;
  optional<Clock::time_point> last_death_;
  // A death that `check_peers` has not reported yet.
  bool new_death_ = false;
  // Peers that NIXL has accepted. Adding a peer again counts again.
  int loaded_peers_ = 0;
  // Whether this agent's own LIBFABRIC backend uses TCP.
  optional<bool> uses_tcp_;
};

// A failure that may be another peer's: LIBFABRIC returns errors from the next call, for any peer.
// If the transfer's peer lives and another died, the transfer restarts, once a one-byte READ shows
// that nothing is under way. Lives on the agent's thread.
class AmbiguousFailure {
 public:
  enum class Step {
    wait,     // nothing yet
    probe,    // post a landing probe
    restart,  // another peer died
    fail,     // the failure is the transfer's own
    release,  // nothing is under way
  };

  // Both arguments must outlive it. `peer` is the transfer's peer.
  AmbiguousFailure(LibfabricSafeguards& safeguards, const string& peer) : safeguards_(safeguards), peer_(peer) {}

  // Records a failure that may be another peer's, and keeps `request` (may be null). False if it is
  // the transfer's own. The transfer then posts only probes.
  bool record(Request request, const Failure& failure);
  bool pending() const { return failure_.has_value(); }
  // For a transfer without requests in flight. `outcome_closed`: it must not restart.
  Step next_step(bool outcome_closed);
  // Its READ comes after all earlier posts.
  void probe_posted() { probing_ = true; }
  // Whether the last posted request is a probe.
  bool probing() const { return probing_; }
  // A request in flight has succeeded.
  void request_succeeded() { probe_succeeded_ = probe_succeeded_ || probing_; }
  const Failure& failure() const { return *failure_; }
  // Forgets the failure. Returns the kept requests; none is under way.
  vector<Request> clear();

 private:
  LibfabricSafeguards& safeguards_;
  const string& peer_;
  optional<Failure> failure_;
  vector<Request> requests_;
  Clock::time_point failed_at_;
  bool probing_ = false;
  bool probe_succeeded_ = false;
  int errors_ = 0;
};

}  // namespace kv::nixl
