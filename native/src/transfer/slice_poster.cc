#include "transfer/slice_poster.h"

#include <algorithm>

#include "agent/nixl_agent.h"
#include "libfabric/bounded_calls.h"
#include "library/failure.h"
#include "library/handle.h"

namespace kv::nixl {

namespace {

// For transfers of at least this many bytes, the time and status of the first post show whether
// posting copies the bytes.
constexpr uint64_t kTellingBytes = 1 << 20;
// A post that takes longer than this copies, whatever status it returns.
constexpr auto kLongPost = std::chrono::milliseconds(50);

double in_milliseconds(std::chrono::steady_clock::duration duration) {
  return std::chrono::duration<double, std::milli>(duration).count();
}

// Options that make NIXL send the notification once the data of the request has landed; without
// one, that send none. A request that is posted again sends its last notification otherwise.
Handle<capi::OptArgs> post_options(const capi::Functions& nixl, const Bytes* notification) {
  auto options =
      Handle<capi::OptArgs>::make("KV_INTERNAL", "NIXL could not create options", nixl.destroy_opt_args, nixl.create_opt_args);
  if (notification == nullptr) return options;
  const Bytes& payload = *notification;
  // NIXL crashes on a null pointer, and sends nothing without `has_notif`.
  const void* data = payload.empty() ? static_cast<const void*>("") : payload.data();
  if (nixl.opt_args_set_notif_msg(options.get(), data, payload.size()) != capi::kSuccess ||
      nixl.opt_args_set_has_notif(options.get(), true) != capi::kSuccess) {
    throw Failure("KV_NOTIFICATION_FAILED", "NIXL refused a notification of " + std::to_string(payload.size()) + " bytes");
  }
  return options;
}

}  // namespace

SlicePoster::SlicePoster(NixlAgent& agent, const TransferRequest& request)
    : agent_(agent), request_(request), slicer_(*request.selection, *request.local, *request.remote) {}

void SlicePoster::restart() {
  slicer_ = Slicer(*request_.selection, *request_.local, *request_.remote);
  begun_ = false;
  merged_ = 0;
  telemetry_.reset();
}

void SlicePoster::begin() {
  if (prepared() == nullptr) return agent_.start_slicing(slicer_, *request_.local, *request_.remote);
  // Requests that failed in an earlier post were released.
  if (!prepared()->complete()) prepared()->make(agent_);
  next_prepared_ = 0;
  merged_ = prepared()->merged();
}

// The request of the next slice. Throws KV_TRANSFER_FAILED.
capi::Request SlicePoster::next_request() {
  if (prepared() != nullptr) return prepared()->take(next_prepared_++);
  Slice& slice = agent_.requests().scratch_slice();
  slicer_.next(slice);
  capi::Status status = capi::kSuccess;
  const capi::Request request = agent_.requests().make(request_.operation, *request_.local, *request_.remote, slice, status);
  if (request == nullptr) throw Failure("KV_TRANSFER_FAILED", "NIXL refused to make a " + request_.describe() + ": " + describe(status));
  merged_ += slice.merged;
  return request;
}

SlicePoster::Posted SlicePoster::post_next() {
  const capi::Functions& nixl = agent_.nixl();
  const auto began = Clock::now();
  const bool first = !begun_;
  if (first) begin();
  const capi::Request request = next_request();
  begun_ = true;
  if (first) {
    sends_notification_ = request_.notification && !request_.abortable && done() && !agent_.safeguards().may_repeat_posts();
  }
  Handle<capi::OptArgs> options;
  if (sends_notification_ || prepared() != nullptr) options = post_options(nixl, sends_notification_ ? &*request_.notification : nullptr);
  const auto start = Clock::now();
  preparing_ += start - (first_post_ ? began : request_.asked_at);
  if (!first_post_) {
    first_post_ = start;
    making_ = start - began;
  }
  const BoundedCalls bounded(agent_.safeguards().watch_of(request_.peer()));
  const capi::Status posted = nixl.post_xfer_req(agent_.handle(), request, options.get());
  const auto took = Clock::now() - start;
  posting_ += took;
  if (first && posted >= capi::kSuccess && request_.selection->bytes() >= kTellingBytes) {
    agent_.peers().record_post(request_.peer(), posted == capi::kSuccess || took > kLongPost);
  }
  return {request, posted, bounded.gave_up()};
}

void SlicePoster::add_telemetry(capi::Request request) {
  capi::XferTelemetry measured{};
  // A library that was told by its environment to capture nothing has none.
  if (agent_.nixl().get_xfer_telemetry(agent_.handle(), request, &measured) != capi::kSuccess) return;
  const uint64_t until = measured.start_time_us + measured.xfer_duration_us;
  telemetry_from_ = telemetry_ ? std::min(telemetry_from_, measured.start_time_us) : measured.start_time_us;
  telemetry_until_ = std::max(telemetry_until_, until);
  if (!telemetry_) telemetry_.emplace();
  telemetry_->length_bytes += static_cast<double>(measured.total_bytes);
  telemetry_->descriptor_count += static_cast<double>(measured.desc_count);
  telemetry_->post_us += static_cast<double>(measured.post_duration_us);
  telemetry_->transfer_us = static_cast<double>(telemetry_until_ - telemetry_from_);
}

TransferOutcome SlicePoster::outcome() const {
  return {.length_bytes = static_cast<double>(request_.selection->bytes()),
          .descriptor_count = static_cast<double>(request_.selection->count()),
          .merged_count = static_cast<double>(merged_),
          .prepare_ms = in_milliseconds(preparing_),
          .make_ms = in_milliseconds(making_),
          .post_ms = in_milliseconds(posting_),
          .transfer_ms = in_milliseconds(Clock::now() - *first_post_),
          .telemetry = telemetry_};
}

}  // namespace kv::nixl
