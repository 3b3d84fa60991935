// A load generator that costs next to nothing: the same HTTP/1.1 request over and over, on
// connections that stay open.
//     http-load < commands
// A command on stdin: `PORT CONNECTIONS PER_SECOND MILLISECONDS REQUEST_FILE`. With 0 per second each connection
// sends its next request when the last answer is complete. Else requests are sent at that rate,
// whatever the answers do, and each is timed from the moment when it was due. Replies with one
// line: microseconds of the run, failed requests, how late the generator itself sent a request at
// most (microseconds), and the microseconds of each complete request. An answer is complete with
// its content-length, or its last chunk; an event stream must have had [DONE].
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

enum { MAX_ANSWER = 1 << 20, EVENTS = 256, MAX_CONNECTIONS = 16384 };
static const double LAST_ANSWER_US = 30e6;

struct connection {
  int fd;
  int port;
  int busy;
  double from;
  size_t length, capacity;
  char *bytes;
};

static char request[1 << 20];
static size_t request_length;
static struct connection *all[MAX_CONNECTIONS];
static int known;

static double now_us(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec * 1e6 + (double)now.tv_nsec / 1e3;
}

static int open_connection(int port) {
  int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  if (connect(fd, (struct sockaddr *)&address, sizeof address) < 0) {
    close(fd);
    return -1;
  }
  int on = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  return fd;
}

static void close_connection(struct connection *connection) {
  close(connection->fd);
  connection->fd = -1;
  connection->busy = 0;
}

static void wait_for(int epoll, struct connection *connection) {
  struct epoll_event event = {.events = EPOLLIN, .data.ptr = connection};
  epoll_ctl(epoll, EPOLL_CTL_ADD, connection->fd, &event);
}

/** 0: more is to come; 1: complete; -1: failed. */
static int state_of(const struct connection *connection) {
  const char *head_end = memmem(connection->bytes, connection->length, "\r\n\r\n", 4);
  if (head_end == NULL) return connection->length > 65536 ? -1 : 0;
  size_t head = (size_t)(head_end - connection->bytes) + 4;
  if (memcmp(connection->bytes, "HTTP/1.1 200", 12) != 0) return -1;
  const char *declared = NULL;
  for (const char *at = connection->bytes; at < head_end; at += 1) {
    if (*at == '\n' && strncasecmp(at + 1, "content-length:", 15) == 0) declared = at + 16;
  }
  if (declared != NULL) return connection->length >= head + strtoul(declared, NULL, 10) ? 1 : 0;
  if (connection->length < head + 5 || memcmp(connection->bytes + connection->length - 5, "0\r\n\r\n", 5) != 0) return 0;
  int events = memmem(connection->bytes, head, "event-stream", 12) != NULL;
  return events && memmem(connection->bytes + head, connection->length - head, "data: [DONE]", 12) == NULL ? -1 : 1;
}

static int ask(struct connection *connection, double from) {
  connection->from = from;
  connection->length = 0;
  if (send(connection->fd, request, request_length, MSG_NOSIGNAL) != (ssize_t)request_length) return -1;
  connection->busy = 1;
  return 0;
}

/** 0: more is to come; 1: complete; -1: failed. */
static int receive(struct connection *connection) {
  if (connection->capacity - connection->length < 4096) {
    connection->capacity = connection->capacity == 0 ? 16384 : connection->capacity * 2;
    if (connection->capacity > MAX_ANSWER) return -1;
    connection->bytes = realloc(connection->bytes, connection->capacity);
  }
  ssize_t got = recv(connection->fd, connection->bytes + connection->length, connection->capacity - connection->length, MSG_DONTWAIT);
  if (got < 0) return errno == EAGAIN ? 0 : -1;
  if (got == 0 || !connection->busy) return -1;
  connection->length += (size_t)got;
  return state_of(connection);
}

static void run(int port, int wanted, double per_second, double milliseconds) {
  int epoll = epoll_create1(EPOLL_CLOEXEC);
  struct connection **idle = malloc(sizeof *idle * (size_t)wanted);
  int idle_count = 0, open_count = 0;
  for (int at = 0; open_count < wanted && at < MAX_CONNECTIONS; at += 1) {
    if (at == known) all[known++] = calloc(1, sizeof **all), all[at]->fd = -1, all[at]->port = port;
    if (all[at]->port != port) continue;
    // The server may have closed it meanwhile.
    char byte;
    if (all[at]->fd >= 0 && recv(all[at]->fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT) >= 0) close_connection(all[at]);
    if (all[at]->fd < 0) all[at]->fd = open_connection(port);
    if (all[at]->fd < 0) break;
    wait_for(epoll, all[at]);
    idle[idle_count++] = all[at];
    open_count += 1;
  }
  int timer = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);
  struct epoll_event event = {.events = EPOLLIN, .data.ptr = NULL};
  epoll_ctl(epoll, EPOLL_CTL_ADD, timer, &event);

  size_t count = per_second > 0 ? (size_t)(per_second * milliseconds / 1e3) : 0;
  size_t sent = 0, complete = 0, failed = (size_t)(wanted - open_count), capacity = count > 0 ? count : 1 << 16;
  uint32_t *took = malloc(sizeof *took * capacity);
  double begun = now_us(), latest = 0, end = begun + milliseconds * 1e3;
  int busy = 0, waited_for_idle = 0;
  struct epoll_event events[EVENTS];
  for (;;) {
    double now = now_us();
    int more = per_second > 0 ? sent < count : now < end;
    while (more && idle_count > 0) {
      double due = per_second > 0 ? begun + (double)sent * 1e6 / per_second : now;
      if (due > now) break;
      // With all connections busy it is the server that makes requests wait.
      if (!waited_for_idle && now - due > latest) latest = now - due;
      struct connection *next = idle[--idle_count];
      sent += 1;
      if (ask(next, due) < 0) {
        failed += 1;
        close_connection(next);
      } else busy += 1;
      more = per_second > 0 ? sent < count : 1;
    }
    waited_for_idle = more && idle_count == 0;
    if (!more && busy == 0) break;
    if (now > end + LAST_ANSWER_US || (more && busy == 0 && idle_count == 0)) break;
    double next_us = more && idle_count > 0 ? begun + (double)sent * 1e6 / per_second - now : 0;
    if (next_us > 0) {
      struct itimerspec after = {.it_value = {(time_t)(next_us / 1e6), (long)((uint64_t)(next_us * 1e3) % 1000000000u) + 1}};
      timerfd_settime(timer, 0, &after, NULL);
    }
    int ready = epoll_wait(epoll, events, EVENTS, 1000);
    for (int at = 0; at < ready; at += 1) {
      struct connection *connection = events[at].data.ptr;
      if (connection == NULL) {
        uint64_t expired;
        (void)!read(timer, &expired, sizeof expired);
        continue;
      }
      int state = receive(connection);
      if (state == 0) continue;
      busy -= connection->busy;
      if (state < 0 && !connection->busy) {
        // The server closed a connection that was idle for long: the next request finds a new one.
        close_connection(connection);
        connection->fd = open_connection(port);
        if (connection->fd >= 0) wait_for(epoll, connection);
        continue;
      }
      if (state < 0) {
        if (failed == 0) fprintf(stderr, "http-load: not a complete answer: %.*s\n", (int)(connection->length < 500 ? connection->length : 500), connection->bytes);
        failed += 1;
        close_connection(connection);
        continue;
      }
      connection->busy = 0;
      if (complete == capacity) took = realloc(took, sizeof *took * (capacity *= 2));
      took[complete++] = (uint32_t)(now_us() - connection->from);
      idle[idle_count++] = connection;
    }
  }
  printf("%.0f %zu %.0f", now_us() - begun, failed + (size_t)busy, latest);
  for (size_t at = 0; at < complete; at += 1) printf(" %u", took[at]);
  printf("\n");
  fflush(stdout);
  for (int at = 0; at < known; at += 1) {
    if (all[at]->busy) close_connection(all[at]);
  }
  close(timer);
  close(epoll);
  free(took);
  free(idle);
}

int main(void) {
  int port, connections;
  double per_second, milliseconds;
  char name[256];
  while (scanf("%d %d %lf %lf %255s", &port, &connections, &per_second, &milliseconds, name) == 5) {
    FILE *file = fopen(name, "rb");
    if (file == NULL) return perror(name), 2;
    request_length = fread(request, 1, sizeof request, file);
    fclose(file);
    run(port, connections, per_second, milliseconds);
  }
  return 0;
}
