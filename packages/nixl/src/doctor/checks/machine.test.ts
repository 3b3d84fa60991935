import { describe, expect, test } from "vitest";
import type { Host } from "../../host.js";
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
const limits = (memlock: string) => ({ "/proc/self/limits": LIMITS(memlock) });
const openFiles = (limit: string) =>
  machine({ "/proc/self/limits": `Max open files   ${limit}   ${limit}   files` });
const ptrace = (scope: string, capabilities: string) =>
  machine({
    "/proc/sys/kernel/yama/ptrace_scope": scope,
    "/proc/self/status": `Name:\tnode\nCapEff:\t${capabilities}\n`,
  });
const space = (bytes: number) => () => ({ totalBytes: bytes, freeBytes: bytes });
const PORT = "/sys/class/infiniband/mlx5_0/ports/1/state";
const find = (host: Host, id: string, backend = "UCX") =>
  machineChecks(host, [backend]).find((check) => check.id === `machine.${id}`);

describe("checks of the machine", () => {
  test("a machine without RDMA devices or accelerators passes", () => {
    const checks = machineChecks(machine(limits("65536")), ["UCX"]);
    expect(Object.fromEntries(checks.map(({ id, status }) => [id, status]))).toEqual({
      "machine.memlock": "note",
      "machine.descriptors": "note",
      "machine.ptrace": "ok",
      "machine.shm": "ok",
      "machine.rdma": "note",
      "machine.accelerators": "note",
    });
  });

  test.each<[string, Host, string, string, text?: string]>([
    [
      "N5: 64 file descriptors, with the limit",
      openFiles("64"),
      "descriptors",
      "warn",
      '"limit":64',
    ],
    [
      "N5: 64 file descriptors, with those needed",
      openFiles("64"),
      "descriptors",
      "warn",
      "needs 40",
    ],
    ["N5: 1024 file descriptors", openFiles("1024"), "descriptors", "ok"],
    ["N5: unlimited file descriptors", openFiles("unlimited"), "descriptors", "ok"],
    [
      "N10: shared memory that cannot be written is not told to be enlarged",
      machine({}, { writable: () => false }),
      "shm",
      "warn",
      "UCX_TLS=^posix",
    ],
    [
      "Docker's shared memory",
      machine({}, { space: space(64 << 20) }),
      "shm",
      "warn",
      "--shm-size",
    ],
    ["no shared memory", machine({}, { space: () => undefined }), "shm", "warn"],
    [
      "a limit on locked memory with RDMA",
      machine({ ...RDMA, ...limits("65536") }),
      "memlock",
      "warn",
      "64 KiB",
    ],
    [
      "no limit on locked memory with RDMA",
      machine({ ...RDMA, ...limits("unlimited") }),
      "memlock",
      "ok",
    ],
    ["ptrace scope 0", ptrace("0", "0000000000000000"), "ptrace", "ok"],
    ["ptrace scope 1", ptrace("1", "0000000000000000"), "ptrace", "warn"],
    ["ptrace scope 1 with the capability", ptrace("1", "0000000000080000"), "ptrace", "ok"],
    ["ptrace scope 2 with all capabilities", ptrace("2", "000001ffffffffff"), "ptrace", "ok"],
    ["ptrace scope 3 with all capabilities", ptrace("3", "000001ffffffffff"), "ptrace", "warn"],
    ["EFA without LIBFABRIC", machine(EFA), "efa", "warn", "LIBFABRIC"],
    ["an RDMA device", machine(RDMA), "rdma.mlx5_0", "ok", "Ethernet"],
    [
      "an RDMA device that is down",
      machine({ ...RDMA, [PORT]: "1: DOWN" }),
      "rdma.mlx5_0",
      "warn",
      "DOWN",
    ],
    [
      "an RDMA device that the container cannot open",
      machine(RDMA, { writable: (path) => !path.startsWith("/dev/infiniband") }),
      "rdma.mlx5_0",
      "warn",
      "--device",
    ],
  ])("%s", (_, host, id, status, text = "") => {
    const check = find(host, id);
    expect(check?.status).toBe(status);
    expect(JSON.stringify(check)).toContain(text);
  });

  test("nothing is said of EFA with LIBFABRIC, or without EFA", () => {
    expect(find(machine(EFA), "efa", "LIBFABRIC")).toBeUndefined();
    expect(find(machine(RDMA), "efa")).toBeUndefined();
  });
});
