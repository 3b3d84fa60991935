// Preloaded: the KV_FAIL_MALLOC-th allocation that C++ makes on an agents' thread fails, once, and
// says so. The C library's own are left alone: its loader does not survive that.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

static void *(*real_malloc)(size_t);
static long left;

__attribute__((constructor)) static void start(void) {
  const char *const text = getenv("KV_FAIL_MALLOC");
  left = text == NULL ? 0 : atol(text);
}

void *malloc(size_t size) {
  if (real_malloc == NULL) real_malloc = (void *(*)(size_t))dlsym(RTLD_NEXT, "malloc");
  if (__atomic_load_n(&left, __ATOMIC_RELAXED) > 0) {
    char name[16] = "";
    prctl(PR_GET_NAME, name);
    Dl_info caller = {0};
    const int found = strcmp(name, "kv_nixl") == 0 && dladdr(__builtin_return_address(0), &caller) != 0;
    const char *const file = found && caller.dli_fname != NULL ? caller.dli_fname : "";
    const int is_cpp = strstr(file, "libstdc++") != NULL || strstr(file, "kv_nixl") != NULL;
    if (is_cpp && __atomic_sub_fetch(&left, 1, __ATOMIC_RELAXED) == 0) {
      if (write(2, "failed\n", 7) < 0) abort();
      return NULL;
    }
  }
  return real_malloc(size);
}
