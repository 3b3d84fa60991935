import type { RankGeometry } from "@kv/plan";
import type { Pair } from "../input/pair.js";
import { byStage, inStagesOf, placeOf, withoutStages } from "../input/pipeline-stages.js";

/** `apply` returns undefined where the pair cannot change so. */
export interface Change {
  readonly what: string;
  readonly apply: (pair: Pair) => Pair | undefined;
}

const TP_SIZES = [1, 2, 4, 8, 16];

/**
 * Single changes that give a refused pair a plan, else TP sizes that do so for both engines. `plan`
 * throws when it refuses.
 */
export function suggestChanges(pair: Pair, plan: (pair: Pair) => void): readonly string[] {
  const single = tried(changesOf(pair), pair, plan);
  return single.length > 0 ? single : tried(sizesOfBoth(), pair, plan);
}

/** TP sizes that work: of one engine, else of both. */
export function suggestSizes(
  tp: readonly number[],
  pairOf: (tp: readonly number[]) => Pair,
): readonly string[] {
  const [prefill = 1, decode = prefill] = tp;
  const works = (sizes: readonly [number, number]) => {
    try {
      return pairOf(sizes) !== undefined;
    } catch {
      return false;
    }
  };
  const others = (size: number, other: number) =>
    [...new Set([other, ...TP_SIZES])].filter((each) => each !== size);
  const single = [
    ...others(decode, prefill).flatMap((size) =>
      works([prefill, size]) ? [`decode with TP ${size}`] : [],
    ),
    ...others(prefill, decode).flatMap((size) =>
      works([size, decode]) ? [`prefill with TP ${size}`] : [],
    ),
  ];
  if (single.length > 0) return single;
  return TP_SIZES.flatMap((size) => (works([size, size]) ? [`TP ${size} on both sides`] : []));
}

function tried(
  changes: readonly Change[],
  pair: Pair,
  plan: (pair: Pair) => void,
): readonly string[] {
  return changes.flatMap(({ what, apply }) => {
    try {
      const changed = apply(pair);
      if (changed === undefined) return [];
      plan(changed);
      return [what];
    } catch {
      return [];
    }
  });
}

function changesOf({ prefill, decode }: Pair): readonly Change[] {
  const [p, d] = [prefill[0], decode[0]];
  if (p === undefined || d === undefined) return [];
  const changes: Change[] = [];
  if (p.kernelBlockSize !== d.kernelBlockSize) {
    changes.push(
      both(`decode with the block size of prefill, ${p.kernelBlockSize}`, {
        decode: p.kernelBlockSize,
      }),
      both(`prefill with the block size of decode, ${d.kernelBlockSize}`, {
        prefill: d.kernelBlockSize,
      }),
    );
  }
  if (p.layout !== d.layout || p.layout !== "LBHNC") {
    changes.push({
      what: "the layout LBHNC (HND) on both sides",
      apply: (pair) => withFacts(pair, { layout: "LBHNC" }),
    });
  }
  if (p.attentionBackend !== d.attentionBackend) {
    const { attentionBackend } = p;
    changes.push({
      what: `the attention backend of prefill, ${attentionBackend}, on decode too`,
      apply: (pair) => withFacts(pair, { attentionBackend }),
    });
  }
  if (placeOf(d).ppSize > 1) {
    changes.push({
      what: "decode with one pipeline stage",
      apply: (pair) => withoutStages(pair, "decode"),
    });
  }
  for (const tpSize of new Set([p.tpSize, ...TP_SIZES].filter((size) => size !== d.tpSize))) {
    changes.push({
      what: `decode with TP ${tpSize}`,
      apply: (pair) => withTp(pair, "decode", tpSize),
    });
  }
  for (const tpSize of new Set([d.tpSize, ...TP_SIZES].filter((size) => size !== p.tpSize))) {
    changes.push({
      what: `prefill with TP ${tpSize}`,
      apply: (pair) => withTp(pair, "prefill", tpSize),
    });
  }
  return changes;
}

function sizesOfBoth(): readonly Change[] {
  return TP_SIZES.map((tpSize) => ({
    what: `TP ${tpSize} on both sides`,
    apply: (pair) => {
      const changed = withTp(pair, "prefill", tpSize);
      return changed === undefined ? undefined : withTp(changed, "decode", tpSize);
    },
  }));
}

export function both(
  what: string,
  sizes: { readonly prefill?: number; readonly decode?: number },
): Change {
  const resized = (ranks: readonly RankGeometry[], size: number | undefined) =>
    size === undefined ? ranks : ranks.map((rank) => withBlockSize(rank, size));
  return {
    what,
    apply: (pair) => ({
      ...pair,
      prefill: resized(pair.prefill, sizes.prefill),
      decode: resized(pair.decode, sizes.decode),
    }),
  };
}

function withBlockSize(rank: RankGeometry, kernelBlockSize: number): RankGeometry {
  const factor = kernelBlockSize / rank.kernelBlockSize;
  return {
    ...rank,
    kernelBlockSize,
    regions: rank.regions.map((region) => ({
      ...region,
      numBlocks: Math.max(1, Math.floor(region.numBlocks / factor)),
      blockLengthBytes: region.blockLengthBytes * factor,
      blockStrideBytes: region.blockStrideBytes * factor,
    })),
  };
}

export function withFacts(
  pair: Pair,
  facts: Partial<Pick<RankGeometry, "layout" | "attentionBackend">>,
): Pair {
  const change = (rank: RankGeometry): RankGeometry => ({ ...rank, ...facts });
  return { ...pair, prefill: pair.prefill.map(change), decode: pair.decode.map(change) };
}

/** Undefined where a block does not divide among the ranks. */
function withTp(pair: Pair, side: "prefill" | "decode", tpSize: number): Pair | undefined {
  const stages = byStage(pair[side]);
  const [rank] = pair[side];
  if (rank === undefined) return undefined;
  if (pair.changed !== undefined) {
    const tp = {
      prefill: pair.prefill[0]?.tpSize ?? 1,
      decode: pair.decode[0]?.tpSize ?? 1,
      [side]: tpSize,
    };
    return pair.changed({ tp: [tp.prefill, tp.decode] });
  }
  // States, and groups with their own shapes, change layout with the TP size. Only the other
  // engine's is known.
  if (isShapedByTp(rank)) {
    const from = side === "prefill" ? "decode" : "prefill";
    const other = (withoutStages(pair, from) ?? pair)[from];
    return tpSize === other.length ? { ...pair, [side]: inStagesOf(stages, other) } : undefined;
  }
  const heads = (size: number) =>
    pair.groups.includes("mla") ? 1 : Math.max(1, pair.numKvHeads / size);
  const factor = heads(tpSize) / heads(rank.tpSize);
  const resized = stages.flatMap(([first]) => {
    if (first === undefined) return [];
    const regions = first.regions.map((region) => ({
      ...region,
      blockLengthBytes: region.blockLengthBytes * factor,
      blockStrideBytes: region.blockStrideBytes * factor,
    }));
    return Array.from({ length: tpSize }, (_, tpRank) => ({
      ...first,
      regions,
      tpRank,
      tpSize,
      deviceId: tpRank,
    }));
  });
  const lengths = resized.flatMap(({ regions }) =>
    regions.map(({ blockLengthBytes }) => blockLengthBytes),
  );
  return lengths.every(Number.isInteger) ? { ...pair, [side]: resized } : undefined;
}

function isShapedByTp({ stateSpace, groupBlockTokens, regions }: RankGeometry): boolean {
  return (
    stateSpace !== undefined ||
    groupBlockTokens !== undefined ||
    regions.some(({ numKvHeads }) => numKvHeads !== undefined)
  );
}
