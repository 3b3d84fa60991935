import { KvError } from "@kv/interface";
import type { CacheKind } from "./cache-kind.js";
import { mamba } from "./mamba.js";

/** The kinds of KV cache that plans know. Only a kind whose blocks are not heads and tokens has a file of its own. */
const KINDS: readonly CacheKind[] = [
  // Dense attention, GQA included: K and V of each head and token, for the whole sequence.
  { name: "full", sharding: "heads", extent: "sequence" },
  // One latent vector per token, the same on every rank. The indexer keys of sparse MLA are of this kind too, in regions of their own.
  { name: "mla", sharding: "replicated", extent: "sequence" },
  // Sliding-window attention: as dense attention, but only the end of the sequence is kept and moved.
  { name: "swa", sharding: "heads", extent: "window" },
  // MLA with a sliding window (vLLM 0.33: `SlidingWindowMLASpec`).
  { name: "swa-mla", sharding: "replicated", extent: "window" },
  mamba,
  // Circular scratch, the buffer of a compressor (vLLM 0.33: `CircularBufferSpec`): blocks that stand for no fixed tokens, in regions of
  // their own. They are moved whole and never zeroed.
  { name: "circular", sharding: "replicated", extent: "whole" },
];

const BY_NAME: ReadonlyMap<string, CacheKind> = new Map(KINDS.map((kind) => [kind.name, kind]));

/** The kind with this name. Errors: `KV_PLAN_INVALID` for an unknown name. */
export function cacheKind(name: string): CacheKind {
  const found = BY_NAME.get(name);
  if (found !== undefined) return found;
  throw new KvError(
    "KV_PLAN_INVALID",
    `the model: group kind "${name}" is none of ${cacheKindNames().join(", ")}`,
  );
}

/** The names of all kinds: the values that `ModelGeometry.groups` may hold. */
export function cacheKindNames(): readonly string[] {
  return [...BY_NAME.keys()];
}
