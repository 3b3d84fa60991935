import { expectAllArrive } from "@kv/testing/scenarios/matrix-pair";
import { coordinatesOf } from "@kv/testing/simulator/sim-engine";
import { describe, it } from "vitest";
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
  // P plans with the conversion: D needs no setting.
  { p: 1, d: 1, blocks: [16, 16], heads: 4, fromHndToNhd: true },
  { p: 2, d: 1, blocks: [16, 32], heads: 4, fromHndToNhd: true },
  { p: 1, d: 2, blocks: [16, 32], heads: 4, fromHndToNhd: true },
  { p: 1, d: 1, blocks: [16, 16], heads: 4, fromHndToNhd: true, permutesLocalKv: true },
  { p: 4, d: 1, blocks: [16, 16], heads: 1, kind: "mla" },
  { p: 1, d: 4, blocks: [16, 32], heads: 1, kind: "mla" },
] as const;
const ORDERS = ["prefill first", "decode first", "at once"] as const;

describe.each(CASES)("$kind TP $p → $d, blocks $blocks, $heads heads", (pair) => {
  it.each(ORDERS)(
    "%s: every byte of 12 requests arrives, with prefix hits, and nothing is left in use",
    (order) =>
      expectAllArrive(pair, {
        seed: ` ${order}`,
        requests: 12,
        connector: pushConnector,
        async one(n, { prefill, decode, random, sleep, cachedTokens }) {
          const numTokens = 1 + random.integer(100);
          const request = { prompt: n, numTokens };
          const [prefillId, decodeId] = [`cmpl-r${n}-0-0000aaaa`, `cmpl-r${n}-0-bbbb0000`];
          const leg = { ...request, requestId: decodeId, cachedTokens: cachedTokens(n, numTokens) };
          if (order === "prefill first") {
            const params = await prefill.prefill({ ...request, requestId: prefillId });
            await decode.decode({ ...leg, params });
            return;
          }
          await Promise.all([
            decode.decode({ ...leg, params: coordinatesOf(prefill, `r${n}`) }),
            sleep(order === "decode first" ? 40 : 0).then(() =>
              prefill.prefill({ ...request, requestId: prefillId }),
            ),
          ]);
        },
      }),
  );
});
