#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "agent/agent_turn.h"
#include "agent/command_queue.h"
#include "agent/nixl_agent.h"
#include "agent/poll_backoff.h"
#include "events/event_sender.h"
#include "library/exit_guard.h"
#include "transfer/transfer_scheduler.h"

namespace kv::nixl {

// The native thread of one agent, which calls NIXL. JavaScript gives it commands, each with a
// ticket, and receives events through a JsEventQueue. Unless stated otherwise, public methods are
// for the JavaScript thread, return at once, and settle their ticket later. Those that return an
// optional event make a short call of NIXL themselves while the thread sleeps and no command waits:
// they return its answer, and no event follows. Otherwise they return none.
class AgentThread : public StoppableThread, public std::enable_shared_from_this<AgentThread> {
 public:
  // Starts the thread, which creates the agent. The ticket is settled when the agent and its
  // backends exist, or could not be created. Throws KV_TRANSPORT_UNAVAILABLE when the kernel
  // refuses a thread.
  static std::shared_ptr<AgentThread> start(AgentConfig config, std::shared_ptr<JsEventQueue> events, uint64_t ticket);

  // Work for the agent's thread. Must not touch Node-API. What it returns or throws settles the
  // ticket.
  using Work = std::function<EventValue(NixlAgent&)>;
  // Runs `work` on the agent's thread. Fails with KV_AGENT_CLOSED if the agent is gone.
  void run(uint64_t ticket, Work work);

  // Registers memory that the addon allocated, once its pages are touched. The registration is
  // known by the ticket from then on. See Registrations::add_allocated.
  void register_allocated(uint64_t ticket, std::shared_ptr<Pin> pin, std::vector<std::string> backends);
  // Creates more backends. See NixlAgent::add_backends.
  void add_backends(uint64_t ticket, BackendSelection selection);
  // Adds a peer once its process has answered, see Peers::add.
  std::optional<Event> add_remote(uint64_t ticket, Bytes metadata);
  // Prepares a list, which `list(ticket)` returns from then on. See NixlAgent::prepare.
  std::optional<Event> prepare_list(uint64_t ticket, std::optional<std::string> remote, capi::MemoryType type, DescriptorTable table);
  // Closes a list: `list(id)` no longer returns it, and it is released when the last transfer that
  // uses it has finished.
  void close_list(uint64_t ticket, uint64_t id);
  // A list that was prepared and not closed, or null.
  std::shared_ptr<PreparedList> list(uint64_t id) const;

  // Makes the requests of a transfer, which `prepared_transfer(ticket)` returns from then on. Its
  // lists are in use until it is closed.
  void prepare_transfer(uint64_t ticket, std::shared_ptr<PreparedTransfer> transfer);
  // Closes a prepared transfer: `prepared_transfer(id)` no longer returns it, and it is released
  // when it is no longer under way.
  void close_prepared_transfer(uint64_t ticket, uint64_t id);
  // A transfer that was prepared and not closed, or null.
  std::shared_ptr<PreparedTransfer> prepared_transfer(uint64_t id) const;

  // Sends a notification, see Peers::notify.
  std::optional<Event> notify(uint64_t ticket, std::string remote, Bytes payload);

  // Starts a transfer, see Transfer for the events that it sends. Returns `done` only if it has
  // succeeded at once.
  std::optional<Event> transfer(std::shared_ptr<TransferRequest> request);
  // Aborts a transfer: no more slices are posted, and only `released` is sent. Returns false if its
  // outcome is settled and on its way.
  bool abort(uint64_t transfer);

  // Waits up to `timeout` for transfers, then releases everything and ends the thread.
  void close(uint64_t ticket, std::chrono::milliseconds timeout);
  // From any thread: releases everything and ends the thread without sending events, because the
  // environment or the process ends.
  void stop() override { commands_.stop(); }

  // What the agent has done so far. Also valid once the thread has ended.
  const Counters& counters() const { return counters_; }

 private:
  using Clock = std::chrono::steady_clock;

  // Calls that the JavaScript thread may make itself.
  enum class Call : size_t { transfer, notify, prepare, add_remote };
  // The agent's turn on the JavaScript thread, if it was free.
  class Visit;

  AgentThread(AgentConfig config, std::shared_ptr<JsEventQueue> events);

  // These run on the JavaScript thread.
  std::optional<Event> run_here(uint64_t ticket, Call call, bool brief, Work work);
  std::optional<Event> transfer_here(const std::shared_ptr<TransferRequest>& request);
  void rouse(std::chrono::microseconds after = {});

  // All of these run with the agent's turn, most on the agent's thread.
  void main(uint64_t ticket);
  void run_agent(uint64_t ticket);
  bool& warm(Call call) { return warm_[static_cast<size_t>(call)]; }
  Event attempt(uint64_t ticket, const Work& work);
  void begin_transfer(const std::shared_ptr<TransferRequest>& request, bool at_once);
  void end_transfer(const Transfer& transfer);
  void release_lists(const std::shared_ptr<PreparedList>& local, const std::shared_ptr<PreparedList>& remote);
  bool advance_pending_peers();
  bool poll();
  bool ending();
  void sleep();
  void shut_down();
  Failure closed() const;

  const AgentConfig config_;
  Counters counters_;
  CommandQueue commands_;
  AgentTurn turn_;

  // Shared by both threads.
  mutable std::mutex mutex_;
  std::unordered_map<uint64_t, std::shared_ptr<PreparedList>> lists_;
  std::unordered_map<uint64_t, std::shared_ptr<PreparedTransfer>> prepared_transfers_;
  std::unordered_map<uint64_t, std::shared_ptr<TransferRequest>> requests_;

  // For the thread that has the turn.
  EventSender events_;
  std::unique_ptr<NixlAgent> agent_;
  // Memory whose pages are being touched, by the ticket of its registration.
  std::map<uint64_t, std::shared_ptr<Pin>> pending_registrations_;
  // Peers that are being added, by ticket.
  std::map<uint64_t, PendingPeer> pending_peers_;
  TransferScheduler transfers_;
  PollBackoff backoff_;
  Clock::time_point last_peer_check_;
  // The calls that the agent's thread has made at least once.
  std::array<bool, 4> warm_{};
  // When the agent's thread, which sleeps, polls at the latest.
  Clock::time_point sleeps_until_;
  // Whether the kernel wakes the agent's thread on time.
  bool punctual_ = true;
  // Set once the agent is closing: when it no longer waits for transfers.
  std::optional<Clock::time_point> deadline_;
  std::optional<uint64_t> close_ticket_;
};

}  // namespace kv::nixl
