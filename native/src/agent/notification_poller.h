#pragma once

#include <algorithm>

#include "events/event.h"
#include "library/nixl_library.h"

namespace kv::nixl {

// Polls NIXL for notifications, on the agent's thread. The poll also drives backends, which serve
// peers only during calls.
class NotificationPoller {
 public:
  // The counters must outlive it. Throws KV_INTERNAL.
  NotificationPoller(Agent agent, Counters& counters)
      : agent_(agent),
        counters_(counters),
        map_(make<OwnedNotifications>("KV_INTERNAL", "NIXL could not create a notification map",
                                      capi::create_notif_map)) {}

  // For a backend that carries notifications.
  void enable() { enabled_ = true; }
  // Calls `receive(from, payload)` for each notification, and `lose(count)` when those of `count`
  // senders are dropped because there are too many. Returns whether any arrived.
  template <typename Receive, typename Lose>
  bool poll(Receive receive, Lose lose);
  // Removes errors that a backend keeps for the next caller, of which a poll takes one.
  void drain_errors() {
    int left = kMaxErrors;
    while (left > 0 && capi::get_notifs(agent_, map_.get(), nullptr) != kSuccess) --left;
  }

 private:
  // The most senders per poll.
  static constexpr size_t kMaxSenders = 1024;
  // An ended connection leaves an error per operation.
  static constexpr int kMaxErrors = 65'536;

  Agent agent_;
  Counters& counters_;
  bool enabled_ = false;
  OwnedNotifications map_;
};

template <typename Receive, typename Lose>
bool NotificationPoller::poll(Receive receive, Lose lose) {
  if (!enabled_ || capi::get_notifs(agent_, map_.get(), nullptr) != kSuccess) return false;
  size_t agents = 0;
  capi::notif_map_size(map_.get(), &agents);
  if (agents == 0) return false;
  // NIXL finds the n-th sender in n steps. Very many, which only forged names can make, would
  // occupy the thread for minutes.
  if (agents > kMaxSenders) lose(agents - kMaxSenders);
  agents = std::min(agents, kMaxSenders);
  for (size_t index = 0; index < agents; ++index) {
    const char* from = nullptr;
    size_t count = 0;
    if (capi::notif_map_get_agent_at(map_.get(), index, &from) != kSuccess) break;
    capi::notif_map_get_notifs_size(map_.get(), from, &count);
    for (size_t number = 0; number < count; ++number) {
      const void* data = nullptr;
      size_t length = 0;
      if (capi::notif_map_get_notif(map_.get(), from, number, &data, &length) != kSuccess) continue;
      const auto* bytes = static_cast<const uint8_t*>(data);
      receive(string(from), Bytes(bytes, bytes + length));
      ++counters_.notifications_received;
    }
  }
  capi::notif_map_clear(map_.get());
  return true;
}

}  // namespace kv::nixl
