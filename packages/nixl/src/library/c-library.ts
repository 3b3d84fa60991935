/** The oldest glibc for Node 20's builds, NIXL's wheels and the addon. */
const MIN_GLIBC = [2, 28] as const;

export interface CLibraryProblem {
  /** Such as "glibc 2.17". */
  readonly found: string;
  readonly fix: string;
}

interface ProcessReport {
  readonly header?: { readonly glibcVersionRuntime?: string };
  readonly sharedObjects?: string[];
}

/** Leaves out connections: Node would ask DNS for the name of each peer, and wait. */
export function processReport(): ProcessReport {
  const report: typeof process.report & { excludeNetwork?: boolean } = process.report;
  const { excludeNetwork } = report;
  report.excludeNetwork = true;
  try {
    return report.getReport();
  } finally {
    report.excludeNetwork = excludeNetwork ?? false;
  }
}

/** Such as "2.36"; undefined with another C library, such as musl. */
export function glibcVersion(): string | undefined {
  return process.platform === "linux" ? processReport().header?.glibcVersionRuntime : undefined;
}

/** `glibc` is the result of `glibcVersion`. */
export function cLibraryProblem(
  platform: string,
  glibc: string | undefined,
): CLibraryProblem | undefined {
  if (platform !== "linux") {
    return {
      found: `${platform}: NIXL runs on Linux`,
      fix: "use @kv/transport-memory, which runs anywhere",
    };
  }
  const wanted = MIN_GLIBC.join(".");
  if (glibc === undefined) {
    return {
      found: "a C library that is not glibc (musl, as on Alpine)",
      fix: `use a system or an image with glibc ${wanted} or newer, such as node:22-bookworm; or @kv/transport-memory, which runs anywhere`,
    };
  }
  const [major = 0, minor = 0] = glibc.split(".").map(Number);
  if (major > MIN_GLIBC[0] || (major === MIN_GLIBC[0] && minor >= MIN_GLIBC[1])) return undefined;
  return {
    found: `glibc ${glibc}`,
    fix: `use a system with glibc ${wanted} or newer: Debian 10, Ubuntu 20.04, RHEL 8, Amazon Linux 2023, or later`,
  };
}
