// An HTTP/1.1 server that costs next to nothing: each answer is bytes that were made before.
//     http-answers FILE
// FILE has the answers: `SUFFIX LENGTH`, a new line and LENGTH bytes, the whole answer to requests
// whose path ends in SUFFIX. Prints its port. A request whose body has the member "user" gets the
// answer of the suffix `#USER`, if there is one. That of `#long` is followed by 127 times `#event`, one
// every 5 ms, and `#release`. That of `#hold` stays open until the line `release` comes on stdin:
// then all get `#release`. After the line `fail` all requests get `#fail`. Ends with stdin.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { MAX_ANSWERS = 16, MAX_BODY = 64 << 20, EVENTS = 256, LONG_EVENTS = 127, EVENT_MS = 5 };

struct answer {
  char suffix[128];
  char *bytes;
  size_t length;
};

struct connection {
  int fd;
  /** -1: until it is released; else events that are to come. */
  int held;
  char *bytes;
  size_t length, capacity;
  struct connection *next;
};

static struct answer answers[MAX_ANSWERS];
static int answer_count;
static int failing;
/** Connections whose long stream goes on. */
static int longs;
static struct connection *all;

static void need(int is, const char *what) {
  if (is) return;
  perror(what);
  exit(1);
}

static void read_answers(const char *name) {
  FILE *file = fopen(name, "rb");
  need(file != NULL, name);
  struct answer *next = answers;
  while (answer_count < MAX_ANSWERS && fscanf(file, "%127s %zu%*c", next->suffix, &next->length) == 2) {
    next->bytes = malloc(next->length);
    need(fread(next->bytes, 1, next->length, file) == next->length, "an answer is short");
    next = &answers[++answer_count];
  }
  fclose(file);
}

static const struct answer *find(const char *path, size_t length) {
  for (int at = 0; at < answer_count; at += 1) {
    size_t suffix = strlen(answers[at].suffix);
    if (suffix <= length && memcmp(path + length - suffix, answers[at].suffix, suffix) == 0) return &answers[at];
  }
  return NULL;
}

static void send_answer(int fd, const struct answer *answer) {
  static char text[] = "HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n";
  static const struct answer missing = {"", text, sizeof text - 1};
  if (answer == NULL) answer = &missing;
  for (size_t sent = 0; sent < answer->length;) {
    ssize_t more = send(fd, answer->bytes + sent, answer->length - sent, MSG_NOSIGNAL);
    if (more < 0 && errno != EAGAIN) return;
    struct pollfd writable = {fd, POLLOUT, 0};
    if (more < 0) poll(&writable, 1, 1000);
    else sent += (size_t)more;
  }
}

static const struct answer *of_user(const char *body, size_t length) {
  static const char member[] = "\"user\":";
  const char *from = memmem(body, length, member, sizeof member - 1);
  from = from == NULL ? NULL : memchr(from + sizeof member - 1, '"', 2);
  const char *end = from == NULL ? NULL : memchr(from + 1, '"', length - (size_t)(from + 1 - body));
  char suffix[32] = "#";
  if (end == NULL || end - from >= 31) return NULL;
  memcpy(suffix + 1, from + 1, (size_t)(end - from - 1));
  return find(suffix, strlen(suffix));
}

static void reply(struct connection *connection, const char *request, size_t head, size_t length) {
  const char *path = memchr(request, ' ', head);
  const char *end = path == NULL ? NULL : memchr(path + 1, ' ', head - (size_t)(path + 1 - request));
  if (end == NULL) return;
  const char *query = memchr(path, '?', (size_t)(end - path));
  if (query != NULL) end = query;
  const struct answer *answer = failing ? find("#fail", 5) : of_user(request + head, length - head);
  const char *suffix = answer == NULL ? "" : answer->suffix;
  connection->held = strcmp(suffix, "#hold") == 0 ? -1 : strcmp(suffix, "#long") == 0 ? LONG_EVENTS : 0;
  longs += connection->held > 0;
  send_answer(connection->fd, answer != NULL ? answer : find(path + 1, (size_t)(end - path - 1)));
}

/**
 * More than `length` where the body's end has not come. Envoy sends chunks that an external
 * processor has passed on.
 */
static size_t chunked_length(const char *bytes, size_t length) {
  for (size_t at = 0; at < length;) {
    const char *line_end = memmem(bytes + at, length - at, "\r\n", 2);
    if (line_end == NULL) break;
    size_t size = strtoul(bytes + at, NULL, 16);
    at = (size_t)(line_end - bytes) + 2 + size + 2;
    if (size == 0 && at <= length) return at;
    if (size > MAX_BODY) break;
  }
  return length + 1;
}

/** 0 where the request has not all come. `*head`: the length of its head. */
static size_t request_length(char *bytes, size_t length, size_t *head) {
  char *end = memmem(bytes, length, "\r\n\r\n", 4);
  if (end == NULL) return 0;
  *head = (size_t)(end - bytes) + 4;
  *end = 0;
  const char *declared = strcasestr(bytes, "\r\ncontent-length:");
  int is_chunked = strcasestr(bytes, "\r\ntransfer-encoding: chunked") != NULL;
  *end = '\r';
  size_t body = declared == NULL ? 0 : strtoul(declared + 17, NULL, 10);
  if (is_chunked) body = chunked_length(bytes + *head, length - *head);
  return length < *head + body ? 0 : *head + body;
}

/** Returns 0 where the connection has ended. */
static int serve(struct connection *connection) {
  for (;;) {
    if (connection->capacity - connection->length < 4096) {
      connection->capacity = connection->capacity == 0 ? 8192 : connection->capacity * 2;
      if (connection->capacity > 2 * (size_t)MAX_BODY) return 0;
      connection->bytes = realloc(connection->bytes, connection->capacity);
    }
    char *bytes = connection->bytes;
    ssize_t got = recv(connection->fd, bytes + connection->length, connection->capacity - connection->length - 1, 0);
    if (got <= 0) return got < 0 && errno == EAGAIN;
    connection->length += (size_t)got;
    bytes[connection->length] = 0;
    size_t head, whole;
    while ((whole = request_length(bytes, connection->length, &head)) > 0) {
      reply(connection, bytes, head, whole);
      connection->length -= whole;
      memmove(bytes, bytes + whole, connection->length);
    }
    if ((size_t)got < 4096) return 1;
  }
}

static void await_bytes(int epoll, int fd, void *of) {
  struct epoll_event event = {.events = EPOLLIN, .data.ptr = of};
  need(epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) == 0, "epoll; stdin must be a pipe");
}

static void accept_all(int epoll, int listener) {
  int fd, on = 1;
  while ((fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC)) >= 0) {
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    struct connection *connection = calloc(1, sizeof *connection);
    connection->fd = fd;
    connection->next = all;
    all = connection;
    await_bytes(epoll, fd, connection);
  }
}

static double now_ms(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec * 1e3 + (double)now.tv_nsec / 1e6;
}

static void end_stream(struct connection *connection) {
  connection->held = 0;
  send_answer(connection->fd, find("#release", 8));
}

/** The next event of each long stream. */
static void go_on(void) {
  for (struct connection *each = all; each != NULL; each = each->next) {
    if (each->held <= 0) continue;
    send_answer(each->fd, find("#event", 6));
    if (--each->held > 0) continue;
    longs -= 1;
    end_stream(each);
  }
}

int main(int argc, char **argv) {
  if (argc != 2) return 2;
  read_answers(argv[1]);
  struct rlimit files;
  getrlimit(RLIMIT_NOFILE, &files);
  files.rlim_cur = files.rlim_max;
  setrlimit(RLIMIT_NOFILE, &files);
  struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  socklen_t size = sizeof address;
  struct connection listener = {.fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0)};
  need(bind(listener.fd, (struct sockaddr *)&address, size) == 0 && listen(listener.fd, 4096) == 0, "listen");
  getsockname(listener.fd, (struct sockaddr *)&address, &size);
  int epoll = epoll_create1(EPOLL_CLOEXEC);
  await_bytes(epoll, listener.fd, &listener);
  await_bytes(epoll, STDIN_FILENO, NULL);
  printf("%d\n", ntohs(address.sin_port));
  fflush(stdout);
  struct epoll_event events[EVENTS];
  double next_ms = 0;
  for (;;) {
    int count = epoll_wait(epoll, events, EVENTS, longs > 0 ? 1 : -1);
    if (longs > 0 && now_ms() >= next_ms) {
      next_ms = now_ms() + EVENT_MS;
      go_on();
    }
    for (int at = 0; at < count; at += 1) {
      struct connection *connection = events[at].data.ptr;
      char line[64];
      if (connection == &listener) accept_all(epoll, listener.fd);
      else if (connection == NULL) {
        if (read(STDIN_FILENO, line, sizeof line) <= 0) return 0;
        if (line[0] == 'f') failing = 1;
        else for (struct connection *each = all; each != NULL; each = each->next) {
          if (each->held < 0) end_stream(each);
        }
      } else if (serve(connection) == 0) {
        // The struct stays in the list.
        close(connection->fd);
        free(connection->bytes);
        connection->bytes = NULL;
        longs -= connection->held > 0;
        connection->held = 0;
      }
    }
  }
}
