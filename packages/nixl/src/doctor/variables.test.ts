import { expect, test } from "vitest";
import { variableChecks } from "./variables.js";

const check = (environment: Record<string, string>, name: string, backends?: readonly string[]) =>
  variableChecks(environment, backends === undefined ? {} : { backends }).find(({ title }) => title === name);

test("nothing that matters is one line", () => {
  expect(variableChecks({ HOME: "/home/x", PATH: "/bin" }, {})).toMatchObject([
    { id: "variables", status: "ok" },
  ]);
});

test("a variable says what it does", () => {
  expect(check({ UCX_TLS: "rc,sm" }, "UCX_TLS")).toMatchObject({
    status: "note",
    found: expect.stringContaining("rc,sm: transports"),
  });
  expect(check({ UCX_SOMETHING: "1" }, "UCX_SOMETHING")).toMatchObject({ status: "note" });
  expect(check({ NIXL_BACKEND: "UCX" }, "NIXL_BACKEND")).toMatchObject({ status: "note" });
});

test("one that was set and lost warns, with what won", () => {
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

test("NCCL's are told apart, a local side channel and memory events are explained", () => {
  expect(check({ NCCL_IB_HCA: "mlx5_0" }, "NCCL_IB_HCA")).toMatchObject({
    found: expect.stringContaining("no effect"),
  });
  expect(check({ VLLM_NIXL_SIDE_CHANNEL_HOST: "localhost" }, "VLLM_NIXL_SIDE_CHANNEL_HOST")).toMatchObject({
    fix: expect.stringContaining("address"),
  });
  expect(check({ UCX_MEM_EVENTS: "y" }, "UCX_MEM_EVENTS")).toMatchObject({ status: "warn" });
  expect(check({ UCX_MEM_EVENTS: "n" }, "UCX_MEM_EVENTS")).toMatchObject({ status: "note" });
});
