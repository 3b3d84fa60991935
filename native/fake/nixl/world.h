// A stand-in for libnixl_capi.so, for tests: agents of one process, copies by memcpy, faults on demand, and an abort() wherever
// the addon breaks a rule of NIXL: another thread than the agent's, a handle used after its end, memory let go of in use.
#pragma once

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

namespace kv::nixl::capi {

// Memory of a device is ordinary memory here, of which only its type says that it is none.
struct Descriptor {
  uintptr_t address;
  size_t length;
  uint64_t device;
  MemoryType type;
};
using Descriptors = std::vector<Descriptor>;
using Inbox = std::map<std::string, std::vector<std::string>>;

struct ParamsObject {};
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
};
struct PreparedDlistObject {
  Descriptors descriptors;
  std::string remote;
  bool dropped = false;  // it points to memory of its peer that is known no more: good for a release
};
struct NotifMapObject {
  Inbox inbox;
};
struct AgentObject {
  std::string name;
  std::thread::id thread = std::this_thread::get_id();
  std::set<std::string> backends;
  Descriptors memory;
  std::map<std::string, Descriptors> remotes;
  std::set<PreparedDlistObject*> lists;
  int requests = 0;
  std::map<std::string, std::vector<std::pair<Descriptor, Descriptor>>> late;
  Inbox inbox;
};
struct RequestObject {
  std::vector<std::pair<Descriptor, Descriptor>> copies;  // from, to
  std::string remote;
  std::string message;
  bool notifies = false;
  bool writes = false;
  int polls = 0;
  Status status = kInvalidState;
  bool released = false;
};

extern std::recursive_mutex world_mutex;
// Every agent of the process, by name.
extern std::map<std::string, Agent> world;

// Ends the process: the addon has broken this rule.
[[noreturn]] void broken(const char* rule);
// Ends the process in a call from another thread than the agent's.
void own(Agent agent);
bool covered(const Descriptors& memory, const Descriptor& wanted);
// What a backend registers; nothing of LIBFABRIC's has a GPU.
std::vector<MemoryType> types_of(const std::string& backend);

Status deliver(const std::string& to, const std::string& from, const std::string& message);
// Copies what the request asks for, and what landed late before it; or fails on demand.
Status complete(Agent agent, Request request);
// An error that is another peer's: the copies land with the next that is read from this one.
Status stray(Agent agent, Request request);

}  // namespace kv::nixl::capi
