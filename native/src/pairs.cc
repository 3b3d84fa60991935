#include "pairs.h"

#include <algorithm>
#include <string>

#include "failure.h"

namespace kv::nixl {

namespace {

Failure invalid(const std::string& what) { return Failure("KV_TRANSFER_INVALID", what); }

void require_ids(const std::vector<int32_t>& ids, const Shape& shape, const char* what) {
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

void require_run(int32_t first, int32_t count, const Shape& shape, size_t index, const char* what) {
  if (first >= 0 && static_cast<int64_t>(first) + count <= static_cast<int64_t>(shape.count())) return;
  throw invalid("run " + std::to_string(index) + " names " + std::to_string(count) + " descriptors from " + std::to_string(first) +
                " on of the " + what + " list, which has " + std::to_string(shape.count()));
}

}  // namespace

Pairs Pairs::of_ids(const int32_t* local, size_t local_count, const int32_t* remote, size_t remote_count,
                    const Shape& local_shape, const Shape& remote_shape) {
  if (local_count != remote_count || local_count == 0) {
    throw invalid(std::to_string(local_count) + " local ids and " + std::to_string(remote_count) +
                  " remote ids; a transfer needs as many of each, and one at least");
  }
  Pairs pairs;
  pairs.local_.assign(local, local + local_count);
  pairs.remote_.assign(remote, remote + remote_count);
  require_ids(pairs.local_, local_shape, "localIds");
  require_ids(pairs.remote_, remote_shape, "remoteIds");
  pairs.count_ = local_count;
  pairs.weigh(local_shape, remote_shape);
  return pairs;
}

Pairs Pairs::of_runs(const int32_t* numbers, size_t count, const Shape& local_shape, const Shape& remote_shape) {
  if (count == 0 || count % kRunNumbers != 0) {
    throw invalid("runs are rows of 3 numbers and at least one row; these are " + std::to_string(count) + " numbers");
  }
  Pairs pairs;
  pairs.runs_.assign(numbers, numbers + count);
  for (size_t index = 0; index < count / kRunNumbers; ++index) {
    const int32_t* run = pairs.runs_.data() + index * kRunNumbers;
    if (run[2] < 1) throw invalid("run " + std::to_string(index) + " has " + std::to_string(run[2]) + " descriptors");
    require_run(run[0], run[2], local_shape, index, "local");
    require_run(run[1], run[2], remote_shape, index, "remote");
    pairs.count_ += static_cast<uint32_t>(run[2]);
  }
  pairs.weigh(local_shape, remote_shape);
  return pairs;
}

// The bytes of all pairs, each of which must have equal lengths.
void Pairs::weigh(const Shape& local, const Shape& remote) {
  if (local.uniform_length() != 0 && local.uniform_length() == remote.uniform_length()) {
    bytes_ = count_ * local.uniform_length();
    return;
  }
  Shape::Reader locals(local);
  Shape::Reader remotes(remote);
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

bool Pairs::Reader::next(Run& run) {
  const auto& runs = pairs_->runs_;
  if (!runs.empty()) {
    if (at_ == runs.size()) return false;
    run = {static_cast<uint32_t>(runs[at_]), static_cast<uint32_t>(runs[at_ + 1]), static_cast<uint32_t>(runs[at_ + 2])};
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
