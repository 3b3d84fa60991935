#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "events/event.h"

namespace kv::nixl {

// Bounds the notifications that wait for JavaScript: all together, and those of one sender, so that
// one peer does not crowd out the others. Counts what exceeds a limit. A sender states its name
// itself, so it may use many.
class NotificationBacklog {
 public:
  // Notifications and bytes that may wait.
  static constexpr size_t kMaxCount = 65'536;
  static constexpr size_t kMaxBytes = 64u << 20;
  // The part of both that one sender may have.
  static constexpr size_t kSenderParts = 4;

  // Adds a notification; false if it must be dropped.
  bool admit(const Event& notification);
  // Removes a notification that was admitted.
  void remove(const Event& notification);
  // An event per sender with the number of its notifications that were dropped. Senders beyond the
  // first 64 are one event without a name.
  std::vector<Event> take_dropped();

 private:
  struct Share {
    size_t count = 0;
    size_t bytes = 0;
  };

  Share all_;
  std::unordered_map<std::string, Share> waiting_;
  std::unordered_map<std::string, uint64_t> dropped_;
};

}  // namespace kv::nixl
