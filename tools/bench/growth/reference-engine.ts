import { systemClock } from "@kv/interface";
import { memoryNetwork, memoryTransport } from "@kv/transport-memory";
import { BlockPool } from "../../../apps/demo/src/engine/cache/block-pool.js";
import { KvPool } from "../../../apps/demo/src/engine/cache/kv-pool.js";
import { Engine } from "../../../apps/demo/src/engine/engine.js";
import { simulatedModel } from "../../../apps/demo/src/model/simulated-model.js";
import { type Group, processorTimeOf } from "./measure.js";

const BLOCK_SIZE = 16;
const OUTPUT_TOKENS = 4;
let made = 0;

/** An engine with a model that takes no time, so that the engine's own work is left. */
function open(capacityTokens: number) {
  const transport = memoryTransport({ network: memoryNetwork(), host: "engine" });
  const model = simulatedModel({
    clock: systemClock(),
    layers: 2,
    kvHeads: 2,
    headDim: 8,
    vocabSize: 1000,
    maxModelLen: 16_384,
    forwardMsPer512Tokens: 0,
  });
  const numBlocks = Math.ceil(capacityTokens / BLOCK_SIZE) + 1;
  const geometry = model.config;
  const pool = new KvPool({ transport, geometry, numBlocks, blockSize: BLOCK_SIZE, tp: 1 });
  const blocks = new BlockPool({ numBlocks });
  return { engine: new Engine({ model, pool, blocks, maxNumSeqs: 1024 }), transport };
}

/** Runs requests at once, no two of which share a prefix. */
async function runAll(engine: Engine, count: number, promptTokens: number): Promise<void> {
  const requests = Array.from({ length: count }, () => {
    const number = made++;
    const tokens = Array.from({ length: promptTokens }, (_, i) => (number * 7919 + i * 31) % 1000);
    const requestId = `r-${number}`;
    return engine.submit({ requestId, promptTokens: tokens, maxTokens: OUTPUT_TOKENS }).done;
  });
  await Promise.all(requests);
}

const measure = (count: number, promptTokens: number, items: number): Promise<number> =>
  processorTimeOf(
    "us",
    items,
    () => open(count * (promptTokens + OUTPUT_TOKENS + BLOCK_SIZE)),
    ({ engine }) => runAll(engine, count, promptTokens),
    async ({ engine, transport }) => {
      await engine.close();
      await transport.close();
    },
  );

export const group: Group = {
  title: "The reference engine of the demo",
  quantities: [
    {
      name: `requests at once, prompts of 100 tokens, ${OUTPUT_TOKENS} tokens of output`,
      unit: "us per request",
      sizeOf: "requests",
      sizes: [1, 4, 16, 64, 256],
      measure: (size) => measure(size, 100, size),
    },
    {
      name: `one request, ${OUTPUT_TOKENS} tokens of output`,
      unit: "us per token of the prompt",
      sizeOf: "tokens of the prompt",
      sizes: [125, 500, 2000, 8000],
      measure: (size) => measure(1, size, size),
    },
  ],
};
