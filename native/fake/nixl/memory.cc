#include <algorithm>

#include "faults.h"
#include "world.h"

namespace kv::nixl::capi {

namespace {

bool same(const Descriptor& one, const Descriptor& other) {
  return one.address == other.address && one.length == other.length && one.device == other.device && one.type == other.type;
}

bool overlap(const Descriptor& one, const Descriptor& other) {
  return one.type == other.type && one.device == other.device && one.address < other.address + other.length &&
         other.address < one.address + one.length;
}

std::set<string> chosen_backends(Agent agent, MemoryType type, OptArgs options) {
  std::set<string> chosen = options == nullptr || options->backends.empty() ? agent->backends : options->backends;
  std::erase_if(chosen, [&](const string& backend) { return std::ranges::count(memory_types_of(backend), type) == 0; });
  return chosen;
}

}  // namespace

extern "C" {
API(create_reg_dlist)(MemoryType type, RegDlist* out) try {
  *out = new RegDlistObject{type, {}};
  return kSuccess;
} OR_EXCEPTION
API(destroy_reg_dlist)(RegDlist list) try {
  delete list;
  return kSuccess;
} OR_EXCEPTION
API(reg_dlist_add_desc)(RegDlist list, uintptr_t address, size_t length, uint64_t device, const void* key, size_t key_length) try {
  list->descriptors.push_back({address, length, device, list->type});
  list->keys.emplace_back(static_cast<const char*>(key == nullptr ? "" : key), key_length);
  return kSuccess;
} OR_EXCEPTION
// As in NIXL, all backends for this memory type register it unless some are chosen.
API(register_mem)(Agent agent, RegDlist list, OptArgs options) try {
  ALONE(agent);
  LOCKED;
  const auto chosen = chosen_backends(agent, list->type, options);
  if (chosen.empty()) rule_broken("memory of a type that no backend registers");
  if (list->type == MemoryType::vram && fault("FAKE_NIXL_NO_CUDA") != 0) return kBackendError;
  for (const string& backend : chosen) {
    Descriptors& registered = agent->by_backend[backend];
    for (const Descriptor& descriptor : list->descriptors) {
      if (std::ranges::any_of(registered, [&](const Descriptor& known) { return overlap(known, descriptor); })) rule_broken("memory registered twice");
      registered.push_back(descriptor);
      if (std::ranges::none_of(agent->memory, [&](const Descriptor& known) { return same(known, descriptor); })) agent->memory.push_back(descriptor);
    }
  }
  return kSuccess;
} OR_EXCEPTION
API(deregister_mem)(Agent agent, RegDlist list, OptArgs options) try {
  ALONE(agent);
  LOCKED;
  for (const PreparedDlist prepared : agent->lists) {
    for (const Descriptor& descriptor : prepared->descriptors) {
      if ((prepared->remote.empty() || prepared->remote == agent->name) && is_within(list->descriptors, descriptor)) {
        rule_broken("memory deregistered that a prepared list describes");
      }
    }
  }
  const auto is_it = [&](const Descriptor& known) { return same(known, list->descriptors.front()); };
  for (const string& backend : chosen_backends(agent, list->type, options)) {
    if (std::erase_if(agent->by_backend[backend], is_it) != 1) rule_broken("memory deregistered from a backend that has not registered it");
  }
  const auto has_it = [&](const auto& entry) { return std::ranges::any_of(entry.second, is_it); };
  if (std::ranges::none_of(agent->by_backend, has_it)) std::erase_if(agent->memory, is_it);
  return kSuccess;
} OR_EXCEPTION
API(create_xfer_dlist)(MemoryType type, XferDlist* out) try {
  *out = new XferDlistObject{type, {}};
  return kSuccess;
} OR_EXCEPTION
API(destroy_xfer_dlist)(XferDlist list) try {
  delete list;
  return kSuccess;
} OR_EXCEPTION
API(xfer_dlist_add_desc)(XferDlist list, uintptr_t address, size_t length, uint64_t device) try {
  list->descriptors.push_back({address, length, device, list->type});
  return kSuccess;
} OR_EXCEPTION
API(xfer_dlist_clear)(XferDlist list) try {
  list->descriptors.clear();
  return kSuccess;
} OR_EXCEPTION
API(prep_xfer_dlist)(Agent agent, const char* name, XferDlist list, PreparedDlist* out, OptArgs) try {
  ALONE(agent);
  LOCKED;
  const bool own = *name == '\0' || agent->name == name;
  if (!own && !agent->remotes.contains(name)) return kNotFound;
  const Descriptors& memory = own ? agent->memory : agent->remotes[name];
  for (const Descriptor& descriptor : list->descriptors) {
    if (!is_within(memory, descriptor)) return kNotFound;
  }
  *out = new PreparedDlistObject{list->descriptors, name};
  agent->lists.insert(*out);
  return kSuccess;
} OR_EXCEPTION
API(release_xfer_dlist_handle)(Agent agent, PreparedDlist list) try {
  ALONE(agent);
  LOCKED;
  if (agent->lists.erase(list) == 0) rule_broken("a list released twice");
  delete list;
  return kSuccess;
} OR_EXCEPTION
}  // extern "C"

}  // namespace kv::nixl::capi
