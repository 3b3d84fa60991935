#pragma once

#include "memory/prepared_list.h"
#include "transfer/transfer_selection.h"

namespace kv::nixl {

struct Extent {
  uint64_t local;
  uint64_t remote;
  uint64_t length;
  uint64_t local_device;
  uint64_t remote_device;
};

// From this many descriptors per extent on, requests by extent are faster.
inline constexpr uint64_t kMinDescriptorsPerExtent = 12;

// Indices of both lists, run by run. Keeps its memory when cleared.
class IndexBuffer {
 public:
  void clear() { count_ = 0; }
  // By value: a compiler must assume that writing indices changes a referenced run.
  void add(Run run) {
    if (capacity_ - count_ < run.count) grow(run.count);
    int32_t* local = local_.get() + count_;
    int32_t* remote = remote_.get() + count_;
    for (uint32_t index = 0; index < run.count; ++index) {
      local[index] = static_cast<int32_t>(run.local + index);
      remote[index] = static_cast<int32_t>(run.remote + index);
    }
    count_ += run.count;
  }

  // Per list.
  size_t count() const { return count_; }
  // Valid until the next `add`.
  const int32_t* local() const { return local_.get(); }
  const int32_t* remote() const { return remote_.get(); }

 private:
  void grow(size_t more);

  unique_ptr<int32_t[]> local_;
  unique_ptr<int32_t[]> remote_;
  size_t count_ = 0;
  size_t capacity_ = 0;
};

// One NIXL request, by indices (`local_ids` is set) or by extents.
struct Slice {
  uint64_t descriptors = 0;
  // Descriptors left after merging.
  uint64_t merged = 0;

  // By index: `descriptors` indices per list, from the selection or `indices`.
  const int32_t* local_ids = nullptr;
  const int32_t* remote_ids = nullptr;

  // By extent: merged ranges, their runs, and whether a descriptor is split.
  vector<Extent> extents;
  vector<Run> runs;
  bool splits_descriptor = false;

  // Shared by the slicer and the factory of requests.
  IndexBuffer indices;
};

// Cuts a transfer into slices, between which other work is served. Merges descriptors that are
// neighbours on both sides.
class Slicer {
 public:
  // All arguments must outlive it.
  Slicer(const TransferSelection& selection, const PreparedList& local, const PreparedList& remote);

  // Limits slices by bytes if posts copy (the default), else by extents. More `threads` that copy
  // make slices larger. Call it before the first slice.
  void set_post_copies(bool copies, unsigned threads);

  uint64_t count() const { return selection_->count(); }
  bool done() const { return at_ == selection_->count(); }
  // Whether slices of indices need no look at rows: descriptors have one length, and few merge.
  bool can_use_indices() const;
  // Call it before the first slice.
  void use_indices() { by_index_ = true; }
  // The next slice is never empty.
  void next(Slice& slice);

 private:
  void skip(uint32_t count);
  void next_from_ids(Slice& slice);
  void next_from_runs(Slice& slice);
  void next_extents(Slice& slice);

  const TransferSelection* selection_;
  const DescriptorLayout* local_layout_;
  const DescriptorLayout* remote_layout_;
  bool by_index_ = false;
  // Pairs in earlier slices.
  uint64_t at_ = 0;
  TransferSelection::Cursor runs_;
  DescriptorLayout::Cursor local_;
  DescriptorLayout::Cursor remote_;
  bool mergeable_;
  // A slice costs its bytes, and `extent_cost_` per extent.
  uint64_t max_slice_cost_;
  uint64_t extent_cost_;
  // The rest of the current run, and its first descriptor's bytes in earlier slices.
  Run run_{};
  uint64_t offset_ = 0;
};

}  // namespace kv::nixl
