#pragma once

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
  static TransferSelection of_ids(vector<int32_t> local, vector<int32_t> remote, const DescriptorLayout& local_layout,
                                  const DescriptorLayout& remote_layout);
  // Throws KV_TRANSFER_INVALID, naming the run and the list.
  static TransferSelection of_runs(vector<int32_t> runs, vector<int32_t> offsets, const DescriptorLayout& local_layout,
                                   const DescriptorLayout& remote_layout);

  uint64_t count() const { return count_; }
  uint64_t bytes() const { return bytes_; }
  // Empty if runs were given.
  const vector<int32_t>& local_ids() const { return local_; }
  const vector<int32_t>& remote_ids() const { return remote_; }
  // Each run counts once per offset. 0 if ids were given.
  uint64_t run_count() const { return runs_.size() / kRunNumbers * (offsets_.size() / kOffsetNumbers); }

  class Cursor {
   public:
    explicit Cursor(const TransferSelection& selection) : selection_(&selection) {}
    // Returns false at the end. Consecutive ids are one run.
    bool next(Run& run);

   private:
    const TransferSelection* selection_;
    size_t at_ = 0;
    size_t offset_ = 0;
  };

 private:
  void measure_bytes(const DescriptorLayout& local, const DescriptorLayout& remote);
  void throw_out_of_range(int64_t local_offset, int64_t remote_offset, const DescriptorLayout& local, const DescriptorLayout& remote) const;

  // Either both lists of ids, or runs and offsets.
  vector<int32_t> local_;
  vector<int32_t> remote_;
  vector<int32_t> runs_;
  vector<int32_t> offsets_;
  uint64_t count_ = 0;
  uint64_t bytes_ = 0;
};

}  // namespace kv::nixl
