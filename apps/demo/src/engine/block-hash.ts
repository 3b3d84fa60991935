import { createHash } from "node:crypto";

/** Identifies the content of a full block: its tokens and, through the parent's hash, all tokens before them. */
export type BlockHash = string;

/**
 * Hashes of the full blocks of a prompt, each chained to the one before, so that equal hashes mean equal prefixes (the idea
 * of vLLM's prefix cache). Tokens of an incomplete last block have no hash.
 */
export function blockHashes(tokens: ArrayLike<number>, blockSize: number): BlockHash[] {
  const hashes: BlockHash[] = [];
  let parent = "";
  for (let end = blockSize; end <= tokens.length; end += blockSize) {
    const block = Int32Array.from({ length: blockSize }, (_, i) => tokens[end - blockSize + i] ?? 0);
    parent = createHash("sha256").update(parent).update(block).digest("base64");
    hashes.push(parent);
  }
  return hashes;
}
