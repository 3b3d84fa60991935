// Tests PeerLiveness with a network that this program simulates: its own connect, poll and recv
// replace libc's. Prints each failed expectation and exits with their number.
#include "libfabric/peer_liveness.h"
#include "expect.h"

#include <errno.h>
#include <netinet/in.h>
#include <poll.h>
#include <string.h>

#include <string>
#include <vector>

using kv::nixl::PeerLiveness;

namespace {

int connects = 0;
// What connections answer: 0 or an error of the call.
int connect_error = 0;
int recv_error = EAGAIN;
// How long calls of poll may wait, together. They return at once, without a result.
int asked_to_wait_ms = 0;

int answer(int error) {
  errno = error;
  return error == 0 ? 0 : -1;
}

// Connection data of a LIBFABRIC backend with a TCP address.
std::string connection() {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  const uint64_t length = sizeof(address);
  std::string text = "dest_data_ep_0";
  text.append(reinterpret_cast<const char*>(&length), sizeof(length));
  text.append(reinterpret_cast<const char*>(&address), sizeof(address));
  return text;
}

std::vector<std::unique_ptr<PeerLiveness>> connected_peers(int count) {
  connect_error = 0;
  recv_error = EAGAIN;
  std::vector<std::unique_ptr<PeerLiveness>> peers;
  for (int index = 0; index < count; ++index) peers.push_back(PeerLiveness::connect_to(connection()));
  for (const auto& peer : peers) expect(peer->connected(), "a peer that accepts a connection is not connected");
  asked_to_wait_ms = 0;
  connects = 0;
  return peers;
}

void a_vanished_host_is_dead_at_once() {
  const auto peers = connected_peers(20);
  recv_error = ETIMEDOUT;
  connect_error = EINPROGRESS;
  for (const auto& peer : peers) expect(!peer->alive(), "a host that has not answered for 11 s is taken for alive");
  expect(asked_to_wait_ms == 0 && connects == 0, "a host that has not answered for 11 s is asked again");
}

void a_check_of_all_peers_does_not_block() {
  const auto peers = connected_peers(20);
  recv_error = ECONNRESET;
  connect_error = EINPROGRESS;
  for (const auto& peer : peers) expect(peer->maybe_alive(), "a peer is dead before it has refused a connection");
  expect(connects == 20 && asked_to_wait_ms == 0, "a check of all peers waits for connections");
  expect(peers[0]->alive(), "a peer is dead before it has refused a connection");
  expect(asked_to_wait_ms > 0 && asked_to_wait_ms <= 250, "a call to a peer does not wait for its connection, or too long");
}

void a_peer_that_refuses_a_connection_is_dead() {
  const auto peers = connected_peers(1);
  recv_error = 0;  // the connection was closed
  connect_error = ECONNREFUSED;
  expect(!peers[0]->maybe_alive() && !peers[0]->alive(), "a peer that refuses a connection is taken for alive");
  expect(peers[0]->died_at().has_value(), "a death has no time");
}

void a_peer_that_closed_an_idle_connection_is_alive() {
  const auto peers = connected_peers(1);
  recv_error = 0;
  expect(peers[0]->alive() && connects == 1, "a peer that accepts another connection is taken for dead");
}

}  // namespace

extern "C" {
int connect(int, const sockaddr*, socklen_t) {
  ++connects;
  return answer(connect_error);
}
int poll(pollfd*, nfds_t, int timeout) {
  asked_to_wait_ms += timeout;
  return 0;
}
ssize_t recv(int, void*, size_t, int) { return answer(recv_error); }
}

int main() {
  a_vanished_host_is_dead_at_once();
  a_check_of_all_peers_does_not_block();
  a_peer_that_refuses_a_connection_is_dead();
  a_peer_that_closed_an_idle_connection_is_alive();
  return failures;
}
