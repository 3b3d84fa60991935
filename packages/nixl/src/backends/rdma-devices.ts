import { readdir, readlink } from "node:fs/promises";
import { basename, join } from "node:path";
import type { BackendSpec, Log } from "@kv/interface";

export interface FabricDevice {
  /** Such as `mlx5_0`. */
  readonly name: string;
  /** Such as `mlx5_core` or `efa`; "unknown" where the kernel does not say. */
  readonly driver: string;
}

const FOLDER = "/sys/class/infiniband";

/** RDMA devices, EFA included; empty without such a folder. */
export async function fabricDevices(): Promise<FabricDevice[]> {
  const names = await readdir(FOLDER).catch(() => [] as string[]);
  return await Promise.all(
    names.sort().map(async (name) => ({
      name,
      driver: await readlink(join(FOLDER, name, "device", "driver")).then(
        (path) => basename(path),
        () => "unknown",
      ),
    })),
  );
}

/** UCX has no transport for AWS's EFA, and falls back to TCP without a warning. */
export function isEfaOnly(devices: readonly FabricDevice[]): boolean {
  return devices.length > 0 && devices.every(({ driver }) => driver === "efa");
}

/** Logs `nixl-ucx-on-efa` when UCX is selected on a host with EFA alone. */
export async function warnOfUcxOnEfa(backends: readonly BackendSpec[], log: Log): Promise<void> {
  if (!backends.some(({ name }) => name === "UCX")) return;
  const devices = await fabricDevices();
  if (!isEfaOnly(devices)) return;
  log.warn("nixl-ucx-on-efa", {
    devices: devices.map(({ name }) => name),
    why: "EFA is the only fabric of this host, and UCX has no transport for it: it uses TCP, or fails to connect",
    remedy: "NIXL_BACKEND=LIBFABRIC",
  });
}
