import { type Log, silentLog } from "@kv/interface";
import { expect, test } from "vitest";
import { selectBackends, validateAgentBackends } from "./select-backends.js";

function choose(explicit: string[] | undefined, environment: Record<string, string>) {
  const warnings: unknown[] = [];
  const log: Log = {
    ...silentLog,
    warn: (event, fields) => warnings.push([event, fields?.name, fields?.value, fields?.won]),
  };
  const names = selectBackends({ explicit, environment, log }).backends.map((spec) => spec.name);
  return { names, warnings };
}

test("UCX by default, without a warning", () => {
  expect(choose(undefined, {})).toEqual({ names: ["UCX"], warnings: [] });
  expect(choose([], { NIXL_BACKEND: "  " })).toEqual({ names: ["UCX"], warnings: [] });
});

test("the option comes first; a warning names each overridden variable with its value", () => {
  const { names, warnings } = choose(["UCX"], {
    NIXL_BACKEND: "LIBFABRIC",
    VLLM_NIXL_BACKEND: "POSIX",
    FI_PROVIDER: "efa",
  });
  expect(names).toEqual(["UCX"]);
  const won = "UCX from the option backends";
  expect(warnings).toEqual([
    ["nixl-variable-unused", "NIXL_BACKEND", "LIBFABRIC", won],
    ["nixl-variable-unused", "VLLM_NIXL_BACKEND", "POSIX", won],
    ["nixl-variable-unused", "FI_PROVIDER", "efa", won],
  ]);
});

test("NIXL_BACKEND before VLLM_NIXL_BACKEND before the default", () => {
  expect(choose(undefined, { VLLM_NIXL_BACKEND: "LIBFABRIC" })).toEqual({
    names: ["LIBFABRIC"],
    warnings: [],
  });
  const both = choose(undefined, {
    NIXL_BACKEND: "LIBFABRIC, UCX",
    VLLM_NIXL_BACKEND: "UCX",
    FI_PROVIDER: "efa",
  });
  expect(both.names).toEqual(["LIBFABRIC", "UCX"]);
  expect(both.warnings).toEqual([
    ["nixl-variable-unused", "VLLM_NIXL_BACKEND", "UCX", "LIBFABRIC,UCX from NIXL_BACKEND"],
  ]);
});

test("a variable that nothing reads gets a warning, whatever is selected", () => {
  const { warnings } = choose(["LIBFABRIC"], {
    VLLM_NIXL_KVCACHE_BACKEND: "UCX",
    FI_PROVIDER: "efa",
  });
  expect(warnings).toEqual([
    [
      "nixl-variable-unused",
      "VLLM_NIXL_KVCACHE_BACKEND",
      "UCX",
      "LIBFABRIC from the option backends",
    ],
  ]);
});

test("refuses invalid names and empty lists", () => {
  expect(() => choose(["../evil"], {})).toThrow(/not the name of a NIXL backend/);
  expect(() => choose(undefined, { NIXL_BACKEND: "," })).toThrow(/names no backend/);
  expect(() => validateAgentBackends([])).toThrow(/empty/);
  expect(() =>
    validateAgentBackends([{ name: "UCX", parameters: { num_threads: "some" } }]),
  ).toThrow(/"some" instead of a whole number for the parameter num_threads of backend UCX/);
  expect(validateAgentBackends([{ name: "UCX", parameters: { num_threads: "4" } }])).toEqual([
    { name: "UCX", parameters: { num_threads: "4" } },
  ]);
});

test("a variable that only the other backend reads gets a warning, names with a prefix included", () => {
  const names = ({ warnings }: { warnings: unknown[] }) =>
    warnings.map((line) => (line as string[])[1]);
  expect(names(choose(["LIBFABRIC"], { UCX_MEMTYPE_CACHE: "n", UCX_TLS: "tcp" }))).toEqual([
    "UCX_MEMTYPE_CACHE",
    "UCX_TLS",
  ]);
  expect(names(choose(["UCX"], { UCX_MEMTYPE_CACHE: "n" }))).toEqual([]);
  expect(names(choose(["UCX"], { FI_EFA_FORK_SAFE: "1" }))).toEqual(["FI_EFA_FORK_SAFE"]);
  expect(
    names(choose(["UCX", "LIBFABRIC"], { UCX_MEMTYPE_CACHE: "n", FI_PROVIDER: "efa" })),
  ).toEqual([]);
});
