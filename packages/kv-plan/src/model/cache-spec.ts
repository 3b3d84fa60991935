/** A layer's cache on one rank, in vLLM's terms (0.33, `kv_cache_interface.py`). */
export type CacheSpec = AttentionSpec | MambaSpec;

/** vLLM's classes of attention caches. */
export type AttentionClass =
  | "FullAttentionSpec"
  | "SlidingWindowSpec"
  | "ChunkedLocalAttentionSpec"
  | "CrossAttentionSpec"
  | "MLAAttentionSpec"
  | "SlidingWindowMLASpec";

/** K and V of each head and token, or a latent vector. */
export interface AttentionSpec {
  readonly class: AttentionClass;
  /** Tokens in a block. */
  readonly blockSize: number;
  /** KV heads of the rank; 1 for latents. */
  readonly numKvHeads: number;
  /** KV heads of the layer over all ranks (default 1). vLLM's spec lacks it. */
  readonly modelKvHeads?: number;
  /** Elements of a head's K, or of a latent. */
  readonly headSize: number;
  /** Elements of a head's V; 0 for latents. */
  readonly headSizeV: number;
  /** Torch's name of the element type. */
  readonly dtype: string;
  /** Bytes of K and V of a head and token, or of a latent, where scales are packed in. */
  readonly contentBytes?: number;
  /** Tokens of one latent. Default 1. */
  readonly tokensPerState?: number;
  readonly slidingWindow?: number;
  readonly attentionChunkSize?: number;
  readonly pageSizePadded?: number;
  /** Bytes of which a padded page is a multiple. */
  readonly alignment?: number;
  /** Bytes of which the block stride is a multiple. */
  readonly strideAlignment?: number;
  /** The only block size that the kernel takes, in tokens. */
  readonly kernelBlock?: number;
  /** vLLM's name of a latent cache's type. */
  readonly cacheDtype?: string;
  /**
   * Tells apart otherwise equal caches: an indexer's keys, the first layer of a group with a shared
   * indexer.
   */
  readonly role?: "indexer" | "index group leader";
}

/** A state that does not grow with the sequence. */
export interface MambaSpec {
  readonly class: "MambaSpec";
  /** Tokens between two kept states. */
  readonly blockSize: number;
  /** The convolution's state, then the recurrent one, or only one of them. */
  readonly shapes: readonly (readonly number[])[];
  readonly dtypes: readonly string[];
  /** vLLM's `mamba_type`. */
  readonly mambaType: "MAMBA1" | "MAMBA2" | "GDN_ATTN" | "SHORT_CONV" | "LINEAR";
  /** Blocks of a request that a prefill fills with checkpoints, with prefix caching (default 0). */
  readonly checkpointBlocks?: number;
  readonly pageSizePadded?: number;
}

const BYTES_OF_DTYPE: Readonly<Record<string, number>> = {
  float32: 4,
  bfloat16: 2,
  float16: 2,
  uint8: 1,
};

/** Returns 0 for an unknown type. */
export function dtypeBytes(dtype: string): number {
  return BYTES_OF_DTYPE[dtype] ?? 0;
}

/** Bytes of one head's and token's K and V, or of one latent. */
export function cellBytes(spec: AttentionSpec): number {
  return spec.contentBytes ?? (spec.headSize + spec.headSizeV) * dtypeBytes(spec.dtype);
}

/** Returns bytes of the convolution's state and of the recurrent one. */
export function stateBytes({
  shapes,
  dtypes,
}: Pick<MambaSpec, "shapes" | "dtypes">): readonly number[] {
  return shapes.map(
    (shape, index) =>
      shape.reduce((product, size) => product * size, 1) * dtypeBytes(dtypes[index] ?? ""),
  );
}

export function unpaddedPageBytes(spec: CacheSpec): number {
  if (spec.class === "MambaSpec") return stateBytes(spec).reduce((sum, bytes) => sum + bytes, 0);
  const cells = Math.floor(spec.blockSize / (spec.tokensPerState ?? 1));
  return spec.numKvHeads * cells * cellBytes(spec);
}

export function pageBytes(spec: CacheSpec): number {
  if (spec.pageSizePadded !== undefined) return spec.pageSizePadded;
  const bytes = unpaddedPageBytes(spec);
  const alignment = spec.class === "MambaSpec" ? 1 : (spec.alignment ?? 1);
  return Math.ceil(bytes / alignment) * alignment;
}

export function strideAlignment(spec: CacheSpec): number {
  if (spec.class === "MambaSpec") return 1;
  if (spec.strideAlignment !== undefined) return spec.strideAlignment;
  if (spec.kernelBlock === undefined) return 1;
  const kernel = greatestCommonDivisor(spec.kernelBlock, spec.blockSize);
  return kernel === spec.blockSize ? 1 : pageBytes({ ...spec, blockSize: kernel });
}

/** vLLM groups layers whose keys are equal. */
export function specKey(spec: CacheSpec): string {
  const fields = Object.entries(spec).filter(([name]) => name !== "modelKvHeads");
  return JSON.stringify(fields.sort(([one], [other]) => (one < other ? -1 : 1)));
}

function greatestCommonDivisor(one: number, other: number): number {
  return other === 0 ? one : greatestCommonDivisor(other, one % other);
}

export function leastCommonMultiple(one: number, other: number): number {
  return (one / greatestCommonDivisor(one, other)) * other;
}
