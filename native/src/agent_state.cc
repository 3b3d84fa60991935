#include "agent_state.h"

#include <stdlib.h>

#include <algorithm>

#include "exit_guard.h"
#include "metadata.h"

namespace kv::nixl {

namespace {

// The backend whose peers can be watched from outside.
constexpr const char* kWatchedBackend = "LIBFABRIC";
constexpr size_t kScratchBytes = 4096;
// So long after a peer's end NIXL is told to let go of what it still has under way. What the peer had sent before is in this
// host's own buffers, or lost, long before.
constexpr auto kQuarantine = std::chrono::seconds(5);
// A connection that ends gives an error for each operation on it, and a call takes one of them.
constexpr int kMostDrained = 65'536;
// Metadata is loaded so often while a peer's death explains that NIXL fails.
constexpr int kMostLoads = 4;

bool holds(const Mapping& mapping, const Row& row) {
  return row.device == 0 && row.address >= mapping.address() && row.end() <= mapping.address() + mapping.length();
}

void check(capi::Status status, const char* code, const std::string& what) {
  if (status != capi::kSuccess) throw Failure(code, what + ": " + describe(status));
}

}  // namespace

AgentState::AgentState(const AgentConfig& config, Counters& counters)
    : library_(Library::load(config.library_path)),
      nixl_(library_.functions()),
      counters_(counters),
      name_(config.name),
      watch_peers_(config.watch_peers),
      notifies_(config.notifies) {
  for (const std::string& path : config.preload) Library::preload(path);
  // One thread makes every call, so NIXL needs neither locks nor a thread of its own; polling here beats both.
  const capi::AgentConfig agent_config{.progress_thread = false,
                                       .listen_thread = false,
                                       .listen_port = 0,
                                       .thread_sync = capi::ThreadSync::none,
                                       .num_workers = 1,
                                       .progress_delay_us = 0,
                                       .listen_delay_us = 0,
                                       .capture_telemetry = false};
  check(nixl_.create_configured_agent(config.name.c_str(), &agent_config, &agent_), "KV_AGENT_INVALID",
        "NIXL refused the agent \"" + config.name + "\"");
  requests_.emplace(nixl_, agent_);
  try {
    for (const BackendSpec& spec : config.backends) create_backend(spec);
    inbox_ = Handle<capi::NotifMap>::make("KV_INTERNAL", "no notification map", nixl_.destroy_notif_map,
                                          nixl_.create_notif_map);
    if (config.probe_writes) make_scratch();
  } catch (...) {
    if (scratch_registration_) nixl_.deregister_mem(agent_, scratch_registration_.get(), nullptr);
    scratch_registration_ = {};
    requests_.reset();
    backends_.clear();
    nixl_.destroy_agent(agent_);
    throw;
  }
}

AgentState::~AgentState() {
  while (!lists_.empty()) release(*lists_.begin());
  requests_.reset();
  if (probe_ != nullptr) nixl_.release_xfer_dlist_handle(agent_, probe_);
  for (const auto& [name, remote] : remotes_) nixl_.invalidate_remote_md(agent_, name.c_str());
  for (const auto& [mapping, memory] : memories_) nixl_.deregister_mem(agent_, memory.list.get(), nullptr);
  memories_.clear();
  for (const auto& [id, file] : files_) nixl_.deregister_mem(agent_, file.list.get(), nullptr);
  files_.clear();
  if (scratch_registration_) nixl_.deregister_mem(agent_, scratch_registration_.get(), nullptr);
  scratch_registration_ = {};
  inbox_ = {};
  backends_.clear();
  nixl_.destroy_agent(agent_);
  counters_.registrations = 0;
  counters_.remotes = 0;
}

std::string AgentState::plugins() const {
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

void AgentState::create_backend(const BackendSpec& spec) {
  capi::MemList types = nullptr;
  capi::Params raw = nullptr;
  const capi::Status found = nixl_.get_plugin_params(agent_, spec.name.c_str(), &types, &raw);
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
          "backend " + spec.name + " refused the parameter " + key + "=" + value);
  }
  capi::Backend backend = nullptr;
  const capi::Status created = nixl_.create_backend(agent_, spec.name.c_str(), parameters.get(), &backend);
  // The plugin may have loaded libraries whose destructors the exit must not reach.
  guard_exit();
  if (created != capi::kSuccess) {
    throw Failure("KV_BACKEND_UNAVAILABLE",
                  "backend " + spec.name + " could not be created: " + describe(created) + " (plugins found: " + plugins() + ")",
                  "NIXL's own log on stderr says why; NIXL_LOG_LEVEL=DEBUG says more");
  }
  backends_.emplace_back(backend, nixl_.destroy_backend);
}

void AgentState::make_scratch() {
  scratch_ = Mapping::create(kScratchBytes);
  scratch_->await_touched();
  auto registration = Handle<capi::RegDlist>::make("KV_INTERNAL", "no registration list", nixl_.destroy_reg_dlist,
                                                   nixl_.create_reg_dlist, capi::MemoryType::dram);
  check(nixl_.reg_dlist_add_desc(registration.get(), scratch_->address(), scratch_->length(), 0, nullptr, 0), "KV_INTERNAL",
        "NIXL refused the descriptor of the scratch page");
  check(nixl_.register_mem(agent_, registration.get(), nullptr), "KV_INTERNAL", "NIXL could not register the scratch page");
  scratch_registration_ = std::move(registration);
  const auto one = Handle<capi::XferDlist>::make("KV_INTERNAL", "no descriptor list", nixl_.destroy_xfer_dlist,
                                                 nixl_.create_xfer_dlist, capi::MemoryType::dram);
  check(nixl_.xfer_dlist_add_desc(one.get(), scratch_->address(), 1, 0), "KV_INTERNAL", "NIXL refused a descriptor");
  check(nixl_.prep_xfer_dlist(agent_, capi::kSelf, one.get(), &probe_, nullptr), "KV_INTERNAL", "NIXL refused the scratch list");
}

void AgentState::prepare_probe(List& list, capi::MemoryType type, const Row& first) {
  const auto one = Handle<capi::XferDlist>::make("KV_LIST_INVALID", "no descriptor list", nixl_.destroy_xfer_dlist,
                                                 nixl_.create_xfer_dlist, type);
  check(nixl_.xfer_dlist_add_desc(one.get(), first.address, 1, first.device), "KV_LIST_INVALID", "NIXL refused a descriptor");
  check(nixl_.prep_xfer_dlist(agent_, list.remote->c_str(), one.get(), &list.probe, nullptr), "KV_LIST_INVALID",
        "NIXL refused a list of one byte");
}

capi::Request AgentState::make_probe(const List& remote) {
  const int first = 0;
  capi::Request request = nullptr;
  const capi::Status made = nixl_.make_xfer_req(agent_, capi::Operation::read, probe_, &first, 1, remote.probe, &first, 1,
                                                &request, nullptr);
  return made == capi::kSuccess ? request : nullptr;
}

bool AgentState::lost(const std::string& remote) {
  if (!watch_peers_) return false;
  const auto found = remotes_.find(remote);
  return found != remotes_.end() && found->second.watch && !found->second.watch->alive();
}

std::chrono::steady_clock::duration AgentState::lost_for(const std::string& remote) const {
  if (!watch_peers_) return std::chrono::steady_clock::duration::zero();
  const auto found = remotes_.find(remote);
  const bool watched = found != remotes_.end() && found->second.watch;
  return watched ? found->second.watch->dead_for() : std::chrono::steady_clock::duration::zero();
}

bool AgentState::known_lost(const std::string& remote) const {
  return lost_for(remote) > std::chrono::steady_clock::duration::zero();
}

void AgentState::watch() {
  for (const auto& [name, remote] : remotes_) {
    if (remote.watch) remote.watch->alive();
    note_death(remote);
  }
}

void AgentState::note_death(const Remote& remote) {
  if (!remote.watch) return;
  const auto ago = remote.watch->dead_for();
  if (ago <= ago.zero()) return;
  const auto died = std::chrono::steady_clock::now() - ago;
  if (!last_death_ || died > *last_death_) last_death_ = died;
}

bool AgentState::somebody_died_after(std::chrono::steady_clock::time_point time) {
  watch();
  return last_death_ && *last_death_ > time;
}

bool AgentState::quiet(const std::string& remote) const { return lost_for(remote) >= kQuarantine; }

void AgentState::drain_errors() {
  int left = kMostDrained;
  while (left > 0 && nixl_.get_notifs(agent_, inbox_.get(), nullptr) != capi::kSuccess) --left;
}

bool AgentState::errors_of_anyone(const std::string& remote) {
  const auto found = remotes_.find(remote);
  if (found == remotes_.end() || !found->second.watch) return false;
  drain_errors();
  watch();
  return found->second.watch->alive();
}

void AgentState::register_memory(uint64_t id, std::shared_ptr<Pin> pin) {
  const Mapping* mapping = pin->mapping().get();
  if (!memories_.contains(mapping)) {
    mapping->await_touched();
    auto list = Handle<capi::RegDlist>::make("KV_MEMORY_INVALID", "no registration list", nixl_.destroy_reg_dlist,
                                             nixl_.create_reg_dlist, capi::MemoryType::dram);
    check(nixl_.reg_dlist_add_desc(list.get(), mapping->address(), mapping->length(), 0, nullptr, 0), "KV_MEMORY_INVALID",
          "NIXL refused the descriptor of the memory");
    check(nixl_.register_mem(agent_, list.get(), nullptr), "KV_MEMORY_INVALID",
          "NIXL could not register " + std::to_string(mapping->length()) + " bytes");
    memories_.emplace(mapping, Registered{std::move(pin), std::move(list)});
  }
  ++memories_.at(mapping).registrations;
  registrations_.emplace(id, mapping);
  counters_.registrations = registrations_.size() + files_.size();
}

void AgentState::register_file(uint64_t id, uint64_t descriptor, uint64_t length) {
  auto list = Handle<capi::RegDlist>::make("KV_MEMORY_INVALID", "no registration list", nixl_.destroy_reg_dlist,
                                           nixl_.create_reg_dlist, capi::MemoryType::file);
  check(nixl_.reg_dlist_add_desc(list.get(), 0, length, descriptor, nullptr, 0), "KV_MEMORY_INVALID",
        "NIXL refused the descriptor of the file");
  const capi::Status status = nixl_.register_mem(agent_, list.get(), nullptr);
  if (status != capi::kSuccess) {
    throw Failure("KV_MEMORY_INVALID", "NIXL could not register a file of " + std::to_string(length) + " bytes: " + describe(status),
                  "an agent needs a storage backend for files, such as POSIX");
  }
  files_.emplace(id, File{descriptor, length, std::move(list)});
  counters_.registrations = registrations_.size() + files_.size();
}

void AgentState::deregister_file(std::unordered_map<uint64_t, File>::iterator file) {
  if (file->second.lists > 0) {
    throw Failure("KV_MEMORY_IN_USE", std::to_string(file->second.lists) + " prepared lists describe this file",
                  "close them before the registration");
  }
  check(nixl_.deregister_mem(agent_, file->second.list.get(), nullptr), "KV_MEMORY_IN_USE", "NIXL kept the file");
  files_.erase(file);
  counters_.registrations = registrations_.size() + files_.size();
}

uint64_t AgentState::file_covering(const Row& row, size_t index) const {
  for (const auto& [id, file] : files_) {
    if (row.device == file.descriptor && row.end() <= file.length) return id;
  }
  throw Failure("KV_MEMORY_NOT_REGISTERED",
                "row " + std::to_string(index) + " covers [" + std::to_string(row.address) + ", " + std::to_string(row.end()) +
                    ") of the file with descriptor " + std::to_string(row.device) + ", which no registration of this agent holds (" +
                    std::to_string(files_.size()) + " files registered)",
                "register the file with this agent; a row's device is the file's deviceId, its address the place in the file");
}

void AgentState::deregister_memory(uint64_t id) {
  if (const auto file = files_.find(id); file != files_.end()) return deregister_file(file);
  const auto found = registrations_.find(id);
  if (found == registrations_.end()) throw Failure("KV_MEMORY_NOT_REGISTERED", "the registration is closed already");
  const auto memory = memories_.find(found->second);
  if (memory->second.registrations == 1) {
    if (memory->second.lists > 0) {
      throw Failure("KV_MEMORY_IN_USE", std::to_string(memory->second.lists) + " prepared lists describe this memory",
                    "close them before the registration");
    }
    check(nixl_.deregister_mem(agent_, memory->second.list.get(), nullptr), "KV_MEMORY_IN_USE", "NIXL kept the memory");
    memories_.erase(memory);
  } else {
    --memory->second.registrations;
  }
  registrations_.erase(found);
  counters_.registrations = registrations_.size() + files_.size();
}

Bytes AgentState::local_metadata() const {
  void* data = nullptr;
  size_t length = 0;
  check(nixl_.get_local_md(agent_, &data, &length), "KV_AGENT_INVALID", "NIXL has no metadata of this agent");
  const auto* bytes = static_cast<const uint8_t*>(data);
  Bytes copy(bytes, bytes + length);
  free(data);
  return copy;
}

std::string AgentState::add_remote(const Bytes& bytes) {
  Metadata metadata = read_metadata(bytes);
  const std::string& name = metadata.agent;
  if (name == name_) throw Failure("KV_AGENT_METADATA_INVALID", "the metadata is of an agent of the same name, \"" + name + "\"");
  const auto known = remotes_.find(name);
  if (known != remotes_.end() && known->second.connections != metadata.connections) {
    // Another process under the same name. NIXL refuses to replace it.
    if (known->second.lists > 0) {
      throw Failure("KV_AGENT_METADATA_INVALID",
                    "\"" + name + "\" is known with other connection data, and " + std::to_string(known->second.lists) +
                        " prepared lists describe its memory",
                    "if it was restarted, close its lists first");
    }
    forget_remote(name);
  }
  const auto load = [&] {
    char* raw = nullptr;
    const capi::Status loaded = nixl_.load_remote_md(agent_, bytes.data(), bytes.size(), &raw);
    free(raw);
    return loaded;
  };
  capi::Status status = load();
  for (int loads = 1; status != capi::kSuccess && watch_peers_ && loads < kMostLoads; ++loads) {
    if (!somebody_died_after(std::chrono::steady_clock::now() - kQuarantine)) break;
    drain_errors();
    status = load();
  }
  if (status != capi::kSuccess) {
    // NIXL has dropped what it knew of the peer, if it knew it, and with it what prepared lists point to.
    if (remotes_.contains(name)) forget_remote(name);
    throw Failure("KV_AGENT_METADATA_INVALID",
                  "NIXL refused the metadata of \"" + name + "\": " + describe(status),
                  "it must come whole from the peer's localMetadata(), and both agents must have a backend in common");
  }
  Remote& remote = remotes_[name];
  const auto watched = metadata.connections.find(kWatchedBackend);
  // A known peer that was taken for dead and says hello again is looked at anew.
  if (watch_peers_ && watched != metadata.connections.end() && (!remote.watch || !remote.watch->alive())) {
    remote.watch = PeerWatch::of(watched->second);
  }
  remote.connections = std::move(metadata.connections);
  counters_.remotes = remotes_.size();
  return name;
}

void AgentState::forget_remote(const std::string& name) {
  for (const auto& list : lists_) list->lost = list->lost || list->remote == name;
  const auto found = remotes_.find(name);
  if (found != remotes_.end()) note_death(found->second);
  nixl_.invalidate_remote_md(agent_, name.c_str());
  remotes_.erase(name);
  counters_.remotes = remotes_.size();
}

void AgentState::remove_remote(const std::string& name) {
  const auto found = remotes_.find(name);
  if (found == remotes_.end()) throw Failure("KV_AGENT_UNKNOWN_REMOTE", "this agent knows no peer \"" + name + "\"");
  if (found->second.lists > 0) {
    throw Failure("KV_MEMORY_IN_USE",
                  std::to_string(found->second.lists) + " prepared lists describe memory of \"" + name + "\"",
                  "close them before removing the peer");
  }
  forget_remote(name);
}

void AgentState::notify(const std::string& remote, const Bytes& payload) {
  if (!remotes_.contains(remote)) {
    throw Failure("KV_AGENT_UNKNOWN_REMOTE", "this agent knows no peer \"" + remote + "\"", "call addRemote first");
  }
  if (lost(remote)) {
    throw Failure("KV_NOTIFICATION_FAILED",
                  "could not send " + std::to_string(payload.size()) + " bytes to \"" + remote + "\": its process is gone",
                  "if it was restarted, add it again with its new metadata");
  }
  // Not tried again when it fails: it may have been sent, and it is delivered once at most.
  if (watch_peers_) drain_errors();
  // Never a null pointer, even for no bytes.
  const void* data = payload.empty() ? static_cast<const void*>("") : payload.data();
  check(nixl_.gen_notif(agent_, remote.c_str(), data, payload.size(), nullptr), "KV_NOTIFICATION_FAILED",
        "NIXL could not send " + std::to_string(payload.size()) + " bytes to \"" + remote + "\"");
  ++counters_.notifications_sent;
}

const Mapping* AgentState::covering(const Row& row, size_t index) const {
  for (const auto& [mapping, memory] : memories_) {
    if (holds(*mapping, row)) return mapping;
  }
  throw Failure("KV_MEMORY_NOT_REGISTERED",
                "row " + std::to_string(index) + " covers [" + std::to_string(row.address) + ", " + std::to_string(row.end()) +
                    ") on device " + std::to_string(row.device) + ", which no single registration of this agent holds (" +
                    std::to_string(memories_.size()) + " memories registered)",
                "register the memory with this agent, or split the row at the edge of the memory");
}

std::shared_ptr<List> AgentState::prepare(std::optional<std::string> remote, capi::MemoryType type,
                                          const std::vector<double>& numbers) {
  const bool files = type == capi::MemoryType::file;
  if (files && remote != name_) {
    throw Failure("KV_LIST_INVALID", "a list of files belongs to " + (remote ? "\"" + *remote + "\"" : std::string("no agent")),
                  "files are reached from the agent that has opened them: prepareRemote with that agent's own name");
  }
  if (remote && !files && !remotes_.contains(*remote)) {
    throw Failure("KV_AGENT_UNKNOWN_REMOTE", "this agent knows no peer \"" + *remote + "\"", "call addRemote first");
  }
  std::vector<Row> rows = read_rows(numbers.data(), numbers.size(), files);
  std::vector<const Mapping*> used;
  std::vector<uint64_t> used_files;
  for (size_t index = 0; files && index < rows.size(); ++index) used_files.push_back(file_covering(rows[index], index));
  if (!remote) {
    for (size_t index = 0; index < rows.size(); ++index) {
      // Rows of one memory come together, and there may be a million of them.
      if (!used.empty() && holds(*used.back(), rows[index])) continue;
      used.push_back(covering(rows[index], index));
    }
    std::sort(used.begin(), used.end());
    used.erase(std::unique(used.begin(), used.end()), used.end());
  }
  auto list = std::make_shared<List>(std::move(remote), type, Shape(std::move(rows)));
  // Of local memory all is known here. Of a peer's NIXL knows what was registered; it looks at rows whole, however many descriptors they have.
  if (list->remote) {
    capi::Status status = capi::kSuccess;
    list->handle = requests_->prepare(*list, add_spans, status);
    if (list->handle == nullptr && list->shape.count() > list->shape.rows().size()) {
      // A row over several registrations is no descriptor to NIXL, though each of its own may be.
      list->mergeable = false;
      list->handle = requests_->prepare(*list, expand, status);
    }
    if (list->handle == nullptr) {
      throw Failure("KV_LIST_INVALID",
                    "NIXL refused a list of " + std::to_string(list->shape.count()) + " descriptors of \"" + *list->remote +
                        "\": " + describe(status),
                    "every descriptor must lie in memory that the peer had registered when its metadata was made");
    }
  }
  if (list->remote && !files && probes_writes()) {
    try {
      prepare_probe(*list, type, list->shape.rows().front());
    } catch (...) {
      nixl_.release_xfer_dlist_handle(agent_, list->handle);
      throw;
    }
  }
  for (const Mapping* mapping : used) ++memories_.at(mapping).lists;
  if (list->remote && !files) ++remotes_.at(*list->remote).lists;
  for (const uint64_t file : used_files) ++files_.at(file).lists;
  list->memories = std::move(used);
  list->files = std::move(used_files);
  lists_.insert(list);
  counters_.prepared_lists = lists_.size();
  return list;
}

void AgentState::release(const std::shared_ptr<List>& released) {
  const std::shared_ptr<List> list = released;  // the argument may be the set's own
  if (list->handle != nullptr) nixl_.release_xfer_dlist_handle(agent_, std::exchange(list->handle, nullptr));
  if (list->indexed != nullptr) nixl_.release_xfer_dlist_handle(agent_, std::exchange(list->indexed, nullptr));
  if (list->probe != nullptr) nixl_.release_xfer_dlist_handle(agent_, std::exchange(list->probe, nullptr));
  for (const Mapping* mapping : list->memories) --memories_.at(mapping).lists;
  for (const uint64_t file : list->files) --files_.at(file).lists;
  if (list->remote && !of_files(*list) && !list->lost) --remotes_.at(*list->remote).lists;
  lists_.erase(list);
  counters_.prepared_lists = lists_.size();
}

}  // namespace kv::nixl
