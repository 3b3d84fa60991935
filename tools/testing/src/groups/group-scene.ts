import { staged } from "@kv/connector";
import type { ConnectorModule, KvCacheConfig } from "@kv/interface";
import { seededRandom } from "@kv/transport-memory";
import fc from "fast-check";
import { createScenario } from "../scenarios/scenario.js";
import { simConfig } from "../simulator/sim-config.js";
import { coordinatesOf, type SimEngine } from "../simulator/sim-engine.js";
import { stateSpaceOf } from "../simulator/sim-ranks.js";
import { copyPlatform } from "./copy-platform.js";

interface SceneGroup {
  readonly blockTokens: 16 | 32 | 64;
  /** Of a sliding window; undefined for full attention. */
  readonly windowTokens: number | undefined;
  readonly layers: number;
  /** Of the whole model. Default: the scene's. */
  readonly kvHeads?: number | undefined;
  /** Default true. */
  readonly isTransferred?: boolean | undefined;
  /** A recurrent state, of which D's prefix cache keeps nothing. */
  readonly isState?: boolean | undefined;
  /** D's prefix cache has lost its blocks. */
  readonly isEvicted?: boolean | undefined;
}

interface SceneRequest {
  readonly numTokens: number;
  /** Blocks of 16 tokens that D has already. */
  readonly hitBlocks?: number;
  readonly prefillHitBlocks?: number;
  /** Push: D registers its blocks before P computes. */
  readonly isEarly?: boolean;
  /** Pull: P reads the turn back for the next one. */
  readonly next?: SceneTurn | undefined;
}

interface SceneTurn {
  /** Of D, in the first turn. */
  readonly outputTokens: number;
  /** Of the second turn's prompt, after those. */
  readonly newTokens: number;
  readonly hitBlocks: number;
}

/** Two engines of one model, and requests between them. */
export interface GroupScene {
  readonly groups: readonly SceneGroup[];
  readonly tp: readonly [prefill: number, decode: number];
  readonly isStaged: readonly [prefill: boolean, decode: boolean];
  /** How many times as many tokens D's blocks hold as P's. */
  readonly decodeTimes: 1 | 2;
  readonly requests: readonly SceneRequest[];
  readonly seed: number;
  readonly cacheDtype?: string | undefined;
}

const BLOCK_TOKENS = 16;
const MAX_TOKENS = 220;
const MAX_BLOCKS = Math.ceil(MAX_TOKENS / BLOCK_TOKENS);
const MAX_REQUESTS = 5;

const group: fc.Arbitrary<SceneGroup> = fc.record({
  blockTokens: fc.constantFrom(16, 32, 64),
  windowTokens: fc.option(fc.integer({ min: 1, max: 150 }), { nil: undefined }),
  layers: fc.integer({ min: 1, max: 2 }),
  isTransferred: fc.constantFrom(true, true, true, false),
});

export const groupScene: fc.Arbitrary<GroupScene> = fc.record({
  groups: fc
    .array(group, { minLength: 1, maxLength: 3 })
    .filter((groups) => groups.some(({ isTransferred }) => isTransferred !== false)),
  tp: fc.constantFrom<[number, number][]>([1, 1], [2, 1], [1, 2]),
  isStaged: fc.tuple(fc.boolean(), fc.boolean()),
  decodeTimes: fc.constantFrom(1, 2),
  requests: fc.array(
    fc.record({
      numTokens: fc.integer({ min: 2, max: MAX_TOKENS }),
      hitBlocks: fc.integer({ min: 0, max: 8 }),
      prefillHitBlocks: fc.integer({ min: 0, max: 4 }),
      isEarly: fc.boolean(),
    }),
    { minLength: 1, maxLength: MAX_REQUESTS },
  ),
  seed: fc.nat(),
});

/** The same scenes without staging, with a second turn of each conversation. */
export const readbackScene: fc.Arbitrary<GroupScene> = fc
  .tuple(
    groupScene,
    fc.array(
      fc.record({
        outputTokens: fc.integer({ min: 2, max: 60 }),
        newTokens: fc.integer({ min: 1, max: 60 }),
        hitBlocks: fc.integer({ min: 0, max: 8 }),
      }),
      { minLength: MAX_REQUESTS, maxLength: MAX_REQUESTS },
    ),
  )
  .map(([scene, turns]) => ({
    ...scene,
    isStaged: [false, false],
    requests: scene.requests.map((request, index) => ({ ...request, next: turns[index] })),
  }));

function configOf(
  { groups, cacheDtype = "auto" }: GroupScene,
  times: number,
  tpSize: number,
): KvCacheConfig {
  let layers = 0;
  return {
    ...simConfig(BLOCK_TOKENS * times),
    groups: groups.map(
      ({ blockTokens, windowTokens, layers: count, kvHeads, isTransferred, isState }) => ({
        kind: isState === true ? "mamba" : windowTokens === undefined ? "full" : "swa",
        layerNames: Array.from({ length: count }, () => `layers.${layers++}`),
        slidingWindowTokens: windowTokens,
        ...(kvHeads === undefined ? {} : { numKvHeads: kvHeads }),
        ...(isTransferred === false ? { enableKvTransfer: false } : {}),
        ...(blockTokens === BLOCK_TOKENS ? {} : { blockSize: blockTokens * times }),
      }),
    ),
    numHiddenLayers: layers,
    cacheDtype,
    ...(groups.some(({ isState }) => isState) ? { stateSpace: stateSpaceOf(tpSize) } : {}),
  };
}

/**
 * Plays a scene in virtual time, and returns what must not happen. `isPush`: D may register its
 * blocks before P has computed them.
 */
export async function playGroupScene(
  scene: GroupScene,
  { connector, isPush }: { readonly connector: ConnectorModule; readonly isPush: boolean },
): Promise<readonly string[]> {
  const random = seededRandom(scene.seed);
  const play = createScenario({ connector, random, jitterMs: 3 });
  const readsBack = scene.requests.some(({ next }) => next !== undefined);
  const engine = (hostName: string, side: 0 | 1) => {
    const cache = configOf(scene, side === 1 ? scene.decodeTimes : 1, scene.tp[side]);
    // Two of the longest prompts, so that requests wait. A D that registers early, and one that
    // keeps a turn, hold their room until P has had room too: else each waits for the other.
    const prompts = readsBack ? 4 * MAX_REQUESTS : isPush && side === 1 ? MAX_REQUESTS : 2;
    const numBlocks = prompts * MAX_BLOCKS;
    const chunks = random.fork(hostName);
    const poolBlocks = 1 + numBlocks * cache.groups.length;
    return play.engine(hostName, {
      cache,
      numBlocks,
      chunks,
      tpSize: scene.tp[side],
      extra: readsBack
        ? { bidirectional_kv_xfer: true, kv_recompute_threshold: 0, decoder_kv_blocks_ttl: 0.9 }
        : {},
      device: scene.isStaged[side]
        ? ({ connector: inner, clock }) => {
            const platform = copyPlatform({ clock, next: () => chunks.next(), maxMs: 4 });
            return { connector: staged(inner, { platform, poolBlocks }) };
          }
        : undefined,
    });
  };
  const pair = { prefill: await engine("p", 0), decode: await engine("d", 1), isPush };
  const work = scene.requests.map((request, index) => handOver(request, index, scene, pair));
  await play.clock.settle(Promise.all(work)).catch((error: unknown) => {
    play.violations.push(String(error));
  });
  return play.close(1000);
}

async function handOver(
  { numTokens, hitBlocks = 0, prefillHitBlocks = 0, isEarly, next }: SceneRequest,
  index: number,
  { groups }: GroupScene,
  { prefill, decode, isPush }: { prefill: SimEngine; decode: SimEngine; isPush: boolean },
): Promise<void> {
  // A hit of a whole prompt is taken for one token less.
  const hit = (blocks: number) =>
    Math.min(blocks, Math.floor((numTokens - 2) / BLOCK_TOKENS)) * BLOCK_TOKENS;
  const id = (side: string) => `cmpl-r${index}-0-0000${side}`;
  const turn = { prompt: index + 1, numTokens };
  const produced = { ...turn, requestId: id("aaaa"), cachedTokens: hit(prefillHitBlocks) };
  const cachedTokens = hit(hitBlocks);
  const lacks = groups.map(({ isState, isEvicted }) => isState === true || isEvicted === true);
  const consumed = {
    ...turn,
    requestId: id("bbbb"),
    cachedTokens,
    ...(lacks.includes(true)
      ? { cachedByGroup: lacks.map((isLost) => (isLost ? 0 : cachedTokens)) }
      : {}),
  };
  if (isPush && isEarly) {
    const params = coordinatesOf(prefill, `r${index}`);
    await Promise.all([decode.decode({ ...consumed, params }), prefill.prefill(produced)]);
    return;
  }
  const { outputTokens = 1, newTokens = 0 } = next ?? {};
  const first = await prefill.prefill(produced);
  const params = await decode.decode({ ...consumed, outputTokens, params: first });
  if (next === undefined) return;
  const longer = { ...turn, numTokens: numTokens + outputTokens + newTokens };
  const again = { ...longer, requestId: id("cccc"), cachedTokens: hit(next.hitBlocks), params };
  const last = await prefill.prefill(again);
  await decode.decode({ ...longer, requestId: id("dddd"), params: last });
}
