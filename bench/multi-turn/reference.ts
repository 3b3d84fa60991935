import { memoryTransport } from "@kv/transport-memory";
import { BlockPool } from "../../apps/demo/src/engine/cache/block-pool.js";
import { KvPool } from "../../apps/demo/src/engine/cache/kv-pool.js";
import { Engine } from "../../apps/demo/src/engine/engine.js";
import { loadModel } from "../../apps/demo/src/model/model.js";
import { converse, type EndedTurn, type Traffic } from "./traffic.js";

const BLOCK_TOKENS = 16;

/** The same conversations with one engine in this process, one prompt after another. */
export async function withOneEngine(
  directory: string,
  traffic: Traffic,
  seed: number,
  maxNumBatchedTokens: number,
): Promise<EndedTurn[]> {
  const model = await loadModel({ directory });
  const transport = memoryTransport();
  const numBlocks = Math.ceil((traffic.conversations * model.config.maxModelLen) / BLOCK_TOKENS);
  const pool = new KvPool({ transport, geometry: model.config, numBlocks, blockSize: BLOCK_TOKENS, tp: 1 });
  const blocks = new BlockPool({ numBlocks });
  const engine = new Engine({ model, pool, blocks, maxNumBatchedTokens });
  let sent = 0;
  let last: Promise<unknown> = Promise.resolve();
  const send = async (promptTokens: readonly number[], maxTokens: number) => {
    sent += 1;
    const requestId = `reference-${sent}`;
    const done = last.then(() => engine.submit({ requestId, promptTokens, maxTokens, ignoreEos: true }).done);
    last = done;
    const { tokens } = await done;
    return { requestId, tokens: tokens.map(({ token }) => token), ttftMs: 0, totalMs: 0 };
  };
  try {
    return await converse({ send, now: () => 0, sleep: async () => {} }, traffic, seed);
  } finally {
    await engine.close();
    pool.close();
    await model.close();
    await transport.close();
  }
}
