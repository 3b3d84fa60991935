// The native thread of one agent. It alone calls NIXL; JavaScript hands it commands and hears back through the outbox.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "agent/nixl_agent.h"
#include "library/exit_guard.h"
#include "node/js_event_queue.h"
#include "agent/poll_backoff.h"
#include "transfer/transfer.h"

namespace kv::nixl {

class AgentThread : public Stoppable, public std::enable_shared_from_this<AgentThread> {
 public:
  // Starts the thread; the ticket is settled when the agent and its backends exist.
  static std::shared_ptr<AgentThread> start(AgentConfig config, std::shared_ptr<JsEventQueue> outbox, uint64_t ticket);

  // Commands, from the JavaScript thread. Each settles its ticket; what it makes is known by that ticket from then on.
  void register_memory(uint64_t ticket, std::shared_ptr<Pin> pin);
  void register_foreign(uint64_t ticket, const ExternalMemory& memory);
  void deregister_memory(uint64_t ticket, uint64_t registration);
  void local_metadata(uint64_t ticket);
  void add_remote(uint64_t ticket, Bytes metadata);
  void remove_remote(uint64_t ticket, std::string name);
  void prepare(uint64_t ticket, std::optional<std::string> remote, capi::MemoryType type, RowNumbers numbers);
  void close_list(uint64_t ticket, uint64_t list);
  void notify(uint64_t ticket, std::string remote, Bytes payload);
  // Tells `done` and `released` of the ticket.
  void transfer(uint64_t ticket, TransferRequest request);
  // Gives up a transfer: no more of it is posted, and only `released` is told. False if its outcome is decided already, and
  // on its way.
  bool abort(uint64_t transfer);
  // Waits for transfers until the time is over, then lets go of everything; the thread ends.
  void close(uint64_t ticket, std::chrono::milliseconds patience);
  // The same without anybody to tell: the environment or the process is ending.
  void stop() override;

  // A list that has been prepared and not closed, or null. From the JavaScript thread.
  std::shared_ptr<PreparedList> list(uint64_t id) const;
  const Counters& counters() const { return counters_; }

 private:
  using Clock = std::chrono::steady_clock;
  using Command = std::function<void()>;
  using Work = std::function<void(Event&)>;

  AgentThread(AgentConfig config, std::shared_ptr<JsEventQueue> outbox);

  void enqueue(Command command);
  // Runs `work` on the thread and settles the ticket with what it answers or throws.
  void call(uint64_t ticket, Work work);
  Event attempt(uint64_t ticket, const Work& work);

  void main(uint64_t ticket);
  bool run_commands();
  bool poll();
  bool advance_arrivals();
  bool advance_transfers();
  void forget(const Transfer& transfer);
  bool ending();
  void wait();
  void let_go();

  AgentConfig config_;
  const std::shared_ptr<JsEventQueue> outbox_;
  Counters counters_;

  mutable std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Command> queue_;
  std::unordered_map<uint64_t, std::shared_ptr<PreparedList>> lists_;
  std::unordered_map<uint64_t, SharedVerdict> verdicts_;
  bool asleep_ = false;
  // There is something in the queue; to be looked at without the lock.
  std::atomic<bool> queued_{false};
  std::atomic<bool> stopping_{false};

  // The thread only.
  std::unique_ptr<NixlAgent> state_;
  // Peers that are being added, by the ticket of who asked.
  std::map<uint64_t, Peers::PendingPeer> arrivals_;
  std::deque<Transfer> transfers_;
  uint64_t last_posted_ = 0;
  PollBackoff pace_;
  Clock::time_point last_watch_;
  std::optional<Clock::time_point> deadline_;
  std::optional<uint64_t> close_ticket_;
};

}  // namespace kv::nixl
