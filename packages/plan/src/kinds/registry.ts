import type { KvCacheKind } from "@kv/interface";
import { invalidPlan } from "../errors.js";
import type { CacheKind } from "./cache-kind.js";
import { mamba } from "./mamba.js";

const SHARDINGS: readonly CacheKind["sharding"][] = ["heads", "replicated", "state"];
const EXTENTS: readonly CacheKind["extent"][] = ["sequence", "window", "state", "whole"];

/** Only a kind whose blocks are not heads and tokens has its own file. */
const KINDS: readonly CacheKind[] = [
  // Dense attention, GQA included.
  { name: "full", sharding: "heads", extent: "sequence" },
  // One latent vector per token; also the indexer keys of sparse MLA, in regions of their own.
  { name: "mla", sharding: "replicated", extent: "sequence" },
  // Sliding-window attention: only the end of the sequence is kept and moved.
  { name: "swa", sharding: "heads", extent: "window" },
  // MLA with a sliding window (vLLM 0.33: `SlidingWindowMLASpec`).
  { name: "swa-mla", sharding: "replicated", extent: "window" },
  mamba,
  // A compressor's circular buffer (vLLM 0.33: `CircularBufferSpec`), without fixed tokens: blocks
  // move whole and are never zeroed.
  { name: "circular", sharding: "replicated", extent: "whole" },
];

const BY_NAME = new Map<string, CacheKind>(KINDS.map((kind) => [kind.name, kind]));

/**
 * Adds a kind of cache for plans of this process; the same object again changes nothing. Proofs
 * also need `registerCacheSemantics` of `@kv/plan/prove`.
 *
 * @throws `KV_PLAN_INVALID` for a taken name or an invalid kind.
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
 * Returns the kind with this name.
 *
 * @throws `KV_PLAN_INVALID` for an unknown name.
 */
export function cacheKind(name: string): CacheKind {
  const found = BY_NAME.get(name);
  if (found !== undefined) return found;
  throw invalidPlan(`the model: group kind "${name}" is none of ${cacheKindNames().join(", ")}`);
}

export function cacheKindNames(): readonly string[] {
  return [...BY_NAME.keys()];
}

/**
 * Whether two engines may group a model's layers differently: every group holds tokens, equal on
 * every rank.
 *
 * @throws `KV_PLAN_INVALID` for an unknown kind.
 */
export function joinsGroups(groups: readonly KvCacheKind[]): boolean {
  return groups.every((name) => {
    const { sharding, extent } = cacheKind(name);
    return sharding === "replicated" && extent !== "whole";
  });
}
