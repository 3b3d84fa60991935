#include <iterator>

#include "faults.h"
#include "world.h"

namespace kv::nixl::capi {

extern "C" {
API(gen_notif)(Agent agent, const char* name, const void* data, size_t length, OptArgs) try {
  ALONE(agent);
  stall("FAKE_NIXL_STALL_CALLS");
  LOCKED;
  if (data == nullptr) rule_broken("a notification at a null pointer");
  return deliver(name, agent->name, string(static_cast<const char*>(data), length));
} OR_EXCEPTION
API(get_notifs)(Agent agent, NotifMap map, OptArgs) try {
  ALONE(agent);
  LOCKED;
  for (auto& [from, messages] : agent->notifications) {
    auto& known = map->notifications[from];
    known.insert(known.end(), messages.begin(), messages.end());
  }
  agent->notifications.clear();
  return kSuccess;
} OR_EXCEPTION
API(create_notif_map)(NotifMap* out) try {
  *out = new NotifMapObject;
  return kSuccess;
} OR_EXCEPTION
API(destroy_notif_map)(NotifMap map) try {
  delete map;
  return kSuccess;
} OR_EXCEPTION
API(notif_map_size)(NotifMap map, size_t* out) try {
  *out = map->notifications.size();
  return kSuccess;
} OR_EXCEPTION
API(notif_map_get_agent_at)(NotifMap map, size_t index, const char** out) try {
  auto at = map->notifications.begin();
  std::advance(at, index);
  *out = at->first.c_str();
  return kSuccess;
} OR_EXCEPTION
API(notif_map_get_notifs_size)(NotifMap map, const char* name, size_t* out) try {
  *out = map->notifications.at(name).size();
  return kSuccess;
} OR_EXCEPTION
API(notif_map_get_notif)(NotifMap map, const char* name, size_t index, const void** data, size_t* length) try {
  const string& message = map->notifications.at(name).at(index);
  *data = message.data();
  *length = message.size();
  return kSuccess;
} OR_EXCEPTION
API(notif_map_clear)(NotifMap map) try {
  map->notifications.clear();
  return kSuccess;
} OR_EXCEPTION
}  // extern "C"

}  // namespace kv::nixl::capi
