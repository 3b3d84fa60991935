#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "events/event.h"
#include "node/js_event_queue.h"

namespace kv::nixl {

// Sends the events of one agent to JavaScript. While the JavaScript thread makes a call itself, its
// events are kept instead: they are the answer of that call. Used by the thread that has the
// agent's turn.
class EventSender {
 public:
  explicit EventSender(std::shared_ptr<JsEventQueue> queue) : queue_(std::move(queue)) {}

  // Sends an event, or keeps it.
  void send(Event event) {
    if (keeping_) kept_.push_back(std::move(event));
    else queue_->send(std::move(event));
  }
  // Keeps events from now on.
  void keep() { keeping_ = true; }
  // Takes the answer of the ticket out of the kept events: that its command has succeeded, or has
  // failed and leaves nothing behind. None if it is not there, and for a transfer that has failed,
  // whose release is another event.
  std::optional<Event> take_answer(uint64_t ticket) {
    for (auto at = kept_.begin(); at != kept_.end(); ++at) {
      const bool is_answer = at->kind == Event::Kind::settled || (at->kind == Event::Kind::done && !at->failure);
      if (at->ticket != ticket || !is_answer) continue;
      Event answer = std::move(*at);
      kept_.erase(at);
      return answer;
    }
    return std::nullopt;
  }
  // Sends events from now on. Returns those that were kept.
  std::vector<Event> take_kept() {
    keeping_ = false;
    return std::exchange(kept_, {});
  }

 private:
  const std::shared_ptr<JsEventQueue> queue_;
  bool keeping_ = false;
  std::vector<Event> kept_;
};

}  // namespace kv::nixl
