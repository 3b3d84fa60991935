#include "libfabric/landing_probe.h"

#include "library/failure.h"

namespace kv::nixl {

namespace {

constexpr size_t kPageBytes = 4096;

}  // namespace

LandingProbe::LandingProbe(const capi::Functions& nixl, capi::Agent agent)
    : nixl_(nixl),
      agent_(agent),
      page_(Mapping::create(kPageBytes)),
      registration_(Handle<capi::RegDlist>::make("KV_INTERNAL", "no registration list", nixl.destroy_reg_dlist,
                                                 nixl.create_reg_dlist, capi::MemoryType::dram)) {
  page_->await_touched();
  check(nixl_.reg_dlist_add_desc(registration_.get(), page_->address(), page_->length(), 0, nullptr, 0), "KV_INTERNAL",
        "NIXL refused the descriptor of the scratch page");
  check(nixl_.register_mem(agent_, registration_.get(), nullptr), "KV_INTERNAL", "NIXL could not register the scratch page");
  try {
    const auto one = Handle<capi::XferDlist>::make("KV_INTERNAL", "no descriptor list", nixl_.destroy_xfer_dlist,
                                                   nixl_.create_xfer_dlist, capi::MemoryType::dram);
    check(nixl_.xfer_dlist_add_desc(one.get(), page_->address(), 1, 0), "KV_INTERNAL", "NIXL refused a descriptor");
    check(nixl_.prep_xfer_dlist(agent_, capi::kSelf, one.get(), &to_, nullptr), "KV_INTERNAL", "NIXL refused the scratch list");
  } catch (...) {
    nixl_.deregister_mem(agent_, registration_.get(), nullptr);
    throw;
  }
}

LandingProbe::~LandingProbe() {
  nixl_.release_xfer_dlist_handle(agent_, to_);
  nixl_.deregister_mem(agent_, registration_.get(), nullptr);
}

void LandingProbe::prepare(PreparedList& remote) const {
  const Row& first = remote.shape.rows().front();
  const auto one = Handle<capi::XferDlist>::make("KV_LIST_INVALID", "no descriptor list", nixl_.destroy_xfer_dlist,
                                                 nixl_.create_xfer_dlist, remote.type);
  check(nixl_.xfer_dlist_add_desc(one.get(), first.address, 1, first.device), "KV_LIST_INVALID", "NIXL refused a descriptor");
  check(nixl_.prep_xfer_dlist(agent_, remote.remote->c_str(), one.get(), &remote.probe, nullptr), "KV_LIST_INVALID",
        "NIXL refused a list of one byte");
}

capi::Request LandingProbe::make(const PreparedList& remote) const {
  const int first = 0;
  capi::Request request = nullptr;
  const capi::Status made = nixl_.make_xfer_req(agent_, capi::Operation::read, to_, &first, 1, remote.probe, &first, 1, &request,
                                                nullptr);
  return made == capi::kSuccess ? request : nullptr;
}

}  // namespace kv::nixl
