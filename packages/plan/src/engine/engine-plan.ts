import { type KvCacheKind, KvError } from "@kv/interface";
import { kvHeadsOfRank, type TpMapping } from "@kv/topology";
import { invalidPlan } from "../errors.js";
import { type BlockOrder, hasPlainTokens, orderOfLayout } from "../geometry/layout.js";
import type { ModelGeometry, RankGeometry, RegionGeometry } from "../geometry/rank-geometry.js";
import { type AlignedRank, alignRegions, withStageGroups } from "./align-regions.js";
import type { AttentionShape } from "./attention-pieces.js";
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
import { groupsOfRegion, headsInBlock, headsInRegion, mappingsByHeads } from "./region-heads.js";
import { attentionShape, type PairContext, piecesOf, regionPair } from "./segments.js";
import { type SegmentPlan, type SourcePlan, segmentPlans, sourcePlans } from "./source-plans.js";
import { chooseForm, type TransferForm } from "./transfer-form.js";

/**
 * The plan of one local rank against one remote engine. Built once, after the handshake; frozen. It
 * does not depend on a request.
 */
export interface EngineTransferPlan {
  /** The remote ranks that the local rank reads and notifies. */
  readonly mapping: TpMapping;
  /** How bytes get into the order of the local cache. */
  readonly form: TransferForm;
  /**
   * The reason for `form`, for people: its cost beside the other form, or the condition that
   * excludes the other form.
   */
  readonly formReason: string;
  /**
   * Descriptors of a local kernel block. For the forms `copy` and `permute`: remote blocks in a
   * local one. Groups whose blocks hold other numbers of tokens may have others: `groupPlans`.
   */
  readonly blockSizeRatio: number;
  /**
   * Descriptors of a remote kernel block: 1, unless the remote's blocks are not smaller parts of
   * the local ones.
   */
  readonly remoteParts: number;
  /** Kind of each KV cache group. */
  readonly groups: readonly KvCacheKind[];
  /** The local rank. */
  readonly local: RankGeometry;
  /** One of the remote ranks. All of them are equal in everything that `planRequest` uses. */
  readonly remote: RankGeometry;
  /** Remote ranks that are read, in the order of `mapping.allSourceRanks`, stage by stage. */
  readonly sources: readonly SourcePlan[];
  /** Notifications that each remote rank awaits: the `n` of vLLM's `"{request_id}:{n}"`. */
  readonly localConsumers: number;
  /** Remote ranks that are notified and not read. */
  readonly notifyOnlyRanks: readonly number[];
  /** Conversions that the engine must do after a receive. */
  readonly conversions: readonly ReceiveConversion[];
  /** KV heads in a local block. */
  readonly localHeads: number;
  /** Order of heads and tokens within a local block, for the receive pass. */
  readonly blockOrder: BlockOrder;
  /**
   * What happens to local tokens that no transfer covers: the receive pass zeroes them, or the
   * engine must mask them.
   */
  readonly uncovered: "zeroed" | "masked";
  /**
   * The segments of the tables. Without states, and in the forms `copy` and `permute`, each segment
   * is a region.
   */
  readonly segments: readonly SegmentPlan[];
  /** By group. */
  readonly groupPlans: readonly GroupPlan[];
  /** By segment: its place in the local tables, which is the same for all sources. */
  readonly localIndexing: readonly RegionIndexing[];
  /**
   * By segment: its place in the remote tables of the first source. Other stages have other
   * segments: `SourcePlan.remoteIndexing`.
   */
  readonly remoteIndexing: readonly RegionIndexing[];
  /** By group: indices of the local regions that hold its blocks. */
  readonly regionsOfGroup: readonly (readonly number[])[];
  /**
   * By region: KV heads in a local block. A draft under an MLA target, or layers with fewer heads,
   * differ from `localHeads`.
   */
  readonly headsOfRegion: readonly number[];
  /** Pipeline stages of the remote engine, ascending. */
  readonly stages: readonly number[];
}

/** Input of `buildEngineTransferPlan`. */
export interface BuildPlanOptions extends ModelGeometry {
  /** The local rank, which reads. */
  readonly local: RankGeometry;
  /** The ranks of `handshakeTargetRanks` of each pipeline stage, in any order. */
  readonly remotes: readonly RankGeometry[];
  /**
   * Conversions that the local engine can do after a receive. A pair that needs another one is
   * refused. @default none
   */
  readonly conversions?: readonly ReceiveConversion[] | undefined;
  /**
   * The local engine masks tokens beyond a request's last, so nothing is zeroed after a receive.
   * @default false
   */
  readonly masksUncovered?: boolean | undefined;
  /**
   * The form where blocks must be put in another order. @default the possible form with fewer
   * descriptors
   */
  readonly form?: "permute" | "direct" | undefined;
  /**
   * The receive pass can access the local cache. Give false for device memory without staging.
   * @default true
   */
  readonly canPass?: boolean | undefined;
  /** As `CompatibilityOptions.prefixCaching`. @default true */
  readonly prefixCaching?: boolean | undefined;
}

/**
 * Builds the plan of one local rank against one remote engine. Errors, each with both values:
 * `KV_TOPOLOGY_INVALID` (sizes or ranks do not fit), `KV_PLAN_INVALID` (a side contradicts itself),
 * `KV_PLAN_INCOMPATIBLE` (the sides disagree), `KV_PLAN_UNSUPPORTED` (both are sound, and there is
 * no plan for the pair).
 */
export function buildEngineTransferPlan(given: BuildPlanOptions): EngineTransferPlan {
  const options = { ...given, local: withStageGroups(given.local, given.remotes) };
  const { local, groups, numKvHeads } = options;
  if (options.remotes.length === 0)
    throw invalidPlan("a plan needs the geometry of at least one remote rank; none is given");
  const isMla = isMlaModel(groups);
  const stages = stagesOf(options);
  const [first] = stages as [Stage];
  const facts = stages.map((stage) => stage.facts)[0] as PairFacts;
  const remote = first.aligned.geometry;
  if (!isMla)
    for (const rank of [local, remote]) kvHeadsOfRank(rank.tpRank, rank.tpSize, numKvHeads);
  assertContextParallelSupported(local, remote, { groups, isMla });

  const mapping = mappingsByHeads(local, remote, options);
  const main = mapping(isMla ? undefined : numKvHeads);
  const context: PairContext = { local, remote, model: options, mapping };
  const pairs = local.regions.map((region, index) => {
    const stage = stages.find(({ aligned }) => aligned.localRegions.includes(index));
    const remoteRegion = stage?.aligned.geometry.regions[stage.aligned.localRegions.indexOf(index)];
    if (remoteRegion === undefined) {
      throw new KvError(
        "KV_PLAN_INCOMPATIBLE",
        `no remote rank that is given holds the cache "${region.name}"`,
        {
          details: {
            region: region.name,
            ranks: options.remotes.map(({ tpRank, ppRank }) => [ppRank ?? 0, tpRank]),
          },
        },
      );
    }
    return regionPair(context, index, region, remoteRegion);
  });
  requireSameGroups(pairs);
  const shapes = pairs.map((pair) =>
    pair.attentionGroups.length === 0 ? undefined : attentionShape(context, pair),
  );
  const attention = shapes.filter((shape): shape is AttentionShape => shape !== undefined);
  const order = receiveOrder(local, remote, { facts, attention });
  const plainTokens =
    hasPlainTokens(local.attentionBackend) && hasPlainTokens(remote.attentionBackend);
  requireWholeShares(pairs, shapes, facts, plainTokens);
  const choice = chooseForm({
    shapes: attention,
    parts: facts,
    kernelTokens: { local: local.kernelBlockSize, remote: remote.kernelBlockSize },
    plainTokens,
    turnsHeads: facts.conversions.includes("hnd-to-nhd"),
    canPass: options.canPass ?? true,
    wanted: options.form,
  });
  const pieces = piecesOf(context, pairs, shapes, choice);
  const segments = segmentPlans(
    pieces,
    stages.map(({ aligned }) => aligned),
  );
  const sources = sourcePlans({
    context,
    pieces,
    segments,
    stages: stages.map(({ ranks, aligned }) => ({ ranks: ranksByNumber(ranks, main), aligned })),
  });
  const handshakeRanks = main.handshakeRanks;
  const read = new Set(sources.plans.map(({ remoteRank }) => remoteRank));
  return Object.freeze({
    mapping: main,
    form: choice.form,
    formReason: choice.reason,
    blockSizeRatio: choice.parts.localParts,
    remoteParts: choice.parts.remoteParts,
    groups: Object.freeze([...groups]),
    local,
    remote,
    sources: sources.plans,
    localConsumers: main.localConsumers,
    notifyOnlyRanks: Object.freeze(handshakeRanks.filter((rank) => !read.has(rank))),
    conversions: Object.freeze(
      facts.conversions.filter((one) => one !== "hnd-to-nhd" || choice.form !== "direct"),
    ),
    localHeads: facts.localHeads,
    blockOrder: order,
    uncovered: order === "opaque" || options.masksUncovered === true ? "masked" : "zeroed",
    segments,
    groupPlans: groupPlans({ context, pieces, parts: facts, cuts: choice }),
    localIndexing: sources.localIndexing,
    remoteIndexing: sources.plans[0]?.remoteIndexing ?? [],
    regionsOfGroup: regionsOfGroup(local, options),
    headsOfRegion: Object.freeze(
      local.regions.map((region) => headsInBlock(local, headsInRegion(local, region, options))),
    ),
    stages: Object.freeze(stages.map(({ ppRank }) => ppRank)),
  });
}

interface Stage {
  readonly ppRank: number;
  readonly ranks: readonly RankGeometry[];
  readonly aligned: AlignedRank;
  readonly facts: PairFacts;
}

/**
 * The remote ranks by pipeline stage, aligned with the local regions and checked against the local
 * rank.
 */
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
    // All regions of the rank decide which groups share one; the regions of a single stage may all
    // name the same group.
    const regions = first.localRegions.map((index) => {
      const region = local.regions[index] as RegionGeometry;
      return { ...region, groupIds: groupsOfRegion(local, region, options) };
    });
    const mine = { ...local, regions };
    const facts = aligned.map(({ geometry }) =>
      checkCompatibility({ ...options, local: mine, remote: geometry }),
    );
    return {
      ppRank,
      ranks: aligned.map(({ geometry }) => geometry),
      aligned: first,
      facts: facts[0] as PairFacts,
    };
  });
  requireOneHolder(local, made);
  return made;
}

function receiveOrder(
  local: RankGeometry,
  remote: RankGeometry,
  {
    facts,
    attention,
  }: { readonly facts: PairFacts; readonly attention: readonly AttentionShape[] },
): BlockOrder {
  if (!hasPlainTokens(local.attentionBackend) || !hasPlainTokens(remote.attentionBackend))
    return "opaque";
  if (attention.some(({ isWhole }) => isWhole)) return "opaque";
  // With one head the order of tokens is the same in both layouts.
  const order = orderOfLayout(local.layout);
  return facts.localHeads === 1 && order === "head-major" ? "token-major" : order;
}

function regionsOfGroup(local: RankGeometry, model: ModelGeometry): readonly (readonly number[])[] {
  const regions = model.groups.map((): number[] => []);
  for (const [index, region] of local.regions.entries())
    for (const group of new Set(groupsOfRegion(local, region, model))) regions[group]?.push(index);
  return Object.freeze(regions.map((each) => Object.freeze(each)));
}
