import { accessSync, constants, existsSync, readFileSync } from "node:fs";
import { networkInterfaces } from "node:os";

/** What keeps UCX from starting on this machine, and what to do. */
export interface Obstacle {
  /** What is found. */
  readonly reason: string;
  /** What to change. */
  readonly fix: string;
}

/** What `ucxObstacles` looks at. */
interface Host {
  /** Whether there is a folder. */
  exists(path: string): boolean;
  /** Whether it can be written. */
  writable(path: string): boolean;
  /** The interfaces that are up. */
  interfaces(): readonly string[];
  /** The text of a file of `/proc`; empty when there is none. */
  read(path: string): string;
}

/** The smallest segment that each UCX worker takes. */
const SEGMENT_BYTES = 36_864;
const PAGE_BYTES = 4096;

/**
 * Looks for what UCX needs and cannot do without: it logs the reason to stderr alone, and NIXL
 * drops it. `transports` is `UCX_TLS`: what it leaves out is no obstacle. Tried with UCX 1.20: a
 * `/dev/shm` that is missing, or small, is no obstacle, and one that is read-only is.
 */
export function ucxObstacles(
  transports: string | undefined,
  host: Host = {
    exists: existsSync,
    writable,
    interfaces: () => Object.keys(networkInterfaces()),
    read,
  },
): Obstacle[] {
  const obstacles: Obstacle[] = [];
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
  if (!host.exists("/sys/class/net")) {
    const reason = "/sys/class/net is not there, so UCX finds no network interface";
    obstacles.push({ reason, fix: "mount /sys in the container" });
  } else if (host.interfaces().length === 0) {
    const fix = "ip link set lo up, or start the container with a network";
    obstacles.push({ reason: "no network interface is up, not even lo", fix });
  }
  return obstacles;
}

/**
 * The limit of System V shared memory by which the kernel refuses UCX's next segment; undefined
 * when there is none.
 */
function refusedSegments(host: Host): { setting: string; why: string } | undefined {
  const limit = (name: string) => {
    const text = host.read(`/proc/sys/kernel/${name}`).trim();
    return text === "" ? Number.POSITIVE_INFINITY : Number(text);
  };
  // A line of column names, and one for each segment: key, id, permissions, size.
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
