import type { KvCacheKind } from "@kv/interface";

/** One layer's cache, before any split over ranks. */
export interface LayerShape {
  readonly name: string;
  /** Number of the model's layer that it belongs to. */
  readonly layer: number;
  readonly kind: KvCacheKind;
  /** 1 for MLA. */
  readonly numKvHeads: number;
  /** Bytes of a cell: K and V of one head and token, or a latent vector. */
  readonly bytesPerHeadAndToken: number;
  /** Bytes of a cell without its scale, where a block holds the scales of all cells after the last cell: such a block cannot be cut. */
  readonly unscaledBytes?: number;
  /** Tokens of a cell, for compressed latents. Default 1. */
  readonly tokensPerCell?: number;
  /** Tokens in a block of this cache, where its kernel requires that number. */
  readonly blockTokens?: number;
  /** Tokens of a sliding window. */
  readonly windowTokens?: number;
  /** Of a state-space layer: bytes of the whole model's state. */
  readonly state?: StateShape;
}

/** A state-space layer's state, before it is split over ranks. */
export interface StateShape {
  /** x, B and C of the convolution. */
  readonly projectionBytes: readonly number[];
  readonly recurrentBytes: number;
  /** Groups of B and C. Whole groups are split over ranks. */
  readonly groups: number;
}

/** The facts of a model that a plan needs, and the assumptions among them. */
export interface ModelShape {
  readonly name: string;
  readonly numKvHeads: number;
  readonly layers: readonly LayerShape[];
  /** All layers, with and without a cache. Pipeline stages divide them. */
  readonly numLayers: number;
  readonly assumed: readonly string[];
  /** The default number of tokens in a block, where it is not 16. */
  readonly blockTokens?: number;
  /** Type of the cache, which decides whether its blocks can be cut. Default "auto". */
  readonly cacheDtype?: string;
}

/** Layers that share one block table. */
export interface LayerGroup {
  readonly kind: KvCacheKind;
  readonly layers: readonly LayerShape[];
}

/** Layers by kind and shape. Latents of different sizes are one shape, since every layer has a region of its own. */
export function layersByShape(layers: readonly LayerShape[]): readonly LayerGroup[] {
  const byShape = new Map<string, LayerShape[]>();
  for (const layer of layers) {
    const isLatent = layer.kind === "mla" || layer.kind === "swa-mla";
    const size = isLatent ? "" : `${layer.numKvHeads} ${layer.bytesPerHeadAndToken}`;
    const key = `${layer.kind} ${size} ${layer.windowTokens ?? 0} ${layer.blockTokens ?? 0}`;
    byShape.set(key, [...(byShape.get(key) ?? []), layer]);
  }
  return [...byShape.values()].map((same) => ({ kind: same[0]?.kind ?? "full", layers: same }));
}

/**
 * Groups of layers as vLLM builds them: layers of one kind and shape together. Where there are several kinds, groups have the size of the smallest kind, so
 * that one region serves a layer of each group.
 */
export function groupLayers(layers: readonly LayerShape[]): readonly LayerGroup[] {
  const kinds = layersByShape(layers);
  const counts = kinds.map(({ layers: same }) => same.length);
  const [least, most] = [Math.min(...counts), Math.max(...counts)];
  // vLLM pads the smaller kind rather than to make many groups of nearly one size.
  const size = most < least * 1.25 ? most : least;
  return kinds.flatMap(({ kind, layers: same }) =>
    Array.from({ length: Math.ceil(same.length / size) }, (_, index) => ({
      kind,
      layers: same.slice(index * size, (index + 1) * size),
    })),
  );
}
