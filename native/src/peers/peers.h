// The peers that one agent knows, and whether their processes are still there. What NIXL knows of them is dropped with it.
#pragma once

#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>

#include "agent/counters.h"
#include "agent/event.h"
#include "agent/notification_poller.h"
#include "memory/prepared_list.h"
#include "peers/agent_metadata.h"
#include "library/nixl_capi.h"
#include "libfabric/peer_liveness.h"

namespace kv::nixl {

class Peers {
 public:
  using Clock = std::chrono::steady_clock;

  // All but the name outlive it. `watched`: a backend of the agent does not tell of a peer's death.
  Peers(const capi::Functions& nixl, capi::Agent agent, std::string own_name, NotificationPoller& inbox, Counters& counters, bool watched);
  ~Peers();
  Peers(const Peers&) = delete;
  Peers& operator=(const Peers&) = delete;

  // A peer that is being added, by its agent's metadata.
  struct PendingPeer {
    Bytes bytes;
    std::optional<AgentMetadata> metadata;
    std::unique_ptr<PeerLiveness> watch;
  };

  // Answers its name; nothing yet while it may still be asked whether its process is there, which does not wait. Throws
  // KV_AGENT_METADATA_INVALID.
  std::optional<std::string> add(PendingPeer& arrival);
  void remove(const std::string& name);
  void notify(const std::string& name, const Bytes& payload);
  // Something went to the peer and back, or came from it: what is sent to it from now on goes at once.
  void met(const std::string& name);
  // Whether the post of a request to or from this peer copies its bytes, as far as is known; or only starts the copy.
  bool posts_copy(const std::string& name) const;
  // A post of many bytes copied them, or started the copy only.
  void posted(const std::string& name, bool copied);
  // Until when notifications may wait for a connection that is being made, in an agent that must not end before.
  Clock::time_point words_wait_until() const;
  // Throws KV_AGENT_UNKNOWN_REMOTE for a peer that has not been added.
  void require(const std::string& name) const;
  bool any() const { return !peers_.empty(); }

  // The list describes memory of its peer, which is not removed before `let_go`.
  void hold(PreparedList& list);
  void let_go(PreparedList& list);

  // Whether the peer's process is known to be gone. Looks, which is cheap.
  bool lost(const std::string& name);
  // The same by what was last seen.
  bool known_lost(const std::string& name) const;
  // Whether the peer has been gone for so long that nothing of its can be under way.
  bool quiet(const std::string& name) const;
  // Looks after every peer.
  void watch();
  // Whether an error of a call for this peer may be another's: the backend gives them to whoever calls next. What it has left of them is
  // taken out first.
  bool errors_of_anyone(const std::string& name);
  // Whether the death of a peer was found out after that time.
  bool somebody_died_after(Clock::time_point time);

 private:
  // What posts do with their bytes. What was seen to copy once is not believed again.
  enum class Posts { unknown, start, copy };
  // Connection data by backend.
  using Connections = std::map<std::string, std::string>;
  struct Peer {
    Connections connections;
    std::unordered_set<PreparedList*> lists;
    std::unique_ptr<PeerLiveness> watch;
    bool met = false;
    Posts posts = Posts::unknown;
    // A notification that was sent before they met.
    std::optional<Clock::time_point> first_word;
  };

  // Reads what it says.
  void meet(PendingPeer& arrival);
  std::unique_ptr<PeerLiveness> watch_of(const std::string& name, const Connections& connections);
  // Throws for one that speaks otherwise than this agent's LIBFABRIC backend.
  void require_reachable(const std::string& name, const std::string& connection);
  void load(const std::string& name, const Bytes& metadata);
  void forget(const std::string& name);
  // How long its death has been known; zero while it lives, or is not watched.
  Clock::duration lost_for(const std::string& name) const;
  void note_death(const Peer& peer);

  const capi::Functions& nixl_;
  capi::Agent agent_;
  const std::string own_name_;
  NotificationPoller& inbox_;
  Counters& counters_;
  const bool watched_;
  std::unordered_map<std::string, Peer> peers_;
  std::optional<Clock::time_point> last_death_;
  // Peers that NIXL has taken, those that were removed and came back counted again.
  int loaded_ = 0;
  // Whether this agent's LIBFABRIC backend reaches its peers by TCP, once it was asked.
  std::optional<bool> speaks_tcp_;
};

}  // namespace kv::nixl
