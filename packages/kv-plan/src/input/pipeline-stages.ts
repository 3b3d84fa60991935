import { KvError } from "@kv/interface";
import type { RankGeometry } from "@kv/plan";
import type { Pair } from "./pair.js";
import { placeRegions } from "./pair.js";

/**
 * The stage of each layer as vLLM divides them (0.33, `get_pp_indices`): evenly, with the rest on
 * the stages before the last.
 * @throws `KV_CONFIG_INVALID` for more stages than layers.
 */
export function stagesOfLayers(numLayers: number, ppSize: number): readonly number[] {
  if (ppSize > numLayers) {
    throw new KvError(
      "KV_CONFIG_INVALID",
      `--pp ${ppSize} is more than the ${numLayers} layers of the model`,
      { details: { ppSize, numLayers } },
    );
  }
  const [least, over] = [Math.floor(numLayers / ppSize), numLayers % ppSize];
  return Array.from({ length: ppSize }, (_, stage) => {
    const beforeLast = ppSize - 1 - stage;
    const more = beforeLast >= 1 && beforeLast <= over ? 1 : 0;
    return Array.from({ length: least + more }, () => stage);
  }).flat();
}

export function placeOf({ ppRank = 0, ppSize = 1 }: RankGeometry): {
  ppRank: number;
  ppSize: number;
} {
  return { ppRank, ppSize };
}

export function byStage(ranks: readonly RankGeometry[]): readonly (readonly RankGeometry[])[] {
  const stages: RankGeometry[][] = [];
  for (const rank of ranks) {
    const { ppRank } = placeOf(rank);
    stages[ppRank] = [...(stages[ppRank] ?? []), rank];
  }
  return stages;
}

export function inStagesOf(
  stages: readonly (readonly RankGeometry[])[],
  ranks: readonly RankGeometry[],
): readonly RankGeometry[] {
  if (stages.length === 1) return ranks;
  return stages.flatMap(([first], ppRank) => {
    const held = new Set(first?.regions.map(({ name }) => name));
    return ranks.map(
      (rank): RankGeometry => ({
        ...rank,
        ppRank,
        ppSize: stages.length,
        regions: rank.regions.filter(({ name }) => held.has(name)),
      }),
    );
  });
}

/** @throws `KV_PLAN_UNSUPPORTED` for a decode engine with stages. */
export function refuseStagesOfDecode(decode: readonly RankGeometry[]): void {
  const [rank] = decode;
  if (rank === undefined || placeOf(rank).ppSize === 1) return;
  throw new KvError(
    "KV_PLAN_UNSUPPORTED",
    `decode has ${rank.ppSize} pipeline stages: prefill counts one notification of each tensor-parallel rank, not of each stage`,
    { hint: "run decode with one pipeline stage", details: { ppSize: rank.ppSize } },
  );
}

/** Each rank of that side gets all stages' caches. Undefined for a side without stages. */
export function withoutStages(pair: Pair, side: "prefill" | "decode"): Pair | undefined {
  const [first, ...more] = byStage(pair[side]);
  if (first === undefined || more.length === 0) return undefined;
  // Engines without stages match by the order of their regions.
  const other = byStage(pair[side === "prefill" ? "decode" : "prefill"]).map(([rank]) => rank);
  const order = other.flatMap((rank) => rank?.regions.map(({ name }) => name) ?? []);
  const ranks = first.map(({ ppRank: _, ppSize: __, ...rank }, index): RankGeometry => {
    const regions = [rank, ...more.flatMap((stage) => stage[index] ?? [])].flatMap(
      (each) => each.regions,
    );
    const sorted = regions.sort((a, b) => order.indexOf(a.name) - order.indexOf(b.name));
    return placeRegions({
      ...rank,
      regions: sorted.map(({ baseAddress: ___, ...region }) => region),
    });
  });
  return { ...pair, [side]: ranks };
}
