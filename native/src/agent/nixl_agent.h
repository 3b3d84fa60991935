#pragma once

#include <algorithm>
#include <map>
#include <set>

#include "agent/backends.h"
#include "agent/notification_poller.h"
#include "peers/peers.h"
#include "transfer/request_factory.h"

namespace kv::nixl {

struct AgentConfig {
  string library_path;
  string name;
  BackendSelection selection;
  // Makes NIXL measure each request.
  bool capture_telemetry = false;
};

// The NIXL objects of one agent, for the thread that has its turn. The agent's thread creates and
// destroys them. NIXL needs this order of release: prepared lists, peers, registrations, backends,
// agent.
class NixlAgent {
 public:
  // Loads NIXL. Throws KV_LIBRARY_INCOMPATIBLE, KV_AGENT_INVALID and KV_BACKEND_UNAVAILABLE.
  NixlAgent(const AgentConfig& config, Counters& counters)
      : name_(config.name),
        agent_(create_agent(config)),
        captures_telemetry(config.capture_telemetry),
        counters(counters),
        backends(agent_.get()),
        poller(agent_.get(), counters),
        safeguards(agent_.get(), poller),
        registrations(agent_.get(), backends, counters),
        peers(agent_.get(), config.name, safeguards, counters),
        requests(agent_.get()) {
    add_backends(config.selection);
  }
  ~NixlAgent() {
    while (!prepared_transfers_.empty()) release(*prepared_transfers_.begin());
    while (!lists_.empty()) release(*lists_.begin());
  }
  NixlAgent(const NixlAgent&) = delete;
  NixlAgent& operator=(const NixlAgent&) = delete;

  Agent handle() const { return agent_.get(); }

  // Whether small calls take microseconds with every backend.
  bool has_brief_calls() const { return has_brief_calls_; }
  // New backends do not know memory that is already registered. Throws KV_BACKEND_UNAVAILABLE.
  void add_backends(const BackendSelection& selection) {
    for (const string& path : selection.preload) preload_library(path);
    for (const BackendSpec& spec : selection.backends) backends.create(spec);
    has_brief_calls_ = has_brief_calls_ && selection.brief_calls;
    if (selection.notifies) poller.enable();
    if (selection.watch_peers) safeguards.watch_peers();
    if (selection.probe_writes) safeguards.probe_writes();
  }
  // Covers the memory registered now. Throws KV_AGENT_INVALID.
  Bytes metadata() const { return local_metadata(agent_.get()); }
  // Covers these registrations. Without connections a peer adds them to what it knows. Throws
  // KV_AGENT_INVALID and KV_MEMORY_NOT_REGISTERED.
  Bytes partial_metadata(const vector<uint64_t>& ids, bool connections) const {
    const auto serialized = [&](capi::RegDlist list) {
      void* data = nullptr;
      size_t length = 0;
      check(capi::get_local_partial_md(agent_.get(), list, &data, &length, nullptr),
            "KV_AGENT_INVALID", "NIXL has no metadata of this agent");
      return take_bytes(data, length);
    };
    // NIXL serialises one memory type at a time, and connections only without memory.
    vector<Bytes> parts;
    if (connections) parts.push_back(serialized(make_registration_list(MemoryType::dram).get()));
    std::map<MemoryType, OwnedRegList> lists;
    for (const uint64_t id : ids) {
      const MemoryRange& range = registrations.range_of(id);
      if (is_storage(range.type))
        throw Failure("KV_AGENT_INVALID", "a peer cannot reach " + describe(range),
                      "leave it out of the metadata");
      auto& list = lists[range.type];
      if (!list) list = make_registration_list(range.type);
      check(add_range(list, range), "KV_AGENT_INVALID",
            "NIXL refused a registration of the metadata");
    }
    for (const auto& [type, list] : lists) parts.push_back(serialized(list.get()));
    if (parts.empty())
      throw Failure("KV_AGENT_INVALID", "metadata of no memory has connections",
                    "name registrations, or leave out connections: false");
    return join_metadata(parts);
  }
  // Without `remote`, a list of the agent's own memory. `stopping` ends the reading of a large
  // table. Throws KV_LIST_INVALID, KV_MEMORY_NOT_REGISTERED, KV_AGENT_UNKNOWN_REMOTE and
  // KV_AGENT_CLOSED.
  shared_ptr<PreparedList> prepare(optional<string> remote, MemoryType type,
                                   const DescriptorTable& table, const atomic<bool>& stopping) {
    const bool storage = is_storage(type);
    if (storage && remote != name_) {
      throw Failure(
          "KV_LIST_INVALID",
          "a list of " + string(name_of(type)) + " belongs to " +
              (remote ? "\"" + *remote + "\"" : string("no agent")),
          "prepare lists of files and objects with the agent that registered them: prepareRemote with that agent's own name");
    }
    // The agent's own name stands for storage, or for the other side of a copy within the agent.
    const bool of_peer = remote && remote != name_;
    if (of_peer) peers.require_known(*remote);
    vector<Row> rows = read_rows(table, storage, stopping);
    auto memories = of_peer ? vector<RegisteredMemory*>() : registrations.holding(type, rows);
    const bool writable = type != MemoryType::object || are_whole_objects(rows, memories);
    auto list =
        make_shared<PreparedList>(std::move(remote), type, DescriptorLayout(std::move(rows)));
    list->writable = writable;
    list->of_peer = of_peer;
    // The first request by index prepares local memory at NIXL.
    if (list->remote) prepare_remote(*list);
    if (of_peer) safeguards.prepare_probe(*list);
    lists_.insert(list);
    try {
      if (of_peer) peers.add_list(*list);
    } catch (...) {
      lists_.erase(list);
      throw;
    }
    list->memories = std::move(memories);
    for (RegisteredMemory* memory : list->memories) ++memory->lists;
    counters.prepared_lists = lists_.size();
    return list;
  }
  // No transfer may use the list.
  void release(shared_ptr<PreparedList> list) {
    for (PreparedHandle* handle : {&list->spans, &list->indexed, &list->probe}) handle->reset();
    for (RegisteredMemory* memory : list->memories) --memory->lists;
    if (list->of_peer) peers.remove_list(*list);
    lists_.erase(list);
    counters.prepared_lists = lists_.size();
  }
  void start_slicing(Slicer& slicer, const Moves& moves) {
    // A WRITE replaces the object, so its bytes must be one request. A post to storage only starts
    // the copy.
    const bool object = moves.remote->type == MemoryType::object;
    // A post by several threads returns after the copy, whatever its status.
    const unsigned threads = backends.post_threads();
    slicer.set_post_copies(!object && (threads > 1 || peers.post_copies(moves.peer())), threads);
    if (slicer.can_use_indices() && requests.prepare_indices(moves, slicer.count()))
      slicer.use_indices();
  }
  // Makes requests for many posts. Throws KV_TRANSFER_FAILED.
  void prepare(const shared_ptr<PreparedTransfer>& transfer) {
    prepared_transfers_.insert(transfer);
    try {
      transfer->make(*this);
    } catch (...) {
      release(transfer);
      throw;
    }
  }
  // The transfer must not be under way.
  void release(shared_ptr<PreparedTransfer> transfer) {
    transfer->release(*this);
    prepared_transfers_.erase(transfer);
  }

  // Whether peers may reach something here.
  bool reachable() const { return registrations.any_reachable() || peers.any(); }

 private:
  static OwnedAgent create_agent(const AgentConfig& config) {
    // One thread at a time calls, so NIXL needs no locks and no threads of its own. Polling also
    // answers faster than NIXL's progress thread.
    const capi::AgentConfig agent_config{.thread_sync = capi::ThreadSync::none,
                                         .num_workers = 1,
                                         .capture_telemetry = config.capture_telemetry};
    load_nixl(config.library_path);
    return make<OwnedAgent>("KV_AGENT_INVALID", "NIXL refused the agent \"" + config.name + "\"",
                            capi::create_configured_agent, config.name.c_str(), &agent_config);
  }

  // A WRITE replaces objects, so it cannot write part of one.
  static bool are_whole_objects(const vector<Row>& rows, const vector<RegisteredMemory*>& objects) {
    unordered_map<uint64_t, uint64_t> lengths;
    for (const RegisteredMemory* object : objects)
      lengths.emplace(object->range.device, object->range.length);
    return std::ranges::all_of(rows, [&](const Row& row) {
      return row.count == 1 && row.length == lengths.at(row.device);
    });
  }

  // Only NIXL knows what a peer has registered. It gets one descriptor per row.
  void prepare_remote(PreparedList& list) {
    Status status = kSuccess;
    list.spans = requests.prepare(list, add_row_spans, status);
    if (!list.spans && list.layout.count() > list.layout.rows().size()) {
      // NIXL refuses a descriptor across registrations, but may accept each of the row's
      // descriptors.
      list.mergeable = false;
      list.spans = requests.prepare(list, add_each_descriptor, status);
    }
    if (list.spans) return;
    throw Failure(
        "KV_LIST_INVALID",
        "NIXL refused a list of " + to_string(list.layout.count()) + " descriptors of \"" +
            *list.remote + "\": " + describe(status),
        list.of_peer
            ? "every descriptor must lie in memory that the peer had registered when its metadata was made"
            : "a backend of this agent must be able to copy within the agent, such as UCX");
  }

  const string name_;
  // The order matters: members are destroyed from the last to the first.
  OwnedAgent agent_;
  bool has_brief_calls_ = true;

 public:
  const bool captures_telemetry;
  Counters& counters;
  Backends backends;
  NotificationPoller poller;
  LibfabricSafeguards safeguards;
  Registrations registrations;
  Peers peers;
  RequestFactory requests;

 private:
  std::set<shared_ptr<PreparedList>> lists_;
  std::set<shared_ptr<PreparedTransfer>> prepared_transfers_;
};

}  // namespace kv::nixl
