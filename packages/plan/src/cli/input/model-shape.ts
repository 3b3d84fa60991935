import type { KvCacheKind } from "@kv/interface";

/** One layer's cache, before any split over ranks. */
export interface LayerShape {
  readonly name: string;
  /** Number of the model's layer that it belongs to. */
  readonly layer: number;
  readonly kind: KvCacheKind;
  /** 1 for MLA. */
  readonly numKvHeads: number;
  /** Bytes of a cell: K and V of one head and token, or the latent vector. */
  readonly bytesPerHeadAndToken: number;
  /** Tokens that a cell stands for, of compressed latents. Default 1. */
  readonly tokensPerCell?: number;
  /** Tokens in a block of this cache, where its kernel wants so many and no others. */
  readonly blockTokens?: number;
  /** Tokens that a sliding window sees. */
  readonly windowTokens?: number;
  /** Of a state-space layer: bytes of the whole model's state. */
  readonly state?: StateShape;
}

/** A state-space layer's state, before it is split over ranks. */
export interface StateShape {
  /** x, B and C of the convolution. */
  readonly projectionBytes: readonly number[];
  readonly recurrentBytes: number;
  /** B and C come in so many groups, which are split over ranks; no rank has a part of one. */
  readonly groups: number;
}

/** What a plan needs to know of a model, and what of it was not said but taken to be so. */
export interface ModelShape {
  readonly name: string;
  readonly numKvHeads: number;
  readonly layers: readonly LayerShape[];
  /** All of its layers, with a cache or without: what pipeline stages divide among them. */
  readonly numLayers: number;
  readonly assumed: readonly string[];
  /** Tokens in a block with which engines run it, where that is not 16. */
  readonly blockTokens?: number;
}

/** Layers that share one block table. */
export interface LayerGroup {
  readonly kind: KvCacheKind;
  readonly layers: readonly LayerShape[];
}

/** Layers of one kind and shape; latents of unlike sizes are one shape, for every layer has a region of its own anyway. */
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
 * Groups of layers as vLLM makes them: layers of one kind and shape together, and where there are several kinds, in groups of the size of
 * the smallest, so that one region serves a layer of each group.
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
