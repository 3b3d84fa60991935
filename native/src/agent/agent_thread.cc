#include "agent/agent_thread.h"

#include <sys/prctl.h>

#include <system_error>
#include <thread>

#include "library/descriptors.h"
#include "library/environment.h"
#include "repairs/repair.h"

namespace kv::nixl {

namespace {

// How often transfers check peers, for backends that do not report deaths.
constexpr auto kPeerCheckInterval = milliseconds(50);
// How long an ending environment waits for transfers.
constexpr auto kStopTimeout = milliseconds(1000);

// After a longer pause a thread may wake this late, so that one interrupt wakes several idle
// agents.
constexpr auto kLongestPunctualPause = milliseconds(5);

atomic<int> polling_agents = 0;

struct CountedAsPolling {
  CountedAsPolling() { ++polling_agents; }
  ~CountedAsPolling() { --polling_agents; }
  CountedAsPolling(const CountedAsPolling&) = delete;
  CountedAsPolling& operator=(const CountedAsPolling&) = delete;
};

// How late the kernel may wake this thread. The default, 50 us, exceeds the shortest pause.
void wake_punctually(bool punctually) {
  prctl(PR_SET_TIMERSLACK, punctually ? 1000 : nanoseconds(kLongestPunctualPause).count());
}

}  // namespace

AgentThread::AgentThread(AgentConfig config, shared_ptr<JsEventQueue> events)
    : config_(std::move(config)),
      events_(std::move(events)),
      transfers_([this](const Transfer& transfer) { end_transfer(transfer.request()); }) {}

shared_ptr<AgentThread> AgentThread::start(AgentConfig config, shared_ptr<JsEventQueue> events,
                                           uint64_t ticket) {
  const shared_ptr<AgentThread> self(new AgentThread(std::move(config), std::move(events)));
  add_running_thread(self);
  try {
    // Detached, since a join could block for ever. The thread holds itself alive, and the exit
    // waits with a timeout.
    std::thread([self, ticket] {
      self->main(ticket);
      remove_running_thread(self.get());
    }).detach();
  } catch (const std::system_error& error) {
    remove_running_thread(self.get());
    throw Failure(
        "KV_TRANSPORT_UNAVAILABLE",
        "the thread of the agent \"" + self->config_.name +
            "\" could not be started: " + error.what(),
        "raise the limit of threads (ulimit -u, pids.max of the control group) or of memory (ulimit -v), or close other agents");
  }
  return self;
}

// No exception leaves it, since that would end the process.
void AgentThread::main(uint64_t ticket) {
  wake_punctually(true);
  prctl(PR_SET_NAME, "kv_nixl");
  turn_.take();
  string broken;
  try {
    if (create_agent(ticket)) serve();
  } catch (const std::exception& error) {
    broken = error.what();
  }
  try {
    shut_down();
  } catch (const std::exception& error) {
    broken = error.what();
    agent_.reset();
  }
  if (!broken.empty()) report_broken(broken);
  turn_.give();
}

bool AgentThread::create_agent(uint64_t ticket) {
  const auto reading = reading_environment();
  const auto failure = failure_of([&] {
    agent_ = std::make_unique<NixlAgent>(config_, counters_);
    events_.send(Event::settled(ticket));
  });
  if (failure) events_.send(Event::failed(Event::Kind::settled, ticket, *failure));
  return !failure;
}

void AgentThread::serve() {
  const CountedAsPolling counted;
  backoff_.worked(Clock::now());
  while (!ending()) {
    bool worked = commands_.run_all();
    worked = advance_registrations() || worked;
    worked = advance_pending_peers() || worked;
    worked = transfers_.advance() || worked;
    if (!worked || backoff_.due(Clock::now())) worked = poll() || worked;
    if (!transfers_.empty() && backoff_.last_poll() - last_peer_check_ > kPeerCheckInterval) {
      last_peer_check_ = backoff_.last_poll();
      if (agent_->safeguards.check_peers()) transfers_.attend_all();
    }
    if (worked) backoff_.worked(Clock::now());
    // Sleeps after work too, to leave JavaScript a core for the events.
    if (!worked || transfers_.empty()) sleep();
  }
}

// The agent failed, perhaps for want of memory. JavaScript rejects all that it waits for, since it
// may have missed events.
void AgentThread::report_broken(const string& why) {
  counters_.transfers_failed = counters_.transfers_posted - counters_.transfers_done;
  counters_.transfers_in_flight = 0;
  for (bool told = false; !told && !commands_.stopping();) {
    try {
      events_.send({.kind = Event::Kind::broken, .value = why});
      told = true;
    } catch (const std::exception&) {
      commands_.sleep(milliseconds(10));
    }
  }
}

Event AgentThread::attempt(uint64_t ticket, const Work& work) {
  Event event = Event::settled(ticket);
  event.failure = failure_of([&] {
    if (agent_ == nullptr) throw closed();
    event.value = work(*agent_);
  });
  return event;
}

void AgentThread::begin_transfer(const shared_ptr<TransferRequest>& request, bool at_once) {
  optional<Failure> failure;
  bool counted = false;
  try {
    if (agent_ == nullptr || close_ticket_) throw closed();
    if (request->prepared != nullptr && request->prepared->users > 0) {
      throw Failure("KV_TRANSFER_INVALID", "the prepared transfer is under way already",
                    "post it again once `released` has resolved");
    }
    auto transfer = std::make_unique<Transfer>(*agent_, events_, request);
    ++request->moves->local->users;
    ++request->moves->remote->users;
    if (request->prepared != nullptr) ++request->prepared->users;
    counted = true;
    if (at_once)
      transfers_.start(std::move(transfer));
    else
      transfers_.add(std::move(transfer));
    return;
  } catch (const Failure& refused) {
    failure = refused;
  } catch (const std::exception& error) {
    // Part of it may be under way, and ends with the agent.
    if (transfers_.contains(request->ticket)) throw;
    failure.emplace("KV_INTERNAL", error.what());
  }
  if (counted) end_transfer(*request);
  requests_.take(request->ticket);
  ++counters_.transfers_failed;
  --counters_.transfers_in_flight;
  events_.send(Event::failed(Event::Kind::done, request->ticket, *failure));
  events_.send(Event::released(request->ticket));
}

template <typename T>
void AgentThread::end_use(const shared_ptr<T>& used) {
  if (--used->users > 0 || !used->close_ticket) return;
  release(used);
  events_.send(Event::settled(*std::exchange(used->close_ticket, nullopt)));
}

void AgentThread::release(const shared_ptr<PreparedTransfer>& transfer) {
  agent_->release(transfer);
  end_use(transfer->moves->local);
  end_use(transfer->moves->remote);
}

void AgentThread::end_transfer(const TransferRequest& request) {
  if (request.prepared != nullptr) end_use(request.prepared);
  end_use(request.moves->local);
  end_use(request.moves->remote);
  warm(Call::transfer) = true;
  requests_.take(request.ticket);
}

bool AgentThread::advance_registrations() {
  bool any = false;
  for (auto at = pending_registrations_.begin(); at != pending_registrations_.end();) {
    const auto next = std::next(at);
    const auto& pin = at->second.pin;
    if (agent_ == nullptr || pin == nullptr || pin->memory->touched()) {
      const uint64_t ticket = at->first;
      events_.send(attempt(ticket, [&](NixlAgent& agent) {
        agent.registrations.add(ticket, std::move(pending_registrations_.extract(at).mapped()));
        return EventValue();
      }));
      pending_registrations_.erase(ticket);
      any = true;
    }
    at = next;
  }
  return any;
}

bool AgentThread::advance_pending_peers() {
  bool any = false;
  for (auto at = pending_peers_.begin(); at != pending_peers_.end();) {
    bool answered = true;
    Event event = attempt(at->first, [&at, &answered](NixlAgent& agent) -> EventValue {
      const auto name = agent.peers.add(at->second);
      answered = name.has_value();
      return name ? EventValue(*name) : EventValue();
    });
    if (answered) events_.send(std::move(event));
    at = answered ? pending_peers_.erase(at) : std::next(at);
    any = any || answered;
  }
  return any;
}

bool AgentThread::poll() {
  const auto start = Clock::now();
  const bool received = agent_->poller.poll(
      [this](string from, Bytes payload) {
        agent_->peers.mark_connected(from);
        events_.send({.kind = Event::Kind::notification,
                      .value = std::move(payload),
                      .from = std::move(from)});
      },
      [this](size_t senders) {
        events_.send({.kind = Event::Kind::dropped, .value = static_cast<double>(senders)});
      });
  backoff_.polled(start, Clock::now(), agent_->reachable());
  ++counters_.polls;
  if (const uint64_t refused = take_refused_connections(); refused > 0) {
    events_.send({.kind = Event::Kind::refused, .value = static_cast<double>(refused)});
  }
  for (Repair* const repair : all_repairs()) {
    if (repair->take_failure())
      events_.send(
          {.kind = Event::Kind::unrepaired, .value = string(repair->why()), .from = repair->name});
  }
  return received;
}

// A closing agent waits for its transfers, and for notifications to peers that it still connects
// to. Once its environment has ended, it waits only for what NIXL has under way.
bool AgentThread::ending() {
  const bool stopping = commands_.stopping();
  if (stopping) {
    if (!deadline_) deadline_ = Clock::now() + kStopTimeout;
    transfers_.abandon_all();
  }
  if (!deadline_) return false;
  if (Clock::now() >= *deadline_) return true;
  return transfers_.empty() &&
         (stopping || Clock::now() >= agent_->peers.pending_notifications_until());
}

void AgentThread::sleep() {
  const auto pause = backoff_.pause(Clock::now(), agent_->reachable(), !transfers_.empty(),
                                    polling_agents.load(std::memory_order_relaxed));
  if (pause <= pause.zero()) return;
  const bool punctual = pause <= kLongestPunctualPause;
  if (punctual != punctual_) wake_punctually(punctual_ = punctual);
  sleeps_until_ = Clock::now() + pause + (punctual ? milliseconds(0) : kLongestPunctualPause);
  const auto sleep = [this](microseconds longest) {
    turn_.give();
    commands_.sleep(longest);
    turn_.take();
  };
  sleep(pause);
  // Returns at once, unless the JavaScript thread began a handshake meanwhile.
  sleep({});
  sleeps_until_ = {};
}

void AgentThread::shut_down() {
  vector<uint64_t> closing;
  vector<uint64_t> unreleased;
  const auto note_close = [&](Closable& used) {
    if (used.close_ticket) closing.push_back(*std::exchange(used.close_ticket, nullopt));
  };
  auto transfers = transfers_.take_all();
  for (const auto& transfer : transfers) {
    transfer->cancel(Failure("KV_TRANSFER_ABORTED", "the agent \"" + config_.name +
                                                        "\" closed before the transfer ended"));
    unreleased.push_back(transfer->ticket());
    const TransferRequest& request = transfer->request();
    note_close(*request.moves->local);
    note_close(*request.moves->remote);
    if (request.prepared != nullptr) note_close(*request.prepared);
  }
  transfers.clear();
  lists_.clear();
  prepared_transfers_.clear();
  requests_.clear();
  agent_.reset();
  // Destroying NIXL's agent ends uncancelled transfers. Only now is their memory free.
  for (const uint64_t ticket : unreleased) {
    --counters_.transfers_in_flight;
    events_.send(Event::released(ticket));
  }
  for (const uint64_t ticket : closing) events_.send(Event::settled(ticket));
  // Commands that came too late fail.
  commands_.run_all();
  advance_registrations();
  advance_pending_peers();
  if (close_ticket_) events_.send(Event::settled(*close_ticket_));
}

Failure AgentThread::closed() const {
  return Failure("KV_AGENT_CLOSED", "the agent \"" + config_.name + "\" is closed");
}

}  // namespace kv::nixl
