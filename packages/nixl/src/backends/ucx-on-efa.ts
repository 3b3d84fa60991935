import type { BackendSpec, Log } from "@kv/interface";
import { type FabricDevice, fabricDevices, isEfaOnly } from "./fabric-devices.js";

/** Warns where UCX was chosen and the only fabric of the host is EFA. */
export async function warnOfUcxOnEfa(
  backends: readonly BackendSpec[],
  log: Log,
  look: () => Promise<readonly FabricDevice[]> = fabricDevices,
): Promise<void> {
  if (!backends.some(({ name }) => name === "UCX")) return;
  const devices = await look();
  if (!isEfaOnly(devices)) return;
  log.warn("nixl-ucx-on-efa", {
    devices: devices.map(({ name }) => name),
    why: "the only fabric here is EFA, for which UCX has no transport: it goes over TCP, or fails to connect",
    remedy: "NIXL_BACKEND=LIBFABRIC",
  });
}
