#include "agent/backends.h"

#include <stdlib.h>

#include <algorithm>

#include "libfabric/bounded_calls.h"
#include "library/descriptors.h"
#include "library/exit_guard.h"
#include "repairs/lost_answers.h"

namespace kv::nixl {

namespace {

// UCX's parameters of threads. By default NIXL divides only requests of at least 1,024 descriptors,
// more than a slice has.
constexpr const char* kThreads = "num_threads";
constexpr const char* kSplitBatch = "split_batch_size";
// Dividing costs about as much as 10 descriptors per thread.
constexpr unsigned kSplitPerThread = 16;
constexpr unsigned kMaxPostThreads = 64;

// File descriptors of a backend and its first peers. Measured: UCX opens 13 with one network device
// besides loopback, and one per further device; LIBFABRIC 5 per device. Both briefly open more.
constexpr unsigned kDescriptorsOfNetwork = 32;
constexpr unsigned kDescriptorsOfStorage = 8;

optional<string> parameter_of(const BackendSpec& spec, const char* key) {
  for (const auto& [name, value] : spec.parameters) {
    if (name == key) return value;
  }
  return nullopt;
}

unsigned threads_of(const BackendSpec& spec) {
  const auto text = parameter_of(spec, kThreads);
  if (spec.name != "UCX" || !text) return 1;
  return static_cast<unsigned>(std::clamp(atol(text->c_str()), 1L, static_cast<long>(kMaxPostThreads)));
}

vector<string> types_in(const OwnedMemList& list) {
  size_t count = 0;
  capi::mem_list_size(list.get(), &count);
  vector<string> types;
  for (size_t index = 0; index < count; ++index) {
    auto type = MemoryType::dram;
    if (capi::mem_list_get(list.get(), index, &type) == kSuccess) types.push_back(name_of(type));
  }
  return types;
}

string joined(const vector<string>& texts) {
  string all;
  for (const string& text : texts) all += (all.empty() ? "" : ", ") + text;
  return all;
}

}  // namespace

const char* name_of(MemoryType type) {
  switch (type) {
    case MemoryType::dram: return "DRAM";
    case MemoryType::vram: return "VRAM";
    case MemoryType::block: return "BLOCK";
    case MemoryType::object: return "OBJ";
    case MemoryType::file: return "FILE";
  }
  return "memory of unknown type";
}

optional<MemoryType> memory_type_named(string_view name) {
  for (const auto type : {MemoryType::dram, MemoryType::vram, MemoryType::file, MemoryType::object}) {
    if (name == name_of(type)) return type;
  }
  return nullopt;
}

string Backends::plugin_names() const {
  capi::StringList raw = nullptr;
  if (capi::get_available_plugins(agent_, &raw) != kSuccess || raw == nullptr) return {};
  const OwnedStringList list(raw);
  size_t count = 0;
  capi::string_list_size(raw, &count);
  vector<string> names;
  for (size_t index = 0; index < count; ++index) {
    const char* name = nullptr;
    if (capi::string_list_get(raw, index, &name) == kSuccess) names.emplace_back(name);
  }
  return joined(names);
}

OwnedParams Backends::plugin_parameters(const string& name, OwnedMemList& types) const {
  capi::MemList raw_types = nullptr;
  capi::Params raw = nullptr;
  const Status found = capi::get_plugin_params(agent_, name.c_str(), &raw_types, &raw);
  types.reset(raw_types);
  OwnedParams parameters(raw);
  if (found == kSuccess && parameters) return parameters;
  const string problem = plugin_load_error(name);
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
  OwnedMemList types;
  const auto parameters = plugin_parameters(spec.name, types);
  const auto add = [&](const string& key, const string& value) {
    check(capi::params_add(parameters.get(), key.c_str(), value.c_str()), "KV_BACKEND_UNAVAILABLE",
          "backend " + spec.name + " refused the value of the parameter " + key);
  };
  for (const auto& [key, value] : spec.parameters) add(key, value);
  const unsigned threads = threads_of(spec);
  if (threads > 1 && !parameter_of(spec, kSplitBatch)) add(kSplitBatch, to_string(threads * kSplitPerThread));
  const bool network = spec.name == "UCX" || spec.name == "LIBFABRIC";
  require_descriptors(network ? kDescriptorsOfNetwork : kDescriptorsOfStorage, ("backend " + spec.name).c_str());
  if (spec.name == "LIBFABRIC") BoundedCalls::install();
  if (spec.name == "UCX") drop_lost_answers();
  capi::Backend raw = nullptr;
  const Status created = capi::create_backend(agent_, spec.name.c_str(), parameters.get(), &raw);
  OwnedBackend backend(raw);
  // The plugin's libraries may have destructors that must not run at exit.
  install_exit_handler();
  if (network) protect_listeners();
  close_descriptors_on_exec();
  if (created != kSuccess) {
    throw Failure("KV_BACKEND_UNAVAILABLE",
                  "backend " + spec.name + " could not be created: " + nixl::describe(created) + " (plugins found: " + plugin_names() + ")",
                  "NIXL's own log on stderr says why; NIXL_LOG_LEVEL=DEBUG says more");
  }
  // The plugin may state more: LIBFABRIC's names VRAM on every machine, its backend only with a
  // GPU.
  capi::MemList raw_types = nullptr;
  capi::Params raw_parameters = nullptr;
  check(capi::get_backend_params(agent_, raw, &raw_types, &raw_parameters), "KV_BACKEND_UNAVAILABLE",
        "NIXL does not report the memory types of backend " + spec.name);
  const OwnedParams ignored(raw_parameters);
  backends_.push_back({spec.name, std::move(backend), types_in(OwnedMemList(raw_types))});
  post_threads_ = std::max(post_threads_, threads);
  // Prepared lists cannot have blocks.
  std::erase_if(backends_.back().memory_types, [](const string& type) { return !memory_type_named(type); });
}

const Backends::Backend& Backends::find(const string& name) const {
  vector<string> names;
  for (const Backend& backend : backends_) {
    if (backend.name == name) return backend;
    names.push_back(backend.name);
  }
  throw Failure("KV_BACKEND_UNAVAILABLE", "the agent has no backend " + name + " (it has " + joined(names) + ")", "add it with addBackend()");
}

OwnedOptions Backends::options_for(const string& name) const {
  auto options = make<OwnedOptions>("KV_INTERNAL", "NIXL could not create options", capi::create_opt_args);
  check(capi::opt_args_add_backend(options.get(), find(name).handle.get()), "KV_INTERNAL", "NIXL did not select backend " + name);
  return options;
}

string Backends::of_request(Request request) const {
  capi::Backend raw = nullptr;
  if (capi::query_xfer_backend(agent_, request, &raw) != kSuccess) return {};
  const OwnedBackend queried(raw);
  // NIXL returns a new handle, whose only member points to the backend.
  const auto identity = [](const OwnedBackend& handle) { return *reinterpret_cast<void* const*>(handle.get()); };
  for (const Backend& backend : backends_) {
    if (identity(backend.handle) == identity(queried)) return backend.name;
  }
  return {};
}

vector<string> Backends::supporting(MemoryType type) const {
  vector<string> names;
  for (const Backend& backend : backends_) {
    if (std::ranges::count(backend.memory_types, name_of(type)) > 0) names.push_back(backend.name);
  }
  return names;
}

string Backends::memory_types() const {
  string text;
  for (const auto& [name, handle, types] : backends_) text += (text.empty() ? "" : "; ") + name + ": " + (types.empty() ? "none" : joined(types));
  return text;
}

}  // namespace kv::nixl
