import { memoryNetwork, seededRandom, virtualClock } from "@kv/transport-memory";
import { describe, expect, it } from "vitest";
import { coordinatesOf, createSimEngine } from "../../pull/test/sim-engine.js";
import { pushConnector } from "../src/index.js";

const CASES = [
  { p: 1, d: 1, blocks: [16, 16], heads: 4 },
  { p: 2, d: 1, blocks: [16, 16], heads: 4 },
  { p: 1, d: 2, blocks: [16, 16], heads: 4 },
  { p: 4, d: 2, blocks: [16, 16], heads: 4 },
  { p: 2, d: 4, blocks: [16, 16], heads: 4 },
  { p: 1, d: 1, blocks: [16, 32], heads: 4 },
  { p: 1, d: 2, blocks: [16, 32], heads: 4 },
  { p: 2, d: 1, blocks: [16, 64], heads: 4 },
  { p: 4, d: 1, blocks: [16, 16], heads: 2 },
  { p: 1, d: 4, blocks: [16, 16], heads: 2 },
] as const;
const ORDERS = ["prefill first", "decode first", "at once"] as const;

describe.each(CASES)("TP $p → $d, blocks $blocks, $heads heads", ({ p, d, blocks, heads }) => {
  it.each(ORDERS)(
    "%s: every byte of 12 requests arrives, prefix hits included, and all is let go of",
    async (order) => {
      const clock = virtualClock();
      const random = seededRandom(`matrix ${p} ${d} ${blocks.join(" ")} ${heads} ${order}`);
      const network = memoryNetwork({ clock, random, latency: { latencyMs: 1, jitterMs: 2, minPieces: 3 } });
      const violations: string[] = [];
      const common = {
        network,
        numBlocks: 128,
        numKvHeads: heads,
        connector: pushConnector,
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
      const sleep = (ms: number) => new Promise<void>((resolve) => void clock.setTimer(resolve, ms));
      const one = async (n: number) => {
        const numTokens = 1 + random.integer(100);
        const request = { prompt: n, numTokens };
        const prefillId = `cmpl-r${n}-0-0000aaaa`;
        const requestId = `cmpl-r${n}-0-bbbb0000`;
        const hit = [0, 1, 2, Number.POSITIVE_INFINITY][n % 4] ?? 0;
        const cachedTokens = Math.min(hit * blocks[1], numTokens);
        if (order === "prefill first") {
          const params = await prefill.prefill({ ...request, requestId: prefillId });
          await decode.decode({ ...request, requestId, params, cachedTokens });
          return;
        }
        const params = coordinatesOf(prefill, `r${n}`);
        const lead = order === "decode first" ? 40 : 0;
        await Promise.all([
          decode.decode({ ...request, requestId, params, cachedTokens }),
          sleep(lead).then(() => prefill.prefill({ ...request, requestId: prefillId })),
        ]);
      };
      await clock.settle(Promise.all(Array.from({ length: 12 }, (_, n) => one(n))));
      // Far less than a lease: nothing was left to run out.
      await clock.advance(1000);
      expect(violations).toEqual([]);
      for (const engine of [prefill, decode]) {
        expect(Object.entries(engine.outstanding()).filter(([, count]) => count !== 0)).toEqual([]);
      }
      await clock.settle(Promise.all([prefill.close(), decode.close()]));
      expect(Object.values(network.outstanding()).filter((count) => count !== 0)).toEqual([]);
      expect(clock.pendingTimers).toBe(0);
    },
  );
});
