import { expect, test } from "vitest";
import { variableChecks } from "./variables.js";

test("one line when no relevant variable is set, and the default of the side channel, which other hosts cannot reach", () => {
  expect(variableChecks({ HOME: "/home/x", PATH: "/bin" }, {})).toMatchObject([
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
  const found = (request: { library?: string }) =>
    variableChecks(environment, request)
      .filter(({ status }) => status === "warn")
      .map((entry) => [entry.title, entry.found, entry.fix]);
  const lost = (name: string, value: string, won: string, by: string) => [
    name,
    `${value}: has no effect: ${by} comes first; used: ${won} from ${by}`,
    `unset ${name}`,
  ];
  expect(found({})).toEqual([lost("NIXL_PREFIX", "/nowhere", "/x/lib.so", "KV_NIXL_LIBRARY")]);
  expect(found({ library: "/y/lib.so" })).toEqual([
    lost("KV_NIXL_LIBRARY", "/x/lib.so", "/y/lib.so", "the option library"),
    lost("NIXL_PREFIX", "/nowhere", "/y/lib.so", "the option library"),
  ]);
});

// The first variable of each row is the one that is checked.
test.each<[string, Record<string, string>, string, text?: string, backends?: string[]]>([
  ["the effect of each variable", { UCX_TLS: "rc,sm" }, "note", "rc,sm: transports"],
  ["the effect of each variable", { UCX_SOMETHING: "1" }, "note"],
  ["the effect of each variable", { NIXL_BACKEND: "UCX" }, "note"],
  ["overridden", { NIXL_BACKEND: "LIBFABRIC" }, "warn", "UCX from the option --backend", ["UCX"]],
  ["overridden", { NIXL_BACKEND: "LIBFABRIC" }, "warn", '"fix":"unset NIXL_BACKEND"', ["UCX"]],
  ["without effect", { FI_PROVIDER: "efa" }, "warn"],
  ["with effect", { FI_PROVIDER: "efa", NIXL_BACKEND: "LIBFABRIC" }, "note"],
  ["without effect", { VLLM_NIXL_KVCACHE_BACKEND: "UCX" }, "warn"],
  ["NCCL's", { NCCL_IB_HCA: "mlx5_0" }, "warn", "no effect"],
  ["a local side channel", { VLLM_NIXL_SIDE_CHANNEL_HOST: "localhost" }, "note", "address"],
  ["UCX's hooks on memory", { UCX_MEM_EVENTS: "y" }, "warn"],
  ["READ of GPUs", { UCX_CUDA_IPC_ENABLE_GET_ZCOPY: "No" }, "warn", "without NVLinks"],
  ["READ of GPUs", { UCX_CUDA_IPC_ENABLE_GET_ZCOPY: "on" }, "note", "by CUDA IPC"],
  ["no hooks on memory", { UCX_MEM_EVENTS: "n" }, "note"],
])("%s: %j gives a %s", (_, environment, status, text = "", backends) => {
  const [name] = Object.keys(environment);
  const check = variableChecks(environment, { backends }).find(({ title }) => title === name);
  expect(check?.status).toBe(status);
  expect(JSON.stringify(check)).toContain(text);
});
