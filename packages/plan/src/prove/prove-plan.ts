import type { StagingStage } from "@kv/interface";
import type { EngineTransferPlan } from "../engine/engine-plan-types.js";
import type { RankGeometry } from "../geometry/rank-geometry.js";
import { planRequest } from "../request/request-plan.js";
import type { RequestBlocks, RequestPlan } from "../request/request-plan-types.js";
import { regionsHolding } from "./cache-semantics.js";
import { notifiedRanks, proveNotifications } from "./notification-proof.js";
import { headsOfPass } from "./pass-effect.js";
import { FoundFault, type ProofExtent, type ProofResult } from "./proof-result.js";
import { contentsOfRegion, type ProofSubject, proofSubject } from "./proof-subject.js";
import { type ProvenPatterns, proveRequest } from "./request-proof.js";
import { sampleRequests } from "./sample-requests.js";
import { proveStage } from "./staging-proof.js";
import { proveTables } from "./table-proof.js";

/** One request to prove; `plan` is what is to be done for it, by default what `planRequest` says. */
export interface ProofRequest {
  readonly blocks: RequestBlocks;
  readonly plan?: RequestPlan;
}

export interface ProveOptions {
  /** Ranks of the remote engine, those at least that the plan reads. */
  readonly remotes: readonly RankGeometry[];
  /** KV heads of the whole model; not looked at for MLA. */
  readonly numKvHeads: number;
  /** KV heads of each group, where groups differ in them. */
  readonly groupKvHeads?: readonly number[];
  /**
   * What copies between a device and the memory that is registered do to a block, on either side: the proof then goes from device to device.
   * Ranks of one engine have one.
   */
  readonly staging?: { readonly local?: StagingStage; readonly remote?: StagingStage };
  /** Default: samples that cover the first and the last block, runs and scattered blocks, a partial last block and a prefix hit. */
  readonly requests?: readonly ProofRequest[];
}

export interface ProveEngineOptions extends Omit<ProveOptions, "requests"> {
  /** Per request, its blocks and (by local rank) what is to be done for it; by default what `planRequest` says. */
  readonly requests?: readonly { readonly blocks: RequestBlocks; readonly plans?: readonly RequestPlan[] }[];
}

/**
 * Shows that the plan of one local rank is right, or names the first fault. It looks at the plan's tables and at the request's ids, and
 * judges them by both sides' geometries and the meaning of their layouts; nothing that made the plan is used. Never throws for a fault.
 * Errors: what `planRequest` throws.
 */
export function provePlan(plan: EngineTransferPlan, options: ProveOptions): ProofResult {
  return judged(
    () => {
      const requests = (options.requests ?? sampleRequests(plan)).map(
        ({ blocks, plan: given }: ProofRequest) => ({
          blocks,
          plans: [given ?? planRequest(plan, blocks)],
        }),
      );
      for (const request of requests) notifiedRanks(plan, request.plans[0] as RequestPlan);
      return proveAll([plan], options, requests);
    },
    [plan],
    { wholeEngine: false, staged: options.staging !== undefined },
  );
}

/**
 * The same for all ranks of a local engine against one remote engine, and that each remote rank gets exactly the notifications that it
 * waits for: that takes all local ranks. `plans` has one entry per local rank.
 */
export function proveEnginePlans(
  plans: readonly EngineTransferPlan[],
  options: ProveEngineOptions,
): ProofResult {
  return judged(
    () => {
      const [first] = plans;
      const samples = options.requests ?? (first === undefined ? [] : sampleRequests(first));
      const requests = samples.map((sample: { blocks: RequestBlocks; plans?: readonly RequestPlan[] }) => ({
        blocks: sample.blocks,
        plans: sample.plans ?? plans.map((plan) => planRequest(plan, sample.blocks)),
      }));
      const extent = proveAll(plans, options, requests);
      for (const request of requests) proveNotifications(plans, options.remotes, request.plans);
      return extent;
    },
    plans,
    { wholeEngine: true, staged: options.staging !== undefined },
  );
}

interface AskedRequest {
  readonly blocks: RequestBlocks;
  /** By plan. */
  readonly plans: readonly RequestPlan[];
}

function proveAll(
  plans: readonly EngineTransferPlan[],
  options: Omit<ProveOptions, "requests">,
  requests: readonly AskedRequest[],
): ProofExtent {
  const subjects = plans.map((plan) => proofSubject(plan, options.remotes, options));
  let [descriptors, blocks, patterns] = [0, 0, 0];
  for (const subject of subjects) {
    descriptors += proveTables(subject);
    proveStages(subject, options.staging);
  }
  for (const [index, subject] of subjects.entries()) {
    const proven: ProvenPatterns = new Set();
    for (const request of requests)
      blocks += proveRequest(subject, request.blocks, request.plans[index] as RequestPlan, proven);
    patterns += proven.size;
  }
  return { descriptors, requests: requests.length, blocks, patterns };
}

function proveStages(subject: ProofSubject, staging: ProveOptions["staging"]): void {
  const { plan, remotes } = subject;
  if (staging === undefined) return;
  for (const group of plan.groups.keys()) {
    for (const region of regionsHolding(plan.local, group)) {
      const meanings = contentsOfRegion(subject, region, group);
      const own = plan.local.regions[region];
      if (staging.local !== undefined && own !== undefined) {
        const staged = { whose: "the local rank", rank: plan.local, region: own, meaning: meanings.local };
        proveStage(staging.local, staged);
      }
      for (const [index, rank] of remotes.entries()) {
        const meaning = meanings.sources[index];
        const other = rank.regions[meanings.remoteRegions[index] ?? -1];
        if (staging.remote === undefined || meaning === undefined || other === undefined) continue;
        proveStage(staging.remote, { whose: `remote rank ${rank.tpRank}`, rank, region: other, meaning });
      }
    }
  }
}

function judged(
  prove: () => ProofExtent,
  plans: readonly EngineTransferPlan[],
  { wholeEngine, staged }: { readonly wholeEngine: boolean; readonly staged: boolean },
): ProofResult {
  try {
    const extent = prove();
    return {
      proven: true,
      statements: statementsOf(wholeEngine, staged),
      assumed: assumptionsOf(plans, staged),
      extent,
    };
  } catch (error) {
    if (error instanceof FoundFault) return { proven: false, fault: error.fault };
    throw error;
  }
}

function statementsOf(wholeEngine: boolean, staged: boolean): readonly string[] {
  return [
    "every block of every region has descriptors, and they lie at the same place within each block",
    "in the requests looked at, every byte that is needed comes exactly once from the source byte of the same layer, K or V, head and token",
    "nothing but the request's blocks is written, and only the request's blocks are read",
    "tokens that the request does not have are zeroed, where the plan does not leave them to be masked",
    ...(staged
      ? [
          "staging: each byte of a block on the wire is one byte of the device's block, of the same head, token and place, and none of the device's is left out",
        ]
      : []),
    wholeEngine
      ? "each remote rank gets exactly the notifications that it waits for"
      : "no remote rank is told twice by this rank",
  ];
}

function assumptionsOf(plans: readonly EngineTransferPlan[], staged: boolean): readonly string[] {
  const assumed = new Set<string>();
  if (staged)
    assumed.add("a device block and the pool block that stands for it are paired alike in both copies");
  for (const plan of plans) {
    if (plan.conversions.includes("attention-order"))
      assumed.add(
        `the engine repacks the inside of a head from ${plan.remote.attentionBackend} to ${plan.local.attentionBackend}`,
      );
    if (plan.uncovered === "zeroed" && hasCompressedCells(plan))
      assumed.add("the engine masks tokens beyond a request's last in the last block of compressed latents");
    if (plan.uncovered === "masked") assumed.add("the engine masks tokens beyond a request's last");
  }
  return [...assumed];
}

/** Blocks that do not divide into tokens: the pass zeroes no part of one. */
function hasCompressedCells(plan: EngineTransferPlan): boolean {
  const { local, groupPlans, regionsOfGroup } = plan;
  return groupPlans.some(({ extent, localBlockTokens, localPerLogical }, group) => {
    if (extent !== "sequence" && extent !== "window") return false;
    const tokens = localBlockTokens / localPerLogical;
    return (regionsOfGroup[group] ?? []).some(
      (region) =>
        headsOfPass(plan, group, region) === 1 &&
        (local.regions[region]?.blockLengthBytes ?? 0) % tokens !== 0,
    );
  });
}
