// usage: list-loop LIBRARY COUNT BLOCK. Prints the milliseconds that NIXL's C API takes for a list
// of COUNT scattered blocks: one call per block, then the preparation of the list.
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

struct config {
  _Bool progress_thread, listen_thread;
  int listen_port, thread_sync;
  unsigned int num_workers;
  uint64_t progress_delay_us, listen_delay_us;
  _Bool capture_telemetry;
};

static void *library;

static void *function(const char *name) {
  void *found = dlsym(library, name);
  if (found == NULL) {
    fprintf(stderr, "%s is missing\n", name);
    exit(1);
  }
  return found;
}

static void need(int status, const char *what) {
  if (status == 0) return;
  fprintf(stderr, "%s: %d\n", what, status);
  exit(1);
}

static double now_ms(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1e3 + time.tv_nsec / 1e6;
}

int main(int argc, char **argv) {
  if (argc != 4) return 2;
  const size_t count = strtoull(argv[2], NULL, 10), block = strtoull(argv[3], NULL, 10);
  library = dlopen(argv[1], RTLD_NOW);
  if (library == NULL) {
    fprintf(stderr, "%s\n", dlerror());
    return 1;
  }
  int (*create_agent)(const char *, const struct config *, void **) = function("nixl_capi_create_configured_agent");
  int (*get_params)(void *, const char *, void **, void **) = function("nixl_capi_get_plugin_params");
  int (*create_backend)(void *, const char *, void *, void **) = function("nixl_capi_create_backend");
  int (*create_registration)(int, void **) = function("nixl_capi_create_reg_dlist");
  int (*add_registration)(void *, uintptr_t, size_t, uint64_t, const void *, size_t) = function("nixl_capi_reg_dlist_add_desc");
  int (*register_memory)(void *, void *, void *) = function("nixl_capi_register_mem");
  int (*create_list)(int, void **) = function("nixl_capi_create_xfer_dlist");
  int (*add)(void *, uintptr_t, size_t, uint64_t) = function("nixl_capi_xfer_dlist_add_desc");
  int (*prepare)(void *, const char *, void *, void **, void *) = function("nixl_capi_prep_xfer_dlist");

  void *agent, *types, *parameters, *backend, *registration, *list, *prepared;
  const struct config config = {.progress_delay_us = 0};
  need(create_agent("list-loop", &config, &agent), "agent");
  need(get_params(agent, "UCX", &types, &parameters), "parameters");
  need(create_backend(agent, "UCX", parameters, &backend), "backend");
  char *memory = aligned_alloc(4096, count * block);
  if (memory == NULL) return 1;
  memset(memory, 1, count * block);
  need(create_registration(0, &registration), "registration");
  need(add_registration(registration, (uintptr_t)memory, count * block, 0, NULL, 0), "registration");
  need(register_memory(agent, registration, NULL), "register");

  const double begun = now_ms();
  need(create_list(0, &list), "list");
  for (size_t i = 0; i < count; ++i) {
    const int status = add(list, (uintptr_t)memory + (i * 7919 % count) * block, block, 0);
    if (status != 0) need(status, "descriptor");
  }
  need(prepare(agent, "", list, &prepared, NULL), "prepare");
  printf("%f\n", now_ms() - begun);
  fflush(stdout);
  // Without the C library's exit, which crashes where two libnl are loaded.
  _exit(0);
}
