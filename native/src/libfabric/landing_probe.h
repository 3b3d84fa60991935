#pragma once

#include <memory>

#include "library/nixl_capi.h"
#include "memory/mapping.h"
#include "memory/prepared_list.h"
#include "memory/registrations.h"

namespace kv::nixl {

// READs of one byte, for a backend that reports a WRITE as done when its bytes have left: when such
// a READ is done, every WRITE to the same peer that was posted before it has landed.
class LandingProbe {
 public:
  // Registers a page of its own as the target of the READs. Both arguments outlive it. Throws
  // KV_INTERNAL.
  LandingProbe(const capi::Functions& nixl, capi::Agent agent);

  // Prepares the first byte of a peer's list, so that probes can read it. Throws KV_LIST_INVALID.
  void prepare(PreparedList& remote) const;
  // A NIXL request that reads that byte; the caller owns it. Null when NIXL refuses.
  capi::Request make(const PreparedList& remote) const;

 private:
  uint64_t target_address() const;

  const capi::Functions& nixl_;
  capi::Agent agent_;
  std::shared_ptr<Mapping> pages_;
  NixlRegistration registration_;
  PreparedHandle target_;
};

}  // namespace kv::nixl
