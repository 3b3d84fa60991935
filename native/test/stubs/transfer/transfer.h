// A transfer without NIXL, for the test of TransferScheduler. It counts what the scheduler does
// with it.
#pragma once

#include <cstdint>
#include <vector>

namespace kv::nixl {

class Transfer {
 public:
  // What all transfers of a test did.
  struct World {
    // Tickets, in the order of their posts.
    std::vector<uint64_t> posts;
    uint64_t calls = 0;
  };

  // `slices` to post; each is under way until `polls` calls of `advance` have followed it. 0: a
  // post completes it.
  Transfer(World& world, uint64_t ticket, int slices, int polls) : world_(world), ticket_(ticket), slices_(slices), polls_(polls) {}

  bool advance(bool may_post) {
    ++world_.calls;
    const bool ended = left_ > 0 && --left_ == 0;
    if (aborted) slices_ = 0;
    const bool posts = may_post && wants_to_post();
    if (posts) {
      world_.posts.push_back(ticket_);
      --slices_;
      left_ = polls_;
    }
    return ended || posts || finished();
  }
  bool wants_to_post() const { return slices_ > 0; }
  bool under_way() const { return left_ > 0; }
  bool finished() const { return slices_ == 0 && left_ == 0; }
  uint64_t ticket() const { return ticket_; }
  void abandon() { aborted = true; }

  bool aborted = false;

 private:
  World& world_;
  const uint64_t ticket_;
  int slices_;
  const int polls_;
  int left_ = 0;
};

}  // namespace kv::nixl
