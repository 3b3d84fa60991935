#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>

#include "agent/counters.h"
#include "events/event.h"
#include "libfabric/safeguards.h"
#include "library/nixl_capi.h"
#include "memory/prepared_list.h"
#include "peers/agent_metadata.h"

namespace kv::nixl {

// A peer that is being added. It may take a while until its process answers.
struct PendingPeer {
  // The metadata that the peer's localMetadata() returned.
  Bytes bytes;
  // `bytes`, parsed.
  std::optional<AgentMetadata> metadata;
  // Set where the peer's process has to answer before NIXL gets the metadata.
  std::unique_ptr<PeerLiveness> liveness;
};

// The peers that one agent knows. Lives on the agent's thread. NIXL forgets them when it is
// destroyed.
class Peers {
 public:
  using Clock = std::chrono::steady_clock;

  // All references outlive it.
  Peers(const capi::Functions& nixl, capi::Agent agent, std::string own_name, LibfabricSafeguards& safeguards, Counters& counters);
  ~Peers();
  Peers(const Peers&) = delete;
  Peers& operator=(const Peers&) = delete;

  // Adds a peer, or gives NIXL new metadata of a known one. Returns its name; none while its
  // process may still answer, and then wants to be called again. Does not block. Throws
  // KV_AGENT_METADATA_INVALID.
  std::optional<std::string> add(PendingPeer& pending);
  // Forgets a peer. Throws KV_AGENT_UNKNOWN_REMOTE, and KV_MEMORY_IN_USE while prepared lists
  // describe its memory.
  void remove(const std::string& name);
  // Throws KV_AGENT_UNKNOWN_REMOTE for a peer that was not added.
  void require_known(const std::string& name) const;
  // Whether any peer is known.
  bool any() const { return !peers_.empty(); }

  // Sends a notification. Throws KV_AGENT_UNKNOWN_REMOTE and KV_NOTIFICATION_FAILED. It is never
  // repeated: it may have been sent although NIXL reports an error, and it must be delivered at
  // most once.
  void notify(const std::string& name, const Bytes& payload);
  // Records that data went to the peer and back or came from it, so that NIXL is connected to it:
  // later notifications leave at once.
  void mark_connected(const std::string& name);
  // Until when notifications may wait for a connection that NIXL is making. An agent that ends
  // before would lose them.
  Clock::time_point pending_notifications_until() const;

  // Whether posting a request to or from this peer copies its bytes before it returns, as far as is
  // known; otherwise it only starts the copy.
  bool post_copies(const std::string& name) const;
  // Records what a post of many bytes did. A peer whose post has copied once is never again taken
  // for one whose posts only start the copy.
  void record_post(const std::string& name, bool copied);

  // Records that a prepared list describes memory of its peer, which cannot be removed then.
  void add_list(PreparedList& list);
  // Records that the list was released.
  void remove_list(PreparedList& list);

 private:
  enum class PostBehaviour { unknown, starts_copy, copies };
  struct Peer {
    Connections connections;
    std::unordered_set<PreparedList*> lists;
    bool connected = false;
    PostBehaviour posts = PostBehaviour::unknown;
    // When the first notification was sent that may wait for the connection.
    std::optional<Clock::time_point> first_notification;
  };

  void read_pending(PendingPeer& pending);
  void load(const std::string& name, const Bytes& metadata, PeerLiveness* liveness);
  void forget(const std::string& name);

  const capi::Functions& nixl_;
  capi::Agent agent_;
  const std::string own_name_;
  LibfabricSafeguards& safeguards_;
  Counters& counters_;
  std::unordered_map<std::string, Peer> peers_;
};

}  // namespace kv::nixl
