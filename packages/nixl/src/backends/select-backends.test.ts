import { recordedLog } from "@kv/testing/recorded-log";
import { expect, test } from "vitest";
import { selectBackends, validateAgentBackends } from "./select-backends.js";

/** The names that are selected, and the variables that are warned of: name, value and what won. */
function choose(explicit: string[] | undefined, environment: Record<string, string>) {
  const { log, logged } = recordedLog();
  const names = selectBackends({ explicit, environment, log }).backends.map((spec) => spec.name);
  const warnings = logged("nixl-variable-unused").map(({ name, value, won }) => [name, value, won]);
  return { names, warnings };
}

const OPTION = "UCX from the option backends";
test.each<[string, string[] | undefined, Record<string, string>, string[], string[][]]>([
  ["UCX by default, without a warning", undefined, {}, ["UCX"], []],
  ["UCX by default, also for a blank variable", [], { NIXL_BACKEND: "  " }, ["UCX"], []],
  [
    "the option comes first; each overridden variable gets a warning with its value",
    ["UCX"],
    { NIXL_BACKEND: "LIBFABRIC", VLLM_NIXL_BACKEND: "POSIX", FI_PROVIDER: "efa" },
    ["UCX"],
    [
      ["NIXL_BACKEND", "LIBFABRIC", OPTION],
      ["VLLM_NIXL_BACKEND", "POSIX", OPTION],
      ["FI_PROVIDER", "efa", OPTION],
    ],
  ],
  [
    "VLLM_NIXL_BACKEND before the default",
    undefined,
    { VLLM_NIXL_BACKEND: "LIBFABRIC" },
    ["LIBFABRIC"],
    [],
  ],
  [
    "NIXL_BACKEND before VLLM_NIXL_BACKEND before the default",
    undefined,
    { NIXL_BACKEND: "LIBFABRIC, UCX", VLLM_NIXL_BACKEND: "UCX", FI_PROVIDER: "efa" },
    ["LIBFABRIC", "UCX"],
    [["VLLM_NIXL_BACKEND", "UCX", "LIBFABRIC,UCX from NIXL_BACKEND"]],
  ],
  [
    "a variable that nothing reads gets a warning, whatever is selected",
    ["LIBFABRIC"],
    { VLLM_NIXL_KVCACHE_BACKEND: "UCX", FI_PROVIDER: "efa" },
    ["LIBFABRIC"],
    [["VLLM_NIXL_KVCACHE_BACKEND", "UCX", "LIBFABRIC from the option backends"]],
  ],
])("%s", (_, explicit, environment, names, warnings) => {
  expect(choose(explicit, environment)).toEqual({ names, warnings });
});

test.each([
  [["LIBFABRIC"], { UCX_MEMTYPE_CACHE: "n", UCX_TLS: "tcp" }, ["UCX_MEMTYPE_CACHE", "UCX_TLS"]],
  [["UCX"], { UCX_MEMTYPE_CACHE: "n" }, []],
  [["UCX"], { FI_EFA_FORK_SAFE: "1" }, ["FI_EFA_FORK_SAFE"]],
  [["UCX", "LIBFABRIC"], { UCX_MEMTYPE_CACHE: "n", FI_PROVIDER: "efa" }, []],
])(
  "a variable that only the other backend than %j reads gets a warning: %j",
  (explicit, environment, wanted) => {
    expect(choose(explicit, environment).warnings.map(([name]) => name)).toEqual(wanted);
  },
);

test("refuses invalid names and empty lists", () => {
  expect(() => choose(["../evil"], {})).toThrow("not the name of a NIXL backend");
  expect(() => choose(undefined, { NIXL_BACKEND: "," })).toThrow("names no backend");
  expect(() => validateAgentBackends([])).toThrow("empty");
  const threads = (num_threads: string) => [{ name: "UCX", parameters: { num_threads } }];
  expect(() => validateAgentBackends(threads("some"))).toThrow(
    '"some" instead of a whole number for the parameter num_threads of backend UCX',
  );
  expect(validateAgentBackends(threads("4"))).toEqual(threads("4"));
});
