#include "agent/nixl_agent.h"

#include <stdlib.h>

#include <algorithm>
#include <unordered_map>

#include "library/exit_guard.h"
#include "library/failure.h"

namespace kv::nixl {

namespace {

Handle<capi::Agent> create_agent(const capi::Functions& nixl, const AgentConfig& config) {
  for (const std::string& path : config.preload) NixlLibrary::preload(path);
  // One thread makes every call, so NIXL needs no locks. Polling on that thread also answers faster than NIXL's own progress thread.
  const capi::AgentConfig agent_config{.progress_thread = false,
                                       .listen_thread = false,
                                       .listen_port = 0,
                                       .thread_sync = capi::ThreadSync::none,
                                       .num_workers = 1,
                                       .progress_delay_us = 0,
                                       .listen_delay_us = 0,
                                       .capture_telemetry = false};
  const std::string refused = "NIXL refused the agent \"" + config.name + "\"";
  return Handle<capi::Agent>::make("KV_AGENT_INVALID", refused.c_str(), nixl.destroy_agent, nixl.create_configured_agent,
                                   config.name.c_str(), &agent_config);
}

// UCX's parameters for several threads. It divides a request among `num_threads` threads when it has at least `split_batch_size` descriptors, which
// are 1,024 by default: more than a slice has.
constexpr const char* kThreads = "num_threads";
constexpr const char* kSplitBatch = "split_batch_size";
// The division costs about as much as 10 descriptors for each thread.
constexpr unsigned kSplitPerThread = 16;
constexpr unsigned kMaxPostThreads = 64;

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

// Whether each row is all of an object. A WRITE replaces objects, so it cannot write a part of one.
bool are_whole_objects(const std::vector<Row>& rows, const std::vector<RegisteredMemory*>& objects) {
  std::unordered_map<uint64_t, uint64_t> lengths;
  for (const RegisteredMemory* object : objects) lengths.emplace(object->range.device, object->range.length);
  return std::ranges::all_of(rows, [&](const Row& row) { return row.count == 1 && row.length == lengths.at(row.device); });
}

}  // namespace

NixlAgent::NixlAgent(const AgentConfig& config, Counters& counters)
    : library_(NixlLibrary::load(config.library_path)),
      nixl_(library_.functions()),
      counters_(counters),
      name_(config.name),
      agent_(create_agent(nixl_, config)),
      backends_(create_backends(config.backends)),
      poller_(nixl_, agent_.get(), counters, config.notifies),
      safeguards_(nixl_, agent_.get(), poller_, config.watch_peers, config.probe_writes),
      registrations_(nixl_, agent_.get(), memory_types_, counters),
      peers_(nixl_, agent_.get(), config.name, safeguards_, counters),
      requests_(nixl_, agent_.get()) {}

NixlAgent::~NixlAgent() {
  while (!lists_.empty()) release(*lists_.begin());
}

std::string NixlAgent::plugin_names() const {
  capi::StringList raw = nullptr;
  if (nixl_.get_available_plugins(agent_.get(), &raw) != capi::kSuccess || raw == nullptr) return {};
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

std::vector<Handle<capi::Backend>> NixlAgent::create_backends(const std::vector<BackendSpec>& specs) {
  std::vector<Handle<capi::Backend>> backends;
  for (const BackendSpec& spec : specs) {
    backends.emplace_back(create_backend(spec), nixl_.destroy_backend);
    read_memory_types(spec.name, backends.back().get());
  }
  return backends;
}

capi::Backend NixlAgent::create_backend(const BackendSpec& spec) {
  capi::MemList types = nullptr;
  capi::Params raw = nullptr;
  const capi::Status found = nixl_.get_plugin_params(agent_.get(), spec.name.c_str(), &types, &raw);
  const Handle<capi::MemList> owned_types(types, nixl_.destroy_mem_list);
  const Handle<capi::Params> parameters(raw, nixl_.destroy_params);
  if (found != capi::kSuccess || !parameters) {
    const std::string problem = library_.plugin_load_error(spec.name);
    throw Failure("KV_BACKEND_UNAVAILABLE",
                  "NIXL cannot load the plugin of backend " + spec.name + (problem.empty() ? "" : ": " + problem) +
                      " (plugins found: " + plugin_names() + ")",
                  "a plugin that was found may lack a system library, such as libfabric or CUDA; NIXL_LOG_LEVEL=DEBUG says more, and "
                  "NIXL_PLUGIN_DIR selects another folder of plugins");
  }
  const auto add = [&](const std::string& key, const std::string& value) {
    check(nixl_.params_add(parameters.get(), key.c_str(), value.c_str()), "KV_BACKEND_UNAVAILABLE",
          "backend " + spec.name + " refused the value of the parameter " + key);
  };
  for (const auto& [key, value] : spec.parameters) add(key, value);
  const unsigned threads = threads_of(spec);
  if (threads > 1 && !parameter_of(spec, kSplitBatch)) add(kSplitBatch, std::to_string(threads * kSplitPerThread));
  post_threads_ = std::max(post_threads_, threads);
  capi::Backend backend = nullptr;
  const capi::Status created = nixl_.create_backend(agent_.get(), spec.name.c_str(), parameters.get(), &backend);
  // The plugin may have loaded libraries with destructors that must not run at exit.
  install_exit_handler();
  if (created != capi::kSuccess) {
    throw Failure("KV_BACKEND_UNAVAILABLE",
                  "backend " + spec.name + " could not be created: " + describe(created) + " (plugins found: " + plugin_names() + ")",
                  "NIXL's own log on stderr says why; NIXL_LOG_LEVEL=DEBUG says more");
  }
  return backend;
}

// Asks the backend and not its plugin: the LIBFABRIC plugin names VRAM on every machine, the backend only with a GPU.
void NixlAgent::read_memory_types(const std::string& backend, capi::Backend handle) {
  capi::MemList raw = nullptr;
  capi::Params raw_parameters = nullptr;
  check(nixl_.get_backend_params(agent_.get(), handle, &raw, &raw_parameters), "KV_BACKEND_UNAVAILABLE",
        "NIXL does not report the memory types of backend " + backend);
  const Handle<capi::MemList> list(raw, nixl_.destroy_mem_list);
  const Handle<capi::Params> parameters(raw_parameters, nixl_.destroy_params);
  size_t count = 0;
  nixl_.mem_list_size(list.get(), &count);
  std::vector<capi::MemoryType> types;
  for (size_t index = 0; index < count; ++index) {
    auto type = capi::MemoryType::dram;
    if (nixl_.mem_list_get(list.get(), index, &type) == capi::kSuccess) types.push_back(type);
  }
  memory_types_.add(backend, std::move(types));
}

std::shared_ptr<PreparedList> NixlAgent::prepare(std::optional<std::string> remote, capi::MemoryType type, const DescriptorTable& table,
                                                 const std::atomic<bool>& stopping) {
  const bool storage = is_storage(type);
  if (storage && remote != name_) {
    throw Failure("KV_LIST_INVALID",
                  "a list of " + std::string(name_of(type)) + " belongs to " + (remote ? "\"" + *remote + "\"" : std::string("no agent")),
                  "prepare lists of files and objects with the agent that registered them: prepareRemote with that agent's own name");
  }
  const bool of_peer = remote && !storage;
  if (of_peer) peers_.require_known(*remote);
  std::vector<Row> rows = read_rows(table, storage, stopping);
  auto memories = of_peer ? std::vector<RegisteredMemory*>() : registrations_.holding(type, rows);
  const bool writable = type != capi::MemoryType::object || are_whole_objects(rows, memories);
  auto list = std::make_shared<PreparedList>(std::move(remote), type, DescriptorLayout(std::move(rows)));
  list->writable = writable;
  // For local memory NIXL is asked when the first request by index needs it.
  if (list->remote) prepare_remote(*list);
  if (of_peer && safeguards_.landing_probe() != nullptr) safeguards_.landing_probe()->prepare(*list);
  list->memories = std::move(memories);
  for (RegisteredMemory* memory : list->memories) ++memory->lists;
  if (of_peer) peers_.add_list(*list);
  lists_.insert(list);
  counters_.prepared_lists = lists_.size();
  return list;
}

// Only NIXL knows what a peer has registered. It is given a descriptor per row, however many descriptors a row has.
void NixlAgent::prepare_remote(PreparedList& list) {
  capi::Status status = capi::kSuccess;
  list.spans = requests_.prepare(list, add_row_spans, status);
  if (!list.spans && list.layout.count() > list.layout.rows().size()) {
    // NIXL refuses a descriptor that spans several registrations, but may accept each descriptor of such a row.
    list.mergeable = false;
    list.spans = requests_.prepare(list, add_each_descriptor, status);
  }
  if (list.spans) return;
  throw Failure("KV_LIST_INVALID",
                "NIXL refused a list of " + std::to_string(list.layout.count()) + " descriptors of \"" + *list.remote +
                    "\": " + describe(status),
                "every descriptor must lie in memory that the peer had registered when its metadata was made");
}

void NixlAgent::release(const std::shared_ptr<PreparedList>& released) {
  const std::shared_ptr<PreparedList> list = released;  // a copy, since the argument may be an element of `lists_`
  for (PreparedHandle* handle : {&list->spans, &list->indexed, &list->probe}) handle->reset();
  for (RegisteredMemory* memory : list->memories) --memory->lists;
  if (list->remote && !is_storage(list->type)) peers_.remove_list(*list);
  lists_.erase(list);
  counters_.prepared_lists = lists_.size();
}

}  // namespace kv::nixl
