#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "transfer/transfer.h"

namespace kv::nixl {

// The transfers of one agent. Those that have slices to post take turns, one slice each; those with
// something under way are looked after. A turn takes as long with thousands of waiting transfers as
// with one. Used by the thread that has the agent's turn.
class TransferScheduler {
 public:
  // Called when a transfer has finished, before it is destroyed.
  using OnEnd = std::function<void(const Transfer&)>;

  // No transfers.
  explicit TransferScheduler(OnEnd on_end) : on_end_(std::move(on_end)) {}
  TransferScheduler(const TransferScheduler&) = delete;
  TransferScheduler& operator=(const TransferScheduler&) = delete;

  // Adds a transfer. Its turn comes after those that wait now.
  void add(std::unique_ptr<Transfer> transfer);
  // Posts the first slice of a transfer at once and looks after it. Adds it if it does not end with
  // that.
  void start(std::unique_ptr<Transfer> transfer);
  // Whether there are no transfers.
  bool empty() const { return transfers_.empty(); }

  // One turn: posts one slice, so that commands and notifications never wait for more than one, and
  // looks after transfers under way. Returns whether anything changed.
  bool advance();
  // Looks after one transfer at once, also while it waits for its turn: its caller has aborted it.
  // Ignores a ticket that is not known.
  void attend(uint64_t ticket);
  // Looks after all transfers at once: a peer has died.
  void attend_all();
  // Abandons all transfers. Those with nothing under way end now.
  void abandon_all();
  // Hands over all transfers, without calling `on_end`.
  std::vector<std::unique_ptr<Transfer>> take_all();

 private:
  struct Entry {
    std::unique_ptr<Transfer> transfer;
    // Whether its ticket is in `posting_` and in `under_way_`.
    bool posting = false;
    bool under_way = false;
  };

  bool advance(uint64_t ticket, Entry& entry, bool may_post);
  void enqueue(uint64_t ticket, Entry& entry);
  bool post_next();
  bool look_after(size_t most);

  OnEnd on_end_;
  std::unordered_map<uint64_t, Entry> transfers_;
  // Tickets of transfers that have slices to post, in the order of their turns, and of those that
  // have something under way, in the order in which they are looked after. A ticket whose transfer
  // has ended meanwhile is skipped.
  std::deque<uint64_t> posting_;
  std::deque<uint64_t> under_way_;
};

}  // namespace kv::nixl
