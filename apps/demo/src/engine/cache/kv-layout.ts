import { createHash } from "node:crypto";
import { KvError } from "@kv/interface";

export interface KvGeometry {
  readonly layers: number;
  readonly kvHeads: number;
  readonly headDim: number;
}

export interface KvShard {
  readonly rank: number;
  readonly firstHead: number;
  readonly headCount: number;
}

/**
 * Splits KV heads over `tp` ranks as vLLM does: with more ranks than heads, each head is on several
 * consecutive ranks.
 * @throws `KV_TOPOLOGY_INVALID` when neither number divides the other.
 */
export function kvShards(kvHeads: number, tp: number): KvShard[] {
  if (tp <= kvHeads ? kvHeads % tp !== 0 : tp % kvHeads !== 0) {
    throw new KvError(
      "KV_TOPOLOGY_INVALID",
      `${kvHeads} KV heads cannot be split over ${tp} ranks: one must divide the other`,
      { details: { kvHeads, tp } },
    );
  }
  const headCount = Math.max(1, kvHeads / tp);
  return Array.from({ length: tp }, (_, rank) => ({
    rank,
    firstHead: Math.floor((rank * kvHeads) / tp),
    headCount,
  }));
}

const BYTES_PER_VALUE = 4;

export function contentBytes({ headDim }: KvGeometry): number {
  return 2 * headDim * BYTES_PER_VALUE;
}

export function kvBytes(geometry: KvGeometry, tokens: number): number {
  return geometry.layers * geometry.kvHeads * tokens * contentBytes(geometry);
}

/** Divides all usual block sizes, so that blocks that were not transferred can be left out. */
export const DIGEST_TOKENS = 16;

export function kvDigests(kv: ArrayBuffer, geometry: KvGeometry, tokens: number): string[] {
  const bytes = new Uint8Array(kv);
  const content = contentBytes(geometry);
  const digests: string[] = [];
  for (let from = 0; from < tokens; from += DIGEST_TOKENS) {
    const length = Math.min(DIGEST_TOKENS, tokens - from) * content;
    const hash = createHash("sha256");
    for (let row = 0; row < geometry.layers * geometry.kvHeads; row++) {
      const begin = (row * tokens + from) * content;
      hash.update(bytes.subarray(begin, begin + length));
    }
    digests.push(hash.digest("base64"));
  }
  return digests;
}
