import { createHash } from "node:crypto";
import { contentBytes, type KvGeometry } from "./kv-shard.js";

/** Tokens under one digest: a divisor of all usual block sizes, so that a part that was not transferred can be left out. */
export const DIGEST_TOKENS = 16;

/** SHA-256 of each `DIGEST_TOKENS` tokens of KV that lies as `[layer][KV head][token][2 * headDim]`; the last may be of fewer. */
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
