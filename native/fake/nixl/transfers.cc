#include "faults.h"
#include "world.h"

namespace kv::nixl::capi {

extern "C" {
API(create_opt_args)(OptArgs* out) try {
  *out = new OptArgsObject;
  return kSuccess;
} OR_EXCEPTION
API(destroy_opt_args)(OptArgs args) try {
  delete args;
  return kSuccess;
} OR_EXCEPTION
API(opt_args_add_backend)(OptArgs args, Backend backend) try {
  args->backends.insert(backend->name);
  return kSuccess;
} OR_EXCEPTION
API(opt_args_set_notif_msg)(OptArgs args, const void* data, size_t length) try {
  args->message.assign(static_cast<const char*>(data), length);
  return kSuccess;
} OR_EXCEPTION
API(opt_args_set_has_notif)(OptArgs args, bool has) try {
  args->notifies = has;
  return kSuccess;
} OR_EXCEPTION
API(make_xfer_req)(Agent agent, Operation operation, PreparedDlist local, const int* local_ids, size_t count,
                   PreparedDlist remote, const int* remote_ids, size_t remote_count, Request* out, OptArgs) try {
  ALONE(agent);
  LOCKED;
  if (!agent->lists.contains(local) || !agent->lists.contains(remote)) rule_broken("a request of lists that were released");
  if (remote->dropped) rule_broken("a request of a list whose peer was dropped");
  if (count == 0 || count != remote_count) rule_broken("a request without descriptors, or with unequal numbers of them");
  auto* request = new RequestObject;
  for (size_t index = 0; index < count; ++index) {
    const Descriptor& here = local->descriptors.at(static_cast<size_t>(local_ids[index]));
    const Descriptor& there = remote->descriptors.at(static_cast<size_t>(remote_ids[index]));
    if (here.length != there.length) rule_broken("a pair of descriptors of unequal length");
    request->copies.emplace_back(operation == Operation::read ? there : here, operation == Operation::read ? here : there);
  }
  request->remote = remote->remote;
  request->writes = operation == Operation::write;
  ++agent->requests;
  *out = request;
  return kSuccess;
} OR_EXCEPTION
API(create_xfer_req)(Agent agent, Operation operation, XferDlist local, XferDlist remote, const char* name, Request* out, OptArgs) try {
  ALONE(agent);
  LOCKED;
  const size_t count = local->descriptors.size();
  if (count == 0 || count != remote->descriptors.size()) rule_broken("a request without descriptors, or with unequal numbers of them");
  const bool own = agent->name == name;
  if (!own && !agent->remotes.contains(name)) return kNotFound;
  auto* request = new RequestObject;
  for (size_t index = 0; index < count; ++index) {
    const Descriptor& here = local->descriptors[index];
    const Descriptor& there = remote->descriptors[index];
    if (here.length != there.length) rule_broken("a pair of descriptors of unequal length");
    if (!is_within(agent->memory, here) || !is_within(own ? agent->memory : agent->remotes[name], there)) rule_broken("a descriptor outside every registration");
    request->copies.emplace_back(operation == Operation::read ? there : here, operation == Operation::read ? here : there);
  }
  request->remote = name;
  request->writes = operation == Operation::write;
  ++agent->requests;
  *out = request;
  return kSuccess;
} OR_EXCEPTION
API(post_xfer_req)(Agent agent, Request request, OptArgs options) try {
  ALONE(agent);
  stall("FAKE_NIXL_STALL_CALLS");
  LOCKED;
  if (request->released) rule_broken("a post of a released request");
  if (request->status == kInProgress) rule_broken("a request posted again while it is under way");
  if (request->posts++ > 0 && request->status != kSuccess) rule_broken("a request posted again after it failed");
  if (options != nullptr) {
    request->message = options->message;
    request->notifies = options->notifies;
  }
  if (fault_due_now("FAKE_NIXL_FAIL_POST")) return request->status = kBackendError;
  if (fault_active("FAKE_NIXL_STRAY_ERRORS")) return fail_with_stray_error(agent, request);
  request->polls = fault("FAKE_NIXL_POLLS");
  if (request->polls > 0 || fault("FAKE_NIXL_HOLD") > 0) return request->status = kInProgress;
  return complete(agent, request);
} OR_EXCEPTION
API(query_xfer_backend)(Agent agent, Request, Backend* out) try {
  ALONE(agent);
  LOCKED;
  const string& backend = *agent->backends.rbegin();
  *out = new BackendObject{&backend, backend};
  return kSuccess;
} OR_EXCEPTION
API(get_xfer_telemetry)(Agent agent, Request request, XferTelemetry* out) try {
  ALONE(agent);
  LOCKED;
  if (!agent->captures_telemetry) return kNoTelemetry;
  if (request->status != kSuccess) return request->status;
  *out = {.start_time_us = 1000, .post_duration_us = 1, .xfer_duration_us = 2, .total_bytes = 0, .desc_count = request->copies.size()};
  for (const auto& copy : request->copies) out->total_bytes += copy.first.length;
  return kSuccess;
} OR_EXCEPTION
API(get_xfer_status)(Agent agent, Request request) try {
  ALONE(agent);
  LOCKED;
  if (request->released) rule_broken("the status of a released request");
  if (request->status == kInProgress && fault_active("FAKE_NIXL_STRAY_ERRORS")) return fail_with_stray_error(agent, request);
  if (request->status == kInProgress && --request->polls <= 0 && fault("FAKE_NIXL_HOLD") <= 0) return complete(agent, request);
  return request->status;
} OR_EXCEPTION
API(release_xfer_req)(Agent agent, Request request) try {
  ALONE(agent);
  LOCKED;
  if (request->released) rule_broken("a request released twice");
  if (fault("FAKE_NIXL_REFUSE_RELEASE") > 0) {
    fault_due_now("FAKE_NIXL_REFUSE_RELEASE");
    return kBackendError;
  }
  request->released = true;
  --agent->requests;
  return kSuccess;
} OR_EXCEPTION
API(destroy_xfer_req)(Request request) try {
  if (!request->released) rule_broken("a request destroyed before it was released");
  delete request;
  return kSuccess;
} OR_EXCEPTION
}  // extern "C"

}  // namespace kv::nixl::capi
