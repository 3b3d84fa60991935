import { readFileSync } from "node:fs";
import { expect, test } from "vitest";
import {
  compatibilityHash,
  explainCompatibility,
  Float64,
  modelForms,
  pythonJson,
  VLLM_VERSIONS,
} from "../index.js";

const cases = readFileSync(
  new URL("../../fixtures/wire/compat_hash.jsonl", import.meta.url),
  "utf8",
)
  .split("\n")
  .filter(Boolean)
  .map((line) => JSON.parse(line) as { factors: Record<string, unknown>; hash: string });
const ours = cases[0]?.factors ?? {};
const changed = (changes: Record<string, unknown>) => ({ ...ours, ...changes });
const explainDigest = (changes: Record<string, unknown>, candidates = {}) =>
  explainCompatibility(ours, { hash: compatibilityHash(changed(changes)) }, candidates);

test("compatibilityHash returns the hashes recorded from vLLM", () => {
  expect(cases.length).toBeGreaterThan(10);
  for (const { factors, hash } of cases) expect(compatibilityHash(factors)).toBe(hash);
});

// Each text is the output of json.dumps(value, sort_keys=True) in CPython 3.12.
test.each([
  [{ b: [1, "x", null, true], a: {} }, '{"a": {}, "b": [1, "x", null, true]}'],
  [
    { "\u{1f600}": 1, "\uffff": 2, é: "\u007f\u00e9\u{1f600}" },
    '{"\\u00e9": "\\u007f\\u00e9\\ud83d\\ude00", "\\uffff": 2, "\\ud83d\\ude00": 1}',
  ],
  ['"\\\n\t\b\f\r\u0001/', '"\\"\\\\\\n\\t\\b\\f\\r\\u0001/"'],
  [0.1, "0.1"],
  [new Float64(1), "1.0"],
  [new Float64(-0), "-0.0"],
  [new Float64(123456789012345680), "1.2345678901234568e+17"],
  [new Float64(1e16), "1e+16"],
  [new Float64(9999999999999998), "9999999999999998.0"],
  [0.0001, "0.0001"],
  [0.00001, "1e-05"],
  [-1.5e-7, "-1.5e-07"],
  [new Float64(1e22), "1e+22"],
  [new Float64(1e100), "1e+100"],
  [5e-324, "5e-324"],
  [2 ** 53, "9007199254740992"],
  [Number.POSITIVE_INFINITY, "Infinity"],
  [Number.NaN, "NaN"],
])("%j is encoded as by Python's json.dumps", (value, text) => {
  expect(pythonJson(value)).toBe(text);
});

test("equal hashes need no comparison, and factors that the peer sends are compared", () => {
  expect(explainDigest({}).how).toBe("equal");
  const model = changed({ model: "somewhere/else" });
  const compared = explainCompatibility(ours, { hash: compatibilityHash(model), factors: model });
  expect(compared).toMatchObject({ how: "compared", tried: 0 });
  expect(compared.differences).toEqual([
    { factor: "model", ours: ours["model"], theirs: "somewhere/else" },
  ]);
  expect(compared.text).toContain(`model is "${ours["model"]}" here and "somewhere/else" there`);
});

test("factors that do not match the hash sent with them are reported as inconsistent", () => {
  const inconsistent = explainCompatibility(ours, { hash: "0".repeat(64), factors: ours });
  expect(inconsistent.how).toBe("inconsistent");
  expect(inconsistent.text).toContain("0000");
});

test.each([
  [{ vllm_version: "0.33.0", nixl_connector_version: 15 }],
  [{ attn_backend_name: "FLASH_ATTN" }],
  [{ dtype: "torch.bfloat16", cache_dtype: "fp8", transfer_mode: "push" }],
  [{ is_hma_enabled: false }],
  [{ model: "Qwen3-0.6B" }],
])("with only a hash, finds %j and reports it as a guess", (changes) => {
  const guessed = explainDigest(changes);
  expect(guessed.how).toBe("guessed");
  expect(
    Object.fromEntries(guessed.differences.map(({ factor, theirs }) => [factor, theirs])),
  ).toEqual(changes);
  expect(guessed.text).toContain("guessed");
});

test("tries the caller's candidates, and lists the factors that it did not try", () => {
  expect(explainDigest({ model: "/srv/model-a" }, { model: ["/srv/model-a"] }).how).toBe("guessed");
  const unknown = explainDigest({ num_kv_heads: 7777 });
  expect(unknown.how).toBe("unknown");
  expect(unknown.text).toContain("nor of num_kv_heads, head_size, num_hidden_layers");
  expect(unknown.text).toContain("not tried: other values of no factor");
});

test("the search stops after 4000 tries, however many candidates there are", () => {
  const many = { model: Array.from({ length: 10_000 }, (_, i) => `model-${i}`) };
  const unknown = explainDigest({ num_kv_heads: 7777 }, many);
  expect(unknown).toMatchObject({ how: "unknown", tried: 4000 });
  expect(unknown.text).toContain("the search ended");
  expect(unknown.text).toContain(
    "not tried: other values of num_kv_heads, head_size, num_hidden_layers",
  );
});

test("modelForms lists the other names of a model", () => {
  expect(modelForms("/root/.cache/hub/models--Qwen--Qwen3-0.6B/snapshots/abc/")).toContain(
    "Qwen/Qwen3-0.6B",
  );
  expect(modelForms("Qwen/Qwen3-0.6B")).toEqual(["Qwen/Qwen3-0.6B/", "Qwen3-0.6B"]);
});

test.each(VLLM_VERSIONS.filter(({ connectorVersion }) => connectorVersion < 14))(
  "the hash of a peer that runs vLLM $version is explained by its version and its set of factors",
  ({ version }) => {
    const folder = new URL("../../fixtures/wire/versions/", import.meta.url);
    const { factors, compatibility_hash: hash } = JSON.parse(
      readFileSync(new URL(`${version}.json`, folder), "utf8"),
    );
    const newest = {
      ...ours,
      ...factors,
      vllm_version: "0.33.0",
      nixl_connector_version: 15,
      speculative_config: null,
      transfer_mode: "pull",
    };
    delete newest.cross_layers_blocks;
    const explained = explainCompatibility(newest, { hash });
    expect(explained.how).toBe("guessed");
    const changed = explained.differences.map(({ factor }) => factor);
    expect(changed).toEqual(expect.arrayContaining(["nixl_connector_version", "vllm_version"]));
    expect(changed.includes("cross_layers_blocks")).toBe("cross_layers_blocks" in factors);
    // A missing factor is another hash than null.
    expect(changed.includes("speculative_config")).toBe(!("speculative_config" in factors));
    if (!("transfer_mode" in factors))
      expect(explained.text).toContain('transfer_mode is "pull" here and no factor there');
  },
);
