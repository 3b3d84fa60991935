// Makes kv-plan's table of architectures from vLLM's answers.
// Run: npx tsx tools/vllm/learn-architectures.ts CASES.jsonl GATE.jsonl DRAFTS.jsonl MODELS.jsonl…
// The first three are of cache_cases.py; further files of cache_specs.py, with `configs` beside
// them. Of the gate, the answers to two changed fields stay unseen. `--out` names another table.
// For each architecture it takes the rule that explains most of the answers. A field whose change
// the rule does not explain may only have the values with which it was right; an architecture
// whose plain configuration no rule explains is refused. It prints the table's coverage.
import { existsSync, readFileSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { parseArgs } from "node:util";
import type { KvCacheLayout } from "@kv/interface";
import { KvError } from "@kv/interface";
import {
  ARCHITECTURES,
  DRAFT_METHODS,
  type DraftMethod,
  type LearnedArchitecture,
  RULES,
} from "../../packages/kv-plan/src/model/architectures.js";
import { ConfigFields, parsePythonJson } from "../../packages/kv-plan/src/model/config-fields.js";
import type { AttentionRule } from "../../packages/kv-plan/src/model/families/attention.js";
import { modelCaches } from "../../packages/kv-plan/src/model/model-caches.js";
import { type Base, type Fields, readCases, textOf } from "../conformance/changed-config.js";
import { judgeModel, settingsOf } from "../conformance/models.js";
import { type ModelLine, readVectors } from "../conformance/vector-file.js";

interface Answer {
  readonly line: ModelLine;
  readonly config: Fields;
  /** Fields that differ from the architecture's plain configuration; undefined of a published one. */
  readonly changed: Fields | undefined;
}

const TABLE = fileURLToPath(
  new URL("../../packages/kv-plan/src/model/architectures.json", import.meta.url),
);

const { values: flags, positionals } = parseArgs({
  options: { out: { type: "string", default: TABLE } },
  allowPositionals: true,
});
const [cases = "", gate = "", drafts = "", ...published] = positionals;
const { facts, bases, cases: all } = readCases(cases, gate, drafts);
const asked = all.filter(({ line }) => line.draft === undefined);
const beside = all.filter(({ line }) => line.draft !== undefined);
const answers = new Map<string, Answer[]>([...bases.keys()].map((name) => [name, []]));
for (const answer of asked)
  if (!isHeldOut(answer.changed)) answers.get(answer.line.config)?.push(answer);
for (const file of published.sort()) addPublished(file);

/** Changes of two fields. A list of windows comes with its window. */
function isHeldOut(changed: Fields): boolean {
  const fields = Object.keys(changed);
  return fields.length > (fields[0] === "layer_types" && "sliding_window" in changed ? 2 : 1);
}

function addPublished(file: string): void {
  for (const { model, config } of readVectors(file, [])) {
    if (model === undefined) continue;
    const path = join(dirname(file), "configs", model.config);
    const found = config ?? (existsSync(path) ? parsePythonJson(readFileSync(path, "utf8")) : {});
    const [architecture = ""] = (found as { architectures?: string[] }).architectures ?? [];
    if (!(architecture in facts.architectures)) continue;
    const all = answers.get(architecture) ?? [];
    answers.set(architecture, [
      ...all,
      { line: model, config: found as Fields, changed: undefined },
    ]);
  }
}

Object.assign(ARCHITECTURES, { shapes: facts.shapes, quantizations: facts.quantizations });

/** Candidates, the simplest first. */
function* candidates(plain: Answer, all: readonly Answer[]): Generator<LearnedArchitecture> {
  const names = plain.line["names"] as readonly string[];
  const [layer = ""] = names;
  const windows = all.flatMap(({ line, config }) => {
    const specs = (line["specs"] ?? []) as readonly { sliding_window?: number }[];
    // A default shows only where the configuration has no window.
    if (typeof textOf(config)["sliding_window"] === "number") return [];
    return specs.flatMap(({ sliding_window: window }) => window ?? []);
  });
  const fields = new Set(all.flatMap(({ config }) => Object.keys(textOf(config))));
  if (names.length === 1)
    for (const base of attentionRules([...new Set(windows as number[])], fields))
      for (const extra of EXTRAS) yield { attention: { ...base, ...extra, layer } };
  const classes = (plain.line["specs"] as readonly { class: string }[]).map((spec) => spec.class);
  for (const rule of Object.keys(RULES)) {
    if (HYBRIDS.has(rule) && !classes.includes("MambaSpec")) continue;
    const prefix = prefixOf(rule, plain, layer);
    if (prefix === undefined) continue;
    const named = { rule, ...(prefix === "" ? {} : { prefix }) };
    yield named;
    yield { ...named, layout: plain.line["layout"] as KvCacheLayout };
  }
}

/** Rules that say nothing of a model without states. */
const HYBRIDS: ReadonlySet<string> = new Set([
  "deltaNets",
  "kimiDeltas",
  "olmoHybrid",
  "nemotronH",
  "falconH1",
  "graniteHybrid",
  "zamba2",
  "jamba",
  "shortConvolutions",
]);

const EXTRAS: readonly AttentionRule[] = [
  {},
  { equalHeads: true },
  { expanded: true },
  { multiQuery: true },
  { multiQuery: true, keepsDtype: true },
  { shared: ["num_kv_shared_layers", 15] },
  { skipped: "mlp" },
  { windowList: "interleaved_sliding_window" },
  { step: 2 },
  { unshared: true },
];
const PATTERNS = [
  "sliding_window_pattern",
  "global_attn_every_n_layers",
  "_sliding_window_pattern",
];

function* attentionRules(
  windows: readonly number[],
  fields: ReadonlySet<string>,
): Generator<AttentionRule> {
  const defaults = [undefined, ...windows.flatMap((window) => [window, window - 1])];
  const patterns = [null, ...PATTERNS.filter((field) => fields.has(field))];
  for (const mode of ["model", "off", "types", "every"] as const) {
    if (mode !== "every") yield mode === "model" ? {} : { windows: mode };
    if (mode === "off") continue;
    for (const plus of [0, 1])
      for (const window of defaults) {
        const rest = {
          ...(plus === 0 ? {} : { plus }),
          ...(window === undefined ? {} : { window }),
        };
        if (mode !== "every") yield { windows: mode, ...rest };
        // 0: the field has no default that an answer shows.
        for (const otherwise of [0, 2, 3, 4, 5, 6, 8])
          for (const field of patterns)
            if (otherwise > 0 || field !== null)
              yield { windows: mode, every: [field, otherwise], ...rest };
      }
  }
}

/** Undefined where the rule does not understand the configuration. */
function prefixOf(rule: string, { config, line }: Answer, observed: string): string | undefined {
  try {
    const [first] = modelCaches("", config, settingsOf(line), {
      rule,
      without: suspects(config),
    }).layers;
    const [number] = /(?<=^|\.)\d+(?=\.|$)/.exec(first?.name ?? "") ?? [];
    const parts = first?.name.split(".").map((part) => (part === number ? "*" : part));
    const pattern = parts?.join(".") ?? "";
    return observed.endsWith(pattern) ? observed.slice(0, -pattern.length) : undefined;
  } catch (error) {
    if (KvError.is(error)) return undefined;
    throw error;
  }
}

const suspects = (config: Fields) => Object.keys(textOf(config));

const isRight = (answer: Answer, rule: LearnedArchitecture) =>
  verdict(answer, { ...rule, without: suspects(answer.config) }) === "equal";

type Verdict = "equal" | "wrong" | "refused" | "not asked";

function verdict({ line, config }: Answer, learned: LearnedArchitecture): Verdict {
  const outcome = judgeModel(line, cases, config, learned);
  if (outcome.kind === "failed")
    return outcome.reason.startsWith("refused as if") ? "refused" : "wrong";
  if (outcome.kind === "beyond") return "wrong";
  if (outcome.refused === undefined) return "equal";
  return outcome.refused.startsWith("vLLM could not") ? "not asked" : "refused";
}

function best(all: readonly Answer[], plain: Answer): LearnedArchitecture | undefined {
  let [found, most]: [LearnedArchitecture | undefined, number] = [undefined, 0];
  for (const candidate of candidates(plain, all)) {
    const open = { ...candidate, without: suspects(plain.config) };
    if (verdict(plain, open) !== "equal") continue;
    let right = 0;
    for (const [index, answer] of all.entries()) {
      const own = verdict(answer, { ...candidate, without: suspects(answer.config) });
      if (own === "equal" || (own === "refused" && answer.line.error !== undefined)) right += 1;
      if (right + all.length - index - 1 <= most) break;
    }
    if (right > most) [found, most] = [candidate, right];
    if (most === all.length) break;
  }
  return found && supported(found, all);
}

/** The rule without the parts that no answer is equal for, but for one that only refuses. */
function supported(rule: LearnedArchitecture, all: readonly Answer[]): LearnedArchitecture {
  const { layer: _, windows: __, unshared: ___, ...parts } = rule.attention ?? {};
  for (const part of Object.keys(parts)) {
    const attention = Object.fromEntries(
      Object.entries(rule.attention ?? {}).filter(([name]) => name !== part),
    );
    const less = { ...rule, attention };
    if (all.every((answer) => !isRight(answer, rule) || isRight(answer, less)))
      return supported(less, all);
  }
  return rule;
}

/** Adds what the rule does not explain: values that are known, and fields that are needed. */
function withLimits(
  rule: LearnedArchitecture,
  all: readonly Answer[],
  meta: Base,
): LearnedArchitecture {
  const open = (answer: Answer) => verdict(answer, { ...rule, without: suspects(answer.config) });
  const right = all.filter((answer) => isRight(answer, rule));
  const seen = (field: string) =>
    unique(right.map(({ config }) => new ConfigFields("", textOf(config)).kindOf(field)));
  const only: Record<string, readonly unknown[]> = {};
  const needs = new Set(
    (meta.error === undefined ? meta.added : []).filter((field) => field in textOf(meta.base)),
  );
  const notNull = new Set<string>();
  const refusedTp = new Set<number>();
  const without = new Set<string>();
  const limit = (value: unknown, field: string) => {
    if (value === undefined) needs.add(field);
    else if (value === null) notNull.add(field);
  };
  const isOtherType = ({ config }: Answer) =>
    !seen("model_type").includes((textOf(config)["model_type"] as string | undefined) ?? null);
  for (const answer of all) {
    const wrong = open(answer) === "wrong";
    const missing = /has no attribute '(\w+)'/.exec(answer.line.error ?? "")?.[1];
    const [field] = Object.keys(answer.changed ?? {});
    const lacks = missing !== undefined && textOf(answer.config)[missing] === undefined;
    // What right answers lack too is needed only beside the changed field.
    if (wrong && lacks && !seen(missing).includes(null)) needs.add(missing);
    else if (wrong && answer.line.error !== undefined && field === undefined && answer.line.tp > 1)
      refusedTp.add(answer.line.tp);
    else if (wrong && isOtherType(answer)) only["model_type"] = seen("model_type");
    else if (wrong && field !== undefined) {
      const value = answer.changed?.[field];
      if (value === null) needs.add(field);
      else if (value === "=null") notNull.add(field);
      else only[field] = seen(field);
    } else if (wrong && answer.line.error !== undefined) {
      const part = textOf(answer.config);
      for (const name of namedIn(answer.line.error, meta.base)) limit(part[name], name);
      for (const name of Object.keys(part))
        if (part[name] === null && (name === "head_dim" || !seen(name).includes("null")))
          notNull.add(name);
    }
    if (open(answer) === "equal" && field !== undefined) without.add(field);
  }
  for (const [name, value] of Object.entries(textOf(meta.base)))
    if (
      (typeof value === "number" || typeof value === "boolean") &&
      (meta.read?.includes(name) === true || /head|group/.test(name)) &&
      COUNTS.test(name) &&
      !seen(name).includes("null")
    )
      notNull.add(name);
  // Where the config's class comes with the checkpoint, no field that vLLM reads has a default.
  const hasOwnClass = asked.some(
    ({ line }) => line.config === meta.meta && line.error?.includes("'FromFile' object"),
  );
  if (hasOwnClass)
    for (const field of Object.keys(textOf(meta.base)))
      if (meta.read?.includes(field) === true && COUNTS.test(field) && !seen(field).includes(null))
        needs.add(field);
  // A config's class may fill in the types of layers.
  const hasTypes = textOf(meta.base)["layer_types"] !== undefined;
  if (hasTypes && rule.attention?.windows !== "off" && !seen("layer_types").includes(null))
    needs.add("layer_types");
  for (const field of needs) if (!seen(field).includes("null")) notNull.add(field);
  if (!without.has("is_causal")) only["is_causal"] = [null, true];
  if (meta.kind === "multimodal" && textOf(meta.base) !== meta.base)
    only["model_type"] = seen("model_type");
  const learned = {
    ...rule,
    ...(needs.size === 0 ? {} : { needs: [...needs].sort() }),
    ...(refusedTp.size === 0
      ? {}
      : { tp: [1, 2, 4, 8].filter((size) => ![...refusedTp].some((bad) => size % bad === 0)) }),
    ...(notNull.size === 0 ? {} : { notNull: [...notNull].sort() }),
  };
  // Fields that may decide and that the rule does not read.
  for (const { config, line } of right)
    for (const field of unread(config, line, learned, [...without, ...Object.keys(only)]))
      if (!without.has(field)) only[field] ??= seen(field);
  for (const field of Object.keys(only)) without.delete(field);
  return { ...learned, only, ...(without.size === 0 ? {} : { without: [...without].sort() }) };
}

/** Numbers that vLLM computes with: a null that it was not asked with is refused. */
const COUNTS =
  /^(num|n)_|head|layer|hidden_size|window|conv|size|dim|rank|interval|period|offset|is_encoder|experts|multiplier|group|bias/;

/** Fields of a configuration that an error names. */
function namedIn(error: string, base: Fields): readonly string[] {
  if (!/must be provided|required|NoneType/.test(error)) return [];
  const words = new Set(error.match(/\w+/g));
  return Object.keys(textOf(base)).filter((field) => field.includes("_") && words.has(field));
}

function unread(
  config: Fields,
  line: ModelLine,
  learned: LearnedArchitecture,
  without: readonly string[],
): readonly string[] {
  try {
    modelCaches("", config, settingsOf(line), { ...learned, without });
    return [];
  } catch (error) {
    const fields = KvError.is(error) ? error.details?.["fields"] : undefined;
    return Array.isArray(fields) ? (fields as string[]) : [];
  }
}

function unique(values: readonly unknown[]): unknown[] {
  const texts = new Set(values.map((value) => JSON.stringify(value ?? null)));
  return [...texts].sort().map((text) => JSON.parse(text) as unknown);
}

const FRAME = /\.transformers\.\w+$/;
const DRAFT = "it is a draft, which vLLM serves only beside the model that it drafts for";
const architectures: Record<string, LearnedArchitecture> = {};
const refused: Record<string, string> = {};
const counts: Record<string, { planned: number; built: number; all: number }> = {};
let wrongs = 0;
for (const [architecture, [kind, className]] of Object.entries(facts.architectures)) {
  const meta = bases.get(architecture);
  const all = answers.get(architecture) ?? [];
  // Names of one class share its answers, unless it takes its layers of transformers.
  const ofClass = Object.entries(facts.architectures).flatMap(([name, [, other]]) =>
    other === className && (name === architecture || !FRAME.test(className))
      ? (answers.get(name) ?? [])
      : [],
  );
  const plain =
    all.find(({ line, changed }) => line.error === undefined && changed !== undefined) ??
    [...all, ...ofClass].find(({ line }) => line.error === undefined && line.tp === 1);
  counts[kind] ??= { planned: 0, built: 0, all: 0 };
  const count = counts[kind];
  count.all += 1;
  if (plain === undefined) {
    refused[architecture] = kind === "draft" ? DRAFT : `vLLM could not be asked (${whyNot(meta)})`;
    continue;
  }
  count.built += 1;
  const others = all.filter(
    ({ line, changed }) => line.error === undefined && changed === undefined,
  );
  // A published configuration has the model type that checkpoints have.
  const explained = (candidate: LearnedArchitecture | undefined) =>
    candidate === undefined ? -1 : others.filter((answer) => isRight(answer, candidate)).length;
  const [made, published] = [best(ofClass, plain), others[0] && best(ofClass, others[0])];
  const rule = explained(published) > explained(made) ? published : made;
  if (rule === undefined) {
    refused[architecture] = "no rule gives the caches that vLLM makes";
    continue;
  }
  const asked = meta ?? { meta: architecture, kind, added: [], base: plain.config };
  const learned = withLimits(rule, all.length === 0 ? ofClass : all, asked);
  // The answers to other names of a class say nothing of a type that vLLM refused.
  if (Object.values(learned.only ?? {}).some((values) => values.length === 0)) {
    refused[architecture] = `vLLM could not be asked (${whyNot(meta)})`;
    count.built -= 1;
    continue;
  }
  const wrong = all.filter((answer) => verdict(answer, learned) === "wrong");
  if (wrong.some(({ line, changed }) => changed !== undefined || line.error === undefined)) {
    refused[architecture] =
      `its caches are not understood (${describe(wrong[0] as Answer, learned)})`;
    continue;
  }
  const equal = all.filter((answer) => verdict(answer, learned) === "equal").length;
  if (all.length > 0 && equal === 0) {
    refused[architecture] = "vLLM was asked with no configuration that has all that it needs";
    continue;
  }
  wrongs += wrong.length;
  for (const answer of wrong) console.log(`WRONG ${architecture} ${describe(answer, learned)}`);
  const known = draftsOf(architecture, learned);
  architectures[architecture] = known.length === 0 ? learned : { ...learned, drafts: known };
  count.planned += 1;
  console.log(`${architecture}: ${rule.rule ?? "attention"}, ${equal} equal of ${all.length}`);
}

/** Methods of drafts beside which the architecture's caches are equal or refused in each answer. */
function draftsOf(architecture: string, learned: LearnedArchitecture): readonly DraftMethod[] {
  return DRAFT_METHODS.filter((method) => {
    const verdicts = beside
      .filter(({ line }) => line.config === architecture && line.draft?.method === method)
      .map((answer) => verdict(answer, { ...learned, drafts: [method] }));
    return verdicts.includes("equal") && !verdicts.includes("wrong");
  });
}

/** The error, without paths of the machine; its second line says what a class does not accept. */
function whyNot(meta: Base | undefined): string {
  const [first = "", second = ""] = (meta?.error ?? "not tried").split("\n");
  const whole = /validation error|Class validation/.test(first) ? second.trim() : first;
  const text = whole.replace(/\[type=.*| for '\/tmp.*/, "").trim();
  return (text.endsWith("Error:") ? `${text} ${meta?.at ?? ""}` : text).slice(0, 120);
}

function describe(answer: Answer, learned: LearnedArchitecture): string {
  const { line, config, changed } = answer;
  const outcome = judgeModel(line, cases, config, learned);
  const reason = outcome.kind === "failed" ? outcome.reason : "";
  return `${JSON.stringify(changed ?? line.config).slice(0, 60)} at TP ${line.tp}: ${reason.split("\n")[0]?.slice(0, 140)}`;
}

for (const [name, reason] of Object.entries(refused)) console.log(`refused ${name}: ${reason}`);
console.log(JSON.stringify(counts), `${wrongs} wrong`);
const { release, servedUntil, others, quantizations, shapes } = facts;
const used = new Set(
  [...answers.values()]
    .flat()
    .flatMap(({ config }) => [config["model_type"], textOf(config)["model_type"]]),
);
writeFileSync(
  flags.out,
  `${JSON.stringify({
    release,
    architectures,
    refused,
    servedUntil,
    others,
    quantizations,
    shapes: Object.fromEntries(Object.entries(shapes).filter(([type]) => used.has(type))),
  })}\n`,
);
