// Cuts what a transfer moves into slices, each of them one request of NIXL, and merges what lies side by side on both sides.
#pragma once

#include <cstdint>
#include <vector>

#include "list.h"
#include "pairs.h"

namespace kv::nixl {

// Bytes that go from one address to another.
struct Extent {
  uint64_t local;
  uint64_t remote;
  uint64_t length;
  uint64_t local_device;
  uint64_t remote_device;
};

struct Slice {
  std::vector<Extent> extents;
  // The same by index, where no descriptor was cut.
  std::vector<Run> runs;
  uint64_t descriptors = 0;
  bool cut = false;
};

class Slicer {
 public:
  // All three outlive it.
  Slicer(const Pairs& pairs, const List& local, const List& remote);

  bool ended() const { return run_.count == 0; }
  // The next slice, one extent at least.
  void next(Slice& slice);

 private:
  void skip(uint32_t count);

  Pairs::Reader pairs_;
  Shape::Reader local_;
  Shape::Reader remote_;
  bool mergeable_;
  Run run_{};             // what is left of the current one
  uint64_t offset_ = 0;   // bytes of its first descriptor that are in earlier slices
};

}  // namespace kv::nixl
