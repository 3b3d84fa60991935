// The calls of registered memory and descriptor lists.
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

std::set<std::string> chosen_backends(Agent agent, MemoryType type, OptArgs options) {
  std::set<std::string> chosen = options == nullptr || options->backends.empty() ? agent->backends : options->backends;
  std::erase_if(chosen, [&](const std::string& backend) { return std::ranges::count(memory_types_of(backend), type) == 0; });
  return chosen;
}

}  // namespace

extern "C" {
API(create_reg_dlist)(MemoryType type, RegDlist* out) {
  *out = new RegDlistObject{type, {}};
  return kSuccess;
}
API(destroy_reg_dlist)(RegDlist list) {
  delete list;
  return kSuccess;
}
API(reg_dlist_add_desc)(RegDlist list, uintptr_t address, size_t length, uint64_t device, const void* key, size_t key_length) {
  list->descriptors.push_back({address, length, device, list->type});
  list->keys.emplace_back(static_cast<const char*>(key == nullptr ? "" : key), key_length);
  return kSuccess;
}
// Even keys are known.
API(query_mem)(Agent agent, RegDlist list, QueryRespList out, OptArgs options) {
  ALONE(agent);
  LOCKED;
  if (options == nullptr || options->backends.size() != 1) rule_broken("a query without a backend");
  for (const std::string& key : list->keys) out->known.push_back(key.size() % 2 == 0);
  return kSuccess;
}
API(create_query_resp_list)(QueryRespList* out) {
  *out = new QueryRespListObject;
  return kSuccess;
}
API(destroy_query_resp_list)(QueryRespList list) {
  delete list;
  return kSuccess;
}
API(query_resp_list_size)(QueryRespList list, size_t* out) {
  *out = list->known.size();
  return kSuccess;
}
API(query_resp_list_has_value)(QueryRespList list, size_t index, bool* out) {
  *out = list->known.at(index);
  return kSuccess;
}
API(query_resp_list_get_params)(QueryRespList list, size_t index, Params* out) {
  if (!list->known.at(index)) rule_broken("a response that has no value");
  *out = new ParamsObject{.added = {}, .pairs = {{"size", "1"}}};
  return kSuccess;
}
// As in NIXL: without a choice all backends for this type of memory.
API(register_mem)(Agent agent, RegDlist list, OptArgs options) {
  ALONE(agent);
  LOCKED;
  const auto chosen = chosen_backends(agent, list->type, options);
  if (chosen.empty()) rule_broken("memory of a type that no backend registers");
  if (list->type == MemoryType::vram && fault("FAKE_NIXL_NO_CUDA") != 0) return kBackendError;
  for (const std::string& backend : chosen) {
    Descriptors& registered = agent->by_backend[backend];
    for (const Descriptor& descriptor : list->descriptors) {
      if (std::ranges::any_of(registered, [&](const Descriptor& known) { return overlap(known, descriptor); })) rule_broken("memory registered twice");
      registered.push_back(descriptor);
      if (std::ranges::none_of(agent->memory, [&](const Descriptor& known) { return same(known, descriptor); })) agent->memory.push_back(descriptor);
    }
  }
  return kSuccess;
}
API(deregister_mem)(Agent agent, RegDlist list, OptArgs options) {
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
  for (const std::string& backend : chosen_backends(agent, list->type, options)) {
    if (std::erase_if(agent->by_backend[backend], is_it) != 1) rule_broken("memory deregistered from a backend that has not registered it");
  }
  const auto has_it = [&](const auto& entry) { return std::ranges::any_of(entry.second, is_it); };
  if (std::ranges::none_of(agent->by_backend, has_it)) std::erase_if(agent->memory, is_it);
  return kSuccess;
}
API(create_xfer_dlist)(MemoryType type, XferDlist* out) {
  *out = new XferDlistObject{type, {}};
  return kSuccess;
}
API(destroy_xfer_dlist)(XferDlist list) {
  delete list;
  return kSuccess;
}
API(xfer_dlist_add_desc)(XferDlist list, uintptr_t address, size_t length, uint64_t device) {
  list->descriptors.push_back({address, length, device, list->type});
  return kSuccess;
}
API(xfer_dlist_clear)(XferDlist list) {
  list->descriptors.clear();
  return kSuccess;
}
API(prep_xfer_dlist)(Agent agent, const char* name, XferDlist list, PreparedDlist* out, OptArgs) {
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
}
API(release_xfer_dlist_handle)(Agent agent, PreparedDlist list) {
  ALONE(agent);
  LOCKED;
  if (agent->lists.erase(list) == 0) rule_broken("a list released twice");
  delete list;
  return kSuccess;
}
}  // extern "C"

}  // namespace kv::nixl::capi
