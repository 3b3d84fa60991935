import { KvError } from "@kv/interface";

/** What a model keeps per token: K and V of every KV head of every layer, float32. */
export interface KvGeometry {
  readonly layers: number;
  readonly kvHeads: number;
  readonly headDim: number;
}

/** The KV heads of one tensor-parallel rank: `headCount` from `firstHead`. */
export interface KvShard {
  readonly rank: number;
  readonly firstHead: number;
  readonly headCount: number;
  /** False where an earlier rank holds the same heads: with more ranks than heads each head lives on several. */
  readonly primary: boolean;
}

/**
 * Splits KV heads over `tp` ranks as vLLM does: evenly while there are as many heads as ranks or more, and with each head on
 * `tp / heads` consecutive ranks where there are fewer. Errors: `KV_TOPOLOGY_INVALID` when neither divides the other.
 */
export function kvShards(kvHeads: number, tp: number): KvShard[] {
  if (tp <= kvHeads ? kvHeads % tp !== 0 : tp % kvHeads !== 0) {
    throw new KvError(
      "KV_TOPOLOGY_INVALID",
      `${kvHeads} KV heads cannot be split over ${tp} ranks: one must divide the other`,
      {
        details: { kvHeads, tp },
      },
    );
  }
  const headCount = Math.max(1, kvHeads / tp);
  return Array.from({ length: tp }, (_, rank) => {
    const firstHead = Math.floor((rank * kvHeads) / tp);
    const before = rank === 0 ? -1 : Math.floor(((rank - 1) * kvHeads) / tp);
    return { rank, firstHead, headCount, primary: firstHead !== before };
  });
}

const BYTES_PER_VALUE = 4;

/** Bytes of K and V of one head and token. */
export function contentBytes({ headDim }: KvGeometry): number {
  return 2 * headDim * BYTES_PER_VALUE;
}

/** Bytes of `tokens` tokens' KV over all layers and heads: the length of what crosses between model and pool. */
export function kvBytes(geometry: KvGeometry, tokens: number): number {
  return geometry.layers * geometry.kvHeads * tokens * contentBytes(geometry);
}
