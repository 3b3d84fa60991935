import { KvError } from "@kv/interface";
import type { AttentionSpec, MambaSpec } from "./cache-spec.js";
import type { ConfigFields } from "./config-fields.js";

/** What a family of models reads its caches from. */
export interface ModelContext {
  readonly name: string;
  readonly architecture: string;
  /** Fields of the language model. */
  readonly fields: ConfigFields;
  /** Fields of the whole file: the same where a model has no other part. */
  readonly outer: ConfigFields;
  readonly tpSize: number;
  /** Type of the model's elements, as vLLM resolves it. */
  readonly modelDtype: string;
  /** vLLM's `cache_dtype`, resolved from the checkpoint where "auto" is asked for. */
  readonly cacheDtype: string;
  /** vLLM's `--mamba-ssm-cache-dtype`. */
  readonly stateDtype: string;
  readonly prefixCaching: boolean;
  /** Guesses, which the report prints. */
  readonly assumed: string[];
}

/** The cache of a layer before block sizes are known. */
export interface LayerDraft {
  readonly name: string;
  readonly layer: number;
  readonly spec: Omit<AttentionSpec, "blockSize"> | Omit<MambaSpec, "blockSize" | "pageSizePadded">;
  /**
   * Tokens in a block, where the layer has a number of its own. Default: the engine's, or that of
   * states.
   */
  readonly blockSize?: number;
}

/** An attention backend of vLLM, as far as it decides block sizes. */
export interface Backend {
  readonly name: string;
  /** The kernel takes blocks of any multiple of these tokens, or only of this number (`only`). */
  readonly kernelTokens: number;
  readonly only?: boolean;
}

/** What a family says of a model on one rank. */
export interface ModelDraft {
  readonly layers: readonly LayerDraft[];
  /** All layers, with and without a cache. Pipeline stages divide them. */
  readonly numLayers: number;
  /** KV heads of the whole model; 1 for latents. */
  readonly numKvHeads: number;
  /** vLLM's attention backends on an H100, with the block sizes that they take. */
  readonly backends: readonly Backend[];
  /** The engine's block size, where it is neither 16 nor the least that the backends take. */
  readonly blockSize?: number;
  /** The order of memory that the backends want first. Default LBHNC. */
  readonly layout?: "LBHNC" | "LBNHC" | "BLHNC";
  /** Bytes of attention's cache for one token in one layer, by which a state's page is measured. */
  readonly tokenBytes?: number;
  /** The least number of tokens in a block of states. */
  readonly leastBlockTokens?: number;
  /** Tokens whose multiple a block of states is, with prefix caching. */
  readonly stateAlignment?: number;
  /** vLLM's `cache_dtype` after the model's own rules. */
  readonly cacheDtype?: string;
  /** Why a request's cache cannot be handed over, where that is so. */
  readonly notHandedOver?: string;
}

/** A family of models: the architectures whose caches follow one set of rules. */
export interface Family {
  /** Name in reports and in docs/kv-plan.md. */
  readonly name: string;
  read(context: ModelContext): ModelDraft;
}

/** What each layer has: its caches by their names, in which `*` is the layer's number. */
export function layersOf(
  count: number,
  cachesOf: (layer: number) => Readonly<Record<string, LayerDraft["spec"]>>,
): LayerDraft[] {
  return Array.from({ length: count }, (_, layer) =>
    Object.entries(cachesOf(layer)).map(([name, spec]) => {
      return { name: name.replace("*", String(layer)), layer, spec };
    }),
  ).flat();
}

export const FLASH_ATTN: Backend = { name: "FLASH_ATTN", kernelTokens: 16 };

/**
 * KV heads of a rank: divided, or replicated where there are fewer than ranks.
 * @throws `KV_PLAN_UNSUPPORTED`, as vLLM refuses it.
 */
export function headsOfRank(
  { name, tpSize }: Pick<ModelContext, "name" | "tpSize">,
  heads: number,
  what = "KV heads",
): number {
  const [more, fewer] = heads >= tpSize ? [heads, tpSize] : [tpSize, heads];
  if (more % fewer === 0) return Math.max(1, heads / tpSize);
  throw notDivisible(name, heads, what, tpSize);
}

/**
 * A rank's share.
 * @throws `KV_PLAN_UNSUPPORTED`, as vLLM refuses it.
 */
export function divided(
  { name, tpSize }: Pick<ModelContext, "name" | "tpSize">,
  count: number,
  what: string,
): number {
  if (count % tpSize === 0) return count / tpSize;
  throw notDivisible(name, count, what, tpSize);
}

function notDivisible(name: string, count: number, what: string, tpSize: number): KvError {
  return new KvError(
    "KV_PLAN_UNSUPPORTED",
    `${name}: ${count} ${what} cannot be split over TP size ${tpSize}: vLLM refuses this TP size`,
    {
      hint: `give a TP size that divides the model's ${count} ${what}`,
      details: { count, tpSize },
    },
  );
}
