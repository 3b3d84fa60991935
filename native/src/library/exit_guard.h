// Ends the process cleanly despite two hazards of NIXL's libraries in exit():
// 1. An agent's thread may be inside NIXL while static destructors run.
// 2. If the wheel's libnl-route-3 and the system's (through libibverbs) are both loaded, their
//    destructors crash.
// Agents' threads therefore stop before exit(): when their environment ends, or by
// `stop_all_threads`. An exit handler stops the rest and, under hazard 2, ends the process with
// _exit and Node's status. No output is lost: on Linux Node writes to pipes and files
// synchronously.
#pragma once

#include "library/std_names.h"

namespace kv::nixl {

class StoppableThread {
 public:
  virtual ~StoppableThread() = default;
  // Asks the thread to end. From any thread, any number of times. Returns at once.
  virtual void stop() = 0;
};

// Waits up to 2 s. Returns whether all have ended.
bool stop_all_threads();

// Waits up to 2 s.
void await_thread_end(const StoppableThread* thread);

// The handler runs before the destructors of all libraries loaded so far. Call it again after
// loading more.
void install_exit_handler();

void add_running_thread(shared_ptr<StoppableThread> thread);
void remove_running_thread(const StoppableThread* thread);

}  // namespace kv::nixl
