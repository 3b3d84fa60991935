#include "libfabric/safeguards.h"

#include "peers/agent_metadata.h"

namespace kv::nixl {

namespace {

constexpr const char* kBackend = "LIBFABRIC";
// How long after a peer's death NIXL gives up requests to it. By then its data has arrived or is
// lost.
constexpr auto kQuarantine = seconds(5);
// Attempts to load metadata while a peer's death explains NIXL's refusal.
constexpr int kMaxLoads = 4;
// NIXL 1.5.0 numbers LIBFABRIC peers with 8 bits and reuses no number.
constexpr int kMaxPeers = 255;

// Errors that a transfer attributes to other peers. A death rarely causes more than one per
// connection.
constexpr int kMaxErrors = 16;
// A death explains errors up to 5 s later and 500 ms earlier: the kernel ends a process's
// connections one after another.
constexpr auto kDeathBefore = seconds(5);
constexpr auto kDeathAfter = milliseconds(500);

constexpr size_t kPageBytes = 4096;

// Only the middle of three pages is registered, so callers' memory never adjoins it. Rows that
// leave it lie outside all registered memory.
shared_ptr<Mapping> pages_with_target() {
  auto pages = Mapping::create(3 * kPageBytes, false);
  pages->data()[kPageBytes] = byte{1};
  return pages;
}

PreparedHandle prepare_byte(Agent agent, const char* code, const char* remote, MemoryType type, uint64_t address, uint64_t device) {
  const auto byte = make<OwnedXferList>(code, "NIXL could not create a descriptor list", capi::create_xfer_dlist, type);
  check(capi::xfer_dlist_add_desc(byte.get(), address, 1, device), code, "NIXL refused a descriptor");
  capi::PreparedDlist prepared = nullptr;
  check(capi::prep_xfer_dlist(agent, remote, byte.get(), &prepared, nullptr), code, "NIXL refused a list of one byte");
  return PreparedHandle(prepared, {agent});
}

}  // namespace

LandingProbe::LandingProbe(Agent agent)
    : agent_(agent),
      pages_(pages_with_target()),
      registration_(agent, {.type = MemoryType::dram, .address = target_address(), .length = kPageBytes, .device = 0}, {}, false,
                    [](Status status) {
                      return Failure("KV_INTERNAL", string("NIXL could not register the target of landing probes: ") + describe(status));
                    }),
      target_(prepare_byte(agent, "KV_INTERNAL", capi::kSelf, MemoryType::dram, target_address(), 0)) {}

uint64_t LandingProbe::target_address() const { return pages_->address + kPageBytes; }

void LandingProbe::prepare(PreparedList& remote) const {
  const Row& first = remote.layout.rows().front();
  remote.probe = prepare_byte(agent_, "KV_LIST_INVALID", remote.remote->c_str(), remote.type, first.address, first.device);
}

Request LandingProbe::make(const PreparedList& remote) const {
  const int first = 0;
  Request request = nullptr;
  const Status made = capi::make_xfer_req(agent_, Operation::read, target_.get(), &first, 1, remote.probe.get(), &first, 1, &request, nullptr);
  return made == kSuccess ? request : nullptr;
}

void LibfabricSafeguards::require_tcp_address(const string& peer, const Connections& connections) {
  const auto connection = connections.find(kBackend);
  if (!watch_peers_ || connection == connections.end()) return;
  if (!uses_tcp_) {
    const AgentMetadata own = read_metadata(local_metadata(agent_));
    const auto mine = own.connections.find(kBackend);
    uses_tcp_ = mine != own.connections.end() && PeerLiveness::has_tcp_address(mine->second);
  }
  if (!*uses_tcp_ || PeerLiveness::has_tcp_address(connection->second)) return;
  throw Failure("KV_AGENT_METADATA_INVALID",
                "the metadata of \"" + peer + "\" contains no TCP address, which this agent's LIBFABRIC backend needs to reach its peers",
                "pass the peer's localMetadata() whole, and use the same libfabric provider on both sides (FI_PROVIDER)");
}

unique_ptr<PeerLiveness> LibfabricSafeguards::start_watch(const string& peer, const Connections& connections,
                                                                bool same_process) {
  const auto connection = connections.find(kBackend);
  if (!watch_peers_ || connection == connections.end()) return nullptr;
  // Watches a known peer again if it was taken for dead.
  PeerLiveness* present = watch_of(peer);
  if (same_process && present != nullptr && present->alive()) return nullptr;
  return PeerLiveness::connect_to(connection->second);
}

bool LibfabricSafeguards::answered(const string& peer, PeerLiveness* liveness) {
  if (liveness == nullptr || liveness->connected()) return true;
  if (liveness->alive()) return false;
  throw Failure("KV_AGENT_METADATA_INVALID",
                "nothing answers at the address in the metadata of \"" + peer + "\": its process is gone, or its host cannot be reached",
                "pass the metadata of the process that runs now");
}

void LibfabricSafeguards::keep_watch(const string& peer, unique_ptr<PeerLiveness> liveness) {
  if (liveness) watched_[peer] = std::move(liveness);
}

void LibfabricSafeguards::end_watch(const string& peer) {
  const auto found = watched_.find(peer);
  if (found == watched_.end()) return;
  note_death(*found->second);
  watched_.erase(found);
}

bool LibfabricSafeguards::may_retry_load(int attempts) {
  return watch_peers_ && attempts < kMaxLoads && any_death_after(Clock::now() - kQuarantine);
}

optional<Failure> LibfabricSafeguards::peer_limit_reached(const string& peer) const {
  if (!watch_peers_ || loaded_peers_ < kMaxPeers) return nullopt;
  return Failure("KV_AGENT_METADATA_INVALID",
                 "NIXL refused the metadata of \"" + peer + "\": its LIBFABRIC plugin accepts at most " + to_string(kMaxPeers) +
                     " peers in an agent's life, counting those that were removed and added again",
                 "create a new agent");
}

PeerLiveness* LibfabricSafeguards::watch_of(const string& peer) const {
  if (!watch_peers_) return nullptr;
  const auto found = watched_.find(peer);
  return found == watched_.end() ? nullptr : found->second.get();
}

bool LibfabricSafeguards::is_dead(const string& peer) {
  PeerLiveness* liveness = watch_of(peer);
  return liveness != nullptr && !liveness->alive();
}

Clock::duration LibfabricSafeguards::dead_for(const string& peer) const {
  const PeerLiveness* liveness = watch_of(peer);
  return liveness == nullptr ? Clock::duration::zero() : liveness->dead_for();
}

bool LibfabricSafeguards::known_dead(const string& peer) const { return dead_for(peer) > Clock::duration::zero(); }

bool LibfabricSafeguards::quarantine_over(const string& peer) const { return dead_for(peer) >= kQuarantine; }

bool LibfabricSafeguards::check_peers() {
  note_deaths();
  return std::exchange(new_death_, false);
}

void LibfabricSafeguards::note_deaths() {
  for (const auto& [name, liveness] : watched_) {
    liveness->maybe_alive();
    note_death(*liveness);
  }
}

void LibfabricSafeguards::note_death(const PeerLiveness& liveness) {
  const auto& died = liveness.died_at();
  if (!died || (last_death_ && *died <= *last_death_)) return;
  last_death_ = died;
  new_death_ = true;
}

bool LibfabricSafeguards::any_death_after(Clock::time_point time) {
  note_deaths();
  return last_death_ && *last_death_ > time;
}

bool LibfabricSafeguards::error_may_be_anothers(const string& peer) {
  PeerLiveness* liveness = watch_of(peer);
  if (liveness == nullptr) return false;
  poller_.drain_errors();
  note_deaths();
  return liveness->alive();
}

bool AmbiguousFailure::record(Request request, const Failure& failure) {
  if (errors_ >= kMaxErrors || !safeguards_.error_may_be_anothers(peer_)) return false;
  ++errors_;
  if (!failure_) {
    failed_at_ = Clock::now();
    failure_ = failure;
  }
  if (request != nullptr) requests_.push_back(request);
  probing_ = false;
  return true;
}

AmbiguousFailure::Step AmbiguousFailure::next_step(bool outcome_closed) {
  if (safeguards_.is_dead(peer_)) return safeguards_.quarantine_over(peer_) ? Step::release : Step::wait;
  if (!probe_succeeded_) return Step::probe;
  if (outcome_closed) return Step::release;
  if (safeguards_.any_death_after(failed_at_ - kDeathBefore)) return Step::restart;
  return Clock::now() - failed_at_ < kDeathAfter ? Step::wait : Step::fail;
}

vector<Request> AmbiguousFailure::clear() {
  failure_.reset();
  probing_ = false;
  probe_succeeded_ = false;
  return std::exchange(requests_, {});
}

}  // namespace kv::nixl
