// Tests drop_lost_answers with a UCX that this program is: one table of a connection and one of a
// connection that has failed, whose calls are made as UCX's compiled code makes them. Prints each
// failed expectation and exits with their number.
#include "repairs/lost_answers.h"

#include <stdint.h>
#include <stdlib.h>
#include <sys/types.h>

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "repairs/repair.h"
#include "repairs/replaced_calls.h"
#include "expect.h"

namespace {

struct Waiting {
  signed char (*send)(Waiting*);
};
// A request of UCX.
struct Request {
  char before[64] = {};
  Waiting waiting = {};
};

constexpr uint8_t kReadRequest = 18, kReadAnswer = 19, kWriteAnswer = 22;
constexpr ssize_t kNoResource = -2, kTimeout = -80;

ssize_t next_result = 0;
std::vector<void*> released, purged;

ssize_t tcp_send(void*, uint8_t, size_t (*)(void*, void*), void*, unsigned) { return next_result; }
signed char tcp_add_waiting(void*, Waiting*, unsigned) { return 0; }
ssize_t failed_copied(void*, uint8_t, size_t (*)(void*, void*), void*, unsigned) { return kTimeout; }
signed char failed(void*) { return kTimeout; }
signed char busy() { return -15; }
void purge_failed(Waiting* waiting, void*) { purged.push_back(waiting); }
void purge_destroyed(Waiting* waiting, void*) { purged.push_back(waiting); }
void release(void* request) { released.push_back(request); }

template <typename Function>
void* address(Function* function) {
  return reinterpret_cast<void*>(function);
}

// The entries of UCX's tables, by the name of the function that stands there at first.
std::map<std::string, void*> entries = {
    {"uct_tcp_ep_am_bcopy", address(tcp_send)},
    {"uct_tcp_ep_pending_add", address(tcp_add_waiting)},
    {"ucp_ep_err_pending_purge", address(purge_failed)},
    {"ucp_destroyed_ep_pending_purge", address(purge_destroyed)},
};
// The system lets no table be changed.
bool denied = false;
unsigned minor_version = 20;
void get_version(unsigned* major, unsigned* minor, unsigned* release) {
  *major = 1;
  *minor = minor_version;
  *release = 0;
}

const std::map<std::string, void*> functions = {
    {"ucp_get_version", address(get_version)},
    {"ucs_mpool_put", address(release)},
    {"ucs_empty_function_return_busy", address(busy)},
};
void* table_of_failed[29] = {};

template <typename Function>
Function now(const char* symbol) {
  return reinterpret_cast<Function>(entries.at(symbol));
}

signed char send_read_answer(Waiting*) { return 0; }
signed char send_write_answer(Waiting*) { return 0; }
signed char send_other(Waiting*) { return 0; }

// How UCX sends an answer: a negative result is a status of one byte.
signed char send_answer(uint8_t id, Request& request) {
  using Send = ssize_t (*)(void*, uint8_t, size_t (*)(void*, void*), void*, unsigned);
  const ssize_t sent = now<Send>("uct_tcp_ep_am_bcopy")(nullptr, id, nullptr, &request, 0);
  return sent < 0 ? static_cast<signed char>(sent) : 0;
}

}  // namespace

namespace kv::nixl {
std::vector<void**> addresses_in(std::string_view, std::string_view symbol) {
  if (symbol == "ucs_empty_function_return_busy") return {&table_of_failed[24]};
  const auto found = entries.find(std::string(symbol));
  return found == entries.end() ? std::vector<void**>{} : std::vector<void**>{&found->second};
}
bool replace_calls(std::string_view library, std::string_view symbol, void* replacement) {
  const auto slots = addresses_in(library, symbol);
  for (void** const slot : slots) set_address(slot, replacement);
  return !slots.empty() && !denied;
}
bool is_loaded(std::string_view) { return true; }
void* function_of(std::string_view, const char* symbol) {
  if (const auto found = functions.find(symbol); found != functions.end()) return found->second;
  const auto found = entries.find(symbol);
  return found == entries.end() ? nullptr : found->second;
}
bool set_address(void** slot, void* value) {
  if (!denied) *slot = value;
  return !denied;
}
}  // namespace kv::nixl

int main(int argc, char**) {
  kv::nixl::Repair& repair = kv::nixl::ucx_lost_answers;
  for (size_t index = 0; index < 29; ++index) table_of_failed[index] = address(failed);
  table_of_failed[1] = table_of_failed[8] = address(failed_copied);
  table_of_failed[24] = address(busy);
  // With an argument, the table of a connection that has failed is another than this code knows.
  if (argc > 1) table_of_failed[8] = address(failed);
  const auto before = entries;
  using State = kv::nixl::Repair::State;
  if (argc == 1) {
    setenv("KV_NIXL_REPAIRS_OFF", "ucx-listener,ucx-lost-answers", 1);
    kv::nixl::drop_lost_answers();
    expect(repair.state() == State::off && entries == before, "a repair that is switched off changes nothing");
    unsetenv("KV_NIXL_REPAIRS_OFF");
    minor_version = 24;
    kv::nixl::drop_lost_answers();
    expect(repair.state() == State::failed && entries == before, "F5: a version that is not known is not changed");
    minor_version = 20;
    denied = true;
    kv::nixl::drop_lost_answers();
    expect(repair.state() == State::failed && repair.take_failure(), "F5: a table that the system does not let be changed is told");
    denied = false;
  }
  kv::nixl::drop_lost_answers();
  if (argc > 1) {
    expect(entries == before, "nothing is changed in a UCX that is not as expected");
    expect(repair.take_failure() && !repair.take_failure(), "a UCX that is not as expected is told once");
    return failures;
  }
  expect(!repair.take_failure() && repair.state() == kv::nixl::Repair::State::holds, "UCX is as expected");

  Request request;
  request.waiting.send = send_read_answer;
  next_result = 100;
  expect(send_answer(kReadAnswer, request) == 0 && released.empty(), "an answer that is sent is UCX's");
  next_result = kTimeout;
  expect(send_answer(kReadRequest, request) == kTimeout && released.empty(), "the error of a message that is no answer is told");
  for (const uint8_t id : {kReadAnswer, kWriteAnswer}) {
    released.clear();
    expect(send_answer(id, request) == 0 && released == std::vector<void*>{&request}, "an answer that cannot be sent counts as sent, and is released");
  }
  released.clear();
  using Send = ssize_t (*)(void*, uint8_t, size_t (*)(void*, void*), void*, unsigned);
  const auto send_failed = reinterpret_cast<Send>(table_of_failed[8]);
  expect(static_cast<signed char>(send_failed(nullptr, kReadAnswer, nullptr, &request, 0)) == 0 && released == std::vector<void*>{&request},
         "nor one over a connection that has failed");
  expect(send_failed(nullptr, kReadRequest, nullptr, &request, 0) == kTimeout, "whose other messages have its error");

  using Add = signed char (*)(void*, Waiting*, unsigned);
  using Purge = void (*)(Waiting*, void*);
  const auto wait = [&](uint8_t id, Request& waits) {
    next_result = kNoResource;
    expect(send_answer(id, waits) == kNoResource, "an answer waits for a connection that is busy");
    now<Add>("uct_tcp_ep_pending_add")(nullptr, &waits.waiting, 0);
  };
  Request write_answer, other;
  write_answer.waiting.send = send_write_answer;
  other.waiting.send = send_other;
  released.clear();
  wait(kReadAnswer, request);
  wait(kWriteAnswer, write_answer);
  wait(kReadRequest, other);
  for (const char* const symbol : {"ucp_ep_err_pending_purge", "ucp_destroyed_ep_pending_purge"}) {
    released.clear();
    purged.clear();
    for (Request* const waits : {&request, &write_answer, &other}) now<Purge>(symbol)(&waits->waiting, nullptr);
    expect(released == std::vector<void*>{&request, &write_answer}, "answers that wait for a connection that ends are released");
    expect(purged == std::vector<void*>{&other.waiting}, "other messages are UCX's");
  }
  return failures;
}
