#pragma once

#include <algorithm>
#include <string>

#include "agent/counters.h"
#include "events/event.h"
#include "library/handle.h"
#include "library/nixl_capi.h"

namespace kv::nixl {

// Polls NIXL for the notifications that peers have sent to one agent. The poll also drives the
// backends: without NIXL's own progress thread they serve peers only during calls. Lives on the
// agent's thread.
class NotificationPoller {
 public:
  // All references outlive it. Throws KV_INTERNAL.
  NotificationPoller(const capi::Functions& nixl, capi::Agent agent, Counters& counters)
      : nixl_(nixl),
        agent_(agent),
        counters_(counters),
        map_(Handle<capi::NotifMap>::make("KV_INTERNAL", "NIXL could not create a notification map", nixl.destroy_notif_map,
                                          nixl.create_notif_map)) {}

  // Polls from now on: a backend of the agent carries notifications.
  void enable() { enabled_ = true; }
  // Calls `receive(from, payload)` for each notification that has arrived, or `lose(count)` where
  // there are so many senders that notifications of `count` of them are dropped. Returns whether
  // there were any.
  template <typename Receive, typename Lose>
  bool poll(Receive receive, Lose lose);
  // Takes out the errors that a backend keeps for the next caller. A poll takes one of them.
  void drain_errors() {
    int left = kMaxErrors;
    while (left > 0 && nixl_.get_notifs(agent_, map_.get(), nullptr) != capi::kSuccess) --left;
  }

 private:
  // Senders whose notifications one poll takes.
  static constexpr size_t kMaxSenders = 1024;
  // A connection that ends leaves an error per operation on it.
  static constexpr int kMaxErrors = 65'536;

  const capi::Functions& nixl_;
  capi::Agent agent_;
  Counters& counters_;
  bool enabled_ = false;
  Handle<capi::NotifMap> map_;
};

template <typename Receive, typename Lose>
bool NotificationPoller::poll(Receive receive, Lose lose) {
  if (!enabled_ || nixl_.get_notifs(agent_, map_.get(), nullptr) != capi::kSuccess) return false;
  size_t agents = 0;
  nixl_.notif_map_size(map_.get(), &agents);
  if (agents == 0) return false;
  // NIXL finds a sender by its number in as many steps, so very many senders, which only forged
  // names can be, would take the thread for minutes.
  if (agents > kMaxSenders) lose(agents - kMaxSenders);
  agents = std::min(agents, kMaxSenders);
  for (size_t index = 0; index < agents; ++index) {
    const char* from = nullptr;
    size_t count = 0;
    if (nixl_.notif_map_get_agent_at(map_.get(), index, &from) != capi::kSuccess) break;
    nixl_.notif_map_get_notifs_size(map_.get(), from, &count);
    for (size_t number = 0; number < count; ++number) {
      const void* data = nullptr;
      size_t length = 0;
      if (nixl_.notif_map_get_notif(map_.get(), from, number, &data, &length) != capi::kSuccess) continue;
      const auto* bytes = static_cast<const uint8_t*>(data);
      receive(std::string(from), Bytes(bytes, bytes + length));
      ++counters_.notifications_received;
    }
  }
  nixl_.notif_map_clear(map_.get());
  return true;
}

}  // namespace kv::nixl
