import type { CacheKind } from "./cache-kind.js";

/** Dense attention, GQA included: K and V of each head and token; all of the sequence. */
export const full: CacheKind = { name: "full", sharding: "heads", extent: "sequence" };
