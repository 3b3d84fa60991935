#include "peers/peers.h"

#include <stdlib.h>

#include <algorithm>
#include <utility>

#include "library/failure.h"

namespace kv::nixl {

namespace {

// The backend whose peers can be watched from outside.
constexpr const char* kWatchedBackend = "LIBFABRIC";
// So long after a peer's end NIXL is told to let go of what it still has under way. What the peer had sent before is in this
// host's own buffers, or lost, long before.
constexpr auto kQuarantine = std::chrono::seconds(5);
// AgentMetadata is loaded so often while a peer's death explains that NIXL fails.
constexpr int kMostLoads = 4;
// Peers that an agent can add in its life over LIBFABRIC (NIXL 1.5.0 numbers them with 8 bits, and takes no number back).
constexpr int kMostPeers = 255;
// UCX keeps a notification while it connects to a peer, and drops it when the agent ends meanwhile; nobody says when it has gone.
constexpr auto kFirstContact = std::chrono::milliseconds(500);

}  // namespace

Peers::Peers(const capi::Functions& nixl, capi::Agent agent, std::string own_name, NotificationPoller& inbox, Counters& counters, bool watched)
    : nixl_(nixl), agent_(agent), own_name_(std::move(own_name)), inbox_(inbox), counters_(counters), watched_(watched) {}

Peers::~Peers() {
  for (const auto& [name, peer] : peers_) nixl_.invalidate_remote_md(agent_, name.c_str());
  counters_.remotes = 0;
}

void Peers::meet(PendingPeer& arrival) {
  const AgentMetadata& metadata = arrival.metadata.emplace(read_metadata(arrival.bytes));
  const std::string& name = metadata.agent;
  if (name == own_name_) throw Failure("KV_AGENT_METADATA_INVALID", "the metadata is of an agent of the same name, \"" + name + "\"");
  const auto connection = metadata.connections.find(kWatchedBackend);
  if (watched_ && connection != metadata.connections.end()) require_reachable(name, connection->second);
  arrival.watch = watch_of(name, metadata.connections);
}

std::optional<std::string> Peers::add(PendingPeer& arrival) {
  if (!arrival.metadata) meet(arrival);
  const std::string& name = arrival.metadata->agent;
  // NIXL would try to connect to it for ever.
  if (arrival.watch && !arrival.watch->answered()) {
    if (arrival.watch->alive()) return std::nullopt;
    throw Failure("KV_AGENT_METADATA_INVALID",
                  "nobody answers where the metadata says that \"" + name + "\" is: its process is gone, or its host cannot be reached",
                  "take the metadata of the process that runs now");
  }
  const auto known = peers_.find(name);
  if (known != peers_.end() && known->second.connections != arrival.metadata->connections) {
    // Another process under the same name. NIXL refuses to replace it.
    if (!known->second.lists.empty()) {
      throw Failure("KV_AGENT_METADATA_INVALID",
                    "\"" + name + "\" is known with other connection data, and " + std::to_string(known->second.lists.size()) +
                        " prepared lists describe its memory",
                    "if it was restarted, close its lists first");
    }
    forget(name);
  }
  load(name, arrival.bytes);
  Peer& peer = peers_[name];
  if (arrival.watch) peer.watch = std::move(arrival.watch);
  peer.connections = std::move(arrival.metadata->connections);
  counters_.remotes = peers_.size();
  return name;
}

// NIXL keeps a peer whose address it could not take, and dies of the next metadata under that name.
void Peers::require_reachable(const std::string& name, const std::string& connection) {
  if (!speaks_tcp_) {
    const AgentMetadata own = read_metadata(local_metadata(nixl_, agent_));
    const auto mine = own.connections.find(kWatchedBackend);
    speaks_tcp_ = mine != own.connections.end() && PeerLiveness::names_tcp(mine->second);
  }
  if (!*speaks_tcp_ || PeerLiveness::names_tcp(connection)) return;
  throw Failure("KV_AGENT_METADATA_INVALID",
                "the metadata of \"" + name + "\" names no address of TCP, by which this agent's LIBFABRIC backend reaches its peers",
                "it must come whole from the peer's localMetadata(), and both agents must use one provider of libfabric (FI_PROVIDER)");
}

// None where the backend tells of a death itself, or where one watches already. A known peer that was taken for dead, or is somewhere else, and
// says hello again is looked at anew.
std::unique_ptr<PeerLiveness> Peers::watch_of(const std::string& name, const Connections& connections) {
  const auto connection = connections.find(kWatchedBackend);
  if (!watched_ || connection == connections.end()) return nullptr;
  const auto known = peers_.find(name);
  const bool same = known != peers_.end() && known->second.connections == connections;
  if (same && known->second.watch && known->second.watch->alive()) return nullptr;
  return PeerLiveness::of(connection->second);
}

void Peers::load(const std::string& name, const Bytes& metadata) {
  for (int loads = 1;; ++loads) {
    char* raw = nullptr;
    const capi::Status status = nixl_.load_remote_md(agent_, metadata.data(), metadata.size(), &raw);
    free(raw);
    if (status == capi::kSuccess) {
      if (!peers_.contains(name)) ++loaded_;
      return;
    }
    const bool again = watched_ && loads < kMostLoads && somebody_died_after(Clock::now() - kQuarantine);
    // NIXL has dropped what it knew of the peer, if it knew it, and with it what prepared lists point to: also where it takes the same
    // metadata at the next attempt.
    if (peers_.contains(name)) forget(name);
    if (!again && watched_ && loaded_ >= kMostPeers) {
      throw Failure("KV_AGENT_METADATA_INVALID",
                    "NIXL refused the metadata of \"" + name + "\": its LIBFABRIC plugin gives each peer that an agent adds a number, also one that comes back, and has " +
                        std::to_string(kMostPeers) + " of them",
                    "create a new agent");
    }
    if (!again) {
      throw Failure("KV_AGENT_METADATA_INVALID",
                    "NIXL refused the metadata of \"" + name + "\": " + describe(status),
                    "it must come whole from the peer's localMetadata(), and both agents must have a backend in common");
    }
    inbox_.drain_errors();
  }
}

void Peers::forget(const std::string& name) {
  const auto found = peers_.find(name);
  for (PreparedList* list : found->second.lists) list->lost = true;
  note_death(found->second);
  nixl_.invalidate_remote_md(agent_, name.c_str());
  peers_.erase(found);
  counters_.remotes = peers_.size();
}

void Peers::remove(const std::string& name) {
  const auto found = peers_.find(name);
  if (found == peers_.end()) throw Failure("KV_AGENT_UNKNOWN_REMOTE", "this agent knows no peer \"" + name + "\"");
  if (!found->second.lists.empty()) {
    throw Failure("KV_MEMORY_IN_USE",
                  std::to_string(found->second.lists.size()) + " prepared lists describe memory of \"" + name + "\"",
                  "close them before removing the peer");
  }
  forget(name);
}

void Peers::require(const std::string& name) const {
  if (peers_.contains(name)) return;
  throw Failure("KV_AGENT_UNKNOWN_REMOTE", "this agent knows no peer \"" + name + "\"", "call addRemote first");
}

void Peers::notify(const std::string& name, const Bytes& payload) {
  require(name);
  if (lost(name)) {
    throw Failure("KV_NOTIFICATION_FAILED",
                  "could not send " + std::to_string(payload.size()) + " bytes to \"" + name + "\": its process is gone",
                  "if it was restarted, add it again with its new metadata");
  }
  // Not tried again when it fails: it may have been sent, and it is delivered once at most.
  if (watched_) inbox_.drain_errors();
  // Never a null pointer, even for no bytes.
  const void* data = payload.empty() ? static_cast<const void*>("") : payload.data();
  check(nixl_.gen_notif(agent_, name.c_str(), data, payload.size(), nullptr), "KV_NOTIFICATION_FAILED",
        "NIXL could not send " + std::to_string(payload.size()) + " bytes to \"" + name + "\"");
  ++counters_.notifications_sent;
  Peer& peer = peers_.at(name);
  if (!peer.met && !peer.first_word) peer.first_word = Clock::now();
}

bool Peers::posts_copy(const std::string& name) const {
  const auto found = peers_.find(name);
  return found == peers_.end() || found->second.posts != Posts::start;
}

void Peers::posted(const std::string& name, bool copied) {
  const auto found = peers_.find(name);
  if (found == peers_.end()) return;
  Posts& posts = found->second.posts;
  if (copied && posts == Posts::start) posts = Posts::copy;
  if (!copied && posts == Posts::unknown) posts = Posts::start;
}

void Peers::met(const std::string& name) {
  const auto found = peers_.find(name);
  if (found != peers_.end()) found->second.met = true;
}

Peers::Clock::time_point Peers::words_wait_until() const {
  Clock::time_point latest{};
  for (const auto& [name, peer] : peers_) {
    if (!peer.met && peer.first_word) latest = std::max(latest, *peer.first_word + kFirstContact);
  }
  return latest;
}

void Peers::hold(PreparedList& list) { peers_.at(*list.remote).lists.insert(&list); }

void Peers::let_go(PreparedList& list) {
  // A lost list's peer has been forgotten since, and may have been added anew.
  if (!list.lost) peers_.at(*list.remote).lists.erase(&list);
}

bool Peers::lost(const std::string& name) {
  if (!watched_) return false;
  const auto found = peers_.find(name);
  return found != peers_.end() && found->second.watch && !found->second.watch->alive();
}

Peers::Clock::duration Peers::lost_for(const std::string& name) const {
  if (!watched_) return Clock::duration::zero();
  const auto found = peers_.find(name);
  return found != peers_.end() && found->second.watch ? found->second.watch->dead_for() : Clock::duration::zero();
}

bool Peers::known_lost(const std::string& name) const { return lost_for(name) > Clock::duration::zero(); }

bool Peers::quiet(const std::string& name) const { return lost_for(name) >= kQuarantine; }

void Peers::watch() {
  for (const auto& [name, peer] : peers_) {
    if (peer.watch) peer.watch->alive();
    note_death(peer);
  }
}

void Peers::note_death(const Peer& peer) {
  if (!peer.watch) return;
  const auto ago = peer.watch->dead_for();
  if (ago <= ago.zero()) return;
  const auto died = Clock::now() - ago;
  if (!last_death_ || died > *last_death_) last_death_ = died;
}

bool Peers::somebody_died_after(Clock::time_point time) {
  watch();
  return last_death_ && *last_death_ > time;
}

bool Peers::errors_of_anyone(const std::string& name) {
  const auto found = peers_.find(name);
  if (found == peers_.end() || !found->second.watch) return false;
  inbox_.drain_errors();
  watch();
  return found->second.watch->alive();
}

}  // namespace kv::nixl
