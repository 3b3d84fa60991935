import { expect, test } from "vitest";
import { variableChecks } from "./variables.js";

const check = (environment: Record<string, string>, name: string, backends?: readonly string[]) =>
  variableChecks(environment, backends === undefined ? {} : { backends }).find(
    ({ title }) => title === name,
  );

test("one line when no relevant variable is set", () => {
  expect(variableChecks({ HOME: "/home/x", PATH: "/bin" }, {})[0]).toMatchObject({
    id: "variables",
    status: "ok",
  });
});

test("reports the default of the side channel, which other hosts cannot reach", () => {
  expect(variableChecks({}, {})).toMatchObject([
    { id: "variables", status: "ok" },
    {
      id: "variables.side-channel",
      status: "note",
      found: expect.stringContaining("localhost, by default; peers on other hosts"),
      fix: expect.stringContaining("address"),
    },
  ]);
  const ids = variableChecks({ VLLM_NIXL_SIDE_CHANNEL_HOST: "10.0.0.7" }, {}).map(({ id }) => id);
  expect(ids).toEqual(["variables.VLLM_NIXL_SIDE_CHANNEL_HOST"]);
});

test("an overridden variable that names a library gives a warning with the one that is used", () => {
  const environment = { KV_NIXL_LIBRARY: "/x/lib.so", NIXL_PREFIX: "/nowhere" };
  const found = (library?: string) =>
    variableChecks(environment, library === undefined ? {} : { library })
      .filter(({ status }) => status === "warn")
      .map((entry) => [entry.title, entry.found, entry.fix]);
  const lost = (name: string, value: string, won: string, by: string) => [
    name,
    `${value}: has no effect: ${by} comes first; used: ${won} from ${by}`,
    `unset ${name}`,
  ];
  expect(found()).toEqual([lost("NIXL_PREFIX", "/nowhere", "/x/lib.so", "KV_NIXL_LIBRARY")]);
  expect(found("/y/lib.so")).toEqual([
    lost("KV_NIXL_LIBRARY", "/x/lib.so", "/y/lib.so", "the option library"),
    lost("NIXL_PREFIX", "/nowhere", "/y/lib.so", "the option library"),
  ]);
});

test("reports the effect of each variable", () => {
  expect(check({ UCX_TLS: "rc,sm" }, "UCX_TLS")).toMatchObject({
    status: "note",
    found: expect.stringContaining("rc,sm: transports"),
  });
  expect(check({ UCX_SOMETHING: "1" }, "UCX_SOMETHING")).toMatchObject({ status: "note" });
  expect(check({ NIXL_BACKEND: "UCX" }, "NIXL_BACKEND")).toMatchObject({ status: "note" });
});

test("an overridden variable gives a warning with the setting that is used", () => {
  expect(check({ NIXL_BACKEND: "LIBFABRIC" }, "NIXL_BACKEND", ["UCX"])).toMatchObject({
    status: "warn",
    found: expect.stringContaining("UCX from the option --backend"),
    fix: "unset NIXL_BACKEND",
  });
  expect(check({ FI_PROVIDER: "efa" }, "FI_PROVIDER")).toMatchObject({ status: "warn" });
  expect(check({ FI_PROVIDER: "efa", NIXL_BACKEND: "LIBFABRIC" }, "FI_PROVIDER")).toMatchObject({
    status: "note",
  });
  expect(check({ VLLM_NIXL_KVCACHE_BACKEND: "UCX" }, "VLLM_NIXL_KVCACHE_BACKEND")).toMatchObject({
    status: "warn",
  });
});

test("explains NCCL's variables, a local side channel and UCX_MEM_EVENTS", () => {
  expect(check({ NCCL_IB_HCA: "mlx5_0" }, "NCCL_IB_HCA")).toMatchObject({
    found: expect.stringContaining("no effect"),
  });
  expect(
    check({ VLLM_NIXL_SIDE_CHANNEL_HOST: "localhost" }, "VLLM_NIXL_SIDE_CHANNEL_HOST"),
  ).toMatchObject({
    fix: expect.stringContaining("address"),
  });
  expect(check({ UCX_MEM_EVENTS: "y" }, "UCX_MEM_EVENTS")).toMatchObject({ status: "warn" });
  expect(check({ UCX_MEM_EVENTS: "n" }, "UCX_MEM_EVENTS")).toMatchObject({ status: "note" });
});
