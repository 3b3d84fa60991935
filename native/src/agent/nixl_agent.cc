#include "agent/nixl_agent.h"

#include <stdlib.h>

#include <algorithm>
#include <unordered_map>

#include "library/exit_guard.h"
#include "library/failure.h"
#include "peers/agent_metadata.h"

namespace kv::nixl {

namespace {

Handle<capi::Agent> create_agent(const capi::Functions& nixl, const AgentConfig& config) {
  for (const std::string& path : config.preload) NixlLibrary::preload(path);
  // One thread makes every call, so NIXL needs neither locks nor a thread of its own; polling here beats both.
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

// Whether each row is all of an object, which a WRITE replaces.
bool whole_objects(const std::vector<Row>& rows, const std::vector<ExternalRegistration*>& objects) {
  std::unordered_map<uint64_t, uint64_t> lengths;
  for (const ExternalRegistration* object : objects) lengths.emplace(object->memory.device, object->memory.length);
  return std::ranges::all_of(rows, [&](const Row& row) { return row.count == 1 && row.length == lengths.at(row.device); });
}

}  // namespace

NixlAgent::NixlAgent(const AgentConfig& config, Counters& counters)
    : library_(NixlLibrary::load(config.library_path)),
      nixl_(library_.functions()),
      counters_(counters),
      name_(config.name),
      agent_(create_agent(nixl_, config)),
      inbox_(nixl_, agent_.get(), counters, config.notifies),
      registrations_(nixl_, agent_.get(), memory_types_, counters),
      peers_(nixl_, agent_.get(), config.name, inbox_, counters, config.watch_peers),
      requests_(nixl_, agent_.get()) {
  for (const BackendSpec& spec : config.backends) create_backend(spec);
  if (config.probe_writes) probes_.emplace(nixl_, agent_.get());
}

NixlAgent::~NixlAgent() {
  while (!lists_.empty()) release(*lists_.begin());
}

std::string NixlAgent::plugins() const {
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

void NixlAgent::create_backend(const BackendSpec& spec) {
  capi::MemList types = nullptr;
  capi::Params raw = nullptr;
  const capi::Status found = nixl_.get_plugin_params(agent_.get(), spec.name.c_str(), &types, &raw);
  const Handle<capi::MemList> owned_types(types, nixl_.destroy_mem_list);
  const Handle<capi::Params> parameters(raw, nixl_.destroy_params);
  if (found != capi::kSuccess || !parameters) {
    const std::string problem = library_.plugin_problem(spec.name);
    throw Failure("KV_BACKEND_UNAVAILABLE",
                  "NIXL cannot load the plugin of backend " + spec.name + (problem.empty() ? "" : ": " + problem) +
                      " (plugins found: " + plugins() + ")",
                  "a plugin that is found may lack a library of the system, such as libfabric or CUDA; NIXL_LOG_LEVEL=DEBUG "
                  "says more, and NIXL_PLUGIN_DIR names another folder of plugins");
  }
  for (const auto& [key, value] : spec.parameters) {
    check(nixl_.params_add(parameters.get(), key.c_str(), value.c_str()), "KV_BACKEND_UNAVAILABLE",
          "backend " + spec.name + " refused the value of the parameter " + key);
  }
  capi::Backend backend = nullptr;
  const capi::Status created = nixl_.create_backend(agent_.get(), spec.name.c_str(), parameters.get(), &backend);
  // The plugin may have loaded libraries whose destructors the exit must not reach.
  guard_exit();
  if (created != capi::kSuccess) {
    throw Failure("KV_BACKEND_UNAVAILABLE",
                  "backend " + spec.name + " could not be created: " + describe(created) + " (plugins found: " + plugins() + ")",
                  "NIXL's own log on stderr says why; NIXL_LOG_LEVEL=DEBUG says more");
  }
  backends_.emplace_back(backend, nixl_.destroy_backend);
  learn_memory_types(spec.name, backend);
}

// Of the backend and not of its plugin: LIBFABRIC's names VRAM on every machine, the backend only with a GPU.
void NixlAgent::learn_memory_types(const std::string& backend, capi::Backend handle) {
  capi::MemList raw = nullptr;
  capi::Params raw_parameters = nullptr;
  check(nixl_.get_backend_params(agent_.get(), handle, &raw, &raw_parameters), "KV_BACKEND_UNAVAILABLE",
        "NIXL does not tell what memory backend " + backend + " registers");
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

Bytes NixlAgent::local_metadata() const { return kv::nixl::local_metadata(nixl_, agent_.get()); }

std::shared_ptr<PreparedList> NixlAgent::prepare(std::optional<std::string> remote, capi::MemoryType type,
                                          const RowNumbers& numbers, const std::atomic<bool>& stopping) {
  const bool stored = is_stored(type);
  if (stored && remote != name_) {
    throw Failure("KV_LIST_INVALID",
                  "a list of " + std::string(name_of(type)) + " belongs to " + (remote ? "\"" + *remote + "\"" : std::string("no agent")),
                  "files and objects are reached from the agent that has registered them: prepareRemote with that agent's own name");
  }
  if (remote && !stored) peers_.require(*remote);
  std::vector<Row> rows = read_rows(numbers, stored, stopping);
  const bool own = !remote || stored;
  const bool addons = type == capi::MemoryType::dram;
  auto used_memories = own && addons ? registrations_.memories_of(rows) : std::vector<const Mapping*>();
  auto used_foreign = own && !addons ? registrations_.foreign_of(type, rows) : std::vector<ExternalRegistration*>();
  const bool takes_writes = type != capi::MemoryType::object || whole_objects(rows, used_foreign);
  auto list = std::make_shared<PreparedList>(std::move(remote), type, DescriptorLayout(std::move(rows)));
  list->takes_writes = takes_writes;
  // Of local memory all is known here. Of a peer's NIXL knows what was registered; it looks at rows whole, however many descriptors they have.
  if (list->remote) {
    capi::Status status = capi::kSuccess;
    list->handle = requests_.prepare(*list, add_spans, status);
    if (list->handle == nullptr && list->shape.count() > list->shape.rows().size()) {
      // A row over several registrations is no descriptor to NIXL, though each of its own may be.
      list->mergeable = false;
      list->handle = requests_.prepare(*list, expand, status);
    }
    if (list->handle == nullptr) {
      throw Failure("KV_LIST_INVALID",
                    "NIXL refused a list of " + std::to_string(list->shape.count()) + " descriptors of \"" + *list->remote +
                        "\": " + describe(status),
                    "every descriptor must lie in memory that the peer had registered when its metadata was made");
    }
  }
  if (list->remote && !stored && probes_) {
    try {
      probes_->prepare(*list);
    } catch (...) {
      nixl_.release_xfer_dlist_handle(agent_.get(), list->handle);
      throw;
    }
  }
  list->memories = std::move(used_memories);
  list->foreign = std::move(used_foreign);
  registrations_.hold(*list);
  if (list->remote && !stored) peers_.hold(*list);
  lists_.insert(list);
  counters_.prepared_lists = lists_.size();
  return list;
}

void NixlAgent::release(const std::shared_ptr<PreparedList>& released) {
  const std::shared_ptr<PreparedList> list = released;  // the argument may be the set's own
  for (capi::PreparedDlist* handle : {&list->handle, &list->indexed, &list->probe}) {
    if (*handle != nullptr) nixl_.release_xfer_dlist_handle(agent_.get(), std::exchange(*handle, nullptr));
  }
  registrations_.let_go(*list);
  if (list->remote && !is_stored(list->type)) peers_.let_go(*list);
  lists_.erase(list);
  counters_.prepared_lists = lists_.size();
}

}  // namespace kv::nixl
