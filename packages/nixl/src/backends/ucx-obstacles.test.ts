import { expect, test } from "vitest";
import { type Host, realHost } from "../host.js";
import { networkObstacles, ucxObstacles } from "./ucx-obstacles.js";

const host = (missing: string, files: Record<string, string> = {}): Host => ({
  ...realHost(),
  names: (folder) => (folder === missing ? [] : ["some"]),
  space: (path) => (path === missing ? undefined : { totalBytes: 1, freeBytes: 1 }),
  writable: (path) => `read-only ${path}` !== missing,
  text: (path) => files[path]?.trim(),
});
const reasons = (of: Host, transports?: string, interfaces = ["lo"]) =>
  ucxObstacles(transports, of, interfaces).map(({ reason, fix }) => `${reason}: ${fix}`);

/**
 * nixl.md N10: the error only said that NIXL's log has more. test/backends/ucx-cannot-start.test.ts
 * has each with UCX itself.
 */
test("N10: what keeps UCX from starting is named, with what to set", () => {
  expect(reasons(host("nothing"))).toEqual([]);
  expect(reasons(host("/dev/shm"))).toEqual([]);
  expect(reasons(host("read-only /dev/shm"))).toEqual([
    expect.stringContaining("set UCX_TLS=^posix"),
  ]);
  expect(reasons(host("read-only /dev/shm"), "^sysv,posix")).toEqual([]);
  expect(reasons(host("/sys/class/net"), undefined, [])).toEqual([
    expect.stringContaining("mount /sys"),
  ]);
  expect(reasons(host("nothing"), undefined, [])).toEqual([
    expect.stringContaining("ip link set lo up"),
  ]);
});

test("N10: limits of System V shared memory, and segments that others hold", () => {
  const used = "key shmid perms size\n 0 327708 1660 36864 12364\n 0 327709 1660 4296704 12364\n";
  const sysv = (limits: Record<string, string>, transports?: string) => {
    const files = Object.fromEntries(
      Object.entries(limits).map(([name, limit]) => [`/proc/sys/kernel/${name}`, `${limit}\n`]),
    );
    return reasons(host("nothing", { ...files, "/proc/sysvipc/shm": used }), transports);
  };
  const usual = { shmmni: "4096", shmmax: "18446744073692774399", shmall: "18446744073692774399" };
  expect(sysv(usual)).toEqual([]);
  expect(sysv({ ...usual, shmmni: "3", shmmax: "36864", shmall: "1067" })).toEqual([]);
  expect(sysv({ ...usual, shmmni: "2" })).toEqual([
    expect.stringContaining(
      "kernel.shmmni is 2, and 2 segments are in use: raise kernel.shmmni (sysctl), end what holds segments (ipcs -m, ipcrm), or set UCX_TLS=^sysv",
    ),
  ]);
  expect(sysv({ ...usual, shmmax: "36863" })).toEqual([
    expect.stringContaining("kernel.shmmax is 36863"),
  ]);
  expect(sysv({ ...usual, shmall: "1066" })).toEqual([
    expect.stringContaining("1058 pages are in use"),
  ]);
  expect(sysv({ ...usual, shmmni: "0" }, "^sysv")).toEqual([]);
});

test("F6: without /proc UCX does not start, and without a network LIBFABRIC does not: both are named", () => {
  expect(reasons(host("/proc/self"))).toEqual([expect.stringContaining("mount -t proc")]);
  expect(networkObstacles(host("nothing"), [])).toEqual([
    expect.objectContaining({ fix: expect.stringContaining("start the container with a network") }),
  ]);
  expect(networkObstacles(host("nothing"), ["lo"])).toEqual([]);
});

test("N10: this machine has none of them", () => {
  expect(ucxObstacles(undefined)).toEqual([]);
});
