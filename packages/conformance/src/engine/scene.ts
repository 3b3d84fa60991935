import fc from "fast-check";
import { NO_FAULTS, type NotificationFaults } from "./network.js";

/** What scenes do. A connector that refuses one of these names it in `without`. */
export type SceneFeature =
  /** D registers before P has answered. */
  | "early"
  /** P reads a turn back from D. */
  | "readback"
  /** Recurrent states, one per request. */
  | "states"
  /** One KV head that all ranks share (`mla`), and ranks that share a sequence. */
  | "dcp"
  /** P has two pipeline stages. */
  | "stages"
  /** Engines give their caches back and take them again. */
  | "sleep";

/** A KV cache group of a scene. */
export interface SceneGroup {
  readonly blockTokens: 16 | 32 | 64;
  /** Of a sliding window. Undefined: full attention. */
  readonly windowTokens: number | undefined;
  readonly layers: number;
  /** @default 4 */
  readonly kvHeads?: number | undefined;
  /** Whether peers exchange its blocks. @default true */
  readonly isTransferred?: boolean | undefined;
  /** A recurrent state, of which D's prefix cache keeps nothing. @default false */
  readonly isState?: boolean | undefined;
  /** D's prefix cache has lost its blocks. @default false */
  readonly isEvicted?: boolean | undefined;
}

/** A prompt that P computes and D receives. */
export interface SceneRequest {
  readonly numTokens: number;
  /** @default 0 */
  readonly atMs?: number | undefined;
  /** Blocks of 16 tokens that D has already. @default 0 */
  readonly hitBlocks?: number | undefined;
  /** The same of P. @default 0 */
  readonly prefillHitBlocks?: number | undefined;
  /** D registers before P has computed. @default false */
  readonly isEarly?: boolean | undefined;
  /** Its client goes away, so many milliseconds after it came. */
  readonly abortAfterMs?: number | undefined;
  /** The next turn of the conversation: P reads what D has back. */
  readonly next?: SceneTurn | undefined;
}

/** A later turn. */
export interface SceneTurn {
  readonly outputTokens: number;
  readonly newTokens: number;
  readonly hitBlocks: number;
}

/** What happens to an engine. */
export interface SceneEvent {
  readonly atMs: number;
  readonly side: "prefill" | "decode";
  /** `restart`: a new process under the same engine id. */
  readonly what: "restart" | "sleep";
}

/** Sizes by side: P's, D's. */
export type BySide<T> = readonly [prefill: T, decode: T];

/** Two engines, and what happens to them. Plain data: `playScene` plays a printed one again. */
export interface Scene {
  readonly seed: number;
  readonly groups: readonly SceneGroup[];
  readonly tp: BySide<number>;
  /** Ranks that share a sequence. @default none, and several KV heads */
  readonly dcp?: BySide<number> | undefined;
  /** P's pipeline stages. @default 1 */
  readonly stages?: number | undefined;
  /** @default neither */
  readonly isStaged?: BySide<boolean> | undefined;
  /** D's blocks have so many times P's tokens. @default 1 */
  readonly decodeTimes?: number | undefined;
  readonly cacheDtype?: string | undefined;
  readonly requests: readonly SceneRequest[];
  /** @default none */
  readonly events?: readonly SceneEvent[] | undefined;
  /** @default none */
  readonly notifications?: NotificationFaults | undefined;
}

export const BLOCK_TOKENS = 16;
export const MAX_TOKENS = 220;
export const MAX_REQUESTS = 5;

const TP: readonly BySide<number>[] = [
  [1, 1],
  [2, 1],
  [1, 2],
  [2, 2],
  [4, 2],
];
const TP_AND_DCP: readonly (readonly [tp: BySide<number>, dcp: BySide<number>])[] = [
  [
    [1, 1],
    [1, 1],
  ],
  [
    [2, 1],
    [1, 1],
  ],
  [
    [1, 2],
    [1, 2],
  ],
  [
    [4, 2],
    [1, 2],
  ],
  [
    [2, 2],
    [2, 1],
  ],
  [
    [2, 4],
    [2, 4],
  ],
  [
    [4, 2],
    [4, 2],
  ],
];
const FULL: SceneGroup = { blockTokens: 16, windowTokens: undefined, layers: 2 };

const group: fc.Arbitrary<SceneGroup> = fc.record({
  blockTokens: fc.constantFrom(16, 32, 64),
  windowTokens: fc.option(fc.integer({ min: 1, max: 150 }), { nil: undefined }),
  layers: fc.integer({ min: 1, max: 2 }),
  isTransferred: fc.constantFrom(true, true, true, false),
});

const groups = fc
  .array(group, { minLength: 1, maxLength: 3 })
  .filter((each) => each.some(({ isTransferred }) => isTransferred !== false));

const often = <T>(one: T, other: fc.Arbitrary<T>, weight = 2): fc.Arbitrary<T> =>
  fc.oneof({ weight, arbitrary: fc.constant(one) }, { weight: 1, arbitrary: other });

type Shape = Pick<
  Scene,
  "groups" | "tp" | "dcp" | "stages" | "isStaged" | "decodeTimes" | "requests"
>;

/** Scenes without what a connector refuses. */
export function sceneArbitrary(
  without: readonly SceneFeature[],
  canStage: boolean,
): fc.Arbitrary<Scene> {
  const has = (feature: SceneFeature): boolean => !without.includes(feature);
  const turn: fc.Arbitrary<SceneTurn> = fc.record({
    outputTokens: fc.integer({ min: 2, max: 60 }),
    newTokens: fc.integer({ min: 1, max: 60 }),
    hitBlocks: fc.nat(8),
  });
  const requestOf = (mayReadBack: boolean) =>
    fc.record({
      numTokens: fc.integer({ min: 2, max: MAX_TOKENS }),
      atMs: fc.nat(60),
      hitBlocks: fc.nat(8),
      prefillHitBlocks: fc.nat(4),
      isEarly: has("early") ? fc.boolean() : fc.constant(false),
      abortAfterMs: often<number | undefined>(undefined, fc.nat(60), 8),
      next:
        mayReadBack && has("readback")
          ? often<SceneTurn | undefined>(undefined, turn, 1)
          : fc.constant(undefined),
    });
  const requestsOf = (mayReadBack: boolean) =>
    fc.array(requestOf(mayReadBack), { minLength: 1, maxLength: MAX_REQUESTS });

  const plain: fc.Arbitrary<Shape> = fc.record({
    groups,
    tp: fc.constantFrom(...TP),
    decodeTimes: fc.constantFrom(1, 2),
    requests: requestsOf(true),
  });
  const withState: fc.Arbitrary<Shape> = fc.record({
    groups: fc
      .tuple(fc.boolean(), fc.integer({ min: 1, max: 2 }))
      .map(([isFirst, layers]) =>
        isFirst ? [{ ...FULL, layers, isState: true }, FULL] : [FULL, { ...FULL, isState: true }],
      ),
    tp: fc.constantFrom(...TP),
    requests: requestsOf(true),
  });
  const sharing: fc.Arbitrary<Shape> = fc
    .record({
      groups: fc.constant([FULL]),
      sizes: fc.constantFrom(...TP_AND_DCP),
      requests: requestsOf(true),
    })
    .map(({ sizes: [tp, dcp], ...rest }) => ({ ...rest, tp, dcp }));
  const inStages: fc.Arbitrary<Shape> = fc.record({
    groups: fc.constant([{ ...FULL, layers: 5 }]),
    tp: fc.constantFrom(...TP),
    stages: fc.constant(2),
    decodeTimes: fc.constantFrom(1, 2),
    requests: requestsOf(false),
  });
  const isStaged: fc.Arbitrary<Shape> = fc.record({
    groups,
    tp: fc.constantFrom(...TP),
    isStaged: fc.constantFrom<BySide<boolean>>([true, false], [false, true], [true, true]),
    decodeTimes: fc.constantFrom(1, 2),
    requests: requestsOf(false),
  });
  const shapes = fc.oneof(
    { weight: 3, arbitrary: plain },
    ...(has("states") ? [withState] : []),
    ...(has("dcp") ? [sharing] : []),
    ...(has("stages") ? [inStages] : []),
    ...(canStage ? [{ weight: 2, arbitrary: isStaged }] : []),
  );
  const event: fc.Arbitrary<SceneEvent> = fc.record({
    atMs: fc.nat(150),
    side: fc.constantFrom("prefill", "decode"),
    what: has("sleep") ? fc.constantFrom("restart", "sleep") : fc.constant("restart"),
  });
  const chance = fc.constantFrom(0, 0.1, 0.5);
  const faults = fc.record({
    lost: fc.constantFrom(0, 0, 0.1, 0.3),
    doubled: chance,
    reordered: chance,
  });
  return fc
    .record({
      seed: fc.nat(),
      shape: shapes,
      events: often<readonly SceneEvent[]>([], fc.array(event, { minLength: 1, maxLength: 3 })),
      notifications: often(NO_FAULTS, faults, 1),
    })
    .map(({ shape, ...rest }) => ({ ...shape, ...rest }));
}
