#include "agent/nixl_agent.h"

#include <algorithm>
#include <map>
#include <unordered_map>

#include "library/failure.h"

namespace kv::nixl {

namespace {

Handle<capi::Agent> create_agent(const capi::Functions& nixl, const AgentConfig& config) {
  // One thread makes every call, so NIXL needs no locks. Polling on that thread also answers faster
  // than NIXL's own progress thread.
  const capi::AgentConfig agent_config{.progress_thread = false,
                                       .listen_thread = false,
                                       .listen_port = 0,
                                       .thread_sync = capi::ThreadSync::none,
                                       .num_workers = 1,
                                       .progress_delay_us = 0,
                                       .listen_delay_us = 0,
                                       .capture_telemetry = config.capture_telemetry};
  const std::string refused = "NIXL refused the agent \"" + config.name + "\"";
  return Handle<capi::Agent>::make("KV_AGENT_INVALID", refused.c_str(), nixl.destroy_agent, nixl.create_configured_agent,
                                   config.name.c_str(), &agent_config);
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
      captures_telemetry_(config.capture_telemetry),
      backends_(library_, agent_.get()),
      poller_(nixl_, agent_.get(), counters),
      safeguards_(nixl_, agent_.get(), poller_),
      registrations_(nixl_, agent_.get(), backends_, counters),
      peers_(nixl_, agent_.get(), config.name, safeguards_, counters),
      requests_(nixl_, agent_.get()) {
  add_backends(config.selection);
}

NixlAgent::~NixlAgent() {
  while (!prepared_transfers_.empty()) release(*prepared_transfers_.begin());
  while (!lists_.empty()) release(*lists_.begin());
}

void NixlAgent::add_backends(const BackendSelection& selection) {
  for (const std::string& path : selection.preload) NixlLibrary::preload(path);
  for (const BackendSpec& spec : selection.backends) backends_.create(spec);
  has_brief_calls_ = has_brief_calls_ && selection.brief_calls;
  if (selection.notifies) poller_.enable();
  if (selection.watch_peers) safeguards_.watch_peers();
  if (selection.probe_writes) safeguards_.probe_writes();
}

Bytes NixlAgent::partial_metadata(const std::vector<uint64_t>& registrations) const {
  const auto serialized = [&](capi::RegDlist list) {
    void* data = nullptr;
    size_t length = 0;
    check(nixl_.get_local_partial_md(agent_.get(), list, &data, &length, nullptr), "KV_AGENT_INVALID", "NIXL has no metadata of this agent");
    return take_bytes(data, length);
  };
  // NIXL serialises one memory type at a time, and the connections only without any memory.
  std::vector<Bytes> parts;
  parts.push_back(serialized(make_registration_list(nixl_, capi::MemoryType::dram).get()));
  std::map<capi::MemoryType, Handle<capi::RegDlist>> lists;
  for (const uint64_t id : registrations) {
    const MemoryRange& range = registrations_.range_of(id);
    if (is_storage(range.type)) throw Failure("KV_AGENT_INVALID", "a peer cannot reach " + describe(range), "leave it out of the metadata");
    auto& list = lists[range.type];
    if (!list) list = make_registration_list(nixl_, range.type);
    add_range(nixl_, list.get(), range);
  }
  for (const auto& [type, list] : lists) parts.push_back(serialized(list.get()));
  return join_metadata(parts);
}

std::shared_ptr<PreparedList> NixlAgent::prepare(std::optional<std::string> remote, capi::MemoryType type, const DescriptorTable& table,
                                                 const std::atomic<bool>& stopping) {
  const bool storage = is_storage(type);
  if (storage && remote != name_) {
    throw Failure("KV_LIST_INVALID",
                  "a list of " + std::string(name_of(type)) + " belongs to " + (remote ? "\"" + *remote + "\"" : std::string("no agent")),
                  "prepare lists of files and objects with the agent that registered them: prepareRemote with that agent's own name");
  }
  // Lists under the agent's own name describe its own memory: storage, and the other side of a copy
  // within the agent.
  const bool of_peer = remote && remote != name_;
  if (of_peer) peers_.require_known(*remote);
  std::vector<Row> rows = read_rows(table, storage, stopping);
  auto memories = of_peer ? std::vector<RegisteredMemory*>() : registrations_.holding(type, rows);
  const bool writable = type != capi::MemoryType::object || are_whole_objects(rows, memories);
  auto list = std::make_shared<PreparedList>(std::move(remote), type, DescriptorLayout(std::move(rows)));
  list->writable = writable;
  list->of_peer = of_peer;
  // For local memory NIXL is asked when the first request by index needs it.
  if (list->remote) prepare_remote(*list);
  if (of_peer) safeguards_.prepare_probe(*list);
  list->memories = std::move(memories);
  for (RegisteredMemory* memory : list->memories) ++memory->lists;
  if (of_peer) peers_.add_list(*list);
  lists_.insert(list);
  counters_.prepared_lists = lists_.size();
  return list;
}

// Only NIXL knows what a peer has registered. It is given a descriptor per row, however many
// descriptors a row has.
void NixlAgent::prepare_remote(PreparedList& list) {
  capi::Status status = capi::kSuccess;
  list.spans = requests_.prepare(list, add_row_spans, status);
  if (!list.spans && list.layout.count() > list.layout.rows().size()) {
    // NIXL refuses a descriptor that spans several registrations, but may accept each descriptor of
    // such a row.
    list.mergeable = false;
    list.spans = requests_.prepare(list, add_each_descriptor, status);
  }
  if (list.spans) return;
  throw Failure("KV_LIST_INVALID",
                "NIXL refused a list of " + std::to_string(list.layout.count()) + " descriptors of \"" + *list.remote +
                    "\": " + describe(status),
                list.of_peer ? "every descriptor must lie in memory that the peer had registered when its metadata was made"
                             : "a backend of this agent must be able to copy within the agent, such as UCX");
}

void NixlAgent::release(const std::shared_ptr<PreparedList>& released) {
  const std::shared_ptr<PreparedList> list = released;  // a copy, since the argument may be an element of `lists_`
  for (PreparedHandle* handle : {&list->spans, &list->indexed, &list->probe}) handle->reset();
  for (RegisteredMemory* memory : list->memories) --memory->lists;
  if (list->of_peer) peers_.remove_list(*list);
  lists_.erase(list);
  counters_.prepared_lists = lists_.size();
}

void NixlAgent::start_slicing(Slicer& slicer, PreparedList& local, PreparedList& remote) {
  // An object is replaced by each WRITE to it, so its bytes must be one request. A post to storage
  // only starts the copy.
  const bool object = remote.type == capi::MemoryType::object;
  // A post that several threads make waits for them, whatever its status is.
  const unsigned threads = backends_.post_threads();
  slicer.set_post_copies(!object && (threads > 1 || peers_.post_copies(*remote.remote)), threads);
  if (slicer.can_use_indices() && requests_.prepare_indices(local, remote, slicer.count())) slicer.use_indices();
}

void NixlAgent::prepare(const std::shared_ptr<PreparedTransfer>& transfer) {
  transfer->make(*this);
  prepared_transfers_.insert(transfer);
}

void NixlAgent::release(const std::shared_ptr<PreparedTransfer>& released) {
  const std::shared_ptr<PreparedTransfer> transfer = released;  // a copy, since the argument may be an element of the set
  transfer->release(*this);
  prepared_transfers_.erase(transfer);
}

}  // namespace kv::nixl
