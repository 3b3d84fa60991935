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
import { SIZE_DEFAULTS, type SizeReport, sizeReport } from "../src/size/size-report.js";

/**
 * The page's form as text. Empty is the default of `kv-plan`; two values with a comma are prefill's
 * and decode's.
 */
const DEFAULTS = {
  /** A known model, or empty for the model of `config`. */
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
  /** "on": the engine converts HND to NHD. */
  permute: "",
  /** GiB of one GPU, and of the whole checkpoint. Empty weights are estimated. */
  memory: "80",
  weights: "",
};

export type PageOptions = Readonly<typeof DEFAULTS>;

/** The form with the value of each field. */
export function optionsOf(read: (field: keyof PageOptions) => string): PageOptions {
  const options = { ...DEFAULTS };
  for (const field of FIELDS) options[field] = read(field);
  return options;
}

export const FIELDS = Object.keys(DEFAULTS) as (keyof PageOptions)[];

const GIB = 2 ** 30;

/** Far more than a config.json has; links cannot be much longer. */
const MAX_CONFIG_CHARACTERS = 65_536;

/** Writes only what differs from the defaults. */
export function toFragment(options: PageOptions): string {
  const changed = FIELDS.filter(
    (key) => options[key] !== DEFAULTS[key] && !(key === "config" && options.model !== ""),
  );
  return new URLSearchParams(
    changed.map((key): [string, string] => [key, options[key]]),
  ).toString();
}

/** Missing values are defaults; unknown ones are ignored. */
export function fromFragment(fragment: string): PageOptions {
  const given = new URLSearchParams(fragment.replace(/^#/, ""));
  return optionsOf((key) => (given.get(key) ?? DEFAULTS[key]).slice(0, MAX_CONFIG_CHARACTERS));
}

/**
 * Known models by the family of their rules.
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
 * `models`: known configs by name.
 * @throws `KV_CONFIG_INVALID`, `KV_PLAN_*`.
 */
export function reportOf(
  options: PageOptions,
  models: Readonly<Record<string, unknown>>,
): PairReport {
  const settings = settingsOf(options);
  const pair = pairOf(options, models);
  return "outcome" in pair ? pair : analysePair(pair, settings);
}

/**
 * What fits into the decode engine's GPUs.
 * @throws `KV_CONFIG_INVALID`, `KV_PLAN_*`.
 */
export function sizesOf(
  options: PageOptions,
  models: Readonly<Record<string, unknown>>,
): SizeReport {
  const { name, config } = modelOf(options, models);
  const model = modelOfConfig(name, config, { cacheDtype: options.dtype });
  const [weights] = sizes("Weights", options.weights, 1_000_000);
  const [memory = 80] = sizes("Memory", options.memory, 1_000_000);
  return sizeReport(
    model,
    config,
    {
      tpSize: sizes("TP", options.tp, 1024).at(-1) ?? 1,
      dpSize: 1,
      memoryBytes: memory * GIB,
      weightsBytes: weights === undefined ? undefined : weights * GIB,
      ...SIZE_DEFAULTS,
      requestTokens: settingsOf(options).numTokens,
      bandwidthGBps: settingsOf(options).bandwidthGBps,
    },
    {
      blockSize: sizes("Block size", options.block, 1_000_000).slice(-1),
      layout: values(options.layout).map(layoutNamed).slice(-1),
    },
  );
}

function modelOf(
  options: PageOptions,
  models: Readonly<Record<string, unknown>>,
): { readonly name: string; readonly config: unknown } {
  const known = Object.hasOwn(models, options.model) ? models[options.model] : undefined;
  if (options.model !== "" && known === undefined)
    throw new KvError(
      "KV_CONFIG_INVALID",
      `Model: ${options.model} is none of ${Object.keys(models).join(", ")}`,
    );
  return { name: options.model || "model", config: known ?? parsed(options.config) };
}

function pairOf(
  options: PageOptions,
  models: Readonly<Record<string, unknown>>,
): Pair | RefusalReport {
  const { name, config } = modelOf(options, models);
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
