import { type CacheSpec, leastCommonMultiple, pageBytes, specKey, strideAlignment } from "./cache-spec.js";
import type { CacheGroup, LayerCache } from "./kv-cache-groups.js";

/** The place of the caches of some layers in the one allocation: layer `l` of block `b` begins at `offsetBytes + l * layerStride + b * blockStride`. Groups may share bytes. */
export interface CacheTensor {
  readonly layers: readonly LayerCache[];
  readonly offsetBytes: number;
  readonly layerStrideBytes: number;
  readonly blockStrideBytes: number;
}

/** Bytes of one block id over all layers (vLLM 0.33: `_get_kv_cache_bytes_per_block`). */
export function bytesPerBlock(groups: readonly CacheGroup[], isBlockOutermost: boolean): number {
  const specs = groups.flatMap(({ layers }) => layers.map(({ spec }) => spec));
  const widest = (bytes: (spec: CacheSpec) => number) =>
    Math.max(0, ...groups.map(({ layers }) => layers.reduce((sum, { spec }) => sum + bytes(spec), 0)));
  if (!isBlockOutermost) return widest(stridedPageBytes);
  return roundUp(widest(pageBytes), specs.map(strideAlignment).reduce(leastCommonMultiple, 1));
}

/** Where the caches lie for a number of blocks (vLLM 0.33: `get_kv_cache_config_from_groups`). */
export function placeCaches(
  groups: readonly CacheGroup[],
  isBlockOutermost: boolean,
  numBlocks: number,
): readonly CacheTensor[] {
  const interleaved = isBlockOutermost ? bytesPerBlock(groups, true) : undefined;
  return groups.flatMap(({ layers }) => {
    let offsetBytes = 0;
    return bySpec(layers).map((same): CacheTensor => {
      const spec = same[0]?.spec as CacheSpec;
      const page = pageBytes(spec);
      const blockStrideBytes = interleaved ?? stridedPageBytes(spec);
      const layerStrideBytes = isBlockOutermost ? page : numBlocks * blockStrideBytes;
      const placed = { layers: same, offsetBytes, layerStrideBytes, blockStrideBytes };
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

function bySpec(layers: readonly LayerCache[]): readonly (readonly LayerCache[])[] {
  const found = new Map<string, LayerCache[]>();
  for (const layer of layers) {
    const key = specKey(layer.spec);
    found.set(key, [...(found.get(key) ?? []), layer]);
  }
  return [...found.values()];
}
