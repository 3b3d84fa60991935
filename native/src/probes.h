// READs of one byte, for a backend that calls a WRITE done when its bytes have left: when one is done, so is every WRITE to that peer that
// was posted before.
#pragma once

#include <memory>

#include "descriptors.h"
#include "handle.h"
#include "list.h"
#include "mapping.h"
#include "nixl_capi.h"

namespace kv::nixl {

class Probes {
 public:
  // Registers a page of its own to read to. Both outlive it.
  Probes(const capi::Functions& nixl, capi::Agent agent);
  ~Probes();
  Probes(const Probes&) = delete;
  Probes& operator=(const Probes&) = delete;

  // Makes the list's first byte ready to be read.
  void prepare(List& remote) const;
  // A request that reads it. Null on failure.
  capi::Request make(const List& remote) const;

 private:
  const capi::Functions& nixl_;
  capi::Agent agent_;
  std::shared_ptr<Mapping> page_;
  Handle<capi::RegDlist> registration_;
  capi::PreparedDlist to_ = nullptr;
};

}  // namespace kv::nixl
