import { mkdir, mkdtemp, rm, symlink } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { type Log, silentLog } from "@kv/interface";
import { afterEach, beforeEach, expect, test } from "vitest";
import { fabricDevices, isEfaOnly, warnOfUcxOnEfa } from "./efa.js";

let folder = "";
beforeEach(async () => {
  folder = await mkdtemp(join(tmpdir(), "kv-nixl-fabric-"));
});
afterEach(() => rm(folder, { recursive: true, force: true }));

async function device(name: string, driver: string) {
  await mkdir(join(folder, name, "device"), { recursive: true });
  await symlink(`../../../../bus/pci/drivers/${driver}`, join(folder, name, "device", "driver"));
}

test("isEfaOnly is true only for a host whose fabric devices are all EFA", async () => {
  expect(isEfaOnly(await fabricDevices(join(folder, "none")))).toBe(false);
  await device("rdmap0", "efa");
  await device("rdmap1", "efa");
  expect(isEfaOnly(await fabricDevices(folder))).toBe(true);
  await device("mlx5_0", "mlx5_core");
  expect(await fabricDevices(folder)).toContainEqual({ name: "mlx5_0", driver: "mlx5_core" });
  expect(isEfaOnly(await fabricDevices(folder))).toBe(false);
});

async function warnings(backends: readonly string[], ...drivers: readonly string[]) {
  const logged: unknown[] = [];
  const log: Log = {
    ...silentLog,
    warn: (event, fields) => logged.push([event, fields?.devices, fields?.remedy]),
  };
  const devices = drivers.map((driver, index) => ({ name: `device${index}`, driver }));
  await warnOfUcxOnEfa(
    backends.map((name) => ({ name })),
    log,
    async () => devices,
  );
  return logged;
}

test("UCX on a host with EFA alone: a warning with the devices and the remedy", async () => {
  const warning = ["nixl-ucx-on-efa", ["device0", "device1"], "NIXL_BACKEND=LIBFABRIC"];
  expect(await warnings(["UCX"], "efa", "efa")).toEqual([warning]);
  expect(await warnings(["LIBFABRIC", "UCX"], "efa", "efa")).toEqual([warning]);
});

test("no warning for another backend, nor on a host with another fabric or none", async () => {
  expect(await warnings(["LIBFABRIC"], "efa")).toEqual([]);
  expect(await warnings(["UCX"], "efa", "mlx5_core")).toEqual([]);
  expect(await warnings(["UCX"])).toEqual([]);
});
