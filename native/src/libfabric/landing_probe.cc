#include "libfabric/landing_probe.h"

#include "library/failure.h"
#include "library/handle.h"

namespace kv::nixl {

namespace {

constexpr size_t kPageBytes = 4096;

// Three pages, of which the middle one is registered. Memory of a caller never lies beside it, so
// rows that begin before that memory, or go past it, lie outside all registered memory.
std::shared_ptr<Mapping> pages_with_target() {
  auto pages = Mapping::create(3 * kPageBytes, false);
  pages->data()[kPageBytes] = std::byte{1};
  return pages;
}

// A prepared list of one byte.
PreparedHandle prepare_byte(const capi::Functions& nixl, capi::Agent agent, const char* code, const char* remote, capi::MemoryType type,
                            uint64_t address, uint64_t device) {
  const auto byte = Handle<capi::XferDlist>::make(code, "NIXL could not create a descriptor list", nixl.destroy_xfer_dlist,
                                                  nixl.create_xfer_dlist, type);
  check(nixl.xfer_dlist_add_desc(byte.get(), address, 1, device), code, "NIXL refused a descriptor");
  capi::PreparedDlist prepared = nullptr;
  check(nixl.prep_xfer_dlist(agent, remote, byte.get(), &prepared, nullptr), code, "NIXL refused a list of one byte");
  return PreparedHandle(nixl, agent, prepared);
}

// Options that leave the choice of backends to NIXL.
std::vector<Handle<capi::OptArgs>> default_backends() {
  std::vector<Handle<capi::OptArgs>> options;
  options.emplace_back();
  return options;
}

}  // namespace

LandingProbe::LandingProbe(const capi::Functions& nixl, capi::Agent agent)
    : nixl_(nixl),
      agent_(agent),
      pages_(pages_with_target()),
      registration_(nixl, agent,
                    {.type = capi::MemoryType::dram, .address = target_address(), .length = kPageBytes, .device = 0}, default_backends(), false,
                    [](capi::Status status) {
                      return Failure("KV_INTERNAL", std::string("NIXL could not register the target of landing probes: ") + describe(status));
                    }),
      target_(prepare_byte(nixl, agent, "KV_INTERNAL", capi::kSelf, capi::MemoryType::dram, target_address(), 0)) {}

uint64_t LandingProbe::target_address() const { return pages_->address() + kPageBytes; }

void LandingProbe::prepare(PreparedList& remote) const {
  const Row& first = remote.layout.rows().front();
  remote.probe = prepare_byte(nixl_, agent_, "KV_LIST_INVALID", remote.remote->c_str(), remote.type, first.address, first.device);
}

capi::Request LandingProbe::make(const PreparedList& remote) const {
  const int first = 0;
  capi::Request request = nullptr;
  const capi::Status made = nixl_.make_xfer_req(agent_, capi::Operation::read, target_.get(), &first, 1, remote.probe.get(), &first, 1,
                                                &request, nullptr);
  return made == capi::kSuccess ? request : nullptr;
}

}  // namespace kv::nixl
