/** The cache of one layer on one rank, with vLLM's names (0.33, `kv_cache_interface.py`). */
export type CacheSpec = AttentionSpec | MambaSpec;

/** Kinds of attention caches: vLLM's classes. */
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
  /** KV heads of the layer on all ranks together. Default 1. It is no part of vLLM's spec. */
  readonly modelKvHeads?: number;
  /** Elements of the K of a head, or of a latent. */
  readonly headSize: number;
  /** Elements of the V of a head; 0 for latents. */
  readonly headSizeV: number;
  /** Type of an element, as torch names it. */
  readonly dtype: string;
  /**
   * Bytes of K and V of a head and token, or of a latent, where elements are packed with scales.
   */
  readonly contentBytes?: number;
  /** Tokens of one latent. Default 1. */
  readonly tokensPerState?: number;
  readonly slidingWindow?: number;
  readonly attentionChunkSize?: number;
  /** Bytes of a page with its padding. */
  readonly pageSizePadded?: number;
  /** Pages are padded to multiples of these bytes. */
  readonly alignment?: number;
  /** Bytes that the stride between blocks is a multiple of. */
  readonly strideAlignment?: number;
  /** Tokens of the kernel blocks that the kernel takes, where it takes no other number. */
  readonly kernelBlock?: number;
  /** vLLM's name of the cache's type, for latents. */
  readonly cacheDtype?: string;
  /**
   * Sets caches apart that are alike in all else: an indexer's keys, the first layer of a group
   * that shares an indexer.
   */
  readonly role?: "indexer" | "index group leader";
}

/** A state that does not grow with the sequence. */
export interface MambaSpec {
  readonly class: "MambaSpec";
  /** Tokens between two states that are kept. */
  readonly blockSize: number;
  /** The convolution's state, then the recurrent one, or one of the two. */
  readonly shapes: readonly (readonly number[])[];
  readonly dtypes: readonly string[];
  /** vLLM's `mamba_type`. */
  readonly mambaType: "MAMBA1" | "MAMBA2" | "GDN_ATTN" | "SHORT_CONV" | "LINEAR";
  readonly pageSizePadded?: number;
}

const BYTES_OF_DTYPE: Readonly<Record<string, number>> = {
  float32: 4,
  bfloat16: 2,
  float16: 2,
  uint8: 1,
};

/** Bytes of an element of a torch type. 0 for an unknown one. */
export function dtypeBytes(dtype: string): number {
  return BYTES_OF_DTYPE[dtype] ?? 0;
}

/** Bytes of K and V of one head and token, or of one latent. */
export function cellBytes(spec: AttentionSpec): number {
  return spec.contentBytes ?? (spec.headSize + spec.headSizeV) * dtypeBytes(spec.dtype);
}

/** Bytes of the parts of a state: the convolution's, and the recurrent one. */
export function stateBytes({
  shapes,
  dtypes,
}: Pick<MambaSpec, "shapes" | "dtypes">): readonly number[] {
  return shapes.map(
    (shape, index) =>
      shape.reduce((product, size) => product * size, 1) * dtypeBytes(dtypes[index] ?? ""),
  );
}

/** Bytes of a page without padding. */
export function unpaddedPageBytes(spec: CacheSpec): number {
  if (spec.class === "MambaSpec") return stateBytes(spec).reduce((sum, bytes) => sum + bytes, 0);
  const cells = Math.floor(spec.blockSize / (spec.tokensPerState ?? 1));
  return spec.numKvHeads * cells * cellBytes(spec);
}

/** Bytes of a page: of one block of one layer. */
export function pageBytes(spec: CacheSpec): number {
  if (spec.pageSizePadded !== undefined) return spec.pageSizePadded;
  const bytes = unpaddedPageBytes(spec);
  const alignment = spec.class === "MambaSpec" ? 1 : (spec.alignment ?? 1);
  return Math.ceil(bytes / alignment) * alignment;
}

/** Bytes that the stride between the blocks of a layer is a multiple of. */
export function strideAlignment(spec: CacheSpec): number {
  if (spec.class === "MambaSpec") return 1;
  if (spec.strideAlignment !== undefined) return spec.strideAlignment;
  if (spec.kernelBlock === undefined) return 1;
  const kernel = greatestCommonDivisor(spec.kernelBlock, spec.blockSize);
  return kernel === spec.blockSize ? 1 : pageBytes({ ...spec, blockSize: kernel });
}

/** Whether two layers have one cache shape: vLLM groups them together then. */
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
