import type { KvCacheLayout } from "@kv/interface";
import {
  type CacheSpec,
  leastCommonMultiple,
  pageBytes,
  specKey,
  strideAlignment,
} from "./cache-spec.js";
import {
  bucketsBy,
  type CacheGroup,
  isBlockOutermost,
  type LayerCache,
} from "./kv-cache-groups.js";

/**
 * Layer `l` of block `b` begins at `offsetBytes + l * layerStride + b * blockStride` in the one
 * allocation. Groups may share bytes.
 */
export interface CacheTensor {
  readonly group: number;
  readonly layers: readonly LayerCache[];
  readonly offsetBytes: number;
  readonly layerStrideBytes: number;
  readonly blockStrideBytes: number;
}

/** Counts all layers (vLLM 0.33: `_get_kv_cache_bytes_per_block`). */
export function bytesPerBlock(groups: readonly CacheGroup[], layout: KvCacheLayout): number {
  const specs = groups.flatMap(({ layers }) => layers.map(({ spec }) => spec));
  const widest = (bytes: (spec: CacheSpec) => number) =>
    Math.max(
      0,
      ...groups.map(({ layers }) => layers.reduce((sum, { spec }) => sum + bytes(spec), 0)),
    );
  if (!isBlockOutermost(layout)) return widest(stridedPageBytes);
  return roundUp(widest(pageBytes), specs.map(strideAlignment).reduce(leastCommonMultiple, 1));
}

/** Places caches as vLLM 0.33 does (`get_kv_cache_config_from_groups`). */
export function placeCaches(
  { groups, layout }: { readonly groups: readonly CacheGroup[]; readonly layout: KvCacheLayout },
  numBlocks: number,
): readonly CacheTensor[] {
  const interleaved = isBlockOutermost(layout) ? bytesPerBlock(groups, layout) : undefined;
  return groups.flatMap(({ layers }, group) => {
    let offsetBytes = 0;
    return [...bucketsBy(layers, ({ spec }) => specKey(spec)).values()].map((same): CacheTensor => {
      const spec = same[0]?.spec as CacheSpec;
      const page = pageBytes(spec);
      const blockStrideBytes = interleaved ?? stridedPageBytes(spec);
      const layerStrideBytes = interleaved !== undefined ? page : numBlocks * blockStrideBytes;
      const placed = { group, layers: same, offsetBytes, layerStrideBytes, blockStrideBytes };
      offsetBytes += same.length * layerStrideBytes;
      return placed;
    });
  });
}

function stridedPageBytes(spec: CacheSpec): number {
  return roundUp(pageBytes(spec), strideAlignment(spec));
}

function roundUp(bytes: number, alignment: number): number {
  return Math.ceil(bytes / alignment) * alignment;
}
