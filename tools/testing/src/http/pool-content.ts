import { blockHashes, offloadKey } from "@kv/tier";

/** The tokens of a prompt of which `poolContent` has blocks. */
export const POOL_PROMPT: readonly number[] = Array.from({ length: 160 }, (_, at) => at);
export const POOL_PEER = "10.0.0.9:5710";
export const POOL_BLOCK_SIZE = 16;

/** What `GET /blocks` of a `kv-pool` answers that has the first `blocks` blocks of `POOL_PROMPT`. */
export function poolContent(blocks: number, { perChunk = 1 } = {}) {
  const hashing = { blockSize: POOL_BLOCK_SIZE, algorithm: "sha256_cbor", seed: "7" } as const;
  const changes = blockHashes(POOL_PROMPT, hashing)
    .slice(0, blocks)
    .filter((_, at) => (at + 1) % perChunk === 0)
    .map((hash) => `+${Buffer.from(offloadKey(hash)).toString("base64")}`);
  return {
    peer_id: POOL_PEER,
    draining: false,
    hash_seed: hashing.seed,
    hash_algorithm: hashing.algorithm,
    block_size: POOL_BLOCK_SIZE,
    blocks_per_chunk: perChunk,
    epoch: `${blocks}`,
    next: changes.length,
    more: false,
    changes,
  };
}
