#include "agent/backends.h"

#include <stdlib.h>

#include <algorithm>

#include "libfabric/bounded_calls.h"
#include "library/descriptors.h"
#include "library/exit_guard.h"
#include "library/failure.h"
#include "ucx/lost_answers.h"

namespace kv::nixl {

namespace {

// UCX's parameters of threads. NIXL divides a request among its threads from so many descriptors
// on, which are 1,024 by default: more than a slice has.
constexpr const char* kThreads = "num_threads";
constexpr const char* kSplitBatch = "split_batch_size";
// The division costs about as much as 10 descriptors for each thread.
constexpr unsigned kSplitPerThread = 16;
constexpr unsigned kMaxPostThreads = 64;

// File descriptors that a backend opens when it is created, and for its first peers. Measured: UCX
// opens 13 with one network device besides the loopback device and one more for each other;
// LIBFABRIC 5 for each device, and both open some for a moment.
constexpr unsigned kDescriptorsOfNetwork = 32;
constexpr unsigned kDescriptorsOfStorage = 8;

std::optional<std::string> parameter_of(const BackendSpec& spec, const char* key) {
  for (const auto& [name, value] : spec.parameters) {
    if (name == key) return value;
  }
  return std::nullopt;
}

// How many threads copy the bytes of one post. 1 where NIXL has no threads for it.
unsigned threads_of(const BackendSpec& spec) {
  const auto text = parameter_of(spec, kThreads);
  if (spec.name != "UCX" || !text) return 1;
  return static_cast<unsigned>(std::clamp(atol(text->c_str()), 1L, static_cast<long>(kMaxPostThreads)));
}

std::vector<capi::MemoryType> types_in(const capi::Functions& nixl, capi::MemList list) {
  size_t count = 0;
  nixl.mem_list_size(list, &count);
  std::vector<capi::MemoryType> types;
  for (size_t index = 0; index < count; ++index) {
    auto type = capi::MemoryType::dram;
    if (nixl.mem_list_get(list, index, &type) == capi::kSuccess) types.push_back(type);
  }
  return types;
}

Parameters parameters_in(const capi::Functions& nixl, capi::Params parameters) {
  Parameters read;
  // NIXL's iterator must not be used on an empty set.
  bool empty = true;
  if (nixl.params_is_empty(parameters, &empty) != capi::kSuccess || empty) return read;
  const auto iterator = Handle<capi::ParamIter>::make("KV_INTERNAL", "NIXL could not list parameters", nixl.params_destroy_iterator,
                                                      nixl.params_create_iterator, parameters);
  for (bool more = true; more;) {
    const char* key = nullptr;
    const char* value = nullptr;
    if (nixl.params_iterator_next(iterator.get(), &key, &value, &more) != capi::kSuccess) break;
    read.emplace_back(key, value);
  }
  return read;
}

ParameterSet set_of(const std::vector<capi::MemoryType>& types, Parameters parameters) {
  ParameterSet set{.memory_types = {}, .parameters = std::move(parameters)};
  for (const capi::MemoryType type : types) set.memory_types.push_back(name_of(type));
  return set;
}

}  // namespace

std::string Backends::plugin_names() const {
  capi::StringList raw = nullptr;
  if (nixl_.get_available_plugins(agent_, &raw) != capi::kSuccess || raw == nullptr) return {};
  const Handle<capi::StringList> list(raw, nixl_.destroy_string_list);
  size_t count = 0;
  nixl_.string_list_size(raw, &count);
  std::string names;
  for (size_t index = 0; index < count; ++index) {
    const char* name = nullptr;
    if (nixl_.string_list_get(raw, index, &name) == capi::kSuccess) names += (names.empty() ? "" : ", ") + std::string(name);
  }
  return names;
}

Handle<capi::Params> Backends::plugin_parameters(const std::string& name, capi::MemList* types) const {
  capi::Params raw = nullptr;
  const capi::Status found = nixl_.get_plugin_params(agent_, name.c_str(), types, &raw);
  Handle<capi::Params> parameters(raw, nixl_.destroy_params);
  if (found == capi::kSuccess && parameters) return parameters;
  const std::string problem = library_.plugin_load_error(name);
  throw Failure("KV_BACKEND_UNAVAILABLE",
                "NIXL cannot load the plugin of backend " + name + (problem.empty() ? "" : ": " + problem) +
                    " (plugins found: " + plugin_names() + ")",
                "a plugin that was found may lack a system library, such as libfabric or CUDA; NIXL_LOG_LEVEL=DEBUG says more, and "
                "NIXL_PLUGIN_DIR selects another folder of plugins");
}

void Backends::create(const BackendSpec& spec) {
  if (std::ranges::any_of(backends_, [&](const Backend& backend) { return backend.name == spec.name; })) {
    throw Failure("KV_BACKEND_UNAVAILABLE", "the agent has a backend " + spec.name + " already, and can have only one of each plugin");
  }
  capi::MemList raw_types = nullptr;
  const auto parameters = plugin_parameters(spec.name, &raw_types);
  const Handle<capi::MemList> types(raw_types, nixl_.destroy_mem_list);
  const auto add = [&](const std::string& key, const std::string& value) {
    check(nixl_.params_add(parameters.get(), key.c_str(), value.c_str()), "KV_BACKEND_UNAVAILABLE",
          "backend " + spec.name + " refused the value of the parameter " + key);
  };
  for (const auto& [key, value] : spec.parameters) add(key, value);
  const unsigned threads = threads_of(spec);
  if (threads > 1 && !parameter_of(spec, kSplitBatch)) add(kSplitBatch, std::to_string(threads * kSplitPerThread));
  const bool network = spec.name == "UCX" || spec.name == "LIBFABRIC";
  require_descriptors(network ? kDescriptorsOfNetwork : kDescriptorsOfStorage, ("backend " + spec.name).c_str());
  if (spec.name == "LIBFABRIC") BoundedCalls::install();
  if (spec.name == "UCX") drop_lost_answers();
  capi::Backend raw = nullptr;
  const capi::Status created = nixl_.create_backend(agent_, spec.name.c_str(), parameters.get(), &raw);
  // The plugin may have loaded libraries with destructors that must not run at exit.
  install_exit_handler();
  if (spec.name == "UCX") protect_listeners();
  if (created != capi::kSuccess) {
    throw Failure("KV_BACKEND_UNAVAILABLE",
                  "backend " + spec.name + " could not be created: " + nixl::describe(created) + " (plugins found: " + plugin_names() + ")",
                  "NIXL's own log on stderr says why; NIXL_LOG_LEVEL=DEBUG says more");
  }
  backends_.push_back({spec.name, Handle<capi::Backend>(raw, nixl_.destroy_backend)});
  post_threads_ = std::max(post_threads_, threads);
  // The backend states them and not its plugin: the LIBFABRIC plugin names VRAM on every machine,
  // the backend only with a GPU.
  std::vector<capi::MemoryType> memory_types;
  for (const std::string& type : describe(spec.name).memory_types) {
    if (const auto known = memory_type_named(type)) memory_types.push_back(*known);
  }
  memory_types_.add(spec.name, std::move(memory_types));
}

const Backends::Backend& Backends::find(const std::string& name) const {
  const auto found = std::ranges::find(backends_, name, &Backend::name);
  if (found != backends_.end()) return *found;
  std::string names;
  for (const Backend& backend : backends_) names += (names.empty() ? "" : ", ") + backend.name;
  throw Failure("KV_BACKEND_UNAVAILABLE", "the agent has no backend " + name + " (it has " + names + ")", "add it with addBackend()");
}

ParameterSet Backends::describe_plugin(const std::string& name) const {
  capi::MemList raw_types = nullptr;
  const auto parameters = plugin_parameters(name, &raw_types);
  const Handle<capi::MemList> types(raw_types, nixl_.destroy_mem_list);
  return set_of(types_in(nixl_, types.get()), parameters_in(nixl_, parameters.get()));
}

ParameterSet Backends::describe(const std::string& name) const {
  capi::MemList raw_types = nullptr;
  capi::Params raw = nullptr;
  check(nixl_.get_backend_params(agent_, find(name).handle.get(), &raw_types, &raw), "KV_BACKEND_UNAVAILABLE",
        "NIXL does not report the memory types of backend " + name);
  const Handle<capi::MemList> types(raw_types, nixl_.destroy_mem_list);
  const Handle<capi::Params> parameters(raw, nixl_.destroy_params);
  return set_of(types_in(nixl_, types.get()), parameters_in(nixl_, parameters.get()));
}

Handle<capi::OptArgs> Backends::options_for(const std::vector<std::string>& names) const {
  if (names.empty()) return {};
  auto options = Handle<capi::OptArgs>::make("KV_INTERNAL", "NIXL could not create options", nixl_.destroy_opt_args, nixl_.create_opt_args);
  for (const std::string& name : names) {
    check(nixl_.opt_args_add_backend(options.get(), find(name).handle.get()), "KV_INTERNAL", "NIXL did not select backend " + name);
  }
  return options;
}

QueryAnswers Backends::query(const std::string& backend, capi::MemoryType type, const std::vector<std::string>& keys) const {
  const auto options = options_for({backend});
  const auto list = Handle<capi::RegDlist>::make("KV_MEMORY_INVALID", "NIXL could not create a list", nixl_.destroy_reg_dlist,
                                                 nixl_.create_reg_dlist, type);
  for (const std::string& key : keys) {
    check(nixl_.reg_dlist_add_desc(list.get(), 0, 0, 0, key.data(), key.size()), "KV_MEMORY_INVALID", "NIXL refused the key \"" + key + "\"");
  }
  const auto responses = Handle<capi::QueryRespList>::make("KV_INTERNAL", "NIXL could not create a list of responses",
                                                           nixl_.destroy_query_resp_list, nixl_.create_query_resp_list);
  check(nixl_.query_mem(agent_, list.get(), responses.get(), options.get()), "KV_MEMORY_INVALID",
        "backend " + backend + " could not query " + std::to_string(keys.size()) + " keys of " + name_of(type));
  size_t count = 0;
  nixl_.query_resp_list_size(responses.get(), &count);
  QueryAnswers answers(keys.size());
  for (size_t index = 0; index < std::min(count, keys.size()); ++index) {
    bool known = false;
    capi::Params raw = nullptr;
    if (nixl_.query_resp_list_has_value(responses.get(), index, &known) != capi::kSuccess || !known) continue;
    check(nixl_.query_resp_list_get_params(responses.get(), index, &raw), "KV_INTERNAL", "NIXL did not return a response");
    answers[index] = parameters_in(nixl_, Handle<capi::Params>(raw, nixl_.destroy_params).get());
  }
  return answers;
}

}  // namespace kv::nixl
