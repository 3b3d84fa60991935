import fc from "fast-check";
import { expect, test } from "vitest";
import { buildEngineTransferPlan } from "../engine/engine-plan.js";
import type { EngineTransferPlan } from "../engine/engine-plan-types.js";
import { applyReceivePass } from "../receive/apply-receive-pass.js";
import type { ReceivePassGroup } from "../request/request-plan-types.js";
import { samplePair, sampleRank } from "../sample-pair.test-support.js";
import { originOf, passByBlock, passGrid, UNTOUCHED, zeroingAt } from "./pass-effect.js";

const grids = fc
  .record({
    heads: fc.integer({ min: 1, max: 4 }),
    parts: fc.constantFrom(1, 2, 3, 4),
    partTokens: fc.integer({ min: 1, max: 4 }),
    cellBytes: fc.integer({ min: 1, max: 3 }),
    tokenMajor: fc.boolean(),
    zeroUntil: fc.integer({ min: 0, max: 20 }),
    zeroFrom: fc.integer({ min: 0, max: 20 }),
  })
  .filter(
    ({ heads, parts, partTokens, cellBytes }) => heads * parts * partTokens * cellBytes <= 250,
  );

test("the model of the receive pass predicts every byte that the pass writes in a block", () => {
  fc.assert(
    fc.property(
      grids,
      ({ heads, parts, partTokens, cellBytes, tokenMajor, zeroUntil, zeroFrom }) => {
        const tokens = parts * partTokens;
        const lengthBytes = heads * tokens * cellBytes;
        const any = buildEngineTransferPlan(samplePair());
        const layout = tokenMajor ? "LBNHC" : "LBHNC";
        const local = sampleRank({
          kernelBlockSize: tokens,
          blockLengthBytes: lengthBytes,
          layout,
        });
        const plan: EngineTransferPlan = {
          ...any,
          local,
          localHeads: heads,
          blockSizeRatio: parts,
          blockOrder: tokenMajor ? "token-major" : "head-major",
          regionsOfGroup: [[0]],
          headsOfRegion: [heads],
          groupPlans: any.groupPlans.map((group) => ({ ...group, partTokens, localParts: parts })),
        };
        const grid = passGrid(plan, 0, 0);
        const fromToken = Math.min(zeroFrom, tokens);
        const untilToken = Math.min(zeroUntil, tokens);
        const pass: ReceivePassGroup = {
          group: 0,
          permuteBlockIds: Int32Array.of(1),
          zeroBlockIds: Int32Array.of(2),
          ...(untilToken > 0 ? { leadingBlock: { blockId: 1, untilToken } } : {}),
          ...(fromToken > 0 && fromToken < tokens
            ? { partialBlock: { blockId: 1, fromToken } }
            : {}),
        };
        const landed = Uint8Array.from(
          { length: 10 * lengthBytes },
          (_, at) => 1 + (at % lengthBytes),
        );
        const bytes = landed.slice();
        applyReceivePass(plan, { groups: [pass] }, [bytes]);
        const believed = passByBlock(pass);
        for (let block = 0; block < 3; block++) {
          const known = believed.get(block) ?? UNTOUCHED;
          for (let offset = 0; offset < lengthBytes; ) {
            const zeroing = zeroingAt(grid, offset, known);
            const origin = known.permuted
              ? originOf(grid, offset)
              : { offset, runBytes: lengthBytes - offset };
            // A run moves together: all of its bytes, not only the first.
            const run = Math.min(zeroing.runBytes, origin.runBytes, lengthBytes - offset);
            expect(run).toBeGreaterThan(0);
            for (let byte = 0; byte < run; byte++) {
              const expected = zeroing.zeroed ? 0 : landed[origin.offset + byte];
              expect(bytes[block * lengthBytes + offset + byte]).toBe(expected);
            }
            offset += run;
          }
        }
      },
    ),
    { numRuns: 300 },
  );
});
