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

#include "agent_state.h"
#include "event.h"
#include "list.h"

namespace kv::nixl {

struct TransferRequest {
  capi::Operation operation;
  std::shared_ptr<List> local;
  std::shared_ptr<List> remote;
  std::vector<int32_t> local_ids;
  std::vector<int32_t> remote_ids;
  uint64_t length_bytes;
  std::optional<Bytes> notification;
  // Its caller may give it up, so the notification must not be on its way before the outcome is certain.
  bool revocable;
  std::chrono::steady_clock::time_point asked = std::chrono::steady_clock::now();
};

// Who decided how a transfer ends: exactly one of its caller, by giving up, and the agent's thread.
enum class Verdict : int { open, given_up, decided };
using SharedVerdict = std::shared_ptr<std::atomic<Verdict>>;

class Transfer {
 public:
  using Send = std::function<void(Event)>;

  Transfer(uint64_t ticket, TransferRequest request, SharedVerdict verdict);

  // Looks after what was posted, then posts at most one slice. True if anything moved.
  bool advance(AgentState& state, const Send& send);
  // For the end of the agent: posts no more, and tells that it failed unless its outcome is decided.
  void fail(AgentState& state, const Send& send, Failure failure);
  // The same, with NIXL told to cancel what is under way.
  void cancel(AgentState& state, const Send& send, Failure failure);

  bool finished() const { return finished_; }
  bool in_flight() const { return !posted_.empty() || !spent_.empty(); }
  uint64_t ticket() const { return ticket_; }
  const TransferRequest& request() const { return request_; }

 private:
  using Clock = std::chrono::steady_clock;

  struct Slice {
    capi::Request request;
    uint64_t bytes;
  };

  uint64_t piece_bytes(size_t piece) const;
  // One past the last piece of the slice that begins at next_, and its bytes.
  size_t slice_end(uint64_t& bytes) const;
  void post_next(AgentState& state, const Send& send);
  void post_probe(AgentState& state, const Send& send);
  void check_posted(AgentState& state, const Send& send);
  bool release_spent(AgentState& state);
  bool release(AgentState& state, capi::Request request);
  void complete(AgentState& state, const Send& send);
  bool decide();
  Failure lost() const;
  std::string subject() const;

  uint64_t ticket_;
  TransferRequest request_;
  uint32_t descriptor_count_;
  std::vector<uint64_t> lengths_;  // of pieces; empty when all have uniform_ bytes
  uint64_t uniform_ = 0;

  size_t next_ = 0;
  bool probed_ = false;  // that a WRITE has landed
  bool rides_ = false;  // the notification goes with the one request
  std::vector<Slice> posted_;
  std::vector<capi::Request> spent_;  // ended, and not yet released
  SharedVerdict verdict_;
  bool over_ = false;                 // no more is posted, and nothing more to be told but `released`
  bool finished_ = false;
  std::optional<Clock::time_point> started_;
  Clock::duration posting_{};
  Clock::duration preparing_{};  // from the call to the last post, the posts aside
};

}  // namespace kv::nixl
