#include "agent/agent_thread.h"

#include <sys/prctl.h>

#include <atomic>
#include <system_error>
#include <thread>
#include <utility>

#include "library/environment.h"

namespace kv::nixl {

namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

// How often peers are checked while transfers are in flight, for backends that do not report a peer's death.
constexpr auto kPeerCheckInterval = milliseconds(50);
// How long transfers in flight are waited for when the environment ends.
constexpr auto kStopTimeout = milliseconds(1000);

// What the JavaScript thread does itself: posting 64 KiB takes about 20 us, where the bytes are in memory.
constexpr size_t kBriefBytes = 65'536;
constexpr uint64_t kBriefDescriptors = 16;
constexpr size_t kBriefRows = 64;
// A peer's metadata with a few registrations.
constexpr size_t kBriefMetadata = 8192;
// The agent's thread is woken if it would sleep longer than this although there is something to look after.
constexpr auto kLooksSoon = microseconds(50);

// The agents of this process whose threads poll.
std::atomic<int> polling_agents = 0;

struct CountedAsPolling {
  CountedAsPolling() { ++polling_agents; }
  ~CountedAsPolling() { --polling_agents; }
  CountedAsPolling(const CountedAsPolling&) = delete;
  CountedAsPolling& operator=(const CountedAsPolling&) = delete;
};

// Whether a post of the request takes microseconds. A post between memory of another kind may wait for a device or a store.
bool is_brief(const TransferRequest& request) {
  const auto is_memory = [](const PreparedList& list) { return list.type == capi::MemoryType::dram; };
  return is_memory(*request.local) && is_memory(*request.remote) && request.selection->bytes() <= kBriefBytes &&
         request.selection->count() <= kBriefDescriptors && (!request.notification || request.notification->size() <= kBriefBytes);
}

}  // namespace

class AgentThread::Visit {
 public:
  // Takes the turn only if no command waits, so that the agent's commands keep their order, and if NIXL's calls are known to be short. The first call of
  // its kind is not: it takes up to 10 ms, for code that is not in memory yet.
  Visit(AgentThread& thread, Call call) : thread_(thread), taken_(thread.turn_.try_take(Clock::now())) {
    if (!taken_) return;
    welcome_ = thread.warm(call) && thread.agent_ != nullptr && thread.agent_->has_brief_calls() && !thread.deadline_ && !thread.commands_.any() && !thread.commands_.stopping();
    if (welcome_) thread.events_.keep();
  }
  ~Visit() {
    if (!taken_) return;
    for (Event& event : thread_.events_.take_kept()) thread_.events_.send(std::move(event));
    thread_.turn_.give_back(Clock::now());
  }
  Visit(const Visit&) = delete;
  Visit& operator=(const Visit&) = delete;

  // Whether NIXL may be called.
  explicit operator bool() const { return welcome_; }

 private:
  AgentThread& thread_;
  const bool taken_;
  bool welcome_ = false;
};

AgentThread::AgentThread(AgentConfig config, std::shared_ptr<JsEventQueue> events)
    : config_(std::move(config)), events_(std::move(events)), transfers_([this](const Transfer& transfer) { end_transfer(transfer); }) {}

std::shared_ptr<AgentThread> AgentThread::start(AgentConfig config, std::shared_ptr<JsEventQueue> events, uint64_t ticket) {
  const std::shared_ptr<AgentThread> self(new AgentThread(std::move(config), std::move(events)));
  add_running_thread(self);
  try {
    // Detached, since joining it could block without a limit. It holds itself alive, and the exit waits for it with a timeout.
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

// --- Called on the JavaScript thread ---

void AgentThread::run(uint64_t ticket, Work work) {
  commands_.push([this, ticket, work = std::move(work)] { events_.send(attempt(ticket, work)); });
}

// Runs `work` at once if it is brief and the agent's turn is free.
std::optional<Event> AgentThread::run_here(uint64_t ticket, Call call, bool brief, Work work) {
  if (brief) {
    if (const Visit visit(*this, call); visit) return attempt(ticket, work);
  }
  commands_.push([this, ticket, call, work = std::move(work)] {
    events_.send(attempt(ticket, work));
    warm(call) = true;
  });
  return std::nullopt;
}

// There is something to look after: the agent's thread shall not sleep for long.
void AgentThread::rouse() {
  const auto now = Clock::now();
  backoff_.worked(now);
  if (sleeps_until_ - now > kLooksSoon) commands_.wake();
}

void AgentThread::add_backends(uint64_t ticket, BackendSelection selection) {
  run(ticket, [selection = std::move(selection)](NixlAgent& agent) {
    const auto reading = reading_environment();
    agent.add_backends(selection);
    return EventValue();
  });
}

void AgentThread::register_allocated(uint64_t ticket, std::shared_ptr<Pin> pin, std::vector<std::string> backends) {
  commands_.push([this, ticket, pin = std::move(pin), backends = std::move(backends)] {
    const auto mapping = pin->mapping();
    // An agent that has closed fails below.
    if (agent_ != nullptr) pending_registrations_.emplace(ticket, pin);
    mapping->when_touched([self = shared_from_this(), ticket, backends] {
      self->run(ticket, [&pending = self->pending_registrations_, ticket, backends](NixlAgent& agent) {
        agent.registrations().add_allocated(ticket, std::move(pending.extract(ticket).mapped()), backends);
        return EventValue();
      });
    });
  });
}

std::optional<Event> AgentThread::add_remote(uint64_t ticket, Bytes metadata) {
  if (metadata.size() <= kBriefMetadata) {
    if (const Visit visit(*this, Call::add_remote); visit) {
      rouse();
      pending_peers_[ticket].bytes = std::move(metadata);
      advance_pending_peers();
      return events_.take_answer(ticket);
    }
  }
  commands_.push([this, ticket, metadata = std::move(metadata)]() mutable {
    pending_peers_[ticket].bytes = std::move(metadata);
    advance_pending_peers();
    warm(Call::add_remote) = true;
  });
  return std::nullopt;
}

std::optional<Event> AgentThread::notify(uint64_t ticket, std::string remote, Bytes payload) {
  const bool brief = payload.size() <= kBriefBytes;
  return run_here(ticket, Call::notify, brief, [this, remote = std::move(remote), payload = std::move(payload)](NixlAgent& agent) {
    agent.peers().notify(remote, payload);
    // NIXL may still be connecting to the peer, and the peer may answer.
    rouse();
    return EventValue();
  });
}

std::optional<Event> AgentThread::prepare_list(uint64_t ticket, std::optional<std::string> remote, capi::MemoryType type, DescriptorTable table) {
  const bool brief = type == capi::MemoryType::dram && table.count() <= kBriefRows * kRowNumbers;
  return run_here(ticket, Call::prepare, brief, [this, ticket, remote = std::move(remote), type, table = std::move(table)](NixlAgent& agent) {
    const auto list = agent.prepare(remote, type, table, commands_.stopping());
    const std::lock_guard lock(mutex_);
    lists_.emplace(ticket, list);
    return static_cast<double>(list->layout.count());
  });
}

std::shared_ptr<PreparedList> AgentThread::list(uint64_t id) const {
  const std::lock_guard lock(mutex_);
  const auto found = lists_.find(id);
  return found == lists_.end() ? nullptr : found->second;
}

void AgentThread::close_list(uint64_t ticket, uint64_t id) {
  std::shared_ptr<PreparedList> list;
  {
    // At once, so that no later transfer finds it.
    const std::lock_guard lock(mutex_);
    const auto found = lists_.find(id);
    if (found != lists_.end()) {
      list = std::move(found->second);
      lists_.erase(found);
    }
  }
  commands_.push([this, ticket, list] {
    if (list != nullptr && agent_ != nullptr) {
      if (list->transfers > 0) {
        list->close_ticket = ticket;
        return;
      }
      agent_->release(list);
    }
    events_.send(Event::settled(ticket));
  });
}

void AgentThread::prepare_transfer(uint64_t ticket, std::shared_ptr<PreparedTransfer> transfer) {
  run(ticket, [this, ticket, transfer = std::move(transfer)](NixlAgent& agent) {
    if (transfer->remote->dropped) throw Failure("KV_TRANSFER_FAILED", "the peer of the transfer was dropped", "prepare its lists again");
    agent.prepare(transfer);
    for (const auto& list : {transfer->local, transfer->remote}) ++list->transfers;
    const std::lock_guard lock(mutex_);
    prepared_transfers_.emplace(ticket, transfer);
    return EventValue();
  });
}

std::shared_ptr<PreparedTransfer> AgentThread::prepared_transfer(uint64_t id) const {
  const std::lock_guard lock(mutex_);
  const auto found = prepared_transfers_.find(id);
  return found == prepared_transfers_.end() ? nullptr : found->second;
}

void AgentThread::close_prepared_transfer(uint64_t ticket, uint64_t id) {
  std::shared_ptr<PreparedTransfer> transfer;
  {
    const std::lock_guard lock(mutex_);
    const auto found = prepared_transfers_.find(id);
    if (found != prepared_transfers_.end()) {
      transfer = std::move(found->second);
      prepared_transfers_.erase(found);
    }
  }
  commands_.push([this, ticket, transfer] {
    if (transfer != nullptr && agent_ != nullptr) {
      if (transfer->under_way) {
        transfer->close_ticket = ticket;
        return;
      }
      agent_->release(transfer);
      release_lists(transfer->local, transfer->remote);
    }
    events_.send(Event::settled(ticket));
  });
}

std::optional<Event> AgentThread::transfer(std::shared_ptr<TransferRequest> request) {
  ++counters_.transfers_posted;
  ++counters_.transfers_in_flight;
  {
    const std::lock_guard lock(mutex_);
    requests_.emplace(request->ticket, request);
  }
  if (is_brief(*request)) {
    if (const Visit visit(*this, Call::transfer); visit) return transfer_here(request);
  }
  commands_.push([this, request = std::move(request)] { begin_transfer(request, false); });
  return std::nullopt;
}

// Posts a small transfer and looks at it once. The agent's thread goes on with it if it takes longer.
std::optional<Event> AgentThread::transfer_here(const std::shared_ptr<TransferRequest>& request) {
  begin_transfer(request, true);
  auto answer = events_.take_answer(request->ticket);
  if (!answer && !transfers_.empty()) rouse();
  return answer;
}

bool AgentThread::abort(uint64_t transfer) {
  {
    const std::lock_guard lock(mutex_);
    const auto found = requests_.find(transfer);
    if (found == requests_.end() || !found->second->outcome.try_abort()) return false;
  }
  commands_.push([this, transfer] { transfers_.attend(transfer); });
  return true;
}

void AgentThread::close(uint64_t ticket, milliseconds timeout) {
  commands_.push([this, ticket, timeout] {
    if (agent_ == nullptr) {
      events_.send(Event::settled(ticket));
      return;
    }
    close_ticket_ = ticket;
    deadline_ = Clock::now() + timeout;
  });
}

// --- On the agent's thread ---

void AgentThread::main(uint64_t ticket) {
  // By default the kernel delays wake-ups by up to 50 us, which is longer than the shortest pause.
  prctl(PR_SET_TIMERSLACK, 1000);
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
  return received;
}

// Whether the loop ends. An agent that closes waits for its transfers, and for notifications to peers that it is not yet connected to. If the
// environment has ended, it only waits for what NIXL has under way.
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
  sleeps_until_ = Clock::now() + pause;
  turn_.give();
  commands_.sleep(pause);
  turn_.take();
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
