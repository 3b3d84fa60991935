// Ends the process cleanly although NIXL's libraries do not support it. There are two hazards in
// exit():
// 1. An agent's thread may be inside NIXL while NIXL's static destructors run.
// 2. Where the wheel's libnl-route-3 and the system's (through libibverbs) are both loaded, their
// destructors crash. So the agents' threads are stopped before exit() begins: when their
// environment ends, or by `stop_all_threads`, which JavaScript calls when the process exits. An
// exit handler stops threads that are left and, under hazard 2, ends the process with _exit and
// Node's status. No output is lost: on Linux Node writes to pipes and files synchronously.
#pragma once

#include <memory>

namespace kv::nixl {

// Something with a thread that the exit must wait for.
class StoppableThread {
 public:
  virtual ~StoppableThread() = default;
  // Asks the thread to release everything and end; returns at once. May be called from any thread,
  // and more than once.
  virtual void stop() = 0;
};

// Stops all registered threads and waits up to two seconds for their end. Returns whether all have
// ended.
bool stop_all_threads();

// Waits up to two seconds for the end of one thread that was asked to stop.
void await_thread_end(const StoppableThread* thread);

// Registers the exit handler so that it runs before the destructors of all libraries loaded so far.
// Call it again after more were loaded.
void install_exit_handler();

// Adds a thread to those that the exit stops and waits for.
void add_running_thread(std::shared_ptr<StoppableThread> thread);
// Removes a thread that is about to end.
void remove_running_thread(const StoppableThread* thread);

}  // namespace kv::nixl
