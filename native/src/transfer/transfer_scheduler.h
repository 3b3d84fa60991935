#pragma once

#include <algorithm>
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
  void add(unique_ptr<Transfer> transfer) {
    const uint64_t ticket = transfer->ticket();
    posting_.push_back(ticket);
    Entry& entry = transfers_[ticket];
    entry.transfer = std::move(transfer);
    entry.posting = true;
  }
  // Posts the first slice at once. Adds the transfer unless it ends with that.
  void start(unique_ptr<Transfer> transfer) {
    const uint64_t ticket = transfer->ticket();
    Entry& entry = transfers_[ticket];
    entry.transfer = std::move(transfer);
    entry.transfer->advance(true);
    if (entry.transfer->finished() || !entry.transfer->under_way()) return settle(ticket, entry);
    entry.transfer->advance(false);
    settle(ticket, entry);
  }
  // False if `add` or `start` threw for want of memory before a post.
  bool contains(uint64_t ticket) const { return transfers_.contains(ticket); }
  bool empty() const { return transfers_.empty(); }

  // Posts one slice, so that commands and notifications wait for no more, and looks after
  // transfers. Returns whether anything changed.
  bool advance() {
    const bool posted = post_next();
    return look_after(posting_.empty() ? under_way_.size() : kMostBetweenPosts) || posted;
  }
  // At once, since its caller has aborted it. Ignores unknown tickets.
  void attend(uint64_t ticket) {
    const auto found = transfers_.find(ticket);
    if (found != transfers_.end()) advance(ticket, found->second, false);
  }
  // At once, since a peer has died.
  void attend_all() {
    vector<uint64_t> tickets;
    tickets.reserve(transfers_.size());
    for (const auto& [ticket, entry] : transfers_) tickets.push_back(ticket);
    for (const uint64_t ticket : tickets) attend(ticket);
  }
  // Transfers with nothing under way end now.
  void abandon_all() {
    for (const auto& [ticket, entry] : transfers_) entry.transfer->abandon();
    attend_all();
  }
  // Hands over all transfers without `on_end`.
  vector<unique_ptr<Transfer>> take_all() {
    vector<unique_ptr<Transfer>> taken;
    for (auto& [ticket, entry] : transfers_) taken.push_back(std::move(entry.transfer));
    transfers_.clear();
    posting_.clear();
    under_way_.clear();
    return taken;
  }

 private:
  // Transfers looked after between two posts. Asking NIXL takes about 0.1 us each.
  static constexpr size_t kMostBetweenPosts = 32;

  struct Entry {
    unique_ptr<Transfer> transfer;
    // Whether its ticket is in these queues.
    bool posting = false;
    bool under_way = false;
  };

  bool advance(uint64_t ticket, Entry& entry, bool may_post) {
    const bool changed = entry.transfer->advance(may_post);
    const bool ended = entry.transfer->finished();
    settle(ticket, entry);
    return changed || ended;
  }
  // Queues a transfer as needed, or ends it.
  void settle(uint64_t ticket, Entry& entry) {
    if (entry.transfer->finished()) {
      on_end_(*entry.transfer);
      transfers_.erase(ticket);
      return;
    }
    if (!entry.posting && entry.transfer->wants_to_post()) {
      entry.posting = true;
      posting_.push_back(ticket);
    }
    if (!entry.under_way && entry.transfer->under_way()) {
      entry.under_way = true;
      under_way_.push_back(ticket);
    }
  }
  bool post_next() {
    while (!posting_.empty()) {
      const uint64_t ticket = posting_.front();
      posting_.pop_front();
      const auto found = transfers_.find(ticket);
      if (found == transfers_.end()) continue;
      found->second.posting = false;
      const bool posts = found->second.transfer->wants_to_post();
      if (advance(ticket, found->second, true) || posts) return true;
    }
    return false;
  }
  bool look_after(size_t most) {
    bool changed = false;
    for (size_t left = std::min(most, under_way_.size()); left > 0; --left) {
      const uint64_t ticket = under_way_.front();
      under_way_.pop_front();
      const auto found = transfers_.find(ticket);
      if (found == transfers_.end()) continue;
      found->second.under_way = false;
      changed = advance(ticket, found->second, false) || changed;
    }
    return changed;
  }

  OnEnd on_end_;
  unordered_map<uint64_t, Entry> transfers_;
  // Tickets with slices to post, by turn, and with something under way. Those of ended transfers
  // are skipped.
  std::deque<uint64_t> posting_;
  std::deque<uint64_t> under_way_;
};

}  // namespace kv::nixl
