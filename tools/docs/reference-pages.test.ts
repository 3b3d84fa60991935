import { readdirSync, readFileSync } from "node:fs";
import { join } from "node:path";
import { transferConfigJsonSchema } from "@kv/connector";
import { KV_ERROR_CODES } from "@kv/interface";
import { VLLM_VERSIONS } from "@kv/protocol";
import { expect, test } from "vitest";
import type { PairReport } from "../../packages/kv-plan/src/report/report.js";
import { captured } from "../../packages/kv-plan/test/captured-run.js";
import { root, sourceFiles } from "../repository/source-files.js";
import { withMade } from "./page-parts.js";

// Tables of pages that are made from what the code decides.
// `npx vitest run tools/docs/reference-pages.test.ts -u` writes them again.
const read = (path: string) => readFileSync(join(root, path), "utf8");

interface Schema {
  readonly description?: string;
  readonly default?: unknown;
  readonly enum?: readonly string[];
  readonly properties?: Readonly<Record<string, Schema>>;
  readonly anyOf?: readonly Schema[];
}

/** A row for each property of a schema. */
function settingsTable({ properties = {} }: Schema): string[][] {
  return [
    ["key", "default", "meaning"],
    ...Object.entries(properties).map(([name, { description = "", enum: choices, ...rest }]) => [
      `\`${name}\``,
      rest.default === undefined ? "none" : `\`${String(rest.default)}\``,
      choices === undefined
        ? description
        : `${description} One of ${choices.map((one) => `\`${one}\``).join(", ")}.`,
    ]),
  ];
}

test("docs/configuration.md has each key of kv_transfer_config", async () => {
  const schema = transferConfigJsonSchema() as Schema;
  const extra = schema.properties?.["kv_connector_extra_config"]?.anyOf?.[0] ?? {};
  expect(Object.keys(extra.properties ?? {})).toContain("kv_lease_duration");
  const page = withMade(read("docs/configuration.md"), "kv_transfer_config", settingsTable(schema));
  await expect(
    withMade(page, "kv_connector_extra_config", settingsTable(extra)),
  ).toMatchFileSnapshot(join(root, "docs/configuration.md"));
});

test("docs/configuration.md has each variable that the packages read, and no other", () => {
  const named = /\b(?:KV_N|VLLM_NIXL_|OTEL_|NIXL_(?:BACKEND|PREFIX))[A-Z_]*\b/g;
  const source = sourceFiles(root, ["packages"])
    .filter((path) => path.includes("/src/"))
    .map(read)
    .join("\n");
  const isVariable = (name: string) =>
    !(KV_ERROR_CODES as readonly string[]).includes(name) && !name.endsWith("_");
  const used = new Set(Array.from(source.matchAll(named), ([name]) => name).filter(isVariable));
  const listed = new Set(
    Array.from(
      read("docs/configuration.md").matchAll(/`([A-Z]+_[A-Z_]+)`/g),
      ([, name = ""]) => name,
    ).filter(isVariable),
  );
  expect([...listed].toSorted()).toEqual([...used].toSorted());
});

test("docs/compatibility.md has each version of vLLM that is described", async () => {
  const rows = VLLM_VERSIONS.map(({ version, connectorVersion, support, mixesUpSmallerBlocks }) => [
    version,
    String(connectorVersion),
    "yes",
    support === "transfers"
      ? "yes, [live tests](vllm-versions.md#pairs)"
      : "no: `kv-peer` says what to upgrade",
    mixesUpSmallerBlocks === true ? "a D mixes up blocks from a P with smaller ones; refused" : "",
  ]);
  const table = [
    ["vLLM", "connector version", "handshake is read", "KV is transferred", ""],
    ...rows,
  ];
  await expect(withMade(read("docs/compatibility.md"), "versions", table)).toMatchFileSnapshot(
    join(root, "docs/compatibility.md"),
  );
});

/** A model of each kind of cache. */
const MODELS = [
  "llama-3.1-70b.json",
  "gemma-3-1b.json",
  "deepseek-v3.json",
  "deepseek-v4-flash.json",
  "nemotron-3-nano-30b.json",
  "qwen3.5-35b-a3b.json",
] as const;

/** How the two sides differ, and the flags of `kv-plan` for it. */
const PAIRS = {
  "equal, TP 2": ["--tp", "2"],
  "TP 2 → 1": ["--tp", "2", "--tp", "1"],
  "TP 1 → 2": ["--tp", "1", "--tp", "2"],
  "blocks 16 → 32": ["--block-size", "16", "--block-size", "32"],
  "blocks 32 → 16": ["--block-size", "32", "--block-size", "16"],
  "HND → NHD, permuted": ["--layout", "HND", "--layout", "NHD", "--permute"],
  "P has 2 stages": ["--pp", "2"],
} as const;

test("docs/compatibility.md says of each model and pair what the planner says", {
  timeout: 240_000,
}, async () => {
  const reasons: string[] = [];
  const cell = async (model: string, flags: readonly string[]) => {
    const config = join(root, "packages/kv-plan/models", model);
    const { stdout, stderr } = await captured(
      "--config",
      config,
      "--tokens",
      "64",
      ...flags,
      "--json",
    );
    const found =
      stderr === ""
        ? (JSON.parse(stdout) as PairReport)
        : { outcome: "refused" as const, reason: stderr };
    if (found.outcome === "planned") return found.refusedByVllm.length === 0 ? "yes" : "@kv D";
    const reason = found.reason
      .trim()
      .replace(/^kv-plan: [\w.-]+: | \[KV_\w+\]$/g, "")
      .replaceAll("|", "/")
      .replace(/[<>]/g, (character) => `&#${character.charCodeAt(0)};`);
    if (!reasons.includes(reason)) reasons.push(reason);
    return `no [${reasons.indexOf(reason) + 1}](#reasons)`;
  };
  const rows: string[][] = [["model", ...Object.keys(PAIRS)]];
  for (const model of MODELS) {
    const cells: string[] = [];
    for (const flags of Object.values(PAIRS)) cells.push(await cell(model, flags));
    rows.push([model.replace(".json", ""), ...cells]);
  }
  expect(rows.flat().filter((text) => text === "yes").length).toBeGreaterThan(15);
  const page = withMade(read("docs/compatibility.md"), "pairs", rows);
  await expect(
    withMade(page, "reasons", [
      ["", "why not"],
      ...reasons.map((reason, i) => [String(i + 1), reason]),
    ]),
  ).toMatchFileSnapshot(join(root, "docs/compatibility.md"));
});

test("docs/migration.md names members that the contracts have", () => {
  const contracts = readdirSync(join(root, "packages/interface/src"))
    .map((name) => read(`packages/interface/src/${name}`))
    .join("\n");
  const rows = read("docs/migration.md").matchAll(
    /^\| `[a-z_]+(?:\([\w, ]+\))?`.*? \| (`.*`.*) \|$/gm,
  );
  const names = Array.from(rows, ([, here = ""]) =>
    Array.from(here.matchAll(/`(\w+)`/g), ([, name = ""]) => name),
  ).flat();
  expect(names.length).toBeGreaterThan(15);
  expect(names.filter((name) => !new RegExp(`\\b${name}\\??[(:]`).test(contracts))).toEqual([]);
});
