import { expectAllArrive } from "@kv/testing/scenarios/matrix-pair";
import { describe, it } from "vitest";
import { pullConnector } from "../src/index.js";

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
  { p: 1, d: 1, blocks: [16, 16], heads: 4, fromHndToNhd: true, permutesLocalKv: true },
  { p: 2, d: 1, blocks: [16, 32], heads: 4, fromHndToNhd: true, permutesLocalKv: true },
  { p: 1, d: 2, blocks: [16, 32], heads: 4, fromHndToNhd: true, permutesLocalKv: true },
  { p: 1, stages: 2, d: 1, blocks: [16, 16], heads: 4 },
  { p: 1, stages: 2, d: 2, blocks: [16, 16], heads: 4 },
  { p: 2, stages: 2, d: 1, blocks: [16, 32], heads: 4 },
  { p: 2, stages: 2, d: 2, blocks: [16, 16], heads: 4 },
  { p: 4, stages: 3, d: 2, blocks: [16, 16], heads: 2 },
  // MLA: a D rank reads from one P rank, and notifies the others, which have the same KV.
  { p: 4, d: 1, blocks: [16, 16], heads: 1, kind: "mla" },
  { p: 8, d: 2, blocks: [16, 32], heads: 1, kind: "mla" },
  { p: 1, d: 4, blocks: [16, 16], heads: 1, kind: "mla" },
] as const;

describe.each(CASES)(
  "$kind TP $p (pipeline stages: $stages) → $d, blocks $blocks, $heads heads",
  (pair) => {
    it("transfers 16 concurrent requests correctly, with prefix hits, and then holds nothing", () =>
      expectAllArrive(pair, {
        seed: "",
        requests: 16,
        connector: pullConnector,
        async one(n, { prefill, decode, random, cachedTokens }) {
          const numTokens = 1 + random.integer(100);
          const request = { requestId: `r${n}`, prompt: n, numTokens };
          const params = await prefill.prefill(request);
          const requestId = `d${n}`;
          await decode.decode({
            ...request,
            requestId,
            params,
            cachedTokens: cachedTokens(n, numTokens),
          });
        },
      }));
  },
);

// A P of several stages cannot read.
describe.each(CASES.filter((pair) => !("stages" in pair)))(
  "$kind read back by TP $p from $d, blocks $blocks, $heads heads",
  (pair) => {
    it("the next turn of 8 conversations at once is read back correctly, and then nothing is held", () =>
      expectAllArrive(pair, {
        seed: " back",
        requests: 8,
        connector: pullConnector,
        extra: {
          bidirectional_kv_xfer: true,
          kv_recompute_threshold: 0,
          decoder_kv_blocks_ttl: 0.9,
        },
        async one(n, { prefill, decode, random }) {
          const numTokens = 1 + random.integer(60);
          const outputTokens = 2 + random.integer(40);
          const turn = { requestId: `r${n}`, prompt: n, numTokens };
          const first = { ...turn, requestId: `d${n}`, outputTokens };
          const kept = await decode.decode({ ...first, params: await prefill.prefill(turn) });
          const longer = { prompt: n, numTokens: numTokens + outputTokens + random.integer(40) };
          const hit = Math.min((n % 3) * pair.blocks[0], longer.numTokens - 1);
          const again = {
            ...longer,
            requestId: `s${n}`,
            cachedTokens: hit - (hit % pair.blocks[0]),
            params: kept,
          };
          await decode.decode({
            ...longer,
            requestId: `t${n}`,
            params: await prefill.prefill(again),
          });
        },
      }));
  },
);
