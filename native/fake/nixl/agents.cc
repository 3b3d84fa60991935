#include <string.h>

#include <thread>

#include "faults.h"
#include "world.h"

namespace kv::nixl::capi {

extern "C" {
API(create_configured_agent)(const char* name, const AgentConfig* config, Agent* out) try {
  LOCKED;
  if (config->progress_thread || config->thread_sync != ThreadSync::none) rule_broken("an agent with a progress thread or locks");
  if (world.contains(name)) return kBackendError;
  *out = new AgentObject{.name = name, .captures_telemetry = config->capture_telemetry};
  world[name] = *out;
  return kSuccess;
} OR_EXCEPTION
API(destroy_agent)(Agent agent) try {
  { ALONE(agent); }
  LOCKED;
  if (!agent->lists.empty() || agent->requests != 0) rule_broken("an agent destroyed before its lists and requests");
  world.erase(agent->name);
  delete agent;
  return kSuccess;
} OR_EXCEPTION
API(get_plugin_params)(Agent agent, const char* plugin, MemList* types, Params* out) try {
  ALONE(agent);
  if (strcmp(plugin, "UCX") != 0 && strcmp(plugin, "LIBFABRIC") != 0) return kBackendError;
  *types = new MemListObject{{MemoryType::dram, MemoryType::vram}};
  *out = new ParamsObject;
  return kSuccess;
} OR_EXCEPTION
API(get_backend_params)(Agent agent, Backend backend, MemList* types, Params* out) try {
  ALONE(agent);
  *types = new MemListObject{memory_types_of(backend->name)};
  *out = new ParamsObject;
  return kSuccess;
} OR_EXCEPTION
API(mem_list_size)(MemList list, size_t* out) try {
  *out = list->types.size();
  return kSuccess;
} OR_EXCEPTION
API(mem_list_get)(MemList list, size_t index, MemoryType* out) try {
  *out = list->types.at(index);
  return kSuccess;
} OR_EXCEPTION
API(destroy_mem_list)(MemList list) try {
  delete list;
  return kSuccess;
} OR_EXCEPTION
API(destroy_params)(Params params) try {
  delete params;
  return kSuccess;
} OR_EXCEPTION
API(params_add)(Params params, const char* key, const char* value) try {
  params->added += " " + string(key) + "=" + value;
  return kSuccess;
} OR_EXCEPTION
API(create_backend)(Agent agent, const char* plugin, Params params, Backend* out) try {
  ALONE(agent);
  if (!params->added.empty()) setenv("FAKE_NIXL_PARAMETERS", params->added.c_str(), 1);
  std::this_thread::sleep_for(milliseconds(fault("FAKE_NIXL_STALL_BACKEND")));
  const auto [backend, created] = agent->backends.insert(plugin);
  if (!created) rule_broken("a backend created twice");
  *out = new BackendObject{&*backend, plugin};
  return kSuccess;
} OR_EXCEPTION
API(destroy_backend)(Backend backend) try {
  delete backend;
  return kSuccess;
} OR_EXCEPTION
}  // extern "C"

}  // namespace kv::nixl::capi
