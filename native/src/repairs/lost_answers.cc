#include "repairs/lost_answers.h"

#include <sys/types.h>

#include "repairs/repair.h"
#include "repairs/replaced_calls.h"

namespace kv::nixl {

namespace {

// UCX's ABI: `ucs_status_t`, message identifiers, which its wire protocol fixes, and
// `uct_pending_req_t`.
using UcxStatus = signed char;
constexpr UcxStatus kNoResource = -2;
constexpr uint8_t kReadAnswer = 19;   // UCP_AM_ID_GET_REP
constexpr uint8_t kWriteAnswer = 22;  // UCP_AM_ID_CMPL
struct Waiting {
  UcxStatus (*send)(Waiting*);
};

using Pack = size_t (*)(void* to, void* request);
using Send = ssize_t (*)(void* endpoint, uint8_t id, Pack pack, void* request, unsigned flags);
using AddWaiting = UcxStatus (*)(void* endpoint, Waiting* waiting, unsigned flags);
using Purge = void (*)(Waiting* waiting, void* argument);

// Set once.
struct Originals {
  Send tcp_send;
  AddWaiting tcp_add_waiting;
  Send failed_send;
  Purge purge_failed;
  Purge purge_destroyed;
  void (*release)(void* request);
} ucx;

// Learned from the first waiting answers. `Waiting` is part of UCX's request.
constexpr ptrdiff_t kLargestRequest = 1024;
atomic<ptrdiff_t> place_in_request = 0;
atomic<decltype(Waiting::send)> sends_read_answer = nullptr;
atomic<decltype(Waiting::send)> sends_write_answer = nullptr;

// The answer that this thread could not send yet.
thread_local void* unsent = nullptr;
thread_local uint8_t unsent_id = 0;

// UCX reduces a negative result to one byte, here UCS_OK, so the answer counts as sent. Other
// messages have an owner, who hears of the error. With UCS_ERR_NO_RESOURCE the answer waits.
constexpr ssize_t kSent = -256;
static_assert(static_cast<UcxStatus>(kSent) == 0);

template <Send Originals::* kSend>
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

UcxStatus add_waiting(void* endpoint, Waiting* waiting, unsigned flags) {
  const ptrdiff_t place = reinterpret_cast<char*>(waiting) - static_cast<char*>(unsent);
  if (unsent != nullptr && place >= 0 && place < kLargestRequest) {
    place_in_request.store(place, std::memory_order_relaxed);
    (unsent_id == kReadAnswer ? sends_read_answer : sends_write_answer)
        .store(waiting->send, std::memory_order_release);
  }
  unsent = nullptr;
  return ucx.tcp_add_waiting(endpoint, waiting, flags);
}

// Takes a message from the queue of a failed or closed connection.
template <Purge Originals::* kPurge>
void purge(Waiting* waiting, void* argument) {
  if (waiting->send == sends_read_answer.load(std::memory_order_acquire) ||
      waiting->send == sends_write_answer.load(std::memory_order_acquire)) {
    ucx.release(reinterpret_cast<char*>(waiting) -
                place_in_request.load(std::memory_order_relaxed));
  } else {
    (ucx.*kPurge)(waiting, argument);
  }
}

// Places in the functions of a failed connection, a table like `uct_iface_ops_t` in which few
// functions repeat.
constexpr size_t kPutCopied = 1;
constexpr size_t kSendCopied = 8;
constexpr size_t kAddWaiting = 24;

bool is_of_failed(void* const* table, const void* busy) {
  const auto is_plain = [&](size_t index) { return table[index] == table[0]; };
  return table[0] != nullptr && table[kSendCopied] == table[kPutCopied] && !is_plain(kSendCopied) &&
         table[kAddWaiting] == busy && is_plain(2) && is_plain(5) && is_plain(7) && is_plain(9) &&
         is_plain(21) && is_plain(26);
}

// Before 1.22 the library holds the table; later a call makes it.
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

template <typename Function>
bool find(Function& function, const char* library, const char* symbol) {
  function = reinterpret_cast<Function>(function_of(library, symbol));
  return function != nullptr && !addresses_in(library, symbol).empty();
}

// The versions of UCX whose calls are known.
constexpr unsigned kMajor = 1, kOldestMinor = 19, kNewestMinor = 23;

bool is_known_version() {
  const auto get = reinterpret_cast<void (*)(unsigned*, unsigned*, unsigned*)>(
      function_of("libucp", "ucp_get_version"));
  if (get == nullptr) return false;
  unsigned major = 0, minor = 0, release = 0;
  get(&major, &minor, &release);
  return major == kMajor && minor >= kOldestMinor && minor <= kNewestMinor;
}

// Null, or what prevents the repair.
const char* install() {
  if (!is_known_version()) return "UCX is not one of the versions 1.19 to 1.23, or is loaded twice";
  ucx.release = reinterpret_cast<void (*)(void*)>(function_of("libucs", "ucs_mpool_put"));
  const void* const busy = function_of("libucs", "ucs_empty_function_return_busy");
  constexpr const char* kOther = "UCX lacks a function, or calls none, that is to be replaced";
  if (ucx.release == nullptr || busy == nullptr ||
      !find(ucx.tcp_send, "libuct", "uct_tcp_ep_am_bcopy") ||
      !find(ucx.tcp_add_waiting, "libuct", "uct_tcp_ep_pending_add") ||
      !find(ucx.purge_failed, "libucp", "ucp_ep_err_pending_purge") ||
      !find(ucx.purge_destroyed, "libucp", "ucp_destroyed_ep_pending_purge")) {
    return kOther;
  }
  void** const failed = functions_of_failed(busy);
  if (failed == nullptr) return kOther;
  ucx.failed_send = reinterpret_cast<Send>(failed[kSendCopied]);
  // The failed connections' table changes last, since a retry recognises UCX by it.
  const bool all =
      replace_calls("libuct", "uct_tcp_ep_am_bcopy",
                    reinterpret_cast<void*>(&send_or_drop<&Originals::tcp_send>)) &&
      replace_calls("libuct", "uct_tcp_ep_pending_add", reinterpret_cast<void*>(add_waiting)) &&
      replace_calls("libucp", "ucp_ep_err_pending_purge",
                    reinterpret_cast<void*>(&purge<&Originals::purge_failed>)) &&
      replace_calls("libucp", "ucp_destroyed_ep_pending_purge",
                    reinterpret_cast<void*>(&purge<&Originals::purge_destroyed>)) &&
      set_address(failed + kSendCopied,
                  reinterpret_cast<void*>(&send_or_drop<&Originals::failed_send>));
  return all ? nullptr : "the system does not let a table of addresses be changed";
}

}  // namespace

void drop_lost_answers() {
  static auto* const mutex = new std::mutex;
  const lock_guard lock(*mutex);
  // NIXL's plugin may come without UCX, as in a test.
  if (ucx_lost_answers.state() == Repair::State::holds || !is_loaded("libucp") ||
      !ucx_lost_answers.wanted())
    return;
  const char* const problem = install();
  if (problem == nullptr)
    ucx_lost_answers.held();
  else
    ucx_lost_answers.failed(problem);
}

}  // namespace kv::nixl
