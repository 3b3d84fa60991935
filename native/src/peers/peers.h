#pragma once

#include <unordered_set>

#include "libfabric/safeguards.h"
#include "peers/agent_metadata.h"

namespace kv::nixl {

// A notification's limit. A receiver keeps this many bytes for JavaScript.
inline constexpr size_t kMaxNotification = 64u << 20;

// A peer that is being added.
struct PendingPeer {
  // From the peer's localMetadata().
  Bytes bytes;
  // `bytes`, parsed.
  optional<AgentMetadata> metadata;
  // Has no connections, and adds memory to a known peer.
  bool partial = false;
  // Set where the peer's process must answer before NIXL gets the metadata.
  unique_ptr<PeerLiveness> liveness;
};

// The peers of one agent, on its thread. NIXL forgets them when it is destroyed.
class Peers {
 public:
  // The references must outlive it.
  Peers(Agent agent, string own_name, LibfabricSafeguards& safeguards, Counters& counters);
  ~Peers();
  Peers(const Peers&) = delete;
  Peers& operator=(const Peers&) = delete;

  // Replaces a known peer's memory. Returns the name, or none while the process may still answer:
  // then call it again. Does not block. Throws KV_AGENT_METADATA_INVALID.
  optional<string> add(PendingPeer& pending);
  // Throws KV_AGENT_UNKNOWN_REMOTE, and KV_MEMORY_IN_USE while prepared lists describe its memory.
  void remove(const string& name);
  // Throws KV_AGENT_UNKNOWN_REMOTE.
  void require_known(const string& name) const;
  bool any() const { return !peers_.empty(); }

  // Throws KV_AGENT_UNKNOWN_REMOTE and KV_NOTIFICATION_FAILED. Never repeat it: NIXL may have sent
  // it despite an error, and it must arrive at most once.
  void notify(const string& name, const Bytes& payload);
  // NIXL is connected, since data went to the peer and back or came from it. Later notifications
  // leave at once.
  void mark_connected(const string& name);
  // How long notifications may wait for connections. An agent that ends before loses them.
  Clock::time_point pending_notifications_until() const;

  // Whether posts copy before they return, as far as is known, or only start the copy.
  bool post_copies(const string& name) const;
  // Records a post of many bytes. One that copied decides for good.
  void record_post(const string& name, bool copied);

  // Keeps the peer from being removed. Throws KV_LIST_INVALID for memory that the peer no longer
  // states, though NIXL may still know it.
  void add_list(PreparedList& list);
  void remove_list(PreparedList& list);

 private:
  enum class PostBehaviour { unknown, starts_copy, copies };
  struct Peer {
    Connections connections;
    StatedMemory memory;
    std::unordered_set<PreparedList*> lists;
    bool connected = false;
    PostBehaviour posts = PostBehaviour::unknown;
    // When the first notification that may wait for the connection was sent.
    optional<Clock::time_point> first_notification;
  };

  void read_pending(PendingPeer& pending);
  void load(const string& name, const Bytes& metadata, PeerLiveness* liveness);
  void forget(const string& name);
  static void state_memory(Peer& peer, StatedMemory memory);
  static optional<size_t> row_outside(const Peer& peer, const PreparedList& list);

  Agent agent_;
  const string own_name_;
  LibfabricSafeguards& safeguards_;
  Counters& counters_;
  unordered_map<string, Peer> peers_;
};

}  // namespace kv::nixl
