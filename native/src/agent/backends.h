#pragma once

#include <stdlib.h>

#include <algorithm>

#include "events/event.h"
#include "libfabric/bounded_calls.h"
#include "library/descriptors.h"
#include "library/exit_guard.h"
#include "library/nixl_library.h"
#include "repairs/lost_answers.h"

namespace kv::nixl {

// NIXL's name, such as "VRAM".
inline const char* name_of(MemoryType type) {
  switch (type) {
    case MemoryType::dram: return "DRAM";
    case MemoryType::vram: return "VRAM";
    case MemoryType::block: return "BLOCK";
    case MemoryType::object: return "OBJ";
    case MemoryType::file: return "FILE";
  }
  return "memory of unknown type";
}
// None for a name that no prepared list can have.
inline optional<MemoryType> memory_type_named(string_view name) {
  for (const auto type :
       {MemoryType::dram, MemoryType::vram, MemoryType::file, MemoryType::object}) {
    if (name == name_of(type)) return type;
  }
  return nullopt;
}
// Files and objects. Storage has no peer: NIXL's remote lists of it carry the agent's own name.
inline bool is_storage(MemoryType type) {
  return type == MemoryType::file || type == MemoryType::object;
}

struct BackendSpec {
  string name;
  vector<std::pair<string, string>> parameters;
};

struct BackendSelection {
  vector<BackendSpec> backends;
  // Libraries that plugins need and the loader would not find.
  vector<string> preload;
  // A backend does not report a peer's death.
  bool watch_peers = false;
  // A backend reports a WRITE as done before its bytes have landed.
  bool probe_writes = false;
  // A backend carries notifications, unlike storage.
  bool notifies = true;
  // Small calls take microseconds, and never wait for a peer.
  bool brief_calls = false;
};

// The backends of one agent, on the agent's thread. NIXL ends them with its agent.
class Backends {
 public:
  explicit Backends(Agent agent) : agent_(agent) {}
  Backends(const Backends&) = delete;
  Backends& operator=(const Backends&) = delete;

  // Takes up to a second. Throws KV_BACKEND_UNAVAILABLE, also for a backend that exists.
  void create(const BackendSpec& spec) {
    if (std::ranges::any_of(backends_,
                            [&](const Backend& backend) { return backend.name == spec.name; })) {
      throw Failure("KV_BACKEND_UNAVAILABLE", "the agent has a backend " + spec.name +
                                                  " already, and can have only one of each plugin");
    }
    const auto parameters = plugin_parameters(spec.name);
    const auto add = [&](const string& key, const string& value) {
      check(capi::params_add(parameters.get(), key.c_str(), value.c_str()),
            "KV_BACKEND_UNAVAILABLE",
            "backend " + spec.name + " refused the value of the parameter " + key);
    };
    for (const auto& [key, value] : spec.parameters) add(key, value);
    const unsigned threads = threads_of(spec);
    if (threads > 1 && !parameter_of(spec, kSplitBatch))
      add(kSplitBatch, to_string(threads * kSplitPerThread));
    const bool network = spec.name == "UCX" || spec.name == "LIBFABRIC";
    require_descriptors(network ? kDescriptorsOfNetwork : kDescriptorsOfStorage,
                        ("backend " + spec.name).c_str());
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
                    "backend " + spec.name + " could not be created: " + nixl::describe(created),
                    "NIXL's own log on stderr says why; NIXL_LOG_LEVEL=DEBUG says more");
    }
    // The plugin may state more: LIBFABRIC's names VRAM on every machine, its backend only with a
    // GPU.
    capi::MemList raw_types = nullptr;
    capi::Params raw_parameters = nullptr;
    check(capi::get_backend_params(agent_, raw, &raw_types, &raw_parameters),
          "KV_BACKEND_UNAVAILABLE",
          "NIXL does not report the memory types of backend " + spec.name);
    const OwnedParams ignored(raw_parameters);
    backends_.push_back({spec.name, std::move(backend), types_in(OwnedMemList(raw_types))});
    post_threads_ = std::max(post_threads_, threads);
  }
  // Selects the backend for one call. Throws KV_BACKEND_UNAVAILABLE.
  OwnedOptions options_for(const string& name) const {
    auto options =
        make<OwnedOptions>("KV_INTERNAL", "NIXL could not create options", capi::create_opt_args);
    check(capi::opt_args_add_backend(options.get(), find(name).handle.get()), "KV_INTERNAL",
          "NIXL did not select backend " + name);
    return options;
  }
  // The backend that carries a request. Empty where NIXL does not say.
  string of_request(Request request) const {
    capi::Backend raw = nullptr;
    if (capi::query_xfer_backend(agent_, request, &raw) != kSuccess) return {};
    const OwnedBackend queried(raw);
    // NIXL returns a new handle, whose only member points to the backend.
    const auto identity = [](const OwnedBackend& handle) {
      return *reinterpret_cast<void* const*>(handle.get());
    };
    for (const Backend& backend : backends_) {
      if (identity(backend.handle) == identity(queried)) return backend.name;
    }
    return {};
  }

  // In the order of their creation.
  vector<string> supporting(MemoryType type) const {
    vector<string> names;
    for (const Backend& backend : backends_) {
      if (std::ranges::count(backend.memory_types, type) > 0) names.push_back(backend.name);
    }
    return names;
  }
  // For error messages, such as "UCX: DRAM, VRAM; POSIX: FILE".
  string memory_types() const {
    string text;
    for (const auto& [name, handle, types] : backends_) {
      text += (text.empty() ? "" : "; ") + name + ": ";
      for (const auto type : types)
        text += (text.ends_with(": ") ? "" : ", ") + string(name_of(type));
      if (types.empty()) text += "none";
    }
    return text;
  }
  unsigned post_threads() const { return post_threads_; }

 private:
  // UCX's parameters of threads. By default NIXL divides only requests of at least 1,024
  // descriptors, more than a slice has.
  static constexpr const char* kThreads = "num_threads";
  static constexpr const char* kSplitBatch = "split_batch_size";
  // Dividing costs about as much as 10 descriptors per thread.
  static constexpr unsigned kSplitPerThread = 16;
  static constexpr unsigned kMaxPostThreads = 64;

  // File descriptors of a backend and its first peers. Measured: UCX opens 13 with one network
  // device besides loopback, and one per further device; LIBFABRIC 5 per device. Both briefly open
  // more.
  static constexpr unsigned kDescriptorsOfNetwork = 32;
  static constexpr unsigned kDescriptorsOfStorage = 8;

  static optional<string> parameter_of(const BackendSpec& spec, const char* key) {
    for (const auto& [name, value] : spec.parameters) {
      if (name == key) return value;
    }
    return nullopt;
  }

  static unsigned threads_of(const BackendSpec& spec) {
    const auto text = parameter_of(spec, kThreads);
    if (spec.name != "UCX" || !text) return 1;
    return static_cast<unsigned>(
        std::clamp(atol(text->c_str()), 1L, static_cast<long>(kMaxPostThreads)));
  }

  // Without blocks, which prepared lists cannot have.
  static vector<MemoryType> types_in(const OwnedMemList& list) {
    size_t count = 0;
    capi::mem_list_size(list.get(), &count);
    vector<MemoryType> types;
    for (size_t index = 0; index < count; ++index) {
      auto type = MemoryType::block;
      capi::mem_list_get(list.get(), index, &type);
      if (type != MemoryType::block) types.push_back(type);
    }
    return types;
  }

  struct Backend {
    string name;
    OwnedBackend handle;
    // As the backend itself reports them.
    vector<MemoryType> memory_types;
  };

  const Backend& find(const string& name) const {
    for (const Backend& backend : backends_) {
      if (backend.name == name) return backend;
    }
    throw Failure("KV_BACKEND_UNAVAILABLE",
                  "the agent has no backend " + name + " (it has " + memory_types() + ")",
                  "add it with addBackend()");
  }
  OwnedParams plugin_parameters(const string& name) const {
    capi::MemList raw_types = nullptr;
    capi::Params raw = nullptr;
    const Status found = capi::get_plugin_params(agent_, name.c_str(), &raw_types, &raw);
    const OwnedMemList ignored(raw_types);
    OwnedParams parameters(raw);
    if (found == kSuccess && parameters) return parameters;
    throw Failure(
        "KV_BACKEND_UNAVAILABLE", "NIXL cannot load the plugin of backend " + name,
        "a plugin that was found may lack a system library, such as libfabric or CUDA; NIXL_LOG_LEVEL=DEBUG says more, and "
        "NIXL_PLUGIN_DIR selects another folder of plugins");
  }

  Agent agent_;
  vector<Backend> backends_;
  unsigned post_threads_ = 1;
};

}  // namespace kv::nixl
