import type { RequestBlocks } from "@kv/plan";
import type { CacheReport, KindReport } from "./report.js";

/** The kinds of a model's caches on one rank, the largest share of the request first. `blocks`: of the sample request. */
export function kindReports(caches: readonly CacheReport[], blocks: RequestBlocks): readonly KindReport[] {
  const kinds = new Map<string, KindReport>();
  for (const cache of caches) {
    const name = nameOf(cache);
    const bytes = cache.layers * cache.usedBytes;
    const before = kinds.get(name) ?? { name, layers: 0, blockBytes: 0, requestBytes: 0 };
    kinds.set(name, {
      name,
      layers: before.layers + cache.layers,
      blockBytes: before.blockBytes + bytes,
      requestBytes: before.requestBytes + bytes * (blocks.localBlockIds[cache.group]?.length ?? 0),
    });
  }
  return [...kinds.values()].sort((one, other) => other.requestBytes - one.requestBytes);
}

/** What a layer keeps, in words. Errors: none: an unknown class has its own name. */
function nameOf({ class: kind, windowTokens, headSize, dtypes }: CacheReport): string {
  const window = windowTokens === null ? "" : ` of ${windowTokens} tokens`;
  switch (kind) {
    case "FullAttentionSpec":
      return "full attention";
    case "SlidingWindowSpec":
      return `windows${window}`;
    case "ChunkedLocalAttentionSpec":
      return `chunks${window}`;
    case "MLAAttentionSpec":
      return `latents of ${headSize} ${dtypes[0] === "uint8" ? "bytes" : "elements"}`;
    case "SlidingWindowMLASpec":
      return `latents in windows${window}`;
    case "MambaSpec":
      return "states";
    default:
      return kind;
  }
}
