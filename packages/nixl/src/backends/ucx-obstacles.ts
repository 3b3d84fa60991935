import { accessSync, constants, existsSync } from "node:fs";
import { networkInterfaces } from "node:os";

/** What keeps UCX from starting on this machine, and what to do. */
export interface Obstacle {
  /** What is found. */
  readonly reason: string;
  /** What to change. */
  readonly fix: string;
}

/**
 * Looks for what UCX needs and cannot do without: it logs the reason to stderr alone, and NIXL drops it. Tried with UCX 1.20: a `/dev/shm` that is missing,
 * or small, is no obstacle, and one that is read-only is.
 */
export function ucxObstacles(
  host: {
    /** Whether there is a folder. */
    exists(path: string): boolean;
    /** Whether it can be written. */
    writable(path: string): boolean;
    /** The interfaces that are up. */
    interfaces(): readonly string[];
  } = { exists: existsSync, writable, interfaces: () => Object.keys(networkInterfaces()) },
): Obstacle[] {
  const obstacles: Obstacle[] = [];
  if (host.exists("/dev/shm") && !host.writable("/dev/shm")) {
    const fix = "mount /dev/shm so that it can be written, or set UCX_TLS=^posix on both sides";
    obstacles.push({ reason: "/dev/shm cannot be written", fix });
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

function writable(path: string): boolean {
  try {
    accessSync(path, constants.W_OK);
    return true;
  } catch {
    return false;
  }
}
