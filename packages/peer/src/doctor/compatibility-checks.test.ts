import {
  compatibilityHash,
  decodeHandshakePayload,
  encodeHandshakePayload,
  speculativeForms,
  VLLM_VERSIONS,
  type VllmVersion,
  vllmWire,
} from "@kv/protocol";
import { describe, expect, test } from "vitest";
import type { Role } from "../checks/report.js";
import { compatibilityChecks } from "./compatibility-checks.js";
import type { ServerFacts } from "./server-facts.js";

type Factors = Readonly<Record<string, unknown>>;

const [MTP] = speculativeForms({ method: "mtp", model: "tiny-qwen3" }, "auto");
const EAGLE = { ...MTP, method: "eagle3", model: "org/tiny-eagle" };
const NEWEST: Factors = {
  attn_backend_name: "CPU_ATTN",
  cache_dtype: "auto",
  cross_layers_blocks: false,
  dtype: "torch.float32",
  head_size: 32,
  is_hma_enabled: true,
  model: "tiny-qwen3",
  num_hidden_layers: 4,
  num_kv_heads: 4,
  speculative_config: null,
  transfer_mode: "pull",
};
/** Another value of each factor, and what the user or the server says of it. */
const OTHERS: readonly [factor: string, value?: unknown, known?: Factors][] = [
  ["attn_backend_name", "FLASHINFER"],
  ["cache_dtype", "nvfp4"],
  ["cache_dtype", "int8_per_token_head"],
  ["cache_dtype", "fp8_e5m2"],
  ["cross_layers_blocks", true],
  ["dtype", "torch.bfloat16"],
  ["head_size", 72],
  ["is_hma_enabled", false],
  ["model", "tiny-qwen3/"],
  ["num_hidden_layers", 61],
  ["num_kv_heads", 12],
  ["speculative_config", MTP],
  [
    "speculative_config",
    EAGLE,
    { speculative_config: { method: "eagle3", model: "org/tiny-eagle" } },
  ],
  ["transfer_mode", "push"],
  ["vllm_version", undefined],
  ["nixl_connector_version", undefined],
];

const factorsOf = (version: VllmVersion): Factors => {
  const names = Object.keys(vllmWire(version)["compatibility hash"]);
  const all = {
    ...NEWEST,
    vllm_version: version.version,
    nixl_connector_version: version.connectorVersion,
  };
  return Object.fromEntries(Object.entries(all).filter(([name]) => names.includes(name)));
};

/** A server that announces its factors, or only their hash, as vLLM does. */
function server(
  role: Role,
  version: VllmVersion,
  factors: Factors,
  announces: boolean,
): ServerFacts {
  const payload = decodeHandshakePayload(
    encodeHandshakePayload({
      compatibilityHash: compatibilityHash(factors),
      agentMetadataBytes: new Uint8Array(),
      ...(announces ? { extension: { factors } } : {}),
      rest: {},
    }),
  );
  return {
    role,
    vllmVersion: version.version,
    model: { id: "tiny-qwen3", root: undefined },
    // Without metadata the hash is not searched for from nothing, which hash-factors.test.ts shows.
    payload,
  };
}

/** What the check of the pair says, where the factors of only one server are known. */
function found(
  version: VllmVersion,
  known: Role,
  factors: Readonly<Record<Role, Factors>>,
  knownFactors: Factors = {},
): string {
  const { checks } = compatibilityChecks(
    server("prefill", version, factors.prefill, known === "prefill"),
    server("decode", version, factors.decode, known === "decode"),
    { knownFactors, tpOf: () => 1 },
  );
  return checks.find(({ id }) => id === "compatibility.pair")?.found ?? "";
}

describe.each(VLLM_VERSIONS)("field.md P4: vLLM $version", (version) => {
  const ours = factorsOf(version);
  const cases = OTHERS.filter(([factor]) => factor in ours);
  test("every factor of the hash has a case", () => {
    expect([...new Set(cases.map(([factor]) => factor))].sort()).toEqual(Object.keys(ours).sort());
  });

  test.each(cases)(
    "vllm#49230: %s is %j at one server alone: the check names it",
    (...[factor, value, known]) => {
      const next = VLLM_VERSIONS.find((each) => each.version !== version.version) ?? version;
      const other = {
        vllm_version: next.version,
        nixl_connector_version: version.connectorVersion + 1,
      };
      const theirs = { ...ours, [factor]: value ?? other[factor as keyof typeof other] };
      const texts = [
        found(version, "prefill", { prefill: ours, decode: theirs }, known),
        found(version, "decode", { prefill: theirs, decode: ours }, known),
      ];
      for (const text of texts) {
        const names = Array.from(
          text.matchAll(/(\w+) is .*? at prefill and /g),
          ([, name]) => name,
        );
        const guessed = Array.from(text.matchAll(/(\w+) is \S+ here and /g), ([, name]) => name);
        expect([...names, ...guessed], text).toEqual([factor]);
      }
    },
  );
});

const [newest] = VLLM_VERSIONS.slice(-1);
if (newest === undefined) throw new Error("no version is described");

test("vllm#55776: two servers that have loaded different commits of one model: the check names the revision", () => {
  const [a, b] = ["a".repeat(40), "b".repeat(40)];
  const next = { version: "0.34.0", connectorVersion: 16, support: "handshake" } as const;
  const ours = {
    ...factorsOf(newest),
    vllm_version: "0.34.0",
    nixl_connector_version: 16,
    code_revision: null,
  };
  const factors = { prefill: { ...ours, revision: b }, decode: { ...ours, revision: a } };
  const text = found(next, "decode", factors, { revision: [a, b] });
  expect(text).toContain(`revision is "${a}" here and "${b}" there`);
});

test.each([
  ["method", "eagle"],
  ["revision", "main"],
  ["parallel_drafting", true],
  ["kv_cache_dtype", "fp8"],
])(
  "vllm#49230: two EAGLE servers that differ in %s: the check names speculative_config",
  (member, value) => {
    const ours = { ...factorsOf(newest), speculative_config: EAGLE };
    const theirs = { ...ours, speculative_config: { ...EAGLE, [member]: value } };
    const known = { speculative_config: { method: "eagle3", model: "org/tiny-eagle" } };
    const text = found(newest, "decode", { prefill: theirs, decode: ours }, known);
    expect(text).toMatch(/speculative_config is /);
  },
);
