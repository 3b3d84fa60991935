#pragma once

#include <algorithm>

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
  void grow(size_t more) {
    const size_t capacity = std::max(count_ + more, 2 * capacity_);
    auto local = std::make_unique_for_overwrite<int32_t[]>(capacity);
    auto remote = std::make_unique_for_overwrite<int32_t[]>(capacity);
    std::copy_n(local_.get(), count_, local.get());
    std::copy_n(remote_.get(), count_, remote.get());
    local_ = std::move(local);
    remote_ = std::move(remote);
    capacity_ = capacity;
  }

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
  Slicer(const TransferSelection& selection, const PreparedList& local, const PreparedList& remote)
      : selection_(&selection),
        local_layout_(&local.layout),
        remote_layout_(&remote.layout),
        runs_(selection),
        local_(local.layout),
        remote_(remote.layout),
        mergeable_(local.mergeable && remote.mergeable) {
    set_post_copies(true, 1);
    runs_.next(run_);
  }

  // Limits slices by bytes if posts copy (the default), else by extents. More `threads` that copy
  // make slices larger. Call it before the first slice.
  void set_post_copies(bool copies, unsigned threads) {
    const uint64_t factor = threads > 1 ? threads * kThreadedSlice : 1;
    max_slice_cost_ = copies ? kSliceBytes * factor : kUnlimitedBytes;
    extent_cost_ = copies ? kExtentBytes : kUnlimitedBytes / kMaxStartedExtents;
  }

  uint64_t count() const { return selection_->count(); }
  bool done() const { return at_ == selection_->count(); }
  // Whether slices of indices need no look at rows: descriptors have one length, and few merge.
  bool can_use_indices() const {
    const uint64_t length = local_layout_->uniform_length();
    if (length == 0 || length != remote_layout_->uniform_length() ||
        length > max_slice_cost_ - extent_cost_)
      return false;
    const bool merges = mergeable_ && local_layout_->contiguous() && remote_layout_->contiguous();
    return !selection_->local_ids().empty() || !merges ||
           selection_->count() < kMinDescriptorsPerExtent * selection_->run_count();
  }
  // Call it before the first slice.
  void use_indices() { by_index_ = true; }
  // The next slice is never empty.
  void next(Slice& slice) {
    slice.descriptors = 0;
    slice.merged = 0;
    slice.local_ids = nullptr;
    slice.remote_ids = nullptr;
    slice.extents.clear();
    slice.runs.clear();
    slice.splits_descriptor = false;
    if (!by_index_)
      next_extents(slice);
    else if (selection_->local_ids().empty())
      next_from_runs(slice);
    else
      next_from_ids(slice);
  }

 private:
  // If posts copy: a slice takes 1 to 3 ms. NIXL takes 3 to 6 us per extent, as for 16 KiB more.
  static constexpr uint64_t kSliceBytes = 8ull << 20;
  static constexpr uint64_t kExtentBytes = 16384;
  // Slices are this much longer per thread, since threads sleep in between. READ on two cores was
  // up to 16 % faster, and never slower.
  static constexpr uint64_t kThreadedSlice = 4;
  // If posts only start the copy, they take 1 to 3 us per extent.
  static constexpr uint64_t kMaxStartedExtents = 8192;
  static constexpr uint64_t kUnlimitedBytes = 1ull << 50;

  void skip(uint32_t count) {
    at_ += count;
    run_ = {run_.local + count, run_.remote + count, run_.count - count};
    if (run_.count == 0) runs_.next(run_);
  }
  void next_from_ids(Slice& slice) {
    const int32_t* local = selection_->local_ids().data();
    const int32_t* remote = selection_->remote_ids().data();
    const uint64_t length = local_layout_->uniform_length();
    const uint64_t count = selection_->count();
    const bool contiguous = local_layout_->contiguous() && remote_layout_->contiguous();
    const size_t first = at_;
    uint64_t cost = 0;
    for (; at_ < count; ++at_) {
      const bool joins = contiguous && at_ > first && local[at_] == local[at_ - 1] + 1 &&
                         remote[at_] == remote[at_ - 1] + 1;
      cost += length + (joins ? 0 : extent_cost_);
      if (cost > max_slice_cost_) break;
      slice.merged += joins ? 0 : 1;
    }
    slice.local_ids = local + first;
    slice.remote_ids = remote + first;
    slice.descriptors = at_ - first;
  }
  void next_from_runs(Slice& slice) {
    const uint64_t length = local_layout_->uniform_length();
    const bool contiguous = local_layout_->contiguous() && remote_layout_->contiguous();
    const uint64_t cost_of_first = length + extent_cost_;
    const uint64_t cost_of_next = contiguous ? length : cost_of_first;
    uint64_t budget = max_slice_cost_;
    slice.indices.clear();
    while (!done() && budget >= cost_of_first) {
      uint32_t count = run_.count;
      if (cost_of_first + (count - 1) * cost_of_next > budget) {
        count = 1 + static_cast<uint32_t>((budget - cost_of_first) / cost_of_next);
      }
      slice.indices.add({run_.local, run_.remote, count});
      budget -= cost_of_first + (count - 1) * cost_of_next;
      slice.merged += contiguous ? 1 : count;
      skip(count);
    }
    slice.descriptors = slice.indices.count();
    slice.local_ids = slice.indices.local();
    slice.remote_ids = slice.indices.remote();
  }
  void next_extents(Slice& slice) {
    uint64_t budget = max_slice_cost_;
    while (!done() && budget > extent_cost_) {
      const auto here = local_.at(run_.local);
      const auto there = remote_.at(run_.remote);
      const uint64_t length = here.row.length;
      const bool merges = mergeable_ && here.row.stride == length && there.row.stride == length;
      // Never across rows, since NIXL refuses a descriptor across registrations.
      const uint32_t most =
          merges ? std::min({run_.count, here.left_in_row, there.left_in_row}) : 1;
      const uint64_t whole = most * length - offset_;
      uint64_t bytes = std::min(whole, budget - extent_cost_);
      // Only descriptors longer than a slice are split.
      if (bytes < whole && length <= max_slice_cost_ - extent_cost_)
        bytes -= (offset_ + bytes) % length;
      if (bytes == 0) break;
      // Most extents are whole, and a division would double the loop's time.
      const uint64_t end = offset_ + bytes;
      const uint32_t covered = bytes == whole ? most : static_cast<uint32_t>(end / length);
      const uint64_t left = bytes == whole ? 0 : end % length;
      slice.extents.push_back({here.row.address + here.index_in_row * here.row.stride + offset_,
                               there.row.address + there.index_in_row * there.row.stride + offset_,
                               bytes, here.row.device, there.row.device});
      slice.splits_descriptor = slice.splits_descriptor || offset_ != 0 || left != 0;
      slice.runs.push_back({run_.local, run_.remote, covered});
      slice.descriptors += covered;
      budget -= std::min(budget, bytes + extent_cost_);
      offset_ = left;
      skip(covered);
    }
    slice.merged = slice.extents.size();
  }

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
