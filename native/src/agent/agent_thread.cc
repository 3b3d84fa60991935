#include "agent/agent_thread.h"

#include <sys/prctl.h>

#include <thread>
#include <utility>

namespace kv::nixl {

namespace {

using std::chrono::milliseconds;

// How often peers that have transfers under way are looked after, where the backend does not.
constexpr auto kWatchPeers = milliseconds(50);
// For transfers under way when the environment ends.
constexpr auto kStopPatience = milliseconds(1000);

}  // namespace

AgentThread::AgentThread(AgentConfig config, std::shared_ptr<JsEventQueue> outbox)
    : config_(std::move(config)), outbox_(std::move(outbox)) {}

std::shared_ptr<AgentThread> AgentThread::start(AgentConfig config, std::shared_ptr<JsEventQueue> outbox, uint64_t ticket) {
  const std::shared_ptr<AgentThread> self(new AgentThread(std::move(config), std::move(outbox)));
  enter_running(self);
  // Detached, since nothing may wait for it without a bound: it keeps itself alive, and the exit knows of it.
  std::thread([self, ticket] {
    self->main(ticket);
    leave_running(self.get());
  }).detach();
  return self;
}

Event AgentThread::attempt(uint64_t ticket, const Work& work) {
  Event event = settled(ticket);
  try {
    if (state_ == nullptr) throw Failure("KV_AGENT_CLOSED", "the agent \"" + config_.name + "\" is closed");
    work(event);
  } catch (const Failure& failure) {
    event.failure = failure;
  } catch (const std::exception& error) {
    event.failure = Failure("KV_INTERNAL", std::string("native exception: ") + error.what());
  }
  return event;
}

bool AgentThread::run_commands() {
  if (!queued_.load(std::memory_order_acquire)) return false;
  std::deque<Command> commands;
  {
    const std::lock_guard lock(mutex_);
    commands.swap(queue_);
    queued_.store(false, std::memory_order_relaxed);
  }
  for (Command& command : commands) command();
  return !commands.empty();
}

void AgentThread::forget(const Transfer& transfer) {
  for (const auto& list : {transfer.request().local, transfer.request().remote}) {
    if (--list->transfers > 0 || !list->close_ticket) continue;
    state_->release(list);
    outbox_->send(settled(*std::exchange(list->close_ticket, std::nullopt)));
  }
  const std::lock_guard lock(mutex_);
  verdicts_.erase(transfer.ticket());
}

// Makes those peers known whose processes have answered. Whether there were any.
bool AgentThread::advance_arrivals() {
  bool some = false;
  for (auto at = arrivals_.begin(); at != arrivals_.end();) {
    bool over = true;
    Event event = attempt(at->first, [this, at, &over](Event& added) {
      const auto name = state_->peers().add(at->second);
      over = name.has_value();
      if (name) added.value = *name;
    });
    if (over) outbox_->send(std::move(event));
    at = over ? arrivals_.erase(at) : std::next(at);
    some = some || over;
  }
  return some;
}

bool AgentThread::advance_transfers() {
  bool moved = false;
  const auto send = [this](Event event) { outbox_->send(std::move(event)); };
  // One slice a turn, of each transfer in its turn, so that commands and notifications never wait for more than one.
  Transfer* next = nullptr;
  for (Transfer& transfer : transfers_) {
    if (!transfer.wants_to_post()) continue;
    if (next == nullptr || (next->ticket() <= last_posted_ && transfer.ticket() > last_posted_)) next = &transfer;
  }
  if (next != nullptr) last_posted_ = next->ticket();
  for (Transfer& transfer : transfers_) moved = transfer.advance(*state_, send, &transfer == next) || moved;
  std::erase_if(transfers_, [this](const Transfer& transfer) {
    if (transfer.finished()) forget(transfer);
    return transfer.finished();
  });
  return moved;
}

// Whether the loop is over. An agent that closes waits for its transfers, and for what it said to peers that it had not met; one whose
// environment ended gives them up.
bool AgentThread::ending() {
  if (stopping_ && !deadline_) deadline_ = Clock::now() + kStopPatience;
  if (stopping_) {
    const auto nobody = [](const Event&) {};
    for (Transfer& transfer : transfers_) transfer.fail(*state_, nobody, Failure("KV_AGENT_CLOSED", "the environment ended"));
  }
  if (!deadline_) return false;
  if (Clock::now() >= *deadline_) return true;
  return transfers_.empty() && (stopping_ || Clock::now() >= state_->peers().words_wait_until());
}

void AgentThread::wait() {
  const auto pause = pace_.pause(Clock::now(), state_->reachable(), !transfers_.empty());
  if (pause == pause.zero()) return;
  std::unique_lock lock(mutex_);
  asleep_ = true;
  wake_.wait_for(lock, pause, [this] { return !queue_.empty() || stopping_; });
  asleep_ = false;
}

void AgentThread::main(uint64_t ticket) {
  // The kernel rounds sleeps up by 50 us by default, which is more than the shortest pause.
  prctl(PR_SET_TIMERSLACK, 1000);
  prctl(PR_SET_NAME, "kv_nixl");
  try {
    state_ = std::make_unique<NixlAgent>(config_, counters_);
    outbox_->send(settled(ticket));
  } catch (const Failure& failure) {
    outbox_->send(failed(Event::Kind::settled, ticket, failure));
    return;
  } catch (const std::exception& error) {
    outbox_->send(failed(Event::Kind::settled, ticket, Failure("KV_INTERNAL", error.what())));
    return;
  }
  pace_.worked(Clock::now());
  while (!ending()) {
    bool worked = run_commands();
    worked = advance_arrivals() || worked;
    worked = advance_transfers() || worked;
    if (!worked || pace_.due(Clock::now())) worked = poll() || worked;
    if (!transfers_.empty() && pace_.last_poll() - last_watch_ > kWatchPeers) {
      last_watch_ = pace_.last_poll();
      state_->peers().watch();
    }
    if (worked) pace_.worked(Clock::now());
    // Whoever was just told needs a core before another look is worth one.
    if (!worked || transfers_.empty()) wait();
  }
  let_go();
}

bool AgentThread::poll() {
  const auto start = Clock::now();
  const bool received = state_->inbox().poll([this](std::string from, Bytes payload) {
    state_->peers().met(from);
    outbox_->send({.kind = Event::Kind::notification,
                   .ticket = 0,
                   .failure = {},
                   .value = std::move(payload),
                   .from = std::move(from)});
  });
  pace_.polled(start, Clock::now(), state_->reachable());
  ++counters_.polls;
  return received;
}

void AgentThread::let_go() {
  const auto send = [this](Event event) { outbox_->send(std::move(event)); };
  std::vector<uint64_t> lists;
  for (Transfer& transfer : transfers_) {
    transfer.cancel(*state_, send,
                    Failure("KV_TRANSFER_ABORTED", "the agent \"" + config_.name + "\" closed before the transfer ended"));
    for (const auto& list : {transfer.request().local, transfer.request().remote}) {
      if (list->close_ticket) lists.push_back(*std::exchange(list->close_ticket, std::nullopt));
    }
  }
  {
    const std::lock_guard lock(mutex_);
    lists_.clear();
    verdicts_.clear();
  }
  // A transfer that NIXL would not cancel is over only when NIXL's agent is gone.
  std::vector<uint64_t> unreleased;
  for (Transfer& transfer : transfers_) {
    if (!transfer.finished()) unreleased.push_back(transfer.ticket());
  }
  transfers_.clear();
  state_.reset();
  for (const uint64_t ticket : unreleased) {
    --counters_.transfers_in_flight;
    Event released = settled(ticket);
    released.kind = Event::Kind::released;
    send(std::move(released));
  }
  for (const uint64_t ticket : lists) send(settled(ticket));
  // Those that came too late.
  run_commands();
  advance_arrivals();
  if (close_ticket_) send(settled(*close_ticket_));
}

}  // namespace kv::nixl
