import type { CacheKind } from "./cache-kind.js";

/** Sliding window attention: as dense, but only the window's end is kept and moved. */
export const swa: CacheKind = { name: "swa", sharding: "heads", extent: "window" };
