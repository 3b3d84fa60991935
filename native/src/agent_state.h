// The NIXL objects of one agent, owned and used by its thread alone. Let go in NIXL's order: lists, peers, registrations,
// backends, agent. Every call throws Failure.
#pragma once

#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "counters.h"
#include "event.h"
#include "handle.h"
#include "library.h"
#include "list.h"
#include "mapping.h"
#include "peer_watch.h"
#include "requests.h"

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

class AgentState {
 public:
  AgentState(const AgentConfig& config, Counters& counters);
  ~AgentState();
  AgentState(const AgentState&) = delete;
  AgentState& operator=(const AgentState&) = delete;

  const capi::Functions& nixl() const { return nixl_; }
  capi::Agent agent() const { return agent_; }

  void register_memory(uint64_t id, std::shared_ptr<Pin> pin);
  // A file that is open, as far as `length`. Its lists are the agent's own, and stand on the remote side of a transfer.
  void register_file(uint64_t id, uint64_t descriptor, uint64_t length);
  void deregister_memory(uint64_t id);
  Bytes local_metadata() const;
  std::string add_remote(const Bytes& metadata);
  void remove_remote(const std::string& name);
  void notify(const std::string& remote, const Bytes& payload);

  // Whether the peer's process is known to be gone. Looks, which is cheap.
  bool lost(const std::string& remote);
  // The same by what was last seen, and for how long it has been known.
  bool known_lost(const std::string& remote) const;
  std::chrono::steady_clock::duration lost_for(const std::string& remote) const;
  // Looks after every peer.
  void watch();
  // Whether an error of a call for this peer may be another's: the backend gives them to whoever calls next. What it has left of them is
  // taken out first.
  bool errors_of_anyone(const std::string& remote);
  // Whether the death of a peer was found out after that time.
  bool somebody_died_after(std::chrono::steady_clock::time_point time);
  // Whether the peer has been gone for so long that nothing of its can be under way.
  bool quiet(const std::string& remote) const;

  // Whether a WRITE is over only when a byte could be read after it.
  bool probes_writes() const { return probe_ != nullptr; }
  // A READ of one byte of the list's memory: when it is done, so is every WRITE to that peer that was posted before. Null on failure.
  capi::Request make_probe(const List& remote);

  std::shared_ptr<List> prepare(std::optional<std::string> remote, capi::MemoryType type, const std::vector<double>& rows);
  Requests& requests() { return *requests_; }
  // Releases a list that no transfer uses.
  void release(const std::shared_ptr<List>& list);

  // Whether peers may have something to reach here.
  bool reachable() const { return !memories_.empty() || !remotes_.empty(); }

  void count_done(uint64_t bytes) {
    ++counters_.transfers_done;
    counters_.bytes_transferred += bytes;
  }
  void count_failed() { ++counters_.transfers_failed; }
  void count_rider() { ++counters_.notifications_sent; }
  void count_released() { --counters_.transfers_in_flight; }

  // Drives the backends, and hands over what peers have sent. True if there was something.
  template <typename Receive>
  bool poll(Receive receive);

 private:
  // Memory known to NIXL, however many registrations name it.
  struct Registered {
    std::shared_ptr<Pin> pin;
    Handle<capi::RegDlist> list;
    uint32_t registrations = 0;
    uint32_t lists = 0;
  };

  struct File {
    uint64_t descriptor;
    uint64_t length;
    Handle<capi::RegDlist> list;
    uint32_t lists = 0;
  };

  struct Remote {
    std::map<std::string, std::string> connections;
    uint32_t lists = 0;
    std::unique_ptr<PeerWatch> watch;
  };

  // Whether the list describes files of this agent.
  bool of_files(const List& list) const { return list.remote == name_; }
  uint64_t file_covering(const Row& row, size_t index) const;
  void deregister_file(std::unordered_map<uint64_t, File>::iterator file);
  void make_scratch();
  void prepare_probe(List& list, capi::MemoryType type, const Row& first);
  void create_backend(const BackendSpec& spec);
  void drain_errors();
  void note_death(const Remote& remote);
  void forget_remote(const std::string& name);
  std::string plugins() const;
  // The memory that holds all of `row`. Throws KV_MEMORY_NOT_REGISTERED.
  const Mapping* covering(const Row& row, size_t index) const;

  const Library& library_;
  const capi::Functions& nixl_;
  Counters& counters_;
  std::string name_;
  capi::Agent agent_ = nullptr;
  std::optional<Requests> requests_;
  std::vector<Handle<capi::Backend>> backends_;
  std::unordered_map<const Mapping*, Registered> memories_;
  std::unordered_map<uint64_t, const Mapping*> registrations_;
  std::unordered_map<uint64_t, File> files_;
  std::unordered_map<std::string, Remote> remotes_;
  std::set<std::shared_ptr<List>> lists_;
  Handle<capi::NotifMap> inbox_;
  bool watch_peers_;
  bool notifies_;
  std::optional<std::chrono::steady_clock::time_point> last_death_;
  // Where probes read to.
  std::shared_ptr<Mapping> scratch_;
  Handle<capi::RegDlist> scratch_registration_;
  capi::PreparedDlist probe_ = nullptr;
};

template <typename Receive>
bool AgentState::poll(Receive receive) {
  if (!notifies_ || nixl_.get_notifs(agent_, inbox_.get(), nullptr) != capi::kSuccess) return false;
  size_t agents = 0;
  nixl_.notif_map_size(inbox_.get(), &agents);
  if (agents == 0) return false;
  for (size_t index = 0; index < agents; ++index) {
    const char* from = nullptr;
    size_t count = 0;
    if (nixl_.notif_map_get_agent_at(inbox_.get(), index, &from) != capi::kSuccess) break;
    nixl_.notif_map_get_notifs_size(inbox_.get(), from, &count);
    for (size_t number = 0; number < count; ++number) {
      const void* data = nullptr;
      size_t length = 0;
      if (nixl_.notif_map_get_notif(inbox_.get(), from, number, &data, &length) != capi::kSuccess) continue;
      const auto* bytes = static_cast<const uint8_t*>(data);
      receive(std::string(from), Bytes(bytes, bytes + length));
      ++counters_.notifications_received;
    }
  }
  nixl_.notif_map_clear(inbox_.get());
  return true;
}

}  // namespace kv::nixl
