import type { Transport } from "@kv/interface";
import { createBlockPool } from "../engine/block-pool.js";
import { createEngine } from "../engine/engine.js";
import { createKvPool } from "../engine/kv-pool.js";
import type { Model } from "../model/model.js";

export interface ReferenceOptions {
  readonly model: Model;
  readonly transport: Transport;
  readonly maxTokens: number;
}

/** The tokens that one engine in one process makes of each prompt, greedily: what the pair must say too. */
export async function referenceTokens(
  prompts: readonly (readonly number[])[],
  { model, transport, maxTokens }: ReferenceOptions,
): Promise<number[][]> {
  const { layers, kvHeads, headDim } = model.config;
  const blockSize = 16;
  const longest = Math.max(...prompts.map((prompt) => prompt.length));
  // One at a time, and nothing from a cache: the plainest way to compute them.
  const numBlocks = Math.ceil((longest + maxTokens) / blockSize) + 2;
  const pool = createKvPool({
    transport,
    geometry: { layers, kvHeads, headDim },
    numBlocks,
    blockSize,
    tp: 1,
  });
  const blocks = createBlockPool({ numBlocks, prefixCaching: false });
  const engine = createEngine({ model, pool, blocks });
  try {
    const all: number[][] = [];
    for (const [index, promptTokens] of prompts.entries()) {
      const request = { requestId: `reference-${index}`, promptTokens, maxTokens, ignoreEos: true };
      const { tokens } = await engine.submit(request).done;
      all.push(tokens.map(({ token }) => token));
    }
    return all;
  } finally {
    await engine.close();
    pool.close();
  }
}
