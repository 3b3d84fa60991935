// Cuts what a transfer moves into slices, each of them one request of NIXL, and merges what lies side by side on both sides.
#pragma once

#include <cstdint>
#include <vector>

#include "memory/prepared_list.h"
#include "transfer/transfer_selection.h"
#include "transfer/index_buffer.h"

namespace kv::nixl {

// Bytes that go from one address to another.
struct Extent {
  uint64_t local;
  uint64_t remote;
  uint64_t length;
  uint64_t local_device;
  uint64_t remote_device;
};

// Descriptors per extent from which on NIXL is told extents faster than indices.
inline constexpr uint64_t kMergedEnough = 12;

struct Slice {
  std::vector<Extent> extents;
  // The same by index, where no descriptor was cut.
  std::vector<Run> runs;
  uint64_t descriptors = 0;
  bool cut = false;
  // Instead of all these: `descriptors` indices of each list, where the caller keeps them, or in `written`.
  const int32_t* local_ids = nullptr;
  const int32_t* remote_ids = nullptr;
  // Room for indices of this slice, for whoever needs them.
  IndexBuffer written;
  // What is left of the descriptors once neighbours are one.
  uint64_t merged = 0;
};

class Slicer {
 public:
  // All three outlive it.
  Slicer(const TransferSelection& pairs, const PreparedList& local, const PreparedList& remote);

  // Whether the post of a slice is the copy, which bounds its bytes (so it is until told otherwise), or only starts it: then only the time
  // to post its extents does. Before the first slice.
  void posts_copy(bool copy);

  bool ended() const { return at_ == given_->count(); }
  // Whether slices can be made of indices alone, without a look at rows: where these are of one length, and little of them merges.
  bool can_go_by_index() const;
  // From here on they do. Before the first slice.
  void go_by_index() { by_index_ = true; }
  // The next slice, one extent at least.
  void next(Slice& slice);

 private:
  void skip(uint32_t count);
  void next_ids(Slice& slice);
  void write_ids(Slice& slice);

  const TransferSelection* given_;
  const DescriptorLayout* local_shape_;
  const DescriptorLayout* remote_shape_;
  bool by_index_ = false;
  uint64_t at_ = 0;  // pairs in earlier slices
  TransferSelection::Reader pairs_;
  DescriptorLayout::Reader local_;
  DescriptorLayout::Reader remote_;
  bool mergeable_;
  uint64_t slice_cost_;   // of one slice, at most: its bytes, and for each extent
  uint64_t extent_cost_;  // as much as so many more
  Run run_{};             // what is left of the current one
  uint64_t offset_ = 0;   // bytes of its first descriptor that are in earlier slices
};

}  // namespace kv::nixl
