#include "transfer/transfer_scheduler.h"

#include <algorithm>

namespace kv::nixl {

namespace {

// Transfers looked after between two posts. Asking NIXL takes about 0.1 us each.
constexpr size_t kMostBetweenPosts = 32;

}  // namespace

void TransferScheduler::add(unique_ptr<Transfer> transfer) {
  const uint64_t ticket = transfer->ticket();
  posting_.push_back(ticket);
  Entry& entry = transfers_[ticket];
  entry.transfer = std::move(transfer);
  entry.posting = true;
}

void TransferScheduler::start(unique_ptr<Transfer> transfer) {
  const uint64_t ticket = transfer->ticket();
  Entry& entry = transfers_[ticket];
  entry.transfer = std::move(transfer);
  entry.transfer->advance(true);
  if (entry.transfer->finished() || !entry.transfer->under_way()) return settle(ticket, entry);
  entry.transfer->advance(false);
  settle(ticket, entry);
}

bool TransferScheduler::advance() {
  const bool posted = post_next();
  return look_after(posting_.empty() ? under_way_.size() : kMostBetweenPosts) || posted;
}

bool TransferScheduler::post_next() {
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

bool TransferScheduler::look_after(size_t most) {
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

bool TransferScheduler::advance(uint64_t ticket, Entry& entry, bool may_post) {
  const bool changed = entry.transfer->advance(may_post);
  const bool ended = entry.transfer->finished();
  settle(ticket, entry);
  return changed || ended;
}

void TransferScheduler::settle(uint64_t ticket, Entry& entry) {
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

void TransferScheduler::attend(uint64_t ticket) {
  const auto found = transfers_.find(ticket);
  if (found != transfers_.end()) advance(ticket, found->second, false);
}

void TransferScheduler::attend_all() {
  vector<uint64_t> tickets;
  tickets.reserve(transfers_.size());
  for (const auto& [ticket, entry] : transfers_) tickets.push_back(ticket);
  for (const uint64_t ticket : tickets) attend(ticket);
}

void TransferScheduler::abandon_all() {
  for (const auto& [ticket, entry] : transfers_) entry.transfer->abandon();
  attend_all();
}

vector<unique_ptr<Transfer>> TransferScheduler::take_all() {
  vector<unique_ptr<Transfer>> taken;
  for (auto& [ticket, entry] : transfers_) taken.push_back(std::move(entry.transfer));
  transfers_.clear();
  posting_.clear();
  under_way_.clear();
  return taken;
}

}  // namespace kv::nixl
