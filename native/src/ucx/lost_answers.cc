#include "ucx/lost_answers.h"

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include <atomic>

#include "library/replaced_calls.h"

namespace kv::nixl {

namespace {

// UCX's ABI, as far as it is used: `ucs_status_t`, the identifiers of messages, which its wire
// protocol fixes, and `uct_pending_req_t`.
using Status = signed char;
constexpr Status kNoResource = -2;
constexpr uint8_t kReadAnswer = 19;   // UCP_AM_ID_GET_REP
constexpr uint8_t kWriteAnswer = 22;  // UCP_AM_ID_CMPL
struct Waiting {
  Status (*send)(Waiting*);
};

using Pack = size_t (*)(void* to, void* request);
using Send = ssize_t (*)(void* endpoint, uint8_t id, Pack pack, void* request, unsigned flags);
using AddWaiting = Status (*)(void* endpoint, Waiting* waiting, unsigned flags);
using Purge = void (*)(Waiting* waiting, void* argument);

// What was there before, set once.
struct Originals {
  Send tcp_send;
  AddWaiting tcp_add_waiting;
  Send failed_send;
  Purge purge_failed;
  Purge purge_destroyed;
  void (*release)(void* request);
} ucx;

std::atomic<bool> unknown = false;

// What answers look like, learned from the first that wait. A request is UCX's; `Waiting` is a part
// of it.
constexpr ptrdiff_t kLargestRequest = 1024;
std::atomic<ptrdiff_t> place_in_request = 0;
std::atomic<decltype(Waiting::send)> sends_read_answer = nullptr;
std::atomic<decltype(Waiting::send)> sends_write_answer = nullptr;

// The answer that this thread could not send yet.
thread_local void* unsent = nullptr;
thread_local uint8_t unsent_id = 0;

// A message that is not an answer has an owner, who hears of its error. UCX takes a negative result
// for a status, whose type has one byte: this one is UCS_OK, so the answer counts as sent. `failed`
// stands for all errors of a connection: with UCS_ERR_NO_RESOURCE the answer waits.
constexpr ssize_t kSent = -256;
static_assert(static_cast<Status>(kSent) == 0);

template <Send Originals::*kSend>
ssize_t send_or_drop(void* endpoint, uint8_t id, Pack pack, void* request, unsigned flags) {
  const ssize_t sent = (ucx.*kSend)(endpoint, id, pack, request, flags);
  if (sent >= 0 || (id != kReadAnswer && id != kWriteAnswer)) return sent;
  if (sent == kNoResource) {
    unsent = request;
    unsent_id = id;
    return sent;
  }
  ucx.release(request);
  return kSent;
}

Status add_waiting(void* endpoint, Waiting* waiting, unsigned flags) {
  const ptrdiff_t place = reinterpret_cast<char*>(waiting) - static_cast<char*>(unsent);
  if (unsent != nullptr && place >= 0 && place < kLargestRequest) {
    place_in_request.store(place, std::memory_order_relaxed);
    (unsent_id == kReadAnswer ? sends_read_answer : sends_write_answer).store(waiting->send, std::memory_order_release);
  }
  unsent = nullptr;
  return ucx.tcp_add_waiting(endpoint, waiting, flags);
}

// Takes a message from the queue of a connection that has failed or is closed.
template <Purge Originals::*kPurge>
void purge(Waiting* waiting, void* argument) {
  if (waiting->send == sends_read_answer.load(std::memory_order_acquire) || waiting->send == sends_write_answer.load(std::memory_order_acquire)) {
    ucx.release(reinterpret_cast<char*>(waiting) - place_in_request.load(std::memory_order_relaxed));
  } else {
    (ucx.*kPurge)(waiting, argument);
  }
}

// The functions of a connection that has failed: a table like those of UCX's transports
// (`uct_iface_ops_t`), in which few functions stand many times.
constexpr size_t kPutCopied = 1;
constexpr size_t kSendCopied = 8;
constexpr size_t kAddWaiting = 24;

bool is_of_failed(void* const* table, const void* busy) {
  const auto is_plain = [&](size_t index) { return table[index] == table[0]; };
  return table[0] != nullptr && table[kSendCopied] == table[kPutCopied] && !is_plain(kSendCopied) && table[kAddWaiting] == busy && is_plain(2) && is_plain(5) &&
         is_plain(7) && is_plain(9) && is_plain(21) && is_plain(26);
}

// Before 1.22 the table is a part of the library, later it is made when it is asked for.
void** functions_of_failed(const void* busy) {
  if (void* const get = function_of("libucp", "ucp_failed_tl_iface_get")) {
    void** const table = reinterpret_cast<void** (*)()>(get)();
    return table != nullptr && is_of_failed(table, busy) ? table : nullptr;
  }
  for (void** const slot : addresses_in("libucp", "ucs_empty_function_return_busy")) {
    if (is_of_failed(slot - kAddWaiting, busy)) return slot - kAddWaiting;
  }
  return nullptr;
}

// Finds a function that is to be replaced.
template <typename Function>
bool find(Function& function, const char* library, const char* symbol) {
  function = reinterpret_cast<Function>(function_of(library, symbol));
  return function != nullptr && !addresses_in(library, symbol).empty();
}

bool install() {
  ucx.release = reinterpret_cast<void (*)(void*)>(function_of("libucs", "ucs_mpool_put"));
  const void* const busy = function_of("libucs", "ucs_empty_function_return_busy");
  if (ucx.release == nullptr || busy == nullptr || !find(ucx.tcp_send, "libuct", "uct_tcp_ep_am_bcopy") ||
      !find(ucx.tcp_add_waiting, "libuct", "uct_tcp_ep_pending_add") || !find(ucx.purge_failed, "libucp", "ucp_ep_err_pending_purge") ||
      !find(ucx.purge_destroyed, "libucp", "ucp_destroyed_ep_pending_purge")) {
    return false;
  }
  void** const failed = functions_of_failed(busy);
  if (failed == nullptr) return false;
  ucx.failed_send = reinterpret_cast<Send>(failed[kSendCopied]);
  set_address(failed + kSendCopied, reinterpret_cast<void*>(&send_or_drop<&Originals::failed_send>));
  replace_calls("libuct", "uct_tcp_ep_am_bcopy", reinterpret_cast<void*>(&send_or_drop<&Originals::tcp_send>));
  replace_calls("libuct", "uct_tcp_ep_pending_add", reinterpret_cast<void*>(add_waiting));
  replace_calls("libucp", "ucp_ep_err_pending_purge", reinterpret_cast<void*>(&purge<&Originals::purge_failed>));
  replace_calls("libucp", "ucp_destroyed_ep_pending_purge", reinterpret_cast<void*>(&purge<&Originals::purge_destroyed>));
  return true;
}

}  // namespace

void drop_lost_answers() {
  static const bool installed = install();
  if (!installed && is_loaded("libucp")) unknown = true;
}

bool take_unknown_ucx() { return unknown.load(std::memory_order_relaxed) && unknown.exchange(false); }

}  // namespace kv::nixl
