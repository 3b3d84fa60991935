import { KvError } from "@kv/interface";
import {
  type EngineTransferPlan,
  planRequest,
  type RankGeometry,
  type RemoteRankId,
  type RequestPlan,
} from "@kv/plan";
import { headsInRegion, mergedDescriptorCount, proveEnginePlans } from "@kv/plan/prove";
import { hashPlan } from "../data/plan-hash.js";
import type { Pair } from "../input/pair.js";
import { byStage, placeOf } from "../input/pipeline-stages.js";
import type { ModelCaches } from "../model/model-caches.js";
import { type AnalyseOptions, plansOf } from "./plans-of-pair.js";
import { postingReport } from "./posting.js";
import {
  blockReports,
  cacheReports,
  kindReports,
  prefillRank,
  refusedByVllm,
  stageReports,
} from "./rank-reports.js";
import {
  type DescriptorCount,
  type EngineReport,
  type PairReport,
  type RankReport,
  REPORT_VERSION,
  type ReadReport,
  refusalReport,
} from "./report.js";
import { sampleRequest } from "./sample-request.js";
import { suggestChanges } from "./suggestions.js";
import { tierPages } from "./tier-pages.js";

/** Above this many descriptors, smaller samples are proven instead. */
const MAX_PROVEN_DESCRIPTORS = 250_000;

/**
 * Plans and proves a pair with a sample request. A planner's refusal is a report too.
 * @throws `KV_INTERNAL`.
 */
export function analysePair(pair: Pair, options: AnalyseOptions): PairReport {
  try {
    return planned(pair, options);
  } catch (error) {
    if (!KvError.is(error) || error.code === "KV_INTERNAL") throw error;
    const wouldWork = suggestChanges(pair, (other) => {
      plansOf(other, options);
    });
    return refusalReport(pair.title, error, { wouldWork, assumed: pair.assumed });
  }
}

function planned(pair: Pair, options: AnalyseOptions): PairReport {
  const plans = plansOf(pair, options);
  const [first] = plans;
  const blocks = sampleRequest(pair, options);
  if (first === undefined || blocks === undefined) {
    throw new KvError(
      "KV_BLOCKS_OUT_OF_RANGE",
      `the pools are too small for a request of ${options.numTokens} tokens`,
      { hint: "give fewer --tokens, or more --num-blocks" },
    );
  }
  const requests = plans.map((plan) => planRequest(plan, blocks));
  const ranks = plans.map((plan, index) => rankReport(pair, plan, requests[index] as RequestPlan));
  const sum = (of: (read: ReadReport) => number) =>
    ranks.reduce((all, rank) => all + rank.reads.reduce((one, read) => one + of(read), 0), 0);
  const largest = Math.max(0, ...ranks.map((rank) => rank.lengthBytes));
  const shown = plans.map((plan, index) =>
    blockReports(plan, pair.prefill, blocks, requests[index] as RequestPlan, pair),
  );
  return {
    version: REPORT_VERSION,
    outcome: "planned",
    title: pair.title,
    plannedFrom: pair.plannedFrom ?? null,
    groups: pair.groups,
    numKvHeads: pair.numKvHeads,
    prefill: engineReport(pair.prefill, pair.caches?.[0]),
    decode: engineReport(pair.decode, pair.caches?.[1]),
    kinds: pair.caches === undefined ? [] : kindReports(cacheReports(pair.caches[1]), blocks),
    form: first.form,
    formReason: first.formReason,
    blockSizeRatio: first.local.kernelBlockSize / first.remote.kernelBlockSize,
    blockOrder: first.blockOrder,
    uncovered: first.uncovered,
    conversions: first.conversions,
    request: {
      numTokens: options.numTokens,
      computedBlocks: options.computedBlocks,
      pool: options.pool,
      lengthBytes: sum((read) => read.lengthBytes),
      descriptors: sum((read) => read.descriptors),
      merged: sum((read) => read.merged),
      transferMs: largest / (options.bandwidthGBps * 1e6),
      bandwidthGBps: options.bandwidthGBps,
    },
    posting: postingReport(pair, options, plans, ranks.map(countOf)),
    stages: stageReports(pair, plans, ranks),
    ranks,
    notifications: pair.prefill.map((rank) => {
      const { tpRank, ppRank } = { ...rank, ...placeOf(rank) };
      const from = plans.flatMap((plan, index) =>
        notified(requests[index] as RequestPlan).some(
          (one) => one.tpRank === tpRank && one.ppRank === ppRank,
        )
          ? [plan]
          : [],
      );
      return {
        prefillRank: tpRank,
        prefillStage: ppRank,
        heads: headsOf(pair, rank),
        awaits: from[0]?.localConsumers ?? 0,
        from: from.map((plan) => plan.local.tpRank),
      };
    }),
    blocks: shown.flatMap((rank) => rank.reports),
    blocksLeftOut: shown.reduce((all, rank) => all + rank.leftOut, 0),
    proof: proveEnginePlans(plans, {
      remotes: pair.prefill,
      numKvHeads: pair.numKvHeads,
      groupKvHeads: pair.groupKvHeads,
      ...(sum((read) => read.descriptors) > MAX_PROVEN_DESCRIPTORS
        ? {}
        : { requests: [{ blocks, plans: requests }] }),
    }),
    refusedByVllm: refusedByVllm(pair),
    tiers: tierPages(pair),
    assumed: pair.assumed,
  };
}

function notified(request: RequestPlan): readonly RemoteRankId[] {
  const read = request.reads.map(({ remoteRank, remotePpRank }) => ({
    tpRank: remoteRank,
    ppRank: remotePpRank,
  }));
  return [...read, ...request.notify];
}

function countOf({ reads }: RankReport): DescriptorCount {
  return {
    descriptors: reads.reduce((sum, read) => sum + read.descriptors, 0),
    merged: reads.reduce((sum, read) => sum + read.merged, 0),
  };
}

function rankReport(pair: Pair, plan: EngineTransferPlan, request: RequestPlan): RankReport {
  const passes = request.receivePass?.groups ?? [];
  const mine = headsOf(pair, plan.local);
  return {
    decodeRank: plan.local.tpRank,
    heads: mine,
    reads: request.reads.map((read): ReadReport => {
      const remote = prefillRank(pair, read);
      const theirs = headsOf(pair, remote);
      const source = plan.sources[read.sourceIndex];
      const list = source?.lists[read.listIndex];
      const regions = new Set(source?.segments.map((segment) => plan.segments[segment]?.region));
      return {
        prefillRank: read.remoteRank,
        prefillStage: read.remotePpRank,
        groups: source?.groups ?? [],
        heads: [Math.max(mine[0], theirs[0]), Math.min(mine[1], theirs[1])],
        layers: regions.size,
        lengthBytes: read.lengthBytes,
        descriptors: read.descriptorCount,
        merged: list === undefined ? read.descriptorCount : mergedDescriptorCount(read, list),
      };
    }),
    notifyOnly: request.notify.map(({ tpRank, ppRank }) => ({
      prefillRank: tpRank,
      prefillStage: ppRank,
    })),
    lengthBytes: request.lengthBytes,
    permutedBlocks: passes.reduce((sum, group) => sum + group.permuteBlockIds.length, 0),
    zeroedBlocks: passes.reduce(
      (sum, { zeroBlockIds, leadingBlock, partialBlock }) =>
        sum +
        zeroBlockIds.length +
        [leadingBlock, partialBlock].filter((one) => one !== undefined).length,
      0,
    ),
    planHash: hashPlan(plan),
  };
}

/** KV heads of the first region split by heads; 0 to 1 without one. */
function headsOf(pair: Pair, rank: RankGeometry): readonly [number, number] {
  const [region] = rank.regions;
  const group = Math.max(
    0,
    pair.groups.findIndex((kind) => kind === "full" || kind === "swa"),
  );
  if (region === undefined) return [0, 1];
  const { begin, size } = headsInRegion(rank, region, group, pair);
  return [begin, begin + size];
}

function engineReport(
  ranks: readonly RankGeometry[],
  caches: ModelCaches | undefined,
): EngineReport {
  const [rank] = ranks;
  if (rank === undefined) throw new KvError("KV_PLAN_INVALID", "an engine has at least one rank");
  return {
    tpSize: rank.tpSize,
    ppSize: placeOf(rank).ppSize,
    kernelBlockSize: rank.kernelBlockSize,
    blockSize: rank.kernelBlockSize * rank.physicalBlocksPerLogical,
    groupBlockTokens: rank.groupBlockTokens ?? null,
    caches: caches === undefined ? null : cacheReports(caches),
    layout: rank.layout,
    attentionBackend: rank.attentionBackend,
    regions: byStage(ranks).reduce((sum, [first]) => sum + (first?.regions.length ?? 0), 0),
    numBlocks: Math.min(
      ...ranks.flatMap(({ regions }) => regions.map(({ numBlocks }) => numBlocks)),
    ),
    bytesPerRank: Math.max(
      ...ranks.map(({ regions }) =>
        regions.reduce((sum, region) => sum + region.numBlocks * region.blockStrideBytes, 0),
      ),
    ),
  };
}
