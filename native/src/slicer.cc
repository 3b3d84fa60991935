#include "slicer.h"

#include <algorithm>

namespace kv::nixl {

namespace {

// A slice is what NIXL copies in one post where the post is the copy: 1 to 3 ms by these bounds. An extent is one copy to NIXL, which
// takes 3 to 6 us however short it is: as long as 16 KiB more.
constexpr uint64_t kSliceBytes = 8ull << 20;
constexpr uint64_t kExtentBytes = 16384;

}  // namespace

Slicer::Slicer(const Pairs& pairs, const List& local, const List& remote)
    : pairs_(pairs), local_(local.shape), remote_(remote.shape), mergeable_(local.mergeable && remote.mergeable) {
  pairs_.next(run_);
}

void Slicer::skip(uint32_t count) {
  run_ = {run_.local + count, run_.remote + count, run_.count - count};
  if (run_.count == 0) pairs_.next(run_);
}

void Slicer::next(Slice& slice) {
  slice.extents.clear();
  slice.runs.clear();
  slice.descriptors = 0;
  slice.cut = false;
  uint64_t room = kSliceBytes;
  while (!ended() && room > kExtentBytes) {
    const auto here = local_.at(run_.local);
    const auto there = remote_.at(run_.remote);
    const uint64_t length = here.row.length;
    const bool joint = mergeable_ && here.row.stride == length && there.row.stride == length;
    // Never across rows: what follows may be another registration, and NIXL takes no descriptor that is in two of them.
    const uint32_t most = joint ? std::min({run_.count, here.left, there.left}) : 1;
    const uint64_t whole = most * length - offset_;
    uint64_t bytes = std::min(whole, room - kExtentBytes);
    // A descriptor is cut only where it is longer than a slice.
    if (bytes < whole && length <= kSliceBytes - kExtentBytes) bytes -= (offset_ + bytes) % length;
    if (bytes == 0) break;
    const uint64_t end = offset_ + bytes;
    const auto covered = static_cast<uint32_t>(end / length);
    slice.extents.push_back({here.row.address + here.within * here.row.stride + offset_,
                             there.row.address + there.within * there.row.stride + offset_, bytes, here.row.device,
                             there.row.device});
    slice.cut = slice.cut || offset_ != 0 || end % length != 0;
    slice.runs.push_back({run_.local, run_.remote, covered});
    slice.descriptors += covered;
    room -= std::min(room, bytes + kExtentBytes);
    offset_ = end % length;
    skip(covered);
  }
}

}  // namespace kv::nixl
