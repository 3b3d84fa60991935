import { type KvCacheLayout, KvError } from "@kv/interface";
import { type CacheSpec, pageBytes, specKey } from "./cache-spec.js";
import { OTHER_WAYS } from "./config-fields.js";

/** One layer's cache, in the order of vLLM's model. */
export interface LayerCache {
  readonly name: string;
  readonly layer: number;
  readonly spec: CacheSpec;
}

/** Layers that share one block table. */
export interface CacheGroup {
  readonly layers: readonly LayerCache[];
  /** Tokens in a block. */
  readonly blockSize: number;
}

/**
 * vLLM sizes groups by the kind with most layers if these are fewer than this many times the least.
 */
const PADDING_THRESHOLD = 1.5;

/**
 * As vLLM 0.33 builds them (`kv_cache_planning.py`, `get_kv_cache_groups`). Smaller pages get more
 * tokens per block, or padding. With blocks outermost, pages of any size lie side by side.
 * @throws `KV_PLAN_UNSUPPORTED` where pages cannot be made equal.
 */
export function groupLayers(
  layers: readonly LayerCache[],
  layout: KvCacheLayout,
): readonly CacheGroup[] {
  const [first] = layers;
  if (first === undefined) return [];
  if (layers.every(({ spec }) => specKey(spec) === specKey(first.spec))) return [groupOf(layers)];
  if (isUniform(layers)) return [groupOf(layers)];
  if (isBlockOutermost(layout) && new Set(layers.map(({ spec }) => pageBytes(spec))).size > 1)
    return packedGroups(layers);
  return equalPages(withEqualPages(layers));
}

/** Whether a block of all layers is one piece of memory. */
export function isBlockOutermost(layout: KvCacheLayout): boolean {
  return layout.startsWith("B");
}

function groupOf(layers: readonly LayerCache[]): CacheGroup {
  return { layers, blockSize: layers[0]?.spec.blockSize ?? 0 };
}

/** One block table serves layers that need equally many token slots. */
function isUniform(layers: readonly LayerCache[]): boolean {
  return new Set(layers.map(({ spec }) => `${spec.blockSize} ${slotsKey(spec)}`)).size === 1;
}

function slotsKey(spec: CacheSpec): string {
  if (spec.class === "MambaSpec") return `state ${pageBytes(spec)}`;
  if (spec.class === "FullAttentionSpec" || spec.class === "MLAAttentionSpec") return "full";
  return `${spec.class} ${spec.slidingWindow ?? 0} ${spec.attentionChunkSize ?? 0}`;
}

/** Gives blocks more tokens where sizes divide, else padding. */
function withEqualPages(layers: readonly LayerCache[]): readonly LayerCache[] {
  const largest = Math.max(...layers.map(({ spec }) => pageBytes(spec)));
  return layers.map((layer) => {
    const { spec } = layer;
    const bytes = pageBytes(spec);
    if (bytes === largest) return layer;
    if (spec.class === "MambaSpec") return { ...layer, spec: { ...spec, pageSizePadded: largest } };
    if (largest % bytes === 0)
      return { ...layer, spec: { ...spec, blockSize: spec.blockSize * (largest / bytes) } };
    if (spec.class !== "MLAAttentionSpec")
      return { ...layer, spec: { ...spec, pageSizePadded: largest } };
    throw new KvError(
      "KV_PLAN_UNSUPPORTED",
      `${layer.name}: latents in pages of ${bytes} bytes beside pages of ${largest} bytes: vLLM cannot make them equal`,
    );
  });
}

/** Groups of equal length, so that one page serves a layer of each group. */
function equalPages(layers: readonly LayerCache[]): readonly CacheGroup[] {
  const buckets = [...bucketsBy(layers, ({ spec }) => specKey(spec)).values()];
  const counts = buckets.map((bucket) => bucket.length);
  const [least, most] = [Math.min(...counts), Math.max(...counts)];
  const size = most < least * PADDING_THRESHOLD ? most : least;
  return buckets.flatMap((bucket) =>
    everyNth(bucket, Math.ceil(bucket.length / size)).map(groupOf),
  );
}

/** Layers of unequal pages share a block: groups of whole repetitions of the layers' pattern. */
function packedGroups(layers: readonly LayerCache[]): readonly CacheGroup[] {
  const buckets = [
    ...bucketsBy(layers, ({ spec }) => `${spec.blockSize} ${slotsKey(spec)}`).values(),
  ].map((bucket) => {
    const bySize = [...bucketsBy(bucket, ({ spec }) => String(pageBytes(spec))).values()];
    const isBalanced = new Set(bySize.map((same) => same.length)).size === 1;
    return { bucket, bySize, isBalanced, repeats: Math.max(...bySize.map((same) => same.length)) };
  });
  const balanced = buckets.filter(({ isBalanced }) => isBalanced);
  const least = Math.max(
    0,
    ...balanced.filter(({ bySize }) => bySize.length > 1).map(({ repeats }) => repeats),
  );
  if (least === 0)
    throw new KvError(
      "KV_PLAN_UNSUPPORTED",
      "pages of unlike sizes in packed blocks, and no layers that repeat with one page of each size: how vLLM groups them is not known here",
      { hint: `leave --layout out, or ${OTHER_WAYS}` },
    );
  const size = chunkWithLeastPadding(
    balanced.map(({ repeats }) => repeats),
    least,
  );
  return buckets.flatMap(({ bucket, bySize, isBalanced, repeats }) => {
    const count = isBalanced ? Math.ceil(repeats / size) : 1;
    if (count === 1) return [groupOf(bucket)];
    const patterns = Array.from({ length: repeats }, (_, index) =>
      bySize.flatMap((same) => same[index] ?? []),
    );
    return everyNth(patterns, count).map((some) => groupOf(some.flat()));
  });
}

/** The chunk size with the least padding of all counts; the largest of several. */
function chunkWithLeastPadding(counts: readonly number[], least: number): number {
  let best = least;
  let bestPadding = Number.POSITIVE_INFINITY;
  for (let size = least; size <= Math.max(least, ...counts); size++) {
    const padding = counts.reduce(
      (sum, count) => sum + (Math.ceil(count / size) * size - count),
      0,
    );
    if (padding > bestPadding) continue;
    [best, bestPadding] = [size, padding];
  }
  return best;
}

function everyNth<T>(items: readonly T[], count: number): readonly (readonly T[])[] {
  return Array.from({ length: count }, (_, start) =>
    items.filter((_item, index) => index % count === start),
  );
}

/** Keeps the order of each key's first item. */
export function bucketsBy<T, K>(
  items: readonly T[],
  keyOf: (item: T) => K,
): ReadonlyMap<K, readonly T[]> {
  const buckets = new Map<K, T[]>();
  for (const item of items) {
    const key = keyOf(item);
    const bucket = buckets.get(key);
    if (bucket === undefined) buckets.set(key, [item]);
    else bucket.push(item);
  }
  return buckets;
}
