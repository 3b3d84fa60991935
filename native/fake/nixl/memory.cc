// Registered memory, and lists of descriptors of it.
#include "world.h"

namespace kv::nixl::capi {

extern "C" {
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
}  // extern "C"

}  // namespace kv::nixl::capi
