import { type KvCacheLayout, KvError } from "@kv/interface";
import { type EngineTransferPlan, planRequest, type RequestPlan } from "@kv/plan";
import { mergedDescriptorCount } from "@kv/plan/prove";
import type { Pair } from "../input/pair.js";
import { type AnalyseOptions, plansOf } from "./plans-of-pair.js";
import type { DescriptorCount, PostingReport } from "./report.js";
import { type PoolState, sampleRequest } from "./sample-request.js";
import { both, type Change, withFacts } from "./suggestions.js";

/**
 * Measured cost of posting one descriptor. Other links differ: cuda_ipc takes more
 * (vllm-project/vllm#55434).
 */
export const POSTING_COSTS = [
  {
    transport: "UCX",
    microsecondsEach: 1.4,
    source: "one READ of scattered descriptors in docs/bench/growth.md",
  },
  {
    transport: "LIBFABRIC",
    microsecondsEach: 2.4,
    source: "46 ms for 18,880, ai-dynamo/nixl#1514",
  },
] as const;

/** Least share of descriptors that a named change saves. */
const LEAST_SAVING = 0.25;

/**
 * The posting of a sample request at decode rank 0, without a proof.
 * @throws The errors of `plansOf`, `KV_BLOCKS_OUT_OF_RANGE`.
 */
export function postingOf(
  pair: Pair,
  numTokens: number,
): PostingReport & { readonly lengthBytes: number } {
  const first = { ...pair, decode: pair.decode.slice(0, 1) };
  const options: AnalyseOptions = {
    numTokens,
    computedBlocks: 0,
    pool: "consecutive",
    bandwidthGBps: 1,
    conversions: [],
    masksUncovered: false,
    form: undefined,
  };
  const plans = plansOf(first, options);
  const blocks = sampleRequest(first, options);
  if (blocks === undefined)
    throw new KvError("KV_BLOCKS_OUT_OF_RANGE", `the pools are too small for ${numTokens} tokens`);
  const requests = plans.map((plan) => planRequest(plan, blocks));
  const counts = plans.map((plan, index) => countDescriptors(plan, requests[index] as RequestPlan));
  const lengthBytes = requests
    .flatMap(({ reads }) => reads)
    .reduce((sum, read) => sum + read.lengthBytes, 0);
  return Object.assign(postingReport(first, options, plans, counts), { lengthBytes });
}

/**
 * The decode rank with most descriptors, and changes with fewer. `plans` and `counts` hold all
 * decode ranks, at least one.
 */
export function postingReport(
  pair: Pair,
  options: AnalyseOptions,
  plans: readonly EngineTransferPlan[],
  counts: readonly DescriptorCount[],
): PostingReport {
  const most = Math.max(...counts.map(({ descriptors }) => descriptors));
  const index = counts.findIndex(({ descriptors }) => descriptors === most);
  const [count, plan] = [counts[index], plans[index]];
  if (count === undefined || plan === undefined)
    throw new KvError("KV_INTERNAL", "a pair has a decode rank");
  const other: PoolState = options.pool === "consecutive" ? "fragmented" : "consecutive";
  const blocks = sampleRequest(pair, { ...options, pool: other });
  const inOther =
    blocks === undefined ? null : countDescriptors(plan, planRequest(plan, blocks)).merged;
  return {
    ...count,
    decodeRank: plan.local.tpRank,
    mergedByPool: { consecutive: count.merged, fragmented: count.merged, [other]: inOther },
    estimates: POSTING_COSTS.map((cost) => ({
      ...cost,
      mergedMs: (count.merged * cost.microsecondsEach) / 1000,
      scatteredMs: (count.descriptors * cost.microsecondsEach) / 1000,
    })),
    fewer: fewerWith(pair, options, index, count),
  };
}

function countDescriptors(plan: EngineTransferPlan, request: RequestPlan): DescriptorCount {
  let [descriptors, merged] = [0, 0];
  for (const read of request.reads) {
    const list = plan.sources[read.sourceIndex]?.lists[read.listIndex];
    descriptors += read.descriptorCount;
    merged += list === undefined ? read.descriptorCount : mergedDescriptorCount(read, list);
  }
  return { descriptors, merged };
}

/** Changes that save descriptors, fewest first. */
function fewerWith(
  pair: Pair,
  options: AnalyseOptions,
  rank: number,
  now: DescriptorCount,
): PostingReport["fewer"] {
  const isFewer = (found: DescriptorCount) =>
    found.descriptors <= now.descriptors &&
    found.merged <= now.merged &&
    saving(found, now) >= LEAST_SAVING;
  const found = changesOf(pair).flatMap(({ what, apply }) => {
    const counted = countOf(apply, pair, options, rank);
    return counted === undefined || !isFewer(counted) ? [] : [{ change: what, ...counted }];
  });
  return [...found].sort((one, two) => one.descriptors - two.descriptors);
}

function saving(found: DescriptorCount, now: DescriptorCount): number {
  return 1 - Math.min(found.descriptors / now.descriptors, found.merged / now.merged);
}

function countOf(
  apply: Change["apply"],
  pair: Pair,
  options: AnalyseOptions,
  rank: number,
): DescriptorCount | undefined {
  try {
    const changed = apply(pair);
    const local = changed?.decode[rank];
    const blocks = changed === undefined ? undefined : sampleRequest(changed, options);
    if (changed === undefined || local === undefined || blocks === undefined) return undefined;
    const [plan] = plansOf({ ...changed, decode: [local] }, options);
    return plan === undefined ? undefined : countDescriptors(plan, planRequest(plan, blocks));
  } catch (error) {
    // vLLM or the planner refuses the changed pair.
    if (KvError.is(error)) return undefined;
    throw error;
  }
}

/** Each change costs a plan, so those that cannot need fewer descriptors are left out. */
function changesOf(pair: Pair): readonly Change[] {
  const [p, d] = [pair.prefill[0], pair.decode[0]];
  if (p === undefined || d === undefined) return [];
  const { changed } = pair;
  // Rows hold all layers of latents. Heads are cut only between different ranks, blocks or layouts.
  const layouts: readonly KvCacheLayout[] =
    pair.numKvHeads === 1
      ? ["BLHNC"]
      : p.tpSize !== d.tpSize || p.kernelBlockSize !== d.kernelBlockSize || p.layout !== d.layout
        ? ["LBHNC"]
        : [];
  const others = layouts.filter((layout) => p.layout !== layout || d.layout !== layout);
  if (changed === undefined) {
    const tokens = largerBlock(p.kernelBlockSize, d.kernelBlockSize);
    return [
      ...others
        .filter((layout) => layout === "LBHNC")
        .map((layout) => ({
          what: `layout ${layout} on both sides`,
          apply: (one: Pair) => withFacts(one, { layout }),
        })),
      both(`kernel blocks of ${tokens} tokens on both sides`, { prefill: tokens, decode: tokens }),
    ];
  }
  const logical = (rank: typeof p) => rank.kernelBlockSize * rank.physicalBlocksPerLogical;
  const tokens = largerBlock(logical(p), logical(d));
  return [
    ...others.map((layout) => ({
      what: `--layout ${layout}`,
      apply: () => changed({ layout: [layout] }),
    })),
    { what: `--block-size ${tokens}`, apply: () => changed({ blockSize: [tokens] }) },
  ];
}

/** The larger block size, or twice the common one. */
function largerBlock(one: number, other: number): number {
  return one === other ? 2 * one : Math.max(one, other);
}
