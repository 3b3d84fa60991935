import type { LayerShape } from "./model-shape.js";

/** The fields of a config that describe the caches of DeepSeek V4. */
export interface CompressedConfig {
  readonly layers: number;
  /** By layer: 0 or 1 for a window alone, otherwise the tokens of one latent. */
  readonly ratios: readonly number[];
  readonly headSize: number;
  readonly indexHeadSize: number;
  readonly windowTokens: number;
  /** Bytes of a latent: of `headSize` elements, or packed with its scales. */
  readonly latentBytes: number;
}

/** Tokens in a block of compressed latents; the other kernels have sizes of their own. */
export const COMPRESSED_BLOCK_TOKENS = 256;
const WINDOW_BLOCK_TOKENS = 64;
const STATE_ELEMENT_BYTES = 4;

/** FP8 keys of an indexer with a float32 scale for each 128 of them. */
export function indexerBytes(headSize: number): number {
  return headSize + Math.ceil(headSize / 128) * 4;
}

/**
 * The caches of DeepSeek V4, layer by layer, as vLLM 0.33 allocates them (`deepseek_v4/attention.py`, `compressor.py`, `DeepseekV4SWACache`): a window of
 * plain latents everywhere; latents of 4 or 128 tokens with the compressor's running state, itself a window; with ratio 4 an indexer's keys
 * and its compressor.
 */
export function compressedLayers(config: CompressedConfig): readonly LayerShape[] {
  return Array.from({ length: config.layers }, (_, index) => config.ratios[index] ?? 0).flatMap(
    (ratio, index): LayerShape[] => {
      const at = `model.layers.${index}.attn`;
      const window: LayerShape = {
        name: `${at}.swa_cache`,
        layer: index,
        kind: "swa-mla",
        numKvHeads: 1,
        bytesPerHeadAndToken: config.latentBytes,
        blockTokens: WINDOW_BLOCK_TOKENS,
        windowTokens: config.windowTokens,
      };
      if (ratio <= 1) return [window];
      const latent = (name: string, bytes: number): LayerShape => ({
        name,
        layer: index,
        kind: "mla",
        numKvHeads: 1,
        bytesPerHeadAndToken: bytes,
        tokensPerCell: ratio,
      });
      // Overlapping windows of two latents where the ratio is 4.
      const spans = ratio === 4 ? 2 : 1;
      const state = (name: string, headSize: number): LayerShape => ({
        name,
        layer: index,
        kind: "swa-mla",
        numKvHeads: 1,
        bytesPerHeadAndToken: 2 * spans * headSize * STATE_ELEMENT_BYTES,
        blockTokens: ratio === 4 ? 4 : 8,
        windowTokens: spans * ratio,
      });
      const own = [
        window,
        latent(at, config.latentBytes),
        state(`${at}.compressor.state_cache`, config.headSize),
      ];
      if (ratio !== 4) return own;
      return [
        ...own,
        {
          ...latent(`${at}.indexer.k_cache`, indexerBytes(config.indexHeadSize)),
          unscaledBytes: config.indexHeadSize,
        },
        state(`${at}.indexer.compressor.state_cache`, config.indexHeadSize),
      ];
    },
  );
}
