#include "agent/agent_thread.h"

#include <sys/prctl.h>

#include <atomic>
#include <system_error>
#include <thread>
#include <utility>

#include "library/descriptors.h"
#include "library/environment.h"
#include "ucx/lost_answers.h"

namespace kv::nixl {

namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

// How often peers are checked while transfers are in flight, for backends that do not report a
// peer's death.
constexpr auto kPeerCheckInterval = milliseconds(50);
// How long transfers in flight are waited for when the environment ends.
constexpr auto kStopTimeout = milliseconds(1000);

// After a longer pause a thread may wake that much late: then the kernel wakes several idle agents
// with one interrupt.
constexpr auto kLongestPunctualPause = milliseconds(5);

// The agents of this process whose threads poll.
std::atomic<int> polling_agents = 0;

struct CountedAsPolling {
  CountedAsPolling() { ++polling_agents; }
  ~CountedAsPolling() { --polling_agents; }
  CountedAsPolling(const CountedAsPolling&) = delete;
  CountedAsPolling& operator=(const CountedAsPolling&) = delete;
};

// How late the kernel may wake this thread. Its default is 50 us, which is longer than the shortest
// pause.
void wake_punctually(bool punctually) { prctl(PR_SET_TIMERSLACK, punctually ? 1000 : std::chrono::nanoseconds(kLongestPunctualPause).count()); }

}  // namespace

AgentThread::AgentThread(AgentConfig config, std::shared_ptr<JsEventQueue> events)
    : config_(std::move(config)), events_(std::move(events)), transfers_([this](const Transfer& transfer) { end_transfer(transfer); }) {}

std::shared_ptr<AgentThread> AgentThread::start(AgentConfig config, std::shared_ptr<JsEventQueue> events, uint64_t ticket) {
  const std::shared_ptr<AgentThread> self(new AgentThread(std::move(config), std::move(events)));
  add_running_thread(self);
  try {
    // Detached, since joining it could block without a limit. It holds itself alive, and the exit
    // waits for it with a timeout.
    std::thread([self, ticket] {
      self->main(ticket);
      remove_running_thread(self.get());
    }).detach();
  } catch (const std::system_error& error) {
    remove_running_thread(self.get());
    throw Failure("KV_TRANSPORT_UNAVAILABLE",
                  "the thread of the agent \"" + self->config_.name + "\" could not be started: " + error.what(),
                  "raise the limit of threads (ulimit -u, pids.max of the control group) or of memory (ulimit -v), or close other agents");
  }
  return self;
}

void AgentThread::main(uint64_t ticket) {
  wake_punctually(true);
  prctl(PR_SET_NAME, "kv_nixl");
  turn_.take();
  run_agent(ticket);
  turn_.give();
}

void AgentThread::run_agent(uint64_t ticket) {
  try {
    const auto reading = reading_environment();
    agent_ = std::make_unique<NixlAgent>(config_, counters_);
    events_.send(Event::settled(ticket));
  } catch (const Failure& failure) {
    events_.send(Event::failed(Event::Kind::settled, ticket, failure));
    return;
  } catch (const std::exception& error) {
    events_.send(Event::failed(Event::Kind::settled, ticket, Failure("KV_INTERNAL", error.what())));
    return;
  }
  const CountedAsPolling counted;
  backoff_.worked(Clock::now());
  while (!ending()) {
    bool worked = commands_.run_all();
    worked = advance_pending_peers() || worked;
    worked = transfers_.advance() || worked;
    if (!worked || backoff_.due(Clock::now())) worked = poll() || worked;
    if (!transfers_.empty() && backoff_.last_poll() - last_peer_check_ > kPeerCheckInterval) {
      last_peer_check_ = backoff_.last_poll();
      if (agent_->safeguards().check_peers()) transfers_.attend_all();
    }
    if (worked) backoff_.worked(Clock::now());
    // Also sleeps after work, so that JavaScript has a core to take the events.
    if (!worked || transfers_.empty()) sleep();
  }
  shut_down();
}

Event AgentThread::attempt(uint64_t ticket, const Work& work) {
  Event event = Event::settled(ticket);
  try {
    if (agent_ == nullptr) throw closed();
    event.value = work(*agent_);
  } catch (const Failure& failure) {
    event.failure = failure;
  } catch (const std::exception& error) {
    event.failure = Failure("KV_INTERNAL", std::string("native exception: ") + error.what());
  }
  return event;
}

void AgentThread::begin_transfer(const std::shared_ptr<TransferRequest>& request, bool at_once) {
  Event event;
  try {
    if (agent_ == nullptr || close_ticket_) throw closed();
    if (request->prepared != nullptr && std::exchange(request->prepared->under_way, true)) {
      throw Failure("KV_TRANSFER_INVALID", "the prepared transfer is under way already", "post it again once `released` has resolved");
    }
    auto transfer = std::make_unique<Transfer>(*agent_, events_, request);
    for (const auto& list : {request->local, request->remote}) ++list->transfers;
    if (at_once) transfers_.start(std::move(transfer));
    else transfers_.add(std::move(transfer));
    return;
  } catch (const Failure& failure) {
    event = Event::failed(Event::Kind::done, request->ticket, failure);
  } catch (const std::exception& error) {
    event = Event::failed(Event::Kind::done, request->ticket, Failure("KV_INTERNAL", error.what()));
  }
  {
    const std::lock_guard lock(mutex_);
    requests_.erase(request->ticket);
  }
  ++counters_.transfers_failed;
  --counters_.transfers_in_flight;
  events_.send(std::move(event));
  events_.send(Event::released(request->ticket));
}

void AgentThread::release_lists(const std::shared_ptr<PreparedList>& local, const std::shared_ptr<PreparedList>& remote) {
  for (const auto& list : {local, remote}) {
    if (--list->transfers > 0 || !list->close_ticket) continue;
    agent_->release(list);
    events_.send(Event::settled(*std::exchange(list->close_ticket, std::nullopt)));
  }
}

void AgentThread::end_transfer(const Transfer& transfer) {
  const TransferRequest& request = transfer.request();
  if (const auto& prepared = request.prepared; prepared != nullptr) {
    prepared->under_way = false;
    if (prepared->close_ticket) {
      agent_->release(prepared);
      release_lists(prepared->local, prepared->remote);
      events_.send(Event::settled(*std::exchange(prepared->close_ticket, std::nullopt)));
    }
  }
  release_lists(request.local, request.remote);
  warm(Call::transfer) = true;
  const std::lock_guard lock(mutex_);
  requests_.erase(transfer.ticket());
}

// Adds the peers whose processes have answered. Returns whether there were any.
bool AgentThread::advance_pending_peers() {
  bool any = false;
  for (auto at = pending_peers_.begin(); at != pending_peers_.end();) {
    bool answered = true;
    Event event = attempt(at->first, [&at, &answered](NixlAgent& agent) -> EventValue {
      const auto name = agent.peers().add(at->second);
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
  const bool received = agent_->poller().poll(
      [this](std::string from, Bytes payload) {
        agent_->peers().mark_connected(from);
        events_.send(Event::notification(std::move(from), std::move(payload)));
      },
      [this](size_t senders) { events_.send(Event::dropped({}, static_cast<double>(senders))); });
  backoff_.polled(start, Clock::now(), agent_->reachable());
  ++counters_.polls;
  if (const uint64_t refused = take_refused_connections(); refused > 0) events_.send(Event::refused(refused));
  if (take_unknown_ucx()) events_.send({.kind = Event::Kind::unknown_ucx});
  return received;
}

// Whether the loop ends. An agent that closes waits for its transfers, and for notifications to
// peers that it is not yet connected to. If the environment has ended, it only waits for what NIXL
// has under way.
bool AgentThread::ending() {
  const bool stopping = commands_.stopping();
  if (stopping) {
    if (!deadline_) deadline_ = Clock::now() + kStopTimeout;
    transfers_.abandon_all();
  }
  if (!deadline_) return false;
  if (Clock::now() >= *deadline_) return true;
  return transfers_.empty() && (stopping || Clock::now() >= agent_->peers().pending_notifications_until());
}

void AgentThread::sleep() {
  const auto pause = backoff_.pause(Clock::now(), agent_->reachable(), !transfers_.empty(), polling_agents.load(std::memory_order_relaxed));
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
  // Over at once, unless the JavaScript thread has begun a handshake while this one waited for the
  // turn.
  sleep({});
  sleeps_until_ = {};
}

void AgentThread::shut_down() {
  std::vector<uint64_t> closing;
  std::vector<uint64_t> unreleased;
  auto transfers = transfers_.take_all();
  for (const auto& transfer : transfers) {
    transfer->cancel(Failure("KV_TRANSFER_ABORTED", "the agent \"" + config_.name + "\" closed before the transfer ended"));
    unreleased.push_back(transfer->ticket());
    for (const auto& list : {transfer->request().local, transfer->request().remote}) {
      if (list->close_ticket) closing.push_back(*std::exchange(list->close_ticket, std::nullopt));
    }
    const auto& prepared = transfer->request().prepared;
    if (prepared != nullptr && prepared->close_ticket) closing.push_back(*std::exchange(prepared->close_ticket, std::nullopt));
  }
  transfers.clear();
  {
    const std::lock_guard lock(mutex_);
    lists_.clear();
    prepared_transfers_.clear();
    requests_.clear();
  }
  agent_.reset();
  // A transfer that NIXL did not cancel ends with NIXL's agent, so only now is its memory free.
  for (const uint64_t ticket : unreleased) {
    --counters_.transfers_in_flight;
    events_.send(Event::released(ticket));
  }
  for (const uint64_t ticket : closing) events_.send(Event::settled(ticket));
  for (const auto& [ticket, pin] : std::exchange(pending_registrations_, {})) {
    events_.send(Event::failed(Event::Kind::settled, ticket, closed()));
  }
  // Commands that came too late fail.
  commands_.run_all();
  advance_pending_peers();
  if (close_ticket_) events_.send(Event::settled(*close_ticket_));
}

Failure AgentThread::closed() const { return Failure("KV_AGENT_CLOSED", "the agent \"" + config_.name + "\" is closed"); }

}  // namespace kv::nixl
