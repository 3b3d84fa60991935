import { playScene, type Scene, type SceneOptions } from "@kv/conformance/engine";
import { createWorkerOutputAggregator, readTransferConfig, staged } from "@kv/connector";
import type { ConnectorModule, KvCacheConfig } from "@kv/interface";
import { memoryNetwork, memorySideChannel, sceneNetwork } from "@kv/transport-memory";
import { expect, it } from "vitest";
import { engineIdentity } from "../engine-identity.js";
import { manualClock } from "../manual-clock.js";
import { simConfig } from "../simulator/sim-options.js";

const FULL = { blockTokens: 16, windowTokens: undefined, layers: 1 } as const;
const TP_SIZES: readonly [number, number][] = [
  [1, 1],
  [2, 1],
  [1, 2],
];

/** In virtual time, with host staging where a scene has it. */
export const sceneOptions = (connector: ConnectorModule): SceneOptions => ({
  connector,
  createNetwork: sceneNetwork,
  createWorkerOutputAggregator,
  stage: (options) => staged(connector, options),
});

/** A second turn, which P reads back from D. */
export function itReadsEveryGroupBack(connector: ConnectorModule): void {
  it.each(TP_SIZES)("the state after D's last token, and no other: TP %i → %i", async (...tp) => {
    const next = { outputTokens: 20, newTokens: 1, hitBlocks: 0 };
    const request = { numTokens: 70 };
    const scene: Scene = {
      groups: [FULL, { ...FULL, isState: true }],
      requests: [
        { ...request, next },
        { ...request, numTokens: 49, next: { ...next, outputTokens: 33, newTokens: 40 } },
        // P has the attention's blocks of the first tokens, and the state after them.
        { ...request, numTokens: 64, next: { ...next, hitBlocks: 2 } },
      ],
      tp,
      seed: 5,
    };
    expect(await playScene(scene, sceneOptions(connector))).toEqual([]);
  });
}

/** `isPush`: D may register before P has answered. */
export function itMovesEveryGroup(connector: ConnectorModule, isPush: boolean): void {
  const played = ({ requests, ...scene }: Omit<Scene, "tp"> & Partial<Scene>) => {
    const given = requests.map((each) => ({ ...each, isEarly: isPush && each.isEarly === true }));
    return playScene({ tp: [1, 1], ...scene, requests: given }, sceneOptions(connector));
  };
  const play = async (scene: Parameters<typeof played>[0]) => {
    expect(await played(scene)).toEqual([]);
  };

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

  it.each([
    ["all groups", true],
    ["one group of two", false],
  ])(
    "a request that ends without blocks is not kept, where peers exchange %s",
    async (_, enableKvTransfer) => {
      const [group] = simConfig(16).groups;
      const groups = [group, { ...group, enableKvTransfer }] as KvCacheConfig["groups"];
      const scheduler = await connector.createScheduler({
        config: readTransferConfig({ kv_connector: connector.name, kv_role: "kv_both" }),
        engine: engineIdentity("e"),
        cache: { ...simConfig(16), groups },
        sideChannel: memorySideChannel({ network: memoryNetwork() }),
        clock: manualClock(),
      });
      await scheduler.setHandshakeMetadata([]);
      for (const reason of ["stopped", "length", "aborted", "error"] as const) {
        const kvTransferParams = { do_remote_decode: true };
        const request = { requestId: reason, numPromptTokens: 16, kvTransferParams };
        scheduler.afterAllocation(request, [[1], [2]], 0);
        expect(scheduler.requestFinished(request, [], reason)).toEqual({ keepBlocks: false });
      }
      expect(scheduler.outstanding()).toMatchObject({ running: 0, leases: 0 });
      await scheduler.close();
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
