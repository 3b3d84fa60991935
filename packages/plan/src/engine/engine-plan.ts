import { type KvCacheKind, KvError } from "@kv/interface";
import { kvHeadsOfRank, type TpMapping } from "@kv/topology";
import { invalidPlan } from "../errors.js";
import { type BlockOrder, hasPlainTokens, orderOfLayout } from "../geometry/block-format.js";
import type { ModelGeometry, RankGeometry, RegionGeometry } from "../geometry/rank-geometry.js";
import { type AlignedRank, alignRegions, withStageGroups } from "./align-regions.js";
import {
  checkCompatibility,
  isMlaModel,
  type PairFacts,
  type ReceiveConversion,
} from "./compatibility.js";
import type { RegionIndexing } from "./descriptor-tables.js";
import {
  assertContextParallelSupported,
  ranksByNumber,
  requireOneHolder,
  requireSameEngine,
  requireSameGroups,
  requireWholeShares,
} from "./engine-checks.js";
import { type GroupPlan, groupPlans } from "./group-plans.js";
import { mappingsByHeads } from "./mappings.js";
import {
  type AttentionShape,
  attentionShape,
  type PairContext,
  piecesOf,
  regionPair,
  type TransferForm,
} from "./pieces.js";
import { groupsOfRegion, headsInBlock } from "./region-heads.js";
import { type SegmentPlan, type SourcePlan, sourcePlans } from "./source-plans.js";
import { chooseForm } from "./transfer-form.js";

/**
 * The plan of one local rank against one remote engine, for all requests. Built once, after the
 * handshake; frozen.
 */
export interface EngineTransferPlan {
  readonly mapping: TpMapping;
  readonly form: TransferForm;
  /** Tells people what the form costs, or what excludes the other. */
  readonly formReason: string;
  /**
   * Descriptors of a local kernel block; with `copy` and `permute`, the remote blocks in it. Groups
   * may differ: `groupPlans`.
   */
  readonly blockSizeRatio: number;
  /** Descriptors of a remote kernel block: 1, unless it is no part of a local one. */
  readonly remoteParts: number;
  readonly groups: readonly KvCacheKind[];
  readonly local: RankGeometry;
  /** One of the remote ranks; all are equal in what `planRequest` uses. */
  readonly remote: RankGeometry;
  /** Remote ranks that are read, in the order of `mapping.allSourceRanks`, stage by stage. */
  readonly sources: readonly SourcePlan[];
  /** Notifications that each remote rank awaits: the `n` of vLLM's `"{request_id}:{n}"`. */
  readonly localConsumers: number;
  readonly notifyOnlyRanks: readonly number[];
  readonly conversions: readonly ReceiveConversion[];
  readonly localHeads: number;
  /** The receive pass needs it. */
  readonly blockOrder: BlockOrder;
  /**
   * Local tokens that no transfer covers: the receive pass zeroes them, or the engine masks them.
   */
  readonly uncovered: "zeroed" | "masked";
  /** The tables' segments: regions, or their pieces in the form `direct` and for states. */
  readonly segments: readonly SegmentPlan[];
  readonly groupPlans: readonly GroupPlan[];
  /** By segment: its place in the local tables of all sources. */
  readonly localIndexing: readonly RegionIndexing[];
  /**
   * By segment: its place in the first source's tables. Other stages differ:
   * `SourcePlan.remoteIndexing`.
   */
  readonly remoteIndexing: readonly RegionIndexing[];
  /** By group: indices of its local regions. */
  readonly regionsOfGroup: readonly (readonly number[])[];
  /**
   * By region: KV heads in a local block. A draft under MLA and layers with fewer heads differ from
   * `localHeads`.
   */
  readonly headsOfRegion: readonly number[];
  readonly stages: readonly number[];
}

/** Input of `buildEngineTransferPlan`. */
export interface BuildPlanOptions extends ModelGeometry {
  readonly local: RankGeometry;
  /** The ranks of `handshakeTargetRanks` of each pipeline stage, in any order. */
  readonly remotes: readonly RankGeometry[];
  /** Conversions that the local engine can do after a receive. @default none */
  readonly conversions?: readonly ReceiveConversion[] | undefined;
  /**
   * The local engine masks tokens after a request's last, so nothing is zeroed.
   * @default false
   */
  readonly masksUncovered?: boolean | undefined;
  /** The form where blocks must be reordered. @default the possible form with fewer descriptors */
  readonly form?: "permute" | "direct" | undefined;
  /**
   * The receive pass can access the local cache; false for device memory without staging.
   * @default true
   */
  readonly canPass?: boolean | undefined;
  /** As `CompatibilityOptions.prefixCaching`. @default true */
  readonly prefixCaching?: boolean | undefined;
}

/**
 * Builds the plan of one local rank against one remote engine. Errors have both values:
 * `KV_TOPOLOGY_INVALID` (sizes or ranks do not fit), `KV_PLAN_INVALID` (a side contradicts itself),
 * `KV_PLAN_INCOMPATIBLE` (the sides disagree), `KV_PLAN_UNSUPPORTED` (no plan for the pair).
 */
export function buildEngineTransferPlan(given: BuildPlanOptions): EngineTransferPlan {
  const options = { ...given, local: withStageGroups(given.local, given.remotes) };
  const { local, groups, numKvHeads } = options;
  if (options.remotes.length === 0)
    throw invalidPlan("a plan needs the geometry of at least one remote rank; none is given");
  const isMla = isMlaModel(groups);
  const stages = stagesOf(options);
  const [{ facts, aligned: first }] = stages as [Stage];
  const remote = first.geometry;
  if (!isMla)
    for (const rank of [local, remote]) kvHeadsOfRank(rank.tpRank, rank.tpSize, numKvHeads);
  assertContextParallelSupported(local, remote, { groups, isMla });

  const mapping = mappingsByHeads(local, remote, options);
  const main = mapping(isMla ? undefined : numKvHeads);
  const context: PairContext = { local, remote, model: options, mapping };
  const pairs = local.regions.map((region, index) => {
    const remoteRegion = stages
      .map(({ aligned }) => aligned.geometry.regions[aligned.localRegions.indexOf(index)])
      .find((found) => found !== undefined);
    if (remoteRegion !== undefined) return regionPair(context, index, region, remoteRegion);
    const ranks = options.remotes.map(({ tpRank, ppRank }) => [ppRank ?? 0, tpRank]);
    throw new KvError(
      "KV_PLAN_INCOMPATIBLE",
      `no remote rank that is given holds the cache "${region.name}"`,
      { details: { region: region.name, ranks } },
    );
  });
  requireSameGroups(pairs);
  const shapes = pairs.map((pair) =>
    pair.attentionGroups.length === 0 ? undefined : attentionShape(context, pair),
  );
  const attention = shapes.flatMap((shape) => shape ?? []);
  const plainTokens = hasPlainTokens(local, remote);
  requireWholeShares(pairs, shapes, facts, plainTokens);
  const choice = chooseForm({
    shapes: attention,
    parts: facts,
    tokens: { localParts: local.kernelBlockSize, remoteParts: remote.kernelBlockSize },
    plainTokens,
    turnsHeads: facts.conversions.includes("hnd-to-nhd"),
    canPass: options.canPass ?? true,
    wanted: options.form,
  });
  const pieces = piecesOf(context, pairs, shapes, choice);
  const { segments, sources, localIndexing } = sourcePlans(
    local,
    pieces,
    stages.map(({ ranks, aligned }) => ({ ranks: ranksByNumber(ranks, main), aligned })),
  );
  const read = new Set(sources.map(({ remoteRank }) => remoteRank));
  const order = receiveOrder(local, facts, attention, plainTokens);
  return Object.freeze({
    mapping: main,
    form: choice.form,
    formReason: choice.reason,
    blockSizeRatio: choice.parts.localParts,
    remoteParts: choice.parts.remoteParts,
    groups: Object.freeze([...groups]),
    local,
    remote,
    sources,
    localConsumers: main.localConsumers,
    notifyOnlyRanks: Object.freeze(main.handshakeRanks.filter((rank) => !read.has(rank))),
    conversions: Object.freeze(
      facts.conversions.filter((one) => one !== "hnd-to-nhd" || choice.form !== "direct"),
    ),
    localHeads: facts.localHeads,
    blockOrder: order,
    uncovered: order === "opaque" || options.masksUncovered === true ? "masked" : "zeroed",
    segments,
    groupPlans: groupPlans({ context, pieces, parts: facts, cuts: choice }),
    localIndexing,
    remoteIndexing: sources[0]?.remoteIndexing ?? [],
    regionsOfGroup: regionsOfGroup(local, options),
    headsOfRegion: Object.freeze(pairs.map(({ heads }) => headsInBlock(local, heads))),
    stages: Object.freeze(stages.map(({ ppRank }) => ppRank)),
  });
}

interface Stage {
  readonly ppRank: number;
  readonly ranks: readonly RankGeometry[];
  readonly aligned: AlignedRank;
  readonly facts: PairFacts;
}

function stagesOf(options: BuildPlanOptions): readonly Stage[] {
  const { local } = options;
  const byStage = new Map<number, RankGeometry[]>();
  for (const rank of options.remotes) {
    const ppRank = rank.ppRank ?? 0;
    byStage.set(ppRank, [...(byStage.get(ppRank) ?? []), rank]);
  }
  const stages = [...byStage].sort(([one], [other]) => one - other);
  const made = stages.map(([ppRank, ranks]): Stage => {
    const aligned = ranks.map((rank) => {
      requireSameEngine(ranks[0] as RankGeometry, rank);
      return alignRegions(local, rank);
    });
    const [first] = aligned as [AlignedRank];
    // All regions of the rank decide which groups share one; those of one stage may all name the
    // same group.
    const regions = first.localRegions.map((index) => {
      const region = local.regions[index] as RegionGeometry;
      return { ...region, groupIds: groupsOfRegion(local, region, options) };
    });
    const mine = { ...local, regions };
    const geometries = aligned.map(({ geometry }) => geometry);
    const [facts] = geometries.map((remote) =>
      checkCompatibility({ ...options, local: mine, remote }),
    ) as [PairFacts];
    return { ppRank, ranks: geometries, aligned: first, facts };
  });
  requireOneHolder(local, made);
  return made;
}

function receiveOrder(
  { layout }: RankGeometry,
  { localHeads }: PairFacts,
  attention: readonly AttentionShape[],
  plainTokens: boolean,
): BlockOrder {
  if (!plainTokens || attention.some(({ isWhole }) => isWhole)) return "opaque";
  // One head has the same order of tokens in both layouts.
  const order = orderOfLayout(layout);
  return localHeads === 1 && order === "head-major" ? "token-major" : order;
}

function regionsOfGroup(local: RankGeometry, model: ModelGeometry): readonly (readonly number[])[] {
  const regions = model.groups.map((): number[] => []);
  for (const [index, region] of local.regions.entries())
    for (const group of new Set(groupsOfRegion(local, region, model))) regions[group]?.push(index);
  return Object.freeze(regions.map((each) => Object.freeze(each)));
}
