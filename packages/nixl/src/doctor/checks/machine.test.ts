import { describe, expect, test } from "vitest";
import type { Host } from "../host.js";
import { machineChecks } from "./machine.js";

const LIMITS = (memlock: string) =>
  `Limit  Soft Limit  Hard Limit  Units\nMax locked memory         ${memlock}              ${memlock}   bytes`;

/** A fake machine made of files; the paths imply the folders. */
function machine(files: Record<string, string>, rest: Partial<Host> = {}): Host {
  const paths = Object.keys(files);
  return {
    platform: "linux",
    arch: "x64",
    nodeVersion: "20.0.0",
    glibc: "2.36",
    text: (path) => files[path],
    names: (folder) => [
      ...new Set(
        paths
          .filter((path) => path.startsWith(`${folder}/`))
          .map((path) => path.slice(folder.length + 1).split("/")[0] ?? ""),
      ),
    ],
    linkName: (path) => files[path],
    writable: () => true,
    space: () => ({ totalBytes: 2 ** 30, freeBytes: 2 ** 30 }),
    ...rest,
  };
}
const RDMA = {
  "/sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE",
  "/sys/class/infiniband/mlx5_0/ports/1/link_layer": "Ethernet",
  "/dev/infiniband/uverbs0": "",
};
const EFA = {
  "/sys/class/infiniband/rdmap16s27/device/driver": "efa",
  "/sys/class/infiniband/rdmap16s27/ports/1/state": "4: ACTIVE",
  "/dev/infiniband/uverbs0": "",
};
const statuses = (host: Host, backends = ["UCX"]) =>
  Object.fromEntries(machineChecks(host, backends).map(({ id, status }) => [id, status]));
const found = (host: Host, id: string, backends = ["UCX"]) =>
  machineChecks(host, backends).find((check) => check.id === id);

describe("checks of the machine", () => {
  test("a machine without RDMA devices or accelerators passes", () => {
    expect(statuses(machine({ "/proc/self/limits": LIMITS("65536") }))).toEqual({
      "machine.memlock": "note",
      "machine.descriptors": "note",
      "machine.ptrace": "ok",
      "machine.shm": "ok",
      "machine.rdma": "note",
      "machine.accelerators": "note",
    });
  });

  test("N5: a low limit of file descriptors is a warning with the number that an agent needs", () => {
    const limit = (value: string) =>
      found(
        machine({ "/proc/self/limits": `Max open files   ${value}   ${value}   files` }),
        "machine.descriptors",
      );
    expect(limit("64")).toMatchObject({
      status: "warn",
      found: expect.stringContaining("needs 40"),
      details: { limit: 64 },
    });
    expect(limit("1024")?.status).toBe("ok");
    expect(limit("unlimited")?.status).toBe("ok");
  });

  test("N10: a shared memory that cannot be written is not told to be enlarged", () => {
    expect(found(machine({}, { writable: () => false }), "machine.shm")).toMatchObject({
      status: "warn",
      fix: expect.stringContaining("UCX_TLS=^posix"),
    });
  });

  test("a limit on locked memory matters with RDMA", () => {
    const limited = machine({ ...RDMA, "/proc/self/limits": LIMITS("65536") });
    expect(found(limited, "machine.memlock")).toMatchObject({
      status: "warn",
      found: expect.stringContaining("64 KiB"),
    });
    const unlimited = machine({ ...RDMA, "/proc/self/limits": LIMITS("unlimited") });
    expect(found(unlimited, "machine.memlock")).toMatchObject({ status: "ok" });
    expect(found(unlimited, "machine.rdma.mlx5_0")).toMatchObject({
      status: "ok",
      found: expect.stringContaining("Ethernet"),
    });
  });

  test.each([
    ["0", "0000000000000000", "ok"],
    ["1", "0000000000000000", "warn"],
    ["1", "0000000000080000", "ok"],
    ["2", "000001ffffffffff", "ok"],
    ["3", "000001ffffffffff", "warn"],
  ])("ptrace scope %s with capabilities %s: %s", (scope, capabilities, status) => {
    const host = machine({
      "/proc/sys/kernel/yama/ptrace_scope": scope,
      "/proc/self/status": `Name:\tnode\nCapEff:\t${capabilities}\n`,
    });
    expect(found(host, "machine.ptrace")).toMatchObject({ status });
  });

  test("warns about Docker's 64 MiB of shared memory, and about no shared memory", () => {
    const small = machine({}, { space: () => ({ totalBytes: 64 << 20, freeBytes: 64 << 20 }) });
    expect(found(small, "machine.shm")).toMatchObject({
      status: "warn",
      fix: expect.stringContaining("--shm-size"),
    });
    expect(found(machine({}, { space: () => undefined }), "machine.shm")).toMatchObject({
      status: "warn",
    });
  });

  test("warns when a host with EFA does not use LIBFABRIC", () => {
    expect(found(machine(EFA), "machine.efa")).toMatchObject({
      status: "warn",
      fix: expect.stringContaining("LIBFABRIC"),
    });
    expect(found(machine(EFA), "machine.efa", ["LIBFABRIC"])).toBeUndefined();
    expect(found(machine(RDMA), "machine.efa")).toBeUndefined();
  });

  test("warns about an RDMA device that is down, and about one that the container cannot open", () => {
    const down = machine({ ...RDMA, "/sys/class/infiniband/mlx5_0/ports/1/state": "1: DOWN" });
    expect(found(down, "machine.rdma.mlx5_0")).toMatchObject({
      status: "warn",
      found: expect.stringContaining("DOWN"),
    });
    const closed = machine(RDMA, { writable: (path) => !path.startsWith("/dev/infiniband") });
    expect(found(closed, "machine.rdma.mlx5_0")).toMatchObject({
      status: "warn",
      fix: expect.stringContaining("--device"),
    });
  });
});
