import { mkdir, mkdtemp, rm, symlink } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { afterEach, beforeEach, expect, test } from "vitest";
import { fabricDevices, isEfaOnly } from "./fabric-devices.js";

let folder = "";
beforeEach(async () => {
  folder = await mkdtemp(join(tmpdir(), "kv-nixl-fabric-"));
});
afterEach(() => rm(folder, { recursive: true, force: true }));

async function device(name: string, driver: string) {
  await mkdir(join(folder, name, "device"), { recursive: true });
  await symlink(`../../../../bus/pci/drivers/${driver}`, join(folder, name, "device", "driver"));
}

test("a host with EFA alone is told from one with InfiniBand too, and from one with neither", async () => {
  expect(isEfaOnly(await fabricDevices(join(folder, "none")))).toBe(false);
  await device("rdmap0", "efa");
  await device("rdmap1", "efa");
  expect(isEfaOnly(await fabricDevices(folder))).toBe(true);
  await device("mlx5_0", "mlx5_core");
  expect(await fabricDevices(folder)).toContainEqual({ name: "mlx5_0", driver: "mlx5_core" });
  expect(isEfaOnly(await fabricDevices(folder))).toBe(false);
});
