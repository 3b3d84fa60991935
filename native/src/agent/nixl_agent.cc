#include "agent/nixl_agent.h"

#include <algorithm>
#include <map>

namespace kv::nixl {

namespace {

OwnedAgent create_agent(const AgentConfig& config) {
  // One thread at a time calls, so NIXL needs no locks. Polling also answers faster than NIXL's
  // progress thread.
  const capi::AgentConfig agent_config{.progress_thread = false,
                                       .listen_thread = false,
                                       .listen_port = 0,
                                       .thread_sync = capi::ThreadSync::none,
                                       .num_workers = 1,
                                       .progress_delay_us = 0,
                                       .listen_delay_us = 0,
                                       .capture_telemetry = config.capture_telemetry};
  load_nixl(config.library_path);
  return make<OwnedAgent>("KV_AGENT_INVALID", "NIXL refused the agent \"" + config.name + "\"", capi::create_configured_agent, config.name.c_str(),
                          &agent_config);
}

// A WRITE replaces objects, so it cannot write part of one.
bool are_whole_objects(const vector<Row>& rows, const vector<RegisteredMemory*>& objects) {
  unordered_map<uint64_t, uint64_t> lengths;
  for (const RegisteredMemory* object : objects) lengths.emplace(object->range.device, object->range.length);
  return std::ranges::all_of(rows, [&](const Row& row) { return row.count == 1 && row.length == lengths.at(row.device); });
}

}  // namespace

NixlAgent::NixlAgent(const AgentConfig& config, Counters& counters)
    : counters_(counters),
      name_(config.name),
      agent_(create_agent(config)),
      captures_telemetry_(config.capture_telemetry),
      backends_(agent_.get()),
      poller_(agent_.get(), counters),
      safeguards_(agent_.get(), poller_),
      registrations_(agent_.get(), backends_, counters),
      peers_(agent_.get(), config.name, safeguards_, counters),
      requests_(agent_.get()) {
  add_backends(config.selection);
}

NixlAgent::~NixlAgent() {
  while (!prepared_transfers_.empty()) release(*prepared_transfers_.begin());
  while (!lists_.empty()) release(*lists_.begin());
}

void NixlAgent::add_backends(const BackendSelection& selection) {
  for (const string& path : selection.preload) preload_library(path);
  for (const BackendSpec& spec : selection.backends) backends_.create(spec);
  has_brief_calls_ = has_brief_calls_ && selection.brief_calls;
  if (selection.notifies) poller_.enable();
  if (selection.watch_peers) safeguards_.watch_peers();
  if (selection.probe_writes) safeguards_.probe_writes();
}

Bytes NixlAgent::partial_metadata(const vector<uint64_t>& registrations, bool connections) const {
  const auto serialized = [&](capi::RegDlist list) {
    void* data = nullptr;
    size_t length = 0;
    check(capi::get_local_partial_md(agent_.get(), list, &data, &length, nullptr), "KV_AGENT_INVALID", "NIXL has no metadata of this agent");
    return take_bytes(data, length);
  };
  // NIXL serialises one memory type at a time, and connections only without memory.
  vector<Bytes> parts;
  if (connections) parts.push_back(serialized(make_registration_list(MemoryType::dram).get()));
  std::map<MemoryType, OwnedRegList> lists;
  for (const uint64_t id : registrations) {
    const MemoryRange& range = registrations_.range_of(id);
    if (is_storage(range.type)) throw Failure("KV_AGENT_INVALID", "a peer cannot reach " + describe(range), "leave it out of the metadata");
    auto& list = lists[range.type];
    if (!list) list = make_registration_list(range.type);
    check(add_range(list, range), "KV_AGENT_INVALID", "NIXL refused a registration of the metadata");
  }
  for (const auto& [type, list] : lists) parts.push_back(serialized(list.get()));
  if (parts.empty()) throw Failure("KV_AGENT_INVALID", "metadata of no memory has connections", "name registrations, or leave out connections: false");
  return join_metadata(parts);
}

shared_ptr<PreparedList> NixlAgent::prepare(optional<string> remote, MemoryType type, const DescriptorTable& table,
                                                 const atomic<bool>& stopping) {
  const bool storage = is_storage(type);
  if (storage && remote != name_) {
    throw Failure("KV_LIST_INVALID",
                  "a list of " + string(name_of(type)) + " belongs to " + (remote ? "\"" + *remote + "\"" : string("no agent")),
                  "prepare lists of files and objects with the agent that registered them: prepareRemote with that agent's own name");
  }
  // The agent's own name stands for storage, or for the other side of a copy within the agent.
  const bool of_peer = remote && remote != name_;
  if (of_peer) peers_.require_known(*remote);
  vector<Row> rows = read_rows(table, storage, stopping);
  auto memories = of_peer ? vector<RegisteredMemory*>() : registrations_.holding(type, rows);
  const bool writable = type != MemoryType::object || are_whole_objects(rows, memories);
  auto list = make_shared<PreparedList>(std::move(remote), type, DescriptorLayout(std::move(rows)));
  list->writable = writable;
  list->of_peer = of_peer;
  // The first request by index prepares local memory at NIXL.
  if (list->remote) prepare_remote(*list);
  if (of_peer) safeguards_.prepare_probe(*list);
  lists_.insert(list);
  try {
    if (of_peer) peers_.add_list(*list);
  } catch (...) {
    lists_.erase(list);
    throw;
  }
  list->memories = std::move(memories);
  for (RegisteredMemory* memory : list->memories) ++memory->lists;
  counters_.prepared_lists = lists_.size();
  return list;
}

// Only NIXL knows what a peer has registered. It gets one descriptor per row.
void NixlAgent::prepare_remote(PreparedList& list) {
  Status status = kSuccess;
  list.spans = requests_.prepare(list, add_row_spans, status);
  if (!list.spans && list.layout.count() > list.layout.rows().size()) {
    // NIXL refuses a descriptor across registrations, but may accept each of the row's descriptors.
    list.mergeable = false;
    list.spans = requests_.prepare(list, add_each_descriptor, status);
  }
  if (list.spans) return;
  throw Failure("KV_LIST_INVALID",
                "NIXL refused a list of " + to_string(list.layout.count()) + " descriptors of \"" + *list.remote +
                    "\": " + describe(status),
                list.of_peer ? "every descriptor must lie in memory that the peer had registered when its metadata was made"
                             : "a backend of this agent must be able to copy within the agent, such as UCX");
}

void NixlAgent::release(const shared_ptr<PreparedList>& released) {
  const shared_ptr<PreparedList> list = released;  // a copy, since the argument may be an element of `lists_`
  for (PreparedHandle* handle : {&list->spans, &list->indexed, &list->probe}) handle->reset();
  for (RegisteredMemory* memory : list->memories) --memory->lists;
  if (list->of_peer) peers_.remove_list(*list);
  lists_.erase(list);
  counters_.prepared_lists = lists_.size();
}

void NixlAgent::start_slicing(Slicer& slicer, const Moves& moves) {
  // A WRITE replaces the object, so its bytes must be one request. A post to storage only starts
  // the copy.
  const bool object = moves.remote->type == MemoryType::object;
  // A post by several threads returns after the copy, whatever its status.
  const unsigned threads = backends_.post_threads();
  slicer.set_post_copies(!object && (threads > 1 || peers_.post_copies(moves.peer())), threads);
  if (slicer.can_use_indices() && requests_.prepare_indices(moves, slicer.count())) slicer.use_indices();
}

void NixlAgent::prepare(const shared_ptr<PreparedTransfer>& transfer) {
  prepared_transfers_.insert(transfer);
  try {
    transfer->make(*this);
  } catch (...) {
    release(transfer);
    throw;
  }
}

void NixlAgent::release(const shared_ptr<PreparedTransfer>& released) {
  const shared_ptr<PreparedTransfer> transfer = released;  // a copy, since the argument may be an element of the set
  transfer->release(*this);
  prepared_transfers_.erase(transfer);
}

}  // namespace kv::nixl
