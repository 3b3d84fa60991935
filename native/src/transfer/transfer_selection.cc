#include "transfer/transfer_selection.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>

#include "library/failure.h"

namespace kv::nixl {

namespace {

Failure invalid(const std::string& what) { return Failure("KV_TRANSFER_INVALID", what); }

void require_ids(const std::vector<int32_t>& ids, const DescriptorLayout& shape, const char* what) {
  const uint32_t count = shape.count();
  // Negative ones are large as unsigned numbers. Without a branch, so that the compiler makes it a few instructions for many ids.
  uint32_t worst = 0;
  for (const int32_t id : ids) worst |= static_cast<uint32_t>(static_cast<uint32_t>(id) >= count);
  if (worst == 0) return;
  for (size_t index = 0; index < ids.size(); ++index) {
    if (static_cast<uint32_t>(ids[index]) < count) continue;
    throw invalid(std::string(what) + "[" + std::to_string(index) + "] is " + std::to_string(ids[index]) + ", and the list has " +
                  std::to_string(count) + " descriptors");
  }
}

bool holds(const DescriptorLayout& shape, int64_t first, int64_t count) {
  return first >= 0 && first + count <= static_cast<int64_t>(shape.count());
}

// How far the runs reach into one of the lists: from the lowest index to one past the highest.
struct Reach {
  int64_t lowest = INT32_MAX;
  int64_t end = 0;

  void add(int64_t first, int64_t count) {
    lowest = std::min(lowest, first);
    end = std::max(end, first + count);
  }
};

}  // namespace

TransferSelection TransferSelection::of_ids(const int32_t* local, size_t local_count, const int32_t* remote, size_t remote_count,
                    const DescriptorLayout& local_shape, const DescriptorLayout& remote_shape) {
  if (local_count != remote_count || local_count == 0) {
    throw invalid(std::to_string(local_count) + " local ids and " + std::to_string(remote_count) +
                  " remote ids; a transfer needs as many of each, and one at least");
  }
  TransferSelection pairs;
  pairs.local_.assign(local, local + local_count);
  pairs.remote_.assign(remote, remote + remote_count);
  require_ids(pairs.local_, local_shape, "localIds");
  require_ids(pairs.remote_, remote_shape, "remoteIds");
  pairs.count_ = local_count;
  pairs.weigh(local_shape, remote_shape);
  return pairs;
}

TransferSelection TransferSelection::of_runs(std::vector<int32_t> runs, std::vector<int32_t> offsets, const DescriptorLayout& local_shape,
                     const DescriptorLayout& remote_shape) {
  if (runs.empty() || runs.size() % kRunNumbers != 0) {
    throw invalid("runs are rows of 3 numbers and at least one row; these are " + std::to_string(runs.size()) + " numbers");
  }
  if (offsets.empty() || offsets.size() % kOffsetNumbers != 0) {
    throw invalid("offsets are rows of 2 numbers and at least one row; these are " + std::to_string(offsets.size()) + " numbers");
  }
  TransferSelection pairs;
  pairs.runs_ = std::move(runs);
  pairs.offsets_ = std::move(offsets);
  const auto& rows = pairs.runs_;
  Reach local;
  Reach remote;
  uint64_t descriptors = 0;
  for (size_t at = 0; at < rows.size(); at += kRunNumbers) {
    if (rows[at + 2] < 1) throw invalid("run " + std::to_string(at / kRunNumbers) + " has " + std::to_string(rows[at + 2]) + " descriptors");
    local.add(rows[at], rows[at + 2]);
    remote.add(rows[at + 1], rows[at + 2]);
    descriptors += static_cast<uint32_t>(rows[at + 2]);
  }
  for (size_t at = 0; at < pairs.offsets_.size(); at += kOffsetNumbers) {
    const int64_t here = pairs.offsets_[at];
    const int64_t there = pairs.offsets_[at + 1];
    if (holds(local_shape, here + local.lowest, local.end - local.lowest) &&
        holds(remote_shape, there + remote.lowest, remote.end - remote.lowest)) {
      continue;
    }
    pairs.refuse_offset(here, there, local_shape, remote_shape);
  }
  pairs.count_ = descriptors * (pairs.offsets_.size() / kOffsetNumbers);
  pairs.weigh(local_shape, remote_shape);
  return pairs;
}

void TransferSelection::refuse_offset(int64_t here, int64_t there, const DescriptorLayout& local, const DescriptorLayout& remote) const {
  const auto require = [](size_t index, int64_t first, int64_t count, const DescriptorLayout& shape, const char* side) {
    if (holds(shape, first, count)) return;
    throw invalid("run " + std::to_string(index) + " names " + std::to_string(count) + " descriptors from " + std::to_string(first) +
                  " on of the " + side + " list, which has " + std::to_string(shape.count()));
  };
  for (size_t at = 0; at < runs_.size(); at += kRunNumbers) {
    require(at / kRunNumbers, here + runs_[at], runs_[at + 2], local, "local");
    require(at / kRunNumbers, there + runs_[at + 1], runs_[at + 2], remote, "remote");
  }
}

// The bytes of all pairs, each of which must have equal lengths.
void TransferSelection::weigh(const DescriptorLayout& local, const DescriptorLayout& remote) {
  if (local.uniform_length() != 0 && local.uniform_length() == remote.uniform_length()) {
    bytes_ = count_ * local.uniform_length();
    return;
  }
  DescriptorLayout::Reader locals(local);
  DescriptorLayout::Reader remotes(remote);
  Reader reader(*this);
  uint64_t pair = 0;
  for (Run run; reader.next(run);) {
    while (run.count > 0) {
      const auto here = locals.at(run.local);
      const auto there = remotes.at(run.remote);
      if (here.row.length != there.row.length) {
        throw invalid("pair " + std::to_string(pair) + ": local descriptor " + std::to_string(run.local) + " has " +
                      std::to_string(here.row.length) + " bytes, remote descriptor " + std::to_string(run.remote) + " has " +
                      std::to_string(there.row.length));
      }
      const uint32_t step = std::min({run.count, here.left, there.left});
      bytes_ += step * here.row.length;
      pair += step;
      run = {run.local + step, run.remote + step, run.count - step};
    }
  }
}

bool TransferSelection::Reader::next(Run& run) {
  const auto& runs = pairs_->runs_;
  if (!runs.empty()) {
    const auto& offsets = pairs_->offsets_;
    if (at_ == runs.size()) {
      at_ = 0;
      offset_ += kOffsetNumbers;
    }
    if (offset_ == offsets.size()) return false;
    run = {static_cast<uint32_t>(offsets[offset_] + runs[at_]), static_cast<uint32_t>(offsets[offset_ + 1] + runs[at_ + 1]),
           static_cast<uint32_t>(runs[at_ + 2])};
    at_ += kRunNumbers;
    return true;
  }
  const auto& local = pairs_->local_;
  const auto& remote = pairs_->remote_;
  if (at_ == local.size()) return false;
  const size_t first = at_++;
  while (at_ < local.size() && local[at_] == local[at_ - 1] + 1 && remote[at_] == remote[at_ - 1] + 1) ++at_;
  run = {static_cast<uint32_t>(local[first]), static_cast<uint32_t>(remote[first]), static_cast<uint32_t>(at_ - first)};
  return true;
}

}  // namespace kv::nixl
