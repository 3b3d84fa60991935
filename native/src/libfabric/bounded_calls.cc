#include "libfabric/bounded_calls.h"

#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>

#include <array>

#include "repairs/repair.h"
#include "repairs/replaced_calls.h"

namespace kv::nixl {

namespace {

// How long a live peer may take to accept a connection. Its thread may be in a copy.
constexpr auto kConnectWait = seconds(2);
// For a peer that was just too slow, since others wait meanwhile.
constexpr auto kConnectWaitAgain = milliseconds(50);
// After a longer pause, libfabric's next request to try again starts a new wait.
constexpr auto kPauseOfRetries = milliseconds(100);
constexpr auto kCheckInterval = milliseconds(2);
constexpr auto kAskAgainInterval = milliseconds(250);

thread_local BoundedCalls* current = nullptr;

ssize_t bounded(ssize_t result) {
  if (result != -EAGAIN || current == nullptr || !current->over()) return result;
  return -ETIMEDOUT;
}

// libfabric's objects, as far as NIXL uses them. rdma/fabric.h has inline functions, so these
// places are its ABI. Objects start with a `struct fid` (class, context, operations), tables with
// their size in bytes.
struct Object {
  size_t fclass;
  void* context;
  void* fid_operations;
  void** tables[4];
};
constexpr size_t kOwnOperations = 0;
constexpr size_t kMessages = 2;
constexpr size_t kRemoteMemory = 3;
constexpr size_t kDomainOf = 1;
constexpr size_t kQueueOf = 2;
constexpr size_t kEndpointOf = 3;
constexpr size_t kReadQueue = 1;
constexpr size_t kSendData = 8;
constexpr size_t kRead = 1;
constexpr size_t kReadMessage = 3;
constexpr size_t kWriteMessage = 6;
constexpr size_t kWriteData = 8;

// A replaced function. Providers compare the addresses of their tables, so the tables themselves
// are changed.
struct Replaced {
  void** table;
  size_t index;
  void* original;
};
std::array<Replaced, 32> replaced;
atomic<size_t> replaced_count = 0;

// Threads replace functions one after another. A reader finds all that was added before its object
// was made. Returns whether the table has the function.
bool replace(void** table, size_t index, void* function) {
  static auto* const mutex = new std::mutex;
  const lock_guard lock(*mutex);
  const bool has_it = reinterpret_cast<uintptr_t>(table[0]) >= (index + 1) * sizeof(void*);
  if (!has_it) return false;
  if (table[index] == function) return true;
  if (replaced_count == replaced.size()) return false;
  replaced[replaced_count] = {table, index, table[index]};
  ++replaced_count;
  return set_address(table + index, function);
}

void report(bool all) {
  if (all)
    libfabric_endless_calls.held();
  else
    libfabric_endless_calls.failed(
        "libfabric lacks a function that is to be replaced, or the system does not let it be replaced");
}

template <typename Function>
Function original(void** table, size_t index) {
  const size_t count = replaced_count;
  for (size_t at = 0; at < count; ++at) {
    if (replaced[at].table == table && replaced[at].index == index)
      return reinterpret_cast<Function>(replaced[at].original);
  }
  abort();  // only replaced functions ask
}

// An endpoint's posting function. The last arguments differ.
template <size_t kTable, size_t kIndex, typename... Arguments>
ssize_t post(Object* endpoint, Arguments... arguments) {
  return bounded(original<ssize_t (*)(Object*, Arguments...)>(endpoint->tables[kTable], kIndex)(
      endpoint, arguments...));
}

template <size_t kTable, size_t kIndex, typename... Arguments>
bool bound(Object* endpoint) {
  return replace(endpoint->tables[kTable], kIndex,
                 reinterpret_cast<void*>(&post<kTable, kIndex, Arguments...>));
}

using Open = int (*)(Object*, void*, Object**, void*);
using Word = uint64_t;

int open_endpoint(Object* domain, void* info, Object** endpoint, void* context) {
  const int opened =
      original<Open>(domain->tables[kOwnOperations], kEndpointOf)(domain, info, endpoint, context);
  if (opened != 0) return opened;
  report(
      bound<kMessages, kSendData, const void*, size_t, void*, Word, Word, void*>(*endpoint) &
      bound<kRemoteMemory, kRead, void*, size_t, void*, Word, Word, Word, void*>(*endpoint) &
      bound<kRemoteMemory, kReadMessage, const void*, Word>(*endpoint) &
      bound<kRemoteMemory, kWriteMessage, const void*, Word>(*endpoint) &
      bound<kRemoteMemory, kWriteData, const void*, size_t, void*, Word, Word, Word, Word, void*>(
          *endpoint));
  return 0;
}

int open_queue(Object* domain, void* attributes, Object** queue, void* context) {
  const int opened =
      original<Open>(domain->tables[kOwnOperations], kQueueOf)(domain, attributes, queue, context);
  if (opened == 0) report(bound<kOwnOperations, kReadQueue, void*, size_t>(*queue));
  return opened;
}

int open_domain(Object* fabric, void* info, Object** domain, void* context) {
  const int opened =
      original<Open>(fabric->tables[kOwnOperations], kDomainOf)(fabric, info, domain, context);
  if (opened != 0) return opened;
  void** const functions = (*domain)->tables[kOwnOperations];
  report(replace(functions, kQueueOf, reinterpret_cast<void*>(open_queue)) &
         replace(functions, kEndpointOf, reinterpret_cast<void*>(open_endpoint)));
  return 0;
}

// The start of `struct fi_fabric_attr`.
struct FabricAttributes {
  Object* fabric;
  const char* name;
  const char* provider;
};

constexpr uint32_t kNewestMajor = 2;

using OpenFabric = int (*)(FabricAttributes* attributes, Object** fabric, void* context);
// Each agent's thread finds the same function. libfabric then stays loaded.
atomic<OpenFabric> libfabric_open_fabric = nullptr;

int open_fabric(FabricAttributes* attributes, Object** fabric, void* context) {
  const bool is_tcp = attributes->provider != nullptr && strcmp(attributes->provider, "tcp") == 0;
  const int opened = libfabric_open_fabric.load()(attributes, fabric, context);
  if (opened == 0 && is_tcp)
    report(replace((*fabric)->tables[kOwnOperations], kDomainOf,
                   reinterpret_cast<void*>(open_domain)));
  return opened;
}

}  // namespace

BoundedCalls::BoundedCalls(PeerLiveness* peer) : peer_(peer), outer_(current) {
  current = peer == nullptr ? nullptr : this;
}

BoundedCalls::~BoundedCalls() { current = outer_; }

bool BoundedCalls::over() {
  const auto now = Clock::now();
  if (now - asked_ > kPauseOfRetries) since_ = now;
  asked_ = now;
  if (now - checked_ > kCheckInterval) {
    checked_ = now;
    if (now - asked_again_ > kAskAgainInterval && now - since_ > kCheckInterval) {
      asked_again_ = now;
      peer_->ask_again();
    }
    if (!peer_->maybe_alive()) return true;
  }
  if (now - since_ < (peer_->is_slow() ? kConnectWaitAgain : kConnectWait)) return false;
  peer_->note_slow();
  gave_up_ = true;
  return true;
}

void BoundedCalls::install() {
  // An earlier agent's thread may have done it.
  if (libfabric_open_fabric == nullptr) {
    void* const library = dlopen("libfabric.so.1", RTLD_LAZY | RTLD_NOLOAD);
    if (library == nullptr || !libfabric_endless_calls.wanted()) return;
    const auto version = reinterpret_cast<uint32_t (*)()>(dlsym(library, "fi_version"));
    if (version == nullptr || version() >> 16 > kNewestMajor)
      return libfabric_endless_calls.failed(
          "libfabric is newer than 2.x, and its tables are not known");
    void* function = dlvsym(library, "fi_fabric", "FABRIC_1.1");
    if (function == nullptr) function = dlsym(library, "fi_fabric");
    if (function == nullptr) return libfabric_endless_calls.failed("libfabric has no fi_fabric");
    libfabric_open_fabric = reinterpret_cast<OpenFabric>(function);
  }
  if (!replace_calls("libplugin_LIBFABRIC", "fi_fabric", reinterpret_cast<void*>(open_fabric)))
    report(false);
}

}  // namespace kv::nixl
