#pragma once

#include <array>
#include <span>

#include "agent/agent_turn.h"
#include "agent/command_queue.h"
#include "agent/nixl_agent.h"
#include "agent/poll_backoff.h"
#include "library/exit_guard.h"
#include "node/js_event_queue.h"
#include "transfer/transfer_scheduler.h"

namespace kv::nixl {

// `read` checks these arguments.
struct PeerName {
  string text;
};
struct Metadata {
  Bytes bytes;
};
struct Payload {
  Bytes bytes;
};
// What one thread makes and the other names by its ticket.
template <typename T>
class Table {
 public:
  void add(uint64_t ticket, shared_ptr<T> entry) {
    const lock_guard lock(mutex_);
    entries_.emplace(ticket, std::move(entry));
  }
  // Null if there is none.
  shared_ptr<T> find(uint64_t ticket) const {
    const lock_guard lock(mutex_);
    const auto found = entries_.find(ticket);
    return found == entries_.end() ? nullptr : found->second;
  }
  shared_ptr<T> take(uint64_t ticket) {
    const lock_guard lock(mutex_);
    auto node = entries_.extract(ticket);
    return node.empty() ? nullptr : std::move(node.mapped());
  }
  void clear() {
    const lock_guard lock(mutex_);
    entries_.clear();
  }

 private:
  mutable std::mutex mutex_;
  unordered_map<uint64_t, shared_ptr<T>> entries_;
};

// The native thread of one agent, which calls NIXL. JavaScript gives it commands with tickets, and
// receives events through a JsEventQueue.
// Unless stated otherwise, public methods are for the JavaScript thread, return at once, and settle
// their ticket later. Methods that return an optional event call NIXL themselves if the call is
// short, the thread sleeps and no command waits. They then return the answer, and no event follows.
class AgentThread : public StoppableThread, public std::enable_shared_from_this<AgentThread> {
 public:
  // The ticket is settled when the agent and its backends exist, or failed. Throws
  // KV_TRANSPORT_UNAVAILABLE when the kernel refuses a thread.
  static shared_ptr<AgentThread> start(AgentConfig config, shared_ptr<JsEventQueue> events, uint64_t ticket);

  // The addon's own memory is registered once its pages are touched. The ticket becomes the
  // registration's id.
  void register_memory(uint64_t ticket, MemoryToRegister memory);
  void deregister(uint64_t ticket, uint64_t registration);
  void add_backends(uint64_t ticket, BackendSelection selection);
  // Covers all memory, or these registrations.
  void local_metadata(uint64_t ticket, optional<vector<uint64_t>> registrations, bool connections);
  // Adds a peer once its process has answered.
  optional<Event> add_remote(uint64_t ticket, Metadata metadata);
  void remove_remote(uint64_t ticket, PeerName name);
  // `list(ticket)` returns the list from then on. With `keeps`, JavaScript keeps the rows until then.
  optional<Event> prepare_list(uint64_t ticket, optional<PeerName> remote, MemoryType type, std::span<const double> rows, bool keeps);
  // Hides the list at once, and releases it after the last transfer that uses it.
  void close_list(uint64_t ticket, uint64_t id) { close_later(lists_, ticket, id); }
  // Null if it is not prepared, or closed.
  shared_ptr<PreparedList> list(uint64_t id) const { return lists_.find(id); }

  // Makes a transfer's requests, for `prepared_transfer(ticket)`. Its lists are in use until it is
  // closed.
  void prepare_transfer(uint64_t ticket, shared_ptr<const Moves> moves);
  // Hides it at once, and releases it when it is not under way.
  void close_prepared_transfer(uint64_t ticket, uint64_t id) { close_later(prepared_transfers_, ticket, id); }
  void transfer_backend(uint64_t ticket, uint64_t id);
  // Null if it is not prepared, or closed.
  shared_ptr<PreparedTransfer> prepared_transfer(uint64_t id) const { return prepared_transfers_.find(id); }

  optional<Event> notify(uint64_t ticket, PeerName remote, Payload payload);

  // Sends the events that Transfer describes. Returns `done` only if it succeeds at once.
  optional<Event> transfer(shared_ptr<TransferRequest> request);
  // Posts no more slices and sends only `released`. False if the outcome is on its way.
  bool abort(uint64_t transfer);

  // Waits up to `timeout_ms` for transfers, then ends the thread.
  void close(uint64_t ticket, uint64_t timeout_ms);
  // From any thread, when the environment or process ends: ends the thread without events.
  void stop() override { commands_.stop(); }

  // Valid even after the thread has ended.
  const Counters& counters() const { return counters_; }

 private:
  // Its result or exception settles a ticket.
  using Work = std::function<EventValue(NixlAgent&)>;

  // Calls that the JavaScript thread may make itself.
  enum class Call : size_t { transfer, notify, prepare, add_remote };
  // The agent's turn on the JavaScript thread, if it was free.
  class Visit;

  AgentThread(AgentConfig config, shared_ptr<JsEventQueue> events);

  // On the JavaScript thread.
  void run(uint64_t ticket, Work work);
  optional<Event> run_here(uint64_t ticket, Call call, bool brief, Work work);
  template <typename T>
  void close_later(Table<T>& table, uint64_t ticket, uint64_t id);
  void rouse(microseconds after = {});

  // With the agent's turn, mostly on its thread.
  void main(uint64_t ticket);
  bool create_agent(uint64_t ticket);
  void serve();
  void shut_down();
  void report_broken(const string& why);
  bool& warm(Call call) { return warm_[static_cast<size_t>(call)]; }
  Event attempt(uint64_t ticket, const Work& work);
  void begin_transfer(const shared_ptr<TransferRequest>& request, bool at_once);
  void end_transfer(const TransferRequest& request);
  template <typename T>
  void end_use(const shared_ptr<T>& used);
  void release(const shared_ptr<PreparedList>& list) { agent_->release(list); }
  void release(const shared_ptr<PreparedTransfer>& transfer);
  bool advance_registrations();
  bool advance_pending_peers();
  bool poll();
  bool ending();
  void sleep();
  Failure closed() const;

  struct PendingRegistration {
    MemoryToRegister memory;
    shared_ptr<atomic<bool>> touched;
  };

  const AgentConfig config_;
  Counters counters_;
  CommandQueue commands_;
  AgentTurn turn_;

  // Both threads use these.
  Table<PreparedList> lists_;
  Table<PreparedTransfer> prepared_transfers_;
  Table<TransferRequest> requests_;

  // For the thread that has the turn.
  EventSender events_;
  unique_ptr<NixlAgent> agent_;
  // By registration.
  std::map<uint64_t, PendingRegistration> pending_registrations_;
  // By ticket.
  std::map<uint64_t, PendingPeer> pending_peers_;
  TransferScheduler transfers_;
  PollBackoff backoff_;
  Clock::time_point last_peer_check_;
  // Whether the agent's thread has made each call.
  std::array<bool, 4> warm_{};
  // When the sleeping agent's thread polls at the latest.
  Clock::time_point sleeps_until_;
  // Whether the kernel wakes the agent's thread on time.
  bool punctual_ = true;
  // When a closing agent stops waiting for transfers.
  optional<Clock::time_point> deadline_;
  optional<uint64_t> close_ticket_;
};

}  // namespace kv::nixl
