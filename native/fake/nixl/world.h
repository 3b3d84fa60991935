// A fake libnixl_capi.so for tests. All agents live in one process, and memcpy moves the data. It
// calls abort() where the addon breaks a rule of NIXL.
#pragma once

#include <map>
#include <set>
#include <thread>

#include "library/nixl_capi.h"
#include "library/std_names.h"

// As in NIXL, no exception leaves a call: the caller may have another unwinder.
#define OR_EXCEPTION catch (...) { return kException; }
#define API(name) __attribute__((visibility("default"))) Status nixl_capi_##name
#define LOCKED const lock_guard lock(world_mutex)
#define ALONE(agent) const Call call(agent)

namespace kv::nixl::capi {

struct Descriptor {
  uintptr_t address;
  size_t length;
  uint64_t device;
  MemoryType type;
};
using Descriptors = vector<Descriptor>;
using Notifications = std::map<string, vector<string>>;

struct ParamsObject {
  // `key=value`, each after a space.
  string added;
};
struct MemListObject {
  vector<MemoryType> types;
};
struct BackendObject {
  // All handles of one backend share this, as in NIXL.
  const string* backend;
  string name;
};
struct OptArgsObject {
  std::set<string> backends;
  string message;
  bool notifies = false;
};
struct XferDlistObject {
  MemoryType type;
  Descriptors descriptors;
};
struct RegDlistObject {
  MemoryType type;
  Descriptors descriptors;
  vector<string> keys;
};
struct PreparedDlistObject {
  Descriptors descriptors;
  string remote;
  bool dropped = false;  // its peer was dropped: only a release is allowed
};
struct NotifMapObject {
  Notifications notifications;
};
struct AgentObject {
  string name;
  bool captures_telemetry = false;
  std::thread::id thread = std::this_thread::get_id();
  atomic<bool> in_call = false;
  std::set<string> backends;
  // Registered memory, by backend and all together.
  std::map<string, Descriptors> by_backend;
  Descriptors memory;
  std::map<string, Descriptors> remotes;
  std::set<PreparedDlistObject*> lists;
  int requests = 0;
  // Copies that count as done but are not performed yet, by peer.
  std::map<string, vector<std::pair<Descriptor, Descriptor>>> late_copies;
  Notifications notifications;
};
struct RequestObject {
  vector<std::pair<Descriptor, Descriptor>> copies;  // from, to
  string remote;
  string message;
  bool notifies = false;
  bool writes = false;
  int polls = 0;
  int posts = 0;
  Status status = kInvalidState;
  bool released = false;
};

extern std::recursive_mutex world_mutex;
extern std::map<string, Agent> world;

[[noreturn]] void rule_broken(const char* rule);
// Spans a call. Aborts if two overlap, and counts calls from other threads than the agent's.
class Call {
 public:
  explicit Call(Agent agent);
  ~Call();
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

 private:
  Agent agent_;
};
bool is_within(const Descriptors& memory, const Descriptor& wanted);
// LIBFABRIC has no GPU memory here.
vector<MemoryType> memory_types_of(const string& backend);

Status deliver(const string& to, const string& from, const string& message);
// Performs late copies of the peer, then the request's. Fails if a fault says so.
Status complete(Agent agent, Request request);
// Fails with another peer's error. Its copies land before the next READ from its own peer.
Status fail_with_stray_error(Agent agent, Request request);

}  // namespace kv::nixl::capi
