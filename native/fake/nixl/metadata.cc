#include <arpa/inet.h>
#include <stdlib.h>
#include <string.h>

#include <thread>

#include "faults.h"
#include "world.h"

namespace kv::nixl::capi {

namespace {

void put(string& out, const string& tag, const string& value) {
  const uint64_t length = value.size();
  out += tag + string(reinterpret_cast<const char*>(&length), sizeof(length)) + value + "|";
}

template <typename T>
string raw(T value) {
  return string(reinterpret_cast<const char*>(&value), sizeof(value));
}

string take(const string& in, size_t& at, const string& tag) {
  uint64_t length = 0;
  memcpy(&length, in.data() + at + tag.size(), sizeof(length));
  at += tag.size() + sizeof(length);
  const string value = in.substr(at, length);
  at += length + 1;
  return value;
}

uint64_t number(const string& value) {
  uint64_t number = 0;
  memcpy(&number, value.data(), sizeof(number));
  return number;
}

// The connection data of a LIBFABRIC backend.
string endpoint(int port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return "dest_data_ep_0" + raw<uint64_t>(sizeof(address)) + raw(address);
}

// UCX appends a key: one domain of 0 bytes, host memory, unknown device.
string packed(const Descriptor& memory, bool ucx) {
  string out = raw<uint64_t>(memory.address) + raw<uint64_t>(memory.length) + raw<uint64_t>(memory.device);
  if (ucx) out += raw<uint64_t>(1) + string("\0\0\xff", 3);
  return out;
}

// NIXL drops a peer whose metadata fails to load, even if prepared lists point to it.
void drop(Agent agent, const string& remote) {
  agent->remotes.erase(remote);
  for (const PreparedDlist list : agent->lists) list->dropped = list->dropped || list->remote == remote;
}

Status serialize(Agent agent, bool connections, const Descriptors& descriptors, void** data, size_t* length) {
  string out = "nixlSerDes|";
  put(out, "Agent", agent->name);
  put(out, "Conns", raw<uint64_t>(connections ? 1 : 0));
  const int port = fault("FAKE_NIXL_ENDPOINT");
  const string backend = port > 0 ? "LIBFABRIC" : "UCX";
  if (connections) {
    put(out, "t", backend);
    put(out, "c", port > 0 ? endpoint(port) : raw(agent));
  }
  put(out, "", "MemSection");
  std::map<MemoryType, Descriptors> sections;
  for (const Descriptor& memory : descriptors) sections[memory.type].push_back(memory);
  put(out, "nixlSecElms", raw<uint64_t>(sections.size()));
  for (const auto& [type, memories] : sections) {
    put(out, "bknd", backend);
    put(out, "nixlDList", "nixlSDList");
    put(out, "t", raw(type));
    put(out, "n", raw<uint64_t>(memories.size()));
    for (const Descriptor& memory : memories) put(out, "", packed(memory, backend == "UCX"));
  }
  *data = malloc(out.size());
  *length = out.size();
  memcpy(*data, out.data(), out.size());
  return kSuccess;
}

}  // namespace

extern "C" {
API(get_local_md)(Agent agent, void** data, size_t* length) try {
  LOCKED;
  std::this_thread::sleep_for(milliseconds(fault("FAKE_NIXL_STALL_METADATA")));
  ALONE(agent);
  return serialize(agent, true, agent->memory, data, length);
} OR_EXCEPTION
// As in NIXL, connections come only without memory.
API(get_local_partial_md)(Agent agent, RegDlist list, void** data, size_t* length, OptArgs) try {
  ALONE(agent);
  LOCKED;
  return serialize(agent, list->descriptors.empty(), list->descriptors, data, length);
} OR_EXCEPTION
API(load_remote_md)(Agent agent, const void* data, size_t length, char** name) try {
  ALONE(agent);
  LOCKED;
  const string in(static_cast<const char*>(data), length);
  size_t at = strlen("nixlSerDes|");
  const string remote = take(in, at, "Agent");
  if (fault_active("FAKE_NIXL_STRAY_ERRORS")) {
    drop(agent, remote);
    return kBackendError;
  }
  for (auto connections = number(take(in, at, "Conns")); connections > 0; --connections) {
    for (const char* tag : {"t", "c"}) take(in, at, tag);
  }
  take(in, at, "");
  // NIXL keeps what it knew of the peer.
  Descriptors memory = agent->remotes[remote];
  for (auto sections = number(take(in, at, "nixlSecElms")); sections > 0; --sections) {
    for (const char* tag : {"bknd", "nixlDList"}) take(in, at, tag);
    MemoryType type{};
    memcpy(&type, take(in, at, "t").data(), sizeof(type));
    for (auto count = number(take(in, at, "n")); count > 0; --count) {
      const string entry = take(in, at, "");
      Descriptor descriptor{0, 0, 0, type};
      memcpy(&descriptor, entry.data(), offsetof(Descriptor, type));
      memory.push_back(descriptor);
    }
  }
  agent->remotes[remote] = memory;
  *name = strdup(remote.c_str());
  return kSuccess;
} OR_EXCEPTION
API(invalidate_remote_md)(Agent agent, const char* name) try {
  ALONE(agent);
  LOCKED;
  for (const PreparedDlist list : agent->lists) {
    if (list->remote == name && !list->dropped) rule_broken("a peer invalidated before its lists were released");
  }
  return agent->remotes.erase(name) > 0 ? kSuccess : kNotFound;
} OR_EXCEPTION
}  // extern "C"

}  // namespace kv::nixl::capi
