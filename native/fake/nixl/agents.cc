// The calls of agents and their backends.
#include <string.h>

#include <chrono>
#include <thread>

#include "faults.h"
#include "world.h"

namespace kv::nixl::capi {

extern "C" {
API(create_configured_agent)(const char* name, const AgentConfig* config, Agent* out) {
  LOCKED;
  if (config->progress_thread || config->thread_sync != ThreadSync::none) rule_broken("an agent with a progress thread or locks");
  if (world.contains(name)) return kBackendError;
  *out = new AgentObject{.name = name, .captures_telemetry = config->capture_telemetry};
  world[name] = *out;
  return kSuccess;
}
API(destroy_agent)(Agent agent) {
  { ALONE(agent); }
  LOCKED;
  if (!agent->lists.empty() || agent->requests != 0) rule_broken("an agent destroyed before its lists and requests");
  world.erase(agent->name);
  delete agent;
  return kSuccess;
}
API(get_available_plugins)(Agent agent, StringList* out) {
  ALONE(agent);
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
  ALONE(agent);
  if (strcmp(plugin, "UCX") != 0 && strcmp(plugin, "LIBFABRIC") != 0) return kBackendError;
  *types = new MemListObject{{MemoryType::dram, MemoryType::vram}};
  *out = new ParamsObject{.added = {}, .pairs = {{"fake", plugin}}};
  return kSuccess;
}
API(get_backend_params)(Agent agent, Backend backend, MemList* types, Params* out) {
  ALONE(agent);
  *types = new MemListObject{memory_types_of(backend->name)};
  *out = new ParamsObject;
  return kSuccess;
}
API(mem_list_size)(MemList list, size_t* out) {
  *out = list->types.size();
  return kSuccess;
}
API(mem_list_get)(MemList list, size_t index, MemoryType* out) {
  *out = list->types.at(index);
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
API(params_add)(Params params, const char* key, const char* value) {
  params->added += " " + std::string(key) + "=" + value;
  params->pairs.emplace_back(key, value);
  return kSuccess;
}
API(params_is_empty)(Params params, bool* out) {
  *out = params->pairs.empty();
  return kSuccess;
}
API(params_create_iterator)(Params params, ParamIter* out) {
  *out = new ParamIterObject{params};
  return kSuccess;
}
API(params_iterator_next)(ParamIter iterator, const char** key, const char** value, bool* more) {
  const auto& pairs = iterator->params->pairs;
  if (iterator->at >= pairs.size()) rule_broken("a parameter beyond the last");
  *key = pairs[iterator->at].first.c_str();
  *value = pairs[iterator->at].second.c_str();
  *more = ++iterator->at < pairs.size();
  return kSuccess;
}
API(params_destroy_iterator)(ParamIter iterator) {
  delete iterator;
  return kSuccess;
}
API(create_backend)(Agent agent, const char* plugin, Params params, Backend* out) {
  ALONE(agent);
  if (!params->added.empty()) setenv("FAKE_NIXL_PARAMETERS", params->added.c_str(), 1);
  std::this_thread::sleep_for(std::chrono::milliseconds(fault("FAKE_NIXL_STALL_BACKEND")));
  if (!agent->backends.insert(plugin).second) rule_broken("a backend created twice");
  *out = new BackendObject{plugin};
  return kSuccess;
}
API(destroy_backend)(Backend backend) {
  delete backend;
  return kSuccess;
}
}  // extern "C"

}  // namespace kv::nixl::capi
