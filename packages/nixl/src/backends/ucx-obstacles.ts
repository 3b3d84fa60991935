import { accessSync, constants, existsSync, readFileSync } from "node:fs";
import { networkInterfaces } from "node:os";

export interface Obstacle {
  readonly reason: string;
  readonly fix: string;
}

interface Host {
  exists(path: string): boolean;
  writable(path: string): boolean;
  /** The interfaces that are up. */
  interfaces(): readonly string[];
  read(path: string): string;
}

const REAL: Host = {
  exists: existsSync,
  writable,
  interfaces: () => Object.keys(networkInterfaces()),
  read,
};

/** Each UCX worker takes a segment of at least this size. */
const SEGMENT_BYTES = 36_864;
const PAGE_BYTES = 4096;

/**
 * Finds what keeps UCX from starting, because UCX logs it only to stderr and NIXL drops it. What
 * `UCX_TLS` leaves out is no obstacle. With UCX 1.20 a read-only `/dev/shm` is one; a missing or
 * small `/dev/shm` is not.
 */
export function ucxObstacles(transports: string | undefined, host: Host = REAL): Obstacle[] {
  const obstacles = networkObstacles(host);
  if (!host.exists("/proc/self")) {
    const reason = "there is no /proc, in which UCX reads the host's memory and processors";
    obstacles.push({ reason, fix: "mount -t proc proc /proc" });
  }
  const leftOut = transports?.startsWith("^") ? transports.slice(1).split(",") : [];
  const without = (transport: string) => `set UCX_TLS=^${transport} on both sides`;
  if (!leftOut.includes("posix") && host.exists("/dev/shm") && !host.writable("/dev/shm")) {
    const fix = `mount /dev/shm so that it can be written, or ${without("posix")}`;
    obstacles.push({ reason: "/dev/shm cannot be written", fix });
  }
  const segments = leftOut.includes("sysv") ? undefined : refusedSegments(host);
  if (segments !== undefined) {
    const fix = `raise ${segments.setting} (sysctl), end what holds segments (ipcs -m, ipcrm), or ${without("sysv")}`;
    obstacles.push({ reason: `no System V shared memory is left: ${segments.why}`, fix });
  }
  return obstacles;
}

/** Holds also for libfabric's tcp provider. */
export function networkObstacles(host: Pick<Host, "exists" | "interfaces"> = REAL): Obstacle[] {
  if (!host.exists("/sys/class/net")) {
    const reason = "/sys/class/net is not there, so no network interface is found";
    return [{ reason, fix: "mount /sys in the container" }];
  }
  if (host.interfaces().length > 0) return [];
  const fix = "ip link set lo up, or start the container with a network";
  return [{ reason: "no network interface is up, not even lo", fix }];
}

/** The limit by which the kernel refuses UCX's next segment of System V shared memory. */
function refusedSegments(host: Host): { setting: string; why: string } | undefined {
  const limit = (name: string) => {
    const text = host.read(`/proc/sys/kernel/${name}`).trim();
    return text === "" ? Number.POSITIVE_INFINITY : Number(text);
  };
  // A line of column names, then one per segment: key, id, permissions, size.
  const lines = host.read("/proc/sysvipc/shm").trim().split("\n").slice(1);
  const pages = lines.reduce(
    (sum, line) => sum + Math.ceil(Number(line.trim().split(/\s+/)[3]) / PAGE_BYTES),
    0,
  );
  const refused = (setting: string, why: string) => ({
    setting: `kernel.${setting}`,
    why: `kernel.${setting} is ${limit(setting)}, and ${why}`,
  });
  if (limit("shmmni") <= lines.length)
    return refused("shmmni", `${lines.length} segments are in use`);
  if (limit("shmmax") < SEGMENT_BYTES)
    return refused("shmmax", `UCX takes segments of ${SEGMENT_BYTES} bytes`);
  if (limit("shmall") < pages + SEGMENT_BYTES / PAGE_BYTES)
    return refused("shmall", `${pages} pages are in use`);
  return undefined;
}

function read(path: string): string {
  try {
    return readFileSync(path, "utf8");
  } catch {
    return "";
  }
}

function writable(path: string): boolean {
  try {
    accessSync(path, constants.W_OK);
    return true;
  } catch {
    return false;
  }
}
