import type * as fs from "node:fs/promises";
import { type Log, silentLog } from "@kv/interface";
import { nixlTransport } from "@kv/nixl";
import { FAKE_NIXL, fakeMissing } from "@kv/testing/nixl/fake-nixl";
import { afterEach, describe, expect, test, vi } from "vitest";

const SYSFS = "/sys/class/infiniband";
/** The fabric devices of the host, by name, and their drivers. */
const devices = vi.hoisted(() => new Map<string, string>());
vi.mock("node:fs/promises", async (original) => {
  const real = await original<typeof fs>();
  return {
    ...real,
    readdir: (path: string, ...rest: never[]) =>
      path === SYSFS ? Promise.resolve([...devices.keys()]) : real.readdir(path, ...rest),
    readlink: (path: string, ...rest: never[]) => {
      const driver = devices.get(/^\/sys\/class\/infiniband\/([^/]+)\//.exec(path)?.[1] ?? "");
      return driver === undefined
        ? real.readlink(path, ...rest)
        : Promise.resolve(`drivers/${driver}`);
    },
  };
});

afterEach(() => {
  vi.unstubAllEnvs();
  devices.clear();
});

/** What a transport logs when its first two agents are created, with these variables. */
async function logged(variables: Readonly<Record<string, string>>, backends?: readonly string[]) {
  for (const [name, value] of Object.entries(variables)) vi.stubEnv(name, value);
  const lines: [event: string, fields: Readonly<Record<string, unknown>>][] = [];
  const note = (event: string, fields = {}) => void lines.push([event, fields]);
  const log: Log = { ...silentLog, info: note, warn: note };
  const transport = nixlTransport({ library: FAKE_NIXL, log, backends });
  await transport.createAgent();
  await transport.createAgent();
  await transport.close();
  return (event: string) => lines.flatMap(([name, fields]) => (name === event ? [fields] : []));
}

describe.skipIf(fakeMissing)(`the log of the first agent (${fakeMissing ?? "fake found"})`, () => {
  test("has the variables that UCX, libfabric and NIXL read, as they are set", async () => {
    const variables = {
      UCX_TLS: "rc,ud,sm,^cuda_ipc",
      UCX_NET_DEVICES: "mlx5_0:1,mlx5_1:1",
      UCX_MEMTYPE_CACHE: "n",
      UCX_MEMTYPE_REG_WHOLE: "n",
      FI_PROVIDER: "efa",
      NIXL_LOG_LEVEL: "WARN",
    };
    const of = await logged({ ...variables, NCCL_DEBUG: "INFO" });
    expect(of("nixl-backends")).toEqual([expect.objectContaining({ backends: "UCX" })]);
    expect(of("nixl-backends")[0]?.variables).toMatchObject(variables);
    expect(of("nixl-backends")[0]?.variables).not.toHaveProperty("NCCL_DEBUG");
  });

  test.each([
    ["NCCL_IB_HCA", "mlx5_0", {}],
    ["NCCL_SOCKET_IFNAME", "eth0", {}],
    ["VLLM_NIXL_KVCACHE_BACKEND", "LIBFABRIC", {}],
    ["FI_PROVIDER", "efa", {}],
    ["VLLM_NIXL_BACKEND", "LIBFABRIC", { NIXL_BACKEND: "UCX" }],
  ])("warns once that %s=%s has no effect, and says what won", async (name, value, others) => {
    const of = await logged({ [name]: value, ...others });
    const won = expect.stringMatching(/^UCX from (the default|NIXL_BACKEND)$/) as string;
    const why = expect.any(String) as string;
    expect(of("nixl-variable-unused").filter((fields) => fields.name === name)).toEqual([
      { name, value, won, why },
    ]);
  });

  test("warns once of UCX where EFA is the only fabric, and names the remedy", async () => {
    devices.set("rdmap0", "efa").set("rdmap1", "efa");
    const of = await logged({});
    expect(of("nixl-ucx-on-efa")).toMatchObject([
      { devices: ["rdmap0", "rdmap1"], remedy: "NIXL_BACKEND=LIBFABRIC" },
    ]);
    expect((await logged({}, ["LIBFABRIC"]))("nixl-ucx-on-efa")).toEqual([]);
    devices.set("mlx5_0", "mlx5_core");
    expect((await logged({}))("nixl-ucx-on-efa")).toEqual([]);
  });
});
