// One transfer: its ids cut into slices, each a NIXL request, so that a large copy leaves room between its parts for
// notifications and other transfers. Lives on the agent's thread.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "agent/nixl_agent.h"
#include "libfabric/ambiguous_failure.h"
#include "agent/event.h"
#include "memory/prepared_list.h"
#include "transfer/transfer_selection.h"
#include "transfer/slicer.h"

namespace kv::nixl {

struct TransferRequest {
  capi::Operation operation;
  std::shared_ptr<PreparedList> local;
  std::shared_ptr<PreparedList> remote;
  TransferSelection pairs;
  std::optional<Bytes> notification;
  // Its caller may give it up, so the notification must not be on its way before the outcome is certain.
  bool revocable;
  std::chrono::steady_clock::time_point asked;
};

// Who decided how a transfer ends: exactly one of its caller, by giving up, and the agent's thread.
enum class Verdict : int { open, given_up, decided };
using SharedVerdict = std::shared_ptr<std::atomic<Verdict>>;

class Transfer {
 public:
  using Send = std::function<void(Event)>;

  Transfer(uint64_t ticket, TransferRequest request, SharedVerdict verdict);

  // Looks after what was posted, then, if it may, posts one slice. True if anything moved.
  bool advance(NixlAgent& state, const Send& send, bool may_post);
  // Whether there is a slice to post.
  bool wants_to_post() const;
  // For the end of the agent: posts no more, and tells that it failed unless its outcome is decided.
  void fail(NixlAgent& state, const Send& send, Failure failure);
  // The same, with NIXL told to cancel what is under way.
  void cancel(NixlAgent& state, const Send& send, Failure failure);

  bool finished() const { return finished_; }
  bool in_flight() const { return !posted_.empty() || !spent_.empty() || doubt_.any(); }
  uint64_t ticket() const { return ticket_; }
  const TransferRequest& request() const { return *request_; }

 private:
  using Clock = std::chrono::steady_clock;

  void post_next(NixlAgent& state, const Send& send);
  void post_probe(NixlAgent& state, const Send& send);
  void check_posted(NixlAgent& state, const Send& send);
  // Where an error may be another's: sees to it that nothing is under way, then begins again.
  void settle(NixlAgent& state, const Send& send);
  // An error of a request that was posted.
  void refused(NixlAgent& state, const Send& send, capi::Request request, Failure failure);
  bool release_spent(NixlAgent& state);
  bool release(NixlAgent& state, capi::Request request);
  // Tells how it ended; true if that is a success, which says that it is released too.
  bool complete(NixlAgent& state, const Send& send);
  bool decide();
  Failure lost() const;
  std::string subject() const;

  uint64_t ticket_;
  // Not in this object, which moves: the slicer points into it.
  std::unique_ptr<const TransferRequest> request_;
  std::unique_ptr<Slicer> slicer_;
  uint64_t merged_ = 0;

  bool begun_ = false;
  bool probed_ = false;  // that a WRITE has landed
  bool rides_ = false;  // the notification goes with the one request
  std::vector<capi::Request> posted_;
  std::vector<capi::Request> spent_;  // ended, and not yet released
  AmbiguousFailure doubt_;
  SharedVerdict verdict_;
  bool over_ = false;                 // no more is posted, and nothing more to be told but `released`
  bool finished_ = false;
  std::optional<Clock::time_point> started_;
  Clock::duration posting_{};
  Clock::duration preparing_{};  // from the call to the first post, and the making of what came after it
  Clock::duration making_{};     // of the first request
};

}  // namespace kv::nixl
