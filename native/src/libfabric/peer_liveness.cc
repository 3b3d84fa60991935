#include "libfabric/peer_liveness.h"

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <string.h>
#include <unistd.h>

#include <string_view>

namespace kv::nixl {

namespace {

using Clock = std::chrono::steady_clock;

// NIXL writes an entry as its name, the length of its value as 8 bytes, and the value.
constexpr std::string_view kEndpoint = "dest_data_ep_0";
// The agent's thread waits so long for a connection when another has ended.
constexpr int kConnectWaitMs = 250;
// A connection that takes longer than this to be made is none. The kernel asks a second and a third time within it, and whoever has metadata
// tried in another process waits a little longer.
constexpr auto kConnectPatience = std::chrono::seconds(4);
// A host that has vanished is noticed after 5 + 3 * 2 seconds.
constexpr int kKeepIdleSeconds = 5;
constexpr int kKeepIntervalSeconds = 2;
constexpr int kKeepCount = 3;

// Its length; 0 where there is none.
socklen_t read_address(const std::string& connection, sockaddr_storage& address) {
  const size_t at = connection.find(kEndpoint);
  uint64_t length = 0;
  if (at == std::string::npos || connection.size() - at < kEndpoint.size() + sizeof(length)) return 0;
  const std::string_view rest = std::string_view(connection).substr(at + kEndpoint.size());
  memcpy(&length, rest.data(), sizeof(length));
  const std::string_view value = rest.substr(sizeof(length));
  sa_family_t family = 0;
  if (length > value.size() || length < sizeof(family)) return 0;
  memcpy(&family, value.data(), sizeof(family));
  const socklen_t size = family == AF_INET ? sizeof(sockaddr_in) : family == AF_INET6 ? sizeof(sockaddr_in6) : 0;
  if (length < size) return 0;
  memcpy(&address, value.data(), size);
  return size;
}

}  // namespace

bool PeerLiveness::names_tcp(const std::string& connection) {
  sockaddr_storage address{};
  return read_address(connection, address) != 0;
}

std::unique_ptr<PeerLiveness> PeerLiveness::of(const std::string& connection) {
  sockaddr_storage address{};
  const socklen_t size = read_address(connection, address);
  if (size == 0) return nullptr;
  std::unique_ptr<PeerLiveness> watch(new PeerLiveness(address, size));
  if (!watch->connect(0)) watch->die();
  return watch;
}

PeerLiveness::~PeerLiveness() { hang_up(); }

void PeerLiveness::hang_up() {
  if (socket_ >= 0) close(socket_);
  socket_ = -1;
  connecting_.reset();
}

bool PeerLiveness::die() {
  hang_up();
  died_ = Clock::now();
  return false;
}

Clock::duration PeerLiveness::dead_for() const { return died_ ? Clock::now() - *died_ : Clock::duration::zero(); }

// False if it is refused, or the host cannot be reached.
bool PeerLiveness::connect(int wait_ms) {
  hang_up();
  socket_ = socket(address_.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  // No socket to be had says nothing about the peer.
  if (socket_ < 0) return true;
  const int on = 1;
  setsockopt(socket_, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof(on));
  setsockopt(socket_, IPPROTO_TCP, TCP_KEEPIDLE, &kKeepIdleSeconds, sizeof(int));
  setsockopt(socket_, IPPROTO_TCP, TCP_KEEPINTVL, &kKeepIntervalSeconds, sizeof(int));
  setsockopt(socket_, IPPROTO_TCP, TCP_KEEPCNT, &kKeepCount, sizeof(int));
  if (::connect(socket_, reinterpret_cast<const sockaddr*>(&address_), length_) == 0) return true;
  if (errno != EINPROGRESS) return false;
  connecting_ = Clock::now();
  return connected(wait_ms);
}

// Whether the connection that is being made has not failed.
bool PeerLiveness::connected(int timeout_ms) {
  pollfd entry{.fd = socket_, .events = POLLOUT, .revents = 0};
  if (poll(&entry, 1, timeout_ms) <= 0) return Clock::now() - *connecting_ < kConnectPatience;
  int error = 0;
  socklen_t size = sizeof(error);
  getsockopt(socket_, SOL_SOCKET, SO_ERROR, &error, &size);
  if (error != 0) return false;
  connecting_.reset();
  return true;
}

bool PeerLiveness::alive() {
  if (died_) return false;
  if (socket_ < 0) return connect(kConnectWaitMs) || die();
  if (connecting_) return connected(0) || die();
  char byte = 0;
  const ssize_t got = recv(socket_, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
  if (got > 0 || (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR))) return true;
  // The provider may have closed a connection that says nothing: only one that is refused is a peer that is gone.
  return connect(kConnectWaitMs) || die();
}

}  // namespace kv::nixl
