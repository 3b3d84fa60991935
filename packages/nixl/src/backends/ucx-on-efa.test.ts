import { type Log, silentLog } from "@kv/interface";
import { expect, test } from "vitest";
import { warnOfUcxOnEfa } from "./ucx-on-efa.js";

async function warnings(backends: readonly string[], ...drivers: readonly string[]) {
  const told: unknown[] = [];
  const log: Log = {
    ...silentLog,
    warn: (event, fields) => told.push([event, fields?.devices, fields?.remedy]),
  };
  const devices = drivers.map((driver, index) => ({ name: `device${index}`, driver }));
  await warnOfUcxOnEfa(
    backends.map((name) => ({ name })),
    log,
    async () => devices,
  );
  return told;
}

test("UCX where there is EFA and nothing else is warned of, with the devices and what helps", async () => {
  const warning = ["nixl-ucx-on-efa", ["device0", "device1"], "NIXL_BACKEND=LIBFABRIC"];
  expect(await warnings(["UCX"], "efa", "efa")).toEqual([warning]);
  expect(await warnings(["LIBFABRIC", "UCX"], "efa", "efa")).toEqual([warning]);
});

test("no other backend, and no host with another fabric or none", async () => {
  expect(await warnings(["LIBFABRIC"], "efa")).toEqual([]);
  expect(await warnings(["UCX"], "efa", "mlx5_core")).toEqual([]);
  expect(await warnings(["UCX"])).toEqual([]);
});
