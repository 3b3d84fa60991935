import { readdirSync, readFileSync } from "node:fs";
import { join } from "node:path";
import { fileURLToPath } from "node:url";
import { KvError } from "@kv/interface";
import { describe, expect, test } from "vitest";
import { modelOfConfig } from "../../packages/kv-plan/src/input/model-source.js";
import { pairOfModels } from "../../packages/kv-plan/src/input/pair-from-model.js";
import { ARCHITECTURES } from "../../packages/kv-plan/src/model/architectures.js";
import { parsePythonJson } from "../../packages/kv-plan/src/model/config-fields.js";
import { type CacheSettings, modelCaches } from "../../packages/kv-plan/src/model/model-caches.js";
import { analysePair } from "../../packages/kv-plan/src/report/analyse-pair.js";
import { POSTING_COSTS, postingOf } from "../../packages/kv-plan/src/report/posting.js";
import type { Run } from "../bench/record.js";
import { readCases } from "./changed-config.js";
import { architecturesPage } from "./family-table.js";
import { failuresOf, judgeModel } from "./models.js";
import type { ModelLine } from "./vector-file.js";
import { readVectors } from "./vector-file.js";

const root = fileURLToPath(new URL("../..", import.meta.url));
const file = fileURLToPath(new URL("fixtures/models.jsonl.gz", import.meta.url));
const cases = readVectors(file, []).flatMap(({ model, config }) =>
  model === undefined ? [] : [{ model, config }],
);
const configOf = (name: string) =>
  cases.find(({ model }) => model.config === name)?.config as Readonly<Record<string, unknown>>;

describe("field.md 2: the caches of published configs are vLLM's own", () => {
  const judged = cases.map(({ model, config }) => ({
    model,
    outcome: judgeModel(model, file, config),
  }));

  test("each case is equal, or refused", () => {
    const failed = judged.flatMap(({ model, outcome }) =>
      outcome.kind === "failed"
        ? [`${model.config} TP ${model.tp} ${model.kv_cache_dtype}: ${outcome.reason}`]
        : [],
    );
    expect(failed).toEqual([]);
  });

  test("what vLLM serves is equal in more than nine of ten cases, and what it refuses is refused", () => {
    const served = judged.filter(({ model }) => model.error === undefined);
    const refused = served.filter(
      ({ outcome }) => outcome.kind === "passed" && outcome.refused !== undefined,
    );
    expect(cases.length).toBeGreaterThan(650);
    expect(refused.length).toBeLessThan(served.length / 10);
    // BERT has no cache. Of the others vLLM was asked with too few values or TP sizes.
    expect([...new Set(refused.map(({ model }) => model["architecture"]))].sort()).toEqual([
      "BertModel",
      "GPTBigCodeForCausalLM",
      "Lfm2VlForConditionalGeneration",
      "PhiForCausalLM",
    ]);
  });

  test("a line that says otherwise is found out, by each of its fields", () => {
    const line = cases.find(({ model }) => model.config.includes("Gemma-4-26B"));
    if (line === undefined) return expect.fail("the case is missing");
    const changed = (change: (line: Record<string, unknown>) => void) => {
      const copy = structuredClone(line.model) as Record<string, unknown>;
      change(copy);
      return judgeModel(copy as ModelLine, file, line.config).kind;
    };
    const specs = (copy: Record<string, unknown>) => copy["specs"] as Record<string, unknown>[];
    expect(changed(() => {})).toBe("passed");
    for (const field of [
      "num_kv_heads",
      "head_size",
      "head_size_v",
      "block_size",
      "page_size_bytes",
    ])
      expect([
        field,
        changed((copy) => Object.assign(specs(copy)[0] ?? {}, { [field]: 7 })),
      ]).toEqual([field, "failed"]);
    expect(changed((copy) => (copy["groups"] as unknown[]).pop())).toBe("failed");
    expect(changed((copy) => Object.assign(copy, { resolved_dtype: "auto" }))).toBe("failed");
    expect(changed((copy) => Object.assign(copy, { num_blocks_in_64_TiB: 1 }))).toBe("failed");
  });
});

describe("issue 69: the caches of changed configurations are vLLM's own, or are refused", () => {
  const fixture = (name: string) => fileURLToPath(new URL(`fixtures/${name}`, import.meta.url));
  const {
    facts,
    bases,
    cases: changed,
  } = readCases(fixture("architectures.jsonl.gz"), fixture("changed-configs.jsonl.gz"));

  // All of them: models.long.test.ts.
  test("each case of every tenth is equal, or refused", () => {
    const sample = changed.filter((_, index) => index % 10 === 0);
    expect(sample.length).toBeGreaterThan(400);
    expect(failuresOf(sample)).toEqual([]);
  });

  test("published files, ones with one field changed, and class defaults too", () => {
    const more = fixture("models-more.jsonl.gz");
    const failed = readVectors(more, []).flatMap(({ model, config }) => {
      const outcome = model && judgeModel(model, more, config);
      return outcome?.kind === "failed" ? [`${model?.config}: ${outcome.reason}`] : [];
    });
    expect(failed).toEqual([]);
  });

  test.each([
    ["text", 0.95],
    ["multimodal", 0.85],
  ])("of the %s architectures that vLLM builds, most are planned", (kind, share) => {
    const built = [...bases.values()].flatMap(({ meta, kind: own, error }) =>
      own === kind && error === undefined ? [meta] : [],
    );
    const planned = built.filter((name) => name in ARCHITECTURES.architectures);
    expect(built.length).toBeGreaterThan(75);
    expect(planned.length / built.length).toBeGreaterThan(share);
  });

  test("what the table has is what the release has", () => {
    const { architectures, refused, release } = ARCHITECTURES;
    expect(release).toBe(facts.release);
    expect(
      Object.keys(facts.architectures).filter(
        (name) => !(name in architectures) && !(name in refused),
      ),
    ).toEqual([]);
  });

  test("attention that is not causal, a null and another value are refused by name", () => {
    const llama = configOf("meta-llama--Meta-Llama-3.1-405B.json");
    expect(refusal({ ...llama, is_causal: false }).message).toMatch(/is_causal is false/);
    const published = (name: string) =>
      JSON.parse(
        readFileSync(join(root, `packages/kv-plan/models/${name}.json`), "utf8"),
      ) as object;
    const qwen = published("qwen3-0.6b");
    expect(refusal({ ...qwen, head_dim: null }).message).toMatch(/head_dim is null/);
    const fewHeads = { ...published("gpt-oss-20b"), num_key_value_heads: 4 };
    expect(refusal(fewHeads, { tpSize: 8 }).message).toMatch(/4 KV heads cannot be split/);
    expect(refusal({ ...qwen, num_kv_heads: 4 }).message).toMatch(/another field says/);
    const method = { quant_method: "fbgemm_fp8" };
    expect(refusal({ ...llama, quantization_config: method }).message).toMatch(/fbgemm_fp8/);
  });
});

function refusal(
  config: unknown,
  settings: CacheSettings = { tpSize: 1 },
): { code: string; message: string } {
  try {
    modelCaches("model", config, settings);
  } catch (error) {
    if (KvError.is(error)) return { code: error.code, message: error.message };
    throw error;
  }
  return expect.fail("nothing was refused");
}

describe("issue 69: a draft beside its target", () => {
  const fixture = (name: string) => fileURLToPath(new URL(`fixtures/${name}`, import.meta.url));
  const answers = readCases(fixture("architectures.jsonl.gz"), fixture("drafts.jsonl.gz"));
  const beside = answers.cases.filter(({ line }) => line.draft !== undefined);

  test("each answer of vLLM is equal, or refused by name", () => {
    expect(failuresOf(beside)).toEqual([]);
    const equal = beside.filter(({ line, config }) => {
      const outcome = judgeModel(line, "", config);
      return outcome.kind === "passed" && outcome.refused === undefined;
    });
    expect(equal.length).toBeGreaterThan(100);
  });

  test.each([
    [
      "another head",
      { architectures: ["MedusaModel"] },
      1,
      /architecture MedusaModel is not known/,
    ],
    ["an empty file", {}, 1, /architecture that its file lacks is not known/],
    ["a target without MTP", undefined, 1, /LlamaForCausalLM with a draft by the method mtp/],
  ])("%s is refused by name", (_, config, tokens, message) => {
    const llama = configOf("meta-llama--Meta-Llama-3.1-405B.json");
    expect(refusal(llama, { tpSize: 1, draft: { config, tokens } }).message).toMatch(message);
  });

  test("tokens that its layers do not divide are refused, as vLLM does", () => {
    const glm = answers.bases.get("Glm4MoeForCausalLM")?.base;
    const config = { ...glm, num_nextn_predict_layers: 2 };
    const found = refusal(config, { tpSize: 1, draft: { tokens: 3 } });
    expect(found.message).toMatch(/3 draft tokens are no multiple of the 2 layers/);
  });
});

describe("field.md 2: what is not understood is refused by name", () => {
  const llama = configOf("meta-llama--Meta-Llama-3.1-405B.json");

  test.each<[string, unknown]>([
    ["attn_layer_period", 8],
    ["linear_num_value_heads", 32],
    ["mamba_d_state", 128],
    ["ssm_state_size", 128],
    ["full_attention_interval", 4],
    ["hybrid_override_pattern", "M*"],
    ["attention_chunk_size", 8192],
    ["num_kv_shared_layers", 10],
    ["block_configs", [{ attention: { no_op: true } }]],
    ["index_topk", 2048],
    ["layers_block_type", ["mamba"]],
    ["swa_num_key_value_heads", 8],
    ["sparse_attention_config", { sparse_index_dim: 128 }],
    ["compress_ratios", [4]],
    ["num_global_key_value_heads", 2],
    ["kv_lora_rank", 512],
    ["cross_attention_layers", [3]],
    ["conv_L_cache", 3],
  ])("%s in a dense model", (field, value) => {
    const found = refusal({ ...llama, [field]: value });
    expect(found.code).toBe("KV_PLAN_UNSUPPORTED");
    expect(found.message).toContain(field);
    expect(found.message).toContain("LlamaForCausalLM");
    // Null, false and empty values switch a feature off.
    modelCaches("model", { ...llama, [field]: null }, { tpSize: 1 });
  });

  test("a field within MiniMax M3's sparse_attention_config", () => {
    const published = configOf("nvidia--MiniMax-M3-NVFP4.json");
    const text = published["text_config"] as { sparse_attention_config: object };
    const sparse_attention_config = { ...text.sparse_attention_config, sparse_index_interval: 2 };
    const found = refusal({ ...published, text_config: { ...text, sparse_attention_config } });
    expect(found.code).toBe("KV_PLAN_UNSUPPORTED");
    expect(found.message).toContain(
      "text_config.sparse_attention_config.sparse_index_interval (2)",
    );
  });

  const named = (name: string) => ({ ...llama, architectures: [name] });
  const v4 = configOf("deepseek-ai--DeepSeek-V4-Flash.json");
  test.each<[string, unknown, RegExp, tpSize?: number]>([
    ["an unknown architecture", named("NewForCausalLM"), /NewForCausalLM/],
    [
      "an architecture that vLLM took out",
      named("BambaForCausalLM"),
      /does not serve BambaForCausalLM; 0\.23\.0/,
    ],
    ["no architecture", { ...llama, architectures: undefined }, /architectures is missing/],
    [
      "a model_type that vLLM cannot load",
      { ...v4, model_type: "deepseek_ref" },
      /model_type is "deepseek_ref"; vLLM 0\.33 loads DeepSeek V4 as deepseek_v4/,
    ],
    [
      "a model without a KV cache",
      configOf("Snowflake--snowflake-arctic-embed-m.json"),
      /no KV cache/,
    ],
    [
      "an encoder-decoder",
      { architectures: ["T5ForConditionalGeneration"], is_encoder_decoder: true },
      /is an encoder-decoder/,
    ],
    [
      "KV heads that a TP size does not divide (C9)",
      configOf("microsoft--phi-4.json"),
      /10 KV heads cannot be split over TP size 4/,
      4,
    ],
    [
      "attention heads that a TP size does not divide (C9)",
      configOf("Qwen--Qwen2.5-7B-Instruct.json"),
      /28 attention heads cannot be split over TP size 8/,
      8,
    ],
  ])("%s", (_, config, message, tpSize = 1) => {
    expect(refusal(config, { tpSize }).message).toMatch(message);
  });
});

test("field.md 2: JSON as Python writes it is read", () => {
  expect(
    parsePythonJson('{"a": Infinity, "b": [-Infinity, NaN, 1], "c": "NaN \\" Infinity"}'),
  ).toEqual({
    a: null,
    b: [null, null, 1],
    c: 'NaN " Infinity',
  });
  expect(() => parsePythonJson('{"a": Infinit}')).toThrow(SyntaxError);
});

describe("field.md 2: the known models of kv-plan's page are published files", () => {
  const page = readFileSync(join(root, "docs/kv-plan.md"), "utf8");
  const rows = JSON.parse(
    readFileSync(join(root, "tools/conformance/published-models.json"), "utf8"),
  ) as readonly Readonly<Record<"name" | "published" | "source" | "how", string>>[];
  const folder = join(root, "packages/kv-plan/models");
  const read = (name: string) =>
    parsePythonJson(readFileSync(join(folder, `${name}.json`), "utf8"));

  test("each is named, with the commit of the copy", () => {
    expect(rows.map(({ name }) => `${name}.json`).sort()).toEqual(readdirSync(folder).sort());
    expect(rows.filter(({ name }) => !page.includes(`\`${name}\``))).toEqual([]);
    for (const { name, source } of rows) expect(source, name).toMatch(/\/blob\/[0-9a-f]{40}\//);
  });

  test.each(rows.filter(({ how }) => !how.startsWith("excerpt")))(
    "$name",
    ({ name, published }) => {
      const file = `${published.replace("/", "--")}.json`;
      expect(read(name)).toMatchObject(withoutEmpty(configOf(file)));
    },
  );

  test("vLLM serves an excerpt as it serves the whole file, as far as one is here", () => {
    const caches = (config: unknown) => {
      const { layers, groups, numKvHeads } = modelCaches("model", config, { tpSize: 1 });
      return { layers, groups, numKvHeads };
    };
    expect(caches({ ...(read("deepseek-v3") as object) })).toEqual(
      caches({ ...configOf("deepseek-ai--DeepSeek-R1.json"), quantization_config: undefined }),
    );
  });
});

/** Fields that the fixture leaves out are empty objects in it. */
function withoutEmpty(config: Readonly<Record<string, unknown>>): object {
  const { quantization_config: _, ...fields } = config;
  return fields;
}

// `npx vitest run tools/conformance/models.test.ts -u` writes the page again.
test("docs/architectures.md has each architecture of the release", async () => {
  await expect(architecturesPage()).toMatchFileSnapshot(join(root, "docs/architectures.md"));
});

const NO_FLAGS = {
  pp: [],
  blockSize: [],
  kernelBlockSize: [],
  layout: [],
  backend: [],
  numBlocks: [],
};

/**
 * GLM-5.3 as the thread of vllm#55434 serves it: GLM-5.2's layers, and one of multi-token
 * prediction with an indexer of its own.
 */
function withDraftLayer(config: Readonly<Record<string, unknown>>): object {
  const longer = (field: string, last: string) => [...(config[field] as string[]), last];
  return {
    ...config,
    num_hidden_layers: 79,
    indexer_types: longer("indexer_types", "full"),
    layer_types: longer("layer_types", "deepseek_sparse_attention"),
    mlp_layer_types: longer("mlp_layer_types", "sparse"),
  };
}

describe("vllm#55434: 112,000 descriptors for one request", () => {
  const blocks = 1109;
  const model = modelOfConfig("glm", withDraftLayer(configOf("nvidia--GLM-5.2-NVFP4.json")));
  const pairWith = (flags: object) =>
    pairOfModels([model, model], { ...NO_FLAGS, tp: [1], blockSize: [64], ...flags });

  test("its 101 regions and blocks of 64 tokens give them, and pools in order merge each region", () => {
    const pair = pairWith({});
    expect(pair.decode[0]?.regions).toHaveLength(101);
    const found = postingOf(pair, 64 * blocks);
    expect(found).toMatchObject({ descriptors: 112_009, merged: 101 });
    expect(found.mergedByPool).toEqual({
      consecutive: 101,
      fragmented: 101 * Math.ceil(blocks / 4),
    });
    expect(found.estimates.map(({ scatteredMs }) => Math.round(scatteredMs))).toEqual([157, 269]);
  });

  test("the layout that is named first has a descriptor for each block, and a plan says so too", () => {
    const [first] = postingOf(pairWith({}), 64 * blocks).fewer;
    expect(first).toEqual({ change: "--layout BLHNC", descriptors: blocks, merged: 1 });
    expect(postingOf(pairWith({ layout: ["BLHNC"] }), 64 * blocks)).toMatchObject({
      descriptors: blocks,
      merged: 1,
      mergedByPool: { fragmented: Math.ceil(blocks / 4) },
    });
  });
});

test("nixl#1514: the costs of posting are those that were measured", () => {
  const [ucx, libfabric] = POSTING_COSTS;
  expect(18_880 * libfabric.microsecondsEach).toBeCloseTo(46_000, -3.4);
  const records = JSON.parse(readFileSync(join(root, "docs/bench/growth.json"), "utf8")) as Run[];
  const row = records
    .flatMap(({ rows }) => rows)
    .find(({ what }) => what.startsWith("NIXL: one READ of scattered descriptors;"));
  const [, costs = ""] = /^([\d., ]+) us per descriptor/.exec(row?.ours ?? "") ?? [];
  const largest = Number(costs.split(", ").at(-1));
  expect(ucx.microsecondsEach / largest).toBeGreaterThan(0.5);
  expect(ucx.microsecondsEach / largest).toBeLessThan(2);
});

describe("field.md 2: a pair of each family is planned and proven, states and shared regions too", () => {
  const byFamily = new Map<string, { name: string; config: unknown }>();
  for (const { model, config } of cases) {
    if (model.error !== undefined || model.tp !== 1) continue;
    try {
      const { family, notHandedOver } = modelCaches(model.config, config, { tpSize: 1 });
      if (notHandedOver === undefined && !byFamily.has(family))
        byFamily.set(family, { name: model.config, config });
    } catch {
      // Refused: without a pair.
    }
  }

  test.each([...byFamily])("%s", (_family, { name, config }) => {
    const model = modelOfConfig(name, config);
    const pair = pairOfModels([model, model], { ...NO_FLAGS, tp: [1], numBlocks: [1200] });
    const report = analysePair(pair, {
      numTokens: 1000,
      computedBlocks: 0,
      pool: "consecutive",
      bandwidthGBps: 25,
      conversions: [],
      masksUncovered: false,
      form: undefined,
    });
    if (report.outcome !== "planned") return expect.fail(report.reason);
    expect(report.proof).toMatchObject({ proven: true });
    expect(report.plannedFrom).toContain("vLLM 0.33's rules for");
    expect(report.prefill.caches?.length).toBeGreaterThan(0);
  });
});
