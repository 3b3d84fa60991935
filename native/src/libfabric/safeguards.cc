#include "libfabric/safeguards.h"

#include <utility>

#include "peers/agent_metadata.h"

namespace kv::nixl {

namespace {

constexpr const char* kBackend = "LIBFABRIC";
// How long after a peer's death NIXL is told to give up requests to it. Data that the peer has sent
// is long before then in this host's own buffers, or lost.
constexpr auto kQuarantine = std::chrono::seconds(5);
// Attempts to load metadata while a peer's death explains that NIXL refuses it.
constexpr int kMaxLoads = 4;
// Peers that an agent can add over LIBFABRIC in its life. NIXL 1.5.0 numbers them with 8 bits and
// does not reuse a number.
constexpr int kMaxPeers = 255;

}  // namespace

void LibfabricSafeguards::require_tcp_address(const std::string& peer, const Connections& connections) {
  const auto connection = connections.find(kBackend);
  if (!watch_peers_ || connection == connections.end()) return;
  if (!uses_tcp_) {
    const AgentMetadata own = read_metadata(local_metadata(nixl_, agent_));
    const auto mine = own.connections.find(kBackend);
    uses_tcp_ = mine != own.connections.end() && PeerLiveness::has_tcp_address(mine->second);
  }
  if (!*uses_tcp_ || PeerLiveness::has_tcp_address(connection->second)) return;
  throw Failure("KV_AGENT_METADATA_INVALID",
                "the metadata of \"" + peer + "\" contains no TCP address, which this agent's LIBFABRIC backend needs to reach its peers",
                "pass the peer's localMetadata() whole, and use the same libfabric provider on both sides (FI_PROVIDER)");
}

std::unique_ptr<PeerLiveness> LibfabricSafeguards::start_watch(const std::string& peer, const Connections& connections,
                                                                bool same_process) {
  const auto connection = connections.find(kBackend);
  if (!watch_peers_ || connection == connections.end()) return nullptr;
  // A known peer that was taken for dead and is added again is watched anew.
  PeerLiveness* present = watch_of(peer);
  if (same_process && present != nullptr && present->alive()) return nullptr;
  return PeerLiveness::connect_to(connection->second);
}

bool LibfabricSafeguards::answered(const std::string& peer, PeerLiveness* liveness) {
  if (liveness == nullptr || liveness->connected()) return true;
  if (liveness->alive()) return false;
  throw Failure("KV_AGENT_METADATA_INVALID",
                "nothing answers at the address in the metadata of \"" + peer + "\": its process is gone, or its host cannot be reached",
                "pass the metadata of the process that runs now");
}

void LibfabricSafeguards::keep_watch(const std::string& peer, std::unique_ptr<PeerLiveness> liveness) {
  if (liveness) watched_[peer] = std::move(liveness);
}

void LibfabricSafeguards::end_watch(const std::string& peer) {
  const auto found = watched_.find(peer);
  if (found == watched_.end()) return;
  note_death(*found->second);
  watched_.erase(found);
}

bool LibfabricSafeguards::may_retry_load(int attempts) {
  return watch_peers_ && attempts < kMaxLoads && any_death_after(Clock::now() - kQuarantine);
}

std::optional<Failure> LibfabricSafeguards::peer_limit_reached(const std::string& peer) const {
  if (!watch_peers_ || loaded_peers_ < kMaxPeers) return std::nullopt;
  return Failure("KV_AGENT_METADATA_INVALID",
                 "NIXL refused the metadata of \"" + peer + "\": its LIBFABRIC plugin accepts at most " + std::to_string(kMaxPeers) +
                     " peers in an agent's life, counting those that were removed and added again",
                 "create a new agent");
}

PeerLiveness* LibfabricSafeguards::watch_of(const std::string& peer) const {
  if (!watch_peers_) return nullptr;
  const auto found = watched_.find(peer);
  return found == watched_.end() ? nullptr : found->second.get();
}

bool LibfabricSafeguards::is_dead(const std::string& peer) {
  PeerLiveness* liveness = watch_of(peer);
  return liveness != nullptr && !liveness->alive();
}

LibfabricSafeguards::Clock::duration LibfabricSafeguards::dead_for(const std::string& peer) const {
  const PeerLiveness* liveness = watch_of(peer);
  return liveness == nullptr ? Clock::duration::zero() : liveness->dead_for();
}

bool LibfabricSafeguards::known_dead(const std::string& peer) const { return dead_for(peer) > Clock::duration::zero(); }

bool LibfabricSafeguards::quarantine_over(const std::string& peer) const { return dead_for(peer) >= kQuarantine; }

bool LibfabricSafeguards::check_peers() {
  note_deaths();
  return std::exchange(new_death_, false);
}

void LibfabricSafeguards::note_deaths() {
  for (const auto& [name, liveness] : watched_) {
    liveness->maybe_alive();
    note_death(*liveness);
  }
}

void LibfabricSafeguards::note_death(const PeerLiveness& liveness) {
  const auto& died = liveness.died_at();
  if (!died || (last_death_ && *died <= *last_death_)) return;
  last_death_ = died;
  new_death_ = true;
}

bool LibfabricSafeguards::any_death_after(Clock::time_point time) {
  note_deaths();
  return last_death_ && *last_death_ > time;
}

bool LibfabricSafeguards::error_may_be_anothers(const std::string& peer) {
  PeerLiveness* liveness = watch_of(peer);
  if (liveness == nullptr) return false;
  poller_.drain_errors();
  note_deaths();
  return liveness->alive();
}

}  // namespace kv::nixl
