// Requests, from the making to the release.
#include "faults.h"
#include "world.h"

namespace kv::nixl::capi {

extern "C" {
API(create_opt_args)(OptArgs* out) {
  *out = new OptArgsObject;
  return kSuccess;
}
API(destroy_opt_args)(OptArgs args) {
  delete args;
  return kSuccess;
}
API(opt_args_set_notif_msg)(OptArgs args, const void* data, size_t length) {
  args->message.assign(static_cast<const char*>(data), length);
  return kSuccess;
}
API(opt_args_set_has_notif)(OptArgs args, bool has) {
  args->notifies = has;
  return kSuccess;
}
API(make_xfer_req)(Agent agent, Operation operation, PreparedDlist local, const int* local_ids, size_t count,
                   PreparedDlist remote, const int* remote_ids, size_t remote_count, Request* out, OptArgs) {
  LOCKED;
  own(agent);
  if (!agent->lists.contains(local) || !agent->lists.contains(remote)) broken("a request of lists that are gone");
  if (remote->dropped) broken("a request of a list whose peer has been dropped");
  if (count == 0 || count != remote_count) broken("a request of no descriptors, or of unequal numbers");
  auto* request = new RequestObject;
  for (size_t index = 0; index < count; ++index) {
    const Descriptor& here = local->descriptors.at(static_cast<size_t>(local_ids[index]));
    const Descriptor& there = remote->descriptors.at(static_cast<size_t>(remote_ids[index]));
    if (here.length != there.length) broken("a pair of unequal lengths");
    request->copies.emplace_back(operation == Operation::read ? there : here, operation == Operation::read ? here : there);
  }
  request->remote = remote->remote;
  request->writes = operation == Operation::write;
  ++agent->requests;
  *out = request;
  return kSuccess;
}
API(create_xfer_req)(Agent agent, Operation operation, XferDlist local, XferDlist remote, const char* name, Request* out, OptArgs) {
  LOCKED;
  own(agent);
  const size_t count = local->descriptors.size();
  if (count == 0 || count != remote->descriptors.size()) broken("a request of no descriptors, or of unequal numbers");
  if (!agent->remotes.contains(name)) return kNotFound;
  auto* request = new RequestObject;
  for (size_t index = 0; index < count; ++index) {
    const Descriptor& here = local->descriptors[index];
    const Descriptor& there = remote->descriptors[index];
    if (here.length != there.length) broken("a pair of unequal lengths");
    if (!covered(agent->memory, here) || !covered(agent->remotes[name], there)) broken("a descriptor that is in no registration");
    request->copies.emplace_back(operation == Operation::read ? there : here, operation == Operation::read ? here : there);
  }
  request->remote = name;
  request->writes = operation == Operation::write;
  ++agent->requests;
  *out = request;
  return kSuccess;
}
API(post_xfer_req)(Agent agent, Request request, OptArgs options) {
  LOCKED;
  own(agent);
  if (request->status != kInvalidState) broken("a request posted twice");
  if (options != nullptr) {
    request->message = options->message;
    request->notifies = options->notifies;
  }
  if (nth("FAKE_NIXL_FAIL_POST")) return request->status = kBackendError;
  if (one_of("FAKE_NIXL_STRAY_ERRORS")) return stray(agent, request);
  request->polls = setting("FAKE_NIXL_POLLS");
  if (request->polls > 0 || setting("FAKE_NIXL_HOLD") > 0) return request->status = kInProgress;
  return complete(agent, request);
}
API(get_xfer_status)(Agent agent, Request request) {
  LOCKED;
  own(agent);
  if (request->released) broken("the status of a request that was released");
  if (request->status == kInProgress && one_of("FAKE_NIXL_STRAY_ERRORS")) return stray(agent, request);
  if (request->status == kInProgress && --request->polls <= 0 && setting("FAKE_NIXL_HOLD") <= 0) return complete(agent, request);
  return request->status;
}
API(release_xfer_req)(Agent agent, Request request) {
  LOCKED;
  own(agent);
  if (request->released) broken("a request released twice");
  if (setting("FAKE_NIXL_REFUSE_RELEASE") > 0) {
    nth("FAKE_NIXL_REFUSE_RELEASE");
    return kBackendError;
  }
  request->released = true;
  --agent->requests;
  return kSuccess;
}
API(destroy_xfer_req)(Request request) {
  if (!request->released) broken("a request destroyed before it was released");
  delete request;
  return kSuccess;
}
}  // extern "C"

}  // namespace kv::nixl::capi
