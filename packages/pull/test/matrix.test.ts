import { memoryNetwork, seededRandom, virtualClock } from "@kv/transport-memory";
import { describe, expect, it } from "vitest";
import { createSimEngine } from "./sim-engine.js";

const CASES = [
  { p: 1, d: 1, blocks: [16, 16], heads: 4 },
  { p: 2, d: 1, blocks: [16, 16], heads: 4 },
  { p: 1, d: 2, blocks: [16, 16], heads: 4 },
  { p: 4, d: 2, blocks: [16, 16], heads: 4 },
  { p: 1, d: 1, blocks: [16, 32], heads: 4 },
  { p: 1, d: 2, blocks: [16, 32], heads: 4 },
  { p: 4, d: 1, blocks: [16, 32], heads: 4 },
  { p: 1, d: 2, blocks: [32, 16], heads: 4 },
  { p: 2, d: 1, blocks: [32, 48], heads: 4 },
  { p: 4, d: 1, blocks: [16, 16], heads: 2 },
  { p: 1, d: 4, blocks: [16, 16], heads: 2 },
] as const;

describe.each(CASES)("TP $p → $d, blocks $blocks, $heads heads", ({ p, d, blocks, heads }) => {
  it("receives every byte of 16 requests at once, prefix hits included, and lets go of everything", async () => {
    const clock = virtualClock();
    const random = seededRandom(`matrix ${p} ${d} ${blocks.join(" ")} ${heads}`);
    const network = memoryNetwork({ clock, random, latency: { latencyMs: 1, jitterMs: 2, minPieces: 3 } });
    const violations: string[] = [];
    const common = {
      network,
      numBlocks: 128,
      numKvHeads: heads,
      violation: (what: string) => void violations.push(what),
    };
    const prefill = await createSimEngine({
      ...common,
      hostName: "p",
      engineId: "p-engine",
      tpSize: p,
      blockSize: blocks[0],
      skewMs: 5_000_000,
    });
    const decode = await createSimEngine({
      ...common,
      hostName: "d",
      engineId: "d-engine",
      tpSize: d,
      blockSize: blocks[1],
    });
    const one = async (n: number) => {
      const numTokens = 1 + random.integer(100);
      const request = { requestId: `r${n}`, prompt: n, numTokens };
      const params = await prefill.prefill(request);
      const hit = [0, 1, 2, Number.POSITIVE_INFINITY][n % 4] ?? 0;
      const cachedTokens = Math.min(hit * blocks[1], numTokens);
      await decode.decode({ ...request, requestId: `d${n}`, params, cachedTokens });
    };
    await clock.settle(Promise.all(Array.from({ length: 16 }, (_, n) => one(n))));
    await clock.advance(1000);
    expect(violations).toEqual([]);
    for (const engine of [prefill, decode]) {
      expect(Object.entries(engine.outstanding()).filter(([, count]) => count !== 0)).toEqual([]);
    }
    await clock.settle(Promise.all([prefill.close(), decode.close()]));
    expect(Object.values(network.outstanding()).filter((count) => count !== 0)).toEqual([]);
    expect(clock.pendingTimers).toBe(0);
  });
});
