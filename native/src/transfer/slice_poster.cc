#include "transfer/slice_poster.h"

#include "agent/nixl_agent.h"
#include "library/failure.h"
#include "library/handle.h"

namespace kv::nixl {

namespace {

// For transfers of at least this many bytes, the time and status of the first post show whether posting copies the bytes.
constexpr uint64_t kTellingBytes = 1 << 20;
// A post that takes longer than this copies, whatever status it returns.
constexpr auto kLongPost = std::chrono::milliseconds(50);

double milliseconds(std::chrono::steady_clock::duration duration) {
  return std::chrono::duration<double, std::milli>(duration).count();
}

// Options that make NIXL send the notification once the data of the request has landed.
Handle<capi::OptArgs> notification_options(const capi::Functions& nixl, const Bytes& payload) {
  auto options =
      Handle<capi::OptArgs>::make("KV_INTERNAL", "NIXL could not create options", nixl.destroy_opt_args, nixl.create_opt_args);
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
    : agent_(agent), request_(request), slicer_(request.selection, *request.local, *request.remote) {}

void SlicePoster::restart() {
  slicer_ = Slicer(request_.selection, *request_.local, *request_.remote);
  begun_ = false;
  merged_ = 0;
}

void SlicePoster::start_slicing() {
  // An object is replaced by each WRITE to it, so its bytes must be one request. A post to storage only starts the copy.
  const bool object = request_.remote->type == capi::MemoryType::object;
  slicer_.set_post_copies(!object && agent_.peers().post_copies(request_.peer()), agent_.post_threads());
  if (slicer_.can_use_indices() && agent_.requests().prepare_indices(*request_.local, *request_.remote)) slicer_.use_indices();
}

SlicePoster::Posted SlicePoster::post_next() {
  const capi::Functions& nixl = agent_.nixl();
  const auto began = Clock::now();
  const bool first = !begun_;
  if (first) start_slicing();
  Slice& slice = agent_.requests().scratch_slice();
  slicer_.next(slice);
  if (first) {
    // With ambiguous errors a post may be repeated, and the notification would be sent twice.
    sends_notification_ = request_.notification && !request_.abortable && slicer_.done() && agent_.safeguards().landing_probe() == nullptr;
  }
  Handle<capi::OptArgs> options;
  if (sends_notification_) options = notification_options(nixl, *request_.notification);
  capi::Status made = capi::kSuccess;
  const capi::Request request = agent_.requests().make(request_.operation, *request_.local, *request_.remote, slice, made);
  if (request == nullptr) throw Failure("KV_TRANSFER_FAILED", "NIXL refused to make a " + request_.describe() + ": " + describe(made));
  merged_ += slice.merged;
  begun_ = true;
  const auto start = Clock::now();
  preparing_ += start - (first_post_ ? began : request_.asked_at);
  if (!first_post_) {
    first_post_ = start;
    making_ = start - began;
  }
  const capi::Status posted = nixl.post_xfer_req(agent_.handle(), request, options.get());
  const auto took = Clock::now() - start;
  posting_ += took;
  if (first && posted >= capi::kSuccess && request_.selection.bytes() >= kTellingBytes) {
    agent_.peers().record_post(request_.peer(), posted == capi::kSuccess || took > kLongPost);
  }
  return {request, posted};
}

TransferOutcome SlicePoster::outcome() const {
  return {.length_bytes = static_cast<double>(request_.selection.bytes()),
          .descriptor_count = static_cast<double>(request_.selection.count()),
          .merged_count = static_cast<double>(merged_),
          .prepare_ms = milliseconds(preparing_),
          .make_ms = milliseconds(making_),
          .post_ms = milliseconds(posting_),
          .transfer_ms = milliseconds(Clock::now() - *first_post_)};
}

}  // namespace kv::nixl
