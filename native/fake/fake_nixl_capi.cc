// A stand-in for libnixl_capi.so, for tests: agents of one process, copies by memcpy, faults on demand, and an abort() wherever
// the addon breaks a rule of NIXL: another thread than the agent's, a handle used after its end, memory let go of in use.
//
// Faults are read from the environment at each call:
//   FAKE_NIXL_POLLS=n             a post starts the copy, and the n-th look at it finds it done; 0, the default: done at once
//   FAKE_NIXL_HOLD=1              a post only starts the copy, which waits until this is 0
//   FAKE_NIXL_FAIL_POST=n         the n-th post from now fails; FAKE_NIXL_FAIL_STATUS=n likewise at its completion
//   FAKE_NIXL_REFUSE_RELEASE=n    the next n releases are refused
//   FAKE_NIXL_FAIL_NOTIFICATION=1 notifications cannot be sent
//   FAKE_NIXL_LATE_WRITES=1       a WRITE is done before its bytes land; they do when something is read from that peer
//   FAKE_NIXL_STRAY_ERRORS=n      the next n posts and looks, at whatever, are given an error that is another peer's: what they are
//                                 about goes on unseen, and lands before what is read later from that peer; metadata is refused likewise
//   FAKE_NIXL_ENDPOINT=port       local metadata is of LIBFABRIC, and names that port of 127.0.0.1
#include <arpa/inet.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "../src/nixl_capi.h"

namespace kv::nixl::capi {

struct Descriptor {
  uintptr_t address;
  size_t length;
  uint64_t device;
};
using Descriptors = std::vector<Descriptor>;
using Inbox = std::map<std::string, std::vector<std::string>>;

struct ParamsObject {};
struct MemListObject {};
struct BackendObject {};
struct StringListObject {
  std::vector<std::string> names{"UCX", "LIBFABRIC"};
};
struct OptArgsObject {
  std::string message;
  bool notifies = false;
};
struct XferDlistObject {
  Descriptors descriptors;
};
struct RegDlistObject {
  Descriptors descriptors;
};
struct PreparedDlistObject {
  Descriptors descriptors;
  std::string remote;
};
struct NotifMapObject {
  Inbox inbox;
};
struct AgentObject {
  std::string name;
  std::thread::id thread = std::this_thread::get_id();
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

namespace {

std::recursive_mutex world_mutex;
std::map<std::string, Agent> world;

[[noreturn]] void broken(const char* rule) {
  fprintf(stderr, "fake NIXL: %s\n", rule);
  abort();
}

void own(Agent agent) {
  if (agent->thread != std::this_thread::get_id()) broken("a call from another thread than the agent's");
}

int setting(const char* name) {
  const char* value = getenv(name);
  return value == nullptr ? 0 : atoi(value);
}

// Counts the setting down; true when it reaches its end.
bool nth(const char* name) {
  const int left = setting(name);
  if (left <= 0) return false;
  setenv(name, std::to_string(left - 1).c_str(), 1);
  return left == 1;
}

// The same for each until the end.
bool one_of(const char* name) {
  const int left = setting(name);
  if (left > 0) setenv(name, std::to_string(left - 1).c_str(), 1);
  return left > 0;
}

bool covered(const Descriptors& memory, const Descriptor& wanted) {
  for (const Descriptor& known : memory) {
    if (wanted.address >= known.address && wanted.address + wanted.length <= known.address + known.length) return true;
  }
  return false;
}

void put(std::string& out, const std::string& tag, const std::string& value) {
  const uint64_t length = value.size();
  out += tag + std::string(reinterpret_cast<const char*>(&length), sizeof(length)) + value + "|";
}

template <typename T>
std::string raw(T value) {
  return std::string(reinterpret_cast<const char*>(&value), sizeof(value));
}

std::string take(const std::string& in, size_t& at, const std::string& tag) {
  uint64_t length = 0;
  memcpy(&length, in.data() + at + tag.size(), sizeof(length));
  at += tag.size() + sizeof(length);
  const std::string value = in.substr(at, length);
  at += length + 1;
  return value;
}

// What a backend of LIBFABRIC tells of how to reach it.
std::string endpoint(int port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return "dest_data_ep_0" + raw<uint64_t>(sizeof(address)) + raw(address);
}

Status deliver(const std::string& to, const std::string& from, const std::string& message) {
  if (setting("FAKE_NIXL_FAIL_NOTIFICATION") != 0) return kBackendError;
  const auto agent = world.find(to);
  if (agent == world.end()) return kBackendError;
  agent->second->inbox[from].push_back(message);
  return kSuccess;
}

Status complete(Agent agent, Request request) {
  if (nth("FAKE_NIXL_FAIL_STATUS") || !world.contains(request->remote)) return request->status = kBackendError;
  auto& late = agent->late[request->remote];
  if (request->writes && setting("FAKE_NIXL_LATE_WRITES") != 0) {
    late.insert(late.end(), request->copies.begin(), request->copies.end());
    request->copies.clear();
  } else {
    request->copies.insert(request->copies.begin(), late.begin(), late.end());
    late.clear();
  }
  for (const auto& [from, to] : request->copies) {
    memcpy(reinterpret_cast<void*>(to.address), reinterpret_cast<const void*>(from.address), from.length);
  }
  if (request->notifies) deliver(request->remote, agent->name, request->message);
  return request->status = kSuccess;
}

Status stray(Agent agent, Request request) {
  auto& late = agent->late[request->remote];
  late.insert(late.end(), request->copies.begin(), request->copies.end());
  return request->status = kBackendError;
}

}  // namespace

extern "C" {
#define API(name) __attribute__((visibility("default"))) Status nixl_capi_##name
#define LOCKED const std::lock_guard lock(world_mutex)

API(create_configured_agent)(const char* name, const AgentConfig* config, Agent* out) {
  LOCKED;
  if (config->progress_thread || config->thread_sync != ThreadSync::none) broken("the addon asks for no thread and no locks");
  if (world.contains(name)) return kBackendError;
  *out = new AgentObject{.name = name};
  world[name] = *out;
  return kSuccess;
}
API(destroy_agent)(Agent agent) {
  LOCKED;
  own(agent);
  if (!agent->lists.empty() || agent->requests != 0) broken("an agent destroyed before its lists and requests");
  world.erase(agent->name);
  delete agent;
  return kSuccess;
}
API(get_local_md)(Agent agent, void** data, size_t* length) {
  LOCKED;
  own(agent);
  std::string out = "nixlSerDes|";
  put(out, "Agent", agent->name);
  put(out, "Conns", raw<uint64_t>(1));
  const int port = setting("FAKE_NIXL_ENDPOINT");
  const std::string backend = port > 0 ? "LIBFABRIC" : "UCX";
  put(out, "t", backend);
  put(out, "c", port > 0 ? endpoint(port) : raw(agent));
  put(out, "", "MemSection");
  put(out, "nixlSecElms", raw<uint64_t>(agent->memory.empty() ? 0 : 1));
  if (!agent->memory.empty()) {
    put(out, "bknd", backend);
    put(out, "nixlDList", "nixlSDList");
    put(out, "t", raw<int>(0));
    put(out, "n", raw<uint64_t>(agent->memory.size()));
    for (const Descriptor& memory : agent->memory) put(out, "", raw(memory));
  }
  *data = malloc(out.size());
  *length = out.size();
  memcpy(*data, out.data(), out.size());
  return kSuccess;
}
API(load_remote_md)(Agent agent, const void* data, size_t length, char** name) {
  LOCKED;
  own(agent);
  if (one_of("FAKE_NIXL_STRAY_ERRORS")) return kBackendError;
  const std::string in(static_cast<const char*>(data), length);
  size_t at = strlen("nixlSerDes|");
  const std::string remote = take(in, at, "Agent");
  for (const char* tag : {"Conns", "t", "c", "", "nixlSecElms"}) take(in, at, tag);
  Descriptors memory;
  if (at < in.size()) {
    for (const char* tag : {"bknd", "nixlDList", "t", "n"}) take(in, at, tag);
    while (at < in.size()) {
      Descriptor descriptor;
      memcpy(&descriptor, take(in, at, "").data(), sizeof(descriptor));
      memory.push_back(descriptor);
    }
  }
  agent->remotes[remote] = memory;
  *name = strdup(remote.c_str());
  return kSuccess;
}
API(invalidate_remote_md)(Agent agent, const char* name) {
  LOCKED;
  own(agent);
  for (const PreparedDlist list : agent->lists) {
    if (list->remote == name) broken("a peer forgotten before its lists");
  }
  return agent->remotes.erase(name) > 0 ? kSuccess : kNotFound;
}
API(get_available_plugins)(Agent agent, StringList* out) {
  own(agent);
  *out = new StringListObject;
  return kSuccess;
}
API(destroy_string_list)(StringList list) {
  delete list;
  return kSuccess;
}
API(string_list_size)(StringList list, size_t* out) {
  *out = list->names.size();
  return kSuccess;
}
API(string_list_get)(StringList list, size_t index, const char** out) {
  *out = list->names.at(index).c_str();
  return kSuccess;
}
API(get_plugin_params)(Agent agent, const char* plugin, MemList* types, Params* out) {
  own(agent);
  if (strcmp(plugin, "UCX") != 0 && strcmp(plugin, "LIBFABRIC") != 0) return kBackendError;
  *types = new MemListObject;
  *out = new ParamsObject;
  return kSuccess;
}
API(destroy_mem_list)(MemList list) {
  delete list;
  return kSuccess;
}
API(destroy_params)(Params params) {
  delete params;
  return kSuccess;
}
API(params_add)(Params, const char*, const char*) { return kSuccess; }
API(create_backend)(Agent agent, const char*, Params, Backend* out) {
  own(agent);
  *out = new BackendObject;
  return kSuccess;
}
API(destroy_backend)(Backend backend) {
  delete backend;
  return kSuccess;
}
API(create_opt_args)(OptArgs* out) {
  *out = new OptArgsObject;
  return kSuccess;
}
API(destroy_opt_args)(OptArgs args) {
  delete args;
  return kSuccess;
}
API(opt_args_set_notif_msg)(OptArgs args, const void* data, size_t length) {
  args->message.assign(static_cast<const char*>(data), length);
  return kSuccess;
}
API(opt_args_set_has_notif)(OptArgs args, bool has) {
  args->notifies = has;
  return kSuccess;
}
API(create_reg_dlist)(MemoryType, RegDlist* out) {
  *out = new RegDlistObject;
  return kSuccess;
}
API(destroy_reg_dlist)(RegDlist list) {
  delete list;
  return kSuccess;
}
API(reg_dlist_add_desc)(RegDlist list, uintptr_t address, size_t length, uint64_t device, const void*, size_t) {
  list->descriptors.push_back({address, length, device});
  return kSuccess;
}
API(register_mem)(Agent agent, RegDlist list, OptArgs) {
  LOCKED;
  own(agent);
  for (const Descriptor& descriptor : list->descriptors) {
    if (covered(agent->memory, descriptor)) broken("memory registered twice");
    agent->memory.push_back(descriptor);
  }
  return kSuccess;
}
API(deregister_mem)(Agent agent, RegDlist list, OptArgs) {
  LOCKED;
  own(agent);
  for (const PreparedDlist prepared : agent->lists) {
    for (const Descriptor& descriptor : prepared->descriptors) {
      if (prepared->remote.empty() && covered(list->descriptors, descriptor)) broken("memory let go of under a prepared list");
    }
  }
  std::erase_if(agent->memory, [&](const Descriptor& known) { return known.address == list->descriptors.front().address; });
  return kSuccess;
}
API(create_xfer_dlist)(MemoryType, XferDlist* out) {
  *out = new XferDlistObject;
  return kSuccess;
}
API(destroy_xfer_dlist)(XferDlist list) {
  delete list;
  return kSuccess;
}
API(xfer_dlist_add_desc)(XferDlist list, uintptr_t address, size_t length, uint64_t device) {
  list->descriptors.push_back({address, length, device});
  return kSuccess;
}
API(xfer_dlist_clear)(XferDlist list) {
  list->descriptors.clear();
  return kSuccess;
}
API(prep_xfer_dlist)(Agent agent, const char* name, XferDlist list, PreparedDlist* out, OptArgs) {
  LOCKED;
  own(agent);
  if (*name != '\0' && !agent->remotes.contains(name)) return kNotFound;
  const Descriptors& memory = *name == '\0' ? agent->memory : agent->remotes[name];
  for (const Descriptor& descriptor : list->descriptors) {
    if (!covered(memory, descriptor)) return kNotFound;
  }
  *out = new PreparedDlistObject{list->descriptors, name};
  agent->lists.insert(*out);
  return kSuccess;
}
API(release_xfer_dlist_handle)(Agent agent, PreparedDlist list) {
  LOCKED;
  own(agent);
  if (agent->lists.erase(list) == 0) broken("a list released twice");
  delete list;
  return kSuccess;
}
API(make_xfer_req)(Agent agent, Operation operation, PreparedDlist local, const int* local_ids, size_t count,
                   PreparedDlist remote, const int* remote_ids, size_t remote_count, Request* out, OptArgs) {
  LOCKED;
  own(agent);
  if (!agent->lists.contains(local) || !agent->lists.contains(remote)) broken("a request of lists that are gone");
  if (count == 0 || count != remote_count) broken("a request of no descriptors, or of unequal numbers");
  auto* request = new RequestObject;
  for (size_t index = 0; index < count; ++index) {
    const Descriptor& here = local->descriptors.at(static_cast<size_t>(local_ids[index]));
    const Descriptor& there = remote->descriptors.at(static_cast<size_t>(remote_ids[index]));
    if (here.length != there.length) broken("a pair of unequal lengths");
    request->copies.emplace_back(operation == Operation::read ? there : here, operation == Operation::read ? here : there);
  }
  request->remote = remote->remote;
  request->writes = operation == Operation::write;
  ++agent->requests;
  *out = request;
  return kSuccess;
}
API(create_xfer_req)(Agent agent, Operation operation, XferDlist local, XferDlist remote, const char* name, Request* out, OptArgs) {
  LOCKED;
  own(agent);
  const size_t count = local->descriptors.size();
  if (count == 0 || count != remote->descriptors.size()) broken("a request of no descriptors, or of unequal numbers");
  if (!agent->remotes.contains(name)) return kNotFound;
  auto* request = new RequestObject;
  for (size_t index = 0; index < count; ++index) {
    const Descriptor& here = local->descriptors[index];
    const Descriptor& there = remote->descriptors[index];
    if (here.length != there.length) broken("a pair of unequal lengths");
    if (!covered(agent->memory, here) || !covered(agent->remotes[name], there)) broken("a descriptor that is in no registration");
    request->copies.emplace_back(operation == Operation::read ? there : here, operation == Operation::read ? here : there);
  }
  request->remote = name;
  request->writes = operation == Operation::write;
  ++agent->requests;
  *out = request;
  return kSuccess;
}
API(post_xfer_req)(Agent agent, Request request, OptArgs options) {
  LOCKED;
  own(agent);
  if (request->status != kInvalidState) broken("a request posted twice");
  if (options != nullptr) {
    request->message = options->message;
    request->notifies = options->notifies;
  }
  if (nth("FAKE_NIXL_FAIL_POST")) return request->status = kBackendError;
  if (one_of("FAKE_NIXL_STRAY_ERRORS")) return stray(agent, request);
  request->polls = setting("FAKE_NIXL_POLLS");
  if (request->polls > 0 || setting("FAKE_NIXL_HOLD") > 0) return request->status = kInProgress;
  return complete(agent, request);
}
API(get_xfer_status)(Agent agent, Request request) {
  LOCKED;
  own(agent);
  if (request->released) broken("the status of a request that was released");
  if (request->status == kInProgress && one_of("FAKE_NIXL_STRAY_ERRORS")) return stray(agent, request);
  if (request->status == kInProgress && --request->polls <= 0 && setting("FAKE_NIXL_HOLD") <= 0) return complete(agent, request);
  return request->status;
}
API(release_xfer_req)(Agent agent, Request request) {
  LOCKED;
  own(agent);
  if (request->released) broken("a request released twice");
  if (setting("FAKE_NIXL_REFUSE_RELEASE") > 0) {
    nth("FAKE_NIXL_REFUSE_RELEASE");
    return kBackendError;
  }
  request->released = true;
  --agent->requests;
  return kSuccess;
}
API(destroy_xfer_req)(Request request) {
  if (!request->released) broken("a request destroyed before it was released");
  delete request;
  return kSuccess;
}
API(gen_notif)(Agent agent, const char* name, const void* data, size_t length, OptArgs) {
  LOCKED;
  own(agent);
  if (data == nullptr) broken("a notification at a null pointer");
  return deliver(name, agent->name, std::string(static_cast<const char*>(data), length));
}
API(get_notifs)(Agent agent, NotifMap map, OptArgs) {
  LOCKED;
  own(agent);
  for (auto& [from, messages] : agent->inbox) {
    auto& known = map->inbox[from];
    known.insert(known.end(), messages.begin(), messages.end());
  }
  agent->inbox.clear();
  return kSuccess;
}
API(create_notif_map)(NotifMap* out) {
  *out = new NotifMapObject;
  return kSuccess;
}
API(destroy_notif_map)(NotifMap map) {
  delete map;
  return kSuccess;
}
API(notif_map_size)(NotifMap map, size_t* out) {
  *out = map->inbox.size();
  return kSuccess;
}
API(notif_map_get_agent_at)(NotifMap map, size_t index, const char** out) {
  auto at = map->inbox.begin();
  std::advance(at, index);
  *out = at->first.c_str();
  return kSuccess;
}
API(notif_map_get_notifs_size)(NotifMap map, const char* name, size_t* out) {
  *out = map->inbox.at(name).size();
  return kSuccess;
}
API(notif_map_get_notif)(NotifMap map, const char* name, size_t index, const void** data, size_t* length) {
  const std::string& message = map->inbox.at(name).at(index);
  *data = message.data();
  *length = message.size();
  return kSuccess;
}
API(notif_map_clear)(NotifMap map) {
  map->inbox.clear();
  return kSuccess;
}
}  // extern "C"

}  // namespace kv::nixl::capi
