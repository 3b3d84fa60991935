import { readdir, readlink } from "node:fs/promises";
import { basename, join } from "node:path";
import type { BackendSpec, Log } from "@kv/interface";

/** An RDMA device, as the kernel lists it. */
export interface FabricDevice {
  /** The kernel's name for it, such as `mlx5_0`. */
  readonly name: string;
  /** The driver, such as `mlx5_core` or `efa`; "unknown" where the kernel does not say. */
  readonly driver: string;
}

/**
 * The devices in `/sys/class/infiniband`, EFA devices included. Empty when there is no such folder.
 */
export async function fabricDevices(folder = "/sys/class/infiniband"): Promise<FabricDevice[]> {
  const names = await readdir(folder).catch(() => [] as string[]);
  return await Promise.all(
    names.sort().map(async (name) => ({
      name,
      driver: await readlink(join(folder, name, "device", "driver")).then(
        (path) => basename(path),
        () => "unknown",
      ),
    })),
  );
}

/**
 * Whether AWS's EFA is the only fabric. UCX has no transport for EFA, and falls back to TCP without
 * a warning.
 */
export function isEfaOnly(devices: readonly FabricDevice[]): boolean {
  return devices.length > 0 && devices.every(({ driver }) => driver === "efa");
}

/** Logs `nixl-ucx-on-efa` when UCX was selected and the only fabric of the host is EFA. */
export async function warnOfUcxOnEfa(
  backends: readonly BackendSpec[],
  log: Log,
  listDevices: () => Promise<readonly FabricDevice[]> = fabricDevices,
): Promise<void> {
  if (!backends.some(({ name }) => name === "UCX")) return;
  const devices = await listDevices();
  if (!isEfaOnly(devices)) return;
  log.warn("nixl-ucx-on-efa", {
    devices: devices.map(({ name }) => name),
    why: "EFA is the only fabric of this host, and UCX has no transport for it: it uses TCP, or fails to connect",
    remedy: "NIXL_BACKEND=LIBFABRIC",
  });
}
