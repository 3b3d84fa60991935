import { KvError } from "@kv/interface";
import type { AttentionSpec, MambaSpec } from "./cache-spec.js";
import type { ConfigFields } from "./config-fields.js";

export interface ModelContext {
  readonly name: string;
  readonly architecture: string;
  readonly fields: ConfigFields;
  /** Fields of the whole file. */
  readonly outer: ConfigFields;
  /** Attention heads, KV heads and head size where configs of a model type lack them. */
  readonly shapes: Readonly<Record<string, readonly (number | null)[]>>;
  readonly tpSize: number;
  /** Element type as vLLM resolves it. */
  readonly modelDtype: string;
  /** vLLM's `cache_dtype`; "auto" is resolved from the checkpoint. */
  readonly cacheDtype: string;
  readonly stateDtype: string;
  readonly prefixCaching: boolean;
  /** Tokens that a draft guesses at once (default 0). */
  readonly draftTokens?: number | undefined;
  /** Guesses, for the report. */
  readonly assumed: string[];
}

/** A layer's cache before block sizes are known. */
export interface LayerDraft {
  readonly name: string;
  readonly layer: number;
  readonly spec: Omit<AttentionSpec, "blockSize"> | Omit<MambaSpec, "blockSize" | "pageSizePadded">;
  /** Tokens. Default: the engine's, or those of states. */
  readonly blockSize?: number;
}

/** A vLLM attention backend's effect on block sizes. */
export interface Backend {
  readonly name: string;
  /** The kernel's blocks are multiples of these tokens, or exactly these (`only`). */
  readonly kernelTokens: number;
  readonly only?: boolean;
}

export interface ModelDraft {
  readonly layers: readonly LayerDraft[];
  /** With and without a cache. Pipeline stages divide them. */
  readonly numLayers: number;
  /** KV heads of the whole model; 1 for latents. */
  readonly numKvHeads: number;
  /** vLLM's attention backends on an H100. */
  readonly backends: readonly Backend[];
  /** The engine's block size, unless 16 or the backends' least. */
  readonly blockSize?: number;
  /** The backends' first choice. Default LBHNC. */
  readonly layout?: "LBHNC" | "LBNHC" | "BLHNC";
  /** Attention bytes of one token and layer, which measure a state's page. */
  readonly tokenBytes?: number;
  /** The least tokens in a block of states. */
  readonly leastBlockTokens?: number;
  /** With prefix caching, blocks of states are multiples of these tokens. */
  readonly stateAlignment?: number;
  /** vLLM's `cache_dtype` after the model's own rules. */
  readonly cacheDtype?: string;
  /** Why a request's cache cannot be handed over. */
  readonly notHandedOver?: string;
}

/** Architectures whose caches follow one set of rules. */
export interface Family {
  /** Name in reports and in docs/kv-plan.md. */
  readonly name: string;
  read(context: ModelContext): ModelDraft;
}

/** `*` in a cache's name is the layer's number. */
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
 * KV heads of a rank: divided, or replicated where ranks outnumber them.
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

/** @throws `KV_PLAN_UNSUPPORTED`, as vLLM refuses it. */
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
