// READs of one byte, for a backend that calls a WRITE done when its bytes have left: when one is done, so is every WRITE to that peer that
// was posted before.
#pragma once

#include <memory>

#include "memory/descriptor_layout.h"
#include "library/handle.h"
#include "memory/prepared_list.h"
#include "memory/mapping.h"
#include "library/nixl_capi.h"

namespace kv::nixl {

class LandingProbe {
 public:
  // Registers a page of its own to read to. Both outlive it.
  LandingProbe(const capi::Functions& nixl, capi::Agent agent);
  ~LandingProbe();
  LandingProbe(const LandingProbe&) = delete;
  LandingProbe& operator=(const LandingProbe&) = delete;

  // Makes the list's first byte ready to be read.
  void prepare(PreparedList& remote) const;
  // A request that reads it. Null on failure.
  capi::Request make(const PreparedList& remote) const;

 private:
  const capi::Functions& nixl_;
  capi::Agent agent_;
  std::shared_ptr<Mapping> page_;
  Handle<capi::RegDlist> registration_;
  capi::PreparedDlist to_ = nullptr;
};

}  // namespace kv::nixl
