#pragma once

#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>

#include "agent/notification_poller.h"
#include "libfabric/landing_probe.h"
#include "libfabric/peer_liveness.h"
#include "library/failure.h"
#include "library/nixl_capi.h"
#include "memory/prepared_list.h"

namespace kv::nixl {

// Connection data of an agent, by backend.
using Connections = std::map<std::string, std::string>;

// Adds the guarantees that UCX gives and LIBFABRIC over TCP lacks:
// - A peer's death is not reported: watched with PeerLiveness. Requests to a dead peer are given up
// after a quarantine.
// - A call for a peer that ends while it is made never returns: see BoundedCalls.
// - A WRITE is reported as done before its bytes have landed: confirmed with LandingProbe.
// - An error is returned by the next call, for any peer: see AmbiguousFailure, and `drain_errors`
// before calls that cannot be repeated.
// - Metadata of an unreachable peer, or of too many peers, harms NIXL: refused before NIXL gets it.
// For an agent without such a backend every method returns at once. Lives on the agent's thread.
class LibfabricSafeguards {
 public:
  using Clock = std::chrono::steady_clock;

  // All references outlive it.
  LibfabricSafeguards(const capi::Functions& nixl, capi::Agent agent, NotificationPoller& poller) : nixl_(nixl), agent_(agent), poller_(poller) {}

  // Watches the peers that are added from now on: a backend does not report a peer's death.
  void watch_peers() { watch_peers_ = true; }
  // Confirms that WRITEs have landed: a backend reports them too early. Throws KV_INTERNAL.
  void probe_writes() { probe_.emplace(nixl_, agent_); }

  // Whether a post may have to be repeated, because its error may be another peer's. What is sent
  // with a post would then be sent twice.
  bool may_repeat_posts() const { return probe_.has_value(); }
  // Prepares a list of a peer's memory, so that a WRITE to it can be confirmed. Throws
  // KV_LIST_INVALID.
  void prepare_probe(PreparedList& remote) const {
    if (probe_) probe_->prepare(remote);
  }
  // A NIXL request that ends once every WRITE that was posted before it has landed; the caller owns
  // it. Null when NIXL refuses, and for a list that needs no confirmation: one without a `probe`.
  capi::Request make_probe(const PreparedList& remote) const { return probe_ ? probe_->make(remote) : nullptr; }

  // Throws KV_AGENT_METADATA_INVALID if a peer's connection data lacks the TCP address that this
  // agent's LIBFABRIC backend needs: NIXL would keep the peer, and crash at the next metadata under
  // its name.
  void require_tcp_address(const std::string& peer, const Connections& connections);
  // Starts to watch a peer that is being added. Null where no watch is needed: the backend reports
  // deaths, or the same process is already watched and alive. `same_process`: the agent knows a
  // peer of this name with the same connection data.
  std::unique_ptr<PeerLiveness> start_watch(const std::string& peer, const Connections& connections, bool same_process);
  // Whether the process of a peer that is being added has answered; always where there is no watch.
  // Throws KV_AGENT_METADATA_INVALID when nothing answers at its address: NIXL would try to connect
  // to it for ever.
  static bool answered(const std::string& peer, PeerLiveness* liveness);
  // Keeps the watch of a peer that was added; null keeps the present one.
  void keep_watch(const std::string& peer, std::unique_ptr<PeerLiveness> liveness);
  // Ends the watch of a peer that is removed.
  void end_watch(const std::string& peer);

  // Whether loading metadata is worth another attempt: it was refused `attempts` times, and a
  // peer's recent death explains that.
  bool may_retry_load(int attempts);
  // Counts a peer that NIXL has accepted.
  void count_loaded_peer() { ++loaded_peers_; }
  // Why NIXL has refused another peer, if its LIBFABRIC plugin has no number left for one.
  std::optional<Failure> peer_limit_reached(const std::string& peer) const;

  // Whether the peer's process is known to be dead. Checks it, which is cheap, but may block up to
  // 250 ms when its connection has just ended.
  bool is_dead(const std::string& peer);
  // The watch of a peer, for BoundedCalls; null for one that is not watched.
  PeerLiveness* watch_of(const std::string& peer) const;
  // Whether the peer's process was dead at the last check.
  bool known_dead(const std::string& peer) const;
  // Whether the peer has been dead for so long that none of its data can still arrive.
  bool quarantine_over(const std::string& peer) const;
  // Checks every peer without blocking. Returns whether a death was noticed since the last call.
  bool check_peers();
  // Whether the death of any peer was noticed after that time. Checks every peer.
  bool any_death_after(Clock::time_point time);

  // Takes errors of earlier operations out of the backend, so that the next call does not get them.
  void drain_errors() {
    if (watch_peers_) poller_.drain_errors();
  }
  // Whether an error of a call for this peer may be another peer's: the peer is watched and alive.
  // Drains the errors that are left.
  bool error_may_be_anothers(const std::string& peer);

 private:
  Clock::duration dead_for(const std::string& peer) const;
  void note_deaths();
  void note_death(const PeerLiveness& liveness);

  const capi::Functions& nixl_;
  capi::Agent agent_;
  NotificationPoller& poller_;
  bool watch_peers_ = false;
  std::optional<LandingProbe> probe_;
  std::unordered_map<std::string, std::unique_ptr<PeerLiveness>> watched_;
  std::optional<Clock::time_point> last_death_;
  // Deaths that `check_peers` has not reported yet.
  bool new_death_ = false;
  // Peers that NIXL has accepted. A peer that was removed and added again counts twice.
  int loaded_peers_ = 0;
  // Whether this agent's own LIBFABRIC backend uses TCP; none until it was determined.
  std::optional<bool> uses_tcp_;
};

}  // namespace kv::nixl
