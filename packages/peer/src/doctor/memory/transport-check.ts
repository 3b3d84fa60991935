import type { RdmaDevice, UcxProtocol } from "@kv/nixl";
import { type Check, check, type Role } from "../../checks/report.js";

/** The variables with which a user limits the transports of UCX. */
const LIMITS = ["UCX_TLS", "UCX_NET_DEVICES"] as const;

export interface MeasuredTransport {
  readonly lanes: readonly UcxProtocol[];
  readonly bytesPerMs: number;
}

export interface NetworkFacts {
  readonly backends: readonly string[];
  /** As this host's environment permits. */
  readonly used: MeasuredTransport;
  /**
   * What the transport in use is compared with; undefined for a server that this host is not to be
   * fast with.
   */
  readonly hosts?: HostFacts | undefined;
}

export interface HostFacts {
  /** Without the limits of this host's environment; undefined when it has none. */
  readonly unlimited: MeasuredTransport | undefined;
  /** The limits that are set, such as `UCX_TLS=tcp`. */
  readonly limits: readonly string[];
  readonly sameHost: boolean;
  readonly devices: readonly RdmaDevice[];
}

/** The limits in an environment, as they are set there; "all" is none. */
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

/** Kinds of transports, from the worst to the best. */
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
  /** An index of `LANE_CLASSES`; -1 for an unknown one. */
  readonly rank: number;
}

export function laneNamed(how: string): Lane {
  return { how, rank: LANE_CLASSES.findLastIndex(({ pattern }) => pattern.test(how)) };
}

/** The lane of the largest messages. */
export function laneOf(lanes: readonly UcxProtocol[]): Lane {
  const last = lanes.at(-1);
  return laneNamed(last === undefined ? "" : `${last.how} ${last.lanes}`.trim());
}

/** This much faster is worth a change of settings. */
const WORTH = 1.5;

/**
 * Compares the transport in use with the best one that both hosts have. UCX takes the best one that
 * both sides permit, so a better one exists when a setting of this host or of the server excludes
 * it.
 */
export function transportCheck(role: Role, { backends, used, hosts }: NetworkFacts): Check {
  const { how, rank } = laneOf(used.lanes);
  const of = (status: Check["status"], more: string, fix?: string) =>
    check(`bytes.${role}-transport`, "transport", status, `${backends.join(", ")}${more}`, {
      fix,
      details: how === "" ? undefined : { lanes: used.lanes },
    });
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

/** Such as "12.34 GB/s". */
export function gigabytes(bytesPerMs: number): string {
  return `${(bytesPerMs / 1e6).toFixed(2)} GB/s`;
}

export function active(devices: readonly RdmaDevice[]): readonly RdmaDevice[] {
  return devices.filter(({ ports }) => ports.some((port) => port.includes("ACTIVE")));
}
