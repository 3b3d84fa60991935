#pragma once

#include <cstdio>

// The failed expectations of a test program, which exits with their number.
inline int failures = 0;

inline void expect(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "%s\n", what);
  ++failures;
}
