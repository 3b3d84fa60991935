// A fake libnixl_capi.so for tests. All agents live in one process, and memcpy moves the data. It
// injects faults (see faults.h), and calls abort() where the addon breaks a rule of NIXL: two calls
// of one agent at once, a handle used after its release, memory deregistered in use.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "library/nixl_capi.h"

#define API(name) __attribute__((visibility("default"))) Status nixl_capi_##name
#define LOCKED const std::lock_guard lock(world_mutex)
#define ALONE(agent) const Call call(agent)

namespace kv::nixl::capi {

// Device memory is host memory here; only its type differs.
struct Descriptor {
  uintptr_t address;
  size_t length;
  uint64_t device;
  MemoryType type;
};
using Descriptors = std::vector<Descriptor>;
using Notifications = std::map<std::string, std::vector<std::string>>;

struct ParamsObject {
  // `key=value`, each after a space.
  std::string added;
  std::vector<std::pair<std::string, std::string>> pairs;
};
struct ParamIterObject {
  Params params;
  size_t at = 0;
};
struct QueryRespListObject {
  std::vector<bool> known;
};
struct MemListObject {
  std::vector<MemoryType> types;
};
struct BackendObject {
  std::string name;
};
struct StringListObject {
  std::vector<std::string> names{"UCX", "LIBFABRIC"};
};
struct OptArgsObject {
  std::set<std::string> backends;
  std::string message;
  bool notifies = false;
};
struct XferDlistObject {
  MemoryType type;
  Descriptors descriptors;
};
struct RegDlistObject {
  MemoryType type;
  Descriptors descriptors;
  std::vector<std::string> keys;
};
struct PreparedDlistObject {
  Descriptors descriptors;
  std::string remote;
  bool dropped = false;  // the peer it points to was dropped: it may only be released
};
struct NotifMapObject {
  Notifications notifications;
};
struct AgentObject {
  std::string name;
  bool captures_telemetry = false;
  std::thread::id thread = std::this_thread::get_id();
  std::atomic<bool> in_call = false;
  std::set<std::string> backends;
  // What each backend has registered, and all of it together.
  std::map<std::string, Descriptors> by_backend;
  Descriptors memory;
  std::map<std::string, Descriptors> remotes;
  std::set<PreparedDlistObject*> lists;
  int requests = 0;
  // Copies that were reported but not yet performed, by peer.
  std::map<std::string, std::vector<std::pair<Descriptor, Descriptor>>> late_copies;
  Notifications notifications;
};
struct RequestObject {
  std::vector<std::pair<Descriptor, Descriptor>> copies;  // from, to
  std::string remote;
  std::string message;
  bool notifies = false;
  bool writes = false;
  int polls = 0;
  int posts = 0;
  Status status = kInvalidState;
  bool released = false;
};

extern std::recursive_mutex world_mutex;
// All agents of the process, by name.
extern std::map<std::string, Agent> world;

// Aborts the process, since the addon has broken a rule.
[[noreturn]] void rule_broken(const char* rule);
// A call of an agent, until it returns. Aborts the process during another call, and counts those
// that other threads than the agent's make.
class Call {
 public:
  explicit Call(Agent agent);
  ~Call();
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

 private:
  Agent agent_;
};
// Whether a descriptor lies within a single range of memory.
bool is_within(const Descriptors& memory, const Descriptor& wanted);
// The memory types that a backend registers. LIBFABRIC has no GPU.
std::vector<MemoryType> memory_types_of(const std::string& backend);

// Delivers a notification.
Status deliver(const std::string& to, const std::string& from, const std::string& message);
// Completes a request: performs its copies, after late ones from the same peer. Fails if a fault
// says so.
Status complete(Agent agent, Request request);
// Fails a request with an error that belongs to another peer: its copies are performed before the
// next READ from its own peer.
Status fail_with_stray_error(Agent agent, Request request);

}  // namespace kv::nixl::capi
