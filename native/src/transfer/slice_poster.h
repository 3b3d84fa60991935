#pragma once

#include <algorithm>

#include "agent/nixl_agent.h"
#include "libfabric/bounded_calls.h"
#include "transfer/slicer.h"
#include "transfer/transfer_request.h"

namespace kv::nixl {

// Posts a transfer slice by slice, one NIXL request each, and takes the time. Lives on the agent's
// thread.
class SlicePoster {
 public:
  // Both arguments must outlive it.
  SlicePoster(NixlAgent& agent, const TransferRequest& request)
      : agent_(agent),
        request_(request),
        moves_(*request.moves),
        slicer_(moves_.selection, *moves_.local, *moves_.remote) {}

  bool done() const {
    return prepared() == nullptr ? slicer_.done() : begun_ && next_prepared_ == prepared()->count();
  }
  // Whether a request was made since the last `restart`.
  bool begun() const { return begun_; }
  // NIXL sends the notification with the only request. Otherwise it must be sent after all slices.
  bool sends_notification() const { return sends_notification_; }

  // The caller owns the request.
  struct Posted {
    Request request;
    Status status;
    // The live peer did not let a connection be made.
    bool unanswered;
  };
  // Throws KV_TRANSFER_FAILED or KV_NOTIFICATION_FAILED when NIXL refuses to make the request; none
  // is left then.
  Posted post_next() {
    const auto began = Clock::now();
    const bool first = !begun_;
    if (first) begin();
    const Request request = next_request();
    begun_ = true;
    if (first) {
      sends_notification_ = request_.notification && !request_.abortable && done() &&
                            !agent_.safeguards.may_repeat_posts();
    }
    OwnedOptions options;
    if (sends_notification_ || prepared() != nullptr)
      options = post_options(sends_notification_ ? &*request_.notification : nullptr);
    const auto start = Clock::now();
    preparing_ += start - (first_post_ ? began : request_.asked_at);
    if (!first_post_) {
      first_post_ = start;
      making_ = start - began;
    }
    const BoundedCalls bounded(agent_.safeguards.watch_of(moves_.peer()));
    const Status posted = capi::post_xfer_req(agent_.handle(), request, options.get());
    const auto took = Clock::now() - start;
    posting_ += took;
    if (first && posted >= kSuccess && moves_.selection.bytes() >= kTellingBytes) {
      agent_.peers.record_post(moves_.peer(), posted == kSuccess || took > kLongPost);
    }
    return {request, posted, bounded.gave_up()};
  }
  void restart() {
    slicer_ = Slicer(moves_.selection, *moves_.local, *moves_.remote);
    begun_ = false;
    merged_ = 0;
    telemetry_.clear();
  }

  // Adds NIXL's measurements of a request that has succeeded.
  void add_telemetry(Request request) {
    capi::XferTelemetry measured{};
    // The environment may tell the library to capture nothing.
    if (capi::get_xfer_telemetry(agent_.handle(), request, &measured) != kSuccess) return;
    const uint64_t until = measured.start_time_us + measured.xfer_duration_us;
    telemetry_from_ = telemetry_.empty() ? measured.start_time_us
                                         : std::min(telemetry_from_, measured.start_time_us);
    telemetry_until_ = std::max(telemetry_until_, until);
    telemetry_.resize(4);
    telemetry_[0] += static_cast<double>(measured.total_bytes);
    telemetry_[1] += static_cast<double>(measured.desc_count);
    telemetry_[2] += static_cast<double>(measured.post_duration_us);
    telemetry_[3] = static_cast<double>(telemetry_until_ - telemetry_from_);
  }
  // The numbers of NativeOutcome for a transfer that has just succeeded.
  vector<double> outcome() const {
    const TransferSelection& selection = moves_.selection;
    vector<double> numbers{static_cast<double>(selection.bytes()),
                           static_cast<double>(selection.count()),
                           static_cast<double>(merged_),
                           in_milliseconds(preparing_),
                           in_milliseconds(making_),
                           in_milliseconds(posting_),
                           in_milliseconds(Clock::now() - *first_post_)};
    numbers.insert(numbers.end(), telemetry_.begin(), telemetry_.end());
    return numbers;
  }

 private:
  // The first post of a transfer of this many bytes shows whether posts copy.
  static constexpr uint64_t kTellingBytes = 1 << 20;
  // A longer post copies, whatever status it returns.
  static constexpr auto kLongPost = milliseconds(50);

  static double in_milliseconds(Clock::duration duration) {
    return std::chrono::duration<double, std::milli>(duration).count();
  }

  // NIXL sends the notification once the data has landed. Null sends none, not even a repeated
  // post's last one.
  static OwnedOptions post_options(const Bytes* notification) {
    auto options =
        make<OwnedOptions>("KV_INTERNAL", "NIXL could not create options", capi::create_opt_args);
    if (notification == nullptr) return options;
    const Bytes& payload = *notification;
    // NIXL crashes on a null pointer, and sends nothing without `has_notif`.
    const void* data = payload.empty() ? static_cast<const void*>("") : payload.data();
    if (capi::opt_args_set_notif_msg(options.get(), data, payload.size()) != kSuccess ||
        capi::opt_args_set_has_notif(options.get(), true) != kSuccess) {
      throw Failure("KV_NOTIFICATION_FAILED",
                    "NIXL refused a notification of " + to_string(payload.size()) + " bytes");
    }
    return options;
  }

  PreparedTransfer* prepared() const { return request_.prepared.get(); }
  void begin() {
    if (prepared() == nullptr) return agent_.start_slicing(slicer_, moves_);
    // An earlier post released its failed requests.
    if (!prepared()->complete()) prepared()->make(agent_);
    next_prepared_ = 0;
    merged_ = prepared()->merged();
  }
  // Throws KV_TRANSFER_FAILED.
  Request next_request() {
    if (prepared() != nullptr) return prepared()->take(next_prepared_++);
    Slice& slice = agent_.requests.scratch_slice();
    slicer_.next(slice);
    Status status = kSuccess;
    const Request request = agent_.requests.make(moves_, slice, status);
    if (request == nullptr)
      throw Failure("KV_TRANSFER_FAILED",
                    "NIXL refused to make a " + moves_.describe() + ": " + describe(status));
    merged_ += slice.merged;
    return request;
  }

  NixlAgent& agent_;
  const TransferRequest& request_;
  const Moves& moves_;
  Slicer slicer_;
  bool begun_ = false;
  bool sends_notification_ = false;
  uint64_t merged_ = 0;
  size_t next_prepared_ = 0;

  optional<Clock::time_point> first_post_;
  // From the call to the first post, plus the making of later requests.
  Clock::duration preparing_{};
  // For the first request.
  Clock::duration making_{};
  // Inside NIXL's post.
  Clock::duration posting_{};
  // The last numbers of NativeOutcome, or empty.
  vector<double> telemetry_;
  // From the first request's beginning to the last one's end, in microseconds.
  uint64_t telemetry_from_ = 0;
  uint64_t telemetry_until_ = 0;
};

}  // namespace kv::nixl
