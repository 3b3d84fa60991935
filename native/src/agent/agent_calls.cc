
#include "agent/agent_thread.h"
#include "library/environment.h"

namespace kv::nixl {

namespace {

// Limits of what the JavaScript thread does itself: posting 64 KiB of resident memory takes about
// 20 us.
constexpr size_t kBriefBytes = 65'536;
constexpr uint64_t kBriefDescriptors = 16;
constexpr size_t kBriefRows = 64;
// 100 years stand for an endless wait.
constexpr auto kLongestClose = hours(24 * 365 * 100);
// Bytes of metadata with a few registrations.
constexpr size_t kBriefMetadata = 8192;
// The agent's thread is woken from a sleep longer than this when there is work.
constexpr auto kLooksSoon = microseconds(50);
// How long the agent's thread leaves the turn free after a new peer. Otherwise the peer's lists
// would wait while it polls.
constexpr auto kRestOfHandshake = microseconds(200);

// Whether a post takes microseconds. Other kinds of memory may wait for a device or a store.
bool is_brief(const TransferRequest& request) {
  const auto& [operation, local, remote, selection] = *request.moves;
  return local->type == MemoryType::dram && remote->type == MemoryType::dram && selection.bytes() <= kBriefBytes &&
         selection.count() <= kBriefDescriptors && (!request.notification || request.notification->size() <= kBriefBytes);
}

}  // namespace

class AgentThread::Visit {
 public:
  // Takes the turn only if no command waits, so that commands keep their order, and if calls are
  // known to be short. The first of a kind takes up to 10 ms to load its code.
  Visit(AgentThread& thread, Call call) : thread_(thread), taken_(thread.turn_.try_take(Clock::now())) {
    if (!taken_) return;
    admitted_ = thread.warm(call) && thread.agent_ != nullptr && thread.agent_->has_brief_calls() && !thread.deadline_ && !thread.commands_.any() && !thread.commands_.stopping();
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

void AgentThread::run(uint64_t ticket, Work work) {
  commands_.push([this, ticket, work = std::move(work)] { events_.send(attempt(ticket, work)); });
}

// Runs `work` at once if it is brief and the turn is free.
optional<Event> AgentThread::run_here(uint64_t ticket, Call call, bool brief, Work work) {
  if (brief) {
    if (const Visit visit(*this, call); visit) return attempt(ticket, work);
  }
  commands_.push([this, ticket, call, work = std::move(work)] {
    events_.send(attempt(ticket, work));
    warm(call) = true;
  });
  return nullopt;
}

// Prevents a long sleep of the agent's thread. For `after`, the turn stays with the JavaScript
// thread.
void AgentThread::rouse(microseconds after) {
  const auto now = Clock::now();
  backoff_.worked(now);
  if (after > after.zero() || sleeps_until_ - now > kLooksSoon) commands_.wake(after);
}

void AgentThread::register_memory(uint64_t ticket, MemoryToRegister memory) {
  // Moved on, since the command may outlive its answer.
  commands_.push([this, ticket, memory = std::move(memory)]() mutable {
    const auto touched = make_shared<atomic<bool>>(memory.pin == nullptr);
    const auto allocated = memory.pin == nullptr ? nullptr : memory.pin->memory;
    pending_registrations_.emplace(ticket, PendingRegistration{std::move(memory), touched});
    // The callback must not allocate: nobody would hear of a failure.
    if (allocated != nullptr) {
      allocated->when_touched([self = shared_from_this(), touched] {
        *touched = true;
        self->commands_.wake();
      });
    }
    advance_registrations();
  });
}

void AgentThread::deregister(uint64_t ticket, uint64_t registration) {
  const Work remove = [registration](NixlAgent& agent) {
    agent.registrations().remove(registration);
    return EventValue();
  };
  commands_.push([this, ticket, remove] { events_.send(attempt(ticket, remove)); }, true);
}

void AgentThread::add_backends(uint64_t ticket, BackendSelection selection) {
  run(ticket, [selection = std::move(selection)](NixlAgent& agent) {
    const auto reading = reading_environment();
    agent.add_backends(selection);
    return EventValue();
  });
}

void AgentThread::local_metadata(uint64_t ticket, optional<vector<uint64_t>> registrations, bool connections) {
  run(ticket, [registrations = std::move(registrations), connections](NixlAgent& agent) {
    return registrations ? agent.partial_metadata(*registrations, connections) : agent.metadata();
  });
}

optional<Event> AgentThread::add_remote(uint64_t ticket, Metadata metadata) {
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

void AgentThread::remove_remote(uint64_t ticket, PeerName name) {
  run(ticket, [name = std::move(name.text)](NixlAgent& agent) {
    agent.peers().remove(name);
    return EventValue();
  });
}

optional<Event> AgentThread::notify(uint64_t ticket, PeerName remote, Payload payload) {
  const bool brief = payload.bytes.size() <= kBriefBytes;
  return run_here(ticket, Call::notify, brief, [this, remote = std::move(remote.text), payload = std::move(payload.bytes)](NixlAgent& agent) {
    agent.peers().notify(remote, payload);
    // NIXL may still be connecting to the peer, and the peer may answer.
    rouse();
    return EventValue();
  });
}

optional<Event> AgentThread::prepare_list(uint64_t ticket, optional<PeerName> remote, MemoryType type, std::span<const double> rows, bool keeps) {
  const bool brief = type == MemoryType::dram && rows.size() <= kBriefRows * kRowNumbers;
  DescriptorTable table = (keeps ? DescriptorTable::view_of : DescriptorTable::copy_of)(rows.data(), rows.size());
  return run_here(ticket, Call::prepare, brief, [this, ticket, remote = std::move(remote), type, table = std::move(table)](NixlAgent& agent) {
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

// Later calls do not find the entry. Its release waits for its users.
template <typename T>
void AgentThread::close_later(Table<T>& table, uint64_t ticket, uint64_t id) {
  commands_.push([this, ticket, entry = table.take(id)] {
    if (entry != nullptr && agent_ != nullptr) {
      if (entry->users > 0) {
        entry->close_ticket = ticket;
        return;
      }
      release(entry);
    }
    events_.send(Event::settled(ticket));
  }, true);
}

template void AgentThread::close_later(Table<PreparedList>&, uint64_t, uint64_t);
template void AgentThread::close_later(Table<PreparedTransfer>&, uint64_t, uint64_t);

void AgentThread::prepare_transfer(uint64_t ticket, shared_ptr<const Moves> moves) {
  run(ticket, [this, ticket, transfer = make_shared<PreparedTransfer>(std::move(moves))](NixlAgent& agent) {
    const Moves& moved = *transfer->moves;
    if (moved.remote->dropped) throw Failure("KV_TRANSFER_FAILED", "the peer of the transfer was dropped", "prepare its lists again");
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

void AgentThread::transfer_backend(uint64_t ticket, uint64_t id) {
  run(ticket, [transfer = prepared_transfers_.find(id)](NixlAgent& agent) {
    if (transfer == nullptr) throw Failure("KV_LIST_CLOSED", "the prepared transfer is closed");
    return transfer->backend(agent);
  });
}

optional<Event> AgentThread::transfer(shared_ptr<TransferRequest> request) {
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

bool AgentThread::abort(uint64_t transfer) {
  const auto request = requests_.find(transfer);
  if (request == nullptr || !request->outcome.try_abort()) return false;
  commands_.push([this, transfer] { transfers_.attend(transfer); }, true);
  return true;
}

void AgentThread::close(uint64_t ticket, uint64_t timeout_ms) {
  commands_.push([this, ticket, timeout_ms] {
    if (agent_ == nullptr) {
      events_.send(Event::settled(ticket));
      return;
    }
    close_ticket_ = ticket;
    deadline_ = Clock::now() + std::min<milliseconds>(kLongestClose, milliseconds(timeout_ms));
  }, true);
}

}  // namespace kv::nixl
