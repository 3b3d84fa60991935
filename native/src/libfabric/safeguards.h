#pragma once

#include <map>

#include "agent/notification_poller.h"
#include "libfabric/peer_liveness.h"
#include "memory/mapping.h"
#include "memory/registrations.h"
#include "peers/agent_metadata.h"

namespace kv::nixl {

// READs of one byte, for a backend that reports WRITEs as done before they land. When one is done,
// all earlier WRITEs to its peer have landed.
class LandingProbe {
 public:
  // Registers a page as the target of the READs. Throws KV_INTERNAL.
  explicit LandingProbe(Agent agent)
      : agent_(agent),
        pages_(pages_with_target()),
        registration_(agent,
                      {.type = MemoryType::dram,
                       .address = target_address(),
                       .length = kPageBytes,
                       .device = 0},
                      {}, false,
                      [](Status status) {
                        return Failure(
                            "KV_INTERNAL",
                            string("NIXL could not register the target of landing probes: ") +
                                describe(status));
                      }),
        target_(prepare_byte(agent, "KV_INTERNAL", capi::kSelf, MemoryType::dram, target_address(),
                             0)) {}

  // Lets probes read the first byte of a peer's list. Throws KV_LIST_INVALID.
  void prepare(PreparedList& remote) const {
    const Row& first = remote.layout.rows().front();
    remote.probe = prepare_byte(agent_, "KV_LIST_INVALID", remote.remote->c_str(), remote.type,
                                first.address, first.device);
  }
  // A NIXL request that reads this byte; the caller owns it. Null when NIXL refuses.
  Request make(const PreparedList& remote) const {
    const int first = 0;
    Request request = nullptr;
    const Status made = capi::make_xfer_req(agent_, Operation::read, target_.get(), &first, 1,
                                            remote.probe.get(), &first, 1, &request, nullptr);
    return made == kSuccess ? request : nullptr;
  }

 private:
  static constexpr size_t kPageBytes = 4096;

  // Only the middle of three pages is registered, so callers' memory never adjoins it. Rows that
  // leave it lie outside all registered memory.
  static shared_ptr<Mapping> pages_with_target() {
    auto pages = Mapping::create(3 * kPageBytes, false);
    pages->data()[kPageBytes] = byte{1};
    return pages;
  }

  static PreparedHandle prepare_byte(Agent agent, const char* code, const char* remote,
                                     MemoryType type, uint64_t address, uint64_t device) {
    const auto byte = nixl::make<OwnedXferList>(code, "NIXL could not create a descriptor list",
                                                capi::create_xfer_dlist, type);
    check(capi::xfer_dlist_add_desc(byte.get(), address, 1, device), code,
          "NIXL refused a descriptor");
    capi::PreparedDlist prepared = nullptr;
    check(capi::prep_xfer_dlist(agent, remote, byte.get(), &prepared, nullptr), code,
          "NIXL refused a list of one byte");
    return PreparedHandle(prepared, {agent});
  }

  uint64_t target_address() const { return pages_->address + kPageBytes; }

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
  Request make_probe(const PreparedList& remote) const {
    return probe_ ? probe_->make(remote) : nullptr;
  }

  // Throws KV_AGENT_METADATA_INVALID if LIBFABRIC's TCP address is missing. NIXL would keep the
  // peer, and crash at its next metadata.
  void require_tcp_address(const string& peer, const Connections& connections) {
    const auto connection = connections.find(kBackend);
    if (!watch_peers_ || connection == connections.end()) return;
    if (!uses_tcp_) {
      const AgentMetadata own = read_metadata(local_metadata(agent_));
      const auto mine = own.connections.find(kBackend);
      uses_tcp_ = mine != own.connections.end() && PeerLiveness::has_tcp_address(mine->second);
    }
    if (!*uses_tcp_ || PeerLiveness::has_tcp_address(connection->second)) return;
    throw Failure(
        "KV_AGENT_METADATA_INVALID",
        "the metadata of \"" + peer +
            "\" contains no TCP address, which this agent's LIBFABRIC backend needs to reach its peers",
        "pass the peer's localMetadata() whole, and use the same libfabric provider on both sides (FI_PROVIDER)");
  }
  // Null where the backend reports deaths, or the same process is watched and alive.
  // `same_process`: a peer with this name and connection data is known.
  unique_ptr<PeerLiveness> start_watch(const string& peer, const Connections& connections,
                                       bool same_process) {
    const auto connection = connections.find(kBackend);
    if (!watch_peers_ || connection == connections.end()) return nullptr;
    // Watches a known peer again if it was taken for dead.
    PeerLiveness* present = watch_of(peer);
    if (same_process && present != nullptr && present->alive()) return nullptr;
    return PeerLiveness::connect_to(connection->second);
  }
  // Whether the peer has answered; true without a watch. Throws KV_AGENT_METADATA_INVALID when
  // nothing answers: NIXL would try to connect for ever.
  static bool answered(const string& peer, PeerLiveness* liveness) {
    if (liveness == nullptr || liveness->connected()) return true;
    if (liveness->alive()) return false;
    throw Failure("KV_AGENT_METADATA_INVALID",
                  "nothing answers at the address in the metadata of \"" + peer +
                      "\": its process is gone, or its host cannot be reached",
                  "pass the metadata of the process that runs now");
  }
  // Null keeps the present watch.
  void keep_watch(const string& peer, unique_ptr<PeerLiveness> liveness) {
    if (liveness) watched_[peer] = std::move(liveness);
  }
  void end_watch(const string& peer) {
    const auto found = watched_.find(peer);
    if (found == watched_.end()) return;
    note_death(*found->second);
    watched_.erase(found);
  }

  // Whether a peer's recent death explains `attempts` refusals of metadata.
  bool may_retry_load(int attempts) {
    return watch_peers_ && attempts < kMaxLoads && any_death_after(Clock::now() - kQuarantine);
  }
  void count_loaded_peer() { ++loaded_peers_; }
  // Why NIXL refused a peer, if its LIBFABRIC plugin has no number left.
  optional<Failure> peer_limit_reached(const string& peer) const {
    if (!watch_peers_ || loaded_peers_ < kMaxPeers) return nullopt;
    return Failure(
        "KV_AGENT_METADATA_INVALID",
        "NIXL refused the metadata of \"" + peer + "\": its LIBFABRIC plugin accepts at most " +
            to_string(kMaxPeers) +
            " peers in an agent's life, counting those that were removed and added again",
        "create a new agent");
  }

  // Checks the peer's process. Cheap, but may block up to 250 ms when its connection has just
  // ended.
  bool is_dead(const string& peer) {
    PeerLiveness* liveness = watch_of(peer);
    return liveness != nullptr && !liveness->alive();
  }
  // For BoundedCalls. Null for a peer that is not watched.
  PeerLiveness* watch_of(const string& peer) const {
    if (!watch_peers_) return nullptr;
    const auto found = watched_.find(peer);
    return found == watched_.end() ? nullptr : found->second.get();
  }
  // Whether it was dead at the last check.
  bool known_dead(const string& peer) const { return dead_for(peer) > Clock::duration::zero(); }
  // Whether none of a dead peer's data can still arrive.
  bool quarantine_over(const string& peer) const { return dead_for(peer) >= kQuarantine; }
  // Checks every peer without blocking. Returns whether a death was noticed since the last call.
  bool check_peers() {
    note_deaths();
    return std::exchange(new_death_, false);
  }
  // Checks every peer for a death after that time.
  bool any_death_after(Clock::time_point time) {
    note_deaths();
    return last_death_ && *last_death_ > time;
  }

  // Otherwise the next call would get errors of earlier operations.
  void drain_errors() {
    if (watch_peers_) poller_.drain_errors();
  }
  // Whether an error may be another peer's: this one is watched and alive. Drains further errors.
  bool error_may_be_anothers(const string& peer) {
    PeerLiveness* liveness = watch_of(peer);
    if (liveness == nullptr) return false;
    poller_.drain_errors();
    note_deaths();
    return liveness->alive();
  }

 private:
  static constexpr const char* kBackend = "LIBFABRIC";
  // How long after a peer's death NIXL gives up requests to it. By then its data has arrived or is
  // lost.
  static constexpr auto kQuarantine = seconds(5);
  // Attempts to load metadata while a peer's death explains NIXL's refusal.
  static constexpr int kMaxLoads = 4;
  // NIXL 1.5.0 numbers LIBFABRIC peers with 8 bits and reuses no number.
  static constexpr int kMaxPeers = 255;

  Clock::duration dead_for(const string& peer) const {
    const PeerLiveness* liveness = watch_of(peer);
    return liveness == nullptr ? Clock::duration::zero() : liveness->dead_for();
  }
  void note_deaths() {
    for (const auto& [name, liveness] : watched_) {
      liveness->maybe_alive();
      note_death(*liveness);
    }
  }
  void note_death(const PeerLiveness& liveness) {
    const auto& died = liveness.died_at();
    if (!died || (last_death_ && *died <= *last_death_)) return;
    last_death_ = died;
    new_death_ = true;
  }

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
  AmbiguousFailure(LibfabricSafeguards& safeguards, const string& peer)
      : safeguards_(safeguards), peer_(peer) {}

  // Records a failure that may be another peer's, and keeps `request` (may be null). False if it is
  // the transfer's own. The transfer then posts only probes.
  bool record(Request request, const Failure& failure) {
    if (errors_ >= kMaxErrors || !safeguards_.error_may_be_anothers(peer_)) return false;
    ++errors_;
    if (!failure_) {
      failed_at_ = Clock::now();
      failure_ = failure;
    }
    if (request != nullptr) requests_.push_back(request);
    probing_ = false;
    return true;
  }
  // For a transfer without requests in flight. `outcome_closed`: it must not restart.
  Step next_step(bool outcome_closed) {
    if (safeguards_.is_dead(peer_))
      return safeguards_.quarantine_over(peer_) ? Step::release : Step::wait;
    if (!probe_succeeded_) return Step::probe;
    if (outcome_closed) return Step::release;
    if (safeguards_.any_death_after(failed_at_ - kDeathBefore)) return Step::restart;
    return Clock::now() - failed_at_ < kDeathAfter ? Step::wait : Step::fail;
  }
  // Its READ comes after all earlier posts.
  void probe_posted() { probing_ = true; }
  // Whether the last posted request is a probe.
  bool probing() const { return probing_; }
  // A request in flight has succeeded.
  void request_succeeded() { probe_succeeded_ = probe_succeeded_ || probing_; }
  const Failure& failure() const { return *failure_; }
  // Forgets the failure. Returns the kept requests; none is under way.
  vector<Request> clear() {
    failure_.reset();
    probing_ = false;
    probe_succeeded_ = false;
    return std::exchange(requests_, {});
  }

 private:
  // Errors that a transfer attributes to other peers. A death rarely causes more than one per
  // connection.
  static constexpr int kMaxErrors = 16;
  // A death explains errors up to 5 s later and 500 ms earlier: the kernel ends a process's
  // connections one after another.
  static constexpr auto kDeathBefore = seconds(5);
  static constexpr auto kDeathAfter = milliseconds(500);

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
