#include "transfer/slicer.h"

#include <algorithm>

namespace kv::nixl {

namespace {

// If posts copy: a slice takes 1 to 3 ms. NIXL takes 3 to 6 us per extent, as for 16 KiB more.
constexpr uint64_t kSliceBytes = 8ull << 20;
constexpr uint64_t kExtentBytes = 16384;
// Slices are this much longer per thread, since threads sleep in between. READ on two cores was up
// to 16 % faster, and never slower.
constexpr uint64_t kThreadedSlice = 4;
// If posts only start the copy, they take 1 to 3 us per extent.
constexpr uint64_t kMaxStartedExtents = 8192;
constexpr uint64_t kUnlimitedBytes = 1ull << 50;

}  // namespace

void IndexBuffer::grow(size_t more) {
  const size_t capacity = std::max(count_ + more, 2 * capacity_);
  auto local = std::make_unique_for_overwrite<int32_t[]>(capacity);
  auto remote = std::make_unique_for_overwrite<int32_t[]>(capacity);
  std::copy_n(local_.get(), count_, local.get());
  std::copy_n(remote_.get(), count_, remote.get());
  local_ = std::move(local);
  remote_ = std::move(remote);
  capacity_ = capacity;
}

Slicer::Slicer(const TransferSelection& selection, const PreparedList& local, const PreparedList& remote)
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

void Slicer::set_post_copies(bool copies, unsigned threads) {
  const uint64_t factor = threads > 1 ? threads * kThreadedSlice : 1;
  max_slice_cost_ = copies ? kSliceBytes * factor : kUnlimitedBytes;
  extent_cost_ = copies ? kExtentBytes : kUnlimitedBytes / kMaxStartedExtents;
}

void Slicer::skip(uint32_t count) {
  at_ += count;
  run_ = {run_.local + count, run_.remote + count, run_.count - count};
  if (run_.count == 0) runs_.next(run_);
}

bool Slicer::can_use_indices() const {
  const uint64_t length = local_layout_->uniform_length();
  if (length == 0 || length != remote_layout_->uniform_length() || length > max_slice_cost_ - extent_cost_) return false;
  const bool merges = mergeable_ && local_layout_->contiguous() && remote_layout_->contiguous();
  return !selection_->local_ids().empty() || !merges || selection_->count() < kMinDescriptorsPerExtent * selection_->run_count();
}

void Slicer::next(Slice& slice) {
  slice.descriptors = 0;
  slice.merged = 0;
  slice.local_ids = nullptr;
  slice.remote_ids = nullptr;
  slice.extents.clear();
  slice.runs.clear();
  slice.splits_descriptor = false;
  if (!by_index_) next_extents(slice);
  else if (selection_->local_ids().empty()) next_from_runs(slice);
  else next_from_ids(slice);
}

void Slicer::next_from_ids(Slice& slice) {
  const int32_t* local = selection_->local_ids().data();
  const int32_t* remote = selection_->remote_ids().data();
  const uint64_t length = local_layout_->uniform_length();
  const uint64_t count = selection_->count();
  const bool contiguous = local_layout_->contiguous() && remote_layout_->contiguous();
  const size_t first = at_;
  uint64_t cost = 0;
  for (; at_ < count; ++at_) {
    const bool joins = contiguous && at_ > first && local[at_] == local[at_ - 1] + 1 && remote[at_] == remote[at_ - 1] + 1;
    cost += length + (joins ? 0 : extent_cost_);
    if (cost > max_slice_cost_) break;
    slice.merged += joins ? 0 : 1;
  }
  slice.local_ids = local + first;
  slice.remote_ids = remote + first;
  slice.descriptors = at_ - first;
}

void Slicer::next_from_runs(Slice& slice) {
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

void Slicer::next_extents(Slice& slice) {
  uint64_t budget = max_slice_cost_;
  while (!done() && budget > extent_cost_) {
    const auto here = local_.at(run_.local);
    const auto there = remote_.at(run_.remote);
    const uint64_t length = here.row.length;
    const bool merges = mergeable_ && here.row.stride == length && there.row.stride == length;
    // Never across rows, since NIXL refuses a descriptor across registrations.
    const uint32_t most = merges ? std::min({run_.count, here.left_in_row, there.left_in_row}) : 1;
    const uint64_t whole = most * length - offset_;
    uint64_t bytes = std::min(whole, budget - extent_cost_);
    // Only descriptors longer than a slice are split.
    if (bytes < whole && length <= max_slice_cost_ - extent_cost_) bytes -= (offset_ + bytes) % length;
    if (bytes == 0) break;
    // Most extents are whole, and a division would double the loop's time.
    const uint64_t end = offset_ + bytes;
    const uint32_t covered = bytes == whole ? most : static_cast<uint32_t>(end / length);
    const uint64_t left = bytes == whole ? 0 : end % length;
    slice.extents.push_back({here.row.address + here.index_in_row * here.row.stride + offset_,
                             there.row.address + there.index_in_row * there.row.stride + offset_, bytes, here.row.device,
                             there.row.device});
    slice.splits_descriptor = slice.splits_descriptor || offset_ != 0 || left != 0;
    slice.runs.push_back({run_.local, run_.remote, covered});
    slice.descriptors += covered;
    budget -= std::min(budget, bytes + extent_cost_);
    offset_ = left;
    skip(covered);
  }
  slice.merged = slice.extents.size();
}

}  // namespace kv::nixl
