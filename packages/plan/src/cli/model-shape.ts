import type { KvCacheKind } from "@kv/interface";

/** One layer's cache, before any split over ranks. */
export interface LayerShape {
  readonly name: string;
  readonly kind: KvCacheKind;
  /** 1 for MLA. */
  readonly numKvHeads: number;
  /** Bytes of one head and token: K and V, or the latent vector. */
  readonly bytesPerHeadAndToken: number;
  /** Tokens that a sliding window sees. */
  readonly windowTokens?: number;
}

/** What a plan needs to know of a model, and what of it was not said but taken to be so. */
export interface ModelShape {
  readonly name: string;
  readonly numKvHeads: number;
  readonly layers: readonly LayerShape[];
  readonly assumed: readonly string[];
}

/** Layers that share one block table. */
export interface LayerGroup {
  readonly kind: KvCacheKind;
  readonly layers: readonly LayerShape[];
}

/**
 * Groups of layers as vLLM makes them: layers of one kind and shape together, and where there are several kinds, in groups of the size of
 * the smallest, so that one region serves a layer of each group.
 */
export function groupLayers(layers: readonly LayerShape[]): readonly LayerGroup[] {
  const byShape = new Map<string, LayerShape[]>();
  for (const layer of layers) {
    const key = `${layer.kind} ${layer.numKvHeads} ${layer.bytesPerHeadAndToken} ${layer.windowTokens ?? 0}`;
    byShape.set(key, [...(byShape.get(key) ?? []), layer]);
  }
  const kinds = [...byShape.values()];
  const counts = kinds.map((same) => same.length);
  const [least, most] = [Math.min(...counts), Math.max(...counts)];
  // vLLM pads the smaller kind rather than to make many groups of nearly one size.
  const size = most < least * 1.25 ? most : least;
  return kinds.flatMap((same) =>
    Array.from({ length: Math.ceil(same.length / size) }, (_, index) => {
      const [first] = same;
      return { kind: first?.kind ?? "full", layers: same.slice(index * size, (index + 1) * size) };
    }),
  );
}
