/** The model that is simulated: a forward pass of 5 ms per 512 tokens, 8 KiB of KV per token in blocks of 16. */
export const FORWARD_MS_PER_512 = 5;
export const SIMULATED = { layers: 4, kvHeads: 4, headDim: 64, maxModelLen: 4096 } as const;
export const BLOCK_TOKENS = 16;
export const KV_BYTES_PER_TOKEN =
  SIMULATED.layers * SIMULATED.kvHeads * 2 * SIMULATED.headDim * Float32Array.BYTES_PER_ELEMENT;
/** Of one layer: what one descriptor moves. */
export const BLOCK_BYTES = (KV_BYTES_PER_TOKEN * BLOCK_TOKENS) / SIMULATED.layers;
