import type { CacheKind } from "./cache-kind.js";

/** MLA with a sliding window (vLLM 0.33: `SlidingWindowMLASpec`). */
export const swaMla: CacheKind = { name: "swa-mla", sharding: "replicated", extent: "window" };
