import { readFileSync } from "node:fs";
import { gunzipSync } from "node:zlib";
import { TINY } from "./tiny-peer.js";

export const RECORDED_TOKENS = 100;
/** The rest of the last block is not part of the prompt. */
export const RECORDED_FULL_BLOCKS = Math.floor(RECORDED_TOKENS / TINY.blockSize);

const HEAD_BYTES = TINY.blockSize * TINY.contentBytes;
const BLOCK_BYTES = TINY.kvHeads * HEAD_BYTES;
const BLOCKS = Math.ceil(RECORDED_TOKENS / TINY.blockSize);

// Not a Buffer: its `slice` shares memory.
const bytes = new Uint8Array(
  gunzipSync(readFileSync(new URL("./fixtures/kv-100-tokens.bin.gz", import.meta.url))),
);

export function recordedHeads(
  layer: number,
  nthBlock: number,
  { first, count }: { first: number; count: number },
): Uint8Array {
  const begin = (layer * BLOCKS + nthBlock) * BLOCK_BYTES + first * HEAD_BYTES;
  return bytes.subarray(begin, begin + count * HEAD_BYTES);
}
