// What the JavaScript thread calls. The rest of AgentThread is in agent_thread.cc.
#include <utility>

#include "agent/agent_thread.h"
#include "library/environment.h"

namespace kv::nixl {

namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

// What the JavaScript thread does itself: posting 64 KiB takes about 20 us, where the bytes are in
// memory.
constexpr size_t kBriefBytes = 65'536;
constexpr uint64_t kBriefDescriptors = 16;
constexpr size_t kBriefRows = 64;
// A peer's metadata with a few registrations.
constexpr size_t kBriefMetadata = 8192;
// The agent's thread is woken if it would sleep longer than this although there is something to
// look after.
constexpr auto kLooksSoon = microseconds(50);
// How long the agent's thread, which makes the connections to a new peer, waits for the lists that
// are prepared next. While it polls, these would have to wait for it.
constexpr auto kRestOfHandshake = microseconds(200);

// Whether a post of the request takes microseconds. A post between memory of another kind may wait
// for a device or a store.
bool is_brief(const TransferRequest& request) {
  const auto is_memory = [](const PreparedList& list) { return list.type == capi::MemoryType::dram; };
  return is_memory(*request.local) && is_memory(*request.remote) && request.selection->bytes() <= kBriefBytes &&
         request.selection->count() <= kBriefDescriptors && (!request.notification || request.notification->size() <= kBriefBytes);
}

}  // namespace

class AgentThread::Visit {
 public:
  // Takes the turn only if no command waits, so that the agent's commands keep their order, and if
  // NIXL's calls are known to be short. The first call of its kind is not: it takes up to 10 ms,
  // for code that is not in memory yet.
  Visit(AgentThread& thread, Call call) : thread_(thread), taken_(thread.turn_.try_take(Clock::now())) {
    if (!taken_) return;
    admitted_ = thread.warm(call) && thread.agent_ != nullptr && thread.agent_->has_brief_calls() && !thread.deadline_ && !thread.commands_.any() && !thread.commands_.stopping();
    if (admitted_) thread.events_.keep();
  }
  ~Visit() {
    if (!taken_) return;
    for (Event& event : thread_.events_.take_kept()) thread_.events_.send(std::move(event));
    thread_.turn_.give_back(Clock::now());
  }
  Visit(const Visit&) = delete;
  Visit& operator=(const Visit&) = delete;

  // Whether NIXL may be called.
  explicit operator bool() const { return admitted_; }

 private:
  AgentThread& thread_;
  const bool taken_;
  bool admitted_ = false;
};

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

// There is something to look after: the agent's thread shall not sleep for long. It leaves the turn
// to the JavaScript thread for the time `after`.
void AgentThread::rouse(microseconds after) {
  const auto now = Clock::now();
  backoff_.worked(now);
  if (after > after.zero() || sleeps_until_ - now > kLooksSoon) commands_.wake(after);
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
      pending_peers_[ticket].bytes = std::move(metadata);
      advance_pending_peers();
      rouse(kRestOfHandshake);
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

// Posts a small transfer and looks at it once. The agent's thread goes on with it if it takes
// longer.
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

}  // namespace kv::nixl
