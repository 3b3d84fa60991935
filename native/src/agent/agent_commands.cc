// The side of an agent's thread that JavaScript sees: each command goes into the queue, and is carried out by the thread.
#include <utility>

#include "agent/agent_thread.h"

namespace kv::nixl {

void AgentThread::enqueue(Command command) {
  bool asleep = false;
  {
    const std::lock_guard lock(mutex_);
    queue_.push_back(std::move(command));
    queued_.store(true, std::memory_order_release);
    asleep = asleep_;
  }
  if (asleep) wake_.notify_one();
}

void AgentThread::call(uint64_t ticket, Work work) {
  enqueue([this, ticket, work = std::move(work)] { outbox_->send(attempt(ticket, work)); });
}

void AgentThread::register_memory(uint64_t ticket, std::shared_ptr<Pin> pin) {
  call(ticket, [this, ticket, pin = std::move(pin)](Event&) mutable { state_->registrations().add_memory(ticket, std::move(pin)); });
}

void AgentThread::register_foreign(uint64_t ticket, const ExternalMemory& memory) {
  call(ticket, [this, ticket, memory](Event&) { state_->registrations().add_foreign(ticket, memory); });
}

void AgentThread::deregister_memory(uint64_t ticket, uint64_t registration) {
  call(ticket, [this, registration](Event&) { state_->registrations().remove(registration); });
}

void AgentThread::local_metadata(uint64_t ticket) {
  call(ticket, [this](Event& event) { event.value = state_->local_metadata(); });
}

void AgentThread::add_remote(uint64_t ticket, Bytes metadata) {
  enqueue([this, ticket, metadata = std::move(metadata)]() mutable {
    arrivals_[ticket].bytes = std::move(metadata);
    advance_arrivals();
  });
}

void AgentThread::remove_remote(uint64_t ticket, std::string name) {
  call(ticket, [this, name = std::move(name)](Event&) { state_->peers().remove(name); });
}

void AgentThread::notify(uint64_t ticket, std::string remote, Bytes payload) {
  call(ticket, [this, remote = std::move(remote), payload = std::move(payload)](Event&) { state_->peers().notify(remote, payload); });
}

void AgentThread::prepare(uint64_t ticket, std::optional<std::string> remote, capi::MemoryType type, RowNumbers numbers) {
  call(ticket, [this, ticket, remote = std::move(remote), type, numbers = std::move(numbers)](Event& event) mutable {
    const auto list = state_->prepare(std::move(remote), type, numbers, stopping_);
    event.value = static_cast<double>(list->shape.count());
    const std::lock_guard lock(mutex_);
    lists_.emplace(ticket, list);
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
    // At once, so that no transfer begun from now on finds it.
    const std::lock_guard lock(mutex_);
    const auto found = lists_.find(id);
    if (found != lists_.end()) {
      list = std::move(found->second);
      lists_.erase(found);
    }
  }
  enqueue([this, ticket, list] {
    if (list == nullptr || state_ == nullptr) {
      outbox_->send(settled(ticket));
    } else if (list->transfers > 0) {
      list->close_ticket = ticket;
    } else {
      state_->release(list);
      outbox_->send(settled(ticket));
    }
  });
}

void AgentThread::transfer(uint64_t ticket, TransferRequest request) {
  ++counters_.transfers_posted;
  ++counters_.transfers_in_flight;
  const auto verdict = std::make_shared<std::atomic<Verdict>>(Verdict::open);
  {
    const std::lock_guard lock(mutex_);
    verdicts_.emplace(ticket, verdict);
  }
  // std::function asks for copyable captures.
  const auto held = std::make_shared<TransferRequest>(std::move(request));
  enqueue([this, ticket, held, verdict] {
    try {
      if (state_ == nullptr || close_ticket_) {
        throw Failure("KV_AGENT_CLOSED", "the agent \"" + config_.name + "\" is closed");
      }
      transfers_.emplace_back(ticket, std::move(*held), verdict);
    } catch (const std::exception& error) {
      const auto* failure = dynamic_cast<const Failure*>(&error);
      ++counters_.transfers_failed;
      --counters_.transfers_in_flight;
      outbox_->send(failed(Event::Kind::done, ticket, failure ? *failure : Failure("KV_INTERNAL", error.what())));
      Event released = settled(ticket);
      released.kind = Event::Kind::released;
      outbox_->send(std::move(released));
    }
  });
}

bool AgentThread::abort(uint64_t ticket) {
  {
    const std::lock_guard lock(mutex_);
    const auto found = verdicts_.find(ticket);
    Verdict expected = Verdict::open;
    if (found == verdicts_.end() || !found->second->compare_exchange_strong(expected, Verdict::given_up)) return false;
  }
  // To the thread at once, which may be asleep.
  enqueue([] {});
  return true;
}

void AgentThread::close(uint64_t ticket, std::chrono::milliseconds patience) {
  enqueue([this, ticket, patience] {
    if (state_ == nullptr) {
      outbox_->send(settled(ticket));
      return;
    }
    close_ticket_ = ticket;
    deadline_ = Clock::now() + patience;
  });
}

void AgentThread::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_one();
}

}  // namespace kv::nixl
