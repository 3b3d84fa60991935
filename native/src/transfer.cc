#include "transfer.h"

#include <algorithm>
#include <string>
#include <utility>

namespace kv::nixl {

namespace {

// A slice is what NIXL copies in one post where the post is the copy: 2 to 3 ms by these bounds. Neighbours on both sides
// are one copy to NIXL, and a copy takes 2 us however short it is: as long as 8 KiB more.
constexpr uint64_t kSliceBytes = kPieceBytes;
constexpr uint64_t kRunBytes = 8192;
constexpr size_t kSliceDescriptors = 4096;
// Slices under way at once where the post only starts the copy.
constexpr size_t kWindow = 32;

// So long after a peer's end NIXL is told to let go of what it still has under way. What the peer had sent before is in this
// host's own buffers, or lost, long before.
constexpr auto kQuarantine = std::chrono::seconds(5);

double milliseconds(std::chrono::steady_clock::duration duration) {
  return std::chrono::duration<double, std::milli>(duration).count();
}

}  // namespace

Transfer::Transfer(uint64_t ticket, TransferRequest request, SharedVerdict verdict)
    : ticket_(ticket),
      request_(std::move(request)),
      descriptor_count_(static_cast<uint32_t>(request_.local_ids.size())),
      verdict_(std::move(verdict)) {
  const Shape& local = request_.local->shape;
  const Shape& remote = request_.remote->shape;
  const bool pieces = local.has_pieces() || remote.has_pieces();
  if (!pieces && local.uniform_length() != 0) {
    uniform_ = local.uniform_length();
  } else if (!pieces) {
    lengths_.reserve(descriptor_count_);
    for (const int32_t id : request_.local_ids) lengths_.push_back(local.length(static_cast<uint32_t>(id)));
  } else {
    // Lengths of a pair are equal, so both sides were cut at the same places.
    std::vector<int32_t> local_pieces;
    std::vector<int32_t> remote_pieces;
    for (size_t index = 0; index < descriptor_count_; ++index) {
      const auto local_id = static_cast<uint32_t>(request_.local_ids[index]);
      const auto remote_id = static_cast<uint32_t>(request_.remote_ids[index]);
      const int32_t first_local = local.has_pieces() ? local.first_piece(local_id) : request_.local_ids[index];
      const int32_t first_remote = remote.has_pieces() ? remote.first_piece(remote_id) : request_.remote_ids[index];
      const uint64_t length = local.length(local_id);
      const auto count = static_cast<int32_t>(pieces_of(length));
      for (int32_t piece = 0; piece < count; ++piece) {
        local_pieces.push_back(first_local + piece);
        remote_pieces.push_back(first_remote + piece);
        lengths_.push_back(std::min(kPieceBytes, length - static_cast<uint64_t>(piece) * kPieceBytes));
      }
    }
    request_.local_ids = std::move(local_pieces);
    request_.remote_ids = std::move(remote_pieces);
  }
  ++request_.local->transfers;
  ++request_.remote->transfers;
  uint64_t bytes = 0;
  rides_ = request_.notification && !request_.revocable && slice_end(bytes) == request_.local_ids.size();
}

uint64_t Transfer::piece_bytes(size_t piece) const { return lengths_.empty() ? uniform_ : lengths_[piece]; }

size_t Transfer::slice_end(uint64_t& bytes) const {
  const auto& local = request_.local_ids;
  const auto& remote = request_.remote_ids;
  const size_t limit = std::min(local.size(), next_ + kSliceDescriptors);
  bytes = piece_bytes(next_);
  uint64_t cost = bytes;
  size_t end = next_ + 1;
  for (; end < limit; ++end) {
    const bool adjacent = local[end] == local[end - 1] + 1 && remote[end] == remote[end - 1] + 1;
    const uint64_t more = piece_bytes(end);
    cost += more + (adjacent ? 0 : kRunBytes);
    if (cost > kSliceBytes) break;
    bytes += more;
  }
  return end;
}

bool Transfer::advance(AgentState& state, const Send& send) {
  if (!over_ && state.known_lost(*request_.remote->remote)) fail(state, send, lost());
  const size_t before = posted_.size() + spent_.size();
  check_posted(state, send);
  release_spent(state);
  bool moved = posted_.size() + spent_.size() != before;
  if (!over_ && verdict_->load() == Verdict::given_up) {
    over_ = true;
    state.count_failed();
  }
  if (!over_ && next_ < request_.local_ids.size() && posted_.size() < kWindow) {
    post_next(state, send);
    moved = true;
  }
  if (!in_flight() && !probed_ && next_ > 0 && state.probes_writes() && request_.operation == capi::Operation::write &&
      (over_ || next_ == request_.local_ids.size())) {
    post_probe(state, send);
    moved = true;
  }
  if (in_flight() || !(over_ || next_ == request_.local_ids.size())) return moved;
  // Counted before it is told, so that whoever hears of it finds the counters right.
  state.count_released();
  if (!over_) complete(state, send);
  send({.kind = Event::Kind::released, .ticket = ticket_, .failure = {}, .value = {}, .from = {}});
  finished_ = true;
  return true;
}

void Transfer::post_next(AgentState& state, const Send& send) {
  const auto& nixl = state.nixl();
  uint64_t bytes = 0;
  const size_t end = slice_end(bytes);
  const size_t count = end - next_;
  try {
    if (request_.remote->lost) {
      throw Failure("KV_TRANSFER_FAILED", subject() + " cannot go on: new metadata of that agent was refused, and NIXL dropped the old",
                    "add the peer and prepare its lists again");
    }
    if (state.lost(*request_.remote->remote)) throw lost();
    capi::Request request = nullptr;
    const capi::Status made = nixl.make_xfer_req(state.agent(), request_.operation, request_.local->handle,
                                                 request_.local_ids.data() + next_, count, request_.remote->handle,
                                                 request_.remote_ids.data() + next_, count, &request, nullptr);
    if (made != capi::kSuccess || request == nullptr) {
      throw Failure("KV_TRANSFER_FAILED", subject() + " was refused: " + describe(made));
    }
    spent_.push_back(request);
    Handle<capi::OptArgs> options;
    if (rides_) {
      options = Handle<capi::OptArgs>::make("KV_INTERNAL", "no options", nixl.destroy_opt_args, nixl.create_opt_args);
      const Bytes& payload = *request_.notification;
      const void* data = payload.empty() ? static_cast<const void*>("") : payload.data();
      if (nixl.opt_args_set_notif_msg(options.get(), data, payload.size()) != capi::kSuccess ||
          nixl.opt_args_set_has_notif(options.get(), true) != capi::kSuccess) {
        throw Failure("KV_NOTIFICATION_FAILED", "NIXL refused a notification of " + std::to_string(payload.size()) + " bytes");
      }
    }
    const auto start = Clock::now();
    preparing_ = start - request_.asked - posting_;
    if (!started_) started_ = start;
    const capi::Status posted = nixl.post_xfer_req(state.agent(), request, options.get());
    posting_ += Clock::now() - start;
    if (posted == capi::kInProgress) {
      spent_.pop_back();
      posted_.push_back({request, bytes});
    } else if (posted != capi::kSuccess) {
      throw Failure("KV_TRANSFER_FAILED", subject() + " failed: " + describe(posted),
                    "the peer may have ended; NIXL's own log on stderr says more");
    }
    next_ = end;
  } catch (const Failure& failure) {
    fail(state, send, failure);
  }
  // At once: NIXL makes the next request in the memory that this one gives back, which is a fifth faster.
  release_spent(state);
}

// Also of a transfer that was given up: until its bytes have landed, the peer may not give its memory to anybody else.
void Transfer::post_probe(AgentState& state, const Send& send) {
  probed_ = true;
  if (request_.remote->lost || state.lost(*request_.remote->remote)) {
    fail(state, send, lost());
    return;
  }
  const capi::Request request = state.make_probe(*request_.remote);
  const capi::Status posted =
      request == nullptr ? capi::kBackendError : state.nixl().post_xfer_req(state.agent(), request, nullptr);
  if (posted == capi::kInProgress) {
    posted_.push_back({request, 0});
    return;
  }
  if (request != nullptr) spent_.push_back(request);
  if (posted != capi::kSuccess) {
    fail(state, send, Failure("KV_TRANSFER_FAILED", subject() + " was posted, and whether it landed is not known: " + describe(posted)));
  }
  release_spent(state);
}

void Transfer::check_posted(AgentState& state, const Send& send) {
  for (size_t index = 0; index < posted_.size();) {
    const capi::Status status = state.nixl().get_xfer_status(state.agent(), posted_[index].request);
    if (status == capi::kInProgress && state.lost_for(*request_.remote->remote) < kQuarantine) {
      ++index;
      continue;
    }
    spent_.push_back(posted_[index].request);
    posted_.erase(posted_.begin() + static_cast<std::ptrdiff_t>(index));
    if (status != capi::kSuccess) {
      fail(state, send, Failure("KV_TRANSFER_FAILED", subject() + " failed on the way: " + describe(status),
                                "the peer may have ended; NIXL's own log on stderr says more"));
    }
  }
}

bool Transfer::release(AgentState& state, capi::Request request) {
  if (state.nixl().release_xfer_req(state.agent(), request) != capi::kSuccess) return false;
  state.nixl().destroy_xfer_req(request);
  return true;
}

bool Transfer::release_spent(AgentState& state) {
  // One that NIXL still holds is tried again at the next turn.
  std::erase_if(spent_, [&](capi::Request request) { return release(state, request); });
  return spent_.empty();
}

bool Transfer::decide() {
  Verdict expected = Verdict::open;
  over_ = true;
  return verdict_->compare_exchange_strong(expected, Verdict::decided);
}

void Transfer::complete(AgentState& state, const Send& send) {
  // From here on its caller is too late to give up, and the notification may go.
  if (!decide()) {
    state.count_failed();
    return;
  }
  Event event{.kind = Event::Kind::done, .ticket = ticket_, .failure = {}, .value = {}, .from = {}};
  try {
    if (rides_) {
      state.count_rider();
    } else if (request_.notification) {
      state.notify(*request_.remote->remote, *request_.notification);
    }
    state.count_done(request_.length_bytes);
    event.value = TransferOutcome{static_cast<double>(request_.length_bytes), static_cast<double>(descriptor_count_),
                                  milliseconds(preparing_), milliseconds(posting_), milliseconds(Clock::now() - *started_)};
  } catch (const Failure& failure) {
    state.count_failed();
    event.failure = failure;
  }
  send(std::move(event));
}

void Transfer::fail(AgentState& state, const Send& send, Failure failure) {
  if (over_) return;
  state.count_failed();
  if (!decide()) return;
  send({.kind = Event::Kind::done, .ticket = ticket_, .failure = std::move(failure), .value = {}, .from = {}});
}

void Transfer::cancel(AgentState& state, const Send& send, Failure failure) {
  fail(state, send, std::move(failure));
  for (const Slice& slice : std::exchange(posted_, {})) spent_.push_back(slice.request);
  release_spent(state);
}

Failure Transfer::lost() const {
  return Failure("KV_TRANSFER_FAILED", subject() + " failed: the peer's process is gone",
                 "if it was restarted, add it again with its new metadata");
}

std::string Transfer::subject() const {
  return std::string(request_.operation == capi::Operation::read ? "READ" : "WRITE") + " of " +
         std::to_string(descriptor_count_) + " descriptors (" + std::to_string(request_.length_bytes) + " bytes) " +
         (request_.operation == capi::Operation::read ? "from" : "to") + " agent \"" + *request_.remote->remote + "\"";
}

}  // namespace kv::nixl
