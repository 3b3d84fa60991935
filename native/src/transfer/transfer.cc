#include "transfer/transfer.h"

#include <algorithm>
#include <string>
#include <utility>

namespace kv::nixl {

namespace {

// Slices under way at once where the post only starts the copy.
constexpr size_t kWindow = 32;
// From so many bytes on a post tells whether it copies: fewer may go at once either way.
constexpr uint64_t kTelling = 1 << 20;
// A post that takes longer copies, whatever it answers.
constexpr auto kLongPost = std::chrono::milliseconds(50);

double milliseconds(std::chrono::steady_clock::duration duration) {
  return std::chrono::duration<double, std::milli>(duration).count();
}

}  // namespace

Transfer::Transfer(uint64_t ticket, TransferRequest request, SharedVerdict verdict)
    : ticket_(ticket),
      request_(std::make_unique<const TransferRequest>(std::move(request))),
      slicer_(std::make_unique<Slicer>(request_->pairs, *request_->local, *request_->remote)),
      verdict_(std::move(verdict)) {
  ++request_->local->transfers;
  ++request_->remote->transfers;
}

bool Transfer::wants_to_post() const { return !over_ && !doubt_.any() && !slicer_->ended() && posted_.size() < kWindow; }

bool Transfer::advance(NixlAgent& state, const Send& send, bool may_post) {
  if (!over_ && state.peers().known_lost(*request_->remote->remote)) fail(state, send, lost());
  const size_t before = posted_.size() + spent_.size();
  check_posted(state, send);
  release_spent(state);
  bool moved = posted_.size() + spent_.size() != before;
  if (!over_ && verdict_->load() == Verdict::given_up) {
    over_ = true;
    state.count_failed();
  }
  if (doubt_.any() && posted_.empty()) settle(state, send);
  if (may_post && wants_to_post()) {
    post_next(state, send);
    moved = true;
  }
  if (!in_flight() && !probed_ && begun_ && request_->remote->probe != nullptr && request_->operation == capi::Operation::write &&
      (over_ || slicer_->ended())) {
    post_probe(state, send);
    moved = true;
  }
  if (in_flight() || !(over_ || slicer_->ended())) return moved;
  // Counted before it is told, so that whoever hears of it finds the counters right.
  state.count_released();
  const bool succeeded = !over_ && complete(state, send);
  if (!succeeded) send({.kind = Event::Kind::released, .ticket = ticket_, .failure = {}, .value = {}, .from = {}});
  finished_ = true;
  return true;
}

void Transfer::post_next(NixlAgent& state, const Send& send) {
  const auto& nixl = state.nixl();
  const auto taken = Clock::now();
  try {
    if (request_->remote->lost) {
      throw Failure("KV_TRANSFER_FAILED", subject() + " cannot go on: new metadata of that agent was refused, and NIXL dropped the old",
                    "add the peer and prepare its lists again");
    }
    if (state.peers().lost(*request_->remote->remote)) throw lost();
    RequestFactory& requests = state.requests();
    Slice& slice = requests.slice();
    const bool first = !begun_;
    // An object is replaced by each WRITE to it, so its bytes go in one; a post to a store only starts them.
    if (first) {
      const bool object = request_->remote->type == capi::MemoryType::object;
      slicer_->posts_copy(!object && state.peers().posts_copy(*request_->remote->remote));
    }
    if (first && slicer_->can_go_by_index() && requests.indexed(*request_->local, *request_->remote)) slicer_->go_by_index();
    slicer_->next(slice);
    capi::Status made = capi::kSuccess;
    const capi::Request request = requests.make(request_->operation, *request_->local, *request_->remote, slice, made);
    if (request == nullptr) throw Failure("KV_TRANSFER_FAILED", subject() + " was refused: " + describe(made));
    merged_ += slice.merged;
    // Where errors come to anybody, a rider that was refused may have gone.
    if (first) rides_ = request_->notification && !request_->revocable && slicer_->ended() && state.probes() == nullptr;
    begun_ = true;
    spent_.push_back(request);
    Handle<capi::OptArgs> options;
    if (rides_) {
      options = Handle<capi::OptArgs>::make("KV_INTERNAL", "no options", nixl.destroy_opt_args, nixl.create_opt_args);
      const Bytes& payload = *request_->notification;
      const void* data = payload.empty() ? static_cast<const void*>("") : payload.data();
      if (nixl.opt_args_set_notif_msg(options.get(), data, payload.size()) != capi::kSuccess ||
          nixl.opt_args_set_has_notif(options.get(), true) != capi::kSuccess) {
        throw Failure("KV_NOTIFICATION_FAILED", "NIXL refused a notification of " + std::to_string(payload.size()) + " bytes");
      }
    }
    const auto start = Clock::now();
    preparing_ += start - (started_ ? taken : request_->asked);
    if (!started_) {
      started_ = start;
      making_ = start - taken;
    }
    const capi::Status posted = nixl.post_xfer_req(state.agent(), request, options.get());
    const auto took = Clock::now() - start;
    posting_ += took;
    if (first && posted >= capi::kSuccess && request_->pairs.bytes() >= kTelling) {
      state.peers().posted(*request_->remote->remote, posted == capi::kSuccess || took > kLongPost);
    }
    if (posted == capi::kInProgress) {
      spent_.pop_back();
      posted_.push_back(request);
    } else if (posted != capi::kSuccess) {
      spent_.pop_back();
      refused(state, send, request,
              Failure("KV_TRANSFER_FAILED", subject() + " failed: " + describe(posted),
                      "the peer may have ended; NIXL's own log on stderr says more"));
    }
  } catch (const Failure& failure) {
    fail(state, send, failure);
  }
  // At once: NIXL makes the next request in the memory that this one gives back, which is a fifth faster.
  release_spent(state);
}

// Also of a transfer that was given up: until its bytes have landed, the peer may not give its memory to anybody else.
void Transfer::post_probe(NixlAgent& state, const Send& send) {
  probed_ = true;
  if (request_->remote->lost || state.peers().lost(*request_->remote->remote)) {
    fail(state, send, lost());
    return;
  }
  const capi::Request request = state.probes()->make(*request_->remote);
  const capi::Status posted =
      request == nullptr ? capi::kBackendError : state.nixl().post_xfer_req(state.agent(), request, nullptr);
  if (posted == capi::kInProgress) {
    posted_.push_back(request);
    return;
  }
  if (posted == capi::kSuccess) {
    doubt_.landed();
    spent_.push_back(request);
  } else {
    refused(state, send, request,
            Failure("KV_TRANSFER_FAILED", subject() + " was posted, and whether it landed is not known: " + describe(posted)));
  }
  release_spent(state);
}

void Transfer::refused(NixlAgent& state, const Send& send, capi::Request request, Failure failure) {
  if (doubt_.keep(state.peers(), *request_->remote->remote, request, failure)) return;
  if (request != nullptr) spent_.push_back(request);
  for (const capi::Request kept : doubt_.clear()) spent_.push_back(kept);
  fail(state, send, std::move(failure));
}

void Transfer::settle(NixlAgent& state, const Send& send) {
  using Step = AmbiguousFailure::Step;
  const Step step = doubt_.next(state.peers(), *request_->remote->remote, over_);
  if (step == Step::wait) return;
  if (step == Step::probe && !request_->remote->lost) {
    doubt_.probing();
    post_probe(state, send);
    return;
  }
  if (step != Step::again) fail(state, send, doubt_.failure());
  for (const capi::Request request : doubt_.clear()) spent_.push_back(request);
  release_spent(state);
  slicer_ = std::make_unique<Slicer>(request_->pairs, *request_->local, *request_->remote);
  begun_ = false;
  merged_ = 0;
  // What was given up has landed, or will not.
  probed_ = over_;
}

void Transfer::check_posted(NixlAgent& state, const Send& send) {
  for (size_t index = 0; index < posted_.size();) {
    const capi::Status status = state.nixl().get_xfer_status(state.agent(), posted_[index]);
    if (status == capi::kInProgress && !state.peers().quiet(*request_->remote->remote)) {
      ++index;
      continue;
    }
    const capi::Request request = posted_[index];
    posted_.erase(posted_.begin() + static_cast<std::ptrdiff_t>(index));
    if (status == capi::kSuccess) {
      doubt_.landed();
      spent_.push_back(request);
    } else {
      refused(state, send, request,
              Failure("KV_TRANSFER_FAILED", subject() + " failed on the way: " + describe(status),
                      "the peer may have ended; NIXL's own log on stderr says more"));
    }
  }
}

bool Transfer::release(NixlAgent& state, capi::Request request) {
  if (state.nixl().release_xfer_req(state.agent(), request) != capi::kSuccess) return false;
  state.nixl().destroy_xfer_req(request);
  return true;
}

bool Transfer::release_spent(NixlAgent& state) {
  // One that NIXL still holds is tried again at the next turn.
  std::erase_if(spent_, [&](capi::Request request) { return release(state, request); });
  return spent_.empty();
}

bool Transfer::decide() {
  Verdict expected = Verdict::open;
  over_ = true;
  return verdict_->compare_exchange_strong(expected, Verdict::decided);
}

bool Transfer::complete(NixlAgent& state, const Send& send) {
  // From here on its caller is too late to give up, and the notification may go.
  if (!decide()) {
    state.count_failed();
    return false;
  }
  Event event{.kind = Event::Kind::done, .ticket = ticket_, .failure = {}, .value = {}, .from = {}};
  state.peers().met(*request_->remote->remote);
  try {
    if (rides_) {
      state.count_rider();
    } else if (request_->notification) {
      state.peers().notify(*request_->remote->remote, *request_->notification);
    }
    state.count_done(request_->pairs.bytes());
    event.value = TransferOutcome{static_cast<double>(request_->pairs.bytes()), static_cast<double>(request_->pairs.count()),
                                  static_cast<double>(merged_),                 milliseconds(preparing_),
                                  milliseconds(making_),                        milliseconds(posting_),
                                  milliseconds(Clock::now() - *started_)};
  } catch (const Failure& failure) {
    state.count_failed();
    event.failure = failure;
  }
  const bool succeeded = !event.failure;
  send(std::move(event));
  return succeeded;
}

void Transfer::fail(NixlAgent& state, const Send& send, Failure failure) {
  if (over_) return;
  state.count_failed();
  if (!decide()) return;
  send({.kind = Event::Kind::done, .ticket = ticket_, .failure = std::move(failure), .value = {}, .from = {}});
}

void Transfer::cancel(NixlAgent& state, const Send& send, Failure failure) {
  fail(state, send, std::move(failure));
  for (const capi::Request request : std::exchange(posted_, {})) spent_.push_back(request);
  for (const capi::Request request : doubt_.clear()) spent_.push_back(request);
  release_spent(state);
}

Failure Transfer::lost() const {
  return Failure("KV_TRANSFER_FAILED", subject() + " failed: the peer's process is gone",
                 "if it was restarted, add it again with its new metadata");
}

std::string Transfer::subject() const {
  return std::string(request_->operation == capi::Operation::read ? "READ" : "WRITE") + " of " +
         std::to_string(request_->pairs.count()) + " descriptors (" + std::to_string(request_->pairs.bytes()) + " bytes) " +
         (request_->operation == capi::Operation::read ? "from" : "to") + " agent \"" + *request_->remote->remote + "\"";
}

}  // namespace kv::nixl
