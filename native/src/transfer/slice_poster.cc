#include "transfer/slice_poster.h"

#include <algorithm>

#include "agent/nixl_agent.h"
#include "libfabric/bounded_calls.h"

namespace kv::nixl {

namespace {

// The first post of a transfer of this many bytes shows whether posts copy.
constexpr uint64_t kTellingBytes = 1 << 20;
// A longer post copies, whatever status it returns.
constexpr auto kLongPost = milliseconds(50);

double in_milliseconds(Clock::duration duration) {
  return std::chrono::duration<double, std::milli>(duration).count();
}

// NIXL sends the notification once the data has landed. Null sends none, not even a repeated post's
// last one.
OwnedOptions post_options(const Bytes* notification) {
  auto options = make<OwnedOptions>("KV_INTERNAL", "NIXL could not create options", capi::create_opt_args);
  if (notification == nullptr) return options;
  const Bytes& payload = *notification;
  // NIXL crashes on a null pointer, and sends nothing without `has_notif`.
  const void* data = payload.empty() ? static_cast<const void*>("") : payload.data();
  if (capi::opt_args_set_notif_msg(options.get(), data, payload.size()) != kSuccess ||
      capi::opt_args_set_has_notif(options.get(), true) != kSuccess) {
    throw Failure("KV_NOTIFICATION_FAILED", "NIXL refused a notification of " + to_string(payload.size()) + " bytes");
  }
  return options;
}

}  // namespace

SlicePoster::SlicePoster(NixlAgent& agent, const TransferRequest& request)
    : agent_(agent), request_(request), moves_(*request.moves), slicer_(moves_.selection, *moves_.local, *moves_.remote) {}

void SlicePoster::restart() {
  slicer_ = Slicer(moves_.selection, *moves_.local, *moves_.remote);
  begun_ = false;
  merged_ = 0;
  telemetry_.clear();
}

void SlicePoster::begin() {
  if (prepared() == nullptr) return agent_.start_slicing(slicer_, moves_);
  // An earlier post released its failed requests.
  if (!prepared()->complete()) prepared()->make(agent_);
  next_prepared_ = 0;
  merged_ = prepared()->merged();
}

// Throws KV_TRANSFER_FAILED.
Request SlicePoster::next_request() {
  if (prepared() != nullptr) return prepared()->take(next_prepared_++);
  Slice& slice = agent_.requests().scratch_slice();
  slicer_.next(slice);
  Status status = kSuccess;
  const Request request = agent_.requests().make(moves_, slice, status);
  if (request == nullptr) throw Failure("KV_TRANSFER_FAILED", "NIXL refused to make a " + moves_.describe() + ": " + describe(status));
  merged_ += slice.merged;
  return request;
}

SlicePoster::Posted SlicePoster::post_next() {
  const auto began = Clock::now();
  const bool first = !begun_;
  if (first) begin();
  const Request request = next_request();
  begun_ = true;
  if (first) {
    sends_notification_ = request_.notification && !request_.abortable && done() && !agent_.safeguards().may_repeat_posts();
  }
  OwnedOptions options;
  if (sends_notification_ || prepared() != nullptr) options = post_options(sends_notification_ ? &*request_.notification : nullptr);
  const auto start = Clock::now();
  preparing_ += start - (first_post_ ? began : request_.asked_at);
  if (!first_post_) {
    first_post_ = start;
    making_ = start - began;
  }
  const BoundedCalls bounded(agent_.safeguards().watch_of(moves_.peer()));
  const Status posted = capi::post_xfer_req(agent_.handle(), request, options.get());
  const auto took = Clock::now() - start;
  posting_ += took;
  if (first && posted >= kSuccess && moves_.selection.bytes() >= kTellingBytes) {
    agent_.peers().record_post(moves_.peer(), posted == kSuccess || took > kLongPost);
  }
  return {request, posted, bounded.gave_up()};
}

void SlicePoster::add_telemetry(Request request) {
  capi::XferTelemetry measured{};
  // The environment may tell the library to capture nothing.
  if (capi::get_xfer_telemetry(agent_.handle(), request, &measured) != kSuccess) return;
  const uint64_t until = measured.start_time_us + measured.xfer_duration_us;
  telemetry_from_ = telemetry_.empty() ? measured.start_time_us : std::min(telemetry_from_, measured.start_time_us);
  telemetry_until_ = std::max(telemetry_until_, until);
  telemetry_.resize(4);
  telemetry_[0] += static_cast<double>(measured.total_bytes);
  telemetry_[1] += static_cast<double>(measured.desc_count);
  telemetry_[2] += static_cast<double>(measured.post_duration_us);
  telemetry_[3] = static_cast<double>(telemetry_until_ - telemetry_from_);
}

vector<double> SlicePoster::outcome() const {
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

}  // namespace kv::nixl
