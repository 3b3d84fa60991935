import type { KvCacheLayout } from "@kv/interface";
import { KvError } from "@kv/interface";
import TABLE from "./architectures.json" with { type: "json" };
import { type ConfigFields, isRecord, OTHER_WAYS } from "./config-fields.js";
import { type AttentionRule, dense } from "./families/attention.js";
import { compressedLatents } from "./families/compressed-latents.js";
import { doubleLatents, latents, typedIndexers } from "./families/latents.js";
import { falconH1, graniteHybrid, nemotronH, zamba2 } from "./families/mamba2-hybrids.js";
import {
  deltaNets,
  jamba,
  kimiDeltas,
  mamba1State,
  mamba2State,
  mambaOnly,
  olmoHybrid,
  shortConvolutions,
} from "./families/state-hybrids.js";
import {
  gemma4,
  gemma4Unified,
  llama4,
  mimoV2,
  minimaxM3,
  nemotronNas,
  whisper,
} from "./families/uneven-attention.js";
import type { Family } from "./model-draft.js";

/** The arithmetic of layers, by the name that the table gives it. */
export const RULES: Readonly<Record<string, Family>> = {
  latents,
  doubleLatents,
  typedIndexers,
  compressedLatents,
  deltaNets,
  kimiDeltas,
  olmoHybrid,
  nemotronH,
  falconH1,
  graniteHybrid,
  zamba2,
  jamba,
  shortConvolutions,
  mamba1: mambaOnly("Mamba 1", mamba1State),
  mamba2: mambaOnly("Mamba 2", mamba2State),
  gemma4,
  gemma4Unified,
  llama4,
  mimoV2,
  minimaxM3,
  nemotronNas,
  whisper,
};

/** vLLM's `method` of a draft that is served beside a model. */
export type DraftMethod = (typeof DRAFT_METHODS)[number];
export const DRAFT_METHODS = ["eagle", "eagle3", "mtp"] as const;

/**
 * What was learned of an architecture from the answers of vLLM's own classes: the rule that gives
 * them, and the fields that it does not explain.
 */
export interface LearnedArchitecture {
  /** Of `RULES`; default attention in every layer. */
  readonly rule?: string;
  /** What stands before the names of the rule's caches. */
  readonly prefix?: string;
  readonly attention?: AttentionRule;
  /** The backends' first choice, where it is not the rule's. */
  readonly layout?: KvCacheLayout;
  /** Values of fields with which vLLM was asked; others are refused. Null: the field is missing. */
  readonly only?: Readonly<Record<string, readonly unknown[]>>;
  /** Fields that vLLM needs, and fields in which it refuses an explicit null. */
  readonly needs?: readonly string[];
  readonly notNull?: readonly string[];
  /** TP sizes with which vLLM was asked, where it refused others for reasons that are not known. */
  readonly tp?: readonly number[];
  /** Fields whose change changed nothing. */
  readonly without?: readonly string[];
  /** Drafts beside which vLLM's caches are those of the rules. */
  readonly drafts?: readonly DraftMethod[];
}

interface Table {
  /** Release of vLLM that was asked. */
  readonly release: string;
  readonly architectures: Readonly<Record<string, LearnedArchitecture>>;
  /** Architectures of the release that could not be learned, and why. */
  readonly refused: Readonly<Record<string, string>>;
  /** The last release to serve an architecture that this one does not. */
  readonly servedUntil: Readonly<Record<string, string>>;
  /** Architectures that generate no text. */
  readonly others: readonly string[];
  /** Methods of `quantization_config` that it loads. */
  readonly quantizations: readonly string[];
  /** Attention heads, KV heads and head size of config classes, by model type. */
  readonly shapes: Readonly<Record<string, readonly (number | null)[]>>;
}

export const ARCHITECTURES = TABLE as unknown as Table;

export function familyOfRule({ rule, attention }: LearnedArchitecture): Family {
  const family = rule === undefined ? dense(attention ?? {}) : RULES[rule];
  if (family === undefined) throw new KvError("KV_INTERNAL", `no rule ${rule}`);
  return family;
}

/** Where a multimodal config keeps its language model's fields, or the part that does. */
const TEXT_FIELDS = ["text_config", "llm_config", "language_config", "thinker_config"];

/** The parts of a config from the whole to its language model. */
export function partsOf(config: Readonly<Record<string, unknown>>, path = ""): readonly Part[] {
  const field = TEXT_FIELDS.find((name) => isRecord(config[name]));
  const inner = field === undefined ? undefined : config[field];
  const own = { path, fields: config };
  return isRecord(inner) ? [own, ...partsOf(inner, `${path}${field}.`)] : [own];
}

export interface Part {
  /** Place in the file, ending with a dot, or "". */
  readonly path: string;
  readonly fields: Readonly<Record<string, unknown>>;
}

/**
 * @throws `KV_PLAN_UNSUPPORTED` for a config without a known architecture, with what would help.
 */
export function architectureOf(
  name: string,
  config: ConfigFields,
  given?: LearnedArchitecture,
): {
  readonly architecture: string;
  readonly learned: LearnedArchitecture;
} {
  const said = config.value("architectures");
  const architecture = Array.isArray(said)
    ? said.find((each) => typeof each === "string")
    : undefined;
  if (typeof architecture !== "string")
    throw new KvError("KV_PLAN_UNSUPPORTED", `${name}: architectures is missing`, {
      hint: "give the config.json of a decoder model from Hugging Face: it names the model's class",
    });
  const learned = given ?? own(ARCHITECTURES.architectures, architecture);
  if (learned !== undefined) return { architecture, learned };
  throw new KvError("KV_PLAN_UNSUPPORTED", `${name}: ${whyNot(architecture, config)}`, {
    hint: OTHER_WAYS,
    details: { architecture },
  });
}

function own<T>(table: Readonly<Record<string, T>>, name: string): T | undefined {
  return Object.hasOwn(table, name) ? table[name] : undefined;
}

function whyNot(architecture: string, config: ConfigFields): string {
  const { release, refused, servedUntil, others } = ARCHITECTURES;
  if (others.includes(architecture))
    return `${architecture} has no KV cache to hand over: vLLM ${release} generates no text with it`;
  const version = own(servedUntil, architecture);
  if (version !== undefined)
    return `vLLM ${release} does not serve ${architecture}; ${version} was the last to`;
  const reason = own(refused, architecture);
  if (reason !== undefined) return `no rules for the architecture ${architecture}: ${reason}`;
  if (config.value("is_encoder_decoder") === true)
    return `${architecture} is an encoder-decoder: the cache of its cross attention is the encoder's, and is not handed over`;
  return `no rules for the architecture ${architecture}: vLLM ${release} does not have it`;
}
