#include "transfer/slicer.h"

#include <algorithm>

namespace kv::nixl {

namespace {

// A slice is what NIXL copies in one post where the post is the copy: 1 to 3 ms by these bounds. An extent is one copy to NIXL, which
// takes 3 to 6 us however short it is: as long as 16 KiB more.
constexpr uint64_t kSliceBytes = 8ull << 20;
constexpr uint64_t kExtentBytes = 16384;
// Where a post only starts the copy, it takes 1 to 3 us for each extent, and nothing for its bytes: 8192 extents, whatever their length.
constexpr uint64_t kStartedExtents = 8192;
constexpr uint64_t kAnyBytes = 1ull << 50;

}  // namespace

Slicer::Slicer(const TransferSelection& pairs, const PreparedList& local, const PreparedList& remote)
    : given_(&pairs),
      local_shape_(&local.shape),
      remote_shape_(&remote.shape),
      pairs_(pairs),
      local_(local.shape),
      remote_(remote.shape),
      mergeable_(local.mergeable && remote.mergeable) {
  posts_copy(true);
  pairs_.next(run_);
}

void Slicer::posts_copy(bool copy) {
  slice_cost_ = copy ? kSliceBytes : kAnyBytes;
  extent_cost_ = copy ? kExtentBytes : kAnyBytes / kStartedExtents;
}

void Slicer::skip(uint32_t count) {
  at_ += count;
  run_ = {run_.local + count, run_.remote + count, run_.count - count};
  if (run_.count == 0) pairs_.next(run_);
}

bool Slicer::can_go_by_index() const {
  const uint64_t length = local_shape_->uniform_length();
  if (length == 0 || length != remote_shape_->uniform_length() || length > slice_cost_ - extent_cost_) return false;
  const bool merges = mergeable_ && local_shape_->dense() && remote_shape_->dense();
  return !given_->local_ids().empty() || !merges || given_->count() < kMergedEnough * given_->run_count();
}

void Slicer::next_ids(Slice& slice) {
  const int32_t* local = given_->local_ids().data();
  const int32_t* remote = given_->remote_ids().data();
  const uint64_t length = local_shape_->uniform_length();
  const uint64_t count = given_->count();
  const bool dense = local_shape_->dense() && remote_shape_->dense();
  const size_t first = at_;
  uint64_t cost = 0;
  for (; at_ < count; ++at_) {
    const bool joins = dense && at_ > first && local[at_] == local[at_ - 1] + 1 && remote[at_] == remote[at_ - 1] + 1;
    cost += length + (joins ? 0 : extent_cost_);
    if (cost > slice_cost_) break;
    slice.merged += joins ? 0 : 1;
  }
  slice.local_ids = local + first;
  slice.remote_ids = remote + first;
  slice.descriptors = at_ - first;
}

// The same of runs.
void Slicer::write_ids(Slice& slice) {
  const uint64_t length = local_shape_->uniform_length();
  const bool dense = local_shape_->dense() && remote_shape_->dense();
  const uint64_t first = length + extent_cost_;
  const uint64_t each = dense ? length : first;
  uint64_t room = slice_cost_;
  slice.written.clear();
  while (!ended() && room >= first) {
    uint32_t count = run_.count;
    if (first + (count - 1) * each > room) count = 1 + static_cast<uint32_t>((room - first) / each);
    slice.written.add({run_.local, run_.remote, count});
    room -= first + (count - 1) * each;
    slice.merged += dense ? 1 : count;
    skip(count);
  }
  slice.descriptors = slice.written.count();
  slice.local_ids = slice.written.local();
  slice.remote_ids = slice.written.remote();
}

void Slicer::next(Slice& slice) {
  slice.extents.clear();
  slice.runs.clear();
  slice.descriptors = 0;
  slice.cut = false;
  slice.local_ids = nullptr;
  slice.remote_ids = nullptr;
  slice.merged = 0;
  if (by_index_) {
    if (given_->local_ids().empty()) write_ids(slice);
    else next_ids(slice);
    return;
  }
  uint64_t room = slice_cost_;
  while (!ended() && room > extent_cost_) {
    const auto here = local_.at(run_.local);
    const auto there = remote_.at(run_.remote);
    const uint64_t length = here.row.length;
    const bool joint = mergeable_ && here.row.stride == length && there.row.stride == length;
    // Never across rows: what follows may be another registration, and NIXL takes no descriptor that is in two of them.
    const uint32_t most = joint ? std::min({run_.count, here.left, there.left}) : 1;
    const uint64_t whole = most * length - offset_;
    uint64_t bytes = std::min(whole, room - extent_cost_);
    // A descriptor is cut only where it is longer than a slice.
    if (bytes < whole && length <= slice_cost_ - extent_cost_) bytes -= (offset_ + bytes) % length;
    if (bytes == 0) break;
    // Most extents are whole, and a division is as long as all the rest.
    const uint64_t end = offset_ + bytes;
    const uint32_t covered = bytes == whole ? most : static_cast<uint32_t>(end / length);
    const uint64_t left = bytes == whole ? 0 : end % length;
    slice.extents.push_back({here.row.address + here.within * here.row.stride + offset_,
                             there.row.address + there.within * there.row.stride + offset_, bytes, here.row.device,
                             there.row.device});
    slice.cut = slice.cut || offset_ != 0 || left != 0;
    slice.runs.push_back({run_.local, run_.remote, covered});
    slice.descriptors += covered;
    room -= std::min(room, bytes + extent_cost_);
    offset_ = left;
    skip(covered);
  }
  slice.merged = slice.extents.size();
}

}  // namespace kv::nixl
