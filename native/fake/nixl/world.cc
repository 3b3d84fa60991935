#include "world.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "faults.h"

namespace kv::nixl::capi {

std::recursive_mutex world_mutex;
std::map<std::string, Agent> world;

void broken(const char* rule) {
  fprintf(stderr, "fake NIXL: %s\n", rule);
  abort();
}

void own(Agent agent) {
  if (agent->thread != std::this_thread::get_id()) broken("a call from another thread than the agent's");
}

bool covered(const Descriptors& memory, const Descriptor& wanted) {
  for (const Descriptor& known : memory) {
    if (wanted.type != known.type || wanted.device != known.device) continue;
    if (wanted.address >= known.address && wanted.address + wanted.length <= known.address + known.length) return true;
  }
  return false;
}

std::vector<MemoryType> types_of(const std::string& backend) {
  return backend == "UCX" ? std::vector{MemoryType::dram, MemoryType::vram} : std::vector{MemoryType::dram};
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

}  // namespace kv::nixl::capi
