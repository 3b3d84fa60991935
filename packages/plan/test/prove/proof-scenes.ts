import fc from "fast-check";
import type { CacheSpec, KindEngine } from "../bytes/kind-memory.js";
import type { KindScene } from "../bytes/kind-scenes.js";
import { share } from "../share.js";

const divide = (one: number, other: number) => one % other === 0 || other % one === 0;

/** The groups of each cache, and how many times an engine's tokens a block of a group has. */
const GROUPINGS: readonly {
  groups: KindScene["groups"];
  caches: readonly (readonly number[])[];
  times?: readonly number[];
  /** All regions name this group, and so hold every group. */
  groupId?: number;
}[] = [
  { groups: ["full"], caches: [[0]] },
  { groups: ["full"], caches: [[0], [0], [0]] },
  { groups: ["full", "full"], caches: [[0], [1]] },
  { groups: ["swa", "full"], caches: [[0], [1], [1]] },
  {
    groups: ["full", "swa"],
    caches: [
      [0, 1],
      [0, 1],
    ],
  },
  {
    groups: ["full", "swa"],
    groupId: 0,
    caches: [
      [0, 1],
      [0, 1],
    ],
  },
  { groups: ["full", "full"], caches: [[0], [0, 1], [1]] },
  { groups: ["full", "full"], caches: [[0], [1]], times: [2, 1] },
  { groups: ["swa", "full"], caches: [[0], [1], [1]], times: [1, 3] },
  { groups: ["mla"], caches: [[0], [0]] },
  { groups: ["swa"], caches: [[0], [0]] },
];

/** All pairs that the planner must accept or refuse, including sizes that do not divide. */
export const anyScene: fc.Arbitrary<KindScene> = fc
  .record({
    tp: fc.tuple(fc.constantFrom(1, 2, 3, 4, 6, 8, 16), fc.constantFrom(1, 2, 3, 4, 6, 8, 16)),
    numKvHeads: fc.constantFrom(1, 2, 3, 4, 6, 8, 12, 16),
    grouping: fc.constantFrom(...GROUPINGS),
    layouts: fc.constantFrom(
      ...([
        ["LBHNC", "LBHNC"],
        ["LBHNC", "LBHNC"],
        ["LBHNC", "LBHNC"],
        ["BLHNC", "BLHNC"],
        ["LBNHC", "LBNHC"],
        ["BLNHC", "BLNHC"],
        ["LHBNC", "LHBNC"],
        ["BHLNC", "BHLNC"],
        ["LBHNC", "LBNHC"],
        ["LBNHC", "LBHNC"],
      ] as const),
    ),
    backends: fc.constantFrom(
      ...([
        ["FLASH_ATTN", "FLASH_ATTN"],
        ["FLASH_ATTN", "FLASH_ATTN"],
        ["FLASH_ATTN", "FLASH_ATTN"],
        ["CPU_ATTN", "CPU_ATTN"],
        ["PLAIN", "CPU_ATTN"],
        ["PLAIN", "FLASH_ATTN"],
      ] as const),
    ),
    blocks: fc.tuple(fc.constantFrom(1, 2, 4, 16), fc.constantFrom(1, 1, 1, 2, 3, 4, 0.5, 1.5)),
    physical: fc.tuple(fc.constantFrom(1, 1, 2, 3), fc.constantFrom(1, 1, 2, 3)),
    padding: fc.tuple(fc.constantFrom(0, 0, 12), fc.constantFrom(0, 0, 20)),
    masksUncovered: fc.boolean(),
    converts: fc.boolean(),
    tokenShare: share,
    computedShares: fc.tuple(share, share),
    differs: fc.boolean(),
    dcp: fc.tuple(fc.constantFrom(1, 1, 2, 4), fc.constantFrom(1, 1, 2, 4)),
    tellsComputed: fc.boolean(),
    keptShare: fc.oneof(fc.constant(1), share),
    form: fc.constantFrom(undefined, undefined, "permute" as const, "direct" as const),
    seed: fc.nat({ max: 1_000_000 }),
  })
  .filter(({ blocks: [size, ratio] }) => Number.isInteger(size * ratio))
  .map((draw): KindScene => {
    const { groups, caches, times = groups.map(() => 1) } = draw.grouping;
    const [size, ratio] = draw.blocks;
    const isMla = groups.includes("mla");
    const engine = (side: 0 | 1): Omit<KindEngine, "logicalBlocks"> => ({
      tpSize: draw.tp[side],
      dcpSize: isMla ? draw.dcp[side] : 1,
      kernelTokens: side === 0 ? size : size * ratio,
      perLogical: draw.physical[side],
      layout: draw.layouts[side],
      // Layouts can be converted only when the order within a head is plain.
      attentionBackend: draw.layouts[0] === draw.layouts[1] ? draw.backends[side] : "FLASH_ATTN",
      padding: draw.padding[side],
    });
    const [prefill, decode] = [engine(0), engine(1)];
    const most = Math.min(240, 6 * Math.max(tableTokens(prefill), tableTokens(decode)));
    const numTokens = 1 + Math.floor(draw.tokenShare * most);
    const blocksOf = (side: typeof prefill) => Math.ceil(numTokens / tableTokens(side));
    const sized = (side: typeof prefill): KindEngine => ({
      ...side,
      logicalBlocks: 1 + (blocksOf(side) + 2) * groups.length,
    });
    return {
      groups,
      caches: caches.map((own, index): CacheSpec => {
        const [blockTimes] = own.map((group) => times[group] ?? 1);
        const heads = isMla ? {} : { heads: draw.numKvHeads };
        return {
          name: `layer.${index}`,
          groups: own,
          ...heads,
          ...(draw.grouping.times && { blockTimes }),
          ...(draw.grouping.groupId !== undefined && { groupId: draw.grouping.groupId }),
        };
      }),
      numKvHeads: draw.numKvHeads,
      prefill: sized(prefill),
      decode: sized(decode),
      masksUncovered: draw.masksUncovered,
      conversions: draw.converts ? ["hnd-to-nhd", "attention-order"] : [],
      numTokens,
      computedBlocks: groups.map((_, group) => {
        const hit = (draw.computedShares[draw.differs ? group : 0] ?? 0) * blocksOf(decode) * 0.99;
        return Math.floor(Math.floor(hit) / (times[group] ?? 1));
      }),
      tellsComputed: draw.tellsComputed,
      windowBlocks: Number.POSITIVE_INFINITY,
      prefillWindowBlocks: Math.max(1, Math.ceil(draw.keptShare * blocksOf(prefill))),
      hitsWindows: true,
      states: 0,
      seed: draw.seed,
      form: draw.form,
    };
  });

/** Tokens in a logical block of an engine's tables: on all ranks that share a sequence. */
export const tableTokens = (engine: Omit<KindEngine, "logicalBlocks">) =>
  engine.kernelTokens * engine.perLogical * (engine.dcpSize ?? 1);

/** Scenes whose sizes divide: most of them are accepted. */
export const likelyScene = anyScene.filter(({ prefill, decode, numKvHeads, groups }) => {
  const { dcpSize: pDcp = 1 } = prefill;
  const { dcpSize: dDcp = 1 } = decode;
  return (
    divide(prefill.tpSize, decode.tpSize) &&
    divide(pDcp, dDcp) &&
    prefill.tpSize % pDcp === 0 &&
    decode.tpSize % dDcp === 0 &&
    (groups.includes("mla") ||
      (divide(prefill.tpSize, numKvHeads) && divide(decode.tpSize, numKvHeads))) &&
    decode.kernelTokens % prefill.kernelTokens === 0
  );
});
