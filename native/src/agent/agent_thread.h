#pragma once

#include <array>
#include <span>

#include "agent/agent_turn.h"
#include "agent/command_queue.h"
#include "agent/nixl_agent.h"
#include "agent/poll_backoff.h"
#include "library/environment.h"
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
class AgentThread : public StoppableThread {
 public:
  // The ticket is settled when the agent and its backends exist, or failed. Throws
  // KV_TRANSPORT_UNAVAILABLE when the kernel refuses a thread.
  static shared_ptr<AgentThread> start(AgentConfig config, shared_ptr<JsEventQueue> events,
                                       uint64_t ticket);

  // The addon's own memory is registered once its pages are touched. The ticket becomes the
  // registration's id.
  void register_memory(uint64_t ticket, MemoryToRegister memory) {
    // Moved on, since the command may outlive its answer.
    commands_.push([this, ticket, memory = std::move(memory)]() mutable {
      pending_registrations_.emplace(ticket, std::move(memory));
      advance_registrations();
    });
  }
  void deregister(uint64_t ticket, uint64_t registration) {
    const Work remove = [registration](NixlAgent& agent) {
      agent.registrations.remove(registration);
      return EventValue();
    };
    commands_.push([this, ticket, remove] { events_.send(attempt(ticket, remove)); }, true);
  }
  void add_backends(uint64_t ticket, BackendSelection selection) {
    run(ticket, [selection = std::move(selection)](NixlAgent& agent) {
      const auto reading = reading_environment();
      agent.add_backends(selection);
      return EventValue();
    });
  }
  // Covers all memory, or these registrations.
  void local_metadata(uint64_t ticket, optional<vector<uint64_t>> registrations, bool connections) {
    run(ticket, [registrations = std::move(registrations), connections](NixlAgent& agent) {
      return registrations ? agent.partial_metadata(*registrations, connections) : agent.metadata();
    });
  }
  // Adds a peer once its process has answered.
  optional<Event> add_remote(uint64_t ticket, Metadata metadata) {
    if (metadata.bytes.size() <= kBriefMetadata) {
      if (const Visit visit(*this, Call::add_remote); visit) {
        pending_peers_[ticket].bytes = std::move(metadata.bytes);
        advance_pending_peers();
        rouse(kRestOfHandshake);
        return events_.take_answer(ticket);
      }
    }
    commands_.push([this, ticket, bytes = std::move(metadata.bytes)]() mutable {
      pending_peers_[ticket].bytes = std::move(bytes);
      advance_pending_peers();
      warm(Call::add_remote) = true;
    });
    return nullopt;
  }
  void remove_remote(uint64_t ticket, PeerName name) {
    run(ticket, [name = std::move(name.text)](NixlAgent& agent) {
      agent.peers.remove(name);
      return EventValue();
    });
  }
  // `list(ticket)` returns the list from then on. With `keeps`, JavaScript keeps the rows until
  // then.
  optional<Event> prepare_list(uint64_t ticket, optional<PeerName> remote, MemoryType type,
                               std::span<const double> rows, bool keeps) {
    const bool brief = type == MemoryType::dram && rows.size() <= kBriefRows * kRowNumbers;
    DescriptorTable table =
        (keeps ? DescriptorTable::view_of : DescriptorTable::copy_of)(rows.data(), rows.size());
    return run_here(ticket, Call::prepare, brief,
                    [this, ticket, remote = std::move(remote), type,
                     table = std::move(table)](NixlAgent& agent) {
                      const auto name = remote ? optional(remote->text) : nullopt;
                      const auto list = agent.prepare(name, type, table, commands_.stopping());
                      try {
                        lists_.add(ticket, list);
                      } catch (...) {
                        agent.release(list);
                        throw;
                      }
                      return static_cast<double>(list->layout.count());
                    });
  }
  // Hides the list at once, and releases it after the last transfer that uses it.
  void close_list(uint64_t ticket, uint64_t id) { close_later(lists_, ticket, id); }
  // Null if it is not prepared, or closed.
  shared_ptr<PreparedList> list(uint64_t id) const { return lists_.find(id); }

  // Makes a transfer's requests, for `prepared_transfer(ticket)`. Its lists are in use until it is
  // closed.
  void prepare_transfer(uint64_t ticket, shared_ptr<const Moves> moves) {
    run(ticket, [this, ticket,
                 transfer = make_shared<PreparedTransfer>(std::move(moves))](NixlAgent& agent) {
      const Moves& moved = *transfer->moves;
      if (moved.remote->dropped)
        throw Failure("KV_TRANSFER_FAILED", "the peer of the transfer was dropped",
                      "prepare its lists again");
      prepared_transfers_.add(ticket, transfer);
      try {
        agent.prepare(transfer);
      } catch (...) {
        prepared_transfers_.take(ticket);
        throw;
      }
      ++moved.local->users;
      ++moved.remote->users;
      return EventValue();
    });
  }
  // Hides it at once, and releases it when it is not under way.
  void close_prepared_transfer(uint64_t ticket, uint64_t id) {
    close_later(prepared_transfers_, ticket, id);
  }
  void transfer_backend(uint64_t ticket, uint64_t id) {
    run(ticket, [transfer = prepared_transfers_.find(id)](NixlAgent& agent) {
      if (transfer == nullptr) throw Failure("KV_LIST_CLOSED", "the prepared transfer is closed");
      return transfer->backend(agent);
    });
  }
  // Null if it is not prepared, or closed.
  shared_ptr<PreparedTransfer> prepared_transfer(uint64_t id) const {
    return prepared_transfers_.find(id);
  }

  optional<Event> notify(uint64_t ticket, PeerName remote, Payload payload) {
    const bool brief = payload.bytes.size() <= kBriefBytes;
    return run_here(ticket, Call::notify, brief,
                    [this, remote = std::move(remote.text),
                     payload = std::move(payload.bytes)](NixlAgent& agent) {
                      agent.peers.notify(remote, payload);
                      // NIXL may still be connecting to the peer, and the peer may answer.
                      rouse();
                      return EventValue();
                    });
  }

  // Sends the events that Transfer describes. Returns `done` only if it succeeds at once.
  optional<Event> transfer(shared_ptr<TransferRequest> request) {
    requests_.add(request->ticket, request);
    ++counters_.transfers_posted;
    ++counters_.transfers_in_flight;
    if (is_brief(*request)) {
      // Posts a small transfer and looks once. Afterwards the agent's thread continues.
      if (const Visit visit(*this, Call::transfer); visit) {
        begin_transfer(request, true);
        auto answer = events_.take_answer(request->ticket);
        if (!answer && !transfers_.empty()) rouse();
        return answer;
      }
    }
    try {
      commands_.push([this, request] { begin_transfer(request, false); });
    } catch (...) {
      requests_.take(request->ticket);
      --counters_.transfers_posted;
      --counters_.transfers_in_flight;
      throw;
    }
    return nullopt;
  }
  // Posts no more slices and sends only `released`. False if the outcome is on its way.
  bool abort(uint64_t transfer) {
    const auto request = requests_.find(transfer);
    if (request == nullptr || !request->outcome.try_abort()) return false;
    commands_.push([this, transfer] { transfers_.attend(transfer); }, true);
    return true;
  }

  // Waits up to `timeout_ms` for transfers, then ends the thread.
  void close(uint64_t ticket, uint64_t timeout_ms) {
    commands_.push(
        [this, ticket, timeout_ms] {
          if (agent_ == nullptr) {
            events_.send(Event::settled(ticket));
            return;
          }
          close_ticket_ = ticket;
          deadline_ =
              Clock::now() + std::min<milliseconds>(kLongestClose, milliseconds(timeout_ms));
        },
        true);
  }
  // From any thread, when the environment or process ends: ends the thread without events.
  void stop() override { commands_.stop(); }

  // Valid even after the thread has ended.
  const Counters& counters() const { return counters_; }

 private:
  // Limits of what the JavaScript thread does itself: posting 64 KiB of resident memory takes about
  // 20 us.
  static constexpr size_t kBriefBytes = 65'536;
  static constexpr uint64_t kBriefDescriptors = 16;
  static constexpr size_t kBriefRows = 64;
  // 100 years stand for an endless wait.
  static constexpr auto kLongestClose = hours(24 * 365 * 100);
  // Bytes of metadata with a few registrations.
  static constexpr size_t kBriefMetadata = 8192;
  // The agent's thread is woken from a sleep longer than this when there is work.
  static constexpr auto kLooksSoon = microseconds(50);
  // How long the agent's thread leaves the turn free after a new peer. Otherwise the peer's lists
  // would wait while it polls.
  static constexpr auto kRestOfHandshake = microseconds(200);

  // Its result or exception settles a ticket.
  using Work = std::function<EventValue(NixlAgent&)>;

  // Calls that the JavaScript thread may make itself.
  enum class Call : size_t { transfer, notify, prepare, add_remote };
  // The agent's turn on the JavaScript thread, if it was free.
  class Visit {
   public:
    // Takes the turn only if no command waits, so that commands keep their order, and if calls are
    // known to be short. The first of a kind takes up to 10 ms to load its code.
    Visit(AgentThread& thread, Call call)
        : thread_(thread), taken_(thread.turn_.try_take(Clock::now())) {
      if (!taken_) return;
      admitted_ = thread.warm(call) && thread.agent_ != nullptr &&
                  thread.agent_->has_brief_calls() && !thread.deadline_ &&
                  !thread.commands_.any() && !thread.commands_.stopping();
      if (admitted_) thread.events_.keep();
    }
    ~Visit() {
      if (!taken_) return;
      try {
        thread_.events_.send_kept();
      } catch (const std::exception&) {
        // Without memory for an event, the JavaScript thread ends too.
      }
      thread_.turn_.give_back(Clock::now());
    }
    Visit(const Visit&) = delete;
    Visit& operator=(const Visit&) = delete;

    explicit operator bool() const { return admitted_; }

   private:
    AgentThread& thread_;
    const bool taken_;
    bool admitted_ = false;
  };

  AgentThread(AgentConfig config, shared_ptr<JsEventQueue> events);

  // These are for the JavaScript thread.

  // Whether a post takes microseconds. Other kinds of memory may wait for a device or a store.
  static bool is_brief(const TransferRequest& request) {
    const auto& [operation, local, remote, selection] = *request.moves;
    return local->type == MemoryType::dram && remote->type == MemoryType::dram &&
           selection.bytes() <= kBriefBytes && selection.count() <= kBriefDescriptors &&
           (!request.notification || request.notification->size() <= kBriefBytes);
  }
  void run(uint64_t ticket, Work work) {
    commands_.push([this, ticket, work = std::move(work)] { events_.send(attempt(ticket, work)); });
  }
  // Runs `work` at once if it is brief and the turn is free.
  optional<Event> run_here(uint64_t ticket, Call call, bool brief, Work work) {
    if (brief) {
      if (const Visit visit(*this, call); visit) return attempt(ticket, work);
    }
    commands_.push([this, ticket, call, work = std::move(work)] {
      events_.send(attempt(ticket, work));
      warm(call) = true;
    });
    return nullopt;
  }
  // Later calls do not find the entry. Its release waits for its users.
  template <typename T>
  void close_later(Table<T>& table, uint64_t ticket, uint64_t id) {
    commands_.push(
        [this, ticket, entry = table.take(id)] {
          if (entry != nullptr && agent_ != nullptr) {
            if (entry->users > 0) {
              entry->close_ticket = ticket;
              return;
            }
            release(entry);
          }
          events_.send(Event::settled(ticket));
        },
        true);
  }
  // Prevents a long sleep of the agent's thread. For `after`, the turn stays with the JavaScript
  // thread.
  void rouse(microseconds after = {}) {
    const auto now = Clock::now();
    backoff_.worked(now);
    if (after > after.zero() || sleeps_until_ - now > kLooksSoon) commands_.wake(after);
  }

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
  // By registration. Their pages are being touched.
  std::map<uint64_t, MemoryToRegister> pending_registrations_;
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
