#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "memory/prepared_list.h"
#include "transfer/transfer_selection.h"

namespace kv::nixl {

// Two ranges of equal length between which bytes are copied.
struct Extent {
  uint64_t local;
  uint64_t remote;
  uint64_t length;
  uint64_t local_device;
  uint64_t remote_device;
};

// From this many descriptors per extent on, a NIXL request of extents is made faster than one of
// indices.
inline constexpr uint64_t kMinDescriptorsPerExtent = 12;

// Indices of both lists, written out run by run. Keeps its memory when it is cleared.
class IndexBuffer {
 public:
  // Removes all indices.
  void clear() { count_ = 0; }
  // Adds the indices of a run. By value: the compiler would have to assume that writing the indices
  // changes a referenced run.
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

  // Indices of each list.
  size_t count() const { return count_; }
  // The indices of the local and of the remote list, until the next `add`.
  const int32_t* local() const { return local_.get(); }
  const int32_t* remote() const { return remote_.get(); }

 private:
  void grow(size_t more);

  std::unique_ptr<int32_t[]> local_;
  std::unique_ptr<int32_t[]> remote_;
  size_t count_ = 0;
  size_t capacity_ = 0;
};

// The part of a transfer that is one NIXL request. It is described by indices (`local_ids` is set)
// or by extents.
struct Slice {
  uint64_t descriptors = 0;
  // Descriptors that are left after neighbours were merged.
  uint64_t merged = 0;

  // By index: `descriptors` indices of each list, in the transfer's selection or in `indices`.
  const int32_t* local_ids = nullptr;
  const int32_t* remote_ids = nullptr;

  // By extent: the merged ranges, the runs that they cover, and whether the slice begins or ends
  // within a descriptor.
  std::vector<Extent> extents;
  std::vector<Run> runs;
  bool splits_descriptor = false;

  // Memory for indices, for the slicer and for the factory of requests.
  IndexBuffer indices;
};

// Cuts a transfer into slices, so that notifications and other transfers are served between them,
// and merges descriptors that are neighbours on both sides.
class Slicer {
 public:
  // All three arguments outlive it.
  Slicer(const TransferSelection& selection, const PreparedList& local, const PreparedList& remote);

  // Selects the limit of a slice: the number of bytes if posting copies them (the default), or the
  // number of extents if posting only starts the copy. `threads`: how many threads copy at once;
  // slices are larger for them. Call it before the first slice.
  void set_post_copies(bool copies, unsigned threads);

  // Descriptors in all slices.
  uint64_t count() const { return selection_->count(); }
  // Whether every descriptor is in a slice.
  bool done() const { return at_ == selection_->count(); }
  // Whether slices can be made of indices without looking at rows: descriptors have one length, and
  // few of them merge.
  bool can_use_indices() const;
  // Makes slices of indices from now on. Call it before the first slice.
  void use_indices() { by_index_ = true; }
  // Sets the next slice, which has at least one extent or index.
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
  // The most that a slice may cost: its bytes, and `extent_cost_` per extent.
  uint64_t max_slice_cost_;
  uint64_t extent_cost_;
  // The rest of the current run, and the bytes of its first descriptor that are in earlier slices.
  Run run_{};
  uint64_t offset_ = 0;
};

}  // namespace kv::nixl
