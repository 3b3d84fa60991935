#pragma once

#include <algorithm>

#include "library/failure.h"
#include "memory/descriptor_layout.h"

namespace kv::nixl {

// `count` descriptors from `local` on, paired with as many from `remote` on.
struct Run {
  uint32_t local;
  uint32_t remote;
  uint32_t count;
};

// Per run from JavaScript: local, remote, count.
inline constexpr size_t kRunNumbers = 3;
// For the local list, for the remote list.
inline constexpr size_t kOffsetNumbers = 2;

// Pairs of indices: one by one (ids), or runs that repeat at every offset. Immutable once made.
class TransferSelection {
 public:
  TransferSelection() = default;
  // Throws KV_TRANSFER_INVALID, naming the index and the list.
  static TransferSelection of_ids(vector<int32_t> local, vector<int32_t> remote,
                                  const DescriptorLayout& local_layout,
                                  const DescriptorLayout& remote_layout) {
    if (local.size() != remote.size() || local.empty()) {
      throw invalid(to_string(local.size()) + " local ids and " + to_string(remote.size()) +
                    " remote ids; a transfer needs the same number of each, and at least one");
    }
    TransferSelection selection;
    selection.local_ = std::move(local);
    selection.remote_ = std::move(remote);
    require_ids(selection.local_, local_layout, "localIds");
    require_ids(selection.remote_, remote_layout, "remoteIds");
    selection.count_ = selection.local_.size();
    selection.measure_bytes(local_layout, remote_layout);
    return selection;
  }
  // Throws KV_TRANSFER_INVALID, naming the run and the list.
  static TransferSelection of_runs(vector<int32_t> runs, vector<int32_t> offsets,
                                   const DescriptorLayout& local_layout,
                                   const DescriptorLayout& remote_layout) {
    if (runs.empty() || runs.size() % kRunNumbers != 0) {
      throw invalid("runs are rows of 3 numbers and at least one row; these are " +
                    to_string(runs.size()) + " numbers");
    }
    if (offsets.empty() || offsets.size() % kOffsetNumbers != 0) {
      throw invalid("offsets are rows of 2 numbers and at least one row; these are " +
                    to_string(offsets.size()) + " numbers");
    }
    TransferSelection selection;
    selection.runs_ = std::move(runs);
    selection.offsets_ = std::move(offsets);
    const auto& rows = selection.runs_;
    IndexRange local;
    IndexRange remote;
    uint64_t descriptors = 0;
    for (size_t at = 0; at < rows.size(); at += kRunNumbers) {
      if (rows[at + 2] < 1)
        throw invalid("run " + to_string(at / kRunNumbers) + " has " + to_string(rows[at + 2]) +
                      " descriptors");
      local.add(rows[at], rows[at + 2]);
      remote.add(rows[at + 1], rows[at + 2]);
      descriptors += static_cast<uint32_t>(rows[at + 2]);
    }
    // Compares each offset with the range of all runs: runs + offsets steps, not their product.
    for (size_t at = 0; at < selection.offsets_.size(); at += kOffsetNumbers) {
      const int64_t local_offset = selection.offsets_[at];
      const int64_t remote_offset = selection.offsets_[at + 1];
      if (in_range(local_layout, local_offset + local.lowest, local.end - local.lowest) &&
          in_range(remote_layout, remote_offset + remote.lowest, remote.end - remote.lowest)) {
        continue;
      }
      selection.throw_out_of_range(local_offset, remote_offset, local_layout, remote_layout);
    }
    selection.count_ = descriptors * (selection.offsets_.size() / kOffsetNumbers);
    selection.measure_bytes(local_layout, remote_layout);
    return selection;
  }

  uint64_t count() const { return count_; }
  uint64_t bytes() const { return bytes_; }
  // Empty if runs were given.
  const vector<int32_t>& local_ids() const { return local_; }
  const vector<int32_t>& remote_ids() const { return remote_; }
  // Each run counts once per offset. 0 if ids were given.
  uint64_t run_count() const {
    return runs_.size() / kRunNumbers * (offsets_.size() / kOffsetNumbers);
  }

  class Cursor {
   public:
    explicit Cursor(const TransferSelection& selection) : selection_(&selection) {}
    // Returns false at the end. Consecutive ids are one run.
    bool next(Run& run) {
      const auto& runs = selection_->runs_;
      if (!runs.empty()) {
        const auto& offsets = selection_->offsets_;
        if (at_ == runs.size()) {
          at_ = 0;
          offset_ += kOffsetNumbers;
        }
        if (offset_ == offsets.size()) return false;
        run = {static_cast<uint32_t>(offsets[offset_] + runs[at_]),
               static_cast<uint32_t>(offsets[offset_ + 1] + runs[at_ + 1]),
               static_cast<uint32_t>(runs[at_ + 2])};
        at_ += kRunNumbers;
        return true;
      }
      const auto& local = selection_->local_;
      const auto& remote = selection_->remote_;
      if (at_ == local.size()) return false;
      const size_t first = at_++;
      while (at_ < local.size() && local[at_] == local[at_ - 1] + 1 &&
             remote[at_] == remote[at_ - 1] + 1)
        ++at_;
      run = {static_cast<uint32_t>(local[first]), static_cast<uint32_t>(remote[first]),
             static_cast<uint32_t>(at_ - first)};
      return true;
    }

   private:
    const TransferSelection* selection_;
    size_t at_ = 0;
    size_t offset_ = 0;
  };

 private:
  static Failure invalid(const string& message) { return Failure("KV_TRANSFER_INVALID", message); }

  static void require_ids(const vector<int32_t>& ids, const DescriptorLayout& layout,
                          const char* name) {
    const uint32_t count = layout.count();
    // Negative ids are too large as unsigned numbers. Without branches the compiler vectorises the
    // loop.
    uint32_t any_invalid = 0;
    for (const int32_t id : ids)
      any_invalid |= static_cast<uint32_t>(static_cast<uint32_t>(id) >= count);
    if (any_invalid == 0) return;
    for (size_t index = 0; index < ids.size(); ++index) {
      if (static_cast<uint32_t>(ids[index]) < count) continue;
      throw invalid(string(name) + "[" + to_string(index) + "] is " + to_string(ids[index]) +
                    ", and the list has " + to_string(count) + " descriptors");
    }
  }

  static bool in_range(const DescriptorLayout& layout, int64_t first, int64_t count) {
    return first >= 0 && first + count <= static_cast<int64_t>(layout.count());
  }

  struct IndexRange {
    int64_t lowest = INT32_MAX;
    int64_t end = 0;

    void add(int64_t first, int64_t count) {
      lowest = std::min(lowest, first);
      end = std::max(end, first + count);
    }
  };

  // Throws for a pair of descriptors that differ in length.
  void measure_bytes(const DescriptorLayout& local, const DescriptorLayout& remote) {
    if (local.uniform_length() != 0 && local.uniform_length() == remote.uniform_length()) {
      bytes_ = count_ * local.uniform_length();
      return;
    }
    DescriptorLayout::Cursor locals(local);
    DescriptorLayout::Cursor remotes(remote);
    Cursor cursor(*this);
    uint64_t pair = 0;
    for (Run run; cursor.next(run);) {
      while (run.count > 0) {
        const auto here = locals.at(run.local);
        const auto there = remotes.at(run.remote);
        if (here.row.length != there.row.length) {
          throw invalid("pair " + to_string(pair) + ": local descriptor " + to_string(run.local) +
                        " has " + to_string(here.row.length) + " bytes, remote descriptor " +
                        to_string(run.remote) + " has " + to_string(there.row.length));
        }
        const uint32_t step = std::min({run.count, here.left_in_row, there.left_in_row});
        bytes_ += step * here.row.length;
        pair += step;
        run = {run.local + step, run.remote + step, run.count - step};
      }
    }
  }
  void throw_out_of_range(int64_t local_offset, int64_t remote_offset,
                          const DescriptorLayout& local, const DescriptorLayout& remote) const {
    const auto require = [](size_t run, int64_t first, int64_t count,
                            const DescriptorLayout& layout, const char* side) {
      if (in_range(layout, first, count)) return;
      throw invalid("run " + to_string(run) + " covers " + to_string(count) + " descriptors from " +
                    to_string(first) + " on of the " + side + " list, which has " +
                    to_string(layout.count()));
    };
    for (size_t at = 0; at < runs_.size(); at += kRunNumbers) {
      require(at / kRunNumbers, local_offset + runs_[at], runs_[at + 2], local, "local");
      require(at / kRunNumbers, remote_offset + runs_[at + 1], runs_[at + 2], remote, "remote");
    }
  }

  // Either both lists of ids, or runs and offsets.
  vector<int32_t> local_;
  vector<int32_t> remote_;
  vector<int32_t> runs_;
  vector<int32_t> offsets_;
  uint64_t count_ = 0;
  uint64_t bytes_ = 0;
};

}  // namespace kv::nixl
