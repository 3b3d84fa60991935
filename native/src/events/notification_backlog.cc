#include "events/notification_backlog.h"

#include <utility>

namespace kv::nixl {

namespace {

// Senders that are named in a report.
constexpr size_t kMaxNamed = 64;

size_t size_of(const Event& notification) { return std::get<Bytes>(notification.value).size(); }

}  // namespace

bool NotificationBacklog::admit(const Event& notification) {
  const size_t size = size_of(notification);
  const auto fits = [size](const Share& share, size_t parts) {
    return share.count < kMaxCount / parts && share.bytes + size <= kMaxBytes / parts;
  };
  const auto known = waiting_.find(notification.from);
  // A single notification always fits its sender's part, however long it is.
  const bool sender_fits = known == waiting_.end() || fits(known->second, kSenderParts);
  if (!fits(all_, 1) || !sender_fits) {
    const bool named = dropped_.size() < kMaxNamed || dropped_.contains(notification.from);
    ++dropped_[named ? notification.from : std::string()];
    return false;
  }
  for (Share* share : {&all_, &waiting_[notification.from]}) {
    ++share->count;
    share->bytes += size;
  }
  return true;
}

void NotificationBacklog::remove(const Event& notification) {
  const auto found = waiting_.find(notification.from);
  for (Share* share : {&all_, &found->second}) {
    --share->count;
    share->bytes -= size_of(notification);
  }
  if (found->second.count == 0) waiting_.erase(found);
}

std::vector<Event> NotificationBacklog::take_dropped() {
  std::vector<Event> events;
  for (auto& [from, count] : std::exchange(dropped_, {})) events.push_back(Event::dropped(from, static_cast<double>(count)));
  return events;
}

}  // namespace kv::nixl
