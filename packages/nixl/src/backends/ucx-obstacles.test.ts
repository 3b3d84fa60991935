import { expect, test } from "vitest";
import { ucxObstacles } from "./ucx-obstacles.js";

const host = (missing: string, interfaces: readonly string[] = ["lo"]) => ({
  exists: (path: string) => path !== missing,
  writable: (path: string) => `read-only ${path}` !== missing,
  interfaces: () => interfaces,
});
const reasons = (...args: Parameters<typeof host>) =>
  ucxObstacles(host(...args)).map(({ reason, fix }) => `${reason}: ${fix}`);

/** nixl.md N10: the error only said that NIXL's log has more. Each case was tried in a namespace with UCX itself. */
test("N10: what keeps UCX from starting is named, with what to set", () => {
  expect(reasons("nothing")).toEqual([]);
  expect(reasons("/dev/shm")).toEqual([]);
  expect(reasons("read-only /dev/shm")).toEqual([expect.stringContaining("set UCX_TLS=^posix")]);
  expect(reasons("/sys/class/net", [])).toEqual([expect.stringContaining("mount /sys")]);
  expect(reasons("nothing", [])).toEqual([expect.stringContaining("ip link set lo up")]);
});

test("N10: this machine has none of them", () => {
  expect(ucxObstacles()).toEqual([]);
});
