#pragma once

#include <stdlib.h>

#include <algorithm>
#include <unordered_set>

#include "libfabric/bounded_calls.h"
#include "libfabric/safeguards.h"
#include "library/descriptors.h"
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
  Peers(Agent agent, string own_name, LibfabricSafeguards& safeguards, Counters& counters)
      : agent_(agent),
        own_name_(std::move(own_name)),
        safeguards_(safeguards),
        counters_(counters) {}
  ~Peers() {
    for (const auto& [name, peer] : peers_) capi::invalidate_remote_md(agent_, name.c_str());
    counters_.remotes = 0;
  }
  Peers(const Peers&) = delete;
  Peers& operator=(const Peers&) = delete;

  // Replaces a known peer's memory. Returns the name, or none while the process may still answer:
  // then call it again. Does not block. Throws KV_AGENT_METADATA_INVALID.
  optional<string> add(PendingPeer& pending) {
    if (!pending.metadata) read_pending(pending);
    const string& name = pending.metadata->agent;
    if (!LibfabricSafeguards::answered(name, pending.liveness.get())) return nullopt;
    const auto known = peers_.find(name);
    if (known != peers_.end() && known->second.connections != pending.metadata->connections) {
      // Another process has the name, and NIXL refuses to replace the old one.
      if (!known->second.lists.empty()) {
        throw Failure("KV_AGENT_METADATA_INVALID",
                      "\"" + name + "\" is known with other connection data, and " +
                          to_string(known->second.lists.size()) +
                          " prepared lists describe its memory",
                      "if it was restarted, close its lists first");
      }
      forget(name);
    }
    load(name, pending.bytes,
         pending.liveness ? pending.liveness.get() : safeguards_.watch_of(name));
    close_descriptors_on_exec();
    Peer& peer = peers_[name];
    peer.connections = std::move(pending.metadata->connections);
    if (pending.partial)
      peer.memory.add(pending.metadata->memory);
    else
      state_memory(peer, std::move(pending.metadata->memory));
    safeguards_.keep_watch(name, std::move(pending.liveness));
    counters_.remotes = peers_.size();
    return name;
  }
  // Throws KV_AGENT_UNKNOWN_REMOTE, and KV_MEMORY_IN_USE while prepared lists describe its memory.
  void remove(const string& name) {
    const auto found = peers_.find(name);
    if (found == peers_.end())
      throw Failure("KV_AGENT_UNKNOWN_REMOTE", "this agent knows no peer \"" + name + "\"");
    if (!found->second.lists.empty()) {
      throw Failure("KV_MEMORY_IN_USE",
                    to_string(found->second.lists.size()) +
                        " prepared lists describe memory of \"" + name + "\"",
                    "close them before removing the peer");
    }
    forget(name);
  }
  // Throws KV_AGENT_UNKNOWN_REMOTE.
  void require_known(const string& name) const {
    if (peers_.contains(name)) return;
    throw Failure("KV_AGENT_UNKNOWN_REMOTE", "this agent knows no peer \"" + name + "\"",
                  "call addRemote first");
  }
  bool any() const { return !peers_.empty(); }

  // Throws KV_AGENT_UNKNOWN_REMOTE and KV_NOTIFICATION_FAILED. Never repeat it: NIXL may have sent
  // it despite an error, and it must arrive at most once.
  void notify(const string& name, const Bytes& payload) {
    require_known(name);
    if (safeguards_.is_dead(name)) {
      throw Failure("KV_NOTIFICATION_FAILED",
                    "could not send " + to_string(payload.size()) + " bytes to \"" + name +
                        "\": its process is gone",
                    "if it was restarted, add it again with its new metadata");
    }
    safeguards_.drain_errors();
    // NIXL crashes on a null pointer.
    const void* data = payload.empty() ? static_cast<const void*>("") : payload.data();
    const BoundedCalls bounded(safeguards_.watch_of(name));
    check(capi::gen_notif(agent_, name.c_str(), data, payload.size(), nullptr),
          "KV_NOTIFICATION_FAILED",
          "NIXL could not send " + to_string(payload.size()) + " bytes to \"" + name + "\"");
    ++counters_.notifications_sent;
    Peer& peer = peers_.at(name);
    if (!peer.connected && !peer.first_notification) peer.first_notification = Clock::now();
  }
  // NIXL is connected, since data went to the peer and back or came from it. Later notifications
  // leave at once.
  void mark_connected(const string& name) {
    const auto found = peers_.find(name);
    if (found != peers_.end()) found->second.connected = true;
  }
  // How long notifications may wait for connections. An agent that ends before loses them.
  Clock::time_point pending_notifications_until() const {
    Clock::time_point latest{};
    for (const auto& [name, peer] : peers_) {
      if (!peer.connected && peer.first_notification)
        latest = std::max(latest, *peer.first_notification + kConnectTime);
    }
    return latest;
  }

  // Whether posts copy before they return, as far as is known, or only start the copy.
  bool post_copies(const string& name) const {
    const auto found = peers_.find(name);
    return found == peers_.end() || found->second.posts != PostBehaviour::starts_copy;
  }
  // Records a post of many bytes. One that copied decides for good.
  void record_post(const string& name, bool copied) {
    const auto found = peers_.find(name);
    if (found == peers_.end()) return;
    PostBehaviour& posts = found->second.posts;
    if (copied && posts == PostBehaviour::starts_copy) posts = PostBehaviour::copies;
    if (!copied && posts == PostBehaviour::unknown) posts = PostBehaviour::starts_copy;
  }

  // Keeps the peer from being removed. Throws KV_LIST_INVALID for memory that the peer no longer
  // states, though NIXL may still know it.
  void add_list(PreparedList& list) {
    Peer& peer = peers_.at(*list.remote);
    if (const auto row = row_outside(peer, list)) {
      throw Failure("KV_LIST_INVALID",
                    "row " + to_string(*row) + " is not memory that \"" + *list.remote +
                        "\" had registered when its last metadata was made",
                    "add the peer with metadata that it has made since it registered the memory");
    }
    peer.lists.insert(&list);
  }
  void remove_list(PreparedList& list) {
    // The peer of a dropped list was forgotten, and may be known again.
    if (!list.dropped) peers_.at(*list.remote).lists.erase(&list);
  }

 private:
  // How long UCX keeps a notification while it connects. UCX drops it when the agent ends, and does
  // not report when it was sent.
  static constexpr auto kConnectTime = milliseconds(500);

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

  void read_pending(PendingPeer& pending) {
    const AgentMetadata& metadata = pending.metadata.emplace(read_metadata(pending.bytes));
    const string& name = metadata.agent;
    if (name == own_name_)
      throw Failure("KV_AGENT_METADATA_INVALID",
                    "the metadata is of an agent with this agent's own name, \"" + name + "\"");
    safeguards_.require_tcp_address(name, metadata.connections);
    const auto known = peers_.find(name);
    if (metadata.connections.empty()) {
      pending.partial = true;
      if (known == peers_.end()) {
        throw Failure("KV_AGENT_METADATA_INVALID",
                      "the metadata of \"" + name +
                          "\" has no connections, and this agent does not know that agent yet",
                      "load metadata with connections first");
      }
      pending.metadata->connections = known->second.connections;
    }
    const bool same_process =
        known != peers_.end() && known->second.connections == metadata.connections;
    pending.liveness = safeguards_.start_watch(name, metadata.connections, same_process);
  }
  void load(const string& name, const Bytes& metadata, PeerLiveness* liveness) {
    for (int attempts = 1;; ++attempts) {
      const BoundedCalls bounded(liveness);
      char* raw = nullptr;
      const Status status = capi::load_remote_md(agent_, metadata.data(), metadata.size(), &raw);
      free(raw);
      if (status == kSuccess) {
        if (!peers_.contains(name)) safeguards_.count_loaded_peer();
        return;
      }
      const bool retry = safeguards_.may_retry_load(attempts);
      // NIXL has dropped the peer and its lists' targets, even if it accepts the metadata next
      // time.
      if (peers_.contains(name)) forget(name);
      if (!retry) {
        if (const auto limit = safeguards_.peer_limit_reached(name)) throw *limit;
        throw Failure(
            "KV_AGENT_METADATA_INVALID",
            "NIXL refused the metadata of \"" + name + "\": " + describe(status),
            "pass the peer's localMetadata() whole, and give both agents a backend in common");
      }
      safeguards_.drain_errors();
    }
  }
  void forget(const string& name) {
    const auto found = peers_.find(name);
    for (PreparedList* list : found->second.lists) list->dropped = true;
    safeguards_.end_watch(name);
    capi::invalidate_remote_md(agent_, name.c_str());
    peers_.erase(found);
    counters_.remotes = peers_.size();
  }
  // Metadata with connections states all of the peer's memory; NIXL only adds it.
  static void state_memory(Peer& peer, StatedMemory memory) {
    peer.memory = std::move(memory);
    std::erase_if(peer.lists, [&](PreparedList* list) {
      list->dropped = row_outside(peer, *list).has_value();
      return list->dropped;
    });
  }
  static optional<size_t> row_outside(const Peer& peer, const PreparedList& list) {
    const auto& rows = list.layout.rows();
    for (size_t index = 0; index < rows.size(); ++index) {
      if (!peer.memory.holds(list.type, rows[index])) return index;
    }
    return nullopt;
  }

  Agent agent_;
  const string own_name_;
  LibfabricSafeguards& safeguards_;
  Counters& counters_;
  unordered_map<string, Peer> peers_;
};

}  // namespace kv::nixl
