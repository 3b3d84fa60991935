import type { ConnectorModule } from "@kv/interface";
import { describe, expect, it } from "vitest";
import { createScenario, prompt } from "./scenario.js";

const MLA = { kind: "mla", numKvHeads: 1 } as const;

const SIZES: readonly (readonly [p: [tp: number, dcp: number], d: [tp: number, dcp: number]])[] = [
  [
    [1, 1],
    [2, 2],
  ],
  [
    [2, 1],
    [2, 2],
  ],
  [
    [4, 1],
    [2, 2],
  ],
  [
    [2, 2],
    [1, 1],
  ],
  [
    [2, 2],
    [2, 2],
  ],
  [
    [2, 2],
    [2, 1],
  ],
  [
    [4, 4],
    [2, 2],
  ],
  [
    [2, 2],
    [4, 4],
  ],
  [
    [4, 2],
    [2, 1],
  ],
];

export function itSharesSequences(connector: ConnectorModule): void {
  describe.each(SIZES)("P with TP and DCP %j, D with %j", ([pTp, pDcp], [dTp, dDcp]) => {
    it("each rank gets its blocks of the sequence, also behind a prefix hit, and P frees its own", async () => {
      const play = createScenario({ connector });
      const { p, d } = await play.pair(
        { ...MLA, tpSize: pTp, dcpSize: pDcp },
        { ...MLA, tpSize: dTp, dcpSize: dDcp },
      );
      // Most ranks have no part of one block.
      for (const [n, numTokens] of [5, 16, 33, 40, 150].entries()) {
        for (const cached of [0, 1, 2]) {
          const cachedTokens = cached * 16 * dDcp;
          if (cachedTokens >= numTokens) continue;
          const request = prompt(10 * n + cached, numTokens);
          const params = await play.clock.settle(p.prefill(request));
          expect(params).toMatchObject({ tp_size: pTp, dcp_size: pDcp });
          await play.ends(d.decode({ ...request, params, cachedTokens }));
        }
      }
      await play.frees(p);
    });
  });

  it("P's groups of ranks are smaller than its engine, and D's are finer: refused, because a rank of P would not know all of its readers", async () => {
    const play = createScenario({ connector });
    const { p, d } = await play.pair(
      { ...MLA, tpSize: 4, dcpSize: 2 },
      { ...MLA, tpSize: 4, dcpSize: 4 },
    );
    expect(await play.handedOver(p, d)).toBe("KV_PLAN_UNSUPPORTED");
    await play.clock.advance(61_000);
  });

  it("parameters without P's dcp_size are refused", async () => {
    const play = createScenario({ connector });
    const { p, d } = await play.pair({ ...MLA, tpSize: 2, dcpSize: 2 }, MLA);
    const { dcp_size: _, ...params } = await play.prefilled(p, 1);
    await play.ends(d.decode({ ...prompt(1), params }), "KV_PLAN_INCOMPATIBLE");
    await play.clock.advance(61_000);
  });

  it.each([
    [{ kind: "full", tpSize: 2, dcpSize: 2 }, 'the cache has a group of kind "full"'],
    [{ ...MLA, tpSize: 3, dcpSize: 2 }, "does not divide the 3 tensor-parallel ranks"],
  ] as const)("an engine with %j is refused at the start", async (options, message) => {
    const play = createScenario({ connector });
    await expect(play.engine("p", options)).rejects.toThrow(message);
  });
}
