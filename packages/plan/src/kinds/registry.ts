import { invalidPlan } from "../errors.js";
import type { CacheKind } from "./cache-kind.js";
import { mamba } from "./mamba.js";

const SHARDINGS: readonly CacheKind["sharding"][] = ["heads", "replicated", "state"];
const EXTENTS: readonly CacheKind["extent"][] = ["sequence", "window", "state", "whole"];

/**
 * The kinds of KV cache that plans know. Only a kind whose blocks are not heads and tokens has a
 * file of its own.
 */
const KINDS: readonly CacheKind[] = [
  // Dense attention, GQA included: K and V of each head and token, for the whole sequence.
  { name: "full", sharding: "heads", extent: "sequence" },
  // One latent vector per token, the same on every rank. The indexer keys of sparse MLA are of this
  // kind too, in regions of their own.
  { name: "mla", sharding: "replicated", extent: "sequence" },
  // Sliding-window attention: as dense attention, but only the end of the sequence is kept and
  // moved.
  { name: "swa", sharding: "heads", extent: "window" },
  // MLA with a sliding window (vLLM 0.33: `SlidingWindowMLASpec`).
  { name: "swa-mla", sharding: "replicated", extent: "window" },
  mamba,
  // Circular scratch, the buffer of a compressor (vLLM 0.33: `CircularBufferSpec`): blocks that
  // stand for no fixed tokens, in regions of their own. They are moved whole and never zeroed.
  { name: "circular", sharding: "replicated", extent: "whole" },
];

const BY_NAME = new Map<string, CacheKind>(KINDS.map((kind) => [kind.name, kind]));

/**
 * Adds a kind of cache of another package to the plans of this process. Registering the same object
 * again changes nothing. A proof of its plans needs `registerCacheSemantics` of `@kv/plan/prove` as
 * well.
 *
 * @throws `KV_PLAN_INVALID` for a name that is taken, and for a kind that is not valid.
 */
export function registerCacheKind(kind: CacheKind): void {
  const { name, sharding, extent } = kind;
  const invalid = (reason: string) => invalidPlan(`cache kind ${JSON.stringify(name)}: ${reason}`);
  const known = BY_NAME.get(name);
  if (known === kind) return;
  if (known !== undefined) throw invalid("another kind has this name");
  if (typeof name !== "string" || name === "") throw invalid("the name is not a text");
  if (!SHARDINGS.includes(sharding))
    throw invalid(`sharding is ${JSON.stringify(sharding)}, none of ${SHARDINGS.join(", ")}`);
  if (!EXTENTS.includes(extent))
    throw invalid(`extent is ${JSON.stringify(extent)}, none of ${EXTENTS.join(", ")}`);
  if (sharding === "state" && kind.pieces === undefined) throw invalid("a state needs pieces");
  BY_NAME.set(name, kind);
}

/**
 * The kind with this name.
 *
 * @throws `KV_PLAN_INVALID` for an unknown name.
 */
export function cacheKind(name: string): CacheKind {
  const found = BY_NAME.get(name);
  if (found !== undefined) return found;
  throw invalidPlan(`the model: group kind "${name}" is none of ${cacheKindNames().join(", ")}`);
}

/** The names of all kinds: the values that `ModelGeometry.groups` may hold. */
export function cacheKindNames(): readonly string[] {
  return [...BY_NAME.keys()];
}
