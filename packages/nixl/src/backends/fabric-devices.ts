import { readdir, readlink } from "node:fs/promises";
import { basename, join } from "node:path";

/** A device for RDMA, as the kernel lists it. */
export interface FabricDevice {
  readonly name: string;
  /** Such as `mlx5_core` or `efa`; "unknown" where the kernel does not say. */
  readonly driver: string;
}

/** Devices below `/sys/class/infiniband`, where EFA's are too. None where there is no such folder. */
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

/** AWS's EFA and nothing else: UCX has no transport for it, and falls back to TCP without a word. */
export function isEfaOnly(devices: readonly FabricDevice[]): boolean {
  return devices.length > 0 && devices.every(({ driver }) => driver === "efa");
}
