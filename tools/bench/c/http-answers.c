// An HTTP/1.1 server that costs next to nothing: each answer is bytes that were made before.
//     http-answers LISTENERS < commands
// Commands on stdin: `answer LISTENER SUFFIX LENGTH` and LENGTH bytes (the whole answer to requests
// whose path ends in SUFFIX), then `listen`, to which it replies with the port of each listener in
// one line. A request whose body contains "hold" gets the answer of the suffix `#hold` and stays
// open until the command `release`, which sends the answer of `#release` to all of them. Ends with
// stdin.
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
#include <unistd.h>

enum { MAX_ANSWERS = 64, MAX_BODY = 64 << 20, EVENTS = 256 };

struct answer {
  int listener;
  char suffix[128];
  char *bytes;
  size_t length;
};

struct connection {
  int fd;
  int listener;
  int listens;
  int held;
  char *bytes;
  size_t length, capacity;
  struct connection *next;
};

static struct answer answers[MAX_ANSWERS];
static int answer_count;
static struct connection *held;

static void fail(const char *what) {
  perror(what);
  exit(1);
}

static void send_all(int fd, const char *bytes, size_t length) {
  while (length > 0) {
    ssize_t sent = send(fd, bytes, length, MSG_NOSIGNAL);
    if (sent < 0 && errno == EAGAIN) {
      struct pollfd writable = {fd, POLLOUT, 0};
      poll(&writable, 1, 1000);
      continue;
    }
    if (sent <= 0) return;
    bytes += sent;
    length -= (size_t)sent;
  }
}

static const struct answer *find(int listener, const char *path, size_t length) {
  for (int at = 0; at < answer_count; at += 1) {
    const struct answer *each = &answers[at];
    size_t suffix = strlen(each->suffix);
    if (each->listener == listener && suffix <= length && memcmp(path + length - suffix, each->suffix, suffix) == 0) return each;
  }
  return NULL;
}

static void reply(struct connection *connection, const char *request, size_t head, size_t length) {
  const char *path = memchr(request, ' ', head);
  const char *end = path == NULL ? NULL : memchr(path + 1, ' ', head - (size_t)(path + 1 - request));
  if (end == NULL) return;
  const char *query = memchr(path, '?', (size_t)(end - path));
  if (query != NULL) end = query;
  if (memmem(request + head, length - head, "\"hold\"", 6) != NULL) {
    const struct answer *first = find(connection->listener, "#hold", 5);
    if (first != NULL) {
      send_all(connection->fd, first->bytes, first->length);
      connection->held = 1;
      connection->next = held;
      held = connection;
      return;
    }
  }
  const struct answer *found = find(connection->listener, path + 1, (size_t)(end - path - 1));
  static const char missing[] = "HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n";
  if (found == NULL) send_all(connection->fd, missing, sizeof missing - 1);
  else send_all(connection->fd, found->bytes, found->length);
}

static void drop(struct connection *connection) {
  for (struct connection **at = &held; connection->held && *at != NULL; at = &(*at)->next) {
    if (*at != connection) continue;
    *at = connection->next;
    break;
  }
  close(connection->fd);
  free(connection->bytes);
  free(connection);
}

/**
 * The length of a chunked body; more than `length` where its end has not come. Envoy sends a body
 * in chunks that an external processor has passed on.
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

/** Reads what has come and answers each whole request. */
static void serve(struct connection *connection) {
  for (;;) {
    if (connection->capacity - connection->length < 4096) {
      connection->capacity = connection->capacity == 0 ? 8192 : connection->capacity * 2;
      if (connection->capacity > 2 * (size_t)MAX_BODY) return drop(connection);
      connection->bytes = realloc(connection->bytes, connection->capacity);
    }
    ssize_t got = recv(connection->fd, connection->bytes + connection->length, connection->capacity - connection->length - 1, 0);
    if (got == 0 || (got < 0 && errno != EAGAIN)) return drop(connection);
    if (got < 0) return;
    connection->length += (size_t)got;
    connection->bytes[connection->length] = 0;
    for (;;) {
      char *head_end = memmem(connection->bytes, connection->length, "\r\n\r\n", 4);
      if (head_end == NULL) break;
      size_t head = (size_t)(head_end - connection->bytes) + 4;
      *head_end = 0;
      const char *declared = strcasestr(connection->bytes, "\r\ncontent-length:");
      int is_chunked = strcasestr(connection->bytes, "\r\ntransfer-encoding: chunked") != NULL;
      size_t body = declared == NULL ? 0 : strtoul(declared + 17, NULL, 10);
      *head_end = '\r';
      if (is_chunked) body = chunked_length(connection->bytes + head, connection->length - head);
      if (connection->length < head + body) break;
      reply(connection, connection->bytes, head, head + body);
      connection->length -= head + body;
      memmove(connection->bytes, connection->bytes + head + body, connection->length);
    }
    if ((size_t)got < 4096) return;
  }
}

static int listen_on(int epoll, int listener) {
  int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  socklen_t size = sizeof address;
  if (fd < 0 || bind(fd, (struct sockaddr *)&address, size) < 0 || listen(fd, 4096) < 0) fail("listen");
  getsockname(fd, (struct sockaddr *)&address, &size);
  struct connection *connection = calloc(1, sizeof *connection);
  *connection = (struct connection){.fd = fd, .listener = listener, .listens = 1};
  struct epoll_event event = {.events = EPOLLIN, .data.ptr = connection};
  epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event);
  return ntohs(address.sin_port);
}

static void accept_all(int epoll, struct connection *listener) {
  for (;;) {
    int fd = accept4(listener->fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0) return;
    int on = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    struct connection *connection = calloc(1, sizeof *connection);
    connection->fd = fd;
    connection->listener = listener->listener;
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = connection};
    epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event);
  }
}

/** One command. Returns 0 at the end of stdin. */
static int command(int epoll, int listeners) {
  char line[512];
  if (fgets(line, sizeof line, stdin) == NULL) return 0;
  struct answer *next = &answers[answer_count];
  if (answer_count < MAX_ANSWERS && sscanf(line, "answer %d %127s %zu", &next->listener, next->suffix, &next->length) == 3) {
    next->bytes = malloc(next->length);
    if (fread(next->bytes, 1, next->length, stdin) != next->length) return 0;
    answer_count += 1;
  } else if (strcmp(line, "listen\n") == 0) {
    for (int at = 0; at < listeners; at += 1) printf("%d%c", listen_on(epoll, at), at + 1 < listeners ? ' ' : '\n');
    fflush(stdout);
  } else if (strcmp(line, "release\n") == 0) {
    for (struct connection *each = held; each != NULL; each = each->next) {
      const struct answer *last = find(each->listener, "#release", 8);
      if (last != NULL) send_all(each->fd, last->bytes, last->length);
      each->held = 0;
    }
    held = NULL;
  } else {
    fprintf(stderr, "not a command: %s", line);
    exit(2);
  }
  return 1;
}

int main(int argc, char **argv) {
  int listeners = argc > 1 ? atoi(argv[1]) : 1;
  struct rlimit files;
  getrlimit(RLIMIT_NOFILE, &files);
  files.rlim_cur = files.rlim_max;
  setrlimit(RLIMIT_NOFILE, &files);
  // Commands come whole; a buffer of stdio would hide what epoll waits for.
  setvbuf(stdin, NULL, _IONBF, 0);
  int epoll = epoll_create1(EPOLL_CLOEXEC);
  struct epoll_event event = {.events = EPOLLIN, .data.ptr = NULL};
  if (epoll_ctl(epoll, EPOLL_CTL_ADD, STDIN_FILENO, &event) < 0) fail("stdin must be a pipe");
  struct epoll_event events[EVENTS];
  for (;;) {
    int count = epoll_wait(epoll, events, EVENTS, -1);
    for (int at = 0; at < count; at += 1) {
      struct connection *connection = events[at].data.ptr;
      if (connection == NULL) {
        if (command(epoll, listeners) == 0) return 0;
      } else if (connection->listens) accept_all(epoll, connection);
      else serve(connection);
    }
  }
}
