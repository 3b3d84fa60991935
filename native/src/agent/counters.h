#pragma once

#include <atomic>
#include <cstdint>

namespace kv::nixl {

// What an agent has done so far. Written by its thread, except for the transfers posted and in
// flight, and read on the JavaScript thread.
struct Counters {
  std::atomic<uint64_t> transfers_posted{0};
  std::atomic<uint64_t> transfers_done{0};
  std::atomic<uint64_t> transfers_failed{0};
  std::atomic<uint64_t> transfers_in_flight{0};
  std::atomic<uint64_t> bytes_transferred{0};
  std::atomic<uint64_t> notifications_sent{0};
  std::atomic<uint64_t> notifications_received{0};
  std::atomic<uint64_t> registrations{0};
  std::atomic<uint64_t> prepared_lists{0};
  std::atomic<uint64_t> remotes{0};
  // Polls for notifications. They are the cost of an idle agent.
  std::atomic<uint64_t> polls{0};
};

}  // namespace kv::nixl
