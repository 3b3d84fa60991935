import type { RdmaDevice, UcxProtocol } from "@kv/nixl";
import { type Check, check, type Role } from "../../checks/report.js";

const LIMITS = ["UCX_TLS", "UCX_NET_DEVICES"] as const;

export interface MeasuredTransport {
  readonly lanes: readonly UcxProtocol[];
  readonly bytesPerMs: number;
}

interface NetworkFacts {
  readonly backends: readonly string[];
  readonly used: MeasuredTransport;
  readonly hosts?: HostFacts | undefined;
}

export interface HostFacts {
  /** Undefined where this host sets no limits. */
  readonly unlimited: MeasuredTransport | undefined;
  readonly limits: readonly string[];
  readonly sameHost: boolean;
  readonly devices: readonly RdmaDevice[];
}

export function ucxLimits(
  environment: Readonly<Record<string, string | undefined>>,
): readonly string[] {
  return LIMITS.filter((name) => ![undefined, "", "all"].includes(environment[name])).map(
    (name) => `${name}=${environment[name]}`,
  );
}

export const WITHOUT_LIMITS: Readonly<Record<string, string>> = Object.fromEntries(
  LIMITS.map((name) => [name, "all"]),
);

/** From worst to best. */
export const LANE_CLASSES = [
  { name: "tcp", pattern: /\b(tcp|sockets)\b/ },
  { name: "RDMA", pattern: /\b(rc|dc|ud|srd|efa|verbs)(_|\b)|mlx5|\bib\d/ },
  {
    name: "shared memory",
    pattern: /\b(cma|xpmem|knem|sysv|posix|shm|cuda_ipc|rocm_ipc|ze_ipc)\b/,
  },
] as const;

export interface Lane {
  /** Such as "zero-copy cma/memory"; empty for none. */
  readonly how: string;
  /** An index of `LANE_CLASSES`, or -1. */
  readonly rank: number;
}

export function laneNamed(how: string): Lane {
  return { how, rank: LANE_CLASSES.findLastIndex(({ pattern }) => pattern.test(how)) };
}

export function laneOf(lanes: readonly UcxProtocol[]): Lane {
  const last = lanes.at(-1);
  return laneNamed(last === undefined ? "" : `${last.how} ${last.lanes}`.trim());
}

const WORTH = 1.5;

/**
 * UCX takes the best transport that both sides permit, so a setting of either excludes a better
 * one.
 */
export function transportCheck(role: Role, { backends, used, hosts }: NetworkFacts): Check {
  const { how, rank } = laneOf(used.lanes);
  const details = how === "" ? undefined : { lanes: used.lanes };
  const of = (status: Check["status"], more: string, fix?: string) => {
    const found = `${backends.join(", ")}${more}`;
    return check(`bytes.${role}-transport`, "transport", status, found, fix, details);
  };
  if (how === "") return of("note", "; it does not report its network");
  const over = ` over ${how}`;
  if (hosts === undefined) return of("ok", over);
  const { unlimited, limits, sameHost, devices } = hosts;
  if (unlimited !== undefined) {
    const best = laneOf(unlimited.lanes);
    const isFaster = unlimited.bytesPerMs > WORTH * used.bytesPerMs;
    if (best.rank > rank || (best.how !== how && isFaster)) {
      const rates = `${gigabytes(unlimited.bytesPerMs)} instead of ${gigabytes(used.bytesPerMs)}`;
      return of(
        "warn",
        `${over}; without ${limits.join(" and ")} on this host it is ${best.how} (${rates})`,
        `unset ${limits.map((limit) => limit.split("=")[0]).join(" and ")} on the decode server, or permit that transport`,
      );
    }
  }
  if (LANE_CLASSES[rank]?.name !== "tcp") return of("ok", over);
  if (sameHost)
    return of(
      "warn",
      `${over}, although the server is on this host`,
      "set UCX_TLS=all on the server, or add sysv,posix,cma; in containers share /dev/shm and the IPC namespace, and permit CMA (npx kv-nixl doctor)",
    );
  const usable = active(devices);
  if (usable.length === 0) return of("ok", `${over}; this host has no RDMA device`);
  return of(
    "warn",
    `${over}, although this host has ${usable.map(({ name }) => name).join(", ")}: the server has no RDMA device or excludes it`,
    usable.some(({ efa }) => efa)
      ? "UCX does not use EFA: set the backend LIBFABRIC on both servers"
      : "look for an RDMA device on the server's host (npx kv-nixl doctor there), and permit it in its UCX_TLS and UCX_NET_DEVICES; in a container, pass /dev/infiniband on",
  );
}

export function gigabytes(bytesPerMs: number): string {
  return `${(bytesPerMs / 1e6).toFixed(2)} GB/s`;
}

export function active(devices: readonly RdmaDevice[]): readonly RdmaDevice[] {
  return devices.filter(({ ports }) => ports.some((port) => port.includes("ACTIVE")));
}
