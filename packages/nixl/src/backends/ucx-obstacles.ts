import { networkInterfaces } from "node:os";
import { type Host, realHost } from "../host.js";

export interface Obstacle {
  readonly reason: string;
  readonly fix: string;
}

/** Each UCX worker takes a segment of at least this size. */
const SEGMENT_BYTES = 36_864;
const PAGE_BYTES = 4096;

const upInterfaces = (): string[] => Object.keys(networkInterfaces());

/**
 * Finds what keeps UCX from starting, because UCX logs it only to stderr and NIXL drops it. What
 * `UCX_TLS` leaves out is no obstacle. With UCX 1.20 a read-only `/dev/shm` is one; a missing or
 * small `/dev/shm` is not.
 */
export function ucxObstacles(
  transports: string | undefined,
  host = realHost(),
  interfaces = upInterfaces(),
): Obstacle[] {
  const obstacles = networkObstacles(host, interfaces);
  if (host.names("/proc/self").length === 0) {
    const reason = "there is no /proc, in which UCX reads the host's memory and processors";
    obstacles.push({ reason, fix: "mount -t proc proc /proc" });
  }
  const leftOut = transports?.startsWith("^") ? transports.slice(1).split(",") : [];
  const without = (transport: string) => `set UCX_TLS=^${transport} on both sides`;
  if (!leftOut.includes("posix") && host.space("/dev/shm") && !host.writable("/dev/shm")) {
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
export function networkObstacles(host = realHost(), interfaces = upInterfaces()): Obstacle[] {
  if (host.names("/sys/class/net").length === 0) {
    const reason = "/sys/class/net is not there, so no network interface is found";
    return [{ reason, fix: "mount /sys in the container" }];
  }
  if (interfaces.length > 0) return [];
  const fix = "ip link set lo up, or start the container with a network";
  return [{ reason: "no network interface is up, not even lo", fix }];
}

/** The limit by which the kernel refuses UCX's next segment of System V shared memory. */
function refusedSegments(host: Host): { setting: string; why: string } | undefined {
  const limit = (name: string) => {
    const text = host.text(`/proc/sys/kernel/${name}`);
    return text === undefined ? Number.POSITIVE_INFINITY : Number(text);
  };
  // A line of column names, then one per segment: key, id, permissions, size.
  const lines = (host.text("/proc/sysvipc/shm") ?? "").split("\n").slice(1);
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
