import type { CacheKind } from "./cache-kind.js";

/**
 * Circular scratch (vLLM 0.33: `CircularBufferSpec`, the buffer of a compressor): blocks that stand for no fixed tokens, in regions of
 * their own, moved whole and never zeroed.
 */
export const circular: CacheKind = { name: "circular", sharding: "replicated", extent: "whole" };
