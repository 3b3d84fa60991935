#pragma once

#include <stdlib.h>

#include <array>

#include "library/std_names.h"

namespace kv::nixl {

// Mends a library's fault by replacing calls when the library is loaded. Knows whether it took
// hold. KV_NIXL_REPAIRS_OFF switches it off.
class Repair {
 public:
  enum class State { waiting, holds, off, failed };

  explicit Repair(const char* name) : name(name) {}

  // For the switch and the doctor.
  const char* const name;

  // False if KV_NIXL_REPAIRS_OFF names it: names separated by commas, or `all`.
  bool wanted() {
    const char* const variable = getenv("KV_NIXL_REPAIRS_OFF");
    const string off = variable == nullptr ? "," : "," + string(variable) + ",";
    if (off != ",all," && off.find("," + string(name) + ",") == string::npos) return true;
    state_ = State::off;
    return false;
  }
  void held() { state_ = State::holds; }
  // `why` must be a literal.
  void failed(const char* why) {
    why_ = why;
    if (state_.exchange(State::failed) != State::failed) untold_ = true;
  }

  State state() const { return state_; }
  // Empty unless it failed.
  const char* why() const { return state_ == State::failed ? why_.load() : ""; }
  // True once after a failure.
  bool take_failure() { return untold_.load(std::memory_order_relaxed) && untold_.exchange(false); }

 private:
  atomic<State> state_{State::waiting};
  atomic<const char*> why_{""};
  atomic<bool> untold_{false};
};

// UCX ends its listener at any error of accept(), see descriptors.h.
inline Repair ucx_listener{"ucx-listener"};
// UCX aborts the process over an answer to a dead peer, see lost_answers.h.
inline Repair ucx_lost_answers{"ucx-lost-answers"};
// NIXL repeats libfabric's calls for ever, see bounded_calls.h.
inline Repair libfabric_endless_calls{"libfabric-endless-calls"};

inline std::array<Repair*, 3> all_repairs() {
  return {&ucx_listener, &ucx_lost_answers, &libfabric_endless_calls};
}

}  // namespace kv::nixl
