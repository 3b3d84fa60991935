#pragma once

#include <deque>
#include <functional>

#include "library/std_names.h"
#include "transfer/transfer.h"

namespace kv::nixl {

// One agent's transfers. Those with slices take turns, one slice each. A turn's time does not grow
// with waiting transfers. For the thread that has the agent's turn.
class TransferScheduler {
 public:
  // Called before a finished transfer is destroyed.
  using OnEnd = std::function<void(const Transfer&)>;

  explicit TransferScheduler(OnEnd on_end) : on_end_(std::move(on_end)) {}
  TransferScheduler(const TransferScheduler&) = delete;
  TransferScheduler& operator=(const TransferScheduler&) = delete;

  // Its turn comes after those that wait.
  void add(unique_ptr<Transfer> transfer);
  // Posts the first slice at once. Adds the transfer unless it ends with that.
  void start(unique_ptr<Transfer> transfer);
  // False if `add` or `start` threw for want of memory before a post.
  bool contains(uint64_t ticket) const { return transfers_.contains(ticket); }
  bool empty() const { return transfers_.empty(); }

  // Posts one slice, so that commands and notifications wait for no more, and looks after
  // transfers. Returns whether anything changed.
  bool advance();
  // At once, since its caller has aborted it. Ignores unknown tickets.
  void attend(uint64_t ticket);
  // At once, since a peer has died.
  void attend_all();
  // Transfers with nothing under way end now.
  void abandon_all();
  // Hands over all transfers without `on_end`.
  vector<unique_ptr<Transfer>> take_all();

 private:
  struct Entry {
    unique_ptr<Transfer> transfer;
    // Whether its ticket is in these queues.
    bool posting = false;
    bool under_way = false;
  };

  bool advance(uint64_t ticket, Entry& entry, bool may_post);
  // Queues a transfer as needed, or ends it.
  void settle(uint64_t ticket, Entry& entry);
  bool post_next();
  bool look_after(size_t most);

  OnEnd on_end_;
  unordered_map<uint64_t, Entry> transfers_;
  // Tickets with slices to post, by turn, and with something under way. Those of ended transfers
  // are skipped.
  std::deque<uint64_t> posting_;
  std::deque<uint64_t> under_way_;
};

}  // namespace kv::nixl
