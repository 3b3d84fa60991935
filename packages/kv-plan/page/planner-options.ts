import { KV_CACHE_LAYOUTS, type KvCacheLayout, KvError } from "@kv/interface";
import { layoutOf } from "../src/input/engine-flags.js";
import { modelOfConfig } from "../src/input/model-source.js";
import type { Pair } from "../src/input/pair.js";
import { pairOrRefusal } from "../src/input/pair-from-model.js";
import { parsePythonJson } from "../src/model/config-fields.js";
import { modelCaches } from "../src/model/model-caches.js";
import { analysePair } from "../src/report/analyse-pair.js";
import type { AnalyseOptions } from "../src/report/plans-of-pair.js";
import type { PairReport, RefusalReport } from "../src/report/report.js";

/**
 * What the form of the page holds, as text. A value for both engines, or two with a comma: prefill,
 * then decode. An empty one is the default.
 */
export interface PageOptions {
  /** Name of a known model; empty: that of `config`. */
  readonly model: string;
  /** A model's config.json. */
  readonly config: string;
  readonly tp: string;
  readonly pp: string;
  readonly block: string;
  readonly layout: string;
  readonly backend: string;
  readonly dtype: string;
  readonly tokens: string;
  readonly computed: string;
  readonly bandwidth: string;
  /** "on": the engine converts HND to NHD. */
  readonly permute: string;
}

/** The form when no link says otherwise. */
export const DEFAULTS: PageOptions = {
  model: "llama-3.1-70b",
  config: "",
  tp: "8,4",
  pp: "",
  block: "",
  layout: "",
  backend: "",
  dtype: "auto",
  tokens: "2048",
  computed: "0",
  bandwidth: "25",
  permute: "",
};

/** A config.json has some kilobytes; a link cannot be much longer. */
const MAX_CONFIG_CHARACTERS = 65_536;

/** The form as the fragment of a link: what differs from the defaults. */
export function toFragment(options: PageOptions): string {
  const keys = Object.keys(DEFAULTS) as (keyof PageOptions)[];
  const changed = keys.filter(
    (key) => options[key] !== DEFAULTS[key] && !(key === "config" && options.model !== ""),
  );
  return new URLSearchParams(
    changed.map((key): [string, string] => [key, options[key]]),
  ).toString();
}

/**
 * The form of a link. What the fragment does not say is the default, and what the form does not
 * have is ignored.
 */
export function fromFragment(fragment: string): PageOptions {
  const given = new URLSearchParams(fragment.replace(/^#/, ""));
  const keys = Object.keys(DEFAULTS) as (keyof PageOptions)[];
  return Object.fromEntries(
    keys.map((key) => [key, (given.get(key) ?? DEFAULTS[key]).slice(0, MAX_CONFIG_CHARACTERS)]),
  ) as unknown as PageOptions;
}

/**
 * The names of known models by the family of their rules.
 * @throws The errors of `modelCaches`.
 */
export function byFamily(
  models: Readonly<Record<string, unknown>>,
): Readonly<Record<string, string[]>> {
  const families: Record<string, string[]> = {};
  for (const [name, config] of Object.entries(models)) {
    const { family } = modelCaches(name, config, { tpSize: 1 });
    families[family] = [...(families[family] ?? []), name];
  }
  return families;
}

/**
 * Plans and proves the pair of the form. `models` are the known configs by name.
 * @throws `KV_CONFIG_INVALID`, `KV_PLAN_*`, with what is wrong.
 */
export function reportOf(
  options: PageOptions,
  models: Readonly<Record<string, unknown>>,
): PairReport {
  const settings = settingsOf(options);
  const pair = pairOf(options, models);
  return "outcome" in pair ? pair : analysePair(pair, settings);
}

function pairOf(
  options: PageOptions,
  models: Readonly<Record<string, unknown>>,
): Pair | RefusalReport {
  const known = Object.hasOwn(models, options.model) ? models[options.model] : undefined;
  if (options.model !== "" && known === undefined)
    throw new KvError(
      "KV_CONFIG_INVALID",
      `Model: ${options.model} is none of ${Object.keys(models).join(", ")}`,
    );
  const name = options.model || "model";
  const config = known ?? parsed(options.config);
  const both = () => {
    const model = modelOfConfig(name, config, { cacheDtype: options.dtype });
    return [model, model] as const;
  };
  return pairOrRefusal(name, both, {
    tp: sizes("TP", options.tp, 1024),
    pp: sizes("PP", options.pp, 1024),
    blockSize: sizes("Block size", options.block, 1_000_000),
    kernelBlockSize: [],
    layout: values(options.layout).map(layoutNamed),
    backend: values(options.backend),
    numBlocks: [],
  });
}

function settingsOf(options: PageOptions): AnalyseOptions {
  const [numTokens = 1] = sizes("Tokens", options.tokens, 10_000_000);
  const computedBlocks = Number(options.computed);
  const bandwidthGBps = Number(options.bandwidth);
  if (!Number.isSafeInteger(computedBlocks) || computedBlocks < 0)
    throw wrong("Prefix hit", options.computed, "a whole number of blocks");
  if (!(bandwidthGBps > 0)) throw wrong("Bandwidth", options.bandwidth, "a number above 0");
  return {
    numTokens,
    computedBlocks,
    bandwidthGBps,
    pool: "consecutive",
    masksUncovered: false,
    form: undefined,
    conversions: options.permute === "on" ? ["hnd-to-nhd"] : [],
  };
}

function parsed(config: string): unknown {
  try {
    return parsePythonJson(config);
  } catch (cause) {
    throw new KvError("KV_CONFIG_INVALID", `config.json: ${(cause as Error).message}`, {
      hint: "paste the config.json of a decoder model from Hugging Face",
      cause,
    });
  }
}

const values = (text: string): string[] =>
  text
    .split(",")
    .map((value) => value.trim())
    .filter((value) => value !== "");

function sizes(field: string, text: string, most: number): number[] {
  return values(text).map((value) => {
    const size = Number(value);
    if (/^\d{1,9}$/.test(value) && size >= 1 && size <= most) return size;
    throw wrong(field, value, `a whole number from 1 to ${most}`);
  });
}

function layoutNamed(name: string): KvCacheLayout {
  const layout = layoutOf(name.toUpperCase());
  if (layout === undefined)
    throw wrong("Layout", name, `HND, NHD or one of ${KV_CACHE_LAYOUTS.join(", ")}`);
  return layout;
}

function wrong(field: string, value: string, wanted: string): KvError {
  return new KvError("KV_CONFIG_INVALID", `${field}: ${value} is not ${wanted}`);
}
