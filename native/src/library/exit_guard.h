// Ends the process cleanly although NIXL's libraries do not.
//
// Two hazards lie in exit(): an agent's thread may still be inside NIXL while NIXL's destructors run; and where the wheel's
// libnl-route-3 meets the system's (through libibverbs), their destructors crash. So threads are stopped before exit()
// begins: by the environment's end, or by `stop_all`, which JavaScript calls as the process exits. What remains is a
// handler of exit() itself: it stops threads that were missed and, where the second hazard exists, leaves by _exit with
// the status Node chose. Node has written its output by then: its pipes and files are synchronous on Linux.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <memory>

namespace kv::nixl {

// Something with a thread that the exit must wait for.
class Stoppable {
 public:
  virtual ~Stoppable() = default;
  // Asks the thread to let go of everything and end. Called from any thread, more than once.
  virtual void stop() = 0;
};

// Stops all threads and waits for them, for two seconds at most. True if none is left.
bool stop_all();

// Waits for one thread that was told to stop, for two seconds at most.
void await_end(const Stoppable* thread);

// Puts the handler before every destructor registered so far; call it again after loading more libraries.
void guard_exit();

// Enters a thread into the list of those that the exit waits for, and takes it out again at the thread's end.
void enter_running(std::shared_ptr<Stoppable> thread);
void leave_running(const Stoppable* thread);

}  // namespace kv::nixl
