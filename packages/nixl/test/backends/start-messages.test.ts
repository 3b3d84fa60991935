import type * as fs from "node:fs";
import { nixlTransport } from "@kv/nixl";
import { FAKE_NIXL, fakeMissing } from "@kv/testing/nixl/fake-nixl";
import { recordedLog } from "@kv/testing/recorded-log";
import { afterEach, describe, expect, test, vi } from "vitest";

const SYSFS = "/sys/class/infiniband";
/** The fabric devices of the host, by name, and their drivers. */
const devices = vi.hoisted(() => new Map<string, string>());
vi.mock("node:fs", async (original) => {
  const real = await original<typeof fs>();
  return {
    ...real,
    readdirSync: (path: string, ...rest: never[]) =>
      path === SYSFS ? [...devices.keys()] : real.readdirSync(path, ...rest),
    readlinkSync: (path: string, ...rest: never[]) => {
      const driver = devices.get(/^\/sys\/class\/infiniband\/([^/]+)\//.exec(path)?.[1] ?? "");
      return driver === undefined ? real.readlinkSync(path, ...rest) : `drivers/${driver}`;
    },
  };
});

afterEach(() => {
  vi.unstubAllEnvs();
  devices.clear();
});

/** What a transport logs when its first two agents are created, with these variables. */
async function logged(
  variables: Readonly<Record<string, string>> = {},
  backends?: readonly string[],
) {
  for (const [name, value] of Object.entries(variables)) vi.stubEnv(name, value);
  const { log, logged: of } = recordedLog();
  await using transport = nixlTransport({ library: FAKE_NIXL, log, backends });
  await transport.createAgent();
  await transport.createAgent();
  return of;
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
    expect(of("nixl-backends")).toMatchObject([{ backends: "UCX", variables }]);
    expect(of("nixl-backends")[0]?.variables).not.toHaveProperty("NCCL_DEBUG");
  });

  test.each([
    ["NCCL_IB_HCA", "mlx5_0", {}, "the default"],
    ["NCCL_SOCKET_IFNAME", "eth0", {}, "the default"],
    ["VLLM_NIXL_BACKEND", "LIBFABRIC", { NIXL_BACKEND: "UCX" }, "NIXL_BACKEND"],
  ])("warns once that %s=%s has no effect, and says what won", async (name, value, others, by) => {
    const of = await logged({ [name]: value, ...others });
    const unused = of("nixl-variable-unused").filter((fields) => fields.name === name);
    expect(unused).toEqual([{ name, value, won: `UCX from ${by}`, why: expect.any(String) }]);
  });

  test("UCX on a host with EFA alone: one warning with the devices and the remedy", async () => {
    const warned = async (...backends: string[]) => (await logged({}, backends))("nixl-ucx-on-efa");
    expect(await warned("UCX")).toEqual([]);
    devices.set("rdmap0", "efa").set("rdmap1", "efa");
    const warning = { devices: ["rdmap0", "rdmap1"], remedy: "NIXL_BACKEND=LIBFABRIC" };
    expect(await warned("UCX")).toMatchObject([warning]);
    expect(await warned("LIBFABRIC", "UCX")).toMatchObject([warning]);
    expect(await warned("LIBFABRIC")).toEqual([]);
    devices.set("mlx5_0", "mlx5_core");
    expect(await warned("UCX")).toEqual([]);
  });
});
