import type { ConnectorModule } from "@kv/interface";
import fc from "fast-check";
import { expect, it } from "vitest";
import { type GroupScene, groupScene, playGroupScene, readbackScene } from "./group-scene.js";

const FULL = { blockTokens: 16, windowTokens: undefined, layers: 1 } as const;
const TP_SIZES: readonly [number, number][] = [
  [1, 1],
  [2, 1],
  [1, 2],
];

/** A second turn, which P reads back from D. */
export function itReadsEveryGroupBack(connector: ConnectorModule): void {
  const play = async (scene: GroupScene) => {
    expect(await playGroupScene(scene, { connector, isPush: false })).toEqual([]);
  };

  it("a second turn is read back from groups of 16, 32 and 64 tokens per block, with prefix hits and preemption: every byte arrives", {
    timeout: 3_600_000,
  }, async () => {
    await fc.assert(fc.asyncProperty(readbackScene, play), { numRuns: 20 });
  });

  it.each(TP_SIZES)("the state after D's last token, and no other: TP %i → %i", async (...tp) => {
    const next = { outputTokens: 20, newTokens: 1, hitBlocks: 0 };
    const request = { numTokens: 70 };
    await play({
      groups: [FULL, { ...FULL, isState: true }],
      requests: [
        { ...request, next },
        { ...request, numTokens: 49, next: { ...next, outputTokens: 33, newTokens: 40 } },
        // P has the attention's blocks of the first tokens, and the state after them.
        { ...request, numTokens: 64, next: { ...next, hitBlocks: 2 } },
      ],
      tp,
      decodeTimes: 1,
      isStaged: [false, false],
      seed: 5,
    });
  });
}

/** Groups with blocks and dtypes of their own. `isPush`: D may register before P has answered. */
export function itMovesEveryGroup(connector: ConnectorModule, isPush: boolean): void {
  const played = (scene: Pick<GroupScene, "groups" | "requests" | "seed"> & Partial<GroupScene>) =>
    playGroupScene(
      { tp: [1, 1], decodeTimes: 1, isStaged: [false, false], ...scene },
      { connector, isPush },
    );
  const play = async (scene: Parameters<typeof played>[0]) => {
    expect(await played(scene)).toEqual([]);
  };

  // `npm run test:long -- --only properties` plays 50 times as many scenes.
  it("vllm#30358, #30419: groups of 16, 32 and 64 tokens per block, in random chunks, with prefix hits and staging: every byte arrives", {
    timeout: 3_600_000,
  }, async () => {
    await fc.assert(fc.asyncProperty(groupScene, play), { numRuns: 20 });
  });

  it.each([
    [false, false],
    [true, true],
  ])(
    "a group with enableKvTransfer false: P's blocks of it are not named, and D's are not touched; staged at P %s, at D %s",
    async (...isStaged) => {
      await play({
        groups: [
          { ...FULL, isTransferred: false },
          { ...FULL, blockTokens: 32 },
        ],
        requests: [
          { numTokens: 70, hitBlocks: 1 },
          { numTokens: 33, prefillHitBlocks: 1, isEarly: true },
        ],
        tp: [1, 2],
        decodeTimes: 2,
        isStaged,
        seed: 3,
      });
    },
  );

  it.each(TP_SIZES)(
    "vllm#37310, #53514: P leaves the last token to D, whose state gets it once: TP %i → %i",
    async (...tp) => {
      await play({
        groups: [FULL, { ...FULL, isState: true }],
        requests: [
          { numTokens: 70 },
          { numTokens: 49, prefillHitBlocks: 1, isEarly: true },
          // The attention's blocks are cached at D, and the state is not.
          { numTokens: 64, hitBlocks: 2 },
        ],
        tp,
        seed: 5,
      });
    },
  );

  it.each([[false], [true]])(
    "hits that differ by group: each gets the blocks that it lacks; staged at D %s",
    async (isStaged) => {
      await play({
        groups: [
          FULL,
          { ...FULL, isEvicted: true },
          { ...FULL, blockTokens: 32, windowTokens: 40 },
        ],
        requests: [
          { numTokens: 100, hitBlocks: 4 },
          { numTokens: 81, hitBlocks: 2, prefillHitBlocks: 1, isEarly: true },
        ],
        isStaged: [false, isStaged],
        seed: 7,
      });
    },
  );

  it.each(TP_SIZES)(
    "S4.8: Gemma 4's groups, windows of more heads than the full attention and with blocks of another size, cross the wire: TP %i → %i",
    async (...tp) => {
      const window = { blockTokens: 16, windowTokens: 48, layers: 2, kvHeads: 4 } as const;
      await play({
        groups: [{ ...FULL, blockTokens: 32, kvHeads: 2 }, window, window],
        requests: [
          { numTokens: 150 },
          { numTokens: 90, hitBlocks: 2, prefillHitBlocks: 2, isEarly: true },
        ],
        tp,
        seed: 11,
      });
    },
  );

  it("vllm#52516: nvfp4 is copied between equal TP sizes, and refused by name where heads would be split", async () => {
    const copied = (...tp: [number, number]) =>
      played({
        groups: [FULL],
        requests: [{ numTokens: 48, hitBlocks: 1 }],
        tp,
        seed: 1,
        cacheDtype: "nvfp4",
      });
    expect(await copied(1, 1)).toEqual([]);
    expect(await copied(2, 2)).toEqual([]);
    expect((await copied(1, 2)).join()).toContain(
      'blocks of cache dtype "nvfp4" do not keep heads and tokens apart',
    );
  });
}
