import { expect, test } from "vitest";
import { modeCheck } from "./memory-checks.js";
import { type HostFacts, transportCheck, ucxLimits } from "./transport-check.js";

const measured = (how: string, gigabytesPerSecond = 1) => ({
  lanes: [
    { operation: "READ" as const, range: "0..100", how: "short", lanes: "tcp/eth0" },
    { operation: "READ" as const, range: "101..inf", how, lanes: "" },
  ],
  bytesPerMs: gigabytesPerSecond * 1e6,
});
const NOTHING: HostFacts = { unlimited: undefined, limits: [], sameHost: false, devices: [] };
const look = (how: string, hosts: Partial<HostFacts> = {}) =>
  transportCheck("prefill", {
    backends: ["UCX"],
    used: measured(how),
    hosts: { ...NOTHING, ...hosts },
  });
const device = (efa: boolean, state = "4: ACTIVE") => [
  { name: efa ? "rdmap16" : "mlx5_0", efa, link: "Ethernet", ports: [state] },
];

test.each(["zero-copy rc_mlx5/mlx5_0:1", "zero-copy cma/memory", "zero-copy cuda_ipc/cuda"])(
  "%s is as good as it gets",
  (how) => {
    expect(look(how, { sameHost: true, devices: device(false) })).toMatchObject({
      status: "ok",
      found: `UCX over ${how}`,
    });
  },
);

const text = (part: string): unknown => expect.stringContaining(part);
test.each<[string, Partial<HostFacts>, string, object]>([
  [
    "without an RDMA device is the best",
    {},
    "ok",
    { found: "UCX over zero-copy tcp/eth0; this host has no RDMA device" },
  ],
  ["with a device that is down is the best", { devices: device(false, "1: DOWN") }, "ok", {}],
  [
    "with an RDMA device is a warning that names it",
    { devices: device(false) },
    "warn",
    { found: text("although this host has mlx5_0"), fix: text("UCX_NET_DEVICES") },
  ],
  [
    "with an EFA is a warning that names LIBFABRIC",
    { devices: device(true) },
    "warn",
    { fix: text("LIBFABRIC on both servers") },
  ],
  [
    "to a server on this host is a warning",
    { sameHost: true },
    "warn",
    { found: text("although the server is on this host") },
  ],
])("TCP from this host %s", (_, hosts, status, check) => {
  expect(look("zero-copy tcp/eth0", hosts)).toMatchObject({ status, ...check });
});

test("a better transport without this host's limits is a warning with both rates", () => {
  const limits = ucxLimits({ UCX_TLS: "tcp", UCX_NET_DEVICES: "all", PATH: "x" });
  expect(limits).toEqual(["UCX_TLS=tcp"]);
  const better = { limits, unlimited: measured("zero-copy rc_mlx5/mlx5_0:1", 24) };
  expect(look("zero-copy tcp/eth0", better)).toMatchObject({
    status: "warn",
    found:
      "UCX over zero-copy tcp/eth0; without UCX_TLS=tcp on this host it is zero-copy rc_mlx5/mlx5_0:1 (24.00 GB/s instead of 1.00 GB/s)",
    fix: "unset UCX_TLS on the decode server, or permit that transport",
  });
  // Another device of the same kind has to be faster.
  const device2 = { limits, unlimited: measured("zero-copy tcp/eth1", 1.2) };
  expect(look("zero-copy tcp/eth0", device2).status).toBe("ok");
  expect(
    look("zero-copy tcp/eth0", { limits, unlimited: measured("zero-copy tcp/eth1", 2) }).status,
  ).toBe("warn");
});

test("no lanes, and a server without advice", () => {
  const statusOf = (backend: string, used: ReturnType<typeof measured>) =>
    transportCheck("prefill", { backends: [backend], used }).status;
  expect(statusOf("LIBFABRIC", { lanes: [], bytesPerMs: 1 })).toBe("note");
  expect(statusOf("UCX", measured("zero-copy tcp/lo"))).toBe("ok");
});

const times = (writeMs: number, readMs: number) => ({
  lengthBytes: 1e6,
  movedBytes: 8e6,
  writeMs,
  readMs,
});

test("push is advised when WRITE is at least twice as fast as READ, and pull in the reverse case", () => {
  expect(modeCheck("prefill", "pull", times(1, 1.9))).toMatchObject([{ status: "ok" }]);
  expect(modeCheck("prefill", "pull", times(1, 2))).toMatchObject([
    {
      id: "bytes.prefill-mode",
      status: "warn",
      found: "pull is used; WRITE 8.00 GB/s, READ 4.00 GB/s, from this host",
      fix: "use push: set kv_connector to NixlPushConnector on both servers",
    },
  ]);
  expect(modeCheck("prefill", "push", times(1, 100))).toMatchObject([{ status: "ok" }]);
  expect(modeCheck("prefill", "push", times(2, 1))).toMatchObject([
    { fix: "use pull: set kv_connector to NixlConnector on both servers" },
  ]);
  expect(modeCheck("prefill", "pull", undefined)).toEqual([]);
});
