#include "world.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "faults.h"

namespace kv::nixl::capi {

std::recursive_mutex world_mutex;
std::map<string, Agent> world;

void rule_broken(const char* rule) {
  fprintf(stderr, "fake NIXL: %s\n", rule);
  abort();
}

Call::Call(Agent agent) : agent_(agent) {
  if (agent->in_call.exchange(true)) rule_broken("two calls of one agent at once");
  if (agent->thread == std::this_thread::get_id()) return;
  if (agent->backends.contains("LIBFABRIC")) rule_broken("a call of LIBFABRIC from another thread than the agent's");
  setenv("FAKE_NIXL_VISITS", to_string(fault("FAKE_NIXL_VISITS") + 1).c_str(), 1);
}

Call::~Call() { agent_->in_call = false; }

bool is_within(const Descriptors& memory, const Descriptor& wanted) {
  for (const Descriptor& known : memory) {
    if (wanted.type != known.type || wanted.device != known.device) continue;
    if (wanted.address >= known.address && wanted.address + wanted.length <= known.address + known.length) return true;
  }
  return false;
}

vector<MemoryType> memory_types_of(const string& backend) {
  return backend == "UCX" ? vector{MemoryType::dram, MemoryType::vram} : vector{MemoryType::dram};
}

Status deliver(const string& to, const string& from, const string& message) {
  if (fault("FAKE_NIXL_FAIL_NOTIFICATION") != 0) return kBackendError;
  const auto agent = world.find(to);
  if (agent == world.end()) return kBackendError;
  agent->second->notifications[from].push_back(message);
  return kSuccess;
}

Status complete(Agent agent, Request request) {
  if (fault_due_now("FAKE_NIXL_FAIL_STATUS") || !world.contains(request->remote)) return request->status = kBackendError;
  auto& late_copies = agent->late_copies[request->remote];
  if (request->writes && fault("FAKE_NIXL_LATE_WRITES") != 0) {
    late_copies.insert(late_copies.end(), request->copies.begin(), request->copies.end());
    request->copies.clear();
  } else {
    request->copies.insert(request->copies.begin(), late_copies.begin(), late_copies.end());
    late_copies.clear();
  }
  for (const auto& [from, to] : request->copies) {
    memcpy(reinterpret_cast<void*>(to.address), reinterpret_cast<const void*>(from.address), from.length);
  }
  if (request->notifies) deliver(request->remote, agent->name, request->message);
  return request->status = kSuccess;
}

Status fail_with_stray_error(Agent agent, Request request) {
  auto& late_copies = agent->late_copies[request->remote];
  late_copies.insert(late_copies.end(), request->copies.begin(), request->copies.end());
  return request->status = kBackendError;
}

}  // namespace kv::nixl::capi
