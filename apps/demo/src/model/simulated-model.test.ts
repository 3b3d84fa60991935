import { expect, it } from "vitest";
import { BlockPool } from "../engine/cache/block-pool.js";
import { simulatedModel } from "./simulated-model.js";

it("takes time per layer and makes up for a late layer", async () => {
  let nowMs = 1000;
  const waits: number[] = [];
  const clock = {
    now: () => nowMs,
    setTimer(done: () => void, afterMs: number) {
      waits.push(afterMs);
      nowMs += afterMs;
      done();
      return { cancel() {} };
    },
  };
  const model = simulatedModel({
    clock,
    layers: 4,
    kvHeads: 2,
    headDim: 4,
    vocabSize: 100,
    maxModelLen: 4096,
    forwardMsPer512Tokens: 20,
    leastPassMs: 8,
  });
  const tokens = Int32Array.from({ length: 1024 }, (_, i) => i);
  const { newKv, topTokens } = await model.forward({ sequenceId: "s", tokens, position: 0 });
  if (typeof newKv !== "function") throw new Error("its KV comes by layer");
  expect(newKv(0).byteLength).toBe(2 * 1024 * 2 * 4 * 4);
  // Of layer 3, head 1, token 5.
  expect(new Float32Array(newKv(3))[(1024 + 5) * 2 * 4]).toBe(5 * 31 + (3 * 2 + 1) * 7 + 5 * 17);
  expect(topTokens).toHaveLength(1);
  // A buffer that was written is used again, so that no pass makes megabytes of garbage.
  const stored = newKv(0);
  model.layerStored?.(stored);
  expect(newKv(1)).toBe(stored);
  expect(newKv(2)).not.toBe(stored);
  const pass = { startedMs: 1000, tokens: 1024 };
  await model.layerComputed?.({ ...pass, layer: 0 });
  nowMs += 14;
  for (const layer of [1, 2, 3]) await model.layerComputed?.({ ...pass, layer });
  expect(waits).toEqual([10, 6, 10]);
  expect(nowMs).toBe(1040);
  await model.layerComputed?.({ startedMs: nowMs, tokens: 1, layer: 0 });
  expect(waits.at(-1)).toBe(2);
});

it("a fragmented pool gives no neighbouring blocks to one request, and each block once", () => {
  const pool = new BlockPool({ numBlocks: 257, fragmented: true });
  const chosen = pool.allocate(64);
  expect(new Set(chosen).size).toBe(64);
  expect(chosen.some((id, i) => Math.abs(id - (chosen[i - 1] ?? -9)) === 1)).toBe(false);
  expect(pool.allocate(192)).toHaveLength(192);
  expect(pool.free).toBe(0);
});
