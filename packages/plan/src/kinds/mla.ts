import type { CacheKind } from "./cache-kind.js";

/** One latent vector per token, the same on every rank; DSA's indexer keys are of the same kind, in regions of their own. */
export const mla: CacheKind = { name: "mla", sharding: "replicated", extent: "sequence" };
