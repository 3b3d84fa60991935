import type { BackendSpec, Log } from "@kv/interface";
import { type Host, realHost } from "../host.js";

/** An RDMA or EFA device. */
export interface RdmaDevice {
  /** The kernel's name for it. */
  readonly name: string;
  /** Whether it is AWS's EFA. */
  readonly efa: boolean;
  /** The link layer, such as "Ethernet" or "InfiniBand". */
  readonly link: string;
  /** State of each port, such as "4: ACTIVE". */
  readonly ports: readonly string[];
  /** Rate of the first port in Gb/s; undefined where the kernel does not say. */
  readonly gigabitsPerSecond?: number | undefined;
}

/** The devices in `/sys/class/infiniband`. */
export function rdmaDevices(host: Host): RdmaDevice[] {
  const folder = "/sys/class/infiniband";
  return host.names(folder).map((name) => {
    const at = `${folder}/${name}`;
    const ports = host.names(`${at}/ports`);
    // "400 Gb/sec (4X NDR)".
    const rate = Number.parseFloat(host.text(`${at}/ports/${ports[0] ?? 1}/rate`) ?? "");
    return {
      name,
      efa: host.linkName(`${at}/device/driver`) === "efa" || /^efa/.test(name),
      link: host.text(`${at}/ports/${ports[0] ?? 1}/link_layer`) ?? "unknown link",
      ports: ports.map((port) => host.text(`${at}/ports/${port}/state`) ?? "unknown"),
      ...(rate > 0 ? { gigabitsPerSecond: rate } : {}),
    };
  });
}

/** UCX has no transport for AWS's EFA, and falls back to TCP without a warning. */
export function isEfaOnly(devices: readonly Pick<RdmaDevice, "efa">[]): boolean {
  return devices.length > 0 && devices.every(({ efa }) => efa);
}

/** Logs `nixl-ucx-on-efa` when UCX is selected on a host with EFA alone. */
export function warnOfUcxOnEfa(backends: readonly BackendSpec[], log: Log): void {
  const devices = rdmaDevices(realHost());
  if (!backends.some(({ name }) => name === "UCX") || !isEfaOnly(devices)) return;
  log.warn("nixl-ucx-on-efa", {
    devices: devices.map(({ name }) => name),
    why: "EFA is the only fabric of this host, and UCX has no transport for it: it uses TCP, or fails to connect",
    remedy: "NIXL_BACKEND=LIBFABRIC",
  });
}
