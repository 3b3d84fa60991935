import type { CacheKind } from "@kv/plan";

export const chunked: CacheKind = { name: "chunked", sharding: "heads", extent: "sequence" };

export default chunked;
